//! RFTP: moves directory trees between hosts by RDMA writes into memory that the receiving end
//! grants, block by block, with credits.
//!
//! - [`wire`]: every message and header, pure codec.
//! - [`auth`]: keys, handshake, encryption of the control channel.
//! - [`link`]: the queue pairs of a session.
//! - [`source`], [`sink`]: the two ends.
//! - [`session`]: what they share.
//! - [`client`], [`daemon`]: who connects and who is connected to.

pub mod auth;
mod cached;
pub mod client;
pub mod daemon;
pub mod filter;
pub mod link;
pub mod session;
pub mod sink;
pub mod source;
pub mod wire;
mod xattr;

#[doc(hidden)]
pub mod fuzzing;
