//! One RDMAP stream in full operation: the queues of a queue pair and the rules that join them.
//!
//! No sockets, no clock, no threads. The driver hands over bytes from TCP (`rx`) and
//! takes bytes for TCP (`tx`); finished requests come out of [`Connection::completions`].
//! The same code therefore runs over a socket, in the simulator and under the fuzzer.

use crate::mpa::{Agreement, ReadyToReceive};
use crate::rdmap::{AtomicOp, AtomicRequest, AtomicResponse};
use crate::regions::{LocalPiece, Region, RegionTable, Stream};
use crate::rx::Receiver;
use crate::terminate::{self, DdpUntagged, Offending, TerminateCode};
pub use crate::tx::Posted;
use crate::tx::Transmitter;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use thruway_rdma_types::Access;
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{
    CompletionOp, ConnectionError, Error, Payload, QueuePairCaps, RecvRequest, Result, SendFlags, SendOp, SendRequest,
    Status, WorkCompletion,
};

/// Longest inline payload.
pub const MAX_INLINE: usize = 512;
/// Most elements of one request.
pub const MAX_SGE: usize = 32;

/// Which completion queue a completion belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one for sends.
    Send,
    /// The one for receives.
    Recv,
}

/// Local bytes of a send request.
pub(crate) enum LocalData {
    Pieces(SmallVec<[LocalPiece; 2]>),
    Inline(SmallVec<[u8; 64]>),
}

/// A posted send request, from posting until its completion has been reported.
pub(crate) struct SendEntry {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) data: LocalData,
    pub(crate) len: u32,
    /// Nothing is transmitted: it completes when its turn comes, as the binding of a window does.
    pub local: bool,
    done: Option<Status>,
}

impl SendEntry {
    /// An entry whose bytes have been built already.
    pub(crate) fn built(request: &SendRequest<'_>, len: u32) -> SendEntry {
        let SendRequest { wr_id, op, flags, .. } = *request;
        SendEntry { wr_id, op, flags, data: LocalData::Inline(SmallVec::new()), len, local: false, done: None }
    }

    fn completion_op(&self) -> CompletionOp {
        if self.local { CompletionOp::Bind } else { completion_op(&self.op) }
    }

    pub(crate) fn awaits_response(&self) -> bool {
        matches!(self.op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }
}

fn completion_op(op: &SendOp) -> CompletionOp {
    match op {
        SendOp::Send { .. } => CompletionOp::Send,
        SendOp::Write { .. } => CompletionOp::Write,
        SendOp::Read { .. } => CompletionOp::Read,
        SendOp::CompareSwap { .. } => CompletionOp::CompareSwap,
        SendOp::FetchAdd { .. } => CompletionOp::FetchAdd,
    }
}

/// A posted receive.
pub struct RecvEntry {
    wr_id: u64,
    pub(crate) pieces: SmallVec<[LocalPiece; 2]>,
    pub(crate) capacity: u64,
}

/// The send queue: entries in posting order; `started` of them have been handed to the wire.
#[derive(Default)]
pub(crate) struct SendQueue {
    entries: VecDeque<SendEntry>,
    /// Sequence number of the front entry.
    head: u64,
    /// Sequence number of the next entry to start. `head <= started <= head + entries.len()`.
    pub started: u64,
}

impl SendQueue {
    pub(crate) fn get(&self, seq: u64) -> &SendEntry {
        &self.entries[(seq - self.head) as usize]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Queues an entry that is on the wire already; its sequence number.
    pub(crate) fn push_started(&mut self, entry: SendEntry) -> u64 {
        let seq = self.started;
        self.entries.push_back(entry);
        self.started += 1;
        seq
    }

    pub(crate) fn next_unstarted(&self) -> Option<&SendEntry> {
        self.entries.get((self.started - self.head) as usize)
    }
}

/// An outstanding read or atomic of ours, in request order.
pub(crate) struct Outstanding {
    /// Entry of the send queue; `None` for a ready-to-receive read.
    pub seq: Option<u64>,
    pub(crate) sink_stag: u32,
    pub(crate) sink_to: u64,
    pub(crate) len: u32,
    /// Bytes of the response delivered so far, `<= len`.
    pub received: u32,
    /// The request's identifier if it is an atomic.
    pub atomic_id: Option<u32>,
}

/// What we owe the peer.
pub(crate) enum Response {
    Read { sink_stag: u32, sink_to: u64, source: Option<LocalPiece>, len: u32 },
    Atomic(AtomicResponse),
}

/// Responses in request order, with the same bookkeeping as [`SendQueue`].
#[derive(Default)]
pub(crate) struct ResponseQueue {
    pub(crate) entries: VecDeque<Response>,
    pub(crate) head: u64,
    pub(crate) started: u64,
}

/// A queue pair's protocol state in full operation.
pub struct Connection {
    pub(crate) qp_num: u32,
    pub(crate) pd: u32,
    pub(crate) table: Arc<RegionTable>,
    pub(crate) agreement: Agreement,
    pub(crate) caps: QueuePairCaps,
    pub(crate) sq: SendQueue,
    pub(crate) rq: VecDeque<RecvEntry>,
    /// Where receives come from, if they are shared: one at a time, when a message begins.
    shared: Option<Arc<SharedReceives>>,
    /// The regions that the last short message with elements was sent from, and the last receive of this connection's own was in. The
    /// next are mostly in the same, and do without the table and its lock then.
    pub(crate) sent_from: Option<Arc<Region>>,
    received_into: Option<Arc<Region>>,
    pub(crate) outstanding: VecDeque<Outstanding>,
    pub(crate) responses: ResponseQueue,
    pub(crate) tx: Transmitter,
    pub(crate) rx: Receiver,
    /// Finished requests, for the driver to hand to the completion queues.
    pub completions: Vec<(Side, WorkCompletion)>,
    /// Why the stream has ended, once it has.
    pub failure: Option<ConnectionError>,
    /// The consumer asked to close, or the peer has; nothing more may be posted.
    closing: bool,
    /// The peer's half of the stream is over.
    peer_ended: bool,
}

/// Parameters of a new connection.
pub struct ConnectionConfig {
    /// The queue pair's number, for completions.
    pub qp_num: u32,
    /// Its protection domain.
    pub pd: u32,
    /// The registered memory that it may name, within its domain.
    pub table: Arc<RegionTable>,
    /// What [`crate::mpa`] has negotiated.
    pub agreement: Agreement,
    /// Sizes of its queues.
    pub caps: QueuePairCaps,
    /// This end has connected, the other accepted.
    pub initiator: bool,
    /// Where receives come from, if they are shared.
    pub shared: Option<Arc<SharedReceives>>,
    /// Largest ULPDU to send.
    pub max_ulpdu: u16,
}

impl Connection {
    /// A stream in full operation: the set-up frames have been exchanged.
    pub fn new(config: ConnectionConfig) -> Connection {
        let ConnectionConfig { qp_num, pd, table, agreement, caps, initiator, shared, max_ulpdu } = config;
        let mut connection = Connection {
            qp_num,
            pd,
            table,
            agreement,
            caps,
            sq: SendQueue::default(),
            rq: VecDeque::new(),
            shared,
            sent_from: None,
            received_into: None,
            outstanding: VecDeque::new(),
            responses: ResponseQueue::default(),
            tx: Transmitter::new(&agreement, max_ulpdu, !initiator),
            rx: Receiver::new(&agreement, !initiator),
            completions: Vec::new(),
            failure: None,
            closing: false,
            peer_ended: false,
        };
        if let (true, Some(rtr)) = (initiator, agreement.rtr) {
            if rtr == ReadyToReceive::Read {
                connection.outstanding.push_back(Outstanding {
                    seq: None,
                    sink_stag: 0,
                    sink_to: 0,
                    len: 0,
                    received: 0,
                    atomic_id: None,
                });
            }
            connection.tx.queue_ready(rtr);
        }
        connection
    }

    /// Takes over receives posted before the connection was up.
    pub fn adopt_receives(&mut self, posted: VecDeque<RecvEntry>) {
        debug_assert!(self.rq.is_empty());
        self.rq = posted;
    }

    /// How the region table knows this stream.
    pub fn stream(&self) -> Stream {
        Stream { pd: self.pd, qp_num: self.qp_num }
    }

    /// Whether there is a receive for a message that begins.
    pub(crate) fn has_receive(&mut self) -> bool {
        if let (true, Some(shared)) = (self.rq.is_empty(), &self.shared) {
            self.rq.extend(shared.take());
        }
        !self.rq.is_empty()
    }

    /// Whether requests are taken.
    ///
    /// # Errors
    /// [`Error::State`] once the stream is closing or has failed.
    pub fn check_postable(&self) -> Result<()> {
        let state = match (&self.failure, self.closing) {
            (Some(_), _) => "in error",
            (None, true) => "closing",
            (None, false) => return Ok(()),
        };
        Err(Error::State { qp_num: self.qp_num, state })
    }

    /// Whether one send request more is taken.
    ///
    /// # Errors
    /// As [`Connection::check_postable`]; [`Error::QueueFull`].
    pub(crate) fn check_room(&self) -> Result<()> {
        self.check_postable()?;
        if self.sq.entries.len() >= self.caps.max_send_wr as usize {
            return Err(Error::QueueFull("send"));
        }
        Ok(())
    }

    /// Validates and queues a send request. Nothing is transmitted yet.
    pub fn post_send(&mut self, request: &SendRequest<'_>) -> Result<()> {
        self.check_room()?;
        let entry = self.resolve_send(request)?;
        self.sq.entries.push_back(entry);
        Ok(())
    }

    /// Queues the completion of a window's binding behind what was posted before it.
    pub fn post_bind(&mut self, wr_id: u64) -> Result<()> {
        self.check_room()?;
        let (op, data) = (SendOp::Send { invalidate: None }, LocalData::Inline(SmallVec::new()));
        self.sq.entries.push_back(SendEntry {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            data,
            len: 0,
            local: true,
            done: None,
        });
        Ok(())
    }

    fn resolve_send(&self, request: &SendRequest<'_>) -> Result<SendEntry> {
        let outbound = matches!(request.op, SendOp::Send { .. } | SendOp::Write { .. });
        let (data, len) = match request.payload {
            Payload::Inline(bytes) => {
                if !outbound {
                    return Err(Error::Unsupported("an inline payload for a read or an atomic"));
                }
                limit("inline payload", bytes.len() as u64, MAX_INLINE as u64)?;
                (LocalData::Inline(SmallVec::from_slice(bytes)), bytes.len() as u64)
            }
            Payload::Sges(sges) => {
                limit("elements of a request", sges.len() as u64, self.caps.max_sge.into())?;
                let needed = if outbound { Access::empty() } else { Access::LOCAL_WRITE };
                let mut pieces = SmallVec::new();
                let len = self.table.resolve(self.pd, sges, needed, &mut None, &mut pieces)?;
                (LocalData::Pieces(pieces), len)
            }
        };
        limit("bytes of a message", len, u32::MAX.into())?;
        match request.op {
            SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. } => {
                self.require_extensions()?;
                if len != 8 || !matches!(&data, LocalData::Pieces(p) if p.len() == 1) {
                    return Err(Error::Unsupported("an atomic whose result is not one element of 8 bytes"));
                }
                if remote.addr % 8 != 0 {
                    return Err(Error::Unsupported("an atomic on an address that is not a multiple of 8"));
                }
                self.require_ord()?;
            }
            SendOp::Read { .. } => self.require_ord()?,
            SendOp::Write { immediate: Some(_), .. } => self.require_extensions()?,
            SendOp::Write { .. } | SendOp::Send { .. } => {}
        }
        Ok(SendEntry {
            wr_id: request.wr_id,
            op: request.op,
            flags: request.flags,
            data,
            len: len as u32,
            local: false,
            done: None,
        })
    }

    fn require_extensions(&self) -> Result<()> {
        if self.agreement.extensions {
            return Ok(());
        }
        Err(Error::Unsupported("atomics and immediate data (RFC 7306), which the peer did not announce"))
    }

    fn require_ord(&self) -> Result<()> {
        if self.agreement.ord > 0 {
            return Ok(());
        }
        Err(Error::Unsupported("reads on this connection: the peer granted no read resources"))
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::Limit`] for too many elements, [`Error::LocalProtection`] for one outside of its region.
    pub fn post_recv(&mut self, request: &RecvRequest<'_>) -> Result<()> {
        self.check_postable()?;
        let posted = self.rq.len();
        let entry = resolve_recv(&self.table, self.pd, &self.caps, posted, request, &mut self.received_into)?;
        self.rq.push_back(entry);
        Ok(())
    }

    /// Marks a started send entry finished and reports everything finished at the queue's front.
    pub(crate) fn finish_send(&mut self, seq: u64, status: Status) {
        let index = (seq - self.sq.head) as usize;
        self.sq.entries[index].done = Some(status);
        while let Some(SendEntry { done: Some(status), .. }) = self.sq.entries.front() {
            let status = *status;
            let entry = self.sq.entries.pop_front().expect("just seen");
            self.sq.head += 1;
            self.report_send(&entry, status);
        }
    }

    fn report_send(&mut self, entry: &SendEntry, status: Status) {
        if entry.flags.contains(SendFlags::SIGNALED) || status != Status::Success {
            self.complete_send(entry.wr_id, status, entry.completion_op(), entry.len);
        }
    }

    /// Reports a request that went past the queues.
    pub(crate) fn report_short(&mut self, request: &SendRequest<'_>, len: u32) {
        if request.flags.contains(SendFlags::SIGNALED) {
            self.complete_send(request.wr_id, Status::Success, completion_op(&request.op), len);
        }
    }

    fn complete_send(&mut self, wr_id: u64, status: Status, op: CompletionOp, len: u32) {
        let qp_num = self.qp_num;
        let (immediate, invalidated, solicited) = (None, None, false);
        let completion = WorkCompletion { wr_id, status, op, len, qp_num, immediate, invalidated, solicited };
        self.completions.push((Side::Send, completion));
    }

    /// Completes the receive at the head of the queue.
    pub(crate) fn finish_recv(&mut self, len: u32, detail: RecvDetail) {
        let mut entry = self.rq.pop_front().expect("the receiver checked that a receive is posted");
        // A shared queue's receives are posted past this connection.
        if self.shared.is_none() {
            self.received_into = entry.pieces.pop().map(LocalPiece::into_region);
        }
        self.report_recv(entry.wr_id, Status::Success, len, detail);
    }

    fn report_recv(&mut self, wr_id: u64, status: Status, len: u32, detail: RecvDetail) {
        self.completions.push((
            Side::Recv,
            WorkCompletion {
                wr_id,
                status,
                op: if detail.immediate.is_some() { CompletionOp::RecvWriteImmediate } else { CompletionOp::Recv },
                len,
                qp_num: self.qp_num,
                immediate: detail.immediate,
                invalidated: detail.invalidated,
                solicited: detail.solicited,
            },
        ));
    }

    /// Serves an inbound read or atomic: queues the response.
    ///
    /// # Errors
    /// The Terminate code if the peer has more outstanding than was agreed.
    pub(crate) fn owe(&mut self, response: Response) -> Result<(), TerminateCode> {
        if self.responses.entries.len() >= usize::from(self.agreement.ird.max(1)) {
            return Err(DdpUntagged::NoBuffer.into());
        }
        self.responses.entries.push_back(response);
        Ok(())
    }

    /// Executes an atomic on local memory.
    pub(crate) fn execute_atomic(&mut self, request: &AtomicRequest) -> Result<u64, TerminateCode> {
        let (ptr, _placement) = self.table.remote(self.stream(), request.stag, request.to, 8, Access::REMOTE_ATOMIC)?;
        if !(ptr as usize).is_multiple_of(8) {
            return Err(crate::terminate::RdmaOperation::CatastrophicStream.into());
        }
        // SAFETY: the region table vouches for eight mapped bytes held by `_placement`; the
        // address is aligned; concurrent access by the consumer must be atomic too, as verbs require.
        let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(ptr.cast()) };
        use std::sync::atomic::Ordering::SeqCst;
        Ok(match request.op {
            AtomicOp::FetchAdd { add, mask: 0 } => word.fetch_add(add, SeqCst),
            op => word.fetch_update(SeqCst, SeqCst, |v| Some(op.apply(v))).expect("the closure never declines"),
        })
    }

    /// Ends the stream because of something the peer did: tells it, flushes everything.
    pub fn fail_protocol(&mut self, code: TerminateCode, offending: Option<Offending<'_>>) {
        if self.failure.is_some() {
            return;
        }
        let mut payload = [0; terminate::MAX_LEN];
        let n = terminate::encode(code, offending, &mut payload);
        self.tx.queue_terminate(&payload[..n]);
        if code == DdpUntagged::TooLong.into()
            && let Some(entry) = self.rq.pop_front()
        {
            self.report_recv(entry.wr_id, Status::LocalLength, 0, RecvDetail::default());
        }
        self.flush(ConnectionError::Protocol(code.into()), Status::ConnectionLost);
    }

    /// Ends the stream because the peer said so.
    pub(crate) fn fail_terminated(&mut self, code: TerminateCode) {
        let status = match (code.layer, code.etype) {
            (1, 2) if code.code == DdpUntagged::NoBuffer as u8 => Status::RemoteNoReceive,
            (0 | 1, 1) => Status::RemoteAccess,
            _ => Status::RemoteOperation,
        };
        self.flush(ConnectionError::Terminated(code.into()), status);
    }

    /// Ends the stream because TCP ended.
    pub fn fail_lost(&mut self, cause: ConnectionError) {
        self.flush(cause, Status::ConnectionLost);
    }

    /// The consumer wants out. Started and queued sends still go; then the driver closes.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Whether the consumer has asked to close, or the peer has.
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// Whether nothing of ours is left to transmit or to wait for.
    pub fn is_drained(&self) -> bool {
        self.tx.is_idle() && self.sq.entries.is_empty() && self.responses.entries.is_empty()
    }

    /// Nothing is left to transmit.
    pub fn tx_idle(&self) -> bool {
        self.tx.is_idle()
    }

    /// TCP takes nothing any more.
    pub fn tx_abandon(&mut self) {
        self.tx.abandon();
    }

    /// The consumer's side of the stream is over: what is posted will never be served.
    pub(crate) fn flush(&mut self, cause: ConnectionError, first: Status) {
        if self.failure.is_some() {
            return;
        }
        self.failure = Some(cause);
        self.rx.stop();
        let started = (self.sq.started - self.sq.head) as usize;
        let mut fault = Some(first).filter(|_| started > 0);
        let entries = std::mem::take(&mut self.sq.entries);
        // Behind the first that failed nothing succeeds, whatever the peer has answered.
        let mut failed = false;
        for (index, entry) in entries.iter().enumerate() {
            let status = match entry.done {
                Some(done) if !failed => done,
                None if index < started => fault.take().unwrap_or(Status::Flushed),
                _ => Status::Flushed,
            };
            failed |= status != Status::Success;
            self.report_send(entry, status);
        }
        for entry in std::mem::take(&mut self.rq) {
            self.report_recv(entry.wr_id, Status::Flushed, 0, RecvDetail::default());
        }
        self.outstanding.clear();
        // Before the memory is let go of.
        self.tx.drop_data();
        self.responses.entries.clear();
        drop(entries);
    }

    /// The peer sends nothing more. What we have to send still goes, but what waits for an answer never gets one.
    pub(crate) fn end_of_peer(&mut self) {
        let waits = self.outstanding.iter().any(|o| o.seq.is_some());
        let will_wait = self.sq.entries.iter().any(|entry| entry.done.is_none() && entry.awaits_response());
        self.closing = true;
        self.peer_ended = true;
        if waits || will_wait || self.is_drained() {
            self.fail_lost(ConnectionError::Closed);
        }
    }

    /// Whether the peer's half is over and ours has nothing more to send.
    pub fn is_over(&self) -> bool {
        self.peer_ended && self.is_drained()
    }

    /// Gives receives that a message has taken from a shared queue, and did not fill, back to it.
    pub fn give_back_receives(&mut self) {
        if let Some(shared) = &self.shared {
            let mut queue = shared.queue.lock_unpoisoned();
            while let Some(entry) = self.rq.pop_back() {
                queue.push_front(entry);
            }
        }
    }
}

/// The receives of a shared receive queue.
pub struct SharedReceives {
    pd: u32,
    caps: QueuePairCaps,
    queue: Mutex<VecDeque<RecvEntry>>,
}

impl SharedReceives {
    /// A queue for `max_recv_wr` receives of `max_sge` elements each, in a protection domain.
    pub fn new(pd: u32, max_recv_wr: u32, max_sge: u32) -> SharedReceives {
        SharedReceives { pd, caps: QueuePairCaps { max_send_wr: 0, max_recv_wr, max_sge }, queue: Mutex::default() }
    }

    /// Its protection domain.
    pub fn pd(&self) -> u32 {
        self.pd
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// As [`Connection::post_recv`].
    pub fn post(&self, table: &RegionTable, request: &RecvRequest<'_>) -> Result<()> {
        let mut queue = self.queue.lock_unpoisoned();
        let entry = resolve_recv(table, self.pd, &self.caps, queue.len(), request, &mut None)?;
        queue.push_back(entry);
        Ok(())
    }

    fn take(&self) -> Option<RecvEntry> {
        self.queue.lock_unpoisoned().pop_front()
    }
}

/// What a receive completion says beside its length.
#[derive(Default)]
pub(crate) struct RecvDetail {
    pub(crate) immediate: Option<u32>,
    pub(crate) invalidated: Option<u32>,
    pub(crate) solicited: bool,
}

/// Validates a receive against a queue that holds `posted` already. What is `known` may be the region that it is in, and is taken
/// then.
pub fn resolve_recv(
    table: &RegionTable,
    pd: u32,
    caps: &QueuePairCaps,
    posted: usize,
    request: &RecvRequest<'_>,
    known: &mut Option<Arc<Region>>,
) -> Result<RecvEntry> {
    if posted >= caps.max_recv_wr as usize {
        return Err(Error::QueueFull("receive"));
    }
    limit("elements of a request", request.sges.len() as u64, caps.max_sge.into())?;
    let mut pieces = SmallVec::new();
    let capacity = table.resolve(pd, request.sges, Access::LOCAL_WRITE, known, &mut pieces)?;
    Ok(RecvEntry { wr_id: request.wr_id, pieces, capacity })
}

/// Flushes receives that never saw a connection.
pub fn flush_receives(qp_num: u32, posted: VecDeque<RecvEntry>) -> Vec<(Side, WorkCompletion)> {
    let flushed = |entry: RecvEntry| WorkCompletion {
        wr_id: entry.wr_id,
        status: Status::Flushed,
        op: CompletionOp::Recv,
        len: 0,
        qp_num,
        immediate: None,
        invalidated: None,
        solicited: false,
    };
    posted.into_iter().map(|entry| (Side::Recv, flushed(entry))).collect()
}

fn limit(what: &'static str, got: u64, limit: u64) -> Result<()> {
    if got > limit {
        return Err(Error::Limit { what, got, limit });
    }
    Ok(())
}
