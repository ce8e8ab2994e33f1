//! The disk through FUSE: programs use it by the system calls that they use any file system by.

use crate::disk::{Changes, Fault, Kind, Op, ROOT, Tree};
use fuser::{
    AccessFlags, BackgroundSession, BsdFileFlags, Config, Errno as FuseErrno, FileAttr, FileHandle, FileType,
    Filesystem, FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, SessionACL, TimeOrNow, WriteFlags,
};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

/// What becomes of requests.
enum Mode {
    /// They are answered.
    Well,
    /// They wait.
    Stopped(Vec<Waiting>),
    /// They fail and change nothing.
    Gone,
}

type Waiting = Box<dyn FnOnce(&mut State) + Send>;

struct State {
    tree: Tree,
    mode: Mode,
    /// Requests until no more are answered.
    stop_after: Option<u64>,
    /// What was asked for, and what became of it.
    history: Vec<String>,
    listings: BTreeMap<u64, Vec<(OsString, u64)>>,
    handles: u64,
    is_mounted: bool,
}

/// A disk that can be mounted. Clones are the same disk.
#[derive(Clone)]
pub struct Disk(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    stopped: Condvar,
}

impl Disk {
    /// An empty one. What chance decides comes from the seed.
    pub fn new(seed: u64) -> Disk {
        let (tree, mode) = (Tree::new(seed), Mode::Well);
        let (listings, history, is_mounted) = (BTreeMap::new(), Vec::new(), false);
        let state = State { tree, mode, stop_after: None, history, listings, handles: 0, is_mounted };
        Disk(Arc::new(Shared { state: Mutex::new(state), stopped: Condvar::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Makes it a file system at a directory.
    ///
    /// # Errors
    /// If FUSE is not to be had.
    ///
    /// # Panics
    /// If it is one already.
    pub fn mount(&self, at: &Path) -> io::Result<Mount> {
        assert!(!std::mem::replace(&mut self.lock().is_mounted, true), "the disk is mounted");
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("faultfs".into()), MountOption::DefaultPermissions];
        if rustix::process::geteuid().is_root() {
            // Others would have to be allowed to in the system's configuration.
            config.acl = SessionACL::All;
        }
        let session = fuser::spawn_mount(Requests(self.clone()), at, &config)?;
        Ok(Mount { disk: self.clone(), session: Some(session), at: at.into() })
    }

    /// Some requests are to fail.
    pub fn fail(&self, fault: Fault) {
        self.lock().tree.faults.push(fault);
    }

    /// No request is to fail any more, or to wait.
    pub fn heal(&self) {
        self.go_on();
        let mut state = self.lock();
        state.tree.faults.clear();
        (state.tree.lose_after, state.tree.room) = (None, None);
    }

    /// After so many requests from now on, write-back fails for some of what is then dirty: told once, to who syncs that file
    /// first. The kernel's own cache has it all the same.
    pub fn lose_writeback_after(&self, requests: u64) {
        self.lock().tree.lose_after = Some(requests);
    }

    /// Write-back is still to fail.
    pub fn is_to_lose(&self) -> bool {
        self.lock().tree.lose_after.is_some()
    }

    /// Somebody else has synced everything: what was lost has been told.
    pub fn tell_somebody_else(&self) {
        self.lock().tree.forget_lost();
    }

    /// Files may have so many bytes together.
    pub fn limit(&self, bytes: Option<u64>) {
        self.lock().tree.room = bytes;
    }

    /// Reads and writes are done in part, now and then. For files that are opened from now on.
    pub fn be_short(&self, short: bool) {
        self.lock().tree.short = short;
    }

    /// No `fallocate`, no `SEEK_HOLE`, no extended attributes.
    pub fn be_plain(&self, plain: bool) {
        self.lock().tree.plain = plain;
    }

    /// Times of changes are multiples of this.
    pub fn set_tick(&self, tick: Duration) {
        self.lock().tree.tick = tick;
    }

    /// After so many requests from now on, no more are answered, until [`Disk::go_on`] or [`Disk::lose_power`].
    pub fn stop_after(&self, requests: u64) {
        self.lock().stop_after = Some(requests);
    }

    /// Waits until no more requests are answered, and one waits; as long as `still` says.
    pub fn wait_stopped(&self, mut still: impl FnMut() -> bool) -> bool {
        let mut state = self.lock();
        loop {
            if matches!(&state.mode, Mode::Stopped(waiting) if !waiting.is_empty()) {
                return true;
            }
            if !still() {
                return false;
            }
            let poll = Duration::from_millis(20);
            state = self.0.stopped.wait_timeout(state, poll).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Answers what has waited, in any order, and what comes.
    pub fn go_on(&self) {
        let mut state = self.lock();
        state.stop_after = None;
        if let Mode::Stopped(mut waiting) = std::mem::replace(&mut state.mode, Mode::Well) {
            state.tree.random.shuffle(&mut waiting);
            waiting.into_iter().for_each(|request| request(&mut state));
        }
    }

    /// What waits fails, and so does all that comes, and nothing is changed. Those whom that would mislead have been killed.
    pub fn fail_all(&self) {
        let mut state = self.lock();
        state.stop_after = None;
        let before = std::mem::replace(&mut state.mode, Mode::Gone);
        drop(state);
        // Those that wait are answered by being dropped.
        drop(before);
    }

    /// The power goes and comes back: of what was not synced, any part may be there.
    ///
    /// # Panics
    /// If the disk is mounted: the system would not forget what it has seen.
    pub fn lose_power(&self) {
        let mut state = self.lock();
        assert!(!state.is_mounted, "the disk is mounted");
        (state.mode, state.stop_after) = (Mode::Well, None);
        state.listings.clear();
        state.history.push("--- the power is lost ---".into());
        state.tree.lose_power();
    }

    /// What it has been asked for so far, and what became of that, for people.
    pub fn history(&self) -> Vec<String> {
        self.lock().history.clone()
    }

    /// Adds a line to the history.
    pub fn remark(&self, line: String) {
        self.lock().history.push(line);
    }
}

/// A disk that is mounted, until this is dropped.
pub struct Mount {
    disk: Disk,
    session: Option<BackgroundSession>,
    at: PathBuf,
}

impl Drop for Mount {
    fn drop(&mut self) {
        if matches!(self.disk.lock().mode, Mode::Stopped(_)) {
            self.disk.fail_all();
        }
        // Whoever has something open there still has it until they let go.
        let detached = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        let session = self.session.take().expect("until dropped");
        let ended = if detached.is_ok() { session.join() } else { session.umount_and_join() };
        self.disk.lock().is_mounted = false;
        if let Err(error) = ended
            // That is how it may hear of it.
            && error.raw_os_error() != Some(libc::ECONNABORTED)
            && !std::thread::panicking()
        {
            panic!("unmounting {}: {error}", self.at.display());
        }
    }
}

struct Requests(Disk);

trait Reply: Send + 'static {
    fn fail(self, error: FuseErrno);
}

macro_rules! replies {
    ($($reply:ty),*) => {
        $(impl Reply for $reply {
            fn fail(self, error: FuseErrno) {
                self.error(error);
            }
        })*
    };
}

replies!(
    ReplyAttr,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyEmpty,
    ReplyEntry,
    ReplyLseek,
    ReplyOpen,
    ReplyStatfs,
    ReplyWrite,
    ReplyXattr
);

fn fuse_error(error: Errno) -> FuseErrno {
    FuseErrno::from_i32(error.raw_os_error())
}

impl State {
    /// The error that a request is to fail with, and whether it is done all the same.
    fn fault(&mut self, op: Op, name: &str) -> Option<(Errno, bool)> {
        let faults = self.tree.faults.iter_mut();
        for fault in faults.filter(|fault| fault.op == op && fault.times > 0 && name.contains(&fault.of)) {
            if fault.skip > 0 {
                fault.skip -= 1;
                continue;
            }
            fault.times -= 1;
            return Some((fault.error, fault.done_all_the_same));
        }
        None
    }

    fn answer<R: Reply, T>(
        &mut self,
        (op, name): (Op, &str),
        reply: R,
        work: impl FnOnce(&mut State) -> Result<T, Errno>,
        answer: impl FnOnce(R, T),
    ) {
        self.tree.write_back();
        let done = match self.fault(op, name) {
            None => work(self),
            Some((error, false)) => Err(error),
            Some((error, true)) => work(self).and(Err(error)),
        };
        let became = done.as_ref().map_or_else(|error| format!("{error:?}"), |_| "done".into());
        self.history.push(format!("{op:?} {name}: {became}"));
        match done {
            Ok(value) => answer(reply, value),
            Err(error) => reply.fail(fuse_error(error)),
        }
    }

    fn attr(&self, number: u64) -> Result<FileAttr, Errno> {
        let node = self.tree.node(number)?;
        let (kind, size) = match &node.kind {
            Kind::File(content) => (FileType::RegularFile, content.bytes().len() as u64),
            Kind::Dir => (FileType::Directory, 4096),
            Kind::Symlink(target) => (FileType::Symlink, target.as_os_str().len() as u64),
            Kind::Special(mode) => (special(*mode), 0),
        };
        let attributes = &node.attributes;
        Ok(FileAttr {
            ino: INodeNo(number),
            size,
            blocks: size.div_ceil(512),
            atime: attributes.accessed,
            mtime: attributes.modified,
            ctime: attributes.changed,
            crtime: attributes.changed,
            kind,
            perm: attributes.mode as u16,
            nlink: if matches!(node.kind, Kind::Dir) { 2 } else { node.links },
            uid: attributes.uid,
            gid: attributes.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn open_flags(&self) -> FopenFlags {
        // A short read is the end of the file to the kernel's cache, which is otherwise as that of any file system.
        if self.tree.short { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::FOPEN_KEEP_CACHE }
    }
}

fn special(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => FileType::CharDevice,
    }
}

/// The kernel asks again each time.
const TTL: Duration = Duration::ZERO;
const GENERATION: Generation = Generation(0);

impl Requests {
    /// Answers a request, now or when requests are answered again.
    fn serve<R: Reply, T>(
        &self,
        op: Op,
        name: &OsStr,
        reply: R,
        work: impl FnOnce(&mut State) -> Result<T, Errno> + Send + 'static,
        answer: impl FnOnce(R, T) + Send + 'static,
    ) {
        let state = &mut *self.0.lock();
        let name = name.to_string_lossy().into_owned();
        match &mut state.stop_after {
            Some(0) if matches!(state.mode, Mode::Well) => state.mode = Mode::Stopped(Vec::new()),
            Some(left) => *left = left.saturating_sub(1),
            None => {}
        }
        match &mut state.mode {
            Mode::Well => state.answer((op, &name), reply, work, answer),
            Mode::Stopped(waiting) => {
                waiting.push(Box::new(move |state: &mut State| state.answer((op, &name), reply, work, answer)));
                self.0.0.stopped.notify_all();
            }
            Mode::Gone => reply.fail(FuseErrno::EIO),
        }
    }

    /// A request for a file that is known by its number.
    fn serve_known<R: Reply, T>(
        &self,
        op: Op,
        ino: INodeNo,
        reply: R,
        work: impl FnOnce(&mut State) -> Result<T, Errno> + Send + 'static,
        answer: impl FnOnce(R, T) + Send + 'static,
    ) {
        let name = self.0.lock().tree.name_of(ino.0).to_owned();
        self.serve(op, OsStr::new(&name), reply, work, answer);
    }

    /// A request that gives a file a name, or finds one by it.
    fn serve_entry(
        &self,
        op: Op,
        name: &OsStr,
        reply: ReplyEntry,
        work: impl FnOnce(&mut State) -> Result<u64, Errno> + Send + 'static,
    ) {
        let work = |state: &mut State| work(state).and_then(|number| state.attr(number));
        self.serve(op, name, reply, work, |reply, attr| reply.entry(&TTL, &attr, GENERATION));
    }
}

impl Filesystem for Requests {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let wanted = name.to_owned();
        self.serve_entry(Op::Lookup, name, reply, move |state| state.tree.lookup(parent.0, &wanted));
    }

    fn forget(&self, _: &Request, ino: INodeNo, count: u64) {
        if ino.0 != ROOT {
            self.0.lock().tree.forget(ino.0, count);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.serve_known(Op::Stat, ino, reply, move |state| state.attr(ino.0), |reply, attr| reply.attr(&TTL, &attr));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let time = |time: Option<TimeOrNow>| {
            time.map(|time| match time {
                TimeOrNow::SpecificTime(time) => Some(time),
                TimeOrNow::Now => None,
            })
        };
        let changes = Changes { mode, uid, gid, size, accessed: time(atime), modified: time(mtime) };
        let work = move |state: &mut State| {
            state.tree.set(ino.0, &changes)?;
            state.attr(ino.0)
        };
        self.serve_known(Op::SetAttributes, ino, reply, work, |reply, attr| reply.attr(&TTL, &attr));
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        let work = move |state: &mut State| match &state.tree.node(ino.0)?.kind {
            Kind::Symlink(target) => Ok(target.clone().into_os_string().into_vec()),
            _ => Err(Errno::INVAL),
        };
        self.serve_known(Op::ReadLink, ino, reply, work, |reply, target| reply.data(&target));
    }

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, _: u32, reply: ReplyEntry) {
        let (wanted, owner) = (name.to_owned(), (req.uid(), req.gid()));
        self.serve_entry(Op::Create, name, reply, move |state| {
            let kind = match mode & libc::S_IFMT {
                libc::S_IFREG => Kind::File(crate::Content::new(state.tree.page)),
                _ => Kind::Special(mode),
            };
            state.tree.make(parent.0, &wanted, kind, mode & 0o7777, owner)
        });
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let (wanted, owner) = (name.to_owned(), (req.uid(), req.gid()));
        self.serve_entry(Op::MakeDir, name, reply, move |state| {
            state.tree.make(parent.0, &wanted, Kind::Dir, mode & !umask & 0o7777, owner)
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let wanted = name.to_owned();
        let work = move |state: &mut State| state.tree.remove(parent.0, &wanted, false);
        self.serve(Op::Unlink, name, reply, work, |reply, ()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let wanted = name.to_owned();
        let work = move |state: &mut State| state.tree.remove(parent.0, &wanted, true);
        self.serve(Op::RemoveDir, name, reply, work, |reply, ()| reply.ok());
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (wanted, target, owner) = (name.to_owned(), target.to_owned(), (req.uid(), req.gid()));
        self.serve_entry(Op::Symlink, name, reply, move |state| {
            state.tree.make(parent.0, &wanted, Kind::Symlink(target), 0o777, owner)
        });
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = (name.to_owned(), new_name.to_owned());
        let exchange = flags.contains(RenameFlags::RENAME_EXCHANGE);
        let new = flags.contains(RenameFlags::RENAME_NOREPLACE);
        let work = move |state: &mut State| state.tree.rename((parent.0, &from), (new_parent.0, &to), exchange, new);
        self.serve(Op::Rename, new_name, reply, work, |reply, ()| reply.ok());
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let wanted = name.to_owned();
        self.serve_entry(Op::Link, name, reply, move |state| state.tree.link(ino.0, parent.0, &wanted));
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let work = |state: &mut State| Ok(state.open_flags());
        self.serve_known(Op::Open, ino, reply, work, |reply, flags| reply.opened(FileHandle(0), flags));
    }

    fn create(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, _: i32, reply: ReplyCreate) {
        let (wanted, owner) = (name.to_owned(), (req.uid(), req.gid()));
        let work = move |state: &mut State| {
            let kind = Kind::File(crate::Content::new(state.tree.page));
            let number = state.tree.make(parent.0, &wanted, kind, mode & !umask & 0o7777, owner)?;
            Ok((state.attr(number)?, state.open_flags()))
        };
        let answer = |reply: ReplyCreate, (attr, flags): (FileAttr, FopenFlags)| {
            reply.created(&TTL, &attr, GENERATION, FileHandle(0), flags);
        };
        self.serve(Op::Create, name, reply, work, answer);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let work = move |state: &mut State| {
            let data = state.tree.read(ino.0, offset, size as usize)?;
            state.history.push(format!("  {} of {size} bytes at {offset}", data.len()));
            Ok(data)
        };
        self.serve_known(Op::Read, ino, reply, work, |reply, data| reply.data(&data));
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let data = data.to_vec();
        // Most servers know nothing of O_DSYNC, and what is asked for by it.
        let work = move |state: &mut State| {
            let written = state.tree.write(ino.0, offset, &data)?;
            state.history.push(format!("  {written} of {} bytes at {offset}", data.len()));
            Ok(written)
        };
        self.serve_known(Op::Write, ino, reply, work, |reply, written| reply.written(written as u32));
    }

    fn flush(&self, _: &Request, ino: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.serve_known(Op::Close, ino, reply, |_| Ok(()), |reply, ()| reply.ok());
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.serve_known(Op::Sync, ino, reply, move |state| state.tree.sync(ino.0), |reply, ()| reply.ok());
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.serve_known(Op::SyncDir, ino, reply, move |state| state.tree.sync_dir(ino.0), |reply, ()| reply.ok());
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let work = move |state: &mut State| {
            let listing = state.tree.list(ino.0)?;
            state.handles += 1;
            state.listings.insert(state.handles, listing);
            Ok(state.handles)
        };
        self.serve_known(Op::OpenDir, ino, reply, work, |reply, handle| {
            reply.opened(FileHandle(handle), FopenFlags::empty());
        });
    }

    fn readdir(&self, _: &Request, ino: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        let work = move |state: &mut State| {
            if offset == 0 {
                // Opened and begun again.
                let listing = state.tree.list(ino.0)?;
                state.listings.insert(handle.0, listing);
            }
            let listing = state.listings.get(&handle.0).ok_or(Errno::BADF)?;
            let of = |number| state.attr(number).map_or(FileType::RegularFile, |attr| attr.kind);
            let dots = [(OsString::from("."), ino.0, FileType::Directory), ("..".into(), ino.0, FileType::Directory)];
            let entries = listing.iter().map(|(name, number)| (name.clone(), *number, of(*number)));
            Ok(dots.into_iter().chain(entries).skip(offset as usize).collect::<Vec<_>>())
        };
        self.serve_known(Op::List, ino, reply, work, move |mut reply, entries| {
            for (index, (name, number, kind)) in entries.into_iter().enumerate() {
                if reply.add(INodeNo(number), offset + index as u64 + 1, kind, name) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.0.lock().listings.remove(&handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let work = |state: &mut State| Ok((state.tree.room, state.tree.used()));
        self.serve_known(Op::StatFs, ino, reply, work, |reply, (room, used)| {
            let all = room.unwrap_or(1 << 40) / 4096;
            let free = all.saturating_sub(used.div_ceil(4096));
            reply.statfs(all, free, free, 1 << 20, 1 << 20, 4096, 255, 4096);
        });
    }

    fn setxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, value: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        let (name, value) = (name.to_owned(), value.to_vec());
        let work = move |state: &mut State| state.tree.set_extended(ino.0, &name, Some(&value));
        self.serve_known(Op::SetAttribute, ino, reply, work, |reply, ()| reply.ok());
    }

    fn removexattr(&self, _: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        let work = move |state: &mut State| state.tree.set_extended(ino.0, &name, None);
        self.serve_known(Op::SetAttribute, ino, reply, work, |reply, ()| reply.ok());
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name.to_owned();
        let work = move |state: &mut State| {
            if state.tree.plain {
                return Err(Errno::OPNOTSUPP);
            }
            state.tree.node(ino.0)?.attributes.extended.get(&name).cloned().ok_or(Errno::NODATA)
        };
        self.serve_known(Op::GetAttribute, ino, reply, work, move |reply, value| of_size(reply, size, &value));
    }

    fn listxattr(&self, _: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let work = move |state: &mut State| {
            let extended = &state.tree.node(ino.0)?.attributes.extended;
            Ok(extended.keys().flat_map(|name| name.as_bytes().iter().copied().chain([0])).collect::<Vec<u8>>())
        };
        self.serve_known(Op::GetAttribute, ino, reply, work, move |reply, names| of_size(reply, size, &names));
    }

    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(&self, _: &Request, ino: INodeNo, _: FileHandle, at: u64, len: u64, mode: i32, reply: ReplyEmpty) {
        let work = move |state: &mut State| state.tree.allocate(ino.0, at, len, mode);
        self.serve_known(Op::Allocate, ino, reply, work, |reply, ()| reply.ok());
    }

    fn lseek(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let work = move |state: &mut State| match whence {
            libc::SEEK_DATA | libc::SEEK_HOLE => state.tree.seek(ino.0, offset as u64, whence == libc::SEEK_HOLE),
            _ => Err(Errno::INVAL),
        };
        self.serve_known(Op::Seek, ino, reply, work, |reply, at| reply.offset(at as i64));
    }
}

/// A value, or only its length for who asks for that.
fn of_size(reply: ReplyXattr, size: u32, value: &[u8]) {
    match size as usize {
        0 => reply.size(value.len() as u32),
        size if size < value.len() => reply.error(FuseErrno::ERANGE),
        _ => reply.data(value),
    }
}
