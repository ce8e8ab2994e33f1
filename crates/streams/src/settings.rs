//! How a stream moves its bytes.

use crate::wire::{HEADER_LEN, MESSAGE_MAX, SPAN_MAX};
use std::time::Duration;

/// Receives kept beside those for data, so that what gives back can always be sent: for instance when both directions are full.
pub(crate) const RESERVED_RECEIVES: u16 = 4;

/// A scheme by name, as the published measurements tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Credit-based flow control (sections 2.2 and 4.2 of the dissertation): each message is copied to a buffer of fixed size at the peer.
    Credit,
    /// RDMA-based packetized flow control (chapter 6): the sender manages a ring at the peer, and coalesces when it is full.
    Packetized,
    /// As [`Scheme::Packetized`], and large buffers are read by the peer, or written to its buffer, while the sender waits (SrcAvail and SinkAvail of SDP).
    Rendezvous,
    /// As [`Scheme::Rendezvous`], but the sender goes on at once, with its buffer protected from being written to (AZ-SDP, chapter 5).
    ZeroCopy,
    /// Small messages as in [`Scheme::Credit`], others as in [`Scheme::Packetized`], large ones as in [`Scheme::Rendezvous`].
    Adaptive,
}

impl Scheme {
    /// All of them.
    pub const ALL: [Scheme; 5] =
        [Scheme::Credit, Scheme::Packetized, Scheme::Rendezvous, Scheme::ZeroCopy, Scheme::Adaptive];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Credit => "credit",
            Scheme::Packetized => "packetized",
            Scheme::Rendezvous => "rendezvous",
            Scheme::ZeroCopy => "zero-copy",
            Scheme::Adaptive => "adaptive",
        }
    }

    /// The scheme of this name.
    pub fn from_name(name: &str) -> Option<Scheme> {
        Scheme::ALL.into_iter().find(|scheme| scheme.name() == name)
    }

    /// Whether large buffers go without being copied.
    pub(crate) fn has_rendezvous(self) -> bool {
        matches!(self, Scheme::Rendezvous | Scheme::ZeroCopy | Scheme::Adaptive)
    }
}

/// What becomes of a thread that writes to memory that is being sent ([`Connection::send_asynchronously`](crate::Connection::send_asynchronously)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnWrite {
    /// It waits until the peer has read the memory.
    Block,
    /// The bytes are put elsewhere, if the peer has not begun to read them, and it goes on.
    Copy,
}

/// What an end is set up with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// How this end sends.
    pub scheme: Scheme,
    /// Messages that the peer may send before the first of them has been read: 4 to 4096.
    pub credits: u16,
    /// Bytes of each of their buffers, with a header of 16: 72 to 1 GiB.
    pub receive_len: u32,
    /// Bytes of the ring that the peer may write to, 0 to 1 GiB; with 0 it sends as in [`Scheme::Credit`].
    pub ring_len: u32,
    /// Bytes that are copied before a send waits: 1 to 1 GiB.
    pub stage_len: u32,
    /// Receives after which they are given back, if no message goes to the peer anyway; half of the credits where it is `None`.
    pub acknowledge_after: Option<u16>,
    /// Messages that go to the peer anyway give back, too.
    pub piggyback: bool,
    /// From how many bytes on a buffer is not copied.
    pub zero_copy_min: u32,
    /// How long such a buffer waits for the peer to take it before it is copied after all.
    pub source_timeout: Duration,
    /// What becomes of a thread that writes to memory that is being sent.
    pub on_write: OnWrite,
    /// Of a hundred buffers that are sent without waiting, as many may be written to too early; above that, senders wait.
    pub faults_max_percent: u32,
    /// Messages keep their boundaries: streaming is off. Both ends must agree on that.
    pub messages: bool,
}

impl Settings {
    /// What the scheme is best off with.
    pub fn of(scheme: Scheme) -> Settings {
        let (credits, receive_len, ring_len) = match scheme {
            // The reference setting of the dissertation: 32 credits of 64 KiB.
            Scheme::Credit => (32, 64 << 10, 0),
            Scheme::Packetized => (64, 128, 1 << 20),
            Scheme::Rendezvous | Scheme::ZeroCopy => (64, 128, 1 << 20),
            Scheme::Adaptive => (64, 1024, 1 << 20),
        };
        Settings {
            scheme,
            credits,
            receive_len,
            ring_len,
            stage_len: 1 << 20,
            acknowledge_after: None,
            piggyback: true,
            zero_copy_min: 256 << 10,
            source_timeout: Duration::from_millis(20),
            on_write: OnWrite::Copy,
            faults_max_percent: 5,
            messages: false,
        }
    }

    /// Receives to post.
    pub fn receives(&self) -> u16 {
        self.credits + RESERVED_RECEIVES
    }

    /// What is wrong with them, if anything is: the name, the value, the bounds.
    pub fn check(&self) -> Result<(), (&'static str, u64, u64, u64)> {
        let span = u64::from(SPAN_MAX);
        let bounds = [
            ("credits", self.credits.into(), 4, 4096),
            ("bytes of a receive", self.receive_len.into(), 2 * MESSAGE_MAX as u64, span),
            ("bytes of the ring", self.ring_len.into(), 0, span),
            ("bytes copied before a send waits", self.stage_len.into(), 1, span),
            ("bytes from which a buffer is not copied", self.zero_copy_min.into(), 1, u32::MAX.into()),
        ];
        match bounds.into_iter().find(|&(_, value, least, most)| !(least..=most).contains(&value)) {
            Some(wrong) => Err(wrong),
            None => Ok(()),
        }
    }

    /// Bytes of data that fit into a message to a peer with receives of this length, by this scheme, without using the ring.
    pub(crate) fn data_max(&self, receive_len: u32) -> u32 {
        receive_len - HEADER_LEN as u32
    }
}
