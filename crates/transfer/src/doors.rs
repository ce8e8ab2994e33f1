//! Which session a data connection belongs to.
//!
//! A caller on a long path opens its data connections while its session is only being agreed on, a little behind the control
//! connection. Where a packet of that is lost, they are here first; so those that nobody expects wait a moment, a few at a
//! time.

use crate::wire::{CHANNELS_MAX, Token};
use std::collections::{HashMap, VecDeque};
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
    waiting: VecDeque<(Instant, Token, A)>,
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
        let (its, others): (VecDeque<_>, _) = waiting.into_iter().partition(|(_, of, _)| *of == token);
        self.waiting = others;
        for (_, token, arrival) in its {
            drop(self.hand_in(token, arrival, now));
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
    pub(crate) fn hand_in(&mut self, token: Token, arrival: A, now: Instant) -> Option<A> {
        let Some(doorway) = self.sessions.get_mut(&token) else {
            self.expire(now);
            if self.waiting.len() >= WAITING_MAX {
                return Some(arrival);
            }
            self.waiting.push_back((now, token, arrival));
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

    /// Drops those that have waited long enough; says when the next one will have.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Duration> {
        while self.waiting.front().is_some_and(|(since, ..)| now.duration_since(*since) >= PATIENCE) {
            self.waiting.pop_front();
        }
        self.waiting.front().map(|(since, ..)| PATIENCE.saturating_sub(now.duration_since(*since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_comes_first_waits_a_moment() {
        let (mut doors, start) = (Doors::default(), Instant::now());
        assert_eq!(doors.hand_in([1; 16], "early", start), None);
        assert_eq!(doors.hand_in([2; 16], "somebody else's", start), None);
        let arrivals = doors.open([1; 16], start + PATIENCE / 2).unwrap();
        assert!(doors.open([1; 16], start).is_none(), "one session for a token");
        assert_eq!(doors.hand_in([1; 16], "late", start), None);
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
            assert_eq!(doors.hand_in([n as u8; 16], n, now), None);
        }
        assert_eq!(doors.hand_in([99; 16], 1000, now), Some(1000));
        let arrivals = doors.open([7; 16], now).unwrap();
        for n in 1..CHANNELS_MAX as usize {
            assert_eq!(doors.hand_in([7; 16], n, now), None);
        }
        assert_eq!(doors.hand_in([7; 16], 1000, now), Some(1000));
        assert_eq!(arrivals.try_iter().count(), CHANNELS_MAX as usize);
    }
}
