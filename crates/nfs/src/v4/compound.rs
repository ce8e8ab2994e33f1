//! Compounds: operations one after the other, on a current and a saved file, until one fails (RFC 8881, section 2.3).

use super::attributes::{self, Described};
use super::bitmap::Bitmap;
use super::callback::Back;
use super::numbered_ops::is_numbered;
use super::{MINOR_VERSIONS, Server, op};
use crate::security::SecuritySet;
use crate::share::{FileHandle, HandleError, Target};
use crate::state::session::{CACHED_MAX, OPERATIONS_MAX, Session, Turn};
use crate::state::{Denied, Refused, Stateid};
use crate::status::Status;
use rustix::io::Errno;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use thruway_rpc::server::{CALL_MAX, Call, Credential};
use thruway_rpc::xdr::{self, DecodeError, Decoder, Encoder};
use thruway_server::slices;
use thruway_vfs::acl::{Acl, ENTRIES_OF_UNIT, PosixAcl, to_aces};
use thruway_vfs::identity::subvolume_number;
use thruway_vfs::{As, Attributes, Kind, Time, Usage};

/// Longest tag of a compound.
pub(super) const TAG_MAX: u32 = 1024;
/// Longest handle that is decoded (`NFS4_FHSIZE`).
pub(super) const HANDLE_MAX: u32 = 128;
/// Longest name of an entry.
const NAME_MAX: u32 = 255;
/// Longest name that is decoded: a longer one is an error of the call, not of its form.
const NAME_DECODED_MAX: u32 = 4096;

/// The handle of the root of all shares.
pub(super) const ROOT_HANDLE: [u8; 4] = [2, 0, 0, 0];
/// The file system of the root of all shares.
const ROOT_FSID: (u64, u64) = (0x7468_7275, 0);
/// Its number there; those of shares are above.
const ROOT_NUMBER: u64 = 1;

/// Flag of the result of SEQUENCE: there is no connection for callbacks (`SEQ4_STATUS_CB_PATH_DOWN_SESSION`).
const CB_PATH_DOWN_SESSION: u32 = 0x200;

/// It is not known which number the client expects of a callback: it is to make another session (`SEQ4_STATUS_BACKCHANNEL_FAULT`).
const BACKCHANNEL_FAULT: u32 = 0x400;

/// Something that was delegated has been revoked (`SEQ4_STATUS_RECALLABLE_STATE_REVOKED`).
const RECALLABLE_STATE_REVOKED: u32 = 0x40;

/// Operations that change something, but for those that can be done again.
const CHANGING: [u32; 14] = [
    op::OPEN,
    op::CLOSE,
    op::OPEN_DOWNGRADE,
    op::LOCK,
    op::LOCKU,
    op::CREATE,
    op::REMOVE,
    op::RENAME,
    op::LINK,
    op::SETATTR,
    op::COPY,
    op::CLONE,
    op::SETXATTR,
    op::REMOVEXATTR,
];

/// Operations that change nothing. A compound of these may end when its connection is lost.
const READING: [u32; 25] = [
    op::SEQUENCE,
    op::RENEW,
    op::PUTFH,
    op::PUTPUBFH,
    op::PUTROOTFH,
    op::GETFH,
    op::SAVEFH,
    op::RESTOREFH,
    op::LOOKUP,
    op::LOOKUPP,
    op::ACCESS,
    op::GETATTR,
    op::VERIFY,
    op::NVERIFY,
    op::READ,
    op::READDIR,
    op::READLINK,
    op::SECINFO,
    op::SECINFO_NO_NAME,
    op::SEEK,
    op::GETXATTR,
    op::LISTXATTRS,
    op::LOCKT,
    op::TEST_STATEID,
    op::IO_ADVISE,
];

/// Most bytes of the result of one of these, but for a lock that is refused.
const CHANGING_RESULT: usize = 160;

/// A file of a share, or the directory that has the shares.
#[derive(Clone)]
pub(super) enum Object<'a> {
    Root,
    File(Target<'a>),
}

/// Why an operation has failed, and what its result has all the same.
pub(super) struct Failure {
    pub status: Status,
    pub body: Option<Encoder>,
}

/// How an operation has ended.
pub(super) type Done<T = ()> = Result<T, Failure>;

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        Failure { status, body: None }
    }
}

impl From<Errno> for Failure {
    fn from(error: Errno) -> Failure {
        Status::from(error).into()
    }
}

impl From<HandleError> for Failure {
    fn from(error: HandleError) -> Failure {
        Status::from(error).into()
    }
}

impl From<DecodeError> for Failure {
    fn from(error: DecodeError) -> Failure {
        Status::from(error).into()
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Failure {
        match refused {
            Refused::Status(status) => status.into(),
            // Not passed on by those who can do something about it.
            Refused::Expired(_) | Refused::Delegated => Status::DELAY.into(),
            Refused::Denied(Denied { range, is_write, client, owner, .. }) => {
                let mut body = Encoder::new();
                body.u64(range.start);
                body.u64(range.len());
                body.u32(if is_write { 2 } else { 1 });
                body.u64(client);
                body.opaque(&owner);
                Failure { status: Status::DENIED, body: Some(body) }
            }
        }
    }
}

/// The slot that a compound is done in.
struct SlotGuard {
    session: Arc<Session>,
    slot: u32,
    digest: u64,
    /// The reply is to be kept.
    is_kept: bool,
    /// An operation that changes something has begun.
    has_changed: bool,
    has_ended: bool,
}

impl SlotGuard {
    fn end(&mut self, out: &Encoder) {
        self.has_ended = true;
        let is_kept = self.is_kept && out.len() <= CACHED_MAX as usize;
        let kept = is_kept.then(|| out.to_bytes().into_boxed_slice());
        self.session.end(self.slot, self.digest, kept);
    }
}

impl Drop for SlotGuard {
    /// Ends a compound that was not finished: if it may have changed something, its client must not send it again.
    fn drop(&mut self) {
        match self.has_changed || std::thread::panicking() {
            _ if self.has_ended => {}
            true => self.session.end(self.slot, self.digest, None),
            false => self.session.cancel(self.slot),
        }
    }
}

/// A compound in progress.
pub(super) struct Compound<'a> {
    pub server: &'a Arc<Server>,
    pub call: &'a Call,
    pub minor: u32,
    /// Operations in all, and the place of this one.
    count: u32,
    index: u32,
    slot: Option<SlotGuard>,
    /// An operation that must not be repeated has begun.
    has_changed: bool,
    pub current: Option<Object<'a>>,
    saved: Option<Object<'a>>,
    pub stateid: Option<Stateid>,
    saved_stateid: Option<Stateid>,
    /// The security flavors of the current file's share, where the caller's is none of them. Only SECINFO is then allowed.
    pub wrong_security: Option<SecuritySet>,
    /// Reads so far.
    pub reads: u32,
    /// The owner that a file is opened for need not confirm that it is there.
    pub opener_is_confirmed: bool,
}

/// How to go on after an operation: with the next one, or with the reply that this call had when it came first.
enum Next {
    Go,
    Again(Box<[u8]>),
}

impl<'a> Compound<'a> {
    /// Does a compound.
    pub(super) async fn run(server: &'a Arc<Server>, call: &'a Call, results: Encoder) -> xdr::Result<Encoder> {
        let mut d = call.arguments();
        let (tag, minor, count) = (d.opaque(TAG_MAX)?, d.u32()?, d.u32()?);
        server.shares.learn_user(call).await;
        let mut compound = Compound {
            server,
            call,
            minor,
            count,
            index: 0,
            slot: None,
            has_changed: false,
            current: None,
            saved: None,
            stateid: None,
            saved_stateid: None,
            wrong_security: None,
            reads: 0,
            opener_is_confirmed: true,
        };
        let mut out = Encoder::new();
        let at_status = out.mark();
        out.u32(0);
        out.opaque(tag);
        let at_count = out.mark();
        out.u32(0);
        let status = match () {
            () if !MINOR_VERSIONS.contains(&minor) => Some(Status::MINOR_VERS_MISMATCH),
            () if count > OPERATIONS_MAX && minor == 0 => Some(Status::RESOURCE),
            () if count > OPERATIONS_MAX => Some(Status::TOO_MANY_OPS),
            () => match compound.operations(&mut d, &mut out).await {
                Ok(status) => status,
                Err(again) => {
                    let mut results = results;
                    results.fixed(&again);
                    return Ok(results);
                }
            },
        };
        out.set_u32(at_count, compound.index);
        out.set_u32(at_status, status.map_or(0, |status| status.0));
        if let Some(slot) = &mut compound.slot {
            slot.end(&out);
        }
        let mut results = results;
        results.append(out);
        Ok(results)
    }

    /// Does the operations; the status of the one that has failed, or the reply that the compound has had already.
    async fn operations(&mut self, d: &mut Decoder<'a>, out: &mut Encoder) -> Result<Option<Status>, Box<[u8]>> {
        while self.index < self.count {
            slices::spend(1).await;
            let number = d.u32().unwrap_or(op::ILLEGAL);
            let is_known = (op::ACCESS..=op::LAST[self.minor as usize]).contains(&number);
            let number = if is_known { number } else { op::ILLEGAL };
            if is_known && !READING.contains(&number) {
                self.call.begin_change();
                self.has_changed |= number != op::COMMIT;
                self.slot.iter_mut().for_each(|slot| slot.has_changed = self.has_changed);
            }
            let start = out.mark();
            out.u32(number);
            let at_status = out.mark();
            out.u32(0);
            let at_body = out.mark();
            let (limit, too_long) = self.reply_limit();
            let done = match self.place(number) {
                // What changes something is not done if it could not be said.
                Ok(()) if CHANGING.contains(&number) && out.len() + CHANGING_RESULT > limit as usize => {
                    Err(too_long.into())
                }
                Ok(()) if number == op::SEQUENCE => match self.sequence(d, out) {
                    Ok(Next::Go) => Ok(()),
                    Ok(Next::Again(reply)) => return Err(reply),
                    Err(failure) => Err(failure),
                },
                Ok(()) if self.minor == 0 && is_numbered(number) => self.numbered(number, d, out).await,
                Ok(()) => self.operation(number, d, out).await,
                Err(status) => Err(status.into()),
            };
            if number == op::COMMIT && !self.has_changed {
                // It is completed once begun, and may be repeated.
                self.call.end_change();
            }
            self.index += 1;
            if let Err(Failure { status, body }) = done {
                tracing::debug!(operation = number, status = status.0, "an operation of NFS failed");
                out.truncate(at_body);
                out.set_u32(at_status, status.0);
                out.append(body.unwrap_or_default());
                return Ok(Some(status));
            }
            if out.len() > limit as usize {
                out.truncate(start);
                out.u32(number);
                out.u32(too_long.0);
                return Ok(Some(too_long));
            }
        }
        Ok(None)
    }

    /// Limit of the reply in bytes, and the status of an operation that exceeds it.
    fn reply_limit(&self) -> (u32, Status) {
        match &self.slot {
            // Version 4.0 defines no status for replies that are too long.
            _ if self.minor == 0 => (CALL_MAX as u32, Status::RESOURCE),
            None => (CALL_MAX as u32, Status::REP_TOO_BIG),
            // A reply that must be kept has a lower limit, which is checked before anything is done (RFC 8881, section 2.10.6.1.3).
            Some(slot) if slot.is_kept && slot.session.limits.cached < slot.session.limits.response => {
                (slot.session.limits.cached, Status::REP_TOO_BIG_TO_CACHE)
            }
            Some(slot) => (slot.session.limits.response, Status::REP_TOO_BIG),
        }
    }

    /// Whether an operation may be where it is (RFC 8881, section 2.10.6.1).
    fn place(&self, number: u32) -> Result<(), Status> {
        let is_alone =
            [op::EXCHANGE_ID, op::CREATE_SESSION, op::DESTROY_SESSION, op::BIND_CONN_TO_SESSION, op::DESTROY_CLIENTID]
                .contains(&number);
        match (self.index, number) {
            (_, op::ILLEGAL) => Err(Status::OP_ILLEGAL),
            // There are no sessions.
            _ if self.minor == 0 => Ok(()),
            (0, op::SEQUENCE) => Ok(()),
            (_, op::SEQUENCE) => Err(Status::SEQUENCE_POS),
            (0, _) if is_alone && self.count == 1 => Ok(()),
            (0, _) if is_alone => Err(Status::NOT_ONLY_OP),
            (0, _) => Err(Status::OP_NOT_IN_SESSION),
            // All other operations may follow SEQUENCE.
            (_, op::BIND_CONN_TO_SESSION) => Err(Status::NOT_ONLY_OP),
            _ => Ok(()),
        }
    }

    /// SEQUENCE
    fn sequence(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done<Next> {
        let (id, sequence, slot) = (*d.fixed::<16>()?, d.u32()?, d.u32()?);
        let (_highest, is_kept) = (d.u32()?, d.bool()?);
        let (session, now) = self.server.state(|state, now| (state.sessions.get(&id).cloned(), now));
        let session = session.ok_or(Status::BADSESSION)?;
        if self.count > session.limits.operations {
            return Err(Status::TOO_MANY_OPS.into());
        }
        if self.call.argument_len() > session.limits.request as usize {
            return Err(Status::REQ_TOO_BIG.into());
        }
        let digest = self.digest();
        if let Turn::Again(reply) = session.begin(slot, sequence, digest)? {
            return Ok(Next::Again(reply));
        }
        session.lease.renew(now);
        out.fixed(&id);
        // The client is to say by which connection it can be called.
        let mut events = match Back::of(&session) {
            Some(back) if back.is_out_of_step() => BACKCHANNEL_FAULT,
            Some(_) if !session.can_call() => CB_PATH_DOWN_SESSION,
            _ => 0,
        };
        if session.lease.has_revoked() {
            events |= RECALLABLE_STATE_REVOKED;
        }
        // The highest slot of ours and the one that we would like.
        for word in [sequence, slot, session.highest_slot(), session.highest_slot(), events] {
            out.u32(word);
        }
        self.slot = Some(SlotGuard { session, slot, digest, is_kept, has_changed: false, has_ended: false });
        Ok(Next::Go)
    }

    /// Tells a repeated request from another that has its number.
    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.call.argument_bytes().hash(&mut hasher);
        match &self.call.credential {
            Credential::Sys(sys) => (sys.uid, sys.gid).hash(&mut hasher),
            Credential::Gss(caller) => caller.principal().hash(&mut hasher),
            _ => {}
        }
        hasher.finish()
    }

    pub(super) async fn operation(&mut self, number: u32, d: &mut Decoder<'a>, out: &mut Encoder) -> Done {
        match number {
            op::EXCHANGE_ID => self.exchange_id(d, out).await,
            op::CREATE_SESSION => self.create_session(d, out).await,
            op::DESTROY_SESSION => self.destroy_session(d),
            op::DESTROY_CLIENTID => self.destroy_client(d).await,
            op::BIND_CONN_TO_SESSION => self.bind_connection(d, out),
            op::BACKCHANNEL_CTL => self.control_back_channel(d),
            op::RECLAIM_COMPLETE => self.reclaim_complete(d).await,
            op::TEST_STATEID => self.test_stateids(d, out).await,
            op::FREE_STATEID => self.free_stateid(d),

            op::SETCLIENTID if self.minor == 0 => self.set_client(d, out).await,
            op::SETCLIENTID_CONFIRM if self.minor == 0 => self.confirm_client(d).await,
            op::RENEW if self.minor == 0 => self.renew(d),
            op::OPEN_CONFIRM if self.minor == 0 => self.confirm_open(d, out),
            op::RELEASE_LOCKOWNER if self.minor == 0 => self.release_lock_owner(d),

            op::PUTROOTFH | op::PUTPUBFH => self.set_current(Object::Root),
            op::PUTFH => self.put_handle(d),
            op::GETFH => self.get_handle(out),
            op::SAVEFH => {
                self.saved = Some(self.object()?.clone());
                self.saved_stateid = self.stateid;
                Ok(())
            }
            op::RESTOREFH => {
                // Later versions have another status for a missing saved file (RFC 8881, section 18.27.3).
                let nothing = if self.minor == 0 { Status::RESTOREFH } else { Status::NOFILEHANDLE };
                self.current = Some(self.saved.clone().ok_or(nothing)?);
                self.stateid = self.saved_stateid;
                Ok(())
            }
            op::SECINFO => self.secinfo(d, out).await,
            op::SECINFO_NO_NAME => self.secinfo_no_name(d, out).await,

            op::LOOKUP => self.look_up(d).await,
            op::LOOKUPP => self.look_up_parent().await,
            op::ACCESS => self.access(d, out).await,
            op::GETATTR => self.get_attributes(d, out).await,
            op::SETATTR => self.set_attributes(d, out).await,
            op::VERIFY | op::NVERIFY => self.verify(d, number == op::VERIFY).await,
            op::READDIR => self.list(d, out).await,
            op::READLINK => self.read_link(out).await,
            op::CREATE => self.create(d, out).await,
            op::REMOVE => self.remove(d, out).await,
            op::RENAME => self.rename(d, out).await,
            op::LINK => self.link(d, out).await,

            op::OPEN => self.open(d, out).await,
            op::OPEN_DOWNGRADE => self.downgrade(d, out),
            op::CLOSE => self.close(d, out),
            op::DELEGRETURN => self.give_back(d),
            op::LOCK => self.lock(d, out).await,
            op::LOCKT => self.test_lock(d).await,
            op::LOCKU => self.unlock(d, out),

            op::READ => {
                let done = self.read(d, out).await;
                self.of_data(done).await
            }
            op::WRITE => {
                let done = self.write(d, out).await;
                self.of_data(done).await
            }
            op::COMMIT => {
                let done = self.commit(d, out).await;
                self.of_data(done).await
            }
            op::SEEK => self.seek(d, out).await,
            op::ALLOCATE | op::DEALLOCATE => self.allocate(d, number == op::ALLOCATE).await,
            op::COPY => self.copy(d, out).await,
            op::OFFLOAD_STATUS => self.offload_status(d, out),
            op::OFFLOAD_CANCEL => self.offload_cancel(d).await,
            op::CLONE => self.clone_range(d).await,
            op::IO_ADVISE => self.advise(d, out).await,

            op::GETXATTR => self.get_xattr(d, out).await,
            op::SETXATTR => self.set_xattr(d, out).await,
            op::LISTXATTRS => self.list_xattrs(d, out).await,
            op::REMOVEXATTR => self.remove_xattr(d, out).await,

            op::ILLEGAL => Err(Status::OP_ILLEGAL.into()),
            // Known to the minor version, and not served.
            _ => Err(Status::NOTSUPP.into()),
        }
    }

    /// Whether the reply is to be kept for a repeated call.
    pub(super) fn is_kept(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.is_kept)
    }

    /// The client whose session this is in.
    pub(super) fn client(&self) -> Result<u64, Status> {
        self.slot.as_ref().map(|slot| slot.session.client).ok_or(Status::OP_NOT_IN_SESSION)
    }

    /// The client whose session this is in, if it is in one: to it, what is delegated to it is no obstacle.
    pub(super) fn known_client(&self) -> Option<u64> {
        self.client().ok()
    }

    /// Whether the client can be called.
    pub(super) fn can_call(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.session.can_call())
    }

    /// The session that this is in.
    pub(super) fn session(&self) -> Option<&[u8; 16]> {
        self.slot.as_ref().map(|slot| &slot.session.id)
    }

    /// Session of this compound; `None` as for [`Compound::session`].
    pub(super) fn own_session(&self) -> Option<&Session> {
        self.slot.as_ref().map(|slot| &*slot.session)
    }

    pub(super) fn is_last(&self) -> bool {
        self.index + 1 == self.count
    }

    /// The handle of the current file.
    pub(super) fn handle(&self) -> Result<FileHandle, Status> {
        Ok(match self.object()? {
            Object::Root => FileHandle::from_slice(&ROOT_HANDLE),
            Object::File(target) => self.server.shares.handle(target.share, &target.file),
        })
    }

    pub(super) fn object(&self) -> Result<&Object<'a>, Status> {
        self.current.as_ref().ok_or(Status::NOFILEHANDLE)
    }

    pub(super) fn set_current(&mut self, object: Object<'a>) -> Done {
        self.current = Some(object);
        self.stateid = None;
        Ok(())
    }

    /// The current file, which must be in a share.
    pub(super) fn target(&self) -> Result<&Target<'a>, Status> {
        match self.object()? {
            Object::File(target) => Ok(target),
            Object::Root => Err(Status::ISDIR),
        }
    }

    /// The current file if it is to be changed.
    pub(super) fn writable(&self) -> Result<&Target<'a>, Status> {
        match self.object()? {
            Object::File(target) if !target.read_only => Ok(target),
            _ => Err(Status::ROFS),
        }
    }

    /// The saved file, in the share of the current one, and that.
    pub(super) fn saved_and_current(&self) -> Result<(&Target<'a>, &Target<'a>), Status> {
        let saved = self.saved.as_ref().ok_or(Status::NOFILEHANDLE)?;
        match (saved, self.object()?) {
            (Object::File(saved), Object::File(current)) if std::ptr::eq(saved.share, current.share) => {
                Ok((saved, current))
            }
            (Object::Root, Object::Root) => Err(Status::ROFS),
            _ => Err(Errno::XDEV.into()),
        }
    }

    /// A stateid, which may be that of an earlier operation (RFC 8881, section 16.2.3.1.2).
    pub(super) fn get_stateid(&self, d: &mut Decoder<'_>) -> Done<Stateid> {
        match Stateid::decode(d)? {
            Stateid::CURRENT if self.minor > 0 => Ok(self.stateid.ok_or(Status::BAD_STATEID)?),
            Stateid::CURRENT | Stateid::INVALID => Err(Status::BAD_STATEID.into()),
            stateid => Ok(stateid),
        }
    }

    fn put_handle(&mut self, d: &mut Decoder<'_>) -> Done {
        let handle = d.opaque(HANDLE_MAX)?;
        // What an operation that asks how to show who calls, or none, does not fail for (RFC 8881, section 2.6.3.1.1).
        let is_asked = match d.rest().first_chunk() {
            Some(next) => [op::SECINFO, op::SECINFO_NO_NAME].contains(&u32::from_be_bytes(*next)),
            None => true,
        };
        match self.set_handle(handle) {
            Err(Failure { status: Status::WRONGSEC, .. }) if is_asked => {
                let (share, _) = self.server.shares.resolve(handle)?;
                self.current = None;
                self.wrong_security = share.security(&self.call.connection);
                Ok(())
            }
            done => done,
        }
    }

    /// Makes the file of a handle the current one.
    pub(super) fn set_handle(&mut self, handle: &[u8]) -> Done {
        if handle == ROOT_HANDLE {
            return self.set_current(Object::Root);
        }
        let target = self.server.shares.target(handle, self.call)?;
        self.set_current(Object::File(target))
    }

    fn get_handle(&self, out: &mut Encoder) -> Done {
        out.opaque(&self.handle()?);
        Ok(())
    }

    /// What there is to know of an object, its file system, and its number where that is mounted.
    pub(super) async fn described(&self, object: &Object<'_>) -> Result<(Attributes, (u64, u64), u64), Errno> {
        match object {
            Object::Root => Ok((self.root_attributes(), ROOT_FSID, ROOT_NUMBER)),
            Object::File(target) => {
                let attributes = target.share.files.attributes(&target.file).await?;
                let is_top = target.file == target.share.files.root();
                let mounted_on = if is_top { share_number(target) } else { attributes.number_in_parent };
                Ok((attributes, fsid(target, &attributes), mounted_on))
            }
        }
    }

    /// Appends the wanted attributes of an object.
    pub(super) async fn put_attributes(&self, out: &mut Encoder, object: &Object<'_>, wanted: &Bitmap) -> Done {
        let (attributes, fsid, mounted_on) = self.described(object).await?;
        let usage = match object {
            Object::File(target) if attributes::STATFS_ATTRIBUTES.iter().any(|number| wanted.contains(*number)) => {
                target.share.files.usage().await?
            }
            _ => Usage::default(),
        };
        let handle = match object {
            Object::Root => ROOT_HANDLE.to_vec(),
            Object::File(target) if wanted.contains(attributes::number::FILEHANDLE) => {
                self.server.shares.handle(target.share, &target.file).to_vec()
            }
            Object::File(_) => Vec::new(),
        };
        let aces = if wanted.contains(attributes::number::ACL) {
            let acl = match object {
                Object::Root => Acl { access: PosixAcl::from_mode(attributes.mode), default: None },
                Object::File(target) => target.share.files.acl(&target.file).await?,
            };
            let aces = to_aces(&acl, attributes.kind == Kind::Directory);
            slices::spend(aces.len() / ENTRIES_OF_UNIT).await;
            Some(aces)
        } else {
            None
        };
        let described = self.describe(&attributes, fsid, mounted_on, &handle, usage);
        attributes::encode(out, wanted, &Described { acl: aces.as_deref(), ..described });
        Ok(())
    }

    pub(super) fn describe<'b>(
        &self,
        attributes: &'b Attributes,
        fsid: (u64, u64),
        mounted_on: u64,
        handle: &'b [u8],
        usage: Usage,
    ) -> Described<'b> {
        let lease_seconds = self.server.lease.as_secs().max(1) as u32;
        Described { minor: self.minor, lease_seconds, attributes, fsid, handle, mounted_on, usage, acl: None }
    }

    /// The directory that has the shares changes only when the server is started.
    fn root_attributes(&self) -> Attributes {
        let time = Time::default();
        Attributes {
            kind: Kind::Directory,
            mode: 0o555,
            links: 2,
            uid: 0,
            gid: 0,
            size: 4096,
            used: 0,
            device: (0, 0),
            fsid: ROOT_FSID.0,
            subvolume: 0,
            number: ROOT_NUMBER,
            number_in_parent: ROOT_NUMBER,
            accessed: time,
            modified: time,
            changed: time,
            change: self.server.shares.iter().map(|share| u64::from(u32::from_be_bytes(share.number()))).sum(),
        }
    }
}

/// Attribute `fsid` of a file. It differs between two shares of one file system, and between two subvolumes, which reuse file numbers.
pub(super) fn fsid(target: &Target<'_>, attributes: &Attributes) -> (u64, u64) {
    let share = u32::from_be_bytes(target.share.number()).into();
    (attributes.fsid, subvolume_number(share, attributes.subvolume))
}

/// Of a share's directory, in the directory that has the shares.
pub(super) fn share_number(target: &Target<'_>) -> u64 {
    ROOT_NUMBER + 1 + u64::from(u32::from_be_bytes(target.share.number()))
}

/// A user, who may have the file open.
pub(super) fn user<'b>(target: &'b Target<'_>, is_open: bool) -> As<'b> {
    As { who: &target.who, is_open }
}

/// A name of an entry (`component4`).
pub(super) fn get_name<'b>(d: &mut Decoder<'b>) -> Done<&'b [u8]> {
    let name = d.opaque(NAME_DECODED_MAX)?;
    match name {
        [] => Err(Status::INVAL.into()),
        _ if name.len() > NAME_MAX as usize => Err(Status::NAMETOOLONG.into()),
        b"." | b".." => Err(Status::BADNAME.into()),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Status::BADNAME.into()),
        _ => Ok(name),
    }
}

/// `change_info4`: others may change a directory between our look at it and our change, so it is not atomic.
pub(super) fn put_change_info(out: &mut Encoder, before: Option<&Attributes>, after: Option<&Attributes>) {
    out.bool(false);
    out.u64(before.map_or(0, |attributes| attributes.change));
    out.u64(after.map_or(0, |attributes| attributes.change));
}
