//! Locks that a panic does not take with it, and what loom puts in place of atomics (`cargo xtask loom`).
//!
//! A panic in one connection's turn ends that connection (iWARP); the locks it held must go on
//! serving the others, and destructors above all must not panic in their turn.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locking without poisoning.
pub trait LockUnpoisoned<T> {
    /// Locks, whatever happened to the last holder.
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T>;
}

impl<T> LockUnpoisoned<T> for Mutex<T> {
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The atomics of those modules that loom tests in every order.
pub mod atomic {
    #[cfg(loom)]
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
    #[cfg(not(loom))]
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
}

/// Stands between a sequentially consistent write and the read that must not come before it. It is nothing: such operations
/// have one order for all threads. loom, which takes them for acquiring and releasing ones, knows fences.
pub fn in_order() {
    #[cfg(loom)]
    loom::sync::atomic::fence(atomic::Ordering::SeqCst);
}

/// Lets somebody else get on, for the time of a system call that does not wait. A sleep, because a yield to one that was
/// preempted on this very core would be none under real-time scheduling.
pub fn wait_a_little() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::sleep(std::time::Duration::from_micros(1));
}
