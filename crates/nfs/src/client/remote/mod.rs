//! A directory of an NFS server as a file system, by version 4.1 or 4.2 ([`NfsFileSystem`]).
//!
//! - [`session`]: calls from any reactor, each executed once; [`recovery`]: the thread that makes sessions and keeps them alive.
//! - [`callbacks`]: calls of the server, and delegations. [`opens`]: files that are open on the server. [`handles`]: ids for the server's handles. [`attributes`]: their bytes.

mod attributes;
mod callbacks;
mod events;
mod handles;
mod opens;
mod options;
mod recovery;
mod session;

use self::attributes::{Described, Owner, of_entries, of_files, of_usage, put_changed, put_is_directory, put_set};
use self::events::{Event, Events};
use self::handles::Handles;
use self::opens::{ANONYMOUS, Opens, READ, WANT_NO_DELEGATION, WRITE, get_handle, get_opened, put_open};
pub use self::options::{ChooseRdma, NfsOptions};
use self::recovery::{Begun, Keeper};
use self::session::{Answer, Shared, body, errno};
use crate::client::compound::{Compound, Results};
use crate::client::{ClientError, Handle};
use crate::status::Status;
use crate::users::Users;
use crate::v4::attributes::number_of;
use crate::v4::bitmap::Bitmap;
use crate::v4::op;
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use thruway_engine::Segment;
use thruway_rpc::xdr::Decoder;
use thruway_tcp::Origin;
use thruway_vfs::identity::subvolume_number;
use thruway_vfs::{
    Allocate, As, Attributes, Credentials, Entry, FileId, FileSystem, Kind, Listing, Make, OnChange, Op, OpenGuard,
    ReadData, Result, Rights, Room, Seek, SetAttributes, SetXattr, Stability, Time, Usage,
};

/// Maximum number of files whose last writers are known.
const WRITERS_MAX: usize = 64 << 10;

/// Maximum number of directories whose verifiers of listings are known.
const VERIFIERS_MAX: usize = 4096;

/// Upper bound of the size of an entry of a listing with all attributes and without the name, in bytes.
const ENTRY_BYTES: usize = 400;

/// Longest reply to a listing.
const LISTING_MAX: usize = 256 << 10;

/// Maximum number of repetitions of a request because the server has lost the open of its file.
const REOPENS: usize = 3;

/// Interval between writes of new handles to their file.
const HANDLES_INTERVAL: Duration = Duration::from_millis(100);

/// A directory of an NFS server.
///
/// Every operation is executed by the server, which checks the rights of its user (`AUTH_SYS`). Nothing is cached. While the server does not
/// answer, operations that change something wait, and all others fail with `EAGAIN` after 30 s. After a restart of the server, files that
/// were open are opened again.
///
/// These parts of the contract of [`FileSystem`] depend on the server:
/// - rights to data, of files that are open ([`As::is_open`]) and of others;
/// - the existence of a file without a name until it is closed.
///
/// Other clients of the server do not know the locks of this host's clients. Leases are delegations of the server.
pub struct NfsFileSystem {
    shared: Arc<Shared>,
    opens: Arc<Opens>,
    handles: Arc<Handles>,
    users: Users,
    root: Handle,
    /// Number of the file system for clients, and on the server.
    fsid: u64,
    root_fsid: (u64, u64),
    /// Write verifier of the server, and the number of its changes.
    verifier: Mutex<Option<[u8; 8]>>,
    verifiers_seen: AtomicU64,
    /// Last writer of each file. A flush is executed as this user.
    writers: Mutex<HashMap<Handle, Credentials>>,
    /// Verifiers of listings.
    listings: Mutex<HashMap<Handle, [u8; 8]>>,
    thread: Option<JoinHandle<()>>,
}

impl NfsFileSystem {
    /// Connects to the server and looks up the directory. Blocks.
    ///
    /// # Errors
    /// If no address answers, the server does not support version 4.1, or there is no such directory.
    pub fn open(options: NfsOptions) -> io::Result<NfsFileSystem> {
        let (events, heard) = Events::new();
        let process = Credentials {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: Vec::new(),
        };
        let host = rustix::system::uname().nodename().to_bytes().to_vec();
        let shared =
            Shared::new(options.servers.clone(), options.rdma.clone(), options.delegations, process, host, events);
        let opens = Arc::new(Opens::default());
        let handles = Arc::new(Handles::open(options.handles.as_deref())?);
        let (ready, is_ready) = std::sync::mpsc::sync_channel(1);
        let thread = {
            let (shared, opens, handles) = (Arc::clone(&shared), Arc::clone(&opens), Arc::clone(&handles));
            let run = move || {
                let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(ready.send(Err(error))),
                };
                tokio::task::LocalSet::new().block_on(&runtime, async move {
                    let mut keeper = Keeper::new(shared, opens, options.owner.clone());
                    match keeper.begin(&options).await {
                        Ok(begun) => drop(ready.send(Ok(begun))),
                        Err(error) => return drop(ready.send(Err(io::Error::other(error.to_string())))),
                    }
                    let written = Arc::clone(&handles);
                    tokio::task::spawn_local(async move {
                        loop {
                            written.added.notified().await;
                            // More of them together.
                            tokio::time::sleep(HANDLES_INTERVAL).await;
                            let handles = Arc::clone(&written);
                            drop(tokio::task::spawn_blocking(move || handles.write()).await);
                        }
                    });
                    keeper.keep(heard).await;
                    handles.write();
                });
            };
            std::thread::Builder::new().name("nfs-client".into()).spawn(run)?
        };
        let begun = is_ready.recv().map_err(|_| io::Error::other("the client's thread has ended"))?;
        let Begun { root, described, server } = begun?;
        if described.attributes.kind != Kind::Directory {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&server).update(&described.fsid.0.to_be_bytes()).update(&described.fsid.1.to_be_bytes());
        let fsid = u64::from_be_bytes(*hasher.finalize().as_bytes().first_chunk().expect("a hash is longer"));
        Ok(NfsFileSystem {
            shared,
            opens,
            handles,
            users: Users::default(),
            root,
            fsid,
            root_fsid: described.fsid,
            verifier: Mutex::default(),
            verifiers_seen: AtomicU64::new(u64::from_be_bytes(thruway_engine::random::random())),
            writers: Mutex::default(),
            listings: Mutex::default(),
            thread: Some(thread),
        })
    }

    async fn handle(&self, file: &FileId) -> Result<Handle> {
        self.handles.handle(file).await
    }

    async fn call(&self, who: &Credentials, compound: Compound) -> Result<Answer> {
        self.shared.call(who, compound).await.map_err(errno)
    }

    /// Number of a user or a group with this name; `None` if the server has sent a number.
    async fn number(&self, owner: &Owner, is_group: bool) -> Result<Option<u32>> {
        let Owner::Name(name) = owner else { return Ok(None) };
        // All names count as those of one client.
        const SERVER: Origin = Origin::User(0);
        let found = match is_group {
            true => self.users.group_named(SERVER, name).await,
            false => self.users.named(SERVER, name).await.map(|user| user.map(|user| user.uid)),
        };
        found.map_err(|_| Errno::AGAIN)
    }

    /// Attributes for clients: with numbers of owners, and with the number of this file system.
    async fn attributes_of(&self, described: Described) -> Result<Attributes> {
        let mut attributes = described.attributes;
        if let Some(uid) = self.number(&described.owner, false).await? {
            attributes.uid = uid;
        }
        if let Some(gid) = self.number(&described.group, true).await? {
            attributes.gid = gid;
        }
        attributes.fsid = self.fsid;
        let (major, minor) = described.fsid;
        attributes.subvolume = match described.fsid == self.root_fsid {
            true => 0,
            false => subvolume_number(major, minor).max(1),
        };
        Ok(attributes)
    }

    /// The result of a GETATTR.
    async fn described(&self, results: &mut Results<'_>) -> Result<Attributes> {
        let described = results.next("GETATTR").and_then(|d| Described::decode(d)).map_err(errno)?;
        self.attributes_of(described).await
    }

    /// The results of a GETFH and a GETATTR.
    async fn found(&self, results: &mut Results<'_>) -> Result<(FileId, Attributes)> {
        let handle = results.next("GETFH").and_then(|d| get_handle(d)).map_err(errno)?;
        let attributes = self.described(results).await?;
        Ok((self.handles.id(&handle), attributes))
    }

    /// Executes a request about a file with the stateid of the user's open. If the server has lost the open, opens the file again.
    async fn call_open(
        &self,
        user: As<'_>,
        handle: &Handle,
        mut build: impl FnMut([u8; 16]) -> Compound,
    ) -> Result<Answer> {
        let mut left = REOPENS;
        loop {
            let stateid = if user.is_open { self.opens.stateid(handle, user.who.uid) } else { ANONYMOUS };
            let answer = self.call(user.who, build(stateid)).await?;
            match answer.status().map_err(errno)? {
                Status::BAD_STATEID
                | Status::OLD_STATEID
                | Status::STALE_STATEID
                | Status::EXPIRED
                | Status::ADMIN_REVOKED
                    if left > 0 && stateid != ANONYMOUS =>
                {
                    left -= 1;
                    self.opens.renew_stateid(&self.shared, handle, user.who.uid, stateid).await;
                }
                _ => return Ok(answer),
            }
        }
    }

    /// Records the verifier of a reply. If it has changed, unflushed data may be lost.
    fn note_verifier(&self, said: [u8; 8]) {
        let mut known = self.verifier.lock().expect("no panics under the lock");
        if known.replace(said).is_some_and(|before| before != said) {
            self.verifiers_seen.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn note_writer(&self, handle: &Handle, who: &Credentials) {
        let mut writers = self.writers.lock().expect("no panics under the lock");
        if writers.get(handle) == Some(who) {
            return;
        }
        if writers.len() >= WRITERS_MAX {
            writers.clear();
        }
        writers.insert(handle.clone(), who.clone());
    }

    fn writer(&self, handle: &Handle) -> Credentials {
        let writers = self.writers.lock().expect("no panics under the lock");
        writers.get(handle).unwrap_or(&self.shared.machine).clone()
    }

    fn listing_verifier(&self, handle: &Handle) -> [u8; 8] {
        self.listings.lock().expect("no panics under the lock").get(handle).copied().unwrap_or_default()
    }

    fn note_listing(&self, handle: &Handle, verifier: [u8; 8]) {
        let mut listings = self.listings.lock().expect("no panics under the lock");
        if listings.len() >= VERIFIERS_MAX {
            listings.clear();
        }
        if verifier != [0; 8] {
            listings.insert(handle.clone(), verifier);
        }
    }

    fn session_limits(&self) -> (usize, usize) {
        self.shared.session().map_or((64 << 10, 64 << 10), |session| (session.read_max, session.write_max))
    }

    async fn parent(&self, who: &Credentials, dir: &Handle) -> Result<(FileId, Attributes)> {
        let up = if *dir == self.root { at(dir) } else { at(dir).then(op::LOOKUPP, |_| {}) };
        let answer = self.call(who, up.then(op::GETFH, |_| {}).then(op::GETATTR, |out| of_files().encode(out))).await?;
        let mut results = answer.results().map_err(errno)?;
        results.next("PUTFH").map_err(errno)?;
        if *dir != self.root {
            results.next("LOOKUPP").map_err(errno)?;
        }
        self.found(&mut results).await
    }

    async fn make_other(
        &self,
        who: &Credentials,
        dir: &Handle,
        name: &[u8],
        what: Make,
        set: SetAttributes,
    ) -> Result<(FileId, Attributes)> {
        let create = at(dir).then(op::CREATE, |out| {
            match &what {
                Make::Directory => out.u32(number_of(Kind::Directory)),
                Make::SymbolicLink(to) => {
                    out.u32(number_of(Kind::SymbolicLink));
                    out.opaque(to);
                }
                Make::Special(kind, major, minor) => {
                    out.u32(number_of(*kind));
                    if matches!(kind, Kind::BlockDevice | Kind::CharacterDevice) {
                        [*major, *minor].into_iter().for_each(|word| out.u32(word));
                    }
                }
                Make::File | Make::NewFile | Make::Exclusive(_) => unreachable!("files are made by OPEN"),
            }
            out.opaque(name);
            put_set(out, &set);
        });
        let create = create.then(op::GETFH, |_| {}).then(op::GETATTR, |out| of_files().encode(out));
        let answer = self.call(who, create.that_changes()).await?;
        let mut results = answer.results().map_err(errno)?;
        results.next("PUTFH").map_err(errno)?;
        let d = results.next("CREATE").map_err(errno_of_directory)?;
        skip_change(d).map_err(errno)?;
        Bitmap::decode(d).map_err(|_| Errno::IO)?;
        self.found(&mut results).await
    }

    async fn make_file(
        &self,
        who: &Credentials,
        dir: &Handle,
        name: &[u8],
        number: Option<[u8; 8]>,
        set: SetAttributes,
    ) -> Result<(FileId, Attributes)> {
        let client = self.shared.client.load(Ordering::Relaxed);
        let open = at(dir).then(op::OPEN, |out| {
            put_open(out, client, who.uid, READ | WRITE | WANT_NO_DELEGATION, |out| {
                out.u32(1);
                match number {
                    // As GUARDED4: only if there is none.
                    None => out.u32(1),
                    // As EXCLUSIVE4_1.
                    Some(number) => {
                        out.u32(3);
                        out.fixed(&number);
                    }
                }
                put_set(out, &set);
            });
            out.u32(0);
            out.opaque(name);
        });
        let open = open.then(op::GETFH, |_| {}).then(op::GETATTR, |out| of_files().encode(out));
        let answer = self.call(who, open.that_changes()).await?;
        let mut results = answer.results().map_err(errno)?;
        results.next("PUTFH").map_err(errno)?;
        let opened = results.next("OPEN").and_then(|d| get_opened(d)).map_err(errno_of_directory)?;
        let handle = results.next("GETFH").and_then(|d| get_handle(d)).map_err(errno)?;
        self.opens.note_made(&self.shared, &handle, opened, who);
        let attributes = self.described(&mut results).await?;
        Ok((self.handles.id(&handle), attributes))
    }

    /// Takes an existing file instead of a new one, and truncates it.
    async fn take_file(
        &self,
        who: &Credentials,
        dir: &FileId,
        name: &[u8],
        size: Option<u64>,
    ) -> Result<(FileId, Attributes)> {
        let (file, attributes) = self.look_up(who, dir, name).await?;
        match (attributes.kind, size) {
            (Kind::Regular, None) => Ok((file, attributes)),
            (Kind::Regular, Some(_)) => {
                let set = SetAttributes { size, ..SetAttributes::default() };
                let attributes = self.set_attributes(As { who, is_open: false }, &file, set, None).await?;
                Ok((file, attributes))
            }
            _ => Err(Errno::EXIST),
        }
    }
}

impl Drop for NfsFileSystem {
    fn drop(&mut self) {
        self.shared.tell(Event::End);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// A compound about this file.
fn at(file: &[u8]) -> Compound {
    Compound::new().then(op::PUTFH, |out| out.opaque(file))
}

/// As [`errno`], of an operation that needs a directory.
fn errno_of_directory(error: ClientError) -> Errno {
    match error.status() {
        Some(Status::SYMLINK) => Errno::NOTDIR,
        _ => errno(error),
    }
}

/// `change_info4`
fn skip_change(d: &mut Decoder<'_>) -> crate::client::Result<()> {
    let _ = (d.bool()?, d.u64()?, d.u64()?);
    Ok(())
}

/// Checks the name of an entry.
fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.iter().any(|byte| matches!(byte, b'/' | 0)) {
        return Err(Errno::INVAL);
    }
    if name.len() > 255 { Err(Errno::NAMETOOLONG) } else { Ok(()) }
}

fn check_new_name(name: &[u8]) -> Result<()> {
    check_name(name)?;
    if name == b"." || name == b".." { Err(Errno::EXIST) } else { Ok(()) }
}

fn check_old_name(name: &[u8]) -> Result<()> {
    check_name(name)?;
    if name == b"." || name == b".." { Err(Errno::INVAL) } else { Ok(()) }
}

impl FileSystem for NfsFileSystem {
    fn root(&self) -> FileId {
        self.handles.id(&self.root)
    }

    fn fsid(&self) -> u64 {
        self.fsid
    }

    fn attributes<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        Box::pin(async move {
            let handle = self.handle(file).await?;
            self.opens.settle_closed(&self.shared, &handle).await;
            let answer =
                self.call(&self.shared.machine, at(&handle).then(op::GETATTR, |out| of_files().encode(out))).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            self.described(&mut results).await
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
            if set.uid == Some(u32::MAX) || set.gid == Some(u32::MAX) {
                return Err(Errno::INVAL);
            }
            let handle = self.handle(file).await?;
            let build = |stateid: [u8; 16]| {
                let mut compound = at(&handle);
                if let Some(changed) = guard {
                    compound = compound.then(op::VERIFY, |out| put_changed(out, changed));
                }
                let compound = compound.then(op::SETATTR, |out| {
                    out.fixed(&stateid);
                    put_set(out, &set);
                });
                compound.then(op::GETATTR, |out| of_files().encode(out)).that_changes()
            };
            let answer = self.call_open(user, &handle, build).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            if guard.is_some() {
                results.next("VERIFY").map_err(errno)?;
            }
            let d = results.next("SETATTR").map_err(errno)?;
            Bitmap::decode(d).map_err(|_| Errno::IO)?;
            self.described(&mut results).await
        })
    }

    fn look_up<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8]) -> Op<'a, (FileId, Attributes)> {
        Box::pin(async move {
            check_name(name)?;
            let handle = self.handle(dir).await?;
            if name == b".." {
                return self.parent(who, &handle).await;
            }
            let mut compound = at(&handle);
            if name != b"." {
                compound = compound.then(op::LOOKUP, |out| out.opaque(name));
            }
            let compound = compound.then(op::GETFH, |_| {}).then(op::GETATTR, |out| of_files().encode(out));
            let answer = self.call(who, compound).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            if name != b"." {
                results.next("LOOKUP").map_err(errno_of_directory)?;
            }
            let (found, attributes) = self.found(&mut results).await?;
            if name == b"." && attributes.kind != Kind::Directory {
                Err(Errno::NOTDIR)
            } else {
                Ok((found, attributes))
            }
        })
    }

    fn rights<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (Rights, Attributes)> {
        const READS: u32 = 1;
        const LOOKS_UP: u32 = 2;
        const MODIFIES: u32 = 4;
        const EXTENDS: u32 = 8;
        const EXECUTES: u32 = 0x20;
        Box::pin(async move {
            let handle = self.handle(file).await?;
            let asked = READS | LOOKS_UP | MODIFIES | EXTENDS | EXECUTES;
            let compound =
                at(&handle).then(op::ACCESS, |out| out.u32(asked)).then(op::GETATTR, |out| of_files().encode(out));
            let answer = self.call(who, compound).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            let d = results.next("ACCESS").map_err(errno)?;
            let (_supported, has) = (|| Ok((d.u32()?, d.u32()?)))().map_err(|error: ClientError| errno(error))?;
            let attributes = self.described(&mut results).await?;
            let is_directory = attributes.kind == Kind::Directory;
            let rights = Rights {
                read: wanted.read && has & READS != 0,
                write: wanted.write && has & (MODIFIES | EXTENDS) == MODIFIES | EXTENDS,
                execute: wanted.execute && has & if is_directory { LOOKS_UP } else { EXECUTES } != 0,
            };
            Ok((rights, attributes))
        })
    }

    fn read_link<'a>(&'a self, file: &'a FileId) -> Op<'a, Vec<u8>> {
        Box::pin(async move {
            let handle = self.handle(file).await?;
            let compound = at(&handle).then(op::READLINK, |_| {}).with_long_results(8 << 10);
            let answer = self.call(&self.shared.machine, compound).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            let d = results.next("READLINK").map_err(errno)?;
            Ok(d.opaque(4096).map_err(|_| Errno::IO)?.to_vec())
        })
    }

    fn open<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (OpenGuard, Attributes)> {
        Box::pin(async move {
            let handle = self.handle(file).await?;
            // In a task of its own: the open is recorded, and closed again, also if the caller stops waiting.
            let opening = {
                let (shared, opens, who) = (Arc::clone(&self.shared), Arc::clone(&self.opens), who.clone());
                let handle = handle.clone();
                tokio::task::spawn_local(async move { opens.open(&shared, &who, &handle, wanted).await })
            };
            let (guard, described) = match opening.await.map_err(|_| Errno::IO)? {
                // Version 4.0, and some servers of later versions, have one status for links and all special files.
                Err(Errno::LOOP) if self.attributes(file).await?.kind != Kind::SymbolicLink => return Err(Errno::NXIO),
                opened => opened?,
            };
            let attributes = match described {
                Some(described) => self.attributes_of(described).await?,
                None => self.attributes(file).await?,
            };
            Ok((Arc::new(guard) as OpenGuard, attributes))
        })
    }

    fn read<'a>(&'a self, user: As<'a>, file: &'a FileId, at_byte: u64, mut segment: Segment) -> Op<'a, ReadData> {
        Box::pin(async move {
            let handle = self.handle(file).await?;
            let wanted = segment.len();
            let read_max = self.session_limits().0;
            let (mut filled, mut attributes) = (0, None);
            // Linux's server refuses larger offsets.
            if at_byte > i64::MAX as u64 {
                let attributes = self.attributes(file).await?;
                drop(segment.split_off(0));
                return Ok(ReadData { segment, is_end: true, attributes: Some(attributes) });
            }
            let is_end = loop {
                let len = (wanted - filled).min(read_max);
                let from = at_byte + filled as u64;
                // They are needed if the rights of the user were not checked by an open.
                let with_attributes = !user.is_open && attributes.is_none();
                let build = |stateid: [u8; 16]| {
                    let mut compound = at(&handle);
                    if with_attributes {
                        compound = compound.then(op::GETATTR, |out| of_files().encode(out));
                    }
                    let compound = compound.then(op::READ, |out| {
                        out.fixed(&stateid);
                        out.u64(from);
                        out.u32(len as u32);
                    });
                    compound.with_data(len)
                };
                let answer = self.call_open(user, &handle, build).await?;
                let mut results = answer.results().map_err(errno)?;
                results.next("PUTFH").map_err(errno)?;
                if with_attributes {
                    attributes = Some(self.described(&mut results).await?);
                }
                let d = results.next("READ").map_err(errno)?;
                let is_end = d.bool().map_err(|_| Errno::IO)?;
                let data = d.bulk(len as u32).map_err(|_| Errno::IO)?;
                segment.as_mut_slice()[filled..filled + data.len()].copy_from_slice(data.as_slice());
                filled += data.len();
                if data.is_empty() && !is_end && len > 0 {
                    // Neither data nor the end: the next request would return the same.
                    return Err(Errno::IO);
                }
                if is_end || filled == wanted {
                    break is_end;
                }
            };
            drop(segment.split_off(filled));
            Ok(ReadData { segment, is_end, attributes })
        })
    }

    fn write<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        at_byte: u64,
        segment: Segment,
        stability: Stability,
    ) -> Op<'a, Attributes> {
        Box::pin(async move {
            let handle = self.handle(file).await?;
            self.note_writer(&handle, user.who);
            let write_max = self.session_limits().1;
            let (segment, mut written) = (Arc::new(segment), 0);
            loop {
                let piece = written..segment.len().min(written + write_max);
                let from = at_byte + written as u64;
                let build = |stateid: [u8; 16]| {
                    let write = at(&handle).then(op::WRITE, |out| {
                        out.fixed(&stateid);
                        out.u64(from);
                        out.u32(stability as u32);
                        out.bulk(body(&segment, piece.clone()));
                    });
                    write.then(op::GETATTR, |out| of_files().encode(out)).that_changes()
                };
                let answer = self.call_open(user, &handle, build).await?;
                let mut results = answer.results().map_err(errno)?;
                results.next("PUTFH").map_err(errno)?;
                let d = results.next("WRITE").map_err(errno)?;
                let said = (|| Ok((d.u32()?, d.u32()?, *d.fixed::<8>()?)))();
                let (count, committed, verifier) = said.map_err(|error: ClientError| errno(error))?;
                self.note_verifier(verifier);
                let count = (count as usize).min(piece.len());
                if count == 0 && !piece.is_empty() {
                    return Err(Errno::IO);
                }
                let attributes = self.described(&mut results).await?;
                written += count;
                if written < segment.len() {
                    continue;
                }
                // The data is less stable than requested.
                if committed < stability as u32 {
                    return self.flush(file).await;
                }
                return Ok(attributes);
            }
        })
    }

    fn flush<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes> {
        Box::pin(async move {
            let handle = self.handle(file).await?;
            let commit = at(&handle).then(op::COMMIT, |out| {
                out.u64(0);
                out.u32(0);
            });
            let commit = commit.then(op::GETATTR, |out| of_files().encode(out));
            let answer = self.call(&self.writer(&handle), commit.that_changes()).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            let verifier = *results.next("COMMIT").map_err(errno)?.fixed::<8>().map_err(|_| Errno::IO)?;
            self.note_verifier(verifier);
            self.described(&mut results).await
        })
    }

    fn write_verifier(&self) -> u64 {
        self.verifiers_seen.load(Ordering::Relaxed)
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
            check_new_name(name)?;
            let handle = self.handle(dir).await?;
            match what {
                Make::NewFile => self.make_file(who, &handle, name, None, set).await,
                Make::Exclusive(number) => self.make_file(who, &handle, name, Some(number), set).await,
                Make::File => loop {
                    match self.make_file(who, &handle, name, None, set).await {
                        Err(Errno::EXIST) => {}
                        made => break made,
                    }
                    match self.take_file(who, dir, name, set.size).await {
                        // It was removed in the meantime.
                        Err(Errno::NOENT) => {}
                        taken => break taken,
                    }
                },
                what => self.make_other(who, &handle, name, what, set).await,
            }
        })
    }

    fn remove<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8], is_directory: bool) -> Op<'a, ()> {
        Box::pin(async move {
            check_old_name(name)?;
            let handle = self.handle(dir).await?;
            let check = if is_directory { op::VERIFY } else { op::NVERIFY };
            let remove = at(&handle)
                .then(op::LOOKUP, |out| out.opaque(name))
                .then(op::GETFH, |_| {})
                .then(check, put_is_directory)
                .then(op::PUTFH, |out| out.opaque(&handle))
                .then(op::REMOVE, |out| out.opaque(name));
            let answer = self.call(who, remove.that_changes()).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            results.next("LOOKUP").map_err(errno_of_directory)?;
            let file = results.next("GETFH").and_then(|d| get_handle(d)).map_err(errno)?;
            results.next("VERIFY").map_err(|error| match error.status() {
                Some(Status::NOT_SAME) => Errno::NOTDIR,
                Some(Status::SAME) => Errno::ISDIR,
                _ => errno(error),
            })?;
            results.next("PUTFH").map_err(errno)?;
            results.next("REMOVE").map_err(errno)?;
            // A new file is still open for its creator: it is closed, so that it does not outlive its last name.
            self.opens.settle(&self.shared, &file).await;
            Ok(())
        })
    }

    fn rename<'a>(
        &'a self,
        who: &'a Credentials,
        from: (&'a FileId, &'a [u8]),
        to: (&'a FileId, &'a [u8]),
    ) -> Op<'a, ()> {
        Box::pin(async move {
            check_old_name(from.1)?;
            check_old_name(to.1)?;
            let (from_dir, to_dir) = (self.handle(from.0).await?, self.handle(to.0).await?);
            let replaced = match self.opens.any_unused() {
                true => self.look_up(who, to.0, to.1).await.ok(),
                false => None,
            };
            let rename = at(&from_dir).then(op::SAVEFH, |_| {}).then(op::PUTFH, |out| out.opaque(&to_dir)).then(
                op::RENAME,
                |out| {
                    out.opaque(from.1);
                    out.opaque(to.1);
                },
            );
            self.changed(who, rename, &["PUTFH", "SAVEFH", "PUTFH", "RENAME"]).await?;
            if let Some((file, _)) = replaced {
                self.opens.settle(&self.shared, &self.handle(&file).await?).await;
            }
            Ok(())
        })
    }

    fn link<'a>(&'a self, who: &'a Credentials, file: &'a FileId, dir: &'a FileId, name: &'a [u8]) -> Op<'a, ()> {
        Box::pin(async move {
            check_new_name(name)?;
            let (file, dir) = (self.handle(file).await?, self.handle(dir).await?);
            let link = at(&file)
                .then(op::SAVEFH, |_| {})
                .then(op::PUTFH, |out| out.opaque(&dir))
                .then(op::LINK, |out| out.opaque(name));
            self.changed(who, link, &["PUTFH", "SAVEFH", "PUTFH", "LINK"]).await
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
            let handle = self.handle(dir).await?;
            let mut listing = Listing::default();
            let mut left = room.bytes;
            if cookie < 2 {
                let own = self.look_up(who, dir, b".").await?;
                let above = self.parent(who, &handle).await?;
                for (at, name, (file, attributes)) in [(1, &b"."[..], own), (2, b"..", above)] {
                    if at > cookie {
                        let number = attributes.number;
                        let file = with_files.then_some((file, attributes));
                        listing.entries.push(Entry { name: name.to_vec(), number, cookie: at, file });
                        left = left.saturating_sub(room.entry + name.len());
                    }
                }
            }
            let from = if cookie <= 2 { 0 } else { cookie };
            let count = left / (room.entry + 16) + 1;
            let bytes = (count * ENTRY_BYTES).clamp(8 << 10, LISTING_MAX) as u32;
            let verifier = if from == 0 { [0; 8] } else { self.listing_verifier(&handle) };
            let list = at(&handle).then(op::READDIR, |out| {
                out.u64(from);
                out.fixed(&verifier);
                [bytes, bytes].into_iter().for_each(|word| out.u32(word));
                of_entries(with_files).encode(out);
            });
            let answer = self.call(who, list.with_long_results(bytes as usize + 1024)).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            let d = results.next("READDIR").map_err(errno_of_directory)?;
            let said = get_listing(d).map_err(errno)?;
            self.note_listing(&handle, said.verifier);
            listing.is_end = said.is_end;
            for (name, cookie, described) in said.entries {
                if !listing.entries.is_empty() && left < room.entry + name.len() {
                    listing.is_end = false;
                    break;
                }
                left = left.saturating_sub(room.entry + name.len());
                let number = described.attributes.number_in_parent;
                let file = match (described.handle.clone(), described.error) {
                    (Some(handle), None) if with_files => {
                        Some((self.handles.id(&handle), self.attributes_of(described).await?))
                    }
                    _ => None,
                };
                listing.entries.push(Entry { name, number, cookie, file });
            }
            Ok(listing)
        })
    }

    fn usage(&self) -> Op<'_, Usage> {
        Box::pin(async move {
            let compound = at(&self.root).then(op::GETATTR, |out| of_usage().encode(out));
            let answer = self.call(&self.shared.machine, compound).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            let described = results.next("GETATTR").and_then(|d| Described::decode(d)).map_err(errno)?;
            Ok(described.usage)
        })
    }

    fn seek<'a>(&'a self, user: As<'a>, file: &'a FileId, at_byte: u64, what: Seek) -> Op<'a, u64> {
        Box::pin(async move {
            self.check_minor_2()?;
            let handle = self.handle(file).await?;
            let build = |stateid: [u8; 16]| {
                at(&handle).then(op::SEEK, |out| {
                    out.fixed(&stateid);
                    out.u64(at_byte);
                    out.u32(if what == Seek::Data { 0 } else { 1 });
                })
            };
            let answer = self.call_open(user, &handle, build).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            let d = results.next("SEEK").map_err(errno)?;
            let (is_end, found) = (|| Ok((d.bool()?, d.u64()?)))().map_err(|error: ClientError| errno(error))?;
            if is_end && what == Seek::Data { Err(Errno::NXIO) } else { Ok(found) }
        })
    }

    fn allocate<'a>(&'a self, user: As<'a>, file: &'a FileId, at_byte: u64, len: u64, what: Allocate) -> Op<'a, ()> {
        Box::pin(async move {
            self.check_minor_2()?;
            let handle = self.handle(file).await?;
            self.note_writer(&handle, user.who);
            let (number, name) = match what {
                Allocate::Reserve => (op::ALLOCATE, "ALLOCATE"),
                Allocate::Punch => (op::DEALLOCATE, "DEALLOCATE"),
            };
            let build = |stateid: [u8; 16]| {
                let allocate = at(&handle).then(number, |out| {
                    out.fixed(&stateid);
                    [at_byte, len].into_iter().for_each(|word| out.u64(word));
                });
                allocate.that_changes()
            };
            let answer = self.call_open(user, &handle, build).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            results.next(name).map(drop).map_err(errno)
        })
    }

    fn copy<'a>(
        &'a self,
        user: As<'a>,
        from: (&'a FileId, u64),
        to: (&'a FileId, u64),
        len: u64,
        shared: bool,
    ) -> Op<'a, u64> {
        Box::pin(async move {
            self.check_minor_2()?;
            let (source, target) = (self.handle(from.0).await?, self.handle(to.0).await?);
            self.note_writer(&target, user.who);
            let of_target = |stateid: [u8; 16]| {
                let of_source = if user.is_open { self.opens.stateid(&source, user.who.uid) } else { ANONYMOUS };
                let compound = at(&source).then(op::SAVEFH, |_| {}).then(op::PUTFH, |out| out.opaque(&target));
                let number = if shared { op::CLONE } else { op::COPY };
                let copy = compound.then(number, |out| {
                    [of_source, stateid].iter().for_each(|stateid| out.fixed(stateid));
                    [from.1, to.1, len].into_iter().for_each(|word| out.u64(word));
                    if !shared {
                        // Consecutive and synchronous, within this server.
                        [1, 1, 0].into_iter().for_each(|word| out.u32(word));
                    }
                });
                copy.that_changes()
            };
            let answer = self.call_open(user, &target, of_target).await?;
            let mut results = answer.results().map_err(errno)?;
            for operation in ["PUTFH", "SAVEFH", "PUTFH"] {
                results.next(operation).map_err(errno)?;
            }
            if shared {
                results.next("CLONE").map_err(errno)?;
                return Ok(len);
            }
            let d = results.next("COPY").map_err(errno)?;
            let said = (|| Ok((d.array(1, |d| d.fixed::<16>().copied())?, d.u64()?, d.u32()?, *d.fixed::<8>()?)))();
            let (running, count, _committed, verifier) = said.map_err(|error: ClientError| errno(error))?;
            if !running.is_empty() {
                // An asynchronous copy was not requested: its end would be reported by a callback.
                return Err(Errno::IO);
            }
            self.note_verifier(verifier);
            Ok(count)
        })
    }

    fn lease<'a>(&'a self, file: &'a FileId, on_change: OnChange) -> Op<'a, OpenGuard> {
        Box::pin(async move {
            let handle = self.handle(file).await?;
            let delegation = self.opens.delegation(&self.shared, &handle).ok_or(Errno::AGAIN)?;
            let lease = delegation.lease(on_change).ok_or(Errno::AGAIN)?;
            Ok(Arc::new(lease) as OpenGuard)
        })
    }

    fn xattr<'a>(&'a self, who: &'a Credentials, file: &'a FileId, name: &'a [u8]) -> Op<'a, Vec<u8>> {
        Box::pin(async move {
            self.check_minor_2()?;
            let handle = self.handle(file).await?;
            let compound = at(&handle).then(op::GETXATTR, |out| out.opaque(name)).with_long_results(XATTR_MAX);
            let answer = self.call(who, compound).await?;
            let mut results = answer.results().map_err(errno)?;
            results.next("PUTFH").map_err(errno)?;
            let d = results.next("GETXATTR").map_err(errno)?;
            Ok(d.opaque(XATTR_MAX as u32).map_err(|_| Errno::IO)?.to_vec())
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
            self.check_minor_2()?;
            let handle = self.handle(file).await?;
            let (compound, last) = match value {
                None => (at(&handle).then(op::REMOVEXATTR, |out| out.opaque(name)), "REMOVEXATTR"),
                Some((value, how)) => {
                    let set = at(&handle).then(op::SETXATTR, |out| {
                        out.u32(match how {
                            SetXattr::Either => 0,
                            SetXattr::Create => 1,
                            SetXattr::Replace => 2,
                        });
                        out.opaque(name);
                        out.opaque(value);
                    });
                    (set, "SETXATTR")
                }
            };
            self.changed(who, compound, &["PUTFH", last]).await
        })
    }

    fn xattrs<'a>(&'a self, who: &'a Credentials, file: &'a FileId) -> Op<'a, Vec<Vec<u8>>> {
        Box::pin(async move {
            self.check_minor_2()?;
            let handle = self.handle(file).await?;
            let (mut names, mut cookie) = (Vec::new(), 0);
            loop {
                let list = at(&handle).then(op::LISTXATTRS, |out| {
                    out.u64(cookie);
                    out.u32(XATTR_MAX as u32);
                });
                let answer = self.call(who, list.with_long_results(XATTR_MAX + 1024)).await?;
                let mut results = answer.results().map_err(errno)?;
                results.next("PUTFH").map_err(errno)?;
                let d = results.next("LISTXATTRS").map_err(errno)?;
                let said = (|| {
                    let next = d.u64()?;
                    Ok((next, d.array(XATTR_MAX as u32, |d| Ok(d.opaque(255)?.to_vec()))?, d.bool()?))
                })();
                let (next, more, is_end) = said.map_err(|error: ClientError| errno(error))?;
                let is_over = is_end || more.is_empty();
                names.extend(more);
                if is_over {
                    return Ok(names);
                }
                if names.len() > XATTR_MAX {
                    return Err(Errno::TOOBIG);
                }
                cookie = next;
            }
        })
    }
}

/// Most bytes of an extended attribute, and of a list of their names (`XATTR_SIZE_MAX`).
const XATTR_MAX: usize = 64 << 10;

impl NfsFileSystem {
    /// Fails if the server does not support minor version 2.
    fn check_minor_2(&self) -> Result<()> {
        if self.shared.minor.load(Ordering::Relaxed) >= 2 { Ok(()) } else { Err(Errno::OPNOTSUPP) }
    }

    /// Executes a change whose results are only statuses.
    async fn changed(&self, who: &Credentials, compound: Compound, operations: &[&'static str]) -> Result<()> {
        let answer = self.call(who, compound.that_changes()).await?;
        let mut results = answer.results().map_err(errno)?;
        operations.iter().try_for_each(|operation| results.next(operation).map(drop)).map_err(errno_of_directory)
    }
}

/// A part of a listing.
struct Said {
    verifier: [u8; 8],
    entries: Vec<(Vec<u8>, u64, Described)>,
    is_end: bool,
}

fn get_listing(d: &mut Decoder<'_>) -> crate::client::Result<Said> {
    let verifier = *d.fixed()?;
    let mut entries = Vec::new();
    while d.bool()? {
        let cookie = d.u64()?;
        let name = d.opaque(4096)?.to_vec();
        let described = Described::decode(d)?;
        // Linux's clients do not accept larger cookies.
        if cookie > i64::MAX as u64 || cookie < 3 || check_old_name(&name).is_err() {
            return Err(ClientError::Status { operation: "READDIR", status: Status::SERVERFAULT.0 });
        }
        entries.push((name, cookie, described));
    }
    let is_end = d.bool()?;
    if entries.is_empty() && !is_end {
        // The next request would return the same.
        return Err(ClientError::Status { operation: "READDIR", status: Status::SERVERFAULT.0 });
    }
    Ok(Said { verifier, entries, is_end })
}

/// Decodes results of a hostile server, for the fuzzer. Must neither panic nor allocate much memory.
pub(crate) fn decode_results(first: u8, data: &[u8]) {
    let mut d = Decoder::new(data);
    for kind in u32::from(first).. {
        let is_decoded = match kind % 4 {
            0 => Described::decode(&mut d).is_ok(),
            1 => get_opened(&mut d).is_ok(),
            2 => get_listing(&mut d).is_ok(),
            _ => get_handle(&mut d).is_ok(),
        };
        if !is_decoded || d.rest().is_empty() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v4::attributes;
    use proptest::prelude::*;
    use thruway_rpc::xdr::Encoder;
    use thruway_vfs::SetTime;

    fn times() -> impl Strategy<Value = Time> {
        (any::<i64>(), 0..1_000_000_000_u32).prop_map(|(seconds, nanoseconds)| Time { seconds, nanoseconds })
    }

    fn kinds() -> impl Strategy<Value = Kind> {
        prop_oneof![
            Just(Kind::Regular),
            Just(Kind::Directory),
            Just(Kind::BlockDevice),
            Just(Kind::CharacterDevice),
            Just(Kind::SymbolicLink),
            Just(Kind::Socket),
            Just(Kind::Fifo),
        ]
    }

    prop_compose! {
        fn files()(
            kind in kinds(),
            (mode, links) in (0..0o10000_u32, any::<u32>()),
            (uid, gid) in (0..u32::MAX, 0..u32::MAX),
            (size, used, change) in (any::<u64>(), any::<u64>(), any::<u64>()),
            device in any::<(u32, u32)>(),
            (number, number_in_parent) in any::<(u64, u64)>(),
            (accessed, modified, changed) in (times(), times(), times()),
        ) -> Attributes {
            let (fsid, subvolume) = (0, 0);
            Attributes {
                kind, mode, links, uid, gid, size, used, device, fsid, subvolume, number, number_in_parent, accessed, modified,
                changed, change,
            }
        }
    }

    proptest! {
        /// The client decodes the attributes that our server encodes.
        #[test]
        fn attributes_come_back(file in files(), fsid in any::<(u64, u64)>(), handle in prop::collection::vec(any::<u8>(), 1..128)) {
            let described = attributes::Described {
                minor: 2,
                lease_seconds: 90,
                attributes: &file,
                fsid,
                handle: &handle,
                mounted_on: file.number_in_parent,
                usage: Usage::default(),
                acl: None,
            };
            let mut out = Encoder::new();
            attributes::encode(&mut out, &of_entries(true), &described);
            let bytes = out.to_bytes();
            let mut d = Decoder::new(&bytes);
            let said = Described::decode(&mut d).unwrap();
            prop_assert_eq!(said.attributes, file);
            prop_assert_eq!((said.fsid, said.handle.as_deref(), said.error), (fsid, Some(&handle[..]), None));
            prop_assert!(d.finish().is_ok());
        }

        /// Our server decodes the attributes that the client sets.
        #[test]
        fn changes_come_back(
            size in proptest::option::of(0..i64::MAX as u64),
            mode in proptest::option::of(0..0o10000_u32),
            (uid, gid) in (proptest::option::of(0..u32::MAX), proptest::option::of(0..u32::MAX)),
            accessed in proptest::option::of(proptest::option::of(times())),
            modified in proptest::option::of(proptest::option::of(times())),
        ) {
            let time = |time: Option<Time>| time.map_or(SetTime::Now, SetTime::To);
            let set = SetAttributes { mode, uid, gid, size, accessed: accessed.map(time), modified: modified.map(time) };
            let mut out = Encoder::new();
            put_set(&mut out, &set);
            let bytes = out.to_bytes();
            prop_assert_eq!(attributes::decode(&mut Decoder::new(&bytes), 2).unwrap().set, set);
        }

        #[test]
        fn nonsense_is_an_error(first in any::<u8>(), data in prop::collection::vec(any::<u8>(), 0..400)) {
            decode_results(first, &data);
        }
    }
}
