//! What the library counts and tells.

use crate::SETTINGS;
use crate::slots::{self, Slot};
use rustix::fs::{Mode, OFlags};
use std::ffi::CStr;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use thruway_memory::sealed;
use thruway_sockets::stats::{Counters, EXPLAINED_MAX};

static OWN: Counters = Counters::new();
static COUNTERS: AtomicPtr<Counters> = AtomicPtr::new((&raw const OWN).cast_mut());
/// The file of explanations, or -1: kept open, because the program may become another user, or change its root directory.
static LOG: AtomicI32 = AtomicI32::new(-1);

/// What is counted.
#[inline]
pub(crate) fn counters() -> &'static Counters {
    // SAFETY: `OWN`, or what is mapped and stays so.
    unsafe { &*COUNTERS.load(Ordering::Relaxed) }
}

/// Adds to a counter.
#[inline]
pub(crate) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Counts in, and tells to, these files.
pub(crate) fn start(stats: Option<&PathBuf>, log: Option<&PathBuf>) {
    if let Some(path) = stats {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty());
        if let Ok(counters) = file.map_err(Into::into).and_then(Counters::map) {
            COUNTERS.store(std::ptr::from_ref(counters).cast_mut(), Ordering::Relaxed);
        }
    }
    if let Some(path) = log {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::empty());
        if let Some(file) = file.ok().and_then(slots::hide) {
            LOG.store(file, Ordering::Relaxed);
        }
    }
}

/// Why an end of a connection stays with TCP, or goes back to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Remote,
    NotRemote,
    NoRelay,
    NotFound,
    Rule,
    Shared,
    Unsupported,
    Uring,
    Doorbells,
    OneShot,
    Memory,
    Ended,
    Failed,
}

impl Reason {
    fn text(self) -> &'static str {
        match self {
            Reason::Remote => "TCP: the peer is not on this host",
            Reason::NotRemote => "TCP: a rule says that it goes through the relay, which needs --remote",
            Reason::NoRelay => {
                "TCP: the relays have not found each other (their logs say why), or the program at the other end does not run under thruway run --remote"
            }
            Reason::NotFound if SETTINGS.get().is_some_and(|settings| settings.group.is_some()) => {
                "TCP: no process of a member of the group, run by thruway run with that group, has been met at the other end; both ends have to be, and to last long enough there as well (--after-calls)"
            }
            Reason::NotFound => {
                "TCP: no process of this user's, run by thruway run, has been met at the other end; both ends have to be, as one user or with one --group, and to last long enough there as well (--after-calls)"
            }
            Reason::Rule => "TCP: a rule says so",
            Reason::Shared => "TCP: other processes hold the descriptor, or may",
            Reason::Unsupported => "TCP: an option or use that only the kernel's TCP has",
            Reason::Uring => {
                "TCP: the program uses io_uring, by which the kernel uses sockets without calls of the C library"
            }
            Reason::Doorbells => "TCP: small messages that each need a doorbell gain nothing by memory",
            Reason::OneShot => "TCP: the program has registered it with EPOLLONESHOT",
            Reason::Memory => "TCP: no memory for rings within the limit",
            Reason::Ended => "TCP: one end was shut down before it could be accelerated",
            Reason::Failed => "TCP: acceleration has failed",
        }
    }

    fn counter(self) -> &'static AtomicU64 {
        let counters = counters();
        match self {
            Reason::Remote => &counters.remote,
            Reason::NotRemote => &counters.by_rule,
            Reason::NoRelay => &counters.relay_not_found,
            Reason::NotFound => &counters.peer_not_found,
            Reason::Rule => &counters.by_rule,
            Reason::Shared => &counters.shared_descriptor,
            Reason::Unsupported => &counters.unsupported_use,
            Reason::Uring => &counters.io_uring,
            Reason::Doorbells => &counters.doorbells_only,
            Reason::OneShot => &counters.one_shot,
            Reason::Memory => &counters.no_memory,
            Reason::Ended => &counters.short,
            Reason::Failed => &counters.failed,
        }
    }
}

/// An end of a connection stays with TCP, or goes back to it. Counted and told once for each.
pub(crate) fn stays(slot: &Slot, fd: i32, reason: Reason, detail: &dyn std::fmt::Display) {
    if slot.reason.swap(reason as u8 + 1, Ordering::Relaxed) == 0 {
        count(reason.counter(), 1);
        tell(fd, &format_args!("{}{detail}", reason.text()));
    }
}

/// Tells what has become of a connection, if anybody listens.
pub(crate) fn tell(fd: i32, what: &dyn std::fmt::Display) {
    let log = LOG.load(Ordering::Relaxed);
    if log < 0 {
        return;
    }
    let mut line = Line { bytes: [0; 400], len: 0 };
    let pid = rustix::process::getpid().as_raw_nonzero();
    let _ = write!(line, "{pid} fd {fd} ");
    let socket = crate::slots::borrow(fd);
    let names = (rustix::net::getsockname(socket), rustix::net::getpeername(socket));
    if let (Ok(local), Ok(Some(peer))) = names
        && let (Some(local), Some(peer)) = (crate::switch::address(&local), crate::switch::address(&peer))
    {
        let _ = write!(line, "{local} to {peer} ");
    }
    let _ = writeln!(line, "{what}");
    let log = slots::borrow(log);
    let len = rustix::fs::fstat(log).map_or(0, |stat| stat.st_size.cast_unsigned()) + line.len as u64;
    if len > EXPLAINED_MAX || !sealed::may_be_long(len) {
        return count(&counters().unexplained, 1);
    }
    let _ = rustix::io::write(log, &line.bytes[..line.len]);
}

/// A line of text that needs no memory of the heap.
struct Line {
    bytes: [u8; 400],
    len: usize,
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let len = text.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + len].copy_from_slice(&text.as_bytes()[..len]);
        self.len += len;
        Ok(())
    }
}

/// Writes to the program's standard error.
pub(crate) fn complain(parts: &[&str]) {
    for part in ["thruway: "].iter().chain(parts).chain(&["\n"]) {
        let _ = rustix::io::write(rustix::stdio::stderr(), part.as_bytes());
    }
}

/// There is no function of the C library by that name.
pub(crate) fn fatal(name: &CStr) -> ! {
    complain(&["the C library has no function ", name.to_str().unwrap_or("?"), "; run the program without thruway"]);
    std::process::abort()
}
