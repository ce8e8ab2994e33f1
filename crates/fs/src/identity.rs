//! Which file is which.

use rustix::fs::{AtFlags, Statx, StatxFlags};
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
