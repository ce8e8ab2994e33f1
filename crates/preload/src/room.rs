//! Connections to other hosts whose ring is full: what is sent waits for room, rather than going by TCP, which the relay does not encrypt.
//!
//! A call that may wait does so here. One that does not fails with EAGAIN, and from then on the connection is not ready to be written to:
//! `poll` and `epoll` keep from the kernel that it is wanted for that, because the TCP connection always has room, and the relay wakes the
//! process by its waker when the ring has. Where not all that may wait for readiness waits for that, bytes go by TCP, as within a host.

use crate::slots::{self, Sending, Slot};
use crate::{epoll, waker};
use std::sync::atomic::Ordering;

/// Whether a call that has found no room may say so. Then it has, and readiness waits for room from here on.
pub(crate) fn block(number: u32) -> bool {
    let (slot, local) = (slots::slot(number), slots::local(number));
    let may_wait = waker::of(number).is_some()
        && !slot.is_asynchronous.load(Ordering::Relaxed)
        && match local.registrations.load(Ordering::SeqCst) {
            0 => true,
            1 => local.instance.load(Ordering::Relaxed) != slots::SEVERAL,
            _ => false,
        };
    if may_wait {
        slot.is_blocked.store(true, Ordering::SeqCst);
        epoll::note_blocked(number);
    }
    may_wait
}

fn is_full(slot: &Slot) -> bool {
    match slot.sending() {
        Ok(Some(mut sending)) => {
            let Sending { segment, writer, .. } = &mut sending;
            writer.is_full(segment)
        }
        _ => false,
    }
}

/// Whether it has said so, and there still is no room.
pub(crate) fn is_wanted(number: u32) -> bool {
    let slot = slots::slot(number);
    if !slot.is_blocked.load(Ordering::SeqCst) {
        return false;
    }
    let is_full = is_full(slot);
    if !is_full {
        slot.is_blocked.store(false, Ordering::SeqCst);
    }
    is_full
}

/// What has waited for room waits no longer. It may have been on an earlier connection with the same slot.
pub(crate) fn end_wait(number: u32) {
    let waiters = &slots::local(number).room_waiters;
    let _ = waiters.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |count| count.checked_sub(1));
}

/// Whether something waits for room that has come: a wake-up is for that, whatever takes it back.
pub(crate) fn is_due(number: u32) -> bool {
    let slot = slots::slot(number);
    let is_waited_for =
        slot.is_blocked.load(Ordering::SeqCst) && slots::local(number).room_waiters.load(Ordering::SeqCst) > 0;
    is_waited_for && !is_full(slot)
}

/// As [`is_wanted`], before sleeping: has the relay wake what sleeps when there is some.
pub(crate) fn ask_for(number: u32) -> bool {
    let slot = slots::slot(number);
    if slot.is_blocked.load(Ordering::SeqCst)
        && let Ok(Some(sending)) = slot.sending()
    {
        sending.writer.want_room(&sending.segment);
    }
    is_wanted(number)
}

/// The connection goes by TCP from here on, or ends: what waits for room looks again.
pub(crate) fn give_up(slot: &Slot, number: u32) {
    if slot.is_blocked.swap(false, Ordering::SeqCst)
        && let Ok(Some(sending)) = slot.sending()
    {
        sending.writer.note_woken(&sending.segment);
        waker::write(number);
    }
}
