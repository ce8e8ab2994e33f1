//! A connection's own blocks, in two sizes, so that no connection waits for another's.

use std::cell::OnceCell;
use thruway_engine::Segment;
use thruway_engine::segment::{Reservation, Segments};

/// Bytes of a small block.
pub const SMALL: usize = 16 << 10;
const SMALL_COUNT: usize = 128;
/// Bytes of large blocks together.
const LARGE_TOTAL: usize = 8 << 20;

/// Blocks for one direction of a connection. Memory that is not used is not touched.
pub struct Supply {
    chunk: usize,
    small: OnceCell<Segments>,
    large: OnceCell<Segments>,
}

impl Supply {
    /// Small blocks, and blocks of `chunk` bytes.
    pub fn new(chunk: usize) -> Supply {
        Supply { chunk, small: OnceCell::new(), large: OnceCell::new() }
    }

    fn class(&self, len: usize) -> std::io::Result<&Segments> {
        let (cell, count, size) = if len <= SMALL {
            (&self.small, SMALL_COUNT, SMALL)
        } else {
            (&self.large, (LARGE_TOTAL / self.chunk).max(8), self.chunk)
        };
        if let Some(segments) = cell.get() {
            return Ok(segments);
        }
        let made = Segments::new(count, size).map_err(std::io::Error::other)?;
        Ok(cell.get_or_init(|| made))
    }

    /// Waits for the blocks of one piece of at most a chunk.
    pub async fn piece(&self, len: usize) -> std::io::Result<Segment> {
        Ok(self.class(len)?.reserve(1).await.segment(len))
    }

    /// Waits for the blocks of a burst: pieces of these lengths, of one size. So many that others would have none left
    /// get memory of their own.
    pub async fn burst(&self, lens: &[usize]) -> std::io::Result<Vec<Segment>> {
        let longest = lens.iter().copied().max().unwrap_or(0);
        let class = self.class(longest)?;
        let mut reservation = if lens.len() <= class.pool().count() / 2 {
            class.reserve(lens.len()).await
        } else {
            let own = Segments::new(lens.len(), class.pool().payload_len()).map_err(std::io::Error::other)?;
            own.reserve(lens.len()).await
        };
        Ok(lens.iter().map(|len| reservation.segment(*len)).collect())
    }

    /// Waits for the blocks of `count` pieces at once, which may be more than this supply has.
    pub async fn whole(&self, count: usize) -> std::io::Result<Reservation> {
        let class = self.class(SMALL + 1)?;
        if count <= class.pool().count() / 2 {
            return Ok(class.reserve(count).await);
        }
        let own = Segments::new(count, self.chunk).map_err(std::io::Error::other)?;
        Ok(own.reserve(count).await)
    }
}
