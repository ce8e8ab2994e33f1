//! Extended sockets: what RDMA has and sockets have not, beside a TCP connection that a program has already.
//!
//! The program connects, listens and accepts as it always did. When both ends have agreed to, by their own protocol, one calls
//! [`accept`] and the other [`connect`] with the connection; they find the best way to each other and have an [`ExtendedSocket`] then,
//! through which they lend each other memory, read and write it, count in it, and exchange bytes or messages. The TCP connection is
//! theirs as before: nothing of it is used up but the few bytes by which the two ends meet.
//!
//! ```no_run
//! use std::net::TcpStream;
//! use thruway_extended::{Options, connect};
//!
//! let tcp = TcpStream::connect("192.0.2.1:5000")?;
//! let socket = connect(&tcp, &Options::default())?;
//! println!("by {}", socket.provider());
//! socket.send(b"hello", None)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The ways, in the order in which they are tried: shared memory between processes of one user on one host; an RDMA device that both ends have;
//! iWARP in user space over TCP. What goes to another host is not encrypted, and needs [`Options::plaintext`].
//!
//! `examples/counter.rs` is a whole program; `include/thruway/extended.h` is the same for C.

#[doc(hidden)]
pub mod c;
mod calls;
mod contexts;
mod meeting;

pub use meeting::{Error, ExtendedSocket, Options, Provider, accept, connect};
pub use thruway_fabric::{Access, Buffer};
pub use thruway_streams::{
    Completion, Connection, Error as ConnectionError, REMOTE_REGION_LEN, Received, Region, RemoteRegion, Scheme,
};
