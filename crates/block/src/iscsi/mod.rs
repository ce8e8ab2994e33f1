//! iSCSI (RFC 7143): SCSI over TCP.
//!
//! - [`pdu`], [`text`]: what goes over the wire. No I/O.
//! - [`login`], [`chap`]: negotiation and authentication, as state machines. No I/O.
//! - [`target`]: targets, their units, their sessions.
//! - `connection`: full feature phase: commands, data, task management.
//! - [`iser`]: the same over RDMA (RFC 7145).
//! - `server`: connections from their acceptance to their end.

pub mod chap;
mod connection;
#[doc(hidden)]
pub mod fuzzing;
pub mod iser;
pub mod login;
pub mod pdu;
mod server;
pub mod target;
mod task;
pub mod text;

pub use server::{Config, Server};
