//! Entry points for the fuzzer.

use crate::mount::Mount;
use crate::share::Shares;
use crate::v3::Nfs3;
use std::sync::{Arc, LazyLock};
use thruway_rpc::server::{Program, Programs};

/// A call of a hostile client: what it asks for is not there.
pub fn call(data: &[u8]) {
    static PROGRAMS: LazyLock<Programs> = LazyLock::new(|| {
        let shares = Arc::new(Shares::new(Vec::new(), [7; 32]).expect("names that do not exist are different"));
        Programs::new([Arc::new(Nfs3::new(Arc::clone(&shares))) as Arc<dyn Program>, Arc::new(Mount::new(shares))])
    });
    thruway_rpc::fuzzing::message(&PROGRAMS, data);
}
