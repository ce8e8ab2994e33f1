//! Threads for what may wait: file systems do not change directories without waiting for one another.
//!
//! Hosts take turns: the jobs of one host delay each other, but not the jobs of other hosts.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_server::caller;
use thruway_server::fair_queue::{FairQueue, Limits};
use thruway_tcp::Origin;
use tokio::sync::oneshot;

/// Threads at a time.
const THREADS_MAX: usize = 64;

/// Limits of jobs in progress: one for each thread, and fewer for one host. Calls of a connection are limited, so jobs are never
/// refused.
const LIMITS: Limits =
    Limits { all: THREADS_MAX, per_origin: THREADS_MAX * 3 / 4, waiting: usize::MAX, patience: Duration::MAX };

/// A thread with nothing to do for this long ends.
const IDLE: Duration = Duration::from_secs(20);

type Job = Box<dyn FnOnce() + Send>;

/// A pool of threads whose files have the permissions that they ask for ([`thruway_fs::credentials::without_umask`]).
#[derive(Clone, Default)]
pub struct Workers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    /// Jobs of clients that wait for their turn.
    queue: FairQueue<Job>,
    /// Jobs that may begin, each with the host that it counts for; `None` for jobs of the daemon itself.
    ready: VecDeque<(Option<Origin>, Job)>,
    threads: usize,
    idle: usize,
}

impl Default for State {
    fn default() -> State {
        State { queue: FairQueue::new(LIMITS), ready: VecDeque::new(), threads: 0, idle: 0 }
    }
}

impl State {
    fn begin(&mut self, jobs: Vec<(Origin, Job)>) {
        self.ready.extend(jobs.into_iter().map(|(host, job)| (Some(host), job)));
    }

    fn arrive(&mut self, host: Option<Origin>, job: Job) {
        match host {
            None => self.ready.push_back((None, job)),
            Some(host) => {
                let verdict = self.queue.arrive(host, job, Instant::now());
                self.begin(verdict.begin);
            }
        }
    }

    fn end(&mut self, host: Option<Origin>) {
        if let Some(host) = host {
            let verdict = self.queue.over(host, Instant::now());
            self.begin(verdict.begin);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panics under the lock")
    }

    fn run(&self) {
        if let Err(error) = thruway_fs::credentials::without_umask() {
            tracing::error!(%error, "new files have fewer permissions than clients ask for");
        }
        let mut state = self.lock();
        loop {
            if let Some((host, job)) = state.ready.pop_front() {
                drop(state);
                job();
                state = self.lock();
                state.end(host);
                continue;
            }
            state.idle += 1;
            let (next, waited) = self.work.wait_timeout(state, IDLE).expect("no panics under the lock");
            state = next;
            state.idle -= 1;
            if waited.timed_out() && state.ready.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl Workers {
    /// Runs a job on one of the threads. A job that has begun is completed. If the future is dropped earlier, the job does not begin.
    pub async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = oneshot::channel();
        self.push(Box::new(move || {
            if !done.is_closed() {
                drop(done.send(catch_unwind(AssertUnwindSafe(job))));
            }
        }));
        match result.await {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => unreachable!("a job that has been taken is done"),
        }
    }

    /// Does something that nobody waits for.
    pub(super) fn start(&self, job: impl FnOnce() + Send + 'static) {
        self.push(Box::new(|| {
            // A thread that ended so would still be counted.
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a job of the file service panicked; please report this");
            }
        }));
    }

    fn push(&self, job: Job) {
        let mut state = self.0.lock();
        state.arrive(caller::current(), job);
        // Those who have been woken but do not run yet count as idle: jobs are more than they when another is needed.
        if state.ready.len() > state.idle && state.threads < THREADS_MAX {
            let shared = Arc::clone(&self.0);
            let started = std::thread::Builder::new().name("nfs".into()).spawn(move || shared.run());
            match started {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads > 0 => tracing::warn!(%error, "cannot start another thread"),
                Err(error) => {
                    tracing::warn!(%error, "cannot start a thread: this reactor waits for the file system itself");
                    while let Some((host, job)) = state.ready.pop_front() {
                        drop(state);
                        job();
                        state = self.0.lock();
                        state.end(host);
                    }
                    return;
                }
            }
        }
        drop(state);
        self.0.work.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::Barrier;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn jobs_do_not_wait_for_one_another() {
        let (workers, meet) = (Workers::default(), Arc::new(Barrier::new(8)));
        let jobs = (0..8).map(|i| {
            let meet = Arc::clone(&meet);
            workers.run(move || {
                meet.wait();
                i
            })
        });
        let all = block_on(futures_util::future::join_all(jobs));
        assert_eq!(all, (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn a_host_with_many_jobs_keeps_no_other_waiting() {
        let workers = Workers::default();
        let [one, other] = [1, 2].map(|number| Origin::of_host([10, 0, 0, number].into()));
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        block_on(async {
            let many = (0..4 * THREADS_MAX).map(|_| {
                let wait = Arc::clone(&wait);
                caller::on_behalf_of(one, workers.run(move || drop(wait.lock().map(|wait| wait.recv()))))
            });
            let mut many = std::pin::pin!(futures_util::future::join_all(many));
            // All jobs are queued or in progress, and none ends.
            assert!(many.as_mut().now_or_never().is_none());
            for n in 0..10 {
                assert_eq!(caller::on_behalf_of(other, workers.run(move || n)).await, n);
            }
            assert_eq!(workers.run(|| 7).await, 7, "a job of the daemon itself");
            drop(go_on);
            many.await;
        });
    }

    #[test]
    fn a_job_that_nobody_waits_for_does_not_begin() {
        let workers = Workers::default();
        let host = Origin::of_host([10, 0, 0, 1].into());
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        block_on(caller::on_behalf_of(host, async {
            let busy = (0..LIMITS.per_origin).map(|_| {
                let wait = Arc::clone(&wait);
                workers.run(move || drop(wait.lock().map(|wait| wait.recv())))
            });
            let mut busy = std::pin::pin!(futures_util::future::join_all(busy));
            assert!(busy.as_mut().now_or_never().is_none());
            let begun = Arc::new(Mutex::new(false));
            let also = Arc::clone(&begun);
            let mut abandoned = Box::pin(workers.run(move || *also.lock().unwrap() = true));
            assert!((&mut abandoned).now_or_never().is_none());
            drop(abandoned);
            drop(go_on);
            busy.await;
            // Behind the abandoned job.
            workers.run(|| ()).await;
            assert!(!*begun.lock().unwrap());
        }));
    }

    #[test]
    fn a_panic_is_the_callers() {
        let workers = Workers::default();
        let panicked = catch_unwind(AssertUnwindSafe(|| block_on(workers.run(|| panic!("of the job")))));
        assert!(panicked.is_err());
        assert_eq!(block_on(workers.run(|| 1)), 1, "the thread lives on");
    }
}
