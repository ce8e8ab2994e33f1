//! Shares of files: NFS in user space.
//!
//! - [`file_system`]: what a file system is, and directories of this host.
//! - [`identity`]: identity of files and file systems, for handles, client state and attributes.
//! - [`share`]: file systems with names, file handles, and whom the users of clients count as; [`rules`] for clients.
//! - [`delegations`]: files that clients keep, and others wait for.
//! - [`acl`]: access control lists, of both kinds.
//! - [`v3`], [`nfsacl`], [`mount`], [`nlm`] and [`nsm`] (its locks), [`v4`]: the protocols.
//! - [`client`]: asking a server, to list and to measure.

#![forbid(unsafe_code)]

pub mod acl;
pub mod client;
pub mod delegations;
pub mod file_system;
#[doc(hidden)]
pub mod fuzzing;
pub mod identity;
pub mod mount;
pub mod nfsacl;
pub mod nlm;
pub mod nsm;
pub mod rules;
pub mod security;
pub mod share;
mod state;
mod users;
pub mod v3;
pub mod v4;
