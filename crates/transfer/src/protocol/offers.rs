//! Files that the sink may have already are offered before they are sent.

use crate::wire::{Answer, OfferEntry};
use std::collections::VecDeque;

/// Files offered in one message, and bytes of the message they may take.
const ENTRIES: usize = 64;
const BYTES: usize = 7500;
/// Bytes of an offered file beside its path, at most: the length of that, its size, two times, owner, group, mode, capabilities, and a flag.
const ENTRY: usize = 2 + 10 + 2 * (10 + 5) + 3 * 5 + 10 + 1;
/// Offers in progress: on a long path so many batches are answered in one round trip. Fewer than the
/// receives that a control connection has for them.
pub(crate) const AHEAD: usize = 10;

/// Offered files, in batches; `C` is what the source knows of a file.
pub(crate) struct Offers<C> {
    gathering: Vec<(OfferEntry, C)>,
    bytes: usize,
    next_batch: u32,
    /// Sent and not answered.
    open: VecDeque<Vec<C>>,
}

impl<C> Default for Offers<C> {
    fn default() -> Offers<C> {
        Offers { gathering: Vec::new(), bytes: 0, next_batch: 0, open: VecDeque::new() }
    }
}

impl<C> Offers<C> {
    /// Whether the entry fits the batch that is gathering; if not, [`Offers::send`] comes first.
    pub(crate) fn has_room(&self, entry: &OfferEntry) -> bool {
        self.gathering.len() < ENTRIES && self.bytes + entry.path.len() + ENTRY <= BYTES
    }

    /// Adds a file to the batch that is gathering.
    pub(crate) fn push(&mut self, entry: OfferEntry, file: C) {
        self.bytes += entry.path.len() + ENTRY;
        self.gathering.push((entry, file));
    }

    /// The batch that has gathered, to be sent, with its number.
    pub(crate) fn send(&mut self) -> Option<(u32, Vec<OfferEntry>)> {
        if self.gathering.is_empty() {
            return None;
        }
        self.bytes = 0;
        let (entries, files) = std::mem::take(&mut self.gathering).into_iter().unzip();
        self.open.push_back(files);
        let batch = self.next_batch;
        self.next_batch = batch.wrapping_add(1);
        Some((batch, entries))
    }

    /// Batches without an answer.
    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }

    /// The oldest open batch has been answered: what to do with its files. A verdict that is too
    /// short leaves the rest to be sent: safe, if not clever.
    pub(crate) fn answered(&mut self, answers: Vec<Answer>) -> Vec<(C, Answer)> {
        let files = self.open.pop_front().unwrap_or_default();
        files.into_iter().zip(answers.into_iter().chain(std::iter::repeat(Answer::Send))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{CONTROL_MAX, Control};

    /// Whatever is offered, a batch is one control message, and never more than the other end expects.
    #[test]
    fn a_batch_fits_its_message() {
        for path_len in [1, 20, 84, 85, 86, 200, 4096] {
            let mut offers = Offers::default();
            // Numbers that take as many bytes as numbers can.
            let time = (i64::MIN, u32::MAX);
            let entry = OfferEntry {
                path: vec![b'p'; path_len],
                size: u64::MAX,
                mtime: time,
                ctime: time,
                owner: u32::MAX,
                group: u32::MAX,
                mode: u32::MAX,
                capabilities: u64::MAX,
                linked: true,
            };
            let mut count = 0;
            while offers.has_room(&entry) {
                offers.push(entry.clone(), ());
                count += 1;
            }
            assert_eq!(count, ENTRIES.min(BYTES / (path_len + ENTRY)), "paths of {path_len}");
            let (batch, entries) = offers.send().unwrap();
            let message = Control::Offer { batch, entries }.encode(0);
            assert!(message.len() <= CONTROL_MAX, "{} bytes with paths of {path_len}", message.len());
            assert!(offers.has_room(&entry), "the next batch begins");
        }
    }
}
