//! How much of a file is in the page cache.

use std::fs::File;
use std::os::fd::AsRawFd;

#[repr(C)]
struct Range {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes of a range whose pages are cached, whole pages counted; `None` if the kernel (before 6.5) cannot say.
pub fn cached(file: &File, offset: u64, len: u64) -> Option<u64> {
    const SYS_CACHESTAT: libc::c_long = 451;
    const PAGE: u64 = 4096;
    let range = Range { offset, len };
    let mut stat = Stat::default();
    // SAFETY: both structures have the kernel's layout and outlive the call.
    let rc = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0) };
    (rc == 0).then_some(stat.cached * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_written_is_cached() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 65536], 0).unwrap();
        assert!(cached(&file, 0, 65536).is_none_or(|bytes| bytes == 65536));
    }
}
