//! How many connections a server has at one time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use thruway_engine::reactor::Spreader;

/// Lets in so many connections at one time.
pub(crate) struct Gate {
    protocol: &'static str,
    inside: AtomicUsize,
    max: usize,
}

/// A connection's place, given back when it is dropped, whatever the connection came to.
pub(crate) struct Place {
    gate: Arc<Gate>,
    peer: String,
}

impl Gate {
    pub(crate) fn new(protocol: &'static str, max: usize) -> Arc<Gate> {
        Arc::new(Gate { protocol, inside: AtomicUsize::new(0), max })
    }

    /// A place, if there is one.
    pub(crate) fn enter(self: &Arc<Gate>, peer: impl ToString) -> Option<Place> {
        let place = Place { gate: Arc::clone(self), peer: peer.to_string() };
        if self.inside.fetch_add(1, Ordering::AcqRel) < self.max {
            return Some(place);
        }
        tracing::warn!(place.peer, protocol = self.protocol, limit = self.max, "too many connections; one is closed");
        None
    }

    /// Waits until nobody is inside, or for `limit`.
    pub(crate) fn wait_until_empty(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.inside.load(Ordering::Acquire) > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Place {
    /// Serves the connection on the reactor that has the fewest.
    pub(crate) fn serve<F>(self, reactors: &Spreader, serve: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        let Some(reactor) = reactors.least_loaded() else { return };
        let load = reactor.load();
        reactor.spawn(move || async move {
            let (peer, protocol) = (&self.peer, self.gate.protocol);
            match serve().await {
                Ok(()) => tracing::info!(peer, protocol, "a client has left"),
                Err(error) => tracing::info!(peer, protocol, %error, "a connection has ended"),
            }
            drop((load, self));
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gate.inside.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back() {
        let gate = Gate::new("test", 2);
        let (one, _two) = (gate.enter("a").unwrap(), gate.enter("b").unwrap());
        assert!(gate.enter("c").is_none());
        drop(one);
        assert!(gate.enter("d").is_some());
    }
}
