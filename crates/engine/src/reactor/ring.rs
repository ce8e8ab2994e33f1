//! The io_uring of a reactor.
//!
//! Requests made in one turn of the event loop are handed to the kernel together, in one system call, by a
//! task that runs after those that made them; what completes at once (cached pages) is collected by the same
//! call. For everything else the event loop watches the ring's own descriptor, so an idle reactor sleeps.
//!
//! Where io_uring is forbidden (containers, hardened systems), a request is a system call on a thread that may wait.

use crate::segment::Segment;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::ReadWriteFlags;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;

/// Entries of the submission queue; more requests wait in memory.
const ENTRIES: u32 = 256;
/// Requests in progress at once: as many completions fit.
const UNDER_WAY_MAX: usize = 512;

/// A ring that is not at work yet.
pub struct Ring {
    ring: Option<IoUring>,
}

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

impl Requests {
    /// Where requests are started that io_uring is not to be trusted with: each is a system call on a thread that may wait.
    pub fn by_threads() -> Requests {
        Requests { ring: None, places: None }
    }

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
            // The reactor ends, and who waits with it.
            Err(_) => std::future::pending().await,
        }
    }
}

struct State {
    ring: IoUring,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Requests not handed to the submission queue yet.
    waiting: VecDeque<squeue::Entry>,
    under_way: usize,
    driver: Option<Waker>,
}

enum Slot {
    Free,
    /// The kernel has it; what it needs stays here even if nobody waits any more.
    UnderWay {
        waker: Option<Waker>,
        _file: Arc<File>,
        segment: Option<Segment>,
    },
    Done {
        result: i32,
        segment: Option<Segment>,
    },
    /// As in progress, but the task that asked is gone.
    Abandoned {
        _file: Arc<File>,
        _segment: Option<Segment>,
    },
}

impl Ring {
    /// Makes a ring, or what does its work if there is to be none.
    pub fn build() -> Ring {
        match IoUring::builder().setup_cqsize(2 * UNDER_WAY_MAX as u32).build(ENTRIES) {
            Ok(ring) => Ring { ring: Some(ring) },
            Err(error) => {
                crate::without_io_uring(&error);
                Ring::by_threads()
            }
        }
    }

    /// What does a ring's work where there is none.
    pub(super) fn by_threads() -> Ring {
        Ring { ring: None }
    }

    /// Makes this the ring of the calling thread. The returned task does its work.
    pub(super) fn install(self) -> Pin<Box<dyn Future<Output = ()>>> {
        let Some(ring) = self.ring else {
            CURRENT.set(Some(Requests::by_threads()));
            return Box::pin(std::future::pending());
        };
        let state =
            State { ring, slots: Vec::new(), free: Vec::new(), waiting: VecDeque::new(), under_way: 0, driver: None };
        let state = Rc::new(RefCell::new(state));
        CURRENT.set(Some(Requests { ring: Some(Rc::clone(&state)), places: None }));
        Box::pin(drive(state))
    }
}

async fn drive(requests: Rc<RefCell<State>>) {
    let fd = Watched(requests.borrow().ring.as_raw_fd(), Rc::clone(&requests));
    // SAFETY: `Watched` keeps the ring, and so the descriptor open and the same, until it is dropped with the
    // registration.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.expect("a ring can be watched");
    poll_fn::<(), _>(|cx| {
        loop {
            let idle = requests.borrow_mut().turn(cx);
            if !idle {
                continue;
            }
            match fd.poll_read_ready(cx) {
                Poll::Ready(Ok(mut ready)) => ready.clear_ready(),
                _ => return Poll::Pending,
            }
        }
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
    fn turn(&mut self, cx: &Context<'_>) -> bool {
        if !self.driver.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            self.driver = Some(cx.waker().clone());
        }
        while self.under_way < UNDER_WAY_MAX
            && let Some(entry) = self.waiting.front()
        {
            // SAFETY: the entry's slot keeps the file and the memory until its completion.
            if unsafe { self.ring.submission().push(entry) }.is_err() {
                break;
            }
            self.waiting.pop_front();
            self.under_way += 1;
        }
        if !self.ring.submission().is_empty()
            && let Err(error) = self.ring.submit()
            && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN))
        {
            tracing::error!(%error, "io_uring refuses requests");
        }
        let mut completed = 0;
        while let Some(entry) = { self.ring.completion().next() } {
            self.complete(entry.user_data() as usize, entry.result());
            completed += 1;
        }
        self.under_way -= completed;
        completed == 0 && (self.waiting.is_empty() || self.under_way == UNDER_WAY_MAX)
    }

    fn complete(&mut self, index: usize, result: i32) {
        match std::mem::replace(&mut self.slots[index], Slot::Free) {
            Slot::UnderWay { waker, segment, .. } => {
                self.slots[index] = Slot::Done { result, segment };
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Slot::Abandoned { .. } => self.free.push(index),
            Slot::Free | Slot::Done { .. } => unreachable!("a request completes once"),
        }
    }
}

/// A request in progress.
struct Under {
    requests: Rc<RefCell<State>>,
    index: usize,
    taken: bool,
}

impl Future for Under {
    type Output = (i32, Option<Segment>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let index = self.index;
        let mut state = self.requests.borrow_mut();
        match &mut state.slots[index] {
            Slot::UnderWay { waker, .. } => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Slot::Done { result, segment } => {
                let outcome = (*result, segment.take());
                state.slots[index] = Slot::Free;
                state.free.push(index);
                drop(state);
                self.taken = true;
                Poll::Ready(outcome)
            }
            _ => unreachable!("the slot is this request's"),
        }
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let mut state = self.requests.borrow_mut();
        match std::mem::replace(&mut state.slots[self.index], Slot::Free) {
            Slot::UnderWay { _file, segment, .. } => {
                state.slots[self.index] = Slot::Abandoned { _file, _segment: segment };
            }
            _ => state.free.push(self.index),
        }
    }
}

impl Requests {
    fn start(requests: &Rc<RefCell<State>>, file: &Arc<File>, segment: Option<Segment>, entry: squeue::Entry) -> Under {
        let mut state = requests.borrow_mut();
        let slot = Slot::UnderWay { waker: None, _file: Arc::clone(file), segment };
        let index = match state.free.pop() {
            Some(index) => {
                state.slots[index] = slot;
                index
            }
            None => {
                state.slots.push(slot);
                state.slots.len() - 1
            }
        };
        state.waiting.push_back(entry.user_data(index as u64));
        if let Some(driver) = &state.driver {
            driver.wake_by_ref();
        }
        drop(state);
        Under { requests: Rc::clone(requests), index, taken: false }
    }

    /// Fills the segment from `offset` of the file.
    ///
    /// The result is an error of kind [`io::ErrorKind::UnexpectedEof`] if the file ends before.
    pub async fn read(&self, file: &Arc<File>, offset: u64, mut segment: Segment) -> (io::Result<()>, Segment) {
        let Some(requests) = &self.ring else {
            let file = Arc::clone(file);
            return self.on_thread(move || (file.read_exact_at(segment.as_mut_slice(), offset), segment)).await;
        };
        transfer(requests, file, offset, segment, |fd, ptr, len, at| opcode::Read::new(fd, ptr, len).offset(at).build())
            .await
    }

    /// Writes the segment at `offset` of the file; with `sync`, down to the storage.
    pub async fn write(
        &self,
        file: &Arc<File>,
        offset: u64,
        segment: Segment,
        sync: bool,
    ) -> (io::Result<()>, Segment) {
        let Some(requests) = &self.ring else {
            let file = Arc::clone(file);
            return self.on_thread(move || (write_all(&file, offset, segment.as_slice(), sync), segment)).await;
        };
        let flags = if sync { libc::RWF_DSYNC } else { 0 };
        let entry = move |fd, ptr: *mut u8, len, at| {
            opcode::Write::new(fd, ptr.cast_const(), len).offset(at).rw_flags(flags).build()
        };
        transfer(requests, file, offset, segment, entry).await
    }

    async fn plain(&self, file: &Arc<File>, call: Call) -> io::Result<()> {
        let Some(requests) = &self.ring else {
            let file = Arc::clone(file);
            return self.on_thread(move || call.perform(&file)).await;
        };
        loop {
            match Requests::start(requests, file, None, call.entry(file)).await.0 {
                e if e >= 0 => return Ok(()),
                e if matches!(-e, libc::EINTR | libc::EAGAIN) => {}
                e => return Err(io::Error::from_raw_os_error(-e)),
            }
        }
    }

    /// Makes everything written to the file durable, with what is needed to read it.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn sync(&self, file: &Arc<File>) -> io::Result<()> {
        self.plain(file, Call::Sync).await
    }

    /// Has a range read into the page cache (`posix_fadvise`, WILLNEED).
    ///
    /// # Errors
    /// The kernel's.
    pub async fn prefetch(&self, file: &Arc<File>, offset: u64, len: u64) -> io::Result<()> {
        self.plain(file, Call::Prefetch { offset, len }).await
    }

    /// `fallocate(2)`.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn allocate(&self, file: &Arc<File>, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        self.plain(file, Call::Allocate { mode, offset, len }).await
    }
}

/// A request without data.
#[derive(Clone, Copy)]
enum Call {
    Sync,
    Prefetch { offset: u64, len: u64 },
    Allocate { mode: i32, offset: u64, len: u64 },
}

impl Call {
    fn entry(self, file: &File) -> squeue::Entry {
        let fd = types::Fd(file.as_raw_fd());
        match self {
            Call::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Call::Prefetch { offset, len } => {
                opcode::Fadvise::new(fd, len as libc::off_t, libc::POSIX_FADV_WILLNEED).offset(offset).build()
            }
            Call::Allocate { mode, offset, len } => opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build(),
        }
    }

    fn perform(self, file: &File) -> io::Result<()> {
        match self {
            Call::Sync => rustix::fs::fdatasync(file),
            Call::Prefetch { offset, len } => {
                rustix::fs::fadvise(file, offset, NonZeroU64::new(len), rustix::fs::Advice::WillNeed)
            }
            Call::Allocate { mode, offset, len } => {
                let mode = rustix::fs::FallocateFlags::from_bits_retain(mode.cast_unsigned());
                rustix::fs::fallocate(file, mode, offset, len)
            }
        }?;
        Ok(())
    }
}

/// Writes all of it; with `sync`, down to the storage.
fn write_all(file: &File, mut offset: u64, mut data: &[u8], sync: bool) -> io::Result<()> {
    let flags = if sync { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
    while !data.is_empty() {
        match rustix::io::pwritev2(file, &[io::IoSlice::new(data)], offset, flags) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => (offset, data) = (offset + n as u64, &data[n..]),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

async fn transfer(
    requests: &Rc<RefCell<State>>,
    file: &Arc<File>,
    offset: u64,
    mut segment: Segment,
    entry: impl Fn(types::Fd, *mut u8, u32, u64) -> squeue::Entry,
) -> (io::Result<()>, Segment) {
    let mut done = 0;
    while done < segment.len() {
        let left = (segment.len() - done) as u32;
        let at = segment.as_ptr().wrapping_add(done);
        let entry = entry(types::Fd(file.as_raw_fd()), at, left, offset + done as u64);
        let (result, back) = Requests::start(requests, file, Some(segment), entry).await;
        segment = back.expect("the slot kept the segment");
        match result {
            0 => return (Err(io::ErrorKind::UnexpectedEof.into()), segment),
            n if n > 0 => done += n as usize,
            e if matches!(-e, libc::EINTR | libc::EAGAIN) => {}
            e => return (Err(io::Error::from_raw_os_error(-e)), segment),
        }
    }
    (Ok(()), segment)
}

impl Drop for State {
    /// Waits for what the kernel still has, whose memory would otherwise go from under it.
    fn drop(&mut self) {
        while self.under_way > 0 {
            if self.ring.submit_and_wait(1).is_err() {
                // The memory of what is in progress must not go.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
            while let Some(entry) = { self.ring.completion().next() } {
                self.under_way -= 1;
                self.complete(entry.user_data() as usize, entry.result());
            }
        }
    }
}
