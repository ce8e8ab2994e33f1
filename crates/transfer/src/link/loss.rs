//! The end of a data channel.

use super::LinkError;
use std::time::{Duration, Instant};
use thruway_fabric::ConnectionError;

/// What connections that end together need to tell of it, beyond the way.
const GRACE: Duration = Duration::from_millis(50);
/// How much longer other channels that are busy may delay it.
const BUSY_GRACE: Duration = Duration::from_secs(1);

/// A data channel that has ended. It is told after a moment: the control connection, whose words come by another way,
/// may explain it, or make it no loss.
#[derive(Debug, Default)]
pub(super) struct Loss(Option<(ConnectionError, Instant)>);

impl Loss {
    /// Takes note of the end of a channel over a path of this round trip.
    pub(super) fn note(&mut self, cause: ConnectionError, round_trip: Option<Duration>) {
        self.0.get_or_insert_with(|| (cause, Instant::now() + GRACE + 2 * round_trip.unwrap_or_default()));
    }

    /// `limit`, or less if it is to be told before.
    pub(super) fn bound(&self, limit: Duration) -> Duration {
        self.0.as_ref().map_or(limit, |(_, due)| due.saturating_duration_since(Instant::now()).min(limit))
    }

    /// Tells it, once, when it is due and nothing has come that is still to be taken, or long after.
    pub(super) fn tell(&mut self, all_taken: bool) -> Result<(), LinkError> {
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
    fn is_told_once_and_not_at_once() {
        let mut loss = Loss::default();
        const LONG: Duration = Duration::from_secs(86_400);
        assert!(loss.tell(true).is_ok() && loss.bound(LONG) == LONG);
        // A path so long that the test is over before.
        loss.note(ConnectionError::Closed, Some(Duration::from_secs(3600)));
        let left = loss.bound(LONG);
        assert!(loss.tell(true).is_ok() && left > Duration::from_secs(3600) && left < LONG);
        let mut loss = Loss(Some((ConnectionError::Closed, Instant::now())));
        loss.note(ConnectionError::TimedOut, None);
        assert_eq!(loss.bound(LONG), Duration::ZERO, "the first end counts");
        assert!(loss.tell(false).is_ok());
        assert!(matches!(loss.tell(true), Err(LinkError::DataLost(ConnectionError::Closed))));
        assert!(loss.tell(true).is_ok() && loss.bound(LONG) == LONG);
        let mut loss = Loss(Some((ConnectionError::Closed, Instant::now() - BUSY_GRACE)));
        assert!(loss.tell(false).is_err());
    }
}
