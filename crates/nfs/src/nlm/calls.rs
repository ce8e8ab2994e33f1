//! Calls to clients of version 3: that a lock which they wait for is theirs, and that the server has restarted.

use super::wire::{self, Lock, Status, Test};
use super::{AGAIN_AFTER, PROGRAM, VERSION, procedure};
use crate::identity::FileIdentity;
use crate::nsm;
use crate::state::{Host, HostCounts, PendingGrant, Range, Refused, State};
use crate::v4;
use crate::v4::status::Status as V4;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use thruway_engine::{Reactors, reactor};
use thruway_rpc::client::{CallError, Client, Procedure, Reply};
use thruway_rpc::message::{AuthSys, OpaqueAuth, flavor};
use thruway_rpc::rpcbind;
use thruway_rpc::xdr::{Decoder, Encoder};
use thruway_server::turns::{Limits, Turns};
use thruway_tcp::Origin;
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
/// Longest reply, in bytes.
const REPLY_MAX: usize = 4 << 10;

/// Most grants in progress: locks that are being given after a wait, until their clients acknowledge them. Quota of one host: eight times
/// the remaining room.
const GRANTS_MAX: usize = 16 << 10;

/// An owner of locks in a file.
type LockOwner = (u64, Box<[u8]>, FileIdentity);

/// What an owner had locked in a range before it was given that range.
type Before = Vec<(bool, Range)>;

/// Calls clients.
pub(super) struct Caller {
    pub server: Arc<v4::Server>,
    grants: Mutex<Grants>,
    calls: Turns,
}

/// Locks that clients have been given after a wait and may not know of.
#[derive(Default)]
struct Grants {
    of_owner: HashMap<LockOwner, OwnerGrants>,
    in_progress: HostCounts,
}

/// Unacknowledged grants of one owner in one file.
#[derive(Default)]
struct OwnerGrants {
    /// Number of times that the owner has unlocked any of the file since the first of these grants.
    unlocks: u64,
    /// By first and last byte: `unlocks` at the time of the grant, and what the owner had before.
    ranges: HashMap<(u64, u64), (u64, Before)>,
}

impl Grants {
    fn has_room(&self, origin: Origin) -> bool {
        self.in_progress.has_room(origin, GRANTS_MAX)
    }

    fn insert(&mut self, owner: LockOwner, range: Range, before: Before) {
        let grants = self.of_owner.entry(owner).or_default();
        grants.ranges.insert((range.start, range.last), (grants.unlocks, before));
    }

    fn contains(&self, owner: &LockOwner, range: Range) -> bool {
        self.of_owner.get(owner).is_some_and(|grants| grants.ranges.contains_key(&(range.start, range.last)))
    }

    /// Removes a grant. Returns what its owner had before: nothing if the owner has unlocked any of the file since.
    fn remove(&mut self, owner: &LockOwner, range: Range) -> Option<Before> {
        let grants = self.of_owner.get_mut(owner)?;
        let (unlocks, before) = grants.ranges.remove(&(range.start, range.last))?;
        let before = if unlocks == grants.unlocks { before } else { Before::new() };
        if grants.ranges.is_empty() {
            self.of_owner.remove(owner);
        }
        Some(before)
    }

    fn unlocked(&mut self, owner: &LockOwner) {
        if let Some(grants) = self.of_owner.get_mut(owner) {
            grants.unlocks += 1;
        }
    }
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
        grants.in_progress.add(origin, 1);
        Some(GrantInProgress { caller: Arc::clone(caller), origin })
    }
}

impl Drop for GrantInProgress {
    fn drop(&mut self) {
        self.caller.grants().in_progress.add(self.origin, -1);
    }
}

fn lock_owner(client: u64, owner: &[u8], file: &FileIdentity) -> LockOwner {
    (client, owner.into(), file.clone())
}

/// Calls a procedure of a program that a client's rpcbind knows, when it is its host's turn.
async fn call(calls: &Turns, host: &Host, of: Procedure, arguments: Encoder) -> Result<Option<Reply>, CallError> {
    let turn = calls.take(Origin::of_host(host.address)).await;
    let _turn = turn.ok_or(CallError::TimedOut(TIMEOUT))?;
    let Procedure { program, version, .. } = of;
    let Some(address) = rpcbind::find(host.address, Some(host.local), (program, version), TIMEOUT).await? else {
        return Ok(None);
    };
    let address = SocketAddr::new(host.address, address.port());
    let client = Client::connect_from(Some(host.local), address, TIMEOUT).await?.with_replies_of(REPLY_MAX);
    let credential = AuthSys { machine: nsm::own_name(), uid: 0, gid: 0, gids: Vec::new() }.encode();
    client.call(of, OpaqueAuth { flavor: flavor::AUTH_SYS, body: &credential }, arguments).await.map(Some)
}

const fn of(procedure: u32) -> Procedure {
    Procedure { program: PROGRAM, version: VERSION, procedure }
}

impl Caller {
    pub(super) fn new(server: Arc<v4::Server>) -> Caller {
        Caller { server, grants: Mutex::default(), calls: Turns::new(CALLS) }
    }

    /// A client knows what has become of this lock: it need not be called. If it was to be, what it had before.
    pub(super) fn answered(&self, client: u64, owner: &[u8], file: &FileIdentity, range: Range) -> Option<Before> {
        self.grants().remove(&lock_owner(client, owner, file), range)
    }

    /// A client does not want a lock that it may have been given: it has what it had before.
    pub(super) fn take_back(&self, client: u64, owner: &[u8], file: &FileIdentity, range: Range) -> Result<(), V4> {
        match self.answered(client, owner, file, range) {
            Some(before) => self.server.state(|state, _| state.take_back(client, owner, file, range, &before)),
            None => Ok(()),
        }
    }

    /// An owner has given back what it had: it is not to have it again.
    pub(super) fn unlocked(&self, client: u64, owner: &[u8], file: &FileIdentity) {
        self.grants().unlocked(&lock_owner(client, owner, file));
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
    let Some(in_progress) = GrantInProgress::begin(&caller, Origin::of_host(freed.host.address)) else {
        // The client asks again.
        return tracing::debug!(host = %freed.host.address, "too many locks of this host have not been acknowledged");
    };
    reactor::start(async move {
        let _in_progress = in_progress;
        let server = &caller.server;
        let PendingGrant { client, ref host, ref owner, ref file, ref handle, is_write, range, since } = freed;
        let given = lock_owner(client, owner, file);
        let mut again_after = AGAIN_AFTER;
        // Until it has restarted, or has got the lock by a call of its own.
        while server.state(|state, _| state.known_host(host) == Some(client)) {
            let action = |state: &mut State, now, may_have| {
                if state.has_locked(client, owner, file, is_write, range) {
                    return Ok(false);
                }
                let before = state.locked_in(client, owner, file, range);
                match state.lock_monitored(now, may_have, owner, file, is_write, range) {
                    // Another was faster.
                    Err(Refused::Denied(_)) => {
                        let (host, owner, file, handle) = (host.clone(), owner.clone(), file.clone(), handle.clone());
                        state.wait_monitored(PendingGrant {
                            client,
                            host,
                            owner,
                            file,
                            handle,
                            is_write,
                            range,
                            since,
                        });
                        Ok(false)
                    }
                    Err(refused) => Err(refused),
                    Ok(()) => {
                        // Before any call of the client finds that it has it.
                        caller.grants().insert(given.clone(), range, before);
                        Ok(true)
                    }
                }
            };
            let result = match server.may_have(client, false).await {
                Ok(may_have) => server.retry_on_conflict(|state, now| action(state, now, may_have)).await,
                Err(status) => Err(status.into()),
            };
            match result {
                Ok(true) => return call_with_lock(&caller, &freed, &given).await,
                Ok(false) => return,
                Err(Refused::Delegated | Refused::Status(V4::DELAY)) => sleep(again_after).await,
                Err(refused) => {
                    return tracing::debug!(host = %host.address, ?refused, "a lock that was waited for is not given");
                }
            }
            again_after = (again_after * 2).min(RETRY_AFTER);
        }
    });
}

/// Calls a client that has a lock (NLM_GRANTED), until it has answered or has given the lock back.
async fn call_with_lock(caller: &Caller, freed: &PendingGrant, given: &LockOwner) {
    let PendingGrant { client, host, owner, file, handle, is_write, range, .. } = freed;
    let (process, own) = wire::owner_of(owner);
    let (offset, len) = (range.start, wire::len_of(*range));
    let lock = Lock { caller: &host.name, handle, owner: own, process, offset, len };
    let cookie = thruway_engine::random::random::<8>();
    let mut again_after = RETRY_AFTER;
    while caller.grants().contains(given, *range) {
        if !caller.server.state(|state, _| state.has_locked(*client, owner, file, *is_write, *range)) {
            break;
        }
        let mut arguments = Encoder::new();
        Test { cookie: &cookie, is_write: *is_write, lock }.encode(&mut arguments);
        let status = match call(&caller.calls, host, of(procedure::GRANTED), arguments).await {
            Ok(Some(reply)) => result_of(&mut reply.results()),
            Ok(None) => None,
            Err(error) => {
                tracing::debug!(host = %host.address, %error, "not told yet that it has a lock");
                None
            }
        };
        match status {
            Some(Status::GRANTED) => {
                tracing::debug!(host = %host.address, "told that it has a lock");
                break;
            }
            // It does not wait for it any more.
            Some(Status::DENIED) => {
                let _ = caller.take_back(*client, owner, file, *range);
                return;
            }
            _ => sleep(again_after).await,
        }
        again_after = (again_after * 2).min(RETRY_AFTER_MAX);
    }
    caller.answered(*client, owner, file, *range);
}

fn result_of(d: &mut Decoder<'_>) -> Option<Status> {
    let _cookie = wire::get_cookie(d).ok()?;
    Some(Status(d.u32().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_system::FileId;

    fn file(number: u8) -> FileIdentity {
        FileIdentity { file_system: 1, file: FileId([number].into_iter().collect()) }
    }

    fn byte(at: u64) -> Range {
        Range { start: at, last: at }
    }

    #[test]
    fn grants_in_progress_of_a_host_have_a_quota() {
        let (one, other) = (Origin::of_host([10, 0, 0, 1].into()), Origin::of_host([10, 0, 0, 2].into()));
        let mut grants = Grants::default();
        let mut begin = |origin, most: usize| {
            let mut begun = 0;
            while begun < most && grants.has_room(origin) {
                grants.in_progress.add(origin, 1);
                begun += 1;
            }
            begun
        };
        let first = begin(one, 2 * GRANTS_MAX);
        assert!((GRANTS_MAX / 2..GRANTS_MAX).contains(&first), "{first}");
        assert_eq!(begin(other, 64), 64, "room for others is left");
        grants.in_progress.add(one, -(first as isize));
        assert_eq!((grants.in_progress.total(), grants.has_room(one)), (64, true));
    }

    #[test]
    fn an_unlock_takes_what_the_owner_had_before_in_this_file_only() {
        let owner = |file| lock_owner(1, b"owner", file);
        let (here, there) = (owner(&file(1)), owner(&file(2)));
        let other = lock_owner(2, b"owner", &file(1));
        let mut grants = Grants::default();
        let before = vec![(false, byte(3))];
        for known in [&here, &there, &other] {
            grants.insert(known.clone(), byte(3), before.clone());
        }
        grants.unlocked(&here);
        grants.insert(here.clone(), byte(5), vec![(true, byte(5))]);
        assert_eq!(grants.remove(&here, byte(3)), Some(Vec::new()));
        assert_eq!(grants.remove(&here, byte(5)), Some(vec![(true, byte(5))]), "a later grant");
        assert_eq!(grants.remove(&there, byte(3)), Some(before.clone()), "another file");
        assert_eq!(grants.remove(&other, byte(3)), Some(before), "another client");
        assert!(grants.of_owner.is_empty(), "nothing is left");
        assert!(!grants.contains(&here, byte(3)));
    }
}
