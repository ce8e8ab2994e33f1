//! Calls to clients of version 3: that a lock which they wait for is theirs, and that the server has restarted.

use super::grants::{Grants, LockOwner};
use super::wire::{self, Lock, Status, Test};
use super::{AGAIN_AFTER, PROGRAM, VERSION, procedure};
use crate::nsm;
use crate::state::{Host, PendingGrant, Range, Refused, State};
use crate::status::Status as V4;
use crate::v4;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use thruway_engine::{Reactors, reactor};
use thruway_rpc::client::{CallError, Client, Procedure, Reply};
use thruway_rpc::message::{AuthSys, OpaqueAuth, flavor};
use thruway_rpc::rpcbind;
use thruway_rpc::xdr::{Decoder, Encoder};
use thruway_server::turns::{Limits, Turns};
use thruway_server::{caller::on_behalf_of, slices};
use thruway_tcp::Origin;
use thruway_vfs::identity::FileIdentity;
use tokio::time::{Instant, sleep};

/// How long a client may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A call that has failed is made again after this long, and then after twice as long each time.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// So long a client is called that had locks before a restart, as long as Linux does.
const NOTIFY_FOR: Duration = Duration::from_secs(15 * 60);
/// Calls at a time. One that has waited for its turn for as long as it may take is given up, and made again as if it had failed.
const CALLS: Limits = Limits { all: 128, per_origin: 4, waiting: 64 << 10, patience: TIMEOUT };
/// Most locks of an owner in a range that it is given, without room for more grants of its host.
const BEFORE_MAX: usize = 64;
/// Longest reply, in bytes.
const REPLY_MAX: usize = 4 << 10;

/// Calls clients.
pub(super) struct Caller {
    pub server: Arc<v4::Server>,
    grants: Mutex<Grants>,
    calls: Turns,
}

/// A grant in progress, which is counted until this is dropped.
struct GrantInProgress {
    caller: Arc<Caller>,
    origin: Origin,
}

impl GrantInProgress {
    /// Counts a grant; `None` if the quota of the host is used up.
    fn begin(caller: &Arc<Caller>, origin: Origin) -> Option<GrantInProgress> {
        let mut grants = caller.grants();
        if !grants.has_room(origin) {
            return None;
        }
        grants.count(origin, 1);
        Some(GrantInProgress { caller: Arc::clone(caller), origin })
    }
}

impl Drop for GrantInProgress {
    fn drop(&mut self) {
        self.caller.grants().count(self.origin, -1);
    }
}

pub(super) fn lock_owner(client: u64, owner: &[u8], file: &FileIdentity) -> LockOwner {
    (client, owner.into(), file.clone())
}

/// Calls a procedure of a program that a client's rpcbind knows, when it is its host's turn.
async fn call(calls: &Turns, host: &Host, of: Procedure, arguments: Encoder) -> Result<Option<Reply>, CallError> {
    call_if(calls, host, of, arguments, || true).await
}

/// As [`call`], if `begins` returns true when there is a connection. Else the reply is `None`.
async fn call_if(
    calls: &Turns,
    host: &Host,
    of: Procedure,
    arguments: Encoder,
    begins: impl FnOnce() -> bool,
) -> Result<Option<Reply>, CallError> {
    let turn = calls.take(Origin::of_host(host.address)).await;
    let _turn = turn.ok_or(CallError::TimedOut(TIMEOUT))?;
    let Procedure { program, version, .. } = of;
    let Some(address) = rpcbind::find(host.address, Some(host.local), (program, version), TIMEOUT).await? else {
        return Ok(None);
    };
    let address = SocketAddr::new(host.address, address.port());
    let client = Client::connect_from(Some(host.local), address, TIMEOUT).await?.with_replies_of(REPLY_MAX);
    let credential = AuthSys { machine: nsm::own_name(), uid: 0, gid: 0, gids: Vec::new() }.encode();
    if !begins() {
        return Ok(None);
    }
    client.call(of, OpaqueAuth { flavor: flavor::AUTH_SYS, body: &credential }, arguments).await.map(Some)
}

/// A callback with a lock that is on the way to a client or back, until this is dropped.
struct CallInProgress<'a>(&'a Caller, &'a LockOwner);

impl Drop for CallInProgress<'_> {
    fn drop(&mut self) {
        self.0.grants().end_call(self.1);
    }
}

const fn of(procedure: u32) -> Procedure {
    Procedure { program: PROGRAM, version: VERSION, procedure }
}

impl Caller {
    pub(super) fn new(server: Arc<v4::Server>) -> Caller {
        Caller { server, grants: Mutex::default(), calls: Turns::new(CALLS) }
    }

    /// An owner has locked or unlocked a range by a call. To be called under the lock of the state.
    pub(super) fn changed(&self, owner: &LockOwner, range: Range) {
        self.grants().changed(owner, range);
    }

    /// Cancels the wait of an owner for a lock of this kind. If the lock was given and not acknowledged, restores the owner's earlier locks.
    /// A lock of the other kind in the same range stays.
    ///
    /// Waits for the answer to a callback that is on the way. The result is [`Status::DENIED`] if the client does not answer: it has the lock,
    /// and will be called again.
    pub(super) async fn cancel(&self, owner: &LockOwner, is_write: bool, range: Range) -> Result<Status, V4> {
        let (client, name, file) = owner;
        let until = Instant::now() + TIMEOUT;
        loop {
            let ended = self.grants().calls_end(owner);
            let is_last = ended.is_none() || Instant::now() >= until;
            let attempt = |state: &mut State, _| {
                state.cancel_wait(*client, name, file, is_write, range);
                let mut grants = self.grants();
                let Some(grant) = grants.get_mut(owner, is_write, range) else { return Ok(Some(Status::GRANTED)) };
                grant.is_cancelled = grant.is_sent && !is_last;
                match grant.is_sent {
                    true if is_last => Ok(Some(Status::DENIED)),
                    true => Ok(None),
                    false => Self::take_back(state, &mut grants, owner, range).map(|()| Some(Status::GRANTED)),
                }
            };
            if let Some(status) = self.server.state(attempt)? {
                return Ok(status);
            }
            if let Some(ended) = ended {
                // Late answers are seen by the next attempt.
                let _ = tokio::time::timeout_at(until, ended).await;
            }
        }
    }

    /// Takes back an unacknowledged lock: the owner has what it had before.
    fn take_back(state: &mut State, grants: &mut Grants, owner: &LockOwner, range: Range) -> Result<(), V4> {
        let (client, name, file) = owner;
        if let Some(grant) = grants.get(owner, range) {
            state.take_back(*client, name, file, &grant.due, &grant.before)?;
            grants.remove(owner, range);
        }
        Ok(())
    }

    /// Waits until no callback is on the way to an owner, for [`TIMEOUT`] at most.
    pub(super) async fn calls_ended(&self, owner: &LockOwner) {
        let ended = self.grants().calls_end(owner);
        if let Some(ended) = ended {
            // A client that has not answered by then is called again.
            let _ = tokio::time::timeout(TIMEOUT, ended).await;
        }
    }

    /// True if a client of this host may wait for another lock.
    pub(super) fn has_room_for_grant(&self, host: &Host) -> bool {
        self.grants().has_room(Origin::of_host(host.address))
    }

    fn grants(&self) -> MutexGuard<'_, Grants> {
        self.grants.lock().expect("no panics under the lock")
    }

    /// Calls a client with the answer to one of its calls. A client that gets none calls again.
    pub(super) fn send_result(self: &Arc<Self>, host: Host, procedure: u32, results: &Encoder) {
        let (caller, results) = (Arc::clone(self), Encoder::behind(results.to_bytes()));
        reactor::start(async move {
            if let Err(error) = call(&caller.calls, &host, of(procedure), results).await {
                tracing::debug!(host = %host.address, %error, "an answer to an NLM call has not been delivered");
            }
        });
    }

    /// Calls the clients of before this start, so that they reclaim.
    pub(super) fn notify_clients(self: &Arc<Self>, reactors: &Reactors) {
        let hosts = self.server.state.lock().expect("no panics under the lock").hosts_before();
        let Some(reactor) = reactors.handles().first().filter(|_| !hosts.is_empty()) else { return };
        let (caller, start) = (Arc::clone(self), self.server.recovery.start);
        reactor.spawn(move || async move {
            for host in hosts {
                let caller = Arc::clone(&caller);
                reactor::start(async move { notify(&host, start, &caller.calls).await });
            }
        });
    }
}

/// Calls a client because the server has restarted (SM_NOTIFY), until it has answered. Those that do not answer hold up the others
/// only for as long as a call of theirs takes.
async fn notify(host: &Host, start: u32, calls: &Turns) {
    let until = Instant::now() + NOTIFY_FOR;
    let mut again_after = RETRY_AFTER;
    loop {
        let mut arguments = Encoder::new();
        arguments.opaque(&nsm::own_name());
        arguments.u32(start);
        match call(calls, host, nsm::NOTIFY, arguments).await {
            Ok(Some(_)) => return tracing::debug!(host = %host.address, "told to reclaim its locks"),
            Ok(None) => tracing::debug!(host = %host.address, "no status monitor"),
            Err(error) => tracing::debug!(host = %host.address, %error, "not told yet to reclaim its locks"),
        }
        if Instant::now() + again_after > until {
            return tracing::warn!(host = %host.address, "a client of NFS version 3 could not be told to reclaim its locks");
        }
        sleep(again_after).await;
        again_after = (again_after * 2).min(RETRY_AFTER_MAX);
    }
}

/// Gives a client a lock that it waits for, if it is free.
pub(super) fn give(caller: Arc<Caller>, freed: PendingGrant) {
    let origin = Origin::of_host(freed.host.address);
    let Some(in_progress) = GrantInProgress::begin(&caller, origin) else {
        // The client asks again.
        caller.server.state(|state, _| state.end_wait(&freed));
        return tracing::debug!(host = %freed.host.address, "too many locks of this host have not been acknowledged");
    };
    reactor::start(on_behalf_of(origin, async move {
        let _in_progress = in_progress;
        let given = lock_owner(freed.client, &freed.owner, &freed.file);
        let is_given = lock(&caller, &freed, &given).await;
        caller.server.state(|state, _| state.end_wait(&freed));
        if is_given {
            call_with_lock(&caller, &freed, &given).await;
        }
    }));
}

/// Takes a lock for a client that waits for it. False if the client waits on, or does not need the lock any more.
async fn lock(caller: &Caller, freed: &PendingGrant, given: &LockOwner) -> bool {
    let server = &caller.server;
    let PendingGrant { client, ref host, ref owner, ref file, ref handle, is_write, range, since, .. } = *freed;
    let origin = Origin::of_host(host.address);
    let mut again_after = AGAIN_AFTER;
    // Until it has restarted.
    while server.state(|state, _| state.known_host(host) == Some(client)) {
        let action = |state: &mut State, now, may_have| {
            // It may have cancelled its wait.
            if !state.is_wanted(freed) {
                return Ok(false);
            }
            let has_room = {
                let grants = caller.grants();
                if grants.overlaps(given, range) {
                    return Err(Refused::Status(V4::DELAY));
                }
                grants.has_room(origin)
            };
            // Or have got the lock by a call of its own, or have so many in the range that it has to ask again.
            let before = state.locked_in(client, owner, file, range);
            if state.has_locked(client, owner, file, is_write, range) || before.len() > BEFORE_MAX && !has_room {
                return Ok(false);
            }
            match state.lock_monitored(now, may_have, owner, file, is_write, range) {
                // Another was faster.
                Err(Refused::Denied(_)) => {
                    let (host, owner, file, handle) = (host.clone(), owner.clone(), file.clone(), handle.clone());
                    let wait = PendingGrant { number: 0, client, host, owner, file, handle, is_write, range, since };
                    state.wait_monitored(wait);
                    Ok(false)
                }
                Err(refused) => Err(refused),
                Ok(()) => {
                    // Before any call of the client finds that it has it.
                    caller.grants().insert(freed.number, origin, given.clone(), (is_write, range), before);
                    Ok(true)
                }
            }
        };
        let result = match server.may_have(client, false).await {
            Ok(may_have) => {
                // Thousands can be due at the same moment.
                slices::spend(1).await;
                server.retry_on_conflict(|state, now| action(state, now, may_have)).await
            }
            Err(status) => Err(status.into()),
        };
        match result {
            Ok(is_given) => return is_given,
            Err(Refused::Delegated | Refused::Status(V4::DELAY)) => sleep(again_after).await,
            Err(refused) => {
                tracing::debug!(host = %host.address, ?refused, "a lock that was waited for is not given");
                return false;
            }
        }
        again_after = (again_after * 2).min(RETRY_AFTER);
    }
    false
}

/// Calls a client that has a lock (NLM_GRANTED), until it has answered or has given the lock back.
async fn call_with_lock(caller: &Caller, freed: &PendingGrant, given: &LockOwner) {
    let PendingGrant { number, client, host, owner, file, handle, is_write, range, .. } = freed;
    let (process, own) = wire::owner_of(owner);
    let (offset, len) = (range.start, wire::len_of(*range));
    let lock = Lock { caller: &host.name, handle, owner: own, process, offset, len };
    let cookie = thruway_engine::random::random::<8>();
    let mut again_after = RETRY_AFTER;
    loop {
        let is_due = caller.grants().numbered(*number, given, *range).is_some_and(|grant| !grant.due.is_empty());
        let (is_known, has_lock) = caller.server.state(|state, _| {
            let is_known = state.known_host(host) == Some(*client);
            (is_known, state.has_locked(*client, owner, file, *is_write, *range))
        });
        if !is_due || !is_known {
            break;
        }
        if !has_lock {
            // Its owner has changed a part of it by a call. The client may still cancel its wait.
            sleep(again_after).await;
            again_after = (again_after * 2).min(RETRY_AFTER_MAX);
            continue;
        }
        let mut arguments = Encoder::new();
        Test { cookie: &cookie, is_write: *is_write, lock }.encode(&mut arguments);
        let mut in_progress = None;
        let begins = || {
            let begins = caller.grants().begin_call(*number, given, *is_write, *range);
            in_progress = begins.then_some(CallInProgress(caller, given));
            begins
        };
        let status = match call_if(&caller.calls, host, of(procedure::GRANTED), arguments, begins).await {
            Ok(Some(reply)) => result_of(&mut reply.results()),
            Ok(None) => None,
            Err(error) => {
                tracing::debug!(host = %host.address, %error, "not told yet that it has a lock");
                None
            }
        };
        let is_answered = matches!(status, Some(Status::GRANTED | Status::DENIED));
        if is_answered {
            tracing::debug!(host = %host.address, ?status, "told that it has a lock");
            let _ =
                caller.server.state(|state, _| answered(caller, state, freed, given, status == Some(Status::GRANTED)));
        }
        drop(in_progress);
        if is_answered {
            return;
        }
        sleep(again_after).await;
        again_after = (again_after * 2).min(RETRY_AFTER_MAX);
    }
    let mut grants = caller.grants();
    if grants.numbered(*number, given, *range).is_some() {
        grants.remove(given, *range);
    }
}

/// Ends a grant whose client has answered the callback. The lock is taken back if the client does not wait for it any more.
fn answered(
    caller: &Caller,
    state: &mut State,
    freed: &PendingGrant,
    given: &LockOwner,
    is_accepted: bool,
) -> Result<(), V4> {
    let mut grants = caller.grants();
    let Some(grant) = grants.numbered(freed.number, given, freed.range) else { return Ok(()) };
    if !is_accepted || grant.is_cancelled {
        state.cancel_wait(freed.client, &freed.owner, &freed.file, freed.is_write, freed.range);
        return Caller::take_back(state, &mut grants, given, freed.range);
    }
    grants.remove(given, freed.range);
    Ok(())
}

fn result_of(d: &mut Decoder<'_>) -> Option<Status> {
    let _cookie = wire::get_cookie(d).ok()?;
    Some(Status(d.u32().ok()?))
}
