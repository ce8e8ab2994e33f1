//! The words of the verbs interface: requests, completions, capabilities and errors.
//!
//! # Ordering and completion rules
//!
//! These hold on every provider; the conformance suite checks them.
//!
//! 1. Requests of one send queue *start* in the order posted. Sends and writes are *placed* and
//!    *delivered* in that order. A read or an atomic starts in order, but a later send or write
//!    may take effect at the peer before the read has finished; [`SendFlags::FENCE`] on the
//!    later request makes it wait.
//! 2. Completions of one send queue are reported in the order posted.
//! 3. The completion of a send or a write says that its local memory may be used again. It does
//!    **not** say that the peer has the data: a later Send on the *same* queue pair, once
//!    received there, proves that every write posted before it has been placed (RFC 5040 §5.5).
//!    The completion of a read or an atomic says that the result is in local memory.
//! 4. Receives are consumed in the order posted, one for each Send-type message, and one for the
//!    immediate of a write that has one. Those of a shared receive queue are taken in the order posted too, by
//!    whichever of its queue pairs has a message first; they may finish in another.
//! 5. An unsignalled request makes no completion unless it fails; its place in the queue is free
//!    again when a later signalled request completes.
//! 6. On an error the request at fault completes with the reason, everything behind it and every
//!    posted receive with [`Status::Flushed`], and the connection ends. The receives of a shared receive queue
//!    stay for the other queue pairs.
//! 7. A window (`QueuePair::bind_window`) is bound in the order of its send queue: a Send posted later may tell
//!    the peer its key. A message of another queue pair may only after the binding has completed.
//! 8. A reader of remote memory that its owner changes gets some mixture of old and new bytes. Memory that a peer's write,
//!    or the result of a read, is arriving in must not be changed by anybody else until the message is complete: what
//!    is there then is not defined, and the iWARP provider with CRC on may find that the bytes do not fit their CRC
//!    and end the connection (segments of fewer than 512 bytes are exempt; the provider's `Config::crc` switches it off).

#![forbid(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

#[doc(hidden)]
pub mod sync;

bitflags::bitflags! {
    /// What a region's holder and its peers may do to it. Local reading is always allowed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Access: u32 {
        /// Receives, read results and atomic results may land here.
        const LOCAL_WRITE = 1;
        /// Peers may write.
        const REMOTE_WRITE = 2;
        /// Peers may read.
        const REMOTE_READ = 4;
        /// Peers may do atomics.
        const REMOTE_ATOMIC = 8;
        /// The memory need not stay in place: pages may come and go as the system likes
        /// (on-demand paging). Needs [`DeviceAttributes::on_demand`].
        const ON_DEMAND = 16;
        /// Peers may revoke the region by a Send with Invalidate. Windows can always be revoked by those who may use
        /// them; a region is usually several peers', and revoking it takes its local key with it.
        const REMOTE_INVALIDATE = 32;
    }
}

/// Keeps registered memory mapped.
pub type Owner = Arc<dyn std::any::Any + Send + Sync>;

/// One piece of registered memory: a scatter/gather element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// Address inside the region, in the region's own terms (virtual address, or an offset if it
    /// was registered zero-based).
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Local key of the region.
    pub lkey: u32,
}

/// Where in the peer's memory an operation works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Address in the peer's region, in that region's own terms.
    pub addr: u64,
    /// The peer's remote key (steering tag).
    pub rkey: u32,
}

bitflags::bitflags! {
    /// Modifiers of a send request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SendFlags: u32 {
        /// Report the completion.
        const SIGNALED = 1;
        /// Raise a solicited event at the receiver (sends only).
        const SOLICITED = 2;
        /// Wait for every earlier read and atomic of this queue pair.
        const FENCE = 4;
    }
}

/// The operation of a send request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    /// Consume a receive at the peer. `invalidate` names a remote key that the peer's device
    /// revokes before it reports the receive.
    Send {
        /// Remote key to revoke.
        invalidate: Option<u32>,
    },
    /// Place data in the peer's memory. With `immediate`, consume a receive there as well and
    /// report the value, after the data.
    Write {
        /// Target.
        remote: RemoteAddr,
        /// Value to report; needs [`DeviceAttributes::immediate`] and a peer that has it.
        immediate: Option<u32>,
    },
    /// Fetch from the peer's memory.
    Read {
        /// Source.
        remote: RemoteAddr,
    },
    /// If the 64-bit word equals `compare`, replace it with `swap`. Returns the old value in the
    /// single 8-byte element.
    CompareSwap {
        /// The word; its address a multiple of 8.
        remote: RemoteAddr,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Add to the 64-bit word. Returns the old value in the single 8-byte element.
    FetchAdd {
        /// The word; its address a multiple of 8.
        remote: RemoteAddr,
        /// Addend.
        add: u64,
    },
}

/// The local side of a send request.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    /// Registered memory: gathered for sends and writes, scattered to for reads and atomics. It
    /// belongs to the device until the request completes.
    Sges(&'a [Sge]),
    /// Copied while posting, at most [`DeviceAttributes::max_inline`] bytes; sends and writes only.
    Inline(&'a [u8]),
}

/// A request for the send queue.
#[derive(Debug, Clone, Copy)]
pub struct SendRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// With which local memory.
    pub payload: Payload<'a>,
    /// How.
    pub flags: SendFlags,
}

/// A request for the receive queue.
#[derive(Debug, Clone, Copy)]
pub struct RecvRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Where the message goes; empty if only immediates or empty messages are expected.
    pub sges: &'a [Sge],
}

/// What a completion is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CompletionOp {
    /// [`SendOp::Send`].
    Send,
    /// [`SendOp::Write`].
    Write,
    /// [`SendOp::Read`].
    Read,
    /// [`SendOp::CompareSwap`].
    CompareSwap,
    /// [`SendOp::FetchAdd`].
    FetchAdd,
    /// `QueuePair::bind_window`.
    Bind,
    /// A received message.
    Recv,
    /// A received write with immediate.
    RecvWriteImmediate,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// Done.
    Success,
    /// The message did not fit the posted receive.
    LocalLength,
    /// The peer says the remote address, key or rights were wrong.
    RemoteAccess,
    /// The peer had no receive posted.
    RemoteNoReceive,
    /// The peer says the request was not one it serves.
    RemoteOperation,
    /// The connection was lost while the request was in progress.
    ConnectionLost,
    /// Not executed: the queue pair had already failed or was closed.
    Flushed,
}

/// A finished request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkCompletion {
    /// From the request.
    pub wr_id: u64,
    /// How it ended; the fields below hold only for [`Status::Success`].
    pub status: Status,
    /// What it was.
    pub op: CompletionOp,
    /// Bytes transferred.
    pub len: u32,
    /// Number of the queue pair.
    pub qp_num: u32,
    /// The write's immediate.
    pub immediate: Option<u32>,
    /// The key that the sender revoked with this message.
    pub invalidated: Option<u32>,
    /// The sender asked for a solicited event; always false where the device does not tell (verbs).
    pub solicited: bool,
}

impl WorkCompletion {
    /// Of a window that has been bound.
    pub fn of_binding(wr_id: u64, qp_num: u32) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status: Status::Success,
            op: CompletionOp::Bind,
            len: 0,
            qp_num,
            immediate: None,
            invalidated: None,
            solicited: false,
        }
    }
}

/// Sizes of a queue pair's queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairCaps {
    /// Send requests outstanding.
    pub max_send_wr: u32,
    /// Receives outstanding; without meaning where they come from a shared receive queue.
    pub max_recv_wr: u32,
    /// Elements of one request.
    pub max_sge: u32,
}

impl Default for QueuePairCaps {
    fn default() -> QueuePairCaps {
        QueuePairCaps { max_send_wr: 128, max_recv_wr: 128, max_sge: 4 }
    }
}

/// What a device can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Name of the provider: `iwarp`, …
    pub provider: &'static str,
    /// Name of the device.
    pub name: String,
    /// Most elements of one request.
    pub max_sge: u32,
    /// Most requests of one queue.
    pub max_queue: u32,
    /// Most completions of one completion queue.
    pub max_cqe: usize,
    /// Most bytes of one inline payload.
    pub max_inline: u32,
    /// Most reads and atomics outstanding in each direction.
    pub max_read_depth: u16,
    /// Most bytes of private data of a connection request.
    pub max_private_data: usize,
    /// Most bytes of private data of its acceptance.
    pub max_reply_data: usize,
    /// Atomics are offered (the peer must have them too).
    pub atomics: bool,
    /// Write with immediate is offered (the peer must have it too).
    pub immediate: bool,
    /// Peers may revoke keys of ours by Send with Invalidate: those of windows (`QueuePair::bind_window`) on
    /// every such device, those of registrations where there are no windows or domain windows too.
    pub remote_invalidate: bool,
    /// A queue pair's window costs a request at most; where this is false, it is a registration of its own.
    pub windows: bool,
    /// A window for the peers of a protection domain costs no more; where this is false, it is a registration.
    pub domain_windows: bool,
    /// Most receives of one shared receive queue; 0 if there are none.
    pub max_srq_wr: u32,
    /// What peers read, write and change in registered memory is served without this process; where this is false, it
    /// is served while somebody polls a completion queue or waits for the device.
    pub auto_progress: bool,
    /// Memory can be registered without being held in place ([`Access::ON_DEMAND`]).
    pub on_demand: bool,
}

/// Wishes for a connection.
#[derive(Debug, Clone)]
pub struct ConnectParams {
    /// Handed to the peer's consumer with the request (or reply).
    pub private_data: Vec<u8>,
    /// Inbound reads and atomics to hold for the peer.
    pub ird: u16,
    /// Outbound reads and atomics wanted.
    pub ord: u16,
    /// Give up on a peer that has not answered by then.
    pub timeout: Duration,
}

impl Default for ConnectParams {
    fn default() -> ConnectParams {
        ConnectParams { private_data: Vec::new(), ird: 32, ord: 32, timeout: Duration::from_secs(15) }
    }
}

/// A breach of the transport's protocol, by the transport's own number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct ProtocolError {
    /// The number; over iWARP, layer, error type and error code of a Terminate message, eight bits each.
    pub code: u32,
    /// What it means.
    pub text: String,
}

impl ProtocolError {
    /// A breach by its number.
    pub fn new(code: u32, text: impl Into<String>) -> ProtocolError {
        ProtocolError { code, text: text.into() }
    }
}

/// Why a connection ended or never came to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectionError {
    /// The peer's consumer refused.
    #[error("the peer refused the connection{}", reason(private_data))]
    Rejected {
        /// Private data of the refusal.
        private_data: Vec<u8>,
    },
    /// No answer in time.
    #[error("no answer within the connection timeout")]
    TimedOut,
    /// TCP could not connect, or was lost in mid-message.
    #[error("cannot connect, or connection lost: {0}")]
    Lost(String),
    /// The peer broke the protocol and was told so.
    #[error("the peer broke the protocol: {0}")]
    Protocol(ProtocolError),
    /// The peer says that we broke the protocol.
    #[error("the peer ended the connection: {0}")]
    Terminated(ProtocolError),
    /// The peer closed in order, between messages.
    #[error("the peer closed the connection")]
    Closed,
}

/// What a refusal says, if it is text.
fn reason(private_data: &[u8]) -> String {
    let text =
        std::str::from_utf8(private_data).unwrap_or("").trim_matches(|c: char| c.is_control() || c.is_whitespace());
    if text.is_empty() || text.contains(char::is_control) { String::new() } else { format!(": {text}") }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request or parameter is outside what the device or queue allows.
    #[error("{what}: {got} exceeds the limit of {limit}")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// The value asked for.
        got: u64,
        /// The largest value possible.
        limit: u64,
    },
    /// The queue has no room; poll for completions first.
    #[error("{0} queue is full")]
    QueueFull(&'static str),
    /// An element lies outside its region, names no region, or the region lacks local write.
    #[error("local protection error: element {addr:#x}+{len} with key {lkey:#x}: {why}")]
    LocalProtection {
        /// Element address.
        addr: u64,
        /// Element length.
        len: u64,
        /// Element key.
        lkey: u32,
        /// The rule that was broken.
        why: &'static str,
    },
    /// The operation is not possible with this device, peer, or combination of parameters.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// The queue pair is not in a state for this call.
    #[error("queue pair {qp_num} is {state}")]
    State {
        /// The queue pair's number.
        qp_num: u32,
        /// Its state.
        state: &'static str,
    },
    /// The operating system refused.
    #[error("{op}{}: {source}", peer.map(|p| format!(" {p}")).unwrap_or_default())]
    Io {
        /// The operation.
        op: &'static str,
        /// The peer.
        peer: Option<SocketAddr>,
        /// The cause.
        source: io::Error,
    },
    /// The connection could not be made.
    #[error("{peer}: {cause}")]
    Connection {
        /// The peer.
        peer: SocketAddr,
        /// The cause.
        cause: ConnectionError,
    },
}

impl From<thruway_memory::MapError> for Error {
    fn from(error: thruway_memory::MapError) -> Error {
        Error::io("memory for blocks", error)
    }
}

impl Error {
    /// What the operating system refused.
    pub fn io(op: &'static str, source: impl Into<io::Error>) -> Error {
        Error::Io { op, peer: None, source: source.into() }
    }
}

/// Result of a fabric call.
pub type Result<T, E = Error> = std::result::Result<T, E>;
