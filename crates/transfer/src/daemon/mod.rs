//! The serving end: accepts sessions, decides who may do what, runs their source or sink.
//!
//! One thread listens and hands connections out; every session has a thread, a device and a pool
//! of its own, so nothing on the data path is shared between sessions but the stages' queues.

mod greetings;
mod request;

use crate::access::{AuthorizedKeys, Principal};
use crate::auth::{Credentials, PublicKey};
use crate::channel_registry::{ChannelLimits, ChannelRegistry};
use crate::link::{Arrival, Channels, Link, LinkError, Role, blocks_for, greet};
use crate::session::{Cancel, LocalError, OnReport, PipelineSet, Progress, SessionError, SessionParams};
use crate::sink;
use crate::source;
use crate::wire::{self, AbortCode, AuthKind, Control, Direction, Hello, SessionReply, SessionRequest, Summary, Token};
use greetings::Greetings;
use request::{Listing, Served, Work};
use rustix::fs::{Mode, OFlags};
use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};
use thruway_engine::aead::Sealer;
use thruway_engine::quota::Quota;
use thruway_engine::quota::is_fair;
use thruway_engine::{Owner, limits};
use thruway_fabric::{ConnectionEvent, ConnectionRequest, Device, ListenOptions, Listener, Provider, iwarp};
use thruway_server::admission::{Admission, Answer, Limits, Slot};
use thruway_tcp::Origin;

/// A directory that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// Name for clients.
    pub name: String,
    /// The directory.
    pub dir: PathBuf,
    /// Nothing may be written.
    pub read_only: bool,
    /// Links lead wherever they lead, `..` included: for a peer that acts for the user this daemon runs as.
    pub unconfined: bool,
}

/// Name of the export that is always there: `zero` to read from, `null` to write to.
pub const DEV_EXPORT: &str = "dev";

/// Most lines of a message of a listing.
const LISTING_LINES: usize = 24;

/// Block length in bytes. Sessions with longer blocks have fewer of them, so their pools are not larger.
const LONG_BLOCK: usize = 4 << 20;

/// Most connections over plain TCP during their greeting, before new ones evict older ones. Less if the limit of open files is low.
const GREETINGS_MAX: usize = 512;
/// Age from which such a connection may be evicted.
const GREETING_GRACE: Duration = Duration::from_millis(500);
/// Peers that have not proved yet who they are, in all, from one origin, and waiting their turn. Fewer where descriptors
/// are few.
const HANDSHAKES_MAX: usize = 256;
const HANDSHAKES_OF_ONE_MAX: usize = 32;
const HANDSHAKES_WAITING_MAX: usize = 4096;
/// Descriptors that such a peer costs, with some to spare.
const HANDSHAKE_DESCRIPTORS: usize = 16;
/// Divisor: a quarter of the limit on open files is for large files of sessions. Direct I/O opens a file twice.
const OPEN_FILES: u64 = 4;
/// Most connections that have not sent their first message over RDMA. Fewer where descriptors are few.
const PENDING_MAX: usize = 1024;
/// Most data connections of sessions whose peers have not proved their identities. Fewer where descriptors are few.
const CHANNELS_PENDING_MAX: usize = 512;

/// How a daemon behaves.
pub struct Config {
    /// Addresses to listen at.
    pub listen: Vec<SocketAddr>,
    /// Directories to serve.
    pub exports: Vec<Export>,
    /// The daemon's credentials.
    pub credentials: Credentials,
    /// Keys that may use it, with their rights.
    pub authorized: AuthorizedKeys,
    /// Accept unauthenticated peers, too.
    pub anonymous: bool,
    /// The user this daemon runs as, and root, may use it over the loopback interface without a key.
    pub local: bool,
    /// Refuse sessions whose data would travel in clear.
    pub require_encryption: bool,
    /// Refuse sessions whose data would not be verified.
    pub require_verification: bool,
    /// Sessions at a time; more are refused.
    pub max_sessions: usize,
    /// Large files that all sessions may have open. `None`: a quarter of the limit on open files.
    pub large_files: Option<usize>,
    /// Largest block that is accepted.
    pub block_len_max: u32,
    /// Blocks of one session.
    pub blocks: usize,
    /// Stop after the first session.
    pub once: bool,
    /// The fabric.
    pub fabric: Provider,
}

impl Config {
    /// A daemon that serves nothing yet, to the user that it runs as; over iWARP in user space and plain TCP.
    pub fn new(listen: SocketAddr, credentials: Credentials) -> Config {
        Config {
            listen: vec![listen],
            exports: Vec::new(),
            credentials,
            authorized: AuthorizedKeys::default(),
            anonymous: false,
            local: true,
            require_encryption: false,
            require_verification: false,
            max_sessions: 2048,
            large_files: None,
            block_len_max: 16 << 20,
            blocks: 64,
            once: false,
            fabric: iwarp::Config { crc: false, ..iwarp::Config::default() }.into(),
        }
    }

    /// Serves a directory under a name.
    #[must_use]
    pub fn export(mut self, name: &str, dir: impl Into<PathBuf>, read_only: bool) -> Config {
        self.exports.push(Export { name: name.into(), dir: dir.into(), read_only, unconfined: false });
        self
    }
}

/// A running daemon.
pub struct Daemon {
    shared: Arc<Shared>,
    device: Device,
    listeners: Vec<Listener>,
}

struct Shared {
    config: Config,
    pipelines: Arc<PipelineSet>,
    exports: HashMap<String, Served>,
    authorized: RwLock<AuthorizedKeys>,
    greetings: Arc<Greetings>,
    handshakes: Arc<Admission<Caller>>,
    channels: Mutex<ChannelRegistry<Arrival>>,
    /// Sessions in progress, by a number of their own.
    running: Mutex<HashMap<u64, Running>>,
    next_running: AtomicU64,
    next_session: AtomicU32,
    active: AtomicUsize,
    /// Large files that sessions have open.
    open_files: Arc<Quota>,
    stop: AtomicBool,
    listener: Device,
}

/// Stops a daemon from another thread.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// Makes [`Daemon::run`] return.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
        let mut ended = Vec::new();
        for running in lock(&self.0.running).values() {
            running.cancel.cancel(AbortCode::Busy, "the daemon stops");
            ended.push(running.cancel.clone());
        }
        Cancel::hang_up_later(ended);
        self.0.listener.wake();
    }

    /// Sessions that are being served.
    pub fn sessions(&self) -> usize {
        lock(&self.0.running).len()
    }

    /// From now on these keys may use the daemon. Sessions of others, and of those whose rights are not the same any
    /// more, end.
    pub fn set_authorized(&self, keys: AuthorizedKeys) {
        let mut authorized = self.0.authorized.write().expect("no panics under the lock");
        *authorized = keys;
        let mut ended = Vec::new();
        for running in lock(&self.0.running).values() {
            let Principal::Key(key, _) = &running.principal else { continue };
            match authorized.principal(key) {
                Some(now) if now == running.principal => continue,
                Some(_) => running.cancel.cancel(AbortCode::Busy, "your rights have changed"),
                None => {
                    tracing::info!(%key, "the key has been revoked: its session ends");
                    running.cancel.cancel(AbortCode::Refused, "your key has been revoked");
                }
            }
            ended.push(running.cancel.clone());
        }
        Cancel::hang_up_later(ended);
    }
}

/// Why a daemon does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An export cannot be called so.
    #[error("invalid name of an export '{0}' (expected no slash, and not '{DEV_EXPORT}')")]
    ExportName(String),
    /// Two exports have one name.
    #[error("export '{0}' is given twice")]
    DuplicateExport(String),
    /// The directory of an export cannot be opened.
    #[error("export {name}={}: {source}", dir.display())]
    Export {
        /// The export.
        name: String,
        /// Its directory.
        dir: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// No threads or memory for the stages.
    #[error("cannot start the storage stage: {0}")]
    Stages(std::io::Error),
    /// There is no device to listen with, or it cannot listen on an address.
    #[error(transparent)]
    Fabric(#[from] thruway_fabric::Error),
}

impl Daemon {
    /// Opens the exports and listens.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: Config) -> Result<Daemon, StartError> {
        let pipelines = PipelineSet::new().map_err(StartError::Stages)?;
        Daemon::start_with(config, pipelines)
    }

    /// As [`Daemon::start`], with the stages of another part of this process.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start_with(mut config: Config, pipelines: Arc<PipelineSet>) -> Result<Daemon, StartError> {
        let exports = open_exports(&config.exports)?;
        let device = config.fabric.open()?;
        let mut listeners = Vec::new();
        // RFTP over plain TCP comes to the same port.
        let shares = ConnectionShares::of(limits::share_of_listener(1));
        let options = ListenOptions { accept_foreign: true, max_pending: shares.pending, ..ListenOptions::default() };
        for &addr in &config.listen {
            if !addr.ip().to_canonical().is_loopback() && config.anonymous {
                tracing::warn!(%addr, "anonymous peers may connect from other hosts");
            }
            listeners.push(device.listen(addr, &options)?);
        }
        let authorized = RwLock::new(std::mem::take(&mut config.authorized));
        let shared = Arc::new(Shared {
            authorized,
            greetings: Greetings::new(shares.greetings, GREETING_GRACE),
            handshakes: Admission::new(shares.handshakes, waker(&device)),
            open_files: Quota::new(config.large_files.unwrap_or_else(|| limits::share_of_open_files(OPEN_FILES))),
            config,
            pipelines,
            exports,
            channels: Mutex::new(ChannelRegistry::new(shares.channels)),
            running: Mutex::default(),
            next_running: AtomicU64::new(0),
            next_session: AtomicU32::new(1),
            active: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            listener: device.clone(),
        });
        Ok(Daemon { shared, device, listeners })
    }

    /// The addresses listened at, with the ports the system chose.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.listeners.iter().map(Listener::local_addr).collect()
    }

    /// A handle to stop the daemon.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Serves until stopped, or, with [`Config::once`], until the first session is over.
    ///
    /// # Errors
    /// If the system cannot wait for connections any more.
    pub fn run(self) -> thruway_fabric::Result<()> {
        let shared = &self.shared;
        while !shared.stop.load(Ordering::SeqCst) {
            shared.follow(shared.handshakes.go_on());
            match self.device.poll_event() {
                Some(ConnectionEvent::Request(request)) => shared.route(request),
                Some(ConnectionEvent::Foreign { stream, prefix, peer }) => {
                    let origin = Origin::of_stream(&stream, peer);
                    shared.follow_greeting(origin, stream, prefix);
                }
                Some(_) => {}
                None => {
                    let next = lock(&shared.channels).expire(Instant::now());
                    let limit = next.unwrap_or(Duration::from_secs(5));
                    self.device.wait(Some(limit))?;
                }
            }
        }
        drop(self.listeners);
        shared.greetings.close();
        shared.handshakes.close();
        // Sessions in progress have been told to end.
        let patience = Instant::now();
        while shared.active.load(Ordering::SeqCst) > 0 && patience.elapsed() < Duration::from_secs(5) {
            let _ = self.device.wait(Some(Duration::from_millis(50)));
        }
        Ok(())
    }
}

impl Shared {
    fn route(self: &Arc<Shared>, request: ConnectionRequest) {
        let (peer, origin) = (request.peer(), request.origin());
        match Hello::decode(request.private_data()) {
            Ok(Hello::Control { auth, token }) if auth == AuthKind::of(&self.config.credentials) => {
                self.call(Arrival::Rdma(request), token, (peer, origin));
            }
            Ok(Hello::Control { .. }) => request.reject(b"this daemon wants another kind of credentials"),
            Ok(Hello::Data { token, .. }) => {
                if let Some(Arrival::Rdma(request)) = self.deliver(token, origin, Arrival::Rdma(request)) {
                    request.reject(b"too many data channels");
                }
            }
            Err(malformed) => {
                tracing::info!(%peer, %malformed, "refused");
                request.reject(malformed.0.as_bytes());
            }
        }
    }

    /// Starts a thread that reads the greeting of a connection and admits it.
    fn follow_greeting(self: &Arc<Shared>, origin: Origin, stream: TcpStream, prefix: Vec<u8>) {
        let Some(turn) = self.greetings.begin(origin, stream) else {
            return tracing::debug!(%origin, "refused: too many connections that have not sent a greeting");
        };
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("greeting".into()).stack_size(128 << 10);
        let spawned = thread.spawn(move || match greet(turn.stream(), &prefix) {
            Ok(hello) => match turn.end() {
                Some(stream) => shared.admit(&hello, stream),
                None => tracing::debug!(%origin, "evicted before its greeting was read"),
            },
            Err(error) => tracing::debug!(%error, "reading a greeting failed"),
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot start a thread for a greeting");
        }
    }

    fn admit(self: &Arc<Shared>, hello: &Hello, stream: TcpStream) {
        let Ok(peer) = stream.peer_addr() else { return };
        // As early as possible: the kernel knows a local peer only as long as it is there.
        let origin = Origin::of_stream(&stream, peer);
        match hello {
            Hello::Control { auth, token } if *auth == AuthKind::of(&self.config.credentials) => {
                self.call(Arrival::Tcp(stream), *token, (peer, origin));
            }
            Hello::Control { .. } => tracing::info!(%peer, "refused: another kind of credentials"),
            Hello::Data { token, .. } => drop(self.deliver(*token, origin, Arrival::Tcp(stream))),
        }
    }

    /// Hands a data connection to its session; gives back one too many.
    fn deliver(&self, token: Token, origin: Origin, arrival: Arrival) -> Option<Arrival> {
        let rejected = lock(&self.channels).deliver(token, origin, arrival, Instant::now());
        // Who drops those that have waited too long sleeps until then.
        self.listener.wake();
        rejected
    }

    /// A caller who wants a session: now, or when it is its turn.
    fn call(self: &Arc<Shared>, arrival: Arrival, token: Token, (peer, origin): (SocketAddr, Origin)) {
        // Its data connections may come as soon as it has connected, and wait with it.
        let opened = lock(&self.channels).register(token);
        let Some(arrivals) = opened else {
            tracing::warn!(%peer, "refused: the token of another session");
            return;
        };
        let registration = Registration { shared: Arc::clone(self), token };
        let caller = Caller { arrival, arrivals, registration, peer, origin };
        self.follow(self.handshakes.arrive(origin, caller));
    }

    /// Begins handshakes whose turn it is.
    fn follow(self: &Arc<Shared>, answer: Answer<Caller>) {
        for Caller { arrival, peer, .. } in answer.refuse {
            tracing::warn!(%peer, "refused: too many unauthenticated peers");
            if let Arrival::Rdma(request) = arrival {
                request.reject(b"too many handshakes; try again later");
            }
        }
        for (caller, turn) in answer.begin {
            self.begin(caller, turn);
        }
    }

    fn begin(self: &Arc<Shared>, caller: Caller, handshake: Slot<Caller>) {
        let Caller { arrival, arrivals, registration, peer, origin } = caller;
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("session".into()).stack_size(512 << 10);
        let peer = Peer { address: peer, origin };
        let spawned = thread.spawn(move || {
            let known = AtomicBool::new(false);
            let session = Session { shared: &shared, registration, peer, known: &known };
            // A panic ends its own session and no other.
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| session.run(arrival, arrivals, handshake)));
            match outcome {
                Ok(Ok(Some(summary))) => tracing::info!(%peer, ?summary, "session done"),
                Ok(Ok(None)) => {}
                Ok(Err(error)) => tracing::warn!(%peer, %error, "session failed"),
                Err(_) => tracing::error!(%peer, "a session panicked; please report this"),
            }
            // A stranger who happened to find the port does not count.
            if shared.config.once && known.load(Ordering::SeqCst) {
                shared.stop.store(true, Ordering::SeqCst);
            }
            shared.listener.wake();
        });
        if let Err(error) = spawned {
            tracing::warn!(%peer, %error, "cannot start a session");
        }
    }
}

/// Somebody who wants a session and has not proved yet who it is.
struct Caller {
    arrival: Arrival,
    arrivals: Receiver<Arrival>,
    registration: Registration,
    peer: SocketAddr,
    origin: Origin,
}

/// A session in progress.
struct Running {
    principal: Principal,
    origin: Origin,
    cancel: Cancel,
}

impl Running {
    /// Whether it belongs to this principal. Anonymous ones are distinguished by where they come from.
    fn is_of(&self, principal: &Principal, origin: Origin) -> bool {
        self.principal == *principal && (*principal != Principal::Anonymous || self.origin == origin)
    }
}

/// Owner of the tasks of a session: one for each principal, and one for each origin of anonymous peers.
fn owner_of(principal: &Principal, origin: Origin) -> Owner {
    let mut hasher = DefaultHasher::new();
    match principal {
        Principal::Operator => {}
        Principal::Key(key, _) => key.hash(&mut hasher),
        Principal::Anonymous => origin.hash(&mut hasher),
    }
    Owner(hasher.finish())
}

/// Registers a session for cancellation, until dropped.
struct Listed<'a> {
    shared: &'a Shared,
    number: u64,
}

impl<'a> Listed<'a> {
    fn new(shared: &'a Shared, principal: &Principal, origin: Origin, cancel: &Cancel) -> Listed<'a> {
        let number = shared.next_running.fetch_add(1, Ordering::Relaxed);
        let running = Running { principal: principal.clone(), origin, cancel: cancel.clone() };
        lock(&shared.running).insert(number, running);
        Listed { shared, number }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        lock(&self.shared.running).remove(&self.number);
    }
}

/// A place among the sessions that are allowed at a time.
struct SessionPlace<'a>(&'a Shared);

impl<'a> SessionPlace<'a> {
    fn take(shared: &'a Shared, principal: &Principal, origin: Origin) -> Option<SessionPlace<'a>> {
        let theirs = lock(&shared.running).values().filter(|running| running.is_of(principal, origin)).count();
        let before = shared.active.fetch_add(1, Ordering::SeqCst);
        let place = SessionPlace(shared);
        let left = shared.config.max_sessions.saturating_sub(before);
        // They are listed already with the one that they want.
        let fair = *principal == Principal::Operator || is_fair(theirs.saturating_sub(1), left);
        (left > 0 && fair).then_some(place)
    }
}

impl Drop for SessionPlace<'_> {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The peer of a session, for messages: its address, or through shared memory its user.
#[derive(Clone, Copy)]
struct Peer {
    address: SocketAddr,
    origin: Origin,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The peer has no port.
        if self.address.port() == 0 { self.origin.fmt(f) } else { self.address.fmt(f) }
    }
}

/// One session on its thread.
struct Session<'a> {
    shared: &'a Arc<Shared>,
    registration: Registration,
    peer: Peer,
    /// The peer has proved who it is.
    known: &'a AtomicBool,
}

impl Session<'_> {
    fn run(
        &self,
        arrival: Arrival,
        arrivals: Receiver<Arrival>,
        handshake: Slot<Caller>,
    ) -> Result<Option<Summary>, SessionError> {
        let config = &self.shared.config;
        let device = config.fabric.open()?;
        lock(&self.shared.channels).set_device(&self.registration.token, &device);
        let (mut link, key) = Link::accept(device, arrival, &config.credentials, self.registration.token)?;
        let Some(principal) = self.principal(key) else {
            let why = match self.peer.origin {
                Origin::User(_) if config.local => {
                    "this daemon serves only the user it runs as without a key (--authorized-keys lets keys in, \
                     --anonymous everybody)"
                }
                _ => {
                    "this daemon does not know your key; add the client's id.pub ('thruway keygen' makes one) to its authorized keys"
                }
            };
            return self.refuse(link, AbortCode::Refused, why.into());
        };
        let cancel = Cancel::new(link.device());
        link.end_with(&cancel);
        let _listed = Listed::new(self.shared, &principal, self.peer.origin, &cancel);
        if self.shared.stop.load(Ordering::SeqCst) {
            return self.refuse(link, AbortCode::Busy, "the daemon stops".into());
        }
        // A change of the keys since we looked may have missed this session.
        if self.principal(key).as_ref() != Some(&principal) {
            return self.refuse(link, AbortCode::Busy, "your rights have just changed".into());
        }
        drop(handshake);
        self.known.store(true, Ordering::SeqCst);
        let Some(_place) = SessionPlace::take(self.shared, &principal, self.peer.origin) else {
            return self.refuse(link, AbortCode::Busy, "too many sessions; try again later".into());
        };
        lock(&self.shared.channels).admit(self.registration.token, Instant::now());
        let Control::Session(asked) = link.prompt_control()? else {
            return Err(LinkError::Unexpected("first message").into());
        };
        let work = match request::open(self.shared, &asked, &principal) {
            Ok(work) => work,
            Err((code, why)) => return self.refuse(link, code, why),
        };
        self.negotiate(link, Channels::Take(arrivals), &asked, work, (cancel, owner_of(&principal, self.peer.origin)))
    }

    fn refuse(&self, mut link: Link, code: AbortCode, why: String) -> Result<Option<Summary>, SessionError> {
        tracing::info!(peer = %self.peer, why, "refused");
        link.abort(code, why);
        link.close();
        Ok(None)
    }

    /// Sends a listing, each piece when the peer has taken the one before it.
    fn send_listing(
        &self,
        mut link: Link,
        mut listing: Listing,
        cancel: &Cancel,
    ) -> Result<Option<Summary>, SessionError> {
        loop {
            if let Err(SessionError::Cancelled(code, why)) = cancel.check() {
                return self.refuse(link, code, why.into());
            }
            let (entries, last) = match listing.piece(LISTING_LINES) {
                Ok(piece) => piece,
                Err((code, why)) => return self.refuse(link, code, why),
            };
            link.send(&Control::Listing { entries, last })?;
            if last {
                link.close();
                return Ok(None);
            }
            link.until_sent(|| cancel.check().is_err())?;
        }
    }

    fn principal(&self, key: Option<PublicKey>) -> Option<Principal> {
        let Some(key) = key else {
            // Only the client that started us knows the secret.
            return Some(Principal::Operator);
        };
        let known = self.shared.authorized.read().expect("no panics under the lock").principal(&key);
        let local = (self.shared.config.local && self.peer.origin.is_own_user()).then_some(Principal::Operator);
        known.or(local).or(self.shared.config.anonymous.then_some(Principal::Anonymous))
    }

    fn negotiate(
        &self,
        mut link: Link,
        channels: Channels,
        asked: &SessionRequest,
        work: Work,
        (cancel, owner): (Cancel, Owner),
    ) -> Result<Option<Summary>, SessionError> {
        let session = self.shared.next_session.fetch_add(1, Ordering::SeqCst);
        let (offers, discard) = match &work {
            Work::Push(prepared, _) => (prepared.wants_offers(&asked.options), asked.export == DEV_EXPORT),
            Work::Pull(_) | Work::List(_) => (false, false),
        };
        let (rename, destination, resumable) = match &work {
            Work::Push(prepared, push) => (push.rename.clone(), push.destination.clone(), prepared.is_resumable()),
            Work::Pull(_) | Work::List(_) => (None, None, false),
        };
        link.send(&Control::SessionReply(SessionReply {
            session,
            rename,
            offers,
            resumable,
            destination,
            discard,
            revocable: link.revocable(),
        }))?;
        if let Work::List(listing) = work {
            return self.send_listing(link, listing, &cancel);
        }
        let config = &self.shared.config;
        // Both may have been asked in one breath with the session.
        let (mut block_len, mut count) = (None, None);
        let (block_len, count) = loop {
            match link.prompt_control()? {
                Control::BlockSize(len) if block_len.is_none() => {
                    let accepted = acceptable_block(len) && len <= config.block_len_max;
                    link.send(&Control::BlockSizeReply { accepted, largest: config.block_len_max })?;
                    block_len = accepted.then_some(len);
                }
                Control::Channels(wanted) if count.is_none() => count = Some(lock(&self.shared.channels).grant(wanted)),
                _ => return Err(LinkError::Unexpected("message in a negotiation").into()),
            }
            if let (Some(block_len), Some(count)) = (block_len, count) {
                break (block_len, count);
            }
        };
        // A daemon that serves one client only has no other sessions that could free memory or descriptors, so a retry would not help.
        let has_others = !matches!(config.credentials, Credentials::Secret(_));
        let depth = config.blocks.clamp(4, 1024);
        // The peer chooses the length of a block.
        let fewest = depth.min(depth * LONG_BLOCK / block_len as usize).max(4);
        let blocks = blocks_for(link.round_trip(), block_len, fewest);
        let stages = self.shared.pipelines.pick();
        stages.bind_current_thread();
        let pipeline = stages.with_pool(owner, blocks, block_len as usize, link.is_long());
        let pipeline = pipeline.map_err(|e| SessionError::from(LocalError::io("memory for blocks", e)));
        let pipeline = match pipeline.and_then(|pipeline| Ok(link.attach(&pipeline.pool).map(|()| pipeline)?)) {
            Ok(pipeline) => pipeline,
            Err(error) => {
                tracing::warn!(peer = %self.peer, %error, "session refused");
                let code = if has_others { AbortCode::Busy } else { AbortCode::Failed };
                return self.refuse(link, code, error.to_string());
            }
        };
        link.set_peer_revocable(asked.revocable);
        let role = if asked.direction == Direction::Push { Role::Sink } else { Role::Source };
        link.send(&Control::ChannelsReply(count))?;
        link.join(&channels, count, role)?;
        let offers = match asked.direction {
            // The pulling end knows whether it has something to resume.
            Direction::Pull => asked.options.update || asked.offers,
            _ => offers,
        };
        let params = SessionParams {
            session,
            block_len,
            long_path: link.is_long(),
            verify: wire::algorithm(asked.verify).map_err(LinkError::from)?,
            sealer: asked.data_key.map(|key| Arc::new(Sealer::new(&key))),
            options: asked.options.clone(),
            rate_limit: asked.rate_limit,
            cancel: Some(cancel),
            has_others,
            open_files: has_others.then(|| (Arc::clone(&self.shared.open_files), owner)),
        };
        let progress = Arc::new(Progress::default());
        let on_report: OnReport = Arc::new(|report| {
            let (path, why) = (crate::escape(&report.path), crate::escape_message(&report.message));
            tracing::info!(path, why, "not copied as asked");
        });
        let outcome = match work {
            Work::Push(prepared, _) => sink::run(link, &channels, &pipeline, &params, *prepared, &progress, &on_report),
            Work::Pull(roots) => {
                let destination = asked.destination.clone();
                source::run(link, &channels, &pipeline, &params, roots, offers, destination, &progress, &on_report)
            }
            Work::List(_) => unreachable!("answered above"),
        };
        outcome.map(Some)
    }
}

/// Checks the names of exports, without opening anything.
///
/// # Errors
/// [`StartError::ExportName`], [`StartError::DuplicateExport`].
pub fn check_export_names(exports: &[Export]) -> Result<(), StartError> {
    let mut names = std::collections::HashSet::new();
    for Export { name, .. } in exports {
        if name.is_empty() || name.contains('/') || name == DEV_EXPORT {
            return Err(StartError::ExportName(name.clone()));
        }
        if !names.insert(name) {
            return Err(StartError::DuplicateExport(name.clone()));
        }
    }
    Ok(())
}

/// Whether a daemon could serve these directories.
///
/// # Errors
/// [`StartError`].
pub fn check_exports(exports: &[Export]) -> Result<(), StartError> {
    open_exports(exports).map(drop)
}

fn open_exports(exports: &[Export]) -> Result<HashMap<String, Served>, StartError> {
    check_export_names(exports)?;
    let mut opened = HashMap::new();
    for export in exports {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&export.dir, flags, Mode::empty()).map_err(|e| StartError::Export {
            name: export.name.clone(),
            dir: export.dir.clone(),
            source: e.into(),
        })?;
        let Export { read_only, unconfined, .. } = *export;
        let is_top = export.dir == std::path::Path::new("/");
        let served = Served { name: export.name.clone(), root: Arc::new(dir), read_only, unconfined, is_top };
        opened.insert(export.name.clone(), served);
    }
    Ok(opened)
}

/// Wakes the thread that waits for a device.
fn waker(device: &Device) -> impl Fn() + Send + Sync + 'static {
    let device = device.clone();
    move || device.wake()
}

/// A connection that has waited this long for its turn is refused: its client would have given up by now, or soon will.
const PATIENCE: Duration = Duration::from_secs(8);

/// Limits on connections that belong to no session yet. Together they use at most the descriptors of one listener, unless those
/// are very few.
struct ConnectionShares {
    /// Connections that have not sent their first message over RDMA.
    pending: usize,
    /// Connections over TCP that have not sent their greeting.
    greetings: usize,
    handshakes: Limits,
    channels: ChannelLimits,
}

impl ConnectionShares {
    /// Divides this number of descriptors.
    fn of(descriptors: usize) -> ConnectionShares {
        let pending = (descriptors / 4).clamp(16, PENDING_MAX);
        let greetings = (descriptors / 8).clamp(4, GREETINGS_MAX);
        let all = (descriptors / (8 * HANDSHAKE_DESCRIPTORS)).clamp(4, HANDSHAKES_MAX);
        // Sessions are no connections of this kind; their data connections are limited by as many descriptors again.
        let channels = ChannelLimits { pending: (descriptors / 8).clamp(8, CHANNELS_PENDING_MAX), all: descriptors };
        // A connection that waits has one descriptor and no thread, so a burst may take everything that remains.
        let remaining =
            descriptors.saturating_sub(pending + greetings + channels.pending + all * HANDSHAKE_DESCRIPTORS);
        let handshakes = Limits {
            all,
            per_origin: HANDSHAKES_OF_ONE_MAX.min(all.div_ceil(2)),
            waiting: remaining.clamp(8, HANDSHAKES_WAITING_MAX),
            patience: PATIENCE,
        };
        ConnectionShares { pending, greetings, handshakes, channels }
    }
}

/// Whether a block size is one that can be worked with at all.
pub(crate) fn acceptable_block(len: u32) -> bool {
    wire::BLOCK_LEN.contains(&len) && len.is_multiple_of(4096)
}

/// Data connections of a session come in while it lives.
struct Registration {
    shared: Arc<Shared>,
    token: Token,
}

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.shared.channels).unregister(&self.token);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no panics under the lock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_without_a_session_use_the_descriptors_of_one_listener() {
        for open_files in [1 << 10, 4 << 10, 20_000, 1 << 20] {
            let descriptors = open_files / 4;
            let ConnectionShares { pending, greetings, handshakes, channels } = ConnectionShares::of(descriptors);
            let in_handshakes = handshakes.all * HANDSHAKE_DESCRIPTORS + handshakes.waiting;
            let used = pending + greetings + channels.pending + in_handshakes;
            assert!(used <= descriptors, "{used} of {descriptors}");
        }
        // A burst of 2000 clients waits with a limit of 20,000 open files.
        assert!(ConnectionShares::of(5000).handshakes.waiting > 2000);
    }
}
