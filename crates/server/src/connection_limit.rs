//! Connection limit: how many connections of a protocol are served at a time.
//!
//! Connections that have not authenticated are evicted when others need their places: the oldest of the origin that has the
//! most of them. So a peer that only connects keeps no other out. Authenticated connections stay, but one origin may have only
//! a share of the places ([`is_fair`]).

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use thruway_engine::quota::is_fair;
use thruway_engine::reactor::LoadBalancer;
use thruway_tcp::{ByOrigin, Origin};
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
    authenticated_of: ByOrigin<u64>,
    /// Those that are evicted when others need their places; evicted ones are not among them.
    unauthenticated: HashMap<u64, Arc<Notify>>,
    unauthenticated_of: ByOrigin<u64>,
    next: u64,
}

impl State {
    /// Evicts an unauthenticated connection for a new one.
    fn evict_one(&mut self, new: Origin) {
        let Some((origin, number)) = self.unauthenticated_of.give_way(new) else { return };
        if let Some(evicted) = self.forget(origin, number) {
            evicted.notify_one();
        }
    }

    fn forget(&mut self, origin: Origin, number: u64) -> Option<Arc<Notify>> {
        self.unauthenticated_of.remove(origin, number);
        self.unauthenticated.remove(&number)
    }

    /// Whether another connection of this origin may be authenticated; if not, why. The user that this process runs as, and
    /// root, may have all places.
    fn check_room(&self, origin: Origin, max: usize) -> Result<(), String> {
        let (free, theirs) = (max.saturating_sub(self.authenticated), self.authenticated_of.count(origin));
        if free == 0 {
            return Err(format!("connection limit of {max} reached"));
        }
        if !is_fair(theirs, free) && !origin.is_own_user() {
            return Err(format!("{origin} has {theirs} connections, and {free} of {max} must do for all others"));
        }
        Ok(())
    }
}

/// Permission for one connection, released on drop.
pub struct Permit {
    limit: Arc<ConnectionLimit>,
    peer: String,
    origin: Origin,
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

    /// Acquires a permit for a connection of this peer; `None` if authenticated connections have reached the limit, or those of
    /// its origin their share. May evict an unauthenticated one.
    pub fn acquire(self: &Arc<ConnectionLimit>, peer: impl ToString, origin: Origin) -> Option<Permit> {
        let peer = peer.to_string();
        let mut state = self.lock();
        if let Err(why) = state.check_room(origin, self.max) {
            tracing::warn!(peer, protocol = self.protocol, why, "connection refused");
            return None;
        }
        if state.authenticated + state.unauthenticated.len() >= self.max {
            state.evict_one(origin);
        }
        let (number, evicted) = (state.next, Arc::new(Notify::new()));
        state.next += 1;
        state.all += 1;
        state.unauthenticated.insert(number, Arc::clone(&evicted));
        state.unauthenticated_of.insert(origin, number);
        drop(state);
        Some(Permit {
            limit: Arc::clone(self),
            peer,
            origin,
            number,
            evicted,
            is_authenticated: AtomicBool::new(false),
        })
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
    ///
    /// # Errors
    /// Of kind `ConnectionRefused` if authenticated connections have reached the limit, or those of its origin their share.
    pub fn set_authenticated(&self) -> io::Result<()> {
        if self.is_authenticated.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut state = self.limit.lock();
        let room = state.check_room(self.origin, self.limit.max);
        room.map_err(|why| io::Error::new(io::ErrorKind::ConnectionRefused, why))?;
        // Not there if it has just been evicted, too late.
        state.forget(self.origin, self.number);
        state.authenticated += 1;
        state.authenticated_of.insert(self.origin, self.number);
        self.is_authenticated.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.limit.lock();
        state.all -= 1;
        self.limit.released.notify_all();
        if *self.is_authenticated.get_mut() {
            state.authenticated -= 1;
            state.authenticated_of.remove(self.origin, self.number);
        } else {
            state.forget(self.origin, self.number);
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

    fn host(number: u8) -> Origin {
        Origin::of_host([192, 0, 2, number].into())
    }

    fn acquire(limit: &Arc<ConnectionLimit>, number: u8) -> Option<Permit> {
        limit.acquire(number, host(number))
    }

    #[tokio::test]
    async fn permits_are_released_on_drop() {
        let limit = ConnectionLimit::new("test", 2);
        let (one, two) = (acquire(&limit, 1).unwrap(), acquire(&limit, 2).unwrap());
        one.set_authenticated().unwrap();
        two.set_authenticated().unwrap();
        assert!(acquire(&limit, 3).is_none());
        drop(one);
        assert!(!is_evicted(&acquire(&limit, 4).unwrap()));
        drop(two);
        limit.wait_until_empty(Duration::from_secs(60));
        let state = limit.lock();
        assert_eq!((state.authenticated, state.authenticated_of.count(host(2))), (0, 0));
    }

    #[tokio::test]
    async fn unauthenticated_connections_are_evicted_those_of_the_busiest_origin_first() {
        let limit = ConnectionLimit::new("test", 10);
        let known = acquire(&limit, 9).unwrap();
        known.set_authenticated().unwrap();
        let other = acquire(&limit, 2).unwrap();
        let many: Vec<Permit> = (0..100).map(|_| acquire(&limit, 1).unwrap()).collect();
        assert!(!is_evicted(&known) && !is_evicted(&other));
        let left = many.iter().filter(|permit| !is_evicted(permit)).count();
        assert_eq!(left, 8, "as many as the limit leaves");
        assert!(!is_evicted(&many[99]), "the oldest go first");
        // New connections get in, stay once they have authenticated, and can reach the limit.
        let admitted: Vec<Permit> = (10..19).map(|number| acquire(&limit, number).unwrap()).collect();
        admitted.iter().for_each(|permit| permit.set_authenticated().unwrap());
        assert!(is_evicted(&other) && acquire(&limit, 1).is_none());
    }

    #[tokio::test]
    async fn an_origin_that_connects_again_and_again_evicts_its_own_connections() {
        let limit = ConnectionLimit::new("test", 2);
        let slow = acquire(&limit, 2).unwrap();
        let many: Vec<Permit> = (0..20).map(|_| acquire(&limit, 1).unwrap()).collect();
        assert!(!is_evicted(&slow) && is_evicted(&many[18]) && !is_evicted(&many[19]));
    }

    #[tokio::test]
    async fn no_origin_has_all_places_whether_it_authenticates_early_or_late() {
        for late in [false, true] {
            let limit = ConnectionLimit::new("test", 90);
            let mut held = Vec::new();
            for number in 1..=2 {
                let wanted: Vec<Permit> = (0..90)
                    .filter_map(|_| {
                        let permit = acquire(&limit, number)?;
                        if !late {
                            permit.set_authenticated().ok()?;
                        }
                        Some(permit)
                    })
                    .collect();
                held.push(wanted.into_iter().filter(|permit| permit.set_authenticated().is_ok()).collect::<Vec<_>>());
            }
            assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [80, 9], "late: {late}");
            // Except to this very user, who has all of them.
            let own = Origin::User(rustix::process::geteuid().as_raw());
            let last = limit.acquire("own", own).unwrap();
            last.set_authenticated().unwrap();
            assert!(limit.acquire("own", own).is_none() && limit.count() == 90);
        }
    }
}
