//! User-space iWARP: the core of `thruway-iwarp` over Linux's TCP sockets.
//!
//! | file | what |
//! |---|---|
//! | `endpoint` | one queue pair's socket |
//! | `listener` | listening and inbound set-up |
//! | `set_up` | which connections in set-up give way to others |
//! | `device` | the device as its consumer holds it |
//! | `config` | its configuration |
//! | `context` | epoll, timer, tables: drives sockets and queue pairs |
//! | `wakeups` | threads that wait for the device |
//! | `completions` | completion queues |
//! | `region` | registered memory |
//! | `doorbell` | who sleeps, and who has to be woken |
//! | `shared` | handles of completion queues, shared receive queues |
//! | `socket` | socket options and vectored calls |
//! | `transport` | TCP, or the rings of [`crate::shm`], which has the rest in common |

mod completions;
mod config;
mod context;
mod device;
mod doorbell;
mod endpoint;
mod listener;
mod region;
mod set_up;
mod shared;
mod socket;
mod transport;
mod wakeups;

pub use config::Config;
pub(crate) use device::open_shm;
pub use thruway_iwarp::mpa::{Preferences, ReadyToReceive};
