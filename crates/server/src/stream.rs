//! Connections with and without TLS, before they are split.

use crate::reader::ReadHalf;
use crate::writer::WriteHalf;
use crate::{Peer, Reader, Writer};
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

/// A connection, during its handshake.
pub enum Stream {
    /// Without TLS.
    Plain(Plain),
    /// With TLS.
    Tls(Box<TlsStream<Plain>>),
}

impl Stream {
    /// Fills `out`.
    ///
    /// # Errors
    /// The system's; of kind `UnexpectedEof` if the peer closes before.
    pub async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.read_exact(out).await.map(drop),
            Stream::Tls(stream) => stream.read_exact(out).await.map(drop),
        }
    }

    /// Writes all of `data`.
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

    /// Splits it into a half for each direction.
    ///
    /// # Errors
    /// With TLS, if its descriptor cannot be duplicated.
    pub fn split(self) -> io::Result<(Reader, Writer)> {
        Ok(match self {
            Stream::Plain(stream) => {
                let stream = Rc::new(stream);
                (
                    Reader::new(ReadHalf::plain(Rc::clone(&stream)), Peer::Plain(Rc::clone(&stream))),
                    Writer::new(WriteHalf::Plain(stream)),
                )
            }
            Stream::Tls(stream) => {
                let peer = either!(stream.get_ref().0, s => s.as_fd().try_clone_to_owned())?;
                let (read, write) = tokio::io::split(*stream);
                (Reader::new(ReadHalf::Tls(read), Peer::Tls(Rc::new(peer))), Writer::new(WriteHalf::Tls(write)))
            }
        })
    }
}
