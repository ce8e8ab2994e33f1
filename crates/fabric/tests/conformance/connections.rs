//! Connections: how they begin and end.

use super::*;

pub(crate) fn private_data_and_depths(lab: &Lab) {
    let (a, b) = (Side::new(&lab.a, QueuePairCaps::default()), Side::new(&lab.b, QueuePairCaps::default()));
    let ask = ConnectParams { private_data: b"hello".to_vec(), ird: 3, ord: 9, ..ConnectParams::default() };
    a.qp.connect(lab.addr(), &ask).unwrap();
    let mut answered = None;
    lab.until("the connection", || {
        if let Some(ConnectionEvent::Request(r)) = lab.b.poll_event() {
            assert_eq!(unpadded(r.private_data()), b"hello");
            let give = ConnectParams { private_data: b"welcome".to_vec(), ird: 5, ord: 5, ..ConnectParams::default() };
            r.accept(&b.qp, &give).unwrap();
        }
        if let Some(ConnectionEvent::Established { private_data, .. }) = lab.a.poll_event() {
            answered = Some(private_data);
        }
        answered.is_some()
    });
    assert_eq!(unpadded(&answered.unwrap()), b"welcome");
    let (ia, ib) = (a.qp.info().unwrap(), b.qp.info().unwrap());
    // Each end has at most as many reads outstanding as the other holds.
    assert_eq!((ib.ird, ia.ird, ib.ord), (5, 3, 3));
    // siw answers with what it could hold, not with what it was told to.
    assert!(ia.ord == 5 || is_verbs(&a) || is_verbs(&b), "{}", ia.ord);
}

pub(crate) fn rejection(lab: &Lab) {
    for silently in [false, true] {
        let a = Side::new(&lab.a, QueuePairCaps::default());
        a.recv(1, 0, 8);
        a.qp.connect(lab.addr(), &ConnectParams::default()).unwrap();
        lab.until("the refusal", || {
            if let Some(ConnectionEvent::Request(r)) = lab.b.poll_event() {
                if silently { drop(r) } else { r.reject(b"full") }
            }
            a.qp.error().is_some()
        });
        let Some(ConnectionError::Rejected { private_data }) = a.qp.error() else { panic!("{:?}", a.qp.error()) };
        assert_eq!(unpadded(&private_data), if silently { &b""[..] } else { b"full" });
    }
}

pub(crate) fn nobody_listens(lab: &Lab) {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut a = Side::new(&lab.a, QueuePairCaps::default());
    a.recv(1, 0, 8);
    if a.qp.connect(port, &ConnectParams::default()).is_ok() {
        assert!(matches!(lab.disconnected(&a), ConnectionError::Lost(_)));
        assert_eq!(lab.completion(&mut a, 1).status, Status::Flushed);
    }
}

/// A connection that the peer neither accepts nor refuses is given up in time, also where the device's user only waits, and every wait
/// ends by another connection's completion.
pub(crate) fn an_unanswered_connection_is_given_up(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    let unanswered = Side::new(&lab.a, QueuePairCaps::default());
    let params = ConnectParams { timeout: Duration::from_millis(300), ..ConnectParams::default() };
    unanswered.qp.connect(lab.addr(), &params).unwrap();
    let mut request = None;
    lab.until("the request", || {
        if let Some(ConnectionEvent::Request(r)) = lab.b.poll_event() {
            request = Some(r);
        }
        request.is_some()
    });
    let start = Instant::now();
    let by_waiting = |side: &mut Side, wr_id: u64| {
        loop {
            side.cq.poll(&mut side.seen, 64);
            if let Some(at) = side.seen.iter().position(|wc| wc.wr_id == wr_id) {
                return assert_eq!(side.seen.remove(at).status, Status::Success);
            }
            side.device.wait(Some(TIMEOUT)).unwrap();
            assert!(start.elapsed() < TIMEOUT, "completion {wr_id} did not happen");
        }
    };
    while unanswered.qp.error().is_none() {
        b.recv(1, 0, 8);
        a.recv(2, 0, 8);
        a.post(3, send(), &[a.mr.sge(0, 8)]).unwrap();
        by_waiting(&mut b, 1);
        b.post(4, send(), &[b.mr.sge(0, 8)]).unwrap();
        by_waiting(&mut b, 4);
        by_waiting(&mut a, 3);
        by_waiting(&mut a, 2);
    }
    assert_eq!(unanswered.qp.error(), Some(ConnectionError::TimedOut));
}

pub(crate) fn orderly_disconnect(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    b.recv(1, 0, SIZE);
    b.recv(2, 0, 8);
    a.post(1, send(), &[a.mr.sge(0, SIZE as u32)]).unwrap();
    a.qp.disconnect();
    // What was posted before is still sent.
    assert_eq!(lab.ok(&mut b, 1).len as usize, SIZE);
    assert_eq!(lab.completion(&mut b, 2).status, Status::Flushed);
    assert_eq!(lab.disconnected(&b), ConnectionError::Closed);
    b.qp.disconnect();
    drop(b);
    assert_eq!(lab.disconnected(&a), ConnectionError::Closed);
    lab.ok(&mut a, 1);
}

/// The peer's last message and its end are there together, among more connections than are polled one by one.
pub(crate) fn the_end_that_comes_with_the_last_message(lab: &Lab) {
    let others = [lab.pair(), lab.pair()];
    let (a, mut b) = lab.pair();
    b.recv(1, 0, 8);
    a.post(1, send(), &[a.mr.sge(0, 8)]).unwrap();
    a.qp.disconnect();
    lab.ok(&mut b, 1);
    lab.disconnected(&b);
    drop(others);
}

pub(crate) fn abrupt_disconnect_with_requests_under_way(lab: &Lab) {
    let (mut a, b) = lab.pair();
    for id in 0..20 {
        a.recv(100 + id, 0, 8);
        a.post(id, SendOp::Read { remote: b.mr.remote(0) }, &[a.mr.sge(0, SIZE as u32)]).unwrap();
    }
    drop(b);
    let mut failed = false;
    for id in 0..20 {
        let status = lab.completion(&mut a, id).status;
        assert!(!failed || status != Status::Success, "nothing succeeds after a failure");
        failed |= status != Status::Success;
        assert_eq!(lab.completion(&mut a, 100 + id).status, Status::Flushed);
    }
    // A device works on while its consumer does not look, and may have been done before.
    assert!(failed || is_verbs(&a));
    lab.disconnected(&a);
}

pub(crate) fn destroyed_while_connecting(lab: &Lab) {
    for _ in 0..20 {
        let a = Side::new(&lab.a, QueuePairCaps::default());
        a.qp.connect(lab.addr(), &ConnectParams::default()).unwrap();
        drop(a);
    }
    while lab.b.poll_event().is_some() {}
    write_then_send(lab);
}

pub(crate) fn many_connections(lab: &Lab, count: usize) {
    let caps = QueuePairCaps { max_send_wr: 4, max_recv_wr: 4, max_sge: 1 };
    let side = |device: &Device, cq: &CompletionQueue, pd: &ProtectionDomain| {
        let _ = device;
        pd.create_qp(cq, cq, caps).unwrap()
    };
    let (pa, pb) = (lab.a.alloc_pd().unwrap(), lab.b.alloc_pd().unwrap());
    let (ca, cb) = (lab.a.create_cq(count * 8).unwrap(), lab.b.create_cq(count * 8).unwrap());
    let buffer = Arc::new(Buffer::new(4096).unwrap());
    let (ma, mb) = (pa.register(&buffer, all()).unwrap(), pb.register(&buffer, all()).unwrap());
    let mut from = Vec::new();
    let mut to = Vec::new();
    for _ in 0..count {
        let qp = side(&lab.a, &ca, &pa);
        qp.connect(lab.addr(), &ConnectParams { timeout: TIMEOUT, ..ConnectParams::default() }).unwrap();
        from.push(qp);
    }
    let mut up = 0;
    lab.until("all connections", || {
        while let Some(event) = lab.b.poll_event() {
            if let ConnectionEvent::Request(r) = event {
                let qp = side(&lab.b, &cb, &pb);
                for id in 0..4 {
                    qp.post_recv(&RecvRequest { wr_id: id, sges: &[mb.sge(0, 64)] }).unwrap();
                }
                r.accept(&qp, &ConnectParams::default()).unwrap();
                to.push(qp);
            }
        }
        while let Some(event) = lab.a.poll_event() {
            match event {
                ConnectionEvent::Established { .. } => up += 1,
                ConnectionEvent::Disconnected { cause, .. } => panic!("{cause}"),
                _ => {}
            }
        }
        up == count && to.len() == count
    });
    // The first one is stalled by a peer that reads nothing and sends half a frame.
    let mut stalled = lab.socket();
    stalled.write_all(b"MPA ID Re").unwrap();
    for qp in &from {
        let request =
            SendRequest { wr_id: 1, op: send(), payload: Payload::Sges(&[ma.sge(0, 64)]), flags: SendFlags::SIGNALED };
        qp.post_send(&request).unwrap();
    }
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    lab.until("all messages", || {
        ca.poll(&mut sent, 1000);
        cb.poll(&mut received, 1000);
        sent.len() == count && received.len() == count
    });
    assert!(sent.iter().chain(&received).all(|wc| wc.status == Status::Success));
}
