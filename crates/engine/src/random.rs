//! Randomness from the system.

use ring::rand::SecureRandom;

/// Fresh random bytes, fit for keys.
///
/// # Panics
/// If the system has none, which Linux always has once it is up.
pub fn random<const N: usize>() -> [u8; N] {
    let mut out = [0; N];
    ring::rand::SystemRandom::new().fill(&mut out).expect("the system's randomness");
    out
}
