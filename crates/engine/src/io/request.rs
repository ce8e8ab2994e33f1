//! What is asked of a file, how far it has come, and how it is done by system calls.

use super::OpenFile;
use crate::pool::Block;
use crate::segment::Segment;
use io_uring::{opcode, squeue, types};
use rustix::fs::{Advice, FallocateFlags};
use rustix::io::ReadWriteFlags;
use smallvec::{SmallVec, smallvec};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// The memory of a request, in the order of the file's bytes.
pub type SegmentList = SmallVec<[Segment; 1]>;

/// Buffers that one system call takes (`IOV_MAX`).
const VECTORS_MAX: usize = 1024;
/// Direct I/O that ends elsewhere has reached the end of the file.
const SECTOR: u64 = 512;

/// One operation on a file.
pub struct Request {
    /// The file. It stays open until the request is over.
    pub file: Arc<OpenFile>,
    /// First byte.
    pub offset: u64,
    /// What is done.
    pub operation: Operation,
    /// The memory of reads and writes, the request's alone until it is over.
    pub buffers: SegmentList,
}

/// What is done to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Fill the buffers. Short only at the end of the file.
    Read,
    /// Write the buffers.
    Write {
        /// Down to the medium (`RWF_DSYNC`).
        durable: bool,
    },
    /// Make everything written durable, with what is needed to read it (`fdatasync`).
    Sync,
    /// Have so many bytes read into the page cache (`posix_fadvise`, WILLNEED).
    Prefetch {
        /// Bytes.
        len: u64,
    },
    /// `fallocate(2)`.
    Allocate {
        /// Its mode.
        mode: FallocateFlags,
        /// Bytes.
        len: u64,
    },
    /// Discard the whole sectors of a range of a block device (`BLKDISCARD`). Nothing happens where the device cannot.
    Discard {
        /// Bytes.
        len: u64,
    },
}

/// How a request ended.
pub struct Outcome {
    /// Bytes read (fewer than asked only at the end of the file) or written (always all); 0 for other operations.
    pub result: io::Result<usize>,
    /// The memory, back again.
    pub buffers: SegmentList,
}

impl Outcome {
    /// The block of a request whose buffer was one.
    ///
    /// # Panics
    /// If it was something else.
    pub fn into_block(self) -> Block {
        self.buffers.into_iter().next().and_then(Segment::into_block).expect("a request with a block")
    }

    /// Of a request with one buffer: the result, which is an error of kind [`io::ErrorKind::UnexpectedEof`] if the file ended before the
    /// buffer was full, and the buffer.
    pub(super) fn whole(mut self) -> (io::Result<()>, Segment) {
        let segment = self.buffers.pop().expect("a request with a buffer");
        let result = match self.result {
            Ok(n) if n < segment.len() => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other.map(drop),
        };
        (result, segment)
    }
}

impl Request {
    /// Reads a file from `offset` into a segment.
    pub fn read(file: Arc<OpenFile>, offset: u64, segment: Segment) -> Request {
        Request { file, offset, operation: Operation::Read, buffers: smallvec![segment] }
    }

    /// Writes a segment to a file at `offset`.
    pub fn write(file: Arc<OpenFile>, offset: u64, segment: Segment) -> Request {
        Request { file, offset, operation: Operation::Write { durable: false }, buffers: smallvec![segment] }
    }

    /// Bytes to be transferred.
    pub fn len(&self) -> usize {
        match self.operation {
            Operation::Read | Operation::Write { .. } => self.buffers.iter().map(Segment::len).sum(),
            _ => 0,
        }
    }

    /// True if none are.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a ring can be asked for it.
    pub(super) fn can_use_ring(&self) -> bool {
        self.file.uring_is_sound() && !matches!(self.operation, Operation::Discard { .. })
    }

    /// Does what is left of it after `done` bytes by system calls.
    pub(super) fn perform(mut self, done: usize) -> Outcome {
        let mut progress = Progress { done };
        let result = loop {
            let done = self.step(progress.done);
            if let Some(result) = progress.advance(&self, done) {
                break result;
            }
        };
        Outcome { result, buffers: self.buffers }
    }

    /// One system call for what is left after `done` bytes.
    fn step(&mut self, done: usize) -> io::Result<usize> {
        let (file, offset) = (self.file.std(), self.offset);
        match self.operation {
            Operation::Read => {
                let mut buffers = left_mut(&mut self.buffers, done);
                Ok(rustix::io::preadv(file, &mut buffers, offset + done as u64)?)
            }
            Operation::Write { durable } => {
                let buffers = left(&self.buffers, done);
                let flags = if durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
                Ok(rustix::io::pwritev2(file, &buffers, offset + done as u64, flags)?)
            }
            Operation::Sync => Ok(rustix::fs::fdatasync(file).map(|()| 0)?),
            Operation::Prefetch { len } => {
                Ok(rustix::fs::fadvise(file, offset, NonZeroU64::new(len), Advice::WillNeed).map(|()| 0)?)
            }
            Operation::Allocate { mode, len } => Ok(rustix::fs::fallocate(file, mode, offset, len).map(|()| 0)?),
            Operation::Discard { len } => self.file.discard(offset, len).map(|()| 0),
        }
    }

    /// The entry of a submission queue for what is left after `done` bytes. `registered` is the number under which the memory is registered
    /// with the ring; `vectors` keeps what the entry refers to until it is submitted.
    pub(super) fn entry(&self, done: usize, registered: Option<u16>, vectors: &mut Vec<libc::iovec>) -> squeue::Entry {
        let fd = types::Fd(self.file.std().as_raw_fd());
        let at = self.offset + done as u64;
        match self.operation {
            Operation::Read | Operation::Write { .. } => self.transfer_entry(fd, at, done, registered, vectors),
            Operation::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Operation::Prefetch { len } => {
                let len = libc::off_t::try_from(len).unwrap_or(libc::off_t::MAX);
                opcode::Fadvise::new(fd, len, libc::POSIX_FADV_WILLNEED).offset(at).build()
            }
            Operation::Allocate { mode, len } => {
                opcode::Fallocate::new(fd, len).offset(at).mode(mode.bits().cast_signed()).build()
            }
            Operation::Discard { .. } => unreachable!("not for a ring"),
        }
    }

    fn transfer_entry(
        &self,
        fd: types::Fd,
        at: u64,
        done: usize,
        registered: Option<u16>,
        vectors: &mut Vec<libc::iovec>,
    ) -> squeue::Entry {
        let flags = if self.operation == (Operation::Write { durable: true }) { libc::RWF_DSYNC } else { 0 };
        let reads = self.operation == Operation::Read;
        if let [segment] = &self.buffers[..] {
            let (ptr, len) = (segment.as_ptr().wrapping_add(done), (segment.len() - done) as u32);
            return match (reads, registered) {
                (true, None) => opcode::Read::new(fd, ptr, len).offset(at).build(),
                (true, Some(index)) => opcode::ReadFixed::new(fd, ptr, len, index).offset(at).build(),
                (false, None) => opcode::Write::new(fd, ptr, len).offset(at).rw_flags(flags).build(),
                (false, Some(index)) => opcode::WriteFixed::new(fd, ptr, len, index).offset(at).rw_flags(flags).build(),
            };
        }
        vectors.clear();
        vectors.extend(
            left(&self.buffers, done)
                .iter()
                .map(|slice| libc::iovec { iov_base: slice.as_ptr().cast_mut().cast(), iov_len: slice.len() }),
        );
        let (ptr, count) = (vectors.as_ptr(), vectors.len() as u32);
        match reads {
            true => opcode::Readv::new(fd, ptr, count).offset(at).build(),
            false => opcode::Writev::new(fd, ptr, count).offset(at).rw_flags(flags).build(),
        }
    }
}

/// How far a request has come.
#[derive(Default)]
pub(super) struct Progress {
    /// Bytes transferred: the kernel may stop short.
    pub(super) done: usize,
}

impl Progress {
    /// Takes the result of one call. `None` if there must be another one.
    pub(super) fn advance(&mut self, request: &Request, result: io::Result<usize>) -> Option<io::Result<usize>> {
        match result {
            Ok(n) => {
                self.done += n;
                let len = request.len();
                match request.operation {
                    _ if self.done == len => Some(Ok(len)),
                    // The end of the file. To ask for more from there is refused by some file systems.
                    Operation::Read
                        if request.file.is_direct() && !(request.offset + self.done as u64).is_multiple_of(SECTOR) =>
                    {
                        Some(Ok(self.done))
                    }
                    _ if n > 0 => None,
                    Operation::Write { .. } => Some(Err(io::ErrorKind::WriteZero.into())),
                    _ => Some(Ok(self.done)),
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => None,
            Err(e) => Some(Err(e)),
        }
    }
}

/// What is left of the buffers after `done` bytes, as far as one call takes it.
fn left(buffers: &[Segment], mut done: usize) -> SmallVec<[io::IoSlice<'_>; 4]> {
    let mut slices = SmallVec::new();
    for segment in buffers {
        let skip = done.min(segment.len());
        done -= skip;
        if skip < segment.len() && slices.len() < VECTORS_MAX {
            slices.push(io::IoSlice::new(&segment.as_slice()[skip..]));
        }
    }
    slices
}

/// As [`left`], to be filled.
fn left_mut(buffers: &mut [Segment], mut done: usize) -> SmallVec<[io::IoSliceMut<'_>; 4]> {
    let mut slices = SmallVec::new();
    for segment in buffers {
        let skip = done.min(segment.len());
        done -= skip;
        if skip < segment.len() && slices.len() < VECTORS_MAX {
            slices.push(io::IoSliceMut::new(&mut segment.as_mut_slice()[skip..]));
        }
    }
    slices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segments;

    fn segments(lens: &[usize]) -> SegmentList {
        let supply = Segments::new(lens.len(), 4096).unwrap();
        let mut reservation = supply.try_reserve(lens.len()).unwrap();
        lens.iter().map(|len| reservation.segment(*len)).collect()
    }

    fn request(operation: Operation, lens: &[usize]) -> Request {
        let file = Arc::new(OpenFile::new(tempfile::tempfile().unwrap()));
        Request { file, offset: 0, operation, buffers: segments(lens) }
    }

    #[test]
    fn what_is_left_begins_where_the_last_call_stopped() {
        let lens = |slices: &[io::IoSlice<'_>]| slices.iter().map(|s| s.len()).collect::<Vec<_>>();
        let list = segments(&[10, 20, 30]);
        assert_eq!(lens(&left(&list, 0)), [10, 20, 30]);
        assert_eq!(lens(&left(&list, 10)), [20, 30]);
        assert_eq!(lens(&left(&list, 29)), [1, 30]);
        assert_eq!(lens(&left(&list, 60)), [0; 0]);
    }

    #[test]
    fn transfers_done_in_part_go_on_and_end_once() {
        let write = request(Operation::Write { durable: false }, &[100, 100]);
        let mut progress = Progress::default();
        assert!(progress.advance(&write, Ok(50)).is_none());
        assert!(progress.advance(&write, Err(io::Error::from_raw_os_error(libc::EINTR))).is_none());
        assert_eq!(progress.done, 50);
        assert_eq!(progress.advance(&write, Ok(150)).unwrap().unwrap(), 200);
        let mut progress = Progress { done: 199 };
        assert_eq!(progress.advance(&write, Ok(0)).unwrap().unwrap_err().kind(), io::ErrorKind::WriteZero);

        let mut progress = Progress::default();
        let again = progress.advance(&write, Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        assert!(again.is_some_and(|result| result.is_err()), "never repeated without an end");

        let read = request(Operation::Read, &[100]);
        let mut progress = Progress::default();
        assert!(progress.advance(&read, Ok(70)).is_none());
        assert_eq!(progress.advance(&read, Ok(0)).unwrap().unwrap(), 70, "the end of the file");
    }
}
