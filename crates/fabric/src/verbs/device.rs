//! Devices, memory and completion queues of the verbs provider.

use super::abi::*;
use super::address::socket_address;
use super::completion::{Queue, QueueHandle};
use super::endpoint::{Endpoint, all_of};
use super::library::{Library, library};
use super::listener::{Request, VerbsListener};
use super::memory::{Region, RegionHandle};
use super::shared::{SharedHandle, SharedReceives};
use crate::provider::{CompletionQueueOps, DeviceOps, Event, ListenerOps, QueuePairOps, RegionOps, SharedReceiveOps};
use crate::reservation::Reservation;
use crate::{DeviceAttributes, Error, ListenOptions, QueuePairCaps, Result, Sge};
use rustix::event::{EventfdFlags, epoll};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use thruway_rdma_types::sync::LockUnpoisoned;
use thruway_rdma_types::{Access, Owner};

/// Bytes of a request's own copy of small payloads.
const MAX_INLINE: u32 = 64;
/// How often endpoints look at the clock.
const TICK: Duration = Duration::from_millis(10);
/// Polls for events ask the kernel so often: connections are rarer than completions, and asking costs two system calls.
const ASK_INTERVAL: Duration = Duration::from_micros(500);
/// What is ready, in the epoll set: events of connections and of the device.
const KERNEL: u64 = 0;
/// What is ready, in the epoll set: the completion channel.
const COMPLETIONS: u64 = 1;
/// What is ready, in the epoll set: another thread wakes the one that waits.
const WAKE: u64 = 2;
/// Longest wait between looks at the connection deadlines.
const EVENT_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// An opened device: a progress domain with an event channel and a completion channel of its own.
pub(super) struct Context {
    pub(super) lib: &'static Library,
    pub(super) verbs: *mut ibv_context,
    pub(super) cm: *mut rdma_event_channel,
    channel: *mut ibv_comp_channel,
    epoll: OwnedFd,
    wake: OwnedFd,
    pub(super) attributes: DeviceAttributes,
    pub(super) iwarp: bool,
    /// Linux's software iWARP, which differs from what its verbs promise in places.
    pub(super) siw: bool,
    filler: Option<Arc<Filler>>,
    pds: Mutex<HashMap<u32, Arc<ProtectionDomain>>>,
    next_pd: AtomicU32,
    pub(super) cqs: Mutex<Vec<Weak<Queue>>>,
    endpoints: Mutex<HashMap<u64, Weak<Endpoint>>>,
    by_number: Mutex<HashMap<u32, Weak<Endpoint>>>,
    listeners: Mutex<HashSet<u64>>,
    /// Shared receive queues, by their numbers, from 1.
    pub(super) shared: Mutex<HashMap<u32, Weak<SharedReceives>>>,
    pub(super) next_shared: AtomicU32,
    /// Whether keys are still valid: those that peers might revoke.
    pub(super) revocable: Mutex<HashMap<u32, Arc<AtomicBool>>>,
    /// By local key.
    pub(super) local: Mutex<HashMap<u32, Weak<Region>>>,
    /// Most elements of a read.
    pub(super) max_read_sge: usize,
    events: Mutex<VecDeque<Event>>,
    /// The consumer's handle has been dropped: events have no receiver any more. Changes under the lock of `events`.
    abandoned: AtomicBool,
    woken: AtomicBool,
    /// Polls that found nothing.
    pub(super) polls: AtomicU32,
    /// There as long as the hardware is.
    sysfs: Option<PathBuf>,
    /// The hardware is gone.
    lost: AtomicBool,
    /// When the endpoints last looked at the clock.
    ticked: Mutex<Instant>,
    /// When the kernel was last asked for events, or a wait has shown that it has none.
    asked: Mutex<Instant>,
    /// The next one asks in any case: it may have been woken for that.
    asks_next: AtomicBool,
}

// SAFETY: rdma-core's objects may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; its calls lock what they share.
unsafe impl Sync for Context {}

pub(super) struct ProtectionDomain {
    pub(super) lib: &'static Library,
    pub(super) raw: *mut ibv_pd,
}

// SAFETY: as for `Context`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as for `Context`.
unsafe impl Sync for ProtectionDomain {}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: ours; regions and queue pairs of it hold it, so none is left.
        unsafe { (self.lib.ibv_dealloc_pd)(self.raw) };
    }
}

/// An unused completion queue. libsiw takes the place 0x90000 among the queues that a process maps for the
/// mark of a failure, and refuses the queue pair that gets it, some seventy in; so something larger is put across it.
struct Filler {
    lib: &'static Library,
    raw: *mut ibv_cq,
}

// SAFETY: rdma-core's objects may be used from any thread.
unsafe impl Send for Filler {}
// SAFETY: as above.
unsafe impl Sync for Filler {}

impl Filler {
    /// Entries of 32 bytes, of which siw makes a power of two: a megabyte.
    const ENTRIES: i32 = 0x92000 / 32;

    /// The one of this hardware; none if it cannot be had, which only limits the number of queue pairs.
    fn of(lib: &'static Library, verbs: *mut ibv_context) -> Option<Arc<Filler>> {
        static KNOWN: Mutex<Vec<(usize, Weak<Filler>)>> = Mutex::new(Vec::new());
        let mut known = lock(&KNOWN);
        known.retain(|(_, filler)| filler.strong_count() > 0);
        if let Some(filler) = known.iter().find(|(of, _)| *of == verbs as usize).and_then(|(_, f)| f.upgrade()) {
            return Some(filler);
        }
        let nobody = std::ptr::null_mut();
        // SAFETY: an open context.
        let raw = unsafe { (lib.ibv_create_cq)(verbs, Filler::ENTRIES, nobody, std::ptr::null_mut(), 0) };
        let filler = (!raw.is_null()).then(|| Arc::new(Filler { lib, raw }))?;
        known.push((verbs as usize, Arc::downgrade(&filler)));
        Some(filler)
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // SAFETY: ours, and nothing uses it.
        unsafe { (self.lib.ibv_destroy_cq)(self.raw) };
    }
}

/// Gives connection identifiers their numbers; unique, so that an identifier may move to another
/// device.
pub(super) fn next_token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(super) fn failed(op: &'static str) -> Error {
    Error::io(op, io::Error::last_os_error())
}

/// The contexts that rdma_cm works with, which are the ones its identifiers name.
fn contexts(lib: &'static Library) -> Vec<*mut ibv_context> {
    let mut count = 0;
    // SAFETY: writes the count; the list ends with null and is ours to free.
    let list = unsafe { (lib.rdma_get_devices)(&raw mut count) };
    if list.is_null() {
        return Vec::new();
    }
    // SAFETY: `count` entries were just made. The contexts stay open until their hardware is gone.
    let found = unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec();
    // SAFETY: as above.
    unsafe { (lib.rdma_free_devices)(list) };
    found
}

fn name_of(lib: &Library, verbs: *mut ibv_context) -> String {
    // SAFETY: an open context and its device.
    unsafe { CStr::from_ptr((lib.ibv_get_device_name)((*verbs).device)) }.to_string_lossy().into_owned()
}

/// Where the kernel shows the device to programs.
fn sysfs_of(name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir("/sys/class/infiniband_verbs").ok()?;
    let is_it = |path: &PathBuf| std::fs::read_to_string(path.join("ibdev")).is_ok_and(|it| it.trim() == name);
    entries.filter_map(|e| Some(e.ok()?.path())).find(is_it)
}

/// Name of the device that rdma_cm binds this address to.
pub(super) fn serving(address: IpAddr) -> Option<String> {
    let lib = library().ok()?;
    // SAFETY: plain calls; every object made is destroyed below.
    unsafe {
        let channel = (lib.rdma_create_event_channel)();
        if channel.is_null() {
            return None;
        }
        let mut id = std::ptr::null_mut();
        let mut name = None;
        if (lib.rdma_create_id)(channel, &raw mut id, std::ptr::null_mut(), PS_TCP) == 0 {
            let addr = socket_address(SocketAddr::new(address, 0));
            let bound = (lib.rdma_bind_addr)(id, (&raw const addr).cast()) == 0;
            name = (bound && !(*id).verbs.is_null()).then(|| name_of(lib, (*id).verbs));
            (lib.rdma_destroy_id)(id);
        }
        (lib.rdma_destroy_event_channel)(channel);
        name
    }
}

/// Whether memory can be registered for everything a reliable connection does without being pinned.
fn pages_on_demand(verbs: *mut ibv_context) -> bool {
    // SAFETY: an open context. If its last field says so, it is the end of a `verbs_context`, which grows towards its
    // beginning: every field keeps its distance from the context, and `sz` tells how many there are.
    unsafe {
        if (*verbs).abi_compat as usize != usize::MAX {
            return false;
        }
        let before = |distance: usize| verbs.cast::<u8>().sub(distance);
        if before(SIZE_BEFORE).cast::<usize>().read() < QUERY_DEVICE_EX_BEFORE + size_of::<ibv_context>() {
            return false;
        }
        let Some(query) = before(QUERY_DEVICE_EX_BEFORE).cast::<Option<query_device_ex>>().read() else { return false };
        let mut attr: ibv_device_attr_ex = std::mem::zeroed();
        let asked = query(verbs, std::ptr::null(), &raw mut attr, size_of::<ibv_device_attr_ex>());
        asked == 0 && attr.odp_general_caps & ODP_SUPPORT != 0 && attr.odp_rc_caps & ODP_TRANSPORT == ODP_TRANSPORT
    }
}

pub(super) fn open(name: &str) -> Result<crate::Device> {
    let other = |why: String| Error::io("opening an RDMA device", io::Error::other(why));
    let lib = library().map_err(|why| other(why.to_string()))?;

    let missing = || other(format!("there is no RDMA device '{name}'; `thruway bench devices` lists what there is"));
    let verbs = contexts(lib).into_iter().find(|v| name_of(lib, *v) == name).ok_or_else(missing)?;
    // SAFETY: zeroed integers are a valid value.
    let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: an open context, and room for the answer.
    let rc = unsafe { (lib.ibv_query_device)(verbs, &raw mut attr) };
    if rc != 0 {
        return Err(Error::io("asking an RDMA device what it can", io::Error::from_raw_os_error(rc)));
    }
    let described = super::described(std::path::Path::new("/sys/class/infiniband"));
    let iwarp = described.iter().any(|d| d.name == name && d.kind == "RNIC");
    let windows = attr.device_cap_flags & DEVICE_MEM_WINDOW_TYPE_2 != 0 && attr.max_mw > 0;
    let depth = |n: i32| n.clamp(0, 255) as u16;
    let attributes = DeviceAttributes {
        provider: "verbs",
        name: name.to_string(),
        max_sge: attr.max_sge.clamp(1, 32) as u32,
        max_queue: attr.max_qp_wr.clamp(1, 16384) as u32,
        max_cqe: attr.max_cqe.max(1) as usize,
        max_inline: MAX_INLINE,
        max_read_depth: depth(attr.max_qp_rd_atom).min(depth(attr.max_qp_init_rd_atom)).max(1),
        max_private_data: if iwarp { 255 } else { 56 },
        max_reply_data: if iwarp { 255 } else { 196 },
        atomics: attr.atomic_cap != 0 && !iwarp,
        immediate: !iwarp,
        // What peers of InfiniBand and RoCE can revoke is windows.
        remote_invalidate: iwarp || windows,
        windows,
        domain_windows: false,
        max_srq_wr: if attr.max_srq > 0 { attr.max_srq_wr.clamp(0, 16384) as u32 } else { 0 },
        // rxe's (Linux 7.3, rxe_odp.c) writes each packet to the beginning of its page.
        auto_progress: true,
        on_demand: attr.vendor_id != VENDOR_RXE && pages_on_demand(verbs),
    };
    // SAFETY: plain calls; what they make is destroyed when the context is dropped.
    let (cm, channel) = unsafe {
        let cm = (lib.rdma_create_event_channel)();
        if cm.is_null() {
            return Err(failed("making an event channel for RDMA connections"));
        }
        let channel = (lib.ibv_create_comp_channel)(verbs);
        if channel.is_null() {
            let error = failed("making a completion channel");
            (lib.rdma_destroy_event_channel)(cm);
            return Err(error);
        }
        (cm, channel)
    };
    let setup = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // SAFETY: descriptors of live objects.
        let fds = unsafe { [(*cm).fd, (*channel).fd, (*verbs).async_fd].map(|fd| BorrowedFd::borrow_raw(fd)) };
        for (fd, kind) in fds.into_iter().zip([KERNEL, COMPLETIONS, KERNEL]) {
            let flags = rustix::fs::fcntl_getfl(fd)?;
            rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
            epoll::add(&poll, fd, epoll::EventData::new_u64(kind), epoll::EventFlags::IN)?;
        }
        epoll::add(&poll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok((poll, wake))
    };
    let (epoll, wake) = setup().map_err(|e| {
        // SAFETY: created above, and not in use.
        unsafe {
            (lib.ibv_destroy_comp_channel)(channel);
            (lib.rdma_destroy_event_channel)(cm);
        }
        Error::io("watching an RDMA device", e)
    })?;
    let context = Arc::new(Context {
        lib,
        verbs,
        cm,
        channel,
        epoll,
        wake,
        attributes,
        iwarp,
        siw: attr.vendor_id == VENDOR_SIW,
        filler: (attr.vendor_id == VENDOR_SIW).then(|| Filler::of(lib, verbs)).flatten(),
        pds: Mutex::default(),
        next_pd: AtomicU32::new(1),
        cqs: Mutex::default(),
        endpoints: Mutex::default(),
        by_number: Mutex::default(),
        listeners: Mutex::default(),
        shared: Mutex::default(),
        next_shared: AtomicU32::new(1),
        revocable: Mutex::default(),
        local: Mutex::default(),
        max_read_sge: if iwarp { attr.max_sge_rd.max(1) } else { attr.max_sge.max(1) } as usize,
        events: Mutex::default(),
        abandoned: AtomicBool::new(false),
        woken: AtomicBool::new(false),
        polls: AtomicU32::new(0),
        sysfs: sysfs_of(name),
        lost: AtomicBool::new(false),
        ticked: Mutex::new(Instant::now()),
        asked: Mutex::new(Instant::now()),
        asks_next: AtomicBool::new(true),
    });
    let mut known = lock(&CONTEXTS);
    known.retain(|c| c.strong_count() > 0);
    known.push(Arc::downgrade(&context));
    drop(known);
    Ok(crate::Device::new(Arc::new(Handle(context))))
}

impl Drop for Context {
    fn drop(&mut self) {
        self.pds.get_mut().expect("no panics under the lock").clear();
        // Before the hardware is let go of below.
        self.filler = None;
        // SAFETY: queue pairs, identifiers and completion queues hold the context, so none is left.
        unsafe {
            (self.lib.ibv_destroy_comp_channel)(self.channel);
            (self.lib.rdma_destroy_event_channel)(self.cm);
        }
        // Dropped after the lock, since one of them may be the last of its own.
        let others: Vec<_> = lock(&CONTEXTS).iter().filter_map(Weak::upgrade).collect();
        if others.iter().all(|other| other.verbs != self.verbs) && self.lost.load(Ordering::SeqCst) {
            release(self.verbs);
        }
    }
}

/// Lets go of hardware that is gone. librdmacm keeps its context open, closes it only when it meets
/// another device, and the kernel waits for that: so the context's descriptors are made to mean
/// nothing, and keep their numbers until librdmacm closes them.
fn release(verbs: *mut ibv_context) {
    let Ok(nothing) = std::fs::File::open("/dev/null") else { return };
    // SAFETY: the context is librdmacm's and open; nothing of ours uses it any more.
    for fd in unsafe { [(*verbs).cmd_fd, (*verbs).async_fd] } {
        // SAFETY: both are open descriptors; what the second stood for is closed.
        if unsafe { libc::dup2(nothing.as_raw_fd(), fd) } < 0 {
            tracing::warn!(error = %io::Error::last_os_error(), "letting go of an RDMA device");
        }
    }
}

/// The open devices of this process: one hears of what happens to the hardware for all.
static CONTEXTS: Mutex<Vec<Weak<Context>>> = Mutex::new(Vec::new());

/// Ends what uses this hardware. Its removal waits until nothing is left that holds it.
fn device_lost(verbs: *mut ibv_context) {
    let contexts: Vec<_> = lock(&CONTEXTS).iter().filter_map(Weak::upgrade).filter(|c| c.verbs == verbs).collect();
    for context in contexts {
        context.lost.store(true, Ordering::SeqCst);
        let endpoints: Vec<_> = lock(&context.endpoints).values().filter_map(Weak::upgrade).collect();
        for endpoint in endpoints {
            endpoint.removed();
        }
        context.rouse();
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock_unpoisoned()
}

impl Context {
    fn pd(&self, number: u32) -> Arc<ProtectionDomain> {
        Arc::clone(lock(&self.pds).get(&number).expect("its handle lives"))
    }

    /// The hardware is gone.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    pub(super) fn push_event(&self, event: Event) {
        let mut events = lock(&self.events);
        if self.abandoned.load(Ordering::SeqCst) {
            drop(events);
            return drop(event);
        }
        events.push_back(event);
        drop(events);
        self.rouse();
    }

    fn rouse(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        // Behind it: what finds this reads that.
        self.woken.store(true, Ordering::SeqCst);
    }

    /// Makes an endpoint known by the token of its connection identifier.
    pub(super) fn adopt(&self, token: u64, endpoint: &Arc<Endpoint>) {
        lock(&self.endpoints).insert(token, Arc::downgrade(endpoint));
    }

    pub(super) fn forget(&self, token: u64, number: u32) {
        lock(&self.endpoints).remove(&token);
        lock(&self.by_number).remove(&number);
        // Numbers are used again: nothing old may be told of the next one.
        lock(&self.events).retain(|event| match event {
            Event::Established { qp_num, .. } | Event::Disconnected { qp_num, .. } => *qp_num != number,
            _ => true,
        });
    }

    fn endpoint(&self, token: u64) -> Option<Arc<Endpoint>> {
        lock(&self.endpoints).get(&token)?.upgrade()
    }

    pub(super) fn numbered(&self, number: u32) -> Option<Arc<Endpoint>> {
        lock(&self.by_number).get(&number)?.upgrade()
    }

    /// Whoever calls a listener of this token is let through to whoever polls for events.
    pub(super) fn expect_calls(&self, token: u64) {
        lock(&self.listeners).insert(token);
    }

    pub(super) fn forget_listener(&self, token: u64) {
        lock(&self.listeners).remove(&token);
    }

    /// Takes what has happened; never waits.
    pub(super) fn drive(self: &Arc<Context>) {
        // What happened to the device comes first: of a connection that ended for it, at either end, it says why.
        self.drive_async();
        self.drive_connections();
        let now = Instant::now();
        {
            let mut last = lock(&self.ticked);
            if now.duration_since(*last) < TICK {
                return;
            }
            *last = now;
        }
        let all: Vec<_> = lock(&self.endpoints).values().filter_map(Weak::upgrade).collect();
        for endpoint in all {
            endpoint.tick(now);
        }
        // Drivers that cannot take a device away from its users, rxe's and siw's among them, make
        // no event of its removal, but wait until they have let go.
        let gone = self.sysfs.as_ref().is_some_and(|path| !path.exists());
        if gone && !self.lost.load(Ordering::SeqCst) {
            device_lost(self.verbs);
        }
    }

    /// As [`Context::drive`], but only now and then, for what looks again and again.
    fn drive_sometimes(self: &Arc<Context>) {
        let now = Instant::now();
        let mut asked = lock(&self.asked);
        let is_asked = self.asks_next.swap(false, Ordering::SeqCst) || now.duration_since(*asked) >= ASK_INTERVAL;
        // Waits that always end by completions put off the question, but not the clock.
        if !is_asked && now.duration_since(*lock(&self.ticked)) < TICK {
            return;
        }
        *asked = now;
        drop(asked);
        self.drive();
    }

    fn drive_connections(self: &Arc<Context>) {
        loop {
            let mut event = std::ptr::null_mut();
            // SAFETY: the channel is ours, and the event is acknowledged below, once.
            if unsafe { (self.lib.rdma_get_cm_event)(self.cm, &raw mut event) } != 0 {
                return;
            }
            // SAFETY: valid until acknowledged; what it says is copied first.
            let (kind, status, id, token, conn) = unsafe {
                let event = &*event;
                (event.event, event.status, event.id, (*event.id).context as u64, event.conn)
            };
            let data = if conn.private_data.is_null() || conn.private_data_len == 0 {
                Vec::new()
            } else {
                // SAFETY: as above; the length is the data's.
                unsafe { std::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into()) }
                    .to_vec()
            };
            // SAFETY: got above.
            unsafe { (self.lib.rdma_ack_cm_event)(event) };
            if kind == EVENT_CONNECT_REQUEST {
                let request = Request::new(Arc::clone(self), id, data, &conn);
                if lock(&self.listeners).contains(&token) {
                    self.push_event(Event::Request(Box::new(request)));
                }
                continue;
            }
            if let Some(endpoint) = self.endpoint(token) {
                endpoint.connection_event(kind, status, data, &conn);
            }
        }
    }

    /// Asynchronous events come to whichever device of the same hardware looks first.
    fn drive_async(&self) {
        loop {
            // SAFETY: zeroed is a valid value.
            let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
            // SAFETY: an open context; acknowledged below, once.
            if unsafe { (self.lib.ibv_get_async_event)(self.verbs, &raw mut event) } != 0 {
                return;
            }
            let kind = event.event_type;
            let concerned: Vec<_> =
                all_of(self.verbs).into_iter().filter(|e| e.concerns(kind, event.element)).collect();
            // SAFETY: got above, and what it names is destroyed only after this.
            unsafe { (self.lib.ibv_ack_async_event)(&raw mut event) };
            // SAFETY: a constant string for every number.
            let text = unsafe { CStr::from_ptr((self.lib.ibv_event_type_str)(kind)) }.to_string_lossy();
            let name = &self.attributes.name;
            let why = match kind {
                ASYNC_QP_FATAL | ASYNC_QP_REQ_ERR | ASYNC_QP_ACCESS_ERR => text.to_string(),
                ASYNC_CQ_ERR => format!("a completion queue of {name} failed"),
                ASYNC_SRQ_ERR => format!("a shared receive queue of {name} failed"),
                ASYNC_PORT_ERR => format!("port {} of {name} went down", event.element as usize as u32),
                ASYNC_DEVICE_FATAL => {
                    device_lost(self.verbs);
                    continue;
                }
                _ => {
                    tracing::info!(device = name, event = %text, "RDMA device event");
                    continue;
                }
            };
            tracing::info!(device = name, event = %text, connections = concerned.len(), "RDMA device event");
            concerned.iter().for_each(|endpoint| endpoint.fail(&why));
        }
    }

    /// Acknowledges completion channel events; what they announce is polled.
    pub(super) fn drain_channel(&self) {
        loop {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel is ours; a queue that an event names is not destroyed before
            // the event is acknowledged.
            unsafe {
                if (self.lib.ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context) != 0 {
                    return;
                }
                (self.lib.ibv_ack_cq_events)(cq, 1);
            }
        }
    }

    fn queues(&self) -> Vec<Arc<Queue>> {
        let mut queues = lock(&self.cqs);
        queues.retain(|q| q.strong_count() > 0);
        queues.iter().filter_map(Weak::upgrade).collect()
    }

    /// Checks local elements as the interface promises: rdma-core would tell only afterwards, and
    /// end the connection.
    pub(super) fn check_local(&self, pd: *mut ibv_pd, sges: &[Sge], write: bool) -> Result<()> {
        let known = lock(&self.local);
        for sge in sges.iter().filter(|s| s.len > 0) {
            let fail = |why| Error::LocalProtection { addr: sge.addr, len: sge.len.into(), lkey: sge.lkey, why };
            let region = known.get(&sge.lkey).and_then(Weak::upgrade);
            let region = region.filter(|r| r.valid.load(Ordering::SeqCst)).ok_or_else(|| fail("no such key"))?;
            let inside = sge
                .addr
                .checked_sub(region.base)
                .is_some_and(|at| at <= region.len as u64 && u64::from(sge.len) <= region.len as u64 - at);
            if region.pd.raw != pd {
                return Err(fail("the key belongs to another protection domain"));
            }
            if write && !region.writable {
                return Err(fail("the region was not registered for local writing"));
            }
            if !inside {
                return Err(fail("outside the region"));
            }
        }
        Ok(())
    }

    fn has_something(self: &Arc<Context>) -> bool {
        if !lock(&self.events).is_empty() {
            return true;
        }
        self.queues().iter().any(|q| {
            q.fetch(self);
            !lock(&q.ready).is_empty()
        })
    }
}

/// The consumer's handle of a context.
pub(super) struct Handle(Arc<Context>);

impl Drop for Handle {
    fn drop(&mut self) {
        // Unanswered requests hold the context, and are refused when they are dropped.
        let mut events = lock(&self.0.events);
        self.0.abandoned.store(true, Ordering::SeqCst);
        let unheard = std::mem::take(&mut *events);
        drop(events);
        drop(unheard);
    }
}

impl DeviceOps for Handle {
    fn attributes(&self) -> &DeviceAttributes {
        &self.0.attributes
    }

    fn alloc_pd(&self) -> Result<u32> {
        // SAFETY: an open context.
        let raw = unsafe { (self.0.lib.ibv_alloc_pd)(self.0.verbs) };
        if raw.is_null() {
            return Err(failed("making a protection domain"));
        }
        let number = self.0.next_pd.fetch_add(1, Ordering::Relaxed);
        lock(&self.0.pds).insert(number, Arc::new(ProtectionDomain { lib: self.0.lib, raw }));
        Ok(number)
    }

    fn free_pd(&self, pd: u32) {
        let gone = lock(&self.0.pds).remove(&pd);
        drop(gone);
    }

    unsafe fn register(
        &self,
        pd: u32,
        ptr: *mut u8,
        len: usize,
        base: u64,
        access: Access,
        owner: Owner,
    ) -> Result<Arc<dyn RegionOps>> {
        let pd = self.0.pd(pd);
        // SAFETY: the caller's promise.
        let region = unsafe { Region::register(&self.0, &pd, ptr, len, base, access, owner) }?;
        Ok(Arc::new(RegionHandle(region)))
    }

    fn create_cq(&self, capacity: usize) -> Result<Arc<dyn CompletionQueueOps>> {
        let limit = self.0.attributes.max_cqe;
        if capacity > limit {
            return Err(Error::Limit { what: "completion queue", got: capacity as u64, limit: limit as u64 });
        }
        let context = &self.0;
        // SAFETY: open context and channel.
        let raw = unsafe {
            (context.lib.ibv_create_cq)(context.verbs, capacity.max(1) as i32, std::ptr::null_mut(), context.channel, 0)
        };
        if raw.is_null() {
            return Err(failed("making a completion queue"));
        }
        let queue = Arc::new(Queue {
            context: Arc::clone(context),
            raw,
            room: Reservation::new(capacity),
            ready: Mutex::default(),
        });
        lock(&context.cqs).push(Arc::downgrade(&queue));
        Ok(Arc::new(QueueHandle(queue)))
    }

    fn create_srq(&self, pd: u32, max_recv_wr: u32, max_sge: u32) -> Result<Arc<dyn SharedReceiveOps>> {
        Ok(Arc::new(SharedHandle(SharedReceives::new(&self.0, self.0.pd(pd), max_recv_wr, max_sge)?)))
    }

    fn create_qp(
        &self,
        pd: u32,
        send_cq: &Arc<dyn CompletionQueueOps>,
        recv_cq: &Arc<dyn CompletionQueueOps>,
        caps: QueuePairCaps,
        shared: Option<&Arc<dyn SharedReceiveOps>>,
    ) -> Result<Arc<dyn QueuePairOps>> {
        let attributes = &self.0.attributes;
        for (what, got, limit) in [
            ("send queue", caps.max_send_wr, attributes.max_queue),
            ("receive queue", caps.max_recv_wr, attributes.max_queue),
            ("elements of a request", caps.max_sge, attributes.max_sge),
        ] {
            if got > limit {
                return Err(Error::Limit { what, got: got.into(), limit: limit.into() });
            }
        }
        let queue = |cq: &Arc<dyn CompletionQueueOps>| {
            let queue = cq.as_any().downcast_ref::<QueueHandle>().map(|h| Arc::clone(&h.0));
            let queue = queue.filter(|q| Arc::ptr_eq(&q.context, &self.0));
            queue.ok_or(Error::Unsupported("a completion queue of another device"))
        };
        let (pd, send_cq, recv_cq) = (self.0.pd(pd), queue(send_cq)?, queue(recv_cq)?);
        let shared = shared.map(|srq| {
            let found = srq.as_any().downcast_ref::<SharedHandle>().map(|h| Arc::clone(&h.0));
            let found = found.filter(|s| Arc::ptr_eq(&s.context, &self.0) && s.pd.raw == pd.raw);
            found.ok_or(Error::Unsupported("a shared receive queue of another protection domain"))
        });
        let shared = shared.transpose()?;
        Reservation::take_both(&send_cq.room, caps.max_send_wr, &recv_cq.room, caps.max_recv_wr)?;
        let give_back = || {
            send_cq.room.give_back(caps.max_send_wr);
            recv_cq.room.give_back(caps.max_recv_wr);
        };
        if let Some(shared) = &shared {
            shared.room.join(&recv_cq).inspect_err(|_| give_back())?;
        }
        let made = Endpoint::new(&self.0, pd, (Arc::clone(&send_cq), Arc::clone(&recv_cq)), caps, shared.clone());
        let endpoint = made.inspect_err(|_| {
            give_back();
            if let Some(shared) = &shared {
                shared.room.leave(&recv_cq);
            }
        })?;
        lock(&self.0.by_number).insert(endpoint.number(), Arc::downgrade(&endpoint));
        Ok(endpoint)
    }

    fn listen(&self, addr: SocketAddr, options: &ListenOptions) -> Result<Box<dyn ListenerOps>> {
        Ok(Box::new(VerbsListener::bind(&self.0, addr, options)?))
    }

    fn adopt(&self, _stream: TcpStream) -> Result<()> {
        Err(Error::Unsupported("TCP connections on an RDMA device"))
    }

    fn progress(&self) {
        self.0.drive();
    }

    fn poll_event(&self) -> Option<Event> {
        let next = || lock(&self.0.events).pop_front();
        next().or_else(|| {
            self.0.drive_sometimes();
            next()
        })
    }

    fn arm(&self) -> bool {
        // Level-triggered: what woke somebody before must not keep the descriptor readable for ever.
        let is_woken = self.0.woken.swap(false, Ordering::SeqCst);
        if is_woken {
            let _ = rustix::io::read(&self.0.wake, &mut [0; 8]);
        }
        self.0.drain_channel();
        for queue in self.0.queues() {
            // SAFETY: a live queue of a live context.
            unsafe { ((*self.0.verbs).ops.req_notify_cq)(queue.raw, 0) };
        }
        // What came before the notification was asked for makes no event.
        let is_quiet = !(is_woken || self.0.has_something());
        if is_quiet {
            // What is waited for may be something that only the kernel knows of.
            self.0.asks_next.store(true, Ordering::SeqCst);
        }
        is_quiet
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.epoll.as_fd()
    }

    fn wait(&self, timeout: Option<Duration>, ready: &dyn Fn() -> bool) -> Result<()> {
        self.0.drive_sometimes();
        if self.0.lost.load(Ordering::SeqCst) && lock(&self.0.events).is_empty() {
            let why = format!("the RDMA device {} was removed", self.0.attributes.name);
            return Err(Error::io("waiting", io::Error::new(io::ErrorKind::NotConnected, why)));
        }
        if !self.arm() || ready() {
            return Ok(());
        }
        let limit = timeout.map_or(EVENT_POLL_INTERVAL, |t| t.min(EVENT_POLL_INTERVAL));
        let limit = rustix::time::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut found = [std::mem::MaybeUninit::uninit(); 4];
        let found = match epoll::wait(&self.0.epoll, &mut found, Some(&limit)) {
            Ok((found, _)) => found,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(e) => return Err(Error::io("waiting", e)),
        };
        if found.is_empty() || found.iter().any(|event| event.data.u64() == KERNEL) {
            self.0.drive();
        } else {
            // The kernel has just said that it has nothing.
            *lock(&self.0.asked) = Instant::now();
            self.0.asks_next.store(false, Ordering::SeqCst);
        }
        Ok(())
    }

    fn wake(&self) {
        self.0.rouse();
    }
}
