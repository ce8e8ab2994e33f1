//! The transmit path: messages become DDP segments, segments become FPDUs, FPDUs become a list
//! of memory pieces for one vectored send.
//!
//! Payload of Sends and Writes is not copied: a piece points into the consumer's registered memory, which the
//! verbs contract forbids it to change before the completion. Headers, pads, CRCs, markers and inline payloads live in
//! a scratch area that stays put until the kernel has taken it.
//!
//! Payload of Read Responses is copied, while the region is held against invalidation. That memory is not ours to rely
//! on: its owner may change it at any time, so the CRC has to be of the bytes that are sent, and may
//! revoke the right to it, after which none of it may be read any more.

use crate::IoVecs;
use crate::connection::{Connection, LocalData, Outstanding, Response};
use crate::crc::RunningCrc;
use crate::ddp::{Header, TAGGED_LEN, UNTAGGED_LEN, queue};
use crate::mpa::{Agreement, ReadyToReceive};
use crate::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, IMMEDIATE_LEN, Opcode, ReadRequest};
use crate::regions::Placement;
use crate::terminate::{RdmaProtection, TerminateCode};
use smallvec::SmallVec;
use std::collections::VecDeque;
use thruway_memory::shared;
use thruway_rdma_types::{SendFlags, SendOp, Status};

mod short;

pub use short::Posted;
pub(crate) use short::SHORT_MAX;

/// Bytes between markers (RFC 5044 §4.3).
pub(crate) const MARKER_INTERVAL: u64 = 512;
pub(crate) const MARKER_LEN: usize = 4;
/// Inline room for payloads that RDMAP itself defines.
const FIXED_LEN: usize = 64;
/// A batch is closed at the first segment that reaches one of these.
const BATCH_BYTES: usize = 1 << 20;
const BATCH_PIECES: usize = 256;
const BATCH_SCRATCH: usize = 32 << 10;
/// Copies stay in the processor's cache until the kernel takes them.
const BATCH_BOUNCE: usize = 256 << 10;
/// Payload pieces up to this size are copied beside their header: cheaper than one more iovec.
const COPY_BELOW: usize = SHORT_MAX;

/// Where the bytes of a piece are.
enum Piece {
    Scratch {
        at: usize,
        len: usize,
    },
    /// A copy, in `bounce`.
    Bounce {
        at: usize,
        len: usize,
    },
    Memory {
        ptr: *const u8,
        len: usize,
    },
}

/// Which queue entry a message came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Sq(u64),
    Response,
    Control,
}

/// The message being segmented. Small, because it is passed on by value.
#[derive(Clone, Copy)]
struct Message {
    source: Source,
    kind: Kind,
    /// The payload is the transmitter's `fixed`, not consumer data.
    is_fixed: bool,
    len: u32,
    /// Payload bytes already in segments, `<= len`.
    sent: u32,
    /// The next segment's place in the consumer's pieces.
    piece: usize,
    piece_offset: usize,
    /// Its last byte completes the source.
    completes: bool,
}

#[derive(Clone, Copy)]
enum Kind {
    Tagged { opcode: Opcode, stag: u32, to: u64 },
    Untagged { opcode: Opcode, qn: u32, msn: u32, invalidate: u32 },
}

/// Transmit state of a connection.
pub(crate) struct Transmitter {
    max_ulpdu: u16,
    crc: RunningCrc,
    markers: bool,
    /// Bytes of the FPDU stream put into batches so far.
    position: u64,
    /// Stream position of the FPDU being built.
    fpdu_start: u64,
    /// The next message sequence number of each untagged queue.
    msn: [u32; 4],
    /// A responder keeps silent until the initiator's first FPDU (RFC 5044 §7.1.2).
    hold: bool,
    ready: Option<ReadyToReceive>,
    terminate: Option<SmallVec<[u8; FIXED_LEN]>>,
    current: Option<Message>,
    /// Payload of the current message that RDMAP itself defines.
    fixed: SmallVec<[u8; FIXED_LEN]>,
    /// The immediate that follows the write just segmented.
    immediate: Option<(u64, u32, bool)>,
    next_atomic_id: u32,
    /// Set by `drop_data`: only a Terminate may still go out.
    control_only: bool,

    pieces: Vec<Piece>,
    scratch: Vec<u8>,
    /// The FPDU of a message that goes the short way.
    frame: Box<[u8; short::FRAME_MAX]>,
    frame_len: usize,
    /// Payload of read responses.
    bounce: Vec<u8>,
    batch_bytes: usize,
    /// First piece, and offset in it, that the kernel has not taken.
    taken_piece: usize,
    taken_offset: usize,
    /// Stream position up to which the kernel has taken everything.
    taken: u64,
    /// Messages that are complete once `taken` reaches the position.
    marks: VecDeque<(u64, Source)>,
    /// Where the FPDUs of the batch end.
    fpdu_ends: VecDeque<u64>,
    /// The last FPDU border that `taken` has passed.
    last_border: u64,
    /// The last message was a response: the send queue is next, if there is anything in it.
    responded: bool,
}

// SAFETY: the raw pointers in `pieces` refer to registered memory kept mapped by the send queue
// or response entry they came from, which outlives them (entries leave only after `advance`
// passed their mark, or in `drop_data`, which clears the pieces first).
unsafe impl Send for Transmitter {}

impl Transmitter {
    pub(crate) fn new(agreement: &Agreement, max_ulpdu: u16, responder: bool) -> Transmitter {
        Transmitter {
            max_ulpdu,
            crc: RunningCrc::new(agreement.crc),
            markers: agreement.send_markers,
            position: 0,
            fpdu_start: 0,
            msn: [1; 4],
            hold: responder,
            ready: None,
            terminate: None,
            current: None,
            fixed: SmallVec::new(),
            immediate: None,
            next_atomic_id: 1,
            control_only: false,
            pieces: Vec::new(),
            scratch: Vec::new(),
            frame: Box::new([0; short::FRAME_MAX]),
            frame_len: 0,
            bounce: Vec::new(),
            batch_bytes: 0,
            taken_piece: 0,
            taken_offset: 0,
            taken: 0,
            marks: VecDeque::new(),
            fpdu_ends: VecDeque::new(),
            last_border: 0,
            responded: false,
        }
    }

    pub(crate) fn queue_ready(&mut self, rtr: ReadyToReceive) {
        self.ready = Some(rtr);
    }

    pub(crate) fn queue_terminate(&mut self, payload: &[u8]) {
        self.terminate = Some(SmallVec::from_slice(payload));
    }

    /// The initiator has spoken: the responder may.
    pub(crate) fn release(&mut self) {
        self.hold = false;
    }

    /// Nothing is built, nothing is half sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.pieces.is_empty()
            && self.current.is_none()
            && self.ready.is_none()
            && self.terminate.is_none()
            && self.immediate.is_none()
    }

    /// Forgets consumer data. With a Terminate queued, an FPDU of which the kernel took a part is
    /// still completed, because only then can the peer read what follows; from a copy, because the memory is the
    /// consumer's again when its request has been flushed.
    pub(crate) fn drop_data(&mut self) {
        self.marks.clear();
        self.current = None;
        self.immediate = None;
        self.ready = None;
        self.control_only = true;
        self.hold = false;
        let border = self.fpdu_ends.iter().copied().find(|&end| end > self.taken).unwrap_or(self.taken);
        let mid_fpdu = self.taken != self.last_border;
        if self.terminate.is_some() && mid_fpdu {
            self.truncate_batch(border);
        } else {
            self.position = self.taken;
            self.clear_batch();
        }
        self.fpdu_ends.clear();
        let _ = self.crc.take();
    }

    /// Cuts the batch at stream position `end`, a border of FPDUs beyond `taken`, and copies what is left of it.
    fn truncate_batch(&mut self, end: u64) {
        let mut left = (end - self.taken) as usize;
        let mut rest = Vec::with_capacity(left);
        let mut skip = std::mem::take(&mut self.taken_offset);
        for piece in &self.pieces[self.taken_piece..] {
            let take = (piece.len() - skip).min(left);
            match *piece {
                Piece::Scratch { at, .. } => rest.extend_from_slice(&self.scratch[at + skip..at + skip + take]),
                Piece::Bounce { at, .. } => rest.extend_from_slice(&self.bounce[at + skip..at + skip + take]),
                // SAFETY: the entry that the piece came from is still there: its caller flushes it afterwards.
                Piece::Memory { ptr, .. } => unsafe { shared::append(&mut rest, ptr.add(skip), take) },
            }
            left -= take;
            skip = 0;
        }
        self.clear_batch();
        self.batch_bytes = rest.len();
        self.pieces.push(Piece::Scratch { at: 0, len: rest.len() });
        self.scratch = rest;
        self.position = end;
    }

    /// Gives up on everything, a Terminate included.
    pub(crate) fn abandon(&mut self) {
        self.terminate = None;
        self.ready = None;
        self.current = None;
        self.immediate = None;
        self.marks.clear();
        self.clear_batch();
        self.control_only = true;
    }

    fn clear_batch(&mut self) {
        self.pieces.clear();
        self.scratch.clear();
        self.bounce.clear();
        self.batch_bytes = 0;
        self.taken_piece = 0;
        self.taken_offset = 0;
    }

    /// Fills `out` with what the kernel should take next.
    pub(crate) fn iovecs(&self, out: &mut IoVecs) {
        out.clear();
        let mut skip = self.taken_offset;
        for piece in &self.pieces[self.taken_piece..] {
            let (ptr, len) = match *piece {
                Piece::Scratch { at, len } => (self.scratch[at..at + len].as_ptr(), len),
                Piece::Bounce { at, len } => (self.bounce[at..at + len].as_ptr(), len),
                Piece::Memory { ptr, len } => (ptr, len),
            };
            // `skip < len`: `advance` moves past whole pieces.
            out.push(libc::iovec { iov_base: ptr.wrapping_add(skip).cast_mut().cast(), iov_len: len - skip });
            skip = 0;
        }
    }

    fn push_scratch(&mut self, bytes: &[u8]) {
        let at = self.scratch.len();
        self.scratch.extend_from_slice(bytes);
        self.crc.update(&self.scratch[at..]);
        self.account_scratch(at, bytes.len());
    }

    fn account_scratch(&mut self, at: usize, len: usize) {
        match self.pieces.last_mut() {
            Some(Piece::Scratch { at: start, len: held }) if *start + *held == at => *held += len,
            _ => self.pieces.push(Piece::Scratch { at, len }),
        }
        self.position += len as u64;
        self.batch_bytes += len;
    }

    fn marker_if_due(&mut self) {
        if self.markers && self.position.is_multiple_of(MARKER_INTERVAL) {
            let pointer = (self.position - self.fpdu_start) as u16;
            let mut marker = [0; MARKER_LEN];
            marker[2..].copy_from_slice(&pointer.to_be_bytes());
            self.push_scratch(&marker);
        }
    }

    /// Bytes until the next marker, at least 1 after `marker_if_due`.
    fn until_marker(&self) -> usize {
        if self.markers { (MARKER_INTERVAL - self.position % MARKER_INTERVAL) as usize } else { usize::MAX }
    }

    fn emit_bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.marker_if_due();
            let (now, later) = bytes.split_at(bytes.len().min(self.until_marker()));
            self.push_scratch(now);
            bytes = later;
        }
    }

    fn emit_memory(&mut self, mut ptr: *const u8, mut len: usize) {
        while len > 0 {
            self.marker_if_due();
            let n = len.min(self.until_marker());
            if n <= COPY_BELOW {
                let at = self.scratch.len();
                // SAFETY: inside a local piece that `table.resolve` checked and whose region is alive.
                unsafe { shared::append(&mut self.scratch, ptr, n) };
                self.crc.update(&self.scratch[at..]);
                self.account_scratch(at, n);
            } else {
                // SAFETY: as above. The consumer must not write it before the completion.
                let bytes = unsafe { std::slice::from_raw_parts(ptr, n) };
                self.crc.update(bytes);
                self.pieces.push(Piece::Memory { ptr, len: n });
                self.position += n as u64;
                self.batch_bytes += n;
            }
            ptr = ptr.wrapping_add(n);
            len -= n;
        }
    }

    /// Copies payload that its owner may change at any time.
    ///
    /// # Safety
    /// `ptr..ptr+len` must be mapped, and held against invalidation.
    unsafe fn emit_copy(&mut self, mut ptr: *const u8, mut len: usize) {
        while len > 0 {
            self.marker_if_due();
            let n = len.min(self.until_marker());
            let at = self.bounce.len();
            // SAFETY: the caller's promise.
            unsafe { shared::append(&mut self.bounce, ptr, n) };
            self.crc.update(&self.bounce[at..]);
            match self.pieces.last_mut() {
                Some(Piece::Bounce { at: start, len: held }) if *start + *held == at => *held += n,
                _ => self.pieces.push(Piece::Bounce { at, len: n }),
            }
            self.position += n as u64;
            self.batch_bytes += n;
            ptr = ptr.wrapping_add(n);
            len -= n;
        }
    }

    fn begin_fpdu(&mut self, header: &Header, payload_len: usize) {
        // A marker that stands right before the length field belongs to this FPDU and points at
        // its own end: distance zero.
        self.fpdu_start = self.position;
        self.marker_if_due();
        self.fpdu_start = self.position;
        let mut head = [0; 2 + UNTAGGED_LEN];
        let n = header.encode(&mut head[2..]);
        head[..2].copy_from_slice(&((n + payload_len) as u16).to_be_bytes());
        self.emit_bytes(&head[..2 + n]);
    }

    fn end_fpdu(&mut self, ulpdu_len: usize) {
        let pad = (4 - (2 + ulpdu_len) % 4) % 4;
        self.emit_bytes(&[0; 3][..pad]);
        self.marker_if_due();
        let crc = self.crc.take();
        let at = self.scratch.len();
        self.scratch.extend_from_slice(&crc);
        self.account_scratch(at, crc.len());
        self.fpdu_ends.push_back(self.position);
    }

    /// Payload bytes for the next segment of a message with `left` to go: as even as possible,
    /// so that no message ends in a sliver.
    fn segment_len(&self, header_len: usize, left: usize) -> usize {
        const ALIGN: usize = 64;
        let most = usize::from(self.max_ulpdu) - header_len;
        if left <= most {
            return left;
        }
        left.div_ceil(left.div_ceil(most)).next_multiple_of(ALIGN).min(most)
    }

    /// A message whose payload RDMAP itself defines.
    fn fixed_message(&mut self, source: Source, kind: Kind, payload: &[u8]) -> Message {
        self.fixed.clear();
        self.fixed.extend_from_slice(payload);
        Message { is_fixed: true, ..Message::data(source, kind, payload.len() as u32, true) }
    }

    fn next_msn(&mut self, qn: u32) -> u32 {
        let msn = self.msn[qn as usize];
        self.msn[qn as usize] = msn.wrapping_add(1);
        msn
    }
}

impl Connection {
    /// Builds FPDUs until the batch is full or nothing may be sent. True if there is something
    /// for the kernel to take.
    pub fn tx_fill(&mut self) -> bool {
        if self.tx.pieces.is_empty() {
            if !self.has_unsent() {
                return false;
            }
            while self.tx.batch_bytes < BATCH_BYTES
                && self.tx.pieces.len() < BATCH_PIECES
                && self.tx.scratch.len() < BATCH_SCRATCH
                && self.tx.bounce.len() < BATCH_BOUNCE
            {
                let Some(message) = self.tx.current.or_else(|| self.next_message()) else { break };
                match self.build_segment(message) {
                    Ok(rest) => self.tx.current = rest,
                    Err(code) => {
                        self.tx.current = None;
                        self.fail_protocol(code, None);
                    }
                }
            }
        }
        !self.tx.pieces.is_empty()
    }

    /// Whether there is something that has not been handed over yet, though it may have to wait for the peer.
    pub fn has_unsent(&self) -> bool {
        !self.tx.is_idle() || self.sq.next_unstarted().is_some() || self.owes_responses()
    }

    /// Bytes that the kernel has taken so far.
    pub fn sent(&self) -> u64 {
        self.tx.taken
    }

    /// What the kernel should take next; see [`Connection::tx_advance`].
    pub fn tx_iovecs(&self, out: &mut IoVecs) {
        self.tx.iovecs(out);
    }

    /// The kernel took `n` bytes from the front of the last iovecs.
    pub fn tx_advance(&mut self, mut n: usize) {
        self.tx.taken += n as u64;
        while n > 0 {
            let len = self.tx.pieces[self.tx.taken_piece].len();
            let left = len - self.tx.taken_offset;
            if n < left {
                self.tx.taken_offset += n;
                break;
            }
            n -= left;
            self.tx.taken_offset = 0;
            self.tx.taken_piece += 1;
        }
        if self.tx.taken_piece == self.tx.pieces.len() {
            self.tx.clear_batch();
        }
        while let Some(end) = self.tx.fpdu_ends.pop_front_if(|end| *end <= self.tx.taken) {
            self.tx.last_border = end;
        }
        while let Some(&(position, source)) = self.tx.marks.front() {
            if position > self.tx.taken {
                break;
            }
            self.tx.marks.pop_front();
            match source {
                Source::Sq(seq) => self.finish_send(seq, Status::Success),
                Source::Response => {
                    self.responses.entries.pop_front();
                    self.responses.head += 1;
                }
                Source::Control => {}
            }
        }
    }

    /// Chooses the next message: Terminate, then the ready indication, then owed responses and the send
    /// queue in turn, so that a peer that keeps reading does not silence us.
    fn next_message(&mut self) -> Option<Message> {
        if let Some(payload) = self.tx.terminate.take() {
            let msn = self.tx.next_msn(queue::TERMINATE);
            let kind = Kind::Untagged { opcode: Opcode::Terminate, qn: queue::TERMINATE, msn, invalidate: 0 };
            return Some(self.tx.fixed_message(Source::Control, kind, &payload));
        }
        if self.tx.control_only || self.tx.hold {
            return None;
        }
        if let Some(ready) = self.tx.ready.take() {
            return Some(self.ready_message(ready));
        }
        if let Some((seq, value, solicited)) = self.tx.immediate.take() {
            let opcode = if solicited { Opcode::ImmediateSolicited } else { Opcode::Immediate };
            let msn = self.tx.next_msn(queue::SEND);
            let kind = Kind::Untagged { opcode, qn: queue::SEND, msn, invalidate: 0 };
            let payload: [u8; IMMEDIATE_LEN] = u64::from(value).to_be_bytes();
            return Some(self.tx.fixed_message(Source::Sq(seq), kind, &payload));
        }
        let owed = self.owes_responses();
        if owed && !std::mem::replace(&mut self.tx.responded, true) {
            return Some(self.response_message());
        }
        let next = self.send_queue_message();
        match next {
            None if owed => Some(self.response_message()),
            next => {
                self.tx.responded = false;
                next
            }
        }
    }

    /// Whether there are responses that have not been started.
    pub(crate) fn owes_responses(&self) -> bool {
        self.responses.started < self.responses.head + self.responses.entries.len() as u64
    }

    fn ready_message(&mut self, ready: ReadyToReceive) -> Message {
        let kind = match ready {
            ReadyToReceive::Write => Kind::Tagged { opcode: Opcode::Write, stag: 0, to: 0 },
            ReadyToReceive::Send => {
                let msn = self.tx.next_msn(queue::SEND);
                Kind::Untagged { opcode: Opcode::Send, qn: queue::SEND, msn, invalidate: 0 }
            }
            ReadyToReceive::Read => {
                let msn = self.tx.next_msn(queue::READ_REQUEST);
                let kind = Kind::Untagged { opcode: Opcode::ReadRequest, qn: queue::READ_REQUEST, msn, invalidate: 0 };
                return self.tx.fixed_message(Source::Control, kind, &[0; ReadRequest::LEN]);
            }
        };
        self.tx.fixed_message(Source::Control, kind, &[])
    }

    fn response_message(&mut self) -> Message {
        let index = (self.responses.started - self.responses.head) as usize;
        self.responses.started += 1;
        match &self.responses.entries[index] {
            Response::Read { sink_stag, sink_to, len, .. } => {
                let kind = Kind::Tagged { opcode: Opcode::ReadResponse, stag: *sink_stag, to: *sink_to };
                Message::data(Source::Response, kind, *len, true)
            }
            Response::Atomic(response) => {
                let mut payload = [0; AtomicResponse::LEN];
                response.encode(&mut payload);
                let msn = self.tx.next_msn(queue::ATOMIC_RESPONSE);
                let kind =
                    Kind::Untagged { opcode: Opcode::AtomicResponse, qn: queue::ATOMIC_RESPONSE, msn, invalidate: 0 };
                self.tx.fixed_message(Source::Response, kind, &payload)
            }
        }
    }

    fn send_queue_message(&mut self) -> Option<Message> {
        // What is only of this end is done when its turn comes.
        while self.sq.next_unstarted()?.local {
            let seq = self.sq.started;
            self.sq.started += 1;
            self.finish_send(seq, Status::Success);
        }
        let entry = self.sq.next_unstarted()?;
        if entry.flags.contains(SendFlags::FENCE) && !self.outstanding.is_empty() {
            return None;
        }
        if entry.awaits_response() && self.outstanding.len() >= usize::from(self.agreement.ord) {
            return None;
        }
        let seq = self.sq.started;
        let (op, len, flags) = (entry.op, entry.len, entry.flags);
        let (sink_stag, sink_to) = (0x5457_0000 | (seq as u32 & 0xffff), 0);
        self.sq.started += 1;
        let source = Source::Sq(seq);
        Some(match op {
            SendOp::Send { invalidate } => {
                let opcode = Opcode::send(invalidate.is_some(), flags.contains(SendFlags::SOLICITED));
                let msn = self.tx.next_msn(queue::SEND);
                let invalidate = invalidate.unwrap_or(0);
                Message::data(source, Kind::Untagged { opcode, qn: queue::SEND, msn, invalidate }, len, true)
            }
            SendOp::Write { remote, immediate } => {
                let kind = Kind::Tagged { opcode: Opcode::Write, stag: remote.rkey, to: remote.addr };
                self.tx.immediate = immediate.map(|value| (seq, value, flags.contains(SendFlags::SOLICITED)));
                Message::data(source, kind, len, immediate.is_none())
            }
            SendOp::Read { remote } => {
                let request = ReadRequest { sink_stag, sink_to, len, source_stag: remote.rkey, source_to: remote.addr };
                let mut payload = [0; ReadRequest::LEN];
                request.encode(&mut payload);
                self.request_message(seq, Opcode::ReadRequest, &payload, sink_stag, len, None)
            }
            SendOp::CompareSwap { remote, compare, swap } => {
                let op = AtomicOp::CompareSwap { swap, swap_mask: u64::MAX, compare, compare_mask: u64::MAX };
                self.atomic_message(seq, remote.rkey, remote.addr, op)
            }
            SendOp::FetchAdd { remote, add } => {
                self.atomic_message(seq, remote.rkey, remote.addr, AtomicOp::FetchAdd { add, mask: 0 })
            }
        })
    }

    fn atomic_message(&mut self, seq: u64, stag: u32, to: u64, op: AtomicOp) -> Message {
        let id = self.tx.next_atomic_id;
        self.tx.next_atomic_id = id.wrapping_add(1);
        let mut payload = [0; AtomicRequest::LEN];
        AtomicRequest { id, stag, to, op }.encode(&mut payload);
        self.request_message(seq, Opcode::AtomicRequest, &payload, 0, 8, Some(id))
    }

    fn request_message(
        &mut self,
        seq: u64,
        opcode: Opcode,
        payload: &[u8],
        sink_stag: u32,
        len: u32,
        atomic_id: Option<u32>,
    ) -> Message {
        self.outstanding.push_back(Outstanding { seq: Some(seq), sink_stag, sink_to: 0, len, received: 0, atomic_id });
        let msn = self.tx.next_msn(queue::READ_REQUEST);
        let kind = Kind::Untagged { opcode, qn: queue::READ_REQUEST, msn, invalidate: 0 };
        // The entry is complete when its response is in, not when the request is out.
        self.tx.fixed_message(Source::Control, kind, payload)
    }

    /// Puts one segment into the batch; returns the message if more of it is left.
    ///
    /// # Errors
    /// If the peer has lost the right to what it reads.
    fn build_segment(&mut self, mut message: Message) -> Result<Option<Message>, TerminateCode> {
        let _placement = self.hold_source(&message)?;
        let header_len = match message.kind {
            Kind::Tagged { .. } => TAGGED_LEN,
            Kind::Untagged { .. } => UNTAGGED_LEN,
        };
        let left = (message.len - message.sent) as usize;
        let n = self.tx.segment_len(header_len, left);
        let last = n == left;
        let header = match message.kind {
            Kind::Tagged { opcode, stag, to } => {
                Header::Tagged { opcode, last, stag, to: to.wrapping_add(message.sent.into()) }
            }
            Kind::Untagged { opcode, qn, msn, invalidate } => {
                Header::Untagged { opcode, last, invalidate, qn, msn, mo: message.sent }
            }
        };
        self.tx.begin_fpdu(&header, n);
        self.emit_payload(&mut message, n);
        self.tx.end_fpdu(header_len + n);
        message.sent += n as u32;
        if !last {
            return Ok(Some(message));
        }
        if message.completes {
            self.tx.marks.push_back((self.tx.position, message.source));
        }
        Ok(None)
    }

    /// Holds the memory of a read response against invalidation while a segment of it is built.
    fn hold_source(&self, message: &Message) -> Result<Option<Placement>, TerminateCode> {
        let Source::Response = message.source else { return Ok(None) };
        let index = (self.responses.started - 1 - self.responses.head) as usize;
        match &self.responses.entries[index] {
            Response::Read { source: Some(piece), .. } => {
                piece.region().enter().map(Some).ok_or(RdmaProtection::InvalidStag.into())
            }
            _ => Ok(None),
        }
    }

    fn emit_payload(&mut self, message: &mut Message, n: usize) {
        if message.is_fixed {
            let at = message.sent as usize;
            let fixed = std::mem::take(&mut self.tx.fixed);
            self.tx.emit_bytes(&fixed[at..at + n]);
            self.tx.fixed = fixed;
            return;
        }
        let pieces = match message.source {
            Source::Sq(seq) => match &self.sq.get(seq).data {
                LocalData::Inline(bytes) => {
                    let at = message.sent as usize;
                    self.tx.emit_bytes(&bytes[at..at + n]);
                    return;
                }
                LocalData::Pieces(pieces) => pieces.as_slice(),
            },
            Source::Response => {
                // The message under construction is the last one started.
                let index = (self.responses.started - 1 - self.responses.head) as usize;
                match &self.responses.entries[index] {
                    Response::Read { source, .. } => source.as_slice(),
                    Response::Atomic(_) => &[],
                }
            }
            Source::Control => &[],
        };
        let mut left = n;
        while left > 0 {
            let piece = &pieces[message.piece];
            let now = left.min(piece.len as usize - message.piece_offset);
            let ptr = piece.ptr.wrapping_add(message.piece_offset);
            match message.source {
                // SAFETY: `remote_source` checked the piece, and `hold_source` holds it.
                Source::Response => unsafe { self.tx.emit_copy(ptr, now) },
                Source::Sq(_) | Source::Control => self.tx.emit_memory(ptr, now),
            }
            left -= now;
            message.piece_offset += now;
            if message.piece_offset == piece.len as usize {
                message.piece += 1;
                message.piece_offset = 0;
            }
        }
    }
}

impl Piece {
    fn len(&self) -> usize {
        match *self {
            Piece::Scratch { len, .. } | Piece::Bounce { len, .. } | Piece::Memory { len, .. } => len,
        }
    }
}

impl Message {
    fn data(source: Source, kind: Kind, len: u32, completes: bool) -> Message {
        Message { source, kind, is_fixed: false, len, sent: 0, piece: 0, piece_offset: 0, completes }
    }
}
