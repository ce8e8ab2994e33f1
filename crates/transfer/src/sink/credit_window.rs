//! Credit window sizing.

use crate::protocol::WINDOW_MAX;
use std::time::{Duration, Instant};

/// Assumed upper bound of a path's bandwidth, in bytes per second.
const RATE_MAX: f64 = 12.5e9;
/// Credits beyond the bandwidth-delay product, for blocks being processed at both ends.
const CREDITS_IN_PROCESS: usize = 8;
/// From this round trip on the window follows what arrives.
const LONG_PATH_RTT: Duration = Duration::from_millis(1);
/// Measurements, of two round trips each, of which the largest counts: blocks come in bursts, and one round trip may see two
/// of them.
const SAMPLES: usize = 8;

/// Bounds the window by what the path holds.
///
/// On a short path that is what the round trip holds at a rate no path exceeds, so that blocks
/// stay in the processor's cache instead of going round the whole pool. On a long one the bound is
/// what arrived in the best two of the last round trips, and some more: it doubles while the window is the
/// limit, and stays there when the path is.
pub(super) struct CreditWindow {
    round_trip: Option<Duration>,
    most: usize,
    since: Option<Instant>,
    arrived: usize,
    recent: [usize; SAMPLES],
    next: usize,
}

impl CreditWindow {
    pub(super) fn new(round_trip: Option<Duration>, block_len: u32, pool: usize) -> CreditWindow {
        let pool = pool.min(WINDOW_MAX);
        let most = round_trip.map_or(pool, |rtt| {
            let blocks = RATE_MAX * rtt.as_secs_f64() / f64::from(block_len);
            (blocks.ceil() as usize + CREDITS_IN_PROCESS).min(pool)
        });
        let measured = round_trip.filter(|rtt| *rtt >= LONG_PATH_RTT);
        CreditWindow { round_trip: measured, most, since: None, arrived: 0, recent: [0; SAMPLES], next: 0 }
    }

    /// Whether the bound follows what arrives, as it does on a long path.
    pub(super) fn is_measured(&self) -> bool {
        self.round_trip.is_some()
    }

    /// The bound at first.
    pub(super) fn window_max(&self) -> usize {
        match self.round_trip {
            Some(_) => self.most.min(2 * CREDITS_IN_PROCESS),
            None => self.most,
        }
    }

    /// A block has arrived; the bound, if it is another one now.
    pub(super) fn arrived(&mut self, now: Instant) -> Option<usize> {
        let round_trip = self.round_trip?;
        let since = *self.since.get_or_insert(now);
        self.arrived += 1;
        // More than ever already: no need to wait for the end of the measurement.
        let record = self.arrived > self.recent.iter().copied().max().unwrap_or(0);
        let over = now - since >= 2 * round_trip;
        if over {
            self.recent[self.next] = self.arrived;
            self.next = (self.next + 1) % SAMPLES;
            (self.since, self.arrived) = (Some(now), 0);
        }
        if !over && !record {
            return None;
        }
        let best = self.recent.iter().copied().max().unwrap_or(0).max(self.arrived);
        Some((best + 2 * CREDITS_IN_PROCESS).min(self.most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(50);

    /// The bound after two seconds on a path that carries `per_round_trip` blocks, when as many blocks are out as the
    /// bound allows; then after two more for each further path.
    fn settled(paths: &[usize]) -> usize {
        let mut sizing = CreditWindow::new(Some(RTT), 1 << 20, 256);
        let (mut window, start) = (sizing.window_max(), Instant::now());
        for (round, per_round_trip) in paths.iter().flat_map(|path| [*path; 40]).enumerate() {
            let n = window.min(per_round_trip);
            for block in 0..n as u32 {
                let now = start + round as u32 * RTT + RTT * block / n as u32;
                window = sizing.arrived(now).unwrap_or(window);
            }
        }
        window
    }

    #[test]
    fn the_bound_follows_what_the_path_carries() {
        assert_eq!(CreditWindow::new(None, 1 << 20, 64).window_max(), 64);
        assert_eq!(CreditWindow::new(Some(Duration::from_micros(100)), 1 << 20, 64).window_max(), 10);
        for carried in [2, 20, 100] {
            for before in [&[][..], &[200], &[1]] {
                let window = settled(&[before, &[carried]].concat());
                assert!(
                    window > carried && window <= 2 * carried + 4 * CREDITS_IN_PROCESS,
                    "{carried} carried, {window} allowed"
                );
            }
        }
        assert_eq!(settled(&[1000]), 256, "never more than there are");
    }
}
