//! What clients take of what there is for all: hosts share it, so that one alone keeps no other out.

use super::clients::{Client, Kind};
use super::{CLIENTS_OF_HOST_MAX, HELD_TOTAL_MAX, Refused, State};
use thruway_server::connection_limit::is_fair;
use thruway_tcp::Origin;

/// What the clients of one host have.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct OfOrigin {
    pub clients: usize,
    /// As [`State::weight`].
    pub weight: usize,
}

/// So many bytes of an owner's name take one place more.
const NAME_WEIGHT: usize = 256;

/// What something that is held takes, by the length of its owner's name.
pub(super) fn weight_of(owner: usize) -> usize {
    1 + owner / NAME_WEIGHT
}

impl State {
    /// Whether a client may hold something more, beside what it may itself.
    pub(super) fn check_room(&self, now: u64, client: &Client, weight: usize) -> Result<(), Refused> {
        if self.weight + weight > HELD_TOTAL_MAX {
            return Err(self.full_of_all(now));
        }
        let theirs = self.origins.get(&client.origin).map_or(0, |origin| origin.weight);
        if !is_fair(theirs, HELD_TOTAL_MAX - self.weight) {
            return Err(self.full(now, self.with_something_of(client.origin)));
        }
        Ok(())
    }

    fn with_something_of(&self, origin: Origin) -> impl Iterator<Item = u64> {
        let theirs = self.clients.iter().filter(move |(_, client)| client.origin == origin && !client.held.is_empty());
        theirs.map(|(id, _)| *id)
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

    /// A client is gone, with all that it holds.
    pub(super) fn origin_has_lost(&mut self, client: &Client) {
        self.weight -= client.weight;
        let Some(origin) = self.origins.get_mut(&client.origin) else { return };
        origin.clients -= 1;
        origin.weight -= client.weight;
        if *origin == OfOrigin::default() {
            self.origins.remove(&client.origin);
        }
    }

    /// The client that is to give way to one of a host that has fewer: one without anything, of the host that has most such clients.
    pub(super) fn gives_way_to(&self, new: Origin) -> Option<u64> {
        let own = self.origins.get(&new).map_or(0, |origin| origin.clients);
        let of = |client: &Client| self.origins.get(&client.origin).map_or(0, |origin| origin.clients);
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
}
