//! Sets of entries that a session knows.

use rustix::fs::Statx;
use std::collections::HashSet;
use std::sync::Mutex;
use thruway_fs::Identity;
use thruway_fs::identity::nanoseconds;

/// Most entries of a set. Further ones are not known.
const MAX: usize = 8 << 20;

/// Entries by hash of their identities.
#[derive(Default)]
pub(super) struct Identities(Hashes);

impl Identities {
    pub(super) fn insert(&self, identity: Identity, stat: &Statx) {
        self.0.insert(identity.hash_on(stat));
    }

    pub(super) fn contains(&self, identity: Identity, stat: &Statx) -> bool {
        self.0.contains(identity.hash_on(stat))
    }

    /// True if the set may lack entries.
    pub(super) fn is_full(&self) -> bool {
        self.0.is_full()
    }
}

/// Entries with their change times. An entry that somebody else has changed is not in the set.
#[derive(Default)]
pub(super) struct States(Hashes);

impl States {
    pub(super) fn insert(&self, identity: Identity, stat: &Statx) {
        self.0.insert(state(identity, stat));
    }

    pub(super) fn contains(&self, identity: Identity, stat: &Statx) -> bool {
        self.0.contains(state(identity, stat))
    }
}

fn state(identity: Identity, stat: &Statx) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&identity.hash_on(stat).to_le_bytes()).update(&nanoseconds(stat.stx_ctime).to_le_bytes());
    u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("8 bytes"))
}

#[derive(Default)]
struct Hashes(Mutex<HashSet<u64>>);

impl Hashes {
    fn insert(&self, hash: u64) {
        let mut set = self.0.lock().expect("no panics under the lock");
        if set.len() < MAX {
            set.insert(hash);
        }
    }

    fn contains(&self, hash: u64) -> bool {
        self.0.lock().expect("no panics under the lock").contains(&hash)
    }

    fn is_full(&self) -> bool {
        self.0.lock().expect("no panics under the lock").len() >= MAX
    }
}
