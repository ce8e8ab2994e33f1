//! What a provider implements. [`crate::Device`] and its kin are thin wrappers over these, so a
//! consumer is written once and runs over every provider.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use thruway_rdma_types::{Access, Owner};
use thruway_rdma_types::{
    ConnectParams, ConnectionError, DeviceAttributes, QueuePairCaps, RecvRequest, Result, SendRequest, WorkCompletion,
};
use thruway_tcp::Origin;

/// An opened device.
pub(crate) trait DeviceOps: Send + Sync {
    fn attributes(&self) -> &DeviceAttributes;
    fn alloc_pd(&self) -> Result<u32>;
    /// No handle names it any more. Objects made from it may live on.
    fn free_pd(&self, pd: u32);
    /// # Safety
    /// `ptr..ptr+len` must stay mapped while `owner` lives.
    unsafe fn register(
        &self,
        pd: u32,
        ptr: *mut u8,
        len: usize,
        base: u64,
        access: Access,
        owner: Owner,
    ) -> Result<Arc<dyn RegionOps>>;
    fn create_cq(&self, capacity: usize) -> Result<Arc<dyn CompletionQueueOps>>;
    fn create_srq(&self, pd: u32, max_recv_wr: u32, max_sge: u32) -> Result<Arc<dyn SharedReceiveOps>>;
    fn create_qp(
        &self,
        pd: u32,
        send_cq: &Arc<dyn CompletionQueueOps>,
        recv_cq: &Arc<dyn CompletionQueueOps>,
        caps: QueuePairCaps,
        shared: Option<&Arc<dyn SharedReceiveOps>>,
    ) -> Result<Arc<dyn QueuePairOps>>;
    fn listen(&self, addr: SocketAddr, options: &crate::ListenOptions) -> Result<Box<dyn ListenerOps>>;
    /// Takes over a connection that something else accepted, as if a listener had.
    fn adopt(&self, stream: TcpStream) -> Result<()>;
    fn progress(&self);
    fn poll_event(&self) -> Option<Event>;
    fn arm(&self) -> bool;
    fn wait_fd(&self) -> BorrowedFd<'_>;
    /// As [`crate::Device::wait_until`].
    fn wait(&self, timeout: Option<Duration>, ready: &dyn Fn() -> bool) -> Result<()>;
    fn wake(&self);
}

/// A region or a window.
pub(crate) trait RegionOps: Send + Sync {
    fn key(&self) -> u32;
    /// The key that peers use, where it differs.
    fn remote_key(&self) -> u32 {
        self.key()
    }
    fn base(&self) -> u64;
    fn len(&self) -> usize;
    fn is_valid(&self) -> bool;
    /// A part of it with rights of its own.
    fn part(&self, offset: usize, len: usize, access: Access) -> Result<Arc<dyn RegionOps>>;
    fn deregister(&self);
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A shared receive queue.
pub(crate) trait SharedReceiveOps: Send + Sync {
    fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()>;
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A completion queue.
pub(crate) trait CompletionQueueOps: Send + Sync {
    fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize;
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A queue pair.
pub(crate) trait QueuePairOps: Send + Sync {
    fn number(&self) -> u32;
    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, crate::Error)>;
    fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()>;
    /// A window on part of a region, for this queue pair's peer.
    fn bind(
        &self,
        region: &dyn RegionOps,
        offset: usize,
        len: usize,
        access: Access,
        wr_id: Option<u64>,
    ) -> Result<Arc<dyn RegionOps>>;
    fn connect(&self, addr: SocketAddr, params: &ConnectParams) -> Result<()>;
    fn disconnect(&self);
    fn info(&self) -> Option<crate::ConnectionInfo>;
    fn path(&self) -> Option<crate::PathInfo>;
    fn acceptor(&self) -> Option<Origin>;
    fn error(&self) -> Option<ConnectionError>;
    /// The consumer's handle is gone.
    fn destroy(&self);
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A listening address.
pub(crate) trait ListenerOps: Send + Sync {
    fn local_addr(&self) -> SocketAddr;
}

/// A connection request not yet answered. Dropping it refuses.
pub(crate) trait RequestOps: Send {
    fn private_data(&self) -> &[u8];
    fn peer(&self) -> SocketAddr;
    fn origin(&self) -> Origin;
    fn local(&self) -> SocketAddr;
    fn depths(&self) -> Option<(u16, u16)>;
    fn accept(self: Box<Self>, qp: &dyn QueuePairOps, params: &ConnectParams) -> Result<()>;
    fn reject(self: Box<Self>, private_data: &[u8]);
}

/// See [`crate::ConnectionEvent`].
pub(crate) enum Event {
    Request(Box<dyn RequestOps>),
    Established { qp_num: u32, private_data: Vec<u8> },
    Disconnected { qp_num: u32, cause: ConnectionError },
    Foreign { stream: TcpStream, peer: SocketAddr, prefix: Vec<u8> },
}
