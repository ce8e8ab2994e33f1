//! Completion queues.

use super::abi::*;
use super::device::{Context, lock};
use super::endpoint::Posted;
use crate::provider::CompletionQueueOps;
use crate::reservation::{CqCapacity, Reservation};
use crate::{CompletionOp, Status, WorkCompletion};
use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Polls that find nothing between looks at what needs system calls: about a millisecond.
const POLLS_PER_DRIVE: u32 = 16384;

/// A completion queue.
pub(super) struct Queue {
    pub(super) context: Arc<Context>,
    pub(super) raw: *mut ibv_cq,
    pub(super) room: Reservation,
    pub(super) ready: Mutex<VecDeque<WorkCompletion>>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Queue {}
// SAFETY: as for `Context`.
unsafe impl Sync for Queue {}

impl Drop for Queue {
    fn drop(&mut self) {
        // Events of this queue must be acknowledged before it can go.
        self.context.drain_channel();
        // SAFETY: queue pairs hold the queue, so none uses it.
        unsafe { (self.context.lib.ibv_destroy_cq)(self.raw) };
    }
}

impl CqCapacity for Queue {
    fn room(&self) -> &Reservation {
        &self.room
    }
}

const NO_COMPLETION: ibv_wc = ibv_wc {
    wr_id: 0,
    status: 0,
    opcode: 0,
    vendor_err: 0,
    byte_len: 0,
    imm_or_rkey: 0,
    qp_num: 0,
    src_qp: 0,
    wc_flags: 0,
    pkey_index: 0,
    slid: 0,
    sl: 0,
    dlid_path_bits: 0,
};

impl Queue {
    /// Adds completions that the device owes.
    pub(super) fn push(&self, completions: impl IntoIterator<Item = WorkCompletion>) {
        lock(&self.ready).extend(completions);
    }

    /// Moves what the device has finished to `ready`.
    pub(super) fn fetch(&self, context: &Context) {
        // One at a time from the device to the queue, or completions could overtake each other.
        while self.fetch_some(context, &mut lock(&self.ready)) {}
    }

    /// As [`Queue::fetch`], unless somebody is at it, who may be the caller.
    pub(super) fn fetch_unless_busy(&self) {
        if let Ok(mut ready) = self.ready.try_lock() {
            while self.fetch_some(&self.context, &mut ready) {}
        }
    }

    /// Whether there may be more.
    fn fetch_some(&self, context: &Context, ready: &mut VecDeque<WorkCompletion>) -> bool {
        let mut found = [NO_COMPLETION; 32];
        // SAFETY: a live queue, and room for as many.
        let n = unsafe { ((*context.verbs).ops.poll_cq)(self.raw, found.len() as i32, found.as_mut_ptr()) };
        let n = usize::try_from(n).unwrap_or(0);
        for wc in &found[..n] {
            self.translate(context, wc, ready);
        }
        n == found.len()
    }

    /// Adds what a completion of the device's says.
    fn translate(&self, context: &Context, wc: &ibv_wc, ready: &mut VecDeque<WorkCompletion>) {
        let endpoint = context.numbered(wc.qp_num);
        let status = match wc.status {
            WC_SUCCESS => Status::Success,
            WC_LOC_LEN_ERR => Status::LocalLength,
            WC_WR_FLUSH_ERR => Status::Flushed,
            WC_REM_ACCESS_ERR => Status::RemoteAccess,
            WC_REM_INV_REQ_ERR | WC_REM_OP_ERR => Status::RemoteOperation,
            WC_RNR_RETRY_EXC_ERR => Status::RemoteNoReceive,
            _ => Status::ConnectionLost,
        };
        if !matches!(status, Status::Success | Status::Flushed) {
            // SAFETY: a constant string for every number.
            let text = unsafe { CStr::from_ptr((context.lib.ibv_wc_status_str)(wc.status)) }.to_string_lossy();
            if let Some(endpoint) = &endpoint {
                endpoint.fail(&text);
            }
        }
        let completed = match endpoint {
            Some(endpoint) => endpoint.finish(wc.wr_id, status),
            // Of a queue pair that is gone only the memory of its shared receives matters.
            None => {
                let id = context.shared_queue(wc.wr_id).and_then(|queue| queue.finish(wc.wr_id));
                id.map(|id| (Posted::receive(id), status)).into_iter().collect()
            }
        };
        for (posted, status) in completed {
            let mut out = WorkCompletion {
                wr_id: posted.wr_id,
                status,
                op: posted.op,
                len: posted.len,
                qp_num: wc.qp_num,
                immediate: None,
                invalidated: None,
                solicited: false,
            };
            if posted.op == CompletionOp::Recv {
                out.len = wc.byte_len;
                if status == Status::Success && wc.opcode == WC_RECV_RDMA_WITH_IMM {
                    out.op = CompletionOp::RecvWriteImmediate;
                }
                if wc.wc_flags & WC_WITH_IMM != 0 {
                    out.immediate = Some(u32::from_be(wc.imm_or_rkey));
                }
                if wc.wc_flags & WC_WITH_INV != 0 {
                    out.invalidated = Some(wc.imm_or_rkey);
                    if let Some(valid) = lock(&context.revocable).get(&wc.imm_or_rkey) {
                        valid.store(false, Ordering::SeqCst);
                    }
                }
            }
            if posted.signaled {
                ready.push_back(out);
            }
        }
    }
}

pub(super) struct QueueHandle(pub(super) Arc<Queue>);

impl CompletionQueueOps for QueueHandle {
    fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        let queue = &self.0;
        if lock(&queue.ready).is_empty() {
            queue.fetch(&queue.context);
        }
        let mut ready = lock(&queue.ready);
        let n = ready.len().min(max);
        out.extend(ready.drain(..n));
        drop(ready);
        // Connections are asked about by system calls, completions are not: who polls for the next
        // completion gets it sooner if the others wait.
        if n == 0 && queue.context.polls.fetch_add(1, Ordering::Relaxed).is_multiple_of(POLLS_PER_DRIVE) {
            queue.context.drive();
        }
        n
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
