//! Connection limit: how many connections of a protocol are served at a time.
//!
//! Connections that have not authenticated are evicted when others need their places: the oldest of the host that has the
//! most of them. So a peer that only connects keeps no other out.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use thruway_engine::limits;
use thruway_engine::reactor::LoadBalancer;
use tokio::sync::Notify;

/// Limits the connections of one protocol.
pub struct ConnectionLimit {
    protocol: &'static str,
    max: usize,
    state: Mutex<State>,
    /// Told when a permit is released.
    released: Condvar,
}

#[derive(Default)]
struct State {
    /// Connections with a permit, evicted ones that are still ending included.
    all: usize,
    authenticated: usize,
    /// Oldest first; evicted ones are not among them.
    unauthenticated: VecDeque<Unauthenticated>,
    next: u64,
}

struct Unauthenticated {
    number: u64,
    /// The peer's host; `None` for Unix sockets.
    host: Option<IpAddr>,
    evicted: Arc<Notify>,
}

impl State {
    /// Evicts the oldest unauthenticated connection of the host that has the most of them, a new one of `host` counted in.
    fn evict_one(&mut self, host: Option<IpAddr>) -> Option<Unauthenticated> {
        let mut count = HashMap::from([(host, 1)]);
        self.unauthenticated.iter().for_each(|other| *count.entry(other.host).or_default() += 1);
        let most = self.unauthenticated.iter().map(|other| count[&other.host]).max()?;
        let oldest = self.unauthenticated.iter().position(|other| count[&other.host] == most)?;
        self.unauthenticated.remove(oldest).inspect(|other| other.evicted.notify_one())
    }
}

/// Permission for one connection, released on drop.
pub struct Permit {
    limit: Arc<ConnectionLimit>,
    peer: String,
    number: u64,
    evicted: Arc<Notify>,
    is_authenticated: AtomicBool,
}

impl ConnectionLimit {
    /// At most `max` connections of this protocol at a time.
    pub fn new(protocol: &'static str, max: usize) -> Arc<ConnectionLimit> {
        Arc::new(ConnectionLimit { protocol, max, state: Mutex::default(), released: Condvar::new() })
    }

    /// The name of the protocol.
    pub fn protocol(&self) -> &'static str {
        self.protocol
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics under the lock")
    }

    /// Acquires a permit for a connection of this peer; `None` if authenticated connections have reached the limit. May evict
    /// an unauthenticated one.
    pub fn acquire(self: &Arc<ConnectionLimit>, peer: impl ToString) -> Option<Permit> {
        let peer = peer.to_string();
        let (protocol, limit) = (self.protocol, self.max);
        let mut state = self.lock();
        if state.authenticated >= self.max {
            tracing::warn!(peer, protocol, limit, "connection limit reached; connection refused");
            return None;
        }
        let host = peer.parse().ok().map(|peer: SocketAddr| limits::host_of(peer.ip()));
        if state.authenticated + state.unauthenticated.len() >= self.max {
            state.evict_one(host);
        }
        let (number, evicted) = (state.next, Arc::new(Notify::new()));
        state.next += 1;
        state.all += 1;
        state.unauthenticated.push_back(Unauthenticated { number, host, evicted: Arc::clone(&evicted) });
        drop(state);
        Some(Permit { limit: Arc::clone(self), peer, number, evicted, is_authenticated: AtomicBool::new(false) })
    }

    /// Waits until all permits have been released, for at most `limit`.
    pub fn wait_until_empty(&self, limit: Duration) {
        let state = self.lock();
        let waited = self.released.wait_timeout_while(state, limit, |state| state.all > 0);
        drop(waited.expect("no panics under the lock"));
    }

    /// Permits that have not been released.
    pub fn count(&self) -> usize {
        self.lock().all
    }
}

impl Permit {
    /// Runs the connection on the reactor with the fewest, and logs how it ended.
    pub fn serve<F>(self, reactors: &LoadBalancer, serve: impl FnOnce(Arc<Permit>) -> F + Send + 'static)
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        let permit = Arc::new(self);
        let Some(reactor) = reactors.least_loaded() else { return };
        let load = reactor.load();
        reactor.spawn(move || async move {
            let (peer, protocol) = (&permit.peer, permit.limit.protocol);
            match serve(Arc::clone(&permit)).await {
                Ok(()) => tracing::info!(peer, protocol, "connection closed by the client"),
                Err(error) => tracing::info!(peer, protocol, %error, "connection ended"),
            }
            drop((load, permit));
        });
    }

    /// Runs the peer's handshake, for at most `limit`.
    ///
    /// # Errors
    /// Those of the handshake; of kind `TimedOut` after `limit`; of kind `ConnectionAborted` if the connection was evicted.
    pub async fn handshake<T>(&self, limit: Duration, handshake: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        tokio::select! {
            biased;
            () = self.evicted() => {
                let why = "evicted before it had authenticated: others needed its place";
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, why))
            }
            done = tokio::time::timeout(limit, handshake) => done.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?,
        }
    }

    /// Resolves when the connection, unauthenticated, has been evicted.
    pub async fn evicted(&self) {
        loop {
            self.evicted.notified().await;
            if !self.is_authenticated.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// The peer has authenticated: the connection is not evicted any more.
    pub fn set_authenticated(&self) {
        if !self.is_authenticated.swap(true, Ordering::Relaxed) {
            let mut state = self.limit.lock();
            // Not there if it has just been evicted, too late.
            state.unauthenticated.retain(|other| other.number != self.number);
            state.authenticated += 1;
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.limit.lock();
        state.all -= 1;
        self.limit.released.notify_all();
        if *self.is_authenticated.get_mut() {
            state.authenticated -= 1;
        } else {
            state.unauthenticated.retain(|other| other.number != self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn is_evicted(permit: &Permit) -> bool {
        let never = std::future::pending::<io::Result<()>>();
        permit.handshake(Duration::MAX, never).now_or_never().is_some_and(|ended| ended.is_err())
    }

    #[tokio::test]
    async fn permits_are_released_on_drop() {
        let limit = ConnectionLimit::new("test", 2);
        let (one, two) = (limit.acquire("a").unwrap(), limit.acquire("b").unwrap());
        one.set_authenticated();
        two.set_authenticated();
        assert!(limit.acquire("c").is_none());
        drop(one);
        assert!(!is_evicted(&limit.acquire("d").unwrap()));
        drop(two);
        limit.wait_until_empty(Duration::from_secs(60));
    }

    #[tokio::test]
    async fn unauthenticated_connections_are_evicted_those_of_the_busiest_host_first() {
        let limit = ConnectionLimit::new("test", 10);
        let known = limit.acquire("192.0.2.9:1").unwrap();
        known.set_authenticated();
        let other = limit.acquire("192.0.2.2:1").unwrap();
        let many: Vec<Permit> = (0..100).map(|port| limit.acquire(format!("192.0.2.1:{port}")).unwrap()).collect();
        assert!(!is_evicted(&known) && !is_evicted(&other));
        let left = many.iter().filter(|permit| !is_evicted(permit)).count();
        assert_eq!(left, 8, "as many as the limit leaves");
        assert!(!is_evicted(&many[99]), "the oldest go first");
        // New connections get in, stay once they have authenticated, and can reach the limit.
        let admitted: Vec<Permit> = (0..9).map(|host| limit.acquire(format!("192.0.2.{host}:7")).unwrap()).collect();
        admitted.iter().for_each(Permit::set_authenticated);
        assert!(is_evicted(&other) && limit.acquire("192.0.2.1:1").is_none());
    }

    #[tokio::test]
    async fn a_host_that_connects_again_and_again_evicts_its_own_connections() {
        for (busy, other) in [("192.0.2.1", "192.0.2.2"), ("[2001:db8::1]", "[2001:db8:0:1::1]")] {
            let limit = ConnectionLimit::new("test", 2);
            let slow = limit.acquire(format!("{other}:1")).unwrap();
            let many: Vec<Permit> = (0..20).map(|port| limit.acquire(format!("{busy}:{port}")).unwrap()).collect();
            assert!(!is_evicted(&slow) && is_evicted(&many[18]) && !is_evicted(&many[19]));
        }
        let limit = ConnectionLimit::new("test", 2);
        let slow = limit.acquire("[2001:db8:0:1::1]:1").unwrap();
        let many: Vec<Permit> = (0..20).map(|n| limit.acquire(format!("[2001:db8::{n}]:1")).unwrap()).collect();
        assert!(!is_evicted(&slow) && is_evicted(&many[18]), "one host may have many addresses");
    }
}
