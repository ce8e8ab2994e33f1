//! Accelerated sockets, without the sockets: what two processes of one host do to carry on a TCP connection through shared memory.
//!
//! The TCP connection stays. It is the descriptor that the program knows, it tells of the peer's end and death, and it wakes what
//! sleeps on it, unless the other end is on another host. Each direction is a sequence of *runs*: bytes that go by TCP, then bytes that
//! go through a ring, then by TCP again, each ending at a byte that both ends agree on ([`Writer`], [`Reader`]). So a connection can be accelerated long after it was made,
//! and go back to plain TCP at any byte; a ring that is full overflows into TCP, which then blocks, refuses or times out as TCP does.

pub mod board;
mod direction;
pub mod iovecs;
pub mod meeting;
mod news;
mod relay;
mod segment;
pub mod settings;
pub mod signals;
pub mod startup;
pub mod stats;

pub use direction::{Broken, Found, PEEK_MAX, Reader, Return, SentAgain, Step, Tcp, Writer};
pub use news::News;
pub use relay::{Feedback, Inlet, Outlet, UPDATE_HEAD, Update};
pub use segment::{End, Over, RING_MAX, RING_MIN, Segment, WakeBy};
