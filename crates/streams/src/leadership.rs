//! Which thread sleeps on the device, for all, and whom it wakes.
//!
//! Of the threads that wait, one leads: it sleeps on the device, and takes note of what has happened, for every connection. The others
//! sleep each until something of their own connection has been found, so that a message wakes only threads that wait for it. A leader
//! that has found its own wakes one of them to lead. While no thread waits, the context's own sleeps on the device.

use crate::context::{Shared, lock};
use crate::error::Error;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest sleep on the device. A safety net: under load, with one thread that polled and one that slept on the same device, a connection
/// has been seen to stand still, once in some hundred runs of the tests.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// The same for a thread that sleeps while another leads: some change of its connection may have been told to no thread.
const FOLLOWER_LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time that a thread looks for itself while another sleeps on the device.
const FOLLOWER_SPIN_MAX_NS: u64 = 20_000;
/// How long the context's thread leaves the device alone after another has polled it.
const POLLING_LEASE: Duration = Duration::from_millis(1);

/// What threads that wait for something of one connection have in common.
#[derive(Default)]
pub(crate) struct Awaited {
    /// Counts what has been found.
    epoch: AtomicU64,
    found: Condvar,
    /// Threads that sleep until then. Changes with the order locked.
    sleepers: AtomicU32,
}

impl Awaited {
    /// What [`Shared::wait`] wants to know: taken before looking whether there is something to wait for.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }
}

/// Which thread sees to the device.
enum Leader {
    None,
    /// One that waits, and sleeps on the device.
    Asleep(Arc<Awaited>),
    /// One that waits, and is looking what has happened.
    Awake,
    /// The context's own.
    Server,
}

impl Leader {
    fn is_waiter(&self) -> bool {
        matches!(self, Leader::Asleep(_) | Leader::Awake)
    }
}

struct Order {
    leader: Leader,
    /// Threads that neither lead nor look: for the server to give way, or for something of these connections.
    waiting: usize,
    asleep: Vec<Arc<Awaited>>,
    /// The server sleeps until no thread leads.
    is_parked: bool,
}

pub(crate) struct Leadership {
    order: Mutex<Order>,
    /// The server leads no more.
    given_way: Condvar,
    /// Nor does any other thread.
    leaderless: Condvar,
    /// Counts what has been found, of any connection.
    found: AtomicU64,
    /// Counts the waits of threads.
    waits: AtomicU64,
    /// How long a thread looks for itself while another sleeps on the device: longer while that pays.
    spin_ns: AtomicU64,
}

impl Leadership {
    pub(crate) fn new() -> Leadership {
        Leadership {
            order: Mutex::new(Order { leader: Leader::None, waiting: 0, asleep: Vec::new(), is_parked: false }),
            given_way: Condvar::new(),
            leaderless: Condvar::new(),
            found: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            spin_ns: AtomicU64::new(FOLLOWER_SPIN_MAX_NS),
        }
    }

    /// The context has ended: its thread is to see that.
    pub(crate) fn rouse_server(&self) {
        let order = lock(&self.order);
        self.leaderless.notify_all();
        drop(order);
    }

    /// No thread leads: one that sleeps is to.
    fn step_down(&self, order: &mut Order) {
        order.leader = Leader::None;
        if let Some(next) = order.asleep.last() {
            next.found.notify_one();
        }
        if std::mem::take(&mut order.is_parked) {
            self.leaderless.notify_one();
        }
    }
}

/// A leader that panics leads no more.
struct StepDown<'a>(&'a Leadership);

impl Drop for StepDown<'_> {
    fn drop(&mut self) {
        self.0.step_down(&mut lock(&self.0.order));
    }
}

impl Shared {
    /// Returns when something of this connection may have been found since `epoch`, at the latest at the deadline.
    pub(crate) fn wait(&self, own: &Arc<Awaited>, epoch: u64, deadline: Option<Instant>) -> Result<(), Error> {
        self.leadership.waits.fetch_add(1, Ordering::Relaxed);
        let mut order = lock(&self.leadership.order);
        if let Leader::Server = order.leader {
            // It gives way: what has been found is wanted here, without another thread in between.
            order.waiting += 1;
            self.device.wake();
            while let Leader::Server = order.leader {
                order = self.leadership.given_way.wait(order).unwrap_or_else(PoisonError::into_inner);
            }
            order.waiting -= 1;
        }
        if own.epoch() != epoch {
            return Ok(());
        }
        if order.leader.is_waiter() {
            drop(order);
            return self.follow(own, epoch, deadline);
        }
        self.lead(order, own, epoch, deadline)
    }

    /// Sleeps on the device, for all, until something of its own has been found.
    fn lead<'a>(
        &'a self,
        mut order: MutexGuard<'a, Order>,
        own: &Arc<Awaited>,
        epoch: u64,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let until = Instant::now() + LOOK_INTERVAL;
        let until = deadline.map_or(until, |deadline| deadline.min(until));
        let mut result = Ok(());
        while own.epoch() == epoch && result.is_ok() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            order.leader = Leader::Asleep(Arc::clone(own));
            drop(order);
            let unwinding = StepDown(&self.leadership);
            let waited = self.device.wait(Some(left));
            lock(&self.leadership.order).leader = Leader::Awake;
            // The device said once that there is something. A thread that polls just now may have looked before that.
            self.poll_in_turn();
            std::mem::forget(unwinding);
            result = waited.map_err(Error::from);
            order = lock(&self.leadership.order);
        }
        self.leadership.step_down(&mut order);
        result
    }

    /// Another thread sleeps on the device, and says what it finds.
    fn follow(&self, own: &Arc<Awaited>, epoch: u64, deadline: Option<Instant>) -> Result<(), Error> {
        let (began, spin_ns) = (Instant::now(), &self.leadership.spin_ns);
        let spin = Duration::from_nanos(spin_ns.load(Ordering::Relaxed));
        while began.elapsed() < spin {
            self.poll();
            if own.epoch() != epoch {
                spin_ns.store((spin.as_nanos() as u64 * 2).clamp(1000, FOLLOWER_SPIN_MAX_NS), Ordering::Relaxed);
                return Ok(());
            }
            std::hint::spin_loop();
        }
        spin_ns.store((spin.as_nanos() as u64 / 2).max(1000), Ordering::Relaxed);
        let mut order = lock(&self.leadership.order);
        if own.epoch() == epoch && order.leader.is_waiter() {
            let left = deadline.map_or(FOLLOWER_LOOK_INTERVAL, |at| at.saturating_duration_since(Instant::now()));
            let left = left.min(FOLLOWER_LOOK_INTERVAL);
            order.waiting += 1;
            order.asleep.push(Arc::clone(own));
            own.sleepers.fetch_add(1, Ordering::Relaxed);
            let waited = own.found.wait_timeout(order, left);
            order = waited.unwrap_or_else(PoisonError::into_inner).0;
            order.waiting -= 1;
            own.sleepers.fetch_sub(1, Ordering::Relaxed);
            let at = order.asleep.iter().rposition(|other| Arc::ptr_eq(other, own)).expect("it was put there");
            order.asleep.remove(at);
        }
        // Woken to lead, perhaps. Where this thread has no need any more, the next one does.
        if let Leader::None = order.leader {
            if own.epoch() == epoch {
                return self.lead(order, own, epoch, deadline);
            }
            self.leadership.step_down(&mut order);
        }
        Ok(())
    }

    /// Something of this connection has been found that a thread may wait for.
    pub(crate) fn tell(&self, own: &Awaited) {
        own.epoch.fetch_add(1, Ordering::SeqCst);
        self.leadership.found.fetch_add(1, Ordering::SeqCst);
        let order = lock(&self.leadership.order);
        // A system call, even if there is none.
        if own.sleepers.load(Ordering::Relaxed) > 0 {
            own.found.notify_all();
        }
        if let Leader::Asleep(leaders) = &order.leader
            && std::ptr::eq(&raw const **leaders, own)
        {
            self.device.wake();
        }
    }

    /// Sees to the device while nothing else does, until the context ends.
    pub(crate) fn serve(&self) {
        let mut seen = 0;
        while !self.has_ended() {
            let found = self.leadership.found.load(Ordering::SeqCst);
            self.poll();
            let waits = self.leadership.waits.load(Ordering::Relaxed);
            if waits != seen {
                seen = waits;
                std::thread::sleep(POLLING_LEASE);
                continue;
            }
            let mut order = lock(&self.leadership.order);
            if self.has_ended() {
                return;
            }
            match order.leader {
                // One of those is about to lead, or has found what it waited for.
                Leader::None if order.waiting > 0 => {
                    drop(order);
                    std::thread::sleep(POLLING_LEASE);
                }
                Leader::None if self.leadership.found.load(Ordering::SeqCst) != found => {}
                Leader::None => {
                    order.leader = Leader::Server;
                    drop(order);
                    let waited = self.device.wait(Some(LOOK_INTERVAL));
                    lock(&self.leadership.order).leader = Leader::None;
                    self.leadership.given_way.notify_all();
                    if waited.is_err() {
                        std::thread::sleep(Duration::from_secs(1));
                    }
                }
                _ => {
                    order.is_parked = true;
                    drop(self.leadership.leaderless.wait(order));
                }
            }
        }
    }
}
