//! The functions that the hooks stand before: those of the C library, or of another library that was loaded before the program.

use libc::{c_char, c_int, c_long, c_uint, c_ulong, c_void, size_t, socklen_t, ssize_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Finds what the hook of this name stands before. Ends the process if there is nothing: the program could not run without.
fn resolve(place: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let found = place.load(Ordering::Relaxed);
    if !found.is_null() {
        return found;
    }
    // SAFETY: a name that ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null() {
        crate::report::fatal(name);
    }
    place.store(found, Ordering::Relaxed);
    found
}

/// Finds a function of liburing, also if that was loaded with local scope.
pub(crate) fn in_liburing(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a name that ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !found.is_null() {
        return Some(found);
    }
    [c"liburing.so.2", c"liburing.so.1"].into_iter().find_map(|library| {
        // SAFETY: names that end with a zero; the library stays loaded by those that have loaded it.
        let found = unsafe {
            let library = libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if library.is_null() { library } else { libc::dlsym(library, name.as_ptr()) }
        };
        (!found.is_null()).then_some(found)
    })
}

macro_rules! real {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $ret:ty;)*) => {
        $(
            /// What the hook of this name stands before.
            ///
            /// # Safety
            /// As the C function.
            #[inline]
            #[allow(non_snake_case, reason = "C has names of its own")]
            pub(crate) unsafe fn $name($($arg: $kind),*) -> $ret {
                static PLACE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                };
                let found = resolve(&PLACE, NAME);
                // SAFETY: the C library's function of that name has this type.
                let function: unsafe extern "C" fn($($kind),*) -> $ret = unsafe { std::mem::transmute(found) };
                // SAFETY: the caller's promise.
                unsafe { function($($arg),*) }
            }
        )*
    };
}

real! {
    prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
    syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
    read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    readv(fd: c_int, list: *const libc::iovec, count: c_int) -> ssize_t;
    writev(fd: c_int, list: *const libc::iovec, count: c_int) -> ssize_t;
    preadv2(fd: c_int, list: *const libc::iovec, count: c_int, at: i64, flags: c_int) -> ssize_t;
    pwritev2(fd: c_int, list: *const libc::iovec, count: c_int, at: i64, flags: c_int) -> ssize_t;
    recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, addr: *mut c_void, addr_len: *mut socklen_t) -> ssize_t;
    sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, addr: *const c_void, addr_len: socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> ssize_t;
    sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, list: *mut libc::mmsghdr, count: c_uint, flags: c_int, timeout: *mut libc::timespec) -> c_int;
    sendmmsg(fd: c_int, list: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int;
    sendfile(out: c_int, from: c_int, offset: *mut i64, count: size_t) -> ssize_t;
    splice(from: c_int, from_at: *mut i64, to: c_int, to_at: *mut i64, len: size_t, flags: c_uint) -> ssize_t;
    aio_read(request: *mut libc::aiocb) -> c_int;
    aio_read64(request: *mut libc::aiocb) -> c_int;
    aio_write(request: *mut libc::aiocb) -> c_int;
    aio_write64(request: *mut libc::aiocb) -> c_int;
    lio_listio(mode: c_int, requests: *const *mut libc::aiocb, count: c_int, event: *mut libc::sigevent) -> c_int;
    lio_listio64(mode: c_int, requests: *const *mut libc::aiocb, count: c_int, event: *mut libc::sigevent) -> c_int;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    accept(fd: c_int, addr: *mut c_void, len: *mut socklen_t) -> c_int;
    accept4(fd: c_int, addr: *mut c_void, len: *mut socklen_t, flags: c_int) -> c_int;
    connect(fd: c_int, addr: *const c_void, len: socklen_t) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int;
    fcntl64(fd: c_int, command: c_int, arg: c_ulong) -> c_int;
    ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    poll(list: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int;
    ppoll(list: *mut libc::pollfd, count: libc::nfds_t, timeout: *const libc::timespec, mask: *const libc::sigset_t) -> c_int;
    select(count: c_int, a: *mut u64, b: *mut u64, c: *mut u64, timeout: *mut libc::timeval) -> c_int;
    pselect(count: c_int, a: *mut u64, b: *mut u64, c: *mut u64, timeout: *const libc::timespec, mask: *const libc::sigset_t) -> c_int;
    epoll_create(size: c_int) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    epoll_ctl(ep: c_int, op: c_int, fd: c_int, event: *mut libc::epoll_event) -> c_int;
    epoll_pwait(ep: c_int, events: *mut libc::epoll_event, max: c_int, timeout: c_int, mask: *const libc::sigset_t) -> c_int;
    epoll_pwait2(ep: c_int, events: *mut libc::epoll_event, max: c_int, timeout: *const libc::timespec, mask: *const libc::sigset_t) -> c_int;
    sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    signal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    ssignal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    sysv_signal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    bsd_signal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    __sysv_signal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    sigset(signal: c_int, handler: *mut c_void) -> *mut c_void;
    siginterrupt(signal: c_int, does: c_int) -> c_int;
    setuid(uid: libc::uid_t) -> c_int;
    seteuid(uid: libc::uid_t) -> c_int;
    setreuid(real: libc::uid_t, effective: libc::uid_t) -> c_int;
    setresuid(real: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t) -> c_int;
    setgid(gid: libc::gid_t) -> c_int;
    setegid(gid: libc::gid_t) -> c_int;
    setregid(real: libc::gid_t, effective: libc::gid_t) -> c_int;
    setresgid(real: libc::gid_t, effective: libc::gid_t, saved: libc::gid_t) -> c_int;
    setgroups(count: size_t, groups: *const libc::gid_t) -> c_int;
    initgroups(user: *const c_char, group: libc::gid_t) -> c_int;
    _Fork() -> libc::pid_t;
    clone(function: Option<extern "C" fn(*mut c_void) -> c_int>, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent_id: *mut c_void, tls: *mut c_void, child_id: *mut c_void) -> c_int;
    execve(path: *const c_char, args: *const *const c_char, env: *const *const c_char) -> c_int;
    execv(path: *const c_char, args: *const *const c_char) -> c_int;
    execvp(path: *const c_char, args: *const *const c_char) -> c_int;
    execvpe(path: *const c_char, args: *const *const c_char, env: *const *const c_char) -> c_int;
    fexecve(fd: c_int, args: *const *const c_char, env: *const *const c_char) -> c_int;
    posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void, args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    posix_spawnp(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void, args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int;
    system(command: *const c_char) -> c_int;
    popen(command: *const c_char, mode: *const c_char) -> *mut c_void;
    fdopen(fd: c_int, mode: *const c_char) -> *mut c_void;
}
