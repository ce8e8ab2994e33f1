//! Memory files that two processes share and neither can shrink: what a peer makes smaller would end the process that uses it.

use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Whether this process may make a file so long: beyond its limit (`RLIMIT_FSIZE`, which holds for memory files as well) it would be
/// ended by a signal (`SIGXFSZ`).
#[must_use]
pub fn may_be_long(len: u64) -> bool {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current.is_none_or(|limit| len <= limit)
}

/// Makes a memory file of `len` bytes that keeps its size. `name` is what `/proc` shows.
///
/// # Errors
/// Those of `memfd_create(2)`, `ftruncate(2)` and `fcntl(2)`; `EFBIG` beyond the process's limit on the length of files.
pub fn create(name: &str, len: u64) -> io::Result<OwnedFd> {
    if !may_be_long(len) {
        return Err(rustix::io::Errno::FBIG.into());
    }
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)?;
    Ok(fd)
}

/// The bytes of a memory file that a peer has made, if it is safe to map.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if it is no memory file, is not sealed, or is of huge pages, of which there may be too few when they
/// are used.
pub fn check(fd: impl AsFd) -> io::Result<u64> {
    // Fails for all but memory files.
    let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| invalid("the peer's memory is no memory file"))?;
    if !seals.contains(SEALS) {
        return Err(invalid("the peer's memory is not sealed"));
    }
    // Huge pages are of another file system.
    if rustix::fs::fstatfs(&fd)?.f_type != libc::TMPFS_MAGIC {
        return Err(invalid("the peer's memory is of huge pages"));
    }
    u64::try_from(rustix::fs::fstat(&fd)?.st_size).map_err(|_| invalid("the peer's memory has no legal size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_could_end_this_process_is_refused() {
        let refused = |fd: OwnedFd| check(fd).unwrap_err().to_string();
        let memfd = |seals: SealFlags| {
            let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&fd, 8192).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        assert_eq!(check(memfd(SEALS)).unwrap(), 8192);
        assert_eq!(check(create("test", 4096).unwrap()).unwrap(), 4096);
        for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            assert!(refused(memfd(SEALS - missing)).contains("not sealed"), "{missing:?}");
        }
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        assert!(refused(pipe).contains("no memory file"));
    }
}
