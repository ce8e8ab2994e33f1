//! The end of a direction that writes.

use super::returning::RETURNED_MAX;
use super::{Broken, PIECES, Tcp, in_order};
use crate::iovecs::Pieces;
use crate::segment::{
    BELL_FREE, BELL_WRITER, BY_TCP, CALL_WANTED, CLOSED, Control, End, GONE, OPEN, Over, POSITION, READY, RETURNED_ALL,
    RETURNS, RUNS, STOPPED, Segment, outward,
};
use std::io;
use std::sync::atomic::{Ordering, fence};
use thruway_memory::shared;

/// What this end knows of the direction that it writes to. All who hold the connection share it, under one lock.
#[derive(Debug)]
pub struct Writer {
    direction: usize,
    /// Bytes ever written to the ring, and what that is about to become: a process that is killed may have published it.
    tail: u64,
    planned: u64,
    /// How far the peer had read when that was last looked at.
    head: u64,
    /// Runs that have begun.
    opened: u32,
    /// Bytes go by TCP now.
    is_tcp: bool,
    /// For good.
    is_pinned: bool,
    /// The reader has closed the ring.
    is_closed: bool,
    /// Then, how much of it has been sent again, from what the reader had read.
    owed: u64,
    /// Position of the ring at which the last run began.
    run_ring: u64,
    /// Set once this end has stopped for bytes that the reader returns.
    stop: Option<Stop>,
    /// Position of this end at the last [`Writer::ring_again`], modulo 2^32, and whether that has rung for the bytes up to it.
    seen: u32,
    has_rung_again: bool,
    /// Position of this end when a doorbell was last rung, modulo 2^32.
    bell: u32,
}

/// See [`Writer::sent_again`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentAgain {
    /// The reader has closed the ring.
    pub has_begun: bool,
    /// The reader has returned bytes, and all of them have been sent again.
    pub has_ended: bool,
    /// Never decreases.
    pub bytes: u64,
}

/// A stop until the reader has returned the unread part of the stream.
#[derive(Debug)]
struct Stop {
    /// Bytes written to the TCP connection before.
    written: u64,
    /// Returned bytes that have been sent again.
    resent: u64,
    /// No further bytes are returned, and all have been sent again.
    is_over: bool,
    /// TCP has had no room for some of them.
    has_filled_tcp: bool,
    /// The kernel's limit of unsent bytes before it was raised for these.
    limit: Option<u32>,
}

impl Writer {
    /// For one end of a new segment: all bytes go by TCP yet.
    pub fn new(end: End) -> Writer {
        Writer {
            direction: outward(end),
            tail: 0,
            planned: 0,
            head: 0,
            opened: 1,
            is_tcp: true,
            is_pinned: false,
            is_closed: false,
            owed: 0,
            run_ring: 0,
            stop: None,
            seen: 0,
            has_rung_again: false,
            bell: 0,
        }
    }

    /// Whether bytes go by TCP now.
    pub fn is_tcp(&self) -> bool {
        self.is_tcp
    }

    /// Whether they will for good.
    pub fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// True if all later bytes go by TCP and the ring has no earlier ones. A reader that closes it with unread bytes returns them.
    pub fn is_plain(&self, segment: &Segment) -> bool {
        let control = segment.control(self.direction);
        let has_returned = self.stop.as_ref().is_some_and(|stop| stop.is_over);
        // A reader sets `RETURNS` before it takes bytes.
        let is_read = || {
            control.head.load(Ordering::Acquire) >= self.run_ring
                && control.returned.load(Ordering::Acquire) & RETURNS == 0
        };
        self.is_tcp && self.is_pinned && self.owed >= self.tail && (has_returned || self.stop.is_none() && is_read())
    }

    /// True while the reader returns bytes: nothing else may be sent.
    pub fn awaits_return(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| !stop.is_over)
    }

    /// Free bytes of the ring; looks at the peer's position if there are fewer than `wanted`.
    pub(super) fn room(&mut self, segment: &Segment, wanted: usize) -> Result<usize, Broken> {
        self.complete(segment);
        let size = segment.ring_size() as u64;
        if size - (self.tail - self.head) < wanted as u64 {
            let head = segment.control(self.direction).head.load(Ordering::Acquire);
            // Neither back, nor beyond what has been written.
            if head < self.head || head > self.tail {
                return Err(Broken);
            }
            self.head = head;
        }
        Ok((size - (self.tail - self.head)) as usize)
    }

    /// Whether the ring has room for `wanted` bytes or a quarter of it.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn has_room(&mut self, segment: &Segment, wanted: usize) -> Result<bool, Broken> {
        let wanted = wanted.min(segment.ring_size() / 4);
        Ok(self.room(segment, wanted)? >= wanted)
    }

    /// Whether what is sent through a relay has to wait: the ring has less than a quarter free, its reader is there, and bytes do not go by
    /// TCP.
    pub fn is_full(&mut self, segment: &Segment) -> bool {
        segment.is_relayed()
            && !self.is_tcp
            && !self.is_closed_by_reader(segment)
            && !self.is_reader_gone(segment)
            && self.has_room(segment, usize::MAX) == Ok(false)
    }

    /// Has this host's relay wake the process when [`Writer::is_full`] is over. To be called before looking whether it is.
    pub fn want_room(&self, segment: &Segment) {
        segment.control(self.direction).room_wanted.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Ends the run of TCP bytes if what follows can go through the ring. The caller vouches that nothing else writes to the TCP
    /// connection meanwhile. True if bytes go through the ring now.
    ///
    /// # Errors
    /// [`Broken`], those of [`Tcp::written`].
    pub fn leave_tcp(&mut self, segment: &Segment, tcp: &impl Tcp) -> io::Result<bool> {
        self.complete(segment);
        let control = segment.control(self.direction);
        if !self.is_tcp || self.is_pinned {
            return Ok(!self.is_tcp);
        }
        // Nothing takes from the ring where its way to the other host has gone.
        let has_way = !segment.is_relayed() || segment.over() == Over::No;
        if control.reader.load(Ordering::Acquire) != READY || !has_way {
            return Ok(false);
        }
        // There must be a run left for when the ring is full.
        let done = control.done.load(Ordering::Acquire);
        let pending = self.opened.wrapping_sub(done) as usize;
        if pending > RUNS {
            return Err(Broken.into());
        }
        if pending == RUNS || self.room(segment, segment.ring_size())? < segment.ring_size() / 2 {
            return Ok(false);
        }
        let end = tcp.written()?;
        if !self.change(segment, self.tail, false) {
            self.owed = self.tail;
            self.pin(segment);
            return Ok(false);
        }
        control.runs[(self.opened as usize - 1) % RUNS].end.store(end, Ordering::Release);
        self.is_tcp = false;
        tcp.flush();
        segment.wake_relay(tcp);
        Ok(true)
    }

    /// Has what follows go by TCP; `for_good` or until [`Writer::leave_tcp`]. The caller vouches that nothing else writes to the TCP
    /// connection meanwhile.
    ///
    /// # Errors
    /// Those of [`Tcp::written`]; nothing has changed then.
    pub fn enter_tcp(&mut self, segment: &Segment, tcp: &impl Tcp, for_good: bool) -> io::Result<()> {
        self.complete(segment);
        if !self.is_tcp {
            // A relay rings by itself: not while the run's first byte is determined.
            let _no_bells =
                segment.is_relayed().then(|| NoBells::begin(segment.control(self.direction))).transpose()?;
            let start = tcp.written()?;
            if !self.change(segment, self.tail, true) {
                drop(_no_bells);
                self.send_again(segment, tcp)?;
                return Ok(());
            }
            self.begin_run(segment, self.tail, start);
        }
        if for_good && !self.is_pinned {
            self.owed = self.tail;
            self.pin(segment);
        }
        segment.wake_relay(tcp);
        Ok(())
    }

    /// The run that is open has no end.
    fn pin(&mut self, segment: &Segment) {
        self.is_pinned = true;
        segment.control(self.direction).for_good.store(1, Ordering::SeqCst);
    }

    fn begin_run(&mut self, segment: &Segment, ring: u64, start: u64) {
        let control = segment.control(self.direction);
        let run = &control.runs[self.opened as usize % RUNS];
        run.ring.store(ring, Ordering::Relaxed);
        run.start.store(start, Ordering::Relaxed);
        run.end.store(OPEN, Ordering::Relaxed);
        self.run_ring = ring;
        self.opened += 1;
        control.opened.store(self.opened, Ordering::Release);
        self.is_tcp = true;
    }

    /// Completes a publication of a process that was killed before it had noted it here.
    fn complete(&mut self, segment: &Segment) {
        if self.planned != self.tail {
            let word = segment.control(self.direction).tail.load(Ordering::SeqCst) & !CLOSED;
            if !self.is_tcp && word == self.planned << POSITION {
                self.tail = self.planned;
            }
            self.planned = self.tail;
        }
    }

    /// Publishes a position and a way. False if the reader has closed the ring; then nothing has changed.
    fn change(&mut self, segment: &Segment, tail: u64, is_tcp: bool) -> bool {
        let word = |tail: u64, is_tcp| tail << POSITION | if is_tcp { BY_TCP } else { 0 };
        // What orders this before a look at `armed` also sees whether the ring is closed.
        let place = &segment.control(self.direction).tail;
        let (old, new) = (word(self.tail, self.is_tcp), word(tail, is_tcp));
        // A peer that has written anything else there is treated as if it had closed the ring.
        self.is_closed |= place.compare_exchange(old, new, Ordering::SeqCst, Ordering::Relaxed).is_err();
        !self.is_closed
    }

    /// Sends again, by TCP, unread bytes of a ring that its reader has closed, and bytes that the reader returns. The caller vouches that
    /// nothing else writes to the TCP connection until this returns. False while bytes are left, because TCP has no room or the reader has not
    /// returned them yet ([`Writer::awaits_return`]): then nothing else may be sent.
    ///
    /// # Errors
    /// [`Broken`], those of the TCP connection.
    pub fn send_again(&mut self, segment: &Segment, tcp: &impl Tcp) -> io::Result<bool> {
        self.complete(segment);
        if !self.is_closed && !self.is_closed_by_reader(segment) {
            return Ok(true);
        }
        self.is_closed = true;
        if !self.is_tcp {
            let head = segment.control(self.direction).head.load(Ordering::Acquire);
            if head < self.head || head > self.tail {
                return Err(Broken.into());
            }
            // The reader finds bytes before the last run in the ring.
            let from = head.max(self.run_ring);
            self.begin_run(segment, from, tcp.written()?);
            self.owed = from;
            self.pin(segment);
            segment.wake_relay(tcp);
        } else if !self.is_pinned {
            // The ring was not in use: nothing in it is to be sent again.
            self.owed = self.tail;
            self.pin(segment);
            segment.wake_relay(tcp);
        }
        let size = segment.ring_size();
        while self.owed < self.tail {
            let at = self.owed as usize & (size - 1);
            let len = ((self.tail - self.owed) as usize).min(size - at);
            // SAFETY: inside the ring.
            match unsafe { tcp.send(segment.ring(self.direction).add(at), len) } {
                Ok(sent) => self.owed += sent as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => {
                    self.owed = self.tail;
                    return Err(error);
                }
            }
        }
        self.send_returned(segment, tcp)
    }

    /// Sends again bytes that the reader returns, at most as many as the ring has in one call. False while bytes are left.
    ///
    /// # Errors
    /// [`Broken`], also after more bytes than an honest reader returns; those of the TCP connection.
    fn send_returned(&mut self, segment: &Segment, tcp: &impl Tcp) -> io::Result<bool> {
        let control = segment.control(self.direction);
        if control.returned.load(Ordering::Acquire) & RETURNS == 0 {
            return Ok(true);
        }
        if self.stop.is_none() {
            self.stop =
                Some(Stop { written: tcp.written()?, resent: 0, has_filled_tcp: false, limit: None, is_over: false });
        }
        let Some(stop) = self.stop.as_mut().filter(|stop| !stop.is_over) else { return Ok(true) };
        let size = segment.ring_size();
        let begin = stop.resent;
        loop {
            control.resent.store((stop.written + stop.resent) << POSITION | STOPPED, Ordering::Release);
            let word = control.returned.load(Ordering::Acquire);
            let returned = Some(word >> POSITION).filter(|returned| *returned <= RETURNED_MAX as u64).ok_or(Broken)?;
            let left = returned.checked_sub(stop.resent).filter(|left| *left <= size as u64).ok_or(Broken)?;
            if left == 0 {
                stop.is_over = word & RETURNED_ALL != 0;
                if stop.is_over
                    && let Some(limit) = stop.limit.take()
                {
                    tcp.limit_unsent(limit);
                }
                return Ok(stop.is_over);
            }
            let room = size - (stop.resent - begin) as usize;
            if room == 0 {
                // A fast reader must not keep the caller.
                return Ok(false);
            }
            let at = stop.resent as usize & (size - 1);
            // SAFETY: inside the ring.
            match unsafe { tcp.send(segment.ring(self.direction).add(at), (left as usize).min(size - at).min(room)) } {
                Ok(sent) => stop.resent += sent as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // The reader has these bytes in its memory, and the ring may have no room for all of them.
                    if std::mem::replace(&mut stop.has_filled_tcp, true) {
                        return Ok(false);
                    }
                    stop.limit = tcp.raise_limit_of_unsent();
                }
                Err(error) => {
                    stop.is_over = true;
                    return Err(error);
                }
            }
        }
    }

    /// Whether the reader has closed the ring.
    pub fn is_closed_by_reader(&self, segment: &Segment) -> bool {
        segment.control(self.direction).tail.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// True if the reader waits for an act of this end: it has closed the ring, or has asked for a doorbell.
    pub fn has_peer_called(&self, segment: &Segment) -> bool {
        self.is_closed_by_reader(segment) || segment.control(self.direction).asked.load(Ordering::Relaxed) != 0
    }

    /// True if this end has asked the peer for a doorbell ([`Reader::ask`](super::Reader::ask)), and the peer has not rung yet.
    pub fn has_asked(&self, segment: &Segment) -> bool {
        segment.control(1 - self.direction).asked.load(Ordering::SeqCst) != 0
    }

    /// Rings although the peer has not asked for it, to have it look at what this end has closed. Only while the ring is in use.
    pub fn call(&self, segment: &Segment, tcp: &impl Tcp) {
        let control = segment.control(self.direction);
        if self.is_reader_gone(segment) {
            // The kernel answers a byte for a closed socket with a reset, and drops unsent bytes.
            return;
        }
        if segment.is_relayed() {
            control.call_wanted.store(CALL_WANTED, Ordering::SeqCst);
            segment.wake_relay(tcp);
        } else if !self.is_tcp {
            control.ringing.fetch_add(1, Ordering::SeqCst);
            // A reader that closes the ring now waits for this one; after one that has closed it, the byte would be data.
            if control.tail.load(Ordering::SeqCst) & CLOSED == 0 && tcp.doorbell() {
                control.rung.fetch_add(1, Ordering::SeqCst);
            } else {
                control.ringing.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Rings if the reader has asked for it ([`Reader::ask`](super::Reader::ask)) and has unread bytes. While bytes go by TCP, these wake it.
    pub fn answer(&self, segment: &Segment, tcp: &impl Tcp) {
        let control = segment.control(self.direction);
        let is_asked = !self.is_tcp && control.asked.load(Ordering::Relaxed) != 0;
        if is_asked && control.asked.swap(0, Ordering::SeqCst) != 0 && self.unread(segment) > 0 {
            self.call(segment, tcp);
        }
    }

    /// Rings once more if bytes are unread that were written before the last call of this function, and no doorbell was rung for them, or the
    /// reader has asked for one since; at most once for each position of this end. True if it rang. Only within a host.
    pub fn ring_again(&mut self, segment: &Segment, tcp: &impl Tcp) -> bool {
        self.complete(segment);
        let control = segment.control(self.direction);
        let (head, now) = (control.head.load(Ordering::Relaxed), self.tail as u32);
        let is_new = std::mem::replace(&mut self.seen, now) != now;
        self.has_rung_again &= !is_new;
        // Before the reader's position, or beyond the ring's size, it was rung for bytes that have been read.
        let has_rung = (self.bell.wrapping_sub(head as u32).wrapping_sub(1) as usize) < segment.ring_size();
        let is_announced = has_rung && control.armed.load(Ordering::SeqCst) == 0;
        let is_stalled = !is_new && head != self.tail && !self.has_rung_again && !is_announced;
        let may_ring = is_stalled && !segment.is_relayed() && !self.is_tcp && !self.is_closed;
        if may_ring {
            self.has_rung_again = true;
            self.call(segment, tcp);
        }
        may_ring
    }

    /// Copies to the ring what there is room for, shows it to the peer, and rings if the peer wants that. 0 if the ring is full or the
    /// peer does not want it any more: then bytes must go by TCP.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// `from` must be readable memory.
    pub unsafe fn write(&mut self, segment: &Segment, tcp: &impl Tcp, from: &mut Pieces<'_>) -> Result<usize, Broken> {
        let mut sum = 0;
        while from.left() > 0 {
            // SAFETY: the caller's promise.
            match unsafe { self.write_some(segment, tcp, from) }? {
                0 => break,
                len => sum += len,
            }
        }
        Ok(sum)
    }

    /// A piece, so that the reader need not wait until the last byte is there.
    ///
    /// # Safety
    /// As [`Writer::write`].
    unsafe fn write_some(&mut self, segment: &Segment, tcp: &impl Tcp, from: &mut Pieces<'_>) -> Result<usize, Broken> {
        debug_assert!(!self.is_tcp);
        let size = segment.ring_size();
        let ring = segment.ring(self.direction);
        let room = self.room(segment, from.left().min(size / PIECES))?;
        let wanted = from.left().min(size / PIECES);
        let (mut rest, mut at, mut left) = (*from, self.tail as usize & (size - 1), room.min(wanted));
        let len = left;
        while left > 0 {
            let Some((base, piece)) = rest.first() else { break };
            let step = piece.min(left).min(size - at);
            // SAFETY: `at + step` is inside the ring; the caller's promise for `base`.
            unsafe { shared::copy(ring.add(at), base, step) };
            at = (at + step) & (size - 1);
            left -= step;
            rest.advance(step);
        }
        if len == 0 || !self.publish(segment, len) {
            return Ok(0);
        }
        self.ring_if_wanted(segment, tcp);
        from.advance(len);
        Ok(len)
    }

    /// Memory of the ring that a system call may fill directly, then to be [committed](Writer::commit): none if there is no room.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn free_span(&mut self, segment: &Segment, wanted: usize) -> Result<(*mut u8, usize), Broken> {
        let room = self.room(segment, wanted)?;
        let at = self.tail as usize & (segment.ring_size() - 1);
        let len = room.min(wanted).min(segment.ring_size() - at);
        Ok((segment.ring(self.direction).wrapping_add(at), len))
    }

    /// Shows the peer `len` bytes of the last [`Writer::free_span`]. False if the peer does not want them: they must go by TCP.
    pub fn commit(&mut self, segment: &Segment, tcp: &impl Tcp, len: usize) -> bool {
        if len == 0 || !self.publish(segment, len) {
            return false;
        }
        self.ring_if_wanted(segment, tcp);
        true
    }

    fn publish(&mut self, segment: &Segment, len: usize) -> bool {
        let tail = self.tail + len as u64;
        self.planned = tail;
        in_order(self);
        if !self.change(segment, tail, false) {
            return false;
        }
        in_order(self);
        self.tail = tail;
        true
    }

    fn ring_if_wanted(&mut self, segment: &Segment, tcp: &impl Tcp) {
        if segment.is_relayed() {
            return segment.wake_relay(tcp);
        }
        let control = segment.control(self.direction);
        fence(Ordering::SeqCst);
        if control.armed.load(Ordering::Relaxed) == 0 {
            return;
        }
        control.ringing.fetch_add(1, Ordering::SeqCst);
        let is_wanted = control.armed.swap(0, Ordering::SeqCst) != 0;
        if is_wanted && tcp.doorbell() {
            self.bell = self.tail as u32;
            control.rung.fetch_add(1, Ordering::SeqCst);
        } else {
            control.ringing.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// This end is about to end its direction of the TCP connection.
    pub fn set_ended(&self, segment: &Segment, tcp: &impl Tcp) {
        segment.control(self.direction).ended.store(1, Ordering::SeqCst);
        segment.wake_relay(tcp);
    }

    /// Whether everything in the ring has come to the other host, and its reader knows: before a run of TCP bytes begins there, which
    /// wakes nothing that sleeps because of them. Always so where there is no other host.
    pub fn is_settled(&self, segment: &Segment) -> bool {
        let control = segment.control(self.direction);
        let has_come =
            || control.call_wanted.load(Ordering::SeqCst) == 0 && control.settled.load(Ordering::Acquire) >= self.tail;
        !segment.is_relayed() || self.is_tcp || self.is_closed || has_come() || segment.over() != Over::No
    }

    /// Whether nothing reads at the other end any more: what is written now must go by TCP, which knows what becomes of it.
    pub fn is_reader_gone(&self, segment: &Segment) -> bool {
        let is_gone = segment.control(self.direction).reader.load(Ordering::Relaxed) & GONE != 0;
        is_gone || segment.is_relayed() && segment.over() != Over::No
    }

    /// Whether the peer has said that it ends the other direction. A process that is killed does not.
    pub fn is_peer_ended(&self, segment: &Segment) -> bool {
        segment.control(1 - self.direction).ended.load(Ordering::Relaxed) != 0
    }

    /// Progress of [`Writer::send_again`].
    pub fn sent_again(&self) -> SentAgain {
        let (has_ended, resent) = self.stop.as_ref().map_or((false, 0), |stop| (stop.is_over, stop.resent));
        SentAgain { has_begun: self.is_closed, has_ended, bytes: self.owed + resent }
    }

    /// Bytes in the ring that the peer has not read.
    pub fn unread(&self, segment: &Segment) -> u64 {
        self.tail
            .saturating_sub(segment.control(self.direction).head.load(Ordering::Relaxed))
            .min(segment.ring_size() as u64)
    }
}

/// For as long as this lives, the relay rings no doorbell.
struct NoBells<'a>(&'a Control);

/// How often the relay's turn is waited for. It rings without waiting, so it takes longer only if it was stopped or has gone.
const TURNS_MAX: u32 = 100_000;

impl<'a> NoBells<'a> {
    fn begin(control: &'a Control) -> Result<NoBells<'a>, Broken> {
        for _ in 0..TURNS_MAX {
            let bell = &control.bell;
            if bell.compare_exchange(BELL_FREE, BELL_WRITER, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                return Ok(NoBells(control));
            }
            std::thread::yield_now();
        }
        Err(Broken)
    }
}

impl Drop for NoBells<'_> {
    fn drop(&mut self) {
        self.0.bell.store(BELL_FREE, Ordering::SeqCst);
    }
}
