//! Which session a data connection belongs to.
//!
//! A caller on a long path opens its data connections while its session is only being agreed on, a little behind the control
//! connection. Where a packet of that is lost, they are here first; so those that nobody expects wait a moment, a few at a
//! time, and of those who have many there the fewer.

use crate::handshakes::site;
use crate::wire::{CHANNELS_MAX, Token};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use thruway_fabric::Device;

/// How long a data connection waits for its session.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many may wait, of all callers together.
const WAITING_MAX: usize = 64;

/// The sessions that expect data connections, and connections whose session is not there yet.
pub(crate) struct Doors<A> {
    sessions: HashMap<Token, Doorway<A>>,
    waiting: VecDeque<Waiting<A>>,
}

struct Waiting<A> {
    since: Instant,
    token: Token,
    /// Where it comes from.
    site: IpAddr,
    arrival: A,
}

struct Doorway<A> {
    sender: Sender<A>,
    /// Handed in so far.
    count: u32,
    /// To wake the session, once it has a device.
    device: Option<Device>,
}

impl<A> Default for Doors<A> {
    fn default() -> Doors<A> {
        Doors { sessions: HashMap::new(), waiting: VecDeque::new() }
    }
}

impl<A> Doors<A> {
    /// A session expects connections that show this token. `None` if another one does.
    pub(crate) fn open(&mut self, token: Token, now: Instant) -> Option<Receiver<A>> {
        if self.sessions.contains_key(&token) {
            return None;
        }
        let (sender, receiver) = channel();
        self.sessions.insert(token, Doorway { sender, count: 0, device: None });
        self.expire(now);
        let waiting = std::mem::take(&mut self.waiting);
        let (its, others): (VecDeque<_>, _) = waiting.into_iter().partition(|waiting| waiting.token == token);
        self.waiting = others;
        for Waiting { token, site, arrival, .. } in its {
            drop(self.hand_in(token, site, arrival, now));
        }
        Some(receiver)
    }

    /// From now on, who waits on the device hears of arrivals.
    pub(crate) fn wake(&mut self, token: &Token, device: &Device) {
        if let Some(doorway) = self.sessions.get_mut(token) {
            doorway.device = Some(device.clone());
        }
    }

    /// The session is over.
    pub(crate) fn close(&mut self, token: &Token) {
        self.sessions.remove(token);
    }

    /// Hands a data connection to its session, or lets it wait for that; gives back one too many.
    pub(crate) fn hand_in(&mut self, token: Token, from: IpAddr, arrival: A, now: Instant) -> Option<A> {
        let Some(doorway) = self.sessions.get_mut(&token) else {
            self.expire(now);
            let site = site(from);
            if self.waiting.len() >= WAITING_MAX && !self.make_room(site) {
                return Some(arrival);
            }
            self.waiting.push_back(Waiting { since: now, token, site, arrival });
            return None;
        };
        if doorway.count >= CHANNELS_MAX {
            return Some(arrival);
        }
        doorway.count += 1;
        let given_back = doorway.sender.send(arrival).err().map(|e| e.0);
        if let Some(device) = &doorway.device {
            device.wake();
        }
        given_back
    }

    /// Sends away the oldest of those who have most here, unless they are who asks.
    fn make_room(&mut self, site: IpAddr) -> bool {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        self.waiting.iter().for_each(|waiting| *counts.entry(waiting.site).or_default() += 1);
        let own = counts.get(&site).copied().unwrap_or(0);
        let most = counts.into_iter().max_by_key(|(_, count)| *count).filter(|(_, count)| *count > own + 1);
        let oldest = most.and_then(|(most, _)| self.waiting.iter().position(|waiting| waiting.site == most));
        oldest.and_then(|at| self.waiting.remove(at)).is_some()
    }

    /// Drops those that have waited long enough; says when the next one will have.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Duration> {
        while self.waiting.front().is_some_and(|first| now.duration_since(first.since) >= PATIENCE) {
            self.waiting.pop_front();
        }
        self.waiting.front().map(|first| PATIENCE.saturating_sub(now.duration_since(first.since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn a_connection_that_comes_first_waits_a_moment() {
        let (mut doors, start) = (Doors::default(), Instant::now());
        assert_eq!(doors.hand_in([1; 16], HERE, "early", start), None);
        assert_eq!(doors.hand_in([2; 16], HERE, "somebody else's", start), None);
        let arrivals = doors.open([1; 16], start + PATIENCE / 2).unwrap();
        assert!(doors.open([1; 16], start).is_none(), "one session for a token");
        assert_eq!(doors.hand_in([1; 16], HERE, "late", start), None);
        assert_eq!(arrivals.try_iter().collect::<Vec<_>>(), ["early", "late"]);
        assert_eq!(doors.expire(start + PATIENCE / 2), Some(PATIENCE / 2));
        assert_eq!(doors.expire(start + PATIENCE), None);
        let too_late = doors.open([2; 16], start + PATIENCE).unwrap();
        assert_eq!(too_late.try_iter().count(), 0);
        doors.close(&[1; 16]);
        assert!(arrivals.recv().is_err());
    }

    #[test]
    fn few_wait_and_few_come_in() {
        let (mut doors, now) = (Doors::default(), Instant::now());
        for n in 0..WAITING_MAX {
            assert_eq!(doors.hand_in([n as u8; 16], HERE, n, now), None);
        }
        assert_eq!(doors.hand_in([99; 16], HERE, 1000, now), Some(1000));
        let arrivals = doors.open([7; 16], now).unwrap();
        for n in 1..CHANNELS_MAX as usize {
            assert_eq!(doors.hand_in([7; 16], HERE, n, now), None);
        }
        assert_eq!(doors.hand_in([7; 16], HERE, 1000, now), Some(1000));
        assert_eq!(arrivals.try_iter().count(), CHANNELS_MAX as usize);
    }

    #[test]
    fn who_has_few_there_is_let_in_for_who_has_many() {
        let (mut doors, now) = (Doors::default(), Instant::now());
        for n in 0..WAITING_MAX {
            assert_eq!(doors.hand_in([n as u8; 16], HERE, n, now), None);
        }
        let there: IpAddr = "192.0.2.7".parse().unwrap();
        for n in 0..WAITING_MAX / 2 {
            assert_eq!(doors.hand_in([100 + n as u8; 16], there, 1000 + n, now), None);
        }
        assert_eq!(doors.hand_in([200; 16], there, 2000, now), Some(2000), "nobody has more");
        assert_eq!(doors.open([0; 16], now).unwrap().try_iter().count(), 0, "the oldest had to go");
        assert_eq!(doors.open([63; 16], now).unwrap().try_iter().count(), 1);
        assert_eq!(doors.open([100; 16], now).unwrap().try_iter().count(), 1);
    }
}
