//! How a daemon is reached, and by what.

use crate::keys;
use clap::ValueEnum;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
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
    // A daemon on this machine may have a new key every time it is started.
    let known_hosts = (!addr.ip().to_canonical().is_loopback()).then(|| keys::config_dir().join("known_hosts"));
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
