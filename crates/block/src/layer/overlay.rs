//! Copy on write: changes go to an overlay, the disk below stays as it is.

use crate::backend::{Backend, Extent, Geometry, Op, Zero, merge};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_engine::{Segment, Segments};
use tokio::sync::RwLock;

/// What is copied at least.
const GRAIN: u64 = 4096;

/// A disk whose changes go elsewhere.
pub struct Overlay {
    below: Arc<dyn Backend>,
    changes: Arc<dyn Backend>,
    /// One bit for each grain: it is in the overlay.
    changed: Vec<AtomicU64>,
    /// Held alone while a grain is filled from below, so that what is filled never lands on a change.
    filling: RwLock<()>,
}

impl Overlay {
    /// Changes to `below` go to `changes`, which must be as large.
    ///
    /// # Errors
    /// If it is not.
    pub fn new(below: Arc<dyn Backend>, changes: Arc<dyn Backend>) -> io::Result<Overlay> {
        let size = below.geometry().size;
        if changes.geometry().size < size {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the overlay is smaller than the disk"));
        }
        let mut changed = Vec::new();
        changed.resize_with(size.div_ceil(GRAIN).div_ceil(64) as usize, || AtomicU64::new(0));
        Ok(Overlay { below, changes, changed, filling: RwLock::new(()) })
    }

    fn has(&self, grain: u64) -> bool {
        self.changed[grain as usize / 64].load(Ordering::Acquire) & (1 << (grain % 64)) != 0
    }

    fn set(&self, grains: std::ops::Range<u64>) {
        for grain in grains {
            self.changed[grain as usize / 64].fetch_or(1 << (grain % 64), Ordering::Release);
        }
    }

    /// Runs of grains of one kind in a range: offset, length, in the overlay or not.
    fn runs(&self, at: u64, len: u64) -> Vec<(u64, u64, bool)> {
        let (mut runs, end) = (Vec::<(u64, u64, bool)>::new(), at + len);
        let mut position = at;
        while position < end {
            let grain = position / GRAIN;
            let len = ((grain + 1) * GRAIN).min(end) - position;
            let here = self.has(grain);
            match runs.last_mut() {
                Some((_, run, there)) if *there == here => *run += len,
                _ => runs.push((position, len, here)),
            }
            position += len;
        }
        runs
    }

    /// Makes the grains that a change only covers in part whole in the overlay.
    async fn fill_edges(&self, at: u64, len: u64) -> io::Result<()> {
        let end = at + len;
        let size = self.below.geometry().size;
        let partial = |grain: u64| grain * GRAIN < at || ((grain + 1) * GRAIN).min(size) > end;
        let (first, last) = (at / GRAIN, (end - 1) / GRAIN);
        for grain in [first, last].into_iter().take(if first == last { 1 } else { 2 }) {
            if partial(grain) {
                self.fill(grain, size).await?;
            }
        }
        Ok(())
    }

    async fn fill(&self, grain: u64, size: u64) -> io::Result<()> {
        let _alone = self.filling.write().await;
        if self.has(grain) {
            return Ok(());
        }
        let start = grain * GRAIN;
        let len = GRAIN.min(size - start) as usize;
        let supply = Segments::new(1, GRAIN as usize).map_err(io::Error::other)?;
        let segment = supply.reserve(1).await.segment(len);
        let segment = self.below.read(start, segment).await?;
        self.changes.write(start, segment, false).await?;
        self.set(grain..grain + 1);
        Ok(())
    }

    fn grains(&self, at: u64, len: u64) -> std::ops::Range<u64> {
        at / GRAIN..(at + len).div_ceil(GRAIN)
    }
}

impl Backend for Overlay {
    super::pass!(report, announce);

    fn geometry(&self) -> Geometry {
        let below = self.below.geometry();
        let size = below.size.min(self.changed.len() as u64 * 64 * GRAIN);
        Geometry {
            size,
            physical: GRAIN as u32,
            read_only: false,
            discard: false,
            discard_zeroes: false,
            fast_zero: false,
            ..below
        }
    }

    fn read(&self, at: u64, mut segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            let mut whole: Option<Segment> = None;
            for (start, len, here) in self.runs(at, segment.len() as u64) {
                let rest = segment.split_off(len as usize);
                let from = if here { &self.changes } else { &self.below };
                let part = from.read(start, std::mem::replace(&mut segment, rest)).await?;
                match &mut whole {
                    Some(whole) => whole.join(part),
                    None => whole = Some(part),
                }
            }
            Ok(whole.unwrap_or(segment))
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        Box::pin(async move {
            let len = segment.len() as u64;
            if len == 0 {
                return Ok(());
            }
            self.fill_edges(at, len).await?;
            let _together = self.filling.read().await;
            self.changes.write(at, segment, durable).await?;
            self.set(self.grains(at, len));
            Ok(())
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        self.changes.flush()
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        Box::pin(async move {
            if len == 0 {
                return Ok(());
            }
            self.fill_edges(at, len).await?;
            let _together = self.filling.read().await;
            self.changes.zero(at, len, how).await?;
            self.set(self.grains(at, len));
            Ok(())
        })
    }

    fn discard(&self, _at: u64, _len: u64) -> Op<'_, ()> {
        // What is below would come to light again.
        Box::pin(std::future::ready(Ok(())))
    }

    fn extents(&self, at: u64, len: u64) -> Op<'_, Vec<Extent>> {
        /// Looked at for one answer.
        const LEN_MAX: u64 = 1 << 30;
        Box::pin(async move {
            let mut extents = Vec::new();
            for (start, run, here) in self.runs(at, len.min(LEN_MAX)) {
                let from = if here { &self.changes } else { &self.below };
                let found = from.extents(start, run).await?;
                let covered: u64 = found.iter().map(|e| e.len).sum();
                extents.extend(found);
                if covered < run {
                    break;
                }
            }
            Ok(merge(extents, len))
        })
    }
}
