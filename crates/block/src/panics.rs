//! Bugs that show as panics end one connection, and end it as an error would.

use futures_util::FutureExt;
use std::io;
use std::panic::AssertUnwindSafe;

/// Runs a connection. Its panic is an error, so that what comes after errors comes after it: nobody waits for what was under
/// way, and nothing of it stays.
pub(crate) async fn caught<T>(connection: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    // What it shares with others is behind locks that outlast a panic, or is dropped with it.
    AssertUnwindSafe(connection).catch_unwind().await.unwrap_or_else(|_| Err(io::Error::other("a bug of the server")))
}
