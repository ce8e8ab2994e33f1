//! What outlives the daemon: the blocks of a write-back cache, in a file in memory.
//!
//! A write is acknowledged when it is in the cache. If the daemon is then killed and restarted, a client may reconnect and
//! flush successfully: so dirty blocks must survive. The
//! cache's memory is therefore a file in `/dev/shm`, which the next daemon finds and writes to the disk before it
//! serves it. It does not survive the host: that is what flushes are for.
//!
//! The file is a header, a record for each slot, and the slots' memory. A record says which block the slot holds and which
//! sub-blocks of it are dirty. It is changed in an order that is right wherever the process stops: a sub-block is marked dirty
//! after its bytes are there and before the client is answered, and clean after they are on the disk. Replaying one too many
//! writes what the disk has already, or what was never acknowledged. What is dirty and is changed again
//! is put aside first, and taken back if the process stops in the middle: no sector is half old and half new.

use super::dirty_bitmap::DirtyBitmap;
use crate::backend::{Backend, all};
use crate::identity::Identity;
use data_encoding::HEXLOWER;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use thruway_engine::Segments;
use thruway_engine::pool::{BlockPool, HEADROOM};
use thruway_memory::Buffer;

/// Where files outlive processes and take no disk.
const DIRECTORY: &str = "/dev/shm";
const MAGIC: [u8; 8] = *b"TWCACHE1";
const PAGE: u64 = 4096;
const RECORD_LEN: usize = 32;
/// Of a record: the block, where in the file its bytes are, and the dirty bitmap. Eight bytes each.
const BLOCK: usize = 0;
const OFFSET: usize = 8;
const BITMAP: usize = 16;
/// Of the record behind those of a partition's slots: where in the file bytes are being changed that are dirty, and how
/// many; none, if that is zero. What they were is behind the partition's slots.
const CHANGED_LEN: usize = 16;
/// Blocks that are replayed at a time.
const REPLAYED: usize = 16;

/// The file of one disk's cache, locked.
pub(crate) struct CacheFile {
    file: File,
    path: PathBuf,
    identity: Identity,
    /// What is there under this identity now.
    stamp: Identity,
}

/// What a cache left that was not closed.
pub(crate) struct Leftover {
    block_len: u32,
    dirty: Vec<Record>,
    /// Changes that were not finished.
    unfinished: Vec<Unfinished>,
}

/// Bytes at `offset` were being changed; `len` of what they were is at `aside`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unfinished {
    offset: u64,
    len: u64,
    aside: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Record {
    block: u64,
    offset: u64,
    bitmap: DirtyBitmap,
}

/// A cache file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheFileError {
    /// It cannot be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Another user's daemon wrote it.
    #[error(
        "{}: another user's daemon had this disk, and what it had acknowledged may be there only: start it as that user once, \
         or remove the file to give that up",
        .0.display()
    )]
    OtherUser(PathBuf),
    /// A file of this name that no daemon made.
    #[error("{}: exists but is not a Thruway cache file; remove it", .0.display())]
    Foreign(PathBuf),
    /// Another daemon holds its lock.
    #[error("{}: another daemon serves this disk", .0.display())]
    InUse(PathBuf),
    /// It is not what a daemon could have left.
    #[error("{}: is damaged; remove it to give up what was written and not flushed before the daemon ended", .0.display())]
    Damaged(PathBuf),
    /// Its contents are another disk's.
    #[error(
        "{}: holds what an earlier daemon acknowledged for another disk at the same place; bring that back, or remove the file \
         to give it up",
        .0.display()
    )]
    OtherDisk(PathBuf),
}

impl CacheFile {
    /// The file of a disk's cache; `None` if there is none and none is to be made.
    ///
    /// # Errors
    /// [`CacheFileError`].
    pub(crate) fn open(identity: &Identity, stamp: &Identity, make: bool) -> Result<Option<CacheFile>, CacheFileError> {
        CacheFile::open_in(Path::new(DIRECTORY), identity, stamp, make)
    }

    fn open_in(
        directory: &Path,
        identity: &Identity,
        stamp: &Identity,
        make: bool,
    ) -> Result<Option<CacheFile>, CacheFileError> {
        let digits = HEXLOWER.encode(identity);
        let user = rustix::process::geteuid().as_raw();
        let path = directory.join(format!("thruway-cache-{user}-{digits}"));
        if let Some(others) = others_file(directory, &path, &digits) {
            return Err(CacheFileError::OtherUser(others));
        }
        let failed = |source| CacheFileError::Io { path: path.clone(), source };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let flags = if make { flags | OFlags::CREATE } else { flags };
        loop {
            let file = match rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)) {
                Ok(fd) => File::from(fd),
                Err(rustix::io::Errno::NOENT) if !make => return Ok(None),
                Err(e) => return Err(failed(e.into())),
            };
            let stat = rustix::fs::fstat(&file).map_err(|e| failed(e.into()))?;
            let is_ours = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file()
                && stat.st_uid == user
                && stat.st_mode & 0o077 == 0
                && stat.st_nlink <= 1;
            if !is_ours {
                return Err(CacheFileError::Foreign(path));
            }
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(CacheFileError::InUse(path));
                }
                Err(e) => return Err(failed(e.into())),
            }
            // Its last holder may have removed it between our opening and locking it.
            if rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_nlink > 0) {
                return Ok(Some(CacheFile { file, path, identity: *identity, stamp: *stamp }));
            }
        }
    }

    /// What an earlier daemon left in it.
    ///
    /// # Errors
    /// [`CacheFileError`].
    pub(crate) fn leftover(&self) -> Result<Option<Leftover>, CacheFileError> {
        let damaged = || CacheFileError::Damaged(self.path.clone());
        let failed = |source| CacheFileError::Io { path: self.path.clone(), source };
        let len = self.file.metadata().map_err(failed)?.len();
        let mut header = [0; PAGE as usize];
        // One that was made and not used yet has no header.
        if len < PAGE || self.file.read_exact_at(&mut header, 0).is_err() || header[..8] == [0; 8] {
            return Ok(None);
        }
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        let (block_len, partitions, slots) = (number(24), number(32), number(40));
        let fits = |count: Option<u64>| count.is_some_and(|count| count <= len / block_len.max(1));
        if header[..8] != MAGIC
            || header[8..24] != self.identity
            || !block_len.is_power_of_two()
            || !(4096..=1 << 20).contains(&block_len)
            || !fits(slots.checked_add(1).and_then(|each| partitions.checked_mul(each)))
        {
            return Err(damaged());
        }
        let shape = Shape { block_len: block_len as usize, partitions: partitions as usize, slots: slots as usize };
        if len < shape.len() {
            return Err(damaged());
        }
        let mut records = vec![0; shape.records_len() as usize];
        self.file.read_exact_at(&mut records, PAGE).map_err(|_| damaged())?;
        let (mut dirty, mut unfinished) = (Vec::new(), Vec::new());
        let records = records.chunks_exact(RECORD_LEN).take(shape.partitions * (shape.slots + 1));
        for (index, record) in records.enumerate() {
            let field = |at: usize| u64::from_le_bytes(record[at..at + 8].try_into().expect("8 bytes"));
            if index % (shape.slots + 1) == shape.slots {
                let (offset, changed) = (field(OFFSET), field(CHANGED_LEN));
                let aside = shape.aside(index / (shape.slots + 1));
                if changed > block_len || offset.checked_add(changed).is_none_or(|end| end > len) {
                    return Err(damaged());
                }
                unfinished.extend((changed > 0).then_some(Unfinished { offset, len: changed, aside }));
                continue;
            }
            let bitmap = DirtyBitmap::of(block_len as usize, field(BITMAP));
            if bitmap.is_empty() {
                continue;
            }
            let (block, offset) = (field(BLOCK), field(OFFSET));
            if offset.checked_add(block_len).is_none_or(|end| end > len) || block.checked_mul(block_len).is_none() {
                return Err(damaged());
            }
            dirty.push(Record { block, offset, bitmap });
        }
        dirty.sort_unstable_by_key(|record| record.block);
        if !dirty.is_empty() && header[48..64] != self.stamp {
            return Err(CacheFileError::OtherDisk(self.path.clone()));
        }
        Ok((!dirty.is_empty()).then_some(Leftover { block_len: block_len as u32, dirty, unfinished }))
    }

    /// Writes what was left to the disk that it belongs to. How many bytes that were.
    ///
    /// # Errors
    /// If the disk fails. Then the file stays.
    pub(crate) async fn replay(&self, leftover: &Leftover, below: &dyn Backend) -> io::Result<u64> {
        let (block_len, size) = (u64::from(leftover.block_len), below.geometry().size);
        if leftover.dirty.last().is_some_and(|last| last.block * block_len >= size) {
            return Err(io::Error::other(format!(
                "the disk ends before what is in {}; make it as long as it was",
                self.path.display()
            )));
        }
        let room = Segments::new(REPLAYED, block_len as usize).map_err(io::Error::other)?;
        let mut bytes = 0;
        for some in leftover.dirty.chunks(REPLAYED) {
            let mut writes = Vec::new();
            for Record { block, offset, bitmap } in some {
                let mut copy = room.reserve(1).await.segment(block_len as usize);
                self.file.read_exact_at(copy.as_mut_slice(), *offset)?;
                for Unfinished { offset: at, len, aside } in &leftover.unfinished {
                    // A change is inside of one block.
                    if let Some(within) = at.checked_sub(*offset).filter(|within| within + len <= block_len) {
                        let was = &mut copy.as_mut_slice()[within as usize..(within + len) as usize];
                        self.file.read_exact_at(was, *aside)?;
                    }
                }
                let start = block * block_len;
                drop(copy.split_off(size.saturating_sub(start).min(block_len) as usize));
                for (within, part) in bitmap.cut(copy) {
                    bytes += part.len() as u64;
                    writes.push(below.write(start + within, part, false));
                }
            }
            all(writes).await?;
        }
        below.flush().await?;
        Ok(bytes)
    }

    /// Makes it the memory of a cache, in which nothing is. Nothing is left of it if that fails.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(crate) fn lay_out(self, block_len: usize, partitions: usize, slots: usize) -> io::Result<Layout> {
        let shape = Shape { block_len, partitions, slots };
        match self.begin(&shape) {
            Ok(records) => Ok(Layout { file: self, records, shape }),
            Err(e) => {
                self.remove();
                Err(e)
            }
        }
    }

    /// Its length, its header, and its records.
    fn begin(&self, shape: &Shape) -> io::Result<Arc<Buffer>> {
        self.file.set_len(0)?;
        self.file.set_len(shape.len())?;
        self.allocate(0, shape.pool(0))?;
        let records = Buffer::of_file(&self.file, PAGE, shape.records_len() as usize).map_err(io::Error::other)?;
        let mut header = MAGIC.to_vec();
        header.extend(self.identity);
        let Shape { block_len, partitions, slots } = *shape;
        [block_len, partitions, slots].iter().for_each(|number| header.extend((*number as u64).to_le_bytes()));
        header.extend(self.stamp);
        self.file.write_all_at(&header, 0)?;
        Ok(Arc::new(records))
    }

    /// Takes the memory of a part now: some that turned out not to be there later would end the process.
    fn allocate(&self, at: u64, len: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.file, FallocateFlags::empty(), at, len)?)
    }

    /// Nothing in it is needed any more.
    pub(crate) fn remove(&self) {
        if let Err(error) = rustix::fs::unlinkat(rustix::fs::CWD, &self.path, AtFlags::empty()) {
            // In a directory that everybody may write to only its owner may do that; giving its memory back is as good.
            let emptied = self.file.set_len(0);
            tracing::debug!(path = %self.path.display(), %error, ?emptied, "removing the memory of a cache");
        }
    }
}

/// The file of this disk that is another user's.
fn others_file(directory: &Path, own: &Path, digits: &str) -> Option<PathBuf> {
    let names = std::fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path());
    let same = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix("thruway-cache-").and_then(|rest| rest.split_once('-')).is_some_and(|(_, of)| of == digits)
    };
    // An empty one is what is left where its owner could not remove it.
    let holds = |path: &PathBuf| std::fs::symlink_metadata(path).is_ok_and(|meta| meta.len() > 0);
    { names }.find(|path| path != own && same(path) && holds(path))
}

impl Leftover {
    /// Blocks.
    pub(crate) fn len(&self) -> usize {
        self.dirty.len()
    }
}

/// What is where in the file: a header; of every partition a record for each slot and one more; of every partition its
/// slots, and room for what a block of it was.
#[derive(Debug, Clone, Copy)]
struct Shape {
    block_len: usize,
    partitions: usize,
    slots: usize,
}

impl Shape {
    fn records_len(&self) -> u64 {
        (self.partitions * (self.slots + 1) * RECORD_LEN).next_multiple_of(PAGE as usize) as u64
    }

    fn pool_len(&self) -> u64 {
        (self.slots * (HEADROOM + self.block_len)) as u64
    }

    /// Where a partition's slots are.
    fn pool(&self, partition: usize) -> u64 {
        PAGE + self.records_len() + partition as u64 * (self.pool_len() + self.block_len as u64)
    }

    /// Where what a partition changes is put aside.
    fn aside(&self, partition: usize) -> u64 {
        self.pool(partition) + self.pool_len()
    }

    fn len(&self) -> u64 {
        self.pool(self.partitions)
    }
}

/// The memory of a cache.
pub(crate) struct Layout {
    file: CacheFile,
    records: Arc<Buffer>,
    shape: Shape,
}

impl Layout {
    /// The memory of a partition, on this memory node, and its records.
    ///
    /// # Errors
    /// If there is no room for it, or it cannot be mapped.
    pub(super) fn partition(&self, index: usize, node: u32) -> io::Result<(Arc<BlockPool>, Records)> {
        let Shape { block_len, slots, .. } = self.shape;
        let map = |at, len| Buffer::of_file(&self.file.file, at, len).map_err(io::Error::other);
        let data_at = self.shape.pool(index);
        let memory = map(data_at, self.shape.pool_len() as usize)?;
        let aside = map(self.shape.aside(index), block_len)?;
        let first = index * (slots + 1);
        let records = Records { buffer: Arc::clone(&self.records), first, slots: slots as u32, data_at, aside };
        let pool = BlockPool::over(memory, slots, block_len);
        // Where memory is taken is decided when it is taken.
        pool.bind(node);
        self.file.allocate(data_at, self.shape.pool_len() + block_len as u64)?;
        Ok((pool, records))
    }

    /// The cache has nothing any more that is not on the disk.
    pub(super) fn remove(&self) {
        self.file.remove();
    }
}

/// The records of a partition's slots.
pub(super) struct Records {
    buffer: Arc<Buffer>,
    first: usize,
    slots: u32,
    data_at: u64,
    /// What is being changed, as it was.
    aside: Buffer,
}

impl Records {
    /// Changes bytes that are dirty, at `offset` of the partition's memory. If the process ends in the middle, they are
    /// what they were.
    pub(super) fn change(&self, bytes: &mut [u8], offset: usize, change: impl FnOnce(&mut [u8])) {
        self.aside.write(0, bytes);
        self.put(self.slots, OFFSET, self.data_at + offset as u64);
        self.put(self.slots, CHANGED_LEN, bytes.len() as u64);
        fence(Ordering::SeqCst);
        change(bytes);
        self.put(self.slots, CHANGED_LEN, 0);
    }

    fn at(&self, slot: u32, field: usize) -> usize {
        (self.first + slot as usize) * RECORD_LEN + field
    }

    fn put(&self, slot: u32, field: usize, value: u64) {
        // What was stored before is there before.
        fence(Ordering::Release);
        self.buffer.write(self.at(slot, field), &value.to_le_bytes());
    }

    /// A slot that had nothing dirty holds this block, whose bytes are at `offset` of the partition's memory.
    pub(super) fn name(&self, slot: u32, block: u64, offset: usize) {
        self.put(slot, BITMAP, 0);
        self.put(slot, BLOCK, block);
        self.put(slot, OFFSET, self.data_at + offset as u64);
    }

    /// Marks these sub-blocks dirty, too; their bytes are in the slot.
    pub(super) fn add(&self, slot: u32, bitmap: DirtyBitmap) {
        let mut now = [0; 8];
        self.buffer.read(self.at(slot, BITMAP), &mut now);
        self.put(slot, BITMAP, u64::from_le_bytes(now) | bitmap.bits());
    }

    /// Marks these sub-blocks dirty, and no others.
    pub(super) fn set(&self, slot: u32, bitmap: DirtyBitmap) {
        self.put(slot, BITMAP, bitmap.bits());
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cache, Config};
    use super::*;
    use crate::backend::MemoryBackend;
    use crate::layer::{Fault, Kind};
    use thruway_engine::{Reactors, Segment};

    const ID: Identity = [7; 16];
    const SIZE: u64 = 1 << 20;

    fn segment(byte: u8, len: usize) -> Segment {
        let memory = Segments::new(1, len.next_multiple_of(4096)).unwrap();
        let mut segment = futures_util::FutureExt::now_or_never(memory.reserve(1)).unwrap().segment(len);
        segment.as_mut_slice().fill(byte);
        segment
    }

    /// Runs something on a reactor, and ends with it whatever it has begun, as a kill does.
    fn run<T: Send + 'static, F: Future<Output = T> + 'static>(work: impl FnOnce() -> F + Send + 'static) -> T {
        let reactors = Reactors::start(Some(1)).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        reactors.handles()[0].spawn(move || {
            let work = work();
            async move { tell.send(work.await).unwrap() }
        });
        told.recv().expect("it panicked")
    }

    fn config() -> Config {
        Config { block: 16 << 10, partitions: 2, write_back: true, ..Config::new(512 << 10) }
    }

    async fn byte(disk: &dyn Backend, at: u64) -> u8 {
        disk.read(at, segment(0, 1)).await.unwrap().as_slice()[0]
    }

    fn open(directory: &tempfile::TempDir, make: bool) -> Result<Option<CacheFile>, CacheFileError> {
        CacheFile::open_in(directory.path(), &ID, &ID, make)
    }

    fn cache(file: CacheFile, disk: &Arc<dyn Backend>) -> Cache {
        Cache::in_file(Arc::clone(disk), config(), &[0], None, Some(file)).unwrap()
    }

    #[test]
    fn what_was_written_and_not_flushed_outlives_the_daemon() {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        assert!(open(&directory, false).unwrap().is_none());
        let memory: Arc<dyn Backend> = Arc::new(MemoryBackend::new(SIZE).unwrap());
        // The disk takes nothing, so that all stays dirty.
        let broken: Arc<dyn Backend> = Arc::new(Fault::new(Arc::clone(&memory), Kind::Write, 1.0, 1));
        let file = open(&directory, true).unwrap().unwrap();
        assert!(matches!(open(&directory, true), Err(CacheFileError::InUse(_))));
        let written = run(move || async move {
            let cache = cache(file, &broken);
            let mut written = Vec::new();
            for (at, len) in [(0, 512), (5000, 100), (40_000, 30_000), (SIZE - 100, 100), (5050, 10)] {
                let value = 1 + written.len() as u8;
                cache.write(at, segment(value, len), false).await.unwrap();
                written.push((at, value));
            }
            assert!(cache.flush().await.is_err());
            written
        });
        let file = open(&directory, false).unwrap().unwrap();
        let leftover = file.leftover().unwrap().unwrap();
        assert!(leftover.len() >= 5);
        run(move || async move {
            file.replay(&leftover, &*memory).await.unwrap();
            for (at, value) in written {
                assert_eq!(byte(&*memory, at).await, value, "at {at}");
            }
            assert_eq!((byte(&*memory, 5099).await, byte(&*memory, 5100).await), (2, 0));
            // A cache that ends with nothing dirty leaves nothing.
            let cache = cache(file, &memory);
            cache.write(0, segment(9, 512), false).await.unwrap();
            cache.flush().await.unwrap();
        });
        assert!(open(&directory, false).unwrap().is_none());
    }

    #[test]
    fn what_is_on_the_disk_is_not_replayed() {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        let memory: Arc<dyn Backend> = Arc::new(MemoryBackend::new(SIZE).unwrap());
        let (file, disk) = (open(&directory, true).unwrap().unwrap(), Arc::clone(&memory));
        run(move || async move {
            let cache = cache(file, &disk);
            cache.write(0, segment(1, 4096), false).await.unwrap();
            cache.write(65536, segment(3, 4096), false).await.unwrap();
            cache.flush().await.unwrap();
            cache.write(4096, segment(2, 4096), false).await.unwrap();
            cache.write(81920, segment(4, 16384), false).await.unwrap();
            cache.zero(81920, 16384, crate::backend::Zero::empty()).await.unwrap();
            // Somebody else's by now.
            disk.write(0, segment(8, 4096), false).await.unwrap();
        });
        let file = open(&directory, false).unwrap().unwrap();
        let leftover = file.leftover().unwrap().unwrap();
        run(move || async move {
            assert_eq!(file.replay(&leftover, &*memory).await.unwrap(), 4096);
            let found = [0, 4096, 65536, 81920].map(|at| byte(&*memory, at));
            assert_eq!(futures_util::future::join_all(found).await, [8, 2, 3, 0]);
        });
    }

    #[test]
    fn what_was_being_changed_when_the_daemon_ended_is_what_it_was() {
        ends_in_a_change(1050..16384);
        // As much as there can be at a time.
        ends_in_a_change(0..16384);
    }

    fn ends_in_a_change(changed: std::ops::Range<usize>) {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        let memory: Arc<dyn Backend> = Arc::new(MemoryBackend::new(SIZE).unwrap());
        let layout = open(&directory, true).unwrap().unwrap().lay_out(16 << 10, 2, 4).unwrap();
        let (pool, records) = layout.partition(1, 0).unwrap();
        // The one that ends where the file does.
        let last = (0..4).map(|_| pool.try_take().unwrap()).collect::<Vec<_>>().pop().unwrap();
        let mut slot = Segment::new(last, 16 << 10);
        records.name(0, 3, slot.offset());
        slot.as_mut_slice().fill(1);
        let mut bitmap = DirtyBitmap::none(16 << 10);
        bitmap.add(0, 16 << 10);
        records.add(0, bitmap);
        let offset = slot.offset() + 1000;
        records.change(&mut slot.as_mut_slice()[1000..1100], offset, |bytes| bytes.fill(2));
        // This one ends in the middle.
        let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let offset = slot.offset() + changed.start;
            records.change(&mut slot.as_mut_slice()[changed], offset, |bytes| {
                bytes[..2000].fill(3);
                panic!("killed");
            });
        }));
        assert!(stopped.is_err());
        drop((layout, records, slot, pool));
        let file = open(&directory, false).unwrap().unwrap();
        let leftover = file.leftover().unwrap().unwrap();
        run(move || async move {
            file.replay(&leftover, &*memory).await.unwrap();
            let found = [999, 1000, 1049, 1050, 1099, 1100, 4999].map(|at| byte(&*memory, 3 * 16384 + at));
            assert_eq!(futures_util::future::join_all(found).await, [1, 2, 2, 2, 2, 1, 1]);
        });
    }

    #[test]
    fn a_file_that_is_damaged_or_anothers_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let open = |make| open(&directory, make);
        let file = open(true).unwrap().unwrap();
        let path = file.path.clone();
        assert!(file.leftover().unwrap().is_none(), "made, and not used yet");
        assert!(file.lay_out(1 << 20, 1, 1 << 40).is_err());
        assert!(!path.exists(), "no room, and nothing left that takes it");
        let layout = open(true).unwrap().unwrap().lay_out(16 << 10, 1, 4).unwrap();
        let (pool, records) = layout.partition(0, 0).unwrap();
        records.name(0, 3, 8192);
        let mut bitmap = DirtyBitmap::none(16 << 10);
        bitmap.add(0, 4096);
        records.add(0, bitmap);
        // What is mapped stays locked.
        drop((layout, pool, records));
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(open(false).unwrap().unwrap().leftover().unwrap().unwrap().len(), 1);
        let another = CacheFile::open_in(directory.path(), &ID, &[9; 16], false).unwrap().unwrap();
        assert!(matches!(another.leftover(), Err(CacheFileError::OtherDisk(_))));
        drop(another);
        let short: Arc<dyn Backend> = Arc::new(MemoryBackend::new(40_000).unwrap());
        let (file, left) = (open(false).unwrap().unwrap(), open(false));
        assert!(matches!(left, Err(CacheFileError::InUse(_))));
        let leftover = file.leftover().unwrap().unwrap();
        assert!(
            run(move || async move { file.replay(&leftover, &*short).await.is_err() }),
            "the third block is beyond"
        );
        let others = path.with_file_name(path.file_name().unwrap().to_str().unwrap().replacen("cache-", "cache-9", 1));
        std::fs::copy(&path, &others).unwrap();
        assert!(matches!(open(true), Err(CacheFileError::OtherUser(_))));
        std::fs::remove_file(others).unwrap();
        let wrong =
            [(0, 1u64), (8, 1), (24, 3), (32, u64::MAX / 64), (40, u64::MAX), (4096, u64::MAX / 4), (4104, u64::MAX)];
        // The record behind those of the slots: so many bytes are being changed, of a file that has fewer.
        let behind = 4096 + 4 * RECORD_LEN as u64;
        for (at, bytes) in wrong.into_iter().chain([(behind as usize + CHANGED_LEN, u64::MAX)]) {
            let mut damaged = whole.clone();
            damaged[at..at + 8].copy_from_slice(&bytes.to_le_bytes());
            std::fs::write(&path, damaged).unwrap();
            assert!(matches!(open(false).unwrap().unwrap().leftover(), Err(CacheFileError::Damaged(_))), "at {at}");
        }
        std::fs::write(&path, &whole).unwrap();
        let mode = |bits| std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(bits)).unwrap();
        mode(0o666);
        assert!(matches!(open(true), Err(CacheFileError::Foreign(_))));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(open(true).is_err());
    }
}
