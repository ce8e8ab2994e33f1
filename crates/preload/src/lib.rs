//! The library that `thruway run` has the dynamic linker load into a program before all others. It stands before the C library's
//! functions for sockets and descriptors, and lets connections between processes of one host go on through shared memory.
//!
//! A descriptor stays what it is: a TCP socket of the kernel's. [`thruway_sockets`] says how bytes go, `switch` when, `data` what
//! calls do then, `wait` and `epoll` how readiness in memory and in the kernel becomes one, `process` what fork, exec and exit do.
//! Hooks are in `hooks`. They must work in signal handlers and children of `vfork`, and before and after everything else.

mod allowance;
mod data;
mod epoll;
mod experience;
mod hooks;
mod lock;
mod peers;
mod process;
mod real;
mod recheck;
mod relay;
mod relayed;
mod report;
mod room;
mod signals;
mod slots;
mod spares;
mod switch;
mod tcp;
mod uring;
mod wait;
mod waker;

use std::sync::OnceLock;
use thruway_sockets::settings::{Settings, VARIABLE};

/// There are none if the library does nothing.
pub(crate) static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Called by the dynamic linker before the program begins.
extern "C" fn begin() {
    let Some(text) = std::env::var_os(VARIABLE) else { return };
    let settings = match Settings::parse(&text.to_string_lossy()) {
        Ok(settings) => settings,
        Err(part) => {
            return report::complain(&[VARIABLE, " has ", &part, ", which is not understood; nothing is accelerated"]);
        }
    };
    process::end_with(settings.supervisor);
    if slots::start() && SETTINGS.set(settings).is_ok() {
        let files = SETTINGS.get().map(|settings| (settings.stats.as_ref(), settings.explain.as_ref()));
        let (stats, log) = files.unwrap_or_default();
        report::start(stats, log);
        signals::start();
        process::watch_forks();
        process::note_user();
        peers::start();
        relay::start(SETTINGS.get().map_or(0, |settings| settings.relay));
        report::count(&report::counters().processes, 1);
    }
}

extern "C" fn end() {
    process::at_exit();
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
