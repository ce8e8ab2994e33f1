//! Files that are delegated to clients, as the protocols see them: what others do to such a file waits until it is given back.

use crate::share::Target;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use thruway_vfs::identity::FileIdentity;
use thruway_vfs::{FileId, FileSystem, Op, Result};

/// What of a share's files is delegated to clients that can be called back (RFC 8881, section 10.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Delegate {
    /// Nothing.
    Nothing,
    /// Reading: the client sees no change by others until it has given the file back. Where other programs reach the files, the
    /// kernel has to keep them waiting ([`FileSystem::lease`]).
    Reading,
    /// Writing as well: the client keeps what it writes, so that programs of this host would read what is old.
    Writing,
}

impl Delegate {
    /// What fits a file system: all if only clients reach its files.
    pub fn of(files: &dyn FileSystem) -> Delegate {
        if files.is_private() { Delegate::Writing } else { Delegate::Reading }
    }
}

/// Who knows to whom files are delegated.
pub(crate) trait Holder: Send + Sync {
    /// Begins a change by a client, if it is known which; nothing is delegated until [`Holder::end_change`]. `EINPROGRESS` if the
    /// file has not been given back yet: the caller is to try again.
    fn begin_change(&self, file: FileIdentity, client: Option<u64>) -> Op<'_, ()>;

    /// Ends it.
    fn end_change(&self, file: &FileIdentity);

    /// True if a client other than this one has a delegation for writing of the file: its size and times on the server may then be
    /// outdated. Recalls the delegation.
    fn is_kept(&self, file: &FileIdentity, client: Option<u64>) -> bool;

    /// True in the grace period: clients may still reclaim state from before a restart.
    fn is_grace(&self) -> bool;

    /// As [`Holder::begin_change`], for a reader: only delegations for writing conflict with it.
    fn look(&self, file: FileIdentity, client: Option<u64>) -> Op<'_, ()>;
}

/// The holder of a share's files, when there is one.
#[derive(Default)]
pub struct Delegations(OnceLock<Held>);

/// What every call looks at.
struct Held {
    holder: Arc<dyn Holder>,
    /// Something can be delegated: there are clients that can be called.
    is_used: Arc<AtomicBool>,
    /// On some share, for writing.
    for_writing: bool,
}

impl Delegations {
    pub(crate) fn are_of(&self, holder: Arc<dyn Holder>, is_used: Arc<AtomicBool>, for_writing: bool) {
        // There is one version 4.
        let _ = self.0.set(Held { holder, is_used, for_writing });
    }

    fn held(&self) -> Option<&Held> {
        self.0.get().filter(|held| held.is_used.load(Ordering::SeqCst))
    }

    fn holder(&self) -> Option<&Arc<dyn Holder>> {
        self.held().map(|held| &held.holder)
    }

    fn holder_for_writing(&self) -> Option<&Arc<dyn Holder>> {
        self.held().filter(|held| held.for_writing).map(|held| &held.holder)
    }
}

/// A change in progress.
pub(crate) struct Change {
    holder: Arc<dyn Holder>,
    file: FileIdentity,
}

impl Drop for Change {
    fn drop(&mut self) {
        self.holder.end_change(&self.file);
    }
}

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
        let is_grace = self.share.delegations.0.get().is_some_and(|held| held.holder.is_grace());
        if is_grace { Err(Errno::AGAIN) } else { Ok(()) }
    }

    async fn change_of(&self, file: &FileId, client: Option<u64>) -> Result<Option<Change>> {
        let Some(holder) = self.share.delegations.holder() else { return Ok(None) };
        let (holder, file) = (Arc::clone(holder), self.share.identity(file));
        holder.begin_change(file.clone(), client).await?;
        Ok(Some(Change { holder, file }))
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
