//! Waits of the protocols for delegations: before a file of a share is read or changed.

use crate::delegations::Change;
use crate::share::Target;
use rustix::io::Errno;
use std::sync::Arc;
use thruway_vfs::identity::FileIdentity;
use thruway_vfs::{FileId, Result};

impl Target<'_> {
    /// Identity of the file.
    pub(crate) fn key(&self) -> FileIdentity {
        self.share.identity(&self.file)
    }

    /// Refuses the removal of names in the grace period: clients may still reclaim files that have no other name.
    ///
    /// # Errors
    /// `EAGAIN` in the grace period.
    pub(crate) fn check_grace(&self) -> Result<()> {
        if self.share.delegations.is_grace() { Err(Errno::AGAIN) } else { Ok(()) }
    }

    async fn change_of(&self, file: &FileId, client: Option<u64>) -> Result<Option<Change>> {
        let Some(holder) = self.share.delegations.holder() else { return Ok(None) };
        let (holder, file) = (Arc::clone(holder), self.share.identity(file));
        holder.begin_change(file.clone(), client).await?;
        Ok(Some(Change::new(holder, file)))
    }

    /// To be held while the file is changed: its attributes, its names, or its data where the file system does not see to that.
    pub(crate) async fn change(&self, client: Option<u64>) -> Result<Option<Change>> {
        self.change_of(&self.file, client).await
    }

    /// As [`Target::change`], of the data of a file that is not open: a file system with leases sees to it when it opens the file.
    pub(crate) async fn change_data(&self, client: Option<u64>) -> Result<Option<Change>> {
        let is_kept_by_leases = !self.share.files.is_private() && self.share.delegations.holder_for_writing().is_none();
        if is_kept_by_leases { Ok(None) } else { self.change(client).await }
    }

    /// As [`Target::change`], of what an entry of this directory leads to, if there is one.
    pub(crate) async fn change_entry(&self, name: &[u8]) -> Result<Option<Change>> {
        if self.share.delegations.holder().is_none() {
            return Ok(None);
        }
        // Where there is nothing, what is to be done with it fails for the same reason.
        let Ok((file, _)) = self.share.files.look_up(&self.who, &self.file, name).await else { return Ok(None) };
        self.change_of(&file, None).await
    }

    /// To be called before the file is read, or its attributes are, by one who does not have it open.
    pub(crate) async fn look(&self, client: Option<u64>) -> Result<()> {
        match self.share.delegations.holder_for_writing() {
            Some(holder) => holder.look(self.key(), client).await,
            None => Ok(()),
        }
    }

    /// Whether what there is to know of another file of the share may be old, because a client keeps what it has written to it.
    pub(crate) fn is_kept(&self, file: &FileId, client: Option<u64>) -> bool {
        let holder = self.share.delegations.holder_for_writing();
        holder.is_some_and(|holder| holder.is_kept(&self.share.identity(file), client))
    }
}
