//! Addresses, listening sockets, and accepted connections.

use crate::Plain;
use rustix::net::sockopt;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use thruway_tcp::Origin;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// An address to listen on: `ADDR:PORT`, or `unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix socket with this name in the file system.
    Unix(PathBuf),
}

impl Address {
    /// Whether only processes of this host can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Tcp(addr) => addr.ip().to_canonical().is_loopback(),
            Address::Unix(_) => true,
        }
    }

    /// The TCP port.
    pub fn port(&self) -> Option<u16> {
        match self {
            Address::Tcp(addr) => Some(addr.port()),
            Address::Unix(_) => None,
        }
    }
}

/// A text that is not an [`Address`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid address '{0}' (expected ADDR:PORT or unix:PATH)")]
pub struct AddressError(String);

impl std::str::FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        let invalid = || AddressError(text.to_owned());
        match text.strip_prefix("unix:") {
            Some("") => Err(invalid()),
            Some(path) => Ok(Address::Unix(path.into())),
            None => text.parse().map(Address::Tcp).map_err(|_| invalid()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(addr) => addr.fmt(f),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}")]
#[non_exhaustive]
pub struct ListenError {
    /// The address.
    pub address: Address,
    /// The reason.
    pub source: io::Error,
}

/// A listening socket, not yet registered with a reactor.
pub enum Listener {
    /// TCP.
    Tcp(std::net::TcpListener),
    /// A Unix socket; its name is removed when it is closed.
    Unix(std::os::unix::net::UnixListener, PathBuf),
}

impl Listener {
    /// Starts to listen on an address. A Unix socket that no process listens on any more is replaced.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn bind(address: &Address) -> Result<Listener, ListenError> {
        let fail = |source| ListenError { address: address.clone(), source };
        match address {
            Address::Tcp(addr) => {
                let listener = std::net::TcpListener::bind(addr).map_err(fail)?;
                listener.set_nonblocking(true).map_err(fail)?;
                Ok(Listener::Tcp(listener))
            }
            Address::Unix(path) => {
                remove_dead(path);
                let listener = std::os::unix::net::UnixListener::bind(path).map_err(fail)?;
                listener.set_nonblocking(true).map_err(fail)?;
                Ok(Listener::Unix(listener, path.clone()))
            }
        }
    }

    /// The address, with the port that the kernel chose.
    pub fn address(&self) -> Address {
        match self {
            Listener::Tcp(listener) => Address::Tcp(listener.local_addr().expect("a bound socket has an address")),
            Listener::Unix(_, path) => Address::Unix(path.clone()),
        }
    }

    /// Accepts connections until an error that does not pass, on the calling reactor.
    ///
    /// # Errors
    /// Those of registering a socket with the reactor; failing to accept a connection is logged.
    pub async fn accept(self, mut each: impl FnMut(Socket)) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => {
                let listener = TcpListener::from_std(listener)?;
                loop {
                    match listener.accept().await {
                        Ok((stream, peer)) => each(Socket::Tcp(stream.into_std()?, peer)),
                        Err(error) => pause(&error).await,
                    }
                }
            }
            Listener::Unix(listener, path) => {
                let _name = Name(path);
                let listener = UnixListener::from_std(listener)?;
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => each(Socket::Unix(stream.into_std()?)),
                        Err(error) => pause(&error).await,
                    }
                }
            }
        }
    }
}

/// `accept` fails because of the peer, or for lack of resources that may be there again later.
async fn pause(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// Removes a Unix socket that no process listens on any more.
fn remove_dead(path: &std::path::Path) {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
        let _ = std::fs::remove_file(path);
    }
}

struct Name(PathBuf);

impl Drop for Name {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An accepted connection, not yet registered with a reactor.
pub enum Socket {
    /// TCP, and the peer's address.
    Tcp(std::net::TcpStream, SocketAddr),
    /// A Unix socket.
    Unix(std::os::unix::net::UnixStream),
}

impl Socket {
    /// The peer's address, for logs.
    pub fn peer(&self) -> String {
        match self {
            Socket::Tcp(_, peer) => peer.to_string(),
            Socket::Unix(_) => "unix".into(),
        }
    }

    /// Where it comes from.
    pub fn origin(&self) -> Origin {
        match self {
            Socket::Tcp(stream, peer) => Origin::of_stream(stream, *peer),
            Socket::Unix(stream) => sockopt::socket_peercred(stream)
                .map_or(Origin::UnknownUser, |credentials| Origin::user(credentials.uid.as_raw())),
        }
    }

    /// The peer's host by its address; [`Origin::UnknownUser`] for Unix sockets.
    pub fn host(&self) -> Origin {
        match self {
            Socket::Tcp(_, peer) => Origin::of_host(peer.ip()),
            Socket::Unix(_) => Origin::UnknownUser,
        }
    }

    /// The address that the peer connected to; empty for Unix sockets.
    pub fn local(&self) -> String {
        match self {
            Socket::Tcp(stream, _) => stream.local_addr().map(|a| a.to_string()).unwrap_or_default(),
            Socket::Unix(_) => String::new(),
        }
    }

    /// Registers it with the calling reactor.
    ///
    /// # Errors
    /// The system's.
    pub fn open(self) -> io::Result<Plain> {
        match self {
            Socket::Tcp(stream, _) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                // Detects a peer whose host is gone.
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, Duration::from_secs(60))?;
                Ok(Plain::Tcp(TcpStream::from_std(stream)?))
            }
            Socket::Unix(stream) => {
                stream.set_nonblocking(true)?;
                Ok(Plain::Unix(UnixStream::from_std(stream)?))
            }
        }
    }
}
