//! The C functions that the library stands before. Each finds out whether it is about a connection of ours, and else does nothing.
//!
//! # Safety
//! All have the contracts of the C functions of their names; pointers are used as those say.
#![allow(clippy::missing_safety_doc, reason = "the contract is the C function's")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see above")]
#![allow(non_snake_case, reason = "the names are C's")]

use crate::data::{errno, fail};
use crate::report::{Reason, count, counters, stays};
use crate::slots::{self, phase};
use crate::wait::Limit;
use crate::{data, epoll, process, real, switch, wait};
use libc::{
    c_char, c_int, c_uint, c_ulong, c_void, epoll_event, iovec, mmsghdr, msghdr, nfds_t, off64_t, pid_t, pollfd,
    sigset_t, size_t, socklen_t, ssize_t, timespec, timeval,
};
use std::sync::atomic::Ordering;
use thruway_sockets::iovecs::Pieces;

fn piece(base: *const c_void, len: size_t) -> iovec {
    iovec { iov_base: base.cast_mut(), iov_len: len }
}

unsafe fn list<'a>(base: *const iovec, count: c_int) -> Option<&'a [iovec]> {
    match usize::try_from(count) {
        Ok(0) => Some(&[]),
        // IOV_MAX
        Ok(count) if count <= 1024 && !base.is_null() => {
            // SAFETY: the caller's promise.
            Some(unsafe { std::slice::from_raw_parts(base, count) })
        }
        _ => None,
    }
}

// Receiving.

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    let Some(number) = slots::find(fd) else { return unsafe { real::read(fd, buf, len) } };
    unsafe { data::receive(number, fd, &[piece(buf, len)], 0, || real::read(fd, buf, len)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    let Some(number) = slots::find(fd) else { return unsafe { real::recv(fd, buf, len, flags) } };
    unsafe { data::receive(number, fd, &[piece(buf, len)], flags, || real::recv(fd, buf, len, flags)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    addr: *mut c_void,
    addr_len: *mut socklen_t,
) -> ssize_t {
    let plain = || unsafe { real::recvfrom(fd, buf, len, flags, addr, addr_len) };
    let Some(number) = slots::find(fd) else { return plain() };
    let is_accelerated = slots::slot(number).is_accelerated();
    let result = unsafe { data::receive(number, fd, &[piece(buf, len)], flags, plain) };
    if is_accelerated && result >= 0 && !addr.is_null() && !addr_len.is_null() {
        // As TCP: it does not say from whom.
        unsafe { addr_len.write_unaligned(0) };
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn readv(fd: c_int, base: *const iovec, count: c_int) -> ssize_t {
    let plain = || unsafe { real::readv(fd, base, count) };
    let (Some(number), Some(pieces)) = (slots::find(fd), unsafe { list(base, count) }) else { return plain() };
    unsafe { data::receive(number, fd, pieces, 0, plain) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn preadv2(
    fd: c_int,
    base: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    if at == -1 && slots::find(fd).is_some() {
        return unsafe { readv(fd, base, count) };
    }
    unsafe { real::preadv2(fd, base, count, at, flags) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn preadv64v2(
    fd: c_int,
    base: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    unsafe { preadv2(fd, base, count, at, flags) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let plain = || unsafe { real::recvmsg(fd, message, flags) };
    let Some(number) = slots::find(fd) else {
        let result = plain();
        return result;
    };
    if message.is_null() {
        return plain();
    }
    let (base, count) = unsafe { ((*message).msg_iov, (*message).msg_iovlen) };
    let Some(pieces) = (unsafe { list(base, c_int::try_from(count).unwrap_or(-1)) }) else { return plain() };
    let is_accelerated = slots::slot(number).is_accelerated();
    let result = unsafe { data::receive(number, fd, pieces, flags, plain) };
    if is_accelerated && result >= 0 && flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0 {
        unsafe {
            (*message).msg_namelen = 0;
            (*message).msg_controllen = 0;
            (*message).msg_flags = 0;
        }
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvmmsg(
    fd: c_int,
    base: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if slots::find(fd).is_none() {
        return unsafe { real::recvmmsg(fd, base, count, flags, timeout) };
    }
    let limit = Limit::of(unsafe { timeout.as_ref() });
    let mut done = 0;
    while done < count {
        let one = unsafe { &mut *base.add(done as usize) };
        let wait_once = flags & libc::MSG_WAITFORONE != 0 && done > 0;
        let flags = (flags & !libc::MSG_WAITFORONE) | if wait_once { libc::MSG_DONTWAIT } else { 0 };
        let got = unsafe { recvmsg(fd, &raw mut one.msg_hdr, flags) };
        if got < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        one.msg_len = got as c_uint;
        done += 1;
        if got == 0 || limit.is_over() {
            break;
        }
    }
    done as c_int
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t) -> ssize_t {
    check(len, room);
    unsafe { read(fd, buf, len) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    check(len, room);
    unsafe { recv(fd, buf, len, flags) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    addr: *mut c_void,
    addr_len: *mut socklen_t,
) -> ssize_t {
    check(len, room);
    unsafe { recvfrom(fd, buf, len, flags, addr, addr_len) }
}

/// What the C library does when a program that was built to be checked asks for more than its buffer holds.
fn check(len: size_t, room: size_t) {
    if len > room {
        crate::report::complain(&["*** buffer overflow detected ***: terminated"]);
        std::process::abort();
    }
}

// Sending.

/// The rest of a call, by `sendmsg`, which has all that the others have.
unsafe fn send_rest(fd: c_int, rest: &Pieces<'_>, flags: c_int) -> ssize_t {
    let mut some = [piece(std::ptr::null(), 0); 256];
    let count = rest.fill(usize::MAX, &mut some);
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = some.as_mut_ptr();
    message.msg_iovlen = count as _;
    unsafe { real::sendmsg(fd, &raw const message, flags) }
}

/// What is left of a single piece, which may be nothing at its beginning.
fn front(rest: &Pieces<'_>, buf: *const c_void) -> (*const c_void, size_t) {
    let mut rest = *rest;
    rest.first().map_or((buf, 0), |(from, len)| (from.cast_const().cast(), len))
}

const EXOTIC: c_int = libc::MSG_OOB | libc::MSG_FASTOPEN | libc::MSG_ZEROCOPY;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    let Some(number) = slots::find(fd) else { return unsafe { real::write(fd, buf, len) } };
    let plain = |rest: &Pieces<'_>| {
        let (from, len) = front(rest, buf);
        unsafe { real::write(fd, from, len) }
    };
    unsafe { data::transmit(number, fd, &[piece(buf, len)], 0, false, plain) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    let Some(number) = slots::find(fd) else { return unsafe { real::send(fd, buf, len, flags) } };
    exotic(number, fd, flags);
    let plain = |rest: &Pieces<'_>| {
        let (from, len) = front(rest, buf);
        unsafe { real::send(fd, from, len, flags) }
    };
    unsafe { data::transmit(number, fd, &[piece(buf, len)], flags, flags & EXOTIC != 0, plain) }
}

/// Calls that need what only TCP has make the connection one that has nothing else.
fn exotic(number: u32, fd: c_int, flags: c_int) {
    if flags & EXOTIC != 0 {
        use_tcp(number, fd);
    }
}

fn use_tcp(number: u32, fd: c_int) {
    let slot = slots::slot(number);
    if slot.is_accelerated() {
        stays(slot, fd, Reason::Unsupported, &", from here on, in what it sends");
        let _ = data::enter_tcp(slot, fd, true);
    } else if let Some(_guard) = slot.upgrading.try_lock() {
        let is_plain = |phase| (phase == phase::PLAIN).then_some(phase::NEVER);
        if slot.phase.fetch_update(Ordering::SeqCst, Ordering::Relaxed, is_plain).is_ok() {
            stays(slot, fd, Reason::Unsupported, &"");
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    addr: *const c_void,
    addr_len: socklen_t,
) -> ssize_t {
    let Some(number) = slots::find(fd) else { return unsafe { real::sendto(fd, buf, len, flags, addr, addr_len) } };
    exotic(number, fd, flags);
    let plain = |rest: &Pieces<'_>| {
        let (from, len) = front(rest, buf);
        unsafe { real::sendto(fd, from, len, flags, addr, addr_len) }
    };
    unsafe { data::transmit(number, fd, &[piece(buf, len)], flags, flags & EXOTIC != 0, plain) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn writev(fd: c_int, base: *const iovec, count: c_int) -> ssize_t {
    let plain = || unsafe { real::writev(fd, base, count) };
    let (Some(number), Some(pieces)) = (slots::find(fd), unsafe { list(base, count) }) else { return plain() };
    let whole: usize = pieces.iter().fold(0, |sum, piece| sum.wrapping_add(piece.iov_len));
    let rest = |rest: &Pieces<'_>| if rest.left() == whole { plain() } else { unsafe { send_rest(fd, rest, 0) } };
    unsafe { data::transmit(number, fd, pieces, 0, false, rest) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pwritev2(
    fd: c_int,
    base: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    if at == -1 && slots::find(fd).is_some() {
        return unsafe { writev(fd, base, count) };
    }
    unsafe { real::pwritev2(fd, base, count, at, flags) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pwritev64v2(
    fd: c_int,
    base: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    unsafe { pwritev2(fd, base, count, at, flags) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let plain = || unsafe { real::sendmsg(fd, message, flags) };
    let Some(number) = slots::find(fd) else {
        if !message.is_null() {
            unsafe { hand_over_rights(message) };
        }
        return plain();
    };
    if message.is_null() {
        return plain();
    }
    let (base, count) = unsafe { ((*message).msg_iov, (*message).msg_iovlen) };
    let Some(pieces) = (unsafe { list(base, c_int::try_from(count).unwrap_or(-1)) }) else { return plain() };
    exotic(number, fd, flags);
    let is_plain = flags & EXOTIC != 0 || unsafe { (*message).msg_controllen } > 0;
    let whole: usize = pieces.iter().fold(0, |sum, piece| sum.wrapping_add(piece.iov_len));
    let rest = |rest: &Pieces<'_>| if rest.left() == whole { plain() } else { unsafe { send_rest(fd, rest, flags) } };
    unsafe { data::transmit(number, fd, pieces, flags, is_plain, rest) }
}

/// A message that hands descriptors to another process.
unsafe fn hand_over_rights(message: *const msghdr) {
    let mut at = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !at.is_null() {
        let header = unsafe { &*at };
        if (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let len =
                (header.cmsg_len as usize).saturating_sub(unsafe { libc::CMSG_LEN(0) } as usize) / size_of::<c_int>();
            let files = unsafe { libc::CMSG_DATA(at) }.cast::<c_int>();
            for i in 0..len {
                let fd = unsafe { files.add(i).read_unaligned() };
                if let Some(number) = slots::find(fd) {
                    process::hand_over(number, fd, true);
                }
            }
        }
        at = unsafe { libc::CMSG_NXTHDR(message, at) };
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendmmsg(fd: c_int, base: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if slots::find(fd).is_none() {
        for i in 0..count as usize {
            unsafe { hand_over_rights(&raw const (*base.add(i)).msg_hdr) };
        }
        return unsafe { real::sendmmsg(fd, base, count, flags) };
    }
    for i in 0..count {
        let one = unsafe { &mut *base.add(i as usize) };
        let sent = unsafe { sendmsg(fd, &raw const one.msg_hdr, flags) };
        if sent < 0 {
            return if i > 0 { i as c_int } else { -1 };
        }
        one.msg_len = sent as c_uint;
    }
    count as c_int
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendfile(out: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t {
    let plain = || unsafe { real::sendfile(out, from, offset, len) };
    let Some(number) = slots::find(out) else { return plain() };
    let slot = slots::slot(number);
    if !slot.is_accelerated() {
        return unsafe { data::transmit(number, out, &[], 0, true, |_| plain()) };
    }
    // By pread, and the position is moved when the bytes have gone.
    let begin = match unsafe { offset.as_ref() } {
        Some(offset) => Ok(*offset as u64),
        None => rustix::fs::seek(slots::borrow(from), rustix::fs::SeekFrom::Current(0)),
    };
    if let Ok(begin) = begin {
        let mut at = begin;
        let (sent, is_over) = data::send_from_file(number, out, len.min(0x7fff_f000), |to, room| {
            // SAFETY: the span that the ring has free.
            let got = unsafe { libc::pread64(from, to.cast(), room, at as off64_t) };
            at += got.max(0) as u64;
            got
        });
        if sent > 0 {
            match unsafe { offset.as_mut() } {
                Some(offset) => *offset = begin as off64_t + sent as off64_t,
                None => {
                    let _ = rustix::fs::seek(slots::borrow(from), rustix::fs::SeekFrom::Start(begin + sent as u64));
                }
            }
            if is_over || sent >= len {
                return sent as ssize_t;
            }
            let rest = |_: &Pieces<'_>| unsafe { real::sendfile(out, from, offset, len - sent) };
            let more = unsafe { data::transmit(number, out, &[], 0, true, rest) };
            return sent as ssize_t + more.max(0);
        }
    }
    unsafe { data::transmit(number, out, &[], 0, true, |_| plain()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendfile64(out: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t {
    unsafe { sendfile(out, from, offset, len) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let plain = || unsafe { real::splice(from, from_at, to, to_at, len, flags) };
    if let Some(number) = slots::find(to) {
        return unsafe { data::transmit(number, to, &[], 0, true, |_| plain()) };
    }
    let Some(number) = slots::find(from) else { return plain() };
    if !slots::slot(number).is_accelerated() {
        // Bytes taken by the kernel are bytes received.
        return unsafe { data::receive(number, from, &[], 0, plain) };
    }
    let mut buffer = [0u8; 16 << 10];
    let flags = if flags & libc::SPLICE_F_NONBLOCK != 0 { libc::MSG_DONTWAIT } else { 0 };
    // Looked at first, and taken when they have gone: the pipe may be full.
    let got = unsafe { recv(from, buffer.as_mut_ptr().cast(), len.min(buffer.len()), flags | libc::MSG_PEEK) };
    if got <= 0 {
        return got;
    }
    let put = unsafe { real::write(to, buffer.as_ptr().cast(), got as size_t) };
    if put > 0 {
        unsafe { recv(from, buffer.as_mut_ptr().cast(), put as size_t, libc::MSG_DONTWAIT) };
    }
    put
}

// Descriptors.

const KIND: c_int = 0xf;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = unsafe { real::socket(domain, kind, protocol) };
    let is_tcp = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind & KIND == libc::SOCK_STREAM
        && matches!(protocol, 0 | libc::IPPROTO_TCP);
    if fd >= 0 && is_tcp && crate::SETTINGS.get().is_some() {
        process::forget(fd);
        slots::add(fd);
    }
    fd
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn accept(fd: c_int, addr: *mut c_void, len: *mut socklen_t) -> c_int {
    let new = unsafe { real::accept(fd, addr, len) };
    accepted(fd, new)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn accept4(fd: c_int, addr: *mut c_void, len: *mut socklen_t, flags: c_int) -> c_int {
    let new = unsafe { real::accept4(fd, addr, len, flags) };
    accepted(fd, new)
}

fn accepted(listener: c_int, new: c_int) -> c_int {
    if new < 0 || crate::SETTINGS.get().is_none() {
        return new;
    }
    let error = errno();
    // A listener that was inherited is not known.
    let is_tcp = slots::find(listener).is_some() || {
        let mut protocol = [0, 0];
        let mut get = |option: c_int, at: usize| {
            let mut len = size_of::<c_int>() as socklen_t;
            let value = (&raw mut protocol[at]).cast();
            // SAFETY: one integer.
            unsafe { real::getsockopt(new, libc::SOL_SOCKET, option, value, &raw mut len) == 0 }
        };
        get(libc::SO_DOMAIN, 0) && get(libc::SO_PROTOCOL, 1) && {
            matches!(protocol, [libc::AF_INET | libc::AF_INET6, libc::IPPROTO_TCP])
        }
    };
    if is_tcp && !slots::is_in_borrowed_memory() {
        process::forget(new);
        slots::add(new);
        count(&counters().connections, 1);
    }
    fail(error);
    new
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn connect(fd: c_int, addr: *const c_void, len: socklen_t) -> c_int {
    if slots::find(fd).is_some() {
        count(&counters().connections, 1);
    }
    unsafe { real::connect(fd, addr, len) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    if let Some(number) = slots::find(fd)
        && matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR)
    {
        data::before_shutdown(slots::slot(number), fd, 1 + how as u8);
    }
    unsafe { real::shutdown(fd, how) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close(fd: c_int) -> c_int {
    if fd >= 0 && fd == switch::hidden() && !slots::is_in_borrowed_memory() {
        return fail(libc::EBADF) as c_int;
    }
    process::before_close(fd);
    unsafe { real::close(fd) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOEXEC: c_int = 4;
    if flags & CLOEXEC != 0 || first > last {
        return unsafe { real::close_range(first, last, flags) };
    }
    process::close_range(first, last, |first, last| unsafe { real::close_range(first, last, flags) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn closefrom(first: c_int) {
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup(fd: c_int) -> c_int {
    let new = unsafe { real::dup(fd) };
    if new >= 0 {
        process::after_duplicate(fd, new);
    }
    new
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    onto(fd, to, || unsafe { real::dup2(fd, to) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    onto(fd, to, || unsafe { real::dup3(fd, to, flags) })
}

fn onto(fd: c_int, to: c_int, real: impl Fn() -> c_int) -> c_int {
    // What it takes the place of is closed, if the call can succeed at all.
    if fd != to && (slots::find(to).is_some() || slots::find_epoll(to).is_some()) {
        if rustix::io::fcntl_getfd(slots::borrow(fd)).is_err() || fd < 0 {
            return fail(libc::EBADF) as c_int;
        }
        process::before_close(to);
    }
    let new = real();
    if new >= 0 && fd != to {
        match slots::find(fd) {
            // What the C library's streams and other programs use.
            Some(number) if to <= 2 => {
                process::hand_over(number, fd, true);
                process::after_duplicate(fd, new);
            }
            _ => process::after_duplicate(fd, new),
        }
    }
    new
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    duplicated(fd, command, unsafe { real::fcntl(fd, command, arg) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    duplicated(fd, command, unsafe { real::fcntl64(fd, command, arg) })
}

fn duplicated(fd: c_int, command: c_int, result: c_int) -> c_int {
    if result >= 0 && matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        process::after_duplicate(fd, result);
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int {
    // FIONREAD, which is SIOCINQ, too.
    if request as u32 == libc::FIONREAD as u32
        && let Some(number) = slots::find(fd)
        && slots::slot(number).is_accelerated()
        && arg != 0
        && let Some(len) = data::unread(number, fd)
    {
        unsafe { (arg as *mut c_int).write_unaligned(c_int::try_from(len).unwrap_or(c_int::MAX)) };
        return 0;
    }
    unsafe { real::ioctl(fd, request, arg) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if let Some(number) = slots::find(fd)
        && slots::slot(number).is_accelerated()
        && !value.is_null()
        && !len.is_null()
        && unsafe { len.read_unaligned() } as usize >= size_of::<c_int>()
    {
        let slot = slots::slot(number);
        let told = match (level, name) {
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Some(c_int::from(slot.no_delay.load(Ordering::Relaxed))),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => Some(c_int::from(slot.cork.load(Ordering::Relaxed))),
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                Some(slot.error.swap(0, Ordering::Relaxed)).filter(|error| *error != 0)
            }
            _ => None,
        };
        if let Some(told) = told {
            unsafe {
                value.cast::<c_int>().write_unaligned(told);
                len.write_unaligned(size_of::<c_int>() as socklen_t);
            }
            return 0;
        }
    }
    unsafe { real::getsockopt(fd, level, name, value, len) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if let Some(number) = slots::find(fd) {
        let slot = slots::slot(number);
        let number_is = || unsafe { value.cast::<c_int>().read_unaligned() };
        let is_number = !value.is_null() && len as usize >= size_of::<c_int>();
        match (level, name) {
            (libc::IPPROTO_TCP, libc::TCP_NODELAY | libc::TCP_CORK) if slot.is_accelerated() && is_number => {
                let flag = if name == libc::TCP_CORK { &slot.cork } else { &slot.no_delay };
                flag.store(number_is() != 0, Ordering::Relaxed);
                return 0;
            }
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT | libc::SO_OOBINLINE)
                if is_number && number_is() > c_int::from(name == libc::SO_RCVLOWAT) =>
            {
                keep_plain(number, fd);
            }
            (
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER | libc::SO_ATTACH_BPF | libc::SO_ZEROCOPY | libc::SO_PEEK_OFF,
            )
            | (libc::IPPROTO_TCP, libc::TCP_ULP | libc::TCP_REPAIR | libc::TCP_MD5SIG) => keep_plain(number, fd),
            _ => {}
        }
    }
    unsafe { real::setsockopt(fd, level, name, value, len) }
}

/// Both directions go by TCP from here on, as far as they can.
fn keep_plain(number: u32, fd: c_int) {
    use_tcp(number, fd);
    let slot = slots::slot(number);
    if slot.is_accelerated() {
        data::demote(slot, fd);
    }
}

// Waiting.

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn poll(base: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    unsafe { wait::poll(base, count, Limit::of_milliseconds(timeout), std::ptr::null()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ppoll(
    base: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    unsafe {
        if !wait::is_valid(timeout.as_ref()) {
            return real::ppoll(base, count, timeout, mask);
        }
        wait::poll(base, count, Limit::of(timeout.as_ref()), mask)
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __poll_chk(base: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int {
    check(count as usize * size_of::<pollfd>(), room);
    unsafe { poll(base, count, timeout) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __ppoll_chk(
    base: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    check(count as usize * size_of::<pollfd>(), room);
    unsafe { ppoll(base, count, timeout, mask) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn select(
    count: c_int,
    readable: *mut u64,
    writable: *mut u64,
    exceptional: *mut u64,
    timeout: *mut timeval,
) -> c_int {
    if unsafe { !wait::is_select_for_us(count, readable) } {
        return unsafe { select_plain(count, readable, writable, exceptional, timeout) };
    }
    let time = unsafe { timeout.as_ref() }
        .map(|time| timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_usec.saturating_mul(1000) });
    if !wait::is_valid(time.as_ref()) && unsafe { (*timeout).tv_sec < 0 || (*timeout).tv_usec < 0 } {
        return unsafe { select_plain(count, readable, writable, exceptional, timeout) };
    }
    let limit = Limit::of(time.as_ref());
    let result = unsafe { wait::select(count, [readable, writable, exceptional], limit, std::ptr::null()) };
    if let (Some(timeout), Some(left)) = (unsafe { timeout.as_mut() }, limit.left()) {
        // As Linux does: what is left of it.
        *timeout = timeval { tv_sec: left.tv_sec, tv_usec: left.tv_nsec / 1000 };
    }
    result
}

/// `select` as it is, by the system call: what the C library calls it has changed over time.
unsafe fn select_plain(count: c_int, a: *mut u64, b: *mut u64, c: *mut u64, timeout: *mut timeval) -> c_int {
    unsafe { real_select::select(count, a, b, c, timeout) }
}

mod real_select {
    use libc::{c_int, c_void, sigset_t, timespec, timeval};
    use std::sync::atomic::{AtomicPtr, Ordering};

    static SELECT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    static PSELECT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

    fn find(place: &AtomicPtr<c_void>, name: &std::ffi::CStr) -> *mut c_void {
        let mut found = place.load(Ordering::Relaxed);
        if found.is_null() {
            // SAFETY: a name that ends with a zero.
            found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            if found.is_null() {
                crate::report::fatal(name);
            }
            place.store(found, Ordering::Relaxed);
        }
        found
    }

    pub(super) unsafe fn select(count: c_int, a: *mut u64, b: *mut u64, c: *mut u64, timeout: *mut timeval) -> c_int {
        type Select = unsafe extern "C" fn(c_int, *mut u64, *mut u64, *mut u64, *mut timeval) -> c_int;
        // SAFETY: the C library's function has this type.
        let function: Select = unsafe { std::mem::transmute(find(&SELECT, c"select")) };
        unsafe { function(count, a, b, c, timeout) }
    }

    pub(super) unsafe fn pselect(
        count: c_int,
        a: *mut u64,
        b: *mut u64,
        c: *mut u64,
        timeout: *const timespec,
        mask: *const sigset_t,
    ) -> c_int {
        type Select =
            unsafe extern "C" fn(c_int, *mut u64, *mut u64, *mut u64, *const timespec, *const sigset_t) -> c_int;
        // SAFETY: the C library's function has this type.
        let function: Select = unsafe { std::mem::transmute(find(&PSELECT, c"pselect")) };
        unsafe { function(count, a, b, c, timeout, mask) }
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pselect(
    count: c_int,
    readable: *mut u64,
    writable: *mut u64,
    exceptional: *mut u64,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if unsafe { !wait::is_select_for_us(count, readable) } {
        return unsafe { real_select::pselect(count, readable, writable, exceptional, timeout, mask) };
    }
    if unsafe { !wait::is_valid(timeout.as_ref()) } {
        return unsafe { real_select::pselect(count, readable, writable, exceptional, timeout, mask) };
    }
    let limit = Limit::of(unsafe { timeout.as_ref() });
    unsafe { wait::select(count, [readable, writable, exceptional], limit, mask) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_create(size: c_int) -> c_int {
    created(unsafe { real::epoll_create(size) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    created(unsafe { real::epoll_create1(flags) })
}

fn created(fd: c_int) -> c_int {
    if fd >= 0 && crate::SETTINGS.get().is_some() {
        epoll::add(fd);
    }
    fd
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_ctl(ep: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let result = unsafe { real::epoll_ctl(ep, operation, fd, event) };
    if result == 0
        && let Some(number) = slots::find_epoll(ep)
    {
        epoll::control(number, ep, operation, fd, unsafe { event.as_ref() }.copied());
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_wait(ep: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int {
    unsafe { epoll_pwait(ep, events, max, timeout, std::ptr::null()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_pwait(
    ep: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    let limit = || Limit::of_milliseconds(timeout);
    let plain = || unsafe { real::epoll_pwait(ep, events, max, timeout, mask) };
    let real = |events, max, limit| unsafe { epoll::real_wait(ep, events, max, limit, mask) };
    unsafe { epoll::wait(ep, events, max, limit, plain, real) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn epoll_pwait2(
    ep: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if unsafe { !wait::is_valid(timeout.as_ref()) } {
        return unsafe { real::epoll_pwait2(ep, events, max, timeout, mask) };
    }
    let limit = || Limit::of(unsafe { timeout.as_ref() });
    let plain = || unsafe { real::epoll_pwait2(ep, events, max, timeout, mask) };
    let real = |events, max, limit: Option<timespec>| unsafe {
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        real::epoll_pwait2(ep, events, max, limit, mask)
    };
    unsafe { epoll::wait(ep, events, max, limit, plain, real) }
}

// Processes.

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _Fork() -> pid_t {
    process::fork(|| unsafe { real::_Fork() })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execve(
    path: *const c_char,
    args: *const *const c_char,
    env: *const *const c_char,
) -> c_int {
    process::exec(|| unsafe { real::execve(path, args, env) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execv(path: *const c_char, args: *const *const c_char) -> c_int {
    process::exec(|| unsafe { real::execv(path, args) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execvp(path: *const c_char, args: *const *const c_char) -> c_int {
    process::exec(|| unsafe { real::execvp(path, args) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execvpe(
    path: *const c_char,
    args: *const *const c_char,
    env: *const *const c_char,
) -> c_int {
    process::exec(|| unsafe { real::execvpe(path, args, env) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fexecve(fd: c_int, args: *const *const c_char, env: *const *const c_char) -> c_int {
    process::exec(|| unsafe { real::fexecve(fd, args, env) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attr: *const c_void,
    args: *const *mut c_char,
    env: *const *mut c_char,
) -> c_int {
    process::before_another_program();
    unsafe { real::posix_spawn(pid, path, actions, attr, args, env) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_spawnp(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attr: *const c_void,
    args: *const *mut c_char,
    env: *const *mut c_char,
) -> c_int {
    process::before_another_program();
    unsafe { real::posix_spawnp(pid, path, actions, attr, args, env) }
}

/// A child that the C library starts will have a descriptor by another number.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int {
    if let Some(number) = slots::find(fd) {
        process::hand_over(number, fd, true);
    }
    unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, to) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn system(command: *const c_char) -> c_int {
    process::before_another_program();
    unsafe { real::system(command) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
    process::before_another_program();
    unsafe { real::popen(command, mode) }
}

/// A stream of the C library's reads and writes by calls that are not seen here.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
    if let Some(number) = slots::find(fd) {
        process::hand_over(number, fd, true);
        // It is closed by a call that is not seen, either.
        process::forget(fd);
    }
    unsafe { real::fdopen(fd, mode) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _exit(status: c_int) -> ! {
    process::at_exit();
    loop {
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _Exit(status: c_int) -> ! {
    unsafe { _exit(status) }
}
