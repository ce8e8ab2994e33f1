//! What connections of a service have been like in this process. To accelerate one costs as much as some hundred calls gain, so where they
//! have ended soon, the next are watched for longer before. After one went back to TCP because of doorbells, the next ones stay there.

use std::sync::atomic::{AtomicU64, Ordering};

/// Services that are remembered.
const PLACES: usize = 64;

/// The port, and how many calls connections have lasted, in the mean of the last ones; 0: none.
static LASTED: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];

fn place(port: u16) -> &'static AtomicU64 {
    &LASTED[usize::from(port) % PLACES]
}

fn unpack(word: u64, port: u16) -> Option<u32> {
    (word >> 32 == u64::from(port) && word != 0).then_some(word as u32)
}

/// Whether connections of the service at this port have ended before so many calls, lately.
pub(crate) fn is_short(port: u16, calls: u32) -> bool {
    unpack(place(port).load(Ordering::Relaxed), port).is_some_and(|lasted| lasted < calls)
}

/// A connection of the service at this port has ended after so many calls. `long`: more are not told apart.
pub(crate) fn learn(port: u16, calls: u32, long: u32) {
    let (place, calls) = (place(port), calls.min(long.saturating_mul(4)));
    let lasted = unpack(place.load(Ordering::Relaxed), port);
    let mean = lasted.map_or(calls, |lasted| ((u64::from(lasted) * 3 + u64::from(calls)) / 4) as u32);
    place.store(u64::from(port) << 32 | u64::from(mean), Ordering::Relaxed);
}

/// Number of connections of a service that stay with TCP after one went back because of doorbells.
const AVOIDED: u32 = 64;

/// The port, and the number of connections that are still to stay with TCP.
static RUNG: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];

/// Notes that a connection of the service at this port went back to TCP because of doorbells.
pub(crate) fn note_rung(port: u16) {
    RUNG[usize::from(port) % PLACES].store(u64::from(port) << 32 | u64::from(AVOIDED), Ordering::Relaxed);
}

/// Counts a connection of the service at this port that stays with TCP for that. False if it need not.
pub(crate) fn is_rung(port: u16) -> bool {
    let place = &RUNG[usize::from(port) % PLACES];
    let word = place.load(Ordering::Relaxed);
    match unpack(word, port) {
        Some(left) if left > 0 => {
            // One that is not counted because of another thread does no harm.
            place.store(word - 1, Ordering::Relaxed);
            true
        }
        _ => false,
    }
}
