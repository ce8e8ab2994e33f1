//! Reports of what could not be copied, on their way to a peer that may be slow to hear them.

use crate::wire::{Report, ReportKind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes of reports that wait to be told, at most; a peer that hears nothing could have any number made.
const WAITING_MAX: usize = 8 << 20;
/// Bytes that a report takes beside its words.
const REPORT: usize = 128;

/// Counts what waits to be told.
#[derive(Default)]
pub(super) struct Reports {
    waiting: AtomicUsize,
    /// Of these only the number is known.
    nameless: AtomicU64,
}

impl Reports {
    /// A report is made; false if it will only be counted.
    pub(super) fn admit(&self, report: &Report) -> bool {
        let admitted = self.waiting.fetch_add(weight(report), Ordering::Relaxed) < WAITING_MAX;
        if !admitted {
            self.told(report);
            self.nameless.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }

    /// A report that was admitted has been told.
    pub(super) fn told(&self, report: &Report) {
        self.waiting.fetch_sub(weight(report), Ordering::Relaxed);
    }

    /// Those that were only counted, as one.
    pub(super) fn rest(&self) -> Option<(u64, Report)> {
        let count = self.nameless.swap(0, Ordering::Relaxed);
        let message = format!("and {count} more entries of which something could not be copied, too many to name");
        (count > 0).then(|| (count, Report { path: b".".to_vec(), kind: ReportKind::NotCopied, message }))
    }
}

fn weight(report: &Report) -> usize {
    REPORT + report.path.len() + report.message.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_told_is_bounded_and_counted() {
        let reports = Reports::default();
        let report = Report { path: vec![b'x'; 1000], kind: ReportKind::NotCopied, message: "no".into() };
        let admitted = (0..100_000).filter(|_| reports.admit(&report)).count();
        assert!((5000..=WAITING_MAX / 1000).contains(&admitted), "{admitted}");
        let (count, _) = reports.rest().unwrap();
        assert_eq!(admitted as u64 + count, 100_000);
        assert_eq!(reports.rest(), None);
        (0..admitted).for_each(|_| reports.told(&report));
        assert!(reports.admit(&report));
    }
}
