//! Segments of connections that have ended, kept for the next ones between the same two processes: their pages are there already, and
//! nothing has to be made, mapped and handed over.
//!
//! The maker of a segment keeps it by the number of the taker's Unix socket, and offers it again in the segment itself
//! ([`Segment::offer_again`]): the taker looks through those that it keeps. The maker offers one that the taker has given back, and the
//! taker takes one that it has given back and no other: a connection that is still open is never given another one's segment, whatever
//! the other process says.

use crate::lock::Lock;
use crate::switch::unmap;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_sockets::{End, Segment};

/// Segments that a process keeps.
const SPARES: usize = 32;

#[derive(Clone, Copy)]
struct Spare {
    segment: Segment,
    end: End,
    /// The number of the taker's Unix socket, at the maker's end.
    service: u64,
    /// The user of the other process. Who writes on a board that a connection is to be met there may be another one.
    user: u32,
    /// How many had been kept before it.
    before: u64,
}

struct Spares {
    lock: Lock,
    count: AtomicU64,
    kept: UnsafeCell<[Option<Spare>; SPARES]>,
}

// SAFETY: the cell is used under the lock.
unsafe impl Sync for Spares {}

static ALL: Spares = Spares { lock: Lock::new(), count: AtomicU64::new(0), kept: UnsafeCell::new([None; SPARES]) };

fn with<T>(act: impl FnOnce(&mut [Option<Spare>; SPARES]) -> T) -> Option<T> {
    // A signal handler that has interrupted another call here does without.
    let _guard = ALL.lock.lock().ok()?;
    // SAFETY: under the lock.
    Some(act(unsafe { &mut *ALL.kept.get() }))
}

/// Keeps the segment of a connection that has ended, or does not.
pub(crate) fn keep(segment: Segment, end: End, service: u64, user: u32) {
    let spare = Spare { segment, end, service, user, before: ALL.count.fetch_add(1, Ordering::Relaxed) };
    let kept = with(|all| {
        if segment.is_discarded() {
            return false;
        }
        let Some(place) = make_room(all) else { return false };
        // Known here before the maker can know of it.
        if let Some(old) = all[place].replace(spare) {
            unmap(old.segment);
        }
        if end == End::Taker && !segment.spare() {
            all[place] = None;
            return false;
        }
        true
    });
    if kept != Some(true) {
        segment.discard();
        unmap(segment);
    }
}

/// A place that is free, or that of one which the other end does not keep, or the oldest.
fn make_room(all: &[Option<Spare>; SPARES]) -> Option<usize> {
    let is_of_no_use = |place: &Option<Spare>| place.is_none_or(|spare| spare.segment.is_discarded());
    all.iter().position(is_of_no_use).or_else(|| {
        let mut places: [usize; SPARES] = std::array::from_fn(|at| at);
        places.sort_unstable_by_key(|at| all[*at].map(|spare| spare.before));
        places.into_iter().find(|at| {
            all[*at].is_some_and(|spare| match spare.end {
                End::Taker => spare.segment.give_up(),
                End::Maker => {
                    spare.segment.discard();
                    true
                }
            })
        })
    })
}

/// The maker: offers one again, for the connection with this key to the process with this Unix socket, which is this user's.
pub(crate) fn offer_again(service: u64, user: u32, ring: usize, key: &[u8; 48]) -> Option<Segment> {
    with(|all| {
        let place = all.iter_mut().find(|place| {
            place.as_ref().is_some_and(|spare| {
                spare.end == End::Maker
                    && spare.service == service
                    && spare.user == user
                    && spare.segment.ring_size() == ring
                    && spare.segment.offer_again(key)
            })
        });
        place.and_then(Option::take).map(|spare| spare.segment)
    })?
}

/// The taker: the one that it is offered again for the connection with this key, if the user at its other end is the one that it had; and
/// that user.
pub(crate) fn take_again(key: &[u8; 48], user_at_other_end: impl FnOnce() -> Option<u32>) -> Option<(Segment, u32)> {
    let is_offered = |spare: &Spare| spare.end == End::Taker && spare.segment.is_offered_for(key);
    let user = with(|all| all.iter().flatten().any(is_offered)).filter(|is| *is).and_then(|_| user_at_other_end())?;
    with(|all| {
        let place = all.iter_mut().find(|place| {
            place
                .as_ref()
                .is_some_and(|spare| spare.user == user && spare.end == End::Taker && spare.segment.take_again(key))
        });
        place.and_then(Option::take).map(|spare| (spare.segment, user))
    })?
}

/// Keeps none any more: there is no memory for others, or the process forks, and its child has other connections.
pub(crate) fn discard_all() {
    let all = with(|all| std::mem::replace(all, [None; SPARES])).unwrap_or([None; SPARES]);
    for spare in all.into_iter().flatten() {
        spare.segment.discard();
        unmap(spare.segment);
    }
}

/// In a child that has just been forked: what a thread of its parent has kept meanwhile is the parent's.
pub(crate) fn after_fork() {
    ALL.lock.reset();
    let _ = with(|all| *all = [None; SPARES]);
}
