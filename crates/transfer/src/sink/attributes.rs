//! What entries get besides their content: owner, permissions, extended attributes, times.
//!
//! Attributes are only ever given to something that has been opened and looked at, never to a name: between two system
//! calls a name may come to mean something else, a link to `/etc/shadow` included.

use super::tree::Tree;
use crate::wire::Meta;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, Statx, Timespec, Timestamps};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use thruway_fs::Identity;
use thruway_fs::acl::Acl;
use thruway_fs::xattr::{ACCESS_ACL, Attributes, CAPABILITIES, DEFAULT_ACL};

/// How far a source is trusted with attributes that give rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// The user of this machine asked for the copy: owners, set-id bits, devices, privileged extended
    /// attributes are kept where the process may.
    Operator,
    /// Somebody else did: none of those.
    Peer,
}

/// Seconds in which no file system counts more coarsely (vfat: two).
const TIME_STEP: u64 = 2;

/// Set-user-ID and set-group-ID bits of a mode.
const SET_ID: u32 = 0o6000;
/// Reason in reports of attributes that a daemon does not set for this key.
const PRIVILEGED: &str = "this needs a key with the 'privileged' option";

/// Shortcomings of the whole target, told once and not for every file.
#[derive(Default)]
pub(super) struct Told {
    no_attributes: AtomicBool,
    no_owners: AtomicBool,
    no_times: AtomicBool,
    no_modes: AtomicBool,
    no_labels: AtomicBool,
}

/// Attributes of an entry that could not be kept. The entry itself is in place.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Shortcomings {
    /// Sentences; what has been told for the whole target is not told again.
    pub(super) told: Vec<String>,
    /// Reports of attributes that this user or key has no right to set. A repeated attempt fails in the same way.
    pub(super) refused: Vec<String>,
    any: bool,
}

impl Shortcomings {
    pub(super) fn push(&mut self, sentence: String) {
        self.told.push(sentence);
        self.any = true;
    }

    fn refuse(&mut self, sentence: String) {
        self.refused.push(sentence);
        self.any = true;
    }

    /// Whether nothing fell short.
    pub(crate) fn is_none(&self) -> bool {
        !self.any
    }
}

/// Extended attributes and rights that an entry may have before it gets those of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Before {
    /// None: the entry was made where nothing is inherited.
    Nothing,
    /// The entry was made by this job, below a directory with a default access control list.
    Inherited,
    /// Any: the entry was there before, or others had access to it.
    Anything,
    /// Without `-p`, below a directory with this default access control list, which applies in place of the umask.
    List(Arc<Acl>),
    /// Without `-p`: the entry is going to replace a file, and gets the permissions of that file together with its name.
    Replacing,
}

/// Attributes of the source's file that give rights.
pub(super) struct Grants {
    pub(super) owner: u32,
    pub(super) group: u32,
    pub(super) mode: u32,
    /// [`capabilities_hash`](crate::wire::capabilities_hash).
    pub(super) capabilities: u64,
}

/// An entry that cannot be opened for reading without following or waiting, and what it is.
pub(super) struct Unopened {
    fd: OwnedFd,
    pub(super) stat: Stat,
}

impl Unopened {
    /// The entry of this name in a directory, a symbolic link itself included.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn look(dir: impl AsFd, name: &CStr) -> rustix::io::Result<Unopened> {
        let fd = rustix::fs::openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Unopened { fd, stat })
    }

    /// A path that leads to this very entry, whatever its names have come to mean.
    fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }

    /// Whether it is an entry of this kind with one name: what somebody put there in place of ours may have several.
    pub(super) fn is(&self, kind: FileType) -> bool {
        FileType::from_raw_mode(self.stat.st_mode) == kind && self.stat.st_nlink <= 1
    }

    /// Opens a file of ours for reading; if its permissions forbid that, they are changed first.
    pub(super) fn open_whatever_it_may(&self) -> rustix::io::Result<OwnedFd> {
        let open = || rustix::fs::open(self.path(), OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
        match open() {
            Err(rustix::io::Errno::ACCESS) => self.chmod(0o600).and_then(|()| open()),
            other => other,
        }
    }

    /// Gives the entry another name.
    pub(super) fn link(&self, dir: impl AsFd, name: &CStr) -> rustix::io::Result<()> {
        rustix::fs::linkat(CWD, self.path(), dir, name, AtFlags::SYMLINK_FOLLOW)
    }

    pub(super) fn chmod(&self, mode: u32) -> rustix::io::Result<()> {
        rustix::fs::chmod(self.path(), Mode::from_raw_mode(mode))
    }

    pub(super) fn chown(&self, uid: u32, gid: u32) -> rustix::io::Result<()> {
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        rustix::fs::chownat(&self.fd, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
    }

    pub(super) fn give_to_group(&self, gid: u32) -> rustix::io::Result<()> {
        rustix::fs::chownat(&self.fd, c"", None, Some(rustix::fs::Gid::from_raw(gid)), AtFlags::EMPTY_PATH)
    }

    fn set_times(&self, times: &Timestamps) -> rustix::io::Result<()> {
        rustix::fs::utimensat(CWD, self.path(), times, AtFlags::empty())
    }
}

impl AsFd for Unopened {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Tree {
    /// The permissions an entry gets, before it is known whose it is.
    pub(super) fn mode(&self, meta: &Meta) -> u32 {
        match (self.manner.preserve, self.manner.trust) {
            (false, _) => meta.mode & 0o777 & !self.umask,
            (true, Trust::Operator) => meta.mode & 0o7777,
            (true, Trust::Peer) => meta.mode & 0o1777,
        }
    }

    /// The mode to make a file with, and whether that is all its mode needs.
    ///
    /// A file is made with its final permissions only if that gives nobody more than the whole
    /// file will: special bits are set last, when owner and content are right, and a file that its owner may not
    /// write could not be given extended attributes.
    pub(crate) fn mode_at_creation(&self, meta: &Meta, before: &Before) -> (Mode, bool) {
        let wanted = self.mode(meta);
        // Until it has its owner and group, the bits of others would give rights to the wrong ones.
        let is_right = !self.keeps_owner() || wanted & 0o077 == 0;
        // The mode of a file is the most that an inherited access control list gives.
        let plain =
            is_right && *before == Before::Nothing && wanted & (0o7000 | self.umask) == 0 && meta.xattrs.is_empty();
        if plain { (Mode::from_raw_mode(wanted), true) } else { (Mode::from_raw_mode(0o600), false) }
    }

    /// Extended attributes of a new entry of this directory. Without `-p`, an inherited access control list stays.
    ///
    /// # Errors
    /// If that list cannot be read.
    pub(crate) fn inherited(&self, dir: BorrowedFd<'_>) -> io::Result<Before> {
        if !self.manner.preserve {
            let list = thruway_fs::xattr::default_acl(dir)?;
            return Ok(list.map_or(Before::Nothing, |list| Before::List(Arc::new(list))));
        }
        // Another owner may set a default list at any time.
        let is_safe = || {
            let owner = rustix::fs::fstat(dir).map(|stat| stat.st_uid);
            owner.is_ok_and(|uid| uid == 0 || uid == rustix::process::geteuid().as_raw())
        };
        Ok(match thruway_fs::xattr::has_default_acl(dir) {
            None => Before::Nothing,
            Some(false) if is_safe() => Before::Nothing,
            Some(_) => Before::Inherited,
        })
    }

    /// As [`Tree::inherited`], for a file with this name.
    pub(crate) fn inherited_as(&self, name: &CStr, dir: BorrowedFd<'_>, inherited: &Before) -> Before {
        if self.manner.preserve {
            return inherited.clone();
        }
        match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_file() && self.gives_permissions(dir, &stat) => {
                Before::Replacing
            }
            _ => inherited.clone(),
        }
    }

    /// True if a copy without `-p` gets owner and permissions of a file that it replaces. Not in a directory for all users, with the
    /// sticky bit, from a file of another user: that one may have made it to get at the content.
    pub(super) fn gives_permissions(&self, dir: impl AsFd, old: &Stat) -> bool {
        const STICKY: u32 = 0o1000;
        const OTHERS_WRITE: u32 = 0o022;
        rustix::fs::fstat(dir).is_ok_and(|dir| {
            let is_shared = dir.st_mode & STICKY != 0 && dir.st_mode & OTHERS_WRITE != 0;
            !is_shared || old.st_uid == rustix::process::geteuid().as_raw() || old.st_uid == dir.st_uid
        })
    }

    /// Removes what a directory of the job has inherited. Until then, its mode is 0700.
    pub(super) fn drop_inherited(dir: BorrowedFd<'_>) -> io::Result<()> {
        for name in thruway_fs::xattr::names(dir)? {
            if *name == *ACCESS_ACL {
                thruway_fs::xattr::replace_acl(dir, 0o700)?;
            } else if *name == *DEFAULT_ACL {
                thruway_fs::xattr::remove(dir, &name)?;
            }
        }
        Ok(())
    }

    pub(super) fn keeps_owner(&self) -> bool {
        self.manner.preserve && self.manner.trust == Trust::Operator
    }

    /// True if entries get the owner that they have at the source.
    pub(super) fn gives_owner(&self) -> bool {
        self.keeps_owner() && self.privileged
    }

    /// True for an entry of this process's user or, where owners are kept, of the owner at the source.
    pub(super) fn is_of_owner(&self, uid: u32, source: u32) -> bool {
        if self.gives_owner() { uid == source } else { uid == rustix::process::geteuid().as_raw() }
    }

    /// True if an existing file may get the attributes of the source's file. Its content was not compared. Files of other owners may not.
    /// The set-group-id bit and capabilities exceed the rights of the file's owner, who could change the content first. So the file must
    /// have these already, or belong to root.
    pub(super) fn may_get(&self, here: &Statx, capabilities: impl FnOnce() -> u64, offered: &Grants) -> bool {
        const SET_GROUP_ID: u32 = 0o2000;
        // Without the right of the group to execute, the bit stays when the file is written, before Linux 6.1.
        let has_group = || u32::from(here.stx_mode) & 0o2010 == 0o2010 && here.stx_gid == offered.group;
        let has_grants = || {
            (offered.mode & SET_GROUP_ID == 0 || has_group())
                && (offered.capabilities == 0 || offered.capabilities == capabilities())
        };
        !self.gives_owner() || (here.stx_uid == offered.owner && (here.stx_uid == 0 || has_grants()))
    }

    /// True if [`Tree::apply`] would not change the owner.
    fn has_owner(&self, stat: &Stat, meta: &Meta) -> bool {
        let has_group = stat.st_gid == meta.gid || !(self.privileged || self.groups.contains(&meta.gid));
        !self.keeps_owner() || (has_group && (stat.st_uid == meta.uid || !self.privileged))
    }

    /// True if the entry has the mode, owner and times that a copy with `-p` would give it.
    pub(super) fn has_plain_attributes(&self, stat: &Stat, meta: &Meta) -> bool {
        let is_link = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
        (stat.st_mtime, stat.st_mtime_nsec as u32) == meta.mtime
            && (is_link || stat.st_mode & 0o7777 == self.mode(meta))
            && self.has_owner(stat, meta)
    }

    /// True if these are the extended attributes that a copy with `-p` would give the entry.
    pub(super) fn has_extended_attributes(&self, here: &Attributes, meta: &Meta) -> bool {
        let is_at_source = |name: &Vec<u8>| !meta.has_all(name) || meta.xattrs.iter().any(|(other, _)| other == name);
        let mut compared = here.iter().filter(|(name, _)| self.is_compared(name));
        meta.xattrs.iter().all(|one| here.contains(one)) && compared.all(|(name, _)| is_at_source(name))
    }

    /// True if [`Tree::apply`] would change nothing, and has nothing to report.
    pub(super) fn has_attributes(&self, fd: BorrowedFd<'_>, meta: &Meta) -> bool {
        let keeps_set_id = meta.mode & SET_ID & !self.mode(meta) == 0;
        keeps_set_id
            && rustix::fs::fstat(fd).is_ok_and(|stat| self.has_plain_attributes(&stat, meta))
            && thruway_fs::xattr::read_open(fd).is_ok_and(|here| self.has_extended_attributes(&here, meta))
    }

    /// Applies attributes to an open file or directory; those that could not be kept are told.
    pub(crate) fn apply(&self, fd: BorrowedFd<'_>, meta: &Meta, mode_is_right: bool, before: &Before) -> Shortcomings {
        let mut short = Shortcomings::default();
        if self.keeps_owner()
            && let Err(e) = self.give(fd, meta)
        {
            self.tell_owner(&mut short, e.into());
        }
        let mode_is_right = !self.make_attributes_writable(fd, before) && mode_is_right;
        // First, while there is room for it.
        let narrowed = self.narrowed(fd, meta);
        let meta = narrowed.as_ref().unwrap_or(meta);
        let (acls, others): (Vec<_>, Vec<_>) =
            meta.xattrs.iter().filter(|_| self.manner.preserve).partition(|(name, _)| name.starts_with(b"system."));
        self.write_xattrs(&mut short, fd, &others);
        if !self.drop_others(&mut short, fd, meta, before) {
            // The mode would give rights to users in the list that is still there.
        } else if mode_is_right {
            self.tell_set_id(&mut short, meta, self.mode(meta));
        } else if let Err(e) = self.set_mode(&mut short, fd, meta, before) {
            short.push(format!("mode {:o}: {e}", self.mode(meta)));
        }
        // Behind the mode, which they are finer than.
        self.write_xattrs(&mut short, fd, &acls);
        if self.manner.preserve {
            self.set_times(&mut short, meta, |times| rustix::fs::futimens(fd, times), fd);
        }
        short
    }

    /// Sets the access control list of the source. On failure, returns attributes with the mode for an entry without the list. The failure
    /// is reported when the list is set again, after the mode.
    fn narrowed(&self, fd: BorrowedFd<'_>, meta: &Meta) -> Option<Meta> {
        let list = meta.list().filter(|_| self.manner.preserve)?;
        let is_set = thruway_fs::xattr::write(fd, ACCESS_ACL.to_bytes(), list).is_ok();
        (!is_set).then(|| Meta { mode: meta.mode & SET_ID | meta.mode_without_list() & !SET_ID, ..meta.clone() })
    }

    /// Makes an existing entry of this user writable, as the kernel demands for attributes `user.*`. True if the mode was changed and must be
    /// set again.
    fn make_attributes_writable(&self, fd: BorrowedFd<'_>, before: &Before) -> bool {
        if self.privileged || !self.manner.preserve || *before != Before::Anything {
            return false;
        }
        let Ok(stat) = rustix::fs::fstat(fd) else { return false };
        let is_own = stat.st_uid == rustix::process::geteuid().as_raw();
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7777 | 0o200);
        is_own && stat.st_mode & 0o200 == 0 && rustix::fs::fchmod(fd, mode).is_ok()
    }

    /// Gives an entry the owner and group of the source, as far as this user can.
    fn give(&self, fd: BorrowedFd<'_>, meta: &Meta) -> rustix::io::Result<()> {
        let (uid, gid) = (rustix::fs::Uid::from_raw(meta.uid), rustix::fs::Gid::from_raw(meta.gid));
        if self.privileged {
            return rustix::fs::fchown(fd, Some(uid), Some(gid));
        }
        // A member of the group may give a file to it; if not, the group stays ours.
        let _ = rustix::fs::fchown(fd, None, Some(gid));
        Ok(())
    }

    /// Removes the rights of other users to an existing directory that the source does not give, and sets its owner, before the session
    /// makes entries in it. Other attributes, and reports of failures, come at the end.
    pub(super) fn narrow(&self, dir: BorrowedFd<'_>, meta: &Meta) {
        self.narrow_rights(dir, meta);
        let is_given = self.keeps_owner() && rustix::fs::fstat(dir).is_ok_and(|stat| !self.has_owner(&stat, meta));
        if is_given {
            let _ = self.give(dir, meta);
            // The former owner could change the rights until then.
            self.narrow_rights(dir, meta);
        }
    }

    fn narrow_rights(&self, dir: BorrowedFd<'_>, meta: &Meta) {
        let Ok(stat) = rustix::fs::fstat(dir) else { return };
        let has_list = thruway_fs::xattr::has_access_acl(dir);
        let is_list_right = match meta.list() {
            Some(list) => thruway_fs::xattr::has(dir, ACCESS_ACL.to_bytes(), list),
            None => !has_list || !meta.has_all(ACCESS_ACL.to_bytes()),
        };
        let (now, wanted) = (stat.st_mode & 0o7777, self.mode(meta));
        // Where the lists differ, the bits of the group are not the rights of the group.
        let others = if is_list_right { 0o077 } else { 0o007 };
        let mode = now & 0o7700 | now & wanted & others;
        if has_list && !is_list_right {
            let _ = thruway_fs::xattr::replace_acl(dir, mode);
        } else if mode != now {
            let _ = rustix::fs::fchmod(dir, Mode::from_raw_mode(mode));
        }
    }

    /// Set-id bits only go to files that have the owner and group they were meant for.
    fn set_mode(&self, short: &mut Shortcomings, fd: BorrowedFd<'_>, meta: &Meta, before: &Before) -> io::Result<()> {
        match before {
            Before::Replacing => return Ok(()),
            Before::List(list) => {
                return thruway_fs::xattr::write(fd, ACCESS_ACL.to_bytes(), &list.limited(meta.mode).encode());
            }
            _ => {}
        }
        let mut mode = self.mode(meta);
        if self.manner.preserve && mode & SET_ID != 0 {
            let stat = rustix::fs::fstat(fd)?;
            if stat.st_uid != meta.uid {
                mode &= !0o4000;
            }
            if stat.st_gid != meta.gid {
                mode &= !0o2000;
            }
        }
        self.tell_set_id(short, meta, mode);
        Ok(rustix::fs::fchmod(fd, Mode::from_raw_mode(mode))?)
    }

    /// Reports set-id bits of the source that are not in `mode`.
    fn tell_set_id(&self, short: &mut Shortcomings, meta: &Meta, mode: u32) {
        let lost = meta.mode & SET_ID & !mode;
        if !self.manner.preserve || lost == 0 {
            return;
        }
        let bits = match lost {
            SET_ID => "set-user-ID and set-group-ID bits",
            0o4000 => "set-user-ID bit",
            _ => "set-group-ID bit",
        };
        let why = match self.manner.trust {
            Trust::Operator => "the copy has another owner or group",
            Trust::Peer => PRIVILEGED,
        };
        short.refuse(format!("{bits} not kept: {why}"));
    }

    /// Applies attributes to a symbolic link or special file that was just made under this name. `is_equal`: it has the target or device
    /// of the record.
    pub(super) fn apply_unopened(
        &self,
        (dir, name): (impl AsFd, &CStr),
        kind: FileType,
        meta: &Meta,
        is_equal: impl Fn(&Unopened) -> bool,
    ) -> Shortcomings {
        let mut short = Shortcomings::default();
        let entry = match Unopened::look(dir, name) {
            Ok(entry) if entry.is(kind) && self.may_change(&entry) && is_equal(&entry) => entry,
            Ok(_) => {
                short.push("another entry has its name now; attributes were not set".into());
                return short;
            }
            Err(e) => {
                short.push(format!("its attributes: {}", io::Error::from(e)));
                return short;
            }
        };
        if self.gives_owner()
            && let Err(e) = entry.chown(meta.uid, meta.gid)
        {
            self.tell_owner(&mut short, e.into());
        }
        let narrowed = if kind == FileType::Symlink { None } else { self.narrowed(entry.as_fd(), meta) };
        let meta = narrowed.as_ref().unwrap_or(meta);
        // The umask took bits away; a link has none.
        if kind != FileType::Symlink && self.drop_others(&mut short, entry.as_fd(), meta, &Before::Inherited) {
            if let Err(e) = entry.chmod(self.mode(meta)) {
                short.push(format!("mode {:o}: {}", self.mode(meta), io::Error::from(e)));
            }
            self.tell_set_id(&mut short, meta, self.mode(meta));
        }
        if !self.manner.preserve {
            return short;
        }
        self.write_xattrs(&mut short, entry.as_fd(), &meta.xattrs.iter().collect::<Vec<_>>());
        self.set_times(&mut short, meta, |times| entry.set_times(times), entry.as_fd());
        short
    }

    /// True for an entry that this job has made. With all rights also for others, if there are too many to know all.
    fn may_change(&self, entry: &Unopened) -> bool {
        let is_made = || Identity::of(entry, c"").is_ok_and(|(identity, stat)| self.is_made(identity, &stat));
        is_made() || (self.has_all_rights() && self.may_forget())
    }

    /// Sets when an entry was modified, and looks whether that is kept: there are file systems, in user space above all, that
    /// say so and keep another time.
    fn set_times(
        &self,
        short: &mut Shortcomings,
        meta: &Meta,
        set: impl Fn(&Timestamps) -> rustix::io::Result<()>,
        entry: BorrowedFd<'_>,
    ) {
        let last_modification = Timespec { tv_sec: meta.mtime.0, tv_nsec: meta.mtime.1.min(999_999_999).into() };
        // Nobody has read the copy yet. Some know only how to set both.
        let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
        let mut seen = None;
        for last_access in [omit, last_modification] {
            if let Err(e) = set(&Timestamps { last_access, last_modification }) {
                return short.push(format!("times: {}", io::Error::from(e)));
            }
            match rustix::fs::fstat(entry) {
                Ok(stat) => {
                    let is_right = (stat.st_mtime, stat.st_mtime_nsec) == (meta.mtime.0, meta.mtime.1.into());
                    seen = Some(stat);
                    if is_right {
                        break;
                    }
                }
                Err(e) => return short.push(format!("attributes: {}", io::Error::from(e))),
            }
        }
        let stat = seen.expect("it has been looked at once");
        if meta.mtime.0.abs_diff(stat.st_mtime) >= TIME_STEP {
            self.tell_once(short, &self.told.no_times, "times");
        }
        self.look_at_rights(short, meta, &stat);
    }

    /// Whether owner and permissions are what the entry was given, for the same reason.
    fn look_at_rights(&self, short: &mut Shortcomings, meta: &Meta, stat: &Stat) {
        let (owner, group) = (stat.st_uid == meta.uid, stat.st_gid == meta.gid);
        if self.gives_owner() && !(owner && group) {
            self.tell_once(short, &self.told.no_owners, "owners");
        }
        let mut mode = self.mode(meta);
        mode &= !(if owner { 0 } else { 0o4000 } | if group { 0 } else { 0o2000 });
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink && stat.st_mode & 0o7777 != mode {
            self.tell_once(short, &self.told.no_modes, "permissions");
        }
    }

    /// What is told for the whole target and not for every entry.
    fn tell_once(&self, short: &mut Shortcomings, told: &AtomicBool, what: &str) {
        short.any = true;
        if !told.swap(true, Ordering::Relaxed) {
            short.push(format!("{what} are not preserved by the destination, here and elsewhere"));
        }
    }

    /// True if the source may set an attribute. A peer without privileges may set only attributes that grant no rights.
    fn may_set(&self, name: &[u8]) -> bool {
        self.manner.trust == Trust::Operator || name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_")
    }

    /// True for extended attributes that a copy with `-p` removes if the source does not have them. Others are those that an
    /// unprivileged source cannot list (`trusted.*`) and those of the system of the destination (labels).
    pub(super) fn is_compared(&self, name: &[u8]) -> bool {
        name.starts_with(b"user.")
            || name == ACCESS_ACL.to_bytes()
            || name == DEFAULT_ACL.to_bytes()
            || (name == CAPABILITIES.to_bytes() && self.gives_owner())
    }

    /// Removes extended attributes that the source does not have. Sets the access control list before the mode, which would give
    /// rights to users in another list, or to the group. False if another list is still there.
    fn drop_others(&self, short: &mut Shortcomings, fd: BorrowedFd<'_>, meta: &Meta, before: &Before) -> bool {
        if !self.manner.preserve {
            return true;
        }
        let value_of = |name: &CStr| meta.xattrs.iter().find(|(other, _)| other == name.to_bytes()).map(|(_, v)| v);
        let is_set = meta.list().is_some_and(|list| thruway_fs::xattr::has(fd, ACCESS_ACL.to_bytes(), list));
        if *before == Before::Nothing {
            return true;
        }
        let names = match thruway_fs::xattr::names(fd) {
            Ok(names) => names,
            Err(e) => {
                short.push(format!("listing its extended attributes: {e}"));
                return false;
            }
        };
        let mut is_safe = true;
        for name in names {
            let is_list = *name == *ACCESS_ACL;
            let is_wanted = if is_list { is_set } else { value_of(&name).is_some() };
            let is_unknown = !meta.has_all(name.to_bytes()) && *before == Before::Anything;
            if is_wanted || is_unknown || !self.is_compared(name.to_bytes()) {
                continue;
            }
            let dropped = match is_list {
                true => thruway_fs::xattr::replace_acl(fd, self.mode(meta)),
                false => thruway_fs::xattr::remove(fd, &name),
            };
            let Err(e) = dropped else { continue };
            is_safe &= !is_list;
            let sentence = format!("extended attribute {} not removed: {e}", crate::escape(name.to_bytes()));
            match e.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => short.refuse(sentence),
                _ => short.push(sentence),
            }
        }
        is_safe
    }

    fn write_xattrs(&self, short: &mut Shortcomings, fd: BorrowedFd<'_>, attributes: &[&(Vec<u8>, Vec<u8>)]) {
        for (attribute, value) in attributes {
            let written = match self.may_set(attribute) {
                true => thruway_fs::xattr::write(fd, attribute, value),
                false => Err(io::Error::from_raw_os_error(libc::EPERM)),
            };
            let Err(e) = written else { continue };
            if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EACCES)) {
                self.tell_refused(short, fd, attribute, value, &e);
            } else if e.raw_os_error() != Some(libc::ENOTSUP) {
                short.push(format!("extended attribute {}: {e}", crate::escape(attribute)));
            } else if self.told.no_attributes.swap(true, Ordering::Relaxed) {
                short.any = true;
            } else {
                let namespace = attribute.split(|b| *b == b'.').next().unwrap_or_default();
                short.push(format!(
                    "extended attributes ({}.*) are not supported by the destination and not kept, here and elsewhere",
                    crate::escape(namespace)
                ));
            }
        }
    }

    /// Reports an attribute that may not be set, unless the entry already has the same value. Security modules label every
    /// entry, so labels are reported only once.
    fn tell_refused(
        &self,
        short: &mut Shortcomings,
        fd: BorrowedFd<'_>,
        attribute: &[u8],
        value: &[u8],
        error: &io::Error,
    ) {
        if thruway_fs::xattr::has(fd, attribute, value) {
            return;
        }
        if attribute.starts_with(b"security.") && attribute != CAPABILITIES.to_bytes() {
            return self.tell_once(short, &self.told.no_labels, "security labels");
        }
        let attribute = crate::escape(attribute);
        match self.manner.trust {
            Trust::Operator => short.refuse(format!("extended attribute {attribute} not kept: {error}")),
            Trust::Peer => short.refuse(format!("extended attribute {attribute} not kept: {PRIVILEGED}")),
        }
    }

    fn tell_owner(&self, short: &mut Shortcomings, error: io::Error) {
        short.any = true;
        if !self.told.no_owners.swap(true, Ordering::Relaxed) {
            short.push(format!("owners are not preserved by the destination, here and elsewhere: {error}"));
        }
    }
}
