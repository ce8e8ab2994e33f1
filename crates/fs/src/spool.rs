//! A buffer for appended bytes. A large one is in an unnamed file.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use thruway_engine::Owner;
use thruway_engine::quota::{Quota, Unit};

/// Largest spool in memory, in bytes.
const IN_MEMORY: u64 = 1 << 20;
/// Largest spool in the directory for temporary files, in bytes.
const ELSEWHERE_MAX: u64 = 256 << 20;
/// Bytes of one unit of [`ELSEWHERE`].
const UNIT: u64 = 1 << 20;

/// Total limit for the spools of this process there.
static ELSEWHERE: LazyLock<Arc<Quota>> = LazyLock::new(|| Quota::new(1 << 10));

/// Appended bytes.
pub struct Spool {
    bytes: Bytes,
    len: u64,
    /// Directory for the file. `None`: the directory for temporary files.
    place: Option<Arc<OwnedFd>>,
    owner: Owner,
    /// Units of [`ELSEWHERE`].
    reserved: Vec<Unit>,
}

enum Bytes {
    Memory(Vec<u8>),
    File(File),
}

impl Spool {
    /// Creates an empty spool. Its file is created in `place` if possible, and otherwise in the directory for temporary files,
    /// where `owner` has a quota.
    pub fn new(place: Option<Arc<OwnedFd>>, owner: Owner) -> Spool {
        Spool { bytes: Bytes::Memory(Vec::new()), len: 0, place, owner, reserved: Vec::new() }
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if it uses a file.
    pub fn is_file(&self) -> bool {
        matches!(self.bytes, Bytes::File(_))
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// If writing fails, or a limit on temporary files is reached.
    pub fn append(&mut self, more: &[u8]) -> io::Result<()> {
        let len = self.len + more.len() as u64;
        let file = if !self.is_file() && len > IN_MEMORY { Some(self.file()?) } else { None };
        if self.place.is_none() && (self.is_file() || file.is_some()) {
            self.reserve(len)?;
        }
        if let (Some(file), Bytes::Memory(bytes)) = (file, &self.bytes) {
            file.write_all_at(bytes, 0)?;
            self.bytes = Bytes::File(file);
        }
        match &mut self.bytes {
            Bytes::Memory(bytes) => bytes.extend_from_slice(more),
            Bytes::File(file) => file.write_all_at(more, self.len)?,
        }
        self.len = len;
        Ok(())
    }

    /// Shortens it to `len` bytes.
    pub fn truncate(&mut self, len: u64) {
        self.len = self.len.min(len);
        if let Bytes::Memory(bytes) = &mut self.bytes {
            bytes.truncate(len as usize);
        }
    }

    /// Returns a reader that begins at a position.
    pub fn reader(&self, at: u64) -> Reader<'_> {
        Reader { spool: self, at }
    }

    /// Reserves space for `len` bytes in the directory for temporary files. The reservation remains when the spool is shortened.
    fn reserve(&mut self, len: u64) -> io::Result<()> {
        while self.reserved.len() as u64 * UNIT < len {
            let unit = (len <= ELSEWHERE_MAX).then(|| ELSEWHERE.take(self.owner, Duration::ZERO)).flatten();
            let Some(unit) = unit else {
                return Err(io::Error::other("the tree has too many entries for the directory for temporary files"));
            };
            self.reserved.push(unit);
        }
        Ok(())
    }

    /// Creates an unnamed file.
    fn file(&mut self) -> io::Result<File> {
        if let Some(place) = &self.place {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            if let Ok(fd) = rustix::fs::openat(place, c".", flags, Mode::from_raw_mode(0o600)) {
                return Ok(File::from(fd));
            }
            // Not all file systems have `O_TMPFILE`.
            let digits = u128::from_ne_bytes(thruway_engine::random::random());
            let name = std::ffi::CString::new(format!(".spool.tw-{digits:032x}"))?;
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::RDWR | OFlags::CLOEXEC;
            if let Ok(fd) = rustix::fs::openat(place, &name, flags, Mode::from_raw_mode(0o600)) {
                rustix::fs::unlinkat(place, &name, rustix::fs::AtFlags::empty())?;
                return Ok(File::from(fd));
            }
        }
        self.place = None;
        tempfile::tempfile()
    }
}

/// Reads a [`Spool`].
pub struct Reader<'a> {
    spool: &'a Spool,
    at: u64,
}

impl Read for Reader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.spool.len.saturating_sub(self.at)).unwrap_or(usize::MAX).min(into.len());
        let into = &mut into[..most];
        let read = match &self.spool.bytes {
            Bytes::Memory(bytes) => {
                let from = (self.at as usize).min(bytes.len());
                (&bytes[from..]).read(into)?
            }
            Bytes::File(file) => file.read_at(into, self.at)?,
        };
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The total limit applies to all tests of this process.
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn bytes_come_back_from_memory_and_from_files() {
        let _turn = TURN.lock().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let place: Arc<OwnedFd> = Arc::new(File::open(dir.path()).unwrap().into());
        for place in [None, Some(place)] {
            let mut spool = Spool::new(place, Owner(1));
            let line = |number: u32| format!("{number:0100}").into_bytes();
            for number in 0..20_000 {
                spool.append(&line(number)).unwrap();
            }
            assert!(spool.is_file());
            for number in [0, 1, 10_000, 19_999] {
                let mut found = vec![0; 100];
                spool.reader(u64::from(number) * 100).read_exact(&mut found).unwrap();
                assert_eq!(found, line(number));
            }
            spool.truncate(1_000_000);
            spool.append(b"end").unwrap();
            let mut found = Vec::new();
            spool.reader(999_950).read_to_end(&mut found).unwrap();
            assert_eq!(found, [&line(9_999)[50..], b"end"].concat());
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn temporary_files_are_limited() {
        let _turn = TURN.lock().unwrap();
        let chunk = vec![0; 16 << 20];
        let fill = |owner| {
            let mut spools = Vec::new();
            let all: u64 = std::iter::from_fn(|| {
                let mut spool = Spool::new(None, Owner(owner));
                while spool.append(&chunk).is_ok() {}
                let len = spool.len();
                // It cannot grow any more.
                assert!((0..3).all(|_| spool.append(&chunk).is_err()));
                spools.push(spool);
                (len > 0).then_some(len)
            })
            .inspect(|len| assert!(*len <= ELSEWHERE_MAX))
            .sum();
            (spools, all >> 20)
        };
        let (first, of_first) = fill(1);
        assert!((860..=911).contains(&of_first), "{of_first}");
        // One owner leaves space to others.
        let (second, of_second) = fill(2);
        assert!((64..=of_first / 4).contains(&of_second), "{of_second}");
        drop((first, second));
        Spool::new(None, Owner(1)).append(&chunk).unwrap();
    }
}
