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

mod device;
mod doorbell;
mod endpoint;
mod listener;
mod set_up;
mod shared;
mod socket;

pub use device::Config;
pub use thruway_iwarp::mpa::{Preferences, ReadyToReceive};
