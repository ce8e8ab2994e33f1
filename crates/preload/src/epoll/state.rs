//! What an epoll instance has registered, and which of it is looked at.

use super::registration::{EDGE, READABLE, Registration, SPECIAL, arm_connection, weight};
use crate::{data, recheck, room, slots, wait};
use libc::{c_int, epoll_event};
use std::collections::HashMap;
use std::sync::atomic::Ordering;

/// A connection that is found idle so often is left to a doorbell.
const IDLE_MAX: u32 = 64;

/// Calls that have found something in rings, after which the kernel is asked, too.
pub(super) const KERNEL_EVERY: u32 = 4;

/// Registrations with the same data. The kernel reports an event by its data only.
struct Known {
    /// The place of one registration; `None` if several connections have the same data.
    at: Option<u32>,
    has_others: bool,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) registrations: Vec<Registration>,
    by_data: HashMap<u64, Known>,
    pub(super) hot: Vec<u32>,
    /// Places of registrations that are no more.
    pub(super) free: Vec<u32>,
    pub(super) calls: u32,
    pub(super) next: usize,
    /// Number of the current list of events from the kernel; see [`Registration::doorbell_in`].
    pub(super) list: u64,
}

impl State {
    /// The place of a connection's registration, by this descriptor or any.
    pub(super) fn find(&self, connection: u32, fd: Option<c_int>) -> Option<usize> {
        let local = slots::local(connection);
        if local.registrations.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let is_it = |one: &Registration| one.fd >= 0 && one.number == connection && fd.is_none_or(|fd| one.fd == fd);
        let hint = local.place.load(Ordering::Relaxed) as usize;
        if self.registrations.get(hint).is_some_and(is_it) {
            return Some(hint);
        }
        let at = self.registrations.iter().position(is_it)?;
        local.place.store(at as u32, Ordering::Relaxed);
        Some(at)
    }

    /// Takes a place for a registration.
    pub(super) fn add(&mut self, one: Registration) -> u32 {
        let at = self.free.pop().map_or_else(
            || {
                self.registrations.push(Registration { number: 0, fd: -1, ..one });
                self.registrations.len() - 1
            },
            |at| at as usize,
        );
        // A place that was hot when it became free is still in the list.
        let is_hot = self.registrations[at].is_hot;
        let data = one.data;
        self.registrations[at] = Registration { is_hot, ..one };
        self.index(data, at as u32);
        at as u32
    }

    /// The program has changed a registration.
    pub(super) fn modify(&mut self, at: usize, event: epoll_event) {
        self.unindex(at as u32);
        let one = &mut self.registrations[at];
        let local = slots::local(one.number);
        local.registrations.fetch_add(weight(event.events), Ordering::SeqCst);
        local.registrations.fetch_sub(weight(one.events), Ordering::SeqCst);
        // What is there is an event again, as with the kernel.
        (one.events, one.data, one.told, one.is_owed) = (event.events, event.u64, u64::MAX, false);
        one.explained = 0;
        self.index(event.u64, at as u32);
    }

    pub(super) fn end(&mut self, at: usize) {
        self.unindex(at as u32);
        forget(&self.registrations[at]);
        self.registrations[at].fd = -1;
        self.free.push(at as u32);
    }

    /// The place of the registration with this data: `None` if there is none, or if several connections have it.
    pub(super) fn with_data(&self, data: u64) -> Option<u32> {
        self.by_data.get(&data)?.at
    }

    /// True if the kernel has reported the registration because of a doorbell alone, which is discarded now or was discarded for another event of
    /// the same list. Each registration has one event in a list.
    pub(super) fn takes_doorbell(&mut self, at: u32) -> bool {
        let one = &mut self.registrations[at as usize];
        if one.doorbell_in == self.list {
            return std::mem::take(&mut one.doorbell_in) > 0;
        }
        let number = one.number;
        if !wait::discards_doorbell(number, one.descriptor()) {
            return false;
        }
        if slots::local(number).registrations.load(Ordering::SeqCst) > 1 {
            let list = self.list;
            let is_sibling = |one: &Registration| one.fd >= 0 && one.number == number && one.events & READABLE != 0;
            let siblings =
                self.registrations.iter_mut().enumerate().filter(|(i, one)| *i != at as usize && is_sibling(one));
            siblings.for_each(|(_, one)| one.doorbell_in = list);
        }
        true
    }

    /// A registration with this data whose doorbell has caused an event, if several connections have the data: their events look alike.
    pub(super) fn with_doorbell(&mut self, data: u64) -> Option<u32> {
        let is_ambiguous = self.by_data.get(&data).is_some_and(|known| known.at.is_none());
        let len = if is_ambiguous { self.registrations.len() } else { 0 };
        (0..len as u32).find(|at| {
            let one = &self.registrations[*at as usize];
            let is_it = one.fd >= 0 && one.data == data && one.events & READABLE != 0 && one.is_carried();
            if !is_it || data::is_readable(slots::slot(one.number)) {
                return false;
            }
            self.takes_doorbell(*at)
        })
    }

    pub(super) fn index(&mut self, data: u64, at: u32) {
        let registrations = &self.registrations;
        let known = self.by_data.entry(data).or_insert(Known { at: Some(at), has_others: false });
        if known.at == Some(at) {
            return;
        }
        known.has_others = true;
        // A connection can be registered by several descriptors: the registration that waits for data represents it.
        known.at = known.at.filter(|known| registrations[*known as usize].number == registrations[at as usize].number);
        let waits = |place: u32| registrations[place as usize].events & READABLE != 0;
        known.at = known.at.map(|known| if waits(at) && !waits(known) { at } else { known });
    }

    pub(super) fn unindex(&mut self, at: u32) {
        let data = self.registrations[at as usize].data;
        if self.by_data.remove(&data).is_none_or(|known| !known.has_others) {
            return;
        }
        let is_other = |(place, one): &(usize, &Registration)| one.fd >= 0 && one.data == data && *place != at as usize;
        let others = self.registrations.iter().enumerate().filter(is_other).map(|(place, _)| place as u32);
        others.collect::<Vec<_>>().into_iter().for_each(|other| self.index(data, other));
    }

    /// What waits for room on a connection has been woken.
    pub(super) fn look_for_room(&mut self, ep: c_int, connection: u32) {
        let Some(first) = self.find(connection, None) else { return };
        let is_only_one = slots::local(connection).registrations.load(Ordering::SeqCst) <= 1;
        let places = if is_only_one { first..first + 1 } else { 0..self.registrations.len() };
        for one in &mut self.registrations[places] {
            if one.fd >= 0 && one.number == connection {
                one.look_for_room(ep);
                // Which may have something to say.
                self.calls = KERNEL_EVERY;
            }
        }
    }

    pub(super) fn heat(&mut self, at: u32) {
        let one = &mut self.registrations[at as usize];
        one.idle = 0;
        if !one.is_hot {
            one.is_hot = true;
            self.hot.push(at);
        }
    }

    /// Events of hot connections, from where the last call ended: their number, whether other connections have bytes without a doorbell, and
    /// whether a connection that has an event here has got more bytes meanwhile. With `relies_on_doorbells`, each event is followed by a doorbell.
    pub(super) fn look(
        &mut self,
        ep: c_int,
        out: &mut [epoll_event],
        relies_on_doorbells: bool,
    ) -> (usize, bool, bool) {
        let (mut found, mut kept, mut has_more, mut has_missed) = (0, 0, false, false);
        let len = self.hot.len();
        if len == 0 {
            return (0, false, false);
        }
        let first = self.next % len;
        self.hot.rotate_left(first);
        self.next = 0;
        for i in 0..len {
            let at = self.hot[i];
            let one = &mut self.registrations[at as usize];
            if one.fd >= 0 && one.unmute(ep) {
                // Which has something to say.
                self.calls = KERNEL_EVERY;
            }
            let is_kept = if one.fd < 0 {
                false
            } else if found < out.len() {
                let events = one.ready();
                if events != 0 {
                    out[found] = epoll_event { events, u64: one.data };
                    found += 1;
                    self.next = i + 1;
                    one.idle = 0;
                    has_missed |= relies_on_doorbells && events & READABLE != 0 && one.ask_for_next();
                } else {
                    one.idle += 1;
                }
                one.idle < IDLE_MAX || !arm_connection(one.number)
            } else {
                has_more |= one.is_left();
                true
            };
            if is_kept {
                self.hot[kept] = at;
                kept += 1;
            } else {
                one.is_hot = false;
            }
        }
        self.hot.truncate(kept);
        (found, has_more, has_missed)
    }

    /// During a long sleep: looks at all connections, and has the next wait look at those with unread bytes. `is_foreign`: another process has
    /// the instance, too. Then the kernel reports readable connections.
    pub(super) fn look_again(&mut self, is_foreign: bool) {
        for at in 0..self.registrations.len() {
            let one = &self.registrations[at];
            if one.fd < 0 || !slots::slot(one.number).is_accelerated() {
                continue;
            }
            let (number, slot) = (one.number, slots::slot(one.number));
            let is_told = one.events & EDGE != 0 && one.is_told(slot);
            let is_wanted = !is_foreign && one.events & READABLE != 0 && one.events & SPECIAL == 0 && !is_told;
            recheck::look(number, is_wanted);
            if is_wanted && one.has_bytes(slot) {
                self.heat(at as u32);
            }
        }
    }

    /// Has the next wait look at connections with bytes without a doorbell. `is_foreign`: as in [`State::look_again`].
    pub(super) fn heat_unannounced(&mut self, is_foreign: bool) {
        for at in 0..self.registrations.len() {
            let one = &mut self.registrations[at];
            if one.is_unannounced() {
                one.is_inherited |= is_foreign;
                self.heat(at as u32);
            }
        }
    }

    /// Whether the next look finds bytes without a doorbell.
    pub(super) fn has_unannounced_hot(&self) -> bool {
        self.hot.iter().any(|at| self.registrations[*at as usize].is_left())
    }

    /// Whether a connection has bytes that no doorbell has announced to this process, and that the program waits for.
    pub(super) fn has_unannounced(&mut self) -> bool {
        let mut found = false;
        for one in self.registrations.iter_mut().filter(|one| one.fd >= 0 && (one.is_inherited || one.is_owed)) {
            let slot = slots::slot(one.number);
            let is_readable = one.has_bytes(slot);
            let is_told = one.events & EDGE != 0 && one.is_told(slot);
            one.is_inherited &= is_readable && !is_told;
            found |= (one.is_inherited || one.is_owed && is_readable) && one.events & READABLE != 0;
        }
        found
    }

    pub(super) fn is_readable(&mut self) -> bool {
        let hot = std::mem::take(&mut self.hot);
        let found = hot.iter().any(|at| {
            let one = &mut self.registrations[*at as usize];
            let before = (one.told, one.is_owed);
            let has_room = || one.is_muted && !room::is_wanted(one.number);
            let is_ready = one.fd >= 0 && (has_room() || one.ready() != 0);
            (one.told, one.is_owed) = before;
            is_ready
        });
        self.hot = hot;
        found
    }
}

pub(super) fn forget(one: &Registration) {
    let local = slots::local(one.number);
    let _ = local
        .registrations
        .fetch_update(Ordering::SeqCst, Ordering::Relaxed, |count| count.checked_sub(weight(one.events)));
}
