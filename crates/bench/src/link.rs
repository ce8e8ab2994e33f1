//! One benchmark connection: a queue pair, a registered buffer, and the peer's.

use super::{Test, Wait};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;
use thruway_fabric::{
    Access, Buffer, CompletionQueue, Device, MemoryRegion, Payload, QueuePair, QueuePairCaps, RecvRequest, RemoteAddr,
    SendFlags, SendOp, SendRequest, WorkCompletion,
};

/// Identifies the sends that return room.
pub(super) const ROOM: u64 = u64::MAX - 1;
/// Receives kept, beside those for messages, for messages that return room.
const ROOM_RECEIVES: u32 = 8;

/// Keeps a stream of sends from outrunning the receives of its other end: a send completes when
/// the network has taken it, not when somebody has received it. For every half depth of messages
/// received an empty one goes back.
pub(super) struct Pace {
    /// Messages the other end has room for.
    room: u32,
    /// Messages received since the last that went back.
    received: u32,
    batch: u32,
}

impl Pace {
    pub(super) fn new(depth: u32) -> Pace {
        Pace { room: 2 * depth, received: 0, batch: (depth / 2).max(1) }
    }

    /// Takes room for one message, if there is any.
    pub(super) fn take(&mut self) -> bool {
        self.room.checked_sub(1).map(|left| self.room = left).is_some()
    }

    /// A message of this length was received and its receive is posted again: whether an empty
    /// message is due, and whether there is room that there was not.
    pub(super) fn received(&mut self, len: u32) -> (bool, bool) {
        if len == 0 {
            self.room += self.batch;
            return (false, true);
        }
        self.received += 1;
        let due = self.received == self.batch;
        if due {
            self.received = 0;
        }
        (due, false)
    }
}

/// Both halves of the buffer hold `slots` messages of `size` bytes: what is sent from, what is received into.
pub(super) struct Link {
    pub(super) qp: QueuePair,
    pub(super) buffer: Arc<Buffer>,
    mr: MemoryRegion,
    size: u32,
    slots: u32,
    /// Operations and receives posted: each takes the slot behind the last one's.
    turns: [Cell<u32>; 2],
    /// The peer's buffer.
    pub(super) remote: RemoteAddr,
}

impl Link {
    pub(super) fn new(device: &Device, cq: &CompletionQueue, test: &Test) -> Result<Link, String> {
        let Test { size, depth, slots, .. } = *test;
        let fail = |e: thruway_fabric::Error| e.to_string();
        let pd = device.alloc_pd().map_err(|e| e.to_string())?;
        let caps = QueuePairCaps { max_send_wr: depth + 16, max_recv_wr: depth * 2 + ROOM_RECEIVES, max_sge: 1 };
        let qp = pd.create_qp(cq, cq, caps).map_err(fail)?;
        let size = size.max(8).next_multiple_of(8);
        let buffer = Arc::new(Buffer::new(size as usize * slots as usize * 2).map_err(|e| e.to_string())?);
        let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let mr = pd.register(&buffer, all).map_err(fail)?;
        Ok(Link { qp, buffer, mr, size, slots, turns: Default::default(), remote: RemoteAddr { addr: 0, rkey: 0 } })
    }

    /// Completions that a link of this depth may have waiting.
    pub(super) fn completions(depth: u32) -> usize {
        depth as usize * 3 + 16 + ROOM_RECEIVES as usize
    }

    /// Posts the receives that a stream of sends in this direction, or the room returned for one
    /// in the other, needs.
    pub(super) fn recv_stream(&self, depth: u32, len: u32) -> Result<(), String> {
        (0..depth * 2 + ROOM_RECEIVES).try_for_each(|id| self.recv(id.into(), len))
    }

    /// Returns room to the other end.
    pub(super) fn return_room(&self) -> Result<(), String> {
        self.post(ROOM, super::Op::Send, 0)
    }

    /// What the peer needs to know of our buffer.
    pub(super) fn describe(&self, test: &mut Test) {
        (test.addr, test.rkey) = (self.mr.addr(), self.mr.rkey());
    }

    pub(super) fn learn(&mut self, test: &Test) {
        self.remote = RemoteAddr { addr: test.addr, rkey: test.rkey };
    }

    /// Where the half begins that is received into.
    fn half(&self) -> usize {
        self.size as usize * self.slots as usize
    }

    /// Where in its half the next operation, or receive, is.
    fn next(&self, turn: &Cell<u32>) -> usize {
        let slot = turn.get();
        turn.set((slot + 1) % self.slots);
        slot as usize * self.size as usize
    }

    pub(super) fn recv(&self, wr_id: u64, len: u32) -> Result<(), String> {
        let sge = [self.mr.sge(self.half() + self.next(&self.turns[1]), len)];
        self.qp.post_recv(&RecvRequest { wr_id, sges: &sge }).map_err(|e| e.to_string())
    }

    /// Posts one operation from the sending half; a write lands in the peer's receiving half.
    pub(super) fn post(&self, wr_id: u64, op: super::Op, len: u32) -> Result<(), String> {
        let at = self.next(&self.turns[0]);
        let remote = |at: usize| RemoteAddr { addr: self.remote.addr + at as u64, ..self.remote };
        let (sent, received) = (at, self.half() + at);
        let (op, len, from) = match op {
            super::Op::Send => (SendOp::Send { invalidate: None }, len, sent),
            super::Op::Write => (SendOp::Write { remote: remote(received), immediate: None }, len, sent),
            // What comes of reads and atomics goes to the receiving half.
            super::Op::Read => (SendOp::Read { remote: remote(sent) }, len, received),
            super::Op::Atomic => (SendOp::FetchAdd { remote: remote(0), add: 1 }, 8, received),
        };
        let sge = [self.mr.sge(from, len)];
        let request = SendRequest { wr_id, op, payload: Payload::Sges(&sge), flags: SendFlags::SIGNALED };
        self.qp.post_send(&request).map_err(|e| e.to_string())
    }

    /// Marks the last byte of the next write.
    pub(super) fn stamp(&self, len: u32, mark: u8) {
        self.buffer.write(len as usize - 1, &[mark]);
    }

    /// The last byte of the last write received.
    pub(super) fn stamp_received(&self, len: u32) -> u8 {
        let mut mark = [0];
        self.buffer.read(self.half() + len as usize - 1, &mut mark);
        mark[0]
    }
}

/// Polls for completions. With [`Wait::Event`], waits if there are none, until something arrives or `arrived` returns true: an
/// incoming write makes no completion, and the poll may have placed it.
#[inline]
pub(super) fn poll(
    device: &Device,
    cq: &CompletionQueue,
    out: &mut Vec<WorkCompletion>,
    wait: Wait,
    limit: Duration,
    arrived: impl Fn() -> bool,
) -> Result<usize, String> {
    let n = cq.poll(out, 64);
    if n == 0 && wait == Wait::Event {
        device.wait_until(Some(limit), arrived).map_err(|e| e.to_string())?;
    }
    Ok(n)
}
