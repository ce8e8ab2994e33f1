//! Removes an entry with all beneath it.
//!
//! Iterative, with one descriptor whatever the depth: up again goes by `..`, checked against where the way down began.
//! Never follows a link and never leaves the file system. Keeps files in use as disks and directories of other file
//! systems, which are failures, and the entries that [`Remover::spares`] selects.

use crate::{disk_lock, listing};
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Names that are read from a directory before the first of them are removed.
const BATCH: usize = 64 << 10;

/// What became of a removal.
#[derive(Debug, Default)]
pub struct Removed {
    /// Entries removed, or, in a dry run, that would be.
    pub count: u64,
    /// Entries that are spared.
    pub left: u64,
    /// The first failure, with the path that it belongs to.
    pub failure: Option<(Vec<u8>, io::Error)>,
}

/// Selects entries by path. The second argument looks up whether the entry is a directory.
pub type Spares<'a> = dyn Fn(&[u8], &dyn Fn() -> bool) -> bool + 'a;

/// How to remove.
pub struct Remover<'a> {
    /// Whether the entry with this path is left alone, with all beneath it.
    pub spares: &'a Spares<'a>,
    /// Count, remove nothing.
    pub dry_run: bool,
    /// Set to stop.
    pub is_over: &'a AtomicBool,
    /// Time at which to stop with the error `Interrupted`; the rest is still there.
    pub until: Option<Instant>,
    /// Called with the path of each removed entry; in a dry run, of each entry that would be removed.
    pub on_removed: &'a dyn Fn(&[u8]),
}

/// For what is never over before its end.
pub static NEVER: AtomicBool = AtomicBool::new(false);

/// A directory that is being emptied.
struct Level {
    name: CString,
    names: Vec<CString>,
    /// There may be more names than have been read.
    more: bool,
    /// Something of it stays.
    stays: bool,
    /// Entries removed of the names read last.
    progress: bool,
    /// Device and inode number.
    identity: (u64, u64),
    /// Length of the path that leads here.
    path_len: usize,
}

impl Remover<'_> {
    /// Removes the entry `name` of `dir` with all beneath it. `below` is the path of `dir`, which paths begin with that
    /// [`Remover::spares`] is asked about.
    pub fn remove(&self, dir: impl AsFd, name: &CStr, below: &[u8]) -> Removed {
        let mut removed = Removed::default();
        let mut path = below.to_vec();
        let start = path.len();
        if let Err(e) = self.entry(dir.as_fd(), name, &mut path, &mut removed) {
            push(&mut path, start, name);
            removed.failure.get_or_insert((path, e));
        }
        removed
    }

    fn entry(&self, dir: impl AsFd, name: &CStr, path: &mut Vec<u8>, removed: &mut Removed) -> io::Result<()> {
        let top_len = path.len();
        push(path, top_len, name);
        if (self.spares)(path, &|| is_directory(&dir, name)) {
            removed.left += 1;
            return Ok(());
        }
        if self.plain(&dir, name, path, removed)? {
            return Ok(());
        }
        let device = rustix::fs::fstat(&dir)?.st_dev;
        let mut fd = open(&dir, name)?;
        let mut stack = vec![self.level(&fd, name, device, path.len())?];
        loop {
            if self.is_over.load(Ordering::SeqCst) {
                return Err(io::Error::other("cancelled"));
            }
            if self.until.is_some_and(|until| Instant::now() >= until) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let depth = stack.len();
            let top = stack.last_mut().expect("not empty");
            let Some(name) = top.names.pop() else {
                if top.more && top.progress {
                    self.fill(&fd, top)?;
                    continue;
                }
                let done = stack.pop().expect("not empty");
                let Some(above) = stack.last_mut() else {
                    self.directory(&dir, &done, path, removed);
                    return Ok(());
                };
                fd = up(&fd, above.identity)?;
                if self.directory(&fd, &done, path, removed) {
                    above.progress = true;
                } else {
                    above.stays = true;
                }
                path.truncate(above.path_len);
                continue;
            };
            let len = top.path_len;
            push(path, len, &name);
            if (self.spares)(path, &|| is_directory(&fd, &name)) {
                top.stays = true;
                removed.left += 1;
                path.truncate(len);
                continue;
            }
            match self.plain(&fd, &name, path, removed) {
                Ok(true) => top.progress = true,
                Ok(false) => match open(&fd, &name).and_then(|inner| {
                    let level = self.level(&inner, &name, device, path.len())?;
                    Ok((inner, level))
                }) {
                    Ok((inner, level)) => {
                        fd = inner;
                        stack.push(level);
                        debug_assert_eq!(stack.len(), depth + 1);
                        continue;
                    }
                    Err(e) => {
                        top.stays = true;
                        removed.failure.get_or_insert((path.clone(), e));
                    }
                },
                Err(e) => {
                    top.stays = true;
                    removed.failure.get_or_insert((path.clone(), e));
                }
            }
            path.truncate(len);
        }
    }

    /// Removes what is not a directory; false if it is one.
    fn plain(&self, dir: impl AsFd, name: &CStr, path: &[u8], removed: &mut Removed) -> io::Result<bool> {
        if disk_lock::is_disk(&dir, name) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "the file is in use as a disk"));
        }
        if self.dry_run {
            let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let is_dir = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir();
            if !is_dir {
                self.count(path, removed);
            }
            return Ok(!is_dir);
        }
        match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
            Ok(()) => self.count(path, removed),
            Err(rustix::io::Errno::NOENT) => {}
            Err(rustix::io::Errno::ISDIR | rustix::io::Errno::PERM) => {
                let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
                    return Err(rustix::io::Errno::PERM.into());
                }
                return Ok(false);
            }
            Err(e) => return Err(e.into()),
        }
        Ok(true)
    }

    /// Removes a directory that has been emptied; false if something of it stays.
    fn directory(&self, dir: impl AsFd, done: &Level, path: &[u8], removed: &mut Removed) -> bool {
        if done.stays {
            return false;
        }
        if !self.dry_run
            && let Err(e) = rustix::fs::unlinkat(dir, &done.name, AtFlags::REMOVEDIR)
        {
            removed.failure.get_or_insert((path[..done.path_len].to_vec(), e.into()));
            return false;
        }
        self.count(&path[..done.path_len], removed);
        true
    }

    fn count(&self, path: &[u8], removed: &mut Removed) {
        removed.count += 1;
        (self.on_removed)(path);
    }

    /// Begins to empty a directory.
    fn level(&self, fd: &OwnedFd, name: &CStr, device: u64, path_len: usize) -> io::Result<Level> {
        let stat = rustix::fs::fstat(fd)?;
        if stat.st_dev != device {
            let why = "it is a mounted file system or a subvolume";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
        let mut level = Level {
            name: name.into(),
            names: Vec::new(),
            more: false,
            stays: false,
            progress: false,
            identity: identity(&stat),
            path_len,
        };
        self.fill(fd, &mut level)?;
        Ok(level)
    }

    fn fill(&self, fd: &OwnedFd, level: &mut Level) -> io::Result<()> {
        (level.more, level.progress) = (false, false);
        for name in listing::names(fd)? {
            let name = name?;
            // A dry run sees the same names again.
            if level.names.len() >= BATCH && !self.dry_run {
                level.more = true;
                break;
            }
            level.names.push(name);
        }
        Ok(())
    }
}

/// True as well if that cannot be found out.
fn is_directory(dir: impl AsFd, name: &CStr) -> bool {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.map_or(true, |stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn open(dir: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// The directory above, if it still is the one that led here.
fn up(fd: &OwnedFd, expected: (u64, u64)) -> io::Result<OwnedFd> {
    let above = open(fd, c"..")?;
    if identity(&rustix::fs::fstat(&above)?) == expected {
        return Ok(above);
    }
    Err(io::Error::other("a directory was moved while it was being removed"))
}

fn push(path: &mut Vec<u8>, len: usize, name: &CStr) {
    path.truncate(len);
    if len > 0 {
        path.push(b'/');
    }
    path.extend_from_slice(name.to_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_tree_goes_whatever_its_depth_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let fd: OwnedFd = fs::File::open(dir.path()).unwrap().into();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/precious"), "").unwrap();
        let mut inner = rustix::fs::openat(&fd, c".", OFlags::RDONLY, Mode::empty()).unwrap();
        // Deeper than any path may be long, or any recursion deep.
        for _ in 0..5000 {
            rustix::fs::mkdirat(&inner, c"d", Mode::from_raw_mode(0o755)).unwrap();
            inner = open(&inner, c"d").unwrap();
        }
        rustix::fs::symlinkat(c"/", &inner, c"root").unwrap();
        std::os::unix::fs::symlink("../outside", dir.path().join("d/link")).unwrap();
        fs::write(dir.path().join("d/file"), "").unwrap();
        for dry_run in [true, false] {
            let removed = Remover { spares: &|_, _| false, dry_run, is_over: &NEVER, until: None, on_removed: &|_| () }
                .remove(&fd, c"d", b"");
            assert!(removed.failure.is_none(), "{removed:?}");
            assert_eq!((removed.count, removed.left), (5003, 0), "dry run: {dry_run}");
        }
        assert!(!dir.path().join("d").exists() && dir.path().join("outside/precious").exists());
    }

    #[test]
    fn nothing_more_goes_when_it_is_not_wanted_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let fd: OwnedFd = fs::File::open(dir.path()).unwrap().into();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/file"), "").unwrap();
        let is_over = AtomicBool::new(true);
        let removed =
            Remover { spares: &|_, _| false, dry_run: false, is_over: &is_over, until: None, on_removed: &|_| () }
                .remove(&fd, c"d", b"");
        assert!(removed.failure.is_some() && dir.path().join("d/file").exists());
    }

    #[test]
    fn what_is_spared_stays_with_its_directories() {
        let dir = tempfile::tempdir().unwrap();
        let fd: OwnedFd = fs::File::open(dir.path()).unwrap().into();
        for path in ["top/a/keep.log", "top/a/go", "top/b/go", "top/.snapshots/x"] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let spares = |path: &[u8], _: &dyn Fn() -> bool| path.ends_with(b".log") || path == b"top/.snapshots";
        let removed = Remover { spares: &spares, dry_run: false, is_over: &NEVER, until: None, on_removed: &|_| () }
            .remove(&fd, c"top", b"");
        assert!(removed.failure.is_none());
        assert_eq!((removed.count, removed.left), (3, 2));
        assert!(dir.path().join("top/a/keep.log").exists() && dir.path().join("top/.snapshots/x").exists());
        assert!(!dir.path().join("top/b").exists() && !dir.path().join("top/a/go").exists());
    }
}
