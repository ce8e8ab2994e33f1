//! Sending, as much as possible in one system call.

use super::stream::either;
use super::{Body, Message, Plain};
use crate::backend::Lent;
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, Interest};
use tokio_rustls::server::TlsStream;

/// The sending half of a connection.
pub struct Writer(WriteHalf);

pub(super) enum WriteHalf {
    Plain(Rc<Plain>),
    Tls(tokio::io::WriteHalf<TlsStream<Plain>>),
}

/// A peer that takes nothing for so long is gone.
const SEND_LIMIT: Duration = Duration::from_secs(120);

/// Waits for a step of sending, as long as a peer is waited for.
async fn patiently<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(SEND_LIMIT, step).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Pieces of memory in one system call.
const PIECES_MAX: usize = 256;

impl Writer {
    pub(super) fn new(half: WriteHalf) -> Writer {
        Writer(half)
    }

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
                self.write(&mut [IoSlice::new(&message.trailer)], false).await?;
            }
        }
        messages.clear();
        Ok(())
    }

    async fn write(&mut self, pieces: &mut [IoSlice<'_>], more: bool) -> io::Result<()> {
        let mut left = pieces;
        while left.iter().any(|piece| !piece.is_empty()) {
            let now = left.len().min(PIECES_MAX);
            let sent = match &mut self.0 {
                WriteHalf::Plain(stream) => {
                    let more = more || left.len() > now;
                    either!(&**stream, s => loop {
                        match s.try_io(Interest::WRITABLE, || send_pieces(s, &left[..now], more)) {
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => patiently(s.writable()).await?,
                            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                            other => break other?,
                        }
                    })
                }
                WriteHalf::Tls(stream) => patiently(stream.write_vectored(&left[..now])).await?,
            };
            IoSlice::advance_slices(&mut left, sent);
        }
        if let WriteHalf::Tls(stream) = &mut self.0 {
            patiently(stream.flush()).await?;
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
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => patiently(s.writable()).await?,
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
                let _ = patiently(stream.shutdown()).await;
            }
        }
    }
}

fn send_pieces(socket: impl AsFd, pieces: &[IoSlice<'_>], more: bool) -> io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
    let flags = if more { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
    Ok(sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags)?)
}
