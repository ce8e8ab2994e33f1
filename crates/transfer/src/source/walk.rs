//! Walks the source, packs small files, and sets large ones reading.
//!
//! One thread: directory by directory, never holding more of the tree than the names of the
//! subdirectories on the way down. Small files are read straight into the block they travel in;
//! large ones are read by the storage stage, holes left out.

use super::grain::Grain;
use super::large::{Finish, LargeFile, OpenFiles, missing_extents, same_version, set_direct};
use super::{Ahead, Mail};
use crate::filter::Filter;
use crate::protocol::offers::{self, Offers};
use crate::protocol::pieces::cut;
use crate::session::{Engine, FirstFailure, Mailer, Progress, Terms};
use crate::wire::{Answer, BlockHeader, BlockKind, Direct, Meta, OfferEntry, RECORD_PREFIX_LEN, Record, Report};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;
use thruway_engine::{Block, StorageOp, page_cache};

/// Files up to this size, or a quarter of a block, travel packed.
const PACK_MAX: u64 = 256 << 10;
/// Files with several names that are remembered; later ones travel as files of their own.
const LINKS_MAX: usize = 1 << 18;
/// Octets of names in one list of names to keep.
const KEEP_OCTETS: usize = 32 << 10;
/// Auto direct I/O begins here, for files of which less than half is cached.
const DIRECT_FROM: u64 = 64 << 20;
const ALIGN: u64 = 4096;

/// How often a waiting walker looks whether the session is over.
const GLANCE: Duration = Duration::from_secs(1);

/// A place to begin walking.
pub struct Root {
    /// The directory `path` is relative to; paths never lead out of it. `None`: the whole system.
    pub beneath: Option<Arc<OwnedFd>>,
    /// Path of the thing to copy.
    pub path: PathBuf,
    /// Its name at the sink; empty: its contents go into the sink's root.
    pub name: Vec<u8>,
}

pub(super) struct Walker {
    engine: Arc<Engine>,
    terms: Terms,
    mailer: Mailer<Mail>,
    verdicts: Option<Receiver<Vec<Answer>>>,
    cancel: Arc<AtomicBool>,
    progress: Arc<Progress>,
    filter: Filter,
    pack: Option<Pack>,
    pack_max: u64,
    next_sequence: u32,
    next_file: u64,
    open_files: Arc<OpenFiles>,
    links: HashMap<(u64, u64), Vec<u8>>,
    /// More would have to be remembered than can be.
    links_full: bool,
    offers: Offers<Candidate>,
    /// Pieces of files are sent from the files themselves.
    from_files: bool,
    ahead: Arc<Ahead>,
    grain: Arc<Grain>,
}

struct Pack {
    block: Block,
    used: usize,
}

/// A file that may have to be sent.
struct Candidate {
    dir: Arc<OwnedFd>,
    name: CString,
    path: Vec<u8>,
    stat: Stat,
}

/// The session is over; unwind.
struct Cancelled;
type Walk<T = ()> = Result<T, Cancelled>;

impl Walker {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        engine: Arc<Engine>,
        terms: Terms,
        mailer: Mailer<Mail>,
        verdicts: Option<Receiver<Vec<Answer>>>,
        cancel: Arc<AtomicBool>,
        progress: Arc<Progress>,
        from_files: bool,
        ahead: Arc<Ahead>,
        grain: Arc<Grain>,
    ) -> Result<Walker, String> {
        let filter = Filter::new(&terms.options)?;
        let pack_max = PACK_MAX.min(u64::from(terms.block_len) / 4);
        Ok(Walker {
            engine,
            terms,
            mailer,
            verdicts,
            cancel,
            progress,
            filter,
            pack: None,
            pack_max,
            next_sequence: 0,
            next_file: 1,
            open_files: Arc::default(),
            links: HashMap::new(),
            links_full: false,
            offers: Offers::default(),
            from_files,
            ahead,
            grain,
        })
    }

    pub(super) fn run(mut self, roots: Vec<Root>) {
        let done: Walk = (|| {
            for root in roots {
                self.root(root)?;
            }
            self.settle_offers(0)?;
            self.flush();
            // The end of every file must be told before the end of the set.
            while !self.open_files.all_closed(GLANCE) {
                self.check_cancel()?;
            }
            Ok(())
        })();
        if let Ok(()) = done {
            self.progress.total_known.store(true, Ordering::Relaxed);
            self.mailer.send(Mail::Walked { blocks: self.next_sequence });
        } else if !self.cancel.load(Ordering::SeqCst) {
            self.mailer.send(Mail::Fatal("more than 2^32 blocks in one session".into()));
        }
    }

    fn check_cancel(&self) -> Walk {
        if self.cancel.load(Ordering::SeqCst) { Err(Cancelled) } else { Ok(()) }
    }

    fn report(&self, path: &[u8], message: impl Into<String>) {
        self.mailer.send(Mail::Report(Report { path: path.to_vec(), message: message.into() }));
    }

    fn root(&mut self, root: Root) -> Walk {
        let shown = root.path.as_os_str().as_encoded_bytes().to_vec();
        let opened = match &root.beneath {
            Some(base) => {
                let path = if root.path.as_os_str().is_empty() { ".".into() } else { root.path.clone() };
                let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
                rustix::fs::openat2(base, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), how)
            }
            None => rustix::fs::open(&root.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()),
        };
        let (fd, stat) = match opened.and_then(|fd| rustix::fs::fstat(&fd).map(|stat| (fd, stat))) {
            Ok(found) => found,
            Err(e) => {
                self.report(&shown, io::Error::from(e).to_string());
                return Ok(());
            }
        };
        let fd = Arc::new(fd);
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            if !self.terms.options.recursive {
                self.report(&shown, "is a directory, and -r was not given");
                return Ok(());
            }
            return self.directory(fd, root.name, &stat, &mut Vec::new());
        }
        if root.name.is_empty() {
            self.report(&shown, "is not a directory, but its path ends in a slash");
            return Ok(());
        }
        // The descriptor itself is the file; an empty name reopens it.
        self.entry(&fd, c"", root.name, stat)
    }

    /// `path` is where the directory goes; `below` is where it is relative to the source.
    fn directory(&mut self, fd: Arc<OwnedFd>, path: Vec<u8>, stat: &Stat, below: &mut Vec<u8>) -> Walk {
        self.check_cancel()?;
        let dir =
            match rustix::fs::openat(&fd, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
                Ok(dir) => Arc::new(dir),
                Err(e) => {
                    self.report(&path, io::Error::from(e).to_string());
                    return Ok(());
                }
            };
        drop(fd);
        if !path.is_empty() {
            let meta = self.meta(&dir, c"", &path, stat);
            self.append(&Record::Dir { path: path.clone(), meta })?;
        }
        let entries = match rustix::fs::Dir::read_from(&dir) {
            Ok(entries) => entries,
            Err(e) => {
                self.report(&path, io::Error::from(e).to_string());
                return Ok(());
            }
        };
        let mut subdirectories = Vec::new();
        let mut keep = Vec::new();
        let mut keep_octets = 0;
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(e) => {
                    self.report(&path, io::Error::from(e).to_string());
                    break;
                }
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") || crate::sink::is_own_name(name.to_bytes()) {
                continue;
            }
            let before = below.len();
            push_component(below, name.to_bytes());
            let taken = self.filter.takes(below);
            if taken {
                if self.terms.options.delete {
                    keep_octets += name.to_bytes().len();
                    keep.push(name.to_bytes().to_vec());
                    if keep_octets > KEEP_OCTETS {
                        let names = std::mem::take(&mut keep);
                        keep_octets = 0;
                        self.append(&Record::Keep { path: path.clone(), names, last: false })?;
                    }
                }
                match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                        subdirectories.push((name.to_owned(), stat));
                    }
                    Ok(stat) => {
                        let mut to = path.clone();
                        push_component(&mut to, name.to_bytes());
                        self.entry(&dir, name, to, stat)?;
                    }
                    Err(e) => {
                        let mut to = path.clone();
                        push_component(&mut to, name.to_bytes());
                        self.report(&to, io::Error::from(e).to_string());
                    }
                }
            } else if self.terms.options.delete {
                // What is excluded here is not touched there.
                keep.push(name.to_bytes().to_vec());
            }
            below.truncate(before);
        }
        if self.terms.options.delete {
            self.append(&Record::Keep { path: path.clone(), names: keep, last: true })?;
        }
        for (name, stat) in subdirectories {
            let mut to = path.clone();
            push_component(&mut to, name.to_bytes());
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match rustix::fs::openat(&dir, &name, flags, Mode::empty()) {
                Ok(fd) => {
                    let before = below.len();
                    push_component(below, name.to_bytes());
                    self.directory(Arc::new(fd), to, &stat, below)?;
                    below.truncate(before);
                }
                Err(e) => self.report(&to, io::Error::from(e).to_string()),
            }
        }
        Ok(())
    }

    fn entry(&mut self, dir: &Arc<OwnedFd>, name: &CStr, path: Vec<u8>, stat: Stat) -> Walk {
        self.check_cancel()?;
        if path.len() > crate::wire::PATH_MAX {
            self.report(&path, "the path is longer than 4096 octets");
            return Ok(());
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                if self.terms.options.preserve && stat.st_nlink > 1 {
                    let key = (stat.st_dev, stat.st_ino);
                    if let Some(first) = self.links.get(&key) {
                        let target = first.clone();
                        return self.append(&Record::Link { path, target });
                    }
                    if self.links.len() < LINKS_MAX {
                        self.links.insert(key, path.clone());
                    } else if !std::mem::replace(&mut self.links_full, true) {
                        tracing::warn!(
                            path = %String::from_utf8_lossy(&path),
                            "more than {LINKS_MAX} files have several names: from here on each name becomes a file"
                        );
                    }
                }
                let candidate = Candidate { dir: Arc::clone(dir), name: name.into(), path, stat };
                if self.verdicts.is_none() {
                    return self.send_file(candidate, &[]);
                }
                self.offer(candidate)
            }
            FileType::Symlink => match rustix::fs::readlinkat(dir, name, Vec::new()) {
                Ok(target) => {
                    let meta = self.meta(dir, name, &path, &stat);
                    self.append(&Record::Symlink { path, target: target.into_bytes(), meta })
                }
                Err(e) => {
                    self.report(&path, io::Error::from(e).to_string());
                    Ok(())
                }
            },
            FileType::CharacterDevice if self.terms.options.length.is_some() => {
                self.send_large(Candidate { dir: Arc::clone(dir), name: name.into(), path, stat }, &[])
            }
            FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice
                if self.terms.options.preserve =>
            {
                let meta = self.meta(dir, name, &path, &stat);
                self.append(&Record::Special { path, meta, rdev: stat.st_rdev })
            }
            _ => {
                self.report(&path, "not a file, directory or link; -p copies special files");
                Ok(())
            }
        }
    }

    fn meta(&self, dir: &Arc<OwnedFd>, name: &CStr, path: &[u8], stat: &Stat) -> Meta {
        let mut meta = meta_of(stat);
        if self.terms.options.preserve {
            match crate::xattr::read(dir.as_fd(), name) {
                Ok(xattrs) => meta.xattrs = xattrs,
                Err(e) => self.report(path, format!("extended attributes: {e}")),
            }
        }
        meta
    }

    fn offer(&mut self, candidate: Candidate) -> Walk {
        let entry = OfferEntry {
            path: candidate.path.clone(),
            size: candidate.stat.st_size as u64,
            mtime: (candidate.stat.st_mtime, candidate.stat.st_mtime_nsec as u32),
        };
        if !self.offers.has_room(&entry) {
            self.send_offer();
            self.settle_offers(offers::AHEAD)?;
        }
        self.offers.push(entry, candidate);
        Ok(())
    }

    fn send_offer(&mut self) {
        if let Some((batch, entries)) = self.offers.send() {
            self.mailer.send(Mail::Offer { batch, entries });
        }
    }

    /// Waits until at most `ahead` offers are without an answer, sending what is wanted.
    fn settle_offers(&mut self, ahead: usize) -> Walk {
        if ahead == 0 {
            self.send_offer();
        }
        while self.offers.open() > ahead {
            // Files already read must not sit in a half-full pack while we wait.
            let answers = loop {
                self.check_cancel()?;
                let verdicts = self.verdicts.as_ref().expect("offers are made only with a way to answer");
                match verdicts.recv_timeout(Duration::from_millis(50)) {
                    Ok(answers) => break answers,
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => self.flush(),
                    Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return Err(Cancelled),
                }
            };
            for (candidate, answer) in self.offers.answered(answers) {
                match answer {
                    Answer::Skip => {}
                    Answer::Send => self.send_file(candidate, &[])?,
                    Answer::Except(ranges) => self.send_file(candidate, &ranges)?,
                }
            }
        }
        Ok(())
    }

    fn send_file(&mut self, candidate: Candidate, have: &[(u64, u64)]) -> Walk {
        let size = candidate.stat.st_size as u64;
        Progress::add(&self.progress.files, 1);
        if self.terms.options.dry_run {
            let meta = meta_of(&candidate.stat);
            return self.append(&Record::File { path: candidate.path, meta });
        }
        if size > self.pack_max || !have.is_empty() {
            self.send_large(candidate, have)
        } else {
            self.send_small(&candidate)
        }
    }

    /// Opens a candidate; `name` is empty for a root, whose descriptor is reopened.
    fn open(&self, c: &Candidate) -> rustix::io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let fd = if c.name.is_empty() {
            use std::os::fd::AsRawFd;
            rustix::fs::open(format!("/proc/self/fd/{}", c.dir.as_raw_fd()), flags, Mode::empty())?
        } else {
            rustix::fs::openat(&c.dir, &c.name, flags | OFlags::NOFOLLOW, Mode::empty())?
        };
        Ok(File::from(fd))
    }

    fn send_small(&mut self, c: &Candidate) -> Walk {
        let opened = self.open(c).and_then(|file| rustix::fs::fstat(&file).map(|stat| (file, stat)));
        let (file, stat) = match opened {
            Ok(opened) => opened,
            Err(e) => {
                self.report(&c.path, io::Error::from(e).to_string());
                return Ok(());
            }
        };
        let size = stat.st_size as u64;
        if size > self.pack_max {
            // It grew since it was listed.
            let grown = Candidate { dir: Arc::clone(&c.dir), name: c.name.clone(), path: c.path.clone(), stat };
            return self.send_large(grown, &[]);
        }
        let mut meta = meta_of(&stat);
        if self.terms.options.preserve {
            match crate::xattr::read_open(file.as_fd()) {
                Ok(xattrs) => meta.xattrs = xattrs,
                Err(e) => self.report(&c.path, format!("extended attributes: {e}")),
            }
        }
        let record = Record::File { path: c.path.clone(), meta }.encode();
        let size = size as usize;
        let room = self.room(RECORD_PREFIX_LEN + record.len() + size)?;
        let content = RECORD_PREFIX_LEN + record.len();
        room[..RECORD_PREFIX_LEN].copy_from_slice(&Record::prefix(record.len(), size));
        room[RECORD_PREFIX_LEN..content].copy_from_slice(&record);
        let read = read_full(&file, &mut room[content..content + size]);
        let after = rustix::fs::fstat(&file);
        match (read, after) {
            (Ok(n), Ok(after)) if n == size && same_version(&stat, &after) => {
                self.pack.as_mut().expect("room made it").used += content + size;
                Progress::add(&self.progress.total_bytes, size as u64);
            }
            (Err(e), _) => self.report(&c.path, e.to_string()),
            (_, Err(e)) => self.report(&c.path, io::Error::from(e).to_string()),
            _ => self.report(&c.path, "changed while it was read"),
        }
        Ok(())
    }

    fn send_large(&mut self, c: Candidate, have: &[(u64, u64)]) -> Walk {
        let opened = self.open(&c).and_then(|file| rustix::fs::fstat(&file).map(|stat| (file, stat)));
        let (file, mut stat) = match opened {
            Ok(opened) => opened,
            Err(e) => {
                self.report(&c.path, io::Error::from(e).to_string());
                return Ok(());
            }
        };
        let endless = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        if endless {
            stat.st_size = self.terms.options.length.unwrap_or(0) as i64;
            stat.st_mode = 0o100_644;
        } else if !same_version(&c.stat, &stat) && !have.is_empty() {
            // What the sink has is of another version.
            return self.send_large(Candidate { stat, ..c }, &[]);
        }
        let size = stat.st_size as u64;
        let direct = !endless && !self.from_files && self.wants_direct(&file, size) && set_direct(&file);
        let mut meta = meta_of(&stat);
        if self.terms.options.preserve && !endless {
            meta.xattrs = self.meta(&c.dir, &c.name, &c.path, &stat).xattrs;
        }
        let number = self.next_file;
        self.next_file += 1;
        self.append(&Record::Begin { file: number, path: c.path.clone(), meta, resume: !have.is_empty() })?;
        self.flush();
        let begun_in = self.next_sequence - 1;
        self.open_files.opened();
        let large = Arc::new(LargeFile {
            file: Arc::new(file),
            number,
            begun_in,
            stat,
            path: c.path,
            endless,
            failure: FirstFailure::default(),
            open: AtomicU32::new(1),
            blocks: AtomicU32::new(0),
            mailer: self.mailer.clone(),
            open_files: Arc::clone(&self.open_files),
        });
        let missing = missing_extents(&large.file, size, endless || stat.st_blocks as u64 * 512 >= size, have);
        let result = missing.into_iter().try_for_each(|(from, to)| self.read_extent(&large, from, to, direct));
        large.close();
        result
    }

    fn wants_direct(&self, file: &File, size: u64) -> bool {
        match self.terms.options.direct {
            Direct::Off => false,
            Direct::On => true,
            // Where the kernel cannot say how much is cached, the page cache is the safe choice.
            Direct::Auto => {
                size >= DIRECT_FROM && page_cache::cached(file, 0, size).is_some_and(|cached| cached * 2 < size)
            }
        }
    }

    fn read_extent(&mut self, large: &Arc<LargeFile>, from: u64, to: u64, direct: bool) -> Walk {
        Progress::add(&self.progress.total_bytes, to - from);
        let grain = Arc::clone(&self.grain);
        for (at, len) in cut((from, to), self.terms.block_len, || grain.get(), self.terms.long_path) {
            let aligned = if direct && at.is_multiple_of(ALIGN) { len.next_multiple_of(ALIGN as u32) } else { len };
            let block = self.take_block()?;
            let sequence = self.sequence()?;
            large.open.fetch_add(1, Ordering::SeqCst);
            large.blocks.fetch_add(1, Ordering::SeqCst);
            let header = self.header(sequence, BlockKind::Data, large.number, at, len);
            let finish = Finish::new(&self.engine, &self.terms, &self.mailer, Some(large.begun_in));
            let large = Arc::clone(large);
            let file = Arc::clone(&large.file);
            if self.from_files && !large.endless {
                finish.load_from_file(block, header, large);
                continue;
            }
            self.engine.storage.submit(file, at, StorageOp::Read { len: aligned, direct }, block, move |done| {
                let mut header = header;
                match done.result {
                    Ok(n) if n >= len => {}
                    Ok(n) => {
                        large.failure.set("shrank while it was read");
                        header.len = n;
                    }
                    Err(e) => {
                        large.failure.set(e.to_string());
                        header.len = 0;
                    }
                }
                if header.len == 0 {
                    header.kind = BlockKind::Void;
                }
                finish.load(done.block, header);
                large.close();
            });
        }
        Ok(())
    }

    fn header(&self, sequence: u32, kind: BlockKind, file: u64, offset: u64, len: u32) -> BlockHeader {
        BlockHeader {
            session: self.terms.session,
            sequence,
            offset,
            len,
            kind,
            sealed: self.terms.sealer.is_some(),
            file,
            tag: [0; 16],
            digest: [0; 16],
        }
    }

    fn sequence(&mut self) -> Walk<u32> {
        let sequence = self.next_sequence;
        self.next_sequence = sequence.checked_add(1).ok_or(Cancelled)?;
        Ok(sequence)
    }

    /// A free block; while there is none, the sink's pace is ours.
    fn take_block(&self) -> Walk<Block> {
        while !self.ahead.enter(GLANCE) {
            self.check_cancel()?;
        }
        loop {
            self.check_cancel()?;
            if let Some(block) = self.engine.pool.take(GLANCE) {
                return Ok(block);
            }
        }
    }

    /// At least `len` octets of the current pack, or of a new one.
    fn room(&mut self, len: usize) -> Walk<&mut [u8]> {
        let capacity = self.terms.block_len as usize;
        debug_assert!(len <= capacity);
        let most = self.grain.get() as usize;
        if self.pack.as_ref().is_some_and(|p| p.used > 0 && p.used + len > most) {
            self.flush();
        }
        if self.pack.is_none() {
            self.pack = Some(Pack { block: self.take_block()?, used: 0 });
        }
        let pack = self.pack.as_mut().expect("just made");
        Ok(&mut pack.block.payload_mut()[pack.used..capacity])
    }

    fn append(&mut self, record: &Record) -> Walk {
        let encoded = record.encode();
        let len = RECORD_PREFIX_LEN + encoded.len();
        let room = self.room(len)?;
        room[..RECORD_PREFIX_LEN].copy_from_slice(&Record::prefix(encoded.len(), 0));
        room[RECORD_PREFIX_LEN..len].copy_from_slice(&encoded);
        self.pack.as_mut().expect("room made it").used += len;
        Ok(())
    }

    /// Sends the current pack on its way.
    fn flush(&mut self) {
        let Some(Pack { block, used }) = self.pack.take() else { return };
        if used == 0 {
            return;
        }
        let Ok(sequence) = self.sequence() else { return };
        let header = self.header(sequence, BlockKind::Pack, 0, 0, used as u32);
        Finish::new(&self.engine, &self.terms, &self.mailer, None).load(block, header);
    }
}

fn push_component(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

fn meta_of(stat: &Stat) -> Meta {
    Meta {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        size: stat.st_size as u64,
        xattrs: Vec::new(),
    }
}

fn read_full(file: &File, mut buffer: &mut [u8]) -> io::Result<usize> {
    use std::io::Read;
    let mut file = file;
    let mut total = 0;
    while !buffer.is_empty() {
        match file.read(buffer) {
            Ok(0) => break,
            Ok(n) => {
                total += n;
                buffer = &mut buffer[n..];
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(total)
}
