//! What is sent: headers, and bodies of several kinds.

use crate::backend::Lent;
use smallvec::SmallVec;
use thruway_engine::Segment;

/// Something to send.
#[derive(Default)]
pub struct Message {
    /// What comes first.
    pub header: SmallVec<[u8; 64]>,
    /// What follows it.
    pub body: Body,
    /// What comes last.
    pub trailer: SmallVec<[u8; 8]>,
}

impl Message {
    /// Bytes of memory that it takes beside segments and what is lent.
    pub(crate) fn memory(&self) -> usize {
        let own = if let Body::Bytes(bytes) = &self.body { bytes.len() } else { 0 };
        size_of::<Message>() + own
    }
}

/// The long part of a message.
#[derive(Default)]
pub enum Body {
    /// None.
    #[default]
    Empty,
    /// Segments, which are free again when they have been sent.
    Segments(SmallVec<[Segment; 1]>),
    /// Bytes of their own.
    Bytes(Vec<u8>),
    /// What belongs to a backend. Files only where [`super::Writer::can_lend`] says so.
    Lent(Lent),
}

impl Body {
    pub(super) fn is_file(&self) -> bool {
        matches!(self, Body::Lent(Lent::File { .. }))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Body::Empty => 0,
            Body::Segments(segments) => segments.iter().map(Segment::len).sum(),
            Body::Bytes(bytes) => bytes.len(),
            Body::Lent(lent) => lent.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cuts it: what is returned begins at byte `at`.
    ///
    /// # Panics
    /// If `at` is outside.
    pub fn split_off(&mut self, at: usize) -> Body {
        match self {
            _ if at == self.len() => Body::Empty,
            Body::Empty => panic!("a body is cut inside"),
            Body::Bytes(bytes) => Body::Bytes(bytes.split_off(at)),
            Body::Lent(lent) => Body::Lent(lent.split_off(at)),
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

    /// Calls `each` with the bytes, for a digest. Nothing of what is lent is among them.
    pub(crate) fn bytes(&self, mut each: impl FnMut(&[u8])) {
        match self {
            Body::Empty | Body::Lent(_) => {}
            Body::Segments(segments) => segments.iter().for_each(|s| each(s.as_slice())),
            Body::Bytes(bytes) => each(bytes),
        }
    }

    /// Calls `each` with every piece of memory.
    pub(crate) fn pieces(&self, mut each: impl FnMut(*const u8, usize)) {
        match self {
            Body::Empty | Body::Lent(Lent::File { .. }) => {}
            Body::Segments(segments) => segments.iter().for_each(|s| each(s.as_ptr(), s.len())),
            Body::Bytes(bytes) => each(bytes.as_ptr(), bytes.len()),
            Body::Lent(Lent::Memory(memory)) => memory.iter().for_each(|m| each(m.as_ptr(), m.len())),
        }
    }
}
