//! Having back what is delegated to clients: they are called until they have given it back, or it is taken from them.

use super::Server;
use super::callback::{Answer, Notice};
use super::status::Status;
use crate::delegations::Holder;
use crate::file_system::{OnChange, Op};
use crate::identity::FileIdentity;
use crate::state::{Recalled, Refused, State};
use rustix::io::Errno;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use thruway_engine::reactor;
use tokio::time::{Instant, sleep, timeout_at};

/// So long a call waits for a DELEGRETURN before it is answered NFS4ERR_DELAY: most take no longer.
pub(super) const WAIT: Duration = Duration::from_millis(50);

/// What programs of the host wait for is revoked so long before the kernel lets them go on.
const BEFORE_BREAK: Duration = Duration::from_secs(5);

/// A client that has been called and says for this long that it has no such delegation has none.
const UNKNOWN_AFTER: Duration = Duration::from_secs(5);

/// Of a client: it knows of no such file, or no such delegation.
const UNKNOWN: [u32; 2] = [Status::BADHANDLE.0, Status::BAD_STATEID.0];

/// After this long, and then after twice as long each time, a client that does not know yet what it is to give back, or could not be
/// called, is called again; of one that knows it is looked whether it has.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(2);

/// Recalls a delegation, and sees to it that it ends.
pub(super) fn start(server: &Arc<Server>, number: u64) {
    let server = Arc::clone(server);
    reactor::start(async move {
        let (limit, time_left) = limits(&server, number);
        // However slow the client is, the wait ends when the remaining time of its host is used up.
        let last = Instant::now() + time_left;
        let until = Cell::new((Instant::now() + limit).min(last));
        let told = || until.set((Instant::now() + limit).min(last));
        let mut given_back = std::pin::pin!(recall(&server, number, told));
        while let Err(_elapsed) = timeout_at(until.get(), given_back.as_mut()).await {
            if Instant::now() >= until.get() {
                break;
            }
        }
        if server.state(|state, _| state.recalled(number)).is_none() {
            return;
        }
        if let Some(client) = server.state(|state, _| state.revoke(number)) {
            tracing::warn!(client, "a client has not given back in time what was delegated to it: it is revoked");
            server.given_back.notify_waiters();
        }
    });
}

/// Limit of a recall, from the answer of the client on, and the remaining time that others may wait for its host.
///
/// The limit is one lease, or less where the kernel lets others wait for less.
fn limits(server: &Arc<Server>, number: u64) -> (Duration, Duration) {
    let recalled = server.state(|state, _| state.recalled(number));
    let is_write = recalled.as_ref().is_some_and(|recalled| recalled.is_write);
    let break_time = if is_write { None } else { thruway_fs::lease::break_time() };
    let limit =
        break_time.map_or(server.lease, |time| server.lease.min(time.saturating_sub(BEFORE_BREAK).max(time / 2)));
    (limit, Duration::from_millis(recalled.map_or(0, |recalled| recalled.time_left_ms)))
}

/// Returns when it has been given back; says when the client knows that it is to do that.
async fn recall(server: &Arc<Server>, number: u64, told: impl Fn()) {
    let mut again_after = AGAIN_AFTER;
    let mut is_told = false;
    let mut unknown_since = None;
    loop {
        let Some(Recalled { session, stateid, handle, .. }) = server.state(|state, _| state.recalled(number)) else {
            return;
        };
        if !is_told
            && let Some(session) = session
            && let Some(back) = &session.back
        {
            match back.send_in_turn(&session, &Notice::Recall { handle, stateid }).await {
                Ok(Answer { status: 0, .. }) => {
                    is_told = true;
                    told();
                    tracing::debug!(client = session.client, "recall answered");
                }
                // It may not have got the reply that says that it has it.
                Ok(Answer { status, .. }) => {
                    tracing::debug!(client = session.client, status, "recall refused");
                    let since = *unknown_since.get_or_insert_with(Instant::now);
                    if !UNKNOWN.contains(&status) {
                        unknown_since = None;
                    } else if since.elapsed() >= UNKNOWN_AFTER {
                        server.state(|state, _| state.forget_delegation(number));
                        return server.given_back.notify_waiters();
                    }
                }
                Err(error) => tracing::debug!(client = session.client, %error, "recall failed"),
            }
        }
        sleep(again_after).await;
        again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
    }
}

/// What to call when another program changes a file; and a flag that it was called.
pub(super) fn on_change(server: &Arc<Server>, file: FileIdentity) -> (OnChange, Arc<AtomicBool>) {
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

/// The server, as those know it who serve the same files: it ends with version 4.
pub(super) struct Clients(pub(super) Weak<Server>);

impl Clients {
    /// Does what may have to wait for others.
    async fn retry_on_conflict(&self, action: impl FnMut(&mut State, u64) -> Result<(), Refused>) -> Result<(), Errno> {
        let Some(server) = self.0.upgrade() else { return Ok(()) };
        server.retry_on_conflict(action).await.map_err(|_| Errno::INPROGRESS)
    }
}

impl Holder for Clients {
    fn begin_change(&self, file: FileIdentity, client: Option<u64>) -> Op<'_, ()> {
        Box::pin(self.retry_on_conflict(move |state, now| state.begin_change(now, &file, client)))
    }

    fn end_change(&self, file: &FileIdentity) {
        if let Some(server) = self.0.upgrade() {
            server.state(|state, _| state.end_change(file));
        }
    }

    fn is_kept(&self, file: &FileIdentity, client: Option<u64>) -> bool {
        let Some(server) = self.0.upgrade() else { return false };
        server.state(|state, now| state.recall_others(now, file, client, false)).is_err()
    }

    fn is_grace(&self) -> bool {
        self.0.upgrade().is_some_and(|server| server.state(|state, now| state.is_grace(now)))
    }

    fn look(&self, file: FileIdentity, client: Option<u64>) -> Op<'_, ()> {
        Box::pin(self.retry_on_conflict(move |state, now| state.recall_others(now, &file, client, false)))
    }
}
