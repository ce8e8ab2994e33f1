//! Calls in a session of minor version 1 or 2 (RFC 8881, section 2.10), from any reactor.
//!
//! Each reactor has a connection of its own. All connections share the session and its slots. A request keeps its slot until it has been
//! answered. After a lost connection it is sent again with the same sequence number, so the server executes it once. [`super::recovery`]
//! creates the sessions.

use super::super::compound::{Compound, Results};
use super::super::{ClientError, Result, UserCredential};
use super::callbacks::Callbacks;
use super::events::{Event, Events};
use super::options::ChooseRdma;
use crate::status::Status;
use crate::v4::op;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use thruway_engine::Segment;
use thruway_rpc::client::{CallError, Client, Reply};
use thruway_rpc::message::Refusal;
use thruway_server::{Body, Plain};
use thruway_vfs::Credentials;
use tokio::net::TcpSocket;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Maximum time for a reply; then the connection is replaced.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum time for a new connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between attempts to reach the server.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Shortest and longest delay before a repetition after `NFS4ERR_DELAY` or `NFS4ERR_GRACE`.
const DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// Maximum time of an operation that changes nothing; then it fails with `NFS4ERR_DELAY`.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of slots that the client requests.
pub(super) const SLOTS: u32 = 64;

/// Flags of SEQUENCE for state that the server has lost: all expired, some expired, revoked by the administrator, restart.
const STATE_LOST: u32 = 0x8 | 0x10 | 0x20 | 0x100;

/// Flag of SEQUENCE for revoked delegations.
const RECALLABLE_LOST: u32 = 0x40;

/// A session.
pub(super) struct Session {
    pub id: [u8; 16],
    /// Different for each session.
    pub generation: u64,
    /// Highest slot.
    highest: u32,
    /// Free slots, each with its last sequence number.
    free: Mutex<Vec<(u32, u32)>>,
    turns: Arc<Semaphore>,
    /// Maximum size of a READ and of a WRITE, in bytes.
    pub read_max: usize,
    pub write_max: usize,
}

impl Session {
    pub(super) fn new(id: [u8; 16], generation: u64, slots: u32, read_max: usize, write_max: usize) -> Arc<Session> {
        let slots = slots.clamp(1, SLOTS);
        Arc::new(Session {
            id,
            generation,
            highest: slots - 1,
            free: Mutex::new((0..slots).rev().map(|slot| (slot, 0)).collect()),
            turns: Arc::new(Semaphore::new(slots as usize)),
            read_max,
            write_max,
        })
    }

    /// Waits for a free slot; `None` if the session has ended.
    async fn slot(self: &Arc<Session>) -> Option<Slot> {
        let turn = Arc::clone(&self.turns).acquire_owned().await.ok()?;
        let (slot, last) = lock(&self.free).pop().expect("as many as there are turns");
        Some(Slot { of: Arc::clone(self), slot, sequence: last, _turn: turn })
    }

    /// Ends the session here: requests that wait for a slot go to the next session.
    pub(super) fn end(&self) {
        self.turns.close();
    }

    fn has_ended(&self) -> bool {
        self.turns.is_closed()
    }
}

/// A slot in use. It is returned when its request has been answered.
struct Slot {
    of: Arc<Session>,
    slot: u32,
    /// Sequence number of the last request that was answered.
    sequence: u32,
    _turn: OwnedSemaphorePermit,
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.of.free).push((self.slot, self.sequence));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panics under the lock")
}

/// A reply to a request in a session.
pub(super) struct Answer(Reply);

impl Answer {
    /// Status of the last operation.
    pub(super) fn status(&self) -> Result<Status> {
        Ok(Results::peek(&self.0)?.status())
    }

    /// The results behind SEQUENCE, once.
    pub(super) fn results(&self) -> Result<Results<'_>> {
        let mut results = Results::of(&self.0)?;
        results.next("SEQUENCE")?.fixed::<36>()?;
        Ok(results)
    }
}

/// The part of a client that all reactors share.
pub(super) struct Shared {
    /// Addresses of the server; each connection tries one after the other.
    servers: Vec<SocketAddr>,
    rdma: Option<ChooseRdma>,
    /// Minor version.
    pub minor: AtomicU32,
    session: watch::Sender<Option<Arc<Session>>>,
    /// Delegations, and calls of the server.
    pub callbacks: Callbacks,
    /// Delegations are requested.
    pub wants_delegations: bool,
    /// Time of the last reply in a session, in milliseconds since the start of the client.
    answered: AtomicU64,
    started: Instant,
    events: Events,
    /// Number of the client on the server.
    pub client: AtomicU64,
    /// Credentials for requests of the client itself.
    pub machine: Credentials,
    /// Name of this host.
    host: Vec<u8>,
    /// Distinguishes clients of this process.
    number: u64,
    /// The client has ended: requests fail.
    has_ended: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        servers: Vec<SocketAddr>,
        rdma: Option<ChooseRdma>,
        wants_delegations: bool,
        machine: Credentials,
        host: Vec<u8>,
        events: Events,
    ) -> Arc<Shared> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let over_rdma = rdma.is_some();
        Arc::new(Shared {
            servers,
            rdma,
            minor: AtomicU32::new(2),
            session: watch::Sender::new(None),
            callbacks: Callbacks::new(events.clone()),
            // Calls of the server come over TCP only.
            wants_delegations: wants_delegations && !over_rdma,
            answered: AtomicU64::new(0),
            started: Instant::now(),
            events,
            client: AtomicU64::new(0),
            machine,
            host,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            has_ended: AtomicBool::new(false),
        })
    }

    /// Sends a message to the thread, if it has not ended.
    pub(super) fn tell(&self, event: Event) {
        self.events.tell(event);
    }

    /// Time since the last reply in a session.
    pub(super) fn silence(&self) -> Duration {
        let answered = Duration::from_millis(self.answered.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(answered)
    }

    /// Makes this the session of requests from now on.
    pub(super) fn publish(&self, session: Option<Arc<Session>>) {
        self.session.send_replace(session);
    }

    pub(super) fn session(&self) -> Option<Arc<Session>> {
        self.session.borrow().clone()
    }

    /// Requests fail from now on.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
        if let Some(session) = self.session.send_replace(None) {
            session.end();
        }
    }

    fn check(&self) -> Result<()> {
        match self.has_ended.load(Ordering::Relaxed) {
            true => Err(CallError::from(io::Error::from(io::ErrorKind::NotConnected)).into()),
            false => Ok(()),
        }
    }

    /// Waits for a session that has not ended.
    async fn current(&self) -> Result<Arc<Session>> {
        let mut changes = self.session.subscribe();
        let can_be_used = |session: &Option<Arc<Session>>| {
            session.as_ref().is_some_and(|session| !session.has_ended()) || self.has_ended.load(Ordering::Relaxed)
        };
        let found = changes.wait_for(can_be_used).await.ok().and_then(|session| session.clone());
        self.check()?;
        found.ok_or_else(|| CallError::from(io::Error::from(io::ErrorKind::NotConnected)).into())
    }

    /// Executes operations as a user. They are executed once, also if the caller stops waiting.
    ///
    /// Operations that change something wait for the server without a limit. The others fail with `NFS4ERR_DELAY` after
    /// [`ANSWER_TIMEOUT`].
    pub(super) async fn call(self: &Arc<Shared>, who: &Credentials, compound: Compound) -> Result<Answer> {
        let changes = compound.changes();
        let exchange = self.exchange(who, compound);
        match changes {
            true => exchange.await,
            false => tokio::time::timeout(ANSWER_TIMEOUT, exchange)
                .await
                .unwrap_or(Err(ClientError::Status { operation: "SEQUENCE", status: Status::DELAY.0 })),
        }
    }

    pub(super) fn credential(&self, who: &Credentials) -> UserCredential {
        UserCredential::of(who, &self.host)
    }

    /// Repeats the request after a delay of the server and after the loss of the session.
    async fn exchange(self: &Arc<Shared>, who: &Credentials, mut compound: Compound) -> Result<Answer> {
        let mut delay = DELAYS.0;
        loop {
            let session = self.current().await?;
            let Some(slot) = session.slot().await else { continue };
            // In a task of its own, because the request keeps its slot until it has been answered, also if the caller stops waiting.
            let (shared, user, copy) = (Arc::clone(self), self.credential(who), compound.again());
            let answered = tokio::task::spawn_local(async move { shared.exchange_in_slot(slot, &user, copy).await });
            let answer = answered.await.unwrap_or_else(|error| match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is ending.
                Err(_) => Err(CallError::from(io::Error::from(io::ErrorKind::NotConnected)).into()),
            })?;
            let Some(answer) = answer else { continue };
            match answer.status()? {
                Status::DELAY | Status::GRACE => {
                    self.check()?;
                    tokio::time::sleep(delay).await;
                    delay = (delay * 2).min(DELAYS.1);
                }
                _ => return Ok(answer),
            }
        }
    }

    /// Executes operations in a session; `None` if it has ended.
    pub(super) async fn exchange_in(
        self: &Arc<Shared>,
        session: &Arc<Session>,
        who: &Credentials,
        compound: Compound,
    ) -> Result<Option<Answer>> {
        match session.slot().await {
            Some(slot) => self.exchange_in_slot(slot, &self.credential(who), compound).await,
            None => Ok(None),
        }
    }

    async fn exchange_in_slot(
        self: &Arc<Shared>,
        mut slot: Slot,
        user: &UserCredential,
        mut compound: Compound,
    ) -> Result<Option<Answer>> {
        let session = Arc::clone(&slot.of);
        let (mut delay, mut retry) = (DELAYS.0, Duration::ZERO);
        loop {
            self.check()?;
            if session.has_ended() {
                return Ok(None);
            }
            let lane = lane(self);
            let (number, rpc) = match lane.client(self).await {
                Ok(connected) => connected,
                Err(error) => {
                    tracing::debug!(%error, servers = ?self.servers, "no connection to the NFS server");
                    tokio::time::sleep(RETRY_INTERVAL).await;
                    continue;
                }
            };
            let sequence = slot.sequence.wrapping_add(1);
            let keep = compound.changes();
            let call = Compound::new().then(op::SEQUENCE, |out| {
                out.fixed(&session.id);
                [sequence, slot.slot, session.highest, keep.into()].into_iter().for_each(|word| out.u32(word));
            });
            let minor = self.minor.load(Ordering::Relaxed);
            let reply = match call.and(compound.again()).call(&rpc, minor, user).await {
                Ok(reply) => reply,
                Err(ClientError::Call(CallError::Connection(_) | CallError::TimedOut(_) | CallError::Malformed(_))) => {
                    lane.forget(number);
                    // At once after the first loss; a server that ends each connection costs little time.
                    tokio::time::sleep(retry).await;
                    retry = (retry * 2).clamp(DELAYS.0, RETRY_INTERVAL);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let status = {
                let mut results = Results::peek(&reply)?;
                results.next("SEQUENCE").map(|d| sequence_flags(d)).map_err(|error| error.status())
            };
            match status {
                Ok(flags) => {
                    slot.sequence = sequence;
                    self.answered.fetch_max(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
                    let flags = flags?;
                    if flags & (STATE_LOST | RECALLABLE_LOST) != 0 {
                        self.callbacks.recall_all();
                        self.tell(Event::Recalled);
                    }
                    if flags & STATE_LOST != 0 {
                        self.tell(Event::StateLost(session.generation));
                    }
                    return Ok(Some(Answer(reply)));
                }
                Err(Some(Status::DELAY)) => {
                    tokio::time::sleep(delay).await;
                    delay = (delay * 2).min(DELAYS.1);
                }
                Err(Some(Status::CONN_NOT_BOUND_TO_SESSION)) => {
                    lane.forget(number);
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                // The request was executed, its reply was lost, and the server has not kept it. The request changes nothing: again.
                Err(Some(Status::RETRY_UNCACHED_REP)) if !keep => slot.sequence = sequence,
                // The server has lost the session, or its sequence numbers differ.
                Err(
                    status @ Some(
                        Status::BADSESSION
                        | Status::DEADSESSION
                        | Status::BADSLOT
                        | Status::BAD_HIGH_SLOT
                        | Status::SEQ_MISORDERED
                        | Status::SEQ_FALSE_RETRY
                        | Status::STALE_CLIENTID,
                    ),
                ) => {
                    tracing::debug!(?status, "the NFS server has ended the session");
                    session.end();
                    self.tell(Event::SessionLost(session.generation));
                    return Ok(None);
                }
                Err(Some(status)) => return Err(ClientError::Status { operation: "SEQUENCE", status: status.0 }),
                Err(None) => return Err(ClientError::Status { operation: "SEQUENCE", status: Status::SERVERFAULT.0 }),
            }
        }
    }

    /// Number of this thread's connection, if there is one.
    pub(super) fn connection_if_any(self: &Arc<Shared>) -> Option<u64> {
        Some(lane(self).known()?.0)
    }

    /// Number of this thread's connection, which is established if there is none.
    pub(super) async fn connection(self: &Arc<Shared>) -> io::Result<u64> {
        Ok(lane(self).client(self).await?.0)
    }

    /// Executes an operation outside of a session, without repetition.
    pub(super) async fn call_alone(self: &Arc<Shared>, compound: Compound) -> Result<Reply> {
        let lane = lane(self);
        let (number, rpc) = lane.client(self).await.map_err(CallError::from)?;
        let minor = self.minor.load(Ordering::Relaxed);
        let reply = compound.call(&rpc, minor, &self.credential(&self.machine)).await;
        if let Err(ClientError::Call(_)) = reply {
            lane.forget(number);
        }
        reply
    }

    async fn connect(&self) -> io::Result<Client> {
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        for server in &self.servers {
            let connected = match &self.rdma {
                Some(choose) => match choose(*server) {
                    Ok(options) => Client::connect_rdma(*server, REPLY_TIMEOUT, &options).await,
                    Err(error) => Err(error),
                },
                None => connect(*server).await,
            };
            match connected {
                Ok(client) => return Ok(client),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }
}

/// Flags of a successful SEQUENCE.
fn sequence_flags(d: &mut thruway_rpc::xdr::Decoder<'_>) -> Result<u32> {
    let _session = d.fixed::<16>()?;
    let (_sequence, _slot, _highest, _target, flags) = (d.u32()?, d.u32()?, d.u32()?, d.u32()?, d.u32()?);
    Ok(flags)
}

/// Connects from a privileged port, if this process may: some servers refuse others (`secure` of exports(5)).
async fn connect(server: SocketAddr) -> io::Result<Client> {
    const PRIVILEGED: std::ops::Range<u16> = 665..1024;
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let first = u16::from_be_bytes(thruway_engine::random::random());
    let count = PRIVILEGED.len() as u16;
    let mut ports = (0..count).map(|n| PRIVILEGED.start + (first % count + n) % count);
    let mut may_be_privileged = true;
    let stream = loop {
        let socket = if server.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        let port = ports.next().filter(|_| may_be_privileged);
        if let Some(port) = port {
            // The port may be in use with another peer.
            socket.set_reuseaddr(true)?;
            match socket.bind(SocketAddr::new(any, port)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
                // Without the right, from any port.
                Err(_) => may_be_privileged = false,
            }
        }
        match tokio::time::timeout(CONNECT_TIMEOUT, socket.connect(server)).await {
            Ok(Ok(stream)) => break stream,
            Ok(Err(error)) if error.kind() == io::ErrorKind::AddrNotAvailable && port.is_some() => {}
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        }
    };
    stream.set_nodelay(true)?;
    Client::over(Plain::Tcp(stream), REPLY_TIMEOUT)
}

/// Connection of a reactor.
#[derive(Default)]
struct Lane {
    client: RefCell<Option<(u64, Client)>>,
    /// Number of the next connection.
    next: Cell<u64>,
    connecting: tokio::sync::Mutex<()>,
}

impl Lane {
    fn known(&self) -> Option<(u64, Client)> {
        self.client.borrow().clone().filter(|(_, client)| !client.has_ended())
    }

    /// The connection and its number. Connects if there is none.
    async fn client(&self, shared: &Arc<Shared>) -> io::Result<(u64, Client)> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let _alone = self.connecting.lock().await;
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let client = shared.connect().await?;
        if shared.wants_delegations {
            let of = Arc::downgrade(shared);
            client.answer_calls(Rc::new(move |call, d, out| match of.upgrade() {
                Some(shared) => shared.callbacks.answer(call, d, out),
                None => Err(Refusal::ProgramUnavailable),
            }));
        }
        let number = self.next.get();
        self.next.set(number + 1);
        *self.client.borrow_mut() = Some((number, client.clone()));
        Ok((number, client))
    }

    /// Drops the connection, if it is still the one with this number.
    fn forget(&self, number: u64) {
        let mut client = self.client.borrow_mut();
        if client.as_ref().is_some_and(|(known, _)| *known == number) {
            *client = None;
        }
    }
}

/// The connection of the reactor that runs this.
fn lane(shared: &Arc<Shared>) -> Rc<Lane> {
    /// By the numbers of clients.
    type Lanes = HashMap<u64, (Weak<Shared>, Rc<Lane>)>;
    thread_local! {
        static LANES: RefCell<Lanes> = RefCell::default();
    }
    LANES.with_borrow_mut(|lanes| {
        if let Some((_, lane)) = lanes.get(&shared.number) {
            return Rc::clone(lane);
        }
        lanes.retain(|_, (of, _)| of.strong_count() > 0);
        let lane = Rc::<Lane>::default();
        lanes.insert(shared.number, (Arc::downgrade(shared), Rc::clone(&lane)));
        lane
    })
}

/// Error of the file system for an error of the client. After `EAGAIN`, clients ask again.
pub(super) fn errno(error: ClientError) -> Errno {
    match error {
        ClientError::Status { status, .. } => errno_of(Status(status)),
        ClientError::Call(CallError::Refused(refusal)) => {
            tracing::warn!(%refusal, "the NFS server refuses a call");
            Errno::ACCESS
        }
        ClientError::Call(CallError::TimedOut(_) | CallError::Connection(_)) => Errno::AGAIN,
        error => {
            tracing::warn!(%error, "an answer of the NFS server that is not understood");
            Errno::IO
        }
    }
}

/// Error of the file system for a status.
fn errno_of(status: Status) -> Errno {
    match status {
        Status::BADHANDLE => Errno::STALE,
        Status::NOTSUPP | Status::ATTRNOTSUPP => Errno::OPNOTSUPP,
        Status::DELAY | Status::GRACE | Status::LOCKED | Status::NOT_SAME => Errno::AGAIN,
        Status::SHARE_DENIED | Status::WRONGSEC | Status::OPENMODE => Errno::ACCESS,
        Status::FILE_OPEN => Errno::BUSY,
        Status::NOXATTR => Errno::NODATA,
        Status::XATTR2BIG => Errno::TOOBIG,
        Status::BADNAME
        | Status::BADCHAR
        | Status::BADOWNER
        | Status::BADTYPE
        | Status::BAD_COOKIE
        | Status::SYMLINK
        | Status::WRONG_TYPE
        | Status::UNION_NOTSUPP => Errno::INVAL,
        Status::RESOURCE | Status::TOO_MANY_OPS | Status::REQ_TOO_BIG | Status::REP_TOO_BIG => Errno::IO,
        // The first statuses are error numbers of Unix; five differ in Linux.
        Status(63) => Errno::NAMETOOLONG,
        Status(66) => Errno::NOTEMPTY,
        Status(69) => Errno::DQUOT,
        Status(70) => Errno::STALE,
        Status(31) => Errno::MLINK,
        Status(number @ (1 | 2 | 5 | 6 | 13 | 17 | 18 | 20..=22 | 27 | 28 | 30)) => {
            Errno::from_raw_os_error(number as i32)
        }
        Status(number) => {
            tracing::warn!(status = number, "a status of the NFS server that no error says");
            Errno::IO
        }
    }
}

/// Data of a WRITE.
pub(super) fn body(segment: &Arc<Segment>, range: Range<usize>) -> Body {
    Body::Shared(Arc::clone(segment), range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_wait_for_a_session_that_has_not_ended() {
        let (events, _) = Events::new();
        let machine = Credentials { uid: 0, gid: 0, groups: Vec::new() };
        let shared = Shared::new(Vec::new(), None, false, machine, Vec::new(), events);
        let is_there = async || tokio::time::timeout(Duration::ZERO, shared.current()).await.is_ok();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            assert!(!is_there().await);
            let session = Session::new([1; 16], 1, 4, 4096, 4096);
            shared.publish(Some(Arc::clone(&session)));
            assert!(is_there().await);
            session.end();
            assert!(!is_there().await, "a request would try it again and again");
            shared.end();
            assert!(shared.current().await.is_err());
        });
    }

    #[test]
    fn statuses_come_back_as_the_errors_that_they_are_made_of() {
        for error in [
            Errno::PERM,
            Errno::NOENT,
            Errno::IO,
            Errno::NXIO,
            Errno::ACCESS,
            Errno::EXIST,
            Errno::XDEV,
            Errno::NOTDIR,
            Errno::ISDIR,
            Errno::INVAL,
            Errno::FBIG,
            Errno::NOSPC,
            Errno::ROFS,
            Errno::MLINK,
            Errno::NAMETOOLONG,
            Errno::NOTEMPTY,
            Errno::DQUOT,
            Errno::STALE,
            Errno::BUSY,
            Errno::NODATA,
            Errno::TOOBIG,
            Errno::OPNOTSUPP,
            Errno::AGAIN,
        ] {
            assert_eq!(errno_of(Status::from(error)), error);
        }
    }
}
