//! A ring and the requests that the kernel has: what the drivers have in common.

use super::buffers::RegisteredBuffers;
use super::request::{Outcome, Progress, Request, SegmentList};
use crate::pool::BlockPool;
use crate::segment::Segment;
use io_uring::{IoUring, opcode, types};
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

/// Entries of the submission queue; more requests wait in memory.
const ENTRIES: u32 = 256;
/// Marks the completion of a watched descriptor.
const WATCH: u64 = u64::MAX;
/// Attempts to enter the ring before it counts as broken, and to end the requests of a broken ring that is dropped.
const ATTEMPTS: u32 = 20;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// Attempts to cancel the requests of a broken ring before they are given up.
const CANCELS_MAX: u32 = 300;

/// Where the thread of a ring waits for completions.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    /// In [`Core::submit`].
    InRing,
    /// Elsewhere, for the ring's descriptor to become readable. Work that is deferred until the ring is entered does not make it so.
    InEpoll,
}

/// A ring that no thread uses yet.
pub(super) struct NewRing(IoUring);

/// A ring, its requests, and with each what its driver needs to pass the outcome on.
pub(super) struct Core<T> {
    ring: IoUring,
    requests: Slab<InProgress<T>>,
    /// Requests not handed to the submission queue yet, or again.
    waiting: VecDeque<usize>,
    /// Entries that the ring has, the watch left out.
    in_ring: usize,
    /// Keys of the requests in the submission queue, in order; [`WATCH`] for the watch. Keys of requests that the kernel has taken come
    /// first until the next [`Core::enter`] removes them.
    queued: VecDeque<u64>,
    limit: usize,
    watching: bool,
    registered: RegisteredBuffers,
    /// The ring cannot be entered any more; system calls replace it.
    broken: bool,
    /// Attempts to cancel the requests of a broken ring.
    cancels: u32,
}

/// How the ring has ended a request.
pub(super) enum Ended {
    /// It is done, or has failed.
    Done(Outcome),
    /// The ring transferred this number of bytes. The rest needs a system call, because it would block the ring or the ring is broken.
    WouldWait(Request, usize),
}

struct InProgress<T> {
    request: Request,
    progress: Progress,
    /// What the entry refers to; in the heap, so that it stays where it is.
    vectors: Vec<libc::iovec>,
    owner: T,
}

impl NewRing {
    /// Makes a ring with room for this many requests in progress. The first thread that uses it is the only one.
    ///
    /// # Errors
    /// If there is no io_uring.
    pub(super) fn new(limit: usize, wait: Wait) -> io::Result<NewRing> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(2 * limit as u32).setup_r_disabled();
        let plain = builder.clone();
        // A completion does not interrupt the thread; it is dealt with when the thread enters the kernel next (Linux 6.0), or
        // waits for completions (6.1).
        builder.setup_single_issuer().setup_taskrun_flag();
        match wait {
            Wait::InRing => builder.setup_defer_taskrun(),
            Wait::InEpoll => builder.setup_coop_taskrun(),
        };
        Ok(NewRing(builder.build(ENTRIES).or_else(|_| plain.build(ENTRIES))?))
    }
}

impl<T> Core<T> {
    /// Puts a ring to work on this thread, with at most `limit` requests in progress.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new(ring: NewRing, limit: usize) -> io::Result<Core<T>> {
        let ring = ring.0;
        ring.submitter().register_enable_rings()?;
        // Some filters of system calls refuse only this one.
        // SAFETY: no argument refers to memory.
        unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, 0, None) }?;
        let registered = RegisteredBuffers::new(&ring);
        let (requests, waiting, queued) = (Slab::new(), VecDeque::new(), VecDeque::new());
        let (in_ring, watching, broken, cancels) = (0, false, false, 0);
        Ok(Core { ring, requests, waiting, in_ring, queued, limit, watching, registered, broken, cancels })
    }

    /// The ring's descriptor, which is readable when there are completions.
    pub(super) fn fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// Takes in a request; it goes to the kernel with the next [`Core::submit`].
    pub(super) fn start(&mut self, request: Request, owner: T) {
        let vectors = Vec::new();
        let key = self.requests.insert(InProgress { request, progress: Progress::default(), vectors, owner });
        self.waiting.push_back(key);
    }

    /// Requests that are not over.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// True if the ring is broken. [`Core::collect`] then returns the remaining requests as [`Ended::WouldWait`].
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether requests wait that there is room for.
    pub(super) fn can_submit(&self) -> bool {
        !self.waiting.is_empty() && self.in_ring < self.limit
    }

    /// Has [`Core::collect`] say so when a descriptor can be read.
    pub(super) fn watch(&mut self, fd: impl AsFd) {
        if self.watching || self.broken {
            return;
        }
        let fd = types::Fd(fd.as_fd().as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WATCH);
        // SAFETY: the entry refers to no memory.
        self.watching = unsafe { self.ring.submission().push(&entry) }.is_ok();
        if self.watching {
            self.queued.push_back(WATCH);
        }
    }

    /// Hands waiting requests to the kernel, and waits for `want` completions.
    pub(super) fn submit(&mut self, want: usize) {
        while !self.broken
            && self.in_ring < self.limit
            && let Some(key) = self.waiting.front().copied()
        {
            let InProgress { request, progress, vectors, .. } = &mut self.requests[key];
            let registered = match &request.buffers[..] {
                [segment] if request.file.is_direct() => self.registered.index_of(&self.ring, segment.buffer()),
                _ => None,
            };
            let entry = request.entry(progress.done, registered, vectors).user_data(key as u64);
            // SAFETY: file, memory and vectors stay in `requests` until the entry's completion.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                // The submission queue is full.
                self.enter(0);
                if self.ring.submission().is_full() {
                    break;
                }
                continue;
            }
            self.waiting.pop_front();
            self.queued.push_back(key as u64);
            self.in_ring += 1;
        }
        let queue = self.ring.submission();
        let has_work = want > 0 || !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if has_work && !self.broken {
            self.enter(want);
        }
    }

    /// Calls `io_uring_enter`: submits requests, runs the kernel's deferred work, and waits for `want` completions.
    ///
    /// The ring is broken if an error persists, such as a lack of memory (`ENOMEM`) or a lost completion (`EBADR`).
    fn enter(&mut self, want: usize) {
        for attempt in 1.. {
            let to_submit = self.ring.submission().len() as u32;
            // SAFETY: no argument refers to memory.
            let entered = unsafe {
                let events = io_uring::EnterFlags::GETEVENTS;
                self.ring.submitter().enter::<libc::sigset_t>(to_submit, want as u32, events.bits(), None)
            };
            let unsubmitted = self.ring.submission().len();
            self.queued.drain(..self.queued.len().saturating_sub(unsubmitted));
            match entered {
                Ok(_) => return,
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => return,
                Err(error) if attempt < ATTEMPTS => {
                    tracing::debug!(%error, attempt, "io_uring_enter failed");
                    std::thread::sleep(PAUSE);
                }
                Err(error) => {
                    tracing::warn!(%error, "io_uring has failed; storage requests continue as system calls");
                    self.broken = true;
                    return;
                }
            }
        }
    }

    /// Cancels the requests of a broken ring that the kernel has taken, makes their completions available, and pauses.
    fn cancel(&mut self) {
        let timeout = types::Timespec::new().sec(1);
        let all = types::CancelBuilder::any().all();
        let cancelled = self.ring.submitter().register_sync_cancel(Some(timeout), all);
        // SAFETY: no argument refers to memory. Nothing is submitted.
        let entered = unsafe {
            let events = io_uring::EnterFlags::GETEVENTS;
            self.ring.submitter().enter::<libc::sigset_t>(0, 0, events.bits(), None)
        };
        tracing::debug!(in_ring = self.in_ring, ?cancelled, ?entered, "cancelling the requests of a broken ring");
        self.cancels += 1;
        std::thread::sleep(PAUSE);
    }

    /// Fails the requests of a broken ring that do not complete. The kernel may still access their memory, so it is leaked,
    /// and their owners get other memory.
    fn give_up(&mut self, done: &mut impl FnMut(T, Ended)) {
        let keys: Vec<usize> = self.requests.iter().map(|(key, _)| key).collect();
        tracing::error!(
            requests = keys.len(),
            "requests of a failed io_uring instance do not complete; they fail, and their memory is leaked"
        );
        for key in keys {
            let Some(buffers) = replacements(&self.requests[key].request.buffers) else { return };
            let InProgress { request, vectors, owner, .. } = self.requests.remove(key);
            std::mem::forget((request, vectors));
            self.in_ring -= 1;
            let result = Err(io::Error::other("io_uring has failed and does not complete the request"));
            done(owner, Ended::Done(Outcome { result, buffers }));
        }
    }

    /// Returns the requests of a broken ring that the kernel has not taken to their owners.
    fn hand_back(&mut self, done: &mut impl FnMut(T, Ended)) {
        let unseen = std::mem::take(&mut self.queued).into_iter().filter(|key| *key != WATCH).map(|key| key as usize);
        let unseen: Vec<usize> = unseen.collect();
        self.in_ring -= unseen.len();
        for key in unseen.into_iter().chain(std::mem::take(&mut self.waiting)) {
            let InProgress { request, progress, owner, .. } = self.requests.remove(key);
            done(owner, Ended::WouldWait(request, progress.done));
        }
    }

    /// Passes on what is done. True if the watched descriptor can be read.
    pub(super) fn collect(&mut self, mut done: impl FnMut(T, Ended)) -> bool {
        if self.broken {
            self.hand_back(&mut done);
            if self.in_ring > 0 && self.cancels < CANCELS_MAX {
                self.cancel();
            } else if self.in_ring > 0 {
                self.give_up(&mut done);
            }
        }
        let mut readable = false;
        while let Some(completion) = { self.ring.completion().next() } {
            if completion.user_data() == WATCH {
                (self.watching, readable) = (false, true);
                continue;
            }
            self.in_ring -= 1;
            let key = completion.user_data() as usize;
            let InProgress { request, progress, .. } = &mut self.requests[key];
            let result = match completion.result() {
                code if code == -libc::EAGAIN || (self.broken && code == -libc::ECANCELED) => {
                    let InProgress { request, progress, owner, .. } = self.requests.remove(key);
                    done(owner, Ended::WouldWait(request, progress.done));
                    continue;
                }
                code if code < 0 => Err(io::Error::from_raw_os_error(-code)),
                n => Ok(n as usize),
            };
            match progress.advance(request, result) {
                None => self.waiting.push_back(key),
                Some(result) => {
                    let InProgress { request, owner, .. } = self.requests.remove(key);
                    done(owner, Ended::Done(Outcome { result, buffers: request.buffers }));
                }
            }
        }
        readable
    }

    /// Whether any buffers are registered.
    pub(super) fn has_registered(&self) -> bool {
        self.registered.is_in_use()
    }

    /// Unregisters buffers that have no other owner any more.
    pub(super) fn sweep(&mut self) {
        self.registered.sweep(&self.ring);
    }
}

/// New segments of the same lengths; `None` if memory is short.
fn replacements(buffers: &SegmentList) -> Option<SegmentList> {
    let segment = |segment: &Segment| {
        let pool = BlockPool::new(1, segment.len().max(1)).ok()?;
        Some(Segment::new(pool.try_take()?, segment.len()))
    };
    buffers.iter().map(segment).collect()
}

impl<T> Drop for Core<T> {
    /// Waits for what the kernel still has, whose memory would otherwise go from under it.
    fn drop(&mut self) {
        for round in 0.. {
            if self.broken {
                self.in_ring -= std::mem::take(&mut self.queued).iter().filter(|key| **key != WATCH).count();
            }
            match self.broken {
                _ if self.in_ring == 0 => return,
                true if round >= ATTEMPTS => {
                    // The kernel may still access the memory of the requests, so it is leaked.
                    tracing::error!(in_ring = self.in_ring, "requests of a failed io_uring instance do not complete");
                    return std::mem::forget(std::mem::take(&mut self.requests));
                }
                true => self.cancel(),
                false => self.enter(1),
            }
            while let Some(completion) = { self.ring.completion().next() } {
                self.in_ring -= usize::from(completion.user_data() != WATCH);
            }
        }
    }
}
