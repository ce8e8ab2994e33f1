//! An open file or block device, and what is known of it.

use super::write_throttle;
use crate::file_system;
use crate::segment::Segment;
use rustix::fs::{FileType, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// An open file or block device, and what is known of it.
pub struct OpenFile {
    file: File,
    direct: AtomicBool,
    is_device: bool,
    uring_is_sound: bool,
    is_of_this_host: bool,
    /// The file is in memory: nothing ever waits.
    is_in_memory: bool,
    /// Writes through the page cache cannot be asked not to wait, but only wait while too much is dirty.
    uses_write_throttle: bool,
    /// `RWF_NOWAIT` has not been refused yet.
    reads_at_once: AtomicBool,
    writes_at_once: AtomicBool,
}

impl OpenFile {
    /// Finds out what there is to be known. Asks the file's server if it has one.
    pub fn new(file: File) -> OpenFile {
        let is_device =
            rustix::fs::fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice);
        let direct = rustix::fs::fcntl_getfl(&file).is_ok_and(|flags| flags.contains(OFlags::DIRECT));
        // Of a device it would be asked where its node is, which says nothing of the device.
        let kind = if is_device { 0 } else { rustix::fs::fstatfs(&file).map_or(0, |fs| fs.f_type) };
        let uses_write_throttle = kind == libc::EXT4_SUPER_MAGIC;
        OpenFile {
            direct: AtomicBool::new(direct),
            is_device,
            uring_is_sound: is_device || file_system::uring_is_sound(&file),
            is_of_this_host: is_device || file_system::is_of_this_host(&file),
            is_in_memory: kind == libc::TMPFS_MAGIC,
            uses_write_throttle,
            reads_at_once: AtomicBool::new(true),
            writes_at_once: AtomicBool::new(!uses_write_throttle),
            file,
        }
    }

    /// The file.
    pub fn std(&self) -> &File {
        &self.file
    }

    /// It is a block device.
    pub fn is_device(&self) -> bool {
        self.is_device
    }

    /// It is in memory (tmpfs).
    pub fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    /// Whether io_uring can be trusted with it ([`file_system::uring_is_sound`]).
    pub fn uring_is_sound(&self) -> bool {
        self.uring_is_sound
    }

    /// Whether what is known of it is known without asking a server ([`file_system::is_of_this_host`]).
    pub fn is_of_this_host(&self) -> bool {
        self.is_of_this_host
    }

    /// It is open for direct I/O; offsets, lengths and addresses are then the caller's to align.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Turns direct I/O on or off. False where the file system refuses.
    pub fn set_direct(&self, direct: bool) -> bool {
        let Ok(flags) = rustix::fs::fcntl_getfl(&self.file) else { return false };
        let mut wanted = flags;
        wanted.set(OFlags::DIRECT, direct);
        let done = wanted == flags || rustix::fs::fcntl_setfl(&self.file, wanted).is_ok();
        if done {
            self.direct.store(direct, Ordering::Relaxed);
        }
        done
    }

    /// Fills all of the segment from cached pages, if that need not wait. True if it is done; if not, any part of it may have been.
    pub fn try_read(&self, offset: u64, segment: &mut Segment) -> bool {
        if offset > i64::MAX as u64 {
            return false;
        }
        let len = segment.len();
        let buffers = &mut [io::IoSliceMut::new(segment.as_mut_slice())];
        self.at_once(&self.reads_at_once, |flags| rustix::io::preadv2(&self.file, buffers, offset, flags)) == Some(len)
    }

    /// As [`OpenFile::try_read`], if the file does not end behind it, either.
    pub fn try_read_before_end(&self, offset: u64, segment: &mut Segment) -> bool {
        let (len, mut next) = (segment.len(), [0]);
        let buffers = &mut [io::IoSliceMut::new(segment.as_mut_slice()), io::IoSliceMut::new(&mut next)];
        // To the kernel, the last of all offsets is where it has read last.
        if offset > i64::MAX as u64 {
            return false;
        }
        let read = self.at_once(&self.reads_at_once, |flags| rustix::io::preadv2(&self.file, buffers, offset, flags));
        read == Some(len + 1)
    }

    /// Writes all of the segment to cached pages, if that need not wait. True if it is done; if not, any part of it may have been.
    pub fn try_write(&self, offset: u64, segment: &Segment) -> bool {
        // To the kernel, the last of all offsets is where it has written last.
        if offset > i64::MAX as u64 {
            return false;
        }
        let buffers = &[io::IoSlice::new(segment.as_slice())];
        // Whole pages, so that nothing has to be read first.
        let whole = (offset | segment.len() as u64).is_multiple_of(4096);
        if self.uses_write_throttle && whole && write_throttle::has_room(segment.len()) {
            let written = rustix::io::pwritev2(&self.file, buffers, offset, ReadWriteFlags::empty());
            return written == Ok(segment.len());
        }
        let written =
            self.at_once(&self.writes_at_once, |flags| rustix::io::pwritev2(&self.file, buffers, offset, flags));
        written == Some(segment.len())
    }

    /// Whether the page of a byte is not only in the page cache but has been read.
    pub fn is_cached(&self, offset: u64) -> bool {
        let mut byte = [0];
        let read = self.at_once(&self.reads_at_once, |flags| {
            rustix::io::preadv2(&self.file, &mut [io::IoSliceMut::new(&mut byte)], offset, flags)
        });
        read == Some(1)
    }

    /// How much was done, if that need not wait.
    fn at_once(
        &self,
        offered: &AtomicBool,
        mut call: impl FnMut(ReadWriteFlags) -> rustix::io::Result<usize>,
    ) -> Option<usize> {
        if !offered.load(Ordering::Relaxed) {
            return None;
        }
        match call(if self.is_in_memory { ReadWriteFlags::empty() } else { ReadWriteFlags::NOWAIT }) {
            Ok(done) => Some(done),
            Err(Errno::OPNOTSUPP) => {
                offered.store(false, Ordering::Relaxed);
                None
            }
            // It would block, or fails: the slow path reports the error.
            Err(_) => None,
        }
    }

    /// `BLKDISCARD` of the whole sectors of a range. Where the device cannot, nothing is lost.
    pub(super) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        // linux/fs.h: _IO(0x12, 119)
        const BLKDISCARD: libc::c_ulong = 0x1277;
        const SECTOR: u64 = 512;
        let (from, to) = (offset.next_multiple_of(SECTOR), (offset + len) / SECTOR * SECTOR);
        if from >= to {
            return Ok(());
        }
        let range = [from, to - from];
        // SAFETY: the request takes two numbers at this address.
        let rc = unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            _ if rc == 0 => Ok(()),
            Some(libc::EOPNOTSUPP | libc::EINVAL) => Ok(()),
            _ => Err(error),
        }
    }
}

impl From<File> for OpenFile {
    fn from(file: File) -> OpenFile {
        OpenFile::new(file)
    }
}

impl Deref for OpenFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Segments;
    use std::io::{Seek, Write};

    #[test]
    fn the_end_of_a_file_is_not_passed_over() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        file.rewind().unwrap();
        let file = OpenFile::new(file);
        let supply = Segments::new(1, 8192).unwrap();
        let reader = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for (at, len, is_read) in
            [(0, 4096, true), (4, 4995, true), (0, 4999, true), (1, 4999, false), (0, 5000, false)]
        {
            let mut segment = reader.block_on(supply.reserve(1)).segment(len);
            segment.as_mut_slice().fill(0);
            assert_eq!(file.try_read_before_end(at, &mut segment), is_read, "{len} bytes from {at} on");
            assert!(!is_read || segment.as_slice().iter().all(|byte| *byte == 7));
        }
        for (at, len) in [(4999, 2), (5000, 1), (i64::MAX as u64, 1), (u64::MAX, 1)] {
            let mut segment = reader.block_on(supply.reserve(1)).segment(len);
            assert!(!file.try_read_before_end(at, &mut segment), "{len} bytes from {at} on");
        }
    }
}
