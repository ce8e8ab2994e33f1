//! Locks that mark a file as a disk in use: those of Thruway's block service and of qemu.
//!
//! The protocol is qemu's (block/file-posix.c). Each permission has a byte from [`USED`] on, locked by programs that use the
//! permission, and a byte from [`UNSHARED`] on, locked by programs that deny it to others.

#![allow(unsafe_code, reason = "rustix locks whole files only")]

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};

/// Offset of the lock bytes of permissions that the holder uses.
pub const USED: i64 = 100;
/// Offset of the lock bytes of permissions that the holder denies to others.
pub const UNSHARED: i64 = 200;
/// End of the lock bytes.
const END: i64 = 300;
/// Length of the shortest disk, in bytes.
const DISK_MIN: i64 = 512;

/// Lock of a byte range, for `fcntl(2)`. `kind` is `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
pub fn range(kind: libc::c_int, start: i64, len: i64) -> libc::flock {
    // SAFETY: an all-zero structure is a valid one.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_start, lock.l_len) = (kind as libc::c_short, start, len);
    lock
}

/// True if another open file holds a lock that conflicts with this one.
///
/// # Errors
/// As `fcntl(2)` with `F_OFD_GETLK`.
pub fn conflicts(file: impl AsFd, mut lock: libc::flock) -> std::io::Result<bool> {
    // SAFETY: the structure outlives the call, which writes a conflicting lock to it.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// True if an entry of a directory is a file that a program uses as a disk. False if that cannot be determined.
pub fn is_disk(dir: impl AsFd, name: &CStr) -> bool {
    let Ok(stat) = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) else { return false };
    // Only regular files are opened: opening a device may have side effects.
    if !FileType::from_raw_mode(stat.st_mode).is_file() || stat.st_size < DISK_MIN {
        return false;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
        .is_ok_and(|file| conflicts(file, range(libc::F_WRLCK, USED, END - USED)).unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_file_is_a_disk_while_somebody_holds_a_permission() {
        let dir = tempfile::tempdir().unwrap();
        let fd = File::open(dir.path()).unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, [0; 4096]).unwrap();
        assert!(!is_disk(&fd, c"disk") && !is_disk(&fd, c"none"));
        for byte in [USED, UNSHARED + 3] {
            let holder = File::open(&path).unwrap();
            let lock = range(libc::F_RDLCK, byte, 1);
            // SAFETY: the structure outlives the call.
            assert_eq!(unsafe { libc::fcntl(holder.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }, 0);
            assert!(is_disk(&fd, c"disk"));
        }
        assert!(!is_disk(&fd, c"disk"), "locks go with their files");
        let other = File::open(&path).unwrap();
        let lock = range(libc::F_RDLCK, 0, 50);
        // SAFETY: the structure outlives the call.
        assert_eq!(unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }, 0);
        assert!(!is_disk(&fd, c"disk"), "other programs' locks mean something else");
    }
}
