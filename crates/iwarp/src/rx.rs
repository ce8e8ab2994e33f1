//! The receive path: where the bytes of an FPDU go.
//!
//! This is the answer to "where do the bytes of an RDMA Write land?": [`Connection::rx_iovecs`]
//! tells the driver to let the kernel copy the rest of the current segment's payload straight to
//! its final address, with a small *stash* behind it for the trailer and the next header. Bytes
//! that arrive in the stash are parsed by [`Connection::rx_received`]; payload among them is
//! copied once to its place.
//!
//! A tagged segment is placed as it comes and delivered (reported, answered) only when its CRC
//! has been checked, so a corrupted segment can spoil its own target buffer but no other, and ends
//! the connection.
//!
//! Every length, offset, sequence number and key in here was chosen by the peer. TCP keeps order,
//! so anything but the one expected sequence number and offset is a lie.

use crate::IoVecs;
use crate::connection::{Connection, RecvDetail, Response};
use crate::crc::RunningCrc;
use crate::ddp::{self, Header, queue};
use crate::mpa::{Agreement, ReadyToReceive};
use crate::rdmap::{AtomicRequest, AtomicResponse, IMMEDIATE_LEN, Opcode, ReadRequest};
use crate::regions::{LocalPiece, Placement, Region};
use crate::terminate::{self, DdpTagged, DdpUntagged, Mpa, Offending, RdmaOperation, RdmaProtection, TerminateCode};
use crate::tx::{MARKER_INTERVAL, MARKER_LEN};
use smallvec::SmallVec;
use std::sync::Arc;
use thruway_memory::shared;
use thruway_rdma_types::Access;
use thruway_rdma_types::{ConnectionError, SendOp, Status};

mod short;

/// Bytes of stash offered when no payload is being placed.
const STASH_LEN: usize = 8 << 10;
/// Bytes of stash offered behind payload: trailer, next header and a little.
const STASH_BEHIND_PAYLOAD: usize = 64;
/// Payload remainders below this come through the stash: one copy costs less than one system call.
const DIRECT_FROM: usize = 512;
/// Most iovecs of one receive.
const MAX_IOVECS: usize = 512;
/// Room for every payload that RDMAP itself defines.
const FIXED_LEN: usize = 64;

/// What the receiver is in the middle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Collecting the length field and the DDP header.
    Header,
    /// Placing payload.
    Payload,
    /// Collecting pad and CRC.
    Trailer,
    /// The connection has failed; nothing is accepted any more.
    Stopped,
}

/// A contiguous part of the target.
#[derive(Clone, Copy)]
struct Target {
    ptr: *mut u8,
    len: usize,
}

/// Receive state of a connection.
pub(crate) struct Receiver {
    phase: Phase,
    stash: Box<[u8]>,
    /// Length field and header of the current FPDU, `head_len` bytes of it so far.
    head: [u8; 2 + ddp::MAX_HEADER_LEN],
    head_len: usize,
    header: Option<Header>,
    ulpdu_len: u16,
    /// Payload bytes of the current segment not yet placed.
    payload_left: usize,
    payload_len: usize,
    /// Where they go, in order; holds exactly `payload_left` bytes.
    targets: SmallVec<[Target; 4]>,
    /// The region that `targets` of a tagged segment are in.
    claim: Option<Arc<Region>>,
    /// Holds `claim` against invalidation from [`Connection::rx_iovecs`] to
    /// [`Connection::rx_received`], and no longer: a peer that stalls inside a segment must not
    /// block the revocation of its key.
    placement: Option<Placement>,
    /// Target of payloads that RDMAP itself defines.
    fixed: Box<[u8; FIXED_LEN]>,
    trailer: [u8; 3 + 4],
    trailer_len: usize,
    trailer_need: usize,
    crc: RunningCrc,
    markers: bool,
    /// Bytes of the FPDU stream consumed so far.
    position: u64,
    fpdu_start: u64,
    marker: [u8; MARKER_LEN],
    marker_len: usize,
    /// Scratch for markers inside a direct placement.
    marker_area: Vec<[u8; MARKER_LEN]>,
    /// Next message sequence number of each untagged queue, and offset inside that message.
    msn: [u32; 4],
    mo: [u32; 4],
    /// What kind of message has begun on each untagged queue.
    begun: [Option<Opcode>; 4],
    /// No FPDU has arrived yet, and this end waits for the initiator's.
    first: Option<Option<ReadyToReceive>>,
    /// Bytes of an unfinished RDMA Write, reported with a following immediate.
    write_len: u32,
    last_write_len: u32,
}

// SAFETY: the raw pointers in `targets` refer to memory kept mapped by `claim`, by the posted
// receive or read they belong to, or by `fixed`.
unsafe impl Send for Receiver {}

impl Receiver {
    pub(crate) fn new(agreement: &Agreement, responder: bool) -> Receiver {
        Receiver {
            phase: Phase::Header,
            stash: vec![0; STASH_LEN].into_boxed_slice(),
            head: [0; 2 + ddp::MAX_HEADER_LEN],
            head_len: 0,
            header: None,
            ulpdu_len: 0,
            payload_left: 0,
            payload_len: 0,
            targets: SmallVec::new(),
            claim: None,
            placement: None,
            fixed: Box::new([0; FIXED_LEN]),
            trailer: [0; 7],
            trailer_len: 0,
            trailer_need: 0,
            crc: RunningCrc::new(agreement.crc),
            markers: agreement.receive_markers,
            position: 0,
            fpdu_start: 0,
            marker: [0; MARKER_LEN],
            marker_len: 0,
            marker_area: Vec::new(),
            msn: [1; 4],
            mo: [0; 4],
            begun: [None; 4],
            first: responder.then_some(agreement.rtr),
            write_len: 0,
            last_write_len: 0,
        }
    }

    pub(crate) fn stop(&mut self) {
        self.phase = Phase::Stopped;
        self.targets.clear();
        (self.claim, self.placement) = (None, None);
    }

    /// Whether the stream stands between FPDUs, where TCP may end in order.
    fn is_between_fpdus(&self) -> bool {
        self.phase == Phase::Header && self.head_len == 0 && self.marker_len == 0
    }

    fn wants_direct(&self) -> bool {
        self.phase == Phase::Payload && self.payload_left >= DIRECT_FROM && self.marker_len == 0
    }

    fn until_marker(&self) -> usize {
        if self.markers { (MARKER_INTERVAL - self.position % MARKER_INTERVAL) as usize } else { usize::MAX }
    }

    /// Checks a whole marker at `position` and accounts for it.
    fn check_marker(&mut self, marker: [u8; MARKER_LEN]) -> Result<(), TerminateCode> {
        let pointer = u16::from_be_bytes([marker[2], marker[3]]);
        // Only 16 bits of the distance fit in a marker.
        if pointer != (self.position - self.fpdu_start) as u16 {
            return Err(Mpa::Marker.into());
        }
        self.crc.update(&marker);
        self.position += MARKER_LEN as u64;
        if self.phase == Phase::Header && self.head_len == 0 {
            self.fpdu_start = self.position;
        }
        Ok(())
    }
}

impl Connection {
    /// Where the next bytes from TCP go. Call [`Connection::rx_received`] with how many came,
    /// even if none, before anything else touches the connection. False, and nowhere, if the
    /// connection has failed: the peer's right was revoked in the middle of a segment.
    #[must_use]
    pub fn rx_iovecs(&mut self, out: &mut IoVecs) -> bool {
        out.clear();
        if let Some(claim) = &self.rx.claim {
            self.rx.placement = claim.enter();
            if self.rx.placement.is_none() {
                return self.conclude_receive(Err(DdpTagged::InvalidStag.into()));
            }
        }
        let rx = &mut self.rx;
        let mut behind = STASH_LEN;
        if rx.wants_direct() {
            behind = STASH_BEHIND_PAYLOAD;
            if rx.markers {
                if !rx.iovecs_with_markers(out) {
                    return true;
                }
            } else {
                out.extend(
                    rx.targets.iter().take(MAX_IOVECS).map(|t| libc::iovec { iov_base: t.ptr.cast(), iov_len: t.len }),
                );
                if rx.targets.len() > MAX_IOVECS {
                    return true;
                }
            }
        }
        out.push(libc::iovec { iov_base: rx.stash.as_mut_ptr().cast(), iov_len: behind });
        true
    }

    /// `n` bytes have been written to the last iovecs, in order. True if the connection is
    /// still sound.
    pub fn rx_received(&mut self, mut n: usize) -> bool {
        let result = (|| {
            if self.rx.wants_direct() {
                n -= self.rx.account_direct(n)?;
                if self.rx.payload_left == 0 {
                    self.rx.phase = Phase::Trailer;
                }
            }
            // The stash is lent to the parser and put back: it is always drained.
            let stash = std::mem::take(&mut self.rx.stash);
            let parsed = self.parse(&stash[..n]);
            self.rx.stash = stash;
            parsed
        })();
        self.rx.placement = None;
        self.conclude_receive(result)
    }

    fn conclude_receive(&mut self, result: Result<(), TerminateCode>) -> bool {
        match result {
            Ok(()) => self.failure.is_none(),
            Err(code) => {
                let (head, fixed) = (self.rx.head, *self.rx.fixed);
                let header_len = self.rx.head_len.saturating_sub(2);
                // Of what the check of its bytes failed there is nothing to be told.
                let known = self.rx.header.is_some() && code != Mpa::Crc.into();
                // A Read Request that was understood, and refused (RFC 5040 section 4.8).
                let is_read = matches!(self.rx.header, Some(Header::Untagged { opcode: Opcode::ReadRequest, .. }));
                let read = is_read && matches!((code.layer, code.etype), (0, 1 | 2));
                let whole = self.rx.payload_len == ReadRequest::LEN && self.rx.payload_left == 0;
                let read_request = if read && whole { fixed.first_chunk() } else { None };
                let offending = Offending { len: self.rx.ulpdu_len, header: &head[2..2 + header_len], read_request };
                self.fail_protocol(code, known.then_some(offending));
                false
            }
        }
    }

    /// Bytes that were read before the connection existed. As [`Connection::rx_received`].
    pub fn rx_feed(&mut self, bytes: &[u8]) -> bool {
        let parsed = self.parse(bytes);
        self.rx.placement = None;
        self.conclude_receive(parsed)
    }

    /// TCP reached its end.
    pub fn rx_eof(&mut self) {
        if self.rx.is_between_fpdus() {
            self.end_of_peer();
        } else {
            self.fail_lost(ConnectionError::Lost("the stream ended inside a message".into()));
        }
    }

    fn parse(&mut self, mut bytes: &[u8]) -> Result<(), TerminateCode> {
        while !bytes.is_empty() {
            if self.rx.phase == Phase::Stopped {
                return Ok(());
            }
            if let Some(used) = self.parse_short(bytes) {
                bytes = &bytes[used..];
                continue;
            }
            let due = self.rx.markers && self.rx.position.is_multiple_of(MARKER_INTERVAL);
            if due || self.rx.marker_len > 0 {
                let rx = &mut self.rx;
                let n = bytes.len().min(MARKER_LEN - rx.marker_len);
                rx.marker[rx.marker_len..rx.marker_len + n].copy_from_slice(&bytes[..n]);
                rx.marker_len += n;
                bytes = &bytes[n..];
                if rx.marker_len == MARKER_LEN {
                    rx.marker_len = 0;
                    rx.check_marker(rx.marker)?;
                }
                continue;
            }
            let run = bytes.len().min(self.rx.until_marker());
            let used = match self.rx.phase {
                Phase::Header => self.parse_header(&bytes[..run])?,
                Phase::Payload => self.rx.place(&bytes[..run]),
                Phase::Trailer => self.parse_trailer(&bytes[..run])?,
                Phase::Stopped => unreachable!("checked above"),
            };
            bytes = &bytes[used..];
            if self.rx.phase == Phase::Payload && self.rx.payload_left == 0 {
                self.rx.phase = Phase::Trailer;
            }
        }
        Ok(())
    }

    fn parse_header(&mut self, bytes: &[u8]) -> Result<usize, TerminateCode> {
        let rx = &mut self.rx;
        // The length field and the first DDP byte tell how long the header is.
        let need = match (rx.head_len, bytes.get(2)) {
            // Mostly it is all there.
            (0, Some(&first)) => 2 + Header::len_from_first_byte(first),
            (..3, _) => 3,
            _ => 2 + Header::len_from_first_byte(rx.head[2]),
        };
        let n = bytes.len().min(need - rx.head_len);
        rx.head[rx.head_len..rx.head_len + n].copy_from_slice(&bytes[..n]);
        // At once, because a marker may stand inside the header.
        rx.crc.update(&bytes[..n]);
        rx.head_len += n;
        rx.position += n as u64;
        if rx.head_len < 3 || rx.head_len < 2 + Header::len_from_first_byte(rx.head[2]) {
            return Ok(n);
        }
        let head_len = rx.head_len;
        let header_len = head_len - 2;
        rx.ulpdu_len = u16::from_be_bytes([rx.head[0], rx.head[1]]);
        let payload_len = usize::from(rx.ulpdu_len)
            .checked_sub(header_len)
            .ok_or(TerminateCode::from(RdmaOperation::CatastrophicStream))?;
        let header = Header::decode(&rx.head[2..head_len])?;
        rx.header = Some(header);
        rx.payload_len = payload_len;
        rx.payload_left = payload_len;
        rx.trailer_need = (4 - (2 + usize::from(rx.ulpdu_len)) % 4) % 4 + 4;
        rx.trailer_len = 0;
        rx.targets.clear();
        self.begin_segment(header, payload_len)?;
        let rx = &mut self.rx;
        rx.phase = if payload_len == 0 { Phase::Trailer } else { Phase::Payload };
        Ok(n)
    }

    /// Validates a segment's claim and sets the place of its payload.
    fn begin_segment(&mut self, header: Header, len: usize) -> Result<(), TerminateCode> {
        if let Some(expected) = self.rx.first.take() {
            self.tx.release();
            if let (Some(ReadyToReceive::Send), 0) = (expected, len)
                && let Header::Untagged { opcode: Opcode::Send, mo: 0, last: true, qn, msn, .. } = header
            {
                // Counts on its queue but consumes no receive; `finish_segment` knows by this.
                self.rx.first = Some(Some(ReadyToReceive::Send));
                return self.check_sequence(qn, queue::SEND, msn, 0);
            }
        }
        match header {
            Header::Tagged { opcode: Opcode::Write, stag, to, .. } => self.begin_write(stag, to, len),
            Header::Tagged { opcode: Opcode::ReadResponse, stag, to, last } => {
                self.begin_read_response(stag, to, last, len)
            }
            Header::Untagged { opcode, last, qn, msn, mo, .. } => self.begin_untagged(opcode, last, qn, msn, mo, len),
            Header::Tagged { .. } => Err(RdmaOperation::UnexpectedOpcode.into()),
        }
    }

    fn begin_write(&mut self, stag: u32, to: u64, len: usize) -> Result<(), TerminateCode> {
        // A zero-length write names no memory, so nothing about it is checked (RFC 5040 §5.2).
        if len > 0 {
            let claim = self.table.remote(self.stream(), stag, to, len as u64, Access::REMOTE_WRITE);
            let (ptr, placement) = claim.map_err(tagged_fault)?;
            self.rx.targets.push(Target { ptr, len });
            self.rx.claim = Some(Arc::clone(placement.region()));
            self.rx.placement = Some(placement);
        }
        self.rx.write_len = self.rx.write_len.wrapping_add(len as u32);
        Ok(())
    }

    fn begin_read_response(&mut self, stag: u32, to: u64, last: bool, len: usize) -> Result<(), TerminateCode> {
        let read = self.outstanding.front().filter(|o| o.atomic_id.is_none());
        let read = read.ok_or(RdmaOperation::UnexpectedOpcode)?;
        if stag != read.sink_stag {
            return Err(DdpTagged::InvalidStag.into());
        }
        let left = (read.len - read.received) as usize;
        if to != read.sink_to + u64::from(read.received) || len > left || last != (len == left) {
            return Err(DdpTagged::BaseOrBounds.into());
        }
        let offset = read.received as usize;
        if let (Some(seq), true) = (read.seq, len > 0) {
            let crate::connection::LocalData::Pieces(pieces) = &self.sq.get(seq).data else {
                unreachable!("reads have no inline payload")
            };
            slice_pieces(pieces, offset, len, &mut self.rx.targets);
        }
        Ok(())
    }

    fn begin_untagged(
        &mut self,
        opcode: Opcode,
        last: bool,
        qn: u32,
        msn: u32,
        mo: u32,
        len: usize,
    ) -> Result<(), TerminateCode> {
        let (expected_qn, fixed) = match opcode {
            Opcode::ReadRequest => (queue::READ_REQUEST, Some(ReadRequest::LEN)),
            Opcode::AtomicRequest => (queue::READ_REQUEST, Some(AtomicRequest::LEN)),
            Opcode::AtomicResponse => (queue::ATOMIC_RESPONSE, Some(AtomicResponse::LEN)),
            Opcode::Immediate | Opcode::ImmediateSolicited => (queue::SEND, Some(IMMEDIATE_LEN)),
            Opcode::Terminate => (queue::TERMINATE, None),
            _ => (queue::SEND, None),
        };
        if opcode.is_extension() && !self.agreement.extensions {
            return Err(RdmaOperation::UnexpectedOpcode.into());
        }
        self.check_sequence(qn, expected_qn, msn, mo)?;
        if self.rx.begun[qn as usize].is_some_and(|begun| begun != opcode) {
            // Another kind of message has begun on this queue and is not over.
            return Err(RdmaOperation::UnexpectedOpcode.into());
        }
        if let Some(fixed) = fixed {
            // These messages are one segment of one size.
            if len > fixed {
                return Err(DdpUntagged::TooLong.into());
            }
            if len < fixed || !last {
                return Err(RdmaOperation::CatastrophicStream.into());
            }
        }
        let needs_receive = qn == queue::SEND;
        if needs_receive && !self.has_receive() {
            return Err(DdpUntagged::NoBuffer.into());
        }
        if fixed.is_some() || opcode == Opcode::Terminate {
            // So is a Terminate, of whatever size; pieces of it would add up to more than there is room for.
            if len > FIXED_LEN || !last {
                return Err(DdpUntagged::TooLong.into());
            }
            self.rx.targets.push(Target { ptr: self.rx.fixed.as_mut_ptr(), len });
            return Ok(());
        }
        let receive = self.rq.front().expect("checked above");
        if u64::from(mo) + len as u64 > receive.capacity {
            return Err(DdpUntagged::TooLong.into());
        }
        slice_pieces(&receive.pieces, mo as usize, len, &mut self.rx.targets);
        Ok(())
    }

    fn check_sequence(&mut self, qn: u32, expected_qn: u32, msn: u32, mo: u32) -> Result<(), TerminateCode> {
        if qn != expected_qn {
            return Err(DdpUntagged::InvalidQn.into());
        }
        if msn != self.rx.msn[qn as usize] {
            return Err(DdpUntagged::InvalidMsn.into());
        }
        if mo != self.rx.mo[qn as usize] {
            return Err(DdpUntagged::InvalidMo.into());
        }
        Ok(())
    }

    fn parse_trailer(&mut self, bytes: &[u8]) -> Result<usize, TerminateCode> {
        let rx = &mut self.rx;
        let n = bytes.len().min(rx.trailer_need - rx.trailer_len);
        rx.trailer[rx.trailer_len..rx.trailer_len + n].copy_from_slice(&bytes[..n]);
        rx.trailer_len += n;
        rx.position += n as u64;
        // The pad enters the CRC as it comes, because a marker may stand between it and the CRC.
        let pad = rx.trailer_need - 4;
        let before = rx.trailer_len - n;
        if before < pad {
            let upto = pad.min(rx.trailer_len);
            rx.crc.update(&rx.trailer[before..upto]);
        }
        if rx.trailer_len < rx.trailer_need {
            return Ok(n);
        }
        let check = rx.crc.is_enabled();
        let computed = rx.crc.take();
        if check && computed != rx.trailer[pad..rx.trailer_need] {
            return Err(Mpa::Crc.into());
        }
        (rx.claim, rx.placement) = (None, None);
        self.finish_segment()?;
        let rx = &mut self.rx;
        if rx.phase != Phase::Stopped {
            rx.phase = Phase::Header;
        }
        rx.head_len = 0;
        rx.header = None;
        rx.fpdu_start = rx.position;
        Ok(n)
    }

    /// A whole, checked segment: keep the books, and deliver if it ends its message.
    fn finish_segment(&mut self) -> Result<(), TerminateCode> {
        let header = self.rx.header.expect("set by parse_header");
        let len = self.rx.payload_len as u32;
        match header {
            Header::Tagged { opcode: Opcode::Write, last, .. } => {
                if last {
                    self.rx.last_write_len = std::mem::take(&mut self.rx.write_len);
                }
                Ok(())
            }
            Header::Tagged { last, .. } => {
                let read = self.outstanding.front_mut().expect("begin_read_response saw it");
                read.received += len;
                if last {
                    let seq = self.outstanding.pop_front().expect("just seen").seq;
                    if let Some(seq) = seq {
                        self.finish_send(seq, Status::Success);
                    }
                }
                Ok(())
            }
            Header::Untagged { opcode, last, invalidate, qn, mo, .. } => {
                if !last {
                    self.rx.mo[qn as usize] = mo.checked_add(len).ok_or(DdpUntagged::InvalidMo)?;
                    self.rx.begun[qn as usize] = Some(opcode);
                    return Ok(());
                }
                self.rx.mo[qn as usize] = 0;
                self.rx.begun[qn as usize] = None;
                let whole = mo.checked_add(len).ok_or(DdpUntagged::InvalidMo)?;
                self.rx.msn[qn as usize] = self.rx.msn[qn as usize].wrapping_add(1);
                self.deliver_untagged(opcode, invalidate, whole)
            }
        }
    }

    fn deliver_untagged(&mut self, opcode: Opcode, invalidate: u32, len: u32) -> Result<(), TerminateCode> {
        if self.rx.first.take().is_some() {
            return Ok(());
        }
        match opcode {
            Opcode::ReadRequest => {
                let request = ReadRequest::decode(self.rx.fixed[..ReadRequest::LEN].try_into().expect("fixed size"));
                self.serve_read(&request)
            }
            Opcode::AtomicRequest => {
                let bytes = self.rx.fixed[..AtomicRequest::LEN].try_into().expect("fixed size");
                let request = AtomicRequest::decode(bytes).ok_or(RdmaOperation::UnexpectedOpcode)?;
                // Room for the answer comes first: an atomic must not run without one.
                if self.responses.entries.len() >= usize::from(self.agreement.ird.max(1)) {
                    return Err(DdpUntagged::NoBuffer.into());
                }
                let original = self.execute_atomic(&request)?;
                self.owe(Response::Atomic(AtomicResponse { id: request.id, original }))
            }
            Opcode::AtomicResponse => self.take_atomic_response(),
            Opcode::Immediate | Opcode::ImmediateSolicited => {
                let value = u64::from_be_bytes(self.rx.fixed[..IMMEDIATE_LEN].try_into().expect("fixed size"));
                let detail =
                    RecvDetail { immediate: Some(value as u32), invalidated: None, solicited: opcode.is_solicited() };
                let written = std::mem::take(&mut self.rx.last_write_len);
                self.finish_recv(written, detail);
                Ok(())
            }
            Opcode::Terminate => {
                let code =
                    terminate::decode(&self.rx.fixed[..len as usize]).unwrap_or(RdmaOperation::Unspecified.into());
                self.fail_terminated(code);
                Ok(())
            }
            _ => {
                let invalidated = opcode.invalidates().then_some(invalidate);
                if let Some(stag) = invalidated {
                    self.table.remote_invalidate(self.stream(), stag)?;
                }
                self.finish_recv(len, RecvDetail { immediate: None, invalidated, solicited: opcode.is_solicited() });
                Ok(())
            }
        }
    }

    fn serve_read(&mut self, request: &ReadRequest) -> Result<(), TerminateCode> {
        let source = if request.len == 0 {
            None
        } else {
            let (stag, to) = (request.source_stag, request.source_to);
            Some(self.table.remote_source(self.stream(), stag, to, request.len)?)
        };
        if request.sink_to.checked_add(request.len.into()).is_none() {
            return Err(RdmaProtection::ToWrap.into());
        }
        self.owe(Response::Read { sink_stag: request.sink_stag, sink_to: request.sink_to, source, len: request.len })
    }

    fn take_atomic_response(&mut self) -> Result<(), TerminateCode> {
        let response = AtomicResponse::decode(self.rx.fixed[..AtomicResponse::LEN].try_into().expect("fixed size"));
        let waiting = self.outstanding.front().and_then(|o| o.atomic_id);
        if waiting != Some(response.id) {
            return Err(RdmaOperation::UnexpectedOpcode.into());
        }
        let seq = self.outstanding.pop_front().and_then(|o| o.seq).expect("atomics come from the send queue");
        let entry = self.sq.get(seq);
        debug_assert!(matches!(entry.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }));
        let crate::connection::LocalData::Pieces(pieces) = &entry.data else {
            unreachable!("atomics have no inline payload")
        };
        // SAFETY: the piece is 8 bytes of a live region with local write (checked when posted).
        unsafe { shared::store(pieces[0].ptr, &response.original.to_ne_bytes()) };
        self.finish_send(seq, Status::Success);
        Ok(())
    }
}

impl Receiver {
    /// Copies payload that came through the stash to its place; returns how much was taken.
    fn place(&mut self, bytes: &[u8]) -> usize {
        let n = bytes.len().min(self.payload_left);
        self.crc.update(&bytes[..n]);
        let mut from = &bytes[..n];
        while !from.is_empty() {
            let Some(target) = self.targets.first_mut() else {
                // A zero-length range, or a message that is discarded.
                break;
            };
            let now = from.len().min(target.len);
            // SAFETY: the target was validated by `begin_segment` and is held by `placement` or
            // its queue entry; `from` is the stash, which no region contains.
            unsafe { shared::store(target.ptr, &from[..now]) };
            from = &from[now..];
            self.consume_target(now);
        }
        self.payload_left -= n;
        self.position += n as u64;
        n
    }

    fn consume_target(&mut self, n: usize) {
        let target = &mut self.targets[0];
        target.ptr = target.ptr.wrapping_add(n);
        target.len -= n;
        if target.len == 0 {
            self.targets.remove(0);
        }
    }

    /// The payload's place cut up at marker positions, marker scratch between the parts. False
    /// if not all of it fits, in which case nothing may be offered behind it.
    fn iovecs_with_markers(&mut self, out: &mut IoVecs) -> bool {
        let mut position = self.position;
        self.marker_area.clear();
        // Sized first so that the addresses taken below stay valid.
        self.marker_area.resize(MAX_IOVECS, [0; MARKER_LEN]);
        let mut marker = 0;
        for target in &self.targets {
            let mut done = 0;
            while done < target.len {
                if out.len() + 2 > MAX_IOVECS {
                    return false;
                }
                if position.is_multiple_of(MARKER_INTERVAL) {
                    let iov_base = self.marker_area[marker].as_mut_ptr().cast();
                    out.push(libc::iovec { iov_base, iov_len: MARKER_LEN });
                    marker += 1;
                    position += MARKER_LEN as u64;
                }
                let run = (MARKER_INTERVAL - position % MARKER_INTERVAL) as usize;
                let n = run.min(target.len - done);
                out.push(libc::iovec { iov_base: target.ptr.wrapping_add(done).cast(), iov_len: n });
                done += n;
                position += n as u64;
            }
        }
        true
    }

    /// Keeps the books on up to `n` bytes that the kernel put in place directly; returns how
    /// many of them were the payload's (and its markers').
    fn account_direct(&mut self, n: usize) -> Result<usize, TerminateCode> {
        let mut left = n;
        let mut marker = 0;
        while left > 0 && self.payload_left > 0 {
            if self.markers && self.position.is_multiple_of(MARKER_INTERVAL) {
                let got = left.min(MARKER_LEN);
                let bytes = self.marker_area[marker];
                marker += 1;
                left -= got;
                if got < MARKER_LEN {
                    // Half a marker: the rest will come through the stash.
                    self.marker[..got].copy_from_slice(&bytes[..got]);
                    self.marker_len = got;
                    break;
                }
                self.check_marker(bytes)?;
                continue;
            }
            let target = self.targets[0];
            let run = target.len.min(self.until_marker()).min(left);
            // SAFETY: the kernel has just filled these bytes of a validated, held target.
            self.crc.update(unsafe { std::slice::from_raw_parts(target.ptr, run) });
            self.consume_target(run);
            self.payload_left -= run;
            self.position += run as u64;
            left -= run;
        }
        Ok(n - left)
    }
}

/// RFC 5041 gives tagged placement its own codes for what [`RdmaProtection`] says of the rest;
/// rights are RDMAP's business in both cases.
fn tagged_fault(code: TerminateCode) -> TerminateCode {
    for (rdmap, ddp) in [
        (RdmaProtection::InvalidStag, DdpTagged::InvalidStag),
        (RdmaProtection::BaseOrBounds, DdpTagged::BaseOrBounds),
        (RdmaProtection::StagNotAssociated, DdpTagged::StagNotAssociated),
        (RdmaProtection::ToWrap, DdpTagged::ToWrap),
    ] {
        if code == rdmap.into() {
            return ddp.into();
        }
    }
    code
}

/// The part `offset..offset+len` of a scatter list.
fn slice_pieces(pieces: &[LocalPiece], mut offset: usize, mut len: usize, out: &mut SmallVec<[Target; 4]>) {
    for piece in pieces {
        if len == 0 {
            break;
        }
        let piece_len = piece.len as usize;
        if offset >= piece_len {
            offset -= piece_len;
            continue;
        }
        let n = len.min(piece_len - offset);
        out.push(Target { ptr: piece.ptr.wrapping_add(offset), len: n });
        offset = 0;
        len -= n;
    }
}
