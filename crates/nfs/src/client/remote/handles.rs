//! Ids of files for the server's handles.
//!
//! An id is shorter than the longest handle ([`FILE_ID_MAX`]). The id of a short handle contains the handle. The id of a long handle is its
//! hash, and a table contains the handle. Clients keep ids for years, so the table is a file.

use crate::client::Handle;
use quick_cache::sync::Cache;
use redb::{Database, DatabaseError, ReadableDatabase, TableDefinition};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use thruway_vfs::workers::Workers;
use thruway_vfs::{FILE_ID_MAX, FileId};
use tokio::sync::Notify;

/// Hash of a handle to the handle.
const HANDLES: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("handles");

/// First byte of an id: a handle follows, or the hash of one.
const SHORT: u8 = 0;
const LONG: u8 = 1;
const HASH: usize = 32;
const _: () = assert!(HASH < FILE_ID_MAX);

/// Maximum number of written handles in memory.
const RECENT_MAX: usize = 64 << 10;

/// Memory for pages of the table.
const CACHE_BYTES: usize = 8 << 20;

type Hash = [u8; HASH];

/// Long handles by their hashes.
pub(super) struct Handles {
    recent: Cache<Hash, Handle>,
    /// Handles that are not written yet. Without a file, all handles.
    unwritten: Mutex<HashMap<Hash, Handle>>,
    /// Notified of a new handle.
    pub added: Notify,
    database: Option<Arc<Database>>,
    workers: Workers,
}

fn failed(error: impl Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl Handles {
    /// Opens the table in a file, or begins one in memory.
    pub(super) fn open(file: Option<&Path>) -> io::Result<Handles> {
        let database = file.map(|path| open_database(path).map(Arc::new)).transpose()?;
        let recent = Cache::new(RECENT_MAX);
        Ok(Handles { recent, unwritten: Mutex::default(), added: Notify::new(), database, workers: Workers::default() })
    }

    fn unwritten(&self) -> MutexGuard<'_, HashMap<Hash, Handle>> {
        self.unwritten.lock().expect("no panics under the lock")
    }

    /// The id for a handle.
    pub(super) fn id(&self, handle: &Handle) -> FileId {
        if handle.len() < FILE_ID_MAX {
            return FileId(std::iter::once(SHORT).chain(handle.iter().copied()).collect());
        }
        let hash = *blake3::hash(handle).as_bytes();
        if self.recent.get(&hash).is_none() {
            self.recent.insert(hash, handle.clone());
            self.unwritten().insert(hash, handle.clone());
            self.added.notify_one();
        }
        FileId(std::iter::once(LONG).chain(hash).collect())
    }

    /// The handle of an id; `ESTALE` if there is none.
    pub(super) async fn handle(&self, id: &FileId) -> thruway_vfs::Result<Handle> {
        let hash: Hash = match id.0.split_first() {
            Some((&SHORT, handle)) if !handle.is_empty() => return Ok(handle.into()),
            Some((&LONG, hash)) => hash.try_into().map_err(|_| Errno::STALE)?,
            _ => return Err(Errno::STALE),
        };
        if let Some(handle) = self.recent.get(&hash) {
            return Ok(handle);
        }
        if let Some(handle) = self.unwritten().get(&hash) {
            return Ok(handle.clone());
        }
        let Some(database) = self.database.clone() else { return Err(Errno::STALE) };
        let found = self.workers.run(move || guarded(|| read(&database, &hash))).await;
        let handle = found.map_err(|error| {
            tracing::warn!(%error, "the table of handles cannot be read");
            Errno::IO
        })?;
        let handle = handle.ok_or(Errno::STALE)?;
        self.recent.insert(hash, handle.clone());
        Ok(handle)
    }

    /// Writes new handles to the file. Blocks.
    pub(super) fn write(&self) {
        let Some(database) = &self.database else { return };
        let added: Vec<(Hash, Handle)> =
            self.unwritten().iter().map(|(hash, handle)| (*hash, handle.clone())).collect();
        if added.is_empty() {
            return;
        }
        if let Err(error) = guarded(|| write(database, &added)) {
            tracing::warn!(%error, "the table of handles cannot be written; after a restart, clients look up some files again");
            return;
        }
        let mut unwritten = self.unwritten();
        added.iter().for_each(|(hash, _)| drop(unwritten.remove(hash)));
    }
}

/// Opens the file, for its owner only: a handle gives access to a file. A damaged file is replaced by an empty one.
fn open_database(path: &Path) -> io::Result<Database> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    let open = || {
        let database = Database::builder().set_cache_size(CACHE_BYTES).create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => {
                io::Error::new(io::ErrorKind::ResourceBusy, "in use by another daemon")
            }
            error => failed(error),
        })?;
        // Creates the table, so that it can be read.
        let begun = database.begin_write().map_err(failed)?;
        drop(begun.open_table(HANDLES).map_err(failed)?);
        begun.commit().map_err(failed)?;
        Ok(database)
    };
    guarded(open).or_else(|error| {
        if error.kind() == io::ErrorKind::ResourceBusy {
            return Err(error);
        }
        tracing::warn!(%error, path = %path.display(), "damaged: clients look up files with long handles again");
        OpenOptions::new().write(true).truncate(true).open(path)?;
        guarded(open)
    })
}

/// A damaged file may let the database panic.
fn guarded<T>(action: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|_| Err(failed("the table is damaged")))
}

fn read(database: &Database, hash: &Hash) -> io::Result<Option<Handle>> {
    let reading = database.begin_read().map_err(failed)?;
    let table = reading.open_table(HANDLES).map_err(failed)?;
    let found = table.get(&hash[..]).map_err(failed)?;
    Ok(found.map(|handle| handle.value().into()))
}

fn write(database: &Database, added: &[(Hash, Handle)]) -> io::Result<()> {
    let writing = database.begin_write().map_err(failed)?;
    {
        let mut table = writing.open_table(HANDLES).map_err(failed)?;
        for (hash, handle) in added {
            table.insert(&hash[..], &handle[..]).map_err(failed)?;
        }
    }
    writing.commit().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_damaged_table_is_begun_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("handles");
        for damaged in [&b"nonsense"[..], &[0; 70_000]] {
            std::fs::write(&path, damaged).unwrap();
            let handles = Handles::open(Some(&path)).unwrap();
            let handle: Handle = vec![7; 64].into();
            let id = handles.id(&handle);
            handles.write();
            drop(handles);
            let again = Handles::open(Some(&path)).unwrap();
            assert!(Handles::open(Some(&path)).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy));
            assert_eq!(run(again.handle(&id)), Ok(handle));
        }
    }

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn ids_lead_back_to_handles_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("handles");
        let all: Vec<Handle> = [1, 39, 40, 64, 128].iter().map(|len| vec![*len as u8; *len].into()).collect();
        let handles = Handles::open(Some(&path)).unwrap();
        let ids: Vec<FileId> = all.iter().map(|handle| handles.id(handle)).collect();
        run(async {
            for (id, handle) in ids.iter().zip(&all) {
                assert!(id.0.len() <= FILE_ID_MAX);
                assert_eq!(handles.handle(id).await.as_ref(), Ok(handle));
            }
        });
        handles.write();
        drop(handles);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "handles are not for everybody");
        let again = Handles::open(Some(&path)).unwrap();
        run(async {
            for (id, handle) in ids.iter().zip(&all) {
                assert_eq!(again.handle(id).await.as_ref(), Ok(handle));
            }
            let unknown = again.id(&vec![5; 50].into());
            let other = Handles::open(None).unwrap();
            for nonsense in [&unknown.0[..], &[], &[SHORT], &[LONG, 2], &[9, 9]] {
                assert_eq!(other.handle(&FileId(nonsense.into())).await, Err(Errno::STALE), "{nonsense:?}");
            }
        });
    }
}
