//! fio drives the fabric: reads are RDMA Reads, writes RDMA Writes, on memory that another process lends.
//!
//! [`Target`] lends the memory (`thruway bench region`), [`Remote`] works on it, `ffi` shows that to C, and `engine.c`, built
//! against the headers of the fio it is for (`cargo xtask fio`), makes an external engine of it.
//!
//! The two ends speak through connection private data only: the caller says [`GREETING`], the answer is the greeting, the
//! address, the key and the length of the memory.

pub mod ffi;
mod remote;
mod target;

pub use remote::{Finished, Remote};
pub use target::{Target, greeting_of};

/// First bytes of the private data of both ends; the digit is the version.
pub const GREETING: [u8; 4] = *b"TWR1";
