//! Receiving.

use super::turns::{Direction, Patience};
use super::{Connection, Inner, State};
use crate::context::lock;
use crate::core::{End, Next};
use crate::error::Error;
use crate::memory::LANDING_LEN;
use std::time::Instant;
use thruway_fabric::Access;

/// What [`Connection::recv_message`] has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes of the message that were copied.
    pub len: usize,
    /// The message was longer: the rest of it is lost.
    pub truncated: bool,
}

/// What a call has received of a message whose end had not come when its patience was over.
#[derive(Default)]
pub(super) struct Partial {
    bytes: Vec<u8>,
    /// More has come than fitted.
    truncated: bool,
}

impl Connection {
    /// Receives bytes of the stream: as many as have come and fit, at least one, or none at its end. Waits until there are some. Without
    /// a deadline, a large buffer may be filled without the bytes being copied.
    ///
    /// # Errors
    /// [`Error::TimedOut`] at the deadline, [`Error::Reset`] or [`Error::Ended`] if the peer has gone without ending its stream.
    pub fn recv(&self, to: &mut [u8], deadline: Option<Instant>) -> Result<usize, Error> {
        self.0.check_kind(false)?;
        let patience = Patience::of(deadline);
        let _turn = self.0.turn(Direction::Receive, patience)?;
        Ok(self.0.receive(to, patience)?.len)
    }

    /// As [`Connection::recv`], but never waits.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if nothing has come, or another thread is receiving.
    pub fn try_recv(&self, to: &mut [u8]) -> Result<usize, Error> {
        self.0.check_kind(false)?;
        let _turn = self.0.turn(Direction::Receive, Patience::None)?;
        Ok(self.0.receive(to, Patience::None)?.len)
    }

    /// Receives a message, where streaming is off. `None` at the end. What has come of a message when the deadline is over is kept for the next
    /// call, as far as it fitted: the buffers of both are best of one length.
    ///
    /// # Errors
    /// As [`Connection::recv`].
    pub fn recv_message(&self, to: &mut [u8], deadline: Option<Instant>) -> Result<Option<Received>, Error> {
        self.0.check_kind(true)?;
        let patience = Patience::of(deadline);
        let _turn = self.0.turn(Direction::Receive, patience)?;
        self.0.receive_message(to, patience)
    }

    /// As [`Connection::recv_message`], but never waits.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if no whole message has come, or another thread is receiving.
    pub fn try_recv_message(&self, to: &mut [u8]) -> Result<Option<Received>, Error> {
        self.0.check_kind(true)?;
        let _turn = self.0.turn(Direction::Receive, Patience::None)?;
        self.0.receive_message(to, Patience::None)
    }
}

impl State {
    /// Begins to read the next bytes of a source of the peer's.
    fn fetch(&mut self, user: Option<(u64, usize, usize)>) -> bool {
        let State { end, memory, .. } = self;
        end.as_mut().is_some_and(|end| end.fetch(user, |at, from, to| memory.try_lock(at, from, to)))
    }

    fn copy_next(&mut self, to: &mut [u8]) -> Found {
        let Some(end) = &mut self.end else { return Found::Nothing };
        let (len, ends) = match end.next() {
            Next::Receive { slot, offset, len, end } => {
                let taken = len.min(to.len());
                self.memory.read_receive(slot, offset, &mut to[..taken]);
                (taken, end && taken == len)
            }
            Next::Ring { offset, len, end } => {
                let taken = len.min(to.len());
                self.memory.read_ring(offset, &mut to[..taken]);
                (taken, end && taken == len)
            }
            Next::Landing { offset, len, end } => {
                let taken = len.min(to.len());
                self.memory.read_landing(offset, &mut to[..taken]);
                (taken, end && taken == len)
            }
            Next::Sink { len, end, .. } => return Found::Sink { len, ends: end },
            Next::Source { len, .. } => return Found::Source(len),
            Next::Fetching => return Found::Fetching,
            Next::Nothing => return Found::Nothing,
            Next::End => return Found::End,
        };
        end.consume(len);
        Found::Copied { len, ends }
    }
}

enum Found {
    Copied { len: usize, ends: bool },
    Sink { len: usize, ends: bool },
    Source(usize),
    Fetching,
    Nothing,
    End,
}

/// Bytes that have been received.
struct Taken {
    len: usize,
    /// A message ends with them.
    ends: bool,
    /// There are no more.
    is_end: bool,
}

impl Inner {
    fn check_kind(&self, messages: bool) -> Result<(), Error> {
        match self.settings.messages == messages {
            true => Ok(()),
            false if messages => Err(Error::WrongCall("this is a stream of bytes: it has no messages to receive")),
            false => Err(Error::WrongCall("this has messages, which are received whole")),
        }
    }

    /// Takes what there is; waits for the first of it.
    fn receive(&self, to: &mut [u8], patience: Patience) -> Result<Taken, Error> {
        let mut sink = None;
        let taken = self.receive_with(to, patience, &mut sink);
        // However the call ends, the memory is the program's again: a peer that writes to it now finds that it may not.
        if let Some(sink) = sink {
            let mut state = lock(&self.state);
            state.free_sinks.remove(&sink);
            state.memory.take_back(sink);
        }
        taken
    }

    fn receive_with(&self, to: &mut [u8], patience: Patience, sink: &mut Option<u64>) -> Result<Taken, Error> {
        let mut len = 0;
        if to.is_empty() {
            return Ok(Taken { len: 0, ends: false, is_end: false });
        }
        if patience == Patience::None {
            self.context.poll_unless_attended();
        }
        // Copying to memory that is being sent waits for the sender, which may need the lock that is held while copying.
        self.wait_until_sent(to.as_ptr() as usize, to.len(), patience)?;
        let min = self.settings.zero_copy_min as usize;
        loop {
            let mut state = lock(&self.state);
            let found = state.copy_next(&mut to[len..]);
            self.post_actions(&mut state);
            match found {
                Found::Copied { len: copied, ends } => {
                    len += copied;
                    if len == to.len() || (ends && self.settings.messages) {
                        return Ok(Taken { len, ends, is_end: false });
                    }
                }
                Found::Sink { len: written, ends } => {
                    // It is the one that this call has offered.
                    state.end.as_mut().expect("an end with a sink").consume(written);
                    self.post_actions(&mut state);
                    return Ok(Taken { len: len + written, ends, is_end: false });
                }
                Found::End => return Ok(Taken { len, ends: false, is_end: len == 0 }),
                Found::Source(_) | Found::Fetching | Found::Nothing if len > 0 => {
                    return Ok(Taken { len, ends: false, is_end: false });
                }
                // What is read into the program's memory has to be waited for. Less than the landing area is quicker copied from there.
                Found::Source(left) if patience == Patience::Endless && to.len().min(left) >= min.min(LANDING_LEN) => {
                    drop(state);
                    if let Some(taken) = self.fetch(to)? {
                        return Ok(taken);
                    }
                }
                Found::Source(_) | Found::Fetching => {
                    drop(state);
                    self.wait_for_landing(patience)?;
                }
                Found::Nothing => {
                    state.check()?;
                    if state.end.as_ref().is_some_and(End::is_aborted) {
                        return Err(Error::Reset);
                    }
                    if sink.is_some_and(|sink| state.free_sinks.remove(&sink)) {
                        *sink = None;
                    }
                    if sink.is_none() && patience == Patience::Endless && to.len() >= min {
                        *sink = self.offer_sink(&mut state, to)?;
                    }
                    drop(state);
                    let there = |state: &mut State| {
                        let end = state.end.as_ref()?;
                        (end.next() != Next::Nothing || end.is_aborted()).then_some(Ok(()))
                    };
                    self.wait_patiently(patience, there)?;
                }
            }
        }
    }

    fn wait_patiently(
        &self,
        patience: Patience,
        look: impl FnMut(&mut State) -> Option<Result<(), Error>>,
    ) -> Result<(), Error> {
        if patience == Patience::None {
            // The device was asked when the call began.
            return self.look(look).unwrap_or(Err(Error::WouldBlock));
        }
        match self.wait(patience.deadline(), look) {
            Err(Error::TimedOut) => Err(patience.over()),
            other => other,
        }
    }

    /// Has bytes of a source read into the landing area, if they are not being read, and waits for them.
    fn wait_for_landing(&self, patience: Patience) -> Result<(), Error> {
        self.wait_patiently(patience, |state| {
            state.fetch(None);
            let next = state.end.as_ref()?.next();
            (!matches!(next, Next::Source { .. } | Next::Fetching)).then_some(Ok(()))
        })
    }

    /// Has the next bytes read into the program's memory, and waits for them. `None` if they are not to be read any more.
    fn fetch(&self, to: &mut [u8]) -> Result<Option<Taken>, Error> {
        let region = self.register(to.as_mut_ptr(), to.len(), Access::LOCAL_WRITE)?;
        let target = lock(&self.state).memory.lend(region, 0);
        // The source may be withdrawn before it has begun.
        let began = self.wait(None, |state| match state.end.as_ref()?.next() {
            Next::Source { .. } => state.fetch(Some((target, 0, to.len()))).then_some(Ok(true)),
            Next::Fetching => None,
            _ => Some(Ok(false)),
        });
        let taken = match began {
            Ok(true) => self.wait(None, |state| state.fetched.remove(&target).map(|taken| Ok(Some(taken)))),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        if !matches!(taken, Ok(Some(_))) {
            lock(&self.state).memory.take_back(target);
        }
        Ok(taken?.map(|(len, ends)| Taken { len, ends, is_end: false }))
    }

    fn offer_sink(&self, state: &mut State, to: &mut [u8]) -> Result<Option<u64>, Error> {
        let len = to.len().min(crate::wire::SPAN_MAX as usize);
        let region = self.register(to.as_mut_ptr(), len, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let remote = region.remote(0);
        let target = state.memory.lend(region, 0);
        let offered = state.end.as_mut().is_some_and(|end| end.offer_sink(target, len, remote));
        if !offered {
            state.memory.take_back(target);
        }
        self.post_actions(state);
        Ok(offered.then_some(target))
    }

    fn receive_message(&self, to: &mut [u8], patience: Patience) -> Result<Option<Received>, Error> {
        // What an earlier call has received.
        let Partial { bytes, mut truncated } = std::mem::take(&mut lock(&self.state).partial);
        let mut len = bytes.len().min(to.len());
        to[..len].copy_from_slice(&bytes[..len]);
        truncated |= len < bytes.len();
        let mut rest = Vec::new();
        loop {
            let has_room = len < to.len();
            let taken = if has_room {
                self.receive(&mut to[len..], patience)
            } else {
                // What does not fit is received and forgotten.
                rest.resize(4096, 0);
                self.receive(&mut rest, patience)
            };
            let taken = taken.inspect_err(|error| {
                if matches!(error, Error::TimedOut | Error::WouldBlock) {
                    lock(&self.state).partial = Partial { bytes: to[..len].to_vec(), truncated };
                }
            })?;
            if taken.is_end {
                return if len > 0 || truncated { Err(Error::Reset) } else { Ok(None) };
            }
            match has_room {
                true => len += taken.len,
                false => truncated |= taken.len > 0,
            }
            if taken.ends {
                return Ok(Some(Received { len, truncated }));
            }
        }
    }
}
