//! How a daemon is reached, and by what.

use crate::{directories, keys};
use clap::ValueEnum;
use std::io::Read;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;
use thruway_fabric::{Provider as Fabric, iwarp, shm, verbs};
use thruway_transfer::auth::Credentials;
use thruway_transfer::client::Remote;
use thruway_transfer::link::Transport;

/// How data is carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Provider {
    /// Shared memory to a daemon of this host's, if it is root's or your own; iwarp to others
    Auto,
    /// RDMA in user space over TCP
    Iwarp,
    /// Shared memory
    Shm,
    /// An RDMA device (a daemon started with --provider verbs)
    Verbs,
    /// Plain TCP with sendfile and splice
    Tcp,
}

impl Provider {
    /// # Errors
    /// If this provider needs a daemon and the copy has none.
    pub(crate) fn check(self, has_daemon: bool) -> Result<(), String> {
        match self {
            Provider::Verbs if !has_daemon => Err("--provider verbs needs a daemon: tw://host/export/path".into()),
            Provider::Shm if !has_daemon => Err("--provider shm needs a daemon: tw://host/export/path".into()),
            _ => Ok(()),
        }
    }

    /// Sets the transport of a remote.
    pub(crate) fn apply_to(self, remote: &mut Remote) -> Result<(), String> {
        remote.transport = if self == Provider::Tcp { Transport::Tcp } else { Transport::Rdma };
        self.check(matches!(remote.credentials, Credentials::Keys(_)))?;
        match self {
            Provider::Verbs => {
                remote.fabric = verbs::Config::towards(remote.addr).map_err(|e| e.to_string())?.into();
            }
            Provider::Shm => remote.fabric = shm::Config::default().into(),
            Provider::Auto => {
                if let Fabric::Iwarp(config) = &mut remote.fabric {
                    config.shm = Some(shm::Config::default());
                }
            }
            Provider::Iwarp | Provider::Tcp => {}
        }
        Ok(())
    }
}

/// The daemon at `host:port`, called with the user's key or the one named.
pub(crate) fn daemon(host: &str, port: u16, key: Option<&PathBuf>) -> Result<Remote, String> {
    let label = format!("{host}:{port}");
    let mut addrs = (host, port).to_socket_addrs().map_err(|e| format!("{label}: {e}"))?;
    let addr = addrs.next().ok_or_else(|| format!("{label}: no address"))?;
    let others = addrs.collect();
    let known_hosts = Some(directories::config().join("known_hosts"));
    let credentials = Credentials::Keys(keys::identity(key)?);
    Ok(Remote {
        addr,
        others,
        label,
        credentials,
        known_hosts,
        fabric: iwarp::Config::default().into(),
        transport: Transport::Rdma,
    })
}

/// Hint for errors of a connection to an address where no daemon listens, or a server of another protocol; `None` for other errors.
pub(crate) fn hint_of_daemon(addr: SocketAddr, why: &str) -> Option<String> {
    if ["MPA: invalid request or reply frame", "a control frame that is too long"].iter().any(|w| why.contains(w)) {
        let port = addr.port();
        let serves =
            other_protocol(addr).map_or("may serve another protocol".into(), |other| format!("serves {other}"));
        return Some(format!(
            "port {port} {serves}; the port of a daemon follows 'listening on' in the output of 'thruway serve'"
        ));
    }
    ["refused", "cannot connect"]
        .iter()
        .any(|word| why.contains(word))
        .then(|| "is 'thruway serve' running there?".into())
}

/// Protocols in which the server sends first, with its first bytes.
const GREETINGS: [(&[u8], &str); 3] = [(b"NBDMAGIC", "NBD"), (b"SSH-", "ssh"), (b"220", "mail or FTP")];
/// Longest wait for a connection, and for a greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);

/// Protocol of the server at an address, by its greeting.
fn other_protocol(addr: SocketAddr) -> Option<&'static str> {
    let mut stream = TcpStream::connect_timeout(&addr, GREETING_TIMEOUT).ok()?;
    stream.set_read_timeout(Some(GREETING_TIMEOUT)).ok()?;
    let mut greeting = [0; 8];
    let read = stream.read(&mut greeting).ok()?;
    GREETINGS.iter().find(|(start, _)| greeting[..read].starts_with(start)).map(|(_, name)| *name)
}
