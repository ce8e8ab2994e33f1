//! Terminate messages: what ends an RDMAP stream, and how it is told to the peer
//! (RFC 5040 §4.8 and §7, RFC 5041 §7, RFC 5044 §8, RFC 6581 §9).

use crate::ddp;
use std::fmt;
use thruway_rdma_types::ProtocolError;

/// Layer, error type and error code of a Terminate message.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TerminateCode {
    /// 0 RDMAP, 1 DDP, 2 LLP (MPA).
    pub layer: u8,
    /// Error type within the layer.
    pub etype: u8,
    /// Error code within the type.
    pub code: u8,
}

impl From<TerminateCode> for ProtocolError {
    fn from(code: TerminateCode) -> ProtocolError {
        let number = u32::from(code.layer) << 16 | u32::from(code.etype) << 8 | u32::from(code.code);
        ProtocolError::new(number, code.to_string())
    }
}

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident, $layer:literal, $etype:literal, { $($(#[$vdoc:meta])* $variant:ident = $code:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $name { $($(#[$vdoc])* $variant = $code),+ }
        impl From<$name> for TerminateCode {
            fn from(e: $name) -> TerminateCode {
                TerminateCode { layer: $layer, etype: $etype, code: e as u8 }
            }
        }
    };
}

codes!(
    /// RDMAP remote protection errors.
    RdmaProtection, 0, 1, {
    /// The STag is not valid.
    InvalidStag = 0x00,
    /// Outside the region.
    BaseOrBounds = 0x01,
    /// The region does not grant this access.
    AccessRights = 0x02,
    /// The STag belongs to another protection domain.
    StagNotAssociated = 0x03,
    /// Offset plus length wraps.
    ToWrap = 0x04,
    /// The STag may not be invalidated by the peer.
    StagCannotBeInvalidated = 0x09,
});
codes!(
    /// RDMAP remote operation errors.
    RdmaOperation, 0, 2, {
    /// Wrong RDMAP version.
    InvalidVersion = 0x05,
    /// Opcode unknown, or not allowed here.
    UnexpectedOpcode = 0x06,
    /// Anything else that ends only this stream.
    CatastrophicStream = 0x07,
    /// Not one of the above.
    Unspecified = 0xff,
});
codes!(
    /// DDP tagged buffer errors.
    DdpTagged, 1, 1, {
    /// The STag is not valid.
    InvalidStag = 0x00,
    /// Outside the region.
    BaseOrBounds = 0x01,
    /// The STag belongs to another stream.
    StagNotAssociated = 0x02,
    /// Offset plus length wraps.
    ToWrap = 0x03,
    /// Wrong DDP version.
    InvalidVersion = 0x04,
});
codes!(
    /// DDP untagged buffer errors.
    DdpUntagged, 1, 2, {
    /// No such queue.
    InvalidQn = 0x01,
    /// The queue has no buffer for this message.
    NoBuffer = 0x02,
    /// The message sequence number is out of range.
    InvalidMsn = 0x03,
    /// The offset is not where the message stands.
    InvalidMo = 0x04,
    /// The message is longer than the buffer.
    TooLong = 0x05,
    /// Wrong DDP version.
    InvalidVersion = 0x06,
});
codes!(
    /// MPA errors.
    Mpa, 2, 0, {
    /// TCP was lost. Never on the wire: there is nothing to send it on.
    ConnectionLost = 0x01,
    /// The CRC does not match.
    Crc = 0x02,
    /// A marker does not point at its FPDU.
    Marker = 0x03,
    /// The request or reply frame is malformed.
    InvalidFrame = 0x04,
    /// The responder offers fewer read resources than asked for (RFC 6581 §9).
    InsufficientIrd = 0x06,
    /// No ready-to-receive option in common (RFC 6581 §9).
    NoMatchingRtr = 0x07,
});

impl fmt::Display for TerminateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match (self.layer, self.etype, self.code) {
            (0, 0, _) => "RDMAP local catastrophic error",
            (0, 1, 0x00) => "RDMAP: invalid STag",
            (0, 1, 0x01) => "RDMAP: base or bounds violation",
            (0, 1, 0x02) => "RDMAP: access rights violation",
            (0, 1, 0x03) => "RDMAP: STag not associated with this stream",
            (0, 1, 0x04) => "RDMAP: tagged offset wraps",
            (0, _, 0x09) => "RDMAP: STag cannot be invalidated",
            (0, 2, 0x05) => "RDMAP: invalid version",
            (0, 2, 0x06) => "RDMAP: unexpected opcode",
            (0, 2, 0x07) => "RDMAP: catastrophic error on this stream",
            (0, 2, 0x08) => "RDMAP: catastrophic error, global",
            (1, 0, _) => "DDP local catastrophic error",
            (1, 1, 0x00) => "DDP: invalid STag",
            (1, 1, 0x01) => "DDP: base or bounds violation",
            (1, 1, 0x02) => "DDP: STag not associated with this stream",
            (1, 1, 0x03) => "DDP: tagged offset wraps",
            (1, 1, 0x04) => "DDP: invalid version (tagged)",
            (1, 2, 0x01) => "DDP: invalid queue number",
            (1, 2, 0x02) => "DDP: no receive buffer posted",
            (1, 2, 0x03) => "DDP: message sequence number out of range",
            (1, 2, 0x04) => "DDP: invalid message offset",
            (1, 2, 0x05) => "DDP: message too long for its buffer",
            (1, 2, 0x06) => "DDP: invalid version (untagged)",
            (2, 0, 0x01) => "MPA: TCP connection lost",
            (2, 0, 0x02) => "MPA: CRC mismatch",
            (2, 0, 0x03) => "MPA: marker and length mismatch",
            (2, 0, 0x04) => "MPA: invalid request or reply frame",
            (2, 0, 0x05) => "MPA: local catastrophic error",
            (2, 0, 0x06) => "MPA: insufficient read resources",
            (2, 0, 0x07) => "MPA: no matching ready-to-receive option",
            _ => "unassigned error",
        };
        write!(f, "{text} (layer {} type {} code {:#04x})", self.layer, self.etype, self.code)
    }
}

impl fmt::Debug for TerminateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Bytes of the fixed part of a Terminate payload.
const CONTROL_LEN: usize = 4;
/// Longest Terminate payload: control, DDP segment length, DDP header, RDMAP header.
pub const MAX_LEN: usize = CONTROL_LEN + 2 + ddp::MAX_HEADER_LEN + crate::rdmap::ReadRequest::LEN;

const HDRCT_M: u8 = 0x80;
const HDRCT_D: u8 = 0x40;
const HDRCT_R: u8 = 0x20;

/// The segment that a fault was in.
#[derive(Debug, Clone, Copy)]
pub struct Offending<'a> {
    /// Its length: DDP header and payload.
    pub len: u16,
    /// Its DDP header.
    pub header: &'a [u8],
    /// The Read Request that it carries, if it is one.
    pub read_request: Option<&'a [u8; crate::rdmap::ReadRequest::LEN]>,
}

/// Writes a Terminate payload: the code and, where the fault was in a segment, its length and
/// headers (RFC 5040 §4.8). Returns the payload's length.
pub fn encode(code: TerminateCode, offending: Option<Offending<'_>>, out: &mut [u8; MAX_LEN]) -> usize {
    out[0] = code.layer << 4 | code.etype & 0x0f;
    out[1] = code.code;
    out[2] = 0;
    out[3] = 0;
    let mut at = CONTROL_LEN;
    if let Some(Offending { len, header, read_request }) = offending {
        out[2] = HDRCT_M | HDRCT_D;
        out[at..at + 2].copy_from_slice(&len.to_be_bytes());
        at += 2;
        let n = header.len().min(ddp::MAX_HEADER_LEN);
        out[at..at + n].copy_from_slice(&header[..n]);
        at += n;
        if let Some(request) = read_request {
            out[2] |= HDRCT_R;
            out[at..at + request.len()].copy_from_slice(request);
            at += request.len();
        }
    }
    at
}

/// Reads the code of a Terminate payload; `None` if it is shorter than its fixed part or than
/// the headers it says it carries.
pub fn decode(payload: &[u8]) -> Option<TerminateCode> {
    let control = payload.get(..CONTROL_LEN)?;
    let mut need = CONTROL_LEN;
    if control[2] & HDRCT_M != 0 {
        need += 2;
    }
    if control[2] & HDRCT_D != 0 {
        let first = *payload.get(need)?;
        need += ddp::Header::len_from_first_byte(first);
    }
    if control[2] & HDRCT_R != 0 {
        need += crate::rdmap::ReadRequest::LEN;
    }
    if payload.len() < need {
        return None;
    }
    Some(TerminateCode { layer: control[0] >> 4, etype: control[0] & 0x0f, code: control[1] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdmap::ReadRequest;
    use proptest::prelude::*;

    #[test]
    fn a_terminate_keeps_its_code() {
        let header = [0x41u8; ddp::UNTAGGED_LEN];
        let mut out = [0; MAX_LEN];
        let segment = Offending { len: 100, header: &header, read_request: None };
        let request = [7; ReadRequest::LEN];
        let read = Offending { read_request: Some(&request), ..segment };
        for (offending, len) in [(None, 4), (Some(segment), 4 + 2 + 18), (Some(read), 4 + 2 + 18 + 28)] {
            let n = encode(DdpUntagged::TooLong.into(), offending, &mut out);
            assert_eq!(n, len);
            assert_eq!(decode(&out[..n]), Some(DdpUntagged::TooLong.into()));
            assert_eq!(decode(&out[..n - 1]), None);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_payloads_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = decode(&bytes);
        }
    }
}
