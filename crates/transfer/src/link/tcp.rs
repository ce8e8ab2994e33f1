//! The link over plain TCP, for hosts where iWARP framing is not wanted: a control connection and
//! data connections, each with a thread of its own.
//!
//! Large pieces that are neither encrypted nor from an endless source never enter this process:
//! `sendfile` at the source, `splice` at the sink. There are no credits: TCP's window and the
//! pool's blocks are the flow control.

use super::deferred_close::DeferredClose;
use super::{Call, ControlChannel, HEARTBEAT, JOIN_PATIENCE, LinkError, LinkEvent, Role, SILENCE_MAX, shake_hands};
use crate::auth::{Credentials, PublicKey, Secured};
use crate::session::Cancel;
use crate::wire::{
    AbortCode, BlockHeader, BlockKind, CONTROL_MAX, Control, HEADER_LEN, Hello, MAGIC, Malformed, Token,
};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use thruway_engine::OpenFile;
use thruway_engine::pool::{Block, BlockPool};
use thruway_fabric::{ConnectionError, Device};
use thruway_tcp::{Origin, PathInfo};

/// How long a peer may take to say who it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest greeting.
const GREETING_MAX: usize = 256;
/// Bytes a sealed control frame can have.
const FRAME_MAX: usize = CONTROL_MAX + 64;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause between two checks that a peer has accepted a connection over loopback.
const ACCEPT_POLL: Duration = Duration::from_millis(1);
/// Most memory in bytes of control messages that wait for the session's thread before the session. Further ones stay in the socket.
const WAITING_BEFORE: usize = 64 << 10;
/// The same in a session. A source sends less than this between two receives, so two ends cannot wait for each other.
const WAITING_IN_SESSION: usize = 32 << 20;
/// Memory of a waiting message beside its bytes.
const MESSAGE_OVERHEAD: usize = 128;
/// Most bytes of control messages that a closing link drops. Beyond that it closes at once.
const DROPPED_MAX: usize = 16 << 20;

/// Takes pieces of files off a socket.
pub(crate) trait Receive: Send + Sync {
    /// Moves `header.len` bytes from the socket to where they belong.
    ///
    /// # Errors
    /// If the socket fails, or the session cannot go on.
    fn piece(&self, header: &BlockHeader, stream: &TcpStream) -> io::Result<()>;
}

/// Reads a caller's greeting; `prefix` is what has been read of it already.
pub(crate) fn greet(mut stream: &TcpStream, prefix: &[u8]) -> io::Result<Hello> {
    let deadline = Instant::now() + GREETING_TIMEOUT;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "neither MPA nor RFTP");
    let mut seen = prefix.to_vec();
    let mut need = MAGIC.len() + 2;
    while seen.len() < need || need == MAGIC.len() + 2 {
        let known = seen.len().min(MAGIC.len());
        if seen[..known] != MAGIC[..known] {
            return Err(invalid());
        }
        if seen.len() >= MAGIC.len() + 2 {
            let len = usize::from(u16::from_be_bytes([seen[4], seen[5]]));
            if len > GREETING_MAX {
                return Err(invalid());
            }
            need = MAGIC.len() + 2 + len;
            if seen.len() >= need {
                break;
            }
        }
        // Byte-exact: what follows the greeting is somebody else's.
        let mut chunk = vec![0; need - seen.len()];
        // All of it by then, not each byte.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        let n = stream.read(&mut chunk)?;
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        seen.extend_from_slice(&chunk[..n]);
    }
    if seen.len() > need {
        return Err(invalid());
    }
    let hello = Hello::decode(&seen[MAGIC.len() + 2..]).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    stream.set_read_timeout(None)?;
    Ok(hello)
}

fn dial(addr: SocketAddr, hello: &Hello) -> Result<TcpStream, LinkError> {
    let lost = |e: io::Error| LinkError::Closed(ConnectionError::Lost(e.to_string()));
    let mut stream = TcpStream::connect_timeout(&addr, CONNECT_TIMEOUT).map_err(lost)?;
    prepare(&stream, addr).map_err(lost)?;
    let body = hello.encode();
    let mut greeting = MAGIC.to_vec();
    greeting.extend_from_slice(&(body.len() as u16).to_be_bytes());
    greeting.extend_from_slice(&body);
    stream.write_all(&greeting).map_err(lost)?;
    Ok(stream)
}

/// Opens a data connection, which over loopback must lead to this peer.
fn dial_data(addr: SocketAddr, hello: &Hello, expected: Option<Origin>) -> Result<TcpStream, LinkError> {
    let stream = dial(addr, hello)?;
    let Some(expected) = expected else { return Ok(stream) };
    let lost = |e: io::Error| LinkError::DataLost(ConnectionError::Lost(e.to_string()));
    let local = stream.local_addr().map_err(lost)?;
    let deadline = Instant::now() + JOIN_PATIENCE;
    loop {
        match Origin::of_acceptor(addr, local) {
            found if found == expected => return Ok(stream),
            // It waits to be accepted, or has been closed.
            Origin::UnknownUser if Instant::now() < deadline => std::thread::sleep(ACCEPT_POLL),
            found => return Err(super::led_astray(found, expected)),
        }
    }
}

fn prepare(stream: &TcpStream, peer: SocketAddr) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    thruway_tcp::tune(stream, peer, None);
    Ok(())
}

/// Sends a message of the control connection, in front of which stands its length.
///
/// # Errors
/// [`LinkError::Silent`] if the peer takes nothing for as long as `control` waits: some of the message may have gone, and
/// nothing that came behind it would be understood.
fn send_frame(mut control: &TcpStream, message: &[u8]) -> Result<(), LinkError> {
    let mut frame = (message.len() as u16).to_be_bytes().to_vec();
    frame.extend_from_slice(message);
    control.write_all(&frame).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => LinkError::Silent,
        _ => LinkError::Closed(ConnectionError::Lost(e.to_string())),
    })
}

/// What threads of the link tell the session's own.
enum News {
    Control(Vec<u8>),
    ControlEnded(ConnectionError),
    Sent(Block, u32),
    Received(Block, BlockHeader),
    Placed {
        sequence: u32,
        len: u32,
    },
    Malformed(Malformed),
    DataEnded(ConnectionError),
    /// A data channel that was to be opened has been, or could not be.
    Opened(Result<TcpStream, LinkError>, Role),
}

/// Takes so much news at a time, so that what it leads to is done before there is more.
const NEWS_TOGETHER: usize = 256;
/// Events that wait for the session's thread. Senders of more are blocked, and with them the peer.
const NEWS_MAX: usize = 1024;

#[derive(Clone)]
struct Teller {
    sender: SyncSender<News>,
    device: Device,
}

impl Teller {
    fn tell(&self, news: News) {
        let _ = self.sender.send(news);
        self.device.wake();
    }
}

/// A block to send: with `file`, the header only, and the payload from there.
struct Outgoing {
    block: Block,
    header: BlockHeader,
    file: Option<Arc<OpenFile>>,
}

pub(crate) struct TcpLink {
    device: Device,
    control: Arc<TcpStream>,
    held: Arc<Held>,
    /// Ends the session from outside.
    cancel: Option<Cancel>,
    teller: Teller,
    news: Receiver<News>,
    secured: Option<Secured>,
    raw: VecDeque<Vec<u8>>,
    /// Memory of the messages put into `raw` and `ready` since both were empty.
    waiting: usize,
    pool: Option<Arc<BlockPool>>,
    data: Vec<Arc<TcpStream>>,
    /// Data channels that are being opened.
    opening: usize,
    /// The peer of the control connection, if data connections over loopback must lead to the same.
    expected: Option<Origin>,
    /// The session goes on without data channels that fail to open from now on.
    joined: bool,
    /// Takes pieces off data channels, at a sink.
    receive: Option<Arc<dyn Receive>>,
    /// To the sending threads; they share one queue, so that a slow channel takes less.
    outgoing: Option<Sender<Outgoing>>,
    queue: Arc<Mutex<Receiver<Outgoing>>>,
    ready: VecDeque<LinkEvent>,
    heard: Instant,
    spoken: Instant,
    /// The control connection has ended; what it said is still to be read.
    ended: Option<ConnectionError>,
    close: DeferredClose,
}

impl TcpLink {
    pub(crate) fn connect(device: Device, call: &Call<'_>) -> Result<(TcpLink, Option<PublicKey>), LinkError> {
        let stream = dial(call.addr, &call.hello())?;
        let mut link = TcpLink::new(device, stream)?;
        let peer = link.shake(shake_hands(call.credentials, call.token, true))?;
        link.expected = link.acceptor().filter(|_| call.addr.ip().to_canonical().is_loopback());
        // Not before: the peer must have seen the greeting that goes before theirs.
        if let Some((token, count, role)) = call.early_channels(link.control_path()) {
            link.open_data(call.addr, token, count, role)?;
        }
        Ok((link, peer))
    }

    pub(crate) fn accept(
        device: Device,
        stream: TcpStream,
        credentials: &Credentials,
        token: Token,
    ) -> Result<(TcpLink, Option<PublicKey>), LinkError> {
        let lost = |e: io::Error| LinkError::Closed(ConnectionError::Lost(e.to_string()));
        let peer = stream.peer_addr().map_err(lost)?;
        prepare(&stream, peer).map_err(lost)?;
        let mut link = TcpLink::new(device, stream)?;
        let peer = link.shake(shake_hands(credentials, token, false))?;
        Ok((link, peer))
    }

    fn new(device: Device, control: TcpStream) -> Result<TcpLink, LinkError> {
        let (sender, news) = sync_channel(NEWS_MAX);
        let teller = Teller { sender, device: device.clone() };
        let control = Arc::new(control);
        let (reader, voice, held) = (Arc::clone(&control), teller.clone(), Arc::new(Held::default()));
        let hold = Arc::clone(&held);
        spawn("control", move || read_control(&reader, &voice, &hold))?;
        let (outgoing, queue) = channel();
        Ok(TcpLink {
            device,
            control,
            held,
            cancel: None,
            teller,
            news,
            secured: None,
            raw: VecDeque::new(),
            waiting: 0,
            pool: None,
            data: Vec::new(),
            opening: 0,
            expected: None,
            joined: false,
            receive: None,
            outgoing: Some(outgoing),
            queue: Arc::new(Mutex::new(queue)),
            ready: VecDeque::new(),
            heard: Instant::now(),
            spoken: Instant::now(),
            ended: None,
            close: DeferredClose::default(),
        })
    }

    pub(crate) fn attach(&mut self, pool: &Arc<BlockPool>) {
        self.pool = Some(Arc::clone(pool));
    }

    /// What the peer says on the control connection is left there, or taken again; what it sends is taken all the time.
    pub(crate) fn hold_control(&self, hold: bool) {
        self.held.set(hold);
    }

    /// The link's connections end with the session that is ended by this, whatever its thread waits for.
    pub(crate) fn end_with(&mut self, cancel: &Cancel) {
        cancel.watch_control(&self.control);
        self.data.iter().for_each(|stream| cancel.watch_data(stream));
        self.cancel = Some(cancel.clone());
    }

    /// Starts to open data channels, all at once.
    pub(crate) fn open_data(
        &mut self,
        addr: SocketAddr,
        token: Token,
        count: u32,
        role: Role,
    ) -> Result<(), LinkError> {
        for _ in 0..count {
            let channel = (self.data.len() + self.opening) as u32 + 1;
            let (teller, hello, expected) = (self.teller.clone(), Hello::Data { token, channel }, self.expected);
            let open = move || teller.tell(News::Opened(dial_data(addr, &hello, expected), role));
            spawn("open", open)?;
            self.opening += 1;
        }
        Ok(())
    }

    /// Waits until so many data channels are open.
    pub(crate) fn until_joined(&mut self, count: usize) -> Result<(), LinkError> {
        let deadline = Instant::now() + JOIN_PATIENCE;
        while self.data.len() < count {
            let left = deadline.checked_duration_since(Instant::now()).ok_or(LinkError::Silent)?;
            self.turn(left)?;
        }
        self.joined = true;
        Ok(())
    }

    /// Data channels, with those in progress.
    pub(crate) fn count(&self) -> usize {
        self.data.len() + self.opening
    }

    /// What is known of the data channels' paths.
    pub(crate) fn paths(&self) -> Vec<PathInfo> {
        self.data.iter().filter_map(|stream| PathInfo::of(stream)).collect()
    }

    /// What is known of the path to the peer.
    pub(crate) fn control_path(&self) -> Option<PathInfo> {
        PathInfo::of(&self.control)
    }

    /// As [`super::Link::acceptor`].
    pub(crate) fn acceptor(&self) -> Option<Origin> {
        let (peer, local) = (self.control.peer_addr().ok()?, self.control.local_addr().ok()?);
        Some(Origin::of_acceptor(peer, local))
    }

    pub(crate) fn accept_data(&mut self, stream: TcpStream, role: Role) -> Result<(), LinkError> {
        let lost = |e: io::Error| LinkError::DataLost(ConnectionError::Lost(e.to_string()));
        let peer = stream.peer_addr().map_err(lost)?;
        prepare(&stream, peer).map_err(lost)?;
        self.add_data(stream, role)
    }

    fn add_data(&mut self, stream: TcpStream, role: Role) -> Result<(), LinkError> {
        let stream = Arc::new(stream);
        self.cancel.iter().for_each(|cancel| cancel.watch_data(&stream));
        if role == Role::Source {
            let (writer, queue, teller) = (Arc::clone(&stream), Arc::clone(&self.queue), self.teller.clone());
            spawn("send", move || send_blocks(&writer, &queue, &teller))?;
            // Nothing comes this way; an idle channel that dies would else not be noticed.
            let (reader, teller) = (Arc::clone(&stream), self.teller.clone());
            spawn("watch", move || teller.tell(News::DataEnded(await_end(&reader))))?;
        }
        if role == Role::Sink && self.receive.is_some() {
            self.receive_from(&stream)?;
        }
        self.data.push(stream);
        Ok(())
    }

    pub(crate) fn start_receiving(&mut self, receive: &Arc<dyn Receive>) -> Result<(), LinkError> {
        self.receive = Some(Arc::clone(receive));
        self.data.iter().try_for_each(|stream| self.receive_from(stream))
    }

    fn receive_from(&self, stream: &Arc<TcpStream>) -> Result<(), LinkError> {
        let (Some(pool), Some(receive)) = (self.pool.clone(), self.receive.clone()) else {
            return Err(LinkError::Unexpected("block"));
        };
        let (stream, teller) = (Arc::clone(stream), self.teller.clone());
        spawn("receive", move || receive_blocks(&stream, &pool, &*receive, &teller))
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn stream(
        &mut self,
        block: Block,
        header: BlockHeader,
        file: Option<Arc<OpenFile>>,
    ) -> Result<(), LinkError> {
        let outgoing = self.outgoing.as_ref().ok_or(LinkError::Unexpected("block"))?;
        // The receiving end of this channel is ours too.
        let _ = outgoing.send(Outgoing { block, header, file });
        Ok(())
    }

    pub(crate) fn send(&mut self, message: &Control) -> Result<(), LinkError> {
        let secured = self.secured.as_mut().ok_or(LinkError::Unexpected("message before the handshake"))?;
        let sealed = secured.seal(&message.encode(0));
        self.send_bytes(&sealed)
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        self.spoken = Instant::now();
        match send_frame(&self.control, bytes) {
            // Why the peer went may be on its way to us: let the next turn find out.
            Err(LinkError::Closed(_)) if self.ended.is_none() => Ok(()),
            result => result,
        }
    }

    pub(crate) fn abort(&mut self, code: AbortCode, why: String) {
        let _ = self.send(&Control::Abort(code, why));
    }

    pub(crate) fn poll(&mut self, limit: Duration) -> Result<VecDeque<LinkEvent>, LinkError> {
        if self.ready.is_empty() {
            self.turn(limit)?;
        }
        let ready = std::mem::take(&mut self.ready);
        self.make_room();
        Ok(ready)
    }

    /// Makes room for further control messages when all have been taken.
    fn make_room(&mut self) {
        if self.ready.is_empty() && self.raw.is_empty() && self.waiting > 0 {
            self.held.taken(std::mem::take(&mut self.waiting));
        }
    }

    /// The session begins: its thread takes messages from now on.
    pub(crate) fn begin(&self) {
        self.held.set_limit(WAITING_IN_SESSION);
    }

    pub(crate) fn turn(&mut self, limit: Duration) -> Result<(), LinkError> {
        self.make_room();
        if !self.take_news()? {
            // The end comes after everything that was said before it.
            if let Some(cause) = &self.ended {
                return Err(LinkError::Closed(cause.clone()));
            }
            let now = Instant::now();
            if now.duration_since(self.heard) > SILENCE_MAX {
                return Err(LinkError::Silent);
            }
            if now.duration_since(self.spoken) > HEARTBEAT && self.secured.is_some() {
                self.send(&Control::Receives)?;
            }
            self.device.wait(Some(self.close.wait_max(limit.min(HEARTBEAT))))?;
            self.take_news()?;
        }
        self.close.report_if_due(self.ready.is_empty() && self.raw.is_empty())
    }

    fn take_news(&mut self) -> Result<bool, LinkError> {
        let mut any = false;
        for _ in 0..NEWS_TOGETHER {
            let news = match self.news.try_recv() {
                Ok(news) => news,
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(any),
            };
            any = true;
            match news {
                News::Control(bytes) => {
                    self.heard = Instant::now();
                    self.waiting += bytes.len() + MESSAGE_OVERHEAD;
                    if self.secured.is_none() {
                        self.raw.push_back(bytes);
                    } else {
                        self.take_control(&bytes)?;
                    }
                }
                News::ControlEnded(cause) => self.ended = Some(cause),
                News::Sent(block, sequence) => self.ready.push_back(LinkEvent::Written(block, Some(sequence))),
                News::Received(block, header) => {
                    self.heard = Instant::now();
                    self.ready.push_back(LinkEvent::Received(block, header));
                }
                News::Placed { sequence, len } => {
                    self.heard = Instant::now();
                    self.ready.push_back(LinkEvent::Placed { sequence, len });
                }
                News::Malformed(malformed) => return Err(malformed.into()),
                News::DataEnded(cause) => self.close.record(cause, self.control_path().map(|p| p.round_trip)),
                News::Opened(opened, role) => {
                    self.opening -= 1;
                    match opened {
                        Ok(stream) => self.add_data(stream, role)?,
                        Err(error) if self.joined => tracing::debug!(%error, "no further data channel"),
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(any)
    }

    fn take_control(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        let secured = self.secured.as_mut().ok_or(LinkError::Unexpected("message before the handshake"))?;
        let plain = secured.open(bytes)?;
        let (message, _) = Control::decode(&plain)?;
        if message != Control::Receives {
            self.ready.push_back(LinkEvent::Control(message));
        }
        Ok(())
    }

    /// As [`super::Link::close`], or as [`super::Link::leave`] if nothing is `expected` of the peer.
    pub(crate) fn close(mut self, expected: bool) {
        let _ = self.control.shutdown(Shutdown::Write);
        if !expected && self.control_path().is_some_and(|p| p.round_trip >= super::channel_scaler::ROUND_TRIP_MIN) {
            return;
        }
        self.ready.clear();
        self.raw.clear();
        self.make_room();
        self.held.set(false);
        let start = Instant::now();
        let mut dropped = 0;
        while self.ended.is_none() && dropped < DROPPED_MAX && start.elapsed() < Duration::from_secs(2) {
            let news = match self.news.try_recv() {
                Ok(news) => news,
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => match self.device.wait(Some(Duration::from_millis(50))) {
                    Ok(()) => continue,
                    Err(_) => return,
                },
            };
            match news {
                News::ControlEnded(_) => return,
                // Dropped without decryption.
                News::Control(bytes) => {
                    dropped += bytes.len();
                    self.held.taken(bytes.len() + MESSAGE_OVERHEAD);
                }
                _ => {}
            }
        }
    }
}

impl ControlChannel for TcpLink {
    fn state(&mut self) -> (&mut VecDeque<Vec<u8>>, &mut Option<Secured>, &mut VecDeque<LinkEvent>) {
        (&mut self.raw, &mut self.secured, &mut self.ready)
    }

    fn say(&mut self, bytes: Vec<u8>) -> Result<(), LinkError> {
        self.send_bytes(&bytes)
    }

    fn hear(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        self.take_control(bytes)
    }

    fn turn(&mut self, limit: Duration) -> Result<(), LinkError> {
        TcpLink::turn(self, limit)
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        // The threads have the sockets too; this makes their calls return.
        self.outgoing = None;
        for stream in self.data.iter().chain([&self.control]) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.held.update(|state| (state.is_held, state.limit) = (false, usize::MAX));
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), LinkError> {
    let spawned = std::thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(run);
    let failed = |source| thruway_fabric::Error::Io { op: "starting a thread", peer: None, source };
    Ok(spawned.map(drop).map_err(failed)?)
}

/// Control messages that the reader may read ahead of the session's thread.
struct Held {
    state: Mutex<HeldState>,
    changed: Condvar,
}

struct HeldState {
    /// Messages stay in the socket.
    is_held: bool,
    /// Memory of the messages that have been read and not taken.
    waiting: usize,
    /// Messages stay in the socket while `waiting` is at least this.
    limit: usize,
}

impl Default for Held {
    fn default() -> Held {
        let state = HeldState { is_held: false, waiting: 0, limit: WAITING_BEFORE };
        Held { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl Held {
    fn update(&self, change: impl FnOnce(&mut HeldState)) {
        change(&mut self.state.lock().expect("no panics under the lock"));
        self.changed.notify_all();
    }

    fn set(&self, hold: bool) {
        self.update(|state| state.is_held = hold);
    }

    fn set_limit(&self, limit: usize) {
        self.update(|state| state.limit = limit);
    }

    /// Messages with this memory have been taken.
    fn taken(&self, memory: usize) {
        self.update(|state| state.waiting = state.waiting.saturating_sub(memory));
    }

    fn add(&self, memory: usize) {
        self.state.lock().expect("no panics under the lock").waiting += memory;
    }

    /// Waits until another message may be read.
    fn wait(&self) {
        let state = self.state.lock().expect("no panics under the lock");
        let must_wait = |state: &mut HeldState| state.is_held || state.waiting >= state.limit;
        drop(self.changed.wait_while(state, must_wait).expect("no panics under the lock"));
    }
}

fn read_control(mut stream: &TcpStream, teller: &Teller, held: &Held) {
    let mut read = || -> io::Result<Vec<u8>> {
        let mut len = [0; 2];
        stream.read_exact(&mut len)?;
        let len = usize::from(u16::from_be_bytes(len));
        if len > FRAME_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a control frame that is too long"));
        }
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    loop {
        held.wait();
        match read() {
            Ok(bytes) => {
                held.add(bytes.len() + MESSAGE_OVERHEAD);
                teller.tell(News::Control(bytes));
            }
            Err(e) => return teller.tell(News::ControlEnded(cause_of(&e))),
        }
    }
}

fn cause_of(error: &io::Error) -> ConnectionError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => ConnectionError::Closed,
        _ => ConnectionError::Lost(error.to_string()),
    }
}

fn await_end(mut stream: &TcpStream) -> ConnectionError {
    match stream.read(&mut [0]) {
        Ok(0) => ConnectionError::Closed,
        Ok(_) => ConnectionError::Lost("data from a sink".into()),
        Err(e) => cause_of(&e),
    }
}

fn send_blocks(stream: &TcpStream, queue: &Mutex<Receiver<Outgoing>>, teller: &Teller) {
    loop {
        let next = queue.lock().expect("no panics under the lock").recv();
        let Ok(outgoing) = next else { return };
        if let Err(e) = send_block(stream, &outgoing) {
            return teller.tell(News::DataEnded(cause_of(&e)));
        }
        teller.tell(News::Sent(outgoing.block, outgoing.header.sequence));
    }
}

fn send_block(mut stream: &TcpStream, outgoing: &Outgoing) -> io::Result<()> {
    let len = outgoing.header.len as usize;
    let Some(file) = &outgoing.file else {
        // Header and payload are neighbours.
        return stream.write_all(outgoing.block.joined(HEADER_LEN, len));
    };
    let mut header = [0; HEADER_LEN];
    outgoing.header.encode(&mut header);
    let mut sent = 0;
    while sent < HEADER_LEN {
        sent += rustix::net::send(stream, &header[sent..], rustix::net::SendFlags::MORE)?;
    }
    let mut offset = outgoing.header.offset;
    let mut left = len;
    while left > 0 {
        match rustix::fs::sendfile(stream, file, Some(&mut offset), left) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::InvalidData, "a file shrank while it was sent")),
            Ok(n) => left -= n,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn receive_blocks(stream: &TcpStream, pool: &Arc<BlockPool>, receive: &dyn Receive, teller: &Teller) {
    loop {
        match receive_block(stream, pool, receive) {
            Ok(news) => teller.tell(news),
            Err(e) => return teller.tell(News::DataEnded(cause_of(&e))),
        }
    }
}

fn receive_block(mut stream: &TcpStream, pool: &Arc<BlockPool>, receive: &dyn Receive) -> io::Result<News> {
    let mut bytes = [0; HEADER_LEN];
    stream.read_exact(&mut bytes)?;
    let header = match BlockHeader::decode(&bytes, pool.payload_len()) {
        Ok(header) => header,
        Err(malformed) => return Ok(News::Malformed(malformed)),
    };
    if header.kind == BlockKind::Data && !header.sealed {
        receive.piece(&header, stream)?;
        return Ok(News::Placed { sequence: header.sequence, len: header.len });
    }
    let mut block = loop {
        if let Some(block) = pool.take(Duration::from_secs(1)) {
            break block;
        }
        // Has the session ended meanwhile?
        if stream.peer_addr().is_err() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    let len = header.len as usize;
    let (head, payload) = block.with_header_mut(HEADER_LEN);
    head.copy_from_slice(&bytes);
    stream.read_exact(&mut payload[..len])?;
    Ok(News::Received(block, header))
}

/// Moves bytes from a socket into a file at `offset`, or nowhere, through a pipe, inside the
/// kernel.
pub(crate) fn splice(stream: &TcpStream, file: Option<&File>, offset: u64, len: u32) -> io::Result<()> {
    thread_local! {
        static PIPE: std::cell::RefCell<Option<Pipe>> = const { std::cell::RefCell::new(None) };
    }
    PIPE.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Some(Pipe::new()?);
        }
        let pipe = slot.as_ref().expect("just made");
        let done = pipe.transfer(stream, file, offset, len as usize);
        if done.is_err() {
            // Something may be left inside.
            *slot = None;
        }
        done
    })
}

struct Pipe {
    read: std::os::fd::OwnedFd,
    write: std::os::fd::OwnedFd,
    null: File,
}

impl Pipe {
    fn new() -> io::Result<Pipe> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let _ = rustix::pipe::fcntl_setpipe_size(&write, 1 << 20);
        Ok(Pipe { read, write, null: File::options().write(true).open("/dev/null")? })
    }

    fn transfer(&self, stream: &TcpStream, file: Option<&File>, offset: u64, len: usize) -> io::Result<()> {
        use rustix::pipe::{SpliceFlags, splice};
        let mut left = len;
        let mut at = offset;
        while left > 0 {
            let n = match splice(stream, None, &self.write, None, left, SpliceFlags::MOVE | SpliceFlags::MORE) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => n,
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            let mut inside = n;
            while inside > 0 {
                let (target, position) = match file {
                    Some(file) => (file.as_fd(), Some(&mut at)),
                    None => (self.null.as_fd(), None),
                };
                match splice(&self.read, None, target, position, inside, SpliceFlags::MOVE) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(moved) => inside -= moved,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            left -= n;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_peer_that_takes_no_control_messages_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let control = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _peer = listener.accept().unwrap();
        control.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let message = vec![7; 10_000];
        // Far more than the system keeps for a peer that reads nothing.
        let refused = (0..10_000).find_map(|_| send_frame(&control, &message).err());
        assert!(matches!(refused, Some(LinkError::Silent)), "{refused:?}");
    }

    fn pair() -> (TcpLink, TcpLink) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let (credentials, token) = (Credentials::Secret([5; 32]), [6; 16]);
        let open = || thruway_fabric::iwarp::Config::default().open().unwrap();
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let call = Call { addr, credentials: &credentials, token, early: None };
                TcpLink::connect(open(), &call).unwrap().0
            });
            let (stream, _) = listener.accept().unwrap();
            greet(&stream, &[]).unwrap();
            let accepted = TcpLink::accept(open(), stream, &credentials, token).unwrap().0;
            (accepted, caller.join().unwrap())
        })
    }

    #[test]
    fn a_data_connection_over_loopback_leads_to_the_user_of_its_session() {
        let (_accepted, link) = pair();
        let own = link.expected.unwrap();
        assert!(own.is_own_user());
        let (listener, hello) =
            (TcpListener::bind("127.0.0.1:0").unwrap(), &Hello::Data { token: [6; 16], channel: 1 });
        let addr = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            for (expected, is_right) in [(own, true), (Origin::User(4242), false)] {
                let opening = scope.spawn(move || dial_data(addr, hello, Some(expected)));
                let _accepted = listener.accept().unwrap();
                assert_eq!(opening.join().unwrap().is_ok(), is_right, "{expected}");
            }
        });
    }

    /// As while a session waits for its data channels.
    #[test]
    fn messages_that_are_not_taken_stay_in_the_socket() {
        let (mut link, mut peer) = pair();
        peer.control.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let sent = std::thread::spawn(move || {
            let message = |n| Control::Abort(AbortCode::Failed, format!("{n} {}", "x".repeat(4000)));
            // Far more than the system keeps.
            let refused = (0..100_000).find(|n| peer.send(&message(*n)).is_err());
            (refused, peer)
        });
        while !sent.is_finished() {
            link.turn(Duration::from_millis(10)).unwrap();
        }
        let (refused, peer) = sent.join().unwrap();
        let refused = refused.expect("the peer has to wait");
        let waiting = link.held.state.lock().unwrap().waiting;
        assert!(waiting < WAITING_BEFORE + FRAME_MAX + MESSAGE_OVERHEAD, "{waiting} bytes");
        // In the session they are taken, in their order.
        link.begin();
        let mut heard = 0;
        while heard < refused {
            for event in link.poll(Duration::from_secs(10)).unwrap() {
                let LinkEvent::Control(Control::Abort(_, text)) = event else { panic!("another event") };
                assert_eq!(text.split(' ').next(), Some(&*heard.to_string()));
                heard += 1;
            }
        }
        drop(peer);
        link.close(true);
    }

    #[test]
    fn a_link_that_closes_drops_the_messages_of_its_peer() {
        let (link, mut peer) = pair();
        let message = Control::Abort(AbortCode::Failed, "x".repeat(4000));
        // Four times the limit, which the buffers of the sockets hold.
        for _ in 0..4 * WAITING_BEFORE / 4000 {
            peer.send(&message).unwrap();
        }
        drop(peer);
        let held = Arc::clone(&link.held);
        link.close(true);
        let waiting = held.state.lock().unwrap().waiting;
        assert!(waiting < WAITING_BEFORE, "{waiting} bytes, so the reader waits");
    }
}
