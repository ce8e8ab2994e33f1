//! File systems that are programs, and what the kernel does to them.

use rustix::fs::FsWord;
use std::os::fd::AsFd;

/// `statfs` magics of FUSE and of file systems that may stand on one.
const UNSOUND: [FsWord; 3] = [libc::FUSE_SUPER_MAGIC, libc::OVERLAYFS_SUPER_MAGIC, libc::ECRYPTFS_SUPER_MAGIC];

/// Whether io_uring can be trusted with an open file.
///
/// Not on FUSE: where the server does reads and writes itself (`FOPEN_DIRECT_IO`) and does one in part, Linux (6.18, and those before it)
/// does not tell io_uring how far it has come, and io_uring repeats the rest of it where all of it began: what was asked for
/// comes from the wrong place of the file, or goes there. Nor on overlayfs and eCryptfs, below which may be FUSE, nor where a file
/// system does not say what it is.
pub fn uring_is_sound(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| !UNSOUND.contains(&fs.f_type))
}
