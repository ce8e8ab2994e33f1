//! Adaptive payload size of blocks.

use crate::link::{BUSY_BLOCKS, BUSY_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// From this round trip on payloads are made to fit the path. On shorter ones the work per payload matters more than memory.
const LONG_PATH_RTT: Duration = Duration::from_millis(20);
/// First payload size on a long path.
const PAYLOAD_MIN: u32 = 512 << 10;
/// The path's bandwidth-delay product is at most this many payloads.
const PAYLOADS_PER_BDP: u64 = 16;
/// Payload sizes are multiples of this.
const PAYLOAD_ALIGN: u64 = 64 << 10;

/// Payload size of the next blocks.
///
/// Each payload in flight takes a block at both ends, and more are being processed there. On a long path whole blocks could be
/// many times the bandwidth-delay product, so payloads begin as a part of it and grow until they fill their blocks.
pub(super) struct PayloadSize {
    now: AtomicU32,
    most: u32,
}

impl PayloadSize {
    /// For a path of this round trip, where that is known.
    pub(super) fn new(block_len: u32, round_trip: Option<Duration>) -> PayloadSize {
        let first =
            if round_trip.is_some_and(|rtt| rtt >= LONG_PATH_RTT) { PAYLOAD_MIN.min(block_len) } else { block_len };
        PayloadSize { now: AtomicU32::new(first), most: block_len }
    }

    pub(super) fn get(&self) -> u32 {
        self.now.load(Ordering::Relaxed)
    }

    /// Payloads that keep a channel busy.
    pub(super) fn for_a_channel(&self) -> usize {
        ((BUSY_BYTES / u64::from(self.get().max(1))) as usize).max(BUSY_BLOCKS)
    }

    fn path_holds(&self, bytes: u64) {
        let len =
            u32::try_from(bytes / PAYLOADS_PER_BDP / PAYLOAD_ALIGN * PAYLOAD_ALIGN).unwrap_or(u32::MAX).min(self.most);
        self.now.fetch_max(len, Ordering::Relaxed);
    }
}

/// Measures a path's bandwidth-delay product.
pub(super) struct Gauge {
    payload_size: Arc<PayloadSize>,
    round_trip: Duration,
    last_sample: Instant,
    acked: u64,
}

impl Gauge {
    pub(super) fn new(payload_size: Arc<PayloadSize>, round_trip: Duration, now: Instant) -> Gauge {
        Gauge { payload_size, round_trip, last_sample: now, acked: 0 }
    }

    /// Whether it is time for [`Gauge::sample`]: never again once payloads fill their blocks.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.payload_size.get() < self.payload_size.most && now - self.last_sample >= 2 * self.round_trip
    }

    /// Records the cumulative acknowledged bytes.
    pub(super) fn sample(&mut self, acked: u64, now: Instant) {
        let rate = acked.saturating_sub(self.acked) as f64 / (now - self.last_sample).as_secs_f64().max(1e-6);
        self.payload_size.path_holds((rate * self.round_trip.as_secs_f64()) as u64);
        (self.last_sample, self.acked) = (now, acked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(50);

    /// The payload size after a second at this rate, in Mbit/s.
    fn settled(rate: u64, block_len: u32) -> u32 {
        let payload_size = Arc::new(PayloadSize::new(block_len, Some(RTT)));
        let start = Instant::now();
        let mut gauge = Gauge::new(Arc::clone(&payload_size), RTT, start);
        for ms in 0..1000 {
            let now = start + Duration::from_millis(ms);
            if gauge.is_due(now) {
                gauge.sample(ms * rate * 125, now);
            }
        }
        payload_size.get()
    }

    #[test]
    fn payloads_grow_with_the_bandwidth_delay_product() {
        assert_eq!(settled(500, 1 << 20), 512 << 10);
        assert_eq!(settled(1600, 1 << 20), 576 << 10);
        assert_eq!(settled(10_000, 1 << 20), 1 << 20, "never more than a block");
        assert_eq!(settled(500, 64 << 10), 64 << 10);
        for short in [None, Some(Duration::from_millis(10))] {
            assert_eq!(PayloadSize::new(1 << 20, short).get(), 1 << 20);
        }
    }
}
