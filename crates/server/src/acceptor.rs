//! Accepts the connections of one protocol and hands each to a reactor.

use crate::caller;
use crate::connection_limit::{ConnectionLimit, Permit};
use crate::listener::{Address, ListenError, Listener, Socket};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_engine::limits;
use thruway_engine::reactor::LoadBalancer;
use thruway_fabric::{ConnectionEvent, ConnectionRequest, Device, ListenOptions, Provider};
use thruway_metrics::{Description, RegisterError, Registered, Registry};
use thruway_tcp::Origin;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

/// Kind of connection, which determines its number of descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionKind {
    /// TCP or a Unix socket.
    Plain,
    /// The same with TLS.
    Tls,
    /// RDMA.
    Rdma,
}

impl ConnectionKind {
    /// The kind with TLS if there is a configuration of it.
    pub fn with_tls<T>(tls: Option<&T>) -> ConnectionKind {
        if tls.is_some() { ConnectionKind::Tls } else { ConnectionKind::Plain }
    }

    /// Maximum connections of one listener under the limit on open files.
    pub fn connections_max(self) -> usize {
        limits::share_of_listener(match self {
            ConnectionKind::Plain => 1,
            ConnectionKind::Tls => 2,
            // A connection has up to six descriptors. Connections in set-up use a quarter of the share.
            ConnectionKind::Rdma => 8,
        })
    }
}

/// Metric of all acceptors.
const CONNECTIONS: Description =
    Description { name: "thruway_connections", help: "Connections that are being served, by protocol." };

/// Decides which connections of a protocol are served, and ends them in an orderly way.
pub struct Acceptor {
    limit: Arc<ConnectionLimit>,
    own_user_only: bool,
    closing: watch::Sender<bool>,
}

impl Acceptor {
    /// Serves at most `connections_max` concurrent connections, and at most [`ConnectionKind::connections_max`]. With `own_user_only`,
    /// connections over the loopback interface are served only if they come from root or from the user that this process runs as.
    pub fn new(
        protocol: &'static str,
        kind: ConnectionKind,
        connections_max: usize,
        own_user_only: bool,
    ) -> Arc<Acceptor> {
        Arc::new(Acceptor {
            limit: ConnectionLimit::new(protocol, connections_max.min(kind.connections_max())),
            own_user_only,
            closing: watch::Sender::new(false),
        })
    }

    /// Listens on these addresses. `serve` runs each accepted connection on the reactor with the fewest connections, on behalf of the
    /// connection's host.
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
            let (acceptor, load_balancer, serve) = (Arc::clone(self), reactors.load_balancer(), serve.clone());
            reactors.handles()[0].spawn(move || async move {
                let result = listener
                    .accept(|socket| {
                        let Some(permit) = acceptor.admit_socket(&socket) else { return };
                        let (serve, host) = (serve.clone(), socket.host());
                        permit.serve(&load_balancer, move |permit| caller::on_behalf_of(host, serve(socket, permit)));
                    })
                    .await;
                tracing::error!(?result, protocol = acceptor.limit.protocol(), "no longer accepting connections");
            });
        }
        Ok(bound)
    }

    /// Listens for RDMA connections on these addresses. `serve` runs each connection request that is admitted, on the reactor
    /// with the fewest connections; others are rejected. Returns the addresses, with the ports that the kernel chose.
    ///
    /// # Errors
    /// For the first address that cannot be listened on: there may be no RDMA device for it.
    pub fn listen_rdma<S, F>(
        self: &Arc<Self>,
        addresses: &[SocketAddr],
        provider: &Provider,
        reactors: &Reactors,
        serve: S,
    ) -> thruway_fabric::Result<Vec<Address>>
    where
        S: Fn(ConnectionRequest, Arc<Permit>) -> F + Clone + Send + 'static,
        F: Future<Output = io::Result<()>> + 'static,
    {
        let mut bound = Vec::new();
        for &address in addresses {
            let device = provider.open()?;
            // Connections in set-up must leave descriptors for those of other listeners.
            let max_pending = limits::share_of_listener(4 * addresses.len() as u64);
            let max_pending = max_pending.clamp(16, ListenOptions::default().max_pending);
            let listener = device.listen(address, &ListenOptions { max_pending, ..ListenOptions::default() })?;
            let local = listener.local_addr();
            bound.push(Address::Tcp(local));
            let (acceptor, load_balancer, serve) = (Arc::clone(self), reactors.load_balancer(), serve.clone());
            reactors.handles()[0].spawn(move || async move {
                let result = acceptor.accept_rdma(&device, &load_balancer, serve).await;
                drop(listener);
                tracing::error!(?result, protocol = acceptor.limit.protocol(), "no longer accepting connections");
            });
        }
        Ok(bound)
    }

    async fn accept_rdma<S, F>(&self, device: &Device, reactors: &LoadBalancer, serve: S) -> io::Result<Infallible>
    where
        S: Fn(ConnectionRequest, Arc<Permit>) -> F + Clone + Send + 'static,
        F: Future<Output = io::Result<()>> + 'static,
    {
        let fd = device.wait_fd().try_clone_to_owned()?;
        // SAFETY: an owned descriptor stays open, and the same, until it is dropped with the registration.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        loop {
            while let Some(event) = device.poll_event() {
                let ConnectionEvent::Request(request) = event else { continue };
                let Some(permit) = self.admit(request.peer(), request.origin()) else {
                    request.reject(&[]);
                    continue;
                };
                let (serve, host) = (serve.clone(), Origin::of_host(request.peer().ip()));
                permit.serve(reactors, move |permit| caller::on_behalf_of(host, serve(request, permit)));
            }
            match device.arm() {
                true => fd.readable().await?.clear_ready(),
                false => tokio::task::yield_now().await,
            }
        }
    }

    fn admit_socket(&self, socket: &Socket) -> Option<Permit> {
        match socket {
            Socket::Tcp(stream, peer) => self.admit(*peer, Origin::of(*peer, stream.local_addr().ok()?)),
            // The permissions of the socket's file have decided who may connect.
            Socket::Unix(_) if self.is_closing() => None,
            Socket::Unix(_) => self.limit.acquire(socket.peer(), socket.origin()),
        }
    }

    /// A permit for a connection of this peer; `None` if it is not to be served.
    pub fn admit(&self, peer: SocketAddr, origin: Origin) -> Option<Permit> {
        if self.is_closing() {
            return None;
        }
        if self.own_user_only && !origin.is_own_user() {
            let why = match origin {
                Origin::UnknownUser => {
                    "it cannot be found out which user of this host the peer is: it has gone, or this process may open no more files"
                }
                _ => "the peer is another user of this host (--anonymous serves everybody)",
            };
            tracing::warn!(%peer, "refused: {why}");
            return None;
        }
        self.limit.acquire(peer, origin)
    }

    fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Connections that are being served.
    pub fn connections(&self) -> usize {
        self.limit.count()
    }

    /// Registers the number of connections, by the name of the protocol.
    ///
    /// # Errors
    /// [`RegisterError`], if another listener of the protocol is registered.
    pub fn register(&self, registry: &Registry) -> Result<Registered, RegisterError> {
        let limit = Arc::clone(&self.limit);
        let read = move || i64::try_from(limit.count()).unwrap_or(i64::MAX);
        registry.gauge_of(CONNECTIONS, &[("protocol", self.limit.protocol())], read)
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
