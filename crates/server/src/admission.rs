//! Admission: which connections may begin their handshakes, for services to which each costs a thread.
//!
//! What unauthenticated peers can make a daemon hold is bounded, in all and for each origin. A burst is no attack, though: a connection
//! that comes while all slots are taken waits. Origins take turns, so that one that says nothing, or sends a flood, keeps
//! only itself waiting.
//!
//! Where an unauthenticated connection costs little, [`crate::connection_limit`] evicts one instead.

use crate::fair_queue::{FairQueue, Verdict};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use thruway_tcp::Origin;

pub use crate::fair_queue::Limits;

/// Decides which connections may begin their handshakes. One thread asks it; handshakes end on threads of their own, which have that one
/// woken.
pub struct Admission<T> {
    queue: Mutex<FairQueue<T>>,
    /// With whom handshakes have ended since that thread last looked.
    over: Mutex<Vec<Origin>>,
    wake: Box<dyn Fn() + Send + Sync>,
    /// No more connections are admitted. Changes under the lock of `queue`.
    closed: AtomicBool,
}

/// A handshake in progress; released on drop.
pub struct Slot<T> {
    admission: Arc<Admission<T>>,
    from: Origin,
}

/// What to do with connections.
pub struct Answer<T> {
    /// Handshakes to begin.
    pub begin: Vec<(T, Slot<T>)>,
    /// Connections to be refused: there are too many.
    pub refuse: Vec<T>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panics under the lock")
}

impl<T> Admission<T> {
    /// `wake` has the thread that asks call [`Admission::go_on`].
    pub fn new(limits: Limits, wake: impl Fn() + Send + Sync + 'static) -> Arc<Admission<T>> {
        Arc::new(Admission {
            queue: Mutex::new(FairQueue::new(limits)),
            over: Mutex::default(),
            wake: Box::new(wake),
            closed: AtomicBool::new(false),
        })
    }

    /// A connection arrives.
    pub fn arrive(self: &Arc<Self>, from: Origin, caller: T) -> Answer<T> {
        let mut handshakes = lock(&self.queue);
        if self.closed.load(Ordering::SeqCst) {
            return Answer { begin: Vec::new(), refuse: vec![caller] };
        }
        let verdict = handshakes.arrive(from, caller, Instant::now());
        drop(handshakes);
        self.answer(verdict)
    }

    /// Gives the slots of handshakes that have ended to connections that wait.
    pub fn go_on(self: &Arc<Self>) -> Answer<T> {
        let over = std::mem::take(&mut *lock(&self.over));
        let mut all = Verdict { begin: Vec::new(), refuse: Vec::new() };
        for from in over {
            let verdict = lock(&self.queue).over(from, Instant::now());
            all.begin.extend(verdict.begin);
            all.refuse.extend(verdict.refuse);
        }
        self.answer(all)
    }

    fn answer(self: &Arc<Self>, verdict: Verdict<T>) -> Answer<T> {
        let turn = |(from, caller)| (caller, Slot { admission: Arc::clone(self), from });
        Answer { begin: verdict.begin.into_iter().map(turn).collect(), refuse: verdict.refuse }
    }

    /// Admits no more connections. Those that wait are dropped.
    pub fn close(&self) {
        let mut handshakes = lock(&self.queue);
        self.closed.store(true, Ordering::SeqCst);
        let limits = handshakes.limits;
        let waiting = std::mem::replace(&mut *handshakes, FairQueue::new(limits));
        drop(handshakes);
        drop(waiting);
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        lock(&self.admission.over).push(self.from);
        (self.admission.wake)();
    }
}
