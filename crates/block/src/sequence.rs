//! Changes of a disk in progress, by range: those that overlap are done one after the other, in the order in which they
//! were begun.
//!
//! A client that gives up a write and sends it again, by another connection or another path, would else have what it
//! writes afterwards undone by the first, which is still on its way to the storage.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The changes of one disk, whichever reactor they are on.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    begun: Mutex<Begun>,
}

/// In the order in which they were begun, so that their numbers ascend.
#[derive(Debug, Default)]
struct Begun {
    changes: Vec<Change>,
    next_number: u64,
}

#[derive(Debug)]
struct Change {
    number: u64,
    range: Range<u64>,
    /// Changes begun before that overlap it and are not over.
    before: usize,
    /// Told when there are none of those any more.
    first: Option<Arc<Notify>>,
}

/// A change that has begun, and is over when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    sequence: &'a Sequence,
    number: u64,
    first: Option<Arc<Notify>>,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Sequence {
    /// Begins a change of `len` bytes from `at`. Its turn comes when those that were begun before, and overlap it, are
    /// over.
    pub(crate) fn begin(&self, at: u64, len: u64) -> Turn<'_> {
        let range = at..at.saturating_add(len);
        let mut begun = self.lock();
        let number = begun.next_number;
        begun.next_number += 1;
        let before = begun.changes.iter().filter(|change| overlap(&change.range, &range)).count();
        let first = (before > 0).then(Arc::<Notify>::default);
        begun.changes.push(Change { number, range, before, first: first.clone() });
        Turn { sequence: self, number, first }
    }

    fn lock(&self) -> MutexGuard<'_, Begun> {
        // Nothing is half done where a panic could be.
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Begun {
    fn place(&self, number: u64) -> usize {
        self.changes.binary_search_by_key(&number, |change| change.number).expect("it is there until its turn ends")
    }

    /// One that stands at `place`, or has stood there, does not change `old` any more, except for `new`.
    fn shrunk(&mut self, place: usize, old: &Range<u64>, new: &Range<u64>) {
        for change in &mut self.changes[place..] {
            if overlap(&change.range, old) && !overlap(&change.range, new) {
                change.before -= 1;
                if change.before == 0 {
                    change.first.iter().for_each(|first| first.notify_one());
                }
            }
        }
    }
}

impl Turn<'_> {
    /// Resolves when nothing that was begun before overlaps it any more; once.
    pub(crate) async fn come(&mut self) {
        if let Some(first) = &self.first {
            first.notified().await;
            self.first = None;
        }
    }

    /// What is before `at` is done.
    pub(crate) fn done_until(&self, at: u64) {
        let mut begun = self.sequence.lock();
        let place = begun.place(self.number);
        let old = begun.changes[place].range.clone();
        let new = at.clamp(old.start, old.end)..old.end;
        begun.changes[place].range = new.clone();
        begun.shrunk(place + 1, &old, &new);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut begun = self.sequence.lock();
        let place = begun.place(self.number);
        let ended = begun.changes.remove(place);
        begun.shrunk(place, &ended.range, &(0..0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn has_come(turn: &mut Turn<'_>) -> bool {
        turn.come().now_or_never().is_some()
    }

    #[test]
    fn only_what_overlaps_waits() {
        let sequence = Sequence::default();
        let (mut first, mut second) = (sequence.begin(10, 10), sequence.begin(19, 2));
        assert!(has_come(&mut first) && !has_come(&mut second));
        assert!(has_come(&mut sequence.begin(0, 10)) && has_come(&mut sequence.begin(21, 1)));
        // It overlaps the second only, which has not had its turn yet.
        let mut third = sequence.begin(20, 1);
        assert!(!has_come(&mut third));
        drop(first);
        assert!(!has_come(&mut third) && has_come(&mut second) && has_come(&mut second));
        drop(second);
        assert!(has_come(&mut third));
    }

    #[test]
    fn whoever_gives_up_waiting_is_not_waited_for() {
        let sequence = Sequence::default();
        let first = sequence.begin(0, 10);
        let (second, mut third) = (sequence.begin(5, 10), sequence.begin(12, 10));
        assert!(!has_come(&mut third));
        drop(second);
        assert!(has_come(&mut third));
        drop((first, third));
        assert!(sequence.lock().changes.is_empty());
    }

    #[test]
    fn what_is_done_of_a_long_change_is_free_for_others() {
        let sequence = Sequence::default();
        let long = sequence.begin(0, 100);
        let (mut early, mut across, mut late) = (sequence.begin(0, 10), sequence.begin(45, 10), sequence.begin(90, 10));
        long.done_until(50);
        assert!(has_come(&mut early) && !has_come(&mut across) && !has_come(&mut late));
        long.done_until(60);
        assert!(has_come(&mut across) && !has_come(&mut late));
        drop(long);
        assert!(has_come(&mut late));
    }

    proptest! {
        /// Changes begin and end in any order; of those that overlap, the later never goes before the earlier is over, and
        /// in the end all have gone.
        #[test]
        fn the_later_never_overtakes(steps in prop::collection::vec((0_u64..64, 1_u64..16, 0_usize..8), 1..80)) {
            let sequence = Sequence::default();
            let (mut waiting, mut running, mut ended) = (Vec::new(), Vec::new(), Vec::new());
            let ranges: Vec<_> = steps.iter().map(|(at, len, _)| *at..*at + *len).collect();
            for (number, (at, len, end)) in steps.iter().enumerate() {
                waiting.push((number, sequence.begin(*at, *len)));
                if *end < running.len() {
                    let (number, _): (usize, Turn<'_>) = running.swap_remove(*end);
                    ended.push(number);
                }
                for _ in 0..waiting.len() {
                    let (number, mut turn) = waiting.remove(0);
                    let to = if has_come(&mut turn) { &mut running } else { &mut waiting };
                    to.push((number, turn));
                }
                for (one, _) in &running {
                    for before in (0..*one).filter(|before| overlap(&ranges[*before], &ranges[*one])) {
                        prop_assert!(ended.contains(&before), "{} before {}", one, before);
                    }
                }
            }
            drop(running);
            for (_, mut turn) in waiting {
                prop_assert!(has_come(&mut turn));
            }
        }
    }

    /// Threads change ranges at random, each waiting to be told of its turn; no two are ever in one place.
    #[test]
    fn nobody_is_where_another_is() {
        const BLOCKS: usize = 32;
        let (sequence, inside) = (Sequence::default(), [const { AtomicU64::new(0) }; BLOCKS]);
        std::thread::scope(|scope| {
            for seed in 1..5_u64 {
                let (sequence, inside) = (&sequence, &inside);
                scope.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    let mut chance = fastrand::Rng::with_seed(seed);
                    let mut random = |below: usize| chance.usize(..below);
                    for _ in 0..3000 {
                        let start = random(BLOCKS);
                        let end = start + 1 + random(BLOCKS - start);
                        let mut turn = sequence.begin(start as u64, (end - start) as u64);
                        runtime.block_on(turn.come());
                        for block in &inside[start..end] {
                            assert_eq!(block.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        std::thread::yield_now();
                        let half = start + random(end - start);
                        inside[start..half].iter().for_each(|block| _ = block.fetch_sub(1, Ordering::SeqCst));
                        turn.done_until(half as u64);
                        inside[half..end].iter().for_each(|block| _ = block.fetch_sub(1, Ordering::SeqCst));
                    }
                });
            }
        });
    }
}
