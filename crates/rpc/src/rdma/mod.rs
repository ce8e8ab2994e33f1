//! RPC over RDMA, version 1 (RFC 8166).

pub mod header;
pub mod reply;
