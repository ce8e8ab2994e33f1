//! The file systems that a session writes to, and how what it wrote gets to the medium.
//!
//! Linux tells a write-back error once per open file. So every file system is opened before the first
//! write to it, and synced through that descriptor ever after: an error between the two cannot be missed, whoever
//! else was told of it.

use rustix::fs::{FsWord, OFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// File systems of one session; a tree with more mounts than that is not written to.
const VOLUMES_MAX: usize = 64;
/// `statfs` magics of file systems whose `syncfs` is known to reach the medium and to tell what was lost: ext2 to ext4, XFS, Btrfs,
/// F2FS, bcachefs, ZFS, and memory. Not FUSE (its server is not asked), nor SMB, nor what stands on another file system (errors are
/// kept by the one below).
const SYNCED_WHOLE: [FsWord; 8] = [
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::F2FS_SUPER_MAGIC,
    BCACHEFS_SUPER_MAGIC,
    ZFS_SUPER_MAGIC,
    libc::TMPFS_MAGIC,
    RAMFS_MAGIC,
];
const BCACHEFS_SUPER_MAGIC: FsWord = 0xca45_1a4e;
const ZFS_SUPER_MAGIC: FsWord = 0x2fc1_2fc1;
const RAMFS_MAGIC: FsWord = 0x8584_58f6;

struct Volume {
    device: u64,
    /// Opened before anything was written there.
    fd: OwnedFd,
    /// `syncfs` tells nothing: files have to be synced one by one.
    by_file: bool,
}

/// The file systems that a session has written to.
#[derive(Default)]
pub(crate) struct Volumes {
    known: Mutex<Vec<Volume>>,
    /// A sync failed. The kernel has told its error and will say that all is well from now on.
    lost: AtomicBool,
}

impl Volumes {
    fn known(&self) -> MutexGuard<'_, Vec<Volume>> {
        self.known.lock().expect("no panics under the lock")
    }

    /// Something is about to be written in this directory. True if its file system is one on which only syncing each file
    /// makes it durable.
    ///
    /// # Errors
    /// If its file system cannot be looked at, or is one too many.
    pub(crate) fn note(&self, dir: impl AsFd) -> io::Result<bool> {
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
        let by_file = !rustix::fs::fstatfs(&fd).is_ok_and(|fs| SYNCED_WHOLE.contains(&fs.f_type));
        known.push(Volume { device, fd, by_file });
        Ok(by_file)
    }

    /// Whether there are file systems on which only syncing each file makes it durable.
    pub(crate) fn any_by_file(&self) -> bool {
        self.known().iter().any(|v| v.by_file)
    }

    /// Makes all that was written on all of them durable.
    ///
    /// # Errors
    /// The first failure; what was written since the last success is then of unknown fate.
    pub(crate) fn sync(&self) -> io::Result<()> {
        // One at a time: whoever comes second must not take an error that was told to the first for success.
        let known = self.known();
        self.check()?;
        // All are tried: each tells its error once.
        let results: Vec<_> = known.iter().map(|v| rustix::fs::syncfs(&v.fd)).collect();
        results.into_iter().collect::<Result<(), _>>().map_err(|e| {
            self.lose();
            e.into()
        })
    }

    /// Something that was written did not reach the medium.
    pub(crate) fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    /// Whether all syncs have succeeded so far.
    ///
    /// # Errors
    /// If one has not: nothing is to be believed durable from then on.
    pub(crate) fn check(&self) -> io::Result<()> {
        if self.lost.load(Ordering::SeqCst) {
            return Err(io::Error::other("an earlier write did not reach the medium"));
        }
        Ok(())
    }
}
