//! NFS version 4, minor versions 0 to 2 (RFC 7530, RFC 8881, RFC 7862, RFC 8276).
//!
//! A call is a compound of operations (`compound.rs`), which work on a current file. What clients have open and locked is in `state`,
//! which does no I/O; what has to outlive a restart of it is in `recovery.rs`.

pub(crate) mod attributes;
pub(crate) mod bitmap;
pub(crate) mod callback;
mod client_ops;
mod clock;
mod compound;
mod data_ops;
mod name_ops;
mod numbered_ops;
mod offload;
mod open_ops;
mod recall;
mod recovery;
mod xattr_ops;

use self::callback::Back;
use self::clock::Clock;
use self::compound::Compound;
use self::recall::Clients;
use self::recovery::Recovery;
use crate::delegations::Delegate;
use crate::share::Shares;
use crate::state::described::HeldCounts;
use crate::state::session::Session;
use crate::state::{GrantPermit, Notice, PendingGrant, Refused, State};
use crate::status::Status;
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use thruway_engine::{Reactors, reactor};
use thruway_metrics::{Description, RegisterError, Registered, Registry};
use thruway_rpc::message::{AuthError, CallHeader, Refusal};
use thruway_rpc::server::{Answer, Call, Program};
use thruway_rpc::xdr::{self, Decoder, Encoder};
use thruway_server::{caller, slices};
use thruway_vfs::OpenGuard;
use thruway_vfs::identity::FileIdentity;
use tokio::sync::mpsc;

/// The program's number.
pub const PROGRAM: u32 = crate::v3::PROGRAM;

/// Minor versions that are served.
const MINOR_VERSIONS: RangeInclusive<u32> = 0..=2;

/// Numbers of operations, by the names of the RFCs.
pub(crate) mod op {
    pub(crate) const ACCESS: u32 = 3;
    pub(crate) const CLOSE: u32 = 4;
    pub(crate) const COMMIT: u32 = 5;
    pub(crate) const CREATE: u32 = 6;
    pub(crate) const DELEGRETURN: u32 = 8;
    pub(crate) const GETATTR: u32 = 9;
    pub(crate) const GETFH: u32 = 10;
    pub(crate) const LINK: u32 = 11;
    pub(crate) const LOCK: u32 = 12;
    pub(crate) const LOCKT: u32 = 13;
    pub(crate) const LOCKU: u32 = 14;
    pub(crate) const LOOKUP: u32 = 15;
    pub(crate) const LOOKUPP: u32 = 16;
    pub(crate) const NVERIFY: u32 = 17;
    pub(crate) const OPEN: u32 = 18;
    pub(crate) const OPEN_CONFIRM: u32 = 20;
    pub(crate) const OPEN_DOWNGRADE: u32 = 21;
    pub(crate) const PUTFH: u32 = 22;
    pub(crate) const PUTPUBFH: u32 = 23;
    pub(crate) const PUTROOTFH: u32 = 24;
    pub(crate) const READ: u32 = 25;
    pub(crate) const READDIR: u32 = 26;
    pub(crate) const READLINK: u32 = 27;
    pub(crate) const REMOVE: u32 = 28;
    pub(crate) const RENAME: u32 = 29;
    pub(crate) const RENEW: u32 = 30;
    pub(crate) const RESTOREFH: u32 = 31;
    pub(crate) const SAVEFH: u32 = 32;
    pub(crate) const SECINFO: u32 = 33;
    pub(crate) const SETATTR: u32 = 34;
    pub(crate) const SETCLIENTID: u32 = 35;
    pub(crate) const SETCLIENTID_CONFIRM: u32 = 36;
    pub(crate) const VERIFY: u32 = 37;
    pub(crate) const WRITE: u32 = 38;
    pub(crate) const RELEASE_LOCKOWNER: u32 = 39;
    pub(crate) const BACKCHANNEL_CTL: u32 = 40;
    pub(crate) const BIND_CONN_TO_SESSION: u32 = 41;
    pub(crate) const EXCHANGE_ID: u32 = 42;
    pub(crate) const CREATE_SESSION: u32 = 43;
    pub(crate) const DESTROY_SESSION: u32 = 44;
    pub(crate) const FREE_STATEID: u32 = 45;
    pub(crate) const SECINFO_NO_NAME: u32 = 52;
    pub(crate) const SEQUENCE: u32 = 53;
    pub(crate) const TEST_STATEID: u32 = 55;
    pub(crate) const DESTROY_CLIENTID: u32 = 57;
    pub(crate) const RECLAIM_COMPLETE: u32 = 58;
    pub(crate) const ALLOCATE: u32 = 59;
    pub(crate) const COPY: u32 = 60;
    pub(crate) const DEALLOCATE: u32 = 62;
    pub(crate) const IO_ADVISE: u32 = 63;
    pub(crate) const OFFLOAD_CANCEL: u32 = 66;
    pub(crate) const OFFLOAD_STATUS: u32 = 67;
    pub(crate) const SEEK: u32 = 69;
    pub(crate) const CLONE: u32 = 71;
    pub(crate) const GETXATTR: u32 = 72;
    pub(crate) const SETXATTR: u32 = 73;
    pub(crate) const LISTXATTRS: u32 = 74;
    pub(crate) const REMOVEXATTR: u32 = 75;
    pub(crate) const ILLEGAL: u32 = 10_044;

    /// The last operation that a minor version has.
    pub(crate) const LAST: [u32; 3] = [RELEASE_LOCKOWNER, RECLAIM_COMPLETE, REMOVEXATTR];
}

/// Configuration of version 4.
pub struct Config {
    /// After this long without a word from a client, others may have what it has open and locked. As long after a restart, clients
    /// get back what they had, and nobody anything else.
    pub lease: Duration,
    /// File with the clients that have something open.
    pub state_file: Option<PathBuf>,
    /// True if there were earlier runs: then a missing file is a lost file.
    pub had_clients: bool,
}

/// Returns one of the numbers.
type Select = fn(&HeldCounts) -> u64;

/// The program.
pub struct Nfs4(pub(crate) Arc<Server>);

/// What it works with.
pub(crate) struct Server {
    pub shares: Arc<Shares>,
    pub state: Mutex<State>,
    pub recovery: Recovery,
    lease: Duration,
    clock: Arc<Clock>,
    /// Clients can be called, so that files can be delegated to them.
    can_delegate: Arc<AtomicBool>,
    /// Something that was delegated has been given back.
    given_back: tokio::sync::Notify,
    /// Who gives clients of version 3 the locks that they wait for.
    pub lock_waits: OnceLock<Box<dyn Fn(PendingGrant) + Send + Sync>>,
    /// Files that other programs of this host change, from any thread.
    changed: mpsc::UnboundedSender<FileIdentity>,
    /// Taken by the task that recalls what is delegated of these.
    to_recall: Mutex<Option<mpsc::UnboundedReceiver<FileIdentity>>>,
}

impl Nfs4 {
    /// Serves these shares.
    ///
    /// # Errors
    /// If the file with the clients of the last run cannot be opened or replaced.
    pub fn new(shares: Arc<Shares>, config: Config) -> io::Result<Nfs4> {
        let (recovery, lease_before, before) = Recovery::load(config.state_file, config.lease, config.had_clients)?;
        // Never that of an earlier run, whatever the clock says.
        let epoch = u32::from_be_bytes(thruway_engine::random::random::<4>());
        let grace = config.lease.max(lease_before);
        if !before.is_empty() {
            let (clients, seconds) = (before.len(), grace.as_secs());
            tracing::info!(
                clients,
                seconds,
                "grace period: clients of the last run may reclaim opens and locks; new ones wait"
            );
        }
        let open_files = shares.iter().filter_map(|share| Some((share.files.fsid(), share.files.open_files_max()?)));
        let state = State::new(epoch, config.lease.as_millis() as u64, before)
            .with_grace_of(grace.as_millis() as u64)
            .with_open_files(open_files);
        let (changed, to_recall) = mpsc::unbounded_channel();
        let server = Arc::new(Server {
            can_delegate: Arc::default(),
            shares: Arc::clone(&shares),
            state: Mutex::new(state),
            recovery,
            lease: config.lease,
            clock: Arc::default(),
            given_back: tokio::sync::Notify::new(),
            lock_waits: OnceLock::new(),
            changed,
            to_recall: Mutex::new(Some(to_recall)),
        });
        let for_writing = shares.iter().any(|share| share.delegate == Delegate::Writing);
        for share in shares.iter() {
            let holder = Arc::new(Clients(Arc::downgrade(&server)));
            share.delegations.are_of(holder, Arc::clone(&server.can_delegate), for_writing);
        }
        Ok(Nfs4(server))
    }

    /// Leases do not expire while one of these reactors stands still.
    pub fn watch(&self, reactors: &Reactors) {
        self.0.clock.watch(reactors);
    }

    /// Registers the numbers of clients and of what they hold.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(&self, registry: &Registry) -> Result<Vec<Registered>, RegisterError> {
        const METRICS: [(Description, Select); 4] = [
            (
                Description { name: "thruway_nfs_clients", help: "Clients of version 4, and of version 3 with locks." },
                |counts| counts.clients,
            ),
            (Description { name: "thruway_nfs_opens", help: "Open files of clients." }, |counts| counts.opens),
            (Description { name: "thruway_nfs_locks", help: "Locked ranges of clients." }, |counts| counts.locks),
            (Description { name: "thruway_nfs_delegations", help: "Delegations to clients." }, |counts| {
                counts.delegations
            }),
        ];
        let register = |(description, read): (Description, Select)| {
            let server = Arc::downgrade(&self.0);
            let read = move || {
                let counts = server.upgrade().map(|server| server.state(|state, _| state.count_held()));
                counts.map_or(0, |counts| i64::try_from(read(&counts)).unwrap_or(i64::MAX))
            };
            registry.gauge_of(description, &[], read)
        };
        METRICS.into_iter().map(register).collect()
    }

    /// A line for each client of version 4, and of version 3 that has locks: who it is, and what it has.
    pub fn clients(&self) -> Vec<String> {
        self.0.state(|state, now| state.describe_clients(now))
    }
}

/// Number of items in one unit of work of [`in_steps`]: files to close, locks to give, callbacks to start.
const ITEMS_OF_UNIT: usize = 16;

/// Calls `action` with each item: with many items in steps, so that calls of others run between them. Further steps wait until the host of the
/// current call has a turn.
fn in_steps<T: 'static>(items: Vec<T>, action: impl FnMut(T) + 'static) {
    if items.len() <= ITEMS_OF_UNIT || reactor::node().is_none() {
        return items.into_iter().for_each(action);
    }
    reactor::start(caller::inherited(steps(items, action)));
}

/// Closes files, many of them in steps, which do not wait for a host: the files do not count for their host any more, and others may need
/// their descriptors.
fn close_all(dropped: Vec<OpenGuard>) {
    if dropped.len() > ITEMS_OF_UNIT && reactor::node().is_some() {
        reactor::start(steps(dropped, drop));
    }
}

async fn steps<T>(items: Vec<T>, mut action: impl FnMut(T)) {
    for (number, item) in items.into_iter().enumerate() {
        if number.is_multiple_of(ITEMS_OF_UNIT) {
            // From here on the task is on its own, without a host unless it has inherited one.
            tokio::task::yield_now().await;
            slices::spend(1).await;
        }
        action(item);
    }
}

impl Server {
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    /// Does something with the state of clients. What was kept open is let go when others can go on.
    pub(crate) fn state<T>(self: &Arc<Self>, action: impl FnOnce(&mut State, u64) -> T) -> T {
        let (result, dropped, notices, freed, recalls) = {
            let mut state = self.state.lock().expect("no panics under the lock");
            let now = self.now();
            state.tick(now);
            let result = action(&mut state, now);
            (result, state.take_dropped(), state.take_notices(), state.take_freed(), state.take_recalls())
        };
        if !freed.is_empty() {
            let server = Arc::clone(self);
            in_steps(freed, move |freed| {
                if let Some(give) = server.lock_waits.get() {
                    give(freed);
                }
            });
        }
        close_all(dropped);
        in_steps(notices, |(session, notice)| send(session, notice));
        if !recalls.is_empty() {
            let server = Arc::clone(self);
            in_steps(recalls, move |number| recall::start(&server, number));
        }
        result
    }

    /// As [`Server::state`], again and again while something is in the way that goes: what clients have whose leases have expired is taken
    /// from them, and delegations that have been recalled are waited for, for [`recall::WAIT`] at most.
    pub(crate) async fn retry_on_conflict<T>(
        self: &Arc<Self>,
        mut action: impl FnMut(&mut State, u64) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        let mut until = None;
        loop {
            match self.state(&mut action) {
                Err(Refused::Expired(client)) => self.expire(client).await?,
                Err(Refused::Delegated) => {
                    let given_back = self.given_back.notified();
                    tokio::pin!(given_back);
                    given_back.as_mut().enable();
                    // It may have been given back just now.
                    match self.state(&mut action) {
                        Err(Refused::Delegated) => {}
                        other => return other,
                    }
                    let until = *until.get_or_insert_with(|| tokio::time::Instant::now() + recall::WAIT);
                    if tokio::time::timeout_at(until, given_back).await.is_err() {
                        return Err(Refused::Delegated);
                    }
                }
                other => return other,
            }
        }
    }

    /// Removes the state of an expired client, in a separate task: it is completed even if the call that needs it ends early.
    async fn expire(self: &Arc<Self>, client: u64) -> Result<(), Status> {
        let (server, (done, result)) = (Arc::clone(self), tokio::sync::oneshot::channel());
        thruway_engine::reactor::start(async move {
            let _ = done.send(server.expire_now(client).await);
        });
        result.await.unwrap_or(Err(Status::DELAY))
    }

    async fn expire_now(self: &Arc<Self>, client: u64) -> Result<(), Status> {
        if !self.state(|state, now| state.give_up(now, client)) {
            return Ok(());
        }
        // It must not reclaim, after a restart, what others have had meanwhile.
        if let Err(status) = self.store().await {
            self.state(|state, _| state.keep(client));
            return Err(status);
        }
        let name = self.state(|state, _| state.name_of(client));
        if self.state(|state, now| state.expire(now, client)) {
            tracing::info!(client = name, "lease expired: what the client had open and locked goes to another");
            return Ok(());
        }
        // It was heard of at the last moment.
        self.store().await
    }

    /// Checks that a client may get new state or reclaim, and brings the list of clients to stable storage first.
    pub(crate) async fn may_have(self: &Arc<Self>, client: u64, is_reclaim: bool) -> Result<GrantPermit, Status> {
        let records =
            self.state(
                |state, now| {
                    if is_reclaim { state.may_reclaim(now, client) } else { state.may_begin(now, client) }
                },
            )?;
        if !self.recovery.has(records) {
            self.store_until(records).await?;
        }
        Ok(GrantPermit::stored(client, is_reclaim))
    }

    /// Brings to stable storage which clients have something.
    async fn store(self: &Arc<Self>) -> Result<(), Status> {
        let now = self.state(|state, now| state.records(now).0);
        self.store_until(now).await
    }

    /// As [`Server::store`], if this state of affairs or a later one is not stored yet.
    async fn store_until(self: &Arc<Self>, number: u64) -> Result<(), Status> {
        let records = || {
            self.state(|state, now| {
                let (number, clients) = state.records(now);
                (number, clients, state.has_earlier())
            })
        };
        self.recovery.store(number, records).await.map_err(|error| {
            tracing::error!(%error, "cannot note which clients have files open");
            Status::DELAY
        })
    }

    async fn answer(self: &Arc<Self>, call: &Call, results: Encoder) -> Result<Encoder, Refusal> {
        match call.procedure {
            0 => Ok(results),
            _ if !self.shares.admit(&call.connection) => Err(Refusal::Auth(AuthError::TooWeak)),
            1 => Compound::run(self, call, results).await.map_err(|error| {
                tracing::debug!(%error, "a compound that cannot be decoded");
                Refusal::GarbageArguments
            }),
            _ => Err(Refusal::ProcedureUnavailable),
        }
    }
}

/// A client that has no time for a notice gets it again after this long, so often.
const NOTICE_AGAIN_AFTER: Duration = Duration::from_millis(100);
const NOTICE_TRIES: u32 = 10;

/// Sends a notice to a client. One that does not get it asks again.
fn send(session: Arc<Session>, notice: Notice) {
    thruway_engine::reactor::start(async move {
        let Some(back) = Back::of(&session) else { return };
        for attempt in 1..=NOTICE_TRIES {
            match back.send(&session, &notice).await {
                Ok(Some(status)) if status == Status::DELAY.0 && attempt < NOTICE_TRIES => {
                    tokio::time::sleep(NOTICE_AGAIN_AFTER).await;
                }
                Ok(status) => return tracing::debug!(client = session.client, status, ?notice, "callback answered"),
                Err(error) => return tracing::debug!(client = session.client, %error, ?notice, "callback failed"),
            }
        }
    });
}

impl Program for Nfs4 {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        4..=4
    }

    /// The data of a WRITE behind SEQUENCE and PUTFH, as clients send it.
    fn find_bulk(&self, call: &CallHeader<'_>, arguments: &mut Decoder<'_>) -> xdr::Result<bool> {
        if call.procedure != 1 {
            return Ok(false);
        }
        let d = arguments;
        let _ = (d.opaque(compound::TAG_MAX)?, d.u32()?);
        for _ in 0..d.u32()? {
            match d.u32()? {
                op::SEQUENCE => drop((d.fixed::<16>()?, d.u32()?, d.u32()?, d.u32()?, d.u32()?)),
                op::PUTFH => drop(d.opaque(compound::HANDLE_MAX)?),
                op::WRITE => {
                    let _ = (crate::state::Stateid::decode(d)?, d.u64()?, d.u32()?);
                    return Ok(true);
                }
                _ => return Ok(false),
            }
        }
        Ok(false)
    }

    /// One that is found by [`Program::find_bulk`], as clients send it.
    fn is_of_data(&self, call: &Call) -> bool {
        numbered_ops::is_write(call.argument_bytes())
    }

    fn is_repeatable(&self, call: &Call) -> bool {
        call.procedure != 1 || numbered_ops::is_repeatable(call.argument_bytes())
    }

    fn announces_changes(&self) -> bool {
        true
    }

    fn call<'a>(&'a self, call: &'a Call, results: Encoder) -> Answer<'a> {
        Box::pin(async move { self.0.answer(call, results).await.into() })
    }
}

#[cfg(test)]
mod tests;
