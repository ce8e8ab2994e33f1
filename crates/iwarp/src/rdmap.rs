//! RDMAP message formats above DDP (RFC 5040 §4, RFC 7306 §5-6).
//!
//! Pure codec. Segmentation is [`crate::tx`]'s business and validation of what a message asks
//! for is [`crate::rx`]'s; here are only opcodes and the fixed payloads that RDMAP defines.

/// RDMAP opcode: the low four bits of the RDMAP control byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Opcode {
    /// RDMA Write.
    Write = 0,
    /// RDMA Read Request.
    ReadRequest = 1,
    /// RDMA Read Response.
    ReadResponse = 2,
    /// Send.
    Send = 3,
    /// Send with Invalidate.
    SendInvalidate = 4,
    /// Send with Solicited Event.
    SendSolicited = 5,
    /// Send with Solicited Event and Invalidate.
    SendSolicitedInvalidate = 6,
    /// Terminate.
    Terminate = 7,
    /// Immediate Data (RFC 7306 §6).
    Immediate = 8,
    /// Immediate Data with Solicited Event (RFC 7306 §6).
    ImmediateSolicited = 9,
    /// Atomic Request (RFC 7306 §5.2.1).
    AtomicRequest = 10,
    /// Atomic Response (RFC 7306 §5.2.2).
    AtomicResponse = 11,
}

impl Opcode {
    /// The opcode for a wire value, or `None` where none is assigned.
    pub(crate) fn from_wire(value: u8) -> Option<Opcode> {
        use Opcode::*;
        const ALL: [Opcode; 12] = [
            Write,
            ReadRequest,
            ReadResponse,
            Send,
            SendInvalidate,
            SendSolicited,
            SendSolicitedInvalidate,
            Terminate,
            Immediate,
            ImmediateSolicited,
            AtomicRequest,
            AtomicResponse,
        ];
        ALL.get(usize::from(value)).copied()
    }

    /// Whether the message uses DDP's tagged buffer model.
    pub(crate) fn is_tagged(self) -> bool {
        matches!(self, Opcode::Write | Opcode::ReadResponse)
    }

    /// Whether the message belongs to RFC 7306, which a peer may lack.
    pub(crate) fn is_extension(self) -> bool {
        self as u8 >= Opcode::Immediate as u8
    }

    /// The Send-type opcode for a combination of modifiers.
    pub(crate) fn send(invalidate: bool, solicited: bool) -> Opcode {
        match (invalidate, solicited) {
            (false, false) => Opcode::Send,
            (true, false) => Opcode::SendInvalidate,
            (false, true) => Opcode::SendSolicited,
            (true, true) => Opcode::SendSolicitedInvalidate,
        }
    }

    /// Whether the header's 32 ULP bits name an STag to invalidate.
    pub(crate) fn invalidates(self) -> bool {
        matches!(self, Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate)
    }

    /// Whether delivery raises a solicited event.
    pub(crate) fn is_solicited(self) -> bool {
        matches!(self, Opcode::SendSolicited | Opcode::SendSolicitedInvalidate | Opcode::ImmediateSolicited)
    }
}

/// RDMA Read Request payload (RFC 5040 §4.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadRequest {
    /// Requester's buffer.
    pub sink_stag: u32,
    /// Offset in the requester's buffer.
    pub sink_to: u64,
    /// Bytes to read.
    pub len: u32,
    /// Responder's buffer.
    pub source_stag: u32,
    /// Offset in the responder's buffer.
    pub source_to: u64,
}

impl ReadRequest {
    /// Bytes on the wire.
    pub(crate) const LEN: usize = 28;

    /// Writes the payload.
    pub(crate) fn encode(&self, out: &mut [u8; Self::LEN]) {
        out[0..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        out[4..12].copy_from_slice(&self.sink_to.to_be_bytes());
        out[12..16].copy_from_slice(&self.len.to_be_bytes());
        out[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        out[20..28].copy_from_slice(&self.source_to.to_be_bytes());
    }

    /// Reads the payload; every bit pattern is a request, its meaning is checked by the receiver.
    pub(crate) fn decode(b: &[u8; Self::LEN]) -> ReadRequest {
        ReadRequest {
            sink_stag: be32(b, 0),
            sink_to: be64(b, 4),
            len: be32(b, 12),
            source_stag: be32(b, 16),
            source_to: be64(b, 20),
        }
    }
}

/// What an Atomic Request does to the 64-bit target (RFC 7306 §5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    /// Adds, carries stopping at the bits set in `mask`. A zero mask is a plain 64-bit addition.
    FetchAdd {
        /// Addend.
        add: u64,
        /// Field boundaries: a set bit ends a field.
        mask: u64,
    },
    /// Replaces the bits under `mask`.
    Swap {
        /// New value.
        swap: u64,
        /// Bits to replace.
        mask: u64,
    },
    /// Replaces the bits under `swap_mask` if those under `compare_mask` equal `compare`.
    CompareSwap {
        /// New value.
        swap: u64,
        /// Bits to replace.
        swap_mask: u64,
        /// Expected value.
        compare: u64,
        /// Bits to compare.
        compare_mask: u64,
    },
}

impl AtomicOp {
    /// The value that follows `current`.
    pub(crate) fn apply(&self, current: u64) -> u64 {
        match *self {
            AtomicOp::FetchAdd { add, mask: 0 } => current.wrapping_add(add),
            AtomicOp::FetchAdd { add, mask } => masked_add(current, add, mask),
            AtomicOp::Swap { swap, mask } => (current & !mask) | (swap & mask),
            AtomicOp::CompareSwap { swap, swap_mask, compare, compare_mask } => {
                if (current ^ compare) & compare_mask == 0 {
                    (current & !swap_mask) | (swap & swap_mask)
                } else {
                    current
                }
            }
        }
    }
}

/// Adds field by field: bit `i` of `boundaries` set means no carry leaves bit `i`.
fn masked_add(a: u64, b: u64, boundaries: u64) -> u64 {
    // Add everything below each field's top bit, then restore the top bits without carry.
    ((a & !boundaries).wrapping_add(b & !boundaries)) ^ ((a ^ b) & boundaries)
}

/// Atomic Request payload (RFC 7306 §5.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AtomicRequest {
    /// Chosen by the requester, returned in the response.
    pub id: u32,
    /// Responder's buffer.
    pub stag: u32,
    /// Offset of the 64-bit target, a multiple of 8.
    pub to: u64,
    /// The operation.
    pub op: AtomicOp,
}

const AOP_FETCH_ADD: u32 = 0;
const AOP_SWAP: u32 = 1;
const AOP_COMPARE_SWAP: u32 = 2;

impl AtomicRequest {
    /// Bytes on the wire.
    pub(crate) const LEN: usize = 52;

    /// Writes the payload.
    pub(crate) fn encode(&self, out: &mut [u8; Self::LEN]) {
        let (code, data, mask, compare, compare_mask) = match self.op {
            AtomicOp::FetchAdd { add, mask } => (AOP_FETCH_ADD, add, mask, 0, 0),
            AtomicOp::Swap { swap, mask } => (AOP_SWAP, swap, mask, 0, 0),
            AtomicOp::CompareSwap { swap, swap_mask, compare, compare_mask } => {
                (AOP_COMPARE_SWAP, swap, swap_mask, compare, compare_mask)
            }
        };
        out[0..4].copy_from_slice(&code.to_be_bytes());
        out[4..8].copy_from_slice(&self.id.to_be_bytes());
        out[8..12].copy_from_slice(&self.stag.to_be_bytes());
        for (slot, v) in [self.to, data, mask, compare, compare_mask].into_iter().enumerate() {
            let at = 12 + slot * 8;
            out[at..at + 8].copy_from_slice(&v.to_be_bytes());
        }
    }

    /// Reads the payload; `None` where the operation code is unassigned.
    pub(crate) fn decode(b: &[u8; Self::LEN]) -> Option<AtomicRequest> {
        let op = match be32(b, 0) & 0x0f {
            AOP_FETCH_ADD => AtomicOp::FetchAdd { add: be64(b, 20), mask: be64(b, 28) },
            AOP_SWAP => AtomicOp::Swap { swap: be64(b, 20), mask: be64(b, 28) },
            AOP_COMPARE_SWAP => AtomicOp::CompareSwap {
                swap: be64(b, 20),
                swap_mask: be64(b, 28),
                compare: be64(b, 36),
                compare_mask: be64(b, 44),
            },
            _ => return None,
        };
        Some(AtomicRequest { id: be32(b, 4), stag: be32(b, 8), to: be64(b, 12), op })
    }
}

/// Atomic Response payload (RFC 7306 §5.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AtomicResponse {
    /// The request's identifier.
    pub id: u32,
    /// The target's value before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Bytes on the wire.
    pub(crate) const LEN: usize = 12;

    /// Writes the payload.
    pub(crate) fn encode(&self, out: &mut [u8; Self::LEN]) {
        out[0..4].copy_from_slice(&self.id.to_be_bytes());
        out[4..12].copy_from_slice(&self.original.to_be_bytes());
    }

    /// Reads the payload.
    pub(crate) fn decode(b: &[u8; Self::LEN]) -> AtomicResponse {
        AtomicResponse { id: be32(b, 0), original: be64(b, 4) }
    }
}

/// Bytes of an Immediate Data message (RFC 7306 §6.1).
pub(crate) const IMMEDIATE_LEN: usize = 8;

fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(b[at..at + 4].try_into().expect("4 bytes"))
}

fn be64(b: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(b[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn read_requests_round_trip(sink_stag: u32, sink_to: u64, len: u32, source_stag: u32, source_to: u64) {
            let r = ReadRequest { sink_stag, sink_to, len, source_stag, source_to };
            let mut b = [0; ReadRequest::LEN];
            r.encode(&mut b);
            prop_assert_eq!(ReadRequest::decode(&b), r);
        }

        #[test]
        fn atomic_requests_round_trip(id: u32, stag: u32, to: u64, which in 0..3, a: u64, b: u64, c: u64, d: u64) {
            let op = match which {
                0 => AtomicOp::FetchAdd { add: a, mask: b },
                1 => AtomicOp::Swap { swap: a, mask: b },
                _ => AtomicOp::CompareSwap { swap: a, swap_mask: b, compare: c, compare_mask: d },
            };
            let r = AtomicRequest { id, stag, to, op };
            let mut buf = [0; AtomicRequest::LEN];
            r.encode(&mut buf);
            prop_assert_eq!(AtomicRequest::decode(&buf), Some(r));
        }

        #[test]
        fn a_masked_addition_is_independent_in_each_field(a: u64, b: u64) {
            // Four 16-bit fields.
            let sum = masked_add(a, b, 0x8000_8000_8000_8000);
            for shift in [0, 16, 32, 48] {
                let (x, y) = ((a >> shift) as u16, (b >> shift) as u16);
                prop_assert_eq!((sum >> shift) as u16, x.wrapping_add(y));
            }
        }
    }

    #[test]
    fn an_unassigned_atomic_operation_is_refused() {
        let mut b = [0; AtomicRequest::LEN];
        b[3] = 3;
        assert_eq!(AtomicRequest::decode(&b), None);
    }
}
