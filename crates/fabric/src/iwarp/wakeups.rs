//! Threads that wait for events and completions of a device.

use super::doorbell::{Doorbell, Whom};
use rustix::event::EventfdFlags;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{Error, Result};

/// The doorbell of a device, and descriptors that wake its threads.
pub(super) struct Wakeups {
    /// Counts completions and events not polled yet, and queue pairs that are ready.
    pub(super) doorbell: Doorbell,
    /// In the epoll set of the device.
    pub(super) wake: OwnedFd,
    /// Threads in `wait`, by the descriptor that wakes each.
    sleepers: Mutex<Vec<Arc<OwnedFd>>>,
}

impl Wakeups {
    pub(super) fn new(wake: OwnedFd) -> Wakeups {
        Wakeups { doorbell: Doorbell::default(), wake, sleepers: Mutex::default() }
    }

    pub(super) fn count_unpolled(&self) {
        self.rouse(self.doorbell.publish());
    }

    pub(super) fn discount_unpolled(&self, n: usize) {
        self.doorbell.take(n);
    }

    pub(super) fn rouse(&self, whom: Whom) {
        if whom.armed {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
        if whom.sleepers {
            for sleeper in &*self.sleepers.lock_unpoisoned() {
                let _ = rustix::io::write(sleeper, &1u64.to_ne_bytes());
            }
        }
    }
}

/// A thread that sleeps in `wait`. Each has a descriptor of its own: none takes the signal for another one.
pub(super) struct Sleeper<'a> {
    wakeups: &'a Wakeups,
    pub(super) fd: Arc<OwnedFd>,
}

impl<'a> Sleeper<'a> {
    /// Announces that this thread goes to sleep. `None` if there is something to do already. `look` does what was left to later polls.
    pub(super) fn enter(wakeups: &'a Wakeups, look: impl FnOnce()) -> Result<Option<Sleeper<'a>>> {
        thread_local! {
            static OWN: std::cell::OnceCell<Arc<OwnedFd>> = const { std::cell::OnceCell::new() };
        }
        let fd = OWN.with(|own| {
            if let Some(fd) = own.get() {
                return Ok::<_, Error>(Arc::clone(fd));
            }
            let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| Error::io("waiting", e))?;
            Ok(Arc::clone(own.get_or_init(|| Arc::new(fd))))
        })?;
        wakeups.sleepers.lock_unpoisoned().push(Arc::clone(&fd));
        let sleeper = Sleeper { wakeups, fd };
        Ok(wakeups.doorbell.lie_down(look).then_some(sleeper))
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.wakeups.doorbell.get_up();
        self.wakeups.sleepers.lock_unpoisoned().retain(|other| !Arc::ptr_eq(other, &self.fd));
        let _ = rustix::io::read(&*self.fd, &mut [0; 8]);
    }
}
