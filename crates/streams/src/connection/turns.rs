//! Whose turn it is: one thread at a time sends on a connection, and one receives.

use super::{Inner, State};
use crate::context::lock;
use crate::error::Error;
use std::time::Instant;

/// Which direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

/// Until when a call may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// Not at all.
    None,
    Until(Instant),
    Endless,
}

impl Patience {
    pub(super) fn of(deadline: Option<Instant>) -> Patience {
        deadline.map_or(Patience::Endless, Patience::Until)
    }

    pub(super) fn deadline(self) -> Option<Instant> {
        match self {
            Patience::None => Some(Instant::now()),
            Patience::Until(deadline) => Some(deadline),
            Patience::Endless => None,
        }
    }

    /// What a call says whose patience is over.
    pub(super) fn over(self) -> Error {
        if self == Patience::None { Error::WouldBlock } else { Error::TimedOut }
    }
}

/// A thread has its turn for as long as this lives.
pub(super) struct Turn<'a> {
    inner: &'a Inner,
    direction: Direction,
}

impl Inner {
    /// Waits for this thread's turn.
    pub(super) fn turn(&self, direction: Direction, patience: Patience) -> Result<Turn<'_>, Error> {
        let take = |state: &mut State| {
            let busy = state.busy(direction);
            (!std::mem::replace(busy, true)).then_some(Ok(()))
        };
        let taken = take(&mut lock(&self.state));
        match taken {
            Some(_) => {}
            None if patience == Patience::None => return Err(Error::WouldBlock),
            None => {
                lock(&self.state).waits_for_turn += 1;
                let taken = self.wait(patience.deadline(), take);
                lock(&self.state).waits_for_turn -= 1;
                taken?;
            }
        }
        Ok(Turn { inner: self, direction })
    }
}

impl State {
    pub(super) fn busy(&mut self, direction: Direction) -> &mut bool {
        match direction {
            Direction::Send => &mut self.sends,
            Direction::Receive => &mut self.receives,
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.inner.state);
        *state.busy(self.direction) = false;
        let others_wait = state.waits_for_turn > 0;
        drop(state);
        if others_wait {
            self.inner.tell();
        }
    }
}
