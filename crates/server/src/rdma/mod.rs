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
