//! The verbs between processes of one host: the iWARP core over rings in shared memory instead of TCP.
//!
//! A connection is made over a Unix socket, by the same frames as over TCP ([MPA](https://www.rfc-editor.org/rfc/rfc6581)); the end that
//! accepts sends a memory file with two rings along. It takes no files itself, which needs Linux 6.16 (`SO_PASSRIGHTS`): a file whose
//! release takes long would hold up its receiver. From then on bytes go through the rings, copied in by one end and out by the
//! other, without a system call while the other end looks at its ring. An end that goes to sleep says so in the ring, and is then
//! called by a byte over the socket, which also tells either end when the other process has ended.
//!
//! A peer can write anything into the rings. It reaches as little by that as over TCP: everything is copied out before it is looked at,
//! and checked by the same code.
//!
//! # Addresses
//!
//! Listeners are named by the address and port at which a TCP listener would be, in the abstract namespace of Unix sockets, of which
//! each network namespace has its own. Every user may bind such a name, so a device connects only to listeners of its own user and of
//! root ([`Config::any_user`]).

mod channel;
mod ring;

pub(crate) use channel::{Channel, Listener, Socket, listen, start_connect};
pub(crate) use ring::Glance;

use crate::{Device, Result};

/// How a shared-memory device behaves.
#[derive(Debug, Clone)]
pub struct Config {
    /// Bytes of each direction's ring: a power of two from 4 KiB to 4 MiB. The end that accepts decides.
    pub ring: usize,
    /// Connect to listeners of every user, not only of this process's and root.
    pub any_user: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config { ring: 1 << 20, any_user: false }
    }
}

impl Config {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) if the ring has no legal size, [`Error::Io`](crate::Error::Io) if the kernel is older than
    /// Linux 6.16, or has no descriptors left.
    pub fn open(&self) -> Result<Device> {
        if !self.ring.is_power_of_two() || !(ring::RING_MIN..=ring::RING_MAX).contains(&self.ring) {
            let what = "bytes of a ring, a power of two and at least 4096";
            return Err(crate::Error::Limit { what, got: self.ring as u64, limit: ring::RING_MAX as u64 });
        }
        channel::check().map_err(|error| crate::Error::io("opening a device for shared memory", error))?;
        crate::iwarp::open_shm(self.clone())
    }
}

#[cfg(test)]
mod tests;
