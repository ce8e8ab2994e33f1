//! Whether a connection can be accelerated, how its two ends meet, and the moment at which calls take the other way.
//!
//! Nothing happens before a connection has lasted for some calls. Then the end with the higher address writes to the board where it
//! can be found, and the other looks there. What finds an entry makes the segment, connects to the Unix socket that the entry names,
//! and hands the segment over. Neither waits for the other: calls go by plain TCP until both have the segment, and afterwards until
//! each direction's writer finds that its reader reads through the library, too.
//!
//! Where the other end is on another host, both write to the board and ask their host's relay (`relay`), which hands each a segment.

use crate::lock::{self, Guard};
use crate::peers::Sender;
use crate::report::{Reason, count, counters, stays, tell};
use crate::slots::{self, Last, Slot, Upgrade, phase};
use crate::tcp::Connection;
use crate::{SETTINGS, experience, peers, relay, relayed, report, room, spares, uring, waker};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
};
use std::cell::UnsafeCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use thruway_sockets::board::{Board, Circle, Key, Listing};
use thruway_sockets::meeting::{OFFER_LEN, Offer, Offered, Request, relayed_key, service_name};
use thruway_sockets::settings::{Mode, Settings};
use thruway_sockets::{End, Over, Reader, Segment, Writer};

/// How often an end looks for the other's entry, at calls that are further and further apart, of which it makes so many looks at the same
/// distance; and how many calls an end waits for an answer to its own.
const LOOKS: u32 = 56;
const LOOKS_ALIKE: u32 = 4;
const PATIENCE: u32 = 1 << 16;

/// Whether a connection of this process has ever been accelerated. Until then, calls that wait are the kernel's alone.
static HAS_ACCELERATED: AtomicBool = AtomicBool::new(false);

/// Whether a connection of this process has ever been accelerated.
pub(crate) fn has_accelerated() -> bool {
    HAS_ACCELERATED.load(Ordering::SeqCst)
}

/// Bytes of segments that this process has mapped.
static MAPPED: AtomicU64 = AtomicU64::new(0);

/// An address as the standard library has it.
pub(crate) fn address(any: &SocketAddrAny) -> Option<SocketAddr> {
    SocketAddr::try_from(any.clone()).ok()
}

/// What a call counts towards `--after-calls`: one where the direction has changed, and else a part. So both ends of a connection come to
/// that number at about the same time, into however many calls each divides what it sends and receives.
const WHOLE: u32 = 8;
const PART: u32 = 1;

/// After a call on a connection that is not accelerated.
#[inline]
pub(crate) fn after_plain_call(number: u32, fd: i32, bytes: usize, has_sent: bool) {
    let slot = slots::slot(number);
    let calls = slot.calls.fetch_add(1, Ordering::Relaxed) + 1;
    let direction = 1 + u8::from(has_sent);
    let is_turn = slot.direction.swap(direction, Ordering::Relaxed) != direction;
    let by = if is_turn { WHOLE } else { PART };
    let counted = slot.counted.fetch_add(by, Ordering::Relaxed).saturating_add(by) / WHOLE;
    let sum = slot.bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    let phase = slot.phase.load(Ordering::Relaxed);
    if phase == phase::NEVER {
        return;
    }
    let Some(settings) = SETTINGS.get() else { return };
    if phase != phase::PLAIN || counted >= slot.threshold.load(Ordering::Relaxed) || sum >= settings.after_bytes {
        consider(number, fd, calls);
    }
}

/// A call on a connection that is accelerated. One in the other direction at the same time may be missed.
#[inline]
pub(crate) fn after_ring_call(slot: &Slot) {
    let counted = slot.counted.load(Ordering::Relaxed);
    slot.counted.store(counted.saturating_add(WHOLE), Ordering::Relaxed);
}

/// Receiving calls between two doorbell checks. A connection goes back to TCP at [`RUNG_IN_FOUR`] or more doorbells per four calls, if the calls'
/// mean length is below [`SMALL`] bytes.
const WEIGHED: u32 = 256;
const RUNG_IN_FOUR: u32 = 3;
const SMALL: u32 = 4096;

/// After a call that received on an accelerated connection. If only doorbells wake the program, a small message costs more than by TCP: the
/// doorbell takes the same system calls as the message.
#[inline]
pub(crate) fn weigh(number: u32, fd: i32, bytes: usize) {
    let slot = slots::slot(number);
    let bytes = bytes.min((SMALL * WEIGHED) as usize) as u32;
    let sum = slot.received_bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
    if slot.received.fetch_add(1, Ordering::Relaxed) + 1 < WEIGHED {
        return;
    }
    // If another thread reads, the next call checks.
    let Some(discarded) = slot.try_receiving().map(|receiving| receiving.reader.discarded() as u32) else { return };
    slot.received.store(0, Ordering::Relaxed);
    slot.received_bytes.store(0, Ordering::Relaxed);
    let rung = discarded.wrapping_sub(slot.discarded.swap(discarded, Ordering::Relaxed));
    let needs_doorbells = match slots::local(number).registrations.load(Ordering::Relaxed) {
        0 => !slot.is_watched.load(Ordering::Relaxed),
        1 => false,
        _ => true,
    };
    let is_dear = rung.saturating_mul(4) >= WEIGHED * RUNG_IN_FOUR && sum < SMALL * WEIGHED;
    if needs_doorbells && is_dear && slot.is_accelerated() && !relayed::is_relayed(slot) {
        let service = slot.service.load(Ordering::Relaxed);
        if crate::data::demote_if_read(slot, fd) {
            stays(slot, fd, Reason::Doorbells, &", from here on");
            experience::note_rung(service);
        }
    }
}

/// Whether a connection is to be watched for longer before it is accelerated: others of the service have ended soon.
fn waits_for_more(slot: &Slot, settings: &Settings, [local, peer]: [u16; 2]) -> bool {
    let service = if slot.is_accepted.load(Ordering::Relaxed) { local } else { peer };
    slot.service.store(service, Ordering::Relaxed);
    let (long, bytes) = (settings.after_calls_of_short, slot.bytes.load(Ordering::Relaxed));
    if slot.counted.load(Ordering::Relaxed) / WHOLE >= long || bytes >= settings.after_bytes {
        return false;
    }
    let waits = experience::is_short(service, long);
    if waits {
        slot.threshold.store(long, Ordering::Relaxed);
    }
    waits
}

fn never(slot: &Slot, fd: i32, reason: Reason, detail: &dyn std::fmt::Display) {
    slot.phase.store(phase::NEVER, Ordering::Release);
    stays(slot, fd, reason, detail);
}

/// One step further, if there is one.
fn consider(number: u32, fd: i32, calls: u32) {
    let _undisturbed = lock::undisturbed();
    let slot = slots::slot(number);
    let Some(guard) = slot.upgrading.try_lock() else { return };
    if matches!(slot.phase.load(Ordering::Acquire), phase::LOOKING | phase::LISTED) && !slot.is_only_ours(number) {
        decline(slot, &guard);
        return never(slot, fd, Reason::Shared, &"");
    }
    if matches!(slot.phase.load(Ordering::Acquire), phase::LOOKING | phase::LISTED) && stays_one_shot(slot, &guard) {
        decline(slot, &guard);
        return never(slot, fd, Reason::OneShot, &"");
    }
    match slot.phase.load(Ordering::Acquire) {
        phase::PLAIN => begin(number, slot, &guard, fd, calls),
        phase::LOOKING => look(slot, &guard, fd, calls),
        phase::LISTED => {
            let upgrade = slot.upgrade(&guard);
            if calls < upgrade.next_look {
                return;
            }
            let entry = upgrade.meeting.zip(upgrade.ticket);
            match entry.and_then(|((board, _), ticket)| board.is_answered(ticket)) {
                Some(true) => {
                    let again = upgrade.meeting.and_then(|(_, key)| {
                        // The key alone could be that of another connection, which a member of the group has written there.
                        let may = || peers::user_at(fd, key);
                        spares::take_again(&key.to_bytes(), may)
                    });
                    if let Some((segment, user)) = again {
                        count(&counters().reused, 1);
                        withdraw(upgrade);
                        (upgrade.end, upgrade.spare, upgrade.peer_user) = (End::Taker, Some(0), user);
                        slot.set_segment(&guard, segment);
                        slot.phase.store(phase::OFFERED, Ordering::Release);
                        switch(number, slot, &guard, fd);
                    } else {
                        if upgrade.meeting.is_some_and(|(board, _)| board.is_of_group()) {
                            // Another member may have written that.
                            if calls >= upgrade.last_look {
                                withdraw(upgrade);
                                return never(slot, fd, Reason::NotFound, &"");
                            }
                            look_later(upgrade, calls);
                        }
                        drop(guard);
                        take_offers();
                    }
                }
                Some(false) if calls < upgrade.last_look => {
                    // A look at memory costs next to nothing.
                    if upgrade.meeting.is_some_and(|(board, _)| board.is_of_group()) {
                        look_later(upgrade, calls);
                    }
                }
                // Overwritten, or in vain.
                _ => {
                    let reason = if upgrade.by_relay { Reason::NoRelay } else { Reason::NotFound };
                    decline(slot, &guard);
                    never(slot, fd, reason, &"");
                }
            }
        }
        phase::OFFERED => switch(number, slot, &guard, fd),
        _ => {}
    }
}

/// True for a connection within this host that the program has registered with `EPOLLONESHOT`. Only the kernel can disable such a registration,
/// when it reports the event. The kernel does not report unread bytes in the ring, so two threads could get an event for them.
fn stays_one_shot(slot: &Slot, guard: &Guard<'_>) -> bool {
    slot.is_one_shot.load(Ordering::Relaxed) && !slot.upgrade(guard).by_relay
}

/// Returns a connection to TCP before the program registers it with `EPOLLONESHOT`. A connection with unread bytes stays accelerated, because
/// they would come again only when the peer makes a call; the next `epoll_ctl` call tries again.
pub(crate) fn leave_for_one_shot(number: u32, fd: i32) {
    let slot = slots::slot(number);
    if !relayed::is_relayed(slot) && crate::data::demote_if_read(slot, fd) {
        slot.is_left_to_kernel.store(true, Ordering::SeqCst);
        stays(slot, fd, Reason::OneShot, &", from here on");
    }
}

/// A connection that has lasted.
fn begin(number: u32, slot: &'static Slot, guard: &Guard<'_>, fd: i32, calls: u32) {
    if !slot.is_only_ours(number) {
        // A server's parent may close its descriptor soon.
        if calls > PATIENCE || slot.is_foreign.load(Ordering::Relaxed) {
            never(slot, fd, Reason::Shared, &"");
        }
        return;
    }
    let socket = slots::borrow(fd);
    let (Ok(local), Ok(Some(peer))) = (rustix::net::getsockname(socket), rustix::net::getpeername(socket)) else {
        return never(slot, fd, Reason::Unsupported, &", or no connection");
    };
    let (Some(local), Some(peer)) = (address(&local), address(&peer)) else {
        return never(slot, fd, Reason::Unsupported, &"");
    };
    let Some(settings) = SETTINGS.get() else { return };
    let mode = settings.mode([local.port(), peer.port()]);
    let (here, there) = (local.ip().to_canonical(), peer.ip().to_canonical());
    let is_here = here == there || here.is_loopback() && there.is_loopback();
    let by_relay = !is_here || mode == Mode::Relay;
    if by_relay && settings.relay == 0 {
        return never(slot, fd, if is_here { Reason::NotRemote } else { Reason::Remote }, &"");
    }
    if mode == Mode::Tcp {
        return never(slot, fd, Reason::Rule, &"");
    }
    if uring::finds_one() {
        return never(slot, fd, Reason::Uring, &"");
    }
    if !Connection::new(fd).is_established() {
        return never(slot, fd, Reason::Ended, &"");
    }
    if Connection::new(fd).is_unsupported() {
        return never(slot, fd, Reason::Unsupported, &"");
    }
    if waits_for_more(slot, settings, [local.port(), peer.port()]) {
        return;
    }
    if !by_relay && slot.is_one_shot.load(Ordering::Relaxed) {
        return never(slot, fd, Reason::OneShot, &"");
    }
    if !by_relay && experience::is_rung(slot.service.load(Ordering::Relaxed)) {
        return never(slot, fd, Reason::Doorbells, &"");
    }
    let namespace = Connection::new(fd).cookie(libc::SO_NETNS_COOKIE);
    // The relay is of this user.
    let group = settings.group.filter(|_| !by_relay);
    let (Some(board), Ok(namespace)) = (board(group), namespace) else {
        return never(slot, fd, Reason::Failed, &", there is no board");
    };
    let key = if by_relay { relayed_key(namespace, local, peer) } else { Key::new(namespace, local, peer) };
    let upgrade = slot.upgrade(guard);
    upgrade.meeting = Some((board, key));
    upgrade.by_relay = by_relay;
    if !by_relay && !Key::is_higher(local, peer) {
        (upgrade.next_look, upgrade.looks) = (calls, 0);
        slot.phase.store(phase::LOOKING, Ordering::Release);
        return look(slot, guard, fd, calls);
    }
    let (Some(service), Ok(cookie)) = (service(namespace), Connection::new(fd).cookie(libc::SO_COOKIE)) else {
        return never(slot, fd, Reason::Failed, &", there is no Unix socket");
    };
    upgrade.ticket = board.list(key, Listing { service, cookie });
    (upgrade.next_look, upgrade.looks, upgrade.last_look) = (calls, 0, calls.saturating_add(PATIENCE));
    slot.phase.store(phase::LISTED, Ordering::Release);
    upgrade.is_higher = Key::is_higher(local, peer);
    if by_relay
        && let Err(error) = relay::ask(
            settings.relay,
            Request { key: key.to_bytes(), is_higher: Key::is_higher(local, peer), service: Some(service) },
            &[],
        )
    {
        withdraw(slot.upgrade(guard));
        never(slot, fd, Reason::NoRelay, &format_args!(": this host's relay: {error}"));
    }
}

fn withdraw(upgrade: &mut Upgrade) {
    if let (Some(ticket), Some((board, _))) = (upgrade.ticket.take(), upgrade.meeting) {
        board.withdraw(ticket);
    }
}

/// This end looks again after some calls, which become more and more.
fn look_later(upgrade: &mut Upgrade, calls: u32) {
    upgrade.looks += 1;
    upgrade.next_look = calls.saturating_add(1 << (upgrade.looks / LOOKS_ALIKE));
}

/// Looks for the other end's entry.
fn look(slot: &'static Slot, guard: &Guard<'_>, fd: i32, calls: u32) {
    let upgrade = slot.upgrade(guard);
    if calls < upgrade.next_look {
        return;
    }
    let (Some((board, key)), Some(settings)) = (upgrade.meeting, SETTINGS.get()) else { return };
    let Some((ticket, listing)) = board.find(key) else {
        look_later(upgrade, calls);
        if upgrade.looks > LOOKS {
            never(slot, fd, Reason::NotFound, &"");
        }
        return;
    };
    // An entry that an earlier connection between the same addresses has left names another socket.
    match offer(fd, key, listing, settings) {
        Ok((segment, user)) => {
            board.answer(ticket);
            (upgrade.end, upgrade.spare, upgrade.peer_user) = (End::Maker, Some(listing.service), user);
            slot.set_segment(guard, segment);
            slot.phase.store(phase::OFFERED, Ordering::Release);
        }
        Err((reason, error)) => never(slot, fd, reason, &format_args!(": {error}")),
    }
}

/// Longest wait of a call for the offers of processes that have connected.
const OFFER_PATIENCE: Duration = Duration::from_millis(200);
/// Offers that a call takes.
const OFFERS_AT_ONCE: usize = 16;

/// Offers the other end of a connection a segment: one that both processes have from an earlier one, or a new one. Returns it, and the
/// user whom it is offered to.
fn offer(fd: i32, key: Key, listing: Listing, settings: &Settings) -> Result<(Segment, u32), (Reason, io::Error)> {
    let failed = |error: rustix::io::Errno| (Reason::Failed, error.into());
    let user = peers::prove(fd, key, listing.cookie)?;
    let size = settings.ring_with(MAPPED.load(Ordering::Relaxed)).unwrap_or(settings.ring);
    if let Some(segment) = spares::offer_again(listing.service, user, size, &key.to_bytes()) {
        count(&counters().reused, 1);
        return Ok((segment, user));
    }
    let cookie = Connection::new(fd).cookie(libc::SO_COOKIE).map_err(|error| (Reason::Failed, error))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
    if peers::is_full() {
        return Err((Reason::Failed, io::Error::other("too much that others have sent had to be refused")));
    }
    if !peers::is_in(socket.as_raw_fd(), key.namespace()) {
        return Err((Reason::Failed, peers::in_another_namespace()));
    }
    peers::take_no_files(&socket);
    let name = name(listing.service).map_err(failed)?;
    rustix::net::connect(&socket, &name).map_err(failed)?;
    let met = Sender::of(&socket);
    if met.user != Some(user) {
        met.release(socket);
        return Err((
            Reason::Failed,
            io::Error::other("the process found there is another user's, or not in the group"),
        ));
    }
    let (segment, file) = make(settings)?;
    let message = Offer { key: key.to_bytes(), cookie, by: Offered::Peer }.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&files));
    let sent = rustix::net::sendmsg(
        &socket,
        &[IoSlice::new(&message)],
        &mut control,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    );
    if let Err(error) = sent {
        drop_unused(segment);
        return Err(failed(error));
    }
    Ok((segment, user))
}

fn make(settings: &Settings) -> Result<(Segment, OwnedFd), (Reason, io::Error)> {
    let size = || settings.ring_with(MAPPED.load(Ordering::Relaxed));
    if size() != Some(settings.ring) {
        spares::discard_all();
    }
    let size = size().ok_or_else(|| (Reason::Memory, io::Error::other("rings of other connections have it all")))?;
    let made = Segment::create(size).map_err(|error| (Reason::Memory, error))?;
    MAPPED.fetch_add(made.0.len() as u64, Ordering::Relaxed);
    Ok(made)
}

/// Gives a segment's memory back. Nothing may use it any more.
pub(crate) fn unmap(segment: Segment) {
    // Held by the relay, it would stay open.
    segment.let_go(&Connection::new(-1));
    leave(segment);
}

/// As [`unmap`], of one that another process goes on with: the relay keeps it.
fn leave(segment: Segment) {
    MAPPED.fetch_sub(segment.len() as u64, Ordering::Relaxed);
    // SAFETY: callers have taken it out of its slot, under its locks.
    unsafe { segment.unmap() };
}

/// As [`unmap`], of one that has become nothing: the other end is not to keep it either.
fn drop_unused(segment: Segment) {
    if !segment.is_relayed() {
        segment.discard();
    }
    unmap(segment);
}

/// Boards of the users that this process has been, and of its group; they are few, and stay.
struct Boards {
    lock: crate::lock::Lock,
    #[allow(clippy::type_complexity, reason = "whose it is, and the board")]
    known: UnsafeCell<[Option<(Circle, Option<Board>)>; 6]>,
}

// SAFETY: the cell is used under the lock.
unsafe impl Sync for Boards {}

static BOARDS: Boards = Boards { lock: crate::lock::Lock::new(), known: UnsafeCell::new([None; 6]) };

/// The group's board, or that of the user that this process is now.
fn board(group: Option<u32>) -> Option<Board> {
    let uid = rustix::process::geteuid().as_raw();
    let circle = group.map_or(Circle::User(uid), Circle::Group);
    let _guard = BOARDS.lock.lock().ok()?;
    // SAFETY: under the lock.
    let known = unsafe { &mut *BOARDS.known.get() };
    let place = known.iter_mut().find(|place| place.is_none_or(|(other, _)| other == circle))?;
    let directory = &SETTINGS.get()?.board;
    let (_, board) = place.get_or_insert_with(|| {
        let board = Board::open(directory, circle);
        if let Err(error) = &board {
            let needs = match (error.kind(), circle) {
                (io::ErrorKind::PermissionDenied, Circle::User(_)) => "it has to be this user's alone",
                (io::ErrorKind::PermissionDenied, Circle::Group(_)) => {
                    "it has to be that group's alone, and this process in the group"
                }
                (io::ErrorKind::InvalidData, _) => "it has to be 2 MiB long (truncate -s 2M)",
                (io::ErrorKind::FileTooLarge, _) => "ulimit -f has to allow files of 2 MiB",
                _ => "it needs 2 MiB in a directory that can be written (board = of a policy file names another)",
            };
            let path = directory.join(circle.file_name());
            report::complain(&["no board ", &path.to_string_lossy(), ": ", &error.to_string(), "; ", needs]);
        }
        (circle, board.ok())
    });
    *board
}

fn name(service: u64) -> Result<SocketAddrUnix, rustix::io::Errno> {
    SocketAddrUnix::new_abstract_name(&service_name(service))
}

/// The Unix socket to which segments come, of this process, and the number in its name.
static SERVICE: AtomicI32 = AtomicI32::new(-1);
/// The user that this process was when it was made, whom the kernel tells others.
static SERVICE_OF: AtomicU32 = AtomicU32::new(0);
static SERVICE_NUMBER: AtomicU64 = AtomicU64::new(0);
static STARTING: crate::lock::Lock = crate::lock::Lock::new();

/// Starts it, the first time.
fn service(namespace: u64) -> Option<u64> {
    let _guard = STARTING.lock().ok()?;
    let uid = rustix::process::geteuid().as_raw();
    if SERVICE.load(Ordering::Relaxed) >= 0 {
        if SERVICE_OF.load(Ordering::Relaxed) == uid {
            return Some(SERVICE_NUMBER.load(Ordering::Relaxed));
        }
        slots::close_hidden(SERVICE.swap(-1, Ordering::Relaxed));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    if !peers::is_in(socket.as_raw_fd(), namespace) {
        return None;
    }
    let mut number = [0u8; 8];
    rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty()).ok()?;
    let number = u64::from_ne_bytes(number);
    rustix::net::bind(&socket, &name(number).ok()?).ok()?;
    rustix::net::listen(&socket, 4096).ok()?;
    let socket = slots::hide(socket)?;
    SERVICE_NUMBER.store(number, Ordering::Relaxed);
    SERVICE_OF.store(uid, Ordering::Relaxed);
    SERVICE.store(socket, Ordering::Relaxed);
    Some(number)
}

/// The process is not who it was: others would still be told so.
pub(crate) fn close_service() {
    if let Ok(_guard) = STARTING.lock() {
        let fd = SERVICE.swap(-1, Ordering::SeqCst);
        if fd >= 0 {
            slots::close_hidden(fd);
        }
    }
}

/// In a child that has just been forked: its parent's Unix socket is not its own.
pub(crate) fn after_fork() {
    STARTING.reset();
    BOARDS.lock.reset();
    relay::after_fork();
    peers::after_fork();
    let fd = SERVICE.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        slots::close_hidden(fd);
    }
}

/// Takes the segments that wait at the Unix socket.
fn take_offers() {
    let fd = SERVICE.load(Ordering::Relaxed);
    if fd < 0 {
        return;
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let begin = Instant::now();
    for _ in 0..OFFERS_AT_ONCE {
        if peers::is_full() {
            return;
        }
        let Ok(socket) = rustix::net::accept_with(slots::borrow(fd), flags) else { return };
        let sender = Sender::of(&socket);
        // However many have connected: this call is the program's.
        let mut patience = OFFER_PATIENCE.saturating_sub(begin.elapsed());
        if !sender.is_own && !slots::allowance().has_now(OFFER_PATIENCE) {
            patience = Duration::ZERO;
        }
        let waits = Instant::now();
        if sender.may_offer() && !has_sent(&socket, patience) && !sender.is_own {
            slots::allowance().spend_now(waits.elapsed());
        }
        match take_offer(&socket, &sender) {
            Ok(()) => drop(socket),
            Err(error) => {
                tell(socket.as_raw_fd(), &format_args!("an offer of shared memory is refused: {error}"));
                sender.release(socket);
            }
        }
    }
}

/// Waits for what a process that has just connected is about to send. Whether it has.
fn has_sent(socket: &OwnedFd, patience: Duration) -> bool {
    let mut list = [rustix::event::PollFd::new(socket, rustix::event::PollFlags::IN)];
    let patience = rustix::time::Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() };
    rustix::event::poll(&mut list, Some(&patience)).is_ok_and(|ready| ready > 0)
}

fn take_offer(socket: &OwnedFd, sender: &Sender) -> io::Result<()> {
    if !sender.may_offer() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut message = [0u8; OFFER_LEN + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, flags)?;
    let files = control.drain().filter_map(|part| match part {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let mut files = files.flatten();
    let (first, second) = (files.next(), files.next());
    let (None, Some(offer)) = (&second, Offer::decode(&message[..received.bytes])) else {
        [first, second].into_iter().flatten().for_each(|file| sender.put_away(file));
        return Err(io::ErrorKind::InvalidData.into());
    };
    let file = first.ok_or(io::ErrorKind::InvalidData)?;
    // The connection that it is for: one that has an entry on the board.
    let mut result = Err(io::ErrorKind::NotFound.into());
    let mut wanted = None;
    slots::each(|number, fd| {
        let slot = slots::slot(number);
        if wanted.is_some() || slot.phase.load(Ordering::Relaxed) != phase::LISTED {
            return;
        }
        if let Ok(guard) = slot.upgrading.lock()
            && slot.upgrade(&guard).meeting.is_some_and(|(_, key)| key.is(&offer.key))
            && slot.upgrade(&guard).by_relay == (offer.by == Offered::Relayed)
        {
            wanted = Some((number, fd));
        }
    });
    if let Some((number, fd)) = wanted {
        let slot = slots::slot(number);
        if let Ok(guard) = slot.upgrading.lock()
            && slot.phase.load(Ordering::Relaxed) == phase::LISTED
            && slot.is_only_ours(number)
        {
            let meeting = slot.upgrade(&guard).meeting.map(|(_, key)| key);
            let prove = |key| peers::prove(fd, key, offer.cookie).ok();
            // Others cannot end what goes on with who has the other end.
            match offer.by {
                Offered::Peer => {
                    if sender.user.is_none() || meeting.and_then(prove) != sender.user {
                        sender.put_away(file);
                        return Err(io::Error::other(
                            "it is not offered by the user at the other end, or not by a member",
                        ));
                    }
                }
                // A relay has proved to another who it is, and is this user's.
                Offered::Relayed if !sender.is_own => {
                    sender.put_away(file);
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                Offered::Relayed => {}
            }
            withdraw(slot.upgrade(&guard));
            result = adopt(number, &guard, fd, &offer, &file, sender.user);
            match &result {
                Ok(()) => {
                    drop(file);
                    switch(number, slot, &guard, fd);
                }
                Err(error) => {
                    waker::close(number);
                    let is_memory = error.kind() == io::ErrorKind::OutOfMemory;
                    let reason = if is_memory { Reason::Memory } else { Reason::Failed };
                    never(slot, fd, reason, &format_args!(": {error}"));
                    sender.put_away(file);
                }
            }
            return result;
        }
    }
    if offer.by == Offered::Relayed && sender.is_own {
        refuse(&file);
    }
    sender.put_away(file);
    result
}

/// The connection that the relay offers this segment for has ended, or goes by TCP: the other end must not wait for this one.
fn refuse(file: &OwnedFd) {
    if let Ok(segment) = Segment::adopt(file).map(Segment::as_relayed) {
        segment.let_go(&Connection::new(-1));
        // SAFETY: nothing else knows it.
        unsafe { segment.unmap() };
    }
}

fn adopt(number: u32, guard: &Guard<'_>, fd: i32, offer: &Offer, file: &OwnedFd, user: Option<u32>) -> io::Result<()> {
    let slot = slots::slot(number);
    let (segment, spare) = match offer.by {
        Offered::Peer => {
            let segment = Segment::adopt(file)?;
            let most = SETTINGS.get().map_or(0, |settings| settings.ring);
            if user != Some(rustix::process::geteuid().as_raw()) && segment.ring_size() > most {
                // SAFETY: nothing else knows it.
                unsafe { segment.unmap() };
                return Err(io::Error::other(
                    "its rings are larger than those of this process (--ring), and it is another user's",
                ));
            }
            (count_in(segment)?, Some(0))
        }
        Offered::Relayed => {
            let segment = Segment::adopt(file)?.as_relayed();
            let request = Request { key: offer.key, is_higher: slot.upgrade(guard).is_higher, service: None };
            let port = SETTINGS.get().map_or(0, |settings| settings.relay);
            if segment.over() != Over::No {
                // SAFETY: nothing else knows it.
                unsafe { segment.unmap() };
                return Err(io::Error::other("the relay has taken it back"));
            }
            let asked = match waker::make(number) {
                Some(waker) => relay::hand_over(number, port, request, &[fd, waker]),
                None => relay::hand_over(number, port, request, &[fd]),
            };
            if let Err(error) = asked {
                segment.let_go(&Connection::new(fd));
                // SAFETY: as above.
                unsafe { segment.unmap() };
                return Err(error);
            }
            (count_in(segment)?, None)
        }
    };
    let upgrade = slot.upgrade(guard);
    (upgrade.end, upgrade.spare, upgrade.peer_user) = (End::Taker, spare, user.unwrap_or(u32::MAX));
    slot.set_segment(guard, segment);
    slot.phase.store(phase::OFFERED, Ordering::Release);
    Ok(())
}

/// Counts a segment that this process has been given.
fn count_in(segment: Segment) -> io::Result<Segment> {
    let memory = SETTINGS.get().map_or(0, |settings| settings.memory);
    let len = segment.len() as u64;
    if MAPPED.fetch_add(len, Ordering::Relaxed) + len > memory {
        spares::discard_all();
    }
    if MAPPED.load(Ordering::Relaxed) > memory {
        drop_unused(segment);
        let why = format!("the peer's rings need {len} bytes (memory = {memory} in all)");
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, why));
    }
    Ok(segment)
}

/// Has calls go through the segment from now on, if nothing is inside a plain call that receives: such a call would take what is not
/// for it.
fn switch(number: u32, slot: &'static Slot, guard: &Guard<'_>, fd: i32) {
    // If another process has mapped it, that process continues.
    let Some(segment) = slot.segment(guard) else { return };
    let end = slot.upgrade(guard).end;
    if end == End::Maker && !segment.is_accepted() {
        return;
    }
    let give_up = |reason, detail: &dyn std::fmt::Display| {
        if let Some(segment) = slot.take_segment(guard) {
            drop_unused(segment);
        }
        waker::close(number);
        never(slot, fd, reason, detail);
    };
    if !slot.is_only_ours(number) {
        return give_up(Reason::Shared, &"");
    }
    if segment.is_relayed() && slot.shut.load(Ordering::SeqCst) != 0 {
        return give_up(Reason::Ended, &"");
    }
    if uring::finds_one() {
        return give_up(Reason::Uring, &"");
    }
    // Neither would be for long; the first is the rule while a thread waits for what comes.
    if slot.plain_receives.load(Ordering::SeqCst) > 0 || segment.is_relayed() && FORKING.load(Ordering::SeqCst) > 0 {
        return;
    }
    let (Ok(receiving), Ok(sending)) = (slot.receiving.lock(), slot.sending.lock()) else { return };
    // If it goes from now on, that is found where the locks are waited for.
    if segment.is_relayed() && !relay::is_there(number) {
        drop((receiving, sending));
        return give_up(Reason::NoRelay, &": it has gone");
    }
    // What begins a plain call now sees this and waits for the locks.
    slot.phase.store(phase::ACCELERATED, Ordering::SeqCst);
    // A child would have a connection that the relay knows another process by. A thread that forks sees the phase, or this sees it.
    let is_forking = segment.is_relayed() && FORKING.load(Ordering::SeqCst) > 0;
    if is_forking || uring::is_used() || slot.plain_receives.load(Ordering::SeqCst) > 0 {
        slot.phase.store(phase::OFFERED, Ordering::SeqCst);
        return;
    }
    let connection = Connection::new(fd);
    let (position, received) = match connection.positions() {
        Ok(positions) => positions,
        Err(error) => {
            slot.phase.store(phase::OFFERED, Ordering::SeqCst);
            drop((receiving, sending));
            return give_up(Reason::Failed, &format_args!(": {error}"));
        }
    };
    connection.hold_options(slot);
    let (writer, mut reader) = (Writer::new(end), Reader::new(end, position));
    if !segment.is_relayed() {
        // `poll` may have reported these bytes.
        reader.set_data_until(received);
    }
    if slot.receives.load(Ordering::Relaxed) {
        reader.set_ready(&segment, &connection);
    }
    slot.set_ends([guard, &receiving, &sending], Some((writer, reader)));
    if end == End::Taker {
        segment.accept();
    }
    HAS_ACCELERATED.store(true, Ordering::SeqCst);
    let is_own = slot.upgrade(guard).peer_user == rustix::process::geteuid().as_raw();
    slot.is_others.store(!segment.is_relayed() && !is_own, Ordering::Relaxed);
    if segment.is_relayed() {
        count(&counters().relayed, 1);
        tell(fd, &"accelerated: to another host, through the relay");
    } else {
        count(&counters().accelerated, 1);
        tell(fd, &"accelerated: shared memory");
    }
}

/// A connection is about to be shut down that has not been accelerated yet: it will not be. The other end, on another host, may be already,
/// and must not wait for this one.
pub(crate) fn give_up_before_end(number: u32, fd: i32) {
    let is_listed = slots::slot(number).phase.load(Ordering::Acquire) == phase::LISTED;
    give_up_relayed(number, fd, if is_listed { Reason::NoRelay } else { Reason::Ended });
}

/// Withdraws the request to the relay for a connection that is not accelerated yet. The relay accepts that only from the process that asked.
pub(crate) fn give_up_relayed(number: u32, fd: i32, reason: Reason) {
    let slot = slots::slot(number);
    let Ok(guard) = slot.upgrading.lock() else { return };
    let is_asked = matches!(slot.phase.load(Ordering::Acquire), phase::LISTED | phase::OFFERED);
    if !slot.upgrade(&guard).by_relay || !is_asked {
        return;
    }
    decline(slot, &guard);
    if let Some(segment) = slot.take_segment(&guard) {
        unmap(segment);
    }
    never(slot, fd, reason, &"");
}

/// Tells the relay that the segment it was asked for is not wanted any more.
fn decline(slot: &Slot, guard: &Guard<'_>) {
    let upgrade = slot.upgrade(guard);
    withdraw(upgrade);
    if let (true, Some((_, key)), Some(settings)) = (upgrade.by_relay, upgrade.meeting, SETTINGS.get()) {
        let request = Request { key: key.to_bytes(), is_higher: upgrade.is_higher, service: None };
        relay::ask_patiently(settings.relay, request);
    }
}

/// A connection that has not been accelerated yet is not any more.
pub(crate) fn give_up(number: u32) {
    let slot = slots::slot(number);
    if let Ok(guard) = slot.upgrading.lock()
        && !slot.is_accelerated()
    {
        if slot.phase.load(Ordering::Acquire) == phase::LISTED {
            decline(slot, &guard);
        }
        slot.phase.store(phase::NEVER, Ordering::Release);
        if let Some(segment) = slot.take_segment(&guard) {
            drop_unused(segment);
        }
    }
}

/// Makes a connection plain that went back to TCP, once both rings are empty: calls go to the kernel alone from then on. False if they are
/// not, or if other processes share it.
pub(crate) fn retire(number: u32, fd: i32) -> bool {
    let slot = slots::slot(number);
    let Ok(guard) = slot.upgrading.lock() else { return false };
    let (Ok(receiving), Ok(sending)) = (slot.receiving.lock(), slot.sending.lock()) else { return false };
    let guards = [&guard, &receiving, &sending];
    let Some((segment, writer, reader)) = slot.ends(guards) else { return false };
    let connection = Connection::new(fd);
    let is_plain = writer.is_plain(&segment) && reader.is_plain(&segment, &connection) == Ok(true);
    crate::data::keep_error(slot, reader);
    if !is_plain || slot.error.load(Ordering::Relaxed) != 0 || !slot.is_only_ours(number) {
        return false;
    }
    // The peer asks the kernel what becomes of this end.
    writer.set_ended(&segment, &connection);
    slot.phase.store(phase::NEVER, Ordering::SeqCst);
    slot.set_ends(guards, None);
    if let Some(segment) = slot.take_segment(&guard) {
        drop_unused(segment);
    }
    true
}

/// The program dissolves a connection and may connect its socket again: calls go to the kernel alone from then on.
pub(crate) fn dissolve(number: u32, fd: i32) {
    let slot = slots::slot(number);
    give_up_relayed(number, fd, Reason::Ended);
    give_up(number);
    let Ok(guard) = slot.upgrading.lock() else { return };
    let (Ok(receiving), Ok(sending)) = (slot.receiving.lock(), slot.sending.lock()) else { return };
    let guards = [&guard, &receiving, &sending];
    if let Some((segment, writer, reader)) = slot.ends(guards) {
        let connection = Connection::new(fd);
        reader.set_gone(&segment, &connection);
        writer.set_ended(&segment, &connection);
        // The relay would ring on the next connection.
        relayed::take_tcp_back(&segment, fd);
        slot.phase.store(phase::NEVER, Ordering::SeqCst);
        slot.set_ends(guards, None);
        connection.restore_options(slot);
        if slot.is_only_ours(number)
            && let Some(segment) = slot.take_segment(&guard)
        {
            drop_unused(segment);
        }
        stays(slot, fd, Reason::Ended, &", from here on");
    }
    drop((receiving, sending, guard));
    waker::close(number);
    room::close(number);
}

/// Threads that fork.
pub(crate) static FORKING: AtomicU32 = AtomicU32::new(0);

/// The end of a connection of which nothing has become.
pub(crate) fn account(slot: &Slot, guard: &Guard<'_>, fd: i32) {
    match slot.phase.load(Ordering::Relaxed) {
        // Sockets that were never connected have none.
        phase::PLAIN if slot.calls.load(Ordering::Relaxed) > 0 => count(&counters().short, 1),
        phase::LOOKING | phase::LISTED => {
            stays(slot, fd, if slot.upgrade(guard).by_relay { Reason::NoRelay } else { Reason::NotFound }, &"");
        }
        _ => {}
    }
}

/// Everything of a connection whose last descriptor of this process is about to be closed, or a negative number if it is not to be
/// touched.
pub(crate) fn tear_down(number: u32, fd: i32, last: Last) {
    let slot = slots::slot(number);
    let is_last = last == Last::Everywhere;
    let is_still_it = || match last {
        Last::Here(generation) => slot.generation.load(Ordering::SeqCst) == generation,
        _ => true,
    };
    if let Ok(guard) = slot.upgrading.lock()
        && is_still_it()
    {
        if is_last && slot.phase.load(Ordering::Relaxed) == phase::LISTED {
            decline(slot, &guard);
        }
        if is_last {
            account(slot, &guard, fd);
            if let (service @ 1.., Some(settings)) = (slot.service.load(Ordering::Relaxed), SETTINGS.get()) {
                let calls = slot.counted.load(Ordering::Relaxed) / WHOLE;
                experience::learn(service, calls, settings.after_calls_of_short);
            }
        }
        let was_accelerated = slot.is_accelerated();
        if was_accelerated
            && fd >= 0
            && let Ok(Some(receiving)) = slot.receiving()
        {
            if is_last {
                crate::data::settle(slot, fd, receiving, false);
            } else {
                crate::data::settle_shared(slot, fd, receiving);
            }
        }
        if let (Ok(receiving), Ok(sending)) = (slot.receiving.lock(), slot.sending.lock())
            && is_still_it()
        {
            let segment = if is_last {
                slot.phase.store(phase::NEVER, Ordering::Release);
                let guards = [&guard, &receiving, &sending];
                slot.set_ends(guards, None);
                slot.end_segment(guards)
            } else {
                // Another process goes on with it.
                slot.leave_segment(&guard)
            };
            let upgrade = slot.upgrade(&guard);
            let is_ours = !slot.was_shared.load(Ordering::SeqCst) && !slot.is_foreign.load(Ordering::SeqCst);
            match (segment, upgrade.spare) {
                (Some(segment), Some(service)) if was_accelerated && is_last && is_ours => {
                    spares::keep(segment, upgrade.end, service, upgrade.peer_user);
                }
                (Some(segment), _) if is_last => drop_unused(segment),
                (Some(segment), _) => leave(segment),
                (None, _) => {}
            }
        }
    }
    if !is_still_it() {
        return;
    }
    waker::close(number);
    room::close(number);
    if is_last {
        slots::release(number);
    }
}
