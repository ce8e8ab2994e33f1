//! Isolation of panics: a bug in one connection ends that connection, as an error would.

use futures_util::FutureExt;
use std::io;
use std::panic::AssertUnwindSafe;

/// Runs a connection and turns a panic into an error, so that its caller cleans up after either in the same way.
///
/// # Errors
/// Those of the connection; of kind `Other` if it panicked.
pub async fn catch<T>(connection: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    // The connection's own state is dropped with it. Shared state is behind locks under which nothing panics; should it happen
    // all the same, the lock is poisoned, and whatever takes it next panics, and ends, too.
    AssertUnwindSafe(connection).catch_unwind().await.unwrap_or_else(|_| Err(io::Error::other("a bug of the server")))
}
