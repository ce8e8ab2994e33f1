//! Serving as another user than the one who starts the daemon.
//!
//! Root opens what only root can (ports, devices, keys), and then gives root up for good. What is opened later is
//! opened with the user's rights: the file system itself refuses what the user may not.

use nix::unistd;
use std::ffi::CString;
use std::io;
use std::path::Path;

/// A user of this machine.
#[derive(Debug, Clone)]
pub struct User(unistd::User);

impl User {
    /// Looks a user up by name.
    ///
    /// # Errors
    /// A sentence, if there is none of this name.
    pub fn parse(name: &str) -> Result<User, String> {
        let found = unistd::User::from_name(name).map_err(|e| format!("looking for user '{name}': {e}"))?;
        found.map(User).ok_or_else(|| format!("there is no user '{name}' on this machine"))
    }

    /// Makes a directory the user's, if it is not there yet.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn make_directory(&self, path: &Path) -> io::Result<()> {
        match std::fs::create_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
            other => other?,
        }
        std::os::unix::fs::chown(path, Some(self.0.uid.as_raw()), Some(self.0.gid.as_raw()))
    }

    /// Becomes this user, with all threads (the C library sees to that) and for good.
    ///
    /// # Errors
    /// A sentence, if the process may not.
    pub fn become_it(&self) -> Result<(), String> {
        let unistd::User { name, uid, gid, .. } = &self.0;
        if unistd::Uid::current() == *uid && unistd::Uid::effective() == *uid {
            return Ok(());
        }
        let failed = |what: &str, e: nix::Error| format!("becoming user '{name}': {what}: {e}");
        let text = CString::new(name.as_str()).map_err(|e| format!("becoming user '{name}': {e}"))?;
        unistd::initgroups(&text, *gid).map_err(|e| failed("its groups (only root may)", e))?;
        unistd::setgid(*gid).map_err(|e| failed("its group", e))?;
        unistd::setuid(*uid).map_err(|e| failed("its number", e))?;
        if !uid.is_root() && (unistd::setuid(unistd::Uid::from_raw(0)).is_ok() || unistd::Uid::effective() != *uid) {
            return Err(format!("becoming user '{name}': root could be had back"));
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
