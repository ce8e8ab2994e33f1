//! How many credits are worth having out.

use crate::protocol::WINDOW_MAX;
use std::time::{Duration, Instant};

/// No path is faster, in bytes per second.
const RATE_MAX: f64 = 12.5e9;
/// Credits beside those that the path holds, for what is being dealt with at both ends.
const SLACK: usize = 8;
/// From this round trip on, what arrives is measured.
const LONG: Duration = Duration::from_millis(1);
/// Measurements, two round trips each, that the largest is taken of: blocks come in bursts, and
/// one round trip may see two bursts of them.
const REMEMBERED: usize = 8;

/// Bounds the window by what the path holds.
///
/// On a short path that is what the round trip holds at a rate no path exceeds, so that blocks
/// stay in the processor's cache instead of going round the whole pool. On a long one the bound is
/// what arrived in the best two of the last round trips, and some more: it doubles while the window is the
/// limit, and stays there when the path is.
pub(super) struct Flow {
    round_trip: Option<Duration>,
    most: usize,
    since: Option<Instant>,
    arrived: usize,
    recent: [usize; REMEMBERED],
    next: usize,
}

impl Flow {
    pub(super) fn new(round_trip: Option<Duration>, block_len: u32, pool: usize) -> Flow {
        let pool = pool.min(WINDOW_MAX);
        let most = round_trip.map_or(pool, |rtt| {
            let blocks = RATE_MAX * rtt.as_secs_f64() / f64::from(block_len);
            (blocks.ceil() as usize + SLACK).min(pool)
        });
        let measured = round_trip.filter(|rtt| *rtt >= LONG);
        Flow { round_trip: measured, most, since: None, arrived: 0, recent: [0; REMEMBERED], next: 0 }
    }

    /// Whether the bound follows what arrives, as it does on a long path.
    pub(super) fn is_measured(&self) -> bool {
        self.round_trip.is_some()
    }

    /// The bound at first.
    pub(super) fn window_max(&self) -> usize {
        match self.round_trip {
            Some(_) => self.most.min(2 * SLACK),
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
            self.next = (self.next + 1) % REMEMBERED;
            (self.since, self.arrived) = (Some(now), 0);
        }
        if !over && !record {
            return None;
        }
        let best = self.recent.iter().copied().max().unwrap_or(0).max(self.arrived);
        Some((best + 2 * SLACK).min(self.most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(50);

    /// The bound after two seconds on a path that carries `per_round_trip` blocks, when as many
    /// blocks are out as the bound allows.
    fn settled(per_round_trip: usize) -> usize {
        let mut flow = Flow::new(Some(RTT), 1 << 20, 256);
        let (mut window, start) = (flow.window_max(), Instant::now());
        for round in 0..40 {
            let n = window.min(per_round_trip);
            for block in 0..n as u32 {
                let now = start + round * RTT + RTT * block / n as u32;
                window = flow.arrived(now).unwrap_or(window);
            }
        }
        window
    }

    #[test]
    fn the_bound_follows_what_the_path_carries() {
        assert_eq!(Flow::new(None, 1 << 20, 64).window_max(), 64);
        assert_eq!(Flow::new(Some(Duration::from_micros(100)), 1 << 20, 64).window_max(), 10);
        for carried in [2, 20, 100] {
            let window = settled(carried);
            assert!(window > carried && window <= 2 * carried + 4 * SLACK, "{carried} carried, {window} allowed");
        }
        assert_eq!(settled(1000), 256, "never more than there are");
    }
}
