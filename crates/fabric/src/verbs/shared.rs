//! Shared receive queues.

use super::abi::*;
use super::completion::Queue;
use super::device::{Context, ProtectionDomain, failed, lock};
use super::endpoint::{post_error, receive_elements};
use crate::provider::SharedReceiveOps;
use crate::reservation::SharedCqCapacity;
use crate::{Error, RecvRequest, Result};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Receives that several queue pairs take from.
pub(super) struct SharedReceives {
    pub(super) context: Arc<Context>,
    pub(super) pd: Arc<ProtectionDomain>,
    pub(super) raw: *mut ibv_srq,
    number: u32,
    max_recv_wr: usize,
    max_sge: usize,
    posted: Mutex<Slots>,
    pub(super) room: SharedCqCapacity<Queue>,
}

/// The consumer's identifiers of what is posted. Receives can finish in another order than they were posted in, so the
/// device is told the queue's number, which is not 0, and a slot's.
#[derive(Default)]
struct Slots {
    ids: Vec<u64>,
    free: Vec<usize>,
}

// SAFETY: as for `Context`.
unsafe impl Send for SharedReceives {}
// SAFETY: as above.
unsafe impl Sync for SharedReceives {}

impl SharedReceives {
    pub(super) fn new(
        context: &Arc<Context>,
        pd: Arc<ProtectionDomain>,
        max_recv_wr: u32,
        max_sge: u32,
    ) -> Result<Arc<SharedReceives>> {
        let mut attr =
            ibv_srq_init_attr { srq_context: std::ptr::null_mut(), max_wr: max_recv_wr, max_sge, srq_limit: 0 };
        // SAFETY: a live protection domain, which the queue holds.
        let raw = unsafe { (context.lib.ibv_create_srq)(pd.raw, &raw mut attr) };
        if raw.is_null() {
            return Err(failed("making a shared receive queue"));
        }
        let number = context.next_shared.fetch_add(1, Ordering::Relaxed);
        let queue = Arc::new(SharedReceives {
            context: Arc::clone(context),
            pd,
            raw,
            number,
            max_recv_wr: max_recv_wr as usize,
            max_sge: max_sge as usize,
            posted: Mutex::default(),
            room: SharedCqCapacity::new(max_recv_wr),
        });
        lock(&context.shared).insert(number, Arc::downgrade(&queue));
        Ok(queue)
    }

    fn post(&self, request: &RecvRequest<'_>) -> Result<()> {
        if request.sges.len() > self.max_sge {
            let (got, limit) = (request.sges.len() as u64, self.max_sge as u64);
            return Err(Error::Limit { what: "elements of a request", got, limit });
        }
        self.context.check_local(self.pd.raw, request.sges, true)?;
        // SAFETY: a live context.
        let post = unsafe { (*self.context.verbs).ops.post_srq_recv };
        let post = post.ok_or(Error::Unsupported("shared receive queues with this device's library"))?;
        let mut slots = lock(&self.posted);
        if slots.ids.len() - slots.free.len() >= self.max_recv_wr {
            return Err(Error::QueueFull("shared receive"));
        }
        let slot = slots.free.pop().unwrap_or(slots.ids.len());
        let mut sges = receive_elements(request);
        let mut wr = ibv_recv_wr {
            wr_id: u64::from(self.number) << 32 | slot as u64,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as i32,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue and request.
        let rc = unsafe { post(self.raw, &raw mut wr, &raw mut bad) };
        if slot == slots.ids.len() {
            slots.ids.push(request.wr_id);
        } else {
            slots.ids[slot] = request.wr_id;
        }
        post_error(rc, "posting a shared receive", "shared receive").inspect_err(|_| slots.free.push(slot))
    }

    /// A receive is done: the consumer's identifier.
    pub(super) fn finish(&self, wr_id: u64) -> Option<u64> {
        let slot = wr_id as u32 as usize;
        let mut slots = lock(&self.posted);
        let id = *slots.ids.get(slot)?;
        slots.free.push(slot);
        Some(id)
    }
}

impl Context {
    /// The queue of a shared receive, by the identifier that the device sees. The queue pair that took it may be gone.
    pub(super) fn shared_queue(&self, wr_id: u64) -> Option<Arc<SharedReceives>> {
        lock(&self.shared).get(&((wr_id >> 32) as u32))?.upgrade()
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        lock(&self.context.shared).remove(&self.number);
        // SAFETY: queue pairs hold it, so none uses it.
        unsafe { (self.context.lib.ibv_destroy_srq)(self.raw) };
    }
}

pub(super) struct SharedHandle(pub(super) Arc<SharedReceives>);

impl SharedReceiveOps for SharedHandle {
    fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        self.0.post(request)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
