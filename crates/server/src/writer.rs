//! The sending half of a connection: as much as possible in one system call.

use crate::budget::BYTES_MAX;
use crate::stream::either;
use crate::{Body, Message, Plain, caller, slices};
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;
use thruway_engine::lent::Lent;
use thruway_engine::pipes::Piped;
use thruway_tcp::Origin;
use tokio::io::{AsyncWriteExt, Interest};
use tokio_rustls::server::TlsStream;

/// The sending half of a connection.
pub struct Writer {
    half: WriteHalf,
    budget: SendBudget,
}

/// Budget of the data that one connection sends.
struct SendBudget {
    /// Host of the peer.
    host: Option<Origin>,
    /// Bytes sent since the last yield.
    bytes: usize,
}

impl SendBudget {
    /// Counts bytes that were sent. A peer that takes all data at once does not make the task wait, so this yields to the other tasks of
    /// the reactor after [`BYTES_MAX`], and waits while the slice of the host is spent.
    async fn count(&mut self, sent: usize) {
        self.bytes += sent;
        if self.bytes >= BYTES_MAX {
            let units = std::mem::take(&mut self.bytes) / slices::UNIT_BYTES;
            tokio::task::yield_now().await;
            slices::spend_for(self.host, units).await;
        }
    }
}

pub(crate) enum WriteHalf {
    Plain(Rc<Plain>),
    Tls(tokio::io::WriteHalf<TlsStream<Plain>>),
}

/// A connection whose peer reads nothing for this long fails.
const SEND_TIMEOUT: Duration = Duration::from_secs(120);

/// Waits for a step of sending, at most [`SEND_TIMEOUT`].
async fn in_time<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(SEND_TIMEOUT, step).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Pieces of memory in one system call; the kernel takes at most 1,024.
const PIECES_MAX: usize = 256;

impl Writer {
    /// For the current host.
    pub(crate) fn new(half: WriteHalf) -> Writer {
        Writer { half, budget: SendBudget { host: caller::current(), bytes: 0 } }
    }

    /// Whether lent files can be sent: not through TLS.
    pub fn can_lend(&self) -> bool {
        matches!(self.half, WriteHalf::Plain(_))
    }

    /// Sends messages, in as few system calls as possible.
    ///
    /// # Errors
    /// The system's.
    pub async fn send(&mut self, messages: &mut Vec<Message>) -> io::Result<()> {
        let mut rest = &messages[..];
        while !rest.is_empty() {
            // A file is sent by itself, behind everything before it.
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
                if !message.body.is_file() {
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
            let sent = match &mut self.half {
                WriteHalf::Plain(stream) => {
                    let more = more || left.len() > now;
                    either!(&**stream, s => loop {
                        match s.try_io(Interest::WRITABLE, || send_pieces(s, &left[..now], more)) {
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => in_time(s.writable()).await?,
                            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                            other => break other?,
                        }
                    })
                }
                WriteHalf::Tls(stream) => in_time(stream.write_vectored(&left[..now])).await?,
            };
            IoSlice::advance_slices(&mut left, sent);
            self.budget.count(sent).await;
        }
        if let WriteHalf::Tls(stream) = &mut self.half {
            in_time(stream.flush()).await?;
        }
        Ok(())
    }

    async fn send_file(&mut self, body: &Body) -> io::Result<()> {
        let (Body::Lent(lent), WriteHalf::Plain(stream)) = (body, &self.half) else {
            return Err(io::Error::other("files cannot be sent through TLS"));
        };
        let (file, offset, len) = match lent {
            Lent::File { file, offset, len } => (file, offset, len),
            Lent::Piped(piped) => return send_pages(stream, piped, &mut self.budget).await,
            Lent::Memory(_) => return Err(io::Error::other("memory is sent otherwise")),
        };
        let (mut at, end) = (*offset, *offset + *len as u64);
        while at < end {
            let left = (end - at) as usize;
            let sent = either!(&**stream, s => loop {
                let send = || Ok(rustix::fs::sendfile(s, file, Some(&mut at), left)?);
                match s.try_io(Interest::WRITABLE, send) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => in_time(s.writable()).await?,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    other => break other?,
                }
            });
            if sent == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file was truncated while it was sent"));
            }
            self.budget.count(sent).await;
        }
        Ok(())
    }

    /// Closes the sending half.
    pub async fn close(&mut self) {
        match &mut self.half {
            WriteHalf::Plain(stream) => {
                either!(&**stream, s => {
                    let _ = rustix::net::shutdown(s, rustix::net::Shutdown::Write);
                });
            }
            WriteHalf::Tls(stream) => {
                let _ = in_time(stream.shutdown()).await;
            }
        }
    }
}

async fn send_pages(stream: &Plain, piped: &Piped, budget: &mut SendBudget) -> io::Result<()> {
    while piped.len() > 0 {
        let sent = either!(stream, s => loop {
            match s.try_io(Interest::WRITABLE, || Ok(piped.send(s)?)) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => in_time(s.writable()).await?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        });
        if sent == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        budget.count(sent).await;
    }
    Ok(())
}

fn send_pieces(socket: impl AsFd, pieces: &[IoSlice<'_>], more: bool) -> io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
    let flags = if more { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
    Ok(sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};
    use std::sync::Arc;
    use thruway_engine::OpenFile;

    fn message(name: &str, body: Body) -> Message {
        Message { header: name.as_bytes().into(), body, trailer: format!("/{name};").as_bytes().into() }
    }

    /// A file is sent by itself. The messages before it and behind it are whole, with their trailers.
    #[test]
    fn messages_beside_those_with_files_are_whole() {
        let path = std::env::temp_dir().join(format!("thruway-writer-{}", std::process::id()));
        let mut file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(b"0123456789").unwrap();
        file.rewind().unwrap();
        let file = Arc::new(OpenFile::from(file));
        let lent = |offset, len| Body::Lent(Lent::File { file: Arc::clone(&file), offset, len });
        let mut messages = vec![
            message("a", Body::Bytes(b"one".to_vec())),
            message("b", Body::Empty),
            message("c", lent(2, 3)),
            message("d", lent(0, 10)),
            message("e", Body::Bytes(b"two".to_vec())),
        ];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        runtime.block_on(async {
            ours.set_nonblocking(true).unwrap();
            let stream = Plain::Unix(tokio::net::UnixStream::from_std(ours).unwrap());
            let mut writer = Writer::new(WriteHalf::Plain(Rc::new(stream)));
            writer.send(&mut messages).await.unwrap();
        });
        let mut sent = String::new();
        theirs.read_to_string(&mut sent).unwrap();
        assert_eq!(sent, "aone/a;b/b;c234/c;d0123456789/d;etwo/e;");
    }
}
