//! Numbers in octets, the most significant first.

/// Two octets at `at`.
///
/// # Panics
/// If they are outside; so do the others.
pub(crate) fn be16(octets: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([octets[at], octets[at + 1]])
}

/// Four octets.
pub(crate) fn be32(octets: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(octets[at..at + 4].try_into().expect("four octets"))
}

/// Eight octets.
pub(crate) fn be64(octets: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(octets[at..at + 8].try_into().expect("eight octets"))
}
