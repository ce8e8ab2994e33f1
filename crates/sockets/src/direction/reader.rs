//! The end of a direction that reads.

use super::{Broken, PEEK_MAX, PIECES, Tcp, in_order};
use crate::iovecs::Pieces;
use crate::segment::{BY_TCP, CLOSED, End, GONE, OPEN, Over, POSITION, READY, RUNS, Segment, WakeBy, outward};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use thruway_memory::shared;

/// Runs without bytes, and lots of doorbells, on the way to the next bytes: a writer has a few.
const ROUNDS_MAX: usize = 1024;

/// Where the next bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// So many in the ring.
    Ring(usize),
    /// So many on the TCP connection.
    Tcp(usize),
    /// None yet.
    Nothing,
}

/// Attempts to find bytes that a call has shown. An attempt fails if another process takes all bytes of the TCP connection during it and new
/// bytes arrive directly afterwards.
const TAKEN_MAX: usize = 64;

/// Reads of `opened` and the tail until both belong together: `opened` changes once between them at most, unless the peer lies.
const READS_MAX: usize = 4;

/// A run of TCP bytes, copied when this end first sees it.
#[derive(Debug, Clone, Copy)]
struct Begun {
    ring: u64,
    start: u64,
    /// [`OPEN`] until the writer has ended the run; fixed from then on.
    end: u64,
}

impl Begun {
    /// The writer has ended the run without a byte.
    fn is_empty(&self) -> bool {
        self.end == self.start && self.end != OPEN
    }

    /// The run has ended, and all bytes before this position of the TCP connection were taken.
    fn is_read(&self, position: u64) -> bool {
        self.start <= position && self.end == position
    }
}

/// Private state of the end that reads. All holders of the connection share it, under one lock.
///
/// Each word of the peer's is copied here and checked against the copy before it: positions and counts never go back, and a run never
/// changes once it has begun. Bytes of the TCP connection that a call has reported as data stay data. So
/// two calls never contradict each other, and a loop over them ends. After a word that cannot be, every call fails.
#[derive(Debug, Clone)]
pub struct Reader {
    direction: usize,
    /// Bytes ever read from the ring.
    head: u64,
    /// Bytes ever taken from the TCP connection.
    position: u64,
    /// The first run that this has not come to the end of, and its copy once it has begun.
    run: u32,
    begun: Begun,
    has_begun: bool,
    /// Highest number of runs and highest position of the ring that the peer has published.
    opened: u32,
    tail: u64,
    /// Bytes of the TCP connection before this position are data: a call has reported them.
    told: u64,
    /// Number of unread bytes that a call has shown or counted.
    shown_ahead: usize,
    /// Those of them on the TCP connection, and its position behind the last one. Doorbells lie between them.
    shown_tcp: u64,
    shown_until: u64,
    /// Number of finished runs that the peer knows of.
    done: u32,
    /// The peer has written what cannot be.
    is_broken: bool,
    /// Set while bytes are taken from the TCP connection. After a process was killed here, their number is unknown.
    is_taking: bool,
    /// The last read has ended at the mark of an urgent byte.
    is_at_mark: bool,
    /// Doorbells that have been discarded.
    discarded: u64,
    /// Wake-ups by the relay that have been taken back.
    woken: u32,
    /// How far the ring had been read when the relay was last woken for that.
    shown: u64,
    /// This end has closed the ring.
    is_closed: bool,
    /// The ring is closed, and what was in it comes again by TCP.
    comes_again: bool,
    /// Bytes of it that cannot come again.
    missing: usize,
    /// The writer has been returned the unread stream, and sends it again in order.
    is_returned: bool,
    /// Of the TCP connection, met when something else was wanted of it.
    error: i32,
}

impl Reader {
    /// For one end of a new segment, when `position` bytes have been taken from the TCP connection.
    pub fn new(end: End, position: u64) -> Reader {
        Reader {
            direction: 1 - outward(end),
            head: 0,
            position,
            run: 0,
            begun: Begun { ring: 0, start: 0, end: OPEN },
            has_begun: false,
            opened: 0,
            tail: 0,
            told: 0,
            shown_ahead: 0,
            shown_tcp: 0,
            shown_until: 0,
            done: 0,
            is_broken: false,
            is_taking: false,
            is_at_mark: false,
            discarded: 0,
            woken: 0,
            shown: 0,
            is_closed: false,
            comes_again: false,
            missing: 0,
            is_returned: false,
            error: 0,
        }
    }

    /// Bytes of the TCP connection before this position are data: they came before the peer could ring.
    pub fn set_data_until(&mut self, position: u64) {
        self.told = self.told.max(position);
    }

    /// The peer may use the ring: whatever reads the connection now does it through this.
    pub fn set_ready(&self, segment: &Segment, tcp: &impl Tcp) {
        segment.control(self.direction).reader.fetch_or(READY, Ordering::SeqCst);
        segment.wake_relay(tcp);
    }

    /// Nothing will read any more.
    pub fn set_gone(&self, segment: &Segment, tcp: &impl Tcp) {
        segment.control(self.direction).reader.fetch_or(GONE, Ordering::SeqCst);
        segment.wake_relay(tcp);
    }

    /// Records that the peer has written what cannot be: every later call fails, too.
    fn broken<T>(&mut self) -> Result<T, Broken> {
        self.is_broken = true;
        Err(Broken)
    }

    /// Number of runs that have begun, checked.
    fn opened(&mut self, segment: &Segment) -> Result<u32, Broken> {
        let opened = segment.control(self.direction).opened.load(Ordering::Acquire);
        let pending = opened.wrapping_sub(self.run);
        let is_possible = pending as usize <= RUNS && pending >= self.opened.wrapping_sub(self.run);
        if self.is_broken || self.is_taking || !is_possible {
            return self.broken();
        }
        self.opened = opened;
        Ok(opened)
    }

    /// The copy of the current run, if it has begun. `end` may have been reached since the last call.
    fn current(&mut self, segment: &Segment) -> Result<Option<Begun>, Broken> {
        if self.opened(segment)? == self.run {
            return Ok(None);
        }
        let run = &segment.control(self.direction).runs[self.run as usize % RUNS];
        if !self.has_begun {
            let (ring, start) = (run.ring.load(Ordering::Relaxed), run.start.load(Ordering::Relaxed));
            // Bytes of the ring that were published before it are before it.
            if ring < self.head || !self.is_closed && ring < self.tail {
                return self.broken();
            }
            self.begun = Begun { ring, start, end: OPEN };
            in_order(&mut self.begun);
            self.has_begun = true;
        }
        if self.begun.end == OPEN {
            let end = run.end.load(Ordering::Acquire);
            if end < self.begun.start {
                return self.broken();
            }
            self.begun.end = end;
        }
        Ok(Some(self.begun))
    }

    /// The current run is over.
    fn next_run(&mut self) {
        self.has_begun = false;
        in_order(&mut self.has_begun);
        self.run = self.run.wrapping_add(1);
    }

    /// Publishes the number of finished runs.
    fn publish_done(&mut self, segment: &Segment, tcp: &impl Tcp) {
        if self.done != self.run {
            self.done = self.run;
            segment.control(self.direction).done.store(self.run, Ordering::Release);
            segment.wake_relay(tcp);
        }
    }

    /// Bytes that the ring has for this end now. Cheap: no system call. Without an error, the bytes stay there until they are read.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn ring_len(&mut self, segment: &Segment) -> Result<usize, Broken> {
        // Runs whose end has been reached, which was not known to be one then, hide nothing.
        for _ in 0..RUNS {
            match self.current(segment)? {
                Some(run) if run.ring == self.head && (run.is_empty() || run.is_read(self.position)) => self.next_run(),
                _ => break,
            }
        }
        self.len_here(segment)
    }

    /// Whether what comes on the TCP connection may be more than doorbells: the peer sends by TCP, or has since the ring was looked at.
    pub fn has_run(&self, segment: &Segment) -> bool {
        self.run != segment.control(self.direction).opened.load(Ordering::Acquire)
    }

    /// True if the ring has unread bytes, also behind bytes of the TCP connection. Cheap: no system call.
    pub fn has_unread_in_ring(&self, segment: &Segment) -> bool {
        let tail = segment.control(self.direction).tail.load(Ordering::Acquire);
        tail & CLOSED == 0 && tail >> POSITION != self.head
    }

    /// Bytes that the ring has before the current run.
    fn len_here(&mut self, segment: &Segment) -> Result<usize, Broken> {
        for _ in 0..READS_MAX {
            let limit = match self.current(segment)? {
                Some(run) => run.ring,
                None if self.comes_again => return Ok(0),
                None => {
                    let control = segment.control(self.direction);
                    let tail = control.tail.load(Ordering::Acquire) >> POSITION;
                    // A run has begun since: bytes behind it follow later.
                    if control.opened.load(Ordering::Acquire) != self.run {
                        continue;
                    }
                    if tail < self.tail {
                        return self.broken();
                    }
                    self.tail = tail;
                    tail
                }
            };
            return match limit.checked_sub(self.head) {
                Some(len) if len <= segment.ring_size() as u64 => Ok(len as usize),
                _ => self.broken(),
            };
        }
        self.broken()
    }

    /// Where the next bytes are. Discards doorbells before the bytes of a run; asks for a doorbell before that.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn find(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<Found, Broken> {
        for _ in 0..TAKEN_MAX {
            let found = self.find_next(segment, tcp)?;
            if found != Found::Nothing || self.shown_ahead == 0 {
                return Ok(found);
            }
            // Another reader has taken these bytes, or the peer has retracted them.
            if self.available(tcp) == 0 {
                self.shown_ahead = 0;
                return Ok(found);
            }
            // New bytes may have arrived.
        }
        self.broken()
    }

    fn find_next(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<Found, Broken> {
        for _ in 0..ROUNDS_MAX {
            let ring = self.len_here(segment)?;
            self.publish_done(segment, tcp);
            if ring > 0 {
                return Ok(Found::Ring(ring));
            }
            let current = self.current(segment)?;
            let told = self.told_data(current);
            if told > 0 {
                match self.available(tcp).min(told) {
                    // Another reader has taken them.
                    0 => self.told = self.position,
                    len => return Ok(Found::Tcp(len)),
                }
            }
            let Some(run @ Begun { start, end, .. }) = current else {
                return Ok(Found::Nothing);
            };
            if run.is_empty() {
                // Doorbells before it may be those of bytes behind it.
                self.next_run();
                continue;
            }
            if self.position < start {
                if !segment.is_relayed() {
                    // If the run ends without bytes, the bytes behind it have a doorbell.
                    segment.control(self.direction).armed.store(WakeBy::Doorbell as u32, Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    if self.current(segment)?.is_none_or(|run| run.is_empty()) {
                        continue;
                    }
                }
                let bells = usize::try_from(start - self.position).unwrap_or(usize::MAX).min(self.available(tcp));
                if bells == 0 || !self.discard(tcp, bells) {
                    return Ok(Found::Nothing);
                }
                continue;
            }
            let mut end = end;
            let mut available = 0;
            if end == OPEN {
                // What is there before the run has ended belongs to it.
                available = self.available(tcp);
                end = self.current(segment)?.map_or(OPEN, |run| run.end);
            } else if self.position < end {
                available = self.available(tcp);
            }
            if end == OPEN {
                if available == 0 {
                    return Ok(Found::Nothing);
                }
                self.told = self.told.max(self.position.saturating_add(available as u64));
                return Ok(Found::Tcp(available));
            }
            let Some(left) = end.checked_sub(self.position) else { return self.broken() };
            if left > 0 {
                let left = usize::try_from(left).unwrap_or(usize::MAX);
                return Ok(if available > 0 { Found::Tcp(available.min(left)) } else { Found::Nothing });
            }
            self.next_run();
        }
        // A peer that begins runs as fast as they are passed, or sends doorbells without end.
        self.broken()
    }

    /// Number of bytes at the front of the TCP connection that are known to be data and do not belong to this run.
    fn told_data(&self, current: Option<Begun>) -> usize {
        let end = match current {
            None => u64::MAX,
            Some(run) if self.position < run.start => run.start,
            Some(_) => return 0,
        };
        usize::try_from(self.told.min(end).saturating_sub(self.position)).unwrap_or(usize::MAX)
    }

    fn begin_taking(&mut self) {
        self.is_taking = true;
        in_order(self);
    }

    fn end_taking(&mut self) {
        in_order(self);
        self.is_taking = false;
    }

    fn available(&mut self, tcp: &impl Tcp) -> usize {
        let result = tcp.available();
        self.or_keep(result).unwrap_or(0)
    }

    /// Doorbells that have been rung, or are about to be, and have not been discarded.
    fn bells(&self, segment: &Segment) -> usize {
        let ringing = segment.control(self.direction).ringing.load(Ordering::SeqCst);
        usize::try_from(ringing.wrapping_sub(self.discarded)).unwrap_or(usize::MAX)
    }

    /// False if none could be discarded.
    fn discard(&mut self, tcp: &impl Tcp, bells: usize) -> bool {
        let left = self.shown_until.saturating_sub(self.position);
        if left > 0 && self.shown_tcp > 0 && bells as u64 > left.saturating_sub(self.shown_tcp) {
            // The peer says that bytes are doorbells which were shown.
            self.is_broken = true;
            return false;
        }
        self.begin_taking();
        let result = tcp.skip(bells);
        let discarded = self.or_keep(result).unwrap_or(0) as u64;
        self.position += discarded;
        self.discarded += discarded;
        self.end_taking();
        discarded > 0
    }

    /// Reads what is there, as far as it fits, and not across the mark of an urgent byte. An error of the TCP connection ends it early, and is
    /// kept for [`Reader::take_error`].
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// `to` must be writable memory that nothing borrows.
    pub unsafe fn read(&mut self, segment: &Segment, tcp: &impl Tcp, to: &mut Pieces<'_>) -> Result<usize, Broken> {
        // SAFETY: the caller's promise.
        unsafe { self.read_more(segment, tcp, to, false) }
    }

    /// As [`Reader::read`]. `has_some`: for a call that has read bytes already, and ends at a mark in front of the next.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// As [`Reader::read`].
    pub unsafe fn read_more(
        &mut self,
        segment: &Segment,
        tcp: &impl Tcp,
        to: &mut Pieces<'_>,
        has_some: bool,
    ) -> Result<usize, Broken> {
        let mut sum = 0;
        self.is_at_mark = false;
        while to.left() > 0 {
            let len = match self.find(segment, tcp)? {
                Found::Nothing => break,
                Found::Ring(len) => {
                    let len = len.min(to.left()).min(segment.ring_size() / PIECES);
                    // SAFETY: the caller's promise; `find` has checked that the ring has as many.
                    unsafe { self.copy_out(segment, to, len) };
                    self.head += len as u64;
                    segment.control(self.direction).head.store(self.head, Ordering::Release);
                    if self.head - self.shown >= segment.ring_size() as u64 / 8 {
                        self.shown = self.head;
                        segment.wake_relay(tcp);
                    }
                    len
                }
                Found::Tcp(_) if (has_some || sum > 0) && tcp.is_at_urgent_mark() => {
                    self.is_at_mark = true;
                    break;
                }
                Found::Tcp(len) => {
                    self.begin_taking();
                    let result = tcp.read(to, len.min(to.left()));
                    let len = self.or_keep(result).unwrap_or(0);
                    self.position += len as u64;
                    self.end_taking();
                    if len == 0 {
                        break;
                    }
                    self.note_again(segment, len);
                    self.shown_tcp = self.shown_tcp.saturating_sub(len as u64);
                    to.advance(len);
                    len
                }
            };
            self.shown_ahead = self.shown_ahead.saturating_sub(len);
            sum += len;
        }
        Ok(sum)
    }

    /// The last read has ended at the mark of an urgent byte.
    pub fn is_at_mark(&self) -> bool {
        self.is_at_mark
    }

    /// Bytes were read from the TCP connection. If a relay has brought no word of them, they are those of the closed ring that come again: the
    /// process that sent them ended before its relay learned of it. The rest of them is in the ring.
    fn note_again(&mut self, segment: &Segment, len: usize) {
        if self.comes_again && segment.is_relayed() && !self.has_run(segment) {
            self.head = self.head.saturating_add(len as u64).min(self.tail.max(self.head));
        }
    }

    /// Reads bytes that the kernel reports although [`Reader::find`] finds none: a writer without the library has sent them, or they follow
    /// urgent data. `is_peek`: leaves them there.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// As [`Reader::read`].
    pub unsafe fn read_unexpected(
        &mut self,
        segment: &Segment,
        tcp: &impl Tcp,
        to: &mut Pieces<'_>,
        is_peek: bool,
    ) -> Result<usize, Broken> {
        let max = self.unexpected(segment, tcp)?.min(to.left());
        if max == 0 {
            return Ok(0);
        }
        let mut len;
        if is_peek {
            let result = tcp.peek(to, max, 0);
            len = self.or_keep(result).unwrap_or(0);
        } else {
            self.begin_taking();
            let result = tcp.read(to, max);
            len = self.or_keep(result).unwrap_or(0);
            self.position += len as u64;
            self.end_taking();
            // If a run has ended since, the bytes behind it are doorbells.
            let end = self.current(segment)?.map_or(OPEN, |run| run.end);
            let bells = self.position.saturating_sub(end);
            self.discarded += bells;
            len -= (bells as usize).min(len);
            self.note_again(segment, len);
            self.shown_ahead = self.shown_ahead.saturating_sub(len);
            self.shown_tcp = self.shown_tcp.saturating_sub(len as u64);
        }
        to.advance(len);
        Ok(len)
    }

    /// Bytes on the TCP connection that are neither of a run nor doorbells: a peer without the library sends such bytes. 0 for a relayed
    /// connection before its relay has finished, because bytes may arrive before the relay's message about them.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn unexpected(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<usize, Broken> {
        if segment.is_relayed() && segment.over() != Over::Finished || self.find(segment, tcp)? != Found::Nothing {
            return Ok(0);
        }
        // Before the number of doorbells, which counts each before it is sent.
        let available = self.available(tcp);
        if self.has_run(segment) {
            // The run is new. It may begin behind doorbells.
            return Ok(match self.find(segment, tcp)? {
                Found::Tcp(len) => len,
                _ => 0,
            });
        }
        let unexpected = available.saturating_sub(self.bells(segment));
        if unexpected > 0 {
            self.told = self.told.max(self.position.saturating_add(unexpected as u64));
        }
        Ok(unexpected)
    }

    /// As [`Reader::read`], but leaves everything there.
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// As [`Reader::read`].
    pub unsafe fn peek(&mut self, segment: &Segment, tcp: &impl Tcp, to: &mut Pieces<'_>) -> Result<usize, Broken> {
        if self.find(segment, tcp)? == Found::Nothing {
            return Ok(0);
        }
        let before = to.left();
        self.look_ahead(segment, tcp, |ahead, found, skipped| {
            match found {
                Found::Ring(len) => {
                    let len = len.min(to.left());
                    // SAFETY: the caller's promise; the ring has as many.
                    unsafe { ahead.copy_out(segment, to, len) };
                    len
                }
                Found::Tcp(_) if skipped == 0 && to.left() < before && tcp.is_at_urgent_mark() => 0,
                Found::Tcp(len) if skipped <= PEEK_MAX && to.left() > 0 => {
                    let result = tcp.peek(to, len.min(to.left()), skipped);
                    let len = ahead.or_keep(result).unwrap_or(0);
                    to.advance(len);
                    len
                }
                _ => 0,
            }
        })?;
        self.shown_ahead = self.shown_ahead.max(before - to.left());
        Ok(before - to.left())
    }

    /// Bytes of the stream that are there, in the ring and on the TCP connection. All of them: a program that learns of fewer takes what
    /// comes behind for news, and waits to hear of it. None at the mark of an urgent byte, as with `FIONREAD`.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn unread(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<usize, Broken> {
        let mut sum = 0;
        if self.find(segment, tcp)? != Found::Nothing {
            self.look_ahead(segment, tcp, |_, found, skipped| match found {
                Found::Tcp(_) if skipped == 0 && tcp.is_at_urgent_mark() => 0,
                Found::Ring(len) | Found::Tcp(len) => {
                    sum += len;
                    len
                }
                Found::Nothing => 0,
            })?;
        }
        self.shown_ahead = self.shown_ahead.max(sum);
        Ok(sum)
    }

    /// Visits what is there, place by place, and leaves it there: a reader that has come so far, the place, and the bytes of the TCP
    /// connection before it. Ends when a visit takes less than there is.
    fn look_ahead(
        &mut self,
        segment: &Segment,
        tcp: &impl Tcp,
        mut visit: impl FnMut(&mut Reader, Found, usize) -> usize,
    ) -> Result<(), Broken> {
        let available = self.available(tcp) as u64;
        let mut ahead = self.clone();
        let mut visited = 0;
        for _ in 0..2 * RUNS {
            let ring = ahead.len_here(segment)?;
            if ring > 0 {
                let taken = visit(&mut ahead, Found::Ring(ring), 0);
                ahead.head += taken as u64;
                if taken < ring {
                    break;
                }
            }
            let current = ahead.current(segment)?;
            let skipped = ahead.position - self.position;
            let told = available.saturating_sub(skipped).min(ahead.told_data(current) as u64);
            if told > 0 {
                let taken = visit(&mut ahead, Found::Tcp(told as usize), skipped as usize) as u64;
                ahead.position += taken;
                visited += taken;
                if taken < told {
                    break;
                }
            }
            // What was there before the run has ended belongs to it.
            let Some(Begun { start, end, .. }) = current else { break };
            ahead.position = ahead.position.max(start);
            let skipped = ahead.position - self.position;
            let len = available.saturating_sub(skipped).min(end.saturating_sub(ahead.position));
            if len > 0 {
                let taken = visit(&mut ahead, Found::Tcp(len as usize), skipped as usize) as u64;
                ahead.position += taken;
                visited += taken;
            }
            if ahead.position != end {
                break;
            }
            ahead.next_run();
        }
        if visited > 0 && ahead.position >= self.shown_until {
            (self.shown_tcp, self.shown_until) = (visited, ahead.position);
        }
        self.error = ahead.error;
        Ok(())
    }

    /// What a system call says, or nothing; its error is kept.
    fn or_keep<T>(&mut self, result: io::Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                if error.kind() != io::ErrorKind::WouldBlock && self.error == 0 {
                    self.error = error.raw_os_error().unwrap_or(libc::EIO);
                }
                None
            }
        }
    }

    /// An error of the TCP connection that has been met: the kernel tells each once. 0 if there is none.
    pub fn take_error(&mut self) -> i32 {
        std::mem::take(&mut self.error)
    }

    /// # Safety
    /// As [`Reader::read`]; the ring has `len` bytes.
    unsafe fn copy_out(&self, segment: &Segment, to: &mut Pieces<'_>, len: usize) {
        let size = segment.ring_size();
        let ring = segment.ring(self.direction);
        let (mut at, mut left) = (self.head as usize & (size - 1), len);
        while left > 0 {
            let Some((base, piece)) = to.first() else { break };
            let step = piece.min(left).min(size - at);
            // SAFETY: `at + step` is inside the ring; the caller's promise for `base`.
            unsafe { shared::copy(base, ring.add(at), step) };
            at = (at + step) & (size - 1);
            left -= step;
            to.advance(step);
        }
    }

    /// Number of doorbells that this end has discarded.
    pub fn discarded(&self) -> u64 {
        self.discarded
    }

    /// Number of doorbells that this end has discarded, and of wake-ups by the relay that it has taken back. Wraps around.
    pub fn taken_back(&self) -> u64 {
        self.discarded.wrapping_add(self.woken.into())
    }

    /// Number of bytes that the TCP connection has brought. Of those that a process took before it was killed, some may be missing. From another host,
    /// wake-ups by the relay count, too.
    pub fn arrived(&mut self, segment: &Segment, tcp: &impl Tcp) -> u64 {
        let woken = if segment.is_relayed() { segment.control(self.direction).woken.load(Ordering::SeqCst) } else { 0 };
        self.position.wrapping_add(self.available(tcp) as u64).wrapping_add(woken.into())
    }

    /// True while rung doorbells are not discarded.
    pub fn has_doorbells(&self, segment: &Segment) -> bool {
        self.bells(segment) > 0
    }

    /// When [`Reader::find`] has found nothing: discards the doorbells that have rung, and takes back wake-ups by the relay, so that the
    /// kernel calls the connection readable only when there is something new. Whether there was a doorbell.
    pub fn discard_doorbells(&mut self, segment: &Segment, tcp: &impl Tcp) -> bool {
        if segment.is_relayed() && segment.control(self.direction).woken.load(Ordering::SeqCst) != self.woken {
            self.woken = self.woken.wrapping_add(tcp.quiet_waker());
        }
        if self.has_run(segment) || self.bells(segment) == 0 {
            return false;
        }
        let bells = self.available(tcp).min(self.bells(segment));
        // All that was there before another run has begun.
        bells > 0 && !self.has_run(segment) && self.discard(tcp, bells)
    }

    /// At the end of the TCP connection: if the peer was to send again what was in the ring that this end has closed, and has gone before,
    /// takes it from the ring after all. True if there is any.
    pub fn reclaim(&mut self, segment: &Segment) -> bool {
        let is_waiting = self.comes_again && !self.has_run(segment);
        self.comes_again &= !is_waiting;
        is_waiting && self.ring_len(segment).is_ok_and(|len| len > 0)
    }

    /// True if this end has closed the ring, and the next byte is one of those that the peer has to send again. A call may have reported it before.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn awaits_again(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<bool, Broken> {
        let owed = self.tail.saturating_sub(self.head);
        if !self.comes_again || owed == 0 || self.find(segment, tcp)? != Found::Nothing {
            return Ok(false);
        }
        let run = self.current(segment)?;
        Ok(run.is_none_or(|run| self.position < run.start.saturating_add(owed)))
    }

    /// True if this end has read all bytes that the peer has sent by TCP: no run is open, and the last run was read to its end.
    pub fn knows_all(&self, segment: &Segment) -> bool {
        let control = segment.control(self.direction);
        let opened = control.opened.load(Ordering::Acquire);
        let end = control.runs[self.run as usize % RUNS].end.load(Ordering::Acquire);
        opened == self.run || opened == self.run.wrapping_add(1) && end != OPEN && end <= self.position
    }

    /// Whether the peer has ended its direction of the TCP connection, or is about to: the kernel has more to say than the ring.
    pub fn is_ended(&self, segment: &Segment) -> bool {
        segment.control(self.direction).ended.load(Ordering::Relaxed) != 0
    }

    /// Whether it is known what everything is that the kernel has: from another host, bytes of the TCP connection, and its end, may come
    /// before the update that describes them. The end needs no update if the peer sends by TCP for good. Discards doorbells.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn is_explained(&mut self, segment: &Segment, tcp: &impl Tcp, is_at_end: bool) -> Result<bool, Broken> {
        // The run of these bytes was opened before.
        let is_for_good = is_at_end && segment.control(self.direction).for_good.load(Ordering::SeqCst) != 0;
        if !segment.is_relayed() || segment.over() == Over::Lost || self.find(segment, tcp)? != Found::Nothing {
            return Ok(true);
        }
        self.discard_doorbells(segment, tcp);
        let has_come = is_for_good || self.is_ended(segment) || segment.over() != Over::No;
        // What comes now was not meant.
        Ok(if is_at_end { has_come } else { self.available(tcp) == 0 || has_come })
    }

    /// Asks to be woken by what comes next. False if there is something already; then the wake-up may come nevertheless.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn arm(&mut self, segment: &Segment, by: WakeBy) -> Result<bool, Broken> {
        let armed = &segment.control(self.direction).armed;
        match by {
            WakeBy::Doorbell => armed.store(by as u32, Ordering::SeqCst),
            // A doorbell that another thread has asked for wakes this one, too, and the waker might not wake that.
            WakeBy::Waker => _ = armed.compare_exchange(0, by as u32, Ordering::SeqCst, Ordering::Relaxed),
        }
        fence(Ordering::SeqCst);
        Ok(self.ring_len(segment)? == 0)
    }

    /// After [`Reader::find`] has found nothing: asks for a doorbell with the next bytes, and discards the doorbells of earlier bytes. Bytes that
    /// arrive during this call keep their doorbell, for processes that wait in the kernel only. True if the ring is empty.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn rearm(&mut self, segment: &Segment, tcp: &impl Tcp, by: WakeBy) -> Result<bool, Broken> {
        if segment.is_relayed() {
            self.discard_doorbells(segment, tcp);
            return self.arm(segment, by);
        }
        // Doorbells that arrive from here on may be those of new bytes.
        let bells = if self.bells(segment) > 0 { self.available(tcp).min(self.bells(segment)) } else { 0 };
        let has_run = self.has_run(segment);
        let is_empty = self.arm(segment, by)?;
        if is_empty && !has_run && bells > 0 {
            self.discard(tcp, bells);
        }
        Ok(is_empty)
    }

    /// True if the TCP connection is readable, or will be when a doorbell arrives. False if a doorbell could not be sent because the connection
    /// was full.
    pub fn is_announced(&mut self, segment: &Segment, tcp: &impl Tcp) -> bool {
        let control = segment.control(self.direction);
        let is_ringing = control.ringing.load(Ordering::SeqCst) != control.rung.load(Ordering::SeqCst);
        segment.is_relayed() || is_ringing || self.available(tcp) > 0
    }

    /// True if all doorbells that have been rung are on the TCP connection, or were discarded.
    pub fn has_all_doorbells(&mut self, segment: &Segment, tcp: &impl Tcp) -> bool {
        let bells = self.bells(segment);
        bells == 0 || self.available(tcp) >= bells
    }

    /// Asks for no wake-up: this end looks by itself.
    pub fn disarm(&self, segment: &Segment) {
        segment.control(self.direction).armed.store(0, Ordering::Relaxed);
    }

    /// The word that changes with what the peer writes to the ring, for who looks again and again.
    pub fn tail<'a>(&self, segment: &'a Segment) -> &'a AtomicU64 {
        &segment.control(self.direction).tail
    }

    /// Within a host: asks for a doorbell also for bytes that the ring has already, when the peer makes its next call; see [`Writer::answer`](super::Writer::answer).
    pub fn ask(&self, segment: &Segment) {
        let control = segment.control(self.direction);
        control.armed.store(WakeBy::Doorbell as u32, Ordering::SeqCst);
        control.asked.store(1, Ordering::SeqCst);
    }

    /// True if the peer waits for an act of this end's writer: it has closed the ring to which this end writes, or has asked for a doorbell.
    pub fn has_peer_called(&self, segment: &Segment) -> bool {
        let control = segment.control(1 - self.direction);
        control.tail.load(Ordering::Relaxed) & CLOSED != 0 || control.asked.load(Ordering::Relaxed) != 0
    }

    /// True after this end has closed the ring.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn direction(&self) -> usize {
        self.direction
    }

    /// Bytes ever taken from the TCP connection.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// The whole unread stream has been returned to the writer, which sends it again by TCP. It can be returned once only.
    pub(super) fn end_return(&mut self) {
        (self.missing, self.is_returned) = (0, true);
    }

    /// True if all later bytes on the TCP connection belong to the stream, and the ring carries none: within a host, after the ring was
    /// closed.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn is_plain(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<bool, Broken> {
        if !self.is_closed || self.missing > 0 || segment.is_relayed() {
            return Ok(false);
        }
        if matches!(self.find(segment, tcp)?, Found::Ring(_)) {
            return Ok(false);
        }
        // After its ring is closed, a writer begins at most one more run. The bytes of that run follow those of the previous run.
        let run = self.current(segment)?;
        Ok(run.is_some_and(|run| run.start <= self.position && run.end == OPEN))
    }

    /// Takes nothing more from the ring: the peer goes on by TCP, beginning with what is in the ring now. The doorbells that are on their
    /// way have been discarded when this returns, so that whatever reads the TCP connection next finds the stream there. `patience` returns
    /// false when the time for them is over. Returns the number of bytes that are out of order on the TCP connection: bytes of the ring that
    /// cannot come again, because TCP has later ones already, and doorbells behind unread bytes. A [`Return`](super::Return) repairs that.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn close_ring(
        &mut self,
        segment: &Segment,
        tcp: &impl Tcp,
        mut patience: impl FnMut() -> bool,
    ) -> Result<usize, Broken> {
        let control = segment.control(self.direction);
        if segment.is_relayed() {
            // The last byte is where the writer is now, on the other host.
            control.close_wanted.store(1, Ordering::SeqCst);
            segment.check_relay(tcp);
            while control.tail.load(Ordering::SeqCst) & CLOSED == 0 && segment.over() == Over::No {
                if !patience() {
                    return Err(Broken);
                }
            }
            if segment.over() == Over::Lost {
                return Err(Broken);
            }
        }
        let opened = control.opened.load(Ordering::SeqCst);
        let word = match control.tail.fetch_or(CLOSED, Ordering::SeqCst) {
            word if segment.is_relayed() && !self.is_closed => word & !CLOSED,
            word => word,
        };
        self.finish_closing(segment, tcp, word, opened, patience)
    }

    /// As [`Reader::close_ring`], within a host, if the ring is empty; `None` if it is not. Bytes of the ring that a call has reported then
    /// do not depend on the peer.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn close_empty_ring(
        &mut self,
        segment: &Segment,
        tcp: &impl Tcp,
        patience: impl FnMut() -> bool,
    ) -> Result<Option<usize>, Broken> {
        let control = segment.control(self.direction);
        let opened = control.opened.load(Ordering::SeqCst);
        let word = control.tail.load(Ordering::SeqCst);
        let is_empty = word & CLOSED == 0 && word >> POSITION == self.head && self.shown_ahead == 0;
        let close = || control.tail.compare_exchange(word, word | CLOSED, Ordering::SeqCst, Ordering::Relaxed);
        if segment.is_relayed() || !is_empty || close().is_err() {
            return Ok(None);
        }
        self.finish_closing(segment, tcp, word, opened, patience).map(Some)
    }

    /// The ring is closed. `word`: its tail before.
    fn finish_closing(
        &mut self,
        segment: &Segment,
        tcp: &impl Tcp,
        word: u64,
        opened: u32,
        mut patience: impl FnMut() -> bool,
    ) -> Result<usize, Broken> {
        let control = segment.control(self.direction);
        self.is_closed = true;
        // Bytes of the ring may come again by TCP.
        (self.shown_ahead, self.shown_tcp) = (0, 0);
        if word & CLOSED == 0 {
            control.armed.store(0, Ordering::SeqCst);
            // A peer that has gone sends nothing again.
            let is_gone =
                self.is_ended(segment) || segment.is_relayed() && segment.over() != Over::No || tcp.is_at_end();
            self.comes_again = word & BY_TCP == 0 && !is_gone;
            self.tail = self.tail.max(word >> POSITION);
            // Steps over runs that have ended.
            self.find(segment, tcp)?;
            // From another host, the run by which they come again may be known already: the only one without an end.
            let last = control.runs[opened.wrapping_sub(1) as usize % RUNS].end.load(Ordering::Acquire);
            let has_begun = self.comes_again && segment.is_relayed() && last == OPEN;
            let opened = opened.wrapping_sub(u32::from(has_begun));
            // Bytes of the ring before a run that had begun would come again behind it.
            let unread = (word >> POSITION).wrapping_sub(self.head).min(segment.ring_size() as u64);
            let is_before_run = if self.comes_again { self.run != opened } else { true };
            self.missing = if is_before_run { unread as usize } else { 0 };
        }
        if self.missing > 0 {
            return Ok(self.missing);
        }
        if self.is_returned {
            return Ok(0);
        }
        loop {
            let found = self.find(segment, tcp)?;
            if found == Found::Nothing {
                self.discard_doorbells(segment, tcp);
            }
            // Doorbells may be on their way, also within a host: a busy kernel delivers them later. Doorbells behind bytes of the stream stay:
            // only a call that receives takes the bytes.
            let mut is_ringing = found == Found::Nothing && self.bells(segment) > 0;
            if !segment.is_relayed() {
                is_ringing |= control.ringing.load(Ordering::SeqCst) != control.rung.load(Ordering::SeqCst);
            }
            if !is_ringing || !patience() {
                return Ok(match found {
                    Found::Ring(len) => len,
                    _ if !segment.is_relayed() => self.bells(segment),
                    _ => 0,
                });
            }
        }
    }
}
