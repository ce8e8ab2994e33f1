//! A device that the connections of a program share, and who sees to its progress.
//!
//! A thread that waits for something of a connection polls the device, for all connections. Of several, one does, and the others
//! sleep until it has found something. While no thread waits, one of the context's does: it serves what peers do to registered memory,
//! and makes descriptors readable.

use crate::connection::{Connection, Inner};
use crate::error::Error;
use crate::settings::Settings;
use crate::wire::HELLO_LEN;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};
use thruway_fabric::{
    CompletionQueue, ConnectionEvent, ConnectionRequest, Device, ListenOptions, Listener, Provider, WorkCompletion,
};

/// How long the context's thread leaves the device alone after another has polled it.
const POLLING_LEASE: Duration = Duration::from_millis(1);
/// Longest sleep on the device. A safety net: under load, with one thread that polled and one that slept on the same device, a connection
/// has been seen to stand still, once in some hundred runs of the tests.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Longest time that a thread looks for itself while another sleeps on the device.
const FOLLOWER_SPIN_MAX_NS: u64 = 20_000;
/// Bytes that a connecting program may send along.
pub const TOKEN_MAX: usize = 16;
/// Requests to connect that are kept until they are accepted.
const REQUESTS_MAX: usize = 256;
/// How long a request waits to be accepted.
const REQUEST_AGE_MAX: Duration = Duration::from_secs(30);
/// Completions of a completion queue, of which there are as many as the connections need.
const COMPLETIONS_MAX: usize = 16 << 10;
/// Completions that are taken at a time.
const POLL_MAX: usize = 64;

/// A device with connections. Clones are the same.
#[derive(Clone)]
pub struct Context(pub(crate) Arc<Handle>);

/// What the program holds. Its last clone, and the last connection, end the thread.
pub(crate) struct Handle(Arc<Shared>);

impl std::ops::Deref for Handle {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let leader = lock(&self.leader);
        self.leaderless.notify_all();
        drop(leader);
        self.device.wake();
    }
}

/// Which thread sleeps on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leader {
    None,
    /// One that waits for something of a connection.
    Waiter,
    /// The context's own.
    Server,
}

pub(crate) struct Shared {
    pub(crate) device: Device,
    queues: Mutex<Vec<CompletionQueue>>,
    /// Held by the thread that takes completions: those of a connection have to be seen in their order.
    poller: Mutex<Vec<WorkCompletion>>,
    connections: Mutex<HashMap<u32, Weak<Inner>>>,
    requests: Mutex<Vec<Incoming>>,
    /// Tokens of requests that may come; `None` if any may.
    expected: Mutex<Option<HashSet<Vec<u8>>>>,
    leader: Mutex<Leader>,
    /// Something has been found that a thread may wait for which does not sleep on the device, or no thread does any more.
    found: Condvar,
    /// Threads that wait for that.
    waiting: AtomicU32,
    /// How long such a thread looks for itself first: longer while that pays.
    spin_ns: AtomicU64,
    /// A request to connect has come.
    requested: Condvar,
    /// Counts what has been found.
    epoch: AtomicU64,
    /// Counts the polls of threads that wait for something.
    polls: AtomicU64,
    /// The context's thread sleeps until no thread sees to the device.
    is_parked: AtomicBool,
    leaderless: Condvar,
    ended: AtomicBool,
    /// The program polls: calls that do not wait leave that to it.
    is_attended: bool,
}

impl Context {
    /// Opens a device of the provider.
    ///
    /// # Errors
    /// If there is none, or no thread for it.
    pub fn open(provider: &Provider) -> Result<Context, Error> {
        let context = Context::open_with(provider, false)?;
        let served = Arc::clone(&context.0.0);
        let spawned = std::thread::Builder::new().name("thruway-streams".into()).spawn(move || served.serve());
        spawned.map_err(Error::Memory)?;
        Ok(context)
    }

    /// Opens a device that the program sees to itself, with [`Context::poll`] again and again: for one that has a loop and waits for other
    /// things, too. There is no thread; descriptors of connections, requests to connect, and calls that do not wait for what they find
    /// nothing of, need it to.
    ///
    /// # Errors
    /// If there is none.
    pub fn open_attended(provider: &Provider) -> Result<Context, Error> {
        Context::open_with(provider, true)
    }

    fn open_with(provider: &Provider, is_attended: bool) -> Result<Context, Error> {
        let device = provider.open()?;
        let shared = Arc::new(Shared {
            device,
            queues: Mutex::default(),
            poller: Mutex::default(),
            connections: Mutex::default(),
            requests: Mutex::default(),
            expected: Mutex::default(),
            leader: Mutex::new(Leader::None),
            found: Condvar::new(),
            waiting: AtomicU32::new(0),
            spin_ns: AtomicU64::new(FOLLOWER_SPIN_MAX_NS),
            requested: Condvar::new(),
            epoch: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            is_parked: AtomicBool::new(false),
            leaderless: Condvar::new(),
            ended: AtomicBool::new(false),
            is_attended,
        });
        Ok(Context(Arc::new(Handle(shared))))
    }

    /// Takes note of what has happened. Returns how much that was.
    pub fn poll(&self) -> usize {
        self.0.poll()
    }

    /// Before the program sleeps until [`Context::wait_fd`] is readable. False if there is something to poll already.
    #[must_use]
    pub fn arm(&self) -> bool {
        self.0.device.arm()
    }

    /// Readable when there is something to poll, if the last [`Context::arm`] has found nothing.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.device.wait_fd()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Listens; port 0 lets the system choose. Requests wait until [`Context::accept`] takes them.
    ///
    /// # Errors
    /// As [`Device::listen`].
    pub fn listen(&self, at: SocketAddr) -> Result<Listener, Error> {
        Ok(self.0.device.listen(at, &ListenOptions::default())?)
    }

    /// Connects, and sends `token` along, of at most [`TOKEN_MAX`] bytes.
    ///
    /// # Errors
    /// If the peer cannot be reached, refuses, or does not answer in time.
    ///
    /// # Panics
    /// If the token is too long.
    pub fn connect(
        &self,
        peer: SocketAddr,
        settings: &Settings,
        token: &[u8],
        timeout: Duration,
    ) -> Result<Connection, Error> {
        assert!(token.len() <= TOKEN_MAX, "a token of {} bytes", token.len());
        Connection::connect(&self.0, peer, settings, token, timeout)
    }

    /// Says that a request with this token is expected, for as long as what this returns lives. Once a token has been expected, requests
    /// with others are refused when they come.
    ///
    /// # Panics
    /// If the token is not of [`TOKEN_MAX`] bytes.
    pub fn expect(&self, token: &[u8]) -> Expected {
        assert_eq!(token.len(), TOKEN_MAX, "bytes of a token");
        let token = token.to_vec();
        lock(&self.0.expected).get_or_insert_default().insert(token.clone());
        Expected { context: self.clone(), token }
    }

    /// The next request to connect that `wanted` says yes to; others are kept for other callers.
    ///
    /// # Errors
    /// [`Error::TimedOut`].
    pub fn request(&self, wanted: impl Fn(&Incoming) -> bool, deadline: Option<Instant>) -> Result<Incoming, Error> {
        let mut requests = lock(&self.0.requests);
        loop {
            if let Some(at) = requests.iter().position(&wanted) {
                return Ok(requests.remove(at));
            }
            // The context's thread sees to the device.
            let left = deadline.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::TimedOut);
            }
            let waited = self.0.requested.wait_timeout(requests, left);
            requests = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Accepts the connection that was requested with this token.
    ///
    /// # Errors
    /// [`Error::TimedOut`], or as the peer does.
    pub fn accept(&self, settings: &Settings, token: &[u8], timeout: Duration) -> Result<Connection, Error> {
        let deadline = Instant::now() + timeout;
        let request = self.request(|request| request.token().starts_with(token), Some(deadline))?;
        request.accept(self, settings, deadline)
    }
}

/// A token that is expected.
pub struct Expected {
    context: Context,
    token: Vec<u8>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        lock(&self.context.0.expected).get_or_insert_default().remove(&self.token);
        // One that has come and was not accepted.
        lock(&self.context.0.requests).retain(|request| !request.token().starts_with(&self.token));
    }
}

/// A request to connect. Dropping it refuses.
pub struct Incoming(ConnectionRequest, Instant);

impl Incoming {
    /// What the peer's program has sent along; zeros may follow.
    pub fn token(&self) -> &[u8] {
        self.0.private_data().get(HELLO_LEN..).unwrap_or_default()
    }

    /// Where it comes from.
    pub fn peer(&self) -> SocketAddr {
        self.0.peer()
    }

    /// Accepts it.
    ///
    /// # Errors
    /// [`Error::TimedOut`], or as the peer does.
    pub fn accept(self, context: &Context, settings: &Settings, deadline: Instant) -> Result<Connection, Error> {
        Connection::accept(&context.0, self.0, settings, deadline)
    }
}

impl Shared {
    pub(crate) fn add(&self, number: u32, connection: &Arc<Inner>) {
        lock(&self.connections).insert(number, Arc::downgrade(connection));
    }

    pub(crate) fn remove(&self, number: u32) {
        lock(&self.connections).remove(&number);
    }

    /// A completion queue with room for a queue pair, which `make` makes.
    pub(crate) fn with_queue<T>(
        &self,
        make: impl Fn(&CompletionQueue) -> thruway_fabric::Result<T>,
    ) -> thruway_fabric::Result<T> {
        let mut queues = lock(&self.queues);
        for queue in queues.iter().rev() {
            let made = make(queue);
            if !matches!(made, Err(thruway_fabric::Error::Limit { .. })) {
                return made;
            }
        }
        let queue = self.device.create_cq(COMPLETIONS_MAX.min(self.device.attributes().max_cqe))?;
        let made = make(&queue)?;
        queues.push(queue);
        Ok(made)
    }

    /// What [`Shared::wait`] wants to know: taken before looking whether there is something to wait for.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Returns when something may have been found since `epoch`, at the latest at the deadline.
    pub(crate) fn wait(&self, epoch: u64, deadline: Option<Instant>) -> Result<(), Error> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        let mut leader = lock(&self.leader);
        if *leader == Leader::Server {
            // It gives way: what has been found is wanted here, without another thread in between.
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.device.wake();
            while *leader == Leader::Server {
                leader = self.found.wait(leader).unwrap_or_else(PoisonError::into_inner);
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        if self.epoch() != epoch {
            return Ok(());
        }
        let left = || deadline.map(|at| at.saturating_duration_since(Instant::now()));
        if *leader == Leader::Waiter {
            drop(leader);
            return self.follow(epoch, left());
        }
        self.lead(leader, Leader::Waiter, left())
    }

    /// Sleeps on the device, for all.
    fn lead(&self, mut leader: MutexGuard<'_, Leader>, as_what: Leader, limit: Option<Duration>) -> Result<(), Error> {
        *leader = as_what;
        drop(leader);
        let waited = self.device.wait(Some(limit.map_or(LOOK_INTERVAL, |limit| limit.min(LOOK_INTERVAL))));
        let mut leader = lock(&self.leader);
        *leader = Leader::None;
        if self.is_parked.swap(false, Ordering::SeqCst) {
            self.leaderless.notify_one();
        }
        // Another has to see to the device when this one goes away.
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.found.notify_all();
        }
        drop(leader);
        // The device said once that there is something. A thread that polls just now may have looked before that.
        self.poll_with(lock(&self.poller));
        Ok(waited?)
    }

    /// Another thread sleeps on the device, and says what it finds.
    fn follow(&self, epoch: u64, limit: Option<Duration>) -> Result<(), Error> {
        let began = Instant::now();
        let spin = Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed));
        while began.elapsed() < spin {
            self.poll();
            if self.epoch() != epoch {
                self.spin_ns.store((spin.as_nanos() as u64 * 2).clamp(1000, FOLLOWER_SPIN_MAX_NS), Ordering::Relaxed);
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.spin_ns.store((spin.as_nanos() as u64 / 2).max(1000), Ordering::Relaxed);
        let leader = lock(&self.leader);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        if self.epoch() == epoch && *leader != Leader::None {
            let limit = limit.unwrap_or(Duration::from_secs(3600));
            drop(self.found.wait_timeout(leader, limit).unwrap_or_else(PoisonError::into_inner));
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    /// Sees to the device while nothing else does.
    fn serve(&self) {
        let mut seen = 0;
        while !self.ended.load(Ordering::SeqCst) {
            let epoch = self.epoch();
            self.poll();
            let polls = self.polls.load(Ordering::Relaxed);
            if polls != seen {
                seen = polls;
                std::thread::sleep(POLLING_LEASE);
                continue;
            }
            let leader = lock(&self.leader);
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            if *leader == Leader::None && self.waiting.load(Ordering::SeqCst) > 0 {
                // One of them is about to lead, or has found what it waited for.
                drop(leader);
                std::thread::sleep(POLLING_LEASE);
            } else if *leader != Leader::None {
                self.is_parked.store(true, Ordering::SeqCst);
                drop(self.leaderless.wait(leader));
            } else if self.epoch() == epoch && self.lead(leader, Leader::Server, None).is_err() {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }

    /// Something has been found that others may wait for.
    pub(crate) fn tell(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        let leader = lock(&self.leader);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.found.notify_all();
        }
        if *leader == Leader::Waiter {
            self.device.wake();
        }
    }

    /// Takes note of everything that has happened. Returns how much that was.
    /// Zero if another thread does so already.
    pub(crate) fn poll(&self) -> usize {
        match self.poller.try_lock() {
            Ok(completions) => self.poll_with(completions),
            // A panic in one connection's code does not stop the others.
            Err(TryLockError::Poisoned(poisoned)) => self.poll_with(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => 0,
        }
    }

    /// For a call that does not wait.
    pub(crate) fn poll_unless_attended(&self) {
        if !self.is_attended {
            self.poll();
        }
    }

    fn poll_with(&self, mut completions: MutexGuard<'_, Vec<WorkCompletion>>) -> usize {
        let mut others_wait = false;
        let mut count = 0;
        for queue in lock(&self.queues).iter() {
            while queue.poll(&mut completions, POLL_MAX) == POLL_MAX {}
        }
        count += completions.len();
        let mut rest = &completions[..];
        while let Some(first) = rest.first() {
            let len = rest.iter().take_while(|wc| wc.qp_num == first.qp_num).count();
            let (own, others) = rest.split_at(len);
            if let Some(connection) = self.connection(first.qp_num) {
                others_wait |= connection.complete(own);
            }
            rest = others;
        }
        completions.clear();
        // Ends come behind the completions.
        while let Some(event) = self.device.poll_event() {
            count += 1;
            match event {
                ConnectionEvent::Request(request) => {
                    let request = Incoming(request, Instant::now());
                    let is_expected = |tokens: &HashSet<Vec<u8>>| {
                        request.token().get(..TOKEN_MAX).is_some_and(|token| tokens.contains(token))
                    };
                    if lock(&self.expected).as_ref().is_none_or(is_expected) {
                        let mut requests = lock(&self.requests);
                        requests.retain(|request| request.1.elapsed() < REQUEST_AGE_MAX);
                        if requests.len() >= REQUESTS_MAX {
                            requests.remove(0);
                        }
                        requests.push(request);
                        self.requested.notify_all();
                    }
                }
                ConnectionEvent::Established { qp_num, private_data } => {
                    if let Some(connection) = self.connection(qp_num) {
                        others_wait |= connection.established(&private_data);
                    }
                }
                ConnectionEvent::Disconnected { qp_num, cause } => {
                    // All that came before: after the end there is no other poll.
                    if let Some(connection) = self.connection(qp_num) {
                        for queue in lock(&self.queues).iter() {
                            while queue.poll(&mut completions, POLL_MAX) > 0 {}
                        }
                        for wc in completions.drain(..) {
                            if let Some(connection) = self.connection(wc.qp_num) {
                                others_wait |= connection.complete(&[wc]);
                            }
                        }
                        others_wait |= connection.disconnected(cause);
                    }
                }
                ConnectionEvent::Foreign { .. } => {}
            }
        }
        drop(completions);
        if others_wait {
            self.tell();
        }
        count
    }

    fn connection(&self, number: u32) -> Option<Arc<Inner>> {
        lock(&self.connections).get(&number).and_then(Weak::upgrade)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
