//! The relay: carries accelerated TCP connections between hosts.
//!
//! A process that runs under `thruway run` and has a connection to another host asks its host's relay for a segment of shared memory, and
//! so does the process at the other end. Each relay stands for the other process: it keeps its host's segment like the far one
//! ([`thruway_sockets::Outlet`], [`thruway_sockets::Inlet`]). Between two relays there is a *link*, one RDMA connection for all.
//!
//! ```text
//! process -- segment -- relay ===== link: messages on an RDMA connection ===== relay -- segment -- process
//!    \__________________________________ the TCP connection ___________________________________/
//! ```
//!
//! Keys and RDMA devices are the relay's alone: the programs have neither. Whether two ends belong together is decided by the addresses of
//! the TCP connection, of which each relay knows its own end from a process of its own user, and believes the other relay for the address
//! that the link has reached it by, and no other.
//!
//! `meet` is how two relays come to have a link, `calls` the threads in which they do, `link` what is sent on it, `local` what processes
//! say and are given, `carried` a connection, `relay` the loop over all of them.

mod calls;
mod carried;
mod closing;
mod ends;
#[doc(hidden)]
pub mod fuzzing;
mod link;
mod local;
mod meet;
mod relay;

pub use local::{About, find};
pub use meet::Peers;
pub use relay::{Config, Relay};

/// Why a relay cannot work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another one of this user's serves this port.
    #[error("another relay of this user serves port {0}")]
    Taken(u16),
    /// Another process listens at this address: another user's relay, most likely.
    #[error("cannot listen at {0}: the address is in use, by another user's relay or another program")]
    InUse(std::net::SocketAddr),
    /// Other hosts cannot reach it, or processes.
    #[error("{what}: {source}")]
    Io {
        /// What could not be done.
        what: String,
        /// Why.
        source: std::io::Error,
    },
    /// The RDMA device, or the link.
    #[error(transparent)]
    Stream(#[from] thruway_streams::Error),
    /// Keys.
    #[error(transparent)]
    Auth(#[from] thruway_auth::AuthError),
    /// The other relay.
    #[error("{0}")]
    Peer(String),
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        |source| Error::Io { what, source }
    }
}
