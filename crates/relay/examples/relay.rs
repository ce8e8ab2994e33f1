//! A relay over RDMA in user space: `cargo run -p thruway-relay --example relay -- KEY PEERS PORT`.

use std::time::Duration;
use thruway_auth::KeyPair;
use thruway_fabric::iwarp;
use thruway_relay::{Config, Peers, Relay};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [key, peers, port] = &arguments[..] else { return Err("KEY PEERS PORT".into()) };
    let config = Config {
        port: port.parse()?,
        listen: Vec::new(),
        provider: iwarp::Config::default().into(),
        keys: KeyPair::load(key.as_ref())?,
        peers: Peers::file(peers.into()),
        encrypt: true,
        ring: 256 << 10,
        board: "/dev/shm".into(),
        spin: Duration::from_micros(50),
        until_unused: None,
    };
    Relay::open(config)?.run()?;
    Ok(())
}
