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

/// Whether all of a range, which begins at a page, can be read without waiting for storage: it is cached, and has been read. Pages that
/// are still being read count as [`cached`]; whoever takes them waits for that.
///
/// Only for files that belong to this process's user, or that it may write to: of others the kernel says nothing, as if all were there.
pub fn is_read(file: &File, offset: u64, len: usize) -> bool {
    const PAGE: usize = 4096;
    /// Pages that are asked for at a time.
    const AT_ONCE: usize = 256;
    use rustix::mm::{MapFlags, ProtFlags};
    if len == 0 || !offset.is_multiple_of(PAGE as u64) {
        return false;
    }
    // SAFETY: a fresh mapping at an address of the kernel's choice, which nothing reads or writes.
    let mapped =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::SHARED, file, offset) };
    let Ok(start) = mapped else { return false };
    let mut pages = [0u8; AT_ONCE];
    let all = (0..len.div_ceil(PAGE)).step_by(AT_ONCE).all(|first| {
        let count = (len.div_ceil(PAGE) - first).min(AT_ONCE);
        // SAFETY: inside the mapping; the vector has a byte for each page.
        let rc = unsafe { libc::mincore(start.wrapping_byte_add(first * PAGE), count * PAGE, pages.as_mut_ptr()) };
        rc == 0 && pages[..count].iter().all(|page| page & 1 == 1)
    });
    // SAFETY: the mapping is ours and nothing refers to it.
    unsafe { rustix::mm::munmap(start, len) }.expect("unmapping our own mapping");
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_not_read() {
        use std::os::unix::fs::FileExt;
        // On storage.
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let len = 3 << 20;
        file.write_all_at(&vec![1; len], 0).unwrap();
        assert!(is_read(&file, 0, len) && is_read(&file, 4096, len - 5000));
        assert!(!is_read(&file, 0, len + 4097), "beyond its end");
        assert!(!is_read(&file, 1, 4096) && !is_read(&file, 0, 0));
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert!(!is_read(&file, 0, len));
        file.read_exact_at(&mut [0; 4096], 1 << 20).unwrap();
        assert!(is_read(&file, 1 << 20, 4096) && !is_read(&file, 0, len));
    }

    #[test]
    fn what_was_just_written_is_cached() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 65536], 0).unwrap();
        assert!(cached(&file, 0, 65536).is_none_or(|bytes| bytes == 65536));
    }
}
