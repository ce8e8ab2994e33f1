//! A session's use of a unit, and how what it has begun there comes to an end.

use super::Nexus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tokio::sync::{Mutex, Notify};

/// The commands of an initiator port under way on one unit, whichever reactor they are on.
///
/// They are of generations. Clearing them begins a new one and waits for the end of the one before, so that nothing of
/// it reaches the disk later.
pub struct Attached {
    /// Whose they are.
    pub nexus: Nexus,
    generation: AtomicU64,
    /// Commands under way, of even and of odd generations.
    running: [AtomicUsize; 2],
    changed: Notify,
    /// One clears at a time: there are never commands of more than two generations.
    clearing: Mutex<()>,
}

/// A command under way, until it is dropped.
pub struct UnderWay {
    attached: Arc<Attached>,
    generation: u64,
}

impl Attached {
    pub(super) fn new(nexus: Nexus) -> Attached {
        Attached {
            nexus,
            generation: AtomicU64::new(0),
            running: Default::default(),
            changed: Notify::new(),
            clearing: Mutex::new(()),
        }
    }

    fn running(&self, generation: u64) -> &AtomicUsize {
        &self.running[(generation & 1) as usize]
    }

    /// A command begins.
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            self.running(generation).fetch_add(1, Ordering::SeqCst);
            let begun = UnderWay { attached: Arc::clone(self), generation };
            // Who clears now either sees that it runs, or is seen.
            if self.generation.load(Ordering::SeqCst) == generation {
                return begun;
            }
        }
    }

    /// No command is under way.
    pub(super) fn is_idle(&self) -> bool {
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

    /// Clears the commands under way, and waits until none of them does anything any more.
    pub async fn clear(&self) {
        let _alone = self.clearing.lock().await;
        // Of the generation before something is left if whoever cleared it did not wait to the end.
        let generation = self.generation.load(Ordering::SeqCst);
        self.until(|| self.running(generation + 1).load(Ordering::SeqCst) == 0).await;
        self.generation.store(generation + 1, Ordering::SeqCst);
        self.changed.notify_waiters();
        self.until(|| self.running(generation).load(Ordering::SeqCst) == 0).await;
    }
}

impl UnderWay {
    /// It has been cleared: it is to end, and not to be answered.
    pub fn is_cleared(&self) -> bool {
        self.attached.generation.load(Ordering::SeqCst) != self.generation
    }

    /// Resolves when it has been cleared.
    pub async fn cleared(&self) {
        self.attached.until(|| self.is_cleared()).await;
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if self.attached.running(self.generation).fetch_sub(1, Ordering::SeqCst) == 1 {
            self.attached.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn clearing_waits_for_what_was_begun_before_and_for_nothing_else() {
        let attached = Arc::new(Attached::new(Nexus { id: 1, port: "a".into() }));
        let (one, two) = (attached.begin(), attached.begin());
        let mut cleared = Box::pin(one.cleared());
        assert!((&mut cleared).now_or_never().is_none());
        let mut clear = Box::pin(attached.clear());
        assert!((&mut clear).now_or_never().is_none());
        assert!((&mut cleared).now_or_never().is_some() && two.is_cleared());
        let three = attached.begin();
        assert!(!three.is_cleared());
        drop(two);
        assert!((&mut clear).now_or_never().is_none());
        drop(cleared);
        drop(one);
        assert!((&mut clear).now_or_never().is_some());
        assert!(attached.clear().now_or_never().is_none(), "the third is under way");
        drop(three);
        assert!(attached.clear().now_or_never().is_some());
    }
}
