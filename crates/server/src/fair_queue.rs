//! A queue of which little may be in progress at a time, shared out between origins: they take turns, so that one that wants much
//! keeps only itself waiting.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};
use thruway_tcp::Origin;

/// How many there may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// In progress.
    pub all: usize,
    /// In progress of one origin.
    pub per_origin: usize,
    /// That wait.
    pub waiting: usize,
    /// One that has waited this long is refused: its client would have given up by now, or soon will.
    pub patience: Duration,
}

/// What is in progress, and what waits.
#[derive(Debug)]
pub struct FairQueue<T> {
    pub(crate) limits: Limits,
    places: HashMap<Origin, Place<T>>,
    /// Origins of what waits, the next one first.
    turns: VecDeque<Origin>,
    under_way: usize,
    waiting: usize,
}

#[derive(Debug)]
struct Place<T> {
    under_way: usize,
    waiting: VecDeque<(Instant, T)>,
}

/// What the queue has decided.
#[derive(Debug)]
pub struct Verdict<T> {
    /// To begin; [`FairQueue::over`] is called for each when it has ended.
    pub begin: Vec<(Origin, T)>,
    /// To be refused: there are too many, or they have waited too long.
    pub refuse: Vec<T>,
}

impl<T> FairQueue<T> {
    /// An empty queue with these limits.
    pub fn new(limits: Limits) -> FairQueue<T> {
        FairQueue { limits, places: HashMap::new(), turns: VecDeque::new(), under_way: 0, waiting: 0 }
    }

    /// One more.
    pub fn arrive(&mut self, from: Origin, caller: T, now: Instant) -> Verdict<T> {
        let place = self.places.entry(from).or_insert_with(|| Place { under_way: 0, waiting: VecDeque::new() });
        if place.waiting.is_empty() {
            self.turns.push_back(from);
        }
        place.waiting.push_back((now, caller));
        self.waiting += 1;
        let mut verdict = self.admit(now);
        if self.waiting > self.limits.waiting {
            verdict.refuse.extend(self.give_up_newest_of_longest());
        }
        verdict
    }

    /// One of `from` has ended, well or not.
    pub fn over(&mut self, from: Origin, now: Instant) -> Verdict<T> {
        if let Some(place) = self.places.get_mut(&from) {
            place.under_way = place.under_way.saturating_sub(1);
            self.under_way = self.under_way.saturating_sub(1);
        }
        let verdict = self.admit(now);
        self.forget(from);
        verdict
    }

    /// Gives free places to those who wait, an origin at a time.
    fn admit(&mut self, now: Instant) -> Verdict<T> {
        let mut verdict = Verdict { begin: Vec::new(), refuse: Vec::new() };
        // An origin that is passed over once is passed over until something ends.
        let mut passed_over = 0;
        while self.under_way < self.limits.all && passed_over < self.turns.len() {
            let Some(from) = self.turns.pop_front() else { break };
            let Some(place) = self.places.get_mut(&from) else { continue };
            while place.waiting.front().is_some_and(|(since, _)| now.duration_since(*since) > self.limits.patience) {
                verdict.refuse.extend(place.waiting.pop_front().map(|(_, caller)| caller));
                self.waiting -= 1;
            }
            let mut begun = false;
            if place.under_way < self.limits.per_origin
                && let Some((_, caller)) = place.waiting.pop_front()
            {
                self.waiting -= 1;
                place.under_way += 1;
                self.under_way += 1;
                verdict.begin.push((from, caller));
                begun = true;
            }
            if place.waiting.is_empty() {
                self.forget(from);
            } else {
                self.turns.push_back(from);
                passed_over = if begun { 0 } else { passed_over + 1 };
            }
        }
        verdict
    }

    fn give_up_newest_of_longest(&mut self) -> Option<T> {
        let (&from, place) = self.places.iter_mut().max_by_key(|(_, place)| place.waiting.len())?;
        let (_, caller) = place.waiting.pop_back()?;
        self.waiting -= 1;
        if place.waiting.is_empty() {
            self.turns.retain(|turn| *turn != from);
            self.forget(from);
        }
        Some(caller)
    }

    fn forget(&mut self, from: Origin) {
        if self.places.get(&from).is_some_and(|place| place.under_way == 0 && place.waiting.is_empty()) {
            self.places.remove(&from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { all: 8, per_origin: 3, waiting: 20, patience: WAIT_MAX };
    const WAIT_MAX: Duration = Duration::from_secs(8);

    fn host(number: u8) -> Origin {
        Origin::of_host([10, 0, 0, number].into())
    }

    #[test]
    fn a_flood_from_one_origin_holds_up_no_other() {
        let (mut handshakes, now) = (FairQueue::new(LIMITS), Instant::now());
        let mut refused = 0;
        for number in 0..1000 {
            refused += handshakes.arrive(host(1), number, now).refuse.len();
        }
        assert_eq!(refused, 1000 - 3 - 20);
        let other = handshakes.arrive(host(2), 1000, now);
        assert_eq!(other.begin, [(host(2), 1000)]);
        // Of those who wait, the one with the most loses its newest.
        for number in 1001..1003 {
            assert_eq!(handshakes.arrive(host(2), number, now).begin.len(), 1);
        }
        assert_eq!(handshakes.arrive(host(2), 1003, now).refuse, [22]);
    }

    #[test]
    fn who_has_waited_too_long_is_refused_and_the_rest_go_on() {
        let (mut handshakes, start) = (FairQueue::new(LIMITS), Instant::now());
        for number in 0..5 {
            handshakes.arrive(host(1), number, start);
        }
        handshakes.arrive(host(1), 5, start + WAIT_MAX);
        let verdict = handshakes.over(host(1), start + WAIT_MAX + Duration::from_millis(1));
        assert_eq!(verdict.refuse, [3, 4]);
        assert_eq!(verdict.begin, [(host(1), 5)]);
    }

    proptest! {
        /// Everybody is begun or refused exactly once, nobody waits beside a free place, and no bound is passed.
        #[test]
        fn everybody_gets_one_answer(calls in prop::collection::vec((0u8..6, any::<bool>(), 0u64..3000), 0..400)) {
            let (mut handshakes, mut now) = (FairQueue::new(LIMITS), Instant::now());
            let (mut under_way, mut answered, mut next) = (Vec::new(), Vec::new(), 0);
            for (number, arrives, later) in calls {
                now += Duration::from_millis(later);
                let verdict = if arrives || under_way.is_empty() {
                    next += 1;
                    handshakes.arrive(host(number), next - 1, now)
                } else {
                    let ended = under_way.swap_remove(usize::from(number) % under_way.len());
                    handshakes.over(ended, now)
                };
                for (from, caller) in verdict.begin {
                    under_way.push(from);
                    answered.push(caller);
                }
                answered.extend(verdict.refuse);
                prop_assert!(under_way.len() <= LIMITS.all);
                for number in 0..6 {
                    let per_origin = under_way.iter().filter(|from| **from == host(number)).count();
                    prop_assert!(per_origin <= LIMITS.per_origin);
                    let waits = handshakes.places.get(&host(number)).is_some_and(|p| !p.waiting.is_empty());
                    prop_assert!(!waits || per_origin == LIMITS.per_origin || under_way.len() == LIMITS.all);
                }
                prop_assert!(handshakes.waiting <= LIMITS.waiting);
            }
            while let Some(from) = under_way.pop() {
                let verdict = handshakes.over(from, now);
                under_way.extend(verdict.begin.iter().map(|(from, _)| *from));
                answered.extend(verdict.begin.into_iter().map(|(_, caller)| caller));
                answered.extend(verdict.refuse);
            }
            answered.sort_unstable();
            prop_assert_eq!(answered, (0..next).collect::<Vec<_>>());
            prop_assert!(handshakes.places.is_empty() && handshakes.turns.is_empty());
        }
    }
}
