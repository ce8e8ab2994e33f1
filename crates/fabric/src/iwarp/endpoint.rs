//! A queue pair and its socket: set-up, transfer, orderly end.

use super::completions::{CompletionRing, Polled};
use super::context::{Context, DrivenPair, Readiness};
use super::shared::SharedQueue;
use super::socket;
use super::transport::{Moved, Socket, Transport};
use crate::ConnectionInfo;
use crate::provider::{Event, QueuePairOps, RegionOps};
use crate::shm::Glance;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_iwarp::IoVecs;
use thruway_iwarp::connection::{self, Connection, ConnectionConfig, Posted, RecvEntry, Side};
use thruway_iwarp::mpa::{self, Agreement, Frame, Preferences};
use thruway_iwarp::regions::Stream;
use thruway_rdma_types::Access;
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{
    ConnectParams, ConnectionError, Error, QueuePairCaps, RecvRequest, Result, SendRequest, WorkCompletion,
};
use thruway_tcp::PathInfo;

/// Most bytes received or sent for one queue pair in one call of the driver. Other queue pairs and the caller wait for it.
///
/// In unit tests, less than the smallest receive buffer of a socket.
const TURN: usize = if cfg!(test) { 16 << 10 } else { 256 << 10 };
/// Most system calls to receive for one queue pair in one call of the driver. A short frame can take a system call of its own.
const RECEIVES_TURN: usize = 64;
/// How long a failed connection waits for the peer to read our Terminate and close.
const LINGER: Duration = Duration::from_secs(2);
/// Bytes that a peer may still send after our Terminate.
const LINGER_BYTES: usize = 256 << 20;
/// How long an orderly end may make no progress.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct Endpoint {
    /// How the device knows it.
    id: u64,
    /// How consumers and peers know it.
    number: u32,
    pd: u32,
    ctx: Arc<Context>,
    send_cq: Arc<CompletionRing>,
    recv_cq: Arc<CompletionRing>,
    caps: QueuePairCaps,
    /// Where receives come from, if they are shared.
    shared: Option<Arc<SharedQueue>>,
    /// It is connected through shared memory.
    is_by_shm: AtomicBool,
    /// There is more to do than to receive what comes. Changes under the lock.
    is_busy: AtomicBool,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    /// Receives posted before the connection is up.
    posted: VecDeque<RecvEntry>,
    info: Option<ConnectionInfo>,
    error: Option<ConnectionError>,
    iovecs: IoVecs,
}

enum Phase {
    Idle,
    Connecting(Connecting),
    Live(Box<Live>),
    /// Failed; reading away what the peer still sends so that it can read our Terminate.
    Lingering {
        stream: TcpStream,
        deadline: Instant,
        /// Bytes thrown away.
        read: usize,
    },
    Over,
}

struct Connecting {
    socket: Socket,
    peer: SocketAddr,
    /// The congestion control to use, if one is wanted.
    congestion: Option<String>,
    prefs: Preferences,
    /// The request frame and how much of it is out.
    request: Vec<u8>,
    sent: usize,
    reply: Vec<u8>,
    connected: bool,
    deadline: Instant,
}

struct Live {
    transport: Transport,
    connection: Connection,
    /// Reply frame bytes that go before the first FPDU.
    preamble: Vec<u8>,
    readable: bool,
    writable: bool,
    /// The peer's half is shut, behind what is still to be read: no edge will tell of that again.
    hung_up: bool,
    /// When an end that makes no progress is given up; and how much had been sent when it was set.
    deadline: Option<(Instant, u64)>,
    /// Something has been received or sent since that was last asked.
    moved: bool,
    /// Our half is shut.
    shut: bool,
    /// The peer's half is shut.
    ended: bool,
}

/// What is left to do after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing until the socket says so.
    Waiting,
    /// More could be done at once.
    Unfinished,
}

impl Endpoint {
    #[expect(clippy::too_many_arguments, reason = "what a queue pair is made of")]
    pub(super) fn new(
        id: u64,
        number: u32,
        pd: u32,
        ctx: Arc<Context>,
        send_cq: Arc<CompletionRing>,
        recv_cq: Arc<CompletionRing>,
        caps: QueuePairCaps,
        shared: Option<Arc<SharedQueue>>,
    ) -> Endpoint {
        let state =
            State { phase: Phase::Idle, posted: VecDeque::new(), info: None, error: None, iovecs: IoVecs::default() };
        Endpoint {
            id,
            number,
            pd,
            ctx,
            send_cq,
            recv_cq,
            caps,
            shared,
            is_by_shm: AtomicBool::new(false),
            is_busy: AtomicBool::new(true),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }

    /// Hands completions to those who poll for them now, or to their queues.
    fn deliver(&self, completions: &mut Vec<(Side, WorkCompletion)>, mut polled: Option<&mut Polled<'_>>) {
        for (side, completion) in completions.drain(..) {
            let ring = match side {
                Side::Send => &self.send_cq,
                Side::Recv => &self.recv_cq,
            };
            match &mut polled {
                Some(polled) if polled.takes(ring) => polled.put(completion),
                _ => ring.push(completion),
            }
        }
    }

    fn check_idle(&self, state: &State) -> Result<()> {
        if matches!(state.phase, Phase::Idle) {
            return Ok(());
        }
        Err(Error::State { qp_num: self.number, state: "connected or connecting already" })
    }

    /// Takes over an accepted socket whose peer is answered with `reply`.
    pub(super) fn accept(&self, socket: Socket, peer: SocketAddr, agreement: Agreement, reply: Vec<u8>) -> Result<()> {
        let mut guard = self.lock();
        self.check_idle(&guard)?;
        let local = socket.local_addr().unwrap_or(peer);
        let (transport, preamble) = socket.answer(reply).map_err(|e| Error::io("accepting a connection", e))?;
        self.ctx.watch(&transport, self.id).map_err(|e| Error::io("watching a connection", e))?;
        // Before anything can come of the connection, its end included.
        self.ctx.push_event(Event::Established { qp_num: self.number, private_data: Vec::new() });
        self.go_live(&mut guard, transport, (peer, local), agreement, false, preamble, &[]);
        let turn = self.serve(&mut guard, Readiness { readable: true, writable: true, hung_up: false }, None);
        drop(guard);
        self.after(turn);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn go_live(
        &self,
        state: &mut State,
        transport: Transport,
        (peer, local): (SocketAddr, SocketAddr),
        agreement: Agreement,
        initiator: bool,
        preamble: Vec<u8>,
        early: &[u8],
    ) {
        let max_ulpdu = self.ctx.config().max_ulpdu(&agreement, transport.max_segment());
        let mut connection = Connection::new(ConnectionConfig {
            qp_num: self.number,
            pd: self.pd,
            table: Arc::clone(self.ctx.table()),
            agreement,
            caps: self.caps,
            initiator,
            shared: self.shared.as_ref().map(|s| Arc::clone(&s.receives)),
            max_ulpdu,
        });
        connection.adopt_receives(std::mem::take(&mut state.posted));
        self.is_by_shm.store(matches!(transport, Transport::Shm(_)), Ordering::Relaxed);
        let on = |b: bool| if b { "on" } else { "off" };
        state.info = Some(ConnectionInfo {
            peer,
            local,
            ird: agreement.ird,
            ord: agreement.ord,
            provider: if self.is_by_shm() { "shm" } else { "iwarp" },
            path: None,
            detail: format!(
                "MPA revision {}, CRC {}, markers sent {} received {}, FPDU {} bytes, RFC 7306 {}, {}",
                agreement.revision,
                on(agreement.crc),
                on(agreement.send_markers),
                on(agreement.receive_markers),
                max_ulpdu,
                on(agreement.extensions),
                transport.detail(),
            ),
        });
        if !early.is_empty() {
            connection.rx_feed(early);
        }
        state.phase = Phase::Live(Box::new(Live {
            transport,
            connection,
            preamble,
            readable: true,
            writable: true,
            hung_up: false,
            deadline: None,
            moved: false,
            shut: false,
            ended: false,
        }));
        self.ctx.live_changed();
    }

    fn after(&self, turn: Turn) {
        if turn == Turn::Unfinished {
            self.ctx.mark_ready(self.id);
        }
    }

    /// An end has taken long. It goes on as long as the peer takes something.
    fn give_up(&self, state: &mut State, now: Instant) {
        let Phase::Live(live) = &mut state.phase else { return };
        let sent = live.connection.sent();
        if live.deadline.is_some_and(|(_, before)| before < sent) {
            live.deadline = Some((now + CLOSE_TIMEOUT, sent));
            return;
        }
        live.connection.fail_lost(ConnectionError::TimedOut);
        live.connection.tx_abandon();
        live.ended = true;
        self.settle(state, None);
    }

    /// As [`Endpoint::serve_now`]. A panic, which would be a fault of ours that a peer has found, ends this
    /// connection and no other.
    fn serve(&self, state: &mut State, socket: Readiness, polled: Option<&mut Polled<'_>>) -> Turn {
        let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.serve_now(state, socket, polled)));
        served.unwrap_or_else(|_| {
            self.contain(state);
            Turn::Waiting
        })
    }

    /// Ends a connection whose state cannot be trusted any more.
    fn contain(&self, state: &mut State) {
        tracing::error!(qp = self.number, "a connection's state machine panicked; please report this");
        state.phase = Phase::Over;
        self.announce_end(state, ConnectionError::Lost("an internal error".into()));
        self.ctx.live_changed();
    }

    fn serve_now(&self, state: &mut State, socket: Readiness, polled: Option<&mut Polled<'_>>) -> Turn {
        match &mut state.phase {
            Phase::Idle | Phase::Over => Turn::Waiting,
            Phase::Connecting(_) => self.advance_connect(state),
            Phase::Lingering { stream, deadline, read } => {
                let before = *read;
                while *read - before < TURN
                    && let Ok(n @ 1..) = socket::discard(stream, TURN)
                {
                    *read += n;
                }
                let spent = *read - before >= TURN;
                if *read >= LINGER_BYTES || *deadline <= Instant::now() || (!spent && is_at_end(stream)) {
                    self.over(state);
                    return Turn::Waiting;
                }
                if spent { Turn::Unfinished } else { Turn::Waiting }
            }
            Phase::Live(live) => {
                live.readable |= socket.readable;
                live.writable |= socket.writable;
                // A call may be about room.
                live.writable |= socket.readable && matches!(live.transport, Transport::Shm(_));
                if socket.hung_up {
                    live.hung_up = true;
                    live.transport.note_hang_up();
                }
                self.serve_live(state, polled)
            }
        }
    }

    fn serve_live(&self, state: &mut State, polled: Option<&mut Polled<'_>>) -> Turn {
        let State { phase: Phase::Live(live), iovecs, .. } = state else { return Turn::Waiting };
        let received = receive(live, iovecs);
        let sent = transmit(live, iovecs);
        if live.connection.is_over() {
            live.connection.fail_lost(ConnectionError::Closed);
        }
        // What was received may have been a request for something to send, and the other way
        // round a full pipe may have been emptied; one pass of each is enough per turn.
        if self.settle(state, polled) {
            return Turn::Waiting;
        }
        if received == Turn::Unfinished || sent == Turn::Unfinished { Turn::Unfinished } else { Turn::Waiting }
    }

    /// Moves an end on, after the queues have had their turn. True if the connection is no longer live.
    fn settle(&self, state: &mut State, polled: Option<&mut Polled<'_>>) -> bool {
        let Phase::Live(live) = &mut state.phase else { return true };
        self.deliver(&mut live.connection.completions, polled);
        let failed = live.connection.failure.is_some();
        if failed && live.connection.tx_idle() {
            self.wind_up(state);
            return true;
        }
        if live.connection.is_closing() && live.connection.is_drained() && !live.shut {
            live.shut = true;
            live.transport.end();
        }
        if (failed || live.connection.is_closing()) && live.deadline.is_none() {
            let patience = if failed { LINGER } else { CLOSE_TIMEOUT };
            live.deadline = Some((Instant::now() + patience, live.connection.sent()));
            self.ctx.start_timer();
        }
        let is_busy = failed || live.readable || live.connection.is_closing() || live.connection.has_unsent();
        if self.is_busy.load(Ordering::Relaxed) != is_busy {
            self.is_busy.store(is_busy, Ordering::Relaxed);
        }
        false
    }

    /// The connection has failed or ended, and what could be said has been said.
    fn wind_up(&self, state: &mut State) {
        let Phase::Live(live) = std::mem::replace(&mut state.phase, Phase::Over) else { return };
        let Live { mut transport, connection, ended, .. } = *live;
        let cause = connection.failure.clone().expect("checked by the caller");
        let told_peer = matches!(cause, ConnectionError::Protocol(_));
        self.announce_end(state, cause);
        transport.end();
        // What is in shared memory stays there for the peer.
        if let Transport::Tcp(stream) = transport
            && told_peer
            && !ended
        {
            // Closing now would reset the connection and could destroy the Terminate on its way.
            state.phase = Phase::Lingering { stream, deadline: Instant::now() + LINGER, read: 0 };
            self.ctx.start_timer();
        }
        self.ctx.live_changed();
    }

    fn announce_end(&self, state: &mut State, cause: ConnectionError) {
        tracing::debug!(qp = self.number, %cause, "connection ended");
        state.error = Some(cause.clone());
        self.ctx.push_event(Event::Disconnected { qp_num: self.number, cause });
    }

    /// Ends a connection that never came up.
    fn end(&self, state: &mut State, cause: ConnectionError) {
        self.over(state);
        self.deliver(&mut connection::flush_receives(self.number, std::mem::take(&mut state.posted)), None);
        self.announce_end(state, cause);
    }

    fn over(&self, state: &mut State) {
        state.phase = Phase::Over;
        self.ctx.live_changed();
    }

    /// The peer's reply of `used` bytes is in order; 0 if what is behind it does not matter. False if there is no connection all the
    /// same.
    fn connected(&self, state: &mut State, agreement: Agreement, used: usize) -> bool {
        let Phase::Connecting(c) = std::mem::replace(&mut state.phase, Phase::Over) else { return false };
        let local = c.socket.local_addr().unwrap_or(c.peer);
        let transport = match c.socket.into_transport() {
            Ok(transport) => transport,
            Err(error) => {
                self.end(state, ConnectionError::Lost(error.to_string()));
                return false;
            }
        };
        let early = match &transport {
            Transport::Tcp(_) if used > 0 => &c.reply[used..],
            // Calls for what is in the ring, which is looked at now.
            _ => &[],
        };
        self.go_live(state, transport, (c.peer, local), agreement, true, Vec::new(), early);
        true
    }

    fn advance_connect(&self, state: &mut State) -> Turn {
        let Phase::Connecting(c) = &mut state.phase else { return Turn::Waiting };
        match c.advance() {
            Ok(None) => Turn::Waiting,
            Ok(Some((frame, used))) => {
                if frame.reject {
                    self.end(state, ConnectionError::Rejected { private_data: frame.private_data });
                    return Turn::Waiting;
                }
                match mpa::conclude(&c.prefs, &frame) {
                    Err(code) => {
                        // The peer is told where there are the means to (RFC 6581 section 9): a reply that is in order
                        // but for the depths and the first message.
                        let plain = Frame { enhanced: None, ..frame };
                        let Ok(agreement) = mpa::conclude(&c.prefs, &plain) else {
                            self.end(state, ConnectionError::Protocol(code.into()));
                            return Turn::Waiting;
                        };
                        if !self.connected(state, agreement, 0) {
                            return Turn::Waiting;
                        }
                        // It was never established.
                        state.info = None;
                        if let Phase::Live(live) = &mut state.phase {
                            live.connection.fail_protocol(code, None);
                        }
                        self.serve_live(state, None)
                    }
                    Ok(agreement) => {
                        if !self.connected(state, agreement, used) {
                            return Turn::Waiting;
                        }
                        self.ctx
                            .push_event(Event::Established { qp_num: self.number, private_data: frame.private_data });
                        self.serve_live(state, None)
                    }
                }
            }
            Err(cause) => {
                self.end(state, cause);
                Turn::Waiting
            }
        }
    }

    fn post(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, Error)> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Phase::Live(live) = &mut state.phase else {
            let name = match state.phase {
                Phase::Idle => "not connected",
                Phase::Connecting(_) => "still connecting",
                _ => "in error",
            };
            return Err((0, Error::State { qp_num: self.number, state: name }));
        };
        let mut result = Ok(());
        let mut all_sent = false;
        if let [request] = requests {
            let posted = post_one(live, &mut state.iovecs, request);
            all_sent = matches!(posted, Ok(Posted::Sent));
            result = posted.map(drop).map_err(|error| (0, error));
        } else {
            for (index, request) in requests.iter().enumerate() {
                if let Err(error) = live.connection.post_send(request) {
                    result = Err((index, error));
                    break;
                }
            }
        }
        let sent = if all_sent { Turn::Waiting } else { transmit(live, &mut state.iovecs) };
        self.settle(state, None);
        drop(guard);
        self.after(sent);
        result
    }
}

/// Whether a non-blocking read finds the end of the stream (or its ruin).
fn is_at_end(stream: &TcpStream) -> bool {
    let mut one = [0; 1];
    match stream.peek(&mut one) {
        Ok(0) => true,
        Ok(_) => false,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    }
}

impl Connecting {
    /// Moves the set-up on. The reply and its length once it is whole.
    fn advance(&mut self) -> Result<Option<(Frame, usize)>, ConnectionError> {
        let lost = |e: std::io::Error| ConnectionError::Lost(e.to_string());
        if !self.connected {
            if !self.socket.connect_result().map_err(lost)? {
                return Ok(None);
            }
            self.connected = true;
            self.socket.tune(self.peer, self.congestion.as_deref());
        }
        while self.sent < self.request.len() {
            match self.socket.write(&self.request[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(lost(e)),
            }
        }
        loop {
            let mut chunk = [0; mpa::FRAME_HEADER_LEN + mpa::MAX_PRIVATE_DATA];
            match self.socket.read(&mut chunk) {
                Ok(0) => return Err(ConnectionError::Lost("closed during set-up".into())),
                Ok(n) => self.reply.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(lost(e)),
            }
            if let Some(whole) =
                Frame::decode(&self.reply, true).map_err(|code| ConnectionError::Protocol(code.into()))?
            {
                return Ok(Some(whole));
            }
        }
    }
}

fn receive(live: &mut Live, iovecs: &mut IoVecs) -> Turn {
    let (mut taken, mut calls) = (0, 0);
    while live.readable && live.connection.failure.is_none() {
        if taken >= TURN || calls >= RECEIVES_TURN {
            return Turn::Unfinished;
        }
        calls += 1;
        if !live.connection.rx_iovecs(iovecs) {
            break;
        }
        // SAFETY: `rx_iovecs` describes validated target memory, held until `rx_received`.
        match unsafe { live.transport.receive(iovecs) } {
            Ok(Moved::Nothing) => {
                live.readable = false;
                live.connection.rx_received(0);
            }
            Ok(Moved::Some(0)) => {
                live.readable = false;
                live.ended = true;
                live.connection.rx_eof();
            }
            Ok(moved @ (Moved::Last(n) | Moved::Some(n))) => {
                taken += n;
                live.moved = true;
                live.connection.rx_received(n);
                // The next arrival is a new edge, unless it was the end and came with what was read.
                live.readable = moved == Moved::Some(n) || live.hung_up;
            }
            Err(e) => {
                live.readable = false;
                live.ended = true;
                live.connection.fail_lost(ConnectionError::Lost(e.to_string()));
            }
        }
    }
    Turn::Waiting
}

/// Posts a request that is alone, and sends it at once if it can be.
fn post_one(live: &mut Live, iovecs: &mut IoVecs, request: &SendRequest<'_>) -> Result<Posted> {
    let Live { transport, connection, preamble, writable, moved, .. } = live;
    if !*writable || !preamble.is_empty() {
        connection.post_send(request)?;
        return Ok(Posted::Queued);
    }
    let mut failed = None;
    let posted = connection.post_short(request, |bytes| {
        let piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: it describes the bytes.
        match unsafe { transport.send(&[piece]) } {
            Ok(Moved::Nothing) => {
                *writable = false;
                0
            }
            Ok(how @ (Moved::Last(n) | Moved::Some(n))) => {
                *moved = true;
                *writable = how == Moved::Some(n);
                n
            }
            Err(error) => {
                failed = Some(error);
                0
            }
        }
    })?;
    if let Some(error) = failed {
        send_failed(live, iovecs, &error);
    }
    Ok(posted)
}

fn send_failed(live: &mut Live, iovecs: &mut IoVecs, error: &std::io::Error) {
    live.writable = false;
    // What the peer said before it went (a Terminate, perhaps) tells more than EPIPE.
    if live.connection.failure.is_none() {
        live.readable = true;
        receive(live, iovecs);
    }
    live.connection.fail_lost(ConnectionError::Lost(error.to_string()));
    live.connection.tx_abandon();
    live.ended = true;
}

fn transmit(live: &mut Live, iovecs: &mut IoVecs) -> Turn {
    while live.writable
        && !live.preamble.is_empty()
        && let Transport::Tcp(stream) = &mut live.transport
    {
        match stream.write(&live.preamble) {
            Ok(n) => drop(live.preamble.drain(..n)),
            Err(_) => live.writable = false,
        }
    }
    let mut given = 0;
    while live.writable && live.preamble.is_empty() && live.connection.tx_fill() {
        if given >= TURN {
            return Turn::Unfinished;
        }
        live.connection.tx_iovecs(iovecs);
        // SAFETY: the iovecs describe scratch and registered memory that the queues keep mapped.
        match unsafe { live.transport.send(iovecs) } {
            Ok(Moved::Nothing) => live.writable = false,
            Ok(moved @ (Moved::Last(n) | Moved::Some(n))) => {
                given += n;
                live.moved = true;
                live.connection.tx_advance(n);
                live.writable = moved == Moved::Some(n);
            }
            Err(e) => send_failed(live, iovecs, &e),
        }
    }
    if live.connection.failure.is_some() && live.ended {
        live.connection.tx_abandon();
    }
    Turn::Waiting
}

impl DrivenPair for Endpoint {
    fn qp_num(&self) -> u32 {
        self.number
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn is_by_shm(&self) -> bool {
        self.is_by_shm.load(Ordering::Relaxed)
    }

    fn glance(&self) -> Option<Arc<Glance>> {
        match &self.lock().phase {
            Phase::Live(live) => live.transport.glance(),
            _ => None,
        }
    }

    fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::Relaxed)
    }

    fn set_watched(&self, watched: bool) {
        let mut guard = self.lock();
        let stream = match &mut guard.phase {
            Phase::Live(live) => match &mut live.transport {
                Transport::Tcp(stream) => stream,
                Transport::Shm(channel) => {
                    channel.set_called(watched);
                    drop(guard);
                    if watched {
                        self.poll(Readiness { readable: true, writable: true, hung_up: false }, None);
                    }
                    return;
                }
            },
            Phase::Lingering { stream, .. } => stream,
            _ => return,
        };
        if !watched {
            self.ctx.unwatch(stream);
        } else if let Err(error) = self.ctx.watch(stream, self.id) {
            tracing::debug!(%error, "watching a connection again");
        }
    }

    fn poll(&self, socket: Readiness, polled: Option<&mut Polled<'_>>) -> bool {
        let mut guard = self.lock();
        let turn = self.serve(&mut guard, socket, polled);
        let moved = match &mut guard.phase {
            Phase::Live(live) => std::mem::take(&mut live.moved),
            _ => false,
        };
        drop(guard);
        self.after(turn);
        moved
    }

    fn tick(&self, now: Instant) -> bool {
        let mut guard = self.lock();
        match &guard.phase {
            Phase::Connecting(c) if c.deadline <= now => self.end(&mut guard, ConnectionError::TimedOut),
            Phase::Lingering { deadline, .. } if *deadline <= now => self.over(&mut guard),
            Phase::Live(live) if live.deadline.is_some_and(|(by, _)| by <= now) => self.give_up(&mut guard, now),
            _ => {}
        }
        match &guard.phase {
            Phase::Connecting(_) | Phase::Lingering { .. } => true,
            Phase::Live(live) => live.deadline.is_some(),
            Phase::Idle | Phase::Over => false,
        }
    }
}

impl QueuePairOps for Endpoint {
    fn number(&self) -> u32 {
        self.number
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, Error)> {
        self.post(requests)
    }

    fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        if self.shared.is_some() {
            return Err(Error::Unsupported("receives of its own for a queue pair that shares them"));
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        match &mut state.phase {
            Phase::Live(live) => live.connection.post_recv(request),
            Phase::Idle | Phase::Connecting(_) => {
                let posted = state.posted.len();
                let entry =
                    connection::resolve_recv(self.ctx.table(), self.pd, &self.caps, posted, request, &mut None)?;
                state.posted.push_back(entry);
                Ok(())
            }
            Phase::Lingering { .. } | Phase::Over => Err(Error::State { qp_num: self.number, state: "in error" }),
        }
    }

    fn bind(
        &self,
        region: &dyn RegionOps,
        offset: usize,
        len: usize,
        access: Access,
        wr_id: Option<u64>,
    ) -> Result<Arc<dyn RegionOps>> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Phase::Live(live) = &mut state.phase else {
            return Err(Error::State { qp_num: self.number, state: "not connected" });
        };
        live.connection.check_postable()?;
        let window = self.ctx.bind(Stream { pd: self.pd, qp_num: self.number }, region, offset, len, access)?;
        if let Some(wr_id) = wr_id {
            live.connection.post_bind(wr_id)?;
        }
        let sent = transmit(live, &mut state.iovecs);
        self.settle(state, None);
        drop(guard);
        self.after(sent);
        Ok(window)
    }

    fn connect(&self, addr: SocketAddr, params: &ConnectParams) -> Result<()> {
        let mut guard = self.lock();
        self.check_idle(&guard)?;
        let config = self.ctx.config();
        let prefs = config.preferences(params)?;
        let socket = self.ctx.start_connect(addr)?;
        let prefs = socket.preferences(prefs);
        self.ctx.watch(&socket, self.id).map_err(|e| Error::io("watching a connection", e))?;
        guard.phase = Phase::Connecting(Connecting {
            socket,
            peer: addr,
            congestion: config.congestion.clone(),
            prefs,
            request: mpa::request(&prefs, &params.private_data).encode(),
            sent: 0,
            reply: Vec::new(),
            connected: false,
            deadline: Instant::now() + params.timeout,
        });
        self.ctx.start_timer();
        Ok(())
    }

    fn disconnect(&self) {
        let mut guard = self.lock();
        match &mut guard.phase {
            Phase::Live(live) => {
                live.connection.close();
                let turn = self.serve(&mut guard, Readiness::default(), None);
                drop(guard);
                self.after(turn);
            }
            Phase::Connecting(_) => {
                self.end(&mut guard, ConnectionError::Closed);
            }
            _ => {}
        }
    }

    fn info(&self) -> Option<ConnectionInfo> {
        let path = self.path();
        let mut info = self.lock().info.clone()?;
        info.path = path;
        Some(info)
    }

    fn path(&self) -> Option<PathInfo> {
        match &self.lock().phase {
            Phase::Live(live) => live.transport.path(),
            Phase::Connecting(c) if c.connected => c.socket.path(),
            _ => None,
        }
    }

    fn acceptor(&self) -> Option<crate::Origin> {
        let state = self.lock();
        match (&state.phase, &state.info) {
            (Phase::Live(live), Some(info)) => Some(live.transport.acceptor(info.peer)),
            _ => None,
        }
    }

    fn error(&self) -> Option<ConnectionError> {
        self.lock().error.clone()
    }

    fn destroy(&self) {
        let mut guard = self.lock();
        if let Phase::Live(live) = &mut guard.phase {
            let last = std::panic::AssertUnwindSafe(|| transmit(live, &mut IoVecs::default()));
            if std::panic::catch_unwind(last).is_ok() {
                live.connection.give_back_receives();
            }
        }
        guard.phase = Phase::Over;
        guard.posted.clear();
        drop(guard);
        self.send_cq.room.give_back(self.caps.max_send_wr);
        match &self.shared {
            Some(shared) => shared.room.leave(&self.recv_cq),
            None => self.recv_cq.room.give_back(self.caps.max_recv_wr),
        }
        self.ctx.forget(self.id);
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
