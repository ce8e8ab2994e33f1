//! What a sink does with the content of blocks: unpacks records, writes pieces of large files.
//!
//! Runs on workers and on the storage thread; the session's own thread only counts.

use super::commit::{Committer, Finished};
use super::journal::{Earlier, Identity, Journal, Judgement, Key, Present, Version, key_of};
use super::tree::{Place, Tree, temp_name};
use super::{Counters, Mail};
use crate::link::{Receive, splice};
use crate::protocol::Violation;
use crate::protocol::reassembly::{Ended, Known, Reassembly};
use crate::session::{Engine, FirstFailure, Mailer, Terms};
use crate::wire::{Answer, BlockHeader, Direct, FileStatus, Meta, OfferEntry, Record, Report, check_path};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use thruway_engine::integrity::Algorithm;
use thruway_engine::{Block, StorageOp};

/// Verified ranges told to the source for one file; the rest is sent again.
const RANGES_MAX: usize = 300;
/// Auto direct I/O begins here.
const DIRECT_FROM: u64 = 256 << 20;
const ALIGN: u64 = 4096;
/// Deferred records are kept in memory up to this many octets, then in a temporary file.
const DEFERRED_IN_MEMORY: usize = 1 << 20;

pub(super) struct Files {
    pub(super) tree: Tree,
    pub(super) job: [u8; 16],
    pub(super) terms: Terms,
    pub(super) engine: Arc<Engine>,
    pub(super) journal: Option<Arc<Journal>>,
    pub(super) earlier: Earlier,
    pub(super) committer: Arc<Committer>,
    pub(super) counters: Arc<Counters>,
    pub(super) mailer: Mailer<Mail>,
    /// Data goes nowhere.
    pub(super) discard: bool,
    large: Mutex<Large>,
    /// Rung when a large file has begun, or the session is over.
    begun: Condvar,
    deferred: Mutex<Deferred>,
}

/// The large files of a session.
#[derive(Default)]
struct Large {
    files: Reassembly<Arc<LargeFile>, (Block, BlockHeader)>,
    /// Nothing more will begin.
    over: bool,
}

struct LargeFile {
    file: Arc<File>,
    /// The same file for direct I/O.
    direct: Option<Arc<File>>,
    dir: Arc<std::os::fd::OwnedFd>,
    name: CString,
    temp: CString,
    path: Vec<u8>,
    meta: Meta,
    key: Key,
    version: Version,
    identity: Identity,
    failure: FirstFailure,
    written: AtomicU32,
}

/// Records whose turn comes when everything else is in place.
struct Deferred {
    spool: tempfile::SpooledTempFile,
    /// Where the directories are, in the order they came.
    directories: Vec<u64>,
    len: u64,
}

impl Files {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        tree: Tree,
        job: [u8; 16],
        terms: Terms,
        engine: Arc<Engine>,
        journal: Option<Arc<Journal>>,
        earlier: Earlier,
        committer: Arc<Committer>,
        counters: Arc<Counters>,
        mailer: Mailer<Mail>,
        discard: bool,
    ) -> Files {
        let deferred =
            Deferred { spool: tempfile::SpooledTempFile::new(DEFERRED_IN_MEMORY), directories: Vec::new(), len: 0 };
        let (large, begun, deferred) = (Mutex::default(), Condvar::new(), Mutex::new(deferred));
        Files {
            tree,
            job,
            terms,
            engine,
            journal,
            earlier,
            committer,
            counters,
            mailer,
            discard,
            large,
            begun,
            deferred,
        }
    }

    fn fail(&self, path: &[u8], error: &io::Error) {
        // What would fail every other file too ends the session.
        if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EROFS)) {
            let path = String::from_utf8_lossy(path);
            self.mailer.send(Mail::Fatal(format!("writing {path}: {error}")));
        }
        self.mailer.send(Mail::Report(Report { path: path.to_vec(), message: error.to_string() }));
    }

    /// Unpacks a pack's records. The block is free when this returns.
    pub(super) fn unpack(&self, block: &Block, len: u32) {
        let mut rest = &block.payload()[..len as usize];
        let mut finished = Vec::new();
        let mut last_dir: Option<(Vec<u8>, Arc<std::os::fd::OwnedFd>)> = None;
        while !rest.is_empty() {
            let (record, content, after) = match Record::split_first(rest) {
                Ok(split) => split,
                Err(malformed) => {
                    self.violation(malformed.into());
                    break;
                }
            };
            rest = after;
            if let Err(malformed) = self.check(&record) {
                self.violation(malformed.into());
                break;
            }
            if self.terms.options.dry_run || self.discard {
                self.count_only(&record, content);
                continue;
            }
            match record {
                Record::File { path, meta } => match self.small_file(&path, &meta, content, &mut last_dir) {
                    Ok(file) => finished.push(file),
                    Err(e) => self.fail(&path, &e),
                },
                Record::Begin { file, path, meta, resume } => {
                    let opened = self.open_large(&path, meta, resume);
                    self.opened(file, &path, opened);
                }
                Record::Dir { ref path, .. } => {
                    last_dir = None;
                    match self.tree.make_directory(path) {
                        Ok(()) => {
                            self.counters.others.fetch_add(1, Ordering::Relaxed);
                            self.defer(&record);
                        }
                        Err(e) => self.fail(path, &e),
                    }
                }
                Record::Symlink { path, target, meta } => self.other(&path, self.tree.symlink(&path, &target, &meta)),
                Record::Special { path, meta, rdev } => self.other(&path, self.tree.special(&path, &meta, rdev)),
                Record::Link { .. } | Record::Keep { .. } => self.defer(&record),
            }
        }
        self.committer.submit(finished);
    }

    fn check(&self, record: &Record) -> Result<(), crate::wire::Malformed> {
        let file_path = |path: &[u8]| {
            check_path(path)?;
            if path.is_empty() { Err(crate::wire::Malformed("empty path")) } else { Ok(()) }
        };
        match record {
            Record::Dir { path, .. } | Record::Keep { path, .. } => check_path(path),
            Record::Link { path, target } => file_path(path).and_then(|()| file_path(target)),
            Record::File { path, .. }
            | Record::Begin { path, .. }
            | Record::Symlink { path, .. }
            | Record::Special { path, .. } => file_path(path),
        }
    }

    fn count_only(&self, record: &Record, content: &[u8]) {
        match record {
            Record::File { meta, .. } => {
                self.counters.files.fetch_add(1, Ordering::Relaxed);
                let len = if self.discard { content.len() as u64 } else { meta.size };
                self.counters.bytes.fetch_add(len, Ordering::Relaxed);
            }
            Record::Begin { file, .. } => self.opened(*file, b"", Ok(None)),
            Record::Keep { .. } => self.defer(record),
            _ => drop(self.counters.others.fetch_add(1, Ordering::Relaxed)),
        }
    }

    fn other(&self, path: &[u8], result: io::Result<()>) {
        match result {
            Ok(()) => drop(self.counters.others.fetch_add(1, Ordering::Relaxed)),
            Err(e) => self.fail(path, &e),
        }
    }

    fn defer(&self, record: &Record) {
        let encoded = record.encode();
        let mut deferred = self.deferred.lock().expect("no panics under the lock");
        if matches!(record, Record::Dir { .. }) {
            let at = deferred.len;
            deferred.directories.push(at);
        }
        let prefix = Record::prefix(encoded.len(), 0);
        let written = deferred.spool.write_all(&prefix).and_then(|()| deferred.spool.write_all(&encoded));
        deferred.len += (prefix.len() + encoded.len()) as u64;
        if let Err(e) = written {
            self.mailer.send(Mail::Fatal(format!("keeping directory attributes in a temporary file: {e}")));
        }
    }

    fn small_file(
        &self,
        path: &[u8],
        meta: &Meta,
        content: &[u8],
        last_dir: &mut Option<(Vec<u8>, Arc<std::os::fd::OwnedFd>)>,
    ) -> io::Result<Finished> {
        let (parent, name) = super::tree::split(path);
        let dir = match last_dir {
            Some((path, dir)) if path == parent => Arc::clone(dir),
            _ => {
                let dir = self.tree.directory(parent)?;
                *last_dir = Some((parent.to_vec(), Arc::clone(&dir)));
                dir
            }
        };
        let place = Place { dir, name: CString::new(name)? };
        let key = key_of(path);
        let temp = temp_name(&place.name, &self.job, &key);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (mode, mode_is_right) = self.tree.mode_at_creation(meta);
        let opened = match rustix::fs::openat(&place.dir, &temp, flags, mode) {
            // Left by an attempt that was killed.
            Err(rustix::io::Errno::EXIST) => {
                rustix::fs::unlinkat(&place.dir, &temp, AtFlags::empty())?;
                rustix::fs::openat(&place.dir, &temp, flags, mode)
            }
            other => other,
        };
        let mut file = File::from(opened?);
        let written =
            file.write_all(content).and_then(|()| self.tree.apply_except_mode(file.as_fd(), meta, mode_is_right));
        if let Err(e) = written {
            let _ = rustix::fs::unlinkat(&place.dir, &temp, AtFlags::empty());
            return Err(e);
        }
        self.counters.bytes.fetch_add(content.len() as u64, Ordering::Relaxed);
        let version = Version { size: meta.size, mtime: meta.mtime };
        let (identity, _) = Identity::of(&file, c"")?;
        Ok(Finished { place, temp, path: path.to_vec(), key, version, identity, file: None })
    }

    fn open_large(&self, path: &[u8], meta: Meta, resume: bool) -> io::Result<Option<Arc<LargeFile>>> {
        let Place { dir, name } = self.tree.place(path)?;
        let key = key_of(path);
        let temp = temp_name(&name, &self.job, &key);
        let mut flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if !resume {
            // A new file, not the old one emptied: what is recorded of that one is not true of this.
            match rustix::fs::unlinkat(&dir, &temp, AtFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
            flags |= OFlags::EXCL;
        }
        let file = File::from(rustix::fs::openat(&dir, &temp, flags, Mode::from_raw_mode(0o600))?);
        let (identity, _) = Identity::of(&file, c"")?;
        file.set_len(meta.size)?;
        let wanted = match self.terms.options.direct {
            Direct::Off => false,
            Direct::On => true,
            Direct::Auto => meta.size >= DIRECT_FROM && is_disk(&file),
        };
        let direct = wanted
            .then(|| rustix::fs::openat(&dir, &temp, OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()))
            .and_then(Result::ok)
            .map(|fd| Arc::new(File::from(fd)));
        let version = Version { size: meta.size, mtime: meta.mtime };
        Ok(Some(Arc::new(LargeFile {
            file: Arc::new(file),
            direct,
            dir,
            name,
            temp,
            path: path.to_vec(),
            meta,
            key,
            version,
            identity,
            failure: FirstFailure::default(),
            written: AtomicU32::new(0),
        })))
    }

    fn large(&self) -> MutexGuard<'_, Large> {
        self.large.lock().expect("no panics under the lock")
    }

    fn violation(&self, violation: Violation) {
        self.mailer.send(Mail::Violation(violation));
    }

    /// A large file has been opened (`None`: there is nothing to write) or not.
    fn opened(&self, number: u64, path: &[u8], opened: io::Result<Option<Arc<LargeFile>>>) {
        let file = opened.unwrap_or_else(|e| {
            self.fail(path, &e);
            None
        });
        let early = match self.large().files.begin(number, file) {
            Ok(early) => early,
            Err(violation) => return self.violation(violation),
        };
        self.begun.notify_all();
        for (block, header) in early {
            self.piece(block, header);
        }
        self.check_end(number);
    }

    /// Nothing more will begin: who waits for that waits in vain.
    pub(super) fn close(&self) {
        self.large().over = true;
        self.begun.notify_all();
    }

    /// Writes a piece of a large file.
    pub(super) fn piece(self: &Files, block: Block, header: BlockHeader) {
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
                let parked = large.files.park(header.file, (block, header));
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
        let op = StorageOp::Write { skip: 0, len, direct: direct.is_some() };
        self.engine.storage.submit(Arc::clone(target), header.offset, op, block, move |done| {
            let Some(files) = files.upgrade() else { return };
            match done.result {
                Ok(_) => {
                    files.counters.bytes.fetch_add(len.into(), Ordering::Relaxed);
                    large.written.fetch_add(1, Ordering::SeqCst);
                    if let Some(journal) = &files.journal {
                        journal.range(&large.key, &large.version, large.identity, header.offset, len);
                    }
                }
                Err(e) => {
                    large.failure.set(e.to_string());
                    files.fail(&large.path, &e);
                }
            }
            drop(done.block);
            files.dealt(header.file);
        });
    }

    /// Waits until it is known where a piece of a large file goes; `None`: nowhere.
    fn await_beginning(&self, number: u64) -> io::Result<Option<Arc<LargeFile>>> {
        let mut large = self.large();
        loop {
            match large.files.lookup(number) {
                Ok(Known::Open(file)) => return Ok(Some(file)),
                Ok(Known::Nowhere) => return Ok(None),
                Ok(Known::NotYet) if large.over => return Err(io::Error::other("the session is over")),
                Ok(Known::NotYet) => large = self.begun.wait(large).expect("no panics under the lock"),
                Err(violation) => {
                    drop(large);
                    self.violation(violation.clone());
                    return Err(io::Error::new(io::ErrorKind::InvalidData, violation));
                }
            }
        }
    }

    fn mailer_handle(&self) -> std::sync::Weak<Files> {
        self.counters.files_handle.get().cloned().unwrap_or_default()
    }

    /// A void block of a large file, or one that could not be written, has been dealt with.
    pub(super) fn dealt(&self, number: u64) {
        if let Err(violation) = self.large().files.dealt(number) {
            return self.violation(violation);
        }
        self.check_end(number);
        self.block_done();
    }

    /// One block more has been dealt with.
    pub(super) fn block_done(&self) {
        let done = self.counters.blocks.fetch_add(1, Ordering::SeqCst) + 1;
        if done == self.counters.expected.load(Ordering::SeqCst) {
            self.mailer.send(Mail::Progressed);
        }
    }

    /// The source has read the file to its end.
    pub(super) fn file_end(&self, number: u64, blocks: u32, status: FileStatus) -> Result<(), Violation> {
        self.large().files.end(number, blocks, status)?;
        self.check_end(number);
        Ok(())
    }

    fn check_end(&self, number: u64) {
        let Some(Ended { file, whole }) = self.large().files.take_ended(number) else { return };
        let Some(file) = file else {
            if whole && (self.discard || self.terms.options.dry_run) {
                self.counters.files.fetch_add(1, Ordering::Relaxed);
            }
            return self.mailer.send(Mail::Progressed);
        };
        if !whole || file.failure.get().is_some() {
            if !whole {
                // It changed at the source: what is here is a mixture.
                let _ = rustix::fs::unlinkat(&file.dir, &file.temp, AtFlags::empty());
            }
            return self.mailer.send(Mail::Progressed);
        }
        match self.tree.apply(&*file.file, &file.meta) {
            Ok(()) => {
                let place = Place { dir: Arc::clone(&file.dir), name: file.name.clone() };
                self.committer.submit(vec![Finished {
                    place,
                    temp: file.temp.clone(),
                    path: file.path.clone(),
                    key: file.key,
                    version: file.version,
                    identity: file.identity,
                    file: Some(Arc::clone(&file.file)),
                }]);
            }
            Err(e) => {
                let _ = rustix::fs::unlinkat(&file.dir, &file.temp, AtFlags::empty());
                self.fail(&file.path, &e);
                self.mailer.send(Mail::Progressed);
            }
        }
    }

    /// Pieces that wait for the beginning of their file.
    pub(super) fn parked(&self) -> u64 {
        self.large().files.parked()
    }

    /// Large files that are not finished.
    pub(super) fn unfinished(&self) -> usize {
        self.large().files.unfinished()
    }

    /// What is wanted of offered files.
    pub(super) fn judge(&self, entries: &[OfferEntry]) -> Result<Vec<Answer>, crate::wire::Malformed> {
        // A verdict must fit a control message; each range takes up to 20 octets.
        let mut room = RANGES_MAX;
        entries
            .iter()
            .map(|entry| {
                check_path(&entry.path)?;
                Ok(self.judge_one(entry, &mut room))
            })
            .collect()
    }

    fn judge_one(&self, entry: &OfferEntry, room: &mut usize) -> Answer {
        let key = key_of(&entry.path);
        let version = Version { size: entry.size, mtime: entry.mtime };
        let Ok(place) = self.find(&entry.path) else { return Answer::Send };
        let find = |name: &CStr| {
            let (identity, s) = Identity::of(&place.dir, name).ok()?;
            let is_file = u32::from(s.stx_mode) & 0o170_000 == 0o100_000 && s.stx_size == entry.size;
            is_file.then_some((identity, (s.stx_mtime.tv_sec, s.stx_mtime.tv_nsec)))
        };
        let present = find(&place.name).map(|(identity, mtime)| Present { identity, as_new: mtime >= entry.mtime });
        let temp = || find(&temp_name(&place.name, &self.job, &key)).map(|(identity, _)| identity);
        match self.earlier.judge((&key, &version), present, self.terms.options.update, *room, temp) {
            Judgement::Done => {
                self.counters.resumed_bytes.fetch_add(entry.size, Ordering::Relaxed);
                self.counters.files.fetch_add(1, Ordering::Relaxed);
                Answer::Skip
            }
            Judgement::UpToDate => {
                self.counters.files.fetch_add(1, Ordering::Relaxed);
                Answer::Skip
            }
            Judgement::Partly(ranges) => {
                *room -= ranges.len();
                let have: u64 = ranges.iter().map(|r| r.1).sum();
                self.counters.resumed_bytes.fetch_add(have, Ordering::Relaxed);
                Answer::Except(ranges)
            }
            Judgement::Missing => Answer::Send,
        }
    }

    /// The place of an entry whose directory exists.
    fn find(&self, path: &[u8]) -> io::Result<Place> {
        let (parent, name) = super::tree::split(path);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = super::tree::openat_beneath(self.tree.root(), parent, flags)?;
        Ok(Place { dir: Arc::new(dir), name: CString::new(name)? })
    }

    /// Hard links, removals, and the attributes of directories, innermost first.
    pub(super) fn finalize(&self) {
        let mut deferred = self.deferred.lock().expect("no panics under the lock");
        let Deferred { spool, directories, len } = &mut *deferred;
        if let Err(e) = self.finalize_from(spool, directories, *len) {
            self.mailer.send(Mail::Fatal(format!("reading back directory attributes: {e}")));
        }
        drop(deferred);
        self.mailer.send(Mail::Finalized);
    }

    fn finalize_from(&self, spool: &mut (impl Read + Seek), directories: &[u64], len: u64) -> io::Result<()> {
        spool.seek(SeekFrom::Start(0))?;
        let mut at = 0;
        let mut keep: HashSet<Vec<u8>> = HashSet::new();
        while at < len {
            let (record, size) = read_record(spool)?;
            at += size;
            match record {
                Record::Link { path, target } => self.other(&path, self.tree.link(&path, &target)),
                Record::Keep { path, names, last } => {
                    keep.extend(names);
                    if last {
                        match self.tree.prune(&path, &keep, self.terms.options.dry_run) {
                            Ok(n) => drop(self.counters.deleted.fetch_add(n, Ordering::Relaxed)),
                            Err(e) => self.fail(&path, &e),
                        }
                        keep.clear();
                    }
                }
                _ => {}
            }
        }
        for &at in directories.iter().rev() {
            spool.seek(SeekFrom::Start(at))?;
            if let (Record::Dir { path, meta }, _) = read_record(spool)? {
                let applied = self.tree.directory(&path).and_then(|dir| self.tree.apply(&*dir, &meta));
                if let Err(e) = applied {
                    self.fail(&path, &e);
                }
            }
        }
        Ok(())
    }
}

impl Receive for Files {
    fn piece(&self, header: &BlockHeader, stream: &TcpStream) -> io::Result<()> {
        let (offset, len) = (header.offset, header.len);
        if header.session != self.terms.session || self.terms.sealer.is_some() {
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
        let verify = self.terms.verify;
        if verify != Algorithm::None {
            let found = crate::digest_file(&file.file, verify, offset, len)?;
            if header.bind(verify, found) != header.digest {
                self.mailer.send(Mail::Damaged { sequence: header.sequence, what: "its digest does not match" });
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        self.counters.bytes.fetch_add(len.into(), Ordering::Relaxed);
        file.written.fetch_add(1, Ordering::SeqCst);
        if let Some(journal) = &self.journal {
            journal.range(&file.key, &file.version, file.identity, offset, len);
        }
        self.dealt(header.file);
        Ok(())
    }
}

fn read_record(from: &mut impl Read) -> io::Result<(Record, u64)> {
    let mut prefix = [0; crate::wire::RECORD_PREFIX_LEN];
    from.read_exact(&mut prefix)?;
    let len = u32::from_be_bytes(prefix[..4].try_into().expect("4 octets")) as usize;
    let mut whole = prefix.to_vec();
    whole.resize(prefix.len() + len, 0);
    from.read_exact(&mut whole[prefix.len()..])?;
    let (record, _, _) = Record::split_first(&whole).map_err(io::Error::other)?;
    Ok((record, whole.len() as u64))
}

/// Whether a file is on a file system on which direct writes pay.
fn is_disk(file: &File) -> bool {
    const DISKS: [i64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010];
    let kind = rustix::fs::fstatfs(file).map(|s| s.f_type);
    kind.is_ok_and(|kind| DISKS.contains(&kind))
}
