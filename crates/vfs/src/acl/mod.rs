//! Access control lists: those of POSIX, which file systems of this host have and the kernel heeds, and those of NFS version 4.
//!
//! The two say different things. What a POSIX list says is expressed in version 4's words by [`Ace`]s that grant the same
//! (after draft-ietf-nfsv4-acl-mapping-05). What clients say in version 4's words is set where a POSIX list can say the same for everybody,
//! and else refused: [`Inexact`] says why. Only reading, writing and executing are mapped; of the finer rights of version 4, POSIX knows
//! none, and they are neither kept nor told.

mod nfs4;
mod posix;

pub use nfs4::{Ace, AceType, Inexact, Who, flag, from_aces, to_aces};
pub use posix::{Acl, BadAcl, PosixAcl, tag};

/// Entries of lists that are as much work as an operation.
pub const ENTRIES_OF_UNIT: usize = 16;
