//! NBD, the network block device protocol, as its specification (doc/proto.md of the NBD project) has it:
//! fixed newstyle negotiation, simple, structured and extended replies, block status.
//!
//! - [`wire`]: what goes over the wire. No I/O.
//! - [`handshake`]: negotiation, as a state machine. No I/O.
//! - `server`: connections.
//! - `transmission`: requests of one connection.

#[doc(hidden)]
pub mod fuzzing;
pub mod handshake;
mod server;
mod transmission;
pub mod wire;

pub use server::{Config, Server};
