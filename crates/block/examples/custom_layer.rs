//! A disk in memory with a layer of one's own on it, served by NBD to the user that this runs as: `custom_layer`, then
//! `nbdinfo nbd://ADDR:PORT`.

use std::error::Error;
use std::sync::Arc;
use thruway_block::backend::{MemoryBackend, Op};
use thruway_block::layer::Layer;
use thruway_block::{Backend, Export, nbd};
use thruway_engine::{Reactors, Segment};

/// Says what is written. Whatever else there is to a disk, the one below does.
struct Loud(MemoryBackend);

impl Layer for Loud {
    fn inner(&self) -> &dyn Backend {
        &self.0
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        println!("{} bytes at {at}", segment.len());
        self.0.write(at, segment, durable)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let reactors = Reactors::start(None)?;
    let disk = Export::new("memory", Arc::new(Loud(MemoryBackend::new(1 << 30)?)));
    let config = nbd::Config {
        listen: vec!["127.0.0.1:0".parse()?],
        exports: vec![Arc::new(disk)].into(),
        tls: None,
        own_user_only: true,
        connections_max: 16,
    };
    let server = nbd::Server::start(config, &reactors)?;
    for address in server.addresses() {
        println!("nbd://{address}");
    }
    loop {
        std::thread::park();
    }
}
