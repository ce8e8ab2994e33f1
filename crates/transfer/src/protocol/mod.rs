//! The two ends of RFTP as state machines: no sockets, no files, no clock, no threads.
//!
//! - [`source`]: pairs loaded blocks with credits, announces the end.
//! - [`sink`]: grants credits, accounts for blocks, knows when all is done.
//! - [`offers`]: which files were offered, which answers belong to which.
//! - [`extents`]: what of a file must travel, in which pieces.
//! - [`reassembly`]: large files whose beginning, pieces and end come in any order.
//!
//! [`crate::source`] and [`crate::sink`] drive them with a real network and real files;
//! `simulation` drives them, and the journal, with invented ones that fail at every step.

pub(crate) mod extents;
pub(crate) mod offers;
pub(crate) mod reassembly;
pub(crate) mod sink;
pub(crate) mod source;

#[cfg(test)]
mod simulation;

use crate::wire::Malformed;
use std::collections::BTreeSet;

/// The peer broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    /// By bytes that make no sense.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// By something out of turn.
    #[error("unexpected {0}")]
    Unexpected(&'static str),
}

/// Most blocks in progress in one session: credits granted and not used up.
pub(crate) const WINDOW_MAX: usize = 256;
/// Credits in one message.
pub(crate) const CREDITS_PER_REPLY: usize = 64;

/// How far a sequence number may be ahead of the first that is missing: what is remembered of a hostile peer's numbers.
const AHEAD_MAX: u32 = 1 << 20;

/// Sequence numbers that have been seen, each once. They come nearly in order, so the gaps are few.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Every number below has been seen.
    next: u32,
    /// Those seen above.
    ahead: BTreeSet<u32>,
}

impl Seen {
    /// Notes a number; false if it has been seen before, or is absurdly far ahead.
    pub(crate) fn insert(&mut self, sequence: u32) -> bool {
        let far = sequence.checked_sub(self.next).is_none_or(|d| d > AHEAD_MAX);
        if far || !self.ahead.insert(sequence) {
            return false;
        }
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
        true
    }

    pub(crate) fn contains(&self, sequence: u32) -> bool {
        sequence < self.next || self.ahead.contains(&sequence)
    }

    /// How many have been seen.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.next) + self.ahead.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sequence_number_is_taken_once_and_none_from_too_far_ahead() {
        let mut seen = Seen::default();
        assert!(seen.insert(1) && !seen.insert(1) && seen.insert(0) && !seen.insert(0) && !seen.insert(1));
        assert_eq!((seen.next, seen.count()), (2, 2));
        assert!(!seen.insert(2 + AHEAD_MAX + 1) && seen.insert(2 + AHEAD_MAX));
        assert!(seen.contains(2 + AHEAD_MAX) && !seen.contains(2));
        assert_eq!(seen.count(), 3);
    }
}
