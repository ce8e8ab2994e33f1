//! Accepts the connections of one protocol and hands each to a reactor.

use crate::connection_limit::{ConnectionLimit, Permit};
use crate::listener::{Address, ListenError, Listener, Socket};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_engine::local_peer;
use tokio::sync::watch;

/// Decides which connections of a protocol are served, and ends them in an orderly way.
pub struct Acceptor {
    limit: Arc<ConnectionLimit>,
    own_user_only: bool,
    closing: watch::Sender<bool>,
}

impl Acceptor {
    /// Serves at most `connections_max` connections at a time. With `own_user_only`, connections over the loopback
    /// interface are served only if they come from root or from the user that this process runs as.
    pub fn new(protocol: &'static str, connections_max: usize, own_user_only: bool) -> Arc<Acceptor> {
        Arc::new(Acceptor {
            limit: ConnectionLimit::new(protocol, connections_max),
            own_user_only,
            closing: watch::Sender::new(false),
        })
    }

    /// Listens on these addresses. `serve` runs each accepted connection, on the reactor with the fewest connections.
    /// Returns the addresses, with the ports that the kernel chose.
    ///
    /// # Errors
    /// [`ListenError`] for the first address that cannot be listened on.
    pub fn listen<S, F>(
        self: &Arc<Self>,
        addresses: &[Address],
        reactors: &Reactors,
        serve: S,
    ) -> Result<Vec<Address>, ListenError>
    where
        S: Fn(Socket, Arc<Permit>) -> F + Clone + Send + 'static,
        F: Future<Output = io::Result<()>> + 'static,
    {
        let mut bound = Vec::new();
        for address in addresses {
            let listener = Listener::bind(address)?;
            bound.push(listener.address());
            let (acceptor, spreader, serve) = (Arc::clone(self), reactors.spreader(), serve.clone());
            reactors.handles()[0].spawn(move || async move {
                let result = listener
                    .accept(|socket| {
                        let Some(permit) = acceptor.admit_socket(&socket) else { return };
                        let serve = serve.clone();
                        permit.serve(&spreader, move |permit| serve(socket, permit));
                    })
                    .await;
                tracing::error!(?result, protocol = acceptor.limit.protocol(), "no longer accepting connections");
            });
        }
        Ok(bound)
    }

    fn admit_socket(&self, socket: &Socket) -> Option<Permit> {
        match socket {
            Socket::Tcp(stream, peer) => self.admit(*peer, stream.local_addr().ok()?),
            // The permissions of the socket's file have decided who may connect.
            Socket::Unix(_) if self.is_closing() => None,
            Socket::Unix(_) => self.limit.acquire(socket.peer()),
        }
    }

    /// A permit for a connection of this peer; `None` if it is not to be served.
    pub fn admit(&self, peer: SocketAddr, local: SocketAddr) -> Option<Permit> {
        if self.is_closing() {
            return None;
        }
        if self.own_user_only && !local_peer::owner(peer, local).is_some_and(local_peer::is_us) {
            tracing::warn!(%peer, "refused: the peer is another user of this host (--anonymous serves everybody)");
            return None;
        }
        self.limit.acquire(peer)
    }

    fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Becomes true when connections are to end.
    pub fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    /// Refuses new connections and asks the existing ones to end.
    pub fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Closes, and waits until all connections have ended, for at most `limit`.
    pub fn shut_down(&self, limit: Duration) {
        self.close();
        self.limit.wait_until_empty(limit);
    }
}
