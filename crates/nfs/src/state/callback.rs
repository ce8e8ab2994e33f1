//! Calls to clients, as far as the state needs to know of them. Version 4 makes the calls (`v4/callback.rs`).

use super::Stateid;
use crate::status::Status;
use std::any::Any;

/// Makes calls to the client of a session.
pub(crate) trait Callback: Any + Send + Sync {
    /// True if the client can be called.
    fn is_open(&self) -> bool;
}

/// A call to a client. The server needs no result but that the client has received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A lock that the owner waited for may be free (`CB_NOTIFY_LOCK`).
    Lock { handle: Box<[u8]>, owner: Box<[u8]> },
    /// The client is to return a delegation (`CB_RECALL`).
    Recall { handle: Box<[u8]>, stateid: Stateid },
    /// A copy has ended (`CB_OFFLOAD`).
    Copied { handle: Box<[u8]>, stateid: Stateid, result: Result<(), Status>, copied: u64, verifier: u64 },
}
