//! Addresses, listening, and connections that have been accepted.

use super::Plain;
use rustix::net::sockopt;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use thruway_engine::local_peer;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl Address {
    /// Only this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Tcp(addr) => addr.ip().to_canonical().is_loopback(),
            Address::Unix(_) => true,
        }
    }
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("the path is missing; write unix:PATH".into()),
            Some(path) => Ok(Address::Unix(path.into())),
            None => text.parse().map(Address::Tcp).map_err(|_| format!("'{text}' is neither ADDR:PORT nor unix:PATH")),
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

/// A listening socket, not yet at a reactor.
pub enum Listener {
    /// TCP.
    Tcp(std::net::TcpListener),
    /// In the file system; the name goes with it.
    Unix(std::os::unix::net::UnixListener, PathBuf),
}

impl Listener {
    /// Listens.
    ///
    /// # Errors
    /// A sentence that names the address.
    pub fn bind(address: &Address) -> Result<Listener, String> {
        let fail = |e: io::Error| format!("listening at {address}: {e}");
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

    /// The address, with the port the system chose.
    pub fn address(&self) -> Address {
        match self {
            Listener::Tcp(listener) => Address::Tcp(listener.local_addr().expect("a bound socket has an address")),
            Listener::Unix(_, path) => Address::Unix(path.clone()),
        }
    }

    /// Accepts for ever, on the reactor that runs this.
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

/// Whether the user that this process runs as, or root, is at the other end of a connection over the loopback interface.
pub(crate) fn is_ours(peer: SocketAddr, local: SocketAddr) -> bool {
    let ours = local_peer::owner(peer, local).is_some_and(local_peer::is_us);
    if !ours {
        tracing::warn!(%peer, "another user of this machine is sent away (--anonymous lets everybody in)");
    }
    ours
}

/// A failed accept is the peer's doing, or a shortage that passes.
async fn pause(error: &io::Error) {
    tracing::warn!(%error, "accepting a connection");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// Removes a socket that nobody listens at any more.
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

/// An accepted connection on its way to a reactor.
pub enum Socket {
    /// With the peer.
    Tcp(std::net::TcpStream, SocketAddr),
    /// From this machine.
    Unix(std::os::unix::net::UnixStream),
}

impl Socket {
    /// For logs.
    pub fn peer(&self) -> String {
        match self {
            Socket::Tcp(_, peer) => peer.to_string(),
            Socket::Unix(_) => "a local client".into(),
        }
    }

    /// Whether the user that this process runs as, or root, is at the other end of a connection over the loopback
    /// interface; of a socket in the file system its permissions have decided.
    pub fn is_ours(&self) -> bool {
        let Socket::Tcp(stream, peer) = self else { return true };
        stream.local_addr().is_ok_and(|local| is_ours(*peer, local))
    }

    /// The address that the peer connected to; empty for sockets in the file system.
    pub fn local(&self) -> String {
        match self {
            Socket::Tcp(stream, _) => stream.local_addr().map(|a| a.to_string()).unwrap_or_default(),
            Socket::Unix(_) => String::new(),
        }
    }

    /// Makes it this reactor's.
    ///
    /// # Errors
    /// If the system cannot watch it.
    pub fn open(self) -> io::Result<Plain> {
        match self {
            Socket::Tcp(stream, _) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                // A peer that has gone without a word is found out, in the end.
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
