//! The pool of blocks: fixed-size, page-aligned, registered once, never more than were made.
//!
//! A block is one of three things at a time, and the types say which: *free* (inside the pool),
//! a [`Block`] (somebody's alone, with plain slices of its memory), or an [`Exposed`] block (a
//! device or a peer may read or write it, so there are no slices). Dropping either kind returns
//! it to the pool.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use thruway_memory::{Buffer, MapError};

/// Bytes in front of every payload, for headers; a page, so that payloads stay page-aligned.
pub const HEADROOM: usize = 4096;

/// A pool of blocks in one contiguous buffer.
pub struct BlockPool {
    buffer: Arc<Buffer>,
    payload_len: usize,
    count: usize,
    state: Mutex<State>,
    returned: Condvar,
}

struct State {
    free: Vec<u32>,
    /// Threads that wait for a block: without any, a notification would be a wasted system call.
    waiting: usize,
    /// Told, first come first served, that fewer blocks than so many are in use.
    wakers: VecDeque<(usize, Box<dyn FnOnce() + Send>)>,
}

impl BlockPool {
    /// `count` blocks with `payload_len` bytes of payload each, a multiple of the page size.
    ///
    /// # Errors
    /// If the memory cannot be mapped.
    ///
    /// # Panics
    /// If `count` is zero or `payload_len` is not a positive multiple of 4096.
    pub fn new(count: usize, payload_len: usize) -> Result<Arc<BlockPool>, MapError> {
        BlockPool::with_memory(count, payload_len, Buffer::new)
    }

    /// As [`BlockPool::new`]; what is never touched of a block takes no memory either.
    ///
    /// # Errors
    /// As [`BlockPool::new`].
    ///
    /// # Panics
    /// As [`BlockPool::new`].
    pub fn sparse(count: usize, payload_len: usize) -> Result<Arc<BlockPool>, MapError> {
        BlockPool::with_memory(count, payload_len, Buffer::sparse)
    }

    /// Blocks in memory that is there already.
    ///
    /// # Panics
    /// As [`BlockPool::new`], or if the memory is too short.
    pub fn over(buffer: Buffer, count: usize, payload_len: usize) -> Arc<BlockPool> {
        assert!(buffer.len() >= count * (HEADROOM + payload_len), "the blocks lie inside of the memory");
        BlockPool::with_memory(count, payload_len, |_| Ok(buffer)).expect("nothing is mapped")
    }

    fn with_memory(
        count: usize,
        payload_len: usize,
        buffer: impl FnOnce(usize) -> Result<Buffer, MapError>,
    ) -> Result<Arc<BlockPool>, MapError> {
        assert!(count > 0 && payload_len > 0 && payload_len.is_multiple_of(4096));
        let buffer = Arc::new(buffer(count * (HEADROOM + payload_len))?);
        // Low numbers come out first, so that a pool larger than its use touches little memory.
        let free = (0..count as u32).rev().collect();
        Ok(Arc::new(BlockPool {
            buffer,
            payload_len,
            count,
            state: Mutex::new(State { free, waiting: 0, wakers: VecDeque::new() }),
            returned: Condvar::new(),
        }))
    }

    /// Asks for the blocks' memory, as far as it is not touched yet, to come from this node.
    pub fn bind(&self, node: u32) {
        crate::topology::bind_memory(&self.buffer, node);
    }

    /// The memory of all blocks, for registration with devices.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Bytes of one block's payload.
    pub fn payload_len(&self) -> usize {
        self.payload_len
    }

    /// How many blocks there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many are not free now.
    pub fn in_use(&self) -> usize {
        self.count - self.lock().free.len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panics under the lock")
    }

    /// A free block, if there is one.
    pub fn try_take(self: &Arc<Self>) -> Option<Block> {
        let index = self.lock().free.pop()?;
        Some(Block { pool: Arc::clone(self), index })
    }

    /// Waits for a free block; `None` after `limit`.
    pub fn take(self: &Arc<Self>, limit: Duration) -> Option<Block> {
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(index) = state.free.pop() {
                return Some(Block { pool: Arc::clone(self), index });
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state.waiting += 1;
            state = self.returned.wait_timeout(state, left).expect("no panics under the lock").0;
            state.waiting -= 1;
        }
    }

    /// Calls `wake` once, as soon as fewer than `limit` blocks are in use; at once if so.
    pub fn when_fewer(&self, limit: usize, wake: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        if self.count - state.free.len() >= limit {
            state.wakers.push_back((limit, Box::new(wake)));
        } else {
            drop(state);
            wake();
        }
    }

    fn give_back(&self, index: u32) {
        let mut state = self.lock();
        debug_assert!(!state.free.contains(&index), "a block was returned twice");
        state.free.push(index);
        let in_use = self.count - state.free.len();
        let waker = state.wakers.pop_front_if(|(limit, _)| in_use < *limit);
        let waited_for = state.waiting > 0;
        drop(state);
        if waited_for {
            self.returned.notify_one();
        }
        if let Some((_, wake)) = waker {
            wake();
        }
    }

    fn offset(&self, index: u32) -> usize {
        index as usize * (HEADROOM + self.payload_len)
    }
}

/// A block that is its holder's alone.
pub struct Block {
    pool: Arc<BlockPool>,
    index: u32,
}

impl Block {
    /// Number of the block in its pool.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The pool it came from.
    pub fn pool(&self) -> &Arc<BlockPool> {
        &self.pool
    }

    /// Offset of the payload in the pool's buffer.
    pub fn payload_offset(&self) -> usize {
        self.pool.offset(self.index) + HEADROOM
    }

    /// The payload.
    pub fn payload(&self) -> &[u8] {
        // SAFETY: the block's part of the pool's buffer; blocks do not overlap, there is one
        // `Block` for an index, and no device uses it until it becomes `Exposed`.
        unsafe { std::slice::from_raw_parts(self.ptr().add(HEADROOM), self.pool.payload_len) }
    }

    /// The payload, to change.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `payload`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr().add(HEADROOM), self.pool.payload_len) }
    }

    /// The last `n` bytes in front of the payload and the payload itself, as one slice.
    ///
    /// # Panics
    /// If `n` exceeds [`HEADROOM`].
    pub fn with_header_mut(&mut self, n: usize) -> (&mut [u8], &mut [u8]) {
        assert!(n <= HEADROOM);
        // SAFETY: as in `payload_mut`; the headroom belongs to the same block.
        let whole = unsafe { std::slice::from_raw_parts_mut(self.ptr().add(HEADROOM - n), n + self.pool.payload_len) };
        whole.split_at_mut(n)
    }

    /// The last `n` bytes in front of the payload.
    ///
    /// # Panics
    /// If `n` exceeds [`HEADROOM`].
    pub fn header(&self, n: usize) -> &[u8] {
        assert!(n <= HEADROOM);
        // SAFETY: as in `payload`.
        unsafe { std::slice::from_raw_parts(self.ptr().add(HEADROOM - n), n) }
    }

    /// The last `n` bytes in front of the payload and the first `len` bytes of it, as one slice.
    ///
    /// # Panics
    /// If `n` exceeds [`HEADROOM`] or `len` the payload.
    pub fn joined_mut(&mut self, n: usize, len: usize) -> &mut [u8] {
        assert!(n <= HEADROOM && len <= self.pool.payload_len);
        // SAFETY: as in `payload_mut`; the headroom belongs to the same block.
        unsafe { std::slice::from_raw_parts_mut(self.ptr().add(HEADROOM - n), n + len) }
    }

    /// As [`Block::joined_mut`], to look at.
    ///
    /// # Panics
    /// As [`Block::joined_mut`].
    pub fn joined(&self, n: usize, len: usize) -> &[u8] {
        assert!(n <= HEADROOM && len <= self.pool.payload_len);
        // SAFETY: as in `payload`; the headroom belongs to the same block.
        unsafe { std::slice::from_raw_parts(self.ptr().add(HEADROOM - n), n + len) }
    }

    /// Start of the payload, for devices.
    pub fn payload_ptr(&self) -> *mut u8 {
        // SAFETY: inside the block.
        unsafe { self.ptr().add(HEADROOM) }
    }

    fn ptr(&self) -> *mut u8 {
        // SAFETY: `index < count`, so the offset is inside the buffer.
        unsafe { self.pool.buffer.as_ptr().add(self.pool.offset(self.index)) }
    }

    /// Hands the block to a device or a peer.
    pub fn expose(self) -> Exposed {
        Exposed(self)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.give_back(self.index);
    }
}

/// A block that a device or a peer may be using.
pub struct Exposed(Block);

impl Exposed {
    /// Takes the block back. The device must be done with it: the completion has been polled, or
    /// the peer's key been revoked.
    pub fn reclaim(self) -> Block {
        self.0
    }

    /// Number of the block in its pool.
    pub fn index(&self) -> u32 {
        self.0.index
    }

    /// Offset of the payload in the pool's buffer.
    pub fn payload_offset(&self) -> usize {
        self.0.payload_offset()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_pool_never_hands_out_more_than_it_has_and_gets_everything_back() {
        let pool = BlockPool::new(3, 4096).unwrap();
        let blocks: Vec<_> = (0..3).map(|_| pool.try_take().unwrap()).collect();
        assert!(pool.try_take().is_none());
        assert!(pool.take(Duration::ZERO).is_none());
        let exposed: Vec<_> = blocks.into_iter().map(Block::expose).collect();
        assert_eq!(pool.in_use(), 3);
        drop(exposed);
        assert_eq!(pool.in_use(), 0);
    }

    #[test]
    fn waiting_for_a_block_ends_when_one_is_returned() {
        let pool = BlockPool::new(1, 4096).unwrap();
        let block = pool.try_take().unwrap();
        let told = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&told);
        pool.when_fewer(1, move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        std::thread::scope(|s| {
            let waiter = s.spawn(|| pool.take(Duration::from_secs(60)).is_some());
            drop(block);
            assert!(waiter.join().unwrap());
        });
        assert_eq!(told.load(Ordering::SeqCst), 1);
        pool.when_fewer(1, || ());
    }

    #[test]
    fn who_waits_for_few_in_use_is_told_of_no_more() {
        let pool = BlockPool::sparse(3, 4096).unwrap();
        let mut blocks: Vec<_> = (0..3).map(|_| pool.try_take().unwrap()).collect();
        let told = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&told);
        pool.when_fewer(2, move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        for (in_use, expected) in [(2, 0), (1, 1), (0, 1)] {
            blocks.pop();
            assert_eq!((pool.in_use(), told.load(Ordering::SeqCst)), (in_use, expected));
        }
    }

    #[test]
    fn blocks_do_not_overlap() {
        let pool = BlockPool::new(4, 4096).unwrap();
        let mut blocks: Vec<_> = (0..4).map(|_| pool.try_take().unwrap()).collect();
        for (i, block) in blocks.iter_mut().enumerate() {
            let (header, payload) = block.with_header_mut(64);
            header.fill(i as u8);
            payload.fill(i as u8);
        }
        for (i, block) in blocks.iter().enumerate() {
            assert!(block.payload().iter().chain(block.header(64)).all(|b| *b == i as u8));
        }
    }
}
