//! Connections over RDMA (RFC 8166): memory of this host is never exposed. What is long in a call is pulled by RDMA Read, what is
//! long in a reply pushed by RDMA Write ahead of the Send that announces it.
//!
//! A client's credits are the receives posted for it: calls are taken only as fast as earlier ones end.

use super::back::{BackCalls, BackChannel, is_reply};
use super::{BULK_MAX, CALL_MAX, Connection, FIRST_CALL_TIMEOUT, Programs, Received, Server, Transport, refused};
use crate::message::{AuthError, Refusal};
use crate::rdma::header::{Chunks, Header, HeaderError, PrivateData, Procedure, RdmaSegment, total};
use crate::rdma::reply::{self, Transfer};
use crate::xdr::{BulkItem, Decoder, Encoder};
use futures_util::future::join_all;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::{Reactors, Segment};
use thruway_fabric::{ConnectionRequest, Provider, RemoteAddr};
use thruway_server::rdma::{Channel, Exposed, Exposures, Messages, Options, Registration};
use thruway_server::{Acceptor, Body, Buffers, ConnectionKind, Permit, panics, slices};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Calls of a client in progress at a time, which is what it is granted: as many as Linux's client asks for.
const CREDITS: usize = 128;
/// Calls to a client in progress at a time, which is what is asked for: one, until it grants more (RFC 8167, section 4.1).
const BACK_CREDITS: usize = 8;
/// Receives posted: one for each credit, for each reply to a call to the client, and some for what needs none.
const RECEIVES: usize = CREDITS + BACK_CREDITS + 8;
/// A client that takes messages of so many bytes can be called.
const BACK_MESSAGE_MIN: usize = 3 << 10;
/// Longest message without chunks, each way, in bytes: what Linux's client and server have by default.
const MESSAGE_MAX: usize = 4096;
/// Messages that may be in the send queue.
const SENDS: usize = CREDITS;
/// Requests of the send queue.
const SEND_DEPTH: usize = 512;
/// RDMA Reads outstanding.
const READ_DEPTH: u16 = 32;
/// Items of one call that are pulled: with more, calls could wait for memory that others of their connection hold.
const BULK_ITEMS_MAX: usize = 1;
/// Calls that are pulled whole, at a time.
const LONG_CALLS_MAX: usize = 4;
/// Bytes of a call, or of a reply, that are moved by one piece of memory.
const PIECE: usize = 256 << 10;
/// How long what has been queued may still be sent when the connection ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Which end moves long results, in Noronha's words (chapter 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Design {
    /// The server writes them to the client's memory, and its own is never exposed (RFC 8166).
    #[default]
    ReadWrite,
    /// The client reads them from the server's memory and says when it has them: the design before, for comparisons. A client that
    /// does not say it keeps that memory, and may read all of what its connection has for results: for trusted peers only.
    ReadRead,
}

/// Configuration of a server over RDMA.
pub struct RdmaConfig {
    /// Name of the protocol, for logs and limits.
    pub protocol: &'static str,
    /// Addresses to listen on.
    pub listen: Vec<SocketAddr>,
    /// By what.
    pub provider: Provider,
    /// Which end moves long results.
    pub design: Design,
    /// What is served.
    pub programs: Programs,
    /// Of clients over the loopback interface, serve only root and the user that this process runs as; of what an RDMA device
    /// brings, nobody knows the user.
    pub own_user_only: bool,
    /// Connections at a time.
    pub connections_max: usize,
}

struct Service {
    programs: Programs,
    design: Design,
    provider: Provider,
    acceptor: Arc<Acceptor>,
}

impl Server {
    /// Starts to serve over RDMA on these reactors.
    ///
    /// # Errors
    /// For the first address that cannot be listened on: there may be no RDMA device for it.
    pub fn start_rdma(config: RdmaConfig, reactors: &Reactors) -> thruway_fabric::Result<Server> {
        let own_user_only = config.own_user_only && config.provider.is_in_user_space();
        let acceptor = Acceptor::new(config.protocol, ConnectionKind::Rdma, config.connections_max, own_user_only);
        let service = Arc::new(Service {
            programs: config.programs,
            design: config.design,
            provider: config.provider.clone(),
            acceptor: Arc::clone(&acceptor),
        });
        let addresses = acceptor.listen_rdma(&config.listen, &config.provider, reactors, move |request, permit| {
            let service = Arc::clone(&service);
            async move { service.serve(request, &permit).await }
        })?;
        Ok(Server { addresses, acceptor })
    }
}

impl Service {
    async fn serve(&self, request: ConnectionRequest, permit: &Permit) -> io::Result<()> {
        let peer = request.peer();
        let client = PrivateData::decode(request.private_data());
        let ours =
            PrivateData { remote_invalidation: true, send_size: MESSAGE_MAX as u32, receive_size: MESSAGE_MAX as u32 };
        let options = Options {
            message_max: MESSAGE_MAX,
            receives: RECEIVES,
            sends: SENDS,
            backlog_max: CREDITS,
            send_depth: SEND_DEPTH,
            read_depth: READ_DEPTH,
            private_data: ours.encode().to_vec(),
        };
        let (channel, mut messages, driver) =
            Channel::accept(&self.provider, request, options).map_err(io::Error::other)?;
        let message_max = MESSAGE_MAX.min(client.receive_size as usize);
        let (back, back_calls) = BackChannel::new();
        let mut connection = Connection::new(Some(peer), Transport::Rdma, false, Vec::new());
        connection.lost = Some(channel.failure());
        connection.back = (message_max >= BACK_MESSAGE_MIN).then_some(back);
        let lent = match self.design {
            Design::ReadWrite => None,
            Design::ReadRead => Some(Lent {
                items: RefCell::default(),
                exposures: Exposures::new(channel.domain(), Registration::All, 1, BULK_MAX)?,
            }),
        };
        let served = Rc::new(Served {
            lent,
            programs: self.programs.clone(),
            connection: Rc::new(connection),
            channel,
            message_max,
            back_calls: BackCalls::default(),
            revocable: client.remote_invalidation,
            bulk: Buffers::new(BULK_MAX),
            replies: Buffers::new(PIECE),
            calls: Arc::new(Semaphore::new(CREDITS)),
            long_calls: Arc::new(Semaphore::new(LONG_CALLS_MAX)),
        });
        served.back_calls.allow(1);
        let result = tokio::select! {
            result = served.serve(&mut messages, permit, self.acceptor.closing()) => result,
            () = served.back_calls.run(back_calls, |xid, call| served.call_back(xid, call)) => Ok(()),
        };
        // Calls in progress are still answered. If the connection is lost, calls that have changed nothing end early.
        let _ = served.calls.acquire_many(CREDITS as u32).await;
        driver.close(CLOSE_TIMEOUT).await;
        result
    }
}

/// An item in the pieces that its memory has.
type Pieces = SmallVec<[Exposed; 1]>;

/// What clients are reading from this end's memory.
struct Lent {
    /// Of each reply, its items in their pieces.
    items: RefCell<HashMap<u32, SmallVec<[Pieces; 1]>>>,
    exposures: Exposures,
}

struct Served {
    /// For the design in which clients do that.
    lent: Option<Lent>,
    programs: Programs,
    connection: Rc<Connection>,
    channel: Rc<Channel>,
    /// Longest message to the client.
    message_max: usize,
    /// The client lets its keys be revoked.
    revocable: bool,
    back_calls: BackCalls,
    /// For what is pulled of calls.
    bulk: Buffers,
    /// For what is pushed of replies and is in no segment.
    replies: Buffers,
    /// One for each credit.
    calls: Arc<Semaphore>,
    long_calls: Arc<Semaphore>,
}

/// What of a message is to be kept for its reply.
struct Request {
    xid: u32,
    credits: u32,
    chunks: Chunks,
}

/// A call: its bytes, items that are apart from them, and its place among those that were pulled whole.
type Pulled = (Vec<u8>, SmallVec<[BulkItem; 1]>, Option<OwnedSemaphorePermit>);

/// Why there is no call in a message.
enum Unusable {
    /// The answer is an error of this kind.
    Error(Procedure),
    /// The connection is lost.
    Lost,
}

impl Served {
    async fn serve(
        self: &Rc<Self>,
        messages: &mut Messages,
        permit: &Permit,
        mut closing: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let first = permit.handshake(FIRST_CALL_TIMEOUT, async { Ok(messages.recv().await) }).await?;
        let Some(mut message) = first else { return Ok(()) };
        permit.set_authenticated()?;
        loop {
            slices::begin(1).await;
            let turn = Arc::clone(&self.calls).acquire_owned().await.expect("the semaphore is never closed");
            let this = Rc::clone(self);
            thruway_engine::reactor::start(async move {
                let _turn = turn;
                if panics::catch(this.message(message)).await.is_err() {
                    this.channel.fail();
                }
            });
            self.channel.room().await;
            // Nothing is taken before it may begin, so that clients cannot exceed what they have been granted.
            while self.calls.available_permits() == 0 && !self.channel.is_broken() {
                let _ = self.calls.acquire().await;
            }
            let next = tokio::select! {
                biased;
                next = messages.recv() => next,
                _ = closing.wait_for(|closing| *closing) => None,
            };
            let Some(next) = next else { return Ok(()) };
            message = next;
        }
    }

    /// Does what a message asks for.
    async fn message(&self, message: Vec<u8>) -> io::Result<()> {
        let mut decoder = Decoder::new(&message);
        let header = match Header::decode(&mut decoder) {
            Ok(header) => header,
            Err(HeaderError::Runt) => return Ok(()),
            Err(HeaderError::Version { xid, version: _ }) => {
                self.error(xid, Procedure::ErrorVersion { low: 1, high: 1 });
                return Ok(());
            }
            Err(HeaderError::Malformed { xid, error }) => {
                tracing::debug!(%error, "header of RPC over RDMA that cannot be decoded");
                self.error(xid, Procedure::ErrorChunk);
                return Ok(());
            }
        };
        let Header { xid, credits, procedure } = header;
        let (inline, chunks) = match procedure {
            Procedure::Message(chunks) => {
                if is_reply(decoder.rest()) {
                    self.back_calls.allow((credits as usize).min(BACK_CREDITS));
                    self.back_calls.take_reply(decoder.rest().to_vec());
                    return Ok(());
                }
                (Some(decoder.rest()), chunks)
            }
            Procedure::NoMessage(chunks) => (None, chunks),
            Procedure::Done => {
                self.lent.iter().for_each(|lent| drop(lent.items.borrow_mut().remove(&xid)));
                return Ok(());
            }
            // Nobody waits for an answer.
            Procedure::ErrorVersion { .. } | Procedure::ErrorChunk => return Ok(()),
        };
        let (call, bulk, _long) = match self.pull(inline, &chunks).await {
            Ok(parts) => parts,
            Err(Unusable::Lost) => return Err(io::ErrorKind::BrokenPipe.into()),
            Err(Unusable::Error(procedure)) => {
                self.error(xid, procedure);
                return Ok(());
            }
        };
        let request = Request { xid, credits, chunks };
        let received = self.programs.receive(call, bulk, &self.connection);
        match received {
            Ok(Some(received)) if received.xid() != xid => self.error(xid, Procedure::ErrorChunk),
            Ok(Some(Received::Call(mut call, program))) => {
                let reply = self.programs.answer(&mut call, &*program).await;
                // What it held is free for others before its reply is sent, but for the place of a long one.
                let long_reply = call.into_long_reply();
                if let Some(reply) = reply {
                    self.push(request, reply).await;
                }
                drop(long_reply);
            }
            Ok(Some(Received::StartTls { xid })) => {
                self.push(request, refused(xid, Refusal::Auth(AuthError::RejectedCredential))).await;
            }
            Ok(Some(Received::Reply { reply, .. })) => self.push(request, reply).await,
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, "no RPC message behind a header of RPC over RDMA");
                self.error(xid, Procedure::ErrorChunk);
            }
        }
        Ok(())
    }

    /// Sends a call to the client, which has no chunks (RFC 8167, section 4.2).
    fn call_back(&self, xid: u32, call: Encoder) {
        let mut out = Encoder::new();
        let procedure = Procedure::Message(Chunks::default());
        Header { xid, credits: BACK_CREDITS as u32, procedure }.encode(&mut out);
        out.append(call);
        // One that is too long is not answered.
        if out.len() <= self.message_max {
            self.channel.send(out.to_bytes(), None);
        }
    }

    fn error(&self, xid: u32, procedure: Procedure) {
        let mut out = Encoder::new();
        Header { xid, credits: CREDITS as u32, procedure }.encode(&mut out);
        self.channel.send(out.into_parts().0, None);
    }

    /// The call of a message: its bytes, and items that are apart from them.
    async fn pull(&self, inline: Option<&[u8]>, chunks: &Chunks) -> Result<Pulled, Unusable> {
        const MALFORMED: Unusable = Unusable::Error(Procedure::ErrorChunk);
        let (mut read, mut long) = (&chunks.read[..], None);
        let message = match inline {
            Some(inline) => inline.to_vec(),
            None => {
                let Some((whole, rest)) = read.split_first() else { return Err(MALFORMED) };
                if whole.position != 0 || total(&whole.segments) > CALL_MAX as u64 {
                    return Err(MALFORMED);
                }
                read = rest;
                long = Some(Arc::clone(&self.long_calls).acquire_owned().await.expect("never closed"));
                self.pull_message(&whole.segments).await?
            }
        };
        let mut bulk = SmallVec::new();
        for chunk in read {
            let len = total(&chunk.segments);
            // A position zero belongs to a message without bytes of its own; an item is as long as that of one NFS WRITE.
            if chunk.position == 0 || len > BULK_MAX as u64 || bulk.len() == BULK_ITEMS_MAX {
                return Err(MALFORMED);
            }
            if len > 0 {
                bulk.push(BulkItem { position: chunk.position, segment: self.pull_item(&chunk.segments).await? });
            }
        }
        Ok((message, bulk, long))
    }

    async fn pull_message(&self, from: &[RdmaSegment]) -> Result<Vec<u8>, Unusable> {
        let mut message = Vec::new();
        for segment in from {
            let mut at = 0;
            while at < segment.length {
                let len = ((segment.length - at) as usize).min(PIECE);
                let piece = self.bulk.segment(len).await.map_err(|_| Unusable::Lost)?;
                let piece = self.channel.read(piece, segment.remote(at)).await.ok_or(Unusable::Lost)?;
                message.extend_from_slice(piece.as_slice());
                at += len as u32;
            }
        }
        Ok(message)
    }

    /// All pieces at once, side by side in one segment.
    async fn pull_item(&self, from: &[RdmaSegment]) -> Result<Segment, Unusable> {
        let mut left = self.bulk.segment(total(from) as usize).await.map_err(|_| Unusable::Lost)?;
        let mut reads: SmallVec<[_; 2]> = SmallVec::new();
        for segment in from.iter().filter(|segment| segment.length > 0) {
            let next = left.split_off(segment.length as usize);
            reads.push(self.channel.read(std::mem::replace(&mut left, next), segment.remote(0)));
        }
        let mut item: Option<Segment> = None;
        for piece in join_all(reads).await {
            let piece = piece.ok_or(Unusable::Lost)?;
            match &mut item {
                Some(item) => item.join(piece),
                None => item = Some(piece),
            }
        }
        Ok(item.expect("an item has bytes"))
    }

    /// Sends a reply: what is long of it first, to where the client wants it.
    async fn push(&self, request: Request, reply: Encoder) {
        let Request { xid, credits, chunks } = request;
        let granted = credits.clamp(1, CREDITS as u32);
        if let Some(lent) = &self.lent {
            match self.in_segments(reply).await {
                Ok(reply) => return self.lend(lent, xid, granted, reply),
                Err(_) => return self.channel.fail(),
            }
        }
        let invalidate = if self.revocable { chunks.only_handle() } else { None };
        let plan = match reply::plan(xid, granted, reply, chunks, self.message_max) {
            Ok(plan) => plan,
            Err(error) => {
                tracing::debug!(%error, "no room for a reply");
                return self.error(xid, Procedure::ErrorChunk);
            }
        };
        for transfer in plan.transfers {
            if self.transfer(transfer).await.is_err() {
                return self.channel.fail();
            }
        }
        self.channel.send(plan.message, invalidate);
    }

    /// A reply whose long items are all in memory that can be registered.
    async fn in_segments(&self, reply: Encoder) -> io::Result<Encoder> {
        let (bytes, mut bulk) = reply.into_parts();
        for (_, body) in &mut bulk {
            if let Body::Bytes(own) = body {
                let mut segment = self.bulk.segment(own.len()).await?;
                segment.as_mut_slice().copy_from_slice(own);
                *body = Body::Segments(std::iter::once(segment).collect());
            }
        }
        Ok(Encoder::from_parts(bytes, bulk))
    }

    /// Sends a reply whose long items the client reads.
    fn lend(&self, lent: &Lent, xid: u32, granted: u32, reply: Encoder) {
        let lend = |body: Body| match body {
            Body::Segments(segments) => {
                let items: io::Result<Pieces> =
                    segments.into_iter().map(|segment| lent.exposures.lend(segment)).collect();
                let items = items?;
                let piece = |item: &Exposed| {
                    let remote = item.remote();
                    RdmaSegment { handle: remote.rkey, length: item.len() as u32, offset: remote.addr }
                };
                Ok((items.iter().map(piece).collect(), items))
            }
            _ => Err(io::Error::other("only registered memory can be lent")),
        };
        match reply::plan_read_read(xid, granted, reply, self.message_max, lend) {
            Ok((message, items)) => {
                if !items.is_empty() {
                    lent.items.borrow_mut().insert(xid, items);
                }
                self.channel.send(message, None);
            }
            Err(error) => {
                tracing::debug!(%error, "a reply that cannot be sent");
                self.error(xid, Procedure::ErrorChunk);
            }
        }
    }

    /// Queues the RDMA Writes of bytes that are copied.
    async fn transfer_copy(&self, bytes: &[u8], mut remote: RemoteAddr) -> io::Result<()> {
        for piece in bytes.chunks(PIECE) {
            let mut segment = self.replies.segment(piece.len()).await?;
            segment.as_mut_slice().copy_from_slice(piece);
            self.channel.write(segment, remote);
            remote.addr = remote.addr.wrapping_add(piece.len() as u64);
        }
        Ok(())
    }

    /// Queues the RDMA Writes of a part of a reply.
    async fn transfer(&self, Transfer { mut body, places }: Transfer) -> io::Result<()> {
        for (mut remote, len) in places {
            let rest = body.split_off(len as usize);
            match std::mem::replace(&mut body, rest) {
                Body::Empty => {}
                Body::Segments(segments) => {
                    for segment in segments {
                        let len = segment.len() as u64;
                        self.channel.write(segment, remote);
                        remote.addr = remote.addr.wrapping_add(len);
                    }
                }
                Body::Bytes(bytes) => self.transfer_copy(&bytes, remote).await?,
                Body::Shared(segment, range) => self.transfer_copy(&segment.as_slice()[range], remote).await?,
                Body::Lent(_) => return Err(io::Error::other("lent memory cannot be sent over RDMA")),
            }
        }
        Ok(())
    }
}
