//! The time that leases are measured by. It stands still while a reactor does (it waits for a file system that is frozen, say, or the
//! whole process was stopped): clients whose connections are there are not heard of meanwhile, and are not to lose what they have.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use thruway_engine::Reactors;

/// How often each reactor says that it goes on.
const TICK: Duration = Duration::from_millis(100);

/// One that has not said so for longer stands still, in milliseconds.
const STALLED_MS: u64 = 1000;

/// The time since the server began.
pub(crate) struct Clock {
    started: Instant,
    /// When each reactor was last heard of, by the real time.
    heard: OnceLock<Vec<AtomicU64>>,
    /// So long they have stood still.
    lost: AtomicU64,
    /// What was last told: it does not go back.
    told: AtomicU64,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock { started: Instant::now(), heard: OnceLock::new(), lost: AtomicU64::new(0), told: AtomicU64::new(0) }
    }
}

impl Clock {
    /// Milliseconds.
    pub(crate) fn now(&self) -> u64 {
        self.at(self.started.elapsed().as_millis() as u64)
    }

    fn at(&self, real: u64) -> u64 {
        let heard = self.heard.get().map_or(&[][..], |heard| heard);
        let stalled = heard.iter().map(|heard| real.saturating_sub(heard.load(Ordering::SeqCst) + STALLED_MS)).max();
        let now = real.saturating_sub(self.lost.load(Ordering::SeqCst)).saturating_sub(stalled.unwrap_or(0));
        self.told.fetch_max(now, Ordering::SeqCst).max(now)
    }

    /// A reactor goes on.
    fn tick(&self, reactor: usize, real: u64) {
        let Some(heard) = self.heard.get().and_then(|heard| heard.get(reactor)) else { return };
        let before = heard.swap(real, Ordering::SeqCst);
        self.lost.fetch_add(real.saturating_sub(before + STALLED_MS), Ordering::SeqCst);
    }

    /// Has reactors say that they go on, until this is dropped.
    pub(crate) fn watch(self: &Arc<Self>, reactors: &Reactors) {
        let real = |clock: &Clock| clock.started.elapsed().as_millis() as u64;
        let now = real(self);
        if self.heard.set(reactors.handles().iter().map(|_| AtomicU64::new(now)).collect()).is_err() {
            return;
        }
        for (index, reactor) in reactors.handles().iter().enumerate() {
            let clock = Arc::downgrade(self);
            reactor.spawn(move || async move {
                while let Some(clock) = clock.upgrade() {
                    clock.tick(index, real(&clock));
                    drop(clock);
                    tokio::time::sleep(TICK).await;
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stands_still_while_a_reactor_does() {
        let clock = Clock::default();
        clock.heard.set(vec![AtomicU64::new(0), AtomicU64::new(0)]).unwrap();
        let go_on = |reactors: &[usize], from: u64, to: u64| {
            for real in (from..=to).step_by(100) {
                reactors.iter().for_each(|reactor| clock.tick(*reactor, real));
            }
        };
        go_on(&[0, 1], 100, 100);
        assert_eq!(clock.at(150), 150);
        // The second one stops at 100.
        go_on(&[0], 200, 60_000);
        assert_eq!((clock.at(5000), clock.at(60_000)), (1100, 1100));
        clock.tick(1, 60_000);
        assert_eq!(clock.at(60_000), 1100);
        go_on(&[0, 1], 60_100, 65_000);
        assert_eq!(clock.at(65_000), 6100);
        // Both stop, as the whole process does.
        assert_eq!(clock.at(200_000), 7100);
        go_on(&[0, 1], 200_000, 200_000);
        assert_eq!(clock.at(200_000), 7100, "it does not go back");
        go_on(&[0, 1], 200_100, 400_000);
        assert!((60_000..=207_100).contains(&clock.at(400_000)), "{}", clock.at(400_000));
    }
}
