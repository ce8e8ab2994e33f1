//! A client that has lost its connection comes back by another: nothing of the first overtakes the second.

#[path = "../../thruway/tests/support/nbd.rs"]
mod client;

use client::{FLUSH, FUA, Nbd, READ, WRITE};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use thruway_block::backend::{Extent, MemoryBackend, Op, Zero};
use thruway_block::nbd::{Config, Server};
use thruway_block::net::Address;
use thruway_block::{Backend, Export, Geometry, Served};
use thruway_engine::{Reactors, Segment};

/// A disk whose first write takes until it is told to go on.
struct Stuck {
    below: MemoryBackend,
    first: AtomicBool,
    begun: Sender<()>,
    go_on: Mutex<Option<tokio::sync::oneshot::Receiver<()>>>,
}

impl Backend for Stuck {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        self.below.read(at, segment)
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        Box::pin(async move {
            if !self.first.swap(true, Ordering::SeqCst) {
                let go_on = self.go_on.lock().unwrap().take().unwrap();
                self.begun.send(()).unwrap();
                go_on.await.unwrap();
            }
            self.below.write(at, segment, durable).await
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        self.below.flush()
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.below.zero(at, len, how)
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.below.discard(at, len)
    }

    fn extents(&self, at: u64, len: u64) -> Op<'_, Vec<Extent>> {
        self.below.extents(at, len)
    }
}

struct Lab {
    address: String,
    begun: Receiver<()>,
    go_on: tokio::sync::oneshot::Sender<()>,
    _server: Server,
    _reactors: Reactors,
}

fn lab() -> Lab {
    let ((begun_tell, begun), (go_on, wait)) = (channel(), tokio::sync::oneshot::channel());
    let stuck = Stuck {
        below: MemoryBackend::new(1 << 20).unwrap(),
        first: AtomicBool::new(false),
        begun: begun_tell,
        go_on: Mutex::new(Some(wait)),
    };
    let export = Export {
        kind: "a test",
        name: "d".into(),
        description: "a disk that is stuck".into(),
        identity: [1; 16],
        is_lasting: false,
        allow: Vec::new(),
        fence: thruway_block::fence::Fence::default(),
        backend: Arc::new(Served::new(Arc::new(stuck))),
        read_only: false,
        chunk: 64 << 10,
        target: None,
        sector: 512,
    };
    let reactors = Reactors::start(Some(2)).unwrap();
    let config = Config {
        listen: vec![Address::Tcp("127.0.0.1:0".parse().unwrap())],
        exports: vec![Arc::new(export)].into(),
        tls: None,
        own_user_only: true,
        connections_max: 8,
    };
    let server = Server::start(config, &reactors).unwrap();
    let address = server.addresses()[0].to_string();
    Lab { address, begun, go_on, _server: server, _reactors: reactors }
}

#[test]
fn a_write_of_a_lost_connection_does_not_undo_one_of_the_next() {
    let lab = lab();
    let mut first = Nbd::connect(&lab.address, "d").unwrap();
    first.send((0, WRITE), 0, 512, &[1; 512]).unwrap();
    lab.begun.recv().unwrap();
    drop(first);
    let mut second = Nbd::connect(&lab.address, "d").unwrap();
    // The one that was not answered again, and another after it. Reads wait for nobody.
    assert_eq!(second.ask((0, READ), 0, 512, &[]).unwrap().unwrap(), [0; 512]);
    second.send((0, WRITE), 0, 512, &[1; 512]).unwrap();
    second.send((FUA, WRITE), 4096, 512, &[3; 512]).unwrap();
    let mut third = Nbd::connect(&lab.address, "d").unwrap();
    assert_eq!(third.ask((0, READ), 0, 512, &[]).unwrap().unwrap(), [0; 512], "nothing has overtaken the first");
    assert_eq!(third.ask((0, READ), 4096, 512, &[]).unwrap().unwrap(), [0; 512]);
    lab.go_on.send(()).unwrap();
    for _ in 0..2 {
        second.answer().unwrap();
    }
    second.ask((0, WRITE), 0, 512, &[2; 512]).unwrap().unwrap();
    second.ask((0, FLUSH), 0, 0, &[]).unwrap().unwrap();
    assert_eq!(third.ask((0, READ), 0, 512, &[]).unwrap().unwrap(), [2; 512]);
    assert_eq!(third.ask((0, READ), 4096, 512, &[]).unwrap().unwrap(), [3; 512]);
}
