//! What the system lets one process have.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::atomic::{AtomicU64, Ordering};

/// Listeners of this process, each of one protocol.
static LISTENERS: AtomicU64 = AtomicU64::new(1);

/// Divisor of the limit on open files: a quarter is for connections, the rest for files and pipes.
const CONNECTIONS: u64 = 4;

/// Raises the number of files this process may have open to the most it is allowed: a server has
/// several for every session. Best effort.
pub fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, ?maximum, "raising the number of open files");
    }
}

/// How many files this process may have open.
pub fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)
}

/// Bytes of address space that this process may still map (`ulimit -v`); `None` without a limit.
pub fn address_space_left() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let kib: u64 = size.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(limit.saturating_sub(kib << 10))
}

/// Under a limit on the address space, makes all threads share one heap. Otherwise the C library reserves 64 MiB for each of several
/// threads. To be called before the first thread starts.
pub fn share_heap_under_limit() {
    #[cfg(target_env = "gnu")]
    if getrlimit(Resource::As).current.is_some() {
        // SAFETY: changes a parameter of the allocator, and no memory.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// The error of a thread that cannot be started, with its remedy.
pub fn thread_error(error: &std::io::Error) -> std::io::Error {
    let remedy = "raise the limit on processes and threads (ulimit -u) or on memory (ulimit -v)";
    std::io::Error::new(error.kind(), format!("cannot start a thread: {error}; {remedy}"))
}

/// Remedy for an error caused by a resource limit, to be appended to the error message. Recognises the error by its number in the text.
pub fn remedy(error: &str) -> Option<&'static str> {
    // The message has its remedy.
    if error.contains("(ulimit ") {
        return None;
    }
    let remedies = [
        (libc::ENOMEM, "raise the limit on memory (ulimit -v), or set a smaller --depth or --block-size"),
        (libc::EMFILE, "raise the limit on open files (ulimit -n)"),
        (libc::ENFILE, "raise the system's limit on open files (sysctl fs.file-max)"),
        (libc::EFBIG, "raise the limit on the size of files (ulimit -f), or use a file system for larger ones"),
    ];
    // Without memory for its stack, or one process too many. Other calls return this error for other reasons.
    if error.contains("thread") && error.contains(&format!("(os error {})", libc::EAGAIN)) {
        return Some("raise the limit on processes (ulimit -u) or on memory (ulimit -v)");
    }
    let is_of = |code: i32| error.contains(&format!("(os error {code})"));
    remedies.into_iter().find(|(code, _)| is_of(*code)).map(|(_, remedy)| remedy)
}

/// One in so many of the files that this process may have open.
pub fn share_of_open_files(of: u64) -> usize {
    usize::try_from(open_files() / of).unwrap_or(usize::MAX)
}

/// Sets the number of listeners of this process, each of one protocol. The caller sets it before they start.
pub fn set_listeners(count: usize) {
    LISTENERS.store(count.max(1) as u64, Ordering::Relaxed);
}

/// Returns a fraction, `1 / of`, of the descriptors that one listener may use for connections, at least 1. All listeners together
/// may use a quarter of the limit on open files, so that descriptors remain for files.
pub fn share_of_listener(of: u64) -> usize {
    share_of_open_files(CONNECTIONS * LISTENERS.load(Ordering::Relaxed) * of).max(1)
}
