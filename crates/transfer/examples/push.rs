//! Copies a file or a tree to a daemon of the same user on this host: `push SOURCE ADDR:PORT EXPORT [PATH]`.

use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::Duration;
use thruway_transfer::Client;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::client::{Job, Remote};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [source, addr, export, rest @ ..] = args.as_slice() else {
        return Err("SOURCE ADDR:PORT EXPORT [PATH]".into());
    };
    let path = rest.first().map_or("", String::as_str);
    let remote = Remote::new(addr.parse()?, Credentials::Keys(KeyPair::generate()));
    let transfer = Client::new()?.start(Job::push(remote, source, export, path))?;
    while !transfer.is_finished() {
        eprint!("\r{} bytes", transfer.progress().bytes.load(Ordering::Relaxed));
        std::thread::sleep(Duration::from_millis(200));
    }
    let summary = transfer.wait()?.summary;
    eprintln!("\r{} bytes in {} files", summary.bytes, summary.files);
    Ok(())
}
