//! Registered memory, and windows on it.

use super::abi::*;
use super::device::{Context, ProtectionDomain, failed, lock};
use super::endpoint::Endpoint;
use crate::provider::RegionOps;
use crate::{Error, Result};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use thruway_rdma_types::{Access, Owner};

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
    pub(super) valid: Arc<AtomicBool>,
    owner: Owner,
    /// What grants rights to parts of it, and grants nothing when it has gone.
    granted: Mutex<Vec<Grant>>,
}

enum Grant {
    Window(Weak<Window>),
    Part(Weak<Region>),
}

impl Grant {
    fn lives(&self) -> bool {
        match self {
            Grant::Window(window) => window.strong_count() > 0,
            Grant::Part(part) => part.strong_count() > 0,
        }
    }

    /// Takes the right back. False if the device still needs what it is on.
    fn revoke(&self) -> bool {
        match self {
            Grant::Window(window) => window.upgrade().is_none_or(|window| window.revoke()),
            Grant::Part(part) => {
                part.upgrade().iter().for_each(|part| part.deregister());
                true
            }
        }
    }
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
        if context.attributes.windows {
            flags |= ACCESS_MW_BIND;
        }
        if access.contains(Access::ON_DEMAND) {
            if !context.attributes.on_demand {
                return Err(Error::Unsupported("on-demand paging on this device"));
            }
            flags |= ACCESS_ON_DEMAND;
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
            valid: Arc::new(AtomicBool::new(true)),
            owner,
            granted: Mutex::default(),
        });
        lock(&context.revocable).insert(rkey, Arc::clone(&region.valid));
        lock(&context.local).insert(lkey, Arc::downgrade(&region));
        Ok(region)
    }

    /// Whether a window on a part can be had.
    fn check_part(&self, offset: usize, len: usize, access: Access) -> Result<()> {
        let (addr, lkey) = (self.base.wrapping_add(offset as u64), self.lkey);
        let fail = |why| Err(Error::LocalProtection { addr, len: len as u64, lkey, why });
        if !self.valid.load(Ordering::SeqCst) {
            return fail("no such key");
        }
        if offset > self.len || len > self.len - offset {
            return fail("window outside its region");
        }
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) && !self.writable {
            return fail("the region was not registered for local writing");
        }
        Ok(())
    }

    /// A registration of a part, where there are no windows.
    pub(super) fn part(&self, offset: usize, len: usize, access: Access) -> Result<Arc<dyn RegionOps>> {
        self.check_part(offset, len, access)?;
        let (ptr, base, owner) = (self.ptr.wrapping_add(offset), self.base + offset as u64, Arc::clone(&self.owner));
        // SAFETY: a part of a region whose owner keeps it mapped.
        let part = unsafe { Region::register(&self.context, &self.pd, ptr, len, base, access, owner) }?;
        self.grant(Grant::Part(Arc::downgrade(&part)))?;
        Ok(Arc::new(RegionHandle(part)))
    }

    /// Remembers what is to be revoked with the region.
    ///
    /// # Errors
    /// If that has gone meanwhile; then the grant is the caller's to undo.
    fn grant(&self, grant: Grant) -> Result<()> {
        let mut granted = lock(&self.granted);
        if !self.valid.load(Ordering::SeqCst) {
            return self.check_part(0, 0, Access::empty());
        }
        if granted.len() == granted.capacity() {
            granted.retain(Grant::lives);
            let live = granted.len();
            granted.reserve(live.max(8));
        }
        granted.push(grant);
        Ok(())
    }

    /// Takes the keys back, and those of everything on it. While a request that binds a window on it is in a send queue,
    /// the device needs the region: the end of that request is the end of the region, too.
    pub(super) fn deregister(&self) {
        let mut granted = {
            let mut granted = lock(&self.granted);
            self.valid.store(false, Ordering::SeqCst);
            std::mem::take(&mut *granted)
        };
        granted.retain(|grant| !grant.revoke());
        if !granted.is_empty() {
            lock(&self.granted).extend(granted);
            return;
        }
        let Some(raw) = lock(&self.raw).take() else { return };
        // Before the device may give the same keys to another.
        lock(&self.context.revocable).remove(&self.rkey);
        lock(&self.context.local).remove(&self.lkey);
        // SAFETY: registered by us and deregistered once. When this returns, the device is done
        // with the memory.
        let rc = unsafe { (self.context.lib.ibv_dereg_mr)(raw) };
        if rc != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(rc), "cannot deregister memory");
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

    fn part(&self, offset: usize, len: usize, access: Access) -> Result<Arc<dyn RegionOps>> {
        self.0.part(offset, len, access)
    }

    fn deregister(&self) {
        self.0.deregister();
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// A window on part of a region.
pub(super) struct Window {
    context: Arc<Context>,
    /// Whose peer may use it.
    endpoint: Weak<Endpoint>,
    raw: Mutex<Binding>,
    rkey: u32,
    base: u64,
    len: usize,
    valid: Arc<AtomicBool>,
    region: Arc<Region>,
}

struct Binding {
    mw: Option<*mut ibv_mw>,
    /// The request that binds it is still in the send queue.
    pending: bool,
    /// The consumer has no more use for it.
    dropped: bool,
}

// SAFETY: as for `Context`.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

/// A window that is free to be bound, and the key it had last.
pub(super) struct Spare(*mut ibv_mw, u32);

// SAFETY: as for `Context`.
unsafe impl Send for Spare {}

impl Spare {
    fn allocate(region: &Region) -> Result<Spare> {
        // SAFETY: a live context.
        let alloc = unsafe { (*region.context.verbs).ops.alloc_mw };
        let alloc = alloc.ok_or(Error::Unsupported("windows with this device's library"))?;
        // SAFETY: a live protection domain, which the region holds.
        let mw = unsafe { alloc(region.pd.raw, MW_TYPE_2) };
        if mw.is_null() {
            return Err(failed("making a memory window"));
        }
        // SAFETY: just made.
        Ok(Spare(mw, unsafe { (*mw).rkey }))
    }

    /// Gives it back to the device.
    pub(super) fn free(self, context: &Context) {
        // SAFETY: a live context.
        let Some(dealloc) = (unsafe { (*context.verbs).ops.dealloc_mw }) else { return };
        // SAFETY: a window that nobody else has.
        let rc = unsafe { dealloc(self.0) };
        if rc != 0 {
            tracing::warn!(error = %io::Error::from_raw_os_error(rc.abs()), "cannot release a memory window");
        }
    }
}

impl Window {
    /// Makes a window, and the request that binds it, which the endpoint is to post.
    pub(super) fn prepare(
        endpoint: &Arc<Endpoint>,
        region: &Arc<Region>,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<(Arc<Window>, bind_mw)> {
        region.check_part(offset, len, access)?;
        let Spare(mw, last) = endpoint.take_spare().map_or_else(|| Spare::allocate(region), Ok)?;
        // The low byte is the consumer's: another one each time, so that old keys miss.
        let rkey = last & !0xff | u32::from((last as u8).wrapping_add(1));
        let mut mw_access_flags = 0;
        for (right, flag) in [
            (Access::REMOTE_WRITE, ACCESS_REMOTE_WRITE),
            (Access::REMOTE_READ, ACCESS_REMOTE_READ),
            (Access::REMOTE_ATOMIC, ACCESS_REMOTE_ATOMIC),
        ] {
            if access.contains(right) {
                mw_access_flags |= flag;
            }
        }
        let window = Arc::new(Window {
            context: Arc::clone(&region.context),
            endpoint: Arc::downgrade(endpoint),
            raw: Mutex::new(Binding { mw: Some(mw), pending: true, dropped: false }),
            rkey,
            base: region.base + offset as u64,
            len,
            valid: Arc::new(AtomicBool::new(true)),
            region: Arc::clone(region),
        });
        lock(&window.context.revocable).insert(rkey, Arc::clone(&window.valid));
        // From here until the request is done, neither the region nor the window goes.
        region.grant(Grant::Window(Arc::downgrade(&window)))?;
        let mr = lock(&region.raw).expect("the device keeps a region that is being bound");
        Ok((window.clone(), bind_mw { mw, rkey, mr, addr: window.base, length: len as u64, mw_access_flags }))
    }

    pub(super) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The request that binds it is done.
    pub(super) fn bound(&self, success: bool) {
        let mut raw = lock(&self.raw);
        raw.pending = false;
        if !success {
            self.retire();
        }
        if raw.dropped || !success {
            self.free(&mut raw);
        }
        drop(raw);
        self.let_go();
    }

    /// Its queue pair goes, or it was never bound.
    pub(super) fn end(&self) {
        let mut raw = lock(&self.raw);
        self.retire();
        raw.pending = false;
        self.free(&mut raw);
        drop(raw);
        self.let_go();
    }

    /// Ends it because its region goes. False while the request that binds it is in the send queue: without the window that
    /// would fail, and the connection with it.
    fn revoke(&self) -> bool {
        let mut raw = lock(&self.raw);
        self.retire();
        raw.dropped = true;
        if !raw.pending {
            self.free(&mut raw);
        }
        !raw.pending
    }

    /// A region that only waited for this goes.
    fn let_go(&self) {
        if !self.region.valid.load(Ordering::SeqCst) {
            self.region.deregister();
        }
    }

    fn retire(&self) -> bool {
        lock(&self.context.revocable).remove(&self.rkey);
        self.valid.swap(false, Ordering::SeqCst)
    }

    /// Gives it back to the device, under its lock: its queue pair must not go before.
    fn free(&self, raw: &mut Binding) {
        if let Some(mw) = raw.mw.take() {
            Spare(mw, self.rkey).free(&self.context);
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.end();
    }
}

pub(super) struct WindowHandle(pub(super) Arc<Window>);

impl RegionOps for WindowHandle {
    /// A window has no local key.
    fn key(&self) -> u32 {
        self.0.region.lkey
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

    fn part(&self, _offset: usize, _len: usize, _access: Access) -> Result<Arc<dyn RegionOps>> {
        Err(Error::Unsupported("a window on a window"))
    }

    fn deregister(&self) {
        let window = &self.0;
        // One that the peer has revoked is free to be bound again; another has to go.
        let spare = {
            let mut raw = lock(&window.raw);
            let revoked = !window.retire();
            raw.dropped = true;
            match raw.pending {
                true => None,
                false if revoked => raw.mw.take().map(|mw| Spare(mw, window.rkey)),
                false => {
                    window.free(&mut raw);
                    None
                }
            }
        };
        // Without the lock: this may be the last that holds the queue pair.
        match window.endpoint.upgrade() {
            Some(endpoint) => endpoint.forget_window(window.rkey, spare),
            None => spare.into_iter().for_each(|spare| spare.free(&window.context)),
        }
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
