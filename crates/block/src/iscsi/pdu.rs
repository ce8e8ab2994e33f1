//! PDUs (RFC 7143 section 11): the basic header segment, field by field.

use crate::big_endian::{be16, be32, be64};

/// Bytes of a basic header segment.
pub const BHS: usize = 48;
/// The tag that stands for none.
pub const NO_TAG: u32 = 0xffff_ffff;

/// Operation codes.
#[allow(missing_docs)]
pub mod op {
    pub const NOP_OUT: u8 = 0x00;
    pub const COMMAND: u8 = 0x01;
    pub const TASK_MANAGEMENT: u8 = 0x02;
    pub const LOGIN: u8 = 0x03;
    pub const TEXT: u8 = 0x04;
    pub const DATA_OUT: u8 = 0x05;
    pub const LOGOUT: u8 = 0x06;
    pub const SNACK: u8 = 0x10;
    pub const NOP_IN: u8 = 0x20;
    pub const RESPONSE: u8 = 0x21;
    pub const TASK_MANAGEMENT_RESPONSE: u8 = 0x22;
    pub const LOGIN_RESPONSE: u8 = 0x23;
    pub const TEXT_RESPONSE: u8 = 0x24;
    pub const DATA_IN: u8 = 0x25;
    pub const LOGOUT_RESPONSE: u8 = 0x26;
    pub const R2T: u8 = 0x31;
    pub const ASYNC: u8 = 0x32;
    pub const REJECT: u8 = 0x3f;
}

/// Reasons of Reject.
#[allow(missing_docs)]
pub mod reject {
    pub const DATA_DIGEST: u8 = 0x02;
    pub const SNACK: u8 = 0x03;
    pub const PROTOCOL_ERROR: u8 = 0x04;
    pub const NOT_SUPPORTED: u8 = 0x05;
    pub const INVALID_FIELD: u8 = 0x09;
}

/// A basic header segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header(pub [u8; BHS]);

impl Header {
    /// A header of the target's with the F bit set.
    pub fn new(op: u8) -> Header {
        let mut header = Header([0; BHS]);
        header.0[0] = op;
        header.0[1] = 0x80;
        header
    }

    /// Operation code.
    pub fn op(&self) -> u8 {
        self.0[0] & 0x3f
    }

    /// To be done before and beside the commands that are numbered.
    pub fn immediate(&self) -> bool {
        self.0[0] & 0x40 != 0
    }

    /// F, the last of a sequence. (T, in a login.)
    pub fn is_final(&self) -> bool {
        self.0[1] & 0x80 != 0
    }

    /// Bytes of additional header segments.
    pub fn ahs_len(&self) -> usize {
        usize::from(self.0[4]) * 4
    }

    /// Bytes of data.
    pub fn data_len(&self) -> usize {
        be32(&self.0, 4) as usize & 0xff_ffff
    }

    /// Sets the bytes of data.
    pub fn set_data_len(&mut self, len: usize) {
        self.0[5..8].copy_from_slice(&(len as u32).to_be_bytes()[1..]);
    }

    /// Initiator task tag.
    pub fn tag(&self) -> u32 {
        be32(&self.0, 16)
    }

    /// Sets the initiator task tag.
    pub fn set_tag(&mut self, tag: u32) {
        self.set32(16, tag);
    }

    /// Two bytes.
    pub fn get16(&self, at: usize) -> u16 {
        be16(&self.0, at)
    }

    /// Four bytes.
    pub fn get32(&self, at: usize) -> u32 {
        be32(&self.0, at)
    }

    /// Eight bytes.
    pub fn get64(&self, at: usize) -> u64 {
        be64(&self.0, at)
    }

    /// Sets two bytes.
    pub fn set16(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }

    /// Sets four bytes.
    pub fn set32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    /// The logical unit number, for LUNs below 16384 of one level; `None` for others.
    pub fn lun(&self) -> Option<u16> {
        decode_lun(self.get64(8))
    }

    /// CmdSN.
    pub fn cmd_sn(&self) -> u32 {
        self.get32(24)
    }
}

/// A logical unit number by peripheral device or flat space addressing (SAM-5 4.7).
pub fn decode_lun(lun: u64) -> Option<u16> {
    let first = (lun >> 48) as u16;
    let rest = lun & 0x0000_ffff_ffff_ffff;
    match first >> 14 {
        0 if first >> 8 == 0 && rest == 0 => Some(first & 0xff),
        1 if rest == 0 => Some(first & 0x3fff),
        _ => None,
    }
}

/// The eight bytes of a logical unit number.
pub fn encode_lun(lun: u16) -> [u8; 8] {
    let first = if lun < 256 { lun } else { 0x4000 | lun };
    (u64::from(first) << 48).to_be_bytes()
}

/// The digest of a header.
pub fn digest(header: &[u8]) -> [u8; 4] {
    let mut sum = Sum::new();
    sum.update(header);
    sum.finish()
}

/// A digest being made: CRC32C, the least significant byte first.
pub struct Sum(crc_fast::Digest);

impl Sum {
    /// Of nothing yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Sum {
        Sum(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    /// Of this too.
    pub fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// The digest.
    pub fn finish(self) -> [u8; 4] {
        (self.0.finalize() as u32).to_le_bytes()
    }
}

/// Bytes that fill data up to a multiple of four.
pub fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// `a` is before `b` in serial number arithmetic (RFC 1982).
pub fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_standard() {
        // RFC 7143 appendix A.4
        assert_eq!(digest(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(digest(&[0xff; 32]), [0x43, 0xab, 0xa8, 0x62]);
    }

    #[test]
    fn luns_survive_their_encoding() {
        for lun in [0, 1, 255, 256, 16383] {
            assert_eq!(decode_lun(u64::from_be_bytes(encode_lun(lun))), Some(lun));
        }
        assert_eq!(decode_lun(1), None);
        assert_eq!(decode_lun(0xc101 << 48), None);
    }

    proptest::proptest! {
        #[test]
        fn every_number_of_a_unit_survives_and_no_other_is_taken_for_one(lun in 0u16..16384, bytes: u64) {
            proptest::prop_assert_eq!(decode_lun(u64::from_be_bytes(encode_lun(lun))), Some(lun));
            if let Some(found) = decode_lun(bytes) {
                // The two forms that there are of a number say nothing beside it.
                let flat = (0x4000 | u64::from(found)) << 48;
                proptest::prop_assert!(bytes == u64::from(found) << 48 || bytes == flat);
            }
        }
    }

    #[test]
    fn serial_numbers_wrap() {
        assert!(before(0xffff_fffe, 1) && !before(1, 0xffff_fffe) && !before(5, 5));
    }
}
