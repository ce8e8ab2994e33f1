//! Connections of queue pairs by rdma_cm: set-up, events, end.

use super::super::abi::*;
use super::super::address::{from_socket_address, socket_address};
use super::super::device::next_token;
use super::super::port_that_is_down;
use super::{Endpoint, Phase, Posted, State, by_queue_pair};
use crate::provider::Event;
use crate::{ConnectParams, ConnectionError, ConnectionInfo, Error, Result, Status, WorkCompletion};
use std::io;
use std::time::{Duration, Instant};

/// How often a message is offered to a peer that has no receive posted (some seconds).
const RECEIVER_NOT_READY_RETRIES: u8 = 6;
const RETRIES: u8 = 7;
/// After so long siw, which may not flush a dead queue pair's requests if the peer closed first, will not; and no device
/// that is gone will. Of any other, however slow, a request that is not flushed may still be using its memory.
const FLUSH_PATIENCE: Duration = Duration::from_millis(100);
/// Milliseconds that one look for a way to a peer may take; as many looks as there is time for.
const RESOLVE_STEP_MS: i32 = 300;

/// Milliseconds until the deadline.
pub(super) fn timeout_of(state: &State) -> i32 {
    let left = state.deadline.map_or(Duration::from_secs(15), |d| d.saturating_duration_since(Instant::now()));
    left.as_millis().clamp(1, 60_000) as i32
}

impl Endpoint {
    /// Looks at the clock.
    pub(in crate::verbs) fn tick(&self, now: Instant) {
        let mut state = self.lock();
        let pending = !state.announced && matches!(state.phase, Phase::Connecting | Phase::Live);
        if pending && state.deadline.is_some_and(|d| d <= now) {
            self.end(&mut state, ConnectionError::TimedOut);
        }
        if matches!(state.phase, Phase::Live | Phase::Closing) && !state.sent.requests.is_empty() {
            // What has been sent, or has failed, may be known to the device only.
            drop(state);
            return self.send_cq.fetch(&self.context);
        }
        let never = self.context.siw || self.context.is_lost();
        if never && state.ended.is_some_and(|at| now.duration_since(at) > FLUSH_PATIENCE) {
            state.ended = None;
            let flushed = |posted: Posted| {
                if let Some(window) = posted.window {
                    window.end();
                }
                WorkCompletion {
                    wr_id: posted.wr_id,
                    // One that is complete behind one that never will be.
                    status: posted.status.unwrap_or(Status::Flushed),
                    op: posted.op,
                    len: posted.len,
                    qp_num: self.number,
                    immediate: None,
                    invalidated: None,
                    solicited: false,
                }
            };
            let (sent, received) = (std::mem::take(&mut state.sent.requests), std::mem::take(&mut state.received));
            drop(state);
            self.send_cq.push(sent.into_iter().map(flushed));
            self.recv_cq.push(received.into_iter().map(flushed));
        }
    }

    pub(super) fn hang_up(&self, state: &mut State) {
        if let Some((id, _)) = state.id {
            // SAFETY: a live identifier. Fails if the connection has ended, which is as good.
            unsafe { (self.context.lib.rdma_disconnect)(id) };
        }
    }

    /// The connection has ended, or could not be made: flushes what is posted.
    pub(super) fn end(&self, state: &mut State, cause: ConnectionError) {
        state.error.get_or_insert(cause);
        if state.phase != Phase::Over {
            let was_connected = matches!(state.phase, Phase::Live | Phase::Closing);
            state.phase = Phase::Over;
            state.ended = Some(Instant::now());
            if was_connected {
                self.hang_up(state);
            }
            self.give_up();
        }
        if !std::mem::replace(&mut state.told, true) {
            let cause = state.error.clone().expect("set above");
            self.context.push_event(Event::Disconnected { qp_num: self.number, cause });
        }
    }

    /// What is posted and not done is flushed.
    pub(super) fn give_up(&self) {
        // SAFETY: zeroed integers are a valid value; a live queue pair.
        unsafe {
            let mut attr: ibv_qp_attr = std::mem::zeroed();
            attr.qp_state = QPS_ERR;
            (self.context.lib.ibv_modify_qp)(self.raw, &raw mut attr, QP_STATE);
        }
    }

    /// The hardware is gone.
    pub(in crate::verbs) fn removed(&self) {
        self.end(&mut self.lock(), ConnectionError::Lost("the RDMA device was removed".into()));
    }

    /// Looks for a way to the target. The kernel may miss that a neighbour has answered, and then
    /// asks itself again only when the time it was given is over; so it is given little at a time.
    pub(super) fn resolve(&self, state: &State) -> io::Result<()> {
        let (Some((id, _)), Some(target)) = (state.id, state.target) else { return Ok(()) };
        let to = socket_address(target);
        let limit = timeout_of(state).min(RESOLVE_STEP_MS);
        // SAFETY: a live identifier and address.
        let rc = unsafe { (self.context.lib.rdma_resolve_addr)(id, std::ptr::null(), (&raw const to).cast(), limit) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Something happened to the connection.
    pub(in crate::verbs) fn connection_event(&self, kind: i32, status: i32, data: Vec<u8>, conn: &rdma_conn_param) {
        let mut state = self.lock();
        let Some((id, _)) = state.id else { return };
        let reason = || match status {
            // librdmacm says -1 when it could not complete what the peer had accepted: mostly, the peer has gone already.
            0 | -1 => "no reason given".to_string(),
            n => io::Error::from_raw_os_error(n.abs()).to_string(),
        };
        match kind {
            EVENT_ADDR_RESOLVED => {
                // SAFETY: a live identifier, bound to a device by now.
                let (verbs, lib) = unsafe { ((*id).verbs, self.context.lib) };
                if verbs != self.context.verbs {
                    let why = format!("the address is not reached through {}", self.context.attributes.name);
                    return self.end(&mut state, ConnectionError::Lost(why));
                }
                // SAFETY: as above.
                let port = unsafe { (*id).port_num };
                if let Some(down) = port_that_is_down(&self.context.attributes.name, port.into()) {
                    // Nothing sent now could arrive, and rxe never sends another call once one has failed.
                    return self.end(&mut state, ConnectionError::Lost(down));
                }
                // SAFETY: a live identifier.
                if unsafe { (lib.rdma_resolve_route)(id, timeout_of(&state)) } != 0 {
                    let why = format!("finding a route: {}", io::Error::last_os_error());
                    self.end(&mut state, ConnectionError::Lost(why));
                }
            }
            EVENT_ROUTE_RESOLVED => {
                let params = state.params.clone();
                let mut param = self.parameters(&params);
                // SAFETY: a live identifier; rdma_cm moves the queue pair it is given through its
                // states, and copies the parameters.
                let rc = unsafe {
                    (*id).qp = self.raw;
                    (self.context.lib.rdma_connect)(id, &raw mut param)
                };
                if rc != 0 {
                    let why = format!("connecting: {}", io::Error::last_os_error());
                    self.end(&mut state, ConnectionError::Lost(why));
                }
            }
            EVENT_ESTABLISHED => {
                if state.announced || !matches!(state.phase, Phase::Connecting | Phase::Live | Phase::Closing) {
                    return;
                }
                state.announced = true;
                let depth = u16::from(conn.initiator_depth);
                if depth > 0 {
                    state.params.ord = state.params.ord.min(depth);
                }
                self.note_info(&mut state, id);
                state.deadline = None;
                if state.phase == Phase::Connecting {
                    state.phase = Phase::Live;
                }
                let event = Event::Established { qp_num: self.number, private_data: data };
                self.context.push_event(event);
            }
            EVENT_REJECTED if data.is_empty() && status.abs() == libc::ECONNREFUSED => {
                self.end(&mut state, ConnectionError::Lost("connection refused".into()));
            }
            EVENT_REJECTED => self.end(&mut state, ConnectionError::Rejected { private_data: data }),
            EVENT_ADDR_ERROR
                if status.abs() == libc::ETIMEDOUT && state.deadline.is_some_and(|d| d > Instant::now()) =>
            {
                if let Err(error) = self.resolve(&state) {
                    self.end(&mut state, ConnectionError::Lost(format!("finding a way: {error}")));
                }
            }
            EVENT_ADDR_ERROR | EVENT_ROUTE_ERROR | EVENT_UNREACHABLE | EVENT_CONNECT_ERROR => {
                let cause = match status.abs() {
                    libc::ETIMEDOUT => ConnectionError::TimedOut,
                    _ => ConnectionError::Lost(reason()),
                };
                self.end(&mut state, cause);
            }
            EVENT_DISCONNECTED => {
                let cause = if state.phase == Phase::Connecting {
                    ConnectionError::Lost("the peer went away".into())
                } else {
                    ConnectionError::Closed
                };
                self.end(&mut state, cause);
            }
            EVENT_DEVICE_REMOVAL => {
                drop(state);
                self.removed();
            }
            _ => {}
        }
    }

    /// Takes over the connection of a caller with these read depths. `taken`: its identifier is this queue pair's from then on.
    pub(in crate::verbs) fn accept(
        &self,
        id: *mut rdma_cm_id,
        depths: (u16, u16),
        params: &ConnectParams,
        taken: &mut bool,
    ) -> Result<()> {
        Endpoint::check_params(params, self.context.attributes.max_reply_data)?;
        let lib = self.context.lib;
        let mut state = self.lock();
        if state.phase != Phase::Idle {
            return Err(Error::State { qp_num: self.number, state: "in use already" });
        }
        // SAFETY: a live identifier.
        if unsafe { (*id).verbs } != self.context.verbs {
            return Err(Error::Unsupported("a queue pair of another RDMA device than the caller came by"));
        }
        let token = next_token();
        let mut params = params.clone();
        // No more reads than the caller will serve, and no more held than it will ask for.
        let (theirs_inbound, theirs_outbound) = depths;
        params.ord = params.ord.min(theirs_inbound);
        params.ird = params.ird.min(theirs_outbound.max(1));
        let mut param = self.parameters(&params);
        let me = by_queue_pair(self.raw as usize).ok_or(Error::Unsupported("a queue pair that is going"))?;
        self.context.adopt(token, &me);
        (state.params, state.phase) = (params, Phase::Connecting);
        state.deadline = Some(Instant::now() + state.params.timeout);
        state.id = Some((id, token));
        *taken = true;
        // SAFETY: a live identifier, which is the endpoint's from here on.
        let rc = unsafe {
            (*id).context = token as *mut _;
            (*id).qp = self.raw;
            let moved = if (*id).channel == self.context.cm { 0 } else { (lib.rdma_migrate_id)(id, self.context.cm) };
            if moved == 0 { (lib.rdma_accept)(id, &raw mut param) } else { moved }
        };
        if rc != 0 {
            let source = io::Error::last_os_error();
            self.end(&mut state, ConnectionError::Lost(source.to_string()));
            return Err(Error::io("accepting a connection", source));
        }
        self.note_info(&mut state, id);
        // rdma_cm has moved the queue pair to where it can send.
        state.phase = Phase::Live;
        Ok(())
    }

    pub(super) fn note_info(&self, state: &mut State, id: *mut rdma_cm_id) {
        // SAFETY: a live identifier.
        let addr = unsafe { &(*id).addr };
        let limit = self.context.attributes.max_read_depth;
        state.info = Some(ConnectionInfo {
            peer: from_socket_address(&addr.dst),
            local: from_socket_address(&addr.src),
            ird: state.params.ird.min(limit),
            ord: state.params.ord.min(limit),
            provider: "verbs",
            path: None,
            detail: format!("verbs, device {}", self.context.attributes.name),
        });
    }

    pub(super) fn parameters(&self, params: &ConnectParams) -> rdma_conn_param {
        let limit = self.context.attributes.max_read_depth;
        rdma_conn_param {
            private_data: params.private_data.as_ptr().cast(),
            private_data_len: params.private_data.len() as u8,
            responder_resources: params.ird.min(limit) as u8,
            initiator_depth: params.ord.min(limit) as u8,
            flow_control: 1,
            retry_count: RETRIES,
            rnr_retry_count: RECEIVER_NOT_READY_RETRIES,
            srq: self.shared.is_some().into(),
            qp_num: self.number,
        }
    }

    pub(super) fn check_params(params: &ConnectParams, limit: usize) -> Result<()> {
        if params.private_data.len() > limit {
            let got = params.private_data.len() as u64;
            return Err(Error::Limit { what: "private data", got, limit: limit as u64 });
        }
        Ok(())
    }
}
