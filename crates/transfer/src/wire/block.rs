//! Blocks: their headers, and the notifications behind them.

use super::{CONTROL_HEADER_LEN, Malformed};
use thruway_engine::aead::TAG_LEN;
use thruway_engine::digest::{Algorithm, DIGEST_LEN};

/// Bytes of a block completion notification, the one control message on data channels: a Send
/// behind the write it announces, so that its arrival proves the write's placement.
pub const COMPLETION_LEN: usize = CONTROL_HEADER_LEN + 12;
const COMPLETION_TYPE: u16 = 6;

/// A block completion notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Session.
    pub session: u32,
    /// Sequence number of the block written.
    pub sequence: u32,
    /// Number of the block, from its credit.
    pub block: u32,
}

impl Completion {
    /// The notification's bytes.
    pub fn encode(&self) -> [u8; COMPLETION_LEN] {
        let mut out = [0; COMPLETION_LEN];
        out[0..2].copy_from_slice(&COMPLETION_TYPE.to_be_bytes());
        out[4..8].copy_from_slice(&12u32.to_be_bytes());
        out[8..12].copy_from_slice(&self.session.to_be_bytes());
        out[12..16].copy_from_slice(&self.sequence.to_be_bytes());
        out[16..20].copy_from_slice(&self.block.to_be_bytes());
        out
    }

    /// Reads a notification.
    ///
    /// # Errors
    /// [`Malformed`] if it is anything else.
    pub fn decode(bytes: &[u8]) -> Result<Completion, Malformed> {
        let bytes: &[u8; COMPLETION_LEN] = bytes.try_into().map_err(|_| Malformed("block completion"))?;
        let expected = Completion { session: 0, sequence: 0, block: 0 }.encode();
        if bytes[..CONTROL_HEADER_LEN] != expected[..CONTROL_HEADER_LEN] {
            return Err(Malformed("block completion"));
        }
        let at = |i: usize| u32::from_be_bytes(bytes[i..i + 4].try_into().expect("4 bytes"));
        Ok(Completion { session: at(8), sequence: at(12), block: at(16) })
    }
}

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockKind {
    /// Nothing: its reading failed, but its sequence number must be accounted for.
    Void = 0,
    /// A piece of a large file.
    Data = 1,
    /// [`super::Record`]s.
    Pack = 2,
}

/// Bytes of a block's header. The last 16, the digest, are sealed together with the payload.
pub const HEADER_LEN: usize = 64;
const FIXED_LEN: usize = 32;

/// A block's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHeader {
    /// Session.
    pub session: u32,
    /// Sequence number, from 0, each once.
    pub sequence: u32,
    /// Where the payload belongs in its file.
    pub offset: u64,
    /// Bytes of payload.
    pub len: u32,
    /// What it is.
    pub kind: BlockKind,
    /// Digest and payload are sealed.
    pub sealed: bool,
    /// Number of the file within the session.
    pub file: u64,
    /// AEAD tag, if sealed.
    pub tag: [u8; TAG_LEN],
    /// Digest of the payload in clear; see [`BlockHeader::bind`].
    pub digest: [u8; DIGEST_LEN],
}

impl BlockHeader {
    /// Writes the header.
    pub fn encode(&self, out: &mut [u8]) {
        out[..FIXED_LEN].copy_from_slice(&self.fixed());
        out[FIXED_LEN..FIXED_LEN + TAG_LEN].copy_from_slice(&self.tag);
        out[FIXED_LEN + TAG_LEN..HEADER_LEN].copy_from_slice(&self.digest);
    }

    /// The part that is authenticated but not sealed.
    pub fn fixed(&self) -> [u8; FIXED_LEN] {
        let mut out = [0; FIXED_LEN];
        out[0..4].copy_from_slice(&self.session.to_be_bytes());
        out[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        out[8..16].copy_from_slice(&self.offset.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        out[20] = self.kind as u8;
        out[21] = u8::from(self.sealed);
        out[24..32].copy_from_slice(&self.file.to_be_bytes());
        out
    }

    /// The digest of a payload, bound to the header that says where it belongs, so that neither can
    /// change or be swapped unnoticed.
    pub fn bind(&self, verify: Algorithm, payload: [u8; DIGEST_LEN]) -> [u8; DIGEST_LEN] {
        let header = verify.digest(&self.fixed());
        std::array::from_fn(|i| payload[i] ^ header[i])
    }

    /// Reads a header for a block that holds up to `capacity` bytes.
    ///
    /// # Errors
    /// [`Malformed`] for unknown kinds and lengths beyond the block.
    pub fn decode(bytes: &[u8], capacity: usize) -> Result<BlockHeader, Malformed> {
        let bytes: &[u8; HEADER_LEN] = bytes.try_into().map_err(|_| Malformed("block header"))?;
        let u32_at = |i: usize| u32::from_be_bytes(bytes[i..i + 4].try_into().expect("4 bytes"));
        let u64_at = |i: usize| u64::from_be_bytes(bytes[i..i + 8].try_into().expect("8 bytes"));
        let kind = match bytes[20] {
            0 => BlockKind::Void,
            1 => BlockKind::Data,
            2 => BlockKind::Pack,
            _ => return Err(Malformed("block kind")),
        };
        let len = u32_at(16);
        if len as usize > capacity || bytes[21] > 1 || (kind == BlockKind::Void && len != 0) {
            return Err(Malformed("block length"));
        }
        if u64_at(8).checked_add(len.into()).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Malformed("block offset"));
        }
        Ok(BlockHeader {
            session: u32_at(0),
            sequence: u32_at(4),
            offset: u64_at(8),
            len,
            kind,
            sealed: bytes[21] == 1,
            file: u64_at(24),
            tag: bytes[FIXED_LEN..FIXED_LEN + TAG_LEN].try_into().expect("tag"),
            digest: bytes[FIXED_LEN + TAG_LEN..].try_into().expect("digest"),
        })
    }
}
