//! The measuring end.

use super::clock::{self, Moment};
use super::link::{self, Link, Pace};
use super::report::Row;
use super::{Op, Test, TestArgs, Wait};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use thruway_fabric::{CompletionOp, CompletionQueue, ConnectParams, ConnectionEvent, Device, Status, WorkCompletion};

/// Nothing in a test takes this long unless the peer is gone.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Measurements are kept up to this many; enough for every percentile printed.
const SAMPLES_MAX: usize = 4 << 20;

/// Measures one row.
pub(super) fn measure(args: &TestArgs, addr: SocketAddr, lat: bool, op: Op, size: u32) -> Result<Row, String> {
    let size = if op == Op::Atomic { 8 } else { size };
    let (depth, qps) = if lat { (1, 1) } else { (args.depth, args.qps) };
    let device = args.towards(addr)?.open().map_err(|e| e.to_string())?;
    let cq = device.create_cq(Link::completions(depth) * qps as usize).map_err(|e| e.to_string())?;
    let (slots, bidi) = (if lat { 1 } else { args.slots(size)? }, args.bidirectional && !lat);
    let mut test = Test { lat, op, size, depth, slots, wait: args.wait, bidi, addr: 0, rkey: 0 };
    if test.watches_memory() && test.wait == Wait::Event && device.attributes().auto_progress {
        return Err("--wait event cannot measure RDMA Writes on this device, which tells of no arrival: measure it with --wait poll".into());
    }
    let mut links = Vec::new();
    for _ in 0..qps {
        links.push(connect(&device, &cq, addr, &mut test)?);
    }
    let mut run =
        Run { device, cq, links, test, duration: args.duration()?, samples: Vec::new(), completed: Vec::new() };
    clock::calibrate();
    let cpu = cpu_seconds();
    let start = Instant::now();
    let operations = match (lat, op) {
        (true, Op::Send) => run.ping_pong_sends()?,
        (true, Op::Write) => run.ping_pong_writes()?,
        _ => run.stream()?,
    };
    let seconds = start.elapsed().as_secs_f64();
    let cpu_seconds = cpu_seconds() - cpu;
    let ping_pong = lat && matches!(op, Op::Send | Op::Write);
    Ok(Row::new(&run.test, qps, args, &mut run.samples, operations, seconds, cpu_seconds, ping_pong))
}

fn connect(device: &Device, cq: &CompletionQueue, addr: SocketAddr, test: &mut Test) -> Result<Link, String> {
    let mut link = Link::new(device, cq, test)?;
    link.describe(test);
    if test.op == Op::Send {
        // Echoes, or room that comes back and, in both directions, the peer's own sends.
        if test.lat { link.recv(0, test.size)? } else { link.recv_stream(test.depth, test.size)? }
    }
    let params = ConnectParams { private_data: test.encode(), ..ConnectParams::default() };
    link.qp.connect(addr, &params).map_err(|e| e.to_string())?;
    loop {
        match device.poll_event() {
            Some(ConnectionEvent::Established { private_data, .. }) => {
                let answer = Test::decode(&private_data);
                let answer = answer.ok_or_else(|| format!("{addr} accepted, but is not a thruway bench"))?;
                link.learn(&answer);
                return Ok(link);
            }
            Some(ConnectionEvent::Disconnected { cause, .. }) => return Err(format!("{addr}: {cause}")),
            _ => device.wait(Some(REPLY_TIMEOUT)).map_err(|e| e.to_string())?,
        }
    }
}

/// Bytes per second of reads of `size` bytes with `compute` of computation behind each posting.
pub(super) fn measure_computing(
    args: &TestArgs,
    addr: SocketAddr,
    size: u32,
    compute: Duration,
) -> Result<f64, String> {
    let depth = args.depth;
    let device = args.towards(addr)?.open().map_err(|e| e.to_string())?;
    let cq = device.create_cq(Link::completions(depth)).map_err(|e| e.to_string())?;
    let (op, wait) = (Op::Read, Wait::Event);
    let mut test = Test { lat: false, op, size, depth, slots: 1, wait, bidi: false, addr: 0, rkey: 0 };
    let links = vec![connect(&device, &cq, addr, &mut test)?];
    let (samples, completed) = (Vec::new(), Vec::new());
    let mut run = Run { device, cq, links, test, duration: args.duration()?, samples, completed };
    let (start, mut under_way, mut done) = (Instant::now(), 0, 0u64);
    while start.elapsed() < run.duration {
        run.links[0].post(0, Op::Read, size)?;
        under_way += 1;
        let computing = Instant::now();
        while computing.elapsed() < compute {
            std::hint::spin_loop();
        }
        while under_way >= depth {
            run.poll()?;
            let finished = run.completed.drain(..).count();
            under_way -= finished as u32;
            done += finished as u64;
        }
    }
    Ok(done as f64 * f64::from(size) / start.elapsed().as_secs_f64())
}

struct Run {
    device: Device,
    cq: CompletionQueue,
    links: Vec<Link>,
    test: Test,
    duration: Duration,
    /// Nanoseconds.
    samples: Vec<u64>,
    completed: Vec<WorkCompletion>,
}

impl Run {
    /// Polls, and fails on a failed completion or a lost connection.
    fn poll(&mut self) -> Result<usize, String> {
        self.poll_until(|_| false)
    }

    /// As [`Run::poll`]; a wait also ends when `arrived` returns true for the first link.
    #[inline]
    fn poll_until(&mut self, arrived: impl Fn(&Link) -> bool) -> Result<usize, String> {
        let first = &self.links[0];
        let arrived = || arrived(first);
        let n = link::poll(&self.device, &self.cq, &mut self.completed, self.test.wait, REPLY_TIMEOUT, arrived)?;
        if n == 0 {
            return Ok(0);
        }
        if let Some(wc) = self.completed.iter().find(|wc| wc.status != Status::Success) {
            let cause = self.links.iter().find_map(|l| l.qp.error());
            return Err(match cause {
                Some(cause) => cause.to_string(),
                None => format!("{:?} failed: {:?}", wc.op, wc.status),
            });
        }
        Ok(n)
    }

    fn sample(&mut self, span: Duration) {
        if self.samples.len() < SAMPLES_MAX {
            self.samples.push(span.as_nanos() as u64);
        }
    }

    /// Runs round trips until the time is over.
    fn ping_pong(&mut self, mut round_trip: impl FnMut(&mut Run, u64) -> Result<(), String>) -> Result<u64, String> {
        let start = Moment::now();
        let (mut last, mut operations) = (start, 0);
        while last.since(start) < self.duration {
            round_trip(self, operations)?;
            let now = Moment::now();
            self.sample(now.since(last));
            last = now;
            operations += 1;
        }
        Ok(operations)
    }

    fn ping_pong_sends(&mut self) -> Result<u64, String> {
        let size = self.test.size;
        self.ping_pong(|run, _| {
            run.links[0].post(1, Op::Send, size)?;
            // One is posted already: the next is no part of the round trip.
            run.links[0].recv(0, size)?;
            let mut echoed = false;
            while !echoed {
                run.poll()?;
                echoed = run.completed.drain(..).filter(|wc| wc.op == CompletionOp::Recv).count() > 0;
            }
            Ok(())
        })
    }

    fn ping_pong_writes(&mut self) -> Result<u64, String> {
        let size = self.test.size;
        self.ping_pong(|run, operations| {
            let mark = (operations % 255) as u8 + 1;
            run.links[0].stamp(size, mark);
            run.links[0].post(1, Op::Write, size)?;
            // The echo may overtake the completion, which makes room for the next.
            let mut completed = false;
            while !completed || run.links[0].stamp_received(size) != mark {
                run.poll_until(|link| completed && link.stamp_received(size) == mark)?;
                completed |= run.completed.drain(..).count() > 0;
                if run.links[0].qp.error().is_some() {
                    return Err("the peer went away".into());
                }
            }
            Ok(())
        })
    }

    /// Keeps every queue pair filled to its depth.
    fn stream(&mut self) -> Result<u64, String> {
        let Test { op, size, depth, .. } = self.test;
        let number_of: HashMap<u32, usize> = self.links.iter().enumerate().map(|(i, l)| (l.qp.number(), i)).collect();
        let mut posted_at = vec![vec![Moment::now(); depth as usize]; self.links.len()];
        let mut paces: Vec<Pace> = self.links.iter().map(|_| Pace::new(depth)).collect();
        let mut idle = vec![(0..u64::from(depth)).collect::<Vec<u64>>(); self.links.len()];
        let start = Moment::now();
        let (mut under_way, mut operations) = (0u64, 0);
        let mut to_fill: Vec<usize> = (0..self.links.len()).collect();
        let mut batch = Vec::new();
        let mut now = start;
        loop {
            let over = now.since(start) >= self.duration;
            for link in to_fill.drain(..) {
                while !over && !idle[link].is_empty() && (op != Op::Send || paces[link].take()) {
                    let slot = idle[link].pop().expect("looked at above");
                    posted_at[link][slot as usize] = now;
                    self.links[link].post(slot, op, size)?;
                    under_way += 1;
                }
            }
            if over && under_way == 0 {
                break;
            }
            let finished = self.poll()?;
            now = Moment::now();
            if finished == 0 {
                continue;
            }
            std::mem::swap(&mut batch, &mut self.completed);
            for wc in batch.drain(..) {
                let link = number_of[&wc.qp_num];
                if wc.op == CompletionOp::Recv {
                    self.links[link].recv(wc.wr_id, size)?;
                    let (due, room) = paces[link].received(wc.len);
                    if due {
                        self.links[link].return_room()?;
                    }
                    if room {
                        to_fill.push(link);
                    }
                } else if wc.wr_id != link::ROOM {
                    self.sample(now.since(posted_at[link][wc.wr_id as usize]));
                    operations += 1;
                    under_way -= 1;
                    idle[link].push(wc.wr_id);
                    to_fill.push(link);
                }
            }
        }
        self.confirm()?;
        Ok(operations)
    }

    /// Sends and writes complete when TCP has them; a read behind them proves that the peer does.
    fn confirm(&mut self) -> Result<(), String> {
        for link in &self.links {
            link.post(u64::MAX, Op::Read, 8)?;
        }
        let mut left = self.links.len();
        while left > 0 {
            self.poll()?;
            left -= self.completed.drain(..).filter(|wc| wc.wr_id == u64::MAX).count();
        }
        Ok(())
    }
}

/// Processor time of this process.
pub(super) fn cpu_seconds() -> f64 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

impl Wait {
    pub(super) fn name(self) -> &'static str {
        match self {
            Wait::Poll => "poll",
            Wait::Event => "event",
        }
    }
}
