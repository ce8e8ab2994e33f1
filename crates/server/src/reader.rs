//! The receiving half of a connection, with read-ahead.

use crate::Plain;
use crate::budget::Budget;
use crate::stream::either;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use thruway_engine::reactor;
use tokio::io::{AsyncReadExt, Interest};
use tokio_rustls::server::TlsStream;

/// The receiving half of a connection. Bytes that arrive beyond those asked for are buffered for the next call.
///
/// Even if the peer sends without pause, the task yields to the others of the reactor after
/// [`MESSAGES_MAX`](crate::budget::MESSAGES_MAX) reads and after [`BYTES_MAX`](crate::budget::BYTES_MAX) bytes.
pub struct Reader {
    half: ReadHalf,
    budget: Budget,
    peer: Peer,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

pub(crate) enum ReadHalf {
    Plain(Rc<Plain>, Spinner),
    Tls(tokio::io::ReadHalf<TlsStream<Plain>>),
}

/// Tells whether the peer is still there, also while nothing is read.
#[derive(Clone)]
pub enum Peer {
    /// Without TLS.
    Plain(Rc<Plain>),
    /// The connection below TLS: a duplicate of its descriptor.
    Tls(Rc<OwnedFd>),
}

impl Peer {
    /// Whether the peer has closed its sending half, or the connection is broken: no more data than has arrived will come.
    pub fn has_closed(&self) -> bool {
        let fd = match self {
            Peer::Plain(stream) => either!(&**stream, s => s.as_fd()),
            Peer::Tls(fd) => fd.as_fd(),
        };
        let mut poll = [PollFd::from_borrowed_fd(fd, PollFlags::RDHUP)];
        rustix::event::poll(&mut poll, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// Adaptive busy polling before sleeping: longer while it pays, not at all while it does not.
#[derive(Default)]
pub(crate) struct Spinner(Duration);

/// Longest time to spin.
const SPIN_MAX: Duration = Duration::from_micros(50);

impl Spinner {
    /// Spins, if it has paid lately and the reactor has nothing else to do. `None` if nothing has arrived.
    async fn spin(&mut self, stream: &Plain, out: &mut [u8]) -> Option<io::Result<usize>> {
        if self.0.is_zero() || !reactor::is_alone() {
            return None;
        }
        // Tasks that have something to send go first.
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

    /// Learns how long the reader slept until data arrived.
    fn slept(&mut self, time: Duration) {
        if time < SPIN_MAX {
            self.0 = (self.0 + SPIN_MAX / 4).min(SPIN_MAX);
        }
    }
}

/// Bytes of the read-ahead buffer.
const READ_AHEAD: usize = 64 << 10;

impl ReadHalf {
    pub(crate) fn plain(stream: Rc<Plain>) -> ReadHalf {
        ReadHalf::Plain(stream, Spinner::default())
    }

    async fn read(&mut self, out: &mut [u8], budget: &mut Budget) -> io::Result<usize> {
        let left = budget.bytes_left().await;
        let len = out.len().min(left);
        let out = &mut out[..len];
        let read = self.read_some(out, budget).await?;
        budget.spend(read);
        Ok(read)
    }

    async fn read_some(&mut self, out: &mut [u8], budget: &mut Budget) -> io::Result<usize> {
        match self {
            ReadHalf::Plain(stream, spinner) => loop {
                let result = either!(&**stream, s => s.try_read(out));
                match result {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        if let Some(result) = spinner.spin(stream, out).await {
                            return result;
                        }
                        budget.end_turn();
                        let start = Instant::now();
                        either!(&**stream, s => s.readable().await)?;
                        spinner.slept(start.elapsed());
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Ok(n) if 0 < n && n < out.len() => {
                        // The socket is empty. Telling tokio so saves a read in vain; data from now on is a new edge.
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
    pub(crate) fn new(half: ReadHalf, peer: Peer) -> Reader {
        Reader { half, budget: Budget::default(), peer, buffer: vec![0; READ_AHEAD].into(), start: 0, end: 0 }
    }

    /// The peer of the connection.
    pub fn peer(&self) -> Peer {
        self.peer.clone()
    }

    /// Waits for the next `len` bytes and returns them without consuming them. `None` if the peer closes before the first.
    ///
    /// # Errors
    /// The system's; of kind `UnexpectedEof` if the peer closes in between.
    ///
    /// # Panics
    /// If `len` is more than the read-ahead buffer holds (64 KiB).
    pub async fn peek(&mut self, len: usize) -> io::Result<Option<&[u8]>> {
        assert!(len <= self.buffer.len(), "headers are short");
        self.budget.begin_message().await;
        if self.buffer.len() - self.start < len {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        while self.end - self.start < len {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            match self.half.read(&mut self.buffer[self.end..], &mut self.budget).await? {
                0 if self.start == self.end => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => self.end += n,
            }
        }
        Ok(Some(&self.buffer[self.start..self.start + len]))
    }

    /// Consumes bytes that [`Reader::peek`] has returned.
    pub fn consume(&mut self, len: usize) {
        self.start += len;
        debug_assert!(self.start <= self.end);
    }

    /// Fills `out`; what has not been read ahead goes from the socket straight into it.
    ///
    /// # Errors
    /// The system's; of kind `UnexpectedEof` if the peer closes before.
    pub async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        let mut done = (self.end - self.start).min(out.len());
        out[..done].copy_from_slice(&self.buffer[self.start..self.start + done]);
        self.start += done;
        while done < out.len() {
            // A short remainder is read together with what follows it.
            if out.len() - done < READ_AHEAD / 4 {
                let rest = out.len() - done;
                let data = self.peek(rest).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
                out[done..].copy_from_slice(data);
                self.consume(rest);
                return Ok(());
            }
            match self.half.read(&mut out[done..], &mut self.budget).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => done += n,
            }
        }
        Ok(())
    }

    /// Reads and discards `len` bytes.
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
