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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iwarp::Config;
    use crate::{Access, Buffer, ConnectParams, ConnectionEvent, ListenOptions, Payload, QueuePairCaps};
    use crate::{SendFlags, SendOp, SendRequest};

    /// What comes while somebody is about to poll, and another has queued something meanwhile, stays behind that.
    #[test]
    fn what_is_queued_is_taken_before_what_comes() {
        let (near, far) = (Config::default().open().unwrap(), Config::default().open().unwrap());
        let listener = near.listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap();
        let side = |device: &crate::Device| {
            let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
            let caps = QueuePairCaps { max_send_wr: 8, max_recv_wr: 8, max_sge: 1 };
            let qp = pd.create_qp(&cq, &cq, caps).unwrap();
            let region = pd.register(&Arc::new(Buffer::new(4096).unwrap()), Access::LOCAL_WRITE).unwrap();
            (cq, qp, region)
        };
        let ((cq, receiver, region), (_cq, sender, _region)) = (side(&near), side(&far));
        for wr_id in 0..2 {
            receiver.post_recv(&RecvRequest { wr_id, sges: &[region.sge(0, 64)] }).unwrap();
        }
        sender.connect(listener.local_addr(), &ConnectParams::default()).unwrap();
        let mut established = 0;
        while established < 2 {
            for device in [&near, &far] {
                match device.poll_event() {
                    Some(ConnectionEvent::Request(request)) => {
                        request.accept(&receiver, &ConnectParams::default()).unwrap();
                    }
                    Some(ConnectionEvent::Established { .. }) => established += 1,
                    _ => {}
                }
            }
        }
        let send = || {
            let (op, payload, flags) = (SendOp::Send { invalidate: None }, Payload::Inline(b"x"), SendFlags::SIGNALED);
            sender.post_send(&SendRequest { wr_id: 9, op, payload, flags }).unwrap();
            far.progress();
        };
        let ring = &cq.ops.as_any().downcast_ref::<CompletionQueueHandle>().unwrap().0;
        let poll = || {
            let mut out = Vec::new();
            ring.ctx.drive_for(Some(&mut Polled { ring, out: &mut out, room: 8 }));
            out.iter().map(|wc| wc.wr_id).collect::<Vec<_>>()
        };
        send();
        while ring.is_empty.load(Ordering::Acquire) {
            near.progress();
        }
        send();
        // It may take some looks until the second has come.
        while ring.queue.lock_unpoisoned().as_ref().unwrap().len() < 2 {
            assert_eq!(poll(), []);
        }
        let mut out = Vec::new();
        assert_eq!(cq.poll(&mut out, 8), 2);
        assert_eq!(out.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [0, 1]);
    }
}
