//! A connection that is carried: one process of this host, and one of another, for which the link stands.

use crate::Error;
use crate::ends::End;
use crate::link::{Link, Message, PIECE_MAX};
use rustix::fd::OwnedFd;
use rustix::net::SendFlags;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use thruway_sockets::{Broken, Feedback, Inlet, Outlet, Over, Segment, Update};
use thruway_tcp::LocalSocket;

/// How long a segment may wait for its process to take it.
const OFFER_PATIENCE: Duration = Duration::from_secs(60);
/// Updates at a time.
const TURN: usize = 16;

/// See the module.
pub(crate) struct Carried {
    pub(crate) end: End,
    /// The process, and the link, by the loop's numbers.
    pub(crate) client: u64,
    pub(crate) link: u64,
    /// Its number at the other relay.
    pub(crate) peer: u32,
    pub(crate) segment: Segment,
    pub(crate) outlet: Outlet,
    pub(crate) inlet: Inlet,
    /// For doorbells. The process hands it over when it begins to use the segment.
    tcp: Option<OwnedFd>,
    /// An eventfd that the process's threads wait for when they sleep. It comes with the other.
    waker: Option<OwnedFd>,
    /// One that they wait for when the ring is full. It comes when that first is so.
    room: Option<OwnedFd>,
    is_used: bool,
    is_declined: bool,
    /// The process uses the segment, but its descriptors did not arrive.
    lacks_descriptors: bool,
    /// The interface that the socket is bound to, and its `SO_COOKIE`.
    interface: Option<u32>,
    cookie: Option<u64>,
    /// Whether a process had the connection at the last check, after the relay had returned it.
    is_held: bool,
    /// A doorbell met a connection that had ended.
    was_reset: bool,
    /// Something has happened that the process may wait for.
    has_news: bool,
    since: Instant,
}

/// What [`Carried::pump`] has done.
pub(crate) enum Pumped {
    Nothing,
    Some,
    /// The process has gone, and all of it has come to the other host.
    Over,
}

/// Why it could not.
pub(crate) enum Failed {
    /// The process has written nonsense.
    Here,
    Link(Error),
}

impl From<Broken> for Failed {
    fn from(_: Broken) -> Failed {
        Failed::Here
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed::Link(error)
    }
}

/// Errors of a connection that has ended, which the kernel reports once.
const ENDED: [rustix::io::Errno; 4] = [
    rustix::io::Errno::CONNRESET,
    rustix::io::Errno::TIMEDOUT,
    rustix::io::Errno::HOSTUNREACH,
    rustix::io::Errno::NETUNREACH,
];

/// A process has closed this connection. Returns false if the relay must close it now, so that the kernel resets it: the process has set
/// `SO_LINGER`, or the ring has bytes that it has not read (`has_unread`).
fn close_later(tcp: &OwnedFd, has_unread: bool) -> bool {
    use rustix::net::sockopt::{set_socket_linger, socket_linger};
    let linger = socket_linger(tcp).unwrap_or_default();
    if has_unread || linger == Some(Duration::ZERO) {
        let _ = set_socket_linger(tcp, Some(Duration::ZERO));
        return false;
    }
    // The relay does not wait when it closes.
    let _ = set_socket_linger(tcp, None);
    linger.is_none()
}

impl Carried {
    /// One that its process has just been handed a segment for.
    pub(crate) fn new(end: End, client: u64, link: u64, peer: u32, segment: Segment) -> Carried {
        Carried {
            end,
            client,
            link,
            peer,
            segment,
            outlet: Outlet::default(),
            inlet: Inlet::default(),
            tcp: None,
            waker: None,
            room: None,
            is_used: false,
            is_declined: false,
            lacks_descriptors: false,
            interface: None,
            cookie: None,
            is_held: true,
            was_reset: false,
            has_news: false,
            since: Instant::now(),
        }
    }

    /// The process uses the segment from now on; or it does already, and hands over more.
    pub(crate) fn use_with(&mut self, tcp: OwnedFd, waker: Option<OwnedFd>, room: Option<OwnedFd>) {
        if self.is_used && self.tcp.is_none() {
            // It has been given back, and is not to stay open here.
            return;
        }
        // Nothing in the relay waits for a process.
        let without_waiting = |fd: &OwnedFd| rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::NONBLOCK).is_ok();
        // Where this process has no descriptors left, it keeps what it has.
        self.waker = waker.filter(without_waiting).or(self.waker.take());
        self.room = room.filter(without_waiting).or(self.room.take());
        self.interface = thruway_tcp::bound_interface(&tcp).unwrap_or(None);
        self.cookie = rustix::net::sockopt::socket_cookie(&tcp).ok();
        (self.tcp, self.is_used) = (Some(tcp), true);
        if self.room.is_some() {
            self.segment.set_can_tell_room();
            self.has_news = true;
        }
    }

    /// The process does not want it any more: TCP goes on.
    pub(crate) fn decline(&mut self) {
        // Once it is used, TCP does not have all of it.
        self.is_declined |= !self.is_used;
    }

    /// The process uses the segment, but its descriptors did not arrive: the limit of open files was reached. False if earlier ones are in use.
    pub(crate) fn lack_descriptors(&mut self) -> bool {
        self.decline();
        self.lacks_descriptors = self.is_declined;
        self.is_declined
    }

    /// The process did not take the segment in time.
    fn is_late(&self) -> bool {
        !self.is_used && self.since.elapsed() > OFFER_PATIENCE
    }

    /// Carries it no more. `Lost` if bytes may be lost by that, of which the other relay should know. With the connection, if its process has
    /// closed it: the other relay may have rung before it knew of that.
    pub(crate) fn end(mut self, over: Over) -> (Over, Option<OwnedFd>) {
        self.wake(false);
        // Where neither end has begun to use it, TCP has all of it and goes on.
        let is_unused = !self.outlet.is_open() && !self.inlet.is_open();
        // The process uses the segment, and the relay cannot ring.
        let is_without = self.lacks_descriptors && !is_unused || self.is_late() && self.inlet.is_open();
        let over = match over {
            _ if is_unused => Over::Finished,
            // The kernel reports the reset once, and the relay has taken the report.
            Over::Finished if self.was_reset || is_without => Over::Lost,
            over => over,
        };
        self.segment.set_over(over);
        self.segment.tell_news();
        self.wake(true);
        if over == Over::Lost
            && let Some(tcp) = &self.tcp
        {
            // What sleeps on it wakes, at both ends. Some kernels do not reset what another thread waits for.
            if rustix::net::connect_unspec(tcp).is_err() {
                let _ = rustix::net::shutdown(tcp, rustix::net::Shutdown::Both);
            }
        }
        let is_closed =
            over == Over::Finished && self.inlet.is_reader_gone(&self.segment) && self.segment.is_tcp_left();
        let is_kept =
            is_closed && self.tcp.as_ref().is_some_and(|tcp| close_later(tcp, self.inlet.has_unread(&self.segment)));
        // SAFETY: it was the only value that this process uses.
        unsafe { self.segment.unmap() };
        (over, self.tcp.filter(|_| is_kept))
    }

    /// What the other relay says of its reader.
    pub(crate) fn receive(&mut self, feedback: &Feedback) -> Result<(), Broken> {
        self.has_news = true;
        self.outlet.receive(&self.segment, feedback)
    }

    /// What the other relay says of its writer.
    pub(crate) fn apply(&mut self, update: &Update, bytes: &[u8]) -> Result<(), Broken> {
        self.has_news = true;
        self.inlet.apply(&self.segment, update, bytes)
    }

    /// Wakes its process, if that sleeps and something has come, or there is room that it waits for, or will be none (`is_over`).
    fn wake(&mut self, is_over: bool) {
        let write =
            |to: &Option<OwnedFd>| to.as_ref().is_some_and(|to| rustix::io::write(to, &1u64.to_ne_bytes()).is_ok());
        self.inlet.wake(&self.segment, || write(&self.waker));
        self.outlet.wake(&self.segment, is_over, || write(&self.room));
    }

    /// What its process waits for, if it does, may have happened.
    pub(crate) fn tell_news(&mut self) {
        if std::mem::take(&mut self.has_news) {
            self.segment.tell_news();
        }
    }

    /// The relay has closed its descriptor on request: relatives by fork, or another program, may have the connection.
    fn is_returned(&self) -> bool {
        self.is_used && self.tcp.is_none()
    }

    /// Closes the relay's descriptor if the process has requested that.
    fn return_tcp(&mut self) {
        if self.is_used && self.segment.is_tcp_wanted_back() {
            // What sleeps at the other end is woken by the end of the connection.
            (self.tcp, self.waker, self.room) = (None, None, None);
            self.segment.set_tcp_back();
            self.has_news = true;
        }
    }

    /// Checks that a process has a connection that was returned. `find` finds a socket by its interface, its address and its peer's.
    /// `lives`: the process that used the connection lives, for kernels without socket diagnostics.
    pub(crate) fn check_holder(
        &mut self,
        lives: bool,
        find: impl FnOnce(Option<u32>, SocketAddr, SocketAddr) -> io::Result<Option<LocalSocket>>,
    ) {
        self.return_tcp();
        if self.is_returned() {
            let (own, peer) = self.end.sockets();
            self.is_held = find(self.interface, own, peer).map_or(lives, |socket| {
                // By these addresses the kernel also finds a listener or a later connection.
                socket.is_some_and(|socket| socket.is_held && self.cookie.is_none_or(|cookie| cookie == socket.cookie))
            });
        }
    }

    /// Moves what its process has done. `is_idle`: also what the other end is not urgently in need of. `lives`: the process does.
    pub(crate) fn pump(&mut self, link: &mut Link, is_idle: bool, lives: bool) -> Result<Pumped, Failed> {
        let mut did = false;
        self.return_tcp();
        let lives = if self.is_returned() { self.is_held } else { lives };
        let (tcp, has_news) = (self.tcp.as_ref(), &mut self.has_news);
        let mut was_reset = false;
        self.outlet.serve(&self.segment, || {
            *has_news = true;
            let rung = tcp.map(|tcp| rustix::net::send(tcp, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL));
            was_reset = matches!(rung, Some(Err(error)) if ENDED.contains(&error));
            rung == Some(Ok(1))
        });
        self.was_reset |= was_reset;
        self.wake(false);
        for _ in 0..TURN {
            if !link.has_room() {
                break;
            }
            let (outlet, segment) = (&mut self.outlet, &self.segment);
            if !link.send_update::<Failed>(self.peer, |out| Ok(outlet.take(segment, PIECE_MAX, out)?))? {
                break;
            }
            did = true;
        }
        if self.segment.told_over() == Over::Lost {
            return Err(Failed::Here);
        }
        let has_said_all = self.inlet.is_reader_gone(&self.segment) && self.outlet.is_ended(&self.segment);
        let is_going = has_said_all || self.segment.is_let_go() || !lives || self.is_late() || self.is_declined;
        if link.has_room()
            && let Some(feedback) = self.inlet.feedback(&self.segment, is_idle || is_going)?
        {
            link.send(&Message::Feedback { id: self.peer, feedback })?;
            did = true;
        }
        // A word that the process has begun to say is not waited for: it has gone.
        if is_going && !did && self.outlet.is_drained(&self.segment) {
            if !lives && !has_said_all && !self.segment.is_let_go() && !self.inlet.is_closed() {
                // It was killed. Or it was not, and has a relative that would go on without what is on its way.
                let _ = self.tcp.as_ref().map(|tcp| rustix::net::shutdown(tcp, rustix::net::Shutdown::Both));
            }
            return Ok(Pumped::Over);
        }
        Ok(if did { Pumped::Some } else { Pumped::Nothing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_sockets::iovecs::Pieces;
    use thruway_sockets::{Reader, Tcp};

    /// For a reader that only becomes ready.
    struct Unused;

    impl Tcp for Unused {
        fn written(&self) -> io::Result<u64> {
            unreachable!()
        }
        fn available(&self) -> io::Result<usize> {
            unreachable!()
        }
        fn received(&self) -> io::Result<u64> {
            unreachable!()
        }
        fn read(&self, _: &Pieces<'_>, _: usize) -> io::Result<usize> {
            unreachable!()
        }
        fn peek(&self, _: &Pieces<'_>, _: usize, _: usize) -> io::Result<usize> {
            unreachable!()
        }
        fn skip(&self, _: usize) -> io::Result<usize> {
            unreachable!()
        }
        unsafe fn send(&self, _: *const u8, _: usize) -> io::Result<usize> {
            unreachable!()
        }
        fn flush(&self) {
            unreachable!()
        }
        fn doorbell(&self) -> bool {
            unreachable!()
        }
    }

    #[test]
    fn a_connection_in_use_whose_descriptors_do_not_arrive_is_lost() {
        for (is_used, lacks, over) in
            [(true, true, Over::Lost), (false, true, Over::Finished), (false, false, Over::Finished)]
        {
            let (segment, fd) = Segment::create(4096).unwrap();
            let process = Segment::adopt(fd).unwrap().as_relayed();
            let end = End { addresses: [4; 40], is_higher: false };
            let mut one = Carried::new(end, 1, 1, 1, segment);
            if is_used {
                Reader::new(thruway_sockets::End::Taker, 0).set_ready(&process, &Unused);
            }
            one.inlet.feedback(&one.segment, true).unwrap();
            if lacks {
                one.lack_descriptors();
            } else {
                one.decline();
            }
            assert_eq!(one.end(Over::Finished).0, over, "used: {is_used}, without descriptors: {lacks}");
            assert_eq!(process.over(), over);
            // SAFETY: this test's own mapping.
            unsafe { process.unmap() };
        }
    }
}
