//! The serving end: accepts sessions, decides who may do what, runs their source or sink.
//!
//! One thread listens and hands connections out; every session has a thread, a device and a pool
//! of its own, so nothing on the data path is shared between sessions but the stages' queues.

use crate::auth::{AuthorizedKeys, Credentials, PublicKey, Rights};
use crate::doors::Doors;
use crate::link::{Arrival, Channels, Greeting, Link, LinkError, Role, blocks_for, greet};
use crate::session::{Engines, OnReport, Progress, SessionError, Terms};
use crate::sink::{self, Prepared, Target};
use crate::source::{self, Root};
use crate::wire::{self, Control, Direction, Hello, ListEntry, SessionReply, SessionRequest, Summary, Token};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thruway_engine::security::Sealer;
use thruway_fabric::{ConnectionEvent, ConnectionRequest, Device, ListenOptions, Listener, Provider};

/// A directory that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// What clients call it.
    pub name: String,
    /// Where it is.
    pub dir: PathBuf,
    /// Nothing may be written.
    pub read_only: bool,
}

/// Name of the export that is always there: `zero` to read from, `null` to write to.
pub const DEV_EXPORT: &str = "dev";

/// Connections whose greeting is being read at one time.
const GREETINGS_MAX: usize = 512;

/// How a daemon behaves.
pub struct Config {
    /// Addresses to listen at.
    pub listen: Vec<SocketAddr>,
    /// What is served.
    pub exports: Vec<Export>,
    /// Who the daemon is.
    pub credentials: Credentials,
    /// Who may use it.
    pub authorized: AuthorizedKeys,
    /// Anybody else may, too.
    pub anonymous: bool,
    /// Sessions at one time; more are refused.
    pub max_sessions: usize,
    /// Largest block that is accepted.
    pub block_len_max: u32,
    /// Blocks of one session.
    pub blocks: usize,
    /// Stop after the first session.
    pub once: bool,
    /// The fabric.
    pub fabric: Provider,
}

/// A running daemon.
pub struct Daemon {
    shared: Arc<Shared>,
    device: Device,
    listeners: Vec<Listener>,
}

struct Shared {
    config: Config,
    engines: Arc<Engines>,
    exports: HashMap<String, (Arc<OwnedFd>, bool)>,
    doors: Mutex<Doors<Arrival>>,
    next_session: AtomicU32,
    active: AtomicUsize,
    /// Threads that read a greeting.
    greeting: AtomicUsize,
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
        self.0.listener.wake();
    }
}

impl Daemon {
    /// Opens the exports and listens.
    ///
    /// # Errors
    /// A sentence naming what is wrong.
    pub fn start(config: Config) -> Result<Daemon, String> {
        let engines = Engines::new().map_err(|e| e.to_string())?;
        Daemon::start_with(config, engines)
    }

    /// As [`Daemon::start`], with the stages of another part of this process.
    ///
    /// # Errors
    /// A sentence naming what is wrong.
    pub fn start_with(config: Config, engines: Arc<Engines>) -> Result<Daemon, String> {
        let mut exports = HashMap::new();
        for export in &config.exports {
            if export.name.is_empty() || export.name.contains('/') || export.name == DEV_EXPORT {
                return Err(format!("export '{}': a name has no slash and is not '{DEV_EXPORT}'", export.name));
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let dir = rustix::fs::open(&export.dir, flags, Mode::empty())
                .map_err(|e| format!("export {}={}: {}", export.name, export.dir.display(), std::io::Error::from(e)))?;
            if exports.insert(export.name.clone(), (Arc::new(dir), export.read_only)).is_some() {
                return Err(format!("export '{}' is given twice", export.name));
            }
        }
        let device = config.fabric.open().map_err(|e| e.to_string())?;
        let mut listeners = Vec::new();
        // RFTP over plain TCP comes to the same port.
        let options = ListenOptions { accept_foreign: true, ..ListenOptions::default() };
        for addr in &config.listen {
            if !addr.ip().to_canonical().is_loopback() && config.anonymous {
                tracing::warn!(%addr, "anonymous peers may connect from other hosts");
            }
            listeners.push(device.listen(*addr, &options).map_err(|e| e.to_string())?);
        }
        let shared = Arc::new(Shared {
            config,
            engines,
            exports,
            doors: Mutex::default(),
            next_session: AtomicU32::new(1),
            active: AtomicUsize::new(0),
            greeting: AtomicUsize::new(0),
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
    pub fn run(self) -> Result<(), String> {
        let shared = &self.shared;
        while !shared.stop.load(Ordering::SeqCst) {
            match self.device.poll_event() {
                Some(ConnectionEvent::Request(request)) => shared.route(request),
                Some(ConnectionEvent::Foreign { stream, prefix, .. }) => shared.route_stream(stream, prefix),
                Some(_) => {}
                None => {
                    let next = lock(&shared.doors).expire(Instant::now());
                    let limit = next.unwrap_or(Duration::from_secs(5));
                    self.device.wait(Some(limit)).map_err(|e| e.to_string())?;
                }
            }
        }
        drop(self.listeners);
        // Sessions under way are ended by their own stop check.
        let patience = Instant::now();
        while shared.active.load(Ordering::SeqCst) > 0 && patience.elapsed() < Duration::from_secs(5) {
            let _ = self.device.wait(Some(Duration::from_millis(50)));
        }
        Ok(())
    }
}

impl Shared {
    fn route(self: &Arc<Shared>, request: ConnectionRequest) {
        let peer = request.peer();
        match Hello::decode(request.private_data()) {
            Ok(Hello::Control { auth, token }) if auth == self.config.credentials.kind() => {
                self.begin(Arrival::Rdma(request), token, peer);
            }
            Ok(Hello::Control { .. }) => request.reject(b"this daemon wants another kind of credentials"),
            Ok(Hello::Data { token, .. }) => {
                if let Some(Arrival::Rdma(request)) = self.hand_in(token, Arrival::Rdma(request)) {
                    request.reject(b"too many data channels");
                }
            }
            Err(malformed) => {
                tracing::info!(%peer, %malformed, "refused");
                request.reject(malformed.0.as_bytes());
            }
        }
    }

    /// Reads a caller's greeting on a thread of its own, which becomes the session's if it is a
    /// control connection.
    fn route_stream(self: &Arc<Shared>, stream: TcpStream, prefix: Vec<u8>) {
        if self.greeting.fetch_add(1, Ordering::SeqCst) >= GREETINGS_MAX {
            self.greeting.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("greeting".into()).stack_size(128 << 10);
        let spawned = thread.spawn(move || {
            let greeting = greet(stream, &prefix);
            shared.greeting.fetch_sub(1, Ordering::SeqCst);
            match greeting {
                Ok(Greeting { hello, stream }) => shared.admit(&hello, stream),
                Err(error) => tracing::debug!(%error, "no greeting"),
            }
        });
        if spawned.is_err() {
            self.greeting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn admit(self: &Arc<Shared>, hello: &Hello, stream: TcpStream) {
        let Ok(peer) = stream.peer_addr() else { return };
        match hello {
            Hello::Control { auth, token } if *auth == self.config.credentials.kind() => {
                self.begin(Arrival::Tcp(stream), *token, peer);
            }
            Hello::Control { .. } => tracing::info!(%peer, "refused: another kind of credentials"),
            Hello::Data { token, .. } => drop(self.hand_in(*token, Arrival::Tcp(stream))),
        }
    }

    /// Hands a data connection to its session; gives back one too many.
    fn hand_in(&self, token: Token, arrival: Arrival) -> Option<Arrival> {
        let given_back = lock(&self.doors).hand_in(token, arrival, Instant::now());
        // Who drops those that have waited too long sleeps until then.
        self.listener.wake();
        given_back
    }

    fn begin(self: &Arc<Shared>, arrival: Arrival, token: Token, peer: SocketAddr) {
        if self.active.fetch_add(1, Ordering::SeqCst) >= self.config.max_sessions {
            self.active.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!(%peer, "too many sessions");
            if let Arrival::Rdma(request) = arrival {
                request.reject(b"too many sessions; try again later");
            }
            return;
        }
        let shared = Arc::clone(self);
        // Its data connections may come as soon as this one has been answered.
        let opened = lock(&self.doors).open(token, Instant::now());
        let Some(arrivals) = opened else {
            self.active.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!(%peer, "refused: the token of another session");
            return;
        };
        let door = Door { shared: Arc::clone(self), token };
        let thread = std::thread::Builder::new().name("session".into()).stack_size(512 << 10);
        let spawned = thread.spawn(move || {
            let outcome = Session { shared: &shared, door, peer }.run(arrival, arrivals);
            match outcome {
                Ok(Some(summary)) => tracing::info!(%peer, ?summary, "session done"),
                Ok(None) => {}
                Err(error) => tracing::warn!(%peer, %error, "session failed"),
            }
            shared.active.fetch_sub(1, Ordering::SeqCst);
            if shared.config.once {
                shared.stop.store(true, Ordering::SeqCst);
            }
            shared.listener.wake();
        });
        if let Err(error) = spawned {
            self.active.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!(%peer, %error, "cannot start a session");
        }
    }
}

/// One session on its thread.
struct Session<'a> {
    shared: &'a Arc<Shared>,
    door: Door,
    peer: SocketAddr,
}

/// What was asked for, opened.
enum Work {
    Push(Prepared, Option<Vec<u8>>),
    Pull(Vec<Root>),
    List(Vec<ListEntry>),
}

impl Session<'_> {
    fn run(&self, arrival: Arrival, arrivals: Receiver<Arrival>) -> Result<Option<Summary>, SessionError> {
        let config = &self.shared.config;
        let device = config.fabric.open()?;
        lock(&self.shared.doors).wake(&self.door.token, &device);
        let (mut link, key) = Link::accept(device, arrival, &config.credentials)?;
        let rights = match self.rights(key) {
            Some(rights) => rights,
            None => {
                return self.refuse(
                    link,
                    "this daemon does not know your key; add its public half to the authorized keys".into(),
                );
            }
        };
        let Control::Session(asked) = link.next_control()? else {
            return Err(LinkError::Unexpected("first message").into());
        };
        let work = match self.open(&asked, rights) {
            Ok(work) => work,
            Err(why) => return self.refuse(link, why),
        };
        self.negotiate(link, Channels::Take(arrivals), &asked, work)
    }

    fn refuse(&self, mut link: Link, why: String) -> Result<Option<Summary>, SessionError> {
        tracing::info!(peer = %self.peer, why, "refused");
        link.abort(why);
        link.close();
        Ok(None)
    }

    fn rights(&self, key: Option<PublicKey>) -> Option<Rights> {
        let config = &self.shared.config;
        match key {
            // Whoever knows the secret is the one who started us.
            None => Some(Rights::ReadWrite),
            Some(key) => config.authorized.rights(&key).or(config.anonymous.then_some(Rights::ReadWrite)),
        }
    }

    fn open(&self, asked: &SessionRequest, rights: Rights) -> Result<Work, String> {
        wire::algorithm(asked.verify).map_err(|e| e.to_string())?;
        wire::check_path(&asked.path).map_err(|e| e.to_string())?;
        crate::filter::Filter::new(&asked.options)?;
        for source in &asked.sources {
            wire::check_path(&source.path).and_then(|()| wire::check_path(&source.name)).map_err(|e| e.to_string())?;
        }
        if asked.export == DEV_EXPORT {
            return self.open_dev(asked);
        }
        let Some((root, read_only)) = self.shared.exports.get(&asked.export) else {
            return Err(format!("no export '{}' here", asked.export));
        };
        match asked.direction {
            Direction::Push if *read_only => Err(format!("export '{}' is read-only", asked.export)),
            Direction::Push if rights == Rights::ReadOnly => Err("your key may only read".into()),
            Direction::Push => self.open_push(asked, root),
            Direction::Pull => {
                let root_of = |s: &wire::SourceSpec| Root {
                    beneath: Some(Arc::clone(root)),
                    path: Path::new(std::ffi::OsStr::from_bytes(&s.path)).to_path_buf(),
                    name: s.name.clone(),
                };
                Ok(Work::Pull(asked.sources.iter().map(root_of).collect()))
            }
            Direction::List => list(root, &asked.path).map(Work::List),
        }
    }

    fn open_dev(&self, asked: &SessionRequest) -> Result<Work, String> {
        match asked.direction {
            Direction::Push if asked.path == b"null" => {
                let target = Target { root: None, job: asked.job };
                Ok(Work::Push(Prepared::new(target, &asked.options).map_err(|e| e.to_string())?, None))
            }
            Direction::Pull if asked.sources.len() == 1 && asked.sources[0].path == b"zero" => {
                let name = asked.sources[0].name.clone();
                Ok(Work::Pull(vec![Root { beneath: None, path: "/dev/zero".into(), name }]))
            }
            Direction::List => Ok(Work::List(Vec::new())),
            _ => Err(format!("export '{DEV_EXPORT}' has only 'null' to write to and 'zero' to read from")),
        }
    }

    /// Where a push goes: an existing directory takes the sources by their names; otherwise a
    /// single source gets the target's name, unless a slash asks for a directory.
    fn open_push(&self, asked: &SessionRequest, export: &Arc<OwnedFd>) -> Result<Work, String> {
        let shown = || String::from_utf8_lossy(&asked.path).into_owned();
        let (dir, rename) = match open_dir(export, &asked.path) {
            Ok(dir) => (dir, None),
            Err(rustix::io::Errno::NOENT) if asked.into_directory => {
                make_dir(export, &asked.path).map_err(|e| format!("{}: {e}", shown()))?;
                (open_dir(export, &asked.path).map_err(|e| format!("{}: {}", shown(), std::io::Error::from(e)))?, None)
            }
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) if !asked.into_directory => {
                let (parent, name) = sink::split(&asked.path);
                let dir = open_dir(export, parent).map_err(|e| format!("{}: {}", shown(), std::io::Error::from(e)))?;
                (dir, Some(name.to_vec()))
            }
            Err(rustix::io::Errno::XDEV) => return Err(format!("{}: leads out of the export", shown())),
            Err(e) => return Err(format!("{}: {}", shown(), std::io::Error::from(e))),
        };
        let target = Target { root: Some(Arc::new(dir)), job: asked.job };
        let prepared = Prepared::new(target, &asked.options).map_err(|e| e.to_string())?;
        Ok(Work::Push(prepared, rename))
    }

    fn negotiate(
        &self,
        mut link: Link,
        channels: Channels,
        asked: &SessionRequest,
        work: Work,
    ) -> Result<Option<Summary>, SessionError> {
        let session = self.shared.next_session.fetch_add(1, Ordering::SeqCst);
        let (offers, rename, discard) = match &work {
            Work::Push(prepared, rename) => {
                (prepared.wants_offers(&asked.options), rename.clone(), asked.export == DEV_EXPORT)
            }
            Work::Pull(_) | Work::List(_) => (false, None, false),
        };
        link.send(&Control::SessionReply(SessionReply {
            session,
            rename,
            offers,
            discard,
            revocable: link.revocable(),
        }))?;
        if let Work::List(entries) = work {
            send_listing(&mut link, entries)?;
            link.close();
            return Ok(None);
        }
        let config = &self.shared.config;
        // Both may have been asked in one breath with the session.
        let (mut block_len, mut count) = (None, None);
        let (block_len, count) = loop {
            match link.next_control()? {
                Control::BlockSize(len) if block_len.is_none() => {
                    let accepted = acceptable_block(len) && len <= config.block_len_max;
                    link.send(&Control::BlockSizeReply { accepted, largest: config.block_len_max })?;
                    block_len = accepted.then_some(len);
                }
                Control::Channels(wanted) if count.is_none() => count = Some(wanted.clamp(1, wire::CHANNELS_MAX)),
                _ => return Err(LinkError::Unexpected("message in a negotiation").into()),
            }
            if let (Some(block_len), Some(count)) = (block_len, count) {
                break (block_len, count);
            }
        };
        let blocks = blocks_for(link.round_trip(), block_len, config.blocks.clamp(4, 1024));
        let stages = self.shared.engines.pick();
        stages.attract();
        let engine = stages.with_pool(blocks, block_len as usize, link.is_long());
        let engine = engine.map_err(|e| SessionError::Local(e.to_string()))?;
        link.attach(&engine.pool)?;
        link.set_peer_revocable(asked.revocable);
        let role = if asked.direction == Direction::Push { Role::Sink } else { Role::Source };
        link.send(&Control::ChannelsReply(count))?;
        link.join(&channels, count, role)?;
        let offers = match asked.direction {
            // The pulling end knows whether it has something to resume, and says so in its options.
            Direction::Pull => asked.options.update || asked.into_directory,
            _ => offers,
        };
        let terms = Terms {
            session,
            block_len,
            long_path: link.is_long(),
            verify: wire::algorithm(asked.verify).map_err(LinkError::from)?,
            sealer: asked.data_key.map(|key| Arc::new(Sealer::new(&key))),
            options: asked.options.clone(),
            rate_limit: asked.rate_limit,
        };
        let progress = Arc::new(Progress::default());
        let on_report: OnReport = Arc::new(|report| {
            tracing::info!(path = %String::from_utf8_lossy(&report.path), message = report.message, "not copied");
        });
        let outcome = match work {
            Work::Push(prepared, _) => sink::run(link, &channels, &engine, &terms, prepared, &progress, &on_report),
            Work::Pull(roots) => source::run(link, &channels, &engine, &terms, roots, offers, &progress, &on_report),
            Work::List(_) => unreachable!("answered above"),
        };
        outcome.map(Some)
    }
}

/// Whether a block size is one that can be worked with at all.
pub(crate) fn acceptable_block(len: u32) -> bool {
    wire::BLOCK_LEN.contains(&len) && len.is_multiple_of(4096)
}

/// Data connections of a session come in while it lives.
struct Door {
    shared: Arc<Shared>,
    token: Token,
}

impl Drop for Door {
    fn drop(&mut self) {
        lock(&self.shared.doors).close(&self.token);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no panics under the lock")
}

fn open_dir(export: &OwnedFd, path: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path = if path.is_empty() { &b"."[..] } else { path };
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(export, Path::new(std::ffi::OsStr::from_bytes(path)), flags, Mode::empty(), how)
}

fn make_dir(export: &OwnedFd, path: &[u8]) -> std::io::Result<()> {
    let (parent, name) = sink::split(path);
    let dir = open_dir(export, parent)?;
    let name = Path::new(std::ffi::OsStr::from_bytes(name));
    Ok(rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o777))?)
}

fn list(root: &Arc<OwnedFd>, path: &[u8]) -> Result<Vec<ListEntry>, String> {
    let shown = || String::from_utf8_lossy(path).into_owned();
    let failed = |e: rustix::io::Errno| format!("{}: {}", shown(), std::io::Error::from(e));
    let entry = |name: &[u8], stat: &rustix::fs::Stat| ListEntry {
        name: name.to_vec(),
        mode: stat.st_mode,
        size: stat.st_size as u64,
        mtime: stat.st_mtime,
    };
    let dir = match open_dir(root, path) {
        Ok(dir) => dir,
        Err(rustix::io::Errno::NOTDIR) => {
            let (parent, name) = sink::split(path);
            let dir = open_dir(root, parent).map_err(failed)?;
            let os_name = Path::new(std::ffi::OsStr::from_bytes(name));
            let stat = rustix::fs::statat(&dir, os_name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
            return Ok(vec![entry(name, &stat)]);
        }
        Err(e) => return Err(failed(e)),
    };
    let mut entries = Vec::new();
    for found in rustix::fs::Dir::read_from(&dir).map_err(failed)? {
        let found = found.map_err(failed)?;
        let name = found.file_name();
        if matches!(name.to_bytes(), b"." | b"..") || sink::is_own_name(name.to_bytes()) {
            continue;
        }
        if let Ok(stat) = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            entries.push(entry(name.to_bytes(), &stat));
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn send_listing(link: &mut Link, entries: Vec<ListEntry>) -> Result<(), LinkError> {
    const LINES: usize = 24;
    let mut entries = entries.into_iter().peekable();
    loop {
        let some: Vec<ListEntry> = entries.by_ref().take(LINES).collect();
        let last = entries.peek().is_none();
        link.send(&Control::Listing { entries: some, last })?;
        if last {
            return Ok(());
        }
    }
}
