//! Receiving.

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

impl Connection {
    /// Receives bytes of the stream: as many as have come and fit, at least one, or none at its end. Waits until there are some.
    ///
    /// # Errors
    /// [`Error::TimedOut`] at the deadline, [`Error::Reset`] or [`Error::Ended`] if the peer has gone without ending its stream.
    pub fn recv(&self, to: &mut [u8], deadline: Option<Instant>) -> Result<usize, Error> {
        let _receiver = lock(&self.0.receiver);
        Ok(self.0.receive(to, Some(deadline))?.len)
    }

    /// As [`Connection::recv`], but never waits for the peer to send something.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if nothing has come.
    pub fn try_recv(&self, to: &mut [u8]) -> Result<usize, Error> {
        let _receiver = lock(&self.0.receiver);
        Ok(self.0.receive(to, None)?.len)
    }

    /// Receives a message, where streaming is off. `None` at the end.
    ///
    /// # Errors
    /// As [`Connection::recv`].
    pub fn recv_message(&self, to: &mut [u8], deadline: Option<Instant>) -> Result<Option<Received>, Error> {
        let _receiver = lock(&self.0.receiver);
        self.0.receive_message(to, Some(deadline))
    }

    /// As [`Connection::recv_message`], but never waits for a message to begin.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if none has come.
    pub fn try_recv_message(&self, to: &mut [u8]) -> Result<Option<Received>, Error> {
        let _receiver = lock(&self.0.receiver);
        self.0.receive_message(to, None)
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
            Next::Sink { target, len, end } => return Found::Sink { target, len, ends: end },
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
    Sink { target: u64, len: usize, ends: bool },
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
    /// Takes what there is; waits for the first of it unless `wait` is `None`.
    fn receive(&self, to: &mut [u8], wait: Option<Option<Instant>>) -> Result<Taken, Error> {
        let mut len = 0;
        let mut sink = None;
        if to.is_empty() {
            return Ok(Taken { len: 0, ends: false, is_end: false });
        }
        if wait.is_none() {
            self.context.poll();
        }
        // Not while a lock is held that the sender needs.
        self.finish(to.as_ptr() as usize, to.len(), None)?;
        loop {
            let mut state = lock(&self.state);
            let found = state.copy_next(&mut to[len..]);
            self.flush(&mut state);
            match found {
                Found::Copied { len: copied, ends } => {
                    len += copied;
                    if len == to.len() || (ends && self.settings.messages) {
                        return Ok(Taken { len, ends, is_end: false });
                    }
                }
                Found::Sink { target, len: written, ends } => {
                    // It is the one that this call has offered.
                    debug_assert_eq!(sink, Some(target));
                    state.memory.take_back(target);
                    state.end.as_mut().expect("an end with a sink").consume(written);
                    self.flush(&mut state);
                    return Ok(Taken { len: len + written, ends, is_end: false });
                }
                Found::Source(left) => {
                    let direct =
                        len == 0 && to.len().min(left) >= (self.settings.zero_copy_min as usize).min(LANDING_LEN);
                    if !direct && len > 0 {
                        return Ok(Taken { len, ends: false, is_end: false });
                    }
                    if direct {
                        drop(state);
                        match self.fetch(to)? {
                            Some(taken) => return Ok(taken),
                            None => continue,
                        }
                    }
                    let fetches = state.fetch(None);
                    self.flush(&mut state);
                    drop(state);
                    if !fetches {
                        self.wait_for_queue()?;
                    }
                }
                Found::Fetching | Found::Nothing if len > 0 => return Ok(Taken { len, ends: false, is_end: false }),
                Found::Fetching => {
                    drop(state);
                    let there = |state: &mut State| {
                        let next = state.end.as_ref().map_or(Next::Nothing, End::next);
                        (next != Next::Fetching).then_some(Ok(()))
                    };
                    self.wait(None, there)?;
                }
                Found::Nothing => {
                    state.check()?;
                    if state.end.as_ref().is_some_and(End::is_aborted) {
                        return Err(Error::Reset);
                    }
                    let Some(deadline) = wait else { return Err(Error::WouldBlock) };
                    if sink.is_none() && to.len() >= self.settings.zero_copy_min as usize {
                        sink = self.offer_sink(&mut state, to)?;
                    }
                    drop(state);
                    self.wait_for_something(sink.as_mut(), deadline)?;
                }
                Found::End if len > 0 => return Ok(Taken { len, ends: false, is_end: false }),
                Found::End => return Ok(Taken { len: 0, ends: false, is_end: true }),
            }
        }
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
            Ok(true) => self.wait(None, |state| state.fetched.remove(&target).map(Ok).map(|taken| taken.map(Some))),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        if !matches!(taken, Ok(Some(_))) {
            lock(&self.state).memory.take_back(target);
        }
        Ok(taken?.map(|(len, ends)| Taken { len, ends, is_end: false }))
    }

    fn wait_for_queue(&self) -> Result<(), Error> {
        self.wait(None, |state| {
            (state.fetch(None) || !matches!(state.end.as_ref()?.next(), Next::Source { .. })).then_some(Ok(()))
        })
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
        self.flush(state);
        Ok(offered.then_some(target))
    }

    /// Waits until there is something to receive. If that takes too long, a sink is taken back first.
    fn wait_for_something(&self, sink: Option<&mut u64>, deadline: Option<Instant>) -> Result<(), Error> {
        let there = |state: &mut State| {
            let end = state.end.as_ref()?;
            (end.next() != Next::Nothing || end.is_aborted()).then_some(Ok(()))
        };
        let result = self.wait(deadline, there);
        let Some(&mut sink) = sink else { return result };
        match result {
            Err(Error::TimedOut) => {
                {
                    let mut state = lock(&self.state);
                    if let Some(end) = &mut state.end {
                        end.cancel_sink();
                    }
                    self.flush(&mut state);
                }
                self.wait(None, |state| match state.free_sinks.remove(&sink) {
                    true => Some(Err(Error::TimedOut)),
                    false => there(state),
                })
            }
            other => {
                let mut state = lock(&self.state);
                state.free_sinks.remove(&sink);
                if other.is_err() {
                    state.memory.take_back(sink);
                }
                other
            }
        }
    }

    fn receive_message(&self, to: &mut [u8], wait: Option<Option<Instant>>) -> Result<Option<Received>, Error> {
        let mut wait = wait;
        let mut len = 0;
        let mut truncated = false;
        let mut rest = Vec::new();
        loop {
            let taken = if len < to.len() {
                self.receive(&mut to[len..], wait)?
            } else {
                // What does not fit is received and forgotten; one byte too many tells that there is some.
                rest.resize(4096, 0);
                self.receive(&mut rest, wait)?
            };
            if taken.is_end {
                return if wait == Some(None) && (len > 0 || truncated) { Err(Error::Reset) } else { Ok(None) };
            }
            match len < to.len() {
                true => len += taken.len,
                false => truncated |= taken.len > 0,
            }
            if taken.ends {
                return Ok(Some(Received { len, truncated }));
            }
            // A message that has begun is there soon.
            wait = Some(None);
        }
    }
}
