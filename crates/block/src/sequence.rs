//! Changes of a disk under way, by range: those that overlap are done one after the other, in the order in which they
//! were begun.
//!
//! A client that gives up a write and sends it again, by another connection or another path, would else have what it
//! writes afterwards undone by the first, which is still on its way to the storage.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// The changes of one disk, whichever reactor they are on.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    begun: Mutex<Begun>,
    ended: Notify,
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
    /// Another waits for its end.
    is_awaited: bool,
}

/// A change that has begun, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    sequence: &'a Sequence,
    number: u64,
}

impl Sequence {
    /// Begins a change of `len` octets from `at`: waits for those that were begun before and overlap it.
    pub(crate) async fn begin(&self, at: u64, len: u64) -> Turn<'_> {
        let turn = self.enter(at..at.saturating_add(len));
        while !turn.has_come() {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            // It may have ended before we listened.
            if turn.has_come() {
                break;
            }
            ended.await;
        }
        turn
    }

    fn enter(&self, range: Range<u64>) -> Turn<'_> {
        let mut begun = self.lock();
        let number = begun.next_number;
        begun.next_number += 1;
        begun.changes.push(Change { number, range, is_awaited: false });
        Turn { sequence: self, number }
    }

    fn lock(&self) -> MutexGuard<'_, Begun> {
        self.begun.lock().expect("no panics under the lock")
    }
}

impl Begun {
    fn place(&self, number: u64) -> usize {
        self.changes.binary_search_by_key(&number, |change| change.number).expect("it is there until its turn ends")
    }
}

impl Turn<'_> {
    /// Nothing that was begun before overlaps it any more.
    fn has_come(&self) -> bool {
        let mut begun = self.sequence.lock();
        let place = begun.place(self.number);
        let (before, own) = begun.changes.split_at_mut(place);
        let range = &own[0].range;
        let mut first = true;
        for change in before.iter_mut().filter(|c| c.range.start < range.end && range.start < c.range.end) {
            change.is_awaited = true;
            first = false;
        }
        first
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut begun = self.sequence.lock();
        let place = begun.place(self.number);
        let ended = begun.changes.remove(place);
        drop(begun);
        if ended.is_awaited {
            self.sequence.ended.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;
    use std::future::Future;
    use std::pin::Pin;

    #[test]
    fn only_what_overlaps_waits() {
        let sequence = Sequence::default();
        let first = sequence.begin(10, 10).now_or_never().unwrap();
        let mut second = Box::pin(sequence.begin(19, 2));
        assert!((&mut second).now_or_never().is_none());
        assert!(sequence.begin(0, 10).now_or_never().is_some() && sequence.begin(21, 1).now_or_never().is_some());
        // It overlaps the second only, which has not had its turn yet.
        let mut third = Box::pin(sequence.begin(20, 1));
        assert!((&mut third).now_or_never().is_none());
        drop(first);
        assert!((&mut third).now_or_never().is_none());
        let second = second.now_or_never().expect("the first is over");
        assert!((&mut third).now_or_never().is_none());
        drop(second);
        assert!(third.now_or_never().is_some());
    }

    #[test]
    fn whoever_gives_up_waiting_is_not_waited_for() {
        let sequence = Sequence::default();
        let first = sequence.begin(0, 10).now_or_never().unwrap();
        let mut second = Box::pin(sequence.begin(5, 10));
        let mut third = Box::pin(sequence.begin(12, 10));
        assert!((&mut second).now_or_never().is_none() && (&mut third).now_or_never().is_none());
        drop(second);
        assert!(third.now_or_never().is_some());
        drop(first);
        assert!(sequence.lock().changes.is_empty());
    }

    proptest! {
        /// Changes begin and end in any order; of those that overlap, the later never goes before the earlier is over, and
        /// in the end all have gone.
        #[test]
        fn the_later_never_overtakes(steps in prop::collection::vec((0_u64..64, 1_u64..16, 0_usize..8), 1..80)) {
            let sequence = Sequence::default();
            let (mut waiting, mut running, mut ended) = (Vec::new(), Vec::new(), Vec::new());
            let ranges: Vec<_> = steps.iter().map(|(at, len, _)| *at..*at + *len).collect();
            let overlap = |a: usize, b: usize| ranges[a].start < ranges[b].end && ranges[b].start < ranges[a].end;
            for (number, (at, len, end)) in steps.iter().enumerate() {
                let mut change: Pin<Box<dyn Future<Output = Turn<'_>>>> = Box::pin(sequence.begin(*at, *len));
                match (&mut change).now_or_never() {
                    Some(turn) => running.push((number, turn)),
                    None => waiting.push((number, change)),
                }
                if *end < running.len() {
                    ended.push(running.swap_remove(*end).0);
                }
                for _ in 0..waiting.len() {
                    let (number, mut change) = waiting.remove(0);
                    match (&mut change).now_or_never() {
                        Some(turn) => running.push((number, turn)),
                        None => waiting.push((number, change)),
                    }
                }
                for (one, _) in &running {
                    for before in (0..*one).filter(|before| overlap(*before, *one)) {
                        prop_assert!(ended.contains(&before), "{} before {}", one, before);
                    }
                }
            }
            drop(running);
            for (_, change) in waiting {
                prop_assert!(change.now_or_never().is_some());
            }
        }
    }
}
