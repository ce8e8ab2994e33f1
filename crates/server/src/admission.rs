//! Admission: which connections may begin their handshakes, for services to which each costs a thread.
//!
//! What unauthenticated peers can make a daemon hold is bounded, in all and for each origin. A burst is no attack, though: a connection
//! that comes while all slots are taken waits. Origins take turns, so that one that says nothing, or sends a flood, keeps
//! only itself waiting.
//!
//! Where an unauthenticated connection costs little, [`crate::connection_limit`] evicts one instead.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_tcp::Origin;

/// A connection that has waited this long is refused: its client would have given up by now, or soon will.
const WAIT_MAX: Duration = Duration::from_secs(8);

/// How many there may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Handshakes in progress.
    pub all: usize,
    /// Handshakes in progress with one origin.
    pub per_origin: usize,
    /// Connections that wait.
    pub waiting: usize,
}

/// Handshakes in progress, and the connections that wait for theirs.
#[derive(Debug)]
struct FairQueue<T> {
    limits: Limits,
    places: HashMap<Origin, Place<T>>,
    /// Origins with connections that wait, the next one first.
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
struct Verdict<T> {
    /// Handshakes to begin; [`FairQueue::over`] is called for each when it has ended.
    pub begin: Vec<(Origin, T)>,
    /// Connections to be refused: there are too many.
    pub refuse: Vec<T>,
}

impl<T> FairQueue<T> {
    fn new(limits: Limits) -> FairQueue<T> {
        FairQueue { limits, places: HashMap::new(), turns: VecDeque::new(), under_way: 0, waiting: 0 }
    }

    /// A connection arrives.
    fn arrive(&mut self, from: Origin, caller: T, now: Instant) -> Verdict<T> {
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

    /// A handshake with `from` has ended, well or not.
    fn over(&mut self, from: Origin, now: Instant) -> Verdict<T> {
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
        // An origin that is passed over once is passed over until a handshake ends.
        let mut passed_over = 0;
        while self.under_way < self.limits.all && passed_over < self.turns.len() {
            let Some(from) = self.turns.pop_front() else { break };
            let Some(place) = self.places.get_mut(&from) else { continue };
            while place.waiting.front().is_some_and(|(since, _)| now.duration_since(*since) > WAIT_MAX) {
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

/// Decides which connections may begin their handshakes. One thread asks it; handshakes end on threads of their own, which have that one
/// woken.
pub struct Admission<T> {
    queue: Mutex<FairQueue<T>>,
    /// With whom handshakes have ended since that thread last looked.
    over: Mutex<Vec<Origin>>,
    wake: Box<dyn Fn() + Send + Sync>,
    /// No more connections are admitted. Changes under the lock of `queue`.
    closed: AtomicBool,
}

/// A handshake in progress; released on drop.
pub struct Slot<T> {
    admission: Arc<Admission<T>>,
    from: Origin,
}

/// What to do with connections.
pub struct Answer<T> {
    /// Handshakes to begin.
    pub begin: Vec<(T, Slot<T>)>,
    /// Connections to be refused: there are too many.
    pub refuse: Vec<T>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panics under the lock")
}

impl<T> Admission<T> {
    /// `wake` has the thread that asks call [`Admission::go_on`].
    pub fn new(limits: Limits, wake: impl Fn() + Send + Sync + 'static) -> Arc<Admission<T>> {
        Arc::new(Admission {
            queue: Mutex::new(FairQueue::new(limits)),
            over: Mutex::default(),
            wake: Box::new(wake),
            closed: AtomicBool::new(false),
        })
    }

    /// A connection arrives.
    pub fn arrive(self: &Arc<Self>, from: Origin, caller: T) -> Answer<T> {
        let mut handshakes = lock(&self.queue);
        if self.closed.load(Ordering::SeqCst) {
            return Answer { begin: Vec::new(), refuse: vec![caller] };
        }
        let verdict = handshakes.arrive(from, caller, Instant::now());
        drop(handshakes);
        self.answer(verdict)
    }

    /// Gives the slots of handshakes that have ended to connections that wait.
    pub fn go_on(self: &Arc<Self>) -> Answer<T> {
        let over = std::mem::take(&mut *lock(&self.over));
        let mut all = Verdict { begin: Vec::new(), refuse: Vec::new() };
        for from in over {
            let verdict = lock(&self.queue).over(from, Instant::now());
            all.begin.extend(verdict.begin);
            all.refuse.extend(verdict.refuse);
        }
        self.answer(all)
    }

    fn answer(self: &Arc<Self>, verdict: Verdict<T>) -> Answer<T> {
        let turn = |(from, caller)| (caller, Slot { admission: Arc::clone(self), from });
        Answer { begin: verdict.begin.into_iter().map(turn).collect(), refuse: verdict.refuse }
    }

    /// Admits no more connections. Those that wait are dropped.
    pub fn close(&self) {
        let mut handshakes = lock(&self.queue);
        self.closed.store(true, Ordering::SeqCst);
        let limits = handshakes.limits;
        let waiting = std::mem::replace(&mut *handshakes, FairQueue::new(limits));
        drop(handshakes);
        drop(waiting);
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        lock(&self.admission.over).push(self.from);
        (self.admission.wake)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { all: 8, per_origin: 3, waiting: 20 };

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
