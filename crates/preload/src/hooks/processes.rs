//! Hooks that fork, start programs, and end.

use crate::slots;
use crate::{process, real, recheck};
use libc::{c_char, c_int, c_ulong, c_void, pid_t};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _Fork() -> pid_t {
    process::fork(|| unsafe { real::_Fork() })
}

/// The last three arguments are arbitrary without the flags for them.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clone(
    function: Option<extern "C" fn(*mut c_void) -> c_int>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_id: *mut c_void,
    tls: *mut c_void,
    child_id: *mut c_void,
) -> c_int {
    let real = |function, argument| unsafe { real::clone(function, stack, flags, argument, parent_id, tls, child_id) };
    match function {
        Some(function) if flags & libc::CLONE_VM == 0 => {
            process::clone(&process::Start { function, argument }, |begin, start| real(Some(begin), start))
        }
        _ => real(function, argument),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execve(
    path: *const c_char,
    args: *const *const c_char,
    env: *const *const c_char,
) -> c_int {
    process::exec(|| unsafe { real::execve(path, args, env) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execv(path: *const c_char, args: *const *const c_char) -> c_int {
    process::exec(|| unsafe { real::execv(path, args) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execvp(path: *const c_char, args: *const *const c_char) -> c_int {
    process::exec(|| unsafe { real::execvp(path, args) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execvpe(
    path: *const c_char,
    args: *const *const c_char,
    env: *const *const c_char,
) -> c_int {
    process::exec(|| unsafe { real::execvpe(path, args, env) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fexecve(fd: c_int, args: *const *const c_char, env: *const *const c_char) -> c_int {
    process::exec(|| unsafe { real::fexecve(fd, args, env) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attr: *const c_void,
    args: *const *mut c_char,
    env: *const *mut c_char,
) -> c_int {
    process::before_another_program();
    unsafe { real::posix_spawn(pid, path, actions, attr, args, env) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_spawnp(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attr: *const c_void,
    args: *const *mut c_char,
    env: *const *mut c_char,
) -> c_int {
    process::before_another_program();
    unsafe { real::posix_spawnp(pid, path, actions, attr, args, env) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == libc::PR_SET_SECCOMP && a == c_ulong::from(libc::SECCOMP_MODE_STRICT) {
        process::before_strict_mode();
    } else if option == libc::PR_SET_SECCOMP {
        recheck::note_filter();
    }
    unsafe { real::prctl(option, a, b, c, d) }
}

/// A child that the C library starts will have a descriptor by another number.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int {
    if let Some(number) = slots::find(fd) {
        process::hand_over(number, fd, true);
    }
    unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, to) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn system(command: *const c_char) -> c_int {
    process::before_another_program();
    unsafe { real::system(command) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
    process::before_another_program();
    unsafe { real::popen(command, mode) }
}

/// A stream of the C library's reads and writes by calls that are not seen here.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
    if let Some(number) = slots::find(fd) {
        process::hand_over(number, fd, true);
        // It is closed by a call that is not seen, either.
        process::forget(fd);
    }
    unsafe { real::fdopen(fd, mode) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _exit(status: c_int) -> ! {
    process::at_exit();
    loop {
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _Exit(status: c_int) -> ! {
    unsafe { _exit(status) }
}
