//! Copies that go on after they have been answered (RFC 7862, section 15.2), and what has become of them.

use super::session::Session;
use super::{OFFLOADS_MAX, OFFLOADS_OF_CLIENT_MAX, State, Stateid};
use crate::status::Status;
use std::sync::Arc;

/// A copy.
pub(super) struct Offload {
    pub client: u64,
    /// Bytes that have been copied.
    copied: u64,
    /// How it has ended. The client is still to be called.
    ended: Option<Result<(), Status>>,
    /// Held while something of it is written.
    pub is_writing: Arc<tokio::sync::Mutex<()>>,
}

/// How far a copy is (OFFLOAD_STATUS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    pub copied: u64,
    pub ended: Option<Result<(), Status>>,
}

impl State {
    /// Begins a copy of a client: its number and stateid, and a lock to hold while something of it is written. `None` if there are too
    /// many.
    pub(crate) fn begin_offload(&mut self, client: u64) -> Option<(u64, Stateid, Arc<tokio::sync::Mutex<()>>)> {
        let of_client = self.offloads.values().filter(|offload| offload.client == client).count();
        if of_client >= OFFLOADS_OF_CLIENT_MAX || self.offloads.len() >= OFFLOADS_MAX {
            return None;
        }
        let (number, is_writing) = (self.number(), Arc::default());
        let offload = Offload { client, copied: 0, ended: None, is_writing: Arc::clone(&is_writing) };
        self.offloads.insert(number, offload);
        Some((number, self.stateid_of(number, 1), is_writing))
    }

    /// So much has been copied. False if the copy is not to go on: it was cancelled, or its client is gone.
    pub(crate) fn offload_copied(&mut self, number: u64, copied: u64) -> bool {
        self.offloads.get_mut(&number).map(|offload| offload.copied = copied).is_some()
    }

    /// A copy has ended.
    pub(crate) fn end_offload(&mut self, number: u64, result: Result<(), Status>) {
        if let Some(offload) = self.offloads.get_mut(&number) {
            offload.ended = Some(result);
        }
    }

    /// The client knows how its copy has ended.
    pub(crate) fn forget_offload(&mut self, number: u64) {
        self.offloads.remove(&number);
    }

    /// By which a client can be called about its copy; `Err` if nobody is to be called any more.
    pub(crate) fn offload_session(&self, number: u64) -> Result<Option<Arc<Session>>, ()> {
        self.offloads.get(&number).map(|offload| self.callable_session(offload.client)).ok_or(())
    }

    fn find_offload(&self, client: u64, stateid: Stateid) -> Result<(u64, &Offload), Status> {
        let number = self.number_of(stateid).ok_or(Status::BAD_STATEID)?;
        match self.offloads.get(&number) {
            Some(offload) if offload.client == client => Ok((number, offload)),
            _ => Err(Status::BAD_STATEID),
        }
    }

    /// OFFLOAD_STATUS
    pub(crate) fn offload_progress(&self, client: u64, stateid: Stateid) -> Result<Progress, Status> {
        let (_, offload) = self.find_offload(client, stateid)?;
        Ok(Progress { copied: offload.copied, ended: offload.ended })
    }

    /// OFFLOAD_CANCEL: the lock to wait for, so that nothing of the copy is written any more.
    pub(crate) fn cancel_offload(
        &mut self,
        client: u64,
        stateid: Stateid,
    ) -> Result<Arc<tokio::sync::Mutex<()>>, Status> {
        let (number, offload) = self.find_offload(client, stateid)?;
        if offload.ended.is_some() {
            return Err(Status::COMPLETE_ALREADY);
        }
        let is_writing = Arc::clone(&offload.is_writing);
        self.offloads.remove(&number);
        Ok(is_writing)
    }

    /// The copies of a client that is gone end.
    pub(super) fn end_offloads_of(&mut self, client: u64) {
        self.offloads.retain(|_, offload| offload.client != client);
    }
}
