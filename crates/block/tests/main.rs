//! Integration tests of the crate as one program, which is linked once. `without_memory` is separate: it has its own allocator.

mod cache;
mod cache_nodes;
#[path = "../../thruway/tests/support/nbd.rs"]
mod client;
mod connections;
mod durability;
mod file;
mod flood;
#[path = "../../server/tests/support/flood.rs"]
mod flood_peers;
#[path = "support/iscsi.rs"]
mod initiator;
#[path = "support/iser.rs"]
mod iser;
#[path = "support/nbd_server.rs"]
mod nbd_server;
mod support;
