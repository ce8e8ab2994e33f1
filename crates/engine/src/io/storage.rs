//! The storage stage: one thread, many requests in progress.
//!
//! Requests carry their memory and come back through their completion closure, which runs on a thread of the stage and must
//! only pass the outcome on.

use super::core::{Core, Ended, NewRing, Wait};
use super::request::{Outcome, Request};
use crate::limits::thread_error;
use crate::stage::{Counters, StageStats};
use crate::topology;
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

/// Requests in progress at once; more wait in the queue.
const DEPTH: usize = 128;
/// Threads where there is no ring.
const THREADS: usize = 16;

type Completion = Box<dyn FnOnce(Outcome) + Send>;

struct Queued {
    request: Request,
    completion: Completion,
    since: Instant,
}

/// Of a request that the ring has.
struct Owner {
    completion: Completion,
    started: Instant,
}

struct Shared {
    queue: Mutex<VecDeque<Queued>>,
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
    /// Where it has a ring: for what that is not asked for, once there is some.
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
        let ring = NewRing::new(DEPTH, Wait::InRing).inspect_err(super::without_io_uring).ok();
        Storage::with(ring, cpus)
    }

    fn with(ring: Option<NewRing>, cpus: &[u32]) -> io::Result<Storage> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
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
                let started = thread().spawn(move || {
                    topology::bind_thread(&cpus);
                    match Core::new(ring, DEPTH) {
                        Ok(core) => {
                            if shared.run(core) {
                                return;
                            }
                        }
                        Err(error) => super::without_io_uring(&error),
                    }
                    std::thread::scope(|scope| {
                        for _ in 0..THREADS {
                            // If no thread can be started, the others do all requests.
                            let _ = std::thread::Builder::new().spawn_scoped(scope, || shared.work());
                        }
                        shared.work();
                    });
                });
                storage.threads.push(started.map_err(|error| thread_error(&error))?);
            }
            None => {
                for _ in 0..THREADS {
                    let (shared, cpus) = (Arc::clone(&shared), cpus.to_vec());
                    let started = thread().stack_size(128 << 10).spawn(move || {
                        topology::bind_thread(&cpus);
                        shared.work();
                    });
                    storage.threads.push(started.map_err(|error| thread_error(&error))?);
                }
            }
        }
        Ok(storage)
    }

    /// Queues a request.
    pub fn submit(&self, request: Request, completion: impl FnOnce(Outcome) + Send + 'static) {
        if let Some(without) = self.without_ring.as_ref().filter(|_| !request.can_use_ring()) {
            return match without.get_or_init(|| Storage::with(None, &self.cpus).map(Box::new)) {
                Ok(storage) => storage.submit(request, completion),
                Err(error) => {
                    let result = Err(io::Error::new(error.kind(), error.to_string()));
                    completion(Outcome { result, buffers: request.buffers });
                }
            };
        }
        let queued = Queued { request, completion: Box::new(completion), since: Instant::now() };
        let mut queue = self.shared.lock();
        queue.push_back(queued);
        self.shared.counters.queued(queue.len());
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
        let mut stats = self.shared.counters.stats("storage");
        if let Some(Ok(without)) = self.without_ring.as_ref().and_then(OnceLock::get) {
            stats.add(&without.stats());
        }
        stats
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Queued>> {
        self.queue.lock().expect("no panics under the lock")
    }

    /// Does one request after the other, until there are none and will be none.
    fn work(&self) {
        loop {
            let before = Instant::now();
            let idle = |queue: &mut VecDeque<Queued>| queue.is_empty() && !self.stop.load(Ordering::SeqCst);
            let mut queue = self.ready.wait_while(self.lock(), idle).expect("no panics under the lock");
            let Some(Queued { request, completion, since }) = queue.pop_front() else { return };
            drop(queue);
            self.counters.waited(before);
            self.counters.started(since);
            let started = Instant::now();
            let outcome = request.perform(0);
            self.counters.served(started);
            completion(outcome);
        }
    }

    /// Does the requests by a ring, until storage is stopped and the queue is empty. False if the ring is broken before that.
    fn run(&self, mut core: Core<Owner>) -> bool {
        loop {
            if core.is_broken() && core.len() == 0 {
                return false;
            }
            while core.len() < DEPTH
                && let Some(Queued { request, completion, since }) = { self.lock().pop_front() }
            {
                self.counters.started(since);
                core.start(request, Owner { completion, started: Instant::now() });
            }
            let idle = core.len() == 0;
            let stop = self.stop.load(Ordering::SeqCst);
            if stop && idle && self.lock().is_empty() {
                return true;
            }
            if idle {
                core.sweep();
            }
            core.watch(&self.wake);
            self.sleeping.store(true, Ordering::SeqCst);
            let more = core.len() < DEPTH && !self.lock().is_empty();
            let before = Instant::now();
            let wait = !(more || stop && idle);
            core.submit(usize::from(wait));
            self.sleeping.store(false, Ordering::SeqCst);
            if idle {
                self.counters.waited(before);
            }
            let woken = core.collect(|Owner { completion, started }, ended| {
                self.counters.served(started);
                match ended {
                    Ended::Done(outcome) => completion(outcome),
                    // Rare enough that other requests may wait for it.
                    Ended::WouldWait(request, done) => completion(request.perform(done)),
                }
            });
            if woken {
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
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
        // Under the lock, so that no thread misses both the flag and the notification.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{OpenFile, Operation};
    use crate::pool::BlockPool;
    use crate::segment::Segment;
    use std::fs::File;
    use std::sync::mpsc;

    /// With a ring, and without.
    fn storages() -> [Storage; 2] {
        [Storage::new().unwrap(), Storage::with(None, &[]).unwrap()]
    }

    #[test]
    fn many_writes_and_reads_come_back_with_their_memory_and_data() {
        storages().into_iter().for_each(write_and_read);
    }

    fn write_and_read(storage: Storage) {
        let pool = BlockPool::new(300, 8192).unwrap();
        let file = Arc::new(OpenFile::new(tempfile::tempfile().unwrap()));
        let (tx, rx) = mpsc::channel();
        for i in 0..300u32 {
            let mut segment = Segment::new(pool.try_take().unwrap(), 4096);
            segment.as_mut_slice().fill(i as u8);
            let tx = tx.clone();
            let request = Request::write(Arc::clone(&file), u64::from(i) * 4096, segment);
            storage.submit(request, move |outcome| {
                assert_eq!(outcome.result.unwrap(), 4096);
                tx.send(outcome.buffers).unwrap();
            });
        }
        drop(rx.iter().take(300).collect::<Vec<_>>());
        assert_eq!(pool.in_use(), 0);
        for i in 0..300u32 {
            let segment = Segment::new(pool.try_take().unwrap(), 8192);
            let tx = tx.clone();
            storage.submit(Request::read(Arc::clone(&file), u64::from(i) * 4096, segment), move |outcome| {
                // The last one is cut short by the end of the file.
                assert_eq!(outcome.result.unwrap(), if i == 299 { 4096 } else { 8192 });
                assert!(outcome.buffers[0].as_slice()[..4096].iter().all(|b| *b == i as u8));
                tx.send(outcome.buffers).unwrap();
            });
        }
        drop(rx.iter().take(300).collect::<Vec<_>>());
        let stats = storage.stats();
        assert_eq!(stats.tasks, 600);
    }

    #[test]
    fn a_list_of_segments_is_one_range_of_the_file() {
        for storage in storages() {
            let pool = BlockPool::new(60, 4096).unwrap();
            let file = Arc::new(OpenFile::new(tempfile::tempfile().unwrap()));
            let (tx, rx) = mpsc::channel();
            let pool = &pool;
            let segments = |value: fn(usize) -> u8| {
                (0..20).map(move |i| {
                    let mut segment = Segment::new(pool.try_take().unwrap(), 100 + i);
                    segment.as_mut_slice().fill(value(i));
                    segment
                })
            };
            let done = |request: Request| {
                let tx = tx.clone();
                storage.submit(request, move |outcome| tx.send(outcome).unwrap());
                rx.recv().unwrap()
            };
            let len: usize = (0..20).map(|i| 100 + i).sum();
            let operation = Operation::Write { durable: true };
            let buffers = segments(|i| i as u8 + 1).collect();
            let outcome = done(Request { file: Arc::clone(&file), offset: 50, operation, buffers });
            assert_eq!(outcome.result.unwrap(), len);
            let buffers = segments(|_| 0).collect();
            let read = Request { file: Arc::clone(&file), offset: 50, operation: Operation::Read, buffers };
            let outcome = done(read);
            assert_eq!(outcome.result.unwrap(), len);
            let as_written = |(i, segment): (usize, &Segment)| segment.as_slice().iter().all(|b| *b == i as u8 + 1);
            assert!(outcome.buffers.iter().enumerate().all(as_written));
            // From the middle of a segment to the end of the file.
            let buffers = segments(|_| 0).collect();
            let offset = 50 + 100 + 50;
            let outcome = done(Request { file, offset, operation: Operation::Read, buffers });
            assert_eq!(outcome.result.unwrap(), len - 150);
        }
    }

    #[test]
    fn a_failed_request_returns_its_memory_and_the_cause() {
        storages().into_iter().for_each(fail);
    }

    fn fail(storage: Storage) {
        let pool = BlockPool::new(1, 4096).unwrap();
        let read_only = Arc::new(OpenFile::new(File::open("/proc/self/exe").unwrap()));
        let (tx, rx) = mpsc::channel();
        let segment = Segment::new(pool.try_take().unwrap(), 1);
        storage.submit(Request::write(read_only, 0, segment), move |outcome| {
            tx.send(outcome.result.unwrap_err().raw_os_error()).unwrap();
        });
        assert_eq!(rx.recv().unwrap(), Some(libc::EBADF));
        drop(storage);
        assert_eq!(pool.in_use(), 0);
    }
}
