//! Which file is which.

use rustix::fs::{AtFlags, FsWord, Stat, StatFs, Statx, StatxFlags};
use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd;

/// Tells a file from every other that had, has or will have its name. Inode numbers are used
/// again; the time of birth, where the file system keeps it, is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The inode number.
    pub inode: u64,
    /// When the file was made, in nanoseconds since 1970; 0 where that is not known.
    pub born: i64,
}

/// File systems that never give an entry another inode number (include/uapi/linux/magic.h, and XFS's, ZFS's and Ceph's own): ext2 to ext4,
/// XFS, Btrfs, F2FS, Bcachefs, ZFS, tmpfs, ramfs, NFS, Ceph.
const LASTING_NUMBERS: [FsWord; 10] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x2fc1_2fc1,
    0x0102_1994,
    0x8584_58f6,
    0x6969,
    0x00c3_6400,
];

/// A directory that a walk opens by its path more than once.
///
/// Overlays, FUSE and others can give an unused directory another inode number. There, a directory with another number is the same if all
/// its attributes are the same.
#[derive(Debug, Clone, Copy)]
pub struct Directory(Stat);

impl Directory {
    /// The directory with these attributes.
    pub fn new(stat: &Stat) -> Directory {
        Directory(*stat)
    }

    /// Its device and inode number.
    pub fn id(&self) -> (u64, u64) {
        (self.0.st_dev, self.0.st_ino)
    }

    /// True if `found` are the attributes of this directory. `file_system` returns its file system.
    pub fn is(&self, found: &Stat, file_system: impl FnOnce() -> rustix::io::Result<StatFs>) -> bool {
        let lasts = || file_system().map_or(true, |found| LASTING_NUMBERS.contains(&found.f_type));
        self.id() == (found.st_dev, found.st_ino) || self.has_attributes(found) && !lasts()
    }

    fn has_attributes(&self, found: &Stat) -> bool {
        let times = |s: &Stat| (s.st_mtime, s.st_mtime_nsec, s.st_ctime, s.st_ctime_nsec);
        let attributes = |s: &Stat| (s.st_dev, s.st_mode, s.st_uid, s.st_gid, s.st_nlink, s.st_size, times(s));
        attributes(&self.0) == attributes(found)
    }
}

/// Nanoseconds of a file time.
pub fn nanoseconds(time: rustix::fs::StatxTimestamp) -> i64 {
    time.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.into())
}

impl Identity {
    /// A hash of the identity within its file system.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.inode.to_le_bytes()).update(&self.born.to_le_bytes());
        u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("8 bytes"))
    }

    /// A hash that also tells file systems apart.
    pub fn hash_on(&self, stat: &Statx) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.inode.to_le_bytes()).update(&self.born.to_le_bytes());
        hasher.update(&stat.stx_dev_major.to_le_bytes()).update(&stat.stx_dev_minor.to_le_bytes());
        u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("8 bytes"))
    }

    /// The identity of an open file, or of the one with this name in a directory.
    ///
    /// # Errors
    /// As `statx(2)`.
    pub fn of(dir: impl AsFd, name: &CStr) -> io::Result<(Identity, Statx)> {
        let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
        let stat = rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
        let known = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        let born = if known { nanoseconds(stat.stx_btime) } else { 0 };
        Ok((Identity { inode: stat.stx_ino, born }, stat))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_have_lasting_numbers_or_equal_attributes() {
        let dir = tempfile::tempdir().unwrap();
        let stat = rustix::fs::stat(dir.path()).unwrap();
        let directory = Directory::new(&stat);
        let [tmpfs, procfs] = ["/dev", "/proc"].map(|path| move || rustix::fs::statfs(path));
        let mut renumbered = stat;
        renumbered.st_ino += 1;
        assert!(directory.is(&stat, tmpfs) && directory.is(&renumbered, procfs));
        assert!(!directory.is(&renumbered, tmpfs));
        for change in [|s: &mut Stat| s.st_ctime_nsec ^= 1, |s: &mut Stat| s.st_mode ^= 1, |s: &mut Stat| s.st_dev += 1]
        {
            let mut other = renumbered;
            change(&mut other);
            assert!(!directory.is(&other, procfs));
        }
        let mut changed = stat;
        changed.st_ctime_nsec ^= 1;
        assert!(directory.is(&changed, tmpfs));
    }
}
