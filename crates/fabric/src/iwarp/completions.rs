//! Completions of requests.

use super::wakeups::Wakeups;
use crate::reservation::{CqCapacity, Reservation};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use thruway_rdma_types::WorkCompletion;
use thruway_rdma_types::sync::LockUnpoisoned;

/// Finished requests. Cannot overflow: every queue pair reserves room for all it can have posted.
pub(super) struct CompletionRing {
    pub(super) wakeups: Arc<Wakeups>,
    pub(super) room: Reservation,
    /// `None` once its handle has been dropped.
    queue: Mutex<Option<VecDeque<WorkCompletion>>>,
    /// There is nothing in it: saves those who poll the lock.
    is_empty: AtomicBool,
}

impl CqCapacity for CompletionRing {
    fn room(&self) -> &Reservation {
        &self.room
    }
}

impl CompletionRing {
    /// Its handle has been dropped.
    pub(super) fn abandon(&self) {
        let left = self.queue.lock_unpoisoned().take();
        self.wakeups.discount_unpolled(left.map_or(0, |queue| queue.len()));
    }

    pub(super) fn new(wakeups: Arc<Wakeups>, capacity: usize) -> CompletionRing {
        CompletionRing {
            wakeups,
            room: Reservation::new(capacity),
            queue: Mutex::new(Some(VecDeque::new())),
            is_empty: AtomicBool::new(true),
        }
    }

    pub(super) fn push(&self, completion: WorkCompletion) {
        let mut queue = self.queue.lock_unpoisoned();
        // Completions that cannot be polled any more must not keep the device awake.
        let Some(queue) = &mut *queue else { return };
        queue.push_back(completion);
        self.is_empty.store(false, Ordering::Release);
        self.wakeups.count_unpolled();
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.queue.lock_unpoisoned().as_ref().map_or(0, VecDeque::len)
    }

    pub(super) fn take(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        if self.is_empty.load(Ordering::Acquire) {
            return 0;
        }
        let n = match &mut *self.queue.lock_unpoisoned() {
            Some(queue) => {
                let n = queue.len().min(max);
                out.extend(queue.drain(..n));
                self.is_empty.store(queue.is_empty(), Ordering::Relaxed);
                n
            }
            None => 0,
        };
        if n > 0 {
            self.wakeups.discount_unpolled(n);
        }
        n
    }
}

/// Somebody who polls a completion queue that was empty, and takes what comes without its being queued.
pub(super) struct Polled<'a> {
    pub(super) ring: &'a CompletionRing,
    pub(super) out: &'a mut Vec<WorkCompletion>,
    /// Completions that are still wanted.
    pub(super) room: usize,
}

impl Polled<'_> {
    /// Whether a completion for this queue goes here. Not if the queue has any: those came first. Who asks holds the lock of the queue
    /// pair that the completion is of, and so sees all that it has queued.
    pub(super) fn takes(&self, ring: &CompletionRing) -> bool {
        std::ptr::eq(self.ring, ring) && self.room > 0 && ring.is_empty.load(Ordering::Acquire)
    }

    pub(super) fn put(&mut self, completion: WorkCompletion) {
        self.out.push(completion);
        self.room -= 1;
    }
}
