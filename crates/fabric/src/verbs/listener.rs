//! Listening, and unanswered connection requests.

use super::abi::*;
use super::address::{from_socket_address, socket_address};
use super::device::{Context, next_token};
use super::endpoint::Endpoint;
use crate::provider::{ListenerOps, QueuePairOps, RequestOps};
use crate::{ConnectParams, Error, ListenOptions, Result};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use thruway_tcp::Origin;

/// A listening identifier.
pub(super) struct VerbsListener {
    context: Arc<Context>,
    id: *mut rdma_cm_id,
    pub(super) token: u64,
    local: SocketAddr,
}

// SAFETY: as for `Endpoint`.
unsafe impl Send for VerbsListener {}
// SAFETY: as for `Endpoint`.
unsafe impl Sync for VerbsListener {}

impl VerbsListener {
    pub(super) fn bind(context: &Arc<Context>, addr: SocketAddr, options: &ListenOptions) -> Result<VerbsListener> {
        // rdma_cm draws a port without looking at TCP's, which software iWARP shares: one in use says nothing of others.
        let mut attempts = if addr.port() == 0 { 16 } else { 1 };
        loop {
            attempts -= 1;
            match VerbsListener::bind_once(context, addr, options) {
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::AddrInUse && attempts > 0 => {}
                result => return result,
            }
        }
    }

    fn bind_once(context: &Arc<Context>, addr: SocketAddr, options: &ListenOptions) -> Result<VerbsListener> {
        let failed = || Error::Io { op: "listening on", peer: Some(addr), source: io::Error::last_os_error() };
        let token = next_token();
        let mut id = std::ptr::null_mut();
        let backlog = options.backlog.min(1024) as i32;
        let at = socket_address(addr);
        // SAFETY: our event channel; the identifier is destroyed when the listener is dropped.
        unsafe {
            if (context.lib.rdma_create_id)(context.cm, &raw mut id, token as *mut _, PS_TCP) != 0 {
                return Err(failed());
            }
            let mut listener = VerbsListener { context: Arc::clone(context), id, token, local: addr };
            // Before anybody can call: who drives the device meanwhile must know whose the call is.
            context.expect_calls(token);
            if (context.lib.rdma_bind_addr)(id, (&raw const at).cast()) != 0
                || (context.lib.rdma_listen)(id, backlog) != 0
            {
                return Err(failed());
            }
            listener.local = from_socket_address(&(*id).addr.src);
            Ok(listener)
        }
    }
}

impl ListenerOps for VerbsListener {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

impl Drop for VerbsListener {
    fn drop(&mut self) {
        self.context.forget_listener(self.token);
        // SAFETY: ours; events of it have been acknowledged.
        unsafe { (self.context.lib.rdma_destroy_id)(self.id) };
    }
}

/// A peer's wish to connect.
pub(super) struct Request {
    context: Arc<Context>,
    id: *mut rdma_cm_id,
    private_data: Vec<u8>,
    depths: (u16, u16),
    answered: bool,
}

// SAFETY: as for `Endpoint`.
unsafe impl Send for Request {}

impl Request {
    pub(super) fn new(
        context: Arc<Context>,
        id: *mut rdma_cm_id,
        private_data: Vec<u8>,
        conn: &rdma_conn_param,
    ) -> Request {
        // rdma_cm tells them from our point of view.
        let depths = (u16::from(conn.initiator_depth), u16::from(conn.responder_resources));
        Request { context, id, private_data, depths, answered: false }
    }

    fn refuse(&mut self, private_data: &[u8]) {
        if std::mem::replace(&mut self.answered, true) {
            return;
        }
        let data = &private_data[..private_data.len().min(148)];
        // SAFETY: a live identifier that nobody else has.
        unsafe {
            (self.context.lib.rdma_reject)(self.id, data.as_ptr().cast(), data.len() as u8);
            (self.context.lib.rdma_destroy_id)(self.id);
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.refuse(b"");
    }
}

impl RequestOps for Request {
    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn origin(&self) -> Origin {
        Origin::of(self.peer(), self.local())
    }

    fn peer(&self) -> SocketAddr {
        // SAFETY: a live identifier.
        from_socket_address(unsafe { &(*self.id).addr.dst })
    }

    fn local(&self) -> SocketAddr {
        // SAFETY: a live identifier.
        from_socket_address(unsafe { &(*self.id).addr.src })
    }

    fn depths(&self) -> Option<(u16, u16)> {
        Some(self.depths)
    }

    fn accept(mut self: Box<Self>, qp: &dyn QueuePairOps, params: &ConnectParams) -> Result<()> {
        let endpoint = qp.as_any().downcast_ref::<Endpoint>();
        let endpoint = endpoint.ok_or(Error::Unsupported("a queue pair of another provider"))?;
        endpoint.accept(self.id, self.depths, params, &mut self.answered)
    }

    fn reject(mut self: Box<Self>, private_data: &[u8]) {
        self.refuse(private_data);
    }
}
