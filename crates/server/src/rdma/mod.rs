//! RDMA connections as a service sees them: messages both ways, and the peer's memory to read from and write to.
//!
//! - [`slots`]: registered memory of a queue pair's messages, received and sent. It drives nothing: any thread that polls a
//!   completion queue can use it.
//! - [`channel`]: an accepted connection, driven by a task of a reactor: bounded sends, RDMA Reads and Writes out of segments,
//!   receives that are posted again as messages are taken.
//!
//! [`crate::Acceptor::listen_rdma`] accepts the connections.

pub mod channel;
pub mod slots;

pub use channel::{Channel, Messages, Options};
pub use slots::MessageSlots;

/// An address that RDMA connections cannot be accepted at.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for RDMA connections on {address}: {source}")]
#[non_exhaustive]
pub struct ListenError {
    /// The address.
    pub address: std::net::SocketAddr,
    /// The reason: there may be no RDMA device for it.
    pub source: thruway_fabric::Error,
}
