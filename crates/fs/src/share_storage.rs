//! Files that share storage (`ioctl_ficlonerange(2)`): a copy that moves no data, where the file system can do it.

#![allow(unsafe_code, reason = "rustix clones whole files only")]

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, opcode};
use std::os::fd::{AsFd, AsRawFd};

/// `struct file_clone_range`
#[repr(C)]
struct Range {
    from_fd: i64,
    from: u64,
    len: u64,
    to: u64,
}

const FICLONERANGE: Opcode = opcode::write::<Range>(0x94, 13);

/// Has a range of `to` share the storage of one of `from`; both ends are to be at blocks of the file system, or at the end of `from`.
///
/// # Errors
/// `EOPNOTSUPP` or `EXDEV` if the file system cannot, `EINVAL` for ranges that it cannot share.
pub fn share_range(from: impl AsFd, from_at: u64, to: impl AsFd, to_at: u64, len: u64) -> Result<(), Errno> {
    let range = Range { from_fd: from.as_fd().as_raw_fd().into(), from: from_at, len, to: to_at };
    // SAFETY: the kernel reads a structure of this form from the pointer that it gets, and keeps nothing.
    let done = unsafe { rustix::ioctl::ioctl(to, Setter::<FICLONERANGE, Range>::new(range)) };
    match done {
        // What the kernel answers for requests that the file system does not know.
        Err(Errno::NOTTY) => Err(Errno::OPNOTSUPP),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_is_shared_or_it_is_said_why_not() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        std::os::unix::fs::FileExt::write_all_at(&from, &[7; 8192], 0).unwrap();
        match share_range(&from, 4096, &to, 0, 4096) {
            Ok(()) => {
                let mut back = [0; 4096];
                std::os::unix::fs::FileExt::read_exact_at(&to, &mut back, 0).unwrap();
                assert_eq!(back, [7; 4096]);
            }
            Err(error) => assert_eq!(error, Errno::OPNOTSUPP),
        }
    }
}
