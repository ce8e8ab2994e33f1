//! The block service: disks for Linux, qemu and every NBD or iSCSI client.
//!
//! ```no_run
//! use std::sync::Arc;
//! use thruway_block::{export::Spec, nbd};
//! use thruway_engine::Reactors;
//!
//! let reactors = Reactors::start(None)?;
//! let disk = Spec::parse("disk=/srv/disk.img,cache=1G")?.open(Some(&reactors))?;
//! let config = nbd::Config {
//!     listen: vec!["127.0.0.1:10809".parse()?],
//!     exports: vec![Arc::new(disk)].into(),
//!     tls: None,
//!     own_user_only: true,
//!     connections_max: 64,
//! };
//! let server = nbd::Server::start(config, &reactors)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/custom_layer.rs` is a layer of another program's own.
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
pub mod source;

pub use backend::{Backend, Geometry};
pub use export::Export;
pub use open::OpenError;
pub use served::Served;
