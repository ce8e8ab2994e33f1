//! All integration tests of the crate, as one program: it is linked once.

mod bench;
mod block;
mod block_access;
mod block_durability;
mod config;
mod control;
mod copy;
mod cuts;
mod failing_disks;
mod faults;
mod many;
mod nfs;
mod nfs_conformance;
mod nfs_identity;
mod nfs_krb5;
mod nfs_remote;
mod nfs_state;
mod random_trees;
mod safety;
mod soak;
mod sockets;
mod support;
