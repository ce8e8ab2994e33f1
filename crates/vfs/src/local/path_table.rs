//! Where files are, for a process that may not open them by their handles (`CAP_DAC_READ_SEARCH`).
//!
//! A file's id is its kernel handle all the same: every process may ask what the handle of a file is. The table says in which directory
//! a file was last seen, and by which name, so its path is found by asking for one directory after the other up to the root. What is
//! at the path counts only if it has the handle. A file that is elsewhere, because a program of this host has moved it or the end of
//! the table was lost in a crash, is searched for in the whole tree: the table decides how fast a file is found, never which.

use crate::FileId;
use quick_cache::sync::Cache;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::collections::HashMap;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

/// File to length of its directory's id, that id, and its name there.
const PLACES: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("places");

/// Places that are noted in memory before they are written, and the most while they are.
const PENDING_MAX: usize = 16 << 10;
const NOTED_MAX: usize = 4 * PENDING_MAX;

/// Directories above a file. The kernel knows no limit, and the table may lead in a circle after renames that it has not seen.
const DEPTH_MAX: usize = 4096;

/// Places that are also kept in memory.
const RECENT_MAX: usize = 64 << 10;

/// Files known to be gone.
const GONE_MAX: usize = 64 << 10;

/// Memory for pages of the table.
const CACHE_BYTES: usize = 16 << 20;

#[derive(Clone, PartialEq, Eq)]
struct Place {
    dir: FileId,
    name: Vec<u8>,
}

impl Place {
    fn encode(&self) -> Vec<u8> {
        // An id has at most 255 bytes (`FILE_ID_MAX`).
        [&[self.dir.0.len() as u8][..], &self.dir.0, &self.name].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Place> {
        let (len, bytes) = bytes.split_first()?;
        let (dir, name) = bytes.split_at_checked(usize::from(*len))?;
        Some(Place { dir: FileId(dir.into()), name: name.to_vec() })
    }
}

type Pending = HashMap<FileId, Option<Place>>;

/// What has been noted and is not written yet; `None` of files that are gone.
#[derive(Default)]
struct Noted {
    pending: Pending,
    being_written: Arc<Pending>,
}

pub(super) struct PathTable {
    noted: Mutex<Noted>,
    /// `None` while there is none that can be used; see [`PathTable::begin_again`].
    database: RwLock<Option<Database>>,
    file: Option<PathBuf>,
    /// Seen lately.
    recent: Cache<FileId, Place>,
    /// Ids whose files have no name any more: they are not searched for.
    gone: Cache<FileId, ()>,
    /// Held while the tree is searched; the number of the last search that has seen all of it.
    pub(super) searching: tokio::sync::Mutex<u64>,
    /// Searches that have begun.
    pub(super) searches: AtomicU64,
    writing: Mutex<()>,
    /// Somebody has been asked to write.
    is_due: AtomicBool,
}

fn failed(error: impl Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// Why the database could not be used.
#[derive(Debug, thiserror::Error)]
enum Broken {
    /// The medium may be better another time.
    #[error("{0}")]
    Io(io::Error),
    /// What is in it.
    #[error("it is damaged: {0}")]
    Damaged(String),
}

impl From<redb::Error> for Broken {
    fn from(error: redb::Error) -> Broken {
        match error {
            redb::Error::Io(error) if error.raw_os_error().is_some() => Broken::Io(error),
            redb::Error::PreviousIo => Broken::Io(failed(error)),
            other => Broken::Damaged(other.to_string()),
        }
    }
}

/// Does something with the database, which panics at what it did not expect to find.
fn guarded<T>(action: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, Broken> {
    match catch_unwind(AssertUnwindSafe(action)) {
        Ok(done) => Ok(done?),
        Err(_) => Err(Broken::Damaged("it is not what it should be".into())),
    }
}

fn open(file: Option<&Path>) -> Result<Database, Broken> {
    guarded(|| {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES);
        let database = match file {
            None => builder.create_with_backend(redb::backends::InMemoryBackend::new())?,
            Some(file) => builder.create(file)?,
        };
        let change = database.begin_write()?;
        change.open_table(PLACES)?;
        change.commit()?;
        Ok(database)
    })
}

impl PathTable {
    /// Opens the table in a file, which is begun again if it is damaged; without one, it ends with the process.
    ///
    /// # Errors
    /// If the file cannot be opened or made.
    pub(super) fn open(file: Option<&Path>) -> io::Result<PathTable> {
        if let Some(file) = file {
            // The names in it are not for everybody.
            OpenOptions::new().append(true).create(true).mode(0o600).open(file)?;
        }
        let table = PathTable {
            noted: Mutex::default(),
            database: RwLock::default(),
            file: file.map(Into::into),
            recent: Cache::new(RECENT_MAX),
            gone: Cache::new(GONE_MAX),
            searching: tokio::sync::Mutex::default(),
            searches: AtomicU64::new(0),
            writing: Mutex::default(),
            is_due: AtomicBool::new(false),
        };
        match open(file) {
            Ok(database) => *table.database.write().expect("no panics under the lock") = Some(database),
            Err(Broken::Io(error)) => return Err(error),
            Err(broken) => table.begin_again(&broken),
        }
        Ok(table)
    }

    /// Lets go of a database that cannot be used. If it is damaged, what is in it as well; else it is opened again when there is
    /// something to write.
    fn begin_again(&self, broken: &Broken) {
        let mut database = self.database.write().expect("no panics under the lock");
        tracing::warn!(
            file = self.file.as_ref().map(|file| tracing::field::display(file.display())),
            %broken,
            "the table of paths cannot be used: files that clients know are searched for until it can"
        );
        let _ = catch_unwind(AssertUnwindSafe(|| drop(database.take())));
        if let (Broken::Damaged(_), Some(file)) = (broken, &self.file) {
            let emptied = OpenOptions::new().write(true).truncate(true).open(file);
            *database = emptied.ok().and_then(|_| open(Some(file)).ok());
        }
    }

    /// Does something with the database, if it can be used.
    fn with<T>(&self, action: impl FnOnce(&Database) -> Result<T, redb::Error>) -> Option<T> {
        let done = {
            let database = self.database.read().expect("no panics under the lock");
            let database = database.as_ref()?;
            guarded(|| action(database))
        };
        done.inspect_err(|broken| self.begin_again(broken)).ok()
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().expect("no panics under the lock")
    }

    /// Notes where a file is, or that it is gone. True if somebody is to [write](PathTable::write) now.
    fn put(&self, id: &FileId, place: Option<Place>) -> bool {
        let mut noted = self.noted();
        // Where it cannot be written as fast, the rest is searched for.
        if noted.pending.len() < NOTED_MAX {
            noted.pending.insert(id.clone(), place);
        }
        noted.pending.len() >= PENDING_MAX && !self.is_due.swap(true, Ordering::SeqCst)
    }

    /// A file has been seen. Does not wait for the medium. True if so many have been that they are to be [written](PathTable::write)
    /// now.
    pub(super) fn note(&self, id: &FileId, dir: &FileId, name: &[u8]) -> bool {
        let place = Place { dir: dir.clone(), name: name.to_vec() };
        if self.recent.get(id).as_ref() == Some(&place) {
            return false;
        }
        self.recent.insert(id.clone(), place.clone());
        self.put(id, Some(place))
    }

    /// The last name of a file is gone.
    pub(super) fn note_gone(&self, id: &FileId) {
        self.recent.remove(id);
        if self.put(id, None) {
            // The next file that is seen has it written.
            self.is_due.store(false, Ordering::SeqCst);
        }
        self.gone.insert(id.clone(), ());
    }

    pub(super) fn is_gone(&self, id: &FileId) -> bool {
        self.gone.get(id).is_some()
    }

    fn place(&self, id: &FileId) -> Option<Place> {
        {
            let noted = self.noted();
            if let Some(place) = noted.pending.get(id).or_else(|| noted.being_written.get(id)) {
                return place.clone();
            }
        }
        if let Some(place) = self.recent.get(id) {
            return Some(place);
        }
        self.with(|database| {
            let place = database.begin_read()?.open_table(PLACES)?.get(&id.0[..])?;
            Ok(place.and_then(|place| Place::decode(place.value())))
        })
        .flatten()
    }

    /// The names of the directories that led to a file from the root, and its own.
    pub(super) fn names(&self, root: &FileId, id: &FileId) -> Option<Vec<Vec<u8>>> {
        let (mut names, mut at) = (Vec::new(), id.clone());
        while at != *root {
            if names.len() >= DEPTH_MAX {
                return None;
            }
            let place = self.place(&at)?;
            names.push(place.name);
            at = place.dir;
        }
        names.reverse();
        Some(names)
    }

    /// Writes what has been noted, unless another thread does.
    pub(super) fn write(&self) {
        let Ok(_writing) = self.writing.try_lock() else { return };
        self.is_due.store(false, Ordering::SeqCst);
        let noted = {
            let mut noted = self.noted();
            noted.being_written = Arc::new(std::mem::take(&mut noted.pending));
            Arc::clone(&noted.being_written)
        };
        if !noted.is_empty() && !self.write_all(&noted) {
            // Once more, when there is more.
            let mut now = self.noted();
            for (id, place) in noted.iter().take(NOTED_MAX.saturating_sub(now.pending.len())) {
                now.pending.entry(id.clone()).or_insert_with(|| place.clone());
            }
        }
        self.noted().being_written = Arc::default();
    }

    fn write_all(&self, noted: &Pending) -> bool {
        {
            let mut database = self.database.write().expect("no panics under the lock");
            if database.is_none() {
                *database = open(self.file.as_deref()).ok();
            }
        }
        let written = self.with(|database| {
            let change = database.begin_write()?;
            {
                let mut table = change.open_table(PLACES)?;
                for (id, place) in noted {
                    let Some(place) = place.as_ref().map(Place::encode) else {
                        table.remove(&id.0[..])?;
                        continue;
                    };
                    let is_known = table.get(&id.0[..])?.is_some_and(|known| known.value() == place);
                    if !is_known {
                        table.insert(&id.0[..], &place[..])?;
                    }
                }
            }
            Ok(change.commit()?)
        });
        written.is_some()
    }
}

impl Drop for PathTable {
    fn drop(&mut self) {
        self.write();
        // As elsewhere, it may panic.
        let database = self.database.get_mut().map(Option::take);
        let _ = catch_unwind(AssertUnwindSafe(|| drop(database)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> FileId {
        FileId([n; 12].as_slice().into())
    }

    #[test]
    fn paths_are_known_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("paths");
        let table = PathTable::open(Some(&file)).unwrap();
        assert!(!table.note(&id(2), &id(1), b"dir"));
        table.note(&id(3), &id(2), b"old");
        table.write();
        table.note(&id(3), &id(2), b"new");
        let names = |table: &PathTable, n| table.names(&id(1), &id(n)).map(|names| names.concat());
        assert_eq!(names(&table, 3).as_deref(), Some(&b"dirnew"[..]));
        table.write();
        drop(table);
        let table = PathTable::open(Some(&file)).unwrap();
        assert_eq!(names(&table, 3).as_deref(), Some(&b"dirnew"[..]));
        assert_eq!((names(&table, 1).as_deref(), names(&table, 4)), (Some(&b""[..]), None));
        table.note_gone(&id(3));
        assert!(table.is_gone(&id(3)) && names(&table, 3).is_none());
        table.write();
        assert_eq!(names(&table, 3), None);
        // As after renames by others.
        table.note(&id(2), &id(3), b"circle");
        table.note(&id(3), &id(2), b"circle");
        assert_eq!(names(&table, 3), None);
    }

    #[test]
    fn a_damaged_table_is_begun_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("paths");
        std::fs::write(&file, [7; 100_000]).unwrap();
        let table = PathTable::open(Some(&file)).unwrap();
        table.note(&id(2), &id(1), b"a");
        table.write();
        assert!(table.names(&id(1), &id(2)).is_some());
        assert!(PathTable::open(Some(&dir.path().join("missing/paths"))).is_err());
    }

    #[test]
    fn many_are_written_at_once() {
        let table = PathTable::open(None).unwrap();
        let is_due = |n: usize| table.note(&FileId(n.to_le_bytes().as_slice().into()), &id(1), b"x");
        assert_eq!((0..PENDING_MAX + 5).filter(|n| is_due(*n)).count(), 1, "one is to write");
        table.write();
        assert!(table.noted().pending.is_empty());
        assert!(!is_due(0), "it is known");
        assert!(table.noted().pending.is_empty());
        // Where nothing can be written, there is a limit.
        let _writing = table.writing.lock().unwrap();
        (0..2 * NOTED_MAX).for_each(|n| {
            is_due(1_000_000 + n);
        });
        assert_eq!(table.noted().pending.len(), NOTED_MAX);
    }

    /// Bits that turn over behind our back make it slow, and nothing else.
    #[test]
    fn a_table_that_is_damaged_while_it_is_used_is_begun_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("paths");
        let mut was_lost = 0;
        for at in (0..64).map(|n| n * 601) {
            std::fs::write(&file, b"").unwrap();
            let table = PathTable::open(Some(&file)).unwrap();
            for n in 0..500u32 {
                table.note(&FileId(n.to_le_bytes().as_slice().into()), &id(1), &n.to_string().into_bytes());
            }
            table.write();
            drop(table);
            let mut bytes = std::fs::read(&file).unwrap();
            let len = bytes.len();
            bytes[at % len] ^= 0x10;
            std::fs::write(&file, &bytes).unwrap();
            let Ok(table) = PathTable::open(Some(&file)) else { continue };
            for n in 0..500u32 {
                let id_of = FileId(n.to_le_bytes().as_slice().into());
                // What is found is only where to look.
                was_lost += usize::from(table.names(&id(1), &id_of).is_none());
                table.note(&id_of, &id(1), &n.to_string().into_bytes());
            }
            table.write();
            drop(table);
            let table = PathTable::open(Some(&file)).unwrap();
            table.note(&id(2), &id(1), b"still usable");
            table.write();
            assert!(table.names(&id(1), &id(2)).is_some(), "{at}");
        }
        assert!(was_lost > 0, "some of the bits mattered");
    }
}
