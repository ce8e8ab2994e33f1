//! Messages as bytes: what two ends of a stream send each other by RDMA Send, and what they say at the beginning.
//!
//! The message identifiers are those of the Sockets Direct Protocol (InfiniBand Architecture Specification, volume 1, annex A4) where
//! it has the message; [`Message::RingWritten`] and [`Message::Acknowledge`] are of the schemes that it does not have. All numbers
//! are big-endian.
//!
//! ```text
//!  0      1      2        4          8                12                16
//!  +------+------+--------+----------+----------------+-----------------+---------
//!  | type | flags|    0   |  length  | receives given | ring bytes given| body ...
//!  +------+------+--------+----------+----------------+-----------------+---------
//! ```
//!
//! The two numbers of the header are what the sender of the message has given back to its peer since the beginning, modulo 2^32:
//! receives that it has posted again, and bytes of its ring that have been read.

use thruway_fabric::RemoteAddr;

/// Bytes of a header.
pub const HEADER_LEN: usize = 16;
/// Bytes of the longest header and body together, but for [`Message::Data`].
pub const MESSAGE_MAX: usize = HEADER_LEN + 20;
/// Bytes of [`Hello`].
pub const HELLO_LEN: usize = 40;

/// The last part of a message of the program's, where streaming is off.
const END_OF_MESSAGE: u8 = 1;
/// [`Message::ReadComplete`] of a source that was withdrawn.
const WITHDRAWN: u8 = 2;

const DISCONNECT: u8 = 0x02;
const ABORT: u8 = 0x04;
const WRITE_COMPLETE: u8 = 0x05;
const READ_COMPLETE: u8 = 0x06;
const CANCEL_SOURCE: u8 = 0x08;
const CANCEL_SINK: u8 = 0x09;
const SINK_CANCELLED: u8 = 0x0a;
const RING_WRITTEN: u8 = 0xc0;
const ACKNOWLEDGE: u8 = 0xc1;
const DISCONNECTED: u8 = 0xc2;
const UPDATE_SOURCE: u8 = 0xc3;
const SOURCE_AVAILABLE: u8 = 0xfd;
const SINK_AVAILABLE: u8 = 0xfe;
const DATA: u8 = 0xff;

/// Why bytes of a peer are not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke the stream protocol: {0}")]
pub struct Violation(pub &'static str);

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// Bytes of the stream, behind the header.
    Data {
        /// How many.
        len: u32,
        /// The last of the program's message.
        end: bool,
    },
    /// The next bytes of the receiver's ring have been written.
    RingWritten {
        /// How many, at least one.
        len: u32,
        /// The last of the program's message.
        end: bool,
    },
    /// SrcAvail: the next bytes of the stream are to be read from the sender's memory.
    SourceAvailable {
        /// How many, at least one.
        len: u32,
        /// The last of the program's message.
        end: bool,
        /// Names the source in [`Message::ReadComplete`] and [`Message::CancelSource`].
        id: u32,
        /// Where they are.
        source: RemoteAddr,
    },
    /// SinkAvail: the next bytes of the stream may be written to the sender's memory, if nothing has been sent that it did not know of.
    SinkAvailable {
        /// How many at most, at least one.
        len: u32,
        /// Parts of the stream that the sender knows of: messages that carry or announce bytes of it, or its end.
        parts: u64,
        /// Where to.
        sink: RemoteAddr,
    },
    /// RdmaWrCompl: the next bytes of the stream have been written to the sink, which is used up.
    WriteComplete {
        /// How many, at least one.
        len: u32,
        /// The last of the program's message.
        end: bool,
    },
    /// RdmaRdCompl, GET_COMPLETE: bytes of a source have been read; it is used up.
    ReadComplete {
        /// The source.
        id: u32,
        /// How many; all of it unless it was withdrawn.
        len: u32,
        /// Answers [`Message::CancelSource`].
        withdrawn: bool,
    },
    /// A source that was announced is elsewhere now: its owner needs the memory. Only who holds the source's lock may say so, and the lock is
    /// free again behind it.
    UpdateSource {
        /// The source.
        id: u32,
        /// Where its bytes are.
        source: RemoteAddr,
    },
    /// SrcAvailCancel: what has not been read of the last source will come in another way.
    CancelSource {
        /// The source.
        id: u32,
    },
    /// SinkAvailCancel: the sink may not be written to any more.
    CancelSink,
    /// SinkCancelAck: it will not be.
    SinkCancelled,
    /// Nothing but what the header gives back.
    Acknowledge,
    /// DisConn: no more bytes follow.
    Disconnect,
    /// Everything up to [`Message::Disconnect`] has arrived.
    Disconnected,
    /// AbortConn: the sender takes no more bytes, and sends none.
    Abort,
}

/// A message and what its header gives back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Receives, in total, modulo 2^32.
    pub receives: u32,
    /// Bytes of the ring, in total, modulo 2^32.
    pub ring: u32,
    /// The message.
    pub message: Message,
}

impl Frame {
    /// Writes the message; the bytes of [`Message::Data`] belong behind it. Returns its length.
    pub fn encode(&self, to: &mut [u8; MESSAGE_MAX]) -> usize {
        let mut body = HEADER_LEN;
        let mut put = |bytes: &[u8]| {
            to[body..body + bytes.len()].copy_from_slice(bytes);
            body += bytes.len();
        };
        let ending = |end| if end { END_OF_MESSAGE } else { 0 };
        let (kind, flags, len) = match self.message {
            Message::Data { len, end } => (DATA, ending(end), len),
            Message::RingWritten { len, end } => (RING_WRITTEN, ending(end), len),
            Message::SourceAvailable { len, end, id, source } => {
                put(&source.addr.to_be_bytes());
                put(&source.rkey.to_be_bytes());
                put(&id.to_be_bytes());
                (SOURCE_AVAILABLE, ending(end), len)
            }
            Message::SinkAvailable { len, parts, sink } => {
                put(&sink.addr.to_be_bytes());
                put(&sink.rkey.to_be_bytes());
                put(&parts.to_be_bytes());
                (SINK_AVAILABLE, 0, len)
            }
            Message::WriteComplete { len, end } => (WRITE_COMPLETE, ending(end), len),
            Message::ReadComplete { id, len, withdrawn } => {
                put(&id.to_be_bytes());
                (READ_COMPLETE, if withdrawn { WITHDRAWN } else { 0 }, len)
            }
            Message::UpdateSource { id, source } => {
                put(&source.addr.to_be_bytes());
                put(&source.rkey.to_be_bytes());
                put(&id.to_be_bytes());
                (UPDATE_SOURCE, 0, 0)
            }
            Message::CancelSource { id } => {
                put(&id.to_be_bytes());
                (CANCEL_SOURCE, 0, 0)
            }
            Message::CancelSink => (CANCEL_SINK, 0, 0),
            Message::SinkCancelled => (SINK_CANCELLED, 0, 0),
            Message::Acknowledge => (ACKNOWLEDGE, 0, 0),
            Message::Disconnect => (DISCONNECT, 0, 0),
            Message::Disconnected => (DISCONNECTED, 0, 0),
            Message::Abort => (ABORT, 0, 0),
        };
        to[0] = kind;
        to[1] = flags;
        to[2..4].fill(0);
        to[4..8].copy_from_slice(&len.to_be_bytes());
        to[8..12].copy_from_slice(&self.receives.to_be_bytes());
        to[12..16].copy_from_slice(&self.ring.to_be_bytes());
        body
    }

    /// Reads a message of `total` bytes, of which `bytes` are the first [`MESSAGE_MAX`], or all.
    ///
    /// # Errors
    /// If they are not exactly a message.
    pub fn decode(bytes: &[u8], total: usize) -> Result<Frame, Violation> {
        let (header, body) = bytes.split_at_checked(HEADER_LEN).ok_or(Violation("a message without a header"))?;
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let (kind, flags, len) = (header[0], header[1], word(4));
        if header[2..4] != [0, 0] {
            return Err(Violation("reserved bytes are not zero"));
        }
        let allowed = match kind {
            DATA | RING_WRITTEN | SOURCE_AVAILABLE | WRITE_COMPLETE => END_OF_MESSAGE,
            READ_COMPLETE => WITHDRAWN,
            _ => 0,
        };
        if flags & !allowed != 0 {
            return Err(Violation("unknown flags"));
        }
        let end = flags & END_OF_MESSAGE != 0;
        let body_len = match kind {
            DATA => len as usize,
            SOURCE_AVAILABLE | UPDATE_SOURCE => 16,
            SINK_AVAILABLE => 20,
            READ_COMPLETE | CANCEL_SOURCE => 4,
            _ => 0,
        };
        if total != HEADER_LEN + body_len || (kind != DATA && body.len() < body_len) {
            return Err(Violation("a message of another length than it says"));
        }
        let needs_bytes = matches!(kind, RING_WRITTEN | SOURCE_AVAILABLE | SINK_AVAILABLE | WRITE_COMPLETE);
        let may_have_bytes = needs_bytes || matches!(kind, DATA | READ_COMPLETE);
        if (needs_bytes && len == 0) || (!may_have_bytes && len != 0) {
            return Err(Violation("a length that the message cannot have"));
        }
        let half = |at: usize| u32::from_be_bytes(body[at..at + 4].try_into().expect("four bytes"));
        let full = |at: usize| u64::from_be_bytes(body[at..at + 8].try_into().expect("eight bytes"));
        let remote = || RemoteAddr { addr: full(0), rkey: half(8) };
        let message = match kind {
            DATA => Message::Data { len, end },
            RING_WRITTEN => Message::RingWritten { len, end },
            SOURCE_AVAILABLE => Message::SourceAvailable { len, end, id: half(12), source: remote() },
            SINK_AVAILABLE => Message::SinkAvailable { len, parts: full(12), sink: remote() },
            WRITE_COMPLETE => Message::WriteComplete { len, end },
            READ_COMPLETE => Message::ReadComplete { id: half(0), len, withdrawn: flags & WITHDRAWN != 0 },
            UPDATE_SOURCE => Message::UpdateSource { id: half(12), source: remote() },
            CANCEL_SOURCE => Message::CancelSource { id: half(0) },
            CANCEL_SINK => Message::CancelSink,
            SINK_CANCELLED => Message::SinkCancelled,
            ACKNOWLEDGE => Message::Acknowledge,
            DISCONNECT => Message::Disconnect,
            DISCONNECTED => Message::Disconnected,
            ABORT => Message::Abort,
            _ => return Err(Violation("an unknown type of message")),
        };
        Ok(Frame { receives: word(8), ring: word(12), message })
    }
}

/// What an end has for its peer to send to: exchanged in the private data of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Receives that are always posted, or will be again.
    pub receives: u16,
    /// Bytes of each, with the header.
    pub receive_len: u32,
    /// Bytes of the ring; 0 if there is none.
    pub ring_len: u32,
    /// Where it is.
    pub ring: RemoteAddr,
    /// Words by which sources are locked, one for each that may be announced at a time; the address is 0 if there are none.
    pub locks: RemoteAddr,
    /// Messages keep their boundaries: streaming is off.
    pub messages: bool,
}

/// Fewest receives that an end may have.
pub const RECEIVES_MIN: u16 = 8;
/// Most bytes of a ring, or of one source or sink.
pub const SPAN_MAX: u32 = 1 << 30;

const MAGIC: [u8; 4] = *b"TWS1";
const MESSAGES: u16 = 1;

impl Hello {
    /// As bytes.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut to = [0; HELLO_LEN];
        to[..4].copy_from_slice(&MAGIC);
        to[4..6].copy_from_slice(&(if self.messages { MESSAGES } else { 0 }).to_be_bytes());
        to[6..8].copy_from_slice(&self.receives.to_be_bytes());
        to[8..12].copy_from_slice(&self.receive_len.to_be_bytes());
        to[12..16].copy_from_slice(&self.ring_len.to_be_bytes());
        to[16..24].copy_from_slice(&self.ring.addr.to_be_bytes());
        to[24..28].copy_from_slice(&self.ring.rkey.to_be_bytes());
        to[28..36].copy_from_slice(&self.locks.addr.to_be_bytes());
        to[36..40].copy_from_slice(&self.locks.rkey.to_be_bytes());
        to
    }

    /// From the first [`HELLO_LEN`] bytes of the peer's private data.
    ///
    /// # Errors
    /// If the peer does not speak this protocol, or has less than it takes.
    pub fn decode(bytes: &[u8]) -> Result<Hello, Violation> {
        let bytes = bytes.get(..HELLO_LEN).ok_or(Violation("no greeting of a stream"))?;
        if bytes[..4] != MAGIC {
            return Err(Violation("no greeting of a stream of this version"));
        }
        let half = |at: usize| u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"));
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let flags = half(4);
        if flags & !MESSAGES != 0 {
            return Err(Violation("unknown flags in the greeting"));
        }
        let remote = |at: usize| {
            let addr = u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
            RemoteAddr { addr, rkey: word(at + 8) }
        };
        let hello = Hello {
            receives: half(6),
            receive_len: word(8),
            ring_len: word(12),
            ring: remote(16),
            locks: remote(28),
            messages: flags & MESSAGES != 0,
        };
        if hello.receives < RECEIVES_MIN || (hello.receive_len as usize) < 2 * MESSAGE_MAX {
            return Err(Violation("too few receives, or too short ones"));
        }
        let fits = |at: RemoteAddr, len: u32| at.addr.checked_add(len.into()).is_some();
        if !fits(hello.ring, hello.ring_len) || !fits(hello.locks, 4096) {
            return Err(Violation("buffers that end beyond all memory"));
        }
        if hello.ring_len > SPAN_MAX || hello.receive_len > SPAN_MAX {
            return Err(Violation("longer buffers than there can be"));
        }
        Ok(hello)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message() -> impl Strategy<Value = Message> {
        let remote = || (any::<u64>(), any::<u32>()).prop_map(|(addr, rkey)| RemoteAddr { addr, rkey });
        prop_oneof![
            (1..=u32::MAX, any::<bool>()).prop_map(|(len, end)| Message::RingWritten { len, end }),
            (1..=u32::MAX, any::<bool>(), any::<u32>(), remote())
                .prop_map(|(len, end, id, source)| Message::SourceAvailable { len, end, id, source }),
            (1..=u32::MAX, any::<u64>(), remote()).prop_map(|(len, parts, sink)| Message::SinkAvailable {
                len,
                parts,
                sink
            }),
            (1..=u32::MAX, any::<bool>()).prop_map(|(len, end)| Message::WriteComplete { len, end }),
            (any::<u32>(), any::<u32>(), any::<bool>()).prop_map(|(id, len, withdrawn)| Message::ReadComplete {
                id,
                len,
                withdrawn
            }),
            any::<u32>().prop_map(|id| Message::CancelSource { id }),
            (any::<u32>(), remote()).prop_map(|(id, source)| Message::UpdateSource { id, source }),
            Just(Message::CancelSink),
            Just(Message::SinkCancelled),
            Just(Message::Acknowledge),
            Just(Message::Disconnect),
            Just(Message::Disconnected),
            Just(Message::Abort),
        ]
    }

    proptest! {
        #[test]
        fn messages_come_back_as_they_were(message in message(), receives: u32, ring: u32) {
            let (frame, mut bytes) = (Frame { receives, ring, message }, [0; MESSAGE_MAX]);
            let len = frame.encode(&mut bytes);
            prop_assert_eq!(Frame::decode(&bytes, len), Ok(frame));
            prop_assert!(Frame::decode(&bytes[..len - 1], len).is_err());
            prop_assert!(Frame::decode(&bytes, len - 1).is_err());
        }

        #[test]
        fn data_comes_back_with_its_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..100), end: bool) {
            let frame = Frame { receives: 1, ring: 2, message: Message::Data { len: bytes.len() as u32, end } };
            let mut head = [0; MESSAGE_MAX];
            let len = frame.encode(&mut head);
            let mut whole = head[..len].to_vec();
            prop_assert_eq!(whole.len(), HEADER_LEN);
            whole.extend(&bytes);
            let total = whole.len();
            whole.truncate(MESSAGE_MAX);
            prop_assert_eq!(Frame::decode(&whole, total), Ok(frame));
            prop_assert!(Frame::decode(&whole, total + 1).is_err());
        }

        #[test]
        fn any_bytes_decode_to_what_encodes_to_them(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(frame) = Frame::decode(&bytes, bytes.len()) {
                let mut again = [0; MESSAGE_MAX];
                let len = frame.encode(&mut again);
                prop_assert_eq!(&again[..len], &bytes[..len]);
            }
            if let Ok(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(&hello.encode()[..], &bytes[..HELLO_LEN]);
            }
        }
    }
}
