//! What goes the short way, beside what must not.

use crate::connection::Posted;
use crate::ddp::queue;
use crate::mpa::ReadyToReceive;
use crate::rdmap::Opcode;
use crate::simulation::{End, Liar, agreement, feed, post_receive, untagged, victim};
use crate::terminate::DdpUntagged;
use std::sync::Arc;
use thruway_memory::Buffer;
use thruway_rdma_types::{Access, ConnectionError, Error, Owner, Payload, SendFlags, SendOp, SendRequest, Sge, Status};

const SEND: SendOp = SendOp::Send { invalidate: None };

fn plain_pair() -> (End, End) {
    let end = |initiator| End::new(agreement(true, false, false, None), initiator, u16::MAX);
    (end(true), end(false))
}

/// Posts on `from`, and lets the transport take `most` bytes if they go the short way.
fn post_short(from: &mut End, to: &mut End, sge: Sge, flags: SendFlags, most: usize) -> Result<Posted, Error> {
    let request = SendRequest { wr_id: 5, op: SEND, payload: Payload::Sges(&[sge]), flags };
    let posted = from.connection.post_short(&request, |bytes| {
        let taken = bytes.len().min(most);
        to.wire.extend(&bytes[..taken]);
        taken
    });
    from.done.append(&mut from.connection.completions);
    posted
}

fn deliver(from: &mut End, to: &mut End) {
    while from.transmit(&mut to.wire, 1 << 20) {}
    while to.receive(1 << 20) {}
}

/// Has the peer of `end` break a rule.
fn offend(end: &mut End) {
    let bad = Liar { position: 0 }.fpdu(untagged(Opcode::Send, 9, 1, 0, true), &[1; 8]);
    feed(end, &bad);
    assert!(end.failure().is_some());
}

#[test]
fn who_has_accepted_says_nothing_before_the_other_end_has() {
    let rtr = Some(ReadyToReceive::Write);
    let end = |initiator| End::new(agreement(true, false, false, rtr), initiator, u16::MAX);
    let (mut a, mut b) = (end(true), end(false));
    post_receive(&mut a, 64);
    let sge = b.sge(0, 8);
    assert_eq!(post_short(&mut b, &mut a, sge, SendFlags::SIGNALED, 1000).unwrap(), Posted::Queued);
    assert!(a.wire.is_empty());
    deliver(&mut b, &mut a);
    assert!(a.done.is_empty());
    deliver(&mut a, &mut b);
    deliver(&mut b, &mut a);
    assert_eq!(a.done.len(), 1);
}

#[test]
fn what_is_fenced_waits_for_a_read() {
    let (mut a, mut b) = plain_pair();
    post_receive(&mut b, 64);
    a.post(1, SendOp::Read { remote: b.remote(0) }, &[a.sge(0, 8)]);
    deliver(&mut a, &mut b);
    let sge = a.sge(0, 8);
    let flags = SendFlags::SIGNALED | SendFlags::FENCE;
    assert_eq!(post_short(&mut a, &mut b, sge, flags, 1000).unwrap(), Posted::Queued);
    deliver(&mut a, &mut b);
    assert!(b.done.is_empty());
    deliver(&mut b, &mut a);
    deliver(&mut a, &mut b);
    assert_eq!(b.done.len(), 1);
}

#[test]
fn a_terminate_follows_what_has_been_sent_in_whole_or_in_part() {
    for most in [0, 1, 30, 1000] {
        let (mut a, mut b) = plain_pair();
        post_receive(&mut b, 64);
        a.fill(1);
        let sge = a.sge(0, 32);
        let posted = post_short(&mut a, &mut b, sge, SendFlags::SIGNALED, most).unwrap();
        assert_eq!(posted, if most == 1000 { Posted::Sent } else { Posted::Queued });
        offend(&mut a);
        deliver(&mut a, &mut b);
        assert!(matches!(b.connection.failure, Some(ConnectionError::Terminated(_))), "{:?}", b.connection.failure);
        // What has not been begun is not sent any more.
        let received = b.done.iter().any(|(_, wc)| wc.status == Status::Success);
        assert_eq!(received, most > 0, "{most} bytes");
        if received {
            assert_eq!(b.bytes(0, 32), a.bytes(0, 32));
        }
    }
}

#[test]
fn each_message_is_of_its_own_region_and_of_none_that_is_no_more() {
    let (mut a, mut b) = plain_pair();
    let other = Arc::new(Buffer::new(4096).unwrap());
    let (at, owner) = (other.as_ptr(), Arc::clone(&other) as Owner);
    // SAFETY: the buffer is the owner of its own memory.
    let second = unsafe { a.table.register(7, at, 4096, 0, Access::empty(), owner) }.unwrap();
    a.buffer.write(0, &[1; 32]);
    other.write(0, &[2; 32]);
    let sges = [a.sge(0, 32), Sge { lkey: second.stag(), ..a.sge(0, 32) }];
    for (sge, byte) in [(sges[0], 1), (sges[1], 2), (sges[1], 2), (sges[0], 1)] {
        post_receive(&mut b, 64);
        assert_eq!(post_short(&mut a, &mut b, sge, SendFlags::SIGNALED, 1000).unwrap(), Posted::Sent);
        deliver(&mut a, &mut b);
        assert_eq!(b.bytes(0, 32), [byte; 32]);
    }
    let region = Arc::clone(&a.region);
    a.table.deregister(&region);
    post_receive(&mut b, 64);
    let gone = post_short(&mut a, &mut b, sges[0], SendFlags::SIGNALED, 1000);
    assert!(matches!(gone, Err(Error::LocalProtection { .. })), "{gone:?}");
    assert_eq!(post_short(&mut a, &mut b, sges[1], SendFlags::SIGNALED, 1000).unwrap(), Posted::Sent);
    deliver(&mut a, &mut b);
    assert_eq!(b.bytes(0, 32), [2; 32]);
    // Receives as well.
    let region = Arc::clone(&b.region);
    b.table.deregister(&region);
    let sge = b.sge(0, 64);
    let gone = b.connection.post_recv(&thruway_rdma_types::RecvRequest { wr_id: 1, sges: &[sge] });
    assert!(matches!(gone, Err(Error::LocalProtection { .. })), "{gone:?}");
}

#[test]
fn a_whole_message_does_not_come_in_the_middle_of_another() {
    let (mut end, mut liar) = victim();
    post_receive(&mut end, 64);
    for last in [false, true] {
        let part = liar.fpdu(untagged(Opcode::Send, queue::SEND, 1, 0, last), &[0; 8]);
        feed(&mut end, &part);
    }
    assert_eq!(end.failure(), Some(crate::terminate::TerminateCode::from(DdpUntagged::InvalidMo).into()));
}
