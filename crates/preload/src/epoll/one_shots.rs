//! State of one-shot registrations (`EPOLLONESHOT`), shared by all processes that have the connection. The library re-arms a registration to
//! make the kernel report unread bytes. Two threads or processes may then get an event for one `epoll_ctl` call of the program. Only the first
//! of them returns the event.

use libc::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Maximum number of a connection's registrations that have a state. Further registrations have none, and all their events are returned.
const PLACES: usize = 2;

/// Flag in [`Place::key`]: no event was returned since the program's last `epoll_ctl` call.
const ARMED: u64 = 1;

/// A registration: an epoll instance, and the descriptor that was registered.
#[derive(Clone, Copy)]
pub(super) struct Key(u64);

impl Key {
    /// `instance`: its number among the instances of all processes, from 1 on.
    pub(super) fn new(instance: u32, fd: c_int) -> Key {
        Key(u64::from(instance) << 32 | u64::from(fd.cast_unsigned()) << 1)
    }
}

#[derive(Default)]
struct Place {
    /// [`Key`] of the registration, with [`ARMED`] while armed; 0 if the place is free.
    key: AtomicU64,
    /// Events that the program has requested; 0 while they are unknown. After an event, the kernel no longer has them.
    events: AtomicU32,
}

/// States of a connection's registrations.
#[derive(Default)]
pub(crate) struct OneShots([Place; PLACES]);

impl OneShots {
    fn place(&self, key: Key) -> Option<&Place> {
        self.0.iter().find(|place| place.key.load(Ordering::SeqCst) & !ARMED == key.0)
    }

    /// Marks a registration as armed, before the kernel can report its event. `events`: as in [`Place::events`].
    pub(super) fn arm(&self, key: Key, events: u32) {
        let is_taken =
            |place: &&Place| place.key.compare_exchange(0, key.0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if let Some(place) = self.place(key).or_else(|| self.0.iter().find(is_taken)) {
            place.events.store(events, Ordering::SeqCst);
            place.key.fetch_or(ARMED, Ordering::SeqCst);
        }
    }

    /// The program's events; `None` if they are not known.
    pub(super) fn events(&self, key: Key) -> Option<u32> {
        Some(self.place(key)?.events.load(Ordering::SeqCst)).filter(|events| *events != 0)
    }

    pub(super) fn set_events(&self, key: Key, events: u32) {
        if let Some(place) = self.place(key) {
            place.events.store(events, Ordering::SeqCst);
        }
    }

    pub(super) fn is_armed(&self, key: Key) -> bool {
        self.place(key).is_none_or(|place| place.key.load(Ordering::SeqCst) & ARMED != 0)
    }

    /// Disarms a registration after the kernel has reported its event. False if another thread or process has returned the event.
    pub(super) fn take(&self, key: Key) -> bool {
        self.place(key).is_none_or(|place| place.key.fetch_and(!ARMED, Ordering::SeqCst) & ARMED != 0)
    }

    /// After [`OneShots::take`]: no event was returned.
    pub(super) fn give_back(&self, key: Key) {
        if let Some(place) = self.place(key) {
            place.key.fetch_or(ARMED, Ordering::SeqCst);
        }
    }

    /// The registration has ended.
    pub(super) fn forget(&self, key: Key) {
        if let Some(place) = self.place(key) {
            place.events.store(0, Ordering::SeqCst);
            place.key.store(0, Ordering::SeqCst);
        }
    }

    /// The slot has another connection.
    pub(crate) fn clear(&self) {
        for place in &self.0 {
            place.events.store(0, Ordering::Relaxed);
            place.key.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_is_returned_for_each_call_of_the_program() {
        let (states, key) = (OneShots::default(), Key::new(1, 0));
        assert!(states.take(key) && states.take(key), "unknown");
        for events in 1..4 {
            states.arm(key, 0);
            assert_eq!(states.events(key), None);
            states.arm(key, events);
            assert!(states.is_armed(key) && states.take(key));
            assert!(!states.is_armed(key) && !states.take(key));
            states.give_back(key);
            assert!(states.take(key) && !states.take(key));
            assert_eq!(states.events(key), Some(events));
        }
        let (other, further, last) = (Key::new(2, 0), Key::new(1, 1), Key::new(u32::MAX, c_int::MAX));
        states.arm(other, 1);
        assert!(states.take(other) && !states.take(key) && !states.take(other));
        states.arm(further, 1);
        assert!(states.take(further) && states.take(further), "no place");
        states.forget(key);
        states.arm(last, 0);
        states.set_events(last, 7);
        assert!(states.take(last) && !states.take(last));
        assert_eq!((states.events(key), states.events(last)), (None, Some(7)));
        states.clear();
        assert!(states.is_armed(other));
    }
}
