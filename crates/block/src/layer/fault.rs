//! Makes a share of operations fail, to see what the disk's users make of it.

use crate::backend::{Backend, Op, Zero};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_engine::Segment;

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
    below: Arc<dyn Backend>,
    kind: Kind,
    /// Of 2^32.
    share: u64,
    state: AtomicU64,
}

impl Fault {
    /// Fails operations of a kind with the given probability; the same `seed` gives the same sequence.
    pub fn new(below: Arc<dyn Backend>, kind: Kind, probability: f64, seed: u64) -> Fault {
        let share = (probability.clamp(0.0, 1.0) * (1u64 << 32) as f64) as u64;
        Fault { below, kind, share, state: AtomicU64::new(seed) }
    }

    fn strike(&self, kind: Kind) -> io::Result<()> {
        if self.kind != Kind::All && self.kind != kind {
            return Ok(());
        }
        // SplitMix64: a counter and a mixing function, so that tasks of all reactors may draw.
        let mut z = self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (z ^ (z >> 31)) >> 32 < self.share { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn unless<'a, T: 'a>(&self, kind: Kind, then: impl FnOnce() -> Op<'a, T>) -> Op<'a, T> {
        match self.strike(kind) {
            Ok(()) => then(),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }
}

impl Backend for Fault {
    super::pass!(report, geometry, extents, prefetch, announce);

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        self.unless(Kind::Read, || self.below.read(at, segment))
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        self.unless(Kind::Write, || self.below.write(at, segment, durable))
    }

    fn flush(&self) -> Op<'_, ()> {
        self.unless(Kind::Flush, || self.below.flush())
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.unless(Kind::Write, || self.below.zero(at, len, how))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.unless(Kind::Write, || self.below.discard(at, len))
    }
}
