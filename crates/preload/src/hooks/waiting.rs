//! Hooks that wait.

use super::check;
use crate::slots;
use crate::wait::Limit;
use crate::{epoll, real, wait};
use libc::{c_int, epoll_event, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

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
    if unsafe { !wait::is_select_for_us(count, readable, writable) } {
        return unsafe { real::select(count, readable, writable, exceptional, timeout) };
    }
    let time = unsafe { timeout.as_ref() }
        .map(|time| timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_usec.saturating_mul(1000) });
    if !wait::is_valid(time.as_ref()) && unsafe { (*timeout).tv_sec < 0 || (*timeout).tv_usec < 0 } {
        return unsafe { real::select(count, readable, writable, exceptional, timeout) };
    }
    let limit = Limit::of(time.as_ref());
    let result = unsafe { wait::select(count, [readable, writable, exceptional], limit, std::ptr::null()) };
    if let (Some(timeout), Some(left)) = (unsafe { timeout.as_mut() }, limit.left()) {
        // As Linux does: what is left of it.
        *timeout = timeval { tv_sec: left.tv_sec, tv_usec: left.tv_nsec / 1000 };
    }
    result
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
    if unsafe { !wait::is_select_for_us(count, readable, writable) } {
        return unsafe { real::pselect(count, readable, writable, exceptional, timeout, mask) };
    }
    if unsafe { !wait::is_valid(timeout.as_ref()) } {
        return unsafe { real::pselect(count, readable, writable, exceptional, timeout, mask) };
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
    let plain = || unsafe { real::epoll_ctl(ep, operation, fd, event) };
    match slots::find_epoll(ep).or_else(|| epoll::adopt(ep, fd)) {
        Some(number) => unsafe { epoll::control(number, ep, operation, fd, event, plain) },
        None => {
            let result = plain();
            if result == 0
                && operation == libc::EPOLL_CTL_ADD
                && let Some(connection) = slots::find(fd)
            {
                epoll::note_unseen(connection);
            }
            result
        }
    }
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
    let real = |events, max, limit, mask| unsafe { epoll::real_wait(ep, events, max, limit, mask) };
    unsafe { epoll::wait(ep, events, max, limit, mask, plain, real) }
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
    let real = |events, max, limit: Option<timespec>, mask| unsafe {
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        real::epoll_pwait2(ep, events, max, limit, mask)
    };
    unsafe { epoll::wait(ep, events, max, limit, mask, plain, real) }
}
