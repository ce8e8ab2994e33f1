//! Memory that a peer may read or write for the length of a request, and how it is registered for that.
//!
//! The strategies are those that Noronha compares for NFS over RDMA (chapter 3): a registration for each request, a window for each
//! request into memory that is registered once (what fast memory registration was for), memory that stays registered, and one
//! key for all memory. With the latter two a peer can still write when the request is over: what it has written is copied out, and
//! only peers that are trusted should be given such keys.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use thruway_engine::Segment;
use thruway_engine::segment::Segments;
use thruway_fabric::{Access, Buffer, MemoryRegion, ProtectionDomain, RemoteAddr};

/// How memory is registered for a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// For each request, and revoked when that is over.
    Dynamic,
    /// Once for this host; for each request a window for the peer, revoked when that is over.
    Windows,
    /// Each block once, with a key of its own for good. Data is copied.
    Cached,
    /// All blocks at once, with one key for good. Data is copied.
    All,
}

impl Registration {
    /// Whether a key is for one request only, so that the peer may revoke it.
    pub fn is_for_one_request(self) -> bool {
        matches!(self, Registration::Dynamic | Registration::Windows)
    }
}

/// Bytes of a small block.
const SMALL: usize = 16 << 10;

/// Memory for requests of one connection.
pub struct Exposures {
    pd: ProtectionDomain,
    how: Registration,
    small: Segments,
    large: Segments,
    /// What has been copied out of memory that the peer may still write.
    copies: Segments,
    /// Registrations that stay, by the first byte of a block or a pool.
    kept: RefCell<HashMap<usize, MemoryRegion>>,
}

/// Memory of one request, which a peer may use until this is dropped or taken.
pub struct Exposed {
    segment: Segment,
    /// Its key, if that is for this request only.
    key: Option<MemoryRegion>,
    remote: RemoteAddr,
    copies: Segments,
}

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl Exposures {
    /// Memory for so many requests at a time, with items of up to `large` bytes.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn new(pd: &ProtectionDomain, how: Registration, requests: usize, large: usize) -> io::Result<Exposures> {
        // A call and its reply may both have one.
        let segments = |len| Segments::new(2 * requests, len).map_err(other);
        Ok(Exposures {
            pd: pd.clone(),
            how,
            small: segments(SMALL)?,
            large: segments(large)?,
            copies: segments(large)?,
            kept: RefCell::default(),
        })
    }

    /// Room for `len` bytes that the peer may write.
    ///
    /// # Errors
    /// If it cannot be registered, or there is no block so large.
    pub async fn room(&self, len: usize) -> io::Result<Exposed> {
        let segment = self.segment(len).await?;
        self.expose(segment, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
    }

    /// Bytes that the peer may read, one part behind the other.
    ///
    /// # Errors
    /// As [`Exposures::room`].
    pub async fn data(&self, parts: &[&[u8]]) -> io::Result<Exposed> {
        let segment = self.segment(parts.iter().map(|part| part.len()).sum()).await?;
        let mut at = segment.offset();
        for part in parts {
            // A peer may still have a key to it.
            segment.buffer().write(at, part);
            at += part.len();
        }
        self.expose(segment, Access::REMOTE_READ)
    }

    /// A segment of other memory, for the peer to read.
    ///
    /// # Errors
    /// If it cannot be registered.
    pub fn lend(&self, segment: Segment) -> io::Result<Exposed> {
        self.expose(segment, Access::REMOTE_READ)
    }

    async fn segment(&self, len: usize) -> io::Result<Segment> {
        let class = if len <= SMALL { &self.small } else { &self.large };
        if len > class.pool().payload_len() {
            return Err(other(format!("{len} bytes are more than one request may have")));
        }
        Ok(class.reserve(1).await.segment(len))
    }

    /// Whether a buffer is that of its own blocks.
    fn has(&self, buffer: &Arc<Buffer>) -> bool {
        [&self.small, &self.large].iter().any(|own| Arc::ptr_eq(own.pool().buffer(), buffer))
    }

    /// The registration of a range of a buffer that stays.
    fn keep(&self, buffer: &Arc<Buffer>, range: Option<(usize, usize)>, access: Access) -> io::Result<usize> {
        let (offset, len) = range.unwrap_or((0, buffer.len()));
        let first = buffer.as_ptr() as usize + offset;
        let mut kept = self.kept.borrow_mut();
        if let std::collections::hash_map::Entry::Vacant(place) = kept.entry(first) {
            place.insert(self.register(buffer, offset, len, access)?);
        }
        Ok(first)
    }

    fn register(&self, buffer: &Arc<Buffer>, offset: usize, len: usize, access: Access) -> io::Result<MemoryRegion> {
        assert!(offset + len <= buffer.len(), "a part of the buffer");
        let owner = Arc::clone(buffer);
        // SAFETY: the range is inside the buffer, which the region keeps. What peers may change is not borrowed meanwhile: a segment
        // is taken back by its holder when its key has been revoked, or is read as memory that changes.
        unsafe { self.pd.register_raw(buffer.as_ptr().wrapping_add(offset), len, access, owner) }.map_err(other)
    }

    fn expose(&self, segment: Segment, access: Access) -> io::Result<Exposed> {
        const BOTH: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);
        let buffer = Arc::clone(segment.buffer());
        let (offset, len) = (segment.offset(), segment.len());
        let (key, remote) = match self.how {
            Registration::Dynamic => {
                let key = self.register(&buffer, offset, len, access | Access::REMOTE_INVALIDATE)?;
                let remote = key.remote(0);
                (Some(key), remote)
            }
            Registration::Windows => {
                let all = self.keep(&buffer, None, BOTH)?;
                let key = self.kept.borrow()[&all].bind_window(offset, len, access).map_err(other)?;
                let remote = key.remote(0);
                (Some(key), remote)
            }
            Registration::Cached if self.has(&buffer) => {
                let class = if len <= SMALL { SMALL } else { self.large.pool().payload_len() };
                let block = self.keep(&buffer, Some((offset, class)), BOTH)?;
                (None, self.kept.borrow()[&block].remote(0))
            }
            Registration::Cached | Registration::All => {
                let all = self.keep(&buffer, None, BOTH)?;
                (None, self.kept.borrow()[&all].remote(offset))
            }
        };
        Ok(Exposed { segment, key, remote, copies: self.copies.clone() })
    }
}

impl Exposed {
    /// Where it is, for the peer.
    pub fn remote(&self) -> RemoteAddr {
        self.remote
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.segment.len()
    }

    /// Takes the first bytes back: the peer can change them no more.
    ///
    /// # Panics
    /// If there are fewer.
    pub async fn take(self, len: usize) -> Segment {
        let Exposed { mut segment, key, copies, .. } = self;
        assert!(len <= segment.len(), "no more than there are");
        if let Some(key) = key {
            drop(key);
            drop(segment.split_off(len));
            return segment;
        }
        let mut copy = copies.reserve(1).await.segment(len);
        segment.buffer().read(segment.offset(), copy.as_mut_slice());
        copy
    }
}
