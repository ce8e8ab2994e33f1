//! Connections to another host: waits for what this host's relay has to say, or to do.

use crate::data::{broken, keep_error};
use crate::signals::{self, Handlers};
use crate::slots::{Receiving, Sending, Slot};
use crate::tcp::Connection;
use libc::c_int;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use thruway_sockets::{News, Over, Segment};

/// Longest time that a call waits for the relay to say what the TCP connection has brought, or that the other host has what was sent.
pub(crate) const CATCH_UP_MAX: Duration = Duration::from_secs(10);
/// Longest time that waiting for readiness does: it may hold up what other threads wait for.
const SOON: Duration = Duration::from_millis(50);
/// Longest time that a peer on another host has to take note of a ring that is closed: there and back, where the end is there.
const DEMOTE_MAX: Duration = Duration::from_secs(3);
/// Longest time that a call which closes waits for the relay to let go of the connection.
const CLOSE_MAX: Duration = Duration::from_millis(200);
/// Longest time that a call which sends waits for a reader that takes nothing, before it looks whether that has gone.
const ROOM_MAX: Duration = Duration::from_secs(1);
/// How long such a wait looks again and again before it sleeps: messages between relays take microseconds.
const SPIN: Duration = Duration::from_micros(50);
/// A relay that has had nothing to say for so long may have gone.
const STALL: Duration = Duration::from_millis(10);

/// Milliseconds that the relay has been waited for in vain since it last answered.
static UNANSWERED: AtomicU32 = AtomicU32::new(0);

/// Time for a connection that is to end: what the relay has already had does not come again for each, but it has a little for any.
pub(crate) fn at_end(limit: Duration) -> Duration {
    limit.saturating_sub(Duration::from_millis(UNANSWERED.load(Ordering::Relaxed).into())).max(limit / 100)
}

/// Time to close a ring before something else uses the connection.
pub(crate) fn closing_time(segment: &Segment) -> Duration {
    if segment.is_relayed() { at_end(DEMOTE_MAX) } else { Duration::from_millis(100) }
}

/// A wait for the relay, which is at work (or within a host for the peer, with looks alone): [`Pause::look`], then a look at the segment, and if that does not find what is wanted,
/// [`Pause::pass`].
#[derive(Default)]
pub(crate) struct Pause {
    begin: Option<Instant>,
    /// The relay was woken, if it slept: it may have to do something first.
    has_called: bool,
    news: Option<News>,
    /// The relay is known to have lived when this began to sleep, or has had news since.
    is_alive: bool,
    /// A signal handler has run meanwhile.
    is_interrupted: bool,
    has_waited: bool,
    /// How often the relay has had nothing to say.
    stalls: u32,
}

impl Pause {
    /// Before a look at the segment.
    pub(crate) fn look(&mut self, segment: &Segment, fd: c_int) {
        let Some(begin) = self.begin.filter(|_| segment.is_relayed()) else { return };
        let connection = Connection::new(fd);
        if !std::mem::replace(&mut self.has_called, true) {
            segment.wake_relay(&connection);
        }
        if begin.elapsed() < SPIN {
            return;
        }
        self.news = Some(segment.want_news());
        if !std::mem::replace(&mut self.is_alive, true) {
            segment.check_relay(&connection);
        }
    }

    /// Lets others run until there may be something. False if it has taken longer than `limit`.
    pub(crate) fn pass(&mut self, limit: Duration) -> bool {
        self.pass_within(limit, limit)
    }

    /// As [`Pause::pass`], for no longer than `left` this time.
    fn pass_within(&mut self, limit: Duration, left: Duration) -> bool {
        let waited = self.begin.get_or_insert_with(Instant::now).elapsed();
        match self.news.take() {
            None => std::thread::yield_now(),
            Some(news) => {
                // More and more rarely: a reader that takes nothing for an hour is no reason to look a hundred times a second.
                let stall = STALL * (1 << self.stalls.min(6));
                let waited = news.wait(stall.min(left)).map_err(|error| error.kind());
                self.is_alive = waited != Err(io::ErrorKind::TimedOut);
                self.stalls += u32::from(!self.is_alive);
                self.is_interrupted |= waited == Err(io::ErrorKind::Interrupted);
            }
        }
        self.has_waited = waited < limit;
        if !self.has_waited && self.has_called {
            UNANSWERED.fetch_max(waited.as_millis() as u32, Ordering::Relaxed);
        }
        self.has_waited
    }

    /// What was waited for has come: what is waited for next has time of its own.
    pub(crate) fn restart(&mut self) {
        if self.begin.is_some() {
            let is_interrupted = self.is_interrupted;
            *self = Pause::default();
            self.is_interrupted = is_interrupted;
        }
    }

    /// Ends a call that sends if a signal has come while this waited, as the kernel does: some bytes are a success in any case.
    pub(crate) fn check_signals(&mut self, has_sent: bool) -> Result<(), c_int> {
        match std::mem::take(&mut self.is_interrupted) && (has_sent || signals::handlers() != Handlers::Restart) {
            true => Err(libc::EINTR),
            false => Ok(()),
        }
    }

    /// As [`Pause::pass`], for a connection that is broken if it takes longer.
    pub(crate) fn settle_down(&mut self, slot: &Slot, fd: c_int, limit: Duration) -> Result<(), c_int> {
        if self.pass(limit) {
            return Ok(());
        }
        Err(broken(slot, fd, &io::ErrorKind::TimedOut.into()))
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        if self.has_waited && self.has_called {
            UNANSWERED.store(0, Ordering::Relaxed);
        }
    }
}

/// Whether a connection goes on through a relay, to another host.
pub(crate) fn is_relayed(slot: &Slot) -> bool {
    matches!(slot.receiving(), Ok(Some(receiving)) if receiving.segment.is_relayed())
}

/// Whether the way to the other host was cut.
pub(crate) fn is_lost(slot: &Slot) -> bool {
    matches!(slot.receiving(), Ok(Some(receiving)) if receiving.segment.over() == Over::Lost)
}

/// At the end of the TCP connection: whether everything before it has come, too.
pub(crate) fn is_all_here(slot: &Slot, fd: c_int) -> bool {
    // An end of this process's own making says nothing of the peer.
    slot.shut.load(Ordering::Relaxed) & 1 != 0 || is_explained(slot, fd, true)
}

/// Whether it is known what the kernel has.
pub(crate) fn explains(slot: &Slot, fd: c_int) -> bool {
    is_explained(slot, fd, false)
}

fn is_explained(slot: &Slot, fd: c_int, is_at_end: bool) -> bool {
    match slot.receiving() {
        Ok(Some(mut receiving)) => {
            let Receiving { segment, reader, .. } = &mut receiving;
            let is_explained = reader.is_explained(segment, &Connection::new(fd), is_at_end).unwrap_or(true);
            keep_error(slot, reader);
            is_explained
        }
        _ => true,
    }
}

/// From another host, the TCP connection brings bytes, and its end, that are only known for what they are when the relay has said so:
/// soon. Waits for that also where the call does not wait: the kernel has said that there is something, and says so once.
pub(crate) fn catch_up(slot: &Slot, fd: c_int, is_at_end: bool) -> Result<(), c_int> {
    if catch_up_within(slot, fd, is_at_end, CATCH_UP_MAX)? {
        return Ok(());
    }
    Err(broken(slot, fd, &io::ErrorKind::TimedOut.into()))
}

/// As [`catch_up`], for who looks whether there is something: the call that receives waits for longer. False if it is not known yet.
pub(crate) fn catch_up_soon(slot: &Slot, fd: c_int) -> bool {
    catch_up_within(slot, fd, false, SOON) == Ok(true)
}

fn catch_up_within(slot: &Slot, fd: c_int, is_at_end: bool, limit: Duration) -> Result<bool, c_int> {
    let mut pause = Pause::default();
    loop {
        let Some(mut receiving) = slot.receiving()? else { return Ok(true) };
        let Receiving { segment, reader, .. } = &mut receiving;
        pause.look(segment, fd);
        let is_explained = reader.is_explained(segment, &Connection::new(fd), is_at_end);
        keep_error(slot, reader);
        drop(receiving);
        if is_explained.map_err(|error| broken(slot, fd, &error.into()))? {
            return Ok(true);
        }
        if !pause.pass(limit) {
            return Ok(false);
        }
    }
}

/// Waits until there is room in a ring, in a call that may wait: bytes that are sent stay in their order without a way by TCP, which costs a
/// round trip to get to and another one to come back from, and does not encrypt. Not for ever: the caller looks what else there is.
/// `has_sent`: some bytes of the call have gone. `left`: what the call's time limit leaves; EAGAIN if nothing.
pub(crate) fn wait_for_room(
    slot: &Slot,
    fd: c_int,
    wanted: usize,
    has_sent: bool,
    left: Option<Duration>,
) -> Result<(), c_int> {
    if left == Some(Duration::ZERO) {
        return Err(libc::EAGAIN);
    }
    let limit = left.map_or(ROOM_MAX, |left| left.min(ROOM_MAX));
    let begin = Instant::now();
    let (mut pause, mut unread) = (Pause::default(), None);
    loop {
        let Some(mut sending) = slot.sending()? else { return Ok(()) };
        let Sending { segment, writer, .. } = &mut sending;
        pause.look(segment, fd);
        let is_over = writer.is_tcp() || writer.is_closed_by_reader(segment) || writer.is_reader_gone(segment);
        if is_over || writer.has_room(segment, wanted) != Ok(false) {
            return Ok(());
        }
        let now = writer.unread(segment);
        drop(sending);
        if unread.replace(now).is_some_and(|before| before != now) {
            (pause.begin, pause.stalls) = (None, 0);
        }
        // As in the kernel: a call with a time limit is not begun again behind a signal handler.
        pause.check_signals(has_sent || left.is_some())?;
        let left = limit.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Ok(());
        }
        // What is waited for here is the reader, which says nothing of the relay.
        pause.pass_within(CATCH_UP_MAX, left);
        pause.has_waited = false;
    }
}

/// Before bytes go by TCP to another host, what is in the ring has come there.
pub(crate) fn is_settled(sending: &Sending<'_>, fd: c_int, pause: &mut Pause) -> bool {
    pause.look(&sending.segment, fd);
    sending.writer.is_settled(&sending.segment)
}

/// Has the relay let go of the connection, so that closing it here closes it.
pub(crate) fn take_tcp_back(segment: &Segment, fd: c_int) {
    let (mut pause, limit) = (Pause::default(), at_end(CLOSE_MAX));
    let is_back = |pause: &mut Pause| {
        pause.look(segment, fd);
        segment.take_tcp_back(&Connection::new(fd))
    };
    while segment.is_relayed() && !is_back(&mut pause) && pause.pass(limit) {}
}
