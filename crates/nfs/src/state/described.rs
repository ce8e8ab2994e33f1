//! Descriptions and numbers of clients.

use super::clients::{Client, Kind};
use super::files::Held;
use super::{Host, State};
use std::fmt::Write;

/// Numbers of what clients hold.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldCounts {
    /// Clients.
    pub(crate) clients: u64,
    /// Open files.
    pub(crate) opens: u64,
    /// Locked ranges.
    pub(crate) locks: u64,
    /// Delegations.
    pub(crate) delegations: u64,
}

impl State {
    /// Name of a client, as the client has given it.
    pub(crate) fn name_of(&self, id: u64) -> String {
        self.clients.get(&id).map_or_else(|| "unknown".into(), name)
    }

    /// Numbers of all clients together.
    pub(crate) fn count_held(&self) -> HeldCounts {
        let confirmed = self.clients.values().filter(|client| client.is_confirmed);
        confirmed.map(|client| self.held_by(client)).fold(HeldCounts::default(), |all, one| HeldCounts {
            clients: all.clients + one.clients,
            opens: all.opens + one.opens,
            locks: all.locks + one.locks,
            delegations: all.delegations + one.delegations,
        })
    }

    fn held_by(&self, client: &Client) -> HeldCounts {
        let mut counts = HeldCounts { clients: 1, ..HeldCounts::default() };
        for number in &client.held {
            match self.held.get(number) {
                Some(Held::Open(_)) => counts.opens += 1,
                Some(Held::Locks(holder)) => {
                    counts.locks += self.files.get(&holder.file).map_or(0, |file| file.locks.count(*number)) as u64;
                }
                Some(Held::Delegation(_)) => counts.delegations += 1,
                None => {}
            }
        }
        counts
    }

    /// A line for each client: its name, where it comes from, when it was last heard of, and what it has.
    pub(crate) fn describe_clients(&self, now: u64) -> Vec<String> {
        let describe = |(id, client): (&u64, &Client)| {
            let HeldCounts { opens, locks, delegations, .. } = self.held_by(client);
            let idle = now.saturating_sub(client.lease.renewed()) / 1000;
            let version = match client.name.kind {
                Kind::Monitored => "3",
                Kind::WithoutSessions => "4.0",
                Kind::WithSessions => "4.1 or 4.2",
            };
            let mut line = format!("client of version {version} '{}' from {}", name(client), client.origin);
            let _ =
                write!(line, ": {opens} opens, {locks} locks, {delegations} delegations; last heard of {idle} s ago");
            if self.is_expired(now, client) {
                line.push_str(" (its lease has expired)");
            }
            if !self.offloads.values().all(|offload| offload.client != *id) {
                line.push_str(" (a copy is in progress)");
            }
            line
        };
        let mut lines: Vec<String> =
            self.clients.iter().filter(|(_, client)| client.is_confirmed).map(describe).collect();
        lines.sort_unstable();
        lines
    }
}

fn name(client: &Client) -> String {
    let name = Host::of(&client.name).map_or_else(|| client.name.name.clone(), |host| host.name);
    name.escape_ascii().to_string()
}
