//! Turns for work of which little may be in progress at a time: the origins that want it take turns (`fair_queue.rs`).

use crate::fair_queue::{FairQueue, Verdict};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_tcp::Origin;
use tokio::sync::oneshot;

pub use crate::fair_queue::Limits;

/// Turns, of which so many are out at a time.
#[derive(Debug)]
pub struct Turns {
    queue: Queue,
    /// [`Limits::patience`]
    patience: Duration,
}

type Queue = Arc<Mutex<FairQueue<oneshot::Sender<Turn>>>>;

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub struct Turn {
    /// None when it has ended.
    queue: Option<Queue>,
    origin: Origin,
}

fn lock<T>(queue: &Mutex<T>) -> MutexGuard<'_, T> {
    queue.lock().expect("no panics under the lock")
}

impl Turns {
    /// As many as these limits say.
    pub fn new(limits: Limits) -> Turns {
        Turns { queue: Arc::new(Mutex::new(FairQueue::new(limits))), patience: limits.patience }
    }

    /// A turn, when it comes; `None` if there are too many who wait for one, of this origin more than of others, or it took too
    /// long.
    pub async fn take(&self, origin: Origin) -> Option<Turn> {
        let (give, turn) = oneshot::channel();
        let verdict = lock(&self.queue).arrive(origin, give, Instant::now());
        give_out(&self.queue, verdict);
        // The queue looks at the time only when one ends.
        tokio::time::timeout(self.patience, turn).await.ok()?.ok()
    }
}

/// Gives turns to those who are to begin. If one does not wait any more, its turn is the next one's.
fn give_out(queue: &Queue, mut verdict: Verdict<oneshot::Sender<Turn>>) {
    while let Some((origin, give)) = verdict.begin.pop() {
        if let Err(mut turn) = give.send(Turn { queue: Some(Arc::clone(queue)), origin }) {
            // Not by its end, which would come back here: there may be many.
            turn.queue = None;
            let next = lock(queue).over(origin, Instant::now());
            verdict.begin.extend(next.begin);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        let verdict = lock(&queue).over(self.origin, Instant::now());
        give_out(&queue, verdict);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use futures_util::future::BoxFuture;

    fn host(number: u8) -> Origin {
        Origin::of_host([10, 0, 0, number].into())
    }

    #[test]
    fn patience_has_an_end_also_where_nothing_else_has() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let limits = Limits { all: 1, per_origin: 1, waiting: 100, patience: Duration::from_millis(50) };
        let turns = Turns::new(limits);
        runtime.block_on(async {
            let held = turns.take(host(1)).await.expect("a turn");
            assert!(turns.take(host(2)).await.is_none());
            drop(held);
            assert!(turns.take(host(2)).await.is_some());
        });
    }

    #[test]
    fn origins_take_turns() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _clock = runtime.enter();
        let limits = Limits { all: 2, per_origin: 2, waiting: 100, patience: Duration::from_secs(60) };
        let turns = Arc::new(Turns::new(limits));
        let take = |number| -> BoxFuture<'static, Option<Turn>> {
            let turns = Arc::clone(&turns);
            let mut taking = async move { turns.take(host(number)).await }.boxed();
            // It takes its place.
            match (&mut taking).now_or_never() {
                Some(turn) => std::future::ready(turn).boxed(),
                None => taking,
            }
        };
        let mut first: Vec<_> = (0..90).map(|_| take(1)).collect();
        let mut out: Vec<_> = first.drain(..2).map(|turn| turn.now_or_never().flatten().expect("a turn")).collect();
        let other = take(2);
        // Those who do not wait any more are passed over, however many they are.
        first.drain(..50).for_each(drop);
        out.clear();
        assert!(other.now_or_never().flatten().is_some(), "after one of the others");
        assert_eq!(first.into_iter().filter_map(|turn| turn.now_or_never().flatten()).count(), 38);
        // Too many wait: the newest of those who have most are refused.
        let _held = [take(3), take(3)].map(|turn| turn.now_or_never().flatten().expect("a turn"));
        let (many, other) = ((0..100).map(|_| take(1)).collect::<Vec<_>>(), take(2));
        let refused = many.into_iter().filter_map(FutureExt::now_or_never).filter(Option::is_none).count();
        assert!(refused == 1 && other.now_or_never().is_none(), "{refused}");
    }
}
