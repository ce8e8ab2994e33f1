//! The sink's file system: everything happens beneath one root directory.
//!
//! Paths come from peers. They are resolved with `openat2` beneath the root, so that neither `..`
//! nor a symbolic link leads out of it; the last component is only ever named relative to a
//! directory opened that way, and never followed.

use crate::wire::Meta;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps};
use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// What temporary files of ours are called: `.NAME.tw-XXXXXXXX`.
const TEMP_MARK: &[u8] = b".tw-";
/// How journals are called: `.thruway-XXXXXXXX.journal`.
pub(crate) const JOURNAL_PREFIX: &[u8] = b".thruway-";
pub(crate) const JOURNAL_SUFFIX: &[u8] = b".journal";

/// Whether a name is one that sinks give to their own files. Such files are never copied.
pub(crate) fn is_own_name(name: &[u8]) -> bool {
    let is_temp = name.first() == Some(&b'.')
        && name.len() > 13
        && &name[name.len() - 12..name.len() - 8] == TEMP_MARK
        && name[name.len() - 8..].iter().all(u8::is_ascii_hexdigit);
    is_temp || (name.starts_with(JOURNAL_PREFIX) && name.ends_with(JOURNAL_SUFFIX))
}

/// A directory tree that is written to.
pub(crate) struct Tree {
    root: Arc<OwnedFd>,
    preserve: bool,
    umask: u32,
    privileged: bool,
}

/// Where an entry goes: its directory and its name there.
pub(crate) struct Place {
    pub(crate) dir: Arc<OwnedFd>,
    pub(crate) name: CString,
}

impl Tree {
    /// The tree beneath an open directory.
    pub(crate) fn new(root: Arc<OwnedFd>, preserve: bool) -> Tree {
        let umask = current_umask();
        Tree { root, preserve, umask, privileged: rustix::process::geteuid().is_root() }
    }

    pub(crate) fn root(&self) -> &Arc<OwnedFd> {
        &self.root
    }

    /// Opens a directory beneath the root, making what is missing of it.
    pub(crate) fn directory(&self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        if path.is_empty() {
            return Ok(Arc::clone(&self.root));
        }
        match self.open_directory(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let (parent, name) = split(path);
                let parent = self.directory(parent)?;
                match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                }
                self.open_directory(path)
            }
            other => other,
        }
    }

    fn open_directory(&self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Arc::new(openat_beneath(&self.root, path, flags)?))
    }

    /// The place of an entry; its directory is made if missing.
    pub(crate) fn place(&self, path: &[u8]) -> io::Result<Place> {
        let (parent, name) = split(path);
        Ok(Place { dir: self.directory(parent)?, name: CString::new(name)? })
    }

    /// Makes a directory that its owner can write to until its attributes are applied.
    pub(crate) fn make_directory(&self, path: &[u8]) -> io::Result<()> {
        let place = self.place(path)?;
        match rustix::fs::mkdirat(&place.dir, &place.name, Mode::from_raw_mode(0o777)) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::EXIST) => {
                // A directory, or a link to one that stays beneath the root, will do.
                self.open_directory(path).map(drop).map_err(|e| match e.kind() {
                    io::ErrorKind::NotADirectory => {
                        io::Error::new(e.kind(), "something that is not a directory is in the way")
                    }
                    _ => e,
                })
            }
            Err(e) => Err(e.into()),
        }
    }

    /// The permissions an entry gets.
    fn mode(&self, meta: &Meta) -> Mode {
        let bits = if self.preserve { meta.mode & 0o7777 } else { meta.mode & 0o777 & !self.umask };
        Mode::from_raw_mode(bits)
    }

    /// The mode to make a file with, and whether that is all its mode needs.
    ///
    /// A file is made with its final permissions only if that gives nobody more than the whole
    /// file will: special bits are set last, when owner and content are right.
    pub(crate) fn mode_at_creation(&self, meta: &Meta) -> (Mode, bool) {
        let wanted = self.mode(meta);
        let plain = wanted.as_raw_mode() & (0o7000 | self.umask) == 0;
        if plain { (wanted, true) } else { (Mode::from_raw_mode(0o600), false) }
    }

    /// Applies attributes to an open file or directory.
    pub(crate) fn apply(&self, fd: impl AsFd, meta: &Meta) -> io::Result<()> {
        self.apply_except_mode(fd.as_fd(), meta, false)
    }

    /// As [`Tree::apply`], leaving out a mode that is right already.
    pub(crate) fn apply_except_mode(&self, fd: BorrowedFd<'_>, meta: &Meta, mode_is_right: bool) -> io::Result<()> {
        if self.preserve {
            if self.privileged {
                rustix::fs::fchown(fd, uid(meta), gid(meta))?;
            } else {
                // A member of the group may give a file to it; if not, the group stays ours.
                let _ = rustix::fs::fchown(fd, None, gid(meta));
            }
        }
        if !mode_is_right {
            rustix::fs::fchmod(fd, self.mode(meta))?;
        }
        if self.preserve {
            crate::xattr::write(fd, c"", &meta.xattrs)?;
            rustix::fs::futimens(fd, &times(meta))?;
        }
        Ok(())
    }

    /// Makes a symbolic link, replacing what is not a directory.
    pub(crate) fn symlink(&self, path: &[u8], target: &[u8], meta: &Meta) -> io::Result<()> {
        let place = self.place(path)?;
        let target = CString::new(target)?;
        self.replace(&place, |dir, name| rustix::fs::symlinkat(&target, dir, name))?;
        self.apply_unopened(&place, meta)
    }

    /// Makes a special file, replacing what is not a directory.
    pub(crate) fn special(&self, path: &[u8], meta: &Meta, rdev: u64) -> io::Result<()> {
        let place = self.place(path)?;
        let kind = rustix::fs::FileType::from_raw_mode(meta.mode);
        let mode = self.mode(meta);
        self.replace(&place, |dir, name| rustix::fs::mknodat(dir, name, kind, mode, rdev))?;
        self.apply_unopened(&place, meta)
    }

    /// Gives an existing file another name, replacing what is not a directory.
    pub(crate) fn link(&self, path: &[u8], target: &[u8]) -> io::Result<()> {
        let (from, to) = (self.place(target)?, self.place(path)?);
        self.replace(&to, |dir, name| rustix::fs::linkat(&from.dir, &from.name, dir, name, AtFlags::empty()))
    }

    fn replace(&self, place: &Place, make: impl Fn(&OwnedFd, &CStr) -> rustix::io::Result<()>) -> io::Result<()> {
        match make(&place.dir, &place.name) {
            Err(rustix::io::Errno::EXIST) => {
                rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::empty())?;
                Ok(make(&place.dir, &place.name)?)
            }
            other => Ok(other?),
        }
    }

    /// Applies attributes to an entry that is not opened, because that would follow or block.
    fn apply_unopened(&self, place: &Place, meta: &Meta) -> io::Result<()> {
        if !self.preserve {
            return Ok(());
        }
        if self.privileged {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::chownat(&place.dir, &place.name, uid(meta), gid(meta), flags)?;
        }
        rustix::fs::utimensat(&place.dir, &place.name, &times(meta), AtFlags::SYMLINK_NOFOLLOW)?;
        if !meta.xattrs.is_empty() {
            crate::xattr::write(place.dir.as_fd(), &place.name, &meta.xattrs)?;
        }
        Ok(())
    }

    /// Removes from a directory what is not to be kept; returns how much that was.
    pub(crate) fn prune(&self, path: &[u8], keep: &HashSet<Vec<u8>>, dry_run: bool) -> io::Result<u64> {
        let dir = match if path.is_empty() { Ok(Arc::clone(&self.root)) } else { self.open_directory(path) } {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
            other => other?,
        };
        let mut removed = 0;
        for entry in rustix::fs::Dir::read_from(&dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let bytes = name.to_bytes();
            if matches!(bytes, b"." | b"..") || keep.contains(bytes) || is_own_name(bytes) {
                continue;
            }
            removed += remove_tree(&dir, name, dry_run)?;
        }
        Ok(removed)
    }
}

/// Removes an entry and all beneath it; returns how many entries that were.
fn remove_tree(dir: &OwnedFd, name: &CStr, dry_run: bool) -> io::Result<u64> {
    if !dry_run {
        match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) => return Ok(1),
            Err(rustix::io::Errno::ISDIR | rustix::io::Errno::PERM) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let inner = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(inner) => inner,
        Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) if dry_run => return Ok(1),
        Err(e) => return Err(e.into()),
    };
    let mut removed = 1;
    for entry in rustix::fs::Dir::read_from(&inner)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            removed += remove_tree(&inner, entry.file_name(), dry_run)?;
        }
    }
    if !dry_run {
        rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR)?;
    }
    Ok(removed)
}

/// Opens a path beneath a directory, never leaving it.
pub(crate) fn openat_beneath(root: impl AsFd, path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
    use std::os::unix::ffi::OsStrExt;
    let path = if path.is_empty() { Path::new(".") } else { Path::new(std::ffi::OsStr::from_bytes(path)) };
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    loop {
        match rustix::fs::openat2(root.as_fd(), path, flags, Mode::empty(), how) {
            // A rename elsewhere made the kernel unsure.
            Err(rustix::io::Errno::AGAIN) => {}
            Err(rustix::io::Errno::XDEV) => {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the path leads out of the export"));
            }
            other => return Ok(other?),
        }
    }
}

/// The directory part and the last component of a path.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

/// The temporary name of a file of a job.
pub(crate) fn temp_name(name: &CStr, job: &[u8; 16], key: &[u8; 16]) -> CString {
    // Names have at most 255 octets.
    const KEPT: usize = 255 - 1 - TEMP_MARK.len() - 8;
    let bytes = name.to_bytes();
    let tag: Vec<u8> = job.iter().zip(key).take(4).map(|(a, b)| a ^ b).collect();
    let mut out = vec![b'.'];
    out.extend_from_slice(&bytes[..bytes.len().min(KEPT)]);
    out.extend_from_slice(TEMP_MARK);
    out.extend_from_slice(crate::auth::to_hex(&tag).as_bytes());
    CString::new(out).expect("made of names and digits")
}

fn times(meta: &Meta) -> Timestamps {
    let mtime = Timespec { tv_sec: meta.mtime.0, tv_nsec: meta.mtime.1.min(999_999_999).into() };
    Timestamps { last_access: mtime, last_modification: mtime }
}

fn uid(meta: &Meta) -> Option<rustix::fs::Uid> {
    Some(rustix::fs::Uid::from_raw(meta.uid))
}

fn gid(meta: &Meta) -> Option<rustix::fs::Gid> {
    Some(rustix::fs::Gid::from_raw(meta.gid))
}

/// The process's umask, read without changing it.
fn current_umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o022)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(dir: &Path) -> Tree {
        Tree::new(Arc::new(fs::File::open(dir).unwrap().into()), true)
    }

    #[test]
    fn nothing_is_reached_outside_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir(&root).unwrap();
        fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, root.join("absolute")).unwrap();
        std::os::unix::fs::symlink("../outside", root.join("relative")).unwrap();
        let tree = tree(&root);
        for path in [&b"absolute/x"[..], b"relative/x"] {
            assert!(tree.place(path).is_err());
            assert!(tree.symlink(path, b"y", &Meta::default()).is_err());
            assert!(tree.make_directory(path).is_err());
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        // A link that stays inside is followed, as any copy program would.
        fs::create_dir(root.join("real")).unwrap();
        std::os::unix::fs::symlink("real", root.join("inside")).unwrap();
        tree.make_directory(b"inside/new").unwrap();
        assert!(root.join("real/new").is_dir());
    }

    #[test]
    fn missing_parents_are_made_and_things_in_the_way_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        tree.make_directory(b"a/b/c").unwrap();
        tree.make_directory(b"a/b/c").unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(tree.make_directory(b"file").unwrap_err().to_string().contains("in the way"));
    }

    #[test]
    fn pruning_removes_all_but_what_is_kept_and_own_files() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["keep", "gone", "sub/deep/file", ".x.tw-0123abcd"] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let keep = HashSet::from([b"keep".to_vec()]);
        let tree = tree(dir.path());
        assert_eq!(tree.prune(b"", &keep, true).unwrap(), 4);
        assert_eq!(tree.prune(b"", &keep, false).unwrap(), 4);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn own_names_are_told_from_others() {
        let name = temp_name(c"report.pdf", &[1; 16], &[2; 16]);
        assert!(is_own_name(name.to_bytes()));
        let long = CString::new(vec![b'a'; 255]).unwrap();
        assert!(temp_name(&long, &[1; 16], &[2; 16]).to_bytes().len() <= 255);
        for name in [&b"report.pdf"[..], b".tw-12345678", b".thruway", b".a.tw-1234567g"] {
            assert!(!is_own_name(name));
        }
        assert!(is_own_name(b".thruway-00aa.journal"));
    }
}
