//! ONC RPC (RFC 5531).
//!
//! - [`xdr`]: the encoding, in which a long item may stay where it is.
//! - [`message`]: calls and replies. [`record`]: messages on a byte stream.
//! - [`rdma`]: the headers of RPC over RDMA (RFC 8166), and which way each part of a reply goes.
//! - [`server`]: connections over TCP and RDMA, and the programs that are called.
//! - [`client`]: calling programs.

#![forbid(unsafe_code)]

pub mod client;
#[doc(hidden)]
pub mod fuzzing;
pub mod message;
pub mod rdma;
pub mod record;
pub mod server;
pub mod xdr;
