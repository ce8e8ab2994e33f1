//! Directories of this user that are made writable for a time.

use crate::credentials;
use rustix::fs::{Access, AtFlags, Mode};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// True if mode and access list of a directory let this process make and remove entries in it.
pub fn is_writable(dir: impl AsFd) -> bool {
    rustix::fs::accessat(dir, c".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).is_ok()
}

/// Makes a directory of this user readable and writable for its owner, and returns the mode that it had. The descriptor may be opened as
/// a path.
///
/// `None` if the directory was so before, if it belongs to another user, or if the change fails. Also for a set-group-id bit of a
/// foreign group, which the kernel would drop.
pub fn unlock(dir: impl AsFd) -> Option<u32> {
    let stat = rustix::fs::fstat(&dir).ok()?;
    let mode = stat.st_mode & 0o7777;
    if stat.st_uid != rustix::process::geteuid().as_raw() || mode & 0o700 == 0o700 {
        return None;
    }
    if mode & 0o2000 != 0 && !credentials::own_groups().contains(&stat.st_gid) {
        return None;
    }
    set_mode(dir, mode | 0o700).ok()?;
    Some(mode)
}

/// Gives a directory the mode back that [`unlock`] has returned, unless somebody has changed it since.
///
/// # Errors
/// As `chmod(2)`.
pub fn lock_again(dir: impl AsFd, mode: u32) -> io::Result<()> {
    if rustix::fs::fstat(&dir)?.st_mode & 0o7777 == mode | 0o700 {
        set_mode(dir, mode)?;
    }
    Ok(())
}

/// A descriptor opened as a path has no `fchmod`.
fn set_mode(dir: impl AsFd, mode: u32) -> rustix::io::Result<()> {
    rustix::fs::chmod(format!("/proc/self/fd/{}", dir.as_fd().as_raw_fd()), Mode::from_raw_mode(mode))
}
