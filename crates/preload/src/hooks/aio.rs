//! Hooks of POSIX AIO. The C library's threads read and write by calls of its own, which are not seen here.

use crate::{process, real, slots};
use libc::{aiocb, c_int, sigevent};

/// Has the connection of a request go by plain TCP from here on.
unsafe fn leave(request: *const aiocb) {
    // SAFETY: the caller's promise; the program may pass null.
    let fd = unsafe { request.as_ref() }.map_or(-1, |request| request.aio_fildes);
    if let Some(number) = slots::find(fd) {
        process::leave_reading(number, fd);
    }
}

macro_rules! request {
    ($($name:ident),*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name(request: *mut aiocb) -> c_int {
                unsafe {
                    leave(request);
                    real::$name(request)
                }
            }
        )*
    };
}

request! { aio_read, aio_read64, aio_write, aio_write64 }

macro_rules! list {
    ($($name:ident),*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name(
                mode: c_int,
                requests: *const *mut aiocb,
                count: c_int,
                event: *mut sigevent,
            ) -> c_int {
                for at in 0..usize::try_from(count).unwrap_or(0) {
                    unsafe { leave(*requests.add(at)) };
                }
                unsafe { real::$name(mode, requests, count, event) }
            }
        )*
    };
}

list! { lio_listio, lio_listio64 }
