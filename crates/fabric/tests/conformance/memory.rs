//! Registered memory: who may do what to it, and until when.

use super::*;

pub(crate) fn solicited_and_invalidate(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    for (invalidate, solicited) in [(false, false), (false, true), (true, false), (true, true)] {
        if invalidate && !lab.b.attributes().remote_invalidate {
            continue;
        }
        let window = b.qp.bind_window(&b.mr, 4096, 4096, Access::REMOTE_WRITE, None).unwrap();
        let remote = RemoteAddr { addr: window.addr(), rkey: window.rkey() };
        a.post(1, write(remote), &[a.mr.sge(0, 4096)]).unwrap();
        b.recv(2, 0, 10);
        let op = SendOp::Send { invalidate: invalidate.then(|| window.rkey()) };
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::SOLICITED, solicited);
        let sges = [a.mr.sge(0, 4)];
        a.qp.post_send(&SendRequest { wr_id: 2, op, payload: Payload::Sges(&sges), flags }).unwrap();
        let wc = lab.ok(&mut b, 2);
        // libsiw does not tell which key was revoked.
        let told = !is_verbs(&b) || wc.invalidated.is_some();
        assert!(!told || wc.invalidated == invalidate.then(|| window.rkey()));
        // rdma-core does not tell.
        assert!(is_verbs(&b) || wc.solicited == solicited);
        assert!(!told || window.is_valid() != invalidate);
        lab.ok(&mut a, 1);
        lab.ok(&mut a, 2);
    }
}

/// More windows than there are keys in their low byte, one after another and some at once; each lets the peer at its own
/// part, until it is revoked or dropped.
pub(crate) fn windows(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    a.fill(77);
    // The accepting end may not be the first to speak (see `responder_may_send_first`).
    b.recv(9000, 0, 8);
    a.post(9000, send(), &[a.mr.sge(0, 8)]).unwrap();
    lab.ok(&mut a, 9000);
    lab.ok(&mut b, 9000);
    let revocable = lab.b.attributes().remote_invalidate;
    let mut open = Vec::new();
    for id in 0..600u64 {
        let at = (id as usize % 16) * 4096;
        let told = (id % 5 == 0).then_some(10_000 + id);
        let window = b.qp.bind_window(&b.mr, at, 4096, Access::REMOTE_WRITE, told).unwrap();
        assert!(window.is_valid() && window.addr() == b.mr.addr() + at as u64 && window.len() == 4096);
        b.recv(id, SIZE - 64, 64);
        if let Some(wr_id) = told {
            assert_eq!(lab.ok(&mut b, wr_id).op, CompletionOp::Bind);
        }
        // What the peer may know of it, it knows by a message of this queue pair.
        a.recv(id, SIZE - 64, 64);
        b.post(id, send(), &[b.mr.sge(SIZE - 64, 8)]).unwrap();
        lab.ok(&mut a, id);
        lab.ok(&mut b, id);
        let remote = RemoteAddr { addr: window.addr(), rkey: window.rkey() };
        let revoke = revocable && id % 3 != 0;
        a.post(id, write(remote), &[a.mr.sge(at + 1, 4000)]).unwrap();
        lab.ok(&mut a, id);
        a.post(id, SendOp::Send { invalidate: revoke.then_some(remote.rkey) }, &[a.mr.sge(0, 4)]).unwrap();
        lab.ok(&mut a, id);
        lab.ok(&mut b, id);
        assert_eq!(b.bytes(at, 4000), a.bytes(at + 1, 4000), "window {id}");
        if id % 7 == 0 {
            open.push(window);
        }
    }
    // A window that has been dropped is shut.
    let window = b.qp.bind_window(&b.mr, 0, 4096, Access::REMOTE_WRITE, None).unwrap();
    let remote = RemoteAddr { addr: window.addr(), rkey: window.rkey() };
    a.recv(1000, SIZE - 64, 64);
    b.post(1000, send(), &[b.mr.sge(SIZE - 64, 8)]).unwrap();
    lab.ok(&mut a, 1000);
    lab.ok(&mut b, 1000);
    drop(window);
    a.post(1001, write(remote), &[a.mr.sge(0, 8)]).unwrap();
    lab.refused_by_peer(&a);
}

pub(crate) fn windows_end_with_what_they_are_on(lab: &Lab) {
    let (a, b) = lab.pair();
    let read_only = b.pd.register(&b.buffer, Access::REMOTE_READ).unwrap();
    let refused = b.qp.bind_window(&read_only, 0, 64, Access::REMOTE_WRITE, None).map(drop);
    assert!(matches!(refused, Err(Error::LocalProtection { .. })), "{refused:?}");
    let outside = b.qp.bind_window(&b.mr, SIZE - 63, 64, Access::REMOTE_READ, None).map(drop);
    assert!(matches!(outside, Err(Error::LocalProtection { .. })), "{outside:?}");
    let apart = b.device.alloc_pd().unwrap().register(&b.buffer, all()).unwrap();
    assert!(b.qp.bind_window(&apart, 0, 64, Access::REMOTE_READ, None).is_err());
    let window = b.qp.bind_window(&b.mr, 0, 4096, Access::REMOTE_WRITE, None).unwrap();
    let remote = RemoteAddr { addr: window.addr(), rkey: window.rkey() };
    if lab.b.attributes().windows {
        // Another peer of the same protection domain has no use for it.
        let cq = b.device.create_cq(32).unwrap();
        let caps = QueuePairCaps { max_send_wr: 8, max_recv_wr: 8, max_sge: 1 };
        let (theirs, ours) = (
            a.pd.create_qp(&a.device.create_cq(16).unwrap(), &a.cq, QueuePairCaps { max_recv_wr: 0, ..caps }),
            b.pd.create_qp(&cq, &cq, caps),
        );
        let (theirs, ours) = (theirs.unwrap(), ours.unwrap());
        lab.connect(&theirs, &ours, &ConnectParams::default());
        let sges = [a.mr.sge(0, 8)];
        let op = SendRequest { wr_id: 1, op: write(remote), payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED };
        theirs.post_send(&op).unwrap();
        lab.until("the refusal", || theirs.error().is_some());
        assert!(window.is_valid());
    }
    // One whose region goes before it, one whose queue pair does: neither may disturb what follows.
    let Side { device, pd, cq, qp, buffer, mr, .. } = b;
    drop(mr);
    drop(qp);
    drop(window);
    drop((cq, pd));
    lab.disconnected(&a);
    drop((buffer, device));
    let (mut a, mut b) = lab.pair();
    b.recv(1, 0, 8);
    a.post(1, send(), &[a.mr.sge(0, 8)]).unwrap();
    lab.ok(&mut b, 1);
    lab.ok(&mut a, 1);
}

/// Whoever drops a region means all of it: neither its own key nor a window on it works any more, whatever the window's
/// owner still holds.
pub(crate) fn a_dropped_region_is_shut_with_its_windows(lab: &Lab) {
    for through_window in [false, true] {
        let (mut a, b) = lab.pair();
        let mut b = b;
        // From then on the responder may send, too.
        b.recv(1, 0, 8);
        a.post(1, send(), &[a.mr.sge(0, 8)]).unwrap();
        lab.ok(&mut a, 1);
        lab.ok(&mut b, 1);
        let region = b.pd.register(&b.buffer, all()).unwrap();
        let window = b.qp.bind_window(&region, 0, 4096, Access::REMOTE_WRITE, Some(7)).unwrap();
        lab.ok(&mut b, 7);
        let remote = RemoteAddr { addr: window.addr(), rkey: window.rkey() };
        a.post(2, write(remote), &[a.mr.sge(0, 8)]).unwrap();
        lab.ok(&mut a, 2);
        let target = if through_window { remote } else { region.remote(0) };
        drop(region);
        assert!(!window.is_valid());
        let before = b.bytes(0, 8);
        a.buffer.write(0, b"too late");
        a.post(3, write(target), &[a.mr.sge(0, 8)]).unwrap();
        lab.refused_by_peer(&a);
        assert_eq!(b.bytes(0, 8), before);
    }
}

/// Protection domains are a device's to give, and come back when nothing is of them any more.
pub(crate) fn domains_come_back(lab: &Lab) {
    let buffer = Arc::new(Buffer::new(SIZE).unwrap());
    // More than software devices have.
    for _ in 0..70_000 {
        lab.b.alloc_pd().unwrap();
    }
    let region = lab.b.alloc_pd().unwrap().register(&buffer, all()).unwrap();
    // What is of a domain keeps it.
    assert!(region.is_valid());
}

/// Memory that is not held in place, where the device does without.
pub(crate) fn memory_on_demand(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    let access = Access::ON_DEMAND | Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let buffer = Arc::new(Buffer::new(SIZE).unwrap());
    match b.pd.register(&buffer, access) {
        Err(error) => assert!(matches!(error, Error::Unsupported(_)) && !lab.b.attributes().on_demand, "{error}"),
        Ok(mr) => {
            assert!(lab.b.attributes().on_demand);
            b.recv(1, 0, 8);
            a.fill(3);
            a.post(1, write(mr.remote(0)), &[a.mr.sge(0, 9000)]).unwrap();
            a.post(2, send(), &[a.mr.sge(0, 8)]).unwrap();
            lab.ok(&mut a, 2);
            lab.ok(&mut b, 1);
            let mut got = vec![0; 9000];
            buffer.read(0, &mut got);
            assert!(got == a.bytes(0, 9000));
        }
    }
}

pub(crate) fn zero_based_regions(lab: &Lab) {
    let (mut a, b) = lab.pair();
    a.fill(8);
    let zero = b.pd.register_zero_based(&b.buffer, all()).unwrap();
    assert_eq!(zero.addr(), 0);
    a.post(1, write(RemoteAddr { addr: 4000, rkey: zero.rkey() }), &[a.mr.sge(0, 100)]).unwrap();
    a.post(2, SendOp::Read { remote: zero.remote(4000) }, &[a.mr.sge(200, 100)]).unwrap();
    lab.ok(&mut a, 2);
    assert!(a.bytes(200, 100) == a.bytes(0, 100) && b.bytes(4000, 100) == a.bytes(0, 100));
}

pub(crate) fn access_violations(lab: &Lab) {
    type Prepare = fn(&Side) -> (RemoteAddr, Option<MemoryRegion>);
    let cases: [(&str, Prepare); 6] = [
        ("no such key", |b| (RemoteAddr { addr: b.mr.addr(), rkey: b.mr.rkey() ^ 0x40 }, None)),
        ("before the region", |b| (RemoteAddr { addr: b.mr.addr() - 1, rkey: b.mr.rkey() }, None)),
        ("past the region", |b| (b.mr.remote(SIZE - 7), None)),
        ("wrapping", |b| (RemoteAddr { addr: u64::MAX - 3, rkey: b.mr.rkey() }, None)),
        ("no rights", |b| {
            let window = b.qp.bind_window(&b.mr, 0, 4096, Access::empty(), None).unwrap();
            (RemoteAddr { addr: window.addr(), rkey: window.rkey() }, Some(window))
        }),
        ("outside a window", |b| {
            let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
            let window = b.qp.bind_window(&b.mr, 4096, 4096, all, None).unwrap();
            (RemoteAddr { addr: window.addr() + 4089, rkey: window.rkey() }, Some(window))
        }),
    ];
    for (name, prepare) in cases {
        for kind in ["write", "read", "atomic"] {
            if name == "no rights" && kind == "read" && lab.b.attributes().name.starts_with("siw") {
                // It neither serves nor refuses such a read: the connection stands still.
                continue;
            }
            if name == "outside a window" && lab.b.attributes().name.starts_with("rxe") {
                // It holds what comes by a window's key against the bounds of the region (Linux 7.3, check_rkey).
                continue;
            }
            let (mut a, mut b) = lab.pair();
            b.fill(10);
            let before = b.bytes(0, SIZE);
            let (remote, _window) = prepare(&b);
            b.recv(1, 0, 8);
            let op = match kind {
                "write" => write(remote),
                "read" => SendOp::Read { remote },
                _ if remote.addr % 8 != 0 || !(has_atomics(&a) && has_atomics(&b)) => continue,
                _ => SendOp::FetchAdd { remote, add: 1 },
            };
            a.post(1, op, &[a.mr.sge(0, 8)]).unwrap();
            let wc = lab.completion(&mut b, 1);
            assert_eq!(wc.status, Status::Flushed, "{name} {kind}");
            lab.refused_by_peer(&a);
            let cause = lab.disconnected(&b);
            assert!(is_verbs(&b) || matches!(cause, ConnectionError::Protocol(_)), "{name} {kind}: {cause}");
            if kind != "write" {
                let status = lab.completion(&mut a, 1).status;
                let known = if is_verbs(&a) || is_verbs(&b) {
                    status != Status::Success
                } else {
                    status == Status::RemoteAccess
                };
                assert!(known, "{name} {kind}: {status:?}");
            }
            assert!(b.bytes(0, SIZE) == before, "{name} {kind} changed memory");
            assert!(matches!(a.post(2, send(), &[]), Err(Error::State { .. })));
        }
    }
}

pub(crate) fn local_protection(lab: &Lab) {
    let (mut a, b) = lab.pair();
    let read_only = a.pd.register(&a.buffer, Access::empty()).unwrap();
    let other_pd = a.device.alloc_pd().unwrap();
    let foreign = other_pd.register(&a.buffer, all()).unwrap();
    let gone = a.pd.register(&a.buffer, all()).unwrap().sge(0, 8);
    let refused = |r: Result<()>| assert!(matches!(r, Err(Error::LocalProtection { .. })), "{r:?}");
    refused(a.post(1, send(), &[a.mr.sge(SIZE - 4, 8)]));
    refused(a.post(1, send(), &[gone]));
    refused(a.post(1, send(), &[foreign.sge(0, 8)]));
    refused(a.post(1, SendOp::Read { remote: b.mr.remote(0) }, &[read_only.sge(0, 8)]));
    refused(a.qp.post_recv(&RecvRequest { wr_id: 1, sges: &[read_only.sge(0, 8)] }));
    // The connection is none the worse for it.
    a.post(2, SendOp::Read { remote: b.mr.remote(0) }, &[a.mr.sge(0, 8)]).unwrap();
    lab.ok(&mut a, 2);
}

pub(crate) fn deregistered_memory_is_not_reachable(lab: &Lab) {
    let (a, b) = lab.pair();
    let remote = b.mr.remote(0);
    let Side { mr, qp, .. } = b;
    drop(mr);
    a.post(1, write(remote), &[a.mr.sge(0, 8)]).unwrap();
    lab.refused_by_peer(&a);
    drop(qp);
}

pub(crate) fn protection_domains_are_apart(lab: &Lab) {
    let (a, b) = lab.pair();
    let other = b.device.alloc_pd().unwrap();
    let mr = other.register(&b.buffer, all()).unwrap();
    a.post(1, write(mr.remote(0)), &[a.mr.sge(0, 8)]).unwrap();
    lab.refused_by_peer(&a);
}
