//! Hooks that receive.

use super::{call_len, check, list, piece};
use crate::data::fail;
use crate::slots;
use crate::wait::Limit;
use crate::{data, real};
use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off64_t, size_t, socklen_t, ssize_t, timespec};
use std::cell::Cell;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    let Some(number) = slots::find(fd) else { return unsafe { real::read(fd, buf, len) } };
    unsafe { data::receive(number, fd, &[piece(buf, len)], 0, || real::read(fd, buf, len)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    let Some(number) = slots::find(fd) else { return unsafe { real::recv(fd, buf, len, flags) } };
    unsafe {
        data::receive_message(number, fd, &[piece(buf, call_len(len))], flags, || real::recv(fd, buf, len, flags))
    }
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
    let is_kernels = Cell::new(false);
    let plain = || {
        is_kernels.set(true);
        unsafe { real::recvfrom(fd, buf, len, flags, addr, addr_len) }
    };
    let Some(number) = slots::find(fd) else { return plain() };
    let result = unsafe { data::receive_message(number, fd, &[piece(buf, call_len(len))], flags, plain) };
    if !is_kernels.get() && result >= 0 && !addr.is_null() && !addr_len.is_null() {
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
        // `RWF_NOWAIT` is all of them that means something here.
        let flags = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
        let message = msghdr {
            msg_name: std::ptr::null_mut(),
            msg_namelen: 0,
            msg_iov: base.cast_mut(),
            msg_iovlen: count.max(0) as usize,
            msg_control: std::ptr::null_mut(),
            msg_controllen: 0,
            msg_flags: 0,
        };
        return if count < 0 {
            fail(libc::EINVAL)
        } else {
            unsafe { recvmsg(fd, (&raw const message).cast_mut(), flags) }
        };
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
    let is_kernels = Cell::new(false);
    let plain = || {
        is_kernels.set(true);
        unsafe { real::recvmsg(fd, message, flags) }
    };
    let Some(number) = slots::find(fd) else { return plain() };
    if message.is_null() {
        return plain();
    }
    let (base, count) = unsafe { ((*message).msg_iov, (*message).msg_iovlen) };
    let Some(pieces) = (unsafe { list(base, c_int::try_from(count).unwrap_or(-1)) }) else { return plain() };
    let result = unsafe { data::receive_message(number, fd, pieces, flags, plain) };
    if !is_kernels.get() && result >= 0 {
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
