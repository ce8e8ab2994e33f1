//! Hooks for descriptors: making, closing, duplicating them, and their options.

use super::sending::use_tcp;
use crate::data::{errno, fail};
use crate::report::{Reason, count, counters, stays};
use crate::slots;
use crate::tcp::SIOCATMARK;
use crate::{data, process, real, switch};
use libc::{c_int, c_uint, c_ulong, c_void, socklen_t};
use std::sync::atomic::Ordering;

/// include/uapi/linux/tcp.h.
const TCP_ZEROCOPY_RECEIVE: c_int = 35;
/// Options that add control messages to received data, and that the `libc` crate does not name.
const TCP_INQ: c_int = 36;
const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;
const SO_TIMESTAMPING_NEW: c_int = 65;

/// The bits of a socket's type that say its kind.
const KIND: c_int = 0xf;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let forks = slots::FORKS.load(Ordering::SeqCst);
    let fd = unsafe { real::socket(domain, kind, protocol) };
    let is_tcp = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind & KIND == libc::SOCK_STREAM
        && matches!(protocol, 0 | libc::IPPROTO_TCP);
    if fd >= 0 && is_tcp && crate::SETTINGS.get().is_some() && !slots::is_in_borrowed_memory() {
        process::forget(fd);
        slots::add(fd, forks, false);
    }
    fd
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn accept(fd: c_int, addr: *mut c_void, len: *mut socklen_t) -> c_int {
    let forks = slots::FORKS.load(Ordering::SeqCst);
    let new = unsafe { real::accept(fd, addr, len) };
    accepted(fd, new, forks)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn accept4(fd: c_int, addr: *mut c_void, len: *mut socklen_t, flags: c_int) -> c_int {
    let forks = slots::FORKS.load(Ordering::SeqCst);
    let new = unsafe { real::accept4(fd, addr, len, flags) };
    accepted(fd, new, forks)
}

fn accepted(listener: c_int, new: c_int, forks: u32) -> c_int {
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
        slots::add(new, forks, true);
        count(&counters().connections, 1);
    }
    fail(error);
    new
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn connect(fd: c_int, addr: *const c_void, len: socklen_t) -> c_int {
    if !addr.is_null()
        && len as usize >= size_of::<libc::sa_family_t>()
        && unsafe { addr.cast::<libc::sa_family_t>().read_unaligned() } == libc::AF_UNSPEC as libc::sa_family_t
        && let Some(number) = slots::find(fd)
    {
        switch::dissolve(number, fd);
    }
    let result = unsafe { real::connect(fd, addr, len) };
    // A socket that does not wait is asked again; one that was refused may be used again.
    if (result == 0 || errno() == libc::EINPROGRESS)
        && let Some(number) = slots::find(fd)
        && !slots::slot(number).is_counted.swap(true, Ordering::Relaxed)
    {
        let error = errno();
        count(&counters().connections, 1);
        fail(error);
    }
    result
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
    if slots::is_hidden(fd) && !slots::is_in_borrowed_memory() {
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
    if slots::is_hidden(to) {
        // As if another thread had just opened it.
        return fail(libc::EBUSY) as c_int;
    }
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
    note_flags(fd, command, arg);
    duplicated(fd, command, unsafe { real::fcntl(fd, command, arg) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    note_flags(fd, command, arg);
    duplicated(fd, command, unsafe { real::fcntl64(fd, command, arg) })
}

fn note_flags(fd: c_int, command: c_int, arg: c_ulong) {
    if command == libc::F_SETFL && arg as c_int & libc::O_ASYNC != 0 {
        set_asynchronous(fd);
    }
}

/// Signals are to say when something comes, which only doorbells bring about.
fn set_asynchronous(fd: c_int) {
    if let Some(number) = slots::find(fd) {
        let slot = slots::slot(number);
        slot.is_asynchronous.store(true, Ordering::SeqCst);
        // No doorbell may have been asked for until now.
        data::rearm(slot, number);
    }
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
    if request as u32 == SIOCATMARK && arg != 0 && is_before_mark(fd) {
        unsafe { (arg as *mut c_int).write_unaligned(0) };
        return 0;
    }
    if request as u32 == libc::FIOASYNC as u32 && arg != 0 && unsafe { (arg as *const c_int).read_unaligned() } != 0 {
        set_asynchronous(fd);
    }
    unsafe { real::ioctl(fd, request, arg) }
}

/// Whether bytes of the ring come before a mark of an urgent byte, which goes by TCP.
fn is_before_mark(fd: c_int) -> bool {
    slots::find(fd).is_some_and(|number| data::is_before_tcp(number, fd))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    let mut is_at_mark: c_int = 0;
    // The C library's own makes the system call without the function above.
    match unsafe { ioctl(fd, SIOCATMARK.into(), (&raw mut is_at_mark) as c_ulong) } {
        0 => is_at_mark,
        result => result,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if (level, name) == (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE)
        && let Some(number) = slots::find(fd)
    {
        process::leave_reading(number, fd);
    }
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
                libc::SO_ATTACH_FILTER
                | libc::SO_ATTACH_BPF
                | libc::SO_ZEROCOPY
                | libc::SO_PEEK_OFF
                | libc::SO_TIMESTAMP
                | libc::SO_TIMESTAMPNS
                | libc::SO_TIMESTAMPING
                | SO_TIMESTAMP_NEW
                | SO_TIMESTAMPNS_NEW
                | SO_TIMESTAMPING_NEW,
            )
            | (libc::IPPROTO_TCP, TCP_INQ | libc::TCP_ULP | libc::TCP_REPAIR | libc::TCP_MD5SIG) => {
                keep_plain(number, fd)
            }
            _ => {}
        }
    }
    unsafe { real::setsockopt(fd, level, name, value, len) }
}

/// Both directions go by TCP from here on, as far as they can.
fn keep_plain(number: u32, fd: c_int) {
    let slot = slots::slot(number);
    if slot.is_accelerated() {
        stays(slot, fd, Reason::Unsupported, &", from here on");
        data::demote(slot, fd);
    } else {
        use_tcp(number, fd);
    }
}
