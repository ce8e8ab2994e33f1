//! Storage of an export's data: files, block devices, memory, or a stripe over several of them.

use std::path::{Path, PathBuf};
use thruway_engine::units::{Invalid, parse_size};

/// Storage of an export's data.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// A file or a block device.
    Path(PathBuf),
    /// Memory, in bytes.
    Memory(u64),
    /// Several, chunk by chunk.
    Stripe {
        /// Bytes.
        chunk: u64,
        /// Two or more.
        members: Vec<Source>,
    },
}

impl Source {
    /// Paths of the files and devices that hold the data; none for memory.
    pub fn paths(&self) -> Vec<&Path> {
        match self {
            Source::Path(path) => vec![path],
            Source::Memory(_) => Vec::new(),
            Source::Stripe { members, .. } => members.iter().flat_map(Source::paths).collect(),
        }
    }

    /// Parses a path, `mem:SIZE` or `stripe:CHUNK:PATH:PATH…`.
    ///
    /// # Errors
    /// [`Invalid`].
    pub(crate) fn parse(text: &str) -> Result<Source, Invalid> {
        if let Some(size) = text.strip_prefix("mem:") {
            return Ok(Source::Memory(parse_size(size)?));
        }
        if let Some(rest) = text.strip_prefix("stripe:") {
            let mut words = rest.split(':').peekable();
            let chunk = parse_size(words.next().unwrap_or(""))?;
            let mut members = Vec::new();
            while let Some(word) = words.next() {
                members.push(match word {
                    "mem" => Source::parse(&format!("mem:{}", words.next().unwrap_or("")))?,
                    path => Source::parse(path)?,
                });
            }
            if members.len() < 2 {
                return Err(Invalid::new("stripe", text, "stripe:CHUNK:PATH:PATH[:PATH...]"));
            }
            return Ok(Source::Stripe { chunk, members });
        }
        match text {
            "" => Err(Invalid::new("disk", text, "a path, mem:SIZE or stripe:CHUNK:PATH:PATH...")),
            path => Ok(Source::Path(path.into())),
        }
    }

    /// True if all of the data outlives this process.
    pub(crate) fn is_lasting(&self) -> bool {
        match self {
            Source::Path(_) => true,
            Source::Memory(_) => false,
            Source::Stripe { members, .. } => members.iter().all(Source::is_lasting),
        }
    }

    /// Description for clients, without paths.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Source::Path(path) if path.starts_with("/dev") => "a device",
            Source::Path(_) => "a file",
            Source::Memory(_) => "memory",
            Source::Stripe { .. } => "a stripe",
        }
    }

    /// Description for the operator.
    pub(crate) fn describe(&self) -> String {
        match self {
            Source::Path(path) => path.display().to_string(),
            Source::Memory(size) => format!("{size} bytes of memory"),
            Source::Stripe { members, .. } => format!("a stripe over {} members", members.len()),
        }
    }
}
