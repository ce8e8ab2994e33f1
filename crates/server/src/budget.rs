//! Cooperative scheduling of connections: the work a connection may do before its reactor runs the other tasks.
//!
//! While a socket has data, its task does not wait. Without a budget, a peer that always sends more could occupy the reactor and stall
//! all its other connections. What a connection receives also counts for its host ([`slices`]).

use crate::slices;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Messages that one connection may receive between two yields.
pub const MESSAGES_MAX: usize = 64;

/// Bytes that one connection may receive between two yields.
pub const BYTES_MAX: usize = 256 << 10;

/// Largest number of messages and of bytes of any turn since the process started. A turn is the work of a connection between two yields.
static LARGEST: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Work of one connection since it last yielded.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Messages, or parts of messages that were read one by one.
    pub messages: usize,
    /// Bytes taken from the socket.
    pub bytes: usize,
}

/// Largest number of messages and of bytes that any connection of this process has received between two yields. At most
/// [`MESSAGES_MAX`] and [`BYTES_MAX`].
pub fn largest_turn() -> Turn {
    let [messages, bytes] = LARGEST.each_ref().map(|largest| largest.load(Ordering::Relaxed));
    Turn { messages, bytes }
}

/// Units of work that a connection counts for its host at once: counting each of them would cost as much as a short call.
const UNITS_AT_ONCE: usize = 8;

/// Budget of one connection.
#[derive(Debug)]
pub struct Budget {
    turn: Turn,
    /// Units of work that are counted for the host at once.
    units_at_once: usize,
    /// Work that does not count for the host yet, in bytes; a message counts as [`slices::UNIT_BYTES`].
    uncounted: usize,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { turn: Turn::default(), units_at_once: UNITS_AT_ONCE, uncounted: 0 }
    }
}

impl Budget {
    /// Budget of a handshake. It counts each unit at once: a peer could close each connection before a batch is full.
    pub(crate) fn of_handshake() -> Budget {
        Budget { units_at_once: 1, ..Budget::default() }
    }

    /// Begins to receive a message. If the budget or the slice of the host is spent, first waits for other tasks. Cancel safe.
    pub async fn begin_message(&mut self) {
        if self.turn.messages >= MESSAGES_MAX {
            self.end_turn();
            tokio::task::yield_now().await;
        }
        self.turn.messages += 1;
        self.uncounted += slices::UNIT_BYTES;
        self.count().await;
    }

    /// Number of bytes that may be received now, at least one. If the budget is spent, first yields.
    pub async fn bytes_left(&mut self) -> usize {
        if self.turn.bytes >= BYTES_MAX {
            self.end_turn();
            tokio::task::yield_now().await;
        }
        self.count().await;
        BYTES_MAX - self.turn.bytes
    }

    /// Counts work for the host; waits while the slice of the host is spent.
    pub(crate) async fn count(&mut self) {
        let units = self.uncounted / slices::UNIT_BYTES;
        if units >= self.units_at_once {
            self.uncounted %= slices::UNIT_BYTES;
            slices::begin(units).await;
        }
    }

    /// Counts bytes that have been received: at most as many as [`Budget::bytes_left`] returned.
    pub fn spend(&mut self, bytes: usize) {
        self.turn.bytes += bytes;
        self.uncounted += bytes;
    }

    /// Ends the turn: the task has waited, or is about to wait.
    pub fn end_turn(&mut self) {
        let Turn { messages, bytes } = std::mem::take(&mut self.turn);
        for (largest, turn) in LARGEST.iter().zip([messages, bytes]) {
            // Few turns are larger, and a load leaves the cache line shared with other processors.
            if turn > largest.load(Ordering::Relaxed) {
                largest.fetch_max(turn, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;
    use tokio::task::LocalSet;

    #[test]
    fn a_task_that_never_waits_yields_after_so_many_messages_and_bytes() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for (messages, bytes) in [(1, 0), (0, 4096), (1, 1 << 20)] {
            let others = Rc::new(Cell::new(0));
            let counted = Rc::clone(&others);
            LocalSet::new().block_on(&runtime, async move {
                let other = tokio::task::spawn_local(async move {
                    loop {
                        counted.set(counted.get() + 1);
                        tokio::task::yield_now().await;
                    }
                });
                let mut budget = Budget::default();
                for _ in 0..64 * MESSAGES_MAX {
                    for _ in 0..messages {
                        budget.begin_message().await;
                    }
                    let mut rest = bytes;
                    while rest > 0 {
                        let part = rest.min(budget.bytes_left().await);
                        budget.spend(part);
                        rest -= part;
                    }
                }
                other.abort();
            });
            assert!(others.get() >= 60, "{messages} messages of {bytes} bytes: {} times", others.get());
        }
        let largest = largest_turn();
        assert!(largest.messages <= MESSAGES_MAX && largest.bytes <= BYTES_MAX, "{largest:?}");
    }
}
