//! Hooks that set signal handlers. Only that they are called matters.

use crate::real;
use crate::signals::note_change;
use libc::{c_int, c_void, sigaction as Action};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    let result = unsafe { real::sigaction(signal, new, old) };
    if !new.is_null() {
        note_change();
    }
    result
}

macro_rules! setters {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $ret:ty;)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $kind),*) -> $ret {
                let result = unsafe { real::$name($($arg),*) };
                note_change();
                result
            }
        )*
    };
}

setters! {
    signal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    ssignal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    sysv_signal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    __sysv_signal(signal: c_int, handler: *mut c_void) -> *mut c_void;
    sigset(signal: c_int, handler: *mut c_void) -> *mut c_void;
    siginterrupt(signal: c_int, does: c_int) -> c_int;
}
