//! Epoll: readiness in rings and in the kernel as one.
//!
//! Descriptors are registered with the kernel's epoll as the program says, so whatever waits by other means still works, woken by
//! doorbells; connections to other hosts have a descriptor beside them that their relay wakes them by ([`crate::waker`]). Beside that,
//! registrations of connections are remembered here. A call that waits looks at the rings of those that are busy ("hot") before it
//! asks the kernel; those that have been idle for long are left to doorbells.

mod one_shots;
mod registration;
mod shared;
mod state;

use crate::lock::{Guard, Lock};
use crate::recheck::Sleeps;
use crate::report::{count, counters};
use crate::wait::{self, Limit};
use crate::{data, lock, real, relay, room, slots, switch, waker};
use libc::{c_int, epoll_event, sigset_t, timespec};
pub(crate) use one_shots::OneShots;
use registration::{
    EDGE, ENDS, ONE_SHOT, PRIORITY, READABLE, Registration, SPECIAL, WRITABLE, arm_connection, weight, with_room,
};
use rustix::event::epoll::{EventData, EventFlags};
pub(crate) use shared::{adopt, note_unseen};
use state::{KERNEL_EVERY, State, forget};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, Ordering};

/// Epoll instances that a process may have at a time and that are looked after.
const INSTANCES: usize = 4096;

#[derive(Default)]
pub(crate) struct Instance {
    lock: Lock,
    state: UnsafeCell<State>,
    /// Threads that sleep in the kernel.
    sleepers: AtomicU32,
    /// Registered connections.
    connections: AtomicU32,
    /// Another process has it, too.
    is_foreign: AtomicBool,
    /// Another instance has it registered, whose waiters are not seen here.
    is_nested: AtomicBool,
    /// One of [`ALONE`] and what follows it.
    others: AtomicU8,
    /// It has other instances registered.
    has_inner: AtomicBool,
    /// Its descriptors.
    descriptors: AtomicU32,
    /// A descriptor that is registered with it to wake what sleeps there, edge-triggered: other processes that have the instance need not take
    /// the event back. 0 before it is needed.
    bell: AtomicI32,
    /// This process's connection to the relay, if it is registered with it; 0 if there was none, and -1 if it has ended.
    relay: AtomicI32,
    luck: AtomicI32,
    /// Its place among all.
    number: AtomicU32,
    /// One of its descriptors.
    ep: AtomicI32,
    /// Number of the instance, unique among processes that share the slots; from 1. A child has the same number for it as its parent.
    identity: AtomicU32,
    /// Changes by other processes that this one has taken over ([`slots::least_changes_by_others`]).
    changes: AtomicU32,
    is_used: AtomicBool,
}

/// In [`Instance::others`]: no other process has it.
const ALONE: u8 = 0;
/// In [`Instance::others`]: a child or the parent of this process may have it. Its library drops events of the bell.
const FORKED: u8 = 1;
/// In [`Instance::others`]: any program may have it. It would report an event of the bell to its user.
const HANDED: u8 = 2;

// SAFETY: the state is used under the lock.
unsafe impl Sync for Instance {}

static ALL: [AtomicPtr<Instance>; INSTANCES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; INSTANCES];

fn instance(number: u32) -> Option<&'static Instance> {
    let at = ALL.get(number as usize)?.load(Ordering::Acquire);
    // SAFETY: instances are leaked.
    (!at.is_null()).then(|| unsafe { &*at })
}

/// All that there have been: places are taken in their order.
fn instances() -> impl Iterator<Item = &'static Instance> {
    // SAFETY: instances are leaked.
    ALL.iter().map_while(|place| unsafe { place.load(Ordering::Acquire).as_ref() })
}

/// True for the number of an instance of this process ([`Instance::identity`]).
fn is_known(identity: u32) -> bool {
    instances().any(|one| one.is_used.load(Ordering::SeqCst) && one.identity.load(Ordering::Relaxed) == identity)
}

impl Instance {
    fn state<'a>(&'a self, _guard: &'a mut Guard<'_>) -> &'a mut State {
        // SAFETY: under the lock.
        unsafe { &mut *self.state.get() }
    }
}

/// A descriptor is a new epoll instance.
pub(crate) fn add(fd: c_int) {
    add_as(fd, ALONE);
}

/// As [`add`]. `others`: what [`Instance::others`] begins with.
fn add_as(fd: c_int, others: u8) {
    for (number, place) in ALL.iter().enumerate() {
        let mut at = place.load(Ordering::Acquire);
        if at.is_null() {
            let new = Box::into_raw(Box::<Instance>::default());
            match place.compare_exchange(at, new, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => at = new,
                Err(other) => {
                    // SAFETY: just made, and nothing else has it.
                    drop(unsafe { Box::from_raw(new) });
                    at = other;
                }
            }
        }
        // SAFETY: instances are leaked.
        let instance = unsafe { &*at };
        if instance.is_used.swap(true, Ordering::SeqCst) {
            continue;
        }
        if let Ok(mut guard) = instance.lock.lock() {
            *instance.state(&mut guard) = State::default();
        }
        // Not the threads that sleep: one that has since an earlier instance takes itself off when it wakes.
        instance.connections.store(0, Ordering::Relaxed);
        instance.is_foreign.store(others != ALONE, Ordering::Relaxed);
        instance.is_nested.store(false, Ordering::Relaxed);
        instance.has_inner.store(false, Ordering::Relaxed);
        instance.others.store(others, Ordering::Relaxed);
        instance.descriptors.store(1, Ordering::Relaxed);
        instance.bell.store(0, Ordering::Relaxed);
        instance.relay.store(0, Ordering::Relaxed);
        instance.luck.store(4, Ordering::Relaxed);
        instance.ep.store(fd, Ordering::Relaxed);
        instance.identity.store(slots::next_instance(), Ordering::Relaxed);
        instance.number.store(number as u32, Ordering::Relaxed);
        instance.changes.store(slots::least_changes_by_others(), Ordering::Relaxed);
        return slots::set_epoll(fd, Some(number as u32));
    }
    slots::set_epoll(fd, None);
}

/// What the kernel tells of an instance's own bell, and of the relay's end.
const BELL: u64 = 0x7468_7275_7761_7962;
const RELAY: u64 = 0x7468_7275_7761_7972;

/// Whether an event is the library's own.
fn is_ours(data: u64) -> bool {
    data == BELL || data == RELAY || with_room(data).is_some() || one_shots::place(data).is_some()
}

impl Instance {
    /// Wakes what sleeps in the kernel on it: a ring has something that the kernel does not know of.
    fn ring(&self, ep: c_int) {
        if self.others.load(Ordering::SeqCst) != HANDED {
            self.have_bell(ep);
        }
        let bell = self.bell.load(Ordering::Relaxed);
        if bell > 0 {
            let _ = rustix::io::write(slots::borrow(bell), &1u64.to_ne_bytes());
        }
    }

    fn have_bell(&self, ep: c_int) {
        if self.bell.load(Ordering::Relaxed) != 0 {
            return;
        }
        let Some(bell) = make_bell(ep) else { return };
        if self.bell.compare_exchange(0, bell, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            slots::close_hidden(bell);
        }
    }

    /// False if something sleeps on it, or may do so in other processes, that [`Instance::ring`] cannot wake.
    fn has_bell_for_sleepers(&self, ep: c_int) -> bool {
        let may_sleep = self.others.load(Ordering::SeqCst) != ALONE || self.sleepers.load(Ordering::SeqCst) > 0;
        let is_nested = self.is_nested.load(Ordering::SeqCst);
        if may_sleep || is_nested {
            self.have_bell(ep);
        }
        !may_sleep && !is_nested || self.bell.load(Ordering::SeqCst) > 0
    }

    /// Removes the bell from the instance: another program cannot interpret its events.
    fn lose_bell(&self) {
        let bell = self.bell.load(Ordering::SeqCst);
        if bell > 0 {
            let ep = self.ep.load(Ordering::Relaxed);
            // SAFETY: no event.
            unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_DEL, bell, std::ptr::null_mut()) };
        }
    }

    /// Wakes what sleeps on it, also in other processes: the ring of this connection has something that the kernel does not know of.
    fn wake(&self, connection: u32) {
        let others = self.others.load(Ordering::SeqCst);
        if others != HANDED {
            self.ring(self.ep.load(Ordering::Relaxed));
        }
        if others != ALONE {
            // Whichever process waits first gets the event of the bell.
            data::ask_for_doorbell(connection);
        }
    }
}

fn make_bell(ep: c_int) -> Option<c_int> {
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    let bell = slots::hide(rustix::event::eventfd(0, flags).ok()?)?;
    let (data, events) = (EventData::new_u64(BELL), EventFlags::IN | EventFlags::ET);
    if rustix::event::epoll::add(slots::borrow(ep), slots::borrow(bell), data, events).is_err() {
        slots::close_hidden(bell);
        return None;
    }
    Some(bell)
}

impl Instance {
    /// True if a process that waits for it could take an event of the library for one of its own, or take it away.
    fn has_others(&self) -> bool {
        self.is_foreign.load(Ordering::Relaxed) || self.others.load(Ordering::SeqCst) == HANDED
    }

    /// Has what waits for it learn that the relay has gone.
    fn watch_relay(&self, relay: c_int) {
        if self.others.load(Ordering::SeqCst) == HANDED || self.relay.load(Ordering::SeqCst) == relay {
            return;
        }
        let mut event = epoll_event { events: EDGE, u64: RELAY };
        let ep = self.ep.load(Ordering::Relaxed);
        // SAFETY: one event.
        unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_ADD, relay, &raw mut event) };
        self.relay.store(relay, Ordering::SeqCst);
        if relay::lifeline() != Some(relay) {
            // It has gone meanwhile, and the descriptor may be another one's.
            // SAFETY: no event.
            unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_DEL, relay, std::ptr::null_mut()) };
        }
    }
}

/// The relay carries a connection of this process's from now on, which may be registered with any instance, where threads may sleep now.
pub(crate) fn watch_relay() {
    let Some(relay) = relay::lifeline() else { return };
    for instance in instances() {
        let is_used = instance.is_used.load(Ordering::SeqCst);
        if is_used && instance.connections.load(Ordering::SeqCst) > 0 {
            instance.watch_relay(relay);
        }
    }
}

/// That relay has gone.
pub(crate) fn forget_relay(relay: c_int) {
    for instance in instances() {
        if instance.relay.compare_exchange(relay, -1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            let ep = instance.ep.load(Ordering::Relaxed);
            // SAFETY: no event.
            unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_DEL, relay, std::ptr::null_mut()) };
        }
    }
}

/// Another descriptor is the same instance.
pub(crate) fn add_duplicate(fd: c_int, number: u32) {
    if let Some(instance) = instance(number) {
        instance.descriptors.fetch_add(1, Ordering::SeqCst);
        slots::set_epoll(fd, Some(number));
    }
}

/// A descriptor that was an epoll instance is closed.
pub(crate) fn remove(fd: c_int, number: u32) {
    slots::set_epoll(fd, None);
    let Some(instance) = instance(number) else { return };
    if instance.descriptors.fetch_sub(1, Ordering::SeqCst) > 1 {
        if instance.ep.load(Ordering::Relaxed) == fd {
            slots::each_descriptor(0, u32::MAX, |other| {
                if slots::find_epoll(other) == Some(number) {
                    instance.ep.store(other, Ordering::Relaxed);
                }
            });
        }
        return;
    }
    let bell = instance.bell.swap(0, Ordering::SeqCst);
    if bell > 0 {
        slots::close_hidden(bell);
    }
    if instance.others.load(Ordering::SeqCst) == ALONE {
        instance.forget_one_shots();
    }
    // The processes that still have it wait for these connections, too.
    let is_handed = instance.others.load(Ordering::SeqCst) == HANDED;
    if let Ok(mut guard) = instance.lock.lock() {
        let state = std::mem::take(instance.state(&mut guard));
        for one in state.registrations.iter().filter(|one| one.fd >= 0) {
            // Also for what waits for the instance by another descriptor.
            waker::unregister(number, fd, one.number);
            if is_handed {
                shared::count_unseen(one.number);
            }
            forget(one);
        }
    }
    instance.connections.store(0, Ordering::Relaxed);
    instance.is_used.store(false, Ordering::Release);
}

/// Something that is not seen here waits for this instance: connections ring for it always, and those that have bytes already wake it.
fn rely_on_doorbells(number: u32) {
    let Some(instance) = instance(number) else { return };
    instance.is_nested.store(true, Ordering::SeqCst);
    let _uses_the_heap = lock::undisturbed();
    let Ok(mut guard) = instance.lock.lock() else { return };
    let state = instance.state(&mut guard);
    let registrations = state.registrations.iter().filter(|one| one.fd >= 0);
    let loud: Vec<u32> = registrations.map(|one| one.number).filter(|number| !arm_connection(*number)).collect();
    drop(guard);
    for connection in loud {
        instance.wake(connection);
    }
}

/// Another process is about to be given an instance, which may have others registered.
pub(crate) fn hand_over(number: u32) {
    let Some(handed) = instance(number) else { return };
    let has_inner = handed.has_inner.load(Ordering::Relaxed);
    for (other, instance) in instances().enumerate() {
        let is_handed = other as u32 == number || has_inner && instance.is_nested.load(Ordering::Relaxed);
        if !is_handed || !instance.is_used.load(Ordering::SeqCst) {
            continue;
        }
        instance.hand_over_one_shots();
        instance.others.store(HANDED, Ordering::SeqCst);
        instance.lose_bell();
        let relay = instance.relay.swap(-1, Ordering::SeqCst);
        if relay > 0 {
            // SAFETY: no event.
            unsafe {
                real::epoll_ctl(instance.ep.load(Ordering::Relaxed), libc::EPOLL_CTL_DEL, relay, std::ptr::null_mut())
            };
        }
        if let Ok(mut guard) = instance.lock.lock() {
            let registrations = &instance.state(&mut guard).registrations;
            for one in registrations.iter().filter(|one| one.fd >= 0) {
                waker::unregister(other as u32, instance.ep.load(Ordering::Relaxed), one.number);
            }
        }
        rely_on_doorbells(other as u32);
    }
}

/// Before this process forks.
pub(crate) fn before_fork() {
    for instance in instances() {
        if !instance.is_used.load(Ordering::SeqCst) {
            continue;
        }
        instance.others.fetch_max(FORKED, Ordering::SeqCst);
    }
}

/// In a child that has just been forked, all are its parent's, too.
pub(crate) fn after_fork() {
    for instance in instances() {
        instance.lock.reset();
        instance.sleepers.store(0, Ordering::SeqCst);
        instance.is_foreign.store(true, Ordering::SeqCst);
        // That was the parent's.
        let _ = instance.relay.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |relay| (relay != 0).then_some(-1));
    }
}

/// True if `event` points to readable memory.
fn is_valid(event: *const epoll_event) -> bool {
    let error = data::errno();
    // SAFETY: the kernel checks the address, copies the event, and then rejects descriptor -1 with `EBADF`.
    unsafe { real::epoll_ctl(-1, libc::EPOLL_CTL_ADD, -1, event.cast_mut()) };
    let is_read = data::errno() == libc::EBADF;
    data::fail(error);
    is_read
}

/// Makes the call `plain`, which is an `epoll_ctl`, and records the change. The lock is held during the call: another thread may receive an
/// event before the call returns, and change the registration or close the connection.
///
/// # Safety
/// `event` is null, invalid, or that of the call; it is read after the kernel has.
pub(crate) unsafe fn control(
    number: u32,
    ep: c_int,
    operation: c_int,
    fd: c_int,
    event: *const epoll_event,
    plain: impl FnOnce() -> c_int,
) -> c_int {
    let Some(instance) = instance(number) else { return plain() };
    if let Some(inner) = slots::find_epoll(fd) {
        let result = plain();
        if result == 0 {
            // One within another: the outer one is woken by the kernel alone.
            instance.has_inner.store(true, Ordering::Relaxed);
            rely_on_doorbells(inner);
        }
        return result;
    }
    let Some(connection) = slots::find(fd) else { return plain() };
    // One that stays with TCP is the kernel's alone. There may be a registration from before that was known.
    let is_kernels = slots::slot(connection).phase.load(Ordering::Relaxed) == slots::phase::NEVER;
    if is_kernels && slots::local(connection).registrations.load(Ordering::SeqCst) == 0 {
        return plain();
    }
    let slot = slots::slot(connection);
    let is_carried = || slot.is_accelerated() && !slot.is_left_to_kernel.load(Ordering::SeqCst);
    // The kernel ignores the event of other operations, which programs may leave uninitialised.
    let is_read = matches!(operation, libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD) && !event.is_null();
    // SAFETY: the address is readable. One read: a thread of the program may change the event meanwhile.
    let before = (is_read && is_carried() && is_valid(event)).then(|| unsafe { event.read_unaligned() });
    let is_one_shot = |event: &epoll_event| event.events & ONE_SHOT != 0;
    let one_shot = before.filter(is_one_shot);
    if one_shot.is_some() {
        switch::leave_for_one_shot(connection, fd);
    }
    let Ok(mut guard) = instance.lock.lock() else { return plain() };
    let _expected = (operation == libc::EPOLL_CTL_ADD).then(|| Expected::new(instance, connection));
    let call = one_shots::Call { ep, operation, fd, connection };
    let has_unread = || is_carried() && !arm_connection(connection);
    let mut is_reported = false;
    let result = instance.change_for_all(connection, || {
        let plain = || match before {
            // SAFETY: one event: the one that was read.
            Some(mut event) => unsafe { real::epoll_ctl(ep, operation, fd, &raw mut event) },
            None => plain(),
        };
        let result;
        (result, is_reported) = instance.register_one_shot(call, one_shot, has_unread, plain);
        result
    });
    if result != 0 {
        let error = data::errno();
        drop(guard);
        return data::fail(error) as c_int;
    }
    if slots::find(fd) != Some(connection) {
        // Another thread closed it during the call.
        return 0;
    }
    // SAFETY: the kernel has read it.
    let requested = before.or_else(|| is_read.then(|| unsafe { event.read_unaligned() }));
    let one_shot = requested.filter(is_one_shot);
    if one_shot.is_some() {
        slot.is_one_shot.store(true, Ordering::SeqCst);
    }
    let mut is_new = None;
    let state = instance.state(&mut guard);
    let at = state.find(connection, Some(fd));
    if is_kernels {
        if let Some(at) = at {
            instance.unregister(number, state, at);
        }
        return 0;
    }
    match (operation, at, requested) {
        (libc::EPOLL_CTL_ADD, None, Some(event)) => {
            is_new = Some(instance.register(number, state, connection, fd, event));
        }
        (libc::EPOLL_CTL_MOD, Some(at), Some(event)) => {
            let one = &state.registrations[at];
            if one.data != event.u64 || (one.events ^ event.events) & (SPECIAL | EDGE | libc::EPOLLIN as u32) != 0 {
                // It is registered again before a thread sleeps, if it is still wanted.
                waker::unregister(number, ep, connection);
            }
            state.modify(at, event);
            let one = &mut state.registrations[at];
            if std::mem::take(&mut one.is_renewed) && one.events & ONE_SHOT == 0 {
                // That may have been after the program's own call, with what was wanted before.
                one.renew(ep, one.events);
            }
            (one.is_muted, one.is_owed_room) = (false, false);
            is_new = Some(at as u32);
        }
        (libc::EPOLL_CTL_DEL, Some(at), _) => instance.unregister(number, state, at),
        _ => {}
    }
    // What is there already is to be told, also to a thread that sleeps now.
    if let Some(at) = is_new
        && slots::slot(connection).is_accelerated()
    {
        state.heat(at);
        let one = &mut state.registrations[at as usize];
        if room::is_wanted(connection) && !instance.has_others() {
            one.mute(ep);
        }
        // Several instances rely on doorbells.
        let is_alone = slots::local(connection).registrations.load(Ordering::SeqCst) == 1;
        if let Some(event) = one_shot {
            if !is_reported && data::is_unannounced(connection) {
                // The connection was accelerated during the call.
                let again = one_shots::Call { operation: libc::EPOLL_CTL_MOD, ..call };
                (_, is_reported) = instance.register_one_shot(again, Some(event), has_unread, || 0);
            }
            drop(guard);
            if is_reported && (instance.others.load(Ordering::SeqCst) != ALONE || !has_no_sleeper(number)) {
                instance.ring(ep);
            }
            return 0;
        }
        let rings = one.events & SPECIAL != 0 || !is_alone || !has_no_sleeper(number);
        let must_ring = rings && !arm_connection(connection) && one.events & READABLE != 0;
        one.is_owed = must_ring && one.events & libc::EPOLLEXCLUSIVE as u32 != 0;
        // Where the kernel's events are returned as they are, this process looks at the ring until it is empty.
        one.is_inherited = must_ring && instance.is_foreign.load(Ordering::Relaxed);
        drop(guard);
        if must_ring {
            instance.wake(connection);
            if !is_alone {
                announce(connection);
            }
        }
    }
    0
}

impl Instance {
    /// Remembers a registration that the kernel has. The place of it.
    fn register(&self, number: u32, state: &mut State, connection: u32, fd: c_int, event: epoll_event) -> u32 {
        let at = state.add(Registration::new(connection, fd, event));
        self.connections.fetch_add(1, Ordering::SeqCst);
        if let Some(relay) = relay::lifeline() {
            self.watch_relay(relay);
        }
        let local = slots::local(connection);
        {
            // Another thread may register it with another instance at this moment.
            let alone = slots::slot(connection).upgrading.lock();
            let is_first = alone.is_ok() && local.registrations.load(Ordering::SeqCst) == 0;
            local.instance.store(if is_first { number } else { slots::SEVERAL }, Ordering::Relaxed);
            local.place.store(at, Ordering::Relaxed);
            local.registrations.fetch_add(weight(event.events), Ordering::SeqCst);
        }
        slots::slot(connection).is_watched.store(true, Ordering::Relaxed);
        at
    }

    /// Forgets a registration that the kernel has no more.
    fn unregister(&self, number: u32, state: &mut State, at: usize) {
        waker::unregister(number, self.ep.load(Ordering::Relaxed), state.registrations[at].number);
        state.end(at);
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A registration in progress. A thread that closes the connection waits for its end.
struct Expected<'a> {
    instance: &'a Instance,
    connection: u32,
}

impl<'a> Expected<'a> {
    fn new(instance: &'a Instance, connection: u32) -> Expected<'a> {
        instance.connections.fetch_add(1, Ordering::SeqCst);
        slots::local(connection).registering.fetch_add(1, Ordering::SeqCst);
        Expected { instance, connection }
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        slots::local(self.connection).registering.fetch_sub(1, Ordering::SeqCst);
        self.instance.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A call has found no room to send on a connection. False if what is registered with epoll cannot wait for that.
pub(crate) fn note_blocked(connection: u32) -> bool {
    let local = slots::local(connection);
    if local.registrations.load(Ordering::SeqCst) == 0 {
        return true;
    }
    let Some(instance) = instance(local.instance.load(Ordering::Relaxed)) else { return false };
    let Ok(mut guard) = instance.lock.lock() else { return false };
    let state = instance.state(&mut guard);
    let Some(at) = state.find(connection, None) else { return false };
    // The other process that has it may take the one event.
    !instance.has_others() && state.registrations[at].mute(instance.ep.load(Ordering::Relaxed))
}

/// A descriptor of a connection is about to be closed, and the connection has others: the kernel's registration by it stays, and cannot be
/// changed any more.
pub(crate) fn before_descriptor_closes(connection: u32, fd: c_int) {
    let descriptor = |identity| {
        let mut used = instances().filter(|instance| instance.is_used.load(Ordering::SeqCst));
        let instance = used.find(|instance| instance.identity.load(Ordering::Relaxed) == identity)?;
        Some(instance.ep.load(Ordering::Relaxed))
    };
    slots::one_shots().before_close(connection, fd, descriptor);
    let number = slots::local(connection).instance.load(Ordering::Relaxed);
    let leave = |instance: &Instance| {
        let Ok(mut guard) = instance.lock.lock() else { return };
        let state = instance.state(&mut guard);
        if let Some(at) = state.find(connection, Some(fd)) {
            state.registrations[at].leave(instance.ep.load(Ordering::Relaxed));
        }
    };
    match instance(number) {
        Some(instance) => leave(instance),
        None if number == slots::SEVERAL => {
            instances().filter(|instance| instance.is_used.load(Ordering::SeqCst)).for_each(leave);
        }
        None => {}
    }
}

/// A connection's last descriptor is about to be closed, so that the kernel forgets the connection. Negative, if it is closed already or other
/// processes may have the connection, and so its registrations.
pub(crate) fn forget_connection(connection: u32, fd: c_int) {
    if fd >= 0 {
        slots::one_shots().forget_connection(connection);
    }
    let local = slots::local(connection);
    let is_registered =
        || local.registrations.load(Ordering::SeqCst) > 0 || local.registering.load(Ordering::SeqCst) > 0;
    if is_registered()
        && let Some(instance) = instance(local.instance.load(Ordering::Relaxed))
    {
        instance.forget_connection(local.instance.load(Ordering::Relaxed), connection, fd);
    }
    for (number, place) in ALL.iter().enumerate() {
        let at = place.load(Ordering::Acquire);
        // SAFETY: instances are leaked.
        match unsafe { at.as_ref() } {
            Some(instance) if is_registered() => instance.forget_connection(number as u32, connection, fd),
            _ => return,
        }
    }
}

impl Instance {
    fn forget_connection(&self, number: u32, connection: u32, fd: c_int) {
        if self.connections.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Ok(mut guard) = self.lock.lock() else { return };
        let state = self.state(&mut guard);
        while let Some(at) = state.find(connection, None) {
            // The relay has a descriptor of both, so the kernel would not forget them.
            let ep = self.ep.load(Ordering::Relaxed);
            waker::unregister(number, ep, connection);
            let is_carried = fd >= 0 && slots::local(connection).relay.load(Ordering::Relaxed) != 0;
            if is_carried && state.registrations[at].fd == fd {
                // SAFETY: no event.
                unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
            } else if is_carried {
                // By a descriptor that is closed already: the registration ends when the relay has let go of the connection.
                slots::slot(connection).was_shared.store(true, Ordering::SeqCst);
            }
            state.end(at);
            self.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// True if no thread sleeps on the instance, and no other process or instance waits for it.
pub(crate) fn has_no_sleeper(number: u32) -> bool {
    instance(number).is_some_and(|one| {
        let is_waited_for_elsewhere = one.is_foreign.load(Ordering::Relaxed) || one.is_nested.load(Ordering::Relaxed);
        !is_waited_for_elsewhere && one.sleepers.load(Ordering::SeqCst) == 0
    })
}

/// All of a connection has been read: it is one to look at.
pub(crate) fn note_drained(number: u32, connection: u32) {
    let Some(instance) = instance(number) else { return };
    let Ok(mut guard) = instance.lock.lock() else { return };
    let state = instance.state(&mut guard);
    let at = state.find(connection, None);
    if let Some(at) = at {
        state.heat(at as u32);
        // A thread that has gone to sleep meanwhile has not seen it among those to look at.
        if !has_no_sleeper(number) && !arm_connection(connection) {
            drop(guard);
            instance.wake(connection);
        }
    }
}

/// Bytes lie in the ring that no doorbell announces. Wakes what sleeps in the kernel on the instances that have the connection registered, also
/// by another instance around them; the next wait looks at the ring.
pub(crate) fn announce(connection: u32) {
    announce_if(connection, false, |number| !has_no_sleeper(number));
}

/// As [`announce`], before a fork: the child waits for the kernel, and looks at these connections until it has read them.
pub(crate) fn announce_to_child(connection: u32) {
    announce_if(connection, true, |_| true);
}

fn announce_if(connection: u32, is_for_child: bool, rings: impl Fn(u32) -> bool) {
    for (number, instance) in instances().enumerate() {
        let is_used = instance.is_used.load(Ordering::SeqCst) && instance.connections.load(Ordering::SeqCst) > 0;
        if !is_used {
            continue;
        }
        let Ok(mut guard) = instance.lock.lock() else { continue };
        let state = instance.state(&mut guard);
        let Some(at) = state.find(connection, None) else { continue };
        state.heat(at as u32);
        state.registrations[at].is_inherited |= is_for_child;
        drop(guard);
        if rings(number as u32) {
            instance.wake(connection);
        }
    }
}

/// Whether there is anything to look at.
pub(crate) fn has_accelerated(number: u32) -> bool {
    instance(number).is_some_and(|one| one.connections.load(Ordering::Relaxed) > 0)
}

/// Whether a ring has something for a registration here.
pub(crate) fn is_readable(number: u32) -> bool {
    let Some(instance) = instance(number) else { return false };
    instance.has_one_shots() || instance.lock.lock().is_ok_and(|mut guard| instance.state(&mut guard).is_readable())
}

/// Before sleeping on it. False if there is something already.
pub(crate) fn arm(number: u32) -> bool {
    let Some(instance) = instance(number) else { return true };
    instance.sleepers.fetch_add(1, Ordering::SeqCst);
    let Ok(mut guard) = instance.lock.lock() else { return true };
    let state = instance.state(&mut guard);
    // The kernel's list of a shared instance is returned as it is: a waker there would be a second event of its connection.
    let is_foreign = instance.is_foreign.load(Ordering::Relaxed);
    let mut is_quiet = !instance.has_one_shots();
    for i in 0..state.hot.len() {
        let at = state.hot[i] as usize;
        let one = &mut state.registrations[at];
        if one.fd >= 0 {
            let slot = slots::slot(one.number);
            let ep = instance.ep.load(Ordering::Relaxed);
            let has_waker = !is_foreign && instance.others.load(Ordering::Relaxed) != HANDED;
            if has_waker && one.events & SPECIAL == 0 && one.events & libc::EPOLLIN as u32 != 0 {
                waker::register(number, ep, one.number, one.events, one.data);
            }
            let is_empty = one.events & READABLE == 0
                || arm_connection(one.number) && (one.events & EDGE == 0 || !one.has_bytes(slot));
            // Not empty, but the program knows: an edge that has been told; or does not want to.
            is_quiet &= is_empty
                || one.events & EDGE != 0 && one.is_told(slot)
                // The kernel tells of it, by the doorbell that has not been discarded.
                || one.events & SPECIAL != 0 && !one.is_owed;
        }
    }
    is_quiet
}

/// A thread is about to sleep on an instance without connections, by another call than those of epoll. Registrations ring for it.
pub(crate) fn begin_sleep(number: u32) {
    if let Some(instance) = instance(number) {
        instance.sleepers.fetch_add(1, Ordering::SeqCst);
    }
}

/// It has woken up.
pub(crate) fn end_sleep(number: u32) {
    if let Some(instance) = instance(number) {
        // A fork in a signal handler has set it to 0.
        let less = |sleepers: u32| sleepers.checked_sub(1);
        let _ = instance.sleepers.fetch_update(Ordering::SeqCst, Ordering::Relaxed, less);
    }
}

/// During a long sleep: see [`crate::recheck`].
pub(crate) fn look_again(number: u32) {
    let Some(instance) = instance(number) else { return };
    let Ok(mut guard) = instance.lock.lock() else { return };
    let is_foreign = instance.is_foreign.load(Ordering::Relaxed);
    let state = instance.state(&mut guard);
    state.look_again(is_foreign);
    let is_seen = !is_foreign && instance.others.load(Ordering::Relaxed) != HANDED;
    let rings = is_seen && instance.is_nested.load(Ordering::Relaxed) && state.is_readable();
    drop(guard);
    if rings {
        instance.ring(instance.ep.load(Ordering::Relaxed));
    }
}

/// Waits for the kernel, on an instance that has others registered or that several processes have. `None`: connections have bytes without a
/// doorbell, or another process has registered the first connection.
fn wait_for_kernel(
    instance: &Instance,
    limit: Limit,
    sleeps: &mut Sleeps,
    real: impl Fn(Option<timespec>, *const sigset_t) -> c_int,
) -> Option<c_int> {
    loop {
        let sleep = sleeps.next(limit);
        let ready = real(sleep.left(), sleeps.mask());
        let is_dropped_signal = ready < 0 && sleeps.is_dropped_signal(data::errno());
        if ready != 0 && !is_dropped_signal || limit.is_over() {
            return Some(ready);
        }
        if !sleeps.may_go_on() {
            return Some(data::fail(libc::EINTR) as c_int);
        }
        if instance.has_one_shots() {
            return None;
        }
        if instance.is_behind() {
            instance.catch_up();
            let has_first =
                !instance.is_foreign.load(Ordering::Relaxed) && instance.connections.load(Ordering::SeqCst) > 0;
            if has_first || instance.has_unannounced() {
                return None;
            }
        }
        look_again(instance.number.load(Ordering::Relaxed));
        for (inner, instance) in instances().enumerate() {
            if instance.is_used.load(Ordering::Relaxed) && instance.is_nested.load(Ordering::Relaxed) {
                look_again(inner as u32);
            }
        }
    }
}

/// After sleeping on it.
pub(crate) fn disarm(number: u32) {
    let Some(instance) = instance(number) else { return };
    if instance.sleepers.fetch_sub(1, Ordering::SeqCst) > 1 || instance.is_foreign.load(Ordering::Relaxed) {
        return;
    }
    let Ok(mut guard) = instance.lock.lock() else { return };
    let state = instance.state(&mut guard);
    for at in &state.hot {
        let one = &state.registrations[*at as usize];
        let slot = slots::slot(one.number);
        if one.fd >= 0 && one.events & SPECIAL == 0 && wait::is_looked_at(slot, one.number) {
            data::disarm(slot, one.number);
        }
    }
}

/// `epoll_pwait2`, of which the others are forms. `plain` is the call as it is; `limit` reads the clock.
///
/// # Safety
/// As `epoll_pwait2`.
pub(crate) unsafe fn wait(
    ep: c_int,
    events: *mut epoll_event,
    max: c_int,
    limit: impl FnOnce() -> Limit,
    mask: *const sigset_t,
    plain: impl FnOnce() -> c_int,
    real: impl Fn(*mut epoll_event, c_int, Option<timespec>, *const sigset_t) -> c_int,
) -> c_int {
    let number = slots::find_epoll(ep);
    let found = number.and_then(|number| instance(number).map(|instance| (number, instance)));
    let Some((number, instance)) = found else { return plain() };
    let limit = limit();
    instance.catch_up();
    // The kernel has all events of an instance from another process, but for bytes that no doorbell has announced.
    let is_unannounced = instance.has_unannounced();
    let is_plain = || {
        let has_none = instance.connections.load(Ordering::SeqCst) == 0 || !switch::has_accelerated();
        let is_foreign = instance.is_foreign.load(Ordering::Relaxed) && !is_unannounced;
        (has_none || is_foreign) && !instance.has_one_shots() || max <= 0 || events.is_null()
    };
    let (mut plain_ready, mut sleeps) = (None, Sleeps::new(mask));
    if is_plain() {
        // Connections may be accelerated while this thread sleeps. What has been until it counted as a sleeper is looked at.
        instance.sleepers.fetch_add(1, Ordering::SeqCst);
        let is_kernels = || {
            // A process may register a connection and exit. Its bell then disappears, possibly before it has woken this thread.
            let is_seen =
                !instance.has_inner.load(Ordering::Relaxed) && instance.others.load(Ordering::SeqCst) == ALONE;
            !is_seen && switch::has_accelerated() && max > 0 && !events.is_null()
        };
        plain_ready = match is_plain() {
            true if is_kernels() => {
                wait_for_kernel(instance, limit, &mut sleeps, |limit, mask| real(events, max, limit, mask))
            }
            true => Some(plain()),
            false => None,
        };
        instance.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
    if let Some(ready) = plain_ready {
        // A connection that was accelerated during the call may have its waker in the instance, and so may a connection of another process
        // that shares the instance. In a shared instance, doorbells ring for all connections.
        let rings = || {
            let has_any = instance.connections.load(Ordering::SeqCst) > 0 || instance.is_behind();
            has_any && switch::has_accelerated()
        };
        // SAFETY: the kernel has written as many.
        let said = || unsafe { std::slice::from_raw_parts(events, ready as usize) };
        if ready <= 0 || !rings() && !said().iter().any(|event| is_ours(event.u64)) {
            return ready;
        }
        // SAFETY: the kernel has written as many.
        let kept = correct(instance, unsafe { std::slice::from_raw_parts_mut(events, ready as usize) }, 0);
        if kept.number > 0 {
            return kept.number as c_int;
        }
        // Its own bell alone: there is something to look at.
    }
    data::check_cancelled();
    // SAFETY: the caller's promise.
    let out = unsafe { std::slice::from_raw_parts_mut(events, max as usize) };
    let none = timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let (mut found, mut has_hot, mut asks_kernel, mut is_kernels_turn) = (0, false, false, false);
        if let Ok(mut guard) = instance.lock.lock() {
            let state = instance.state(&mut guard);
            state.calls += 1;
            has_hot = !state.hot.is_empty() || instance.has_one_shots();
            // The kernel comes first in its turn, also where rings alone would fill the list.
            is_kernels_turn = has_hot && state.calls >= KERNEL_EVERY;
            if is_kernels_turn {
                state.calls = 0;
            } else {
                let has_more;
                (found, has_more) = instance.look(state, out);
                if has_more && instance.may_have_sleepers() {
                    // The bell may have been rung for several connections, and wakes one thread.
                    instance.ring(instance.ep.load(Ordering::Relaxed));
                }
                asks_kernel = state.calls >= KERNEL_EVERY && found < out.len();
                if asks_kernel {
                    state.calls = 0;
                }
            }
        }
        if is_kernels_turn {
            let ready = real(out.as_mut_ptr(), max, Some(none), mask);
            if ready > 0 {
                found = correct(instance, &mut out[..ready as usize], 0).number;
            }
            if found < out.len() {
                found = append(instance, out, found);
            }
        }
        if found == 0 && asks_kernel && has_hot {
            let ready = real(out.as_mut_ptr(), max, Some(none), mask);
            let mut has_rung = false;
            if ready > 0 {
                Kept { number: found, has_rung } = correct(instance, &mut out[..ready as usize], 0);
            }
            if found == 0 && has_rung {
                continue;
            }
            asks_kernel = false;
        }
        if found > 0 {
            if asks_kernel && found < out.len() {
                let rest = &mut out[found..];
                let more = real(rest.as_mut_ptr(), rest.len() as c_int, Some(none), mask);
                if more > 0 {
                    found = merge(instance, out, found, more as usize);
                }
            }
            return found as c_int;
        }
        if has_hot && !sleeps.has_begun() && !limit.is_over() {
            let is_ready = || is_readable(number);
            if wait::spin_with(&instance.luck, limit, is_ready, || ()) {
                continue;
            }
        }
        if limit.is_over() {
            // Only a look. Events that are none may have made something else ready.
            let mut has_rung = false;
            for _ in 0..3 {
                let ready = real(out.as_mut_ptr(), max, Some(none), mask);
                if ready < 0 {
                    return ready;
                }
                let kept = correct(instance, &mut out[..ready as usize], 0);
                has_rung |= kept.has_rung;
                if kept.number > 0 {
                    return kept.number as c_int;
                }
                if ready == 0 {
                    break;
                }
            }
            // The bell is an edge, and was for this call.
            let look = |mut guard: Guard<'_>| instance.look(instance.state(&mut guard), out).0;
            return if has_rung { instance.lock.lock().map_or(0, look) as c_int } else { 0 };
        }
        if !sleeps.may_go_on() {
            return data::fail(libc::EINTR) as c_int;
        }
        let may_sleep = arm(number);
        count(&counters().sleeps, 1);
        let sleep = sleeps.next(limit).left();
        let ready = real(out.as_mut_ptr(), max, if may_sleep { sleep } else { Some(none) }, sleeps.mask());
        let error = data::errno();
        if ready == 0 && may_sleep && !limit.is_over() {
            // While connections still ask for doorbells.
            look_again(number);
        }
        disarm(number);
        if ready < 0 && sleeps.is_dropped_signal(error) {
            continue;
        }
        if ready < 0 {
            return data::fail(error) as c_int;
        }
        let kept = correct(instance, &mut out[..ready as usize], 0);
        if kept.number > 0 || limit.is_over() && !kept.has_rung {
            return kept.number as c_int;
        }
    }
}

/// Appends the events of the kernel to those of the rings, as one event for each data.
fn merge(instance: &Instance, out: &mut [epoll_event], first: usize, more: usize) -> usize {
    let kept = correct(instance, &mut out[first..first + more], first).number;
    join(out, first, kept)
}

/// Appends the events of the rings to those of the kernel, as one event for each data.
fn append(instance: &Instance, out: &mut [epoll_event], first: usize) -> usize {
    let Ok(mut guard) = instance.lock.lock() else { return first };
    let (kept, has_more) = instance.look(instance.state(&mut guard), &mut out[first..]);
    drop(guard);
    if has_more && instance.may_have_sleepers() {
        instance.ring(instance.ep.load(Ordering::Relaxed));
    }
    join(out, first, kept)
}

/// Adds events to the first ones of a list, as one event for each data. Returns their number.
fn join(out: &mut [epoll_event], first: usize, kept: usize) -> usize {
    let mut end = first;
    for i in first..first + kept {
        let one = out[i];
        match out[..first].iter_mut().find(|other| { other.u64 } == { one.u64 }) {
            Some(same) => same.events |= one.events,
            None => {
                out[end] = one;
                end += 1;
            }
        }
    }
    end
}

impl Instance {
    /// The events `said` of a registration, without those that only a doorbell has caused. Another descriptor may be registered with the same data.
    /// So each event that is removed has its own doorbell, which is found here.
    fn without_doorbell(&self, state: &mut State, at: u32, said: u32) -> u32 {
        let one = &mut state.registrations[at as usize];
        let slot = slots::slot(one.number);
        let mut events = said;
        if one.is_muted {
            // The kernel was quicker than what it is asked for.
            events &= !WRITABLE;
        }
        let is_room_news = events & WRITABLE != 0 && std::mem::take(&mut one.is_owed_room);
        let may_have_blocked = || is_room_news || data::may_have_blocked(slot);
        if events & READABLE == 0 || events & (ENDS | PRIORITY) != 0 {
            return events;
        }
        if one.has_bytes(slot) {
            if one.events & ONE_SHOT == 0 && one.is_told_again(slot) {
                // The doorbell of what has been told. That it may be sent again is news only where it could not.
                events &= if may_have_blocked() { !READABLE } else { 0 };
            }
            state.heat(at);
            return events;
        }
        let is_doorbell = state.takes_doorbell(at);
        let one = &mut state.registrations[at as usize];
        let is_first = one.told == u64::MAX;
        one.told = one.told.min(u64::MAX - 1);
        if !is_doorbell {
            return events;
        }
        if one.events & ONE_SHOT != 0 {
            // The kernel reports nothing more of it.
            let rest = events & one.events & !READABLE;
            return if rest != 0 || self.renew_one_shot(one) { rest } else { events };
        }
        // Writable it may be nevertheless, which only a level tells again and again, and an edge at first.
        events &= !READABLE;
        if one.events & EDGE != 0 && !is_first && !may_have_blocked() { 0 } else { events }
    }

    /// Events of hot connections and of one-shot registrations: their number, and true if there may be more.
    fn look(&self, state: &mut State, out: &mut [epoll_event]) -> (usize, bool) {
        let (first, has_more) = self.report_one_shots(out);
        if first > 0 {
            // The kernel reports events of such registrations, too.
            state.calls = KERNEL_EVERY;
        }
        let ep = self.ep.load(Ordering::Relaxed);
        let (found, has_hot, has_missed) = state.look(ep, &mut out[first..], self.relies_on_doorbells());
        if has_missed {
            self.ring(ep);
        }
        (first + found, has_more || has_hot && !self.has_others())
    }

    /// True if something waits for the kernel's events of it that is not seen here.
    fn relies_on_doorbells(&self) -> bool {
        self.is_nested.load(Ordering::SeqCst) || self.others.load(Ordering::SeqCst) != ALONE
    }

    /// True if another thread or process may sleep on it that the bell wakes.
    fn may_have_sleepers(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) > 0 || self.others.load(Ordering::SeqCst) == FORKED
    }
}

/// Result of [`correct`].
struct Kept {
    /// Events at the beginning of the list.
    number: usize,
    /// The bell, or its like for a one-shot registration, was among those removed.
    has_rung: bool,
}

/// Removes events that only doorbells have caused and that nothing belongs to any more. `before`: number of events that the call returns
/// beside these.
fn correct(instance: &Instance, events: &mut [epoll_event], before: usize) -> Kept {
    if events.iter().any(|event| { event.u64 } == RELAY) {
        relay::look();
    }
    instance.catch_up();
    let is_bell = |event: &epoll_event| event.u64 == BELL || one_shots::place(event.u64).is_some();
    let has_rung = events.iter().any(is_bell);
    let Ok(mut guard) = instance.lock.lock() else { return Kept { number: events.len(), has_rung } };
    let state = instance.state(&mut guard);
    if instance.others.load(Ordering::SeqCst) != ALONE && has_rung {
        // Another process may have rung it.
        state.heat_unannounced(instance.is_foreign.load(Ordering::Relaxed));
    }
    state.list += 1;
    let (mut kept, mut has_missed) = (0, false);
    for i in 0..events.len() {
        let event = events[i];
        if let Some(connection) = with_room(event.u64) {
            state.look_for_room(instance.ep.load(Ordering::Relaxed), connection);
            continue;
        }
        if is_ours(event.u64) {
            continue;
        }
        let may_be_doorbell = event.events & READABLE != 0 && event.events & (ENDS | PRIORITY) == 0;
        let mut at = state.with_data(event.u64).filter(|at| state.registrations[*at as usize].is_known());
        if at.is_none() && may_be_doorbell {
            at = state.with_doorbell(event.u64);
            if let Some(at) = at {
                // It counts for this event.
                state.registrations[at as usize].doorbell_in = state.list;
            }
        }
        let mut events_now = event.events;
        if let Some(at) = at {
            let slot = slots::slot(state.registrations[at as usize].number);
            if slot.error.load(Ordering::Relaxed) != 0 {
                // Taken from the kernel, and not yet told.
                events_now |= libc::EPOLLERR as u32;
            }
            if slot.is_accelerated() {
                events_now = instance.without_doorbell(state, at, events_now);
                if events_now & READABLE != 0 && instance.relies_on_doorbells() {
                    has_missed |= state.registrations[at as usize].ask_for_next();
                }
            }
        }
        if events_now == 0 {
            continue;
        }
        // The connection and its waker are one to the program, which may free what it knows of it at the first event.
        let has_waker = at.is_some_and(|at| waker::of(state.registrations[at as usize].number).is_some());
        let same = events[..kept].iter_mut().find(|other| has_waker && { other.u64 } == { event.u64 });
        match same {
            Some(same) => same.events |= events_now,
            None => {
                events[kept] = epoll_event { events: events_now, u64: event.u64 };
                kept += 1;
            }
        }
    }
    // This call returns without a look, and the bell has woken no other thread.
    let is_for_another = has_rung && kept + before > 0 && instance.may_have_sleepers();
    let rings = is_for_another && (state.has_unannounced_hot() || instance.has_one_shots());
    if rings || has_missed {
        drop(guard);
        instance.ring(instance.ep.load(Ordering::Relaxed));
    }
    Kept { number: kept, has_rung }
}

/// Held over `fork`, so that no other thread is inside when the child gets its copy.
pub(crate) fn lock_all() -> Vec<Guard<'static>> {
    instances().filter_map(|instance| instance.lock.lock().ok()).collect()
}

/// `epoll_pwait` with a limit as `epoll_pwait2` has it, rounded up to milliseconds.
pub(crate) unsafe fn real_wait(
    ep: c_int,
    events: *mut epoll_event,
    max: c_int,
    limit: Option<timespec>,
    mask: *const sigset_t,
) -> c_int {
    let milliseconds = limit.map_or(-1, |limit| {
        let whole = limit.tv_sec.saturating_mul(1000).saturating_add((limit.tv_nsec + 999_999) / 1_000_000);
        c_int::try_from(whole).unwrap_or(c_int::MAX)
    });
    // SAFETY: the caller's promise.
    unsafe { real::epoll_pwait(ep, events, max, milliseconds, mask) }
}
