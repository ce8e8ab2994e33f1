//! Hooks of calls beside the C library's own functions: its `syscall`, which is answered as the function of that name would be, and
//! liburing's functions that make a ring.

use super::{descriptors, receiving, sending, waiting};
use crate::{data, process, real, recheck, uring};
use libc::{c_int, c_long, c_uint, c_void};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let real = || unsafe { real::syscall(number, a, b, c, d, e, f) };
    let (fd, length) = (a as c_int, c as usize);
    unsafe {
        match number {
            libc::SYS_io_uring_setup => {
                let ring = real();
                let error = data::errno();
                if ring >= 0 {
                    uring::note();
                }
                data::fail(error);
                ring
            }
            libc::SYS_io_uring_enter | libc::SYS_io_uring_register => {
                uring::note();
                real()
            }
            // With memory of its own, a child is one of a fork.
            libc::SYS_clone if a as c_int & libc::CLONE_VM == 0 => process::fork(|| real() as _).into(),
            libc::SYS_clone3 if (a as *const u64).as_ref().is_some_and(|flags| *flags & libc::CLONE_VM as u64 == 0) => {
                process::fork(|| real() as _).into()
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_fork => process::fork(|| real() as _).into(),
            libc::SYS_read => receiving::read(fd, b as _, length) as _,
            libc::SYS_readv => receiving::readv(fd, b as _, c as _) as _,
            libc::SYS_recvfrom => receiving::recvfrom(fd, b as _, length, d as _, e as _, f as _) as _,
            libc::SYS_recvmsg => receiving::recvmsg(fd, b as _, c as _) as _,
            libc::SYS_recvmmsg => receiving::recvmmsg(fd, b as _, c as _, d as _, e as _).into(),
            libc::SYS_write => sending::write(fd, b as _, length) as _,
            libc::SYS_writev => sending::writev(fd, b as _, c as _) as _,
            libc::SYS_sendto => sending::sendto(fd, b as _, length, d as _, e as _, f as _) as _,
            libc::SYS_sendmsg => sending::sendmsg(fd, b as _, c as _) as _,
            libc::SYS_sendmmsg => sending::sendmmsg(fd, b as _, c as _, d as _).into(),
            libc::SYS_sendfile => sending::sendfile(fd, b as _, c as _, d as _) as _,
            libc::SYS_splice => sending::splice(fd, b as _, c as _, d as _, e as _, f as _) as _,
            libc::SYS_seccomp => {
                recheck::note_filter();
                real()
            }
            libc::SYS_prctl => super::processes::prctl(fd, b as _, c as _, d as _, e as _).into(),
            libc::SYS_close => descriptors::close(fd).into(),
            libc::SYS_close_range => descriptors::close_range(a as _, b as _, c as _).into(),
            libc::SYS_dup => descriptors::dup(fd).into(),
            libc::SYS_dup3 => descriptors::dup3(fd, b as _, c as _).into(),
            libc::SYS_fcntl => descriptors::fcntl(fd, b as _, c as _).into(),
            libc::SYS_ioctl => descriptors::ioctl(fd, b as _, c as _).into(),
            libc::SYS_getsockopt => descriptors::getsockopt(fd, b as _, c as _, d as _, e as _).into(),
            libc::SYS_setsockopt => descriptors::setsockopt(fd, b as _, c as _, d as _, e as _).into(),
            libc::SYS_connect => descriptors::connect(fd, b as _, c as _).into(),
            libc::SYS_shutdown => descriptors::shutdown(fd, b as _).into(),
            libc::SYS_ppoll => waiting::ppoll(a as _, b as _, c as _, d as _).into(),
            libc::SYS_pselect6 => {
                // The set of signals comes with its length.
                let mask = (f as *const *const libc::sigset_t).as_ref().map_or(std::ptr::null(), |mask| *mask);
                waiting::pselect(fd, b as _, c as _, d as _, e as _, mask).into()
            }
            libc::SYS_epoll_create1 => waiting::epoll_create1(a as _).into(),
            libc::SYS_epoll_ctl => waiting::epoll_ctl(fd, b as _, c as _, d as _).into(),
            libc::SYS_epoll_pwait => waiting::epoll_pwait(fd, b as _, c as _, d as _, e as _).into(),
            libc::SYS_epoll_pwait2 => waiting::epoll_pwait2(fd, b as _, c as _, d as _, e as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => descriptors::dup2(fd, b as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => waiting::poll(a as _, b as _, c as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => waiting::select(fd, b as _, c as _, d as _, e as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_create => waiting::epoll_create(a as _).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => waiting::epoll_wait(fd, b as _, c as _, d as _).into(),
            _ => real(),
        }
    }
}

/// Functions of liburing that make a ring, and return 0, its descriptor, or an error number below 0.
macro_rules! makers {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $kind),*) -> c_int {
                const NAME: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                };
                let Some(found) = real::in_liburing(NAME) else { return -libc::ENOSYS };
                let function: unsafe extern "C" fn($($kind),*) -> c_int = unsafe { std::mem::transmute(found) };
                let made = unsafe { function($($arg),*) };
                if made >= 0 {
                    uring::note();
                }
                made
            }
        )*
    };
}

makers! {
    io_uring_setup(entries: c_uint, parameters: *mut c_void);
    io_uring_queue_init(entries: c_uint, ring: *mut c_void, flags: c_uint);
    io_uring_queue_init_params(entries: c_uint, ring: *mut c_void, parameters: *mut c_void);
    io_uring_queue_init_try_nosqarr(entries: c_uint, ring: *mut c_void, parameters: *mut c_void);
    io_uring_queue_init_mem(entries: c_uint, ring: *mut c_void, parameters: *mut c_void, memory: *mut c_void, size: usize);
}
