//! Calls that send and receive, on connections that are accelerated.
//!
//! A thread that has to wait sleeps in the kernel, in `recv` on the connection itself: so time limits, signals, the peer's end and what
//! other threads do to the descriptor are the kernel's business, as without acceleration. Before, it asks the peer for a doorbell.

use crate::lock::Reentered;
use crate::relayed::{
    CATCH_UP_MAX, Pause, at_end, catch_up, closing_time, is_all_here, is_lost, is_settled, take_tcp_back, wait_for_room,
};
use crate::report::{Reason, count, counters, stays};
use crate::room::Blocked;
use crate::signals::{self, Handlers};
use crate::slots::{self, Receiving, Sending, Slot, phase};
use crate::tcp::Connection;
use crate::{SETTINGS, real, relay, room, switch, wait, waker};
use libc::{c_int, ssize_t};
use std::io;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};
use thruway_sockets::iovecs::Pieces;
use thruway_sockets::{Found, Over, PEEK_MAX, Reader, Segment, Writer};

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
        let which = Which::new(number, fd);
        let result = if flags & libc::MSG_TRUNC != 0 {
            discard(which, to.left(), flags)
        } else {
            // SAFETY: the caller's promise.
            unsafe { receive_accelerated(which, &mut to, flags, &mut None) }
        };
        match result {
            Ok(len) => return len as ssize_t,
            Err(NOT_ACCELERATED) => {}
            Err(error) => return fail(error),
        }
    }
}

/// No error of the kernel's: the connection is not accelerated after all, and nothing of the call has been done.
const NOT_ACCELERATED: c_int = -1;

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

/// Bytes that are counted without being taken, at most: more than a ring and what [`Reader::peek`] sees of TCP.
const COUNTED_MAX: usize = 8 << 20;

/// `MSG_TRUNC`: bytes are taken and thrown away; with `MSG_PEEK`, only counted.
fn discard(which: Which, mut left: usize, flags: c_int) -> Result<usize, c_int> {
    if flags & libc::MSG_PEEK != 0 {
        let mut sink = vec![0u8; left.min(COUNTED_MAX)];
        let list = [libc::iovec { iov_base: sink.as_mut_ptr().cast(), iov_len: sink.len() }];
        // SAFETY: a buffer of ours.
        let Some(mut to) = (unsafe { Pieces::new(&list) }) else { return Ok(0) };
        // SAFETY: as above.
        return unsafe { receive_accelerated(which, &mut to, flags, &mut None) };
    }
    let mut sum = 0;
    let mut began = None;
    let mut sink = [0u8; 4096];
    while left > 0 {
        let list = [libc::iovec { iov_base: sink.as_mut_ptr().cast(), iov_len: left.min(sink.len()) }];
        // SAFETY: an array of ours.
        let Some(mut to) = (unsafe { Pieces::new(&list) }) else { break };
        let waits_for_all = flags & libc::MSG_WAITALL != 0;
        let flags = if sum > 0 && !waits_for_all { flags | libc::MSG_DONTWAIT } else { flags };
        let wanted = to.left();
        // SAFETY: as above.
        match unsafe { receive_accelerated(which, &mut to, flags, &mut began) } {
            Ok(len) => {
                sum += len;
                left -= len;
                if len == 0 || len < wanted && waits_for_all {
                    break;
                }
            }
            Err(error) if sum > 0 => {
                if !matches!(error, libc::EAGAIN | libc::EINTR | NOT_ACCELERATED) {
                    which.slot.error.store(error, Ordering::Relaxed);
                }
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(sum)
}

/// `began`: when the call had to wait, if it had to before.
unsafe fn receive_accelerated(
    which: Which,
    to: &mut Pieces<'_>,
    flags: c_int,
    began: &mut Option<Instant>,
) -> Result<usize, c_int> {
    let Which { slot, number, fd, .. } = which;
    if to.left() == 0 {
        return Ok(0);
    }
    let (is_peek, waits_for_all) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
    let connection = Connection::of(number, fd);
    let mut sum = 0;
    // The kernel has said that there is something.
    let mut woken = 0u32;
    // More of a connection that goes by TCP cannot be seen at a time.
    let peeks_all = is_peek && waits_for_all && flags & libc::MSG_DONTWAIT == 0 && to.left() <= PEEK_MAX;
    let (all, mut more) = (*to, None);
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
        let Receiving { segment, reader, .. } = &mut receiving;
        // SAFETY: the caller's promise.
        let read = unsafe {
            if is_peek { reader.peek(segment, &connection, to) } else { reader.read(segment, &connection, to) }
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
        let is_done = to.left() == 0 || is_peek && sum > 0;
        if is_done && peeks_all && to.left() > 0 && more != Some(false) && waits(fd) {
            drop(receiving);
            more = Some(wait_for_more(slot, fd, *began.get_or_insert_with(Instant::now)));
            (*to, sum) = (all, 0);
            continue;
        }
        if is_done {
            count(&counters().ring_receives, 1);
            switch::after_ring_call(slot);
            // What does not look by itself keeps the doorbell until a call has found nothing: something may come just now.
            if !is_peek && wait::looks_by_itself(slot, number) && reader.ring_len(segment) == Ok(0) {
                let _ = quiesce(slot, number, &connection, segment, reader);
                drop(receiving);
                wait::note_drained(number);
            }
            return Ok(sum);
        }
        let is_drained = match quiesce(slot, number, &connection, segment, reader) {
            Ok(is_drained) => is_drained,
            Err(error) => {
                drop(receiving);
                return Err(broken(slot, fd, &error));
            }
        };
        if sum > 0 && is_drained && !waits_for_all {
            count(&counters().ring_receives, 1);
            switch::after_ring_call(slot);
            drop(receiving);
            wait::note_drained(number);
            return Ok(sum);
        }
        if !is_drained || before != to.left() {
            continue;
        }
        let pending = slot.error.load(Ordering::Relaxed);
        if pending != 0 {
            if sum == 0 {
                slot.error.store(0, Ordering::Relaxed);
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
        if woken > 0 && !is_peek {
            // SAFETY: the caller's promise.
            let read = unsafe { reader.read_unexpected(segment, &connection, to) };
            keep_error(slot, reader);
            match read {
                Ok(0) => {}
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
                return if sum > 0 { Ok(sum) } else { Err(libc::EAGAIN) };
            }
            std::thread::yield_now();
        }
        honour_closed_ring(slot, fd);
        wait::note_drained(number);
        if flags & libc::MSG_DONTWAIT == 0 && wait::spin(slot, || is_readable(slot)) {
            continue;
        }
        // A limit is one of the call, which may sleep more than once. The first sleep is the kernel's to end.
        let left = began.filter(|_| flags & libc::MSG_DONTWAIT == 0 && waits(fd));
        began.get_or_insert_with(Instant::now);
        let left = left.and_then(|began| Some(connection.receive_limit()?.saturating_sub(began.elapsed())));
        match sleep(which, flags, left) {
            Ok(true) => woken += 1,
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
                let has_more = is_readable(slot);
                let is_of_the_call = matches!(error, libc::EINTR | libc::EAGAIN | libc::EBADF);
                if !is_of_the_call && (has_more || sum > 0) {
                    // It comes behind what there is.
                    slot.error.store(error, Ordering::Relaxed);
                }
                match error {
                    // A process that was killed has left a doorbell, and nothing else.
                    libc::ECONNRESET if !has_more && was_killed(slot) && !is_lost(slot) && !has_lost(slot) => {
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
/// `left` at most; without that, for as long as the program's time limit says.
fn sleep(which: Which, flags: c_int, left: Option<Duration>) -> Result<bool, c_int> {
    let Which { slot, number, fd, .. } = which;
    let connection = Connection::new(fd);
    let waker = waker::of(number);
    // Where the relay has no descriptor to wake it by, it has gone one day nevertheless.
    let may_wait =
        (waker.is_some() || relay::lifeline_of(number).is_some()) && flags & libc::MSG_DONTWAIT == 0 && waits(fd);
    let limit = if may_wait { left.or_else(|| connection.receive_limit()) } else { None };
    let hears = may_wait && waker::is_like_recv(limit.is_some());
    let deaf = u32::from(waker.is_some() && may_wait && !hears);
    if !may_wait {
        relay::glance(number);
    }
    slot.sleepers.fetch_add(1, Ordering::SeqCst);
    slot.deaf_sleepers.fetch_add(deaf, Ordering::SeqCst);
    if hears {
        slot.is_watched.store(true, Ordering::Relaxed);
    }
    let is_armed = match slot.receiving() {
        Ok(Some(receiving)) => receiving.reader.arm(&receiving.segment, waker::wakes(number)).unwrap_or(false),
        _ => false,
    };
    let result = if is_armed {
        count(&counters().sleeps, 1);
        match hears {
            true => match waker::sleep(number, fd, waker.unwrap_or(-1), wait::Limit::within(limit)) {
                Ok(true) => peek(fd, libc::MSG_DONTWAIT).or_else(|error| match error {
                    // Another thread has taken it.
                    libc::EAGAIN => Ok(true),
                    error => Err(error),
                }),
                Ok(false) => Ok(true),
                Err(error) => Err(error),
            },
            false => match left.map(|left| connection.wait_for_bytes(left)) {
                None => peek(fd, flags & libc::MSG_DONTWAIT),
                Some(true) => peek(fd, libc::MSG_DONTWAIT),
                Some(false) => peek(fd, libc::MSG_DONTWAIT).map_err(|_| libc::EINTR),
            },
        }
    } else {
        Ok(true)
    };
    slot.deaf_sleepers.fetch_sub(deaf, Ordering::SeqCst);
    let was_last = slot.sleepers.fetch_sub(1, Ordering::SeqCst) == 1;
    // A call that does not wait says nothing of what the program waits with; that may need the doorbell.
    if result != Err(libc::EAGAIN) {
        slot.is_watched.store(true, Ordering::Relaxed);
        if was_last {
            disarm(slot, number);
            wait::note_drained(number);
        }
    }
    result
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

/// Whether the peer's process has ended without saying so.
fn was_killed(slot: &Slot) -> bool {
    // What this end has shut down itself says nothing of the peer.
    slot.shut.load(Ordering::Relaxed) == 0
        && matches!(slot.receiving(), Ok(Some(receiving)) if !receiving.reader.is_ended(&receiving.segment))
}

/// Whether a peer that was killed has not read what was sent to it through the ring: TCP would have reset the connection, and says so
/// once.
fn has_lost(slot: &Slot) -> bool {
    let unread = match slot.sending() {
        Ok(Some(sending)) => sending.writer.unread(&sending.segment),
        _ => 0,
    };
    unread > 0 && was_killed(slot) && !slot.has_told_reset.swap(true, Ordering::Relaxed)
}

/// Asks for no doorbell, because this end looks by itself.
pub(crate) fn disarm(slot: &Slot, number: u32) {
    if let Some(receiving) = slot.try_receiving()
        && wait::looks_by_itself(slot, number)
    {
        receiving.reader.disarm(&receiving.segment);
    }
}

/// Whether the ring has something. Without a system call.
pub(crate) fn is_readable(slot: &Slot) -> bool {
    match slot.receiving() {
        Ok(Some(receiving)) => receiving.reader.ring_len(&receiving.segment) != Ok(0),
        _ => false,
    }
}

/// When all has been read: discards doorbells, and asks for one with what comes next unless the program will look by itself. False if
/// something has come meanwhile.
fn quiesce(
    slot: &Slot,
    number: u32,
    connection: &Connection,
    segment: &Segment,
    reader: &mut Reader,
) -> io::Result<bool> {
    reader.discard_doorbells(segment, connection);
    keep_error(slot, reader);
    if wait::looks_by_itself(slot, number) {
        reader.disarm(segment);
        fence(Ordering::SeqCst);
        if wait::looks_by_itself(slot, number) {
            // Something that comes now is seen at the next look.
            return Ok(reader.ring_len(segment)? == 0);
        }
        // A thread has gone to sleep meanwhile.
    }
    Ok(reader.arm(segment, waker::wakes(number))?)
}

/// An error of the TCP connection that was met when something else was wanted of it comes behind what has been received before.
pub(crate) fn keep_error(slot: &Slot, reader: &mut Reader) {
    let error = reader.take_error();
    if error != 0 {
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
        if let Some(receiving) = slot.try_receiving()
            && receiving.segment.is_relayed()
        {
            // The other end must not take what follows for an end that was meant.
            receiving.segment.set_over(Over::Lost);
            receiving.segment.check_relay(&Connection::new(fd));
        }
        Connection::new(fd).reset();
    }
    code(error)
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

/// Before the last descriptor of a connection is closed: doorbells that nothing has read would have the kernel reset it, and bytes in
/// the ring that nothing has read would not.
pub(crate) fn settle(slot: &Slot, fd: c_int, mut receiving: Receiving<'_>) {
    let connection = Connection::new(fd);
    receiving.reader.set_gone(&receiving.segment, &connection);
    if !honour_before_end(slot, fd) {
        connection.reset_at_close();
    }
    if let Ok(Some(sending)) = slot.sending() {
        sending.writer.set_ended(&sending.segment, &connection);
    }
    let Receiving { segment, reader, .. } = &mut receiving;
    match reader.find(segment, &connection) {
        Ok(Found::Ring(_)) => connection.reset_at_close(),
        Ok(Found::Nothing) => reader.discard_doorbells(segment, &connection),
        _ => {}
    }
    take_tcp_back(segment, fd);
}

/// A call that sends on a connection which may be accelerated: `plain` sends the rest of the list as it is, with the same flags.
pub(crate) unsafe fn transmit(
    number: u32,
    fd: c_int,
    list: &[libc::iovec],
    flags: c_int,
    is_plain: bool,
    plain: impl Fn(&Pieces<'_>) -> ssize_t,
) -> ssize_t {
    let slot = slots::slot(number);
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
        slot.plain_sends.fetch_sub(1, Ordering::SeqCst);
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
    slot.plain_sends.fetch_sub(1, Ordering::SeqCst);
    if result > 0 && which.is_still_it() {
        switch::after_plain_call(number, fd, result as usize, true);
    }
    Some(result)
}

/// Bytes that go by TCP when the ring is full, before it is looked at again.
const OVERFLOW: usize = 256 << 10;

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
    let mut has_waited = false;
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
            drop(sending);
            let waited = begin.get_or_insert_with(Instant::now).elapsed();
            let limit = connection.send_limit();
            let left = limit.map_or(Duration::from_secs(1), |limit| limit.saturating_sub(waited));
            if flags & libc::MSG_DONTWAIT != 0 || !waits(fd) || left.is_zero() {
                return Err(libc::EAGAIN);
            }
            // As in the kernel: a call with a time limit is not begun again behind a signal handler.
            let is_over = limit.is_some() || signals::handlers() != Handlers::Restart;
            if !connection.wait_for_room(left.min(Duration::from_secs(1))) && is_over {
                return Err(libc::EINTR);
            }
            continue;
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
                continue;
            }
        }
        if writer.is_tcp() {
            slot.plain_sends.fetch_add(1, Ordering::SeqCst);
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
            room::give_up(number);
            continue;
        }
        drop(sending);
        let wanted = from.left();
        has_waited = !wait::spin_for_room(is_impatient, || has_room(slot, wanted));
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
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    let now = (now.tv_sec as u32).wrapping_mul(1000).wrapping_add(now.tv_nsec as u32 / 1_000_000);
    if slot.looked_at.swap(now, Ordering::Relaxed) == now {
        return false;
    }
    // A peer that has ended its own direction only goes on reading.
    let is_half_open = libc::EPOLLRDHUP as u32;
    match connection.ends() {
        0 => false,
        ends if ends == is_half_open => !writer.is_peer_ended(segment),
        _ => true,
    }
}

/// Has what the program sends go by TCP, before a call that only the kernel can do.
pub(crate) fn enter_tcp(slot: &Slot, fd: c_int, for_good: bool) -> Result<(), c_int> {
    enter_tcp_within(slot, fd, for_good, CATCH_UP_MAX)
}

/// Before a connection ends here.
pub(crate) fn enter_tcp_at_end(slot: &Slot, fd: c_int) {
    // What cannot come to the other end any more is an error there.
    let _ = enter_tcp_within(slot, fd, true, at_end(CATCH_UP_MAX));
}

fn enter_tcp_within(slot: &Slot, fd: c_int, for_good: bool, limit: Duration) -> Result<(), c_int> {
    let mut pause = Pause::default();
    loop {
        let Some(mut sending) = slot.sending()? else { return Ok(()) };
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
        return switch::give_up_before_end(slot, fd);
    }
    if directions & 2 != 0 {
        // What comes behind goes nowhere, and TCP says so.
        let _ = enter_tcp(slot, fd, true);
        if !honour_before_end(slot, fd) {
            connection.reset();
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

/// The peer has handed its end to something that reads plain TCP: that is sent again what it has not taken from the ring.
pub(crate) fn honour_closed_ring(slot: &Slot, fd: c_int) {
    if let Ok(Some(mut sending)) = slot.sending() {
        let Sending { segment, writer, .. } = &mut sending;
        if writer.is_closed_by_reader(segment) && slot.plain_sends.load(Ordering::SeqCst) == 0 {
            let _ = writer.send_again(segment, &Connection::new(fd));
        }
    }
}

/// Steps of a tenth of a second that calls of this process have waited for peers which are other users.
static WAITED_FOR_OTHERS: AtomicU32 = AtomicU32::new(0);
const WAITS_FOR_OTHERS: u32 = 20;

/// Whether a call that ends something may wait another such step for the peer: for other users two seconds in all.
fn may_wait_for_peer(slot: &Slot) -> bool {
    !slot.is_others.load(Ordering::Relaxed) || WAITED_FOR_OTHERS.fetch_add(1, Ordering::Relaxed) < WAITS_FOR_OTHERS
}

/// As [`honour_closed_ring`], before the connection is closed or handed over: for two seconds at most, and for peers which are other users
/// for as long all together. False if the reader has not been sent all of it by then: what follows must not look like the end.
fn honour_before_end(slot: &Slot, fd: c_int) -> bool {
    let connection = Connection::new(fd);
    for _ in 0..20 {
        let Ok(Some(mut sending)) = slot.sending() else { return true };
        let Sending { segment, writer, .. } = &mut sending;
        if !matches!(writer.send_again(segment, &connection), Ok(false)) {
            return true;
        }
        drop(sending);
        if !may_wait_for_peer(slot) {
            return false;
        }
        connection.wait_for_room(Duration::from_millis(100));
    }
    false
}

/// Whether calls on a descriptor wait.
fn waits(fd: c_int) -> bool {
    rustix::fs::fcntl_getfl(slots::borrow(fd)).is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Has the whole connection go by plain TCP from here on, because something will use it that knows nothing of rings. The number of
/// bytes that would be missing.
pub(crate) fn demote(slot: &Slot, fd: c_int) -> usize {
    count(&counters().demoted, 1);
    // How long it lasts is not counted from here on, and says nothing of others.
    slot.service.store(0, Ordering::Relaxed);
    let connection = Connection::new(fd);
    let mut left = 0;
    if let Ok(Some(mut receiving)) = slot.receiving() {
        let Receiving { segment, reader, .. } = &mut receiving;
        let (mut pause, mut limit) = (Pause::default(), None);
        let patience = || {
            let limit = limit.get_or_insert_with(|| match may_wait_for_peer(slot) {
                true => closing_time(segment),
                false => Duration::ZERO,
            });
            let goes_on = pause.pass(*limit);
            pause.look(segment, fd);
            goes_on
        };
        left = reader.close_ring(segment, &connection, patience).unwrap_or(usize::MAX);
    }
    if let Ok(Some(sending)) = slot.sending() {
        // So that the peer sends again what is left, though it may wait for an answer to that.
        sending.writer.call(&sending.segment, &connection);
    }
    enter_tcp_at_end(slot, fd);
    if !honour_before_end(slot, fd) {
        connection.reset();
    }
    connection.restore_options(slot);
    if let Ok(Some(receiving)) = slot.receiving() {
        take_tcp_back(&receiving.segment, fd);
    }
    left
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
        if slot.plain_sends.load(Ordering::SeqCst) > 0 {
            break;
        }
        let Ok(Some(mut sending)) = slot.sending() else { break };
        if !which.is_still_it() {
            return if sum > 0 { Ok((sum, true)) } else { Err(libc::EBADF) };
        }
        let Sending { segment, writer, .. } = &mut sending;
        if !writer.leave_tcp(segment, &connection).unwrap_or(false) || writer.is_reader_gone(segment) {
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

/// The time that a thread looks again and again before it sleeps.
pub(crate) fn spin_time() -> Duration {
    Duration::from_micros(SETTINGS.get().map_or(0, |settings| settings.spin.into()))
}
