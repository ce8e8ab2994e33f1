//! The program's signal handlers: which calls they interrupt, and when they run.
//!
//! The kernel knows of each handler whether it interrupts calls; a call that waits by other means than the program's learns only that there
//! was one.
//!
//! A handler that interrupts a thread which holds a lock of the library could call the library again, or jump out of it. So the library
//! installs its own function in place of each handler. It calls the program's, or, if the thread holds a lock, queues the signal again, to
//! come when the thread holds none: that takes some instructions, and no system call where no signal comes.

use crate::lock;
use crate::real;
use libc::{c_int, c_void, sigaction as Action, siginfo_t, ucontext_t};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// All handlers of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Handlers {
    /// Each has calls go on that it interrupts (`SA_RESTART`), or there is none.
    Restart = 0,
    /// None does.
    Interrupt = 1,
    /// It depends on which.
    Mixed = 2,
}

/// How often the program has said something about its handlers.
static CHANGES: AtomicU32 = AtomicU32::new(1);
/// That number when they were last looked at, and what was found, in the two lowest bits.
static FOUND: AtomicU32 = AtomicU32::new(0);

/// The program has said something about its handlers.
pub(crate) fn note_change() {
    CHANGES.fetch_add(1, Ordering::SeqCst);
}

pub(crate) fn handlers() -> Handlers {
    let (changes, found) = (CHANGES.load(Ordering::SeqCst) << 2, FOUND.load(Ordering::SeqCst));
    if found & !3 == changes {
        return match found & 3 {
            0 => Handlers::Restart,
            1 => Handlers::Interrupt,
            _ => Handlers::Mixed,
        };
    }
    let (mut restarts, mut interrupts) = (false, false);
    for signal in 1..=libc::SIGRTMAX() {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: changes nothing, and writes there.
        let is_known = unsafe { real::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } == 0;
        // SAFETY: zeroed is a valid value, too.
        let action = unsafe { action.assume_init() };
        if is_known && !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
            let goes_on = action.sa_flags & libc::SA_RESTART != 0;
            restarts |= goes_on;
            interrupts |= !goes_on;
        }
    }
    let found = match (restarts, interrupts) {
        (_, false) => Handlers::Restart,
        (false, true) => Handlers::Interrupt,
        (true, true) => Handlers::Mixed,
    };
    FOUND.store(changes | found as u32, Ordering::SeqCst);
    found
}

/// Signals that a kernel of Linux has.
const SIGNALS: usize = 64;

/// The program's handlers by signal: the function, and above its address those of its flags that the kernel is not told.
static PROGRAMS: [AtomicU64; SIGNALS + 1] = [const { AtomicU64::new(0) }; SIGNALS + 1];

/// In [`PROGRAMS`].
const WITH_INFO: u64 = 1 << 63;
/// In [`PROGRAMS`].
const ONCE: u64 = 1 << 62;

/// Signals that a thread's own instruction causes. Neither these nor those of the C library (32, 33) are postponed.
const FAULTS: [c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
const NEVER_BLOCKED: u64 = {
    let (mut set, mut at) = (0b11 << 31, 0);
    while at < FAULTS.len() {
        set |= 1 << (FAULTS[at] - 1);
        at += 1;
    }
    set
};

fn place(signal: c_int) -> Option<&'static AtomicU64> {
    PROGRAMS.get(usize::try_from(signal).ok().filter(|signal| *signal > 0)?)
}

fn pack(action: &Action) -> u64 {
    let flag = |is: c_int, bit| if action.sa_flags & is != 0 { bit } else { 0 };
    action.sa_sigaction as u64 | flag(libc::SA_SIGINFO, WITH_INFO) | flag(libc::SA_RESETHAND, ONCE)
}

fn function(packed: u64) -> usize {
    (packed & !(WITH_INFO | ONCE)) as usize
}

fn is_function(handler: usize) -> bool {
    !matches!(handler, libc::SIG_DFL | libc::SIG_IGN | libc::SIG_ERR)
}

fn own() -> usize {
    dispatch as *const () as usize
}

/// The action that is installed in place of the program's.
fn replaced(action: &Action) -> Action {
    let flags = (action.sa_flags | libc::SA_SIGINFO) & !libc::SA_RESETHAND;
    Action { sa_sigaction: own(), sa_flags: flags, ..*action }
}

/// Replaces an action of the library's by the program's own (`packed`).
fn restored(action: &mut Action, packed: u64) {
    if action.sa_sigaction == own() {
        let flag = |bit, is: c_int| if packed & bit != 0 { is } else { 0 };
        action.sa_sigaction = function(packed);
        action.sa_flags &= !libc::SA_SIGINFO;
        action.sa_flags |= flag(WITH_INFO, libc::SA_SIGINFO) | flag(ONCE, libc::SA_RESETHAND);
    }
}

/// `sigaction`.
///
/// # Safety
/// As the C function.
pub(crate) unsafe fn set_action(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    let Some(place) = place(signal) else {
        // SAFETY: the caller's promise.
        return unsafe { real::sigaction(signal, new, old) };
    };
    let before = place.load(Ordering::SeqCst);
    // SAFETY: the caller's promise.
    let new = unsafe { new.as_ref() }.map(|new| match is_function(new.sa_sigaction) {
        // Before the kernel calls it.
        true => {
            place.store(pack(new), Ordering::SeqCst);
            replaced(new)
        }
        false => *new,
    });
    let new = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the caller's promise; `new` outlives the call.
    let result = unsafe { real::sigaction(signal, new, old) };
    if result != 0 {
        place.store(before, Ordering::SeqCst);
    // SAFETY: the caller's promise.
    } else if let Some(old) = unsafe { old.as_mut() } {
        restored(old, before);
    }
    result
}

/// Stands before a handler that a function of the C library has set by itself.
pub(crate) fn adopt(signal: c_int) {
    let Some(place) = place(signal) else { return };
    let mut action = MaybeUninit::<Action>::zeroed();
    // SAFETY: changes nothing, and writes there.
    let is_known = unsafe { real::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } == 0;
    // SAFETY: zeroed is a valid value, too.
    let action = unsafe { action.assume_init() };
    if is_known && is_function(action.sa_sigaction) && action.sa_sigaction != own() {
        place.store(pack(&action), Ordering::SeqCst);
        let replaced = replaced(&action);
        // SAFETY: an action that outlives the call.
        unsafe { real::sigaction(signal, &raw const replaced, std::ptr::null_mut()) };
    }
}

/// The program's handler of a signal before a function of the C library sets another one, for [`translate`].
pub(crate) fn handler(signal: c_int) -> u64 {
    place(signal).map_or(0, |place| place.load(Ordering::SeqCst))
}

/// Translates the previous handler that such a function returns.
pub(crate) fn translate(told: *mut c_void, before: u64) -> *mut c_void {
    if told.addr() == own() { function(before) as *mut c_void } else { told }
}

/// Adopts the handlers of libraries that were loaded before.
pub(crate) fn start() {
    for signal in 1..=SIGNALS as c_int {
        adopt(signal);
    }
}

/// The handler that is installed in place of the program's.
unsafe extern "C" fn dispatch(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(place) = place(signal) else { return };
    // SAFETY: the kernel's arguments.
    let is_fault = FAULTS.contains(&signal) && unsafe { (*info).si_code } > 0;
    if lock::is_inside() && !is_fault {
        // SAFETY: the kernel's arguments.
        return unsafe { postpone(signal, info, context.cast()) };
    }
    let packed = place.load(Ordering::SeqCst);
    if !is_function(function(packed)) {
        return;
    }
    if packed & ONCE != 0 {
        // SAFETY: zero is the default action without flags.
        let default: Action = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: an action that outlives the call.
        unsafe { real::sigaction(signal, &raw const default, std::ptr::null_mut()) };
        note_change();
    }
    // SAFETY: the program has set it for this; one that takes a number alone takes no notice of the others.
    let function: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
        unsafe { std::mem::transmute(function(packed)) };
    lock::note_handler();
    // SAFETY: as above.
    unsafe { function(signal, info, context) };
}

/// Has a signal come again when this thread holds no lock.
///
/// # Safety
/// The arguments are the kernel's, of a handler.
unsafe fn postpone(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t) {
    let error = crate::data::errno();
    block_all();
    // When this returns, the kernel blocks the signals of its own set, which is shorter than the C library's.
    // SAFETY: the kernel's structure has at least these bytes for the set.
    let blocked = unsafe { (&raw mut (*context).uc_sigmask).cast::<u64>() };
    // SAFETY: as above.
    unsafe {
        lock::postpone(blocked.read());
        blocked.write(!NEVER_BLOCKED);
    }
    // SAFETY: without preconditions.
    let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
    let call = |number, argument: i64| {
        // SAFETY: the kernel reads the information, which outlives the call, or nothing.
        unsafe { real::syscall(number, process.into(), thread.into(), signal.into(), argument, 0, 0) }
    };
    // Without its information, if there are too many that wait.
    if call(libc::SYS_rt_tgsigqueueinfo, info as i64) < 0 {
        call(libc::SYS_tgkill, 0);
    }
    crate::data::fail(error);
}

/// Blocks these signals and no others. Returns those that were blocked before.
fn set_blocked(signals: u64) -> libc::sigset_t {
    // SAFETY: integers throughout.
    let (mut set, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: the set is longer.
    unsafe {
        (&raw mut set).cast::<u64>().write(signals);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, &raw mut before);
    }
    before
}

/// Blocks all signals but faults on this thread. Returns those that were blocked before.
pub(crate) fn block_all() -> libc::sigset_t {
    set_blocked(!NEVER_BLOCKED)
}

/// Blocks these signals and no others.
pub(crate) fn restore(blocked: &libc::sigset_t) {
    // SAFETY: a set that outlives the call.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, blocked, std::ptr::null_mut()) };
}

/// The thread holds no lock any more: signals that were postponed come now.
pub(crate) fn unblock(blocked: u64) {
    set_blocked(blocked);
}
