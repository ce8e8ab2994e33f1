//! Registered memory.

use super::abi::*;
use super::device::{Context, ProtectionDomain, lock};
use crate::memory::{Access, Owner};
use crate::provider::RegionOps;
use crate::{Error, Result};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Registered memory.
pub(super) struct Region {
    context: Arc<Context>,
    pub(super) pd: Arc<ProtectionDomain>,
    raw: Mutex<Option<*mut ibv_mr>>,
    lkey: u32,
    rkey: u32,
    ptr: *mut u8,
    pub(super) base: u64,
    pub(super) len: usize,
    pub(super) writable: bool,
    pub(super) valid: AtomicBool,
    owner: Owner,
}

// SAFETY: as for `Context`; `ptr` is only arithmetic.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// # Safety
    /// `ptr..ptr+len` must stay mapped while `owner` lives.
    pub(super) unsafe fn register(
        context: &Arc<Context>,
        pd: &Arc<ProtectionDomain>,
        ptr: *mut u8,
        len: usize,
        base: u64,
        access: Access,
        owner: Owner,
    ) -> Result<Arc<Region>> {
        let mut flags = 0;
        for (right, flag) in [
            (Access::LOCAL_WRITE, ACCESS_LOCAL_WRITE),
            (Access::REMOTE_WRITE, ACCESS_REMOTE_WRITE | ACCESS_LOCAL_WRITE),
            (Access::REMOTE_READ, ACCESS_REMOTE_READ),
        ] {
            if access.contains(right) {
                flags |= flag;
            }
        }
        if access.contains(Access::REMOTE_ATOMIC) && context.attributes.atomics {
            flags |= ACCESS_REMOTE_ATOMIC | ACCESS_LOCAL_WRITE;
        }
        // iWARP cards place read results as they place a peer's writes; siw does not need it.
        if context.iwarp && flags & ACCESS_LOCAL_WRITE != 0 && !context.siw {
            flags |= ACCESS_REMOTE_WRITE;
        }
        // siw goes by the memory's own addresses whatever it is told.
        if base != ptr as u64 && context.siw {
            return Err(Error::Unsupported("regions that begin at another address than their memory, on siw"));
        }
        // SAFETY: the caller's promise; the region holds `owner` and `pd`.
        let raw = unsafe { (context.lib.ibv_reg_mr_iova2)(pd.raw, ptr.cast(), len, base, flags) };
        if raw.is_null() {
            let error = io::Error::last_os_error();
            let hint = if error.kind() == io::ErrorKind::OutOfMemory { " (is `ulimit -l` large enough?)" } else { "" };
            return Err(Error::io("registering memory", io::Error::new(error.kind(), format!("{error}{hint}"))));
        }
        // SAFETY: just made.
        let (lkey, rkey) = unsafe { ((*raw).lkey, (*raw).rkey) };
        let region = Arc::new(Region {
            context: Arc::clone(context),
            pd: Arc::clone(pd),
            raw: Mutex::new(Some(raw)),
            lkey,
            rkey,
            ptr,
            base,
            len,
            writable: access.contains(Access::LOCAL_WRITE),
            valid: AtomicBool::new(true),
            owner,
        });
        lock(&context.regions).insert(rkey, Arc::downgrade(&region));
        lock(&context.local).insert(lkey, Arc::downgrade(&region));
        Ok(region)
    }

    pub(super) fn deregister(&self) {
        let Some(raw) = lock(&self.raw).take() else { return };
        self.valid.store(false, Ordering::SeqCst);
        lock(&self.context.regions).remove(&self.rkey);
        lock(&self.context.local).remove(&self.lkey);
        // SAFETY: registered by us and deregistered once. When this returns, the device is done
        // with the memory.
        let rc = unsafe { (self.context.lib.ibv_dereg_mr)(raw) };
        if rc != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(rc), "deregistering memory");
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.deregister();
    }
}

pub(super) struct RegionHandle(pub(super) Arc<Region>);

impl RegionOps for RegionHandle {
    fn key(&self) -> u32 {
        self.0.lkey
    }

    fn remote_key(&self) -> u32 {
        self.0.rkey
    }

    fn base(&self) -> u64 {
        self.0.base
    }

    fn len(&self) -> usize {
        self.0.len
    }

    fn is_valid(&self) -> bool {
        self.0.valid.load(Ordering::SeqCst)
    }

    fn bind(&self, offset: usize, len: usize, access: Access) -> Result<Arc<dyn RegionOps>> {
        let region = &self.0;
        if offset > region.len || len > region.len - offset {
            let (addr, lkey) = (region.base.wrapping_add(offset as u64), region.lkey);
            return Err(Error::LocalProtection { addr, len: len as u64, lkey, why: "outside the region" });
        }
        let (ptr, base, owner) =
            (region.ptr.wrapping_add(offset), region.base + offset as u64, Arc::clone(&region.owner));
        // SAFETY: a part of a region whose owner keeps it mapped.
        let window = unsafe { Region::register(&region.context, &region.pd, ptr, len, base, access, owner) }?;
        Ok(Arc::new(RegionHandle(window)))
    }

    fn deregister(&self) {
        self.0.deregister();
    }
}
