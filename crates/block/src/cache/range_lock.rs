//! A shared/exclusive lock on ranges of blocks. Ranges that do not overlap never wait for each other.
//!
//! Requests share the blocks they touch; zeroing or discarding a range locks it exclusively. Internal work of the cache
//! for a request (a load, a write-out to make room) shares its block too, and may outlast the request.
//!
//! A waiting exclusive lock blocks later *requests* at once, so that it is not starved, but admits
//! *internal* work until every shared lock on its range has been released: a request that it waits for may need
//! that work. After that nothing is admitted. The exclusive holder needs nothing of the cache itself, so there is no deadlock.
//!
//! Shared locks are registered in one of several shards, by thread: an uncontended mutex each. An exclusive lock
//! goes through all shards.

use slab::Slab;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;

const SHARDS: usize = 16;

/// Who shares a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// Waits for those who want the range alone, too.
    Request,
    /// Waits only for those who have it.
    Internal,
}

#[derive(Default)]
pub(super) struct RangeLock {
    shards: [Shard; SHARDS],
    /// Every range that is wanted or had alone, in the order in which they came.
    exclusive: Mutex<Queue>,
    /// Told when somebody who was waited for has gone.
    changed: Notify,
}

#[derive(Default)]
struct Queue {
    ranges: Vec<(u64, Range<u64>)>,
    next_id: u64,
}

/// Apart from its neighbours' cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<State>);

#[derive(Default)]
struct State {
    shared: Slab<Range<u64>>,
    exclusive: Vec<Exclusive>,
}

struct Exclusive {
    id: u64,
    range: Range<u64>,
    /// It is had; before, it is only wanted.
    held: bool,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// This thread's shard.
fn shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static SHARD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS);
    SHARD.with(|shard| *shard)
}

impl RangeLock {
    /// Shares a range until what is returned is dropped; `None` if that would have to wait.
    pub(super) fn try_share(self: &Arc<Self>, range: Range<u64>, who: Who) -> Option<Shared> {
        let shard = shard();
        let mut state = self.shards[shard].lock();
        let held_up = |e: &Exclusive| (e.held || who == Who::Request) && overlap(&e.range, &range);
        if state.exclusive.iter().any(held_up) {
            return None;
        }
        let key = state.shared.insert(range);
        drop(state);
        Some(Shared { lock: Arc::clone(self), shard, key })
    }

    /// Shares a range until what is returned is dropped.
    pub(super) async fn share(self: &Arc<Self>, range: Range<u64>, who: Who) -> Shared {
        self.when_changed(|| self.try_share(range.clone(), who)).await
    }

    /// Has a range alone until what is returned is dropped. Those who want what overlaps have it in the order in which
    /// they came.
    pub(super) async fn alone(self: &Arc<Self>, range: Range<u64>) -> Alone {
        let alone = self.want(&range);
        self.when_changed(|| self.have(alone.id, &range)).await;
        alone
    }

    async fn when_changed<T>(&self, mut attempt: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(done) = attempt() {
                return done;
            }
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            // It may have changed before we listened.
            if let Some(done) = attempt() {
                return done;
            }
            changed.await;
        }
    }

    /// Keeps requests out of a range.
    fn want(self: &Arc<Self>, range: &Range<u64>) -> Alone {
        let mut queue = self.queue();
        let id = queue.next_id;
        queue.next_id += 1;
        queue.ranges.push((id, range.clone()));
        drop(queue);
        for shard in &self.shards {
            shard.lock().exclusive.push(Exclusive { id, range: range.clone(), held: false });
        }
        Alone { lock: Arc::clone(self), id }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.exclusive.lock().expect("no panics under the lock")
    }

    /// Grants exclusive use of a range, once it is not shared and no earlier request waits for it.
    fn have(&self, id: u64, range: &Range<u64>) -> Option<()> {
        if self.queue().ranges.iter().any(|(other, wanted)| *other < id && overlap(wanted, range)) {
            return None;
        }
        // All at once, or somebody could come in where we have looked already.
        let mut states: Vec<MutexGuard<'_, State>> = self.shards.iter().map(Shard::lock).collect();
        if states.iter().any(|state| state.shared.iter().any(|(_, shared)| overlap(shared, range))) {
            return None;
        }
        for state in &mut states {
            state.exclusive.iter_mut().filter(|e| e.id == id).for_each(|e| e.held = true);
        }
        Some(())
    }
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panics under the lock")
    }
}

/// A range that is shared.
pub(super) struct Shared {
    lock: Arc<RangeLock>,
    shard: usize,
    key: usize,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut state = self.lock.shards[self.shard].lock();
        let range = state.shared.remove(self.key);
        let waited_for = state.exclusive.iter().any(|e| !e.held && overlap(&e.range, &range));
        drop(state);
        if waited_for {
            self.lock.changed.notify_waiters();
        }
    }
}

/// A range that is wanted or had alone.
pub(super) struct Alone {
    lock: Arc<RangeLock>,
    id: u64,
}

impl Drop for Alone {
    fn drop(&mut self) {
        for shard in &self.lock.shards {
            shard.lock().exclusive.retain(|e| e.id != self.id);
        }
        self.lock.queue().ranges.retain(|(id, _)| *id != self.id);
        self.lock.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn who_wants_a_range_keeps_requests_out_of_it_and_of_nothing_else() {
        let lock = Arc::new(RangeLock::default());
        let reader = lock.try_share(10..20, Who::Request).unwrap();
        let mut zero = Box::pin(lock.alone(15..30));
        assert!(zero.as_mut().now_or_never().is_none());
        assert!(lock.try_share(29..31, Who::Request).is_none());
        assert!(lock.try_share(30..31, Who::Request).is_some());
        // What the reader may need done is done.
        let load = lock.try_share(16..17, Who::Internal).unwrap();
        drop(reader);
        assert!(zero.as_mut().now_or_never().is_none());
        drop(load);
        let zero = zero.now_or_never().expect("nobody shares it");
        assert!(lock.try_share(16..17, Who::Internal).is_none());
        assert!(lock.try_share(0..15, Who::Internal).is_some());
        drop(zero);
        assert!(lock.try_share(16..17, Who::Request).is_some());
    }

    #[test]
    fn two_that_want_what_overlaps_have_it_in_turn() {
        let lock = Arc::new(RangeLock::default());
        let first = lock.alone(0..10).now_or_never().unwrap();
        let elsewhere = lock.alone(10..12).now_or_never().expect("they do not overlap");
        let mut second = Box::pin(lock.alone(9..20));
        assert!(second.as_mut().now_or_never().is_none());
        // Later requests wait, even if their range is free: otherwise a request for a large range would starve.
        let mut later = Box::pin(lock.alone(12..14));
        assert!(later.as_mut().now_or_never().is_none());
        drop(first);
        assert!(second.as_mut().now_or_never().is_none());
        drop(elsewhere);
        assert!(later.as_mut().now_or_never().is_none());
        let second = second.now_or_never().expect("it is its turn");
        assert!(later.as_mut().now_or_never().is_none());
        drop(second);
        assert!(later.now_or_never().is_some());
    }

    #[test]
    fn who_gives_up_waiting_leaves_nothing_behind() {
        let lock = Arc::new(RangeLock::default());
        let reader = lock.try_share(0..10, Who::Request).unwrap();
        let mut zero = Box::pin(lock.alone(0..10));
        assert!(zero.as_mut().now_or_never().is_none());
        drop(zero);
        assert!(lock.try_share(0..10, Who::Request).is_some());
        drop(reader);
    }

    /// Threads share and take ranges alone at random; nobody is ever in a range with one who has it alone.
    #[test]
    fn nobody_shares_what_another_has_alone() {
        const BLOCKS: usize = 32;
        let lock = Arc::new(RangeLock::default());
        let inside: Arc<Vec<AtomicU64>> = Arc::new((0..BLOCKS).map(|_| AtomicU64::new(0)).collect());
        let alone = 1 << 32;
        let runs: Vec<_> = (0..4_u64)
            .map(|seed| {
                let (lock, inside) = (Arc::clone(&lock), Arc::clone(&inside));
                std::thread::spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    let mut chance = fastrand::Rng::with_seed(seed + 1);
                    let mut random = |below: usize| chance.usize(..below);
                    for _ in 0..3000 {
                        let start = random(BLOCKS);
                        let end = start + 1 + random(BLOCKS - start);
                        let range = start as u64..end as u64;
                        let by = if random(8) == 0 { alone } else { 1 };
                        let (mut shared, mut had) = (None, None);
                        if by == alone {
                            had = Some(runtime.block_on(lock.alone(range)));
                        } else {
                            shared = Some(runtime.block_on(lock.share(range, Who::Request)));
                        }
                        for block in &inside[start..end] {
                            let others = block.fetch_add(by, Ordering::SeqCst);
                            assert!(others < alone && (by == 1 || others == 0), "{others:#x}");
                        }
                        std::thread::yield_now();
                        inside[start..end].iter().for_each(|block| _ = block.fetch_sub(by, Ordering::SeqCst));
                        drop((shared, had));
                    }
                })
            })
            .collect();
        runs.into_iter().for_each(|run| run.join().unwrap());
    }
}
