//! A board on which one end of a connection writes where it can be found, for the other end, if that is on this host, to read.
//!
//! It is a file in memory. That of a user cannot be opened by other users, and is mapped: so a peer that does not use this library, or is
//! another user's, or on another host, costs a look at memory and nothing else: no system call and no byte on the connection. That of a
//! group is for its members, and is not mapped (`group`). What is written there is a hint. Who one has found is proved when the two
//! meet, by credentials that the kernel vouches for.
//!
//! Of the two ends, the one whose address is [the higher](Key::is_higher) writes, and the other looks. Entries are overwritten when
//! there is no room; the connection of a lost entry stays with TCP.

mod group;
mod user;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

/// Entries, and how many of them one connection may be in.
const ENTRIES: usize = 16 << 10;
const WAYS: usize = 4;

/// Bytes of an entry, and words that say what it is: the key, then the listing.
const ENTRY_LEN: usize = 128;
const WORDS: usize = 8;

fn hash(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
        let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^ hash >> 29
    })
}

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
        (hash(self.words) as usize % (ENTRIES / WAYS)) * WAYS
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

impl Listing {
    fn of(words: [u64; WORDS]) -> Listing {
        Listing { service: words[6], cookie: words[7] }
    }

    /// The words of an entry.
    fn words(self, key: Key) -> [u64; WORDS] {
        let [a, b, c, d, e, f] = key.words;
        [a, b, c, d, e, f, self.service, self.cookie]
    }
}

/// Whose processes find each other on a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Circle {
    /// Those of the user with this number.
    User(u32),
    /// Those of the members of the group with this number.
    Group(u32),
}

impl Circle {
    /// The name of the file, in the directory of boards.
    pub fn file_name(self) -> String {
        match self {
            Circle::User(uid) => format!("thruway-sockets-1-{uid}"),
            Circle::Group(gid) => format!("thruway-sockets-1-group-{gid}"),
        }
    }
}

/// A board. It stays open.
#[derive(Debug, Clone, Copy)]
pub struct Board(Kind);

#[derive(Debug, Clone, Copy)]
enum Kind {
    User(user::Mapped),
    Group(&'static group::File),
}

impl Board {
    /// The board of a user or a group in a directory, usually `/dev/shm`; makes it if there is none.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] if the file there is not that user's or group's alone, or this process is not in the group;
    /// [`io::ErrorKind::FileTooLarge`] if it may not write files as large as that of a group (`RLIMIT_FSIZE`); those of `open(2)` and
    /// `mmap(2)`.
    pub fn open(directory: &Path, circle: Circle) -> io::Result<Board> {
        let path = directory.join(circle.file_name());
        Ok(Board(match circle {
            Circle::User(uid) => Kind::User(user::Mapped::open(&path, uid)?),
            Circle::Group(gid) => Kind::Group(Box::leak(Box::new(group::File::open(path, gid)?))),
        }))
    }

    /// Whether a look costs system calls.
    pub fn is_of_group(self) -> bool {
        matches!(self.0, Kind::Group(_))
    }

    /// Writes where one end of a connection is found. `None` if others write to all places for it at this moment.
    pub fn list(&self, key: Key, listing: Listing) -> Option<Ticket> {
        match self.0 {
            Kind::User(board) => board.list(key, listing),
            Kind::Group(board) => board.list(key, listing),
        }
    }

    /// Looks for the other end of a connection.
    pub fn find(&self, key: Key) -> Option<(Ticket, Listing)> {
        match self.0 {
            Kind::User(board) => board.find(key),
            Kind::Group(board) => board.find(key),
        }
    }

    /// Lets the writer of an entry know that a message waits for it.
    pub fn answer(&self, ticket: Ticket) {
        match self.0 {
            Kind::User(board) => board.answer(ticket),
            Kind::Group(board) => board.answer(ticket),
        }
    }

    /// Whether an entry of ours has been answered; `None` if it has been overwritten.
    pub fn is_answered(&self, ticket: Ticket) -> Option<bool> {
        match self.0 {
            Kind::User(board) => board.is_answered(ticket),
            Kind::Group(board) => board.is_answered(ticket),
        }
    }

    /// Makes an entry of ours free again, if it still is one.
    pub fn withdraw(&self, ticket: Ticket) {
        match self.0 {
            Kind::User(board) => board.withdraw(ticket),
            Kind::Group(board) => board.withdraw(ticket),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Mutex;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    /// Boards of groups stay, so that whatever looks for memory that is lost finds them.
    static STAY: Mutex<Vec<Board>> = Mutex::new(Vec::new());

    /// A board of each kind, opened twice.
    fn each(test: impl Fn(Board, Board)) {
        let directory = tempfile::tempdir().unwrap();
        let uid = || Board::open(directory.path(), Circle::User(rustix::process::geteuid().as_raw())).unwrap();
        test(uid(), uid());
        let group = || Board::open(directory.path(), Circle::Group(rustix::process::getegid().as_raw())).unwrap();
        let (one, other) = (group(), group());
        STAY.lock().unwrap().extend([one, other]);
        test(one, other);
    }

    #[test]
    fn both_ends_find_each_other_and_no_others() {
        let key = Key::new(7, address(80), address(40000));
        assert_eq!(key, Key::new(7, address(40000), address(80)));
        assert_eq!(key, Key::new(7, address(80), "[::ffff:127.0.0.1]:40000".parse().unwrap()));
        assert!(Key::is_higher(address(40000), address(80)) && !Key::is_higher(address(80), address(40000)));
        assert!(key.is(&key.to_bytes()) && !key.is(&[0; 48]));
        each(|board, other| {
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
            board.withdraw(ticket);
            assert_eq!(other.find(key).map(|(ticket, _)| ticket), Some(later));
            board.withdraw(later);
            assert_eq!(other.find(key), None);
            assert_eq!(board.is_answered(later), None);
            board.withdraw(later);
        });
    }

    #[test]
    fn many_entries_overwrite_old_ones() {
        each(|board, _| {
            for i in 0..40_000u64 {
                let key = Key::new(i, address(80), address((i % 60_000) as u16 + 1000));
                let ticket = board.list(key, Listing { service: i, cookie: i }).unwrap();
                assert_eq!(board.find(key).unwrap(), (ticket, Listing { service: i, cookie: i }));
            }
        });
    }

    #[test]
    fn a_file_that_others_can_write_to_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        for circle in [Circle::User(uid), Circle::Group(gid)] {
            let open = || Board::open(directory.path(), circle);
            let path = directory.path().join(circle.file_name());
            std::fs::write(&path, b"").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
            assert_eq!(open().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            std::fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink(directory.path().join("elsewhere"), &path).unwrap();
            open().unwrap_err();
            assert!(!directory.path().join("elsewhere").exists());
            std::fs::remove_file(&path).unwrap();
        }
        if uid != 0 {
            Board::open(directory.path(), Circle::User(uid + 1)).unwrap_err();
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
    }
}
