//! Signals for which [`rustix`] has no names.

use std::io;

/// Signals that have no meaning but what programs give them, and that of a failing power supply.
pub fn of_programs() -> impl Iterator<Item = i32> {
    (libc::SIGRTMIN()..=libc::SIGRTMAX()).chain([libc::SIGPWR])
}

/// Sends a signal, also a real-time one, to a process of this user's.
///
/// # Errors
/// Those of `kill(2)`; [`io::ErrorKind::InvalidInput`] for 0 and less, which mean several processes.
pub fn send(process: i32, signal: i32) -> io::Result<()> {
    if process <= 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: a system call without pointers.
    match unsafe { libc::kill(process, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
