//! What the library counts, in a file that the processes which use it share with who has started them.

use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        /// What is counted. The order is that of the file, which a program and the library in it share: new ones come last.
        #[repr(C)]
        #[derive(Debug)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)*
        }

        impl Counters {
            /// All zero.
            pub const fn new() -> Counters {
                Counters { $($name: AtomicU64::new(0),)* }
            }

            /// Names and values.
            pub fn list(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Processes that have begun to use the library.
    processes,
    /// Connections that were made or accepted by calls that the library saw.
    connections,
    /// Ends of connections that went on through shared memory.
    accelerated,
    /// Of these, the ends that have had the memory of an earlier connection between the same two processes.
    reused,
    /// Ends of connections that went on through a relay, to another host.
    relayed,
    /// Ends of accelerated connections that have gone back to TCP for good.
    demoted,
    /// Ends that did not last long enough to be worth it.
    short,
    /// Ends whose peer is not on this host.
    remote,
    /// Ends whose peer's host has no relay that knows of it.
    relay_not_found,
    /// Ends whose peer, on this host, has not been found on the board.
    peer_not_found,
    /// Ends for which a rule has said TCP.
    by_rule,
    /// Ends that other processes hold, or may.
    shared_descriptor,
    /// Ends that have options or uses which only the kernel's TCP has.
    unsupported_use,
    /// Ends for which there was no memory within the limit.
    no_memory,
    /// Ends at which something has failed, or whose peer was not who it said.
    failed,
    /// Bytes sent through rings.
    ring_bytes,
    /// Bytes sent by TCP on accelerated connections, because a ring was full.
    overflow_bytes,
    /// Calls that sent through a ring alone.
    ring_sends,
    /// Calls that received from a ring.
    ring_receives,
    /// Bytes of TCP sent only to wake a peer.
    doorbells,
    /// Threads that have slept in the kernel for an accelerated connection.
    sleeps,
    /// Waits that ended while the thread looked again and again.
    spins_won,
    /// Waits in which that was in vain.
    spins_lost,
    /// Times that this host's relay has woken what sleeps on a connection to another host, without a doorbell.
    woken,
    /// Lines that `--explain` has no place for.
    unexplained,
    /// Ends in programs that use io_uring.
    io_uring,
    /// Ends with small messages that needed a doorbell each.
    doorbells_only,
    /// Ends that the program has registered with `EPOLLONESHOT`.
    one_shot,
    /// Sleeps that ended by a second look at a connection, because no doorbell had come for its bytes.
    missed,
    /// Second doorbells, for bytes that lay unread in the ring from one look to the next.
    repeated,
}

/// Most bytes of the file that the library writes for `--explain`.
pub const EXPLAINED_MAX: u64 = 8 << 20;

impl Default for Counters {
    fn default() -> Counters {
        Counters::new()
    }
}

impl Counters {
    /// Bytes of the file.
    pub const FILE_LEN: u64 = 4096;

    /// Maps counters from a file of [`Counters::FILE_LEN`] bytes; they stay mapped.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is shorter; those of `mmap(2)`.
    pub fn map(file: impl AsFd) -> io::Result<&'static Counters> {
        if (rustix::fs::fstat(&file)?.st_size as u64) < Counters::FILE_LEN {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let len = Counters::FILE_LEN as usize;
        // SAFETY: a new mapping, of whose addresses nothing knows yet.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED, file, 0) }?;
        // SAFETY: long enough, page-aligned, stays mapped, and has nothing but atomics.
        Ok(unsafe { &*base.cast() })
    }
}

const _: () = assert!(size_of::<Counters>() as u64 <= Counters::FILE_LEN);
