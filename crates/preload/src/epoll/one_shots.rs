//! State of one-shot registrations (`EPOLLONESHOT`), shared by all processes that have the connection. The kernel has one event for each
//! `epoll_ctl` call of the program, but not for unread bytes of the ring: the library registers an event that the kernel reports at once
//! ([`NOW`](super::registration::NOW)). If the bytes have been read by then, the library re-arms the registration. So the kernel may give
//! another event for the same call. Only the first of them is returned.

use libc::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Maximum number of a connection's registrations that have a state. Further registrations have none, and all their events are returned.
const PLACES: usize = 2;

/// Flag in [`Place::calls`]: no event was returned since the program's last `epoll_ctl` call.
const ARMED: u64 = 1;
/// One call of the program in [`Place::calls`].
const CALL: u64 = 2;

/// A registration: an epoll instance, and the descriptor that was registered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
    /// `instance`: its number among the instances of all processes, from 1 on.
    pub(super) fn new(instance: u32, fd: c_int) -> Key {
        Key(u64::from(instance) << 32 | u64::from(fd.cast_unsigned()))
    }
}

/// Request of the program by an `epoll_ctl` call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) events: u32,
    pub(super) data: u64,
}

#[derive(Default)]
struct Place {
    /// [`Key`] of the registration; 0 if the place is free.
    key: AtomicU64,
    /// Number of `epoll_ctl` calls of the program, with [`ARMED`] in the lowest bit.
    calls: AtomicU64,
    /// [`Request`] of the last call; no events while they are unknown. After an event, the kernel no longer has them.
    events: AtomicU32,
    data: AtomicU64,
}

impl Place {
    fn request(&self) -> Option<Request> {
        let events = self.events.load(Ordering::SeqCst);
        (events != 0).then(|| Request { events, data: self.data.load(Ordering::SeqCst) })
    }

    fn set(&self, request: Request) {
        self.data.store(request.data, Ordering::SeqCst);
        self.events.store(request.events, Ordering::SeqCst);
    }
}

/// Right to return the event of a registration, or to [give it back](OneShots::give_back).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Taken {
    calls: u64,
    /// The program's last request; `None` if it is not known.
    pub(super) request: Option<Request>,
}

/// States of a connection's registrations.
#[derive(Default)]
pub(crate) struct OneShots([Place; PLACES]);

impl OneShots {
    fn place(&self, key: Key) -> Option<&Place> {
        self.0.iter().find(|place| place.key.load(Ordering::SeqCst) == key.0)
    }

    /// The registration has a state.
    pub(super) fn has(&self, key: Key) -> bool {
        self.place(key).is_some()
    }

    /// Marks a registration as armed, before the kernel can report its event. Returns the state before, for [`OneShots::undo`].
    pub(super) fn arm(&self, key: Key, request: Request) -> Option<Taken> {
        let is_taken =
            |place: &&Place| place.key.compare_exchange(0, key.0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        let place = self.place(key).or_else(|| self.0.iter().find(is_taken))?;
        // Before the request changes: `take` returns a request only if it is that of an armed call.
        let next = |calls: u64| Some((calls & !ARMED).wrapping_add(CALL));
        let calls = place.calls.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).unwrap_or_default();
        let before = Taken { calls, request: place.request() };
        place.set(request);
        place.calls.fetch_or(ARMED, Ordering::SeqCst);
        Some(before)
    }

    /// The call of the last [`OneShots::arm`] has failed. `before`: its result.
    pub(super) fn undo(&self, key: Key, before: Taken) {
        let Some(place) = self.place(key) else { return };
        match before.request {
            Some(request) => place.set(request),
            None => place.events.store(0, Ordering::SeqCst),
        }
        if before.calls & ARMED == 0 {
            place.calls.fetch_and(!ARMED, Ordering::SeqCst);
        }
    }

    /// The program's last request; `None` if it is not known.
    pub(super) fn request(&self, key: Key) -> Option<Request> {
        self.place(key)?.request()
    }

    /// Disarms a registration after the kernel has reported an event of it. `None` if another thread or process has returned the event. A
    /// registration without a state gives [`Taken`] each time.
    pub(super) fn take(&self, key: Key) -> Option<Taken> {
        let Some(place) = self.place(key) else { return Some(Taken { calls: 0, request: None }) };
        let mut calls = place.calls.load(Ordering::SeqCst);
        while calls & ARMED != 0 {
            let request = place.request();
            match place.calls.compare_exchange(calls, calls & !ARMED, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(Taken { calls, request }),
                Err(other) => calls = other,
            }
        }
        None
    }

    /// No event was returned: has the kernel report one later, by `renew`, which registers the program's last request (`None` if it is not known).
    /// Does nothing if the program has made another call since: that call has armed the kernel's registration. Repeats the renewal if the program
    /// makes a call during it.
    pub(super) fn give_back(&self, key: Key, taken: Taken, renew: impl Fn(Option<Request>)) {
        let Some(place) = self.place(key) else { return renew(None) };
        let mut calls = taken.calls;
        if place.calls.compare_exchange(calls & !ARMED, calls, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return;
        }
        while calls & ARMED != 0 {
            renew(place.request());
            match place.calls.load(Ordering::SeqCst) {
                same if same == calls => return,
                other => calls = other,
            }
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
    use std::cell::{Cell, RefCell};

    #[test]
    fn one_event_is_returned_for_each_call_of_the_program() {
        let (states, key) = (OneShots::default(), Key::new(1, 0));
        let unknown = Request { events: 0, data: 0 };
        assert!(states.take(key).is_some() && states.take(key).is_some() && !states.has(key), "unknown");
        for events in 1..4 {
            states.arm(key, unknown);
            assert!(states.request(key).is_none() && states.has(key));
            let request = Request { events, data: u64::from(events) << 40 };
            states.arm(key, request);
            let taken = states.take(key).unwrap();
            assert_eq!((taken.request, states.take(key)), (Some(request), None));
            let renewed = Cell::new(None);
            states.give_back(key, taken, |request| renewed.set(request));
            assert_eq!((renewed.get(), states.take(key), states.take(key)), (Some(request), Some(taken), None));
        }
        let (other, further) = (Key::new(2, 0), Key::new(u32::MAX, c_int::MAX));
        let request = Request { events: 7, data: 1 };
        assert!(states.arm(other, request).is_some() && states.arm(further, request).is_none(), "no place");
        assert!(states.take(further).is_some() && states.take(further).is_some());
        states.forget(key);
        states.arm(further, request);
        assert_eq!((states.take(further).unwrap().request, states.take(further)), (Some(request), None));
        assert_eq!((states.request(key), states.request(further)), (None, Some(request)));
        states.clear();
        assert!(states.take(other).is_some() && states.take(other).is_some());
    }

    #[test]
    fn a_call_that_fails_changes_nothing() {
        let (states, key) = (OneShots::default(), Key::new(1, 0));
        let (first, second) = (Request { events: 1, data: 1 }, Request { events: 2, data: 2 });
        states.arm(key, first);
        for _ in 0..2 {
            let before = states.arm(key, second).unwrap();
            states.undo(key, before);
        }
        assert_eq!((states.take(key).unwrap().request, states.take(key)), (Some(first), None));
        let before = states.arm(key, second).unwrap();
        states.undo(key, before);
        assert_eq!((states.take(key), states.request(key)), (None, Some(first)));
    }

    /// The program changes the registration before a renewal, and then during one.
    #[test]
    fn a_renewal_ends_with_the_last_request_of_the_program() {
        let (states, key) = (OneShots::default(), Key::new(1, 5));
        let request = |events| Request { events, data: u64::from(events) };
        states.arm(key, request(1));
        let taken = states.take(key).unwrap();
        states.arm(key, request(2));
        states.give_back(key, taken, |_| panic!("the program's call has armed it"));
        let taken = states.take(key).unwrap();
        // The requests that the kernel gets.
        let kernel = RefCell::new(Vec::new());
        states.give_back(key, taken, |renewed| {
            if kernel.borrow().is_empty() {
                states.arm(key, request(3));
                kernel.borrow_mut().push(Some(request(3)));
            }
            kernel.borrow_mut().push(renewed);
        });
        assert_eq!(kernel.into_inner(), [3, 2, 3].map(|events| Some(request(events))));
        assert!(states.take(key).is_some() && states.take(key).is_none());
    }
}
