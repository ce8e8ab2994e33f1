//! Limits how much a disk moves per second, both directions together.

use super::forward::Layer;
use super::kind::{LayerConfig, LayerError, LayerKind, Opening};
use crate::backend::{Backend, Op};
use std::sync::{Arc, Mutex};
use thruway_engine::Segment;
use thruway_engine::rate_limit::RateLimit;
use thruway_engine::units::parse_size;
use tokio::time::Instant;

pub(super) const KIND: LayerKind = LayerKind {
    name: "rate",
    syntax: "rate=SIZE",
    about: "Limits reads and writes together to so many bytes per second.",
    parse: |value| Ok(Arc::new(Config(parse_size(value)?))),
};

/// Bytes per second.
#[derive(Debug)]
struct Config(u64);

impl LayerConfig for Config {
    fn put_on(&self, below: Arc<dyn Backend>, _: &mut Opening<'_>) -> Result<Arc<dyn Backend>, LayerError> {
        Ok(Arc::new(Rate::new(below, self.0)))
    }
}

/// A limit of bytes per second.
pub struct Rate {
    inner: Arc<dyn Backend>,
    limit: Mutex<RateLimit>,
}

impl Rate {
    /// At most `per_second` bytes, at least one.
    pub fn new(inner: Arc<dyn Backend>, per_second: u64) -> Rate {
        Rate { inner, limit: Mutex::new(RateLimit::new(Some(per_second))) }
    }

    /// Waits for the turn of `len` bytes.
    async fn turn(&self, len: u64) {
        let now = Instant::now();
        let pause = {
            let mut limit = self.limit.lock().expect("no panics under the lock");
            let pause = limit.pause(now.into_std());
            limit.record(len, now.into_std());
            pause
        };
        if let Some(pause) = pause {
            tokio::time::sleep_until(now + pause).await;
        }
    }
}

impl Layer for Rate {
    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            self.turn(segment.len() as u64).await;
            self.inner.read(at, segment).await
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        Box::pin(async move {
            self.turn(segment.len() as u64).await;
            self.inner.write(at, segment, durable).await
        })
    }
}
