//! Partitions: each a table of blocks, with their memory, under a lock of its own.

use super::Config;
use super::dirty_bitmap::DirtyBitmap;
use super::order::Order;
use super::persist::{Layout, Records};
use super::policy::Policy;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_engine::Segment;
use thruway_engine::pool::BlockPool;
use tokio::sync::Notify;

/// All partitions of a cache.
pub(super) struct Partitions {
    nodes: Vec<u32>,
    partitions: Vec<Partition>,
    per_node: usize,
    neighbours: u64,
    dirty: Arc<AtomicU64>,
    /// Where the next search for dirty blocks begins, so that none is always the last.
    next: AtomicUsize,
}

/// A partition.
pub(super) struct Partition {
    /// Where its memory is.
    pub node: u32,
    table: Mutex<Table>,
    /// Told when a block is not busy any more.
    pub changed: Notify,
}

/// What is behind the lock.
pub(super) struct Table {
    blocks: HashMap<u64, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    policy: Policy,
    /// The dirty slots, in the order in which they became dirty.
    dirty_order: Order,
    /// Dirty blocks of all partitions.
    dirty: Arc<AtomicU64>,
    pool: Arc<BlockPool>,
    /// Where what is dirty is written down, for the next daemon.
    records: Option<Records>,
    /// Slots that are lent, and how many may be.
    lent: usize,
    lent_max: usize,
}

struct Slot {
    block: u64,
    /// The memory; `None` while a loader has it.
    segment: Option<Segment>,
    state: State,
    /// Since when it has been dirty.
    dirty: Option<Instant>,
    /// What of it is dirty and is not being written out.
    bitmap: DirtyBitmap,
    writing: bool,
    /// So many are sending it from here.
    lent: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// Somebody's alone: being loaded, or written through.
    Busy,
    There,
}

/// What a look into the table found.
pub(super) enum Found {
    There,
    /// Another task is loading or holding it.
    Busy,
    /// It is not there, and there is no room.
    Full,
    /// It was not there; the slot is the caller's to fill.
    Claimed(Claim),
}

/// A slot that is to be filled.
pub(super) struct Claim {
    slot: u32,
    pub evicted: bool,
}

impl Partitions {
    pub(super) fn new(nodes: &[u32], config: &Config, slots: usize, layout: Option<&Layout>) -> io::Result<Partitions> {
        let dirty = Arc::new(AtomicU64::new(0));
        let mut partitions = Vec::new();
        for node in nodes {
            for _ in 0..config.partitions {
                let (pool, records) = match layout {
                    Some(layout) => {
                        let (pool, records) = layout.partition(partitions.len(), *node)?;
                        (pool, Some(records))
                    }
                    None => (BlockPool::new(slots, config.block as usize).map_err(io::Error::other)?, None),
                };
                partitions.push(Partition::new(*node, pool, records, Arc::clone(&dirty)));
            }
        }
        let (per_node, neighbours) = (config.partitions, config.neighbours);
        Ok(Partitions { nodes: nodes.to_vec(), partitions, per_node, neighbours, dirty, next: AtomicUsize::new(0) })
    }

    pub(super) fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    fn index(&self, block: u64) -> usize {
        // Groups of neighbours go round the nodes first, so that large ranges are spread evenly.
        let group = block / self.neighbours;
        let nodes = self.nodes.len() as u64;
        // Mixed, because what is used together often lies at a stride: block groups of a file system, aligned images.
        let mixed = (group / nodes).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let (node, within) = (group % nodes, mixed % self.per_node as u64);
        node as usize * self.per_node + within as usize
    }

    /// Which of the nodes holds a block.
    pub(super) fn node_index(&self, block: u64) -> usize {
        self.index(block) / self.per_node
    }

    pub(super) fn of(&self, block: u64) -> &Partition {
        &self.partitions[self.index(block)]
    }

    /// Dirty blocks.
    pub(super) fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }

    /// Blocks that have been dirty for so long, at most so many, in their order on the disk.
    pub(super) fn dirty_since(&self, age: Duration, max: usize) -> Vec<u64> {
        let now = Instant::now();
        let mut found = Vec::new();
        let count = self.partitions.len();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        for index in 0..count {
            let table = self.partitions[(first + index) % count].lock();
            let slots = table.dirty_order.iter().map(|slot| &table.slots[slot as usize]);
            let old = slots.take_while(|slot| slot.dirty.is_some_and(|since| now.duration_since(since) >= age));
            found.extend(old.take(max - found.len()).map(|slot| slot.block));
            if found.len() >= max {
                break;
            }
        }
        found.sort_unstable();
        found
    }

    /// Dirty blocks of a range.
    pub(super) fn dirty_in(&self, range: Range<u64>) -> Vec<u64> {
        if self.dirty() == 0 {
            return Vec::new();
        }
        if range.end - range.start > self.dirty() {
            let mut all = self.dirty_since(Duration::ZERO, usize::MAX);
            all.retain(|block| range.contains(block));
            return all;
        }
        range.filter(|block| self.of(*block).lock().slot(*block).is_some_and(|slot| slot.dirty.is_some())).collect()
    }

    /// Goes through the blocks of a range that are there.
    fn for_each(&self, range: Range<u64>, mut act: impl FnMut(&mut Table, u32)) {
        for partition in &self.partitions {
            let mut table = partition.lock();
            let table = &mut *table;
            let there = |slot: &Slot| slot.state == State::There;
            // Whatever is less: the range, or what is there.
            let some: Vec<u32> = if range.end - range.start < table.blocks.len() as u64 {
                let known = range.clone().filter_map(|block| table.blocks.get(&block).copied());
                known.filter(|slot| *slot != HELD && there(&table.slots[*slot as usize])).collect()
            } else {
                let known = table.blocks.iter().filter(|(block, slot)| range.contains(*block) && **slot != HELD);
                known.map(|(_, slot)| *slot).filter(|slot| there(&table.slots[*slot as usize])).collect()
            };
            if some.is_empty() {
                continue;
            }
            some.into_iter().for_each(|index| act(table, index));
            partition.changed.notify_waiters();
        }
    }

    /// Shows every block of a range that is there to `keep`, which may change it; those it does not keep go.
    pub(super) fn each_in(&self, range: Range<u64>, mut keep: impl FnMut(u64, &mut [u8]) -> bool) {
        self.for_each(range, |table, index| {
            let slot = &mut table.slots[index as usize];
            let block = slot.block;
            let records = table.records.as_ref().filter(|_| slot.dirty.is_some());
            let kept = match (&mut slot.segment, records) {
                (None, _) => false,
                (Some(segment), None) => keep(block, segment.as_mut_slice()),
                (Some(segment), Some(records)) => {
                    let mut kept = false;
                    let offset = segment.offset();
                    records.change(segment.as_mut_slice(), offset, |bytes| kept = keep(block, bytes));
                    kept
                }
            };
            if !kept {
                table.release(index);
            }
        });
    }

    /// What the disk has in a range is not known: what is clean of it goes, or becomes dirty with the rest of its block.
    pub(super) fn doubt(&self, range: Range<u64>, within: impl Fn(u64) -> Range<usize>) {
        self.for_each(range, |table, index| {
            let slot = &mut table.slots[index as usize];
            if slot.dirty.is_none() {
                table.release(index);
                return;
            }
            let within = within(slot.block);
            slot.bitmap.add(within.start, within.len());
            if let Some(records) = &table.records {
                records.add(index, slot.bitmap);
            }
        });
    }

    /// Drops the clean blocks of a range.
    pub(super) fn forget_clean(&self, range: Range<u64>) {
        self.for_each(range, |table, index| {
            let slot = &table.slots[index as usize];
            if slot.dirty.is_none() && !slot.writing {
                table.release(index);
            }
        });
    }

    /// Waits until a block is free and takes it, whether it is cached or not.
    pub(super) async fn hold(&self, block: u64) -> Hold<'_> {
        let partition = self.of(block);
        loop {
            let told = partition.changed.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if let Some(hold) = partition.try_hold(block) {
                return hold;
            }
            told.await;
        }
    }
}

impl Partition {
    fn new(node: u32, pool: Arc<BlockPool>, records: Option<Records>, dirty: Arc<AtomicU64>) -> Partition {
        pool.bind(node);
        let block = pool.payload_len();
        let slots: Vec<Slot> = std::iter::from_fn(|| pool.try_take())
            .map(|memory| Slot {
                block: 0,
                segment: Some(Segment::new(memory, block)),
                state: State::Free,
                dirty: None,
                bitmap: DirtyBitmap::none(block),
                writing: false,
                lent: 0,
            })
            .collect();
        let table = Table {
            blocks: HashMap::with_capacity(slots.len()),
            free: (0..slots.len() as u32).rev().collect(),
            policy: Policy::new(slots.len()),
            dirty_order: Order::new(slots.len()),
            lent: 0,
            lent_max: slots.len() / 4,
            slots,
            dirty,
            pool,
            records,
        };
        Partition { node, table: Mutex::new(table), changed: Notify::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panics under the lock")
    }

    /// A slot that was lent is given back.
    pub(super) fn give_back(&self, index: u32) {
        let mut table = self.lock();
        let slot = &mut table.slots[index as usize];
        slot.lent -= 1;
        if slot.lent > 0 {
            return;
        }
        let free = slot.state == State::Free;
        table.lent -= 1;
        if free {
            table.free.push(index);
        }
        drop(table);
        self.changed.notify_waiters();
    }

    /// Frees the slot of a claim that comes to nothing.
    pub(super) fn guard(&self, block: u64, claim: Claim) -> Guard<'_> {
        Guard { partition: self, block, slot: claim.slot, done: false }
    }

    fn try_hold(&self, block: u64) -> Option<Hold<'_>> {
        let mut table = self.lock();
        match table.blocks.get(&block).copied() {
            Some(HELD) => None,
            Some(index) => {
                let slot = &mut table.slots[index as usize];
                if slot.state == State::Busy || slot.writing {
                    return None;
                }
                slot.state = State::Busy;
                Some(Hold { partition: self, block, slot: Some(index), written: false })
            }
            // A block that is not there is held by a number that stands for no slot.
            None => {
                table.blocks.insert(block, HELD);
                Some(Hold { partition: self, block, slot: None, written: false })
            }
        }
    }
}

/// Stands in the table for a block that is not there and must not be loaded now.
const HELD: u32 = u32::MAX;

impl Table {
    /// Uses a block's bytes, if they are there. (A block that is being written through counts as not.)
    pub(super) fn with(&mut self, block: u64, useit: impl FnOnce(&mut [u8])) -> Option<()> {
        let index = *self.blocks.get(&block).filter(|index| **index != HELD)?;
        let slot = &mut self.slots[index as usize];
        if slot.state != State::There {
            return None;
        }
        useit(slot.segment.as_mut()?.as_mut_slice());
        self.policy.touch(index);
        Some(())
    }

    fn slot(&self, block: u64) -> Option<&Slot> {
        self.blocks.get(&block).filter(|index| **index != HELD).map(|index| &self.slots[*index as usize])
    }

    pub(super) fn knows(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Finds a block, or a slot for it.
    pub(super) fn claim(&mut self, block: u64) -> Found {
        match self.blocks.get(&block) {
            Some(&HELD) => Found::Busy,
            Some(index) if self.slots[*index as usize].state == State::There => Found::There,
            Some(_) => Found::Busy,
            None => {
                let Some((slot, evicted)) = self.room() else { return Found::Full };
                let state = &mut self.slots[slot as usize];
                (state.block, state.state) = (block, State::Busy);
                self.blocks.insert(block, slot);
                self.policy.insert(slot, block);
                Found::Claimed(Claim { slot, evicted })
            }
        }
    }

    fn room(&mut self) -> Option<(u32, bool)> {
        if let Some(index) = self.free.pop() {
            // The memory of a load that failed goes back to the pool, at the latest when the kernel is done with it.
            let slot = &mut self.slots[index as usize];
            if slot.segment.is_none() {
                let len = self.pool.payload_len();
                slot.segment = self.pool.try_take().map(|memory| Segment::new(memory, len));
            }
            if slot.segment.is_some() {
                return Some((index, false));
            }
            self.free.insert(0, index);
        }
        if self.dirty_order.len() == self.slots.len() {
            return None;
        }
        let slots = &self.slots;
        let pinned = |slot: u32| {
            let slot = &slots[slot as usize];
            slot.state != State::There || slot.dirty.is_some() || slot.writing || slot.lent > 0
        };
        let slot = self.policy.evict(pinned)?;
        self.blocks.remove(&self.slots[slot as usize].block);
        Some((slot, true))
    }

    /// Puts bytes into a block and makes them dirty; if they are the `whole` block, it need not have been there.
    pub(super) fn change(&mut self, block: u64, within: usize, data: &[u8], whole: bool) -> Found {
        let found = self.claim(block);
        let slot = match (&found, self.blocks.get(&block)) {
            (Found::There, Some(index)) => *index,
            (Found::Claimed(claim), _) if whole => claim.slot,
            _ => return found,
        };
        let state = &mut self.slots[slot as usize];
        state.state = State::There;
        if state.dirty.is_none() {
            state.dirty = Some(Instant::now());
            self.dirty_order.push(slot);
            self.dirty.fetch_add(1, Ordering::Relaxed);
            if let (Some(records), Some(segment)) = (&self.records, &state.segment) {
                records.name(slot, block, segment.offset());
            }
        }
        let dirty_already = !state.bitmap.is_empty() || state.writing;
        state.bitmap.add(within, data.len());
        let segment = state.segment.as_mut().expect("a block that is there has memory");
        let offset = segment.offset() + within;
        let there = segment.as_mut_slice();
        match &self.records {
            Some(records) if dirty_already => {
                records.change(&mut there[within..][..data.len()], offset, |there| there.copy_from_slice(data));
            }
            _ => there[within..][..data.len()].copy_from_slice(data),
        }
        if matches!(found, Found::Claimed(_)) {
            // The disk may end in the block. Behind its end there is nothing, whatever the slot held before.
            there[within + data.len()..].fill(0);
        }
        if let Some(records) = &self.records {
            records.add(slot, state.bitmap);
        }
        self.policy.touch(slot);
        Found::There
    }

    /// The block that has been dirty longest of those that are not being written.
    pub(super) fn oldest_dirty(&self) -> Option<u64> {
        let mut slots = self.dirty_order.iter().map(|slot| &self.slots[slot as usize]);
        slots.find(|slot| !slot.writing).map(|slot| slot.block)
    }

    /// A slot is not dirty any more.
    fn clean(&mut self, index: u32) {
        if self.slots[index as usize].dirty.take().is_some() {
            self.dirty_order.remove(index);
            self.dirty.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Copies what is dirty of a block. `None` if nothing is, `Some(None)` if it is being written already.
    pub(super) fn begin_write_out(&mut self, block: u64, copy: &mut [u8]) -> Option<Option<DirtyBitmap>> {
        let index = *self.blocks.get(&block).filter(|index| **index != HELD)?;
        let slot = &mut self.slots[index as usize];
        if slot.writing {
            return Some(None);
        }
        slot.dirty?;
        let there = slot.segment.as_ref()?.as_slice();
        slot.bitmap.runs().for_each(|run| copy[run.clone()].copy_from_slice(&there[run]));
        slot.writing = true;
        Some(Some(slot.bitmap.take()))
    }

    /// Makes a slot free.
    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        self.blocks.remove(&slot.block);
        slot.state = State::Free;
        slot.bitmap.take();
        if let Some(records) = self.records.as_ref().filter(|_| slot.dirty.is_some()) {
            records.set(index, slot.bitmap);
        }
        self.clean(index);
        self.policy.remove(index);
        // What is being sent stays exclusively held until it has been.
        if self.slots[index as usize].lent == 0 {
            self.free.push(index);
        }
    }

    /// Lends a block that is there: its slot, whose memory stays what it is until it is given back, and the bytes.
    /// `None` as well if so much is lent that there might be no room for others' blocks.
    pub(super) fn lend(&mut self, block: u64) -> Option<(u32, *const u8)> {
        let index = *self.blocks.get(&block).filter(|index| **index != HELD)?;
        let slot = &mut self.slots[index as usize];
        if slot.state != State::There || (slot.lent == 0 && self.lent >= self.lent_max) {
            return None;
        }
        let ptr = slot.segment.as_ref()?.as_ptr();
        self.lent += usize::from(slot.lent == 0);
        slot.lent += 1;
        self.policy.touch(index);
        Some((index, ptr.cast_const()))
    }
}

/// A slot being filled. If it is not, it becomes free again.
pub(super) struct Guard<'a> {
    partition: &'a Partition,
    block: u64,
    slot: u32,
    done: bool,
}

impl Guard<'_> {
    /// The slot's memory, cut at `len` bytes, and what is behind the cut.
    pub(super) fn take(&mut self, len: usize) -> (Segment, Segment) {
        let taken = self.partition.lock().slots[self.slot as usize].segment.take();
        let mut segment = taken.expect("a claimed slot has memory");
        let mut spare = segment.split_off(len);
        spare.as_mut_slice().fill(0);
        (segment, spare)
    }

    /// The block is there.
    pub(super) fn fill(mut self, mut segment: Segment, spare: Segment) {
        segment.join(spare);
        let mut table = self.partition.lock();
        let slot = &mut table.slots[self.slot as usize];
        slot.segment = Some(segment);
        slot.state = State::There;
        drop(table);
        self.done = true;
        self.partition.changed.notify_waiters();
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut table = self.partition.lock();
        debug_assert_eq!(table.slots[self.slot as usize].block, self.block);
        table.release(self.slot);
        drop(table);
        self.partition.changed.notify_waiters();
    }
}

/// A block held while it is written through.
pub(super) struct Hold<'a> {
    partition: &'a Partition,
    block: u64,
    slot: Option<u32>,
    /// What is in the cache is what is on the disk.
    written: bool,
}

impl Hold<'_> {
    /// The block is in the cache.
    pub(super) fn is_there(&self) -> bool {
        self.slot.is_some()
    }

    /// Changes the block's bytes, if it is there.
    pub(super) fn update(&mut self, change: impl FnOnce(&mut [u8])) {
        let mut table = self.partition.lock();
        if let Some(index) = self.slot
            && let Some(segment) = &mut table.slots[index as usize].segment
        {
            change(segment.as_mut_slice());
        }
    }

    /// What it was changed to is on the disk.
    pub(super) fn written(mut self) {
        self.written = true;
    }

    /// The block is not there any more.
    fn forget(&mut self) {
        if let Some(index) = self.slot.take() {
            let mut table = self.partition.lock();
            table.release(index);
            table.blocks.insert(self.block, HELD);
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        // The write failed, or the task that wrote panicked or was cancelled.
        if !self.written {
            self.forget();
        }
        let mut table = self.partition.lock();
        match self.slot {
            Some(index) => table.slots[index as usize].state = State::There,
            None => drop(table.blocks.remove(&self.block)),
        }
        drop(table);
        self.partition.changed.notify_waiters();
    }
}

/// What of a block is being written out. If it comes to nothing, it stays dirty.
pub(super) struct WriteOut<'a> {
    partition: &'a Partition,
    block: u64,
    bitmap: DirtyBitmap,
    done: bool,
}

impl<'a> WriteOut<'a> {
    pub(super) fn new(partition: &'a Partition, block: u64, bitmap: DirtyBitmap) -> WriteOut<'a> {
        WriteOut { partition, block, bitmap, done: false }
    }

    /// It is on the disk.
    pub(super) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for WriteOut<'_> {
    fn drop(&mut self) {
        let mut table = self.partition.lock();
        if let Some(index) = table.blocks.get(&self.block).copied().filter(|index| *index != HELD) {
            let slot = &mut table.slots[index as usize];
            slot.writing = false;
            if !self.done {
                slot.bitmap.join(self.bitmap);
            }
            let (bitmap, records) = (slot.bitmap, table.records.as_ref());
            if let Some(records) = records {
                records.set(index, bitmap);
            }
            // What has been changed meanwhile is dirty again.
            if bitmap.is_empty() {
                table.clean(index);
            }
        }
        drop(table);
        self.partition.changed.notify_waiters();
    }
}
