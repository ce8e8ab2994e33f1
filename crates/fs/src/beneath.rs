//! Paths beneath a root, resolved by the kernel (`openat2`, Linux 5.6): none leads out of it.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Most attempts to resolve a path while entries are renamed on this host. With 200,000 renames a second, a short path succeeds in one
/// of a few attempts.
const ATTEMPTS: usize = 100;

/// Which symbolic links a path may lead through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// None, the last component included.
    Never,
    /// Those that stay beneath the root.
    Inside,
}

impl Links {
    fn flags(self) -> ResolveFlags {
        let confined = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match self {
            Links::Never => confined | ResolveFlags::NO_SYMLINKS,
            Links::Inside => confined,
        }
    }
}

/// Opens a path beneath a root; an empty path is the root. Descriptors are closed on exec.
///
/// # Errors
/// As `openat2(2)`; `EXDEV` if the path leads out of the root, `ELOOP` if through a link that it may not, `EAGAIN` if entries are renamed
/// on this host all the time and the path has `..` in it.
pub fn open(root: impl AsFd, path: &[u8], flags: OFlags, links: Links) -> rustix::io::Result<OwnedFd> {
    let path = if path.is_empty() { Path::new(".") } else { Path::new(OsStr::from_bytes(path)) };
    let open = || rustix::fs::openat2(root.as_fd(), path, flags | OFlags::CLOEXEC, Mode::empty(), links.flags());
    // A path of many links takes milliseconds, so the attempts are few.
    for _ in 1..ATTEMPTS {
        match open() {
            // A rename elsewhere made the kernel unsure.
            Err(rustix::io::Errno::AGAIN) => {}
            other => return other,
        }
    }
    open()
}

/// The directory part and the last component of a path.
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

/// A path with a name behind it; either may be empty.
pub fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match (path, name) {
        (path, []) => path.to_vec(),
        ([], name) => name.to_vec(),
        (path, name) => [path, b"/", name].concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use std::fs::File;
    use std::os::unix::fs::symlink;

    #[test]
    fn no_path_leads_out_and_links_only_where_they_may() {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("root");
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(top.path().join("secret"), "").unwrap();
        symlink("a/b", root.join("inside")).unwrap();
        symlink("../secret", root.join("outside")).unwrap();
        symlink("/proc/self/fd", root.join("magic")).unwrap();
        let fd = File::open(&root).unwrap();
        let open = |path: &str, links| open(&fd, path.as_bytes(), OFlags::PATH, links).map(drop);
        for path in ["", "a", "a/b", "a/../a/b"] {
            assert_eq!(open(path, Links::Never), Ok(()), "{path}");
        }
        assert_eq!(open("inside", Links::Never), Err(Errno::LOOP));
        assert_eq!(open("inside", Links::Inside), Ok(()));
        for path in ["..", "../secret", "/etc", "outside", "a/../../secret", "magic/0"] {
            assert_eq!(open(path, Links::Inside), Err(Errno::XDEV), "{path}");
        }
    }

    #[test]
    fn paths_are_cut_and_put_together() {
        assert_eq!((split(b"a/b/c"), split(b"c")), ((&b"a/b"[..], &b"c"[..]), (&b""[..], &b"c"[..])));
        assert_eq!((join(b"a/b", b"c"), join(b"", b"c"), join(b"a", b"")), (b"a/b/c".into(), b"c".into(), b"a".into()));
    }
}
