//! Items of a copy: one for each entry that is changed (in a dry run: would be changed), with the reason.

use super::files::Files;
use super::journal::{Key, key_of};
use super::tree::{Place, check_disk};
use crate::wire::{Meta, Record, Report, ReportKind};
use rustix::fs::{AtFlags, FileType, Stat};
use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::MutexGuard;
use thruway_fs::beneath;

/// Reason for an entry that does not exist at the destination.
const NEW: &str = "new";
const TYPE_DIFFERS: &str = "type differs";
const HARD_LINK: &str = "hard link";
const ATTRIBUTES: &str = "attributes";
/// Reason for an entry with a target or extended attributes that the peer has no right to read.
const NOT_COMPARED: &str = "not compared";

/// Most entries of each kind in [`Itemized`]: some MiB. The items of further ones depend on the order in which records are taken.
const ITEMIZED_MAX: usize = 1 << 14;
/// Most bytes of the paths of hard links in [`Itemized`].
const ITEMIZED_BYTES_MAX: usize = 2 << 20;

/// State that determines the items of later records. Empty if the session reports no items.
#[derive(Default)]
pub(super) struct Itemized {
    /// Existing entries with several names, by device and inode number, that the session replaces.
    replaced: HashSet<(u64, u64)>,
    /// Existing hard links by path, with device and inode number. They are items if the session replaces that inode.
    links: HashMap<Vec<u8>, (u64, u64)>,
    /// Of the paths of those.
    bytes: usize,
    /// In a dry run, the devices, pipes and sockets of the source.
    specials: HashSet<Key>,
    /// Directories as they were before the session put anything into them.
    directories: HashMap<Key, Stat>,
}

impl Files {
    /// Reports the entry of a record as an item, if the options of the session ask for items.
    pub(super) fn itemize(&self, record: &Record) {
        if !self.params.options.itemize {
            return;
        }
        if let Some(path) = record.makes() {
            self.note_directory(path);
        }
        let Some((path, reason)) = self.reason_of(record) else { return };
        if !matches!(record, Record::Dir { .. }) && record.makes().is_some() {
            self.note_replaced(path);
        }
        self.item(path, reason);
    }

    /// Reports hard links whose entry the session has replaced, after all other records.
    pub(super) fn itemize_links(&self) {
        let Itemized { replaced, links, .. } = std::mem::take(&mut *self.itemized());
        for (path, _) in links.into_iter().filter(|(_, entry)| replaced.contains(entry)) {
            self.item(&path, HARD_LINK);
        }
    }

    fn itemized(&self) -> MutexGuard<'_, Itemized> {
        self.itemized.lock().expect("no panics under the lock")
    }

    fn note_replaced(&self, path: &[u8]) {
        let Some(stat) = self.stat(path).filter(|stat| stat.st_nlink > 1) else { return };
        let replaced = &mut self.itemized().replaced;
        if replaced.len() < ITEMIZED_MAX {
            replaced.insert((stat.st_dev, stat.st_ino));
        }
    }

    /// Notes the directory of an entry: it changes with the entry, and its own record can come later.
    fn note_directory(&self, path: &[u8]) {
        let (parent, _) = beneath::split(path);
        let mut itemized = self.itemized();
        if !itemized.directories.contains_key(&key_of(parent))
            && itemized.directories.len() < ITEMIZED_MAX
            && let Some(stat) = self.stat(parent)
        {
            itemized.directories.insert(key_of(parent), stat);
        }
    }

    /// The path of a record's entry and the reason to change it; `None` if it is not changed.
    fn reason_of<'a>(&self, record: &'a Record) -> Option<(&'a [u8], &'static str)> {
        let (path, reason) = match record {
            Record::File { path, meta } => (path, self.file_reason(path, meta)),
            Record::Begin { path, resume: true, .. } => (path, Some("resumed")),
            Record::Begin { path, meta, .. } => (path, self.file_reason(path, meta)),
            Record::Dir { path, .. } if path.is_empty() => return None,
            Record::Dir { path, meta } => {
                let found = self.reason(path, meta, |_| None);
                // Another worker may have made it just before.
                let early = self.tree.early_replaced(path).map(|replaced| if replaced { TYPE_DIFFERS } else { NEW });
                (path, early.or(found))
            }
            Record::Symlink { path, target, meta } => {
                let differs = |stat: &Stat| self.target_reason(path, target).or_else(|| self.owner_reason(stat));
                (path, self.reason(path, meta, differs))
            }
            Record::Special { path, meta, rdev } => {
                let differs = |stat: &Stat| {
                    let may_learn = self.tree.manner.readable || self.tree.manner.replace;
                    match stat.st_rdev != *rdev {
                        true => Some(TYPE_DIFFERS),
                        false if !may_learn => Some(NOT_COMPARED),
                        false => self.owner_reason(stat),
                    }
                };
                (path, self.reason(path, meta, differs))
            }
            Record::Attributes { path, meta } => (path, self.reason(path, meta, |_| None)),
            Record::Link { path, target } => (path, self.link_reason(path, target)),
            Record::Keep { .. } => return None,
        };
        Some((path, reason?))
    }

    /// In a dry run, reports an entry that a copy does not replace: a file in use as a disk, a device, or any without the right to replace.
    /// False if there is none.
    pub(super) fn would_fail(&self, record: &Record) -> bool {
        // Pieces of a large file, which a dry run sends of devices only, need its beginning.
        let is_large = matches!(record, Record::Begin { .. });
        let path = match record {
            Record::Link { path, .. } => Some(&path[..]),
            _ => record.makes(),
        };
        let Some(path) = path.filter(|_| self.params.options.dry_run && !is_large) else { return false };
        if let Record::Special { meta, .. } = record {
            if let Err(e) = self.tree.check_device(meta) {
                self.fail(path, &e);
                return true;
            }
            let specials = &mut self.itemized().specials;
            if specials.len() < ITEMIZED_MAX {
                specials.insert(key_of(path));
            }
        }
        let replaced = |place: Place| {
            check_disk(&place.dir, &place.name)?;
            let may_replace = self.tree.may_replace();
            if may_replace.is_err() && self.reason_of(record).is_some_and(|(_, reason)| reason != NEW) {
                return may_replace;
            }
            match rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(there) => {
                    let is_special = match record {
                        Record::Link { target, .. } => self.itemized().specials.contains(&key_of(target)),
                        _ => matches!(record, Record::Special { .. }),
                    };
                    self.tree.check_special(&place, FileType::from_raw_mode(there.st_mode), is_special)
                }
                Err(_) => Ok(()),
            }
        };
        let Ok(Err(e)) = self.tree.find(path).map(replaced) else { return false };
        self.fail(path, &e);
        true
    }

    /// Reports an entry below a directory that gives way to the entry with this path. `below` begins with the name of the directory.
    pub(super) fn itemize_below(&self, path: &[u8], below: &[u8]) {
        let (parent, name) = beneath::split(path);
        // A peer without the right to read does not learn names.
        if self.params.options.itemize && below != name && self.tree.manner.readable {
            self.item(&beneath::join(parent, below), "deleted");
        }
    }

    /// Reports an item. If too many wait for the peer to read them, it is only counted.
    pub(super) fn item(&self, path: &[u8], reason: &str) {
        let report = Report { path: path.to_vec(), kind: ReportKind::Item, message: reason.into() };
        if self.items.admit(&report) {
            self.send_report(report);
        }
    }

    fn stat(&self, path: &[u8]) -> Option<Stat> {
        let place = self.tree.find(path).ok()?;
        rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    fn file_reason(&self, path: &[u8], meta: &Meta) -> Option<&'static str> {
        let Some(stat) = self.stat(path) else { return Some(NEW) };
        let (source, here) = (meta.mtime, (stat.st_mtime, stat.st_mtime_nsec as u32));
        Some(match source.cmp(&here) {
            _ if !FileType::from_raw_mode(stat.st_mode).is_file() => TYPE_DIFFERS,
            _ if stat.st_size as u64 != meta.size => "size differs",
            std::cmp::Ordering::Greater => "newer",
            std::cmp::Ordering::Less => "older",
            std::cmp::Ordering::Equal => "same size, time",
        })
    }

    /// Reason for an entry other than a file; `None` if it is not changed. `differs` compares it with an entry of the same type.
    fn reason(
        &self,
        path: &[u8],
        meta: &Meta,
        differs: impl FnOnce(&Stat) -> Option<&'static str>,
    ) -> Option<&'static str> {
        let Some(mut stat) = self.stat(path) else { return Some(NEW) };
        if let Some(before) = self.itemized().directories.get(&key_of(path)) {
            stat = *before;
        }
        if let Some(mode) = self.tree.mode_before_unlock(path) {
            stat.st_mode = stat.st_mode & !0o7777 | mode;
        }
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::from_raw_mode(meta.mode) {
            return Some(TYPE_DIFFERS);
        }
        if let Some(reason) = differs(&stat) {
            return Some(reason);
        }
        if !self.params.options.preserve || self.tree.may_replace().is_err() {
            return None;
        }
        match self.has_attributes(path, &stat, meta) {
            Some(true) => None,
            Some(false) => Some(ATTRIBUTES),
            None => Some(NOT_COMPARED),
        }
    }

    /// True if the entry has the attributes that a copy with `-p` would give it; `None` if the peer may not know.
    fn has_attributes(&self, path: &[u8], stat: &Stat, meta: &Meta) -> Option<bool> {
        if !self.tree.has_plain_attributes(stat, meta) {
            return Some(false);
        }
        let read = |place: Place| thruway_fs::xattr::read(place.dir.as_fd(), &place.name);
        let Ok(here) = self.tree.find(path).and_then(read) else { return Some(false) };
        if !self.tree.manner.readable {
            let mut compared = here.iter().filter(|(name, _)| self.tree.is_compared(name));
            return (meta.xattrs.is_empty() && compared.next().is_none()).then_some(true);
        }
        Some(self.tree.has_extended_attributes(&here, meta))
    }

    /// Reason to replace an equal link or special file: it is another user's.
    fn owner_reason(&self, stat: &Stat) -> Option<&'static str> {
        (!self.tree.may_keep(stat)).then_some(ATTRIBUTES)
    }

    fn target_reason(&self, path: &[u8], target: &[u8]) -> Option<&'static str> {
        if !self.tree.manner.readable {
            return Some(NOT_COMPARED);
        }
        let place = self.tree.find(path).ok()?;
        let here = rustix::fs::readlinkat(&place.dir, &place.name, Vec::new()).ok()?;
        (here.as_bytes() != target).then_some("target differs")
    }

    /// `None` also if both are one entry that the session may replace, see [`Files::itemize_links`].
    fn link_reason(&self, path: &[u8], target: &[u8]) -> Option<&'static str> {
        let identity = |path| self.stat(path).map(|stat| (stat.st_dev, stat.st_ino));
        let Some(here) = identity(path) else { return Some(NEW) };
        if identity(target) != Some(here) {
            return Some(HARD_LINK);
        }
        let mut itemized = self.itemized();
        if itemized.links.len() < ITEMIZED_MAX && itemized.bytes + path.len() <= ITEMIZED_BYTES_MAX {
            itemized.bytes += path.len();
            itemized.links.insert(path.to_vec(), here);
        }
        None
    }
}
