//! Connections with and without TLS, before they are split.

use crate::budget::Budget;
use crate::reader::ReadHalf;
use crate::writer::WriteHalf;
use crate::{Peer, Reader, Writer, slices};
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

/// A connection without TLS.
pub enum Plain {
    /// TCP.
    Tcp(TcpStream),
    /// A Unix socket.
    Unix(UnixStream),
}

/// Evaluates the same expression for either kind of stream.
macro_rules! either {
    ($plain:expr, $stream:ident => $body:expr) => {
        match $plain {
            $crate::Plain::Tcp($stream) => $body,
            $crate::Plain::Unix($stream) => $body,
        }
    };
}

pub(crate) use either;

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

/// A connection, during its handshake. What it receives and sends counts as work of the peer's host ([`slices`]).
pub struct Stream {
    kind: Kind,
    budget: Budget,
}

enum Kind {
    Plain(Plain),
    Tls(Box<TlsStream<Plain>>),
}

impl Stream {
    /// A connection without TLS.
    pub fn plain(stream: Plain) -> Stream {
        Stream { kind: Kind::Plain(stream), budget: Budget::of_handshake() }
    }

    /// A connection with TLS.
    pub fn tls(stream: TlsStream<Plain>) -> Stream {
        Stream { kind: Kind::Tls(Box::new(stream)), budget: Budget::of_handshake() }
    }

    /// The connection below; `None` with TLS.
    pub fn into_plain(self) -> Option<Plain> {
        match self.kind {
            Kind::Plain(stream) => Some(stream),
            Kind::Tls(_) => None,
        }
    }

    /// The TLS connection; `None` without TLS.
    pub fn as_tls(&self) -> Option<&TlsStream<Plain>> {
        match &self.kind {
            Kind::Plain(_) => None,
            Kind::Tls(stream) => Some(stream),
        }
    }

    /// Fills `out`. Waits while the slice of the host is spent, also after the last byte.
    ///
    /// # Errors
    /// The system's; of kind `UnexpectedEof` if the peer closes before.
    pub async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        self.budget.begin_message().await;
        let mut done = 0;
        while done < out.len() {
            let end = out.len().min(done + self.budget.bytes_left().await);
            let read = match &mut self.kind {
                Kind::Plain(stream) => stream.read(&mut out[done..end]).await?,
                Kind::Tls(stream) => stream.read(&mut out[done..end]).await?,
            };
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.budget.spend(read);
            done += read;
        }
        self.budget.count().await;
        Ok(())
    }

    /// Reads and discards `len` bytes.
    ///
    /// # Errors
    /// As [`Stream::read_exact`].
    pub async fn skip(&mut self, mut len: usize) -> io::Result<()> {
        let mut buffer = vec![0; len.min(slices::UNIT_BYTES)];
        while len > 0 {
            let part = len.min(buffer.len());
            self.read_exact(&mut buffer[..part]).await?;
            len -= part;
        }
        Ok(())
    }

    /// Writes all of `data`.
    ///
    /// # Errors
    /// The system's.
    pub async fn write_all(&mut self, data: &[u8]) -> io::Result<()> {
        slices::spend(data.len() / slices::UNIT_BYTES).await;
        match &mut self.kind {
            Kind::Plain(stream) => stream.write_all(data).await,
            Kind::Tls(stream) => {
                stream.write_all(data).await?;
                stream.flush().await
            }
        }
    }

    /// Splits it into a half for each direction.
    ///
    /// # Errors
    /// With TLS, if its descriptor cannot be duplicated.
    pub fn split(self) -> io::Result<(Reader, Writer)> {
        Ok(match self.kind {
            Kind::Plain(stream) => {
                let stream = Rc::new(stream);
                (
                    Reader::new(ReadHalf::plain(Rc::clone(&stream)), Peer::Plain(Rc::clone(&stream))),
                    Writer::new(WriteHalf::Plain(stream)),
                )
            }
            Kind::Tls(stream) => {
                let peer = either!(stream.get_ref().0, s => s.as_fd().try_clone_to_owned())?;
                let (read, write) = tokio::io::split(*stream);
                (Reader::new(ReadHalf::Tls(read), Peer::Tls(Rc::new(peer))), Writer::new(WriteHalf::Tls(write)))
            }
        })
    }
}
