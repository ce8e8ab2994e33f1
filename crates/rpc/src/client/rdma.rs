//! Calls over RDMA (RFC 8166): what is long in them is read by the server from this end's memory, and what is long in replies is
//! written there; or, by a server of the old design, read from the server's memory by this end.

use super::{Arguments, CallError};
use crate::rdma::header::{
    Chunks, Header, HeaderError, PrivateData, Procedure, RdmaSegment, ReadChunk, Segments, total,
};
use crate::server::{BULK_MAX, CALL_MAX};
use crate::xdr::{Decoder, Encoder, padded};
use smallvec::{SmallVec, smallvec};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use thruway_engine::Segment;
use thruway_fabric::Provider;
use thruway_server::Buffers;
use thruway_server::rdma::channel::Driver;
use thruway_server::rdma::{Channel, Exposed, Exposures, Messages, Options, Registration};
use tokio::sync::Notify;

/// Longest message of ours, and of those that we take.
const MESSAGE_MAX: usize = 4096;
/// RDMA Reads outstanding, each way.
const READ_DEPTH: u16 = 16;
/// Bytes of one RDMA Read, of a server of the old design.
const PIECE: usize = BULK_MAX;

/// How calls are made over RDMA.
#[derive(Debug, Clone)]
pub struct RdmaOptions {
    /// By what.
    pub provider: Provider,
    /// How memory is registered for the server.
    pub registration: Registration,
    /// Calls at a time, if the server grants as many.
    pub credits: usize,
}

/// A call in progress, which has a credit.
pub(super) struct InProgress<'a> {
    rdma: &'a Rdma,
    xid: u32,
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        let rdma = self.rdma;
        rdma.in_progress.set(rdma.in_progress.get() - 1);
        // One that is given up while the server may still use its memory ends the connection.
        if rdma.memory.borrow_mut().remove(&self.xid).is_some_and(|memory| memory.is_used()) {
            rdma.channel.fail();
        }
        rdma.freed.notify_waiters();
    }
}

/// Reply to a call.
pub(super) struct Arrived {
    pub message: Vec<u8>,
    /// Items of the results that are not among the bytes.
    pub items: SmallVec<[Segment; 1]>,
}

impl From<Vec<u8>> for Arrived {
    fn from(message: Vec<u8>) -> Arrived {
        Arrived { message, items: SmallVec::new() }
    }
}

/// Memory of a call in progress.
#[derive(Default)]
struct Memory {
    /// Of the arguments.
    data: SmallVec<[Exposed; 2]>,
    /// For an item of the results.
    item: Option<Exposed>,
    /// For the whole reply.
    reply: Option<Exposed>,
}

impl Memory {
    fn is_used(&self) -> bool {
        !self.data.is_empty() || self.item.is_some() || self.reply.is_some()
    }
}

/// A connection over RDMA.
pub(super) struct Rdma {
    channel: Rc<Channel>,
    exposures: Exposures,
    /// For what is read from a server's memory.
    pulled: Buffers,
    /// Longest message to the server.
    message_max: usize,
    memory: RefCell<HashMap<u32, Memory>>,
    /// Calls that the server takes at a time, and that are in progress.
    granted: Cell<usize>,
    in_progress: Cell<usize>,
    credits: usize,
    freed: Notify,
    _driver: Driver,
}

fn piece(exposed: &Exposed) -> RdmaSegment {
    let remote = exposed.remote();
    RdmaSegment { handle: remote.rkey, length: exposed.len() as u32, offset: remote.addr }
}

fn invalid(what: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

impl Rdma {
    pub(super) async fn connect(server: SocketAddr, options: &RdmaOptions) -> io::Result<(Rdma, Messages)> {
        let ours = PrivateData {
            // What a device registers is not for peers to revoke; user space lets them.
            remote_invalidation: options.registration.is_for_one_request() && options.provider.is_in_user_space(),
            send_size: MESSAGE_MAX as u32,
            receive_size: MESSAGE_MAX as u32,
        };
        let sizes = Options {
            message_max: MESSAGE_MAX,
            receives: options.credits + 1,
            // One for each call, and for the end of what the server has lent.
            sends: 2 * options.credits,
            backlog_max: 2 * options.credits,
            send_depth: 4 * options.credits,
            read_depth: READ_DEPTH,
            private_data: ours.encode().to_vec(),
        };
        let (channel, messages, driver, said) = Channel::connect(&options.provider, server, sizes).await?;
        let exposures = Exposures::new(channel.domain(), options.registration, options.credits, CALL_MAX)?;
        let rdma = Rdma {
            message_max: MESSAGE_MAX.min(PrivateData::decode(&said).receive_size as usize),
            channel,
            exposures,
            pulled: Buffers::new(PIECE),
            memory: RefCell::default(),
            // Until the server has said more.
            granted: Cell::new(1),
            in_progress: Cell::new(0),
            credits: options.credits,
            freed: Notify::new(),
            _driver: driver,
        };
        Ok((rdma, messages))
    }

    /// Waits for a credit.
    async fn credit(&self) -> io::Result<()> {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if self.channel.is_broken() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if self.in_progress.get() < self.granted.get() {
                self.in_progress.set(self.in_progress.get() + 1);
                return Ok(());
            }
            freed.await;
        }
    }

    /// Sends a call, which is in progress until what this returns is dropped.
    pub(super) async fn send(&self, xid: u32, call: Encoder, room: &Arguments) -> io::Result<InProgress<'_>> {
        self.credit().await?;
        let in_progress = InProgress { rdma: self, xid };
        let (mut memory, mut chunks) = (Memory::default(), Chunks::default());
        if room.item_max > 0 {
            let item = self.exposures.room(room.item_max).await?;
            chunks.write.push(smallvec![piece(&item)]);
            memory.item = Some(item);
        }
        if room.reply_max > 0 {
            let reply = self.exposures.room(room.reply_max).await?;
            chunks.reply = Some(smallvec![piece(&reply)]);
            memory.reply = Some(reply);
        }
        // All in the message, if it is short; the long items apart; all apart.
        let inline = |chunks: &Chunks, bytes: &[u8]| {
            let mut out = Encoder::new();
            let procedure = Procedure::Message(chunks.clone());
            Header { xid, credits: self.credits as u32, procedure }.encode(&mut out);
            out.fixed(bytes);
            (out.len() <= self.message_max).then(|| out.to_bytes())
        };
        let message = match (call.len() <= self.message_max).then(|| inline(&chunks, &call.to_bytes())).flatten() {
            Some(message) => message,
            None => {
                let (bytes, bulk) = call.into_parts();
                let mut apart = 0;
                for (at, body) in &bulk {
                    let mut parts: SmallVec<[Vec<u8>; 1]> = SmallVec::new();
                    body.bytes(|part| parts.push(part.to_vec()));
                    let parts: SmallVec<[&[u8]; 1]> = parts.iter().map(Vec::as_slice).collect();
                    let data = self.exposures.data(&parts).await?;
                    let position = (at + apart) as u32;
                    apart += padded(body.len());
                    chunks.read.push(ReadChunk { position, segments: smallvec![piece(&data)] });
                    memory.data.push(data);
                }
                match inline(&chunks, &bytes) {
                    Some(message) => message,
                    None => {
                        let whole = self.exposures.data(&[&bytes]).await?;
                        chunks.read.insert(0, ReadChunk { position: 0, segments: smallvec![piece(&whole)] });
                        memory.data.push(whole);
                        let mut out = Encoder::new();
                        let procedure = Procedure::NoMessage(chunks);
                        Header { xid, credits: self.credits as u32, procedure }.encode(&mut out);
                        out.to_bytes()
                    }
                }
            }
        };
        self.memory.borrow_mut().insert(xid, memory);
        self.channel.send(message, None);
        Ok(in_progress)
    }

    pub(super) fn fail(&self) {
        self.channel.fail();
        self.freed.notify_waiters();
    }

    /// What a message brings, and for which call.
    pub(super) async fn take(&self, message: &[u8]) -> io::Result<Option<(u32, Result<Arrived, CallError>)>> {
        let mut d = Decoder::new(message);
        let header = match Header::decode(&mut d) {
            Ok(header) => header,
            Err(HeaderError::Runt) => return Ok(None),
            Err(error) => return Err(invalid(error)),
        };
        let Header { xid, credits, procedure } = header;
        self.granted.set((credits as usize).clamp(1, self.credits));
        self.freed.notify_waiters();
        let Some(memory) = self.memory.borrow_mut().remove(&xid) else { return Ok(None) };
        let refused = |why: &'static str| Ok(Some((xid, Err(CallError::Rdma(why)))));
        let (bytes, chunks) = match procedure {
            Procedure::Message(chunks) => (d.rest().to_vec(), chunks),
            Procedure::NoMessage(chunks) => match (memory.reply, chunks.reply.as_ref().map(|reply| total(reply))) {
                (Some(reply), Some(len)) if len <= reply.len() as u64 => {
                    let segment = reply.take(len as usize).await;
                    (segment.as_slice().to_vec(), Chunks { reply: None, ..chunks })
                }
                _ => (self.pull_whole(&chunks).await?, chunks),
            },
            Procedure::ErrorVersion { .. } => return refused("version 1 is not spoken"),
            Procedure::ErrorChunk => return refused("the reply has no room, or the call makes no sense"),
            Procedure::Done => return Ok(None),
        };
        let mut items = SmallVec::new();
        if let (Some(item), Some(written)) = (memory.item, chunks.write.first()) {
            match total(written) as usize {
                0 => {}
                len if len <= item.len() => items.push(item.take(len).await),
                _ => return Err(invalid("more has been written than there was room for")),
            }
        }
        let lent = chunks.read.iter().any(|chunk| !chunk.segments.is_empty());
        for chunk in chunks.read.iter().filter(|chunk| chunk.position > 0) {
            items.push(self.pull(&chunk.segments).await?);
        }
        if lent {
            // The server has its memory back.
            let mut done = Encoder::new();
            Header { xid, credits: self.credits as u32, procedure: Procedure::Done }.encode(&mut done);
            self.channel.send(done.to_bytes(), None);
        }
        Ok(Some((xid, Ok(Arrived { message: bytes, items }))))
    }

    /// A message that is in the memory of a server of the old design.
    async fn pull_whole(&self, chunks: &Chunks) -> io::Result<Vec<u8>> {
        match chunks.read.first() {
            Some(whole) if whole.position == 0 => Ok(self.pull(&whole.segments).await?.as_slice().to_vec()),
            _ => Err(invalid("a reply that is nowhere")),
        }
    }

    async fn pull(&self, from: &Segments) -> io::Result<Segment> {
        let len = total(from);
        if len == 0 || len > PIECE as u64 {
            return Err(invalid(format!("an item of {len} bytes in the server's memory")));
        }
        let mut left = self.pulled.segment(len as usize).await?;
        let mut item: Option<Segment> = None;
        for segment in from.iter().filter(|segment| segment.length > 0) {
            let next = left.split_off(segment.length as usize);
            let part = std::mem::replace(&mut left, next);
            let part = self.channel.read(part, segment.remote(0)).await.ok_or(io::ErrorKind::BrokenPipe)?;
            match &mut item {
                Some(item) => item.join(part),
                None => item = Some(part),
            }
        }
        Ok(item.expect("an item has bytes"))
    }
}
