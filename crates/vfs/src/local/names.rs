//! Entries of directories: made, listed, removed, renamed, and brought to the medium.

use super::by_path::name_open;
use super::node::{Node, time_of};
use super::{Found, Inner, c_name, errno, id_of, kind_of};
use crate::{
    As, Attributes, Credentials, Entry, FileId, Kind, Listing, Make, Result, Room, SetAttributes, SetTime,
    exclusive_times,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, SeekFrom};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thruway_fs::handle::Handle;

impl Inner {
    pub(super) fn make(
        self: &Arc<Self>,
        who: &Credentials,
        dir: &Node,
        name: &[u8],
        what: &Make,
        mut set: SetAttributes,
    ) -> Result<(FileId, Attributes)> {
        let name = c_name(name)?;
        let (dir_fd, mode) = (dir.fd.as_fd(), Mode::from_raw_mode(set.mode.unwrap_or(0) & 0o7777));
        let by_name = || Found::by_name(dir_fd, &name, ResolveFlags::BENEATH);
        let new_file = || {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Found::of(rustix::fs::openat(dir_fd, &*name, flags, mode)?)
        };
        let special = |kind, device| rustix::fs::mknodat(dir_fd, &*name, kind, mode, device);
        let made = self.act_as(who, || match what {
            Make::File | Make::NewFile | Make::Exclusive(_) => new_file(),
            Make::Directory => rustix::fs::mkdirat(dir_fd, &*name, mode).and_then(|()| by_name()),
            Make::SymbolicLink(to) => {
                let to = CString::new(&to[..]).map_err(|_| Errno::INVAL)?;
                rustix::fs::symlinkat(&*to, dir_fd, &*name).and_then(|()| by_name())
            }
            Make::Special(Kind::Socket, ..) => special(FileType::Socket, 0).and_then(|()| by_name()),
            Make::Special(Kind::Fifo, ..) => special(FileType::Fifo, 0).and_then(|()| by_name()),
            Make::Special(kind, major, minor) => {
                let device = rustix::fs::makedev(*major, *minor);
                let kind = match kind {
                    Kind::BlockDevice => FileType::BlockDevice,
                    Kind::CharacterDevice => FileType::CharacterDevice,
                    _ => return Err(Errno::INVAL),
                };
                special(kind, device).and_then(|()| by_name())
            }
        });
        let is_new = made.is_ok();
        let found = match (made, what) {
            (Err(Errno::EXIST), Make::File) => {
                let found = self.act_as(who, by_name)?;
                if kind_of(found.stat.stx_mode)? != Kind::Regular {
                    return Err(Errno::EXIST);
                }
                set = SetAttributes { size: set.size, ..SetAttributes::default() };
                found
            }
            (Err(Errno::EXIST), Make::Exclusive(number)) => {
                let found = self.act_as(who, by_name)?;
                let (stat, (accessed, modified)) = (&found.stat, exclusive_times(*number));
                let same = kind_of(stat.stx_mode)? == Kind::Regular
                    && (time_of(stat.stx_atime), time_of(stat.stx_mtime)) == (accessed, modified);
                if !same {
                    return Err(Errno::EXIST);
                }
                set = SetAttributes::default();
                found
            }
            (Ok(found), Make::Exclusive(number)) => {
                let (accessed, modified) = exclusive_times(*number);
                set.accessed = Some(SetTime::To(accessed));
                set.modified = Some(SetTime::To(modified));
                found
            }
            (made, _) => made?,
        };
        // It has its permissions, as access control lists of the directory and its group would have them; only bits that calls which
        // make files do not set are set now.
        let has = u32::from(found.stat.stx_mode) & 0o7777;
        set.mode = set.mode.map(|mode| has | mode & 0o7000).filter(|mode| *mode != has);
        // A new file is open for writing: what holds it only names it.
        let fd = self.name_again(&found)?;
        let node = self.hold(Found { id: found.id, fd, stat: found.stat })?;
        self.note_place(&node.id, dir, &name);
        let made = is_new.then_some(found.fd);
        let set = || match set == SetAttributes::default() {
            true => Ok(()),
            false => self.set_attributes(As { who, is_open: false }, &node, &set),
        };
        if let Err(error) = set().and_then(|()| self.keep_new(dir, &node, made)) {
            // The client is told that there is nothing. If another file has the name by now, it stays.
            let still_leads_there = || by_name().is_ok_and(|found| found.id == node.id);
            if is_new {
                let flags = if *what == Make::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                let _ = self.act_as(who, || match still_leads_there() {
                    true => rustix::fs::unlinkat(dir_fd, &*name, flags),
                    false => Ok(()),
                });
                self.lost_a_name(&node.id);
            }
            return Err(error);
        }
        Ok((node.id.clone(), self.attributes(&node, &node.stat()?)?))
    }

    pub(super) fn list(
        self: &Arc<Self>,
        who: &Credentials,
        dir: &Node,
        cookie: u64,
        room: Room,
        with_files: bool,
    ) -> Result<Listing> {
        if dir.kind != Kind::Directory {
            return Err(Errno::NOTDIR);
        }
        // All of it as the user: to become one takes longer than to look an entry up.
        self.act_as(who, || self.list_as_user(dir, cookie, room, with_files))
    }

    pub(super) fn list_as_user(
        self: &Arc<Self>,
        dir: &Node,
        cookie: u64,
        room: Room,
        with_files: bool,
    ) -> Result<Listing> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&dir.fd, c".", flags, Mode::empty())?;
        rustix::fs::seek(&fd, SeekFrom::Start(cookie))?;
        let mut buffer = vec![MaybeUninit::uninit(); room.bytes.clamp(4 << 10, 64 << 10)];
        let mut entries = RawDir::new(&fd, &mut buffer);
        let (mut listing, mut total) = (Listing::default(), 0);
        let (root_number, is_root) = (dir.stat()?.stx_ino, dir.id == self.root_id);
        while total < room.bytes {
            let Some(entry) = entries.next() else {
                listing.is_end = true;
                break;
            };
            let entry = entry?;
            let name = entry.file_name();
            let is_above = name == c"..";
            let number = if is_above && is_root { root_number } else { entry.ino() };
            let found = with_files.then(|| match name.to_bytes() {
                b"." => Found::of(rustix::io::fcntl_dupfd_cloexec(&dir.fd, 0)?),
                b".." => self.parent(dir),
                _ => Found::by_name(dir.fd.as_fd(), name, ResolveFlags::BENEATH),
            });
            // What cannot be looked at is listed all the same.
            let found = found.and_then(Result::ok);
            let file = found.and_then(|found| {
                if !matches!(name.to_bytes(), b"." | b"..") {
                    self.note_place(&found.id, dir, name);
                }
                let attributes = self.attributes_of_found(&found).ok()?;
                Some((found.id, attributes))
            });
            total += name.to_bytes().len() + room.entry;
            let name = name.to_bytes().to_vec();
            listing.entries.push(Entry { name, number, cookie: entry.next_entry_cookie(), file });
        }
        Ok(listing)
    }

    /// The file that has a name now.
    fn named(self: &Arc<Self>, dir: &Node, name: &CStr) -> Option<FileId> {
        if self.paths.is_some() {
            // It is held, so that it can be told whether its last name goes.
            let found = Found::by_name(dir.fd.as_fd(), name, ResolveFlags::BENEATH).ok()?;
            return Some(self.hold(found).ok()?.id.clone());
        }
        let (handle, _) = Handle::of(&dir.fd, name).ok()?;
        Some(id_of(&handle))
    }

    /// A descriptor that only names what has been found.
    fn name_again(&self, found: &Found) -> Result<OwnedFd> {
        if self.paths.is_some() {
            return match kind_of(found.stat.stx_mode)? {
                Kind::Regular => name_open(&found.fd),
                _ => rustix::io::fcntl_dupfd_cloexec(&found.fd, 0),
            };
        }
        let handle = Handle::decode(&found.id.0).ok_or(Errno::STALE)?;
        handle.open(&self.root, OFlags::PATH | OFlags::NOFOLLOW).map_err(|e| errno(&e))
    }

    /// Brings the names in a directory to the medium, before a client is told that they are there or gone: it will not ask for that
    /// itself (RFC 1813, section 4.7).
    pub(super) fn keep_names(&self, dir: &Node) -> Result<()> {
        if !self.is_durable {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(&dir.fd, c".", flags, Mode::empty()) {
            // It can be changed, and not read.
            Err(Errno::ACCESS) if self.paths.is_some() => self.keep_all(),
            open => rustix::fs::fsync(open?),
        }
    }

    fn keep_all(&self) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(&self.root, c".", flags, Mode::empty())?;
        self.note(rustix::fs::syncfs(root))
    }

    /// Brings a file's attributes, and its size, to the medium.
    pub(super) fn keep(&self, node: &Node) -> Result<()> {
        match node.kind {
            _ if !self.is_durable => Ok(()),
            Kind::Directory => self.keep_names(node),
            Kind::Regular => {
                let file = self.open_data(node, OFlags::RDONLY)?;
                let synced = rustix::fs::fsync(&*file);
                node.failures.fetch_add(u64::from(synced.is_err()), Ordering::SeqCst);
                self.note(synced)
            }
            // There is no descriptor of these that could be synced: they are with everything else.
            _ => self.keep_all(),
        }
    }

    /// As [`Inner::keep`], with the name of a file in its directory; if it is new, by what it was made by.
    pub(super) fn keep_new(&self, dir: &Node, node: &Node, made: Option<OwnedFd>) -> Result<()> {
        let has_its_name = match (node.kind, made) {
            _ if !self.is_durable => return Ok(()),
            (Kind::Regular, Some(made)) => {
                let synced = rustix::fs::fsync(made);
                node.failures.fetch_add(u64::from(synced.is_err()), Ordering::SeqCst);
                self.note(synced)?;
                self.syncs_names_with_files
            }
            (Kind::Directory, _) => {
                self.keep_names(node)?;
                self.syncs_names_with_files
            }
            (Kind::Regular, None) => {
                self.keep(node)?;
                false
            }
            // Others are made with their names.
            _ => false,
        };
        if has_its_name { Ok(()) } else { self.keep_names(dir) }
    }

    pub(super) fn lost_a_name(&self, id: &FileId) {
        let Some(node) = self.held(id) else { return };
        node.note_change();
        // Others may still have what is left of its names.
        if node.stat().is_err() {
            self.nodes.remove(id);
            self.paths.as_ref().inspect(|paths| paths.note_gone(id));
        }
    }

    pub(super) fn remove(
        self: &Arc<Self>,
        who: &Credentials,
        dir: &Node,
        name: &[u8],
        is_directory: bool,
    ) -> Result<()> {
        let name = c_name(name)?;
        let id = self.named(dir, &name);
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        self.act_as(who, || rustix::fs::unlinkat(&dir.fd, &*name, flags))?;
        dir.note_change();
        let kept = self.keep_names(dir);
        id.inspect(|id| self.lost_a_name(id));
        kept
    }

    pub(super) fn rename(self: &Arc<Self>, who: &Credentials, from: (&Node, &[u8]), to: (&Node, &[u8])) -> Result<()> {
        let (old, new) = (c_name(from.1)?, c_name(to.1)?);
        let (renamed, replaced) = (self.named(from.0, &old), self.named(to.0, &new));
        self.act_as(who, || rustix::fs::renameat(&from.0.fd, &*old, &to.0.fd, &*new))?;
        // The kernel does nothing if both names are links of the same file.
        if renamed.is_some() && renamed == replaced {
            return Ok(());
        }
        from.0.note_change();
        to.0.note_change();
        if self.paths.is_some()
            && let Some(id) = self.named(to.0, &new)
        {
            self.note_place(&id, to.0, &new);
        }
        let kept = self.keep_names(to.0).and_then(|()| self.keep_names(from.0));
        replaced.inspect(|id| self.lost_a_name(id));
        kept
    }
}
