//! Walks the source, packs small files, and sets large ones reading.
//!
//! One thread: directory by directory, never holding more of the tree than one open directory and the paths of
//! those still to come. Nothing below a root is reached through a symbolic link. What an
//! entry is sent as is decided here; `send.rs` sends it.

use super::large::OpenFiles;
use super::payload_size::PayloadSize;
use super::send::{Pack, PackContents};
use super::{Ahead, ReportsAhead, SessionEvent};
use crate::filter::{Filter, FilterError};
use crate::protocol::offers::{self, Offers};
use crate::session::{EventSender, LocalError, Pipeline, Progress, SessionParams};
use crate::wire::{
    Answer, Destination, KeepEnd, Meta, OfferEntry, Record, Report, ReportKind, XATTRS_MAX, capabilities_hash,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;
use thruway_fs::beneath::{self, Links, join};
use thruway_fs::identity::Directory;
use thruway_fs::listing;
use thruway_fs::walk::{self, Visit};
use thruway_fs::xattr;

/// Files up to this size, or a quarter of a block, travel packed.
const PACK_MAX: u64 = 256 << 10;
/// Largest number of remembered hard-linked entries, and of bytes of their paths. Further ones are sent as separate entries.
const LINKS_MAX: usize = 1 << 18;
const LINKS_BYTES_MAX: usize = 64 << 20;
/// Largest number of remembered paths of several sources. For further paths, the sink detects duplicates, and a directory gets the
/// attributes of each source in turn, finally those of the first.
const NAMES_MAX: usize = 1 << 21;
/// Bytes of names in one part of a list of names to keep, at most.
const KEEP_BYTES: usize = 32 << 10;

/// Reason for entries that no receiver takes: under such a name, an entry could block a journal or temporary file of another job.
const UNFINISHED: &str =
    "not copied: reserved file name (journal or temporary file of an unfinished copy); rename or --exclude it";

/// How often a waiting walker looks whether the session is over.
pub(super) const CANCEL_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A place to begin walking.
pub struct Root {
    /// The directory `path` is relative to. `None`: the working directory.
    pub beneath: Option<Arc<OwnedFd>>,
    /// `path` must not lead out of that directory.
    pub confined: bool,
    /// The directory `beneath` is the root directory of this machine.
    pub is_top: bool,
    /// Path of the thing to copy.
    pub path: PathBuf,
    /// Its name at the sink; empty: its contents go into the sink's root.
    pub name: Vec<u8>,
}

pub(super) struct Walker {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) params: SessionParams,
    pub(super) events: EventSender<SessionEvent>,
    verdicts: Option<Receiver<Vec<Answer>>>,
    pub(super) cancel: Arc<AtomicBool>,
    pub(super) progress: Arc<Progress>,
    filter: Filter,
    /// Character devices are read, not only copied.
    reads_devices: bool,
    pub(super) pack: Option<Pack>,
    pub(super) pack_max: u64,
    pub(super) next_sequence: u32,
    pub(super) next_file: u64,
    pub(super) open_files: Arc<OpenFiles>,
    links: HashMap<(u64, u64), Option<Vec<u8>>>,
    /// Of the paths in `links`.
    links_bytes: usize,
    /// More would have to be remembered than can be.
    links_full: bool,
    /// With several sources: what has been sent, by hash of its path. No source overwrites what another has just made.
    names: Option<HashMap<u64, Named>>,
    /// Where the copy goes, if that is on this machine.
    destination: Option<Destination>,
    offers: Offers<Candidate>,
    /// Files to be offered again, as the first name of theirs.
    again: Vec<Candidate>,
    /// Pieces of files are sent from the files themselves.
    pub(super) from_files: bool,
    pub(super) ahead: Arc<Ahead>,
    pub(super) reports: Arc<ReportsAhead>,
    pub(super) payload_size: Arc<PayloadSize>,
    pub(super) pack_contents: Arc<PackContents>,
}

/// What a walker works with.
pub(super) struct Setting {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) params: SessionParams,
    pub(super) events: EventSender<SessionEvent>,
    /// Answers to offers; without, everything is sent.
    pub(super) verdicts: Option<Receiver<Vec<Answer>>>,
    pub(super) cancel: Arc<AtomicBool>,
    pub(super) progress: Arc<Progress>,
    pub(super) from_files: bool,
    pub(super) ahead: Arc<Ahead>,
    pub(super) reports: Arc<ReportsAhead>,
    pub(super) payload_size: Arc<PayloadSize>,
    pub(super) pack_contents: Arc<PackContents>,
    pub(super) destination: Option<Destination>,
}

/// Where an entry is.
#[derive(Clone)]
pub(super) struct From {
    /// The root that it is below, or that it is.
    root: Arc<OwnedFd>,
    /// Its directory, while that is open; opened again by `below` if not.
    dir: Option<Arc<OwnedFd>>,
    /// Path of its directory below the root.
    below: Vec<u8>,
    directory: Directory,
    /// Its name there; empty for the directory itself, or the root.
    name: CString,
}

impl From {
    /// The directory that the name is relative to.
    ///
    /// # Errors
    /// Also if the path belongs to another directory now, which may be private.
    pub(super) fn dir(&self) -> io::Result<Arc<OwnedFd>> {
        match &self.dir {
            Some(dir) => Ok(Arc::clone(dir)),
            None if self.name.is_empty() => Ok(Arc::clone(&self.root)),
            None => {
                let dir = beneath::open(&self.root, &self.below, OFlags::PATH | OFlags::DIRECTORY, Links::Never)?;
                let stat = rustix::fs::fstat(&dir)?;
                if !self.directory.is(&stat, || rustix::fs::fstatfs(&dir)) {
                    return Err(io::Error::other("another directory has its path now"));
                }
                Ok(Arc::new(dir))
            }
        }
    }

    /// The entry without being opened for reading, and its attributes. The name can belong to another entry a moment later.
    fn look(&self) -> io::Result<(Arc<OwnedFd>, Stat)> {
        let mut entry = self.dir()?;
        if !self.name.is_empty() {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            entry = Arc::new(rustix::fs::openat(&entry, &self.name, flags, Mode::empty())?);
        }
        let stat = rustix::fs::fstat(&entry)?;
        Ok((entry, stat))
    }

    /// Opens the entry, which must be a file: an open would wait for the other end of a FIFO, and change the state of
    /// some devices.
    pub(super) fn open(&self) -> io::Result<(File, Stat)> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let fd = if self.name.is_empty() {
            rustix::fs::open(format!("/proc/self/fd/{}", self.root.as_raw_fd()), flags, Mode::empty())?
        } else {
            rustix::fs::openat(self.dir()?, &self.name, flags | OFlags::NOFOLLOW, Mode::empty())?
        };
        let stat = rustix::fs::fstat(&fd)?;
        Ok((File::from(fd), stat))
    }
}

/// A file that may have to be sent.
pub(super) struct Candidate {
    pub(super) from: From,
    pub(super) path: Vec<u8>,
    pub(super) stat: Stat,
    /// It is another name of a file that was offered before.
    pub(super) linked: bool,
    /// [`capabilities_hash`] in the offer; 0 before.
    pub(super) capabilities: u64,
}

impl Candidate {
    pub(super) fn new(from: From, path: Vec<u8>, stat: Stat) -> Candidate {
        Candidate { from, path, stat, linked: false, capabilities: 0 }
    }
}

/// Names that stay in a directory, on their way to the sink.
struct KeepList {
    path: Vec<u8>,
    below: u32,
    names: Vec<Vec<u8>>,
    bytes: usize,
}

impl KeepList {
    fn take(&mut self, end: KeepEnd) -> Record {
        self.bytes = 0;
        Record::Keep { path: self.path.clone(), below: self.below, names: std::mem::take(&mut self.names), end }
    }
}

/// What a name has been used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    /// Several sources may meet in it.
    Directory,
    Entry,
}

/// The session is over; unwind.
pub(super) struct Cancelled;
pub(super) type Walk<T = ()> = Result<T, Cancelled>;

impl Walker {
    pub(super) fn new(setting: Setting) -> Result<Walker, FilterError> {
        let Setting {
            pipeline,
            params,
            events,
            verdicts,
            cancel,
            progress,
            from_files,
            ahead,
            reports,
            payload_size,
            pack_contents,
            destination,
        } = setting;
        let filter = Filter::new(&params.options)?;
        let pack_max = PACK_MAX.min(u64::from(params.block_len) / 4);
        Ok(Walker {
            pipeline,
            params,
            events,
            verdicts,
            cancel,
            progress,
            filter,
            reads_devices: false,
            pack: None,
            pack_max,
            next_sequence: 0,
            next_file: 1,
            open_files: Arc::default(),
            links: HashMap::new(),
            links_bytes: 0,
            links_full: false,
            names: None,
            destination,
            offers: Offers::default(),
            again: Vec::new(),
            from_files,
            ahead,
            reports,
            payload_size,
            pack_contents,
        })
    }

    pub(super) fn run(mut self, roots: Vec<Root>) {
        if roots.len() > 1 {
            self.names = Some(HashMap::new());
        }
        let done: Walk = (|| {
            for root in roots {
                self.check_cancel()?;
                self.root(root)?;
            }
            self.settle_offers(0)?;
            self.flush();
            // The end of every file must be told before the end of the set.
            while !self.open_files.all_closed(CANCEL_POLL_INTERVAL) {
                self.check_cancel()?;
            }
            Ok(())
        })();
        if let Ok(()) = done {
            self.progress.total_known.store(true, Ordering::Relaxed);
            self.events.send(SessionEvent::Walked { blocks: self.next_sequence });
        } else if !self.cancel.load(Ordering::SeqCst) {
            self.events.send(SessionEvent::Fatal(LocalError::TooManyBlocks));
        }
    }

    pub(super) fn check_cancel(&self) -> Walk {
        if self.cancel.load(Ordering::SeqCst) { Err(Cancelled) } else { Ok(()) }
    }

    /// An entry is not copied.
    pub(super) fn report(&self, path: &[u8], message: impl Into<String>) {
        self.tell(path, ReportKind::NotCopied, message);
    }

    /// An entry is not copied, and never will be by such a copy.
    fn refuse(&self, path: &[u8], message: impl Into<String>) {
        self.tell(path, ReportKind::Unsupported, message);
    }

    /// A source of the command is not copied, and never will be by such a copy.
    fn refuse_source(&self, path: &[u8], message: impl Into<String>) -> Walk {
        self.tell(path, ReportKind::Refused, message);
        Ok(())
    }

    pub(super) fn tell(&self, path: &[u8], kind: ReportKind, message: impl Into<String>) {
        self.reports.enter(path.len());
        self.events.send(SessionEvent::Report(Report { path: path.to_vec(), kind, message: message.into() }));
    }

    fn root(&mut self, root: Root) -> Walk {
        // What is in an export may have been made by its number by somebody else.
        self.reads_devices = !root.confined;
        let above = if root.is_top { &b"/"[..] } else { b"" };
        let shown = [above, root.path.as_os_str().as_encoded_bytes()].concat();
        let opened = match &root.beneath {
            Some(base) if !root.confined => {
                let path = if root.path.as_os_str().is_empty() { ".".into() } else { root.path.clone() };
                rustix::fs::openat(base, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            }
            Some(base) => beneath::open(base, root.path.as_os_str().as_encoded_bytes(), OFlags::PATH, Links::Inside),
            None => rustix::fs::open(&root.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()),
        };
        let (fd, stat) = match opened.and_then(|fd| rustix::fs::fstat(&fd).map(|stat| (fd, stat))) {
            Ok(found) => found,
            Err(Errno::XDEV) => return self.refuse_source(&shown, "leads out of the export"),
            Err(e @ (Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => {
                return self.refuse_source(&shown, unreadable(e));
            }
            Err(e) => {
                self.tell(&shown, ReportKind::NotListed, unreadable(e));
                return Ok(());
            }
        };
        // By its path, or by the name that the peer gives it.
        let last = root.path.file_name().unwrap_or_default().as_encoded_bytes();
        if crate::sink::is_own_name(&root.name) || crate::sink::is_own_name(last) {
            return self.refuse_source(&shown, UNFINISHED);
        }
        let fd = Arc::new(fd);
        if let Some(why) = self.overlap(&fd, &stat, &root.name) {
            return self.refuse_source(&shown, why);
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            if !self.params.options.recursive {
                return self.refuse_source(&shown, "is a directory (use -r to copy it)");
            }
            return self.tree(&fd, root.name);
        }
        if root.name.is_empty() {
            return self.refuse_source(&shown, "is not a directory, but its path ends in a slash");
        }
        // The descriptor itself is the file; an empty name reopens it.
        let directory = Directory::new(&stat);
        let from = From { root: fd, dir: None, below: Vec::new(), directory, name: c"".into() };
        self.entry(&from, root.name, stat)
    }

    /// Sends a directory with all beneath it, which goes where `to` says.
    fn tree(&mut self, root: &Arc<OwnedFd>, to: Vec<u8>) -> Walk {
        let mut tree = walk::Walk::new(Arc::clone(root), self.pipeline.owner());
        while let Some(Visit { below, dir }) = tree.visit() {
            self.check_cancel()?;
            match dir {
                Ok((dir, stat)) => self.directory(&mut tree, &dir, (&to, &below), &stat)?,
                Err(e) => self.tell(&join(&to, &below), ReportKind::NotListed, unreadable(e)),
            }
        }
        Ok(())
    }

    /// Sends what a directory holds, but for its subdirectories, which the walk comes to later.
    fn directory(
        &mut self,
        tree: &mut walk::Walk,
        dir: &Arc<OwnedFd>,
        (to, below): (&[u8], &[u8]),
        stat: &Stat,
    ) -> Walk {
        let path = join(to, below);
        let is_first = match self.name(&path, Named::Directory) {
            None => return Ok(()),
            Some(is_first) => is_first,
        };
        // The attributes are those of the first source that has the directory.
        if is_first {
            let meta = self.meta_of_entry(dir, &path, stat);
            self.append(&Record::Dir { path: path.clone(), meta })?;
        }
        let mut keep = KeepList { path: path.clone(), below: to.len() as u32, names: Vec::new(), bytes: 0 };
        let listed = self.list(tree, (dir, Directory::new(stat)), (to, below), &mut keep)?;
        if self.params.options.delete {
            let end = if listed { KeepEnd::Complete } else { KeepEnd::Incomplete };
            self.append(&keep.take(end))?;
        }
        Ok(())
    }

    /// False if the listing was not complete, which has been told.
    fn list(
        &mut self,
        tree: &mut walk::Walk,
        (dir, directory): (&Arc<OwnedFd>, Directory),
        (to, below): (&[u8], &[u8]),
        keep: &mut KeepList,
    ) -> Walk<bool> {
        let path = join(to, below);
        let failed = |walker: &Walker, e: Errno| {
            let shown = if path.is_empty() { b"." } else { &path[..] };
            walker.tell(shown, ReportKind::NotListed, format!("listing the directory: {}", io::Error::from(e)));
            Ok(false)
        };
        let names = match listing::names(&**dir) {
            Ok(names) => names,
            Err(e) => return failed(self, e),
        };
        let mut complete = true;
        for name in names {
            let name = match name {
                Ok(name) => name,
                Err(e) => return failed(self, e),
            };
            if self.params.options.delete {
                // What is excluded here is not touched there.
                keep.names.push(name.to_bytes().to_vec());
                keep.bytes += name.to_bytes().len() + 4;
                if keep.bytes > KEEP_BYTES.min(self.params.block_len as usize / 4) {
                    self.append(&keep.take(KeepEnd::More))?;
                }
            }
            let inner = join(below, name.to_bytes());
            let stat = || rustix::fs::statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW);
            let is_dir = || stat().is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir());
            if !self.filter.takes(&inner, &is_dir) {
                continue;
            }
            let target = join(to, &inner);
            if crate::sink::is_own_name(name.to_bytes()) {
                self.refuse(&target, UNFINISHED);
                continue;
            }
            match stat() {
                Ok(_) if target.len() > crate::wire::PATH_MAX => {
                    let most = crate::wire::PATH_MAX;
                    self.tell(&target, ReportKind::NotListed, format!("the path is longer than {most} bytes"));
                }
                Ok(stat) if self.is_destination(directory.id(), name.to_bytes(), &stat) => {
                    self.refuse(&target, "is where this copy goes; it is not copied into itself");
                }
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                    if let Err(e) = tree.descend(&name) {
                        self.tell(&target, ReportKind::NotListed, e.to_string());
                    }
                }
                Ok(stat) => {
                    let (root, below) = (Arc::clone(tree.root()), below.to_vec());
                    let from = From { root, dir: Some(Arc::clone(dir)), below, directory, name };
                    self.entry(&from, target, stat)?;
                }
                Err(Errno::NOENT) => {
                    self.tell(&target, ReportKind::LeftOut, "was removed since its directory was listed");
                }
                Err(e) => {
                    complete = false;
                    self.tell(&target, ReportKind::NotListed, unreadable(e));
                }
            }
        }
        Ok(complete)
    }

    /// Reason to refuse a copy to a destination on this machine: the source is the destination or contains it, or `--delete` would
    /// remove the source there. `None` if the copy is safe.
    fn overlap(&self, source: &OwnedFd, stat: &Stat, name: &[u8]) -> Option<&'static str> {
        let destination = self.destination.as_ref()?;
        let is_destination = |stat: &Stat| (stat.st_dev, stat.st_ino) == (destination.device, destination.inode);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let same = "is the destination itself; source and destination are the same";
        let (mut below, mut here, mut depth) = (*stat, None, 0);
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            if name.is_empty() && is_destination(stat) {
                return Some(same);
            }
            let hash = super::directory_hash(stat.st_dev, stat.st_ino);
            if self.params.options.recursive && destination.above.contains(&hash) {
                return Some("contains the destination; a directory cannot be copied into itself");
            }
        } else {
            // The source may be a link: this finds the directory of its target.
            let path = rustix::fs::readlink(format!("/proc/self/fd/{}", source.as_raw_fd()), Vec::new()).ok()?;
            let (parent, _) = beneath::split(path.to_bytes());
            let parent = if parent.is_empty() { &b"/"[..] } else { parent };
            here = Some(rustix::fs::open(parent, flags, Mode::empty()).ok()?);
        }
        let name = CString::new(name).ok()?;
        loop {
            here = match here.take() {
                Some(here) => Some(here),
                None => Some(rustix::fs::openat(source, c"..", flags, Mode::empty()).ok()?),
            };
            let dir = here.as_ref()?;
            let stat = rustix::fs::fstat(dir).ok()?;
            if is_destination(&stat) {
                // The copy writes only to this entry of the destination.
                let entry = rustix::fs::statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW);
                let is_written = name.is_empty()
                    || entry.is_ok_and(|entry| (entry.st_dev, entry.st_ino) == (below.st_dev, below.st_ino));
                return match is_written {
                    true if depth == 0 && !name.is_empty() => Some(same),
                    true if self.params.options.delete => {
                        Some("is inside the destination, where --delete would remove it")
                    }
                    _ => None,
                };
            }
            if (stat.st_dev, stat.st_ino) == (below.st_dev, below.st_ino) {
                return None;
            }
            let above = rustix::fs::openat(dir, c"..", flags, Mode::empty()).ok()?;
            (below, here, depth) = (stat, Some(above), depth + 1);
        }
    }

    /// Whether an entry is the destination, which then lies inside what is copied.
    fn is_destination(&self, dir: (u64, u64), name: &[u8], stat: &Stat) -> bool {
        self.destination.as_ref().is_some_and(|d| match &d.name {
            Some(target) => (d.device, d.inode) == dir && target == name,
            None => (d.device, d.inode) == (stat.st_dev, stat.st_ino),
        })
    }

    /// Remembers the path of an entry. True for the first entry of the path, false for a directory that an earlier source has sent, too.
    /// `None` if the entry is refused because an earlier source has sent another one.
    fn name(&mut self, path: &[u8], what: Named) -> Option<bool> {
        let Some(names) = &mut self.names else { return Some(true) };
        if names.len() >= NAMES_MAX && !names.contains_key(&hash_of(path)) {
            return Some(true);
        }
        match names.insert(hash_of(path), what) {
            None => Some(true),
            Some(Named::Directory) if what == Named::Directory => Some(false),
            Some(before) => {
                names.insert(hash_of(path), before);
                self.refuse(path, "another source has an entry of this name; not overwriting it");
                None
            }
        }
    }

    fn entry(&mut self, from: &From, path: Vec<u8>, stat: Stat) -> Walk {
        self.check_cancel()?;
        if self.name(&path, Named::Entry).is_none() {
            return Ok(());
        }
        let kind = FileType::from_raw_mode(stat.st_mode);
        if self.params.options.preserve && stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.links.get(&key) {
                if self.params.options.update && self.verdicts.is_some() && kind == FileType::RegularFile {
                    // The file of this name there, or of the first name, may be newer.
                    return self.offer(Candidate { linked: true, ..Candidate::new(from.clone(), path, stat) });
                }
                let target = first.clone().unwrap_or_default();
                return self.append(&Record::Link { path, target });
            }
            if self.links.len() < LINKS_MAX && self.links_bytes + path.len() <= LINKS_BYTES_MAX {
                self.links_bytes += path.len();
                self.links.insert(key, Some(path.clone()));
            } else if !std::mem::replace(&mut self.links_full, true) {
                let why = "too many entries have several names to remember them; from here on they become separate";
                self.tell(&path, ReportKind::Incomplete, why);
            }
        }
        match kind {
            FileType::RegularFile => {
                if self.params.options.length.is_some() {
                    self.refuse(&path, "is a file; --size applies only to devices such as /dev/zero");
                    return Ok(());
                }
                let candidate = Candidate::new(from.clone(), path, stat);
                if self.verdicts.is_none() {
                    return self.send_file(candidate, &[]);
                }
                self.offer(candidate)
            }
            FileType::Symlink => {
                let Some((entry, stat)) = self.look(from, &path, &stat) else { return Ok(()) };
                match rustix::fs::readlinkat(&entry, c"", Vec::new()) {
                    Ok(target) => {
                        let meta = self.meta_of_entry(&entry, &path, &stat);
                        self.append(&Record::Symlink { path, target: target.into_bytes(), meta })
                    }
                    Err(e) => {
                        self.report(&path, unreadable(e));
                        Ok(())
                    }
                }
            }
            FileType::CharacterDevice if self.params.options.length.is_some() && !self.reads_devices => {
                self.refuse(&path, "is a device; device files are not read for remote peers");
                Ok(())
            }
            FileType::CharacterDevice if self.params.options.length.is_some() => {
                self.send_large(Candidate::new(from.clone(), path, stat), &[])
            }
            FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice
                if self.params.options.preserve =>
            {
                let Some((entry, stat)) = self.look(from, &path, &stat) else { return Ok(()) };
                let meta = self.meta_of_entry(&entry, &path, &stat);
                self.append(&Record::Special { path, meta, rdev: stat.st_rdev })
            }
            FileType::CharacterDevice => {
                self.refuse(&path, "is a device; use --size to read from it, or -p to copy the device node");
                Ok(())
            }
            _ => {
                self.refuse(&path, "not a file, directory or link; -p copies special files");
                Ok(())
            }
        }
    }

    /// True if another file has replaced a listed one that has several names. Its other names must not become links to the new file.
    pub(super) fn forget_replaced(&mut self, listed: &Stat, found: &Stat) -> bool {
        let key = (listed.st_dev, listed.st_ino);
        let is_replaced = self.params.options.preserve && listed.st_nlink > 1 && key != (found.st_dev, found.st_ino);
        if is_replaced {
            self.links.remove(&key);
        }
        is_replaced
    }

    /// An entry of the type that it had when it was listed. Reports a failure.
    fn look(&mut self, from: &From, path: &[u8], listed: &Stat) -> Option<(Arc<OwnedFd>, Stat)> {
        let kind = FileType::from_raw_mode(listed.st_mode);
        match from.look() {
            Ok((_, stat)) if self.forget_replaced(listed, &stat) => self.report(path, REPLACED),
            Ok((entry, stat)) if FileType::from_raw_mode(stat.st_mode) == kind => return Some((entry, stat)),
            Ok(_) => self.report(path, CHANGED_TYPE),
            Err(e) => self.report(path, unreadable(e)),
        }
        None
    }

    /// Attributes of an entry that [`From::look`] has found.
    fn meta_of_entry(&self, entry: &OwnedFd, path: &[u8], stat: &Stat) -> Meta {
        let mut meta = meta_of(stat);
        if self.params.options.preserve {
            self.add_xattrs(path, &mut meta, xattr::read(entry.as_fd(), c""));
        }
        meta
    }

    /// Attributes of an offered file. `None` if they have changed since. The sink would give them to the content of the offered file, but
    /// the name can belong to another file, even one with the same inode number.
    fn meta_as_offered(&self, offered: &Candidate) -> Option<Meta> {
        let (entry, stat) = offered.from.look().ok()?;
        let version = |stat: &Stat| (stat.st_dev, stat.st_ino, stat.st_ctime, stat.st_ctime_nsec);
        if version(&stat) != version(&offered.stat) {
            return None;
        }
        let meta = self.meta_of_entry(&entry, &offered.path, &stat);
        let capabilities = meta.xattrs.iter().find(|(name, _)| name == xattr::CAPABILITIES.to_bytes());
        let hash = capabilities.map_or(0, |(_, value)| capabilities_hash(value));
        (!self.params.options.preserve || hash == offered.capabilities).then_some(meta)
    }

    /// As [`Walker::meta_of_entry`], for an open file.
    pub(super) fn meta_of_open(&self, file: &File, path: &[u8], stat: &Stat) -> Meta {
        let mut meta = meta_of(stat);
        if self.params.options.preserve {
            self.add_xattrs(path, &mut meta, xattr::read_open(file.as_fd()));
        }
        meta
    }

    /// Adds the extended attributes that a record can carry. Reports the rest, and a failure to read them.
    fn add_xattrs(&self, path: &[u8], meta: &mut Meta, read: io::Result<xattr::Attributes>) {
        let mut xattrs = match read {
            Ok(xattrs) => xattrs,
            Err(e) => {
                self.tell(path, ReportKind::Incomplete, unreadable(format_args!("extended attributes: {e}")));
                return meta.set_partial();
            }
        };
        if xattrs.len() > XATTRS_MAX {
            self.tell(path, ReportKind::Incomplete, format!("more than {XATTRS_MAX} extended attributes"));
            // Access control lists come first, so they remain.
            xattrs.sort_by_key(|(name, _)| !name.starts_with(b"system."));
            xattrs.truncate(XATTRS_MAX);
            meta.xattrs_partial = true;
        }
        meta.xattrs = xattrs;
    }

    fn offer(&mut self, candidate: Candidate) -> Walk {
        if !self.push_offer(candidate) { Ok(()) } else { self.settle_offers(offers::AHEAD) }
    }

    /// Adds an offer. True if a batch was sent for it.
    fn push_offer(&mut self, mut candidate: Candidate) -> bool {
        let dir = self.params.options.preserve.then(|| candidate.from.dir().ok()).flatten();
        candidate.capabilities =
            dir.map_or(0, |dir| capabilities_hash(&xattr::capabilities(dir.as_fd(), &candidate.from.name)));
        // Offers wait for a round trip, and each might be in a directory of its own: descriptors are few.
        if !candidate.from.name.is_empty() {
            candidate.from.dir = None;
        }
        let entry = OfferEntry {
            path: candidate.path.clone(),
            size: candidate.stat.st_size as u64,
            mtime: (candidate.stat.st_mtime, candidate.stat.st_mtime_nsec as u32),
            ctime: (candidate.stat.st_ctime, candidate.stat.st_ctime_nsec as u32),
            owner: candidate.stat.st_uid,
            group: candidate.stat.st_gid,
            mode: candidate.stat.st_mode,
            capabilities: candidate.capabilities,
            linked: candidate.linked,
        };
        let is_full = !self.offers.has_room(&entry);
        if is_full {
            self.send_offer();
        }
        self.offers.push(entry, candidate);
        is_full
    }

    fn send_offer(&mut self) {
        if let Some((batch, entries)) = self.offers.send() {
            self.events.send(SessionEvent::Offer { batch, entries });
        }
    }

    /// Waits until at most `ahead` offers are without an answer, sending what is wanted.
    fn settle_offers(&mut self, ahead: usize) -> Walk {
        loop {
            while let Some(candidate) = self.again.pop() {
                self.push_offer(candidate);
            }
            if ahead == 0 {
                self.send_offer();
            }
            if self.offers.open() <= ahead {
                return Ok(());
            }
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
                let have = match &answer {
                    Answer::Skip | Answer::Attributes => 1 + candidate.stat.st_size as u64,
                    // The peer's numbers.
                    Answer::Except(ranges) => {
                        let sum = ranges.iter().fold(0u64, |sum, (_, len)| sum.saturating_add(*len));
                        1 + sum.min(candidate.stat.st_size as u64)
                    }
                    Answer::Newer | Answer::Send => 0,
                };
                Progress::add(&self.progress.resumed, have);
                let key = (candidate.stat.st_dev, candidate.stat.st_ino);
                match answer {
                    Answer::Skip => {}
                    Answer::Newer if candidate.linked => {}
                    Answer::Newer => {
                        // Its other names are no links to it.
                        if let Some(first) = self.links.get_mut(&key).filter(|f| f.as_ref() == Some(&candidate.path)) {
                            *first = None;
                        }
                    }
                    _ if candidate.linked => match self.links.get(&key).cloned().flatten() {
                        Some(target) => self.append(&Record::Link { path: candidate.path, target })?,
                        None => {
                            self.links.insert(key, Some(candidate.path.clone()));
                            self.again.push(Candidate { linked: false, ..candidate });
                        }
                    },
                    Answer::Attributes => match self.meta_as_offered(&candidate) {
                        Some(meta) => self.append(&Record::Attributes { path: candidate.path, meta })?,
                        None => self.send_file(candidate, &[])?,
                    },
                    Answer::Send => self.send_file(candidate, &[])?,
                    Answer::Except(ranges) => self.send_file(candidate, &ranges)?,
                }
            }
        }
    }
}

/// Message for an entry with another type than in the listing.
pub(super) const CHANGED_TYPE: &str = "changed its type while it was read";

/// Message for a file with several names that another file has replaced.
pub(super) const REPLACED: &str = "was replaced during the copy";

/// Reports name entries as the destination does: this says which end has failed.
pub(super) fn unreadable(error: impl std::fmt::Display) -> String {
    format!("cannot read the source: {error}")
}

fn hash_of(path: &[u8]) -> u64 {
    u64::from_le_bytes(blake3::hash(path).as_bytes()[..8].try_into().expect("8 bytes"))
}

pub(super) fn meta_of(stat: &Stat) -> Meta {
    Meta {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        ctime: (stat.st_ctime, stat.st_ctime_nsec as u32),
        size: stat.st_size as u64,
        data: 0,
        xattrs: Vec::new(),
        xattrs_partial: false,
    }
}
