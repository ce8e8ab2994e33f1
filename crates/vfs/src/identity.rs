//! Identity of files and file systems, shared by handles, client state and attributes.

use crate::FileId;
use rustix::fs::Mode;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use thruway_fs::{Superblock, durable};

/// Identity of a file, independent of its names and of the share.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileIdentity {
    /// Number of its file system ([`FileSystem::fsid`](crate::FileSystem::fsid)), unique among the file systems that are
    /// served at the same time.
    pub file_system: u64,
    /// The kernel's handle of the file: subvolume, inode and generation.
    pub file: FileId,
}

/// Number of a subvolume for clients. `of` is the number of the whole file system, and also that of subvolume 0.
pub fn subvolume_number(of: u64, subvolume: u64) -> u64 {
    if subvolume == 0 {
        return of;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&of.to_be_bytes()).update(&subvolume.to_be_bytes());
    u64::from_be_bytes(*hasher.finalize().as_bytes().first_chunk().expect("a hash is longer"))
}

/// Random numbers of file systems, stored in a file. All shares of one file system have the same number.
///
/// After a restart, a file system is identified by its stored UUID, independent of its device. The table has one entry per share, so
/// two copies of one file system, with the same UUID, keep two numbers.
pub struct FileSystemNumbers {
    path: PathBuf,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Number and UUID of each share's file system, by name of the share.
    known: BTreeMap<String, Known>,
    /// Numbers in use in this run, by [`Superblock::device`].
    in_use: HashMap<u64, u64>,
    is_changed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    number: u64,
    uuid: Box<[u8]>,
}

/// First line of the file.
const HEADER: &str = "thruway NFS file systems 1";

/// Most shares in the file, including those that are no longer served.
const SHARES_MAX: usize = 4096;

fn encode(known: &BTreeMap<String, Known>) -> String {
    let hex = |bytes: &[u8]| data_encoding::HEXLOWER.encode(bytes);
    let line =
        |(share, of): (&String, &Known)| format!("{} {:016x} {}\n", hex(share.as_bytes()), of.number, hex(&of.uuid));
    [format!("{HEADER}\n")].into_iter().chain(known.iter().map(line)).chain(["end\n".into()]).collect()
}

fn decode(text: &str) -> Option<BTreeMap<String, Known>> {
    let text = text.strip_prefix(HEADER)?.strip_prefix('\n')?.strip_suffix("end\n")?;
    let line = |line: &str| {
        let mut words = line.split(' ');
        let (share, number, uuid) = (words.next()?, words.next()?, words.next()?);
        let bytes = |hex: &str| data_encoding::HEXLOWER.decode(hex.as_bytes()).ok();
        let known = Known { number: u64::from_str_radix(number, 16).ok()?, uuid: bytes(uuid)?.into() };
        words.next().is_none().then_some((String::from_utf8(bytes(share)?).ok()?, known))
    };
    text.lines().map(line).collect()
}

impl Table {
    fn known_number(&self, share: &str, superblock: &Superblock) -> Option<u64> {
        self.known.get(share).filter(|known| known.uuid == superblock.uuid).map(|known| known.number)
    }

    fn number_of(&mut self, share: &str, superblock: &Superblock) -> u64 {
        let is_free = |number: &u64| !self.in_use.values().any(|used| used == number);
        let new = || std::iter::repeat_with(|| u64::from_be_bytes(thruway_engine::random::random()));
        let number = match self.in_use.get(&superblock.device) {
            Some(number) => *number,
            None => {
                let known = self.known_number(share, superblock).filter(is_free);
                known.unwrap_or_else(|| new().find(is_free).expect("an endless iterator"))
            }
        };
        self.in_use.insert(superblock.device, number);
        let known = Known { number, uuid: superblock.uuid.clone() };
        let has_room = self.known.len() < SHARES_MAX || self.known.contains_key(share);
        if has_room && self.known.get(share) != Some(&known) {
            self.known.insert(share.into(), known);
            self.is_changed = true;
        }
        number
    }
}

impl FileSystemNumbers {
    /// Reads the file. Without one, every file system gets a new number.
    ///
    /// # Errors
    /// I/O errors of the file; of kind `InvalidData` if it is damaged.
    pub fn load(path: &Path) -> io::Result<FileSystemNumbers> {
        let damaged = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "not a list of NFS file systems: restore it, or remove it (clients must then mount again)",
            )
        };
        let known = match std::fs::read_to_string(path) {
            Ok(text) => decode(&text).ok_or_else(damaged)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(damaged()),
            Err(error) => return Err(error),
        };
        let table = Mutex::new(Table { known, ..Table::default() });
        Ok(FileSystemNumbers { path: path.into(), table })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panics under the lock")
    }

    /// Chooses the numbers of these shares' file systems. A file system keeps the number that any of its shares had before.
    pub fn assign<'a>(&self, shares: impl IntoIterator<Item = (&'a str, &'a Superblock)>) {
        let mut table = self.table();
        let (known, new): (Vec<_>, Vec<_>) =
            shares.into_iter().partition(|(share, superblock)| table.known_number(share, superblock).is_some());
        for (share, superblock) in known.into_iter().chain(new) {
            table.number_of(share, superblock);
        }
    }

    /// Number of a share's file system; chooses one if there is none yet.
    pub fn number_of(&self, share: &str, superblock: &Superblock) -> u64 {
        self.table().number_of(share, superblock)
    }

    /// Writes new numbers to stable storage. Must be called before clients get handles.
    ///
    /// # Errors
    /// I/O errors of the write.
    pub fn store(&self) -> io::Result<()> {
        let mut table = self.table();
        if table.is_changed {
            durable::replace(&self.path, encode(&table.known).as_bytes(), Mode::RUSR | Mode::WUSR)?;
            table.is_changed = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(device: u64, uuid: &[u8]) -> Superblock {
        Superblock { device, uuid: uuid.into() }
    }

    #[test]
    fn a_file_system_keeps_its_number_and_shares_it_with_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("numbers");
        let load = || FileSystemNumbers::load(&path).unwrap();
        let numbers = load();
        let (a, b) = (numbers.number_of("a", &on(1, b"disk")), numbers.number_of("b", &on(1, b"disk")));
        let copy = numbers.number_of("copy", &on(2, b"disk"));
        assert!(a == b && a != copy);
        numbers.store().unwrap();
        // After a restart, the disk and its copy have other device numbers.
        let numbers = load();
        assert_eq!(numbers.number_of("copy", &on(1, b"disk")), copy);
        assert_eq!([numbers.number_of("a", &on(7, b"disk")), numbers.number_of("b", &on(7, b"disk"))], [a, a]);
        // Share b is on the copy now.
        let numbers = load();
        let moved = numbers.number_of("b", &on(2, b"disk"));
        assert_ne!(numbers.number_of("a", &on(7, b"disk")), moved);
        // A new share of the disk gets the number of the disk, in any order.
        let numbers = load();
        numbers.assign([("new", &on(7, b"disk")), ("a", &on(7, b"disk"))]);
        assert_eq!([numbers.number_of("new", &on(7, b"disk")), numbers.number_of("a", &on(7, b"disk"))], [a, a]);
        // A different disk under the name of a known share.
        assert_ne!(load().number_of("a", &on(7, b"other")), a);
    }

    #[test]
    fn a_damaged_list_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("numbers");
        let numbers = FileSystemNumbers::load(&path).unwrap();
        numbers.number_of("a", &on(1, b"disk"));
        numbers.number_of("b", &on(2, b"other"));
        numbers.store().unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert!(FileSystemNumbers::load(&path).is_ok());
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(FileSystemNumbers::load(&path).is_err(), "{len} bytes of {}", whole.len());
        }
        std::fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
        assert!(FileSystemNumbers::load(&path).is_err());
    }
}
