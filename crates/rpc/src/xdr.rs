//! XDR, the External Data Representation (RFC 4506): everything is big-endian and a multiple of four bytes.
//!
//! A long opaque item, such as the data of an NFS WRITE, need not be among the other bytes: it may lie in a segment of its own
//! (a *bulk item*), because it was received there. To a [`Decoder`] both are the same stream.

use smallvec::SmallVec;
use thruway_engine::Segment;
use thruway_server::Body;

/// Why bytes cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The data ends within an item.
    #[error("the data ends within an item")]
    Truncated,
    /// A length exceeds the limit of its item.
    #[error("an item of {len} bytes or elements; the limit is {max}")]
    TooLong {
        /// The length.
        len: u32,
        /// The limit.
        max: u32,
    },
    /// A value that its type does not have.
    #[error("{value} is no value of its type")]
    Invalid {
        /// The value.
        value: u32,
    },
    /// There are bytes behind the last item.
    #[error("{0} bytes behind the last item")]
    Trailing(usize),
    /// A bulk item is where the data has no opaque item of its length.
    #[error("a bulk item is where there is no opaque item of its length")]
    Misplaced,
}

/// Result of decoding.
pub type Result<T> = std::result::Result<T, DecodeError>;

/// Rounds up to a multiple of four.
///
/// # Panics
/// On overflow, in debug builds.
pub const fn padded(len: usize) -> usize {
    (len + 3) & !3
}

/// An opaque item that is in a segment, not among the other bytes.
#[derive(Debug)]
pub struct BulkItem {
    /// Where its first byte is in the stream as it would be with all its items in place: behind its length.
    pub position: u32,
    /// Its bytes, without padding.
    pub segment: Segment,
}

/// The position of an item that is the next one, wherever that is. No stream is so long.
const NEXT: u32 = u32::MAX;

/// The data of a long opaque item.
#[derive(Debug)]
pub enum Bulk<'a> {
    /// Among the other bytes.
    Inline(&'a [u8]),
    /// In a segment of its own.
    Segment(Segment),
}

impl Bulk<'_> {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Bulk::Inline(bytes) => bytes,
            Bulk::Segment(segment) => segment.as_slice(),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Bulk::Inline(bytes) => bytes.len(),
            Bulk::Segment(segment) => segment.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Takes items off a stream.
#[derive(Debug)]
pub struct Decoder<'a> {
    bytes: &'a [u8],
    /// What has been taken off, in the stream with all its items in place.
    position: u32,
    /// In reverse order.
    bulk: SmallVec<[BulkItem; 1]>,
}

impl<'a> Decoder<'a> {
    /// A stream without bulk items.
    pub fn new(bytes: &'a [u8]) -> Decoder<'a> {
        Decoder { bytes, position: 0, bulk: SmallVec::new() }
    }

    /// A stream from a position on. Its bulk items, which are not among the bytes, are these, in the order of their positions.
    pub fn with_bulk(bytes: &'a [u8], position: u32, mut bulk: SmallVec<[BulkItem; 1]>) -> Decoder<'a> {
        bulk.reverse();
        Decoder { bytes, position, bulk }
    }

    /// The results of a call, whose bulk items are these in their order: where they are, only the results themselves tell.
    pub(crate) fn with_items(bytes: &'a [u8], items: SmallVec<[Segment; 1]>) -> Decoder<'a> {
        let bulk = items.into_iter().map(|segment| BulkItem { position: NEXT, segment }).collect();
        Decoder::with_bulk(bytes, 0, bulk)
    }

    /// Where the next item is, in the stream with all its items in place.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// The bytes that have not been taken, without bulk items.
    pub fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or(DecodeError::Truncated)?;
        self.bytes = rest;
        self.position = self.position.wrapping_add(len as u32);
        Ok(taken)
    }

    /// Some bytes without a length before them.
    ///
    /// # Errors
    /// If the data ends before.
    pub fn fixed<const N: usize>(&mut self) -> Result<&'a [u8; N]> {
        let taken = self.take(padded(N))?;
        Ok(taken.first_chunk().expect("as many as were asked for"))
    }

    /// An unsigned integer.
    ///
    /// # Errors
    /// If the data ends before.
    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(*self.fixed()?))
    }

    /// An integer.
    ///
    /// # Errors
    /// If the data ends before.
    pub fn i32(&mut self) -> Result<i32> {
        Ok(i32::from_be_bytes(*self.fixed()?))
    }

    /// An unsigned hyper integer.
    ///
    /// # Errors
    /// If the data ends before.
    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(*self.fixed()?))
    }

    /// A hyper integer.
    ///
    /// # Errors
    /// If the data ends before.
    pub fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_be_bytes(*self.fixed()?))
    }

    /// A boolean.
    ///
    /// # Errors
    /// If the data ends before, or it is neither 0 nor 1.
    pub fn bool(&mut self) -> Result<bool> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(DecodeError::Invalid { value }),
        }
    }

    /// A length of at most `max`.
    ///
    /// # Errors
    /// If the data ends before, or it is longer.
    pub fn len(&mut self, max: u32) -> Result<usize> {
        match self.u32()? {
            len if len <= max => Ok(len as usize),
            len => Err(DecodeError::TooLong { len, max }),
        }
    }

    /// Opaque data or a string, of at most `max` bytes.
    ///
    /// # Errors
    /// If the data ends before, or it is longer.
    pub fn opaque(&mut self, max: u32) -> Result<&'a [u8]> {
        let len = self.len(max)?;
        Ok(&self.take(padded(len))?[..len])
    }

    /// Opaque data that may be a bulk item, of at most `max` bytes.
    ///
    /// # Errors
    /// If the data ends before, it is longer, or the bulk item here has another length.
    pub fn bulk(&mut self, max: u32) -> Result<Bulk<'a>> {
        let len = self.len(max)?;
        if self.bulk.last().is_none_or(|item| item.position != self.position && item.position != NEXT) {
            return Ok(Bulk::Inline(&self.take(padded(len))?[..len]));
        }
        let mut segment = self.bulk.pop().expect("it has just been seen").segment;
        // A bulk item may come with its padding (RFC 8166, section 3.4.5.2).
        if segment.len() != len && segment.len() != padded(len) {
            return Err(DecodeError::Misplaced);
        }
        drop(segment.split_off(len));
        self.position = self.position.wrapping_add(padded(len) as u32);
        Ok(Bulk::Segment(segment))
    }

    /// An item that may be missing (`*` in XDR's language).
    ///
    /// # Errors
    /// Those of the item.
    pub fn option<T>(&mut self, item: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.bool()? { item(self).map(Some) } else { Ok(None) }
    }

    /// An array of at most `max` elements.
    ///
    /// # Errors
    /// If there are more; those of the elements.
    pub fn array<T>(&mut self, max: u32, mut element: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let len = self.len(max)?;
        // The length is the peer's word: what it says costs no memory before it is there.
        let mut elements = Vec::with_capacity(len.min(self.bytes.len() / 4));
        for _ in 0..len {
            elements.push(element(self)?);
        }
        Ok(elements)
    }

    /// To be called behind the last item.
    ///
    /// # Errors
    /// If there are bytes or bulk items left.
    pub fn finish(self) -> Result<()> {
        match (self.bytes.len(), self.bulk.len()) {
            (0, 0) => Ok(()),
            (0, _) => Err(DecodeError::Misplaced),
            (len, _) => Err(DecodeError::Trailing(len)),
        }
    }
}

/// Appends items to a stream.
#[derive(Default)]
pub struct Encoder {
    bytes: Vec<u8>,
    /// Bulk items, and how many of the bytes are before each.
    bulk: SmallVec<[(usize, Body); 1]>,
}

impl Encoder {
    /// An empty stream.
    pub fn new() -> Encoder {
        Encoder::default()
    }

    /// A stream that begins with these bytes.
    ///
    /// # Panics
    /// If their number is not a multiple of four.
    pub fn behind(bytes: Vec<u8>) -> Encoder {
        assert!(bytes.len().is_multiple_of(4), "XDR is made of words");
        Encoder { bytes, bulk: SmallVec::new() }
    }

    /// Appends an unsigned integer.
    pub fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// Appends an integer.
    pub fn i32(&mut self, value: i32) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// Appends an unsigned hyper integer.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// Appends a hyper integer.
    pub fn i64(&mut self, value: i64) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// Appends a boolean.
    pub fn bool(&mut self, value: bool) {
        self.u32(value.into());
    }

    /// Appends bytes without a length before them.
    pub fn fixed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(padded(self.bytes.len()), 0);
    }

    /// Appends opaque data or a string.
    ///
    /// # Panics
    /// If it has 4 GiB or more.
    pub fn opaque(&mut self, bytes: &[u8]) {
        self.u32(u32::try_from(bytes.len()).expect("opaque data below 4 GiB"));
        self.fixed(bytes);
    }

    /// Appends opaque data that stays where it is.
    ///
    /// # Panics
    /// If it has 4 GiB or more.
    pub fn bulk(&mut self, body: Body) {
        self.u32(u32::try_from(body.len()).expect("opaque data below 4 GiB"));
        self.bulk.push((self.bytes.len(), body));
    }

    /// Appends an item that may be missing.
    pub fn option<T>(&mut self, value: Option<T>, item: impl FnOnce(&mut Self, T)) {
        self.bool(value.is_some());
        if let Some(value) = value {
            item(self, value);
        }
    }

    /// Appends an array.
    ///
    /// # Panics
    /// If it has 2^32 elements or more.
    pub fn array<T>(&mut self, elements: &[T], mut element: impl FnMut(&mut Self, &T)) {
        self.u32(u32::try_from(elements.len()).expect("fewer than 2^32 elements"));
        elements.iter().for_each(|e| element(self, e));
    }

    /// Appends another stream.
    pub fn append(&mut self, other: Encoder) {
        let before = self.bytes.len();
        self.bytes.extend_from_slice(&other.bytes);
        self.bulk.extend(other.bulk.into_iter().map(|(at, body)| (before + at, body)));
    }

    /// Length of the stream, bulk items and their padding included.
    pub fn len(&self) -> usize {
        self.bytes.len() + self.bulk.iter().map(|(_, body)| padded(body.len())).sum::<usize>()
    }

    /// Whether nothing has been appended.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The place of what is appended next, for [`Encoder::set_u32`] and [`Encoder::truncate`].
    pub fn mark(&self) -> Mark {
        Mark { bytes: self.bytes.len(), bulk: self.bulk.len() }
    }

    /// Changes an integer that was appended at a mark.
    ///
    /// # Panics
    /// If there is none.
    pub fn set_u32(&mut self, at: Mark, value: u32) {
        self.bytes[at.bytes..at.bytes + 4].copy_from_slice(&value.to_be_bytes());
    }

    /// Removes what was appended since a mark.
    pub fn truncate(&mut self, to: Mark) {
        self.bytes.truncate(to.bytes);
        self.bulk.truncate(to.bulk);
    }

    /// Copies the stream. Segments of bulk items become shared between both.
    ///
    /// # Panics
    /// If the memory of a bulk item belongs to another owner.
    pub fn again(&mut self) -> Encoder {
        let bulk = self.bulk.iter_mut().map(|(at, body)| (*at, body.again())).collect();
        Encoder { bytes: self.bytes.clone(), bulk }
    }

    /// All its bytes, bulk items included; not those that are lent, whose bytes may change.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (mut all, mut done) = (Vec::with_capacity(self.len()), 0);
        for (at, body) in &self.bulk {
            all.extend_from_slice(&self.bytes[done..*at]);
            done = *at;
            let end = all.len() + padded(body.len());
            body.bytes(|bytes| all.extend_from_slice(bytes));
            all.resize(end, 0);
        }
        all.extend_from_slice(&self.bytes[done..]);
        all
    }

    /// What [`Encoder::into_parts`] has taken apart.
    pub(crate) fn from_parts(bytes: Vec<u8>, bulk: SmallVec<[(usize, Body); 1]>) -> Encoder {
        Encoder { bytes, bulk }
    }

    /// The stream without its first bytes, which have no bulk items among them.
    ///
    /// # Panics
    /// If it is shorter.
    pub(crate) fn behind_first(mut self, len: usize) -> Encoder {
        self.bytes.drain(..len);
        self.bulk.iter_mut().for_each(|(at, _)| *at -= len);
        self
    }

    /// The bytes, and the bulk items with the number of bytes before each.
    pub fn into_parts(self) -> (Vec<u8>, SmallVec<[(usize, Body); 1]>) {
        (self.bytes, self.bulk)
    }
}

/// A place in a stream that is being encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    bytes: usize,
    bulk: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use proptest::prelude::*;
    use smallvec::smallvec;
    use thruway_engine::Segments;

    fn segment(content: &[u8]) -> Segment {
        let segments = Segments::new(1, 4096).unwrap();
        let mut segment = segments.reserve(1).now_or_never().unwrap().segment(content.len());
        segment.as_mut_slice().copy_from_slice(content);
        segment
    }

    #[test]
    fn items_are_big_endian_words() {
        let mut out = Encoder::new();
        out.u32(1);
        out.i64(-2);
        out.bool(true);
        out.opaque(b"abcde");
        out.option(Some(7), Encoder::u32);
        out.option(None, Encoder::u32);
        out.array(&[8, 9], |out, e| out.u32(*e));
        let (bytes, _) = out.into_parts();
        let expected = "00000001fffffffffffffffe0000000100000005616263646500000000000001000000070000000000000002\
                        0000000800000009";
        assert_eq!(bytes.iter().map(|b| format!("{b:02x}")).collect::<String>(), expected);
        let mut decoder = Decoder::new(&bytes);
        assert_eq!((decoder.u32(), decoder.i64(), decoder.bool()), (Ok(1), Ok(-2), Ok(true)));
        assert_eq!(decoder.opaque(5), Ok(&b"abcde"[..]));
        assert_eq!((decoder.option(Decoder::u32), decoder.option(Decoder::u32)), (Ok(Some(7)), Ok(None)));
        assert_eq!(decoder.array(2, Decoder::u32), Ok(vec![8, 9]));
        assert_eq!(decoder.finish(), Ok(()));
    }

    #[test]
    fn what_is_wrong_is_told() {
        assert_eq!(Decoder::new(&[0, 0, 0]).u32(), Err(DecodeError::Truncated));
        assert_eq!(Decoder::new(&[0, 0, 0, 2]).bool(), Err(DecodeError::Invalid { value: 2 }));
        assert_eq!(Decoder::new(&[0, 0, 0, 9]).opaque(8), Err(DecodeError::TooLong { len: 9, max: 8 }));
        assert_eq!(Decoder::new(&[0, 0, 0, 5, 1, 2, 3, 4, 5]).opaque(8), Err(DecodeError::Truncated), "no padding");
        assert_eq!(Decoder::new(&[0; 5]).finish(), Err(DecodeError::Trailing(5)));
        let mut many = Decoder::new(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!(many.array(u32::MAX, Decoder::u32), Err(DecodeError::Truncated), "and no memory for 2^32");
    }

    #[test]
    fn bulk_items_are_where_their_position_says() {
        // 4 bytes, a length and five bytes of bulk, an integer, a length and an inline item, a length and bulk.
        let mut out = Encoder::new();
        out.u32(1);
        out.u32(5);
        out.u32(2);
        out.opaque(b"xyz");
        out.u32(4);
        let (bytes, _) = out.into_parts();
        let bulk = || -> SmallVec<[BulkItem; 1]> {
            smallvec![
                BulkItem { position: 8, segment: segment(b"first") },
                BulkItem { position: 32, segment: segment(b"last") },
            ]
        };
        let mut decoder = Decoder::with_bulk(&bytes, 0, bulk());
        assert_eq!(decoder.u32(), Ok(1));
        assert!(matches!(decoder.bulk(9), Ok(Bulk::Segment(s)) if s.as_slice() == b"first"));
        assert_eq!((decoder.position(), decoder.u32()), (16, Ok(2)));
        assert!(matches!(decoder.bulk(9), Ok(Bulk::Inline(b"xyz"))));
        assert!(matches!(decoder.bulk(9), Ok(Bulk::Segment(s)) if s.as_slice() == b"last"));
        assert_eq!(decoder.finish(), Ok(()));
        // One that is not asked for is not overlooked.
        let mut decoder = Decoder::with_bulk(&bytes, 0, bulk());
        assert_eq!(decoder.take(bytes.len()).map(<[u8]>::len), Ok(bytes.len()));
        assert_eq!(decoder.finish(), Err(DecodeError::Misplaced));
        // Nor is one of another length.
        let other = smallvec![BulkItem { position: 8, segment: segment(b"longer than that") }];
        let mut decoder = Decoder::with_bulk(&bytes, 0, other);
        assert_eq!(decoder.u32(), Ok(1));
        assert_eq!(decoder.bulk(9).unwrap_err(), DecodeError::Misplaced);
        // Padding may come with it.
        let padding = smallvec![BulkItem { position: 8, segment: segment(b"first\0\0\0") }];
        let mut decoder = Decoder::with_bulk(&bytes, 0, padding);
        assert_eq!(decoder.u32(), Ok(1));
        assert!(matches!(decoder.bulk(9), Ok(Bulk::Segment(s)) if s.as_slice() == b"first"));
    }

    #[test]
    fn a_stream_is_cut_at_a_mark() {
        let mut out = Encoder::new();
        let count = out.mark();
        out.u32(0);
        let before = out.mark();
        out.bulk(Body::Bytes(vec![1; 5]));
        assert_eq!(out.len(), 4 + 4 + 8);
        out.truncate(before);
        out.set_u32(count, 3);
        assert_eq!(out.len(), 4);
        let (bytes, bulk) = out.into_parts();
        assert_eq!((bytes, bulk.len()), (vec![0, 0, 0, 3], 0));
    }

    proptest! {
        #[test]
        fn opaque_items_come_back(items in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..10)) {
            let mut out = Encoder::new();
            out.array(&items, |out, item| out.opaque(item));
            let (bytes, _) = out.into_parts();
            let mut decoder = Decoder::new(&bytes);
            let back = decoder.array(10, |d| d.opaque(40).map(<[u8]>::to_vec));
            prop_assert_eq!(back, Ok(items));
            prop_assert_eq!(decoder.finish(), Ok(()));
        }
    }
}
