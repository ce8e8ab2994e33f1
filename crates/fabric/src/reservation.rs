//! Room in a completion queue, kept for what queue pairs can have posted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{Error, Result};

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

/// What room is kept in.
pub(crate) trait CqCapacity {
    fn room(&self) -> &Reservation;
}

/// Room for a shared receive queue's receives in every completion queue where they may finish: once in each, however
/// many queue pairs finish there.
pub(crate) struct SharedCqCapacity<Q> {
    each: usize,
    queues: Mutex<Vec<(Arc<Q>, usize)>>,
}

impl<Q: CqCapacity> SharedCqCapacity<Q> {
    pub(crate) fn new(each: u32) -> SharedCqCapacity<Q> {
        SharedCqCapacity { each: each as usize, queues: Mutex::default() }
    }

    /// One more queue pair finishes its receives there.
    pub(crate) fn join(&self, queue: &Arc<Q>) -> Result<()> {
        let mut queues = self.queues.lock_unpoisoned();
        if let Some((_, users)) = queues.iter_mut().find(|(known, _)| Arc::ptr_eq(known, queue)) {
            *users += 1;
            return Ok(());
        }
        queue.room().take(self.each)?;
        queues.push((Arc::clone(queue), 1));
        Ok(())
    }

    /// One queue pair less does.
    pub(crate) fn leave(&self, queue: &Arc<Q>) {
        let mut queues = self.queues.lock_unpoisoned();
        let Some(at) = queues.iter().position(|(known, _)| Arc::ptr_eq(known, queue)) else { return };
        queues[at].1 -= 1;
        if queues[at].1 == 0 {
            queue.room().give_back(self.each as u32);
            queues.swap_remove(at);
        }
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

    struct Queue(Reservation);

    impl CqCapacity for Queue {
        fn room(&self) -> &Reservation {
            &self.0
        }
    }

    #[test]
    fn a_shared_queue_takes_room_once_in_each_completion_queue() {
        let (a, b) = (Arc::new(Queue(Reservation::new(10))), Arc::new(Queue(Reservation::new(5))));
        let shared = SharedCqCapacity::new(8);
        shared.join(&a).unwrap();
        shared.join(&a).unwrap();
        assert!(shared.join(&b).is_err());
        shared.leave(&a);
        assert!(a.0.take(3).is_err(), "one queue pair is still there");
        shared.leave(&a);
        a.0.take(10).unwrap();
    }
}
