//! Having back what is delegated to clients: they are called until they have given it back, or it is taken from them.

use super::callback::Notice;
use super::state::{Recalled, Refused, State};
use super::{Server, Status};
use crate::delegations::{FileKey, Holder};
use crate::file_system::{OnChange, Op};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use thruway_engine::reactor;
use tokio::time::{Instant, sleep_until, timeout_at};

/// So long a call waits for a client that gives something back, before its own client is asked to come again: most take no longer.
pub(super) const PATIENCE: Duration = Duration::from_millis(50);

/// What has not been given back after this long, or a lease, is revoked: before the kernel lets those go on who wait for a lease of
/// the file (45 s, unless `/proc/sys/fs/lease-break-time` says something else).
const REVOKE_AFTER_MAX: Duration = Duration::from_secs(40);

/// A client that does not know yet what it is to give back, or cannot be called, is called again after this long, and then after
/// twice as long each time.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(2);

/// Recalls a delegation, and sees to it that it ends.
pub(super) fn start(server: &Arc<Server>, number: u64) {
    let server = Arc::clone(server);
    reactor::start(async move {
        let deadline = Instant::now() + server.lease.min(REVOKE_AFTER_MAX);
        if timeout_at(deadline, recall(&server, number)).await.is_ok() {
            return;
        }
        if let Some(client) = server.state(|state, _| state.revoke(number)) {
            tracing::warn!(client, "a client has not given back in time what was delegated to it: it is revoked");
            server.given_back.notify_waiters();
        }
    });
}

/// Returns when it has been given back.
async fn recall(server: &Arc<Server>, number: u64) {
    let mut again_after = AGAIN_AFTER;
    let mut is_told = false;
    loop {
        let given_back = server.given_back.notified();
        tokio::pin!(given_back);
        given_back.as_mut().enable();
        let Some(Recalled { session, stateid, handle }) = server.state(|state, _| state.recalled(number)) else {
            return;
        };
        if !is_told
            && let Some(session) = session
            && let Some(back) = &session.back
        {
            match back.send(&session, &Notice::Recall { handle, stateid }).await {
                Ok(Some(0)) => {
                    is_told = true;
                    tracing::debug!(client = session.client, "recall answered");
                }
                // It may not have got the reply that says that it has it.
                Ok(status) => tracing::debug!(client = session.client, status, "recall refused"),
                Err(error) => tracing::debug!(client = session.client, %error, "recall failed"),
            }
        }
        if is_told {
            given_back.await;
        } else {
            let again = Instant::now() + again_after;
            let _ = timeout_at(again, given_back).await;
            // What another has given back is no reason to call at once.
            sleep_until(again).await;
            again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
        }
    }
}

/// What to call when another program changes a file; and a flag that it was called.
pub(super) fn on_change(server: &Arc<Server>, file: FileKey) -> (OnChange, Arc<AtomicBool>) {
    let (changed, is_changed) = (server.changed.clone(), Arc::default());
    let flag: Arc<AtomicBool> = Arc::clone(&is_changed);
    let tell = move || {
        flag.store(true, Ordering::SeqCst);
        // The server may have ended.
        let _ = changed.send(file.clone());
    };
    (Box::new(tell), is_changed)
}

impl Server {
    /// Clients can be called from now on.
    pub(super) fn begin_delegating(self: &Arc<Self>) {
        self.can_delegate.store(true, Ordering::SeqCst);
        let Some(mut files) = self.to_recall.lock().expect("no panics under the lock").take() else { return };
        let server: Weak<Server> = Arc::downgrade(self);
        reactor::start(async move {
            while let Some(file) = files.recv().await {
                let Some(server) = server.upgrade() else { return };
                server.state(|state, now| state.recall_all(now, &file));
            }
        });
    }
}

/// For whom `EINPROGRESS` is an error.
fn errno(refused: Refused) -> Errno {
    match refused {
        Refused::Status(status) if status != Status::DELAY => Errno::IO,
        _ => Errno::INPROGRESS,
    }
}

/// The server, as those know it who serve the same files: it ends with version 4.
pub(super) struct Clients(pub(super) Weak<Server>);

impl Clients {
    /// Does what may have to wait for others.
    async fn contend(&self, action: impl FnMut(&mut State, u64) -> Result<(), Refused>) -> Result<(), Errno> {
        let Some(server) = self.0.upgrade() else { return Ok(()) };
        server.contend(action).await.map_err(errno)
    }
}

impl Holder for Clients {
    fn is_used(&self) -> bool {
        self.0.upgrade().is_some_and(|server| server.can_delegate.load(Ordering::SeqCst))
    }

    fn is_used_for_writing(&self) -> bool {
        self.0.upgrade().is_some_and(|server| server.can_delegate_writing && server.can_delegate.load(Ordering::SeqCst))
    }

    fn begin_change(&self, file: FileKey, client: Option<u64>) -> Op<'_, ()> {
        Box::pin(self.contend(move |state, now| state.begin_change(now, &file, client)))
    }

    fn end_change(&self, file: &FileKey) {
        if let Some(server) = self.0.upgrade() {
            server.state(|state, _| state.end_change(file));
        }
    }

    fn look(&self, file: FileKey, client: Option<u64>) -> Op<'_, ()> {
        Box::pin(self.contend(move |state, now| state.recall_others(now, &file, client, false)))
    }
}
