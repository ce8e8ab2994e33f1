//! Connections: TCP, Unix sockets, TLS over either; replies gathered from many pieces of memory, or sent
//! from the page cache.

use crate::backend::Lent;
use rustix::net::sockopt;
use smallvec::SmallVec;
use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};
use thruway_engine::{Segment, reactor};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::server::TlsStream;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl Address {
    /// Only this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Tcp(addr) => addr.ip().to_canonical().is_loopback(),
            Address::Unix(_) => true,
        }
    }
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("the path is missing; write unix:PATH".into()),
            Some(path) => Ok(Address::Unix(path.into())),
            None => text.parse().map(Address::Tcp).map_err(|_| format!("'{text}' is neither ADDR:PORT nor unix:PATH")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(addr) => addr.fmt(f),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A listening socket, not yet at a reactor.
pub enum Listener {
    /// TCP.
    Tcp(std::net::TcpListener),
    /// In the file system; the name goes with it.
    Unix(std::os::unix::net::UnixListener, PathBuf),
}

impl Listener {
    /// Listens.
    ///
    /// # Errors
    /// A sentence that names the address.
    pub fn bind(address: &Address) -> Result<Listener, String> {
        let fail = |e: io::Error| format!("listening at {address}: {e}");
        match address {
            Address::Tcp(addr) => {
                let listener = std::net::TcpListener::bind(addr).map_err(fail)?;
                listener.set_nonblocking(true).map_err(fail)?;
                Ok(Listener::Tcp(listener))
            }
            Address::Unix(path) => {
                remove_dead(path);
                let listener = std::os::unix::net::UnixListener::bind(path).map_err(fail)?;
                listener.set_nonblocking(true).map_err(fail)?;
                Ok(Listener::Unix(listener, path.clone()))
            }
        }
    }

    /// The address, with the port the system chose.
    pub fn address(&self) -> Address {
        match self {
            Listener::Tcp(listener) => Address::Tcp(listener.local_addr().expect("a bound socket has an address")),
            Listener::Unix(_, path) => Address::Unix(path.clone()),
        }
    }

    /// Accepts for ever, on the reactor that runs this.
    pub async fn accept(self, mut each: impl FnMut(Socket)) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => {
                let listener = TcpListener::from_std(listener)?;
                loop {
                    match listener.accept().await {
                        Ok((stream, peer)) => each(Socket::Tcp(stream.into_std()?, peer)),
                        Err(error) => pause(&error).await,
                    }
                }
            }
            Listener::Unix(listener, path) => {
                let _name = Name(path);
                let listener = UnixListener::from_std(listener)?;
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => each(Socket::Unix(stream.into_std()?)),
                        Err(error) => pause(&error).await,
                    }
                }
            }
        }
    }
}

/// A failed accept is the peer's doing, or a shortage that passes.
async fn pause(error: &io::Error) {
    tracing::warn!(%error, "accepting a connection");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// Removes a socket that nobody listens at any more.
fn remove_dead(path: &std::path::Path) {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
        let _ = std::fs::remove_file(path);
    }
}

struct Name(PathBuf);

impl Drop for Name {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An accepted connection on its way to a reactor.
pub enum Socket {
    /// With the peer.
    Tcp(std::net::TcpStream, SocketAddr),
    /// From this machine.
    Unix(std::os::unix::net::UnixStream),
}

impl Socket {
    /// For logs.
    pub fn peer(&self) -> String {
        match self {
            Socket::Tcp(_, peer) => peer.to_string(),
            Socket::Unix(_) => "a local client".into(),
        }
    }

    /// The address that the peer connected to; empty for sockets in the file system.
    pub fn local(&self) -> String {
        match self {
            Socket::Tcp(stream, _) => stream.local_addr().map(|a| a.to_string()).unwrap_or_default(),
            Socket::Unix(_) => String::new(),
        }
    }

    /// Makes it this reactor's.
    ///
    /// # Errors
    /// If the system cannot watch it.
    pub fn open(self) -> io::Result<Plain> {
        match self {
            Socket::Tcp(stream, _) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                // A peer that has gone without a word is found out, in the end.
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, Duration::from_secs(60))?;
                Ok(Plain::Tcp(TcpStream::from_std(stream)?))
            }
            Socket::Unix(stream) => {
                stream.set_nonblocking(true)?;
                Ok(Plain::Unix(UnixStream::from_std(stream)?))
            }
        }
    }
}

/// A connection without TLS.
pub enum Plain {
    /// TCP.
    Tcp(TcpStream),
    /// A Unix socket.
    Unix(UnixStream),
}

macro_rules! either {
    ($plain:expr, $stream:ident => $body:expr) => {
        match $plain {
            Plain::Tcp($stream) => $body,
            Plain::Unix($stream) => $body,
        }
    };
}

impl tokio::io::AsyncRead for Plain {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        either!(self.get_mut(), stream => std::pin::Pin::new(stream).poll_read(cx, buf))
    }
}

impl tokio::io::AsyncWrite for Plain {
    fn poll_write(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &[u8],
    ) -> std::task::Poll<io::Result<usize>> {
        either!(self.get_mut(), stream => std::pin::Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_flush(self: std::pin::Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<io::Result<()>> {
        either!(self.get_mut(), stream => std::pin::Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        either!(self.get_mut(), stream => std::pin::Pin::new(stream).poll_shutdown(cx))
    }
}

/// A connection, before it is split for the two directions.
pub enum Stream {
    /// As it is.
    Plain(Plain),
    /// Encrypted.
    Tls(Box<TlsStream<Plain>>),
}

impl Stream {
    /// Reads exactly so much.
    ///
    /// # Errors
    /// The system's; of kind `UnexpectedEof` if the peer is gone.
    pub async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.read_exact(out).await.map(drop),
            Stream::Tls(stream) => stream.read_exact(out).await.map(drop),
        }
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// The system's.
    pub async fn write_all(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.write_all(data).await,
            Stream::Tls(stream) => {
                stream.write_all(data).await?;
                stream.flush().await
            }
        }
    }

    /// One half for each direction.
    pub fn split(self) -> (Reader, Writer) {
        match self {
            Stream::Plain(stream) => {
                let stream = Rc::new(stream);
                (
                    Reader::new(ReadHalf::Plain(Rc::clone(&stream), Patience::default())),
                    Writer(WriteHalf::Plain(stream)),
                )
            }
            Stream::Tls(stream) => {
                let (read, write) = tokio::io::split(*stream);
                (Reader::new(ReadHalf::Tls(read)), Writer(WriteHalf::Tls(write)))
            }
        }
    }
}

/// The receiving half of a connection. What arrives with what was asked for is kept for the next call.
pub struct Reader {
    half: ReadHalf,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

enum ReadHalf {
    Plain(Rc<Plain>, Patience),
    Tls(tokio::io::ReadHalf<TlsStream<Plain>>),
}

/// How long to spin for what comes next before sleeping: longer while that pays, not at all while it does not.
#[derive(Default)]
struct Patience(Duration);

/// The longest that is spun.
const SPIN_MAX: Duration = Duration::from_micros(50);

impl Patience {
    /// Spins, if it has paid lately and nobody else wants the thread. `None` if nothing came.
    async fn spin(&mut self, stream: &Plain, out: &mut [u8]) -> Option<io::Result<usize>> {
        if self.0.is_zero() || !reactor::is_alone() {
            return None;
        }
        // What there is to send goes first.
        tokio::task::yield_now().await;
        let start = Instant::now();
        while start.elapsed() < self.0 {
            let flags = rustix::net::RecvFlags::DONTWAIT;
            match either!(stream, s => rustix::net::recv(s, &mut *out, flags)) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => std::hint::spin_loop(),
                Ok((n, _)) => return Some(Ok(n)),
                Err(e) => return Some(Err(e.into())),
            }
        }
        self.0 /= 2;
        if self.0 < Duration::from_micros(2) {
            self.0 = Duration::ZERO;
        }
        None
    }

    /// Slept so long until something came.
    fn slept(&mut self, time: Duration) {
        if time < SPIN_MAX {
            self.0 = (self.0 + SPIN_MAX / 4).min(SPIN_MAX);
        }
    }
}

/// Octets read ahead.
const READ_AHEAD: usize = 64 << 10;

impl ReadHalf {
    async fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            ReadHalf::Plain(stream, patience) => loop {
                let result = either!(&**stream, s => s.try_read(out));
                match result {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        if let Some(result) = patience.spin(stream, out).await {
                            return result;
                        }
                        let start = Instant::now();
                        either!(&**stream, s => s.readable().await)?;
                        patience.slept(start.elapsed());
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Ok(n) if 0 < n && n < out.len() => {
                        // That was all there is. Saying so here saves asking for more in vain; what comes from now on
                        // is a new edge.
                        let dry = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                        let _ = either!(&**stream, s => s.try_io(Interest::READABLE, dry));
                        return Ok(n);
                    }
                    other => return other,
                }
            },
            ReadHalf::Tls(stream) => stream.read(out).await,
        }
    }
}

impl Reader {
    fn new(half: ReadHalf) -> Reader {
        Reader { half, buffer: vec![0; READ_AHEAD].into(), start: 0, end: 0 }
    }

    /// Waits until the next `len` octets are there and returns them, without consuming them. `None` if
    /// the peer closed before the first.
    ///
    /// # Errors
    /// The system's; of kind `UnexpectedEof` if the peer closed in between.
    ///
    /// # Panics
    /// If more is asked for than is ever read ahead (64 KiB).
    pub async fn peek(&mut self, len: usize) -> io::Result<Option<&[u8]>> {
        assert!(len <= self.buffer.len(), "headers are short");
        if self.buffer.len() - self.start < len {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        while self.end - self.start < len {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            match self.half.read(&mut self.buffer[self.end..]).await? {
                0 if self.start == self.end => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => self.end += n,
            }
        }
        Ok(Some(&self.buffer[self.start..self.start + len]))
    }

    /// Forgets octets that were peeked at.
    pub fn consume(&mut self, len: usize) {
        self.start += len;
        debug_assert!(self.start <= self.end);
    }

    /// Fills `out`, from the connection straight into place as far as nothing was read ahead.
    ///
    /// # Errors
    /// The system's; of kind `UnexpectedEof` if the peer closes before.
    pub async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        let mut done = (self.end - self.start).min(out.len());
        out[..done].copy_from_slice(&self.buffer[self.start..self.start + done]);
        self.start += done;
        while done < out.len() {
            // A short rest is read together with what follows it.
            if out.len() - done < READ_AHEAD / 4 {
                let rest = out.len() - done;
                let data = self.peek(rest).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
                out[done..].copy_from_slice(data);
                self.consume(rest);
                return Ok(());
            }
            match self.half.read(&mut out[done..]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => done += n,
            }
        }
        Ok(())
    }

    /// Reads and forgets so much.
    ///
    /// # Errors
    /// As [`Reader::read_exact`].
    pub async fn skip(&mut self, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let part = len.min(READ_AHEAD as u64) as usize;
            self.peek(part).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            self.consume(part);
            len -= part as u64;
        }
        Ok(())
    }
}

/// Something to send.
#[derive(Default)]
pub struct Message {
    /// What comes first.
    pub header: SmallVec<[u8; 64]>,
    /// What follows it.
    pub body: Body,
    /// What comes last.
    pub trailer: SmallVec<[u8; 8]>,
}

/// The long part of a message.
#[derive(Default)]
pub enum Body {
    /// None.
    #[default]
    Empty,
    /// Segments, which are free again when they have been sent.
    Segments(SmallVec<[Segment; 1]>),
    /// Octets of their own.
    Octets(Vec<u8>),
    /// What belongs to a backend. Files only where [`Writer::can_lend`] says so.
    Lent(Lent),
}

impl Body {
    fn is_file(&self) -> bool {
        matches!(self, Body::Lent(Lent::File { .. }))
    }

    /// Octets.
    pub fn len(&self) -> usize {
        match self {
            Body::Empty => 0,
            Body::Segments(segments) => segments.iter().map(Segment::len).sum(),
            Body::Octets(octets) => octets.len(),
            Body::Lent(lent) => lent.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cuts it: what is returned begins at octet `at`.
    ///
    /// # Panics
    /// If `at` is outside.
    pub fn split_off(&mut self, at: usize) -> Body {
        match self {
            _ if at == self.len() => Body::Empty,
            Body::Empty => panic!("a body is cut inside"),
            Body::Octets(octets) => Body::Octets(octets.split_off(at)),
            Body::Lent(lent) => Body::Lent(lent.split_off(at)),
            Body::Segments(segments) => {
                let (mut rest, mut seen) = (SmallVec::new(), 0);
                let mut kept = SmallVec::new();
                for mut segment in segments.drain(..) {
                    let len = segment.len();
                    if seen < at && seen + len > at {
                        rest.push(segment.split_off(at - seen));
                    }
                    if seen < at {
                        kept.push(segment)
                    } else {
                        rest.push(segment)
                    }
                    seen += len;
                }
                *segments = kept;
                Body::Segments(rest)
            }
        }
    }

    /// Calls `each` with the octets, for a digest. Nothing of what is lent is among them.
    pub(crate) fn octets(&self, mut each: impl FnMut(&[u8])) {
        match self {
            Body::Empty | Body::Lent(_) => {}
            Body::Segments(segments) => segments.iter().for_each(|s| each(s.as_slice())),
            Body::Octets(octets) => each(octets),
        }
    }

    /// Calls `each` with every piece of memory.
    pub(crate) fn pieces(&self, mut each: impl FnMut(*const u8, usize)) {
        match self {
            Body::Empty | Body::Lent(Lent::File { .. }) => {}
            Body::Segments(segments) => segments.iter().for_each(|s| each(s.as_ptr(), s.len())),
            Body::Octets(octets) => each(octets.as_ptr(), octets.len()),
            Body::Lent(Lent::Memory(memory)) => each(memory.as_ptr(), memory.len()),
        }
    }
}

/// The sending half of a connection.
pub struct Writer(WriteHalf);

enum WriteHalf {
    Plain(Rc<Plain>),
    Tls(tokio::io::WriteHalf<TlsStream<Plain>>),
}

/// Pieces of memory in one system call.
const PIECES_MAX: usize = 256;

impl Writer {
    /// What backends lend, and files among it, can be sent as it is.
    pub fn can_lend(&self) -> bool {
        matches!(self.0, WriteHalf::Plain(_))
    }

    /// Sends messages, as many as possible at once.
    ///
    /// # Errors
    /// The system's.
    pub async fn send(&mut self, messages: &mut Vec<Message>) -> io::Result<()> {
        let mut rest = &messages[..];
        while !rest.is_empty() {
            // A file goes alone, behind everything before it.
            let count = rest.iter().position(|m| m.body.is_file()).map_or(rest.len(), |i| i + 1);
            let (now, later) = rest.split_at(count);
            rest = later;
            let file = now.last().filter(|m| m.body.is_file());
            let mut pieces: Vec<IoSlice<'_>> = Vec::with_capacity(3 * now.len());
            for message in now {
                pieces.push(IoSlice::new(&message.header));
                message.body.pieces(|ptr, len| {
                    // SAFETY: the body keeps the memory until it has been sent. Others may write to memory
                    // that a backend lends; it is only handed to the kernel, which copies it.
                    pieces.push(IoSlice::new(unsafe { std::slice::from_raw_parts(ptr, len) }));
                });
                if file.is_none() {
                    pieces.push(IoSlice::new(&message.trailer));
                }
            }
            pieces.retain(|piece| !piece.is_empty());
            self.write(&mut pieces, file.is_some()).await?;
            if let Some(message) = file {
                self.send_file(&message.body).await?;
                self.write(&mut vec![IoSlice::new(&message.trailer)], false).await?;
            }
        }
        messages.clear();
        Ok(())
    }

    async fn write(&mut self, pieces: &mut Vec<IoSlice<'_>>, more: bool) -> io::Result<()> {
        let mut left = &mut pieces[..];
        while left.iter().any(|piece| !piece.is_empty()) {
            let now = left.len().min(PIECES_MAX);
            let sent = match &mut self.0 {
                WriteHalf::Plain(stream) => {
                    let more = more || left.len() > now;
                    either!(&**stream, s => loop {
                        match s.try_io(Interest::WRITABLE, || send_pieces(s, &left[..now], more)) {
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => s.writable().await?,
                            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                            other => break other?,
                        }
                    })
                }
                WriteHalf::Tls(stream) => stream.write_vectored(&left[..now]).await?,
            };
            IoSlice::advance_slices(&mut left, sent);
        }
        if let WriteHalf::Tls(stream) = &mut self.0 {
            stream.flush().await?;
        }
        Ok(())
    }

    async fn send_file(&mut self, body: &Body) -> io::Result<()> {
        let (Body::Lent(Lent::File { file, offset, len }), WriteHalf::Plain(stream)) = (body, &self.0) else {
            return Err(io::Error::other("a file is sent over a plain connection only"));
        };
        let (mut at, end) = (*offset, *offset + *len as u64);
        while at < end {
            let left = (end - at) as usize;
            let sent = either!(&**stream, s => loop {
                let send = || Ok(rustix::fs::sendfile(s, file, Some(&mut at), left)?);
                match s.try_io(Interest::WRITABLE, send) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => s.writable().await?,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    other => break other?,
                }
            });
            if sent == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file has become shorter"));
            }
        }
        Ok(())
    }

    /// Says that nothing follows.
    pub async fn close(&mut self) {
        match &mut self.0 {
            WriteHalf::Plain(stream) => {
                either!(&**stream, s => {
                    let _ = rustix::net::shutdown(s, rustix::net::Shutdown::Write);
                });
            }
            WriteHalf::Tls(stream) => {
                let _ = stream.shutdown().await;
            }
        }
    }
}

fn send_pieces(socket: impl AsFd, pieces: &[IoSlice<'_>], more: bool) -> io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
    let flags = if more { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
    Ok(sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags)?)
}
