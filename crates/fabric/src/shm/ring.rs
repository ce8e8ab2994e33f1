//! Rings of bytes in memory that two processes share, one for each direction.
//!
//! The peer may write anything anywhere in it at any time. So each end keeps its own position to itself and publishes copies; the
//! other end's position is read once per look, and is good only if it lies within the ring; and bytes are copied out before anything
//! is made of them. A peer that breaks the rules garbles its own connection and reaches nothing else.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use thruway_memory::{Buffer, sealed, shared};

/// Least and most bytes of a ring.
pub(crate) const RING_MIN: usize = 4 << 10;
pub(crate) const RING_MAX: usize = 4 << 20;

/// Control words of both directions come first, in a page of their own.
const CONTROL: usize = 4096;

/// The control words of one direction, each written by one end, on cache lines apart from those of the other.
#[repr(C)]
struct Control {
    /// Bytes written since the beginning. The writer's, as all but the last two.
    written: AtomicU64,
    /// The writer has ended.
    ended: AtomicU32,
    _apart: [u8; 116],
    /// The writer waits for room, and is to be called.
    writer_waits: AtomicU32,
    _apart_too: [u8; 124],
    /// Bytes read since the beginning. The reader's, as the next one.
    read: AtomicU64,
    _apart_again: [u8; 120],
    /// The reader waits for bytes, and is to be called.
    reader_waits: AtomicU32,
    _to_the_end: [u8; 124],
}

const _: () = assert!(size_of::<Control>() == 512 && 2 * size_of::<Control>() <= CONTROL);

/// The memory of both rings.
pub(crate) struct Memory {
    buffer: Buffer,
    /// Bytes of each ring.
    size: usize,
}

/// Which of the two ends this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The one that has made the memory and connects.
    Connecting,
    Accepting,
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl Memory {
    fn file_len(size: usize) -> usize {
        CONTROL + 2 * size
    }

    /// Fails if this process may not make a file for two rings of `size` bytes.
    pub(crate) fn check_limit(size: usize) -> io::Result<()> {
        let len = Memory::file_len(size) as u64;
        if sealed::may_be_long(len) {
            return Ok(());
        }
        let why = format!("the limit on the size of files (ulimit -f) is less than {} KiB", len.div_ceil(1024));
        Err(io::Error::new(io::ErrorKind::FileTooLarge, why))
    }

    /// Makes memory for two rings of `size` bytes, a power of two, and a descriptor to hand to the peer.
    pub(crate) fn create(size: usize) -> io::Result<(Arc<Memory>, OwnedFd)> {
        let fd = sealed::create("thruway shm", Memory::file_len(size) as u64)?;
        Ok((Memory::map(&fd, size)?, fd))
    }

    /// Maps what a peer has made; refuses what could end this process when it is used.
    pub(crate) fn adopt(fd: OwnedFd) -> io::Result<Arc<Memory>> {
        let len = sealed::check(&fd)?;
        let size = usize::try_from(len).ok().and_then(|len| len.checked_sub(CONTROL)).map_or(0, |len| len / 2);
        let is_legal = size.is_power_of_two() && (RING_MIN..=RING_MAX).contains(&size);
        if !is_legal || Memory::file_len(size) as u64 != len {
            return Err(invalid("the peer's memory has no legal size"));
        }
        Memory::map(&fd, size)
    }

    fn map(fd: &OwnedFd, size: usize) -> io::Result<Arc<Memory>> {
        let buffer = Buffer::of_file(fd, 0, Memory::file_len(size))?;
        Ok(Arc::new(Memory { buffer, size }))
    }

    fn control(&self, direction: usize) -> &Control {
        // SAFETY: inside the mapping, page-aligned, and nothing but atomics and padding; the peer's changes are those of another
        // thread.
        unsafe { &*self.buffer.as_ptr().add(direction * size_of::<Control>()).cast() }
    }

    fn data(&self, direction: usize) -> *mut u8 {
        self.buffer.as_ptr().wrapping_add(CONTROL + direction * self.size)
    }

    /// Writes where only a peer that lies would.
    #[cfg(test)]
    pub(super) fn scribble(&self, at: usize, bytes: &[u8]) {
        self.buffer.write(at, bytes);
    }

    /// What this end writes to and reads from.
    pub(crate) fn ends(self: &Arc<Memory>, end: End) -> (Writer, Reader) {
        let (out, inward) = if end == End::Connecting { (0, 1) } else { (1, 0) };
        let writer = Writer { memory: Arc::clone(self), direction: out, written: 0, read: 0 };
        let glance = Arc::new(Glance { memory: Arc::clone(self), direction: inward, read: AtomicU64::new(0) });
        (writer, Reader { glance, read: 0, released: 0, written: 0 })
    }
}

/// The peer has written a position that cannot be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BrokenRing;

impl From<BrokenRing> for io::Error {
    fn from(_: BrokenRing) -> io::Error {
        invalid("the peer broke the ring in shared memory")
    }
}

fn wanted(pieces: &[libc::iovec]) -> usize {
    pieces.iter().map(|piece| piece.iov_len).sum()
}

/// Bytes to the peer.
pub(crate) struct Writer {
    memory: Arc<Memory>,
    direction: usize,
    written: u64,
    /// How far the peer had read when that was last looked at.
    read: u64,
}

/// A look at a ring past its reader, which others may have locked. It is for those who poll, and find nothing mostly.
pub(crate) struct Glance {
    memory: Arc<Memory>,
    direction: usize,
    /// The reader's position.
    read: AtomicU64,
}

impl Glance {
    fn control(&self) -> &Control {
        self.memory.control(self.direction)
    }

    /// Whether the reader would find nothing, not the end either.
    pub(crate) fn sees_nothing(&self) -> bool {
        let control = self.control();
        control.written.load(Ordering::Relaxed) == self.read.load(Ordering::Relaxed)
            && control.ended.load(Ordering::Relaxed) == 0
    }
}

/// Bytes from the peer.
pub(crate) struct Reader {
    glance: Arc<Glance>,
    read: u64,
    /// What of it the peer knows.
    released: u64,
    /// How far the peer had written when that was last looked at.
    written: u64,
}

impl Writer {
    fn control(&self) -> &Control {
        self.memory.control(self.direction)
    }

    fn size(&self) -> u64 {
        self.memory.size as u64
    }

    /// Free bytes; looks at the peer's position if there are fewer than `wanted`. None rather than few: two ends that are as fast as
    /// each other would move some bytes at a time round a full ring.
    fn room(&mut self, wanted: usize) -> Result<usize, BrokenRing> {
        if self.size() - (self.written - self.read) < wanted as u64 {
            let read = self.control().read.load(Ordering::Acquire);
            // Neither back, nor beyond what has been written.
            if read < self.read || read > self.written {
                return Err(BrokenRing);
            }
            self.read = read;
        }
        let room = (self.size() - (self.written - self.read)) as usize;
        Ok(if room >= wanted || room >= self.memory.size / 4 { room } else { 0 })
    }

    /// Copies as much as there is room for; the peer sees it when it is [published](Writer::publish).
    ///
    /// # Safety
    /// Every element must describe readable memory.
    pub(crate) unsafe fn write(&mut self, pieces: &[libc::iovec]) -> Result<usize, BrokenRing> {
        let wanted = wanted(pieces);
        let mut room = self.room(wanted)?;
        let size = self.memory.size;
        let mut copied = 0;
        for piece in pieces {
            let len = piece.iov_len.min(room);
            let at = self.written as usize & (size - 1);
            let first = len.min(size - at);
            let (from, to) = (piece.iov_base.cast::<u8>(), self.memory.data(self.direction));
            // SAFETY: `at + first` and `len - first` are inside the ring; the caller's promise for `from`.
            unsafe {
                shared::copy(to.add(at), from, first);
                if first < len {
                    shared::copy(to, from.add(first), len - first);
                }
            }
            self.written += len as u64;
            copied += len;
            room -= len;
            if room == 0 {
                break;
            }
        }
        Ok(copied)
    }

    /// Shows the peer what has been written. True if it waits and is to be called.
    #[must_use]
    pub(crate) fn publish(&self) -> bool {
        self.control().written.store(self.written, Ordering::Release);
        let is_called = self.is_reader_to_be_called();
        self.fetch_ahead();
        is_called
    }

    /// Has the processor take back from the reader what the next short message will be written to, so that it need not wait for that
    /// then.
    fn fetch_ahead(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in 0..3 {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            let at = (self.written as usize + line * 64) & (self.memory.size - 1);
            // SAFETY: a hint; the address is inside the ring.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(self.memory.data(self.direction).add(at).cast()) };
        }
    }

    /// Nothing more comes. True if the peer waits and is to be called.
    #[must_use]
    pub(crate) fn end(&self) -> bool {
        self.control().ended.store(1, Ordering::Release);
        self.is_reader_to_be_called()
    }

    fn is_reader_to_be_called(&self) -> bool {
        // Either this end sees that the peer waits, or the peer sees what was written before it sleeps.
        fence(Ordering::SeqCst);
        let waits = &self.control().reader_waits;
        waits.load(Ordering::Relaxed) != 0 && waits.swap(0, Ordering::SeqCst) != 0
    }

    /// Has the peer call when there is room for some of this. False if there is already.
    pub(crate) fn wait_for_room(&mut self, pieces: &[libc::iovec]) -> Result<bool, BrokenRing> {
        self.control().writer_waits.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(self.room(wanted(pieces))? == 0)
    }
}

impl Reader {
    fn control(&self) -> &Control {
        self.glance.control()
    }

    fn memory(&self) -> &Memory {
        &self.glance.memory
    }

    pub(crate) fn glance(&self) -> Arc<Glance> {
        Arc::clone(&self.glance)
    }

    /// Bytes that are there; looks at the peer's position if there are none.
    fn available(&mut self) -> Result<usize, BrokenRing> {
        if self.written == self.read {
            let written = self.control().written.load(Ordering::Acquire);
            if written < self.written || written - self.read > self.memory().size as u64 {
                return Err(BrokenRing);
            }
            self.written = written;
        }
        Ok((self.written - self.read) as usize)
    }

    /// Copies out what is there, as far as it fits; the peer has the room when that is [released](Reader::release). 0 if nothing is.
    ///
    /// # Safety
    /// Every element must describe writable memory that nothing borrows.
    pub(crate) unsafe fn read(&mut self, pieces: &[libc::iovec]) -> Result<usize, BrokenRing> {
        let mut available = self.available()?;
        let size = self.memory().size;
        let mut copied = 0;
        for piece in pieces {
            if available == 0 {
                break;
            }
            let len = piece.iov_len.min(available);
            let at = self.read as usize & (size - 1);
            let first = len.min(size - at);
            let (from, to) = (self.memory().data(self.glance.direction), piece.iov_base.cast::<u8>());
            // SAFETY: `at + first` and `len - first` are inside the ring; the caller's promise for `to`.
            unsafe {
                shared::copy(to, from.add(at), first);
                if first < len {
                    shared::copy(to.add(first), from, len - first);
                }
            }
            self.read += len as u64;
            copied += len;
            available -= len;
        }
        self.glance.read.store(self.read, Ordering::Relaxed);
        Ok(copied)
    }

    /// Gives the room of what has been read back, not for a few bytes: a writer waits only while less than a quarter is free. True if
    /// the peer waits for it and is to be called.
    #[must_use]
    pub(crate) fn release(&mut self) -> bool {
        if self.read - self.released < self.memory().size as u64 / 8 {
            return false;
        }
        self.released = self.read;
        self.control().read.store(self.read, Ordering::Release);
        fence(Ordering::SeqCst);
        let waits = &self.control().writer_waits;
        if waits.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // Not for a few bytes: a call costs more than they do. What is in the ring keeps this end reading.
        let written = self.control().written.load(Ordering::Relaxed);
        let is_full = written.wrapping_sub(self.read) > self.memory().size as u64 / 2;
        !is_full && waits.swap(0, Ordering::SeqCst) != 0
    }

    /// Whether all has been read that was there when the peer's position was last looked at.
    pub(crate) fn is_drained(&self) -> bool {
        self.written == self.read
    }

    /// Whether all has been read that will ever come.
    pub(crate) fn is_at_end(&mut self) -> Result<bool, BrokenRing> {
        // What was written before the end is seen with it.
        let ended = self.control().ended.load(Ordering::Acquire) != 0;
        Ok(ended && self.available()? == 0)
    }

    /// Has the peer call when there is something to read. False if there is already.
    pub(crate) fn wait_for_bytes(&mut self) -> Result<bool, BrokenRing> {
        self.control().reader_waits.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(self.available()? == 0 && self.control().ended.load(Ordering::Acquire) == 0)
    }

    /// The peer need not call: this end looks by itself.
    pub(crate) fn do_not_wait(&self) {
        self.control().reader_waits.store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn iov(bytes: &mut [u8]) -> libc::iovec {
        libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    fn pair(size: usize) -> ((Writer, Reader), (Writer, Reader)) {
        let (memory, fd) = Memory::create(size).unwrap();
        (memory.ends(End::Connecting), Memory::adopt(fd).unwrap().ends(End::Accepting))
    }

    fn write(writer: &mut Writer, bytes: &[u8]) -> usize {
        let mut bytes = bytes.to_vec();
        let third = bytes.len() / 3;
        let (one, two) = bytes.split_at_mut(third);
        // SAFETY: of a vector of ours.
        unsafe { writer.write(&[iov(one), iov(two)]) }.unwrap()
    }

    fn read(reader: &mut Reader, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let (one, two) = bytes.split_at_mut(len / 2);
        // SAFETY: of a vector of ours.
        let n = unsafe { reader.read(&[iov(one), iov(two)]) }.unwrap();
        bytes.truncate(n);
        bytes
    }

    #[test]
    fn bytes_come_in_order_and_once_however_they_are_cut() {
        proptest!(ProptestConfig::with_cases(64), |(cuts in prop::collection::vec((0usize..6000, 0usize..6000), 1..40))| {
            let ((mut writer, _), (_, mut reader)) = pair(RING_MIN);
            let (mut next, mut expected) = (0u32, 0u32);
            for (to_write, to_read) in cuts {
                let bytes: Vec<u8> = (0..to_write as u32).map(|i| ((next + i) * 7 / 3) as u8).collect();
                let n = write(&mut writer, &bytes);
                let free = RING_MIN - (next - expected) as usize;
                prop_assert!(n <= to_write.min(free));
                // What has been read and is not known to be is less than an eighth.
                if free >= to_write.min(RING_MIN / 4) + RING_MIN / 8 {
                    prop_assert!(n >= to_write.min(RING_MIN / 4), "{} of {} with {} free", n, to_write, free);
                }
                next += n as u32;
                prop_assert!(!writer.publish());
                let mut got = read(&mut reader, to_read);
                // What came later is seen when the rest has been read.
                let more = read(&mut reader, to_read - got.len());
                got.extend(more);
                prop_assert_eq!(got.len(), to_read.min((next - expected) as usize));
                for byte in got {
                    prop_assert_eq!(byte, (expected * 7 / 3) as u8);
                    expected += 1;
                }
                prop_assert!(!reader.release());
            }
        });
    }

    #[test]
    fn those_who_wait_are_called_once() {
        let ((mut writer, _), (_, mut reader)) = pair(RING_MIN);
        assert!(reader.wait_for_bytes().unwrap());
        assert_eq!(write(&mut writer, b"x"), 1);
        assert!(writer.publish());
        assert!(!writer.publish());
        assert!(!reader.wait_for_bytes().unwrap(), "there is something");
        assert_eq!(read(&mut reader, 9), b"x");
        assert!(!reader.release());
        reader.do_not_wait();
        assert_eq!(write(&mut writer, &[1; RING_MIN]), RING_MIN - 1, "the room of the first is not given back yet");
        assert!(!writer.publish());
        assert_eq!(write(&mut writer, b"y"), 0);

        assert!(writer.wait_for_room(&[iov(&mut [0])]).unwrap());
        assert_eq!(read(&mut reader, 1).len(), 1);
        assert!(!reader.release(), "not for one byte");
        assert!(writer.wait_for_room(&[iov(&mut [0])]).unwrap());
        assert_eq!(read(&mut reader, RING_MIN).len(), RING_MIN - 2);
        assert!(reader.release());
        assert!(!reader.is_at_end().unwrap());
        assert!(!writer.end());
        assert!(reader.is_at_end().unwrap());
        assert!(!reader.wait_for_bytes().unwrap());
    }

    #[test]
    fn memory_that_could_end_this_process_is_not_mapped() {
        let refused = |fd: OwnedFd| Memory::adopt(fd).err().expect("it is refused").to_string();
        let whole = Memory::file_len(RING_MIN);
        assert!(Memory::adopt(sealed::create("test", whole as u64).unwrap()).is_ok());
        for len in [0, 1, CONTROL, whole - 1, whole + 1, CONTROL + 2 * 3000, Memory::file_len(2 * RING_MAX)] {
            assert!(refused(sealed::create("test", len as u64).unwrap()).contains("no legal size"), "{len}");
        }
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(whole as u64).unwrap();
        assert!(refused(file.into()).contains("no memory file"));
    }

    #[test]
    fn positions_that_cannot_be_are_seen() {
        let set = |word: &AtomicU64, to: u64| word.store(to, Ordering::SeqCst);
        for wrong in [RING_MIN as u64 + 1, u64::MAX, 1 << 63] {
            let ((writer, _), (_, mut reader)) = pair(RING_MIN);
            set(&writer.control().written, wrong);
            assert_eq!(reader.available(), Err(BrokenRing), "{wrong}");
        }
        let ((mut writer, _), (_, mut reader)) = pair(RING_MIN);
        write(&mut writer, &[1; 3000]);
        let _ = writer.publish();
        assert_eq!(read(&mut reader, 3000).len(), 3000);
        let _ = reader.release();
        set(&reader.control().read, 3001);
        assert_eq!(writer.room(RING_MIN), Err(BrokenRing), "more than has been written");
        set(&reader.control().read, 2000);
        assert_eq!(writer.room(RING_MIN), Ok(RING_MIN - 1000));
        set(&reader.control().read, 1999);
        assert_eq!(writer.room(RING_MIN), Err(BrokenRing), "back");
        set(&writer.control().written, 2999);
        assert_eq!(reader.available(), Err(BrokenRing), "back");
    }
}
