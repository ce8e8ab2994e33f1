//! Per-connection buffer pools with two size classes, so that no connection waits for the blocks of another.

use std::cell::OnceCell;
use std::io;
use thruway_engine::Segment;
use thruway_engine::segment::{Reservation, Segments};

/// Bytes of a small block.
pub const SMALL: usize = 16 << 10;
const SMALL_COUNT: usize = 128;
/// Bytes of all large blocks.
const LARGE_TOTAL: usize = 8 << 20;

/// The blocks for one direction of a connection. A size class is allocated when it is first used, and its pages when they
/// are first written.
pub struct Buffers {
    chunk: usize,
    small: OnceCell<Segments>,
    large: OnceCell<Segments>,
}

impl Buffers {
    /// Small blocks, and large blocks of `chunk` bytes.
    pub fn new(chunk: usize) -> Buffers {
        Buffers { chunk, small: OnceCell::new(), large: OnceCell::new() }
    }

    /// The size class for blocks of `len` bytes.
    fn class(&self, len: usize) -> io::Result<&Segments> {
        let (cell, count, size) = if len <= SMALL {
            (&self.small, SMALL_COUNT, SMALL)
        } else {
            (&self.large, (LARGE_TOTAL / self.chunk).max(8), self.chunk)
        };
        if let Some(segments) = cell.get() {
            return Ok(segments);
        }
        let made = Segments::new(count, size).map_err(io::Error::other)?;
        Ok(cell.get_or_init(|| made))
    }

    /// Waits for a segment of `len` bytes, at most a chunk.
    ///
    /// # Errors
    /// If memory cannot be allocated; so do the others.
    pub async fn segment(&self, len: usize) -> io::Result<Segment> {
        Ok(self.class(len)?.reserve(1).await.segment(len))
    }

    /// Waits for segments of these lengths at once. More than half of a pool are allocated for the occasion, because others
    /// would have none left.
    pub async fn segments(&self, lens: &[usize]) -> io::Result<Vec<Segment>> {
        let longest = lens.iter().copied().max().unwrap_or(0);
        let class = self.class(longest)?;
        let mut reservation = if lens.len() <= class.pool().count() / 2 {
            class.reserve(lens.len()).await
        } else {
            let own = Segments::new(lens.len(), class.pool().payload_len()).map_err(io::Error::other)?;
            own.reserve(lens.len()).await
        };
        Ok(lens.iter().map(|len| reservation.segment(*len)).collect())
    }

    /// Waits for `count` large blocks at once, which may be more than the pool has.
    pub async fn reserve(&self, count: usize) -> io::Result<Reservation> {
        let class = self.class(SMALL + 1)?;
        if count <= class.pool().count() / 2 {
            return Ok(class.reserve(count).await);
        }
        let own = Segments::new(count, self.chunk).map_err(io::Error::other)?;
        Ok(own.reserve(count).await)
    }
}
