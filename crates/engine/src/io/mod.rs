//! Storage: reads, writes, syncs and allocations over owned memory.
//!
//! A [`Request`] names a file, an offset, an [`Operation`] and its memory, a list of [segments](crate::Segment) that the request owns until it is over.
//! Two drivers carry requests out. Both use io_uring, and system calls on threads where that is forbidden (containers,
//! hardened systems), for files with which it is not to be trusted, and for what it cannot do:
//!
//! - [`Storage`]: a thread for services that are threads; completions are closures.
//! - [`Requests`]: the ring of a [reactor](crate::reactor); completions are futures.
//!
//! What both have in common is in `core.rs`: places of requests, transfers that the kernel does in part, registered memory.
//! What need not wait is tried first, without a ring: [`OpenFile::try_read`], [`OpenFile::try_write`].

mod buffers;
mod core;
mod file;
mod request;
mod storage;
mod tasks;
mod write_throttle;

pub use self::file::OpenFile;
pub use self::request::{Operation, Outcome, Request, SegmentList};
pub use self::storage::Storage;
pub(crate) use self::tasks::Ring;
pub use self::tasks::{Requests, ring};

/// Says, once, that there is no io_uring here and why.
fn without_io_uring(error: &std::io::Error) {
    static WARNED: std::sync::Once = std::sync::Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            %error,
            "no io_uring (a container's seccomp profile, or sysctl kernel.io_uring_disabled): storage works without, slower"
        );
    });
}
