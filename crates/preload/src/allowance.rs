//! Time that calls of this process may wait for peers which are other users.
//!
//! A call that closes, hands over or does not wait can have to wait for the peer nevertheless. A peer of the same user may hold the process up
//! anyway. All others together may do so for [`MOST`], and later for one [`SHARE`] of the time: else one that never acts, on one connection
//! after the other, would stop an event loop.

use crate::slots::Slot;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What may be waited at once.
const MOST: Duration = Duration::from_secs(2);
/// One in so many seconds comes back.
const SHARE: u64 = 100;
/// With less than that left, no wait goes on.
const STEP: Duration = Duration::from_millis(1);

/// See the module.
struct Allowance {
    /// When all that has been spent will have come back, in microseconds of the monotonic clock.
    back_at: AtomicU64,
}

static OTHERS: Allowance = Allowance { back_at: AtomicU64::new(0) };

impl Allowance {
    /// Spends so much. False if there is not as much left; then nothing is spent.
    fn take(&self, now: u64, time: Duration) -> bool {
        let limit = now.saturating_add(MOST.as_micros() as u64 * SHARE);
        let spend = |back_at: u64| Some(after(back_at, now, time)).filter(|back_at| *back_at <= limit);
        self.back_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok()
    }

    /// Whether there is so much left.
    fn has(&self, now: u64, time: Duration) -> bool {
        let limit = now.saturating_add(MOST.as_micros() as u64 * SHARE);
        after(self.back_at.load(Ordering::Relaxed), now, time) <= limit
    }

    /// Notes that so much has been spent.
    fn spend(&self, now: u64, time: Duration) {
        let spend = |back_at: u64| Some(after(back_at, now, time));
        let _ = self.back_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend);
    }
}

fn after(back_at: u64, now: u64, time: Duration) -> u64 {
    back_at.max(now).saturating_add((time.as_micros() as u64).saturating_mul(SHARE))
}

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1000
}

/// Whether a call may wait so long for such a peer now.
pub(crate) fn has(time: Duration) -> bool {
    OTHERS.has(now(), time)
}

/// A call has waited for such a peer.
pub(crate) fn spend(time: Duration) {
    OTHERS.spend(now(), time);
}

/// Whether a call may wait so long for the peer of this connection; it is spent then.
pub(crate) fn may_wait(slot: &Slot, time: Duration) -> bool {
    !slot.is_others.load(Ordering::Relaxed) || OTHERS.take(now(), time)
}

/// A wait of a call for the peer of a connection, which asks again and again whether it may go on. What it takes is spent.
pub(crate) struct Wait<'a> {
    slot: &'a Slot,
    /// When it has first asked.
    begin: Option<Instant>,
    limit: Duration,
    spent: Duration,
}

impl Wait<'_> {
    pub(crate) fn new(slot: &Slot, limit: Duration) -> Wait<'_> {
        Wait { slot, begin: None, limit, spent: Duration::ZERO }
    }

    /// Whether it may go on: for the limit at most, and for others only while there is something left.
    pub(crate) fn go_on(&mut self) -> bool {
        self.begin.get_or_insert_with(Instant::now);
        self.settle();
        self.elapsed() < self.limit && (!self.is_others() || has(STEP))
    }

    /// For how long it has lasted.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begin.map_or(Duration::ZERO, |begin| begin.elapsed())
    }

    fn is_others(&self) -> bool {
        self.slot.is_others.load(Ordering::Relaxed)
    }

    fn settle(&mut self) {
        let elapsed = self.elapsed();
        if self.is_others() {
            spend(elapsed - self.spent);
        }
        self.spent = elapsed;
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_comes_back_slowly() {
        let allowance = Allowance { back_at: AtomicU64::new(0) };
        let (mut now, step) = (1_000_000_000, Duration::from_millis(100));
        let takes = |now| (0..1000).take_while(|_| allowance.take(now, step)).count();
        assert_eq!(takes(now), 20);
        assert!(!allowance.take(now, step) && !allowance.has(now, step));
        // A tenth of a second in ten seconds.
        now += 10_000_000;
        assert_eq!(takes(now), 1);
        now += 9_000_000;
        assert_eq!(takes(now), 0);
        now += 1_000_000;
        assert_eq!(takes(now), 1);
        // Never more than at first.
        now += 3_600_000_000;
        assert_eq!(takes(now), 20);
        // More may have been spent than there was.
        allowance.spend(now, Duration::from_secs(1));
        assert!(!allowance.has(now + 109_000_000, step) && allowance.has(now + 110_000_000, step));
    }
}
