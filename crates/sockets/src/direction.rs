//! One direction of an accelerated connection: which bytes go by TCP, which through the ring, and what wakes the reader.
//!
//! The writer alone decides. It publishes each run of TCP bytes: behind which byte of the ring it comes, and where it begins and ends
//! in the TCP connection. While bytes go through the ring, the only bytes on the TCP connection are *doorbells*: one byte with no
//! meaning, sent when the reader has asked for one because it is about to sleep. The reader discards them. It never takes more bytes
//! from TCP than it knows the meaning of: it asks the kernel how many there are, and only then whether the run has ended.
//!
//! ```text
//! stream:  | TCP bytes   | ring bytes     | TCP bytes          | ring ...
//! TCP:     | 0 ..... end0|  d d d         | start1 ....... end1|  d
//! ```
//!
//! The reader can close the ring at any time ([`Reader::close_ring`]): it sets a bit in the very word by which the writer publishes and
//! changes ways, so both ends agree on the last byte. The writer sends again, by TCP, what the reader has not taken from the ring.

use crate::iovecs::Pieces;
use crate::segment::{BY_TCP, CLOSED, End, GONE, OPEN, POSITION, READY, RUNS, Segment, outward};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use thruway_memory::shared;

/// How far into the bytes of a TCP connection [`Tcp::peek`] can look.
pub const PEEK_MAX: usize = 4096;

/// The TCP connection below, as one direction of it needs it. Nothing here waits.
pub trait Tcp {
    /// Bytes ever written to it from this end.
    ///
    /// # Errors
    /// Those of `getsockopt(2)`.
    fn written(&self) -> io::Result<u64>;

    /// Bytes that can be read from it now.
    ///
    /// # Errors
    /// Those of `ioctl(2)`.
    fn available(&self) -> io::Result<usize>;

    /// Reads up to `max` bytes, of which there are as many.
    ///
    /// # Errors
    /// Those of `recvmsg(2)`.
    fn read(&self, to: &Pieces<'_>, max: usize) -> io::Result<usize>;

    /// Reads up to `max` bytes that are there behind the first `skipped`, at most [`PEEK_MAX`], and leaves all there.
    ///
    /// # Errors
    /// Those of `recvmsg(2)`.
    fn peek(&self, to: &Pieces<'_>, max: usize, skipped: usize) -> io::Result<usize>;

    /// Discards up to `max` bytes, of which there are as many.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    fn skip(&self, max: usize) -> io::Result<usize>;

    /// Sends bytes.
    ///
    /// # Errors
    /// Those of `send(2)`.
    ///
    /// # Safety
    /// There must be `len` readable bytes.
    unsafe fn send(&self, from: *const u8, len: usize) -> io::Result<usize>;

    /// Has bytes that the kernel holds back for more to come go now: none may come for long.
    fn flush(&self);

    /// Sends one byte. That it cannot be sent is seen elsewhere: the connection is at its end, or has other bytes that wake the peer.
    fn doorbell(&self);
}

/// A long call moves a ring's bytes in so many pieces, so that both ends are at work at a time.
const PIECES: usize = 8;

/// The peer has written what cannot be. The connection is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

impl From<Broken> for io::Error {
    fn from(_: Broken) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, "the peer broke the ring in shared memory")
    }
}

/// What this end knows of the direction that it writes to. All who hold the connection share it, under one lock.
#[derive(Debug)]
pub struct Writer {
    direction: usize,
    /// Bytes ever written to the ring.
    tail: u64,
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
}

impl Writer {
    /// For one end of a new segment: all bytes go by TCP yet.
    pub fn new(end: End) -> Writer {
        Writer {
            direction: outward(end),
            tail: 0,
            head: 0,
            opened: 1,
            is_tcp: true,
            is_pinned: false,
            is_closed: false,
            owed: 0,
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

    /// Free bytes of the ring; looks at the peer's position if there are fewer than `wanted`.
    fn room(&mut self, segment: &Segment, wanted: usize) -> Result<usize, Broken> {
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

    /// Ends the run of TCP bytes if what follows can go through the ring. The caller vouches that nothing else writes to the TCP
    /// connection meanwhile. True if bytes go through the ring now.
    ///
    /// # Errors
    /// [`Broken`], those of [`Tcp::written`].
    pub fn leave_tcp(&mut self, segment: &Segment, tcp: &impl Tcp) -> io::Result<bool> {
        let control = segment.control(self.direction);
        if !self.is_tcp || self.is_pinned {
            return Ok(!self.is_tcp);
        }
        if control.reader.load(Ordering::Acquire) != READY {
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
            self.is_pinned = true;
            self.owed = self.tail;
            return Ok(false);
        }
        control.runs[(self.opened as usize - 1) % RUNS].end.store(end, Ordering::Release);
        self.is_tcp = false;
        tcp.flush();
        Ok(true)
    }

    /// Has what follows go by TCP; `for_good` or until [`Writer::leave_tcp`]. The caller vouches that nothing else writes to the TCP
    /// connection meanwhile.
    ///
    /// # Errors
    /// Those of [`Tcp::written`]; nothing has changed then.
    pub fn enter_tcp(&mut self, segment: &Segment, tcp: &impl Tcp, for_good: bool) -> io::Result<()> {
        if !self.is_tcp {
            let start = tcp.written()?;
            if !self.change(segment, self.tail, true) {
                self.send_again(segment, tcp)?;
                return Ok(());
            }
            self.begin_run(segment, self.tail, start);
        }
        if for_good && !self.is_pinned {
            self.is_pinned = true;
            self.owed = self.tail;
        }
        Ok(())
    }

    fn begin_run(&mut self, segment: &Segment, ring: u64, start: u64) {
        let control = segment.control(self.direction);
        let run = &control.runs[self.opened as usize % RUNS];
        run.ring.store(ring, Ordering::Relaxed);
        run.start.store(start, Ordering::Relaxed);
        run.end.store(OPEN, Ordering::Relaxed);
        self.opened += 1;
        control.opened.store(self.opened, Ordering::Release);
        self.is_tcp = true;
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

    /// Sends again, by TCP, what a reader that has closed the ring has not taken from it. The caller vouches that nothing else writes to
    /// the TCP connection meanwhile. False if TCP has no room for all of it yet: then nothing else may be sent.
    ///
    /// # Errors
    /// [`Broken`], those of the TCP connection.
    pub fn send_again(&mut self, segment: &Segment, tcp: &impl Tcp) -> io::Result<bool> {
        if !self.is_closed && !self.is_closed_by_reader(segment) {
            return Ok(true);
        }
        self.is_closed = true;
        if !self.is_tcp {
            let head = segment.control(self.direction).head.load(Ordering::Acquire);
            if head < self.head || head > self.tail {
                return Err(Broken.into());
            }
            self.begin_run(segment, head, tcp.written()?);
            self.owed = head;
        } else if !self.is_pinned {
            // The ring was not in use: nothing in it is to be sent again.
            self.owed = self.tail;
        }
        self.is_pinned = true;
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
        Ok(true)
    }

    /// Whether the reader has closed the ring.
    pub fn is_closed_by_reader(&self, segment: &Segment) -> bool {
        segment.control(self.direction).tail.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Rings although the peer has not asked for it, to have it look at what this end has closed. Only while the ring is in use.
    pub fn call(&self, segment: &Segment, tcp: &impl Tcp) {
        if !self.is_tcp {
            let control = segment.control(self.direction);
            control.ringing.fetch_add(1, Ordering::SeqCst);
            tcp.doorbell();
            control.rung.fetch_add(1, Ordering::SeqCst);
        }
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
        if !self.change(segment, tail, false) {
            return false;
        }
        self.tail = tail;
        true
    }

    fn ring_if_wanted(&self, segment: &Segment, tcp: &impl Tcp) {
        let control = segment.control(self.direction);
        fence(Ordering::SeqCst);
        if control.armed.load(Ordering::Relaxed) == 0 {
            return;
        }
        control.ringing.fetch_add(1, Ordering::SeqCst);
        let is_wanted = control.armed.swap(0, Ordering::SeqCst) != 0;
        if is_wanted {
            tcp.doorbell();
            control.rung.fetch_add(1, Ordering::SeqCst);
        } else {
            control.ringing.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// This end is about to end its direction of the TCP connection.
    pub fn set_ended(&self, segment: &Segment) {
        segment.control(self.direction).ended.store(1, Ordering::SeqCst);
    }

    /// Whether nothing reads at the other end any more: what is written now must go by TCP, which knows what becomes of it.
    pub fn is_reader_gone(&self, segment: &Segment) -> bool {
        segment.control(self.direction).reader.load(Ordering::Relaxed) & GONE != 0
    }

    /// Whether the peer has said that it ends the other direction. A process that is killed does not.
    pub fn is_peer_ended(&self, segment: &Segment) -> bool {
        segment.control(1 - self.direction).ended.load(Ordering::Relaxed) != 0
    }

    /// Bytes in the ring that the peer has not read.
    pub fn unread(&self, segment: &Segment) -> u64 {
        self.tail
            .saturating_sub(segment.control(self.direction).head.load(Ordering::Relaxed))
            .min(segment.ring_size() as u64)
    }
}

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

/// What this end knows of the direction that it reads. All who hold the connection share it, under one lock.
#[derive(Debug, Clone)]
pub struct Reader {
    direction: usize,
    /// Bytes ever read from the ring.
    head: u64,
    /// Bytes ever taken from the TCP connection.
    position: u64,
    /// The first run that this has not come to the end of.
    run: u32,
    /// Doorbells that have been discarded.
    discarded: u64,
    /// The ring is closed, and what was in it comes again by TCP.
    comes_again: bool,
    /// Bytes of it that cannot come again.
    missing: usize,
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
            discarded: 0,
            comes_again: false,
            missing: 0,
            error: 0,
        }
    }

    /// The peer may use the ring: whatever reads the connection now does it through this.
    pub fn set_ready(&self, segment: &Segment) {
        segment.control(self.direction).reader.fetch_or(READY, Ordering::SeqCst);
    }

    /// Nothing will read any more.
    pub fn set_gone(&self, segment: &Segment) {
        segment.control(self.direction).reader.fetch_or(GONE, Ordering::SeqCst);
    }

    /// Bytes that the ring has for this end now. Cheap: no system call.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn ring_len(&self, segment: &Segment) -> Result<usize, Broken> {
        let control = segment.control(self.direction);
        let mut run = self.run;
        // Runs whose end has been reached, which was not known to be one then, hide nothing.
        for _ in 0..RUNS {
            let next = &control.runs[run as usize % RUNS];
            let is_over = run != control.opened.load(Ordering::Acquire)
                && next.ring.load(Ordering::Relaxed) == self.head
                && next.end.load(Ordering::Acquire) == self.position;
            if !is_over {
                break;
            }
            run = run.wrapping_add(1);
        }
        self.len_before(run, segment)
    }

    /// Whether what comes on the TCP connection may be more than doorbells: the peer sends by TCP, or has since the ring was looked at.
    pub fn has_run(&self, segment: &Segment) -> bool {
        self.run != segment.control(self.direction).opened.load(Ordering::Acquire)
    }

    /// Bytes that the ring has before this run.
    fn len_before(&self, run: u32, segment: &Segment) -> Result<usize, Broken> {
        let control = segment.control(self.direction);
        let limit = loop {
            let opened = control.opened.load(Ordering::Acquire);
            if run == opened && self.comes_again {
                return Ok(0);
            }
            if run != opened {
                break control.runs[run as usize % RUNS].ring.load(Ordering::Relaxed);
            }
            let tail = control.tail.load(Ordering::Acquire);
            // Bytes behind a run that has begun meanwhile come later.
            if control.opened.load(Ordering::Acquire) == opened {
                break tail >> POSITION;
            }
        };
        match limit.checked_sub(self.head) {
            Some(len) if len <= segment.ring_size() as u64 => Ok(len as usize),
            _ => Err(Broken),
        }
    }

    /// Where the next bytes are. Discards doorbells on the way.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn find(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<Found, Broken> {
        let control = segment.control(self.direction);
        loop {
            let opened = control.opened.load(Ordering::Acquire);
            let pending = opened.wrapping_sub(self.run);
            if pending as usize > RUNS {
                return Err(Broken);
            }
            let ring = self.len_before(self.run, segment)?;
            if ring > 0 {
                return Ok(Found::Ring(ring));
            }
            if pending == 0 {
                if control.opened.load(Ordering::Acquire) != opened {
                    continue;
                }
                return Ok(Found::Nothing);
            }
            let run = &control.runs[self.run as usize % RUNS];
            let start = run.start.load(Ordering::Relaxed);
            if self.position < start {
                let bells = usize::try_from(start - self.position).unwrap_or(usize::MAX).min(self.available(tcp));
                if bells == 0 || !self.discard(tcp, bells) {
                    return Ok(Found::Nothing);
                }
                continue;
            }
            let mut end = run.end.load(Ordering::Acquire);
            let mut available = 0;
            if end == OPEN {
                // What is there before the run has ended belongs to it.
                available = self.available(tcp);
                end = run.end.load(Ordering::Acquire);
            } else if self.position < end {
                available = self.available(tcp);
            }
            if end == OPEN {
                return Ok(if available > 0 { Found::Tcp(available) } else { Found::Nothing });
            }
            let Some(left) = end.checked_sub(self.position) else { return Err(Broken) };
            if left > 0 {
                let left = usize::try_from(left).unwrap_or(usize::MAX);
                return Ok(if available > 0 { Found::Tcp(available.min(left)) } else { Found::Nothing });
            }
            self.run += 1;
            control.done.store(self.run, Ordering::Release);
        }
    }

    fn available(&mut self, tcp: &impl Tcp) -> usize {
        let result = tcp.available();
        self.or_keep(result).unwrap_or(0)
    }

    /// False if none could be discarded.
    fn discard(&mut self, tcp: &impl Tcp, bells: usize) -> bool {
        let result = tcp.skip(bells);
        let discarded = self.or_keep(result).unwrap_or(0) as u64;
        self.position += discarded;
        self.discarded += discarded;
        discarded > 0
    }

    /// Reads what is there, as far as it fits. An error of the TCP connection ends it early, and is kept for
    /// [`Reader::take_error`].
    ///
    /// # Errors
    /// [`Broken`].
    ///
    /// # Safety
    /// `to` must be writable memory that nothing borrows.
    pub unsafe fn read(&mut self, segment: &Segment, tcp: &impl Tcp, to: &mut Pieces<'_>) -> Result<usize, Broken> {
        let mut sum = 0;
        while to.left() > 0 {
            let len = match self.find(segment, tcp)? {
                Found::Nothing => break,
                Found::Ring(len) => {
                    let len = len.min(to.left()).min(segment.ring_size() / PIECES);
                    // SAFETY: the caller's promise; `find` has checked that the ring has as many.
                    unsafe { self.copy_out(segment, to, len) };
                    self.head += len as u64;
                    segment.control(self.direction).head.store(self.head, Ordering::Release);
                    len
                }
                Found::Tcp(len) => {
                    let result = tcp.read(to, len.min(to.left()));
                    let Some(len) = self.or_keep(result).filter(|len| *len > 0) else { break };
                    self.position += len as u64;
                    to.advance(len);
                    len
                }
            };
            sum += len;
        }
        Ok(sum)
    }

    /// When the kernel says that there is something, and [`Reader::find`] that there is nothing: reads it. That is what has been written
    /// to the connection by something that knows nothing of rings, or what lies behind urgent data.
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
    ) -> Result<usize, Broken> {
        let control = segment.control(self.direction);
        if self.find(segment, tcp)? != Found::Nothing || to.left() == 0 {
            return Ok(0);
        }
        let run = self.run;
        let max = if self.has_run(segment) {
            to.left()
        } else {
            // All but the doorbells that have been rung.
            let bells = control.ringing.load(Ordering::SeqCst).wrapping_sub(self.discarded);
            let bells = usize::try_from(bells).unwrap_or(usize::MAX);
            self.available(tcp).saturating_sub(bells).min(to.left())
        };
        if max == 0 {
            return Ok(0);
        }
        let result = tcp.read(to, max);
        let Some(len) = self.or_keep(result) else { return Ok(0) };
        self.position += len as u64;
        // The run has ended meanwhile: what lies behind it are doorbells.
        let end = control.runs[run as usize % RUNS].end.load(Ordering::Acquire);
        let bells = if self.has_run(segment) { self.position.saturating_sub(end) } else { 0 };
        self.discarded += bells;
        let len = len - (bells as usize).min(len);
        to.advance(len);
        Ok(len)
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
        let available = tcp.available();
        let available = self.or_keep(available).unwrap_or(0) as u64;
        // Goes ahead, and nothing else sees it.
        let mut ahead = self.clone();
        for _ in 0..4 * RUNS {
            if to.left() == 0 {
                break;
            }
            let ring = ahead.len_before(ahead.run, segment)?.min(to.left());
            if ring > 0 {
                // SAFETY: the caller's promise; `len_before` has checked that the ring has as many.
                unsafe { ahead.copy_out(segment, to, ring) };
                ahead.head += ring as u64;
                continue;
            }
            let control = segment.control(self.direction);
            if ahead.run == control.opened.load(Ordering::Acquire) {
                break;
            }
            let run = &control.runs[ahead.run as usize % RUNS];
            let end = run.end.load(Ordering::Acquire);
            ahead.position = ahead.position.max(run.start.load(Ordering::Relaxed));
            let skipped = ahead.position - self.position;
            // What is there now belongs to this run if it has not ended since.
            let len = available.saturating_sub(skipped).min(end.saturating_sub(ahead.position)).min(to.left() as u64);
            if len > 0 && skipped <= PEEK_MAX as u64 && run.end.load(Ordering::Acquire) == end {
                let result = tcp.peek(to, len as usize, skipped as usize);
                let Some(len) = self.or_keep(result).filter(|len| *len > 0) else { break };
                ahead.position += len as u64;
                to.advance(len);
            } else if ahead.position == end {
                ahead.run = ahead.run.wrapping_add(1);
            } else {
                break;
            }
        }
        Ok(before - to.left())
    }

    /// Bytes of the stream that are there, in the ring and on the TCP connection. Programs that are told fewer take what comes behind
    /// for news, of which they hear again.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn unread(&mut self, segment: &Segment, tcp: &impl Tcp) -> Result<usize, Broken> {
        if self.find(segment, tcp)? == Found::Nothing {
            return Ok(0);
        }
        let available = self.available(tcp) as u64;
        // Goes ahead, and nothing else sees it.
        let mut ahead = self.clone();
        let mut sum = 0;
        for _ in 0..4 * RUNS {
            let ring = ahead.len_before(ahead.run, segment)?;
            sum += ring;
            ahead.head += ring as u64;
            let control = segment.control(self.direction);
            if ahead.run == control.opened.load(Ordering::Acquire) {
                break;
            }
            let run = &control.runs[ahead.run as usize % RUNS];
            let end = run.end.load(Ordering::Acquire);
            ahead.position = ahead.position.max(run.start.load(Ordering::Relaxed));
            let skipped = ahead.position - self.position;
            let len = available.saturating_sub(skipped).min(end.saturating_sub(ahead.position));
            sum += len as usize;
            ahead.position += len;
            if ahead.position != end {
                break;
            }
            ahead.run = ahead.run.wrapping_add(1);
        }
        Ok(sum)
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

    /// When [`Reader::find`] has found nothing: discards the doorbells that have rung, so that the kernel calls the connection readable
    /// only when there is something new.
    pub fn discard_doorbells(&mut self, segment: &Segment, tcp: &impl Tcp) {
        let control = segment.control(self.direction);
        if self.run != control.opened.load(Ordering::Acquire)
            || control.ringing.load(Ordering::Relaxed).wrapping_sub(self.discarded) == 0
        {
            return;
        }
        let rung =
            usize::try_from(control.ringing.load(Ordering::SeqCst).wrapping_sub(self.discarded)).unwrap_or(usize::MAX);
        let bells = self.available(tcp).min(rung);
        // All that was there before another run has begun.
        if bells > 0 && self.run == control.opened.load(Ordering::Acquire) {
            self.discard(tcp, bells);
        }
    }

    /// Whether the peer has ended its direction of the TCP connection, or is about to: the kernel has more to say than the ring.
    pub fn is_ended(&self, segment: &Segment) -> bool {
        segment.control(self.direction).ended.load(Ordering::Relaxed) != 0
    }

    /// Asks for a doorbell with what comes next. False if there is something already; then the doorbell may come nevertheless.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn arm(&self, segment: &Segment) -> Result<bool, Broken> {
        let control = segment.control(self.direction);
        control.armed.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(self.ring_len(segment)? == 0)
    }

    /// Asks for no doorbell: this end looks by itself.
    pub fn disarm(&self, segment: &Segment) {
        segment.control(self.direction).armed.store(0, Ordering::Relaxed);
    }

    /// The word that changes with what the peer writes to the ring, for who looks again and again.
    pub fn tail<'a>(&self, segment: &'a Segment) -> &'a AtomicU64 {
        &segment.control(self.direction).tail
    }

    /// Takes nothing more from the ring: the peer goes on by TCP, beginning with what is in the ring now. The doorbells that are on their
    /// way have been discarded when this returns, so that whatever reads the TCP connection next finds the stream there. `patience` says
    /// how often it may look for them. The number of bytes of the ring that cannot come again, because what lies behind them has been sent
    /// by TCP already.
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
        let opened = control.opened.load(Ordering::SeqCst);
        let word = control.tail.fetch_or(CLOSED, Ordering::SeqCst);
        if word & CLOSED == 0 {
            control.armed.store(0, Ordering::SeqCst);
            self.comes_again = word & BY_TCP == 0;
            // Steps over runs that have ended.
            self.find(segment, tcp)?;
            // Bytes of the ring before a run that had begun would come again behind it.
            let unread = (word >> POSITION).wrapping_sub(self.head).min(segment.ring_size() as u64);
            let is_before_run = if self.comes_again { self.run != opened } else { true };
            self.missing = if is_before_run { unread as usize } else { 0 };
        }
        if self.missing > 0 {
            return Ok(self.missing);
        }
        loop {
            let found = self.find(segment, tcp)?;
            let is_ringing = control.ringing.load(Ordering::SeqCst) != control.rung.load(Ordering::SeqCst);
            if found == Found::Nothing {
                self.discard_doorbells(segment, tcp);
            }
            if !is_ringing || !patience() {
                return Ok(if let Found::Ring(len) = found { len } else { 0 });
            }
        }
    }
}

#[cfg(test)]
mod tests;
