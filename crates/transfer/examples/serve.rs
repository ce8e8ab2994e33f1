//! Serves a directory to the user that it runs as: `serve DIR`.

use std::error::Error;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::daemon::{Config, Daemon};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args().nth(1).ok_or("DIR")?;
    let config = Config::new("127.0.0.1:0".parse()?, Credentials::Keys(KeyPair::generate()));
    let daemon = Daemon::start(config.export("data", directory, false))?;
    println!("tw://{}/data", daemon.addrs()[0]);
    Ok(daemon.run()?)
}
