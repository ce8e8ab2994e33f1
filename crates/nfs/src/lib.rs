//! Shares of files: NFS in user space.
//!
//! File systems are those of [`thruway_vfs`].
//!
//! - [`share`]: file systems with names, file handles, and whom the users of clients count as; [`rules`] for clients.
//! - [`delegations`]: files that clients keep, and others wait for.
//! - [`v3`], [`nfsacl`], [`mount`], [`nlm`] and [`nsm`] (its locks), [`v4`]: the protocols.
//! - [`client`]: asking a server, to list and to measure.

#![forbid(unsafe_code)]

pub mod client;
pub mod delegations;
#[doc(hidden)]
pub mod fuzzing;
mod guards;
pub mod mount;
pub mod nfsacl;
pub mod nlm;
pub mod nsm;
pub mod rules;
pub mod security;
pub mod share;
mod squash;
mod state;
mod status;
mod users;
pub mod v3;
pub mod v4;
