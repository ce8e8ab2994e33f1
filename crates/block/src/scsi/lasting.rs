//! Reservations that outlive the daemon and a loss of power (APTPL, SPC-4 5.12.5).
//!
//! A cluster that has fenced a member relies on it across restarts of the daemon. The file is durable before the command that
//! asked for it is answered.

use super::reservation::KeptError;
use data_encoding::HEXLOWER;
use rustix::fs::Mode;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use thruway_fs::durable;

/// The file with the reservations of one disk.
#[derive(Debug, Clone)]
pub struct Lasting {
    path: PathBuf,
}

/// Kept reservations that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LastingError {
    /// The file cannot be read.
    #[error("reservations in {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is not one of ours, or damaged.
    #[error("reservations in {}: {source}; remove the file to give them up", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: KeptError,
    },
}

/// Longer is no file of ours.
const LEN_MAX: u64 = 1 << 20;

impl Lasting {
    /// The file for a disk, in the directory of a daemon's state.
    pub fn of(state: &Path, identity: &[u8; 16]) -> Lasting {
        let digits = HEXLOWER.encode(identity);
        Lasting { path: state.join(Lasting::DIRECTORY).join(digits) }
    }

    /// Where in the state the files of all disks are.
    pub const DIRECTORY: &'static str = "reservations";

    /// Whether a file there has a name that we would give it.
    pub fn is_name(name: &[u8]) -> bool {
        let digits = name.strip_suffix(durable::NEW_SUFFIX.as_bytes()).unwrap_or(name);
        digits.len() == 32 && digits.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
    }

    /// What has been kept.
    ///
    /// # Errors
    /// [`LastingError`].
    pub(super) fn load(&self) -> Result<Option<String>, LastingError> {
        let failed = |source| LastingError::Io { path: self.path.clone(), source };
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(&file, LEN_MAX), &mut text).map_err(failed)?;
        Ok(Some(text))
    }

    /// The file, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps this, or nothing any more; when it returns, that survives a loss of power.
    ///
    /// # Errors
    /// If it may not. What was kept before may be there or not.
    pub(super) fn save(&self, text: Option<&str>) -> io::Result<()> {
        match text {
            Some(text) => durable::replace(&self.path, text.as_bytes(), Mode::RUSR | Mode::WUSR),
            None => durable::remove(&self.path),
        }
    }
}
