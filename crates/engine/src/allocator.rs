//! The allocator of a program whose memory may be limited (`ulimit -v`).

use std::alloc::{GlobalAlloc, Layout, System};

/// The system's allocator. If it has no memory, the process ends with exit status 1 and a message that names the limit, instead of
/// being aborted.
#[derive(Debug)]
pub struct ExitOnFailure;

const MESSAGE: &[u8] = b"thruway: out of memory (os error 12); raise the limit on memory (ulimit -v)\n";

/// Ends the process. It must not allocate, and takes no lock that the failed allocation may hold.
#[cold]
fn exit() -> ! {
    // SAFETY: the pointer and the length describe the constant.
    unsafe { libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len()) };
    // SAFETY: ends the process without running anything of it.
    unsafe { libc::_exit(1) }
}

fn checked(memory: *mut u8) -> *mut u8 {
    if memory.is_null() { exit() } else { memory }
}

// SAFETY: each function returns what `System` returns for the same arguments, or not at all.
unsafe impl GlobalAlloc for ExitOnFailure {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the rules of `GlobalAlloc::alloc`, which are those of `System`.
        checked(unsafe { System.alloc(layout) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` is from `System`, by the functions here.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        checked(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: `memory` is from `System`, by the functions here; the caller keeps the rules of `GlobalAlloc::realloc`.
        checked(unsafe { System.realloc(memory, layout, new_size) })
    }
}
