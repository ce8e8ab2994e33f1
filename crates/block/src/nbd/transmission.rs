//! Requests of one connection.
//!
//! One task reads requests and starts each as a task of its own; they finish in any order. One task sends what is
//! ready, all of it in one system call. A long request is cut into pieces that go to the storage on their own: of a
//! read, each is sent as soon as it is there (in any order, where replies are structured); of a write, each is
//! written while the next still arrives.

use super::handshake::{Agreement, CONTEXT_ID};
use super::wire::{self, ChunkType, Command, CommandFlags, Form, PAYLOAD_MAX, Request, error};
use crate::backend::{Backend, EXTENTS_MAX, Extent, Zero};
use crate::chunk_ranges::chunk_ranges;
use crate::served::{Change, Changer};
use futures_util::stream::{self, StreamExt};
use smallvec::SmallVec;
use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use thruway_engine::{Segment, reactor};
use thruway_server::buffers::SMALL;
use thruway_server::{Body, Buffers, Message, Peer, Reader, SendQueue, Writer, caller, panics};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Requests of a connection in progress at a time; then it is not read from.
const REQUESTS_MAX: usize = 512;
/// Reads that need more blocks than a connection has, in progress at a time.
const LONG_MAX: usize = 1;
/// Pieces of a read in progress at a time.
const PIECES_MAX: usize = 32;
/// Zeroes that are written, or bytes discarded, in one step.
const STRETCH: u64 = 256 << 20;
/// Bytes zeroed or discarded by one request; of longer ones, a connection has one in progress at a time.
const OWN_TURN: u64 = 1 << 20;
/// Reads from here on are looked through for holes.
const SPARSE_MIN: u64 = 64 << 10;

/// A connection in transmission.
struct Connection {
    agreement: Agreement,
    can_lend: bool,
    replies: SendQueue,
    reads: Buffers,
    writes: Buffers,
    long: Arc<Semaphore>,
    /// Had by the one change of more than [`OWN_TURN`] that has begun.
    long_changes: Semaphore,
    changer: Changer,
    peer: Peer,
    /// The client has said that it leaves.
    leaves: Cell<bool>,
}

/// Serves requests until the client leaves or the server closes; a request of which something has come is still served.
///
/// # Errors
/// If the connection is lost or the client breaks the protocol.
pub(super) async fn serve(
    agreement: Agreement,
    mut reader: Reader,
    writer: Writer,
    closing: watch::Receiver<bool>,
) -> io::Result<()> {
    let chunk = agreement.export.chunk as usize;
    let connection = Rc::new(Connection {
        can_lend: writer.can_lend(),
        replies: SendQueue::default(),
        reads: Buffers::new(chunk),
        writes: Buffers::new(chunk),
        long: Arc::new(Semaphore::new(LONG_MAX)),
        long_changes: Semaphore::new(1),
        changer: agreement.export.backend.changer(),
        peer: reader.peer(),
        leaves: Cell::new(false),
        agreement,
    });
    let sender = Rc::clone(&connection);
    let sender = tokio::task::spawn_local(async move { sender.replies.run(writer).await });
    let under_way = Arc::new(Semaphore::new(REQUESTS_MAX));
    let result = tokio::select! {
        result = panics::catch(connection.receive(&mut reader, &under_way, closing)) => result,
        () = connection.replies.broken() => Err(io::ErrorKind::BrokenPipe.into()),
    };
    // What has been asked for is still done and answered.
    let _ = under_way.acquire_many(REQUESTS_MAX as u32).await;
    connection.replies.close();
    let _ = sender.await;
    result
}

/// A request is answered even if what does it panics.
struct Answered {
    connection: Rc<Connection>,
    request: Request,
}

impl Drop for Answered {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.connection.fail(&self.request, error::EIO, "a bug of the server");
        }
    }
}

impl Connection {
    fn backend(&self) -> &dyn Backend {
        &*self.agreement.export.backend
    }

    async fn receive(
        self: &Rc<Self>,
        reader: &mut Reader,
        under_way: &Arc<Semaphore>,
        mut closing: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let extended = self.agreement.form == Form::Extended;
        let header_len = Request::header_len(extended);
        loop {
            self.replies.room().await;
            let header = tokio::select! {
                biased;
                header = reader.peek(header_len) => header?,
                _ = closing.wait_for(|closing| *closing) => None,
            };
            let Some(header) = header else { return Ok(()) };
            let request = Request::decode(header, extended)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a request without its magic number"))?;
            reader.consume(header_len);
            if request.command == Command::Disconnect {
                self.leaves.set(true);
                return Ok(());
            }
            let turn = Arc::clone(under_way).acquire_owned().await.expect("the semaphore is never closed");
            let payload = request.payload_len(extended);
            if request.command == Command::Write && payload > 0 {
                self.write(reader, request, turn).await?;
                continue;
            }
            // No other request has a payload that is understood.
            reader.skip(payload).await?;
            let connection = Rc::clone(self);
            reactor::start(caller::inherited(async move {
                let _answered = Answered { connection: Rc::clone(&connection), request };
                match connection.check(&request, extended) {
                    Ok(()) if payload > 0 => connection.fail(&request, error::EINVAL, "unexpected payload"),
                    Ok(()) if request.command == Command::Write => {
                        connection.fail(&request, error::EINVAL, "a write without its payload");
                    }
                    Ok(()) => connection.execute(request).await,
                    Err((code, why)) => connection.fail(&request, code, why),
                }
                drop(turn);
            }));
        }
    }

    /// Command, flags and range, before anything is done.
    fn check(&self, request: &Request, extended: bool) -> Result<(), (u32, &'static str)> {
        use CommandFlags as F;
        let changes = match request.command {
            Command::Write | Command::Trim | Command::WriteZeroes => true,
            Command::Read | Command::Flush | Command::Cache | Command::BlockStatus => false,
            Command::Disconnect | Command::Unknown(_) => return Err((error::EINVAL, "no such command")),
        };
        let known = match request.command {
            Command::Read if self.agreement.form != Form::Simple => F::DF,
            Command::Write if extended => F::FUA | F::PAYLOAD_LEN,
            Command::Write | Command::Trim => F::FUA,
            Command::WriteZeroes => F::FUA | F::NO_HOLE | F::FAST_ZERO,
            Command::BlockStatus => F::REQ_ONE,
            _ => F::empty(),
        };
        // FUA means nothing where nothing is written, but clients may set it.
        let known = known | F::FUA | if extended { F::PAYLOAD_LEN } else { F::empty() };
        if !(request.flags - known).is_empty() {
            return Err((error::EINVAL, "a flag that does not belong to the command"));
        }
        if request.command == Command::Flush {
            return if request.offset == 0 && request.len == 0 {
                Ok(())
            } else {
                Err((error::EINVAL, "a flush has neither offset nor length"))
            };
        }
        if changes && self.agreement.geometry.read_only {
            return Err((error::EPERM, "the export is read-only"));
        }
        let Some(end) = request.offset.checked_add(request.len) else {
            return Err((error::EINVAL, "beyond the end of the export"));
        };
        if end > self.agreement.geometry.size && end > self.backend().geometry().size {
            let code = if changes { error::ENOSPC } else { error::EINVAL };
            return Err((code, "beyond the end of the export"));
        }
        if request.len == 0 {
            return Err((error::EINVAL, "a request of no length"));
        }
        match request.command {
            Command::Read | Command::Write if request.len > PAYLOAD_MAX.into() => {
                Err((error::EOVERFLOW, "longer than the largest payload"))
            }
            Command::BlockStatus if !self.agreement.status => Err((error::EINVAL, "no context was agreed on")),
            _ => Ok(()),
        }
    }

    async fn execute(self: Rc<Self>, request: Request) {
        let (at, len) = (request.offset, request.len);
        let durable = request.flags.contains(CommandFlags::FUA);
        let result = match request.command {
            Command::Read => return self.read(request).await,
            Command::BlockStatus => return self.block_status(request).await,
            Command::Flush => self.backend().flush().await,
            Command::Cache => self.backend().prefetch(at, len).await,
            Command::Trim => match self.stretch(at, len, async |change, at, len| change.discard(at, len).await).await {
                Ok(()) if durable => self.backend().flush().await,
                other => other,
            },
            Command::WriteZeroes => {
                let mut how = Zero::empty();
                how.set(Zero::MAY_DISCARD, !request.flags.contains(CommandFlags::NO_HOLE));
                how.set(Zero::FAST_ONLY, request.flags.contains(CommandFlags::FAST_ZERO));
                let done = self.stretch(at, len, async |change, at, len| change.zero(at, len, how).await).await;
                if done.is_ok() && durable { self.backend().flush().await } else { done }
            }
            Command::Write | Command::Disconnect | Command::Unknown(_) => unreachable!("checked before"),
        };
        self.finish(&request, result);
    }

    /// Does a change of a range of any length a stretch at a time: what waits for changes in progress waits for one of them,
    /// and what has been done of it is free for others.
    async fn stretch(
        &self,
        at: u64,
        len: u64,
        change: impl AsyncFn(&Change<'_>, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        // One client's queue of long changes is not what others have to wait for.
        let _only = match len > OWN_TURN {
            true => Some(self.long_changes.acquire().await.expect("the semaphore is never closed")),
            false => None,
        };
        let begun = self.begin(at, len).await?;
        let mut done = 0;
        while done < len {
            let next = (len - done).min(STRETCH);
            let _passing = self.agreement.export.fence.change().await?;
            change(&begun, at + done, next).await?;
            done += next;
            begun.done_until(at + done);
        }
        Ok(())
    }

    /// Begins a change, and waits for its turn.
    ///
    /// A client that has lost a connection sends what was not answered again by another, new or one of those that it has
    /// left. What the lost one had begun is over before anything that overlaps it is begun ([`Served`](crate::Served)); what it
    /// had not begun must not be begun any more.
    async fn begin(&self, at: u64, len: u64) -> io::Result<Change<'_>> {
        self.changer.changes();
        // First it has its place, and then it is looked whether it should: what comes in between comes behind it.
        let mut begun = self.agreement.export.backend.begin(at, len)?;
        if self.changer.has_others() && !self.leaves.get() && self.peer.has_closed() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        begun.turn().await?;
        Ok(begun)
    }

    /// Writes a piece, if no reservation forbids it.
    async fn write_piece(&self, at: u64, segment: Segment, durable: bool) -> io::Result<()> {
        let begun = self.begin(at, segment.len() as u64).await?;
        let _passing = self.agreement.export.fence.change().await?;
        begun.write(at, segment, durable).await
    }

    /// The answer to a request without data.
    fn finish(&self, request: &Request, result: io::Result<()>) {
        match result {
            Ok(()) if self.agreement.form == Form::Extended => {
                self.reply(wire::chunk(Form::Extended, ChunkType::None, true, request, 0), Body::Empty);
            }
            Ok(()) => self.reply(wire::simple_reply(0, request.cookie), Body::Empty),
            Err(e) => self.fail(request, error::of(&e), &e.to_string()),
        }
    }

    fn fail(&self, request: &Request, code: u32, why: &str) {
        tracing::debug!(?request, code, why, "an NBD request fails");
        let form = self.agreement.form;
        let chunked = form == Form::Extended
            || (form == Form::Structured && request.command == Command::Read)
            || (form == Form::Structured && request.command == Command::BlockStatus);
        if !chunked {
            return self.reply(wire::simple_reply(code, request.cookie), Body::Empty);
        }
        let why = &why.as_bytes()[..why.len().min(200)];
        let mut header = wire::chunk(form, ChunkType::Error, true, request, 6 + why.len() as u64);
        header.extend_from_slice(&code.to_be_bytes());
        header.extend_from_slice(&(why.len() as u16).to_be_bytes());
        header.extend_from_slice(why);
        self.reply(header, Body::Empty);
    }

    fn reply(&self, header: wire::Header, body: Body) {
        self.replies.push(Message { header, body, trailer: SmallVec::new() });
    }

    /// Reads a piece of the disk.
    async fn load(&self, at: u64, segment: Segment) -> io::Result<Segment> {
        self.backend().read(at, segment).await
    }

    async fn read(self: Rc<Self>, request: Request) {
        if let Err(e) = self.agreement.export.fence.read() {
            return self.fail(&request, error::of(&e), "the disk is reserved by an initiator");
        }
        let len = request.len as usize;
        if len > SMALL {
            self.backend().hint_sequential(request.offset, request.len);
        }
        if self.can_lend
            && let Some(lent) = self.backend().lend(request.offset, len)
        {
            return match self.agreement.form {
                Form::Simple => self.reply(wire::simple_reply(0, request.cookie), Body::Lent(lent)),
                form => self.reply(data_chunk(form, &request, request.offset, len, true), Body::Lent(lent)),
            };
        }
        let single = self.agreement.form == Form::Simple || request.flags.contains(CommandFlags::DF);
        let result = if len <= SMALL {
            self.read_small(&request).await
        } else if single {
            self.read_whole(&request).await
        } else {
            self.read_pieces(&request).await
        };
        if let Err(e) = result {
            self.fail(&request, error::of(&e), &e.to_string());
        }
    }

    async fn read_small(&self, request: &Request) -> io::Result<()> {
        let segment = self.reads.segment(request.len as usize).await?;
        let segment = self.load(request.offset, segment).await?;
        self.reply_data(request, SmallVec::from_iter([segment]));
        Ok(())
    }

    /// All of the data in one reply.
    fn reply_data(&self, request: &Request, segments: SmallVec<[Segment; 1]>) {
        let header = match self.agreement.form {
            Form::Simple => wire::simple_reply(0, request.cookie),
            form => data_chunk(form, request, request.offset, request.len as usize, true),
        };
        self.reply(header, Body::Segments(segments));
    }

    /// A reply that must not be in pieces: all of it is read, then sent.
    async fn read_whole(&self, request: &Request) -> io::Result<()> {
        let _long = self.long_turn(request.len).await;
        let pieces: Vec<_> = chunk_ranges(request.offset, request.len, self.agreement.export.chunk).collect();
        let mut reservation = self.reads.reserve(pieces.len()).await?;
        let pieces = pieces.into_iter();
        let loads = pieces.map(|(at, len)| self.load(at, reservation.segment(len)));
        let segments = futures_util::future::try_join_all(loads).await?;
        self.reply_data(request, segments.into());
        Ok(())
    }

    /// Those that take more blocks than the connection has go one by one.
    async fn long_turn(&self, len: u64) -> Option<OwnedSemaphorePermit> {
        const OWN: u64 = 4 << 20;
        if len <= OWN {
            return None;
        }
        Some(Arc::clone(&self.long).acquire_owned().await.expect("the semaphore is never closed"))
    }

    /// A reply in pieces, each sent when it is there; holes are only named.
    async fn read_pieces(self: &Rc<Self>, request: &Request) -> io::Result<()> {
        let mut parts = Vec::new();
        for (at, len, hole) in self.stretches(request.offset, request.len).await? {
            if hole {
                parts.push((at, len, true));
            } else {
                parts.extend(
                    chunk_ranges(at, len, self.agreement.export.chunk).map(|(at, len)| (at, len as u64, false)),
                );
            }
        }
        let left = Cell::new(parts.len());
        let failed = Cell::new(false);
        let loads = parts.into_iter().map(|(at, len, hole)| {
            let (left, failed) = (&left, &failed);
            async move {
                let segment = if hole {
                    self.replies.room().await;
                    None
                } else {
                    let segment = self.reads.segment(len as usize).await?;
                    Some(self.load(at, segment).await.inspect_err(|_| failed.set(true))?)
                };
                left.set(left.get() - 1);
                let done = left.get() == 0 && !failed.get();
                let form = self.agreement.form;
                match segment {
                    Some(segment) => {
                        let header = data_chunk(form, request, at, len as usize, done);
                        self.reply(header, Body::Segments(SmallVec::from_iter([segment])));
                    }
                    None => self.reply(hole_chunk(form, request, at, len as u32, done), Body::Empty),
                }
                Ok(())
            }
        });
        // All of them, whether or not one fails: nothing follows the reply that says so.
        let results: Vec<io::Result<()>> = stream::iter(loads).buffer_unordered(PIECES_MAX).collect().await;
        results.into_iter().collect()
    }

    /// The stretches of a read: offset, length, hole or not.
    async fn stretches(&self, at: u64, len: u64) -> io::Result<Vec<(u64, u64, bool)>> {
        let mut stretches = Vec::new();
        let mut position = at;
        if len >= SPARSE_MIN {
            for extent in self.backend().extents(at, len, EXTENTS_MAX).await? {
                let extent_len = extent.len.min(at + len - position);
                stretches.push((position, extent_len, extent.zero));
                position += extent_len;
            }
        }
        if position < at + len {
            stretches.push((position, at + len - position, false));
        }
        Ok(stretches)
    }

    async fn write(
        self: &Rc<Self>,
        reader: &mut Reader,
        request: Request,
        turn: OwnedSemaphorePermit,
    ) -> io::Result<()> {
        let extended = self.agreement.form == Form::Extended;
        if let Err((code, why)) = self.check(&request, extended) {
            // A payload beyond all measure is no payload, but nonsense.
            if request.len > 2 * u64::from(PAYLOAD_MAX) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "write payload exceeds the limit"));
            }
            reader.skip(request.len).await?;
            self.fail(&request, code, why);
            return Ok(());
        }
        let durable = request.flags.contains(CommandFlags::FUA);
        let single = request.len <= self.agreement.export.chunk.into();
        let write = Rc::new(Write {
            connection: Rc::clone(self),
            request,
            durable,
            single,
            failed: Cell::new(None),
            unwritten: Cell::new(chunk_ranges(request.offset, request.len, self.agreement.export.chunk).count()),
            turn: Cell::new(Some(turn)),
        });
        for (at, len) in chunk_ranges(request.offset, request.len, self.agreement.export.chunk) {
            let mut segment = self.writes.segment(len).await?;
            reader.read_exact(segment.as_mut_slice()).await.inspect_err(|_| write.abandon())?;
            let write = Rc::clone(&write);
            reactor::start(async move {
                match write.connection.write_piece(at, segment, durable && single).await {
                    Ok(()) => write.unwritten.set(write.unwritten.get() - 1),
                    Err(e) => write.failed.set(Some(e)),
                }
            });
        }
        Ok(())
    }

    async fn block_status(self: Rc<Self>, request: Request) {
        let form = self.agreement.form;
        let most = if request.flags.contains(CommandFlags::REQ_ONE) { 1 } else { EXTENTS_MAX };
        let found = match self.backend().extents(request.offset, request.len, most).await {
            Ok(found) if !found.is_empty() => found,
            Ok(_) => return self.fail(&request, error::EIO, "the storage reported no extents"),
            Err(e) => return self.fail(&request, error::of(&e), &e.to_string()),
        };
        let mut extents = limit_extents(found, form, request.len);
        extents.truncate(most);
        let flags = |e: &Extent| u32::from(e.hole) | u32::from(e.zero) << 1;
        let mut body = CONTEXT_ID.to_be_bytes().to_vec();
        let kind = if form == Form::Extended {
            body.extend_from_slice(&(extents.len() as u32).to_be_bytes());
            for extent in &extents {
                body.extend_from_slice(&extent.len.to_be_bytes());
                body.extend_from_slice(&u64::from(flags(extent)).to_be_bytes());
            }
            ChunkType::BlockStatusExt
        } else {
            for extent in &extents {
                body.extend_from_slice(&(extent.len as u32).to_be_bytes());
                body.extend_from_slice(&flags(extent).to_be_bytes());
            }
            ChunkType::BlockStatus
        };
        self.reply(wire::chunk(form, kind, true, &request, body.len() as u64), Body::Bytes(body));
    }
}

/// A write whose pieces are in progress; answered when the last is done.
struct Write {
    connection: Rc<Connection>,
    request: Request,
    durable: bool,
    single: bool,
    failed: Cell<Option<io::Error>>,
    /// Pieces of which it is not known that they are written.
    unwritten: Cell<usize>,
    turn: Cell<Option<OwnedSemaphorePermit>>,
}

impl Write {
    /// The client disconnected in the middle of it: no reply is needed.
    fn abandon(&self) {
        self.failed.set(Some(io::ErrorKind::ConnectionAborted.into()));
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        let connection = Rc::clone(&self.connection);
        let (request, turn) = (self.request, self.turn.take());
        let result = match self.failed.take() {
            Some(error) => Err(error),
            // A task that was writing a piece has panicked or was cancelled.
            None if self.unwritten.get() > 0 => Err(io::Error::from_raw_os_error(libc::EIO)),
            None => Ok(()),
        };
        if self.single || !self.durable || result.is_err() {
            return connection.finish(&request, result);
        }
        tokio::task::spawn_local(async move {
            let result = connection.backend().flush().await;
            connection.finish(&request, result);
            drop(turn);
        });
    }
}

fn data_chunk(form: Form, request: &Request, at: u64, len: usize, done: bool) -> wire::Header {
    let mut header = wire::chunk(form, ChunkType::OffsetData, done, request, 8 + len as u64);
    header.extend_from_slice(&at.to_be_bytes());
    header
}

fn hole_chunk(form: Form, request: &Request, at: u64, len: u32, done: bool) -> wire::Header {
    let mut header = wire::chunk(form, ChunkType::OffsetHole, done, request, 12);
    header.extend_from_slice(&at.to_be_bytes());
    header.extend_from_slice(&len.to_be_bytes());
    header
}

/// Extents as a reply of this form can carry them: within the request, lengths that fit.
fn limit_extents(found: Vec<Extent>, form: Form, len: u64) -> Vec<Extent> {
    /// A multiple of every block size.
    const LEN_MAX: u64 = 0xffff_0000;
    let mut left = len;
    let mut extents = Vec::new();
    for mut extent in found {
        extent.len = extent.len.min(left);
        if form != Form::Extended && extent.len > LEN_MAX {
            extent.len = LEN_MAX;
            extents.push(extent);
            break;
        }
        left -= extent.len;
        extents.push(extent);
        if left == 0 {
            break;
        }
    }
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_fit_their_reply() {
        let extent = |len| Extent { len, hole: true, zero: true };
        assert_eq!(limit_extents(vec![extent(1 << 33)], Form::Structured, 1 << 33), [extent(0xffff_0000)]);
        assert_eq!(limit_extents(vec![extent(1 << 33)], Form::Extended, 1 << 33), [extent(1 << 33)]);
        assert_eq!(limit_extents(vec![extent(100), extent(100)], Form::Structured, 150), [extent(100), extent(50)]);
    }
}
