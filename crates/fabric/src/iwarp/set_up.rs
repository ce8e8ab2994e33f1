//! Places for incoming connections that have no queue pair yet.

use std::sync::{Arc, Mutex};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_tcp::{ByOrigin, Origin};

/// The incoming connections of a device that have no queue pair yet.
#[derive(Default)]
pub(super) struct SetUp(Mutex<State>);

#[derive(Default)]
struct State {
    /// All of them.
    count: usize,
    /// Those that give way to new ones: their requests have not arrived, or have not been polled.
    evictable: ByOrigin<u64>,
}

/// Whether there is room for a new connection.
pub(super) enum Room {
    Free,
    /// Once this connection has been closed.
    Instead(Origin, u64),
    /// None of those that are there gives way.
    Full,
}

impl SetUp {
    pub(super) fn room(&self, new: Origin, max: usize) -> Room {
        let state = self.0.lock_unpoisoned();
        match state.evictable.give_way(new) {
            _ if state.count < max => Room::Free,
            Some((origin, id)) => Room::Instead(origin, id),
            None => Room::Full,
        }
    }

    pub(super) fn take(self: &Arc<SetUp>, origin: Origin, id: u64) -> Place {
        let mut state = self.0.lock_unpoisoned();
        state.count += 1;
        state.evictable.insert(origin, id);
        Place { set_up: Arc::clone(self), origin, id }
    }

    /// A connection does not give way any more.
    pub(super) fn keep(&self, origin: Origin, id: u64) {
        self.0.lock_unpoisoned().evictable.remove(origin, id);
    }
}

/// A place among them; released on drop.
pub(super) struct Place {
    set_up: Arc<SetUp>,
    origin: Origin,
    pub(super) id: u64,
}

impl Place {
    /// As [`SetUp::keep`].
    pub(super) fn keep(&self) {
        self.set_up.keep(self.origin, self.id);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.set_up.0.lock_unpoisoned();
        state.count -= 1;
        state.evictable.remove(self.origin, self.id);
    }
}
