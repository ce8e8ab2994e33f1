//! Per-host quotas of server-wide resources: clients, sessions, replies that are kept, opens, locks, open files, and the time that
//! programs of this host wait for delegations. One host alone does not keep others out.

use super::clients::{Client, Kind};
use super::{
    CLIENTS_MAX, CLIENTS_OF_HOST_MAX, FILE_HELD_MAX, FileIdentity, HELD_TOTAL_MAX, KEPT_MAX, Refused,
    SESSIONS_TOTAL_MAX, State,
};
use crate::v4::status::Status;
use std::collections::{HashMap, VecDeque};
use thruway_server::connection_limit::is_fair;
use thruway_tcp::Origin;

/// Resources that the clients of one host hold.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    pub clients: usize,
    pub sessions: usize,
    /// Bytes of replies that its sessions may keep.
    pub kept: u64,
    /// As [`State::weight`].
    pub weight: usize,
}

/// Open files of one file system.
#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    /// The most, if the file system says so.
    max: Option<usize>,
    all: usize,
    of_host: HashMap<Origin, usize>,
}

/// Bytes of an owner's name that take one place more.
const NAME_WEIGHT: usize = 256;

/// Places that something takes which is held, by the length of its owner's name.
pub(super) fn weight_of(owner: usize) -> usize {
    1 + owner / NAME_WEIGHT
}

/// Time that others have waited for the delegations of one host.
#[derive(Debug, Default)]
pub(super) struct RecallDelays {
    /// Delegations that are recalled now, and since when there have been some.
    pending: usize,
    since: u64,
    /// Ends and lengths of earlier waits, in milliseconds.
    past: VecDeque<(u64, u64)>,
}

/// Waits that are remembered one by one.
const DELAYS_MAX: usize = 64;

/// Lease times over which waits are added up.
const DELAY_WINDOW: u64 = 10;

/// Hosts whose waits are remembered; when there are more, nothing is delegated to others.
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
            // Two of them count until the later one is forgotten.
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
    /// Asserts that counters say what going through everything says.
    pub(super) fn check_counts(&self) {
        use super::files::Held;
        for (file, state) in &self.files {
            let of_file: Vec<&Held> = self.held.values().filter(|held| held.file() == file).collect();
            let opens = of_file.iter().filter(|held| matches!(held, Held::Open(_))).count();
            let locks = of_file.iter().filter(|held| matches!(held, Held::Locks(_))).count();
            assert_eq!((state.opens().len(), state.held()), (opens, opens + locks), "{file:?}");
        }
        let open = self.files.values().filter(|state| state.is_open()).count();
        let counted: usize = self.open_files.values().map(|files| files.all).sum();
        let by_host: usize = self.open_files.values().flat_map(|files| files.of_host.values()).sum();
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

    /// Checks that a host may have another client; one of its own may have to give way.
    pub(super) fn check_clients(&mut self, now: u64, origin: Origin) -> Result<(), Refused> {
        let free = CLIENTS_MAX.saturating_sub(self.clients.len());
        // Without any room, a host that has fewer than others gets a place of theirs (`make_room`).
        if free == 0 || is_fair(self.usage(origin).clients, free) {
            return Ok(());
        }
        let own = self.clients.iter().filter(|(_, client)| client.origin == origin);
        let idle =
            own.filter(|(_, client)| client.held.is_empty() && (client.sessions == 0 || self.is_expired(now, client)));
        let first = idle.min_by_key(|(_, client)| (client.is_confirmed, client.lease.renewed())).map(|(id, _)| *id);
        if let Some(id) = first {
            self.remove_client(id);
            return Ok(());
        }
        match self.longest_expired(now, self.with_something_of(origin)) {
            Some(client) => Err(Refused::Expired(client)),
            None => Err(Status::DELAY.into()),
        }
    }

    /// Checks that the clients of a host may have another session.
    pub(super) fn check_sessions(&self, now: u64, origin: Origin) -> Result<(), Refused> {
        let all = self.sessions.len();
        let with_sessions = |(id, client): (&u64, &Client)| (client.sessions > 0).then_some((*id, client.origin));
        let with_sessions = self.clients.iter().filter_map(with_sessions);
        if all >= SESSIONS_TOTAL_MAX {
            return Err(self.full(now, with_sessions.map(|(id, _)| id)));
        }
        if !is_fair(self.usage(origin).sessions, SESSIONS_TOTAL_MAX - all) {
            return Err(self.full(now, with_sessions.filter(|(_, of)| *of == origin).map(|(id, _)| id)));
        }
        Ok(())
    }

    /// Whether the sessions of a host may keep so many bytes of replies more.
    pub(super) fn has_room_for_replies(&self, origin: Origin, bytes: u64) -> bool {
        let all: u64 = self.origins.values().map(|usage| usage.kept).sum();
        let free = KEPT_MAX.saturating_sub(all);
        bytes <= free && is_fair((self.usage(origin).kept >> 10) as usize, (free >> 10) as usize)
    }

    /// A session is there, or gone, which may keep so many bytes of replies.
    pub(super) fn count_session(&mut self, origin: Origin, kept: u64, is_there: bool) {
        let usage = self.origins.entry(origin).or_default();
        match is_there {
            true => (usage.sessions, usage.kept) = (usage.sessions + 1, usage.kept + kept),
            false => (usage.sessions, usage.kept) = (usage.sessions - 1, usage.kept - kept),
        }
    }

    /// Checks that a client may hold something more, beside its own limit.
    pub(super) fn check_room(&self, now: u64, client: &Client, weight: usize) -> Result<(), Refused> {
        if self.weight + weight > HELD_TOTAL_MAX {
            return Err(self.full_of_all(now));
        }
        if !is_fair(self.usage(client.origin).weight, HELD_TOTAL_MAX - self.weight) {
            return Err(self.full(now, self.with_something_of(client.origin)));
        }
        Ok(())
    }

    /// Checks that a host may have one more open, or owner of locks, of one file.
    pub(super) fn check_room_in_file(&self, now: u64, origin: Origin, file: &FileIdentity) -> Result<(), Refused> {
        let Some(state) = self.files.get(file) else { return Ok(()) };
        let free = FILE_HELD_MAX.saturating_sub(state.held());
        if free > 0 && is_fair(state.held_of(origin), free) { Ok(()) } else { Err(self.full_of(now, file)) }
    }

    fn with_something_of(&self, origin: Origin) -> impl Iterator<Item = u64> {
        let theirs = self.clients.iter().filter(move |(_, client)| client.origin == origin && !client.held.is_empty());
        theirs.map(|(id, _)| *id)
    }

    /// So many files of each of these file systems may be open.
    pub(crate) fn with_open_files(mut self, limits: impl IntoIterator<Item = (u64, usize)>) -> State {
        for (file_system, max) in limits {
            let known = self.open_files.entry(file_system).or_default();
            known.max = Some(known.max.unwrap_or(0).saturating_add(max));
        }
        self
    }

    /// Checks that a client may open a file that is not open yet.
    pub(super) fn check_open_files(&self, now: u64, origin: Origin, file_system: u64) -> Result<(), Refused> {
        let Some(OpenFiles { max: Some(max), all, of_host }) = self.open_files.get(&file_system) else { return Ok(()) };
        let (theirs, free) = (of_host.get(&origin).copied().unwrap_or(0), max.saturating_sub(*all));
        if is_fair(theirs, free) { Ok(()) } else { Err(self.full_of_all(now)) }
    }

    /// A file is open now, by a client of this host, or is not any more.
    pub(super) fn count_open_file(&mut self, file_system: u64, origin: Origin, is_open: bool) {
        let files = self.open_files.entry(file_system).or_default();
        if is_open {
            files.all += 1;
            *files.of_host.entry(origin).or_default() += 1;
            return;
        }
        files.all -= 1;
        if let Some(theirs) = files.of_host.get_mut(&origin) {
            *theirs -= 1;
            if *theirs == 0 {
                files.of_host.remove(&origin);
            }
        }
    }

    /// A client holds so much more.
    pub(super) fn add_weight(&mut self, client: u64, weight: usize) {
        let Some(client) = self.clients.get_mut(&client) else { return };
        client.weight += weight;
        self.weight += weight;
        self.origins.entry(client.origin).or_default().weight += weight;
    }

    /// A client holds so much less; what one that has been removed had has been counted then.
    pub(super) fn remove_weight(&mut self, client: u64, weight: usize) {
        let Some(client) = self.clients.get_mut(&client) else { return };
        client.weight -= weight;
        self.weight -= weight;
        self.origins.entry(client.origin).or_default().weight -= weight;
    }

    pub(super) fn origin_has_client(&mut self, origin: Origin) {
        self.origins.entry(origin).or_default().clients += 1;
    }

    /// A client is gone, with all that it holds; its sessions have been counted.
    pub(super) fn origin_has_lost(&mut self, client: &Client) {
        self.weight -= client.weight;
        let Some(origin) = self.origins.get_mut(&client.origin) else { return };
        origin.clients -= 1;
        origin.weight -= client.weight;
        if *origin == Usage::default() {
            self.origins.remove(&client.origin);
        }
    }

    /// The client that is to give way to one of a host that has fewer: one without anything, of the host that has most such clients.
    pub(super) fn gives_way_to(&self, new: Origin) -> Option<u64> {
        let own = self.usage(new).clients;
        let of = |client: &Client| self.usage(client.origin).clients;
        let may_go = |client: &Client| client.held.is_empty() && client.origin != new && of(client) > own + 1;
        let candidates = self.clients.iter().filter(|(_, client)| may_go(client));
        let first =
            candidates.max_by_key(|(_, client)| (of(client), !client.is_confirmed, u64::MAX - client.lease.renewed()));
        first.map(|(id, _)| *id)
    }

    /// Whether a host has as many clients of version 3 as it may: all those.
    pub(super) fn too_many_monitored(&self, origin: Origin) -> Option<Vec<u64>> {
        let theirs = self
            .clients
            .iter()
            .filter(|(_, client)| client.name.kind == Kind::Monitored && client.origin == origin)
            .map(|(id, _)| *id);
        let theirs: Vec<u64> = theirs.collect();
        (theirs.len() >= CLIENTS_OF_HOST_MAX).then_some(theirs)
    }

    /// Milliseconds for which others may still wait for the delegations of a host: at most one lease time in any ten.
    pub(super) fn recall_time_left(&self, now: u64, origin: Origin) -> u64 {
        let waited =
            self.recall_delays.get(&origin).map_or(0, |delays| delays.waited(now, DELAY_WINDOW * self.lease_ms));
        self.lease_ms.saturating_sub(waited)
    }

    /// Whether a host has given back its delegations in time, so that it may have more.
    pub(super) fn may_delegate_to(&mut self, now: u64, origin: Origin) -> bool {
        if self.recall_delays.len() >= DELAYED_HOSTS_MAX {
            let window = DELAY_WINDOW * self.lease_ms;
            self.recall_delays.retain(|_, delays| !delays.is_over(now, window));
        }
        let is_known = self.recall_delays.contains_key(&origin) || self.recall_delays.len() < DELAYED_HOSTS_MAX;
        is_known && self.recall_time_left(now, origin) >= self.lease_ms / 2
    }

    /// Others wait for a delegation of a host now, or not any more.
    pub(super) fn count_recall(&mut self, now: u64, origin: Origin, begins: bool) {
        let delays = self.recall_delays.entry(origin).or_default();
        if begins { delays.begin(now) } else { delays.end(now) }
    }
}
