//! The order in which steering tags are given out: one that no peer can foresee, and that names each tag once.
//!
//! Drawing tags at random would do the first and not the second: of five thousand tags drawn, two are the same once in
//! some three hundred times, and a peer that still holds the older one would be let into the newer one's memory. So the
//! tags are the numbers from 0 to 2^32 - 1 under a secret permutation of them: a Feistel network of ten rounds, as
//! FF1 of NIST SP 800-38G has, whose round function is AES-128. The key is the device's own and from the system.

use aes::Aes128;
use aes::cipher::{BlockEncrypt, KeyInit};

const ROUNDS: u8 = 10;

/// Gives out steering tags.
pub(crate) enum Stags {
    /// In a secret order.
    Secret { cipher: Box<Aes128>, given: u32 },
    /// For simulations and fuzzing: `0x101`, `0x201` and so on.
    Foreseeable { given: u32 },
}

impl Stags {
    /// A new secret order.
    pub(crate) fn secret() -> Stags {
        Stags::keyed(&random_key())
    }

    pub(crate) fn deterministic() -> Stags {
        Stags::Foreseeable { given: 0 }
    }

    fn keyed(key: &[u8; 16]) -> Stags {
        Stags::Secret { cipher: Box::new(Aes128::new(&(*key).into())), given: 0 }
    }

    /// The next one. All others come before it comes again.
    pub(crate) fn next(&mut self) -> u32 {
        match self {
            Stags::Secret { cipher, given } => {
                let stag = permute(cipher, *given);
                *given = given.wrapping_add(1);
                stag
            }
            Stags::Foreseeable { given } => {
                *given = given.wrapping_add(1);
                *given << 8 | 1
            }
        }
    }
}

/// A balanced Feistel network: whatever the round function is, different numbers stay different.
fn permute(cipher: &Aes128, number: u32) -> u32 {
    let (mut left, mut right) = ((number >> 16) as u16, number as u16);
    for round in 0..ROUNDS {
        let mut block = [0; 16];
        block[0] = round;
        block[1..3].copy_from_slice(&right.to_ne_bytes());
        let mut block = block.into();
        cipher.encrypt_block(&mut block);
        (left, right) = (right, left ^ u16::from_ne_bytes([block[0], block[1]]));
    }
    u32::from(left) << 16 | u32::from(right)
}

fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    // Up to 256 bytes come whole once the system's generator has begun; an interruption is no failure.
    while rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty()) != Ok(key.len()) {}
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tag_comes_twice() {
        let mut stags = Stags::keyed(b"a key of sixteen");
        // Drawn at random, some 128 pairs would be the same.
        let count = if cfg!(miri) { 1 << 8 } else { 1 << 20 };
        let mut seen: Vec<u32> = (0..count).map(|_| stags.next()).collect();
        seen.sort_unstable();
        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn the_order_is_the_key_s_and_spread_over_all_tags() {
        let first = |key| {
            let mut stags = Stags::keyed(key);
            (0..4096).map(|_| stags.next()).collect::<Vec<_>>()
        };
        let (one, other) = (first(b"a key of sixteen"), first(b"b key of sixteen"));
        assert_eq!(one, first(b"a key of sixteen"));
        assert!(one.iter().zip(&other).filter(|(a, b)| a == b).count() < 4);
        // Neither half of a tag, nor what lies between two that follow each other, is drawn from a few.
        let distinct = |numbers: Vec<u32>| numbers.into_iter().collect::<std::collections::HashSet<_>>().len();
        assert!(distinct(one.iter().map(|s| s >> 16).collect()) > 3800);
        assert!(distinct(one.iter().map(|s| s & 0xffff).collect()) > 3800);
        assert!(distinct(one.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect()) > 4000);
    }
}
