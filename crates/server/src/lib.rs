//! Shared infrastructure of network services: from a listening socket to a connection with its buffers.
//!
//! - [`listener`]: addresses, listening sockets, accepted connections.
//! - [`tls`]: certificates from files, and the names in those of clients.
//! - [`acceptor`]: accepts the connections of a protocol, and shuts them down in an orderly way.
//! - [`admission`]: the origins of connections take turns where each handshake costs a thread.
//! - [`turns`]: they take turns for whatever of which little may be in progress at a time.
//! - [`caller`]: the host that a task works for.
//! - [`connection_limit`]: unauthenticated connections are evicted when others need their places.
//! - [`stream`], [`reader`], [`writer`]: connections, plain or TLS, split into two halves. What is sent is a
//!   [`message`]: headers, and bodies gathered from memory of several kinds or straight from the page cache.
//! - [`send_queue`]: the unsent messages of one connection, bounded.
//! - [`budget`]: limit of data that a connection receives before the reactor runs other tasks.
//! - [`slices`]: hosts share the time of a reactor equally.
//! - [`buffers`]: buffer pools of one connection, so that none waits for another's.
//! - [`rdma`]: RDMA connections: messages, and the peer's memory to read from and write to.
//! - [`service`]: what a daemon asks of each of its services.
//! - [`panics`]: a panic ends one connection.
//!
//! It knows no protocol. Services never import one another: what two of them need is here, or in a crate below.

pub mod acceptor;
pub mod admission;
pub mod budget;
pub mod buffers;
pub mod caller;
pub mod connection_limit;
pub mod fair_queue;
mod flag;
pub mod listener;
pub mod message;
pub mod panics;
pub mod rdma;
pub mod reader;
pub mod send_queue;
pub mod service;
pub mod slices;
pub mod stream;
pub mod tls;
pub mod turns;
pub mod writer;

pub use acceptor::{Acceptor, ConnectionKind};
pub use budget::Budget;
pub use buffers::Buffers;
pub use connection_limit::Permit;
pub use flag::Flag;
pub use listener::{Address, ListenError, Listener, Socket};
pub use message::{Body, Message};
pub use reader::{Peer, Reader};
pub use send_queue::SendQueue;
pub use service::Service;
pub use stream::{Plain, Stream};
pub use writer::Writer;
