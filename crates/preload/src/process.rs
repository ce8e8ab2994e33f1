//! What becomes of connections when a process forks, starts another program, or ends.

use crate::lock::Guard;
use crate::report::{Reason, stays};
use crate::slots::{self, Last, Slot};
use crate::{data, epoll, lock, relayed, spares, switch};
use libc::{c_int, c_void, pid_t};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use thruway_sockets::WakeBy;

/// Has this process killed when its parent, the supervisor with this number, is.
pub(crate) fn end_with(supervisor: u32) {
    let is_its_child =
        || rustix::process::getppid().is_some_and(|parent| parent.as_raw_pid().cast_unsigned() == supervisor);
    if supervisor != 0 && is_its_child() {
        let kill = Some(rustix::process::Signal::KILL);
        let _ = rustix::process::set_parent_process_death_signal(kill);
        if !is_its_child() {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}

/// This process will not use its descriptors of a connection any more.
fn give_back(number: u32) {
    let count = slots::local(number).references.swap(0, Ordering::SeqCst);
    if count > 0 && slots::slot(number).references.fetch_sub(count, Ordering::SeqCst) == count {
        slots::release(number);
    }
}

/// What is held while the process forks, [`slots::CHANGING`] last.
static HELD: Held = Held(UnsafeCell::new(None));

struct Held(UnsafeCell<Option<(Vec<Guard<'static>>, Option<Guard<'static>>)>>);

// SAFETY: used between `before_fork` and what follows it, under `slots::CHANGING`: of threads that fork at once, the C library lets all
// into their handlers.
unsafe impl Sync for Held {}

/// Has the C library call what follows whenever it forks, also by `daemon` and `forkpty`.
pub(crate) fn watch_forks() {
    // SAFETY: functions that stay.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
}

extern "C" fn before_fork() {
    switch::FORKING.fetch_add(1, Ordering::SeqCst);
    // A relay knows one process by a connection.
    slots::each(|number, fd| {
        let slot = slots::slot(number);
        if relayed::is_relayed(slot) {
            stays(slot, fd, Reason::Shared, &", from here on");
            data::demote(slot, fd);
        } else {
            switch::give_up_relayed(number, fd, Reason::Shared);
        }
    });
    // None, if this is a signal handler that has interrupted a change.
    let changing = slots::CHANGING.lock().ok();
    epoll::before_fork();
    slots::FORKS.fetch_add(1, Ordering::SeqCst);
    // The child has all descriptors, too.
    slots::each(|number, _| {
        let references = slots::local(number).references.load(Ordering::SeqCst);
        slots::slot(number).references.fetch_add(references, Ordering::SeqCst);
        slots::slot(number).was_shared.store(true, Ordering::SeqCst);
        // The child reads the ring, too, so the peer has to ring from here on.
        if !arm(slots::slot(number)) {
            epoll::announce_to_child(number);
        }
    });
    spares::discard_all();
    let locks = epoll::lock_all();
    // SAFETY: see `Held`.
    unsafe { *HELD.0.get() = Some((locks, changing)) };
}

/// Also if it has failed: then connections count as shared for good, and are closed by TCP alone.
extern "C" fn after_fork_in_parent() {
    switch::FORKING.fetch_sub(1, Ordering::SeqCst);
    // SAFETY: see `Held`.
    if let Some((locks, changing)) = unsafe { (*HELD.0.get()).take() } {
        drop(locks);
        drop(changing);
    }
}

extern "C" fn after_fork_in_child() {
    lock::forget_thread();
    slots::set_process();
    epoll::after_fork();
    switch::FORKING.store(0, Ordering::SeqCst);
    switch::after_fork();
    spares::after_fork();
    // SAFETY: see `Held`.
    std::mem::forget(unsafe { (*HELD.0.get()).take() });
    slots::CHANGING.reset();
    lock::forget_guards();
    slots::each(|number, _| slots::local(number).leaving.store(0, Ordering::SeqCst));
}

/// `_Fork` and system calls that fork, which call none of those.
pub(crate) fn fork(real: impl Fn() -> pid_t) -> pid_t {
    before_fork();
    let child = real();
    let error = data::errno();
    if child == 0 {
        after_fork_in_child()
    } else {
        after_fork_in_parent()
    }
    data::fail(error);
    child
}

/// Start of a child that `clone` makes: a function and its argument.
pub(crate) struct Start {
    pub function: extern "C" fn(*mut c_void) -> c_int,
    pub argument: *mut c_void,
}

/// Makes the call `real`, which is a `clone` whose child has a copy of this process's memory and begins with the given function and argument.
pub(crate) fn clone(start: &Start, real: impl Fn(extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int) -> c_int {
    extern "C" fn begin(start: *mut c_void) -> c_int {
        after_fork_in_child();
        // SAFETY: the child's copy of what the parent refers to during the call.
        let Start { function, argument } = unsafe { start.cast::<Start>().read() };
        function(argument)
    }
    before_fork();
    let child = real(begin, std::ptr::from_ref(start).cast_mut().cast());
    let error = data::errno();
    after_fork_in_parent();
    data::fail(error);
    child
}

/// The user that this process was last, and how often it had forked when it last parted from its relatives.
static USER: AtomicU32 = AtomicU32::new(u32::MAX);
static PARTED: AtomicU32 = AtomicU32::new(0);

/// The process is as it was started.
pub(crate) fn note_user() {
    USER.store(rustix::process::geteuid().as_raw(), Ordering::Relaxed);
}

/// The process has become another user, or has other groups. What others know it by is that of before: its Unix socket, and memory of
/// earlier connections.
pub(crate) fn after_change_of_rights() {
    if slots::is_in_borrowed_memory() {
        return;
    }
    switch::close_service();
    spares::discard_all();
    let user = rustix::process::geteuid().as_raw();
    // Without relatives there is no one to part from. Threads of this process would use what is exchanged.
    let forks = slots::FORKS.load(Ordering::SeqCst);
    let has_relatives = PARTED.load(Ordering::Relaxed) != forks;
    if USER.swap(user, Ordering::Relaxed) == user || !has_relatives || !is_single_threaded() {
        return;
    }
    slots::each(|number, fd| {
        let slot = slots::slot(number);
        if slot.is_accelerated() && !slot.is_only_ours(number) {
            stays(slot, fd, Reason::Shared, &", from here on");
            data::demote(slot, fd);
        }
    });
    if slots::part() {
        PARTED.store(forks, Ordering::Relaxed);
    }
}

fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Starts another program in this process, which returns only if that fails.
pub(crate) fn exec(real: impl Fn() -> c_int) -> c_int {
    before_another_program();
    if slots::is_in_borrowed_memory() {
        return real();
    }
    // The other program is no holder that the library knows: descriptors that it inherits belong to TCP (`hand_over`), and the others are closed.
    let change = |by: fn(&Slot, c_int)| {
        slots::each_descriptor(0, u32::MAX, |fd| {
            if let Some(number) = slots::find(fd) {
                by(slots::slot(number), fd);
            }
        });
    };
    change(|slot, fd| {
        if slot.references.fetch_sub(1, Ordering::SeqCst) == 1 {
            // The parent has closed it, so the kernel has no other reader of doorbells.
            data::leave(slot, fd);
        }
    });
    let result = real();
    let error = data::errno();
    change(|slot, _| {
        slot.references.fetch_add(1, Ordering::SeqCst);
    });
    data::fail(error);
    result
}

/// Asks for a doorbell with the next bytes. False if the ring has some already.
fn arm(slot: &Slot) -> bool {
    match slot.receiving() {
        Ok(Some(mut receiving)) => {
            let slots::Receiving { segment, reader, .. } = &mut receiving;
            reader.arm(segment, WakeBy::Doorbell).unwrap_or(true)
        }
        _ => true,
    }
}

/// Another program is about to be started, and will have the descriptors that do not close by themselves then: it knows nothing of
/// rings, so those go by plain TCP from here on.
pub(crate) fn before_another_program() {
    slots::each_descriptor(0, u32::MAX, |fd| {
        if let Some(number) = slots::find(fd)
            && rustix::io::fcntl_getfd(slots::borrow(fd))
                .is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC))
            && may_hand_over(fd)
        {
            // What is only inherited is hardly ever read.
            hand_over(number, fd, fd <= 2);
        }
    });
    // This process may have the other end, too.
    data::answer_all_peers();
}

/// False in a child of `vfork` whose parent has other threads, which may close and reuse the number of a connection at any time: there,
/// only standard input, output and error are handed over.
fn may_hand_over(fd: c_int) -> bool {
    !slots::is_in_borrowed_memory() || slots::is_parents(fd) && (fd <= 2 || slots::is_parent_single_threaded())
}

/// Excludes other threads of this process while one returns a connection to plain TCP.
struct Leaving(&'static AtomicU32);

/// Limit of the wait for another thread in [`Leaving::new`]. A signal handler may have left that call by `longjmp`.
const LEAVING_MAX: Duration = Duration::from_secs(5);

impl Leaving {
    /// `None` if this thread has one already, or after [`LEAVING_MAX`].
    fn new(number: u32) -> Option<Leaving> {
        let (leaving, own) = (&slots::local(number).leaving, lock::thread());
        let mut limit = None;
        loop {
            match leaving.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(Leaving(leaving)),
                Err(owner) if owner == own => return None,
                Err(owner) => {
                    if Instant::now() >= *limit.get_or_insert_with(|| Instant::now() + LEAVING_MAX) {
                        let _ = leaving.compare_exchange(owner, 0, Ordering::SeqCst, Ordering::SeqCst);
                        return None;
                    }
                    std::thread::yield_now();
                }
            }
        }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // Another thread may have it after [`LEAVING_MAX`].
        let _ = self.0.compare_exchange(lock::thread(), 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// Another process, or the kernel, gets a descriptor of this connection. `is_read`: it may read from it.
pub(crate) fn hand_over(number: u32, fd: c_int, is_read: bool) {
    let _leaving = Leaving::new(number);
    let slot = slots::slot(number);
    slot.is_foreign.store(true, Ordering::SeqCst);
    if !slot.is_accelerated() {
        return;
    }
    stays(slot, fd, Reason::Shared, &", from here on");
    let left = if is_read { data::demote_for_reading(slot, fd) } else { data::demote(slot, fd) };
    if left > 0 && is_read {
        // Its reader would miss bytes without an error.
        crate::report::tell(
            fd,
            &format_args!("reset: the program that has been given it would have missed {left} bytes"),
        );
        data::reset(slot, fd);
    }
}

/// Returns a connection to TCP before the program reads it by calls that the library does not intercept.
pub(crate) fn leave_reading(number: u32, fd: c_int) {
    // Waits for a `hand_over` by another thread, which sets `is_foreign` before the connection has returned to TCP.
    let _leaving = Leaving::new(number);
    if !slots::slot(number).is_foreign.load(Ordering::Relaxed) {
        hand_over(number, fd, true);
        // This process may have the other end, too, and may be about to wait.
        data::answer_all_peers();
    }
}

/// Longest time that connections have to go back to TCP before the kernel lets this thread read and write alone.
const STRICT_MAX: Duration = Duration::from_secs(2);

/// The kernel ends this thread from now on when it calls anything but `read` and `write`: those have to be TCP's own.
pub(crate) fn before_strict_mode() {
    if slots::is_in_borrowed_memory() {
        return;
    }
    slots::each(|number, fd| {
        let slot = slots::slot(number);
        stays(slot, fd, Reason::Unsupported, &": a sandbox of reads and writes");
        if slot.is_accelerated() {
            data::demote_for_reading(slot, fd);
        }
    });
    let limit = Instant::now() + STRICT_MAX;
    slots::each(|number, fd| {
        // Until the peer has taken notice.
        while slots::slot(number).is_accelerated() && !switch::retire(number, fd) && Instant::now() < limit {
            std::thread::yield_now();
        }
        switch::give_up(number);
    });
}

/// The process ends: what it has not closed is closed by the kernel, which knows nothing of rings.
pub(crate) fn at_exit() {
    if slots::is_in_borrowed_memory() {
        return;
    }
    slots::each(|number, fd| {
        let slot = slots::slot(number);
        if !slot.is_only_ours(number) {
            if let Some(receiving) = slot.try_receiving() {
                data::settle_shared(slot, fd, receiving);
            }
            return;
        }
        if let Ok(guard) = slot.upgrading.lock() {
            switch::account(slot, &guard, fd);
        }
        if slot.is_accelerated() {
            // What other parts of the program still send goes by calls that know nothing of rings.
            data::enter_tcp_at_end(slot, fd);
            if let Some(receiving) = slot.try_receiving() {
                data::settle(slot, fd, receiving, true);
            }
        }
    });
    slots::forget_all();
    // Its relatives go on without it.
    slots::each(|number, _| give_back(number));
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
    if let Some(number) = slots::find(fd)
        && slots::local(number).references.load(Ordering::SeqCst) > 1
    {
        epoll::before_descriptor_closes(number, fd);
    }
    match slots::remove(fd) {
        Some((number, Last::No)) => {
            // What is inside a call on it is done with this descriptor, which may be another file soon.
            let slot = slots::slot(number);
            let _inside = (slot.receiving.lock(), slot.sending.lock());
        }
        Some((number, last)) => {
            let slot = slots::slot(number);
            let is_shared = slot.was_shared.load(Ordering::SeqCst) || slot.is_foreign.load(Ordering::SeqCst);
            // Other processes keep the registrations of a connection that they have.
            let is_own = last == Last::Everywhere && !is_shared;
            epoll::forget_connection(number, if is_own { fd } else { -1 });
            switch::tear_down(number, fd, last);
        }
        None => {}
    }
}

/// A descriptor is not one that is known any more: calls that are not seen have closed it, or will.
pub(crate) fn forget(fd: c_int) {
    if let Some((number, last)) = slots::remove(fd)
        && last != Last::No
    {
        epoll::forget_connection(number, -1);
        switch::tear_down(number, -1, last);
    }
}

/// A descriptor is a copy of another one, by whichever call.
pub(crate) fn after_duplicate(from: c_int, to: c_int) {
    if let Some(number) = slots::find(from) {
        if slots::is_in_borrowed_memory() {
            // A child of vfork, which starts another program with it.
            hand_over(number, from, true);
        } else {
            slots::add_duplicate(to, number);
        }
    } else if let Some(number) = slots::find_epoll(from)
        && !slots::is_in_borrowed_memory()
    {
        epoll::add_duplicate(to, number);
    }
}

/// Closes descriptors from `first` to `last`, but for the library's own.
pub(crate) fn close_range(first: u32, last: u32, real: impl Fn(u32, u32) -> c_int) -> c_int {
    slots::each_descriptor(first, last, before_close);
    let (mut first, mut result) = (first, 0);
    while let Some(hidden) = slots::first_hidden(first, last) {
        if first < hidden {
            result = real(first, hidden - 1).min(result);
        }
        first = hidden + 1;
    }
    if first <= last { real(first, last).min(result) } else { result }
}
