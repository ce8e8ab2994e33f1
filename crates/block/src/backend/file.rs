//! A disk in a file or on a block device.
//!
//! Direct I/O goes past the page cache, from and to the memory that the network uses; what is not aligned
//! for it goes through the page cache, which the kernel keeps coherent with it, as it does for other users
//! of the same device.

use super::dirty;
use super::{Backend, Extent, Geometry, Lent, Op, Zero, merge, unsupported};
use crate::streams::Streams;
use rustix::fs::{FileType, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use thruway_engine::{Segment, Segments, page_cache, reactor};

/// Which way data goes to the storage and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Past the page cache, both ways.
    Direct,
    /// Reads through the page cache, writes past it.
    Cached,
    /// Both through the page cache; a flush makes it durable.
    Writeback,
}

/// A disk in a file or on a block device.
pub struct FileBackend {
    cached: Arc<File>,
    direct: Option<Arc<File>>,
    mode: Mode,
    /// What offsets, lengths and addresses of direct I/O must be multiples of.
    alignment: u64,
    is_device: bool,
    /// The length at whose multiples requests are best cut.
    preferred: u32,
    read_only: bool,
    size: AtomicU64,
    punches: AtomicBool,
    zeroes: AtomicBool,
    /// How what need not wait is done at once, without the ring.
    at_once: AtOnce,
    /// Who reads on through the page cache. The kernel looks after them too, but loses its way where several read, or one
    /// reads in pieces that overtake each other.
    streams: Streams,
}

/// Which flag keeps a read or write through the page cache from waiting.
struct AtOnce {
    reads: AtomicBool,
    writes: AtomicBool,
    /// The file is in memory: nothing ever waits.
    memory: bool,
    /// Writes through the page cache cannot be asked not to wait, but only wait while too much is dirty.
    patient: bool,
}

impl AtOnce {
    fn of(file: &File) -> AtOnce {
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        const EXT4_MAGIC: i64 = 0xef53;
        let kind = rustix::fs::fstatfs(file).map_or(0, |fs| fs.f_type);
        let (memory, patient) = (kind == TMPFS_MAGIC, kind == EXT4_MAGIC);
        AtOnce { reads: AtomicBool::new(true), writes: AtomicBool::new(!patient), memory, patient }
    }

    /// Tries to read all of the segment from cached pages. True if that is done.
    fn read(&self, file: &File, at: u64, segment: &mut Segment) -> bool {
        let len = segment.len();
        let buffers = &mut [io::IoSliceMut::new(segment.as_mut_slice())];
        self.done(&self.reads, len, |flags| rustix::io::preadv2(file, buffers, at, flags))
    }

    /// Tries to write all of the segment to cached pages. True if that is done.
    fn write(&self, file: &File, at: u64, segment: &Segment) -> bool {
        let buffers = &[io::IoSlice::new(segment.as_slice())];
        // Whole pages, so that nothing has to be read first.
        if self.patient && (at | segment.len() as u64).is_multiple_of(4096) && dirty::has_room(segment.len()) {
            return rustix::io::pwritev2(file, buffers, at, ReadWriteFlags::empty()) == Ok(segment.len());
        }
        self.done(&self.writes, segment.len(), |flags| rustix::io::pwritev2(file, buffers, at, flags))
    }

    /// Whether the page of this octet is not only in the page cache but has been read.
    fn is_there(&self, file: &File, at: u64) -> bool {
        let mut octet = [0];
        self.done(&self.reads, 1, |flags| rustix::io::preadv2(file, &mut [io::IoSliceMut::new(&mut octet)], at, flags))
    }

    fn done(
        &self,
        offered: &AtomicBool,
        len: usize,
        mut call: impl FnMut(ReadWriteFlags) -> rustix::io::Result<usize>,
    ) -> bool {
        if !offered.load(Ordering::Relaxed) {
            return false;
        }
        match call(if self.memory { ReadWriteFlags::empty() } else { ReadWriteFlags::NOWAIT }) {
            Ok(done) => done == len,
            Err(Errno::OPNOTSUPP) => {
                offered.store(false, Ordering::Relaxed);
                false
            }
            // It would have to wait, or fails: the ring finds out again.
            Err(_) => false,
        }
    }
}

/// What is fetched ahead of a sequential reader.
const AHEAD: u64 = 4 << 20;

/// Below this, sending from the page cache costs more than a read into a block.
const LEND_MIN: usize = 64 << 10;

impl FileBackend {
    /// Opens a file or block device.
    ///
    /// # Errors
    /// If it cannot be opened, or is neither.
    pub fn open(path: &Path, mode: Mode, read_only: bool) -> io::Result<FileBackend> {
        let open = |flags| OpenOptions::new().read(true).write(!read_only).custom_flags(flags).open(path);
        let cached = Arc::new(open(0)?);
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&*cached)?.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device"));
        }
        let direct = match mode {
            Mode::Writeback => None,
            Mode::Direct | Mode::Cached => match open(OFlags::DIRECT.bits() as i32) {
                Ok(file) => Some(Arc::new(file)),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    tracing::warn!(path = %path.display(), "the file system has no direct I/O; going through the page cache");
                    None
                }
                Err(error) => return Err(error),
            },
        };
        let alignment = direct.as_ref().map_or(1, |file| direct_alignment(file));
        let is_device = kind == FileType::BlockDevice;
        let size = AtomicU64::new(size_of(&cached)?);
        let (punches, zeroes) = (AtomicBool::new(true), AtomicBool::new(true));
        let at_once = AtOnce::of(&cached);
        let streams = Streams::new(if mode == Mode::Direct || at_once.memory { 0 } else { AHEAD });
        Ok(FileBackend {
            preferred: if is_device { member_len(&cached).unwrap_or(0) } else { 0 },
            cached,
            direct,
            mode,
            alignment,
            is_device,
            read_only,
            size,
            punches,
            zeroes,
            at_once,
            streams,
        })
    }

    /// An open file, through the page cache.
    ///
    /// # Errors
    /// If its size cannot be read.
    pub fn of(file: File) -> io::Result<FileBackend> {
        Ok(FileBackend {
            size: AtomicU64::new(size_of(&file)?),
            direct: None,
            mode: Mode::Writeback,
            alignment: 1,
            is_device: false,
            preferred: 0,
            read_only: false,
            punches: AtomicBool::new(true),
            zeroes: AtomicBool::new(true),
            at_once: AtOnce::of(&file),
            streams: Streams::new(0),
            cached: Arc::new(file),
        })
    }

    /// The file for a request: the one open for direct I/O if its mode says so and it is aligned.
    fn file(&self, direct: bool, at: u64, segment: &Segment) -> &Arc<File> {
        let aligned = (at | segment.len() as u64 | segment.as_ptr() as u64).is_multiple_of(self.alignment);
        match &self.direct {
            Some(file) if direct && aligned => file,
            _ => &self.cached,
        }
    }

    async fn write_zeroes(&self, mut at: u64, len: u64) -> io::Result<()> {
        /// Written at one time.
        const PIECE: usize = 256 << 10;
        let supply = Segments::new(1, PIECE).map_err(io::Error::other)?;
        let end = at + len;
        while at < end {
            let part = (end - at).min(PIECE as u64);
            let segment = supply.reserve(1).await.segment(part as usize);
            let file = self.file(self.mode != Mode::Writeback, at, &segment);
            reactor::ring().write(file, at, segment, false).await.0?;
            at += part;
        }
        Ok(())
    }

    /// Tries `fallocate`; false if it is not to be had for this file.
    async fn allocate(&self, offered: &AtomicBool, mode: i32, at: u64, len: u64) -> io::Result<bool> {
        if !offered.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match reactor::ring().allocate(&self.cached, mode, at, len).await {
            Ok(()) => Ok(true),
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV)) =>
            {
                // A block device refuses what is not aligned to its sectors; that says nothing of the next.
                if e.raw_os_error() != Some(libc::EINVAL) {
                    offered.store(false, Ordering::Relaxed);
                }
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// The states of a range, as the file system tells them.
    fn seek_extents(&self, at: u64, len: u64) -> io::Result<Vec<Extent>> {
        /// Extents in one answer.
        const COUNT_MAX: usize = 1024;
        let data = |len| Extent { len, hole: false, zero: false };
        let hole = |len| Extent { len, hole: true, zero: true };
        if self.is_device {
            return Ok(vec![data(len)]);
        }
        let (mut extents, end) = (Vec::new(), at + len);
        let mut position = at;
        while position < end && extents.len() < COUNT_MAX {
            let start = match rustix::fs::seek(&*self.cached, SeekFrom::Data(position)) {
                Ok(start) => start.min(end),
                Err(rustix::io::Errno::NXIO) => end,
                Err(_) => return Ok(vec![data(len)]),
            };
            if start > position {
                extents.push(hole(start - position));
                position = start;
                continue;
            }
            let stop = rustix::fs::seek(&*self.cached, SeekFrom::Hole(position))?.min(end);
            extents.push(data(stop.max(position + 1) - position));
            position = stop.max(position + 1);
        }
        Ok(merge(extents, len))
    }
}

/// Octets of a file or device.
fn size_of(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Ok(rustix::fs::ioctl_blksszget(file).and_then(|_| rustix::fs::seek(file, SeekFrom::End(0)))?);
    }
    Ok(stat.st_size as u64)
}

/// What a device has on one of its members (the chunk of an array), or writes at least.
fn member_len(device: &File) -> Option<u32> {
    let number = rustix::fs::fstat(device).ok()?.st_rdev;
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    // A partition's queue is its disk's.
    ["", "../"].iter().find_map(|of| {
        let path = format!("/sys/dev/block/{major}:{minor}/{of}queue/minimum_io_size");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

/// What direct I/O must be aligned to: what `statx` says, or else a page.
fn direct_alignment(file: &File) -> u64 {
    // SAFETY: an all-zero structure is a valid one.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a string with its end, the structure outlives the call.
    let rc = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat)
    };
    let told = rc == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0 && stat.stx_dio_offset_align != 0;
    if told { u64::from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align)) } else { 4096 }
}

impl Backend for FileBackend {
    fn geometry(&self) -> Geometry {
        if let Ok(size) = size_of(&self.cached) {
            self.size.store(size, Ordering::Relaxed);
        }
        Geometry {
            size: self.size.load(Ordering::Relaxed),
            block: 1,
            preferred: self.preferred.max(self.alignment as u32).max(4096),
            // The page cache and file systems work in pages.
            physical: self.alignment.max(4096) as u32,
            read_only: self.read_only,
            discard: self.punches.load(Ordering::Relaxed) && !self.read_only,
            fast_zero: self.zeroes.load(Ordering::Relaxed) && !self.read_only,
            shared: true,
        }
    }

    fn read(&self, at: u64, mut segment: Segment) -> Op<'_, Segment> {
        if self.mode != Mode::Direct && self.at_once.read(&self.cached, at, &mut segment) {
            return Box::pin(std::future::ready(Ok(segment)));
        }
        Box::pin(async move {
            let file = self.file(self.mode == Mode::Direct, at, &segment);
            let (result, mut segment) = reactor::ring().read(file, at, segment).await;
            match result {
                // The last sector of a file whose length is none of its multiples.
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                    let size = size_of(&self.cached)?;
                    let there = size.saturating_sub(at).min(segment.len() as u64) as usize;
                    if there < segment.len() {
                        return Err(e);
                    }
                    let (result, back) = reactor::ring().read(&self.cached, at, segment).await;
                    segment = back;
                    result.map(|()| segment)
                }
                other => other.map(|()| segment),
            }
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        if self.mode == Mode::Writeback && !durable && self.at_once.write(&self.cached, at, &segment) {
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(async move {
            let file = self.file(self.mode != Mode::Writeback, at, &segment);
            // Past the page cache, or through it: written through is written down.
            let sync = durable || (self.mode == Mode::Cached && Arc::ptr_eq(file, &self.cached));
            reactor::ring().write(file, at, segment, sync).await.0
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        Box::pin(async move {
            if self.read_only {
                return Ok(());
            }
            reactor::ring().sync(&self.cached).await
        })
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        Box::pin(async move {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let done = (how.contains(Zero::MAY_DISCARD) && self.allocate(&self.punches, punch, at, len).await?)
                || self.allocate(&self.zeroes, libc::FALLOC_FL_ZERO_RANGE, at, len).await?;
            if !done {
                if how.contains(Zero::FAST_ONLY) {
                    return Err(unsupported());
                }
                self.write_zeroes(at, len).await?;
            }
            if how.contains(Zero::DURABLE) { self.flush().await } else { Ok(()) }
        })
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        Box::pin(async move {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // Only advice: where it cannot be followed, nothing is lost.
            self.allocate(&self.punches, punch, at, len).await.map(drop)
        })
    }

    fn extents(&self, at: u64, len: u64) -> Op<'_, Vec<Extent>> {
        Box::pin(std::future::ready(self.seek_extents(at, len)))
    }

    fn announce(&self, at: u64, len: u64) {
        let Some(ahead) = self.streams.read(at, len, self.size.load(Ordering::Relaxed)) else { return };
        let file = Arc::clone(&self.cached);
        // Only advice: what comes of it shows when it is read.
        tokio::task::spawn_local(async move {
            let _ = reactor::ring().prefetch(&file, ahead.start, ahead.end - ahead.start).await;
        });
    }

    fn lend(&self, at: u64, len: usize) -> Option<Lent> {
        if self.mode == Mode::Direct || len < LEND_MIN {
            return None;
        }
        let there = page_cache::cached(&self.cached, at, len as u64).is_some_and(|cached| cached >= len as u64);
        if !there || !self.at_once.is_there(&self.cached, at + len as u64 - 1) {
            return None;
        }
        Some(Lent::File { file: Arc::clone(&self.cached), offset: at, len })
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        Box::pin(async move {
            if self.mode == Mode::Direct {
                return Ok(());
            }
            reactor::ring().prefetch(&self.cached, at, len).await
        })
    }
}
