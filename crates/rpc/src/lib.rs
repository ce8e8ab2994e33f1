//! ONC RPC (RFC 5531).
//!
//! - [`xdr`]: the encoding, in which a long item may stay where it is.
//! - [`message`]: calls and replies. [`gss`]: callers who prove who they are (RFC 2203). [`record`]: messages on a byte stream.
//! - [`rdma`]: the headers of RPC over RDMA (RFC 8166), and which way each part of a reply goes.
//! - [`server`]: connections over TCP and RDMA, datagrams, and the programs that are called.
//! - [`client`]: calling programs; [`rpcbind`]: finding them, and being found.

#![forbid(unsafe_code)]

pub mod client;
#[doc(hidden)]
pub mod fuzzing;
pub mod gss;
pub mod message;
pub mod rdma;
pub mod record;
pub mod rpcbind;
pub mod server;
pub mod xdr;
