//! Calls that receive.

use super::{
    NOT_ACCELERATED, Which, answer_peer, answer_peer_unasked, broken, check_cancelled, errno, fail, keep_error, waits,
};
use crate::allowance::{Allowance, Wait};
use crate::relayed::{catch_up, is_all_here, is_lost};
use crate::report::{count, counters};
use crate::slots::{self, Receiving, Sending, Slot, phase};
use crate::tcp::Connection;
use crate::{epoll, real, relay, switch, wait, waker};
use libc::{c_int, ssize_t};
use std::io;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use thruway_sockets::iovecs::Pieces;
use thruway_sockets::{Found, Over, PEEK_MAX, Reader, Segment, WakeBy};

/// A call that receives on a connection which may be accelerated: `plain` is the call as it is.
pub(crate) unsafe fn receive(
    number: u32,
    fd: c_int,
    list: &[libc::iovec],
    flags: c_int,
    plain: impl Fn() -> ssize_t,
) -> ssize_t {
    loop {
        if let Some(result) = receive_plain(number, fd, &plain) {
            return result;
        }
        if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
            return plain();
        }
        // SAFETY: the caller's promise.
        let Some(mut to) = (unsafe { Pieces::new(list) }) else { return fail(libc::EINVAL) };
        check_cancelled();
        let which = Which::new(number, fd);
        let result = if flags & libc::MSG_TRUNC != 0 {
            discard(which, to.left(), flags)
        } else {
            // SAFETY: the caller's promise.
            unsafe { receive_accelerated(which, &mut to, flags) }
        };
        match result {
            Ok(len) => {
                switch::weigh(number, fd, len);
                return len as ssize_t;
            }
            Err(NOT_ACCELERATED) => {}
            Err(error) => return fail(error),
        }
    }
}

/// As [`receive`], for calls which wait for bytes also if they ask for none: all but `read` and `readv`.
pub(crate) unsafe fn receive_message(
    number: u32,
    fd: c_int,
    list: &[libc::iovec],
    flags: c_int,
    plain: impl Fn() -> ssize_t,
) -> ssize_t {
    if list.iter().any(|piece| piece.iov_len > 0) {
        // SAFETY: the caller's promise.
        return unsafe { receive(number, fd, list, flags, plain) };
    }
    let mut byte = 0u8;
    let piece = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: one byte of ours, which stays on the connection.
    unsafe { receive(number, fd, &[piece], flags & !libc::MSG_TRUNC | libc::MSG_PEEK, plain) }.min(0)
}

/// Makes a call that receives on a connection which is not accelerated. `None` if it is.
pub(crate) fn receive_plain(number: u32, fd: c_int, plain: impl Fn() -> ssize_t) -> Option<ssize_t> {
    let slot = slots::slot(number);
    if slot.phase.load(Ordering::Relaxed) == phase::NEVER {
        return Some(plain());
    }
    if slot.is_accelerated() {
        return None;
    }
    let which = Which::new(number, fd);
    slot.plain_receives.fetch_add(1, Ordering::SeqCst);
    if slot.is_accelerated() {
        slot.plain_receives.fetch_sub(1, Ordering::SeqCst);
        return None;
    }
    slot.receives.store(true, Ordering::Relaxed);
    let result = plain();
    slot.plain_receives.fetch_sub(1, Ordering::SeqCst);
    if result > 0 && which.is_still_it() {
        switch::after_plain_call(number, fd, result as usize, false);
    }
    Some(result)
}

/// Size of the memory that takes the bytes of a call with `MSG_TRUNC`.
const SINK_LEN: usize = 64 << 10;
/// Limit of such a call without `MSG_WAITALL`: more than a ring and what [`Reader::peek`] sees of TCP.
const DISCARDED_MAX: usize = 8 << 20;

/// `MSG_TRUNC`: bytes are taken and thrown away; with `MSG_PEEK`, only counted.
fn discard(which: Which, len: usize, flags: c_int) -> Result<usize, c_int> {
    let len = if flags & libc::MSG_WAITALL != 0 { len } else { len.min(DISCARDED_MAX) };
    let mut sink = Vec::<u8>::with_capacity(SINK_LEN);
    // All pieces are the same memory.
    let piece = libc::iovec { iov_base: sink.as_mut_ptr().cast(), iov_len: SINK_LEN };
    let list = vec![piece; len.div_ceil(SINK_LEN)];
    // SAFETY: a buffer of ours, which is only written.
    let Some(to) = (unsafe { Pieces::new(&list) }) else { return Err(libc::EINVAL) };
    // SAFETY: as above.
    unsafe { receive_accelerated(which, &mut to.limited(len), flags) }
}

unsafe fn receive_accelerated(which: Which, to: &mut Pieces<'_>, flags: c_int) -> Result<usize, c_int> {
    let Which { slot, number, fd, .. } = which;
    if to.left() == 0 {
        return Ok(0);
    }
    let (is_peek, waits_for_all) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
    let connection = Connection::of(number, fd);
    let mut sum = 0;
    // When the call had to wait.
    let mut began = None;
    // The kernel has said that there is something.
    let mut woken = 0u32;
    // More of a connection that goes by TCP cannot be seen at a time.
    let peeks_all = is_peek && waits_for_all && flags & libc::MSG_DONTWAIT == 0 && to.left() <= PEEK_MAX;
    let (all, mut more) = (*to, None);
    // This call busy-polls before it sleeps, and needs no doorbell until then.
    let busy_polls = flags & libc::MSG_DONTWAIT == 0;
    let mut is_quiet = false;
    // Whether this call has tried to give an accelerated connection up that goes by TCP, since it slept.
    let mut has_tried = false;
    loop {
        let before = to.left();
        let receiving = slot.receiving()?;
        if !which.is_still_it() {
            return if sum > 0 { Ok(sum) } else { Err(libc::EBADF) };
        }
        let Some(mut receiving) = receiving else {
            return if sum > 0 { Ok(sum) } else { Err(NOT_ACCELERATED) };
        };
        if !slot.receives.swap(true, Ordering::Relaxed) {
            receiving.reader.set_ready(&receiving.segment, &connection);
        }
        if receiving.reader.is_closed() && sum == 0 && !has_tried {
            has_tried = true;
            drop(receiving);
            if switch::retire(number, fd) {
                return Err(NOT_ACCELERATED);
            }
            continue;
        }
        let Receiving { segment, reader, .. } = &mut receiving;
        let is_first = woken == 0 && sum == 0;
        if busy_polls
            && is_first
            && !is_quiet
            && reader.ring_len(segment) == Ok(0)
            && wait::may_go_without(slot, number)
        {
            reader.disarm(segment);
            is_quiet = true;
        }
        // SAFETY: the caller's promise.
        let read = unsafe {
            if is_peek {
                reader.peek(segment, &connection, to)
            } else {
                reader.read_more(segment, &connection, to, sum > 0)
            }
        };
        keep_error(slot, reader);
        match read {
            Ok(len) => sum += len,
            Err(_) if sum > 0 => return Ok(sum),
            Err(error) => {
                drop(receiving);
                return Err(broken(slot, fd, &error.into()));
            }
        }
        let is_done = to.left() == 0 || sum > 0 && (is_peek || reader.is_at_mark());
        if is_done && peeks_all && to.left() > 0 && more != Some(false) && waits(fd) {
            drop(receiving);
            more = Some(wait_for_more(slot, fd, *began.get_or_insert_with(Instant::now)));
            (*to, sum) = (all, 0);
            continue;
        }
        if is_done {
            count(&counters().ring_receives, 1);
            switch::after_ring_call(slot);
            // The doorbell that has rung stays until a call has found nothing, unless the connection is looked at: something may come
            // just now. A connection that is looked at needs no doorbell for bytes behind these either.
            let is_looked_at = wait::is_looked_at(slot, number);
            let is_empty = match is_looked_at {
                true if reader.ring_len(segment) != Ok(0) => false,
                true => quiesce(slot, number, &connection, segment, reader, true).unwrap_or(true),
                false => reader.arm(segment, waker::wakes(number)) != Ok(false),
            };
            let has_peer_called = reader.has_peer_called(segment);
            let has_doorbell =
                is_empty || is_looked_at || !wait::may_be_left(number) || reader.is_announced(segment, &connection);
            drop(receiving);
            if is_empty || is_quiet || is_looked_at || !has_doorbell {
                wait::note_drained(number);
            }
            if has_peer_called {
                answer_peer(slot, fd);
            }
            if !has_doorbell {
                epoll::announce(number);
            }
            return Ok(sum);
        }
        // A call that busy-polls next asks for a doorbell before it sleeps.
        let arms = !(busy_polls && woken == 0 && sum == 0 && wait::may_go_without(slot, number));
        let is_drained = match quiesce(slot, number, &connection, segment, reader, arms) {
            Ok(is_drained) => is_drained,
            Err(error) => {
                drop(receiving);
                return Err(broken(slot, fd, &error));
            }
        };
        if sum > 0 && is_drained && !waits_for_all {
            count(&counters().ring_receives, 1);
            switch::after_ring_call(slot);
            let has_peer_called = reader.has_peer_called(segment);
            drop(receiving);
            wait::note_drained(number);
            if has_peer_called {
                answer_peer(slot, fd);
            }
            return Ok(sum);
        }
        if !is_drained || before != to.left() {
            continue;
        }
        let pending = slot.error.load(Ordering::Relaxed);
        if pending != 0 {
            let _ = reader.arm(segment, waker::wakes(number));
            if sum == 0 {
                slot.error.store(0, Ordering::Relaxed);
                if pending == libc::ECONNRESET {
                    slot.has_told_reset.store(true, Ordering::Relaxed);
                }
                return Err(pending);
            }
            return Ok(sum);
        }
        if segment.is_relayed() {
            if segment.over() == Over::Lost {
                return if sum > 0 { Ok(sum) } else { Err(libc::ECONNRESET) };
            }
            let is_explained = reader.is_explained(segment, &connection, false);
            if is_explained != Ok(true) {
                drop(receiving);
                is_explained.map_err(|error| broken(slot, fd, &error.into()))?;
                catch_up(slot, fd, false)?;
                continue;
            }
        }
        if woken > 0 {
            // SAFETY: the caller's promise.
            let read = unsafe { reader.read_unexpected(segment, &connection, to, is_peek) };
            keep_error(slot, reader);
            match read {
                Ok(0) => {}
                Ok(len) if is_peek => return Ok(len),
                Ok(len) => {
                    sum += len;
                    continue;
                }
                Err(error) => {
                    drop(receiving);
                    return Err(broken(slot, fd, &error.into()));
                }
            }
        }
        drop(receiving);
        if woken > 1 {
            if flags & libc::MSG_DONTWAIT != 0 || !waits(fd) {
                if !arm_for_system_calls(slot, number) {
                    continue;
                }
                return if sum > 0 { Ok(sum) } else { Err(libc::EAGAIN) };
            }
            std::thread::yield_now();
        }
        let has_sent_again = answer_peer(slot, fd);
        wait::note_drained(number);
        if busy_polls && wait::spin(slot, wait::Limit::within(None), || is_readable(slot)) {
            continue;
        }
        if (flags & libc::MSG_DONTWAIT != 0 || !waits(fd)) && sum == 0 && wait_to_receive_again(which) {
            continue;
        }
        // A limit is one of the call, which may sleep more than once. The first sleep is the kernel's to end.
        let left = began.filter(|_| flags & libc::MSG_DONTWAIT == 0 && waits(fd));
        began.get_or_insert_with(Instant::now);
        let left = left.and_then(|began| Some(connection.receive_limit()?.saturating_sub(began.elapsed())));
        let waits_for_room = !has_sent_again && flags & libc::MSG_DONTWAIT == 0 && waits(fd);
        let slept = if waits_for_room { connection.wait_for_either(left) } else { sleep(which, flags, left, sum > 0) };
        match slept {
            Ok(true) => {
                woken += 1;
                has_tried = false;
            }
            Ok(false) if is_lost(slot) => {}
            Ok(false) if !is_all_here(slot, fd) => catch_up(slot, fd, true)?,
            Ok(false) if reclaims(slot) => {}
            // The end: nothing comes behind what the ring has by now.
            Ok(false) if !is_readable(slot) => {
                return if sum == 0 && has_lost(slot) { Err(libc::ECONNRESET) } else { Ok(sum) };
            }
            Ok(false) => {}
            Err(error) => {
                if error == libc::ECONNRESET && !is_lost(slot) && !is_all_here(slot, fd) {
                    // Why, this host's relay knows, or it has gone as well.
                    catch_up(slot, fd, true)?;
                }
                let is_of_the_call = matches!(error, libc::EINTR | libc::EAGAIN | libc::EBADF);
                let has_more = is_readable(slot) || !is_of_the_call && reclaims(slot);
                if !is_of_the_call && (has_more || sum > 0) {
                    // It comes behind what there is.
                    slot.error.store(error, Ordering::Relaxed);
                }
                match error {
                    // A process that was killed has left a doorbell, and nothing else.
                    libc::ECONNRESET
                        if !has_more && was_killed(slot) && has_all(slot) && !is_lost(slot) && !has_lost(slot) =>
                    {
                        return Ok(sum);
                    }
                    _ if has_more && error != libc::EINTR => {}
                    _ if sum > 0 => return Ok(sum),
                    error => return Err(error),
                }
            }
        }
    }
}

/// Longest wait of a call that does not wait otherwise, for bytes that the peer has to send again: another call may have reported them, before
/// another thread has returned the connection to TCP.
const AGAIN_MAX: Duration = Duration::from_millis(20);

/// For such waits in vain: a fiftieth of the time, because an event loop may have many such connections.
static IN_VAIN: Allowance<100_000, 50> = Allowance::new();

/// Waits for bytes that the peer has to send again, for [`AGAIN_MAX`] at most. True if the caller has to look again.
fn wait_to_receive_again(which: Which) -> bool {
    let Which { slot, fd, .. } = which;
    let connection = Connection::new(fd);
    let awaits = || match slot.receiving() {
        Ok(Some(mut receiving)) if which.is_still_it() && receiving.reader.is_closed() => {
            let Receiving { segment, reader, .. } = &mut receiving;
            reader.awaits_again(segment, &connection) == Ok(true)
        }
        _ => false,
    };
    if slot.has_waited_again.load(Ordering::Relaxed) || !IN_VAIN.has_now(AGAIN_MAX) || !awaits() {
        return false;
    }
    let mut wait = Wait::new(slot, AGAIN_MAX);
    while wait.go_on() && connection.ends() == 0 {
        std::thread::yield_now();
        if !awaits() {
            return true;
        }
    }
    slot.has_waited_again.store(true, Ordering::Relaxed);
    IN_VAIN.spend_now(wait.elapsed());
    false
}

/// Waits a little, for more than what has been seen and stays where it is: no doorbell says when that has come. False if the call is to
/// return what there is.
fn wait_for_more(slot: &Slot, fd: c_int, began: Instant) -> bool {
    let connection = Connection::new(fd);
    let is_over =
        connection.ends() != 0 && is_all_here(slot, fd) || is_lost(slot) || slot.error.load(Ordering::Relaxed) != 0;
    let is_late = || connection.receive_limit().is_some_and(|limit| began.elapsed() >= limit);
    // SAFETY: no element.
    !is_over && !is_late() && unsafe { real::poll(std::ptr::null_mut(), 0, 1) } == 0
}

/// Waits, unless the flags say otherwise, until the kernel has something. False at the connection's end.
fn peek(fd: c_int, flags: c_int) -> Result<bool, c_int> {
    let mut byte = 0u8;
    // SAFETY: one byte.
    match unsafe { real::recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK | flags) } {
        0 => Ok(false),
        len if len > 0 => Ok(true),
        _ => Err(errno()),
    }
}

/// Sleeps until the kernel has something: a byte of the stream, a doorbell, a wake-up by the relay. False at the connection's end. For
/// `left` at most; without that, for as long as the program's time limit says. `has_part`: the call has received something, so that any signal
/// handler ends it.
fn sleep(which: Which, flags: c_int, left: Option<Duration>, has_part: bool) -> Result<bool, c_int> {
    let Which { slot, number, fd, .. } = which;
    let connection = Connection::new(fd);
    let waker = waker::of(number);
    // Where the relay has no descriptor to wake it by, it has gone one day nevertheless.
    let may_wait =
        (waker.is_some() || relay::lifeline_of(number).is_some()) && flags & libc::MSG_DONTWAIT == 0 && waits(fd);
    let limit = if may_wait { left.or_else(|| connection.receive_limit()) } else { None };
    let hears = may_wait && waker::is_like_recv(limit.is_some() || has_part);
    // A call that finds nothing may be followed by a system call of the program's own that waits.
    let is_registered = slots::local(number).registrations.load(Ordering::SeqCst) > 0;
    let deaf = u32::from(waker.is_some() && if may_wait { !hears } else { !is_registered });
    if !may_wait {
        relay::glance(number);
    }
    slot.sleepers.fetch_add(1, Ordering::SeqCst);
    slot.deaf_sleepers.fetch_add(deaf, Ordering::SeqCst);
    let is_watched = slot.is_watched.load(Ordering::Relaxed);
    if hears || !is_watched && waker.is_none() && flags & libc::MSG_DONTWAIT == 0 && waits(fd) {
        slot.is_watched.store(true, Ordering::Relaxed);
    }
    let is_armed = match slot.receiving() {
        Ok(Some(mut receiving)) => {
            let Receiving { segment, reader, .. } = &mut receiving;
            let is_empty = reader.arm(segment, waker::wakes(number)).unwrap_or(false);
            let is_called = reader.has_peer_called(segment);
            drop(receiving);
            // A call that came before this end was armed has woken nothing.
            is_empty && (!is_called || answer_peer(slot, fd))
        }
        _ => false,
    };
    // The kernel would begin its own call again behind a handler.
    let waits_on = has_part && flags & libc::MSG_DONTWAIT == 0 && waits(fd);
    let peek_again = || match peek(fd, libc::MSG_DONTWAIT) {
        // Another thread or process has taken it.
        Err(libc::EAGAIN) => Ok(true),
        result => result,
    };
    let result = if is_armed {
        count(&counters().sleeps, 1);
        match hears {
            true => match waker::sleep(number, fd, waker.unwrap_or(-1), wait::Limit::within(limit), !has_part) {
                Ok(true) => peek_again(),
                Ok(false) => Ok(true),
                Err(error) => Err(error),
            },
            false => match left
                .or_else(|| waits_on.then(|| connection.receive_limit().unwrap_or(Duration::MAX)))
                .map(|left| connection.wait_for_bytes(left))
            {
                None => peek(fd, flags & libc::MSG_DONTWAIT),
                Some(Some(true)) => peek_again(),
                Some(Some(false)) => peek(fd, libc::MSG_DONTWAIT),
                Some(None) => peek(fd, libc::MSG_DONTWAIT).map_err(|_| libc::EINTR),
            },
        }
    } else {
        Ok(true)
    };
    slot.deaf_sleepers.fetch_sub(deaf, Ordering::SeqCst);
    let was_last = slot.sleepers.fetch_sub(1, Ordering::SeqCst) == 1;
    if result != Err(libc::EAGAIN) && was_last {
        disarm_if_looked_at(slot, number);
    }
    result
}

/// Before a call returns that has found nothing: if the connection is registered with no epoll instance that is known, a system call of the
/// program's own may wait next, which only a doorbell ends. False if there are bytes.
fn arm_for_system_calls(slot: &Slot, number: u32) -> bool {
    if waker::of(number).is_none() || slots::local(number).registrations.load(Ordering::SeqCst) > 0 {
        return true;
    }
    match slot.receiving() {
        Ok(Some(mut receiving)) => {
            let Receiving { segment, reader, .. } = &mut receiving;
            reader.arm(segment, WakeBy::Doorbell).unwrap_or(true)
        }
        _ => true,
    }
}

/// Whether there is something in a ring that the peer was to send again, and has not before it has gone.
fn reclaims(slot: &Slot) -> bool {
    match slot.receiving() {
        Ok(Some(mut receiving)) => {
            let Receiving { segment, reader, .. } = &mut receiving;
            reader.reclaim(segment)
        }
        _ => false,
    }
}

/// True if no bytes of the peer are missing.
fn has_all(slot: &Slot) -> bool {
    matches!(slot.receiving(), Ok(Some(receiving)) if receiving.reader.knows_all(&receiving.segment))
}

/// Whether the peer's process has ended without saying so.
fn was_killed(slot: &Slot) -> bool {
    // What this end has shut down itself says nothing of the peer.
    slot.shut.load(Ordering::Relaxed) == 0
        && matches!(slot.receiving(), Ok(Some(receiving)) if !receiving.reader.is_ended(&receiving.segment))
}

/// Whether a peer that was killed has not read what was sent to it through the ring: TCP would have reset the connection, and says so
/// once. Through a relay, one that has ended its direction may not be known to have, before the relay is done with it.
fn has_lost(slot: &Slot) -> bool {
    let has_unread = match slot.sending() {
        Ok(Some(sending)) => {
            let Sending { segment, writer, .. } = &sending;
            // Bytes of a ring that was closed have been sent again by TCP.
            writer.unread(segment) > 0
                && !writer.is_closed_by_reader(segment)
                && (!segment.is_relayed() || segment.over() != Over::No)
        }
        _ => false,
    };
    has_unread && was_killed(slot) && !slot.has_told_reset.swap(true, Ordering::Relaxed)
}

/// Asks for no doorbell, before a call of this thread busy-polls. True if the call has to [ask for one](rearm) before it returns.
pub(crate) fn disarm(slot: &Slot, number: u32) -> bool {
    match slot.try_receiving() {
        Some(receiving) if wait::may_go_without(slot, number) => {
            receiving.reader.disarm(&receiving.segment);
            true
        }
        _ => false,
    }
}

/// After a sleep: asks for no doorbell of a connection that is looked at.
pub(crate) fn disarm_if_looked_at(slot: &Slot, number: u32) {
    if let Some(receiving) = slot.try_receiving()
        && wait::is_looked_at(slot, number)
    {
        receiving.reader.disarm(&receiving.segment);
    }
    wait::note_drained(number);
}

/// Asks for a doorbell with the next bytes. False if some are readable already.
pub(crate) fn rearm(slot: &Slot, number: u32) -> bool {
    let (is_empty, is_called) = match slot.receiving() {
        Ok(Some(mut receiving)) => {
            let Receiving { segment, reader, .. } = &mut receiving;
            (reader.arm(segment, waker::wakes(number)).unwrap_or(false), reader.has_peer_called(segment))
        }
        _ => (true, false),
    };
    if is_called {
        // A call that came before this end was armed has woken nothing.
        answer_peer_unasked(slot);
    }
    is_empty
}

/// Whether the ring has something. Without a system call.
pub(crate) fn is_readable(slot: &Slot) -> bool {
    match slot.receiving() {
        Ok(Some(mut receiving)) => {
            let Receiving { segment, reader, .. } = &mut receiving;
            reader.ring_len(segment) != Ok(0)
        }
        _ => false,
    }
}

/// True if the ring has bytes that no doorbell has announced.
pub(crate) fn is_unannounced(number: u32) -> bool {
    let slot = slots::slot(number);
    slot.receiving().is_ok_and(|receiving| {
        receiving.is_some_and(|mut receiving| {
            let Receiving { segment, reader, .. } = &mut receiving;
            let connection = Connection::new(slot.descriptor());
            reader.ring_len(segment) != Ok(0) && !reader.is_announced(segment, &connection)
        })
    })
}

/// After everything was read: discards doorbells, and asks for the next one (`arms`), unless the connection is looked at. False if new bytes
/// have arrived since.
fn quiesce(
    slot: &Slot,
    number: u32,
    connection: &Connection,
    segment: &Segment,
    reader: &mut Reader,
    arms: bool,
) -> io::Result<bool> {
    let is_unarmed = !arms || wait::is_looked_at(slot, number);
    if is_unarmed {
        reader.discard_doorbells(segment, connection);
        keep_error(slot, reader);
        if !arms {
            return Ok(reader.ring_len(segment)? == 0);
        }
        reader.disarm(segment);
        fence(Ordering::SeqCst);
        if wait::is_looked_at(slot, number) {
            // Something that comes now is seen at the next look.
            return Ok(reader.ring_len(segment)? == 0);
        }
        // A thread has gone to sleep meanwhile.
    }
    let is_empty = reader.rearm(segment, connection, waker::wakes(number))?;
    keep_error(slot, reader);
    Ok(is_empty)
}

/// Where the next bytes of the stream are. `None` if the connection is not accelerated, or broken.
fn find(number: u32, fd: c_int) -> Option<Found> {
    let slot = slots::slot(number);
    let mut receiving = slot.receiving().ok()??;
    let Receiving { segment, reader, .. } = &mut receiving;
    let found = reader.find(segment, &Connection::of(number, fd));
    keep_error(slot, reader);
    found.ok()
}

/// True if neither the ring nor the TCP connection has bytes of the stream.
pub(crate) fn finds_nothing(number: u32, fd: c_int) -> bool {
    find(number, fd) == Some(Found::Nothing)
}

/// Whether bytes of the ring come before the next one of the TCP connection. False if the connection is not accelerated.
pub(crate) fn is_before_tcp(number: u32, fd: c_int) -> bool {
    matches!(find(number, fd), Some(Found::Ring(_)))
}

/// Bytes that a connection's receiver can have without waiting. `None` if it is not accelerated.
pub(crate) fn unread(number: u32, fd: c_int) -> Option<usize> {
    let slot = slots::slot(number);
    let mut receiving = slot.receiving().ok()??;
    let Receiving { segment, reader, .. } = &mut receiving;
    let unread = reader.unread(segment, &Connection::new(fd)).unwrap_or(0);
    keep_error(slot, reader);
    Some(unread)
}
