//! Which way each part of a reply goes (RFC 8166, sections 3.4.6 and 3.5): its long items to the write chunks, in their order,
//! and the rest with the header, or to the reply chunk.

use super::header::{Chunks, Header, Procedure, RdmaSegment, ReadChunk, Segments, total};
use crate::xdr::{Encoder, padded};
use smallvec::SmallVec;
use thruway_fabric::RemoteAddr;
use thruway_server::Body;

/// A part of the reply that is written to the requester's memory.
pub struct Transfer {
    /// What is written, from its first byte on, to the places one behind the other.
    pub body: Body,
    /// Where it is written, and how many bytes to each place.
    pub places: SmallVec<[(RemoteAddr, u32); 2]>,
}

/// A reply on its way.
pub struct Plan {
    /// What is written before the message is sent.
    pub transfers: SmallVec<[Transfer; 2]>,
    /// The message: a header, and behind it the RPC message, if that is not in the reply chunk.
    pub message: Vec<u8>,
}

impl From<NoRoom> for std::io::Error {
    fn from(error: NoRoom) -> std::io::Error {
        std::io::Error::other(error)
    }
}

/// Neither the chunks nor a message has room for the reply: [`Procedure::ErrorChunk`] is the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the reply has {len} bytes; the requester has room for {room}")]
pub struct NoRoom {
    /// Bytes of the item or the reply.
    pub len: u64,
    /// Bytes of the chunk, or of the longest message.
    pub room: u64,
}

/// Distributes `len` bytes over a chunk, whose segments' lengths are then what each has got.
fn fill(chunk: &mut [RdmaSegment], len: usize) -> Result<SmallVec<[(RemoteAddr, u32); 2]>, NoRoom> {
    let room = total(chunk);
    if len as u64 > room {
        return Err(NoRoom { len: len as u64, room });
    }
    let mut left = len;
    let mut places = SmallVec::new();
    for segment in chunk {
        let part = left.min(segment.length as usize) as u32;
        if part > 0 {
            places.push((segment.remote(0), part));
        }
        segment.length = part;
        left -= part as usize;
    }
    Ok(places)
}

/// The reply of the old design, in which the requester reads long items from this end's memory: the message, which is sent at once,
/// and the items, to be kept until the requester has said that it has them. `lend` says where the requester finds one.
///
/// # Errors
/// If a message has no room for it, or an item cannot be lent.
pub fn plan_read_read<T, E: From<NoRoom>>(
    xid: u32,
    credits: u32,
    reply: Encoder,
    receive_size: usize,
    mut lend: impl FnMut(Body) -> Result<(Segments, T), E>,
) -> Result<(Vec<u8>, SmallVec<[T; 1]>), E> {
    let (bytes, bulk) = reply.into_parts();
    let (mut chunks, mut lent, mut apart) = (Chunks::default(), SmallVec::new(), 0);
    for (at, body) in bulk {
        let position = (at + apart) as u32;
        apart += padded(body.len());
        if !body.is_empty() {
            let (segments, item) = lend(body)?;
            chunks.read.push(ReadChunk { position, segments });
            lent.push(item);
        }
    }
    let mut out = Encoder::new();
    Header { xid, credits, procedure: Procedure::Message(chunks) }.encode(&mut out);
    out.fixed(&bytes);
    let message = out.into_parts().0;
    if message.len() > receive_size {
        return Err(NoRoom { len: message.len() as u64, room: receive_size as u64 }.into());
    }
    Ok((message, lent))
}

/// Plans the reply to a call that came with these chunks, from a requester that takes messages of `receive_size` bytes.
///
/// # Errors
/// If there is no room for it.
pub fn plan(xid: u32, credits: u32, reply: Encoder, mut chunks: Chunks, receive_size: usize) -> Result<Plan, NoRoom> {
    chunks.read.clear();
    let (bytes, bulk) = reply.into_parts();
    let mut transfers = SmallVec::new();
    let mut places = chunks.write.iter_mut();
    // Items without a chunk are among the other bytes.
    let mut rest = Vec::with_capacity(bytes.len());
    let mut done = 0;
    for (at, body) in bulk {
        rest.extend_from_slice(&bytes[done..at]);
        done = at;
        match places.next() {
            Some(chunk) => {
                let places = fill(chunk, body.len())?;
                transfers.push(Transfer { body, places });
            }
            None => {
                let len = rest.len() + padded(body.len());
                body.bytes(|bytes| rest.extend_from_slice(bytes));
                rest.resize(len, 0);
            }
        }
    }
    places.for_each(|unused| unused.iter_mut().for_each(|segment| segment.length = 0));
    rest.extend_from_slice(&bytes[done..]);

    let mut reply_chunk: Option<Segments> = chunks.reply.take();
    if let Some(chunk) = &mut reply_chunk {
        // Not used, if the message is short enough.
        chunks.reply = Some(chunk.iter().map(|segment| RdmaSegment { length: 0, ..*segment }).collect());
    }
    let encode = |procedure| {
        let mut out = Encoder::new();
        Header { xid, credits, procedure }.encode(&mut out);
        out.into_parts().0
    };
    let mut message = encode(Procedure::Message(chunks.clone()));
    if message.len() + rest.len() <= receive_size {
        message.extend_from_slice(&rest);
        return Ok(Plan { transfers, message });
    }
    let Some(mut chunk) = reply_chunk else {
        return Err(NoRoom { len: (message.len() + rest.len()) as u64, room: receive_size as u64 });
    };
    let places = fill(&mut chunk, rest.len())?;
    chunks.reply = Some(chunk);
    transfers.push(Transfer { body: Body::Bytes(rest), places });
    let message = encode(Procedure::NoMessage(chunks));
    if message.len() > receive_size {
        return Err(NoRoom { len: message.len() as u64, room: receive_size as u64 });
    }
    Ok(Plan { transfers, message })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xdr::Decoder;
    use smallvec::smallvec;

    fn segment(handle: u32, length: u32) -> RdmaSegment {
        RdmaSegment { handle, length, offset: 0x1000 * u64::from(handle) }
    }

    /// A word, an item of `len` bytes, a word.
    fn reply(len: usize) -> Encoder {
        let mut out = Encoder::new();
        out.u32(0xaaaa);
        out.bulk(Body::Bytes(vec![b'x'; len]));
        out.u32(0xbbbb);
        out
    }

    /// What has been written to memory, by handle and address, and the message.
    fn carry_out(plan: Plan) -> (Vec<(u32, u64, usize)>, Header, Vec<u8>) {
        let mut written = Vec::new();
        for transfer in &plan.transfers {
            let lens: u32 = transfer.places.iter().map(|(_, len)| len).sum();
            assert_eq!(lens as usize, transfer.body.len());
            written.extend(transfer.places.iter().map(|(at, len)| (at.rkey, at.addr, *len as usize)));
        }
        let mut decoder = Decoder::new(&plan.message);
        let header = Header::decode(&mut decoder).unwrap();
        (written, header, decoder.rest().to_vec())
    }

    #[test]
    fn a_long_item_goes_to_its_write_chunk() {
        let chunks =
            Chunks { write: smallvec![smallvec![segment(1, 8), segment(2, 8), segment(3, 4)]], ..Chunks::default() };
        let (written, header, message) = carry_out(plan(9, 32, reply(10), chunks, 1024).unwrap());
        assert_eq!(written, [(1, 0x1000, 8), (2, 0x2000, 2)]);
        let echo =
            Chunks { write: smallvec![smallvec![segment(1, 8), segment(2, 2), segment(3, 0)]], ..Chunks::default() };
        assert_eq!(header, Header { xid: 9, credits: 32, procedure: Procedure::Message(echo) });
        // Its length is there, its bytes and their padding are not.
        assert_eq!(message, [0, 0, 0xaa, 0xaa, 0, 0, 0, 10, 0, 0, 0xbb, 0xbb]);
    }

    #[test]
    fn what_is_not_used_is_given_back_empty() {
        let mut out = Encoder::new();
        out.u32(70);
        let chunks = Chunks {
            write: smallvec![smallvec![segment(1, 8)]],
            reply: Some(smallvec![segment(2, 100)]),
            ..Chunks::default()
        };
        let (written, header, message) = carry_out(plan(9, 32, out, chunks, 1024).unwrap());
        assert_eq!((written, message), (vec![], vec![0, 0, 0, 70]));
        let echo = Chunks {
            write: smallvec![smallvec![segment(1, 0)]],
            reply: Some(smallvec![segment(2, 0)]),
            ..Chunks::default()
        };
        assert_eq!(header.procedure, Procedure::Message(echo));
    }

    #[test]
    fn a_long_message_goes_to_the_reply_chunk() {
        let chunks = Chunks { reply: Some(smallvec![segment(2, 60), segment(3, 1000)]), ..Chunks::default() };
        let (written, header, message) = carry_out(plan(9, 32, reply(101), chunks, 120).unwrap());
        // A word, a length, 101 bytes padded to 104, a word.
        assert_eq!((written, message), (vec![(2, 0x2000, 60), (3, 0x3000, 56)], vec![]));
        let echo = Chunks { reply: Some(smallvec![segment(2, 60), segment(3, 56)]), ..Chunks::default() };
        assert_eq!(header.procedure, Procedure::NoMessage(echo));
    }

    #[test]
    fn nothing_is_cut_short() {
        let too_long = |chunks, receive| plan(9, 32, reply(101), chunks, receive).map(drop).unwrap_err();
        assert_eq!(too_long(Chunks::default(), 120), NoRoom { len: 28 + 116, room: 120 });
        let write = Chunks { write: smallvec![smallvec![segment(1, 100)]], ..Chunks::default() };
        assert_eq!(too_long(write, 1024), NoRoom { len: 101, room: 100 });
        // Of a chunk in a thousand pieces not even the list fits.
        let pieces = (0..1000).map(|n| segment(n, 1)).collect();
        let list = Chunks { reply: Some(pieces), ..Chunks::default() };
        assert_eq!(too_long(list, 120), NoRoom { len: 28 + 4 + 16_000, room: 120 });
        let reply = Chunks { reply: Some(smallvec![segment(1, 115)]), ..Chunks::default() };
        assert_eq!(too_long(reply, 120), NoRoom { len: 116, room: 115 });
    }

    #[test]
    fn an_empty_item_takes_its_chunk_too() {
        let mut out = Encoder::new();
        out.bulk(Body::Empty);
        out.bulk(Body::Bytes(vec![1; 4]));
        let chunks =
            Chunks { write: smallvec![smallvec![segment(1, 8)], smallvec![segment(2, 8)]], ..Chunks::default() };
        let (written, ..) = carry_out(plan(9, 32, out, chunks, 1024).unwrap());
        assert_eq!(written, [(2, 0x2000, 4)]);
    }
}
