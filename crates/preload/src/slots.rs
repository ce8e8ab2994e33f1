//! Which descriptors are connections, and what is known of each.
//!
//! A connection has a *slot* in memory that this process shares with the children it forks, because they share the connection. A table
//! says which slot a descriptor has; it is this process's own, as descriptors are. Slots are there from `socket` or `accept` on, long
//! before it is known whether a connection will be accelerated, so that it is known who else may hold it.
//!
//! **Locks** are taken in this order, and none that stands before one that is held: [`CHANGING`]; an epoll instance's; that of one-shot
//! registrations; a slot's `upgrading`, `receiving`, `sending`; those of `spares`, boards and the relay. So what holds `receiving` calls nothing of `epoll`.
//!
//! **Pairs of words**, of which each side writes its own before it reads the other's, so that one of the two sees the other: `phase` and
//! `plain_receives` or `plain_sends` (a plain call and a switch); `sleepers` and what a thread that drains a ring looks at; the ring's
//! tail and `armed` (a writer and a reader that is about to sleep); `phase` and that the process uses io_uring; `deaf_sleepers` and `armed`; `phase` and `FORKING` (a switch to a
//! relay and a fork).

use crate::allowance;
use crate::epoll::OneShots;
use crate::lock::{Guard, Lock, Reentered};
use rustix::mm::{MapFlags, ProtFlags};
use std::cell::UnsafeCell;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use thruway_sockets::board::{Board, Key, Ticket};
use thruway_sockets::{End, Reader, Segment, Writer};

/// Connections that processes which have a common ancestor may have at a time; further ones stay with TCP.
pub(crate) const SLOTS: usize = 64 << 10;

/// Descriptors that may be connections: the kernel's own default limit (`fs.nr_open`).
pub(crate) const DESCRIPTORS: usize = 1 << 20;

/// In the table: an epoll instance, whose number the other bits are.
const EPOLL: u32 = 1 << 31;

/// In the table: a descriptor of the library's own.
const HIDDEN: u32 = u32::MAX;

/// How far a connection has come.
pub(crate) mod phase {
    /// The slot is free.
    pub(crate) const FREE: u32 = 0;
    /// Plain TCP; calls are counted.
    pub(crate) const PLAIN: u32 = 1;
    /// This end looks for the other's entry on the board.
    pub(crate) const LOOKING: u32 = 2;
    /// This end has an entry on the board.
    pub(crate) const LISTED: u32 = 3;
    /// There is a segment; calls still go by plain TCP.
    pub(crate) const OFFERED: u32 = 4;
    /// All calls go through [`crate::data`].
    pub(crate) const ACCELERATED: u32 = 5;
    /// Plain TCP for good.
    pub(crate) const NEVER: u32 = 6;
}

/// What both ends of a switch need, under [`Slot::upgrade`].
pub(crate) struct Upgrade {
    /// Where the ends look for each other, and as what.
    pub(crate) meeting: Option<(Board, Key)>,
    pub(crate) ticket: Option<Ticket>,
    /// The other end is to be reached through the relay.
    pub(crate) by_relay: bool,
    /// Then, whether this end's address is the higher.
    pub(crate) is_higher: bool,
    pub(crate) end: End,
    /// Another connection may have the segment, between this process and the one with this Unix socket (if that is the taker).
    pub(crate) spare: Option<u64>,
    /// The user at the other end, where that is on this host.
    pub(crate) peer_user: u32,
    /// The number of calls at which this end looks again, and the one at which it does not wait any longer.
    pub(crate) next_look: u32,
    pub(crate) looks: u32,
    pub(crate) last_look: u32,
}

/// A connection.
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub(crate) phase: AtomicU32,
    /// How many connections the slot has been.
    pub(crate) generation: AtomicU32,
    /// Descriptors of it, of all processes that share the slot.
    pub(crate) references: AtomicU32,
    pub(crate) receiving: Lock,
    pub(crate) sending: Lock,
    pub(crate) upgrading: Lock,
    /// Threads inside a plain call that receives, and inside one that sends.
    pub(crate) plain_receives: AtomicU32,
    pub(crate) plain_sends: AtomicU32,
    /// Threads that sleep in the kernel until something comes.
    pub(crate) sleepers: AtomicU32,
    /// Those of them that do not wait for the connection's waker.
    pub(crate) deaf_sleepers: AtomicU32,
    /// Calls that have sent or received, and their bytes.
    pub(crate) calls: AtomicU32,
    pub(crate) bytes: AtomicU64,
    /// Calls counted towards acceleration, in eighths of a call (`WHOLE` in [`crate::switch`]).
    pub(crate) counted: AtomicU32,
    /// After how many it is accelerated, and the port of the service, of which that depends; 0: not known yet.
    pub(crate) threshold: AtomicU32,
    /// A call that does not wait has found no room in the ring, and what waits for readiness waits until there is some: see
    /// [`crate::room::is_wanted`]. Changes under `sending`.
    pub(crate) is_blocked: AtomicBool,
    /// The program has polled it for room since it was accelerated.
    pub(crate) polls_for_room: AtomicBool,
    /// It is among the connections that are counted.
    pub(crate) is_counted: AtomicBool,
    /// This end has accepted it: the service is here.
    pub(crate) is_accepted: AtomicBool,
    pub(crate) service: AtomicU16,
    /// A call that receives has been seen, so the program receives by calls that are seen.
    pub(crate) receives: AtomicBool,
    /// A call that waits for it has been seen.
    pub(crate) is_watched: AtomicBool,
    /// The program has registered it with `EPOLLONESHOT`.
    pub(crate) is_one_shot: AtomicBool,
    /// The connection has gone back to TCP because of `EPOLLONESHOT`, so the kernel reports all bytes.
    pub(crate) is_left_to_kernel: AtomicBool,
    /// What cannot be seen may hold the connection.
    pub(crate) is_foreign: AtomicBool,
    /// The other end, on this host, is another user's.
    pub(crate) is_others: AtomicBool,
    /// A process has been forked that had it, too.
    pub(crate) was_shared: AtomicBool,
    /// Directions that the program has shut down: 1 receiving, 2 sending.
    pub(crate) shut: AtomicU8,
    /// The ring was closed while a plain call that sends was in progress: when that ends, the peer is called, and the connection goes by TCP for
    /// good.
    pub(crate) owes_call: AtomicBool,
    /// A call has waited in vain for bytes that the peer has to send again.
    pub(crate) has_waited_again: AtomicBool,
    /// The program knows that the peer was killed with bytes unread.
    pub(crate) has_told_reset: AtomicBool,
    /// What the program has set; what is set is another thing while accelerated.
    pub(crate) no_delay: AtomicBool,
    pub(crate) cork: AtomicBool,
    /// The program wants a signal when something comes (`O_ASYNC`): the kernel sends it for doorbells.
    pub(crate) is_asynchronous: AtomicBool,
    /// Why it is not accelerated: a number of [`crate::report::Reason`], from 1 on.
    pub(crate) reason: AtomicU8,
    /// Direction of the last call.
    pub(crate) direction: AtomicU8,
    /// An error of the connection that comes behind what is in the ring.
    pub(crate) error: AtomicI32,
    /// When the peer was last looked for, in milliseconds of the coarse clock.
    pub(crate) looked_at: AtomicU32,
    /// Start of the return of bytes by the peer, in milliseconds of the coarse clock; 0 without a return.
    pub(crate) returns_since: AtomicU32,
    /// Total time that non-blocking calls have waited for returned bytes, in milliseconds.
    pub(crate) returned_for: AtomicU32,
    /// Calls that received since the last check of doorbells, and their bytes.
    pub(crate) received: AtomicU32,
    pub(crate) received_bytes: AtomicU32,
    /// Doorbells discarded until that check, modulo 2^32.
    pub(crate) discarded: AtomicU32,
    /// How often looking again and again has paid, lately.
    pub(crate) luck: AtomicI32,
    next: AtomicU32,
    upgrade: UnsafeCell<Upgrade>,
    segment: UnsafeCell<Option<Segment>>,
    writer: UnsafeCell<Option<Writer>>,
    reader: UnsafeCell<Option<Reader>>,
}

// SAFETY: the cells are used under the locks that their accessors name.
unsafe impl Sync for Slot {}

const _: () = assert!(size_of::<Slot>() <= 576);

/// What this process alone knows of a slot.
#[derive(Default)]
pub(crate) struct Local {
    /// Its descriptors here.
    pub(crate) references: AtomicU32,
    /// One of them.
    pub(crate) fd: AtomicI32,
    /// Registrations with epoll instances; and the instance, or [`SEVERAL`] if there has been more than one since there was none.
    pub(crate) registrations: AtomicU32,
    pub(crate) instance: AtomicU32,
    /// Number of calls in progress that register it.
    pub(crate) registering: AtomicU32,
    /// Where in it the registration was last found.
    pub(crate) place: AtomicU32,
    /// The connection's waker, or 0 (see [`crate::waker`]); and one more than the number of the epoll instance that it is registered with,
    /// or 0.
    pub(crate) waker: AtomicI32,
    pub(crate) waker_instance: AtomicU32,
    /// What the relay writes to when there is room to send, or 0 (see [`crate::room`]).
    pub(crate) room: AtomicI32,
    /// Which of this process's connections to relays it was handed over by (see [`crate::relay`]); 0: none.
    pub(crate) relay: AtomicU32,
    /// The thread that returns the connection to plain TCP in [`crate::process::hand_over`], or 0.
    pub(crate) leaving: AtomicU32,
    /// Address of the segment in this process, or 0 if it is not mapped here. A process that was forked before the segment was mapped shares
    /// the slot, but must not use the address in it.
    pub(crate) segment: AtomicUsize,
}

/// In [`Local::instance`]: it is not known which.
pub(crate) const SEVERAL: u32 = u32::MAX;

/// In front of the slots.
#[repr(C, align(64))]
struct Free {
    /// The first free slot and, so that one which has been taken meanwhile is noticed, a count.
    head: AtomicU64,
    /// Slots that have ever been used.
    used: AtomicU32,
    /// The allowance of these processes together: each may hold a lock of a slot while it waits.
    allowance: allowance::OfOthers,
    /// Number of changes, by any of these processes, of registrations where several processes have the epoll instance and the connection.
    changes: AtomicU32,
    /// Number of epoll instances that these processes have made.
    instances: AtomicU32,
    one_shots: OneShots,
}

/// Changes by this process: those that it has begun to count, and those that it has counted.
static OWN_BEGUN: AtomicU32 = AtomicU32::new(0);
static OWN_COUNTED: AtomicU32 = AtomicU32::new(0);

/// Counts a change of a registration with a shared epoll instance.
pub(crate) fn count_change() {
    OWN_BEGUN.fetch_add(1, Ordering::SeqCst);
    free().changes.fetch_add(1, Ordering::SeqCst);
    OWN_COUNTED.fetch_add(1, Ordering::SeqCst);
}

/// Number of changes by other processes, or less while this process counts changes.
pub(crate) fn least_changes_by_others() -> u32 {
    free().changes.load(Ordering::SeqCst).wrapping_sub(OWN_BEGUN.load(Ordering::SeqCst))
}

/// Number of changes by other processes, or more while this process counts changes.
pub(crate) fn most_changes_by_others() -> u32 {
    let own = OWN_COUNTED.load(Ordering::SeqCst);
    free().changes.load(Ordering::SeqCst).wrapping_sub(own)
}

/// One-shot registrations that the library reports.
pub(crate) fn one_shots() -> &'static OneShots {
    &free().one_shots
}

/// A number for a new epoll instance, from 1 on.
pub(crate) fn next_instance() -> u32 {
    free().instances.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}

static ARENA: AtomicPtr<Free> = AtomicPtr::new(std::ptr::null_mut());
static TABLE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static LOCALS: AtomicPtr<Local> = AtomicPtr::new(std::ptr::null_mut());
static PID: AtomicI32 = AtomicI32::new(0);

/// Maps the tables. False if there is no memory for them: then everything stays with TCP.
pub(crate) fn start() -> bool {
    let map = |len: usize, flags| {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of whose addresses nothing knows yet.
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, rights, flags | MapFlags::NORESERVE) }
    };
    let arena = map(ARENA_LEN, MapFlags::SHARED);
    let table = map(DESCRIPTORS * size_of::<AtomicU32>(), MapFlags::PRIVATE);
    let locals = map(SLOTS * size_of::<Local>(), MapFlags::PRIVATE);
    let (Ok(arena), Ok(table), Ok(locals)) = (arena, table, locals) else { return false };
    LOCALS.store(locals.cast(), Ordering::Relaxed);
    PID.store(pid(), Ordering::Relaxed);
    ARENA.store(arena.cast(), Ordering::Release);
    TABLE.store(table.cast(), Ordering::Release);
    true
}

fn pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Whether this is a child that shares this memory with its parent and not the descriptors: a child of `vfork`.
pub(crate) fn is_in_borrowed_memory() -> bool {
    PID.load(Ordering::Relaxed) != pid()
}

/// In a child of `vfork`: true if its parent has no other thread.
pub(crate) fn is_parent_single_threaded() -> bool {
    // "." and "..", and a directory for each thread.
    stat_of_parent(format_args!("task")).is_some_and(|tasks| tasks.st_nlink <= 3)
}

/// In a child of `vfork`: the status of a file below its parent's directory in `/proc`.
fn stat_of_parent(file: std::fmt::Arguments<'_>) -> Option<rustix::fs::Stat> {
    use std::io::Write;
    let mut path = [0u8; 48];
    write!(&mut path[..47], "/proc/{}/{file}", PID.load(Ordering::Relaxed)).ok()?;
    rustix::fs::stat(std::ffi::CStr::from_bytes_until_nul(&path).ok()?).ok()
}

/// In a child of `vfork`: true if a descriptor is the same socket as the parent's descriptor of this number. The table is that of the parent,
/// whose other threads may have closed and reused the number since.
pub(crate) fn is_parents(fd: i32) -> bool {
    let Ok(own) = rustix::fs::fstat(borrow(fd)) else { return false };
    let parents = stat_of_parent(format_args!("fd/{fd}"));
    // Without `/proc`, that is not known.
    parents.is_none_or(|parents| (parents.st_dev, parents.st_ino) == (own.st_dev, own.st_ino))
}

/// This is a child that `fork` has made.
pub(crate) fn set_process() {
    PID.store(pid(), Ordering::Relaxed);
}

fn entry(fd: i32) -> Option<&'static AtomicU32> {
    let table = TABLE.load(Ordering::Acquire);
    let at = usize::try_from(fd).ok().filter(|at| *at < DESCRIPTORS && !table.is_null())?;
    // SAFETY: inside the table, which stays mapped; all zero is valid.
    Some(unsafe { &*table.add(at) })
}

/// The slot with this number.
pub(crate) fn slot(number: u32) -> &'static Slot {
    let arena = ARENA.load(Ordering::Relaxed);
    // SAFETY: numbers come from `claim` alone, so they are inside the arena, which stays mapped; all zero is a free slot.
    unsafe { &*arena.add(1).cast::<Slot>().add(number as usize) }
}

/// What this process knows of a slot.
pub(crate) fn local(number: u32) -> &'static Local {
    // SAFETY: as `slot`.
    unsafe { &*LOCALS.load(Ordering::Relaxed).add(number as usize) }
}

fn free() -> &'static Free {
    // SAFETY: callers have a table, so there is an arena.
    unsafe { &*ARENA.load(Ordering::Relaxed) }
}

/// What these processes may wait for peers of other users.
pub(crate) fn allowance() -> &'static allowance::OfOthers {
    &free().allowance
}

/// The number of the connection that a descriptor is, if it is one.
#[inline]
pub(crate) fn find(fd: i32) -> Option<u32> {
    let value = entry(fd)?.load(Ordering::Acquire);
    (value != 0 && value & EPOLL == 0).then(|| value - 1)
}

/// The number of the epoll instance that a descriptor is, if it is one.
pub(crate) fn find_epoll(fd: i32) -> Option<u32> {
    let value = entry(fd)?.load(Ordering::Acquire);
    (value & EPOLL != 0 && value != HIDDEN).then_some(value & !EPOLL)
}

/// Descriptors of the library's own; -1 where there is none. Apart from the table because their numbers are high.
static HIDDEN_ONES: [AtomicI32; 4096] = [const { AtomicI32::new(-1) }; 4096];

/// How far below the limit of descriptors their numbers begin; half way up, if that is less.
const HIDDEN_BELOW: u64 = 1024;

/// Moves a descriptor of the library's own out of the way of programs that count theirs or hand them to `select`, and keeps them from
/// closing it. `None` if there are too many.
pub(crate) fn hide(fd: OwnedFd) -> Option<i32> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1024);
    let limit = limit.min(DESCRIPTORS as u64);
    let high = limit.saturating_sub(HIDDEN_BELOW.min(limit / 2)).max(3);
    let fd = rustix::io::fcntl_dupfd_cloexec(&fd, high as i32).unwrap_or(fd);
    let entry = entry(fd.as_raw_fd())?;
    let is_free =
        |place: &&AtomicI32| place.compare_exchange(-1, fd.as_raw_fd(), Ordering::SeqCst, Ordering::Relaxed).is_ok();
    HIDDEN_ONES.iter().find(is_free)?;
    entry.store(HIDDEN, Ordering::Release);
    Some(fd.into_raw_fd())
}

/// Closes a hidden descriptor.
pub(crate) fn close_hidden(fd: i32) {
    if let Some(place) = HIDDEN_ONES.iter().find(|place| place.load(Ordering::Relaxed) == fd) {
        place.store(-1, Ordering::SeqCst);
    }
    if let Some(entry) = entry(fd) {
        entry.store(0, Ordering::Release);
        // SAFETY: the library's own, which nothing uses any more.
        unsafe { rustix::io::close(fd) };
    }
}

/// Whether a descriptor is the library's own.
pub(crate) fn is_hidden(fd: i32) -> bool {
    entry(fd).is_some_and(|entry| entry.load(Ordering::Relaxed) == HIDDEN)
}

/// The lowest hidden descriptor from `first` to `last`.
pub(crate) fn first_hidden(first: u32, last: u32) -> Option<u32> {
    let numbers = HIDDEN_ONES.iter().filter_map(|place| u32::try_from(place.load(Ordering::Relaxed)).ok());
    numbers.filter(|fd| (first..=last).contains(fd)).min()
}

/// A descriptor is an epoll instance, or is nothing that matters.
pub(crate) fn set_epoll(fd: i32, number: Option<u32>) {
    if let Some(entry) = entry(fd) {
        note_highest(fd);
        entry.store(number.map_or(0, |number| number | EPOLL), Ordering::Release);
    }
}

/// This process knows none of its descriptors any more.
pub(crate) fn forget_all() {
    each_descriptor(0, u32::MAX, |fd| {
        if let Some(entry) = entry(fd) {
            entry.store(0, Ordering::Release);
        }
    });
}

/// Held while the tables change, and by a thread that forks: its child has all of a change or nothing. Taken before any other lock.
pub(crate) static CHANGING: Lock = Lock::new();

/// How often this process has forked.
pub(crate) static FORKS: AtomicU32 = AtomicU32::new(0);

/// A new socket has this descriptor, that was accepted or not. Does nothing if there is no slot for it. `forks`: what [`FORKS`] was before
/// there was a socket. A child that was forked since may have it, too, and does not know it.
pub(crate) fn add(fd: i32, forks: u32, is_accepted: bool) {
    let _changing = CHANGING.lock();
    let Some(entry) = entry(fd) else { return };
    entry.store(0, Ordering::Release);
    note_highest(fd);
    let Some(number) = claim() else { return };
    let (slot, local) = (slot(number), local(number));
    one_shots().forget_connection(number);
    // Not those of threads inside calls: one that has slept since an earlier connection takes itself off when it wakes. Of a process
    // that was killed they stay, and its slots with TCP.
    for counter in [&slot.calls, &slot.looked_at, &slot.returns_since, &slot.returned_for] {
        counter.store(0, Ordering::Relaxed);
    }
    for flag in [
        &slot.is_asynchronous,
        &slot.has_told_reset,
        &slot.owes_call,
        &slot.has_waited_again,
        &slot.is_counted,
        &slot.is_blocked,
        &slot.polls_for_room,
        &slot.receives,
        &slot.is_watched,
        &slot.is_one_shot,
        &slot.is_left_to_kernel,
        &slot.is_others,
        &slot.was_shared,
        &slot.no_delay,
        &slot.cork,
    ] {
        flag.store(false, Ordering::Relaxed);
    }
    for lock in [&slot.receiving, &slot.sending, &slot.upgrading] {
        lock.reset();
    }
    slot.is_foreign.store(FORKS.load(Ordering::SeqCst) != forks, Ordering::Relaxed);
    slot.generation.fetch_add(1, Ordering::Relaxed);
    slot.bytes.store(0, Ordering::Relaxed);
    slot.received.store(0, Ordering::Relaxed);
    slot.received_bytes.store(0, Ordering::Relaxed);
    slot.discarded.store(0, Ordering::Relaxed);
    slot.counted.store(0, Ordering::Relaxed);
    slot.threshold.store(crate::SETTINGS.get().map_or(0, |settings| settings.after_calls), Ordering::Relaxed);
    slot.service.store(0, Ordering::Relaxed);
    slot.is_accepted.store(is_accepted, Ordering::Relaxed);
    slot.direction.store(0, Ordering::Relaxed);
    slot.error.store(0, Ordering::Relaxed);
    slot.luck.store(crate::wait::recent_luck(), Ordering::Relaxed);
    slot.reason.store(0, Ordering::Relaxed);
    slot.shut.store(0, Ordering::Relaxed);
    local.segment.store(0, Ordering::Relaxed);
    // SAFETY: the slot is new: nothing else knows it.
    unsafe {
        slot.upgrade.get().write(Upgrade {
            meeting: None,
            ticket: None,
            by_relay: false,
            is_higher: false,
            end: End::Maker,
            spare: None,
            peer_user: u32::MAX,
            next_look: 0,
            looks: 0,
            last_look: 0,
        });
        slot.segment.get().write(None);
        slot.writer.get().write(None);
        slot.reader.get().write(None);
    }
    local.references.store(1, Ordering::Relaxed);
    local.fd.store(fd, Ordering::Relaxed);
    local.registrations.store(0, Ordering::Relaxed);
    local.waker.store(0, Ordering::Relaxed);
    local.waker_instance.store(0, Ordering::Relaxed);
    local.room.store(0, Ordering::Relaxed);
    local.relay.store(0, Ordering::Relaxed);
    local.leaving.store(0, Ordering::Relaxed);
    slot.references.store(1, Ordering::Relaxed);
    slot.phase.store(phase::PLAIN, Ordering::Release);
    entry.store(number + 1, Ordering::Release);
}

/// A descriptor is another one of a connection.
pub(crate) fn add_duplicate(fd: i32, number: u32) {
    let _changing = CHANGING.lock();
    let Some(entry) = entry(fd) else { return };
    note_highest(fd);
    slot(number).references.fetch_add(1, Ordering::SeqCst);
    local(number).references.fetch_add(1, Ordering::SeqCst);
    entry.store(number + 1, Ordering::Release);
}

/// Whose last descriptor of a connection has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    /// There are others in this process.
    No,
    /// This process's, of the slot with this generation. The other processes may end meanwhile, and the slot may be reused.
    Here(u32),
    /// That of all processes: told to one of those who close it at the same time.
    Everywhere,
}

/// A descriptor is closed, or about to be: the connection that it was.
pub(crate) fn remove(fd: i32) -> Option<(u32, Last)> {
    // Both counts at once: of two threads that close two descriptors, one has closed this process's last one, and that is the one that
    // may have closed the last of all.
    let _changing = CHANGING.lock();
    let entry = entry(fd)?;
    let value = entry.load(Ordering::Acquire);
    if value == 0
        || value & EPOLL != 0
        || entry.compare_exchange(value, 0, Ordering::SeqCst, Ordering::Relaxed).is_err()
    {
        return None;
    }
    let number = value - 1;
    let generation = slot(number).generation.load(Ordering::Relaxed);
    let was_last_here = local(number).references.fetch_sub(1, Ordering::SeqCst) == 1;
    let was_last = slot(number).references.fetch_sub(1, Ordering::SeqCst) == 1;
    if !was_last_here && local(number).fd.load(Ordering::Relaxed) == fd {
        // Another one stands for the connection.
        let is_it = |other: &u32| find(*other as i32) == Some(number);
        if let Some(other) = (0..=HIGHEST.load(Ordering::Relaxed)).find(is_it) {
            local(number).fd.store(other as i32, Ordering::Relaxed);
        }
    }
    let last = match (was_last_here, was_last) {
        (_, true) => Last::Everywhere,
        (true, false) => Last::Here(generation),
        (false, false) => Last::No,
    };
    Some((number, last))
}

fn claim() -> Option<u32> {
    let free = free();
    loop {
        let head = free.head.load(Ordering::Acquire);
        let first = head as u32;
        if first == 0 {
            break;
        }
        let next = slot(first - 1).next.load(Ordering::Relaxed);
        let new = (head >> 32).wrapping_add(1) << 32 | u64::from(next);
        if free.head.compare_exchange(head, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Some(first - 1);
        }
    }
    let claimed =
        free.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < SLOTS as u32).then_some(used + 1));
    claimed.ok()
}

/// No process has a descriptor of it any more.
pub(crate) fn release(number: u32) {
    let (free, slot) = (free(), slot(number));
    slot.phase.store(phase::FREE, Ordering::Release);
    loop {
        let head = free.head.load(Ordering::Acquire);
        slot.next.store(head as u32, Ordering::Relaxed);
        let new = (head >> 32).wrapping_add(1) << 32 | u64::from(number + 1);
        if free.head.compare_exchange(head, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// The memory of all slots.
const ARENA_LEN: usize = size_of::<Free>() + SLOTS * size_of::<Slot>();

/// This process becomes another user: the memory that it shares with its relatives would be a way to them. It goes on with a copy. What
/// it has together with them stays with TCP, and is not accelerated now; no other thread of this process runs. False if there is no memory:
/// then nothing has changed.
pub(crate) fn part() -> bool {
    let _changing = CHANGING.lock();
    let shared = ARENA.load(Ordering::Acquire);
    if shared.is_null() {
        return true;
    }
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: a new mapping, of whose addresses nothing knows yet.
    let Ok(copy) = (unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), ARENA_LEN, rights, flags) }) else {
        return false;
    };
    let used = (free().used.load(Ordering::Acquire) as usize).min(SLOTS);
    // SAFETY: so much of both is mapped; relatives may change what is copied, which is theirs then and not used here.
    unsafe { thruway_memory::shared::copy(copy.cast(), shared.cast(), size_of::<Free>() + used * size_of::<Slot>()) };
    // Relatives have taken from the list of free slots, and given back to it, while it was copied: it may go round in a circle.
    // SAFETY: new memory that nothing else knows, and aligned.
    unsafe { &*copy.cast::<Free>() }.head.store(0, Ordering::Relaxed);
    let mut others = Vec::new();
    each(|number, _| {
        let (slot, own) = (slot(number), local(number).references.load(Ordering::SeqCst));
        // Before the relatives count it as theirs alone.
        let is_others = slot.references.load(Ordering::SeqCst) != own;
        if is_others {
            slot.is_foreign.store(true, Ordering::SeqCst);
            others.push(number);
        }
        if slot.references.fetch_sub(own, Ordering::SeqCst) == own {
            release(number);
        }
    });
    // SAFETY: both are mappings of ours of this length; nothing has a reference into the first just now, and addresses stay.
    let moved = unsafe {
        use rustix::mm::MremapFlags;
        rustix::mm::mremap_fixed(copy, ARENA_LEN, ARENA_LEN, MremapFlags::MAYMOVE, shared.cast())
    };
    if moved.is_err() {
        // It has given its connections up already. Whatever is done with them goes by TCP.
        forget_all();
        return false;
    }
    // A relative may have held a lock.
    free().one_shots.reset_lock();
    for number in 0..used as u32 {
        let slot = slot(number);
        for lock in [&slot.receiving, &slot.sending, &slot.upgrading] {
            lock.reset();
        }
    }
    each(|number, _| slot(number).references.store(local(number).references.load(Ordering::SeqCst), Ordering::SeqCst));
    for number in others {
        slot(number).is_foreign.store(true, Ordering::SeqCst);
        slot(number).was_shared.store(true, Ordering::SeqCst);
    }
    true
}

/// Every connection of which this process has a descriptor, with one of its descriptors.
pub(crate) fn each(mut visit: impl FnMut(u32, i32)) {
    if ARENA.load(Ordering::Acquire).is_null() {
        return;
    }
    for number in 0..free().used.load(Ordering::Relaxed) {
        let local = local(number);
        if local.references.load(Ordering::Relaxed) > 0 {
            visit(number, local.fd.load(Ordering::Relaxed));
        }
    }
}

/// Every descriptor in a range that is a connection or an epoll instance, up to the highest there has been.
pub(crate) fn each_descriptor(first: u32, last: u32, mut visit: impl FnMut(i32)) {
    // What lies beyond has never been touched, and would be touched by looking.
    let end = HIGHEST.load(Ordering::Relaxed).min(last.min(DESCRIPTORS as u32 - 1));
    for fd in first..=end {
        if entry(fd as i32).is_some_and(|entry| entry.load(Ordering::Relaxed) != 0) {
            visit(fd as i32);
        }
    }
}

static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// A descriptor has been put into the table.
fn note_highest(fd: i32) {
    HIGHEST.fetch_max(fd.max(0) as u32, Ordering::Relaxed);
}

/// Under [`Slot::receiving`].
pub(crate) struct Receiving<'a> {
    pub(crate) segment: Segment,
    pub(crate) reader: &'a mut Reader,
    _guard: Guard<'a>,
}

/// Under [`Slot::sending`].
pub(crate) struct Sending<'a> {
    pub(crate) segment: Segment,
    pub(crate) writer: &'a mut Writer,
    _guard: Guard<'a>,
}

impl Slot {
    /// Whether this process alone has descriptors of it.
    pub(crate) fn is_only_ours(&self, number: u32) -> bool {
        !self.is_foreign.load(Ordering::Relaxed)
            && self.references.load(Ordering::SeqCst) == local(number).references.load(Ordering::SeqCst)
    }

    pub(crate) fn is_accelerated(&self) -> bool {
        self.phase.load(Ordering::Acquire) == phase::ACCELERATED
    }

    /// For a call that receives. `None` if the connection is not accelerated.
    pub(crate) fn receiving(&self) -> Result<Option<Receiving<'_>>, Reentered> {
        Ok(self.reader_under(self.receiving.lock()?))
    }

    /// As [`Slot::receiving`], but `None` also if another call receives.
    pub(crate) fn try_receiving(&self) -> Option<Receiving<'_>> {
        self.reader_under(self.receiving.try_lock()?)
    }

    fn reader_under<'a>(&'a self, guard: Guard<'a>) -> Option<Receiving<'a>> {
        if !self.is_accelerated() {
            return None;
        }
        // SAFETY: under the lock, which the result keeps; the segment changes under both locks only.
        let (segment, reader) = unsafe { (self.mapped_segment(), (*self.reader.get()).as_mut()) };
        Some(Receiving { segment: segment?, reader: reader?, _guard: guard })
    }

    /// For a call that sends. `None` if the connection is not accelerated.
    pub(crate) fn sending(&self) -> Result<Option<Sending<'_>>, Reentered> {
        Ok(self.writer_under(self.sending.lock()?))
    }

    /// As [`Slot::sending`], but `None` also if another call sends.
    pub(crate) fn try_sending(&self) -> Option<Sending<'_>> {
        self.writer_under(self.sending.try_lock()?)
    }

    fn writer_under<'a>(&'a self, guard: Guard<'a>) -> Option<Sending<'a>> {
        if !self.is_accelerated() {
            return None;
        }
        // SAFETY: under the lock, which the result keeps; the segment changes under both locks only.
        let (segment, writer) = unsafe { (self.mapped_segment(), (*self.writer.get()).as_mut()) };
        Some(Sending { segment: segment?, writer: writer?, _guard: guard })
    }

    /// What a switch needs; the guard is of [`Slot::upgrading`].
    #[allow(clippy::mut_from_ref, reason = "the guard is what makes it exclusive")]
    pub(crate) fn upgrade<'a>(&'a self, _guard: &'a Guard<'_>) -> &'a mut Upgrade {
        // SAFETY: under the lock.
        unsafe { &mut *self.upgrade.get() }
    }

    /// Sets the segment, which this process has mapped. The guard is of [`Slot::upgrading`], and the connection is not accelerated.
    pub(crate) fn set_segment(&self, _guard: &Guard<'_>, segment: Segment) {
        local(self.number()).segment.store(segment.address(), Ordering::Relaxed);
        // SAFETY: see above.
        unsafe { self.segment.get().write(Some(segment)) };
    }

    /// Takes the segment out of the slot, if it is mapped in this process. The guard is of [`Slot::upgrading`], and the connection is not
    /// accelerated, or both other locks are held.
    pub(crate) fn take_segment(&self, guard: &Guard<'_>) -> Option<Segment> {
        let segment = self.segment(guard)?;
        local(self.number()).segment.store(0, Ordering::Relaxed);
        // SAFETY: see above.
        unsafe { self.segment.get().write(None) };
        Some(segment)
    }

    /// Removes the segment from the slot after the last descriptor was closed. Returns it if it is mapped in this process. All three guards
    /// are held.
    pub(crate) fn end_segment(&self, guards: [&Guard<'_>; 3]) -> Option<Segment> {
        let segment = self.leave_segment(guards[0]);
        // SAFETY: under all locks.
        unsafe { self.segment.get().write(None) };
        segment
    }

    /// Returns the segment if it is mapped in this process, which must not use it afterwards. Other processes may.
    pub(crate) fn leave_segment(&self, guard: &Guard<'_>) -> Option<Segment> {
        let segment = self.segment(guard);
        local(self.number()).segment.store(0, Ordering::Relaxed);
        segment
    }

    /// The segment of a connection that is not accelerated yet, if this process has it mapped. The guard is of [`Slot::upgrading`].
    pub(crate) fn segment(&self, _guard: &Guard<'_>) -> Option<Segment> {
        // SAFETY: see above.
        unsafe { self.mapped_segment() }
    }

    /// The segment, if it is mapped in this process. It is not if another process mapped it after the fork, or if this process has closed its
    /// last descriptor; another thread may still be inside a call on that descriptor.
    ///
    /// # Safety
    /// Under a lock under which the segment does not change.
    unsafe fn mapped_segment(&self) -> Option<Segment> {
        // SAFETY: the caller's promise.
        let segment = unsafe { *self.segment.get() };
        segment.filter(|segment| segment.address() == local(self.number()).segment.load(Ordering::Relaxed))
    }

    /// A descriptor of the connection in this process. Read under one of the slot's locks, while the connection is accelerated: otherwise it
    /// may be another file's by now.
    pub(crate) fn descriptor(&self) -> i32 {
        local(self.number()).fd.load(Ordering::Relaxed)
    }

    /// True if `fd` is a descriptor of the slot's connection. This stays true under any lock of the slot: a thread that closes the descriptor
    /// removes it from the table, then waits for the locks. Without a lock, another connection may reuse descriptor and slot.
    pub(crate) fn has(&self, fd: i32) -> bool {
        find(fd) == Some(self.number())
    }

    pub(crate) fn number(&self) -> u32 {
        let at = |slot: &Slot| std::ptr::from_ref(slot).addr();
        ((at(self) - at(slot(0))) / size_of::<Slot>()) as u32
    }

    /// Both directions of an accelerated connection. All three guards are held.
    #[allow(clippy::mut_from_ref, reason = "the guards are what makes it exclusive")]
    pub(crate) fn ends<'a>(&'a self, _guards: [&'a Guard<'_>; 3]) -> Option<(Segment, &'a mut Writer, &'a mut Reader)> {
        // SAFETY: under all locks.
        let (segment, writer, reader) =
            unsafe { (self.mapped_segment(), &mut *self.writer.get(), &mut *self.reader.get()) };
        if self.is_accelerated() { Some((segment?, writer.as_mut()?, reader.as_mut()?)) } else { None }
    }

    /// Sets both directions. All three guards are held.
    pub(crate) fn set_ends(&self, _guards: [&Guard<'_>; 3], ends: Option<(Writer, Reader)>) {
        let (writer, reader) = ends.unzip();
        // SAFETY: under all locks.
        unsafe {
            self.writer.get().write(writer);
            self.reader.get().write(reader);
        }
    }
}

/// A descriptor that its program has open.
pub(crate) fn borrow(fd: i32) -> BorrowedFd<'static> {
    // SAFETY: it is used for system calls only, which refuse one that is closed.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}
