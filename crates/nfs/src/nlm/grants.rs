//! Locks that the server gave to clients of version 3 after a wait, and that the clients have not acknowledged.
//!
//! A client can cancel its wait, or deny the callback. Then the lock is taken back, and the owner has its earlier locks in the range again,
//! except in parts that it has locked or unlocked by a call since the grant. Unacknowledged grants of one owner in a file do not overlap.
//!
//! Clients match a callback with their waits by owner, file and range. A callback that arrives late must not match a later wait. So CANCEL
//! and UNLOCK are answered when no callback is on the way to the owner. A lock stays locked if the client may yet get the callback.

use crate::state::{HostCounts, Range};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use thruway_tcp::Origin;
use thruway_vfs::identity::FileIdentity;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

/// Most grants in progress: locks that are being given after a wait, until their clients acknowledge them. Quota of one host: eight times
/// the remaining room.
const GRANTS_MAX: usize = 16 << 10;

/// Most parts of one grant that an owner has not changed. Further ones stay locked if the client cancels its wait.
const PARTS_MAX: usize = 256;

/// Number of earlier locks that count as another grant in progress.
const BEFORE_OF_GRANT: usize = 64;

/// An owner of locks in a file.
pub(super) type LockOwner = (u64, Box<[u8]>, FileIdentity);

/// Earlier locks of an owner in a range that it was given: whether for writing, and the range.
pub(super) type Before = Vec<(bool, Range)>;

/// An unacknowledged lock.
#[derive(Debug)]
pub(super) struct Grant {
    /// Unique number: the same range can be given again.
    number: u64,
    last: u64,
    pub is_write: bool,
    /// A callback may have reached the client, whose answer has not come.
    pub is_sent: bool,
    /// The client has cancelled its wait and waits for the answer to that.
    pub is_cancelled: bool,
    /// Parts of the range that the owner has neither locked nor unlocked by a call since.
    pub due: Vec<Range>,
    pub before: Before,
    origin: Origin,
}

impl Grant {
    /// Number of further grants in progress that its memory counts as.
    fn weight(&self) -> isize {
        (self.before.len() / BEFORE_OF_GRANT) as isize
    }
}

/// Unacknowledged grants by owner and first byte, and the number of grants in progress of each host.
#[derive(Default)]
pub(super) struct Grants {
    of_owner: HashMap<LockOwner, BTreeMap<u64, Grant>>,
    /// Callbacks on the way to the clients or back: their number, and a signal at the end of the last one of an owner.
    calls: HashMap<LockOwner, (usize, Arc<Notify>)>,
    in_progress: HostCounts,
}

impl Grants {
    /// True if a client of this host may wait for another lock.
    pub(super) fn has_room(&self, origin: Origin) -> bool {
        self.in_progress.has_room(origin, GRANTS_MAX)
    }

    /// Counts a grant in progress (`more` is 1), or no longer (-1).
    pub(super) fn count(&mut self, origin: Origin, more: isize) {
        self.in_progress.add(origin, more);
    }

    /// True if an unacknowledged grant of the owner overlaps a range.
    pub(super) fn overlaps(&self, owner: &LockOwner, range: Range) -> bool {
        let before = self.of_owner.get(owner).and_then(|grants| grants.range(..=range.last).next_back());
        before.is_some_and(|(_, grant)| grant.last >= range.start)
    }

    /// Adds a grant, which overlaps no other.
    pub(super) fn insert(
        &mut self,
        number: u64,
        origin: Origin,
        owner: LockOwner,
        (is_write, range): (bool, Range),
        before: Before,
    ) {
        let due = vec![range];
        let grant =
            Grant { number, last: range.last, is_write, is_sent: false, is_cancelled: false, due, before, origin };
        self.count(origin, grant.weight());
        self.of_owner.entry(owner).or_default().insert(range.start, grant);
    }

    /// The unacknowledged grant of this very range.
    pub(super) fn get(&self, owner: &LockOwner, range: Range) -> Option<&Grant> {
        self.of_owner.get(owner)?.get(&range.start).filter(|grant| grant.last == range.last)
    }

    /// As [`Grants::get`], of the grant with this number.
    pub(super) fn numbered(&self, number: u64, owner: &LockOwner, range: Range) -> Option<&Grant> {
        self.get(owner, range).filter(|grant| grant.number == number)
    }

    /// As [`Grants::get`], to be changed, if it is a grant of this kind.
    pub(super) fn get_mut(&mut self, owner: &LockOwner, is_write: bool, range: Range) -> Option<&mut Grant> {
        let grant = self.of_owner.get_mut(owner)?.get_mut(&range.start)?;
        Some(grant).filter(|grant| grant.last == range.last && grant.is_write == is_write)
    }

    /// Notes that a callback with the grant of this number is on the way. False if the grant is gone: then the client must not be called.
    pub(super) fn begin_call(&mut self, number: u64, owner: &LockOwner, is_write: bool, range: Range) -> bool {
        let grant = self.get_mut(owner, is_write, range).filter(|grant| grant.number == number);
        let Some(grant) = grant else { return false };
        grant.is_sent = true;
        self.calls.entry(owner.clone()).or_default().0 += 1;
        true
    }

    /// The callback was answered, or has failed.
    pub(super) fn end_call(&mut self, owner: &LockOwner) {
        let Some((count, ended)) = self.calls.get_mut(owner) else { return };
        *count -= 1;
        if *count == 0 {
            ended.notify_waiters();
            self.calls.remove(owner);
        }
    }

    /// Completes at the end of the last callback on the way to an owner; `None` if there is none.
    pub(super) fn calls_end(&self, owner: &LockOwner) -> Option<OwnedNotified> {
        self.calls.get(owner).map(|(_, ended)| Arc::clone(ended).notified_owned())
    }

    /// Removes the grant of this very range: the client has acknowledged it, or it was taken back.
    pub(super) fn remove(&mut self, owner: &LockOwner, range: Range) {
        if self.get(owner, range).is_none() {
            return;
        }
        let Some(grants) = self.of_owner.get_mut(owner) else { return };
        let Some(grant) = grants.remove(&range.start) else { return };
        if grants.is_empty() {
            self.of_owner.remove(owner);
        }
        self.count(grant.origin, -grant.weight());
    }

    /// The owner has locked or unlocked a range by a call. This acknowledges a grant of the same range.
    pub(super) fn changed(&mut self, owner: &LockOwner, range: Range) {
        self.remove(owner, range);
        let Some(grants) = self.of_owner.get_mut(owner) else { return };
        for (_, grant) in grants.range_mut(..=range.last).rev().take_while(|(_, grant)| grant.last >= range.start) {
            let parts = grant.due.iter().flat_map(|part| without(*part, range));
            grant.due = parts.take(PARTS_MAX).collect();
        }
    }
}

/// The parts of a range that are outside another one.
fn without(part: Range, other: Range) -> impl Iterator<Item = Range> {
    let before = other.start.checked_sub(1).map(|last| Range { start: part.start, last: last.min(part.last) });
    let behind = other.last.checked_add(1).map(|start| Range { start: start.max(part.start), last: part.last });
    [before, behind].into_iter().flatten().filter(|rest| rest.start <= rest.last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use thruway_vfs::FileId;

    fn owner(client: u64, file: u8) -> LockOwner {
        (client, b"owner"[..].into(), FileIdentity { file_system: 1, file: FileId([file].into_iter().collect()) })
    }

    fn host(number: u8) -> Origin {
        Origin::of_host([10, 0, 0, number].into())
    }

    fn range(start: u64, last: u64) -> Range {
        Range { start, last }
    }

    #[test]
    fn grants_in_progress_of_a_host_have_a_quota() {
        let (one, other) = (host(1), host(2));
        let mut grants = Grants::default();
        let mut begin = |origin, most: usize| {
            let mut begun = 0;
            while begun < most && grants.has_room(origin) {
                grants.count(origin, 1);
                begun += 1;
            }
            begun
        };
        let first = begin(one, 2 * GRANTS_MAX);
        assert!((GRANTS_MAX / 2..GRANTS_MAX).contains(&first), "{first}");
        assert_eq!(begin(other, 64), 64, "room for others is left");
        grants.count(one, -(first as isize));
        assert_eq!((grants.in_progress.total(), grants.has_room(one)), (64, true));
        // Locks of before count, too.
        let before = vec![(false, range(0, 0)); 640];
        grants.insert(1, one, owner(1, 1), (true, range(0, 99)), before);
        assert_eq!(grants.in_progress.total(), 74);
        grants.remove(&owner(1, 1), range(0, 99));
        assert_eq!(grants.in_progress.total(), 64);
    }

    #[test]
    fn calls_of_an_owner_change_what_is_due_in_this_file_only() {
        let (here, there, other) = (owner(1, 1), owner(1, 2), owner(2, 1));
        let mut grants = Grants::default();
        for known in [&here, &there, &other] {
            grants.insert(1, host(1), known.clone(), (true, range(10, 19)), vec![(false, range(10, 12))]);
        }
        grants.changed(&here, range(12, 14));
        let due = |grants: &Grants, owner| grants.get(owner, range(10, 19)).map(|grant| grant.due.clone());
        assert_eq!(due(&grants, &here), Some(vec![range(10, 11), range(15, 19)]));
        assert_eq!(due(&grants, &there), Some(vec![range(10, 19)]), "another file");
        assert_eq!(due(&grants, &other), Some(vec![range(10, 19)]), "another client");
        grants.changed(&here, range(0, u64::MAX));
        assert_eq!(due(&grants, &here), Some(vec![]), "the client is still to be called");
        grants.changed(&there, range(10, 19));
        assert_eq!(due(&grants, &there), None, "the client knows");
        [&here, &other].into_iter().for_each(|known| grants.remove(known, range(10, 19)));
        assert!(grants.of_owner.is_empty(), "nothing is left");
        // A later grant of the same range is another one.
        grants.insert(7, host(1), here.clone(), (true, range(10, 19)), Before::new());
        assert!(grants.numbered(1, &here, range(10, 19)).is_none());
        assert!(grants.numbered(7, &here, range(10, 19)).is_some());
    }

    #[test]
    fn callbacks_on_the_way_are_known_until_the_last_has_ended() {
        let (mut grants, here, there) = (Grants::default(), owner(1, 1), owner(1, 2));
        grants.insert(1, host(1), here.clone(), (true, range(10, 19)), Before::new());
        grants.insert(2, host(1), here.clone(), (true, range(20, 29)), Before::new());
        assert!(
            !grants.begin_call(2, &here, true, range(10, 19)) && !grants.begin_call(1, &here, false, range(10, 19))
        );
        assert!(!grants.get(&here, range(10, 19)).unwrap().is_sent && grants.calls_end(&here).is_none());
        assert!(grants.begin_call(1, &here, true, range(10, 19)) && grants.begin_call(2, &here, true, range(20, 29)));
        assert!(grants.get(&here, range(10, 19)).unwrap().is_sent && grants.calls_end(&there).is_none());
        let mut ended = std::pin::pin!(grants.calls_end(&here).unwrap());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        // A grant that is removed does not end its callback.
        grants.remove(&here, range(10, 19));
        assert!(!grants.begin_call(1, &here, true, range(10, 19)), "the client must not be called again");
        grants.end_call(&here);
        assert!(ended.as_mut().poll(&mut context).is_pending() && grants.calls_end(&here).is_some());
        grants.end_call(&here);
        assert!(grants.calls_end(&here).is_none() && grants.calls.is_empty());
        assert!(ended.as_mut().poll(&mut context).is_ready());
        grants.end_call(&here);
    }

    proptest! {
        /// Compares what is due, and which ranges overlap, byte by byte.
        #[test]
        fn what_is_due_are_the_bytes_without_a_call(
            given in prop::collection::vec((0u64..50, 0u64..8), 1..8),
            calls in prop::collection::vec((0u64..50, 0u64..12), 0..8),
        ) {
            let (mut grants, owner) = (Grants::default(), owner(1, 1));
            let mut ranges: Vec<Range> = Vec::new();
            for (start, len) in given {
                let wanted = range(start, start + len);
                let overlaps = ranges.iter().any(|known| known.overlaps(&wanted));
                prop_assert_eq!(grants.overlaps(&owner, wanted), overlaps);
                if !overlaps {
                    grants.insert(1, host(1), owner.clone(), (true, wanted), Before::new());
                    ranges.push(wanted);
                }
            }
            let calls: Vec<Range> = calls.iter().map(|(start, len)| range(*start, start + len)).collect();
            calls.iter().for_each(|call| grants.changed(&owner, *call));
            for given in ranges {
                let known = grants.get(&owner, given);
                prop_assert_eq!(known.is_none(), calls.contains(&given));
                let Some(grant) = known else { continue };
                for byte in given.start..=given.last {
                    let is_due = grant.due.iter().any(|part| (part.start..=part.last).contains(&byte));
                    prop_assert_eq!(is_due, !calls.iter().any(|call| (call.start..=call.last).contains(&byte)));
                }
            }
        }
    }
}
