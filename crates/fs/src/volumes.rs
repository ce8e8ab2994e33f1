//! The file systems that a session writes to, and how what it wrote gets to the medium.
//!
//! Linux tells a write-back error once per open file. So every file system is opened before the first
//! write to it, and synced through that descriptor ever after: an error between the two cannot be missed, whoever
//! else was told of it.

use rustix::fs::OFlags;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use thruway_engine::file_system;

/// File systems of one session; a tree with more mounts than that is not written to.
const VOLUMES_MAX: usize = 64;

struct Volume {
    device: u64,
    /// Opened before anything was written there.
    fd: OwnedFd,
    /// `syncfs` tells nothing: files have to be synced one by one.
    by_file: bool,
}

/// The file systems that a session has written to.
#[derive(Default)]
pub struct Volumes {
    known: Mutex<Vec<Arc<Volume>>>,
    /// Held during a sync, without `known`: a directory can be noted meanwhile.
    syncing: Mutex<()>,
    /// A sync failed. The kernel has told its error and will say that all is well from now on.
    lost: AtomicBool,
}

impl Volumes {
    fn known(&self) -> MutexGuard<'_, Vec<Arc<Volume>>> {
        self.known.lock().expect("no panics under the lock")
    }

    /// Something is about to be written in this directory. True if its file system is one on which only syncing each file
    /// makes it durable.
    ///
    /// # Errors
    /// If its file system cannot be looked at, or is one too many.
    pub fn note(&self, dir: impl AsFd) -> io::Result<bool> {
        let device = rustix::fs::fstat(&dir)?.st_dev;
        let mut known = self.known();
        if let Some(volume) = known.iter().find(|v| v.device == device) {
            return Ok(volume.by_file);
        }
        if known.len() >= VOLUMES_MAX {
            return Err(io::Error::other(format!("more than {VOLUMES_MAX} file systems below the destination")));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&dir, c".", flags, rustix::fs::Mode::empty())?;
        // FUSE's server is not asked; what stands on another file system leaves errors with that.
        let by_file = !file_system::is_of_this_host(&fd);
        known.push(Arc::new(Volume { device, fd, by_file }));
        Ok(by_file)
    }

    /// Whether there are file systems on which only syncing each file makes it durable.
    pub fn any_by_file(&self) -> bool {
        self.known().iter().any(|v| v.by_file)
    }

    /// Makes all that was written on all of them durable.
    ///
    /// # Errors
    /// The first failure; what was written since the last success is then of unknown fate.
    pub fn sync(&self) -> io::Result<()> {
        // One at a time: an error is reported only to the first caller, and the second must not take that for success.
        let _syncing = self.syncing.lock().expect("no panics under the lock");
        self.check()?;
        let known = self.known().clone();
        // All are tried: each tells its error once.
        let results: Vec<_> = known.iter().map(|v| rustix::fs::syncfs(&v.fd)).collect();
        results.into_iter().collect::<Result<(), _>>().map_err(|e| {
            self.lose();
            e.into()
        })
    }

    /// Something that was written did not reach the medium.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    /// Whether all syncs have succeeded so far.
    ///
    /// # Errors
    /// If one has not: nothing is to be believed durable from then on.
    pub fn check(&self) -> io::Result<()> {
        if self.lost.load(Ordering::SeqCst) {
            return Err(io::Error::other("an earlier write did not reach the medium"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn each_file_system_is_one_however_often_it_is_written_to() {
        let volumes = Volumes::default();
        let (here, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        for _ in 0..2 * VOLUMES_MAX {
            for dir in [here.path(), memory.path()] {
                volumes.note(File::open(dir).unwrap()).unwrap();
            }
        }
        let devices: Vec<_> = volumes.known().iter().map(|volume| volume.device).collect();
        assert_eq!(devices.len(), 2);
        assert_ne!(devices[0], devices[1]);
        volumes.sync().unwrap();
        volumes.lose();
        assert!(volumes.sync().is_err(), "what is lost once is not there after the next sync");
    }
}
