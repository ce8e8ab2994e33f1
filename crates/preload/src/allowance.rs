//! Limits on the time that calls wait for peers where a program does not expect it.
//!
//! Some calls wait for the peer where a program does not expect it: those that close a connection or hand it over, and sends that do not
//! block. A peer of the same user can stop the process anyway. For peers of other users, all these waits of a process and of its relatives by
//! fork share one allowance ([`OfOthers`]). Otherwise a peer could stop an event loop by one connection
//! after the other, or by each child that closes one.

use crate::slots::{self, Slot};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// For peers of other users: two seconds at first, and then one hundredth of the time.
pub(crate) type OfOthers = Allowance<2_000_000, 100>;
/// A wait ends when less than this is left. Short waits take this much at a time.
pub(crate) const STEP: Duration = Duration::from_millis(1);

/// An allowance of `MOST` microseconds, which grows by one second in `SHARE` seconds. It may lie in memory that processes share. All zero: full.
pub(crate) struct Allowance<const MOST: u64, const SHARE: u64> {
    /// Time at which the allowance is full again, in microseconds of the monotonic clock.
    back_at: AtomicU64,
}

impl<const MOST: u64, const SHARE: u64> Allowance<MOST, SHARE> {
    pub(crate) const fn new() -> Self {
        Allowance { back_at: AtomicU64::new(0) }
    }

    /// True if this time is left now.
    pub(crate) fn has_now(&self, time: Duration) -> bool {
        self.has(now(), time)
    }

    /// Takes this time, also if less is left.
    pub(crate) fn spend_now(&self, time: Duration) {
        self.spend(now(), time);
    }

    /// Latest [`Allowance::back_at`]: nothing is left then.
    fn latest(now: u64) -> u64 {
        now.saturating_add(MOST.saturating_mul(SHARE))
    }

    /// [`Allowance::back_at`] after this time is taken.
    fn after(back_at: u64, now: u64, time: Duration) -> u64 {
        back_at.max(now).saturating_add((time.as_micros() as u64).saturating_mul(SHARE))
    }

    /// Takes this time from the allowance. Returns false, and takes nothing, if less is left.
    fn take(&self, now: u64, time: Duration) -> bool {
        let spend =
            |back_at: u64| Some(Self::after(back_at, now, time)).filter(|back_at| *back_at <= Self::latest(now));
        self.back_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok()
    }

    /// True if this time is left.
    fn has(&self, now: u64, time: Duration) -> bool {
        Self::after(self.back_at.load(Ordering::Relaxed), now, time) <= Self::latest(now)
    }

    /// Takes this time from the allowance, also if less is left.
    fn spend(&self, now: u64, time: Duration) {
        let spend = |back_at: u64| Some(Self::after(back_at, now, time));
        let _ = self.back_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend);
    }
}

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1000
}

/// True if a call may wait this long for the peer of a connection. Takes the time from the allowance if the peer is another user's.
pub(crate) fn may_wait(slot: &Slot, time: Duration) -> bool {
    !slot.is_others.load(Ordering::Relaxed) || slots::allowance().take(now(), time)
}

/// A wait for the peer of a connection. Its duration is taken from the allowance if the peer is another user's.
pub(crate) struct Wait<'a> {
    slot: &'a Slot,
    /// Time of the first [`Wait::go_on`].
    begin: Option<Instant>,
    limit: Duration,
    spent: Duration,
}

impl Wait<'_> {
    pub(crate) fn new(slot: &Slot, limit: Duration) -> Wait<'_> {
        Wait { slot, begin: None, limit, spent: Duration::ZERO }
    }

    /// True if the wait may go on: it is within its limit, and the allowance is not used up.
    pub(crate) fn go_on(&mut self) -> bool {
        self.begin.get_or_insert_with(Instant::now);
        self.settle();
        self.elapsed() < self.limit && (!self.is_others() || slots::allowance().has_now(STEP))
    }

    /// Duration of the wait.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begin.map_or(Duration::ZERO, |begin| begin.elapsed())
    }

    fn is_others(&self) -> bool {
        self.slot.is_others.load(Ordering::Relaxed)
    }

    fn settle(&mut self) {
        let elapsed = self.elapsed();
        if self.is_others() {
            slots::allowance().spend_now(elapsed - self.spent);
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
    fn the_allowance_grows_slowly() {
        let allowance = OfOthers::new();
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
        // It is never larger than at first.
        now += 3_600_000_000;
        assert_eq!(takes(now), 20);
        // `spend` takes more than there is.
        allowance.spend(now, Duration::from_secs(1));
        assert!(!allowance.has(now + 109_000_000, step) && allowance.has(now + 110_000_000, step));
    }
}
