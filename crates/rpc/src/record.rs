//! Messages on a byte stream: records, each in one or more fragments (RFC 5531, section 11).

use crate::xdr::{Encoder, padded};
use smallvec::SmallVec;
use thruway_server::Message;

/// Bytes of what is before each fragment.
pub const MARKER_LEN: usize = 4;

/// Most bytes of a fragment.
pub const FRAGMENT_MAX: usize = (1 << 31) - 1;

/// What is before each fragment of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marker {
    /// Whether it is the last fragment of its record.
    pub last: bool,
    /// Bytes of the fragment.
    pub len: u32,
}

impl Marker {
    /// Decodes a marker.
    pub fn decode(bytes: [u8; MARKER_LEN]) -> Marker {
        let word = u32::from_be_bytes(bytes);
        Marker { last: word >> 31 == 1, len: word & FRAGMENT_MAX as u32 }
    }

    /// Its bytes.
    pub fn encode(self) -> [u8; MARKER_LEN] {
        (u32::from(self.last) << 31 | self.len).to_be_bytes()
    }
}

/// A record of one fragment, as messages that are to be sent one behind the other: bulk items are not copied.
///
/// # Panics
/// If it is longer than [`FRAGMENT_MAX`].
pub fn messages(record: Encoder) -> SmallVec<[Message; 1]> {
    let len = record.len();
    assert!(len <= FRAGMENT_MAX, "a record of one fragment");
    let (bytes, bulk) = record.into_parts();
    let marker = Marker { last: true, len: len as u32 }.encode();
    let mut messages = SmallVec::new();
    let mut header = SmallVec::from_slice(&marker);
    let mut done = 0;
    for (at, body) in bulk {
        header.extend_from_slice(&bytes[done..at]);
        done = at;
        let padding = padded(body.len()) - body.len();
        let trailer = SmallVec::from_elem(0, padding);
        messages.push(Message { header: std::mem::take(&mut header), body, trailer });
    }
    if let Some(last) = messages.last_mut() {
        let last: &mut Message = last;
        last.trailer.extend_from_slice(&bytes[done..]);
    } else {
        header.extend_from_slice(&bytes);
        messages.push(Message { header, ..Message::default() });
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use thruway_server::Body;

    #[test]
    fn markers_are_as_in_the_rfc() {
        let last = Marker { last: true, len: 0x1234 };
        assert_eq!((last.encode(), Marker::decode([0x80, 0, 0x12, 0x34])), ([0x80, 0, 0x12, 0x34], last));
        let more = Marker { last: false, len: FRAGMENT_MAX as u32 };
        assert_eq!((more.encode(), Marker::decode([0x7f, 0xff, 0xff, 0xff])), ([0x7f, 0xff, 0xff, 0xff], more));
    }

    proptest! {
        #[test]
        fn a_record_is_the_same_with_bulk_items_and_without(
            items in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 0..6),
        ) {
            let (mut inline, mut bulk) = (Encoder::new(), Encoder::new());
            for (is_bulk, bytes) in &items {
                inline.opaque(bytes);
                if *is_bulk { bulk.bulk(Body::Bytes(bytes.clone())) } else { bulk.opaque(bytes) }
            }
            prop_assert_eq!(bulk.len(), inline.len());
            let mut sent = Vec::new();
            for message in messages(bulk) {
                sent.extend_from_slice(&message.header);
                message.body.bytes(|bytes| sent.extend_from_slice(bytes));
                sent.extend_from_slice(&message.trailer);
            }
            let (bytes, _) = inline.into_parts();
            let marker = Marker { last: true, len: bytes.len() as u32 }.encode();
            prop_assert_eq!(sent, [&marker[..], &bytes].concat());
        }
    }
}
