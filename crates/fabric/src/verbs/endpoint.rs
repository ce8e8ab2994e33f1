//! Queue pairs of the verbs provider.

mod connection;

use super::abi::*;
use super::completion::Queue;
use super::device::{Context, ProtectionDomain, failed, lock, next_token};
use super::memory::{RegionHandle, Spare, Window, WindowHandle};
use super::shared::SharedReceives;
use crate::provider::{QueuePairOps, RegionOps};
use crate::{
    CompletionOp, ConnectParams, ConnectionError, ConnectionInfo, Error, Payload, QueuePairCaps, RecvRequest, Result,
    SendFlags, SendOp, SendRequest, Status, WorkCompletion,
};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};
use std::time::Instant;
use thruway_rdma_types::Access;
use thruway_rdma_types::sync::LockUnpoisoned;

/// Identifiers of requests as the device sees them: only which queue they belong to. Both queues
/// finish in order, so the consumer's identifiers wait in lists of their own.
/// Numbers of sent requests, which the device sees shifted by one.
const SENT_NUMBERS: u32 = u32::MAX >> 1;
const RECEIVED: u64 = 1;

/// Queue pairs by their address, for asynchronous events.
static QUEUE_PAIRS: LazyLock<Mutex<HashMap<usize, Weak<Endpoint>>>> = LazyLock::new(Mutex::default);

pub(super) fn by_queue_pair(raw: usize) -> Option<Arc<Endpoint>> {
    QUEUE_PAIRS.lock_unpoisoned().get(&raw)?.upgrade()
}

/// Every queue pair of this hardware.
pub(super) fn all_of(verbs: *mut ibv_context) -> Vec<Arc<Endpoint>> {
    // What is dropped here removes itself from the list, and needs its lock.
    let known: Vec<_> = lock(&QUEUE_PAIRS).values().filter_map(Weak::upgrade).collect();
    known.into_iter().filter(|e| e.context.verbs == verbs).collect()
}

/// A request in progress, or done.
pub(super) struct Posted {
    pub(super) wr_id: u64,
    pub(super) op: CompletionOp,
    pub(super) len: u32,
    pub(super) signaled: bool,
    /// The window that it binds.
    window: Option<Arc<Window>>,
    /// How it has ended, where requests before it have not.
    status: Option<Status>,
}

/// Requests of a send queue, in the order posted, which is that in which they are reported. Devices complete them in this order, but
/// for siw, where a send behind a read is complete before the read is.
#[derive(Default)]
struct Sent {
    requests: VecDeque<Posted>,
    /// The number of the first.
    first: u32,
}

impl Sent {
    /// The identifier that the device is given with the next request.
    fn next_id(&self) -> u64 {
        u64::from(self.first.wrapping_add(self.requests.len() as u32) & SENT_NUMBERS) << 1
    }

    /// A request is complete: with it, those that can be reported.
    fn finish(&mut self, id: u64, status: Status) -> Completed {
        let at = ((id >> 1) as u32).wrapping_sub(self.first) & SENT_NUMBERS;
        if let Some(posted) = self.requests.get_mut(at as usize) {
            posted.status = Some(status);
            posted.signaled |= status != Status::Success;
        }
        let mut completed = Completed::new();
        while let Some(status) = self.requests.front().and_then(|posted| posted.status) {
            self.first = self.first.wrapping_add(1) & SENT_NUMBERS;
            completed.extend(self.requests.pop_front().map(|posted| (posted, status)));
        }
        completed
    }
}

/// Requests that are complete, and how they have ended.
pub(super) type Completed = SmallVec<[(Posted, Status); 1]>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    Connecting,
    Live,
    /// What is posted is still sent, then the connection ends.
    Closing,
    Over,
}

struct State {
    phase: Phase,
    /// rdma_cm's identifier, with its number.
    id: Option<(*mut rdma_cm_id, u64)>,
    deadline: Option<Instant>,
    /// Whom to call.
    target: Option<SocketAddr>,
    params: ConnectParams,
    sent: Sent,
    received: VecDeque<Posted>,
    info: Option<ConnectionInfo>,
    error: Option<ConnectionError>,
    /// The event of the beginning has been told. An accepting queue pair can send before.
    announced: bool,
    /// The event of the end has been told.
    told: bool,
    /// When the connection ended.
    ended: Option<Instant>,
}

pub(super) struct Endpoint {
    context: Arc<Context>,
    raw: *mut ibv_qp,
    number: u32,
    caps: QueuePairCaps,
    max_inline: usize,
    state: Mutex<State>,
    /// Where receives come from, if they are shared.
    shared: Option<Arc<SharedReceives>>,
    /// By remote key.
    windows: Mutex<HashMap<u32, Weak<Window>>>,
    spare: Mutex<Vec<Spare>>,
    send_cq: Arc<Queue>,
    recv_cq: Arc<Queue>,
    pd: Arc<ProtectionDomain>,
}

// SAFETY: rdma-core's objects may be used from any thread; what is not its own is locked.
unsafe impl Send for Endpoint {}
// SAFETY: as above.
unsafe impl Sync for Endpoint {}

impl Endpoint {
    pub(super) fn new(
        context: &Arc<Context>,
        pd: Arc<ProtectionDomain>,
        (send_cq, recv_cq): (Arc<Queue>, Arc<Queue>),
        caps: QueuePairCaps,
        shared: Option<Arc<SharedReceives>>,
    ) -> Result<Arc<Endpoint>> {
        let lib = context.lib;
        let mut attr = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: send_cq.raw,
            recv_cq: recv_cq.raw,
            srq: shared.as_ref().map_or(std::ptr::null_mut(), |s| s.raw),
            cap: ibv_qp_cap {
                max_send_wr: caps.max_send_wr.max(1),
                max_recv_wr: if shared.is_some() { 0 } else { caps.max_recv_wr.max(1) },
                max_send_sge: caps.max_sge.max(1),
                max_recv_sge: caps.max_sge.max(1),
                max_inline_data: context.attributes.max_inline,
            },
            qp_type: QPT_RC,
            sq_sig_all: 1,
        };
        // SAFETY: live objects, all held by the endpoint below.
        let raw = unsafe { (lib.ibv_create_qp)(pd.raw, &raw mut attr) };
        if raw.is_null() {
            return Err(failed("making a queue pair"));
        }
        // SAFETY: just made.
        let number = unsafe { (*raw).qp_num };
        if !context.iwarp {
            // So that receives can be posted before there is a connection.
            // SAFETY: zeroed integers are a valid value.
            let mut init: ibv_qp_attr = unsafe { std::mem::zeroed() };
            (init.qp_state, init.port_num) = (QPS_INIT, 1);
            init.qp_access_flags = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
            let mask = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
            // SAFETY: a live queue pair.
            let rc = unsafe { (lib.ibv_modify_qp)(raw, &raw mut init, mask) };
            if rc != 0 {
                // SAFETY: created above, and not in use.
                unsafe { (lib.ibv_destroy_qp)(raw) };
                return Err(Error::io("preparing a queue pair", io::Error::from_raw_os_error(rc)));
            }
        }
        let state = State {
            phase: Phase::Idle,
            id: None,
            deadline: None,
            target: None,
            params: ConnectParams::default(),
            sent: Sent::default(),
            received: VecDeque::new(),
            info: None,
            error: None,
            announced: false,
            told: false,
            ended: None,
        };
        let max_inline = attr.cap.max_inline_data.min(context.attributes.max_inline) as usize;
        let context = Arc::clone(context);
        let state = Mutex::new(state);
        let (windows, spare) = (Mutex::default(), Mutex::default());
        let endpoint =
            Endpoint { context, raw, number, caps, max_inline, state, shared, windows, spare, send_cq, recv_cq, pd };
        let endpoint = Arc::new(endpoint);
        let known = Arc::downgrade(&endpoint);
        QUEUE_PAIRS.lock_unpoisoned().insert(raw as usize, known);
        Ok(endpoint)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }

    /// A request is done, by the identifier that the device sees: what can be reported.
    pub(super) fn finish(&self, id: u64, status: Status) -> Completed {
        let mut state = self.lock();
        let completed = match id {
            RECEIVED => state.received.pop_front().map(|posted| (posted, status)).into_iter().collect(),
            sent if sent <= u32::MAX.into() => state.sent.finish(sent, status),
            shared => {
                let received = self.shared.as_ref().and_then(|receives| receives.finish(shared));
                received.map(|id| (Posted::receive(id), status)).into_iter().collect()
            }
        };
        for (posted, status) in &completed {
            if let Some(window) = &posted.window {
                window.bound(*status == Status::Success);
            }
        }
        if state.phase == Phase::Closing && state.sent.requests.is_empty() {
            self.hang_up(&mut state);
        }
        completed
    }

    /// The queue pair cannot go on.
    pub(super) fn fail(&self, why: &str) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Live | Phase::Closing | Phase::Connecting) {
            self.end(&mut state, ConnectionError::Lost(why.to_string()));
        }
    }

    /// Whether an asynchronous event is about it.
    pub(super) fn concerns(&self, kind: i32, element: *mut std::ffi::c_void) -> bool {
        match kind {
            ASYNC_CQ_ERR => [self.send_cq.raw, self.recv_cq.raw].iter().any(|cq| cq.cast() == element),
            ASYNC_SRQ_ERR => self.shared.as_ref().is_some_and(|s| s.raw.cast() == element),
            // The number of a port, from 1; what is not bound to a device yet has none.
            ASYNC_PORT_ERR => self.lock().id.is_some_and(|(id, _)| {
                // SAFETY: a live identifier.
                let port = unsafe { (*id).port_num };
                port != 0 && u32::from(port) == element as usize as u32
            }),
            kind if ASYNC_QP_EVENTS.contains(&kind) => element == self.raw.cast(),
            _ => false,
        }
    }

    /// A window that is free to be bound again, if there is one.
    pub(super) fn take_spare(&self) -> Option<Spare> {
        lock(&self.spare).pop()
    }

    /// A window is gone; it may be free to be bound again.
    pub(super) fn forget_window(&self, rkey: u32, spare: Option<Spare>) {
        lock(&self.windows).remove(&rkey);
        lock(&self.spare).extend(spare);
    }

    /// Posts the binding of a window, ahead of whatever is sent from now on.
    fn bind_window(
        &self,
        region: &RegionHandle,
        (offset, len): (usize, usize),
        access: Access,
        wr_id: Option<u64>,
    ) -> Result<Arc<Window>> {
        let mut state = self.lock();
        self.check_live(&state)?;
        if state.sent.requests.len() >= self.caps.max_send_wr as usize {
            return Err(Error::QueueFull("send"));
        }
        let me = by_queue_pair(self.raw as usize).ok_or(Error::Unsupported("a queue pair that is going"))?;
        let (window, binding) = Window::prepare(&me, &region.0, offset, len, access)?;
        // SAFETY: zeroed integers and null pointers are a valid value.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        (wr.wr_id, wr.opcode, wr.send_flags, wr.window) = (state.sent.next_id(), WR_BIND_MW, SEND_SIGNALED, binding);
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair, window and region.
        let rc = unsafe { ((*self.context.verbs).ops.post_send)(self.raw, &raw mut wr, &raw mut bad) };
        post_error(rc, "binding a memory window", "send").inspect_err(|_| window.end())?;
        // Libraries take the key before from here when the window is bound again.
        // SAFETY: the window's, which lives; only requests of this queue pair look at it, under the lock held here.
        unsafe { (*binding.mw).rkey = binding.rkey };
        lock(&self.windows).insert(window.rkey(), Arc::downgrade(&window));
        state.sent.requests.push_back(Posted {
            wr_id: wr_id.unwrap_or(0),
            op: CompletionOp::Bind,
            len: 0,
            signaled: wr_id.is_some(),
            window: Some(Arc::clone(&window)),
            status: None,
        });
        Ok(window)
    }

    fn check_live(&self, state: &State) -> Result<()> {
        let what = match state.phase {
            Phase::Live => return Ok(()),
            Phase::Idle => "not connected",
            Phase::Connecting => "still connecting",
            _ => "closed",
        };
        Err(Error::State { qp_num: self.number, state: what })
    }

    fn post_one(&self, state: &mut State, request: &SendRequest<'_>) -> Result<()> {
        if state.sent.requests.len() >= self.caps.max_send_wr as usize {
            return Err(Error::QueueFull("send"));
        }
        let attributes = &self.context.attributes;
        let mut sges: SmallVec<[ibv_sge; 8]> = SmallVec::new();
        let mut flags = SEND_SIGNALED;
        let mut len = 0u32;
        match request.payload {
            Payload::Sges(list) => {
                if list.len() > self.caps.max_sge as usize {
                    let (got, limit) = (list.len() as u64, self.caps.max_sge.into());
                    return Err(Error::Limit { what: "elements of a request", got, limit });
                }
                let reads = !matches!(request.op, SendOp::Send { .. } | SendOp::Write { .. });
                self.context.check_local(self.pd.raw, list, reads)?;
                let limit = self.context.max_read_sge;
                if matches!(request.op, SendOp::Read { .. }) && list.len() > limit {
                    let what = "elements of a read on this device";
                    return Err(Error::Limit { what, got: list.len() as u64, limit: limit as u64 });
                }
                for sge in list.iter().filter(|s| s.len > 0) {
                    len = len.checked_add(sge.len).ok_or(Error::Unsupported("messages of 4 GiB and more"))?;
                    sges.push(ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey });
                }
            }
            Payload::Inline(bytes) => {
                if bytes.len() > self.max_inline {
                    let limit = self.max_inline as u64;
                    return Err(Error::Limit { what: "inline payload", got: bytes.len() as u64, limit });
                }
                flags |= SEND_INLINE;
                len = bytes.len() as u32;
                if len > 0 {
                    sges.push(ibv_sge { addr: bytes.as_ptr() as u64, length: len, lkey: 0 });
                }
            }
        }
        if request.flags.contains(SendFlags::FENCE) {
            flags |= SEND_FENCE;
        }
        if request.flags.contains(SendFlags::SOLICITED) {
            flags |= SEND_SOLICITED;
        }
        // SAFETY: zeroed integers and null pointers are a valid value.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        let op = match request.op {
            SendOp::Send { invalidate } => {
                if invalidate.is_some() && flags & SEND_INLINE != 0 && self.context.siw {
                    return Err(Error::Unsupported("inline payload of a send with invalidate, on siw"));
                }
                wr.opcode = if invalidate.is_some() { WR_SEND_WITH_INV } else { WR_SEND };
                wr.imm_or_rkey = invalidate.unwrap_or(0);
                // Where libsiw looks for it; nobody else looks here for a send.
                wr.rkey_or_compare_add = invalidate.unwrap_or(0).into();
                CompletionOp::Send
            }
            SendOp::Write { remote, immediate } => {
                if immediate.is_some() && !attributes.immediate {
                    return Err(Error::Unsupported("write with immediate on an iWARP device"));
                }
                wr.opcode = if immediate.is_some() { WR_RDMA_WRITE_WITH_IMM } else { WR_RDMA_WRITE };
                wr.imm_or_rkey = immediate.unwrap_or(0).to_be();
                (wr.remote_addr, wr.rkey_or_compare_add) = (remote.addr, remote.rkey.into());
                CompletionOp::Write
            }
            SendOp::Read { remote } => {
                wr.opcode = WR_RDMA_READ;
                (wr.remote_addr, wr.rkey_or_compare_add) = (remote.addr, remote.rkey.into());
                CompletionOp::Read
            }
            SendOp::CompareSwap { remote, compare, swap } => {
                wr.opcode = WR_ATOMIC_CMP_AND_SWP;
                (wr.remote_addr, wr.atomic_rkey) = (remote.addr, remote.rkey);
                (wr.rkey_or_compare_add, wr.swap) = (compare, swap);
                CompletionOp::CompareSwap
            }
            SendOp::FetchAdd { remote, add } => {
                wr.opcode = WR_ATOMIC_FETCH_AND_ADD;
                (wr.remote_addr, wr.atomic_rkey) = (remote.addr, remote.rkey);
                wr.rkey_or_compare_add = add;
                CompletionOp::FetchAdd
            }
        };
        let reads = matches!(op, CompletionOp::Read | CompletionOp::CompareSwap | CompletionOp::FetchAdd);
        if reads && flags & SEND_INLINE != 0 {
            return Err(Error::Unsupported("inline payload of a read or an atomic"));
        }
        if matches!(op, CompletionOp::CompareSwap | CompletionOp::FetchAdd) {
            if !attributes.atomics {
                return Err(Error::Unsupported("atomics on this device"));
            }
            if len != 8 {
                return Err(Error::Unsupported("an atomic whose result is not 8 bytes"));
            }
        }
        wr.wr_id = state.sent.next_id();
        wr.sg_list = sges.as_mut_ptr();
        wr.num_sge = sges.len() as i32;
        wr.send_flags = flags;
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair and request; inline payload is copied before the call returns, and
        // what is not inline is registered memory that the consumer leaves alone.
        let rc = unsafe { ((*self.context.verbs).ops.post_send)(self.raw, &raw mut wr, &raw mut bad) };
        post_error(rc, "posting a send", "send")?;
        let signaled = request.flags.contains(SendFlags::SIGNALED);
        let posted = Posted { wr_id: request.wr_id, op, len, signaled, window: None, status: None };
        state.sent.requests.push_back(posted);
        Ok(())
    }
}

impl Posted {
    /// A receive in progress, or done.
    pub(super) fn receive(wr_id: u64) -> Posted {
        Posted { wr_id, op: CompletionOp::Recv, len: 0, signaled: true, window: None, status: None }
    }
}

/// What a post returned: an error number, a negative one, or -1 with the number elsewhere.
pub(super) fn post_error(rc: i32, op: &'static str, queue: &'static str) -> Result<()> {
    let error = match rc {
        0 => return Ok(()),
        -1 => io::Error::last_os_error(),
        code => io::Error::from_raw_os_error(code.abs()),
    };
    Err(if error.raw_os_error() == Some(libc::ENOMEM) { Error::QueueFull(queue) } else { Error::io(op, error) })
}

/// The elements of a receive as the device takes them.
pub(super) fn receive_elements(request: &RecvRequest<'_>) -> SmallVec<[ibv_sge; 8]> {
    let mut sges: SmallVec<[ibv_sge; 8]> =
        request.sges.iter().map(|s| ibv_sge { addr: s.addr, length: s.len, lkey: s.lkey }).collect();
    if sges.is_empty() {
        // siw wants at least one.
        sges.push(ibv_sge::default());
    }
    sges
}

impl QueuePairOps for Endpoint {
    fn number(&self) -> u32 {
        self.number
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, Error)> {
        let mut state = self.lock();
        for (index, request) in requests.iter().enumerate() {
            self.check_live(&state).map_err(|error| (index, error))?;
            self.post_one(&mut state, request).map_err(|error| (index, error))?;
        }
        Ok(())
    }

    fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        if self.shared.is_some() {
            return Err(Error::Unsupported("receives of its own for a queue pair that shares them"));
        }
        let mut state = self.lock();
        if matches!(state.phase, Phase::Over) {
            return Err(Error::State { qp_num: self.number, state: "closed" });
        }
        if state.received.len() >= self.caps.max_recv_wr as usize {
            return Err(Error::QueueFull("receive"));
        }
        if request.sges.len() > self.caps.max_sge as usize {
            let (got, limit) = (request.sges.len() as u64, self.caps.max_sge.into());
            return Err(Error::Limit { what: "elements of a request", got, limit });
        }
        self.context.check_local(self.pd.raw, request.sges, true)?;
        let mut sges = receive_elements(request);
        let mut wr = ibv_recv_wr {
            wr_id: RECEIVED,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as i32,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair and request.
        let rc = unsafe { ((*self.context.verbs).ops.post_recv)(self.raw, &raw mut wr, &raw mut bad) };
        post_error(rc, "posting a receive", "receive")?;
        state.received.push_back(Posted::receive(request.wr_id));
        Ok(())
    }

    fn bind(
        &self,
        region: &dyn RegionOps,
        offset: usize,
        len: usize,
        access: Access,
        wr_id: Option<u64>,
    ) -> Result<Arc<dyn RegionOps>> {
        let region = region.as_any().downcast_ref::<RegionHandle>();
        let region = region.ok_or(Error::Unsupported("a window on another device's memory, or on a window"))?;
        if region.0.pd.raw != self.pd.raw {
            return Err(Error::Unsupported("a window on another protection domain's memory"));
        }
        if !self.context.attributes.windows {
            self.check_live(&self.lock())?;
            let part = region.0.part(offset, len, access)?;
            self.send_cq.push(wr_id.map(|wr_id| WorkCompletion::of_binding(wr_id, self.number)));
            return Ok(part);
        }
        Ok(Arc::new(WindowHandle(self.bind_window(region, (offset, len), access, wr_id)?)))
    }

    fn connect(&self, addr: SocketAddr, params: &ConnectParams) -> Result<()> {
        Endpoint::check_params(params, self.context.attributes.max_private_data)?;
        let mut state = self.lock();
        if state.phase != Phase::Idle {
            return Err(Error::State { qp_num: self.number, state: "in use already" });
        }
        let lib = self.context.lib;
        let token = next_token();
        let mut id = std::ptr::null_mut();
        // SAFETY: our event channel; the context is a number, never followed.
        if unsafe { (lib.rdma_create_id)(self.context.cm, &raw mut id, token as *mut _, PS_TCP) } != 0 {
            return Err(failed("making a connection identifier"));
        }
        state.id = Some((id, token));
        (state.params, state.phase) = (params.clone(), Phase::Connecting);
        state.deadline = Some(Instant::now() + params.timeout);
        let me = by_queue_pair(self.raw as usize).ok_or(Error::Unsupported("a queue pair that is going"))?;
        self.context.adopt(token, &me);
        state.target = Some(addr);
        self.resolve(&state).map_err(|source| {
            state.phase = Phase::Over;
            Error::Io { op: "finding a way to", peer: Some(addr), source }
        })
    }

    fn disconnect(&self) {
        let mut state = self.lock();
        match state.phase {
            Phase::Live if state.sent.requests.is_empty() => {
                state.phase = Phase::Closing;
                self.hang_up(&mut state);
            }
            Phase::Live => state.phase = Phase::Closing,
            Phase::Connecting => self.end(&mut state, ConnectionError::Closed),
            _ => {}
        }
    }

    fn info(&self) -> Option<ConnectionInfo> {
        self.lock().info.clone()
    }

    fn path(&self) -> Option<crate::PathInfo> {
        None
    }

    fn acceptor(&self) -> Option<crate::Origin> {
        self.info().map(|info| crate::Origin::of_acceptor(info.peer, info.local))
    }

    fn error(&self) -> Option<ConnectionError> {
        self.lock().error.clone()
    }

    fn destroy(&self) {
        let mut state = self.lock();
        state.told = true;
        if matches!(state.phase, Phase::Live | Phase::Closing) {
            self.hang_up(&mut state);
        }
        state.phase = Phase::Over;
        let id = state.id.take();
        drop(state);
        if let Some((id, token)) = id {
            self.context.forget(token, self.number);
            // SAFETY: a live identifier; every event of it has been acknowledged as it was got.
            unsafe {
                (*id).qp = std::ptr::null_mut();
                (self.context.lib.rdma_destroy_id)(id);
            }
        }
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        QueuePairOps::destroy(self);
        self.context.forget(0, self.number);
        QUEUE_PAIRS.lock_unpoisoned().remove(&(self.raw as usize));
        // Windows hold their queue pair in the device.
        self.lock().sent.requests.clear();
        let windows = std::mem::take(&mut *lock(&self.windows));
        windows.values().filter_map(Weak::upgrade).for_each(|window| window.end());
        std::mem::take(&mut *lock(&self.spare)).into_iter().for_each(|spare| spare.free(&self.context));
        if self.shared.is_some() {
            // A library may take what finished out of the completion queue with the queue pair.
            self.give_up();
            self.recv_cq.fetch_unless_busy();
        }
        // SAFETY: ours, and its identifier is gone.
        unsafe { (self.context.lib.ibv_destroy_qp)(self.raw) };
        self.send_cq.room.give_back(self.caps.max_send_wr);
        match &self.shared {
            Some(shared) => shared.room.leave(&self.recv_cq),
            None => self.recv_cq.room.give_back(self.caps.max_recv_wr),
        }
    }
}
