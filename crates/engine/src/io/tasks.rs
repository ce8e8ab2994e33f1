//! The storage of a reactor's tasks.
//!
//! Requests made in one turn of the event loop are handed to the kernel together, in one system call, by a
//! task that runs after those that made them; what completes at once (cached pages) is collected by the same
//! call. For everything else the event loop watches the ring's own descriptor, so an idle reactor sleeps.
//!
//! What the ring is not asked for is a system call on a thread that may wait.

use super::core::{Core, Ended, NewRing, Wait};
use super::request::{Operation, Outcome, Request, SegmentList};
use super::{OpenFile, without_io_uring};
use crate::segment::Segment;
use rustix::fs::FallocateFlags;
use slab::Slab;
use smallvec::smallvec;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use tokio::time::Sleep;

/// Requests in progress at once.
const DEPTH: usize = 512;
/// How long registered memory is kept after its owner has gone.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// A ring that is not at work yet, or what does its work if there is to be none.
pub(crate) struct Ring(Option<NewRing>);

thread_local! {
    static CURRENT: RefCell<Option<Requests>> = const { RefCell::new(None) };
}

/// The ring of the reactor that runs this task.
///
/// # Panics
/// Outside a reactor.
pub fn ring() -> Requests {
    CURRENT.with_borrow(|current| current.clone().expect("a task of a reactor"))
}

/// Where tasks of a reactor start requests.
#[derive(Clone)]
pub struct Requests {
    ring: Option<Rc<RefCell<State>>>,
    /// Bounds how many of its requests wait on threads; `None`: any number.
    places: Option<Arc<Semaphore>>,
}

struct State {
    core: Core<usize>,
    tasks: Slab<Task>,
    driver: Option<Waker>,
}

enum Task {
    Waiting(Option<Waker>),
    Done(Ended),
    /// The task is gone. The request is not: what may still reach the storage is not given up.
    Gone,
}

impl Ring {
    /// Makes a ring, or what does its work if there is to be none.
    pub(crate) fn build() -> Ring {
        Ring(NewRing::new(DEPTH, Wait::InEpoll).inspect_err(without_io_uring).ok())
    }

    /// What does a ring's work where there is none.
    #[cfg(test)]
    pub(crate) fn by_threads() -> Ring {
        Ring(None)
    }

    /// Makes this the ring of the calling thread. The returned task does its work.
    pub(crate) fn install(self) -> Pin<Box<dyn Future<Output = ()>>> {
        let core = self.0.and_then(|ring| Core::new(ring, DEPTH).inspect_err(without_io_uring).ok());
        let ring = core.map(|core| Rc::new(RefCell::new(State { core, tasks: Slab::new(), driver: None })));
        CURRENT.set(Some(Requests { ring: ring.clone(), places: None }));
        match ring {
            Some(state) => Box::pin(drive(state)),
            None => Box::pin(std::future::pending()),
        }
    }
}

async fn drive(state: Rc<RefCell<State>>) {
    let fd = Watched(state.borrow().core.fd(), Rc::clone(&state));
    // SAFETY: `Watched` keeps the ring, and so the descriptor open and the same, until it is dropped with the
    // registration.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.expect("a ring can be watched");
    let mut sweep: Option<Pin<Box<Sleep>>> = None;
    poll_fn::<(), _>(|cx| {
        loop {
            let idle = state.borrow_mut().progress(cx);
            if !idle {
                continue;
            }
            match fd.poll_read_ready(cx) {
                Poll::Ready(Ok(mut ready)) => ready.clear_ready(),
                _ => break,
            }
        }
        let core = &mut state.borrow_mut().core;
        while core.has_registered() {
            let timer = sweep.get_or_insert_with(|| Box::pin(tokio::time::sleep(SWEEP_INTERVAL)));
            if timer.as_mut().poll(cx).is_pending() {
                break;
            }
            core.sweep();
            sweep = None;
        }
        Poll::Pending
    })
    .await;
}

/// The ring's descriptor, which tells of completions.
struct Watched(RawFd, #[expect(dead_code, reason = "keeps the ring")] Rc<RefCell<State>>);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

impl State {
    /// Submits what waits and collects what is done. True when there is nothing to do but to wait.
    fn progress(&mut self, cx: &Context<'_>) -> bool {
        if !self.driver.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.driver = Some(cx.waker().clone());
        }
        self.core.submit(0);
        let (tasks, mut completed) = (&mut self.tasks, false);
        self.core.collect(|task, ended| {
            completed = true;
            match std::mem::replace(&mut tasks[task], Task::Done(ended)) {
                Task::Waiting(waker) => waker.into_iter().for_each(Waker::wake),
                Task::Gone => {
                    if let Task::Done(Ended::WouldWait(request, done)) = tasks.remove(task) {
                        finish(request, done);
                    }
                }
                Task::Done(_) => unreachable!("a request completes once"),
            }
        });
        if self.core.is_broken() {
            // A broken ring signals no completions, so this task polls until all requests are returned.
            if self.core.len() > 0 {
                cx.waker().wake_by_ref();
            }
            return true;
        }
        !completed && !self.core.can_submit()
    }
}

/// Does the rest of a request whose task is gone. No acknowledgement depends on it: where no thread can be started, it is
/// left.
fn finish(request: Request, done: usize) {
    let _ = std::thread::Builder::new().spawn(move || request.perform(done));
}

/// Waits for a request.
struct Pending {
    state: Rc<RefCell<State>>,
    task: usize,
    taken: bool,
}

impl Future for Pending {
    type Output = Ended;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        let mut state = self.state.borrow_mut();
        match &mut state.tasks[self.task] {
            Task::Waiting(waker) => {
                *waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Task::Done(_) => {}
            Task::Gone => unreachable!("the task is here"),
        }
        let Task::Done(ended) = state.tasks.remove(self.task) else { unreachable!("matched above") };
        drop(state);
        self.taken = true;
        Poll::Ready(ended)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let mut state = self.state.borrow_mut();
        if let Task::Done(ended) = std::mem::replace(&mut state.tasks[self.task], Task::Gone) {
            state.tasks.remove(self.task);
            drop(state);
            if let Ended::WouldWait(request, done) = ended {
                finish(request, done);
            }
        }
    }
}

impl Requests {
    /// The same; where threads are used, no more of them wait than this semaphore has permits.
    pub fn within(self, places: &Arc<Semaphore>) -> Requests {
        Requests { places: Some(Arc::clone(places)), ..self }
    }

    /// Does something that may wait on a thread of its own. Once it has begun it is done, whether or not somebody waits for it.
    pub async fn on_thread<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> T {
        let place = match &self.places {
            Some(places) => Arc::clone(places).acquire_owned().await.ok(),
            None => None,
        };
        let call = move || {
            let done = call();
            drop(place);
            done
        };
        match tokio::task::spawn_blocking(call).await {
            Ok(done) => done,
            Err(failed) if failed.is_panic() => std::panic::resume_unwind(failed.into_panic()),
            // The reactor shuts down, and this task with it.
            Err(_) => std::future::pending().await,
        }
    }

    /// Does a request. One whose future is dropped is done all the same, once it has begun.
    pub async fn perform(&self, request: Request) -> Outcome {
        match self.ring.as_ref().filter(|_| request.can_use_ring()) {
            Some(state) => {
                let task = {
                    let mut guard = state.borrow_mut();
                    let task = guard.tasks.insert(Task::Waiting(None));
                    guard.core.start(request, task);
                    if let Some(driver) = &guard.driver {
                        driver.wake_by_ref();
                    }
                    task
                };
                match (Pending { state: Rc::clone(state), task, taken: false }).await {
                    Ended::Done(outcome) => outcome,
                    Ended::WouldWait(request, done) => self.on_thread(move || request.perform(done)).await,
                }
            }
            None => self.on_thread(move || request.perform(0)).await,
        }
    }

    /// Fills the segment from `offset` of the file.
    ///
    /// The result is an error of kind [`io::ErrorKind::UnexpectedEof`] if the file ends before.
    pub async fn read(&self, file: &Arc<OpenFile>, offset: u64, segment: Segment) -> (io::Result<()>, Segment) {
        self.perform(Request::read(Arc::clone(file), offset, segment)).await.whole()
    }

    /// Writes the segment at `offset` of the file; with `durable`, down to the storage.
    pub async fn write(
        &self,
        file: &Arc<OpenFile>,
        offset: u64,
        segment: Segment,
        durable: bool,
    ) -> (io::Result<()>, Segment) {
        let (file, operation) = (Arc::clone(file), Operation::Write { durable });
        self.perform(Request { file, offset, operation, buffers: smallvec![segment] }).await.whole()
    }

    async fn plain(&self, file: &Arc<OpenFile>, offset: u64, operation: Operation) -> io::Result<()> {
        let buffers = SegmentList::new();
        self.perform(Request { file: Arc::clone(file), offset, operation, buffers }).await.result.map(drop)
    }

    /// Makes everything written to the file durable, with what is needed to read it.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn sync(&self, file: &Arc<OpenFile>) -> io::Result<()> {
        self.plain(file, 0, Operation::Sync).await
    }

    /// Has a range read into the page cache.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn prefetch(&self, file: &Arc<OpenFile>, offset: u64, len: u64) -> io::Result<()> {
        self.plain(file, offset, Operation::Prefetch { len }).await
    }

    /// `fallocate(2)`.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn allocate(&self, file: &Arc<OpenFile>, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        self.plain(file, offset, Operation::Allocate { mode, len }).await
    }

    /// Discards the whole sectors of a range of a block device.
    ///
    /// # Errors
    /// The kernel's. That the device cannot is none.
    pub async fn discard(&self, file: &Arc<OpenFile>, offset: u64, len: u64) -> io::Result<()> {
        self.plain(file, offset, Operation::Discard { len }).await
    }
}
