//! Distribution of times.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Times below so many nanoseconds (as a power of two) share the first bucket.
const FIRST: u32 = 10;
/// From this power of two on, times share the last bucket.
const LAST: u32 = 36;
/// Buckets for each power of two, as a power of two: bounds differ by a quarter at most.
const PARTS: u32 = 2;

/// Number of buckets.
pub const BUCKETS: usize = ((LAST - FIRST) << PARTS) as usize + 2;

/// A histogram of times from 1 µs to 68 s, with a relative error of at most 25 %. Its own bounds hold shorter and longer times.
#[derive(Debug)]
#[repr(align(64))]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    /// Of all times, in nanoseconds.
    sum: AtomicU64,
}

/// Values of a histogram at a moment. An update that is in progress may be in the buckets and not in the sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    /// Number of times.
    pub count: u64,
    /// Their sum.
    pub sum: Duration,
    /// The buckets that are not empty, in order: their upper bound, `None` for the last bucket of all, and the number of times in each.
    pub buckets: Vec<(Option<Duration>, u64)>,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: [const { AtomicU64::new(0) }; BUCKETS], sum: AtomicU64::new(0) }
    }
}

/// The bucket of a time in nanoseconds.
fn bucket(time: u64) -> usize {
    let Some(power) = time.checked_ilog2().filter(|power| *power >= FIRST) else { return 0 };
    if power >= LAST {
        return BUCKETS - 1;
    }
    let part = (time >> (power - PARTS)) & ((1 << PARTS) - 1);
    1 + (((power - FIRST) << PARTS) as usize + part as usize)
}

/// The first time in nanoseconds that is in a later bucket; `None` for the last one.
fn bound(bucket: usize) -> Option<u64> {
    if bucket == BUCKETS - 1 {
        return None;
    }
    let (power, part) = (FIRST + (bucket as u32 >> PARTS), bucket as u64 & ((1 << PARTS) - 1));
    Some(((1 << PARTS) + part) << (power - PARTS))
}

impl Histogram {
    /// Adds a time.
    pub fn record(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(time)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(time, Ordering::Relaxed);
    }

    /// The values now.
    pub fn get(&self) -> Buckets {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).enumerate();
        let buckets: Vec<_> = counts
            .filter(|(_, count)| *count > 0)
            .map(|(at, count)| (bound(at).map(Duration::from_nanos), count))
            .collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        Buckets { count, sum: Duration::from_nanos(self.sum.load(Ordering::Relaxed)), buckets }
    }
}

impl Buckets {
    /// An upper bound of the shortest time that is as long as this part of all, such as 0.99. `None` without times, and if it is in the last bucket.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let wanted = ((self.count as f64 * part).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        let found = self.buckets.iter().find(|(_, count)| {
            seen += count;
            seen >= wanted
        });
        found.and_then(|(bound, _)| *bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_are_bounds() {
        let histogram = Histogram::default();
        assert_eq!((histogram.get().count, histogram.get().quantile(0.5)), (0, None));
        for micros in 1..=1000 {
            histogram.record(Duration::from_micros(micros));
        }
        let values = histogram.get();
        assert_eq!((values.count, values.sum), (1000, Duration::from_micros(500_500)));
        for part in [0.01, 0.5, 0.99, 1.0] {
            let (exact, bound) = (1000.0 * part, values.quantile(part).unwrap().as_secs_f64() * 1e6);
            assert!(exact < bound && bound <= exact * 1.26, "{part}: {bound}");
        }
        histogram.record(Duration::from_secs(100));
        assert_eq!(histogram.get().quantile(1.0), None);
        assert_eq!(histogram.get().buckets.last(), Some(&(None, 1)));
    }

    #[test]
    fn bounds_rise() {
        let bounds: Vec<u64> = (0..BUCKETS - 1).map(|at| bound(at).unwrap()).collect();
        assert!(bounds.is_sorted_by(|one, other| one < other));
        assert_eq!((bounds[0], bounds[BUCKETS - 2]), (1 << FIRST, 1 << LAST));
    }

    proptest! {
        #[test]
        fn a_time_is_below_the_bound_of_its_bucket(time: u64) {
            let at = bucket(time);
            prop_assert!(bound(at).is_none_or(|bound| time < bound));
            prop_assert!(at == 0 || bound(at - 1).unwrap() <= time);
        }
    }
}
