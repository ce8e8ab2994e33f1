//! Makes a disk slow to answer, to see what its users make of it.

use super::forward::Layer;
use super::kind::{LayerConfig, LayerError, LayerKind, Opening};
use crate::backend::{Backend, Op, Zero};
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Segment;
use thruway_engine::units::parse_duration;

pub(super) const KIND: LayerKind = LayerKind {
    name: "delay",
    syntax: "delay=TIME[/TIME]",
    about: "Waits before reads, and (the second time) before changes.",
    parse: |value| {
        let (read, write) = value.split_once('/').unwrap_or((value, value));
        Ok(Arc::new(Config { read: parse_duration(read)?, write: parse_duration(write)? }))
    },
};

#[derive(Debug)]
struct Config {
    read: Duration,
    write: Duration,
}

impl LayerConfig for Config {
    fn put_on(&self, below: Arc<dyn Backend>, _: &mut Opening<'_>) -> Result<Arc<dyn Backend>, LayerError> {
        Ok(Arc::new(Delay::new(below, self.read, self.write)))
    }
}

/// Waits before every read and before every change.
pub struct Delay {
    inner: Arc<dyn Backend>,
    read: Duration,
    write: Duration,
}

impl Delay {
    /// Waits so long before reads, and so long before everything that changes or flushes the disk.
    pub fn new(inner: Arc<dyn Backend>, read: Duration, write: Duration) -> Delay {
        Delay { inner, read, write }
    }

    fn after<'a, T: 'a>(&'a self, delay: Duration, then: impl FnOnce() -> Op<'a, T> + 'a) -> Op<'a, T> {
        Box::pin(async move {
            tokio::time::sleep(delay).await;
            then().await
        })
    }
}

impl Layer for Delay {
    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.inner.prefetch(at, len)
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        self.after(self.read, move || self.inner.read(at, segment))
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        self.after(self.write, move || self.inner.write(at, segment, durable))
    }

    fn flush(&self) -> Op<'_, ()> {
        self.after(self.write, || self.inner.flush())
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.after(self.write, move || self.inner.zero(at, len, how))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.after(self.write, move || self.inner.discard(at, len))
    }
}
