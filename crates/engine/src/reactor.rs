//! Reactors: event loops, one per core, for services with many connections and small requests.
//!
//! A reactor is a thread with a single-threaded runtime and an io_uring of its own ([`io::ring`](crate::io::ring)). What is
//! started on it stays on it, so its tasks share state without locks; reactors share nothing. There is no
//! central thread: the thread that accepts a connection gives it to the reactor with the fewest.

use crate::io::Ring;
use crate::topology::{self, Node};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

/// Threads of a reactor that wait in system calls, where io_uring cannot.
const BLOCKING_MAX: usize = 128;

type Start = Box<dyn FnOnce() + Send>;

/// A set of reactors.
pub struct Reactors {
    reactors: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
}

/// A reactor, seen from other threads.
#[derive(Clone)]
pub struct Handle {
    start: UnboundedSender<Start>,
    load: Arc<AtomicUsize>,
    node: u32,
}

/// Finds the reactor for new work.
pub struct LoadBalancer(Vec<WeakHandle>);

/// As a handle, but does not keep its reactor running.
struct WeakHandle {
    start: WeakUnboundedSender<Start>,
    load: Arc<AtomicUsize>,
    node: u32,
}

impl LoadBalancer {
    /// The reactor with the least load; `None` when they have been told to stop.
    pub fn least_loaded(&self) -> Option<Handle> {
        WeakHandle::least_loaded(self.0.iter())
    }

    /// The reactor of a memory node with the least load.
    pub fn on_node(&self, node: u32) -> Option<Handle> {
        WeakHandle::least_loaded(self.0.iter().filter(|reactor| reactor.node == node))
    }
}

impl WeakHandle {
    fn least_loaded<'a>(some: impl Iterator<Item = &'a WeakHandle>) -> Option<Handle> {
        let found = some.min_by_key(|reactor| reactor.load.load(Ordering::Relaxed))?;
        Some(Handle { start: found.start.upgrade()?, load: Arc::clone(&found.load), node: found.node })
    }
}

thread_local! {
    static NODE: std::cell::Cell<Option<u32>> = const { std::cell::Cell::new(None) };
    static OWN_LOAD: std::cell::RefCell<Option<Arc<AtomicUsize>>> = const { std::cell::RefCell::new(None) };
}

/// Whether the reactor that runs this task has a load of one. Then the task may spin: no other needs the thread.
pub fn is_alone() -> bool {
    OWN_LOAD.with_borrow(|load| load.as_ref().is_some_and(|load| load.load(Ordering::Relaxed) == 1))
}

/// The memory node of the reactor that runs this task; `None` outside reactors.
pub fn node() -> Option<u32> {
    NODE.get()
}

/// Counts as load of its reactor while it lives.
pub struct Load(Arc<AtomicUsize>);

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Handle {
    /// Runs `make` on the reactor's thread and then, as a task, the future that it returns.
    pub fn spawn<F: Future<Output = ()> + 'static>(&self, make: impl FnOnce() -> F + Send + 'static) {
        let start = move || drop(tokio::task::spawn_local(make()));
        // A reactor that has stopped starts nothing any more.
        let _ = self.start.send(Box::new(start));
    }

    /// Adds to the reactor's load.
    pub fn load(&self) -> Load {
        self.load.fetch_add(1, Ordering::Relaxed);
        Load(Arc::clone(&self.load))
    }

    /// The memory node of the reactor's core.
    pub fn node(&self) -> u32 {
        self.node
    }
}

impl Reactors {
    /// Starts one reactor for each core that this process may use, `count` in all if given.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(count: Option<usize>) -> io::Result<Reactors> {
        Reactors::over(&topology::usable_nodes(), count)
    }

    /// As [`Reactors::start`], on the cores of these nodes; threads are bound if there are several.
    ///
    /// # Errors
    /// As [`Reactors::start`].
    pub fn over(nodes: &[Node], count: Option<usize>) -> io::Result<Reactors> {
        let cores: Vec<(u32, u32)> = interleave(nodes);
        let mut set = Reactors { reactors: Vec::new(), threads: Vec::new() };
        for index in 0..count.unwrap_or(cores.len()).max(1) {
            let (node, cpu) = cores[index % cores.len()];
            set.add(index, node, (nodes.len() > 1).then_some(cpu))?;
        }
        Ok(set)
    }

    /// The memory nodes that there are reactors on.
    pub fn nodes(&self) -> Vec<u32> {
        let mut nodes: Vec<u32> = self.reactors.iter().map(Handle::node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    fn add(&mut self, index: usize, node: u32, cpu: Option<u32>) -> io::Result<()> {
        self.add_with(Ring::build(), index, node, cpu)
    }

    fn add_with(&mut self, ring: Ring, index: usize, node: u32, cpu: Option<u32>) -> io::Result<()> {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_io().enable_time().max_blocking_threads(BLOCKING_MAX).build()?;
        let (start, started) = unbounded_channel();
        let load: Arc<AtomicUsize> = Arc::default();
        let own = Arc::clone(&load);
        let thread = std::thread::Builder::new().name(format!("reactor {index}")).spawn(move || {
            topology::bind_thread(cpu.as_slice());
            NODE.set(Some(node));
            OWN_LOAD.set(Some(own));
            LocalSet::new().block_on(&runtime, run(ring, started));
        });
        self.threads.push(thread.map_err(|error| crate::limits::thread_error(&error))?);
        self.reactors.push(Handle { start, load, node });
        Ok(())
    }

    /// The reactors.
    pub fn handles(&self) -> &[Handle] {
        &self.reactors
    }

    /// Finds reactors for new work, also after these have been dropped.
    pub fn load_balancer(&self) -> LoadBalancer {
        let weak = |r: &Handle| WeakHandle { start: r.start.downgrade(), load: Arc::clone(&r.load), node: r.node };
        LoadBalancer(self.reactors.iter().map(weak).collect())
    }
}

impl Drop for Reactors {
    /// Ends every task at its next point of waiting, and the threads.
    fn drop(&mut self) {
        self.reactors.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Runs a task as far as it goes without waiting, and the rest of it on its own. Most requests of a service have no
/// rest, and cost no task. A panic of the task ends the task, not its caller.
pub fn start(task: impl Future<Output = ()> + 'static) {
    let mut task = Box::pin(task);
    // Whatever it waits for learns of the task that it becomes when that polls it for the first time.
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let begun = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task.as_mut().poll(&mut cx)));
    if begun.is_ok_and(|poll| poll.is_pending()) {
        tokio::task::spawn_local(task);
    }
}

/// Cores, one of each node in turn.
fn interleave(nodes: &[Node]) -> Vec<(u32, u32)> {
    let longest = nodes.iter().map(|n| n.cpus.len()).max().unwrap_or(0);
    let at = |i: usize| nodes.iter().filter_map(move |n| n.cpus.get(i).map(|cpu| (n.number, *cpu)));
    (0..longest).flat_map(at).collect()
}

async fn run(ring: Ring, mut started: UnboundedReceiver<Start>) {
    let driver = ring.install();
    let driver = tokio::task::spawn_local(driver);
    while let Some(start) = started.recv().await {
        start();
    }
    driver.abort();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{OpenFile, ring};
    use crate::segment::Segments;
    use rustix::fs::FallocateFlags;
    use std::fs::File;
    use std::sync::mpsc;

    /// With rings, and without.
    fn sets() -> [Reactors; 2] {
        let mut without = Reactors { reactors: Vec::new(), threads: Vec::new() };
        for index in 0..2 {
            without.add_with(Ring::by_threads(), index, 0, None).unwrap();
        }
        [Reactors::start(Some(2)).unwrap(), without]
    }

    #[test]
    fn reads_and_writes_complete_wherever_they_were_started() {
        sets().into_iter().for_each(read_and_write);
    }

    fn read_and_write(reactors: Reactors) {
        let file = Arc::new(OpenFile::new(tempfile::tempfile().unwrap()));
        let (tx, rx) = mpsc::channel();
        for (i, reactor) in reactors.handles().iter().enumerate() {
            let (file, tx) = (Arc::clone(&file), tx.clone());
            reactor.spawn(move || async move {
                tx.send(round_trip(file, i as u64 * 8192, i as u8 + 1).await).unwrap();
            });
        }
        for _ in 0..2 {
            rx.recv().unwrap().unwrap();
        }
    }

    async fn round_trip(file: Arc<OpenFile>, at: u64, value: u8) -> io::Result<()> {
        let supply = Segments::new(1, 8192).unwrap();
        let mut segment = supply.reserve(1).await.segment(8192);
        segment.as_mut_slice().fill(value);
        let (result, segment) = ring().write(&file, at, segment, false).await;
        result?;
        let (result, mut segment) = ring().write(&file, at, segment, true).await;
        result?;
        ring().sync(&file).await?;
        ring().prefetch(&file, at, 8192).await?;
        ring().allocate(&file, FallocateFlags::KEEP_SIZE, at, 8192).await?;
        let read_only = Arc::new(OpenFile::new(File::open("/proc/self/exe").unwrap()));
        assert!(ring().allocate(&read_only, FallocateFlags::empty(), 0, 1).await.is_err());
        segment.as_mut_slice().fill(0);
        let (result, segment) = ring().read(&file, at, segment).await;
        result?;
        assert!(segment.as_slice().iter().all(|byte| *byte == value));
        Ok(())
    }

    #[test]
    fn a_read_past_the_end_says_so() {
        for reactors in sets() {
            let file = Arc::new(OpenFile::new(tempfile::tempfile().unwrap()));
            let (tx, rx) = mpsc::channel();
            reactors.handles()[0].spawn(move || async move {
                let segment = Segments::new(1, 4096).unwrap().reserve(1).await.segment(4096);
                tx.send(ring().read(&file, 0, segment).await.0).unwrap();
            });
            assert_eq!(rx.recv().unwrap().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn a_write_whose_task_is_gone_is_done_all_the_same() {
        for reactors in sets() {
            let file = Arc::new(OpenFile::new(tempfile::tempfile().unwrap()));
            let (tx, rx) = mpsc::channel();
            reactors.handles()[0].spawn(move || async move {
                let supply = Segments::new(1, 4096).unwrap();
                let mut segment = supply.reserve(1).await.segment(4096);
                segment.as_mut_slice().fill(7);
                let requests = ring();
                let mut write = Box::pin(requests.write(&file, 0, segment, true));
                assert!(futures_util::poll!(&mut write).is_pending());
                drop(write);
                // It has its memory until it is over.
                let segment = supply.reserve(1).await.segment(4096);
                tx.send(ring().read(&file, 0, segment).await).unwrap();
            });
            let (result, segment) = rx.recv().unwrap();
            result.unwrap();
            assert!(segment.as_slice().iter().all(|byte| *byte == 7));
        }
    }

    #[test]
    fn cores_of_all_nodes_take_turns() {
        let node = |number, cpus: &[u32]| Node { number, cpus: cpus.to_vec() };
        let cores = interleave(&[node(0, &[0, 1, 2]), node(1, &[3])]);
        assert_eq!(cores, [(0, 0), (1, 3), (0, 1), (0, 2)]);
    }
}
