//! The core of an iWARP device: drives its sockets and queue pairs, which it knows by traits only.

use super::completions::Polled;
use super::config::{Config, MAX_DEPTH};
use super::region::RegionHandle;
use super::set_up::SetUp;
use super::socket;
use super::transport::Socket;
use super::wakeups::Wakeups;
use crate::provider::{Event, RegionOps};
use crate::shm;
use rustix::event::{EventfdFlags, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};
use thruway_iwarp::connection::{MAX_INLINE, MAX_SGE};
use thruway_iwarp::mpa;
use thruway_iwarp::regions::{RegionTable, Stream};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{Access, DeviceAttributes, Error, Result};
use thruway_tcp::Origin;

/// Maximum number of requests of a queue.
pub(super) const MAX_QUEUE: u32 = 16384;
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
const TOKEN_WAKE: u64 = u64::MAX;
const TOKEN_TIMER: u64 = u64::MAX - 1;

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

/// State of a socket, as the kernel reports it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Readiness {
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer's half is shut, or the connection is broken.
    pub(super) hung_up: bool,
}

/// A queue pair, as its device drives it.
pub(super) trait DrivenPair: Send + Sync {
    fn id(&self) -> u64;
    fn qp_num(&self) -> u32;
    /// It is connected through shared memory.
    fn is_by_shm(&self) -> bool;
    /// A view of its rings, while it is connected through shared memory.
    fn glance(&self) -> Option<Arc<shm::Glance>>;
    /// It may have something to do beside its socket.
    fn is_busy(&self) -> bool;
    /// Puts its socket into the epoll set, or takes it out.
    fn set_watched(&self, watched: bool);
    /// Sends and receives as far as that is possible without waiting. True if something has moved.
    fn poll(&self, socket: Readiness, polled: Option<&mut Polled<'_>>) -> bool;
    /// Looks at the clock. True while there is a deadline to keep.
    fn tick(&self, now: Instant) -> bool;
}

/// A socket of the device that is no queue pair: a listener, or a connection whose request is being read.
pub(super) trait DrivenSocket: Send + Sync {
    /// Does what is possible without waiting.
    fn progress(&self, ctx: &Arc<Context>);
    /// Looks at the clock. True while there is a deadline to keep.
    fn tick(&self, ctx: &Arc<Context>, now: Instant) -> bool;
}

/// What an id of the epoll set stands for.
#[derive(Clone)]
enum Entity {
    QueuePair(Arc<dyn DrivenPair>),
    Socket(Arc<dyn DrivenSocket>),
}

/// A connection request that has not been polled yet.
pub(super) trait UnpolledRequest: Send {
    fn id(&self) -> u64;
    /// The event for the consumer.
    fn into_event(self: Box<Self>) -> Event;
}

/// An event that has not been polled yet.
pub(super) enum Queued {
    Request(Box<dyn UnpolledRequest>),
    Other(Event),
}

/// An iWARP device: one epoll set, one timer, one table of memory, and the sockets and queue pairs of these.
pub(super) struct Context {
    config: Config,
    /// Connections go through TCP where not through shared memory.
    pub(super) has_tcp: bool,
    pub(super) attributes: DeviceAttributes,
    pub(super) table: Arc<RegionTable>,
    pub(super) epoll: OwnedFd,
    pub(super) wakeups: Arc<Wakeups>,
    timer: OwnedFd,
    timer_on: AtomicBool,
    pub(super) next_pd: AtomicU32,
    /// Of whatever has a socket; never comes again.
    next_id: AtomicU64,
    next_qp: AtomicU64,
    entities: Mutex<HashMap<u64, Entity>>,
    pub(super) set_up: Arc<SetUp>,
    /// Held by the thread that drives the sockets; others go on without.
    driver: Mutex<Driver>,
    /// Counts changes to the set of live queue pairs.
    live_version: AtomicU64,
    /// Entities to serve in the next pass. A set, so that a pass serves each of them once.
    pub(super) ready: Mutex<HashSet<u64>>,
    /// False if `ready` is empty.
    has_ready: AtomicBool,
    pub(super) events: Mutex<VecDeque<Queued>>,
    /// The consumer's handle has been dropped: events have no receiver any more. Changes under the lock of `events`.
    pub(super) abandoned: AtomicBool,
    /// Nanoseconds to spin before sleeping: grows while spinning pays, shrinks while it does not.
    pub(super) spin: AtomicU64,
}

/// A queue pair that is polled.
struct Hot {
    qp: Arc<dyn DrivenPair>,
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
    pub(super) fn open(config: Config, has_tcp: bool) -> Result<Arc<Context>> {
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
            wakeups: Arc::new(Wakeups::new(wake)),
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

    pub(super) fn insert_pair(&self, qp: Arc<dyn DrivenPair>) {
        self.entities.lock_unpoisoned().insert(qp.id(), Entity::QueuePair(qp));
    }

    pub(super) fn insert_socket(&self, id: u64, socket: Arc<dyn DrivenSocket>) {
        self.entities.lock_unpoisoned().insert(id, Entity::Socket(socket));
    }

    pub(super) fn forget(&self, id: u64) {
        let gone = self.entities.lock_unpoisoned().remove(&id);
        if let Some(Entity::QueuePair(qp)) = gone {
            // The thread that drives may never do so again, and the queue pair holds this context.
            self.driver.lock_unpoisoned().hot.retain(|hot| !Arc::ptr_eq(&hot.qp, &qp));
        }
        self.live_changed();
    }

    pub(super) fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// A number that no queue pair has: windows and completions go by it.
    pub(super) fn new_qp_num(&self) -> u32 {
        loop {
            let count = self.next_qp.fetch_add(1, Ordering::Relaxed);
            let number = count as u32;
            // From the first 2^32 on, those that are left of them have to be passed over.
            let taken = |e: &Entity| matches!(e, Entity::QueuePair(qp) if qp.qp_num() == number);
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
        self.wakeups.discount_unpolled(1);
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
        self.wakeups.count_unpolled();
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
        self.wakeups.count_unpolled();
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
        let entities: Vec<Entity> = self.entities.lock_unpoisoned().values().cloned().collect();
        for entity in entities {
            busy |= match entity {
                Entity::QueuePair(qp) => qp.tick(now),
                Entity::Socket(socket) => socket.tick(self, now),
            };
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
        let found = self.entities.lock_unpoisoned().get(&id).cloned();
        match found {
            Some(Entity::QueuePair(qp)) => _ = qp.poll(socket, None),
            Some(Entity::Socket(socket)) => socket.progress(self),
            None => {}
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
            self.wakeups.discount_unpolled(served.len());
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
            if driver.all_by_shm && self.wakeups.doorbell.nobody_sleeps() {
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
            if driver.polls >= DETACH_AFTER && self.wakeups.doorbell.nobody_sleeps() {
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
                TOKEN_WAKE => drop(rustix::io::read(&self.wakeups.wake, &mut [0; 8])),
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
        let few: Vec<Arc<dyn DrivenPair>> = pairs().cloned().collect();
        drop(entities);
        few.into_iter().map(|qp| Hot { glance: qp.glance(), qp }).collect()
    }

    /// Polling a queue pair does not ask whether it has become writable, and an edge that was told of is not told
    /// of again: nothing may be left behind when somebody goes to sleep.
    pub(super) fn leave_nothing_behind(self: &Arc<Context>) {
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
