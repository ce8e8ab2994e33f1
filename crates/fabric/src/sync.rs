//! Locks that a panic does not take with it.
//!
//! A panic in one connection's turn ends that connection ([`crate::iwarp`]); the locks it held must go on
//! serving the others, and destructors above all must not panic in their turn.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locking without poisoning.
pub(crate) trait LockUnpoisoned<T> {
    /// Locks, whatever happened to the last holder.
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T>;
}

impl<T> LockUnpoisoned<T> for Mutex<T> {
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
