//! A board on which one end of a connection writes where it can be found, for the other end, if that is on this host, to read.
//!
//! It is a file in memory, one for each user, whose other users cannot open it. So a peer that does not use this library, or is another
//! user's, or on another host, costs a look at memory and nothing else: no system call and no byte on the connection. What is written
//! there is a hint. Who one has found is proved when the two meet, by credentials that the kernel vouches for.
//!
//! Of the two ends, the one whose address is [the higher](Key::is_higher) writes, and the other looks. Entries are overwritten when
//! there is no room; the connection of a lost entry stays with TCP.

use rustix::fs::{FileType, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Entries, and how many of them one connection may be in.
const ENTRIES: usize = 16 << 10;
const WAYS: usize = 4;

const WORDS: usize = 16;

/// A connection as both its ends know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    words: [u64; 6],
}

impl Key {
    /// The connection between two addresses in a network namespace (`SO_NETNS_COOKIE`).
    pub fn new(namespace: u64, one: SocketAddr, other: SocketAddr) -> Key {
        let (low, high) = if Key::is_higher(one, other) { (other, one) } else { (one, other) };
        let halves = |ip: IpAddr| {
            let bits = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
                IpAddr::V6(ip) => ip.to_bits(),
            };
            [(bits >> 64) as u64, bits as u64]
        };
        let ([a, b], [c, d]) = (halves(low.ip()), halves(high.ip()));
        Key { words: [namespace, a, b, c, d, u64::from(low.port()) << 16 | u64::from(high.port())] }
    }

    /// Whether `one` is the end that writes.
    pub fn is_higher(one: SocketAddr, other: SocketAddr) -> bool {
        (one.port(), one.ip().to_canonical()) > (other.port(), other.ip().to_canonical())
    }

    /// The network namespace.
    pub fn namespace(self) -> u64 {
        self.words[0]
    }

    /// As it goes into messages.
    pub fn to_bytes(self) -> [u8; 48] {
        let mut bytes = [0; 48];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The other way round.
    pub fn from_bytes(bytes: &[u8; 48]) -> Key {
        let (words, _) = bytes.as_chunks::<8>();
        Key { words: std::array::from_fn(|word| u64::from_le_bytes(words[word])) }
    }

    /// The two addresses in a message ([`Key::to_bytes`]), which both hosts know the connection by.
    pub fn addresses(bytes: &[u8; 48]) -> &[u8; 40] {
        bytes.last_chunk().expect("48 bytes")
    }

    /// Whether these are the bytes of this connection.
    pub fn is(self, bytes: &[u8]) -> bool {
        bytes == self.to_bytes()
    }

    fn bucket(self) -> usize {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for word in self.words {
            hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^= hash >> 29;
        }
        (hash as usize % (ENTRIES / WAYS)) * WAYS
    }
}

/// Where the writer of an entry can be found, and which socket it means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listing {
    /// The number in the name of its Unix socket.
    pub service: u64,
    /// `SO_COOKIE` of its end of the connection.
    pub cookie: u64,
}

/// An entry, as it was when it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    entry: usize,
    version: u64,
}

/// One entry. All words may change at any time.
#[repr(C, align(128))]
struct Entry {
    /// Odd while the entry is being written, and another one each time.
    version: AtomicU64,
    /// The version of the entry that was answered.
    answered: AtomicU64,
    /// The key, then the listing.
    words: [AtomicU64; 8],
    _apart: [u64; WORDS - 10],
}

/// The board of one user. It stays mapped.
#[derive(Debug, Clone, Copy)]
pub struct Board {
    entries: *const Entry,
}

// SAFETY: shared memory, used through atomics only.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

const _: () = assert!(size_of::<Entry>() == 8 * WORDS);

impl Board {
    /// The board of user `uid` in a directory, usually `/dev/shm`; makes it if there is none.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] if the file there is not that user's alone; those of `open(2)` and `mmap(2)`.
    pub fn open(directory: &Path, uid: u32) -> io::Result<Board> {
        let len = ENTRIES * size_of::<Entry>();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let path = directory.join(format!("thruway-sockets-1-{uid}"));
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        let stat = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_file || stat.st_uid != uid || stat.st_mode & 0o077 != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // All of it, so that no page is missing when it is used. Those who open it at the same time make it as long.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len as u64)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of whose addresses nothing knows yet.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED, &file, 0) }?;
        Ok(Board { entries: base.cast() })
    }

    fn entry(&self, at: usize) -> &Entry {
        assert!(at < ENTRIES);
        // SAFETY: inside the mapping, aligned, nothing but atomics.
        unsafe { &*self.entries.add(at) }
    }

    /// Reads an entry whole. `None` if it changes meanwhile.
    fn read(&self, at: usize) -> Option<(u64, [u64; 8])> {
        let entry = self.entry(at);
        let version = entry.version.load(Ordering::Acquire);
        let words = std::array::from_fn(|word| entry.words[word].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (version.is_multiple_of(2) && entry.version.load(Ordering::Relaxed) == version).then_some((version, words))
    }

    /// Writes where one end of a connection is found. `None` if others write to all places for it at this moment.
    pub fn list(&self, key: Key, listing: Listing) -> Option<Ticket> {
        let bucket = key.bucket();
        let is_ours = |at: &usize| self.read(*at).is_some_and(|(_, words)| words[..6] == key.words);
        let is_free = |at: &usize| self.read(*at).is_some_and(|(_, words)| words == [0; 8]);
        let places = bucket..bucket + WAYS;
        // If none is free, the one that has been written least often: neither new nor in a crowded place.
        let oldest = || places.clone().min_by_key(|at| self.entry(*at).version.load(Ordering::Relaxed));
        let at = places.clone().find(is_ours).or_else(|| places.clone().find(is_free)).or_else(oldest)?;
        let entry = self.entry(at);
        let version = entry.version.load(Ordering::Relaxed);
        // Odd also if a process has died while it wrote: then the place is taken from it.
        let writing = version + 1 + version % 2;
        entry.version.compare_exchange(version, writing, Ordering::SeqCst, Ordering::Relaxed).ok()?;
        fence(Ordering::Release);
        let words = key.words.into_iter().chain([listing.service, listing.cookie]);
        for (place, word) in entry.words.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        entry.version.store(writing + 1, Ordering::Release);
        Some(Ticket { entry: at, version: writing + 1 })
    }

    /// Looks for the other end of a connection.
    pub fn find(&self, key: Key) -> Option<(Ticket, Listing)> {
        let bucket = key.bucket();
        (bucket..bucket + WAYS).find_map(|at| {
            let (version, words) = self.read(at)?;
            let listing = Listing { service: words[6], cookie: words[7] };
            (version != 0 && words[..6] == key.words).then_some((Ticket { entry: at, version }, listing))
        })
    }

    /// Lets the writer of an entry know that a message waits for it.
    pub fn answer(&self, ticket: Ticket) {
        self.entry(ticket.entry).answered.store(ticket.version, Ordering::Release);
    }

    /// Whether an entry of ours has been answered; `None` if it has been overwritten.
    pub fn is_answered(&self, ticket: Ticket) -> Option<bool> {
        let entry = self.entry(ticket.entry);
        let is_there = entry.version.load(Ordering::Relaxed) == ticket.version;
        is_there.then(|| entry.answered.load(Ordering::Acquire) == ticket.version)
    }

    /// Makes an entry of ours free again, if it still is one.
    pub fn withdraw(&self, ticket: Ticket) {
        let entry = self.entry(ticket.entry);
        let writing = ticket.version + 1;
        if entry.version.compare_exchange(ticket.version, writing, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            for word in &entry.words {
                word.store(0, Ordering::Relaxed);
            }
            entry.version.store(writing + 1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn both_ends_find_each_other_and_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let board = Board::open(directory.path(), uid).unwrap();
        let other = Board::open(directory.path(), uid).unwrap();
        let key = Key::new(7, address(80), address(40000));
        assert_eq!(key, Key::new(7, address(40000), address(80)));
        assert_eq!(key, Key::new(7, address(80), "[::ffff:127.0.0.1]:40000".parse().unwrap()));
        assert!(Key::is_higher(address(40000), address(80)) && !Key::is_higher(address(80), address(40000)));
        assert!(key.is(&key.to_bytes()) && !key.is(&[0; 48]));
        assert_eq!(other.find(key), None);
        let listing = Listing { service: 11, cookie: 12 };
        let ticket = board.list(key, listing).unwrap();
        assert_eq!(board.is_answered(ticket), Some(false));
        for strange in [Key::new(8, address(80), address(40000)), Key::new(7, address(81), address(40000))] {
            assert_eq!(other.find(strange), None);
        }
        let (found, read) = other.find(key).unwrap();
        assert_eq!((found, read), (ticket, listing));
        other.answer(found);
        assert_eq!(board.is_answered(ticket), Some(true));
        // The same addresses again, of a later connection: nothing is left of the earlier one.
        let later = board.list(key, Listing { service: 11, cookie: 13 }).unwrap();
        assert_eq!(board.is_answered(ticket), None);
        assert_eq!(board.is_answered(later), Some(false));
        board.withdraw(later);
        assert_eq!(other.find(key), None);
        board.withdraw(later);
    }

    #[test]
    fn many_entries_overwrite_old_ones() {
        let directory = tempfile::tempdir().unwrap();
        let board = Board::open(directory.path(), rustix::process::geteuid().as_raw()).unwrap();
        let mut found = 0;
        for i in 0..100_000u64 {
            let key = Key::new(i, address(80), address((i % 60_000) as u16 + 1000));
            let ticket = board.list(key, Listing { service: i, cookie: i }).unwrap();
            assert_eq!(board.find(key).unwrap(), (ticket, Listing { service: i, cookie: i }));
            found += 1;
        }
        assert_eq!(found, 100_000);
    }

    #[test]
    fn a_file_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let path = directory.path().join(format!("thruway-sockets-1-{uid}"));
        std::fs::write(&path, b"").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(Board::open(directory.path(), uid).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(directory.path().join("elsewhere"), &path).unwrap();
        Board::open(directory.path(), uid).unwrap_err();
        assert!(!directory.path().join("elsewhere").exists());
        std::fs::remove_file(&path).unwrap();
        Board::open(directory.path(), uid + 1).unwrap_err();
    }
}
