//! A lock for a few instructions, which may lie in memory that processes share.
//!
//! It knows its owner. A signal handler that interrupts its own thread inside finds that out instead of waiting for ever, and what a
//! process held when it was killed is taken from it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

thread_local! {
    /// The thread's number, or 0 before it has asked for it.
    static THREAD: Cell<u32> = const { Cell::new(0) };
    /// Where the stack was when this thread last took a lock.
    static STACK: Cell<usize> = const { Cell::new(0) };
}

/// Furthest that two frames of one stack are thought to be apart.
const STACK_MAX: usize = 8 << 20;

fn stack() -> usize {
    let here = 0u8;
    (&raw const here).addr()
}

/// This thread's number.
pub(crate) fn thread() -> u32 {
    THREAD.with(|thread| {
        if thread.get() == 0 {
            // SAFETY: without preconditions.
            thread.set(unsafe { libc::gettid() }.cast_unsigned());
        }
        thread.get()
    })
}

/// This is another process now.
pub(crate) fn forget_thread() {
    THREAD.with(|thread| thread.set(0));
}

/// See the module. All zero: free.
#[repr(transparent)]
#[derive(Default)]
pub(crate) struct Lock(AtomicU32);

/// Whoever has this has the lock.
pub(crate) struct Guard<'a>(&'a Lock);

/// The lock is this thread's own: the call comes from a signal handler that has interrupted it.
#[derive(Debug)]
pub(crate) struct Reentered;

impl Lock {
    pub(crate) const fn new() -> Lock {
        Lock(AtomicU32::new(0))
    }

    pub(crate) fn try_lock(&self) -> Option<Guard<'_>> {
        self.0.compare_exchange(0, thread(), Ordering::Acquire, Ordering::Relaxed).ok()?;
        STACK.with(|at| at.set(stack()));
        Some(Guard(self))
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
                // A handler's frames lie below those that it has interrupted. If these lie above, the program has jumped out of the
                // call that had the lock; what that had not finished has not happened.
                let taken_at = STACK.with(Cell::get);
                let has_left = stack().checked_sub(taken_at).is_some_and(|up| up > 4096 && up < STACK_MAX);
                return if has_left { Ok(Guard(self)) } else { Err(Reentered) };
            }
            if round.is_multiple_of(1024) && owner != 0 && is_gone(owner) {
                let taken = self.0.compare_exchange(owner, thread(), Ordering::Acquire, Ordering::Relaxed);
                if taken.is_ok() {
                    return Ok(Guard(self));
                }
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

fn is_gone(thread: u32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(thread.cast_signed()) else { return true };
    rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}
