//! Reads back what an earlier attempt wrote, from the medium and not from the page cache.

use super::journal::{Journal, Key, Range, Unfinished, join};
use rustix::fs::{Advice, Mode, OFlags};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use thruway_engine::digest::Algorithm;
use thruway_fs::Identity;
use thruway_fs::sparse;

/// What of the recorded ranges is there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    /// Those whose content is what was recorded, in order, joined.
    pub(crate) good: Vec<(u64, u64)>,
    /// That is all of them. If one is lost, what is zero where it was is no hole.
    pub(crate) complete: bool,
}

/// A file whose recorded ranges are to be checked.
pub(crate) struct Readback {
    file: File,
    verify: Algorithm,
}

impl Readback {
    /// Opens the file, writes out what of it is dirty, and drops it from the page cache: after a failed
    /// write-back the cache holds, clean, what the medium has not.
    ///
    /// # Errors
    /// If the file is not there, cannot be read, or cannot be synced. Then nothing recorded of it holds.
    pub(crate) fn open(dir: impl AsFd, name: &CStr, verify: Algorithm) -> io::Result<Readback> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?);
        file.sync_data()?;
        // Refused by file systems without a cache to drop.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::Sequential);
        Ok(Readback { file, verify })
    }

    /// Which file it is that is read.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub(crate) fn identity(&self) -> io::Result<Identity> {
        Identity::of(&self.file, c"").map(|(identity, _)| identity)
    }

    /// Compares the recorded ranges with what is there. Ends early when `go_on` says no.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub(crate) fn check(
        &self,
        journal: &Journal,
        key: &Key,
        of: &Unfinished,
        go_on: impl Fn() -> bool,
    ) -> io::Result<Checked> {
        let mut complete = self.verify != Algorithm::None;
        let mut buffer = Vec::new();
        let mut good = Vec::new();
        journal.ranges(key, of, |range| {
            if go_on() && self.holds(&range, &mut buffer) {
                good.push((range.offset, u64::from(range.len)));
                // A long file's ranges are joined now and then, so that memory follows the gaps, not the size.
                if good.len().is_power_of_two() && good.len() >= 1024 {
                    good = join(std::mem::take(&mut good));
                }
            } else {
                complete = false;
            }
        })?;
        Ok(Checked { good: join(good), complete })
    }

    fn holds(&self, range: &Range, buffer: &mut Vec<u8>) -> bool {
        let Some(_) = range.offset.checked_add(range.len.into()).filter(|end| *end <= i64::MAX as u64) else {
            return false;
        };
        buffer.resize(range.len as usize, 0);
        self.verify != Algorithm::None
            && self.file.read_exact_at(buffer, range.offset).is_ok()
            && self.verify.digest(buffer) == range.digest
    }

    /// Whether the file has data nowhere but in these ranges, which are in order and apart.
    pub(crate) fn is_hole_outside(&self, ranges: &[(u64, u64)], size: u64) -> bool {
        let gaps = crate::protocol::extents::subtract_extents(vec![(0, size)], ranges);
        gaps.into_iter().all(|(from, to)| self.is_zero(from, to))
    }

    fn is_zero(&self, mut at: u64, end: u64) -> bool {
        let mut buffer = vec![0; 64 << 10];
        while at < end {
            match sparse::next_data(&self.file, at, end) {
                Ok(Some(data)) => at = data.start,
                Ok(None) => return true,
                Err(_) => return false,
            }
            let len = ((end - at) as usize).min(buffer.len());
            if self.file.read_exact_at(&mut buffer[..len], at).is_err() || buffer[..len].iter().any(|b| *b != 0) {
                return false;
            }
            at += len as u64;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::journal::{ResumeDecision, Version, key_of};
    use std::sync::Arc;

    /// What somebody has put there meanwhile is no file of ours, and nothing waits for it.
    #[test]
    fn links_and_pipes_are_not_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let fd = File::open(dir.path()).unwrap();
        std::fs::write(dir.path().join("file"), "data").unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
        rustix::fs::mknodat(&fd, c"pipe", rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        for (name, is_ours) in [(c"file", true), (c"link", false), (c"pipe", false), (c"nothing", false)] {
            assert_eq!(Readback::open(&fd, name, Algorithm::Xxh3).is_ok(), is_ours, "{name:?}");
        }
    }

    #[test]
    fn only_what_is_still_there_is_believed() {
        let dir = tempfile::tempdir().unwrap();
        let fd = Arc::new(File::open(dir.path()).unwrap().into());
        let (journal, _) = Journal::open(&fd, &[1; 16]).unwrap();
        let file = File::create(dir.path().join("temp")).unwrap();
        let (key, verify) = (key_of(b"f"), Algorithm::Xxh3);
        let version = Version { size: 3 << 20, mtime: (1, 2), ctime: (3, 4) };
        let (identity, _) = Identity::of(&file, c"").unwrap();
        file.set_len(version.size).unwrap();
        journal.begun(&key, &version, identity);
        for (offset, byte) in [(0, 1), (1 << 20, 2)] {
            let content = vec![byte; 1 << 20];
            file.write_all_at(&content, offset).unwrap();
            let range = Range { offset, len: 1 << 20, digest: verify.digest(&content) };
            journal.range(&key, &version, identity, &range);
        }
        drop(journal);
        let (journal, earlier) = Journal::open(&fd, &[1; 16]).unwrap();
        let found = earlier.judge((&key, &version), None, false, || Some(identity));
        let ResumeDecision::CheckTemporary(unfinished) = found else { panic!("{found:?}") };
        let good = |verify| {
            let readback = Readback::open(&*fd, c"temp", verify).unwrap();
            readback.check(&journal, &key, &unfinished, || true).unwrap().good
        };
        assert_eq!(good(verify), vec![(0, 2 << 20)]);
        let readback = Readback::open(&*fd, c"temp", verify).unwrap();
        assert!(readback.is_hole_outside(&good(verify), version.size) && !readback.is_hole_outside(&[], version.size));
        let all = |verify| {
            let readback = Readback::open(&*fd, c"temp", verify).unwrap();
            readback.check(&journal, &key, &unfinished, || true).unwrap().complete
        };
        assert!(all(verify) && !all(Algorithm::None));
        // Lost by the disk: zeroes, as in a hole.
        file.write_all_at(&vec![0; 1 << 20], 0).unwrap();
        assert!(!all(verify));
        file.write_all_at(&vec![1; 1 << 20], 0).unwrap();
        assert!(all(verify));
        file.write_all_at(b"x", 5).unwrap();
        assert_eq!(good(verify), vec![(1 << 20, 1 << 20)]);
        file.set_len(1 << 20).unwrap();
        assert_eq!(good(verify), vec![]);
        assert_eq!(good(Algorithm::None), vec![], "nothing to check it with");
        assert!(Readback::open(&*fd, c"absent", verify).is_err());
    }
}
