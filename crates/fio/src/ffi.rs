//! What `engine.c` calls. A handle is used by one thread at a time; 0 is success, and an error is told as text.

use crate::{Finished, Remote};
use libc::{c_char, c_int, c_uint, c_void};
use std::ffi::CStr;
use std::net::ToSocketAddrs;
use std::time::Duration;
use thruway_fabric::{Provider, iwarp, verbs};

/// A connection and what of its finished requests has not been asked for.
pub struct Handle {
    remote: Remote,
    finished: Vec<Finished>,
}

/// Writes a text, cut to fit, with its end.
fn tell(text: &str, out: *mut c_char, room: usize) {
    let n = text.len().min(room.saturating_sub(1));
    if room > 0 && !out.is_null() {
        // SAFETY: the caller lends `room` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), n);
            out.add(n).write(0);
        }
    }
}

fn connect(host: &str, port: u16, over_verbs: bool, depth: u32) -> Result<Remote, String> {
    let found = (host, port).to_socket_addrs().map_err(|e| format!("{host}: {e}"))?.next();
    let peer = found.ok_or_else(|| format!("{host} has no address"))?;
    let provider: Provider = if over_verbs {
        verbs::Config::towards(peer).map_err(|e| e.to_string())?.into()
    } else {
        iwarp::Config::default().into()
    };
    Remote::open(&provider, peer, depth).map_err(|e| e.to_string())
}

/// Connects. Null on an error, which `why` then tells.
///
/// # Safety
/// `host` is a string with its end; `why` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thruway_open(
    host: *const c_char,
    port: c_uint,
    over_verbs: c_int,
    depth: c_uint,
    why: *mut c_char,
    room: usize,
) -> *mut Handle {
    // SAFETY: the caller's promise.
    let host = unsafe { CStr::from_ptr(host) }.to_string_lossy();
    let port = u16::try_from(port).map_err(|_| format!("port {port} out of range (expected 0 to 65535)"));
    match port.and_then(|port| connect(&host, port, over_verbs != 0, depth)) {
        Ok(remote) => Box::into_raw(Box::new(Handle { remote, finished: Vec::new() })),
        Err(text) => {
            tell(&text, why, room);
            std::ptr::null_mut()
        }
    }
}

/// Bytes of the memory.
///
/// # Safety
/// A handle of [`thruway_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thruway_size(handle: *mut Handle) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { &*handle }.remote.len()
}

/// Registers the memory of requests.
///
/// # Safety
/// A handle of [`thruway_open`]; the memory stays mapped until the handle is closed; `why` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thruway_register(
    handle: *mut Handle,
    memory: *mut c_void,
    len: usize,
    why: *mut c_char,
    room: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let registered = unsafe { (*handle).remote.register(memory.cast(), len) };
    registered.map_or_else(
        |error| {
            tell(&error.to_string(), why, room);
            -1
        },
        |()| 0,
    )
}

/// Starts a read (`kind` 0), a write (1) or a flush (2). 1 if there is no room for it now.
///
/// # Safety
/// A handle of [`thruway_open`]; `why` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thruway_start(
    handle: *mut Handle,
    id: u64,
    kind: c_int,
    local: *mut c_void,
    len: c_uint,
    offset: u64,
    why: *mut c_char,
    room: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let remote = &unsafe { &*handle }.remote;
    let started = if kind == 2 { remote.sync(id) } else { remote.start(id, kind == 1, local as u64, len, offset) };
    match started {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(error) => {
            tell(&error.to_string(), why, room);
            -1
        }
    }
}

/// Waits until `min` requests are done, at most `limit_ns` (0: without end); says how many are, `max` at most.
///
/// # Safety
/// A handle of [`thruway_open`]; `why` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thruway_wait(
    handle: *mut Handle,
    min: c_uint,
    max: c_uint,
    limit_ns: u64,
    why: *mut c_char,
    room: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { &mut *handle };
    let limit = (limit_ns > 0).then(|| Duration::from_nanos(limit_ns));
    handle.finished.clear();
    match handle.remote.finished(&mut handle.finished, min as usize, max as usize, limit) {
        Ok(()) => handle.finished.len() as c_int,
        Err(error) => {
            tell(&error.to_string(), why, room);
            -1
        }
    }
}

/// The request that was done as number `index` of the last [`thruway_wait`], and whether it failed.
///
/// # Safety
/// A handle of [`thruway_open`], and a place for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thruway_finished(handle: *mut Handle, index: c_uint, failed: *mut c_int) -> u64 {
    // SAFETY: the caller's promise.
    let found = unsafe { &*handle }.finished.get(index as usize).copied();
    let found = found.unwrap_or(Finished { id: 0, success: false });
    // SAFETY: the caller's promise.
    unsafe { failed.write((!found.success).into()) };
    found.id
}

/// Ends the connection.
///
/// # Safety
/// A handle of [`thruway_open`], which is gone after this, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thruway_close(handle: *mut Handle) {
    if !handle.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(handle) });
    }
}
