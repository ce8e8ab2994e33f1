//! What queue pairs of one device have in common: completion queues, and shared receive queues.

use super::completions::{CompletionRing, Polled};
use super::context::Context;
use crate::provider::{CompletionQueueOps, SharedReceiveOps};
use crate::reservation::SharedCqCapacity;
use std::sync::Arc;
use thruway_iwarp::connection::SharedReceives;
use thruway_rdma_types::{RecvRequest, Result, WorkCompletion};

/// The consumer's handle of a completion queue.
pub(super) struct CompletionQueueHandle {
    pub(super) ring: Arc<CompletionRing>,
    pub(super) ctx: Arc<Context>,
}

impl CompletionQueueOps for CompletionQueueHandle {
    fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        let queued = self.ring.take(out, max);
        if queued > 0 {
            return queued;
        }
        let mut polled = Polled { ring: &self.ring, out, room: max };
        self.ctx.drive_for(Some(&mut polled));
        match max - polled.room {
            0 => self.ring.take(out, max),
            n => n,
        }
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Drop for CompletionQueueHandle {
    fn drop(&mut self) {
        self.ring.abandon();
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
        let CompletionQueueHandle { ring, ctx } = cq.ops.as_any().downcast_ref().unwrap();
        let poll = || {
            let mut out = Vec::new();
            ctx.drive_for(Some(&mut Polled { ring, out: &mut out, room: 8 }));
            out.iter().map(|wc| wc.wr_id).collect::<Vec<_>>()
        };
        send();
        while ring.len() < 1 {
            near.progress();
        }
        send();
        // It may take some looks until the second has come.
        while ring.len() < 2 {
            assert_eq!(poll(), []);
        }
        let mut out = Vec::new();
        assert_eq!(cq.poll(&mut out, 8), 2);
        assert_eq!(out.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [0, 1]);
    }
}
