//! Listening sockets, and connections whose request frame is not whole yet.

use super::context::{Context, DrivenSocket, Queued, UnpolledRequest};
use super::endpoint::Endpoint;
use super::set_up::Place;
use super::socket;
use super::transport::Socket;
use crate::ListenOptions;
use crate::provider::{Event, ListenerOps, QueuePairOps, RequestOps};
use crate::shm;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thruway_iwarp::mpa::{self, Frame};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{ConnectParams, Error, Result};
use thruway_tcp::Origin;

/// How long a connected peer may take to send its request frame.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes by which an MPA request is told from anything else.
const SNIFF_LEN: usize = 4;
/// Connections accepted in one turn.
const ACCEPT_TURN: usize = 64;

pub(super) struct ListeningSocket {
    pub(super) id: u64,
    socket: Listening,
    options: ListenOptions,
}

enum Listening {
    Tcp(TcpListener),
    Shm(shm::Listener),
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Listening::Tcp(socket) => socket.as_fd(),
            Listening::Shm(listener) => listener.socket.as_fd(),
        }
    }
}

impl ListeningSocket {
    pub(super) fn bind(id: u64, addr: SocketAddr, options: &ListenOptions) -> Result<ListeningSocket> {
        let failed = |e: rustix::io::Errno| Error::Io { op: "listening on", peer: Some(addr), source: e.into() };
        use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
        sockopt::set_socket_reuseaddr(&fd, true).map_err(failed)?;
        bind(&fd, &addr).map_err(failed)?;
        listen(&fd, options.backlog as i32).map_err(failed)?;
        Ok(ListeningSocket { id, socket: Listening::Tcp(TcpListener::from(fd)), options: options.clone() })
    }

    /// For connections through shared memory.
    pub(super) fn of_shm(
        id: u64,
        addr: SocketAddr,
        options: &ListenOptions,
        config: &shm::Config,
    ) -> Result<ListeningSocket> {
        let failed = |source| Error::Io { op: "listening for shared memory on", peer: Some(addr), source };
        let listener = shm::listen(addr, options.backlog, config).map_err(failed)?;
        Ok(ListeningSocket { id, socket: Listening::Shm(listener), options: options.clone() })
    }

    pub(super) fn local_addr(&self) -> std::io::Result<SocketAddr> {
        match &self.socket {
            Listening::Tcp(socket) => socket.local_addr(),
            Listening::Shm(listener) => Ok(listener.addr),
        }
    }

    fn accept(&self) -> std::io::Result<(Socket, SocketAddr, Origin)> {
        Ok(match &self.socket {
            Listening::Tcp(socket) => {
                let (stream, peer) = socket.accept()?;
                let origin = Origin::of_stream(&stream, peer);
                (Socket::Tcp(stream), peer, origin)
            }
            Listening::Shm(listener) => {
                let (socket, user) = listener.accept()?;
                (Socket::Shm(socket), SocketAddr::new(listener.addr.ip(), 0), Origin::user(user))
            }
        })
    }

    /// Accepts what is waiting. True if there may be more.
    fn accept_all(&self, ctx: &Arc<Context>) -> bool {
        for _ in 0..ACCEPT_TURN {
            match self.accept() {
                Ok((socket, peer, origin)) => {
                    ctx.make_room(origin, self.options.max_pending.max(1));
                    if let Err(error) = begin_request(ctx, socket, (peer, origin), self.options.accept_foreign) {
                        tracing::warn!(%peer, %error, "cannot serve a connection");
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return false,
                // Of one connection, not of listening (accept(2)).
                Err(e) if is_of_one_connection(&e) => {}
                Err(e) => {
                    // Out of descriptors or memory: what waits keeps until the next tick.
                    tracing::warn!(error = %e, "cannot accept");
                    ctx.start_timer();
                    return false;
                }
            }
        }
        true
    }
}

fn is_of_one_connection(error: &std::io::Error) -> bool {
    use libc::{
        ECONNABORTED, EHOSTDOWN, EHOSTUNREACH, EINTR, ENETDOWN, ENETUNREACH, ENONET, ENOPROTOOPT, EOPNOTSUPP, EPROTO,
    };
    const CODES: [i32; 10] =
        [ECONNABORTED, EHOSTDOWN, EHOSTUNREACH, EINTR, ENETDOWN, ENETUNREACH, ENONET, ENOPROTOOPT, EOPNOTSUPP, EPROTO];
    error.raw_os_error().is_some_and(|code| CODES.contains(&code))
}

impl DrivenSocket for ListeningSocket {
    fn progress(&self, ctx: &Arc<Context>) {
        if self.accept_all(ctx) {
            ctx.mark_ready(self.id);
        }
    }

    fn tick(&self, ctx: &Arc<Context>, _: Instant) -> bool {
        self.progress(ctx);
        false
    }
}

/// Serves a listening socket.
pub(super) fn begin_listening(ctx: &Arc<Context>, socket: ListeningSocket) -> Result<ListenerHandle> {
    let failed = |source| Error::io("watching a listening socket", source);
    let (id, addr) = (socket.id, socket.local_addr().map_err(failed)?);
    ctx.watch(&socket, id).map_err(|e| failed(std::io::Error::from(e)))?;
    ctx.insert_socket(id, Arc::new(socket));
    Ok(ListenerHandle { ctx: Arc::clone(ctx), id, addr, beside: None })
}

/// Starts to read a request frame.
pub(super) fn begin_request(
    ctx: &Arc<Context>,
    socket: Socket,
    (peer, origin): (SocketAddr, Origin),
    accept_foreign: bool,
) -> Result<()> {
    if let Socket::Tcp(stream) = &socket {
        prepare(stream, peer, ctx)?;
    }
    let id = ctx.new_id();
    let place = ctx.set_up.take(origin, id);
    let reading = Reading::new(socket, (peer, origin), place, accept_foreign);
    ctx.watch(reading.socket(), id).map_err(|e| Error::io("watching a connection", e))?;
    let inbound = Arc::new(Inbound { id, state: Mutex::new(Some(reading)) });
    ctx.insert_socket(id, inbound);
    ctx.start_timer();
    Ok(())
}

/// The consumer's handle.
pub(super) struct ListenerHandle {
    pub(super) ctx: Arc<Context>,
    pub(super) id: u64,
    pub(super) addr: SocketAddr,
    /// For shared memory, at the same address.
    pub(super) beside: Option<Box<ListenerHandle>>,
}

impl ListenerOps for ListenerHandle {
    fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.ctx.forget(self.id);
    }
}

/// A connection from which the request frame is being read.
pub(super) struct Inbound {
    pub(super) id: u64,
    pub(super) state: Mutex<Option<Reading>>,
}

pub(super) struct Reading {
    socket: Socket,
    peer: SocketAddr,
    origin: Origin,
    place: Place,
    seen: Vec<u8>,
    accept_foreign: bool,
    deadline: Instant,
}

impl Reading {
    pub(super) fn new(
        socket: Socket,
        (peer, origin): (SocketAddr, Origin),
        place: Place,
        accept_foreign: bool,
    ) -> Reading {
        Reading {
            socket,
            peer,
            origin,
            place,
            seen: Vec::new(),
            accept_foreign,
            deadline: Instant::now() + REQUEST_TIMEOUT,
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }
}

impl DrivenSocket for Inbound {
    /// Reads on; leaves the device's tables once there is nothing more to read.
    fn progress(&self, ctx: &Arc<Context>) {
        let mut guard = self.state.lock_unpoisoned();
        let Some(mut reading) = guard.take() else { return };
        match reading.advance() {
            Outcome::Waiting => *guard = Some(reading),
            Outcome::Over => ctx.forget(self.id),
            Outcome::Request(frame) => {
                ctx.unwatch(&reading.socket);
                ctx.forget(self.id);
                ctx.queue(Queued::Request(Box::new(Request {
                    ctx: Arc::clone(ctx),
                    place: reading.place,
                    socket: Some(reading.socket),
                    origin: reading.origin,
                    peer: reading.peer,
                    frame,
                })));
            }
            Outcome::Foreign => {
                ctx.unwatch(&reading.socket);
                ctx.forget(self.id);
                let Reading { socket, peer, seen, .. } = reading;
                if let Socket::Tcp(stream) = socket
                    && stream.set_nonblocking(false).is_ok()
                {
                    ctx.push_event(Event::Foreign { stream, peer, prefix: seen });
                }
            }
        }
    }

    fn tick(&self, ctx: &Arc<Context>, now: Instant) -> bool {
        let mut guard = self.state.lock_unpoisoned();
        match &*guard {
            Some(reading) if reading.deadline <= now => {
                tracing::debug!(peer = %reading.peer, "no request frame in time");
                *guard = None;
                ctx.forget(self.id);
                false
            }
            other => other.is_some(),
        }
    }
}

enum Outcome {
    Waiting,
    Over,
    Request(Frame),
    Foreign,
}

impl Reading {
    fn advance(&mut self) -> Outcome {
        loop {
            let mut chunk = [0; mpa::FRAME_HEADER_LEN + mpa::MAX_PRIVATE_DATA];
            // A caller of another protocol is recognised by its first bytes; the rest is left
            // for the service that speaks it.
            let most = if self.seen.len() < SNIFF_LEN { SNIFF_LEN - self.seen.len() } else { chunk.len() };
            match self.socket.read(&mut chunk[..most]) {
                Ok(0) => return Outcome::Over,
                Ok(n) => self.seen.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Outcome::Waiting,
                Err(_) => return Outcome::Over,
            }
            match Frame::decode(&self.seen, false) {
                Ok(Some((frame, used))) if used == self.seen.len() => return Outcome::Request(frame),
                Ok(Some(_)) => {
                    // Nothing may come before the reply (RFC 5044 section 7.1.2).
                    tracing::debug!(peer = %self.peer, "bytes behind an MPA request");
                    return Outcome::Over;
                }
                Ok(None) => {}
                Err(_) if self.accept_foreign => return Outcome::Foreign,
                Err(code) => {
                    tracing::debug!(peer = %self.peer, %code, "not an MPA request");
                    return Outcome::Over;
                }
            }
        }
    }
}

/// A whole request, waiting for the consumer's answer.
pub(super) struct Request {
    ctx: Arc<Context>,
    /// Until it is answered.
    place: Place,
    socket: Option<Socket>,
    peer: SocketAddr,
    origin: Origin,
    frame: Frame,
}

impl RequestOps for Request {
    fn private_data(&self) -> &[u8] {
        &self.frame.private_data
    }

    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    fn local(&self) -> SocketAddr {
        self.socket.as_ref().and_then(|s| s.local_addr().ok()).unwrap_or(self.peer)
    }

    fn depths(&self) -> Option<(u16, u16)> {
        self.frame.enhanced.map(|e| (e.ird, e.ord))
    }

    fn accept(mut self: Box<Self>, qp: &dyn QueuePairOps, params: &ConnectParams) -> Result<()> {
        let endpoint = qp.as_any().downcast_ref::<Endpoint>();
        let endpoint = endpoint.ok_or(Error::Unsupported("accepting on a queue pair of another provider"))?;
        let socket = self.socket.as_ref().expect("answered once");
        let prefs = socket.preferences(self.ctx.config().preferences(params)?);
        let (reply, agreement) = mpa::accept(&prefs, &self.frame, &params.private_data);
        let socket = self.socket.take().expect("answered once");
        endpoint.accept(socket, self.peer, agreement, reply.encode())
    }

    fn reject(mut self: Box<Self>, private_data: &[u8]) {
        self.refuse(private_data);
    }
}

impl UnpolledRequest for Request {
    fn id(&self) -> u64 {
        self.place.id
    }

    fn into_event(self: Box<Self>) -> Event {
        // The consumer has it: it does not give way to others any more.
        self.place.release();
        Event::Request(self)
    }
}

impl Request {
    fn refuse(&mut self, private_data: &[u8]) {
        let Some(mut socket) = self.socket.take() else { return };
        let room = mpa::MAX_PRIVATE_DATA - 4;
        let frame = mpa::reject(&self.frame, &private_data[..private_data.len().min(room)]);
        // A fresh connection's send buffer holds a frame; if not, the close says it too.
        let _ = socket.write(&frame.encode());
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.refuse(&[]);
    }
}

pub(super) fn prepare(stream: &TcpStream, peer: SocketAddr, ctx: &Context) -> Result<()> {
    let tuned = socket::tune(stream);
    tuned.map_err(|source| Error::Io { op: "preparing the socket from", peer: Some(peer), source })?;
    thruway_tcp::tune(stream, peer, ctx.config().congestion.as_deref());
    Ok(())
}
