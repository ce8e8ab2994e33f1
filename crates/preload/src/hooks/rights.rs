//! Hooks by which a process becomes another user, or has other groups.

use crate::{process, real};
use libc::{c_char, c_int, gid_t, size_t, uid_t};

macro_rules! setters {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $kind),*) -> c_int {
                let result = unsafe { real::$name($($arg),*) };
                if result == 0 {
                    process::after_change_of_rights();
                }
                result
            }
        )*
    };
}

setters! {
    setuid(uid: uid_t);
    seteuid(uid: uid_t);
    setreuid(real: uid_t, effective: uid_t);
    setresuid(real: uid_t, effective: uid_t, saved: uid_t);
    setgid(gid: gid_t);
    setegid(gid: gid_t);
    setregid(real: gid_t, effective: gid_t);
    setresgid(real: gid_t, effective: gid_t, saved: gid_t);
    setgroups(count: size_t, groups: *const gid_t);
    initgroups(user: *const c_char, group: gid_t);
}
