//! Calls that send and receive, on connections that are accelerated.
//!
//! A thread that has to wait sleeps in the kernel, in `recv` on the connection itself: so time limits, signals, the peer's end and what
//! other threads do to the descriptor are the kernel's business, as without acceleration. Before, it asks the peer for a doorbell.

mod ends;
mod receiving;
mod sending;

pub(crate) use ends::{
    answer_all_peers, answer_peer, answer_peer_unasked, ask_for_doorbell, before_shutdown, demote, demote_for_reading,
    demote_if_read, enter_tcp, enter_tcp_at_end, leave, settle, settle_shared,
};
pub(crate) use receiving::{
    disarm, disarm_if_looked_at, finds_nothing, is_before_tcp, is_readable, is_unannounced, rearm, receive,
    receive_message, receive_plain, unread,
};
pub(crate) use sending::{may_have_blocked, send_from_file, transmit};

use crate::SETTINGS;
use crate::lock::Reentered;
use crate::report::{Reason, stays};
use crate::slots::{self, Slot};
use crate::tcp::Connection;
use libc::{c_int, ssize_t};
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;
use thruway_sockets::{Over, Reader};

/// Sets `errno`.
pub(crate) fn fail(error: c_int) -> ssize_t {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() = error };
    -1
}

pub(crate) fn errno() -> c_int {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() }
}

fn code(error: &io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::ECONNRESET)
}

impl From<Reentered> for c_int {
    /// As if the signal had come before the call.
    fn from(_: Reentered) -> c_int {
        libc::EINTR
    }
}

/// No error of the kernel's: the connection is not accelerated after all, and nothing of the call has been done.
const NOT_ACCELERATED: c_int = -1;

/// A connection, as a call has found it. Where the call has slept, another thread may have closed the descriptor, and it and the slot may
/// be another connection's.
#[derive(Clone, Copy)]
struct Which {
    slot: &'static Slot,
    number: u32,
    fd: c_int,
    generation: u32,
}

impl Which {
    fn new(number: u32, fd: c_int) -> Which {
        let slot = slots::slot(number);
        Which { slot, number, fd, generation: slot.generation.load(Ordering::Relaxed) }
    }

    /// Under one of the slot's locks, that stays so until it is given back: what closes takes the descriptor out of the table first, and
    /// then waits for the locks.
    fn is_still_it(&self) -> bool {
        slots::find(self.fd) == Some(self.number) && self.slot.generation.load(Ordering::Relaxed) == self.generation
    }
}

/// An error of the TCP connection that was met when something else was wanted of it comes behind what has been received before.
pub(crate) fn keep_error(slot: &Slot, reader: &mut Reader) {
    let error = reader.take_error();
    if error != 0 {
        let _ = slot.error.compare_exchange(0, error, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Keeps the error of a reset that the kernel has reported to a call of the library. The program receives it after all earlier bytes.
pub(crate) fn keep_reset(slot: &Slot, error: c_int) {
    if matches!(error, libc::ECONNRESET | libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH) {
        let _ = slot.error.compare_exchange(0, error, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// The peer has written nonsense, the relay does not answer, or the connection below has an error.
pub(crate) fn broken(slot: &Slot, fd: c_int, error: &io::Error) -> c_int {
    let is_ours = error.raw_os_error().is_none();
    let why = match error.kind() {
        io::ErrorKind::InvalidData if is_ours => Some(": the peer broke the ring in shared memory"),
        io::ErrorKind::TimedOut if is_ours => Some(": this host's relay, or the other one, does not answer"),
        _ => None,
    };
    if let Some(why) = why {
        stays(slot, fd, Reason::Failed, &why);
        reset(slot, fd);
    }
    code(error)
}

/// Resets a connection. Through a relay, the relays learn it: the other end must not wait for what explains the end, or take it for one that
/// was meant.
pub(crate) fn reset(slot: &Slot, fd: c_int) {
    if let Some(receiving) = slot.try_receiving()
        && receiving.segment.is_relayed()
    {
        receiving.segment.set_over(Over::Lost);
        receiving.segment.check_relay(&Connection::new(fd));
    }
    Connection::new(fd).reset();
}

unsafe extern "C" {
    fn pthread_testcancel();
}

/// Ends this thread if it is to be cancelled, as the C library's function does that a hook stands before. Not under a lock.
pub(crate) fn check_cancelled() {
    // SAFETY: without preconditions; no caller has anything that is to be dropped.
    unsafe { pthread_testcancel() };
}

/// Whether calls on a descriptor wait.
fn waits(fd: c_int) -> bool {
    rustix::fs::fcntl_getfl(slots::borrow(fd)).is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// The coarse clock.
fn milliseconds() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    (now.tv_sec as u32).wrapping_mul(1000).wrapping_add(now.tv_nsec as u32 / 1_000_000)
}

/// The time that a thread looks again and again before it sleeps.
pub(crate) fn spin_time() -> Duration {
    Duration::from_micros(SETTINGS.get().map_or(0, |settings| settings.spin.into()))
}
