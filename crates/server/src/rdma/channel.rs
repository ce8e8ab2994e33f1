//! An RDMA connection, driven by a task of the reactor that serves it or uses it.
//!
//! It has a device, a completion queue and message slots of its own. The [`Channel`] takes what is to be sent, read and
//! written; a task posts that, as far as the send queue has room, and takes completions; [`Messages`] are what the peer has sent.

use crate::budget::MESSAGES_MAX;
use crate::flag::Flag;
use crate::slices;
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Segment;
use thruway_fabric::slots::{Completed, MessageSlots, Received, Stored};
use thruway_fabric::{
    Access, Buffer, CompletionQueue, ConnectParams, ConnectionEvent, ConnectionRequest, Device, MemoryRegion, Payload,
    ProtectionDomain, Provider, QueuePair, QueuePairCaps, RemoteAddr, SendFlags, SendOp, SendRequest, Sge, Status,
    WorkCompletion,
};
use thruway_tcp::Origin;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

/// Requests posted by one call.
const BATCH_MAX: usize = 16;

/// Most events of the connection in one pass of the driver.
const EVENTS_OF_PASS: usize = 4;

/// Work of one pass of the driver, in units of [`slices`]: up to 256 KiB of frames of any length.
const PASS_UNITS: usize = 64;

/// The sizes of a channel.
#[derive(Debug, Clone)]
pub struct Options {
    /// Longest message each way, in bytes.
    pub message_max: usize,
    /// Receives posted: messages that the peer may send before the first is taken.
    pub receives: usize,
    /// Messages that may be in the send queue.
    pub sends: usize,
    /// Messages beside them that wait for their turn before [`Channel::room`] does.
    pub backlog_max: usize,
    /// Requests in the send queue, messages included; fewer where the device has no more.
    pub send_depth: usize,
    /// RDMA Reads outstanding, each way; fewer where the device has no more.
    pub read_depth: u16,
    /// What is sent with the acceptance, or with the request to connect.
    pub private_data: Vec<u8>,
}

/// Something for the send queue.
enum Request {
    Send { message: Stored, invalidate: Option<u32> },
    Write { segment: Segment, remote: RemoteAddr },
    Read { segment: Segment, remote: RemoteAddr, done: oneshot::Sender<Segment> },
}

/// What a posted request needs until it is complete.
enum Posted {
    Write { _segment: Segment },
    Read { segment: Segment, done: oneshot::Sender<Segment> },
}

/// The sending side of a connection.
pub struct Channel {
    domain: ProtectionDomain,
    slots: RefCell<MessageSlots>,
    requests: RefCell<VecDeque<Request>>,
    /// Messages that found no slot.
    backlog: RefCell<VecDeque<(Vec<u8>, Option<u32>)>>,
    backlog_max: usize,
    /// Messages that have been read, whose receives are to be posted again.
    consumed: RefCell<Vec<Received>>,
    work: Notify,
    /// Told when some of the backlog has found slots.
    sent: Notify,
    closing: Cell<bool>,
    broken: Rc<Flag>,
}

/// The messages that the peer has sent, in their order.
pub struct Messages {
    channel: Rc<Channel>,
    received: mpsc::UnboundedReceiver<Received>,
}

impl Messages {
    /// The next message; `None` when the connection has ended. Its receive is posted again at once: a service that is not
    /// ready for another message does not call.
    pub async fn recv(&mut self) -> Option<Vec<u8>> {
        let received = self.received.recv().await?;
        let message = self.channel.slots.borrow().read(received);
        self.channel.consumed.borrow_mut().push(received);
        self.channel.work.notify_one();
        Some(message)
    }
}

impl Channel {
    /// Accepts a connection, and drives it by a task on this thread's reactor.
    ///
    /// # Errors
    /// The device refuses, or the peer has given up.
    pub fn accept(
        provider: &Provider,
        request: ConnectionRequest,
        options: Options,
    ) -> thruway_fabric::Result<(Rc<Channel>, Messages, Driver)> {
        let peer = request.peer();
        let new = New::open(provider, &options)?;
        request.accept(&new.qp, &new.parameters(options.private_data.clone()))?;
        tracing::info!(%peer, "RDMA connection accepted");
        Ok(new.drive(&options, peer))
    }

    /// Connects to a server, and drives the connection by a task on this thread's reactor; also what the server has sent with its
    /// acceptance.
    ///
    /// # Errors
    /// The device's, or that the server cannot be reached or refuses.
    pub async fn connect(
        provider: &Provider,
        server: SocketAddr,
        options: Options,
    ) -> io::Result<(Rc<Channel>, Messages, Driver, Vec<u8>)> {
        let new = New::open(provider, &options).map_err(other)?;
        new.qp.connect(server, &new.parameters(options.private_data.clone())).map_err(other)?;
        let fd = new.device.wait_fd().try_clone_to_owned()?;
        // SAFETY: an owned descriptor stays open, and the same, until it is dropped with the registration.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        let private_data = loop {
            match new.device.poll_event() {
                Some(ConnectionEvent::Established { private_data, .. }) => break private_data,
                Some(ConnectionEvent::Disconnected { cause, .. }) => return Err(other(cause)),
                Some(_) => {}
                None if new.device.arm() => fd.readable().await?.clear_ready(),
                None => tokio::task::yield_now().await,
            }
        };
        drop(fd);
        let (channel, messages, driver) = new.drive(&options, server);
        Ok((channel, messages, driver, private_data))
    }

    /// The domain in which memory is to be registered for the peer.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }
    /// Sends a message, and with `invalidate` revokes a key of the peer's. Once the channel has failed it is dropped.
    pub fn send(&self, message: Vec<u8>, invalidate: Option<u32>) {
        if self.broken.is_set() {
            return;
        }
        if message.len() > self.slots.borrow().message_max() {
            tracing::error!(len = message.len(), "message longer than a slot: a bug of the service");
            return self.fail();
        }
        self.backlog.borrow_mut().push_back((message, invalidate));
        self.fill_slots();
        self.work.notify_one();
    }

    fn fill_slots(&self) {
        let (mut backlog, mut slots) = (self.backlog.borrow_mut(), self.slots.borrow_mut());
        while let Some((message, invalidate)) = backlog.pop_front() {
            let Some(stored) = slots.store(&message) else { return backlog.push_front((message, invalidate)) };
            self.requests.borrow_mut().push_back(Request::Send { message: stored, invalidate });
        }
    }

    /// Waits until the messages without a slot are below the limit, or the channel has failed. To be called before anything
    /// is done for a peer that may not take its replies.
    pub async fn room(&self) {
        loop {
            let notified = self.sent.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.backlog.borrow().len() < self.backlog_max || self.broken.is_set() {
                return;
            }
            notified.await;
        }
    }

    /// Writes a segment to the peer's memory. What is sent afterwards arrives afterwards.
    pub fn write(&self, segment: Segment, remote: RemoteAddr) {
        if self.broken.is_set() {
            return;
        }
        self.requests.borrow_mut().push_back(Request::Write { segment, remote });
        self.work.notify_one();
    }

    /// Fills a segment from the peer's memory; `None` if the channel has failed.
    pub async fn read(&self, segment: Segment, remote: RemoteAddr) -> Option<Segment> {
        if self.broken.is_set() {
            return None;
        }
        let (done, result) = oneshot::channel();
        self.requests.borrow_mut().push_back(Request::Read { segment, remote, done });
        self.work.notify_one();
        result.await.ok()
    }

    fn is_idle(&self) -> bool {
        self.requests.borrow().is_empty() && self.backlog.borrow().is_empty()
    }

    /// Ends the connection; what has not been sent is dropped.
    pub fn fail(&self) {
        self.broken.set();
        // Dropped when nothing is borrowed: who waits for their memory may look in here.
        let requests = std::mem::take(&mut *self.requests.borrow_mut());
        let backlog = std::mem::take(&mut *self.backlog.borrow_mut());
        drop((requests, backlog));
        self.sent.notify_waiters();
        self.work.notify_one();
    }

    /// Whether the channel has failed, or its connection has ended.
    pub fn is_broken(&self) -> bool {
        self.broken.is_set()
    }

    /// Resolves when the channel has failed, or its connection has ended.
    pub async fn broken(&self) {
        self.broken.wait().await;
    }

    /// Flag that is set when the channel has failed, or its connection has ended.
    pub fn failure(&self) -> Rc<Flag> {
        Rc::clone(&self.broken)
    }
}

/// A queue pair that is not connected yet, and what belongs to it.
struct New {
    qp: QueuePair,
    cq: CompletionQueue,
    slots: MessageSlots,
    pd: ProtectionDomain,
    device: Device,
    depth: usize,
    read_depth: u16,
}

impl New {
    fn open(provider: &Provider, options: &Options) -> thruway_fabric::Result<New> {
        let device = provider.open()?;
        let pd = device.alloc_pd()?;
        let attributes = device.attributes();
        let depth = options.send_depth.min(attributes.max_queue as usize);
        let cq = device.create_cq((depth + options.receives).min(attributes.max_cqe))?;
        let caps = QueuePairCaps { max_send_wr: depth as u32, max_recv_wr: options.receives as u32, max_sge: 1 };
        let qp = pd.create_qp(&cq, &cq, caps)?;
        let slots = MessageSlots::new(&pd, options.receives, options.sends, options.message_max)?;
        slots.post_receives(&qp)?;
        let read_depth = options.read_depth.min(attributes.max_read_depth);
        Ok(New { qp, cq, slots, pd, device, depth, read_depth })
    }

    fn parameters(&self, private_data: Vec<u8>) -> ConnectParams {
        ConnectParams { private_data, ird: self.read_depth, ord: self.read_depth, ..ConnectParams::default() }
    }

    /// Drives the connection by a task.
    fn drive(self, options: &Options, peer: SocketAddr) -> (Rc<Channel>, Messages, Driver) {
        let New { qp, cq, slots, pd, device, depth, .. } = self;
        let channel = Rc::new(Channel {
            domain: pd.clone(),
            slots: RefCell::new(slots),
            requests: RefCell::default(),
            backlog: RefCell::default(),
            backlog_max: options.backlog_max,
            consumed: RefCell::default(),
            work: Notify::new(),
            sent: Notify::new(),
            closing: Cell::new(false),
            broken: Rc::default(),
        });
        let (arrived, received) = mpsc::unbounded_channel();
        let end = End {
            qp,
            cq,
            posted: HashMap::new(),
            in_flight: 0,
            depth,
            next_id: 0,
            regions: Vec::new(),
            channel: Rc::clone(&channel),
            arrived,
            pd,
            device,
            host: Origin::of_host(peer.ip()),
        };
        let driven = Rc::clone(&channel);
        let task = tokio::task::spawn_local(async move {
            if let Err(error) = end.drive().await {
                tracing::info!(%peer, %error, "RDMA connection lost");
            }
            driven.fail();
        });
        let messages = Messages { channel: Rc::clone(&channel), received };
        (Rc::clone(&channel), messages, Driver { channel, task })
    }
}

/// The task that drives a channel.
#[must_use = "the connection is kept open until it is closed by this"]
pub struct Driver {
    channel: Rc<Channel>,
    task: JoinHandle<()>,
}

impl Driver {
    /// Sends what has been queued, if the peer takes it within `limit`, and closes the connection.
    pub async fn close(mut self, limit: Duration) {
        self.channel.closing.set(true);
        self.channel.work.notify_one();
        // What is not done by then is given up when this is dropped.
        let _ = tokio::time::timeout(limit, &mut self.task).await;
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.channel.fail();
        self.task.abort();
    }
}

/// The RDMA side of a connection. Fields are dropped in this order: the connection before its memory.
struct End {
    qp: QueuePair,
    cq: CompletionQueue,
    /// RDMA Reads and Writes in the send queue, by their work request ids.
    posted: HashMap<u64, Posted>,
    /// Requests in the send queue.
    in_flight: usize,
    /// Of the send queue.
    depth: usize,
    next_id: u64,
    /// Registrations of the buffers that segments are parts of.
    regions: Vec<(Arc<Buffer>, MemoryRegion)>,
    channel: Rc<Channel>,
    arrived: mpsc::UnboundedSender<Received>,
    pd: ProtectionDomain,
    device: Device,
    /// Host of the peer.
    host: Origin,
}

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl End {
    /// Where a segment is, in the registration of its buffer.
    fn sge(&mut self, segment: &Segment) -> thruway_fabric::Result<Sge> {
        let buffer = segment.buffer();
        let index = match self.regions.iter().position(|(known, _)| Arc::ptr_eq(known, buffer)) {
            Some(index) => index,
            None => {
                let region = self.pd.register(buffer, Access::LOCAL_WRITE)?;
                self.regions.push((Arc::clone(buffer), region));
                self.regions.len() - 1
            }
        };
        Ok(self.regions[index].1.sge(segment.offset(), segment.len() as u32))
    }

    fn keep(&mut self, posted: Posted) -> u64 {
        let id = self.next_id;
        // The two highest bits are the slots'.
        self.next_id = (self.next_id + 1) & (u64::MAX >> 2);
        self.posted.insert(id, posted);
        id
    }

    /// Posts what waits, as far as there is room, several requests by one call.
    fn post(&mut self) -> thruway_fabric::Result<()> {
        loop {
            let mut batch: SmallVec<[(u64, SendOp, Sge); BATCH_MAX]> = SmallVec::new();
            while batch.len() < BATCH_MAX && self.in_flight < self.depth {
                let Some(request) = self.channel.requests.borrow_mut().pop_front() else { break };
                self.in_flight += 1;
                batch.push(match request {
                    Request::Send { message, invalidate } => {
                        (message.wr_id(), SendOp::Send { invalidate }, self.channel.slots.borrow().sge(message))
                    }
                    Request::Write { segment, remote } => {
                        let sge = self.sge(&segment)?;
                        (self.keep(Posted::Write { _segment: segment }), SendOp::Write { remote, immediate: None }, sge)
                    }
                    Request::Read { segment, remote, done } => {
                        let sge = self.sge(&segment)?;
                        (self.keep(Posted::Read { segment, done }), SendOp::Read { remote }, sge)
                    }
                });
            }
            if batch.is_empty() {
                return Ok(());
            }
            let requests: SmallVec<[SendRequest<'_>; BATCH_MAX]> = batch
                .iter()
                .map(|(wr_id, op, sge)| SendRequest {
                    wr_id: *wr_id,
                    op: *op,
                    payload: Payload::Sges(std::slice::from_ref(sge)),
                    flags: SendFlags::SIGNALED,
                })
                .collect();
            self.qp.post_sends(&requests).map_err(|(_, error)| error)?;
        }
    }

    /// Takes completions and events; false if there were none.
    fn collect(&mut self) -> io::Result<bool> {
        let mut completions: Vec<WorkCompletion> = Vec::new();
        self.cq.poll(&mut completions, MESSAGES_MAX);
        for done in &completions {
            if done.status != Status::Success {
                return Err(other(format!("{:?} over RDMA: {:?}", done.op, done.status)));
            }
            let completed = self.channel.slots.borrow_mut().complete(done);
            if let Completed::Received(received) = completed {
                let _ = self.arrived.send(received);
                continue;
            }
            self.in_flight -= 1;
            if let Completed::Sent = completed {
                self.channel.fill_slots();
                self.channel.sent.notify_waiters();
            } else if let Some(Posted::Read { segment, done }) = self.posted.remove(&done.wr_id) {
                drop(done.send(segment));
            }
        }
        let mut any = !completions.is_empty();
        for _ in 0..EVENTS_OF_PASS {
            let Some(event) = self.device.poll_event() else { break };
            any = true;
            if let ConnectionEvent::Disconnected { cause, .. } = event {
                return Err(other(cause));
            }
        }
        Ok(any)
    }

    /// Drives the connection until it is lost, or all has been sent after [`Driver::close`].
    async fn drive(mut self) -> io::Result<()> {
        let channel = Rc::clone(&self.channel);
        let fd = self.device.wait_fd().try_clone_to_owned()?;
        // SAFETY: an owned descriptor stays open, and the same, until it is dropped with the registration.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        loop {
            // A pass handles a bounded number of frames. They count as work, whatever they contain.
            slices::spend_for(Some(self.host), PASS_UNITS).await;
            for received in channel.consumed.borrow_mut().drain(..) {
                channel.slots.borrow().post_receive(&self.qp, received).map_err(other)?;
            }
            self.post().map_err(other)?;
            if self.collect()? || !channel.consumed.borrow().is_empty() {
                // The tasks that handle received messages run before more messages are received.
                tokio::task::yield_now().await;
                continue;
            }
            let is_done = channel.closing.get() && channel.is_idle() && self.in_flight == 0;
            if is_done || channel.broken.is_set() {
                self.qp.disconnect();
                return Ok(());
            }
            if !self.device.arm() {
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                ready = fd.readable() => ready?.clear_ready(),
                () = channel.work.notified() => {}
            }
        }
    }
}
