//! Sending.

use super::{Connection, Inner, State};
use crate::context::lock;
use crate::core::{End, Next, Withdrawal};
use crate::error::Error;
use std::time::Instant;
use thruway_fabric::Access;

impl Connection {
    /// Sends all of the bytes; as one message, if streaming is off. Waits while there is no room for them. Large ones are not copied: the
    /// peer reads them, or they go to where it wants them, before this returns.
    ///
    /// # Errors
    /// [`Error::TimedOut`] at the deadline; then some of the bytes may have been sent. Otherwise why the connection has ended.
    pub fn send(&self, bytes: &[u8], deadline: Option<Instant>) -> Result<(), Error> {
        let inner = &self.0;
        let _sender = lock(&inner.sender);
        let mut rest = bytes;
        if inner.settings.scheme.has_rendezvous() && bytes.len() >= inner.settings.zero_copy_min as usize {
            rest = inner.send_source(bytes, deadline)?;
            if rest.is_empty() {
                return Ok(());
            }
        }
        inner.send_copied(rest, true, deadline)
    }

    /// As [`Connection::send`], as far as there is room. Returns how many bytes were taken; a message is taken whole.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if there is none.
    pub fn try_send(&self, bytes: &[u8]) -> Result<usize, Error> {
        let inner = &self.0;
        let _sender = lock(&inner.sender);
        inner.context.poll();
        let mut state = lock(&inner.state);
        let mut taken = 0;
        loop {
            if inner.settings.messages && taken == 0 && state.room()? < bytes.len().max(1) {
                let most = inner.settings.stage_len;
                let too_long = bytes.len() > most as usize;
                return Err(if too_long {
                    Error::MessageTooLong { len: bytes.len(), most }
                } else {
                    Error::WouldBlock
                });
            }
            match state.stage(&bytes[taken..], true)? {
                Some(len) => taken += len,
                None if taken == 0 => return Err(Error::WouldBlock),
                None => break,
            }
            if taken == bytes.len() {
                break;
            }
        }
        inner.flush(&mut state);
        Ok(taken)
    }
}

impl State {
    fn room(&mut self) -> Result<usize, Error> {
        self.check_sending()?;
        Ok(self.end.as_ref().map_or(0, End::stage_room))
    }

    pub(super) fn check_sending(&self) -> Result<(), Error> {
        if self.has_shut_down || self.end.as_ref().is_some_and(End::is_aborted) {
            return Err(Error::Shutdown);
        }
        self.check()
    }

    /// Copies what there is room for; `None` if there is none. The last of the bytes may be the end of a message.
    fn stage(&mut self, bytes: &[u8], ends: bool) -> Result<Option<usize>, Error> {
        self.check_sending()?;
        let Some(end) = &mut self.end else { return Ok(None) };
        let mut taken = 0;
        loop {
            let span = end.stage(bytes.len() - taken);
            if span.len == 0 && taken < bytes.len() {
                return Ok((taken > 0).then_some(taken));
            }
            self.memory.write_stage(span, &bytes[taken..]);
            taken += span.len;
            end.write(span.len, ends && taken == bytes.len());
            if taken == bytes.len() {
                return Ok(Some(taken));
            }
        }
    }
}

impl Inner {
    pub(super) fn send_copied(&self, bytes: &[u8], ends: bool, deadline: Option<Instant>) -> Result<(), Error> {
        let mut rest = bytes;
        loop {
            let staged = self.wait(deadline, |state| state.stage(rest, ends).transpose())?;
            rest = &rest[staged..];
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Lets the peer take the bytes from where they are. Returns what has to be copied because it does not.
    fn send_source<'a>(&self, bytes: &'a [u8], deadline: Option<Instant>) -> Result<&'a [u8], Error> {
        let mut rest = bytes;
        while rest.len() >= self.settings.zero_copy_min as usize {
            let part = &rest[..rest.len().min(crate::wire::SPAN_MAX as usize)];
            let region = self.register(part.as_ptr().cast_mut(), part.len(), Access::REMOTE_READ)?;
            let remote = region.remote(0);
            let source = {
                let mut state = lock(&self.state);
                state.check_sending()?;
                let source = state.memory.lend(region, 0);
                (state.awaited_source, state.source_sent) = (Some(source), None);
                let ends = part.len() == rest.len();
                if !state.end.as_mut().is_some_and(|end| end.offer_source(source, part.len(), remote, ends)) {
                    state.memory.take_back(source);
                    return Ok(rest);
                }
                self.flush(&mut state);
                source
            };
            let sent = self.wait_for_source(source, deadline);
            let mut state = lock(&self.state);
            state.awaited_source = None;
            if sent.is_err() {
                state.memory.take_back(source);
            }
            drop(state);
            let sent = sent?;
            rest = &rest[sent..];
            if sent < part.len() {
                return Ok(rest);
            }
        }
        Ok(rest)
    }

    fn wait_for_source(&self, source: u64, deadline: Option<Instant>) -> Result<usize, Error> {
        let patience = Instant::now() + self.settings.source_timeout;
        let patience = deadline.map_or(patience, |at| at.min(patience));
        let done = |state: &mut State| state.source_sent.take().map(Ok);
        let first = self.wait(Some(patience), |state| {
            done(state).or_else(|| {
                // Both ends wait for the other to read: neither would, unless another thread does.
                let both = matches!(state.end.as_ref().map(End::next), Some(Next::Source { .. }));
                (both && self.receiver.try_lock().is_ok()).then_some(Err(Error::WouldBlock))
            })
        });
        match first {
            Err(Error::TimedOut | Error::WouldBlock) => {}
            other => return other,
        }
        // Whatever the peer has begun to read is waited for: the memory is in use.
        let withdrawal = {
            let mut state = lock(&self.state);
            let withdrawal = state.end.as_mut().map(|end| end.withdraw(source));
            self.flush(&mut state);
            withdrawal
        };
        debug_assert_ne!(withdrawal, Some(Withdrawal::TooLate), "nothing is sent behind a source while it waits");
        self.wait(None, done)
    }
}
