//! A disk in a file or on a block device.
//!
//! Direct I/O goes past the page cache, from and to the memory that the network uses. The kernel keeps the two
//! coherent only where they do not meet at the same time in the same page; so every disk is written either past the page
//! cache or through it, never both: what is not aligned for direct I/O is read, changed and written by direct I/O,
//! under a lock.
//!
//! The kernel reports lost writes once, to the first sync. So a failed sync is
//! recorded: from then on no flush of this disk succeeds until it is opened again.

use super::{Backend, EXTENTS_MAX, Extent, Geometry, Lent, Op, Zero, merge, unsupported};
use crate::readahead::ReadAhead;
use rustix::fs::{FallocateFlags, FileType, OFlags, SeekFrom};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use thruway_engine::io::{self as storage, OpenFile};
use thruway_engine::{Segment, Segments, page_cache};
use thruway_fs::disk_lock::{self, UNSHARED, USED};
use thruway_fs::sparse;
use thruway_server::turns::{Limits, Turns};
use thruway_server::{caller, slices};
use thruway_tcp::Origin;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, RwLock, Semaphore};

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

/// Extents that are looked up at once, where the file system is of this host.
const EXTENTS_AT_ONCE: usize = 8;
/// Limits of lookups of further extents of one disk, because their threads compete with the reactors for processors. Hosts take turns; in
/// a turn, at most [`EXTENTS_MAX`] are looked up.
const LOOKUPS: Limits = Limits { all: 4, per_origin: 1, waiting: 16 << 10, patience: Duration::from_secs(20) };

/// Threads that wait for the server of one disk, at most, of those that a reactor has.
const PLACES: usize = 16;

/// A disk in a file or on a block device.
pub struct FileBackend {
    cached: Arc<OpenFile>,
    direct: Option<Arc<OpenFile>>,
    mode: Mode,
    /// What offsets, lengths and addresses of direct I/O must be multiples of.
    alignment: u64,
    /// The length at whose multiples requests are best cut.
    preferred: u32,
    read_only: bool,
    size: Arc<AtomicU64>,
    /// Held while its server is asked for its length in the background.
    asks_size: Arc<Semaphore>,
    /// Bounds the threads that wait for its server: other disks need some.
    places: Arc<Semaphore>,
    /// Turns for threads that look up extents.
    lookups: Turns,
    punches: AtomicBool,
    zeroes: AtomicBool,
    /// A device discards, though what is read afterwards may be anything.
    discards: bool,
    syncs: Arc<Syncs>,
    /// Held together by writes past the page cache, alone by one that changes a part of what can be written so.
    aligned: RwLock<()>,
    /// Read-ahead through the page cache; the kernel's own fails with interleaved readers, and with one whose
    /// pieces overtake each other.
    readahead: ReadAhead,
}

/// Syncs of one file: one at a time, shared by all who were waiting when it began.
#[derive(Default)]
struct Syncs {
    /// The number of the last sync that succeeded. Held during one.
    succeeded: Arc<Mutex<u64>>,
    /// Syncs that have begun.
    begun: AtomicU64,
    /// One has failed.
    lost: AtomicBool,
}

impl Syncs {
    /// Has the file synced after now.
    async fn sync(self: &Arc<Self>, ring: &storage::Requests, file: &Arc<OpenFile>) -> io::Result<()> {
        let arrived = self.begun.load(Ordering::SeqCst);
        let mut succeeded = Arc::clone(&self.succeeded).lock_owned().await;
        self.check()?;
        // One that began after we arrived has succeeded.
        if *succeeded > arrived {
            return Ok(());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let (syncs, ring, file) = (Arc::clone(self), ring.clone(), Arc::clone(file));
        // A task of its own, not cancelled with the request: its error is reported only once.
        let sync = tokio::task::spawn_local(async move {
            let synced = syncs.note(ring.sync(&file).await);
            if synced.is_ok() {
                *succeeded = number;
            }
            synced
        });
        sync.await.map_err(io::Error::other)?
    }

    /// Remembers a failure, which the kernel tells only once.
    fn note(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result
            && !self.lost.swap(true, Ordering::SeqCst)
        {
            tracing::error!(%error, "writes were lost: no flush of this disk succeeds until it is opened again");
        }
        result
    }

    fn check(&self) -> io::Result<()> {
        if self.lost.load(Ordering::SeqCst) { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }
}

/// Without room, or refused, nothing was written, and nothing of it is lost.
fn means_no_room(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EINVAL))
}

/// What is fetched ahead of a sequential reader.
const AHEAD: u64 = 4 << 20;

/// Below this, sending from the page cache costs more than a read into a block.
const LEND_MIN: usize = 64 << 10;

/// A file and a block device, and nothing else, can be a disk.
fn check_kind(file: &File) -> io::Result<rustix::fs::Stat> {
    let stat = rustix::fs::fstat(file)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => Ok(stat),
        _ => Err(no_disk()),
    }
}

fn no_disk() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device")
}

/// What tells a file or device from others: its device and inode, or its device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FileKey {
    File(u64, u64),
    Device(u64),
}

impl FileBackend {
    /// Whether a file or block device could be opened, without locking it.
    pub(crate) fn check(path: &Path, read_only: bool) -> io::Result<FileKey> {
        use rustix::fs::{Access, AtFlags, CWD};
        let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
        let stat = check_kind(&file)?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        if !read_only {
            rustix::fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)?;
        }
        Ok(if is_device { FileKey::Device(stat.st_rdev) } else { FileKey::File(stat.st_dev, stat.st_ino) })
    }

    /// Opens a file or block device.
    ///
    /// # Errors
    /// If it cannot be opened, or is neither.
    pub fn open(path: &Path, mode: Mode, read_only: bool) -> io::Result<FileBackend> {
        let open = |flags| OpenOptions::new().read(true).write(!read_only).custom_flags(flags).open(path);
        let is_device = |stat: &rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        // A device that is mounted, or somebody else's, is not ours to write to.
        let exclusive = !read_only && rustix::fs::stat(path).is_ok_and(|stat| is_device(&stat));
        let in_use = |error: io::Error| match error.raw_os_error() {
            Some(libc::EBUSY) if exclusive => io::Error::other("the device is in use (mounted, or served already)"),
            Some(libc::EISDIR) => no_disk(),
            _ => error,
        };
        let first = if exclusive { OFlags::EXCL.bits() as i32 } else { 0 };
        let cached = open(first | OFlags::NONBLOCK.bits() as i32).map_err(in_use)?;
        check_kind(&cached)?;
        let cached = Arc::new(OpenFile::new(cached));
        lock_file(&cached, read_only, true)?;
        let direct = match mode {
            Mode::Writeback => None,
            Mode::Direct | Mode::Cached => match open(OFlags::DIRECT.bits() as i32) {
                Ok(file) => Some(Arc::new(OpenFile::new(file))),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    tracing::warn!(path = %path.display(), "the file system has no direct I/O; going through the page cache");
                    None
                }
                Err(error) => return Err(error),
            },
        };
        if let Some(direct) = &direct {
            // Of a daemon that was killed, requests may still be on their way to the disk. They hold the file that they
            // go to, and with it this lock.
            lock_file(direct, read_only, false)?;
        }
        let alignment = direct.as_ref().map_or(1, |file| direct_alignment(file));
        let is_device = cached.is_device();
        let size = Arc::new(AtomicU64::new(size_of(&cached)?));
        // Without this the kernel would write the zeroes itself, which is not what a discard is for.
        let zeroes_fast = !is_device || queue_limit(&cached, "write_zeroes_max_bytes").is_some_and(|max| max > 0);
        let discards = is_device && queue_limit(&cached, "discard_max_bytes").is_some_and(|max| max > 0);
        let (punches, zeroes) = (AtomicBool::new(zeroes_fast), AtomicBool::new(zeroes_fast));
        let readahead = ReadAhead::new(if mode == Mode::Direct || cached.is_in_memory() { 0 } else { AHEAD });
        Ok(FileBackend {
            preferred: if is_device { member_len(&cached).unwrap_or(0) } else { 0 },
            discards,
            syncs: Arc::default(),
            aligned: RwLock::new(()),
            cached,
            direct,
            mode,
            alignment,
            read_only,
            size,
            asks_size: Arc::new(Semaphore::new(1)),
            places: Arc::new(Semaphore::new(PLACES)),
            lookups: Turns::new(LOOKUPS),
            punches,
            zeroes,
            readahead,
        })
    }

    /// An open file, through the page cache.
    ///
    /// # Errors
    /// If its size cannot be read.
    pub fn of(file: File) -> io::Result<FileBackend> {
        Ok(FileBackend {
            size: Arc::new(AtomicU64::new(size_of(&file)?)),
            asks_size: Arc::new(Semaphore::new(1)),
            places: Arc::new(Semaphore::new(PLACES)),
            lookups: Turns::new(LOOKUPS),
            direct: None,
            mode: Mode::Writeback,
            alignment: 1,
            preferred: 0,
            read_only: false,
            punches: AtomicBool::new(true),
            zeroes: AtomicBool::new(true),
            discards: false,
            syncs: Arc::default(),
            aligned: RwLock::new(()),
            readahead: ReadAhead::new(0),
            cached: Arc::new(OpenFile::new(file)),
        })
    }

    /// The file that writes go to past the page cache, if they do.
    fn written_directly(&self) -> Option<&Arc<OpenFile>> {
        // Of a device the kernel does not drop the cached pages that an asynchronous direct write changes
        // (mm/filemap.c): who reads it through the page cache has to write it so.
        let through = self.mode == Mode::Writeback || (self.mode == Mode::Cached && self.cached.is_device());
        self.direct.as_ref().filter(|_| !through)
    }

    fn is_aligned(&self, at: u64, segment: &Segment) -> bool {
        (at | segment.len() as u64 | segment.as_ptr() as u64).is_multiple_of(self.alignment)
    }

    /// A segment for direct I/O around a range, and where it begins.
    async fn around(&self, at: u64, len: usize) -> io::Result<(u64, Segment)> {
        let start = at / self.alignment * self.alignment;
        let end = (at + len as u64).next_multiple_of(self.alignment);
        let len = (end - start) as usize;
        let room = Segments::new(1, len.next_multiple_of(4096)).map_err(io::Error::other)?;
        Ok((start, room.reserve(1).await.segment(len)))
    }

    /// Reads past the page cache what is not aligned for it.
    async fn read_around(&self, file: &Arc<OpenFile>, at: u64, segment: &mut Segment) -> io::Result<()> {
        let (start, around) = self.around(at, segment.len()).await?;
        let around = self.read_to_end(file, start, around).await?;
        let from = (at - start) as usize;
        let len = segment.len();
        segment.as_mut_slice().copy_from_slice(&around.as_slice()[from..][..len]);
        Ok(())
    }

    /// The length of the file as it is now, in bytes. A file server is asked on a thread, so that one that does not answer blocks no other request.
    async fn size_now(&self) -> io::Result<u64> {
        if self.cached.is_of_this_host() {
            return size_of(&self.cached);
        }
        let file = Arc::clone(&self.cached);
        self.ring().on_thread(move || size_of(&file)).await
    }

    /// Where requests for this file are started. Threads that ask a server are few.
    fn ring(&self) -> storage::Requests {
        if self.cached.is_of_this_host() { storage::ring() } else { storage::ring().within(&self.places) }
    }

    /// Reads; what is behind the end of a file is zeroes.
    async fn read_to_end(&self, file: &Arc<OpenFile>, at: u64, mut segment: Segment) -> io::Result<Segment> {
        let size = self.size_now().await?;
        let there = size.saturating_sub(at).min(segment.len() as u64) as usize;
        if there < segment.len() {
            let mut rest = segment.split_off(there);
            rest.as_mut_slice().fill(0);
            // The last sector of a file whose length is none of its multiples is read through the page cache.
            let whole = there as u64 / self.alignment * self.alignment;
            let mut tail = segment.split_off(whole as usize);
            if !segment.is_empty() {
                let (result, back) = self.ring().read(file, at, segment).await;
                segment = back;
                result?;
            }
            if !tail.is_empty() {
                let (result, back) = self.ring().read(&self.cached, at + whole, tail).await;
                tail = back;
                result?;
            }
            segment.join(tail);
            segment.join(rest);
            return Ok(segment);
        }
        let (result, segment) = self.ring().read(file, at, segment).await;
        result.map(|()| segment)
    }

    /// Writes past the page cache.
    async fn write_directly(&self, file: &Arc<OpenFile>, at: u64, segment: Segment, durable: bool) -> io::Result<()> {
        if self.is_aligned(at, &segment) {
            let _together = self.aligned.read().await;
            return self.write_past_cache(file, at, segment, durable).await;
        }
        // A concurrent write to the rest of the page must not be undone.
        let _alone = self.aligned.write().await;
        let (start, around) = self.around(at, segment.len()).await?;
        let mut around = self.read_to_end(file, start, around).await?;
        around.as_mut_slice()[(at - start) as usize..][..segment.len()].copy_from_slice(segment.as_slice());
        let size = self.size_now().await?;
        if start + around.len() as u64 <= size || self.cached.is_device() {
            return self.write_past_cache(file, start, around, durable).await;
        }
        // The file must not grow: its last part goes through the page cache, and at once to the disk.
        let end = (at + segment.len() as u64).max(size.min(start + around.len() as u64));
        drop(around.split_off((end - start) as usize));
        self.ring().write(&self.cached, start, around, false).await.0?;
        self.syncs.sync(&self.ring(), &self.cached).await
    }

    /// A direct write, and a sync if it is to be durable. In one step where the kernel sees to that; of a server of FUSE it only asks
    /// for it, in a flag that most know nothing of.
    async fn write_past_cache(&self, file: &Arc<OpenFile>, at: u64, segment: Segment, durable: bool) -> io::Result<()> {
        let at_once = durable && self.cached.uring_is_sound();
        let written = self.ring().write(file, at, segment, at_once).await.0;
        match &written {
            // That there is no room may be what the sync found of an earlier write: asked again by the other descriptor, it tells.
            Err(e) if at_once && means_no_room(e) => {
                let _ = self.syncs.sync(&self.ring(), &self.cached).await;
                written
            }
            _ if at_once => self.syncs.note(written),
            Ok(()) if durable => self.syncs.sync(&self.ring(), &self.cached).await,
            _ => written,
        }
    }

    async fn write_zeroes(&self, mut at: u64, len: u64) -> io::Result<()> {
        /// Written at a time.
        const PIECE: usize = 256 << 10;
        let supply = Segments::new(1, PIECE).map_err(io::Error::other)?;
        let end = at + len;
        while at < end {
            let part = (end - at).min(PIECE as u64);
            let segment = supply.reserve(1).await.segment(part as usize);
            self.put(at, segment, false).await?;
            at += part;
        }
        Ok(())
    }

    /// Whether a change is inside of the file as it is now: one that has been made shorter must not grow again.
    async fn check_inside(&self, at: u64, len: u64) -> io::Result<()> {
        if self.cached.is_device() { Ok(()) } else { Self::is_inside(at, len, self.size_now().await?) }
    }

    fn is_inside(at: u64, len: u64, size: u64) -> io::Result<()> {
        if at + len <= size { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) }
    }

    /// Writes by the way that the mode says.
    async fn put(&self, at: u64, segment: Segment, durable: bool) -> io::Result<()> {
        if durable {
            self.syncs.check()?;
        }
        match self.written_directly() {
            Some(file) => self.write_directly(file, at, segment, durable).await,
            None => {
                // Written through is written down.
                let sync = durable || self.mode == Mode::Cached;
                // In two steps: that there is no room is an error of this write, what the sync says is of all before it.
                self.ring().write(&self.cached, at, segment, false).await.0?;
                if sync { self.syncs.sync(&self.ring(), &self.cached).await } else { Ok(()) }
            }
        }
    }

    /// Tries `fallocate`; false if it is not to be had for this file.
    async fn allocate(&self, offered: &AtomicBool, mode: FallocateFlags, at: u64, len: u64) -> io::Result<bool> {
        if !offered.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match self.ring().allocate(&self.cached, mode, at, len).await {
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
}

/// The states of a range of a file, as its file system tells them; at most so many extents, the rest of the range is left.
fn seek_extents(file: &File, at: u64, len: u64, count_max: usize) -> io::Result<Vec<Extent>> {
    let data = |len| Extent { len, hole: false, zero: false };
    let hole = |len| Extent { len, hole: true, zero: true };
    let (mut extents, end) = (Vec::new(), at + len);
    let mut position = at;
    while position < end && extents.len() < count_max {
        let next = match sparse::next_data(file, position, end) {
            Ok(next) => next.unwrap_or(end..end),
            Err(_) => return Ok(vec![data(len)]),
        };
        if next.start > position {
            extents.push(hole(next.start - position));
        }
        if !next.is_empty() {
            extents.push(data(next.end - next.start));
        }
        position = next.end;
    }
    Ok(merge(extents, len))
}

/// Bytes of a file or device.
fn size_of(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Ok(rustix::fs::ioctl_blksszget(file).and_then(|_| rustix::fs::seek(file, SeekFrom::End(0)))?);
    }
    Ok(stat.st_size as u64)
}

/// A limit of a block device's queue, as sysfs tells it.
fn queue_limit(device: &File, name: &str) -> Option<u64> {
    let number = rustix::fs::fstat(device).ok()?.st_rdev;
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    // A partition's queue is its disk's.
    ["", "../"].iter().find_map(|of| {
        let path = format!("/sys/dev/block/{major}:{minor}/{of}queue/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

/// What a device has on one of its members (the chunk of an array), or writes at least.
fn member_len(device: &File) -> Option<u32> {
    queue_limit(device, "minimum_io_size").and_then(|len| u32::try_from(len).ok()).filter(|len| len.is_power_of_two())
}

/// How long what a daemon that was killed has in progress may take.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Locks a served file against other writers: other exports, other daemons, and qemu, by the protocol of [`disk_lock`].
///
/// `alone`: no other export of this process has the file open yet, and another holder may be about to close it.
fn lock_file(file: &File, read_only: bool, alone: bool) -> io::Result<()> {
    let start = std::time::Instant::now();
    loop {
        match try_lock_file(file, read_only, alone) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && start.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

fn try_lock_file(file: &File, read_only: bool, alone: bool) -> io::Result<()> {
    const READ: i64 = 0;
    const WRITE: i64 = 1;
    const RESIZE: i64 = 3;
    let does: &[i64] = if read_only { &[READ] } else { &[READ, WRITE] };
    let held = does.iter().map(|what| USED + what).chain([WRITE, RESIZE].map(|what| UNSHARED + what));
    for byte in held {
        let lock = disk_lock::range(libc::F_RDLCK, byte, 1);
        // SAFETY: the structure outlives the call; the lock goes with the open file.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } != 0 {
            let error = io::Error::last_os_error();
            if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) {
                return Err(in_use());
            }
            tracing::warn!(%error, "the file cannot be locked: nothing keeps others from writing to it");
            return Ok(());
        }
    }
    if !alone {
        return Ok(());
    }
    // Our locks are set first: of two that open it at the same time, at least one sees the other.
    let unbearable = does.iter().map(|what| UNSHARED + what).chain([WRITE, RESIZE].map(|what| USED + what));
    for byte in unbearable {
        if disk_lock::conflicts(file, disk_lock::range(libc::F_WRLCK, byte, 1)).unwrap_or(false) {
            return Err(in_use());
        }
    }
    Ok(())
}

fn in_use() -> io::Error {
    let why = "the file is in use: it is served already, or another program has locked it";
    io::Error::new(io::ErrorKind::ResourceBusy, why)
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
        match Handle::try_current() {
            // A server is asked meanwhile; what it says is known the next time.
            Ok(runtime) if !self.cached.is_of_this_host() => {
                if let Ok(place) = Arc::clone(&self.asks_size).try_acquire_owned() {
                    let (file, size) = (Arc::clone(&self.cached), Arc::clone(&self.size));
                    runtime.spawn_blocking(move || {
                        size_of(&file).into_iter().for_each(|now| size.store(now, Ordering::Relaxed));
                        drop(place);
                    });
                }
            }
            _ => size_of(&self.cached).into_iter().for_each(|now| self.size.store(now, Ordering::Relaxed)),
        }
        Geometry {
            size: self.size.load(Ordering::Relaxed),
            block: 1,
            preferred: self.preferred.max(self.alignment as u32).max(4096),
            // The page cache and file systems work in pages.
            physical: self.alignment.max(4096) as u32,
            read_only: self.read_only,
            discard: (self.discards || self.punches.load(Ordering::Relaxed)) && !self.read_only,
            discard_zeroes: self.punches.load(Ordering::Relaxed),
            fast_zero: self.zeroes.load(Ordering::Relaxed) && !self.read_only,
            shared: true,
        }
    }

    fn read(&self, at: u64, mut segment: Segment) -> Op<'_, Segment> {
        if self.mode != Mode::Direct && self.cached.try_read(at, &mut segment) {
            return Box::pin(std::future::ready(Ok(segment)));
        }
        Box::pin(async move {
            let direct = self.direct.as_ref().filter(|_| self.mode == Mode::Direct);
            if let Some(file) = direct
                && !self.is_aligned(at, &segment)
            {
                self.read_around(file, at, &mut segment).await?;
                return Ok(segment);
            }
            let file = direct.unwrap_or(&self.cached);
            let (result, segment) = self.ring().read(file, at, segment).await;
            match result {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                    if at + segment.len() as u64 > self.size_now().await? {
                        return Err(e);
                    }
                    self.read_to_end(file, at, segment).await
                }
                other => other.map(|()| segment),
            }
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        if !self.cached.is_of_this_host() {
            return Box::pin(async move {
                self.check_inside(at, segment.len() as u64).await?;
                self.put(at, segment, durable).await
            });
        }
        let inside = || Self::is_inside(at, segment.len() as u64, size_of(&self.cached)?);
        let checked = if self.cached.is_device() { Ok(()) } else { inside() };
        if let Err(error) = checked {
            return Box::pin(std::future::ready(Err(error)));
        }
        if self.mode == Mode::Writeback && !durable && self.cached.try_write(at, &segment) {
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(self.put(at, segment, durable))
    }

    fn flush(&self) -> Op<'_, ()> {
        Box::pin(async move {
            // A read-only disk has nothing to flush.
            if self.read_only {
                return Ok(());
            }
            self.syncs.sync(&self.ring(), &self.cached).await
        })
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        Box::pin(async move {
            self.check_inside(at, len).await?;
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let range = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            // Who changes a part of a page must not bring back what it was.
            let together = self.aligned.read().await;
            let done = (how.contains(Zero::MAY_DISCARD) && self.allocate(&self.punches, punch, at, len).await?)
                || self.allocate(&self.zeroes, range, at, len).await?;
            drop(together);
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
            let _together = self.aligned.read().await;
            if self.discards {
                return self.ring().discard(&self.cached, at, len).await;
            }
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Only advice: where it cannot be followed, nothing is lost.
            self.allocate(&self.punches, punch, at, len).await.map(drop)
        })
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>> {
        let data = Extent { len, hole: false, zero: false };
        if self.cached.is_device() {
            return Box::pin(std::future::ready(Ok(vec![data])));
        }
        let most = most.clamp(1, EXTENTS_MAX);
        Box::pin(async move {
            let mut known = Vec::new();
            if self.cached.is_of_this_host() {
                known = seek_extents(&self.cached, at, len, most.min(EXTENTS_AT_ONCE))?;
                slices::spend(known.len()).await;
            }
            let done: u64 = known.iter().map(|extent| extent.len).sum();
            if done == len || known.len() >= most {
                return Ok(known);
            }
            // Many extents take time, and a file server may not answer: neither may block the reactor.
            let Some(turn) = self.lookups.take(caller::current().unwrap_or(Origin::UnknownUser)).await else {
                // What is not known may be data.
                return Ok(if known.is_empty() { vec![data] } else { known });
            };
            let (file, left) = (Arc::clone(&self.cached), most - known.len());
            let rest = move || {
                let found = seek_extents(&file, at + done, len - done, left);
                drop(turn);
                found
            };
            let rest = self.ring().on_thread(rest).await?;
            slices::spend(rest.len()).await;
            known.extend(rest);
            Ok(merge(known, len))
        })
    }

    fn hint_sequential(&self, at: u64, len: u64) {
        let Some(ahead) = self.readahead.read(at, len, self.size.load(Ordering::Relaxed)) else { return };
        let (ring, file) = (self.ring(), Arc::clone(&self.cached));
        // Only advice: what comes of it shows when it is read.
        tokio::task::spawn_local(async move {
            let _ = ring.prefetch(&file, ahead.start, ahead.end - ahead.start).await;
        });
    }

    fn lend(&self, at: u64, len: usize) -> Option<Lent> {
        if self.mode == Mode::Direct || len < LEND_MIN {
            return None;
        }
        // What is still being read counts as cached, and would be waited for.
        if !page_cache::is_read(&self.cached, at, len as u64) {
            return None;
        }
        Some(Lent::File { file: Arc::clone(&self.cached), offset: at, len })
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        Box::pin(async move {
            if self.mode == Mode::Direct {
                return Ok(());
            }
            self.ring().prefetch(&self.cached, at, len).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::sync::mpsc;
    use thruway_engine::Reactors;

    const PIECE: u64 = 64 << 10;
    const PIECES: u64 = 50;

    /// A disk with a hole behind each piece of data, with room for so many lookups that wait.
    fn in_pieces(waiting: usize) -> FileBackend {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PIECES * PIECE).unwrap();
        for piece in 0..PIECES {
            file.write_all_at(&[1; PIECE as usize], 2 * piece * PIECE).unwrap();
        }
        FileBackend { lookups: Turns::new(Limits { waiting, ..LOOKUPS }), ..FileBackend::of(file).unwrap() }
    }

    /// Threads that look up extents compete with the reactors for processors.
    #[test]
    fn hosts_take_turns_for_lookups_of_many_extents() {
        let reactors = Reactors::start(Some(1)).unwrap();
        let (done, is_done) = mpsc::channel();
        reactors.handles()[0].spawn(move || async move {
            let host = |number: u8| Origin::of_host([10, 0, 0, number].into());
            // Lookups that would wait for a turn are refused at once.
            let disk = in_pieces(0);
            let found = async |number, most| {
                let looking = disk.extents(0, 2 * PIECES * PIECE, most);
                caller::on_behalf_of(host(number), looking).await.unwrap().len()
            };
            let all = 2 * PIECES as usize;
            assert_eq!(found(1, EXTENTS_MAX).await, all);
            let held = disk.lookups.take(host(1)).await.expect("a turn");
            let few = EXTENTS_AT_ONCE..=EXTENTS_AT_ONCE + 1;
            assert!(few.contains(&found(1, EXTENTS_MAX).await), "what is known without a turn");
            assert_eq!(found(2, EXTENTS_MAX).await, all, "another host has turns of its own");
            // Lookups of few extents need no turn.
            assert!((1..=2).contains(&found(1, 1).await));
            drop(held);
            assert_eq!(found(1, EXTENTS_MAX).await, all);
            assert!((40..=41).contains(&found(1, 40).await));
            done.send(()).unwrap();
        });
        is_done.recv().expect("the task ends without a panic");
    }
}
