//! Opening an export: its storage, then its layers.

use crate::backend::{Backend, FileBackend, FileKey, MemoryBackend, Mode};
use crate::cache::persist::{CacheFile, CacheFileError, Leftover};
use crate::export::{CHUNK, CHUNK_MAX, CHUNK_MIN, Export, Spec};
use crate::fence::Fence;
use crate::identity::{self, Identity};
use crate::layer::{LayerError, Opening, Role, Stripe};
use crate::served::Served;
use crate::source::Source;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use thruway_engine::Reactors;

/// A disk that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Its storage.
    #[error("{}: {source}", path.display())]
    File {
        /// The file or device.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// There is not so much memory.
    #[error("mem:{size}: {source}")]
    Memory {
        /// Bytes.
        size: u64,
        /// The reason.
        source: io::Error,
    },
    /// Its members do not fit together.
    #[error("stripe: {0}")]
    Stripe(io::Error),
    /// A layer.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// Memory is not read or written in any mode.
    #[error("mode= has no effect on a disk in memory; leave it out")]
    ModeOfMemory,
    /// Two caches that are to outlive the daemon.
    #[error("only one layer of a disk may be cache=...:writeback (use :volatile for all of them otherwise)")]
    TwoCaches,
    /// The cache of an earlier daemon cannot be used.
    #[error(transparent)]
    CacheFile(#[from] CacheFileError),
    /// The cache of an earlier daemon has blocks that are not on the disk, which is opened read-only.
    #[error("{0} blocks that an earlier daemon acknowledged are not on the disk yet: serve it once without 'ro'")]
    Unwritten(usize),
    /// Blocks in the cache of an earlier daemon cannot be written to the disk.
    #[error("writing what an earlier daemon had in its cache: {0}")]
    Replay(io::Error),
}

impl Spec {
    /// Opens the disk and puts the layers on it; a cache is spread over the nodes of the reactors.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(&self, reactors: Option<&Reactors>) -> Result<Export, OpenError> {
        // Under an overlay nothing is changed.
        let overlaid = self.roles().any(|role| role.hides_changes);
        let cached = self.roles().any(|role| role.caches);
        self.check_mode()?;
        let mode = self.mode.unwrap_or(if cached { Mode::Direct } else { Mode::Writeback });
        let read_only = self.read_only || overlaid;
        let mut backend = open_source(&self.source, mode, read_only)?;
        let own = identity::of(&self.source);
        let cache_file = self.kept(&own, &backend, read_only, reactors)?;
        let mut opening = Opening { reactors, cache_file };
        let chunk = self.chunk.unwrap_or_else(|| hinted(backend.geometry().preferred));
        for layer in &self.layers {
            backend = layer.config.put_on(backend, &mut opening)?;
        }
        let read_only = self.read_only || backend.geometry().read_only;
        let description = self.source.describe();
        // What lies under an overlay is another disk than what is seen of it, and each overlay is one of its own.
        let found = || if overlaid { thruway_engine::random::random() } else { own };
        let identity = self.uuid.unwrap_or_else(found);
        Ok(Export {
            name: self.name.clone(),
            description,
            identity,
            is_lasting: self.source.is_lasting() && !overlaid,
            kind: self.source.kind(),
            backend: Arc::new(Served::new(backend)),
            read_only,
            chunk,
            target: self.target.clone(),
            sector: self.sector,
            allow: self.allow.clone(),
            fence: Fence::default(),
        })
    }
}

impl Spec {
    /// Checks that disks can be opened together, by reactors on so many memory nodes. Returns the errors, with the names of the exports.
    /// Locks and creates nothing, since another daemon may serve these disks.
    pub fn check(specs: &[Spec], nodes: usize) -> Vec<(&str, OpenError)> {
        let mut files = HashMap::new();
        let mistakes = specs.iter().flat_map(|spec| {
            let mistakes = spec.mistakes(nodes, &mut files);
            mistakes.into_iter().map(|mistake| (&*spec.name, mistake))
        });
        mistakes.collect()
    }

    fn mistakes(&self, nodes: usize, files: &mut Files) -> Vec<OpenError> {
        let read_only = self.read_only || self.roles().any(|role| role.hides_changes);
        let mut mistakes = Vec::new();
        check_source(&self.source, read_only, files, &mut mistakes);
        mistakes.extend(self.layers.iter().filter_map(|layer| layer.config.check(nodes).err().map(OpenError::Layer)));
        mistakes.extend(self.check_caches(read_only).err());
        mistakes.extend(self.check_mode().err());
        mistakes
    }

    fn check_mode(&self) -> Result<(), OpenError> {
        if self.mode.is_some() && self.source.paths().is_empty() { Err(OpenError::ModeOfMemory) } else { Ok(()) }
    }

    /// Number of caches that outlive the daemon: at most one.
    fn check_caches(&self, read_only: bool) -> Result<usize, OpenError> {
        if !self.source.is_lasting() || read_only {
            return Ok(0);
        }
        let count = self.roles().filter(|role| role.is_lasting).count();
        if count > 0 && self.roles().filter(|role| role.writes_back).count() > 1 {
            return Err(OpenError::TwoCaches);
        }
        Ok(count)
    }

    fn roles(&self) -> impl Iterator<Item = Role> {
        self.layers.iter().map(|layer| layer.config.role())
    }

    /// Opens the file of the disk's write-back cache, if it needs one. First writes the blocks of an earlier daemon to the disk.
    fn kept(
        &self,
        own: &Identity,
        disk: &Arc<dyn Backend>,
        read_only: bool,
        reactors: Option<&Reactors>,
    ) -> Result<Option<CacheFile>, OpenError> {
        if !self.source.is_lasting() {
            return Ok(None);
        }
        let count = self.check_caches(read_only)?;
        let Some(file) = CacheFile::open(own, &identity::stamp(&self.source), count > 0)? else { return Ok(None) };
        let file = match file.leftover()? {
            None => file,
            Some(left) if read_only => return Err(OpenError::Unwritten(left.len())),
            Some(left) => replay(file, left, disk, reactors)?,
        };
        if count > 0 {
            return Ok(Some(file));
        }
        file.remove();
        Ok(None)
    }
}

/// Writes the blocks in the cache of an earlier daemon to the disk.
fn replay(
    file: CacheFile,
    left: Leftover,
    disk: &Arc<dyn Backend>,
    reactors: Option<&Reactors>,
) -> Result<CacheFile, OpenError> {
    let lost = || OpenError::Replay(io::Error::other("no reactor to do it"));
    let reactors = reactors.ok_or_else(lost)?;
    let (tell, told) = std::sync::mpsc::channel();
    let (blocks, disk) = (left.len(), Arc::clone(disk));
    reactors.handles()[0].spawn(move || async move {
        let replayed = file.replay(&left, &*disk).await;
        let _ = tell.send(replayed.map(|bytes| (file, bytes)));
    });
    let (file, bytes) = told.recv().map_err(|_| lost())?.map_err(OpenError::Replay)?;
    tracing::warn!(blocks, bytes, "recovered unflushed blocks from the cache of a daemon that was killed");
    Ok(file)
}

/// Pieces that lie on one member of the storage each, so that members deliver them independently.
fn hinted(preferred: u32) -> u32 {
    let is_one = (CHUNK_MIN..=CHUNK_MAX).contains(&u64::from(preferred)) && preferred.is_power_of_two();
    if is_one { preferred } else { CHUNK }
}

/// First path of each file, and true if the file is opened read-only.
type Files = HashMap<FileKey, (PathBuf, bool)>;

/// As [`open_source`], without opening anything to write to it, and without locks.
fn check_source(source: &Source, read_only: bool, files: &mut Files, mistakes: &mut Vec<OpenError>) {
    match source {
        Source::Path(path) => {
            let failed = |source| OpenError::File { path: path.clone(), source };
            match FileBackend::check(path, read_only) {
                Err(error) => mistakes.push(failed(error)),
                // Each locks the file against the others, unless all only read.
                Ok(key) => match files.entry(key) {
                    Entry::Vacant(free) => drop(free.insert((path.clone(), read_only))),
                    Entry::Occupied(taken) if taken.get().1 && read_only => {}
                    Entry::Occupied(taken) => {
                        let why = format!("in use by this daemon as {}", taken.get().0.display());
                        mistakes.push(failed(io::Error::other(why)));
                    }
                },
            }
        }
        Source::Memory(size) => {
            let made = MemoryBackend::new(*size);
            mistakes.extend(made.err().map(|source| OpenError::Memory { size: *size, source }));
        }
        Source::Stripe { chunk, members } => {
            mistakes.extend(Stripe::check(members.len(), *chunk).err().map(OpenError::Stripe));
            members.iter().for_each(|member| check_source(member, read_only, files, mistakes));
        }
    }
}

fn open_source(source: &Source, mode: Mode, read_only: bool) -> Result<Arc<dyn Backend>, OpenError> {
    Ok(match source {
        Source::Path(path) => {
            let failed = |source| OpenError::File { path: path.clone(), source };
            Arc::new(FileBackend::open(path, mode, read_only).map_err(failed)?)
        }
        Source::Memory(size) => {
            let failed = |source| OpenError::Memory { size: *size, source };
            Arc::new(MemoryBackend::new(*size).map_err(failed)?)
        }
        Source::Stripe { chunk, members } => {
            let members: Result<_, _> = members.iter().map(|m| open_source(m, mode, read_only)).collect();
            Arc::new(Stripe::new(members?, *chunk).map_err(OpenError::Stripe)?)
        }
    })
}
