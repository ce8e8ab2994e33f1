//! Predicts whether a buffered write would be throttled.
//!
//! The kernel makes writers wait while more than a share of memory is dirty (`balance_dirty_pages`), but never below the
//! middle of its two limits. A control group with a memory limit has limits of its own, the same share of the memory
//! that it may have (`mem_cgroup_wb_stats`, cgroup v2). Where a file system cannot be asked to fail rather than wait (`RWF_NOWAIT`), this
//! says how much can be written before the next look.

use std::path::PathBuf;
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
    BUDGET.store(sample().unwrap_or(0), Ordering::Relaxed);
    taken(len as i64)
}

fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    // The first sample is always due.
    START.get_or_init(Instant::now).elapsed().as_millis() as u64 + SAMPLE_TTL_MS + 1
}

/// Bytes that may be written now.
fn sample() -> Option<i64> {
    let mut budget = room(&std::fs::read_to_string("/proc/vmstat").ok()?)?;
    for group in groups() {
        // Of a group without files of its own (the root) there is nothing to be known.
        let read = |name: &str| std::fs::read_to_string(group.join(name)).unwrap_or_default();
        let limit = read("memory.max");
        if limit.is_empty() || limit.trim() == "max" {
            continue;
        }
        budget = budget.min(room_in_group(&limit, &read("memory.current"), &read("memory.stat"), ratio())?);
    }
    Some(budget)
}

/// The control groups of this process, from its own to the root.
fn groups() -> impl Iterator<Item = PathBuf> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).map(PathBuf::from);
    let paths = path.into_iter().flat_map(|path| path.ancestors().map(PathBuf::from).collect::<Vec<_>>());
    paths.map(|path| PathBuf::from("/sys/fs/cgroup").join(path))
}

/// The share of a group's memory that may be dirty before its writers are throttled, in percent: the middle of the two limits.
fn ratio() -> i64 {
    let percent = |name: &str, default| {
        let set =
            std::fs::read_to_string(format!("/proc/sys/vm/{name}")).ok().and_then(|text| text.trim().parse().ok());
        // Zero: the limit is one of bytes, which the kernel takes as a share too. A small one, to be safe.
        set.map_or(default, |percent: i64| percent.clamp(1, 100))
    };
    (percent("dirty_ratio", 20) + percent("dirty_background_ratio", 10)) / 2
}

/// Half of the bytes that may become dirty before writers are throttled; the rest is for other processes.
fn room(vmstat: &str) -> Option<i64> {
    const PAGE: i64 = 4096;
    let ceiling = (field(vmstat, "nr_dirty_background_threshold")? + field(vmstat, "nr_dirty_threshold")?) / 2;
    let dirty = field(vmstat, "nr_dirty")? + field(vmstat, "nr_writeback")?;
    Some(((ceiling - dirty) / 2 * PAGE).clamp(0, BUDGET_MAX))
}

/// As [`room`], for a control group with a limit of memory.
fn room_in_group(limit: &str, current: &str, stat: &str, ratio: i64) -> Option<i64> {
    let bytes = |text: &str| text.trim().parse::<i64>().ok();
    let (dirty, writeback) = (field(stat, "file_dirty")?, field(stat, "file_writeback")?);
    let files = field(stat, "active_file")? + field(stat, "inactive_file")?;
    let available = files + (bytes(limit)? - bytes(current)?).max(0);
    Some(((available / 100 * ratio - dirty - writeback) / 2).clamp(0, BUDGET_MAX))
}

fn field(text: &str, name: &str) -> Option<i64> {
    let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
    line.split(' ').nth(1)?.parse().ok()
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

    #[test]
    fn a_group_with_a_limit_has_less_room() {
        const MIB: i64 = 1 << 20;
        let stat = |dirty: i64, writeback: i64| {
            format!(
                "anon 5\nfile_dirty {dirty}\nfile_writeback {writeback}\nactive_file {}\ninactive_file {}\n",
                10 * MIB,
                30 * MIB
            )
        };
        let (limit, current) = (format!("{}\n", 160 * MIB), format!("{}\n", 100 * MIB));
        // 15 % of 40 MiB of files and 60 MiB that are left.
        let room = |stat: &str| room_in_group(&limit, &current, stat, 15).unwrap();
        assert!((room(&stat(0, 0)) - 15 * MIB / 2).abs() < 100);
        assert!((room(&stat(5 * MIB, 6 * MIB)) - 4 * MIB / 2).abs() < 100);
        assert_eq!(room(&stat(20 * MIB, 0)), 0);
        assert_eq!(room_in_group("max\n", &current, &stat(0, 0), 15), None);
    }

    #[test]
    fn this_process_is_in_groups_that_can_be_looked_at() {
        assert!(sample().is_some());
        assert!((1..=100).contains(&ratio()));
    }
}
