//! iSER (RFC 7145): iSCSI over RDMA, on any provider of the fabric.
//!
//! Control PDUs travel as Sends behind a header of 28 bytes that advertises the initiator's buffers. What a
//! command reads goes there by RDMA Write, out of the block that the storage has put it in; what it writes comes by
//! RDMA Read into the block that it is written from. The response revokes the buffer's key. Connections are made
//! through the connection manager from the first, as Linux's initiator does on every kind of device.
//!
//! A connection has a device, a completion queue and buffers of its own; one task drives it, one deals with what
//! has arrived.

use super::connection::{Advertised, Carrier, Connection, Flow, Input};
use super::login::{ISER_DATA_MAX, Transport};
use super::pdu::{BHS, Header};
use super::server::{Dialogue, LOGIN_TIMEOUT, LoggedIn, Shared, Step};
use super::target::Targets;
use crate::big_endian::{be32, be64};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::pool::BlockPool;
use thruway_engine::reactor::Spreader;
use thruway_engine::{Reactors, Segment};
use thruway_fabric::{
    Access, Buffer, CompletionOp, CompletionQueue, ConnectParams, ConnectionEvent, ConnectionRequest, Device,
    ListenOptions, MemoryRegion, Payload, ProtectionDomain, Provider, QueuePair, QueuePairCaps, RecvRequest,
    RemoteAddr, SendFlags, SendOp, SendRequest, Status, WorkCompletion,
};
use thruway_server::{Acceptor, Address, Body, Permit};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, oneshot};

/// Bytes of the header in front of a PDU (RFC 7145 9.2; Linux's form of it, with virtual addresses).
const HEADER: usize = 28;
/// Bytes of a control message.
const SLOT: usize = HEADER + BHS + ISER_DATA_MAX as usize;
/// Receives posted: the command window, and as much again for what is outside it.
const RECEIVES: usize = 256;
/// Control messages that leave at one time.
const SENDS: usize = 256;
/// Control messages beside them that wait for their turn; then nothing is begun that would add to them.
const OVERFLOW_MAX: usize = 256;
/// Requests of the send queue.
const SEND_DEPTH: usize = 512;
/// RDMA Reads outstanding, each way.
const READ_DEPTH: u16 = 16;

/// First byte of a header: an iSCSI control PDU.
const CONTROL: u8 = 0x10;
/// The buffer to read from is valid.
const WRITE_VALID: u8 = 0x08;
/// The buffer to write to is valid.
const READ_VALID: u8 = 0x04;
/// Connection data: no zero-based addresses.
const NO_ZERO_BASED: u8 = 0x80;
/// Connection data: no Send with Invalidate.
const NO_INVALIDATE: u8 = 0x40;

/// Takes a control message apart: advertised buffers, PDU header, data. `None` if it is none.
pub fn decode(message: &[u8]) -> Option<(AdvertisedBuffers, Header, &[u8])> {
    let (header, rest) = message.split_first_chunk::<HEADER>()?;
    let (bhs, data) = rest.split_first_chunk::<BHS>()?;
    if header[0] & 0xf0 != CONTROL {
        return None;
    }
    let buffer = |valid, at| (header[0] & valid != 0).then(|| (be32(header, at), be64(header, at + 4)));
    let bhs = Header(*bhs);
    // Additional header segments are not used with iSER; padding may be left out.
    let data = if bhs.ahs_len() == 0 { data.get(..bhs.data_len())? } else { return None };
    Some((AdvertisedBuffers { write: buffer(WRITE_VALID, 4), read: buffer(READ_VALID, 16) }, bhs, data))
}

/// Buffers of the initiator: key and address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdvertisedBuffers {
    /// What a write reads from.
    pub write: Option<(u32, u64)>,
    /// What a read writes to.
    pub read: Option<(u32, u64)>,
}

impl From<AdvertisedBuffers> for Advertised {
    fn from(buffers: AdvertisedBuffers) -> Advertised {
        let remote = |(rkey, addr)| RemoteAddr { addr, rkey };
        Advertised { write: buffers.write.map(remote), read: buffers.read.map(remote) }
    }
}

/// Something for the send queue.
enum Request {
    Send { slot: usize, len: usize, invalidate: Option<u32> },
    Write { segment: Segment, remote: RemoteAddr },
    Read { segment: Segment, remote: RemoteAddr, done: oneshot::Sender<Segment> },
}

/// Keeps what a posted request needs.
enum Posted {
    Send { slot: usize },
    Write { _segment: Segment },
    Read { segment: Segment, done: oneshot::Sender<Segment> },
}

/// What a connection has to do by RDMA.
pub(super) struct Queue {
    slots: Arc<Buffer>,
    free_slots: RefCell<Vec<usize>>,
    waiting: RefCell<VecDeque<Request>>,
    /// Control messages that found no slot.
    overflow: RefCell<VecDeque<(Vec<u8>, Option<u32>)>>,
    revocable: bool,
    work: Notify,
    /// Told when some of the overflow has found slots.
    sent: Notify,
    broken: Cell<bool>,
    broke: Notify,
}

impl Queue {
    fn new(slots: Arc<Buffer>, revocable: bool) -> Queue {
        Queue {
            slots,
            free_slots: RefCell::new((0..SENDS).collect()),
            waiting: RefCell::default(),
            overflow: RefCell::default(),
            revocable,
            work: Notify::new(),
            sent: Notify::new(),
            broken: Cell::new(false),
            broke: Notify::new(),
        }
    }

    /// Sends a PDU and, with it, revokes a key of the initiator's.
    pub(super) fn send(&self, mut header: Header, body: &Body, invalidate: Option<u32>) {
        header.set_data_len(body.len());
        if self.broken.get() {
            return;
        }
        let mut message = vec![0; HEADER];
        message[0] = CONTROL;
        message.extend_from_slice(&header.0);
        body.bytes(|part| message.extend_from_slice(part));
        message.resize(message.len().next_multiple_of(4), 0);
        if message.len() > SLOT {
            tracing::error!(len = message.len(), "a control message longer than any: a bug of the server");
            return self.fail();
        }
        self.overflow.borrow_mut().push_back((message, invalidate.filter(|_| self.revocable)));
        self.fill_slots();
        self.work.notify_one();
    }

    fn fill_slots(&self) {
        let (mut overflow, mut free) = (self.overflow.borrow_mut(), self.free_slots.borrow_mut());
        while !overflow.is_empty() && !free.is_empty() {
            let (Some((message, invalidate)), Some(slot)) = (overflow.pop_front(), free.pop()) else { return };
            self.slots.write((RECEIVES + slot) * SLOT, &message);
            self.waiting.borrow_mut().push_back(Request::Send { slot, len: message.len(), invalidate });
        }
    }

    /// Waits until not too much waits to be sent.
    pub(super) async fn room(&self) {
        loop {
            let told = self.sent.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.overflow.borrow().len() < OVERFLOW_MAX || self.broken.get() {
                return;
            }
            told.await;
        }
    }

    /// Puts a segment into the initiator's memory.
    pub(super) fn write(&self, segment: Segment, remote: RemoteAddr) {
        if self.broken.get() {
            return;
        }
        self.waiting.borrow_mut().push_back(Request::Write { segment, remote });
        self.work.notify_one();
    }

    /// Fills a segment from the initiator's memory; `None` if the connection is lost.
    pub(super) async fn read(&self, segment: Segment, remote: RemoteAddr) -> Option<Segment> {
        if self.broken.get() {
            return None;
        }
        let (done, result) = oneshot::channel();
        self.waiting.borrow_mut().push_back(Request::Read { segment, remote, done });
        self.work.notify_one();
        result.await.ok()
    }

    fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty() && self.overflow.borrow().is_empty()
    }

    /// Nothing is sent any more, and the connection ends.
    pub(super) fn fail(&self) {
        self.broken.set(true);
        self.waiting.borrow_mut().clear();
        self.overflow.borrow_mut().clear();
        self.broke.notify_one();
        self.sent.notify_waiters();
    }

    /// The connection is lost.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// Resolves when the connection is lost.
    pub(super) async fn broken(&self) {
        while !self.broken.get() {
            self.broke.notified().await;
        }
    }
}

/// The RDMA side of a connection. Fields are dropped in this order: the connection before its memory.
struct End {
    qp: QueuePair,
    cq: CompletionQueue,
    posted: HashMap<u64, Posted>,
    /// Of the send queue.
    depth: usize,
    next_id: u64,
    /// Registrations of the pools that segments come from.
    regions: Vec<(Arc<BlockPool>, MemoryRegion)>,
    slots_region: MemoryRegion,
    pd: ProtectionDomain,
    device: Device,
}

/// Receives are told from other completions by this.
const RECEIVE: u64 = 1 << 63;

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl End {
    /// Accepts a connection; its private data, and the memory of its slots.
    fn accept(provider: &Provider, request: ConnectionRequest) -> thruway_fabric::Result<(End, Arc<Buffer>, bool)> {
        let device = provider.open()?;
        let pd = device.alloc_pd()?;
        let attributes = device.attributes();
        let sends = SEND_DEPTH.min(attributes.max_queue as usize);
        let cq = device.create_cq((sends + RECEIVES).min(attributes.max_completions))?;
        let caps = QueuePairCaps { max_send: sends as u32, max_recv: RECEIVES as u32, max_sge: 1 };
        let qp = pd.create_qp(&cq, &cq, caps)?;
        let slots = Arc::new(Buffer::new((RECEIVES + SENDS) * SLOT)?);
        let slots_region = pd.register(&slots, Access::LOCAL_WRITE)?;
        let read_depth = READ_DEPTH.min(attributes.max_read_depth);
        // The initiator's first byte says what it can do; ours answers.
        let flags = request.private_data().first().copied().unwrap_or(0);
        let end = End {
            qp,
            cq,
            posted: HashMap::new(),
            depth: sends,
            next_id: 0,
            regions: Vec::new(),
            slots_region,
            pd,
            device,
        };
        for slot in 0..RECEIVES {
            end.post_receive(slot)?;
        }
        let params = ConnectParams {
            private_data: vec![NO_ZERO_BASED, 0, 0, 0],
            ird: read_depth,
            ord: read_depth,
            ..ConnectParams::default()
        };
        request.accept(&end.qp, &params)?;
        Ok((end, slots, flags & NO_INVALIDATE == 0))
    }

    fn post_receive(&self, slot: usize) -> thruway_fabric::Result<()> {
        let sge = self.slots_region.sge(slot * SLOT, SLOT as u32);
        self.qp.post_recv(&RecvRequest { wr_id: RECEIVE | slot as u64, sges: &[sge] })
    }

    /// The registration of a segment's pool.
    fn region(&mut self, segment: &Segment) -> thruway_fabric::Result<usize> {
        let pool = segment.pool();
        if let Some(index) = self.regions.iter().position(|(known, _)| Arc::ptr_eq(known, pool)) {
            return Ok(index);
        }
        let region = self.pd.register(pool.buffer(), Access::LOCAL_WRITE)?;
        self.regions.push((Arc::clone(pool), region));
        Ok(self.regions.len() - 1)
    }

    /// Posts what waits, as far as there is room.
    fn post(&mut self, queue: &Queue) -> thruway_fabric::Result<()> {
        while self.posted.len() < self.depth {
            let Some(request) = queue.waiting.borrow_mut().pop_front() else { return Ok(()) };
            let wr_id = self.next_id;
            self.next_id = (self.next_id + 1) & !RECEIVE;
            let (op, sge, posted) = match request {
                Request::Send { slot, len, invalidate } => {
                    let sge = self.slots_region.sge((RECEIVES + slot) * SLOT, len as u32);
                    (SendOp::Send { invalidate }, sge, Posted::Send { slot })
                }
                Request::Write { segment, remote } => {
                    let index = self.region(&segment)?;
                    let sge = self.regions[index].1.sge(segment.offset_in_pool(), segment.len() as u32);
                    (SendOp::Write { remote, immediate: None }, sge, Posted::Write { _segment: segment })
                }
                Request::Read { segment, remote, done } => {
                    let index = self.region(&segment)?;
                    let sge = self.regions[index].1.sge(segment.offset_in_pool(), segment.len() as u32);
                    (SendOp::Read { remote }, sge, Posted::Read { segment, done })
                }
            };
            self.posted.insert(wr_id, posted);
            let flags = SendFlags::SIGNALED;
            self.qp.post_send(&SendRequest { wr_id, op, payload: Payload::Sges(&[sge]), flags })?;
        }
        Ok(())
    }

    /// Deals with what is done. `arrived` is told the slot and length of each message. False if nothing was.
    fn collect(&mut self, queue: &Queue, arrived: &mpsc::UnboundedSender<(usize, usize)>) -> io::Result<bool> {
        let mut completions: Vec<WorkCompletion> = Vec::new();
        self.cq.poll(&mut completions, 64);
        for done in &completions {
            if done.status != Status::Success {
                return Err(other(format!("{:?} over RDMA: {:?}", done.op, done.status)));
            }
            if done.op == CompletionOp::Recv {
                let _ = arrived.send(((done.wr_id & !RECEIVE) as usize, done.len as usize));
                continue;
            }
            match self.posted.remove(&done.wr_id) {
                Some(Posted::Send { slot }) => {
                    queue.free_slots.borrow_mut().push(slot);
                    queue.fill_slots();
                    queue.sent.notify_waiters();
                }
                Some(Posted::Read { segment, done }) => drop(done.send(segment)),
                Some(Posted::Write { .. }) | None => {}
            }
        }
        let mut any = !completions.is_empty();
        while let Some(event) = self.device.poll_event() {
            any = true;
            if let ConnectionEvent::Disconnected { cause, .. } = event {
                return Err(other(cause));
            }
        }
        Ok(any)
    }
}

/// Messages that have been dealt with: their receives are posted again.
type Used = Rc<RefCell<Vec<usize>>>;

/// Drives a connection until it is lost, or all has been sent after `closing`.
async fn drive(
    mut end: End,
    queue: &Queue,
    arrived: mpsc::UnboundedSender<(usize, usize)>,
    used: Used,
    closing: &Cell<bool>,
) -> io::Result<()> {
    let fd = end.device.wait_fd().try_clone_to_owned()?;
    // SAFETY: an owned descriptor stays open, and the same, until it is dropped with the registration.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
    loop {
        for slot in used.borrow_mut().drain(..) {
            end.post_receive(slot).map_err(other)?;
        }
        end.post(queue).map_err(other)?;
        if end.collect(queue, &arrived)? || !used.borrow().is_empty() {
            // Let the tasks at what has come, then look again.
            tokio::task::yield_now().await;
            continue;
        }
        if closing.get() && queue.is_empty() && end.posted.is_empty() {
            end.qp.disconnect();
            return Ok(());
        }
        if !end.device.arm() {
            tokio::task::yield_now().await;
            continue;
        }
        tokio::select! {
            ready = fd.readable() => ready?.clear_ready(),
            () = queue.work.notified() => {}
        }
    }
}

/// A message in its slot.
fn message(slots: &Buffer, slot: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.min(SLOT)];
    slots.read(slot * SLOT, &mut bytes);
    bytes
}

/// How to serve.
pub struct Config {
    /// Addresses to listen on.
    pub listen: Vec<SocketAddr>,
    /// By what.
    pub provider: Provider,
    /// What to serve.
    pub targets: Arc<Targets>,
    /// Of those who come over the loopback interface, only the user that this process runs as, and root; of what an
    /// RDMA device brings, nobody knows the user.
    pub own_user_only: bool,
    /// Connections at one time; more are refused.
    pub connections_max: usize,
}

/// An address that iSER cannot listen on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for iSER on {address}: {source}")]
#[non_exhaustive]
pub struct ListenError {
    /// The address.
    pub address: SocketAddr,
    /// The reason: there may be no RDMA device for it.
    pub source: thruway_fabric::Error,
}

/// A running iSER server. It ends with its reactors.
pub struct Server {
    addresses: Vec<Address>,
    acceptor: Arc<Acceptor>,
}

struct Service {
    provider: Provider,
    shared: Shared,
}

impl Server {
    /// Starts to serve on these reactors.
    ///
    /// # Errors
    /// [`ListenError`] for the first address that cannot be listened on.
    pub fn start(config: Config, reactors: &Reactors) -> Result<Server, ListenError> {
        // The user behind a connection through an RDMA device is not known.
        let own_user_only = config.own_user_only && matches!(config.provider, Provider::Iwarp(_));
        let acceptor = Acceptor::new("iSER", config.connections_max, own_user_only);
        let shared = Shared { targets: config.targets, acceptor: Arc::clone(&acceptor) };
        let service = Arc::new(Service { provider: config.provider, shared });
        let mut addresses = Vec::new();
        for address in config.listen {
            let fail = |source| ListenError { address, source };
            let device = service.provider.open().map_err(fail)?;
            let listener = device.listen(address, &ListenOptions::default()).map_err(fail)?;
            addresses.push(Address::Tcp(listener.local_addr()));
            let (service, spreader) = (Arc::clone(&service), reactors.spreader());
            reactors.handles()[0].spawn(move || async move {
                let result = accept(&device, listener.local_addr(), &service, &spreader).await;
                drop(listener);
                tracing::error!(?result, protocol = "iSER", "no longer accepting connections");
            });
        }
        Ok(Server { addresses, acceptor })
    }

    /// The addresses it listens on, with the ports that the kernel chose.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Refuses new connections and asks every initiator to log out.
    pub fn close(&self) {
        self.acceptor.close();
    }

    /// Closes, and waits until every initiator has logged out, for at most `limit`.
    pub fn shut_down(&self, limit: Duration) {
        self.acceptor.shut_down(limit);
    }
}

async fn accept(device: &Device, local: SocketAddr, service: &Arc<Service>, reactors: &Spreader) -> io::Result<()> {
    let fd = device.wait_fd().try_clone_to_owned()?;
    // SAFETY: as in `drive`.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
    loop {
        while let Some(event) = device.poll_event() {
            if let ConnectionEvent::Request(request) = event {
                let Some(permit) = service.shared.acceptor.admit(request.peer(), local) else {
                    request.reject(&[]);
                    continue;
                };
                let service = Arc::clone(service);
                permit.serve(reactors, move |permit| async move { service.serve(request, &permit).await });
            }
        }
        if device.arm() {
            fd.readable().await?.clear_ready();
        }
    }
}

impl Service {
    async fn serve(&self, request: ConnectionRequest, permit: &Arc<Permit>) -> io::Result<()> {
        let (peer, portal) = (request.peer(), request.local().to_string());
        let (end, slots, peer_revokes) = End::accept(&self.provider, request).map_err(other)?;
        let used = Used::default();
        let closing = Rc::new(Cell::new(false));
        let (arrived, mut messages) = mpsc::unbounded_channel();
        let queue = Queue::new(Arc::clone(&slots), peer_revokes);
        // The connection owns the queue; until there is one, the login does.
        let login = Rc::new(queue);
        let mut driver = {
            let (queue, used, closing) = (Rc::clone(&login), Rc::clone(&used), Rc::clone(&closing));
            tokio::task::spawn_local(async move {
                if let Err(error) = drive(end, &queue, arrived, used, &closing).await {
                    tracing::info!(%peer, %error, "an iSER connection is lost");
                }
                queue.fail();
            })
        };
        let result = self.session(&login, &slots, &mut messages, &used, (peer, portal, permit)).await;
        closing.set(true);
        login.work.notify_one();
        // What has been queued is still sent, if the initiator takes it.
        if tokio::time::timeout(Duration::from_secs(5), &mut driver).await.is_err() {
            driver.abort();
        }
        result
    }

    async fn session(
        &self,
        queue: &Rc<Queue>,
        slots: &Arc<Buffer>,
        messages: &mut mpsc::UnboundedReceiver<(usize, usize)>,
        used: &Used,
        (peer, portal, permit): (SocketAddr, String, &Arc<Permit>),
    ) -> io::Result<()> {
        let shared = &self.shared;
        let Some(logged_in) = permit.handshake(LOGIN_TIMEOUT, self.log_in(queue, slots, messages, used)).await? else {
            return Ok(());
        };
        let session = Arc::clone(&logged_in.session);
        let parts = shared.parts(&peer.to_string(), portal, logged_in, permit);
        let closing = parts.closing.clone();
        let result = match session.settled().await {
            Ok(()) => {
                let connection = Connection::new(parts, Carrier::Iser(Rc::clone(queue)), None, false);
                let receiving = receive(&connection, queue, slots, messages, used);
                let result = connection.until_over(receiving, closing).await;
                connection.end().await;
                result
            }
            Err(e) => Err(e),
        };
        shared.targets.close(&session);
        result
    }

    async fn log_in(
        &self,
        queue: &Queue,
        slots: &Buffer,
        messages: &mut mpsc::UnboundedReceiver<(usize, usize)>,
        used: &Used,
    ) -> io::Result<Option<LoggedIn>> {
        let mut dialogue = Dialogue::new(Transport::Iser);
        while let Some((slot, len)) = messages.recv().await {
            let bytes = message(slots, slot, len);
            release(queue, used, slot);
            let (_, header, data) = decode(&bytes).ok_or_else(malformed)?;
            let (answer, text, next) = dialogue.request(&header, data, &self.shared.targets);
            queue.send(answer, &Body::Bytes(text), None);
            match next {
                Step::More => {}
                Step::Refused => return Ok(None),
                Step::Done(logged_in) => return Ok(Some(logged_in)),
            }
        }
        Ok(None)
    }
}

/// The receive of a message may be posted again.
fn release(queue: &Queue, used: &Used, slot: usize) {
    used.borrow_mut().push(slot);
    queue.work.notify_one();
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message that is no iSER control message")
}

async fn receive(
    connection: &Rc<Connection>,
    queue: &Queue,
    slots: &Buffer,
    messages: &mut mpsc::UnboundedReceiver<(usize, usize)>,
    used: &Used,
) -> io::Result<()> {
    loop {
        // What has arrived keeps its slot meanwhile, so that no more of it than that arrives.
        connection.room().await;
        let Some((slot, len)) = messages.recv().await else { return Ok(()) };
        let bytes = message(slots, slot, len);
        release(queue, used, slot);
        let (buffers, header, data) = decode(&bytes).ok_or_else(malformed)?;
        if let Flow::Stop = connection.pdu(header, buffers.into(), &mut Input::Message(data)).await? {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_are_taken_apart() {
        let mut bytes = vec![CONTROL | WRITE_VALID];
        bytes.resize(HEADER + BHS, 0);
        bytes[4..8].copy_from_slice(&7u32.to_be_bytes());
        bytes[8..16].copy_from_slice(&0x1000u64.to_be_bytes());
        bytes[HEADER + 7] = 3;
        bytes.extend_from_slice(b"abc\0");
        let (buffers, header, data) = decode(&bytes).unwrap();
        assert_eq!(buffers, AdvertisedBuffers { write: Some((7, 0x1000)), read: None });
        assert_eq!((header.data_len(), data), (3, &b"abc"[..]));
        assert!(decode(&bytes[..HEADER + BHS + 2]).is_none(), "data that is not all there");
        assert!(decode(&bytes[..40]).is_none());
        bytes[0] = 0x20;
        assert!(decode(&bytes).is_none(), "a hello");
    }
}
