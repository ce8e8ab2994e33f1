//! NFS version 3 (RFC 1813).

pub(crate) mod status;

use self::status::Status;
use crate::share::{HANDLE_MAX, Shares, Target};
use rustix::io::Errno;
use std::ops::RangeInclusive;
use std::sync::Arc;
use thruway_engine::lent::Lent;
use thruway_rpc::message::{AuthError, CallHeader, Refusal};
use thruway_rpc::server::{Answer, BULK_MAX, Call, Program};
use thruway_rpc::xdr::{self, Bulk, Decoder, Encoder};
use thruway_server::Body;
use thruway_vfs::identity::subvolume_number;
use thruway_vfs::{Attributes, Kind, Make, Rights, Room, SetAttributes, SetTime, Stability, Time};

/// The program's number.
pub const PROGRAM: u32 = 100_003;

/// Most bytes of a name.
const NAME_MAX: u32 = 255;
/// Most bytes of what a symbolic link holds.
const PATH_MAX: u32 = 4096;

/// Procedures, by the names of the RFC.
mod procedure {
    pub(super) const GETATTR: u32 = 1;
    pub(super) const SETATTR: u32 = 2;
    pub(super) const LOOKUP: u32 = 3;
    pub(super) const ACCESS: u32 = 4;
    pub(super) const READLINK: u32 = 5;
    pub(super) const READ: u32 = 6;
    pub(super) const WRITE: u32 = 7;
    pub(super) const CREATE: u32 = 8;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const SYMLINK: u32 = 10;
    pub(super) const MKNOD: u32 = 11;
    pub(super) const REMOVE: u32 = 12;
    pub(super) const RMDIR: u32 = 13;
    pub(super) const RENAME: u32 = 14;
    pub(super) const LINK: u32 = 15;
    pub(super) const READDIR: u32 = 16;
    pub(super) const READDIRPLUS: u32 = 17;
    pub(super) const FSSTAT: u32 = 18;
    pub(super) const FSINFO: u32 = 19;
    pub(super) const PATHCONF: u32 = 20;
    pub(super) const COMMIT: u32 = 21;
}

/// The program.
pub struct Nfs3 {
    shares: Arc<Shares>,
}

/// What follows the status of a call that has failed: attributes of these, as far as they are known.
enum Tail<'a, 'b> {
    None,
    After(&'b Target<'a>),
    Change(&'b Target<'a>),
    Changes(&'b Target<'a>, &'b Target<'a>),
    AfterAndChange(&'b Target<'a>, &'b Target<'a>),
}

type Done = Result<(), Status>;

fn put_time(out: &mut Encoder, time: Time) {
    // The RFC has 32 bits; what is before 1970 or after 2106 is at the border.
    out.u32(time.seconds.clamp(0, u32::MAX.into()) as u32);
    out.u32(time.nanoseconds);
}

fn number_of(kind: Kind) -> u32 {
    match kind {
        Kind::Regular => 1,
        Kind::Directory => 2,
        Kind::BlockDevice => 3,
        Kind::CharacterDevice => 4,
        Kind::SymbolicLink => 5,
        Kind::Socket => 6,
        Kind::Fifo => 7,
    }
}

/// `fattr3`
fn put_attributes(out: &mut Encoder, a: &Attributes) {
    for word in [number_of(a.kind), a.mode, a.links, a.uid, a.gid] {
        out.u32(word);
    }
    out.u64(a.size);
    out.u64(a.used);
    out.u32(a.device.0);
    out.u32(a.device.1);
    out.u64(subvolume_number(a.fsid, a.subvolume));
    out.u64(a.number);
    put_time(out, a.accessed);
    put_time(out, a.modified);
    put_time(out, a.changed);
}

/// `post_op_attr`
pub(crate) fn put_after(out: &mut Encoder, attributes: Option<&Attributes>) {
    out.option(attributes, put_attributes);
}

/// `wcc_data`. What was before is not told: others may change a file between our look at it and our change.
fn put_change(out: &mut Encoder, attributes: Option<&Attributes>) {
    out.bool(false);
    put_after(out, attributes);
}

fn get_time(d: &mut Decoder<'_>) -> xdr::Result<Time> {
    Ok(Time { seconds: d.u32()?.into(), nanoseconds: d.u32()?.min(999_999_999) })
}

fn get_set_time(d: &mut Decoder<'_>) -> xdr::Result<Option<SetTime>> {
    match d.u32()? {
        0 => Ok(None),
        1 => Ok(Some(SetTime::Now)),
        2 => Ok(Some(SetTime::To(get_time(d)?))),
        value => Err(xdr::DecodeError::Invalid { value }),
    }
}

/// `sattr3`
fn get_set_attributes(d: &mut Decoder<'_>) -> xdr::Result<SetAttributes> {
    Ok(SetAttributes {
        mode: d.option(Decoder::u32)?,
        uid: d.option(Decoder::u32)?,
        gid: d.option(Decoder::u32)?,
        size: d.option(Decoder::u64)?,
        accessed: get_set_time(d)?,
        modified: get_set_time(d)?,
    })
}

fn get_handle<'a>(d: &mut Decoder<'a>) -> xdr::Result<&'a [u8]> {
    d.opaque(HANDLE_MAX as u32)
}

/// A name; one that is too long is an error of the call, not of its form.
fn get_name<'a>(d: &mut Decoder<'a>) -> xdr::Result<Result<&'a [u8], Status>> {
    let name = d.opaque(PATH_MAX)?;
    Ok(if name.len() > NAME_MAX as usize { Err(Status::NAMETOOLONG) } else { Ok(name) })
}

/// A handle and a name: `diropargs3`.
type DirectoryArguments<'a> = (&'a [u8], Result<&'a [u8], Status>);

fn get_directory_arguments<'a>(d: &mut Decoder<'a>) -> xdr::Result<DirectoryArguments<'a>> {
    Ok((get_handle(d)?, get_name(d)?))
}

fn check_writable(target: &Target<'_>) -> Done {
    if target.read_only { Err(Status::ROFS) } else { Ok(()) }
}

impl Nfs3 {
    /// Serves these shares.
    pub fn new(shares: Arc<Shares>) -> Nfs3 {
        Nfs3 { shares }
    }

    fn target(&self, call: &Call, handle: &[u8]) -> Result<Target<'_>, Status> {
        Ok(self.shares.target(handle, call)?)
    }

    /// Ends a reply: with the results, or with the status and what follows it.
    async fn end(out: &mut Encoder, result: Result<Encoder, Status>, tail: Tail<'_, '_>) {
        let status = match result {
            Ok(results) => {
                out.u32(0);
                out.append(results);
                return;
            }
            Err(status) => status,
        };
        out.u32(status.0);
        match tail {
            Tail::None => {}
            Tail::After(target) => put_after(out, target.attributes().await.as_ref()),
            Tail::Change(target) => put_change(out, target.attributes().await.as_ref()),
            Tail::Changes(one, two) => {
                put_change(out, one.attributes().await.as_ref());
                put_change(out, two.attributes().await.as_ref());
            }
            Tail::AfterAndChange(file, dir) => {
                put_after(out, file.attributes().await.as_ref());
                put_change(out, dir.attributes().await.as_ref());
            }
        }
    }

    async fn answer(&self, call: &Call, mut out: Encoder) -> Result<Encoder, Refusal> {
        let done = match call.procedure {
            0 => Ok(()),
            1..=21 if !self.shares.admit(&call.connection) => return Err(Refusal::Auth(AuthError::TooWeak)),
            1..=21 => {
                self.shares.learn_user(call).await;
                self.dispatch(call, &mut out).await
            }
            _ => return Err(Refusal::ProcedureUnavailable),
        };
        match done {
            Ok(()) => Ok(out),
            Err(error) => {
                tracing::debug!(%error, procedure = call.procedure, "arguments of an NFS call that cannot be decoded");
                Err(Refusal::GarbageArguments)
            }
        }
    }

    #[allow(clippy::too_many_lines, reason = "one arm for each procedure")]
    async fn dispatch(&self, call: &Call, out: &mut Encoder) -> xdr::Result<()> {
        use procedure::*;
        let mut d = call.arguments();
        /// The target of a handle, or the reply that there is none.
        macro_rules! target {
            ($handle:expr, $failed:expr) => {
                match self.target(call, $handle) {
                    Ok(target) => target,
                    Err(status) => {
                        out.u32(status.0);
                        $failed(out);
                        return Ok(());
                    }
                }
            };
        }
        let nothing = |_: &mut Encoder| {};
        let no_after = |out: &mut Encoder| put_after(out, None);
        let no_change = |out: &mut Encoder| put_change(out, None);
        match call.procedure {
            GETATTR => {
                let handle = get_handle(&mut d)?;
                d.finish()?;
                let target = target!(handle, nothing);
                let attributes = match target.look(None).await {
                    Ok(()) => target.share.files.attributes(&target.file).await,
                    Err(error) => Err(error),
                };
                let results = attributes.map_err(Status::from).map(|a| encoded(|out| put_attributes(out, &a)));
                Nfs3::end(out, results, Tail::None).await;
            }
            SETATTR => {
                let (handle, set) = (get_handle(&mut d)?, get_set_attributes(&mut d)?);
                let guard = d.option(get_time)?;
                d.finish()?;
                let target = target!(handle, no_change);
                let results = self.set_attributes(&target, set, guard).await;
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            LOOKUP => {
                let (handle, name) = get_directory_arguments(&mut d)?;
                d.finish()?;
                let target = target!(handle, no_after);
                let results = self.look_up(&target, name).await;
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            ACCESS => {
                let (handle, wanted) = (get_handle(&mut d)?, d.u32()?);
                d.finish()?;
                let target = target!(handle, no_after);
                let results = self.access(&target, wanted).await;
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            READLINK => {
                let handle = get_handle(&mut d)?;
                d.finish()?;
                let target = target!(handle, no_after);
                let results = self.read_link(&target).await;
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            READ => {
                let (handle, at, len) = (get_handle(&mut d)?, d.u64()?, d.u32()?);
                d.finish()?;
                let target = target!(handle, no_after);
                let results = self.read(call, &target, at, len).await;
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            WRITE => {
                let (handle, at, len, stable) = (get_handle(&mut d)?, d.u64()?, d.u32()?, d.u32()?);
                let data = d.bulk(BULK_MAX as u32)?;
                d.finish()?;
                let target = target!(handle, no_change);
                let results = self.write(call, &target, at, len, stable, data).await;
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            CREATE => {
                let (handle, name) = get_directory_arguments(&mut d)?;
                let (what, set) = match d.u32()? {
                    0 => (Make::File, get_set_attributes(&mut d)?),
                    1 => (Make::NewFile, get_set_attributes(&mut d)?),
                    2 => (Make::Exclusive(*d.fixed()?), SetAttributes::default()),
                    value => return Err(xdr::DecodeError::Invalid { value }),
                };
                d.finish()?;
                let target = target!(handle, no_change);
                let results = self.make(&target, name, what, set).await;
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            MKDIR => {
                let (handle, name) = get_directory_arguments(&mut d)?;
                let set = get_set_attributes(&mut d)?;
                d.finish()?;
                let target = target!(handle, no_change);
                let results = self.make(&target, name, Make::Directory, set).await;
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            SYMLINK => {
                let (handle, name) = get_directory_arguments(&mut d)?;
                let set = get_set_attributes(&mut d)?;
                let to = match d.bulk(PATH_MAX)? {
                    Bulk::Inline(bytes) => bytes.to_vec(),
                    Bulk::Segment(segment) => segment.as_slice().to_vec(),
                };
                d.finish()?;
                let target = target!(handle, no_change);
                let results = self.make(&target, name, Make::SymbolicLink(to), set).await;
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            MKNOD => {
                let (handle, name) = get_directory_arguments(&mut d)?;
                let number = d.u32()?;
                let made = match number {
                    3 | 4 => {
                        let kind = if number == 3 { Kind::BlockDevice } else { Kind::CharacterDevice };
                        let set = get_set_attributes(&mut d)?;
                        Ok((Make::Special(kind, d.u32()?, d.u32()?), set))
                    }
                    6 => Ok((Make::Special(Kind::Socket, 0, 0), get_set_attributes(&mut d)?)),
                    7 => Ok((Make::Special(Kind::Fifo, 0, 0), get_set_attributes(&mut d)?)),
                    1 | 2 | 5 => Err(Status::BADTYPE),
                    value => return Err(xdr::DecodeError::Invalid { value }),
                };
                d.finish()?;
                let target = target!(handle, no_change);
                let results = match made {
                    Ok((what, set)) => self.make(&target, name, what, set).await,
                    Err(status) => Err(status),
                };
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            REMOVE | RMDIR => {
                let (handle, name) = get_directory_arguments(&mut d)?;
                d.finish()?;
                let target = target!(handle, no_change);
                let results = self.remove(&target, name, call.procedure == RMDIR).await;
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            RENAME => {
                let (from_handle, old) = get_directory_arguments(&mut d)?;
                let (to_handle, new) = get_directory_arguments(&mut d)?;
                d.finish()?;
                let no_changes = |out: &mut Encoder| {
                    put_change(out, None);
                    put_change(out, None);
                };
                let from = target!(from_handle, no_changes);
                let to = target!(to_handle, no_changes);
                let results = self.rename(&from, old, &to, new).await;
                Nfs3::end(out, results, Tail::Changes(&from, &to)).await;
            }
            LINK => {
                let (file_handle, (dir_handle, name)) = (get_handle(&mut d)?, get_directory_arguments(&mut d)?);
                d.finish()?;
                let neither = |out: &mut Encoder| {
                    put_after(out, None);
                    put_change(out, None);
                };
                let file = target!(file_handle, neither);
                let dir = target!(dir_handle, neither);
                let results = self.link(&file, &dir, name).await;
                Nfs3::end(out, results, Tail::AfterAndChange(&file, &dir)).await;
            }
            READDIR => {
                let (handle, cookie, verifier, bytes) = (get_handle(&mut d)?, d.u64()?, d.u64()?, d.u32()?);
                d.finish()?;
                let target = target!(handle, no_after);
                let results = self.list(call, &target, cookie, verifier, bytes, bytes, false).await;
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            READDIRPLUS => {
                let (handle, cookie, verifier) = (get_handle(&mut d)?, d.u64()?, d.u64()?);
                let (names, bytes) = (d.u32()?, d.u32()?);
                d.finish()?;
                let target = target!(handle, no_after);
                let results = self.list(call, &target, cookie, verifier, names, bytes, true).await;
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            FSSTAT => {
                let handle = get_handle(&mut d)?;
                d.finish()?;
                let target = target!(handle, no_after);
                let results = self.usage(&target).await;
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            FSINFO | PATHCONF => {
                let handle = get_handle(&mut d)?;
                d.finish()?;
                let target = target!(handle, no_after);
                let results =
                    if call.procedure == FSINFO { fs_info(&target).await } else { path_limits(&target).await };
                Nfs3::end(out, results, Tail::After(&target)).await;
            }
            COMMIT => {
                let (handle, _at, _len) = (get_handle(&mut d)?, d.u64()?, d.u32()?);
                d.finish()?;
                let target = target!(handle, no_change);
                let results = self.commit(&target).await;
                Nfs3::end(out, results, Tail::Change(&target)).await;
            }
            _ => unreachable!("the caller has looked at the number"),
        }
        Ok(())
    }

    async fn set_attributes(
        &self,
        target: &Target<'_>,
        set: SetAttributes,
        guard: Option<Time>,
    ) -> Result<Encoder, Status> {
        check_writable(target)?;
        let _change = target.change(None).await?;
        let files = &target.share.files;
        let changed = files.set_attributes(target.user(), &target.file, set, guard).await;
        let attributes =
            changed.map_err(|error| if error == Errno::AGAIN { Status::NOT_SYNC } else { error.into() })?;
        Ok(encoded(|out| put_change(out, Some(&attributes))))
    }

    async fn look_up(&self, dir: &Target<'_>, name: Result<&[u8], Status>) -> Result<Encoder, Status> {
        let (file, attributes) = dir.share.files.look_up(&dir.who, &dir.file, name?).await?;
        // Without attributes the client asks for them.
        let attributes = (!dir.is_kept(&file, None)).then_some(attributes);
        let above = dir.attributes().await;
        Ok(encoded(|out| {
            out.opaque(&self.shares.handle(dir.share, &file));
            put_after(out, attributes.as_ref());
            put_after(out, above.as_ref());
        }))
    }

    async fn access(&self, target: &Target<'_>, wanted: u32) -> Result<Encoder, Status> {
        const READ: u32 = 1;
        const LOOKUP: u32 = 2;
        const MODIFY: u32 = 4;
        const EXTEND: u32 = 8;
        const DELETE: u32 = 16;
        const EXECUTE: u32 = 32;
        let changes = MODIFY | EXTEND | DELETE;
        let asked = Rights {
            read: wanted & READ != 0,
            write: wanted & changes != 0 && !target.read_only,
            execute: wanted & (LOOKUP | EXECUTE) != 0,
        };
        target.look(None).await?;
        let (rights, attributes) = target.share.files.rights(&target.who, &target.file, asked).await?;
        // What can be deleted is an entry, which is the directory's affair.
        let (may_execute, may_change) = match attributes.kind {
            Kind::Directory => (LOOKUP, changes),
            _ => (EXECUTE, MODIFY | EXTEND),
        };
        let mut granted = 0;
        for (has, bits) in [(rights.read, READ), (rights.write, may_change), (rights.execute, may_execute)] {
            granted |= if has { bits & wanted } else { 0 };
        }
        Ok(encoded(|out| {
            put_after(out, Some(&attributes));
            out.u32(granted);
        }))
    }

    async fn read_link(&self, target: &Target<'_>) -> Result<Encoder, Status> {
        let to = target.share.files.read_link(&target.file).await?;
        let attributes = target.attributes().await;
        Ok(encoded(|out| {
            put_after(out, attributes.as_ref());
            out.bulk(Body::Bytes(to));
        }))
    }

    async fn read(&self, call: &Call, target: &Target<'_>, at: u64, len: u32) -> Result<Encoder, Status> {
        let len = (len as usize).min(BULK_MAX);
        target.look(None).await?;
        if let Some(pipes) = call.pipes()
            && let Some(lent) = target.share.files.lend(target.user(), &target.file, at, len, pipes).await?
        {
            return Ok(encoded(|out| {
                put_after(out, lent.attributes.as_ref());
                out.u32(lent.pages.len() as u32);
                out.bool(lent.is_end);
                out.bulk(Body::Lent(Lent::Piped(lent.pages)));
            }));
        }
        let segment = call.connection.buffers.segment(len).await.map_err(|_| Status::JUKEBOX)?;
        let read = target.share.files.read(target.user(), &target.file, at, segment).await?;
        Ok(encoded(|out| {
            put_after(out, read.attributes.as_ref());
            out.u32(read.segment.len() as u32);
            out.bool(read.is_end);
            out.bulk(Body::Segments([read.segment].into_iter().collect()));
        }))
    }

    async fn write(
        &self,
        call: &Call,
        target: &Target<'_>,
        at: u64,
        len: u32,
        stable: u32,
        data: Bulk<'_>,
    ) -> Result<Encoder, Status> {
        check_writable(target)?;
        let stability = match stable {
            0 => Stability::Unstable,
            1 => Stability::Data,
            2 => Stability::File,
            _ => return Err(Status::INVAL),
        };
        let is_whole = len as usize == data.len();
        if !is_whole || at.checked_add(len.into()).is_none_or(|end| end > i64::MAX as u64) {
            return Err(if is_whole { Status::from(Errno::FBIG) } else { Status::INVAL });
        }
        let segment = match data {
            Bulk::Segment(segment) => segment,
            Bulk::Inline(bytes) => {
                let segment = call.connection.buffers.segment(bytes.len()).await;
                let mut segment = segment.map_err(|_| Status::JUKEBOX)?;
                segment.as_mut_slice().copy_from_slice(bytes);
                segment
            }
        };
        let _change = target.change_data(None).await?;
        let files = &target.share.files;
        // Before the write: if it changes meanwhile, the client writes once too often.
        let verifier = files.write_verifier();
        let attributes = files.write(target.user(), &target.file, at, segment, stability).await?;
        Ok(encoded(|out| {
            put_change(out, Some(&attributes));
            out.u32(len);
            out.u32(if stability == Stability::Unstable { 0 } else { 2 });
            out.u64(verifier);
        }))
    }

    async fn make(
        &self,
        dir: &Target<'_>,
        name: Result<&[u8], Status>,
        what: Make,
        set: SetAttributes,
    ) -> Result<Encoder, Status> {
        check_writable(dir)?;
        let name = name?;
        // One that is there is cut.
        let _change = if what == Make::File { dir.change_entry(name).await? } else { None };
        let (file, attributes) = dir.share.files.make(&dir.who, &dir.file, name, what, set).await?;
        let above = dir.attributes().await;
        Ok(encoded(|out| {
            out.option(Some(self.shares.handle(dir.share, &file)), |out, handle| out.opaque(&handle));
            put_after(out, Some(&attributes));
            put_change(out, above.as_ref());
        }))
    }

    async fn remove(
        &self,
        dir: &Target<'_>,
        name: Result<&[u8], Status>,
        is_directory: bool,
    ) -> Result<Encoder, Status> {
        check_writable(dir)?;
        dir.check_grace()?;
        let name = name?;
        let _change = dir.change_entry(name).await?;
        dir.share.files.remove(&dir.who, &dir.file, name, is_directory).await?;
        let above = dir.attributes().await;
        Ok(encoded(|out| put_change(out, above.as_ref())))
    }

    async fn rename(
        &self,
        from: &Target<'_>,
        old: Result<&[u8], Status>,
        to: &Target<'_>,
        new: Result<&[u8], Status>,
    ) -> Result<Encoder, Status> {
        check_writable(from)?;
        if !std::ptr::eq(from.share, to.share) {
            return Err(Status::from(Errno::XDEV));
        }
        from.check_grace()?;
        let (old, new) = (old?, new?);
        let _changes = (from.change_entry(old).await?, to.change_entry(new).await?);
        from.share.files.rename(&from.who, (&from.file, old), (&to.file, new)).await?;
        let (one, two) = (from.attributes().await, to.attributes().await);
        Ok(encoded(|out| {
            put_change(out, one.as_ref());
            put_change(out, two.as_ref());
        }))
    }

    async fn link(&self, file: &Target<'_>, dir: &Target<'_>, name: Result<&[u8], Status>) -> Result<Encoder, Status> {
        check_writable(file)?;
        if !std::ptr::eq(file.share, dir.share) {
            return Err(Status::from(Errno::XDEV));
        }
        let _change = file.change(None).await?;
        file.share.files.link(&file.who, &file.file, &dir.file, name?).await?;
        let (attributes, above) = (file.attributes().await, dir.attributes().await);
        Ok(encoded(|out| {
            put_after(out, attributes.as_ref());
            put_change(out, above.as_ref());
        }))
    }

    /// READDIR and READDIRPLUS: `names` bytes of names at most, `bytes` of the reply.
    #[allow(clippy::too_many_arguments, reason = "those of the two procedures")]
    async fn list(
        &self,
        call: &Call,
        dir: &Target<'_>,
        cookie: u64,
        verifier: u64,
        names: u32,
        bytes: u32,
        with_files: bool,
    ) -> Result<Encoder, Status> {
        /// Status, attributes, verifier, and the two words behind the last entry.
        const AROUND: usize = 4 + 4 + 84 + 8 + 8;
        // Cookies do not depend on when the directory was changed: every verifier is 0.
        if verifier != 0 {
            return Err(Status::BAD_COOKIE);
        }
        let bytes = (bytes as usize).min(BULK_MAX);
        let names = (names as usize).min(bytes);
        // A word, number, name and cookie; attributes and a handle, most of which are shorter than they may be.
        let room = if with_files {
            Room { bytes, entry: 4 + 8 + 4 + 2 + 8 + 4 + 84 + 4 + 4 + 28 }
        } else {
            Room { bytes: names, entry: 4 + 8 + 4 + 2 + 8 }
        };
        call.begin_long_reply().await;
        let listing = dir.share.files.list(&dir.who, &dir.file, cookie, room, with_files).await?;
        let attributes = dir.attributes().await;
        let mut out = Encoder::new();
        put_after(&mut out, attributes.as_ref());
        out.u64(0);
        let (mut used, mut is_end, mut is_first) = (AROUND, listing.is_end, true);
        for entry in listing.entries {
            let mark = out.mark();
            let before = out.len();
            out.bool(true);
            out.u64(entry.number);
            out.opaque(&entry.name);
            out.u64(entry.cookie);
            if with_files {
                let file = entry.file.as_ref().filter(|(file, _)| !dir.is_kept(file, None));
                put_after(&mut out, file.map(|(_, attributes)| attributes));
                let handle = entry.file.as_ref().map(|(file, _)| self.shares.handle(dir.share, file));
                out.option(handle, |out, handle| out.opaque(&handle));
            }
            used += out.len() - before;
            if used > bytes {
                out.truncate(mark);
                if is_first {
                    return Err(Status::TOOSMALL);
                }
                is_end = false;
                break;
            }
            is_first = false;
        }
        out.bool(false);
        out.bool(is_end);
        Ok(out)
    }

    async fn usage(&self, target: &Target<'_>) -> Result<Encoder, Status> {
        let usage = target.share.files.usage().await?;
        let attributes = target.attributes().await;
        Ok(encoded(|out| {
            put_after(out, attributes.as_ref());
            for number in
                [usage.bytes, usage.bytes_free, usage.bytes_available, usage.files, usage.files_free, usage.files_free]
            {
                out.u64(number);
            }
            out.u32(0);
        }))
    }

    async fn commit(&self, target: &Target<'_>) -> Result<Encoder, Status> {
        check_writable(target)?;
        let files = &target.share.files;
        let attributes = files.flush(&target.file).await?;
        // After the flush: what it may have lost the client is to write again.
        let verifier = files.write_verifier();
        Ok(encoded(|out| {
            put_change(out, Some(&attributes));
            out.u64(verifier);
        }))
    }
}

async fn fs_info(target: &Target<'_>) -> Result<Encoder, Status> {
    const LINK: u32 = 1;
    const SYMLINK: u32 = 2;
    const HOMOGENEOUS: u32 = 8;
    const CANSETTIME: u32 = 16;
    const LARGE: u32 = BULK_MAX as u32;
    let attributes = target.share.files.attributes(&target.file).await?;
    Ok(encoded(|out| {
        put_after(out, Some(&attributes));
        // Most, best and multiple of READ, of WRITE, and best of READDIR.
        for word in [LARGE, LARGE, 4096, LARGE, LARGE, 4096, 64 << 10] {
            out.u32(word);
        }
        out.u64(i64::MAX as u64);
        put_time(out, Time { seconds: 0, nanoseconds: 1 });
        out.u32(LINK | SYMLINK | HOMOGENEOUS | CANSETTIME);
    }))
}

async fn path_limits(target: &Target<'_>) -> Result<Encoder, Status> {
    let attributes = target.share.files.attributes(&target.file).await?;
    Ok(encoded(|out| {
        put_after(out, Some(&attributes));
        out.u32(32_000);
        out.u32(NAME_MAX);
        // Names are not truncated, owners cannot be given away, case counts and is kept.
        for is in [true, true, false, true] {
            out.bool(is);
        }
    }))
}

fn encoded(encode: impl FnOnce(&mut Encoder)) -> Encoder {
    let mut out = Encoder::new();
    encode(&mut out);
    out
}

impl Program for Nfs3 {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        3..=3
    }

    fn find_bulk(&self, call: &CallHeader<'_>, arguments: &mut Decoder<'_>) -> xdr::Result<bool> {
        if call.procedure != procedure::WRITE {
            return Ok(false);
        }
        get_handle(arguments)?;
        let _ = (arguments.u64()?, arguments.u32()?, arguments.u32()?);
        Ok(true)
    }

    fn is_of_data(&self, call: &Call) -> bool {
        call.procedure == procedure::WRITE
    }

    /// What changes names or attributes fails, or does something else, the second time; and data may have been written since the first
    /// time that the second would undo.
    fn is_repeatable(&self, call: &Call) -> bool {
        use procedure::*;
        !matches!(call.procedure, WRITE | SETATTR | CREATE | MKDIR | SYMLINK | MKNOD | REMOVE | RMDIR | RENAME | LINK)
    }

    fn announces_changes(&self) -> bool {
        true
    }

    fn call<'a>(&'a self, call: &'a Call, results: Encoder) -> Answer<'a> {
        use procedure::*;
        // Data that COMMIT has not flushed would count as flushed.
        let reads = matches!(
            call.procedure,
            GETATTR | LOOKUP | ACCESS | READLINK | READ | READDIR | READDIRPLUS | FSSTAT | FSINFO | PATHCONF
        );
        if !reads {
            call.begin_change();
        }
        Box::pin(async move { self.answer(call, results).await.into() })
    }
}
