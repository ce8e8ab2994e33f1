//! Processes that use io_uring: the kernel then waits on sockets, and reads from them, without a call that is seen. Their connections
//! go back to TCP, and new ones stay there.
//!
//! A ring is recognised by the calls that make one (`hooks::raw`), and by its descriptor where those were system call instructions of the
//! program's own.

use crate::report::{self, Reason, stays};
use crate::slots::{self, Slot};
use crate::{SETTINGS, data};
use rustix::fs::{Mode, OFlags, RawDir};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// This process has, or has had, a ring.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// True once this process uses io_uring. A thread that accelerates a connection sets its phase before it asks, and
/// [`note`] sets the flag before it looks at phases: one of the two sees the other.
pub(crate) fn is_used() -> bool {
    IS_USED.load(Ordering::SeqCst)
}

/// The process makes a ring, or uses one: nothing has been submitted for a connection since.
pub(crate) fn note() {
    if IS_USED.load(Ordering::Relaxed) || SETTINGS.get().is_none() || slots::is_in_borrowed_memory() {
        return;
    }
    if !IS_USED.swap(true, Ordering::SeqCst) {
        slots::each(|number, fd| leave_ring(slots::slot(number), fd));
    }
}

/// Has a connection go on by TCP. It is reset where bytes of the ring precede bytes on the TCP connection
/// and the peer does not send them again.
pub(crate) fn leave_ring(slot: &Slot, fd: i32) {
    if !slot.is_accelerated() {
        return;
    }
    stays(slot, fd, Reason::Uring, &", from here on");
    let left = data::demote_for_reading(slot, fd);
    if left > 0 {
        report::tell(fd, &format_args!("reset: a program that uses io_uring would have missed {left} bytes"));
        crate::tcp::Connection::new(fd).reset();
    }
}

/// Time and duration of the last scan of the descriptors, in nanoseconds.
static LOOKED_AT: AtomicU64 = AtomicU64::new(0);
static TOOK: AtomicU64 = AtomicU64::new(0);

/// Scans of the descriptors take at most one part in this many of the time.
const SHARE: u64 = 100;

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec as u32).as_nanos() as u64
}

/// As [`is_used`], before a connection is accelerated: also scans the process's descriptors for a ring.
pub(crate) fn finds_one() -> bool {
    if is_used() {
        return true;
    }
    let begin = now();
    if begin - LOOKED_AT.load(Ordering::Relaxed).min(begin) < SHARE * TOOK.load(Ordering::Relaxed) {
        return false;
    }
    let has_one = has_descriptor();
    let end = now();
    TOOK.store(end - begin, Ordering::Relaxed);
    LOOKED_AT.store(end, Ordering::Relaxed);
    if has_one {
        note();
    }
    has_one
}

/// True if one of the process's descriptors is a ring. Without the heap: a signal handler may call this.
fn has_descriptor() -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(directory) = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty()) else { return false };
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(&directory, &mut buffer);
    while let Some(Ok(entry)) = entries.next() {
        let mut target = [MaybeUninit::uninit(); 32];
        if let Ok((target, _)) = rustix::fs::readlinkat_raw(&directory, entry.file_name(), &mut target)
            && target == b"anon_inode:[io_uring]"
        {
            return true;
        }
    }
    false
}
