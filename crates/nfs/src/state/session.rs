//! Sessions (RFC 8881, section 2.10). Each request of a slot is executed once.

use super::callback::Callback;
use crate::status::Status;
use std::sync::atomic::{AtomicIsize, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Maximum number of slots of a session; far below the receives of a connection.
pub(crate) const SLOTS_MAX: u32 = 64;
/// Maximum number of operations of a compound.
pub(crate) const OPERATIONS_MAX: u32 = 64;
/// Maximum length of a kept reply in bytes, without the header of RPC.
pub(crate) const CACHED_MAX: u32 = 4 << 10;

/// Time of the last request of a client, and flags for its next reply.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    renewed: AtomicU64,
    /// Number of revoked delegations that it has not freed yet.
    revoked: AtomicIsize,
}

impl Lease {
    pub(crate) fn new(now: u64) -> Lease {
        Lease { renewed: AtomicU64::new(now), revoked: AtomicIsize::new(0) }
    }

    pub(crate) fn renew(&self, now: u64) {
        self.renewed.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn renewed(&self) -> u64 {
        self.renewed.load(Ordering::Relaxed)
    }

    /// Adds to the number of revoked delegations.
    pub(crate) fn revoked(&self, more: isize) {
        self.revoked.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn has_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed) > 0
    }
}

/// The limits of a channel (`channel_attrs4`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChannelLimits {
    /// Bytes of a request.
    pub request: u32,
    /// Bytes of a reply.
    pub response: u32,
    /// Bytes of a kept reply.
    pub cached: u32,
    /// Operations of a compound.
    pub operations: u32,
    /// Slots.
    pub requests: u32,
}

impl ChannelLimits {
    /// Maximum number of bytes of all kept replies together.
    pub(crate) fn kept(&self) -> u64 {
        u64::from(self.requests) * u64::from(self.cached)
    }
}

/// A session.
pub(crate) struct Session {
    pub id: [u8; 16],
    pub client: u64,
    pub lease: std::sync::Arc<Lease>,
    pub limits: ChannelLimits,
    /// Minor version.
    pub minor: u32,
    /// Calls to the client, if it accepts them.
    pub callback: Option<Box<dyn Callback>>,
    slots: Box<[Mutex<Slot>]>,
}

#[derive(Debug, Default)]
struct Slot {
    /// Sequence number of the last request.
    sequence: u32,
    /// The request is in progress.
    is_busy: bool,
    /// Digest of the request, and its reply, if the client asked to keep that.
    reply: Option<(u64, Box<[u8]>)>,
}

/// How to handle a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Execute it, and call [`Session::end`] with its reply.
    New,
    /// It is a repetition; this is its reply.
    Again(Box<[u8]>),
}

impl Session {
    pub(crate) fn new(id: [u8; 16], client: u64, lease: std::sync::Arc<Lease>, limits: ChannelLimits) -> Session {
        let slots = (0..limits.requests).map(|_| Mutex::default()).collect();
        Session { id, client, lease, limits, minor: 1, callback: None, slots }
    }

    /// Sets the minor version, and the calls to the client.
    pub(crate) fn with_callback(self, minor: u32, callback: Option<Box<dyn Callback>>) -> Session {
        Session { minor, callback, ..self }
    }

    /// True if the client can be called.
    pub(crate) fn can_call(&self) -> bool {
        self.callback.as_ref().is_some_and(|callback| callback.is_open())
    }

    fn slot(&self, slot: u32) -> Option<MutexGuard<'_, Slot>> {
        Some(self.slots.get(slot as usize)?.lock().expect("no panics under the lock"))
    }

    /// Begins a request. Two requests of the same number are equal if their digests are.
    pub(crate) fn begin(&self, slot: u32, sequence: u32, digest: u64) -> Result<Turn, Status> {
        let mut slot = self.slot(slot).ok_or(Status::BADSLOT)?;
        if sequence == slot.sequence.wrapping_add(1) {
            if slot.is_busy {
                return Err(Status::SEQ_MISORDERED);
            }
            *slot = Slot { sequence, is_busy: true, reply: None };
            return Ok(Turn::New);
        }
        if sequence != slot.sequence {
            return Err(Status::SEQ_MISORDERED);
        }
        match &slot.reply {
            _ if slot.is_busy => Err(Status::DELAY),
            Some((of, _)) if *of != digest => Err(Status::SEQ_FALSE_RETRY),
            Some((_, reply)) => Ok(Turn::Again(reply.clone())),
            // Nothing has been done in it.
            None if slot.sequence == 0 => Err(Status::SEQ_MISORDERED),
            None => Err(Status::RETRY_UNCACHED_REP),
        }
    }

    /// Ends a request. The session keeps the reply, if there is one.
    pub(crate) fn end(&self, slot: u32, digest: u64, reply: Option<Box<[u8]>>) {
        let Some(mut slot) = self.slot(slot) else { return };
        slot.is_busy = false;
        slot.reply = reply.map(|reply| (digest, reply));
    }

    /// Ends a request that has changed nothing and has no reply. Its client may send it again.
    pub(crate) fn cancel(&self, slot: u32) {
        let Some(mut slot) = self.slot(slot) else { return };
        slot.is_busy = false;
        slot.sequence = slot.sequence.wrapping_sub(1);
    }

    /// The highest slot.
    pub(crate) fn highest_slot(&self) -> u32 {
        self.limits.requests - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn session() -> Session {
        let limits = ChannelLimits { request: 4096, response: 4096, cached: 100, operations: 8, requests: 2 };
        Session::new([7; 16], 1, Arc::default(), limits)
    }

    #[test]
    fn a_request_is_done_once() {
        let session = session();
        assert_eq!(session.begin(0, 0, 5), Err(Status::SEQ_MISORDERED), "nothing has been done yet");
        assert_eq!(session.begin(0, 2, 5), Err(Status::SEQ_MISORDERED));
        assert_eq!(session.begin(2, 1, 5), Err(Status::BADSLOT));
        assert_eq!(session.begin(0, 1, 5), Ok(Turn::New));
        assert_eq!(session.begin(0, 1, 5), Err(Status::DELAY), "it is being done");
        assert_eq!(session.begin(0, 2, 5), Err(Status::SEQ_MISORDERED), "it is being done");
        session.end(0, 5, Some([1, 2].into()));
        for _ in 0..2 {
            assert_eq!(session.begin(0, 1, 5), Ok(Turn::Again([1, 2].into())));
        }
        assert_eq!(session.begin(0, 1, 6), Err(Status::SEQ_FALSE_RETRY));
        assert_eq!(session.begin(1, 1, 6), Ok(Turn::New), "slots do not know of each other");
        session.end(1, 6, None);
        assert_eq!(session.begin(1, 1, 6), Err(Status::RETRY_UNCACHED_REP));
        assert_eq!(session.begin(0, 2, 6), Ok(Turn::New));
    }

    #[test]
    fn a_cancelled_request_may_come_again() {
        let session = session();
        for sequence in 1..4 {
            for _ in 0..2 {
                assert_eq!(session.begin(0, sequence, 5), Ok(Turn::New));
                session.cancel(0);
            }
            assert_eq!(session.begin(0, sequence + 1, 5), Err(Status::SEQ_MISORDERED));
            assert_eq!(session.begin(0, sequence, 5), Ok(Turn::New));
            session.end(0, 5, Some([1].into()));
        }
    }

    #[test]
    fn numbers_begin_again_at_their_end() {
        let session = session();
        session.slot(0).unwrap().sequence = u32::MAX;
        assert_eq!(session.begin(0, 0, 5), Ok(Turn::New));
        session.end(0, 5, Some([3].into()));
        assert_eq!(session.begin(0, 0, 5), Ok(Turn::Again([3].into())));
    }
}
