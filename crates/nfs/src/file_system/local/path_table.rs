//! Where files are, for a process that may not open them by their handles (`CAP_DAC_READ_SEARCH`).
//!
//! A file's id is its kernel handle all the same: every process may ask what the handle of a file is. The table says in which directory
//! a file was last seen, and by which name, so its path is found by asking for one directory after the other up to the root. What is
//! at the path counts only if it has the handle. A file that is elsewhere, because a program of this host has moved it or the end of
//! the table was lost in a crash, is searched for in the whole tree: the table decides how fast a file is found, never which.

use crate::file_system::FileId;
use quick_cache::sync::Cache;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// File to length of its directory's id, that id, and its name there.
const PLACES: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("places");

/// Places that are noted in memory before they are written.
const PENDING_MAX: usize = 16 << 10;

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

pub(super) struct PathTable {
    /// Not written yet; `None` of files that are gone.
    pending: Mutex<Pending>,
    database: Database,
    /// Seen lately.
    recent: Cache<FileId, Place>,
    /// Ids whose files have no name any more: they are not searched for.
    gone: Cache<FileId, ()>,
    /// Held while the tree is searched; the number of the last search that has seen all of it.
    pub(super) searching: tokio::sync::Mutex<u64>,
    /// Searches that have begun.
    pub(super) searches: AtomicU64,
    /// A failure to write is logged once.
    has_failed: AtomicBool,
}

fn failed(error: impl Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl PathTable {
    /// Opens the table in a file, which is made anew if it is damaged; without one, it ends with the process.
    ///
    /// # Errors
    /// If the file cannot be opened or made.
    pub(super) fn open(file: Option<&Path>) -> io::Result<PathTable> {
        let builder = || {
            let mut builder = Database::builder();
            builder.set_cache_size(CACHE_BYTES);
            builder
        };
        if let Some(file) = file {
            // The names in it are not for everybody.
            std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(file)?;
        }
        let database = match file {
            None => builder().create_with_backend(redb::backends::InMemoryBackend::new()).map_err(failed)?,
            Some(file) => builder().create(file).or_else(|error| {
                match error {
                    redb::DatabaseError::DatabaseAlreadyOpen => return Err(failed(error)),
                    redb::DatabaseError::Storage(redb::StorageError::Io(error)) if error.raw_os_error().is_some() => {
                        return Err(error);
                    }
                    _ => {}
                }
                tracing::warn!(file = %file.display(), %error, "the table of paths cannot be read and is begun again");
                std::fs::OpenOptions::new().write(true).truncate(true).open(file)?;
                builder().create(file).map_err(failed)
            })?,
        };
        Ok(PathTable {
            pending: Mutex::default(),
            database,
            recent: Cache::new(RECENT_MAX),
            gone: Cache::new(GONE_MAX),
            searching: tokio::sync::Mutex::default(),
            searches: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
        })
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().expect("no panics under the lock")
    }

    /// A file has been seen. Does not wait for the medium. True if so many have been that they are to be [written](PathTable::write)
    /// now.
    pub(super) fn note(&self, id: &FileId, dir: &FileId, name: &[u8]) -> bool {
        let place = Place { dir: dir.clone(), name: name.to_vec() };
        if self.recent.get(id).as_ref() == Some(&place) {
            return false;
        }
        self.recent.insert(id.clone(), place.clone());
        let mut pending = self.pending();
        pending.insert(id.clone(), Some(place));
        pending.len() >= PENDING_MAX
    }

    /// The last name of a file is gone.
    pub(super) fn note_gone(&self, id: &FileId) {
        self.recent.remove(id);
        self.pending().insert(id.clone(), None);
        self.gone.insert(id.clone(), ());
    }

    pub(super) fn is_gone(&self, id: &FileId) -> bool {
        self.gone.get(id).is_some()
    }

    fn place(&self, id: &FileId) -> Option<Place> {
        if let Some(place) = self.pending().get(id) {
            return place.clone();
        }
        if let Some(place) = self.recent.get(id) {
            return Some(place);
        }
        let read = || {
            let table = self.database.begin_read().map_err(failed)?.open_table(PLACES).map_err(failed)?;
            let place = table.get(&id.0[..]).map_err(failed)?;
            Ok::<_, io::Error>(place.and_then(|place| Place::decode(place.value())))
        };
        // Before the first write, there is no table.
        read().ok().flatten()
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

    /// Writes what has been noted.
    pub(super) fn write(&self) {
        let noted = self.pending().clone();
        if noted.is_empty() {
            return;
        }
        let write = || {
            let change = self.database.begin_write().map_err(failed)?;
            {
                let mut table = change.open_table(PLACES).map_err(failed)?;
                for (id, place) in &noted {
                    let Some(place) = place.as_ref().map(Place::encode) else {
                        table.remove(&id.0[..]).map_err(failed)?;
                        continue;
                    };
                    let is_known = table.get(&id.0[..]).map_err(failed)?.is_some_and(|known| known.value() == place);
                    if !is_known {
                        table.insert(&id.0[..], &place[..]).map_err(failed)?;
                    }
                }
            }
            change.commit().map_err(failed)
        };
        if let Err(error) = write()
            && !self.has_failed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, "the table of paths cannot be written: files are found more slowly after a restart");
        }
        // What has been noted meanwhile stays. What could not be written is searched for after a restart.
        self.pending().retain(|id, place| noted.get(id) != Some(place));
    }
}

impl Drop for PathTable {
    fn drop(&mut self) {
        self.write();
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
        assert_eq!((0..PENDING_MAX).filter(|n| is_due(*n)).count(), 1);
        table.write();
        assert!(table.pending().is_empty());
        assert!(!is_due(0), "it is known");
        assert!(table.pending().is_empty());
    }
}
