//! Items of a copy: one for each entry that is changed (in a dry run: would be changed), with the reason.

use super::files::Files;
use super::tree::{Place, check_disk};
use crate::wire::{Meta, Record, Report, ReportKind};
use rustix::fs::{AtFlags, FileType, Stat};
use std::os::fd::AsFd;
use thruway_fs::beneath;

/// Reason for an entry that does not exist at the destination.
const NEW: &str = "new";
const TYPE_DIFFERS: &str = "type differs";
const ATTRIBUTES: &str = "attributes";
/// Reason for an entry with a target or extended attributes that the peer has no right to read.
const NOT_COMPARED: &str = "not compared";

impl Files {
    /// Reports the entry of a record as an item, if the options of the session ask for items.
    pub(super) fn itemize(&self, record: &Record) {
        if self.params.options.itemize
            && let Some((path, reason)) = self.reason_of(record)
        {
            self.item(path, reason);
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
                let early = self.tree.early_replaced(path).map(|replaced| if replaced { TYPE_DIFFERS } else { NEW });
                (path, early.or_else(|| self.reason(path, meta, |_| None)))
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
        let Some(path) = record.makes().filter(|_| self.params.options.dry_run && !is_large) else { return false };
        let replaced = |place: Place| {
            check_disk(&place.dir, &place.name)?;
            let may_replace = self.tree.may_replace();
            if may_replace.is_err() && self.reason_of(record).is_some_and(|(_, reason)| reason != NEW) {
                return may_replace;
            }
            match rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(there) => {
                    let is_special = matches!(record, Record::Special { .. });
                    self.tree.check_special(FileType::from_raw_mode(there.st_mode), is_special)
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
        let Some(stat) = self.stat(path) else { return Some(NEW) };
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

    fn link_reason(&self, path: &[u8], target: &[u8]) -> Option<&'static str> {
        let identity = |path| self.stat(path).map(|stat| (stat.st_dev, stat.st_ino));
        match identity(path) {
            None => Some(NEW),
            here => (here != identity(target)).then_some("hard link"),
        }
    }
}
