//! This host's relay, which stands for the other end of a connection to another host.
//!
//! Each process has a connection of its own to the relay's Unix socket, by which the relay knows that it lives. Asking for a segment goes
//! that way, and wake-ups.

use crate::lock::Lock;
use crate::peers;
use crate::slots;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use thruway_sockets::meeting::{Request, relay_name};

/// The connection, or -1; and the port that the relay is known by, which is 0 before it has been asked for anything.
static CONNECTION: AtomicI32 = AtomicI32::new(-1);
static PORT: AtomicU32 = AtomicU32::new(0);
static CONNECTING: Lock = Lock::new();

fn connect(port: u16) -> io::Result<i32> {
    let _guard = CONNECTING.lock().map_err(|_| io::Error::from(io::ErrorKind::Interrupted))?;
    let fd = CONNECTION.load(Ordering::Relaxed);
    if fd >= 0 {
        return Ok(fd);
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
    CONNECTION.store(fd, Ordering::Release);
    Ok(fd)
}

/// Has the relay know of this process from the beginning: one that was started for programs stays while there are any.
pub(crate) fn start(port: u16) {
    if port != 0 {
        // If it is not there, it may be when it is wanted.
        let _ = connect(port);
    }
}

/// Says something to it, with two descriptors at most.
pub(crate) fn ask(port: u16, request: Request, with: &[i32]) -> io::Result<()> {
    for attempt in 0..2 {
        let relay = connect(port)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let mut files = [slots::borrow(-1); 2];
        files.iter_mut().zip(with).for_each(|(place, fd)| *place = slots::borrow(*fd));
        if !with.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files[..with.len().min(2)]));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::net::sendmsg(slots::borrow(relay), &[IoSlice::new(&request.encode())], &mut control, flags);
        match sent {
            Ok(_) => return Ok(()),
            // It has ended, and another one may have been started.
            Err(Errno::PIPE | Errno::CONNRESET) if attempt == 0 => forget(relay),
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::BrokenPipe.into())
}

/// Wakes it. False if it has gone.
pub(crate) fn wake() -> bool {
    let relay = match CONNECTION.load(Ordering::Acquire) {
        -1 => match connect(PORT.load(Ordering::Relaxed) as u16) {
            Ok(relay) => relay,
            // The call that this is for has interrupted one that connects.
            Err(error) => return error.kind() == io::ErrorKind::Interrupted,
        },
        relay => relay,
    };
    match rustix::net::send(slots::borrow(relay), &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        // What has not been able to take a wake-up has others before it.
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => true,
        Err(_) => false,
    }
}

fn forget(relay: i32) {
    if CONNECTION.compare_exchange(relay, -1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
        slots::close_hidden(relay);
    }
}

/// In a child that has just been forked: the relay must not take it for its parent.
pub(crate) fn after_fork() {
    CONNECTING.reset();
    let relay = CONNECTION.swap(-1, Ordering::Relaxed);
    if relay >= 0 {
        slots::close_hidden(relay);
        start(PORT.load(Ordering::Relaxed) as u16);
    }
}
