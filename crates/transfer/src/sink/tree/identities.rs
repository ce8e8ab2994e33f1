//! Sets of entries that a session knows.

use rustix::fs::Statx;
use std::collections::HashSet;
use std::sync::Mutex;
use thruway_fs::Identity;

/// Most entries of a set. Further ones are not known.
const MAX: usize = 8 << 20;

/// Entries by hash of their identities.
#[derive(Default)]
pub(super) struct Identities(Mutex<HashSet<u64>>);

impl Identities {
    pub(super) fn insert(&self, identity: Identity, stat: &Statx) {
        let mut set = self.0.lock().expect("no panics under the lock");
        if set.len() < MAX {
            set.insert(identity.hash_on(stat));
        }
    }

    pub(super) fn contains(&self, identity: Identity, stat: &Statx) -> bool {
        self.0.lock().expect("no panics under the lock").contains(&identity.hash_on(stat))
    }

    /// True if the set may lack entries.
    pub(super) fn is_full(&self) -> bool {
        self.0.lock().expect("no panics under the lock").len() >= MAX
    }
}
