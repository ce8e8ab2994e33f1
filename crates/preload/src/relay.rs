//! This host's relay, which stands for the other end of a connection to another host.
//!
//! Each process has a connection of its own to the relay's Unix socket, by which each knows that the other lives. Asking for a segment goes
//! that way, and wake-ups. What sleeps on a connection to another host waits for its end, too: [`lifeline`].

use crate::lock::Lock;
use crate::report::tell;
use crate::slots::{self, Upgrade};
use crate::tcp::Connection;
use crate::{SETTINGS, epoll, peers};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use thruway_sockets::Over;
use thruway_sockets::meeting::{RELAY_FULL, Request, relay_name};

/// A connection to the relay, or that there is none since this one.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Connected {
    fd: Option<i32>,
    /// How many there have been.
    count: u32,
}

impl Connected {
    fn now() -> Connected {
        let word = CONNECTED.load(Ordering::SeqCst);
        Connected { fd: (word as u32).checked_sub(1).map(u32::cast_signed), count: (word >> 32) as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.count) << 32 | u64::from(self.fd.map_or(0, |fd| fd.cast_unsigned() + 1))
    }

    /// Takes note that it has ended. False if that is known.
    fn end(self) -> bool {
        let ended = Connected { fd: None, ..self };
        let was = CONNECTED.compare_exchange(self.word(), ended.word(), Ordering::SeqCst, Ordering::Relaxed);
        self.fd.is_some() && was.is_ok()
    }
}

static CONNECTED: AtomicU64 = AtomicU64::new(0);
/// The port that the relay is known by, which is 0 before it has been asked for anything.
static PORT: AtomicU32 = AtomicU32::new(0);
static CONNECTING: Lock = Lock::new();

fn connect(port: u16) -> io::Result<(Connected, i32)> {
    let _guard = CONNECTING.lock().map_err(|_| io::Error::from(io::ErrorKind::Interrupted))?;
    let before = Connected::now();
    if let Some(fd) = before.fd {
        return Ok((before, fd));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let uid = rustix::process::geteuid().as_raw();
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&relay_name(uid, port))?)?;
    if !peers::is_own(&socket) {
        return Err(io::Error::other("it is another user's"));
    }
    let fd = slots::hide(socket).ok_or(io::ErrorKind::OutOfMemory)?;
    PORT.store(port.into(), Ordering::Relaxed);
    let connected = Connected { fd: Some(fd), count: before.count + 1 };
    CONNECTED.store(connected.word(), Ordering::SeqCst);
    Ok((connected, fd))
}

/// Has the relay know of this process from the beginning: one that was started for programs stays while there are any.
pub(crate) fn start(port: u16) {
    if port != 0 {
        // If it is not there, it may be when it is wanted.
        let _ = connect(port);
    }
}

/// Has it use these descriptors for a connection that it carries already: the TCP connection, the waker, and what is written to when there
/// is room.
pub(crate) fn use_with(upgrade: &Upgrade, with: &[i32]) -> io::Result<()> {
    let (Some((_, key)), Some(settings)) = (upgrade.meeting, SETTINGS.get()) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    ask(settings.relay, Request { key: key.to_bytes(), is_higher: upgrade.is_higher, service: None }, with)
}

/// Descriptors of a message, at most.
const FILES: usize = 3;

/// Says something to it, with three descriptors at most.
pub(crate) fn ask(port: u16, request: Request, with: &[i32]) -> io::Result<()> {
    send(port, request, with).map(drop)
}

/// Longest wait of [`ask_patiently`], and number of attempts. Without the message, the relay gives up its offer after a minute.
const ASK_MAX: Duration = Duration::from_millis(100);
const ATTEMPTS: u32 = 10;

/// The relay has taken no message since a wait of [`ASK_MAX`]: it may be stopped.
static IS_STALLED: AtomicBool = AtomicBool::new(false);

/// As [`ask`], for a message that another host waits for: waits while the relay has many messages to take.
pub(crate) fn ask_patiently(port: u16, request: Request) {
    for _ in 0..ATTEMPTS {
        match ask(port, request, &[]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !IS_STALLED.load(Ordering::Relaxed) => {
                std::thread::sleep(ASK_MAX / ATTEMPTS);
            }
            _ => return,
        }
    }
    IS_STALLED.store(true, Ordering::Relaxed);
}

fn send(port: u16, request: Request, with: &[i32]) -> io::Result<Connected> {
    for attempt in 0..2 {
        let (connected, relay) = connect(port)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let mut files = [slots::borrow(-1); FILES];
        files.iter_mut().zip(with).for_each(|(place, fd)| *place = slots::borrow(*fd));
        if !with.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files[..with.len().min(FILES)]));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::net::sendmsg(slots::borrow(relay), &[IoSlice::new(&request.encode())], &mut control, flags);
        match sent {
            Ok(_) => {
                IS_STALLED.store(false, Ordering::Relaxed);
                return Ok(connected);
            }
            // It has ended, and another one may have been started.
            Err(Errno::PIPE | Errno::CONNRESET) if attempt == 0 => lose(connected),
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::BrokenPipe.into())
}

/// Wakes it. False if it has gone.
pub(crate) fn wake() -> bool {
    let relay = match Connected::now().fd {
        None => match connect(PORT.load(Ordering::Relaxed) as u16) {
            Ok((_, relay)) => relay,
            // The call that this is for has interrupted one that connects, or this process or the relay is at a limit.
            Err(error) => return is_of_a_limit(&error),
        },
        Some(relay) => relay,
    };
    match rustix::net::send(slots::borrow(relay), &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        // What has not been able to take a wake-up has others before it.
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => true,
        // The relay looks without a wake-up once a second.
        Err(_) => was_refused(relay),
    }
}

/// False for errors of a relay that has gone.
fn is_of_a_limit(error: &io::Error) -> bool {
    let limits = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::AGAIN];
    error.kind() == io::ErrorKind::Interrupted
        || error.kind() == io::ErrorKind::OutOfMemory
        || limits.iter().any(|limit| error.raw_os_error() == Some(limit.raw_os_error()))
}

/// Whether the relay has ended this process's connection to it because it was at its limit of open files. The next wake-up connects again.
fn was_refused(relay: i32) -> bool {
    let mut message = [0u8; 64];
    let mut receive = || rustix::net::recv(slots::borrow(relay), &mut message, RecvFlags::DONTWAIT).map(|(len, _)| len);
    // A message that the relay has not taken is an error first.
    let len = receive().or_else(|_| receive()).unwrap_or(0);
    let is_full = message[..len] == *RELAY_FULL.as_bytes();
    let connected = Connected::now();
    if is_full && connected.fd == Some(relay) && connected.end() {
        epoll::forget_relay(relay);
        slots::close_hidden(relay);
    }
    is_full
}

/// A connection of this process's is handed over to a relay, from which on this process loses it when the relay goes.
pub(crate) fn hand_over(number: u32, port: u16, request: Request, with: &[i32]) -> io::Result<()> {
    let connected = send(port, request, with)?;
    slots::local(number).relay.store(connected.count, Ordering::SeqCst);
    CARRIES.store(true, Ordering::SeqCst);
    epoll::watch_relay();
    if is_there(number) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

/// It has been handed over at least one connection.
static CARRIES: AtomicBool = AtomicBool::new(false);

/// Whether the relay that a connection was handed over to has not been found to have gone. One that goes from now on takes the connection
/// with it, if that is accelerated.
pub(crate) fn is_there(number: u32) -> bool {
    let now = Connected::now();
    now.fd.is_some() && now.count == slots::local(number).relay.load(Ordering::SeqCst)
}

/// What has to be polled, for no event, by everything that sleeps on connections of which a relay may carry one: its end is the relay's.
pub(crate) fn lifeline() -> Option<i32> {
    if CARRIES.load(Ordering::SeqCst) { Connected::now().fd } else { None }
}

/// As [`lifeline`], for what sleeps on this connection.
pub(crate) fn lifeline_of(number: u32) -> Option<i32> {
    if slots::local(number).relay.load(Ordering::Relaxed) == 0 { None } else { lifeline() }
}

/// Looks whether the relay lives: if not, what it has carried is lost.
pub(crate) fn look() {
    let connected = Connected::now();
    let Some(relay) = connected.fd else { return };
    let socket = slots::borrow(relay);
    let mut list = [rustix::event::PollFd::new(&socket, rustix::event::PollFlags::empty())];
    let none = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    if rustix::event::poll(&mut list, Some(&none)) == Ok(1) {
        lose(connected);
    }
}

/// For a program that never sleeps: looks whether the relay lives, once in some milliseconds.
pub(crate) fn glance(number: u32) {
    static LOOKED_AT: AtomicU32 = AtomicU32::new(0);
    if lifeline_of(number).is_some() {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        let now = (now.tv_sec as u32).wrapping_mul(64).wrapping_add(now.tv_nsec as u32 >> 24);
        if LOOKED_AT.swap(now, Ordering::Relaxed) != now {
            look();
        }
    }
}

/// That connection to the relay has ended, and with it what went that way. The other end's relay may have gone at the same time, and then
/// nothing else says so.
fn lose(connected: Connected) {
    let Some(relay) = connected.fd.filter(|_| connected.end()) else { return };
    epoll::forget_relay(relay);
    slots::close_hidden(relay);
    slots::each(|number, fd| {
        if slots::local(number).relay.load(Ordering::SeqCst) != connected.count {
            return;
        }
        if let Ok(Some(receiving)) = slots::slot(number).receiving()
            && slots::find(fd) == Some(number)
            && receiving.segment.is_carried()
        {
            receiving.segment.set_over(Over::Lost);
            tell(fd, &"reset: this host's relay has gone");
            // What sleeps on it wakes.
            Connection::new(fd).reset();
        }
    });
}

/// In a child that has just been forked: the relay must not take it for its parent.
pub(crate) fn after_fork() {
    CONNECTING.reset();
    let connected = Connected::now();
    if let Some(relay) = connected.fd
        && connected.end()
    {
        slots::close_hidden(relay);
        start(PORT.load(Ordering::Relaxed) as u16);
    }
}
