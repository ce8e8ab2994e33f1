//! What a kind of layer defines: its syntax, its configuration, and how it is put on a disk.

use crate::backend::Backend;
use crate::cache::persist::CacheFile;
use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use thruway_engine::Reactors;
use thruway_engine::units::Invalid;

/// An invalid value of a layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerSyntaxError {
    /// A value that is not one of those expected.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A part of the value that has no effect without another part.
    #[error("{0} has no effect without {1}")]
    Without(&'static str, &'static str),
}

/// A layer that cannot be put on a disk. Its message names the layer, or the file at fault.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct LayerError(Box<dyn Error + Send + Sync>);

impl LayerError {
    /// The layer's own error.
    pub fn new(error: impl Error + Send + Sync + 'static) -> LayerError {
        LayerError(Box::new(error))
    }
}

/// A kind of layer: syntax, description and parser.
pub struct LayerKind {
    /// Name before the `=`.
    pub name: &'static str,
    /// `NAME=VALUE` with its parts, for messages and the book.
    pub syntax: &'static str,
    /// Description, one sentence.
    pub about: &'static str,
    /// Reads the value.
    pub parse: fn(&str) -> Result<Arc<dyn LayerConfig>, LayerSyntaxError>,
}

/// Configuration of a layer, before anything is opened.
pub trait LayerConfig: fmt::Debug + Send + Sync {
    /// Puts the layer on a disk.
    ///
    /// # Errors
    /// [`LayerError`].
    fn put_on(&self, below: Arc<dyn Backend>, opening: &mut Opening<'_>) -> Result<Arc<dyn Backend>, LayerError>;

    /// Checks that it can be put on a disk, for reactors on so many memory nodes. Leaves no file behind.
    ///
    /// # Errors
    /// [`LayerError`].
    fn check(&self, _nodes: usize) -> Result<(), LayerError> {
        Ok(())
    }

    /// Effects of the layer on the disk as a whole.
    fn role(&self) -> Role {
        Role::default()
    }

    /// Files of the layer beside the disk.
    fn files(&self) -> Option<LayerFile> {
        None
    }
}

/// Context in which layers are put on a disk.
pub struct Opening<'a> {
    /// Reactors of the services. A cache is spread over their nodes.
    pub reactors: Option<&'a Reactors>,
    /// The file for a cache that outlives the daemon.
    pub(crate) cache_file: Option<CacheFile>,
}

/// Effects of a layer on the disk as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Role {
    /// Keeps changes from the disk below. The two disks then have different identities.
    pub hides_changes: bool,
    /// Keeps data in memory.
    pub caches: bool,
    /// Acknowledges writes before the disk below has them.
    pub writes_back: bool,
    /// Acknowledged writes outlive the daemon.
    pub is_lasting: bool,
}

/// A file of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerFile {
    /// New files in this directory.
    Directory(PathBuf),
    /// The end of this file.
    Append(PathBuf),
}
