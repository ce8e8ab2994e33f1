//! The target tree, reached only beneath an open root directory.
//!
//! Every path is resolved with `openat2` beneath the root and through no symbolic link, so that neither `..`
//! nor a link that somebody swaps in leads anywhere else; the last component is only ever named relative to a
//! directory opened that way, and never followed.

mod clearing;
mod durability;
mod entries;
mod identities;
mod names;

pub(crate) use clearing::{Clearing, ClearingTurn, Clearings};
pub(crate) use entries::{check_destination, check_disk};
pub(crate) use names::{JOURNAL_PREFIX, JOURNAL_SUFFIX, OWN_AGE_MAX_S, is_own_name, temp_name, temporary_of};

use super::RootNames;
use super::attributes::{Before, Grants, Shortcomings, Told, Trust, Unopened};
use super::journal::{Journal, Key, key_of};
use super::made::{Made, MadeBefore, is_local, is_new, may_be_born};
use crate::wire::{Meta, capabilities_hash};
use durability::Changed;
use identities::{Identities, States};
use names::is_fresh_own;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use thruway_fs::Identity;
use thruway_fs::Volumes;
use thruway_fs::beneath::{self, Links, split};
use thruway_fs::identity::nanoseconds;
use thruway_fs::remove::{Removed, Remover};
use thruway_fs::writable;
use thruway_fs::xattr::{ACCESS_ACL, CAPABILITIES};

/// How a tree is written.
#[derive(Debug, Clone)]
pub(crate) struct Manner {
    /// Keep attributes.
    pub(crate) preserve: bool,
    /// What is in the way may be removed even if it is a directory with contents.
    pub(crate) delete: bool,
    /// What is there may be replaced.
    pub(crate) replace: bool,
    /// The source has the right to read what is there.
    pub(crate) readable: bool,
    /// Links in the root directory are resolved beneath it only.
    pub(crate) confined: bool,
    /// Entries of the root directory that the command names.
    pub(crate) named: RootNames,
    pub(crate) trust: Trust,
}

/// A directory tree that is written to.
pub(crate) struct Tree {
    root: Arc<OwnedFd>,
    pub(super) manner: Manner,
    pub(super) umask: u32,
    pub(super) privileged: bool,
    /// Groups of this process, to which its user may give files.
    pub(super) groups: Vec<u32>,
    volumes: Volumes,
    changed: Mutex<Changed>,
    /// Directories made for entries in them before their own records were taken. Until then only their owner has rights to them.
    early: Mutex<Early>,
    /// Directories made by earlier sessions of the job. One is removed when its record is taken.
    made_before: Mutex<HashMap<Key, Made>>,
    /// Links and special files made by earlier sessions of the job.
    entries_before: HashMap<Key, u64>,
    /// When the session began, as [`Made::now`].
    since: i64,
    /// A directory lacks attributes that a later attempt can give it.
    is_unsettled: AtomicBool,
    /// Records the directories that are made.
    journal: Option<Arc<Journal>>,
    /// Entries removed in directories that gave way to entries of other types.
    cleared: AtomicU64,
    /// Set when the session is over: long work stops.
    pub(crate) over: Arc<AtomicBool>,
    /// Held while an entry gives way to a directory.
    replacing: Mutex<()>,
    /// Locks held while a directory is made and recorded, selected by the first byte of its key. Without them, a worker that finds another
    /// worker's directory could record it as not made, after the other worker has recorded it as made.
    making: [Mutex<()>; MAKING],
    /// Directories made writable for the time of the copy, by path.
    unlocked: Mutex<UnlockedDirectories>,
    /// Entries that this job has put in place.
    ours: Identities,
    /// The same with their change times: a source with limited rights has none to an entry that somebody else has changed. Empty for others.
    left: States,
    /// Entries of others that equal those of the source.
    found: Identities,
    /// Further entries that equal those of the source: files that are up to date, and links and special files with several names.
    linkable: Identities,
    pub(super) told: Told,
}

/// Most bytes of paths of directories that a session makes before their records. For further directories it keeps keys: without a
/// record, they keep the mode 0700.
const EARLY_BYTES_MAX: usize = 16 << 20;

/// Number of locks in [`Tree::making`].
const MAKING: usize = 16;

/// Directories that one task makes above an entry: each can take a fraction of a millisecond.
const LEVELS_AT_A_TIME: usize = 32;

/// Directories that were made before their records.
#[derive(Default)]
struct Early {
    paths: HashMap<Vec<u8>, EarlyDirectory>,
    /// Of all paths.
    bytes: usize,
}

#[derive(Clone, Copy)]
struct EarlyDirectory {
    made: Made,
    /// An entry of another type gave way to it.
    replaced: bool,
}

impl Early {
    fn remove(&mut self, path: &[u8]) -> Option<Made> {
        let early = self.paths.remove(path)?;
        self.bytes -= path.len();
        Some(early.made)
    }
}

/// Directories made writable for the time of the copy.
#[derive(Default)]
struct UnlockedDirectories {
    paths: BTreeMap<Vec<u8>, Unlocked>,
    /// Of all paths.
    bytes: usize,
}

impl UnlockedDirectories {
    fn remove(&mut self, path: &[u8]) {
        if self.paths.remove(path).is_some() {
            self.bytes -= path.len();
        }
    }
}

/// Most bytes of paths of directories that are made writable. Further ones are not.
const UNLOCKED_BYTES_MAX: usize = 32 << 20;

/// A directory made writable for the time of the copy.
struct Unlocked {
    identity: Identity,
    /// The mode that it had.
    mode: u32,
}

/// Where an entry goes: its directory and its name there.
pub(crate) struct Place {
    pub(crate) dir: Arc<OwnedFd>,
    pub(crate) name: CString,
}

impl Tree {
    /// The tree beneath an open directory. `before`: entries that earlier sessions of the job made.
    pub(crate) fn new(root: Arc<OwnedFd>, manner: Manner, journal: Option<Arc<Journal>>, before: MadeBefore) -> Tree {
        Tree {
            root,
            manner,
            umask: current_umask(),
            privileged: rustix::process::geteuid().is_root(),
            groups: thruway_fs::credentials::own_groups(),
            found: Identities::default(),
            linkable: Identities::default(),
            since: Made::now(),
            volumes: Volumes::default(),
            changed: Mutex::default(),
            early: Mutex::default(),
            made_before: Mutex::new(before.directories),
            entries_before: before.entries,
            is_unsettled: AtomicBool::default(),
            journal,
            cleared: AtomicU64::new(0),
            over: Arc::default(),
            replacing: Mutex::default(),
            making: Default::default(),
            unlocked: Mutex::default(),
            ours: Identities::default(),
            left: States::default(),
            told: Told::default(),
        }
    }

    /// Entries removed in directories that gave way to entries of other types.
    pub(crate) fn cleared(&self) -> u64 {
        self.cleared.load(Ordering::Relaxed)
    }

    pub(crate) fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    /// Opens a directory beneath the root, making what is missing of it.
    pub(crate) fn directory(&self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        self.make_levels(path, usize::MAX)
    }

    /// Makes a part of the missing directories above an entry. False if some are still missing. Only a deep path has several parts.
    pub(crate) fn make_part_above(&self, path: &[u8]) -> io::Result<bool> {
        let (parent, _) = split(path);
        if parent.iter().filter(|byte| **byte == b'/').count() < LEVELS_AT_A_TIME {
            return Ok(true);
        }
        match self.make_levels(parent, LEVELS_AT_A_TIME) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
            other => other.map(|_| true),
        }
    }

    /// As [`Tree::directory`], but makes at most so many directories.
    ///
    /// # Errors
    /// `Interrupted` if more are missing.
    fn make_levels(&self, path: &[u8], levels_max: usize) -> io::Result<Arc<OwnedFd>> {
        // Another worker may not have taken the record of a directory yet that replaces a file or link.
        let is_missing = |e: &io::Error| matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
        match self.open_to_write(path) {
            Err(e) if is_missing(&e) => {}
            other => return other,
        }
        // From the longest part that is there, downwards.
        let ends: Vec<usize> = path.iter().enumerate().filter(|(_, b)| **b == b'/').map(|(at, _)| at).collect();
        let is_there = |end: &usize| !self.open_directory(&path[..*end]).is_err_and(|e| is_missing(&e));
        let there = ends.partition_point(is_there);
        // Relative to the directory above each: from the root, a deep path would cost the square of its length.
        let mut dir = self.open_to_write(there.checked_sub(1).map_or(&[], |last| &path[..ends[last]]))?;
        for (made, end) in ends[there..].iter().copied().chain([path.len()]).enumerate() {
            if made >= levels_max {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let path = &path[..end];
            let place = Place { dir, name: CString::new(split(path).1)? };
            self.make_early(&place, path)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            dir = match beneath::open(&place.dir, place.name.as_bytes(), flags, Links::Never) {
                Ok(dir) => {
                    self.note(path, &dir)?;
                    Arc::new(dir)
                }
                Err(_) => self.open_to_write(path)?,
            };
        }
        Ok(dir)
    }

    /// Makes a directory whose record has not come.
    fn make_early(&self, place: &Place, path: &[u8]) -> io::Result<()> {
        let mut early = self.early.lock().expect("no panics under the lock");
        if let Some(directory) = self.make_in_place(place, path, Mode::RWXU)? {
            let made = directory.made;
            if early.bytes + path.len() <= EARLY_BYTES_MAX {
                early.bytes += path.len();
                early.paths.insert(path.to_vec(), directory);
            } else {
                self.made_before.lock().expect("no panics under the lock").insert(key_of(path), made);
            }
            self.remember_directory(place);
            self.change(split(path).0);
        }
        Ok(())
    }

    /// Makes a directory. An entry of another type, a link to a directory included, gives way. `None` if there is a directory.
    fn make_in_place(&self, place: &Place, path: &[u8], mode: Mode) -> io::Result<Option<EarlyDirectory>> {
        let stat = || rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW);
        if stat().is_err()
            && let Some(made) = self.make_new(place, path, mode)?
        {
            return Ok(Some(EarlyDirectory { made, replaced: false }));
        }
        let mut replaced = false;
        // Workers can find the same entry in the way.
        let _replacing = self.replacing.lock().expect("no panics under the lock");
        match stat() {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() => return Ok(None),
            Ok(_) if self.manner.named.has_destination(path) => {
                let why = "destination exists and is not a directory; a directory does not replace it";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
            Ok(stat) => {
                self.clear_way(place, &stat, false, false)?;
                replaced = true;
            }
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(self.make_new(place, path, mode)?.map(|made| EarlyDirectory { made, replaced }))
    }

    /// True if an entry of another type gave way to a directory that was made before its record; `None` for other directories.
    pub(crate) fn early_replaced(&self, path: &[u8]) -> Option<bool> {
        self.early.lock().expect("no panics under the lock").paths.get(path).map(|early| early.replaced)
    }

    /// Makes a directory where nothing is. `None` if something has got there first.
    fn make_new(&self, place: &Place, path: &[u8], mode: Mode) -> io::Result<Option<Made>> {
        let journal = self.journal.as_ref().map(|journal| (journal, key_of(path)));
        let _making =
            journal.map(|(_, key)| self.making[usize::from(key[0]) % MAKING].lock().expect("no panics under the lock"));
        if rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Ok(None);
        }
        let inherits = self.inherited(place.dir.as_fd())? == Before::Inherited;
        let first = if inherits { Mode::RWXU } else { mode };
        // Recorded first: a session that ends between the two leaves no directory without a record.
        let since = Made::now();
        if let Some((journal, key)) = &journal {
            journal.directory(key, Made::Begun(since));
        }
        let made = match self.writing(split(path).0, || rustix::fs::mkdirat(&place.dir, &place.name, first)) {
            Ok(()) => self.identify(place, since),
            Err(Errno::EXIST) => Ok(None),
            Err(e) => Err(e.into()),
        };
        if let Some((journal, key)) = &journal {
            match made {
                Ok(Some(made)) => journal.directory(key, made),
                _ => journal.no_directory(key),
            }
        }
        if let (true, Ok(Some(made))) = (inherits, &made) {
            // After a failure, the mode stays 0700 until the attributes of the directory are applied.
            let _ = self.open_made(path, *made).and_then(|dir| {
                let Some(dir) = dir else { return Ok(()) };
                Tree::drop_inherited(dir.as_fd())?;
                self.set_permissions(&dir, mode.as_raw_mode())
            });
        }
        made
    }

    /// The directory that was made under this name since then. `None` if somebody has put another entry in its place.
    fn identify(&self, place: &Place, since: i64) -> io::Result<Option<Made>> {
        let (identity, stat) = Identity::of(&place.dir, &place.name)?;
        let is_directory = FileType::from_raw_mode(stat.stx_mode.into()).is_dir();
        let is_it = is_directory && self.may_be_made(&place.dir, (identity, &stat), since);
        Ok(is_it.then_some(Made::Done(identity.fingerprint())))
    }

    /// True if an entry of this directory may count as one that was made since then. On a file system that may have a clock of its own, or
    /// coarse times, more entries do for a source with the rights to read and to replace all entries.
    fn may_be_made(&self, dir: impl AsFd, (identity, stat): (Identity, &Statx), since: i64) -> bool {
        is_new(identity, stat, since)
            || (self.has_all_rights() && !is_local(&dir) && may_be_born(&dir, identity, since))
    }

    /// True if this may be a directory of the session with another identity than before, which some file systems give their entries.
    fn may_be_renumbered(&self, dir: &OwnedFd) -> io::Result<bool> {
        let (identity, _) = Identity::of(dir, c"")?;
        Ok(self.has_all_rights() && !is_local(dir) && may_be_born(dir, identity, self.since))
    }

    /// True if the source may read and replace whatever is there.
    pub(crate) fn has_all_rights(&self) -> bool {
        self.manner.replace && self.manner.readable
    }

    /// Opens a directory of the job to change it. `None` if it is not the one that was made.
    fn open_made(&self, path: &[u8], made: Made) -> io::Result<Option<Arc<OwnedFd>>> {
        let dir = self.open_to_write(path)?;
        let (identity, stat) = Identity::of(&dir, c"")?;
        Ok(made.is(identity, &stat, self.has_all_rights()).then_some(dir))
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

    /// Makes a directory of this user writable, to be undone by [`Tree::lock_again`]. Without the right to replace, only one that the
    /// job has made.
    fn unlock(&self, path: &[u8]) -> bool {
        self.unlock_if(path, |made| self.manner.replace || made)
    }

    /// As [`Tree::unlock`], with the directories above, if `may` is true for each. Its argument is true for a directory that the job has
    /// made. True as well if its owner has all rights to the directory: another worker has made it
    /// so since the caller was refused.
    fn unlock_if(&self, path: &[u8], may: impl Fn(bool) -> bool) -> bool {
        if self.privileged {
            return false;
        }
        let mut unlocked = self.unlocked.lock().expect("no panics under the lock");
        let mut unlock = |dir: &OwnedFd, path: &[u8]| {
            let (identity, stat) = Identity::of(dir, c"").ok()?;
            let made = self.made_before.lock().expect("no panics under the lock").get(&key_of(path)).copied();
            let is_made = made.is_some_and(|made| made.is(identity, &stat, self.has_all_rights()));
            if !may(is_made) || unlocked.bytes + path.len() > UNLOCKED_BYTES_MAX {
                return None;
            }
            let Some(mode) = writable::unlock(dir) else {
                let is_own = stat.stx_uid == rustix::process::geteuid().as_raw();
                return (is_own && u32::from(stat.stx_mode) & 0o700 == 0o700).then_some(());
            };
            // Once more: a change of the mode gives some entries of overlays another time of birth.
            let (identity, _) = Identity::of(dir, c"").ok()?;
            if unlocked.paths.insert(path.to_vec(), Unlocked { identity, mode }).is_none() {
                unlocked.bytes += path.len();
            }
            Some(())
        };
        // Level by level: a peer can name thousands.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let (mut dir, mut above, mut is_changed) = (Arc::clone(&self.root), &path[..0], false);
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            let open = || beneath::open(&dir, name, flags, Links::Never);
            let opened = match open() {
                Err(Errno::ACCESS) if unlock(&dir, above).is_some() => {
                    is_changed = true;
                    open()
                }
                other => other,
            };
            // With one above changed, it may turn out to be missing.
            let Ok(below) = opened else { return is_changed };
            dir = Arc::new(below);
            above = &path[..above.len() + usize::from(!above.is_empty()) + name.len()];
        }
        unlock(&dir, path).is_some() || is_changed
    }

    /// The mode that a directory had before it was made writable; `None` for others.
    pub(crate) fn mode_before_unlock(&self, path: &[u8]) -> Option<u32> {
        self.unlocked.lock().expect("no panics under the lock").paths.get(path).map(|unlocked| unlocked.mode)
    }

    /// Gives directories that were made writable the modes back that they had.
    pub(crate) fn lock_again(&self) {
        let unlocked = std::mem::take(&mut *self.unlocked.lock().expect("no panics under the lock"));
        // Directories come after those above them.
        for (path, Unlocked { identity, mode }) in unlocked.paths.into_iter().rev() {
            // Somebody may have put another directory there since.
            let is_it = |dir: &OwnedFd| Identity::of(dir, c"").is_ok_and(|(found, _)| found == identity);
            if let Some(dir) = self.open_directory(&path).ok().filter(|dir| is_it(dir)) {
                if let Err(error) = writable::lock_again(&*dir, mode) {
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

    /// As [`Tree::find`], but makes a directory of this user searchable if it is not.
    pub(crate) fn find_to_write(&self, path: &[u8]) -> io::Result<Place> {
        match self.find(path) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied && self.unlock(split(path).0) => self.find(path),
            other => other,
        }
    }

    /// The place of an entry whose directory is there.
    pub(crate) fn find(&self, path: &[u8]) -> io::Result<Place> {
        let (parent, name) = split(path);
        Ok(Place { dir: self.open_directory(parent)?, name: CString::new(name)? })
    }

    /// Makes a directory that its owner can write to until its attributes are applied. What is there and no
    /// directory, a link to one included, gives way. `None` if the job has not made it.
    pub(crate) fn make_directory(&self, path: &[u8], meta: &Meta) -> io::Result<Option<Made>> {
        // A peer that may only add leaves existing entries as they are.
        let may_change = self.manner.preserve && self.manner.replace;
        if path.is_empty() {
            if may_change {
                self.narrow(self.root.as_fd(), meta);
            }
            return Ok(self.made_before.lock().expect("no panics under the lock").remove(&key_of(path)));
        }
        let place = self.place(path)?;
        let (parent, _) = split(path);
        // With -p, group bits are for the group of the source, which the directory gets at the end.
        let mode = if self.manner.preserve { 0o700 } else { meta.mode & 0o777 | 0o700 };
        let new = self.make_in_place(&place, path, Mode::from_raw_mode(mode))?.map(|new| new.made);
        let early = self.early.lock().expect("no panics under the lock").remove(path);
        let before = self.made_before.lock().expect("no panics under the lock").remove(&key_of(path));
        let made = match (new, early.or(before)) {
            (None, Some(earlier)) => match self.open_made(path, earlier)? {
                None if early.is_some() && !self.may_be_renumbered(&*self.open_to_write(path)?)? => {
                    return Err(io::Error::other("another directory has its name now; attributes were not set"));
                }
                Some(dir) => {
                    if self.manner.preserve {
                        Tree::drop_inherited(dir.as_fd())?;
                    }
                    self.set_permissions(&dir, mode)?;
                    Some(Made::Done(Identity::of(&dir, c"")?.0.fingerprint()))
                }
                None => None,
            },
            (new, _) => new,
        };
        self.remember_directory(&place);
        if made.is_some() {
            self.change(parent);
        } else if may_change {
            self.narrow(self.open_to_write(path)?.as_fd(), meta);
        }
        Ok(made)
    }

    /// Sets the permissions of a directory, limited by the default list that it has inherited, or by the umask. Its set-group-id bit comes
    /// from the directory above.
    fn set_permissions(&self, dir: &OwnedFd, mode: u32) -> io::Result<()> {
        let list = if self.manner.preserve { None } else { thruway_fs::xattr::default_acl(dir.as_fd())? };
        if let Some(list) = list {
            thruway_fs::xattr::write(dir.as_fd(), ACCESS_ACL.to_bytes(), &list.limited(mode).encode())?;
        } else {
            let now = rustix::fs::fstat(dir)?.st_mode & 0o7777;
            let wanted = mode & !self.umask | now & 0o2000;
            if wanted != now {
                rustix::fs::fchmod(dir, Mode::from_raw_mode(wanted))?;
            }
        }
        self.sync_if_by_file(dir);
        Ok(())
    }

    /// Sets the permissions of directories without records. Returns those that failed. After the record of a directory has failed, these
    /// keep the mode 0700: that record was perhaps for one of them.
    pub(crate) fn finish_early(&self) -> Vec<(Vec<u8>, io::Error)> {
        let early = std::mem::take(&mut *self.early.lock().expect("no panics under the lock"));
        if self.is_unsettled.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let paths = early.paths.into_iter().map(|(path, early)| (path, early.made));
        let set = |(path, made): (Vec<u8>, Made)| {
            let dir = self.open_made(&path, made);
            let set = dir.and_then(|dir| dir.map_or(Ok(()), |dir| self.set_permissions(&dir, 0o777)));
            set.err().map(|e| (path, e))
        };
        // The root directory, if it got no record: the sources are files.
        let root = self.made_before.lock().expect("no panics under the lock").remove(&key_of(b""));
        paths.chain(root.map(|made| (Vec::new(), made))).filter_map(set).collect()
    }

    /// Leaves the directories of the job to its next attempt: one of them lacks attributes.
    pub(crate) fn leave_unsettled(&self) {
        self.is_unsettled.store(true, Ordering::Relaxed);
    }

    /// Records that all directories have their attributes, unless one was left without.
    pub(crate) fn settle(&self) {
        if let Some(journal) = self.journal.as_ref().filter(|_| !self.is_unsettled.load(Ordering::Relaxed)) {
            journal.settled();
        }
    }

    /// Applies a directory's attributes, when nothing more is put into it. `made` if the job made it.
    pub(crate) fn finish_directory(&self, path: &[u8], meta: &Meta, made: Option<Made>) -> io::Result<Shortcomings> {
        // A peer that may only add leaves existing entries as they are.
        let may_change = self.manner.preserve && self.manner.replace;
        let made_dir = made.map(|made| self.open_made(path, made)).transpose()?.flatten();
        let dir = match made_dir {
            Some(dir) => dir,
            None if !may_change => return Ok(Shortcomings::default()),
            None => {
                let dir = self.open_to_write(path)?;
                if made.is_some() && !self.may_be_renumbered(&dir)? {
                    return Err(io::Error::other("another directory has its name now; attributes were not set"));
                }
                dir
            }
        };
        self.change(path);
        // The mode that it had is not to come back.
        self.unlocked.lock().expect("no panics under the lock").remove(path);
        if self.manner.preserve {
            if self.has_attributes(dir.as_fd(), meta) {
                return Ok(Shortcomings::default());
            }
            let short = self.apply(dir.as_fd(), meta, false, &Before::Anything);
            self.sync_if_by_file(&*dir);
            return Ok(short);
        }
        self.set_permissions(&dir, meta.mode & 0o777)?;
        Ok(Shortcomings::default())
    }

    /// Applies attributes to a file with the right content. `ours`: this job has written it. Returns the shortcomings and the change time.
    ///
    /// # Errors
    /// Also if another file has the name, if this one last changed at another time than `changed`, or if it must not get the attributes
    /// ([`Tree::may_get`]).
    pub(crate) fn refresh(
        &self,
        path: &[u8],
        meta: &Meta,
        identity: Identity,
        (ours, changed): (bool, Option<i64>),
    ) -> io::Result<(Shortcomings, i64)> {
        let place = self.find(path)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let check = |file: BorrowedFd<'_>| {
            let (found, stat) = Identity::of(file, c"")?;
            let is_file = FileType::from_raw_mode(stat.stx_mode.into()).is_file();
            let is_unchanged = changed.is_none_or(|changed| changed == nanoseconds(stat.stx_ctime));
            let offered = meta.xattrs.iter().find(|(name, _)| name == CAPABILITIES.to_bytes());
            let capabilities = offered.map_or(0, |(_, value)| capabilities_hash(value));
            let grants = Grants { owner: meta.uid, group: meta.gid, mode: meta.mode, capabilities };
            let here = || capabilities_hash(&thruway_fs::xattr::capabilities(file, c""));
            let may_get = ours || self.may_get(&stat, here, &grants);
            if !is_file || found != identity || stat.stx_size != meta.size || !is_unchanged || !may_get {
                return Err(io::Error::other("it changed at the destination meanwhile"));
            }
            Ok(())
        };
        let file = match rustix::fs::openat(&place.dir, &place.name, flags, Mode::empty()) {
            Err(Errno::ACCESS) => {
                let entry = Unopened::look(&place.dir, &place.name)?;
                check(entry.as_fd())?;
                entry.open_whatever_it_may()?
            }
            opened => {
                let file = opened?;
                check(file.as_fd())?;
                file
            }
        };
        self.note(split(path).0, &place.dir)?;
        self.changed().many = true;
        let short = match self.has_attributes(file.as_fd(), meta) {
            true => Shortcomings::default(),
            false => self.apply(file.as_fd(), meta, false, &Before::Anything),
        };
        self.sync_if_by_file(&file);
        let (_, stat) = Identity::of(&file, c"")?;
        if self.is_made(identity, &stat) {
            self.remember_identity(identity, &stat);
        }
        Ok((short, nanoseconds(stat.stx_ctime)))
    }

    /// Removes all entries of a directory but those in `keep`. The failure in the result is that of the listing; others go to `remover`.
    pub(crate) fn prune(
        &self,
        path: &[u8],
        below: &[u8],
        keep: &HashSet<Vec<u8>>,
        own: &CStr,
        remover: &Remover<'_>,
    ) -> io::Result<Removed> {
        let mut total = Removed::default();
        // The source has the right to remove.
        let unlock = || !remover.dry_run && self.unlock_if(path, |_| true);
        let opened = match self.open_directory(path) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied && unlock() => self.open_directory(path),
            other => other,
        };
        let (mut is_writable, mut aliases) = (None, None);
        let dir = match opened {
            // Not there, or, in a dry run, still something else.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(total),
            other => other?,
        };
        if !remover.dry_run {
            self.change(path);
        }
        for name in thruway_fs::listing::names(&*dir)? {
            let name = match name {
                Ok(name) => name,
                // The missing destination of a dry run, which counts as an empty directory.
                Err(Errno::NOENT) if remover.dry_run && rustix::fs::fstat(&dir)?.st_nlink == 0 => break,
                Err(e) => {
                    let e = io::Error::from(e);
                    let failure = io::Error::new(e.kind(), format!("the directory cannot be listed to its end: {e}"));
                    total.failure.get_or_insert((below.to_vec(), failure));
                    break;
                }
            };
            if remover.is_over.load(Ordering::SeqCst) {
                break;
            }
            let bytes = name.to_bytes();
            if keep.contains(bytes) || *name == *own || is_fresh_own(&dir, &name) {
                continue;
            }
            // Where two names are one, an entry that came under the other is not in the list.
            if self.is_ours(&dir, &name)? && self.may_be_alias(&dir, &name, keep, &mut aliases)? {
                total.left += 1;
                continue;
            }
            is_writable.get_or_insert_with(|| writable::is_writable(&*dir) || unlock());
            let removed = remover.remove(&*dir, &name, below);
            total.count += removed.count;
            total.left += removed.left;
        }
        Ok(total)
    }

    /// False if an entry of the job has this name as a further hard link, and not as another form of a name in `keep`. `aliases` has the
    /// hashes of entries with names in `keep` that the directory lists in another form.
    fn may_be_alias(
        &self,
        dir: &OwnedFd,
        name: &CStr,
        keep: &HashSet<Vec<u8>>,
        aliases: &mut Option<HashSet<u64>>,
    ) -> io::Result<bool> {
        let (identity, stat) = Identity::of(dir, name)?;
        if stat.stx_nlink <= 1 {
            return Ok(true);
        }
        if aliases.is_none() {
            let listed: HashSet<Vec<u8>> =
                thruway_fs::listing::names(dir)?.map(|name| Ok(name?.into_bytes())).collect::<io::Result<_>>()?;
            let unlisted = keep.iter().filter(|name| !listed.contains(*name));
            let found = unlisted.filter_map(|name| Identity::of(dir, &CString::new(&name[..]).ok()?).ok());
            *aliases = Some(found.map(|(identity, stat)| identity.hash_on(&stat)).collect());
        }
        Ok(aliases.as_ref().is_some_and(|aliases| aliases.contains(&identity.hash_on(&stat))))
    }
}

/// Takes a root directory that was opened after it was made as one of the job. With `preserve`, it loses what it has inherited.
/// `None` if somebody else may have put another one in its place, unless the source may change any.
pub(crate) fn own_root(root: &OwnedFd, since: i64, any: bool, preserve: bool) -> io::Result<Option<Made>> {
    let (identity, stat) = Identity::of(root, c"")?;
    if !any && !is_new(identity, &stat, since) {
        return Ok(None);
    }
    if preserve {
        Tree::drop_inherited(root.as_fd())?;
    }
    Ok(Some(Made::Done(identity.fingerprint())))
}

/// The process's umask, read without changing it.
fn current_umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o022)
}

#[cfg(test)]
mod tests;
