//! Names of the entries of a directory.
//!
//! `readdir(3)` and `rustix::fs::Dir` take the error `ENOENT` of `getdents64(2)` for the end of the directory. File systems
//! return that error for a directory that was removed or lost. This module reports it, because an incomplete list can lead to
//! the removal of files.

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::{Errno, Result};
use std::collections::VecDeque;
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

/// Bytes of entries read by one system call, as by `readdir(3)`.
pub(crate) const BUFFER_LEN: usize = 32 << 10;

/// Iterator over the names in a directory, without `.` and `..`. It ends after an error; the list is then incomplete.
pub struct Names {
    dir: OwnedFd,
    buffer: Vec<u8>,
    read: VecDeque<CString>,
    ended: bool,
}

/// Lists an open directory from its beginning, independent of the position of its descriptor.
///
/// # Errors
/// If the directory cannot be opened again for reading.
pub fn names(dir: impl AsFd) -> Result<Names> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(dir, c".", flags, Mode::empty())?;
    Ok(Names { dir, buffer: Vec::with_capacity(BUFFER_LEN), read: VecDeque::new(), ended: false })
}

/// Reads one buffer of names from the position of the descriptor, without `.` and `..`. Returns the position behind them; `None` at the
/// end of the directory.
pub(crate) fn read_some(
    dir: impl AsFd,
    buffer: &mut [MaybeUninit<u8>],
    mut each: impl FnMut(CString),
) -> Result<Option<u64>> {
    let mut entries = RawDir::new(dir, buffer);
    loop {
        match entries.next() {
            None => return Ok(None),
            Some(Err(Errno::INTR)) => {}
            Some(Err(e)) => return Err(e),
            Some(Ok(entry)) => {
                let position = entry.next_entry_cookie();
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    each(entry.file_name().into());
                }
                if entries.is_buffer_empty() {
                    return Ok(Some(position));
                }
            }
        }
    }
}

impl Names {
    /// Reads one buffer of entries.
    fn fill(&mut self) -> Result<()> {
        let read = read_some(&self.dir, self.buffer.spare_capacity_mut(), |name| self.read.push_back(name));
        self.ended = !matches!(read, Ok(Some(_)));
        read.map(drop)
    }
}

impl Iterator for Names {
    type Item = Result<CString>;

    fn next(&mut self) -> Option<Result<CString>> {
        while self.read.is_empty() && !self.ended {
            if let Err(e) = self.fill() {
                return Some(Err(e));
            }
        }
        self.read.pop_front().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;

    #[test]
    fn all_names_are_listed_from_the_beginning_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let expected: BTreeSet<CString> = (0..3000).map(|n| CString::new(format!("entry-{n}")).unwrap()).collect();
        for name in &expected {
            fs::write(dir.path().join(name.to_str().unwrap()), "").unwrap();
        }
        let fd = fs::File::open(dir.path()).unwrap();
        for _ in 0..2 {
            let mut list = names(&fd).unwrap();
            let found: BTreeSet<CString> = list.by_ref().map(Result::unwrap).collect();
            assert_eq!(found, expected);
            assert!(list.next().is_none());
        }
    }

    #[test]
    fn a_directory_that_was_removed_has_no_complete_list() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d");
        fs::create_dir(&path).unwrap();
        let fd = fs::File::open(&path).unwrap();
        let mut list = names(&fd).unwrap();
        fs::remove_dir(&path).unwrap();
        assert_eq!(list.next(), Some(Err(Errno::NOENT)));
        assert_eq!(list.next(), None);
    }
}
