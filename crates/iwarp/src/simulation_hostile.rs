//! Peers that break rules which a first reading overlooks, and memory that does not stand still.

use crate::connection::Side;
use crate::ddp::queue;
use crate::rdmap::Opcode;
use crate::simulation::{End, Liar, agreement, feed, pair, post_receive, settle, untagged, victim};
use std::collections::VecDeque;
use thruway_rdma_types::Access;
use thruway_rdma_types::{RecvRequest, RemoteAddr, SendOp, Status};

/// Bytes that stand for what a peer must not see.
const SECRET: u8 = 0x5e;

fn plain_pair(max_ulpdu: u16) -> (End, End) {
    let end = |initiator| End::new(agreement(true, false, false, None), initiator, max_ulpdu);
    (end(true), end(false))
}

/// Places at which a run of secret bytes, no checksum that looks like one, is on the wire.
fn secrets(wire: &VecDeque<u8>) -> usize {
    let bytes: Vec<u8> = wire.iter().copied().collect();
    bytes.windows(16).filter(|run| run.iter().all(|byte| *byte == SECRET)).count()
}

#[test]
fn a_terminate_in_two_segments_is_refused() {
    let (mut end, mut liar) = victim();
    for (mo, last) in [(0, false), (60, true)] {
        let part = liar.fpdu(untagged(Opcode::Terminate, queue::TERMINATE, 1, mo, last), &[0; 60]);
        feed(&mut end, &part);
    }
    assert!(end.failure().is_some(), "told as a fault of the peer's");
}

#[test]
fn a_message_does_not_change_its_kind_between_segments() {
    let (mut end, mut liar) = victim();
    post_receive(&mut end, 64);
    for (opcode, mo, last) in [(Opcode::Send, 0, false), (Opcode::SendInvalidate, 8, true)] {
        let part = liar.fpdu(untagged(opcode, queue::SEND, 1, mo, last), &[0; 8]);
        feed(&mut end, &part);
    }
    assert!(end.failure().is_some());
    assert!(end.done.iter().all(|(_, wc)| wc.status != Status::Success));
}

#[test]
fn nothing_is_read_after_a_right_has_been_revoked() {
    const LEN: usize = 1 << 20;
    for revoke_region in [false, true] {
        let (mut a, mut b) = plain_pair(1442);
        b.buffer.write(0, &vec![0x11; LEN]);
        let window = b.table.bind(Some(b.connection.stream()), &b.region, 0, LEN, Access::REMOTE_READ).unwrap();
        let rkey = if revoke_region { b.region.stag() } else { window.stag() };
        for id in 0..3 {
            a.post(id, SendOp::Read { remote: RemoteAddr { addr: 0, rkey } }, &[a.sge(0, LEN)]);
        }
        while a.transmit(&mut b.wire, 1 << 20) {}
        while b.receive(1 << 20) {}
        assert_eq!(b.failure(), None);
        // The peer stalls after a little, and the memory finds another use.
        b.transmit(&mut a.wire, 1000);
        b.table.deregister(if revoke_region { &b.region } else { &window });
        b.buffer.write(0, &vec![SECRET; LEN]);
        while b.transmit(&mut a.wire, 1 << 20) {}
        assert_eq!(secrets(&a.wire), 0);
        assert!(b.failure().is_some(), "the peer learns that it has lost its right");
    }
}

#[test]
fn memory_of_a_flushed_request_is_not_sent_from() {
    let (mut a, mut b) = plain_pair(u16::MAX);
    b.buffer.write(0, &vec![0x11; 65_000]);
    // The peer speaks first.
    a.post(0, SendOp::Write { remote: b.remote(500_000), immediate: None }, &[a.sge(0, 8)]);
    while a.transmit(&mut b.wire, 1 << 20) {}
    while b.receive(1 << 20) {}
    b.post(7, SendOp::Write { remote: a.remote(0), immediate: None }, &[b.sge(0, 65_000)]);
    b.transmit(&mut a.wire, 100);
    let mut liar = Liar { position: 0 };
    let bad = liar.fpdu(untagged(Opcode::Send, 9, 1, 0, true), &[1; 8]);
    feed(&mut b, &bad);
    assert!(b.failure().is_some());
    assert!(b.done.iter().any(|(_, wc)| wc.wr_id == 7), "the consumer has its memory back");
    b.buffer.write(0, &vec![SECRET; 65_000]);
    while b.transmit(&mut a.wire, 1 << 20) {}
    assert_eq!(secrets(&a.wire), 0);
    // What was begun is finished nevertheless, so that the peer can read the Terminate behind it.
    while a.receive(1 << 20) {}
    assert!(
        matches!(a.connection.failure, Some(thruway_rdma_types::ConnectionError::Terminated(_))),
        "{:?}",
        a.connection.failure
    );
}

#[test]
fn nothing_succeeds_behind_what_failed() {
    let (mut end, _) = victim();
    end.post(1, SendOp::Read { remote: RemoteAddr { addr: 0, rkey: 1 } }, &[end.sge(1000, 100)]);
    end.post(2, SendOp::Write { remote: RemoteAddr { addr: 0, rkey: 1 }, immediate: None }, &[end.sge(0, 100)]);
    let mut out = VecDeque::new();
    while end.transmit(&mut out, 1 << 20) {}
    end.connection.rx_eof();
    end.done.append(&mut end.connection.completions);
    let statuses: Vec<_> = end.done.iter().map(|(_, wc)| (wc.wr_id, wc.status)).collect();
    assert_eq!(statuses, [(1, Status::ConnectionLost), (2, Status::Flushed)]);
}

/// RFC 5040 7.2, RFC 5041 8.2: layer and type, code.
#[test]
fn what_a_peers_terminate_says_is_what_the_oldest_request_ends_with() {
    let status_of = |kind: u8, code: u8| {
        let (mut end, mut liar) = victim();
        for id in [1, 2] {
            end.post(id, SendOp::Read { remote: RemoteAddr { addr: 0, rkey: 1 } }, &[end.sge(1000, 100)]);
        }
        while end.transmit(&mut VecDeque::new(), 1 << 20) {}
        let part = liar.fpdu(untagged(Opcode::Terminate, queue::TERMINATE, 1, 0, true), &[kind, code, 0, 0]);
        feed(&mut end, &part);
        let statuses: Vec<_> = end.done.iter().map(|(_, wc)| wc.status).collect();
        assert_eq!(statuses[1..], [Status::Flushed]);
        statuses[0]
    };
    for (kind, code, status) in [
        (0x12, 0x02, Status::RemoteNoReceive),
        (0x12, 0x05, Status::RemoteOperation),
        (0x01, 0x00, Status::RemoteAccess),
        (0x11, 0x00, Status::RemoteAccess),
        (0x02, 0x05, Status::RemoteOperation),
        (0x20, 0x01, Status::RemoteOperation),
    ] {
        assert_eq!(status_of(kind, code), status, "{kind:#x} {code:#x}");
    }
}

/// A connection that has failed is closed when there is nothing left to transmit: not before its Terminate has gone.
#[test]
fn nothing_is_left_to_transmit_only_when_all_has_gone() {
    for taken_before in 0..120 {
        let (mut end, mut liar) = victim();
        end.post(1, SendOp::Write { remote: RemoteAddr { addr: 0, rkey: 1 }, immediate: None }, &[end.sge(0, 60)]);
        let mut wire = VecDeque::new();
        (0..taken_before).for_each(|_| _ = end.transmit(&mut wire, 1));
        let part = liar.fpdu(untagged(Opcode::Terminate, 7, 1, 0, true), &[0; 4]);
        feed(&mut end, &part);
        assert!(end.failure().is_some());
        let mut is_idle = false;
        while end.transmit(&mut wire, 1) {
            assert!(!is_idle, "a byte goes after the last");
            is_idle = end.connection.tx_idle();
        }
        assert!(is_idle && wire.len() > 20, "the Terminate has gone");
    }
}

#[test]
fn reads_of_a_peer_do_not_starve_our_sends() {
    let (mut a, mut b) = plain_pair(u16::MAX);
    post_receive(&mut a, 64);
    let mut id = 10;
    for round in 0..400 {
        // Four reads of 256 KiB are always on their way, and the network takes 64 KiB at a time.
        while a.connection.outstanding.len() + usize::from(a.connection.sq.next_unstarted().is_some()) < 4 {
            a.post(id, SendOp::Read { remote: b.remote(0) }, &[a.sge(500_000, 256 << 10)]);
            id += 1;
            while a.transmit(&mut b.wire, 1 << 20) {}
        }
        while b.receive(1 << 20) {}
        if round == 10 {
            b.post(1, SendOp::Send { invalidate: None }, &[b.sge(0, 8)]);
        }
        b.transmit(&mut a.wire, 64 << 10);
        while a.receive(1 << 20) {}
        assert_eq!((&a.connection.failure, &b.connection.failure), (&None, &None));
        if a.done.iter().any(|(side, _)| *side == Side::Recv) {
            return;
        }
        a.done.clear();
    }
    panic!("the send was never sent");
}

#[test]
fn a_peer_does_not_revoke_a_registration() {
    let (mut a, mut b, mut rng) = pair(11);
    post_receive(&mut b, 64);
    let pool = b.region.stag();
    a.post(2, SendOp::Send { invalidate: Some(pool) }, &[a.sge(0, 8)]);
    settle(&mut a, &mut b, &mut rng, 5000);
    assert!(b.region.is_valid() && b.failure().is_some());
}

#[test]
fn what_was_queued_before_the_peer_closed_still_goes() {
    let (mut a, mut b) = plain_pair(1442);
    // The peer has spoken, and has closed its half.
    a.post(1, SendOp::Write { remote: b.remote(0), immediate: None }, &[a.sge(0, 8)]);
    while a.transmit(&mut b.wire, 1 << 20) {}
    while b.receive(1 << 20) {}
    b.post(1, SendOp::Write { remote: a.remote(0), immediate: None }, &[b.sge(0, 1 << 20)]);
    b.transmit(&mut a.wire, 1000);
    b.connection.rx_eof();
    assert_eq!(b.connection.failure, None);
    while b.transmit(&mut a.wire, 1 << 20) {}
    b.done.append(&mut b.connection.completions);
    assert!(b.done.iter().any(|(_, wc)| wc.wr_id == 1 && wc.status == Status::Success));
    assert!(b.connection.is_over());
    let sge = b.sge(0, 8);
    assert!(b.connection.post_recv(&RecvRequest { wr_id: 2, sges: &[sge] }).is_err(), "nothing more can come");
}
