//! The TCP connection below an accelerated one.

use crate::real;
use crate::report::{count, counters};
use crate::slots::{self, Slot};
use libc::{c_int, c_long, c_void};
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;
use thruway_sockets::iovecs::Pieces;
use thruway_sockets::{PEEK_MAX, Tcp};

/// A connection, by its descriptor.
#[derive(Clone, Copy)]
pub(crate) struct Connection {
    fd: c_int,
    /// Its number, if it is known: the descriptor may be another connection's by now.
    number: Option<u32>,
}

/// Fields of the kernel's `struct tcp_info` (linux/tcp.h), which have kept their places since Linux 4.19.
#[repr(C)]
struct TcpInfo {
    state: u8,
    before_received: [u8; 127],
    received: u64,
    before_not_sent: [u32; 2],
    not_sent: u32,
    before_sent: [u8; 52],
    sent: u64,
    sent_again: u64,
}

const _: () = assert!(
    std::mem::offset_of!(TcpInfo, received) == 128
        && std::mem::offset_of!(TcpInfo, not_sent) == 144
        && std::mem::offset_of!(TcpInfo, sent) == 200
        && std::mem::offset_of!(TcpInfo, sent_again) == 208
);

const ESTABLISHED: u8 = 1;

/// Pieces that one system call takes of a list.
const PIECES: usize = 16;

/// Which of its limits the kernel does not adapt (include/uapi/asm-generic/socket.h).
const SO_BUF_LOCK: c_int = 72;

/// Whether the next byte is urgent (include/uapi/asm-generic/sockios.h).
pub(crate) const SIOCATMARK: u32 = 0x8905;

impl Connection {
    pub(crate) fn new(fd: c_int) -> Connection {
        Connection { fd, number: None }
    }

    /// The one with this number.
    pub(crate) fn of(number: u32, fd: c_int) -> Connection {
        Connection { fd, number: Some(number) }
    }

    fn option<T>(self, level: c_int, name: c_int, value: &mut T) -> io::Result<usize> {
        let mut len = size_of::<T>() as libc::socklen_t;
        // SAFETY: `value` and `len` are valid for writing and describe each other; callers give types of integers.
        let result = unsafe { real::getsockopt(self.fd, level, name, (&raw mut *value).cast(), &raw mut len) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(len as usize) }
    }

    /// How long calls that send may wait (`SO_SNDTIMEO`), if they have a limit.
    pub(crate) fn send_limit(self) -> Option<Duration> {
        self.time_limit(libc::SO_SNDTIMEO)
    }

    /// How long calls that receive may wait (`SO_RCVTIMEO`), if they have a limit.
    pub(crate) fn receive_limit(self) -> Option<Duration> {
        self.time_limit(libc::SO_RCVTIMEO)
    }

    fn time_limit(self, name: c_int) -> Option<Duration> {
        let mut limit = [0i64; 2];
        self.option(libc::SOL_SOCKET, name, &mut limit).ok()?;
        let limit = Duration::new(limit[0].cast_unsigned(), limit[1] as u32 * 1000);
        (!limit.is_zero()).then_some(limit)
    }

    /// Waits until there is something to receive, or an end. False if the time is over; `None` if a signal handler has run before.
    pub(crate) fn wait_for_bytes(self, time: Duration) -> Option<bool> {
        let mut one = libc::pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
        // Rather longer than shorter: milliseconds are all that it takes.
        let time = c_int::try_from(time.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX);
        // SAFETY: one element.
        let ready = unsafe { real::poll(&raw mut one, 1, time) };
        (ready >= 0).then_some(ready > 0)
    }

    /// Sets an option, if the kernel knows it.
    fn integer(self, level: c_int, name: c_int) -> Option<c_int> {
        let mut value: c_int = 0;
        self.option(level, name, &mut value).is_ok().then_some(value)
    }

    pub(crate) fn set(self, level: c_int, name: c_int, value: c_int) {
        let at = (&raw const value).cast::<c_void>();
        // SAFETY: `value` is readable for as long as the call takes.
        let _ = unsafe { real::setsockopt(self.fd, level, name, at, size_of::<c_int>() as libc::socklen_t) };
    }

    fn info(self) -> io::Result<TcpInfo> {
        // SAFETY: integers throughout.
        let mut info: TcpInfo = unsafe { std::mem::zeroed() };
        let len = self.option(libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
        // An older kernel does not count what this needs.
        if len < size_of::<TcpInfo>() { Err(io::ErrorKind::Unsupported.into()) } else { Ok(info) }
    }

    /// `SO_COOKIE` or `SO_NETNS_COOKIE`.
    pub(crate) fn cookie(self, name: c_int) -> io::Result<u64> {
        let mut cookie = 0u64;
        self.option(libc::SOL_SOCKET, name, &mut cookie)?;
        Ok(cookie)
    }

    fn receive(self, list: &mut [libc::iovec], flags: c_int) -> io::Result<usize> {
        // SAFETY: integers and null pointers.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = list.as_mut_ptr();
        message.msg_iovlen = list.len() as _;
        let (at, flags) = ((&raw mut message) as c_long, libc::MSG_DONTWAIT | flags);
        // By number, as threads are not cancelled there.
        // SAFETY: callers' lists describe writable memory: `Pieces` vouches for that.
        let read = unsafe { real::syscall(libc::SYS_recvmsg, self.fd.into(), at, flags.into(), 0, 0, 0) };
        if read < 0 { Err(io::Error::last_os_error()) } else { Ok(read as usize) }
    }

    /// Whether it has something set that cannot be honoured through memory.
    pub(crate) fn is_unsupported(self) -> bool {
        let mut low_water: c_int = 1;
        let mut inline: c_int = 0;
        let _ = self.option(libc::SOL_SOCKET, libc::SO_RCVLOWAT, &mut low_water);
        let _ = self.option(libc::SOL_SOCKET, libc::SO_OOBINLINE, &mut inline);
        low_water > 1 || inline != 0
    }

    /// Number of bytes behind the urgent one, at most [`PEEK_MAX`].
    fn behind_urgent_mark(self) -> io::Result<usize> {
        let mut bytes = [0u8; PEEK_MAX];
        let mut list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
        match self.receive(&mut list, libc::MSG_PEEK) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            result => result,
        }
    }

    /// Whether both ends may send.
    pub(crate) fn is_established(self) -> bool {
        self.info().is_ok_and(|info| info.state == ESTABLISHED)
    }

    /// Bytes ever taken from it, and those that have ever come. Nothing takes any meanwhile.
    pub(crate) fn positions(self) -> io::Result<(u64, u64)> {
        for _ in 0..1000 {
            let before = self.info()?;
            let unread = self.available()? as u64;
            let after = self.info()?;
            // The end counts as a byte.
            if before.state != ESTABLISHED || after.state != ESTABLISHED {
                return Err(io::Error::other("the connection is at its end"));
            }
            if before.received == after.received {
                return Ok((after.received - unread, after.received));
            }
        }
        Err(io::Error::other("bytes come too fast to be counted"))
    }

    /// Has doorbells go at once, and remembers what the program has set instead.
    pub(crate) fn hold_options(self, slot: &Slot) {
        let mut value: c_int = 0;
        let _ = self.option(libc::IPPROTO_TCP, libc::TCP_NODELAY, &mut value);
        slot.no_delay.store(value != 0, Ordering::Relaxed);
        value = 0;
        let _ = self.option(libc::IPPROTO_TCP, libc::TCP_CORK, &mut value);
        slot.cork.store(value != 0, Ordering::Relaxed);
        if value != 0 {
            self.set(libc::IPPROTO_TCP, libc::TCP_CORK, 0);
        }
        if !slot.no_delay.load(Ordering::Relaxed) {
            self.set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
        }
    }

    /// As the program has set it.
    pub(crate) fn restore_options(self, slot: &Slot) {
        self.set(libc::IPPROTO_TCP, libc::TCP_NODELAY, slot.no_delay.load(Ordering::Relaxed).into());
        if slot.cork.load(Ordering::Relaxed) {
            self.set(libc::IPPROTO_TCP, libc::TCP_CORK, 1);
        }
    }

    /// Has the kernel reset the connection when it is closed, as it does when bytes have not been read.
    pub(crate) fn reset_at_close(self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        let at = (&raw const linger).cast::<c_void>();
        let len = size_of::<libc::linger>() as libc::socklen_t;
        // SAFETY: `linger` is readable for as long as the call takes.
        let _ = unsafe { real::setsockopt(self.fd, libc::SOL_SOCKET, libc::SO_LINGER, at, len) };
    }

    /// Whether the program has set how long closing waits, or that it resets (`SO_LINGER`).
    pub(crate) fn lingers(self) -> bool {
        let mut linger = libc::linger { l_onoff: 0, l_linger: 0 };
        let _ = self.option(libc::SOL_SOCKET, libc::SO_LINGER, &mut linger);
        linger.l_onoff != 0
    }

    /// Ends this direction of the connection, also if other processes have descriptors of it.
    pub(crate) fn end_sending(self) {
        // SAFETY: a descriptor of the program's.
        unsafe { real::shutdown(self.fd, libc::SHUT_WR) };
    }

    /// Resets the connection now: both ends learn it by an error, and none takes it for an end that was meant.
    pub(crate) fn reset(self) {
        if rustix::net::connect_unspec(slots::borrow(self.fd)).is_err() {
            // Some kernels do not while another thread waits for it.
            self.reset_at_close();
            // SAFETY: a descriptor of the program's.
            unsafe { real::shutdown(self.fd, libc::SHUT_RDWR) };
        }
    }

    /// Waits until something can be sent, or for so long. False if a signal handler has run before.
    pub(crate) fn wait_for_room(self, time: Duration) -> bool {
        let mut one = libc::pollfd { fd: self.fd, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one element.
        unsafe { real::poll(&raw mut one, 1, c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX)) >= 0 }
    }

    /// Sleeps like a call that receives, but also until the socket is writable. Ok(true) after any event of the kernel.
    pub(crate) fn wait_for_either(self, left: Option<Duration>) -> Result<bool, c_int> {
        let mut one = libc::pollfd { fd: self.fd, events: libc::POLLIN | libc::POLLOUT, revents: 0 };
        let time = left
            .or_else(|| self.receive_limit())
            .map_or(-1, |left| c_int::try_from(left.as_millis()).unwrap_or(c_int::MAX));
        // SAFETY: one element.
        match unsafe { real::poll(&raw mut one, 1, time) } {
            0 => Err(libc::EAGAIN),
            1.. => Ok(true),
            _ => Err(libc::EINTR),
        }
    }

    /// Waits for [`Writer::send_again`](thruway_sockets::Writer::send_again): until something can be sent, or, while the reader is to return
    /// bytes, a millisecond. False if a signal handler has run before.
    pub(crate) fn wait_to_send_again(self, awaits_return: bool, time: Duration) -> bool {
        if !awaits_return {
            return self.wait_for_room(time);
        }
        let mut one = libc::pollfd { fd: self.fd, events: 0, revents: 0 };
        // SAFETY: one element.
        unsafe { real::poll(&raw mut one, 1, 1) >= 0 }
    }

    /// What the kernel says of it, as bits of `poll` and `epoll`, which are the same.
    pub(crate) fn poll(self) -> u32 {
        let events =
            libc::POLLRDHUP | libc::POLLPRI | libc::POLLIN | libc::POLLRDNORM | libc::POLLOUT | libc::POLLWRNORM;
        let mut one = libc::pollfd { fd: self.fd, events, revents: 0 };
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let (at, none) = ((&raw mut one) as c_long, (&raw const none) as c_long);
        // By number, as threads are not cancelled there.
        // SAFETY: one element, and a time that outlives the call.
        if unsafe { real::syscall(libc::SYS_ppoll, at, 1, none, 0, 0, 0) } > 0 {
            one.revents.cast_unsigned().into()
        } else {
            0
        }
    }

    /// What the kernel knows of ends and errors of the connection.
    pub(crate) fn ends(self) -> u32 {
        self.poll() & (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32
    }
}

impl Tcp for Connection {
    fn written(&self) -> io::Result<u64> {
        let info = self.info()?;
        Ok(info.sent - info.sent_again + u64::from(info.not_sent))
    }

    fn available(&self) -> io::Result<usize> {
        match rustix::io::ioctl_fionread(slots::borrow(self.fd))? {
            // The kernel counts no bytes behind an urgent one, but `recv` skips that.
            0 if self.is_at_urgent_mark() => self.behind_urgent_mark(),
            len => Ok(len as usize),
        }
    }

    fn is_at_urgent_mark(&self) -> bool {
        let mut is_at_mark: c_int = 0;
        let at = (&raw mut is_at_mark) as c_long;
        // SAFETY: it writes an integer.
        let result = unsafe { real::syscall(libc::SYS_ioctl, self.fd.into(), SIOCATMARK.into(), at, 0, 0, 0) };
        result == 0 && is_at_mark != 0
    }

    fn received(&self) -> io::Result<u64> {
        Ok(self.info()?.received)
    }

    fn read(&self, to: &Pieces<'_>, max: usize) -> io::Result<usize> {
        let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES];
        let count = to.fill(max, &mut list);
        self.receive(&mut list[..count], 0)
    }

    fn peek(&self, to: &Pieces<'_>, max: usize, skipped: usize) -> io::Result<usize> {
        let mut before = [0u8; PEEK_MAX];
        let skipped = skipped.min(before.len());
        let mut list = [libc::iovec { iov_base: before.as_mut_ptr().cast(), iov_len: skipped }; PIECES];
        let count = 1 + to.fill(max, &mut list[1..]);
        Ok(self.receive(&mut list[..count], libc::MSG_PEEK)?.saturating_sub(skipped))
    }

    fn skip(&self, max: usize) -> io::Result<usize> {
        let mut sink = [0u8; 4096];
        let mut sum = 0;
        while sum < max {
            let len = (max - sum).min(sink.len());
            let (got, _) = rustix::net::recv(slots::borrow(self.fd), &mut sink[..len], RecvFlags::DONTWAIT)?;
            sum += got;
            if got == 0 {
                break;
            }
        }
        Ok(sum)
    }

    unsafe fn send(&self, from: *const u8, len: usize) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // By number, as threads are not cancelled there.
        // SAFETY: the caller's promise.
        let sent = unsafe {
            real::syscall(libc::SYS_sendto, self.fd.into(), from as c_long, len as c_long, flags.into(), 0, 0)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
    }

    fn raise_limit_of_unsent(&self) -> Option<u32> {
        let integer = |name| self.integer(libc::SOL_SOCKET, name);
        // Without this option (Linux before 5.16), the kernel would never adapt the limit again.
        let (before, locks) = (integer(libc::SO_SNDBUF)?, integer(SO_BUF_LOCK)?);
        self.set(libc::SOL_SOCKET, libc::SO_SNDBUF, c_int::MAX / 2);
        let is_raised = integer(libc::SO_SNDBUF)? > before;
        if !is_raised {
            self.set(libc::SOL_SOCKET, libc::SO_SNDBUF, before / 2);
        }
        self.set(libc::SOL_SOCKET, SO_BUF_LOCK, locks);
        is_raised.then_some(before.cast_unsigned())
    }

    fn limit_unsent(&self, limit: u32) {
        let locks = self.integer(libc::SOL_SOCKET, SO_BUF_LOCK);
        // The kernel doubles it.
        self.set(libc::SOL_SOCKET, libc::SO_SNDBUF, (limit / 2).cast_signed());
        if let Some(locks) = locks {
            self.set(libc::SOL_SOCKET, SO_BUF_LOCK, locks);
        }
    }

    fn flush(&self) {
        // The kernel sends what it has when this is set, also what sendfile or MSG_MORE have had it hold back.
        self.set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
    }

    fn doorbell(&self) -> bool {
        let rung = rustix::net::send(slots::borrow(self.fd), &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        // The kernel tells an error once. Then this is the end of the stream, as for every call after the first that has failed.
        match rung {
            Ok(_) => count(&counters().doorbells, 1),
            Err(error) => {
                if let Some(number) = self.number.or_else(|| slots::find(self.fd)) {
                    crate::data::keep_reset(slots::slot(number), error.raw_os_error());
                }
            }
        }
        rung.is_ok()
    }

    fn is_at_end(&self) -> bool {
        self.ends() != 0
    }

    fn quiet_waker(&self) -> u32 {
        self.number.or_else(|| slots::find(self.fd)).map_or(0, crate::waker::quiet)
    }

    fn wake_relay(&self) -> bool {
        crate::relay::wake()
    }
}
