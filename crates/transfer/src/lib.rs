//! RFTP: moves directory trees between hosts by RDMA writes into memory that the receiving end
//! grants, block by block, with credits.
//!
//! - [`wire`]: every message and header, pure codec.
//! - [`auth`]: keys, handshake, encryption of the control channel.
//! - [`access`]: who may do what.
//! - [`link`]: the queue pairs of a session.
//! - `protocol`: the two ends as state machines that do no I/O.
//! - [`source`], [`sink`]: the same two ends with a network and files.
//! - [`session`]: what they share.
//! - [`client`], [`daemon`]: who connects and who is connected to.

pub mod access;
pub mod auth;
mod channel_registry;
pub mod client;
pub mod daemon;
pub mod filter;
mod handshakes;
pub mod link;
mod protocol;
pub mod session;
pub mod sink;
pub mod source;
pub mod wire;

pub use thruway_engine::text::{escape, escape_message};

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
