//! What a connection goes through before an end of it: it is shut down, closed, or left to TCP.

use super::{Which, code, keep_error, keep_reset, reset};
use crate::allowance::Wait;
use crate::relayed::{CATCH_UP_MAX, Pause, at_end, closing_time, is_settled, take_tcp_back};
use crate::report::{count, counters};
use crate::slots::{self, Receiving, Sending, Slot};
use crate::tcp::Connection;
use crate::{room, switch};
use libc::c_int;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use thruway_sockets::{Found, Over, Reader, Return, Segment, Step, WakeBy};

/// Longest time that a call which closes waits for doorbells that the kernel has not delivered yet.
const DOORBELLS_MAX: Duration = Duration::from_millis(20);

/// Before the last descriptor of a connection is closed: doorbells that nothing has read would have the kernel reset it, and bytes in
/// the ring that nothing has read would not. `is_exit`: the process is about to end, and its threads may send by plain TCP until then.
pub(crate) fn settle(slot: &Slot, fd: c_int, mut receiving: Receiving<'_>, is_exit: bool) {
    let connection = Connection::new(fd);
    let is_shared = slot.is_foreign.load(Ordering::SeqCst) || slot.was_shared.load(Ordering::SeqCst);
    let is_carried = receiving.segment.is_relayed() && receiving.segment.over() == Over::No;
    let may_leave = is_carried && !is_shared && !is_exit && !connection.lingers();
    if may_leave {
        // The relay may end its part as soon as it knows that the reader has gone.
        receiving.segment.leave_tcp();
    }
    receiving.reader.set_gone(&receiving.segment, &connection);
    let has_all = honour_before_end(slot, fd);
    if !has_all {
        connection.reset_at_close();
    }
    let may_leave = may_leave && has_all && receiving.segment.over() == Over::No;
    let is_left = may_leave && receiving.reader.find(&receiving.segment, &connection) == Ok(Found::Nothing);
    if is_left {
        // The relay closes it later: a doorbell that is on its way would meet a closed socket, and reset the connection. Once the relay knows
        // of the end, it may have closed it.
        connection.end_sending();
    }
    if let Ok(Some(sending)) = slot.sending() {
        sending.writer.set_ended(&sending.segment, &connection);
    }
    let Receiving { segment, reader, .. } = &mut receiving;
    match reader.find(segment, &connection) {
        Ok(Found::Ring(_)) => connection.reset_at_close(),
        Ok(Found::Nothing) => discard_all_doorbells(slot, &connection, segment, reader),
        _ => {}
    }
    if !is_left {
        take_tcp_back(segment, fd);
    }
}

/// Before the last descriptor of this process is closed, while the connection counts as shared with other processes. These may have been
/// killed. Then the kernel would reset the connection because of unread doorbells, and drop unsent bytes.
pub(crate) fn settle_shared(slot: &Slot, fd: c_int, mut receiving: Receiving<'_>) {
    let connection = Connection::new(fd);
    let _ = honour_before_end(slot, fd);
    let Receiving { segment, reader, .. } = &mut receiving;
    // A thread of another process may sleep until it sees the doorbell.
    if slot.sleepers.load(Ordering::SeqCst) == 0 && reader.find(segment, &connection) == Ok(Found::Nothing) {
        let mut wait = Wait::new(slot, DOORBELLS_MAX);
        while !segment.is_relayed() && !reader.has_all_doorbells(segment, &connection) && wait.go_on() {
            std::thread::yield_now();
        }
        let _ = reader.rearm(segment, &connection, WakeBy::Doorbell);
    }
}

/// Before the last process that reads a connection by this library becomes another program: discards doorbells, and asks the peer for no more. If the
/// process goes on nevertheless, the connection goes by TCP.
pub(crate) fn leave(slot: &Slot, fd: c_int) {
    let connection = Connection::new(fd);
    let Ok(Some(receiving)) = slot.receiving() else { return };
    receiving.reader.set_gone(&receiving.segment, &connection);
    settle_shared(slot, fd, receiving);
    if let Ok(Some(sending)) = slot.sending() {
        sending.writer.set_ended(&sending.segment, &connection);
    }
}

/// Discards doorbells, also those that the kernel has not delivered yet.
fn discard_all_doorbells(slot: &Slot, connection: &Connection, segment: &Segment, reader: &mut Reader) {
    let mut wait = Wait::new(slot, DOORBELLS_MAX);
    reader.discard_doorbells(segment, connection);
    while !segment.is_relayed() && reader.has_doorbells(segment) && wait.go_on() {
        std::thread::yield_now();
        // Discards doorbells before a run that has begun since.
        let _ = reader.find(segment, connection);
        reader.discard_doorbells(segment, connection);
    }
}

/// Has what the program sends go by TCP, before a call that only the kernel can do.
pub(crate) fn enter_tcp(slot: &Slot, fd: c_int, for_good: bool) -> Result<(), c_int> {
    enter_tcp_while(slot, fd, for_good, CATCH_UP_MAX, || slot.has(fd))
}

/// Before a connection ends here.
pub(crate) fn enter_tcp_at_end(slot: &Slot, fd: c_int) {
    // What cannot come to the other end any more is an error there.
    let _ = enter_tcp_while(slot, fd, true, at_end(CATCH_UP_MAX), || slot.has(fd));
}

/// As [`enter_tcp`]. `is_it` returns true while the descriptor belongs to the connection; afterwards, nothing is done.
fn enter_tcp_while(
    slot: &Slot,
    fd: c_int,
    for_good: bool,
    limit: Duration,
    is_it: impl Fn() -> bool,
) -> Result<(), c_int> {
    let mut pause = Pause::default();
    loop {
        let Some(mut sending) = slot.sending()? else { return Ok(()) };
        if !is_it() {
            return Ok(());
        }
        if !is_settled(&sending, fd, &mut pause) {
            drop(sending);
            pause.settle_down(slot, fd, limit)?;
            continue;
        }
        let Sending { segment, writer, .. } = &mut sending;
        let result = writer.enter_tcp(segment, &Connection::new(fd), for_good).map_err(|error| code(&error));
        drop(sending);
        if let Some(number) = slots::find(fd) {
            room::give_up(number);
        }
        return result;
    }
}

/// The program shuts down these directions: 1 receiving, 2 sending.
pub(crate) fn before_shutdown(slot: &Slot, fd: c_int, directions: u8) {
    let shut = slot.shut.fetch_or(directions, Ordering::SeqCst) | directions;
    let connection = Connection::new(fd);
    if !slot.is_accelerated() {
        if let Some(number) = slots::find(fd) {
            switch::give_up_before_end(number, fd);
        }
        return;
    }
    if directions & 2 != 0 {
        // What comes behind goes nowhere, and TCP says so.
        let _ = enter_tcp(slot, fd, true);
        if !honour_before_end(slot, fd) {
            reset(slot, fd);
        }
        if let Ok(Some(sending)) = slot.sending() {
            sending.writer.set_ended(&sending.segment, &connection);
        }
    }
    if shut == 3
        && let Ok(Some(receiving)) = slot.receiving()
    {
        // TCP resets a connection on which something comes now.
        receiving.reader.set_gone(&receiving.segment, &connection);
    }
}

/// Answers a call of the peer. If the peer has handed its end to a program that reads plain TCP, sends unread bytes of the ring again; false if
/// TCP has no room for all of them yet. If the peer has asked for a doorbell, rings.
pub(crate) fn answer_peer(slot: &Slot, fd: c_int) -> bool {
    let Ok(Some(sending)) = slot.sending() else { return true };
    answer_by(slot, fd, sending)
}

/// As [`answer_peer`], for all connections of this process.
pub(crate) fn answer_all_peers() {
    if slots::is_in_borrowed_memory() {
        // The parent's descriptors may be others by now.
        return;
    }
    slots::each(|number, fd| _ = answer_peer(slots::slot(number), fd));
}

/// As [`answer_peer`], in a call that has no descriptor of the connection from the program: another thread may close one meanwhile.
pub(crate) fn answer_peer_unasked(slot: &Slot) -> bool {
    let Ok(Some(sending)) = slot.sending() else { return true };
    answer_by(slot, slot.descriptor(), sending)
}

fn answer_by(slot: &Slot, fd: c_int, mut sending: Sending<'_>) -> bool {
    if !slot.has(fd) {
        return true;
    }
    let Sending { segment, writer, .. } = &mut sending;
    writer.answer(segment, &Connection::new(fd));
    if !writer.is_closed_by_reader(segment) || slot.plain_sends.load(Ordering::SeqCst) > 0 {
        return true;
    }
    let result = writer.send_again(segment, &Connection::new(fd));
    let has_sent = !matches!(result, Ok(false)) || writer.awaits_return();
    drop(sending);
    if let Err(error) = result {
        keep_reset(slot, code(&error));
    }
    has_sent
}

/// Longest wait for the peer when a connection ends, and longest sleep during it.
const PEER_MAX: Duration = Duration::from_secs(2);
const STEP: Duration = Duration::from_millis(100);

/// As [`answer_peer`], before the connection is closed or handed over: for two seconds at most. False if the reader has not been sent
/// all of it by then: what follows must not look like the end.
fn honour_before_end(slot: &Slot, fd: c_int) -> bool {
    honour_while(slot, fd, || true)
}

/// As [`honour_before_end`], true as soon as `is_wanted` is false.
fn honour_while(slot: &Slot, fd: c_int, is_wanted: impl Fn() -> bool) -> bool {
    let connection = Connection::new(fd);
    let mut wait = Wait::new(slot, PEER_MAX);
    loop {
        let Ok(Some(mut sending)) = slot.sending() else { return true };
        if !is_wanted() {
            return true;
        }
        let Sending { segment, writer, .. } = &mut sending;
        match writer.send_again(segment, &connection) {
            Ok(false) => {}
            Ok(true) => return true,
            Err(error) => {
                keep_reset(slot, code(&error));
                return true;
            }
        }
        let awaits = writer.awaits_return();
        drop(sending);
        if !wait.go_on() {
            return false;
        }
        connection.wait_to_send_again(awaits, STEP);
    }
}

/// Wakes a peer that may wait for an answer, so that it takes notice of a ring that is closed, or of returned bytes. False if it has unread
/// bytes, and so cannot be sent a doorbell: it takes notice when it reads these.
fn call_peer(slot: &Slot, fd: c_int) -> bool {
    let Ok(Some(sending)) = slot.sending() else { return true };
    call_by(slot, fd, sending)
}

fn call_by(slot: &Slot, fd: c_int, mut sending: Sending<'_>) -> bool {
    if !slot.has(fd) {
        return true;
    }
    let connection = Connection::new(fd);
    let Sending { segment, writer, .. } = &mut sending;
    // On a direction that goes by TCP, a doorbell would be data.
    if writer.is_tcp() && slot.plain_sends.load(Ordering::SeqCst) == 0 {
        let _ = writer.leave_tcp(segment, &connection);
    }
    writer.call(segment, &connection);
    !writer.is_tcp()
}

/// Asks the peer to ring for bytes that are in the ring already, because another process waits for them in the kernel. Within a host.
pub(crate) fn ask_for_doorbell(number: u32) {
    let slot = slots::slot(number);
    match slot.receiving() {
        Ok(Some(receiving)) if !receiving.segment.is_relayed() => receiving.reader.ask(&receiving.segment),
        _ => return,
    }
    if let Ok(Some(sending)) = slot.sending() {
        call_by(slot, slot.descriptor(), sending);
    }
}

/// Number of attempts to call a peer, and the time between them: a peer that has just read the last bytes may not have seen yet that the
/// ring is closed, and this process may not have seen yet that they were read.
const CALLS: usize = 3;
const BETWEEN_CALLS: Duration = Duration::from_micros(50);

/// Longest wait for plain calls that send. Most of them take microseconds, unless the kernel has stopped their threads.
const PLAIN_SENDS_MAX: Duration = Duration::from_millis(100);

/// Waits for plain calls that send, during which the peer cannot be called. Does not wait for a call that the kernel keeps because the
/// connection is full: then the peer has unread bytes, which wake it.
fn wait_for_plain_sends(which: Which) {
    let (slot, mut wait) = (which.slot, Wait::new(which.slot, PLAIN_SENDS_MAX));
    while slot.plain_sends.load(Ordering::SeqCst) > 0
        && which.is_still_it()
        && Connection::new(which.fd).poll() & libc::EPOLLOUT as u32 != 0
        && wait.go_on()
    {
        std::thread::yield_now();
    }
}

/// Calls and answers the peer after the last of the plain calls that send: other threads cannot do that during such a call.
pub(super) fn catch_up_after_plain_send(which: Which) {
    if let Ok(Some(sending)) = which.slot.sending()
        && which.is_still_it()
        && sending.writer.has_peer_called(&sending.segment)
    {
        answer_by(which.slot, which.fd, sending);
    }
    if let Ok(Some(sending)) = which.slot.sending()
        && which.is_still_it()
        && sending.writer.has_asked(&sending.segment)
    {
        call_by(which.slot, which.fd, sending);
    }
    make_owed_call(which);
}

/// Makes the call that [`call_peer_after_closing`] could not make. Then the connection goes by TCP for good.
fn make_owed_call(which: Which) {
    let slot = which.slot;
    if !slot.owes_call.load(Ordering::SeqCst) {
        return;
    }
    if let Ok(Some(sending)) = slot.sending()
        && which.is_still_it()
    {
        call_by(slot, which.fd, sending);
        // Not before: another thread would enter TCP for good, and the peer could not be called any more.
        slot.owes_call.store(false, Ordering::SeqCst);
        let _ = enter_tcp_while(slot, which.fd, true, at_end(CATCH_UP_MAX), || which.is_still_it());
    }
}

/// As [`call_peer`], after the ring was closed. While a plain call that sends is in progress, leaves it to the thread that makes that call.
fn call_peer_after_closing(which: Which) {
    // A call that is owed already has waited in vain: a process that was killed inside a send stays counted.
    if !which.slot.owes_call.load(Ordering::SeqCst) {
        wait_for_plain_sends(which);
    }
    for _ in 0..CALLS {
        let Ok(Some(sending)) = which.slot.sending() else { return };
        // A direction that goes by TCP for good has no doorbells.
        if !which.is_still_it() || sending.writer.is_pinned() || call_by(which.slot, which.fd, sending) {
            return;
        }
        std::thread::sleep(BETWEEN_CALLS);
    }
    let Ok(Some(sending)) = which.slot.sending() else { return };
    if !which.is_still_it() {
        return;
    }
    which.slot.owes_call.store(true, Ordering::SeqCst);
    drop(sending);
    // A thread that ends such a call from here on sees this.
    if which.slot.plain_sends.load(Ordering::SeqCst) == 0 {
        make_owed_call(which);
    }
}

/// Longest time between two calls of a peer that does not act.
const CALLS_MAX: Duration = Duration::from_millis(64);

/// Has the peer send all unread bytes again by TCP, after the ring was closed where bytes of it precede others on the TCP connection. False
/// if it cannot, or does nothing for two seconds.
fn return_unread(slot: &Slot, fd: c_int, receiving: &mut Receiving<'_>) -> bool {
    let connection = Connection::new(fd);
    let mut bytes = Return::default();
    let (mut called, mut apart) = (None::<Instant>, Duration::from_millis(1));
    let mut wait = Wait::new(slot, PEER_MAX);
    let is_others = slot.is_others.load(Ordering::Relaxed);
    loop {
        let Receiving { segment, reader, .. } = &mut *receiving;
        // Before the step: a peer may end as soon as it has sent all bytes again.
        let has_ended = connection.ends() != 0;
        let step = bytes.step(reader, segment, &connection);
        keep_error(slot, reader);
        let Ok(step) = step else { return false };
        match step {
            Step::Done => return true,
            // For another user the limit also applies to a peer that makes progress.
            Step::Moved if !is_others => {
                (wait, apart) = (Wait::new(slot, PEER_MAX), Duration::from_millis(1));
            }
            // A peer that sends goes on when the next reader has made room.
            Step::Returned if wait.elapsed() >= STEP => return true,
            _ => {}
        }
        if (is_others || step != Step::Moved) && !wait.go_on() {
            return false;
        }
        // After its end, a peer sends nothing again.
        if has_ended {
            return false;
        }
        if called.is_none_or(|called| called.elapsed() >= apart) {
            call_peer(slot, fd);
            (called, apart) = (Some(Instant::now()), (apart * 2).min(CALLS_MAX));
            // The peer may be in this process, and may return bytes of the other direction at the same time.
            answer_all_peers();
        }
        std::thread::yield_now();
    }
}

/// Has the whole connection go by plain TCP from here on, because something will use it that knows nothing of rings. Returns the number of
/// bytes that are out of order on the TCP connection: the library reads them in order, other programs do not.
pub(crate) fn demote(slot: &Slot, fd: c_int) -> usize {
    demote_for(slot, fd, Unread::Stays).unwrap_or(0)
}

/// As [`demote`], unless the ring has unread bytes, which a call may have reported: the peer would have to send them again. False if so.
pub(crate) fn demote_if_read(slot: &Slot, fd: c_int) -> bool {
    demote_for(slot, fd, Unread::Keeps).is_some()
}

/// As [`demote`], before something reads the TCP connection by itself: has the peer send again bytes that are out of order there.
pub(crate) fn demote_for_reading(slot: &Slot, fd: c_int) -> usize {
    demote_for(slot, fd, Unread::Returns).unwrap_or(0)
}

/// Effect of unread bytes of the ring when a connection is given up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unread {
    /// The library reads them in order.
    Stays,
    /// The peer sends them again in order.
    Returns,
    /// The connection stays accelerated.
    Keeps,
}

/// `None` if the connection stays accelerated.
fn demote_for(slot: &Slot, fd: c_int, unread: Unread) -> Option<usize> {
    let connection = Connection::new(fd);
    // Checked before each step: another thread may close the descriptor, and a new connection may reuse slot and descriptor.
    let which = Which::new(slot.number(), fd);
    let mut left = 0;
    if let Ok(Some(mut receiving)) = slot.receiving() {
        if !which.is_still_it() {
            return None;
        }
        let Receiving { segment, reader, .. } = &mut receiving;
        let (mut pause, mut wait, limit) = (Pause::default(), None, closing_time(segment));
        let patience = || {
            let goes_on = wait.get_or_insert_with(|| Wait::new(slot, limit)).go_on() && pause.pass(limit);
            pause.look(segment, fd);
            goes_on
        };
        let closed = match unread {
            Unread::Keeps => reader.close_empty_ring(segment, &connection, patience).transpose(),
            _ => Some(reader.close_ring(segment, &connection, patience)),
        };
        left = closed?.unwrap_or(usize::MAX);
        // The wait ends here.
        drop(wait);
        let is_here = !segment.is_relayed() && left != usize::MAX;
        if left > 0 && unread == Unread::Returns && is_here && return_unread(slot, fd, &mut receiving) {
            left = 0;
        }
        if left > 0 && unread == Unread::Returns {
            // Another thread or process must not take what the TCP connection has for all.
            keep_reset(slot, libc::ECONNRESET);
        }
    }
    count(&counters().demoted, 1);
    // How long it lasts is not counted from here on, and says nothing of others.
    slot.service.store(0, Ordering::Relaxed);
    call_peer_after_closing(which);
    // What cannot come to the other end any more is an error there.
    let for_good = !slot.owes_call.load(Ordering::SeqCst);
    let _ = enter_tcp_while(slot, fd, for_good, at_end(CATCH_UP_MAX), || which.is_still_it());
    // A thread inside a plain call that sends does that afterwards: its bytes come first.
    let is_alone = || which.is_still_it() && slot.plain_sends.load(Ordering::SeqCst) == 0;
    if !honour_while(slot, fd, is_alone) && which.is_still_it() {
        reset(slot, fd);
    }
    let receiving = slot.receiving().ok().flatten();
    if which.is_still_it() {
        connection.restore_options(slot);
        if let Some(receiving) = receiving {
            take_tcp_back(&receiving.segment, fd);
        }
    }
    Some(left)
}
