//! Connections that their processes have closed.
//!
//! A doorbell that meets a closed socket resets the connection, and bytes that are on their way to the other end are lost. So the relay keeps its
//! descriptor for a while, and discards doorbells. The process has ended its direction before.

use rustix::fd::OwnedFd;
use rustix::net::RecvFlags;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Longest time that a connection is kept. A doorbell arrives within one round trip of the end of the connection.
const KEPT_FOR: Duration = Duration::from_secs(1);
/// Most connections that are kept. Beyond, the oldest are closed.
const KEPT_MAX: usize = 512;
/// Time between two looks while nothing else is to be done.
pub(crate) const INTERVAL: Duration = Duration::from_millis(20);

/// Most doorbells that one connection brings, and most bytes that are read in one look at it. More are data.
const DOORBELLS_MAX: usize = 4096;
const LOOK_MAX: usize = 1024;

struct Kept {
    tcp: OwnedFd,
    since: Instant,
    discarded: usize,
}

/// Connections that are kept, the oldest first.
#[derive(Default)]
pub(crate) struct Closing {
    kept: VecDeque<Kept>,
    looked: Option<Instant>,
}

impl Closing {
    /// Keeps a connection.
    pub(crate) fn add(&mut self, tcp: OwnedFd) {
        if self.kept.len() == KEPT_MAX
            && let Some(mut oldest) = self.kept.pop_front()
        {
            oldest.has_ended();
        }
        self.kept.push_back(Kept { tcp, since: Instant::now(), discarded: 0 });
    }

    pub(crate) fn len(&self) -> usize {
        self.kept.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Every [`INTERVAL`]: discards doorbells. Closes connections that have been kept for long, that the other end has closed, and on which data
    /// arrives: the kernel resets these, as it does when bytes arrive for a process that has closed.
    pub(crate) fn look(&mut self, now: Instant) {
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < INTERVAL) {
            return;
        }
        self.looked = Some(now);
        self.kept.retain_mut(|one| !one.has_ended() && now.saturating_duration_since(one.since) < KEPT_FOR);
    }
}

impl Kept {
    /// Discards doorbells. True if the connection is to be closed.
    fn has_ended(&mut self) -> bool {
        let mut bytes = [0u8; 64];
        for _ in 0..LOOK_MAX / bytes.len() {
            // If bytes stay unread, the kernel resets the connection when it is closed.
            match rustix::net::recv(&self.tcp, &mut bytes, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(_) | Ok((0, _)) => return true,
                Ok((len, _)) if self.discarded + len > DOORBELLS_MAX || bytes[..len].iter().any(|byte| *byte != 0) => {
                    return true;
                }
                Ok((len, _)) => {
                    self.discarded += len;
                    let _ = rustix::net::recv(&self.tcp, &mut bytes[..len], RecvFlags::DONTWAIT);
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// Looks until a condition holds.
    fn look_until(closing: &mut Closing, holds: impl Fn(&Closing) -> bool) {
        while !holds(closing) {
            closing.look(Instant::now());
            std::thread::yield_now();
        }
    }

    #[test]
    fn doorbells_are_discarded_and_bytes_on_their_way_arrive() {
        let (mut one, mut other) = pair();
        let mut closing = Closing::default();
        other.write_all(b"last bytes").unwrap();
        other.shutdown(std::net::Shutdown::Write).unwrap();
        closing.add(other.into());
        one.write_all(&[0, 0]).unwrap();
        closing.look(Instant::now());
        let mut got = Vec::new();
        one.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"last bytes");
        drop(one);
        look_until(&mut closing, Closing::is_empty);
    }

    #[test]
    fn data_for_a_closed_process_resets_the_connection() {
        let (mut one, other) = pair();
        let mut closing = Closing::default();
        closing.add(other.into());
        one.write_all(b"data").unwrap();
        look_until(&mut closing, Closing::is_empty);
        assert_eq!(one.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn zeros_without_end_are_data() {
        let (mut one, other) = pair();
        let mut closing = Closing::default();
        closing.add(other.into());
        let zeros = std::thread::spawn(move || while one.write_all(&[0; 1000]).is_ok() {});
        let begin = Instant::now();
        // As if time passed quickly, but for less than a connection is kept.
        let mut looks = 0;
        while !closing.is_empty() {
            closing.looked = None;
            closing.look(begin);
            looks += 1;
            std::thread::yield_now();
        }
        assert!(looks > DOORBELLS_MAX / LOOK_MAX, "one look reads little: {looks}");
        zeros.join().unwrap();
    }

    #[test]
    fn connections_are_kept_for_a_limited_time_and_number() {
        let mut closing = Closing::default();
        let (one, other) = pair();
        closing.add(other.into());
        closing.look(Instant::now() + KEPT_FOR);
        assert!(closing.is_empty(), "kept for too long");
        let kept: Vec<OwnedFd> = (0..KEPT_MAX + 2).map(|_| one.try_clone().unwrap().into()).collect();
        kept.into_iter().for_each(|tcp| closing.add(tcp));
        assert_eq!(closing.kept.len(), KEPT_MAX);
    }
}
