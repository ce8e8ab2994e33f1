//! Sealing of blocks: AES-256-GCM, in place, the tag kept apart.
//!
//! A key serves one direction of one session. The nonce is the block's counter, which never
//! repeats under a key, so a replayed, reordered or moved block does not open.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

/// Bytes of a key.
pub const KEY_LEN: usize = 32;
/// Bytes of an authentication tag.
pub const TAG_LEN: usize = 16;

/// Seals blocks of one direction of one session.
pub struct Sealer(LessSafeKey);

/// The tag does not fit: the block was changed, moved or replayed, or the key is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a block failed authentication")]
pub struct Forged;

impl Sealer {
    /// Seals and opens with `key`.
    pub fn new(key: &[u8; KEY_LEN]) -> Sealer {
        Sealer(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("the key has the right length")))
    }

    fn nonce(counter: u64) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&counter.to_be_bytes());
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts `data` in place. `counter` must not have been used with this key before.
    pub fn seal(&self, counter: u64, header: &[u8], data: &mut [u8]) -> [u8; TAG_LEN] {
        let tag = self.0.seal_in_place_separate_tag(Self::nonce(counter), Aad::from(header), data);
        let mut out = [0; TAG_LEN];
        out.copy_from_slice(tag.expect("blocks are far below the cipher's limit").as_ref());
        out
    }

    /// Decrypts `data` in place and checks it and `header` against `tag`.
    ///
    /// # Errors
    /// [`Forged`]; `data` is then garbage.
    pub fn open(&self, counter: u64, header: &[u8], data: &mut [u8], tag: &[u8; TAG_LEN]) -> Result<(), Forged> {
        let tag = ring::aead::Tag::from(*tag);
        let opened = self.0.open_in_place_separate_tag(Self::nonce(counter), Aad::from(header), tag, data, 0..);
        opened.map(|_| ()).map_err(|_| Forged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_block_opens_only_unchanged_in_its_place_and_under_its_key() {
        let sealer = Sealer::new(&[1; KEY_LEN]);
        let mut data = *b"some payload";
        let tag = sealer.seal(7, b"header", &mut data);
        assert_ne!(&data, b"some payload");
        for (counter, header, key, flip) in
            [(8, b"header", 1, 0), (7, b"heaDer", 1, 0), (7, b"header", 2, 0), (7, b"header", 1, 1)]
        {
            let mut copy = data;
            copy[3] ^= flip;
            assert_eq!(Sealer::new(&[key; KEY_LEN]).open(counter, header, &mut copy, &tag), Err(Forged));
        }
        assert_eq!(sealer.open(7, b"header", &mut data, &tag), Ok(()));
        assert_eq!(&data, b"some payload");
    }
}
