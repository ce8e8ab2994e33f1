//! Clients waiting for locks, and the callbacks due when these are free (RFC 8881, section 9.6).

use super::callback::Notice;
use super::files::{Held, Owner};
use super::quotas::HostCounts;
use super::session::Session;
use super::{FileIdentity, Range, State, Stateid, WAITING_MAX, WAITS_TOTAL_MAX};
use std::collections::HashSet;
use std::sync::Arc;
use thruway_tcp::Origin;

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

    /// A client waits for a lock that has just been refused. It may give up without a word; there is one callback. False if too many wait:
    /// then it gets none.
    pub(crate) fn wait_for_lock(&mut self, waiting: Waiting, file: &FileIdentity) -> bool {
        let lease_ms = self.lease_ms;
        let Some(origin) = self.clients.get(&waiting.client).map(|client| client.origin) else { return false };
        let (owner, range, is_write) = (waiting.owner.clone(), waiting.range, waiting.is_write);
        // Clients of version 4 ask for one lock with an owner; threads of a client of version 3 can wait for both kinds.
        let is_same = |known: &Waiting| {
            (known.client, &known.owner, known.range) == (waiting.client, &owner, range)
                && (known.is_write == is_write || !known.is_monitored)
        };
        let has_ended = |known: &Waiting| !known.is_monitored && waiting.since.saturating_sub(known.since) >= lease_ms;
        let ended = self.end_waits_in(file, |known| is_same(known) || has_ended(known));
        if !ended.iter().any(is_same) && !self.has_place(origin, file) {
            return false;
        }
        let Some(state) = self.files.get_mut(file) else { return false };
        // One that comes again keeps its place.
        let place = state.waiting.partition_point(|known| known.since <= waiting.since);
        let client = waiting.client;
        state.waiting.insert(place, waiting);
        self.waits.add(origin, 1);
        self.note_wait(client, file);
        true
    }

    /// True if a client of a host may wait for a lock of a file. Another wait may end for that.
    fn has_place(&mut self, origin: Origin, file: &FileIdentity) -> bool {
        if !self.waits.has_room(origin, WAITS_TOTAL_MAX) {
            return false;
        }
        let Some(state) = self.files.get(file) else { return false };
        let origin_of = |known: &Waiting| self.clients.get(&known.client).map(|client| client.origin);
        let mut of_hosts = HostCounts::default();
        state.waiting.iter().filter_map(origin_of).for_each(|origin| of_hosts.add(origin, 1));
        if of_hosts.has_room(origin, WAITING_MAX) {
            return true;
        }
        // Those of version 3 may not ask again. The others poll.
        let gives_way = if of_hosts.total() < WAITING_MAX { Some(origin) } else { of_hosts.most() };
        let polls = |known: &&Waiting| !known.is_monitored;
        let mut of_host = state.waiting.iter().filter(polls).filter(|known| origin_of(known) == gives_way);
        let of_all = || state.waiting.iter().find(polls).filter(|_| gives_way != Some(origin));
        let Some(longest) = of_host.next().or_else(of_all) else { return false };
        let (client, owner, range) = (longest.client, longest.owner.clone(), longest.range);
        self.end_waits_in(file, |known| (known.client, &known.owner, known.range) == (client, &owner, range));
        true
    }

    /// Ends waits for locks of a file, and returns them.
    pub(super) fn end_waits_in(&mut self, file: &FileIdentity, ends: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let Some(state) = self.files.get_mut(file) else { return Vec::new() };
        let ended: Vec<Waiting> = state.waiting.extract_if(.., |known| ends(known)).collect();
        ended.iter().for_each(|wait| self.note_end(wait.client, file));
        ended
    }

    /// Counts a wait of a client that has ended.
    fn note_end(&mut self, client: u64, file: &FileIdentity) {
        if let Some(origin) = self.clients.get(&client).map(|client| client.origin) {
            self.waits.add(origin, -1);
        }
        self.note_wait(client, file);
    }

    /// Notes whether a client waits in a file, after that may have changed.
    fn note_wait(&mut self, client: u64, file: &FileIdentity) {
        let waiting = self.files.get(file).into_iter().flat_map(|state| &state.waiting);
        let is_there = waiting.into_iter().any(|known| known.client == client);
        let Some(client) = self.clients.get_mut(&client) else { return };
        if is_there {
            client.waits.insert(file.clone());
        } else {
            client.waits.remove(file);
        }
    }

    /// A client that is gone does not wait any more.
    pub(super) fn forget_waits(&mut self, client: u64, origin: Origin, files: HashSet<FileIdentity>) {
        for file in files {
            let ended = self.end_waits_in(&file, |known| known.client == client).len();
            self.waits.add(origin, -(ended as isize));
        }
        self.freed.retain(|freed| freed.client != client);
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
            self.note_end(waiting.client, file);
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
