//! Shared infrastructure of services that work on files.
//!
//! - [`beneath`]: paths resolved beneath a root, by `openat2`.
//! - [`identity`]: file identity: inode number and time of birth. [`handle`]: names that outlive renames and restarts.
//! - [`credentials`]: acting as the user of a client.
//! - [`listing`]: the names in a directory. [`walk`], [`remove`]: trees of any depth, with few descriptors.
//! - [`writable`]: directories that are made writable for a time.
//! - [`sparse`]: the data and the holes of a file. [`spool`]: bytes in memory or a temporary file.
//! - [`lease`]: hearing of it before another program changes a file.
//! - [`disk_lock`]: files that programs use as disks.
//! - [`durable`]: atomic, durable replacement of small files.
//! - [`volumes`]: the file systems that a session writes to, synced so that no write-back error is missed.
//! - [`superblock`]: identity of file systems, while they are mounted and after that.
//! - [`xattr`]: extended attributes. [`acl`]: the access control lists in them.

#![deny(unsafe_code)]

pub mod acl;
pub mod beneath;
pub mod credentials;
pub mod disk_lock;
pub mod durable;
pub mod handle;
pub mod identity;
pub mod lease;
pub mod listing;
pub mod remove;
pub mod share_storage;
pub mod sparse;
pub mod spool;
pub mod superblock;
pub mod volumes;
pub mod walk;
pub mod writable;
pub mod xattr;

pub use credentials::Credentials;
pub use identity::Identity;
pub use superblock::Superblock;
pub use volumes::Volumes;
