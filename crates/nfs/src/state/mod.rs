//! Opens, locks and delegations of clients of all versions, without I/O, clock or threads. The caller passes the time, in milliseconds
//! since the server began.
//!
//! A client whose lease has expired keeps its state until another client asks for a conflicting state (RFC 8881, section 8.4.2.4
//! permits that). The request fails with [`Refused::Expired`]. Its caller first removes the expired client from stable storage, and
//! then its state ([`State::expire`]): so the client cannot reclaim after a restart what another client has had in between.

mod callback;
mod clients;
mod delegations;
pub(crate) mod described;
mod files;
mod monitored;
mod numbered;
mod offloads;
mod opens;
mod owners;
mod quotas;
mod ranges;
pub(crate) mod session;
mod waiting;

pub(crate) use callback::{Callback, Notice};
pub(crate) use clients::{ClientName, Kind, Maker, NewSession, Principal, Records};
pub(crate) use delegations::{Delegated, Recalled};
pub(crate) use files::{LockRequest, Modes, OpenAs, Owner, READ, WRITE};
pub(crate) use monitored::{Host, PendingGrant};
pub(crate) use numbered::{Reply, Role, Turn};
pub(crate) use quotas::HostCounts;
pub(crate) use ranges::Range;
pub(crate) use waiting::Waiting;

use self::clients::{Among, Client, Grace};
use self::delegations::RecentRecalls;
use self::files::{FileState, Held};
use self::monitored::WaitKey;
use self::offloads::Offload;
use self::owners::IdleOwners;
use self::quotas::{OpenFiles, RecallDelays, Usage};
use self::session::Session;
use crate::status::Status;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use thruway_rpc::xdr::{self, Decoder, Encoder};
use thruway_tcp::Origin;
use thruway_vfs::OpenGuard;

pub(crate) use thruway_vfs::identity::FileIdentity;

/// Identifies an open, a set of locks, a delegation or a copy of a client (`stateid4`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stateid {
    /// Number of its last change that the client knows; 0 stands for the latest.
    pub seqid: u32,
    pub other: [u8; 12],
}

impl Stateid {
    /// Nothing is open.
    pub(crate) const ANONYMOUS: Stateid = Stateid { seqid: 0, other: [0; 12] };
    /// Nothing is open, and modes that deny reading do not count.
    pub(crate) const BYPASS: Stateid = Stateid { seqid: u32::MAX, other: [0xff; 12] };
    /// Stands for the stateid of an earlier operation of the compound.
    pub(crate) const CURRENT: Stateid = Stateid { seqid: 1, other: [0; 12] };
    /// Result of CLOSE.
    pub(crate) const INVALID: Stateid = Stateid { seqid: u32::MAX, other: [0; 12] };

    pub(crate) fn decode(d: &mut Decoder<'_>) -> xdr::Result<Stateid> {
        Ok(Stateid { seqid: d.u32()?, other: *d.fixed()? })
    }

    pub(crate) fn encode(self, out: &mut Encoder) {
        out.u32(self.seqid);
        out.fixed(&self.other);
    }

    /// The same state after any number of changes.
    pub(crate) fn latest(self) -> Stateid {
        Stateid { seqid: 0, ..self }
    }

    pub(crate) fn is_special(self) -> bool {
        self.other == [0; 12] || self.other == [0xff; 12]
    }
}

/// Reasons for the refusal of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refused {
    Status(Status),
    /// It conflicts with the state of this client, whose lease has expired.
    Expired(u64),
    /// It conflicts with a lock.
    Denied(Denied),
    /// It conflicts with a delegation, which has been recalled.
    Delegated,
}

impl From<Status> for Refused {
    fn from(status: Status) -> Refused {
        Refused::Status(status)
    }
}

/// A conflicting lock (`LOCK4denied`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Denied {
    pub range: Range,
    pub is_write: bool,
    pub client: u64,
    pub owner: Box<[u8]>,
    /// Its client uses version 3.
    pub is_monitored: bool,
}

/// Permission for a client to get new state, or to reclaim state. The list of clients was stored after the check
/// ([`State::may_begin`]).
#[derive(Debug, Clone, Copy)]
pub(crate) struct GrantPermit {
    client: u64,
    /// It reclaims state, which the end of the grace period ends.
    is_reclaim: bool,
}

impl GrantPermit {
    /// Must be called after the list was stored.
    pub(crate) fn stored(client: u64, is_reclaim: bool) -> GrantPermit {
        GrantPermit { client, is_reclaim }
    }

    /// Client that this permit is for.
    pub(crate) fn client(self) -> u64 {
        self.client
    }
}

/// Maximum number of remembered clients with expired leases.
pub(crate) const EXPIRED_MAX: usize = 4096;
/// Maximum number of remembered stateids of expired clients of version 4.0.
pub(crate) const EXPIRED_STATE_MAX: usize = 64 << 10;
/// Maximum number of clients, confirmed or not.
pub(crate) const CLIENTS_MAX: usize = 4096;
/// Sessions of a client.
pub(crate) const SESSIONS_MAX: usize = 16;
/// Sessions of all clients.
pub(crate) const SESSIONS_TOTAL_MAX: usize = 8192;
/// Maximum number of bytes of all kept replies. A new session beyond that has two slots.
pub(crate) const KEPT_MAX: u64 = 256 << 20;
/// Maximum number of open files and lock owners of a client.
pub(crate) const HELD_MAX: usize = 16 << 10;
/// The same, of all clients. Quota of one host: eight times the remaining room. A long name of an owner counts more than once.
pub(crate) const HELD_TOTAL_MAX: usize = 1 << 20;
/// Opens and lock owners of one file. Quota of one host: eight times the remaining room.
pub(crate) const FILE_HELD_MAX: usize = 8192;
/// Maximum number of clients of version 3. They have no leases: without this limit, they could fill the table for ever.
pub(crate) const MONITORED_MAX: usize = CLIENTS_MAX / 2;
/// The same, of one host (of IPv6: of one network of 64 bits).
pub(crate) const CLIENTS_OF_HOST_MAX: usize = 64;
/// Waits for locks in one file: beyond that the longest waiting poll. Quota of one host: eight times the remaining room.
pub(crate) const WAITING_MAX: usize = 64;
/// The same, in all files.
pub(crate) const WAITS_TOTAL_MAX: usize = 16 << 10;
/// Locks in one file. Quota of one host: eight times the remaining room.
pub(crate) const LOCKS_MAX: usize = 8192;
/// The same, in all files.
pub(crate) const LOCKS_TOTAL_MAX: usize = 1 << 18;
/// Files delegated to a client.
pub(crate) const DELEGATIONS_OF_CLIENT_MAX: usize = 2048;
/// The same, to all clients.
pub(crate) const DELEGATIONS_MAX: usize = 16 << 10;
/// Maximum number of asynchronous copies of a client, including those whose end it has not confirmed. Further copies are synchronous.
pub(crate) const OFFLOADS_OF_CLIENT_MAX: usize = 16;
/// The same, of all clients.
pub(crate) const OFFLOADS_MAX: usize = 256;
/// Time after a recall in which the file is not delegated again, in milliseconds.
pub(crate) const RECENT_MS: u64 = 30_000;
/// Maximum number of files with such a recall. While there are as many, no file is delegated.
pub(crate) const RECENT_MAX: usize = 4096;
/// Maximum number of owners of a client of version 4.0.
pub(crate) const OWNERS_MAX: usize = 4096;
/// The same, of all clients. Quota of one host: eight times the remaining room.
pub(crate) const OWNERS_TOTAL_MAX: usize = 64 << 10;

/// The ids of clients of one name: confirmed, and not.
type ClientIds = (Option<u64>, Option<u64>);

/// The state of all clients.
pub(crate) struct State {
    /// Part of all stateids and client ids: identifies this run of the server.
    epoch: u32,
    lease_ms: u64,
    clients: HashMap<u64, Client>,
    by_owner: HashMap<ClientName, ClientIds>,
    pub(crate) sessions: HashMap<[u8; 16], Arc<Session>>,
    held: HashMap<u64, Held>,
    files: HashMap<FileIdentity, FileState>,
    grace: Grace,
    /// Number of the list of clients for stable storage; grows with each change of the list.
    records: u64,
    /// Number of the list that must be stored before any client may get new state.
    records_for_all: u64,
    /// Number of owners of version 4.0, of all clients.
    numbered: usize,
    /// Owners without open files and locks.
    idle_owners: IdleOwners,
    /// Locks in all files.
    locks: HostCounts,
    /// Waits for locks of all files, by host.
    waits: HostCounts,
    /// The last file that each owner of version 4.0 has closed, for a repeated CLOSE.
    closed: HashMap<u64, (u64, Owner)>,
    /// Clients of version 4.0 whose leases have expired, the last of them.
    expired: VecDeque<u64>,
    /// Numbers in the stateids of these clients.
    expired_state: HashSet<u64>,
    /// Guards of files that are no longer open. The caller drops them without the lock of the state.
    dropped: Vec<OpenGuard>,
    /// Files with released locks that clients wait for, and a range that contains these locks.
    to_wake: HashMap<FileIdentity, Range>,
    /// Free locks that clients of version 3 wait for.
    freed: Vec<PendingGrant>,
    /// Numbers of locks whose grants are on their way to clients of version 3, and the last number.
    giving: HashMap<WaitKey, u64>,
    given: u64,
    /// Callbacks that are due.
    notices: Vec<(Arc<Session>, Notice)>,
    /// Delegations, and those that have just been recalled.
    delegations: usize,
    recalls: Vec<u64>,
    recent: RecentRecalls,
    /// Copies, by number.
    offloads: HashMap<u64, Offload>,
    /// Weight of the state of all clients, and usage by host.
    weight: usize,
    origins: HashMap<Origin, Usage>,
    /// Open files, by number of the file system.
    open_files: HashMap<u64, OpenFiles>,
    recall_delays: HashMap<Origin, RecallDelays>,
    /// Times before which no client of a set expires.
    none_expired_before: RefCell<HashMap<Among, u64>>,
    /// Latest time of an operation.
    now: u64,
}

impl State {
    /// `before`: the clients that had state at the end of the last run. They may reclaim it.
    pub(crate) fn new(epoch: u32, lease_ms: u64, before: Records) -> State {
        State {
            epoch,
            lease_ms,
            clients: HashMap::new(),
            by_owner: HashMap::new(),
            sessions: HashMap::new(),
            held: HashMap::new(),
            files: HashMap::new(),
            grace: Grace::new(lease_ms, before),
            records: 0,
            records_for_all: 0,
            numbered: 0,
            idle_owners: IdleOwners::default(),
            locks: HostCounts::default(),
            waits: HostCounts::default(),
            closed: HashMap::new(),
            expired: VecDeque::new(),
            expired_state: HashSet::new(),
            dropped: Vec::new(),
            to_wake: HashMap::new(),
            freed: Vec::new(),
            giving: HashMap::new(),
            given: 0,
            notices: Vec::new(),
            delegations: 0,
            recalls: Vec::new(),
            recent: RecentRecalls::default(),
            offloads: HashMap::new(),
            weight: 0,
            origins: HashMap::new(),
            open_files: HashMap::new(),
            recall_delays: HashMap::new(),
            none_expired_before: RefCell::default(),
            now: 0,
        }
    }

    /// Sets the length of the grace period in milliseconds. The default is a lease time.
    pub(crate) fn with_grace_of(mut self, ms: u64) -> State {
        self.grace.until = ms;
        self
    }

    /// Advances the time to that of the operation that begins.
    pub(crate) fn tick(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// Guards of files that are no longer open, since the last call.
    pub(crate) fn take_dropped(&mut self) -> Vec<OpenGuard> {
        std::mem::take(&mut self.dropped)
    }

    /// Numbers of the delegations that were recalled since the last call.
    pub(crate) fn take_recalls(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.recalls)
    }

    /// A new number for a stateid. It is random: clients of version 4.0 are identified by it alone.
    fn number(&self) -> u64 {
        loop {
            let number = u64::from_be_bytes(thruway_engine::random::random());
            if !self.held.contains_key(&number) && !self.offloads.contains_key(&number) {
                return number;
            }
        }
    }

    fn stateid_of(&self, number: u64, seqid: u32) -> Stateid {
        let mut other = [0; 12];
        other[..4].copy_from_slice(&self.epoch.to_be_bytes());
        other[4..].copy_from_slice(&number.to_be_bytes());
        Stateid { seqid, other }
    }

    fn number_of(&self, stateid: Stateid) -> Option<u64> {
        let (epoch, number) = stateid.other.split_first_chunk::<4>().expect("twelve bytes");
        (*epoch == self.epoch.to_be_bytes()).then(|| u64::from_be_bytes(*number.first_chunk().expect("eight bytes")))
    }

    fn is_expired(&self, now: u64, client: &Client) -> bool {
        client.has_lease() && now.saturating_sub(client.lease.renewed()) > self.lease_ms
    }

    /// The refusal of a request that conflicts with the state of client `of`: `otherwise`, if the lease of that client has not expired.
    fn in_the_way(&self, now: u64, of: u64, otherwise: Refused) -> Refused {
        match self.clients.get(&of) {
            Some(client) if self.is_expired(now, client) => Refused::Expired(of),
            _ => otherwise,
        }
    }
}

#[cfg(test)]
mod tests;
