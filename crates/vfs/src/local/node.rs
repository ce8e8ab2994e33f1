//! Files that are held: what names them, what is open of them, and how often they have been changed.

use super::Inner;
use crate::{FileId, Kind, Result, Time};
use rustix::fs::{AtFlags, Statx, StatxFlags, StatxTimestamp};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_engine::io::OpenFile;
use thruway_engine::reactor;
use thruway_fs::handle::Handle;

/// A file that is held.
pub(super) struct Node {
    pub(super) id: FileId,
    /// Names it, and does not open it.
    pub(super) fd: OwnedFd,
    pub(super) kind: Kind,
    pub(super) data: Mutex<Data>,
    /// Time of the last change, and changes through here that had this time: clocks are coarse.
    pub(super) changes: Mutex<(Time, u64)>,
    pub(super) is_open: AtomicBool,
    /// One sync at a time: the kernel tells an error once.
    pub(super) syncing: tokio::sync::Mutex<()>,
    /// Syncs that have begun, and the last of them that has ended well.
    pub(super) syncs: AtomicU64,
    pub(super) synced: AtomicU64,
    /// Syncs that have failed.
    pub(super) failures: AtomicU64,
    pub(super) inner: std::sync::Weak<Inner>,
}

/// One of those who have a file open.
pub(super) struct Opened(pub(super) Arc<Node>);

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(inner) = self.0.inner.upgrade() else { return };
        let mut open = inner.open();
        if let Some((_, users)) = open.get_mut(&self.0.id) {
            *users -= 1;
            if *users == 0 {
                self.0.is_open.store(false, Ordering::Relaxed);
                open.remove(&self.0.id);
                if let Some(paths) = &inner.paths
                    && stat(&self.0.fd).is_err_and(|error| error == Errno::STALE)
                {
                    paths.note_gone(&self.0.id);
                }
            }
        }
    }
}

/// The file, open for its data.
#[derive(Default)]
pub(super) struct Data {
    pub(super) read: Option<Arc<OpenFile>>,
    /// While there is data that has not been flushed, and for [`CLOSE_DELAY`] after that; not longer, because the file could not be
    /// executed on this host.
    pub(super) write: Option<Arc<OpenFile>>,
    /// The same past the page cache, if that is wanted: for reading, and for writing as long as [`Data::write`].
    pub(super) direct: [Option<Arc<OpenFile>>; 2],
    /// A task waits to close it.
    pub(super) is_closing: bool,
    /// Data has been, or is being, written through it that no flush which has begun covers.
    pub(super) is_dirty: bool,
    /// When [`Data::write`] was last asked for.
    pub(super) written: Option<Instant>,
}

impl Data {
    pub(super) fn close_for_writing(&mut self) {
        self.write = None;
        self.direct[1] = None;
    }
}

impl Node {
    pub(super) fn data(&self) -> MutexGuard<'_, Data> {
        self.data.lock().expect("no panics under the lock")
    }

    pub(super) fn stat(&self) -> Result<Statx> {
        let stat = statx(&self.fd)?;
        if stat.stx_nlink == 0 && !self.is_open.load(Ordering::Relaxed) { Err(Errno::STALE) } else { Ok(stat) }
    }

    pub(super) fn change(&self, changed: Time) -> u64 {
        let (at, more) = *self.changes.lock().expect("no panics under the lock");
        change_of(changed, (at == changed).then_some(more))
    }

    /// To be called behind every change; what the file is like then, if that can be told.
    pub(super) fn note_change(&self) -> Option<Statx> {
        let mut changes = self.changes.lock().expect("no panics under the lock");
        let stat = statx(&self.fd).ok()?;
        let now = time_of(stat.stx_ctime);
        // What had this time before the change has the number without anything added.
        *changes = (now, if changes.0 == now { changes.1 + 1 } else { 1 });
        Some(stat)
    }

    pub(super) fn handle(&self) -> Result<Handle> {
        Handle::decode(&self.id.0).ok_or(Errno::STALE)
    }

    /// The file under a path that the kernel resolves to it, for calls that take no descriptor of this kind.
    pub(super) fn proc_path(&self) -> String {
        proc_path(&self.fd)
    }
}

impl Drop for Node {
    /// Data that has not been flushed, and that nobody could any more through this descriptor, is: an error of it would not be seen.
    fn drop(&mut self) {
        let data = std::mem::take(self.data.get_mut().expect("no panics under the lock"));
        let (Some(file), Some(inner)) = (data.write, self.inner.upgrade()) else { return };
        let workers = inner.workers.clone();
        workers.start(move || {
            let _telling = inner.telling.read().expect("no panics under the lock");
            let _ = inner.note(rustix::fs::fsync(&*file));
        });
    }
}

/// A path that the kernel resolves to what this descriptor is of.
pub(super) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

pub(super) fn statx(fd: impl AsFd) -> Result<Statx> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

pub(super) fn stat(fd: impl AsFd) -> Result<Statx> {
    let stat = statx(fd)?;
    if stat.stx_nlink == 0 { Err(Errno::STALE) } else { Ok(stat) }
}

/// Change attribute of a file, from the time of its last change.
///
/// The number is even, and includes the count, if this process has counted changes with that time: the clock is coarse on some
/// kernels. It is odd otherwise, because an earlier process may have counted changes with the same time.
pub(super) fn change_of(changed: Time, counted: Option<u64>) -> u64 {
    let time = (changed.seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(changed.nanoseconds.into());
    time.wrapping_mul(2).wrapping_add(counted.map_or(1, |count| count.wrapping_mul(2)))
}

pub(super) fn time_of(time: StatxTimestamp) -> Time {
    Time { seconds: time.tv_sec, nanoseconds: time.tv_nsec }
}

/// How long a file stays open for writing after a flush.
pub(super) const CLOSE_DELAY: Duration = Duration::from_secs(1);

/// Closes a file that has been flushed for writing, unless it is written to again: clients that flush each write do not wait for it to
/// be opened each time.
pub(super) fn close_later(node: &Arc<Node>) {
    {
        let mut data = node.data();
        if data.is_dirty || std::mem::replace(&mut data.is_closing, true) {
            return;
        }
    }
    let node = Arc::downgrade(node);
    reactor::start(async move {
        loop {
            let syncs = node.upgrade().map(|node| node.syncs.load(Ordering::SeqCst));
            tokio::time::sleep(CLOSE_DELAY).await;
            let Some(node) = node.upgrade() else { return };
            let mut data = node.data();
            if data.is_dirty {
                // The next flush sees to it.
                data.is_closing = false;
                return;
            }
            let is_in_use = data.write.as_ref().is_some_and(|file| Arc::strong_count(file) > 1);
            if !is_in_use && syncs == Some(node.syncs.load(Ordering::SeqCst)) {
                data.close_for_writing();
                data.is_closing = false;
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_another_process_has_numbered_has_another_number() {
        let time = |nanoseconds| Time { seconds: 1_800_000_000, nanoseconds };
        // A killed process has counted changes with one time of a coarse clock; the next process does not have its count.
        let seen: Vec<u64> = (1..1000).map(|count| change_of(time(0), Some(count))).collect();
        assert!(!seen.contains(&change_of(time(0), None)));
        // Later states have different numbers.
        let later = [change_of(time(1_000_000), None), change_of(time(1_000_000), Some(1))];
        assert!(later.iter().all(|number| !seen.contains(number)) && later[0] != later[1]);
    }
}
