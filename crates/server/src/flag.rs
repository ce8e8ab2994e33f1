//! Something that happens once, for tasks of one reactor: asked for at any time, or waited for.

use std::cell::Cell;
use tokio::sync::Notify;

/// A flag that is set once.
#[derive(Default)]
pub struct Flag {
    is_set: Cell<bool>,
    changed: Notify,
}

impl Flag {
    /// Sets it and wakes those that wait for it.
    pub fn set(&self) {
        self.is_set.set(true);
        self.changed.notify_waiters();
    }

    /// True once it is set.
    pub fn is_set(&self) -> bool {
        self.is_set.get()
    }

    /// Resolves when it is set.
    pub async fn wait(&self) {
        loop {
            let notified = self.changed.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.is_set() {
                return;
            }
            notified.await;
        }
    }
}
