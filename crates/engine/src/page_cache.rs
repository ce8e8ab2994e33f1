//! How much of a file is in the page cache.

use rustix::io::ReadWriteFlags;
use std::fs::File;
use std::io::IoSliceMut;
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

/// Whether a range can be read without waiting for storage: it is cached, and has been read. Pages that are still being read count as
/// [`cached`], and who takes them waits for that.
///
/// One page in sixteen is looked at, and the last: what is read ahead comes in larger pieces. To look at each would cost as much as it
/// saves to take the pages of a range as they are.
pub fn is_read(file: &File, offset: u64, len: u64) -> bool {
    const STEP: u64 = 64 << 10;
    if len == 0 || cached(file, offset, len).is_none_or(|cached| cached < len) {
        return false;
    }
    let is_there = |at: u64| {
        let mut byte = [0];
        let buffers = &mut [IoSliceMut::new(&mut byte)];
        rustix::io::preadv2(file, buffers, at, ReadWriteFlags::NOWAIT).is_ok_and(|read| read == 1)
    };
    let last = offset + len - 1;
    (offset..last).step_by(STEP as usize).skip(1).all(is_there) && is_there(last)
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
        file.write_all_at(&vec![1; len as usize], 0).unwrap();
        // Before Linux 6.5 nothing is known.
        let can = cached(&file, 0, 1).is_some();
        assert_eq!(is_read(&file, 0, len) && is_read(&file, 1, len - 2) && is_read(&file, 5, 1), can);
        assert!(!is_read(&file, 0, len + 4097), "beyond its end");
        assert!(!is_read(&file, 0, 0));
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert!(!is_read(&file, 0, len));
        file.read_exact_at(&mut [0; 4096], 1 << 20).unwrap();
        assert_eq!(is_read(&file, 1 << 20, 4096), can);
        assert!(!is_read(&file, 0, len));
    }

    #[test]
    fn what_was_just_written_is_cached() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 65536], 0).unwrap();
        assert!(cached(&file, 0, 65536).is_none_or(|bytes| bytes == 65536));
    }
}
