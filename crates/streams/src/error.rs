//! Why a call failed.

use crate::wire::Violation;
use std::io;
use thruway_fabric::{ConnectionError, Status};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device refuses.
    #[error(transparent)]
    Fabric(#[from] thruway_fabric::Error),
    /// A setting is outside its bounds.
    #[error("{what}: {value} is not between {least} and {most}")]
    Setting {
        /// Which.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The least that it may be.
        least: u64,
        /// The most.
        most: u64,
    },
    /// No memory for buffers.
    #[error("no memory for the buffers of a connection: {0}")]
    Memory(#[source] io::Error),
    /// The peer is not what it should be.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The ends want different things.
    #[error("the peer {0}")]
    Mismatch(&'static str),
    /// The connection has ended.
    #[error("connection ended: {0}")]
    Ended(ConnectionError),
    /// The peer has aborted, or closed without saying that its bytes are complete.
    #[error("connection reset by the peer")]
    Reset,
    /// This end has said that it sends nothing more, or the peer that it takes nothing more.
    #[error("nothing can be sent any more")]
    Shutdown,
    /// A message that cannot be copied whole.
    #[error("a message of {len} bytes, longer than the {most} that are copied before a send waits")]
    MessageTooLong {
        /// Its length.
        len: usize,
        /// The most.
        most: u32,
    },
    /// Time was over in the middle of a message.
    #[error("a message was cut when its time was over: nothing can be sent behind it")]
    MessageCut,
    /// An atomic operation on a word that is not at a multiple of 8.
    #[error("the word of an atomic operation is not at a multiple of 8: {0:#x}")]
    Unaligned(u64),
    /// A call for the other kind of connection.
    #[error("{0}")]
    WrongCall(&'static str),
    /// Flags that are not known.
    #[error("unknown flags {0:#x}: only MSG_DONTWAIT may be set")]
    Flags(i32),
    /// It would have to wait.
    #[error("the operation would have to wait")]
    WouldBlock,
    /// Time is over.
    #[error("timed out")]
    TimedOut,
    /// A part of memory that is not registered.
    #[error("{len} bytes at offset {offset} are outside the registered {size} bytes")]
    OutsideRegion {
        /// The offset.
        offset: u64,
        /// The length.
        len: u64,
        /// What is registered.
        size: u64,
    },
    /// A one-sided operation failed.
    #[error("the operation failed: {}", describe(*.0))]
    Operation(Status),
    /// Too many operations have not been reported.
    #[error("{0} operations are posted and have not been reported: poll for completions first")]
    QueueFull(u32),
}

fn describe(status: Status) -> &'static str {
    match status {
        Status::Success => "it did not",
        Status::LocalLength => "a message was longer than its receive",
        Status::RemoteAccess => "the peer says that the remote address, key or rights were wrong",
        Status::RemoteNoReceive => "the peer had no receive posted",
        Status::RemoteOperation => "the peer does not serve such a request",
        Status::ConnectionLost => "the connection was lost",
        Status::Flushed => "the connection had ended",
    }
}

impl Error {
    /// As an error number of `errno.h`.
    pub fn errno(&self) -> i32 {
        use errno::*;
        match self {
            Error::Fabric(thruway_fabric::Error::Io { source, .. }) => source.raw_os_error().unwrap_or(EIO),
            Error::Fabric(thruway_fabric::Error::Unsupported(_)) => EOPNOTSUPP,
            Error::Fabric(thruway_fabric::Error::QueueFull(_)) | Error::QueueFull(_) => ENOBUFS,
            Error::Fabric(thruway_fabric::Error::Connection { .. }) => ECONNREFUSED,
            Error::Fabric(_) | Error::Setting { .. } | Error::OutsideRegion { .. } | Error::Unaligned(_) => EINVAL,
            Error::WrongCall(_) | Error::Flags(_) => EINVAL,
            Error::Memory(_) => ENOMEM,
            Error::Violation(_) | Error::Mismatch(_) => EPROTO,
            Error::Ended(ConnectionError::TimedOut) | Error::TimedOut => ETIMEDOUT,
            Error::Ended(ConnectionError::Rejected { .. }) => ECONNREFUSED,
            Error::Ended(_) | Error::Reset => ECONNRESET,
            Error::Shutdown | Error::MessageCut => EPIPE,
            Error::WouldBlock => EAGAIN,
            Error::MessageTooLong { .. } => EMSGSIZE,
            Error::Operation(Status::RemoteAccess | Status::RemoteOperation) => EREMOTEIO,
            Error::Operation(_) => ECONNRESET,
        }
    }
}

/// Linux's error numbers, which are the same on all machines that Thruway runs on.
mod errno {
    pub(super) const EIO: i32 = 5;
    pub(super) const EAGAIN: i32 = 11;
    pub(super) const ENOMEM: i32 = 12;
    pub(super) const EINVAL: i32 = 22;
    pub(super) const EPIPE: i32 = 32;
    pub(super) const EPROTO: i32 = 71;
    pub(super) const EMSGSIZE: i32 = 90;
    pub(super) const EOPNOTSUPP: i32 = 95;
    pub(super) const ECONNRESET: i32 = 104;
    pub(super) const ENOBUFS: i32 = 105;
    pub(super) const ETIMEDOUT: i32 = 110;
    pub(super) const ECONNREFUSED: i32 = 111;
    pub(super) const EREMOTEIO: i32 = 121;
}
