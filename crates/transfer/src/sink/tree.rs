//! The target tree, reached only beneath an open root directory.
//!
//! Every path is resolved with `openat2` beneath the root and through no symbolic link, so that neither `..`
//! nor a link that somebody swaps in leads anywhere else; the last component is only ever named relative to a
//! directory opened that way, and never followed.

use super::attributes::{Shortcomings, Told, Trust, Unopened};
use crate::wire::Meta;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashSet};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use thruway_fs::Identity;
use thruway_fs::Volumes;
use thruway_fs::beneath::{self, Links, split};
use thruway_fs::identity::nanoseconds;
use thruway_fs::remove::{NEVER, Removed, Remover};

/// What temporary files of ours are called: `.NAME.tw-` and [`TAG_LEN`] hexadecimal digits.
const TEMP_MARK: &[u8] = b".tw-";
/// Nobody else meets a temporary file of ours by chance, or makes one of the same name for another job.
const TAG_LEN: usize = 32;
/// How journals are called: `.thruway-JOB.journal`.
pub(crate) const JOURNAL_PREFIX: &[u8] = b".thruway-";
pub(crate) const JOURNAL_SUFFIX: &[u8] = b".journal";
/// Directories that are synced one by one at the end; more, and their file systems are synced whole.
const CHANGED_MAX: usize = 8;
/// Where file systems are not to be asked as a whole, directories that wait to be synced.
const CHANGED_BY_FILE_MAX: usize = 10_000;
/// Directories above the destination that are synced at a time.
const ABOVE_TOGETHER: usize = 16;
/// Entries of a session that are known as its own; of later ones it is not noticed that two names are one here.
const OURS_MAX: usize = 8 << 20;
/// A file of ours that a job may still be writing is not removed before this age.
const OWN_AGE_MAX_S: i64 = 24 * 3600;

/// Whether a name is one that sinks give to their own files.
pub(crate) fn is_own_name(name: &[u8]) -> bool {
    let is_temp = || {
        let (rest, tag) = name.split_at_checked(name.len().checked_sub(TAG_LEN)?)?;
        let rest = rest.strip_suffix(TEMP_MARK)?;
        (rest.len() > 1 && rest[0] == b'.' && tag.iter().all(u8::is_ascii_hexdigit)).then_some(())
    };
    let job = name.strip_prefix(JOURNAL_PREFIX).and_then(|rest| rest.strip_suffix(JOURNAL_SUFFIX));
    is_temp().is_some() || job.is_some_and(|job| job.len() == TAG_LEN && job.iter().all(u8::is_ascii_hexdigit))
}

/// How a tree is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    /// Keep attributes.
    pub(crate) preserve: bool,
    /// What is in the way may be removed even if it is a directory with contents.
    pub(crate) delete: bool,
    /// What is there may be replaced.
    pub(crate) replace: bool,
    pub(crate) trust: Trust,
}

/// A directory tree that is written to.
pub(crate) struct Tree {
    root: Arc<OwnedFd>,
    pub(super) manner: Manner,
    pub(super) umask: u32,
    pub(super) privileged: bool,
    volumes: Volumes,
    changed: Mutex<Changed>,
    /// Directories made writable for the time of the copy, and the modes they had.
    unlocked: Mutex<Vec<(Vec<u8>, u32)>>,
    /// What this session has put in place, by hash of its identity.
    ours: Mutex<HashSet<u64>>,
    pub(super) told: Told,
}

/// Directories in which names or attributes have changed since they were last synced.
#[derive(Default)]
struct Changed {
    dirs: BTreeSet<Vec<u8>>,
    /// More than those.
    many: bool,
}

/// Where an entry goes: its directory and its name there.
pub(crate) struct Place {
    pub(crate) dir: Arc<OwnedFd>,
    pub(crate) name: CString,
}

impl Tree {
    /// The tree beneath an open directory.
    pub(crate) fn new(root: Arc<OwnedFd>, manner: Manner) -> Tree {
        Tree {
            root,
            manner,
            umask: current_umask(),
            privileged: rustix::process::geteuid().is_root(),
            volumes: Volumes::default(),
            changed: Mutex::default(),
            unlocked: Mutex::default(),
            ours: Mutex::default(),
            told: Told::default(),
        }
    }

    pub(crate) fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    /// An earlier attempt may have made names here that nobody has synced.
    ///
    /// # Errors
    /// If there are too many file systems below the destination.
    pub(crate) fn sync_later(&self, path: &[u8], dir: impl AsFd) -> io::Result<()> {
        self.note(path, dir)?;
        // Its directories, too, may be that attempt's: the whole file system is asked.
        self.changed().many = true;
        Ok(())
    }

    /// Something is about to be written in this directory. Where only syncing each directory makes names durable, nobody
    /// knows whether those that lead here are.
    fn note(&self, path: &[u8], dir: impl AsFd) -> io::Result<()> {
        if self.volumes.note(dir)? {
            self.change(path);
            let ends = path.iter().enumerate().rev().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
            ends.chain((!path.is_empty()).then_some(0)).for_each(|end| self.change(&path[..end]));
        }
        Ok(())
    }

    /// Names or attributes in this directory have changed.
    fn change(&self, dir: &[u8]) {
        let by_file = self.volumes.any_by_file();
        let mut changed = self.changed();
        if changed.dirs.contains(dir) || (changed.many && !by_file) {
            return;
        }
        if changed.dirs.len() >= if by_file { CHANGED_BY_FILE_MAX } else { CHANGED_MAX } {
            let dirs = std::mem::take(&mut changed.dirs);
            if by_file {
                drop(changed);
                self.synced(self.sync_directories(&dirs));
                changed = self.changed();
            } else {
                changed.many = true;
                return;
            }
        }
        changed.dirs.insert(dir.to_vec());
    }

    fn changed(&self) -> MutexGuard<'_, Changed> {
        self.changed.lock().expect("no panics under the lock")
    }

    /// Takes note of a sync's failure, which [`Tree::sync_names`] tells.
    fn synced(&self, result: io::Result<()>) {
        if let Err(error) = result {
            tracing::warn!(%error, "a directory or an attribute could not be made durable");
            self.volumes.lose();
        }
    }

    /// Where file systems are not to be asked as a whole, has this file or directory synced.
    fn sync_if_by_file(&self, file: impl AsFd) {
        if self.volumes.any_by_file() {
            self.synced(rustix::fs::fsync(file).map_err(Into::into));
        }
    }

    /// Makes names and attributes durable.
    ///
    /// # Errors
    /// If they may not be.
    pub(crate) fn sync_names(&self) -> io::Result<()> {
        self.volumes.check()?;
        let Changed { dirs, many } = std::mem::take(&mut *self.changed());
        if many {
            self.volumes.sync()?;
        }
        // Then all have been asked as a whole.
        if many && !self.volumes.any_by_file() {
            return Ok(());
        }
        self.sync_directories(&dirs)?;
        self.sync_above()
    }

    /// Makes the names durable that lead to the root on its file system, as far as they can be opened: an earlier attempt, or
    /// the user, may have made them and not have synced them.
    fn sync_above(&self) -> io::Result<()> {
        let place = |dir: &OwnedFd| rustix::fs::fstat(dir).map(|stat| (stat.st_dev, stat.st_ino));
        let mut below = place(&self.root)?;
        let mut dirs: Vec<OwnedFd> = Vec::new();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        while let Ok(above) = rustix::fs::openat(dirs.last().unwrap_or(&self.root), c"..", flags, Mode::empty()) {
            let here = place(&above)?;
            if here.0 != below.0 || here == below {
                break;
            }
            below = here;
            dirs.push(above);
        }
        let sync = |dir: &OwnedFd| match rustix::fs::fsync(dir) {
            Err(Errno::INVAL | Errno::ROFS) => self.volumes.sync(),
            other => Ok(other?),
        };
        // Together: each waits for a flush of the disk, and one does for all.
        for some in dirs.chunks(ABOVE_TOGETHER) {
            std::thread::scope(|scope| {
                let mut syncs = Vec::new();
                for dir in some {
                    match std::thread::Builder::new().spawn_scoped(scope, move || sync(dir)) {
                        Ok(thread) => syncs.push(thread),
                        // There are too many threads: one by one, then.
                        Err(_) => sync(dir)?,
                    }
                }
                let panicked = |_| Err(io::Error::other("a thread panicked"));
                syncs.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
            })?;
        }
        Ok(())
    }

    /// Makes the root as durable as it is now: its journal is gone, and its times are those that it is to have.
    pub(crate) fn sync_root(&self) {
        if let Err(error) = rustix::fs::fsync(&*self.root) {
            tracing::warn!(%error, "the end of a copy's journal may not be durable");
        }
    }

    fn sync_directories(&self, dirs: &BTreeSet<Vec<u8>>) -> io::Result<()> {
        let mut whole = false;
        for path in dirs {
            match self.sync_directory(path) {
                // It is gone, or was synced before it was given attributes with which it cannot be opened by its name; what file
                // system it is on is asked as a whole.
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => whole = true,
                // File systems that do not know how to sync a directory say so.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => whole = true,
                other => other?,
            }
        }
        if whole { self.volumes.sync() } else { Ok(()) }
    }

    fn sync_directory(&self, path: &[u8]) -> io::Result<()> {
        let dir = self.open_directory(path)?;
        Ok(rustix::fs::fsync(&*dir)?)
    }

    /// Opens a directory beneath the root, making what is missing of it.
    pub(crate) fn directory(&self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        match self.open_to_write(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        // From the longest part that is there, downwards.
        let ends: Vec<usize> = path.iter().enumerate().filter(|(_, b)| **b == b'/').map(|(at, _)| at).collect();
        let is_there =
            |end: &usize| !self.open_directory(&path[..*end]).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        let there = ends.partition_point(is_there);
        for end in ends[there..].iter().copied().chain([path.len()]) {
            self.make(&path[..end], 0o777)?;
        }
        self.open_to_write(path)
    }

    fn make(&self, path: &[u8], mode: u32) -> io::Result<()> {
        let (parent, name) = split(path);
        let dir = self.open_to_write(parent)?;
        let name = CString::new(name)?;
        match self.writing(parent, || rustix::fs::mkdirat(&dir, &name, Mode::from_raw_mode(mode))) {
            Ok(()) => {
                self.change(parent);
                Ok(())
            }
            Err(Errno::EXIST) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn open_directory(&self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        if path.is_empty() {
            return Ok(Arc::clone(&self.root));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match beneath::open(&self.root, path, flags, Links::Never) {
            Ok(dir) => Ok(Arc::new(dir)),
            Err(Errno::LOOP) => {
                Err(io::Error::new(io::ErrorKind::NotADirectory, "a symbolic link is in the way of a directory"))
            }
            Err(e) => Err(e.into()),
        }
    }

    /// As [`Tree::open_directory`], for writing: its file system is known from now on.
    fn open_to_write(&self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        let dir = match self.open_directory(path) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied && self.unlock(path) => self.open_directory(path),
            other => other,
        }?;
        self.note(path, &dir)?;
        Ok(dir)
    }

    /// Runs a change in a directory; if that is refused and the directory is ours, makes it writable for the time
    /// of the copy.
    pub(crate) fn writing<T>(&self, path: &[u8], change: impl Fn() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        match change() {
            Err(Errno::ACCESS) if self.unlock(path) => change(),
            other => other,
        }
    }

    /// Makes a directory of ours writable, to be undone by [`Tree::lock_again`].
    fn unlock(&self, path: &[u8]) -> bool {
        let opened = beneath::open(&self.root, path, OFlags::PATH | OFlags::DIRECTORY, Links::Never);
        let Ok(dir) = opened else { return false };
        let Ok(stat) = rustix::fs::fstat(&dir) else { return false };
        let mode = stat.st_mode & 0o7777;
        if self.privileged || stat.st_uid != rustix::process::geteuid().as_raw() || mode & 0o700 == 0o700 {
            return false;
        }
        let path_to_it = format!("/proc/self/fd/{}", dir.as_raw_fd());
        if rustix::fs::chmod(path_to_it, Mode::from_raw_mode(mode | 0o700)).is_err() {
            return false;
        }
        self.unlocked.lock().expect("no panics under the lock").push((path.to_vec(), mode));
        true
    }

    /// Gives directories that were made writable the modes back that they had.
    pub(crate) fn lock_again(&self) {
        let unlocked = std::mem::take(&mut *self.unlocked.lock().expect("no panics under the lock"));
        for (path, mode) in unlocked.into_iter().rev() {
            if let Ok(dir) = self.open_directory(&path) {
                if let Err(error) = rustix::fs::fchmod(&*dir, Mode::from_raw_mode(mode)) {
                    let path = crate::escape(&path);
                    tracing::warn!(path, %error, "a directory that was made writable for the copy stays so");
                }
                self.sync_if_by_file(&*dir);
                self.change(&path);
            }
        }
    }

    /// The place of an entry; its directory is made if missing.
    pub(crate) fn place(&self, path: &[u8]) -> io::Result<Place> {
        let (parent, name) = split(path);
        Ok(Place { dir: self.directory(parent)?, name: CString::new(name)? })
    }

    /// The place of an entry whose directory is there.
    pub(crate) fn find(&self, path: &[u8]) -> io::Result<Place> {
        let (parent, name) = split(path);
        Ok(Place { dir: self.open_directory(parent)?, name: CString::new(name)? })
    }

    /// Makes a directory that its owner can write to until its attributes are applied. What is there and no
    /// directory, a link to one included, gives way. Whether it was made.
    pub(crate) fn make_directory(&self, path: &[u8], meta: &Meta) -> io::Result<bool> {
        if path.is_empty() {
            return Ok(false);
        }
        let place = self.place(path)?;
        let (parent, _) = split(path);
        let mode = Mode::from_raw_mode(meta.mode & 0o777 | 0o700);
        let make = || self.writing(parent, || rustix::fs::mkdirat(&place.dir, &place.name, mode));
        match make() {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let stat = rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(stat.st_mode).is_dir() {
                    self.remember(&place.dir, &place.name);
                    return Ok(false);
                }
                self.clear_way(&place, &stat, false)?;
                make()?;
            }
            Err(e) => return Err(e.into()),
        }
        self.remember(&place.dir, &place.name);
        self.change(parent);
        Ok(true)
    }

    /// From now on, the entry is known as one that this session has put in place, or found as it should be.
    pub(crate) fn remember(&self, dir: impl AsFd, name: &CStr) {
        if let Ok((identity, stat)) = Identity::of(dir, name) {
            self.remember_identity(identity, &stat);
        }
    }

    fn remember_identity(&self, identity: Identity, stat: &rustix::fs::Statx) {
        let mut ours = self.ours.lock().expect("no panics under the lock");
        if ours.len() < OURS_MAX {
            ours.insert(identity.hash_on(stat));
        }
    }

    fn is_ours(&self, dir: impl AsFd, name: &CStr) -> io::Result<bool> {
        let (identity, stat) = match Identity::of(dir, name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other?,
        };
        let ours = self.ours.lock().expect("no panics under the lock");
        // Who remembers no more than that knows nothing of the rest.
        Ok(ours.len() >= OURS_MAX || ours.contains(&identity.hash_on(&stat)))
    }

    /// Whether what has this name may make way: not if it came with this very copy, under a name that is
    /// another one to the source and the same to this file system.
    fn is_of_this_copy(&self, place: &Place) -> io::Result<()> {
        let (identity, stat) = Identity::of(&place.dir, &place.name)?;
        let ours = self.ours.lock().expect("no panics under the lock");
        if !ours.contains(&identity.hash_on(&stat)) {
            return Ok(());
        }
        let why = "another entry of this copy has this name here (a file system may take names that differ in case \
                   for one); not overwriting it";
        Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
    }

    /// Removes what is in the way of an entry of another type. `special` entries may replace devices.
    fn clear_way(&self, place: &Place, stat: &Stat, special: bool) -> io::Result<()> {
        self.may_replace()?;
        self.is_of_this_copy(place)?;
        let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::AlreadyExists, why.to_string()));
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => match rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::REMOVEDIR) {
                Ok(()) => Ok(()),
                Err(Errno::NOTEMPTY | Errno::EXIST) if self.manner.delete => {
                    let remover = Remover { spares: &|_| false, dry_run: false, is_over: &NEVER };
                    let removed = remover.remove(&place.dir, &place.name, b"");
                    removed.failure.map_or(Ok(()), |(_, e)| Err(e))
                }
                Err(Errno::NOTEMPTY | Errno::EXIST) => {
                    refuse("a directory with contents is in the way (--delete without --exclude removes it)")
                }
                Err(e) => Err(e.into()),
            },
            FileType::BlockDevice | FileType::CharacterDevice if !special => {
                refuse("destination is a device; thruway does not write into devices")
            }
            FileType::Fifo | FileType::Socket if !special && !self.manner.preserve => {
                refuse("a named pipe or socket is in the way; remove it first (-p replaces it)")
            }
            _ => Ok(rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::empty())?),
        }
    }

    /// # Errors
    /// If the peer may only add.
    pub(crate) fn may_replace(&self) -> io::Result<()> {
        if self.manner.replace {
            return Ok(());
        }
        let why = "there is an entry of this name, and you have no right to replace it";
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }

    /// Applies a directory's attributes, when nothing more is put into it. `made` if this session made it.
    pub(crate) fn finish_directory(&self, path: &[u8], meta: &Meta, made: bool) -> io::Result<Shortcomings> {
        // Whoever may only add leaves what is there as it is.
        let is_ours_to_change = made || (self.manner.preserve && self.manner.replace);
        if !is_ours_to_change {
            return Ok(Shortcomings::default());
        }
        let dir = self.open_to_write(path)?;
        self.change(path);
        // The mode that it had is not to come back.
        self.unlocked.lock().expect("no panics under the lock").retain(|(unlocked, _)| unlocked != path);
        if self.manner.preserve {
            let short = self.apply(dir.as_fd(), meta, false);
            self.sync_if_by_file(&*dir);
            return Ok(short);
        }
        // The set-group-id bit comes from the directory above.
        let now = rustix::fs::fstat(&*dir)?.st_mode & 0o7777;
        let wanted = self.mode(meta) | now & 0o2000;
        if wanted != now {
            rustix::fs::fchmod(&*dir, Mode::from_raw_mode(wanted))?;
        }
        self.sync_if_by_file(&*dir);
        Ok(Shortcomings::default())
    }

    /// Applies the attributes of a file whose content is right already.
    ///
    /// With what fell short, which file it is and when its inode changed last.
    pub(crate) fn refresh(&self, path: &[u8], meta: &Meta) -> io::Result<(Shortcomings, Identity, i64)> {
        let place = self.find(path)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&place.dir, &place.name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() || stat.st_size as u64 != meta.size {
            return Err(io::Error::other("it changed at the destination meanwhile"));
        }
        self.note(split(path).0, &place.dir)?;
        self.changed().many = true;
        let short = self.apply(file.as_fd(), meta, false);
        self.sync_if_by_file(&file);
        let (identity, stat) = Identity::of(&file, c"")?;
        Ok((short, identity, nanoseconds(stat.stx_ctime)))
    }

    /// Makes a symbolic link, replacing what is there.
    pub(crate) fn symlink(&self, path: &[u8], target: &[u8], meta: &Meta) -> io::Result<Shortcomings> {
        let place = self.place(path)?;
        let target = CString::new(target)?;
        self.replace(path, &place, false, |dir, name| rustix::fs::symlinkat(&target, dir, name))?;
        // They come after its name, and it cannot be synced itself.
        self.changed().many |= self.manner.preserve;
        Ok(self.apply_unopened(&place.dir, &place.name, FileType::Symlink, meta))
    }

    /// Makes a special file, replacing what is there.
    pub(crate) fn special(&self, path: &[u8], meta: &Meta, rdev: u64) -> io::Result<Shortcomings> {
        let kind = FileType::from_raw_mode(meta.mode);
        if self.manner.trust == Trust::Peer && !matches!(kind, FileType::Fifo | FileType::Socket) {
            let why = "creating devices requires a key with the 'privileged' option";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        if !matches!(kind, FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a special file"));
        }
        let place = self.place(path)?;
        let mode = Mode::from_raw_mode(self.mode(meta) & 0o777);
        self.replace(path, &place, true, |dir, name| rustix::fs::mknodat(dir, name, kind, mode, rdev))?;
        self.changed().many = true;
        Ok(self.apply_unopened(&place.dir, &place.name, kind, meta))
    }

    /// Gives an existing file another name, replacing what is there.
    pub(crate) fn link(&self, path: &[u8], target: &[u8]) -> io::Result<()> {
        let (from, to) = (self.find(target)?, self.place(path)?);
        let of = |place: &Place| Identity::of(&place.dir, &place.name).map(|(identity, stat)| identity.hash_on(&stat));
        // Moving one name of a file over another does nothing, and is not to be taken for more.
        if of(&to).is_ok_and(|there| of(&from).is_ok_and(|target| target == there)) {
            return Ok(());
        }
        self.replace(path, &to, true, |dir, name| {
            rustix::fs::linkat(&from.dir, &from.name, dir, name, AtFlags::empty())
        })
    }

    /// Makes an entry; where there is one, under a temporary name that is then moved over it.
    fn replace(
        &self,
        path: &[u8],
        place: &Place,
        special: bool,
        make: impl Fn(&OwnedFd, &CStr) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        let (parent, _) = split(path);
        self.change(parent);
        let replaced = self.replace_in(parent, path, place, special, make);
        // Once more: it may have been synced in between.
        self.change(parent);
        replaced
    }

    fn replace_in(
        &self,
        parent: &[u8],
        path: &[u8],
        place: &Place,
        special: bool,
        make: impl Fn(&OwnedFd, &CStr) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        match self.writing(parent, || make(&place.dir, &place.name)) {
            Err(Errno::EXIST) => {}
            other => {
                other?;
                self.remember(&place.dir, &place.name);
                return Ok(());
            }
        }
        let stat = rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::Symlink) {
            self.clear_way(place, &stat, special)?;
            make(&place.dir, &place.name)?;
            self.remember(&place.dir, &place.name);
            return Ok(());
        }
        self.may_replace()?;
        self.is_of_this_copy(place)?;
        let temp = temp_name(&place.name, &[0x5a; 16], &super::journal::key_of(path));
        let _ = rustix::fs::unlinkat(&place.dir, &temp, AtFlags::empty());
        make(&place.dir, &temp)?;
        let moved = rustix::fs::renameat(&place.dir, &temp, &place.dir, &place.name);
        // Renaming one name of a file over another of the same leaves both.
        let _ = rustix::fs::unlinkat(&place.dir, &temp, AtFlags::empty());
        moved?;
        self.remember(&place.dir, &place.name);
        Ok(())
    }

    /// Gives a finished file its name; says when its inode last changed then.
    ///
    /// # Errors
    /// Also if what is in the way may not be replaced, or if what has the temporary name is not that file.
    pub(crate) fn put_in_place(
        &self,
        parent: &[u8],
        place: &Place,
        temp: &CStr,
        identity: Identity,
    ) -> io::Result<i64> {
        self.change(parent);
        let Place { dir, name } = place;
        let file = Unopened::look(dir, temp)?;
        let (found, _) = Identity::of(&file, c"")?;
        if found != identity || !file.is(FileType::RegularFile) {
            return Err(io::Error::other("its temporary file was replaced by another"));
        }
        let rename = || rustix::fs::renameat_with(dir, temp, dir, name, RenameFlags::NOREPLACE);
        match self.writing(parent, rename) {
            Ok(()) => {}
            Err(Errno::EXIST | Errno::INVAL | Errno::NOSYS) => {
                match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => self.make_way(place, &file, &stat)?,
                    Err(Errno::NOENT) => {}
                    Err(e) => return Err(e.into()),
                }
                rustix::fs::renameat(dir, temp, dir, name)?;
            }
            Err(e) => return Err(e.into()),
        }
        let (placed, stat) = Identity::of(dir, name)?;
        if placed != identity {
            return Err(io::Error::other("something else took its name in the same moment"));
        }
        self.remember_identity(placed, &stat);
        // Once more: it may have been synced in between.
        self.change(parent);
        Ok(nanoseconds(stat.stx_ctime))
    }

    /// Prepares for a file to take the place of another: without `preserve` it keeps whose that was
    /// and who could read it.
    fn make_way(&self, place: &Place, file: &Unopened, stat: &Stat) -> io::Result<()> {
        self.may_replace()?;
        self.is_of_this_copy(place)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if !self.manner.preserve => {
                self.changed().many = true;
                let open = self.volumes.any_by_file().then(|| file.open_whatever_it_may()).transpose()?;
                if self.privileged {
                    file.chown(stat.st_uid, stat.st_gid)?;
                }
                file.chmod(stat.st_mode & 0o1777)?;
                thruway_fs::xattr::copy_acl(place.dir.as_fd(), &place.name, file.as_fd());
                open.iter().for_each(|open| self.sync_if_by_file(open));
                Ok(())
            }
            FileType::RegularFile | FileType::Symlink => Ok(()),
            _ => self.clear_way(place, stat, false),
        }
    }

    /// Removes from a directory what is not to be kept.
    pub(crate) fn prune(
        &self,
        path: &[u8],
        below: &[u8],
        keep: &HashSet<Vec<u8>>,
        own: &CStr,
        remover: &Remover<'_>,
    ) -> io::Result<Removed> {
        let mut total = Removed::default();
        let dir = match self.open_directory(path) {
            // Not there, or, in a dry run, still something else.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(total),
            other => other?,
        };
        if !remover.dry_run {
            self.change(path);
        }
        for entry in rustix::fs::Dir::read_from(&*dir)? {
            let entry = entry?;
            if remover.is_over.load(Ordering::SeqCst) {
                break;
            }
            let name = entry.file_name();
            let bytes = name.to_bytes();
            if matches!(bytes, b"." | b"..") || keep.contains(bytes) || name == own || is_fresh_own(&dir, name) {
                continue;
            }
            // Where two names are one, what came under the other is not in the list, and is here all the same.
            if self.is_ours(&dir, name)? {
                total.left += 1;
                continue;
            }
            let removed = remover.remove(&*dir, name, below);
            total.count += removed.count;
            total.left += removed.left;
            total.failure = total.failure.or(removed.failure);
        }
        Ok(total)
    }
}

/// Whether a name is of a file that another job may be working on.
fn is_fresh_own(dir: &OwnedFd, name: &CStr) -> bool {
    if !is_own_name(name.to_bytes()) {
        return false;
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|s| now.saturating_sub(s.st_mtime.max(s.st_ctime)) < OWN_AGE_MAX_S)
}

/// The temporary name of a file of a job.
pub(crate) fn temp_name(name: &CStr, job: &[u8; 16], key: &[u8; 16]) -> CString {
    // Names have at most 255 bytes.
    const KEPT: usize = 255 - 1 - TEMP_MARK.len() - TAG_LEN;
    let bytes = name.to_bytes();
    let tag = blake3::Hasher::new().update(job).update(key).finalize();
    let mut out = vec![b'.'];
    out.extend_from_slice(&bytes[..bytes.len().min(KEPT)]);
    out.extend_from_slice(TEMP_MARK);
    out.extend_from_slice(crate::auth::to_hex(&tag.as_bytes()[..TAG_LEN / 2]).as_bytes());
    CString::new(out).expect("made of names and digits")
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
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::Path;

    fn tree_with(dir: &Path, preserve: bool, delete: bool, trust: Trust) -> Tree {
        Tree::new(Arc::new(fs::File::open(dir).unwrap().into()), Manner { preserve, delete, replace: true, trust })
    }

    fn tree(dir: &Path) -> Tree {
        tree_with(dir, true, false, Trust::Operator)
    }

    fn file(dir: &Path, name: &str, mode: u32) -> Identity {
        fs::write(dir.join(name), name).unwrap();
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(mode)).unwrap();
        Identity::of(fs::File::open(dir.join(name)).unwrap(), c"").unwrap().0
    }

    #[test]
    fn nothing_is_reached_outside_the_root_or_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir(&root).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::create_dir(root.join("real")).unwrap();
        symlink(&outside, root.join("absolute")).unwrap();
        symlink("../outside", root.join("relative")).unwrap();
        symlink("real", root.join("inside")).unwrap();
        let tree = tree(&root);
        for path in [&b"absolute/x"[..], b"relative/x", b"inside/x", b"../outside/x"] {
            assert!(tree.place(path).is_err());
            assert!(tree.symlink(path, b"y", &Meta::default()).is_err());
            assert!(tree.make_directory(path, &Meta::default()).is_err());
            assert!(tree.link(path, b"real").is_err());
        }
        for empty in [&outside, &root.join("real")] {
            assert_eq!(fs::read_dir(empty).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_directory_takes_the_place_of_a_link_but_not_of_a_device() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("real")).unwrap();
        fs::write(dir.path().join("real/precious"), "").unwrap();
        symlink("real", dir.path().join("link")).unwrap();
        let tree = tree_with(dir.path(), false, true, Trust::Operator);
        assert!(tree.make_directory(b"link", &Meta::default()).unwrap(), "made anew");
        assert!(dir.path().join("link").symlink_metadata().unwrap().is_dir());
        let keep = HashSet::new();
        tree.prune(b"link", b"", &keep, c"journal", &Remover { spares: &|_| false, dry_run: false, is_over: &NEVER })
            .unwrap();
        assert!(dir.path().join("real/precious").exists());
        if rustix::fs::mknodat(&tree.root, c"dev", FileType::CharacterDevice, Mode::from_raw_mode(0o600), 0x103).is_ok()
        {
            let error = tree.make_directory(b"dev", &Meta::default()).unwrap_err();
            assert!(error.to_string().contains("device"), "{error}");
        }
    }

    #[test]
    fn missing_parents_are_made_and_types_change_as_in_a_mirror() {
        let dir = tempfile::tempdir().unwrap();
        let with = |delete| tree_with(dir.path(), false, delete, Trust::Operator);
        with(false).make_directory(b"a/b/c", &Meta::default()).unwrap();
        with(false).make_directory(b"a/b/c", &Meta::default()).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(with(false).make_directory(b"file", &Meta::default()).unwrap(), "a file gives way to a directory");
        let put = |delete: bool, name: &str| {
            let identity = file(dir.path(), ".temp", 0o644);
            let tree = with(delete);
            let place = tree.place(name.as_bytes()).unwrap();
            tree.put_in_place(b"", &place, c".temp", identity)
        };
        put(false, "file").unwrap();
        assert!(dir.path().join("file").is_file(), "an empty directory gives way to a file");
        assert!(put(false, "a").unwrap_err().to_string().contains("--delete"));
        put(true, "a").unwrap();
        assert_eq!(fs::read(dir.path().join("a")).unwrap(), b".temp");
        let identity = file(dir.path(), "other", 0o644);
        file(dir.path(), ".temp2", 0o644);
        let tree = with(false);
        let place = tree.place(b"new").unwrap();
        assert!(tree.put_in_place(b"", &place, c".temp2", identity).is_err(), "not the file that was written");
        assert!(!dir.path().join("new").exists());
    }

    #[test]
    fn without_preserve_what_is_there_keeps_its_permissions() {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), "secret", 0o600);
        fs::create_dir(dir.path().join("private")).unwrap();
        fs::set_permissions(dir.path().join("private"), fs::Permissions::from_mode(0o2700)).unwrap();
        let tree = tree_with(dir.path(), false, false, Trust::Operator);
        let identity = file(dir.path(), ".temp", 0o644);
        let place = tree.place(b"secret").unwrap();
        tree.put_in_place(b"", &place, c".temp", identity).unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().mode() & 0o7777;
        assert_eq!(mode("secret"), 0o600);
        assert_eq!(fs::read(dir.path().join("secret")).unwrap(), b".temp");
        let open = Meta { mode: 0o040_755, ..Meta::default() };
        assert!(!tree.make_directory(b"private", &open).unwrap());
        tree.finish_directory(b"private", &open, false).unwrap();
        assert_eq!(mode("private"), 0o2700);
        assert!(tree.make_directory(b"private/inner", &open).unwrap());
        tree.finish_directory(b"private/inner", &open, true).unwrap();
        assert_eq!(mode("private/inner") & 0o2000, 0o2000, "the set-group-id bit is inherited");
    }

    #[test]
    fn a_peer_gives_nobody_rights() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree_with(dir.path(), true, false, Trust::Peer);
        let handle = fs::File::create(dir.path().join("f")).unwrap();
        let meta = Meta {
            mode: 0o106_755,
            uid: 12345,
            gid: 12345,
            xattrs: vec![(
                b"security.capability".to_vec(),
                vec![1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            )],
            ..Meta::default()
        };
        assert_eq!(tree.apply(handle.as_fd(), &meta, false), Shortcomings::default());
        let stat = handle.metadata().unwrap();
        assert_eq!((stat.mode() & 0o7777, stat.uid()), (0o755, rustix::process::geteuid().as_raw()));
        assert_eq!(rustix::fs::flistxattr(&handle, &mut [0; 100]).unwrap(), 0);
        let device = Meta { mode: 0o020_666, ..Meta::default() };
        assert_eq!(tree.special(b"dev", &device, 0x103).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let fifo = Meta { mode: 0o010_666, ..Meta::default() };
        tree.special(b"fifo", &fifo, 0).unwrap();
        assert_eq!(fs::metadata(dir.path().join("fifo")).unwrap().mode() & 0o777, 0o666, "whatever the umask");
    }

    #[test]
    fn set_id_bits_go_only_to_the_owner_they_were_meant_for() {
        let dir = tempfile::tempdir().unwrap();
        let mut tree = tree(dir.path());
        tree.privileged = false;
        let handle = fs::File::create(dir.path().join("f")).unwrap();
        let ours = handle.metadata().unwrap();
        let meta = |uid, gid| Meta { mode: 0o106_755, uid, gid, ..Meta::default() };
        let mode = || handle.metadata().unwrap().mode() & 0o7777;
        tree.apply(handle.as_fd(), &meta(ours.uid() + 1, ours.gid()), false);
        assert_eq!(mode() & 0o4000, 0);
        tree.apply(handle.as_fd(), &meta(ours.uid(), ours.gid()), false);
        assert_eq!(mode(), 0o6755);
    }

    #[test]
    fn pruning_removes_all_but_what_is_kept_and_what_may_be_in_use() {
        let dir = tempfile::tempdir().unwrap();
        for path in [
            "keep",
            "gone",
            "sub/deep/file",
            ".x.tw-0123abcd0123abcd0123abcd0123abcd",
            ".y.tw-0123abcd0123abcd0123abcd0123abcd",
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let keep = HashSet::from([b"keep".to_vec()]);
        let tree = tree(dir.path());
        for dry_run in [true, false] {
            let removed = tree
                .prune(b"", b"", &keep, c".own", &Remover { spares: &|_| false, dry_run, is_over: &NEVER })
                .unwrap();
            assert_eq!((removed.count, removed.left), (4, 0));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn what_somebody_swaps_in_gets_neither_name_nor_attributes() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir(&root).unwrap();
        file(dir.path(), "outside", 0o600);
        let before = fs::metadata(&outside).unwrap();
        let untouched = || {
            let now = fs::metadata(&outside).unwrap();
            assert_eq!((now.mode(), now.uid(), now.mtime()), (before.mode(), before.uid(), before.mtime()));
        };
        let tree = tree_with(&root, false, false, Trust::Operator);
        let put = |identity| tree.put_in_place(b"", &tree.find(b"f").unwrap(), c"temp", identity);
        fs::write(root.join("f"), "what was there").unwrap();
        fs::set_permissions(root.join("f"), fs::Permissions::from_mode(0o666)).unwrap();
        // A link where the temporary file was; another file; the same file with a second name.
        let identity = file(&root, "temp", 0o644);
        fs::rename(root.join("temp"), root.join("aside")).unwrap();
        symlink(&outside, root.join("temp")).unwrap();
        assert!(put(identity).unwrap_err().to_string().contains("replaced"));
        fs::remove_file(root.join("temp")).unwrap();
        fs::write(root.join("temp"), "another").unwrap();
        assert!(put(identity).unwrap_err().to_string().contains("replaced"));
        fs::remove_file(root.join("temp")).unwrap();
        fs::hard_link(root.join("aside"), root.join("temp")).unwrap();
        assert!(put(identity).unwrap_err().to_string().contains("replaced"));
        fs::remove_file(root.join("aside")).unwrap();
        put(identity).unwrap();
        assert_eq!(fs::metadata(root.join("f")).unwrap().mode() & 0o777, 0o666);
        // A link to something else, where a pipe was just made.
        let preserving = tree_with(&root, true, false, Trust::Operator);
        let meta = Meta { mode: 0o010_666, mtime: (5, 0), ..Meta::default() };
        symlink(&outside, root.join("pipe")).unwrap();
        let fd = fs::File::open(&root).unwrap();
        assert!(!preserving.apply_unopened(&fd, c"pipe", FileType::Fifo, &meta).is_none());
        untouched();
        // Attributes of a link are its own.
        let short = preserving.apply_unopened(&fd, c"pipe", FileType::Symlink, &meta);
        assert!(short.is_none(), "{short:?}");
        assert_eq!(fs::symlink_metadata(root.join("pipe")).unwrap().mtime(), 5);
        untouched();
    }

    #[test]
    fn one_entry_of_a_copy_does_not_take_the_place_of_another() {
        // As where names that differ in case are one: the second comes to the place of the first.
        let dir = tempfile::tempdir().unwrap();
        let tree = tree_with(dir.path(), false, true, Trust::Operator);
        let put = |name: &CStr, content: &str| {
            let identity = file(dir.path(), "temp", 0o644);
            fs::write(dir.path().join("temp"), content).unwrap();
            let place = Place { dir: Arc::clone(&tree.root), name: name.into() };
            tree.put_in_place(b"", &place, c"temp", identity)
        };
        fs::write(dir.path().join("f"), "old").unwrap();
        put(c"f", "first").unwrap();
        for error in [
            put(c"f", "second").unwrap_err(),
            tree.symlink(b"f", b"x", &Meta::default()).unwrap_err(),
            tree.make_directory(b"f", &Meta::default()).unwrap_err(),
        ] {
            assert!(error.to_string().contains("another entry of this copy"), "{error}");
        }
        assert_eq!(fs::read_to_string(dir.path().join("f")).unwrap(), "first");
        tree.make_directory(b"d", &Meta::default()).unwrap();
        fs::write(dir.path().join("d/inner"), "").unwrap();
        assert!(put(c"d", "file").is_err() && dir.path().join("d/inner").exists());
        assert!(!tree.make_directory(b"d", &Meta::default()).unwrap(), "directories become one");
    }

    #[test]
    fn what_came_with_a_copy_is_not_removed_by_it() {
        // As where names that differ in case are one: it is here under a name that is not in the list.
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        let identity = file(dir.path(), "temp", 0o644);
        tree.put_in_place(b"", &tree.find(b"Readme").unwrap(), c"temp", identity).unwrap();
        fs::write(dir.path().join("old"), "").unwrap();
        let keep = HashSet::from([b"README".to_vec()]);
        let removed = tree
            .prune(b"", b"", &keep, c".own", &Remover { spares: &|_| false, dry_run: false, is_over: &NEVER })
            .unwrap();
        assert_eq!((removed.count, removed.left), (1, 1));
        assert!(dir.path().join("Readme").exists() && !dir.path().join("old").exists());
    }

    #[test]
    fn names_of_an_earlier_attempt_are_synced_with_ours() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        tree.sync_names().unwrap();
        tree.sync_later(b"", &tree.root).unwrap();
        assert!(tree.changed().many, "its file system is asked as a whole");
        tree.volumes.lose();
        assert!(tree.sync_names().is_err());
    }

    #[test]
    fn own_names_are_told_from_others() {
        let name = temp_name(c"report.pdf", &[1; 16], &[2; 16]);
        assert!(is_own_name(name.to_bytes()));
        let long = CString::new(vec![b'a'; 255]).unwrap();
        assert!(temp_name(&long, &[1; 16], &[2; 16]).to_bytes().len() <= 255);
        for name in [&b"report.pdf"[..], b".tw-0123abcd0123abcd0123abcd0123abcd", b".thruway", b".a.tw-20240101"] {
            assert!(!is_own_name(name));
        }
        let journal = super::super::journal::name_of(&[7; 16]);
        assert!(is_own_name(journal.to_bytes()) && !is_own_name(b".thruway-notes.journal"));
        for (job, key) in [([1; 16], [1; 16]), ([2; 16], [2; 16]), ([1; 16], [2; 16])] {
            assert!((job, key) == ([1; 16], [2; 16]) || temp_name(c"report.pdf", &job, &key) != name);
        }
    }
}
