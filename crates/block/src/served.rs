//! The top of an export's disk: what clients change is put in order, counted, can be waited for, and can be ended.
//!
//! Changes that overlap are done in the order in which they were begun ([`Sequence`]), whichever client, connection or
//! protocol they come by. A daemon that stops flushes its disks. What is acknowledged after that flush may be lost with it,
//! so there must be a moment from which nothing is: whatever connections are left, and however long the storage takes.
//! Here is the one place that all of them pass.

use crate::backend::{Backend, Lent, Op, Zero};
use crate::generations::{Generations, InFlight};
use crate::sequence::{Sequence, Turn};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;
use thruway_engine::Segment;
use thruway_server::slices;

/// Bytes that are prefetched as one unit of work.
const PREFETCHED_OF_UNIT: u64 = 1 << 20;

/// A disk that is served.
pub struct Served {
    below: Arc<dyn Backend>,
    sequence: Sequence,
    changes: Arc<Generations>,
    changers: Arc<Changers>,
    state: AtomicU8,
}

/// Connections that have changed a disk, and those of them that are gone.
#[derive(Debug, Default)]
struct Changers {
    come: AtomicU64,
    gone: AtomicU64,
}

/// A connection, which may change a disk and can tell whether others do: one of them may be its successor.
#[derive(Debug)]
pub(crate) struct Changer {
    changers: Arc<Changers>,
    /// Others that changed the disk were there before.
    has_company: bool,
    /// How many had come before.
    came_after: u64,
    has_changed: AtomicBool,
}

/// How long the last flush may take: a supervisor would end the daemon about then.
const FLUSH_LIMIT: Duration = Duration::from_secs(60);

/// Everything is let through.
const OPEN: u8 = 0;
/// Nothing new is.
const CLOSING: u8 = 1;
/// What was in progress and comes to its end now is not believed.
const CLOSED: u8 = 2;

impl Served {
    /// A disk to be served.
    pub fn new(below: Arc<dyn Backend>) -> Served {
        let state = AtomicU8::new(OPEN);
        Served { below, sequence: Sequence::default(), changes: Arc::default(), changers: Arc::default(), state }
    }

    /// A connection comes.
    pub(crate) fn changer(&self) -> Changer {
        // Not the other way round: one that goes meanwhile counts as company.
        let gone = self.changers.gone.load(Ordering::SeqCst);
        let came_after = self.changers.come.load(Ordering::SeqCst);
        let changers = Arc::clone(&self.changers);
        Changer { changers, has_company: came_after > gone, came_after, has_changed: AtomicBool::new(false) }
    }

    /// Refuses changes from now on, waits for those in progress, and flushes the disk. What takes longer than `limit` is not
    /// acknowledged any more.
    ///
    /// # Errors
    /// If the flush fails, or if something was still in progress.
    pub async fn close(&self, limit: Duration) -> io::Result<()> {
        self.state.fetch_max(CLOSING, Ordering::SeqCst);
        let ended = tokio::time::timeout(limit, self.changes.idle()).await;
        self.state.store(CLOSED, Ordering::SeqCst);
        let late = |_| io::Error::other("the flush takes too long; what was not flushed before may not be on the disk");
        tokio::time::timeout(FLUSH_LIMIT, self.below.flush()).await.map_err(late)??;
        ended.map_err(|_| io::Error::other("requests were still in flight, and were not acknowledged"))
    }

    /// Begins a change of `len` bytes from `at`.
    ///
    /// # Errors
    /// If changes are not let through any more.
    pub(crate) fn begin(&self, at: u64, len: u64) -> io::Result<Change<'_>> {
        let under_way = self.changes.begin();
        // After it counts: who closes either waits for it, or is seen.
        self.check(OPEN)?;
        Ok(Change { served: self, turn: self.sequence.begin(at, len), _under_way: under_way })
    }

    fn check(&self, most: u8) -> io::Result<()> {
        if self.state.load(Ordering::SeqCst) > most { Err(shut_down()) } else { Ok(()) }
    }

    /// A change in one step.
    fn change<'a>(&'a self, at: u64, len: u64, change: impl FnOnce() -> Op<'a, ()> + 'a) -> Op<'a, ()> {
        Box::pin(async move {
            let mut begun = self.begin(at, len)?;
            begun.turn().await?;
            begun.finish(change()).await
        })
    }
}

/// A change of a range that has begun: in one step or in several, all of them within the range.
pub(crate) struct Change<'a> {
    served: &'a Served,
    turn: Turn<'a>,
    _under_way: InFlight,
}

impl Change<'_> {
    /// Waits until those that were begun before, and overlap it, are over.
    ///
    /// # Errors
    /// If it is too late by then.
    pub(crate) async fn turn(&mut self) -> io::Result<()> {
        self.turn.come().await;
        self.served.check(CLOSING)
    }

    /// What is before `at` is done, and free for others.
    pub(crate) fn done_until(&self, at: u64) {
        self.turn.done_until(at);
    }

    pub(crate) async fn write(&self, at: u64, segment: Segment, durable: bool) -> io::Result<()> {
        self.finish(self.served.below.write(at, segment, durable)).await
    }

    pub(crate) async fn zero(&self, at: u64, len: u64, how: Zero) -> io::Result<()> {
        self.finish(self.served.below.zero(at, len, how)).await
    }

    pub(crate) async fn discard(&self, at: u64, len: u64) -> io::Result<()> {
        self.finish(self.served.below.discard(at, len)).await
    }

    /// What comes to its end after the last flush is not acknowledged.
    async fn finish(&self, step: Op<'_, ()>) -> io::Result<()> {
        step.await?;
        self.served.check(CLOSING)
    }
}

impl Changer {
    /// The connection changes the disk.
    pub(crate) fn changes(&self) {
        if !self.has_changed.load(Ordering::Relaxed) && !self.has_changed.swap(true, Ordering::SeqCst) {
            self.changers.come.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Others have changed the disk, or were there to change it, since this one has come.
    pub(crate) fn has_others(&self) -> bool {
        let come = self.changers.come.load(Ordering::SeqCst) - self.came_after;
        self.has_company || come > u64::from(self.has_changed.load(Ordering::SeqCst))
    }
}

impl Drop for Changer {
    fn drop(&mut self) {
        if self.has_changed.load(Ordering::SeqCst) {
            self.changers.gone.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn shut_down() -> io::Error {
    io::Error::from_raw_os_error(libc::ESHUTDOWN)
}

impl crate::layer::Layer for Served {
    fn inner(&self) -> &dyn Backend {
        &*self.below
    }

    fn lend(&self, at: u64, len: usize) -> Option<Lent> {
        self.below.lend(at, len)
    }

    fn prefetch(&self, at: u64, len: u64) -> Op<'_, ()> {
        Box::pin(async move {
            slices::spend((len / PREFETCHED_OF_UNIT) as usize).await;
            self.below.prefetch(at, len).await
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        self.change(at, segment.len() as u64, move || self.below.write(at, segment, durable))
    }

    fn flush(&self) -> Op<'_, ()> {
        Box::pin(async move {
            // Of no byte: it overlaps nothing.
            self.begin(0, 0)?.finish(self.below.flush()).await
        })
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        self.change(at, len, move || self.below.zero(at, len, how))
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.change(at, len, move || self.below.discard(at, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;
    use futures_util::FutureExt;
    use std::sync::Mutex;
    use thruway_engine::Segments;
    use tokio::sync::Notify;

    /// A disk whose changes wait until they are told to go on.
    struct Slow {
        below: MemoryBackend,
        go_on: Notify,
        is_slow: AtomicBool,
        seen: Mutex<Vec<&'static str>>,
    }

    impl crate::layer::Layer for Slow {
        fn inner(&self) -> &dyn Backend {
            &self.below
        }

        fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
            Box::pin(async move {
                if self.is_slow.load(Ordering::SeqCst) {
                    self.go_on.notified().await;
                }
                self.seen.lock().unwrap().push("write");
                self.below.write(at, segment, durable).await
            })
        }

        fn flush(&self) -> Op<'_, ()> {
            self.seen.lock().unwrap().push("flush");
            self.below.flush()
        }

        fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
            self.below.zero(at, len, how)
        }

        fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
            self.below.discard(at, len)
        }
    }

    fn slow() -> (Arc<Slow>, Served, Segments) {
        let slow = Arc::new(Slow {
            below: MemoryBackend::new(1 << 20).unwrap(),
            go_on: Notify::new(),
            is_slow: AtomicBool::new(true),
            seen: Mutex::default(),
        });
        (Arc::clone(&slow), Served::new(slow), Segments::new(4, 4096).unwrap())
    }

    async fn segment(memory: &Segments) -> Segment {
        memory.reserve(1).await.segment(512)
    }

    #[test]
    fn prefetching_is_as_much_work_as_its_range() {
        let (_, units) = slices::measured(|| async {
            let (_, served, _) = slow();
            served.prefetch(0, 100 << 20).await.unwrap();
        });
        assert_eq!(units, 100);
    }

    const SOON: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn nothing_is_acknowledged_after_the_last_flush() {
        let (slow, served, memory) = slow();
        let mut early = served.write(0, segment(&memory).await, false);
        assert!((&mut early).now_or_never().is_none());
        let mut close = Box::pin(served.close(SOON));
        assert!((&mut close).now_or_never().is_none(), "a write is under way");
        for refused in [served.write(0, segment(&memory).await, false), served.flush(), served.discard(0, 512)] {
            assert_eq!(refused.await.unwrap_err().raw_os_error(), Some(libc::ESHUTDOWN));
        }
        slow.go_on.notify_one();
        early.await.unwrap();
        close.await.unwrap();
        assert_eq!(*slow.seen.lock().unwrap(), ["write", "flush"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_takes_too_long_is_not_acknowledged() {
        let (slow, served, memory) = slow();
        let mut late = served.write(0, segment(&memory).await, false);
        assert!((&mut late).now_or_never().is_none());
        assert!(served.close(Duration::from_secs(1)).await.is_err(), "and that is told");
        slow.go_on.notify_one();
        assert_eq!(late.await.unwrap_err().raw_os_error(), Some(libc::ESHUTDOWN));
        assert_eq!(*slow.seen.lock().unwrap(), ["flush", "write"]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_later_of_two_that_overlap_waits_for_the_earlier() {
        let (slow, served, memory) = slow();
        let mut old = served.write(0, segment(&memory).await, false);
        assert!((&mut old).now_or_never().is_none());
        slow.is_slow.store(false, Ordering::SeqCst);
        let mut new = served.write(511, segment(&memory).await, false);
        let (mut zero, mut discard) = (served.zero(0, 1, Zero::empty()), served.discard(500, 1));
        for later in [&mut new, &mut zero, &mut discard] {
            assert!(later.now_or_never().is_none());
        }
        served.write(512 + 511, segment(&memory).await, false).now_or_never().expect("nothing overlaps it").unwrap();
        served.flush().await.unwrap();
        slow.go_on.notify_one();
        for each in [old, new, zero, discard] {
            each.await.unwrap();
        }
    }

    #[test]
    fn a_connection_knows_whether_others_change_the_disk() {
        let (_, served, _) = slow();
        let (first, second) = (served.changer(), served.changer());
        first.changes();
        first.changes();
        assert!(!first.has_others() && second.has_others());
        second.changes();
        assert!(first.has_others());
        let third = served.changer();
        drop(first);
        drop(second);
        assert!(third.has_others(), "they were there");
        drop(third);
        let last = served.changer();
        last.changes();
        assert!(!last.has_others());
    }
}
