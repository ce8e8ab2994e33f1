//! Removes an entry with all beneath it.
//!
//! Iterative, with the same number of descriptors at any depth: the way up is `..`, compared with the directory of the way down.
//! Follows no links and stays in the file system. Files in use as disks and directories of other file systems stay, and are
//! failures. Entries that [`Remover::spares`] selects stay, too. Directories of this user are made writable if
//! [`Remover::may_unlock`] is set; those that stay get their mode back.

use crate::disk_lock;
use crate::listing::{self, BUFFER_LEN};
use crate::writable;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Result of a removal.
#[derive(Debug, Default)]
pub struct Removed {
    /// Entries removed, or, in a dry run, that would be.
    pub count: u64,
    /// Entries that are spared.
    pub left: u64,
    /// The first failure, with the path that it belongs to.
    pub failure: Option<(Vec<u8>, io::Error)>,
}

impl Removed {
    fn fail(&mut self, remover: &Remover<'_>, path: &[u8], error: impl Into<io::Error>) {
        let error = error.into();
        (remover.on_failed)(path, &error);
        self.failure.get_or_insert_with(|| (path.to_vec(), error));
    }
}

/// Selects entries by path. The second argument looks up whether the entry is a directory.
pub type Spares<'a> = dyn Fn(&[u8], &dyn Fn() -> bool) -> bool + 'a;

/// Parameters of a removal.
pub struct Remover<'a> {
    /// True for the path of an entry that stays, with all beneath it.
    pub spares: &'a Spares<'a>,
    /// Count, remove nothing.
    pub dry_run: bool,
    /// Make directories of this user readable and writable where that is needed.
    pub may_unlock: bool,
    /// Set to stop.
    pub is_over: &'a AtomicBool,
    /// Called with the path of each removed entry; in a dry run, of each entry that would be removed.
    pub on_removed: &'a dyn Fn(&[u8]),
    /// Called with the path and the error of each entry that cannot be removed. A directory that is not empty for that is no failure
    /// of its own.
    pub on_failed: &'a dyn Fn(&[u8], &io::Error),
}

impl Remover<'_> {
    /// Removes the entry `name` of `dir` with all beneath it. `below` is the path of `dir`, which paths begin with that
    /// [`Remover::spares`] is asked about.
    pub fn remove(&self, dir: impl AsFd, name: &CStr, below: &[u8]) -> Removed {
        let mut removal = match Removal::new(dir, name, below) {
            Ok(removal) => removal,
            Err(e) => {
                let mut removed = Removed::default();
                removed.fail(self, below, e);
                return removed;
            }
        };
        removal.run(self, None);
        std::mem::take(&mut removal.removed)
    }
}

/// A removal that can be done in parts. Holds two descriptors.
pub struct Removal {
    /// The directory of the entry.
    above: OwnedFd,
    above_mount: Mount,
    name: CString,
    /// The directory at the top of the stack.
    fd: Option<OwnedFd>,
    stack: Vec<Level>,
    path: Vec<u8>,
    state: State,
    removed: Removed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    /// In the directories of the stack.
    Inside,
    Done,
}

/// A file system at one of its mount points. Subvolumes have device numbers of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mount {
    device: (u32, u32),
    /// `None` before Linux 5.8.
    id: Option<u64>,
}

impl Mount {
    fn of(stat: &Statx) -> Mount {
        let has_id = stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
        Mount { device: (stat.stx_dev_major, stat.stx_dev_minor), id: has_id.then_some(stat.stx_mnt_id) }
    }

    fn require(self, stat: &Statx) -> io::Result<()> {
        if Mount::of(stat) == self {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "it is a mounted file system or a subvolume"))
    }
}

/// A directory that is being emptied.
struct Level {
    name: CString,
    names: Vec<CString>,
    /// Position of the next names in the directory.
    position: u64,
    /// The end of the directory has not been read.
    more: bool,
    /// How often names were read in this pass. File systems may leave out names if others are removed in between.
    reads: usize,
    is_first_pass: bool,
    /// Something was removed in this pass.
    progress: bool,
    /// An entry of it stays.
    stays: bool,
    /// Inode number.
    inode: u64,
    /// Length of the path that leads here.
    path_len: usize,
    /// The mode that the directory had before it was made writable.
    mode: Option<u32>,
}

impl Removal {
    /// A removal of the entry `name` of `dir` with all beneath it; see [`Remover::remove`].
    ///
    /// # Errors
    /// If no descriptor can be made, or `dir` cannot be examined.
    pub fn new(dir: impl AsFd, name: &CStr, below: &[u8]) -> io::Result<Removal> {
        let above = dir.as_fd().try_clone_to_owned()?;
        let above_mount = Mount::of(&examine(&above, c"")?);
        let mut path = below.to_vec();
        let len = path.len();
        push(&mut path, len, name);
        Ok(Removal {
            above,
            above_mount,
            name: name.into(),
            fd: None,
            stack: Vec::new(),
            path,
            state: State::New,
            removed: Removed::default(),
        })
    }

    /// The result so far.
    pub fn removed(&self) -> &Removed {
        &self.removed
    }

    /// Continues until the end or until this time, but at least for one entry. True at the end.
    pub fn run(&mut self, remover: &Remover<'_>, until: Option<Instant>) -> bool {
        if self.state == State::New {
            self.state = State::Inside;
            if let Err(e) = self.enter(remover) {
                self.removed.fail(remover, &self.path, e);
            }
        }
        while self.state == State::Inside {
            if self.stack.is_empty() {
                self.state = State::Done;
            } else if remover.is_over.load(Ordering::SeqCst) {
                self.removed.fail(remover, &self.path, io::Error::other("cancelled"));
                self.state = State::Done;
            } else if let Err(e) = self.step(remover) {
                self.removed.fail(remover, &self.path, e);
                self.state = State::Done;
            } else if until.is_some_and(|until| Instant::now() >= until) {
                return false;
            }
        }
        self.abandon();
        true
    }

    /// Gives directories that stay their modes back, up to one that was moved.
    fn abandon(&mut self) {
        while let (Some(level), Some(fd)) = (self.stack.pop(), self.fd.take()) {
            level.lock_again(&fd);
            self.fd = self.stack.last().and_then(|above| up(&fd, self.above_mount, above.inode).ok());
        }
    }

    /// Removes the entry itself, or begins to empty it.
    fn enter(&mut self, remover: &Remover<'_>) -> io::Result<()> {
        let (above, name) = (&self.above, &self.name);
        if (remover.spares)(&self.path, &|| is_directory(above, name)) {
            self.removed.left += 1;
            return Ok(());
        }
        if plain(remover, above, name, (&self.path, self.above_mount), &mut self.removed)? {
            return Ok(());
        }
        let (level, fd) = self.descend(remover, above, name)?;
        self.stack.push(level);
        self.fd = Some(fd);
        Ok(())
    }

    /// Opens a directory to empty it.
    fn descend(&self, remover: &Remover<'_>, dir: &OwnedFd, name: &CStr) -> io::Result<(Level, OwnedFd)> {
        let (fd, mode) = match open(dir, name) {
            Err(e) if is_refused(&e) && remover.may_unlock => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let found = rustix::fs::openat(dir, name, flags, Mode::empty())?;
                self.above_mount.require(&examine(&found, c"")?)?;
                let Some(mode) = writable::unlock(&found) else { return Err(e) };
                // By its descriptor: another directory may have its name by now.
                let opened = open(&found, c".");
                (opened.inspect_err(|_| drop(writable::lock_again(&found, mode)))?, Some(mode))
            }
            other => (other?, None),
        };
        let level = self.level(&fd, name);
        if let (Err(_), Some(mode)) = (&level, mode) {
            let _ = writable::lock_again(&fd, mode);
        }
        Ok((Level { mode, ..level? }, fd))
    }

    /// Begins to empty a directory.
    fn level(&self, fd: &OwnedFd, name: &CStr) -> io::Result<Level> {
        let stat = examine(fd, c"")?;
        self.above_mount.require(&stat)?;
        let mut level = Level {
            name: name.into(),
            names: Vec::new(),
            position: 0,
            more: true,
            reads: 0,
            is_first_pass: self.stack.last().is_none_or(|above| above.is_first_pass),
            progress: false,
            stays: false,
            inode: stat.stx_ino,
            path_len: self.path.len(),
            mode: None,
        };
        level.fill(fd)?;
        Ok(level)
    }

    /// Processes one name of the directory at the top of the stack, or its end.
    fn step(&mut self, remover: &Remover<'_>) -> io::Result<()> {
        let top = self.stack.last_mut().expect("checked by the caller");
        let fd = self.fd.as_ref().expect("open while the stack has levels");
        self.path.truncate(top.path_len);
        let Some(name) = top.names.pop() else {
            if top.more {
                return top.fill(fd);
            }
            if top.reads > 1 && top.progress && !remover.dry_run {
                (top.position, top.more, top.reads) = (0, true, 0);
                (top.progress, top.is_first_pass) = (false, false);
                return top.fill(fd);
            }
            return self.leave(remover);
        };
        push(&mut self.path, top.path_len, &name);
        if (remover.spares)(&self.path, &|| is_directory(fd, &name)) {
            top.stays = true;
            self.removed.left += u64::from(top.is_first_pass);
            return Ok(());
        }
        let plain = match plain(remover, fd, &name, (&self.path, self.above_mount), &mut self.removed) {
            Err(e) if is_refused(&e) && remover.may_unlock && top.unlock(fd) => {
                plain(remover, fd, &name, (&self.path, self.above_mount), &mut self.removed)
            }
            other => other,
        };
        match plain {
            Ok(true) => {
                top.progress = true;
                return Ok(());
            }
            Ok(false) => {}
            Err(e) => {
                top.stays = true;
                self.removed.fail(remover, &self.path, e);
                return Ok(());
            }
        }
        match self.descend(remover, self.fd.as_ref().expect("as before"), &name) {
            Ok((level, inner)) => {
                self.stack.push(level);
                self.fd = Some(inner);
            }
            Err(e) => {
                self.stack.last_mut().expect("as before").stays = true;
                self.removed.fail(remover, &self.path, e);
            }
        }
        Ok(())
    }

    /// Removes the directory at the top of the stack, which has been emptied, and goes up.
    fn leave(&mut self, remover: &Remover<'_>) -> io::Result<()> {
        let done = self.stack.pop().expect("checked by the caller");
        let emptied = self.fd.take().expect("open while the stack has levels");
        if let Some(above) = self.stack.last() {
            self.fd = Some(up(&emptied, self.above_mount, above.inode).inspect_err(|_| done.lock_again(&emptied))?);
        }
        let dir = self.fd.as_ref().unwrap_or(&self.above);
        let remove = || rustix::fs::unlinkat(dir, &done.name, AtFlags::REMOVEDIR);
        let mut is_gone = !done.stays;
        if is_gone && !remover.dry_run {
            let removed = match remove() {
                Err(Errno::ACCESS)
                    if remover.may_unlock && self.stack.last_mut().is_some_and(|above| above.unlock(dir)) =>
                {
                    remove()
                }
                other => other,
            };
            if let Err(e) = removed {
                self.removed.fail(remover, &self.path, e);
                is_gone = false;
            }
        }
        if is_gone {
            count(remover, &self.path, &mut self.removed);
        }
        if !is_gone || remover.dry_run {
            done.lock_again(&emptied);
        }
        if let Some(above) = self.stack.last_mut() {
            above.progress |= is_gone;
            above.stays |= !is_gone;
        }
        Ok(())
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Level {
    /// Makes the directory writable. False if it was, or is not this user's.
    fn unlock(&mut self, fd: &OwnedFd) -> bool {
        let mode = writable::unlock(fd);
        self.mode = self.mode.or(mode);
        mode.is_some()
    }

    /// Gives the directory the mode that it had.
    fn lock_again(&self, fd: &OwnedFd) {
        if let Some(mode) = self.mode {
            // It fails on a file system that has become read-only, and the removal has failed as well.
            let _ = writable::lock_again(fd, mode);
        }
    }

    /// Reads the next names.
    fn fill(&mut self, fd: &OwnedFd) -> io::Result<()> {
        rustix::fs::seek(fd, SeekFrom::Start(self.position))?;
        let mut buffer = Vec::<u8>::with_capacity(BUFFER_LEN);
        while self.more && self.names.is_empty() {
            let read = listing::read_some(fd, buffer.spare_capacity_mut(), |name| self.names.push(name))?;
            self.more = read.is_some();
            self.position = read.unwrap_or(self.position);
        }
        self.reads += usize::from(!self.names.is_empty());
        Ok(())
    }
}

/// True for an error that may end when the directory is made writable.
fn is_refused(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EACCES)
}

/// Removes an entry other than a directory. False for a directory.
fn plain(
    remover: &Remover<'_>,
    dir: &OwnedFd,
    name: &CStr,
    (path, mount): (&[u8], Mount),
    removed: &mut Removed,
) -> io::Result<bool> {
    if disk_lock::is_disk(dir, name) {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, "the file is in use as a disk"));
    }
    if remover.dry_run {
        let stat = examine(dir, name)?;
        if FileType::from_raw_mode(stat.stx_mode.into()).is_dir() {
            return Ok(false);
        }
        mount.require(&stat)?;
        count(remover, path, removed);
        return Ok(true);
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) => count(remover, path, removed),
        Err(Errno::NOENT) => {}
        Err(Errno::BUSY) => {
            mount.require(&examine(dir, name)?)?;
            return Err(Errno::BUSY.into());
        }
        Err(Errno::ISDIR | Errno::PERM) => {
            let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if !FileType::from_raw_mode(stat.st_mode).is_dir() {
                return Err(Errno::PERM.into());
            }
            return Ok(false);
        }
        Err(e) => return Err(e.into()),
    }
    Ok(true)
}

fn count(remover: &Remover<'_>, path: &[u8], removed: &mut Removed) {
    removed.count += 1;
    (remover.on_removed)(path);
}

/// Type, inode number and mount of an open file, or of the one with this name in a directory.
fn examine(dir: impl AsFd, name: &CStr) -> io::Result<Statx> {
    let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
    Ok(rustix::fs::statx(dir, name, flags, StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID)?)
}

/// Also true if the lookup fails.
fn is_directory(dir: impl AsFd, name: &CStr) -> bool {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.map_or(true, |stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

fn open(dir: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// The directory above, if it still is the one that led here.
fn up(fd: &OwnedFd, mount: Mount, inode: u64) -> io::Result<OwnedFd> {
    let above = open(fd, c"..")?;
    let stat = examine(&above, c"")?;
    if Mount::of(&stat) == mount && stat.stx_ino == inode {
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

    static NEVER: AtomicBool = AtomicBool::new(false);

    #[test]
    fn a_tree_goes_whatever_its_depth_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let fd: OwnedFd = fs::File::open(dir.path()).unwrap().into();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/precious"), "").unwrap();
        let mut inner = rustix::fs::openat(&fd, c".", OFlags::RDONLY, Mode::empty()).unwrap();
        // Deeper than the limits of paths and of recursion.
        for _ in 0..5000 {
            rustix::fs::mkdirat(&inner, c"d", Mode::from_raw_mode(0o755)).unwrap();
            inner = open(&inner, c"d").unwrap();
        }
        rustix::fs::symlinkat(c"/", &inner, c"root").unwrap();
        std::os::unix::fs::symlink("../outside", dir.path().join("d/link")).unwrap();
        fs::write(dir.path().join("d/file"), "").unwrap();
        for dry_run in [true, false] {
            let removed = Remover {
                spares: &|_, _| false,
                dry_run,
                may_unlock: !dry_run,
                is_over: &NEVER,
                on_removed: &|_| (),
                on_failed: &|_, _| (),
            }
            .remove(&fd, c"d", b"");
            assert!(removed.failure.is_none(), "{removed:?}");
            assert_eq!((removed.count, removed.left), (5003, 0), "dry run: {dry_run}");
        }
        assert!(!dir.path().join("d").exists() && dir.path().join("outside/precious").exists());
    }

    #[test]
    fn a_large_directory_is_removed_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let fd: OwnedFd = fs::File::open(dir.path()).unwrap().into();
        let path = dir.path().join("d");
        fs::create_dir_all(path.join("sub")).unwrap();
        for n in 0..5000 {
            fs::write(path.join(format!("{n}-{}", "x".repeat(100))), "").unwrap();
        }
        fs::write(path.join("sub/kept"), "").unwrap();
        let spares = |path: &[u8], _: &dyn Fn() -> bool| path.ends_with(b"kept");
        for (dry_run, left) in [(true, 5001), (false, 0)] {
            let remover = Remover {
                spares: &spares,
                dry_run,
                may_unlock: !dry_run,
                is_over: &NEVER,
                on_removed: &|_| (),
                on_failed: &|_, _| (),
            };
            let mut removal = Removal::new(&fd, c"d", b"").unwrap();
            let mut parts = 1;
            while !removal.run(&remover, Some(Instant::now())) {
                parts += 1;
            }
            let removed = removal.removed();
            assert!(parts > 5000 && removed.failure.is_none(), "{parts} {removed:?}");
            assert_eq!((removed.count, removed.left, fs::read_dir(&path).unwrap().count() > 1), (5000, 1, left > 0));
        }
    }

    #[test]
    fn nothing_more_goes_when_it_is_not_wanted_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let fd: OwnedFd = fs::File::open(dir.path()).unwrap().into();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/file"), "").unwrap();
        let is_over = AtomicBool::new(true);
        let removed = Remover {
            spares: &|_, _| false,
            dry_run: false,
            may_unlock: true,
            is_over: &is_over,
            on_removed: &|_| (),
            on_failed: &|_, _| (),
        }
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
        let removed = Remover {
            spares: &spares,
            dry_run: false,
            may_unlock: true,
            is_over: &NEVER,
            on_removed: &|_| (),
            on_failed: &|_, _| (),
        }
        .remove(&fd, c"top", b"");
        assert!(removed.failure.is_none());
        assert_eq!((removed.count, removed.left), (3, 2));
        assert!(dir.path().join("top/a/keep.log").exists() && dir.path().join("top/.snapshots/x").exists());
        assert!(!dir.path().join("top/b").exists() && !dir.path().join("top/a/go").exists());
    }
}
