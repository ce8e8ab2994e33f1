//! What goes the short way, beside what must not.

use crate::connection::{Connection, ConnectionConfig, Posted, SharedReceives, Side};
use crate::ddp::{Header, queue};
use crate::mpa::ReadyToReceive;
use crate::rdmap::Opcode;
use crate::regions::{Region, RegionTable};
use crate::simulation::{End, Liar, agreement, feed, post_receive, untagged, victim};
use crate::terminate::DdpUntagged;
use fastrand::Rng;
use std::collections::VecDeque;
use std::sync::Arc;
use thruway_memory::Buffer;
use thruway_rdma_types::*;
use thruway_rdma_types::{Access, Owner};

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
    let gone = b.connection.post_recv(&RecvRequest { wr_id: 1, sges: &[sge] });
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

/// What a stream from the peer leads to.
#[derive(PartialEq, Debug)]
struct Outcome {
    done: Vec<(Side, WorkCompletion)>,
    failure: Option<ConnectionError>,
    answer: VecDeque<u8>,
    memory: Vec<u8>,
}

/// One byte at a time, nothing goes the short way.
#[test]
fn a_stream_leads_to_the_same_however_it_is_cut() {
    let any_rtr = [None, Some(ReadyToReceive::Write), Some(ReadyToReceive::Send)];
    let mut completed = 0;
    for seed in 0..700 {
        let mut rng = Rng::with_seed(seed);
        let (crc, initiator, rtr) = (rng.bool(), rng.bool(), any_rtr[rng.usize(..3)]);
        let receives: Vec<_> = (0..rng.usize(..6)).map(|i| (i * 1024, rng.usize(..200), rng.usize(..200))).collect();
        let stream = stream_with_a_lie(&mut rng);
        let outcome = |cut: &mut dyn FnMut() -> usize| {
            let mut end = End::new(agreement(crc, false, false, rtr), initiator, 1442);
            for (id, &(at, one, two)) in receives.iter().enumerate() {
                let sges = [end.sge(at, one), end.sge(at + one, two)];
                end.connection.post_recv(&RecvRequest { wr_id: id as u64, sges: &sges }).unwrap();
            }
            end.wire.extend(&stream);
            while end.receive(cut()) {}
            let mut answer = VecDeque::new();
            while end.transmit(&mut answer, 1 << 20) {}
            end.done.append(&mut end.connection.completions);
            let (failure, memory) = (end.connection.failure.clone(), end.bytes(0, 1 << 16));
            Outcome { done: end.done, failure, answer, memory }
        };
        let by_bytes = outcome(&mut || 1);
        assert!(outcome(&mut || 1 << 20) == by_bytes, "seed {seed}, whole");
        assert!(outcome(&mut || rng.usize(1..400)) == by_bytes, "seed {seed}, cut");
        completed += by_bytes.done.len();
    }
    assert!(completed > 700, "most of it is in order: {completed}");
}

/// Some messages; about one in five of them breaks a rule, and the last may be cut off.
fn stream_with_a_lie(rng: &mut Rng) -> Vec<u8> {
    use Opcode::{Immediate, Send, SendInvalidate, SendSolicited, Write};
    let mut liar = Liar { position: 0 };
    let (mut msn, mut mo) = (1, 0);
    let mut stream = Vec::new();
    for _ in 0..rng.usize(1..8) {
        let mut payload = vec![0; if rng.u8(..4) == 0 { 0 } else { rng.usize(..300) }];
        rng.fill(&mut payload);
        let opcode = [Send, Send, SendSolicited, SendInvalidate, Immediate, Write][rng.usize(..6)];
        if opcode == Immediate {
            payload = vec![1; 8];
        }
        let (last, lie) = (rng.u8(..6) != 0, rng.u8(..40));
        let header = if opcode == Write {
            Header::Tagged { opcode, last, stag: 0x101, to: 0x8000 + rng.u64(..1000) }
        } else {
            let header = Header::Untagged {
                opcode,
                last,
                invalidate: if lie == 1 { 7 } else { 0 },
                qn: if lie == 2 { rng.u32(..6) } else { 0 },
                msn: if lie == 3 { rng.u32(..4) } else { msn },
                mo: if lie == 4 { rng.u32(..300) } else { mo },
            };
            (msn, mo) = if last { (msn + 1, 0) } else { (msn, mo + payload.len() as u32) };
            header
        };
        let mut fpdu = liar.fpdu(header, &payload);
        match lie {
            5 => {
                let at = rng.usize(..fpdu.len());
                fpdu[at] ^= 1 << rng.u8(..8);
            }
            // Reserved bits.
            6 => fpdu[2] |= 0x3c,
            7 => fpdu[3] |= 0x30,
            _ => {}
        }
        stream.extend(fpdu);
    }
    if rng.u8(..5) == 0 {
        stream.truncate(rng.usize(..stream.len()));
    }
    stream
}

#[test]
fn requests_become_the_same_bytes_by_either_way() {
    for seed in 0..700 {
        let run = |is_short: bool| {
            let mut rng = Rng::with_seed(seed);
            let (crc, markers) = (rng.bool(), rng.bool());
            let rtr = [None, Some(ReadyToReceive::Write), Some(ReadyToReceive::Send)][rng.usize(..3)];
            let max_ulpdu = [128, 200, 300, 1442][rng.usize(..4)];
            let mut end = End::new(agreement(crc, markers, false, rtr), true, max_ulpdu);
            end.fill(seed);
            let (mut wire, mut results) = (VecDeque::new(), Vec::new());
            for wr_id in 0..12 {
                let (len, at) = (rng.usize(..320), rng.usize(..1000));
                let cut = rng.usize(..=len);
                let lkey = if rng.u8(..30) == 0 { 5 } else { end.region.stag() };
                let sges = [end.sge(at, cut), Sge { lkey, ..end.sge(at + 777, len - cut) }];
                let remote = RemoteAddr { addr: 4, rkey: 5 };
                let op = match rng.u8(..5) {
                    0 => SendOp::Send { invalidate: Some(9) },
                    1 => SendOp::Write { remote, immediate: None },
                    2 => SendOp::Write { remote, immediate: Some(3) },
                    _ => SEND,
                };
                let mut flags = SendFlags::empty();
                for flag in [SendFlags::SIGNALED, SendFlags::SOLICITED, SendFlags::FENCE] {
                    flags.set(flag, rng.bool());
                }
                let inline = vec![wr_id as u8; rng.usize(..600)];
                let payload = if rng.u8(..3) == 0 { Payload::Inline(&inline) } else { Payload::Sges(&sges) };
                let request = SendRequest { wr_id, op, payload, flags };
                let most = rng.usize(..400);
                let result = match is_short {
                    true => end.connection.post_short(&request, |bytes| {
                        let taken = bytes.len().min(most);
                        wire.extend(&bytes[..taken]);
                        taken
                    }),
                    false => end.connection.post_send(&request).map(|()| Posted::Queued),
                };
                results.push(result.map(drop).map_err(|error| error.to_string()));
                end.done.append(&mut end.connection.completions);
                if rng.bool() {
                    while end.transmit(&mut wire, 1 << 20) {}
                }
            }
            while end.transmit(&mut wire, 1 << 20) {}
            (wire, end.done, results)
        };
        assert!(run(true) == run(false), "seed {seed}");
    }
}

/// Three regions of a table, each with its own buffer.
fn three_regions(table: &RegionTable) -> (Vec<Arc<Buffer>>, Vec<Arc<Region>>) {
    let buffers: Vec<_> = (0..3).map(|_| Arc::new(Buffer::new(4096).unwrap())).collect();
    let register = |buffer: &Arc<Buffer>| {
        let owner = Arc::clone(buffer) as Owner;
        // SAFETY: the buffer is the owner of its own memory.
        unsafe { table.register(7, buffer.as_ptr(), 4096, 0, Access::LOCAL_WRITE, owner) }.unwrap()
    };
    let regions = buffers.iter().map(register).collect();
    (buffers, regions)
}

/// Deregisters them; how often the memory of each is still held.
fn held((buffers, regions): (Vec<Arc<Buffer>>, Vec<Arc<Region>>), table: &RegionTable) -> Vec<usize> {
    regions.iter().for_each(|region| table.deregister(region));
    drop(regions);
    buffers.iter().map(|buffer| Arc::strong_count(buffer) - 1).collect()
}

#[test]
fn one_region_received_into_is_kept_and_none_of_a_shared_queue() {
    let (mut a, mut b) = plain_pair();
    let (table, memory) = (Arc::clone(&b.table), three_regions(&b.table));
    for region in &memory.1 {
        let sges = [Sge { addr: 0, len: 64, lkey: region.stag() }];
        b.connection.post_recv(&RecvRequest { wr_id: 1, sges: &sges }).unwrap();
    }
    for _ in 0..3 {
        let sge = a.sge(0, 8);
        post_short(&mut a, &mut b, sge, SendFlags::SIGNALED, 1000).unwrap();
        deliver(&mut a, &mut b);
    }
    assert_eq!(held(memory, &table), [0, 0, 1]);

    let table = Arc::new(RegionTable::deterministic());
    let (memory, shared) = (three_regions(&table), Arc::new(SharedReceives::new(7, 100, 4)));
    let mut connection = Connection::new(ConnectionConfig {
        qp_num: 1,
        pd: 7,
        table: Arc::clone(&table),
        agreement: agreement(true, false, false, None),
        caps: QueuePairCaps { max_send_wr: 10, max_recv_wr: 0, max_sge: 4 },
        initiator: true,
        shared: Some(Arc::clone(&shared)),
        max_ulpdu: 1442,
    });
    let mut liar = Liar { position: 0 };
    for (region, msn) in memory.1.iter().zip(1..) {
        let sges = [Sge { addr: 0, len: 64, lkey: region.stag() }];
        shared.post(&table, &RecvRequest { wr_id: 1, sges: &sges }).unwrap();
        assert!(connection.rx_feed(&liar.fpdu(untagged(Opcode::Send, 0, msn, 0, true), &[1; 16])));
    }
    assert_eq!(connection.completions.len(), 3);
    assert_eq!(held(memory, &table), [0, 0, 0]);
}
