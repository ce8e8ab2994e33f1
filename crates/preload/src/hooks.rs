//! The C functions that the library stands before. Each finds out whether it is about a connection of ours, and else does nothing.
//!
//! # Safety
//! All have the contracts of the C functions of their names; pointers are used as those say.
#![allow(clippy::missing_safety_doc, reason = "the contract is the C function's")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see above")]
#![allow(non_snake_case, reason = "the names are C's")]

mod aio;
mod descriptors;
mod processes;
mod raw;
mod receiving;
mod rights;
mod sending;
mod signals;
mod waiting;

use libc::{c_int, c_void, iovec, size_t};

fn piece(base: *const c_void, len: size_t) -> iovec {
    iovec { iov_base: base.cast_mut(), iov_len: len }
}

/// Limits the length of a `recv` or `send`, as the kernel does. It refuses a `read` or `write` above `SSIZE_MAX`.
fn call_len(len: size_t) -> size_t {
    len.min(thruway_sockets::iovecs::CALL_MAX)
}

/// The pieces that a call names, if there can be so many.
unsafe fn list<'a>(base: *const iovec, count: c_int) -> Option<&'a [iovec]> {
    match usize::try_from(count) {
        Ok(0) => Some(&[]),
        // IOV_MAX
        Ok(count) if count <= 1024 && !base.is_null() => {
            // SAFETY: the caller's promise.
            Some(unsafe { std::slice::from_raw_parts(base, count) })
        }
        _ => None,
    }
}

/// What the C library does when a program that was built to be checked asks for more than its buffer holds.
fn check(len: size_t, room: size_t) {
    if len > room {
        crate::report::complain(&["*** buffer overflow detected ***: terminated"]);
        std::process::abort();
    }
}
