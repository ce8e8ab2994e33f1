//! Per-host quotas of server-wide resources, so that no single host can exhaust them.
//!
//! Resources: clients, sessions, kept replies, opens, lock owners, owners of version 4.0, open files, and the time that others wait for
//! recalled delegations.

use super::clients::{Among, Client, Kind};
use super::{
    CLIENTS_MAX, CLIENTS_OF_HOST_MAX, FileIdentity, HELD_TOTAL_MAX, KEPT_MAX, LOCKS_TOTAL_MAX, OWNERS_TOTAL_MAX,
    Refused, SESSIONS_TOTAL_MAX, State,
};
use crate::status::Status;
use std::collections::{HashMap, VecDeque};
use thruway_engine::quota::is_fair;
use thruway_tcp::Origin;

/// Resources that the clients of one host hold.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    pub clients: usize,
    pub sessions: usize,
    /// Bytes of replies that the sessions may keep.
    pub kept: u64,
    /// As [`State::weight`].
    pub weight: usize,
    /// As [`State::numbered`].
    pub owners: usize,
}

/// Counts by host. A host with a count of 0 takes no memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HostCounts {
    total: usize,
    of_host: HashMap<Origin, usize>,
}

impl HostCounts {
    pub(super) fn of(&self, host: Origin) -> usize {
        self.of_host.get(&host).copied().unwrap_or(0)
    }

    /// Sum of the counts of all hosts.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn add(&mut self, host: Origin, more: isize) {
        let count = self.of_host.entry(host).or_default();
        let before = *count;
        *count = count.saturating_add_signed(more);
        self.total = self.total - before + *count;
        if *count == 0 {
            self.of_host.remove(&host);
        }
    }

    /// True if a host may have one more while all together may have this many.
    pub(crate) fn has_room(&self, host: Origin, max: usize) -> bool {
        is_fair(self.of(host), max.saturating_sub(self.total))
    }

    /// Host with the highest count.
    pub(super) fn most(&self) -> Option<Origin> {
        self.of_host.iter().max_by_key(|(_, count)| **count).map(|(host, _)| *host)
    }
}

/// Open files of one file system.
#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    /// Limit of the file system, if it has one.
    max: Option<usize>,
    of_host: HostCounts,
}

/// Bytes of an owner's name that add one to the weight.
const NAME_WEIGHT: usize = 256;

/// Weight of an open, lock owner or delegation, by the length of the owner's name.
pub(super) fn weight_of(owner: usize) -> usize {
    1 + owner / NAME_WEIGHT
}

/// Time that others have waited for recalled delegations of one host.
#[derive(Debug, Default)]
pub(super) struct RecallDelays {
    /// Delegations with a recall in progress.
    pending: usize,
    /// Time when `pending` last changed from 0 to 1, in milliseconds.
    since: u64,
    /// End and length of each earlier wait, in milliseconds.
    past: VecDeque<(u64, u64)>,
}

/// Most waits that are recorded one by one; older waits are merged.
const DELAYS_MAX: usize = 64;

/// Window over which waits are summed, in lease times.
const DELAY_WINDOW: u64 = 10;

/// Most hosts with recorded waits. Beyond that, other hosts get no delegations.
const DELAYED_HOSTS_MAX: usize = 4096;

impl RecallDelays {
    fn begin(&mut self, now: u64) {
        if self.pending == 0 {
            self.since = now;
        }
        self.pending += 1;
    }

    fn end(&mut self, now: u64) {
        self.pending = self.pending.saturating_sub(1);
        if self.pending > 0 {
            return;
        }
        self.past.push_back((now, now.saturating_sub(self.since)));
        if self.past.len() > DELAYS_MAX {
            // The oldest wait is merged into the next one, and counts until the next one leaves the window.
            let earlier = self.past.pop_front().map_or(0, |(_, length)| length);
            if let Some((_, length)) = self.past.front_mut() {
                *length += earlier;
            }
        }
    }

    /// Milliseconds of waits within the window that ends now.
    fn waited(&self, now: u64, window: u64) -> u64 {
        let past = self.past.iter().filter(|(end, _)| end + window > now).map(|(_, length)| length).sum::<u64>();
        past + if self.pending > 0 { now.saturating_sub(self.since) } else { 0 }
    }

    fn is_over(&self, now: u64, window: u64) -> bool {
        self.pending == 0 && self.past.back().is_none_or(|(end, _)| end + window <= now)
    }
}

#[cfg(test)]
impl State {
    /// Asserts that the counters match a full scan.
    pub(super) fn check_counts(&self) {
        self.check_owners();
        use super::files::Held;
        let mut locks = HostCounts::default();
        let all = self.files.values().flat_map(|state| state.all_locks());
        all.for_each(|lock| locks.add(self.origin_of(lock.holder), 1));
        assert_eq!(self.locks, locks);
        let mut waits = HostCounts::default();
        for (file, state) in &self.files {
            for waiting in &state.waiting {
                let client = &self.clients[&waiting.client];
                assert!(client.waits.contains(file));
                waits.add(client.origin, 1);
            }
        }
        assert_eq!(self.waits, waits);
        for (file, state) in &self.files {
            let of_file: Vec<&Held> = self.held.values().filter(|held| held.file() == file).collect();
            let opens = of_file.iter().filter(|held| matches!(held, Held::Open(_))).count();
            let locks = of_file.iter().filter(|held| matches!(held, Held::Locks(_))).count();
            assert_eq!((state.opens().len(), state.held()), (opens, opens + locks), "{file:?}");
            state.check_locks(|holder| self.origin_of(holder));
        }
        let of_clients: Vec<&[u8; 16]> = self.clients.values().flat_map(|client| &client.sessions).collect();
        let is_there = |id: &&[u8; 16]| self.sessions.contains_key(*id);
        assert_eq!((of_clients.len(), of_clients.iter().all(is_there)), (self.sessions.len(), true), "sessions");
        let open = self.files.values().filter(|state| state.is_open()).count();
        let counted: usize = self.open_files.values().map(|files| files.of_host.total()).sum();
        let by_host: usize = self.open_files.values().flat_map(|files| files.of_host.of_host.values()).sum();
        assert_eq!((counted, by_host), (open, open), "open files");
        let recalled = |held: &&Held| matches!(held, Held::Delegation(delegation) if delegation.is_waited_for());
        let pending: usize = self.recall_delays.values().map(|delays| delays.pending).sum();
        assert_eq!(pending, self.held.values().filter(recalled).count(), "recalls");
    }
}

impl State {
    fn usage(&self, origin: Origin) -> Usage {
        self.origins.get(&origin).copied().unwrap_or_default()
    }

    /// Checks the quota of a host for clients. May evict an idle client of the same host.
    pub(super) fn check_clients(&mut self, now: u64, origin: Origin) -> Result<(), Refused> {
        let free = CLIENTS_MAX.saturating_sub(self.clients.len());
        // Without free room, `make_room` evicts a client of a host with more clients.
        if free == 0 || is_fair(self.usage(origin).clients, free) {
            return Ok(());
        }
        let own = self.clients.iter().filter(|(_, client)| client.origin == origin);
        let idle = own.filter(|(_, client)| {
            client.held.is_empty() && (client.sessions.is_empty() || self.is_expired(now, client))
        });
        let first = idle.min_by_key(|(_, client)| (client.is_confirmed, client.lease.renewed())).map(|(id, _)| *id);
        if let Some(id) = first {
            self.remove_client(id);
            return Ok(());
        }
        match self.full(now, Among::ClientsOf(origin)) {
            Refused::Status(_) => Err(Status::DELAY.into()),
            expired => Err(expired),
        }
    }

    /// Checks the limit of sessions and the quota of a host.
    pub(super) fn check_sessions(&self, now: u64, origin: Origin) -> Result<(), Refused> {
        let all = self.sessions.len();
        if all >= SESSIONS_TOTAL_MAX {
            return Err(self.full(now, Among::Sessions));
        }
        if !is_fair(self.usage(origin).sessions, SESSIONS_TOTAL_MAX - all) {
            return Err(self.full(now, Among::SessionsOf(origin)));
        }
        Ok(())
    }

    /// True if the sessions of a host may keep this many more bytes of replies.
    pub(super) fn has_room_for_replies(&self, origin: Origin, bytes: u64) -> bool {
        let all: u64 = self.origins.values().map(|usage| usage.kept).sum();
        let free = KEPT_MAX.saturating_sub(all);
        bytes <= free && is_fair((self.usage(origin).kept >> 10) as usize, (free >> 10) as usize)
    }

    /// Adds a session to the counts of a host (`is_there`), or removes it; `kept` is the bytes of replies that it may keep.
    pub(super) fn count_session(&mut self, origin: Origin, kept: u64, is_there: bool) {
        let usage = self.origins.entry(origin).or_default();
        match is_there {
            true => (usage.sessions, usage.kept) = (usage.sessions + 1, usage.kept + kept),
            false => (usage.sessions, usage.kept) = (usage.sessions - 1, usage.kept - kept),
        }
    }

    /// Checks the limit for all clients and the quota of the client's host. The limit of the client itself is checked elsewhere.
    pub(super) fn check_room(&self, now: u64, client: &Client, weight: usize) -> Result<(), Refused> {
        if self.weight + weight > HELD_TOTAL_MAX {
            return Err(self.full(now, Among::Clients));
        }
        if !is_fair(self.usage(client.origin).weight, HELD_TOTAL_MAX - self.weight) {
            return Err(self.full(now, Among::ClientsOf(client.origin)));
        }
        Ok(())
    }

    /// True if the clients of a host may have another owner of version 4.0.
    pub(super) fn has_room_for_owner(&self, origin: Origin) -> bool {
        is_fair(self.owners_of(origin), OWNERS_TOTAL_MAX.saturating_sub(self.numbered))
    }

    /// Owners of version 4.0 of the clients of a host.
    pub(super) fn owners_of(&self, origin: Origin) -> usize {
        self.usage(origin).owners
    }

    /// Adds an owner of version 4.0 to the counts of a host (`is_there`), or removes it from them.
    pub(super) fn count_owner(&mut self, origin: Origin, is_there: bool) {
        let more = if is_there { 1 } else { -1 };
        self.numbered = self.numbered.saturating_add_signed(more);
        let usage = self.origins.entry(origin).or_default();
        usage.owners = usage.owners.saturating_add_signed(more);
    }

    /// Checks the quotas of a host for locks of one file and of all files.
    pub(super) fn check_locks_in_file(&self, now: u64, origin: Origin, file: &FileIdentity) -> Result<(), Refused> {
        if !self.locks.has_room(origin, LOCKS_TOTAL_MAX) {
            let among = if self.locks.total() >= LOCKS_TOTAL_MAX { Among::Clients } else { Among::ClientsOf(origin) };
            return Err(self.full(now, among));
        }
        let is_free = self.files.get(file).is_none_or(|state| state.has_room_for_lock(origin));
        if is_free { Ok(()) } else { Err(self.full(now, Among::File(file.clone()))) }
    }

    /// Checks the quota of a host for opens and lock owners of one file.
    pub(super) fn check_room_in_file(&self, now: u64, origin: Origin, file: &FileIdentity) -> Result<(), Refused> {
        let Some(state) = self.files.get(file) else { return Ok(()) };
        if state.has_room_for_holder(origin) { Ok(()) } else { Err(self.full(now, Among::File(file.clone()))) }
    }

    pub(super) fn with_something_of(&self, origin: Origin) -> impl Iterator<Item = u64> {
        let theirs = self.clients.iter().filter(move |(_, client)| client.origin == origin && !client.held.is_empty());
        theirs.map(|(id, _)| *id)
    }

    /// Sets the limits of open files, by file system. Limits of the same file system add up.
    pub(crate) fn with_open_files(mut self, limits: impl IntoIterator<Item = (u64, usize)>) -> State {
        for (file_system, max) in limits {
            let known = self.open_files.entry(file_system).or_default();
            known.max = Some(known.max.unwrap_or(0).saturating_add(max));
        }
        self
    }

    /// Checks the quota of a host for open files of a file system, before a client opens a file that is not open yet.
    pub(super) fn check_open_files(&self, now: u64, origin: Origin, file_system: u64) -> Result<(), Refused> {
        let Some(OpenFiles { max: Some(max), of_host }) = self.open_files.get(&file_system) else { return Ok(()) };
        if of_host.has_room(origin, *max) { Ok(()) } else { Err(self.full(now, Among::Clients)) }
    }

    /// Adds an open file to the counts of its file system and of this host (`is_open`), or removes it from them.
    pub(super) fn count_open_file(&mut self, file_system: u64, origin: Origin, is_open: bool) {
        let files = self.open_files.entry(file_system).or_default();
        files.of_host.add(origin, if is_open { 1 } else { -1 });
    }

    /// Adds to the weight of a client, of its host and of all clients.
    pub(super) fn add_weight(&mut self, client: u64, weight: usize) {
        let Some(client) = self.clients.get_mut(&client) else { return };
        client.weight += weight;
        self.weight += weight;
        self.origins.entry(client.origin).or_default().weight += weight;
    }

    /// Subtracts from the weight of a client, of its host and of all clients. Without effect for a removed client, because the
    /// removal has subtracted its weight.
    pub(super) fn remove_weight(&mut self, client: u64, weight: usize) {
        let Some(client) = self.clients.get_mut(&client) else { return };
        client.weight -= weight;
        self.weight -= weight;
        self.origins.entry(client.origin).or_default().weight -= weight;
    }

    pub(super) fn origin_has_client(&mut self, origin: Origin) {
        self.origins.entry(origin).or_default().clients += 1;
    }

    /// Subtracts a removed client, its weight and its owners. Its sessions were subtracted before.
    pub(super) fn origin_has_lost(&mut self, client: &Client) {
        let owners = client.numbering.as_ref().map_or(0, |numbering| numbering.owners.len());
        self.weight -= client.weight;
        self.numbered -= owners;
        let Some(origin) = self.origins.get_mut(&client.origin) else { return };
        origin.clients -= 1;
        origin.weight -= client.weight;
        origin.owners -= owners;
        if *origin == Usage::default() {
            self.origins.remove(&client.origin);
        }
    }

    /// Client to evict for a new client of host `new`. It holds nothing, and its host has the most clients.
    pub(super) fn gives_way_to(&self, new: Origin) -> Option<u64> {
        let own = self.usage(new).clients;
        let of = |client: &Client| self.usage(client.origin).clients;
        let may_go = |client: &Client| client.held.is_empty() && client.origin != new && of(client) > own + 1;
        let candidates = self.clients.iter().filter(|(_, client)| may_go(client));
        let first =
            candidates.max_by_key(|(_, client)| (of(client), !client.is_confirmed, u64::MAX - client.lease.renewed()));
        first.map(|(id, _)| *id)
    }

    /// All version 3 clients of a host that has reached its limit; `None` below the limit.
    pub(super) fn too_many_monitored(&self, origin: Origin) -> Option<Vec<u64>> {
        let theirs = self
            .clients
            .iter()
            .filter(|(_, client)| client.name.kind == Kind::Monitored && client.origin == origin)
            .map(|(id, _)| *id);
        let theirs: Vec<u64> = theirs.collect();
        (theirs.len() >= CLIENTS_OF_HOST_MAX).then_some(theirs)
    }

    /// Time in milliseconds that others may still wait for delegations of a host: at most one lease time in any ten.
    pub(super) fn recall_time_left(&self, now: u64, origin: Origin) -> u64 {
        let waited =
            self.recall_delays.get(&origin).map_or(0, |delays| delays.waited(now, DELAY_WINDOW * self.lease_ms));
        self.lease_ms.saturating_sub(waited)
    }

    /// True if a host may get new delegations: others have waited for at most half of the allowed time.
    pub(super) fn may_delegate_to(&mut self, now: u64, origin: Origin) -> bool {
        if self.recall_delays.len() >= DELAYED_HOSTS_MAX {
            let window = DELAY_WINDOW * self.lease_ms;
            self.recall_delays.retain(|_, delays| !delays.is_over(now, window));
        }
        let is_known = self.recall_delays.contains_key(&origin) || self.recall_delays.len() < DELAYED_HOSTS_MAX;
        is_known && self.recall_time_left(now, origin) >= self.lease_ms / 2
    }

    /// Counts the beginning or the end of a recall of one delegation of a host.
    pub(super) fn count_recall(&mut self, now: u64, origin: Origin, begins: bool) {
        let delays = self.recall_delays.entry(origin).or_default();
        if begins { delays.begin(now) } else { delays.end(now) }
    }
}
