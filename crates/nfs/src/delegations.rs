//! Files that are delegated to clients, as the protocols see them: what others do to such a file waits until it is given back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use thruway_vfs::identity::FileIdentity;
use thruway_vfs::{FileSystem, Op};

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

    /// True in the grace period, also while nothing can be delegated.
    pub(crate) fn is_grace(&self) -> bool {
        self.0.get().is_some_and(|held| held.holder.is_grace())
    }

    fn held(&self) -> Option<&Held> {
        self.0.get().filter(|held| held.is_used.load(Ordering::SeqCst))
    }

    pub(crate) fn holder(&self) -> Option<&Arc<dyn Holder>> {
        self.held().map(|held| &held.holder)
    }

    pub(crate) fn holder_for_writing(&self) -> Option<&Arc<dyn Holder>> {
        self.held().filter(|held| held.for_writing).map(|held| &held.holder)
    }
}

/// A change in progress.
pub(crate) struct Change {
    holder: Arc<dyn Holder>,
    file: FileIdentity,
}

impl Change {
    /// A change that [`Holder::begin_change`] has begun.
    pub(crate) fn new(holder: Arc<dyn Holder>, file: FileIdentity) -> Change {
        Change { holder, file }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.holder.end_change(&self.file);
    }
}
