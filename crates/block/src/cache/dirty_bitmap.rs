//! Dirty bitmap of a cache block: which sub-blocks have to be written back.

use std::ops::Range;
use thruway_engine::Segment;

/// Bytes of the smallest sub-block.
const SUB_BLOCK_MIN: u32 = 4096;
/// Clean bytes between dirty ones that are written with them, instead of in two writes.
const GAP_MAX: u32 = 16 << 10;

/// The dirty sub-blocks of a block: at most 64, of 4 KiB or of a 64th of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DirtyBitmap {
    set: u64,
    sub_block: u32,
}

impl DirtyBitmap {
    /// Nothing is dirty in a block of this length, a power of two from 4 KiB to 1 MiB.
    pub(super) fn none(block: usize) -> DirtyBitmap {
        DirtyBitmap { set: 0, sub_block: (block as u32 / 64).max(SUB_BLOCK_MIN) }
    }

    /// The bitmap that [`DirtyBitmap::bits`] has returned for a block of this length.
    pub(super) fn of(block: usize, bits: u64) -> DirtyBitmap {
        let empty = DirtyBitmap::none(block);
        let count = block as u32 / empty.sub_block;
        DirtyBitmap { set: bits & (u64::MAX >> (64 - count.min(64))), ..empty }
    }

    /// The bitmap as a number, the first sub-block in the lowest bit.
    pub(super) fn bits(&self) -> u64 {
        self.set
    }

    /// Marks the sub-blocks that these bytes touch.
    pub(super) fn add(&mut self, within: usize, len: usize) {
        if len == 0 {
            return;
        }
        let (first, last) = (within as u32 / self.sub_block, (within + len - 1) as u32 / self.sub_block);
        self.set |= (u64::MAX >> (63 - (last - first))) << first;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.set == 0
    }

    pub(super) fn join(&mut self, other: DirtyBitmap) {
        self.set |= other.set;
    }

    /// Takes the bitmap, leaving it empty.
    pub(super) fn take(&mut self) -> DirtyBitmap {
        DirtyBitmap { set: std::mem::take(&mut self.set), sub_block: self.sub_block }
    }

    /// The byte ranges to write, in order; near ones are joined.
    pub(super) fn runs(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (mut left, sub_block) = (self.set, self.sub_block);
        let gap = GAP_MAX / sub_block;
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let first = left.trailing_zeros();
            let mut end = first;
            loop {
                let ones = (left >> end).trailing_ones();
                end += ones;
                // A shift by 64 would overflow.
                left = if end >= 64 { 0 } else { left >> end << end };
                if left == 0 || left.trailing_zeros() - end > gap {
                    return Some((first * sub_block) as usize..(end * sub_block) as usize);
                }
                end = left.trailing_zeros();
            }
        })
    }

    /// Cuts what is in it out of a copy of the block, which may end early.
    pub(super) fn cut(&self, mut block: Segment) -> Vec<(u64, Segment)> {
        let (mut cut, mut start) = (Vec::new(), 0);
        for run in self.runs() {
            if run.start >= start + block.len() {
                break;
            }
            let mut part = block.split_off(run.start - start);
            let len = part.len();
            block = part.split_off((run.end - run.start).min(len));
            start = run.start + part.len();
            cut.push((run.start as u64, part));
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_dirty_is_written_and_little_else(
            exponent in 12u32..21,
            changes in prop::collection::vec((any::<u32>(), any::<u32>()), 0..20),
        ) {
            let block = 1usize << exponent;
            let mut bitmap = DirtyBitmap::none(block);
            let mut dirty = vec![false; block / 4096];
            for (at, len) in changes {
                let at = at as usize % block;
                let len = len as usize % (block - at + 1);
                bitmap.add(at, len);
                if len > 0 {
                    dirty[at / 4096..=(at + len - 1) / 4096].fill(true);
                }
            }
            let sub_block = (block / 64).max(4096);
            let mut end = None;
            for run in bitmap.runs() {
                prop_assert!(run.start < run.end && run.end <= block && run.start % sub_block == 0 && run.end % sub_block == 0);
                // Runs are in order, with more between them than is written for nothing.
                prop_assert!(end.is_none_or(|end| run.start - end > GAP_MAX as usize / sub_block * sub_block));
                let touched = |part: &[bool]| part.iter().any(|dirty| *dirty);
                prop_assert!(touched(&dirty[run.start / 4096..][..sub_block / 4096]), "begins with what is dirty");
                dirty[run.start / 4096..run.end / 4096].fill(false);
                end = Some(run.end);
            }
            prop_assert!(dirty.iter().all(|dirty| !dirty), "nothing is left out");
        }
    }

    fn runs(block: usize, changes: &[(usize, usize)]) -> Vec<(usize, usize)> {
        let mut dirty = DirtyBitmap::none(block);
        changes.iter().for_each(|(within, len)| dirty.add(*within, *len));
        dirty.runs().map(|run| (run.start, run.end)).collect()
    }

    #[test]
    fn changes_are_written_by_sub_blocks() {
        assert_eq!(runs(65536, &[]), []);
        assert_eq!(runs(65536, &[(5000, 1)]), [(4096, 8192)]);
        assert_eq!(runs(65536, &[(4095, 2)]), [(0, 8192)]);
        assert_eq!(runs(65536, &[(0, 65536)]), [(0, 65536)]);
        assert_eq!(runs(1 << 20, &[(0, 1 << 20)]), [(0, 1 << 20)], "64 sub-blocks");
        assert_eq!(runs(1 << 20, &[((1 << 20) - 1, 1)]), [((1 << 20) - 16384, 1 << 20)]);
        assert_eq!(runs(4096, &[(17, 5)]), [(0, 4096)]);
    }

    #[test]
    fn small_gaps_are_written_too() {
        assert_eq!(runs(65536, &[(0, 1), (4096 * 5, 1)]), [(0, 4096 * 6)]);
        assert_eq!(runs(65536, &[(0, 1), (4096 * 6, 1)]), [(0, 4096), (4096 * 6, 4096 * 7)]);
        assert_eq!(runs(65536, &[(0, 1), (4096 * 2, 1), (4096 * 15, 1)]), [(0, 4096 * 3), (4096 * 15, 65536)]);
    }

    #[test]
    fn a_block_that_ends_early_is_cut_there() {
        let segments = thruway_engine::Segments::new(1, 65536).unwrap();
        let mut reservation = futures_util::FutureExt::now_or_never(segments.reserve(1)).unwrap();
        let mut block = reservation.segment(65536);
        drop(block.split_off(10_000));
        let mut dirty = DirtyBitmap::none(65536);
        [(0, 1), (8192 * 4, 100), (65535, 1)].iter().for_each(|(within, len)| dirty.add(*within, *len));
        let cut: Vec<(u64, usize)> = dirty.cut(block).iter().map(|(at, part)| (*at, part.len())).collect();
        assert_eq!(cut, [(0, 4096)]);
    }
}
