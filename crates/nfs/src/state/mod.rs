//! What clients of all versions have open and locked, without I/O, clock or threads: times are passed in, in milliseconds since the
//! server began.
//!
//! A client whose lease has expired keeps its state until another is in its way (RFC 8881, section 8.4.2.4 allows that): what would
//! conflict is [`Refused::Expired`], and its state is removed by [`State::expire`] when it no longer stands in stable storage, so
//! that it cannot be reclaimed after others have had what it had.

mod clients;
mod delegations;
mod described;
mod files;
mod monitored;
mod numbered;
mod offloads;
mod opens;
mod owners;
mod quotas;
mod ranges;
mod waiting;

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
use crate::v4::callback::Notice;
use crate::v4::session::Session;
use crate::v4::status::Status;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use thruway_rpc::xdr::{self, Decoder, Encoder};
use thruway_tcp::Origin;
use thruway_vfs::OpenGuard;

pub(crate) use thruway_vfs::identity::FileIdentity;

/// What a client calls something that it has (`stateid4`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stateid {
    /// Which change of it is meant; 0 for the latest.
    pub seqid: u32,
    pub other: [u8; 12],
}

impl Stateid {
    /// Nothing is open.
    pub(crate) const ANONYMOUS: Stateid = Stateid { seqid: 0, other: [0; 12] };
    /// Nothing is open, and modes that deny reading do not count.
    pub(crate) const BYPASS: Stateid = Stateid { seqid: u32::MAX, other: [0xff; 12] };
    /// The one that an earlier operation of the compound has made.
    pub(crate) const CURRENT: Stateid = Stateid { seqid: 1, other: [0; 12] };
    /// None; what CLOSE returns.
    pub(crate) const INVALID: Stateid = Stateid { seqid: u32::MAX, other: [0; 12] };

    pub(crate) fn decode(d: &mut Decoder<'_>) -> xdr::Result<Stateid> {
        Ok(Stateid { seqid: d.u32()?, other: *d.fixed()? })
    }

    pub(crate) fn encode(self, out: &mut Encoder) {
        out.u32(self.seqid);
        out.fixed(&self.other);
    }

    /// The same, whatever has become of it.
    pub(crate) fn latest(self) -> Stateid {
        Stateid { seqid: 0, ..self }
    }

    pub(crate) fn is_special(self) -> bool {
        self.other == [0; 12] || self.other == [0xff; 12]
    }
}

/// Why something is not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refused {
    Status(Status),
    /// What a client has whose lease has expired is in the way.
    Expired(u64),
    /// A lock is in the way.
    Denied(Denied),
    /// What is delegated to a client is in the way, and has been recalled.
    Delegated,
}

impl From<Status> for Refused {
    fn from(status: Status) -> Refused {
        Refused::Status(status)
    }
}

/// A lock that is in the way (`LOCK4denied`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Denied {
    pub range: Range,
    pub is_write: bool,
    pub client: u64,
    pub owner: Box<[u8]>,
    /// It is one of a client of version 3.
    pub is_monitored: bool,
}

/// Says that a client may have something new, or have back what it had, and that the clients that may reclaim are stored as they
/// were when that was found out ([`State::may_begin`]).
#[derive(Debug, Clone, Copy)]
pub(crate) struct GrantPermit {
    client: u64,
    /// It has back what it had, which ends with the time for that.
    is_reclaim: bool,
}

impl GrantPermit {
    /// To be called when they are stored.
    pub(crate) fn stored(client: u64, is_reclaim: bool) -> GrantPermit {
        GrantPermit { client, is_reclaim }
    }

    /// Client that this permit is for.
    pub(crate) fn client(self) -> u64 {
        self.client
    }
}

/// Clients whose leases have expired that are remembered.
pub(crate) const EXPIRED_MAX: usize = 4096;
/// Most stateids of expired version 4.0 clients that are remembered.
pub(crate) const EXPIRED_STATE_MAX: usize = 64 << 10;
/// Most clients, confirmed or not.
pub(crate) const CLIENTS_MAX: usize = 4096;
/// Sessions of a client.
pub(crate) const SESSIONS_MAX: usize = 16;
/// Sessions of all clients.
pub(crate) const SESSIONS_TOTAL_MAX: usize = 8192;
/// Bytes of replies that sessions may keep: beyond that, a new one has two slots.
pub(crate) const KEPT_MAX: u64 = 256 << 20;
/// Files that a client may have open, and owners of locks.
pub(crate) const HELD_MAX: usize = 16 << 10;
/// The same, of all clients; of the clients of one host, as much as eight times what is left. A long name of an owner counts more
/// than once.
pub(crate) const HELD_TOTAL_MAX: usize = 1 << 20;
/// Opens and lock owners of one file. Quota of one host: eight times the remaining room.
pub(crate) const FILE_HELD_MAX: usize = 8192;
/// Clients of version 3: they have no leases, and must not take all places for ever.
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
/// Copies of a client that go on after they have been answered, or of whose end it has not heard; beyond that, copies are done
/// before they are answered.
pub(crate) const OFFLOADS_OF_CLIENT_MAX: usize = 16;
/// The same, of all clients.
pub(crate) const OFFLOADS_MAX: usize = 256;
/// So many milliseconds after one has been recalled, a file is not delegated again.
pub(crate) const RECENT_MS: u64 = 30_000;
/// Files that this is known of; when there are more, none is delegated.
pub(crate) const RECENT_MAX: usize = 4096;
/// Owners of a client of version 4.0 whose operations are counted.
pub(crate) const OWNERS_MAX: usize = 4096;
/// The same, of all clients. Quota of one host: eight times the remaining room.
pub(crate) const OWNERS_TOTAL_MAX: usize = 64 << 10;

/// The ids of clients of one name: confirmed, and not.
type ClientIds = (Option<u64>, Option<u64>);

/// The state of all clients.
pub(crate) struct State {
    /// Tells stateids and client ids of this run from those of earlier ones.
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
    /// Owners whose operations are counted, of all clients.
    numbered: usize,
    /// Those that hold nothing.
    idle_owners: IdleOwners,
    /// Locks in all files.
    locks: HostCounts,
    /// Waits for locks of all files, by host.
    waits: HostCounts,
    /// The last file that an owner of version 4.0 has closed, and whose it was: a repeated CLOSE is still about it.
    closed: HashMap<u64, (u64, Owner)>,
    /// Clients of version 4.0 whose leases have expired, the last of them.
    expired: VecDeque<u64>,
    /// Numbers in the stateids of these clients.
    expired_state: HashSet<u64>,
    /// What kept files open; to be dropped when nothing waits for this state.
    dropped: Vec<OpenGuard>,
    /// Files with locks that were released and that clients wait for, and a range that contains these locks.
    to_wake: HashMap<FileIdentity, Range>,
    /// Locks that are free and that clients of version 3 wait for.
    freed: Vec<PendingGrant>,
    /// Numbers of such locks that are being given, and the last number.
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
    /// What clients hold, in all and by where they come from.
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
    /// Nothing yet; `before` are the clients that had state when the last run ended, who may reclaim it.
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

    /// Clients have so long to come back, in milliseconds, instead of a lease.
    pub(crate) fn with_grace_of(mut self, ms: u64) -> State {
        self.grace.until = ms;
        self
    }

    /// Advances the time to that of the operation that begins.
    pub(crate) fn tick(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// What was kept open for what is no longer open.
    pub(crate) fn take_dropped(&mut self) -> Vec<OpenGuard> {
        std::mem::take(&mut self.dropped)
    }

    /// Delegations that have been recalled since this was last asked for.
    pub(crate) fn take_recalls(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.recalls)
    }

    /// A number for something that a client has; not to be guessed, because clients of version 4.0 are known by it alone.
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

    /// Something in the way of a client is another's: whose it is decides what happens.
    fn in_the_way(&self, now: u64, of: u64, otherwise: Refused) -> Refused {
        match self.clients.get(&of) {
            Some(client) if self.is_expired(now, client) => Refused::Expired(of),
            _ => otherwise,
        }
    }
}

#[cfg(test)]
mod tests;
