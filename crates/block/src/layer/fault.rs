//! Makes a share of operations fail, to see what the disk's users make of it.

use super::forward::Layer;
use super::kind::{LayerConfig, LayerError, LayerKind, Opening};
use crate::backend::{Backend, Op, Zero};
use std::io;
use std::sync::{Arc, Mutex};
use thruway_engine::Segment;
use thruway_engine::units::Invalid;

pub(super) const KIND: LayerKind = LayerKind {
    name: "fault",
    syntax: "fault=[read:|write:|flush:]PROBABILITY",
    about: "Fails operations with an I/O error.",
    parse: |value| Ok(Arc::new(parse(value)?)),
};

#[derive(Debug)]
struct Config {
    kind: Kind,
    probability: f64,
}

fn parse(text: &str) -> Result<Config, Invalid> {
    let (kind, probability) = text.split_once(':').unwrap_or(("all", text));
    let kind = match kind {
        "read" => Kind::Read,
        "write" => Kind::Write,
        "flush" => Kind::Flush,
        "all" => Kind::All,
        other => return Err(Invalid::new("fault", other, "read, write or flush")),
    };
    match probability.parse() {
        Ok(probability) if (0.0..=1.0).contains(&probability) => Ok(Config { kind, probability }),
        _ => Err(Invalid::new("probability", probability, "a number from 0 to 1")),
    }
}

impl LayerConfig for Config {
    fn put_on(&self, below: Arc<dyn Backend>, _: &mut Opening<'_>) -> Result<Arc<dyn Backend>, LayerError> {
        Ok(Arc::new(Fault::new(below, self.kind, self.probability, 1)))
    }
}

/// Which operations fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes, zeroes and discards.
    Write,
    /// Flushes.
    Flush,
    /// Every kind.
    All,
}

/// Fails operations with an I/O error, as chance has it, without doing them.
pub struct Fault {
    inner: Arc<dyn Backend>,
    kind: Kind,
    probability: f64,
    random: Mutex<fastrand::Rng>,
}

impl Fault {
    /// Fails operations of a kind with the given probability; the same `seed` gives the same sequence.
    pub fn new(inner: Arc<dyn Backend>, kind: Kind, probability: f64, seed: u64) -> Fault {
        Fault { inner, kind, probability, random: Mutex::new(fastrand::Rng::with_seed(seed)) }
    }

    fn strike(&self, kind: Kind) -> io::Result<()> {
        if self.kind != Kind::All && self.kind != kind {
            return Ok(());
        }
        let drawn = self.random.lock().expect("no panics under the lock").f64();
        if drawn < self.probability { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn unless<'a, T: 'a>(&self, kind: Kind, then: impl FnOnce() -> Op<'a, T>) -> Op<'a, T> {
        match self.strike(kind) {
            Ok(()) => then(),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }
}

impl Layer for Fault {
    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.inner.prefetch(at, len)
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        self.unless(Kind::Read, || self.inner.read(at, segment))
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        self.unless(Kind::Write, || self.inner.write(at, segment, durable))
    }

    fn flush(&self) -> Op<'_, ()> {
        self.unless(Kind::Flush, || self.inner.flush())
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.unless(Kind::Write, || self.inner.zero(at, len, how))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.unless(Kind::Write, || self.inner.discard(at, len))
    }
}
