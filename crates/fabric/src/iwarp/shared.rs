//! What queue pairs of one device have in common: completion queues, and shared receive queues.

use super::device::Context;
use crate::provider::{CompletionQueueOps, SharedReceiveOps};
use crate::reservation::{CqCapacity, Reservation, SharedCqCapacity};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use thruway_iwarp::connection::SharedReceives;
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{RecvRequest, Result, WorkCompletion};

/// Finished requests. Cannot overflow: every queue pair reserves room for all it can have posted.
pub(super) struct CompletionRing {
    pub(super) ctx: Arc<Context>,
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
    pub(super) fn new(ctx: Arc<Context>, capacity: usize) -> CompletionRing {
        CompletionRing {
            ctx,
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
        self.ctx.count_unpolled();
    }

    fn take(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
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
            self.ctx.discount_unpolled(n);
        }
        n
    }
}

/// Somebody who polls a completion queue that was empty, and takes what comes without its being queued.
pub(super) struct Polled<'a> {
    ring: &'a CompletionRing,
    out: &'a mut Vec<WorkCompletion>,
    /// Completions that are still wanted.
    room: usize,
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

pub(super) struct CompletionQueueHandle(pub(super) Arc<CompletionRing>);

impl CompletionQueueOps for CompletionQueueHandle {
    fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        let queued = self.0.take(out, max);
        if queued > 0 {
            return queued;
        }
        let mut polled = Polled { ring: &self.0, out, room: max };
        self.0.ctx.drive_for(Some(&mut polled));
        match max - polled.room {
            0 => self.0.take(out, max),
            n => n,
        }
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Drop for CompletionQueueHandle {
    fn drop(&mut self) {
        let left = self.0.queue.lock_unpoisoned().take();
        self.0.ctx.discount_unpolled(left.map_or(0, |queue| queue.len()));
    }
}

/// Receives that several queue pairs take from.
pub(super) struct SharedQueue {
    pub(super) ctx: Arc<Context>,
    pub(super) receives: Arc<SharedReceives>,
    pub(super) room: SharedCqCapacity<CompletionRing>,
}

impl SharedQueue {
    pub(super) fn new(ctx: Arc<Context>, pd: u32, max_recv_wr: u32, max_sge: u32) -> SharedQueue {
        let receives = Arc::new(SharedReceives::new(pd, max_recv_wr, max_sge));
        SharedQueue { ctx, receives, room: SharedCqCapacity::new(max_recv_wr) }
    }
}

pub(super) struct SharedHandle(pub(super) Arc<SharedQueue>);

impl SharedReceiveOps for SharedHandle {
    fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        self.0.receives.post(self.0.ctx.table(), request)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
