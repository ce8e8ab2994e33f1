//! Hooks that set signal handlers: the library's own function stands before each.

use crate::signals::{adopt, handler, note_change, set_action, translate};
use crate::{SETTINGS, real};
use libc::{c_int, c_void, sigaction as Action};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    if SETTINGS.get().is_none() {
        return unsafe { real::sigaction(signal, new, old) };
    }
    let result = unsafe { set_action(signal, new, old) };
    if !new.is_null() {
        note_change();
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    unsafe { sigaction(signal, new, old) }
}

macro_rules! setters {
    ($($name:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name(signal: c_int, new: *mut c_void) -> *mut c_void {
                let before = handler(signal);
                let told = unsafe { real::$name(signal, new) };
                if SETTINGS.get().is_some() {
                    adopt(signal);
                    note_change();
                }
                translate(told, before)
            }
        )*
    };
}

setters! {
    signal;
    ssignal;
    bsd_signal;
    sysv_signal;
    __sysv_signal;
    sigset;
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn siginterrupt(signal: c_int, does: c_int) -> c_int {
    let result = unsafe { real::siginterrupt(signal, does) };
    note_change();
    result
}
