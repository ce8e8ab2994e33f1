//! The board of a group: a file that is opened for each look. See [`super::Board`] for what each function does.
//!
//! The members of a group are different users, who need not trust each other further than to meet. Each of them can write anything there,
//! and make the file shorter at any moment, which would end a process that accesses it as memory. Each can also hold the lock that
//! `write(2)` takes. So entries are read by `pread(2)` and written through a mapping ([`thruway_memory::file::store`]). The file is opened
//! for each operation, because programs close descriptors that they do not know. A member can only keep others from finding each other.

use super::{ENTRIES, ENTRY_LEN, Key, Listing, Ticket, WAYS, WORDS, hash};
use rustix::fs::{FileType, Mode, OFlags, RenameFlags};
use rustix::rand::GetRandomFlags;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use thruway_memory::sealed;

/// Where to find the file, and whose it has to be.
#[derive(Debug)]
pub(super) struct File {
    path: CString,
    gid: u32,
}

/// An entry: these words, in this order, in the file.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// How often it has been written, in the high half, and a random number.
    version: u64,
    /// The version of the entry that was answered.
    answered: u64,
    /// The key, then the listing.
    words: [u64; WORDS],
    /// Of all but `answered`: two that write at once leave some of each.
    check: u64,
}

/// The place of [`Entry::answered`].
const ANSWERED: usize = 8;

/// Fails if a member has made the file shorter.
fn write(file: &OwnedFd, bytes: &[u8], at: u64) -> Option<()> {
    thruway_memory::file::store(file, bytes, at).ok()
}

fn random() -> Option<u32> {
    let mut bytes = [0; 4];
    let len = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty()).ok()?;
    (len == bytes.len()).then(|| u32::from_ne_bytes(bytes))
}

impl Entry {
    fn new(count: u64, words: [u64; WORDS]) -> Option<Entry> {
        let version = count << 32 | u64::from(random()?);
        Some(Entry { version, answered: 0, words, check: Entry::check(version, words) })
    }

    fn check(version: u64, words: [u64; WORDS]) -> u64 {
        hash([version].into_iter().chain(words))
    }

    /// Whether it was written whole.
    fn is_whole(&self) -> bool {
        self.check == Entry::check(self.version, self.words)
    }

    fn is_free(&self) -> bool {
        self.words == [0; WORDS] || !self.is_whole()
    }

    fn is_of(&self, key: Key) -> bool {
        self.is_whole() && self.words[..6] == key.words
    }

    fn count(&self) -> u64 {
        self.version >> 32
    }

    fn encode(&self) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        let words = [self.version, self.answered].into_iter().chain(self.words).chain([self.check]);
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; ENTRY_LEN]) -> Entry {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |at: usize| u64::from_ne_bytes(words[at]);
        Entry {
            version: word(0),
            answered: word(1),
            words: std::array::from_fn(|at| word(2 + at)),
            check: word(2 + WORDS),
        }
    }
}

fn place(entry: usize) -> u64 {
    assert!(entry < ENTRIES);
    (entry * ENTRY_LEN) as u64
}

/// What is missing, in a file that is too short, is as if it had never been written.
fn read(file: &OwnedFd, entry: usize, bytes: &mut [u8]) {
    bytes.fill(0);
    let mut done = 0;
    while let Ok(len @ 1..) = rustix::io::pread(file, &mut bytes[done..], place(entry) + done as u64) {
        done += len;
    }
}

fn read_entry(file: &OwnedFd, entry: usize) -> Entry {
    let mut bytes = [0; ENTRY_LEN];
    read(file, entry, &mut bytes);
    Entry::decode(&bytes)
}

fn write_entry(file: &OwnedFd, at: usize, entry: &Entry) -> Option<()> {
    write(file, &entry.encode(), place(at))
}

/// Those that a connection may be in.
fn read_bucket(file: &OwnedFd, bucket: usize) -> [Entry; WAYS] {
    let mut bytes = [0; WAYS * ENTRY_LEN];
    read(file, bucket, &mut bytes);
    let (entries, _) = bytes.as_chunks::<ENTRY_LEN>();
    std::array::from_fn(|at| Entry::decode(&entries[at]))
}

impl File {
    pub(super) fn open(path: PathBuf, gid: u32) -> io::Result<File> {
        sealed::may_be_long((ENTRIES * ENTRY_LEN) as u64).then_some(()).ok_or(io::ErrorKind::FileTooLarge)?;
        let path = CString::new(path.into_os_string().into_vec()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let file = File { path, gid };
        let opened = match file.opened() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                file.create()?;
                file.opened()?
            }
            other => other?,
        };
        // Its length cannot be changed without the lock of the file.
        match u64::try_from(rustix::fs::fstat(&opened)?.st_size) {
            Ok(len) if len >= (ENTRIES * ENTRY_LEN) as u64 => Ok(file),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Makes the file, under another name until its members may open it.
    fn create(&self) -> io::Result<()> {
        let unique = random().ok_or(io::ErrorKind::Unsupported)?;
        let name = [self.path.to_bytes(), format!(".{unique:08x}").as_bytes()].concat();
        let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(&*name, flags, Mode::RUSR | Mode::WUSR)?;
        let made = self.hand_over(&file, &name);
        if made.is_err() {
            let _ = rustix::fs::unlink(&*name);
        }
        made
    }

    fn hand_over(&self, file: &OwnedFd, name: &CStr) -> io::Result<()> {
        let group = Some(rustix::process::Gid::from_raw(self.gid));
        rustix::fs::ftruncate(file, (ENTRIES * ENTRY_LEN) as u64)?;
        rustix::fs::fchown(file, None, group)?;
        rustix::fs::fchmod(file, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP)?;
        let here = rustix::fs::CWD;
        match rustix::fs::renameat_with(here, name, here, &*self.path, RenameFlags::NOREPLACE) {
            // Another member was quicker.
            Err(rustix::io::Errno::EXIST) => Ok(rustix::fs::unlink(name)?),
            other => Ok(other?),
        }
    }

    /// Opens the file, if it is the group's alone: the user who has made it may have put another one there.
    fn opened(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(&*self.path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        // Another name would be that of a file for something else.
        if !is_file || stat.st_gid != self.gid || stat.st_mode & 0o007 != 0 || stat.st_nlink != 1 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(file)
    }

    pub(super) fn list(&self, key: Key, listing: Listing) -> Option<Ticket> {
        let file = self.opened().ok()?;
        let bucket = key.bucket();
        let entries = read_bucket(&file, bucket);
        let is = |wanted: &dyn Fn(&Entry) -> bool| entries.iter().position(wanted);
        // If none is free, the one that has been written least often.
        let oldest = || (0..WAYS).min_by_key(|at| entries[*at].count());
        let at = is(&|entry| entry.is_of(key)).or_else(|| is(&Entry::is_free)).or_else(oldest)?;
        let entry = Entry::new(entries[at].count().wrapping_add(1), listing.words(key))?;
        write_entry(&file, bucket + at, &entry)?;
        Some(Ticket { entry: bucket + at, version: entry.version })
    }

    pub(super) fn find(&self, key: Key) -> Option<(Ticket, Listing)> {
        let file = self.opened().ok()?;
        let bucket = key.bucket();
        let entries = read_bucket(&file, bucket);
        let at = entries.iter().position(|entry| entry.is_of(key))?;
        let Entry { version, words, .. } = entries[at];
        Some((Ticket { entry: bucket + at, version }, Listing::of(words)))
    }

    pub(super) fn answer(&self, ticket: Ticket) {
        if let Ok(file) = self.opened() {
            let at = place(ticket.entry) + ANSWERED as u64;
            let _ = write(&file, &ticket.version.to_ne_bytes(), at);
        }
    }

    pub(super) fn is_answered(&self, ticket: Ticket) -> Option<bool> {
        let entry = read_entry(&self.opened().ok()?, ticket.entry);
        (entry.is_whole() && entry.version == ticket.version).then_some(entry.answered == ticket.version)
    }

    pub(super) fn withdraw(&self, ticket: Ticket) {
        if let Ok(file) = self.opened()
            && let entry = read_entry(&file, ticket.entry)
            && entry.version == ticket.version
            && let Some(free) = Entry::new(entry.count(), [0; WORDS])
        {
            let _ = write_entry(&file, ticket.entry, &free);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board::Circle;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    fn key(port: u16) -> Key {
        Key::new(7, ([127, 0, 0, 1], 80).into(), ([127, 0, 0, 1], port).into())
    }

    fn board(directory: &Path) -> (File, std::fs::File) {
        let gid = rustix::process::getegid().as_raw();
        let board = File::open(directory.join(Circle::Group(gid).file_name()), gid).unwrap();
        let path = Path::new(std::str::from_utf8(board.path.to_bytes()).unwrap());
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o660);
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        (board, file)
    }

    #[test]
    fn a_file_that_a_member_makes_shorter_has_no_entries() {
        let directory = tempfile::tempdir().unwrap();
        let (board, file) = board(directory.path());
        let listing = Listing { service: 1, cookie: 2 };
        let ticket = board.list(key(5), listing).unwrap();
        let check = place(ticket.entry) + 8 * (2 + WORDS as u64);
        for len in [check, place(ticket.entry) + 3, 0] {
            file.set_len(len).unwrap();
            assert_eq!((board.find(key(5)), board.is_answered(ticket)), (None, None), "{len}");
            board.withdraw(ticket);
            board.answer(ticket);
        }
        assert_eq!(board.list(key(5), listing), None);
        let path = PathBuf::from(board.path.to_str().unwrap());
        assert_eq!(File::open(path, board.gid).unwrap_err().kind(), io::ErrorKind::InvalidData);
        file.set_len((ENTRIES * ENTRY_LEN) as u64).unwrap();
        let again = board.list(key(5), listing).unwrap();
        assert_eq!(board.find(key(5)), Some((again, listing)));
    }

    #[test]
    fn an_entry_with_parts_of_two_is_none() {
        use std::os::unix::fs::FileExt;
        let directory = tempfile::tempdir().unwrap();
        let (board, file) = board(directory.path());
        let ticket = board.list(key(5), Listing { service: 1, cookie: 2 }).unwrap();
        for at in (0..8).chain(16..16 + 8 * (WORDS as u64 + 1)) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, place(ticket.entry) + at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], place(ticket.entry) + at).unwrap();
            assert_eq!(board.find(key(5)), None, "byte {at}");
            file.write_all_at(&byte, place(ticket.entry) + at).unwrap();
            assert!(board.find(key(5)).is_some());
        }
    }

    #[test]
    fn what_has_been_put_in_its_place_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let (board, file) = board(directory.path());
        let ticket = board.list(key(5), Listing { service: 1, cookie: 2 }).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!((board.find(key(5)), board.is_answered(ticket)), (None, None));
        let path = Path::new(std::str::from_utf8(board.path.to_bytes()).unwrap());
        std::fs::remove_file(path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, Mode::from_raw_mode(0o660), 0).unwrap();
        assert_eq!((board.find(key(5)), board.list(key(5), Listing { service: 1, cookie: 2 })), (None, None));
        assert!(File::open(path.to_owned(), board.gid).is_err());
        // Nor is a file that has another name.
        std::fs::remove_file(path).unwrap();
        let other = directory.path().join("other");
        std::fs::write(&other, b"").unwrap();
        std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o660)).unwrap();
        std::fs::hard_link(&other, path).unwrap();
        assert!(File::open(path.to_owned(), board.gid).is_err());
    }
}
