//! iWARP as a protocol core: RDMAP over DDP over MPA, without sockets, clocks or threads.
//!
//! A [`connection::Connection`] is one stream. Its driver hands it what TCP has received, places payload where it says, and sends what
//! it says; the core keeps the queues, the rules and the errors. `thruway-fabric` has a driver for Linux's TCP sockets.
//!
//! ```
//! use std::sync::Arc;
//! use thruway_iwarp::connection::{Connection, ConnectionConfig};
//! use thruway_iwarp::regions::RegionTable;
//! use thruway_iwarp::{IoVecs, mpa};
//! use thruway_memory::Buffer;
//! use thruway_rdma_types::{Access, Payload, QueuePairCaps, RemoteAddr, SendFlags, SendOp, SendRequest};
//!
//! // Two frames negotiate; over TCP they are the first bytes of the stream.
//! let preferences = mpa::Preferences::default();
//! let request = mpa::request(&preferences, b"hello");
//! let (reply, accepted) = mpa::accept(&preferences, &request, b"");
//! let agreed = mpa::conclude(&preferences, &reply).map_err(|code| code.to_string())?;
//!
//! let end = |agreement, initiator, table: &Arc<RegionTable>| {
//!     let (table, caps) = (Arc::clone(table), QueuePairCaps::default());
//!     Connection::new(ConnectionConfig { qp_num: 1, pd: 1, table, agreement, caps, initiator, shared: None, max_ulpdu: 1440 })
//! };
//! let (ours, theirs) = (Arc::new(RegionTable::new()), Arc::new(RegionTable::new()));
//! let (mut us, mut them) = (end(agreed, true, &ours), end(accepted, false, &theirs));
//!
//! let buffer = Arc::new(Buffer::new(4096)?);
//! let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
//! // SAFETY: the buffer is the owner of its own memory.
//! let region = unsafe { theirs.register(1, buffer.as_ptr(), 4096, 0, access, Arc::clone(&buffer) as _) }?;
//!
//! let op = SendOp::Write { remote: RemoteAddr { addr: 100, rkey: region.stag() }, immediate: None };
//! us.post_send(&SendRequest { wr_id: 7, op, payload: Payload::Inline(b"payload"), flags: SendFlags::SIGNALED })?;
//! // What the core wants sent, for one vectored system call; here the other end gets it.
//! let mut pieces = IoVecs::default();
//! while us.tx_fill() {
//!     us.tx_iovecs(&mut pieces);
//!     let mut sent = Vec::new();
//!     for piece in pieces.iter() {
//!         // SAFETY: the core vouches for its list.
//!         sent.extend(unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len) });
//!     }
//!     us.tx_advance(sent.len());
//!     them.rx_feed(&sent);
//! }
//! let mut placed = [0; 7];
//! buffer.read(100, &mut placed);
//! assert_eq!(&placed, b"payload");
//! assert_eq!(us.completions[0].1.wr_id, 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | layer |
//! |---|---|
//! | [`mpa`] | connection set-up frames and negotiation (RFC 5044 §7, RFC 6581) |
//! | `ddp` | segment headers (RFC 5041) |
//! | `rdmap` | message formats (RFC 5040, RFC 7306) |
//! | [`terminate`] | error codes and Terminate messages |
//! | `crc` | CRC32C |
//! | [`connection`] | queues and rules of one stream |
//! | `tx`, `rx` | segmentation and placement |
//! | [`regions`] | registered memory: from a peer's key to an address, and nowhere else |

pub mod connection;
mod crc;
mod ddp;
pub mod mpa;
mod rdmap;
pub mod regions;
mod rx;
mod stags;
pub mod terminate;
mod tx;
mod validity;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod simulation_hostile;
#[cfg(test)]
mod simulation_short;

#[doc(hidden)]
pub mod fuzzing;

/// A list of memory for one vectored system call.
#[derive(Default)]
pub struct IoVecs(Vec<libc::iovec>);

// SAFETY: a list of addresses; code that dereferences them ensures that they are valid.
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
