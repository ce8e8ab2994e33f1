//! Reports of what could not be copied, on their way to a peer that may be slow to hear them.

use crate::wire::Report;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes that a report takes beside its words.
const REPORT: usize = 128;

/// Limits the reports that wait to be sent to a peer, which may read them slowly or never.
pub(super) struct Reports {
    /// Most bytes of waiting reports.
    max: usize,
    waiting: AtomicUsize,
    /// Number of reports beyond the limit, which are only counted.
    nameless: AtomicU64,
}

impl Reports {
    /// Limits the waiting reports to this number of bytes.
    pub(super) fn new(max: usize) -> Reports {
        Reports { max, waiting: AtomicUsize::new(0), nameless: AtomicU64::new(0) }
    }

    /// A report is made; false if it will only be counted.
    pub(super) fn admit(&self, report: &Report) -> bool {
        let admitted = self.waiting.fetch_add(weight(report), Ordering::Relaxed) < self.max;
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

    /// Number of reports that were not admitted since the last call; `None` instead of 0.
    pub(super) fn rest(&self) -> Option<u64> {
        Some(self.nameless.swap(0, Ordering::Relaxed)).filter(|count| *count > 0)
    }
}

fn weight(report: &Report) -> usize {
    REPORT + report.path.len() + report.message.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ReportKind;

    const WAITING_MAX: usize = 8 << 20;

    #[test]
    fn what_is_not_told_is_bounded_and_counted() {
        let reports = Reports::new(WAITING_MAX);
        let report = Report { path: vec![b'x'; 1000], kind: ReportKind::NotCopied, message: "no".into() };
        let admitted = (0..100_000).filter(|_| reports.admit(&report)).count();
        assert!((5000..=WAITING_MAX / 1000).contains(&admitted), "{admitted}");
        let count = reports.rest().unwrap();
        assert_eq!(admitted as u64 + count, 100_000);
        assert_eq!(reports.rest(), None);
        (0..admitted).for_each(|_| reports.told(&report));
        assert!(reports.admit(&report));
    }
}
