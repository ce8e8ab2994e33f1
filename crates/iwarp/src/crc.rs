//! CRC32C as MPA uses it (RFC 5044 §4.4): over every byte of an FPDU from its length field, or
//! a marker just before it, through the pad; markers included; sent least significant byte first.

use crc_fast::{CrcAlgorithm, Digest};

/// A running CRC, or nothing at all where the connection does without.
#[derive(Clone)]
pub(crate) struct RunningCrc(Option<Digest>);

impl RunningCrc {
    pub(crate) fn new(enabled: bool) -> RunningCrc {
        RunningCrc(enabled.then(|| Digest::new(CrcAlgorithm::Crc32Iscsi)))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        if let Some(digest) = &mut self.0 {
            digest.update(bytes);
        }
    }

    /// The four bytes for the wire; zero where CRCs are off. Starts again.
    pub(crate) fn take(&mut self) -> [u8; 4] {
        match &mut self.0 {
            Some(digest) => {
                let value = digest.finalize() as u32;
                digest.reset();
                value.to_le_bytes()
            }
            None => [0; 4],
        }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.0.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_iscsi_test_vectors() {
        // RFC 7143 appendix A.4: 32 bytes of zeroes, 32 of ones.
        let mut crc = RunningCrc::new(true);
        crc.update(&[0; 32]);
        assert_eq!(crc.take(), [0xaa, 0x36, 0x91, 0x8a]);
        crc.update(&[0xff; 16]);
        crc.update(&[0xff; 16]);
        assert_eq!(crc.take(), [0x43, 0xab, 0xa8, 0x62]);
    }
}
