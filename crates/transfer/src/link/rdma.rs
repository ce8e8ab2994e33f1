//! The link over RDMA: one control queue pair (Send and Receive, encrypted) and any number of data
//! queue pairs (RDMA Write, each write followed by its completion notification).

use super::channel_scaler::{BUSY_BLOCKS, BUSY_BYTES, ROUND_TRIP_MIN};
use super::deferred_close::DeferredClose;
use super::{Call, ControlChannel, HEARTBEAT, LinkError, LinkEvent, Role, SILENCE_MAX, shake_hands};
use crate::auth::{Credentials, PublicKey, SEAL_LEN, Secured};
use crate::protocol::{CREDITS_PER_REPLY, WINDOW_MAX};
use crate::wire::{
    self, AbortCode, AuthKind, COMPLETION_LEN, CONTROL_MAX, Completion, Control, Credit, HEADER_LEN, Hello, Malformed,
    Token,
};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_engine::pool::{Block, BlockPool, Exposed};
use thruway_fabric::slots::{Completed, MessageSlots, Received};
use thruway_fabric::{
    Access, Buffer, CompletionOp, CompletionQueue, ConnectParams, ConnectionError, ConnectionEvent, ConnectionRequest,
    Device, Error, MemoryRegion, Payload, ProtectionDomain, QueuePair, QueuePairCaps, RecvRequest, RemoteAddr,
    SendFlags, SendOp, SendRequest, Status, WorkCompletion,
};
use thruway_tcp::{Origin, PathInfo};

/// Receives each end keeps posted for control messages.
const CONTROL_RECEIVES: usize = 20;
/// Receives of these kept back for messages that only return receives.
const CONTROL_RESERVE: usize = 8;
/// A message that only returns receives is due when this many have been used.
const RETURN_AT: usize = (CONTROL_RECEIVES - CONTROL_RESERVE) / 2;
const SLOT_LEN: usize = 8192;
const NOTICE_LEN: usize = 32;

// Work request ids of the data queue pairs; those of control messages are [`MessageSlots`]'.
const KIND_NOTICE_RECV: u64 = 1 << 56;
const KIND_WRITE: u64 = 2 << 56;
const KIND_BIND: u64 = 3 << 56;
const KIND_MASK: u64 = 0xff << 56;

/// One end of a session's connections.
pub(crate) struct RdmaLink {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    control: QueuePair,
    slots: MessageSlots,
    outbox: VecDeque<Control>,
    /// Time at which the peer last accepted one of them, or the first one was queued.
    taken: Instant,
    /// Credits of the peer for any channel are revoked with their notification.
    peer_revocable: bool,
    secured: Option<Secured>,
    raw: VecDeque<Vec<u8>>,
    /// Control messages the peer has room for, [`CONTROL_RESERVE`] not counted.
    peer_room: usize,
    /// Receives posted again and not yet told to the peer.
    owed: usize,
    /// Control messages put into `ready` since it was empty.
    waiting: usize,
    data: Vec<DataChannel>,
    /// Data channels that this end has opened.
    numbered: u32,
    /// The peer of the control connection, if data connections over loopback must lead to the same.
    expected: Option<Origin>,
    /// Windows that the device has not bound yet.
    binding: usize,
    /// The path to the peer is a long one, over TCP.
    long: bool,
    /// The session goes on without data channels that fail to open from now on.
    joined: bool,
    /// The blocks, once they are attached, and their registration.
    pool: Option<(Arc<BlockPool>, MemoryRegion)>,
    /// Blocks being written, by their number.
    writing: Vec<Option<(Exposed, u32)>>,
    completions: Vec<WorkCompletion>,
    ready: VecDeque<LinkEvent>,
    /// Why the session cannot go on, once what came before that is taken.
    ended: Option<LinkError>,
    close: DeferredClose,
    heard: Instant,
    spoken: Instant,
}

struct DataChannel {
    qp: QueuePair,
    /// What credits call it; the connecting end's choice.
    number: u32,
    role: Role,
    notices: Option<(Arc<Buffer>, MemoryRegion)>,
    /// Writes in progress.
    under_way: usize,
    bytes_under_way: u64,
    /// Credits of ours that only it can use, and has not.
    granted: usize,
    /// It can be used.
    established: bool,
}

/// A credit for the peer.
pub struct Window {
    /// What to tell the peer.
    pub credit: Credit,
    /// Keeps the peer's right alive; gone as soon as the peer has used it.
    #[expect(dead_code, reason = "dropping it revokes the right")]
    region: MemoryRegion,
}

impl RdmaLink {
    fn new(device: Device) -> Result<RdmaLink, LinkError> {
        let pd = device.alloc_pd()?;
        // A device with smaller queues serves fewer channels.
        let wanted = 4 * CONTROL_RECEIVES + CHANNEL_COMPLETIONS * wire::CHANNELS_MAX as usize;
        let cq = device.create_cq(wanted.min(device.attributes().max_cqe))?;
        let depth = CONTROL_RECEIVES as u32;
        let control = pd.create_qp(&cq, &cq, QueuePairCaps { max_send_wr: depth, max_recv_wr: depth, max_sge: 1 })?;
        let slots = MessageSlots::new(&pd, CONTROL_RECEIVES, CONTROL_RECEIVES, SLOT_LEN)?;
        slots.post_receives(&control)?;
        Ok(RdmaLink {
            device,
            pd,
            cq,
            control,
            slots,
            outbox: VecDeque::new(),
            taken: Instant::now(),
            secured: None,
            raw: VecDeque::new(),
            peer_room: CONTROL_RECEIVES - CONTROL_RESERVE,
            owed: 0,
            waiting: 0,
            peer_revocable: true,
            data: Vec::new(),
            numbered: 0,
            expected: None,
            binding: 0,
            long: false,
            joined: false,
            pool: None,
            writing: Vec::new(),
            completions: Vec::new(),
            ready: VecDeque::new(),
            ended: None,
            close: DeferredClose::default(),
            heard: Instant::now(),
            spoken: Instant::now(),
        })
    }

    /// Connects to a peer and proves who we are.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn connect(device: Device, call: &Call<'_>) -> Result<(RdmaLink, Option<PublicKey>), LinkError> {
        let mut link = RdmaLink::new(device)?;
        let mut handshake = shake_hands(call.credentials, call.token, true);
        // The handshake begins in the connection request where that has room for it: a round trip less.
        let mut private_data = call.hello().encode();
        let first = handshake.write();
        let rides = private_data.len() + first.len() <= link.device.attributes().max_private_data;
        if rides {
            private_data.extend_from_slice(&first);
        }
        link.control.connect(call.addr, &ConnectParams { private_data, ..ConnectParams::default() })?;
        // The data channels, as soon as the path is known to be long; the daemon hears of them after this one.
        let mut opened = false;
        while link.control.info().is_none() {
            link.device.progress();
            if !opened && let Some((token, count, role)) = call.early_channels(link.control.path()) {
                link.open_data(call.addr, token, count, role)?;
                opened = true;
            }
            link.turn(Duration::from_secs(1))?;
        }
        if !opened && let Some((token, count, role)) = call.early_channels(link.control.path()) {
            link.open_data(call.addr, token, count, role)?;
        }
        if !rides {
            link.send_bytes(first)?;
        }
        let peer = link.shake(handshake)?;
        link.expected = link.acceptor().filter(|_| call.addr.ip().to_canonical().is_loopback());
        Ok((link, peer))
    }

    /// Accepts a peer and has it prove who it is.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn accept(
        device: Device,
        request: ConnectionRequest,
        credentials: &Credentials,
        token: Token,
    ) -> Result<(RdmaLink, Option<PublicKey>), LinkError> {
        let mut link = RdmaLink::new(device)?;
        let mut handshake = shake_hands(credentials, token, false);
        let (_, behind) = Hello::decode_prefix(request.private_data())?;
        // Not padding.
        let first =
            behind.get(..AuthKind::of(credentials).first_message_len()).filter(|m| m.iter().any(|byte| *byte != 0));
        let (mut reply, mut second) = (Vec::new(), None);
        if let Some(first) = first {
            if let Err(error) = handshake.read(first) {
                request.reject(error.to_string().as_bytes());
                return Err(error.into());
            }
            let message = handshake.write();
            if 2 + message.len() <= link.device.attributes().max_reply_data {
                reply = [&(message.len() as u16).to_be_bytes()[..], &message].concat();
            } else {
                second = Some(message);
            }
        }
        request.accept(&link.control, &ConnectParams { private_data: reply, ..ConnectParams::default() })?;
        if let Some(message) = second {
            link.send_bytes(message)?;
        }
        let peer = link.shake(handshake)?;
        Ok((link, peer))
    }

    /// Gives the link the blocks it moves.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn attach(&mut self, pool: &Arc<BlockPool>) -> Result<(), LinkError> {
        let mr = self.pd.register(pool.buffer(), Access::LOCAL_WRITE)?;
        self.long = self.control_path().is_some_and(|p| p.round_trip >= ROUND_TRIP_MIN);
        self.writing = (0..pool.count()).map(|_| None).collect();
        self.pool = Some((Arc::clone(pool), mr));
        Ok(())
    }

    fn attached(&self) -> Result<&(Arc<BlockPool>, MemoryRegion), LinkError> {
        self.pool.as_ref().ok_or(LinkError::Unexpected("block"))
    }

    fn until_established(&mut self, done: impl Fn(&RdmaLink) -> bool) -> Result<(), LinkError> {
        while !done(self) {
            self.turn(Duration::from_secs(1))?;
        }
        Ok(())
    }

    /// Opens the data channels of a session (connecting end).
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn open_data(
        &mut self,
        addr: SocketAddr,
        token: Token,
        count: u32,
        role: Role,
    ) -> Result<(), LinkError> {
        for _ in 0..count {
            self.numbered += 1;
            let hello = Hello::Data { token, channel: self.numbered };
            let params = ConnectParams { private_data: hello.encode(), ..ConnectParams::default() };
            let channel = self.new_channel(self.numbered, role)?;
            channel.qp.connect(addr, &params)?;
            self.data.push(channel);
        }
        Ok(())
    }

    /// Whether a block would leave soon. Where TCP carries the writes on a long path, a block that
    /// waits behind others of its channel could have left by another one.
    pub(crate) fn has_room(&self) -> bool {
        let room = |c: &DataChannel| c.under_way < BUSY_BLOCKS || c.bytes_under_way < BUSY_BYTES;
        !self.long || self.data.iter().any(|c| c.established && room(c))
    }

    /// Waits until so many data channels that this end opened can be used.
    pub(crate) fn until_joined(&mut self, count: usize) -> Result<(), LinkError> {
        self.until_established(|link| link.data.iter().filter(|c| c.established).count() >= count)?;
        self.joined = true;
        Ok(())
    }

    /// Data channels, with those in progress.
    pub(crate) fn count(&self) -> usize {
        self.data.len()
    }

    /// What is known of the data channels' paths.
    pub(crate) fn paths(&self) -> Vec<PathInfo> {
        self.data.iter().filter_map(|c| c.qp.info()?.path).collect()
    }

    /// Takes one data channel of a session (accepting end).
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn accept_data(&mut self, request: ConnectionRequest, role: Role) -> Result<(), LinkError> {
        let number = match Hello::decode(request.private_data())? {
            Hello::Data { channel, .. } => channel,
            Hello::Control { .. } => return Err(LinkError::Unexpected("kind of data channel")),
        };
        let mut channel = self.new_channel(number, role)?;
        if role == Role::Source {
            // For the sink's first, empty message.
            channel.qp.post_recv(&RecvRequest { wr_id: 0, sges: &[] })?;
        }
        request.accept(&channel.qp, &ConnectParams::default())?;
        channel.established = true;
        self.data.push(channel);
        Ok(())
    }

    fn new_channel(&self, number: u32, role: Role) -> Result<DataChannel, LinkError> {
        let (max_send_wr, max_recv_wr) = match role {
            Role::Source => (2 * WINDOW_MAX as u32, 1),
            // The first word, and the windows of credits.
            Role::Sink => (1 + WINDOW_MAX as u32, WINDOW_MAX as u32),
        };
        let qp = self.pd.create_qp(&self.cq, &self.cq, QueuePairCaps { max_send_wr, max_recv_wr, max_sge: 1 })?;
        let mut channel = DataChannel {
            qp,
            number,
            role,
            notices: None,
            under_way: 0,
            bytes_under_way: 0,
            granted: 0,
            established: false,
        };
        if role == Role::Sink {
            let buffer = Arc::new(Buffer::new(WINDOW_MAX * NOTICE_LEN).map_err(Error::from)?);
            let mr = self.pd.register(&buffer, Access::LOCAL_WRITE)?;
            channel.notices = Some((buffer, mr));
            for slot in 0..WINDOW_MAX {
                channel.post_notice_receive(slot)?;
            }
        }
        Ok(channel)
    }

    /// As [`super::Link::set_peer_revocable`].
    pub(crate) fn set_peer_revocable(&mut self, revocable: bool) {
        self.peer_revocable = revocable;
    }

    /// The device, to wake a thread waiting in [`RdmaLink::poll`].
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// What is known of the path to the peer.
    pub(crate) fn control_path(&self) -> Option<PathInfo> {
        self.control.path()
    }

    /// As [`super::Link::acceptor`].
    pub(crate) fn acceptor(&self) -> Option<Origin> {
        self.control.acceptor()
    }

    /// What carries it.
    pub(crate) fn provider(&self) -> &'static str {
        self.control.info().map_or("none", |info| info.provider)
    }

    /// What was agreed on the control connection, for people.
    pub(crate) fn describe(&self) -> String {
        self.control.info().map(|i| i.detail).unwrap_or_default()
    }

    /// Sends a control message, or queues it until the peer has room.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn send(&mut self, message: &Control) -> Result<(), LinkError> {
        self.queue(message.clone());
        self.flush()
    }

    /// Messages that wait for the peer to take earlier ones.
    pub(crate) fn backlog(&self) -> usize {
        self.outbox.len()
    }

    /// Says why the session ends, ahead of whatever waits to be said. Best effort.
    pub(crate) fn abort(&mut self, code: AbortCode, why: String) {
        self.outbox.clear();
        let _ = self.send(&Control::Abort(code, why));
    }

    /// Puts a message behind those that wait for room; credits join credits that wait.
    fn queue(&mut self, message: Control) {
        if let (Control::RegionReply(new), Some(Control::RegionReply(waiting))) = (&message, self.outbox.back_mut())
            && waiting.len() + new.len() <= CREDITS_PER_REPLY
        {
            waiting.extend_from_slice(new);
            return;
        }
        if self.outbox.is_empty() {
            self.taken = Instant::now();
        }
        self.outbox.push_back(message);
    }

    fn flush(&mut self) -> Result<(), LinkError> {
        while self.peer_room > 0 && self.slots.has_free() {
            // The peer may not hear of windows before they are there, and it hears by another queue pair than theirs.
            if self.binding > 0 && matches!(self.outbox.front(), Some(Control::RegionReply(_))) {
                break;
            }
            let Some(message) = self.outbox.pop_front() else { break };
            self.taken = Instant::now();
            self.peer_room -= 1;
            self.transmit(&message)?;
        }
        // Returning receives must not wait for room, or both ends could wait for each other; the
        // reserve is for this.
        if self.owed >= RETURN_AT && self.slots.has_free() {
            self.transmit(&Control::Receives)?;
        }
        Ok(())
    }

    fn transmit(&mut self, message: &Control) -> Result<(), LinkError> {
        // The receives we owe ride along.
        let plain = message.encode(self.owed as u8);
        debug_assert!(plain.len() <= CONTROL_MAX, "a control message of {} bytes", plain.len());
        self.owed = 0;
        let sealed = self.secured.as_mut().ok_or(LinkError::Unexpected("message before the handshake"))?.seal(&plain);
        self.send_bytes(sealed)
    }

    fn send_bytes(&mut self, bytes: Vec<u8>) -> Result<(), LinkError> {
        debug_assert!(bytes.len() <= SLOT_LEN && CONTROL_MAX + SEAL_LEN <= SLOT_LEN);
        let Some(stored) = self.slots.store(&bytes) else { return Err(LinkError::Unexpected("handshake length")) };
        self.slots.send(&self.control, stored).map_err(|error| match self.control.error() {
            Some(cause) => LinkError::Closed(cause),
            None => error.into(),
        })?;
        self.spoken = Instant::now();
        Ok(())
    }

    /// Posts a receive, unless the connection has ended: an event says why it has.
    fn post_control_receive(&self, received: Received) -> Result<(), LinkError> {
        match self.slots.post_receive(&self.control, received) {
            Err(error) if self.control.error().is_none() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Exposes a free block to the peer for one write.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn expose(&mut self, block: Block) -> Result<(Exposed, Window), LinkError> {
        let at = block.payload_offset() - HEADER_LEN;
        let len = HEADER_LEN + self.attached()?.0.payload_len();
        let (channel, region) = match self.expose_to_one(at, len)? {
            Some(bound) => bound,
            None => (0, self.attached()?.1.bind_window(at, len, Access::REMOTE_WRITE)?),
        };
        let credit = Credit { block: block.index(), channel, addr: region.addr(), rkey: region.rkey() };
        Ok((block.expose(), Window { credit, region }))
    }

    /// A window for one channel, the one that has fewest, where that is cheaper than one for all: so that those that
    /// are quick get more. None while none is open.
    fn expose_to_one(&mut self, at: usize, len: usize) -> Result<Option<(u32, MemoryRegion)>, LinkError> {
        let Some((_, mr)) = self.pool.as_ref().filter(|_| self.binds_windows()) else { return Ok(None) };
        let open = self.data.iter_mut().filter(|c| c.established && c.number != 0);
        let Some(channel) = open.min_by_key(|c| c.granted) else { return Ok(None) };
        match channel.qp.bind_window(mr, at, len, Access::REMOTE_WRITE, Some(KIND_BIND)) {
            Ok(window) => {
                channel.granted += 1;
                self.binding += 1;
                Ok(Some((channel.number, window)))
            }
            // It has not heard of the end of the requests before this one, or is about to end.
            Err(Error::QueueFull(_) | Error::State { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn binds_windows(&self) -> bool {
        let attributes = self.device.attributes();
        attributes.windows && !attributes.domain_windows
    }

    /// As [`super::Link::revocable`].
    pub(crate) fn revocable(&self) -> bool {
        self.device.attributes().remote_invalidate && !self.binds_windows()
    }

    /// Writes a block's header and `len` bytes of payload where the credit says, and the
    /// notification behind it, which also revokes the credit's key.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn write(
        &mut self,
        mut block: Block,
        len: u32,
        credit: &Credit,
        notice: &Completion,
    ) -> Result<(), LinkError> {
        // The notification waits in front of the header until it has left, as the block does.
        block.with_header_mut(HEADER_LEN + NOTICE_LEN).0[..COMPLETION_LEN].copy_from_slice(&notice.encode());
        let index = block.index() as usize;
        let sge = [self.attached()?.1.sge(block.payload_offset() - HEADER_LEN, HEADER_LEN as u32 + len)];
        let notice = [self.attached()?.1.sge(block.payload_offset() - HEADER_LEN - NOTICE_LEN, COMPLETION_LEN as u32)];
        let remote = RemoteAddr { addr: credit.addr, rkey: credit.rkey };
        let revoked = self.peer_revocable || credit.channel != 0;
        let requests = [
            SendRequest {
                wr_id: KIND_WRITE | index as u64,
                op: SendOp::Write { remote, immediate: None },
                payload: Payload::Sges(&sge),
                flags: SendFlags::empty(),
            },
            SendRequest {
                wr_id: KIND_WRITE | index as u64,
                op: SendOp::Send { invalidate: revoked.then_some(credit.rkey) },
                payload: Payload::Sges(&notice),
                flags: SendFlags::SIGNALED,
            },
        ];
        let open =
            self.data.iter_mut().filter(|c| c.established && (credit.channel == 0 || c.number == credit.channel));
        let channel = open.min_by_key(|c| c.bytes_under_way).ok_or(LinkError::Unexpected("block"))?;
        self.writing[index] = Some((block.expose(), len));
        channel.under_way += 1;
        channel.bytes_under_way += u64::from(len);
        if let Err((_, error)) = channel.qp.post_sends(&requests) {
            let cause = channel.qp.error().ok_or(error)?;
            self.lose(cause);
        }
        Ok(())
    }

    fn lose(&mut self, cause: ConnectionError) {
        self.close.record(cause, self.control_path().map(|p| p.round_trip));
    }

    /// What has come, waiting up to `limit` for the first of it. An empty list is no error: the
    /// wait may also have ended because somebody woke the device.
    ///
    /// # Errors
    /// [`LinkError`] once the session cannot go on.
    pub(crate) fn poll(&mut self, limit: Duration) -> Result<VecDeque<LinkEvent>, LinkError> {
        if self.ready.is_empty() {
            self.turn(limit)?;
        }
        let ready = std::mem::take(&mut self.ready);
        self.return_receives();
        Ok(ready)
    }

    /// Counts the receives of messages that have been taken as owed to the peer.
    fn return_receives(&mut self) {
        if self.ready.is_empty() {
            self.owed += std::mem::take(&mut self.waiting);
        }
    }

    /// Waits up to `limit` for something to happen. The end comes after everything that was said before it.
    pub(crate) fn turn(&mut self, limit: Duration) -> Result<(), LinkError> {
        if let Some(error) = self.ended.take() {
            return Err(error);
        }
        match self.go_on(limit) {
            Err(error) if !(self.ready.is_empty() && self.raw.is_empty()) => self.ended = Some(error),
            result => return result,
        }
        Ok(())
    }

    fn go_on(&mut self, limit: Duration) -> Result<(), LinkError> {
        self.return_receives();
        if self.owed >= RETURN_AT {
            // Before this end waits: the peer may have none left.
            self.flush()?;
        }
        let mut completions = std::mem::take(&mut self.completions);
        if self.cq.poll(&mut completions, 256) == 0 && !self.take_connection_event()? {
            let now = Instant::now();
            if now.duration_since(self.heard) > SILENCE_MAX {
                return Err(LinkError::Silent);
            }
            if now.duration_since(self.spoken) > HEARTBEAT && self.secured.is_some() && self.slots.has_free() {
                self.transmit(&Control::Receives)?;
            }
            self.device.wait(Some(self.close.wait_max(limit.min(HEARTBEAT))))?;
            self.cq.poll(&mut completions, 256);
        }
        for wc in completions.drain(..) {
            self.take_completion(&wc)?;
        }
        self.completions = completions;
        self.flush()?;
        if !self.outbox.is_empty() && self.taken.elapsed() > SILENCE_MAX {
            return Err(LinkError::Silent);
        }
        self.close.report_if_due(self.ready.is_empty() && self.raw.is_empty())
    }

    /// Takes what a failed connection had to say before it is reported as failed.
    fn last_words(&mut self) {
        let mut completions = Vec::new();
        while self.cq.poll(&mut completions, 64) > 0 {}
        for wc in completions {
            if wc.status == Status::Success {
                let _ = self.take_completion(&wc);
            }
        }
    }

    fn take_connection_event(&mut self) -> Result<bool, LinkError> {
        match self.device.poll_event() {
            None => Ok(false),
            Some(ConnectionEvent::Established { qp_num, private_data }) => {
                if qp_num == self.control.number()
                    && self.secured.is_none()
                    && let Some((len, rest)) = private_data.split_first_chunk::<2>()
                    && let Some(message) = rest.get(..u16::from_be_bytes(*len).into()).filter(|m| !m.is_empty())
                {
                    // The handshake's second message.
                    self.raw.push_back(message.to_vec());
                }
                if let Some(at) = self.data.iter().position(|c| c.qp.number() == qp_num && !c.established) {
                    self.establish(at)?;
                }
                Ok(true)
            }
            Some(ConnectionEvent::Disconnected { qp_num, cause }) => {
                self.last_words();
                if qp_num == self.control.number() {
                    return Err(LinkError::Closed(cause));
                }
                if super::is_of_this_process(&cause) {
                    return Err(LinkError::DataLost(cause));
                }
                // One that was to be added and could not be is no loss.
                let before = self.data.len();
                self.data.retain(|c| !self.joined || c.established || c.qp.number() != qp_num);
                if self.data.len() == before {
                    self.lose(cause);
                }
                Ok(true)
            }
            Some(_) => Ok(true),
        }
    }

    /// A data channel that this end opened can be used, if it leads to the peer.
    fn establish(&mut self, at: usize) -> Result<(), LinkError> {
        let channel = &mut self.data[at];
        let found = channel.qp.acceptor();
        match (self.expected, found) {
            (Some(expected), Some(found)) if found != expected => {
                let error = super::led_astray(found, expected);
                if !self.joined {
                    return Err(error);
                }
                tracing::warn!(%error, "no further data channel");
                self.data.remove(at);
                Ok(())
            }
            // Its end is announced by another event.
            (_, None) => Ok(()),
            _ => {
                channel.established = true;
                channel.greet()
            }
        }
    }

    fn take_completion(&mut self, wc: &WorkCompletion) -> Result<(), LinkError> {
        if wc.status != Status::Success {
            // The connection event says why; it is on its way.
            return Ok(());
        }
        match self.slots.complete(wc) {
            Completed::Received(received) => {
                self.heard = Instant::now();
                let bytes = self.slots.read(received);
                self.post_control_receive(received)?;
                if self.secured.is_some() {
                    return self.take_control(&bytes);
                }
                if self.raw.len() >= CONTROL_RECEIVES {
                    return Err(LinkError::Unexpected("message during the handshake"));
                }
                self.raw.push_back(bytes);
                return Ok(());
            }
            Completed::Sent => return Ok(()),
            Completed::Other => {}
        }
        let index = (wc.wr_id & !KIND_MASK) as usize;
        match wc.wr_id & KIND_MASK {
            KIND_WRITE if wc.op == CompletionOp::Send => {
                let (block, len) = self.writing[index].take().ok_or(LinkError::Unexpected("write completion"))?;
                if let Some(channel) = self.data.iter_mut().find(|c| c.qp.number() == wc.qp_num) {
                    channel.under_way -= 1;
                    channel.bytes_under_way -= u64::from(len);
                }
                self.ready.push_back(LinkEvent::Written(block.reclaim(), None));
                Ok(())
            }
            KIND_BIND => {
                self.binding -= 1;
                Ok(())
            }
            KIND_NOTICE_RECV => {
                self.heard = Instant::now();
                let channel = self.data.iter_mut().find(|c| c.qp.number() == wc.qp_num);
                let channel = channel.ok_or(LinkError::Unexpected("notification"))?;
                channel.granted = channel.granted.saturating_sub(1);
                let (buffer, _) = channel.notices.as_ref().ok_or(LinkError::Unexpected("notification"))?;
                let mut bytes = [0; COMPLETION_LEN];
                if wc.len as usize != COMPLETION_LEN {
                    return Err(Malformed("block completion").into());
                }
                buffer.read(index * NOTICE_LEN, &mut bytes);
                let completion = Completion::decode(&bytes)?;
                channel.post_notice_receive(index)?;
                self.ready.push_back(LinkEvent::Arrived(completion));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn take_control(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        let plain = self.secured.as_mut().expect("checked by the callers").open(bytes)?;
        let (message, receives) = Control::decode(&plain)?;
        self.peer_room = (self.peer_room + usize::from(receives)).min(CONTROL_RECEIVES - CONTROL_RESERVE);
        if message != Control::Receives {
            // The receives of messages that have not been taken are not returned.
            if self.waiting >= CONTROL_RECEIVES {
                return Err(LinkError::Unexpected("control message without a receive"));
            }
            self.waiting += 1;
            self.ready.push_back(LinkEvent::Control(message));
        }
        Ok(())
    }

    /// Control messages wait that can still be sent. After the end of the control connection there are none; the slots of its
    /// failed sends stay in use.
    fn has_unsent(&self) -> bool {
        self.control.error().is_none() && !(self.outbox.is_empty() && self.slots.all_sent())
    }

    /// Closes in order, and waits a moment for the peer to do the same, so that the last message
    /// is not lost to a reset: unless nothing more is `expected` of the peer, and the path is a long one, where TCP has the
    /// last message by then and sees to it.
    pub(crate) fn close(mut self, expected: bool) {
        let start = Instant::now();
        let limit = Duration::from_secs(2);
        while self.has_unsent() && start.elapsed() < limit {
            if let Err(error) = self.turn(Duration::from_millis(100))
                && !matches!(error, LinkError::DataLost(_))
            {
                return;
            }
        }
        self.control.disconnect();
        if self.long && !expected {
            return;
        }
        let mut ignored = Vec::new();
        while self.control.error().is_none() && start.elapsed() < limit {
            // Completions that are not taken would keep the device awake.
            while self.cq.poll(&mut ignored, 64) > 0 || self.device.poll_event().is_some() {
                ignored.clear();
            }
            if self.control.error().is_none() && self.device.wait(Some(Duration::from_millis(50))).is_err() {
                return;
            }
        }
    }
}

impl ControlChannel for RdmaLink {
    fn state(&mut self) -> (&mut VecDeque<Vec<u8>>, &mut Option<Secured>, &mut VecDeque<LinkEvent>) {
        (&mut self.raw, &mut self.secured, &mut self.ready)
    }

    fn say(&mut self, bytes: Vec<u8>) -> Result<(), LinkError> {
        self.send_bytes(bytes)
    }

    fn hear(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        self.take_control(bytes)
    }

    fn turn(&mut self, limit: Duration) -> Result<(), LinkError> {
        RdmaLink::turn(self, limit)
    }
}

/// Completion queue entries one data channel can need.
const CHANNEL_COMPLETIONS: usize = 2 * WINDOW_MAX + 1;

impl DataChannel {
    /// Where this end opened the channel and the blocks come from the other, says a first word: an
    /// iWARP responder may not send before the initiator has (RFC 5044 §7.1.3).
    fn greet(&self) -> Result<(), LinkError> {
        if self.role == Role::Sink {
            self.qp.post_send(&SendRequest {
                wr_id: 0,
                op: SendOp::Send { invalidate: None },
                payload: Payload::Sges(&[]),
                flags: SendFlags::SIGNALED,
            })?;
        }
        Ok(())
    }

    fn post_notice_receive(&self, slot: usize) -> Result<(), LinkError> {
        let (_, mr) = self.notices.as_ref().expect("posted for sinks only");
        let sge = [mr.sge(slot * NOTICE_LEN, NOTICE_LEN as u32)];
        Ok(self.qp.post_recv(&RecvRequest { wr_id: KIND_NOTICE_RECV | slot as u64, sges: &sge })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_fabric::{ListenOptions, iwarp};

    fn pair() -> (RdmaLink, RdmaLink) {
        let open = || iwarp::Config::default().open().unwrap();
        let listening = open();
        let listener = listening.listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap();
        let (addr, credentials, token) = (listener.local_addr(), Credentials::Secret([5; 32]), [6; 16]);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let call = Call { addr, credentials: &credentials, token, early: None };
                RdmaLink::connect(open(), &call).unwrap().0
            });
            let request = loop {
                match listening.poll_event() {
                    Some(ConnectionEvent::Request(request)) => break request,
                    _ => listening.wait(None).unwrap(),
                }
            };
            let accepted = RdmaLink::accept(open(), request, &credentials, token).unwrap().0;
            (accepted, caller.join().unwrap())
        })
    }

    #[test]
    fn a_data_channel_over_loopback_leads_to_the_user_of_its_session() {
        let (_accepted, mut link) = pair();
        assert!(link.expected.unwrap().is_own_user());
        let listening = iwarp::Config::default().open().unwrap();
        let listener = listening.listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap();
        let addr = listener.local_addr();
        for (expected, is_right) in [(link.expected.unwrap(), true), (Origin::User(4242), false)] {
            link.expected = Some(expected);
            link.open_data(addr, [6; 16], 1, Role::Source).unwrap();
            let request = loop {
                match listening.poll_event() {
                    Some(ConnectionEvent::Request(request)) => break request,
                    _ => {
                        link.device.progress();
                        listening.wait(Some(Duration::from_millis(1))).unwrap();
                    }
                }
            };
            let mut peer = RdmaLink::new(listening.clone()).unwrap();
            peer.accept_data(request, Role::Sink).unwrap();
            let count = link.count();
            assert_eq!(link.until_joined(count).is_ok(), is_right, "{expected}");
            link.joined = false;
        }
    }

    /// A source sends its farewell while the sink closes without waiting for it.
    #[test]
    fn a_link_whose_peer_has_closed_has_nothing_left_to_send() {
        let (mut link, peer) = pair();
        drop(peer);
        while link.poll(Duration::from_secs(10)).is_ok() {}
        assert!(link.control.error().is_some());
        assert!(link.send(&Control::Farewell).is_err());
        assert!(!link.slots.all_sent(), "the slot of the failed send stays in use");
        link.queue(Control::Farewell);
        assert!(!link.has_unsent(), "the link would wait two seconds to send it");
        link.close(true);
    }
}
