//! The interface for C: `include/thruway/extended.h`, which says what each function does.
//!
//! A panic does not get past these functions: it ends the process, as the language has it for `extern "C"`.

use crate::meeting::{self, ExtendedSocket, Options, Provider};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_fabric::{Access, Status};
use thruway_streams::{Completion, Error, REMOTE_REGION_LEN, Region, RemoteRegion, Scheme};

/// `struct tw_options`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct TwOptions {
    pub size: usize,
    pub provider: c_int,
    pub scheme: c_int,
    pub flags: c_uint,
    pub timeout_ms: c_int,
    pub receive_buffer: u32,
    pub send_buffer: u32,
}

/// `struct tw_info`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct TwInfo {
    pub size: usize,
    pub provider: [c_char; 16],
    pub bytes_copied: u64,
    pub bytes_zero_copy: u64,
}

/// `struct tw_remote`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct TwRemote {
    pub addr: u64,
    pub len: u64,
    pub key: u32,
}

/// `struct tw_completion`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct TwCompletion {
    pub context: u64,
    pub value: u64,
    pub error: c_int,
}

/// `tw_region`.
pub struct TwRegion(Region);

const MESSAGES: c_uint = 1;
const PLAINTEXT: c_uint = 2;
const READ: c_uint = 1;
const WRITE: c_uint = 2;
const ATOMIC: c_uint = 4;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn set_error(errno: i32, text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.with(|last| *last.borrow_mut() = text);
    // SAFETY: the C library's own place for this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// 0, or -1 with the error told.
fn told(result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            set_error(error.errno(), &error.to_string());
            -1
        }
    }
}

fn told_len(result: Result<usize, Error>) -> isize {
    match result {
        Ok(len) => len as isize,
        Err(error) => told(Err(error)) as isize,
    }
}

impl TwOptions {
    fn options(&self) -> Result<Options, String> {
        if self.size != size_of::<TwOptions>() {
            return Err(format!("size of struct tw_options is {}, expected {}", self.size, size_of::<TwOptions>()));
        }
        if self.flags & !(MESSAGES | PLAINTEXT) != 0 {
            return Err(format!("unknown flags {:#x}", self.flags));
        }
        let default = Options::default();
        let buffer = |what, len, default| match len {
            0 => Ok(default),
            4096..=0x4000_0000 => Ok(len),
            _ => Err(format!("{what}: {len} is not between 4096 and 1073741824")),
        };
        Ok(Options {
            provider: match self.provider {
                0 => Provider::Auto,
                1 => Provider::Shm,
                2 => Provider::Verbs,
                3 => Provider::Iwarp,
                other => return Err(format!("unknown provider {other}")),
            },
            scheme: match self.scheme {
                0 => Scheme::Adaptive,
                1 => Scheme::Credit,
                2 => Scheme::Packetized,
                3 => Scheme::Rendezvous,
                other => return Err(format!("unknown scheme {other}")),
            },
            messages: self.flags & MESSAGES != 0,
            plaintext: self.flags & PLAINTEXT != 0,
            timeout: match self.timeout_ms {
                0 => default.timeout,
                ms @ 1.. => Duration::from_millis(ms as u64),
                ms => return Err(format!("timeout_ms: {ms} is negative")),
            },
            receive_buffer: buffer("receive_buffer", self.receive_buffer, default.receive_buffer)?,
            send_buffer: buffer("send_buffer", self.send_buffer, default.send_buffer)?,
        })
    }
}

/// # Safety
/// `options` is NULL or a structure of the header's.
unsafe fn meet(
    fd: c_int,
    options: *const TwOptions,
    meet: impl FnOnce(BorrowedFd<'_>, &Options) -> Result<ExtendedSocket, meeting::Error>,
) -> *mut ExtendedSocket {
    // SAFETY: the caller's promise.
    let options = match unsafe { options.as_ref() } {
        None => Ok(Options::default()),
        // SAFETY: the size is always there; without the right one, nothing else is looked at.
        Some(options) => options.options(),
    };
    let options = match options {
        Ok(options) => options,
        Err(why) => {
            set_error(libc::EINVAL, &why);
            return std::ptr::null_mut();
        }
    };
    if fd < 0 {
        set_error(libc::EBADF, "the descriptor is negative");
        return std::ptr::null_mut();
    }
    // SAFETY: the descriptor is the caller's for the time of the call; if it is none, the first call says so.
    let tcp = unsafe { BorrowedFd::borrow_raw(fd) };
    match meet(tcp, &options) {
        Ok(socket) => Box::into_raw(Box::new(socket)),
        Err(error) => {
            set_error(error.errno(), &error.to_string());
            std::ptr::null_mut()
        }
    }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_accept(fd: c_int, options: *const TwOptions) -> *mut ExtendedSocket {
    // SAFETY: the caller's promise.
    unsafe { meet(fd, options, |tcp, options| meeting::accept(tcp, options)) }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_connect(fd: c_int, options: *const TwOptions) -> *mut ExtendedSocket {
    // SAFETY: the caller's promise.
    unsafe { meet(fd, options, |tcp, options| meeting::connect(tcp, options)) }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn tw_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_get_info(socket: *const ExtendedSocket, info: *mut TwInfo) -> c_int {
    // SAFETY: the caller's promise.
    let (socket, info) = unsafe { (&*socket, &mut *info) };
    if info.size != size_of::<TwInfo>() {
        set_error(libc::EINVAL, &format!("size of struct tw_info is {}, expected {}", info.size, size_of::<TwInfo>()));
        return -1;
    }
    info.provider = [0; 16];
    for (to, from) in info.provider.iter_mut().zip(socket.provider().bytes().take(15)) {
        *to = from as c_char;
    }
    let counters = socket.counters();
    (info.bytes_copied, info.bytes_zero_copy) = (counters.bytes_copied, counters.bytes_zero_copy);
    0
}

fn flags(flags: c_int) -> Result<bool, Error> {
    match flags {
        0 => Ok(true),
        libc::MSG_DONTWAIT => Ok(false),
        other => Err(Error::Flags(other)),
    }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_send(
    socket: *const ExtendedSocket,
    bytes: *const c_void,
    len: usize,
    call_flags: c_int,
) -> isize {
    if let Some(refused) = too_long(len) {
        return refused;
    }
    // SAFETY: the caller's promise.
    let (socket, bytes) = unsafe { (&*socket, slice(bytes.cast(), len)) };
    told_len(flags(call_flags).and_then(|waits| match waits {
        true => socket.send(bytes, None).map(|()| len),
        false => socket.try_send(bytes),
    }))
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_recv(
    socket: *const ExtendedSocket,
    bytes: *mut c_void,
    len: usize,
    call_flags: c_int,
) -> isize {
    if let Some(refused) = too_long(len) {
        return refused;
    }
    // SAFETY: the caller's promise.
    let (socket, to) = unsafe { (&*socket, slice_mut(bytes.cast(), len)) };
    told_len(flags(call_flags).and_then(|waits| match waits {
        true => socket.recv(to, None),
        false => socket.try_recv(to),
    }))
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_recv_message(
    socket: *const ExtendedSocket,
    bytes: *mut c_void,
    len: usize,
    call_flags: c_int,
    truncated: *mut c_int,
) -> isize {
    if let Some(refused) = too_long(len) {
        return refused;
    }
    // SAFETY: the caller's promise.
    let (socket, to) = unsafe { (&*socket, slice_mut(bytes.cast(), len)) };
    let received = flags(call_flags).and_then(|waits| match waits {
        true => socket.recv_message(to, None),
        false => socket.try_recv_message(to),
    });
    match received {
        Ok(Some(received)) => {
            // SAFETY: NULL, or a place for it, by the caller's promise.
            if let Some(truncated) = unsafe { truncated.as_mut() } {
                *truncated = received.truncated.into();
            }
            received.len as isize
        }
        Ok(None) => {
            set_error(libc::ENODATA, "the peer sends no more messages");
            -1
        }
        Err(error) => told_len(Err(error)),
    }
}

/// No memory is that long.
fn too_long(len: usize) -> Option<isize> {
    (len > isize::MAX as usize).then(|| {
        set_error(libc::EINVAL, "a length that no memory has");
        -1
    })
}

/// # Safety
/// `at` is NULL with a length of zero, or readable for `len` bytes.
unsafe fn slice<'a>(at: *const u8, len: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(at, len) } }
}

/// # Safety
/// `at` is NULL with a length of zero, or writable for `len` bytes, which nothing else uses during the call.
unsafe fn slice_mut<'a>(at: *mut u8, len: usize) -> &'a mut [u8] {
    // SAFETY: the caller's promise; whether the bytes have a value does not matter, as they are only written.
    if len == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(at, len) } }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_shutdown(socket: *const ExtendedSocket) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { &*socket }.shutdown();
    0
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_close(socket: *mut ExtendedSocket, timeout_ms: c_int) -> c_int {
    // SAFETY: it comes from `meet`, and the caller gives it back.
    let socket = unsafe { Box::from_raw(socket) };
    told(socket.close(deadline(timeout_ms)))
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_abort(socket: *const ExtendedSocket) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { &*socket }.abort();
    0
}

fn deadline(timeout_ms: c_int) -> Option<Instant> {
    u64::try_from(timeout_ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms))
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_register(
    socket: *const ExtendedSocket,
    memory: *mut c_void,
    len: usize,
    peer_access: c_uint,
) -> *mut TwRegion {
    let is_memory =
        !memory.is_null() && len > 0 && len <= isize::MAX as usize && (memory as usize).checked_add(len).is_some();
    if peer_access & !(READ | WRITE | ATOMIC) != 0 || !is_memory {
        set_error(libc::EINVAL, "unknown access, or no memory to register");
        return std::ptr::null_mut();
    }
    let mut access = Access::empty();
    access.set(Access::REMOTE_READ, peer_access & READ != 0);
    access.set(Access::REMOTE_WRITE, peer_access & WRITE != 0);
    access.set(Access::REMOTE_ATOMIC, peer_access & ATOMIC != 0);
    // SAFETY: the caller's promise: the memory stays mapped until the region is unregistered.
    match unsafe { (*socket).register(memory.cast(), len, access, Arc::new(())) } {
        Ok(region) => Box::into_raw(Box::new(TwRegion(region))),
        Err(error) => {
            told(Err(error));
            std::ptr::null_mut()
        }
    }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_unregister(region: *mut TwRegion) {
    if !region.is_null() {
        // SAFETY: it comes from `tw_register`, and the caller gives it back.
        unsafe { Box::from_raw(region) }.0.close();
    }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_describe(region: *const TwRegion, description: *mut [u8; REMOTE_REGION_LEN]) {
    // SAFETY: the caller's promise.
    unsafe { *description = (*region).0.remote().encode() };
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_remote_from(description: *const [u8; REMOTE_REGION_LEN], remote: *mut TwRemote) {
    // SAFETY: the caller's promise.
    let (described, to) = unsafe { (RemoteRegion::decode(&*description), &mut *remote) };
    (to.addr, to.len, to.key) = (described.addr, described.len, described.key);
}

impl TwRemote {
    fn region(&self) -> RemoteRegion {
        RemoteRegion { addr: self.addr, len: self.len, key: self.key }
    }
}

/// The functions for one-sided operations: each once that begins, and once that waits.
macro_rules! operations {
    ($($name:ident($($argument:ident: $kind:ty),*) = |$socket:ident| $call:expr;)*) => {$(
        /// See the header.
        ///
        /// # Safety
        /// As the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(socket: *const ExtendedSocket, $($argument: $kind),*) -> c_int {
            // SAFETY: the caller's promise.
            let $socket = unsafe { &*socket };
            // SAFETY: the caller's promise for what is pointed to.
            told(unsafe { $call })
        }
    )*};
}

operations! {
    tw_put(from: *const TwRegion, offset: u64, to: *const TwRemote, remote_offset: u64, len: u64, context: u64) =
        |socket| socket.put((&(*from).0, offset), (&(*to).region(), remote_offset), len, context);
    tw_get(to: *const TwRegion, offset: u64, from: *const TwRemote, remote_offset: u64, len: u64, context: u64) =
        |socket| socket.get((&(*to).0, offset), (&(*from).region(), remote_offset), len, context);
    tw_fetch_add(to: *const TwRemote, offset: u64, add: u64, context: u64) =
        |socket| socket.fetch_add((&(*to).region(), offset), add, context);
    tw_compare_swap(to: *const TwRemote, offset: u64, compare: u64, swap: u64, context: u64) =
        |socket| socket.compare_swap((&(*to).region(), offset), compare, swap, context);
    tw_flush(to: *const TwRemote, context: u64) = |socket| socket.flush(&(*to).region(), context);
    tw_put_wait(from: *const TwRegion, offset: u64, to: *const TwRemote, remote_offset: u64, len: u64) =
        |socket| socket.put_wait((&(*from).0, offset), (&(*to).region(), remote_offset), len);
    tw_get_wait(to: *const TwRegion, offset: u64, from: *const TwRemote, remote_offset: u64, len: u64) =
        |socket| socket.get_wait((&(*to).0, offset), (&(*from).region(), remote_offset), len);
    tw_fetch_add_wait(to: *const TwRemote, offset: u64, add: u64, old: *mut u64) =
        |socket| socket.fetch_add_wait((&(*to).region(), offset), add).map(|value| store(old, value));
    tw_compare_swap_wait(to: *const TwRemote, offset: u64, compare: u64, swap: u64, old: *mut u64) =
        |socket| socket.compare_swap_wait((&(*to).region(), offset), compare, swap).map(|value| store(old, value));
    tw_flush_wait(to: *const TwRemote) = |socket| socket.flush_wait(&(*to).region());
}

/// # Safety
/// `to` is NULL or writable.
unsafe fn store(to: *mut u64, value: u64) {
    // SAFETY: the caller's promise.
    if let Some(to) = unsafe { to.as_mut() } {
        *to = value;
    }
}

/// # Safety
/// `to` has room for `max` completions.
unsafe fn give(completions: Result<Vec<Completion>, Error>, to: *mut TwCompletion) -> c_int {
    match completions {
        Ok(completions) => {
            for (n, completion) in completions.iter().enumerate() {
                let error = match completion.status {
                    Status::Success => 0,
                    status => Error::Operation(status).errno(),
                };
                // SAFETY: no more than there is room for.
                unsafe { *to.add(n) = TwCompletion { context: completion.context, value: completion.value, error } };
            }
            completions.len() as c_int
        }
        Err(Error::TimedOut) => 0,
        Err(error) => told(Err(error)),
    }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_poll(socket: *const ExtendedSocket, to: *mut TwCompletion, max: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { give((*socket).completions(max.max(0) as usize), to) }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_wait(
    socket: *const ExtendedSocket,
    to: *mut TwCompletion,
    max: c_int,
    timeout_ms: c_int,
) -> c_int {
    if max < 1 {
        set_error(libc::EINVAL, "no room for a completion");
        return -1;
    }
    // SAFETY: the caller's promise.
    unsafe { give((*socket).wait_completions(max as usize, deadline(timeout_ms)), to) }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_descriptor(socket: *const ExtendedSocket) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { &*socket }.descriptor() {
        Ok(descriptor) => descriptor.as_raw_fd(),
        Err(error) => told(Err(error)),
    }
}

/// See the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tw_silence(socket: *const ExtendedSocket) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { &*socket }.silence();
    0
}
