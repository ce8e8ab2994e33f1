//! Connections that are lost while their calls are in progress.

use crate::support;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use support::{call, serve};
use thruway_engine::Reactors;
use thruway_rpc::server::{Answer, Call, Outcome, Program};
use thruway_rpc::xdr::Encoder;
use tokio::sync::Semaphore;

const PROGRAM: u32 = 0x2000_0003;
/// Waits without changing anything.
const READS: u32 = 1;
/// Changes something, and then waits.
const CHANGES: u32 = 2;

struct Waiting {
    begun: AtomicUsize,
    ended: AtomicUsize,
    go_on: Semaphore,
}

impl Program for Waiting {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        1..=1
    }

    fn announces_changes(&self) -> bool {
        true
    }

    fn call<'a>(&'a self, call: &'a Call, results: Encoder) -> Answer<'a> {
        if call.procedure == CHANGES {
            call.begin_change();
        }
        Box::pin(async move {
            self.begun.fetch_add(1, Ordering::SeqCst);
            self.go_on.acquire().await.unwrap().forget();
            self.ended.fetch_add(1, Ordering::SeqCst);
            Outcome::Results(results)
        })
    }
}

/// Fails only if the server hangs.
fn wait_until(what: &str, is_done: impl Fn() -> bool) {
    for _ in 0..6000 {
        if is_done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what}");
}

#[test]
fn calls_that_have_changed_nothing_end_with_their_connection() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (begun, ended, go_on) = (AtomicUsize::new(0), AtomicUsize::new(0), Semaphore::new(0));
    let program = Arc::new(Waiting { begun, ended, go_on });
    let (server, address) = serve(Arc::clone(&program) as Arc<dyn Program>, &reactors);
    let connect = |procedure, calls: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        let before = program.begun.load(Ordering::SeqCst);
        (0..calls).for_each(|xid| stream.write_all(&call(PROGRAM, procedure, xid as u32)).unwrap());
        wait_until("the calls begin", || program.begun.load(Ordering::SeqCst) == before + calls);
        stream
    };
    let reset = |stream: TcpStream| {
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        drop(stream);
    };

    // None of these ends by itself.
    reset(connect(READS, 100));
    wait_until("the connection ends", || server.connections() == 0);
    assert_eq!(program.ended.load(Ordering::SeqCst), 0);

    // What has changed something is completed.
    reset(connect(CHANGES, 10));
    let other = connect(READS, 1);
    assert_eq!(server.connections(), 2);
    program.go_on.add_permits(11);
    wait_until("the calls end", || program.ended.load(Ordering::SeqCst) == 11 && server.connections() == 1);
    drop(other);

    // A client that only sends nothing more gets its replies.
    let mut half_closed = connect(READS, 3);
    half_closed.shutdown(std::net::Shutdown::Write).unwrap();
    program.go_on.add_permits(3);
    let mut replies = Vec::new();
    half_closed.read_to_end(&mut replies).unwrap();
    assert_eq!(replies.len(), 3 * (4 + 24));
}
