//! Second looks during long sleeps.
//!
//! A doorbell or a relay ends a sleep as soon as bytes arrive. If one is missing because of an error in this library or its peer's, the
//! bytes are late by about a second instead of lost: calls that wait for several descriptors look at their connections again, less and
//! less often. The reader looks at its rings; the writer rings once more for bytes that nothing reads, in case the reader waits by a call
//! that the library does not see. Both are counted (`missed`, `repeated`).

use crate::report::{count, counters};
use crate::tcp::Connection;
use crate::wait::Limit;
use crate::{data, lock, relayed, signals, slots};
use libc::{c_int, sigset_t};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Length of the first sleep of a call. Each later one is twice as long, up to the second value.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);
/// Length of the first sleep after a second look that has sent bytes again: the peer that returns them cannot ring, and waits for the rest.
const AFTER_ANSWER: Duration = Duration::from_millis(1);

/// Most signals that one call ignores because they have no handler.
const DROPPED_MAX: u32 = 16;

/// Number of bytes sent again before the next such sleep. A look that sends the first or the last bytes counts as so many. A peer may return
/// single bytes, and their sum is [limited](thruway_sockets::Writer::send_again).
const ANSWER_MIN: u64 = 4096;

thread_local! {
    /// Bytes that second looks of this thread have sent again in this call since the last short sleep.
    static ANSWERED: Cell<u64> = const { Cell::new(0) };
}

/// The program has installed a filter of system calls, which may not allow those that set the signal mask.
static FILTERED: AtomicBool = AtomicBool::new(false);

/// The program is about to install a filter of system calls: sleeps are not divided from here on.
pub(crate) fn note_filter() {
    FILTERED.store(true, Ordering::Relaxed);
}

/// Calls that this library alone makes may end the program.
pub(crate) fn is_filtered() -> bool {
    FILTERED.load(Ordering::Relaxed)
}

/// The sleeps of one call, which looks at connections between them. For signals they are one sleep: a handler that runs between two of them
/// ends the call, and the call's mask holds between them, too.
pub(crate) struct Sleeps {
    next: Duration,
    has_begun: bool,
    /// Signals that the program wants to be blocked during the call; null for those that are blocked anyway.
    mask: *const sigset_t,
    /// Handlers that this thread had run before the call.
    handled: u32,
    /// Signals that were blocked before this blocked all.
    before: Option<sigset_t>,
    /// Sleeps of `epoll_wait` that a signal without a handler has ended.
    dropped: u32,
}

impl Sleeps {
    /// For a call with this mask, which outlives it.
    pub(crate) fn new(mask: *const sigset_t) -> Sleeps {
        ANSWERED.set(0);
        Sleeps { next: FIRST, has_begun: false, mask, handled: lock::handled(), before: None, dropped: 0 }
    }

    /// Limit of the next sleep of a call that has the given limit; the kernel is to be given [`Sleeps::mask`].
    pub(crate) fn next(&mut self, limit: Limit) -> Limit {
        if is_filtered() {
            return limit;
        }
        if !self.mask.is_null() {
            self.block();
        }
        if ANSWERED.get() >= ANSWER_MIN {
            ANSWERED.set(0);
            self.next = AFTER_ANSWER;
        }
        let sleep = Limit::within(Some(self.next));
        self.next = (self.next * 2).min(LONGEST);
        self.has_begun = true;
        limit.earlier(sleep)
    }

    /// Signals that the kernel is to block during a sleep; null: those that are blocked anyway.
    pub(crate) fn mask(&self) -> *const sigset_t {
        match &self.before {
            Some(before) if self.mask.is_null() => before,
            _ => self.mask,
        }
    }

    /// The call has slept at least once.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Before the first sleep, and after one that does not end the call. False if a handler has run since the call began. After a sleep, the
    /// signals that come from here on are the next sleep's.
    pub(crate) fn may_go_on(&mut self) -> bool {
        if self.has_begun() {
            self.block();
        }
        lock::handled() == self.handled
    }

    /// True if `epoll_wait` has failed with `error` because a signal without a handler, such as SIGCHLD, came between two sleeps. All signals
    /// are blocked there, so the kernel keeps the signal pending, and it ends the next sleep. Returns true at most [`DROPPED_MAX`] times, because
    /// handlers may run that this library does not see.
    pub(crate) fn is_dropped_signal(&mut self, error: c_int) -> bool {
        let is_blocking = self.before.is_some() && lock::handled() == self.handled;
        let is_dropped = is_blocking && error == libc::EINTR && self.dropped < DROPPED_MAX;
        self.dropped += u32::from(is_dropped);
        is_dropped
    }

    fn block(&mut self) {
        self.before.get_or_insert_with(signals::block_all);
    }
}

impl Drop for Sleeps {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            signals::restore(before);
        }
    }
}

/// Looks at one connection. `is_wanted`: the call waits for bytes of it, of which the program has not been told yet.
pub(crate) fn look(number: u32, is_wanted: bool) {
    let slot = slots::slot(number);
    if !slot.is_accelerated() {
        return;
    }
    if is_wanted
        && !relayed::is_relayed(slot)
        && let Some(mut receiving) = slot.try_receiving()
    {
        let slots::Receiving { segment, reader, .. } = &mut receiving;
        let has_bytes = reader.ring_len(segment).is_ok_and(|len| len > 0);
        count(&counters().missed, usize::from(has_bytes && !reader.has_doorbells(segment)));
    }
    let Some(mut sending) = slot.try_sending() else { return };
    let slots::Sending { segment, writer, .. } = &mut sending;
    let has_rung = writer.ring_again(segment, &Connection::of(number, slot.descriptor()));
    let before = writer.sent_again();
    drop(sending);
    count(&counters().repeated, usize::from(has_rung));
    data::answer_peer_unasked(slot);
    if let Some(after) = slot.try_sending().map(|sending| sending.writer.sent_again()) {
        let is_step = (after.has_begun, after.has_ended) != (before.has_begun, before.has_ended);
        let bytes = if is_step { ANSWER_MIN } else { after.bytes.saturating_sub(before.bytes) };
        ANSWERED.set(ANSWERED.get().saturating_add(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_is_kept_between_two_sleeps_does_not_end_the_call() {
        let mut sleeps = Sleeps::new(std::ptr::null());
        sleeps.next(Limit::within(None));
        assert!(!sleeps.is_dropped_signal(libc::EINTR), "the first sleep");
        assert!(sleeps.may_go_on() && !sleeps.is_dropped_signal(libc::EBADF));
        assert!((0..DROPPED_MAX).all(|_| sleeps.is_dropped_signal(libc::EINTR)));
        assert!(!sleeps.is_dropped_signal(libc::EINTR));
    }

    #[test]
    fn a_look_that_has_sent_bytes_again_is_followed_by_another_soon() {
        let mut sleeps = Sleeps::new(std::ptr::null());
        let mut next = || {
            let left = sleeps.next(Limit::within(None)).left().expect("a limit");
            Duration::new(left.tv_sec as u64, left.tv_nsec as u32)
        };
        (0..10).for_each(|_| _ = next());
        ANSWERED.set(ANSWER_MIN);
        assert!(next() <= AFTER_ANSWER);
        (0..10).for_each(|_| assert!(next() <= LONGEST));
    }
}
