//! User-space iWARP: RDMAP over DDP over MPA over TCP.
//!
//! | file | layer | I/O |
//! |---|---|---|
//! | `mpa` | connection set-up frames and negotiation (RFC 5044 §7, RFC 6581) | none |
//! | `ddp` | segment headers (RFC 5041) | none |
//! | `rdmap` | message formats (RFC 5040, RFC 7306) | none |
//! | `terminate` | error codes and Terminate messages | none |
//! | `crc` | CRC32C | none |
//! | `connection` | queues and rules of one stream | none |
//! | `tx`, `rx` | segmentation and placement | none |
//! | `endpoint` | one queue pair's socket | system calls |
//! | `listener` | listening and inbound set-up | system calls |
//! | `device` | epoll, timers, the tables | system calls |
//! | `doorbell` | who sleeps, and who has to be woken | none |
//! | `shared` | completion queues, shared receive queues | none |
//! | `socket` | socket options and vectored calls | system calls |

pub(crate) mod connection;
pub(crate) mod crc;
pub(crate) mod ddp;
mod device;
mod doorbell;
mod endpoint;
mod listener;
pub(crate) mod mpa;
pub(crate) mod rdmap;
pub(crate) mod regions;
mod rx;
mod shared;
mod socket;
mod stags;
pub(crate) mod terminate;
pub(crate) mod tx;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod simulation_hostile;

/// A list of memory for one vectored system call.
#[derive(Default)]
pub(crate) struct IoVecs(Vec<libc::iovec>);

// SAFETY: a list of addresses; whoever dereferences them upholds what that needs.
unsafe impl Send for IoVecs {}

impl std::ops::Deref for IoVecs {
    type Target = Vec<libc::iovec>;
    fn deref(&self) -> &Vec<libc::iovec> {
        &self.0
    }
}

impl std::ops::DerefMut for IoVecs {
    fn deref_mut(&mut self) -> &mut Vec<libc::iovec> {
        &mut self.0
    }
}

pub use device::Config;
pub use mpa::{Preferences, ReadyToReceive};

#[doc(hidden)]
pub mod fuzzing;
