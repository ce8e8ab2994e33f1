//! What a sink does with the content of blocks: unpacks records, writes pieces of large files.
//!
//! Runs on workers and on the storage thread; the session's own thread only counts.

use super::attributes::{Before, Shortcomings, Unopened};
use super::commit::{Committer, Content, Finished};
use super::deferred::Deferred;
use super::items::Itemized;
use super::journal::{Earlier, Journal, Key, Range, Version, key_of};
use super::made::Made;
use super::promises::{Promise, Promises};
use super::reports::Reports;
use super::scope::Scope;
use super::tree::{Clearing, ClearingTurn, Clearings, Place, Tree, temp_name};
use super::{Counters, EARLY_ENDS_FEW, SessionEvent};
use crate::link::{Receive, splice};
use crate::protocol::Violation;
use crate::protocol::reassembly::{Ended, Known, Reassembly};
use crate::session::{EventSender, FirstFailure, LocalError, Pipeline, Progress, SessionParams};
use crate::wire::{BlockHeader, Direct, FileStatus, Meta, Record, Report, ReportKind};
use rustix::fs::{AtFlags, FsWord, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_engine::digest::{Algorithm, DIGEST_LEN};
use thruway_engine::io::{Outcome, Request};
use thruway_engine::quota::Unit;
use thruway_engine::stage::TASK_TIME;
use thruway_engine::{Block, OpenFile, Segment};
use thruway_fs::Identity;
use thruway_fs::beneath;

/// Auto direct I/O begins here.
const DIRECT_FROM: u64 = 256 << 20;
const ALIGN: u64 = 4096;
/// Finished files of one pack that are handed to the commit stage together.
const SUBMIT: usize = 256;

/// Digest of a block's payload; zeroes where nothing is verified.
pub(super) type Digest = [u8; DIGEST_LEN];

/// What a session writes.
pub(super) struct Files {
    pub(super) tree: Arc<Tree>,
    pub(super) scope: Scope,
    pub(super) job: [u8; 16],
    pub(super) params: SessionParams,
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) journal: Option<Arc<Journal>>,
    pub(super) earlier: Earlier,
    pub(super) committer: Arc<Committer>,
    pub(super) counters: Arc<Counters>,
    pub(super) events: EventSender<SessionEvent>,
    /// Data goes nowhere.
    pub(super) discard: bool,
    pub(super) large: Mutex<Large>,
    /// Rung when a large file has begun, or the session is over.
    pub(super) begun: Condvar,
    pub(super) deferred: Mutex<Deferred>,
    pub(super) progress: Arc<Progress>,
    /// Files that are being written or wait to be put in place.
    pub(super) in_flight: Mutex<HashSet<Key>>,
    pub(super) promises: Promises,
    /// Reports of failures that have not been sent.
    pub(super) reports: Reports,
    /// Reports of items that have not been sent.
    pub(super) items: Reports,
    pub(super) itemized: Mutex<Itemized>,
    pub(super) clearings: Arc<Clearings>,
    /// The session is over; long work may stop.
    pub(super) over: Arc<AtomicBool>,
}

/// The large files of a session.
#[derive(Default)]
pub(super) struct Large {
    files: Reassembly<Arc<LargeFile>, (Block, BlockHeader, Digest)>,
    /// Nothing more will begin.
    over: bool,
}

pub(super) struct LargeFile {
    file: Arc<OpenFile>,
    /// The same file for direct I/O.
    direct: Option<Arc<OpenFile>>,
    name: CString,
    temp: CString,
    path: Vec<u8>,
    meta: Meta,
    key: Key,
    version: Version,
    identity: Identity,
    before: Before,
    failure: FirstFailure,
    /// Unit of the quota of open files.
    _share: Option<Unit>,
    /// A piece, by its sequence number, that was not what the source had digested: the file changed there, or
    /// the network is at fault.
    suspect: Mutex<Option<u32>>,
    written: AtomicU32,
}

/// A directory of the destination that is kept open, with its path and what new files inherit from it.
type OpenDirectory = Option<(Vec<u8>, Arc<OwnedFd>, Before)>;

/// A pack that is being unpacked.
struct Pack {
    files: Arc<Files>,
    block: Block,
    len: usize,
    /// Position of the next record.
    at: usize,
    /// The next record, if it has been decoded, with the positions of its content.
    decoded: Option<(Record, std::ops::Range<usize>)>,
    /// Small files written.
    written: usize,
    /// The directory of the last small file.
    last_dir: OpenDirectory,
    /// The directory that gives way to the next record.
    clearing: Option<(ClearingTurn, Clearing)>,
}

/// How far the next record of a pack is.
enum Next {
    Taken,
    /// A part of its preparation is done.
    Part,
    /// A directory gives way to it when those of other packs have done so.
    Waits,
}

impl Pack {
    /// Goes on when the commit stage has room for more files. The worker does not wait.
    fn wait_for_room(self) {
        let committer = Arc::clone(&self.files.committer);
        let submit = move || {
            let pipeline = Arc::clone(&self.files.pipeline);
            pipeline.submit(pipeline.files, move || self.unpack());
        };
        committer.when_room(submit);
    }

    /// Unpacks records for the time of a task, and submits the rest as another one.
    fn unpack(mut self) {
        let (files, began) = (Arc::clone(&self.files), Instant::now());
        let mut finished = Vec::new();
        while self.at < self.len && !files.is_over() {
            match self.next(&mut finished) {
                Ok(Next::Taken) if began.elapsed() < TASK_TIME => {}
                Ok(next) => {
                    files.committer.submit(finished);
                    // A pack that waits keeps no descriptor.
                    self.last_dir = None;
                    return match next {
                        Next::Waits => files.clearings.when_free(move || self.wait_for_room()),
                        _ => self.wait_for_room(),
                    };
                }
                Err(violation) => {
                    files.violation(violation);
                    break;
                }
            }
            if finished.len() >= SUBMIT {
                files.committer.submit(std::mem::take(&mut finished));
            }
        }
        files.committer.submit(finished);
        drop(self);
        files.block_done();
    }

    /// Takes the next record, or does a part of its preparation.
    fn next(&mut self, finished: &mut Vec<Finished>) -> Result<Next, Violation> {
        let files = Arc::clone(&self.files);
        let (record, range) = match self.decoded.take() {
            Some(decoded) => decoded,
            None => {
                let (record, content, after) = Record::split_first(&self.block.payload()[self.at..self.len])?;
                files.scope.check(&record)?;
                let end = self.len - after.len();
                let range = end - content.len()..end;
                if files.would_fail(&record) {
                    self.at = end;
                    return Ok(Next::Taken);
                }
                // Before the preparation, which may remove what is in the way.
                files.itemize(&record);
                (record, range)
            }
        };
        let writes = !files.params.options.dry_run && !files.discard;
        // An error comes again, and is reported, when the record is taken.
        if writes
            && let Some(path) = record.makes()
            && matches!(files.tree.make_part_above(path), Ok(false))
        {
            self.decoded = Some((record, range));
            return Ok(Next::Part);
        }
        let is_refused = match self.clear(&record, writes) {
            Ok(Next::Taken) => false,
            Ok(next) => {
                self.decoded = Some((record, range));
                return Ok(next);
            }
            Err((path, e)) => {
                files.fail(&path, &e);
                writes
            }
        };
        self.at = range.end;
        if is_refused {
            return Ok(Next::Taken);
        }
        let content = &self.block.payload()[range];
        if writes {
            let before = finished.len();
            files.take(record, content, finished, (self.written, &mut self.last_dir));
            self.written += finished.len() - before;
        } else {
            files.count_only(&record, content);
        }
        Ok(Next::Taken)
    }

    /// Removes a part of the directory that gives way to a link or special file, or lists a part of one that gives way to any entry.
    /// [`Next::Taken`] when that is done.
    ///
    /// # Errors
    /// With the path of the entry, if the directory may not give way. In a session that writes, only for an entry that is made at
    /// once; other entries fail later.
    fn clear(&mut self, record: &Record, writes: bool) -> Result<Next, (Vec<u8>, io::Error)> {
        let (files, options) = (&self.files, &self.files.params.options);
        let removes = writes && matches!(record, Record::Symlink { .. } | Record::Special { .. });
        let (Record::File { path, .. }
        | Record::Begin { path, .. }
        | Record::Symlink { path, .. }
        | Record::Special { path, .. }
        | Record::Link { path, .. }) = record
        else {
            return Ok(Next::Taken);
        };
        if files.discard || !(options.itemize || removes) {
            return Ok(Next::Taken);
        }
        let failed = |e: io::Error| match removes || !writes {
            true => Err((path.clone(), e)),
            false => Ok(Next::Taken),
        };
        let (turn, mut clearing) = match self.clearing.take() {
            Some(clearing) => clearing,
            None => {
                let place = match files.tree.in_the_way(path, writes) {
                    Ok(Some(place)) => place,
                    Ok(None) => return Ok(Next::Taken),
                    Err(e) => return failed(e),
                };
                let Some(turn) = files.clearings.take() else { return Ok(Next::Waits) };
                match files.tree.clearing(path, place, writes) {
                    Ok(clearing) => (turn, clearing),
                    Err(e) => return failed(e),
                }
            }
        };
        let until = Some(Instant::now() + TASK_TIME);
        let found = |below: &[u8]| files.itemize_below(path, below);
        let done = match clearing.look(&files.over, until, &found) {
            Ok(true) if removes => clearing.remove(&files.over, until),
            other => other,
        };
        match done {
            Ok(false) => {
                self.clearing = Some((turn, clearing));
                return Ok(Next::Part);
            }
            _ if writes => files.tree.count_cleared(&clearing),
            _ => _ = files.counters.deleted.fetch_add(clearing.contents(), Ordering::Relaxed),
        }
        done.map_or_else(failed, |_| Ok(Next::Taken))
    }
}

impl Files {
    /// Gives the source leave to send a record that needs it. False if it is to send the file.
    pub(super) fn promise(&self, key: Key, promise: Promise) -> bool {
        self.params.options.dry_run || self.promises.add(key, promise)
    }

    fn redeem(&self, path: &[u8]) -> Option<Promise> {
        self.promises.take(&key_of(path))
    }

    /// Takes back the leave to send attributes, because the source sends the file. It was counted as up to date.
    fn forget_promise(&self, path: &[u8]) {
        if let Some(Promise::Attributes { ours, .. }) = self.redeem(path) {
            self.counters.files.fetch_sub(1, Ordering::Relaxed);
            self.counters.skipped.fetch_sub(u64::from(!ours), Ordering::Relaxed);
        }
    }

    /// Whether the session is over, or is to end.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst) || self.params.check_cancel().is_err()
    }

    pub(super) fn fail(&self, path: &[u8], error: &io::Error) {
        // What would fail every other file too ends the session.
        let doing = || format!("writing {}", crate::escape(path));
        match error.raw_os_error() {
            Some(code @ (libc::EMFILE | libc::ENFILE)) if self.params.has_others => {
                let source = io::Error::from_raw_os_error(code);
                self.events.send(SessionEvent::Fatal(LocalError::Exhausted { doing: doing(), source }));
            }
            Some(code @ (libc::ENOSPC | libc::EDQUOT | libc::EROFS | libc::EMFILE | libc::ENFILE)) => {
                self.events.send(SessionEvent::Fatal(LocalError::io(doing(), io::Error::from_raw_os_error(code))));
            }
            _ => {}
        }
        self.report(path, ReportKind::NotCopied, error.to_string());
    }

    /// Reports a directory that lacks attributes, which the next attempt tries to give it.
    pub(super) fn fail_directory(&self, path: &[u8], error: &io::Error) {
        self.tree.leave_unsettled();
        self.fail(path, error);
    }

    pub(super) fn report(&self, path: &[u8], kind: ReportKind, message: String) {
        let report = Report { path: path.to_vec(), kind, message };
        if self.reports.admit(&report) {
            self.send_report(report);
        }
    }

    pub(super) fn send_report(&self, report: Report) {
        self.events.send(SessionEvent::Report(report));
    }

    /// Subtracts an admitted report that has been sent from the waiting ones.
    pub(super) fn told(&self, report: &Report) {
        if report.kind == ReportKind::Item { self.items.told(report) } else { self.reports.told(report) }
    }

    /// Attributes of an entry that is in place could not be kept.
    pub(super) fn fell_short(&self, path: &[u8], short: Shortcomings) {
        for message in short.told {
            self.report(path, ReportKind::Incomplete, message);
        }
        for message in short.refused {
            self.report(path, ReportKind::Unsupported, message);
        }
    }

    fn in_flight(&self) -> MutexGuard<'_, HashSet<Key>> {
        self.in_flight.lock().expect("no panics under the lock")
    }

    /// A file begins; one at a time has each name.
    fn enter(&self, key: Key) -> io::Result<()> {
        if self.in_flight().insert(key) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, "another source has a file of this name; not overwriting it"))
    }

    /// A file is in place, or never will be.
    pub(super) fn leave(&self, key: &Key) {
        self.in_flight().remove(key);
    }

    /// Unpacks the records of a pack, in tasks of limited length.
    pub(super) fn unpack(self: &Arc<Files>, block: Block, len: u32) {
        let pack = Pack {
            files: Arc::clone(self),
            block,
            len: len as usize,
            at: 0,
            decoded: None,
            written: 0,
            last_dir: None,
            clearing: None,
        };
        self.pipeline.submit(self.pipeline.files, move || pack.wait_for_room());
    }

    fn take(
        &self,
        record: Record,
        content: &[u8],
        finished: &mut Vec<Finished>,
        (written, last_dir): (usize, &mut OpenDirectory),
    ) {
        match record {
            Record::File { meta, .. } if meta.size != content.len() as u64 => {
                self.violation(crate::wire::Malformed("size: not that of the file's content").into());
            }
            Record::File { path, meta } => {
                // The file has changed at the source since it was offered, so its attributes do not come alone.
                self.forget_promise(&path);
                match self.small_file(&path, &meta, content, written, last_dir) {
                    Ok(file) => finished.push(file),
                    Err(e) => self.fail(&path, &e),
                }
            }
            Record::Begin { file, path, meta, resume } => {
                let resumed = match resume.then(|| self.redeem(&path)) {
                    None => {
                        self.forget_promise(&path);
                        None
                    }
                    Some(Some(Promise::Resume(identity))) => Some(identity),
                    Some(_) => return self.violation(Violation::Unexpected("continuation of a file")),
                };
                Progress::add(&self.progress.total_bytes, meta.size);
                let opened = self.open_large(&path, meta, resumed);
                self.opened(file, &path, opened);
            }
            Record::Dir { ref path, ref meta } => {
                *last_dir = None;
                match self.tree.make_directory(path, meta) {
                    Ok(made) => {
                        self.count_directory(path);
                        self.defer(&record, made);
                    }
                    Err(e) => self.fail_directory(path, &e),
                }
            }
            Record::Symlink { path, target, meta } => self.other(&path, self.tree.symlink(&path, &target, &meta)),
            Record::Special { path, meta, rdev } => match self.tree.special(&path, &meta, rdev) {
                // Without the privilege, today as tomorrow.
                Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
                    self.report(&path, ReportKind::Unsupported, e.to_string());
                }
                made => self.other(&path, made),
            },
            Record::Attributes { path, meta } => {
                let Some(Promise::Attributes { identity, ours, changed }) = self.redeem(&path) else {
                    return self.violation(Violation::Unexpected("attributes of a file"));
                };
                let may = if ours { Ok(()) } else { self.tree.may_replace() };
                // With all rights, another name of the file may have got its attributes in between.
                let changed = Some(changed).filter(|_| ours || !self.tree.has_all_rights());
                match may.and_then(|()| self.tree.refresh(&path, &meta, identity, (ours, changed))) {
                    Ok((short, ctime)) => {
                        // Its change time is another now: without a record of that it would be sent again.
                        if let Some(journal) = self.journal.as_ref().filter(|_| ours) {
                            let (key, version) = (key_of(&path), version_of(&meta));
                            journal.placed([(&key, &version, identity, ctime, !short.is_none())].into_iter());
                        }
                        self.fell_short(&path, short);
                    }
                    Err(e) => self.fail(&path, &e),
                }
            }
            Record::Link { .. } | Record::Keep { .. } => self.defer(&record, None),
        }
    }

    fn count_only(&self, record: &Record, content: &[u8]) {
        match record {
            Record::File { meta, .. } => {
                self.counters.files.fetch_add(1, Ordering::Relaxed);
                let len = if self.discard { content.len() as u64 } else { meta.data };
                Progress::add(&self.progress.bytes, content.len() as u64);
                self.counters.bytes.fetch_add(len, Ordering::Relaxed);
            }
            Record::Begin { file, .. } => self.opened(*file, b"", Ok(None)),
            Record::Keep { .. } if !self.discard => self.defer(record, None),
            Record::Keep { .. } => {}
            Record::Attributes { .. } => {}
            Record::Dir { path, .. } => self.count_directory(path),
            _ => drop(self.counters.others.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// Counts a directory. The destination itself counts only if it gets attributes.
    fn count_directory(&self, path: &[u8]) {
        let counts = !path.is_empty() || self.params.options.preserve;
        self.counters.others.fetch_add(counts.into(), Ordering::Relaxed);
    }

    fn other(&self, path: &[u8], result: io::Result<Shortcomings>) {
        match result {
            Ok(short) => {
                self.counters.others.fetch_add(1, Ordering::Relaxed);
                self.fell_short(path, short);
            }
            Err(e) => self.fail(path, &e),
        }
    }

    fn defer(&self, record: &Record, made: Option<Made>) {
        let mut deferred = self.deferred.lock().expect("no panics under the lock");
        if let Err(e) = deferred.push(record, made) {
            self.events
                .send(SessionEvent::Fatal(LocalError::io("keeping directory attributes in a temporary file", e)));
        }
    }

    fn small_file(
        &self,
        path: &[u8],
        meta: &Meta,
        content: &[u8],
        open: usize,
        last_dir: &mut OpenDirectory,
    ) -> io::Result<Finished> {
        let (parent, name) = beneath::split(path);
        let (dir, before) = match last_dir {
            Some((path, dir, before)) if path == parent => (Arc::clone(dir), before.clone()),
            _ => {
                let dir = self.tree.directory(parent)?;
                let before = self.tree.inherited(dir.as_fd())?;
                *last_dir = Some((parent.to_vec(), Arc::clone(&dir), before.clone()));
                (dir, before)
            }
        };
        let name = CString::new(name)?;
        let before = self.tree.inherited_as(&name, dir.as_fd(), &before);
        let key = key_of(path);
        self.enter(key)?;
        let written = self.write_small(&Place { dir, name }, (path, parent, key), (meta, &before), content, open);
        if written.is_err() {
            self.leave(&key);
        }
        written
    }

    fn write_small(
        &self,
        place: &Place,
        (path, parent, key): (&[u8], &[u8], Key),
        (meta, before): (&Meta, &Before),
        content: &[u8],
        open_files: usize,
    ) -> io::Result<Finished> {
        let temp = temp_name(&place.name, &self.job, &key);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (mode, mode_is_right) = self.tree.mode_at_creation(meta, before);
        let open = || rustix::fs::openat(&place.dir, &temp, flags, mode);
        let opened = match self.tree.writing(parent, open) {
            // Left by an attempt that was killed; what that had asked a server of files to do may still be done meanwhile.
            Err(rustix::io::Errno::EXIST) => {
                remove_leftover(&place.dir, &temp)?;
                open()
            }
            other => other,
        };
        let mut file = File::from(opened?);
        let named = file.write_all(content).and_then(|()| {
            let short = self.tree.apply(file.as_fd(), meta, mode_is_right, before);
            Ok((Identity::of(&file, c"")?.0, short))
        });
        let (identity, short) = named.inspect_err(|_| {
            let _ = rustix::fs::unlinkat(&place.dir, &temp, AtFlags::empty());
        })?;
        self.counters.bytes.fetch_add(content.len() as u64, Ordering::Relaxed);
        Progress::add(&self.progress.bytes, content.len() as u64);
        let lacking = !short.is_none();
        self.fell_short(path, short);
        let version = version_of(meta);
        let (parent, name) = (parent.to_vec(), place.name.clone());
        let content = self.committer.keep(file, open_files);
        let replacing = (*before == Before::Replacing).then_some(meta.mode);
        Ok(Finished { parent, name, temp, path: path.to_vec(), key, version, identity, lacking, replacing, content })
    }

    fn open_large(&self, path: &[u8], meta: Meta, resumed: Option<Identity>) -> io::Result<Option<Arc<LargeFile>>> {
        let place = self.tree.place(path)?;
        let key = key_of(path);
        self.enter(key)?;
        let opened = self.open_temporary(path, &place, key, meta, resumed);
        if opened.is_err() {
            self.leave(&key);
        }
        opened.map(|file| Some(Arc::new(file)))
    }

    fn open_temporary(
        &self,
        path: &[u8],
        Place { dir, name }: &Place,
        key: Key,
        meta: Meta,
        resumed: Option<Identity>,
    ) -> io::Result<LargeFile> {
        let share = self.params.open_file(Duration::ZERO)?;
        // A file that somebody puts under its name from now on does not give it permissions.
        let before = match self.params.options.preserve {
            true => Before::Inherited,
            false => self.tree.inherited_as(name, dir.as_fd(), &self.tree.inherited(dir.as_fd())?),
        };
        let temp = temp_name(name, &self.job, &key);
        let mut flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if resumed.is_none() {
            // A new file, not the old one emptied: what is recorded of that one is not true of this.
            remove_leftover(dir, &temp)?;
            flags |= OFlags::CREATE | OFlags::EXCL;
        }
        let (parent, _) = beneath::split(path);
        let open = || rustix::fs::openat(dir, &temp, flags, Mode::from_raw_mode(0o600));
        let opened = match (self.tree.writing(parent, open), resumed) {
            // An attempt that ended before the renaming has given it the mode of a source that is read-only.
            (Err(Errno::ACCESS), Some(resumed)) => {
                let file = Unopened::look(dir, &temp)?;
                if Identity::of(&file, c"")?.0 == resumed {
                    file.chmod(0o600)?;
                }
                open()
            }
            (opened, _) => opened,
        };
        let file = File::from(opened?);
        let (identity, stat) = Identity::of(&file, c"")?;
        let version = version_of(&meta);
        if let Some(resumed) = resumed {
            // The file that was read back, and no other that has come by its name since, or that has a second name.
            if resumed != identity || stat.stx_nlink != 1 || stat.stx_size != meta.size {
                return Err(io::Error::other("its temporary file was changed"));
            }
        } else {
            if let Some(journal) = &self.journal {
                journal.begun(&key, &version, identity);
            }
            file.set_len(meta.size).inspect_err(|_| {
                let _ = rustix::fs::unlinkat(dir, &temp, AtFlags::empty());
            })?;
        }
        let wanted = match self.params.options.direct {
            Direct::Off => false,
            Direct::On => true,
            Direct::Auto => meta.size >= DIRECT_FROM && is_disk(&file),
        };
        // By its descriptor: its name may be another's by now.
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = wanted
            .then(|| rustix::fs::open(&itself, OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()))
            .and_then(Result::ok)
            .map(|fd| Arc::new(OpenFile::new(File::from(fd))));
        Ok(LargeFile {
            file: Arc::new(OpenFile::new(file)),
            direct,
            name: name.clone(),
            temp,
            path: path.to_vec(),
            meta,
            key,
            version,
            identity,
            before,
            failure: FirstFailure::default(),
            _share: share,
            suspect: Mutex::default(),
            written: AtomicU32::new(0),
        })
    }

    fn large(&self) -> MutexGuard<'_, Large> {
        self.large.lock().expect("no panics under the lock")
    }

    fn violation(&self, violation: Violation) {
        self.events.send(SessionEvent::Violation(violation));
    }

    /// A large file has been opened (`None`: there is nothing to write) or not.
    fn opened(&self, number: u64, path: &[u8], opened: io::Result<Option<Arc<LargeFile>>>) {
        let file = opened.unwrap_or_else(|e| {
            self.fail(path, &e);
            None
        });
        let mut large = self.large();
        let begun = large.files.begin(number, file);
        let few = large.files.early_ends() == EARLY_ENDS_FEW;
        drop(large);
        let early = match begun {
            Ok(early) => early,
            Err(violation) => return self.violation(violation),
        };
        if few {
            // The source may be heard again.
            self.events.send(SessionEvent::Progressed);
        }
        self.begun.notify_all();
        for (block, header, digest) in early {
            self.write_piece(block, header, digest);
        }
        self.check_end(number);
    }

    /// Nothing more will begin: who waits for that waits in vain.
    pub(super) fn close(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.large().over = true;
        self.begun.notify_all();
    }

    /// Writes a piece of a large file that has come.
    pub(super) fn piece(self: &Files, block: Block, header: BlockHeader, digest: Digest) {
        let come = self.large().files.come(header.file);
        match come {
            Ok(()) => self.write_piece(block, header, digest),
            Err(violation) => self.violation(violation),
        }
    }

    fn write_piece(self: &Files, block: Block, header: BlockHeader, digest: Digest) {
        if self.is_over() {
            return;
        }
        let mut large = self.large();
        let file = match large.files.lookup(header.file) {
            Ok(Known::Open(file)) => file,
            Ok(Known::Nowhere) => {
                drop(large);
                if self.discard {
                    self.counters.bytes.fetch_add(header.len.into(), Ordering::Relaxed);
                }
                drop(block);
                return self.dealt(header.file);
            }
            Ok(Known::NotYet) => {
                let parked = large.files.park(header.file, (block, header, digest));
                return parked.unwrap_or_else(|violation| self.violation(violation));
            }
            Err(violation) => return self.violation(violation),
        };
        drop(large);
        let len = header.len;
        if header.offset + u64::from(len) > file.meta.size {
            return self.violation(crate::wire::Malformed("offset: beyond its file").into());
        }
        let aligned = header.offset.is_multiple_of(ALIGN) && u64::from(len).is_multiple_of(ALIGN);
        let direct = file.direct.as_ref().filter(|_| aligned);
        let target = direct.unwrap_or(&file.file);
        let (files, large) = (self.mailer_handle(), Arc::clone(&file));
        let request = Request::write(Arc::clone(target), header.offset, Segment::new(block, len as usize));
        self.pipeline.storage.submit(request, move |outcome| {
            let Some(files) = files.upgrade() else { return };
            let Outcome { result, buffers } = outcome;
            match result {
                Ok(_) => {
                    files.counters.bytes.fetch_add(len.into(), Ordering::Relaxed);
                    large.written.fetch_add(1, Ordering::SeqCst);
                    files.record(&large, Range { offset: header.offset, len, digest });
                }
                Err(e) => {
                    // Its other pieces may fail too; once is enough to tell.
                    if large.failure.is_first(e.to_string()) {
                        files.fail(&large.path, &e);
                    }
                }
            }
            drop(buffers);
            files.dealt(header.file);
        });
    }

    /// Records that a range is verified and written; what was not verified cannot be checked later.
    fn record(&self, large: &LargeFile, range: Range) {
        if let Some(journal) = self.journal.as_ref().filter(|_| self.params.verify != Algorithm::None) {
            journal.range(&large.key, &large.version, large.identity, &range);
        }
    }

    /// Waits until it is known where a piece of a large file that comes goes; `None`: nowhere.
    fn await_beginning(&self, number: u64) -> io::Result<Option<Arc<LargeFile>>> {
        let broken = |violation: Violation| {
            self.violation(violation.clone());
            io::Error::new(io::ErrorKind::InvalidData, violation)
        };
        let mut large = self.large();
        let mut known = large.files.come(number).and_then(|()| large.files.lookup(number));
        let waits = |known: &Result<_, _>| matches!(known, Ok(Known::NotYet));
        if waits(&known) && !large.over {
            known = large.files.wait(number).map(|()| Known::NotYet);
            // If nothing else comes, it never begins.
            self.events.send(SessionEvent::Progressed);
            while waits(&known) && !large.over {
                large = self.begun.wait(large).expect("no panics under the lock");
                known = large.files.lookup(number);
            }
        }
        drop(large);
        match known {
            Ok(Known::Open(file)) => Ok(Some(file)),
            Ok(Known::Nowhere) => Ok(None),
            Ok(Known::NotYet) => Err(io::Error::other("the session is over")),
            Err(violation) => Err(broken(violation)),
        }
    }

    fn mailer_handle(&self) -> std::sync::Weak<Files> {
        self.counters.files_handle.get().cloned().unwrap_or_default()
    }

    /// A piece of a large file has come that the source could not read.
    pub(super) fn void(&self, number: u64) {
        let void = self.large().files.void(number);
        self.end_of_piece(number, void);
    }

    /// A piece of a large file that had come has been dealt with, written or not.
    fn dealt(&self, number: u64) {
        let dealt = self.large().files.dealt(number);
        self.end_of_piece(number, dealt);
    }

    fn end_of_piece(&self, number: u64, counted: Result<(), Violation>) {
        if let Err(violation) = counted {
            return self.violation(violation);
        }
        self.check_end(number);
        self.block_done();
    }

    /// One block more has been dealt with.
    pub(super) fn block_done(&self) {
        let done = self.counters.blocks.fetch_add(1, Ordering::SeqCst) + 1;
        if done == self.counters.expected.load(Ordering::SeqCst) {
            self.events.send(SessionEvent::Progressed);
        }
    }

    /// The source has read the file to its end.
    pub(super) fn file_end(&self, number: u64, blocks: u32, status: FileStatus) -> Result<(), Violation> {
        self.large().files.end(number, blocks, status)?;
        self.check_end(number);
        Ok(())
    }

    fn check_end(&self, number: u64) {
        let ended = self.large().files.take_ended(number);
        let Ended { file, whole } = match ended {
            Ok(Some(ended)) => ended,
            Ok(None) => return,
            Err(violation) => return self.violation(violation),
        };
        let Some(file) = file else {
            if whole && (self.discard || self.params.options.dry_run) {
                self.counters.files.fetch_add(1, Ordering::Relaxed);
            }
            return self.events.send(SessionEvent::Progressed);
        };
        let suspect = *file.suspect.lock().expect("no panics under the lock");
        if let Some(sequence) = suspect.filter(|_| whole) {
            // The source says that its file did not change: then it happened on the way.
            return self.events.send(SessionEvent::Damaged { sequence, what: "its digest does not match" });
        }
        if !whole || file.failure.get().is_some() {
            if !whole && let Ok(place) = self.tree.find(&file.path) {
                // It changed at the source: what is here is a mixture.
                let _ = rustix::fs::unlinkat(&place.dir, &file.temp, AtFlags::empty());
            }
            self.leave(&file.key);
            return self.events.send(SessionEvent::Progressed);
        }
        let short = self.tree.apply(file.file.as_fd(), &file.meta, false, &file.before);
        let lacking = !short.is_none();
        self.fell_short(&file.path, short);
        if let Some(journal) = &self.journal {
            journal.whole(&file.key, &file.version, file.identity);
        }
        let (parent, _) = beneath::split(&file.path);
        self.committer.submit(vec![Finished {
            parent: parent.to_vec(),
            name: file.name.clone(),
            temp: file.temp.clone(),
            path: file.path.clone(),
            key: file.key,
            version: file.version,
            identity: file.identity,
            lacking,
            replacing: (file.before == Before::Replacing).then_some(file.meta.mode),
            content: Content::Open(Arc::clone(&file.file) as Arc<_>),
        }]);
    }

    /// Pieces that wait for the beginning of their file.
    pub(super) fn parked(&self) -> u64 {
        self.large().files.parked()
    }

    /// Large files that have ended and not begun.
    pub(super) fn early_ends(&self) -> usize {
        self.large().files.early_ends()
    }

    /// Large files that are not finished.
    pub(super) fn unfinished(&self) -> usize {
        self.large().files.unfinished()
    }
}

impl Receive for Files {
    fn piece(&self, header: &BlockHeader, stream: &TcpStream) -> io::Result<()> {
        let (offset, len) = (header.offset, header.len);
        if header.session != self.params.session || self.params.sealer.is_some() {
            self.violation(crate::wire::Malformed("block header: not of this session").into());
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Some(file) = self.await_beginning(header.file)? else {
            splice(stream, None, 0, len)?;
            if self.discard {
                self.counters.bytes.fetch_add(len.into(), Ordering::Relaxed);
            }
            self.dealt(header.file);
            return Ok(());
        };
        if offset + u64::from(len) > file.meta.size {
            self.violation(crate::wire::Malformed("offset: beyond its file").into());
            return Err(io::ErrorKind::InvalidData.into());
        }
        if let Err(e) = splice(stream, Some(&file.file), offset, len) {
            // Either the network failed, and the session with it, or the disk did.
            file.failure.set(e.to_string());
            if e.raw_os_error().is_some_and(|code| code != libc::ECONNRESET) {
                self.fail(&file.path, &e);
            }
            return Err(e);
        }
        // What is verified is what the file now holds.
        let verify = self.params.verify;
        let digest = crate::digest_file(&file.file, verify, offset, len)?;
        if verify != Algorithm::None && header.bind(verify, digest) != header.digest {
            // Sent from the file after it was digested there: whether it changed in between, the source will say.
            file.suspect.lock().expect("no panics under the lock").get_or_insert(header.sequence);
        } else {
            file.written.fetch_add(1, Ordering::SeqCst);
            self.record(&file, Range { offset, len, digest });
        }
        self.counters.bytes.fetch_add(len.into(), Ordering::Relaxed);
        self.dealt(header.file);
        Ok(())
    }
}

/// Which version of a source file attributes speak of.
fn version_of(meta: &Meta) -> Version {
    Version { size: meta.size, mtime: meta.mtime, ctime: meta.ctime }
}

/// Removes a temporary file of an earlier attempt, if there is one.
fn remove_leftover(dir: impl AsFd, temp: &CStr) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, temp, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR) => {
            let why = format!("a directory is in the way of the temporary file {}; remove it", temp.to_string_lossy());
            Err(io::Error::new(io::ErrorKind::IsADirectory, why))
        }
        Err(e) => Err(e.into()),
    }
}

/// File systems on disks of this host.
pub(super) const DISKS: [FsWord; 4] =
    [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC, libc::F2FS_SUPER_MAGIC];

/// Whether a file is on a file system on which direct writes pay.
fn is_disk(file: &File) -> bool {
    let kind = rustix::fs::fstatfs(file).map(|s| s.f_type);
    kind.is_ok_and(|kind| DISKS.contains(&kind))
}
