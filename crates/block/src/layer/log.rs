//! Writes a line for every operation.

use super::forward::Layer;
use super::kind::{LayerConfig, LayerError, LayerFile, LayerKind, Opening};
use crate::backend::{Backend, Op, Zero};
use std::fs::File;
use std::io::{self, LineWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use thruway_engine::Segment;
use thruway_engine::units::Invalid;

pub(super) const KIND: LayerKind = LayerKind {
    name: "log",
    syntax: "log=FILE",
    about: "Writes a line for every operation: seconds since the start, operation, offset, length, seconds, result.",
    parse: |value| match value {
        "" => Err(Invalid::new("log", value, "a file").into()),
        file => Ok(Arc::new(Config(file.into()))),
    },
};

/// A file that cannot be written to.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
struct NoFile {
    path: PathBuf,
    source: io::Error,
}

/// File for the lines.
#[derive(Debug)]
struct Config(PathBuf);

impl LayerConfig for Config {
    fn put_on(&self, below: Arc<dyn Backend>, _: &mut Opening<'_>) -> Result<Arc<dyn Backend>, LayerError> {
        let failed = |source| LayerError::new(NoFile { path: self.0.clone(), source });
        Ok(Arc::new(Log::new(below, &self.0).map_err(failed)?))
    }

    fn check(&self, _: usize) -> Result<(), LayerError> {
        use rustix::fs::{Access, AtFlags, CWD, accessat};
        let directory = self.0.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let may = match File::options().append(true).custom_flags(libc::O_NONBLOCK).open(&self.0) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                accessat(CWD, directory, Access::WRITE_OK, AtFlags::EACCESS).map_err(io::Error::from)
            }
            opened => opened.map(drop),
        };
        may.map_err(|source| LayerError::new(NoFile { path: self.0.clone(), source }))
    }

    fn files(&self) -> Option<LayerFile> {
        Some(LayerFile::Append(self.0.clone()))
    }
}

/// A log of operations: seconds since the start, operation, offset, length, seconds taken, result.
pub struct Log {
    inner: Arc<dyn Backend>,
    start: Instant,
    out: Mutex<LineWriter<File>>,
}

impl Log {
    /// Appends to a file.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn new(inner: Arc<dyn Backend>, path: &Path) -> io::Result<Log> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Log { inner, start: Instant::now(), out: Mutex::new(LineWriter::new(file)) })
    }

    fn logged<'a, T: 'a>(&'a self, what: &'static str, at: u64, len: u64, op: Op<'a, T>) -> Op<'a, T> {
        Box::pin(async move {
            let begun = Instant::now();
            let result = op.await;
            let how = match &result {
                Ok(_) => "ok".into(),
                Err(error) => error.to_string(),
            };
            let since = (begun - self.start).as_secs_f64();
            let line = format!("{since:.6} {what} {at} {len} {:.6} {how}", begun.elapsed().as_secs_f64());
            let mut out = self.out.lock().expect("no panics under the lock");
            if let Err(error) = writeln!(out, "{line}") {
                tracing::warn!(%error, "the log of a block export cannot be written");
            }
            result
        })
    }
}

impl Layer for Log {
    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.inner.prefetch(at, len)
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        self.logged("read", at, segment.len() as u64, self.inner.read(at, segment))
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        let what = if durable { "write-fua" } else { "write" };
        self.logged(what, at, segment.len() as u64, self.inner.write(at, segment, durable))
    }

    fn flush(&self) -> Op<'_, ()> {
        self.logged("flush", 0, 0, self.inner.flush())
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.logged("zero", at, len, self.inner.zero(at, len, how))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.logged("discard", at, len, self.inner.discard(at, len))
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<crate::backend::Extent>> {
        self.logged("extents", at, len, self.inner.extents(at, len, most))
    }
}
