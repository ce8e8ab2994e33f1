//! The data and the holes of a file, as its file system tells them (`lseek(2)`, `SEEK_DATA` and `SEEK_HOLE`).

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

/// The first range from `at` on that may hold data, cut at `end`; `None` if there is a hole up to `end`, or the file ends. Where the
/// file system knows no holes, everything may hold data. Moves the position of the open file.
///
/// # Errors
/// If the file cannot be asked: "no data behind here" is told apart from every other answer.
pub fn next_data(file: impl AsFd, at: u64, end: u64) -> io::Result<Option<Range<u64>>> {
    if at >= end {
        return Ok(None);
    }
    let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
        // A FUSE server's answer is not checked by the kernel.
        Ok(start) => start.max(at),
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
        Err(e) => return Err(e.into()),
    };
    if start >= end {
        return Ok(None);
    }
    let stop = match rustix::fs::seek(&file, SeekFrom::Hole(start)) {
        Ok(stop) => stop.min(end),
        // NXIO: it is shorter by now, which its end will tell.
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NXIO) => end,
        Err(e) => return Err(e.into()),
    };
    // A hole was made meanwhile.
    Ok(Some(start..stop.max(start + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn holes_are_told_from_data() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"x", 0).unwrap();
        file.write_all_at(b"y", 10 << 20).unwrap();
        file.set_len(20 << 20).unwrap();
        let first = next_data(&file, 0, 20 << 20).unwrap().unwrap();
        assert!(first.start == 0 && first.end < 1 << 20, "{first:?}");
        let second = next_data(&file, first.end, 20 << 20).unwrap().unwrap();
        assert!(second.contains(&(10 << 20)) && second.end - second.start < 1 << 20, "{second:?}");
        assert_eq!(next_data(&file, second.end, 20 << 20).unwrap(), None);
        assert_eq!(next_data(&file, first.end, 5 << 20).unwrap(), None, "there is data later");
        assert_eq!(next_data(&file, 0, 1).unwrap(), Some(0..1));
        assert_eq!(next_data(&file, 30 << 20, 40 << 20).unwrap(), None, "behind the end");
        assert_eq!(next_data(&file, 7, 7).unwrap(), None);
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert!(next_data(&pipe, 0, 1).is_err());
    }
}
