//! Places for incoming connections before the consumer polls their requests.

use std::sync::{Arc, Mutex};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_tcp::{ByOrigin, Origin};

/// The incoming connections of a device before the consumer polls their requests.
#[derive(Default)]
pub(super) struct SetUp(Mutex<State>);

#[derive(Default)]
struct State {
    count: usize,
    connections: ByOrigin<u64>,
}

impl State {
    fn remove(&mut self, origin: Origin, id: u64) {
        if self.connections.remove(origin, id) {
            self.count -= 1;
        }
    }
}

impl SetUp {
    /// The connection to close before a new one is set up; `None` if fewer than `max` are there.
    pub(super) fn give_way(&self, new: Origin, max: usize) -> Option<(Origin, u64)> {
        let state = self.0.lock_unpoisoned();
        if state.count < max { None } else { state.connections.give_way(new) }
    }

    pub(super) fn take(self: &Arc<SetUp>, origin: Origin, id: u64) -> Place {
        let mut state = self.0.lock_unpoisoned();
        state.count += 1;
        state.connections.insert(origin, id);
        Place { set_up: Arc::clone(self), origin, id }
    }

    /// Releases the place of a connection.
    pub(super) fn release(&self, origin: Origin, id: u64) {
        self.0.lock_unpoisoned().remove(origin, id);
    }
}

/// A place among them; released on drop.
pub(super) struct Place {
    set_up: Arc<SetUp>,
    origin: Origin,
    pub(super) id: u64,
}

impl Place {
    /// As [`SetUp::release`].
    pub(super) fn release(&self) {
        self.set_up.release(self.origin, self.id);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.release();
    }
}
