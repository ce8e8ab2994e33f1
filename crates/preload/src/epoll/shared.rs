//! Epoll instances of several processes. Each process has a list of its own registrations; the kernel has those of all processes. A process that
//! changes a registration of a shared connection counts the change. The others then compare their lists with the kernel's.

use super::registration::{EDGE, ONE_SHOT, PRIORITY, READABLE, Registration, SPECIAL, WRITABLE};
use super::state::State;
use super::{ALONE, HANDED, Instance, add_as, announce, arm_connection, merge};
use crate::lock::{self, Lock};
use crate::{data, recheck, slots};
use libc::{c_int, epoll_event};
use rustix::fs::{fstat, readlink};
use std::sync::atomic::Ordering;

/// Events and flags of the program; the kernel adds others.
const PROGRAMS: u32 = READABLE | WRITABLE | PRIORITY | EDGE | libc::EPOLLRDHUP as u32;

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
        fstat(slots::borrow(fd)).is_ok_and(|file| file.st_ino == self.inode)
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
        // The kernel adds these.
        let events = self.events & !(libc::EPOLLERR | libc::EPOLLHUP) as u32;
        epoll_event { events, u64: self.data }
    }
}

/// All registrations of an instance in the kernel. `None` if this process cannot read them.
fn registered(ep: c_int) -> Option<Vec<Entry>> {
    if recheck::is_filtered() {
        return None;
    }
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{ep}")).ok()?;
    Some(text.lines().filter_map(Entry::of).collect())
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
        let first = slots::count_change();
        let result = plain();
        let error = data::errno();
        let second = slots::count_change();
        if second == first.wrapping_add(1) {
            // No other process has changed anything.
            let known = second.wrapping_add(1);
            let _ = self.changes.compare_exchange(first, known, Ordering::SeqCst, Ordering::Relaxed);
        }
        data::fail(error);
        result
    }

    /// True if another process may have changed a registration.
    pub(super) fn is_behind(&self) -> bool {
        self.others.load(Ordering::SeqCst) != ALONE && self.changes.load(Ordering::SeqCst) != slots::changes()
    }

    /// Takes over changes by other processes.
    pub(super) fn catch_up(&self) {
        if !self.is_behind() {
            return;
        }
        let changes = slots::changes();
        let error = data::errno();
        let _uses_the_heap = lock::undisturbed();
        if let Ok(mut guard) = self.lock.lock() {
            self.changes.store(changes, Ordering::SeqCst);
            if let Some(entries) = registered(self.ep.load(Ordering::Relaxed)) {
                self.compare(self.state(&mut guard), &entries);
            }
        }
        data::fail(error);
    }

    fn compare(&self, state: &mut State, entries: &[Entry]) {
        let number = self.number.load(Ordering::Relaxed);
        for at in 0..state.registrations.len() {
            let one = &state.registrations[at];
            if one.fd < 0 || one.is_leaving {
                continue;
            }
            let Some(entry) = entries.iter().find(|entry| entry.fd == one.fd && entry.is_of(one.descriptor())) else {
                self.unregister(number, state, at);
                continue;
            };
            if entry.is_spent() {
                state.registrations[at].is_owed = false;
                continue;
            }
            // This library requests that itself.
            let is_others = one.is_muted || entry.events & SPECIAL != 0;
            let mask = if is_others { PROGRAMS & !WRITABLE } else { PROGRAMS };
            if one.data != entry.data || (one.events ^ entry.events) & mask != 0 {
                state.modify(at, entry.event());
                self.look_at(state, at);
            }
        }
        for entry in entries {
            let is_known = |one: &Registration| one.fd == entry.fd && entry.is_of(one.descriptor());
            if entry.is_spent() || state.registrations.iter().any(is_known) {
                continue;
            }
            let wants =
                |connection: &u32| slots::slot(*connection).phase.load(Ordering::Relaxed) != slots::phase::NEVER;
            if let Some(connection) = entry.connection().filter(wants) {
                let at = self.register(number, state, connection, entry.fd, entry.event());
                self.look_at(state, at as usize);
            }
        }
    }

    /// For a registration by another process: unread bytes may be news.
    fn look_at(&self, state: &mut State, at: usize) {
        state.heat(at as u32);
        let one = &mut state.registrations[at];
        let is_special = one.events & SPECIAL != 0;
        one.is_owed = is_special && one.events & READABLE != 0 && data::is_readable(slots::slot(one.number));
    }
}

/// Reports connections with bytes that no doorbell has announced to this process, together with the kernel's events. Returns the number of
/// events, or 0 if there are no such bytes. `ask_kernel` does not wait.
pub(super) fn inherited(
    instance: &Instance,
    out: &mut [epoll_event],
    ask_kernel: impl Fn(&mut [epoll_event]) -> usize,
) -> usize {
    let Ok(mut guard) = instance.lock.lock() else { return 0 };
    let state = instance.state(&mut guard);
    if !state.has_inherited() {
        return 0;
    }
    state.calls = state.calls.wrapping_add(1);
    // The kernel has the last place; if there is one only, every second time.
    let is_kernels = out.len() > 1 || state.calls.is_multiple_of(2);
    let places = out.len() - usize::from(is_kernels);
    let first = state.inherited(&mut out[..places]);
    drop(guard);
    let more = ask_kernel(&mut out[first..]);
    match merge(instance, out, first, more) {
        0 => instance.lock.lock().map_or(0, |mut guard| instance.state(&mut guard).inherited(out)),
        found => found,
    }
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
