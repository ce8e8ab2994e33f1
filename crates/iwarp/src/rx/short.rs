//! The short way of short messages: a Send that has come whole is taken in one step. Whatever is not in order is left to the rest of the
//! receive path, which says what is wrong with it.

use super::Phase;
use crate::connection::{Connection, RecvDetail};
use crate::ddp::{Header, UNTAGGED_LEN, queue};
use crate::rdmap::Opcode;
use crate::tx::SHORT_MAX;
use thruway_memory::shared;

const SEND: [u8; 2] = Header::control_of_one(Opcode::Send);
const SEND_SOLICITED: [u8; 2] = Header::control_of_one(Opcode::SendSolicited);

impl Connection {
    /// Takes a whole Send of one small segment from the front of `bytes`: how many bytes it had. `None`, and nothing has been done, if
    /// that is not what is there.
    pub(super) fn parse_short(&mut self, bytes: &[u8]) -> Option<usize> {
        let rx = &mut self.rx;
        if rx.phase != Phase::Header || rx.head_len != 0 || rx.markers || rx.first.is_some() {
            return None;
        }
        let (head, rest) = bytes.split_first_chunk::<{ 2 + UNTAGGED_LEN }>()?;
        let ulpdu = usize::from(u16::from_be_bytes([head[0], head[1]]));
        let len = ulpdu.checked_sub(UNTAGGED_LEN).filter(|&len| len <= SHORT_MAX)?;
        let checked = (2 + ulpdu).next_multiple_of(4);
        let crc = bytes.get(checked..checked + 4)?;
        let solicited = match [head[2], head[3]] {
            SEND => false,
            SEND_SOLICITED => true,
            _ => return None,
        };
        let u32_at = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (qn, msn, mo) = (u32_at(8), u32_at(12), u32_at(16));
        let on = queue::SEND as usize;
        let is_next = msn == rx.msn[on] && rx.mo[on] == 0 && rx.begun[on].is_none();
        if qn != queue::SEND || mo != 0 || !is_next {
            return None;
        }
        if rx.crc.is_enabled() {
            rx.crc.update(&bytes[..checked]);
            if rx.crc.take() != *crc {
                return None;
            }
        }
        if !self.has_receive() {
            return None;
        }
        let receive = self.rq.front()?;
        if len as u64 > receive.capacity {
            return None;
        }
        let mut payload = &rest[..len];
        for piece in &receive.pieces {
            let (now, later) = payload.split_at(payload.len().min(piece.len as usize));
            // SAFETY: inside a piece that was checked when it was posted, and whose region keeps it mapped.
            unsafe { shared::store(piece.ptr, now) };
            payload = later;
        }
        let rx = &mut self.rx;
        rx.position += (checked + 4) as u64;
        rx.fpdu_start = rx.position;
        rx.msn[on] = rx.msn[on].wrapping_add(1);
        self.finish_recv(len as u32, RecvDetail { solicited, ..RecvDetail::default() });
        Some(checked + 4)
    }
}
