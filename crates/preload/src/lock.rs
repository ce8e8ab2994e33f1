//! A lock for a few instructions, which may lie in memory that processes share.
//!
//! No handler of the program's runs while its thread holds one: a signal that comes then is [postponed](crate::signals). So no thread finds a
//! lock that it holds itself, and no jump out of a handler abandons one, on whichever stack the handler runs. Calls at which the C library
//! cancels threads are not made under a lock. Other processes take over the locks of a killed one.

use crate::signals;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};

/// A thread's own.
struct Thread {
    /// Its number, or 0 before it has asked for it.
    number: Cell<u32>,
    /// Locks that it holds or tries to take.
    depth: Cell<u32>,
    /// Signals wait until it holds none, and the signals that it had blocked before.
    postponed: Cell<Option<u64>>,
    /// Handlers of the program that it has run.
    handled: Cell<u32>,
}

thread_local! {
    static THREAD: Thread =
        const { Thread { number: Cell::new(0), depth: Cell::new(0), postponed: Cell::new(None), handled: Cell::new(0) } };
}

/// This thread's number.
pub(crate) fn thread() -> u32 {
    THREAD.with(|thread| {
        if thread.number.get() == 0 {
            // SAFETY: without preconditions.
            thread.number.set(unsafe { libc::gettid() }.cast_unsigned());
        }
        thread.number.get()
    })
}

/// This is another process now.
pub(crate) fn forget_thread() {
    THREAD.with(|thread| thread.number.set(0));
}

/// The only thread of a child that has just been forked has forgotten the locks that it held for that.
pub(crate) fn forget_guards() {
    THREAD.with(|thread| {
        thread.depth.set(1);
        leave(thread);
    });
}

/// True while this thread holds a lock or takes one.
pub(crate) fn is_inside() -> bool {
    THREAD.with(|thread| thread.depth.get() > 0)
}

/// In a signal handler that has interrupted a thread inside: until it has left, all signals are blocked. `blocked`: those that were.
pub(crate) fn postpone(blocked: u64) {
    THREAD.with(|thread| thread.postponed.set(Some(thread.postponed.get().unwrap_or(blocked))));
}

/// This thread is about to run a handler of the program.
pub(crate) fn note_handler() {
    THREAD.with(|thread| thread.handled.set(thread.handled.get().wrapping_add(1)));
}

/// Number of the program's handlers that this thread has run.
pub(crate) fn handled() -> u32 {
    THREAD.with(|thread| thread.handled.get())
}

#[inline]
fn enter(thread: &Thread) {
    thread.depth.set(thread.depth.get() + 1);
    // A handler on this thread sees the depth before the lock.
    compiler_fence(Ordering::SeqCst);
}

#[inline]
fn leave(thread: &Thread) {
    compiler_fence(Ordering::SeqCst);
    let depth = thread.depth.get() - 1;
    thread.depth.set(depth);
    compiler_fence(Ordering::SeqCst);
    // No signal comes between if one was postponed, as all are blocked then.
    if depth == 0
        && let Some(blocked) = thread.postponed.get()
    {
        thread.postponed.set(None);
        signals::unblock(blocked);
    }
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
}

/// For as long as this lives, no handler of the program's runs on this thread, and the thread is not cancelled: for what uses the heap, which
/// neither may abandon.
pub(crate) struct Undisturbed {
    cancels: libc::c_int,
}

pub(crate) fn undisturbed() -> Undisturbed {
    const DISABLE: libc::c_int = 1;
    let mut cancels = 0;
    THREAD.with(enter);
    // SAFETY: an integer of ours.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut cancels) };
    Undisturbed { cancels }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        let mut unused = 0;
        // SAFETY: an integer of ours.
        unsafe { pthread_setcancelstate(self.cancels, &raw mut unused) };
        THREAD.with(leave);
    }
}

/// See the module. All zero: free.
#[repr(transparent)]
#[derive(Default)]
pub(crate) struct Lock(AtomicU32);

/// Whoever has this has the lock.
pub(crate) struct Guard<'a>(&'a Lock);

/// The lock is this thread's own: the call comes from a handler that could not be postponed, that of a fault for instance.
#[derive(Debug)]
pub(crate) struct Reentered;

impl Lock {
    pub(crate) const fn new() -> Lock {
        Lock(AtomicU32::new(0))
    }

    pub(crate) fn try_lock(&self) -> Option<Guard<'_>> {
        let number = thread();
        THREAD.with(|thread| {
            enter(thread);
            match self.0.compare_exchange(0, number, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => Some(Guard(self)),
                Err(_) => {
                    leave(thread);
                    None
                }
            }
        })
    }

    #[inline]
    pub(crate) fn lock(&self) -> Result<Guard<'_>, Reentered> {
        match self.try_lock() {
            Some(guard) => Ok(guard),
            None => self.wait(),
        }
    }

    #[cold]
    fn wait(&self) -> Result<Guard<'_>, Reentered> {
        for round in 1u32.. {
            let owner = self.0.load(Ordering::Relaxed);
            if owner == thread() {
                break;
            }
            if round.is_multiple_of(1024) && owner != 0 && is_gone(owner) {
                // Another thread may take it first, and then it is that one's.
                let _ = self.0.compare_exchange(owner, 0, Ordering::Acquire, Ordering::Relaxed);
            }
            if let Some(guard) = self.try_lock() {
                return Ok(guard);
            }
            if round < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Err(Reentered)
    }

    /// Has the lock free: in a child that has just been forked, whose parent held it for that, or in new memory.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// True if there is no thread or process of this number.
pub(crate) fn is_gone(thread: u32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(thread.cast_signed()) else { return true };
    rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
        THREAD.with(leave);
    }
}
