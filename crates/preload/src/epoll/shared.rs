//! Epoll instances of several processes. Each process has a list of its own registrations; the kernel has those of all processes. A process that
//! changes a registration of a shared connection counts the change. The others then compare their lists with the kernel's.

use super::registration::{ALWAYS, EDGE, ONE_SHOT, PRIORITY, READABLE, Registration, SPECIAL, WRITABLE};
use super::state::State;
use super::{ALONE, HANDED, Instance, add_as, announce, arm_connection};
use crate::lock::{self, Lock};
use crate::{data, recheck, slots};
use libc::{c_int, epoll_event};
use rustix::fs::{fstat, readlink};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// Events and flags of the program; the kernel adds others.
const PROGRAMS: u32 = READABLE | WRITABLE | PRIORITY | EDGE | libc::EPOLLRDHUP as u32;
/// Those that change what a registration means: all but `EPOLLWAKEUP`, which the kernel may drop.
const COMPARED: u32 = PROGRAMS | SPECIAL;

/// A registration of an instance in the kernel.
struct Entry {
    /// In the process that registered it.
    fd: c_int,
    inode: u64,
    events: u32,
    data: u64,
}

impl Entry {
    /// Of a line such as `tfd:        5 events:       19 data:                5  pos:0 ino:61 sdev:8` in `/proc/PID/fdinfo/FD` (proc(5); only
    /// `tfd` and `pos` are decimal).
    fn of(line: &str) -> Option<Entry> {
        let mut words = line.split([' ', ':']).filter(|word| !word.is_empty());
        let mut entry = Entry { fd: -1, inode: 0, events: 0, data: 0 };
        while let (Some(name), Some(value)) = (words.next(), words.next()) {
            match name {
                "tfd" => entry.fd = value.parse().ok()?,
                "events" => entry.events = u32::from_str_radix(value, 16).ok()?,
                "data" => entry.data = u64::from_str_radix(value, 16).ok()?,
                "ino" => entry.inode = u64::from_str_radix(value, 16).ok()?,
                _ => {}
            }
        }
        (entry.fd >= 0).then_some(entry)
    }

    /// It was good for one event, which the kernel has given.
    fn is_spent(&self) -> bool {
        self.events & ONE_SHOT != 0 && self.events & PROGRAMS & !EDGE == 0
    }

    fn is_of(&self, fd: c_int) -> bool {
        inode(fd) == Some(self.inode)
    }

    /// The connection that is registered.
    fn connection(&self) -> Option<u32> {
        // Most often the descriptor has the same number in both processes.
        if self.is_of(self.fd) {
            return slots::find(self.fd);
        }
        let mut found = None;
        slots::each(|number, fd| {
            if found.is_none() && self.is_of(fd) {
                found = Some(number);
            }
        });
        found
    }

    fn event(&self) -> epoll_event {
        epoll_event { events: self.events & !ALWAYS, u64: self.data }
    }
}

/// All registrations of an instance in the kernel. `None` if this process cannot read them.
fn registered(ep: c_int) -> Option<Vec<Entry>> {
    if recheck::is_filtered() {
        return None;
    }
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{ep}")).ok()?;
    let mut entries: Vec<Entry> = text.lines().filter_map(Entry::of).collect();
    entries.sort_unstable_by_key(|entry| entry.fd);
    Some(entries)
}

impl Instance {
    /// Makes the call `plain`, which changes a registration. If other processes may have the instance and the connection, the change is counted
    /// before and after the call: a process that compares during the call compares again.
    pub(super) fn change_for_all(&self, connection: u32, plain: impl FnOnce() -> c_int) -> c_int {
        let slot = slots::slot(connection);
        let is_shared = || slot.is_foreign.load(Ordering::SeqCst) || slot.was_shared.load(Ordering::SeqCst);
        if self.others.load(Ordering::SeqCst) == ALONE || !is_shared() {
            return plain();
        }
        slots::count_change();
        let result = plain();
        let error = data::errno();
        slots::count_change();
        data::fail(error);
        result
    }

    /// True if another process may have changed a registration.
    pub(super) fn is_behind(&self) -> bool {
        let is_later = |changes: u32| slots::most_changes_by_others().wrapping_sub(changes).cast_signed() > 0;
        self.others.load(Ordering::SeqCst) != ALONE && is_later(self.changes.load(Ordering::SeqCst))
    }

    /// Takes over changes by other processes.
    pub(super) fn catch_up(&self) {
        if !self.is_behind() {
            return;
        }
        if let Ok(mut guard) = self.lock.lock() {
            self.take_over(self.state(&mut guard));
        }
    }

    /// Takes over all registrations that the kernel has. False without a free descriptor: the next call or the next look tries again.
    pub(super) fn take_over(&self, state: &mut State) -> bool {
        let changes = slots::least_changes_by_others();
        let error = data::errno();
        let _uses_the_heap = lock::undisturbed();
        let entries = registered(self.ep.load(Ordering::Relaxed));
        if let Some(entries) = &entries {
            self.changes.store(changes, Ordering::SeqCst);
            self.compare(state, entries);
        }
        data::fail(error);
        entries.is_some()
    }

    /// True if connections of an instance from another process have bytes without a doorbell.
    pub(super) fn has_unannounced(&self) -> bool {
        self.is_foreign.load(Ordering::Relaxed)
            && self.lock.lock().is_ok_and(|mut guard| self.state(&mut guard).has_unannounced())
    }

    fn compare(&self, state: &mut State, entries: &[Entry]) {
        let number = self.number.load(Ordering::Relaxed);
        let mut known = HashSet::new();
        for at in 0..state.registrations.len() {
            let one = &state.registrations[at];
            if one.fd < 0 {
                continue;
            }
            let entry = find(entries, one);
            if let Some(entry) = entry {
                known.insert((entry.fd, entry.inode));
            }
            if one.is_leaving {
                continue;
            }
            let Some(entry) = entry else {
                self.unregister(number, state, at);
                continue;
            };
            let Some(event) = requested(entry) else {
                state.registrations[at].is_owed = false;
                // Another process has made it a one-shot registration, and the kernel has reported its event.
                let one = &state.registrations[at];
                let is_changed = one.events & ONE_SHOT == 0 || one.data != entry.data;
                if is_changed && super::one_shots::place(entry.data).is_none() {
                    state.modify(at, entry.event());
                }
                continue;
            };
            // This library requests that itself.
            let mask = if one.is_muted { COMPARED & !WRITABLE } else { COMPARED };
            let is_changed = one.data != event.u64 || (one.events ^ event.events) & mask != 0;
            if is_changed {
                state.modify(at, event);
            }
            if entry.is_spent() {
                state.registrations[at].is_owed = false;
                continue;
            }
            if is_changed {
                self.look_at(state, at);
            }
        }
        for entry in entries.iter().filter(|entry| !known.contains(&(entry.fd, entry.inode))) {
            let wants =
                |connection: &u32| slots::slot(*connection).phase.load(Ordering::Relaxed) != slots::phase::NEVER;
            if let Some(connection) = entry.connection().filter(wants)
                && let Some(event) = requested(entry)
            {
                let at = self.register(number, state, connection, entry.fd, event);
                if !entry.is_spent() {
                    self.look_at(state, at as usize);
                }
            }
        }
    }

    /// For a registration by another process: unread bytes may be news.
    fn look_at(&self, state: &mut State, at: usize) {
        state.heat(at as u32);
        let one = &mut state.registrations[at];
        let has_bytes = one.events & READABLE != 0 && data::is_readable(slots::slot(one.number));
        one.is_owed = one.events & libc::EPOLLEXCLUSIVE as u32 != 0 && has_bytes;
        one.is_inherited |= one.events & SPECIAL == 0 && has_bytes;
    }
}

/// Event that the program requested by a registration in the kernel. `None` if unknown, because the kernel has already reported it.
fn requested(entry: &Entry) -> Option<epoll_event> {
    slots::one_shots().request(entry.data).or_else(|| (!entry.is_spent()).then(|| entry.event()))
}

/// The entry of a registration; they are ordered by descriptors.
fn find<'a>(entries: &'a [Entry], one: &Registration) -> Option<&'a Entry> {
    let first = entries.partition_point(|entry| entry.fd < one.fd);
    let mut same = entries[first..].iter().take_while(|entry| entry.fd == one.fd);
    let inode = inode(one.descriptor())?;
    same.find(|entry| entry.inode == inode)
}

fn inode(fd: c_int) -> Option<u64> {
    Some(fstat(slots::borrow(fd)).ok()?.st_ino)
}

/// Two threads may register connections with an unknown instance at a time.
static ADOPTING: Lock = Lock::new();

/// Adds an unknown epoll instance, with which a connection is about to be registered: another program has made it, and may wait for it, too.
/// `None` if it is none, or if there is no place for it.
pub(crate) fn adopt(ep: c_int, fd: c_int) -> Option<u32> {
    slots::find(fd)?;
    if slots::find(ep).is_some() || recheck::is_filtered() || !is_epoll(ep) {
        return None;
    }
    let _alone = ADOPTING.lock().ok()?;
    if slots::find_epoll(ep).is_none() {
        add_as(ep, HANDED);
    }
    slots::find_epoll(ep)
}

fn is_epoll(fd: c_int) -> bool {
    let _uses_the_heap = lock::undisturbed();
    let name = readlink(format!("/proc/self/fd/{fd}"), Vec::new());
    name.is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventpoll]")
}

/// For a connection that stays registered with an instance of other processes: its peer rings for all bytes from here on.
pub(super) fn count_unseen(connection: u32) {
    // One registration more than a connection that is looked at may have.
    slots::local(connection).registrations.fetch_add(2, Ordering::SeqCst);
}

/// As [`count_unseen`], for an unknown instance. Also announces unread bytes.
pub(crate) fn note_unseen(connection: u32) {
    count_unseen(connection);
    let slot = slots::slot(connection);
    if slot.is_accelerated() && !arm_connection(connection) {
        announce(connection);
        data::ask_for_doorbell(connection);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_read() {
        let of = |line| Entry::of(line).map(|entry| (entry.fd, entry.inode, entry.events, entry.data));
        let line = "tfd:       12 events:       1b data:  7f0000000005  pos:0 ino:3e1f sdev:8";
        assert_eq!(of(line), Some((12, 0x3e1f, 0x1b, 0x7f00_0000_0005)));
        for other in ["", "pos:\t0", "flags:\t02", "tfd: x", "tfd: 5 events: zz"] {
            assert_eq!(of(other), None, "{other}");
        }
        let spent = |events| Entry { fd: 1, inode: 1, events, data: 1 }.is_spent();
        assert!(spent(ONE_SHOT) && !spent(ONE_SHOT | READABLE) && !spent(0));
    }

    #[test]
    fn registrations_are_read_from_the_kernel() {
        let ep = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let data = rustix::event::epoll::EventData::new_u64(u64::MAX - 1);
        rustix::event::epoll::add(&ep, &socket, data, rustix::event::epoll::EventFlags::IN).unwrap();
        let entries = registered(std::os::fd::AsRawFd::as_raw_fd(&ep)).unwrap();
        assert_eq!(entries.len(), 1);
        assert!(entries[0].is_of(std::os::fd::AsRawFd::as_raw_fd(&socket)));
        let event = entries[0].event();
        assert_eq!(({ event.events }, { event.u64 }), (libc::EPOLLIN as u32, u64::MAX - 1));
    }
}
