//! Operations on what is open and locked (RFC 8881, sections 18.2, 18.10 to 18.12, 18.16 and 18.18).

use super::attributes::{self, Wanted};
use super::bitmap::Bitmap;
use super::compound::{Compound, Done, Failure, Object, get_name, put_change_info, user};
use super::recall;
use crate::delegations::Delegate;
use crate::share::Target;
use crate::state::{
    Delegated, GrantPermit, LockRequest, Modes, OpenAs, Owner, READ, Range, Refused, Role, State, Stateid, Turn, WRITE,
    Waiting,
};
use crate::status::Status;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thruway_rpc::xdr::{self, Decoder, Encoder};
use thruway_vfs::{Attributes, Make, OpenGuard, Rights, SetAttributes, SetTime, exclusive_times};

/// Longest name of an owner (`NFS4_OPAQUE_LIMIT`).
const OWNER_MAX: u32 = 1024;

/// Flag of the result of OPEN: locks are as in POSIX.
const LOCKTYPE_POSIX: u32 = 4;

/// Flag of the result of OPEN: a client waiting for a lock gets a callback when it is free (RFC 8881, section 18.16.3).
const MAY_NOTIFY_LOCK: u32 = 0x20;

/// Flag of the result of OPEN: its owner has to confirm that it is there.
const MUST_CONFIRM: u32 = 2;

/// How a file is to be made.
pub(super) enum Creation {
    /// As it is, if it is there.
    Unchecked(Wanted),
    /// Only if it is not there.
    Guarded(Wanted),
    /// Only if it is not there, or was made with this number.
    Exclusive([u8; 8], Wanted),
}

/// Which file is to be opened.
pub(super) enum Claim<'a> {
    /// That with a name in the current directory.
    Name(&'a [u8]),
    /// The current one.
    Current,
    /// The current one, which was open before the server was started.
    Previous,
    /// One that is delegated to the client: that with a name in the current directory, or the current one.
    Delegated(Stateid, Option<&'a [u8]>),
}

/// A client, which counts in version 4.0 only, and an owner.
pub(super) fn get_owner<'b>(d: &mut Decoder<'b>) -> xdr::Result<(u64, &'b [u8])> {
    Ok((d.u64()?, d.opaque(OWNER_MAX)?))
}

pub(super) fn get_claim<'b>(d: &mut Decoder<'b>, minor: u32) -> Done<Claim<'b>> {
    match d.u32()? {
        4.. if minor == 0 => Err(Status::BADXDR.into()),
        0 => Ok(Claim::Name(get_name(d)?)),
        1 => {
            // What delegation it had.
            let _ = d.u32()?;
            Ok(Claim::Previous)
        }
        // Version 4.0 has none.
        2 if minor == 0 => Err(Status::BAD_STATEID.into()),
        2 => {
            let stateid = Stateid::decode(d)?;
            Ok(Claim::Delegated(stateid, Some(get_name(d)?)))
        }
        5 => Ok(Claim::Delegated(Stateid::decode(d)?, None)),
        // Of one that it had before it restarted.
        3 | 6 => Err(Status::NOTSUPP.into()),
        4 => Ok(Claim::Current),
        _ => Err(Status::BADXDR.into()),
    }
}

/// The error of opening something that is no file. `SYMLINK` makes clients of version 4.0 look it up.
fn type_error(error: Errno, minor: u32) -> Status {
    match error {
        Errno::NXIO if minor == 0 => Status::SYMLINK,
        Errno::NXIO => Status::WRONG_TYPE,
        error => error.into(),
    }
}

impl<'a> Compound<'a> {
    pub(super) async fn get_creation(&self, d: &mut Decoder<'_>) -> Done<Option<Creation>> {
        match d.u32()? {
            0 => return Ok(None),
            1 => {}
            _ => return Err(Status::BADXDR.into()),
        }
        Ok(Some(match d.u32()? {
            0 => Creation::Unchecked(self.get_wanted(d).await?),
            1 => Creation::Guarded(self.get_wanted(d).await?),
            2 => Creation::Exclusive(*d.fixed()?, Wanted::default()),
            3 if self.minor > 0 => {
                let (number, wanted) = (*d.fixed()?, self.get_wanted(d).await?);
                if wanted.set.accessed.is_some() || wanted.set.modified.is_some() {
                    return Err(Status::INVAL.into());
                }
                Creation::Exclusive(number, wanted)
            }
            _ => return Err(Status::BADXDR.into()),
        }))
    }

    pub(super) async fn open(&mut self, d: &mut Decoder<'a>, out: &mut Encoder) -> Done {
        /// What may be said beside what is to be read and written: wishes about delegations.
        const WANT: u32 = 0x3_ff00;
        const WANT_DELEGATION: u32 = 0xff00;
        let (_seqid, share, deny) = (d.u32()?, d.u32()?, d.u32()?);
        let (client, owner) = get_owner(d)?;
        let creation = self.get_creation(d).await?;
        let claim = get_claim(d, self.minor)?;
        let access = share & (READ | WRITE);
        let known = if self.minor > 0 { WANT } else { 0 };
        if access == 0 || share & !(known | READ | WRITE) != 0 || deny & !(READ | WRITE) != 0 {
            return Err(Status::INVAL.into());
        }
        let client = self.client_that_says(client)?;
        let is_reclaim = matches!(claim, Claim::Previous);
        // A reclaim is about this run of the server: it is no old message, and needs no OPEN_CONFIRM.
        self.opener_is_confirmed |= is_reclaim;
        let may_have = self.server.may_have(client, is_reclaim).await?;
        // A read-only client cannot deny access to others.
        if deny != 0 && matches!(self.object()?, Object::File(target) if target.read_only) {
            return Err(Status::ROFS.into());
        }
        let mut delegated = None;
        let opening = match claim {
            Claim::Name(name) => self.open_by_name(name, creation, access, (client, owner)).await?,
            Claim::Current | Claim::Previous | Claim::Delegated(..) if creation.is_some() => {
                return Err(Status::INVAL.into());
            }
            Claim::Delegated(stateid, Some(name)) => {
                delegated = Some(stateid);
                self.open_by_name(name, None, access, (client, owner)).await?
            }
            Claim::Current | Claim::Previous | Claim::Delegated(_, None) => {
                if let Claim::Delegated(stateid, _) = claim {
                    delegated = Some(stateid);
                }
                let target = self.target()?.clone();
                Opening::of_existing(target, (None, None))
            }
        };
        let Opening { target, is_new, made, which, size, dir } = opening;
        let opened = self.open_found(&target, is_new, may_have, (access, deny), owner, (is_reclaim, delegated)).await;
        let (guard, stateid, was) = match opened {
            Ok(opened) => opened,
            Err(failure) => {
                if let Some(made) = made {
                    self.remove_made(&target, made).await;
                }
                return Err(failure);
            }
        };
        let (file, is_confirmed) = (target.key(), self.opener_is_confirmed);
        if let Some(size) = size {
            let set = SetAttributes { size: Some(size), ..SetAttributes::default() };
            if let Err(error) = target.share.files.set_attributes(user(&target, true), &target.file, set, None).await {
                self.server.state(|state, _| state.undo_open(client, stateid, &file, was));
                return Err(error.into());
            }
        }
        stateid.encode(out);
        put_change_info(out, dir.0.as_ref(), dir.1.as_ref());
        let notifies = if self.can_call() { MAY_NOTIFY_LOCK } else { 0 };
        out.u32(LOCKTYPE_POSIX | notifies | if is_confirmed { 0 } else { MUST_CONFIRM });
        which.encode(out);
        let delegated = match delegated {
            _ if is_reclaim => Err(NotDelegated::Contended),
            Some(_) => Err(NotDelegated::NotWanted),
            None => self.delegate(&target, &guard, may_have, access, share & WANT_DELEGATION).await,
        };
        put_delegation(out, delegated, share & WANT_DELEGATION != 0);
        self.set_current(Object::File(target))?;
        self.stateid = Some(stateid);
        Ok(())
    }

    /// Opens a file that was found or created. Checks the user's rights and the share reservations.
    async fn open_found(
        &self,
        target: &Target<'a>,
        is_new: bool,
        may_have: GrantPermit,
        (access, deny): Modes,
        owner: &[u8],
        (is_reclaim, delegated): (bool, Option<Stateid>),
    ) -> Done<(OpenGuard, Stateid, Option<Modes>)> {
        let client = may_have.client();
        if access & WRITE != 0 && target.read_only {
            return Err(Status::ROFS.into());
        }
        let (file, uid) = (target.key(), target.who.uid);
        let was_checked = match delegated {
            Some(stateid) => {
                self.server.state(|state, _| state.check_delegated(client, uid, stateid, &file, access))?
            }
            None => false,
        };
        // Permissions apply neither to the creator of a file nor to the owner of a file that was open before: they may have changed since.
        let was_open = is_reclaim || delegated.is_some();
        let is_granted = is_new || was_checked || was_open && target.attributes().await.is_some_and(|a| a.uid == uid);
        let wanted = Rights {
            read: !is_granted && access & READ != 0,
            write: !is_granted && access & WRITE != 0,
            execute: false,
        };
        let check = |state: &mut State, now| state.check_open(now, client, owner, &file);
        self.server.retry_on_conflict(check).await?;
        let guard = self.open_file(target, wanted).await?;
        let how = OpenAs { owner, uid, modes: (access, deny), is_confirmed: self.opener_is_confirmed };
        let action = |state: &mut State, now| state.open(now, may_have, how, &file, Arc::clone(&guard));
        let (stateid, was) = self.server.retry_on_conflict(action).await?;
        Ok((guard, stateid, was))
    }

    /// Removes a file that a failed OPEN has created, unless it was used or changed since.
    async fn remove_made(&self, target: &Target<'a>, made: Made<'a>) {
        let Made { dir, name, change } = made;
        let files = &target.share.files;
        let is_as_made = files.look_up(&dir.who, &dir.file, name).await.is_ok_and(|(file, attributes)| {
            file == target.file && attributes.change == change && attributes.links == 1
        });
        if is_as_made && !self.server.state(|state, _| state.is_in_use(&target.key())) {
            let removed = files.remove(&dir.who, &dir.file, name, false).await;
            tracing::debug!(?removed, "removing the file that a failed OPEN has created");
        }
    }

    /// Opens a file. If clients have too many open, those give way that are not heard of.
    async fn open_file(&self, target: &Target<'_>, wanted: Rights) -> Done<OpenGuard> {
        loop {
            let error = match target.share.files.open(&target.who, &target.file, wanted).await {
                Ok((guard, _)) => return Ok(guard),
                Err(error) => error,
            };
            match self.server.state(|state, now| state.longest_expired_of_all(now)) {
                Some(client) if error == Errno::NOSPC => self.server.expire(client).await?,
                _ => return Err(type_error(error, self.minor).into()),
            }
        }
    }

    /// Delegates a file that has just been opened to its client, if it wants that and others do not need the file.
    async fn delegate(
        &self,
        target: &Target<'_>,
        guard: &OpenGuard,
        may_have: GrantPermit,
        access: u32,
        wanted: u32,
    ) -> Result<(bool, Stateid), NotDelegated> {
        const NOT_WANTED: u32 = 0x400;
        const CANCEL: u32 = 0x500;
        if wanted == NOT_WANTED || wanted == CANCEL {
            return Err(NotDelegated::NotWanted);
        }
        let (share, file) = (target.share, target.key());
        let is_write = match (access & WRITE != 0, access & READ != 0) {
            (true, true) if share.delegate >= Delegate::Writing => true,
            (false, true) if share.delegate >= Delegate::Reading => false,
            _ => return Err(NotDelegated::Unavailable),
        };
        if !self.can_call() {
            return Err(NotDelegated::Unavailable);
        }
        let client = self.client().map_err(|_| NotDelegated::Unavailable)?;
        if !self.server.state(|state, now| state.may_delegate(now, client, &file, is_write)) {
            return Err(NotDelegated::Contended);
        }
        let (lease, is_changed) = if share.files.is_private() || share.delegate == Delegate::Writing {
            (Arc::new(()) as OpenGuard, Arc::default())
        } else {
            let (on_change, is_changed) = recall::on_change(self.server, file.clone());
            let lease = share.files.lease(&target.file, on_change).await;
            (lease.map_err(|_| NotDelegated::Unavailable)?, is_changed)
        };
        let handle = self.server.shares.handle(share, &target.file);
        // The client opens it by itself, so that it is open for as long.
        let lease = Arc::new((lease, Arc::clone(guard)));
        let delegated = Delegated { is_write, uid: target.who.uid, handle: handle[..].into(), lease };
        self.server.state(|state, now| {
            let stateid = state.delegate(now, may_have, &file, delegated).ok_or(NotDelegated::Contended)?;
            // What has come before it was there has found nothing to recall.
            if is_changed.load(Ordering::SeqCst) {
                state.recall_all(now, &file);
            }
            Ok((is_write, stateid))
        })
    }

    /// DELEGRETURN
    pub(super) fn give_back(&mut self, d: &mut Decoder<'_>) -> Done {
        let stateid = self.get_stateid(d)?;
        let (client, file) = (self.client_with(stateid)?, self.target()?.key());
        self.server.state(|state, _| state.give_back(client, stateid, &file))?;
        self.server.given_back.notify_waiters();
        Ok(())
    }

    async fn open_by_name(
        &self,
        name: &'a [u8],
        creation: Option<Creation>,
        access: u32,
        (client, owner): (u64, &[u8]),
    ) -> Done<Opening<'a>> {
        let Object::File(dir) = self.object()?.clone() else {
            // There are only directories, and nothing can be made.
            let is_there = self.find(name).await.is_ok();
            return Err(match creation {
                _ if is_there => Status::ISDIR,
                Some(_) => Status::ROFS,
                None => Status::NOENT,
            }
            .into());
        };
        let Some(creation) = creation else {
            let Object::File(target) = self.find(name).await? else { return Err(Status::ISDIR.into()) };
            let now = dir.attributes().await;
            return Ok(Opening::of_existing(target, (now, now)));
        };
        let (what, wanted, may_exist) = match creation {
            Creation::Unchecked(wanted) => (Make::NewFile, wanted, true),
            Creation::Guarded(wanted) => (Make::NewFile, wanted, false),
            Creation::Exclusive(number, wanted) => (Make::Exclusive(number), wanted, false),
        };
        let mut which = wanted.which.clone();
        if matches!(what, Make::Exclusive(_)) {
            // Where its number is kept: the client sets the times afterwards, because it is told so.
            use attributes::number::{TIME_ACCESS, TIME_ACCESS_SET, TIME_MODIFY, TIME_MODIFY_SET};
            [TIME_ACCESS, TIME_ACCESS_SET, TIME_MODIFY, TIME_MODIFY_SET].into_iter().for_each(|n| which.insert(n));
        }
        let before = dir.attributes().await;
        loop {
            // On a share that cannot be changed, what is there can be opened all the same.
            if may_exist {
                match self.find(name).await {
                    Ok(Object::File(target)) => {
                        // Of what is set when a file is made, only a size of 0 counts for one that is there.
                        let size = wanted.set.size.filter(|size| *size == 0 && access & WRITE != 0);
                        let which = Bitmap::of(if size.is_some() { &[attributes::number::SIZE] } else { &[] });
                        return Ok(Opening { which, size, ..Opening::of_existing(target, (before, before)) });
                    }
                    Ok(Object::Root) => return Err(Status::ISDIR.into()),
                    Err(failure) if failure.status == Status::NOENT => {}
                    Err(failure) => return Err(failure),
                }
            }
            self.writable()?;
            // Checked before the file is created, because an OPEN that fails later would have to remove the file.
            let file_system = dir.share.files.fsid();
            let check = |state: &mut State, now| state.check_opener(now, client, owner, file_system);
            self.server.retry_on_conflict(check).await?;
            let files = &dir.share.files;
            let (made, is_found) = match &what {
                Make::Exclusive(number) => {
                    // The first attempt only creates a new file, so `is_found` is true for a repeated creation. Its file must not be
                    // removed if the OPEN fails.
                    let (accessed, modified) = exclusive_times(*number);
                    let (accessed, modified) = (Some(SetTime::To(accessed)), Some(SetTime::To(modified)));
                    let set = SetAttributes { accessed, modified, ..wanted.set };
                    match files.make(&dir.who, &dir.file, name, Make::NewFile, set).await {
                        Err(Errno::EXIST) => {
                            (files.make(&dir.who, &dir.file, name, what.clone(), wanted.set).await, true)
                        }
                        made => (made, false),
                    }
                }
                _ => (files.make(&dir.who, &dir.file, name, what.clone(), wanted.set).await, false),
            };
            match made {
                // Somebody else has made it meanwhile.
                Err(Errno::EXIST) if may_exist => {}
                made => {
                    let (file, attributes) = made?;
                    let target = Target { file, ..dir.clone() };
                    let after = dir.attributes().await;
                    // A file that was found may belong to another user and have these times by chance.
                    let is_new = !is_found || attributes.uid == dir.who.uid;
                    let made = (!is_found).then_some(Made { dir, name, change: attributes.change });
                    return Ok(Opening { is_new, made, which, ..Opening::of_existing(target, (before, after)) });
                }
            }
        }
    }

    pub(super) fn downgrade(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (stateid, _seqid, access, deny) = (self.get_stateid(d)?, d.u32()?, d.u32()?, d.u32()?);
        // Wishes about delegations, which version 4.0 does not have.
        let access = if self.minor > 0 { access & 0xff } else { access };
        if access == 0 || (access | deny) & !(READ | WRITE) != 0 {
            return Err(Status::INVAL.into());
        }
        let (client, file) = (self.client_with(stateid)?, self.target()?.key());
        let stateid = self.server.state(|state, _| state.downgrade(client, stateid, &file, (access, deny)))?;
        self.put_stateid(stateid, out);
        Ok(())
    }

    fn put_stateid(&mut self, stateid: Stateid, out: &mut Encoder) {
        self.stateid = Some(stateid);
        stateid.encode(out);
    }

    pub(super) fn close(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (_seqid, stateid) = (d.u32()?, self.get_stateid(d)?);
        let (client, file) = (self.client_with(stateid)?, self.target()?.key());
        self.server.state(|state, _| state.close(client, stateid, &file))?;
        self.stateid = None;
        match self.minor {
            0 => Stateid { seqid: stateid.seqid.wrapping_add(1), ..stateid }.encode(out),
            _ => Stateid::INVALID.encode(out),
        }
        Ok(())
    }

    /// Type of a lock: whether it is for writing, and whether the client waits for it.
    fn get_lock_type(d: &mut Decoder<'_>) -> Done<(bool, bool)> {
        match d.u32()? {
            1 => Ok((false, false)),
            2 => Ok((true, false)),
            3 => Ok((false, true)),
            4 => Ok((true, true)),
            _ => Err(Status::BADXDR.into()),
        }
    }

    fn get_range(d: &mut Decoder<'_>) -> Done<Range> {
        let (offset, len) = (d.u64()?, d.u64()?);
        Ok(Range::new(offset, len).ok_or(Status::INVAL)?)
    }

    pub(super) async fn lock(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let ((is_write, is_waiting), is_reclaim) = (Self::get_lock_type(d)?, d.bool()?);
        let range = (d.u64()?, d.u64()?);
        let (locker, number, by) = if d.bool()? {
            let (_, open, number) = (d.u32()?, self.get_stateid(d)?, d.u32()?);
            let (client, owner) = get_owner(d)?;
            // In version 4.0 the lock owner must belong to the client that has the file open (RFC 7530, section 9.1.5).
            if self.minor == 0 && self.client_that_says(client)? != self.client_with(open)? {
                return Err(Status::BAD_STATEID.into());
            }
            (Locker::New(open, owner.into()), number, open)
        } else {
            let (stateid, _) = (self.get_stateid(d)?, d.u32()?);
            (Locker::Existing(stateid), 0, stateid)
        };
        let range = Range::new(range.0, range.1).ok_or(Status::INVAL)?;
        let (client, file) = (self.client_with(by)?, self.target()?.key());
        let may_have = self.server.may_have(client, is_reclaim).await?;
        // The numbers of an owner of locks begin with its first, or go on where it has some in another file.
        let numbered = match &locker {
            Locker::New(_, owner) if self.minor == 0 => {
                let find = |state: &mut State, now| state.numbered(now, client, Role::Locks, owner);
                Some(self.server.retry_on_conflict(find).await?)
            }
            _ => None,
        };
        let mut numbers = match &numbered {
            Some(owner) => Some(owner.lock().await),
            None => None,
        };
        if numbers.as_ref().is_some_and(|numbers| numbers.turn(number, super::op::LOCK) != Ok(Turn::New)) {
            return Err(Status::BAD_SEQID.into());
        }
        // A callback follows, if the client can be called.
        let handle: Option<Box<[u8]>> =
            if is_waiting && self.can_call() { Some(self.handle()?[..].into()) } else { None };
        let action = |state: &mut State, now| {
            let request = match &locker {
                Locker::New(open, owner) => LockRequest::New { open: *open, owner: owner.clone() },
                Locker::Existing(stateid) => LockRequest::Existing(*stateid),
            };
            let result = state.lock(now, may_have, request, &file, is_write, range);
            if let (Err(Refused::Denied(_)), Some(handle)) = (&result, &handle) {
                let owner = match &locker {
                    Locker::New(_, owner) => Some(owner.clone()),
                    Locker::Existing(stateid) => state.owner_of_locks(*stateid),
                };
                if let Some(owner) = owner {
                    let handle = handle.clone();
                    let waiting = Waiting { client, owner, is_monitored: false, handle, is_write, range, since: now };
                    state.wait_for_lock(waiting, &file);
                }
            }
            result
        };
        let locked = self.server.retry_on_conflict(action).await.map_err(Failure::from);
        if let Some(numbers) = &mut numbers {
            numbers.count(number, locked.as_ref().map_or_else(|failure| failure.status.0, |_| 0));
        }
        let stateid = locked?;
        self.put_stateid(stateid, out);
        Ok(())
    }

    pub(super) async fn test_lock(&mut self, d: &mut Decoder<'_>) -> Done {
        let ((is_write, _), range, (client, owner)) = (Self::get_lock_type(d)?, Self::get_range(d)?, get_owner(d)?);
        let (client, file) = (self.client_that_says(client)?, self.target()?.key());
        self.regular(self.target()?).await?;
        self.server.may_have(client, false).await?;
        let action = |state: &mut State, now| {
            // The holder of a delegation may have locked parts by itself.
            state.recall_others(now, &file, Some(client), is_write)?;
            state.test_lock(now, client, owner, &file, is_write, range)
        };
        self.server.retry_on_conflict(action).await?;
        Ok(())
    }

    pub(super) fn unlock(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let _type = Self::get_lock_type(d)?;
        let (_seqid, stateid, range) = (d.u32()?, self.get_stateid(d)?, Self::get_range(d)?);
        let (client, file) = (self.client_with(stateid)?, self.target()?.key());
        let stateid = self.server.state(|state, _| state.unlock(client, stateid, &file, range))?;
        self.put_stateid(stateid, out);
        Ok(())
    }
}

/// Why a file is not delegated.
#[derive(Debug, Clone, Copy)]
enum NotDelegated {
    NotWanted,
    /// Others need it.
    Contended,
    /// The client cannot be called, or the file cannot be kept from others.
    Unavailable,
}

/// `open_delegation4`; why there is none is for those who have said what they want.
fn put_delegation(out: &mut Encoder, delegated: Result<(bool, Stateid), NotDelegated>, has_asked: bool) {
    const NONE: u32 = 0;
    const READING: u32 = 1;
    const WRITING: u32 = 2;
    const NONE_AND_WHY: u32 = 3;
    const CONTENTION: u32 = 1;
    const RESOURCE: u32 = 2;
    match delegated {
        Ok((is_write, stateid)) => {
            out.u32(if is_write { WRITING } else { READING });
            stateid.encode(out);
            // Not recalled yet.
            out.bool(false);
            if is_write {
                // It may grow the file as far as it likes (`NFS_LIMIT_SIZE`): what there is no room for fails when it is written.
                out.u32(1);
                out.u64(u64::MAX);
            }
            // The client asks for the rights of each user.
            [0, 0, 0].into_iter().for_each(|word| out.u32(word));
            out.opaque(b"");
        }
        Err(_) if !has_asked => out.u32(NONE),
        Err(why) => {
            out.u32(NONE_AND_WHY);
            match why {
                NotDelegated::NotWanted => out.u32(0),
                // It is not told when it could be.
                NotDelegated::Contended => [CONTENTION, 0].into_iter().for_each(|word| out.u32(word)),
                NotDelegated::Unavailable => [RESOURCE, 0].into_iter().for_each(|word| out.u32(word)),
            }
        }
    }
}

/// Who wants a lock.
enum Locker {
    New(Stateid, Owner),
    Existing(Stateid),
}

/// A file that an OPEN has created.
struct Made<'a> {
    dir: Target<'a>,
    name: &'a [u8],
    /// Change attribute at its creation.
    change: u64,
}

impl<'a> Opening<'a> {
    fn of_existing(target: Target<'a>, dir: (Option<Attributes>, Option<Attributes>)) -> Opening<'a> {
        Opening { target, is_new: false, made: None, which: Bitmap::default(), size: None, dir }
    }
}

/// A file that has been found or made.
struct Opening<'a> {
    target: Target<'a>,
    is_new: bool,
    made: Option<Made<'a>>,
    /// Attributes that have been, or will be, set.
    which: Bitmap,
    /// To be set when it is open.
    size: Option<u64>,
    /// Its directory before and after.
    dir: (Option<Attributes>, Option<Attributes>),
}
