//! Flooding peers, for tests of each listener: other clients of the same reactors must still be served.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use thruway_server::budget::{BYTES_MAX, MESSAGES_MAX, largest_turn};

const CLIENTS: usize = 4;
/// Calls of all clients during one flood.
const CALLS: usize = 10_000;
/// Interval at which a flood checks its stop flag.
const POLL: Duration = Duration::from_millis(50);

/// Sends `what` repeatedly, until `stop` is set or the server closes the connection. Replies are read if `reads`, otherwise they stay in
/// the socket.
#[allow(dead_code)]
pub(crate) fn send_again_and_again(mut stream: TcpStream, what: &[u8], reads: bool, stop: &AtomicBool) {
    stream.set_write_timeout(Some(POLL)).unwrap();
    stream.set_read_timeout(Some(POLL)).unwrap();
    let mut replies = stream.try_clone().unwrap();
    let is_over = |error: &std::io::Error| !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    thread::scope(|scope| {
        if reads {
            scope.spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                while !stop.load(Ordering::Relaxed) {
                    match replies.read(&mut buffer) {
                        Ok(0) => return,
                        Err(error) if is_over(&error) => return,
                        _ => {}
                    }
                }
            });
        }
        let many = what.repeat((64 << 10) / what.len() + 1);
        let mut at = 0;
        while !stop.load(Ordering::Relaxed) {
            match stream.write(&many[at..]) {
                Ok(n) => at = (at + n) % many.len(),
                Err(error) if is_over(&error) => return,
                Err(_) => {}
            }
        }
    });
}

/// Runs `flood` in `floods` threads, while four clients connect and call. Asserts that every call is answered and that no connection
/// exceeds its budget.
pub(crate) fn serves_others_during<C>(
    name: &str,
    floods: usize,
    flood: impl Fn(&AtomicBool) + Sync,
    connect: impl Fn() -> C + Sync,
    call: impl Fn(&mut C) + Sync,
) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..floods {
            scope.spawn(|| flood(&stop));
        }
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = connect();
                    (0..CALLS / CLIENTS).for_each(|_| call(&mut client));
                })
            })
            .collect();
        let ended: Vec<_> = clients.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok), "{name}: a client was not served");
    });
    let largest = largest_turn();
    assert!(largest.messages <= MESSAGES_MAX && largest.bytes <= BYTES_MAX, "{name}: {largest:?}");
}
