//! Records whose turn comes when everything else is in place: hard links, removals, attributes of
//! directories.

use super::Mail;
use super::files::Files;
use super::remove::Remover;
use crate::filter::Filter;
use crate::wire::{KeepEnd, Record, ReportKind};
use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::atomic::Ordering;

/// Records are kept in memory up to this many bytes, then in a temporary file.
const IN_MEMORY: usize = 1 << 20;
/// Bytes of names to keep in one directory, beyond which nothing is removed from it.
const KEEP_BYTES_MAX: usize = 256 << 20;

/// Records that wait.
pub(super) struct Deferred {
    spool: tempfile::SpooledTempFile,
    /// Where the directories are, in the order they came, and whether this session made them.
    directories: Vec<(u64, bool)>,
    len: u64,
}

impl Default for Deferred {
    fn default() -> Deferred {
        Deferred { spool: tempfile::SpooledTempFile::new(IN_MEMORY), directories: Vec::new(), len: 0 }
    }
}

impl Deferred {
    /// Keeps a record; `made` if it is of a directory that this session made.
    pub(super) fn push(&mut self, record: &Record, made: bool) -> io::Result<()> {
        let encoded = record.encode();
        if matches!(record, Record::Dir { .. }) {
            self.directories.push((self.len, made));
        }
        let prefix = Record::prefix(encoded.len(), 0);
        self.spool.write_all(&prefix)?;
        self.spool.write_all(&encoded)?;
        self.len += (prefix.len() + encoded.len()) as u64;
        Ok(())
    }

    /// Calls `each` for all records, in the order they came.
    fn for_each(&mut self, mut each: impl FnMut(Record)) -> io::Result<()> {
        self.spool.seek(SeekFrom::Start(0))?;
        let mut reader = io::BufReader::new(&mut self.spool);
        let mut at = 0;
        while at < self.len {
            let (record, size) = read_record(&mut reader)?;
            at += size;
            each(record);
        }
        Ok(())
    }
}

fn read_record(from: &mut impl Read) -> io::Result<(Record, u64)> {
    let mut prefix = [0; crate::wire::RECORD_PREFIX_LEN];
    from.read_exact(&mut prefix)?;
    let len = u32::from_be_bytes(prefix[..4].try_into().expect("4 bytes")) as usize;
    let mut whole = prefix.to_vec();
    whole.resize(prefix.len() + len, 0);
    from.read_exact(&mut whole[prefix.len()..])?;
    let (record, _, _) = Record::split_first(&whole).map_err(io::Error::other)?;
    Ok((record, whole.len() as u64))
}

/// Names that stay in a directory, from as many sources as meet in it.
#[derive(Default)]
struct Keep {
    names: HashSet<Vec<u8>>,
    bytes: usize,
    /// Sources whose whole list is here.
    complete: u32,
}

impl Files {
    /// Hard links, removals if they are allowed, the attributes of directories, innermost first; then makes it
    /// all durable.
    pub(super) fn finalize(&self, may_remove: bool) {
        let mut deferred = self.deferred.lock().expect("no panics under the lock");
        if let Err(e) = self.finalize_from(&mut deferred, may_remove) {
            return self.mailer.send(Mail::Fatal(format!("reading back directory attributes: {e}")));
        }
        drop(deferred);
        self.tree.lock_again();
        if !self.discard
            && !self.terms.options.dry_run
            && let Err(e) = self.tree.sync_names()
        {
            if let Some(journal) = &self.journal {
                journal.void();
            }
            return self.mailer.send(Mail::Fatal(format!("making names durable: {e}")));
        }
        self.mailer.send(Mail::Finalized);
    }

    fn finalize_from(&self, deferred: &mut Deferred, may_remove: bool) -> io::Result<()> {
        // Several sources may meet in one directory: what one of them has the others must not remove.
        let mut lists: HashMap<Vec<u8>, u32> = HashMap::new();
        let mut incomplete: HashSet<Vec<u8>> = HashSet::new();
        deferred.for_each(|record| match record {
            Record::Link { path, target } => match self.tree.link(&path, &target) {
                Ok(()) => drop(self.counters.others.fetch_add(1, Ordering::Relaxed)),
                Err(e) => self.fail(&path, &e),
            },
            Record::Keep { path, end: KeepEnd::Complete, .. } => *lists.entry(path).or_default() += 1,
            Record::Keep { path, end: KeepEnd::Incomplete, .. } => drop(incomplete.insert(path)),
            _ => {}
        })?;
        lists.retain(|path, _| !incomplete.contains(path));
        if !lists.is_empty() && !may_remove {
            let why = "nothing was removed, because the source could not be read whole (--ignore-errors removes all the same)";
            self.report(b"", ReportKind::Incomplete, why.into());
        } else if !lists.is_empty() {
            self.remove(deferred, &lists)?;
        }
        for (at, made) in std::mem::take(&mut deferred.directories).into_iter().rev() {
            deferred.spool.seek(SeekFrom::Start(at))?;
            if let (Record::Dir { path, meta }, _) = read_record(&mut deferred.spool)? {
                match self.tree.finish_directory(&path, &meta, made) {
                    Ok(short) => self.fell_short(&path, short),
                    Err(e) => self.fail(&path, &e),
                }
            }
        }
        Ok(())
    }

    fn remove(&self, deferred: &mut Deferred, lists: &HashMap<Vec<u8>, u32>) -> io::Result<()> {
        let filter = Filter::new(&self.terms.options).map_err(io::Error::other)?;
        let remover = Remover { filter: &filter, dry_run: self.terms.options.dry_run };
        let own = super::journal::name_of(&self.job);
        let mut gathering: HashMap<Vec<u8>, Keep> = HashMap::new();
        deferred.for_each(|record| {
            let Record::Keep { path, below, names, end } = record else { return };
            let Some(sources) = lists.get(&path) else { return };
            let keep = gathering.entry(path.clone()).or_default();
            keep.bytes += names.iter().map(|n| n.len() + 64).sum::<usize>();
            if keep.bytes <= KEEP_BYTES_MAX {
                keep.names.extend(names);
            }
            keep.complete += u32::from(end == KeepEnd::Complete);
            if keep.complete < *sources {
                return;
            }
            let keep = gathering.remove(&path).expect("just there");
            if keep.bytes > KEEP_BYTES_MAX {
                let why = "nothing was removed here: the directory has too many names to keep in memory";
                return self.report(&path, ReportKind::Incomplete, why.into());
            }
            let below = path.get(below as usize..).unwrap_or_default();
            let below = below.strip_prefix(b"/").unwrap_or(below);
            match self.tree.prune(&path, below, &keep.names, &own, &remover) {
                Ok(removed) => {
                    self.counters.deleted.fetch_add(removed.count, Ordering::Relaxed);
                    if let Some((path, e)) = removed.failure {
                        self.report(&path, ReportKind::Incomplete, format!("not removed: {e}"));
                    }
                }
                Err(e) => self.report(&path, ReportKind::Incomplete, format!("nothing was removed here: {e}")),
            }
        })
    }
}
