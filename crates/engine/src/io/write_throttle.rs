//! Predicts whether a buffered write would be throttled.
//!
//! The kernel makes writers wait while more than a share of memory is dirty (`balance_dirty_pages`), but never below the
//! middle of its two limits. Where a file system cannot be asked to fail rather than wait (`RWF_NOWAIT`), this says how much
//! can be written before the next look.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Instant;

/// How long a sample of `/proc/vmstat` is valid.
const SAMPLE_TTL_MS: u64 = 100;
/// Minimum interval between two samples.
const SAMPLE_INTERVAL_MS: u64 = 20;
/// Upper bound of bytes to write after one sample.
const BUDGET_MAX: i64 = 128 << 20;

static BUDGET: AtomicI64 = AtomicI64::new(0);
/// When the last sample was taken, in milliseconds of [`now`]; 0 before the first.
static SAMPLED: AtomicU64 = AtomicU64::new(0);

/// Whether `len` bytes can be written now without being throttled, as far as can be told; if so, they are taken off the
/// budget.
pub(super) fn has_room(len: usize) -> bool {
    let now = now();
    let sampled = SAMPLED.load(Ordering::Relaxed);
    let taken = |len: i64| BUDGET.fetch_sub(len, Ordering::Relaxed) >= len;
    if now.saturating_sub(sampled) < SAMPLE_TTL_MS && taken(len as i64) {
        return true;
    }
    if now.saturating_sub(sampled) < SAMPLE_INTERVAL_MS {
        return false;
    }
    // One thread samples; the others take the slow path meanwhile.
    if SAMPLED.compare_exchange(sampled, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return false;
    }
    let budget = std::fs::read_to_string("/proc/vmstat").ok().and_then(|text| room(&text)).unwrap_or(0);
    BUDGET.store(budget, Ordering::Relaxed);
    taken(len as i64)
}

fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    // The first sample is always due.
    START.get_or_init(Instant::now).elapsed().as_millis() as u64 + SAMPLE_TTL_MS + 1
}

/// Half of the bytes that may become dirty before writers are throttled; the rest is for other processes.
fn room(vmstat: &str) -> Option<i64> {
    const PAGE: i64 = 4096;
    let field = |name: &str| -> Option<i64> {
        let line = vmstat.lines().find(|line| line.split(' ').next() == Some(name))?;
        line.split(' ').nth(1)?.parse().ok()
    };
    let ceiling = (field("nr_dirty_background_threshold")? + field("nr_dirty_threshold")?) / 2;
    let dirty = field("nr_dirty")? + field("nr_writeback")?;
    Some(((ceiling - dirty) / 2 * PAGE).clamp(0, BUDGET_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_below_the_middle_of_the_limits() {
        let text = |dirty: u64, writeback: u64| {
            format!(
                "nr_free_pages 1\nnr_dirty {dirty}\nnr_writeback {writeback}\nnr_writeback_temp 9\n\
                 nr_dirty_threshold 3000\nnr_dirty_background_threshold 1000\n"
            )
        };
        assert_eq!(room(&text(0, 0)), Some(1000 * 4096));
        assert_eq!(room(&text(1000, 500)), Some(250 * 4096));
        assert_eq!(room(&text(2500, 0)), Some(0));
        assert_eq!(room("nr_dirty 5\n"), None);
        assert!(room(&std::fs::read_to_string("/proc/vmstat").unwrap()).is_some(), "the kernel's format");
    }
}
