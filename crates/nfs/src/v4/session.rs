//! Sessions (RFC 8881, section 2.10): slots, in each of which one request is done once.

use super::callback::Back;
use super::status::Status;
use std::sync::atomic::{AtomicIsize, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Slots of a session: as many requests at a time, far below the receives of a connection.
pub(crate) const SLOTS_MAX: u32 = 64;
/// Most operations of a compound.
pub(crate) const OPERATIONS_MAX: u32 = 64;
/// Longest reply that is kept, in bytes, behind the header of RPC.
pub(crate) const CACHED_MAX: u32 = 4 << 10;

/// When a client was last heard of, and what it is to be told by the next reply.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    renewed: AtomicU64,
    /// Delegations that have been taken from it, of which it has not said that it knows.
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

    /// So many more delegations have been taken from it.
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
    /// Bytes of a reply that is kept.
    pub cached: u32,
    /// Operations of a compound.
    pub operations: u32,
    /// Slots.
    pub requests: u32,
}

impl ChannelLimits {
    /// Most bytes of all kept replies together.
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
    /// The minor version that it was made by.
    pub minor: u32,
    /// The way back to the client, if that is to be called.
    pub back: Option<Back>,
    slots: Box<[Mutex<Slot>]>,
}

#[derive(Debug, Default)]
struct Slot {
    /// Of the last request.
    sequence: u32,
    /// It is being done.
    is_busy: bool,
    /// Its digest and its reply, if that was to be kept.
    reply: Option<(u64, Box<[u8]>)>,
}

/// What is to be done with a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It is done, and [`Session::end`] is to be called with its reply.
    New,
    /// This is its reply.
    Again(Box<[u8]>),
}

impl Session {
    pub(crate) fn new(id: [u8; 16], client: u64, lease: std::sync::Arc<Lease>, limits: ChannelLimits) -> Session {
        let slots = (0..limits.requests).map(|_| Mutex::default()).collect();
        Session { id, client, lease, limits, minor: 1, back: None, slots }
    }

    /// With a way back to the client.
    pub(crate) fn with_back(self, minor: u32, back: Option<Back>) -> Session {
        Session { minor, back, ..self }
    }

    /// Whether the client can be called.
    pub(crate) fn can_call(&self) -> bool {
        self.back.as_ref().is_some_and(Back::is_open)
    }

    fn slot(&self, slot: u32) -> Option<MutexGuard<'_, Slot>> {
        Some(self.slots.get(slot as usize)?.lock().expect("no panics under the lock"))
    }

    /// Begins a request. Requests with the same number are the same if their digests are.
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

    /// Ends a request; its reply is kept if there is one.
    pub(crate) fn end(&self, slot: u32, digest: u64, reply: Option<Box<[u8]>>) {
        let Some(mut slot) = self.slot(slot) else { return };
        slot.is_busy = false;
        slot.reply = reply.map(|reply| (digest, reply));
    }

    /// Ends a request that has changed nothing and has no reply, as if it had not come: its client may send it again.
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
