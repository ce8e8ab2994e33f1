//! Files that other users can write to at the same time.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::AsFd;

/// Mappings begin at multiples of this, whatever the size of pages.
const ALIGNMENT: u64 = 64 << 10;

/// Writes to a memory file that other users can write to, through a mapping and by `process_vm_writev(2)`. `write(2)` waits for the lock of
/// the file, and another process can hold that lock without limit: it writes from memory of a file system that it serves itself (FUSE). A
/// store to the mapping would end this process with SIGBUS if another user had made the file shorter.
///
/// # Errors
/// `EFAULT` if the file ends before; those of `mmap(2)` and `process_vm_writev(2)`. Part of the bytes may have been written.
pub fn store(file: impl AsFd, bytes: &[u8], at: u64) -> io::Result<()> {
    let first = at / ALIGNMENT * ALIGNMENT;
    let before = (at - first) as usize;
    let len = before + bytes.len();
    // SAFETY: a new mapping at an address that the kernel chooses.
    let map = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::WRITE, MapFlags::SHARED, file, first) }?;
    let from = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let to = libc::iovec { iov_base: map.cast::<u8>().wrapping_add(before).cast(), iov_len: bytes.len() };
    let this = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: one element each. The kernel reads `bytes`, and writes to the new mapping only.
    let written = unsafe { libc::process_vm_writev(this, &raw const from, 1, &raw const to, 1, 0) };
    let error = io::Error::last_os_error();
    // SAFETY: the mapping made above, which nothing refers to.
    unsafe { rustix::mm::munmap(map, len) }?;
    match usize::try_from(written) {
        Ok(written) if written == bytes.len() => Ok(()),
        Ok(_) => Err(Errno::FAULT.into()),
        Err(_) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn bytes_are_written_up_to_the_last_page_of_a_file() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let page = ALIGNMENT;
        rustix::fs::ftruncate(&file, 3 * page).unwrap();
        for (at, bytes) in [(0, &b"begin"[..]), (page - 3, b"across"), (3 * page - 3, b"end")] {
            store(&file, bytes, at).unwrap();
            let mut read = vec![0; bytes.len()];
            rustix::io::pread(&file, &mut read, at).unwrap();
            assert_eq!(read, bytes);
        }
        // A file that is too short is an error, and not a signal.
        rustix::fs::ftruncate(&file, page).unwrap();
        for (at, bytes) in [(page, &b"behind"[..]), (page - 3, b"across"), (1 << 40, b"far")] {
            assert_eq!(store(&file, bytes, at).unwrap_err().raw_os_error(), Some(libc::EFAULT), "{at}");
        }
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_size as u64, page);
    }
}
