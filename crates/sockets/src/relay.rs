//! A direction between two hosts: the segment at each end, and what keeps one like the other.
//!
//! The process that writes has a segment whose other end is its host's relay, and so has the process that reads. At the writer's host an
//! [`Outlet`] turns what the writer has done into [`Update`]s, at the reader's an [`Inlet`] does the same to the segment there, and sends
//! back [`Feedback`]. Updates and feedback come in order, once. So each process finds in its segment what the other has done, as it would
//! within a host, some time later.
//!
//! What is later could be wrong in one way: bytes of the TCP connection, which goes from process to process, may overtake it. So
//!
//! - the reader takes nothing from the TCP connection that it has no word of yet ([`Reader::is_explained`](crate::Reader::is_explained));
//! - the writer begins a run of TCP bytes only where the ring has come to the reader's host ([`Writer::is_settled`](crate::Writer::is_settled));
//! - a reader that sleeps is woken by its own host's relay; where only a doorbell wakes it, that is rung by the relay at the writer's host,
//!   never while a run of TCP bytes is open or its end not known to the reader, because there it would be a byte of the stream;
//! - the reader closes the ring where the writer is, not where it has come to know that the writer is: it asks, and waits.

use crate::direction::Broken;
use crate::segment::{
    BELL_FREE, BELL_RELAY, BY_TCP, CALL_WANTED, CALLING, CLOSED, End, OPEN, POSITION, RUNS, Segment, WakeBy, outward,
};
use std::sync::atomic::{Ordering, fence};
use thruway_memory::shared;

/// What a writer has done since the last update. Bytes for the ring follow it in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// Bytes ever written to the ring, with those that follow.
    pub tail: u64,
    /// Where the last run before this update ends, or [`u64::MAX`].
    pub end: u64,
    /// A run begins behind the bytes: at this byte of the ring, and of the TCP connection.
    pub run: Option<(u64, u64)>,
    /// The ring is closed, and nothing comes through it any more; then, whether bytes went by TCP at that moment.
    pub closed: Option<bool>,
    /// The writer has ended its direction, and this is all.
    pub ended: bool,
    /// The last run has no end, and nothing comes through the ring any more.
    pub for_good: bool,
    /// The reader is to look at what the other end has closed, if it sleeps.
    pub call: bool,
    /// Doorbells ever rung.
    pub ringing: u64,
}

/// Bytes of an [`Update`] in a message.
pub const UPDATE_HEAD: usize = 8 + 8 + 8 + 8 + 8 + 1;

/// What the reader's end has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Feedback {
    /// Bytes ever read from the ring.
    pub head: u64,
    /// Runs that the reader has come to the end of.
    pub done: u32,
    /// Bits of the reader: that it looks at the ring, that it has gone.
    pub reader: u32,
    /// The reader sleeps, or is about to, and only a doorbell wakes it.
    pub is_armed: bool,
    /// The reader wants the ring closed. It has read as far as `head` says, and reads nothing more from the ring.
    pub close_wanted: bool,
    /// The reader sleeps and has to be rung: only a doorbell wakes it.
    pub owes_bell: bool,
    /// How far updates have come.
    pub tail: u64,
    /// Runs that have begun, as far as they have come.
    pub opened: u32,
    /// The end of the last of them has come.
    pub has_end: bool,
    /// Calls received ([`Update::call`]), modulo 256. If `owes_bell` is set, the reader has to be rung for the last one.
    pub called: u8,
}

/// Bytes of a [`Feedback`] in a message.
const FEEDBACK_LEN: usize = 8 + 4 + 1 + 8 + 4 + 1 + 1;

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

impl Update {
    const RUN: u8 = 1;
    const CLOSED: u8 = 2;
    const BY_TCP: u8 = 4;
    const ENDED: u8 = 8;
    const CALL: u8 = 16;
    const FOR_GOOD: u8 = 32;

    /// As it goes into a message.
    pub fn encode(&self) -> [u8; UPDATE_HEAD] {
        let mut bytes = [0; UPDATE_HEAD];
        let (ring, start) = self.run.unwrap_or_default();
        for (place, word) in bytes.chunks_exact_mut(8).zip([self.tail, self.end, ring, start, self.ringing]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let closed = self.closed.map_or(0, |by_tcp| Update::CLOSED | if by_tcp { Update::BY_TCP } else { 0 });
        let run = if self.run.is_some() { Update::RUN } else { 0 };
        let call = if self.call { Update::CALL } else { 0 };
        let for_good = if self.for_good { Update::FOR_GOOD } else { 0 };
        bytes[UPDATE_HEAD - 1] = run | closed | call | for_good | if self.ended { Update::ENDED } else { 0 };
        bytes
    }

    /// The other way round, with the bytes behind it.
    ///
    /// # Errors
    /// [`Broken`] if there are too few.
    pub fn decode(bytes: &[u8]) -> Result<(Update, &[u8]), Broken> {
        let (head, rest) = bytes.split_at_checked(UPDATE_HEAD).ok_or(Broken)?;
        let flags = head[UPDATE_HEAD - 1];
        let update = Update {
            tail: u64_at(head, 0),
            end: u64_at(head, 8),
            run: (flags & Update::RUN != 0).then(|| (u64_at(head, 16), u64_at(head, 24))),
            closed: (flags & Update::CLOSED != 0).then_some(flags & Update::BY_TCP != 0),
            ended: flags & Update::ENDED != 0,
            call: flags & Update::CALL != 0,
            for_good: flags & Update::FOR_GOOD != 0,
            ringing: u64_at(head, 32),
        };
        Ok((update, rest))
    }
}

impl Feedback {
    /// As it goes into a message.
    pub fn encode(&self) -> [u8; FEEDBACK_LEN] {
        let mut bytes = [0; FEEDBACK_LEN];
        bytes[..8].copy_from_slice(&self.head.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.done.to_le_bytes());
        bytes[12] = self.reader as u8;
        bytes[13..21].copy_from_slice(&self.tail.to_le_bytes());
        bytes[21..25].copy_from_slice(&self.opened.to_le_bytes());
        let flags = [self.is_armed, self.close_wanted, self.owes_bell, self.has_end];
        bytes[25] = flags.iter().enumerate().fold(0, |byte, (bit, flag)| byte | u8::from(*flag) << bit);
        bytes[26] = self.called;
        bytes
    }

    /// The other way round.
    ///
    /// # Errors
    /// [`Broken`] if these are not as many bytes.
    pub fn decode(bytes: &[u8]) -> Result<Feedback, Broken> {
        if bytes.len() != FEEDBACK_LEN {
            return Err(Broken);
        }
        let flag = |bit: u8| bytes[25] >> bit & 1 != 0;
        Ok(Feedback {
            head: u64_at(bytes, 0),
            done: u32_at(bytes, 8),
            reader: u32::from(bytes[12]) & READER_BITS,
            is_armed: flag(0),
            close_wanted: flag(1),
            owes_bell: flag(2),
            tail: u64_at(bytes, 13),
            opened: u32_at(bytes, 21),
            has_end: flag(3),
            called: bytes[26],
        })
    }
}

/// The bits of a reader that there are.
const READER_BITS: u32 = crate::segment::READY | crate::segment::GONE;

/// Copies out of, or into, a ring.
fn each_span(segment: &Segment, direction: usize, from: u64, len: usize, mut visit: impl FnMut(*mut u8, usize, usize)) {
    let size = segment.ring_size();
    let at = from as usize & (size - 1);
    let first = len.min(size - at);
    visit(segment.ring(direction).wrapping_add(at), 0, first);
    if first < len {
        visit(segment.ring(direction), first, len - first);
    }
}

/// The relay's end of a direction whose writer is on this host.
#[derive(Debug)]
pub struct Outlet {
    direction: usize,
    /// What has been sent.
    tail: u64,
    opened: u32,
    end: u64,
    closed: bool,
    ended: bool,
    for_good: bool,
    ringing_sent: u64,
    /// Doorbells that have been rung.
    ringing: u64,
    /// What the other end has said last.
    peer: Feedback,
    /// A doorbell is wanted at the other end.
    is_owed: bool,
    /// The writer has called the reader, and that has not been sent; calls that have been; and whether the last is not answered.
    calls: bool,
    called: u8,
    is_calling: bool,
}

impl Default for Outlet {
    fn default() -> Outlet {
        Outlet {
            // The relay has made the segment.
            direction: outward(End::Taker),
            tail: 0,
            opened: 1,
            end: OPEN,
            closed: false,
            ended: false,
            for_good: false,
            ringing_sent: 0,
            ringing: 0,
            peer: Feedback { opened: 1, ..Feedback::default() },
            is_owed: false,
            calls: false,
            called: 0,
            is_calling: false,
        }
    }
}

impl Outlet {
    /// Appends an update to `out`, with `max` bytes for the ring at most, if there is anything new.
    ///
    /// # Errors
    /// [`Broken`] if the writer has written what cannot be.
    pub fn take(&mut self, segment: &Segment, max: usize, out: &mut Vec<u8>) -> Result<bool, Broken> {
        let control = segment.control(self.direction);
        // What is said to be all has to be looked at afterwards.
        let ended = control.ended.load(Ordering::SeqCst) != 0;
        let for_good = control.for_good.load(Ordering::SeqCst) != 0;
        let opened = control.opened.load(Ordering::Acquire);
        let word = control.tail.load(Ordering::Acquire);
        if control.opened.load(Ordering::Acquire) != opened {
            // The next look sees both.
            return Ok(false);
        }
        let (tail, pending) = (word >> POSITION, opened.wrapping_sub(self.opened));
        if pending as usize > RUNS || tail < self.tail || tail - self.peer.head > segment.ring_size() as u64 {
            return Err(Broken);
        }
        let last = &control.runs[self.opened.wrapping_sub(1) as usize % RUNS];
        let end = last.end.load(Ordering::Acquire);
        let is_leaving = word & BY_TCP == 0 && pending == 0 && end == OPEN;
        if is_leaving && word & CLOSED != 0 && !self.closed {
            // The writer leaves TCP, and has not said yet where its run ends.
            return Ok(false);
        }
        let next = (pending > 0).then(|| &control.runs[self.opened as usize % RUNS]);
        let next = next.map(|run| (run.ring.load(Ordering::Relaxed), run.start.load(Ordering::Relaxed)));
        // A writer whose ring was closed begins its last run where the reader is.
        let target = match next {
            Some((ring, _)) if ring > tail || ring < self.peer.head => return Err(Broken),
            Some((ring, _)) if word & CLOSED == 0 => ring,
            _ => tail,
        };
        let len = target.checked_sub(self.tail).ok_or(Broken)?;
        if len > 0 && end == OPEN {
            return Err(Broken);
        }
        let taken = len.min(max as u64);
        let is_whole = taken == len;
        let run = next.filter(|_| is_whole);
        let is_all = is_whole && pending == u32::from(run.is_some());
        let closed = (is_whole && word & CLOSED != 0).then_some(word & BY_TCP != 0);
        let (ended, for_good) = (ended && is_all, for_good && is_all);
        let is_new = taken > 0
            || run.is_some()
            || end != self.end
            || closed.is_some() && !self.closed
            || ended && !self.ended
            || for_good && !self.for_good
            || self.ringing != self.ringing_sent
            || self.calls;
        if !is_new {
            return Ok(false);
        }
        let (tail, call, ringing) = (self.tail + taken, self.calls, self.ringing);
        let update = Update { tail, end, run, closed, ended, for_good, call, ringing };
        self.called = self.called.wrapping_add(u8::from(std::mem::take(&mut self.calls)));
        out.extend_from_slice(&update.encode());
        let at = out.len();
        out.resize(at + taken as usize, 0);
        each_span(segment, self.direction, self.tail, taken as usize, |ring, from, len| {
            // SAFETY: `len` bytes of the ring, and as many of the vector.
            unsafe { shared::copy(out.as_mut_ptr().add(at + from), ring, len) };
        });
        self.tail += taken;
        self.end = if run.is_some() { OPEN } else { end };
        self.opened = self.opened.wrapping_add(u32::from(run.is_some()));
        self.closed |= closed.is_some();
        self.ended |= ended;
        self.for_good |= for_good;
        self.ringing_sent = self.ringing;
        Ok(true)
    }

    /// Takes what the other end has said.
    ///
    /// # Errors
    /// [`Broken`] if that cannot be.
    pub fn receive(&mut self, segment: &Segment, feedback: &Feedback) -> Result<(), Broken> {
        let control = segment.control(self.direction);
        let opened = self.opened.wrapping_sub(feedback.opened);
        let is_possible = (self.peer.head..=self.tail).contains(&feedback.head)
            && (self.peer.tail..=self.tail).contains(&feedback.tail)
            && feedback.head <= feedback.tail
            && opened as usize <= RUNS
            && feedback.opened.wrapping_sub(feedback.done) as usize <= RUNS
            && feedback.done.wrapping_sub(self.peer.done) as usize <= RUNS;
        if !is_possible {
            return Err(Broken);
        }
        control.head.store(feedback.head, Ordering::Release);
        control.done.store(feedback.done, Ordering::Release);
        control.reader.fetch_or(feedback.reader, Ordering::SeqCst);
        // Before a look at `room_wanted`.
        fence(Ordering::SeqCst);
        self.is_owed |= feedback.owes_bell;
        self.peer = *feedback;
        Ok(())
    }

    /// Does what the other end has asked for and what the writer waits for, as far as that is possible now. `ring` sends a doorbell, and
    /// says whether it could.
    pub fn serve(&mut self, segment: &Segment, ring: impl FnOnce() -> bool) {
        let control = segment.control(self.direction);
        let change = |from, to| {
            let word = &control.call_wanted;
            word.load(Ordering::SeqCst) == from
                && word.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        // A sleeping reader is woken by its own relay. A doorbell that meets a reader which closes the connection would reset it.
        if !self.is_calling && change(CALL_WANTED, CALLING) {
            (self.calls, self.is_calling) = (true, true);
        }
        self.is_calling &= self.calls || self.peer.called != self.called;
        let unsent = control.tail.load(Ordering::Acquire) >> POSITION != self.tail;
        let wants_bell = self.is_owed || self.peer.is_armed && unsent;
        let closes = self.peer.close_wanted && control.tail.load(Ordering::Relaxed) & CLOSED == 0;
        let free = || control.bell.compare_exchange(BELL_FREE, BELL_RELAY, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if (wants_bell || closes) && free() {
            if closes {
                control.tail.fetch_or(CLOSED, Ordering::SeqCst);
            }
            let is_by_tcp = control.tail.load(Ordering::SeqCst) & (BY_TCP | CLOSED) != 0;
            let opened = control.opened.load(Ordering::SeqCst);
            let is_known = self.peer.opened == opened && self.peer.has_end;
            if wants_bell && !is_by_tcp && is_known && ring() {
                self.ringing += 1;
                self.is_owed = false;
                self.peer.is_armed = false;
            } else if is_by_tcp {
                // Bytes of the stream wake the reader.
                self.is_owed = false;
            }
            control.bell.store(BELL_FREE, Ordering::SeqCst);
        }
        if !self.is_owed && !self.is_calling {
            change(CALLING, 0);
        }
        if !self.is_owed {
            control.settled.store(self.peer.tail, Ordering::Release);
        }
    }

    /// Wakes the writer, if it waits for room and has some, or will not get any (`is_over`: also because the connection is carried no
    /// more). `wake` does that, and says whether it could: if not, that is tried again.
    pub fn wake(&mut self, segment: &Segment, is_over: bool, wake: impl FnOnce() -> bool) {
        let control = segment.control(self.direction);
        if control.room_wanted.load(Ordering::SeqCst) == 0 {
            return;
        }
        let word = control.tail.load(Ordering::SeqCst);
        let used = (word >> POSITION).saturating_sub(self.peer.head);
        let has_room = used <= segment.ring_size() as u64 / 4 * 3;
        let is_over = is_over || word & CLOSED != 0 || self.peer.reader & crate::segment::GONE != 0;
        if (has_room || is_over) && control.room_wanted.swap(0, Ordering::SeqCst) != 0 && !wake() {
            control.room_wanted.store(1, Ordering::SeqCst);
        }
    }

    /// Whether the writer knows that its bytes are read there.
    pub fn is_open(&self) -> bool {
        self.peer.reader & crate::segment::READY != 0
    }

    /// Whether all that the writer has done has come to the other host.
    pub fn is_drained(&self, segment: &Segment) -> bool {
        let control = segment.control(self.direction);
        self.peer.tail == control.tail.load(Ordering::Acquire) >> POSITION
            && self.peer.opened == control.opened.load(Ordering::Acquire)
    }

    /// Whether the writer has ended its direction.
    pub fn is_ended(&self, segment: &Segment) -> bool {
        segment.control(self.direction).ended.load(Ordering::Acquire) != 0
    }
}

/// The relay's end of a direction whose reader is on this host.
#[derive(Debug)]
pub struct Inlet {
    direction: usize,
    tail: u64,
    opened: u32,
    end: u64,
    head: u64,
    done: u32,
    closed: bool,
    ringing: u64,
    owes_bell: bool,
    owes_waking: bool,
    called: u8,
    /// What has been sent last.
    sent: Feedback,
}

impl Default for Inlet {
    fn default() -> Inlet {
        Inlet {
            direction: outward(End::Maker),
            tail: 0,
            opened: 1,
            end: OPEN,
            head: 0,
            done: 0,
            closed: false,
            ringing: 0,
            owes_bell: false,
            owes_waking: false,
            called: 0,
            sent: Feedback { opened: 1, ..Feedback::default() },
        }
    }
}

impl Inlet {
    /// Does to the segment what the writer has done. [`Inlet::wake`] is to be called soon: once for several updates.
    ///
    /// # Errors
    /// [`Broken`] if that cannot be, because of what the other host or this one's reader has written.
    pub fn apply(&mut self, segment: &Segment, update: &Update, bytes: &[u8]) -> Result<(), Broken> {
        self.look(segment)?;
        let control = segment.control(self.direction);
        let len = update.tail.checked_sub(self.tail).ok_or(Broken)?;
        let fits = update.tail - self.head <= segment.ring_size() as u64 && len == bytes.len() as u64;
        let follows = if self.end == OPEN { true } else { update.end == self.end };
        let may_write = len == 0 || update.end != OPEN && !self.closed;
        let is_run_legal = update.run.is_none_or(|(ring, start)| {
            let is_at =
                if update.closed.is_some() { (self.head..=update.tail).contains(&ring) } else { ring == update.tail };
            is_at && update.end != OPEN && start >= update.end && start != OPEN
        });
        let has_room = update.run.is_none() || (self.opened.wrapping_sub(self.done) as usize) < RUNS;
        if !(fits && follows && may_write && is_run_legal && has_room) || update.ringing < self.ringing {
            return Err(Broken);
        }
        control.runs[self.opened.wrapping_sub(1) as usize % RUNS].end.store(update.end, Ordering::Release);
        self.end = update.end;
        each_span(segment, self.direction, self.tail, bytes.len(), |ring, from, len| {
            // SAFETY: `len` bytes of the ring, and as many of the slice.
            unsafe { shared::copy(ring, bytes.as_ptr().add(from), len) };
        });
        self.tail = update.tail;
        let was_closed = self.closed;
        self.closed |= update.closed.is_some();
        let is_rung = update.ringing > self.ringing;
        self.ringing = update.ringing;
        let publish = |by_tcp: bool, closed: bool| {
            let flags = if by_tcp { BY_TCP } else { 0 } | if closed { CLOSED } else { 0 };
            control.tail.store(self.tail << POSITION | flags, Ordering::SeqCst);
        };
        // The closed bit comes last: who waits for it finds the rest done.
        publish(self.end == OPEN, was_closed);
        between();
        if let Some((ring, start)) = update.run {
            let run = &control.runs[self.opened as usize % RUNS];
            run.ring.store(ring, Ordering::Relaxed);
            run.start.store(start, Ordering::Relaxed);
            run.end.store(OPEN, Ordering::Relaxed);
            self.opened = self.opened.wrapping_add(1);
            self.end = OPEN;
            control.opened.store(self.opened, Ordering::Release);
        }
        if self.closed {
            publish(update.closed.unwrap_or(self.end == OPEN), true);
        }
        if update.for_good {
            control.for_good.store(1, Ordering::SeqCst);
        }
        if update.ended {
            control.ended.store(1, Ordering::SeqCst);
        }
        between();
        // Behind what they belong to: a reader that knows of a doorbell discards it.
        control.ringing.store(self.ringing, Ordering::SeqCst);
        control.rung.store(self.ringing, Ordering::SeqCst);
        between();
        fence(Ordering::SeqCst);
        self.called = self.called.wrapping_add(u8::from(update.call));
        if is_rung {
            // On its way, or it has come and the reader has found what it belongs to. Then that sleeps again, and has asked for another.
            self.owes_bell = false;
        } else if (len > 0 || update.call) && control.armed.load(Ordering::Relaxed) != 0 {
            let by = control.armed.swap(0, Ordering::SeqCst);
            let is_waker = by == WakeBy::Waker as u32;
            self.owes_waking |= is_waker;
            self.owes_bell |= by != 0 && !is_waker;
        }
        Ok(())
    }

    /// Wakes the reader, if it sleeps and something has come. `wake` does that, and says whether it could: if not, it is rung.
    pub fn wake(&mut self, segment: &Segment, wake: impl FnOnce() -> bool) {
        if std::mem::take(&mut self.owes_waking) {
            let woken = &segment.control(self.direction).woken;
            // Before it is: the reader may run before this goes on.
            woken.fetch_add(1, Ordering::SeqCst);
            if !wake() {
                woken.fetch_sub(1, Ordering::SeqCst);
                self.owes_bell = true;
            }
        }
    }

    fn look(&mut self, segment: &Segment) -> Result<(), Broken> {
        let control = segment.control(self.direction);
        let (head, done) = (control.head.load(Ordering::Acquire), control.done.load(Ordering::Acquire));
        let is_possible = (self.head..=self.tail).contains(&head)
            && done.wrapping_sub(self.done) <= self.opened.wrapping_sub(self.done);
        if !is_possible {
            return Err(Broken);
        }
        (self.head, self.done) = (head, done);
        Ok(())
    }

    /// What is to be said to the writer's end, if it is worth a message: what it may wait for at once, the rest if nothing else is to be
    /// done (`is_idle`).
    ///
    /// # Errors
    /// [`Broken`] if the reader has written what cannot be.
    pub fn feedback(&mut self, segment: &Segment, is_idle: bool) -> Result<Option<Feedback>, Broken> {
        let control = segment.control(self.direction);
        // A reader that wants the ring closed has read its last before.
        let close_wanted = control.close_wanted.load(Ordering::SeqCst) != 0;
        self.look(segment)?;
        let feedback = Feedback {
            head: self.head,
            done: self.done,
            reader: control.reader.load(Ordering::SeqCst) & READER_BITS,
            is_armed: control.armed.load(Ordering::Relaxed) == WakeBy::Doorbell as u32,
            close_wanted,
            owes_bell: self.owes_bell,
            tail: self.tail,
            opened: self.opened,
            has_end: self.end != OPEN,
            called: self.called,
        };
        let sent = self.sent;
        let is_urgent = feedback.reader != sent.reader
            || feedback.close_wanted && !sent.close_wanted
            || feedback.owes_bell && !sent.owes_bell
            || feedback.done != sent.done
            || feedback.called != sent.called
            || feedback.head - sent.head >= segment.ring_size() as u64 / 8;
        let is_worth = is_urgent || is_idle && feedback != sent;
        if is_worth {
            self.sent = feedback;
        }
        Ok(is_worth.then_some(feedback))
    }

    /// Whether the writer has been told that its bytes are read here.
    pub fn is_open(&self) -> bool {
        self.sent.reader & crate::segment::READY != 0
    }

    /// Whether the ring is closed.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether the ring has bytes that the reader has not taken.
    pub fn has_unread(&self, segment: &Segment) -> bool {
        segment.control(self.direction).head.load(Ordering::Acquire) != self.tail
    }

    /// Whether nothing reads any more.
    pub fn is_reader_gone(&self, segment: &Segment) -> bool {
        segment.control(self.direction).reader.load(Ordering::Acquire) & crate::segment::GONE != 0
    }
}

/// Lets other threads of a test see what has been published so far.
#[inline]
fn between() {
    #[cfg(test)]
    std::thread::yield_now();
}

#[cfg(test)]
mod tests;
