//! Serving as another user than the one who starts the daemon.
//!
//! Root opens what only root can (ports, devices, keys), and then gives root up for good. What is opened later is
//! opened with the user's rights: the file system itself refuses what the user may not.

use nix::unistd;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use std::ffi::CString;
use std::io;
use std::path::Path;

/// A user of this machine.
#[derive(Debug, Clone)]
pub(super) struct User(unistd::User, Vec<unistd::Gid>);

impl User {
    /// Looks a user up by name.
    ///
    /// # Errors
    /// A sentence, if there is none of this name.
    pub(super) fn parse(name: &str) -> Result<User, String> {
        let failed = |e: &dyn std::fmt::Display| format!("looking for user '{name}': {e}");
        let found = unistd::User::from_name(name).map_err(|e| failed(&e))?;
        let found = found.ok_or_else(|| format!("there is no user '{name}' on this machine"))?;
        // Now, while whatever knows them can be asked (a confined daemon may not reach it).
        let text = CString::new(name).map_err(|e| failed(&e))?;
        let groups = unistd::getgrouplist(&text, found.gid).map_err(|e| failed(&e))?;
        Ok(User(found, groups))
    }

    /// Makes a directory the user's, if it is not there yet.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn make_directory(&self, path: &Path) -> io::Result<()> {
        match std::fs::create_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(e),
            Ok(()) => std::os::unix::fs::chown(path, Some(self.0.uid.as_raw()), Some(self.0.gid.as_raw())),
        }
    }

    /// Makes a directory in a directory of root's the user's, with the files in it that `is_ours` knows by name: what a daemon
    /// of root's has left there is to be found, and kept up. What is in the user's own directory is the user's to make.
    ///
    /// # Errors
    /// If it cannot be made, or is somebody else's.
    pub(super) fn take_over(&self, parent: &Path, name: &str, is_ours: impl Fn(&[u8]) -> bool) -> io::Result<()> {
        // By descriptors and never through links: a user who may write there must not redirect root.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = rustix::fs::open(parent, flags, Mode::empty())?;
        if rustix::fs::fstat(&parent)?.st_uid != 0 || !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o700)) {
            Err(rustix::io::Errno::EXIST) | Ok(()) => {}
            Err(e) => return Err(e.into()),
        }
        let directory = rustix::fs::openat(&parent, name, flags, Mode::empty())?;
        let owner = rustix::fs::fstat(&directory)?.st_uid;
        if owner == self.0.uid.as_raw() {
            return Ok(());
        }
        if owner != 0 {
            return Err(io::Error::other(format!("{name} belongs to user {owner}, not to '{}'", self.0.name)));
        }
        for name in thruway_fs::listing::names(&directory)? {
            let name = name?;
            if is_ours(name.to_bytes()) {
                rustix::fs::chownat(&directory, name, self.uid(), self.gid(), AtFlags::SYMLINK_NOFOLLOW)?;
            }
        }
        Ok(rustix::fs::fchown(&directory, self.uid(), self.gid())?)
    }

    fn uid(&self) -> Option<Uid> {
        Some(Uid::from_raw(self.0.uid.as_raw()))
    }

    fn gid(&self) -> Option<Gid> {
        Some(Gid::from_raw(self.0.gid.as_raw()))
    }

    /// Becomes this user, with all threads (the C library sees to that) and for good.
    ///
    /// # Errors
    /// A sentence, if the process may not.
    pub(super) fn become_it(&self) -> Result<(), String> {
        let unistd::User { name, uid, gid, .. } = &self.0;
        if unistd::Uid::current() == *uid && unistd::Uid::effective() == *uid {
            return Ok(());
        }
        let failed = |what: &str, e: nix::Error| format!("becoming user '{name}': {what}: {e}");
        unistd::setgroups(&self.1).map_err(|e| failed("its groups (only root may)", e))?;
        unistd::setgid(*gid).map_err(|e| failed("its group", e))?;
        unistd::setuid(*uid).map_err(|e| failed("its number", e))?;
        if !uid.is_root() && (unistd::setuid(unistd::Uid::from_raw(0)).is_ok() || unistd::Uid::effective() != *uid) {
            return Err(format!("becoming user '{name}': root could be regained"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name() {
        assert!(User::parse("root").unwrap().0.uid.is_root());
        assert!(!User::parse("nobody").unwrap().0.uid.is_root());
        assert!(User::parse("no such user").unwrap_err().contains("no user 'no such user'"));
    }
}
