//! How two ends of a TCP connection become an extended socket.
//!
//! Both send a frame of 64 bytes that says what they want. The accepting end then offers one way after the other, best first: where it
//! listens, and a secret token. The connecting end tries to connect there and says whether it could. The frames go over the TCP
//! connection, so who they come from is who the program is connected with; the token proves that the new connection is the same peer's.

use crate::calls;
use crate::contexts::{Carrier, Choice, Opened};
use rustix::io::Errno;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_streams::{Connection, Scheme, Settings};

const FRAME_LEN: usize = 64;
const MAGIC: [u8; 8] = *b"ThruwayX";
const VERSION: u8 = 1;
const TOKEN_LEN: usize = 16;

/// What may carry an extended socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Provider {
    /// The best that both ends have.
    #[default]
    Auto,
    /// Shared memory; an error if the peer is not a process of this user on this host.
    Shm,
    /// An RDMA device that serves the connection's address.
    Verbs,
    /// iWARP in user space.
    Iwarp,
}

/// How to make an extended socket.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// What may carry it. Both ends must allow the same.
    pub provider: Provider,
    /// How this end sends bytes and messages.
    pub scheme: Scheme,
    /// Messages keep their boundaries, rather than being a stream of bytes. Both ends must want the same.
    pub messages: bool,
    /// The peer may be on another host, although nothing is encrypted on the way. Both ends must allow it.
    pub plaintext: bool,
    /// How long the peer may take to meet this end.
    pub timeout: Duration,
    /// Bytes that the peer may send before the first of them is received: 4 KiB to 1 GiB.
    pub receive_buffer: u32,
    /// Bytes that this end copies before a send waits: 4 KiB to 1 GiB.
    pub send_buffer: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            provider: Provider::Auto,
            scheme: Scheme::Adaptive,
            messages: false,
            plaintext: false,
            timeout: Duration::from_secs(10),
            receive_buffer: 1 << 20,
            send_buffer: 1 << 20,
        }
    }
}

/// Why two ends have not become an extended socket. The TCP connection is to be closed then: the ends may disagree about what has been
/// sent over it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option has a value that it cannot have.
    #[error("{0}")]
    Option(String),
    /// The descriptor is not of a connected TCP socket.
    #[error("not a connected TCP socket: {0}")]
    Socket(#[source] io::Error),
    /// The TCP connection has failed meanwhile.
    #[error("the TCP connection failed while its ends were meeting: {0}")]
    Tcp(#[source] io::Error),
    /// The peer has closed it.
    #[error("the peer closed the TCP connection instead of meeting this end")]
    Closed,
    /// The peer has not answered.
    #[error(
        "the peer did not meet this end in time: it has to call the other one of accept and connect at the same point"
    )]
    TimedOut,
    /// The peer sends something else.
    #[error("the peer does not speak the protocol of extended sockets, or not this version")]
    NotExtended,
    /// The ends want different things.
    #[error("{0}")]
    Mismatch(&'static str),
    /// The peer is elsewhere.
    #[error(
        "{peer} is on another host, and what goes there is not encrypted: allow that at both ends (plaintext), or use TLS over TCP"
    )]
    OtherHost {
        /// The peer.
        peer: SocketAddr,
    },
    /// Nothing carries it.
    #[error("no way to the peer: {0}")]
    NoWay(String),
}

impl Error {
    /// As an error number of `errno.h`.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Error::Socket(error) if error.kind() == io::ErrorKind::Unsupported => Errno::AFNOSUPPORT,
            Error::Option(_) => Errno::INVAL,
            Error::Socket(error) | Error::Tcp(error) => return error.raw_os_error().unwrap_or(5),
            Error::Closed => Errno::CONNRESET,
            Error::TimedOut => Errno::TIMEDOUT,
            Error::NotExtended | Error::Mismatch(_) => Errno::PROTO,
            Error::OtherHost { .. } => Errno::ACCESS,
            Error::NoWay(_) => Errno::OPNOTSUPP,
        };
        errno.raw_os_error()
    }
}

/// What TCP has not: see [`Connection`], which it is. Dropping it ends it; [`ExtendedSocket::close`] waits until the peer has everything.
pub struct ExtendedSocket {
    connection: Connection,
    /// Keeps the device, and what listens on it.
    _opened: Arc<Opened>,
}

impl ExtendedSocket {
    /// What carries it: `shm`, `verbs` or `iwarp`.
    pub fn provider(&self) -> &'static str {
        self.connection.info().map_or("none", |info| info.provider)
    }

    /// Sends nothing more, and waits until the peer has everything, at most until the deadline.
    ///
    /// # Errors
    /// As [`Connection::close`].
    pub fn close(self, deadline: Option<Instant>) -> Result<(), thruway_streams::Error> {
        self.connection.close(deadline)
    }
}

impl Deref for ExtendedSocket {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

/// Meets the peer of a connected TCP socket, which calls [`accept`] with its end.
///
/// # Errors
/// [`Error`]; the TCP connection is of no use then.
pub fn connect(tcp: impl AsFd, options: &Options) -> Result<ExtendedSocket, Error> {
    let meeting = Meeting::begin(tcp.as_fd(), options, Role::Connect)?;
    loop {
        let frame = meeting.receive(None)?.expect("waits");
        match Frame::decode(&frame)? {
            Frame::Offer { carrier, port, token } => match meeting.take(carrier, port, &token) {
                Ok(socket) => {
                    meeting.send(&Frame::Answer { taken: true })?;
                    return Ok(socket);
                }
                Err(why) => {
                    tracing::debug!(?carrier, %why, "a way that cannot be taken");
                    meeting.send(&Frame::Answer { taken: false })?;
                }
            },
            Frame::Refusal(why) => return Err(meeting.refused(why)),
            Frame::Hello { .. } | Frame::Answer { .. } => return Err(Error::NotExtended),
        }
    }
}

/// Meets the peer of a connected TCP socket, which calls [`connect`] with its end.
///
/// # Errors
/// [`Error`]; the TCP connection is of no use then.
pub fn accept(tcp: impl AsFd, options: &Options) -> Result<ExtendedSocket, Error> {
    let meeting = Meeting::begin(tcp.as_fd(), options, Role::Accept)?;
    let mut failures = Vec::new();
    for carrier in meeting.carriers() {
        match meeting.offer(carrier) {
            Ok(Some(socket)) => return Ok(socket),
            Ok(None) => failures.push(format!("{}: the peer cannot take it", meeting.carrier_name(carrier))),
            Err(Offered::Ended(error)) => return Err(error),
            Err(Offered::Failed(why)) => failures.push(format!("{}: {why}", meeting.carrier_name(carrier))),
        }
    }
    meeting.send(&Frame::Refusal(Refusal::NoWay))?;
    Err(Error::NoWay(failures.join("; ")))
}

/// Why a way was not taken.
enum Offered {
    /// Nothing more can be tried.
    Ended(Error),
    /// Another may be.
    Failed(String),
}

impl From<Error> for Offered {
    fn from(error: Error) -> Offered {
        Offered::Ended(error)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Connect = 1,
    Accept = 2,
}

/// Two ends that meet.
struct Meeting<'a> {
    tcp: BorrowedFd<'a>,
    local: SocketAddr,
    peer: SocketAddr,
    options: &'a Options,
    deadline: Instant,
}

impl<'a> Meeting<'a> {
    /// Exchanges what the ends want.
    fn begin(tcp: BorrowedFd<'a>, options: &'a Options, role: Role) -> Result<Meeting<'a>, Error> {
        let socket = |error: Errno| Error::Socket(error.into());
        let address = |any: rustix::net::SocketAddrAny| {
            SocketAddr::try_from(any).map_err(|_| Error::Socket(io::ErrorKind::Unsupported.into()))
        };
        let local = address(rustix::net::getsockname(tcp).map_err(socket)?)?;
        let peer = rustix::net::getpeername(tcp).map_err(socket)?.ok_or_else(|| socket(Errno::NOTCONN))?;
        let peer = address(peer)?;
        if rustix::net::sockopt::socket_type(tcp).map_err(socket)? != rustix::net::SocketType::STREAM {
            return Err(socket(Errno::PROTOTYPE));
        }
        let plain = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
        let buffers = 4096..=1 << 30;
        for (what, len) in [("receive_buffer", options.receive_buffer), ("send_buffer", options.send_buffer)] {
            if !buffers.contains(&len) {
                return Err(Error::Option(format!("{what}: {len} is not between 4096 and 1073741824")));
            }
        }
        let deadline = Instant::now().checked_add(options.timeout);
        let deadline = deadline.ok_or_else(|| Error::Option("timeout: longer than time".into()))?;
        let meeting = Meeting { tcp, local: plain(local), peer: plain(peer), options, deadline };
        meeting.send(&Frame::Hello { role: role as u8, messages: options.messages, plaintext: options.plaintext })?;
        let hello = meeting.receive(None)?.expect("waits");
        match Frame::decode(&hello)? {
            Frame::Hello { role: other, .. } if other == role as u8 => Err(Error::Mismatch(match role {
                Role::Connect => "both ends call connect: one has to call accept",
                Role::Accept => "both ends call accept: one has to call connect",
            })),
            Frame::Hello { messages, .. } if messages != options.messages => {
                Err(Error::Mismatch("one end wants messages, and the other a stream of bytes"))
            }
            Frame::Hello { plaintext, .. } => {
                if !(meeting.is_on_this_host() || plaintext && options.plaintext) {
                    return Err(Error::OtherHost { peer: meeting.peer });
                }
                Ok(meeting)
            }
            _ => Err(Error::NotExtended),
        }
    }

    /// The peer's socket is a socket of this host: nothing leaves it.
    fn is_on_this_host(&self) -> bool {
        self.peer.ip().is_loopback() || matches!(thruway_tcp::local_socket(self.peer, self.local), Ok(Some(_)))
    }

    /// The ways that this end could take, best first.
    fn carriers(&self) -> Vec<Carrier> {
        match self.options.provider {
            Provider::Verbs => vec![Carrier::Verbs],
            Provider::Shm | Provider::Iwarp => vec![Carrier::User],
            // Shared memory beats a device that sends to itself.
            Provider::Auto if self.is_on_this_host() => vec![Carrier::User, Carrier::Verbs],
            Provider::Auto => vec![Carrier::Verbs, Carrier::User],
        }
    }

    fn carrier_name(&self, carrier: Carrier) -> &'static str {
        match (carrier, self.options.provider) {
            (Carrier::Verbs, _) => "RDMA device",
            (Carrier::User, Provider::Shm) => "shared memory",
            (Carrier::User, Provider::Iwarp) => "iWARP in user space",
            (Carrier::User, _) => "shared memory or iWARP in user space",
        }
    }

    fn open(&self, carrier: Carrier) -> Result<Arc<Opened>, thruway_streams::Error> {
        match (carrier, self.options.provider) {
            (Carrier::Verbs, _) => Opened::verbs(self.local.ip()),
            (Carrier::User, Provider::Shm) => Opened::user(Choice::Shm),
            (Carrier::User, Provider::Iwarp) => Opened::user(Choice::Iwarp),
            (Carrier::User, _) => Opened::user(Choice::Both),
        }
    }

    fn settings(&self) -> Settings {
        let settings = Settings::of(self.options.scheme);
        let ring_len = if settings.ring_len == 0 { 0 } else { self.options.receive_buffer };
        let credits = match settings.ring_len {
            // The same number of bytes in buffers of fixed size.
            0 => (self.options.receive_buffer / settings.receive_len).clamp(4, 4096) as u16,
            _ => settings.credits,
        };
        Settings { ring_len, credits, stage_len: self.options.send_buffer, messages: self.options.messages, ..settings }
    }

    /// Offers a way, and waits for the peer to take it; `None` if it cannot.
    fn offer(&self, carrier: Carrier) -> Result<Option<ExtendedSocket>, Offered> {
        let failed = |error: thruway_streams::Error| Offered::Failed(error.to_string());
        let opened = self.open(carrier).map_err(failed)?;
        let at = opened.listen(self.local.ip()).map_err(failed)?;
        let mut token = [0; TOKEN_LEN];
        let mut filled = 0;
        while filled < TOKEN_LEN {
            let got = rustix::rand::getrandom(&mut token[filled..], rustix::rand::GetRandomFlags::empty());
            filled += got.map_err(|error| Offered::Ended(Error::Tcp(error.into())))?;
        }
        let _expected = opened.context.expect(&token);
        self.send(&Frame::Offer { carrier, port: at.port(), token })?;
        let mut accepted = None;
        loop {
            if accepted.is_none() {
                let soon = self.deadline.min(Instant::now() + Duration::from_millis(5));
                let request = opened.context.request(|request| request.token().starts_with(&token), Some(soon));
                if let Ok(request) = request {
                    match request.accept(&opened.context, &self.settings(), self.deadline) {
                        Ok(connection) => accepted = Some(connection),
                        Err(error) => tracing::debug!(%error, "a way that cannot be taken"),
                    }
                }
            }
            // Once the connection is there, so is the answer.
            let now = Instant::now();
            let wait = if accepted.is_some() { self.deadline } else { now };
            if let Some(frame) = self.receive(Some(wait))? {
                return match (Frame::decode(&frame)?, accepted) {
                    (Frame::Answer { taken: true }, Some(connection)) => {
                        Ok(Some(ExtendedSocket { connection, _opened: opened }))
                    }
                    (Frame::Answer { taken: false }, _) => Ok(None),
                    _ => Err(Error::NotExtended.into()),
                };
            }
            if now >= self.deadline {
                return Err(Error::TimedOut.into());
            }
        }
    }

    /// Takes a way that the peer offers.
    fn take(&self, carrier: Carrier, port: u16, token: &[u8]) -> Result<ExtendedSocket, String> {
        if !self.carriers().contains(&carrier) {
            return Err("not allowed".into());
        }
        let opened = self.open(carrier).map_err(|error| error.to_string())?;
        let left = self.deadline.saturating_duration_since(Instant::now());
        let at = SocketAddr::new(self.peer.ip(), port);
        let connection =
            opened.context.connect(at, &self.settings(), token, left).map_err(|error| error.to_string())?;
        Ok(ExtendedSocket { connection, _opened: opened })
    }

    fn refused(&self, why: Refusal) -> Error {
        match why {
            Refusal::NoWay => Error::NoWay("the peer has no way to offer that this end can take".into()),
        }
    }

    fn send(&self, frame: &Frame) -> Result<(), Error> {
        let bytes = frame.encode();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match calls::send(self.tcp, rest) {
                Ok(sent) => rest = &rest[sent..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    calls::wait_writable(self.tcp, self.deadline).map_err(Error::Tcp)?;
                    if Instant::now() >= self.deadline {
                        return Err(Error::TimedOut);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Tcp(error)),
            }
        }
        Ok(())
    }

    /// The next frame; `None` if not even its beginning has come by `until`.
    fn receive(&self, until: Option<Instant>) -> Result<Option<[u8; FRAME_LEN]>, Error> {
        let mut frame = [0; FRAME_LEN];
        let mut len = 0;
        while len < FRAME_LEN {
            // Also of a peer that always has something to say.
            if Instant::now() >= self.deadline {
                return Err(Error::TimedOut);
            }
            let rest = &mut frame[len..];
            match calls::recv(self.tcp, rest) {
                Ok(0) => return Err(Error::Closed),
                Ok(got) => {
                    len += got;
                    // Bytes of another protocol are refused at once, without waiting for a whole frame.
                    let known = len.min(MAGIC.len());
                    if frame[..known] != MAGIC[..known] {
                        return Err(Error::NotExtended);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if len == 0 && until.is_some_and(|at| Instant::now() >= at) {
                        return Ok(None);
                    }
                    let until = if len == 0 { until } else { None };
                    calls::wait_readable(self.tcp, until.unwrap_or(self.deadline)).map_err(Error::Tcp)?;
                    if Instant::now() >= self.deadline {
                        return Err(Error::TimedOut);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Tcp(error)),
            }
        }
        Ok(Some(frame))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    NoWay,
}

/// What the ends send each other over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frame {
    Hello { role: u8, messages: bool, plaintext: bool },
    Offer { carrier: Carrier, port: u16, token: [u8; TOKEN_LEN] },
    Answer { taken: bool },
    Refusal(Refusal),
}

impl Frame {
    /// Magic, version, type, four bytes of parameters, the token, zeros.
    fn encode(&self) -> [u8; FRAME_LEN] {
        let mut bytes = [0; FRAME_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = VERSION;
        match *self {
            Frame::Hello { role, messages, plaintext } => {
                bytes[9] = 1;
                bytes[10] = role;
                bytes[11] = u8::from(messages) | u8::from(plaintext) << 1;
            }
            Frame::Offer { carrier, port, token } => {
                bytes[9] = 2;
                bytes[10] = if carrier == Carrier::Verbs { 2 } else { 1 };
                bytes[12..14].copy_from_slice(&port.to_be_bytes());
                bytes[16..16 + TOKEN_LEN].copy_from_slice(&token);
            }
            Frame::Answer { taken } => {
                bytes[9] = 3;
                bytes[10] = u8::from(taken);
            }
            Frame::Refusal(Refusal::NoWay) => {
                bytes[9] = 4;
                bytes[10] = 1;
            }
        }
        bytes
    }

    fn decode(bytes: &[u8; FRAME_LEN]) -> Result<Frame, Error> {
        if bytes[..8] != MAGIC || bytes[8] != VERSION {
            return Err(Error::NotExtended);
        }
        let token = bytes[16..16 + TOKEN_LEN].try_into().expect("a token's length");
        let frame = match (bytes[9], bytes[10]) {
            (1, role @ 1..=2) => Frame::Hello { role, messages: bytes[11] & 1 != 0, plaintext: bytes[11] & 2 != 0 },
            (2, carrier @ 1..=2) => Frame::Offer {
                carrier: if carrier == 2 { Carrier::Verbs } else { Carrier::User },
                port: u16::from_be_bytes([bytes[12], bytes[13]]),
                token,
            },
            (3, taken @ 0..=1) => Frame::Answer { taken: taken == 1 },
            (4, 1) => Frame::Refusal(Refusal::NoWay),
            _ => return Err(Error::NotExtended),
        };
        // Nothing that this version does not know.
        if frame.encode() == *bytes { Ok(frame) } else { Err(Error::NotExtended) }
    }
}
