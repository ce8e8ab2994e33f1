//! Disks: the interface that protocols and layers work with, and its ends.

mod file;
mod memory;

pub(crate) use file::FileKey;
pub use file::{FileBackend, Mode};
pub use memory::MemoryBackend;

use bitflags::bitflags;
use std::future::Future;
use std::io;
use std::pin::Pin;
use thruway_engine::Segment;
pub use thruway_engine::lent::{Lent, Memory};
use thruway_metrics::{RegisterError, Registered, Registry};

/// An operation in progress on a reactor.
pub type Op<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + 'a>>;

/// What clients are told about a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes.
    pub size: u64,
    /// The smallest request that is served without reading around it; a power of two.
    pub block: u32,
    /// The length at whose multiples requests are best cut; a power of two.
    pub preferred: u32,
    /// What the storage writes as one; a smaller write costs it a read. A power of two.
    pub physical: u32,
    /// Nothing can be changed.
    pub read_only: bool,
    /// Discarding gives storage back.
    pub discard: bool,
    /// What has been discarded reads as zeroes.
    pub discard_zeroes: bool,
    /// Zeroes can be written without sending them to the storage.
    pub fast_zero: bool,
    /// What one client has flushed, every client's later reads see, and writes of several
    /// connections may be made durable through any one of them.
    pub shared: bool,
}

bitflags! {
    /// How zeroes are to be written.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Zero: u8 {
        /// The range may lose its storage.
        const MAY_DISCARD = 1;
        /// Fail with `EOPNOTSUPP` rather than take as long as writing them would.
        const FAST_ONLY = 2;
        /// Be durable when done.
        const DURABLE = 4;
    }
}

/// A stretch of a disk in one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// No storage is behind it.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

/// A disk.
///
/// Ranges have been checked against [`Geometry::size`] by the caller, and so have changes against
/// [`Geometry::read_only`]; a disk that shrinks fails what is beyond its end. Operations run on any
/// reactor, any number at a time, in any order: a caller that needs an order waits for one operation before
/// starting the next. An operation may begin when its function is called, before it is waited for.
pub trait Backend: Send + Sync {
    /// What the disk is like now; its size may change.
    fn geometry(&self) -> Geometry;

    /// Fills the segment from `at`.
    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment>;

    /// Writes the segment at `at`; if `durable`, it survives a loss of power when this is done.
    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()>;

    /// When this is done, every write that was done before it was started survives a loss of power.
    fn flush(&self) -> Op<'_, ()>;

    /// Makes a range read as zeroes.
    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()>;

    /// Discards a range: its content is no longer needed, and what it reads as afterwards is undefined.
    fn discard(&self, at: u64, len: u64) -> Op<'_, ()>;

    /// The states of a range, from its first byte on; at least one, covering all of the range or the
    /// beginning of it. Looking them up is work: after `most`, or [`EXTENTS_MAX`], no more are looked up, though the last ones
    /// found may be beyond that number.
    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>>;

    /// A long read of this range is about to begin, perhaps in pieces: time to begin to fetch what may follow it.
    fn hint_sequential(&self, _at: u64, _len: u64) {}

    /// The range without a copy, if that is to be had at once and worth while.
    fn lend(&self, _at: u64, _len: usize) -> Option<Lent> {
        None
    }

    /// Registers the metrics of the disk and of its layers, for an export with this name.
    ///
    /// # Errors
    /// [`RegisterError`].
    fn register(&self, _registry: &Registry, _export: &str) -> Result<Vec<Registered>, RegisterError> {
        Ok(Vec::new())
    }

    /// What there is to say of it when it has been used, for people.
    fn summary(&self) -> Option<String> {
        None
    }

    /// Bring a range nearer, because it will be read soon.
    fn prefetch(&self, _at: u64, _len: u64) -> Op<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Extents that are looked up for one request.
pub const EXTENTS_MAX: usize = 1024;

/// Appends an extent. It becomes one with the last, if that is in the same state.
pub(crate) fn append(extents: &mut Vec<Extent>, extent: Extent) {
    match extents.last_mut() {
        _ if extent.len == 0 => {}
        Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => last.len += extent.len,
        _ => extents.push(extent),
    }
}

/// Extents with equal neighbours made one, the last cut at `len`.
pub(crate) fn merge(extents: impl IntoIterator<Item = Extent>, len: u64) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::new();
    let mut left = len;
    for mut extent in extents {
        extent.len = extent.len.min(left);
        left -= extent.len;
        append(&mut merged, extent);
    }
    merged
}

/// `EOPNOTSUPP`.
pub(crate) fn unsupported() -> io::Error {
    io::Error::from_raw_os_error(libc::EOPNOTSUPP)
}
/// Waits for all of them, also when one fails: what is dropped half way may still reach the disk, after what follows.
pub(crate) async fn all(changes: impl IntoIterator<Item = impl Future<Output = io::Result<()>>>) -> io::Result<()> {
    futures_util::future::join_all(changes).await.into_iter().collect()
}
