//! Connections: TCP, Unix sockets, TLS over either; replies gathered from many pieces of memory, or sent
//! from the page cache.

mod listener;
mod message;
mod reader;
mod stream;
mod writer;

pub(crate) use listener::is_ours;
pub use listener::{Address, Listener, Socket};
pub use message::{Body, Message};
pub use reader::{Peer, Reader};
pub use stream::{Plain, Stream};
pub use writer::Writer;
