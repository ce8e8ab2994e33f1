//! Acting as another user: what a server does to files for a client is done with the rights of that client's user.
//!
//! Only for the file system, and only on the calling thread (`setfsuid(2)`): everything else that the thread does, and what
//! other threads do, keeps the rights of the process.

#![allow(
    unsafe_code,
    reason = "rustix has no form of these calls for one thread, or none without its calls for threads"
)]

use rustix::fs::Access;
use rustix::io::Errno;
use std::cell::OnceCell;
use std::os::fd::{AsFd, AsRawFd};

/// A user and groups.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Credentials {
    /// User.
    pub uid: u32,
    /// The group of new files.
    pub gid: u32,
    /// More groups.
    pub groups: Vec<u32>,
}

impl Credentials {
    /// Those of this process.
    pub fn own() -> Credentials {
        let groups = rustix::process::getgroups().unwrap_or_default();
        Credentials {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: groups.into_iter().map(rustix::process::Gid::as_raw).collect(),
        }
    }

    /// Whether it has this group.
    pub fn has_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

/// Whether this process may act as others: it has `CAP_SETUID` and `CAP_SETGID`.
pub fn can_act_as_others() -> bool {
    /// `CAP_SETGID` and `CAP_SETUID` of `linux/capability.h`.
    const NEEDED: u32 = 1 << 6 | 1 << 7;
    /// `_LINUX_CAPABILITY_VERSION_3`: two words for each set.
    const VERSION: u32 = 0x2008_0522;
    // Not by rustix: with its calls for threads it asks the vDSO for `getcpu` whenever it first asks it for the time, and panics
    // where there is none (user-mode Linux).
    let mut header = [VERSION, 0];
    // Effective, permitted, inheritable; twice.
    let mut sets = [0_u32; 6];
    // SAFETY: the header has two words, and this version of it asks for six.
    let rc = unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) };
    rc == 0 && sets[0] & NEEDED == NEEDED
}

thread_local! {
    /// Those that the thread returns to.
    static OWN: OnceCell<Credentials> = const { OnceCell::new() };
}

/// Returns to the thread's own credentials.
struct Return<'a> {
    own: &'a Credentials,
    taken: &'a Credentials,
}

impl Drop for Return<'_> {
    fn drop(&mut self) {
        if change(self.taken, self.own).is_err() {
            // What this thread did next it would do as somebody else.
            std::process::abort();
        }
    }
}

/// Does something to files as this user.
///
/// # Errors
/// If the credentials cannot be taken; then nothing has been done. `EPERM` without the rights to act as others.
pub fn act_as<T>(who: &Credentials, action: impl FnOnce() -> T) -> rustix::io::Result<T> {
    OWN.with(|own| {
        let own = own.get_or_init(Credentials::own);
        let _return = Return { own, taken: who };
        change(own, who)?;
        Ok(action())
    })
}

/// Gives the thread other credentials for the file system. Calls of the kernel for what is the same are saved: each copies all
/// credentials.
fn change(from: &Credentials, to: &Credentials) -> rustix::io::Result<()> {
    if from.groups != to.groups {
        // SAFETY: the list has as many groups as it says. Unlike the C library's function, the call is for this thread only.
        let rc = unsafe { libc::syscall(libc::SYS_setgroups, to.groups.len(), to.groups.as_ptr()) };
        if rc != 0 {
            return Err(last_error());
        }
    }
    // These two say what was there before; whether they did anything, only a second one does, of a user that does not exist.
    if from.gid != to.gid {
        // SAFETY: the call touches no memory.
        let taken = unsafe { [libc::setfsgid(to.gid), libc::setfsgid(u32::MAX)] };
        if taken[1].cast_unsigned() != to.gid {
            return Err(Errno::PERM);
        }
    }
    if from.uid != to.uid {
        // SAFETY: as above.
        let taken = unsafe { [libc::setfsuid(to.uid), libc::setfsuid(u32::MAX)] };
        if taken[1].cast_unsigned() != to.uid {
            return Err(Errno::PERM);
        }
    }
    Ok(())
}

/// Whether the thread has these rights to an open file, also one that is open only as a name (`O_PATH`).
///
/// # Errors
/// `EACCES` if it has not all of them; else those of `faccessat2(2)`, which Linux has since 5.8.
pub fn check_access(file: impl AsFd, rights: Access) -> rustix::io::Result<()> {
    let (fd, flags) = (file.as_fd().as_raw_fd(), libc::AT_EMPTY_PATH | libc::AT_EACCESS);
    // SAFETY: the name is empty, and ends with its NUL.
    let rc = unsafe { libc::syscall(libc::SYS_faccessat2, fd, c"".as_ptr(), rights.bits(), flags) };
    if rc == 0 { Ok(()) } else { Err(last_error()) }
}

/// Gives the calling thread a mask of its own for the permissions of new files (`umask(2)`), an empty one, and a working
/// directory of its own with it: what files it makes have the permissions that it asks for.
///
/// # Errors
/// As `unshare(2)`.
pub fn without_umask() -> rustix::io::Result<()> {
    // SAFETY: the thread's descriptors and memory stay shared; only its working directory, root and mask become its own.
    if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
        return Err(last_error());
    }
    rustix::process::umask(rustix::fs::Mode::empty());
    Ok(())
}

fn last_error() -> Errno {
    Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Groups of this process: its effective group and the supplementary ones.
pub fn own_groups() -> Vec<u32> {
    let groups = rustix::process::getgroups().unwrap_or_default();
    groups.into_iter().chain([rustix::process::getegid()]).map(|group| group.as_raw()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn files_are_made_and_refused_as_the_user() {
        if !can_act_as_others() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (open, closed) = (dir.path().join("open"), dir.path().join("closed"));
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        fs::create_dir(&closed).unwrap();
        std::os::unix::fs::chown(&closed, None, Some(7001)).unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o770)).unwrap();
        let user = |groups: &[u32]| Credentials { uid: 65_534, gid: 65_534, groups: groups.into() };

        act_as(&user(&[]), || fs::write(open.join("file"), "")).unwrap().unwrap();
        let made = fs::metadata(open.join("file")).unwrap();
        assert_eq!((made.uid(), made.gid()), (65_534, 65_534));
        let refused = act_as(&user(&[]), || fs::write(closed.join("file"), "")).unwrap();
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        act_as(&user(&[7000, 7001]), || fs::write(closed.join("file"), "")).unwrap().unwrap();
        let closed_dir = fs::File::open(&closed).unwrap();
        let check = |groups: &[u32], rights| act_as(&user(groups), || check_access(&closed_dir, rights)).unwrap();
        assert_eq!(check(&[7001], Access::READ_OK | Access::WRITE_OK), Ok(()));
        assert_eq!(check(&[7000], Access::READ_OK), Err(Errno::ACCESS));
        // And afterwards as before, also after a panic.
        fs::write(closed.join("own"), "").unwrap();
        let panicked = std::panic::catch_unwind(|| act_as(&user(&[]), || panic!("within")));
        assert!(panicked.is_err());
        fs::write(closed.join("own"), "again").unwrap();
        assert_eq!(fs::metadata(closed.join("own")).unwrap().uid(), 0);
    }
}
