//! Time slices of a reactor, which hosts share equally.
//!
//! Tasks of a reactor run in turn. A host with hundreds of connections and calls has hundreds of tasks, and would get hundreds of
//! times the processor time of a host with one. Therefore each task counts its work for its host ([`caller`]). When a host has spent
//! its slice, its tasks wait for the next round of the reactor. In each round, every host gets one slice.
//!
//! Work is counted in units, and by the time that it takes: an operation on much state can take as long as thousands of others. A host that
//! has spent more than its slice waits for as many rounds as it has spent slices.

use crate::caller;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use thruway_engine::{Reactors, reactor};
use thruway_tcp::Origin;
use tokio::sync::oneshot;

/// Units of work of one host in one round. A unit is a received message, 4 KiB of data that is received or is changed in memory, an
/// operation of a call, or an extent of a disk's file that is looked up.
pub const SLICE: usize = 256;

/// Bytes of received data that count as a unit.
pub const UNIT_BYTES: usize = 4 << 10;

/// Time that counts as a unit.
const UNIT_TIME: Duration = Duration::from_micros(20);

/// Largest debt of a host, in units: a third of a second.
const DEBT_MAX: usize = 64 * SLICE;

/// Waiting tasks of one host that continue in one round. Each does at least one unit.
const TASKS_OF_ROUND: usize = 8;

/// Hosts with counts before those without waiting tasks are dropped from the table for the first time.
const HOSTS_MAX: usize = 1024;

thread_local! {
    static ROUNDS: RefCell<Rounds> = RefCell::new(Rounds::default());
    /// End of the counted time of the running task; `None` if the task works for no host.
    static COUNTED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

#[derive(Default)]
struct Rounds {
    hosts: HashMap<Origin, Host>,
    /// The host whose work was counted last; not in `hosts`.
    recent: Option<(Origin, Host)>,
    /// Hosts with waiting tasks, the next one first.
    order: VecDeque<Origin>,
    /// Number of the round.
    number: u64,
    /// The task that begins rounds is running.
    is_running: bool,
    /// Hosts in the table after the last removal.
    kept: usize,
    /// Units of work of all hosts since the reactor started.
    counted: u64,
}

#[derive(Default)]
struct Host {
    /// Units of work in `round`, and the debt of earlier rounds.
    spent: usize,
    round: u64,
    /// Moving average of the time of its tasks between two waits, in units.
    cost: usize,
    /// Waiting tasks, each with the units that it begins with.
    waiting: VecDeque<(oneshot::Sender<()>, usize)>,
}

impl Host {
    /// Pays a slice for each round since the last one.
    fn advance(&mut self, round: u64) {
        let rounds = usize::try_from(round - self.round).unwrap_or(usize::MAX);
        self.spent = self.spent.saturating_sub(rounds.saturating_mul(SLICE));
        self.round = round;
    }
}

/// Work that asks for its place in a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Waits behind earlier work of its host.
    New,
    /// Has begun.
    Continued,
}

impl Rounds {
    fn host(&mut self, host: Origin) -> &mut Host {
        if self.recent.as_ref().is_none_or(|(recent, _)| *recent != host) {
            self.put_back();
            self.recent = Some((host, self.hosts.remove(&host).unwrap_or_default()));
        }
        let (_, entry) = self.recent.as_mut().expect("set above");
        entry.advance(self.number);
        entry
    }

    fn put_back(&mut self) {
        // With twice the hosts of the last time, so that the scans cost a constant time per host.
        if self.hosts.len() >= HOSTS_MAX.max(2 * self.kept) {
            self.hosts.retain(|_, host| !host.waiting.is_empty());
            self.kept = self.hosts.len();
        }
        self.hosts.extend(self.recent.take());
    }

    /// Counts work of a host, or returns a wait for its next slice.
    fn spend(&mut self, host: Origin, work: Work, units: usize) -> Option<oneshot::Receiver<()>> {
        self.counted += units as u64;
        let entry = self.host(host);
        if entry.spent < SLICE && (work == Work::Continued || entry.waiting.is_empty()) {
            entry.spent += units;
            return None;
        }
        let (give, slice) = oneshot::channel();
        let is_first = entry.waiting.is_empty();
        entry.waiting.push_back((give, units));
        if is_first {
            self.order.push_back(host);
        }
        Some(slice)
    }

    /// Counts time of a host.
    fn spend_time(&mut self, host: Origin, time: Duration) {
        let units = (time.as_nanos() / UNIT_TIME.as_nanos()) as usize;
        let entry = self.host(host);
        entry.spent = (entry.spent + units).min(DEBT_MAX);
        entry.cost = (3 * entry.cost + units) / 4;
    }

    /// Begins a round. False if no task waits.
    fn begin(&mut self) -> bool {
        self.number += 1;
        self.put_back();
        let count = self.order.len();
        for host in self.order.drain(..count).collect::<Vec<_>>() {
            let Some(entry) = self.hosts.get_mut(&host) else { continue };
            entry.advance(self.number);
            // The time of a task is counted when it has run.
            let (mut continued, mut expected) = (0, 0);
            while continued < TASKS_OF_ROUND
                && entry.spent + expected < SLICE
                && let Some((give, units)) = entry.waiting.pop_front()
            {
                // Fails if the task has ended.
                if give.send(()).is_ok() {
                    (continued, expected) = (continued + 1, expected + entry.cost);
                    entry.spent += units;
                }
            }
            if !entry.waiting.is_empty() {
                self.order.push_back(host);
            }
        }
        count > 0
    }
}

/// Begins work of the current host: waits while the host has spent its slice, or while earlier work of the host waits.
///
/// Work of the daemon itself, outside [`caller::on_behalf_of`], does not wait.
pub async fn begin(units: usize) {
    spend_as(caller::current(), Work::New, units).await;
}

/// Continues work of the current host: waits while the host has spent its slice.
pub async fn spend(units: usize) {
    spend_for(caller::current(), units).await;
}

/// As [`spend`], for this host.
pub async fn spend_for(host: Option<Origin>, units: usize) {
    spend_as(host, Work::Continued, units).await;
}

/// Units of work that the tasks of this reactor have counted for hosts since it started.
pub fn counted() -> u64 {
    ROUNDS.with_borrow(|rounds| rounds.counted)
}

/// Runs work on behalf of a host on a reactor of its own, for tests. Returns the result, and the units of work that were counted.
///
/// # Panics
/// If the work panics, or no reactor can be started.
#[doc(hidden)]
pub fn measured<F: Future<Output: Send + 'static>>(work: impl FnOnce() -> F + Send + 'static) -> (F::Output, u64) {
    let reactors = Reactors::start(Some(1)).expect("a reactor");
    let (done, is_done) = mpsc::channel();
    reactors.handles()[0].spawn(move || async move {
        let result = caller::on_behalf_of(Origin::of_host([10, 0, 0, 1].into()), work()).await;
        done.send((result, counted())).expect("the caller waits");
    });
    is_done.recv().expect("the work has panicked: its message is above")
}

async fn spend_as(host: Option<Origin>, work: Work, units: usize) {
    let Some(host) = host.filter(|_| reactor::node().is_some()) else { return };
    count_time();
    let wait = ROUNDS.with_borrow_mut(|rounds| {
        let wait = rounds.spend(host, work, units)?;
        let is_first = !std::mem::replace(&mut rounds.is_running, true);
        Some((wait, is_first))
    });
    let Some((slice, is_first)) = wait else { return };
    if is_first {
        tokio::task::spawn_local(run());
    }
    // Fails only when the reactor ends. The units have been counted.
    let _ = slice.await;
}

/// Counts the time of the running task for its host.
fn count_time() {
    let (Some(until), Some(host)) = (COUNTED_UNTIL.get(), caller::current()) else { return };
    let now = Instant::now();
    COUNTED_UNTIL.set(Some(now));
    ROUNDS.with_borrow_mut(|rounds| rounds.spend_time(host, now - until));
}

/// Counts the time that a task works for its host on a reactor. This is a type because an `async fn` would hold the work twice in its memory.
pub(crate) struct Timed<F>(pub(crate) F);

impl<F: Future> Future for Timed<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        // SAFETY: the field is pinned with the value: nothing moves it out, and the type has no `Drop`.
        let work = unsafe { self.map_unchecked_mut(|timed| &mut timed.0) };
        let _time = reactor::node().is_some().then(Time::begin);
        work.poll(context)
    }
}

/// Measures the work of a task during its lifetime.
struct Time {
    /// False if it is nested in another one of the same task.
    is_outer: bool,
}

impl Time {
    fn begin() -> Time {
        let is_outer = COUNTED_UNTIL.get().is_none();
        if is_outer {
            COUNTED_UNTIL.set(Some(Instant::now()));
        }
        Time { is_outer }
    }
}

impl Drop for Time {
    fn drop(&mut self) {
        count_time();
        if self.is_outer {
            COUNTED_UNTIL.set(None);
        }
    }
}

/// Begins rounds until no task waits. Between two rounds, all tasks that are ready run.
async fn run() {
    loop {
        tokio::task::yield_now().await;
        let any = ROUNDS.with_borrow_mut(|rounds| {
            rounds.is_running = rounds.begin();
            rounds.is_running
        });
        if !any {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    fn host(number: u8) -> Origin {
        Origin::of_host([10, 0, 0, number].into())
    }

    /// Runs on a reactor of its own.
    fn on_reactor<F: Future<Output = ()>>(work: impl FnOnce() -> F + Send + 'static) {
        let reactors = Reactors::start(Some(1)).unwrap();
        let (done, is_done) = mpsc::channel();
        reactors.handles()[0].spawn(move || async move {
            work().await;
            done.send(()).unwrap();
        });
        is_done.recv().expect("the work ends without a panic");
    }

    /// While one host has hundreds of tasks that never wait, each unit of another host waits for a slice of the first at most.
    #[test]
    fn a_host_with_many_tasks_gets_one_slice_for_each_of_another() {
        on_reactor(|| async {
            let done = Rc::new(Cell::new(0_usize));
            let tasks: Vec<_> = (0..500)
                .map(|_| {
                    let done = Rc::clone(&done);
                    tokio::task::spawn_local(caller::on_behalf_of(host(1), async move {
                        begin(1).await;
                        loop {
                            done.set(done.get() + 1);
                            spend(1).await;
                        }
                    }))
                })
                .collect();
            caller::on_behalf_of(host(2), async {
                // All tasks begin.
                tokio::task::yield_now().await;
                for _ in 0..100 {
                    let before = done.get();
                    begin(1).await;
                    tokio::task::yield_now().await;
                    let rest = done.get() - before;
                    // The round in progress may end, and another begin.
                    assert!(
                        rest <= 2 * (SLICE + TASKS_OF_ROUND),
                        "{rest} units of the other host between two of this one"
                    );
                }
            })
            .await;
            assert!(done.get() > SLICE, "the first host works as well");
            tasks.iter().for_each(tokio::task::JoinHandle::abort);
        });
    }

    /// Operations that take long count by their time, and a host owes what it has spent beyond its slice.
    #[test]
    fn long_operations_count_as_many() {
        let mut rounds = Rounds::default();
        assert!(rounds.spend(host(1), Work::New, 1).is_none());
        rounds.spend_time(host(1), 10 * UNIT_TIME * SLICE as u32);
        let mut waits = rounds.spend(host(1), Work::New, 1).expect("it waits");
        let mut others = rounds.spend(host(1), Work::New, 1).expect("it waits");
        for round in 0..10 {
            assert!(waits.try_recv().is_err(), "round {round}");
            assert!(rounds.spend(host(2), Work::New, 1).is_none(), "another host has its slice");
            assert!(rounds.begin());
        }
        assert!(waits.try_recv().is_ok());
        // One such operation is expected to take a whole slice.
        assert!(others.try_recv().is_err());
        assert!(rounds.begin() && others.try_recv().is_ok());
        // Not for ever, when they are short again.
        (0..50).for_each(|_| rounds.spend_time(host(1), Duration::ZERO));
        assert_eq!(rounds.host(host(1)).cost, 0);
        // The debt has a bound.
        rounds.spend_time(host(1), Duration::from_secs(3600));
        assert_eq!(rounds.host(host(1)).spent, DEBT_MAX);
    }

    #[test]
    fn the_time_of_a_task_is_counted_for_its_host() {
        on_reactor(|| async {
            let spent = |number| ROUNDS.with_borrow_mut(|rounds| rounds.host(host(number)).spent);
            caller::on_behalf_of(host(1), async {
                let begin = Instant::now();
                while begin.elapsed() < 50 * UNIT_TIME {
                    std::hint::spin_loop();
                }
            })
            .await;
            assert!(spent(1) >= 50 && spent(2) == 0);
            // A task that panics ends the measurement.
            let panics = caller::on_behalf_of(host(2), async { panic!("a test") });
            assert!(tokio::task::spawn_local(panics).await.is_err());
            assert!(COUNTED_UNTIL.get().is_none());
        });
    }

    /// Tasks of a host continue in the order of their waits, before new work of the host.
    #[test]
    fn waiting_tasks_go_before_new_ones() {
        on_reactor(|| async {
            let order = Rc::new(RefCell::new(Vec::new()));
            let tasks: Vec<_> = (0..100)
                .map(|number| {
                    let order = Rc::clone(&order);
                    tokio::task::spawn_local(caller::on_behalf_of(host(1), async move {
                        begin(SLICE / 2).await;
                        order.borrow_mut().push(number);
                    }))
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            assert!(order.borrow().is_sorted(), "{order:?}");
        });
    }

    #[test]
    fn the_table_grows_with_the_waiting_hosts_only() {
        let mut rounds = Rounds::default();
        let address = |n: u32| Origin::of_host(std::net::Ipv4Addr::from_bits(n).into());
        let mut waits = Vec::new();
        for n in 0..3 * HOSTS_MAX as u32 {
            assert!(rounds.spend(address(n), Work::New, SLICE).is_none());
            waits.extend(rounds.spend(address(n), Work::New, 1));
        }
        assert_eq!(waits.len(), 3 * HOSTS_MAX, "each waits");
        for n in 0..100 * HOSTS_MAX as u32 {
            assert!(rounds.spend(address(0x1000_0000 + n), Work::New, 1).is_none());
        }
        assert!(rounds.hosts.len() <= 6 * HOSTS_MAX, "{} hosts", rounds.hosts.len());
        drop(waits);
        while rounds.begin() {}
        for n in 0..100 * HOSTS_MAX as u32 {
            assert!(rounds.spend(address(0x2000_0000 + n), Work::New, 1).is_none());
        }
        assert!(rounds.hosts.len() <= HOSTS_MAX, "{} hosts without waiting tasks", rounds.hosts.len());
    }

    #[test]
    fn tasks_that_have_ended_take_no_slice() {
        on_reactor(|| async {
            let work = |units| caller::on_behalf_of(host(1), begin(units));
            work(SLICE).await;
            let ended: Vec<_> = (0..100).map(|_| tokio::task::spawn_local(work(1))).collect();
            tokio::task::yield_now().await;
            ended.iter().for_each(tokio::task::JoinHandle::abort);
            work(1).await;
            ROUNDS.with_borrow(|rounds| assert_eq!(rounds.order.len(), 0));
        });
    }
}
