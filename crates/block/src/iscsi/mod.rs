//! iSCSI (RFC 7143): SCSI over TCP.
//!
//! - [`pdu`], [`text`]: what goes over the wire. No I/O.
//! - [`login`], [`chap`]: negotiation and authentication, as state machines. No I/O.
//! - [`target`]: targets, their units, their sessions.
//! - `connection`: full feature phase: commands, data, task management.
//! - `server`: connections from their acceptance to their end.

pub mod chap;
mod connection;
#[doc(hidden)]
pub mod fuzzing;
pub mod login;
pub mod pdu;
mod server;
pub mod target;
mod task;
pub mod text;

pub use server::{Config, Server};
