//! Number of data channels, and of pool blocks, that suit a path.
//!
//! A channel is one TCP connection, and the system bounds the window of one. On a long path that
//! bound, not the path, can be what limits the rate; then more channels help.

use std::time::{Duration, Instant};
use thruway_tcp::PathInfo;

/// Channels that a path gets at first. On a short path two keep both ends busy. On a long one,
/// each begins with ten segments and doubles every round trip: many reach the path's rate sooner.
pub(crate) fn first_channels(round_trip: Option<Duration>) -> u32 {
    match round_trip.map_or(0, |rtt| rtt.as_micros()) {
        0..1_000 => 2,
        1_000..5_000 => 4,
        _ => 8,
    }
}

/// Blocks that a pool gets where the user asks for none: `least`, or, on a long path, as many as
/// twice the bandwidth-delay product takes at 10 Gbit/s. Blocks that are not needed take no memory.
pub(crate) fn blocks_for(round_trip: Option<Duration>, block_len: u32, least: usize) -> usize {
    const PATH_RATE: f64 = 1.25e9;
    const POOL_BYTES_MAX: usize = 512 << 20;
    let product = round_trip.map_or(0.0, |rtt| rtt.as_secs_f64() * PATH_RATE) as usize;
    least.max((2 * product).min(POOL_BYTES_MAX) / block_len as usize)
}

/// Blocks that keep a channel of a long path busy: one that leaves and one behind it.
pub(crate) const BUSY_BLOCKS: usize = 2;
/// More of them, if they are short: bytes that keep it busy until its next block is there.
pub(crate) const BUSY_BYTES: u64 = 1 << 20;

/// Below this round trip no window is too small.
pub(super) const ROUND_TRIP_MIN: Duration = Duration::from_millis(1);
/// Minimum interval between two samples.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Samples before the first addition: at first every window is small, and grows by itself.
const SAMPLES_TO_START: u32 = 10;
/// Samples after an addition before its effect is judged: new channels are slow at first.
const SAMPLES_TO_JUDGE: u32 = 6;

/// Samples a source's channels and says when to add some.
#[derive(Debug)]
pub(crate) struct ChannelScaler {
    last_sample: Instant,
    sent: u64,
    busy: Duration,
    limited: Duration,
    /// Bytes per second before the last addition.
    before: Option<f64>,
    /// Samples left before the last addition is judged and another one is possible.
    waiting: u32,
    /// Best rate seen since the addition.
    best: f64,
    /// More channels did not help.
    over: bool,
}

impl ChannelScaler {
    pub(crate) fn new(now: Instant, wanted: bool) -> ChannelScaler {
        let (busy, limited) = (Duration::ZERO, Duration::ZERO);
        let waiting = SAMPLES_TO_START;
        ChannelScaler { last_sample: now, sent: 0, busy, limited, before: None, waiting, best: 0.0, over: !wanted }
    }

    /// Whether it is worth asking [`ChannelScaler::is_due`].
    pub(crate) fn may_be_due(&self, now: Instant) -> bool {
        !self.over && now - self.last_sample >= INTERVAL_MIN
    }

    /// Whether it is time for [`ChannelScaler::sample`], given the path's round trip.
    pub(crate) fn is_due(&self, now: Instant, round_trip: Option<Duration>) -> bool {
        let far = round_trip.filter(|rtt| *rtt >= ROUND_TRIP_MIN);
        !self.over && far.is_some_and(|rtt| now - self.last_sample >= INTERVAL_MIN.max(2 * rtt))
    }

    /// How many channels to add, `sent` bytes having been sent in all.
    pub(crate) fn sample(&mut self, now: Instant, paths: &[PathInfo], sent: u64) -> u32 {
        let busy: Duration = paths.iter().map(|p| p.busy).sum();
        let limited: Duration = paths.iter().map(|p| p.window_limited).sum();
        let rate = (sent - self.sent) as f64 / (now - self.last_sample).as_secs_f64().max(1e-6);
        let (was_busy, was_limited) = (busy.saturating_sub(self.busy), limited.saturating_sub(self.limited));
        (self.last_sample, self.sent, self.busy, self.limited) = (now, sent, busy, limited);
        self.best = self.best.max(rate);
        if self.waiting > 0 {
            self.waiting -= 1;
            if self.waiting > 0 {
                return 0;
            }
            if self.before.is_some_and(|before| self.best < 1.1 * before) {
                self.over = true;
                return 0;
            }
        }
        if was_limited * 4 < was_busy || was_busy.is_zero() {
            return 0;
        }
        self.before = Some(std::mem::replace(&mut self.best, 0.0));
        self.waiting = SAMPLES_TO_JUDGE;
        (paths.len() as u32 / 2).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn path(busy: Duration, window_limited: Duration) -> PathInfo {
        PathInfo { round_trip: 50 * MS, busy, window_limited, ..PathInfo::default() }
    }

    /// Looks every 100 ms at `n` channels whose windows, or whose path, are the limit; returns the
    /// number of channels in the end.
    fn grown(window_rate: f64, path_rate: f64) -> usize {
        let mut now = Instant::now();
        let mut scaler = ChannelScaler::new(now, true);
        let (mut n, mut sent, mut time) = (8, 0.0, Duration::ZERO);
        let mut limited = Duration::ZERO;
        for _ in 0..200 {
            (now, time) = (now + 100 * MS, time + 100 * MS);
            assert!(scaler.over || scaler.is_due(now, Some(50 * MS)));
            let rate = (n as f64 * window_rate).min(path_rate);
            sent += rate * 0.1;
            if rate < path_rate {
                limited += 100 * MS;
            }
            if !scaler.over {
                n += scaler.sample(now, &vec![path(time, limited); n], sent as u64) as usize;
            }
        }
        n
    }

    #[test]
    fn channels_are_added_while_their_windows_limit_the_rate() {
        assert_eq!(grown(1e9, 1e8), 8, "the path is the limit");
        assert!(grown(1e7, 3e8) >= 30, "the windows are the limit");
    }

    #[test]
    fn what_does_not_help_is_not_repeated() {
        let mut now = Instant::now();
        let mut scaler = ChannelScaler::new(now, true);
        let (mut n, mut sent) = (8, 0);
        for look in 1..100 {
            now += 100 * MS;
            sent += 1_000_000;
            if scaler.is_due(now, Some(50 * MS)) {
                n += scaler.sample(now, &[path(100 * look * MS, 100 * look * MS)], sent);
            }
        }
        assert!(n <= 10, "a slow sink looks like small windows; {n} channels");
    }

    #[test]
    fn short_paths_and_fixed_numbers_are_left_alone() {
        let now = Instant::now();
        assert!(!ChannelScaler::new(now, true).is_due(now + 1000 * MS, Some(Duration::from_micros(50))));
        assert!(!ChannelScaler::new(now, true).is_due(now + 1000 * MS, None));
        assert!(!ChannelScaler::new(now, false).is_due(now + 1000 * MS, Some(50 * MS)));
        assert_eq!((first_channels(None), first_channels(Some(50 * MS))), (2, 8));
        assert_eq!(blocks_for(Some(Duration::from_micros(50)), 1 << 20, 64), 64);
        assert_eq!(blocks_for(Some(50 * MS), 1 << 20, 64), 119);
    }
}
