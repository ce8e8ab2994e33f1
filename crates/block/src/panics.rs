//! Bugs that show as panics end one connection, and end it as an error would.

use futures_util::FutureExt;
use std::io;
use std::panic::AssertUnwindSafe;

/// Runs a connection. Its panic is an error, so that what comes after errors comes after it: nobody waits for what was under
/// way, and nothing of it stays.
pub(crate) async fn caught<T>(connection: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    // What is its own is dropped with it. What it shares with others is behind locks under which nothing panics; if it does all
    // the same, whoever comes to the lock next ends too, and says so.
    AssertUnwindSafe(connection).catch_unwind().await.unwrap_or_else(|_| Err(io::Error::other("a bug of the server")))
}
