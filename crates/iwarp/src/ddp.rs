//! Direct Data Placement headers (RFC 5041 §4).
//!
//! Pure codec: bytes in, header out. The RDMAP control byte (RFC 5040 §4.1) shares the
//! 16-bit control field with DDP, so both bytes are decoded here in one step and
//! [`crate::rdmap`] gives the opcode its meaning.

use crate::rdmap::Opcode;
use crate::terminate::{DdpTagged, DdpUntagged, RdmaOperation, TerminateCode};

/// DDP protocol version 1 (RFC 5041 §4.1).
const DDP_VERSION: u8 = 1;
/// RDMAP version 1, in the two top bits of the RDMAP control byte (RFC 5040 §4.1).
const RDMAP_VERSION: u8 = 1;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DV_MASK: u8 = 0x03;

/// Bytes of a tagged header, control bytes included.
pub(crate) const TAGGED_LEN: usize = 14;
/// Bytes of an untagged header, control bytes included.
pub(crate) const UNTAGGED_LEN: usize = 18;
/// The longer of the two, for buffers that hold either.
pub(crate) const MAX_HEADER_LEN: usize = UNTAGGED_LEN;

/// Untagged queue numbers used by RDMAP (RFC 5040 §5.1, RFC 7306 §5).
pub(crate) mod queue {
    /// Send-type messages and Immediate Data.
    pub(crate) const SEND: u32 = 0;
    /// RDMA Read Requests and Atomic Requests.
    pub(crate) const READ_REQUEST: u32 = 1;
    /// Terminate messages.
    pub(crate) const TERMINATE: u32 = 2;
    /// Atomic Responses.
    pub(crate) const ATOMIC_RESPONSE: u32 = 3;
}

/// A decoded DDP header together with the RDMAP opcode it carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Header {
    /// Names its own target: a steering tag and an offset inside it.
    Tagged {
        /// RDMAP opcode.
        opcode: Opcode,
        /// Last segment of its message.
        last: bool,
        /// Steering tag of the target buffer.
        stag: u32,
        /// Tagged offset of the first payload byte.
        to: u64,
    },
    /// Lands in the buffer at the head of a receive queue.
    Untagged {
        /// RDMAP opcode.
        opcode: Opcode,
        /// Last segment of its message.
        last: bool,
        /// The ULP's 32 bits: the STag to invalidate, or zero.
        invalidate: u32,
        /// Queue number.
        qn: u32,
        /// Message sequence number on that queue, the first being 1.
        msn: u32,
        /// Offset of this segment inside the message.
        mo: u32,
    },
}

impl Header {
    /// Writes the header to the front of `out` and returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than the header.
    pub(crate) fn encode(&self, out: &mut [u8]) -> usize {
        match *self {
            Header::Tagged { opcode, last, stag, to } => {
                out[0] = TAGGED | if last { LAST } else { 0 } | DDP_VERSION;
                out[1] = RDMAP_VERSION << 6 | opcode as u8;
                out[2..6].copy_from_slice(&stag.to_be_bytes());
                out[6..14].copy_from_slice(&to.to_be_bytes());
                TAGGED_LEN
            }
            Header::Untagged { opcode, last, invalidate, qn, msn, mo } => {
                out[0] = if last { LAST } else { 0 } | DDP_VERSION;
                out[1] = RDMAP_VERSION << 6 | opcode as u8;
                out[2..6].copy_from_slice(&invalidate.to_be_bytes());
                out[6..10].copy_from_slice(&qn.to_be_bytes());
                out[10..14].copy_from_slice(&msn.to_be_bytes());
                out[14..18].copy_from_slice(&mo.to_be_bytes());
                UNTAGGED_LEN
            }
        }
    }

    /// The control bytes of an untagged message in one segment, with no reserved bit set.
    pub(crate) const fn control_of_one(opcode: Opcode) -> [u8; 2] {
        [LAST | DDP_VERSION, RDMAP_VERSION << 6 | opcode as u8]
    }

    /// Length of the header whose first byte is `first`.
    pub(crate) fn len_from_first_byte(first: u8) -> usize {
        if first & TAGGED != 0 { TAGGED_LEN } else { UNTAGGED_LEN }
    }

    /// Decodes a header of exactly [`Header::len_from_first_byte`] bytes.
    ///
    /// # Errors
    /// The Terminate code that RFC 5040 §7 or RFC 5041 §7 names for the fault: a wrong DDP or
    /// RDMAP version, an unknown opcode, or an opcode under the wrong buffer model.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Header, TerminateCode> {
        let tagged = bytes[0] & TAGGED != 0;
        if bytes[0] & DV_MASK != DDP_VERSION {
            return Err(if tagged { DdpTagged::InvalidVersion.into() } else { DdpUntagged::InvalidVersion.into() });
        }
        if bytes[1] >> 6 != RDMAP_VERSION {
            return Err(RdmaOperation::InvalidVersion.into());
        }
        let opcode = Opcode::from_wire(bytes[1] & 0x0f).ok_or(RdmaOperation::UnexpectedOpcode)?;
        if opcode.is_tagged() != tagged {
            return Err(RdmaOperation::UnexpectedOpcode.into());
        }
        let last = bytes[0] & LAST != 0;
        let u32_at = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        Ok(if tagged {
            let to = u64::from_be_bytes(bytes[6..14].try_into().expect("8 bytes"));
            Header::Tagged { opcode, last, stag: u32_at(2), to }
        } else {
            Header::Untagged { opcode, last, invalidate: u32_at(2), qn: u32_at(6), msn: u32_at(10), mo: u32_at(14) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = Header> {
        (any::<bool>(), 0u8..12, any::<u32>(), any::<u64>(), any::<u32>(), any::<u32>()).prop_map(
            |(last, op, a, to, msn, mo)| {
                let opcode = Opcode::from_wire(op).expect("assigned opcode");
                if opcode.is_tagged() {
                    Header::Tagged { opcode, last, stag: a, to }
                } else {
                    Header::Untagged { opcode, last, invalidate: a, qn: msn & 3, msn, mo }
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes_to_itself(h in any_header()) {
            let mut buf = [0u8; MAX_HEADER_LEN];
            let n = h.encode(&mut buf);
            prop_assert_eq!(n, Header::len_from_first_byte(buf[0]));
            prop_assert_eq!(Header::decode(&buf[..n]), Ok(h));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in any::<[u8; MAX_HEADER_LEN]>()) {
            let n = Header::len_from_first_byte(bytes[0]);
            let _ = Header::decode(&bytes[..n]);
        }
    }

    #[test]
    fn a_write_under_the_untagged_model_is_an_unexpected_opcode() {
        let mut b = [0u8; UNTAGGED_LEN];
        b[0] = LAST | DDP_VERSION;
        b[1] = RDMAP_VERSION << 6;
        assert_eq!(Header::decode(&b), Err(RdmaOperation::UnexpectedOpcode.into()));
    }
}
