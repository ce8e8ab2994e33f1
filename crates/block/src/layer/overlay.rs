//! Copy on write: changes go to an overlay, the disk below stays as it is.

use super::forward::Layer;
use super::kind::{LayerConfig, LayerError, LayerFile, LayerKind, Opening, Role};
use crate::backend::{Backend, EXTENTS_MAX, Extent, FileBackend, Geometry, Op, Zero, append, merge};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_engine::{Segment, Segments};
use tokio::sync::RwLock;

pub(super) const KIND: LayerKind = LayerKind {
    name: "overlay",
    syntax: "overlay[=DIR]",
    about: "Changes go to a temporary file in this directory and end with the daemon.",
    parse: |value| {
        // An empty TMPDIR would be the current directory.
        let is_unset = std::env::var_os("TMPDIR").is_none_or(|value| value.is_empty());
        let default = || if is_unset { "/tmp".into() } else { std::env::temp_dir() };
        let directory = if value.is_empty() { default() } else { value.into() };
        Ok(Arc::new(Config(directory)))
    },
};

/// A file of changes that cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("overlay in {}: {source}", directory.display())]
struct NoChanges {
    directory: PathBuf,
    source: io::Error,
}

/// Directory of the file of changes.
#[derive(Debug)]
struct Config(PathBuf);

impl LayerConfig for Config {
    fn put_on(&self, below: Arc<dyn Backend>, _: &mut Opening<'_>) -> Result<Arc<dyn Backend>, LayerError> {
        let fail = |source| LayerError::new(NoChanges { directory: self.0.clone(), source });
        let changes = temporary(&self.0, below.geometry().size).map_err(fail)?;
        Ok(Arc::new(Overlay::new(below, changes).map_err(fail)?))
    }

    fn check(&self, _: usize) -> Result<(), LayerError> {
        let fail = |source| LayerError::new(NoChanges { directory: self.0.clone(), source });
        temporary(&self.0, 0).map(drop).map_err(fail)
    }

    fn role(&self) -> Role {
        Role { hides_changes: true, ..Role::default() }
    }

    fn files(&self) -> Option<LayerFile> {
        Some(LayerFile::Directory(self.0.clone()))
    }
}

/// An `O_TMPFILE`; freed when the last descriptor closes.
fn temporary(dir: &Path, size: u64) -> io::Result<Arc<dyn Backend>> {
    use rustix::fs::{Mode as Permissions, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(dir, flags, Permissions::RUSR | Permissions::WUSR)?);
    file.set_len(size)?;
    Ok(Arc::new(FileBackend::of(file)?))
}

/// Bytes copied up at once: the unit of the map of changes.
const OVERLAY_BLOCK: u64 = 4096;

/// A disk whose changes go elsewhere.
pub struct Overlay {
    inner: Arc<dyn Backend>,
    changes: Arc<dyn Backend>,
    /// One bit for each block: it is in the overlay.
    changed: Vec<AtomicU64>,
    /// Held alone while a block is filled from below, so that what is filled never lands on a change.
    filling: RwLock<()>,
}

impl Overlay {
    /// Changes to `inner` go to `changes`, which must be as large.
    ///
    /// # Errors
    /// If it is not.
    pub fn new(inner: Arc<dyn Backend>, changes: Arc<dyn Backend>) -> io::Result<Overlay> {
        let size = inner.geometry().size;
        if changes.geometry().size < size {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the overlay is smaller than the disk"));
        }
        let mut changed = Vec::new();
        changed.resize_with(size.div_ceil(OVERLAY_BLOCK).div_ceil(64) as usize, || AtomicU64::new(0));
        Ok(Overlay { inner, changes, changed, filling: RwLock::new(()) })
    }

    fn has(&self, block: u64) -> bool {
        self.changed[block as usize / 64].load(Ordering::Acquire) & (1 << (block % 64)) != 0
    }

    fn set(&self, blocks: std::ops::Range<u64>) {
        for block in blocks {
            self.changed[block as usize / 64].fetch_or(1 << (block % 64), Ordering::Release);
        }
    }

    /// Runs of blocks of one kind in a range: offset, length, in the overlay or not.
    fn runs(&self, at: u64, len: u64) -> Vec<(u64, u64, bool)> {
        let (mut runs, end) = (Vec::<(u64, u64, bool)>::new(), at + len);
        let mut position = at;
        while position < end {
            let block = position / OVERLAY_BLOCK;
            let len = ((block + 1) * OVERLAY_BLOCK).min(end) - position;
            let here = self.has(block);
            match runs.last_mut() {
                Some((_, run, there)) if *there == here => *run += len,
                _ => runs.push((position, len, here)),
            }
            position += len;
        }
        runs
    }

    /// Makes the blocks that a change only covers in part whole in the overlay.
    async fn fill_edges(&self, at: u64, len: u64) -> io::Result<()> {
        let end = at + len;
        let size = self.inner.geometry().size;
        let partial = |block: u64| block * OVERLAY_BLOCK < at || ((block + 1) * OVERLAY_BLOCK).min(size) > end;
        let (first, last) = (at / OVERLAY_BLOCK, (end - 1) / OVERLAY_BLOCK);
        for block in [first, last].into_iter().take(if first == last { 1 } else { 2 }) {
            if partial(block) {
                self.fill(block, size).await?;
            }
        }
        Ok(())
    }

    async fn fill(&self, block: u64, size: u64) -> io::Result<()> {
        let _alone = self.filling.write().await;
        if self.has(block) {
            return Ok(());
        }
        let start = block * OVERLAY_BLOCK;
        let len = OVERLAY_BLOCK.min(size - start) as usize;
        let supply = Segments::new(1, OVERLAY_BLOCK as usize).map_err(io::Error::other)?;
        let segment = supply.reserve(1).await.segment(len);
        let segment = self.inner.read(start, segment).await?;
        self.changes.write(start, segment, false).await?;
        self.set(block..block + 1);
        Ok(())
    }

    fn blocks(&self, at: u64, len: u64) -> std::ops::Range<u64> {
        at / OVERLAY_BLOCK..(at + len).div_ceil(OVERLAY_BLOCK)
    }
}

impl Layer for Overlay {
    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn geometry(&self) -> Geometry {
        let inner = self.inner.geometry();
        let size = inner.size.min(self.changed.len() as u64 * 64 * OVERLAY_BLOCK);
        Geometry {
            size,
            physical: OVERLAY_BLOCK as u32,
            read_only: false,
            discard: false,
            discard_zeroes: false,
            fast_zero: false,
            ..inner
        }
    }

    fn read(&self, at: u64, mut segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            let mut whole: Option<Segment> = None;
            for (start, len, here) in self.runs(at, segment.len() as u64) {
                let rest = segment.split_off(len as usize);
                let from = if here { &self.changes } else { &self.inner };
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
            self.set(self.blocks(at, len));
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
            self.set(self.blocks(at, len));
            Ok(())
        })
    }

    fn discard(&self, _at: u64, _len: u64) -> Op<'_, ()> {
        // What is below would come to light again.
        Box::pin(std::future::ready(Ok(())))
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>> {
        /// Looked at for one answer.
        const LEN_MAX: u64 = 1 << 30;
        Box::pin(async move {
            let mut extents = Vec::new();
            for (start, run, here) in self.runs(at, len.min(LEN_MAX)) {
                let from = if here { &self.changes } else { &self.inner };
                let found = from.extents(start, run, most).await?;
                let covered: u64 = found.iter().map(|e| e.len).sum();
                found.into_iter().for_each(|extent| append(&mut extents, extent));
                // One more: then the last of them is complete.
                if covered < run || extents.len() > most.min(EXTENTS_MAX) {
                    break;
                }
            }
            Ok(merge(extents, len))
        })
    }
}
