//! The storage stage: one thread, many requests in progress, io_uring underneath. Where that is forbidden (containers,
//! hardened systems), as many threads as are worth while, and a system call for each request.
//!
//! Requests carry blocks by ownership and come back through their completion closure, which runs
//! on the storage thread and must only pass the result on. Files may be open for direct I/O or
//! not; offsets and lengths are then the caller's to align.

use crate::file_system;
use crate::pool::{Block, BlockPool};
use crate::stage::StageStats;
use crate::topology;
use io_uring::{IoUring, opcode, types};
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Requests in progress at once; more wait in the queue.
const DEPTH: u32 = 128;
/// Threads where there is no io_uring.
const THREADS: usize = 16;
/// Pools whose memory can be registered with the ring at once; the others do without.
const FIXED_MAX: u32 = 64;

/// What to do with a block and a file.
pub enum StorageOp {
    /// Fill the first `len` bytes of the payload from `offset`; short only at the end of the file.
    Read {
        /// Bytes wanted.
        len: u32,
        /// The file is open for direct I/O.
        direct: bool,
    },
    /// Write `len` bytes of the payload from byte `skip` on.
    Write {
        /// First byte.
        skip: u32,
        /// Bytes.
        len: u32,
        /// The file is open for direct I/O.
        direct: bool,
    },
}

/// How a request ended: the block, and the bytes transferred.
pub struct Done {
    /// The block, back again.
    pub block: Block,
    /// Bytes read (fewer than asked only at the end of the file) or written (always all).
    pub result: io::Result<u32>,
}

type Completion = Box<dyn FnOnce(Done) + Send>;

struct Request {
    file: Arc<File>,
    offset: u64,
    op: StorageOp,
    block: Block,
    completion: Completion,
    queued: Instant,
    started: Instant,
    /// Bytes transferred so far: the kernel may stop short.
    progress: u32,
}

#[derive(Default)]
struct Counters {
    tasks: AtomicU64,
    queue_ns: AtomicU64,
    service_ns: AtomicU64,
    wait_ns: AtomicU64,
    longest: AtomicU64,
}

struct Shared {
    queue: Mutex<VecDeque<Request>>,
    wake: OwnedFd,
    /// Rung for threads that work without a ring.
    ready: Condvar,
    sleeping: AtomicBool,
    stop: AtomicBool,
    counters: Counters,
}

/// The storage stage of a process.
pub struct Storage {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Where it has a ring: for files with which that is not to be trusted, once there are some.
    without_ring: Option<OnceLock<io::Result<Box<Storage>>>>,
    cpus: Vec<u32>,
}

impl Storage {
    /// Starts the stage.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new() -> io::Result<Storage> {
        Storage::near(&[])
    }

    /// As [`Storage::new`], on these cores; on any if there are none.
    ///
    /// # Errors
    /// As [`Storage::new`].
    pub fn near(cpus: &[u32]) -> io::Result<Storage> {
        let ring = match IoUring::builder().build(DEPTH) {
            Ok(ring) => Some(ring),
            Err(error) => {
                crate::without_io_uring(&error);
                None
            }
        };
        Storage::with(ring, cpus)
    }

    fn with(ring: Option<IoUring>, cpus: &[u32]) -> io::Result<Storage> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let shared = Arc::new(Shared {
            queue: Mutex::new(VecDeque::new()),
            wake,
            ready: Condvar::new(),
            sleeping: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            counters: Counters::default(),
        });
        let without_ring = ring.is_some().then(OnceLock::new);
        let mut storage =
            Storage { shared: Arc::clone(&shared), threads: Vec::new(), without_ring, cpus: cpus.to_vec() };
        let thread = || std::thread::Builder::new().name("storage".into());
        match ring {
            Some(ring) => {
                let cpus = cpus.to_vec();
                let fixed = FixedBuffers::new(&ring);
                storage.threads.push(thread().spawn(move || {
                    topology::bind_thread(&cpus);
                    Loop { ring, shared, slots: Vec::new(), free: Vec::new(), under_way: 0, fixed }.run();
                })?);
            }
            None => {
                for _ in 0..THREADS {
                    let (shared, cpus) = (Arc::clone(&shared), cpus.to_vec());
                    storage.threads.push(thread().stack_size(128 << 10).spawn(move || {
                        topology::bind_thread(&cpus);
                        shared.work();
                    })?);
                }
            }
        }
        Ok(storage)
    }

    /// Queues a request.
    pub fn submit(
        &self,
        file: Arc<File>,
        offset: u64,
        op: StorageOp,
        block: Block,
        completion: impl FnOnce(Done) + Send + 'static,
    ) {
        if let Some(without) = self.without_ring.as_ref().filter(|_| !file_system::uring_is_sound(&file)) {
            return match without.get_or_init(|| Storage::with(None, &self.cpus).map(Box::new)) {
                Ok(storage) => storage.submit(file, offset, op, block, completion),
                Err(error) => completion(Done { block, result: Err(io::Error::new(error.kind(), error.to_string())) }),
            };
        }
        let now = Instant::now();
        let completion = Box::new(completion);
        let request = Request { file, offset, op, block, completion, queued: now, started: now, progress: 0 };
        let mut queue = self.shared.queue.lock().expect("no panics under the lock");
        queue.push_back(request);
        self.shared.counters.longest.fetch_max(queue.len() as u64, Ordering::Relaxed);
        drop(queue);
        self.shared.wake();
    }

    /// Lets go of the registered memory of pools that are gone.
    pub fn sweep(&self) {
        self.shared.sleeping.store(true, Ordering::SeqCst);
        self.shared.wake();
    }

    /// What the stage has done so far.
    pub fn stats(&self) -> StageStats {
        let c = &self.shared.counters;
        let of = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        let mut stats = StageStats {
            name: "storage".into(),
            workers: None,
            tasks: c.tasks.load(Ordering::Relaxed),
            queue_delay: of(&c.queue_ns),
            wait: of(&c.wait_ns),
            service: of(&c.service_ns),
            longest_queue: c.longest.load(Ordering::Relaxed),
        };
        if let Some(Ok(without)) = self.without_ring.as_ref().and_then(OnceLock::get) {
            let more = without.stats();
            stats.tasks += more.tasks;
            stats.queue_delay += more.queue_delay;
            stats.wait += more.wait;
            stats.service += more.service;
            stats.longest_queue = stats.longest_queue.max(more.longest_queue);
        }
        stats
    }
}

impl Shared {
    /// Does one request after the other, until there are none and will be none.
    fn work(&self) {
        loop {
            let before = Instant::now();
            let queue = self.queue.lock().expect("no panics under the lock");
            let idle = |queue: &mut VecDeque<Request>| queue.is_empty() && !self.stop.load(Ordering::SeqCst);
            let mut queue = self.ready.wait_while(queue, idle).expect("no panics under the lock");
            let Some(mut request) = queue.pop_front() else { return };
            drop(queue);
            add(&self.counters.wait_ns, before);
            add(&self.counters.queue_ns, request.queued);
            let started = Instant::now();
            let result = request.perform();
            add(&self.counters.service_ns, started);
            self.counters.tasks.fetch_add(1, Ordering::Relaxed);
            (request.completion)(Done { block: request.block, result });
        }
    }

    fn wake(&self) {
        self.ready.notify_one();
        if self.sleeping.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.sleeping.store(true, Ordering::SeqCst);
        // Under the lock: whoever looks at it now sees it, or is rung for.
        drop(self.shared.queue.lock());
        self.shared.ready.notify_all();
        self.shared.wake();
        for thread in self.threads.drain(..) {
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Request {
    /// Does it by system calls.
    fn perform(&mut self) -> io::Result<u32> {
        match self.op {
            StorageOp::Read { len, .. } => {
                let buffer = &mut self.block.payload_mut()[..len as usize];
                let mut done = 0;
                while done < buffer.len() {
                    match self.file.read_at(&mut buffer[done..], self.offset + done as u64) {
                        Ok(0) => break,
                        Ok(n) => done += n,
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                        Err(e) => return Err(e),
                    }
                }
                Ok(done as u32)
            }
            StorageOp::Write { skip, len, .. } => {
                let data = &self.block.payload()[skip as usize..(skip + len) as usize];
                self.file.write_all_at(data, self.offset).map(|()| len)
            }
        }
    }
}

/// Marks the eventfd read among completions.
const WAKE: u64 = u64::MAX;

struct Loop {
    ring: IoUring,
    shared: Arc<Shared>,
    slots: Vec<Option<Request>>,
    free: Vec<usize>,
    under_way: usize,
    fixed: FixedBuffers,
}

/// The memory of pools, registered with the ring so that direct I/O need not pin its pages for each
/// request. Registering pins all of a pool, so only pools that do direct I/O are, when they first
/// do; and where it is refused (`RLIMIT_MEMLOCK`), requests go without.
struct FixedBuffers {
    slots: Vec<Slot>,
}

enum Slot {
    Empty,
    Registered(Weak<BlockPool>),
    /// The kernel refused this pool.
    Refused(Weak<BlockPool>),
}

impl FixedBuffers {
    fn new(ring: &IoUring) -> FixedBuffers {
        let available = ring.submitter().register_buffers_sparse(FIXED_MAX).is_ok();
        FixedBuffers { slots: (0..if available { FIXED_MAX } else { 0 }).map(|_| Slot::Empty).collect() }
    }

    /// The index under which a pool's memory is registered.
    fn index_of(&mut self, ring: &IoUring, pool: &Arc<BlockPool>) -> Option<u16> {
        let is = |weak: &Weak<BlockPool>| std::ptr::eq(weak.as_ptr(), Arc::as_ptr(pool));
        for (index, slot) in self.slots.iter().enumerate() {
            match slot {
                Slot::Registered(known) if is(known) => return Some(index as u16),
                Slot::Refused(known) if is(known) => return None,
                _ => {}
            }
        }
        self.sweep(ring);
        let index = self.slots.iter().position(|s| matches!(s, Slot::Empty))?;
        let buffer = pool.buffer();
        let iov = libc::iovec { iov_base: buffer.as_ptr().cast(), iov_len: buffer.len() };
        let registered = update(ring, index, iov);
        let known = Arc::downgrade(pool);
        self.slots[index] = if registered { Slot::Registered(known) } else { Slot::Refused(known) };
        registered.then_some(index as u16)
    }

    /// Unregisters the memory of pools that are gone.
    fn sweep(&mut self, ring: &IoUring) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            match slot {
                Slot::Registered(known) if known.strong_count() == 0 => {
                    update(ring, index, libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });
                    *slot = Slot::Empty;
                }
                Slot::Refused(known) if known.strong_count() == 0 => *slot = Slot::Empty,
                _ => {}
            }
        }
    }
}

fn update(ring: &IoUring, index: usize, iov: libc::iovec) -> bool {
    // SAFETY: the kernel pins the pages for itself, so that the mapping may go at any time; only
    // requests that hold a block of the pool use the slot.
    unsafe { ring.submitter().register_buffers_update(index as u32, &[iov], None) }.is_ok()
}

impl Loop {
    fn run(mut self) {
        let mut wake_buffer = Box::new(0u64);
        let mut wake_pending = false;
        loop {
            self.start_queued();
            let stop = self.shared.stop.load(Ordering::SeqCst);
            if stop && self.under_way == 0 && self.shared.queue.lock().expect("no panics under the lock").is_empty() {
                return;
            }
            if !wake_pending {
                let fd = types::Fd(self.shared.wake.as_raw_fd());
                let read = opcode::Read::new(fd, (&raw mut *wake_buffer).cast(), 8).build().user_data(WAKE);
                // SAFETY: `wake_buffer` outlives the ring, which `self` owns and drops first on return.
                let pushed = unsafe { self.ring.submission().push(&read) };
                wake_pending = pushed.is_ok();
            }
            if self.under_way == 0 {
                self.fixed.sweep(&self.ring);
            }
            self.shared.sleeping.store(true, Ordering::SeqCst);
            let more = !self.shared.queue.lock().expect("no panics under the lock").is_empty();
            let room = self.under_way < DEPTH as usize - 1;
            let before = Instant::now();
            let idle = self.under_way == 0;
            let want = usize::from(!((more && room) || stop && idle));
            let submitted = self.ring.submit_and_wait(want);
            self.shared.sleeping.store(false, Ordering::SeqCst);
            if idle {
                add(&self.shared.counters.wait_ns, before);
            }
            if let Err(e) = submitted
                && !matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN))
            {
                // Nothing can be completed any more; the requests fail when they are dropped.
                tracing::error!(error = %e, "io_uring failed; the storage stage has stopped");
                self.fail_all(&e);
                return;
            }
            let completed: Vec<(u64, i32)> = self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
            for (id, result) in completed {
                if id == WAKE {
                    wake_pending = false;
                } else {
                    self.complete(id as usize, result);
                }
            }
        }
    }

    fn start_queued(&mut self) {
        while self.under_way < DEPTH as usize - 1 {
            let next = self.shared.queue.lock().expect("no panics under the lock").pop_front();
            let Some(mut request) = next else { return };
            add(&self.shared.counters.queue_ns, request.queued);
            request.started = Instant::now();
            let slot = self.free.pop().unwrap_or_else(|| {
                self.slots.push(None);
                self.slots.len() - 1
            });
            self.under_way += 1;
            self.slots[slot] = Some(request);
            self.start(slot);
        }
    }

    fn start(&mut self, slot: usize) {
        let request = self.slots[slot].as_ref().expect("started requests hold their slot");
        let fd = types::Fd(request.file.as_raw_fd());
        let done = request.progress;
        let offset = request.offset + u64::from(done);
        let (StorageOp::Read { direct, .. } | StorageOp::Write { direct, .. }) = request.op;
        let fixed = if direct { self.fixed.index_of(&self.ring, request.block.pool()) } else { None };
        let at = |skip: u32| request.block.payload_ptr().wrapping_add(skip as usize);
        let entry = match (&request.op, fixed) {
            (StorageOp::Read { len, .. }, None) => opcode::Read::new(fd, at(done), len - done).offset(offset).build(),
            (StorageOp::Read { len, .. }, Some(index)) => {
                opcode::ReadFixed::new(fd, at(done), len - done, index).offset(offset).build()
            }
            (StorageOp::Write { skip, len, .. }, None) => {
                opcode::Write::new(fd, at(skip + done), len - done).offset(offset).build()
            }
            (StorageOp::Write { skip, len, .. }, Some(index)) => {
                opcode::WriteFixed::new(fd, at(skip + done), len - done, index).offset(offset).build()
            }
        };
        let entry = entry.user_data(slot as u64);
        loop {
            // SAFETY: the block and the file live in the slot until the completion arrives.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            let _ = self.ring.submit();
        }
    }

    fn complete(&mut self, slot: usize, result: i32) {
        let request = self.slots[slot].as_mut().expect("started requests hold their slot");
        let wanted = match request.op {
            StorageOp::Read { len, .. } | StorageOp::Write { len, .. } => len,
        };
        let outcome = if result < 0 {
            match -result {
                libc::EINTR | libc::EAGAIN => return self.start(slot),
                code => Err(io::Error::from_raw_os_error(code)),
            }
        } else {
            request.progress += result as u32;
            if result > 0 && request.progress < wanted {
                return self.start(slot);
            }
            match request.op {
                StorageOp::Write { .. } if request.progress < wanted => Err(io::ErrorKind::WriteZero.into()),
                _ => Ok(request.progress),
            }
        };
        self.finish(slot, outcome);
    }

    fn finish(&mut self, slot: usize, result: io::Result<u32>) {
        let Request { block, completion, started, .. } = self.slots[slot].take().expect("finished once");
        self.free.push(slot);
        self.under_way -= 1;
        add(&self.shared.counters.service_ns, started);
        self.shared.counters.tasks.fetch_add(1, Ordering::Relaxed);
        completion(Done { block, result });
    }

    fn fail_all(&mut self, error: &io::Error) {
        let copy = || io::Error::new(error.kind(), error.to_string());
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_some() {
                self.finish(slot, Err(copy()));
            }
        }
        loop {
            let next = self.shared.queue.lock().expect("no panics under the lock").pop_front();
            let Some(request) = next else { return };
            (request.completion)(Done { block: request.block, result: Err(copy()) });
        }
    }
}

fn add(counter: &AtomicU64, since: Instant) {
    counter.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// With a ring, and without.
    fn storages() -> [Storage; 2] {
        [Storage::new().unwrap(), Storage::with(None, &[]).unwrap()]
    }

    #[test]
    fn many_writes_and_reads_come_back_with_their_blocks_and_data() {
        storages().into_iter().for_each(write_and_read);
    }

    fn write_and_read(storage: Storage) {
        let pool = BlockPool::new(300, 8192).unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap());
        let (tx, rx) = mpsc::channel();
        for i in 0..300u32 {
            let mut block = pool.try_take().unwrap();
            block.payload_mut().fill(i as u8);
            let tx = tx.clone();
            let op = StorageOp::Write { skip: 4096, len: 4096, direct: i % 2 == 0 };
            storage.submit(Arc::clone(&file), u64::from(i) * 4096, op, block, move |done| {
                assert_eq!(done.result.unwrap(), 4096);
                tx.send(done.block).unwrap();
            });
        }
        drop(rx.iter().take(300).collect::<Vec<_>>());
        assert_eq!(pool.in_use(), 0);
        for i in 0..300u32 {
            let block = pool.try_take().unwrap();
            let tx = tx.clone();
            let op = StorageOp::Read { len: 8192, direct: i % 3 == 0 };
            storage.submit(Arc::clone(&file), u64::from(i) * 4096, op, block, move |done| {
                // The last one is cut short by the end of the file.
                assert_eq!(done.result.unwrap(), if i == 299 { 4096 } else { 8192 });
                assert!(done.block.payload()[..4096].iter().all(|b| *b == i as u8));
                tx.send(done.block).unwrap();
            });
        }
        drop(rx.iter().take(300).collect::<Vec<_>>());
        let stats = storage.stats();
        assert_eq!(stats.tasks, 600);
    }

    #[test]
    fn a_failed_request_returns_its_block_and_the_cause() {
        storages().into_iter().for_each(fail);
    }

    fn fail(storage: Storage) {
        let pool = BlockPool::new(1, 4096).unwrap();
        let read_only = Arc::new(File::open("/proc/self/exe").unwrap());
        let (tx, rx) = mpsc::channel();
        let block = pool.try_take().unwrap();
        storage.submit(read_only, 0, StorageOp::Write { skip: 0, len: 1, direct: true }, block, move |done| {
            tx.send(done.result.unwrap_err().raw_os_error()).unwrap();
        });
        assert_eq!(rx.recv().unwrap(), Some(libc::EBADF));
        drop(storage);
        assert_eq!(pool.in_use(), 0);
    }
}
