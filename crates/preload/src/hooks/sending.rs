//! Hooks that send.

use super::receiving::recv;
use super::{call_len, list, piece};
use crate::data::fail;
use crate::report::{Reason, stays};
use crate::signals::{self, Handlers};
use crate::slots;
use crate::{data, epoll, process, real};
use libc::{c_int, c_long, c_uint, c_void, iovec, mmsghdr, msghdr, off64_t, size_t, socklen_t, ssize_t};
use std::sync::atomic::Ordering;
use thruway_sockets::iovecs::{CALL_MAX, Pieces};

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
    unsafe { data::transmit(number, fd, &[piece(buf, call_len(len))], flags, flags & EXOTIC != 0, plain) }
}

/// Calls that need what only TCP has make the connection one that has nothing else.
fn exotic(number: u32, fd: c_int, flags: c_int) {
    if flags & EXOTIC != 0 {
        use_tcp(number, fd);
    }
}

pub(super) fn use_tcp(number: u32, fd: c_int) {
    let slot = slots::slot(number);
    if slot.is_accelerated() {
        stays(slot, fd, Reason::Unsupported, &", from here on, in what it sends");
        let _ = data::enter_tcp(slot, fd, true);
    } else {
        // However far it has come.
        stays(slot, fd, Reason::Unsupported, &"");
        slot.is_foreign.store(true, Ordering::SeqCst);
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
    unsafe { data::transmit(number, fd, &[piece(buf, call_len(len))], flags, flags & EXOTIC != 0, plain) }
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
                } else if let Some(number) = slots::find_epoll(fd) {
                    epoll::hand_over(number);
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
        let header = &one.msg_hdr;
        let pieces = (0..header.msg_iovlen).map(|at| unsafe { (*header.msg_iov.add(at)).iov_len });
        if (sent as usize) < pieces.sum() {
            // What follows would come into the gap.
            return i as c_int + 1;
        }
    }
    count as c_int
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendfile(out: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t {
    // As the kernel does.
    let len = len.min(CALL_MAX);
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
        let through_ring = data::send_from_file(number, out, len, |to, room| {
            // SAFETY: the span that the ring has free.
            let got = unsafe {
                // By number, as threads are not cancelled there.
                real::syscall(libc::SYS_pread64, from.into(), to as c_long, room as c_long, at as c_long, 0, 0)
            };
            at += got.max(0) as u64;
            got as ssize_t
        });
        let (sent, is_over) = match through_ring {
            Ok(done) => done,
            Err(error) => return fail(error),
        };
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

/// What a pipe that can be written to has room for, without waiting.
const PAGE: ssize_t = 4096;

fn has_room_for_a_page(pipe: c_int) -> bool {
    let mut list = [libc::pollfd { fd: pipe, events: libc::POLLOUT, revents: 0 }];
    // SAFETY: one entry.
    unsafe { real::poll(list.as_mut_ptr(), 1, 0) == 1 }
}

/// Waits until a pipe has bytes, or has ended, outside a call on a connection: during such a call, other threads cannot call the peer.
fn wait_for_pipe(pipe: c_int) -> Result<(), c_int> {
    let waits =
        |fd| rustix::fs::fcntl_getfl(slots::borrow(fd)).is_ok_and(|is| !is.contains(rustix::fs::OFlags::NONBLOCK));
    if !waits(pipe) {
        return Ok(());
    }
    let mut one = libc::pollfd { fd: pipe, events: libc::POLLIN, revents: 0 };
    // SAFETY: one element.
    while unsafe { real::poll(&raw mut one, 1, -1) } < 0 {
        // The kernel's call goes on behind such handlers.
        if data::errno() != libc::EINTR || signals::handlers() != Handlers::Restart {
            return Err(data::errno());
        }
    }
    Ok(())
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
        let is_kernels = slots::slot(number).phase.load(Ordering::Relaxed) == slots::phase::NEVER;
        if flags & libc::SPLICE_F_NONBLOCK == 0
            && len > 0
            && !is_kernels
            && let Err(error) = wait_for_pipe(from)
        {
            return fail(error);
        }
        return unsafe { data::transmit(number, to, &[], 0, true, |_| plain()) };
    }
    let Some(number) = slots::find(from) else { return plain() };
    // Bytes taken by the kernel are bytes received.
    if let Some(result) = data::receive_plain(number, from, plain) {
        return result;
    }
    let mut buffer = [0u8; 16 << 10];
    let is_impatient = flags & libc::SPLICE_F_NONBLOCK != 0;
    if is_impatient && !has_room_for_a_page(to) {
        return fail(libc::EAGAIN);
    }
    let flags = if is_impatient { libc::MSG_DONTWAIT } else { 0 };
    // Looked at first, and taken when they have gone: the pipe may be full.
    let got = unsafe { recv(from, buffer.as_mut_ptr().cast(), len.min(buffer.len()), flags | libc::MSG_PEEK) };
    if got <= 0 {
        return got;
    }
    let mut put = 0;
    while put < got {
        let most = if is_impatient { (got - put).min(PAGE) } else { got - put };
        let written = unsafe { real::write(to, buffer.as_ptr().add(put as usize).cast(), most as size_t) };
        if written <= 0 {
            put = if put > 0 { put } else { written };
            break;
        }
        put += written;
        if is_impatient && !has_room_for_a_page(to) {
            break;
        }
    }
    if put > 0 {
        unsafe { recv(from, buffer.as_mut_ptr().cast(), put as size_t, libc::MSG_DONTWAIT) };
    }
    put
}
