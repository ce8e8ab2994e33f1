//! Connections to other hosts whose ring is full: what is sent waits for room, rather than going by TCP, which the relay does not encrypt.
//!
//! A call that may wait does so by itself ([`crate::relayed`]). One that does not fails with EAGAIN, and from then on the connection is not
//! ready to be written to. The TCP connection always is, so `poll` and `epoll` keep from the kernel that it is asked for, and have it wait
//! for a descriptor instead, an eventfd to which the relay writes when the ring has room. That is readable from then on, for all who wait,
//! until another call finds no room: only that takes it back, under [`slots::Slot::sending`], and asks the relay again.
//!
//! Where not all that may wait for readiness can wait for that, bytes go by TCP, as within a host.

use crate::slots::{self, Sending};
use crate::{epoll, relay, waker};
use libc::c_int;
use rustix::event::EventfdFlags;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How many such descriptors a process has at most.
const MOST: u32 = 384;
/// How long a call waits for the relay to say that it has one.
const ANSWER_MAX: Duration = Duration::from_millis(10);
static COUNT: AtomicU32 = AtomicU32::new(0);

/// What has become of a call that has found no room and does not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// It says so, and readiness waits for room from here on.
    Yes,
    /// There is some by now.
    Room,
    /// It cannot say so: what may wait for readiness would not wait for room.
    Never,
}

/// A call that does not wait has found no room. Within a host, it never waits for that.
pub(crate) fn block(number: u32, fd: c_int) -> Blocked {
    let (slot, local) = (slots::slot(number), slots::local(number));
    let may_wait = !slot.is_asynchronous.load(Ordering::Relaxed)
        && match local.registrations.load(Ordering::SeqCst) {
            // Else it may be registered by calls that are not seen.
            0 => slot.polls_for_room.load(Ordering::Relaxed),
            1 => local.instance.load(Ordering::Relaxed) != slots::SEVERAL,
            _ => false,
        };
    let descriptor = || of(number).or_else(|| make(number, fd));
    let Some(descriptor) = may_wait.then(descriptor).flatten() else { return Blocked::Never };
    match slot.sending() {
        Ok(Some(mut sending)) => {
            let Sending { segment, writer, .. } = &mut sending;
            if !writer.is_full(segment) {
                return Blocked::Room;
            }
            if !segment.can_tell_room() {
                // It has no descriptors left, or has gone.
                return Blocked::Never;
            }
            slot.is_blocked.store(true, Ordering::SeqCst);
            ask(&mut sending, descriptor);
        }
        _ => return Blocked::Never,
    }
    if epoll::note_blocked(number) {
        return Blocked::Yes;
    }
    if let Ok(_sending) = slot.sending() {
        slot.is_blocked.store(false, Ordering::SeqCst);
    }
    Blocked::Never
}

/// Has the relay write to the descriptor when there is room, which has not been there until now.
fn ask(sending: &mut Sending<'_>, descriptor: c_int) {
    let Sending { segment, writer, .. } = sending;
    let _ = rustix::io::read(slots::borrow(descriptor), &mut [0u8; 8]);
    writer.want_room(segment);
    if !writer.is_full(segment) {
        write(descriptor);
    }
}

fn write(descriptor: c_int) {
    let _ = rustix::io::write(slots::borrow(descriptor), &1u64.to_ne_bytes());
}

/// That of a connection, if it has one.
pub(crate) fn of(number: u32) -> Option<c_int> {
    let descriptor = slots::local(number).room.load(Ordering::Acquire);
    (descriptor > 0).then_some(descriptor)
}

/// Makes one, and hands it to the relay.
fn make(number: u32, fd: c_int) -> Option<c_int> {
    // The relay is given all that it has of the connection once more.
    let waker = waker::of(number)?;
    let slot = slots::slot(number);
    let guard = slot.upgrading.lock().ok()?;
    if let Some(descriptor) = of(number) {
        return Some(descriptor);
    }
    let most = MOST.min(waker::share_of_descriptors());
    COUNT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < most).then_some(count + 1)).ok()?;
    let descriptor = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok();
    let made = descriptor.and_then(slots::hide).filter(|descriptor| {
        let is_asked = relay::use_with(slot.upgrade(&guard), &[fd, waker, *descriptor]).is_ok();
        if !is_asked {
            slots::close_hidden(*descriptor);
        }
        is_asked
    });
    match made {
        Some(descriptor) => slots::local(number).room.store(descriptor, Ordering::Release),
        None => _ = COUNT.fetch_sub(1, Ordering::Relaxed),
    }
    drop(guard);
    let limit = Instant::now() + ANSWER_MAX;
    while made.is_some() && Instant::now() < limit {
        let Ok(Some(sending)) = slot.sending() else { break };
        let news = sending.segment.want_news();
        if sending.segment.can_tell_room() {
            break;
        }
        drop(sending);
        let _ = news.wait(limit.saturating_duration_since(Instant::now()));
    }
    made
}

/// The connection has ended in this process.
pub(crate) fn close(number: u32) {
    let descriptor = slots::local(number).room.swap(0, Ordering::SeqCst);
    if descriptor > 0 {
        slots::close_hidden(descriptor);
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a call has found no room, and there still is none.
pub(crate) fn is_wanted(number: u32) -> bool {
    let slot = slots::slot(number);
    if !slot.is_blocked.load(Ordering::SeqCst) {
        return false;
    }
    match slot.sending() {
        Ok(sending) => sending.is_some_and(|mut sending| {
            let Sending { segment, writer, .. } = &mut sending;
            let is_full = writer.is_full(segment);
            slot.is_blocked.fetch_and(is_full, Ordering::SeqCst);
            is_full
        }),
        // In a signal handler that has interrupted a call which sends.
        Err(_) => true,
    }
}

/// As [`is_wanted`], before waiting for the descriptor: that may be readable because there has been room before.
pub(crate) fn ask_for(number: u32) -> bool {
    let slot = slots::slot(number);
    if let Some(descriptor) = of(number)
        && slot.is_blocked.load(Ordering::SeqCst)
        && let Ok(Some(mut sending)) = slot.sending()
    {
        ask(&mut sending, descriptor);
    }
    is_wanted(number)
}

/// The connection goes by TCP from here on, or ends: what waits for room looks again.
pub(crate) fn give_up(number: u32) {
    if let Some(descriptor) = of(number) {
        write(descriptor);
    }
}
