//! RFTP: moves directory trees between hosts by RDMA writes into memory that the receiving end
//! grants, block by block, with credits.
//!
//! A tree from here to a daemon, from another program:
//!
//! ```no_run
//! use std::sync::atomic::Ordering;
//! use thruway_transfer::auth::{Credentials, KeyPair};
//! use thruway_transfer::client::{Job, Remote};
//!
//! let key = Credentials::Keys(KeyPair::load("id".as_ref())?);
//! let client = thruway_transfer::Client::new()?;
//! let remote = Remote::new("192.0.2.1:7117".parse()?, key);
//! // The daemon's key is remembered there, and refused when it has changed.
//! let remote = Remote { known_hosts: Some("known_hosts".into()), ..remote };
//! let transfer = client.start(Job::push(remote, "/srv/results", "data", "2026/"))?;
//! while !transfer.is_finished() {
//!     println!("{} bytes", transfer.progress().bytes.load(Ordering::Relaxed));
//!     std::thread::sleep(std::time::Duration::from_secs(1));
//! }
//! println!("{:?}", transfer.wait()?.summary);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/push.rs` and `examples/serve.rs` are both ends as programs.
//!
//! - [`wire`]: every message and header, pure codec.
//! - [`auth`]: keys, handshake, encryption of the control channel.
//! - [`access`]: who may do what.
//! - [`link`]: the queue pairs of a session.
//! - `protocol`: the two ends as state machines that do no I/O.
//! - [`source`], [`sink`]: the same two ends with a network and files.
//! - [`session`]: what they share.
//! - [`client`], [`daemon`]: who connects and who is connected to; [`Client`]: jobs in the background.

#![forbid(unsafe_code)]
pub mod access;
pub use thruway_auth as auth;
mod channel_registry;
pub mod client;
pub mod daemon;
pub mod filter;
pub mod link;
mod protocol;
pub mod session;
pub mod sink;
pub mod source;
mod transfer;
pub mod wire;

pub use thruway_engine::text::{escape, escape_message};
pub use transfer::{Client, Transfer};

/// The digest of a part of a file.
///
/// # Errors
/// If it cannot be read to its end.
fn digest_file(
    file: &std::fs::File,
    verify: thruway_engine::digest::Algorithm,
    offset: u64,
    len: u32,
) -> std::io::Result<[u8; thruway_engine::digest::DIGEST_LEN]> {
    use std::os::unix::fs::FileExt;
    thread_local! {
        static BUFFER: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    if verify == thruway_engine::digest::Algorithm::None {
        return Ok([0; thruway_engine::digest::DIGEST_LEN]);
    }
    // The whole piece at once: the digest is of all of it, and a block's length is bounded.
    BUFFER.with_borrow_mut(|buffer| {
        buffer.resize(len as usize, 0);
        file.read_exact_at(buffer, offset)?;
        Ok(verify.digest(buffer))
    })
}

#[doc(hidden)]
pub mod fuzzing;
