//! Matches incoming data connections to sessions, by token.
//!
//! On a long path the connecting end opens its data connections while the session is still being negotiated. If a packet of the
//! control connection is lost, they arrive first. So a few connections are kept until their session is admitted: until its peer has
//! proved its identity. When there are too many, those of the origin with the most connections are closed.

use crate::wire::{CHANNELS_MAX, Token};
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use thruway_fabric::Device;
use thruway_tcp::{ByOrigin, Origin};

/// How long a data connection is kept without a session.
const PENDING_TIMEOUT: Duration = Duration::from_secs(2);

/// Limits on data connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelLimits {
    /// Without an admitted session, of all peers together.
    pub(crate) pending: usize,
    /// Of all sessions together. Each session may have one in any case.
    pub(crate) all: usize,
}

/// Sessions that expect data connections, and data connections without a session.
pub(crate) struct ChannelRegistry<A> {
    limits: ChannelLimits,
    sessions: HashMap<Token, Entry<A>>,
    /// Connections without an admitted session, the oldest first.
    pending: VecDeque<Pending<A>>,
    /// Connections of admitted sessions.
    delivered: usize,
}

struct Pending<A> {
    since: Instant,
    token: Token,
    origin: Origin,
    arrival: A,
}

struct Entry<A> {
    sender: Sender<A>,
    is_admitted: bool,
    /// Connections delivered so far.
    count: u32,
    /// The session's device, which is woken when a connection arrives.
    device: Option<Device>,
}

impl<A> ChannelRegistry<A> {
    pub(crate) fn new(limits: ChannelLimits) -> ChannelRegistry<A> {
        ChannelRegistry { limits, sessions: HashMap::new(), pending: VecDeque::new(), delivered: 0 }
    }

    /// Registers a session: its data connections show this token. `None` if the token is taken.
    pub(crate) fn register(&mut self, token: Token) -> Option<Receiver<A>> {
        if self.sessions.contains_key(&token) {
            return None;
        }
        let (sender, receiver) = channel();
        self.sessions.insert(token, Entry { sender, is_admitted: false, count: 0, device: None });
        Some(receiver)
    }

    /// Delivers the connections of a session from now on, and those that were kept.
    pub(crate) fn admit(&mut self, token: Token, now: Instant) {
        let Some(entry) = self.sessions.get_mut(&token) else { return };
        entry.is_admitted = true;
        let pending = std::mem::take(&mut self.pending);
        let (its, others): (VecDeque<_>, _) = pending.into_iter().partition(|pending| pending.token == token);
        self.pending = others;
        for Pending { token, origin, arrival, .. } in its {
            drop(self.deliver(token, origin, arrival, now));
        }
    }

    /// Number of connections for a new session that wants so many: at least 1.
    pub(crate) fn grant(&self, wanted: u32) -> u32 {
        let left = self.limits.all.saturating_sub(self.delivered) / 2;
        wanted.clamp(1, CHANNELS_MAX).min(u32::try_from(left).unwrap_or(u32::MAX).max(1))
    }

    /// Wakes `device` whenever a connection of the session arrives from now on.
    pub(crate) fn set_device(&mut self, token: &Token, device: &Device) {
        if let Some(entry) = self.sessions.get_mut(token) {
            entry.device = Some(device.clone());
        }
    }

    /// Removes a session.
    pub(crate) fn unregister(&mut self, token: &Token) {
        if let Some(entry) = self.sessions.remove(token) {
            self.delivered -= entry.count as usize;
        }
        self.pending.retain(|pending| pending.token != *token);
    }

    /// Delivers a data connection to its session, or keeps it for a while. Returns it if the session has as many as it may have, or
    /// too many are kept.
    pub(crate) fn deliver(&mut self, token: Token, origin: Origin, arrival: A, now: Instant) -> Option<A> {
        let Some(entry) = self.sessions.get_mut(&token).filter(|entry| entry.is_admitted) else {
            self.expire(now);
            if self.pending.len() >= self.limits.pending && !self.evict_one_for(origin) {
                return Some(arrival);
            }
            self.pending.push_back(Pending { since: now, token, origin, arrival });
            return None;
        };
        if entry.count >= CHANNELS_MAX || (entry.count > 0 && self.delivered >= self.limits.all) {
            return Some(arrival);
        }
        entry.count += 1;
        self.delivered += 1;
        let rejected = entry.sender.send(arrival).err().map(|e| e.0);
        if let Some(device) = &entry.device {
            device.wake();
        }
        rejected
    }

    /// Drops the oldest connection of the origin that has most of them, unless that is `origin`.
    fn evict_one_for(&mut self, origin: Origin) -> bool {
        let mut kept = ByOrigin::default();
        self.pending.iter().enumerate().for_each(|(at, pending)| kept.insert(pending.origin, at));
        let evicted = kept.give_way(origin).filter(|(busiest, _)| *busiest != origin);
        evicted.and_then(|(_, at)| self.pending.remove(at)).is_some()
    }

    /// Drops connections that have been kept for too long without a session. Returns the time until the next one is due.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Duration> {
        let is_due = |pending: &Pending<A>| now.duration_since(pending.since) >= PENDING_TIMEOUT;
        // Those of a registered session end with it.
        self.pending.retain(|pending| self.sessions.contains_key(&pending.token) || !is_due(pending));
        let next = self.pending.iter().find(|pending| !self.sessions.contains_key(&pending.token));
        next.map(|next| PENDING_TIMEOUT.saturating_sub(now.duration_since(next.since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Origin = Origin::User(1000);
    const LIMITS: ChannelLimits = ChannelLimits { pending: 64, all: 100 };

    fn registry<A>() -> ChannelRegistry<A> {
        ChannelRegistry::new(LIMITS)
    }

    fn admitted<A>(registry: &mut ChannelRegistry<A>, number: u8, now: Instant) -> Receiver<A> {
        let arrivals = registry.register([number; 16]).unwrap();
        registry.admit([number; 16], now);
        arrivals
    }

    #[test]
    fn a_connection_that_arrives_before_its_session_is_kept() {
        let (mut registry, start) = (registry(), Instant::now());
        assert_eq!(registry.deliver([1; 16], HERE, "early", start), None);
        assert_eq!(registry.deliver([2; 16], HERE, "of another session", start), None);
        let arrivals = registry.register([1; 16]).unwrap();
        assert!(registry.register([1; 16]).is_none(), "one session for a token");
        assert_eq!(registry.deliver([1; 16], HERE, "before the proof", start), None);
        assert_eq!(registry.expire(start + PENDING_TIMEOUT / 2), Some(PENDING_TIMEOUT / 2));
        assert_eq!(registry.expire(start + PENDING_TIMEOUT), None);
        assert_eq!(arrivals.try_iter().count(), 0);
        // A handshake may have waited for longer than that.
        registry.admit([1; 16], start + 2 * PENDING_TIMEOUT);
        assert_eq!(registry.deliver([1; 16], HERE, "late", start), None);
        assert_eq!(arrivals.try_iter().collect::<Vec<_>>(), ["early", "before the proof", "late"]);
        assert_eq!(admitted(&mut registry, 2, start).try_iter().count(), 0, "too late");
        registry.unregister(&[1; 16]);
        assert!(arrivals.recv().is_err());
    }

    #[test]
    fn connections_are_bounded_with_and_without_a_session() {
        let (mut registry, now) = (registry(), Instant::now());
        // Also those of sessions whose peers have proved nothing.
        let unproved = registry.register([0; 16]).unwrap();
        for n in 0..LIMITS.pending {
            assert_eq!(registry.deliver([n as u8 % 8; 16], HERE, n, now), None);
        }
        for token in [0, 99] {
            assert_eq!(registry.deliver([token; 16], HERE, 1000, now), Some(1000));
        }
        registry.unregister(&[0; 16]);
        assert_eq!(unproved.iter().count(), 0, "closed with the session");
        assert_eq!(registry.deliver([99; 16], HERE, 1000, now), None, "there is room again");
        let arrivals = admitted(&mut registry, 77, now);
        for n in 0..CHANNELS_MAX as usize {
            assert_eq!(registry.deliver([77; 16], HERE, n, now), None);
        }
        assert_eq!(registry.deliver([77; 16], HERE, 1000, now), Some(1000));
        assert_eq!(arrivals.try_iter().count(), CHANNELS_MAX as usize);
        // Other sessions share the rest, and have one connection each when nothing is left.
        assert_eq!((registry.grant(64), registry.grant(3)), (18, 3));
        let more = admitted(&mut registry, 78, now);
        (0..36).for_each(|n| assert_eq!(registry.deliver([78; 16], HERE, n, now), None));
        assert_eq!((registry.grant(64), registry.deliver([78; 16], HERE, 1000, now)), (1, Some(1000)));
        let last = admitted(&mut registry, 79, now);
        assert_eq!(registry.deliver([79; 16], HERE, 1, now), None);
        assert_eq!(registry.deliver([79; 16], HERE, 2, now), Some(2));
        registry.unregister(&[77; 16]);
        assert_eq!(registry.deliver([79; 16], HERE, 2, now), None);
        assert_eq!((more.try_iter().count(), last.try_iter().count()), (36, 2));
    }

    #[test]
    fn an_origin_with_few_connections_takes_the_place_of_one_with_many() {
        let (mut registry, now) = (registry(), Instant::now());
        for n in 0..LIMITS.pending {
            assert_eq!(registry.deliver([n as u8; 16], HERE, n, now), None);
        }
        let there = Origin::of_host([192, 0, 2, 7].into());
        for n in 0..LIMITS.pending / 2 {
            assert_eq!(registry.deliver([100 + n as u8; 16], there, 1000 + n, now), None);
        }
        assert_eq!(registry.deliver([200; 16], there, 2000, now), Some(2000), "no origin has more");
        assert_eq!(admitted(&mut registry, 0, now).try_iter().count(), 0, "the oldest had to go");
        assert_eq!(admitted(&mut registry, 63, now).try_iter().count(), 1);
        assert_eq!(admitted(&mut registry, 100, now).try_iter().count(), 1);
    }
}
