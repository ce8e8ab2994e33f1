//! Regions and windows, and the table that maps a steering tag to them.
//!
//! A region is memory plus the rights to it. The table is the only way from a 32-bit key, which
//! a peer may have invented, to an address; every check RFC 5040 §7 and RFC 5041 §7 ask for is
//! made here and nowhere else. Nothing in this module reads or writes what the memory holds.

use crate::stags::Stags;
use crate::terminate::{RdmaProtection, TerminateCode};
use crate::validity::Validity;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, PoisonError, RwLock};
use thruway_rdma_types::{Access, Owner};
use thruway_rdma_types::{Error, Result, Sge};

/// A registered range and the rights to it.
pub struct Region {
    ptr: *mut u8,
    len: usize,
    /// What the first byte is called by those who hold the key.
    base: u64,
    access: Access,
    pd: u32,
    /// The only queue pair whose peer may use it, if it is a window.
    stream: Option<u32>,
    stag: u32,
    validity: Validity,
    /// What a window is on. It grants nothing when that is revoked.
    parent: Option<Arc<Region>>,
    _owner: Owner,
}

// SAFETY: `ptr` refers to memory that `_owner` keeps mapped; the region itself only does address
// arithmetic on it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Where a peer's claim comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The queue pair's protection domain.
    pub pd: u32,
    /// The queue pair.
    pub qp_num: u32,
}

impl Region {
    /// Whether the peer of this queue pair may use the key at all.
    fn is_open_to(&self, stream: Stream) -> bool {
        self.pd == stream.pd && self.stream.is_none_or(|only| only == stream.qp_num)
    }

    /// The address of `addr..addr+len` if that lies inside.
    fn locate(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let offset = addr.checked_sub(self.base)?;
        // No further than addresses go.
        addr.checked_add(len)?;
        if offset > self.len as u64 || len > self.len as u64 - offset {
            return None;
        }
        // SAFETY: offset <= len of the mapping, so the result is inside it or one past its end.
        Some(unsafe { self.ptr.add(offset as usize) })
    }

    /// Holds off invalidation; `None` if it has come first. Not to be kept while waiting for
    /// anybody: who invalidates waits for it.
    pub fn enter(self: &Arc<Region>) -> Option<Placement> {
        self.parent.iter().chain([self]).for_each(|held| held.validity.enter());
        let placement = Placement(Arc::clone(self));
        self.is_valid().then_some(placement)
    }

    /// After this returns no peer's bytes land here any more.
    fn invalidate(&self) -> bool {
        self.validity.revoke()
    }

    /// Neither it nor what it is a window on has been revoked.
    pub fn is_valid(&self) -> bool {
        self.validity.holds() && self.parent.as_ref().is_none_or(|p| p.validity.holds())
    }
}

/// Holds off the invalidation of a region while bytes are being placed in it.
pub struct Placement(Arc<Region>);

impl Placement {
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        self.0.parent.iter().chain([&self.0]).for_each(|held| held.validity.leave());
    }
}

/// A scatter/gather element resolved to an address that its region keeps mapped.
#[derive(Clone)]
pub struct LocalPiece {
    pub(crate) ptr: *mut u8,
    pub(crate) len: u32,
    region: Arc<Region>,
}

impl LocalPiece {
    /// The region it is in.
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// As [`LocalPiece::region`].
    pub(crate) fn into_region(self) -> Arc<Region> {
        self.region
    }
}

// SAFETY: the region keeps the memory mapped; access follows the verbs ownership rule.
unsafe impl Send for LocalPiece {}

/// Maps steering tags to regions. One per device.
///
/// Tags cannot be foreseen in any of their 32 bits: a peer that may try one per connection (a wrong one ends it) does not
/// find one that it was not given. One that was revoked does not come back before all others have been given out.
pub struct RegionTable {
    regions: RwLock<Regions>,
}

struct Regions {
    by_stag: HashMap<u32, Arc<Region>, BuildHasherDefault<StagHasher>>,
    stags: Stags,
}

/// Tags are random already.
#[derive(Default)]
struct StagHasher(u64);

impl Hasher for StagHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("tags are hashed as numbers")
    }

    fn write_u32(&mut self, stag: u32) {
        self.0 = u64::from(stag).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Most regions and windows of a device.
const MAX_REGIONS: usize = 1 << 20;

impl Regions {
    /// A tag that is not in use, and not 0, which never names memory.
    fn new_stag(&mut self) -> u32 {
        loop {
            let stag = self.stags.next();
            if stag != 0 && !self.by_stag.contains_key(&stag) {
                return stag;
            }
        }
    }
}

impl RegionTable {
    /// An empty table, whose keys come in an unpredictable order.
    #[expect(clippy::new_without_default, reason = "a table of secrets is made on purpose")]
    pub fn new() -> RegionTable {
        RegionTable::with(Stags::secret())
    }

    /// For simulations and fuzzing: the first tags are `0x101`, `0x201` and so on.
    pub fn deterministic() -> RegionTable {
        RegionTable::with(Stags::deterministic())
    }

    fn with(stags: Stags) -> RegionTable {
        RegionTable { regions: RwLock::new(Regions { by_stag: HashMap::default(), stags }) }
    }

    fn insert(&self, mut region: Region) -> Result<Arc<Region>> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        if regions.by_stag.len() >= MAX_REGIONS {
            let limit = MAX_REGIONS as u64;
            return Err(Error::Limit { what: "memory regions", got: limit + 1, limit });
        }
        region.stag = regions.new_stag();
        let region = Arc::new(region);
        regions.by_stag.insert(region.stag, Arc::clone(&region));
        Ok(region)
    }

    fn remove(&self, stag: u32) {
        self.regions.write().unwrap_or_else(PoisonError::into_inner).by_stag.remove(&stag);
    }

    fn get(&self, stag: u32) -> Option<Arc<Region>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner).by_stag.get(&stag).cloned()
    }

    /// Resolves a local element that is not empty, for a request of protection domain `pd` that needs the rights `needed`. A region
    /// that the caller `knows` need not be looked for, if it is that one.
    pub(crate) fn local(&self, pd: u32, sge: &Sge, needed: Access, known: Option<Arc<Region>>) -> Result<LocalPiece> {
        let fail = |why| Error::LocalProtection { addr: sge.addr, len: sge.len.into(), lkey: sge.lkey, why };
        let region = known.filter(|known| known.stag == sge.lkey).or_else(|| self.get(sge.lkey));
        let region = region.filter(|r| r.is_valid()).ok_or_else(|| fail("no such key"))?;
        if region.pd != pd {
            return Err(fail("the key belongs to another protection domain"));
        }
        if !region.access.contains(needed) {
            return Err(fail("the region was not registered for local writing"));
        }
        let ptr = region.locate(sge.addr, sge.len.into()).ok_or_else(|| fail("outside the region"))?;
        Ok(LocalPiece { ptr, len: sge.len, region })
    }

    /// Resolves local elements, with `needed` rights, for one request of protection domain `pd`. What is `known` may be one of
    /// their regions, and is taken then.
    pub(crate) fn resolve(
        &self,
        pd: u32,
        sges: &[Sge],
        needed: Access,
        known: &mut Option<Arc<Region>>,
        out: &mut smallvec::SmallVec<[LocalPiece; 2]>,
    ) -> Result<u64> {
        let mut total = 0;
        for sge in sges.iter().filter(|sge| sge.len > 0) {
            total += u64::from(sge.len);
            out.push(self.local(pd, sge, needed, known.take())?);
        }
        Ok(total)
    }

    /// Checks a peer's claim on memory and returns its address, held against invalidation.
    pub fn remote(
        &self,
        stream: Stream,
        stag: u32,
        to: u64,
        len: u64,
        needed: Access,
    ) -> Result<(*mut u8, Placement), TerminateCode> {
        let region = self.get(stag).ok_or(RdmaProtection::InvalidStag)?;
        if !region.is_open_to(stream) {
            return Err(RdmaProtection::StagNotAssociated.into());
        }
        let placement = region.enter().ok_or(RdmaProtection::InvalidStag)?;
        if !region.access.contains(needed) {
            return Err(RdmaProtection::AccessRights.into());
        }
        if to.checked_add(len).is_none() {
            return Err(RdmaProtection::ToWrap.into());
        }
        let ptr = region.locate(to, len).ok_or(RdmaProtection::BaseOrBounds)?;
        Ok((ptr, placement))
    }

    /// Memory that a read response will be sent from; stays mapped until sent.
    pub(crate) fn remote_source(
        &self,
        stream: Stream,
        stag: u32,
        to: u64,
        len: u32,
    ) -> Result<LocalPiece, TerminateCode> {
        let (ptr, placement) = self.remote(stream, stag, to, len.into(), Access::REMOTE_READ)?;
        Ok(LocalPiece { ptr, len, region: Arc::clone(&placement.0) })
    }

    /// Revokes a key on the peer's behalf (Send with Invalidate): a window that it could have used, or a region
    /// whose owner allows it.
    pub(crate) fn remote_invalidate(&self, stream: Stream, stag: u32) -> Result<(), TerminateCode> {
        let region = self.get(stag).ok_or(RdmaProtection::StagCannotBeInvalidated)?;
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let revocable = region.parent.is_some() || region.access.contains(Access::REMOTE_INVALIDATE);
        if !region.is_open_to(stream) || !revocable || !region.access.intersects(remote) || !region.invalidate() {
            return Err(RdmaProtection::StagCannotBeInvalidated.into());
        }
        Ok(())
    }

    /// Registers memory that `owner` keeps mapped.
    ///
    /// # Safety
    /// `ptr..ptr+len` must be mapped readable and writable for as long as `owner` lives.
    pub unsafe fn register(
        &self,
        pd: u32,
        ptr: *mut u8,
        len: usize,
        base: u64,
        access: Access,
        owner: Owner,
    ) -> Result<Arc<Region>> {
        self.insert(Region {
            ptr,
            len,
            base,
            access,
            pd,
            stream: None,
            stag: 0,
            validity: Validity::new(),
            parent: None,
            _owner: owner,
        })
    }

    /// A window on part of `parent`, under its own key; for the peer of one queue pair, if one is given.
    pub fn bind(
        &self,
        stream: Option<Stream>,
        parent: &Arc<Region>,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Arc<Region>> {
        let fail = |why| {
            let (addr, lkey) = (parent.base.wrapping_add(offset as u64), parent.stag());
            Error::LocalProtection { addr, len: len as u64, lkey, why }
        };
        if stream.is_some_and(|s| s.pd != parent.pd) {
            return Err(fail("the key belongs to another protection domain"));
        }
        if !parent.is_valid() {
            return Err(fail("no such key"));
        }
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if access.intersects(writes) && !parent.access.contains(Access::LOCAL_WRITE) {
            return Err(fail("the region was not registered for local writing"));
        }
        let base = parent.base.checked_add(offset as u64).ok_or_else(|| fail("window outside its region"))?;
        let ptr = parent.locate(base, len as u64).ok_or_else(|| fail("window outside its region"))?;
        self.insert(Region {
            ptr,
            len,
            base,
            access,
            pd: parent.pd,
            stream: stream.map(|s| s.qp_num),
            stag: 0,
            validity: Validity::new(),
            parent: Some(Arc::clone(parent)),
            // It is a part of the parent's memory, which the parent's own owner keeps mapped.
            _owner: Arc::clone(parent) as Owner,
        })
    }

    /// Takes a region out of the table. After this returns no peer's bytes land there any more.
    pub fn deregister(&self, region: &Region) {
        region.invalidate();
        self.remove(region.stag());
    }
}

impl Region {
    /// Its key: the steering tag.
    pub fn stag(&self) -> u32 {
        self.stag
    }

    /// The address of its first byte, in the terms of its peers.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_memory::Buffer;

    const ONE: Stream = Stream { pd: 1, qp_num: 7 };
    const OTHER: Stream = Stream { pd: 2, qp_num: 7 };

    #[test]
    fn a_window_of_a_whole_domain_is_open_to_each_of_its_streams() {
        let (t, r) = table_with(Access::LOCAL_WRITE);
        let w = t.bind(None, &r, 0, 512, Access::REMOTE_WRITE).unwrap();
        for stream in [ONE, Stream { qp_num: 8, ..ONE }] {
            assert!(t.remote(stream, w.stag(), 0x1000, 512, Access::REMOTE_WRITE).is_ok());
        }
        assert!(t.remote(OTHER, w.stag(), 0x1000, 512, Access::REMOTE_WRITE).is_err());
    }

    fn table_with(access: Access) -> (RegionTable, Arc<Region>) {
        let table = RegionTable::new();
        let buffer = Arc::new(Buffer::new(4096).unwrap());
        let ptr = buffer.as_ptr();
        // SAFETY: the buffer is the owner.
        let region = unsafe { table.register(1, ptr, 4096, 0x1000, access, buffer) }.unwrap();
        (table, region)
    }

    fn code(r: Result<(*mut u8, Placement), TerminateCode>) -> TerminateCode {
        r.err().expect("an access violation")
    }

    #[test]
    fn every_violation_has_its_own_code() {
        let (t, r) = table_with(Access::REMOTE_WRITE);
        let stag = r.stag();
        let w = Access::REMOTE_WRITE;
        assert!(t.remote(ONE, stag, 0x1000, 4096, w).is_ok());
        assert_eq!(code(t.remote(ONE, stag ^ 1, 0x1000, 1, w)), RdmaProtection::InvalidStag.into());
        assert_eq!(code(t.remote(ONE, 0, 0x1000, 1, w)), RdmaProtection::InvalidStag.into());
        assert_eq!(code(t.remote(OTHER, stag, 0x1000, 1, w)), RdmaProtection::StagNotAssociated.into());
        assert_eq!(code(t.remote(ONE, stag, 0x1000, 1, Access::REMOTE_READ)), RdmaProtection::AccessRights.into());
        assert_eq!(code(t.remote(ONE, stag, 0xfff, 1, w)), RdmaProtection::BaseOrBounds.into());
        assert_eq!(code(t.remote(ONE, stag, 0x1fff, 2, w)), RdmaProtection::BaseOrBounds.into());
        assert_eq!(code(t.remote(ONE, stag, u64::MAX, 2, w)), RdmaProtection::ToWrap.into());
    }

    #[test]
    fn tags_do_not_come_back_and_cannot_be_foreseen() {
        let (t, r) = table_with(Access::REMOTE_WRITE);
        let buffer = Arc::new(Buffer::new(4096).unwrap());
        let mut seen = std::collections::HashSet::from([r.stag()]);
        // Each tag is a cipher's work, which takes long under Miri.
        let count = if cfg!(miri) { 50 } else { 5000 };
        for _ in 0..count {
            let owner = Arc::clone(&buffer);
            // SAFETY: the buffer is the owner.
            let new = unsafe { t.register(1, buffer.as_ptr(), 4096, 0, Access::REMOTE_WRITE, owner) }.unwrap();
            assert!(seen.insert(new.stag()), "the tag of a region that is gone");
            t.deregister(&new);
            assert_eq!(code(t.remote(ONE, new.stag(), 0, 1, Access::REMOTE_WRITE)), RdmaProtection::InvalidStag.into());
        }
        let steps: std::collections::HashSet<u32> = seen.iter().map(|s| s >> 20).collect();
        assert!(steps.len() > count / 5, "spread over all of the space");
    }

    #[test]
    fn peers_revoke_windows_and_regions_only_where_that_is_allowed() {
        let (t, r) = table_with(Access::REMOTE_WRITE | Access::LOCAL_WRITE);
        assert!(t.remote_invalidate(ONE, r.stag()).is_err(), "the pool of all");
        let window = t.bind(Some(ONE), &r, 0, 64, Access::REMOTE_WRITE).unwrap();
        assert_eq!(t.remote_invalidate(ONE, window.stag()), Ok(()));
        assert!(r.is_valid());
        let (t, r) = table_with(Access::REMOTE_WRITE | Access::REMOTE_INVALIDATE);
        assert_eq!(t.remote_invalidate(ONE, r.stag()), Ok(()));
    }

    #[test]
    fn a_window_grants_nothing_when_its_region_is_gone() {
        let (t, r) = table_with(Access::LOCAL_WRITE);
        let w = t.bind(Some(ONE), &r, 0, 64, Access::REMOTE_WRITE).unwrap();
        t.deregister(&r);
        assert!(!w.is_valid());
        assert_eq!(code(t.remote(ONE, w.stag(), 0x1000, 1, Access::REMOTE_WRITE)), RdmaProtection::InvalidStag.into());
    }

    #[test]
    fn a_window_grants_its_range_only_and_can_be_revoked_once() {
        let (t, r) = table_with(Access::LOCAL_WRITE);
        let w = t.bind(Some(ONE), &r, 512, 512, Access::REMOTE_WRITE).unwrap();
        assert!(t.remote(ONE, w.stag(), 0x1200, 512, Access::REMOTE_WRITE).is_ok());
        assert_eq!(code(t.remote(ONE, w.stag(), 0x11ff, 1, Access::REMOTE_WRITE)), RdmaProtection::BaseOrBounds.into());
        let neighbour = Stream { qp_num: 8, ..ONE };
        let theirs = t.remote(neighbour, w.stag(), 0x1200, 512, Access::REMOTE_WRITE);
        assert_eq!(code(theirs), RdmaProtection::StagNotAssociated.into());
        assert!(t.remote_invalidate(neighbour, w.stag()).is_err());
        assert!(t.bind(Some(OTHER), &r, 0, 1, Access::REMOTE_WRITE).is_err());
        assert_eq!(t.remote_invalidate(ONE, w.stag()), Ok(()));
        assert_eq!(code(t.remote(ONE, w.stag(), 0x1200, 1, Access::REMOTE_WRITE)), RdmaProtection::InvalidStag.into());
        assert!(t.remote_invalidate(ONE, w.stag()).is_err());
        assert!(t.remote_invalidate(ONE, r.stag()).is_err(), "no peer could use it, so none may revoke it");
        assert!(t.bind(Some(ONE), &r, 4000, 97, Access::REMOTE_READ).is_err());
    }
}
