//! One-shot registrations (`EPOLLONESHOT`) of connections with unread bytes in the ring. The kernel knows nothing of these bytes, so the library
//! reports them. Meanwhile the kernel has the registration without events, and with [data of the library](MARK): it reports a broken connection
//! only. The program's request is in a table, which all processes that may have the epoll instance share. So each event is returned once, whichever
//! thread or process waits.
//!
//! Once the ring is empty, the registration is the kernel's again: at the next `epoll_ctl` call of the program, or if another thread has read the
//! bytes before an event was returned.

use super::registration::{ALWAYS, ENDS, FLAGS, PRIORITY, READABLE, Registration, arm_connection};
use super::{ALONE, HANDED, Instance, is_known};
use crate::lock::{self, Guard, Lock, Reentered};
use crate::tcp::Connection;
use crate::{real, slots, wait};
use libc::{c_int, epoll_event};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Maximum number of registrations at a time that the library reports. The bytes of further ones are reported when the peer makes its next call.
const PLACES: usize = 1024;

/// Data of these registrations in the kernel; the number of the place is in the lowest bits.
const MARK: u64 = 0x7468_7275_7773_0000;

/// A registration: an epoll instance, and the descriptor that was registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key(u64);

impl Key {
    /// `instance`: its number among the instances of all processes, from 1 on.
    fn new(instance: u32, fd: c_int) -> Key {
        Key(u64::from(instance) << 32 | u64::from(fd.cast_unsigned()))
    }

    fn instance(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn fd(self) -> c_int {
        (self.0 as u32).cast_signed()
    }
}

/// A registration that the library reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    key: Key,
    connection: u32,
    /// The program's request.
    events: u32,
    data: u64,
}

impl Entry {
    fn event(&self) -> epoll_event {
        epoll_event { events: self.events, u64: self.data }
    }

    /// Makes the program's request to the kernel.
    fn register(&self, ep: c_int) -> bool {
        let mut event = self.event();
        // Its number may be another file's by now.
        let is_it = slots::find(self.key.fd()) == Some(self.connection);
        // SAFETY: one event.
        is_it && unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_MOD, self.key.fd(), &raw mut event) == 0 }
    }

    /// Those of the requested events for which the connection is ready. 0 after a doorbell alone, and after another thread has read the bytes.
    fn ready(&self) -> u32 {
        let (slot, local) = (slots::slot(self.connection), slots::local(self.connection));
        if local.references.load(Ordering::SeqCst) == 0 {
            // Another process has it, and this one cannot look.
            return self.events & READABLE;
        }
        let descriptor = slot.descriptor();
        let mut events = Connection::new(descriptor).poll();
        if slot.error.load(Ordering::Relaxed) != 0 {
            events |= libc::EPOLLERR as u32;
        }
        if !arm_connection(self.connection) {
            events |= READABLE;
        } else if events & READABLE != 0
            && events & (ENDS | PRIORITY) == 0
            && wait::is_doorbell(self.connection, descriptor)
        {
            events &= !READABLE;
        }
        events & (self.events | ALWAYS)
    }
}

#[derive(Default)]
struct Place {
    /// [`Key`] of the registration; 0 if the place is free.
    key: AtomicU64,
    connection: AtomicU32,
    /// No event was returned since the program's last `epoll_ctl` call.
    is_armed: AtomicBool,
    /// Process that made the program's request.
    owner: AtomicU32,
    events: AtomicU32,
    data: AtomicU64,
}

/// See the module. All zero: empty. Shared by all processes.
pub(crate) struct OneShots {
    lock: Lock,
    /// Number of places that are in use, and of those that are armed. Changed under the lock.
    used: AtomicU32,
    armed: AtomicU32,
    places: [Place; PLACES],
}

/// The table, under its lock.
struct Locked<'a> {
    table: &'a OneShots,
    _guard: Guard<'a>,
}

impl OneShots {
    fn lock(&self) -> Result<Locked<'_>, Reentered> {
        Ok(Locked { _guard: self.lock.lock()?, table: self })
    }

    fn is_unused(&self) -> bool {
        self.used.load(Ordering::SeqCst) == 0
    }

    /// Removes the registrations of a connection.
    pub(crate) fn forget_connection(&self, connection: u32) {
        self.forget(|entry| entry.connection == connection);
    }

    fn forget(&self, is_it: impl Fn(&Entry) -> bool) {
        if self.is_unused() {
            return;
        }
        if let Ok(all) = self.lock() {
            all.entries().filter(|(_, entry)| is_it(entry)).for_each(|(at, _)| all.free(at));
        }
    }

    /// A descriptor of a connection is about to be closed, and the connection has others: the kernel keeps the registration, which cannot be changed
    /// afterwards. Returns it to the kernel if the ring is empty. `ep`: a descriptor of an instance.
    pub(crate) fn before_close(&self, connection: u32, fd: c_int, ep: impl Fn(u32) -> Option<c_int>) {
        if self.is_unused() {
            return;
        }
        let Ok(all) = self.lock() else { return };
        for (at, entry) in all.entries().filter(|(_, entry)| entry.connection == connection && entry.key.fd() == fd) {
            let is_armed = self.places[at].is_armed.load(Ordering::Relaxed);
            if is_armed
                && entry.ready() == 0
                && let Some(ep) = ep(entry.key.instance())
                && entry.register(ep)
            {
                all.free(at);
            }
        }
    }

    /// In memory that was copied.
    pub(crate) fn reset_lock(&self) {
        self.lock.reset();
    }

    /// The program's request for a registration with this data in the kernel, if that is the library's.
    pub(super) fn request(&self, data: u64) -> Option<epoll_event> {
        let at = place(data)?;
        self.lock().ok()?.entry(at).map(|entry| entry.event())
    }
}

/// The place of the registration that the kernel has with this data; `None` if that is the program's.
pub(super) fn place(data: u64) -> Option<usize> {
    let at = (data ^ MARK) as usize;
    (at < PLACES).then_some(at)
}

impl Locked<'_> {
    fn entry(&self, at: usize) -> Option<Entry> {
        let place = &self.table.places[at];
        let key = Key(place.key.load(Ordering::Relaxed));
        (key.0 != 0).then(|| Entry {
            key,
            connection: place.connection.load(Ordering::Relaxed),
            events: place.events.load(Ordering::Relaxed),
            data: place.data.load(Ordering::Relaxed),
        })
    }

    fn entries(&self) -> impl Iterator<Item = (usize, Entry)> {
        (0..PLACES).filter_map(|at| Some((at, self.entry(at)?)))
    }

    fn find(&self, key: Key, connection: u32) -> Option<usize> {
        let is_it = |entry: &Entry| entry.key == key && entry.connection == connection;
        self.entries().find(|(_, entry)| is_it(entry)).map(|(at, _)| at)
    }

    /// Armed registrations of an instance.
    fn armed(&self, instance: u32) -> impl Iterator<Item = (usize, Entry)> {
        let is_armed = |at: usize| self.table.places[at].is_armed.load(Ordering::Relaxed);
        self.entries().filter(move |(at, entry)| entry.key.instance() == instance && is_armed(*at))
    }

    /// A free place. If there is none, one whose process was killed: nothing else removes its registrations. `is_known` returns true for instances
    /// of this process.
    fn free_place(&self, is_known: impl Fn(u32) -> bool) -> Option<usize> {
        let places = &self.table.places;
        let free = places.iter().position(|place| place.key.load(Ordering::Relaxed) == 0);
        free.or_else(|| {
            places.iter().position(|place| {
                let key = Key(place.key.load(Ordering::Relaxed));
                !is_known(key.instance()) && lock::is_gone(place.owner.load(Ordering::Relaxed))
            })
        })
    }

    fn arm(&self, at: usize, entry: Entry) {
        let place = &self.table.places[at];
        place.connection.store(entry.connection, Ordering::Relaxed);
        place.events.store(entry.events, Ordering::Relaxed);
        place.data.store(entry.data, Ordering::Relaxed);
        place.owner.store(std::process::id(), Ordering::Relaxed);
        place.key.store(entry.key.0, Ordering::Release);
        place.is_armed.store(true, Ordering::Release);
        self.count();
    }

    /// The event was returned.
    fn disarm(&self, at: usize) {
        self.table.places[at].is_armed.store(false, Ordering::Relaxed);
        self.count();
    }

    fn free(&self, at: usize) {
        self.table.places[at].is_armed.store(false, Ordering::Relaxed);
        self.table.places[at].key.store(0, Ordering::Relaxed);
        self.count();
    }

    /// A process may have been killed between two changes: all are counted.
    fn count(&self) {
        let places = &self.table.places;
        let is_used = |place: &&Place| place.key.load(Ordering::Relaxed) != 0;
        let used = places.iter().filter(is_used).count();
        let armed = places.iter().filter(is_used).filter(|place| place.is_armed.load(Ordering::Relaxed)).count();
        self.table.used.store(used as u32, Ordering::SeqCst);
        self.table.armed.store(armed as u32, Ordering::SeqCst);
    }
}

/// An `epoll_ctl` call of the program for a connection.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) ep: c_int,
    pub(super) operation: c_int,
    pub(super) fd: c_int,
    pub(super) connection: u32,
}

impl Instance {
    /// For the table. `fd`: as in [`Registration::fd`](super::Registration::fd).
    fn key(&self, fd: c_int) -> Key {
        Key::new(self.identity.load(Ordering::Relaxed), fd)
    }

    /// Makes the call `plain`, or one by which the library reports the event. `request`: that of a one-shot registration. `has_unread` asks for a
    /// doorbell with the next bytes, and returns true if the ring has some already. Returns the result, and true if the library reports the event.
    pub(super) fn register_one_shot(
        &self,
        call: Call,
        request: Option<epoll_event>,
        has_unread: impl FnOnce() -> bool,
        plain: impl FnOnce() -> c_int,
    ) -> (c_int, bool) {
        let table = slots::one_shots();
        let wants = request.filter(|request| request.events & READABLE != 0);
        // Another program would get the library's data.
        let may_report = wants.is_some() && self.others.load(Ordering::SeqCst) != HANDED;
        if !may_report && table.is_unused() {
            return (plain(), false);
        }
        // While this is locked, no other thread or process returns the event of the request before.
        let Ok(all) = table.lock() else { return (plain(), false) };
        let key = self.key(call.fd);
        let before = all.find(key, call.connection);
        if may_report
            && has_unread()
            && let Some(request) = wants
            && let Some(at) = before.or_else(|| all.free_place(is_known))
        {
            // Without a bell (no free descriptor), the kernel wakes whatever sleeps on the instance, by an event for room.
            let wake = if self.has_bell_for_sleepers(call.ep) { 0 } else { libc::EPOLLOUT as u32 };
            let mut event = epoll_event { events: request.events & FLAGS | wake, u64: MARK | at as u64 };
            // SAFETY: one event.
            let result = unsafe { real::epoll_ctl(call.ep, call.operation, call.fd, &raw mut event) };
            if result == 0 {
                let (events, data) = (request.events, request.u64);
                all.arm(at, Entry { key, connection: call.connection, events, data });
            }
            return (result, result == 0);
        }
        let result = plain();
        if result == 0
            && let Some(at) = before
        {
            all.free(at);
        }
        (result, false)
    }

    /// Requests once more an event of a one-shot registration: the kernel has reported a doorbell alone. False if another program may have the
    /// instance, or another process may have changed the registration.
    pub(super) fn renew_one_shot(&self, one: &Registration) -> bool {
        let ep = self.ep.load(Ordering::Relaxed);
        match self.others.load(Ordering::SeqCst) {
            ALONE => return one.renew(ep, one.events),
            HANDED => return false,
            _ => {}
        }
        let table = slots::one_shots();
        let Ok(all) = table.lock() else { return false };
        let entry = Entry { key: self.key(one.fd), connection: one.number, events: one.events, data: one.data };
        if all.find(entry.key, entry.connection).is_some() {
            return false;
        }
        let Some(at) = all.free_place(is_known) else { return false };
        // While the place is in use, other processes wait for the table's lock before they change a registration.
        all.arm(at, entry);
        let is_renewed = !self.is_behind() && entry.register(ep);
        all.free(at);
        is_renewed
    }

    /// True if the library may have an event of a one-shot registration to report.
    pub(super) fn has_one_shots(&self) -> bool {
        let table = slots::one_shots();
        table.armed.load(Ordering::SeqCst) > 0
            && self.others.load(Ordering::SeqCst) != HANDED
            && table.lock().is_ok_and(|all| all.armed(self.identity.load(Ordering::Relaxed)).next().is_some())
    }

    /// Writes the events of one-shot registrations to `out`. Returns their number, and true if there may be more. Called under the instance's lock.
    pub(super) fn report_one_shots(&self, out: &mut [epoll_event]) -> (usize, bool) {
        let table = slots::one_shots();
        if table.armed.load(Ordering::SeqCst) == 0 || self.others.load(Ordering::SeqCst) == HANDED {
            return (0, false);
        }
        let Ok(all) = table.lock() else { return (0, false) };
        let mut found = 0;
        for (at, entry) in all.armed(self.identity.load(Ordering::Relaxed)) {
            if found == out.len() {
                return (found, true);
            }
            if slots::slot(entry.connection).references.load(Ordering::SeqCst) == 0 {
                // The kernel has forgotten it, too.
                all.free(at);
                continue;
            }
            let mut events = entry.ready();
            if events == 0 {
                if entry.register(self.ep.load(Ordering::Relaxed)) {
                    all.free(at);
                    continue;
                }
                // The descriptor was closed while the connection has others: the kernel cannot report later bytes.
                events = entry.events & READABLE;
            }
            out[found] = epoll_event { events, u64: entry.data };
            found += 1;
            all.disarm(at);
        }
        (found, false)
    }

    /// Another program gets the instance: from here on, the kernel reports all.
    pub(super) fn hand_over_one_shots(&self) {
        let table = slots::one_shots();
        if table.is_unused() {
            return;
        }
        let (identity, ep) = (self.identity.load(Ordering::Relaxed), self.ep.load(Ordering::Relaxed));
        let Ok(all) = table.lock() else { return };
        for (at, mut entry) in all.entries().filter(|(_, entry)| entry.key.instance() == identity) {
            if !table.places[at].is_armed.load(Ordering::Relaxed) {
                entry.events &= FLAGS;
            }
            entry.register(ep);
            all.free(at);
        }
    }

    /// No process has the instance any more.
    pub(super) fn forget_one_shots(&self) {
        let identity = self.identity.load(Ordering::Relaxed);
        slots::one_shots().forget(|entry| entry.key.instance() == identity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Box<OneShots> {
        Box::new(OneShots {
            lock: Lock::new(),
            used: AtomicU32::new(0),
            armed: AtomicU32::new(0),
            places: std::array::from_fn(|_| Place::default()),
        })
    }

    fn entry(instance: u32, fd: c_int, connection: u32) -> Entry {
        Entry { key: Key::new(instance, fd), connection, events: 1, data: u64::MAX }
    }

    fn armed(all: &Locked<'_>, instance: u32) -> Vec<usize> {
        all.armed(instance).map(|(at, _)| at).collect()
    }

    #[test]
    fn a_registration_is_armed_once_for_each_call() {
        let table = table();
        let all = table.lock().unwrap();
        let one = entry(1, 0, 0);
        assert_eq!((all.find(one.key, 0), all.free_place(|_| true)), (None, Some(0)));
        all.arm(0, one);
        assert_eq!((all.find(one.key, 0), all.find(one.key, 1), all.entry(0)), (Some(0), None, Some(one)));
        assert_eq!((armed(&all, 1), armed(&all, 2)), (vec![0], vec![]));
        let next = Entry { events: 2, ..one };
        all.arm(0, next);
        all.disarm(0);
        assert_eq!((armed(&all, 1), all.entry(0), table.armed.load(Ordering::SeqCst)), (vec![], Some(next), 0));
        assert!(!table.is_unused(), "it is known until the program makes its next call");
        all.free(0);
        assert!(table.is_unused() && all.entry(0).is_none() && all.free_place(|_| true) == Some(0));
    }

    #[test]
    fn what_has_ended_is_removed() {
        let table = table();
        let all = table.lock().unwrap();
        let keys = [entry(1, c_int::MAX, 5), entry(2, 3, 5), entry(u32::MAX, 3, 6)];
        (0..3).for_each(|at| all.arm(at, keys[at]));
        assert_eq!((keys[0].key.fd(), keys[2].key.instance()), (c_int::MAX, u32::MAX));
        drop(all);
        table.forget_connection(5);
        assert_eq!(armed(&table.lock().unwrap(), u32::MAX), [2]);
        assert_eq!((table.used.load(Ordering::SeqCst), table.armed.load(Ordering::SeqCst)), (1, 1));
        table.forget(|entry| entry.key.instance() == u32::MAX);
        assert!(table.is_unused());
    }

    #[test]
    fn a_full_table_has_no_place() {
        let table = table();
        let all = table.lock().unwrap();
        (0..PLACES).for_each(|at| all.arm(at, entry(1, at as c_int, 0)));
        assert_eq!((all.free_place(|_| true), all.armed(1).count()), (None, PLACES));
        all.free(PLACES - 1);
        assert_eq!(all.free_place(|_| true), Some(PLACES - 1));
    }

    #[test]
    fn data_of_the_library_has_a_place() {
        assert_eq!((place(MARK), place(MARK + PLACES as u64 - 1)), (Some(0), Some(PLACES - 1)));
        for data in [0, u64::MAX, MARK - 1, MARK + PLACES as u64, MARK ^ 1 << 32, MARK & 0xffff_ffff] {
            assert_eq!(place(data), None);
        }
    }
}
