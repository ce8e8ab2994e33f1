//! Queues: shared, full, empty.

use super::*;

/// Three connections, the messages of which come unevenly, with one queue of receives.
pub(crate) fn shared_receives(lab: &Lab) {
    if lab.b.attributes().max_srq_wr == 0 {
        assert!(matches!(lab.b.alloc_pd().unwrap().create_srq(8, 1).map(drop), Err(Error::Unsupported(_))));
        return;
    }
    const SLOT: usize = 4096;
    let caps = QueuePairCaps { max_send_wr: 16, max_recv_wr: 1, max_sge: 2 };
    let (pa, pb) = (lab.a.alloc_pd().unwrap(), lab.b.alloc_pd().unwrap());
    let (ca, cb) = (lab.a.create_cq(64).unwrap(), lab.b.create_cq(3 * 16 + 8).unwrap());
    let (from, to) = (Arc::new(Buffer::new(SIZE).unwrap()), Arc::new(Buffer::new(SIZE).unwrap()));
    let (ma, mb) = (pa.register(&from, all()).unwrap(), pb.register(&to, all()).unwrap());
    let srq = pb.create_srq(8, 2).unwrap();
    let receive = |slot: u64| {
        let at = slot as usize * SLOT;
        // In two elements.
        srq.post_recv(&RecvRequest { wr_id: 100 + slot, sges: &[mb.sge(at, 10), mb.sge(at + 10, SLOT as u32 - 10)] })
    };
    let too_many = [mb.sge(0, 1); 3];
    assert!(matches!(srq.post_recv(&RecvRequest { wr_id: 0, sges: &too_many }), Err(Error::Limit { .. })));
    (0..8).for_each(|slot| receive(slot).unwrap());
    assert!(matches!(receive(8), Err(Error::QueueFull(_))));
    let pairs: Vec<(QueuePair, QueuePair)> = (0..3)
        .map(|_| {
            let ours = pb.create_qp_with_srq(&cb, &cb, caps, &srq).unwrap();
            let theirs = pa.create_qp(&ca, &ca, caps).unwrap();
            lab.connect(&theirs, &ours, &ConnectParams::default());
            (theirs, ours)
        })
        .collect();
    // Room for the shared queue's receives has been kept once.
    assert!(pb.create_qp_with_srq(&cb, &cb, caps, &srq).is_err());
    let own = pairs[0].1.post_recv(&RecvRequest { wr_id: 0, sges: &[] });
    assert!(matches!(own, Err(Error::Unsupported(_))), "{own:?}");
    let elsewhere = lab.b.alloc_pd().unwrap();
    assert!(elsewhere.create_qp_with_srq(&cb, &cb, caps, &srq).is_err());

    let (mut sent, mut got) = (Vec::new(), Vec::new());
    let mut round = |which: &[usize], number: u8| {
        for (i, &pair) in which.iter().enumerate() {
            let words: Vec<u8> = (0..3000 + i).map(|n| n as u8 ^ number.wrapping_mul(i as u8 + 7)).collect();
            from.write(i * SLOT, &words);
            let sges = [ma.sge(i * SLOT, words.len() as u32)];
            let op = SendRequest { wr_id: 7, op: send(), payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED };
            pairs[pair].0.post_send(&op).unwrap();
        }
        lab.until("the messages", || {
            ca.poll(&mut sent, 64);
            cb.poll(&mut got, 64);
            sent.len() == which.len() && got.len() == which.len()
        });
        for (i, &pair) in which.iter().enumerate() {
            // Those of one connection come in order; lengths tell which is which.
            let wc = got.iter().find(|wc| wc.len as usize == 3000 + i).expect("a message of that length");
            assert_eq!((wc.status, wc.op, wc.qp_num), (Status::Success, CompletionOp::Recv, pairs[pair].1.number()));
            let mut words = vec![0; wc.len as usize];
            to.read((wc.wr_id - 100) as usize * SLOT, &mut words);
            assert!(words.iter().enumerate().all(|(n, w)| *w == n as u8 ^ number.wrapping_mul(i as u8 + 7)));
        }
        assert!(sent.drain(..).all(|wc| wc.status == Status::Success));
        got.drain(..).for_each(|wc| receive(wc.wr_id - 100).unwrap());
    };
    round(&[0, 1, 2, 0, 0, 1, 0, 0], 1);
    round(&[2, 2, 2, 2, 2, 2, 2, 2], 2);
    round(&[1], 3);
    // The end of one connection takes nothing from the others.
    pairs[1].0.disconnect();
    lab.until("the end of one", || pairs[1].1.error().is_some());
    let mut rest = Vec::new();
    lab.until("silence", || cb.poll(&mut rest, 8) == 0);
    assert!(rest.is_empty(), "{rest:?}");
    for number in 4..10 {
        round(&[0, 2, 0, 2, 2, 2, 2, 0], number);
    }
}

/// A queue pair that is gone leaves its share of a shared queue behind.
pub(crate) fn shared_receives_outlive_who_took_them(lab: &Lab) {
    const RECEIVES: u64 = 4;
    if lab.b.attributes().max_srq_wr == 0 {
        return;
    }
    let caps = QueuePairCaps { max_send_wr: 16, max_recv_wr: 1, max_sge: 1 };
    let (pa, pb) = (lab.a.alloc_pd().unwrap(), lab.b.alloc_pd().unwrap());
    let (ca, cb) = (lab.a.create_cq(64).unwrap(), lab.b.create_cq(64).unwrap());
    let buffer = Arc::new(Buffer::new(SIZE).unwrap());
    let (ma, mb) = (pa.register(&buffer, all()).unwrap(), pb.register(&buffer, all()).unwrap());
    let srq = pb.create_srq(RECEIVES as u32, 1).unwrap();
    let receive = |id: u64| srq.post_recv(&RecvRequest { wr_id: id, sges: &[mb.sge(id as usize * 64, 64)] });
    (0..RECEIVES).for_each(|id| receive(id).unwrap());
    let (mut sent, mut got) = (Vec::new(), Vec::new());
    for _ in 0..3 * RECEIVES {
        let ours = pb.create_qp_with_srq(&cb, &cb, caps, &srq).unwrap();
        let theirs = pa.create_qp(&ca, &ca, caps).unwrap();
        lab.connect(&theirs, &ours, &ConnectParams::default());
        let sges = [ma.sge(SIZE - 64, 64)];
        let op = SendRequest { wr_id: 7, op: send(), payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED };
        theirs.post_send(&op).unwrap();
        lab.until("the message", || ca.poll(&mut sent, 64) > 0);
        theirs.disconnect();
        lab.until("the end", || ours.error().is_some());
        drop(ours);
        lab.until("the receive", || cb.poll(&mut got, 64) > 0);
        got.drain(..).for_each(|wc| receive(wc.wr_id).unwrap());
        assert!(matches!(receive(0), Err(Error::QueueFull(_))));
    }
}

pub(crate) fn receiver_not_ready(lab: &Lab) {
    let (mut a, b) = lab.pair();
    a.recv(7, 0, 1);
    a.post(1, send(), &[a.mr.sge(0, 8)]).unwrap();
    lab.disconnected(&b);
    lab.refused_by_peer(&a);
    assert_eq!(lab.completion(&mut a, 7).status, Status::Flushed);
}

pub(crate) fn message_longer_than_receive(lab: &Lab) {
    let (a, mut b) = lab.pair();
    b.fill(11);
    let before = b.bytes(100, 1000);
    b.recv(1, 0, 100);
    b.recv(2, 0, 100);
    a.post(1, send(), &[a.mr.sge(0, 101)]).unwrap();
    let status = lab.completion(&mut b, 1).status;
    assert!(status == Status::LocalLength || (is_verbs(&b) && status != Status::Success), "{status:?}");
    assert_eq!(lab.completion(&mut b, 2).status, Status::Flushed);
    assert!(b.bytes(100, 1000) == before);
    lab.disconnected(&a);
}

pub(crate) fn limits(lab: &Lab) {
    let (a, _b) = lab.pair();
    let many = vec![a.mr.sge(0, 1); 5];
    assert!(matches!(a.post(1, send(), &many), Err(Error::Limit { limit: 4, .. })));
    let cq = a.device.create_cq(100).unwrap();
    let caps = |s, r| QueuePairCaps { max_send_wr: s, max_recv_wr: r, max_sge: 1 };
    assert!(a.pd.create_qp(&cq, &cq, caps(60, 60)).is_err(), "the completion queue could overflow");
    let qp = a.pd.create_qp(&cq, &cq, caps(50, 50)).unwrap();
    assert!(a.pd.create_qp(&cq, &cq, caps(1, 0)).is_err());
    drop(qp);
    assert!(a.pd.create_qp(&cq, &cq, caps(1, 0)).is_ok(), "room is given back");
    assert!(a.pd.create_qp(&cq, &cq, caps(u32::MAX, 1)).is_err());
    let params = ConnectParams { private_data: vec![0; 600], ..ConnectParams::default() };
    let qp = a.pd.create_qp(&cq, &cq, caps(1, 1)).unwrap();
    assert!(matches!(qp.connect(lab.addr(), &params), Err(Error::Limit { .. })));
    assert!(matches!(a.qp.connect(lab.addr(), &ConnectParams::default()), Err(Error::State { .. })));
}

pub(crate) fn queue_full(lab: &Lab) {
    let (mut a, b) = lab.pair();
    for i in 0..128 {
        b.recv(i, 0, 8);
    }
    let sge = [b.mr.sge(0, 8)];
    assert!(matches!(b.qp.post_recv(&RecvRequest { wr_id: 1, sges: &sge }), Err(Error::QueueFull(_))));
    let mut posted = 0;
    while a.post(posted, SendOp::Read { remote: b.mr.remote(0) }, &[a.mr.sge(0, 8)]).is_ok() {
        posted += 1;
        assert!(posted <= 128, "the queue has a limit");
    }
    for id in 0..posted {
        lab.ok(&mut a, id);
    }
    a.post(0, send(), &[]).unwrap();
}
