//! Pages of files on their way to a socket. A pipe holds them from the moment that they are taken, so that it is known how much there
//! is before a byte of it is sent, however the file changes meanwhile; `sendfile` learns that only while it sends. The pages are the
//! file's own: what is written to them before the socket has sent them is sent.

use crate::limits;
use crate::page_cache;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Most bytes that a pipe is to hold.
const LEN_MAX: usize = 1 << 20;
/// What is shorter is copied at less cost.
pub const LEN_MIN: usize = 64 << 10;
/// Pipes of one owner that hold something, and those that are kept for later.
const OUT_MAX: usize = 4;
const IDLE_MAX: usize = 2;
const PAGE: u64 = 4096;

/// Descriptors that pipes of all owners take.
static DESCRIPTORS: AtomicUsize = AtomicUsize::new(0);

/// The pipes of a connection.
#[derive(Debug, Default)]
pub struct Pipes {
    idle: Mutex<Vec<Ends>>,
    out: AtomicUsize,
}

#[derive(Debug)]
struct Ends {
    from: OwnedFd,
    to: OwnedFd,
}

impl Ends {
    /// `None` if there are many already, or there can be none of this size.
    fn new() -> Option<Ends> {
        if DESCRIPTORS.fetch_add(2, Ordering::Relaxed) >= limits::share_of_open_files(16) {
            DESCRIPTORS.fetch_sub(2, Ordering::Relaxed);
            return None;
        }
        let made = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        let Ok((from, to)) = made else {
            DESCRIPTORS.fetch_sub(2, Ordering::Relaxed);
            return None;
        };
        let ends = Ends { from, to };
        rustix::pipe::fcntl_setpipe_size(&ends.to, LEN_MAX).is_ok_and(|size| size >= LEN_MAX).then_some(ends)
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        DESCRIPTORS.fetch_sub(2, Ordering::Relaxed);
    }
}

/// Bytes in a pipe.
#[derive(Debug)]
pub struct Piped {
    ends: Option<Ends>,
    left: Cell<usize>,
    pipes: Arc<Pipes>,
}

impl Pipes {
    /// Takes pages of a file that are in the page cache: all of the range, or less where the file ends. `None` if that cannot be done at
    /// once, or is not worth it.
    pub fn take(self: &Arc<Self>, file: &File, at: u64, len: usize) -> Option<Piped> {
        // A pipe holds so many pages, not bytes.
        if !(LEN_MIN..=LEN_MAX).contains(&len) || !at.is_multiple_of(PAGE) || at > i64::MAX as u64 - len as u64 {
            return None;
        }
        // Pages that are still being read would be waited for: `SPLICE_F_NONBLOCK` is about pipes.
        if !page_cache::is_read(file, at, len as u64) {
            return None;
        }
        if self.out.fetch_add(1, Ordering::Relaxed) >= OUT_MAX {
            self.out.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let idle = self.idle.lock().expect("no panics under the lock").pop();
        let piped = Piped { ends: idle.or_else(Ends::new), left: Cell::new(0), pipes: Arc::clone(self) };
        let ends = piped.ends.as_ref()?;
        let mut offset = at;
        while piped.left.get() < len {
            let wanted = len - piped.left.get();
            match rustix::pipe::splice(file, Some(&mut offset), &ends.to, None, wanted, SpliceFlags::NONBLOCK) {
                Ok(0) => break,
                Ok(more) => piped.left.set(piped.left.get() + more),
                Err(Errno::INTR) => {}
                // What there is would be less than there could be.
                Err(_) => return None,
            }
        }
        Some(piped)
    }
}

impl Piped {
    /// Bytes that have not been sent.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.left.get()
    }

    /// Sends some of them, without waiting for the socket. How many.
    ///
    /// # Errors
    /// The system's; `EAGAIN` if the socket takes none now.
    pub fn send(&self, socket: impl AsFd) -> rustix::io::Result<usize> {
        let Some(ends) = &self.ends else { return Ok(0) };
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let sent = rustix::pipe::splice(&ends.from, None, socket, None, self.left.get(), flags)?;
        self.left.set(self.left.get() - sent);
        Ok(sent)
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        self.pipes.out.fetch_sub(1, Ordering::Relaxed);
        // One that is not empty is closed.
        if let Some(ends) = self.ends.take().filter(|_| self.left.get() == 0) {
            let mut idle = self.pipes.idle.lock().expect("no panics under the lock");
            if idle.len() < IDLE_MAX {
                idle.push(ends);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn pages_are_those_of_the_moment_that_they_were_taken() {
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..300_000_u32).map(|n| (n / 7) as u8).collect();
        file.write_all(&content).unwrap();
        // Before Linux 6.5 it cannot be found out what is cached.
        let can = page_cache::cached(&file, 0, 1).is_some();
        let pipes = Arc::new(Pipes::default());
        for (at, len) in
            [(0, 1000), (1, 100_000), (0, LEN_MAX + 1), (u64::MAX, 100_000), (400_000 / PAGE * PAGE, 100_000)]
        {
            assert!(pipes.take(&file, at, len).is_none(), "{len} bytes from {at} on");
        }
        let (mut near, far) = UnixStream::pair().unwrap();
        for _ in 0..3 {
            let Some(piped) = pipes.take(&file, 4096, 200_000) else {
                assert!(!can);
                return;
            };
            assert_eq!(piped.len(), 200_000);
            // What is cut off now is there.
            file.set_len(150_000).unwrap();
            let mut received = vec![0; 200_000];
            let mut filled = 0;
            while piped.len() > 0 {
                let sent = piped.send(&far).unwrap();
                near.read_exact(&mut received[filled..filled + sent]).unwrap();
                filled += sent;
            }
            // The rest of the last page may have been cleared.
            assert!(received[..150_000 - 4096] == content[4096..150_000]);
            file.write_all_at(&content, 0).unwrap();
        }
        assert_eq!((pipes.out.load(Ordering::Relaxed), pipes.idle.lock().unwrap().len()), (0, 1));
        // No more than so many at a time, and those that are not sent are closed.
        let out: Vec<_> = (0..OUT_MAX + 1).filter_map(|_| pipes.take(&file, 0, 100_000)).collect();
        assert_eq!(out.len(), OUT_MAX);
        drop(out);
        assert_eq!(pipes.idle.lock().unwrap().len(), 0);
        assert!(pipes.take(&file, 0, 100_000).is_some());
    }
}
