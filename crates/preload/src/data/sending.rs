//! Calls that send.

use super::ends::catch_up_after_plain_send;
use super::{NOT_ACCELERATED, Which, broken, check_cancelled, errno, fail, keep_error, milliseconds, waits};
use crate::relayed::{CATCH_UP_MAX, Pause, is_settled, wait_for_room};
use crate::report::{count, counters};
use crate::room::Blocked;
use crate::signals::{self, Handlers};
use crate::slots::{Receiving, Sending, Slot, phase};
use crate::tcp::Connection;
use crate::{allowance, room, slots, switch, wait, waker};
use libc::{c_int, ssize_t};
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use thruway_sockets::iovecs::Pieces;
use thruway_sockets::{Found, Over, Segment, Writer};

/// A call that sends on a connection which may be accelerated: `plain` sends the rest of the list as it is, with the same flags.
pub(crate) unsafe fn transmit(
    number: u32,
    fd: c_int,
    list: &[libc::iovec],
    flags: c_int,
    is_plain: bool,
    plain: impl Fn(&Pieces<'_>) -> ssize_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let Some(mut from) = (unsafe { Pieces::new(list) }) else { return fail(libc::EINVAL) };
    let which = Which::new(number, fd);
    let total = from.left();
    let is_plain = is_plain || total == 0;
    loop {
        if from.left() == total
            && let Some(result) = transmit_plain(which, || plain(&from))
        {
            return result;
        }
        if from.left() == total {
            check_cancelled();
        }
        // SAFETY: the caller's promise.
        match unsafe { send_accelerated(which, &mut from, total, flags, is_plain) } {
            Ok(true) => return total as ssize_t,
            Ok(false) => {}
            Err(NOT_ACCELERATED) if from.left() == total => continue,
            Err(_) if from.left() < total => return (total - from.left()) as ssize_t,
            Err(error) => return fail(error),
        }
        // By TCP in pieces, if the rest is long: the reader makes room in the ring meanwhile. A time limit is the whole call's.
        let is_whole = is_plain || from.left() > OVERFLOW && Connection::new(fd).send_limit().is_some();
        let piece = if is_whole { from } else { from.limited(OVERFLOW) };
        let result = plain(&piece);
        end_plain_send(which);
        if result > 0 {
            count(&counters().overflow_bytes, result as usize);
        }
        if is_plain {
            return result;
        }
        if result > 0 {
            from.advance(result as usize);
        }
        let is_short = result < piece.left() as ssize_t;
        if is_short || from.left() == 0 {
            let sent = total - from.left();
            return if sent > 0 { sent as ssize_t } else { result };
        }
    }
}

/// The plain call that this thread has made has ended. The connection may have been accelerated during the call.
fn end_plain_send(which: Which) {
    let is_last = which.slot.plain_sends.fetch_sub(1, Ordering::SeqCst) == 1;
    if is_last && which.slot.is_accelerated() {
        let error = errno();
        catch_up_after_plain_send(which);
        fail(error);
    }
}

/// Makes a call that sends on a connection which is not accelerated. `None` if it is.
fn transmit_plain(which: Which, plain: impl Fn() -> ssize_t) -> Option<ssize_t> {
    let Which { slot, number, fd, .. } = which;
    if slot.phase.load(Ordering::Relaxed) == phase::NEVER {
        return Some(plain());
    }
    if slot.is_accelerated() {
        return None;
    }
    slot.plain_sends.fetch_add(1, Ordering::SeqCst);
    if slot.is_accelerated() {
        slot.plain_sends.fetch_sub(1, Ordering::SeqCst);
        return None;
    }
    let result = plain();
    end_plain_send(which);
    if result > 0 && which.is_still_it() {
        switch::after_plain_call(number, fd, result as usize, true);
    }
    Some(result)
}

/// Bytes that go by TCP when the ring is full, before it is looked at again.
const OVERFLOW: usize = 256 << 10;

/// Longest total time that the non-blocking calls on a connection wait for a [`Return`](thruway_sockets::Return): returned bytes do not
/// make the connection writable. Later calls fail at once, so that a peer which never ends its return does not stop an event loop.
/// All connections share [`crate::allowance`].
const RETURN_MAX: Duration = Duration::from_millis(200);
/// Longest return by another user when the allowance is used up. During a return, `poll` may report the connection as writable, and an event
/// loop calls `send` in vain.
const RETURN_MAX_SPENT: Duration = Duration::from_millis(100);

/// Longest return; then the connection breaks.
fn return_limit(slot: &Slot) -> Duration {
    let is_spent = slot.is_others.load(Ordering::Relaxed) && !slots::allowance().has_now(allowance::STEP);
    if is_spent { RETURN_MAX_SPENT } else { CATCH_UP_MAX }
}

/// Sends through the ring as far as that is possible. False if the rest must go by TCP; then [`Slot::plain_sends`] counts this call,
/// so that no other one leaves TCP meanwhile. `total`: bytes of the whole call.
unsafe fn send_accelerated(
    which: Which,
    from: &mut Pieces<'_>,
    total: usize,
    flags: c_int,
    is_plain: bool,
) -> Result<bool, c_int> {
    let Which { slot, number, fd, .. } = which;
    let connection = Connection::new(fd);
    // When this first waited for TCP to take what is owed to a reader that has closed the ring.
    let mut begin = None;
    let (mut has_waited, mut has_entered) = (false, false);
    let mut pause = Pause::default();
    // When this first waited for room.
    let (mut waits_since, mut is_patient) = (None, None);
    match slot.error.swap(0, Ordering::Relaxed) {
        0 => {}
        error => return Err(error),
    }
    loop {
        let sending = slot.sending()?;
        if !which.is_still_it() {
            return Err(libc::EBADF);
        }
        let mut sending = sending.ok_or(NOT_ACCELERATED)?;
        let Sending { segment, writer, .. } = &mut sending;
        let failed = |error: &io::Error| broken(slot, fd, error);
        if segment.is_relayed() && segment.over() == Over::Lost {
            return Err(libc::ECONNRESET);
        }
        let is_alone = slot.plain_sends.load(Ordering::SeqCst) == 0;
        if is_alone && !writer.send_again(segment, &connection).map_err(|error| failed(&error))? {
            let awaits = writer.awaits_return();
            if awaits && is_peer_gone(connection, segment, writer) {
                // The TCP call reports the peer's end.
                slot.plain_sends.fetch_add(1, Ordering::SeqCst);
                return Ok(false);
            }
            drop(sending);
            let waited = begin.get_or_insert_with(Instant::now).elapsed();
            if awaits && waited.max(returns_for(slot)) >= return_limit(slot) {
                return Err(broken(slot, fd, &io::ErrorKind::TimedOut.into()));
            }
            let limit = connection.send_limit();
            let left = limit.map_or(Duration::from_secs(1), |limit| limit.saturating_sub(waited));
            let is_impatient = flags & libc::MSG_DONTWAIT != 0 || !waits(fd);
            let returned_for = Duration::from_millis(slot.returned_for.load(Ordering::Relaxed).into());
            let may_wait = || allowance::may_wait(slot, allowance::STEP);
            if left.is_zero() || is_impatient && !(awaits && returned_for < RETURN_MAX && may_wait()) {
                return Err(libc::EAGAIN);
            }
            // `poll` may have reported the connection as writable.
            if awaits && !is_impatient && !may_wait() {
                return Err(broken(slot, fd, &io::ErrorKind::TimedOut.into()));
            }
            let most = if is_impatient { RETURN_MAX - returned_for } else { Duration::from_secs(1) };
            let before = Instant::now();
            // As in the kernel: a call with a time limit is not begun again behind a signal handler.
            let is_over = !is_impatient && (limit.is_some() || signals::handlers() != Handlers::Restart);
            if !connection.wait_to_send_again(awaits, left.min(most)) && is_over {
                return Err(libc::EINTR);
            }
            if is_impatient {
                let milliseconds = before.elapsed().as_millis() as u32;
                slot.returned_for.fetch_add(milliseconds.max(1), Ordering::Relaxed);
            }
            continue;
        }
        if slot.returns_since.load(Ordering::Relaxed) != 0 {
            slot.returns_since.store(0, Ordering::Relaxed);
        }
        if writer.is_tcp() && is_alone && !is_plain {
            writer.leave_tcp(segment, &connection).map_err(|error| failed(&error))?;
        }
        if !writer.is_tcp() {
            let is_gone = writer.is_reader_gone(segment) || looks_gone(slot, connection, segment, writer);
            if is_gone || is_plain {
                if !is_settled(&sending, fd, &mut pause) {
                    drop(sending);
                    pause.settle_down(slot, fd, CATCH_UP_MAX)?;
                    pause.check_signals(from.left() < total)?;
                    continue;
                }
                let Sending { segment, writer, .. } = &mut sending;
                // What is owed to a reader that has closed the ring goes first.
                writer.enter_tcp(segment, &connection, is_gone).map_err(|error| failed(&error))?;
                has_entered = true;
                continue;
            }
        }
        if writer.is_tcp() {
            slot.plain_sends.fetch_add(1, Ordering::SeqCst);
            if has_entered {
                drop(sending);
                take_doorbells(slot, number, &connection);
            }
            return Ok(false);
        }
        // SAFETY: the caller's promise.
        let sent = unsafe { writer.write(segment, &connection, from) }.map_err(|error| failed(&error.into()))?;
        count(&counters().ring_bytes, sent);
        if sent > 0 {
            pause.restart();
        }
        if from.left() == 0 {
            count(&counters().ring_sends, 1);
            switch::after_ring_call(slot);
            return Ok(true);
        }
        // The ring is full, or closed. If the reader is at work there is room soon, else TCP takes the rest, unless there is a relay.
        if writer.is_closed_by_reader(segment) {
            continue;
        }
        let is_impatient = flags & libc::MSG_DONTWAIT != 0;
        // Once for the call: another thread may change it.
        if segment.is_relayed() && *is_patient.get_or_insert_with(|| !is_impatient && waits(fd)) {
            drop(sending);
            let left = left_of(connection.send_limit(), &mut waits_since);
            wait_for_room(slot, fd, from.left(), from.left() < total, left)?;
            continue;
        }
        if has_waited && sent == 0 && segment.is_relayed() {
            drop(sending);
            match room::block(number, fd) {
                Blocked::Yes => return Err(libc::EAGAIN),
                Blocked::Room => continue,
                Blocked::Never => {}
            }
            sending = slot.sending()?.ok_or(NOT_ACCELERATED)?;
            if !which.is_still_it() {
                return Err(libc::EBADF);
            }
        }
        if has_waited && sent == 0 {
            if !is_settled(&sending, fd, &mut pause) {
                drop(sending);
                pause.settle_down(slot, fd, CATCH_UP_MAX)?;
                pause.check_signals(from.left() < total)?;
                continue;
            }
            let Sending { segment, writer, .. } = &mut sending;
            writer.enter_tcp(segment, &connection, false).map_err(|error| failed(&error))?;
            has_entered = true;
            room::give_up(number);
            continue;
        }
        drop(sending);
        let wanted = from.left();
        has_waited = !wait::spin_for_room(is_impatient, || has_room(slot, wanted));
    }
}

/// Discards the doorbells of bytes that the program has received, before it sends by TCP. If the process ended later without a call of this
/// library, the kernel would reset the connection because of these doorbells, and drop unsent bytes.
fn take_doorbells(slot: &Slot, number: u32, connection: &Connection) {
    // A thread may sleep until it sees the doorbell.
    if slot.sleepers.load(Ordering::SeqCst) > 0 {
        return;
    }
    let Some(mut receiving) = slot.try_receiving() else { return };
    let Receiving { segment, reader, .. } = &mut receiving;
    if reader.has_doorbells(segment) && reader.find(segment, connection) == Ok(Found::Nothing) {
        let _ = reader.rearm(segment, connection, waker::wakes(number));
        keep_error(slot, reader);
        drop(receiving);
        wait::note_drained(number);
    }
}

/// What a time limit of a call that waits leaves.
fn left_of(limit: Option<Duration>, since: &mut Option<Instant>) -> Option<Duration> {
    let waited = since.get_or_insert_with(Instant::now).elapsed();
    limit.map(|limit| limit.saturating_sub(waited))
}

/// Whether a call that sends may have found no room: it goes by TCP now.
pub(crate) fn may_have_blocked(slot: &Slot) -> bool {
    !matches!(slot.sending(), Ok(Some(sending)) if !sending.writer.is_tcp())
}

pub(crate) fn has_room(slot: &Slot, wanted: usize) -> bool {
    match slot.sending() {
        Ok(Some(mut sending)) => {
            let Sending { segment, writer, .. } = &mut sending;
            writer.is_tcp() || writer.has_room(segment, wanted) != Ok(false)
        }
        _ => true,
    }
}

/// Whether a peer that does not read has gone: a process that was killed has not said so. Asks the kernel once in a millisecond.
fn looks_gone(slot: &Slot, connection: Connection, segment: &Segment, writer: &Writer) -> bool {
    if writer.unread(segment) == 0 {
        return false;
    }
    let now = milliseconds();
    if slot.looked_at.swap(now, Ordering::Relaxed) == now {
        return false;
    }
    is_peer_gone(connection, segment, writer)
}

/// Time since the start of the peer's return of bytes.
fn returns_for(slot: &Slot) -> Duration {
    // 0 means that there is no return.
    let now = milliseconds().max(1);
    let since = match slot.returns_since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => now,
        Err(since) => since,
    };
    Duration::from_millis(now.wrapping_sub(since).into())
}

fn is_peer_gone(connection: Connection, segment: &Segment, writer: &Writer) -> bool {
    // A peer that has ended its own direction only goes on reading.
    let is_half_open = libc::EPOLLRDHUP as u32;
    match connection.ends() {
        0 => false,
        ends if ends == is_half_open => !writer.is_peer_ended(segment),
        _ => true,
    }
}

/// Reads a file straight into the ring, for `sendfile`: as far as there is room, or to the file's end. The bytes, and whether the file
/// has no more or cannot be read; else the rest must go by TCP, so that it is TCP which has no room. `EINTR` if a signal has ended the call
/// before anything was sent, `EAGAIN` if a time limit has, or the call does not wait and there is no room.
pub(crate) fn send_from_file(
    number: u32,
    fd: c_int,
    len: usize,
    mut read: impl FnMut(*mut u8, usize) -> ssize_t,
) -> Result<(usize, bool), c_int> {
    let which = Which::new(number, fd);
    let slot = which.slot;
    let connection = Connection::new(fd);
    let (mut sum, mut waits_since, mut is_patient) = (0, None, None);
    while sum < len {
        let Ok(Some(mut sending)) = slot.sending() else { break };
        if !which.is_still_it() {
            return if sum > 0 { Ok((sum, true)) } else { Err(libc::EBADF) };
        }
        if slot.plain_sends.load(Ordering::SeqCst) > 0 {
            break;
        }
        let Sending { segment, writer, .. } = &mut sending;
        let is_over = writer.is_reader_gone(segment) || writer.is_closed_by_reader(segment);
        if !writer.leave_tcp(segment, &connection).unwrap_or(false) || is_over {
            break;
        }
        let Ok((at, room)) = writer.free_span(segment, len - sum) else { break };
        if room == 0 {
            let is_relayed = segment.is_relayed();
            drop(sending);
            let found = if is_relayed && *is_patient.get_or_insert_with(|| waits(fd)) {
                let left = left_of(connection.send_limit(), &mut waits_since);
                wait_for_room(slot, fd, len - sum, sum > 0, left)
            } else if wait::spin_for_room(false, || has_room(slot, len - sum)) {
                Ok(())
            } else {
                match room::block(number, fd) {
                    Blocked::Yes => Err(libc::EAGAIN),
                    Blocked::Room => Ok(()),
                    Blocked::Never => break,
                }
            };
            match found {
                Ok(()) => continue,
                Err(_) if sum > 0 => return Ok((sum, true)),
                Err(error) => return Err(error),
            }
        }
        let got = read(at, room);
        if got <= 0 {
            return Ok((sum, true));
        }
        if !writer.commit(segment, &connection, got as usize) {
            // The reader has closed the ring: these bytes are sent again, by TCP.
            break;
        }
        sum += got as usize;
        count(&counters().ring_bytes, got as usize);
    }
    Ok((sum, false))
}
