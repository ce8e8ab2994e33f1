//! What an epoll instance has registered, and which of it is looked at.

use super::registration::{Registration, arm_connection, weight};
use crate::{room, slots};
use libc::{c_int, epoll_event};
use std::collections::HashMap;
use std::sync::atomic::Ordering;

/// A connection that is found idle so often is left to a doorbell.
const IDLE_MAX: u32 = 64;

/// Calls that have found something in rings, after which the kernel is asked, too.
pub(super) const KERNEL_EVERY: u32 = 4;

#[derive(Default)]
pub(super) struct State {
    pub(super) registrations: Vec<Registration>,
    /// By the program's data, which is all that the kernel tells; `None` where several have the same.
    pub(super) by_data: HashMap<u64, Option<u32>>,
    pub(super) hot: Vec<u32>,
    /// Places of registrations that are no more.
    pub(super) free: Vec<u32>,
    pub(super) calls: u32,
    pub(super) next: usize,
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

    pub(super) fn end(&mut self, at: usize) {
        self.unindex(at as u32);
        forget(&self.registrations[at]);
        self.registrations[at].fd = -1;
        self.free.push(at as u32);
    }

    pub(super) fn index(&mut self, data: u64, at: u32) {
        self.by_data.entry(data).and_modify(|place| *place = None).or_insert(Some(at));
    }

    pub(super) fn unindex(&mut self, at: u32) {
        let data = self.registrations[at as usize].data;
        match self.by_data.get(&data) {
            Some(&Some(one)) if one == at => drop(self.by_data.remove(&data)),
            Some(None) => {
                // Several have the same. One of those that are left is known by it again, if it is the only one.
                let is_other =
                    |(place, one): &(usize, &Registration)| one.fd >= 0 && one.data == data && *place != at as usize;
                let mut others = self.registrations.iter().enumerate().filter(is_other).map(|(place, _)| place as u32);
                match (others.next(), others.next()) {
                    (Some(only), None) => drop(self.by_data.insert(data, Some(only))),
                    (None, _) => drop(self.by_data.remove(&data)),
                    _ => {}
                }
            }
            _ => {}
        }
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

    /// Events of hot connections, from where the last call ended; the number of them.
    pub(super) fn look(&mut self, ep: c_int, out: &mut [epoll_event]) -> usize {
        let (mut found, mut kept) = (0, 0);
        let len = self.hot.len();
        if len == 0 {
            return 0;
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
                } else {
                    one.idle += 1;
                }
                one.idle < IDLE_MAX || !arm_connection(one.number)
            } else {
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
