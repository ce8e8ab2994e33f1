//! Rate limits in bytes per second.

use std::time::{Duration, Instant};

/// Burst after a rest, as a time at the rate.
const BURST: Duration = Duration::from_millis(100);

/// Keeps to a rate, allowing bursts of a tenth of a second. Time in which nothing was sent is not
/// made up for later.
#[derive(Debug, Clone)]
pub struct RateLimit {
    rate: Option<f64>,
    /// When what has been sent would have been sent at the rate.
    paid: Option<Instant>,
}

impl RateLimit {
    /// A limit of so many bytes per second, at least one; without one there is none.
    pub fn new(rate: Option<u64>) -> RateLimit {
        RateLimit { rate: rate.map(|r| r.max(1) as f64), paid: None }
    }

    /// Counts bytes that are moved now.
    pub fn record(&mut self, bytes: u64, now: Instant) {
        let Some(rate) = self.rate else { return };
        let rested = now.checked_sub(BURST).unwrap_or(now);
        let from = self.paid.map_or(rested, |paid| paid.max(rested));
        self.paid = Some(from + Duration::from_secs_f64(bytes as f64 / rate));
    }

    /// Time to wait before more may be moved.
    pub fn pause(&self, now: Instant) -> Option<Duration> {
        self.paid?.checked_duration_since(now).filter(|due| *due > Duration::ZERO)
    }

    /// Whether something may be moved now. Without a limit this reads no clock.
    pub fn is_open(&self) -> bool {
        self.paid.is_none() || self.pause(Instant::now()).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends blocks as soon as it may for `seconds`; returns bytes per second.
    fn rate_of(limit: &mut RateLimit, start: Instant, seconds: u64, block: u64) -> f64 {
        let (mut now, mut sent) = (start, 0);
        while now < start + Duration::from_secs(seconds) {
            match limit.pause(now) {
                Some(pause) => now += pause,
                None => {
                    limit.record(block, now);
                    sent += block;
                }
            }
        }
        sent as f64 / seconds as f64
    }

    #[test]
    fn the_rate_is_kept_whatever_the_size_of_blocks() {
        for block in [1, 64 << 10, 1 << 20, 16 << 20] {
            if block == 1 {
                let rate = rate_of(&mut RateLimit::new(Some(1000)), Instant::now(), 20, block);
                assert!((1000.0..1010.0).contains(&rate), "{rate}");
                continue;
            }
            let rate = rate_of(&mut RateLimit::new(Some(20_000_000)), Instant::now(), 20, block);
            let most = 20_000_000.0 * (1.0 + 0.1 / 20.0) + block as f64 / 20.0;
            assert!((20_000_000.0..=most).contains(&rate), "{block}: {rate}");
        }
    }

    #[test]
    fn rest_is_not_made_up_for() {
        let (mut limit, start) = (RateLimit::new(Some(1_000_000)), Instant::now());
        limit.record(1, start);
        let later = start + Duration::from_secs(60);
        let rate = rate_of(&mut limit, later, 1, 10_000);
        assert!(rate <= 1_120_000.0, "a burst of a tenth of a second, then the rate; {rate}");
    }

    #[test]
    fn without_a_rate_there_is_no_pause() {
        let (mut limit, now) = (RateLimit::new(None), Instant::now());
        limit.record(u64::MAX, now);
        assert!(limit.pause(now).is_none() && limit.is_open());
    }
}
