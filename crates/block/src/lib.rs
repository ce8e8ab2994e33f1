//! The block service: disks for Linux, qemu and every NBD or iSCSI client.
//!
//! - [`backend`]: what a disk is, and the disks there are: files, block devices, memory.
//! - [`layer`]: what is put on top of any of them: overlay, stripe, rate limit, delay, faults, log.
//! - [`cache`]: the NUMA-aware cache, a layer with blocks of its own.
//! - [`export`]: a disk under a name, as the protocols see it; from the command line's words.
//! - [`nbd`]: the NBD protocol.
//! - [`scsi`], [`iscsi`]: SCSI disks, and the protocol that carries their commands.
//!
//! Connections are `thruway-server`'s.
//!
//! Data goes from storage into the registered blocks that the network sends from; nothing copies it in
//! between, unless a layer keeps data of its own.

pub mod backend;
mod big_endian;
pub mod cache;
mod chunk_ranges;
pub mod export;
pub mod fence;
mod generations;
mod identity;
pub mod iscsi;
pub mod layer;
pub mod nbd;
pub mod open;
mod readahead;
pub mod scsi;
#[cfg(test)]
#[path = "../../../fuzz/seeds.rs"]
mod seeds;
mod sequence;
mod served;

pub use backend::{Backend, Geometry};
pub use export::Export;
pub use open::OpenError;
pub use served::Served;
