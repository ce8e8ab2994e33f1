//! How much goes into one block.

use crate::link::{BUSY_BLOCKS, BUSY_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// From this round trip on pieces are made to fit the path. On shorter paths the work that each piece is counts for more
/// than the memory.
const FROM: Duration = Duration::from_millis(20);
/// Such a path begins with pieces of this length.
const LEAST: u32 = 512 << 10;
/// What the path holds is this many pieces, or fewer.
const PIECES: u64 = 16;
/// Lengths are multiples of this.
const UNIT: u64 = 64 << 10;

/// The length of pieces from now on.
///
/// Each piece that the path holds takes a block at both ends, and some more are dealt with there. On a long path whole
/// blocks could be many times of what the path holds, so pieces are a part of that, and grow until they are blocks.
pub(super) struct Grain {
    now: AtomicU32,
    most: u32,
}

impl Grain {
    /// For a path of this round trip, where that is known.
    pub(super) fn new(block_len: u32, round_trip: Option<Duration>) -> Grain {
        let first = if round_trip.is_some_and(|rtt| rtt >= FROM) { LEAST.min(block_len) } else { block_len };
        Grain { now: AtomicU32::new(first), most: block_len }
    }

    pub(super) fn get(&self) -> u32 {
        self.now.load(Ordering::Relaxed)
    }

    /// Pieces that keep a channel busy.
    pub(super) fn for_a_channel(&self) -> usize {
        ((BUSY_BYTES / u64::from(self.get().max(1))) as usize).max(BUSY_BLOCKS)
    }

    fn path_holds(&self, bytes: u64) {
        let len = u32::try_from(bytes / PIECES / UNIT * UNIT).unwrap_or(u32::MAX).min(self.most);
        self.now.fetch_max(len, Ordering::Relaxed);
    }
}

/// Measures what a path holds.
pub(super) struct Gauge {
    grain: Arc<Grain>,
    round_trip: Duration,
    looked: Instant,
    acked: u64,
}

impl Gauge {
    pub(super) fn new(grain: Arc<Grain>, round_trip: Duration, now: Instant) -> Gauge {
        Gauge { grain, round_trip, looked: now, acked: 0 }
    }

    /// Whether it is time for [`Gauge::look`]: never again once pieces are whole blocks.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.grain.get() < self.grain.most && now - self.looked >= 2 * self.round_trip
    }

    /// So many bytes have arrived at the peer in all.
    pub(super) fn look(&mut self, acked: u64, now: Instant) {
        let rate = acked.saturating_sub(self.acked) as f64 / (now - self.looked).as_secs_f64().max(1e-6);
        self.grain.path_holds((rate * self.round_trip.as_secs_f64()) as u64);
        (self.looked, self.acked) = (now, acked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(50);

    /// The length of pieces after a second of such a rate, in Mbit/s.
    fn settled(rate: u64, block_len: u32) -> u32 {
        let grain = Arc::new(Grain::new(block_len, Some(RTT)));
        let start = Instant::now();
        let mut gauge = Gauge::new(Arc::clone(&grain), RTT, start);
        for ms in 0..1000 {
            let now = start + Duration::from_millis(ms);
            if gauge.is_due(now) {
                gauge.look(ms * rate * 125, now);
            }
        }
        grain.get()
    }

    #[test]
    fn pieces_grow_with_what_the_path_holds() {
        assert_eq!(settled(500, 1 << 20), 512 << 10);
        assert_eq!(settled(1600, 1 << 20), 576 << 10);
        assert_eq!(settled(10_000, 1 << 20), 1 << 20, "never more than a block");
        assert_eq!(settled(500, 64 << 10), 64 << 10);
        for short in [None, Some(Duration::from_millis(10))] {
            assert_eq!(Grain::new(1 << 20, short).get(), 1 << 20);
        }
    }
}
