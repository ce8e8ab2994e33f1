//! The short way of short messages. What is first in its queue and fits in one small segment is put together in one step, handed to the
//! transport at once and reported, without an entry in the send queue and without batches of pieces.

use super::{Piece, Source};
use crate::connection::{Connection, SendEntry};
use crate::ddp::{Header, TAGGED_LEN, UNTAGGED_LEN, queue};
use crate::rdmap::Opcode;
use thruway_memory::shared;
use thruway_rdma_types::{Access, Payload, Result, SendFlags, SendOp, SendRequest};

/// Longest payload that goes this way.
pub(crate) const SHORT_MAX: usize = 256;

/// The longest FPDU that goes this way: length field, header, payload, pad and CRC.
pub(super) const FRAME_MAX: usize = (2 + UNTAGGED_LEN + SHORT_MAX).next_multiple_of(4) + 4;

/// What has become of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// The transport has all of it, and it has been reported.
    Sent,
    /// It is queued, or a part of it has been sent.
    Queued,
}

impl Connection {
    /// As [`Connection::post_send`], but what is short goes past the queues where nothing is before it: `send` is given all of its FPDU,
    /// and returns how much of that the transport has taken. The rest of it is what [`Connection::tx_fill`] gives next.
    ///
    /// # Errors
    /// As [`Connection::post_send`]; then `send` was not called.
    pub fn post_short(&mut self, request: &SendRequest<'_>, send: impl FnOnce(&[u8]) -> usize) -> Result<Posted> {
        self.check_room()?;
        let Some(len) = self.build_short(request)? else {
            self.post_send(request)?;
            return Ok(Posted::Queued);
        };
        let whole = self.tx.frame_len;
        let taken = send(&self.tx.frame[..whole]);
        self.tx.position += whole as u64;
        self.tx.taken += taken as u64;
        self.tx.responded = false;
        if taken == whole {
            self.tx.last_border = self.tx.taken;
            self.report_short(request, len);
            return Ok(Posted::Sent);
        }
        // From here on it is a batch like any other.
        self.tx.scratch.extend_from_slice(&self.tx.frame[..whole]);
        self.tx.pieces.push(Piece::Scratch { at: 0, len: whole });
        self.tx.batch_bytes = whole;
        self.tx.taken_offset = taken;
        self.tx.fpdu_ends.push_back(self.tx.position);
        let seq = self.sq.push_started(SendEntry::built(request, len));
        self.tx.marks.push_back((self.tx.position, Source::Sq(seq)));
        Ok(Posted::Queued)
    }

    /// Puts the FPDU together, in `frame`, if the request is short and nothing is before it. Bytes of its payload.
    fn build_short(&mut self, request: &SendRequest<'_>) -> Result<Option<u32>> {
        let tx = &self.tx;
        let is_free = !tx.hold && !tx.control_only && !tx.markers && tx.is_idle();
        // So there is no read of the consumer's either that a fence would wait for. (It need not wait for that of the set-up.)
        let is_first = self.sq.is_empty() && !self.owes_responses();
        if !is_free || !is_first {
            return Ok(None);
        }
        let (header, header_len) = match request.op {
            SendOp::Send { invalidate } => {
                let opcode = Opcode::send(invalidate.is_some(), request.flags.contains(SendFlags::SOLICITED));
                let (qn, msn, invalidate) = (queue::SEND, tx.msn[queue::SEND as usize], invalidate.unwrap_or(0));
                (Header::Untagged { opcode, last: true, invalidate, qn, msn, mo: 0 }, UNTAGGED_LEN)
            }
            SendOp::Write { remote, immediate: None } => {
                (Header::Tagged { opcode: Opcode::Write, last: true, stag: remote.rkey, to: remote.addr }, TAGGED_LEN)
            }
            _ => return Ok(None),
        };
        let len = match request.payload {
            Payload::Inline(bytes) => bytes.len(),
            Payload::Sges(sges) if sges.len() > self.caps.max_sge as usize => return Ok(None),
            Payload::Sges(sges) => sges.iter().map(|sge| sge.len as usize).sum(),
        };
        let ulpdu = header_len + len;
        if len > SHORT_MAX || ulpdu > usize::from(tx.max_ulpdu) {
            return Ok(None);
        }
        let frame = &mut self.tx.frame;
        frame[..2].copy_from_slice(&(ulpdu as u16).to_be_bytes());
        header.encode(&mut frame[2..]);
        let mut at = 2 + header_len;
        match request.payload {
            Payload::Inline(bytes) => {
                frame[at..at + len].copy_from_slice(bytes);
                at += len;
            }
            Payload::Sges(sges) => {
                for sge in sges.iter().filter(|sge| sge.len > 0) {
                    let piece = self.table.local(self.pd, sge, Access::empty(), self.sent_from.take())?;
                    let to = &mut frame[at..at + piece.len as usize];
                    // SAFETY: inside the region, which keeps it mapped.
                    unsafe { shared::load(piece.ptr, to) };
                    at += piece.len as usize;
                    self.sent_from = Some(piece.into_region());
                }
            }
        }
        let checked = (2 + ulpdu).next_multiple_of(4);
        frame[at..checked].fill(0);
        self.tx.crc.update(&frame[..checked]);
        frame[checked..checked + 4].copy_from_slice(&self.tx.crc.take());
        self.tx.frame_len = checked + 4;
        if let Header::Untagged { qn, .. } = header {
            self.tx.next_msn(qn);
        }
        Ok(Some(len as u32))
    }
}
