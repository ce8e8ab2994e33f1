//! Return of an unread stream to its writer.
//!
//! After [`Reader::close_ring`], the ring may hold bytes that precede bytes on the TCP connection. Another program that reads the TCP
//! connection would miss them. So the reader takes all unread bytes, and copies them back to the ring's memory, from where the writer
//! sends them again by TCP. The writer sends nothing else until then.

use super::{Broken, Reader, Tcp};
use crate::iovecs::Pieces;
use crate::segment::{POSITION, RETURNED_ALL, RETURNS, STOPPED, Segment};
use std::io;
use std::sync::atomic::Ordering;
use thruway_memory::shared;

/// A reader with this many bytes takes no more. The kernel's buffers of a connection and a ring hold fewer.
const MAX: usize = 32 << 20;
/// Most reads of one step, so that a writer of small pieces does not keep the caller.
const READS_MAX: usize = 64;
/// Most bytes of one read.
const PIECE: usize = 256 << 10;
/// Most bytes that are returned.
pub(super) const RETURNED_MAX: usize = MAX + PIECE;

/// A return in progress. Its owner holds the reader's lock from its beginning to its end.
#[derive(Debug, Default)]
pub struct Return {
    bytes: Vec<u8>,
    /// Bytes that have been copied back, and those of them that the writer has sent again.
    put: usize,
    resent: usize,
    /// Bytes that the writer had written to the TCP connection when it stopped, once all of them have been taken.
    stopped_at: Option<u64>,
}

/// Progress of a [`Return`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// All bytes are on the TCP connection again.
    Done,
    /// All bytes have been copied back. The writer sends the rest as TCP has room.
    Returned,
    /// Some bytes have moved.
    Moved,
    /// The writer has to act first: it does in any call that sends, or receives and has been woken.
    Waits,
}

impl Return {
    /// Takes and returns bytes as far as that is possible without waiting.
    ///
    /// # Errors
    /// [`Broken`]; [`io::ErrorKind::OutOfMemory`] beyond 32 MiB.
    pub fn step(&mut self, reader: &mut Reader, segment: &Segment, tcp: &impl Tcp) -> io::Result<Step> {
        let control = segment.control(reader.direction());
        control.returned.fetch_or(RETURNS, Ordering::SeqCst);
        let resent = control.resent.load(Ordering::Acquire);
        let Some(stopped_at) = self.stopped_at else {
            let taken = self.take(reader, segment, tcp)?;
            let stop = resent >> POSITION;
            // The writer has counted an urgent byte, which reading skips.
            let has_all = || {
                taken == 0 && tcp.received().is_ok_and(|all| all == stop) && tcp.available().is_ok_and(|len| len == 0)
            };
            if resent & STOPPED != 0 && (reader.position() == stop || has_all()) {
                self.stopped_at = Some(stop);
                return Ok(Step::Moved);
            }
            return Ok(if taken > 0 { Step::Moved } else { Step::Waits });
        };
        let resent = (resent >> POSITION).checked_sub(stopped_at).and_then(|resent| usize::try_from(resent).ok());
        let resent = resent.filter(|resent| *resent <= self.put).ok_or(Broken)?;
        let (size, before) = (segment.ring_size(), (self.put, std::mem::replace(&mut self.resent, resent)));
        // Large pieces: the kernel's buffers hold fewer bytes in many small ones.
        let left = self.bytes.len() - self.put;
        let has_room = size - (self.put - resent) >= left.min(size / 2);
        while has_room && self.put < self.bytes.len() && self.put - resent < size {
            let at = self.put & (size - 1);
            let len = (self.bytes.len() - self.put).min(size - at).min(size - (self.put - resent));
            // SAFETY: `at + len` is inside the ring; the writer reads there only after the number of bytes has been published.
            unsafe { shared::copy(segment.ring(reader.direction()).add(at), self.bytes[self.put..].as_ptr(), len) };
            self.put += len;
        }
        let all = if self.put == self.bytes.len() { RETURNED_ALL } else { 0 };
        control.returned.store((self.put as u64) << POSITION | RETURNS | all, Ordering::Release);
        if all != 0 {
            reader.end_return();
        }
        Ok(match (self.put, self.resent) {
            (_, resent) if resent == self.bytes.len() => Step::Done,
            now if now != before => Step::Moved,
            _ if all != 0 => Step::Returned,
            _ => Step::Waits,
        })
    }

    /// Takes bytes that are there, in [`READS_MAX`] reads at most. Their number.
    fn take(&mut self, reader: &mut Reader, segment: &Segment, tcp: &impl Tcp) -> io::Result<usize> {
        let begin = self.bytes.len();
        for _ in 0..READS_MAX {
            let before = self.bytes.len();
            if before > MAX {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            self.bytes.resize(before + PIECE, 0);
            let list = [libc::iovec { iov_base: self.bytes[before..].as_mut_ptr().cast(), iov_len: PIECE }];
            // SAFETY: part of a vector that nothing else borrows.
            let read = match unsafe { Pieces::new(&list) } {
                // SAFETY: as above.
                Some(mut to) => unsafe { reader.read(segment, tcp, &mut to) },
                None => Ok(0),
            };
            self.bytes.truncate(before + read.unwrap_or(0));
            if read? == 0 {
                break;
            }
        }
        Ok(self.bytes.len() - begin)
    }
}
