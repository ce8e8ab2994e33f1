//! Limits how much a disk moves per second, both directions together.

use crate::backend::{Backend, Op, Zero};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thruway_engine::Segment;
use tokio::time::Instant;

/// Bytes that may be moved at once after a rest, in seconds of the rate.
const BURST: Duration = Duration::from_millis(100);

/// A limit of bytes per second.
pub struct Rate {
    below: Arc<dyn Backend>,
    per_second: u64,
    /// When the bytes moved so far will have been paid for.
    paid: Mutex<Option<Instant>>,
}

impl Rate {
    /// At most `per_second` bytes, at least one.
    pub fn new(below: Arc<dyn Backend>, per_second: u64) -> Rate {
        Rate { below, per_second: per_second.max(1), paid: Mutex::new(None) }
    }

    /// Waits for the turn of `len` bytes.
    async fn pay(&self, len: u64) {
        let cost = Duration::from_secs_f64(len as f64 / self.per_second as f64);
        let now = Instant::now();
        let start = {
            let mut paid = self.paid.lock().expect("no panics under the lock");
            let start = paid.unwrap_or(now).max(now.checked_sub(BURST).unwrap_or(now));
            *paid = Some(start + cost);
            start
        };
        if start > now {
            tokio::time::sleep_until(start).await;
        }
    }
}

impl Backend for Rate {
    super::pass!(report, geometry, flush, extents, announce);

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            self.pay(segment.len() as u64).await;
            self.below.read(at, segment).await
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        Box::pin(async move {
            self.pay(segment.len() as u64).await;
            self.below.write(at, segment, durable).await
        })
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.below.zero(at, len, how)
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.below.discard(at, len)
    }
}
