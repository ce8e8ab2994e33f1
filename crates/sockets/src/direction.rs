//! One direction of an accelerated connection: which bytes go by TCP, which through the ring, and what wakes the reader.
//!
//! The writer alone decides. It publishes each run of TCP bytes: behind which byte of the ring it comes, and where it begins and ends
//! in the TCP connection. While bytes go through the ring, the only bytes on the TCP connection are *doorbells*: one byte with no
//! meaning, sent when the reader has asked for one because it is about to sleep. The reader discards them. It never takes more bytes
//! from TCP than it knows the meaning of: it asks the kernel how many there are, and only then whether the run has ended.
//!
//! ```text
//! stream:  | TCP bytes   | ring bytes     | TCP bytes          | ring ...
//! TCP:     | 0 ..... end0|  d d d         | start1 ....... end1|  d
//! ```
//!
//! The reader can close the ring at any time ([`Reader::close_ring`]): it sets a bit in the very word by which the writer publishes and
//! changes ways, so both ends agree on the last byte. The writer sends again, by TCP, what the reader has not taken from the ring.
//! Where TCP has later bytes already, the reader takes the whole unread stream, and the writer sends that again ([`Return`]).

mod reader;
mod returning;
mod writer;

pub use reader::{Found, Reader};
pub use returning::{Return, Step};
pub use writer::{SentAgain, Writer};

use crate::iovecs::Pieces;
use std::io;

/// How far into the bytes of a TCP connection [`Tcp::peek`] can look.
pub const PEEK_MAX: usize = 4096;

/// The TCP connection below, as one direction of it needs it. Nothing here waits.
pub trait Tcp {
    /// Bytes ever written to it from this end.
    ///
    /// # Errors
    /// Those of `getsockopt(2)`.
    fn written(&self) -> io::Result<u64>;

    /// Bytes that can be read from it now.
    ///
    /// # Errors
    /// Those of `ioctl(2)`.
    fn available(&self) -> io::Result<usize>;

    /// True if the next byte is urgent: the mark, at which a call that has bytes from before it ends.
    fn is_at_urgent_mark(&self) -> bool {
        false
    }

    /// Number of bytes received so far, with urgent bytes, which reading skips.
    ///
    /// # Errors
    /// Those of `getsockopt(2)`.
    fn received(&self) -> io::Result<u64>;

    /// Reads up to `max` bytes, of which there are as many.
    ///
    /// # Errors
    /// Those of `recvmsg(2)`.
    fn read(&self, to: &Pieces<'_>, max: usize) -> io::Result<usize>;

    /// Reads up to `max` bytes that are there behind the first `skipped`, at most [`PEEK_MAX`], and leaves all there.
    ///
    /// # Errors
    /// Those of `recvmsg(2)`.
    fn peek(&self, to: &Pieces<'_>, max: usize, skipped: usize) -> io::Result<usize>;

    /// Discards up to `max` bytes, of which there are as many.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    fn skip(&self, max: usize) -> io::Result<usize>;

    /// Sends bytes.
    ///
    /// # Errors
    /// Those of `send(2)`.
    ///
    /// # Safety
    /// There must be `len` readable bytes.
    unsafe fn send(&self, from: *const u8, len: usize) -> io::Result<usize>;

    /// Has the kernel keep as many unsent bytes as it permits. Its limit before, for [`Tcp::limit_unsent`]; `None` if that stays as it is.
    fn raise_limit_of_unsent(&self) -> Option<u32> {
        None
    }

    /// Sets the limit of unsent bytes that [`Tcp::raise_limit_of_unsent`] returned.
    fn limit_unsent(&self, limit: u32) {
        let _ = limit;
    }

    /// Has bytes that the kernel holds back for more to come go now: none may come for long.
    fn flush(&self);

    /// Sends one byte. False if that fails: the connection is at its end, or is full of bytes that wake the peer.
    fn doorbell(&self) -> bool;

    /// Whether the peer has ended its direction, for whatever reason: nothing comes any more that has not been sent.
    fn is_at_end(&self) -> bool {
        false
    }

    /// Takes back what the relay has woken this end by ([`WakeBy::Waker`](crate::WakeBy::Waker)): whatever waits for that does so again. The
    /// number of times.
    fn quiet_waker(&self) -> u32 {
        0
    }

    /// Wakes this host's relay. Needed where the other end is on another host only. False if there is no relay any more.
    fn wake_relay(&self) -> bool {
        true
    }
}

/// A long call moves a ring's bytes in so many pieces, so that both ends are at work at a time.
const PIECES: usize = 8;

/// The peer has written what cannot be. The connection is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

impl From<Broken> for io::Error {
    fn from(_: Broken) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, "the peer broke the ring in shared memory")
    }
}

/// Keeps stores in program order: another process reads them if this one is killed between two of them.
fn in_order<T>(value: &mut T) {
    std::hint::black_box(value);
}

#[cfg(test)]
pub(crate) mod tests;
