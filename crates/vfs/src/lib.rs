//! File systems: the interface between them and the services that export them ([`FileSystem`]), and two implementations.
//!
//! - [`LocalFileSystem`]: a directory of this host; [`MemoryFileSystem`].
//! - [`acl`]: access control lists, of both kinds.
//! - [`identity`]: identity of files and file systems, for handles, client state and attributes.
//! - [`workers`]: threads for operations that may wait.
//! - `conformance`: tests of the contract for every implementation (feature `conformance`).

#![forbid(unsafe_code)]

pub mod acl;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod identity;
mod local;
mod memory;
pub mod workers;

pub use local::{LocalFileSystem, LocalOptions};
pub use memory::MemoryFileSystem;

use crate::acl::{Acl, PosixAcl};
/// Error numbers of the system.
pub use rustix::io::Errno;
use smallvec::SmallVec;
use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use thruway_engine::Segment;
use thruway_engine::pipes::{Piped, Pipes};
pub use thruway_fs::Credentials;
pub use thruway_fs::lease::OnChange;

/// Result of an operation; the error is the system's.
pub type Result<T> = std::result::Result<T, Errno>;

/// An operation in progress on a reactor.
pub type Op<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + 'a>>;

/// Most bytes of a [`FileId`].
pub const FILE_ID_MAX: usize = 40;

/// What a file system calls a file, whatever its names are, also after a restart. At most [`FILE_ID_MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub SmallVec<[u8; 24]>);

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Data.
    Regular,
    /// A directory.
    Directory,
    /// A block device.
    BlockDevice,
    /// A character device.
    CharacterDevice,
    /// A symbolic link.
    SymbolicLink,
    /// A socket.
    Socket,
    /// A named pipe.
    Fifo,
}

/// A time of a file, since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time {
    /// Seconds.
    pub seconds: i64,
    /// Nanoseconds; less than 1,000,000,000.
    pub nanoseconds: u32,
}

/// What there is to know of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// What it is.
    pub kind: Kind,
    /// Permissions, with the set-user-ID, set-group-ID and sticky bits.
    pub mode: u32,
    /// Names.
    pub links: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Bytes of storage.
    pub used: u64,
    /// Major and minor number, of a device.
    pub device: (u32, u32),
    /// The file system that it is in.
    pub fsid: u64,
    /// Its subvolume; 0 for the subvolume of the root directory. File numbers are unique within a subvolume.
    pub subvolume: u64,
    /// Its number in the subvolume.
    pub number: u64,
    /// Its number in listings of its directory; differs from `number` for the root directory of a subvolume.
    pub number_in_parent: u64,
    /// Last read.
    pub accessed: Time,
    /// Data last changed.
    pub modified: Time,
    /// Anything last changed.
    pub changed: Time,
    /// Another number after every change (`change` of NFS version 4); it need not grow.
    pub change: u64,
}

/// A time to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The server's time.
    Now,
    /// This one.
    To(Time),
}

/// What is to be changed of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// As [`Attributes::mode`].
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Bytes.
    pub size: Option<u64>,
    /// Last read.
    pub accessed: Option<SetTime>,
    /// Data last changed.
    pub modified: Option<SetTime>,
}

impl SetAttributes {
    /// An owner or a group that is the number of none cannot be set.
    fn check(&self) -> Result<()> {
        if self.uid == Some(u32::MAX) || self.gid == Some(u32::MAX) { Err(Errno::INVAL) } else { Ok(()) }
    }
}

/// Rights to a file that a user may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rights {
    /// Read the data or list the directory.
    pub read: bool,
    /// Write the data, or add and remove entries of the directory.
    pub write: bool,
    /// Execute the file, or look up entries of the directory.
    pub execute: bool,
}

/// What is to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Make {
    /// A file; one that is there is taken instead, and cut to the size if one is set.
    File,
    /// A file that is not there yet.
    NewFile,
    /// As [`Make::NewFile`]; one that was made with the same number is taken for a call that is repeated.
    Exclusive([u8; 8]),
    /// A directory.
    Directory,
    /// A symbolic link to this.
    SymbolicLink(Vec<u8>),
    /// A special file; devices have a major and a minor number.
    Special(Kind, u32, u32),
}

/// Times that store the verifier of an exclusive creation (RFC 1813, section 3.3.8). Each half of the verifier becomes a time: 31 bits
/// are its seconds, which every file system can store, and the highest bit is half a second.
pub fn exclusive_times(number: [u8; 8]) -> (Time, Time) {
    let [a, b, c, d, e, f, g, h] = number;
    let time = |bytes| {
        let half = u32::from_be_bytes(bytes);
        Time { seconds: i64::from(half & 0x7fff_ffff), nanoseconds: (half >> 31) * 500_000_000 }
    };
    (time([a, b, c, d]), time([e, f, g, h]))
}

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: Vec<u8>,
    /// The number of its file.
    pub number: u64,
    /// Where to go on behind it ([`FileSystem`], cookies).
    pub cookie: u64,
    /// What it leads to, if that was asked for and can be told.
    pub file: Option<(FileId, Attributes)>,
}

/// A part of a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// Its entries, `.` and `..` included.
    pub entries: Vec<Entry>,
    /// Whether there are no more behind them.
    pub is_end: bool,
}

/// Room for entries of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: usize,
    /// What an entry takes beside its name.
    pub entry: usize,
}

/// How full a file system is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes that are free.
    pub bytes_free: u64,
    /// Bytes that are free for those who are not root.
    pub bytes_available: u64,
    /// Files in all.
    pub files: u64,
    /// Files that can still be made.
    pub files_free: u64,
}

/// Data that is lent to be sent.
pub struct LentData {
    /// The data: at least one byte.
    pub pages: Piped,
    /// As [`ReadData::is_end`].
    pub is_end: bool,
    /// As [`ReadData::attributes`].
    pub attributes: Option<Attributes>,
}

/// Data that has been read.
pub struct ReadData {
    /// The data: the segment that was given, cut to what there was.
    pub segment: Segment,
    /// Whether the file ends behind it.
    pub is_end: bool,
    /// What the file was like before it was read; always there if the user's rights were not checked when it was opened.
    pub attributes: Option<Attributes>,
}

/// Keeps a file open: until all copies are dropped it can be read and written, also when its last name is gone.
pub type OpenGuard = Arc<dyn Any + Send + Sync>;

/// As whom data is read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct As<'a> {
    /// The user.
    pub who: &'a Credentials,
    /// The user's rights were checked when the file was opened ([`FileSystem::open`]).
    pub is_open: bool,
}

/// What is looked for in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// Data.
    Data,
    /// A hole; the end of the file counts as one.
    Hole,
}

/// What is done to the storage of a part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocate {
    /// There is storage for it afterwards; the file grows if it ends before.
    Reserve,
    /// It is a hole afterwards; the file keeps its length.
    Punch,
}

/// What is wanted of an extended attribute that is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetXattr {
    /// It may be there or not.
    Either,
    /// It must not be there.
    Create,
    /// It must be there.
    Replace,
}

/// How far written data has to get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stability {
    /// Nowhere.
    Unstable,
    /// It survives a loss of power, with what is needed to read it.
    Data,
    /// It survives a loss of power.
    File,
}

/// A file system.
///
/// # Contract
///
/// The protocols check what belongs to them (handles, shares, read-only rules, locks, limits on lengths) and rely on the rest:
///
/// - **Users.** Every operation is done as the user who asks (`who`), whose rights are checked as a kernel would. There are two
///   exceptions, because clients of version 3 do not open files: unless [`As::is_open`], the owner of a file may read and write its
///   data whatever its mode, and who may execute it may read it.
/// - **Names** of entries come as they were sent, at most 255 bytes by version 4 and 4,096 by version 3. An empty one, and one with
///   `/` or a zero byte, must be refused (`EINVAL`), one that is too long is `ENAMETOOLONG`, and no name may lead out of the file
///   system. [`FileSystem::look_up`] takes `.` and `..`, everything else refuses them (`EINVAL`, or `EEXIST` where something is made).
/// - **Files** keep their [`FileId`] for as long as they are there, also after a restart if clients are to go on then. A file that
///   is gone is `ESTALE`; one that was opened is there until the last [`OpenGuard`] is dropped, also without a name. What is not in
///   the form of a `FileId` of this file system is `ESTALE`, too: clients keep handles for years.
/// - **Kinds.** A directory is needed and there is none: `ENOTDIR`. Data of a directory: `EISDIR`; of a symbolic link: `ELOOP` by
///   [`FileSystem::open`] and `EINVAL` elsewhere; of other kinds: `ENXIO` by `open` and `EINVAL` elsewhere.
/// - **Changes.** [`Attributes::change`] is another number after every change, and `changed` and `modified` do not go back.
/// - **Durability.** When an operation that changes names or attributes has succeeded, a loss of power does not take it back, unless
///   that was agreed on with the user. Data is durable as its [`Stability`] says, or after [`FileSystem::flush`]. If data that was
///   written without stability may have been lost while this process lives (a write-back error), [`FileSystem::write_verifier`]
///   changes, and the flush fails.
/// - **Waiting.** Operations are polled on reactors, each of which serves many clients: what may take long goes to another thread.
///   Any number run at a time, in any order. One may be dropped before it has ended; what it has begun then has either happened or
///   not, and holds nothing.
/// - **Cookies** of [`FileSystem::list`] are 0 at the beginning, at least 3 behind an entry other than `.` and `..` (version 4 reserves 1 and 2), and at
///   most 2^63-1, which is what Linux's clients take. They stay good while other entries come and go: an entry that is there all the
///   time is listed once.
/// - **Limits.** When too many files are open or no memory is left: `ENOSPC` by `open`, so that clients which are not heard of any
///   more give way; `EAGAIN` elsewhere, so that clients ask again.
/// - **What it lacks** is `EOPNOTSUPP`, which clients understand of the operations with a body here. Extended attributes are said to
///   be there, and fail so.
///
/// `custom_file_system.rs` (crate `thruway-nfs`, examples) is a small one; `conformance.rs` tests the contract.
pub trait FileSystem: Send + Sync {
    /// Its root directory.
    fn root(&self) -> FileId;

    /// Number of the file system: equal for two shares with files in common, different for all others. It is [`Attributes::fsid`] and
    /// part of handles, which become stale when it changes.
    fn fsid(&self) -> u64;

    /// Limit of files open at the same time, if there is one. The hosts of clients share it.
    fn open_files_max(&self) -> Option<usize> {
        None
    }

    /// What there is to know of a file.
    fn attributes<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes>;

    /// Changes a file; with `guard`, only if it has not been changed since then (else `EAGAIN`). [`As::is_open`] permits changing the
    /// size, and nothing else. Owner and group of all ones are `EINVAL`: to the kernel they mean none.
    fn set_attributes<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        set: SetAttributes,
        guard: Option<Time>,
    ) -> Op<'a, Attributes>;

    /// The file with this name in a directory; `.` is the directory, and `..` that above, or of the root itself.
    fn look_up<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8]) -> Op<'a, (FileId, Attributes)>;

    /// Which of these rights the user has.
    fn rights<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (Rights, Attributes)>;

    /// Where a symbolic link leads; `EINVAL` if it is none.
    fn read_link<'a>(&'a self, file: &'a FileId) -> Op<'a, Vec<u8>>;

    /// Opens a regular file for its data, if the user has these rights to it; without any, for its creator.
    fn open<'a>(&'a self, who: &'a Credentials, file: &'a FileId, wanted: Rights) -> Op<'a, (OpenGuard, Attributes)>;

    /// Reads into the segment.
    fn read<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, segment: Segment) -> Op<'a, ReadData>;

    /// As [`FileSystem::read`] of so many bytes, without a copy, if that can be done at once; `None` if not, and then it is read.
    fn lend<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        at: u64,
        len: usize,
        pipes: &'a Arc<Pipes>,
    ) -> Op<'a, Option<LentData>> {
        let _ = (user, file, at, len, pipes);
        Box::pin(async { Ok(None) })
    }

    /// Writes the segment, all of it.
    fn write<'a>(
        &'a self,
        user: As<'a>,
        file: &'a FileId,
        at: u64,
        segment: Segment,
        stability: Stability,
    ) -> Op<'a, Attributes>;

    /// Brings what has been written to the medium.
    fn flush<'a>(&'a self, file: &'a FileId) -> Op<'a, Attributes>;

    /// Changes when written data that has not been flushed may have been lost.
    fn write_verifier(&self) -> u64;

    /// Makes a file, with the owner and the primary group of the user (or the group of a directory with the set-group-ID bit), and what
    /// is set. `EEXIST` if there is one, but for what [`Make`] says.
    fn make<'a>(
        &'a self,
        who: &'a Credentials,
        dir: &'a FileId,
        name: &'a [u8],
        what: Make,
        set: SetAttributes,
    ) -> Op<'a, (FileId, Attributes)>;

    /// Removes an entry of a directory that is a directory (`ENOTDIR` if it is none, `ENOTEMPTY` if it has entries), or one that is not
    /// (`EISDIR` if it is).
    fn remove<'a>(&'a self, who: &'a Credentials, dir: &'a FileId, name: &'a [u8], is_directory: bool) -> Op<'a, ()>;

    /// Gives an entry another name, or another directory, replacing what is there.
    fn rename<'a>(
        &'a self,
        who: &'a Credentials,
        from: (&'a FileId, &'a [u8]),
        to: (&'a FileId, &'a [u8]),
    ) -> Op<'a, ()>;

    /// Gives a file one more name.
    fn link<'a>(&'a self, who: &'a Credentials, file: &'a FileId, dir: &'a FileId, name: &'a [u8]) -> Op<'a, ()>;

    /// Entries of a directory from a cookie on (0: from the beginning), with what they lead to if `with_files`: at least one, if there
    /// are any, and about as many as `room` has room for.
    fn list<'a>(
        &'a self,
        who: &'a Credentials,
        dir: &'a FileId,
        cookie: u64,
        room: Room,
        with_files: bool,
    ) -> Op<'a, Listing>;

    /// How full it is.
    fn usage(&self) -> Op<'_, Usage>;

    /// The first data or hole from a position on; `ENXIO` if the position is at the end or there is no more data.
    /// `EOPNOTSUPP` if this cannot be told, and so for the operations below, which a file system need not have.
    fn seek<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, what: Seek) -> Op<'a, u64> {
        let _ = (user, file, at, what);
        unsupported()
    }

    /// Reserves storage or punches a hole.
    fn allocate<'a>(&'a self, user: As<'a>, file: &'a FileId, at: u64, len: u64, what: Allocate) -> Op<'a, ()> {
        let _ = (user, file, at, len, what);
        unsupported()
    }

    /// Copies at most `len` bytes of data between files; the number copied, which is 0 only at the end of the file. With `shared`
    /// both are to share the storage of exactly this range.
    fn copy<'a>(
        &'a self,
        user: As<'a>,
        from: (&'a FileId, u64),
        to: (&'a FileId, u64),
        len: u64,
        shared: bool,
    ) -> Op<'a, u64> {
        let _ = (user, from, to, len, shared);
        unsupported()
    }

    /// Whether no program reaches its files but through this.
    fn is_private(&self) -> bool {
        false
    }

    /// Keeps the data of a regular file as it is until what is returned is dropped. Another program that opens the file for writing
    /// waits, for as long as the kernel lets it, and what is to be written here fails (`EINPROGRESS`); the function is called each
    /// time. It is also called when attributes or names have been changed. `EAGAIN` if the file is open for writing.
    fn lease<'a>(&'a self, file: &'a FileId, on_change: OnChange) -> Op<'a, OpenGuard> {
        let _ = (file, on_change);
        unsupported()
    }

    /// The access control lists of a file: what its mode says, if it has none.
    fn acl<'a>(&'a self, file: &'a FileId) -> Op<'a, Acl> {
        Box::pin(
            async move { Ok(Acl { access: PosixAcl::from_mode(self.attributes(file).await?.mode), default: None }) },
        )
    }

    /// Sets them; `EOPNOTSUPP` if there are only modes, and none says the same.
    fn set_acl<'a>(&'a self, who: &'a Credentials, file: &'a FileId, acl: Acl) -> Op<'a, ()> {
        Box::pin(async move {
            let (None, Some(mode)) = (&acl.default, acl.access.as_mode()) else { return Err(Errno::OPNOTSUPP) };
            let special = self.attributes(file).await?.mode & 0o7000;
            let set = SetAttributes { mode: Some(special | mode), ..SetAttributes::default() };
            self.set_attributes(As { who, is_open: false }, file, set, None).await.map(drop)
        })
    }

    /// Reads an extended attribute of users (`user.NAME`); `ENODATA` if there is none.
    fn xattr<'a>(&'a self, who: &'a Credentials, file: &'a FileId, name: &'a [u8]) -> Op<'a, Vec<u8>> {
        let _ = (who, file, name);
        unsupported()
    }

    /// Sets an extended attribute of users, or removes it if there is no value.
    fn set_xattr<'a>(
        &'a self,
        who: &'a Credentials,
        file: &'a FileId,
        name: &'a [u8],
        value: Option<(&'a [u8], SetXattr)>,
    ) -> Op<'a, ()> {
        let _ = (who, file, name, value);
        unsupported()
    }

    /// The names of all extended attributes of users, without `user.`.
    fn xattrs<'a>(&'a self, who: &'a Credentials, file: &'a FileId) -> Op<'a, Vec<Vec<u8>>> {
        let _ = (who, file);
        unsupported()
    }
}

fn unsupported<'a, T>() -> Op<'a, T> {
    Box::pin(async { Err(Errno::OPNOTSUPP) })
}
