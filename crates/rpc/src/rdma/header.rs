//! The header before every message of RPC over RDMA (RFC 8166, section 4).

use crate::xdr::{DecodeError, Decoder, Encoder};
use smallvec::SmallVec;
use thruway_fabric::RemoteAddr;

/// The version of RPC over RDMA.
pub const VERSION: u32 = 1;

/// A piece of the requester's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RdmaSegment {
    /// The key that opens it.
    pub handle: u32,
    /// Bytes.
    pub length: u32,
    /// Where it begins.
    pub offset: u64,
}

impl RdmaSegment {
    /// The address of its byte `at`.
    pub fn remote(&self, at: u32) -> RemoteAddr {
        RemoteAddr { addr: self.offset.wrapping_add(at.into()), rkey: self.handle }
    }
}

/// Pieces of memory that are one item, or all of a message.
pub type Segments = SmallVec<[RdmaSegment; 2]>;

/// Bytes of these pieces together.
pub fn total(segments: &[RdmaSegment]) -> u64 {
    segments.iter().map(|s| u64::from(s.length)).sum()
}

/// An item of a call that the responder is to read from the requester's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadChunk {
    /// Where the item is in the message as it would be with all its items in place; 0 if it is the message.
    pub position: u32,
    /// Where it is in memory.
    pub segments: Segments,
}

/// The memory that goes with a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunks {
    /// To be read by the responder, in the order of their positions.
    pub read: SmallVec<[ReadChunk; 1]>,
    /// To be written by the responder, one for each item of the results that may be long.
    pub write: SmallVec<[Segments; 1]>,
    /// To be written by the responder with the reply, if that is long.
    pub reply: Option<Segments>,
}

/// What a message is (`rdma_proc`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Procedure {
    /// An RPC message follows; items of it may be in chunks.
    Message(Chunks),
    /// The RPC message is in a chunk: a read chunk at position 0, or the reply chunk.
    NoMessage(Chunks),
    /// Of the old protocol in which responders exposed memory: the requester has read it.
    Done,
    /// The responder speaks only these versions.
    ErrorVersion {
        /// The lowest version.
        low: u32,
        /// The highest version.
        high: u32,
    },
    /// The responder cannot make sense of the header, or the reply does not fit into the chunks.
    ErrorChunk,
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// That of the RPC message.
    pub xid: u32,
    /// Requests: credits that are asked for; replies: credits that are granted.
    pub credits: u32,
    /// What the message is.
    pub procedure: Procedure,
}

/// Why a header cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Too short for an answer.
    #[error("a message too short for a header")]
    Runt,
    /// Another version: [`Procedure::ErrorVersion`] is the answer.
    #[error("version {version} of RPC over RDMA")]
    Version {
        /// That of the message.
        xid: u32,
        /// The version.
        version: u32,
    },
    /// The rest of the header: [`Procedure::ErrorChunk`] is the answer.
    #[error("a header of RPC over RDMA in which {error}")]
    Malformed {
        /// That of the message.
        xid: u32,
        /// What is wrong.
        error: DecodeError,
    },
}

const RDMA_MSG: u32 = 0;
const RDMA_NOMSG: u32 = 1;
const RDMA_DONE: u32 = 3;
const RDMA_ERROR: u32 = 4;
const ERR_VERS: u32 = 1;
const ERR_CHUNK: u32 = 2;

fn segment(decoder: &mut Decoder<'_>) -> Result<RdmaSegment, DecodeError> {
    Ok(RdmaSegment { handle: decoder.u32()?, length: decoder.u32()?, offset: decoder.u64()? })
}

/// A counted array of segments; no limit but the length of the message.
fn segments(decoder: &mut Decoder<'_>) -> Result<Segments, DecodeError> {
    (0..decoder.u32()?).map(|_| segment(decoder)).collect()
}

fn encode_segment(out: &mut Encoder, segment: &RdmaSegment) {
    out.u32(segment.handle);
    out.u32(segment.length);
    out.u64(segment.offset);
}

impl Chunks {
    fn decode(decoder: &mut Decoder<'_>) -> Result<Chunks, DecodeError> {
        let mut chunks = Chunks::default();
        while decoder.bool()? {
            let (position, segment) = (decoder.u32()?, segment(decoder)?);
            match chunks.read.last_mut() {
                Some(chunk) if chunk.position == position => chunk.segments.push(segment),
                // Segments of a chunk are neighbours, and chunks in the order of the message.
                Some(chunk) if chunk.position > position => return Err(DecodeError::Invalid { value: position }),
                _ => chunks.read.push(ReadChunk { position, segments: Segments::from_elem(segment, 1) }),
            }
            if position % 4 != 0 {
                return Err(DecodeError::Invalid { value: position });
            }
        }
        while decoder.bool()? {
            chunks.write.push(segments(decoder)?);
        }
        chunks.reply = decoder.option(segments)?;
        Ok(chunks)
    }

    fn encode(&self, out: &mut Encoder) {
        for chunk in &self.read {
            for segment in &chunk.segments {
                out.bool(true);
                out.u32(chunk.position);
                encode_segment(out, segment);
            }
        }
        out.bool(false);
        for chunk in &self.write {
            out.bool(true);
            out.array(chunk, encode_segment);
        }
        out.bool(false);
        out.option(self.reply.as_ref(), |out, chunk| out.array(chunk, encode_segment));
    }

    /// The key to be revoked with the reply, for a requester that allows that: the only one of all its chunks. Of several,
    /// one could be in use by another request.
    pub fn only_handle(&self) -> Option<u32> {
        let read = self.read.iter().flat_map(|chunk| &chunk.segments);
        let write = self.write.iter().chain(&self.reply).flatten();
        let mut handles = read.chain(write).map(|segment| segment.handle);
        let first = handles.next()?;
        handles.all(|handle| handle == first).then_some(first)
    }
}

impl Header {
    /// Decodes it; the decoder is then at the RPC message, if it follows.
    ///
    /// # Errors
    /// [`HeaderError`] says which answer is due.
    pub fn decode(decoder: &mut Decoder<'_>) -> Result<Header, HeaderError> {
        let mut word = || decoder.u32().map_err(|_| HeaderError::Runt);
        let (xid, version, credits, procedure) = (word()?, word()?, word()?, word()?);
        if version != VERSION {
            return Err(HeaderError::Version { xid, version });
        }
        let rest = |decoder: &mut Decoder<'_>| {
            Ok(match procedure {
                RDMA_MSG => Procedure::Message(Chunks::decode(decoder)?),
                RDMA_NOMSG => Procedure::NoMessage(Chunks::decode(decoder)?),
                RDMA_DONE => Procedure::Done,
                RDMA_ERROR => match decoder.u32()? {
                    ERR_VERS => Procedure::ErrorVersion { low: decoder.u32()?, high: decoder.u32()? },
                    ERR_CHUNK => Procedure::ErrorChunk,
                    value => return Err(DecodeError::Invalid { value }),
                },
                // RDMA_MSGP among them, which nobody sends (RFC 8166, section 4.2.3).
                value => return Err(DecodeError::Invalid { value }),
            })
        };
        let procedure = rest(decoder).map_err(|error| HeaderError::Malformed { xid, error })?;
        Ok(Header { xid, credits, procedure })
    }

    /// Appends it.
    pub fn encode(&self, out: &mut Encoder) {
        out.u32(self.xid);
        out.u32(VERSION);
        out.u32(self.credits);
        match &self.procedure {
            Procedure::Message(chunks) => {
                out.u32(RDMA_MSG);
                chunks.encode(out);
            }
            Procedure::NoMessage(chunks) => {
                out.u32(RDMA_NOMSG);
                chunks.encode(out);
            }
            Procedure::Done => out.u32(RDMA_DONE),
            Procedure::ErrorVersion { low, high } => {
                [RDMA_ERROR, ERR_VERS, *low, *high].into_iter().for_each(|word| out.u32(word));
            }
            Procedure::ErrorChunk => [RDMA_ERROR, ERR_CHUNK].into_iter().for_each(|word| out.u32(word)),
        }
    }
}

/// What each end says of itself in the connection's private data (RFC 8797).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrivateData {
    /// Keys of chunks may be revoked by the peer's Send.
    pub remote_invalidation: bool,
    /// Bytes of the longest message that it sends.
    pub send_size: u32,
    /// Bytes of the longest message that it can receive.
    pub receive_size: u32,
}

impl Default for PrivateData {
    /// An end that has said nothing.
    fn default() -> PrivateData {
        PrivateData { remote_invalidation: false, send_size: 1024, receive_size: 1024 }
    }
}

const MAGIC: u32 = 0xf6ab_0e18;
const PRIVATE_DATA_VERSION: u8 = 1;

impl PrivateData {
    /// Decodes what a peer has sent; other data counts as none.
    pub fn decode(data: &[u8]) -> PrivateData {
        let Some((magic, [PRIVATE_DATA_VERSION, flags, send, receive, ..])) = data.split_first_chunk() else {
            return PrivateData::default();
        };
        if u32::from_be_bytes(*magic) != MAGIC {
            return PrivateData::default();
        }
        let size = |coded: u8| (u32::from(coded) + 1) * 1024;
        PrivateData { remote_invalidation: flags & 1 != 0, send_size: size(*send), receive_size: size(*receive) }
    }

    /// Its bytes; sizes are rounded down to a multiple of 1,024, from 1 KiB to 256 KiB.
    pub fn encode(&self) -> [u8; 8] {
        let coded = |size: u32| (size / 1024).clamp(1, 256) as u8 - 1;
        let [a, b, c, d] = MAGIC.to_be_bytes();
        let flags = self.remote_invalidation.into();
        [a, b, c, d, PRIVATE_DATA_VERSION, flags, coded(self.send_size), coded(self.receive_size)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn bytes(header: &Header) -> Vec<u8> {
        let mut out = Encoder::new();
        header.encode(&mut out);
        out.into_parts().0
    }

    fn decode(bytes: &[u8]) -> Result<Header, HeaderError> {
        Header::decode(&mut Decoder::new(bytes))
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_be_bytes()).collect()
    }

    #[test]
    fn a_write_is_as_in_the_rfc() {
        let segment = RdmaSegment { handle: 0x77, length: 8192, offset: 0x1_0000_0000 };
        let read = ReadChunk { position: 132, segments: Segments::from_elem(segment, 1) };
        let chunks = Chunks { read: SmallVec::from_elem(read, 1), ..Chunks::default() };
        let header = Header { xid: 5, credits: 128, procedure: Procedure::Message(chunks) };
        let expected = words(&[5, 1, 128, 0, 1, 132, 0x77, 8192, 1, 0, 0, 0, 0]);
        assert_eq!(bytes(&header), expected);
        assert_eq!(decode(&expected), Ok(header));
    }

    #[test]
    fn each_mistake_has_its_answer() {
        assert_eq!(decode(&words(&[5, 1, 128])), Err(HeaderError::Runt));
        assert_eq!(decode(&words(&[5, 2, 128, 0])), Err(HeaderError::Version { xid: 5, version: 2 }));
        let malformed = |rest: &[u32], error| {
            let header = words(&[&[5, 1, 128], rest].concat());
            assert_eq!(decode(&header), Err(HeaderError::Malformed { xid: 5, error }), "{rest:?}");
        };
        malformed(&[0], DecodeError::Truncated);
        malformed(&[2, 0, 0, 0, 0, 0], DecodeError::Invalid { value: 2 });
        malformed(&[0, 2], DecodeError::Invalid { value: 2 });
        malformed(&[0, 0, 1, u32::MAX], DecodeError::Truncated);
        malformed(&[0, 1, 6, 1, 1, 0, 0, 0, 0, 0], DecodeError::Invalid { value: 6 });
        malformed(&[0, 1, 8, 1, 1, 0, 0, 1, 4, 1, 1, 0, 0, 0, 0, 0], DecodeError::Invalid { value: 4 });
        malformed(&[4, 3], DecodeError::Invalid { value: 3 });
    }

    #[test]
    fn only_a_key_without_others_is_revoked() {
        let segment = |handle| RdmaSegment { handle, length: 1, offset: 0 };
        let mut chunks = Chunks::default();
        assert_eq!(chunks.only_handle(), None);
        chunks.reply = Some([segment(1), segment(1)].into_iter().collect());
        assert_eq!(chunks.only_handle(), Some(1));
        chunks.read.push(ReadChunk { position: 0, segments: Segments::from_elem(segment(2), 1) });
        assert_eq!(chunks.only_handle(), None);
    }

    #[test]
    fn private_data_of_linux_is_understood() {
        let linux = [0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3];
        let said = PrivateData { remote_invalidation: true, send_size: 4096, receive_size: 4096 };
        assert_eq!((PrivateData::decode(&linux), said.encode()), (said, linux));
        for other in [&linux[..7], &[0; 8], &[0xf6, 0xab, 0x0e, 0x18, 2, 1, 3, 3], &[]] {
            assert_eq!(PrivateData::decode(other), PrivateData::default());
        }
    }

    fn segments() -> impl Strategy<Value = Segments> {
        let segment = any::<(u32, u32, u64)>();
        let segment = segment.prop_map(|(handle, length, offset)| RdmaSegment { handle, length, offset });
        vec(segment, 1..5).prop_map(Segments::from_vec)
    }

    fn chunks() -> impl Strategy<Value = Chunks> {
        let read = prop::collection::btree_map((0_u32..1 << 20).prop_map(|p| 4 * p), segments(), 0..4);
        let read = read.prop_map(|m| m.into_iter().map(|(position, segments)| ReadChunk { position, segments }));
        (read, vec(segments(), 0..3), prop::option::of(segments())).prop_map(|(read, write, reply)| Chunks {
            read: read.collect(),
            write: write.into(),
            reply,
        })
    }

    proptest! {
        #[test]
        fn headers_come_back(xid: u32, credits: u32, chunks in chunks(), kind in 0..5, low: u32, high: u32) {
            let procedure = match kind {
                0 => Procedure::Message(chunks),
                1 => Procedure::NoMessage(chunks),
                2 => Procedure::Done,
                3 => Procedure::ErrorVersion { low, high },
                _ => Procedure::ErrorChunk,
            };
            let header = Header { xid, credits, procedure };
            prop_assert_eq!(decode(&bytes(&header)), Ok(header));
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes in vec(any::<u8>(), 0..300)) {
            let _ = decode(&bytes);
            let _ = PrivateData::decode(&bytes);
        }
    }
}
