//! Segments: owned parts of buffers.
//!
//! A request of a service moves through a backend as a segment. A segment can be cut in two, whose
//! ranges do not overlap, and only neighbours that were one can be joined again; so each
//! is its holder's alone, and nothing else in the program refers to its bytes.
//!
//! Most are parts of blocks of a pool. [`Segment::of_buffer`] makes one of any other memory: a virtual machine's, a region that is
//! registered already.

use crate::pool::{Block, BlockPool};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use thruway_memory::{Buffer, MapError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A range of a buffer that is its holder's alone.
pub struct Segment {
    source: Arc<Source>,
    /// In the source's buffer.
    start: usize,
    len: usize,
}

enum Source {
    Block {
        block: Block,
        /// Given back after the block, so that a permit is always good for a block.
        _permit: Option<OwnedSemaphorePermit>,
    },
    Other {
        buffer: Arc<Buffer>,
        _owner: Box<dyn Any + Send + Sync>,
    },
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not its bytes: a device may be writing them.
        write!(f, "Segment({}..{})", self.start, self.start + self.len)
    }
}

impl Segment {
    /// The first `len` bytes of a block.
    ///
    /// # Panics
    /// If the block is shorter.
    pub fn new(block: Block, len: usize) -> Segment {
        Segment::with_permit(block, len, None)
    }

    fn with_permit(block: Block, len: usize, permit: Option<OwnedSemaphorePermit>) -> Segment {
        assert!(len <= block.pool().payload_len(), "a segment lies inside its block");
        let start = block.payload_offset();
        Segment { source: Arc::new(Source::Block { block, _permit: permit }), start, len }
    }

    /// A range of a buffer. `owner` is dropped with the last part of the segment.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    ///
    /// # Safety
    /// Nothing else in this process reads or changes these bytes until `owner` is dropped.
    pub unsafe fn of_buffer(buffer: Arc<Buffer>, range: Range<usize>, owner: impl Any + Send + Sync) -> Segment {
        assert!(range.start <= range.end && range.end <= buffer.len(), "a segment lies inside its buffer");
        let source = Source::Other { buffer, _owner: Box::new(owner) };
        Segment { source: Arc::new(source), start: range.start, len: range.len() }
    }

    /// The block that this was made of; `None` if another part of it is still in use, or it was made of something else.
    pub fn into_block(self) -> Option<Block> {
        match Arc::into_inner(self.source)? {
            Source::Block { block, .. } => Some(block),
            Source::Other { .. } => None,
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte, for devices. Valid while the segment lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.buffer().as_ptr().wrapping_add(self.start)
    }

    /// Offset of the first byte in [`Segment::buffer`].
    pub fn offset(&self) -> usize {
        self.start
    }

    /// The memory that this is a part of, for registration with devices.
    pub fn buffer(&self) -> &Arc<Buffer> {
        match &*self.source {
            Source::Block { block, .. } => block.pool().buffer(),
            Source::Other { buffer, .. } => buffer,
        }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is inside the buffer, which `source` keeps; ranges of segments do not
        // overlap, so it can only be changed through `&mut self`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// The bytes, to change.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }

    /// Cuts the segment: what is returned begins at byte `at` of this one, which keeps the rest.
    ///
    /// # Panics
    /// If `at` is outside.
    pub fn split_off(&mut self, at: usize) -> Segment {
        assert!(at <= self.len, "a segment is cut inside");
        let rest = Segment { source: Arc::clone(&self.source), start: self.start + at, len: self.len - at };
        self.len = at;
        rest
    }

    /// Joins a segment that was cut off the end of this one.
    ///
    /// # Panics
    /// If it was not.
    pub fn join(&mut self, next: Segment) {
        assert!(
            Arc::ptr_eq(&self.source, &next.source) && self.start + self.len == next.start,
            "only neighbours can be joined"
        );
        self.len += next.len;
    }
}

/// A supply of segments: a pool whose blocks are waited for in turn. Clones are the same supply.
#[derive(Clone)]
pub struct Segments {
    pool: Arc<BlockPool>,
    free: Arc<Semaphore>,
}

/// The right to so many blocks of a supply.
pub struct Reservation {
    pool: Arc<BlockPool>,
    permits: OwnedSemaphorePermit,
}

impl Segments {
    /// A supply of `count` blocks of `len` bytes.
    ///
    /// # Errors
    /// If the memory cannot be mapped.
    pub fn new(count: usize, len: usize) -> Result<Segments, MapError> {
        Ok(Segments { pool: BlockPool::new(count, len)?, free: Arc::new(Semaphore::new(count)) })
    }

    /// The pool underneath.
    pub fn pool(&self) -> &Arc<BlockPool> {
        &self.pool
    }

    /// Waits until `count` blocks are this caller's to take. Who waits first is served first.
    ///
    /// # Panics
    /// If there never are so many.
    pub async fn reserve(&self, count: usize) -> Reservation {
        assert!(count <= self.pool.count(), "more blocks are reserved than there are");
        let permits =
            Arc::clone(&self.free).acquire_many_owned(count as u32).await.expect("the semaphore is never closed");
        Reservation { pool: Arc::clone(&self.pool), permits }
    }

    /// As [`Segments::reserve`], if it need not wait.
    pub fn try_reserve(&self, count: usize) -> Option<Reservation> {
        let permits = Arc::clone(&self.free).try_acquire_many_owned(count as u32).ok()?;
        Some(Reservation { pool: Arc::clone(&self.pool), permits })
    }
}

impl Reservation {
    /// Blocks still to be taken.
    pub fn left(&self) -> usize {
        self.permits.num_permits()
    }

    /// Takes a block and makes it a segment of `len` bytes.
    ///
    /// # Panics
    /// If all have been taken, or blocks are shorter.
    pub fn segment(&mut self, len: usize) -> Segment {
        let permit = self.permits.split(1).expect("no more segments than were reserved");
        let block = self.pool.try_take().expect("a permit is good for a block");
        Segment::with_permit(block, len, Some(permit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_go_back_together() {
        let supply = Segments::new(1, 4096).unwrap();
        let mut reservation = supply.try_reserve(1).unwrap();
        let mut a = reservation.segment(100);
        let mut b = a.split_off(40);
        a.as_mut_slice().fill(1);
        b.as_mut_slice().fill(2);
        assert_eq!((a.len(), b.len()), (40, 60));
        assert!(supply.try_reserve(1).is_none());
        a.join(b);
        assert_eq!(a.as_slice()[39..41], [1, 2]);
        drop(a);
        assert!(supply.try_reserve(1).is_some());
    }

    #[test]
    fn a_block_comes_back_when_all_of_it_does() {
        let pool = BlockPool::new(1, 4096).unwrap();
        let mut a = Segment::new(pool.try_take().unwrap(), 100);
        let b = a.split_off(50);
        assert!(a.into_block().is_none(), "a part is still in use");
        assert!(b.into_block().is_some());
    }

    #[test]
    fn other_memory_is_given_back_when_its_last_part_is() {
        let buffer = Arc::new(Buffer::new(4096).unwrap());
        let owner = Arc::new(());
        // SAFETY: nothing else uses the buffer.
        let mut a = unsafe { Segment::of_buffer(Arc::clone(&buffer), 100..300, Arc::clone(&owner)) };
        let b = a.split_off(50);
        assert_eq!((a.offset(), b.offset(), b.len()), (100, 150, 150));
        assert!(Arc::ptr_eq(b.buffer(), &buffer));
        drop(a);
        assert_eq!(Arc::strong_count(&owner), 2);
        assert!(b.into_block().is_none());
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    #[should_panic(expected = "neighbours")]
    fn strangers_are_not_joined() {
        let supply = Segments::new(2, 4096).unwrap();
        let mut reservation = supply.try_reserve(2).unwrap();
        let mut a = reservation.segment(10);
        let b = reservation.segment(10);
        a.join(b);
    }
}
