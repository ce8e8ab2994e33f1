//! Having back what is delegated to clients: they are called until they have given it back, or it is taken from them.

use super::Server;
use super::callback::{Answer, Back};
use crate::delegations::Holder;
use crate::state::{Notice, Recalled, Refused, State};
use crate::status::Status;
use rustix::io::Errno;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use thruway_engine::reactor;
use thruway_vfs::identity::FileIdentity;
use thruway_vfs::{OnChange, Op};
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
        let recalled = server.state(|state, _| state.recalled(number));
        let deadline = Deadline::new(Instant::now(), server.lease, recalled.as_ref(), thruway_fs::lease::break_time());
        let deadline = Cell::new(deadline);
        let told = || deadline.set(deadline.get().after_answer(Instant::now()));
        let mut given_back = std::pin::pin!(recall(&server, number, told));
        while let Err(_elapsed) = timeout_at(deadline.get().until, given_back.as_mut()).await {
            let now = Instant::now();
            if now >= deadline.get().until {
                let recalled = server.state(|state, _| state.recalled(number));
                match recalled.and_then(|recalled| deadline.get().after_write(now, &recalled)) {
                    Some(later) => deadline.set(later),
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

/// Time when a recalled delegation is revoked.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    begin: Instant,
    lease: Duration,
    until: Instant,
    /// Latest `until`, whenever the client answers.
    last: Instant,
}

impl Deadline {
    /// One lease time; less if others have already waited for delegations of the same host. `break_time` is the time after which the
    /// kernel breaks its own lease, if it has one for read delegations.
    fn new(begin: Instant, lease: Duration, recalled: Option<&Recalled>, break_time: Option<Duration>) -> Deadline {
        let in_all = Duration::from_millis(recalled.map_or(0, |recalled| recalled.time_left_ms));
        let is_write = recalled.is_some_and(|recalled| recalled.is_write);
        let in_all = match break_time.filter(|_| !is_write) {
            None => in_all,
            // The kernel's time also begins with the recall.
            Some(time) => in_all.min(time.saturating_sub(BEFORE_BREAK).max(time / 2)),
        };
        let last = begin + in_all;
        Deadline { begin, lease, until: last.min(begin + lease), last }
    }

    /// Measured from the answer of the client to the recall.
    fn after_answer(self, now: Instant) -> Deadline {
        Deadline { until: (now + self.lease).min(self.last), ..self }
    }

    /// A client that has not written all its data would lose it. It may keep a write delegation for one lease time after its last WRITE
    /// or DELEGRETURN, but for at most [`LEASES_OF_WRITER`] after the beginning of the recall. `None` if that time is over too.
    fn after_write(self, now: Instant, recalled: &Recalled) -> Option<Deadline> {
        let left = self.lease.saturating_sub(Duration::from_millis(recalled.idle_ms));
        let until = (now + left).min(self.begin + self.lease * LEASES_OF_WRITER);
        (recalled.is_write && until > now).then_some(Deadline { until, ..self })
    }
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
            && let Some(back) = Back::of(&session)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Stateid;

    const LEASE: Duration = Duration::from_secs(90);

    fn recalled(is_write: bool, time_left: Duration, idle: Duration) -> Recalled {
        let (time_left_ms, idle_ms) = (time_left.as_millis() as u64, idle.as_millis() as u64);
        Recalled { session: None, stateid: Stateid::ANONYMOUS, handle: Box::default(), is_write, time_left_ms, idle_ms }
    }

    /// Time from the beginning of a recall to the revocation, for a client that writes for `writes_for`.
    fn revoked_after(writes_for: Duration) -> Duration {
        let begin = Instant::now();
        let mut deadline = Deadline::new(begin, LEASE, Some(&recalled(true, LEASE, Duration::ZERO)), None);
        deadline = deadline.after_answer(begin + Duration::from_secs(1));
        loop {
            let now = deadline.until;
            let idle = now.duration_since(begin + writes_for);
            match deadline.after_write(now, &recalled(true, Duration::ZERO, idle)) {
                Some(later) => deadline = later,
                None => return now - begin,
            }
        }
    }

    #[test]
    fn a_client_that_writes_its_data_back_keeps_the_delegation() {
        assert_eq!(revoked_after(Duration::ZERO), LEASE, "it writes nothing");
        for leases in [0.5, 1.0, 3.0, 8.9] {
            let writes_for = LEASE.mul_f64(leases);
            assert_eq!(revoked_after(writes_for), writes_for + LEASE);
        }
        assert_eq!(revoked_after(LEASE * 20), LEASE * LEASES_OF_WRITER);
    }

    #[test]
    fn a_late_answer_does_not_extend_a_recall() {
        let begin = Instant::now();
        let break_time = Duration::from_secs(45);
        for (is_write, break_time, most) in [
            (false, Some(break_time), break_time - BEFORE_BREAK),
            (false, None, LEASE),
            (true, Some(break_time), LEASE),
        ] {
            let of = recalled(is_write, LEASE, Duration::ZERO);
            let deadline = Deadline::new(begin, LEASE, Some(&of), break_time);
            assert_eq!(deadline.until, begin + most);
            for answered in [1, 30, 39] {
                let later = deadline.after_answer(begin + Duration::from_secs(answered));
                assert_eq!(later.until, begin + most, "{answered}");
            }
        }
        // Others have already waited for delegations of this host.
        let of = recalled(false, LEASE / 9, Duration::ZERO);
        assert_eq!(Deadline::new(begin, LEASE, Some(&of), None).until, begin + LEASE / 9);
        assert!(
            Deadline::new(begin, LEASE, Some(&of), None).after_write(begin, &of).is_none(),
            "nothing to write back"
        );
    }
}
