//! Records whose turn comes when everything else is in place: hard links, removals, attributes of
//! directories.

use super::SessionEvent;
use super::files::Files;
use super::made::Made;
use crate::filter::Filter;
use crate::session::LocalError;
use crate::wire::{KeepEnd, Meta, Record, ReportKind};
use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::collections::{HashMap, HashSet};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thruway_engine::Owner;
use thruway_fs::beneath;
use thruway_fs::remove::Remover;
use thruway_fs::spool::Spool;

/// Bytes of names to keep, in one directory or gathered at a time, beyond which nothing is removed from them.
const KEEP_BYTES_MAX: usize = 256 << 20;
/// Bytes before each record: position of the last directory before it, and its fingerprint if it is a directory.
const LINK_LEN: u64 = 16;
/// Fingerprint of a directory that the job has not made.
const NOT_MADE: u64 = 0;
/// There is none before it.
const NOWHERE: u64 = u64::MAX;

/// Records that wait.
pub(super) struct Deferred {
    spool: Spool,
    /// Where the last directory is; each knows the one before it, so that memory does not grow with the tree.
    last_directory: u64,
}

impl Deferred {
    /// Records of a copy into `root`. `elsewhere`: nothing is to be written there, and `owner` has a quota.
    pub(super) fn new(root: &Arc<OwnedFd>, elsewhere: bool, owner: Owner) -> Deferred {
        Deferred { spool: Spool::new((!elsewhere).then(|| Arc::clone(root)), owner), last_directory: NOWHERE }
    }

    /// Keeps a record; `made` if it is of a directory that the job made.
    pub(super) fn push(&mut self, record: &Record, made: Option<Made>) -> io::Result<()> {
        let encoded = record.encode();
        let prefix = Record::prefix(encoded.len(), 0);
        let mut entry = Vec::with_capacity(LINK_LEN as usize + prefix.len() + encoded.len());
        entry.extend_from_slice(&self.last_directory.to_le_bytes());
        let fingerprint = match made {
            Some(Made::Done(fingerprint)) => fingerprint,
            Some(Made::Begun(_)) | None => NOT_MADE,
        };
        entry.extend_from_slice(&fingerprint.to_le_bytes());
        entry.extend_from_slice(&prefix);
        entry.extend_from_slice(&encoded);
        let at = self.spool.len();
        self.spool.append(&entry)?;
        if matches!(record, Record::Dir { .. }) {
            self.last_directory = at;
        }
        Ok(())
    }

    /// Calls `each` for all records, in the order they came.
    fn for_each(&self, mut each: impl FnMut(Record)) -> io::Result<()> {
        let end = self.spool.len();
        let mut reader = io::BufReader::new(self.spool.reader(0));
        let mut at = 0;
        while at < end {
            let entry = read_entry(&mut reader)?;
            at += entry.len;
            each(entry.record);
        }
        Ok(())
    }

    /// Calls `each` for all directories, the last first.
    fn directories_backwards(&self, mut each: impl FnMut(Vec<u8>, Meta, Option<Made>)) -> io::Result<()> {
        let mut at = self.last_directory;
        while at != NOWHERE {
            let entry = read_entry(&mut io::BufReader::new(self.spool.reader(at)))?;
            if let Record::Dir { path, meta } = entry.record {
                each(path, meta, entry.made);
            }
            if entry.directory_before != NOWHERE && entry.directory_before >= at {
                return Err(io::Error::other("its records are damaged"));
            }
            at = entry.directory_before;
        }
        Ok(())
    }
}

struct Entry {
    record: Record,
    made: Option<Made>,
    directory_before: u64,
    /// Bytes in the spool.
    len: u64,
}

fn read_entry(from: &mut impl Read) -> io::Result<Entry> {
    let mut link = [0; LINK_LEN as usize];
    from.read_exact(&mut link)?;
    let mut prefix = [0; crate::wire::RECORD_PREFIX_LEN];
    from.read_exact(&mut prefix)?;
    let len = u32::from_be_bytes(prefix[..4].try_into().expect("4 bytes")) as usize;
    let mut whole = prefix.to_vec();
    whole.resize(prefix.len() + len, 0);
    from.read_exact(&mut whole[prefix.len()..])?;
    let (record, _, _) = Record::split_first(&whole).map_err(io::Error::other)?;
    Ok(Entry {
        record,
        made: Some(u64::from_le_bytes(link[8..16].try_into().expect("8 bytes")))
            .filter(|fingerprint| *fingerprint != NOT_MADE)
            .map(Made::Done),
        directory_before: u64::from_le_bytes(link[..8].try_into().expect("8 bytes")),
        len: LINK_LEN + whole.len() as u64,
    })
}

/// Names that stay in a directory, from as many sources as meet in it.
#[derive(Default)]
struct Keep {
    names: HashSet<Vec<u8>>,
    bytes: usize,
    /// More than can be kept in memory.
    too_many: bool,
    /// Sources whose whole list is here.
    complete: u32,
}

/// The directory whose entries are being removed.
#[derive(Default)]
struct Pruned {
    /// First part of the reported paths, which patterns do not apply to.
    top: Vec<u8>,
    path: Vec<u8>,
    /// A failure was reported by the path of the directory, because the source has no right to learn names.
    is_told: Cell<bool>,
}

/// How many sources have listed each directory; `None` if one of them could not list it whole.
#[derive(Default)]
struct Lists {
    counts: HashMap<Vec<u8>, Option<u32>>,
    bytes: usize,
}

impl Lists {
    fn add(&mut self, path: Vec<u8>, complete: bool) {
        if self.bytes > KEEP_BYTES_MAX {
            return;
        }
        let len = path.len();
        match self.counts.entry(path) {
            Occupied(mut known) => {
                let count = known.get_mut();
                *count = count.filter(|_| complete).map(|count| count + 1);
            }
            Vacant(new) => {
                new.insert(complete.then_some(1));
                self.bytes += len + 64;
            }
        }
    }
}

impl Files {
    /// Hard links, removals if they are allowed, the attributes of directories, innermost first; then makes it
    /// all durable.
    pub(super) fn finalize(&self, may_remove: bool) {
        let deferred = self.deferred.lock().expect("no panics under the lock");
        if let Err(e) = self.finalize_from(&deferred, may_remove) {
            return self.events.send(SessionEvent::Fatal(LocalError::io("reading back directory attributes", e)));
        }
        drop(deferred);
        // Where each directory is synced by its name, before they cannot be opened any more.
        let names = match self.tree.volumes().any_by_file() && !self.discard && !self.params.options.dry_run {
            true => self.tree.sync_names(),
            false => Ok(()),
        };
        self.tree.lock_again();
        if !self.discard
            && !self.params.options.dry_run
            && let Err(e) = names.and_then(|()| self.tree.sync_names())
        {
            if let Some(journal) = &self.journal {
                journal.void();
            }
            return self
                .events
                .send(SessionEvent::Fatal(LocalError::Unsynced { doing: "making names durable", source: e }));
        }
        self.events.send(SessionEvent::Finalized);
    }

    fn finalize_from(&self, deferred: &Deferred, may_remove: bool) -> io::Result<()> {
        // Several sources may meet in one directory: what one of them has the others must not remove.
        let mut lists = Lists::default();
        // Of a session that is over nothing more is done: its user has taken it back.
        let is_over = || self.is_over();
        self.itemize_links();
        deferred.for_each(|record| match record {
            _ if is_over() => {}
            Record::Link { path, target } => match self.tree.link(&path, &target) {
                Ok(()) => drop(self.counters.others.fetch_add(1, Ordering::Relaxed)),
                Err(e) => self.fail(&path, &e),
            },
            Record::Keep { path, end: KeepEnd::Complete, .. } => lists.add(path, true),
            Record::Keep { path, end: KeepEnd::Incomplete, .. } => lists.add(path, false),
            _ => {}
        })?;
        let Lists { mut counts, bytes } = lists;
        if bytes > KEEP_BYTES_MAX {
            let why = "nothing was removed: there are too many directories to keep their names in memory";
            self.report(b"", ReportKind::Incomplete, why.into());
            counts.clear();
        }
        let lists: HashMap<Vec<u8>, u32> =
            counts.into_iter().filter_map(|(path, count)| Some((path, count?))).collect();
        if !lists.is_empty() && !may_remove {
            let why = "--delete skipped: parts of the source could not be read (--ignore-errors overrides)";
            self.report(b"", ReportKind::Incomplete, why.into());
        } else if !lists.is_empty() {
            self.remove(deferred, &lists)?;
        }
        deferred.directories_backwards(|path, meta, made| {
            if is_over() {
                return;
            }
            match self.tree.finish_directory(&path, &meta, made) {
                Ok(short) => self.fell_short(&path, short),
                Err(e) => self.fail_directory(&path, &e),
            }
        })?;
        if is_over() {
            return Ok(());
        }
        for (path, e) in self.tree.finish_early() {
            self.fail_directory(&path, &e);
        }
        self.tree.settle();
        Ok(())
    }

    fn remove(&self, deferred: &Deferred, lists: &HashMap<Vec<u8>, u32>) -> io::Result<()> {
        let filter = Filter::new(&self.params.options).map_err(io::Error::other)?;
        let spares = |path: &[u8], is_dir: &dyn Fn() -> bool| !filter.takes(path, is_dir);
        let pruned: RefCell<Pruned> = RefCell::default();
        // A peer without the right to read does not learn names.
        let readable = self.tree.manner.readable;
        let itemize = |path: &[u8]| {
            if self.params.options.itemize && readable {
                self.item(&beneath::join(&pruned.borrow().top, path), "deleted");
            }
        };
        let failed = |path: &[u8], e: &io::Error| {
            let pruned = pruned.borrow();
            if readable {
                let path = beneath::join(&pruned.top, path);
                self.report(&path, ReportKind::Incomplete, format!("not removed: {e}"));
            } else if !pruned.is_told.replace(true) {
                self.report(&pruned.path, ReportKind::Incomplete, format!("not removed: {e}"));
            }
        };
        let dry_run = self.params.options.dry_run;
        let remover = Remover {
            spares: &spares,
            dry_run,
            may_unlock: !dry_run,
            is_over: &self.over,
            on_removed: &itemize,
            on_failed: &failed,
        };
        let own = super::journal::name_of(&self.job);
        let mut gathering: HashMap<Vec<u8>, Keep> = HashMap::new();
        // Of all that are being gathered.
        let mut bytes = 0;
        deferred.for_each(|record| {
            let Record::Keep { path, below, names, end } = record else { return };
            let Some(sources) = lists.get(&path) else { return };
            let keep = gathering.entry(path.clone()).or_default();
            let more: usize = names.iter().map(|n| n.len() + 64).sum();
            if keep.too_many || bytes + more > KEEP_BYTES_MAX {
                bytes -= std::mem::take(&mut keep.bytes);
                keep.names = HashSet::new();
                keep.too_many = true;
            } else {
                bytes += more;
                keep.bytes += more;
                keep.names.extend(names);
            }
            keep.complete += u32::from(end == KeepEnd::Complete);
            if keep.complete < *sources {
                return;
            }
            let keep = gathering.remove(&path).expect("just there");
            bytes -= keep.bytes;
            if keep.too_many {
                let why = "nothing was removed here: the directory has too many names to keep in memory";
                return self.report(&path, ReportKind::Incomplete, why.into());
            }
            let (above, below) = path.split_at_checked(below as usize).unwrap_or((&path, b""));
            pruned.replace(Pruned { top: above.to_vec(), path: path.clone(), is_told: Cell::new(false) });
            let below = below.strip_prefix(b"/").unwrap_or(below);
            match self.tree.prune(&path, below, &keep.names, &own, &remover) {
                Ok(removed) => {
                    self.counters.deleted.fetch_add(removed.count, Ordering::Relaxed);
                    if let Some((failed, e)) = removed.failure {
                        let path = if readable { beneath::join(&pruned.borrow().top, &failed) } else { path };
                        self.report(&path, ReportKind::Incomplete, format!("not removed: {e}"));
                    }
                }
                Err(e) => self.report(&path, ReportKind::Incomplete, format!("nothing was removed here: {e}")),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(number: usize) -> Record {
        Record::Dir { path: number.to_string().into_bytes(), meta: Meta::default() }
    }

    #[test]
    fn records_come_back_in_order_and_directories_backwards_whatever_they_are_kept_in() {
        let root = tempfile::tempdir().unwrap();
        let fd: Arc<OwnedFd> = Arc::new(std::fs::File::open(root.path()).unwrap().into());
        for (count, elsewhere) in [(0, false), (10, false), (40_000, false), (40_000, true)] {
            let mut deferred = Deferred::new(&fd, elsewhere, Owner::default());
            for number in 0..count {
                let link = Record::Link { path: number.to_string().into_bytes(), target: b"t".to_vec() };
                deferred.push(&link, None).unwrap();
                deferred.push(&dir(number), (number % 3 == 0).then_some(Made::Done(7))).unwrap();
            }
            assert_eq!(deferred.spool.is_file(), count > 10);
            let mut seen = 0;
            deferred
                .for_each(|record| {
                    if let Record::Dir { path, .. } = record {
                        assert_eq!(path, seen.to_string().into_bytes());
                        seen += 1;
                    }
                })
                .unwrap();
            assert_eq!(seen, count);
            deferred
                .directories_backwards(|path, _, made| {
                    seen -= 1;
                    let expected = (seen % 3 == 0).then_some(Made::Done(7));
                    assert_eq!((path, made), (seen.to_string().into_bytes(), expected));
                })
                .unwrap();
            assert_eq!(seen, 0);
        }
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_one_source_could_not_list_is_no_list() {
        let mut lists = Lists::default();
        for (path, complete) in [("a", true), ("a", true), ("b", true), ("b", false), ("b", true), ("c", false)] {
            lists.add(path.into(), complete);
        }
        let of = |path: &str| lists.counts[path.as_bytes()];
        assert_eq!((of("a"), of("b"), of("c")), (Some(2), None, None));
    }
}
