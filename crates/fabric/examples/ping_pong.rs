//! Round trips of a message between two ends: `ping_pong` listens, `ping_pong ADDR:PORT` measures.

use std::time::Instant;
use thruway_fabric::messages::{MessageListener, Messages};
use thruway_fabric::{Provider, iwarp};

const ROUND_TRIPS: u32 = 10_000;

fn main() -> thruway_fabric::Result<()> {
    let provider = Provider::Iwarp(iwarp::Config::default());
    let Some(peer) = std::env::args().nth(1) else {
        let listener = MessageListener::bind(&provider, "0.0.0.0:7118".parse().expect("an address"), 64)?;
        println!("listening on {}", listener.local_addr());
        loop {
            let mut peer = listener.accept()?;
            while let Some(message) = peer.recv()? {
                peer.send(&message)?;
            }
        }
    };
    let mut peer = Messages::connect(&provider, peer.parse().expect("ADDR:PORT"), 64)?;
    let start = Instant::now();
    for _ in 0..ROUND_TRIPS {
        peer.send(b"ping")?;
        peer.recv()?;
    }
    println!("{:?} for a round trip", start.elapsed() / ROUND_TRIPS);
    peer.close()
}
