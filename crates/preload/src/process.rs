//! What becomes of connections when a process forks, starts another program, or ends.

use crate::report::{Reason, stays};
use crate::slots::{self, Slot};
use crate::{data, epoll, lock, switch};
use libc::{c_int, pid_t};
use std::sync::atomic::Ordering;

/// `fork`, by one of its names.
pub(crate) fn fork(real: impl Fn() -> pid_t) -> pid_t {
    // The child has all descriptors, too.
    slots::each(|number, _| {
        let references = slots::local(number).references.load(Ordering::SeqCst);
        slots::slot(number).references.fetch_add(references, Ordering::SeqCst);
        // What a sibling reads is not for this process to look at by itself.
        arm(slots::slot(number));
    });
    let locks = epoll::lock_all();
    let child = real();
    if child == 0 {
        lock::forget_thread();
        slots::set_process();
        epoll::after_fork();
        switch::after_fork();
        std::mem::forget(locks);
        return 0;
    }
    drop(locks);
    if child < 0 {
        let error = data::errno();
        slots::each(|number, _| {
            let references = slots::local(number).references.load(Ordering::SeqCst);
            slots::slot(number).references.fetch_sub(references, Ordering::SeqCst);
        });
        data::fail(error);
    }
    child
}

fn arm(slot: &Slot) {
    if let Ok(Some(receiving)) = slot.receiving() {
        let _ = receiving.reader.arm(&receiving.segment);
    }
}

/// Another program is about to be started, and will have the descriptors that do not close by themselves then: it knows nothing of
/// rings, so those go by plain TCP from here on.
pub(crate) fn before_another_program() {
    slots::each_descriptor(0, u32::MAX, |fd| {
        if let Some(number) = slots::find(fd)
            && rustix::io::fcntl_getfd(slots::borrow(fd))
                .is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC))
        {
            hand_over(number, fd);
        }
    });
}

/// Something that knows nothing of rings will have a descriptor of this connection.
pub(crate) fn hand_over(number: u32, fd: c_int) {
    let slot = slots::slot(number);
    slot.is_foreign.store(true, Ordering::SeqCst);
    if !slot.is_accelerated() {
        return;
    }
    stays(slot, fd, Reason::Shared, &", from here on");
    let left = data::demote(slot, fd);
    if left > 0 {
        // It would miss bytes without a sign. So that it does not, it has none.
        crate::report::tell(fd, &format_args!("reset: a program that was started would have missed {left} bytes"));
        crate::tcp::Connection::new(fd).reset_at_close();
        // SAFETY: a descriptor of the program's.
        unsafe { crate::real::shutdown(fd, libc::SHUT_RDWR) };
    }
}

/// The process ends: what it has not closed is closed by the kernel, which knows nothing of rings.
pub(crate) fn at_exit() {
    if slots::is_in_borrowed_memory() {
        return;
    }
    slots::each(|number, fd| {
        let slot = slots::slot(number);
        if slot.is_only_ours(number)
            && slot.is_accelerated()
            && let Some(receiving) = slot.try_receiving()
        {
            data::settle(slot, fd, receiving);
        }
        // Its relatives go on without it.
        let local = slots::local(number);
        slot.references.fetch_sub(local.references.swap(0, Ordering::SeqCst), Ordering::SeqCst);
    });
}

/// Before a descriptor is closed, or another one takes its number.
pub(crate) fn before_close(fd: c_int) {
    if let Some(number) = slots::find_epoll(fd) {
        if !slots::is_in_borrowed_memory() {
            epoll::remove(fd, number);
        }
        return;
    }
    if slots::find(fd).is_none() || slots::is_in_borrowed_memory() {
        return;
    }
    if let Some((number, was_last)) = slots::remove(fd)
        && was_last
    {
        epoll::forget_connection(number);
        switch::tear_down(number, fd);
    }
}

/// A descriptor is not one that is known any more: calls that are not seen have closed it, or will.
pub(crate) fn forget(fd: c_int) {
    if let Some((number, was_last)) = slots::remove(fd)
        && was_last
    {
        epoll::forget_connection(number);
        switch::tear_down(number, -1);
    }
}

/// A descriptor is a copy of another one, by whichever call.
pub(crate) fn after_duplicate(from: c_int, to: c_int) {
    if let Some(number) = slots::find(from) {
        if slots::is_in_borrowed_memory() {
            // A child of vfork, which starts another program with it.
            hand_over(number, from);
        } else {
            slots::add_duplicate(to, number);
        }
    } else if let Some(number) = slots::find_epoll(from)
        && !slots::is_in_borrowed_memory()
    {
        epoll::set_foreign(number);
    }
}

/// Closes descriptors from `first` to `last`, but for the library's own.
pub(crate) fn close_range(first: u32, last: u32, real: impl Fn(u32, u32) -> c_int) -> c_int {
    slots::each_descriptor(first, last, before_close);
    let hidden = switch::hidden();
    match u32::try_from(hidden) {
        Ok(hidden) if (first..=last).contains(&hidden) => {
            let below = if first < hidden { real(first, hidden - 1) } else { 0 };
            let above = if hidden < last { real(hidden + 1, last) } else { 0 };
            below.min(above)
        }
        _ => real(first, last),
    }
}
