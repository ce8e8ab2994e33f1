//! Room in a completion queue, kept for what queue pairs can have posted.

use crate::types::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts what is taken of a capacity. A queue whose users reserve cannot overflow.
pub(crate) struct Reservation {
    capacity: usize,
    taken: AtomicUsize,
}

impl Reservation {
    pub(crate) fn new(capacity: usize) -> Reservation {
        Reservation { capacity, taken: AtomicUsize::new(0) }
    }

    /// Takes room for `n` entries, all or nothing.
    pub(crate) fn take(&self, n: usize) -> Result<()> {
        let fits = |taken: usize| taken.checked_add(n).filter(|sum| *sum <= self.capacity);
        let took = self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits);
        took.map(|_| ()).map_err(|taken| Error::Limit {
            what: "completion queue entries reserved by queue pairs",
            got: taken.saturating_add(n) as u64,
            limit: self.capacity as u64,
        })
    }

    /// Takes room in both queues of a queue pair, or in neither.
    pub(crate) fn take_both(send: &Reservation, sends: u32, recv: &Reservation, recvs: u32) -> Result<()> {
        send.take(sends as usize)?;
        recv.take(recvs as usize).inspect_err(|_| send.give_back(sends))
    }

    /// Gives room back.
    pub(crate) fn give_back(&self, n: u32) {
        self.taken.fetch_sub(n as usize, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_whole_or_not_at_all() {
        let (send, recv) = (Reservation::new(10), Reservation::new(4));
        Reservation::take_both(&send, 6, &recv, 4).unwrap();
        assert!(Reservation::take_both(&send, 4, &recv, 1).is_err());
        send.take(4).unwrap();
        assert!(send.take(1).is_err() && send.take(usize::MAX).is_err());
        send.give_back(10);
        recv.give_back(4);
        Reservation::take_both(&send, 10, &recv, 4).unwrap();
    }
}
