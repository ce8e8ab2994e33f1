//! Puts entries in place: what may make way, and how it is replaced.

use super::clearing::ClearingManner;
use super::names::temp_name;
use super::{Clearing, Place, Tree};
use crate::sink::attributes::{Shortcomings, Trust, Unopened};
use crate::sink::journal::key_of;
use crate::sink::made::Made;
use crate::wire::Meta;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, Statx};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thruway_fs::beneath::{self, Links, split};
use thruway_fs::identity::nanoseconds;
use thruway_fs::xattr::ACCESS_ACL;
use thruway_fs::{Identity, disk_lock, writable};

/// Reason to refuse an entry in place of a directory.
pub(crate) const IN_THE_WAY: &str = "a directory with contents is in the way (--delete without --exclude removes it)";

/// Refuses a destination that is a symbolic link to a device, pipe or socket, or to an open file of a process
/// (`/dev/stdout`): a copy replaces the link and would write nothing to its target. With `confined`, links are resolved
/// beneath `dir` only, and a link that leads out of it counts as dangling.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] with the reason.
pub(crate) fn check_destination(dir: impl AsFd, name: &CStr, confined: bool) -> io::Result<()> {
    if !rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| is_link(&stat)) {
        return Ok(());
    }
    let refuse = |what: &str| {
        let why = format!("destination is a link to {what}; thruway does not replace it");
        Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
    };
    let resolved = match confined {
        true => beneath::open(&dir, name.to_bytes(), OFlags::PATH, Links::Inside),
        false => {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            match rustix::fs::openat2(&dir, name, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
                Err(Errno::LOOP) if rustix::fs::openat(&dir, name, flags, Mode::empty()).is_ok() => {
                    return refuse("an open file of a process");
                }
                other => other,
            }
        }
    };
    // A dangling link is replaced, like a link to a file.
    let Ok(stat) = resolved.and_then(rustix::fs::fstat) else { return Ok(()) };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice | FileType::CharacterDevice => refuse("a device"),
        FileType::Fifo => refuse("a named pipe"),
        FileType::Socket => refuse("a socket"),
        _ => Ok(()),
    }
}

/// Refuses to replace or remove a file that a program uses as a disk.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] if the entry is such a file.
pub(crate) fn check_disk(dir: impl AsFd, name: &CStr) -> io::Result<()> {
    if !disk_lock::is_disk(dir, name) {
        return Ok(());
    }
    let why = "the file is in use as a disk by a daemon or a virtual machine; it is neither replaced nor removed";
    Err(io::Error::new(io::ErrorKind::ResourceBusy, why))
}

fn is_link(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Symlink
}

impl Tree {
    /// Applies [`check_destination`] to a link that the command names. Others are entries of a tree, and are replaced.
    fn check_link(&self, place: &Place) -> io::Result<()> {
        if !self.manner.named.contains(place.name.as_bytes()) || !Arc::ptr_eq(&place.dir, &self.root) {
            return Ok(());
        }
        check_destination(&place.dir, &place.name, self.manner.confined)
    }

    /// From now on, the directory is known as one of this session. Another entry with its name is not: it could be linked.
    pub(super) fn remember_directory(&self, place: &Place) {
        if let Ok((identity, stat)) = Identity::of(&place.dir, &place.name)
            && FileType::from_raw_mode(stat.stx_mode.into()).is_dir()
        {
            self.remember_identity(identity, &stat);
        }
    }

    /// From now on, the entry is known as one that this job has put in place.
    pub(crate) fn remember_identity(&self, identity: Identity, stat: &Statx) {
        self.ours.insert(identity, stat);
        if !self.has_all_rights() {
            self.left.insert(identity, stat);
        }
    }

    /// Remembers an entry of this job once more, after its attributes were set.
    fn remember_again(&self, place: &Place) {
        if let Ok((identity, stat)) = Identity::of(&place.dir, &place.name)
            && self.is_made(identity, &stat)
        {
            self.remember_identity(identity, &stat);
        }
    }

    /// From now on, hard links may be made to this entry, which equals one of the source.
    pub(crate) fn remember_linkable(&self, identity: Identity, stat: &Statx) {
        self.linkable.insert(identity, stat);
    }

    /// True for an entry that a hard link of the source may lead to.
    fn is_linkable(&self, identity: Identity, stat: &Statx) -> bool {
        let is_full = self.ours.is_full() || self.linkable.is_full();
        is_full || self.linkable.contains(identity, stat) || self.is_known(identity, stat)
    }

    /// True for an entry that this job has put in place, or found equal to one of the source.
    fn is_known(&self, identity: Identity, stat: &Statx) -> bool {
        self.ours.contains(identity, stat) || self.found.contains(identity, stat)
    }

    pub(super) fn is_ours(&self, dir: impl AsFd, name: &CStr) -> io::Result<bool> {
        let (identity, stat) = match Identity::of(dir, name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other?,
        };
        Ok(self.ours.is_full() || self.found.is_full() || self.is_known(identity, &stat))
    }

    /// True if there are so many entries of this job that not all of them are known.
    pub(crate) fn may_forget(&self) -> bool {
        self.ours.is_full()
    }

    /// True for an entry that this job has put in place, unless there are too many.
    pub(crate) fn is_made(&self, identity: Identity, stat: &Statx) -> bool {
        self.ours.contains(identity, stat)
    }

    /// Whether what has this name may make way: not if it came with this very copy, under a name that is
    /// another one to the source and the same to this file system.
    pub(super) fn is_of_this_copy(&self, place: &Place) -> io::Result<()> {
        let (identity, stat) = Identity::of(&place.dir, &place.name)?;
        if !self.is_known(identity, &stat) {
            return Ok(());
        }
        let why = "another entry of this copy has this name here (a file system may take names that differ in case \
                   for one); not overwriting it";
        Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
    }

    /// Refuses to replace a device, pipe or socket by an entry of another type. `special` entries may replace any, and so may entries below
    /// the destination with `-p`.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] with the reason.
    pub(crate) fn check_special(&self, place: &Place, there: FileType, special: bool) -> io::Result<()> {
        let is_named = || self.manner.named.contains(place.name.as_bytes()) && Arc::ptr_eq(&place.dir, &self.root);
        let why = match there {
            FileType::BlockDevice | FileType::CharacterDevice if !special && is_named() => {
                "destination is a device; thruway does not write into devices"
            }
            FileType::BlockDevice | FileType::CharacterDevice if !special && !self.manner.preserve => {
                "a device is in the way; remove it first (-p replaces it)"
            }
            FileType::Fifo | FileType::Socket if !special && !self.manner.preserve => {
                "a named pipe or socket is in the way; remove it first (-p replaces it)"
            }
            _ => return Ok(()),
        };
        Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
    }

    /// Removes what is in the way of an entry of another type. `special` entries may replace devices. `whole`: also a directory with
    /// contents, which can take long.
    pub(super) fn clear_way(&self, place: &Place, stat: &Stat, special: bool, whole: bool) -> io::Result<()> {
        self.may_replace()?;
        self.is_of_this_copy(place)?;
        let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::AlreadyExists, why.to_string()));
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => match rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::REMOVEDIR) {
                Ok(()) => Ok(()),
                Err(Errno::NOTEMPTY | Errno::EXIST) if self.manner.delete && whole => {
                    let place = Place { dir: Arc::clone(&place.dir), name: place.name.clone() };
                    let manner = ClearingManner { shows_names: self.manner.readable, may_unlock: true };
                    let mut clearing = Clearing::new(place, manner)?;
                    let removed = clearing.remove(&self.over, None);
                    self.count_cleared(&clearing);
                    removed.map(drop)
                }
                Err(Errno::NOTEMPTY | Errno::EXIST) => refuse(IN_THE_WAY),
                Err(e) => Err(e.into()),
            },
            kind => {
                self.check_special(place, kind, special)?;
                if kind == FileType::Symlink {
                    self.check_link(place)?;
                }
                Tree::check_disk(place)?;
                Ok(rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::empty())?)
            }
        }
    }

    /// The directory that is in the way of an entry of another type, if it may be removed with its contents. `writes`: not in a dry run.
    ///
    /// # Errors
    /// If it may not.
    pub(crate) fn in_the_way(&self, path: &[u8], writes: bool) -> io::Result<Option<Place>> {
        let place = match self.find(path) {
            // Not there, or another entry gives way to its directory.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
            other => other?,
        };
        match rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() => {}
            _ => return Ok(None),
        }
        self.may_replace()?;
        self.is_of_this_copy(&place)?;
        if !self.manner.delete {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            return match beneath::open(&place.dir, place.name.to_bytes(), flags, Links::Never) {
                Ok(dir) if thruway_fs::listing::names(&dir)?.next().is_some() => {
                    Err(io::Error::new(io::ErrorKind::AlreadyExists, IN_THE_WAY))
                }
                Ok(_) => Ok(None),
                // Its removal shows whether it is empty.
                Err(Errno::ACCESS) if writes => Ok(None),
                Err(e) => Err(e.into()),
            };
        }
        Ok(Some(place))
    }

    /// The removal of a directory that [`Tree::in_the_way`] has found. `writes`: not in a dry run.
    ///
    /// # Errors
    /// If its own directory cannot be examined.
    pub(crate) fn clearing(&self, path: &[u8], place: Place, writes: bool) -> io::Result<Clearing> {
        if writes {
            self.make_writable(split(path).0, &place);
        }
        Clearing::new(place, ClearingManner { shows_names: self.manner.readable, may_unlock: writes })
    }

    /// Makes the directory of an entry writable for the time of the copy, if it is this user's and read-only.
    fn make_writable(&self, parent: &[u8], place: &Place) {
        if !writable::is_writable(&place.dir) {
            self.unlock(parent);
        }
    }

    /// Counts the contents of a directory that gave way.
    pub(crate) fn count_cleared(&self, clearing: &Clearing) {
        self.cleared.fetch_add(clearing.removed(), Ordering::Relaxed);
    }

    /// Applies [`check_disk`] to an entry of the tree.
    fn check_disk(place: &Place) -> io::Result<()> {
        check_disk(&place.dir, &place.name)
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

    /// Makes a symbolic link, replacing what is there.
    pub(crate) fn symlink(&self, path: &[u8], target: &[u8], meta: &Meta) -> io::Result<Shortcomings> {
        let place = self.place(path)?;
        let target = CString::new(target)?;
        let is_equal = |entry: &Unopened| {
            rustix::fs::readlinkat(entry, c"", Vec::new()).is_ok_and(|here| here.as_bytes() == target.as_bytes())
        };
        if self.keep_equal(path, &place, meta, is_equal)? {
            return Ok(Shortcomings::default());
        }
        self.replace(path, &place, (false, false), |dir, name| rustix::fs::symlinkat(&target, dir, name))?;
        // They come after its name, and it cannot be synced itself.
        self.changed().many |= self.manner.preserve;
        let short = self.apply_unopened((&place.dir, &place.name), FileType::Symlink, meta, is_equal);
        self.remember_again(&place);
        Ok(short)
    }

    /// True if a link or special file stays because it equals the one of the record. Its attributes count if the source has the right to
    /// replace it. False as well if the source has no right to learn that.
    fn keep_equal(
        &self,
        path: &[u8],
        place: &Place,
        meta: &Meta,
        is_equal: impl FnOnce(&Unopened) -> bool,
    ) -> io::Result<bool> {
        let Ok(entry) = Unopened::look(&place.dir, &place.name) else { return Ok(false) };
        let (identity, stat) = Identity::of(&entry, c"")?;
        let is_of_job = self.entries_before.get(&key_of(path)) == Some(&identity.fingerprint());
        let has_attributes = || !self.manner.preserve || self.has_attributes(entry.as_fd(), meta);
        let stays = FileType::from_raw_mode(entry.stat.st_mode) == FileType::from_raw_mode(meta.mode)
            && !self.is_known(identity, &stat)
            && self.may_keep(&entry.stat)
            && (is_of_job || self.manner.readable || self.manner.replace)
            && is_equal(&entry)
            && (!self.manner.replace || has_attributes());
        if !stays {
            return Ok(false);
        }
        match (is_of_job, entry.stat.st_nlink) {
            // Its owner has changed it since an earlier session made it.
            (true, _) if !is_link(&entry.stat) && entry.stat.st_mode & 0o7777 != self.mode(meta) => {
                self.ours.insert(identity, &stat);
            }
            (true, _) => self.remember_identity(identity, &stat),
            // Entries of others give no rights.
            (false, ..=1) => self.found.insert(identity, &stat),
            // Its other names can be entries of their own at the source.
            (false, _) => self.remember_linkable(identity, &stat),
        }
        // An earlier attempt may not have synced its name and attributes.
        self.change(split(path).0);
        self.changed().many |= self.manner.preserve;
        Ok(true)
    }

    /// True if an equal link or special file may stay: it is this user's, or its owner is compared. Another owner could change it later.
    pub(crate) fn may_keep(&self, stat: &Stat) -> bool {
        stat.st_uid == rustix::process::geteuid().as_raw() || self.gives_owner()
    }

    /// # Errors
    /// For a device, if the peer may not make devices.
    pub(crate) fn check_device(&self, meta: &Meta) -> io::Result<()> {
        let kind = FileType::from_raw_mode(meta.mode);
        if self.manner.trust == Trust::Peer && !matches!(kind, FileType::Fifo | FileType::Socket) {
            let why = "creating devices requires a key with the 'privileged' option";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok(())
    }

    /// Makes a special file, replacing what is there.
    pub(crate) fn special(&self, path: &[u8], meta: &Meta, rdev: u64) -> io::Result<Shortcomings> {
        let kind = FileType::from_raw_mode(meta.mode);
        self.check_device(meta)?;
        if !matches!(kind, FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a special file"));
        }
        let place = self.place(path)?;
        let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
        let is_equal = |entry: &Unopened| !is_device || entry.stat.st_rdev == rdev;
        if self.keep_equal(path, &place, meta, is_equal)? {
            return Ok(Shortcomings::default());
        }
        // With -p, it gets its mode after an inherited access control list is removed.
        let mode = Mode::from_raw_mode(if self.manner.preserve { 0o600 } else { self.mode(meta) & 0o777 });
        self.replace(path, &place, (true, false), |dir, name| rustix::fs::mknodat(dir, name, kind, mode, rdev))?;
        self.changed().many = true;
        let short = self.apply_unopened((&place.dir, &place.name), kind, meta, is_equal);
        self.remember_again(&place);
        Ok(short)
    }

    /// Gives a file another name, and replaces an entry of that name. A link to a file of another job requires the rights to read
    /// and to replace it: the key of the source can have more rights to the new name.
    pub(crate) fn link(&self, path: &[u8], target: &[u8]) -> io::Result<()> {
        let (from, to) = (self.find(target)?, self.place(path)?);
        // From here on the file itself: its name can come to mean another file.
        let source = Unopened::look(&from.dir, &from.name)?;
        let (identity, before) = Identity::of(&source, c"")?;
        // Moving one name of a file over another does nothing, and is not to be taken for more.
        if Identity::of(&to.dir, &to.name).is_ok_and(|(there, stat)| there.hash_on(&stat) == identity.hash_on(&before))
        {
            return Ok(());
        }
        if !(self.has_all_rights() || (self.is_made(identity, &before) && self.left.contains(identity, &before))) {
            let why = "a hard link to a file that this copy has not put there, or that has changed since, requires the \
                       rights to read and to replace";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        if !self.is_linkable(identity, &before) {
            // It failed, or somebody has put another entry there.
            let what = match before.stx_uid == rustix::process::geteuid().as_raw() {
                true => "is not the entry that this copy has put there",
                false => "is another user's here; a copy without -u replaces it",
            };
            return Err(io::Error::other(format!("not linked: {} {what}", crate::escape(target))));
        }
        if self.manner.named.is_source(path) && FileType::from_raw_mode(before.stx_mode.into()) == FileType::Symlink {
            // As a link that the source would send under this name.
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a source of the command cannot be a link"));
        }
        let special = !FileType::from_raw_mode(before.stx_mode.into()).is_file();
        if !special {
            self.check_link(&to)?;
        }
        self.replace(path, &to, (special, true), |dir, name| source.link(dir, name))?;
        let (_, after) = Identity::of(&source, c"")?;
        let rights = |stat: &Statx| (stat.stx_mode, stat.stx_uid, stat.stx_gid);
        let version = |stat: &Statx| (rights(stat), stat.stx_size, nanoseconds(stat.stx_mtime));
        if version(&before) == version(&after) {
            if self.is_made(identity, &after) {
                self.remember_identity(identity, &after);
            }
            // Without a record of the new change time, the file would count as changed since it was put in place.
            if let Some(journal) = &self.journal {
                journal.linked(&key_of(target), nanoseconds(before.stx_ctime), nanoseconds(after.stx_ctime));
            }
        }
        Ok(())
    }

    /// Makes an entry; where there is one, under a temporary name that is then moved over it.
    fn replace(
        &self,
        path: &[u8],
        place: &Place,
        kind: (bool, bool),
        make: impl Fn(&OwnedFd, &CStr) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        let (parent, _) = split(path);
        self.change(parent);
        let replaced = self.replace_in(parent, path, place, kind, make);
        // Once more: it may have been synced in between.
        self.change(parent);
        replaced
    }

    fn replace_in(
        &self,
        parent: &[u8],
        path: &[u8],
        place: &Place,
        (special, linked): (bool, bool),
        make: impl Fn(&OwnedFd, &CStr) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        let since = Made::now();
        let remember = || {
            // A link adds a name to an entry that is known already, or is another's.
            let found = Identity::of(&place.dir, &place.name).ok().filter(|_| !linked);
            let Some((identity, stat)) = found else { return };
            // A regular file was put here by somebody else in the same moment, and so was an older entry.
            let is_file = FileType::from_raw_mode(stat.stx_mode.into()).is_file();
            if is_file || !self.may_be_made(&place.dir, (identity, &stat), since) {
                return;
            }
            self.remember_identity(identity, &stat);
            // Without all rights, a later attempt must recognise it: to keep it, or to make links to it.
            if let Some(journal) = self.journal.as_ref().filter(|_| !self.has_all_rights()) {
                journal.entry(&key_of(path), identity.fingerprint());
            }
        };
        match self.writing(parent, || make(&place.dir, &place.name)) {
            Ok(()) => {
                remember();
                return Ok(());
            }
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        // The kernel reports a name that exists before a directory that is read-only.
        self.make_writable(parent, place);
        let stat = rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            // Other directories have been emptied by now.
            self.clear_way(place, &stat, special, linked)?;
            make(&place.dir, &place.name)?;
            remember();
            return Ok(());
        }
        self.may_replace()?;
        self.is_of_this_copy(place)?;
        self.check_special(place, kind, special)?;
        Tree::check_disk(place)?;
        let temp = temp_name(&place.name, &[0x5a; 16], &crate::sink::journal::key_of(path));
        let _ = rustix::fs::unlinkat(&place.dir, &temp, AtFlags::empty());
        make(&place.dir, &temp)?;
        let moved = rustix::fs::renameat(&place.dir, &temp, &place.dir, &place.name);
        // Renaming one name of a file over another of the same leaves both.
        let _ = rustix::fs::unlinkat(&place.dir, &temp, AtFlags::empty());
        moved?;
        remember();
        Ok(())
    }

    /// Gives a finished file its name, and returns the change time of its inode. `replacing`: without `-p`, it gets the permissions of the
    /// file that it replaces or, if there is none any more, those of a new file with this mode.
    ///
    /// # Errors
    /// Also if what is in the way may not be replaced, or if what has the temporary name is not that file.
    pub(crate) fn put_in_place(
        &self,
        parent: &[u8],
        place: &Place,
        (temp, identity): (&CStr, Identity),
        replacing: Option<u32>,
    ) -> io::Result<i64> {
        self.change(parent);
        let Place { dir, name } = place;
        let file = Unopened::look(dir, temp)?;
        let (found, _) = Identity::of(&file, c"")?;
        if found != identity || !file.is(FileType::RegularFile) {
            return Err(io::Error::other("its temporary file was replaced by another"));
        }
        let rename = || rustix::fs::renameat_with(dir, temp, dir, name, RenameFlags::NOREPLACE);
        let mut mode = replacing;
        match self.writing(parent, rename) {
            Ok(()) => {}
            Err(Errno::EXIST | Errno::INVAL | Errno::NOSYS) => {
                match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => {
                        if self.make_way(place, &file, &stat, replacing.is_some())? {
                            mode = None;
                        }
                        rustix::fs::renameat(dir, temp, dir, name)?;
                    }
                    Err(Errno::NOENT) if self.manner.replace => rustix::fs::renameat(dir, temp, dir, name)?,
                    // A link fails if there is an entry by now; a renaming would replace it.
                    Err(Errno::NOENT) => {
                        file.link(dir, name)?;
                        rustix::fs::unlinkat(dir, temp, AtFlags::empty())?;
                    }
                    Err(e) => return Err(e.into()),
                }
            }
            Err(e) => return Err(e.into()),
        }
        if let Some(mode) = mode {
            self.set_new_permissions(dir.as_fd(), &file, mode)?;
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

    /// Prepares for a file to take the place of another: without `preserve` it gets owner and permissions of that, as far as this user can
    /// give them. False if it does not get them.
    fn make_way(&self, place: &Place, file: &Unopened, stat: &Stat, replacing: bool) -> io::Result<bool> {
        self.may_replace()?;
        self.is_of_this_copy(place)?;
        Tree::check_disk(place)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if !self.manner.preserve && replacing => {
                self.changed().many = true;
                let open = self.volumes.any_by_file().then(|| file.open_whatever_it_may()).transpose()?;
                let old = Unopened::look(&place.dir, &place.name)?;
                let gives = FileType::from_raw_mode(old.stat.st_mode).is_file()
                    && self.gives_permissions(&place.dir, &old.stat);
                if gives {
                    let given = match self.privileged {
                        true => file.chown(old.stat.st_uid, old.stat.st_gid),
                        false if file.stat.st_gid == old.stat.st_gid => Ok(()),
                        false => file.give_to_group(old.stat.st_gid),
                    };
                    let has_group = match given {
                        Ok(()) => true,
                        // This user namespace has no such owner, or the user is not in the group: another group gets no rights.
                        Err(Errno::INVAL | Errno::PERM) => false,
                        Err(e) => return Err(e.into()),
                    };
                    // Before the mode, which gives rights to users in an inherited list.
                    let mode = thruway_fs::xattr::copy_acl(old.as_fd(), old.stat.st_mode, file.as_fd(), has_group)?;
                    file.chmod(mode & 0o1777)?;
                }
                open.iter().for_each(|open| self.sync_if_by_file(open));
                return Ok(gives);
            }
            FileType::RegularFile => {}
            FileType::Symlink => self.check_link(place)?,
            FileType::Directory => self.clear_way(place, stat, false, true)?,
            other => self.check_special(place, other, false)?,
        }
        Ok(false)
    }

    /// Gives a file without `preserve` the permissions of a new file with this mode.
    fn set_new_permissions(&self, dir: BorrowedFd<'_>, file: &Unopened, mode: u32) -> io::Result<()> {
        match thruway_fs::xattr::default_acl(dir)? {
            Some(list) => {
                thruway_fs::xattr::write(file.as_fd(), ACCESS_ACL.to_bytes(), &list.limited(mode & 0o777).encode())
            }
            None => Ok(file.chmod(mode & 0o777 & !self.umask)?),
        }
    }
}
