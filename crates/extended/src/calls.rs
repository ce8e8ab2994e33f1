//! Calls on the program's TCP socket, by the C library's functions: `thruway run` stands before these, and what it has accelerated
//! is not to be had from the kernel.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

pub(crate) fn send(tcp: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the bytes are readable for the time of the call.
    let sent = unsafe { libc::send(tcp.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

pub(crate) fn recv(tcp: BorrowedFd<'_>, to: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the memory is writable for the time of the call.
    let got = unsafe { libc::recv(tcp.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), libc::MSG_DONTWAIT) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

pub(crate) fn wait_readable(tcp: BorrowedFd<'_>, until: Instant) -> io::Result<()> {
    wait(tcp, libc::POLLIN, until)
}

pub(crate) fn wait_writable(tcp: BorrowedFd<'_>, until: Instant) -> io::Result<()> {
    wait(tcp, libc::POLLOUT, until)
}

fn wait(tcp: BorrowedFd<'_>, events: libc::c_short, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now()).as_millis() + 1;
    let mut fds = [libc::pollfd { fd: tcp.as_raw_fd(), events, revents: 0 }];
    // SAFETY: one structure, which lives for the time of the call.
    match unsafe { libc::poll(fds.as_mut_ptr(), 1, left.min(60_000) as libc::c_int) } {
        -1 => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            error => Err(error),
        },
        _ => Ok(()),
    }
}
