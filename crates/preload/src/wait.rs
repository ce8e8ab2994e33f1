//! Calls that wait for several descriptors: `poll` and `select`. See [`crate::epoll`] for the third.
//!
//! They look at the rings first, and ask the kernel when there is nothing. Before they sleep they ask to be woken: by doorbells,
//! or, from other hosts, by this host's relay ([`crate::waker`]).

use crate::recheck::Sleeps;
use crate::report::{count, counters};
use crate::slots::{self, Slot};
use crate::{data, epoll, lock, real, recheck, relay, relayed, report, room, waker};
use libc::{c_int, pollfd, timespec};
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// How many processors this thread may run on: 1 if the kernel does not say.
fn processors() -> i32 {
    // SAFETY: all zero is an empty set, and the call writes to that.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) == 0 { libc::CPU_COUNT(&set) } else { 1 }
    }
}

/// Whether there is a second processor for the peer to run on while this thread looks again and again.
fn may_spin() -> bool {
    static ANSWER: AtomicU8 = AtomicU8::new(0);
    match ANSWER.load(Ordering::Relaxed) {
        0 => {
            let answer = processors() > 1;
            ANSWER.store(1 + u8::from(answer), Ordering::Relaxed);
            answer
        }
        answer => answer == 2,
    }
}

/// How often looking again and again has paid: from 0, hardly ever, to this.
const LUCK_MAX: i32 = 8;

/// Waits after which a thread that sleeps looks again and again once more, and its luck then.
const RETRY_AFTER: i32 = 32;
const PROBE: i32 = 2;

/// What the connection that has last waited has found: what a new one begins with, which may be over before it could learn.
static RECENT: AtomicI32 = AtomicI32::new(LUCK_MAX / 2);

/// How often it has lately paid to look again and again, in this process.
pub(crate) fn recent_luck() -> i32 {
    RECENT.load(Ordering::Relaxed)
}

/// Looks again and again for some microseconds, if that has paid lately; not beyond the limit. True if `is_ready` then.
pub(crate) fn spin(slot: &Slot, limit: Limit, is_ready: impl Fn() -> bool) -> bool {
    spin_for(slot, limit, is_ready, || ())
}

/// As [`spin`], with `begin` just before.
fn spin_for(slot: &Slot, limit: Limit, is_ready: impl Fn() -> bool, begin: impl FnOnce()) -> bool {
    let has_come = spin_with(&slot.luck, limit, is_ready, begin);
    RECENT.store(slot.luck.load(Ordering::Relaxed), Ordering::Relaxed);
    has_come
}

pub(crate) fn spin_with(luck: &AtomicI32, limit: Limit, is_ready: impl Fn() -> bool, begin: impl FnOnce()) -> bool {
    let time = data::spin_time();
    if time.is_zero() || !may_spin() {
        return false;
    }
    let lucky = luck.load(Ordering::Relaxed);
    if lucky <= 0 {
        // Tried again now and then.
        luck.store(if lucky <= -RETRY_AFTER { PROBE } else { lucky - 1 }, Ordering::Relaxed);
        return false;
    }
    // A peer that sleeps itself has to be woken first. Once both look, neither sleeps.
    let time = if lucky <= PROBE { 4 * time } else { time };
    begin();
    let begin = Instant::now();
    let time = limit.end.map_or(time, |end| time.min(end.saturating_duration_since(begin)));
    loop {
        for _ in 0..16 {
            if is_ready() {
                count(&counters().spins_won, 1);
                luck.store((lucky + 2).min(LUCK_MAX), Ordering::Relaxed);
                return true;
            }
            std::hint::spin_loop();
        }
        // The peer may be waiting for this very processor.
        std::thread::yield_now();
        if begin.elapsed() >= time {
            count(&counters().spins_lost, 1);
            luck.store(lucky - 2, Ordering::Relaxed);
            return false;
        }
    }
}

/// Waits a little for a reader that is at work, more if the call may wait anyway.
pub(crate) fn spin_for_room(is_impatient: bool, has_room: impl Fn() -> bool) -> bool {
    let limit = Duration::from_micros(if is_impatient { 10 } else { 100 });
    let begin = Instant::now();
    loop {
        for _ in 0..8 {
            if has_room() {
                return true;
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() >= limit {
            return false;
        }
        std::thread::yield_now();
    }
}

/// True if no other thread or process sleeps until the peer rings.
fn has_no_sleeper(slot: &Slot, number: u32) -> bool {
    let is_asynchronous = slot.is_asynchronous.load(Ordering::Relaxed);
    slot.sleepers.load(Ordering::SeqCst) == 0 && !is_asynchronous && slot.is_only_ours(number)
}

/// True if the peer need not ring while a call of this thread busy-polls a connection. Between calls a doorbell is due, but for
/// [`is_looked_at`].
pub(crate) fn may_go_without(slot: &Slot, number: u32) -> bool {
    let local = slots::local(number);
    has_no_sleeper(slot, number)
        && match local.registrations.load(Ordering::Relaxed) {
            0 => true,
            1 => epoll::has_no_sleeper(local.instance.load(Ordering::Relaxed)),
            _ => false,
        }
}

/// True if the peer need not ring between calls either: the program has registered the connection with one epoll instance, and each wait
/// for that checks the ring before it sleeps. A program may wait for an unregistered connection in any other way.
pub(crate) fn is_looked_at(slot: &Slot, number: u32) -> bool {
    let local = slots::local(number);
    has_no_sleeper(slot, number)
        && local.registrations.load(Ordering::Relaxed) == 1
        && epoll::has_no_sleeper(local.instance.load(Ordering::Relaxed))
}

/// All bytes of a connection have been read, or no doorbell was asked for since.
pub(crate) fn note_drained(number: u32) {
    let local = slots::local(number);
    if local.registrations.load(Ordering::Relaxed) == 1 {
        epoll::note_drained(local.instance.load(Ordering::Relaxed), number);
    }
}

/// True if something may wait in the kernel, by epoll, for bytes that a call leaves in the ring.
pub(crate) fn may_be_left(number: u32) -> bool {
    slots::local(number).registrations.load(Ordering::SeqCst) > 0
}

/// What a descriptor means to a call that waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    Connection(u32),
    Epoll(u32),
}

fn watched(fd: c_int) -> Option<Watched> {
    if let Some(number) = slots::find(fd) {
        return slots::slot(number).is_accelerated().then_some(Watched::Connection(number));
    }
    slots::find_epoll(fd).filter(|number| epoll::has_accelerated(*number)).map(Watched::Epoll)
}

impl Watched {
    fn is_readable(self) -> bool {
        match self {
            Watched::Connection(number) => data::is_readable(slots::slot(number)),
            Watched::Epoll(number) => epoll::is_readable(number),
        }
    }

    /// Before sleeping. False if there is something already.
    fn arm(self) -> bool {
        match self {
            Watched::Connection(number) => {
                let slot = slots::slot(number);
                slot.sleepers.fetch_add(1, Ordering::SeqCst);
                slot.is_watched.store(true, Ordering::Relaxed);
                data::rearm(slot, number)
            }
            Watched::Epoll(number) => epoll::arm(number),
        }
    }

    fn disarm(self) {
        match self {
            Watched::Connection(number) => {
                let slot = slots::slot(number);
                if slot.sleepers.fetch_sub(1, Ordering::SeqCst) == 1 {
                    // An epoll instance that has left it to a doorbell looks at it again.
                    data::disarm_if_looked_at(slot, number);
                }
            }
            Watched::Epoll(number) => epoll::disarm(number),
        }
    }

    /// During a long sleep.
    fn look_again(self) {
        match self {
            Watched::Connection(number) => recheck::look(number, true),
            Watched::Epoll(number) => epoll::look_again(number),
        }
    }
}

/// Descriptors of a call that are looked at before they are accelerated.
const COUNTED: usize = 256;

const READABLE: libc::c_short = libc::POLLIN | libc::POLLRDNORM;
const WRITABLE: libc::c_short = libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;

/// The connection of an entry that is polled for room to send, of which there is none: the kernel would say that there is.
fn without_room(one: &pollfd) -> Option<u32> {
    let number = if one.events & WRITABLE == 0 { None } else { slots::find(one.fd) };
    number.filter(|number| {
        let slot = slots::slot(*number);
        let is_accelerated = slot.is_accelerated();
        if is_accelerated && !slot.polls_for_room.load(Ordering::Relaxed) {
            slot.polls_for_room.store(true, Ordering::Relaxed);
        }
        is_accelerated && room::is_wanted(*number)
    })
}

/// A time limit, as the kernel takes it.
#[derive(Clone, Copy)]
pub(crate) struct Limit {
    end: Option<Instant>,
}

/// Whether the kernel would take it.
pub(crate) fn is_valid(timeout: Option<&timespec>) -> bool {
    timeout.is_none_or(|limit| limit.tv_sec >= 0 && (0..1_000_000_000).contains(&limit.tv_nsec))
}

impl Limit {
    pub(crate) fn of_milliseconds(timeout: c_int) -> Limit {
        let end = u64::try_from(timeout).ok().and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
        Limit { end }
    }

    pub(crate) fn of(timeout: Option<&timespec>) -> Limit {
        let end = timeout.and_then(|limit| {
            let limit = Duration::new(limit.tv_sec.try_into().ok()?, limit.tv_nsec.try_into().ok()?);
            Instant::now().checked_add(limit)
        });
        Limit { end }
    }

    pub(crate) fn left(self) -> Option<timespec> {
        let left = self.end?.saturating_duration_since(Instant::now());
        Some(timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() })
    }

    /// At most so long from now on; for ever without.
    pub(crate) fn within(time: Option<Duration>) -> Limit {
        Limit { end: time.and_then(|time| Instant::now().checked_add(time)) }
    }

    /// The one of the two that is over first.
    pub(crate) fn earlier(self, other: Limit) -> Limit {
        match (self.end, other.end) {
            (Some(end), Some(other)) => Limit { end: Some(end.min(other)) },
            (end, other) => Limit { end: end.or(other) },
        }
    }

    /// Whether there is one.
    pub(crate) fn is_any(self) -> bool {
        self.end.is_some()
    }

    pub(crate) fn is_over(self) -> bool {
        self.end.is_some_and(|end| end <= Instant::now())
    }
}

/// `ppoll`, of which the others are forms.
///
/// # Safety
/// As `ppoll`.
pub(crate) unsafe fn poll(list: *mut pollfd, count: libc::nfds_t, limit: Limit, mask: *const libc::sigset_t) -> c_int {
    // SAFETY: the caller's promise.
    let real_with = |timeout: Option<timespec>, mask| unsafe {
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        real::ppoll(list, count, timeout, mask)
    };
    let real = |timeout| real_with(timeout, mask);
    if list.is_null() || count > slots::DESCRIPTORS as libc::nfds_t {
        return real(limit.left());
    }
    // SAFETY: the caller's promise.
    let polled = unsafe { std::slice::from_raw_parts_mut(list, count as usize) };
    let wants = |one: &pollfd| if one.events & READABLE == 0 { None } else { watched(one.fd) };
    let concerns = |one: &pollfd| wants(one).is_some() || without_room(one).is_some();
    if !polled.iter().any(concerns) {
        // Some may be accelerated while this thread sleeps.
        let mut counted = [0; COUNTED];
        let mut count = 0;
        for number in polled.iter().take(COUNTED).filter_map(|one| slots::find(one.fd)) {
            slots::slot(number).is_watched.store(true, Ordering::Relaxed);
            slots::slot(number).sleepers.fetch_add(1, Ordering::SeqCst);
            slots::slot(number).deaf_sleepers.fetch_add(1, Ordering::SeqCst);
            counted[count] = number;
            count += 1;
        }
        // The same for instances without connections.
        let mut instances = [0; COUNTED];
        let mut instance_count = 0;
        for number in polled.iter().filter_map(|one| slots::find_epoll(one.fd)).take(COUNTED) {
            epoll::begin_sleep(number);
            instances[instance_count] = number;
            instance_count += 1;
        }
        // One may have been meanwhile, by a thread that has seen no sleeper.
        let ready = (!polled.iter().any(concerns)).then(|| real(limit.left()));
        let error = data::errno();
        // The same ones, whatever their descriptors are by now.
        for number in &counted[..count] {
            slots::slot(*number).sleepers.fetch_sub(1, Ordering::SeqCst);
            slots::slot(*number).deaf_sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        for number in &instances[..instance_count] {
            epoll::end_sleep(*number);
        }
        data::fail(error);
        if let Some(ready) = ready {
            return ready;
        }
    }
    let none = timespec { tv_sec: 0, tv_nsec: 0 };
    let any = |polled: &[pollfd]| polled.iter().any(|one| wants(one).is_some_and(Watched::is_readable));
    let mut sleeps = Sleeps::new(mask);
    loop {
        if any(polled) {
            let ready = real(Some(none));
            let corrected = if ready < 0 { ready } else { correct(polled) };
            // Another thread may have read the bytes.
            if corrected != 0 || limit.is_over() {
                return corrected;
            }
            continue;
        }
        let is_over = limit.is_over();
        let mut one = polled.iter().filter_map(|one| match wants(one) {
            Some(Watched::Connection(number)) => Some(number),
            _ => None,
        });
        let first = (one.next(), one.next());
        if let (false, (Some(number), None)) = (is_over || sleeps.has_begun(), first) {
            let (slot, is_quiet) = (slots::slot(number), Cell::new(false));
            let has_come = spin_for(slot, limit, || any(polled), || is_quiet.set(data::disarm(slot, number)));
            if is_quiet.get() {
                data::rearm(slot, number);
            }
            if has_come {
                continue;
            }
        }
        if !is_over && !sleeps.may_go_on() {
            return data::fail(libc::EINTR) as c_int;
        }
        let begins = lock::undisturbed();
        let asleep = Asleep::begin(polled, wants);
        drop(begins);
        report::count(&counters().sleeps, usize::from(!is_over));
        let sleep = sleeps.next(limit);
        let limit_now = match (asleep.may_sleep, asleep.is_too_long) {
            (true, false) if asleep.watched.is_empty() => limit.left(),
            (true, false) => sleep.left(),
            // There is no place for what would wake it.
            (true, true) => Some(Limit::within(Some(Duration::from_millis(5))).earlier(limit).left().unwrap_or(none)),
            (false, _) => Some(none),
        };
        let ready = if asleep.wakers.is_empty() && asleep.relay.is_none() && !asleep.is_too_long {
            real_with(limit_now, sleeps.mask())
        } else {
            // SAFETY: the caller's promise for the mask.
            unsafe { asleep.poll(polled, limit_now, sleeps.mask()) }
        };
        let error = data::errno();
        if ready == 0 && asleep.may_sleep && !asleep.is_too_long && !limit.is_over() {
            // While the connections are still asked for doorbells: bytes without one are a fault.
            polled.iter().filter_map(wants).for_each(Watched::look_again);
        }
        let ends = lock::undisturbed();
        asleep.end();
        drop(ends);
        if ready < 0 {
            data::fail(error);
            return ready;
        }
        let corrected = correct(polled);
        // Doorbells alone are nothing to tell the program of.
        if corrected > 0 || limit.is_over() {
            return corrected;
        }
    }
}

/// What a thread that sleeps in `poll` is counted for. On the heap: programs poll many, and signal handlers none.
struct Asleep {
    /// Connections that may be accelerated meanwhile.
    plain: Vec<u32>,
    watched: Vec<Watched>,
    /// Wakers that are polled, too, and which of the program's entries each belongs to.
    wakers: Vec<(usize, c_int)>,
    /// Connections whose wakers are not.
    deaf: Vec<u32>,
    /// Entries whose connections have no room to send, and what is polled for that instead.
    full: Vec<(usize, u32, c_int)>,
    /// Which has no place in the list.
    is_too_long: bool,
    /// What says that the relay has gone, if it carries one of the connections.
    relay: Option<c_int>,
    may_sleep: bool,
}

fn count_deaf(numbers: &[u32]) {
    for number in numbers {
        slots::slot(*number).deaf_sleepers.fetch_add(1, Ordering::SeqCst);
    }
}

impl Asleep {
    fn begin(polled: &[pollfd], wants: impl Fn(&pollfd) -> Option<Watched>) -> Asleep {
        let is_plain = |one: &&pollfd| one.events & READABLE != 0 && watched(one.fd).is_none();
        let plain: Vec<u32> = polled.iter().filter(is_plain).filter_map(|one| slots::find(one.fd)).collect();
        for number in &plain {
            slots::slot(*number).sleepers.fetch_add(1, Ordering::SeqCst);
        }
        count_deaf(&plain);
        let (mut watched, mut wakers, mut deaf, mut relay) = (Vec::new(), Vec::new(), Vec::new(), None);
        for (at, one) in polled.iter().enumerate().filter_map(|(at, one)| Some((at, wants(one)?))) {
            watched.push(one);
            if let Watched::Connection(number) = one {
                relay = relay.or_else(|| relay::lifeline_of(number));
                if let Some(waker) = waker::of(number) {
                    wakers.push((at, waker));
                    deaf.push(number);
                }
            }
        }
        let mut full = Vec::new();
        for (at, number) in polled.iter().enumerate().filter_map(|(at, one)| Some((at, without_room(one)?))) {
            relay = relay.or_else(|| relay::lifeline_of(number));
            full.extend(room::of(number).map(|descriptor| (at, number, descriptor)));
        }
        let mut is_too_long = false;
        // The kernel takes no longer lists.
        let most = || rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let has_more = relay.is_some() || !wakers.is_empty();
        if has_more && (polled.len() + wakers.len() + full.len() + 1) as u64 > most() {
            wakers.clear();
            relay = None;
            is_too_long = !full.is_empty();
            count_deaf(&deaf);
        } else {
            deaf.clear();
        }
        // What has room after all is polled as the program says.
        full.retain(|(_, number, _)| room::ask_for(*number));
        let may_sleep = watched.iter().fold(true, |may, one| one.arm() & may);
        Asleep { plain, watched, wakers, deaf, full, is_too_long, relay, may_sleep }
    }

    /// As `ppoll`, with an entry for each waker: one that was written to counts as its connection. With one for the relay, too, which is
    /// none of the program's.
    ///
    /// # Safety
    /// As `ppoll`, for the mask.
    unsafe fn poll(&self, polled: &mut [pollfd], limit: Option<timespec>, mask: *const libc::sigset_t) -> c_int {
        let entry = |&(_, fd): &(usize, c_int)| pollfd { fd, events: libc::POLLIN, revents: 0 };
        let relay = self.relay.map(|fd| pollfd { fd, events: 0, revents: 0 });
        let polled_too = if self.is_too_long { &[] } else { &self.full[..] };
        let room = polled_too.iter().map(|(_, _, fd)| pollfd { fd: *fd, events: libc::POLLIN, revents: 0 });
        let wakers = self.wakers.iter().map(entry);
        let begins = lock::undisturbed();
        let mut list: Vec<pollfd> = polled.iter().copied().chain(wakers).chain(relay).chain(room).collect();
        drop(begins);
        for (at, ..) in &self.full {
            list[*at].events &= !WRITABLE;
        }
        let timeout = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: a list of ours, and the caller's promise.
        let ready = unsafe { real::ppoll(list.as_mut_ptr(), list.len() as libc::nfds_t, timeout, mask) };
        if ready >= 0 {
            let (own, others) = list.split_at(polled.len());
            let (wakers, relay) = others.split_at(self.wakers.len());
            if self.relay.is_some() && relay[0].revents != 0 {
                relay::look();
            }
            // Nothing else of the program's list, which another thread may have changed meanwhile.
            for (one, own) in polled.iter_mut().zip(own) {
                one.revents = own.revents;
            }
            for (waker, (at, _)) in wakers.iter().zip(&self.wakers) {
                if waker.revents & libc::POLLIN != 0 {
                    polled[*at].revents |= polled[*at].events & READABLE;
                }
            }
        }
        let error = data::errno();
        let _ends = lock::undisturbed();
        drop(list);
        data::fail(error);
        ready
    }

    fn end(self) {
        for one in &self.watched {
            one.disarm();
        }
        for number in &self.plain {
            slots::slot(*number).sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        for number in self.plain.iter().chain(&self.deaf) {
            slots::slot(*number).deaf_sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Corrects what the kernel has said of accelerated connections; the number of descriptors that there is something to say of.
fn correct(polled: &mut [pollfd]) -> c_int {
    let mut ready = 0;
    for one in polled.iter_mut() {
        if one.revents & WRITABLE != 0 && without_room(one).is_some() {
            one.revents &= !WRITABLE;
        }
        if one.fd >= 0 && one.events & READABLE != 0 {
            match watched(one.fd) {
                Some(Watched::Connection(number)) => {
                    if slots::slot(number).error.load(Ordering::Relaxed) != 0 {
                        one.revents |= libc::POLLERR | one.events & READABLE;
                    }
                    if data::is_readable(slots::slot(number)) {
                        one.revents |= one.events & READABLE;
                    } else if one.revents & (READABLE | libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR)
                        == one.revents & READABLE
                        && one.revents & READABLE != 0
                        && is_doorbell(number, one.fd)
                    {
                        one.revents &= !READABLE;
                    }
                }
                Some(Watched::Epoll(number)) if epoll::is_readable(number) => one.revents |= one.events & READABLE,
                _ => {}
            }
        }
        ready += c_int::from(one.revents != 0);
    }
    ready
}

/// As [`is_doorbell`], but false without a doorbell or wake-up that this call has taken back.
pub(crate) fn discards_doorbell(number: u32, fd: c_int) -> bool {
    takes_back(number, fd) == Some(true)
}

/// Whether all that the kernel has for a connection is doorbells, and wake-ups by the relay, that nothing in the ring belongs to; takes them
/// back.
pub(crate) fn is_doorbell(number: u32, fd: c_int) -> bool {
    takes_back(number, fd).is_some()
}

/// `None` if the kernel has something else, or the ring has bytes. Otherwise, whether this call has taken back a doorbell or wake-up.
fn takes_back(number: u32, fd: c_int) -> Option<bool> {
    let slot = slots::slot(number);
    let mut receiving = slot.receiving().ok()??;
    let connection = crate::tcp::Connection::of(number, fd);
    let slots::Receiving { segment, reader, .. } = &mut receiving;
    let before = reader.taken_back();
    if !matches!(reader.find(segment, &connection), Ok(thruway_sockets::Found::Nothing)) {
        return None;
    }
    // What waits goes on waiting, for the next one.
    let rearmed = reader.rearm(segment, &connection, waker::wakes(number));
    data::keep_error(slot, reader);
    let unexpected = reader.unexpected(segment, &connection);
    let has_taken = reader.taken_back() != before;
    drop(receiving);
    // Other bytes than doorbells belong to the program.
    if rearmed != Ok(true) || unexpected != Ok(0) {
        return None;
    }
    if relayed::is_relayed(slot) && !relayed::explains(slot, fd) {
        // What comes with it is on its way.
        let again = if relayed::catch_up_soon(slot, fd) { takes_back(number, fd) } else { None };
        return again.map(|has_taken_more| has_taken || has_taken_more);
    }
    data::answer_peer(slot, fd);
    // Bytes may have arrived whose doorbell was discarded with the others, or the relay has just explained the bytes. The end of the stream is
    // readable, too, and has no byte.
    (data::finds_nothing(number, fd) && connection.ends() == 0).then_some(has_taken)
}

/// `pselect`, of which `select` is a form; by `poll`.
///
/// # Safety
/// As `pselect`: each set that is not null has `count` bits at least.
pub(crate) unsafe fn select(count: c_int, sets: [*mut u64; 3], limit: Limit, mask: *const libc::sigset_t) -> c_int {
    let Ok(count) = usize::try_from(count) else { return data::fail(libc::EINVAL) as c_int };
    // SAFETY: the caller's promise.
    let is_in = |set: *mut u64, fd: usize| !set.is_null() && unsafe { *set.add(fd / 64) } >> (fd % 64) & 1 != 0;
    const EVENTS: [libc::c_short; 3] = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
    let begins = lock::undisturbed();
    let mut list = Vec::new();
    for fd in 0..count {
        let events = (0..3).filter(|set| is_in(sets[*set], fd)).fold(0, |events, set| events | EVENTS[set]);
        if events != 0 {
            list.push(pollfd { fd: fd as c_int, events, revents: 0 });
        }
    }
    drop(begins);
    // SAFETY: a list of ours; the caller's promise for the mask.
    let result = unsafe { poll(list.as_mut_ptr(), list.len() as libc::nfds_t, limit, mask) };
    let _ends = lock::undisturbed();
    // Dropped before that ends.
    let list = list;
    if result < 0 {
        return result;
    }
    if list.iter().any(|one| one.revents & libc::POLLNVAL != 0) {
        return data::fail(libc::EBADF) as c_int;
    }
    // What each set means, as in the kernel's fs/select.c.
    const MEANING: [libc::c_short; 3] = [
        libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND | libc::POLLHUP | libc::POLLERR,
        libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND | libc::POLLERR,
        libc::POLLPRI,
    ];
    let mut ready = 0;
    for one in &list {
        for set in 0..3 {
            if one.events & EVENTS[set] == 0 {
                continue;
            }
            let fd = one.fd as usize;
            if one.revents & MEANING[set] != 0 {
                ready += 1;
            } else {
                // SAFETY: the bit was read above.
                unsafe { *sets[set].add(fd / 64) &= !(1 << (fd % 64)) };
            }
        }
    }
    ready
}

/// Whether a set that `select` is given has a connection that is accelerated, or may be meanwhile; of those that it is to have room to
/// send on, one that has none.
///
/// # Safety
/// As [`select`].
pub(crate) unsafe fn is_select_for_us(count: c_int, readable: *mut u64, writable: *mut u64) -> bool {
    // SAFETY: the caller's promise.
    let is_in = |set: *mut u64, fd: c_int| unsafe { *set.add(fd as usize / 64) } >> (fd % 64) & 1 != 0;
    let mut answer = false;
    if count > 1024 * 64 {
        return false;
    }
    if !readable.is_null() {
        for fd in (0..count).filter(|fd| is_in(readable, *fd)) {
            if let Some(number) = slots::find(fd) {
                let slot = slots::slot(number);
                slot.is_watched.store(true, Ordering::Relaxed);
                // Another thread may accelerate it while this one sleeps.
                let is_used = slot.calls.load(Ordering::Relaxed) > 0;
                answer |= is_used && slot.phase.load(Ordering::Relaxed) != slots::phase::NEVER;
            }
            // A connection may be registered with an instance while this thread sleeps.
            answer |= watched(fd).is_some() || slots::find_epoll(fd).is_some();
        }
    }
    if !writable.is_null() {
        let one = |fd| pollfd { fd, events: libc::POLLOUT, revents: 0 };
        answer |= (0..count).filter(|fd| is_in(writable, *fd)).any(|fd| without_room(&one(fd)).is_some());
    }
    answer
}
