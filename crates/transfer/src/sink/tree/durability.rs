//! Makes names and attributes durable: what has changed, and how it is synced.

use super::Tree;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::MutexGuard;

/// Directories that are synced one by one at the end; more, and their file systems are synced whole.
const CHANGED_MAX: usize = 8;
/// Where file systems are not to be asked as a whole, directories that wait to be synced.
const CHANGED_BY_FILE_MAX: usize = 10_000;
/// Directories above the destination that are synced at a time.
const ABOVE_TOGETHER: usize = 16;
/// Directories in which names or attributes have changed since they were last synced.
#[derive(Default)]
pub(super) struct Changed {
    pub(super) dirs: BTreeSet<Vec<u8>>,
    /// More than those.
    pub(super) many: bool,
}

impl Tree {
    /// An earlier attempt may have made names here that have not been synced.
    ///
    /// # Errors
    /// If there are too many file systems below the destination.
    pub(crate) fn sync_later(&self, path: &[u8], dir: impl AsFd) -> io::Result<()> {
        self.note(path, dir)?;
        // Its directories, too, may be that attempt's: the whole file system is asked.
        self.changed().many = true;
        Ok(())
    }

    /// Something is about to be written in this directory. Where only syncing each directory makes names durable, it is
    /// not known whether those that lead here are durable.
    pub(super) fn note(&self, path: &[u8], dir: impl AsFd) -> io::Result<()> {
        if self.volumes.note(dir)? {
            self.change(path);
            let ends = path.iter().enumerate().rev().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
            ends.chain((!path.is_empty()).then_some(0)).for_each(|end| self.change(&path[..end]));
        }
        Ok(())
    }

    /// Names or attributes in this directory have changed.
    pub(super) fn change(&self, dir: &[u8]) {
        let by_file = self.volumes.any_by_file();
        let mut changed = self.changed();
        if changed.dirs.contains(dir) || (changed.many && !by_file) {
            return;
        }
        if changed.dirs.len() >= if by_file { CHANGED_BY_FILE_MAX } else { CHANGED_MAX } {
            let dirs = std::mem::take(&mut changed.dirs);
            if by_file {
                drop(changed);
                self.synced(self.sync_directories(&dirs));
                changed = self.changed();
            } else {
                changed.many = true;
                return;
            }
        }
        changed.dirs.insert(dir.to_vec());
    }

    pub(super) fn changed(&self) -> MutexGuard<'_, Changed> {
        self.changed.lock().expect("no panics under the lock")
    }

    /// Takes note of a sync's failure, which [`Tree::sync_names`] tells.
    fn synced(&self, result: io::Result<()>) {
        if let Err(error) = result {
            tracing::warn!(%error, "a directory or an attribute could not be made durable");
            self.volumes.lose();
        }
    }

    /// Where file systems are not to be asked as a whole, has this file or directory synced.
    pub(super) fn sync_if_by_file(&self, file: impl AsFd) {
        if self.volumes.any_by_file() {
            self.synced(rustix::fs::fsync(file).map_err(Into::into));
        }
    }

    /// Makes names and attributes durable.
    ///
    /// # Errors
    /// If they may not be.
    pub(crate) fn sync_names(&self) -> io::Result<()> {
        self.volumes.check()?;
        let Changed { dirs, many } = std::mem::take(&mut *self.changed());
        if many {
            self.volumes.sync()?;
        }
        // Then all have been asked as a whole.
        if many && !self.volumes.any_by_file() {
            return Ok(());
        }
        self.sync_directories(&dirs)?;
        self.sync_above()
    }

    /// Makes the names durable that lead to the root on its file system, as far as they can be opened: an earlier attempt, or
    /// the user, may have made them and not have synced them.
    fn sync_above(&self) -> io::Result<()> {
        let place = |dir: &OwnedFd| rustix::fs::fstat(dir).map(|stat| (stat.st_dev, stat.st_ino));
        let mut below = place(&self.root)?;
        let mut dirs: Vec<OwnedFd> = Vec::new();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        while let Ok(above) = rustix::fs::openat(dirs.last().unwrap_or(&self.root), c"..", flags, Mode::empty()) {
            let here = place(&above)?;
            if here.0 != below.0 || here == below {
                break;
            }
            below = here;
            dirs.push(above);
        }
        let sync = |dir: &OwnedFd| match rustix::fs::fsync(dir) {
            Err(Errno::INVAL | Errno::ROFS) => self.volumes.sync(),
            other => Ok(other?),
        };
        // Together: each waits for a flush of the disk, and one does for all.
        for some in dirs.chunks(ABOVE_TOGETHER) {
            std::thread::scope(|scope| {
                let mut syncs = Vec::new();
                for dir in some {
                    match std::thread::Builder::new().spawn_scoped(scope, move || sync(dir)) {
                        Ok(thread) => syncs.push(thread),
                        // There are too many threads: one by one, then.
                        Err(_) => sync(dir)?,
                    }
                }
                let panicked = |_| Err(io::Error::other("a thread panicked"));
                syncs.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
            })?;
        }
        Ok(())
    }

    /// Makes the root as durable as it is now: its journal is gone, and its times are those that it is to have.
    pub(crate) fn sync_root(&self) {
        if let Err(error) = rustix::fs::fsync(&*self.root) {
            tracing::warn!(%error, "the end of a copy's journal may not be durable");
        }
    }

    fn sync_directories(&self, dirs: &BTreeSet<Vec<u8>>) -> io::Result<()> {
        let mut whole = false;
        for path in dirs {
            let dir = match self.open_directory(path) {
                // It is gone, or was synced before it was given attributes with which it cannot be opened by its name; what file
                // system it is on is asked as a whole.
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
                    whole = true;
                    continue;
                }
                other => other?,
            };
            match rustix::fs::fsync(&*dir) {
                // File systems that do not know how to sync a directory say so.
                Err(Errno::INVAL) => whole = true,
                other => other?,
            }
        }
        if whole { self.volumes.sync() } else { Ok(()) }
    }
}
