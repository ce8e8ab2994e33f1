//! What this process was started with, before the Rust runtime has changed it.

use std::sync::atomic::{AtomicBool, Ordering};

static IGNORES_SIGPIPE: AtomicBool = AtomicBool::new(false);

/// Whether this process was started with SIGPIPE ignored. The runtime ignores it in any case, and gives programs that it starts the
/// default action.
pub fn ignores_sigpipe() -> bool {
    IGNORES_SIGPIPE.load(Ordering::Relaxed)
}

extern "C" fn look() {
    // SAFETY: integers and pointers, for which zero is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only asks; `action` is valid for writing.
    let is_known = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) } == 0;
    IGNORES_SIGPIPE.store(is_known && action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
}

/// Called before the runtime starts.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;
