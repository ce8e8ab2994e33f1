//! All integration tests of the crate, as one program: it is linked once.

mod flood;
#[path = "../../server/tests/support/flood.rs"]
mod flood_peers;
mod lost;
mod rdma;
mod support;
