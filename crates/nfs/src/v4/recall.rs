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

/// A client that writes its data back may take this many leases for it (RFC 8881, section 10.2).
const LEASES_OF_WRITER: u32 = 10;

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
        let begin = Instant::now();
        let Limits { after_answer, in_all } = limits(&server, number);
        let last = begin + in_all;
        let until = Cell::new((begin + after_answer).min(last));
        let told = || until.set((Instant::now() + after_answer).min(last));
        let mut given_back = std::pin::pin!(recall(&server, number, told));
        while let Err(_elapsed) = timeout_at(until.get(), given_back.as_mut()).await {
            let now = Instant::now();
            if now >= until.get() {
                match until_for_writer(&server, number, begin).filter(|later| *later > now) {
                    Some(later) => until.set(later),
                    None => break,
                }
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

/// Time limits of a recall.
struct Limits {
    /// Measured from the answer of the client.
    after_answer: Duration,
    /// Measured from the beginning of the recall, with or without an answer.
    in_all: Duration,
}

/// Limits of one lease time; less if others have already waited for delegations of the same host, or if the kernel breaks its lease
/// sooner.
fn limits(server: &Arc<Server>, number: u64) -> Limits {
    let recalled = server.state(|state, _| state.recalled(number));
    let in_all = Duration::from_millis(recalled.as_ref().map_or(0, |recalled| recalled.time_left_ms));
    let is_write = recalled.is_some_and(|recalled| recalled.is_write);
    match thruway_fs::lease::break_time().filter(|_| !is_write) {
        None => Limits { after_answer: server.lease, in_all },
        Some(time) => {
            // The kernel's time also begins with the recall.
            let in_all = in_all.min(time.saturating_sub(BEFORE_BREAK).max(time / 2));
            Limits { after_answer: server.lease, in_all }
        }
    }
}

/// Deadline of a client that may keep a write delegation beyond its [`limits`], because data that it has not written would be lost: one
/// lease time after its last WRITE or DELEGRETURN, but at most [`LEASES_OF_WRITER`] after the beginning of the recall. `None` for other
/// delegations.
fn until_for_writer(server: &Arc<Server>, number: u64, begin: Instant) -> Option<Instant> {
    let recalled = server.state(|state, _| state.recalled(number)).filter(|recalled| recalled.is_write)?;
    let left = server.lease.saturating_sub(Duration::from_millis(recalled.idle_ms));
    Some((Instant::now() + left).min(begin + server.lease * LEASES_OF_WRITER))
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
