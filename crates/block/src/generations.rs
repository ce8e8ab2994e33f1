//! Generations of requests: to wait for everything begun before, and for nothing begun since, a caller begins a new
//! generation and waits for the previous one to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tokio::sync::{Mutex, Notify};

/// Things in progress, whichever reactor they are on.
#[derive(Debug, Default)]
pub(crate) struct Generations {
    generation: AtomicU64,
    /// Of even and of odd generations.
    running: [AtomicUsize; 2],
    changed: Notify,
    /// One turns at a time: there is never anything of more than two generations.
    turning: Mutex<()>,
}

/// Something in progress, until it is dropped.
#[derive(Debug)]
pub struct InFlight {
    of: Arc<Generations>,
    generation: u64,
}

impl Generations {
    fn running(&self, generation: u64) -> &AtomicUsize {
        &self.running[(generation & 1) as usize]
    }

    /// Something begins.
    pub(crate) fn begin(self: &Arc<Self>) -> InFlight {
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            self.running(generation).fetch_add(1, Ordering::SeqCst);
            let begun = InFlight { of: Arc::clone(self), generation };
            // Who turns now either sees that it runs, or is seen.
            if self.generation.load(Ordering::SeqCst) == generation {
                return begun;
            }
        }
    }

    /// Nothing is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.iter().all(|running| running.load(Ordering::SeqCst) == 0)
    }

    /// Waits until `done`, which depends on what is told by `changed`.
    async fn until(&self, done: impl Fn() -> bool) {
        loop {
            let told = self.changed.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if done() {
                return;
            }
            told.await;
        }
    }

    /// Waits until nothing is in progress; whatever is begun meanwhile is waited for too.
    pub(crate) async fn idle(&self) {
        self.until(|| self.is_idle()).await;
    }

    /// Waits until everything that was begun before is over. It can see that it is waited for
    /// ([`InFlight::is_draining`]).
    pub(crate) async fn turn(&self) {
        let _alone = self.turning.lock().await;
        // Something of the previous generation is left if the task that ended it did not wait for it.
        let generation = self.generation.load(Ordering::SeqCst);
        self.until(|| self.running(generation + 1).load(Ordering::SeqCst) == 0).await;
        self.generation.store(generation + 1, Ordering::SeqCst);
        self.changed.notify_waiters();
        self.until(|| self.running(generation).load(Ordering::SeqCst) == 0).await;
    }
}

impl InFlight {
    /// A new generation has begun since, and waits for this one to end.
    pub fn is_draining(&self) -> bool {
        self.of.generation.load(Ordering::SeqCst) != self.generation
    }

    /// Resolves when a new generation waits for it to end.
    pub async fn draining(&self) {
        self.of.until(|| self.is_draining()).await;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.of.running(self.generation).fetch_sub(1, Ordering::SeqCst) == 1 {
            self.of.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_turn_waits_for_what_was_begun_before_and_for_nothing_else() {
        let generations = Arc::new(Generations::default());
        let (one, two) = (generations.begin(), generations.begin());
        let mut due = Box::pin(one.draining());
        assert!((&mut due).now_or_never().is_none());
        let mut turn = Box::pin(generations.turn());
        assert!((&mut turn).now_or_never().is_none());
        assert!((&mut due).now_or_never().is_some() && two.is_draining());
        let three = generations.begin();
        assert!(!three.is_draining());
        drop(two);
        assert!((&mut turn).now_or_never().is_none());
        drop(due);
        drop(one);
        assert!((&mut turn).now_or_never().is_some());
        assert!(generations.turn().now_or_never().is_none(), "the third is under way");
        assert!(generations.idle().now_or_never().is_none());
        drop(three);
        assert!(generations.turn().now_or_never().is_some() && generations.idle().now_or_never().is_some());
    }
}
