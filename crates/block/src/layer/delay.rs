//! Makes a disk slow to answer, to see what its users make of it.

use crate::backend::{Backend, Op, Zero};
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Segment;

/// Waits before every read and before every change.
pub struct Delay {
    below: Arc<dyn Backend>,
    read: Duration,
    write: Duration,
}

impl Delay {
    /// Waits so long before reads, and so long before everything that changes or flushes the disk.
    pub fn new(below: Arc<dyn Backend>, read: Duration, write: Duration) -> Delay {
        Delay { below, read, write }
    }

    fn after<'a, T: 'a>(&'a self, delay: Duration, then: impl FnOnce() -> Op<'a, T> + 'a) -> Op<'a, T> {
        Box::pin(async move {
            tokio::time::sleep(delay).await;
            then().await
        })
    }
}

impl Backend for Delay {
    super::pass!(report, geometry, extents, prefetch, announce);

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        self.after(self.read, move || self.below.read(at, segment))
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        self.after(self.write, move || self.below.write(at, segment, durable))
    }

    fn flush(&self) -> Op<'_, ()> {
        self.after(self.write, || self.below.flush())
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.after(self.write, move || self.below.zero(at, len, how))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.after(self.write, move || self.below.discard(at, len))
    }
}
