//! The memory that the two ends of an accelerated connection share: a ring of bytes for each direction, and what each end tells the
//! other about it.
//!
//! A peer may write anything anywhere in it at any time. Each end keeps its own positions to itself ([`Writer`](crate::Writer),
//! [`Reader`](crate::Reader)) and publishes copies; what it reads of the other's is read once, checked, and can do no more than garble
//! the peer's own connection.

use crate::direction::Tcp;
use crate::news::{News, Words};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use thruway_memory::sealed;

/// Least and most bytes of a ring.
pub const RING_MIN: usize = 4 << 10;
/// Least and most bytes of a ring.
pub const RING_MAX: usize = 4 << 20;

/// Everything before the rings.
const CONTROL: usize = 4096;

/// How many runs of TCP bytes a direction can have that its reader has not reached the end of.
pub(crate) const RUNS: usize = 16;

/// In [`Control::tail`]: the reader takes nothing more from the ring.
pub(crate) const CLOSED: u64 = 1;
/// In [`Control::tail`]: the writer sends by TCP.
pub(crate) const BY_TCP: u64 = 2;
/// In [`Control::tail`]: where the position begins.
pub(crate) const POSITION: u32 = 2;

/// The end of a run that has not ended.
pub(crate) const OPEN: u64 = u64::MAX;

/// Bytes that go by TCP between two stretches of the ring. Written by the writer before the reader can know of it, but for `end`.
#[repr(C)]
pub(crate) struct Run {
    /// The run comes behind this byte of the ring.
    pub(crate) ring: AtomicU64,
    /// Its first byte in the TCP connection. What precedes it, back to the end of the run before, are doorbells.
    pub(crate) start: AtomicU64,
    /// Its end in the TCP connection, or [`OPEN`].
    pub(crate) end: AtomicU64,
}

/// The control words of one direction, on cache lines apart by who writes them.
#[repr(C, align(128))]
pub(crate) struct Control {
    /// Bytes ever written to the ring, [`POSITION`] bits up, and [`CLOSED`] and [`BY_TCP`].
    pub(crate) tail: AtomicU64,
    /// Runs that have begun. The first one is there from the beginning.
    pub(crate) opened: AtomicU32,
    /// The writer has ended its direction of the TCP connection, or is about to.
    pub(crate) ended: AtomicU32,
    /// Doorbells that the writer has begun to ring, and has rung.
    pub(crate) ringing: AtomicU64,
    pub(crate) rung: AtomicU64,
    /// Progress of [`Control::returned`]: [`STOPPED`], and [`POSITION`] bits up the bytes written to the TCP connection by then, plus the
    /// returned bytes sent again. 0 before the writer has stopped.
    pub(crate) resent: AtomicU64,
    /// The last run has no end: the writer sends by TCP for good.
    pub(crate) for_good: AtomicU32,
    _writer: [u8; 84],
    /// Bytes ever read from the ring.
    pub(crate) head: AtomicU64,
    /// Runs that the reader has come to the end of.
    pub(crate) done: AtomicU32,
    /// [`READY`] and [`GONE`].
    pub(crate) reader: AtomicU32,
    /// After the ring was closed: the reader returns bytes through the ring's memory, for the writer to send again by TCP. Their number,
    /// [`POSITION`] bits up, with [`RETURNS`] and [`RETURNED_ALL`].
    pub(crate) returned: AtomicU64,
    _reader: [u8; 104],
    /// The reader wants to be woken by what comes next: 0, or a number of [`WakeBy`].
    pub(crate) armed: AtomicU32,
    /// Relayed: the reader takes nothing more from the ring, and waits until the writer cannot put anything there.
    pub(crate) close_wanted: AtomicU32,
    /// Within a host: the reader wants one doorbell for bytes that the ring has already.
    pub(crate) asked: AtomicU32,
    _armed: [u8; 116],
    /// Relayed: so many bytes have come to the far ring, and its reader, if it slept, has been rung.
    pub(crate) settled: AtomicU64,
    /// Relayed: whether doorbells are kept off, or rung just now: [`BELL_FREE`] and what follows.
    pub(crate) bell: AtomicU32,
    /// Relayed: the writer wants the far end to look at what has been closed: 0, [`CALL_WANTED`] or [`CALLING`].
    pub(crate) call_wanted: AtomicU32,
    /// Relayed: how often the reader has been woken by its own host's relay ([`WakeBy::Waker`]), or is about to be.
    pub(crate) woken: AtomicU32,
    /// Relayed: the writer has found no room, and wants to be woken by this host's relay when there is some.
    pub(crate) room_wanted: AtomicU32,
    _relay: [u8; 104],
    pub(crate) runs: [Run; RUNS],
}

/// What wakes a reader that sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum WakeBy {
    /// A byte on the TCP connection, which wakes whatever waits for that.
    Doorbell = 1,
    /// Where the other end is on another host: this host's relay, by a descriptor that the process has handed over for that. All of the
    /// process's threads that sleep wait for the descriptor, too.
    Waker = 2,
}

/// In [`Control::reader`]: what reads this direction looks at the ring, too.
pub(crate) const READY: u32 = 1;
/// In [`Control::reader`]: nothing reads this direction any more.
pub(crate) const GONE: u32 = 2;

/// In [`Control::returned`]: the writer is to stop sending until all bytes are returned.
pub(crate) const RETURNS: u64 = 1;
/// In [`Control::returned`]: no further bytes are returned.
pub(crate) const RETURNED_ALL: u64 = 2;
/// In [`Control::resent`]: the writer has stopped.
pub(crate) const STOPPED: u64 = 1;

/// In [`Control::call_wanted`]: the relay has not begun to call.
pub(crate) const CALL_WANTED: u32 = 1;
/// In [`Control::call_wanted`]: the far end has not answered, or is to be rung.
pub(crate) const CALLING: u32 = 2;

/// In [`Control::bell`]: doorbells may be rung.
pub(crate) const BELL_FREE: u32 = 0;
/// In [`Control::bell`]: one is being rung, or the ring closed.
pub(crate) const BELL_RELAY: u32 = 1;
/// In [`Control::bell`]: the writer begins a run, so none may be.
pub(crate) const BELL_WRITER: u32 = 2;

/// In [`Head::tcp_back`].
const ASKED: u32 = 1;
/// In [`Head::tcp_back`].
const DONE: u32 = 2;
/// In [`Head::tcp_back`].
const LEFT: u32 = 3;

/// The head of a segment.
#[repr(C, align(128))]
struct Head {
    /// The end that has not made the segment has taken it.
    accepted: AtomicU32,
    /// Relayed: the relay sleeps, and wants to be woken by whatever changes.
    asleep: AtomicU32,
    /// Relayed: a number of [`Over`].
    over: AtomicU32,
    /// Relayed: the process does not use it any more, or never will.
    is_let_go: AtomicU32,
    /// Relayed: the relay is to hold no descriptor of the connection any more ([`ASKED`]), and does not ([`DONE`]). Or it may keep its
    /// descriptor for some time after the process has closed its own ([`LEFT`]).
    tcp_back: AtomicU32,
    /// Between two connections: one of [`IN_USE`] and what follows it.
    spare: AtomicU32,
    /// The connection that it is offered for again.
    offered_for: [AtomicU64; 6],
    /// Relayed: for who waits until the relay has done something.
    news: Words,
    /// Relayed: the relay has what it wakes a writer by.
    can_tell_room: AtomicU32,
    _to_the_end: [u8; 44],
}

/// In [`Head::spare`]: a connection uses it, at the taker's end at least.
const IN_USE: u32 = 0;
/// In [`Head::spare`]: the taker's connection has ended, and it keeps the memory mapped.
const SPARE: u32 = 1;
/// In [`Head::spare`]: the maker makes it as new for another connection.
const CLAIMED: u32 = 2;
/// In [`Head::spare`]: the maker has offered it again.
const OFFERED: u32 = 3;
/// In [`Head::spare`]: one of the ends does not keep it.
const DISCARDED: u32 = 4;

/// What has become of a relayed segment's way to the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Over {
    /// It is there.
    No = 0,
    /// The other end's process has gone, and everything of it has come.
    Finished = 1,
    /// It was cut: bytes may be lost.
    Lost = 2,
}

const _: () = assert!(size_of::<Control>() == 896 && size_of::<Head>() + 2 * size_of::<Control>() <= CONTROL);

/// Which end of a connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The end that has made the segment.
    Maker,
    /// The end that has been given it.
    Taker,
}

/// A mapped segment. A copy of addresses: see [`Segment::unmap`].
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    base: *mut u8,
    /// Bytes of each ring, a power of two.
    size: usize,
    /// The other end is on another host, and this host's relay stands for it.
    is_relayed: bool,
}

// SAFETY: the memory is shared with another process in any case: it is used through atomics and copies only.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

fn words(key: &[u8; 48]) -> impl Iterator<Item = u64> {
    key.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word))
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl Segment {
    /// Bytes that a connection with rings of this size needs.
    pub fn len_with(size: usize) -> usize {
        Segment::file_len(size)
    }

    fn file_len(size: usize) -> usize {
        CONTROL + 2 * size
    }

    /// Makes a segment with two rings of `size` bytes, a power of two from [`RING_MIN`] to [`RING_MAX`], and a descriptor to hand to
    /// the peer. Each direction begins with a run of TCP bytes that has not ended.
    ///
    /// # Errors
    /// Those of `memfd_create(2)`, `ftruncate(2)`, `fcntl(2)` and `mmap(2)`.
    pub fn create(size: usize) -> io::Result<(Segment, OwnedFd)> {
        assert!(size.is_power_of_two() && (RING_MIN..=RING_MAX).contains(&size), "a ring of {size} bytes");
        let fd = sealed::create("thruway socket", Segment::file_len(size) as u64)?;
        let segment = Segment::map(&fd, size)?;
        segment.begin();
        Ok((segment, fd))
    }

    /// Everything but what is in the rings, as at the beginning of a connection.
    fn begin(&self) {
        self.head().accepted.store(0, Ordering::Relaxed);
        for direction in 0..2 {
            let control = self.control(direction);
            for word in
                [&control.ringing, &control.rung, &control.resent, &control.head, &control.returned, &control.settled]
            {
                word.store(0, Ordering::Relaxed);
            }
            for word in [
                &control.ended,
                &control.for_good,
                &control.done,
                &control.reader,
                &control.close_wanted,
                &control.asked,
                &control.bell,
                &control.call_wanted,
                &control.woken,
                &control.room_wanted,
            ] {
                word.store(0, Ordering::Relaxed);
            }
            for run in &control.runs {
                run.ring.store(0, Ordering::Relaxed);
                run.start.store(0, Ordering::Relaxed);
                run.end.store(0, Ordering::Relaxed);
            }
            control.runs[0].end.store(OPEN, Ordering::Relaxed);
            control.armed.store(WakeBy::Doorbell as u32, Ordering::Relaxed);
            control.tail.store(BY_TCP, Ordering::Relaxed);
            control.opened.store(1, Ordering::Release);
        }
    }

    /// The taker's connection has ended, and it keeps the memory for another one between the same two processes. False if the maker
    /// does not.
    pub fn spare(&self) -> bool {
        self.pass(IN_USE, SPARE)
    }

    /// The maker, whose own connection has ended, too, makes it as new and offers it for the connection with this key. False if the taker
    /// still uses it, or does not keep it: see [`is_discarded`](Segment::is_discarded).
    pub fn offer_again(&self, key: &[u8; 48]) -> bool {
        let is_spare = self.pass(SPARE, CLAIMED);
        if is_spare {
            self.begin();
            for (place, word) in self.head().offered_for.iter().zip(words(key)) {
                place.store(word, Ordering::Relaxed);
            }
            self.head().spare.store(OFFERED, Ordering::SeqCst);
        }
        is_spare
    }

    /// Whether it has been offered again for the connection with this key.
    pub fn is_offered_for(&self, key: &[u8; 48]) -> bool {
        self.head().spare.load(Ordering::Acquire) == OFFERED
            && self.head().offered_for.iter().zip(words(key)).all(|(place, word)| place.load(Ordering::Relaxed) == word)
    }

    /// The taker takes it again, if it has been offered for the connection with this key.
    pub fn take_again(&self, key: &[u8; 48]) -> bool {
        self.is_offered_for(key) && self.pass(OFFERED, IN_USE)
    }

    /// The taker keeps it no longer. False if the maker has offered it again.
    pub fn give_up(&self) -> bool {
        self.pass(SPARE, DISCARDED) || self.is_discarded()
    }

    /// This end does not keep it, whatever the other end is about to do.
    pub fn discard(&self) {
        self.head().spare.store(DISCARDED, Ordering::SeqCst);
    }

    /// Whether one of the ends has said so.
    pub fn is_discarded(&self) -> bool {
        self.head().spare.load(Ordering::Acquire) == DISCARDED
    }

    fn pass(&self, from: u32, to: u32) -> bool {
        self.head().spare.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Maps what a peer has made; refuses what could end this process when it is used.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is no sealed memory file of ordinary pages and of a legal size; those of `mmap(2)`.
    pub fn adopt(fd: impl AsFd) -> io::Result<Segment> {
        let len = sealed::check(&fd)?;
        let size = usize::try_from(len).ok().and_then(|len| len.checked_sub(CONTROL)).map_or(0, |len| len / 2);
        let is_legal = size.is_power_of_two() && (RING_MIN..=RING_MAX).contains(&size);
        if !is_legal || Segment::file_len(size) as u64 != len {
            return Err(invalid("the peer's memory has no legal size"));
        }
        Segment::map(fd, size)
    }

    fn map(fd: impl AsFd, size: usize) -> io::Result<Segment> {
        let (len, rights) = (Segment::file_len(size), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, of whose addresses nothing knows yet.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED, fd, 0) }?;
        Ok(Segment { base: base.cast(), size, is_relayed: false })
    }

    /// Gives the addresses back.
    ///
    /// # Safety
    /// No copy of this value may be used afterwards in this process.
    pub unsafe fn unmap(self) {
        // SAFETY: the caller's promise; it is what `map` has mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), Segment::file_len(self.size)) };
    }

    /// Bytes of memory, if all of it is used.
    pub fn len(&self) -> usize {
        Segment::file_len(self.size)
    }

    /// Where it is mapped in this process.
    pub fn address(&self) -> usize {
        self.base.addr()
    }

    /// Never: a segment has control words at least.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes of each ring.
    pub fn ring_size(&self) -> usize {
        self.size
    }

    fn head(&self) -> &Head {
        // SAFETY: inside the mapping, page-aligned, and nothing but atomics and padding; the peer's changes are those of another
        // thread.
        unsafe { &*self.base.cast() }
    }

    /// The peer may use it: this end has taken it.
    pub fn accept(&self) {
        self.head().accepted.store(1, Ordering::Release);
    }

    /// As one whose other end is on another host.
    pub fn as_relayed(self) -> Segment {
        Segment { is_relayed: true, ..self }
    }

    /// Whether the other end is on another host.
    pub fn is_relayed(&self) -> bool {
        self.is_relayed
    }

    /// State of the way to the other host. Within a host always [`Over::No`], whatever the peer has written.
    pub fn over(&self) -> Over {
        if self.is_relayed { self.told_over() } else { Over::No }
    }

    /// As [`over`](Segment::over), at the relay's end.
    pub fn told_over(&self) -> Over {
        match self.head().over.load(Ordering::Acquire) {
            0 => Over::No,
            1 => Over::Finished,
            _ => Over::Lost,
        }
    }

    /// Says what has become of it; once it is over, that stays.
    pub fn set_over(&self, over: Over) {
        let _ = self.head().over.compare_exchange(0, over as u32, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Whether a relay has the connection in its care: what it is to bring, and to take, is lost with it.
    pub fn is_carried(&self) -> bool {
        self.is_relayed && self.over() == Over::No && self.head().tcp_back.load(Ordering::Acquire) != DONE
    }

    /// The relay is about to sleep, and looks once more.
    pub fn set_asleep(&self, is_asleep: bool) {
        self.head().asleep.store(is_asleep.into(), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The relay has what it wakes a writer by that waits for room ([`Writer::want_room`](crate::Writer::want_room)).
    pub fn set_can_tell_room(&self) {
        self.head().can_tell_room.store(1, Ordering::Release);
    }

    /// Whether it has.
    pub fn can_tell_room(&self) -> bool {
        self.head().can_tell_room.load(Ordering::Acquire) != 0
    }

    /// Has the relay say what it does from now on. To be called before looking for what is wanted.
    pub fn want_news(&self) -> News {
        self.head().news.want()
    }

    /// The relay has done something: what waits for it looks again.
    pub fn tell_news(&self) {
        self.head().news.tell();
    }

    /// Something that the relay has to know has changed.
    pub fn wake_relay(&self, tcp: &impl Tcp) {
        if !self.is_relayed {
            return;
        }
        fence(Ordering::SeqCst);
        let asleep = &self.head().asleep;
        if asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::SeqCst) != 0 && !tcp.wake_relay() {
            self.set_over(Over::Lost);
        }
    }

    /// This process does not use it any more.
    pub fn let_go(&self, tcp: &impl Tcp) {
        if self.is_relayed {
            self.head().is_let_go.store(1, Ordering::SeqCst);
            self.wake_relay(tcp);
        }
    }

    /// Has the relay close its descriptor of the connection: else the connection stays open after this process has closed its own. False
    /// if it has not done so yet.
    pub fn take_tcp_back(&self, tcp: &impl Tcp) -> bool {
        let back = &self.head().tcp_back;
        let ask = |from| back.compare_exchange(from, ASKED, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if ask(0) || ask(LEFT) {
            self.check_relay(tcp);
        }
        back.load(Ordering::Acquire) == DONE || self.over() != Over::No
    }

    /// Lets the relay keep its descriptor of the connection when this process closes its own.
    pub fn leave_tcp(&self) {
        let _ = self.head().tcp_back.compare_exchange(0, LEFT, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Whether the relay may keep its descriptor.
    pub fn is_tcp_left(&self) -> bool {
        self.head().tcp_back.load(Ordering::Acquire) == LEFT
    }

    /// Whether the process wants it back.
    pub fn is_tcp_wanted_back(&self) -> bool {
        self.head().tcp_back.load(Ordering::Acquire) == ASKED
    }

    /// The relay has done so.
    pub fn set_tcp_back(&self) {
        self.head().tcp_back.store(DONE, Ordering::SeqCst);
    }

    /// Whether the process that was given it does not use it any more.
    pub fn is_let_go(&self) -> bool {
        self.head().is_let_go.load(Ordering::Acquire) != 0
    }

    /// Something is waited for that the relay does: it may have gone.
    pub fn check_relay(&self, tcp: &impl Tcp) {
        if self.is_relayed && !tcp.wake_relay() {
            self.set_over(Over::Lost);
        }
    }

    /// Whether the peer has taken it.
    pub fn is_accepted(&self) -> bool {
        self.head().accepted.load(Ordering::Acquire) != 0
    }

    pub(crate) fn control(&self, direction: usize) -> &Control {
        debug_assert!(direction < 2);
        // SAFETY: as `head`.
        unsafe { &*self.base.add(size_of::<Head>() + direction * size_of::<Control>()).cast() }
    }

    pub(crate) fn ring(&self, direction: usize) -> *mut u8 {
        self.base.wrapping_add(CONTROL + direction * self.size)
    }
}

/// The number of the direction that an end writes to; it reads the other one.
pub(crate) fn outward(end: End) -> usize {
    usize::from(end == End::Taker)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_connection_that_has_ended_goes_on_only_as_both_ends_have_it() {
        let (maker, fd) = Segment::create(RING_MIN).unwrap();
        let taker = Segment::adopt(&fd).unwrap();
        let (key, other) = ([7; 48], [8; 48]);
        // A connection uses it.
        assert!(!maker.offer_again(&key) && !taker.take_again(&key) && !taker.give_up());
        taker.accept();
        for direction in 0..2 {
            let control = maker.control(direction);
            control.tail.store(77 << POSITION, Ordering::Relaxed);
            control.reader.store(GONE, Ordering::Relaxed);
            control.ended.store(1, Ordering::Relaxed);
            control.ringing.store(3, Ordering::Relaxed);
            control.runs[3].end.store(5, Ordering::Relaxed);
        }
        // The taker has given it back: once, and it is as new.
        assert!(taker.spare() && !taker.spare() && !taker.take_again(&key));
        assert!(maker.offer_again(&key) && !maker.offer_again(&key));
        assert!(!taker.give_up() && !taker.take_again(&other));
        assert!(taker.take_again(&key) && !taker.take_again(&key));
        assert!(!maker.is_accepted());
        let (new, _fd) = Segment::create(RING_MIN).unwrap();
        for direction in 0..2 {
            let words = |segment: &Segment| {
                // SAFETY: nothing writes just now.
                unsafe { std::ptr::from_ref(segment.control(direction)).cast::<[u8; size_of::<Control>()]>().read() }
            };
            assert!(words(&maker) == words(&new), "direction {direction}");
        }
        // What either end does not keep is not used again.
        assert!(taker.spare());
        maker.discard();
        assert!(!maker.offer_again(&key) && taker.give_up() && taker.is_discarded() && !taker.spare());
        // SAFETY: they are not used any more.
        unsafe {
            maker.unmap();
            taker.unmap();
            new.unmap();
        }
    }
}
