//! The NUMA-aware cache (Ren 2015, section 5.2): blocks of a disk, near the cores that use them.
//!
//! Every memory node has as many partitions as asked for, each with a lock, a table and an order of eviction of its
//! own; neighbouring blocks are in one partition. A request is cut at the borders of blocks. One that is long enough
//! is handed to a core of the node that holds most of it, once, by the core that received it. The disk below is
//! used through blocks of our own, which direct I/O goes straight to.
//!
//! A block is absent, being loaded, or there; and there it is clean or dirty. What is being loaded is waited for.
//! Dirty blocks are written back from copies, so that they can be read and changed meanwhile; each has a bitmap of its
//! dirty sub-blocks, and only those are written. The share of dirty blocks is bounded: a write that would exceed it waits.
//! [`Backend::flush`] writes back everything that was dirty before it and then flushes the disk. Where writes go through to the disk, the block
//! is held until they have, so that nobody loads what is about to change.

mod dirty_bitmap;
pub(crate) mod layer;
mod order;
mod partition;
pub(crate) mod persist;
pub mod policy;
mod range_lock;

use crate::backend::{Backend, Extent, Geometry, Lent, Memory, Op, Zero, all};
use crate::chunk_ranges::chunk_ranges;
use crate::readahead::ReadAhead;
use futures_util::future::try_join_all;
use partition::{Found, Partition, Partitions};
pub use persist::CacheFileError;
use persist::{CacheFile, Layout};
use range_lock::{Alone, RangeLock, Who};
use smallvec::SmallVec;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use thruway_engine::reactor::LoadBalancer;
use thruway_engine::{Segment, Segments};
use thruway_metrics::{Description, RegisterError, Registered, Registry};
use thruway_server::buffers::SMALL;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, oneshot};

/// How a cache is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Bytes of all blocks together.
    pub size: u64,
    /// Bytes of a block; a power of two of at least 4096.
    pub block: u32,
    /// Neighbouring blocks in one partition.
    pub neighbours: u64,
    /// Partitions of each node.
    pub partitions: usize,
    /// Writes are done when they are in the cache; the disk gets them later, at the latest with a flush.
    pub write_back: bool,
    /// What is dirty need not outlive the daemon.
    pub volatile: bool,
    /// Bytes that are read ahead of a sequential reader.
    pub read_ahead: u64,
}

impl Config {
    /// A cache of this size, as it serves most.
    pub fn new(size: u64) -> Config {
        Config {
            size,
            block: 64 << 10,
            neighbours: 4,
            partitions: 16,
            write_back: false,
            volatile: false,
            read_ahead: 1 << 20,
        }
    }

    /// Whether there can be such a cache on so many memory nodes.
    pub(crate) fn check(&self, nodes: usize) -> io::Result<()> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if !self.block.is_power_of_two() || !(4096..=1 << 20).contains(&self.block) {
            return wrong("a cache's block is a power of two from 4 KiB to 1 MiB".into());
        }
        if self.partitions == 0 || self.neighbours == 0 {
            return wrong("a cache needs a partition, and a block in it".into());
        }
        let least = 4 * (nodes * self.partitions) as u64 * u64::from(self.block);
        if self.size < least {
            let size = self.size;
            return wrong(format!("{size} bytes are too few; the smallest cache on this machine has {least} bytes"));
        }
        Ok(())
    }
}

/// Reads from here on are sent out of the cache; shorter ones cost less to copy than to look after.
const LEND_MIN: usize = 32 << 10;
/// Requests from here on are handed to the node that holds most of them.
const FORWARD_MIN: usize = 64 << 10;
/// Copies that are written out at a time.
const WRITE_OUT: usize = 16;
/// When a write has waited so long for the writer, it sees for itself.
const WRITER_LATE: Duration = Duration::from_millis(500);
/// How long a block may be dirty before it is written out without need.
const WRITEBACK_AGE: Duration = Duration::from_secs(5);

/// What a cache has done.
#[derive(Debug, Default)]
pub struct Counters {
    /// Blocks found.
    pub hits: AtomicU64,
    /// Blocks loaded.
    pub misses: AtomicU64,
    /// Blocks that gave way to others.
    pub evictions: AtomicU64,
    /// Blocks loaded before they were asked for.
    pub read_ahead: AtomicU64,
    /// Blocks written out.
    pub written_out: AtomicU64,
    /// Bytes copied by a core of the node that holds them.
    pub local: AtomicU64,
    /// Bytes copied by another.
    pub remote: AtomicU64,
    /// Requests handed to another node.
    pub forwarded: AtomicU64,
}

/// Returns a counter of a cache.
type Select = fn(&Counters) -> &AtomicU64;

/// Metrics of a cache.
const METRICS: &[(Description, Select)] = &[
    (describe("thruway_cache_hits", "Blocks found in the cache."), |counters| &counters.hits),
    (describe("thruway_cache_misses", "Blocks loaded into the cache for a request."), |counters| &counters.misses),
    (describe("thruway_cache_evictions", "Blocks removed from the cache for others."), |counters| &counters.evictions),
    (describe("thruway_cache_read_ahead", "Blocks loaded before a request for them."), |counters| &counters.read_ahead),
    (describe("thruway_cache_written_out", "Blocks written to the disk."), |counters| &counters.written_out),
    (describe("thruway_cache_local_bytes", "Bytes copied by a core of their memory node."), |counters| &counters.local),
    (describe("thruway_cache_remote_bytes", "Bytes copied by a core of another node."), |counters| &counters.remote),
    (describe("thruway_cache_forwarded", "Requests handed to another memory node."), |counters| &counters.forwarded),
];

const fn describe(name: &'static str, help: &'static str) -> Description {
    Description { name, help }
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (hits, misses) = (of(&self.hits), of(&self.misses));
        write!(
            f,
            "{hits} hits, {misses} misses ({:.1} %), {} evictions, {} read ahead, {} written out; \
             {} bytes local, {} remote, {} requests forwarded",
            100.0 * hits as f64 / (hits + misses).max(1) as f64,
            of(&self.evictions),
            of(&self.read_ahead),
            of(&self.written_out),
            of(&self.local),
            of(&self.remote),
            of(&self.forwarded),
        )
    }
}

/// A cache on a disk.
pub struct Cache {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    below: Arc<dyn Backend>,
    config: Config,
    partitions: Partitions,
    /// The memory that outlives us.
    layout: Option<Layout>,
    /// Reactors, to find one of another node; none if there is one node only.
    reactors: Option<LoadBalancer>,
    counters: Counters,
    /// Had alone for ranges that are being zeroed, which nothing else may see half done. Shared by requests, and by
    /// loads and writes out of the cache, which may go on when whoever wanted them has gone.
    ranges: Arc<RangeLock>,
    dirty_max: u64,
    /// Bytes of the disk, as they were when it was last used.
    size: AtomicU64,
    /// Told when a block has become clean.
    cleaned: Notify,
    /// Told when so much has become dirty that the writer must not sleep.
    pressed: Notify,
    copies: Segments,
    writer_runs: AtomicBool,
    readahead: ReadAhead,
    this: Weak<Inner>,
}

/// A part of a request that lies in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    block: u64,
    within: usize,
    len: usize,
}

impl Part {
    /// Where it begins on the disk.
    fn at(&self, block_len: u64) -> u64 {
        self.block * block_len + self.within as u64
    }
}

impl Cache {
    /// A cache of a disk, spread over these memory nodes. What is dirty in it is lost with the process.
    ///
    /// # Errors
    /// If a number makes no sense, or the memory is not to be had.
    pub fn new(
        below: Arc<dyn Backend>,
        config: Config,
        nodes: &[u32],
        reactors: Option<LoadBalancer>,
    ) -> io::Result<Cache> {
        Cache::in_file(below, config, nodes, reactors, None)
    }

    /// As [`Cache::new`], in a file that outlives the process, if there is one.
    pub(crate) fn in_file(
        below: Arc<dyn Backend>,
        config: Config,
        nodes: &[u32],
        reactors: Option<LoadBalancer>,
        file: Option<CacheFile>,
    ) -> io::Result<Cache> {
        config.check(nodes.len())?;
        let blocks = config.size / u64::from(config.block);
        let partitions = nodes.len() * config.partitions;
        let slots = (blocks / partitions as u64) as usize;
        let layout = file.map(|file| file.lay_out(config.block as usize, partitions, slots)).transpose()?;
        let partitions = Partitions::new(nodes, &config, slots, layout.as_ref())
            .inspect_err(|_| layout.iter().for_each(Layout::remove))?;
        let copies = Segments::new(WRITE_OUT, config.block as usize).map_err(io::Error::other)?;
        let below_size = below.geometry().size;
        let inner = Arc::new_cyclic(|this| Inner {
            below,
            dirty_max: config.size / 4,
            readahead: ReadAhead::new(config.read_ahead),
            size: AtomicU64::new(below_size),
            config,
            partitions,
            layout,
            reactors,
            counters: Counters::default(),
            ranges: Arc::default(),
            cleaned: Notify::new(),
            pressed: Notify::new(),
            copies,
            writer_runs: AtomicBool::new(false),
            this: Weak::clone(this),
        });
        Ok(Cache { inner })
    }

    /// What it has done.
    pub fn counters(&self) -> &Counters {
        &self.inner.counters
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What is dirty still is the next daemon's to write.
        if let Some(layout) = self.layout.as_ref().filter(|_| self.partitions.dirty() == 0) {
            layout.remove();
        }
    }
}

impl Inner {
    fn block_len(&self) -> u64 {
        self.config.block.into()
    }

    fn parts(&self, at: u64, len: usize) -> impl Iterator<Item = Part> + use<> {
        let block_len = self.block_len();
        let part = move |(at, len)| Part { block: at / block_len, within: (at % block_len) as usize, len };
        chunk_ranges(at, len as u64, self.config.block).map(part)
    }

    /// The blocks that a range touches.
    fn blocks(&self, at: u64, len: u64) -> std::ops::Range<u64> {
        at / self.block_len()..(at + len).div_ceil(self.block_len())
    }

    /// Bytes of a block: fewer than others' if the disk ends in it.
    fn len_of(&self, block: u64) -> usize {
        // What it has grown by is not here until somebody asks for it.
        let size = self.size.load(Ordering::Relaxed);
        size.saturating_sub(block * self.block_len()).min(self.block_len()) as usize
    }

    /// The node that holds most of a range.
    fn affinity(&self, at: u64, len: usize) -> u32 {
        let nodes = self.partitions.nodes();
        let mut bytes = vec![0; nodes.len()];
        for part in self.parts(at, len) {
            bytes[self.partitions.node_index(part.block)] += part.len;
        }
        let most = bytes.iter().enumerate().max_by_key(|(_, n)| **n).map_or(0, |(index, _)| index);
        nodes[most]
    }

    /// A reactor of the node that holds most of a range, if that is another than this one's.
    fn elsewhere(&self, at: u64, len: usize) -> Option<thruway_engine::reactor::Handle> {
        let reactors = self.reactors.as_ref()?;
        if len < FORWARD_MIN || self.partitions.nodes().len() < 2 {
            return None;
        }
        let node = self.affinity(at, len);
        if thruway_engine::reactor::node() == Some(node) {
            return None;
        }
        reactors.on_node(node)
    }

    /// Where bytes are copied counts as near or far.
    fn copied(&self, partition: &Partition, len: usize) {
        let near = thruway_engine::reactor::node().is_none_or(|node| node == partition.node);
        count(if near { &self.counters.local } else { &self.counters.remote }, len as u64);
    }

    /// A request reaches beyond where the disk ended: the block in which it did has bytes by now that it had not.
    async fn see_size(&self, end: u64) -> io::Result<()> {
        let seen = self.size.load(Ordering::Relaxed);
        if end <= seen {
            return Ok(());
        }
        let size = self.below.geometry().size;
        if seen == size {
            return Ok(());
        }
        let alone = Arc::new(self.ranges.alone(0..u64::MAX).await);
        // Others may have seen it meanwhile.
        let (seen, size) = (self.size.load(Ordering::Relaxed), self.below.geometry().size);
        let last = seen.min(size) / self.block_len();
        self.write_out_under(last, alone.clone()).await?;
        self.partitions.forget_clean(last..u64::MAX);
        self.size.store(size, Ordering::Relaxed);
        Ok(())
    }

    async fn read(&self, at: u64, mut segment: Segment) -> io::Result<Segment> {
        self.see_size(at + segment.len() as u64).await?;
        let _shared = self.ranges.share(self.blocks(at, segment.len() as u64), Who::Request).await;
        // Longer ones have been announced.
        if segment.len() <= SMALL {
            self.look_ahead(at, segment.len() as u64);
        }
        let mut rest = &mut *segment.as_mut_slice();
        let mut missing = Vec::new();
        for part in self.parts(at, rest.len()) {
            let (here, later) = std::mem::take(&mut rest).split_at_mut(part.len);
            rest = later;
            let partition = self.partitions.of(part.block);
            let hit = partition.lock().with(part.block, |data| here.copy_from_slice(&data[part.within..][..part.len]));
            if hit.is_some() {
                count(&self.counters.hits, 1);
                self.copied(partition, part.len);
            } else {
                missing.push((part, here));
            }
        }
        // What is not there is loaded all at once.
        try_join_all(missing.into_iter().map(|(part, here)| async move {
            let partition = self.partitions.of(part.block);
            loop {
                if let Err(error) = self.present(part.block, true).await {
                    return self.read_past(part, here).await.map_err(|_| error);
                }
                let copy = |data: &mut [u8]| here.copy_from_slice(&data[part.within..][..part.len]);
                let (copied, is_away) = {
                    let mut table = partition.lock();
                    (table.with(part.block, copy).is_some(), !table.knows(part.block))
                };
                if copied {
                    self.copied(partition, part.len);
                    return Ok(());
                }
                // It had to make way for others that are being read. All of them could do that to each other for ever.
                if is_away {
                    return self.read_past(part, here).await;
                }
            }
        }))
        .await?;
        Ok(segment)
    }

    /// Reads a part of a block that cannot be loaded: what is asked for may be sound where the rest is not, and it can be had though
    /// there is no room for the block because nothing can be written out.
    async fn read_past(&self, part: Part, here: &mut [u8]) -> io::Result<()> {
        let segment = self.copies.reserve(1).await.segment(part.len);
        let segment = self.below.read(part.at(self.block_len()), segment).await?;
        here.copy_from_slice(segment.as_slice());
        Ok(())
    }

    /// Writes a part of a block that cannot be loaded, for the same reasons. False if it has been loaded meanwhile.
    async fn write_past(&self, part: Part, data: &[u8]) -> io::Result<bool> {
        let mut segment = self.copies.reserve(1).await.segment(part.len);
        segment.as_mut_slice().copy_from_slice(data);
        let hold = self.partitions.hold(part.block).await;
        let is_away = !hold.is_there();
        if is_away {
            self.below.write(part.at(self.block_len()), segment, false).await?;
        }
        hold.written();
        Ok(is_away)
    }

    /// Lends all of a range, if all of it is there and near.
    fn lend(&self, at: u64, len: usize) -> Option<Lent> {
        let beyond = at + len as u64 > self.size.load(Ordering::Relaxed);
        if len < LEND_MIN || beyond || self.elsewhere(at, len).is_some() {
            return None;
        }
        let _shared = self.ranges.try_share(self.blocks(at, len as u64), Who::Request)?;
        let mut pieces = SmallVec::new();
        for part in self.parts(at, len) {
            let partition = self.partitions.of(part.block);
            let (slot, ptr) = partition.lock().lend(part.block)?;
            let pin = Lending { inner: self.this.upgrade()?, block: part.block, slot };
            // SAFETY: a lent slot keeps its block until the pin is dropped; the part is within it.
            pieces.push(unsafe { Memory::new(ptr.wrapping_add(part.within), part.len, Arc::new(pin)) });
        }
        for part in self.parts(at, len) {
            count(&self.counters.hits, 1);
            self.copied(self.partitions.of(part.block), part.len);
        }
        Some(Lent::Memory(pieces))
    }

    /// Makes sure that a block was there a moment ago, loading it if need be.
    async fn present(&self, block: u64, counted: bool) -> io::Result<()> {
        let partition = self.partitions.of(block);
        loop {
            let told = partition.changed.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            let found = partition.lock().claim(block);
            match found {
                Found::There => {
                    if counted {
                        count(&self.counters.hits, 1);
                    }
                    return Ok(());
                }
                Found::Busy => told.await,
                Found::Full => self.make_room(partition, told).await?,
                Found::Claimed(claim) => {
                    if counted {
                        count(&self.counters.misses, 1);
                    }
                    count(&self.counters.evictions, u64::from(claim.evicted));
                    let shared = self.ranges.try_share(block..block + 1, Who::Internal);
                    let (Some(this), Some(shared)) = (self.this.upgrade(), shared) else {
                        // It is being zeroed.
                        drop(partition.guard(block, claim));
                        drop(self.ranges.share(block..block + 1, Who::Internal).await);
                        continue;
                    };
                    // A task of its own, not cancelled with the request: the kernel would keep the
                    // memory, and who waits for room would not be told when it comes back.
                    let loaded = tokio::task::spawn_local(async move {
                        let _shared = shared;
                        this.load(block, claim).await
                    });
                    return loaded.await.map_err(io::Error::other)?;
                }
            }
        }
    }

    /// Fills a slot that was claimed for a block.
    async fn load(&self, block: u64, claim: partition::Claim) -> io::Result<()> {
        let mut claim = self.partitions.of(block).guard(block, claim);
        let len = self.len_of(block);
        let (mut segment, spare) = claim.take(len);
        if len > 0 {
            segment = self.below.read(block * self.block_len(), segment).await?;
        }
        claim.fill(segment, spare);
        Ok(())
    }

    /// All slots of a partition are dirty or in use: waits until one is not. `changed` has been listening since before
    /// that was found.
    async fn make_room(&self, partition: &Partition, changed: Pin<&mut Notified<'_>>) -> io::Result<()> {
        let dirty = partition.lock().oldest_dirty();
        match dirty {
            Some(block) => self.write_out(block).await,
            None => {
                // Whatever makes a slot free or clean says so.
                changed.await;
                Ok(())
            }
        }
    }

    async fn write(&self, at: u64, segment: Segment, durable: bool) -> io::Result<()> {
        self.see_size(at + segment.len() as u64).await?;
        // Before anything is held: the writer that is waited for must get at everything.
        while self.config.write_back && self.dirty() > self.dirty_max {
            self.wait_for_writer().await?;
        }
        let blocks = self.blocks(at, segment.len() as u64);
        let shared = self.ranges.share(blocks.clone(), Who::Request).await;
        if self.config.write_back {
            self.write_in(at, &segment).await?;
            if durable {
                all(blocks.map(|block| self.write_out(block))).await?;
                drop(shared);
                return self.below.flush().await;
            }
            return Ok(());
        }
        self.write_through(at, segment, durable).await
    }

    /// Into the cache.
    async fn write_in(&self, at: u64, segment: &Segment) -> io::Result<()> {
        let mut offset = 0;
        for part in self.parts(at, segment.len()) {
            let data = &segment.as_slice()[offset..offset + part.len];
            offset += part.len;
            let partition = self.partitions.of(part.block);
            let whole = part.within == 0 && part.len == self.len_of(part.block);
            let mut was_there = false;
            loop {
                let told = partition.changed.notified();
                tokio::pin!(told);
                told.as_mut().enable();
                let changed = partition.lock().change(part.block, part.within, data, whole);
                match changed {
                    Found::There => break,
                    Found::Busy => told.await,
                    Found::Full => {
                        if let Err(error) = self.make_room(partition, told).await
                            && self.write_past(part, data).await.map_err(|_| error)?
                        {
                            break;
                        }
                    }
                    // Only a part is written: the rest must be there first.
                    Found::Claimed(claim) => {
                        drop(partition.guard(part.block, claim));
                        let loaded = if was_there { Ok(()) } else { self.present(part.block, false).await };
                        // Or it could make way for others for ever.
                        if (was_there || loaded.is_err())
                            && self.write_past(part, data).await.map_err(|e| loaded.err().unwrap_or(e))?
                        {
                            break;
                        }
                        was_there = true;
                    }
                }
            }
            self.copied(partition, part.len);
        }
        self.start_writer();
        if self.dirty() > self.dirty_max / 2 {
            self.pressed.notify_one();
        }
        Ok(())
    }

    /// Through to the disk: the blocks are exclusively ours until they are written.
    async fn write_through(&self, at: u64, segment: Segment, durable: bool) -> io::Result<()> {
        let mut held = Vec::new();
        for part in self.parts(at, segment.len()) {
            held.push(self.partitions.hold(part.block).await);
        }
        // No other request sees what is held.
        let mut data = segment.as_slice();
        for (part, hold) in self.parts(at, segment.len()).zip(&mut held) {
            let (here, later) = data.split_at(part.len);
            hold.update(|there| there[part.within..][..part.len].copy_from_slice(here));
            data = later;
        }
        // If it fails, what is on the disk is not known, and what is held is forgotten.
        self.below.write(at, segment, durable).await?;
        held.into_iter().for_each(partition::Hold::written);
        Ok(())
    }

    /// Writes a block out, if it is dirty, and waits for it if it is being written already.
    ///
    /// A task of its own does it, which is not cancelled with the request: a write that is given up half way
    /// could reach the disk after a later one.
    async fn write_out(&self, block: u64) -> io::Result<()> {
        let shared = self.ranges.share(block..block + 1, Who::Internal).await;
        self.write_out_under(block, shared).await
    }

    /// As [`Inner::write_out`], with what keeps others from having the block alone.
    async fn write_out_under(&self, block: u64, lock: impl Sized + 'static) -> io::Result<()> {
        let Some(this) = self.this.upgrade() else { return Ok(()) };
        let written = tokio::task::spawn_local(async move {
            let _lock = lock;
            this.write_out_now(block).await
        });
        written.await.map_err(io::Error::other)?
    }

    async fn write_out_now(&self, block: u64) -> io::Result<()> {
        let partition = self.partitions.of(block);
        loop {
            let mut copy = self.copies.reserve(1).await.segment(self.config.block as usize);
            let told = partition.changed.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            let begun = partition.lock().begin_write_out(block, copy.as_mut_slice());
            match begun {
                None => return Ok(()),
                Some(None) => {
                    drop(copy);
                    told.await;
                }
                Some(Some(bitmap)) => {
                    drop(copy.split_off(self.len_of(block)));
                    let end = partition::WriteOut::new(partition, block, bitmap);
                    let start = block * self.block_len();
                    let parts = bitmap.cut(copy).into_iter();
                    all(parts.map(|(within, part)| self.below.write(start + within, part, false))).await?;
                    end.done();
                    count(&self.counters.written_out, 1);
                    self.cleaned.notify_waiters();
                    return Ok(());
                }
            }
        }
    }

    /// Bytes that are dirty.
    fn dirty(&self) -> u64 {
        self.partitions.dirty() * self.block_len()
    }

    /// Too much is dirty: waits until some of it has been written out, and fails if it cannot be.
    async fn wait_for_writer(&self) -> io::Result<()> {
        let told = self.cleaned.notified();
        tokio::pin!(told);
        told.as_mut().enable();
        if self.dirty() <= self.dirty_max {
            return Ok(());
        }
        self.start_writer();
        if tokio::time::timeout(WRITER_LATE, told).await.is_ok() {
            return Ok(());
        }
        // The writer gets nowhere. Whether the disk is only slow or takes nothing any more, a block tells.
        match self.partitions.dirty_since(Duration::ZERO, 1).first() {
            Some(block) => self.write_out(*block).await,
            None => Ok(()),
        }
    }

    /// Starts the task that writes out what has been dirty for long, or is too much.
    fn start_writer(&self) {
        if self.writer_runs.swap(true, Ordering::SeqCst) {
            return;
        }
        let Some(this) = self.this.upgrade() else { return };
        tokio::task::spawn_local(async move {
            loop {
                let end = WriterEnd(Arc::clone(&this));
                this.write_behind().await;
                drop(end);
                // Somebody may have made something dirty, and found the writer running, after it had looked for the
                // last time.
                if this.dirty() == 0 || this.writer_runs.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        });
    }

    async fn write_behind(&self) {
        loop {
            let dirty = self.dirty();
            if dirty == 0 {
                return;
            }
            let much = dirty > self.dirty_max / 2;
            let age = if much { Duration::ZERO } else { WRITEBACK_AGE };
            let blocks = self.partitions.dirty_since(age, 4 * WRITE_OUT);
            if blocks.is_empty() {
                tokio::select! {
                    () = tokio::time::sleep(WRITEBACK_AGE / 5) => {}
                    () = self.pressed.notified() => {}
                }
                continue;
            }
            let written = all(blocks.into_iter().map(|block| self.write_out(block))).await;
            if let Err(error) = written {
                // The blocks stay dirty: nothing is lost, and the next flush says that it fails.
                tracing::warn!(%error, "cache write-back failed");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }

    async fn flush(&self) -> io::Result<()> {
        self.write_out_all(&self.partitions.dirty_since(Duration::ZERO, usize::MAX)).await?;
        self.below.flush().await
    }

    async fn write_out_all(&self, blocks: &[u64]) -> io::Result<()> {
        // A bounded number at a time: copies are taken for all that are started.
        for some in blocks.chunks(WRITE_OUT) {
            all(some.iter().map(|block| self.write_out(*block))).await?;
        }
        Ok(())
    }

    /// Has a range zeroed below, or discarded, and then here.
    async fn zero<'a>(&'a self, at: u64, len: u64, below: impl FnOnce() -> Op<'a, ()>) -> io::Result<()> {
        // Nothing of it is used, loaded or written out meanwhile.
        let blocks = self.blocks(at, len);
        let _alone: Alone = self.ranges.alone(blocks.clone()).await;
        let within = |block: u64| {
            let start = block * self.block_len();
            let (from, to) = (at.max(start), (at + len).min(start + self.block_len()));
            (from - start) as usize..(to - start) as usize
        };
        if let Err(error) = below().await {
            // How much of it was done is not known. What is dirty is the last word.
            self.partitions.doubt(blocks, within);
            return Err(error);
        }
        // What is there in part stays, what is there whole goes.
        self.partitions.each_in(blocks, |block, data| {
            let within = within(block);
            data[within.clone()].fill(0);
            within.len() < data.len()
        });
        self.cleaned.notify_waiters();
        Ok(())
    }

    /// Loads what a sequential reader will ask for next.
    fn look_ahead(&self, at: u64, len: u64) {
        let Some(fetch) = self.readahead.read(at, len, self.size.load(Ordering::Relaxed)) else { return };
        let blocks = self.blocks(fetch.start, fetch.end - fetch.start);
        let absent: Vec<u64> = blocks.filter(|block| !self.partitions.of(*block).lock().knows(*block)).collect();
        if absent.is_empty() {
            return;
        }
        let Some(this) = self.this.upgrade() else { return };
        tokio::task::spawn_local(async move {
            count(&this.counters.read_ahead, absent.len() as u64);
            let _ = try_join_all(absent.into_iter().map(|block| this.present(block, false))).await;
        });
    }
}

/// Keeps a block's memory what it is while it is being sent.
struct Lending {
    inner: Arc<Inner>,
    block: u64,
    slot: u32,
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.inner.partitions.of(self.block).give_back(self.slot);
    }
}

struct WriterEnd(Arc<Inner>);

impl Drop for WriterEnd {
    fn drop(&mut self) {
        self.0.writer_runs.store(false, Ordering::SeqCst);
    }
}

/// Does something on another reactor and waits for it.
async fn forward<T, F>(to: thruway_engine::reactor::Handle, make: impl FnOnce() -> F + Send + 'static) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + 'static,
{
    let (tell, told) = oneshot::channel();
    to.spawn(move || {
        let work = make();
        async move { drop(tell.send(work.await)) }
    });
    told.await.map_err(|_| io::Error::other("the reactor has stopped"))?
}

impl Backend for Cache {
    fn geometry(&self) -> Geometry {
        self.inner.below.geometry()
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            if let Some(to) = self.inner.elsewhere(at, segment.len()) {
                count(&self.inner.counters.forwarded, 1);
                let inner = Arc::clone(&self.inner);
                return forward(to, move || async move { inner.read(at, segment).await }).await;
            }
            self.inner.read(at, segment).await
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        Box::pin(async move {
            if let Some(to) = self.inner.elsewhere(at, segment.len()) {
                count(&self.inner.counters.forwarded, 1);
                let inner = Arc::clone(&self.inner);
                return forward(to, move || async move { inner.write(at, segment, durable).await }).await;
            }
            self.inner.write(at, segment, durable).await
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        Box::pin(self.inner.flush())
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        Box::pin(self.inner.zero(at, len, move || self.inner.below.zero(at, len, how)))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        // What is left of a block that is only discarded in part would have to be kept, or read again: it is kept.
        let block = self.inner.block_len();
        let (from, to) = (at.next_multiple_of(block), (at + len) / block * block);
        if from >= to {
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(self.inner.zero(from, to - from, move || self.inner.below.discard(from, to - from)))
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>> {
        Box::pin(async move {
            // What is dirty may be where the disk still has a hole.
            let inner = &self.inner;
            inner.write_out_all(&inner.partitions.dirty_in(inner.blocks(at, len))).await?;
            inner.below.extents(at, len, most).await
        })
    }

    fn hint_sequential(&self, at: u64, len: u64) {
        self.inner.look_ahead(at, len);
    }

    fn lend(&self, at: u64, len: usize) -> Option<Lent> {
        self.inner.lend(at, len)
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        Box::pin(async move {
            let inner = &self.inner;
            inner.see_size(at + len).await?;
            let len = len.min(inner.config.size / 4) as usize;
            let _shared = inner.ranges.share(inner.blocks(at, len as u64), Who::Request).await;
            try_join_all(inner.parts(at, len).map(|part| inner.present(part.block, false))).await.map(drop)
        })
    }

    fn register(&self, registry: &Registry, export: &str) -> Result<Vec<Registered>, RegisterError> {
        let mut all = self.inner.below.register(registry, export)?;
        // Of the caches of a disk, the lowest is number 0.
        let number = (all.len() / METRICS.len()).to_string();
        for (description, read) in METRICS {
            let this = Arc::downgrade(&self.inner);
            let value = move || this.upgrade().map_or(0, |inner| read(&inner.counters).load(Ordering::Relaxed));
            all.push(registry.counter_of(*description, &[("export", export), ("cache", &number)], value)?);
        }
        Ok(all)
    }

    fn summary(&self) -> Option<String> {
        Some(format!("cache: {}", self.inner.counters))
    }
}
