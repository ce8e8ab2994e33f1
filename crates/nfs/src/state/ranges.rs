//! The byte-range locks of a file.

use std::collections::{BTreeMap, HashMap};
use thruway_tcp::Origin;

/// A range that is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// First byte.
    pub start: u64,
    /// Last byte; `u64::MAX` for a lock to the end of the file, whatever that is.
    pub last: u64,
}

impl Range {
    /// All bytes of a file.
    pub(super) const ALL: Range = Range { start: 0, last: u64::MAX };

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

    pub(crate) fn overlaps(&self, other: &Range) -> bool {
        self.start <= other.last && other.start <= self.last
    }

    /// The smallest range that contains both.
    pub(super) fn hull(&self, other: &Range) -> Range {
        Range { start: self.start.min(other.start), last: self.last.max(other.last) }
    }

    /// Part of this range that is in the other one, which overlaps it.
    pub(super) fn within(&self, other: &Range) -> Range {
        Range { start: self.start.max(other.start), last: self.last.min(other.last) }
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

/// The locks of a file. No operation looks at all of them.
#[derive(Debug, Default)]
pub(super) struct Locks {
    /// Locks of each holder, which do not overlap: last byte and `is_write`, by first byte.
    of_holder: HashMap<u64, BTreeMap<u64, (u64, bool)>>,
    /// The same locks: those for reading, and those for writing.
    by_start: [Sorted; 2],
}

impl Locks {
    /// A lock of another that keeps this one from being had.
    pub(super) fn conflict(&self, holder: Option<u64>, is_write: bool, range: Range) -> Option<Lock> {
        let [readers, writers] = &self.by_start;
        let reader = || if is_write { readers.find_other(holder, range) } else { None };
        writers.find_other(holder, range).or_else(reader)
    }

    /// Locks of a holder that overlap a range.
    fn overlapping(&self, holder: u64, range: Range) -> impl Iterator<Item = Lock> {
        let own = self.of_holder.get(&holder).into_iter();
        let found = own.flat_map(move |own| {
            let before = own.range(..range.start).next_back().filter(|(_, (last, _))| *last >= range.start);
            before.into_iter().chain(own.range(range.start..=range.last))
        });
        found.map(move |(start, (last, is_write))| Lock {
            holder,
            is_write: *is_write,
            range: Range { start: *start, last: *last },
        })
    }

    fn insert(&mut self, lock: Lock) {
        let own = self.of_holder.entry(lock.holder).or_default();
        own.insert(lock.range.start, (lock.range.last, lock.is_write));
        self.by_start[usize::from(lock.is_write)].insert(lock);
    }

    fn remove(&mut self, lock: &Lock) {
        if let Some(own) = self.of_holder.get_mut(&lock.holder) {
            own.remove(&lock.range.start);
            if own.is_empty() {
                self.of_holder.remove(&lock.holder);
            }
        }
        self.by_start[usize::from(lock.is_write)].remove(lock);
    }

    /// Takes a range from a holder; what is left of locks at its ends stays. Returns a range that contains all that was locked of it;
    /// `None` if nothing was.
    pub(super) fn unlock(&mut self, holder: u64, range: Range) -> Option<Range> {
        let locks: Vec<Lock> = self.overlapping(holder, range).collect();
        let mut freed: Option<Range> = None;
        for lock in locks {
            self.remove(&lock);
            let cut = lock.range.within(&range);
            freed = Some(freed.map_or(cut, |before| before.hull(&cut)));
            let before = range.start.checked_sub(1).map(|last| Range { last, ..lock.range });
            let behind = range.last.checked_add(1).map(|start| Range { start, ..lock.range });
            let rest = [before, behind].into_iter().flatten().filter(|r| r.start <= r.last);
            rest.for_each(|range| self.insert(Lock { range, ..lock }));
        }
        freed
    }

    /// Gives a range to a holder, instead of what it had there. There must be no [`Locks::conflict`]. Returns a range that contains all
    /// that was locked for writing and is locked for reading now.
    pub(super) fn lock(&mut self, holder: u64, is_write: bool, mut range: Range) -> Option<Range> {
        let written = self.overlapping(holder, range).filter(|lock| lock.is_write && !is_write);
        let freed = written.map(|lock| lock.range.within(&range)).reduce(|all, part| all.hull(&part));
        self.unlock(holder, range);
        // Neighbours of the same kind become one.
        let at = |byte: Option<u64>| byte.map(|byte| Range { start: byte, last: byte });
        for neighbour in [at(range.start.checked_sub(1)), at(range.last.checked_add(1))].into_iter().flatten() {
            let known = self.overlapping(holder, neighbour).next().filter(|known| known.is_write == is_write);
            if let Some(known) = known {
                self.remove(&known);
                range = range.hull(&known.range);
            }
        }
        self.insert(Lock { holder, is_write, range });
        freed
    }

    /// Whether a range is inside one lock of a holder, which would become two without it.
    pub(super) fn is_inside(&self, holder: u64, range: Range) -> bool {
        let first = self.overlapping(holder, range).next();
        first.is_some_and(|lock| lock.range.start < range.start && range.last < lock.range.last)
    }

    /// Whether a range is inside one lock of a holder, which is for writing if that is asked.
    pub(super) fn covers(&self, holder: u64, is_write: bool, range: Range) -> bool {
        let first = self.overlapping(holder, range).next().filter(|lock| lock.is_write || !is_write);
        first.is_some_and(|lock| lock.range.start <= range.start && range.last <= lock.range.last)
    }

    /// What a holder has of a range.
    pub(super) fn within(&self, holder: u64, range: Range) -> Vec<(bool, Range)> {
        self.overlapping(holder, range).map(|lock| (lock.is_write, lock.range.within(&range))).collect()
    }

    /// Locks of a holder.
    pub(super) fn count(&self, holder: u64) -> usize {
        self.of_holder.get(&holder).map_or(0, BTreeMap::len)
    }

    /// Takes everything from some holders. Returns a range that contains their locks.
    pub(super) fn release(&mut self, holders: &HashMap<u64, Origin>) -> Option<Range> {
        let count: usize = holders.keys().map(|holder| self.count(*holder)).sum();
        let all: usize = self.by_start.iter().map(|sorted| sorted.len).sum();
        let mut freed: Option<Range> = None;
        if count.saturating_mul(CHUNK_MAX / 2) < all {
            for holder in holders.keys() {
                freed = freed.into_iter().chain(self.unlock(*holder, Range::ALL)).reduce(|all, part| all.hull(&part));
            }
            return freed;
        }
        // One pass over all locks takes less time than to look up each of these.
        for own in holders.keys().filter_map(|holder| self.of_holder.remove(holder)) {
            let ends = own.first_key_value().zip(own.last_key_value());
            let range = ends.map(|((start, _), (_, (last, _)))| Range { start: *start, last: *last });
            freed = freed.into_iter().chain(range).reduce(|all, part| all.hull(&part));
        }
        self.by_start.iter_mut().for_each(|sorted| sorted.remove_all(holders));
        freed
    }

    /// All locks.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = Lock> {
        self.of_holder.keys().flat_map(|holder| self.overlapping(*holder, Range::ALL))
    }

    /// Number of all locks.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_start.iter().map(|sorted| sorted.len).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of_holder.is_empty()
    }
}

/// Most locks of a [`Chunk`]. Two neighbours together have more than half as many.
const CHUNK_MAX: usize = 128;

/// Locks in the order of their first bytes. Those of one holder do not overlap.
#[derive(Debug, Default)]
struct Sorted {
    /// Parts of the list, none of them empty.
    chunks: Vec<Chunk>,
    len: usize,
    /// Chunks and locks that searches have looked at.
    #[cfg(test)]
    looked_at: std::cell::Cell<usize>,
}

#[derive(Debug)]
struct Chunk {
    locks: Vec<Lock>,
    /// Highest last byte.
    last: u64,
    /// Lowest and highest number of a holder.
    holders: (u64, u64),
}

impl Lock {
    fn key(&self) -> (u64, u64) {
        (self.range.start, self.holder)
    }
}

impl Chunk {
    fn new(locks: Vec<Lock>) -> Chunk {
        let last = locks.iter().map(|lock| lock.range.last).max().unwrap_or(0);
        let holders =
            locks.iter().fold((u64::MAX, 0), |(low, high), lock| (low.min(lock.holder), high.max(lock.holder)));
        Chunk { locks, last, holders }
    }
}

impl Sorted {
    /// Finds a lock in this range that is not of this holder.
    ///
    /// At most three of the chunks that are scanned have none: those at both ends of the range, and one with a lock of the same holder
    /// that begins before the range.
    fn find_other(&self, holder: Option<u64>, range: Range) -> Option<Lock> {
        for chunk in &self.chunks {
            self.count(1);
            if chunk.locks[0].range.start > range.last {
                return None;
            }
            let (low, high) = chunk.holders;
            if chunk.last < range.start || (low == high && Some(low) == holder) {
                continue;
            }
            self.count(chunk.locks.len());
            let mut theirs = chunk.locks.iter().filter(|lock| Some(lock.holder) != holder);
            if let Some(lock) = theirs.find(|lock| lock.range.overlaps(&range)) {
                return Some(*lock);
            }
        }
        None
    }

    fn count(&self, _looked_at: usize) {
        #[cfg(test)]
        self.looked_at.set(self.looked_at.get() + _looked_at);
    }

    /// Index of the chunk with the last lock that is not behind this place.
    fn chunk_of(&self, key: (u64, u64)) -> usize {
        self.chunks.partition_point(|chunk| chunk.locks[0].key() <= key).saturating_sub(1)
    }

    fn insert(&mut self, lock: Lock) {
        self.len += 1;
        let at = self.chunk_of(lock.key());
        let Some(chunk) = self.chunks.get_mut(at) else {
            self.chunks.push(Chunk::new(vec![lock]));
            return;
        };
        let mut locks = std::mem::take(&mut chunk.locks);
        locks.insert(locks.partition_point(|known| known.key() < lock.key()), lock);
        let behind = if locks.len() > CHUNK_MAX { locks.split_off(CHUNK_MAX / 2) } else { Vec::new() };
        *chunk = Chunk::new(locks);
        if !behind.is_empty() {
            self.chunks.insert(at + 1, Chunk::new(behind));
        }
    }

    fn remove(&mut self, lock: &Lock) {
        let at = self.chunk_of(lock.key());
        let Some(chunk) = self.chunks.get_mut(at) else { return };
        let Ok(index) = chunk.locks.binary_search_by_key(&lock.key(), Lock::key) else { return };
        self.len -= 1;
        let mut locks = std::mem::take(&mut chunk.locks);
        locks.remove(index);
        if locks.is_empty() {
            self.chunks.remove(at);
            self.merge(at.wrapping_sub(1));
            return;
        }
        *chunk = Chunk::new(locks);
        self.merge(at);
        self.merge(at.wrapping_sub(1));
    }

    /// Removes all locks of some holders.
    fn remove_all(&mut self, holders: &HashMap<u64, Origin>) {
        let mut chunks: Vec<Chunk> = Vec::with_capacity(self.chunks.len());
        self.len = 0;
        for mut chunk in std::mem::take(&mut self.chunks) {
            let before = chunk.locks.len();
            chunk.locks.retain(|lock| !holders.contains_key(&lock.holder));
            self.len += chunk.locks.len();
            match chunks.last_mut() {
                _ if chunk.locks.is_empty() => {}
                Some(last) if last.locks.len() + chunk.locks.len() <= CHUNK_MAX / 2 => {
                    let mut locks = std::mem::take(&mut last.locks);
                    locks.append(&mut chunk.locks);
                    *last = Chunk::new(locks);
                }
                _ if chunk.locks.len() == before => chunks.push(chunk),
                _ => chunks.push(Chunk::new(chunk.locks)),
            }
        }
        self.chunks = chunks;
    }

    /// Makes one chunk of this and the next one if both are small.
    fn merge(&mut self, at: usize) {
        let Some([first, second]) = self.chunks.get(at..).and_then(|rest| rest.first_chunk()) else { return };
        if first.locks.len() + second.locks.len() > CHUNK_MAX / 2 {
            return;
        }
        let second = self.chunks.remove(at + 1);
        let mut locks = std::mem::take(&mut self.chunks[at].locks);
        locks.extend(second.locks);
        self.chunks[at] = Chunk::new(locks);
    }
}

#[cfg(test)]
mod tests {
    use super::super::LOCKS_MAX;
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

    /// Locks of one byte each, of the holders that `holder` says, and chunks that are as small as possible if `is_sparse`.
    fn many(is_sparse: bool, holder: impl Fn(u64) -> u64) -> Locks {
        let mut locks = Locks::default();
        for n in 0..LOCKS_MAX as u64 {
            locks.lock(holder(n), true, Range::new(10 * n, 1).unwrap());
        }
        if is_sparse {
            for n in (0..LOCKS_MAX as u64).filter(|n| n % 64 > 0) {
                locks.unlock(holder(n), Range::new(10 * n, 1).unwrap());
            }
        }
        locks
    }

    #[test]
    fn a_search_looks_at_few_of_many_locks() {
        for (is_sparse, holders) in [(false, 1), (false, 2), (false, 8192), (true, 1), (true, 2)] {
            let mut locks = many(is_sparse, |n| n % holders);
            let chunks = locks.by_start[1].chunks.len();
            assert!(chunks <= 2 * locks.len() / (CHUNK_MAX / 2) + 1, "{chunks}");
            // One of the same holder begins before the range, and ends in it.
            locks.lock(0, true, Range { start: 1, last: 9 });
            let all = [Range::ALL, Range { start: 5, last: u64::MAX }, Range { start: 0, last: 3 }];
            let between = (0..8000).step_by(77).map(|n| Range { start: 10 * n + 2, last: 10 * n + 8 });
            for range in all.into_iter().chain(between) {
                let before = locks.by_start[1].looked_at.get();
                let found = locks.conflict(Some(0), true, range);
                let expected = locks.all().any(|lock| lock.holder != 0 && lock.range.overlaps(&range));
                assert_eq!(found.is_some(), expected);
                let looked_at = locks.by_start[1].looked_at.get() - before;
                assert!(looked_at <= chunks + 1 + 4 * CHUNK_MAX, "{looked_at} of {} with {range:?}", locks.len());
            }
        }
    }

    #[test]
    fn chunks_stay_few_and_in_order() {
        let mut locks = Locks::default();
        let step = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
        for n in 0..20_000_u64 {
            let range = Range { start: step(n), last: step(n) + 3 };
            let kept = Range { start: step(n.saturating_sub(3000)), last: step(n.saturating_sub(3000)) + 3 };
            locks.lock(n % 5, false, range);
            for holder in 0..5 {
                locks.unlock(holder, kept);
            }
            let sorted = &locks.by_start[0];
            assert!(sorted.chunks.windows(2).all(|two| two[0].locks.len() + two[1].locks.len() > CHUNK_MAX / 2));
            assert!(sorted.chunks.iter().all(|chunk| (1..=CHUNK_MAX).contains(&chunk.locks.len())));
        }
        let keys: Vec<_> = locks.by_start[0].chunks.iter().flat_map(|chunk| &chunk.locks).map(Lock::key).collect();
        assert!(keys.is_sorted() && keys.len() == locks.len() && locks.all().count() == locks.len());
        assert!(locks.len() > 2000);
    }

    /// Compares the locks that are left, and the range that was released, with those after each holder has unlocked everything.
    #[test]
    fn holders_are_released_together() {
        let origin = Origin::of_host([10, 0, 0, 1].into());
        for (is_sparse, holders, released) in
            [(false, 1, 1), (false, 2, 1), (false, 8192, 8000), (false, 8192, 10), (false, 1000, 300), (true, 40, 7)]
        {
            let [mut locks, mut expected] = [(); 2].map(|()| many(is_sparse, |n| n % holders));
            let gone: HashMap<u64, Origin> = (0..released).map(|holder| (holder, origin)).collect();
            let freed = gone.keys().filter_map(|holder| expected.unlock(*holder, Range::ALL));
            let freed = freed.reduce(|all, part| all.hull(&part));
            assert_eq!(locks.release(&gone), freed);
            let left = |locks: &Locks| {
                let chunks = locks.by_start.iter().flat_map(|sorted| &sorted.chunks);
                chunks.flat_map(|chunk| chunk.locks.clone()).collect::<Vec<_>>()
            };
            assert_eq!(left(&locks), left(&expected));
            assert_eq!((locks.len(), locks.all().count()), (expected.len(), expected.len()));
            for sorted in &locks.by_start {
                assert!(sorted.chunks.windows(2).all(|two| two[0].locks.len() + two[1].locks.len() > CHUNK_MAX / 2));
                for chunk in &sorted.chunks {
                    let again = Chunk::new(chunk.locks.clone());
                    assert_eq!((chunk.last, chunk.holders), (again.last, again.holders));
                }
            }
        }
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
                    let had = (start..start + len).filter(|cell| model[holder as usize][*cell as usize] != 0);
                    let (low, high) = (had.clone().min(), had.max());
                    let freed = low.zip(high).map(|(start, last)| Range { start: first + start, last: first + last });
                    prop_assert_eq!(locks.unlock(holder, range), freed);
                    model[holder as usize][cells].fill(0);
                } else {
                    let is_write = what == 2;
                    let others = (0..3).filter(|other| *other != holder as usize);
                    let taken = others.flat_map(|other| model[other][cells.clone()].to_vec());
                    let conflicts = taken.into_iter().any(|cell| cell == 2 || is_write && cell == 1);
                    prop_assert_eq!(locks.conflict(Some(holder), is_write, range).is_some(), conflicts);
                    if !conflicts {
                        let had = (start..start + len).filter(|cell| model[holder as usize][*cell as usize] == 2 && !is_write);
                        let (low, high) = (had.clone().min(), had.max());
                        let freed = low.zip(high).map(|(start, last)| Range { start: first + start, last: first + last });
                        prop_assert_eq!(locks.lock(holder, is_write, range), freed);
                        model[holder as usize][cells].fill(what);
                    }
                }
                for holder in 0..3 {
                    let mut cells = [0_u8; BYTES];
                    for lock in locks.all().filter(|lock| lock.holder == holder) {
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
