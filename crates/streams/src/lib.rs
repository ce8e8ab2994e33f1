//! Byte streams, messages and one-sided operations over an RDMA connection.
//!
//! [`core`] is the protocol without I/O, [`wire`] its messages, [`Settings`] and [`Scheme`] how bytes are moved. [`Context`] and
//! [`Connection`] carry it out over any device of the fabric.

mod connection;
mod context;
pub mod core;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod leadership;
mod memory;
mod operations;
mod protect;
mod settings;
pub mod wire;

pub use connection::{AsynchronousSends, Connection, Received};
pub use context::{Context, Expected, Incoming, TOKEN_MAX};
pub use error::Error;
pub use operations::{Completion, REMOTE_REGION_LEN, Region, RemoteRegion};
pub use protect::can_protect;
pub use settings::{OnWrite, Scheme, Settings};
