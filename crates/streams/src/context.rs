//! A device that the connections of a program share, and who sees to its progress.
//!
//! A thread that waits for something of a connection polls the device, for all connections. Of several, one does, and the others
//! sleep until it has found something for them. While no thread waits, one of the context's does: it serves what peers do to registered
//! memory, and makes descriptors readable.

use crate::connection::{Connection, Inner};
use crate::error::Error;
use crate::leadership::Leadership;
use crate::settings::Settings;
use crate::wire::HELLO_LEN;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};
use thruway_fabric::{
    CompletionQueue, ConnectionEvent, ConnectionRequest, Device, ListenOptions, Listener, Provider, WorkCompletion,
};

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
        self.leadership.rouse_server();
        self.device.wake();
    }
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
    pub(crate) leadership: Leadership,
    /// A request to connect has come.
    requested: Condvar,
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
            leadership: Leadership::new(),
            requested: Condvar::new(),
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

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Takes note of everything that has happened. Returns how much that was.
    /// Zero if another thread does so already.
    pub(crate) fn poll(&self) -> usize {
        match self.poller.try_lock() {
            Ok(completions) => self.poll_with(completions),
            // A panic of a thread that polled does not stop the others.
            Err(TryLockError::Poisoned(poisoned)) => self.poll_with(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => 0,
        }
    }

    /// As [`Shared::poll`], after the thread that does so.
    pub(crate) fn poll_in_turn(&self) {
        self.poll_with(lock(&self.poller));
    }

    /// For a call that does not wait.
    pub(crate) fn poll_unless_attended(&self) {
        if !self.is_attended {
            self.poll();
        }
    }

    fn poll_with(&self, mut completions: MutexGuard<'_, Vec<WorkCompletion>>) -> usize {
        let mut count = 0;
        for queue in lock(&self.queues).iter() {
            while queue.poll(&mut completions, POLL_MAX) == POLL_MAX {}
        }
        count += completions.len();
        let mut rest = &completions[..];
        while let Some(first) = rest.first() {
            let len = rest.iter().take_while(|wc| wc.qp_num == first.qp_num).count();
            let (own, others) = rest.split_at(len);
            self.note(first.qp_num, |connection| connection.complete(own));
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
                    self.note(qp_num, |connection| connection.established(&private_data));
                }
                ConnectionEvent::Disconnected { qp_num, cause } => {
                    // All that came before: after the end there is no other poll.
                    if self.connection(qp_num).is_some() {
                        for queue in lock(&self.queues).iter() {
                            while queue.poll(&mut completions, POLL_MAX) > 0 {}
                        }
                        for wc in completions.drain(..) {
                            self.note(wc.qp_num, |connection| connection.complete(&[wc]));
                        }
                        self.note(qp_num, |connection| connection.disconnected(cause));
                    }
                }
                ConnectionEvent::Foreign { .. } => {}
            }
        }
        count
    }

    /// Has a connection take note of something. A panic, which would be a fault of ours that a peer has found, ends this connection and
    /// no other.
    fn note(&self, number: u32, note: impl FnOnce(&Inner)) {
        let Some(connection) = self.connection(number) else { return };
        let noted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| note(&connection)));
        if noted.is_err() {
            connection.contain();
        }
    }

    fn connection(&self, number: u32) -> Option<Arc<Inner>> {
        lock(&self.connections).get(&number).and_then(Weak::upgrade)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_fabric::iwarp;

    const TOKEN: &[u8] = b"0123456789abcdef";
    const LIMIT: Duration = Duration::from_secs(30);

    /// Whichever thread takes note: one that waits, the one of those that leads, or the context's own.
    #[test]
    fn a_panic_ends_its_connection_and_no_other() {
        let provider: Provider = iwarp::Config::default().into();
        let (server, client) = (Context::open(&provider).unwrap(), Context::open(&provider).unwrap());
        let settings = Settings::of(crate::Scheme::Adaptive);
        let listener = server.listen(([127, 0, 0, 1], 0).into()).unwrap();
        let pair = || {
            std::thread::scope(|scope| {
                let connecting =
                    scope.spawn(|| client.connect(listener.local_addr(), &settings, TOKEN, LIMIT).unwrap());
                (server.accept(&settings, TOKEN, LIMIT).unwrap(), connecting.join().unwrap())
            })
        };
        let deadline = || Some(Instant::now() + LIMIT);
        for waiting in 0..=3 {
            let pairs: Vec<_> = (0..4).map(|_| pair()).collect();
            let (faulty, sound) = pairs.split_first().unwrap();
            std::thread::scope(|scope| {
                let receive = |one: &Connection| one.recv(&mut [0; 8], deadline()).map_err(|error| error.to_string());
                let received: Vec<_> =
                    sound.iter().take(waiting).map(|(one, _)| scope.spawn(move || receive(one))).collect();
                faulty.0.0.panics_once.store(true, Ordering::SeqCst);
                faulty.1.send(b"x", deadline()).unwrap();
                assert!(matches!(faulty.0.recv(&mut [0; 8], deadline()), Err(Error::Reset)));
                assert!(faulty.1.recv(&mut [0; 8], deadline()).is_err(), "the peer learns it");
                sound.iter().for_each(|(_, other)| other.send(b"y", deadline()).unwrap());
                received.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), Ok(1)));
                sound.iter().skip(waiting).for_each(|(one, _)| assert_eq!(receive(one), Ok(1)));
            });
        }
    }
}
