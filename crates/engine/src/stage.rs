//! Stages of parallel workers, and the monitor that moves workers between them.
//!
//! A stage is an explicit queue of tasks. Owners of tasks take turns in it, so that many tasks of one delay the next task of
//! another by one task each time. Threads are made once; each is *assigned* to a stage, serves that first, and helps any other
//! while its own is empty. Stages with tasks that have waited for [`OVERDUE`] take turns. Every task is stamped when
//! it is queued, started and finished; from these the monitor, one for all stages, computes queue
//! delay, waiting and service time, and moves a worker from the stage with the most slack to the
//! one with the longest delay (Ren 2015, ch. 3).
//!
//! A task must not wait for a peer, and should end after [`TASK_TIME`]: longer work submits its rest as a new task.

use crate::topology;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A stage's number among its workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StageId(usize);

/// Owner of a task. Owners take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Owner(pub u64);

/// Length of a task. Longer work submits its rest as a new task.
pub const TASK_TIME: Duration = Duration::from_millis(5);

/// Waiting time of a task from which the next free worker of any stage serves it.
pub const OVERDUE: Duration = Duration::from_millis(20);

type Task = Box<dyn FnOnce() + Send>;

struct Queued {
    task: Task,
    since: Instant,
}

/// The queue of a stage.
#[derive(Default)]
struct Queue {
    /// Tasks of each owner that has any.
    owners: HashMap<Owner, VecDeque<Queued>>,
    /// Owners with tasks, the next one first.
    turns: VecDeque<Owner>,
    len: usize,
}

impl Queue {
    fn push(&mut self, owner: Owner, task: Queued) {
        let tasks = self.owners.entry(owner).or_default();
        if tasks.is_empty() {
            self.turns.push_back(owner);
        }
        tasks.push_back(task);
        self.len += 1;
    }

    /// Queueing time of the next task.
    fn next_since(&self) -> Option<Instant> {
        let next = self.owners.get(self.turns.front()?)?;
        next.front().map(|task| task.since)
    }

    fn pop(&mut self) -> Option<Queued> {
        let owner = self.turns.pop_front()?;
        let tasks = self.owners.get_mut(&owner)?;
        let task = tasks.pop_front()?;
        if tasks.is_empty() {
            self.owners.remove(&owner);
        } else {
            self.turns.push_back(owner);
        }
        self.len -= 1;
        Some(task)
    }
}

/// Chooses a stage for a free worker: the first one behind `last` with an overdue task, otherwise the first from `home` on with a
/// task. The age of overdue tasks does not count: one owner with a long queue in a stage would keep others from another stage.
fn choose(queues: &[Queue], home: usize, last: usize, now: Instant) -> Option<usize> {
    let stages = queues.len();
    let is_overdue = |queue: &Queue| queue.next_since().is_some_and(|since| now.duration_since(since) >= OVERDUE);
    let overdue = (1..=stages).map(|i| (last + i) % stages).find(|stage| is_overdue(&queues[*stage]));
    overdue.or_else(|| (0..stages).map(|i| (home + i) % stages).find(|stage| queues[*stage].len > 0))
}

/// What a stage has done so far, counted by its threads.
#[derive(Default)]
pub(crate) struct Counters {
    tasks: AtomicU64,
    queue_ns: AtomicU64,
    service_ns: AtomicU64,
    wait_ns: AtomicU64,
    longest: AtomicU64,
}

impl Counters {
    /// A task has been queued; there are so many now.
    pub(crate) fn queued(&self, len: usize) {
        self.longest.fetch_max(len as u64, Ordering::Relaxed);
    }

    /// A task is taken from the queue, where it was since then.
    pub(crate) fn started(&self, queued: Instant) {
        add(&self.queue_ns, queued);
    }

    /// A task that began then is done.
    pub(crate) fn served(&self, started: Instant) {
        add(&self.service_ns, started);
        self.tasks.fetch_add(1, Ordering::Relaxed);
    }

    /// A thread has waited for tasks since then.
    pub(crate) fn waited(&self, since: Instant) {
        add(&self.wait_ns, since);
    }

    /// What has been counted, for a stage with a thread of its own.
    pub(crate) fn stats(&self, name: &str) -> StageStats {
        let of = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        StageStats {
            name: name.into(),
            workers: None,
            tasks: self.tasks.load(Ordering::Relaxed),
            queue_delay: of(&self.queue_ns),
            wait: of(&self.wait_ns),
            service: of(&self.service_ns),
            longest_queue: self.longest.load(Ordering::Relaxed),
        }
    }
}

/// What a stage has done so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageStats {
    /// Its name.
    pub name: String,
    /// Workers assigned to it now; `None` for a stage with a thread of its own.
    pub workers: Option<usize>,
    /// Tasks finished.
    pub tasks: u64,
    /// Time tasks spent in the queue, all together.
    pub queue_delay: Duration,
    /// Time workers assigned here spent waiting for tasks, all together.
    pub wait: Duration,
    /// Time tasks spent being served, all together.
    pub service: Duration,
    /// Most tasks ever queued at once.
    pub longest_queue: u64,
}

impl StageStats {
    /// Adds what another part of the same stage has done.
    pub(crate) fn add(&mut self, other: &StageStats) {
        self.tasks += other.tasks;
        self.queue_delay += other.queue_delay;
        self.wait += other.wait;
        self.service += other.service;
        self.longest_queue = self.longest_queue.max(other.longest_queue);
    }
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    /// For the monitor alone: rung when there is something to watch, or to stop.
    watch: Condvar,
    names: Vec<&'static str>,
    counters: Vec<Counters>,
    /// Stage of each worker.
    assignment: Vec<AtomicUsize>,
    stop: AtomicBool,
}

struct State {
    queues: Vec<Queue>,
    /// The monitor sleeps until the next task.
    unwatched: bool,
}

/// The worker threads of a process and their stages.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// How often the monitor looks while there is work.
const MONITOR_PERIOD: Duration = Duration::from_millis(50);

impl Workers {
    /// `threads` workers, at least one, dealt out evenly over the named stages.
    ///
    /// # Errors
    /// If the system cannot make threads.
    ///
    /// # Panics
    /// If no stage is named.
    pub fn new(threads: usize, stages: &[&'static str]) -> io::Result<Arc<Workers>> {
        Workers::near(&[], threads, stages)
    }

    /// As [`Workers::new`], on these cores; on any if there are none.
    ///
    /// # Errors
    /// As [`Workers::new`].
    ///
    /// # Panics
    /// As [`Workers::new`].
    pub fn near(cpus: &[u32], threads: usize, stages: &[&'static str]) -> io::Result<Arc<Workers>> {
        assert!(!stages.is_empty());
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            state: Mutex::new(State { queues: stages.iter().map(|_| Queue::default()).collect(), unwatched: false }),
            wake: Condvar::new(),
            watch: Condvar::new(),
            names: stages.to_vec(),
            counters: stages.iter().map(|_| Counters::default()).collect(),
            assignment: (0..threads).map(|i| AtomicUsize::new(i % stages.len())).collect(),
            stop: AtomicBool::new(false),
        });
        // Dropped on an error, with the threads that have started.
        let workers = Arc::new(Workers { shared: Arc::clone(&shared), threads: Mutex::default() });
        let start = |thread: std::thread::Builder, run: Box<dyn FnOnce() + Send>| {
            let handle = thread.spawn(run).map_err(|error| crate::limits::thread_error(&error))?;
            workers.threads.lock().expect("no panics under the lock").push(handle);
            io::Result::Ok(())
        };
        for index in 0..threads {
            let (shared, cpus) = (Arc::clone(&shared), cpus.to_vec());
            let run = move || {
                topology::bind_thread(&cpus);
                shared.work(index);
            };
            start(std::thread::Builder::new().name(format!("worker-{index}")), Box::new(run))?;
        }
        start(std::thread::Builder::new().name("monitor".into()), Box::new(move || watch(&shared)))?;
        Ok(workers)
    }

    /// The stage with this name.
    ///
    /// # Panics
    /// If there is none.
    pub fn stage(&self, name: &str) -> StageId {
        StageId(self.shared.names.iter().position(|n| *n == name).expect("a stage named when the workers were made"))
    }

    /// Queues a task. The queue's length is bounded by the blocks and files that tasks carry.
    pub fn submit(&self, stage: StageId, owner: Owner, task: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.lock();
        let queue = &mut state.queues[stage.0];
        queue.push(owner, Queued { task: Box::new(task), since: Instant::now() });
        self.shared.counters[stage.0].queued(queue.len);
        let first = std::mem::replace(&mut state.unwatched, false);
        drop(state);
        self.shared.wake.notify_one();
        if first {
            self.shared.watch.notify_one();
        }
    }

    /// What every stage has done so far.
    pub fn stats(&self) -> Vec<StageStats> {
        let shared = &self.shared;
        let assigned = |index| shared.assignment.iter().filter(|a| a.load(Ordering::Relaxed) == index).count();
        let stage = |(index, counters): (usize, &Counters)| StageStats {
            workers: Some(assigned(index)),
            ..counters.stats(shared.names[index])
        };
        shared.counters.iter().enumerate().map(stage).collect()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock());
        self.shared.wake.notify_all();
        self.shared.watch.notify_all();
        let me = std::thread::current().id();
        for thread in std::mem::take(&mut *self.threads.lock().expect("no panics under the lock")) {
            // The last handle may be dropped by a task, on a worker of our own.
            if thread.thread().id() != me {
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panics under the lock")
    }

    fn work(&self, index: usize) {
        let mut state = self.lock();
        let mut last = 0;
        loop {
            let home = self.assignment[index].load(Ordering::Relaxed);
            let chosen = choose(&state.queues, home, last, Instant::now());
            let next = chosen.and_then(|stage| Some((stage, state.queues[stage].pop()?)));
            let Some((stage, Queued { task, since })) = next else {
                if self.stop.load(Ordering::SeqCst) {
                    return;
                }
                let since = Instant::now();
                state = self.wake.wait(state).expect("no panics under the lock");
                self.counters[home].waited(since);
                continue;
            };
            drop(state);
            last = stage;
            self.counters[stage].started(since);
            let started = Instant::now();
            task();
            self.counters[stage].served(started);
            state = self.lock();
        }
    }
}

fn add(counter: &AtomicU64, since: Instant) {
    counter.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
}

/// A stage's load over one period, as the monitor sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Load {
    tasks: u64,
    queue_ns: u64,
    service_ns: u64,
    workers: usize,
}

fn watch(shared: &Shared) {
    let mut before: Vec<(u64, u64, u64)> = Vec::new();
    loop {
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let now: Vec<_> = shared
            .counters
            .iter()
            .map(|c| {
                let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
                (get(&c.tasks), get(&c.queue_ns), get(&c.service_ns))
            })
            .collect();
        before.resize(now.len(), (0, 0, 0));
        let loads: Vec<Load> = now
            .iter()
            .zip(&before)
            .enumerate()
            .map(|(stage, (n, b))| Load {
                tasks: n.0 - b.0,
                queue_ns: n.1 - b.1,
                service_ns: n.2 - b.2,
                workers: shared.assignment.iter().filter(|a| a.load(Ordering::Relaxed) == stage).count(),
            })
            .collect();
        if let Some((from, to)) = rebalance(&loads)
            && let Some(worker) = shared.assignment.iter().find(|a| a.load(Ordering::Relaxed) == from)
        {
            worker.store(to, Ordering::Relaxed);
            tracing::debug!(from = shared.names[from], to = shared.names[to], "worker moved");
        }
        let idle = loads.iter().all(|l| l.tasks == 0);
        before = now;
        // An idle process is left alone until the next task.
        let mut state = shared.lock();
        state.unwatched = idle;
        while state.unwatched && !shared.stop.load(Ordering::SeqCst) {
            state = shared.watch.wait(state).expect("no panics under the lock");
        }
        let pause = shared.watch.wait_timeout_while(state, MONITOR_PERIOD, |_| !shared.stop.load(Ordering::SeqCst));
        drop(pause.expect("no panics under the lock"));
    }
}

/// Which stage should lend a worker to which: the one with the longest mean queue delay gets one
/// from the stage that needs its workers least, if that still leaves the lender as well off.
fn rebalance(loads: &[Load]) -> Option<(usize, usize)> {
    /// Delays below this are not worth a move.
    const NOTICEABLE_NS: u64 = 200_000;
    let mean = |total: u64, l: &Load| total.checked_div(l.tasks).unwrap_or(0);
    let (to, needy) = loads.iter().enumerate().max_by_key(|(_, l)| mean(l.queue_ns, l))?;
    if mean(needy.queue_ns, needy) < NOTICEABLE_NS {
        return None;
    }
    // Work per worker after the move must still be less at the lender than at the borrower.
    let spread = |l: &Load, workers: usize| l.service_ns.checked_div(workers as u64).unwrap_or(l.service_ns);
    let (from, lender) = loads
        .iter()
        .enumerate()
        .filter(|(stage, l)| *stage != to && l.workers > 0)
        .min_by_key(|(_, l)| spread(l, l.workers))?;
    (spread(lender, lender.workers - 1) < spread(needy, needy.workers + 1)).then_some((from, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn every_task_runs_once_and_is_counted() {
        let workers = Workers::new(3, &["a", "b"]).unwrap();
        let (tx, rx) = mpsc::channel();
        for i in 0..1000 {
            let tx = tx.clone();
            let stage = workers.stage(if i % 3 == 0 { "a" } else { "b" });
            workers.submit(stage, Owner(i % 7), move || tx.send(i).unwrap());
        }
        drop(tx);
        let mut seen: Vec<u64> = rx.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        let weak = Arc::downgrade(&workers.shared);
        let stats = workers.stats();
        assert_eq!(stats.iter().map(|s| s.workers.unwrap()).sum::<usize>(), 3);
        drop(workers);
        assert!(weak.upgrade().is_none(), "no thread is left behind");
    }

    fn queued(since: Instant) -> Queued {
        Queued { task: Box::new(|| ()), since }
    }

    #[test]
    fn owners_take_turns() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let at = |n: u64| start + Duration::from_nanos(n);
        (0..5).for_each(|n| queue.push(Owner(1), queued(at(n))));
        queue.push(Owner(2), queued(at(5)));
        queue.push(Owner(3), queued(at(6)));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|task| task.since).collect();
        assert_eq!(order, [0, 5, 6, 1, 2, 3, 4].map(at));
        assert_eq!((queue.len, queue.owners.len(), queue.turns.len()), (0, 0, 0));
    }

    #[test]
    fn an_overdue_task_precedes_the_stage_of_a_worker() {
        let mut queues = [Queue::default(), Queue::default()];
        let start = Instant::now();
        assert_eq!(choose(&queues, 0, 0, start), None);
        queues[1].push(Owner(1), queued(start));
        assert_eq!(choose(&queues, 0, 0, start), Some(1), "its own is empty");
        queues[0].push(Owner(1), queued(start + Duration::from_millis(1)));
        assert_eq!(choose(&queues, 0, 0, start + OVERDUE / 2), Some(0));
        let late = start + OVERDUE * 2;
        assert_eq!(choose(&queues, 0, 0, late), Some(1));
        assert_eq!(choose(&queues, 0, 1, late), Some(0), "in turns, whichever is older");
        // A stage without overdue tasks waits, whatever its worker's home.
        queues[0] = Queue::default();
        queues[0].push(Owner(2), queued(late));
        assert_eq!(choose(&queues, 0, 1, late), Some(1));
    }

    #[test]
    fn a_worker_moves_to_the_stage_with_the_longest_delay() {
        let load = |tasks, queue_ms: u64, service_ms: u64, workers| Load {
            tasks,
            queue_ns: queue_ms * 1_000_000,
            service_ns: service_ms * 1_000_000,
            workers,
        };
        assert_eq!(rebalance(&[load(10, 0, 5, 2), load(10, 100, 80, 1)]), Some((0, 1)));
        assert_eq!(rebalance(&[load(10, 0, 0, 2), load(10, 0, 80, 1)]), None, "no delay, no move");
        assert_eq!(rebalance(&[load(10, 50, 80, 1), load(10, 60, 80, 1)]), None, "no better off");
        assert_eq!(rebalance(&[load(0, 0, 0, 0), load(10, 100, 80, 3)]), None, "nobody to lend");
    }
}
