//! The registered memory of one connection, and requests made of [`Action`]s.

use crate::core::{Action, Local, SOURCES_MAX, Span};
use crate::error::Error;
use crate::settings::Settings;
use crate::wire::{Frame, Hello, MESSAGE_MAX};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_fabric::{
    Access, Buffer, MemoryRegion, Payload, ProtectionDomain, QueuePair, RecvRequest, RemoteAddr, SendFlags, SendOp,
    SendRequest, Sge,
};

/// Requests of the stream that may be in the send queue.
pub(crate) const STREAM_QUEUE_LEN: u32 = 64;
/// One-sided operations of the program's that may be posted.
pub(crate) const OPERATIONS_MAX: u32 = 64;
/// Where the result of asking for a lock goes: behind those of operations.
pub(crate) const CLAIM_RESULT: u32 = OPERATIONS_MAX;
/// Bytes that are read of a source at a time, while the program takes it in small pieces.
pub(crate) const LANDING_LEN: usize = 128 << 10;
/// Bytes between messages' headers.
const HEADER_PLACE: usize = 64;

/// In the work request ids of receives; the receive is in the low bits.
pub(crate) const RECEIVE: u64 = 1 << 63;
/// In the work request ids of the program's one-sided operations.
pub(crate) const OPERATION: u64 = 1 << 62;

/// A request that has not been posted.
pub(crate) struct Request {
    id: u64,
    op: SendOp,
    sges: [Sge; 3],
    count: usize,
    flags: SendFlags,
}

impl Request {
    /// Posts requests together.
    pub(crate) fn post(requests: &[Request], qp: &QueuePair) -> Result<(), thruway_fabric::Error> {
        let requests: Vec<SendRequest<'_>> = requests
            .iter()
            .map(|request| SendRequest {
                wr_id: request.id,
                op: request.op,
                payload: Payload::Sges(&request.sges[..request.count]),
                flags: request.flags,
            })
            .collect();
        qp.post_sends(&requests).map_err(|(_, error)| error)
    }
}

/// Memory of the program's that the stream uses at the moment.
pub(crate) struct User {
    region: MemoryRegion,
    /// Of the first byte, in the region.
    offset: usize,
}

pub(crate) struct Memory {
    /// Receives, headers, landing area and stage.
    own: Arc<Buffer>,
    own_region: MemoryRegion,
    /// What the peer writes to, if there is one.
    ring: Option<(Arc<Buffer>, MemoryRegion)>,
    /// Words by which the peer's sources are locked, and what a lock of the peer's was.
    locks: Option<(Arc<Buffer>, MemoryRegion)>,
    receive_len: u32,
    receive_stride: usize,
    results_at: usize,
    headers_at: usize,
    landing_at: usize,
    stage_at: usize,
    users: HashMap<u64, User>,
    next_user: u64,
}

impl Memory {
    pub(crate) fn new(pd: &ProtectionDomain, settings: &Settings) -> Result<Memory, Error> {
        let receive_stride = (settings.receive_len as usize).next_multiple_of(64);
        let headers_at = receive_stride * usize::from(settings.receives());
        let results_at = headers_at + HEADER_PLACE * STREAM_QUEUE_LEN as usize;
        let landing_at = (results_at + 8 * (OPERATIONS_MAX as usize + 1)).next_multiple_of(4096);
        let stage_at = landing_at + LANDING_LEN;
        let map = |len| Buffer::sparse(len).map(Arc::new).map_err(|error| Error::Memory(error.into()));
        let own = map(stage_at + settings.stage_len as usize)?;
        let own_region = pd.register(&own, Access::LOCAL_WRITE)?;
        let ring = match settings.ring_len as usize {
            0 => None,
            len => {
                let buffer = map(len)?;
                let region = pd.register(&buffer, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
                Some((buffer, region))
            }
        };
        // A device's own atomic operations and a processor's do not always know of each other.
        let attributes = pd.device().attributes();
        let locks = match attributes.atomics && !attributes.auto_progress {
            true => {
                let buffer = map(8 * SOURCES_MAX)?;
                let region = pd.register(&buffer, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC)?;
                Some((buffer, region))
            }
            false => None,
        };
        Ok(Memory {
            own,
            own_region,
            ring,
            locks,
            receive_len: settings.receive_len,
            receive_stride,
            results_at,
            headers_at,
            landing_at,
            stage_at,
            users: HashMap::new(),
            next_user: 1,
        })
    }

    /// What the peer has to know.
    pub(crate) fn hello(&self, settings: &Settings) -> Hello {
        let nowhere = RemoteAddr { addr: 0, rkey: 0 };
        Hello {
            receives: settings.receives(),
            receive_len: settings.receive_len,
            ring_len: settings.ring_len,
            ring: self.ring.as_ref().map_or(nowhere, |(_, region)| region.remote(0)),
            locks: self.locks.as_ref().map_or(nowhere, |(_, region)| region.remote(0)),
            messages: settings.messages,
        }
    }

    /// Keeps a region while the stream uses it from `offset` on, and gives it a number.
    pub(crate) fn lend(&mut self, region: MemoryRegion, offset: usize) -> u64 {
        let user = self.next_user;
        self.next_user += 1;
        self.users.insert(user, User { region, offset });
        user
    }

    /// What the peer has to know of memory that is lent.
    pub(crate) fn remote(&self, user: u64) -> Option<RemoteAddr> {
        self.users.get(&user).map(|user| user.region.remote(user.offset))
    }

    pub(crate) fn take_back(&mut self, user: u64) {
        self.users.remove(&user);
    }

    pub(crate) fn post_receive(&self, qp: &QueuePair, slot: u16) -> Result<(), thruway_fabric::Error> {
        let sge = self.own_region.sge(usize::from(slot) * self.receive_stride, self.receive_len);
        qp.post_recv(&RecvRequest { wr_id: RECEIVE | u64::from(slot), sges: &[sge] })
    }

    fn lock(&self, at: usize) -> Option<&AtomicU64> {
        assert!(at < SOURCES_MAX, "a lock that there is");
        // SAFETY: aligned, mapped while the buffer lives, and only used atomically: here and by the device.
        self.locks.as_ref().map(|(buffer, _)| unsafe { AtomicU64::from_ptr(buffer.as_ptr().cast::<u64>().add(at)) })
    }

    /// Changes a lock that has the first value to the second; where there are no locks, the peer cannot have taken one.
    pub(crate) fn try_lock(&self, at: usize, from: u64, to: u64) -> bool {
        self.lock(at).is_none_or(|lock| lock.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok())
    }

    pub(crate) fn set_lock(&self, at: usize, value: u64) {
        if let Some(lock) = self.lock(at) {
            lock.store(value, Ordering::SeqCst);
        }
    }

    /// Where the result of an operation goes.
    pub(crate) fn result(&self, operation: u32) -> Sge {
        self.own_region.sge(self.results_at + 8 * operation as usize, 8)
    }

    pub(crate) fn read_result(&self, operation: u32) -> u64 {
        let mut bytes = [0; 8];
        self.own.read(self.results_at + 8 * operation as usize, &mut bytes);
        u64::from_ne_bytes(bytes)
    }

    /// The first bytes of a receive: as many as a message has without data, or has at all.
    pub(crate) fn received(&self, slot: u16, len: usize, to: &mut [u8]) {
        let len = len.min(to.len());
        self.own.read(usize::from(slot) * self.receive_stride, &mut to[..len]);
    }

    pub(crate) fn read_receive(&self, slot: u16, offset: usize, to: &mut [u8]) {
        self.own.read(usize::from(slot) * self.receive_stride + offset, to);
    }

    pub(crate) fn read_ring(&self, offset: usize, to: &mut [u8]) {
        self.ring.as_ref().expect("bytes in a ring that there is").0.read(offset, to);
    }

    pub(crate) fn read_landing(&self, offset: usize, to: &mut [u8]) {
        self.own.read(self.landing_at + offset, to);
    }

    pub(crate) fn write_stage(&self, span: Span, from: &[u8]) {
        let Local::Stage(at) = span.at else { unreachable!("the stage is where bytes are staged") };
        self.own.write(self.stage_at + at, &from[..span.len]);
    }

    fn sge(&self, span: Span) -> Sge {
        let len = span.len as u32;
        match span.at {
            Local::Stage(at) => self.own_region.sge(self.stage_at + at, len),
            Local::Landing(at) => self.own_region.sge(self.landing_at + at, len),
            Local::User(user, at) => {
                let user = self.users.get(&user).expect("memory that the stream has not given back");
                user.region.sge(user.offset + at, len)
            }
        }
    }

    /// The request of an action that is one.
    pub(crate) fn request(&self, action: &Action) -> Option<Request> {
        let request = |id, op, sges, count, signaled| {
            Some(Request {
                id,
                op,
                sges,
                count,
                flags: if signaled { SendFlags::SIGNALED } else { SendFlags::empty() },
            })
        };
        match *action {
            Action::Send { id, frame, payload, signaled } => {
                let mut sges = [self.header(id, &frame); 3];
                let mut count = 1;
                for span in payload.into_iter().flatten() {
                    sges[count] = self.sge(span);
                    count += 1;
                }
                request(id, SendOp::Send { invalidate: None }, sges, count, signaled)
            }
            Action::Write { id, from, to, signaled } => {
                let mut sges = [self.sge(from[0].expect("something to write")); 3];
                if let Some(span) = from[1] {
                    sges[1] = self.sge(span);
                }
                let op = SendOp::Write { remote: to, immediate: None };
                request(id, op, sges, from.iter().flatten().count(), signaled)
            }
            Action::Claim { id, lock, compare, swap } => {
                let op = SendOp::CompareSwap { remote: lock, compare, swap };
                request(id, op, [self.result(CLAIM_RESULT); 3], 1, true)
            }
            Action::Read { id, from, to } => request(id, SendOp::Read { remote: from }, [self.sge(to); 3], 1, true),
            _ => None,
        }
    }

    fn header(&self, id: u64, frame: &Frame) -> Sge {
        let mut bytes = [0; MESSAGE_MAX];
        let len = frame.encode(&mut bytes);
        let at = self.headers_at + (id % u64::from(STREAM_QUEUE_LEN)) as usize * HEADER_PLACE;
        self.own.write(at, &bytes[..len]);
        self.own_region.sge(at, len as u32)
    }
}
