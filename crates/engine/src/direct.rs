//! Direct I/O: reading and writing past the page cache.

use rustix::fs::FsWord;
use std::os::fd::AsFd;

/// `statfs` magic of FUSE.
const FUSE_SUPER_MAGIC: FsWord = 0x6573_5546;

/// Whether an open file may be read and written past the page cache; if its file system cannot, that shows when it is tried.
///
/// Not on FUSE: of a server that does reads and writes itself (`FOPEN_DIRECT_IO`), Linux 6.18 and before do not tell io_uring how
/// far a request that was done in part has come, and io_uring then repeats the rest of it at the place where all of it began.
/// Nor where the file system does not say what it is.
pub fn is_sound(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type != FUSE_SUPER_MAGIC)
}
