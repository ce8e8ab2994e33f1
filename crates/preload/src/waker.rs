//! Threads that sleep on a connection to another host are woken by this host's relay, which has a descriptor of the process's for that, an
//! eventfd. The other host's relay could ring the TCP connection, too; that comes later, and costs the network a packet.
//!
//! All that sleeps has to wait for the descriptor then, beside the TCP connection: `poll` has one entry more for it, a call that receives
//! polls both, and it is registered where the connection is with epoll. Where that cannot be, the connection asks for doorbells.

use crate::report::{count, counters};
use crate::signals::{self, Handlers};
use crate::slots;
use crate::wait::Limit;
use crate::{data, real, relay};
use libc::{c_int, epoll_event, pollfd};
use rustix::event::EventfdFlags;
use std::sync::atomic::{AtomicU32, Ordering};
use thruway_sockets::WakeBy;

/// How many a process has at most: they are descriptors, of which it may not have many. Further connections are rung.
const WAKERS: u32 = 384;
static COUNT: AtomicU32 = AtomicU32::new(0);

/// An eighth of the descriptors that the process may have.
pub(crate) fn share_of_descriptors() -> u32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    u32::try_from(limit / 8).unwrap_or(u32::MAX)
}

/// Makes one for a connection, if there can be one.
pub(crate) fn make(number: u32) -> Option<c_int> {
    let most = WAKERS.min(share_of_descriptors());
    COUNT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < most).then_some(count + 1)).ok()?;
    let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok();
    let Some(waker) = waker.and_then(slots::hide) else {
        COUNT.fetch_sub(1, Ordering::Relaxed);
        return None;
    };
    slots::local(number).waker.store(waker, Ordering::Release);
    Some(waker)
}

/// The connection has ended in this process. It is registered with no epoll instance any more.
pub(crate) fn close(number: u32) {
    let waker = slots::local(number).waker.swap(0, Ordering::SeqCst);
    if waker > 0 {
        slots::close_hidden(waker);
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// That of a connection, if it has one.
pub(crate) fn of(number: u32) -> Option<c_int> {
    let waker = slots::local(number).waker.load(Ordering::Acquire);
    (waker > 0).then_some(waker)
}

/// What wakes everything that may sleep on a connection.
pub(crate) fn wakes(number: u32) -> WakeBy {
    let (slot, local) = (slots::slot(number), slots::local(number));
    let is_heard = of(number).is_some()
        // Else it is not known what would have to hear it.
        && slot.is_watched.load(Ordering::Relaxed)
        && !slot.is_asynchronous.load(Ordering::Relaxed)
        && slot.deaf_sleepers.load(Ordering::SeqCst) == 0
        && match local.registrations.load(Ordering::SeqCst) {
            0 => true,
            1 => is_registered_with(local.instance.load(Ordering::Relaxed), number),
            _ => false,
        };
    if is_heard { WakeBy::Waker } else { WakeBy::Doorbell }
}

/// Takes back what has been written to it: how often.
pub(crate) fn quiet(number: u32) -> u32 {
    let mut written = [0u8; 8];
    let waker = of(number);
    if waker.is_none_or(|waker| rustix::io::read(slots::borrow(waker), &mut written) != Ok(8)) {
        // About to be written, perhaps.
        return 0;
    }
    count(&counters().woken, 1);
    u64::from_ne_bytes(written) as u32
}

/// Registers it with the epoll instance where its connection is, with a level or for edges as that: its events look like the connection's.
/// Not if the connection is registered elsewhere, too.
pub(crate) fn register(instance: u32, ep: c_int, number: u32, events: u32, data: u64) {
    let local = slots::local(number);
    let is_only_here =
        local.registrations.load(Ordering::SeqCst) == 1 && local.instance.load(Ordering::Relaxed) == instance;
    if !is_only_here || local.waker_instance.load(Ordering::SeqCst) != 0 {
        return;
    }
    if let Some(waker) = of(number) {
        let events = events & (libc::EPOLLIN | libc::EPOLLET) as u32;
        let mut event = epoll_event { events, u64: data };
        // SAFETY: one event.
        let result = unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_ADD, waker, &raw mut event) };
        if result == 0 {
            local.waker_instance.store(instance + 1, Ordering::SeqCst);
        }
    }
}

/// Whether it is registered with this epoll instance.
pub(crate) fn is_registered_with(instance: u32, number: u32) -> bool {
    slots::local(number).waker_instance.load(Ordering::SeqCst) == instance.wrapping_add(1) && instance != slots::SEVERAL
}

/// Before its connection's registration with this instance changes or ends, or the instance does: no event comes with the data of
/// that registration any more.
pub(crate) fn unregister(instance: u32, ep: c_int, number: u32) {
    if !is_registered_with(instance, number) {
        return;
    }
    slots::local(number).waker_instance.store(0, Ordering::SeqCst);
    if let Some(waker) = of(number) {
        // SAFETY: no event.
        unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_DEL, waker, std::ptr::null_mut()) };
    }
}

/// Whether a call that receives and sleeps on the waker as well ends by signals as one would that is in the kernel's `recv`: that goes on
/// after handlers with `SA_RESTART`, unless it has a time limit.
pub(crate) fn is_like_recv(has_limit: bool) -> bool {
    has_limit || signals::handlers() != Handlers::Mixed
}

/// Sleeps until the TCP connection has something (true), or the waker (-1: there is none), or the relay has gone, or until the limit is
/// over. `may_restart`: a handler with `SA_RESTART` does not end the call.
pub(crate) fn sleep(number: u32, fd: c_int, waker: c_int, limit: Limit, may_restart: bool) -> Result<bool, c_int> {
    loop {
        let relay = relay::lifeline_of(number).unwrap_or(-1);
        let mut all = [(fd, libc::POLLIN), (waker, libc::POLLIN), (relay, 0)].map(|(fd, events)| pollfd {
            fd,
            events,
            revents: 0,
        });
        let left = limit.left();
        let timeout = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: three elements, and a limit that outlives the call.
        let ready = unsafe { real::ppoll(all.as_mut_ptr(), 3, timeout, std::ptr::null()) };
        match ready {
            0 => return Err(libc::EAGAIN),
            1.. => {
                if all[2].revents != 0 {
                    relay::look();
                }
                return Ok(all[0].revents != 0);
            }
            _ => match data::errno() {
                libc::EINTR if may_restart && !limit.is_any() && signals::handlers() == Handlers::Restart => {}
                error => return Err(error),
            },
        }
    }
}
