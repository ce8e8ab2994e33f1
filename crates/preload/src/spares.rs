//! Segments of connections that have ended, kept for the next ones between the same two processes: their pages are there already, and
//! nothing has to be made, mapped and handed over.
//!
//! The maker of a segment keeps it by the number of the taker's Unix socket, the taker by the segment's own number; which of them may
//! use it is a word in the segment ([`Segment::claim`]). The maker takes one that the taker has given back, and the taker accepts
//! one that it has given back and no other: a connection that is still open is never given another one's segment, whatever the other
//! process says.

use crate::lock::Lock;
use crate::switch::unmap;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_sockets::{End, Segment};

/// Segments that a process keeps.
const SPARES: usize = 32;

/// By what a segment is found again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    /// Its own number.
    pub(crate) number: u64,
    /// That of the taker's Unix socket.
    pub(crate) service: u64,
}

#[derive(Clone, Copy)]
struct Spare {
    segment: Segment,
    name: Name,
    end: End,
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
pub(crate) fn keep(segment: Segment, name: Name, end: End) {
    let spare = Spare { segment, name, end, before: ALL.count.fetch_add(1, Ordering::Relaxed) };
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

/// The maker: one for another connection to the process with this Unix socket, with rings of so many bytes.
pub(crate) fn claim(service: u64, ring: usize) -> Option<(Segment, Name)> {
    with(|all| {
        let place = all.iter_mut().find(|place| {
            place.as_ref().is_some_and(|spare| {
                spare.end == End::Maker
                    && spare.name.service == service
                    && spare.segment.ring_size() == ring
                    && spare.segment.claim()
            })
        });
        place.and_then(Option::take).map(|spare| (spare.segment, spare.name))
    })?
}

/// The taker: the one with this number, which it is offered again.
pub(crate) fn take_again(number: u64) -> Option<(Segment, Name)> {
    with(|all| {
        let place = all.iter_mut().find(|place| {
            place.as_ref().is_some_and(|spare| {
                spare.end == End::Taker && spare.name.number == number && spare.segment.take_again()
            })
        });
        place.and_then(Option::take).map(|spare| (spare.segment, spare.name))
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
