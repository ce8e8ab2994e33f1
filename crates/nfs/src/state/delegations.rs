//! Files that are delegated to clients (RFC 8881, section 10.4): others who would see or do what is excluded wait until they have been
//! given back, or are revoked.

use super::files::{Held, READ, Removed, WRITE};
use super::quotas::{HostCounts, weight_of};
use super::session::Session;
use super::{
    DELEGATIONS_MAX, DELEGATIONS_OF_CLIENT_MAX, FileIdentity, GrantPermit, HELD_TOTAL_MAX, RECENT_MAX, RECENT_MS,
    Refused, State, Stateid,
};
use crate::status::Status;
use std::collections::HashMap;
use std::sync::Arc;
use thruway_tcp::Origin;
use thruway_vfs::OpenGuard;

/// A file that is delegated.
pub(super) struct Delegation {
    pub client: u64,
    /// Host of the client.
    pub origin: Origin,
    pub file: FileIdentity,
    pub is_write: bool,
    /// User that opened the file and passed the check of its rights.
    uid: u32,
    /// As the client calls it.
    handle: Box<[u8]>,
    /// It is to be given back.
    is_recalled: bool,
    /// It was not given back in time: others have had the file since then.
    pub is_revoked: bool,
    /// What keeps other programs from changing it.
    pub lease: OpenGuard,
}

#[cfg(test)]
impl Delegation {
    pub(super) fn is_waited_for(&self) -> bool {
        self.is_recalled && !self.is_revoked
    }
}

/// What is to be delegated.
pub(crate) struct Delegated {
    pub is_write: bool,
    /// User that has just opened the file.
    pub uid: u32,
    pub handle: Box<[u8]>,
    pub lease: OpenGuard,
}

/// A delegation that has been recalled.
pub(crate) struct Recalled {
    /// By which the client can be called, if there is one.
    pub session: Option<Arc<Session>>,
    pub stateid: Stateid,
    pub handle: Box<[u8]>,
    /// Only clients wait for it.
    pub is_write: bool,
    /// Time in milliseconds that others may still wait for delegations of its host.
    pub time_left_ms: u64,
    /// Time in milliseconds since the client's last WRITE or DELEGRETURN.
    pub idle_ms: u64,
}

/// Files of which a delegation was recalled in the last [`RECENT_MS`]. They are not delegated again. Each counts for the host that had
/// the delegation.
#[derive(Default)]
pub(super) struct RecentRecalls {
    files: HashMap<FileIdentity, (u64, Origin)>,
    of_host: HostCounts,
    /// Time of the last removal of old files.
    swept: u64,
}

/// Minimum interval between two removals of old files, in milliseconds.
const SWEEP_MS: u64 = 1000;

impl RecentRecalls {
    fn insert(&mut self, now: u64, file: &FileIdentity, origin: Origin) {
        self.sweep(now);
        if let Some((time, _)) = self.files.get_mut(file) {
            *time = now;
        } else {
            self.files.insert(file.clone(), (now, origin));
            self.of_host.add(origin, 1);
        }
    }

    fn has(&self, now: u64, file: &FileIdentity) -> bool {
        self.files.get(file).is_some_and(|(time, _)| now < time + RECENT_MS)
    }

    /// False if the files of this host are too many for it to get delegations.
    fn has_room(&mut self, now: u64, origin: Origin) -> bool {
        self.sweep(now);
        self.of_host.has_room(origin, RECENT_MAX)
    }

    fn sweep(&mut self, now: u64) {
        if now < self.swept + SWEEP_MS {
            return;
        }
        self.swept = now;
        let of_host = &mut self.of_host;
        self.files.retain(|_, (time, origin)| {
            let stays = now < *time + RECENT_MS;
            if !stays {
                of_host.add(*origin, -1);
            }
            stays
        });
    }
}

impl State {
    fn delegation(&self, number: u64) -> &Delegation {
        match self.held.get(&number) {
            Some(Held::Delegation(delegation)) => delegation,
            _ => unreachable!("a delegation"),
        }
    }

    /// Whether a file that a client has just opened may be delegated to it. For writing it must be the only one to have it open.
    pub(crate) fn may_delegate(&mut self, now: u64, client: u64, file: &FileIdentity, is_write: bool) -> bool {
        let is_grace = self.is_grace(now);
        let Some(origin) = self.clients.get(&client).map(|client| client.origin) else { return false };
        if !self.may_delegate_to(now, origin) {
            return false;
        }
        let Some(known) = self.clients.get(&client) else { return false };
        let is_full = self.delegations >= DELEGATIONS_MAX
            || known.delegations >= DELEGATIONS_OF_CLIENT_MAX
            || self.weight >= HELD_TOTAL_MAX
            || !self.recent.has_room(now, origin);
        if is_grace || is_full || self.recent.has(now, file) {
            return false;
        }
        let Some(state) = self.files.get(file) else { return false };
        let is_excluded = |number: &u64| {
            let other = self.delegation(*number);
            is_write || other.is_write || other.client == client
        };
        let is_contended = if is_write { state.opens().has_other_client(client) } else { state.opens().has_writer() };
        let has_others = state.changes > 0 || state.is_locked_by_monitored();
        !has_others && !is_contended && !state.delegations.iter().any(is_excluded)
    }

    /// Delegates a file to a client that has it open, if that may be.
    pub(crate) fn delegate(
        &mut self,
        now: u64,
        GrantPermit { client, .. }: GrantPermit,
        file: &FileIdentity,
        Delegated { is_write, uid, handle, lease }: Delegated,
    ) -> Option<Stateid> {
        if !self.may_delegate(now, client, file, is_write) {
            self.dropped.push(lease);
            return None;
        }
        let number = self.number();
        let known = self.clients.get_mut(&client).expect("it has just been there");
        let origin = known.origin;
        known.held.insert(number);
        known.delegations += 1;
        self.add_weight(client, weight_of(0));
        self.delegations += 1;
        self.files.get_mut(file).expect("an open file").delegations.push(number);
        let file = file.clone();
        let (is_recalled, is_revoked) = (false, false);
        let delegation = Delegation { client, origin, file, is_write, uid, handle, is_recalled, is_revoked, lease };
        self.held.insert(number, Held::Delegation(delegation));
        Some(self.stateid_of(number, 1))
    }

    /// Recalls what is delegated of a file and excludes what is to be done with it by this client, if it is known; refused if there is
    /// anything.
    pub(super) fn recall(
        &mut self,
        now: u64,
        file: &FileIdentity,
        is_in_the_way: impl Fn(&Delegation) -> bool,
    ) -> Result<(), Refused> {
        let Some(state) = self.files.get(file) else { return Ok(()) };
        let numbers: Vec<u64> =
            state.delegations.iter().copied().filter(|number| is_in_the_way(self.delegation(*number))).collect();
        if numbers.is_empty() {
            return Ok(());
        }
        self.tick(now);
        let mut refused = Refused::Delegated;
        for number in numbers {
            let Some(Held::Delegation(delegation)) = self.held.get_mut(&number) else { continue };
            let (client, origin) = (delegation.client, delegation.origin);
            self.recent.insert(now, file, origin);
            if !std::mem::replace(&mut delegation.is_recalled, true) {
                self.recalls.push(number);
                self.count_recall(now, origin, true);
            }
            if self.clients.get(&client).is_some_and(|client| self.is_expired(now, client)) {
                refused = Refused::Expired(client);
            }
        }
        Err(refused)
    }

    /// Recalls what others than this client have of a file that is to be changed, or read.
    pub(crate) fn recall_others(
        &mut self,
        now: u64,
        file: &FileIdentity,
        client: Option<u64>,
        is_change: bool,
    ) -> Result<(), Refused> {
        self.recall(now, file, |delegation| Some(delegation.client) != client && (is_change || delegation.is_write))
    }

    /// Recalls all that is delegated of a file: another program changes it.
    pub(crate) fn recall_all(&mut self, now: u64, file: &FileIdentity) {
        // The clients are called, and not waited for.
        let _ = self.recall(now, file, |_| true);
    }

    /// What keeps a file from being opened so by a client, its own delegation for reading included.
    pub(super) fn recall_for_open(
        &mut self,
        now: u64,
        file: &FileIdentity,
        client: u64,
        (access, deny): (u32, u32),
    ) -> Result<(), Refused> {
        let excludes_readers = access & WRITE != 0 || deny & READ != 0;
        self.recall(now, file, |delegation| match delegation.client == client {
            true => access & WRITE != 0 && !delegation.is_write,
            false => excludes_readers || delegation.is_write,
        })
    }

    /// Begins a change of a file that is not open for it; to be ended by [`State::end_change`], if it is not refused.
    pub(crate) fn begin_change(&mut self, now: u64, file: &FileIdentity, client: Option<u64>) -> Result<(), Refused> {
        self.recall_others(now, file, client, true)?;
        self.files.entry(file.clone()).or_default().changes += 1;
        Ok(())
    }

    pub(crate) fn end_change(&mut self, file: &FileIdentity) {
        let Some(state) = self.files.get_mut(file) else { return };
        state.changes -= 1;
        if state.is_unused() {
            self.files.remove(file);
        }
    }

    /// A session by which a client can be called.
    pub(super) fn callable_session(&self, client: u64) -> Option<Arc<Session>> {
        let theirs = self.clients.get(&client)?.sessions.iter().filter_map(|id| self.sessions.get(id));
        theirs.into_iter().find(|session| session.can_call()).cloned()
    }

    /// A delegation that is to be given back; `None` if it has been.
    pub(crate) fn recalled(&self, number: u64) -> Option<Recalled> {
        let Some(Held::Delegation(delegation)) = self.held.get(&number) else { return None };
        if delegation.is_revoked {
            return None;
        }
        Some(Recalled {
            session: self.callable_session(delegation.client),
            stateid: self.stateid_of(number, 1),
            handle: delegation.handle.clone(),
            is_write: delegation.is_write,
            time_left_ms: self.recall_time_left(self.now, delegation.origin),
            idle_ms: self.now - self.clients.get(&delegation.client).map_or(0, |client| client.progressed),
        })
    }

    /// Takes a delegation from a client that has not given it back; whose it was. The client hears of it by its next call, and of
    /// which by TEST_STATEID.
    pub(crate) fn revoke(&mut self, number: u64) -> Option<u64> {
        let Some(Held::Delegation(delegation)) = self.held.get_mut(&number) else { return None };
        if std::mem::replace(&mut delegation.is_revoked, true) {
            return None;
        }
        let (client, file) = (delegation.client, delegation.file.clone());
        let (origin, was_recalled) = (delegation.origin, delegation.is_recalled);
        let mut removed = Removed::default();
        let lease = std::mem::replace(&mut delegation.lease, Arc::new(()));
        self.dropped.push(lease);
        if was_recalled {
            self.count_recall(self.now, origin, false);
        }
        self.recent.insert(self.now, &file, origin);
        // It is not in the way of others any more, and does not count.
        self.delegations -= 1;
        if let Some(client) = self.clients.get_mut(&client) {
            client.lease.revoked(1);
            client.delegations -= 1;
        }
        if let Some(held) = self.held.get(&number) {
            removed.note(number, held);
        }
        self.forget_in_file(&removed, file);
        Some(client)
    }

    /// A client has written, or has returned a delegation.
    pub(super) fn note_progress(&mut self, client: u64) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.progressed = self.now;
        }
    }

    /// A client does not know of a delegation that has been recalled.
    pub(crate) fn forget_delegation(&mut self, number: u64) {
        if matches!(self.held.get(&number), Some(Held::Delegation(delegation)) if !delegation.is_revoked) {
            self.remove_held(number);
        }
    }

    /// A delegation is no longer there.
    pub(super) fn end_delegation(&mut self, delegation: Delegation) {
        let Delegation { is_revoked, is_recalled, client, origin, .. } = delegation;
        if is_recalled && !is_revoked {
            self.count_recall(self.now, origin, false);
        }
        self.delegations -= usize::from(!is_revoked);
        if let Some(client) = self.clients.get_mut(&client) {
            client.delegations -= usize::from(!is_revoked);
            client.lease.revoked(-isize::from(is_revoked));
        }
        self.dropped.push(delegation.lease);
    }

    /// DELEGRETURN
    pub(crate) fn give_back(&mut self, client: u64, stateid: Stateid, file: &FileIdentity) -> Result<(), Status> {
        match self.find(client, stateid)? {
            (number, Held::Delegation(delegation)) if delegation.file == *file => {
                self.remove_held(number);
                self.note_progress(client);
                Ok(())
            }
            _ => Err(Status::BAD_STATEID),
        }
    }

    /// Checks an OPEN by a delegation (`CLAIM_DELEGATE_CUR`). True if the rights of this user were checked at the delegation.
    pub(crate) fn check_delegated(
        &self,
        client: u64,
        uid: u32,
        stateid: Stateid,
        file: &FileIdentity,
        access: u32,
    ) -> Result<bool, Status> {
        match self.find(client, stateid)? {
            (_, Held::Delegation(delegation)) if delegation.file == *file => {
                State::access_delegated(delegation, uid, access & WRITE != 0)
            }
            _ => Err(Status::BAD_STATEID),
        }
    }

    /// As [`State::access`], under a delegation. False for users other than the opener of the file: their rights are not known.
    pub(super) fn access_delegated(delegation: &Delegation, uid: u32, is_write: bool) -> Result<bool, Status> {
        if is_write && !delegation.is_write { Err(Status::OPENMODE) } else { Ok(delegation.uid == uid) }
    }
}
