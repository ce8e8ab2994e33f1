//! What SCSI reservations mean to clients that know none.
//!
//! A client of NBD is to a reservation what an initiator is that has not registered. Its requests are refused by the
//! reservation's type, and a cluster that has shut somebody out may rely on it: when the command that did so is
//! answered, nothing begun before reaches the disk any more.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use tokio::sync::{RwLock, RwLockReadGuard};

/// What those without a registration may not do, and what they have in progress.
#[derive(Debug, Default)]
pub struct Fence {
    /// There are SCSI initiators that could reserve the disk.
    is_used: AtomicBool,
    closed: AtomicU8,
    under_way: RwLock<()>,
}

/// What a fence is closed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Closed {
    /// Nothing.
    Open = 0,
    /// Changes.
    ToChanges = 1,
    /// All access to data.
    ToAll = 2,
}

impl Fence {
    /// From now on somebody may close it.
    pub(crate) fn put_up(&self) {
        self.is_used.store(true, Ordering::SeqCst);
    }

    pub(crate) fn close(&self, to: Closed) {
        self.closed.store(to as u8, Ordering::SeqCst);
    }

    /// Waits for the changes that were let through before it was closed.
    pub(crate) async fn settle(&self) {
        if self.is_used.load(Ordering::SeqCst) {
            drop(self.under_way.write().await);
        }
    }

    /// Lets a change through, which holds what is returned until it is done.
    ///
    /// # Errors
    /// EPERM if the disk is reserved.
    pub(crate) async fn change(&self) -> io::Result<Option<RwLockReadGuard<'_, ()>>> {
        if !self.is_used.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let passing = self.under_way.read().await;
        self.check(Closed::ToChanges)?;
        Ok(Some(passing))
    }

    /// Whether data may be read.
    ///
    /// # Errors
    /// EPERM if the disk is reserved for others, reading included.
    pub(crate) fn read(&self) -> io::Result<()> {
        self.check(Closed::ToAll)
    }

    fn check(&self, from: Closed) -> io::Result<()> {
        if self.closed.load(Ordering::SeqCst) < from as u8 {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}
