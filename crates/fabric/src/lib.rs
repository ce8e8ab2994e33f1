//! A verbs-style RDMA API that works with or without an RDMA card.
//!
//! ```no_run
//! use thruway_fabric::messages::Messages;
//! use thruway_fabric::{Provider, iwarp};
//!
//! let provider = Provider::Iwarp(iwarp::Config::default());
//! let mut peer = Messages::connect(&provider, "192.0.2.1:7118".parse()?, 4096)?;
//! peer.send(b"ping")?;
//! println!("{:?}", peer.recv()?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`messages`] is for threads that only send and receive; `examples/ping_pong.rs` is both ends of it. Everything else is below.
//!
//! The interface uses the words of the RDMA verbs: a [`Device`] has [`ProtectionDomain`]s, in
//! which [`MemoryRegion`]s are registered and [`QueuePair`]s made; finished requests appear in
//! [`CompletionQueue`]s. Connections are made with private data and read depths, as in rdma_cm.
//! Ordering and completion rules are written down in [`types`].
//!
//! Providers: [`iwarp`] is MPA, DDP and RDMAP (RFC 5044, 5041, 5040, 6581, 7306) in user space over
//! TCP sockets, on the wire the same as iWARP hardware and Linux's `siw`; [`shm`] is the same protocol between
//! processes of one host, through shared memory; [`verbs`] is whatever rdma-core drives.
//!
//! # Progress
//!
//! A device makes progress in the thread that polls it: there is no hidden thread. Polling a
//! completion queue drives the sockets of its device when nothing is ready, which gives the
//! lowest latency; a thread with nothing to do calls [`Device::wait`], which spins briefly if that has
//! paid lately and then sleeps, or watches [`Device::wait_fd`] in an event loop of its own after
//! [`Device::arm`] said that sleeping is safe. Every object may be used from any thread.
//!
//! # Where do the bytes of an RDMA Write land?
//!
//! See the module documentation of `iwarp::rx` in the source: the kernel copies them from the
//! socket to their final address.

pub mod iwarp;
pub mod messages;
mod provider;
mod reservation;
pub mod shm;
pub mod slots;
pub mod verbs;

pub use thruway_memory::Buffer;
pub use thruway_rdma_types::{self as types, *};
pub use thruway_tcp::{Origin, PathInfo};

use provider::{
    CompletionQueueOps, DeviceOps, Event, ListenerOps, QueuePairOps, RegionOps, RequestOps, SharedReceiveOps,
};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Which provider's device to open, and how.
#[derive(Debug, Clone)]
pub enum Provider {
    /// iWARP in user space.
    Iwarp(iwarp::Config),
    /// Shared memory between processes of this host.
    Shm(shm::Config),
    /// An RDMA device.
    Verbs(verbs::Config),
}

impl Provider {
    /// Opens the device.
    ///
    /// # Errors
    /// As the provider's own `open`.
    pub fn open(&self) -> Result<Device> {
        match self {
            Provider::Iwarp(config) => config.clone().open(),
            Provider::Shm(config) => config.open(),
            Provider::Verbs(config) => config.open(),
        }
    }
}

impl Provider {
    /// Whether its protocol is spoken by this program, so that the user at the other end of a connection from this host is known
    /// ([`ConnectionRequest::origin`]).
    pub fn is_in_user_space(&self) -> bool {
        match self {
            Provider::Iwarp(_) | Provider::Shm(_) => true,
            Provider::Verbs(_) => false,
        }
    }
}

impl From<iwarp::Config> for Provider {
    fn from(config: iwarp::Config) -> Provider {
        Provider::Iwarp(config)
    }
}

impl From<shm::Config> for Provider {
    fn from(config: shm::Config) -> Provider {
        Provider::Shm(config)
    }
}

impl From<verbs::Config> for Provider {
    fn from(config: verbs::Config) -> Provider {
        Provider::Verbs(config)
    }
}

/// An opened device: the root of everything else. Clones are handles to the same device.
///
/// A device is a progress domain. A program opens one for each event loop.
#[derive(Clone)]
pub struct Device(Arc<dyn DeviceOps>);

impl Device {
    pub(crate) fn new(ops: Arc<dyn DeviceOps>) -> Device {
        Device(ops)
    }

    /// What the device can do.
    pub fn attributes(&self) -> &DeviceAttributes {
        self.0.attributes()
    }

    /// A new protection domain: regions of one cannot be reached through queue pairs of another. The device gets it back
    /// when the last clone, region and queue pair of it has been dropped.
    ///
    /// # Errors
    /// [`Error::Io`] when the device has no more.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        let number = self.0.alloc_pd()?;
        Ok(ProtectionDomain { device: self.clone(), number, _domain: Arc::new(Domain(self.clone(), number)) })
    }

    /// A queue for `capacity` completions.
    ///
    /// # Errors
    /// [`Error::Limit`] beyond [`DeviceAttributes::max_cqe`].
    pub fn create_cq(&self, capacity: usize) -> Result<CompletionQueue> {
        Ok(CompletionQueue { ops: self.0.create_cq(capacity)? })
    }

    /// Listens for connections; they arrive as [`ConnectionEvent::Request`]. Port 0 lets the
    /// system choose.
    ///
    /// # Errors
    /// [`Error::Io`] if the address cannot be bound.
    pub fn listen(&self, addr: SocketAddr, options: &ListenOptions) -> Result<Listener> {
        Ok(Listener(self.0.listen(addr, options)?))
    }

    /// Serves a TCP connection accepted elsewhere as if a listener of this device had accepted it:
    /// how one port spreads its connections over several devices.
    ///
    /// # Errors
    /// [`Error::Io`] if the socket cannot be prepared.
    pub fn adopt(&self, stream: TcpStream) -> Result<()> {
        self.0.adopt(stream)
    }

    /// Does what can be done without waiting.
    pub fn progress(&self) {
        self.0.progress();
    }

    /// The next connection event, driving progress if none is queued.
    pub fn poll_event(&self) -> Option<ConnectionEvent> {
        self.0.poll_event().map(|event| match event {
            Event::Request(ops) => ConnectionEvent::Request(ConnectionRequest(ops)),
            Event::Established { qp_num, private_data } => ConnectionEvent::Established { qp_num, private_data },
            Event::Disconnected { qp_num, cause } => ConnectionEvent::Disconnected { qp_num, cause },
            Event::Foreign { stream, peer, prefix } => ConnectionEvent::Foreign { stream, peer, prefix },
        })
    }

    /// Prepares to sleep on [`Device::wait_fd`]. False if there is something to poll already.
    #[must_use]
    pub fn arm(&self) -> bool {
        self.0.arm()
    }

    /// Readable when an armed device has something to poll.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }

    /// Makes a [`Device::wait`] in progress, or else the next one, return at once. From any thread.
    pub fn wake(&self) {
        self.0.wake();
    }

    /// Returns when there may be something to poll, at the latest after `timeout`. Spins first if
    /// that has paid lately, then sleeps. What another thread takes as it comes, because it polls just then, wakes no thread.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        self.0.wait(timeout, &|| false)
    }

    /// As [`Device::wait`], for a thread that polls memory for RDMA Writes: also returns when `ready` returns true. A write adds
    /// no completion, and the last poll may have placed its data. So the device calls `ready` after each poll of its connections
    /// and again before the thread sleeps.
    ///
    /// The arrival of a write ends the sleep if no other thread drives the device. It does not on devices that place data without
    /// the processor ([`DeviceAttributes::auto_progress`]).
    ///
    /// # Errors
    /// As [`Device::wait`].
    pub fn wait_until(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> Result<()> {
        self.0.wait(timeout, &ready)
    }
}

/// How to listen.
#[derive(Debug, Clone)]
pub struct ListenOptions {
    /// Connections the system queues before they are accepted.
    pub backlog: u32,
    /// Hand over connections that do not speak the device's protocol as
    /// [`ConnectionEvent::Foreign`] instead of closing them.
    pub accept_foreign: bool,
    /// Most connections before the poll of their requests, at least 1. A new one closes the oldest of the origin with the most
    /// connections. The consumer limits polled requests itself.
    pub max_pending: usize,
}

impl Default for ListenOptions {
    fn default() -> ListenOptions {
        ListenOptions { backlog: 4096, accept_foreign: false, max_pending: 16384 }
    }
}

/// Something that happened to a connection.
pub enum ConnectionEvent {
    /// A peer wants to connect.
    Request(ConnectionRequest),
    /// The connection is up; `private_data` is what the accepting side had to say.
    Established {
        /// The queue pair's number.
        qp_num: u32,
        /// The reply's private data; empty on the accepting side.
        private_data: Vec<u8>,
    },
    /// The connection has ended, or could not be made.
    Disconnected {
        /// The queue pair's number.
        qp_num: u32,
        /// The cause.
        cause: ConnectionError,
    },
    /// A peer connected that does not speak the device's protocol.
    Foreign {
        /// The connection, blocking.
        stream: TcpStream,
        /// Its other end.
        peer: SocketAddr,
        /// Bytes already read from it: four, or as many as it took to see that they are not the device's protocol (532
        /// at most).
        prefix: Vec<u8>,
    },
}

/// A peer's wish to connect. Dropping it refuses.
pub struct ConnectionRequest(Box<dyn RequestOps>);

impl ConnectionRequest {
    /// What the peer's consumer sent along.
    pub fn private_data(&self) -> &[u8] {
        self.0.private_data()
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.0.peer()
    }

    /// Where it comes from, for what each may have a share of.
    pub fn origin(&self) -> Origin {
        self.0.origin()
    }

    /// The address it connected to.
    pub fn local(&self) -> SocketAddr {
        self.0.local()
    }

    /// The peer's inbound and outbound read depths, if it gave them.
    pub fn depths(&self) -> Option<(u16, u16)> {
        self.0.depths()
    }

    /// Accepts on a queue pair that has not been connected yet; [`ConnectionEvent::Established`]
    /// follows at the queue pair's device, which may be another one of the same provider than
    /// the one that listens.
    ///
    /// # Errors
    /// [`Error::State`] if the queue pair was used already, [`Error::Limit`] for too much private data.
    pub fn accept(self, qp: &QueuePair, params: &ConnectParams) -> Result<()> {
        self.0.accept(&*qp.ops, params)
    }

    /// Refuses, with a reason for the peer's consumer.
    pub fn reject(self, private_data: &[u8]) {
        self.0.reject(private_data);
    }
}

/// A listening address. Dropping it stops listening.
pub struct Listener(Box<dyn ListenerOps>);

impl Listener {
    /// The address, with the port the system chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }
}

/// Groups regions and queue pairs that may work with each other.
#[derive(Clone)]
pub struct ProtectionDomain {
    device: Device,
    number: u32,
    _domain: Arc<Domain>,
}

struct Domain(Device, u32);

impl Drop for Domain {
    fn drop(&mut self) {
        self.0.0.free_pd(self.1);
    }
}

impl ProtectionDomain {
    /// Registers a whole buffer. Addresses in it are its virtual addresses.
    ///
    /// # Errors
    /// [`Error::Limit`] when the device has no more keys, [`Error::Unsupported`] for
    /// [`Access::ON_DEMAND`] on a device without it, [`Error::Io`] if the system cannot hold the memory in place.
    pub fn register(&self, buffer: &Arc<Buffer>, access: Access) -> Result<MemoryRegion> {
        let ptr = buffer.as_ptr();
        // SAFETY: the buffer owns the memory and the region keeps the buffer.
        unsafe {
            self.device.0.register(self.number, ptr, buffer.len(), ptr as u64, access, Arc::clone(buffer) as Owner)
        }
        .map(MemoryRegion)
    }

    /// Registers a whole buffer zero-based: addresses in it start at 0.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`].
    pub fn register_zero_based(&self, buffer: &Arc<Buffer>, access: Access) -> Result<MemoryRegion> {
        let owner = Arc::clone(buffer) as Owner;
        // SAFETY: as in `register`.
        unsafe { self.device.0.register(self.number, buffer.as_ptr(), buffer.len(), 0, access, owner) }
            .map(MemoryRegion)
    }

    /// Registers memory of any kind. Addresses in it are its virtual addresses.
    ///
    /// # Safety
    /// `ptr..ptr+len` must be mapped, readable and (for any write access) writable, as long as
    /// `owner` lives, and while a posted request or a peer with rights may use it, it must not be
    /// borrowed in a way that Rust's aliasing rules would forbid.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`].
    pub unsafe fn register_raw(
        &self,
        ptr: *mut u8,
        len: usize,
        access: Access,
        owner: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<MemoryRegion> {
        // SAFETY: the caller's promise.
        unsafe { self.device.0.register(self.number, ptr, len, ptr as u64, access, owner) }.map(MemoryRegion)
    }

    /// A queue pair, not connected yet. Receives may be posted at once.
    ///
    /// # Errors
    /// [`Error::Limit`] for queues larger than the device or the completion queues allow.
    pub fn create_qp(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        caps: QueuePairCaps,
    ) -> Result<QueuePair> {
        Ok(QueuePair { ops: self.device.0.create_qp(self.number, &send_cq.ops, &recv_cq.ops, caps, None)? })
    }

    /// A queue for `max_recv_wr` receives of up to `max_sge` elements, from which any number of queue pairs take theirs:
    /// memory for the messages that come, not for those that could.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a device without, [`Error::Limit`] beyond
    /// [`DeviceAttributes::max_srq_wr`] or [`DeviceAttributes::max_sge`].
    pub fn create_srq(&self, max_recv_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue> {
        let attributes = self.device.attributes();
        if attributes.max_srq_wr == 0 {
            return Err(Error::Unsupported("shared receive queues on this device"));
        }
        for (what, got, limit) in [
            ("shared receive queue", max_recv_wr, attributes.max_srq_wr),
            ("elements of a request", max_sge, attributes.max_sge),
        ] {
            if got > limit {
                return Err(Error::Limit { what, got: got.into(), limit: limit.into() });
            }
        }
        Ok(SharedReceiveQueue { ops: self.device.0.create_srq(self.number, max_recv_wr.max(1), max_sge.max(1))? })
    }

    /// A queue pair that takes its receives from a shared receive queue of this domain. They finish in `recv_cq`, where
    /// room is kept for all of the shared queue's.
    ///
    /// # Errors
    /// As [`ProtectionDomain::create_qp`]; [`Error::Unsupported`] if the shared queue is another domain's.
    pub fn create_qp_with_srq(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        caps: QueuePairCaps,
        srq: &SharedReceiveQueue,
    ) -> Result<QueuePair> {
        let caps = QueuePairCaps { max_recv_wr: 0, ..caps };
        let ops = self.device.0.create_qp(self.number, &send_cq.ops, &recv_cq.ops, caps, Some(&srq.ops))?;
        Ok(QueuePair { ops })
    }

    /// The device this domain belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// Registered memory. Dropping it revokes both keys and all windows on it; memory that posted requests still need
/// stays mapped until they are done. A queue pair of iWARP or shared memory keeps a region that a short message was sent from, and one that
/// a message was received into, mapped until another takes its place, or the queue pair goes.
pub struct MemoryRegion(Arc<dyn RegionOps>);

impl MemoryRegion {
    /// Key for local elements.
    pub fn lkey(&self) -> u32 {
        self.0.key()
    }

    /// Key for peers (the steering tag).
    pub fn rkey(&self) -> u32 {
        self.0.remote_key()
    }

    /// Address of the first byte, in the region's terms.
    pub fn addr(&self) -> u64 {
        self.0.base()
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// A local element for `len` bytes at `offset`.
    pub fn sge(&self, offset: usize, len: u32) -> Sge {
        Sge { addr: self.addr() + offset as u64, len, lkey: self.lkey() }
    }

    /// The remote address of the byte at `offset`.
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { addr: self.addr() + offset as u64, rkey: self.rkey() }
    }

    /// False once a peer has invalidated the region, or the queue pair of a window has gone.
    pub fn is_valid(&self) -> bool {
        self.0.is_valid()
    }

    /// A key of its own for a part of this region, with rights of its own, for the peers of the whole protection
    /// domain. Cheap where [`DeviceAttributes::domain_windows`] says so, a registration elsewhere: there
    /// [`QueuePair::bind_window`] is to be preferred.
    ///
    /// # Errors
    /// As [`QueuePair::bind_window`], but for those of the queue pair.
    pub fn bind_window(&self, offset: usize, len: usize, access: Access) -> Result<MemoryRegion> {
        self.0.part(offset, len, access).map(MemoryRegion)
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.0.deregister();
    }
}

/// Collects completions.
#[derive(Clone)]
pub struct CompletionQueue {
    ops: Arc<dyn CompletionQueueOps>,
}

impl CompletionQueue {
    /// Appends up to `max` completions to `out`, driving the device if none is ready. Returns how
    /// many.
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> usize {
        self.ops.poll(out, max)
    }
}

/// Receives that several queue pairs share. Dropping it leaves it to the queue pairs that have it.
#[derive(Clone)]
pub struct SharedReceiveQueue {
    ops: Arc<dyn SharedReceiveOps>,
}

impl SharedReceiveQueue {
    /// Queues a receive for whichever of the queue pairs has a message first.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::LocalProtection`], [`Error::Limit`]; the receive has then not been queued.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        self.ops.post_recv(request)
    }
}

/// What two ends agreed on, and with whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The peer.
    pub peer: SocketAddr,
    /// This end.
    pub local: SocketAddr,
    /// Inbound reads and atomics held for the peer.
    pub ird: u16,
    /// Outbound reads and atomics allowed.
    pub ord: u16,
    /// What carries it: `iwarp`, `shm` or `verbs`.
    pub provider: &'static str,
    /// What is known of the path now, where the device can tell.
    pub path: Option<PathInfo>,
    /// Protocol details, for people.
    pub detail: String,
}

/// A connected pair of a send and a receive queue. Dropping it ends the connection.
pub struct QueuePair {
    ops: Arc<dyn QueuePairOps>,
}

impl QueuePair {
    /// Identifies the queue pair in completions and events of its device.
    pub fn number(&self) -> u32 {
        self.ops.number()
    }

    /// Queues a request and starts it if possible.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::LocalProtection`], [`Error::Limit`],
    /// [`Error::Unsupported`], [`Error::State`]; the request has then not been queued.
    pub fn post_send(&self, request: &SendRequest<'_>) -> Result<()> {
        self.ops.post_send(std::slice::from_ref(request)).map_err(|(_, error)| error)
    }

    /// Queues several requests and starts them together, which costs fewer system calls.
    ///
    /// # Errors
    /// As [`QueuePair::post_send`], with the index of the request at fault; those before it have
    /// been queued.
    pub fn post_sends(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, Error)> {
        self.ops.post_send(requests)
    }

    /// Queues a receive.
    ///
    /// # Errors
    /// As [`QueuePair::post_send`]; [`Error::Unsupported`] if its receives come from a shared receive queue.
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        self.ops.post_recv(request)
    }

    /// A memory window: a key of its own for a part of a region, with rights of its own, for the peer of this queue pair
    /// only. The cheapest way to let a peer at exactly one buffer for exactly one operation: end that operation by a
    /// Send with Invalidate, or drop the window. It goes with its queue pair.
    ///
    /// It is open to a peer that learns of it by a later request of this queue pair. Who tells the peer in another way
    /// waits first for the completion that `wr_id` asks for ([`CompletionOp::Bind`]).
    ///
    /// This is a request of the send queue, and the queue pair must be connected. Where the device has no windows
    /// ([`DeviceAttributes::windows`]), the window is a registration, which the peers of the whole protection domain
    /// could use if they knew it.
    ///
    /// # Errors
    /// [`Error::LocalProtection`] outside the region or for another domain's, [`Error::Limit`] without keys,
    /// [`Error::QueueFull`], [`Error::State`].
    pub fn bind_window(
        &self,
        region: &MemoryRegion,
        offset: usize,
        len: usize,
        access: Access,
        wr_id: Option<u64>,
    ) -> Result<MemoryRegion> {
        self.ops.bind(&*region.0, offset, len, access, wr_id).map(MemoryRegion)
    }

    /// Starts to connect; [`ConnectionEvent::Established`] or [`ConnectionEvent::Disconnected`] follows.
    ///
    /// # Errors
    /// [`Error::State`] if the queue pair was used already, [`Error::Limit`] for too much private
    /// data, [`Error::Io`] if there is no way to the address.
    pub fn connect(&self, addr: SocketAddr, params: &ConnectParams) -> Result<()> {
        self.ops.connect(addr, params)
    }

    /// Closes in order: what is posted is still sent, then the connection ends.
    pub fn disconnect(&self) {
        self.ops.disconnect();
    }

    /// What was agreed, once connected.
    pub fn info(&self) -> Option<ConnectionInfo> {
        self.ops.info()
    }

    /// What is known of the path to the peer now, where the device can tell; over TCP from when that is connected, a round
    /// trip before [`ConnectionEvent::Established`].
    pub fn path(&self) -> Option<PathInfo> {
        self.ops.path()
    }

    /// The peer that accepted this connection: over loopback and shared memory its user. `None` unless connected.
    ///
    /// With shared memory, it is the user that called `listen(2)`; with TCP, the user that accepted the connection.
    pub fn acceptor(&self) -> Option<Origin> {
        self.ops.acceptor()
    }

    /// Why the connection ended, if it has.
    pub fn error(&self) -> Option<ConnectionError> {
        self.ops.error()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.ops.destroy();
    }
}
