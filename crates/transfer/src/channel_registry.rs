//! Matches incoming data connections to sessions, by token.
//!
//! On a long path the connecting end opens its data connections while the session is still being negotiated. If a packet of the
//! control connection is lost, they arrive first. So a few connections without a session are kept for a moment; when there are
//! too many, those of the origin that has most of them are closed.

use crate::wire::{CHANNELS_MAX, Token};
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use thruway_fabric::Device;
use thruway_tcp::{ByOrigin, Origin};

/// How long a data connection is kept without a session.
const PENDING_TIMEOUT: Duration = Duration::from_secs(2);
/// Data connections without a session, of all peers together.
const PENDING_MAX: usize = 64;

/// Sessions that expect data connections, and data connections without a session.
pub(crate) struct ChannelRegistry<A> {
    sessions: HashMap<Token, Entry<A>>,
    pending: VecDeque<Pending<A>>,
}

struct Pending<A> {
    since: Instant,
    token: Token,
    origin: Origin,
    arrival: A,
}

struct Entry<A> {
    sender: Sender<A>,
    /// Connections delivered so far.
    count: u32,
    /// The session's device, which is woken when a connection arrives.
    device: Option<Device>,
}

impl<A> Default for ChannelRegistry<A> {
    fn default() -> ChannelRegistry<A> {
        ChannelRegistry { sessions: HashMap::new(), pending: VecDeque::new() }
    }
}

impl<A> ChannelRegistry<A> {
    /// Registers a session: its data connections show this token. `None` if the token is taken.
    pub(crate) fn register(&mut self, token: Token, now: Instant) -> Option<Receiver<A>> {
        if self.sessions.contains_key(&token) {
            return None;
        }
        let (sender, receiver) = channel();
        self.sessions.insert(token, Entry { sender, count: 0, device: None });
        self.expire(now);
        let pending = std::mem::take(&mut self.pending);
        let (its, others): (VecDeque<_>, _) = pending.into_iter().partition(|pending| pending.token == token);
        self.pending = others;
        for Pending { token, origin, arrival, .. } in its {
            drop(self.deliver(token, origin, arrival, now));
        }
        Some(receiver)
    }

    /// Wakes `device` whenever a connection of the session arrives from now on.
    pub(crate) fn set_device(&mut self, token: &Token, device: &Device) {
        if let Some(entry) = self.sessions.get_mut(token) {
            entry.device = Some(device.clone());
        }
    }

    /// Removes a session.
    pub(crate) fn unregister(&mut self, token: &Token) {
        self.sessions.remove(token);
    }

    /// Delivers a data connection to its session, or keeps it for a while. Returns it if the session has as many as it may have, or
    /// too many are kept.
    pub(crate) fn deliver(&mut self, token: Token, origin: Origin, arrival: A, now: Instant) -> Option<A> {
        let Some(entry) = self.sessions.get_mut(&token) else {
            self.expire(now);
            if self.pending.len() >= PENDING_MAX && !self.evict_one_for(origin) {
                return Some(arrival);
            }
            self.pending.push_back(Pending { since: now, token, origin, arrival });
            return None;
        };
        if entry.count >= CHANNELS_MAX {
            return Some(arrival);
        }
        entry.count += 1;
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

    /// Drops connections that have been kept for too long. Returns the time until the next one is due.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Duration> {
        while self.pending.front().is_some_and(|first| now.duration_since(first.since) >= PENDING_TIMEOUT) {
            self.pending.pop_front();
        }
        self.pending.front().map(|first| PENDING_TIMEOUT.saturating_sub(now.duration_since(first.since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Origin = Origin::User(1000);

    #[test]
    fn a_connection_that_arrives_before_its_session_is_kept() {
        let (mut registry, start) = (ChannelRegistry::default(), Instant::now());
        assert_eq!(registry.deliver([1; 16], HERE, "early", start), None);
        assert_eq!(registry.deliver([2; 16], HERE, "somebody else's", start), None);
        let arrivals = registry.register([1; 16], start + PENDING_TIMEOUT / 2).unwrap();
        assert!(registry.register([1; 16], start).is_none(), "one session for a token");
        assert_eq!(registry.deliver([1; 16], HERE, "late", start), None);
        assert_eq!(arrivals.try_iter().collect::<Vec<_>>(), ["early", "late"]);
        assert_eq!(registry.expire(start + PENDING_TIMEOUT / 2), Some(PENDING_TIMEOUT / 2));
        assert_eq!(registry.expire(start + PENDING_TIMEOUT), None);
        let too_late = registry.register([2; 16], start + PENDING_TIMEOUT).unwrap();
        assert_eq!(too_late.try_iter().count(), 0);
        registry.unregister(&[1; 16]);
        assert!(arrivals.recv().is_err());
    }

    #[test]
    fn connections_are_bounded_with_and_without_a_session() {
        let (mut registry, now) = (ChannelRegistry::default(), Instant::now());
        for n in 0..PENDING_MAX {
            assert_eq!(registry.deliver([n as u8; 16], HERE, n, now), None);
        }
        assert_eq!(registry.deliver([99; 16], HERE, 1000, now), Some(1000));
        let arrivals = registry.register([7; 16], now).unwrap();
        for n in 1..CHANNELS_MAX as usize {
            assert_eq!(registry.deliver([7; 16], HERE, n, now), None);
        }
        assert_eq!(registry.deliver([7; 16], HERE, 1000, now), Some(1000));
        assert_eq!(arrivals.try_iter().count(), CHANNELS_MAX as usize);
    }

    #[test]
    fn an_origin_with_few_connections_takes_the_place_of_one_with_many() {
        let (mut registry, now) = (ChannelRegistry::default(), Instant::now());
        for n in 0..PENDING_MAX {
            assert_eq!(registry.deliver([n as u8; 16], HERE, n, now), None);
        }
        let there = Origin::of_host([192, 0, 2, 7].into());
        for n in 0..PENDING_MAX / 2 {
            assert_eq!(registry.deliver([100 + n as u8; 16], there, 1000 + n, now), None);
        }
        assert_eq!(registry.deliver([200; 16], there, 2000, now), Some(2000), "no origin has more");
        assert_eq!(registry.register([0; 16], now).unwrap().try_iter().count(), 0, "the oldest had to go");
        assert_eq!(registry.register([63; 16], now).unwrap().try_iter().count(), 1);
        assert_eq!(registry.register([100; 16], now).unwrap().try_iter().count(), 1);
    }
}
