//! RDMA connections as a service sees them: messages both ways, and the peer's memory to read from and write to.
//!
//! A [`Channel`] is a connection, accepted or made, driven by a task of a reactor: bounded sends, RDMA Reads and Writes out of segments,
//! receives that are posted again as messages are taken.
//!
//! [`crate::Acceptor::listen_rdma`] accepts the connections.

pub mod channel;
pub mod exposure;

pub use channel::{Channel, Messages, Options};
pub use exposure::{Exposed, Exposures, Registration};
