//! Sends, writes, reads and atomics, and the order that they keep.

use super::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) fn send_and_receive(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    a.fill(1);
    for (i, len) in [1usize, 2, 3, 4, 64, 511, 512, 513, 1400, 4096, 65_521, 65_522, 100_000].into_iter().enumerate() {
        let id = i as u64;
        b.recv(id, 0, len + 10);
        a.post(id, send(), &[a.mr.sge(7, len as u32)]).unwrap();
        let wc = lab.ok(&mut b, id);
        assert_eq!((wc.op, wc.len as usize, wc.qp_num), (CompletionOp::Recv, len, b.qp.number()));
        assert!(b.bytes(0, len) == a.bytes(7, len));
        assert_eq!(lab.ok(&mut a, id).op, CompletionOp::Send);
    }
}

pub(crate) fn write_then_send(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    a.fill(2);
    for round in 0..20 {
        let at = 1000 * round + round;
        b.recv(1, 0, 8);
        a.post(1, write(b.mr.remote(at)), &[a.mr.sge(50, 70_000)]).unwrap();
        a.post(2, send(), &[a.mr.sge(0, 8)]).unwrap();
        lab.ok(&mut b, 1);
        // The send's arrival proves that the write has been placed.
        assert!(b.bytes(at.max(8), 60_000) == a.bytes(50 + at.max(8) - at, 60_000));
        lab.ok(&mut a, 1);
        lab.ok(&mut a, 2);
    }
}

pub(crate) fn write_with_immediate(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    a.fill(3);
    for len in [0u32, 10, 100_000] {
        b.qp.post_recv(&RecvRequest { wr_id: 5, sges: &[] }).unwrap();
        let op = SendOp::Write { remote: b.mr.remote(100), immediate: Some(0xdead_0000 + len) };
        a.post(6, op, &[a.mr.sge(0, len)]).unwrap();
        let wc = lab.ok(&mut b, 5);
        assert_eq!((wc.op, wc.immediate, wc.len), (CompletionOp::RecvWriteImmediate, Some(0xdead_0000 + len), len));
        assert!(b.bytes(100, len as usize) == a.bytes(0, len as usize));
        assert_eq!(lab.ok(&mut a, 6).op, CompletionOp::Write);
    }
}

pub(crate) fn read(lab: &Lab) {
    let (mut a, b) = lab.pair();
    b.fill(4);
    for len in [1u32, 100, 65_000, 500_000] {
        a.post(9, SendOp::Read { remote: b.mr.remote(33) }, &[a.mr.sge(3, len)]).unwrap();
        assert_eq!(lab.ok(&mut a, 9).op, CompletionOp::Read);
        assert!(a.bytes(3, len as usize) == b.bytes(33, len as usize));
    }
    // More than may be outstanding: the rest wait their turn.
    for id in 0..100 {
        a.post(id, SendOp::Read { remote: b.mr.remote(id as usize) }, &[a.mr.sge(id as usize * 10, 10)]).unwrap();
    }
    for id in 0..100 {
        lab.ok(&mut a, id);
        assert!(a.bytes(id as usize * 10, 10) == b.bytes(id as usize, 10));
    }
}

/// What is behind a read is complete when the read is, and is not reported before.
pub(crate) fn completions_come_in_order_behind_a_read(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    b.fill(4);
    for round in 0..20u64 {
        let first = round * 10;
        b.recv(first, 1_000_000, 8);
        b.recv(first + 1, 1_000_000, 8);
        a.buffer.write(0, &vec![0; 400_000]);
        a.post(first, SendOp::Read { remote: b.mr.remote(0) }, &[a.mr.sge(0, 400_000)]).unwrap();
        a.post(first + 1, send(), &[a.mr.sge(900_000, 8)]).unwrap();
        a.post(first + 2, SendOp::Read { remote: b.mr.remote(0) }, &[a.mr.sge(400_000, 100)]).unwrap();
        a.post(first + 3, send(), &[a.mr.sge(900_000, 8)]).unwrap();
        let mut order = Vec::new();
        lab.until("four completions", || {
            let Side { cq, .. } = &mut a;
            let mut found = Vec::new();
            cq.poll(&mut found, 64);
            if found.iter().any(|wc| wc.wr_id == first) {
                assert!(a.bytes(0, 400_000) == b.bytes(0, 400_000), "the read is complete before its bytes are there");
            }
            order.extend(found.iter().map(|wc| (wc.wr_id, wc.op)));
            b.cq.poll(&mut b.seen, 64);
            order.len() == 4
        });
        let expected = [CompletionOp::Read, CompletionOp::Send, CompletionOp::Read, CompletionOp::Send];
        assert_eq!(order, (first..).zip(expected).collect::<Vec<_>>());
        lab.ok(&mut b, first);
        lab.ok(&mut b, first + 1);
    }
}

pub(crate) fn read_scattered(lab: &Lab) {
    let (mut a, b) = lab.pair();
    b.fill(5);
    let sinks = [a.mr.sge(0, 1000), a.mr.sge(5000, 70_000), a.mr.sge(200_000, 1)];
    a.post(1, SendOp::Read { remote: b.mr.remote(0) }, &sinks).unwrap();
    lab.ok(&mut a, 1);
    assert!(a.bytes(0, 1000) == b.bytes(0, 1000));
    assert!(a.bytes(5000, 70_000) == b.bytes(1000, 70_000));
    assert!(a.bytes(200_000, 1) == b.bytes(71_000, 1));
}

pub(crate) fn atomics(lab: &Lab) {
    let (mut a, b) = lab.pair();
    b.buffer.write(64, &100u64.to_ne_bytes());
    let remote = b.mr.remote(64);
    let word = |side: &Side, at| u64::from_ne_bytes(side.bytes(at, 8).try_into().unwrap());
    a.post(1, SendOp::FetchAdd { remote, add: 5 }, &[a.mr.sge(0, 8)]).unwrap();
    assert_eq!(lab.ok(&mut a, 1).op, CompletionOp::FetchAdd);
    assert_eq!((word(&a, 0), word(&b, 64)), (100, 105));
    a.post(2, SendOp::CompareSwap { remote, compare: 7, swap: 1 }, &[a.mr.sge(8, 8)]).unwrap();
    lab.ok(&mut a, 2);
    assert_eq!((word(&a, 8), word(&b, 64)), (105, 105));
    a.post(3, SendOp::CompareSwap { remote, compare: 105, swap: 1 }, &[a.mr.sge(8, 8)]).unwrap();
    assert_eq!(lab.ok(&mut a, 3).op, CompletionOp::CompareSwap);
    assert_eq!((word(&a, 8), word(&b, 64)), (105, 1));
    assert!(a.post(4, SendOp::FetchAdd { remote, add: 1 }, &[a.mr.sge(0, 4)]).is_err());
    let odd = b.mr.remote(65);
    assert!(a.post(4, SendOp::FetchAdd { remote: odd, add: 1 }, &[a.mr.sge(0, 8)]).is_err());
}

pub(crate) fn gather_and_scatter(lab: &Lab) {
    let (a, mut b) = lab.pair();
    a.fill(6);
    let parts = [b.mr.sge(900_000, 3), b.mr.sge(10, 500), b.mr.sge(100_000, 200_000)];
    b.qp.post_recv(&RecvRequest { wr_id: 1, sges: &parts }).unwrap();
    let gathered = [a.mr.sge(0, 1), a.mr.sge(70_000, 0), a.mr.sge(1000, 150_000), a.mr.sge(500_000, 20)];
    a.post(1, send(), &gathered).unwrap();
    assert_eq!(lab.ok(&mut b, 1).len, 150_021);
    let sent = [a.bytes(0, 1), a.bytes(1000, 150_000), a.bytes(500_000, 20)].concat();
    let got = [b.bytes(900_000, 3), b.bytes(10, 500), b.bytes(100_000, 150_021 - 503)].concat();
    assert!(sent == got);
}

pub(crate) fn inline_and_unsignalled(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    for id in 0..50u64 {
        b.recv(id, id as usize * 8, 8);
        let text = id.to_be_bytes();
        let flags = if id == 49 { SendFlags::SIGNALED } else { SendFlags::empty() };
        let request = SendRequest { wr_id: id, op: send(), payload: Payload::Inline(&text), flags };
        a.qp.post_send(&request).unwrap();
    }
    for id in 0..50u64 {
        lab.ok(&mut b, id);
        assert_eq!(b.bytes(id as usize * 8, 8), id.to_be_bytes());
    }
    lab.ok(&mut a, 49);
    assert!(a.seen.is_empty(), "unsignalled requests complete silently");
    let long = vec![0; a.device.attributes().max_inline as usize + 1];
    let request = SendRequest { wr_id: 1, op: send(), payload: Payload::Inline(&long), flags: SendFlags::SIGNALED };
    assert!(matches!(a.qp.post_send(&request), Err(Error::Limit { .. })));
}

pub(crate) fn fence(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    b.fill(7);
    b.recv(1, 0, 300_000);
    a.post(1, SendOp::Read { remote: b.mr.remote(300_000) }, &[a.mr.sge(0, 300_000)]).unwrap();
    // What the read fetched is what the fenced send sends.
    let flags = SendFlags::SIGNALED | SendFlags::FENCE;
    let sges = [a.mr.sge(0, 300_000)];
    a.qp.post_send(&SendRequest { wr_id: 2, op: send(), payload: Payload::Sges(&sges), flags }).unwrap();
    lab.ok(&mut b, 1);
    assert!(b.bytes(0, 300_000) == b.bytes(300_000, 300_000));
    lab.ok(&mut a, 2);
}

pub(crate) fn responder_may_send_first(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    a.recv(1, 0, 10);
    b.post(2, send(), &[b.mr.sge(0, 10)]).unwrap();
    lab.ok(&mut a, 1);
    lab.ok(&mut b, 2);
}

pub(crate) fn empty_messages(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    b.qp.post_recv(&RecvRequest { wr_id: 1, sges: &[] }).unwrap();
    a.post(1, write(RemoteAddr { addr: 5, rkey: 0xffff_ffff }), &[]).unwrap();
    a.post(2, SendOp::Read { remote: RemoteAddr { addr: 5, rkey: 0xffff_ffff } }, &[]).unwrap();
    a.post(3, send(), &[]).unwrap();
    assert_eq!(lab.ok(&mut b, 1).len, 0);
    for id in 1..=3 {
        lab.ok(&mut a, id);
    }
}

pub(crate) fn large_messages(lab: &Lab) {
    let (a, mut b) = lab.pair();
    a.fill(9);
    let big = 64 << 20;
    let source = Arc::new(Buffer::new(big).unwrap());
    let sink = Arc::new(Buffer::new(big).unwrap());
    let pattern: Vec<u8> = (0..big).map(|i| (i % 251) as u8).collect();
    source.write(0, &pattern);
    let from = a.pd.register(&source, Access::empty()).unwrap();
    let to = b.pd.register(&sink, all()).unwrap();
    b.recv(1, 0, 1);
    a.post(1, write(to.remote(0)), &[from.sge(0, big as u32)]).unwrap();
    a.post(2, send(), &[a.mr.sge(0, 1)]).unwrap();
    lab.ok(&mut b, 1);
    let mut got = vec![0; big];
    sink.read(0, &mut got);
    assert!(got == pattern);
}

pub(crate) fn waiting_sleeps_and_wakes(lab: &Lab) {
    let (a, b) = lab.pair();
    a.recv(1, 0, 8);
    // Nothing to come: the wait ends by its limit.
    lab.a.progress();
    lab.a.wait(Some(Duration::from_millis(1))).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            b.post(2, send(), &[b.mr.sge(0, 8)]).unwrap();
            let mut out = Vec::new();
            while b.cq.poll(&mut out, 1) == 0 {
                b.device.wait(Some(TIMEOUT)).unwrap();
            }
        });
        let mut out = Vec::new();
        let start = Instant::now();
        while a.cq.poll(&mut out, 1) == 0 {
            a.device.wait(Some(TIMEOUT)).unwrap();
            assert!(start.elapsed() < TIMEOUT);
        }
        assert_eq!(out[0].wr_id, 1);
    });
}

/// An RDMA Write makes no completion at its target. A thread that waits for the data does not sleep if a poll has placed them,
/// and returns at whatever point of the wait they arrive.
pub(crate) fn a_wait_for_memory_ends_with_the_write(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    // The accepting end may send when something has arrived (RFC 5044, 7.1.3), and nothing below drives it until then.
    b.recv(100, 8, 8);
    a.post(100, send(), &[a.mr.sge(8, 8)]).unwrap();
    lab.ok(&mut a, 100);
    lab.ok(&mut b, 100);
    let start = Instant::now();
    // A device that places data without the processor does not end the sleep, which has a limit of its own there.
    let marks = if lab.a.attributes().auto_progress { 5u8 } else { 50 };
    for mark in 1..=marks {
        let arrived = || a.bytes(0, 1) == [mark];
        let put = || {
            b.buffer.write(0, &[mark]);
            b.post(mark.into(), write(a.mr.remote(0)), &[b.mr.sge(0, 1)]).unwrap();
            lab.b.progress();
        };
        // The call of the condition at which the peer writes. 0: before the wait, and a poll places the data.
        let at = mark % 5;
        if at == 0 {
            put();
            lab.until("the write", || a.cq.poll(&mut Vec::new(), 1) == 0 && arrived());
        }
        let calls = Cell::new(0);
        let condition = || {
            calls.set(calls.get() + 1);
            if calls.get() == at {
                put();
            }
            arrived()
        };
        while !condition() {
            lab.a.wait_until(Some(TIMEOUT), condition).unwrap();
            assert!(start.elapsed() < TIMEOUT, "the wait missed a write at call {at} of its condition");
        }
        lab.ok(&mut b, mark.into());
    }
}

pub(crate) fn posting_from_another_thread(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    for id in 0..100 {
        b.recv(id, 0, 8);
    }
    std::thread::scope(|scope| {
        for t in 0..4 {
            let a = &a;
            scope.spawn(move || {
                for i in 0..25 {
                    a.post(t * 25 + i, send(), &[a.mr.sge(0, 8)]).unwrap();
                }
            });
        }
    });
    for id in 0..100 {
        lab.ok(&mut b, id);
        lab.ok(&mut a, id);
    }
}

/// One thread posts, another polls; what is short, what is long and what meets a full transport are completed by either.
pub(crate) fn order_is_kept_between_threads(lab: &Lab) {
    const COUNT: u64 = 5_000;
    const DEPTH: u64 = 64;
    let len_of = |id: u64| [8, 64, 300, 8, 2000][id as usize % 5];
    let (a, b) = lab.pair();
    (0..DEPTH).for_each(|id| b.recv(id, 0, 2000));
    let (received, sent) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    // The next completions of this kind, each behind the one before.
    let take = |side: &Side, op: CompletionOp, next: &mut u64| {
        let mut out = Vec::new();
        // One, some, or all that there are.
        side.cq.poll(&mut out, [1, 3, 64][*next as usize % 3]);
        for wc in out {
            assert_eq!((wc.status, wc.op, wc.wr_id), (Status::Success, op, *next));
            if op == CompletionOp::Recv {
                assert_eq!(wc.len, len_of(*next));
                side.recv(*next + DEPTH, 0, 2000);
            }
            *next += 1;
        }
        assert!(start.elapsed() < TIMEOUT, "{next} of {COUNT} after {TIMEOUT:?}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for id in 0..COUNT {
                while id >= received.load(Ordering::Acquire) + DEPTH || id >= sent.load(Ordering::Acquire) + DEPTH {
                    assert!(start.elapsed() < TIMEOUT, "{id} posted of {COUNT} after {TIMEOUT:?}");
                    std::thread::yield_now();
                }
                a.post(id, send(), &[a.mr.sge(0, len_of(id))]).unwrap();
            }
        });
        scope.spawn(|| {
            let mut next = 0;
            while next < COUNT {
                take(&a, CompletionOp::Send, &mut next);
                sent.store(next, Ordering::Release);
            }
        });
        let mut next = 0;
        while next < COUNT {
            take(&b, CompletionOp::Recv, &mut next);
            received.store(next, Ordering::Release);
        }
    });
}

pub(crate) fn extensions_are_refused(lab: &Lab) {
    let (a, b) = lab.pair();
    let remote = b.mr.remote(0);
    let refused = |r: Result<()>| assert!(matches!(r, Err(Error::Unsupported(_))), "{r:?}");
    refused(a.post(1, SendOp::FetchAdd { remote, add: 1 }, &[a.mr.sge(0, 8)]));
    refused(a.post(1, SendOp::Write { remote, immediate: Some(1) }, &[a.mr.sge(0, 8)]));
}
