//! Deferred report of a data channel's end.

use super::LinkError;
use std::time::{Duration, Instant};
use thruway_fabric::ConnectionError;

/// Time, beyond two round trips, for the control connection to explain the end.
const GRACE: Duration = Duration::from_millis(50);
/// How much longer unread data of other channels may delay the report.
const BUSY_GRACE: Duration = Duration::from_secs(1);

/// The end of a data channel, reported after a short grace period, because a message on the control connection may explain it
/// or make it expected.
#[derive(Debug, Default)]
pub(super) struct DeferredClose(Option<(ConnectionError, Instant)>);

impl DeferredClose {
    /// Records the end of a channel; only the first counts.
    pub(super) fn record(&mut self, cause: ConnectionError, round_trip: Option<Duration>) {
        self.0.get_or_insert_with(|| (cause, Instant::now() + GRACE + 2 * round_trip.unwrap_or_default()));
    }

    /// The time until the report is due, at most `limit`.
    pub(super) fn wait_max(&self, limit: Duration) -> Duration {
        self.0.as_ref().map_or(limit, |(_, due)| due.saturating_duration_since(Instant::now()).min(limit))
    }

    /// Reports the end once: when it is due and all that has arrived has been taken, or else [`BUSY_GRACE`] later.
    ///
    /// # Errors
    /// [`LinkError::DataLost`] is the report.
    pub(super) fn report_if_due(&mut self, all_taken: bool) -> Result<(), LinkError> {
        let late = if all_taken { Duration::ZERO } else { BUSY_GRACE };
        match self.0.take_if(|(_, due)| *due + late <= Instant::now()) {
            Some((cause, _)) => Err(LinkError::DataLost(cause)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_reported_once_and_not_at_once() {
        let mut close = DeferredClose::default();
        const LONG: Duration = Duration::from_secs(86_400);
        assert!(close.report_if_due(true).is_ok() && close.wait_max(LONG) == LONG);
        // A path so long that the test is over before.
        close.record(ConnectionError::Closed, Some(Duration::from_secs(3600)));
        let left = close.wait_max(LONG);
        assert!(close.report_if_due(true).is_ok() && left > Duration::from_secs(3600) && left < LONG);
        let mut close = DeferredClose(Some((ConnectionError::Closed, Instant::now())));
        close.record(ConnectionError::TimedOut, None);
        assert_eq!(close.wait_max(LONG), Duration::ZERO, "the first end counts");
        assert!(close.report_if_due(false).is_ok());
        assert!(matches!(close.report_if_due(true), Err(LinkError::DataLost(ConnectionError::Closed))));
        assert!(close.report_if_due(true).is_ok() && close.wait_max(LONG) == LONG);
        let mut close = DeferredClose(Some((ConnectionError::Closed, Instant::now() - BUSY_GRACE)));
        assert!(close.report_if_due(false).is_err());
    }
}
