//! A directory of this host.
//!
//! Files are found again by the kernel's handles and held by descriptors that only name them (`O_PATH`), so that nothing depends on
//! paths; only a process that may not open files by handles remembers where they are (`path_table.rs`, `by_path.rs`). What the kernel
//! answers from memory (attributes, names in its cache, cached data) is asked for on the reactor; what may wait for a disk is done by
//! [`Workers`]. Rights are the kernel's to check: operations run with the credentials of their user. Only data is read and written through
//! descriptors of our own, because NFS knows no open files: its owner may read and write a file whatever its permissions (RFC 1813,
//! section 4.4), and who may execute it may read it.

mod by_path;
mod data;
mod names;
mod node;
mod path_table;
mod stored_acl;
mod sweep;

use self::node::{Node, Opened, change_of, stat, time_of};
use self::path_table::PathTable;

use super::workers::Workers;
use super::{
    Allocate, As, Attributes, Credentials, FileId, FileSystem, Kind, LentData, Listing, Make, OnChange, Op, OpenGuard,
    ReadData, Result, Rights, Room, Seek, SetAttributes, SetTime, SetXattr, Stability, Time, Usage,
};
use crate::acl::Acl;
use crate::identity::FileSystemNumbers;
use quick_cache::sync::Cache;
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, ResolveFlags, Statx, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;
use thruway_engine::io::OpenFile;
use thruway_engine::pipes::Pipes;
use thruway_engine::{Segment, file_system, limits};
use thruway_fs::Superblock;
use thruway_fs::credentials::{act_as, can_act_as_others, check_access};
use thruway_fs::handle::Handle;
use thruway_fs::lease::Lease;
use thruway_server::caller;
use thruway_server::turns::{Limits, Turn, Turns};
use thruway_tcp::Origin;
use tokio::sync::Semaphore;

/// A directory of this host, and what is beneath it on the same file system.
#[derive(Clone)]
pub struct LocalFileSystem {
    inner: Arc<Inner>,
    workers: Workers,
}

struct Inner {
    root: OwnedFd,
    root_id: FileId,
    /// Where it was when it was opened.
    path: PathBuf,
    root_is_gone: AtomicBool,
    fsid: u64,
    /// Subvolume of the root directory; `None` on file systems without subvolumes.
    subvolume_of_root: Option<u64>,
    /// Operations run as their user; else as this process.
    acts_as_others: bool,
    own_uid: u32,
    /// Where files are that are not held, if they cannot be opened by their handles.
    paths: Option<PathTable>,
    /// Held while a file has permissions that are not its own ([`Inner::open_as_owner`]).
    opening: Mutex<()>,
    /// The file system answers without asking another host.
    is_local: bool,
    nodes: Cache<FileId, Arc<Node>>,
    /// Those that clients have open, which are found although their last name may be gone.
    open: Mutex<HashMap<FileId, (Arc<Node>, usize)>>,
    verifier: AtomicU64,
    /// Changes of names and attributes are on the medium before clients are told of them.
    is_durable: bool,
    /// [`LocalOptions::is_direct`]
    is_direct: bool,
    /// The name of a new file is on the medium when the file is.
    syncs_names_with_files: bool,
    /// Held while an error that the kernel tells once may be known to one thread only.
    telling: RwLock<()>,
    /// Files that clients may have open; each holds up to three descriptors.
    open_max: usize,
    /// Turns for copies and changes of storage, which take long.
    copies: Turns,
    /// Turns for listings, which take much processor time.
    listings: Turns,
    /// Leases, each of which holds a descriptor.
    leases: Arc<Semaphore>,
    workers: Workers,
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

fn c_name(name: &[u8]) -> Result<CString> {
    if name.is_empty() || name.contains(&b'/') {
        return Err(Errno::INVAL);
    }
    if name.len() > 255 {
        return Err(Errno::NAMETOOLONG);
    }
    CString::new(name).map_err(|_| Errno::INVAL)
}

fn kind_of(mode: u16) -> Result<Kind> {
    Ok(match FileType::from_raw_mode(mode.into()) {
        FileType::RegularFile => Kind::Regular,
        FileType::Directory => Kind::Directory,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::CharacterDevice => Kind::CharacterDevice,
        FileType::Symlink => Kind::SymbolicLink,
        FileType::Socket => Kind::Socket,
        FileType::Fifo => Kind::Fifo,
        FileType::Unknown => return Err(Errno::IO),
    })
}

fn timespec(set: Option<SetTime>) -> Timespec {
    match set {
        None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
        Some(SetTime::To(time)) => Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() },
    }
}

/// Limits of copies and changes of storage in progress, so that threads remain for short operations. Hosts take turns.
const COPIES: Limits = Limits { all: 4, per_origin: 2, waiting: WAITING_MAX, patience: PATIENCE };

/// Limits of listings in progress, because their threads compete with the reactors for processors. Hosts take turns.
const LISTINGS: Limits = Limits { all: 4, per_origin: 2, waiting: WAITING_MAX, patience: PATIENCE };

/// Most calls that wait for their turn. Further calls fail, and their clients must try again.
const WAITING_MAX: usize = 16 << 10;
/// Longest wait of a call for its turn. After that it fails, and its client must try again.
const PATIENCE: Duration = Duration::from_secs(20);

/// Most leases at a time.
const LEASES_MAX: usize = 4096;

/// Least number of files that a share holds, and of files that are open, where the limit on descriptors is low.
const OPEN_MIN: usize = 16;

/// Inode number of the root directory of a subvolume (`BTRFS_FIRST_FREE_OBJECTID`).
const BTRFS_ROOT_INODE: u64 = 256;

/// Most bytes of an extended attribute, and of the names of all of a file (`XATTR_SIZE_MAX` of the kernel).
const XATTR_MAX: usize = 64 << 10;

fn user_xattr(name: &[u8]) -> Result<CString> {
    if name.is_empty() {
        return Err(Errno::INVAL);
    }
    CString::new([b"user.", name].concat()).map_err(|_| Errno::INVAL)
}

fn id_of(handle: &Handle) -> FileId {
    FileId(SmallVec::from_vec(handle.encode()))
}

/// What a look-up has found.
struct Found {
    id: FileId,
    fd: OwnedFd,
    stat: Statx,
}

impl Found {
    fn of(fd: OwnedFd) -> Result<Found> {
        let (handle, _) = Handle::of(&fd, c"").map_err(|e| errno(&e))?;
        let id = id_of(&handle);
        if id.0.len() > super::FILE_ID_MAX {
            return Err(Errno::OPNOTSUPP);
        }
        let stat = stat(&fd)?;
        Ok(Found { id, fd, stat })
    }

    /// By a name without slashes; `flags` beside those that keep it in its directory.
    fn by_name(dir: BorrowedFd<'_>, name: &CStr, flags: ResolveFlags) -> Result<Found> {
        let inside = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Found::of(rustix::fs::openat2(dir, name, path, Mode::empty(), inside | flags)?)
    }
}

impl Inner {
    /// Does something with the rights of a user.
    fn act_as<T>(&self, who: &Credentials, action: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.acts_as_others { act_as(who, action)? } else { action() }
    }

    /// Brings data and attributes of a file to the medium: with data alone, a loss of power could take its times back, and clients
    /// would take an old state that they know for the new one.
    fn sync(&self, node: &Node, file: &OpenFile) -> Result<()> {
        let synced = rustix::fs::fsync(file);
        // Where another thread has been told of an error, it has noted that afterwards.
        drop(self.telling.write().expect("no panics under the lock"));
        node.failures.fetch_add(u64::from(synced.is_err()), Ordering::SeqCst);
        self.note(synced)
    }

    /// Remembers whether data may have been lost.
    fn note<T>(&self, result: rustix::io::Result<T>) -> Result<T> {
        if let Err(error) = &result {
            tracing::error!(%error, "written data may have been lost: clients are to write again what they have not flushed");
            self.verifier.fetch_add(1, Ordering::SeqCst);
        }
        result
    }

    /// Subvolume of a file; 0 for the subvolume of the root directory.
    fn subvolume(&self, id: &FileId) -> u64 {
        let Some(of_root) = self.subvolume_of_root else { return 0 };
        let subvolume = Handle::decode(&id.0).and_then(|handle| handle.subvolume());
        subvolume.filter(|subvolume| *subvolume != of_root).unwrap_or(0)
    }

    fn attributes_of(&self, id: &FileId, stat: &Statx) -> Result<Attributes> {
        let subvolume = self.subvolume(id);
        let is_root_of_subvolume = subvolume != 0 && stat.stx_ino == BTRFS_ROOT_INODE;
        Ok(Attributes {
            kind: kind_of(stat.stx_mode)?,
            mode: u32::from(stat.stx_mode) & 0o7777,
            links: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            size: stat.stx_size,
            used: stat.stx_blocks.saturating_mul(512),
            device: (stat.stx_rdev_major, stat.stx_rdev_minor),
            fsid: self.fsid,
            subvolume,
            number: stat.stx_ino,
            // Listings of the parent directory show this number.
            number_in_parent: if is_root_of_subvolume { subvolume } else { stat.stx_ino },
            accessed: time_of(stat.stx_atime),
            modified: time_of(stat.stx_mtime),
            changed: time_of(stat.stx_ctime),
            change: change_of(time_of(stat.stx_ctime), None),
        })
    }

    /// As [`Inner::attributes_of`], of a file that is held.
    fn attributes(&self, node: &Node, stat: &Statx) -> Result<Attributes> {
        let attributes = self.attributes_of(&node.id, stat)?;
        Ok(Attributes { change: node.change(attributes.changed), ..attributes })
    }

    fn open(&self) -> MutexGuard<'_, HashMap<FileId, (Arc<Node>, usize)>> {
        self.open.lock().expect("no panics under the lock")
    }

    /// A file that is held.
    fn held(&self, id: &FileId) -> Option<Arc<Node>> {
        if let Some(node) = self.nodes.get(id) {
            return Some(node);
        }
        self.open().get(id).map(|(node, _)| Arc::clone(node))
    }

    /// Attributes of what may be held.
    fn attributes_of_found(&self, found: &Found) -> Result<Attributes> {
        match self.held(&found.id) {
            Some(node) => self.attributes(&node, &found.stat),
            None => self.attributes_of(&found.id, &found.stat),
        }
    }

    /// Holds what has been found.
    fn hold(self: &Arc<Self>, found: Found) -> Result<Arc<Node>> {
        if let Some(node) = self.held(&found.id) {
            return Ok(node);
        }
        let kind = kind_of(found.stat.stx_mode)?;
        let (id, inner) = (found.id, Arc::downgrade(self));
        let node = Arc::new(Node {
            id: id.clone(),
            fd: found.fd,
            kind,
            data: Mutex::default(),
            changes: Mutex::default(),
            is_open: AtomicBool::new(false),
            syncing: tokio::sync::Mutex::default(),
            syncs: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            inner,
        });
        self.nodes.insert(id, Arc::clone(&node));
        Ok(node)
    }

    /// Whether somebody is a file's owner, by whose rights it is used.
    fn is_owner(&self, who: &Credentials, stat: &Statx) -> bool {
        stat.stx_uid == if self.acts_as_others { who.uid } else { self.own_uid }
    }

    /// Finds a file again.
    fn open_node(self: &Arc<Self>, id: &FileId) -> Result<Arc<Node>> {
        if let Some(paths) = &self.paths {
            return self.hold(self.find_by_path(paths, id)?.ok_or(Errno::STALE)?);
        }
        let handle = Handle::decode(&id.0).ok_or(Errno::STALE)?;
        let fd = handle.open(&self.root, OFlags::PATH | OFlags::NOFOLLOW).map_err(|e| match errno(&e) {
            Errno::INVAL | Errno::NOMEM => Errno::STALE,
            other => other,
        })?;
        let stat = stat(&fd)?;
        self.hold(Found { id: id.clone(), fd, stat })
    }

    /// Opens a regular file for its data.
    fn open_data(&self, node: &Node, flags: OFlags) -> Result<Arc<OpenFile>> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        Ok(Arc::new(OpenFile::new(File::from(self.open_fd(node, flags)?))))
    }

    fn open_fd(&self, node: &Node, flags: OFlags) -> Result<OwnedFd> {
        if self.paths.is_some() {
            return self.open_as_owner(node, flags);
        }
        node.handle()?.open(&self.root, flags).map_err(|e| match errno(&e) {
            // Its lease is being given back.
            Errno::AGAIN => Errno::INPROGRESS,
            other => other,
        })
    }

    fn has_right(&self, who: &Credentials, node: &Node, right: Access) -> bool {
        self.act_as(who, || check_access(&node.fd, right)).is_ok()
    }

    fn check_read(&self, who: &Credentials, node: &Node, stat: &Statx) -> Result<()> {
        let may = self.is_owner(who, stat)
            || self.has_right(who, node, Access::READ_OK)
            || self.has_right(who, node, Access::EXEC_OK);
        if may { Ok(()) } else { Err(Errno::ACCESS) }
    }

    fn check_write(&self, who: &Credentials, node: &Node, stat: &Statx) -> Result<()> {
        let may = self.is_owner(who, stat) || self.has_right(who, node, Access::WRITE_OK);
        if may { Ok(()) } else { Err(Errno::ACCESS) }
    }

    /// The data of files and nothing else can be read and written.
    fn check_regular(node: &Node) -> Result<()> {
        match node.kind {
            Kind::Regular => Ok(()),
            Kind::Directory => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    /// A file that is changed by somebody but root loses its set-user-ID bits, as it does when that user writes to it here.
    ///
    /// Takes the mode that the file has now: somebody may have changed it while the operation waited.
    fn drop_privileges(who: &Credentials, node: &Node) -> Result<()> {
        if who.uid == 0 {
            return Ok(());
        }
        let mode = Mode::from_raw_mode(node.stat()?.stx_mode.into());
        let mut kept = mode - Mode::SUID;
        if mode.contains(Mode::XGRP) {
            kept -= Mode::SGID;
        }
        if kept == mode {
            return Ok(());
        }
        rustix::fs::chmod(node.proc_path(), kept)
    }

    fn parent(self: &Arc<Self>, node: &Node) -> Result<Found> {
        if node.kind != Kind::Directory {
            return Err(Errno::NOTDIR);
        }
        let above = |fd: BorrowedFd<'_>| Found::by_name(fd, c"..", ResolveFlags::empty());
        if node.id == self.root_id {
            return Found::of(rustix::io::fcntl_dupfd_cloexec(&node.fd, 0)?);
        }
        let parent = above(node.fd.as_fd())?;
        // It may have been moved out of the share.
        let mut at = rustix::io::fcntl_dupfd_cloexec(&parent.fd, 0)?;
        let mut id = parent.id.clone();
        while id != self.root_id {
            let next = above(at.as_fd())?;
            if next.id == id {
                return Err(Errno::STALE);
            }
            (at, id) = (next.fd, next.id);
        }
        Ok(parent)
    }

    fn set_attributes(&self, As { who, is_open }: As<'_>, node: &Node, set: &SetAttributes) -> Result<()> {
        set.check()?;
        if let Some(size) = set.size {
            Inner::check_regular(node)?;
            let stat = node.stat()?;
            if !is_open {
                self.check_write(who, node, &stat)?;
            }
            if stat.stx_size != size || set.modified.is_none() {
                Inner::drop_privileges(who, node)?;
                let file = self.open_data(node, OFlags::WRONLY)?;
                rustix::fs::ftruncate(&*file, size)?;
            }
        }
        self.act_as(who, || {
            if set.uid.is_some() || set.gid.is_some() {
                let (uid, gid) = (set.uid.map(rustix::fs::Uid::from_raw), set.gid.map(rustix::fs::Gid::from_raw));
                rustix::fs::chownat(&node.fd, c"", uid, gid, AtFlags::EMPTY_PATH)?;
            }
            if let Some(mode) = set.mode
                && node.kind != Kind::SymbolicLink
            {
                // Not between the permissions that it has for a moment and its own.
                let _opening = self.paths.as_ref().map(|_| self.opening.lock().expect("no panics under the lock"));
                rustix::fs::chmod(node.proc_path(), Mode::from_raw_mode(mode & 0o7777))?;
            }
            if set.accessed.is_some() || set.modified.is_some() {
                let times =
                    Timestamps { last_access: timespec(set.accessed), last_modification: timespec(set.modified) };
                rustix::fs::utimensat(&node.fd, c"", &times, AtFlags::EMPTY_PATH)?;
            }
            Ok(())
        })
    }
}

/// How a directory is served.
#[derive(Clone)]
pub struct LocalOptions {
    /// Changes of names and attributes are on the medium when a client is told of them. Otherwise, a loss of power may take back the
    /// last of them; not data that clients have flushed.
    pub is_durable: bool,
    /// Data goes past the page cache, where its position and length are multiples of 4,096 bytes.
    pub is_direct: bool,
    /// Where to remember the paths of files, if this process may not open them by their handles (`CAP_DAC_READ_SEARCH`). Without it, and
    /// after a crash, files that clients know from before a restart are searched for.
    pub path_table: Option<PathBuf>,
    /// How many directories share this process's descriptors.
    pub directories: u64,
    /// Numbers of this server's file systems, and the name of the share. Without them, handles become stale when the device number of
    /// the file system changes.
    pub numbers: Option<(Arc<FileSystemNumbers>, String)>,
}

impl Default for LocalOptions {
    fn default() -> LocalOptions {
        LocalOptions { is_durable: true, is_direct: false, path_table: None, directories: 1, numbers: None }
    }
}

impl LocalFileSystem {
    /// Opens a directory.
    ///
    /// # Errors
    /// If it cannot be opened, its file system has no handles, or the table of paths that this process needs cannot be opened.
    pub fn open(path: &Path, options: &LocalOptions) -> io::Result<LocalFileSystem> {
        LocalFileSystem::open_by(path, options, false)
    }

    /// As [`LocalFileSystem::open`]; `by_path` even where files can be opened by their handles.
    pub(super) fn open_by(path: &Path, options: &LocalOptions, by_path: bool) -> io::Result<LocalFileSystem> {
        let root = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let (handle, _) = Handle::of(&root, c"")?;
        let by_path = match handle.open(&root, OFlags::PATH | OFlags::DIRECTORY) {
            Err(error) if errno(&error) == Errno::PERM => true,
            opened => opened.map(|_| by_path)?,
        };
        let paths = by_path.then(|| PathTable::open(options.path_table.as_deref())).transpose()?;
        let root_id = id_of(&handle);
        let superblock = Superblock::of(&root)?;
        let fsid = match &options.numbers {
            Some((numbers, share)) => numbers.number_of(share, &superblock),
            None => superblock.device,
        };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let workers = Workers::default();
        // Each file that is held or open has up to three descriptors, and two more past the page cache.
        let part = options.directories * if options.is_direct { 16 } else { 8 };
        let inner = Inner {
            fsid,
            subvolume_of_root: handle.subvolume(),
            acts_as_others: can_act_as_others(),
            own_uid: rustix::process::geteuid().as_raw(),
            paths,
            opening: Mutex::default(),
            is_local: file_system::is_of_this_host(&root),
            nodes: Cache::new(limits::share_of_open_files(part).clamp(OPEN_MIN, 1 << 20)),
            open: Mutex::default(),
            verifier: AtomicU64::new(now.as_nanos() as u64),
            is_durable: options.is_durable,
            is_direct: options.is_direct,
            syncs_names_with_files: file_system::syncs_names_with_new_files(&root),
            telling: RwLock::default(),
            open_max: limits::share_of_open_files(part).max(OPEN_MIN),
            copies: Turns::new(COPIES),
            listings: Turns::new(LISTINGS),
            leases: Arc::new(Semaphore::new(
                limits::share_of_open_files(16 * options.directories).clamp(16, LEASES_MAX),
            )),
            workers: workers.clone(),
            root,
            root_id,
            path: path.into(),
            root_is_gone: AtomicBool::new(false),
        };
        let inner = Arc::new(inner);
        sweep::start(&inner)?;
        Ok(LocalFileSystem { inner, workers })
    }

    async fn node(&self, id: &FileId) -> Result<Arc<Node>> {
        if let Some(node) = self.inner.held(id) {
            return Ok(node);
        }
        let wanted = id.clone();
        match self.work(move |inner| inner.open_node(&wanted)).await {
            Err(error @ (Errno::STALE | Errno::ACCESS)) if let Some(paths) = &self.inner.paths => {
                self.search(paths, id, error).await
            }
            found => found,
        }
    }

    /// Does what may wait.
    async fn work<T: Send + 'static>(&self, job: impl FnOnce(&Arc<Inner>) -> Result<T> + Send + 'static) -> Result<T> {
        let inner = Arc::clone(&self.inner);
        self.workers.run(move || job(&inner)).await
    }

    /// Returns the wanted rights that a user has. Checked on the reactor if the file system is local, otherwise by a worker.
    async fn rights_to(&self, who: &Credentials, node: &Arc<Node>, wanted: Rights) -> Result<Rights> {
        let ask = move |inner: &Inner, who: &Credentials, node: &Node| {
            let has = |wanted: bool, right| wanted && inner.has_right(who, node, right);
            Rights {
                read: has(wanted.read, Access::READ_OK),
                write: has(wanted.write, Access::WRITE_OK),
                execute: has(wanted.execute, Access::EXEC_OK),
            }
        };
        if self.inner.is_local {
            return Ok(ask(&self.inner, who, node));
        }
        let (who, node) = (who.clone(), Arc::clone(node));
        self.work(move |inner| Ok(ask(inner, &who, &node))).await
    }

    /// Waits for the turn of a long operation. Fails with `EAGAIN` if the wait takes too long; the client then tries again.
    async fn turn(&self, turns: &Turns) -> Result<Turn> {
        turns.take(caller::current().unwrap_or(Origin::UnknownUser)).await.ok_or(Errno::AGAIN)
    }

    async fn stat(&self, node: &Arc<Node>) -> Result<Statx> {
        let stat = if self.inner.is_local {
            node.stat()
        } else {
            let node = Arc::clone(node);
            self.work(move |_| node.stat()).await
        };
        if stat.is_err_and(|error| error == Errno::STALE) {
            self.inner.nodes.remove(&node.id);
            if node.id == self.inner.root_id && !self.inner.root_is_gone.swap(true, Ordering::Relaxed) {
                let path = self.inner.path.display();
                tracing::error!(
                    "{path} has been removed, or replaced by another directory: what is there now is shared after a restart"
                );
            }
        }
        stat
    }
}

impl FileSystem for LocalFileSystem {
    fn root(&self) -> FileId {
        self.inner.root_id.clone()
    }

    fn fsid(&self) -> u64 {
        self.inner.fsid
    }

    fn open_files_max(&self) -> Option<usize> {
        Some(self.inner.open_max)
    }

    fn attributes<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        Box::pin(async move {
            let node = self.node(file).await?;
            let stat = self.stat(&node).await?;
            self.inner.attributes(&node, &stat)
        })
    }

    fn set_attributes<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        set: SetAttributes,
        guard: Option<Time>,
    ) -> Op<'a, Attributes> {
        Box::pin(async move {
            let (node, who, is_open) = (self.node(file).await?, user.who.clone(), user.is_open);
            self.work(move |inner| {
                if guard.is_some_and(|guard| node.stat().is_ok_and(|stat| time_of(stat.stx_ctime) != guard)) {
                    return Err(Errno::AGAIN);
                }
                let done = inner.set_attributes(As { who: &who, is_open }, &node, &set);
                // What has failed may have been done in part.
                node.note_change();
                done?;
                inner.keep(&node)?;
                inner.attributes(&node, &node.stat()?)
            })
            .await
        })
    }

    fn look_up<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8]) -> Op<'a, (FileId, Attributes)> {
        Box::pin(async move {
            let dir = self.node(dir).await?;
            if dir.kind != Kind::Directory {
                return Err(Errno::NOTDIR);
            }
            let inner = &self.inner;
            let held = |inner: &Arc<Inner>, found: Found| {
                let stat = found.stat;
                let node = inner.hold(found)?;
                Ok((node.id.clone(), inner.attributes(&node, &stat)?))
            };
            match name {
                b"." => return Ok((dir.id.clone(), inner.attributes(&dir, &self.stat(&dir).await?)?)),
                b".." => {
                    // As any other name, it is for those who may search the directory.
                    let who = who.clone();
                    return self
                        .work(move |inner| match inner.has_right(&who, &dir, Access::EXEC_OK) {
                            true => held(inner, inner.parent(&dir)?),
                            false => Err(Errno::ACCESS),
                        })
                        .await;
                }
                _ => {}
            }
            let name = c_name(name)?;
            if inner.is_local {
                let flags = ResolveFlags::BENEATH | ResolveFlags::CACHED;
                match inner.act_as(who, || Found::by_name(dir.fd.as_fd(), &name, flags)) {
                    Err(Errno::AGAIN) => {}
                    found => {
                        let found = found?;
                        inner.note_place(&found.id, &dir, &name);
                        return held(inner, found);
                    }
                }
            }
            let who = who.clone();
            self.work(move |inner| {
                loop {
                    match inner.act_as(&who, || Found::by_name(dir.fd.as_fd(), &name, ResolveFlags::BENEATH)) {
                        // A rename elsewhere made the kernel unsure.
                        Err(Errno::AGAIN) => {}
                        found => {
                            let found = found?;
                            inner.note_place(&found.id, &dir, &name);
                            return held(inner, found);
                        }
                    }
                }
            })
            .await
        })
    }

    fn rights<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (Rights, Attributes)> {
        Box::pin(async move {
            let node = self.node(file).await?;
            let stat = self.stat(&node).await?;
            let rights = self.rights_to(who, &node, wanted).await?;
            Ok((rights, self.inner.attributes(&node, &stat)?))
        })
    }

    fn read_link<'a>(&'a self, file: &'a FileId) -> Op<'a, Vec<u8>> {
        Box::pin(async move {
            let node = self.node(file).await?;
            if node.kind != Kind::SymbolicLink {
                return Err(Errno::INVAL);
            }
            self.work(move |_| Ok(rustix::fs::readlinkat(&node.fd, c"", Vec::new())?.into_bytes())).await
        })
    }

    fn open<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (OpenGuard, Attributes)> {
        Box::pin(async move {
            let node = self.node(file).await?;
            let stat = self.stat(&node).await?;
            match node.kind {
                Kind::Regular => {}
                Kind::Directory => return Err(Errno::ISDIR),
                Kind::SymbolicLink => return Err(Errno::LOOP),
                _ => return Err(Errno::NXIO),
            }
            let rights = self.rights_to(who, &node, Rights { execute: wanted.read, ..wanted }).await?;
            if wanted.read && !rights.read && !rights.execute || wanted.write && !rights.write {
                return Err(Errno::ACCESS);
            }
            let attributes = self.inner.attributes(&node, &stat)?;
            let opened = {
                let mut open = self.inner.open();
                if open.len() >= self.inner.open_max && !open.contains_key(&node.id) {
                    tracing::warn!(max = self.inner.open_max, "clients have as many files open as there can be");
                    return Err(Errno::NOSPC);
                }
                let (node, users) = open.entry(node.id.clone()).or_insert_with(|| (node, 0));
                *users += 1;
                node.is_open.store(true, Ordering::Relaxed);
                Opened(Arc::clone(node))
            };
            // From here on it stays, if it still has a name.
            opened.0.stat()?;
            Ok((Arc::new(opened) as OpenGuard, attributes))
        })
    }

    fn read<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, segment: Segment) -> Op<'a, ReadData> {
        Box::pin(self.read_data(user, file, at, segment))
    }

    fn lend<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        at: u64,
        len: usize,
        pipes: &'a Arc<Pipes>,
    ) -> Op<'a, Option<LentData>> {
        Box::pin(self.lend_data(user, file, at, len, pipes))
    }

    fn write<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        at: u64,
        segment: Segment,
        stability: Stability,
    ) -> Op<'a, Attributes> {
        Box::pin(self.write_data(user, file, at, segment, stability))
    }

    fn lease<'a>(&'a self, file: &'a FileId, on_change: OnChange) -> Op<'a, OpenGuard> {
        Box::pin(async move {
            let node = self.node(file).await?;
            Inner::check_regular(&node)?;
            // Of changes by other hosts nothing is heard.
            if !self.inner.is_local {
                return Err(Errno::OPNOTSUPP);
            }
            if node.data().write.is_some() {
                return Err(Errno::AGAIN);
            }
            let permit = Arc::clone(&self.inner.leases).try_acquire_owned().map_err(|_| Errno::NOSPC)?;
            self.work(move |inner| {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                let lease = Lease::take(inner.open_fd(&node, flags)?, on_change).map_err(|e| errno(&e))?;
                Ok(Arc::new((lease, permit)) as OpenGuard)
            })
            .await
        })
    }

    fn flush<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        Box::pin(async move {
            let node = self.node(file).await?;
            Inner::check_regular(&node)?;
            self.sync(&node).await?;
            let stat = self.stat(&node).await?;
            self.inner.attributes(&node, &stat)
        })
    }

    fn write_verifier(&self) -> u64 {
        self.inner.verifier.load(Ordering::SeqCst)
    }

    fn make<'a>(
        &'a self,
        who: &'a Credentials,
        dir: &'a FileId,
        name: &'a [u8],
        what: Make,
        set: SetAttributes,
    ) -> Op<'a, (FileId, Attributes)> {
        Box::pin(async move {
            let (dir, who, name) = (self.node(dir).await?, who.clone(), name.to_vec());
            self.work(move |inner| {
                let made = inner.make(&who, &dir, &name, &what, set);
                dir.note_change();
                made
            })
            .await
        })
    }

    fn remove<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8], is_directory: bool) -> Op<'a, ()> {
        Box::pin(async move {
            let (dir, who, name) = (self.node(dir).await?, who.clone(), name.to_vec());
            self.work(move |inner| inner.remove(&who, &dir, &name, is_directory)).await
        })
    }

    fn rename<'a>(
        &'a self,
        who: &'a Credentials,
        from: (&'a FileId, &'a [u8]),
        to: (&'a FileId, &'a [u8]),
    ) -> Op<'a, ()> {
        Box::pin(async move {
            let (from_dir, to_dir) = (self.node(from.0).await?, self.node(to.0).await?);
            let (who, old, new) = (who.clone(), from.1.to_vec(), to.1.to_vec());
            self.work(move |inner| inner.rename(&who, (&from_dir, &old), (&to_dir, &new))).await
        })
    }

    fn link<'a>(&'a self, who: &'a Credentials, file: &'a FileId, dir: &'a FileId, name: &'a [u8]) -> Op<'a, ()> {
        Box::pin(async move {
            let (node, dir, who) = (self.node(file).await?, self.node(dir).await?, who.clone());
            let name = c_name(name)?;
            self.work(move |inner| {
                inner.act_as(&who, || {
                    let file = node.proc_path();
                    rustix::fs::linkat(rustix::fs::CWD, file, &dir.fd, &*name, AtFlags::SYMLINK_FOLLOW)
                })?;
                node.note_change();
                dir.note_change();
                inner.keep_names(&dir)
            })
            .await
        })
    }

    fn list<'a>(
        &'a self,
        who: &'a Credentials,
        dir: &'a FileId,
        cookie: u64,
        room: Room,
        with_files: bool,
    ) -> Op<'a, Listing> {
        Box::pin(async move {
            let (dir, who) = (self.node(dir).await?, who.clone());
            let turn = self.turn(&self.inner.listings).await?;
            self.work(move |inner| {
                let _turn = turn;
                inner.list(&who, &dir, cookie, room, with_files)
            })
            .await
        })
    }

    fn usage(&self) -> Op<'_, Usage> {
        Box::pin(async move {
            self.work(|inner| {
                let stat = rustix::fs::fstatvfs(&inner.root)?;
                let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
                Ok(Usage {
                    bytes: bytes(stat.f_blocks),
                    bytes_free: bytes(stat.f_bfree),
                    bytes_available: bytes(stat.f_bavail),
                    files: stat.f_files,
                    files_free: stat.f_ffree,
                })
            })
            .await
        })
    }

    fn seek<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, what: Seek) -> Op<'a, u64> {
        Box::pin(self.seek_data(user, file, at, what))
    }

    fn allocate<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, len: u64, what: Allocate) -> Op<'a, ()> {
        Box::pin(self.allocate_data(user, file, at, len, what))
    }

    fn copy<'a>(
        &'a self,
        user: As<'a>,
        from: (&'a FileId, u64),
        to: (&'a FileId, u64),
        len: u64,
        shared: bool,
    ) -> Op<'a, u64> {
        Box::pin(self.copy_data(user, from, to, len, shared))
    }

    fn acl<'a>(&'a self, file: &'a FileId) -> Op<'a, Acl> {
        Box::pin(async move {
            let node = self.node(file).await?;
            let mode = self.stat(&node).await?.stx_mode.into();
            self.work(move |_| stored_acl::read(&node.proc_path(), node.kind, mode)).await
        })
    }

    fn set_acl<'a>(&'a self, who: &'a Credentials, file: &'a FileId, acl: Acl) -> Op<'a, ()> {
        Box::pin(async move {
            let (node, who) = (self.node(file).await?, who.clone());
            self.work(move |inner| {
                let done = inner.act_as(&who, || stored_acl::write(&node.proc_path(), node.kind, &acl));
                node.note_change();
                done?;
                inner.keep(&node)
            })
            .await
        })
    }

    fn xattr<'a>(&'a self, who: &'a Credentials, file: &'a FileId, name: &'a [u8]) -> Op<'a, Vec<u8>> {
        Box::pin(async move {
            let (node, who, name) = (self.node(file).await?, who.clone(), user_xattr(name)?);
            self.work(move |inner| {
                let mut value = vec![0; XATTR_MAX];
                let len = inner.act_as(&who, || rustix::fs::getxattr(node.proc_path(), &*name, &mut value[..]))?;
                value.truncate(len);
                Ok(value)
            })
            .await
        })
    }

    fn set_xattr<'a>(
        &'a self,
        who: &'a Credentials,
        file: &'a FileId,
        name: &'a [u8],
        value: Option<(&'a [u8], SetXattr)>,
    ) -> Op<'a, ()> {
        Box::pin(async move {
            let (node, who, name) = (self.node(file).await?, who.clone(), user_xattr(name)?);
            let value = value.map(|(value, how)| (value.to_vec(), how));
            self.work(move |inner| {
                let done = inner.act_as(&who, || match &value {
                    None => rustix::fs::removexattr(node.proc_path(), &*name),
                    Some((value, how)) => {
                        let flags = match how {
                            SetXattr::Either => XattrFlags::empty(),
                            SetXattr::Create => XattrFlags::CREATE,
                            SetXattr::Replace => XattrFlags::REPLACE,
                        };
                        rustix::fs::setxattr(node.proc_path(), &*name, value, flags)
                    }
                });
                node.note_change();
                done?;
                inner.keep(&node)
            })
            .await
        })
    }

    fn xattrs<'a>(&'a self, who: &'a Credentials, file: &'a FileId) -> Op<'a, Vec<Vec<u8>>> {
        Box::pin(async move {
            let (node, who) = (self.node(file).await?, who.clone());
            self.work(move |inner| {
                let mut names = vec![0; XATTR_MAX];
                let len = inner.act_as(&who, || {
                    // Their names are for those who may read them.
                    check_access(&node.fd, Access::READ_OK)?;
                    rustix::fs::listxattr(node.proc_path(), &mut names[..])
                })?;
                let names = names[..len].split(|byte| *byte == 0);
                Ok(names.filter_map(|name| name.strip_prefix(b"user.")).map(<[u8]>::to_vec).collect())
            })
            .await
        })
    }
}
