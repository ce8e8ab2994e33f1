//! A clock that is read without a system call, as the benchmarks compared with have it: on machines without a clock page
//! (User Mode Linux, some virtual machines) [`Instant::now`] is one, as long as a small message takes.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// How long the counter is compared with the system's clock to learn its rate.
const CALIBRATION: Duration = Duration::from_millis(20);

/// Nanoseconds of one tick.
static TICK: LazyLock<f64> = LazyLock::new(|| {
    let (start, first) = both();
    while start.elapsed() < CALIBRATION {
        std::hint::spin_loop();
    }
    let (end, last) = both();
    (end - start).as_nanos() as f64 / last.wrapping_sub(first).max(1) as f64
});

/// Both clocks at one moment: of a few readings the one that was least interrupted.
fn both() -> (Instant, u64) {
    let reading = |_| {
        let (before, now, after) = (counter(), Instant::now(), counter());
        (after.wrapping_sub(before), now, before)
    };
    let (_, now, counter) = (0..16).map(reading).min_by_key(|(took, ..)| *took).expect("there are some");
    (now, counter)
}

/// Learns the counter's rate, which takes a moment, if that has not been done.
pub(super) fn calibrate() {
    LazyLock::force(&TICK);
}

/// Reads of one processor's counter; those of others agree on every machine that has RDMA.
#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_nanos() as u64
}

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment(u64);

impl Moment {
    pub(super) fn now() -> Moment {
        Moment(counter())
    }

    /// From an earlier moment to this one; nothing if it is a later one.
    pub(super) fn since(self, earlier: Moment) -> Duration {
        // As numbers that wrap: a counter that was set back is no span of centuries.
        let ticks = (self.0.wrapping_sub(earlier.0) as i64).max(0);
        Duration::from_nanos((ticks as f64 * *TICK) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_system() {
        let (before, start) = (Instant::now(), Moment::now());
        let between = Instant::now();
        while between.elapsed() < Duration::from_millis(50) {}
        let (inner, span, outer) = (between.elapsed(), Moment::now().since(start), before.elapsed());
        assert!(
            span > inner.mul_f64(0.9) && span < outer.mul_f64(1.1),
            "{span:?}, by the system {inner:?} to {outer:?}"
        );
        assert_eq!(start.since(Moment::now()), Duration::ZERO);
    }
}
