//! The answering end: echoes what a latency test sends, takes what a bandwidth test sends, and
//! stands still for reads and atomics, whatever the connecting end asks for.

use super::link::{self, Link, Pace};
use super::{Op, Test, Wait};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use thruway_cli::Common;
use thruway_fabric::{
    CompletionOp, CompletionQueue, ConnectParams, ConnectionEvent, ConnectionRequest, Device, ListenOptions, Listener,
    Provider, Status, WorkCompletion,
};

const QUEUE: usize = 1 << 20;
/// Largest message, and half of a buffer, that a peer may ask for.
const SIZE_MAX: u64 = 1 << 30;
const DEPTH_MAX: u32 = 4096;

pub(super) struct Server {
    device: Device,
    listener: Listener,
    cq: CompletionQueue,
    sessions: BTreeMap<u32, Session>,
}

struct Session {
    link: Link,
    test: Test,
    pace: Pace,
    /// Operations of our own, of a test in both directions, that are not in progress.
    idle: u32,
    /// Mark of the last write echoed.
    mark: u8,
}

impl Session {
    fn received(&mut self, wc: &WorkCompletion) -> Result<(), String> {
        if self.test.lat {
            // There are more receives: this one need not be back before the peer has its answer.
            self.link.post(0, Op::Send, self.test.size)?;
            return self.link.recv(wc.wr_id, self.test.size);
        }
        self.link.recv(wc.wr_id, self.test.size)?;
        let (due, room) = self.pace.received(wc.len);
        if due {
            self.link.return_room()?;
        }
        if room { self.post_idle() } else { Ok(()) }
    }

    /// A write has arrived and is not echoed yet.
    fn has_write_to_echo(&self) -> bool {
        self.test.watches_memory() && self.link.stamp_received(self.test.size) != self.mark
    }

    fn post_idle(&mut self) -> Result<(), String> {
        while self.idle > 0 && (self.test.op != Op::Send || self.pace.take()) {
            self.idle -= 1;
            self.link.post(0, self.test.op, self.test.size)?;
        }
        Ok(())
    }
}

impl Server {
    pub(super) fn start(addr: SocketAddr, fabric: &Provider) -> Result<Server, String> {
        let device = fabric.open().map_err(|e| e.to_string())?;
        let listener = device.listen(addr, &ListenOptions::default()).map_err(|e| e.to_string())?;
        let cq = device.create_cq(QUEUE.min(device.attributes().max_cqe)).map_err(|e| e.to_string())?;
        Ok(Server { device, listener, cq, sessions: BTreeMap::new() })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    pub(super) fn announce(self, common: &Common) -> Server {
        if !common.quiet {
            thruway_cli::say_error!("listening on {}", self.addr());
        }
        self
    }

    /// Serves until `stop` says so.
    pub(super) fn serve(mut self, stop: impl Fn() -> bool) -> Result<(), String> {
        let mut completed = Vec::new();
        while !stop() {
            while let Some(event) = self.device.poll_event() {
                match event {
                    ConnectionEvent::Request(request) => self.accept(request),
                    ConnectionEvent::Disconnected { qp_num, cause } => {
                        tracing::info!(qp_num, %cause, "connection closed");
                        self.sessions.remove(&qp_num);
                    }
                    _ => {}
                }
            }
            let auto_progress = self.device.attributes().auto_progress;
            let spinning = self.sessions.values().any(|s| s.test.is_polled_for(auto_progress));
            let wait = if spinning { Wait::Poll } else { Wait::Event };
            let watches_memory = self.sessions.values().any(|s| s.test.watches_memory());
            // Events are looked at now and then even while completions come thick and fast.
            for _ in 0..4096 {
                let arrived = || watches_memory && self.sessions.values().any(Session::has_write_to_echo);
                let n = link::poll(&self.device, &self.cq, &mut completed, wait, Duration::from_millis(100), arrived)?;
                for wc in completed.drain(..) {
                    self.complete(&wc);
                }
                if watches_memory {
                    self.echo_writes();
                }
                if n == 0 && wait == Wait::Event {
                    break;
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, request: ConnectionRequest) {
        let peer = request.peer();
        match self.try_accept(request) {
            Ok(()) => {}
            Err(message) => thruway_cli::say_error!("thruway bench: {peer}: {message}"),
        }
    }

    fn try_accept(&mut self, request: ConnectionRequest) -> Result<(), String> {
        let known = Test::decode(request.private_data());
        let Some(test) =
            known.filter(|t| t.memory() <= SIZE_MAX && t.size > 0 && t.slots > 0 && (1..=DEPTH_MAX).contains(&t.depth))
        else {
            request.reject(b"not a test this bench knows");
            return Err("asked for no test this bench knows".into());
        };
        let mut link = Link::new(&self.device, &self.cq, &test)?;
        link.learn(&test);
        if test.op == Op::Send {
            link.recv_stream(test.depth, test.size)?;
        }
        let mut answer = test.clone();
        link.describe(&mut answer);
        let params = ConnectParams { private_data: answer.encode(), ..ConnectParams::default() };
        request.accept(&link.qp, &params).map_err(|e| e.to_string())?;
        let mut session = Session { link, pace: Pace::new(test.depth), idle: 0, test, mark: 0 };
        if session.test.bidi {
            session.idle = session.test.depth;
            session.post_idle()?;
        }
        self.sessions.insert(session.link.qp.number(), session);
        Ok(())
    }

    fn complete(&mut self, wc: &WorkCompletion) {
        let Some(session) = self.sessions.get_mut(&wc.qp_num) else { return };
        if wc.status != Status::Success {
            return;
        }
        let result = match wc.op {
            CompletionOp::Recv => session.received(wc),
            _ if session.test.bidi && wc.wr_id != link::ROOM => {
                session.idle += 1;
                session.post_idle()
            }
            _ => Ok(()),
        };
        if let Err(message) = result {
            tracing::debug!(qp = wc.qp_num, message, "test ended");
        }
    }

    fn echo_writes(&mut self) {
        for session in self.sessions.values_mut().filter(|s| s.has_write_to_echo()) {
            let mark = session.link.stamp_received(session.test.size);
            session.link.stamp(session.test.size, mark);
            // Until there is room for it. That the connection is gone shows as a disconnection.
            if session.link.post(0, Op::Write, session.test.size).is_ok() {
                session.mark = mark;
            }
        }
    }
}
