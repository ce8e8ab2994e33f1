//! The iWARP device: one epoll set, one timer, one table of memory, and the queue pairs,
//! listeners and completion queues that hang on them.

use super::doorbell::{Doorbell, Whom};
use super::endpoint::{Endpoint, Readiness};
use super::listener::{self, Inbound, ListenerHandle, ListeningSocket, Reading};
use super::set_up::SetUp;
use super::shared::{CompletionQueueHandle, CompletionRing, Polled, SharedHandle, SharedQueue};
use super::socket;
use super::transport::Socket;
use crate::provider::{CompletionQueueOps, DeviceOps, Event, ListenerOps, QueuePairOps, RegionOps, SharedReceiveOps};
use crate::reservation::Reservation;
use crate::{Device, ListenOptions, shm};
use rustix::event::{EventfdFlags, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};
use thruway_iwarp::connection::{MAX_INLINE, MAX_SGE};
use thruway_iwarp::mpa::{self, Agreement, Preferences, ReadyToReceive};
use thruway_iwarp::regions::{Region, RegionTable, Stream};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{Access, Owner};
use thruway_rdma_types::{ConnectParams, DeviceAttributes, Error, QueuePairCaps, Result};
use thruway_tcp::Origin;

const MAX_QUEUE: u32 = 16384;
const MAX_DEPTH: u16 = 256;
const EVENTS_PER_TURN: usize = 128;
/// Deadlines are kept to this.
const TICK: Duration = Duration::from_millis(250);
/// With this many live queue pairs or fewer, polling tries their sockets instead of epoll.
const HOT_MAX: usize = 2;
/// The same for rings in shared memory, which cost no system call to try.
const HOT_RINGS_MAX: usize = 16;
/// After so many looks at rings without anything in them, each is followed by a yield: some ten microseconds.
const IDLE_MAX: u32 = 256;
/// How often polling looks at epoll all the same.
const HOT_STREAK: u32 = 16;
/// The same for rings, which are looked at so much faster.
const HOT_RINGS_STREAK: u32 = 256;
/// After so many polls without a wait, queue pairs that are polled leave the epoll set: every
/// segment that arrives for a member costs the kernel a callback.
const DETACH_AFTER: u32 = 4096;
/// Longest spin before sleeping.
const SPIN_MAX: Duration = Duration::from_micros(50);
const TOKEN_WAKE: u64 = u64::MAX;
const TOKEN_TIMER: u64 = u64::MAX - 1;

/// How an iWARP device behaves. The default suits every peer.
#[derive(Debug, Clone)]
pub struct Config {
    /// Ask for CRCs. Both ends must say no for there to be none.
    pub crc: bool,
    /// Ask for markers in what we receive. Linux's `siw` refuses them.
    pub markers: bool,
    /// Highest MPA revision, 1 or 2.
    pub revision: u8,
    /// Ask for the peer-to-peer model (revision 2), in which either end may send first.
    pub peer_to_peer: bool,
    /// Ready-to-receive message to prefer.
    pub rtr: ReadyToReceive,
    /// Tell peers, in reserved flag bits of the request, that we take large FPDUs and speak
    /// RFC 7306, and believe those who say so. Without it everybody gets segment-sized FPDUs.
    pub announce: bool,
    /// Send FPDUs up to this ULPDU length whatever the peer said.
    pub force_ulpdu: Option<u16>,
    /// TCP congestion control for every socket; by default the system's, and `cubic` on loopback.
    pub congestion: Option<String>,
    /// Connections with processes of this host go through shared memory, where both ends say so; see [`crate::shm`].
    pub shm: Option<shm::Config>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            crc: true,
            markers: false,
            revision: 2,
            peer_to_peer: true,
            rtr: ReadyToReceive::Write,
            announce: true,
            force_ulpdu: None,
            congestion: None,
            shm: None,
        }
    }
}

impl Config {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no descriptors left.
    pub fn open(self) -> Result<Device> {
        Ok(Device::new(Arc::new(Handle(Context::open(self, true)?))))
    }

    pub(super) fn preferences(&self, params: &ConnectParams) -> Result<Preferences> {
        let limit = mpa::MAX_PRIVATE_DATA - 4;
        if params.private_data.len() > limit {
            let got = params.private_data.len() as u64;
            return Err(Error::Limit { what: "bytes of private data", got, limit: limit as u64 });
        }
        Ok(Preferences {
            markers: self.markers,
            crc: self.crc,
            revision: self.revision,
            ird: params.ird.min(MAX_DEPTH),
            ord: params.ord.min(MAX_DEPTH),
            peer_to_peer: self.peer_to_peer && self.revision >= 2,
            rtr: self.rtr,
            announce: self.announce,
        })
    }

    /// Largest ULPDU to send under `agreement` on a path with segments of `mss` bytes.
    pub(super) fn max_ulpdu(&self, agreement: &Agreement, mss: usize) -> u16 {
        if let Some(forced) = self.force_ulpdu {
            return forced.max(128);
        }
        if agreement.large_fpdu {
            return u16::MAX;
        }
        // RFC 5044 §5: what is left of a segment after length, CRC, pad and markers.
        let markers = if agreement.send_markers { 4 * mss.div_ceil(512) } else { 0 };
        mss.saturating_sub(6 + markers + mss % 4).clamp(128, u16::MAX.into()) as u16
    }
}

/// Opens a device all of whose connections go through shared memory.
pub(crate) fn open_shm(shm: shm::Config) -> Result<Device> {
    let config = Config { shm: Some(shm), ..Config::default() };
    Ok(Device::new(Arc::new(Handle(Context::open(config, false)?))))
}

/// Whether this is an address of this host: the kernel would call from the same one.
fn is_local(addr: SocketAddr) -> bool {
    let own = || {
        let any = if addr.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(addr)?;
        socket.local_addr()
    };
    own().is_ok_and(|own: SocketAddr| own.ip() == addr.ip())
}

enum Entity {
    QueuePair(Arc<Endpoint>),
    Listener(Arc<ListeningSocket>),
    Inbound(Arc<Inbound>),
}

/// An event that has not been polled yet.
pub(super) enum Queued {
    Request(listener::Request),
    Other(Event),
}

pub(super) struct Context {
    config: Config,
    /// Connections go through TCP where not through shared memory.
    has_tcp: bool,
    attributes: DeviceAttributes,
    table: Arc<RegionTable>,
    epoll: OwnedFd,
    wake: OwnedFd,
    timer: OwnedFd,
    timer_on: AtomicBool,
    next_pd: AtomicU32,
    /// Of whatever has a socket; never comes again.
    next_id: AtomicU64,
    next_qp: AtomicU64,
    entities: Mutex<HashMap<u64, Entity>>,
    set_up: Arc<SetUp>,
    /// Held by the thread that drives the sockets; others go on without.
    driver: Mutex<Driver>,
    /// Counts changes to the set of live queue pairs.
    live_version: AtomicU64,
    /// Entities to serve in the next pass. A set, so that a pass serves each of them once.
    ready: Mutex<HashSet<u64>>,
    /// False if `ready` is empty.
    has_ready: AtomicBool,
    events: Mutex<VecDeque<Queued>>,
    /// The consumer's handle has been dropped: events have no receiver any more. Changes under the lock of `events`.
    abandoned: AtomicBool,
    /// Counts completions and events not polled yet, and queue pairs in `ready`.
    doorbell: Doorbell,
    /// Threads in `wait`, by the descriptor that wakes each.
    sleepers: Mutex<Vec<Arc<OwnedFd>>>,
    /// Nanoseconds to spin before sleeping: grows while spinning pays, shrinks while it does not.
    spin: AtomicU64,
}

/// A queue pair that is polled.
struct Hot {
    qp: Arc<Endpoint>,
    /// While it is connected through shared memory.
    glance: Option<Arc<shm::Glance>>,
}

impl Hot {
    /// Whether to poll it would do nothing.
    fn has_nothing(&self) -> bool {
        self.glance.as_ref().is_some_and(|glance| glance.sees_nothing()) && !self.qp.is_busy()
    }
}

struct Driver {
    hot: Vec<Hot>,
    /// None of them by TCP.
    all_by_shm: bool,
    /// Looks at queue pairs, one after the other, at which nothing came or went.
    idle: u32,
    hot_version: u64,
    /// Polls since the last wait.
    polls: u32,
    /// `hot` is not in the epoll set.
    detached: bool,
    streak: u32,
}

impl Context {
    fn open(config: Config, has_tcp: bool) -> Result<Arc<Context>> {
        let (provider, name, opening) = match has_tcp {
            true => ("iwarp", "iwarp0", "opening an iWARP device"),
            false => ("shm", "shm0", "opening a device for shared memory"),
        };
        let failed = |e| Error::io(opening, e);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let timer =
            rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
                .map_err(failed)?;
        for (fd, token) in [(&wake, TOKEN_WAKE), (&timer, TOKEN_TIMER)] {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN).map_err(failed)?;
        }
        let attributes = DeviceAttributes {
            provider,
            name: name.into(),
            max_sge: MAX_SGE as u32,
            max_queue: MAX_QUEUE,
            max_cqe: MAX_QUEUE as usize * 64,
            max_inline: MAX_INLINE as u32,
            max_read_depth: MAX_DEPTH,
            max_private_data: mpa::MAX_PRIVATE_DATA - 4,
            max_reply_data: mpa::MAX_PRIVATE_DATA - 4,
            atomics: config.announce,
            immediate: config.announce,
            remote_invalidate: true,
            windows: true,
            domain_windows: true,
            max_srq_wr: MAX_QUEUE,
            auto_progress: false,
            on_demand: true,
        };
        Ok(Arc::new(Context {
            config,
            has_tcp,
            attributes,
            table: Arc::new(RegionTable::new()),
            epoll,
            wake,
            timer,
            timer_on: AtomicBool::new(false),
            next_pd: AtomicU32::new(1),
            next_id: AtomicU64::new(1),
            next_qp: AtomicU64::new(1),
            entities: Mutex::new(HashMap::new()),
            set_up: Arc::default(),
            driver: Mutex::new(Driver {
                hot: Vec::new(),
                all_by_shm: false,
                idle: 0,
                hot_version: 0,
                polls: 0,
                detached: false,
                streak: 0,
            }),
            live_version: AtomicU64::new(1),
            ready: Mutex::default(),
            has_ready: AtomicBool::new(false),
            events: Mutex::new(VecDeque::new()),
            abandoned: AtomicBool::new(false),
            sleepers: Mutex::default(),
            doorbell: Doorbell::default(),
            spin: AtomicU64::new(0),
        }))
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn table(&self) -> &Arc<RegionTable> {
        &self.table
    }

    /// A window on part of a region, for the peer of one queue pair.
    pub(super) fn bind(
        &self,
        stream: Stream,
        region: &dyn RegionOps,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Arc<dyn RegionOps>> {
        let parent = region.as_any().downcast_ref::<RegionHandle>();
        let parent = parent.filter(|p| Arc::ptr_eq(&p.table, &self.table));
        let parent = parent.ok_or(Error::Unsupported("a region of another device"))?;
        let region = self.table.bind(Some(stream), &parent.region, offset, len, access)?;
        Ok(Arc::new(RegionHandle { table: Arc::clone(&self.table), region }))
    }

    fn insert(&self, id: u64, entity: Entity) {
        self.entities.lock_unpoisoned().insert(id, entity);
    }

    pub(super) fn forget(&self, id: u64) {
        let gone = self.entities.lock_unpoisoned().remove(&id);
        if let Some(Entity::QueuePair(qp)) = gone {
            // The thread that drives may never do so again, and the queue pair holds this context.
            self.driver.lock_unpoisoned().hot.retain(|hot| !Arc::ptr_eq(&hot.qp, &qp));
        }
        self.live_changed();
    }

    fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// A number that no queue pair has: windows and completions go by it.
    fn new_qp_num(&self) -> u32 {
        loop {
            let count = self.next_qp.fetch_add(1, Ordering::Relaxed);
            let number = count as u32;
            // From the first 2^32 on, those that are left of them have to be passed over.
            let taken = |e: &Entity| matches!(e, Entity::QueuePair(qp) if qp.number() == number);
            let fresh = count <= u32::MAX.into() || !self.entities.lock_unpoisoned().values().any(taken);
            if number != 0 && fresh {
                return number;
            }
        }
    }

    pub(super) fn watch(&self, fd: impl AsFd, id: u64) -> rustix::io::Result<()> {
        use epoll::EventFlags as F;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(id), F::IN | F::OUT | F::RDHUP | F::ET)
    }

    pub(super) fn unwatch(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Makes room for a connection of `new`: closes others in set-up until fewer than `max` are left.
    pub(super) fn make_room(&self, new: Origin, max: usize) {
        while let Some((origin, id)) = self.set_up.give_way(new, max) {
            tracing::debug!(%origin, "too many connections in set-up, closing one");
            self.evict(id);
            // If it has just been polled, it is not closed.
            self.set_up.release(origin, id);
        }
    }

    /// Closes a connection whose request has not arrived, or has not been polled.
    fn evict(&self, id: u64) {
        if self.entities.lock_unpoisoned().contains_key(&id) {
            return self.forget(id);
        }
        let mut events = self.events.lock_unpoisoned();
        let at = events.iter().position(|event| matches!(event, Queued::Request(request) if request.id() == id));
        let Some(request) = at.and_then(|at| events.remove(at)) else { return };
        drop(events);
        self.discount_unpolled(1);
        drop(request);
    }

    /// Starts to connect.
    pub(super) fn start_connect(&self, addr: SocketAddr) -> Result<Socket> {
        let failed = |op| move |source| Error::Io { op, peer: Some(addr), source };
        if let Some(config) = self.config.shm.as_ref().filter(|_| !self.has_tcp || is_local(addr)) {
            match shm::start_connect(addr, config) {
                Ok(socket) => return Ok(Socket::Shm(socket)),
                Err(error) if self.has_tcp => tracing::debug!(%addr, %error, "no shared memory, going by TCP"),
                Err(error) => return Err(failed("connecting by shared memory to")(error)),
            }
        }
        let stream = socket::start_connect(addr).map_err(failed("connecting to"))?;
        socket::tune(&stream).map_err(failed("preparing the socket to"))?;
        Ok(Socket::Tcp(stream))
    }

    /// Serves a listening socket.
    fn begin_listening(self: &Arc<Context>, socket: ListeningSocket) -> Result<ListenerHandle> {
        let failed = |source| Error::io("watching a listening socket", source);
        let (id, addr) = (socket.id, socket.local_addr().map_err(failed)?);
        self.watch(&socket, id).map_err(|e| failed(std::io::Error::from(e)))?;
        self.insert(id, Entity::Listener(Arc::new(socket)));
        Ok(ListenerHandle { ctx: Arc::clone(self), id, addr, beside: None })
    }

    /// Starts to read a request frame.
    pub(super) fn begin_request(
        self: &Arc<Context>,
        socket: Socket,
        (peer, origin): (SocketAddr, Origin),
        accept_foreign: bool,
    ) -> Result<()> {
        if let Socket::Tcp(stream) = &socket {
            listener::prepare(stream, peer, self)?;
        }
        let id = self.new_id();
        let place = self.set_up.take(origin, id);
        let reading = Reading::new(socket, (peer, origin), place, accept_foreign);
        self.watch(reading.socket(), id).map_err(|e| Error::io("watching a connection", e))?;
        let inbound = Arc::new(Inbound { id, state: Mutex::new(Some(reading)) });
        self.insert(id, Entity::Inbound(inbound));
        self.start_timer();
        Ok(())
    }

    pub(super) fn live_changed(&self) {
        self.live_version.fetch_add(1, Ordering::Release);
    }

    /// The queue pair could do more without waiting.
    pub(super) fn mark_ready(&self, id: u64) {
        let mut ready = self.ready.lock_unpoisoned();
        if !ready.insert(id) {
            return;
        }
        self.has_ready.store(true, Ordering::Release);
        drop(ready);
        self.count_unpolled();
    }

    pub(super) fn push_event(&self, event: Event) {
        self.queue(Queued::Other(event));
    }

    pub(super) fn queue(&self, event: Queued) {
        let mut events = self.events.lock_unpoisoned();
        if self.abandoned.load(Ordering::SeqCst) {
            drop(events);
            return drop(event);
        }
        events.push_back(event);
        drop(events);
        self.count_unpolled();
    }

    pub(super) fn count_unpolled(&self) {
        self.rouse(self.doorbell.publish());
    }

    fn rouse(&self, whom: Whom) {
        if whom.armed {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
        if whom.sleepers {
            for sleeper in &*self.sleepers.lock_unpoisoned() {
                let _ = rustix::io::write(sleeper, &1u64.to_ne_bytes());
            }
        }
    }

    pub(super) fn discount_unpolled(&self, n: usize) {
        self.doorbell.take(n);
    }

    pub(super) fn start_timer(&self) {
        if !self.timer_on.swap(true, Ordering::SeqCst) {
            self.set_timer(TICK);
        }
    }

    fn set_timer(&self, period: Duration) {
        let spec = Timespec { tv_sec: 0, tv_nsec: period.subsec_nanos().into() };
        let spec = Itimerspec { it_interval: spec, it_value: spec };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)
            .expect("a valid period on our own timer");
    }

    fn tick(self: &Arc<Context>) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
        // Off before the scan: a deadline that starts during it switches the timer on again.
        self.timer_on.store(false, Ordering::SeqCst);
        let now = Instant::now();
        let mut busy = false;
        let (mut pairs, mut inbounds, mut listeners) = (Vec::new(), Vec::new(), Vec::new());
        for entity in self.entities.lock_unpoisoned().values() {
            match entity {
                Entity::QueuePair(qp) => pairs.push(Arc::clone(qp)),
                Entity::Inbound(inbound) => inbounds.push(Arc::clone(inbound)),
                Entity::Listener(socket) => listeners.push(Arc::clone(socket)),
            }
        }
        for qp in pairs {
            busy |= qp.tick(now);
        }
        for inbound in inbounds {
            busy |= inbound.tick(self, now);
        }
        for socket in listeners {
            if socket.progress(self) {
                self.mark_ready(socket.id);
            }
        }
        if busy {
            self.timer_on.store(true, Ordering::SeqCst);
        } else if !self.timer_on.load(Ordering::SeqCst) {
            self.set_timer(Duration::ZERO);
            // Lost race with `start_timer`: its setting came before ours.
            if self.timer_on.load(Ordering::SeqCst) {
                self.set_timer(TICK);
            }
        }
    }

    fn progress(self: &Arc<Context>, id: u64, socket: Readiness) {
        enum Found {
            QueuePair(Arc<Endpoint>),
            Listener(Arc<ListeningSocket>),
            Inbound(Arc<Inbound>),
        }
        let found = match self.entities.lock_unpoisoned().get(&id) {
            Some(Entity::QueuePair(qp)) => Found::QueuePair(Arc::clone(qp)),
            Some(Entity::Listener(socket)) => Found::Listener(Arc::clone(socket)),
            Some(Entity::Inbound(inbound)) => Found::Inbound(Arc::clone(inbound)),
            None => return,
        };
        match found {
            Found::QueuePair(qp) => qp.progress(socket),
            Found::Inbound(inbound) => inbound.progress(self),
            Found::Listener(listener) => {
                if listener.progress(self) {
                    self.mark_ready(id);
                }
            }
        }
    }

    /// One pass over everything that can move without waiting.
    pub(super) fn drive(self: &Arc<Context>) {
        self.drive_for(None);
    }

    /// As [`Context::drive`], for somebody who polls a completion queue.
    pub(super) fn drive_for(self: &Arc<Context>, mut polled: Option<&mut Polled<'_>>) {
        let mut driver = match self.driver.try_lock() {
            Ok(driver) => driver,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let mut served = HashSet::new();
        if self.has_ready.load(Ordering::Acquire) {
            let mut ready = self.ready.lock_unpoisoned();
            self.has_ready.store(false, Ordering::Relaxed);
            served = std::mem::take(&mut *ready);
            drop(ready);
            self.discount_unpolled(served.len());
            for id in &served {
                self.progress(*id, Readiness::default());
            }
        }
        let version = self.live_version.load(Ordering::Acquire);
        if version != driver.hot_version {
            driver.attach();
            driver.hot_version = version;
            driver.hot = self.few_queue_pairs();
            driver.all_by_shm = driver.hot.iter().all(|hot| hot.qp.is_by_shm());
        }
        if !driver.hot.is_empty() {
            // To look at a ring without being called costs nothing, and saves the peer its calls.
            if driver.all_by_shm && self.doorbell.nobody_sleeps() {
                driver.detach();
            }
            driver.streak += 1;
            let streak = if driver.all_by_shm { HOT_RINGS_STREAK } else { HOT_STREAK };
            if driver.streak < streak {
                // A socket out of the epoll set does not report when there is room again.
                let tried = Readiness { readable: true, writable: driver.detached, hung_up: false };
                let mut moved = false;
                let is_served = |hot: &&Hot| served.contains(&hot.qp.id());
                moved |= driver.hot.iter().any(|hot| is_served(&hot));
                for hot in driver.hot.iter().filter(|hot| !is_served(hot) && !hot.has_nothing()) {
                    moved |= hot.qp.poll(tried, polled.as_deref_mut());
                }
                driver.idle = if moved { 0 } else { driver.idle.saturating_add(1) };
                let yields = driver.all_by_shm && driver.idle > IDLE_MAX;
                if yields {
                    // A yield may take as long as others like: what epoll knows is not to wait for many.
                    driver.streak = streak;
                }
                drop(driver);
                if yields {
                    // What it looks for may have to be written by a thread that waits for this very processor.
                    std::thread::yield_now();
                }
                return;
            }
            driver.streak = 0;
            driver.polls = driver.polls.saturating_add(streak);
            // Who sleeps on the epoll set counts on it.
            if driver.polls >= DETACH_AFTER && self.doorbell.nobody_sleeps() {
                driver.detach();
            }
        }
        self.ask_epoll();
    }

    /// Handles the events of the epoll set. Called by the thread that holds the driver.
    fn ask_epoll(self: &Arc<Context>) {
        let mut events = [std::mem::MaybeUninit::uninit(); EVENTS_PER_TURN];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&none)) else { return };
        use epoll::EventFlags as F;
        for event in events {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                TOKEN_WAKE => drop(rustix::io::read(&self.wake, &mut [0; 8])),
                TOKEN_TIMER => self.tick(),
                id => {
                    let socket = Readiness {
                        readable: flags.intersects(F::IN | F::RDHUP | F::HUP | F::ERR),
                        writable: flags.intersects(F::OUT | F::HUP | F::ERR),
                        hung_up: flags.intersects(F::RDHUP | F::HUP | F::ERR),
                    };
                    self.progress(id, socket);
                }
            }
        }
    }

    /// The queue pairs, if they are so few that trying each beats asking epoll.
    fn few_queue_pairs(&self) -> Vec<Hot> {
        let entities = self.entities.lock_unpoisoned();
        let pairs = || entities.values().filter_map(|e| if let Entity::QueuePair(qp) = e { Some(qp) } else { None });
        if pairs().count() > HOT_RINGS_MAX || pairs().filter(|qp| !qp.is_by_shm()).count() > HOT_MAX {
            return Vec::new();
        }
        let few: Vec<Arc<Endpoint>> = pairs().cloned().collect();
        drop(entities);
        few.into_iter().map(|qp| Hot { glance: qp.glance(), qp }).collect()
    }

    /// Polling a queue pair does not ask whether it has become writable, and an edge that was told of is not told
    /// of again: nothing may be left behind when somebody goes to sleep.
    fn leave_nothing_behind(self: &Arc<Context>) {
        let mut driver = self.driver.lock_unpoisoned();
        driver.attach();
        self.ask_epoll();
    }
}

impl Driver {
    /// Queue pairs are only tried from here on.
    fn detach(&mut self) {
        if !std::mem::replace(&mut self.detached, true) {
            self.hot.iter().for_each(|hot| hot.qp.set_watched(false));
        }
    }

    /// Puts every queue pair back into the epoll set. Being edge-triggered, it tells at once what
    /// has come meanwhile; what has come through rings is taken in.
    fn attach(&mut self) {
        self.polls = 0;
        if std::mem::take(&mut self.detached) {
            self.hot.iter().for_each(|hot| hot.qp.set_watched(true));
        }
    }
}

/// A thread that sleeps in `wait`. Each has a descriptor of its own, so that none takes the signal that was meant for
/// another.
struct Sleeper<'a> {
    ctx: &'a Arc<Context>,
    fd: Arc<OwnedFd>,
}

impl<'a> Sleeper<'a> {
    /// Announces that this thread goes to sleep. `None` if there is something to do already.
    fn enter(ctx: &'a Arc<Context>) -> Result<Option<Sleeper<'a>>> {
        thread_local! {
            static OWN: std::cell::OnceCell<Arc<OwnedFd>> = const { std::cell::OnceCell::new() };
        }
        let fd = OWN.with(|own| {
            if let Some(fd) = own.get() {
                return Ok::<_, Error>(Arc::clone(fd));
            }
            let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| Error::io("waiting", e))?;
            Ok(Arc::clone(own.get_or_init(|| Arc::new(fd))))
        })?;
        ctx.sleepers.lock_unpoisoned().push(Arc::clone(&fd));
        let sleeper = Sleeper { ctx, fd };
        Ok(ctx.doorbell.lie_down(|| ctx.leave_nothing_behind()).then_some(sleeper))
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.ctx.doorbell.get_up();
        self.ctx.sleepers.lock_unpoisoned().retain(|other| !Arc::ptr_eq(other, &self.fd));
        let _ = rustix::io::read(&*self.fd, &mut [0; 8]);
    }
}

/// The device as the consumer holds it.
struct Handle(Arc<Context>);

impl std::ops::Deref for Handle {
    type Target = Arc<Context>;

    fn deref(&self) -> &Arc<Context> {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Unanswered requests hold the context, and are refused when they are dropped.
        let mut events = self.events.lock_unpoisoned();
        self.abandoned.store(true, Ordering::SeqCst);
        let unheard = std::mem::take(&mut *events);
        drop(events);
        drop(unheard);
    }
}

impl DeviceOps for Handle {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn alloc_pd(&self) -> Result<u32> {
        // Never used again: one number for each of four thousand million.
        let number = self.next_pd.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add(1));
        number.map_err(|_| Error::Limit { what: "protection domains", got: 1 << 32, limit: u32::MAX.into() })
    }

    fn free_pd(&self, _pd: u32) {}

    unsafe fn register(
        &self,
        pd: u32,
        ptr: *mut u8,
        len: usize,
        base: u64,
        access: Access,
        owner: Owner,
    ) -> Result<Arc<dyn RegionOps>> {
        // SAFETY: the caller's promise.
        let region = unsafe { self.table.register(pd, ptr, len, base, access, owner) }?;
        Ok(Arc::new(RegionHandle { table: Arc::clone(&self.table), region }))
    }

    fn create_cq(&self, capacity: usize) -> Result<Arc<dyn CompletionQueueOps>> {
        let limit = self.attributes.max_cqe;
        if capacity > limit {
            return Err(Error::Limit { what: "completion queue", got: capacity as u64, limit: limit as u64 });
        }
        Ok(Arc::new(CompletionQueueHandle(Arc::new(CompletionRing::new(Arc::clone(&self.0), capacity)))))
    }

    fn create_srq(&self, pd: u32, max_recv_wr: u32, max_sge: u32) -> Result<Arc<dyn SharedReceiveOps>> {
        Ok(Arc::new(SharedHandle(Arc::new(SharedQueue::new(Arc::clone(&self.0), pd, max_recv_wr, max_sge)))))
    }

    fn create_qp(
        &self,
        pd: u32,
        send_cq: &Arc<dyn CompletionQueueOps>,
        recv_cq: &Arc<dyn CompletionQueueOps>,
        caps: QueuePairCaps,
        shared: Option<&Arc<dyn SharedReceiveOps>>,
    ) -> Result<Arc<dyn QueuePairOps>> {
        for (what, got, limit) in [
            ("send queue", caps.max_send_wr, MAX_QUEUE),
            ("receive queue", caps.max_recv_wr, MAX_QUEUE),
            ("elements of a request", caps.max_sge, MAX_SGE as u32),
        ] {
            if got > limit {
                return Err(Error::Limit { what, got: got.into(), limit: limit.into() });
            }
        }
        let ring = |cq: &Arc<dyn CompletionQueueOps>| {
            let handle = cq.as_any().downcast_ref::<CompletionQueueHandle>();
            let ring = handle.map(|h| Arc::clone(&h.0)).filter(|r| Arc::ptr_eq(&r.ctx, &self.0));
            ring.ok_or(Error::Unsupported("a completion queue of another device"))
        };
        let (send_cq, recv_cq) = (ring(send_cq)?, ring(recv_cq)?);
        let shared = shared.map(|srq| {
            let found = srq.as_any().downcast_ref::<SharedHandle>().map(|h| Arc::clone(&h.0));
            let found = found.filter(|s| Arc::ptr_eq(&s.ctx, &self.0) && s.receives.pd() == pd);
            found.ok_or(Error::Unsupported("a shared receive queue of another protection domain"))
        });
        let shared = shared.transpose()?;
        Reservation::take_both(&send_cq.room, caps.max_send_wr, &recv_cq.room, caps.max_recv_wr)?;
        if let Some(shared) = &shared {
            shared.room.join(&recv_cq).inspect_err(|_| send_cq.room.give_back(caps.max_send_wr))?;
        }
        let id = self.new_id();
        let number = self.new_qp_num();
        let qp = Arc::new(Endpoint::new(id, number, pd, Arc::clone(&self.0), send_cq, recv_cq, caps, shared));
        self.insert(id, Entity::QueuePair(Arc::clone(&qp)));
        Ok(qp)
    }

    fn listen(&self, addr: SocketAddr, options: &ListenOptions) -> Result<Box<dyn ListenerOps>> {
        let by_shm = |addr, config| {
            let socket = ListeningSocket::of_shm(self.new_id(), addr, options, config);
            socket.and_then(|socket| self.begin_listening(socket))
        };
        if let Some(config) = self.config.shm.as_ref().filter(|_| !self.has_tcp) {
            return Ok(Box::new(by_shm(addr, config)?));
        }
        let mut listener = self.begin_listening(ListeningSocket::bind(self.new_id(), addr, options)?)?;
        if let Some(config) = &self.config.shm {
            match by_shm(listener.addr, config) {
                Ok(beside) => listener.beside = Some(Box::new(beside)),
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::Unsupported => {
                    tracing::debug!(%source, "processes of this host connect by TCP only");
                }
                Err(error) => tracing::warn!(%error, "processes of this host connect by TCP only"),
            }
        }
        Ok(Box::new(listener))
    }

    fn adopt(&self, stream: TcpStream) -> Result<()> {
        if !self.has_tcp {
            return Err(Error::Unsupported("TCP connections on a device for shared memory"));
        }
        let peer = stream.peer_addr().map_err(|e| Error::io("getting the peer's address", e))?;
        let origin = Origin::of_stream(&stream, peer);
        self.begin_request(Socket::Tcp(stream), (peer, origin), false)
    }

    fn progress(&self) {
        self.drive();
    }

    fn poll_event(&self) -> Option<Event> {
        let next = || self.events.lock_unpoisoned().pop_front();
        let event = next().or_else(|| {
            self.drive();
            next()
        });
        if event.is_some() {
            self.discount_unpolled(1);
        }
        event.map(|event| match event {
            Queued::Request(request) => {
                request.release_place();
                Event::Request(Box::new(request))
            }
            Queued::Other(event) => event,
        })
    }

    fn arm(&self) -> bool {
        self.doorbell.arm(|| self.leave_nothing_behind())
    }

    fn wake(&self) {
        self.rouse(self.doorbell.wake());
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn wait(&self, timeout: Option<Duration>, ready: &dyn Fn() -> bool) -> Result<()> {
        let is_due = || self.doorbell.has_rung() || ready();
        if is_due() {
            return Ok(());
        }
        let spin = Duration::from_nanos(self.spin.load(Ordering::Relaxed));
        let start = Instant::now();
        loop {
            self.drive();
            if is_due() {
                let longer = (spin * 2).clamp(Duration::from_micros(2), SPIN_MAX);
                self.spin.store(longer.as_nanos() as u64, Ordering::Relaxed);
                return Ok(());
            }
            let spun = start.elapsed();
            if spun >= spin || timeout.is_some_and(|t| spun >= t) {
                break;
            }
            std::hint::spin_loop();
        }
        self.spin.store(spin.as_nanos() as u64 / 2, Ordering::Relaxed);
        let Some(sleeper) = Sleeper::enter(self)? else { return Ok(()) };
        // The last poll of the connections may have placed the awaited data. Data that arrives later ends the sleep.
        if ready() {
            return Ok(());
        }
        let limit = timeout.map(|t| t.saturating_sub(start.elapsed()));
        let limit = limit.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        use rustix::event::{PollFd, PollFlags};
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN), PollFd::new(&sleeper.fd, PollFlags::IN)];
        let slept = Instant::now();
        match rustix::event::poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("waiting", e)),
        }
        drop(sleeper);
        // The caller learns it from the return value.
        self.doorbell.has_rung();
        // Woken so soon that a little spinning would have caught it: spin next time.
        if slept.elapsed() < SPIN_MAX {
            let longer = (spin + Duration::from_micros(5)).min(SPIN_MAX);
            self.spin.store(longer.as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

struct RegionHandle {
    table: Arc<RegionTable>,
    region: Arc<Region>,
}

impl RegionOps for RegionHandle {
    fn key(&self) -> u32 {
        self.region.stag()
    }

    fn base(&self) -> u64 {
        self.region.base()
    }

    fn len(&self) -> usize {
        self.region.len()
    }

    fn is_valid(&self) -> bool {
        self.region.is_valid()
    }

    fn part(&self, offset: usize, len: usize, access: Access) -> Result<Arc<dyn RegionOps>> {
        let region = self.table.bind(None, &self.region, offset, len, access)?;
        Ok(Arc::new(RegionHandle { table: Arc::clone(&self.table), region }))
    }

    fn deregister(&self) {
        self.table.deregister(&self.region);
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConnectParams, ConnectionEvent, ListenOptions};
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;

    /// A peer always has more to be received than one turn takes.
    #[test]
    fn a_flooding_connection_is_in_the_queue_of_ready_ones_once() {
        let ctx = Context::open(Config { crc: false, ..Config::default() }, true).unwrap();
        let device = Device::new(Arc::new(Handle(Arc::clone(&ctx))));
        let listener = device.listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(512).unwrap());
        let mut peer = TcpStream::connect(listener.local_addr()).unwrap();
        peer.write_all(b"MPA ID Req Frame\0\x01\0\0").unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairCaps::default()).unwrap();
        let request = loop {
            if let Some(ConnectionEvent::Request(request)) = device.poll_event() {
                break request;
            }
            std::thread::yield_now();
        };
        request.accept(&qp, &ConnectParams::default()).unwrap();
        device.progress();
        peer.read_exact(&mut [0; 20]).unwrap();
        peer.set_nonblocking(true).unwrap();
        // RDMA Writes of no bytes (RFC 5040, 5.2): length field, header, CRC field.
        let frame = [&[0, 14, 0xc1, 0x40][..], &[0; 12], &[0; 4]].concat();
        let flood = frame.repeat(100_000);
        let (mut sent, mut turns) = (0, 0);
        let start = Instant::now();
        while turns < 20 {
            assert!(start.elapsed() < Duration::from_secs(60), "only {turns} turns were not enough for what had come");
            // Until the buffers of both sockets are full.
            loop {
                match peer.write(&flood[sent % frame.len()..]) {
                    Ok(n) => sent += n,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => panic!("{e}"),
                }
            }
            cq.poll(&mut Vec::new(), 64);
            let ready = ctx.ready.lock().unwrap().len();
            assert!(ready <= 1, "{ready} turns in the next pass");
            turns += ready;
            assert_eq!(qp.error(), None);
        }
    }
}
