//! Which calls the program's signal handlers interrupt. The kernel knows it of each; a call that waits by other means than the program's
//! learns only that there was one.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

/// All handlers of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Handlers {
    /// Each has calls go on that it interrupts (`SA_RESTART`), or there is none.
    Restart = 0,
    /// None does.
    Interrupt = 1,
    /// It depends on which.
    Mixed = 2,
}

/// How often the program has said something about its handlers.
static CHANGES: AtomicU32 = AtomicU32::new(1);
/// That number when they were last looked at, and what was found, in the two lowest bits.
static FOUND: AtomicU32 = AtomicU32::new(0);

/// The program has said something about its handlers.
pub(crate) fn note_change() {
    CHANGES.fetch_add(1, Ordering::SeqCst);
}

pub(crate) fn handlers() -> Handlers {
    let (changes, found) = (CHANGES.load(Ordering::SeqCst) << 2, FOUND.load(Ordering::SeqCst));
    if found & !3 == changes {
        return match found & 3 {
            0 => Handlers::Restart,
            1 => Handlers::Interrupt,
            _ => Handlers::Mixed,
        };
    }
    let (mut restarts, mut interrupts) = (false, false);
    for signal in 1..=libc::SIGRTMAX() {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: changes nothing, and writes there.
        let is_known = unsafe { crate::real::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } == 0;
        // SAFETY: zeroed is a valid value, too.
        let action = unsafe { action.assume_init() };
        if is_known && !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
            let goes_on = action.sa_flags & libc::SA_RESTART != 0;
            restarts |= goes_on;
            interrupts |= !goes_on;
        }
    }
    let found = match (restarts, interrupts) {
        (_, false) => Handlers::Restart,
        (false, true) => Handlers::Interrupt,
        (true, true) => Handlers::Mixed,
    };
    FOUND.store(changes | found as u32, Ordering::SeqCst);
    found
}
