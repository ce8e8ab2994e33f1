//! Quotas for a resource of this process, so that no owner takes all of it.

use crate::Owner;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// True if the owner of `theirs` units may have another one while `free` units are free: fewer than eight times as many. So no owner
/// takes all.
pub fn is_fair(theirs: usize, free: usize) -> bool {
    theirs < free.saturating_mul(8)
}

/// A resource with a fixed number of units. One owner may hold eight times the number of free units ([`is_fair`]).
pub struct Quota {
    max: usize,
    state: Mutex<State>,
    /// Notified when a unit is released.
    released: Condvar,
}

#[derive(Default)]
struct State {
    all: usize,
    of: HashMap<Owner, usize>,
}

impl Quota {
    /// Creates a resource with `max` units.
    pub fn new(max: usize) -> Arc<Quota> {
        Arc::new(Quota { max, state: Mutex::default(), released: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics under the lock")
    }

    /// Takes a unit. Waits for at most `patience`, then returns `None`.
    pub fn take(self: &Arc<Quota>, owner: Owner, patience: Duration) -> Option<Unit> {
        let is_left = |state: &mut State| {
            let theirs = state.of.get(&owner).copied().unwrap_or(0);
            is_fair(theirs, self.max.saturating_sub(state.all))
        };
        let waited = self.released.wait_timeout_while(self.lock(), patience, |state| !is_left(state));
        let (mut state, _) = waited.expect("no panics under the lock");
        if !is_left(&mut state) {
            return None;
        }
        state.all += 1;
        *state.of.entry(owner).or_default() += 1;
        Some(Unit { quota: Arc::clone(self), owner })
    }
}

/// One unit, released on drop.
pub struct Unit {
    quota: Arc<Quota>,
    owner: Owner,
}

impl Drop for Unit {
    fn drop(&mut self) {
        let mut state = self.quota.lock();
        state.all -= 1;
        if let Some(theirs) = state.of.get_mut(&self.owner) {
            *theirs -= 1;
            if *theirs == 0 {
                state.of.remove(&self.owner);
            }
        }
        drop(state);
        self.quota.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_owner_leaves_room_for_others_and_gets_all_back() {
        let quota = Quota::new(900);
        let take_all = |owner| std::iter::from_fn(|| quota.take(Owner(owner), Duration::ZERO)).collect::<Vec<_>>();
        let first = take_all(1);
        assert_eq!(first.len(), 800);
        let second = take_all(2);
        assert!((80..100).contains(&second.len()), "{}", second.len());
        assert!(quota.take(Owner(1), Duration::ZERO).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| quota.take(Owner(1), Duration::MAX).is_some());
            drop((first, second));
            assert!(waiting.join().unwrap());
        });
        assert_eq!(take_all(1).len(), 800);
        let holders = quota.lock().of.len();
        assert_eq!(holders, 0);
    }
}
