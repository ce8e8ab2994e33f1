//! Whether a write to the page cache may be made to wait.
//!
//! The kernel holds up whoever writes while more than a share of memory is dirty (`balance_dirty_pages`). Below the
//! middle of its two limits nobody is held up. Where a file system cannot be asked to fail rather than wait, this says
//! how much can be written before one has to look again.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Instant;

/// How long what was seen is believed, in milliseconds.
const BELIEVED: u64 = 100;
/// How often is looked at most, in milliseconds.
const OFTEN: u64 = 20;
/// The most that is written after one look, in bytes.
const BUDGET_MAX: i64 = 128 << 20;

static BUDGET: AtomicI64 = AtomicI64::new(0);
/// Milliseconds since the first look; 0 before it.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// Whether `len` bytes can be written now without being held up, as far as can be told; then they count as written.
pub(super) fn has_room(len: usize) -> bool {
    let now = now();
    let looked = LOOKED.load(Ordering::Relaxed);
    let taken = |len: i64| BUDGET.fetch_sub(len, Ordering::Relaxed) >= len;
    if now.saturating_sub(looked) < BELIEVED && taken(len as i64) {
        return true;
    }
    if now.saturating_sub(looked) < OFTEN {
        return false;
    }
    // One looks, the others go the long way meanwhile.
    if LOOKED.compare_exchange(looked, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return false;
    }
    let budget = std::fs::read_to_string("/proc/vmstat").ok().and_then(|text| room(&text)).unwrap_or(0);
    BUDGET.store(budget, Ordering::Relaxed);
    taken(len as i64)
}

fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    // What has never been looked at was looked at long ago.
    START.get_or_init(Instant::now).elapsed().as_millis() as u64 + BELIEVED + 1
}

/// Bytes that may become dirty, of which half is left to others.
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
        assert!(room(&std::fs::read_to_string("/proc/vmstat").unwrap()).is_some(), "the kernel says it so");
    }
}
