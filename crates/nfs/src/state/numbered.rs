//! Clients of version 4.0, which have no sessions (RFC 7530, section 9.1): what an owner opens and locks is done in the order of
//! its numbers, and the last of it is not done twice.

use super::clients::{Client, ClientName, Maker, Principal};
use super::files::{Held, Owner};
use super::owners::Owners;
use super::{EXPIRED_MAX, EXPIRED_STATE_MAX, Refused, State, Stateid};
use crate::status::Status;
use std::sync::Arc;

/// What an owner does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Open files.
    Opens,
    /// Lock parts of them.
    Locks,
}

/// What a client of version 4.0 has beside its files.
pub(super) struct Numbering {
    /// What it says to confirm that it is there; and to confirm that it is to be called elsewhere, if it has said so.
    confirmation: [u8; 8],
    next_confirmation: Option<[u8; 8]>,
    pub owners: Owners,
}

impl Default for Numbering {
    fn default() -> Numbering {
        Numbering { confirmation: thruway_engine::random::random(), next_confirmation: None, owners: Owners::default() }
    }
}

/// An owner, one of whose operations is done at a time.
pub(crate) type NumberedOwner = tokio::sync::Mutex<Numbers>;

/// The numbers of an owner.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// That of the last operation, and its reply if it is known.
    last: Option<(u32, Option<Reply>)>,
    /// OPEN_CONFIRM has been received (RFC 7530, section 9.1.11).
    pub is_confirmed: bool,
    /// What it has open that waits for that.
    pub unconfirmed: Option<Stateid>,
}

/// The reply to an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reply {
    /// What it is the reply to.
    pub operation: u32,
    /// 0 or an error.
    pub status: u32,
    pub body: Box<[u8]>,
    /// The handle of the current file afterwards.
    pub handle: Option<Box<[u8]>>,
}

/// What is to be done with an operation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It is the next one.
    New,
    /// It is the last one again, and this is its reply.
    Again(Reply),
}

impl Numbers {
    /// What is to be done with an operation of this number.
    pub(crate) fn turn(&self, number: u32, operation: u32) -> Result<Turn, Status> {
        match &self.last {
            None => Ok(Turn::New),
            Some((last, _)) if number == last.wrapping_add(1) => Ok(Turn::New),
            Some((last, Some(reply))) if number == *last && reply.operation == operation => {
                Ok(Turn::Again(reply.clone()))
            }
            Some(_) => Err(Status::BAD_SEQID),
        }
    }

    /// The operation of this number has been done.
    pub(crate) fn done(&mut self, number: u32, reply: Reply) {
        if self.count(number, reply.status)
            && let Some((_, kept)) = &mut self.last
        {
            *kept = Some(reply);
        }
    }

    /// The operation of this number has ended so, if it counts: errors that come before anything is looked at do not (RFC 7530,
    /// section 9.1.7).
    pub(crate) fn count(&mut self, number: u32, status: u32) -> bool {
        const UNCOUNTED: [Status; 7] = [
            Status::STALE_CLIENTID,
            Status::STALE_STATEID,
            Status::BAD_STATEID,
            Status::BAD_SEQID,
            Status::BADXDR,
            Status::RESOURCE,
            Status::NOFILEHANDLE,
        ];
        let counts = !UNCOUNTED.contains(&Status(status));
        if counts {
            self.last = Some((number, None));
        }
        counts
    }

    /// Forgets the numbers of an owner that was never confirmed.
    pub(crate) fn restart(&mut self) {
        *self = Numbers::default();
    }
}

impl State {
    /// SETCLIENTID, the cases of RFC 7530, section 16.33.5: the client's id and what it confirms it by.
    pub(crate) fn set_client(
        &mut self,
        now: u64,
        name: &[u8],
        verifier: [u8; 8],
        maker: impl Into<Maker>,
    ) -> Result<(u64, [u8; 8]), Refused> {
        let maker = maker.into();
        let name = ClientName::without_sessions(name);
        let (confirmed, unconfirmed) = self.ids_of(&name);
        if let Some(id) = confirmed {
            let client = self.clients.get_mut(&id).expect("a client that is confirmed");
            match (client.principal == maker.principal, client.verifier == verifier) {
                // It says where it is to be called; nothing else has changed.
                (true, true) => {
                    let next = thruway_engine::random::random();
                    if let Some(numbering) = &mut client.numbering {
                        numbering.next_confirmation = Some(next);
                    }
                    unconfirmed.inspect(|id| self.remove_client(*id));
                    return Ok((id, next));
                }
                // It has restarted: what it had goes when it confirms that.
                (true, false) => {}
                // Another user has taken the same name.
                (false, _) if client.held.is_empty() => self.remove_client(id),
                (false, _) => return Err(self.in_the_way(now, id, Status::CLID_INUSE.into())),
            }
        }
        self.check_maker(now, &name, maker.principal)?;
        if let Some(id) = unconfirmed {
            self.remove_client(id);
        }
        let id = self.add_client(now, name, verifier, maker)?;
        let confirmation = self.clients[&id].numbering.as_ref().map_or([0; 8], |numbering| numbering.confirmation);
        Ok((id, confirmation))
    }

    /// SETCLIENTID_CONFIRM, also once more.
    pub(crate) fn confirm_client(
        &mut self,
        now: u64,
        id: u64,
        confirmation: [u8; 8],
        principal: Principal,
    ) -> Result<(), Status> {
        self.forget_unconfirmed(now, id);
        let client = self.clients.get_mut(&id).ok_or(Status::STALE_CLIENTID)?;
        let numbering = client.numbering.as_mut().ok_or(Status::STALE_CLIENTID)?;
        let is_next = numbering.next_confirmation == Some(confirmation);
        if !is_next && numbering.confirmation != confirmation {
            return Err(Status::STALE_CLIENTID);
        }
        if client.principal != principal {
            return Err(Status::CLID_INUSE);
        }
        if is_next {
            numbering.confirmation = confirmation;
            numbering.next_confirmation = None;
        }
        self.confirm(now, id);
        Ok(())
    }

    fn confirmed_without_session(&self, id: u64) -> Result<&Client, Status> {
        let client = self.clients.get(&id).filter(|client| client.is_confirmed && client.numbering.is_some());
        let unknown = || if self.expired.contains(&id) { Status::EXPIRED } else { Status::STALE_CLIENTID };
        client.ok_or_else(unknown)
    }

    /// Remembers an expired client of version 4.0: later calls with its id or its stateids fail with `NFS4ERR_EXPIRED`.
    pub(super) fn remember_expired(&mut self, id: u64) {
        if self.expired.len() >= EXPIRED_MAX {
            self.expired.pop_front();
        }
        self.expired.push_back(id);
        let held = self.clients.get(&id).map(|client| client.held.clone()).unwrap_or_default();
        let room = EXPIRED_STATE_MAX.saturating_sub(held.len());
        if self.expired_state.len() > room {
            // Any stateids may be forgotten: their clients get `NFS4ERR_BAD_STATEID`, and then call with their ids.
            self.expired_state.clear();
        }
        self.expired_state.extend(held);
    }

    /// An owner has closed a file.
    pub(super) fn note_closed(&mut self, client: u64, owner: Owner, number: u64) {
        let Some(before) = self.set_last_closed(client, &owner, number) else { return };
        before.map(|before| self.closed.remove(&before));
        self.closed.insert(number, (client, owner));
    }

    /// RENEW, and all that says the client's id: that is this one if it is a client of version 4.0.
    pub(crate) fn heard_of(&mut self, now: u64, id: u64) -> Result<u64, Status> {
        self.confirmed_without_session(id)?.lease.renew(now);
        Ok(id)
    }

    /// The client of version 4.0 that has this; 0, which is none, if the stateid says that nothing is open.
    pub(crate) fn heard_of_by(&mut self, now: u64, stateid: Stateid) -> Result<u64, Status> {
        if stateid.is_special() {
            return Ok(0);
        }
        let number = self.number_of(stateid).ok_or(Status::STALE_STATEID)?;
        let closed = self.closed.get(&number).map(|(client, _)| *client);
        let unknown = || if self.expired_state.contains(&number) { Status::EXPIRED } else { Status::BAD_STATEID };
        let client = self.held.get(&number).map(Held::client).or(closed).ok_or_else(unknown)?;
        self.heard_of(now, client).map_err(|_| Status::BAD_STATEID)
    }

    /// An owner of a client, who may be new.
    pub(crate) fn numbered(
        &mut self,
        now: u64,
        client: u64,
        role: Role,
        owner: &[u8],
    ) -> Result<Arc<NumberedOwner>, Refused> {
        self.confirmed_without_session(client)?;
        if let Some(known) = self.find_owner(client, role, owner) {
            return Ok(known);
        }
        self.make_room_for_owner(now, client)?;
        Ok(self.add_owner(client, role, owner))
    }

    /// The owner of what is open or locked.
    pub(crate) fn numbered_by(
        &mut self,
        now: u64,
        stateid: Stateid,
        role: Role,
    ) -> Result<Arc<NumberedOwner>, Refused> {
        let client = self.heard_of_by(now, stateid)?;
        let number = self.number_of(stateid).ok_or(Status::BAD_STATEID)?;
        let closed = self.closed.get(&number).map(|(_, owner)| (Role::Opens, owner));
        let (is, owner) = self.held.get(&number).and_then(Held::owner).or(closed).ok_or(Status::BAD_STATEID)?;
        if is != role {
            return Err(Status::BAD_STATEID.into());
        }
        let owner = owner.clone();
        self.numbered(now, client, role, &owner)
    }

    /// Closes what an owner has opened who has not confirmed that it is there.
    pub(crate) fn close_unconfirmed(&mut self, client: u64, stateid: Stateid) {
        let Some(number) = self.number_of(stateid) else { return };
        if matches!(self.held.get(&number), Some(Held::Open(open)) if open.is_unconfirmed && open.client == client) {
            self.remove_held(number);
        }
    }

    /// RELEASE_LOCKOWNER
    pub(crate) fn release_locks_of(&mut self, client: u64, owner: &[u8]) -> Result<(), Status> {
        let Some((has_locks, numbers)) = self.locks_of(client, owner) else { return Ok(()) };
        if has_locks {
            return Err(Status::LOCKS_HELD);
        }
        let numbers: Vec<u64> = numbers.iter().copied().collect();
        numbers.into_iter().for_each(|number| self.remove_held(number));
        self.forget_owner(client, Role::Locks, owner);
        Ok(())
    }
}
