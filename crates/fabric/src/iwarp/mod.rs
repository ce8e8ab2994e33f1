//! User-space iWARP: the core of `thruway-iwarp` over Linux's TCP sockets.
//!
//! | file | what |
//! |---|---|
//! | `endpoint` | one queue pair's socket |
//! | `listener` | listening and inbound set-up |
//! | `set_up` | which connections in set-up give way to others |
//! | `device` | epoll, timers, the tables |
//! | `doorbell` | who sleeps, and who has to be woken |
//! | `shared` | completion queues, shared receive queues |
//! | `socket` | socket options and vectored calls |
//! | `transport` | TCP, or the rings of [`crate::shm`], which has the rest in common |

mod device;
mod doorbell;
mod endpoint;
mod listener;
mod set_up;
mod shared;
mod socket;
mod transport;

pub use device::Config;
pub(crate) use device::open_shm;
pub use thruway_iwarp::mpa::{Preferences, ReadyToReceive};
