//! The byte-range locks of a file.

/// A range that is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// First byte.
    pub start: u64,
    /// Last byte; `u64::MAX` for a lock to the end of the file, whatever that is.
    pub last: u64,
}

impl Range {
    /// From offset and length, as the protocol has them; none if they make no range.
    pub(crate) fn new(offset: u64, len: u64) -> Option<Range> {
        match len {
            0 => None,
            u64::MAX => Some(Range { start: offset, last: u64::MAX }),
            _ => Some(Range { start: offset, last: offset.checked_add(len - 1)? }),
        }
    }

    /// Its length, as the protocol has it.
    pub(crate) fn len(&self) -> u64 {
        if self.last == u64::MAX { u64::MAX } else { self.last - self.start + 1 }
    }

    fn overlaps(&self, other: &Range) -> bool {
        self.start <= other.last && other.start <= self.last
    }

    fn is_before(&self, other: &Range) -> bool {
        self.last.checked_add(1) == Some(other.start)
    }
}

/// A lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lock {
    /// Whose it is.
    pub holder: u64,
    /// Nobody else may have any lock there.
    pub is_write: bool,
    pub range: Range,
}

/// The locks of a file.
#[derive(Debug, Default)]
pub(super) struct Locks(Vec<Lock>);

impl Locks {
    /// A lock of another that keeps this one from being had.
    pub(super) fn conflict(&self, holder: Option<u64>, is_write: bool, range: Range) -> Option<Lock> {
        let theirs = self.0.iter().filter(|lock| Some(lock.holder) != holder);
        theirs.filter(|lock| is_write || lock.is_write).find(|lock| lock.range.overlaps(&range)).copied()
    }

    /// Takes a range from a holder; what is left of locks at its ends stays.
    pub(super) fn unlock(&mut self, holder: u64, range: Range) {
        let mut left = Vec::new();
        self.0.retain(|lock| {
            if lock.holder != holder || !lock.range.overlaps(&range) {
                return true;
            }
            let before = range.start.checked_sub(1).map(|last| Range { last, ..lock.range });
            let behind = range.last.checked_add(1).map(|start| Range { start, ..lock.range });
            let rest = [before, behind].into_iter().flatten().filter(|r| r.start <= r.last);
            left.extend(rest.map(|range| Lock { range, ..*lock }));
            false
        });
        self.0.append(&mut left);
    }

    /// Gives a range to a holder, instead of what it had there. There must be no [`Locks::conflict`].
    pub(super) fn lock(&mut self, holder: u64, is_write: bool, mut range: Range) {
        self.unlock(holder, range);
        // Neighbours of the same kind become one.
        self.0.retain(|lock| {
            let touches = lock.range.is_before(&range) || range.is_before(&lock.range);
            let same = lock.holder == holder && lock.is_write == is_write && touches;
            if same {
                range.start = range.start.min(lock.range.start);
                range.last = range.last.max(lock.range.last);
            }
            !same
        });
        self.0.push(Lock { holder, is_write, range });
    }

    /// Whether a range is inside one lock of a holder, which would become two without it.
    pub(super) fn is_inside(&self, holder: u64, range: Range) -> bool {
        let theirs = self.0.iter().filter(|lock| lock.holder == holder);
        theirs.map(|lock| lock.range).any(|lock| lock.start < range.start && range.last < lock.last)
    }

    /// Whether a range is inside one lock of a holder, which is for writing if that is asked.
    pub(super) fn covers(&self, holder: u64, is_write: bool, range: Range) -> bool {
        let theirs = self.0.iter().filter(|lock| lock.holder == holder && (lock.is_write || !is_write));
        theirs.map(|lock| lock.range).any(|lock| lock.start <= range.start && range.last <= lock.last)
    }

    /// What a holder has of a range.
    pub(super) fn within(&self, holder: u64, range: Range) -> Vec<(bool, Range)> {
        let theirs = self.0.iter().filter(|lock| lock.holder == holder && lock.range.overlaps(&range));
        let cut = |lock: &Lock| {
            let Range { start, last } = lock.range;
            (lock.is_write, Range { start: start.max(range.start), last: last.min(range.last) })
        };
        theirs.map(cut).collect()
    }

    /// Locks of a holder.
    pub(super) fn count(&self, holder: u64) -> usize {
        self.0.iter().filter(|lock| lock.holder == holder).count()
    }

    /// Takes everything from these holders.
    pub(super) fn release(&mut self, mut are_gone: impl FnMut(u64) -> bool) {
        self.0.retain(|lock| !are_gone(lock.holder));
    }

    /// Owner of each lock.
    #[cfg(test)]
    pub(super) fn holders(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|lock| lock.holder)
    }

    /// All of them.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_as_the_protocol_has_them() {
        assert_eq!(Range::new(5, 0), None);
        assert_eq!(Range::new(5, u64::MAX - 3), None, "beyond the last byte");
        assert_eq!(Range::new(u64::MAX, 2), None, "beyond the last byte");
        assert_eq!(Range::new(5, 3), Some(Range { start: 5, last: 7 }));
        assert_eq!(Range::new(5, 3).unwrap().len(), 3);
        let last_byte = Some(Range { start: u64::MAX, last: u64::MAX });
        assert_eq!((Range::new(u64::MAX, 1), Range::new(u64::MAX, u64::MAX)), (last_byte, last_byte));
        let to_the_end = Range::new(5, u64::MAX).unwrap();
        assert_eq!((to_the_end.last, to_the_end.len()), (u64::MAX, u64::MAX));
    }

    const BYTES: usize = 24;

    proptest! {
        /// Against an array with a cell for each byte and holder.
        #[test]
        fn locks_are_as_if_every_byte_had_its_own(
            steps in prop::collection::vec((0..3_u64, 0..3_u8, 0..20_u64, 1..5_u64), 1..60),
            first in prop::sample::select(vec![0, u64::MAX - (BYTES as u64 - 1)]),
        ) {
            let (mut locks, mut model) = (Locks::default(), [[0_u8; BYTES]; 3]);
            for (holder, what, start, len) in steps {
                let range = Range::new(first + start, len).unwrap();
                let cells = start as usize..(start + len) as usize;
                if what == 0 {
                    locks.unlock(holder, range);
                    model[holder as usize][cells].fill(0);
                } else {
                    let is_write = what == 2;
                    let others = (0..3).filter(|other| *other != holder as usize);
                    let taken = others.flat_map(|other| model[other][cells.clone()].to_vec());
                    let conflicts = taken.into_iter().any(|cell| cell == 2 || is_write && cell == 1);
                    prop_assert_eq!(locks.conflict(Some(holder), is_write, range).is_some(), conflicts);
                    if !conflicts {
                        locks.lock(holder, is_write, range);
                        model[holder as usize][cells].fill(what);
                    }
                }
                for holder in 0..3 {
                    let mut cells = [0_u8; BYTES];
                    for lock in locks.0.iter().filter(|lock| lock.holder == holder) {
                        for cell in &mut cells[(lock.range.start - first) as usize..=(lock.range.last - first) as usize] {
                            prop_assert_eq!(*cell, 0, "one lock of a holder at a byte");
                            *cell = if lock.is_write { 2 } else { 1 };
                        }
                    }
                    prop_assert_eq!(cells, model[holder as usize]);
                }
            }
        }
    }
}
