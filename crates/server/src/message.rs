//! Messages to send: headers, and bodies of several kinds.

use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use thruway_engine::Segment;
use thruway_engine::lent::Lent;

/// A message to send: header, body and trailer, in this order.
#[derive(Default)]
pub struct Message {
    /// Header.
    pub header: SmallVec<[u8; 64]>,
    /// Body.
    pub body: Body,
    /// Trailer.
    pub trailer: SmallVec<[u8; 8]>,
}

impl Message {
    /// Bytes of memory that the message owns; segments and lent memory are not counted.
    pub(crate) fn memory(&self) -> usize {
        let own = if let Body::Bytes(bytes) = &self.body { bytes.len() } else { 0 };
        size_of::<Message>() + self.header.len() + self.trailer.len() + own
    }
}

/// Where the body of a message is.
#[derive(Default)]
pub enum Body {
    /// There is none.
    #[default]
    Empty,
    /// In segments, which are released when they have been sent.
    Segments(SmallVec<[Segment; 1]>),
    /// Part of a segment that several messages share.
    Shared(Arc<Segment>, Range<usize>),
    /// In memory of its own.
    Bytes(Vec<u8>),
    /// In memory, a file or a pipe that its owner lends; a file or a pipe only if [`crate::Writer::can_lend`].
    Lent(Lent),
}

impl Body {
    pub(crate) fn is_file(&self) -> bool {
        matches!(self, Body::Lent(Lent::File { .. } | Lent::Piped(_)))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Body::Empty => 0,
            Body::Segments(segments) => segments.iter().map(Segment::len).sum(),
            Body::Shared(_, range) => range.len(),
            Body::Bytes(bytes) => bytes.len(),
            Body::Lent(lent) => lent.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits it in two; the part from byte `at` on is returned.
    ///
    /// # Panics
    /// If `at` is outside.
    pub fn split_off(&mut self, at: usize) -> Body {
        match self {
            _ if at == self.len() => Body::Empty,
            Body::Empty => panic!("a body is cut inside"),
            Body::Bytes(bytes) => Body::Bytes(bytes.split_off(at)),
            Body::Lent(lent) => Body::Lent(lent.split_off(at)),
            Body::Shared(segment, range) => {
                assert!(at <= range.len(), "a body is cut inside");
                let rest = range.start + at..range.end;
                range.end = rest.start;
                Body::Shared(Arc::clone(segment), rest)
            }
            Body::Segments(segments) => {
                let (mut rest, mut seen) = (SmallVec::new(), 0);
                let mut kept = SmallVec::new();
                for mut segment in segments.drain(..) {
                    let len = segment.len();
                    if seen < at && seen + len > at {
                        rest.push(segment.split_off(at - seen));
                    }
                    if seen < at {
                        kept.push(segment)
                    } else {
                        rest.push(segment)
                    }
                    seen += len;
                }
                *segments = kept;
                Body::Segments(rest)
            }
        }
    }

    /// Copies the body. A segment becomes shared between both.
    ///
    /// # Panics
    /// If the body has several segments, or its memory belongs to another owner.
    pub fn again(&mut self) -> Body {
        if let Body::Segments(segments) = self {
            assert!(segments.len() <= 1, "a body of several segments cannot be sent again");
            *self = match segments.pop() {
                None => Body::Empty,
                Some(segment) => {
                    let all = 0..segment.len();
                    Body::Shared(Arc::new(segment), all)
                }
            };
        }
        match self {
            Body::Empty => Body::Empty,
            Body::Shared(segment, range) => Body::Shared(Arc::clone(segment), range.clone()),
            Body::Bytes(bytes) => Body::Bytes(bytes.clone()),
            Body::Segments(_) | Body::Lent(_) => panic!("a lent body cannot be sent again"),
        }
    }

    /// Calls `each` with the bytes of segments and own memory, for a digest. Lent memory may change meanwhile and is left out.
    pub fn bytes(&self, mut each: impl FnMut(&[u8])) {
        match self {
            Body::Empty | Body::Lent(_) => {}
            Body::Segments(segments) => segments.iter().for_each(|s| each(s.as_slice())),
            Body::Shared(segment, range) => each(&segment.as_slice()[range.clone()]),
            Body::Bytes(bytes) => each(bytes),
        }
    }

    /// Calls `each` with every piece of memory, lent memory included.
    pub(crate) fn pieces(&self, mut each: impl FnMut(*const u8, usize)) {
        match self {
            Body::Empty | Body::Lent(Lent::File { .. } | Lent::Piped(_)) => {}
            Body::Segments(segments) => segments.iter().for_each(|s| each(s.as_ptr(), s.len())),
            Body::Shared(segment, range) => each(segment.as_slice()[range.clone()].as_ptr(), range.len()),
            Body::Bytes(bytes) => each(bytes.as_ptr(), bytes.len()),
            Body::Lent(Lent::Memory(memory)) => memory.iter().for_each(|m| each(m.as_ptr(), m.len())),
        }
    }
}
