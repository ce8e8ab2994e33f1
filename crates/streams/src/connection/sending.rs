//! Sending.

use super::turns::{Direction, Patience};
use super::{Connection, Inner, State};
use crate::context::lock;
use crate::core::{End, Next};
use crate::error::Error;
use std::time::Instant;
use thruway_fabric::Access;

impl Connection {
    /// Sends all of the bytes; as one message, if streaming is off. Waits while there is no room for them. Without a deadline, large ones
    /// are not copied: the peer reads them, or they go to where it wants them, before this returns; if it does not soon, they are copied
    /// after all. With a deadline, all are copied, as there is no taking back what a peer that stands still may be about to read.
    ///
    /// # Errors
    /// [`Error::TimedOut`] at the deadline: then some of the bytes may have been sent. After a part of a message nothing more can be sent
    /// ([`Error::MessageCut`]). Otherwise why the connection has ended.
    pub fn send(&self, bytes: &[u8], deadline: Option<Instant>) -> Result<(), Error> {
        let inner = &self.0;
        let _turn = inner.turn(Direction::Send, Patience::of(deadline))?;
        let is_large = bytes.len() >= inner.settings.zero_copy_min as usize;
        match inner.settings.scheme.has_rendezvous() && is_large && deadline.is_none() {
            true => inner.send_source(bytes),
            false => inner.send_copied(bytes, true, deadline),
        }
    }

    /// As [`Connection::send`], as far as there is room. Returns how many bytes were taken; a message is taken whole.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] if there is none, or another thread is sending.
    pub fn try_send(&self, bytes: &[u8]) -> Result<usize, Error> {
        let inner = &self.0;
        let _turn = inner.turn(Direction::Send, Patience::None)?;
        inner.context.poll_unless_attended();
        let mut state = lock(&inner.state);
        let room = state.room()?;
        let most = inner.settings.stage_len;
        if inner.settings.messages && bytes.len() > most as usize {
            return Err(Error::MessageTooLong { len: bytes.len(), most });
        }
        if bytes.is_empty() && !inner.settings.messages {
            return Ok(0);
        }
        if room == 0 || (inner.settings.messages && room < bytes.len()) {
            if let Some(end) = &mut state.end {
                end.request_room();
            }
            inner.post_actions(&mut state);
            return Err(Error::WouldBlock);
        }
        let taken = state.stage(bytes, true)?.unwrap_or(0);
        inner.post_actions(&mut state);
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
        if self.is_cut {
            return Err(Error::MessageCut);
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
            let messages = self.settings.messages;
            let staged = self.wait(deadline, |state| {
                let staged = state.stage(rest, ends).transpose()?;
                if let Ok(staged) = &staged {
                    state.in_message = messages && !(ends && *staged == rest.len());
                }
                Some(staged)
            });
            if staged.is_err() && messages {
                let mut state = lock(&self.state);
                state.is_cut |= state.in_message;
            }
            rest = &rest[staged?..];
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Lets the peer take the bytes from where they are, and copies what it does not.
    fn send_source(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut rest = bytes;
        while rest.len() >= self.settings.zero_copy_min as usize {
            let part = &rest[..rest.len().min(crate::wire::SPAN_MAX as usize)];
            let region = self.register(part.as_ptr().cast_mut(), part.len(), Access::REMOTE_READ)?;
            let remote = region.remote(0);
            let source = {
                let mut state = lock(&self.state);
                state.check_sending()?;
                let source = state.memory.lend(region, 0);
                let ends = part.len() == rest.len();
                if !state.end.as_mut().is_some_and(|end| end.offer_source(source, part.len(), remote, ends)) {
                    state.memory.take_back(source);
                    break;
                }
                (state.awaited_source, state.source_sent) = (Some(source), None);
                self.post_actions(&mut state);
                source
            };
            let sent = self.wait_for_source(source);
            let mut state = lock(&self.state);
            state.awaited_source = None;
            if sent.is_err() {
                state.memory.take_back(source);
            }
            drop(state);
            let sent = sent?;
            rest = &rest[sent..];
            if rest.is_empty() {
                return Ok(());
            }
            if sent < part.len() {
                break;
            }
        }
        self.send_copied(rest, true, None)
    }

    fn wait_for_source(&self, source: u64) -> Result<usize, Error> {
        let patience = Instant::now() + self.settings.source_timeout;
        let done = |state: &mut State| state.source_sent.take().map(Ok);
        // A thread that receives may end that.
        lock(&self.state).waits_for_turn += 1;
        let first = self.wait(Some(patience), |state| {
            done(state).or_else(|| {
                // Both ends wait for the other to read: neither would, unless another thread does.
                let both = matches!(state.end.as_ref().map(End::next), Some(Next::Source { .. }));
                (both && !state.receives).then_some(Err(Error::WouldBlock))
            })
        });
        lock(&self.state).waits_for_turn -= 1;
        match first {
            Err(Error::TimedOut | Error::WouldBlock) => {}
            other => return other,
        }
        // Whatever the peer has begun to read is waited for: the memory is in use. So is what it is too late to withdraw.
        {
            let mut state = lock(&self.state);
            if let Some(end) = &mut state.end {
                end.withdraw(source);
            }
            self.post_actions(&mut state);
        }
        self.wait(None, done)
    }
}
