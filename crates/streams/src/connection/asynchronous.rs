//! Sending without copying and without waiting: asynchronous zero copy (AZ-SDP).
//!
//! Whole pages of the program's buffer are write-protected and announced to the peer, which reads them when it receives. What is before and
//! behind them is copied. A program that writes to the buffer before the peer has read it waits for that, or has the bytes put elsewhere.

use super::turns::{Direction, Patience};
use super::{Connection, Inner, State};
use crate::context::lock;
use crate::core::Claim;
use crate::error::Error;
use crate::protect::{self, PAGE};
use crate::settings::OnWrite;
use std::sync::Arc;
use std::time::Instant;
use thruway_fabric::{Access, Buffer};

/// What an allocator writes to the ends of a buffer when it frees its neighbours: not protected.
const MARGIN: usize = 64;
/// Sends before faults are looked at.
const SENDS_MIN: u32 = 8;

/// Buffers that are being sent, and how often the program wanted one back too early.
#[derive(Default)]
pub(super) struct Asynchronous {
    sends: u32,
    faults: u32,
    protected: Vec<Sent>,
    /// Some were not read before the connection ended.
    lost: bool,
}

/// A buffer that is being sent.
struct Sent {
    source: u64,
    at: usize,
    len: usize,
    /// The program has written to it.
    faulted: bool,
    /// It is to be put elsewhere, which could not be asked for yet.
    waits_for_claim: bool,
}

/// What has become of buffers that were sent without waiting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AsynchronousSends {
    /// Buffers that were protected.
    pub sends: u32,
    /// Of these, buffers that the program wrote to too early.
    pub faults: u32,
}

impl Connection {
    /// As [`Connection::send`], but a large buffer is neither copied nor waited for: the peer reads it when it receives. Until then, its pages
    /// are write-protected: a thread that writes to them waits, as the settings say.
    ///
    /// Small buffers, memory that cannot be protected (shared with others, or of a file), and all buffers once the program has
    /// written to too many too early are sent as by [`Connection::send`].
    ///
    /// # Safety
    /// The memory must stay allocated until it is the program's again: [`Connection::wait_sent`] has returned, or the connection has been
    /// dropped. Nor may it be given back to an allocator, which would write to it while it holds locks that others need. System calls that
    /// write to it fail with `EFAULT` until then, and it may not be the target of one-sided operations.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub unsafe fn send_asynchronously(&self, bytes: &[u8], deadline: Option<Instant>) -> Result<(), Error> {
        let inner = &self.0;
        let (start, end) = (bytes.as_ptr() as usize, bytes.as_ptr() as usize + bytes.len());
        let first = (start + MARGIN).next_multiple_of(PAGE);
        let last = end.saturating_sub(MARGIN) / PAGE * PAGE;
        let long_enough = last.saturating_sub(first) >= (inner.settings.zero_copy_min as usize).max(PAGE);
        if !long_enough || !inner.may_protect() || !protect::can_protect() {
            return self.send(bytes, deadline);
        }
        let _turn = inner.turn(Direction::Send, Patience::of(deadline))?;
        let (head, rest) = bytes.split_at(first - start);
        let (middle, tail) = rest.split_at(last - first);
        inner.send_copied(head, false, deadline)?;
        if !inner.announce(middle, deadline)? {
            inner.send_copied(middle, false, deadline)?;
        }
        inner.send_copied(tail, true, deadline)
    }

    /// Waits until the peer has read everything that was sent without copying it, and its memory is the program's again.
    ///
    /// # Errors
    /// [`Error::TimedOut`], or why the connection has ended.
    pub fn wait_sent(&self, deadline: Option<Instant>) -> Result<(), Error> {
        self.0.wait(deadline, |state| {
            let end = state.end.as_ref()?;
            if state.asynchronous.lost {
                return Some(Err(state.check().err().unwrap_or(Error::Reset)));
            }
            (state.asynchronous.protected.is_empty() && !end.has_sources()).then_some(Ok(()))
        })
    }

    /// What has become of buffers that were sent without waiting.
    pub fn asynchronous_sends(&self) -> AsynchronousSends {
        let state = lock(&self.0.state);
        AsynchronousSends { sends: state.asynchronous.sends, faults: state.asynchronous.faults }
    }
}

impl Inner {
    /// Whether protecting has paid so far.
    fn may_protect(&self) -> bool {
        let asynchronous = &lock(&self.state).asynchronous;
        let allowed = u64::from(asynchronous.sends) * u64::from(self.settings.faults_max_percent);
        asynchronous.sends < SENDS_MIN || u64::from(asynchronous.faults) * 100 <= allowed
    }

    /// Protects whole pages and announces them. False if that cannot be.
    fn announce(self: &Arc<Self>, bytes: &[u8], deadline: Option<Instant>) -> Result<bool, Error> {
        let at = bytes.as_ptr() as usize;
        let region = self.register(bytes.as_ptr().cast_mut(), bytes.len(), Access::REMOTE_READ)?;
        let remote = region.remote(0);
        self.wait(deadline, |state| state.has_source_room().then_some(Ok(())))?;
        let mut state = lock(&self.state);
        state.check_sending()?;
        let source = state.memory.lend(region, 0);
        if !protect::protect(at, bytes.len(), (Arc::downgrade(self), source)) {
            state.memory.take_back(source);
            return Ok(false);
        }
        if !state.end.as_mut().is_some_and(|end| end.offer_source(source, bytes.len(), remote, false)) {
            state.memory.take_back(source);
            protect::unprotect(at, &Arc::downgrade(self), source);
            return Ok(false);
        }
        state.asynchronous.sends += 1;
        state.asynchronous.protected.push(Sent {
            source,
            at,
            len: bytes.len(),
            faulted: false,
            waits_for_claim: false,
        });
        self.post_actions(&mut state);
        Ok(true)
    }

    /// Waits until none of this memory is being sent any more, by whatever connection: before writing to it oneself.
    pub(super) fn wait_until_sent(&self, at: usize, len: usize, patience: Patience) -> Result<(), Error> {
        while let Some((start, (weak, source))) = protect::sender_of(at, len) {
            let Some(sender) = weak.upgrade() else {
                protect::unprotect(start, &weak, source);
                continue;
            };
            sender.wanted(source);
            let is_done = |state: &mut State| state.asynchronous.find(source).is_none().then_some(Ok(()));
            match sender.wait(patience.deadline(), is_done) {
                Err(Error::TimedOut) => return Err(patience.over()),
                _ => continue,
            }
        }
        Ok(())
    }

    /// The program wants to write to memory that is being sent.
    pub(crate) fn wanted(&self, source: u64) {
        let mut state = lock(&self.state);
        let Some(sent) = state.asynchronous.find(source) else { return };
        let is_first = !std::mem::replace(&mut sent.faulted, true);
        sent.waits_for_claim = is_first && self.settings.on_write == OnWrite::Copy;
        state.asynchronous.faults += u32::from(is_first);
        self.post_actions(&mut state);
        drop(state);
        self.tell();
    }

    /// Asks whether buffers may be put elsewhere, where that could not be asked before.
    pub(super) fn claim_again(&self, state: &mut State) {
        while let Some(sent) = state.asynchronous.protected.iter_mut().find(|sent| sent.waits_for_claim) {
            let source = sent.source;
            match state.end.as_mut().map(|end| end.claim(source)) {
                Some(Claim::Busy) => return,
                Some(Claim::Granted) => self.claimed(state, source),
                Some(Claim::Asked | Claim::Refused | Claim::Done) | None => {}
            }
            if let Some(sent) = state.asynchronous.find(source) {
                sent.waits_for_claim = false;
            }
        }
    }

    /// Puts the bytes of a source elsewhere.
    pub(super) fn claimed(&self, state: &mut State, source: u64) {
        let Some(&mut Sent { at, len, .. }) = state.asynchronous.find(source) else { return };
        let copy = Buffer::sparse(len).map(Arc::new).map_err(|error| Error::Memory(error.into())).and_then(|copy| {
            // SAFETY: mapped, by the promise of `send_asynchronously`, and not written to while it is protected.
            copy.write(0, unsafe { std::slice::from_raw_parts(at as *const u8, len) });
            Ok(self.pd.register(&copy, Access::REMOTE_READ)?)
        });
        let Some(end) = &mut state.end else { return };
        match copy {
            Ok(region) => {
                let remote = region.remote(0);
                let new = state.memory.lend(region, 0);
                end.replace(source, new, remote);
                state.released(source);
                state.memory.take_back(source);
            }
            Err(error) => {
                // It stays where it is, and the lock is given back.
                tracing::warn!(%error, "copying what is being sent");
                if let Some(remote) = state.memory.remote(source) {
                    end.replace(source, source, remote);
                }
            }
        }
    }
}

impl State {
    fn has_source_room(&self) -> bool {
        self.asynchronous.protected.len() < crate::core::SOURCES_MAX
    }

    /// A buffer is to be put elsewhere, when that can be asked for.
    pub(super) fn claim_later(&mut self, source: u64) {
        if let Some(sent) = self.asynchronous.find(source) {
            sent.waits_for_claim = true;
        }
    }

    /// The memory of a source is the program's again.
    pub(super) fn released(&mut self, source: u64) {
        let sent = &mut self.asynchronous.protected;
        if let Some(at) = sent.iter().position(|sent| sent.source == source) {
            let sent = sent.swap_remove(at);
            protect::unprotect(sent.at, &self.own, source);
        }
    }

    /// The connection has ended: nothing is sent any more.
    pub(super) fn release_all(&mut self) {
        self.asynchronous.lost |= self.end.as_ref().is_some_and(|end| end.has_sources());
        for sent in self.asynchronous.protected.drain(..) {
            protect::unprotect(sent.at, &self.own, sent.source);
        }
    }
}

impl Asynchronous {
    fn find(&mut self, source: u64) -> Option<&mut Sent> {
        self.protected.iter_mut().find(|sent| sent.source == source)
    }
}
