//! Locks that mark a file as a disk in use: those of Thruway's block service and of qemu.
//!
//! The protocol is qemu's (block/file-posix.c): a locked byte from [`USED`] on is a permission that its holder uses, one
//! from [`UNSHARED`] on a permission that it does not share.

#![allow(unsafe_code, reason = "rustix locks whole files only")]

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};

/// First byte of the permissions that a holder uses.
pub const USED: i64 = 100;
/// First byte of the permissions that a holder does not share.
pub const UNSHARED: i64 = 200;
/// Behind the last byte of the protocol.
const END: i64 = 300;
/// The shortest disk, in bytes.
const DISK_MIN: i64 = 512;

/// The locks of a byte range, for `fcntl(2)`.
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
    // SAFETY: the structure outlives the call, which writes the holder of such a lock to it.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// True if an entry of a directory is a file that a program uses as a disk. False if that cannot be determined.
pub fn is_disk(dir: impl AsFd, name: &CStr) -> bool {
    let Ok(stat) = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) else { return false };
    // Only files are opened: opening a device may have effects.
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
