//! What services that work on files stand on.
//!
//! - [`beneath`]: paths that never lead out of a root, by `openat2`.
//! - [`identity`]: tells a file from every other that had, has or will have its name or its inode number.
//! - [`sparse`]: the data and the holes of a file.
//! - [`durable`]: files that are replaced as a whole, and survive a loss of power when that has returned.
//! - [`volumes`]: the file systems that a session writes to, synced so that no error is told to somebody else.
//! - [`xattr`]: extended attributes and access control lists.

#![forbid(unsafe_code)]

pub mod beneath;
pub mod durable;
pub mod identity;
pub mod sparse;
pub mod volumes;
pub mod xattr;

pub use identity::Identity;
pub use volumes::Volumes;
