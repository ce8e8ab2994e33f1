//! Clients waiting for locks, and the callbacks due when these are free (RFC 8881, section 9.6).

use super::files::{Held, Owner};
use super::{FileIdentity, Range, State, Stateid, WAITING_MAX};
use crate::v4::callback::Notice;
use crate::v4::session::Session;
use std::sync::Arc;

/// A wait for a lock.
pub(crate) struct Waiting {
    pub client: u64,
    pub owner: Owner,
    /// It comes by version 3, and need not ask again.
    pub is_monitored: bool,
    /// As the client calls the file.
    pub handle: Box<[u8]>,
    pub is_write: bool,
    pub range: Range,
    pub since: u64,
}

impl State {
    /// The owner of locks that a stateid stands for.
    pub(crate) fn owner_of_locks(&self, stateid: Stateid) -> Option<Owner> {
        match self.held.get(&self.number_of(stateid)?)? {
            Held::Locks(holder) => Some(holder.owner.clone()),
            Held::Open(_) | Held::Delegation(_) => None,
        }
    }

    /// A client waits for a lock that has just been refused. It may give up without a word; there is one callback.
    pub(crate) fn wait_for_lock(&mut self, waiting: Waiting, file: &FileIdentity) {
        let lease_ms = self.lease_ms;
        let Some(state) = self.files.get_mut(file) else { return };
        let is_other = |known: &Waiting| {
            (known.client, &known.owner, known.range) != (waiting.client, &waiting.owner, waiting.range)
        };
        let still_asks = |known: &Waiting| waiting.since.saturating_sub(known.since) < lease_ms;
        state.waiting.retain(|known| is_other(known) && (known.is_monitored || still_asks(known)));
        if state.waiting.len() >= WAITING_MAX {
            // Those of version 3 may not ask again.
            let Some(longest) = state.waiting.iter().position(|known| !known.is_monitored) else { return };
            state.waiting.remove(longest);
        }
        // One that comes again keeps its place.
        let place = state.waiting.partition_point(|known| known.since <= waiting.since);
        state.waiting.insert(place, waiting);
    }

    /// Locks within this range of a file were released. Without effect if nobody waits for any of it.
    pub(super) fn note_freed(&mut self, file: &FileIdentity, range: Range) {
        let Some(state) = self.files.get(file) else { return };
        if state.waiting.iter().any(|waiting| waiting.range.overlaps(&range)) {
            let all = self.to_wake.entry(file.clone()).or_insert(range);
            *all = all.hull(&range);
        }
    }

    /// True if a lock of another keeps this one from being had.
    fn is_blocked(&self, waiting: &Waiting, file: &FileIdentity) -> bool {
        let Some(state) = self.files.get(file) else { return false };
        let Some(lock) = state.locks.conflict(None, waiting.is_write, waiting.range) else { return false };
        match self.held.get(&lock.holder) {
            Some(Held::Locks(holder)) if (holder.client, &holder.owner) == (waiting.client, &waiting.owner) => {
                state.locks.conflict(Some(lock.holder), waiting.is_write, waiting.range).is_some()
            }
            _ => true,
        }
    }

    /// Notes the callbacks that are due after locks within this range of a file were released.
    fn wake(&mut self, file: &FileIdentity, freed: Range) {
        let Some(state) = self.files.get_mut(file) else { return };
        let waiting = std::mem::take(&mut state.waiting);
        let (ready, rest): (Vec<Waiting>, Vec<Waiting>) =
            waiting.into_iter().partition(|waiting| waiting.range.overlaps(&freed) && !self.is_blocked(waiting, file));
        if let Some(state) = self.files.get_mut(file) {
            state.waiting = rest;
            if state.is_unused() {
                self.files.remove(file);
            }
        }
        for waiting in ready {
            if waiting.is_monitored {
                let freed = self.freed(waiting, file);
                self.freed.extend(freed);
                continue;
            }
            if let Some(session) = self.callable_session(waiting.client) {
                self.notices.push((session, Notice::Lock { handle: waiting.handle, owner: waiting.owner }));
            }
        }
    }

    /// Callbacks that are due: each file in which locks have gone is looked at once.
    pub(crate) fn take_notices(&mut self) -> Vec<(Arc<Session>, Notice)> {
        for (file, freed) in std::mem::take(&mut self.to_wake) {
            self.wake(&file, freed);
        }
        std::mem::take(&mut self.notices)
    }
}
