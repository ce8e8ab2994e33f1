//! System calls on TCP sockets: options, and vectored transfers on raw memory.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// How long unacknowledged bytes, or silence on a dead path, may last.
const USER_TIMEOUT: Duration = Duration::from_secs(60);

/// A non-blocking TCP socket on its way to `addr`.
pub(super) fn start_connect(addr: SocketAddr) -> io::Result<TcpStream> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd: OwnedFd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&fd, &addr) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(TcpStream::from(fd)),
        Err(e) => Err(e.into()),
    }
}

/// Applies what every iWARP socket wants. Options the system refuses are left alone: they tune,
/// they do not decide correctness.
pub(super) fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(20));
    let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10));
    let _ = sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT.as_millis() as u32);
    Ok(())
}

/// The congestion control in force, for people.
pub(super) fn congestion(stream: &TcpStream) -> String {
    sockopt::tcp_congestion(stream).unwrap_or_default()
}

/// The outcome of a connect that was in progress: `Ok(false)` while it still is.
pub(super) fn connect_result(stream: &TcpStream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(e) => Err(e),
    }
}

/// Largest segment TCP sends now.
pub(super) fn max_segment(stream: &TcpStream) -> usize {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` and `len` are valid for writing and describe each other.
    let rc = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_MAXSEG, (&raw mut value).cast(), &raw mut len)
    };
    if rc == 0 && value > 0 { value as usize } else { 536 }
}

/// Sends from memory described by `iov`. `Ok(None)` if TCP takes nothing now.
///
/// # Safety
/// Every element must describe readable memory.
pub(super) unsafe fn send(stream: &TcpStream, iov: &[libc::iovec]) -> io::Result<Option<usize>> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    let rc = if let [one] = iov {
        // SAFETY: the caller's promise.
        unsafe { libc::send(stream.as_raw_fd(), one.iov_base, one.iov_len, flags) }
    } else {
        let header = message(iov);
        // SAFETY: the caller's promise; `header` points at `iov`, which outlives the call.
        unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const header, flags) }
    };
    outcome(rc)
}

/// Receives into memory described by `iov`. `Ok(None)` if nothing is there now, `Ok(Some(0))` at
/// the end of the stream.
///
/// # Safety
/// Every element must describe writable memory that nothing borrows.
pub(super) unsafe fn receive(stream: &TcpStream, iov: &[libc::iovec]) -> io::Result<Option<usize>> {
    let rc = if let [one] = iov {
        // SAFETY: the caller's promise.
        unsafe { libc::recv(stream.as_raw_fd(), one.iov_base, one.iov_len, libc::MSG_DONTWAIT) }
    } else {
        let mut header = message(iov);
        // SAFETY: the caller's promise; `header` points at `iov`, which outlives the call.
        unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) }
    };
    outcome(rc)
}

fn message(iov: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: an all-zero msghdr is valid: no name, no control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iov.as_ptr().cast_mut();
    header.msg_iovlen = iov.len();
    header
}

fn outcome(rc: isize) -> io::Result<Option<usize>> {
    if rc >= 0 {
        return Ok(Some(rc as usize));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}

/// Throws away up to `len` bytes of what has come, without a copy (tcp(7), MSG_TRUNC).
pub(super) fn discard(stream: &TcpStream, len: usize) -> std::io::Result<usize> {
    use std::os::fd::AsRawFd;
    // SAFETY: with MSG_TRUNC the kernel writes nothing to the buffer of a TCP socket, which may be null.
    let n = unsafe { libc::recv(stream.as_raw_fd(), std::ptr::null_mut(), len, libc::MSG_TRUNC | libc::MSG_DONTWAIT) };
    if n < 0 { Err(std::io::Error::last_os_error()) } else { Ok(n as usize) }
}
