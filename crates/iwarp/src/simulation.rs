//! Two connections joined by a simulated TCP that delivers in arbitrary pieces, and peers that lie.
//!
//! The real protocol code runs; only the network is invented. Every run is a function of its seed.

use crate::IoVecs;
use crate::connection::{Connection, ConnectionConfig, Side};
use crate::ddp::{Header, queue};
use crate::mpa::{Agreement, ReadyToReceive};
use crate::rdmap::{AtomicOp, AtomicRequest, Opcode, ReadRequest};
use crate::regions::{Region, RegionTable};
use crate::terminate::{DdpTagged, DdpUntagged, Mpa, RdmaOperation, RdmaProtection, TerminateCode};
use fastrand::Rng;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;
use thruway_memory::Buffer;
use thruway_rdma_types::*;
use thruway_rdma_types::{Access, Owner};

const PD: u32 = 7;

pub(crate) struct End {
    pub connection: Connection,
    pub table: Arc<RegionTable>,
    pub buffer: Arc<Buffer>,
    pub region: Arc<Region>,
    /// On their way to this end.
    pub wire: VecDeque<u8>,
    pub done: Vec<(Side, WorkCompletion)>,
}

pub(crate) fn agreement(
    crc: bool,
    send_markers: bool,
    receive_markers: bool,
    rtr: Option<ReadyToReceive>,
) -> Agreement {
    Agreement {
        send_markers,
        receive_markers,
        crc,
        ird: 4,
        ord: 4,
        large_fpdu: true,
        extensions: true,
        rtr,
        revision: 2,
    }
}

const BUFFER: usize = 1 << 20;

impl End {
    pub(crate) fn new(agreement: Agreement, initiator: bool, max_ulpdu: u16) -> End {
        let table = Arc::new(RegionTable::deterministic());
        let buffer = Arc::new(Buffer::new(BUFFER).unwrap());
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        // SAFETY: the buffer is the owner of its own memory.
        let region =
            unsafe { table.register(PD, buffer.as_ptr(), BUFFER, 0, all, Arc::clone(&buffer) as Owner) }.unwrap();
        let caps = QueuePairCaps { max_send_wr: 1000, max_recv_wr: 1000, max_sge: 8 };
        let config = ConnectionConfig {
            qp_num: 1,
            pd: PD,
            table: Arc::clone(&table),
            agreement,
            caps,
            initiator,
            shared: None,
            max_ulpdu,
        };
        let connection = Connection::new(config);
        End { connection, table, buffer, region, wire: VecDeque::new(), done: Vec::new() }
    }

    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: offset as u64, len: len as u32, lkey: self.region.stag() }
    }

    pub(crate) fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { addr: offset as u64, rkey: self.region.stag() }
    }

    /// Lets the simulated kernel take some bytes.
    pub(crate) fn transmit(&mut self, to: &mut VecDeque<u8>, most: usize) -> bool {
        if !self.connection.tx_fill() {
            return false;
        }
        let mut iov = IoVecs::default();
        self.connection.tx_iovecs(&mut iov);
        let mut taken = 0;
        for v in iov.iter() {
            let n = v.iov_len.min(most - taken);
            // SAFETY: the connection vouches for its iovecs.
            to.extend(unsafe { std::slice::from_raw_parts(v.iov_base.cast::<u8>(), n) });
            taken += n;
        }
        self.connection.tx_advance(taken);
        self.done.append(&mut self.connection.completions);
        taken > 0
    }

    /// Delivers some bytes.
    pub(crate) fn receive(&mut self, most: usize) -> bool {
        if self.wire.is_empty() || self.connection.failure.is_some() {
            self.wire.clear();
            return false;
        }
        let mut iov = IoVecs::default();
        if !self.connection.rx_iovecs(&mut iov) {
            return false;
        }
        let mut given = 0;
        for v in iov.iter() {
            let n = v.iov_len.min(most - given).min(self.wire.len());
            for i in 0..n {
                let byte = self.wire.pop_front().unwrap();
                // SAFETY: as above.
                unsafe { v.iov_base.cast::<u8>().add(i).write(byte) };
            }
            given += n;
            if n < v.iov_len {
                break;
            }
        }
        self.connection.rx_received(given);
        self.done.append(&mut self.connection.completions);
        true
    }

    pub(crate) fn fill(&self, seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let bytes: Vec<u8> = (0..BUFFER).map(|_| rng.u64(..) as u8).collect();
        self.buffer.write(0, &bytes);
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.buffer.read(offset, &mut out);
        out
    }

    pub(crate) fn failure(&self) -> Option<ProtocolError> {
        match &self.connection.failure {
            Some(ConnectionError::Protocol(error)) => Some(error.clone()),
            _ => None,
        }
    }

    pub(crate) fn post(&mut self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.post_flags(wr_id, op, sges, SendFlags::SIGNALED);
    }

    pub(crate) fn post_flags(&mut self, wr_id: u64, op: SendOp, sges: &[Sge], flags: SendFlags) {
        self.connection.post_send(&SendRequest { wr_id, op, payload: Payload::Sges(sges), flags }).unwrap();
    }
}

/// Posts on `a`, by either way; what goes past the queues is taken in whole, in part, or not at all.
fn post_somehow(wr_id: u64, op: SendOp, sges: &[Sge], (a, b): (&mut End, &mut End), rng: &mut Rng) {
    if rng.bool() {
        return a.post(wr_id, op, sges);
    }
    let request = SendRequest { wr_id, op, payload: Payload::Sges(sges), flags: SendFlags::SIGNALED };
    let posted = a.connection.post_short(&request, |bytes| {
        let taken = [0, bytes.len(), rng.usize(..=bytes.len())][rng.usize(..3)];
        b.wire.extend(&bytes[..taken]);
        taken
    });
    posted.unwrap();
    a.done.append(&mut a.connection.completions);
}

/// Runs both ends until nothing moves.
pub(crate) fn settle(a: &mut End, b: &mut End, rng: &mut Rng, largest: u64) {
    loop {
        let mut moved = false;
        for _ in 0..4 {
            let n = 1 + rng.u64(..largest) as usize;
            moved |= match rng.u64(..4) {
                0 => a.transmit(&mut b.wire, n),
                1 => b.transmit(&mut a.wire, n),
                2 => a.receive(n),
                _ => b.receive(n),
            };
        }
        if !moved {
            let mut any = a.transmit(&mut b.wire, 1 << 20);
            any |= b.transmit(&mut a.wire, 1 << 20);
            any |= a.receive(1 << 20);
            any |= b.receive(1 << 20);
            if !any {
                return;
            }
        }
    }
}

pub(crate) fn pair(seed: u64) -> (End, End, Rng) {
    let mut rng = Rng::with_seed(seed);
    let crc = rng.u64(..2) == 0;
    let (ma, mb) = (rng.u64(..2) == 0, rng.u64(..2) == 0);
    let rtr = [None, Some(ReadyToReceive::Write), Some(ReadyToReceive::Send), Some(ReadyToReceive::Read)]
        [rng.u64(..4) as usize];
    let max = [128, 1442, 8940, u16::MAX][rng.u64(..4) as usize];
    let a = End::new(agreement(crc, mb, ma, rtr), true, max);
    let b = End::new(agreement(crc, ma, mb, rtr), false, max);
    a.fill(seed ^ 1);
    b.fill(seed ^ 2);
    (a, b, rng)
}

/// One end's half of the buffers is what it sends from, the other what it is sent to.
fn exercise(seed: u64) {
    let (mut a, mut b, mut rng) = pair(seed);
    let largest = [3, 700, 70_000, 1 << 20][rng.u64(..4) as usize];
    let half = BUFFER / 2;
    let mut expected_a = a.bytes(0, BUFFER);
    let mut expected_b = b.bytes(0, BUFFER);
    let mut expected_recv = Vec::new();
    let operations = 1 + rng.u64(..40);
    let mut recv_at = half + half / 2;
    for id in 0..operations {
        let len = match rng.u64(..4) {
            0 => 0,
            1 => rng.u64(..64) as usize,
            2 => rng.u64(..5000) as usize,
            _ => rng.u64(..60_000) as usize,
        };
        let from = rng.u64(..(half - len) as u64) as usize;
        let cut = if len > 0 { rng.u64(..len as u64) as usize } else { 0 };
        let sges = [a.sge(from, cut), a.sge(from + cut, len - cut)];
        match rng.u64(..5) {
            0 if recv_at + len < BUFFER => {
                b.connection
                    .post_recv(&RecvRequest {
                        wr_id: id,
                        sges: &[b.sge(recv_at, len / 2), b.sge(recv_at + len / 2, len - len / 2)],
                    })
                    .unwrap();
                expected_b[recv_at..recv_at + len].copy_from_slice(&expected_a[from..from + len]);
                recv_at += len;
                post_somehow(id, SendOp::Send { invalidate: None }, &sges, (&mut a, &mut b), &mut rng);
                expected_recv.push((id, len, None));
            }
            1 => {
                let at = half + rng.u64(..(half / 2 - len) as u64) as usize;
                expected_b[at..at + len].copy_from_slice(&expected_a[from..from + len]);
                post_somehow(
                    id,
                    SendOp::Write { remote: b.remote(at), immediate: None },
                    &sges,
                    (&mut a, &mut b),
                    &mut rng,
                );
            }
            2 => {
                let at = half + rng.u64(..(half / 2 - len) as u64) as usize;
                b.connection.post_recv(&RecvRequest { wr_id: id, sges: &[] }).unwrap();
                expected_b[at..at + len].copy_from_slice(&expected_a[from..from + len]);
                post_somehow(
                    id,
                    SendOp::Write { remote: b.remote(at), immediate: Some(id as u32) },
                    &sges,
                    (&mut a, &mut b),
                    &mut rng,
                );
                expected_recv.push((id, len, Some(id as u32)));
            }
            3 => {
                // From b's constant half to a's second half.
                let at = half + rng.u64(..(half - len) as u64) as usize;
                let source = rng.u64(..(half - len) as u64) as usize;
                let sinks = [a.sge(at, cut), a.sge(at + cut, len - cut)];
                post_somehow(id, SendOp::Read { remote: b.remote(source) }, &sinks, (&mut a, &mut b), &mut rng);
                expected_a[at..at + len].copy_from_slice(&expected_b[source..source + len]);
            }
            _ => {
                let word = half + half / 2 - 8;
                let at = half + (rng.u64(..(half / 8) as u64) as usize) * 8;
                let at = at.min(BUFFER - 8);
                let old = u64::from_ne_bytes(expected_b[word..word + 8].try_into().unwrap());
                let new = if rng.u64(..2) == 0 {
                    post_somehow(
                        id,
                        SendOp::FetchAdd { remote: b.remote(word), add: seed },
                        &[a.sge(at, 8)],
                        (&mut a, &mut b),
                        &mut rng,
                    );
                    old.wrapping_add(seed)
                } else {
                    let compare = if rng.u64(..2) == 0 { old } else { !old };
                    let swap = rng.u64(..);
                    post_somehow(
                        id,
                        SendOp::CompareSwap { remote: b.remote(word), compare, swap },
                        &[a.sge(at, 8)],
                        (&mut a, &mut b),
                        &mut rng,
                    );
                    if compare == old { swap } else { old }
                };
                expected_a[at..at + 8].copy_from_slice(&old.to_ne_bytes());
                expected_b[word..word + 8].copy_from_slice(&new.to_ne_bytes());
            }
        }
        // Reads and atomics may be overtaken by what follows; settle so that the model stays simple.
        settle(&mut a, &mut b, &mut rng, largest);
        let failures = (&a.connection.failure, &b.connection.failure);
        assert_eq!(failures, (&None, &None), "seed {seed}, request {id}, {:?}", a.connection.agreement);
    }
    settle(&mut a, &mut b, &mut rng, largest);
    assert_eq!(a.connection.failure, None, "seed {seed}");
    assert_eq!(b.connection.failure, None, "seed {seed}");
    assert!(a.bytes(0, BUFFER) == expected_a, "seed {seed}: initiator memory");
    assert!(b.bytes(0, BUFFER) == expected_b, "seed {seed}: responder memory");
    let recvs: Vec<_> = b.done.iter().map(|(_, wc)| (wc.wr_id, wc.len as usize, wc.immediate)).collect();
    assert_eq!(recvs, expected_recv, "seed {seed}");
    let sent: Vec<u64> = a.done.iter().filter(|(s, _)| *s == Side::Send).map(|(_, wc)| wc.wr_id).collect();
    let all_ok = a.done.iter().all(|(_, wc)| wc.status == Status::Success);
    assert!(all_ok && sent.windows(2).all(|w| w[0] < w[1]), "seed {seed}: completions in posting order");
}

#[test]
fn every_operation_survives_arbitrary_segmentation() {
    for seed in 0..400 {
        exercise(seed);
    }
}

#[test]
fn many_requests_at_once_complete_in_order() {
    for seed in 0..60 {
        let (mut a, mut b, mut rng) = pair(seed);
        for id in 0..200 {
            let len = rng.u64(..9000) as usize;
            match rng.u64(..3) {
                0 => post_somehow(
                    id,
                    SendOp::Write { remote: b.remote(BUFFER / 2), immediate: None },
                    &[a.sge(0, len)],
                    (&mut a, &mut b),
                    &mut rng,
                ),
                1 => post_somehow(
                    id,
                    SendOp::Read { remote: b.remote(0) },
                    &[a.sge(BUFFER / 2, len)],
                    (&mut a, &mut b),
                    &mut rng,
                ),
                _ => {
                    b.connection.post_recv(&RecvRequest { wr_id: id, sges: &[b.sge(BUFFER / 2, 9000)] }).unwrap();
                    post_somehow(id, SendOp::Send { invalidate: None }, &[a.sge(0, len)], (&mut a, &mut b), &mut rng);
                }
            }
        }
        settle(&mut a, &mut b, &mut rng, 50_000);
        let ids: Vec<u64> = a.done.iter().map(|(_, wc)| wc.wr_id).collect();
        assert_eq!(ids, (0..200).collect::<Vec<_>>(), "seed {seed}");
        assert!(a.done.iter().all(|(_, wc)| wc.status == Status::Success));
    }
}

#[test]
fn a_fenced_send_waits_for_the_read_before_it() {
    let (mut a, mut b, mut rng) = pair(3);
    settle(&mut a, &mut b, &mut rng, 100);
    a.post(1, SendOp::Read { remote: b.remote(0) }, &[a.sge(0, 5000)]);
    a.post_flags(
        2,
        SendOp::Write { remote: b.remote(0), immediate: None },
        &[a.sge(0, 8)],
        SendFlags::SIGNALED | SendFlags::FENCE,
    );
    while a.transmit(&mut b.wire, 1 << 20) {}
    assert_eq!(a.connection.sq.started, 1, "the write has not started");
    settle(&mut a, &mut b, &mut rng, 100_000);
    assert_eq!(a.done.len(), 2);
}

#[test]
fn no_more_reads_are_outstanding_than_agreed() {
    let (mut a, mut b, mut rng) = pair(5);
    for id in 0..50 {
        a.post(id, SendOp::Read { remote: b.remote(0) }, &[a.sge(0, 100)]);
    }
    settle(&mut a, &mut b, &mut Rng::with_seed(1), 100);
    let _ = &mut rng;
    assert_eq!(b.failure(), None);
    assert_eq!(a.done.len(), 50);
}

/// A peer that sends whatever it likes, with correct framing.
pub(crate) struct Liar {
    pub position: u64,
}

impl Liar {
    pub(crate) fn fpdu(&mut self, header: Header, payload: &[u8]) -> Vec<u8> {
        let mut head = [0; 18];
        let n = header.encode(&mut head);
        self.raw(&[&head[..n], payload].concat())
    }

    /// An FPDU around any ULPDU, with CRC.
    pub(crate) fn raw(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let mut out = (ulpdu.len() as u16).to_be_bytes().to_vec();
        out.extend_from_slice(ulpdu);
        while !out.len().is_multiple_of(4) {
            out.push(0);
        }
        let mut crc = crate::crc::RunningCrc::new(true);
        crc.update(&out);
        out.extend_from_slice(&crc.take());
        self.position += out.len() as u64;
        out
    }
}

pub(crate) fn victim() -> (End, Liar) {
    let end = End::new(agreement(true, false, false, None), true, 1442);
    (end, Liar { position: 0 })
}

pub(crate) fn feed(end: &mut End, bytes: &[u8]) {
    end.wire.extend(bytes);
    while end.receive(1 << 20) {}
}

pub(crate) fn untagged(opcode: Opcode, qn: u32, msn: u32, mo: u32, last: bool) -> Header {
    Header::Untagged { opcode, last, invalidate: 0, qn, msn, mo }
}

fn expect_terminate(mut end: End, wanted: impl Into<TerminateCode>) {
    let wanted = wanted.into();
    assert_eq!(end.failure(), Some(wanted.into()));
    let mut out = VecDeque::new();
    while end.transmit(&mut out, 1 << 20) {}
    let bytes: Vec<u8> = out.into();
    assert!(bytes.len() > 20, "a Terminate goes out");
    assert_eq!(Header::decode(&bytes[2..20]).unwrap(), untagged(Opcode::Terminate, queue::TERMINATE, 1, 0, true));
    assert_eq!(crate::terminate::decode(&bytes[20..bytes.len() - 4]), Some(wanted));
}

pub(crate) fn post_receive(end: &mut End, len: usize) {
    let sge = end.sge(0, len);
    end.connection.post_recv(&RecvRequest { wr_id: 1, sges: &[sge] }).unwrap();
}

#[test]
fn a_length_shorter_than_the_header_terminates() {
    // Regression: CVE-2026-64102 in Linux siw.
    for len in 0..14 {
        let (mut end, mut liar) = victim();
        let stag = end.region.stag();
        let mut head = [0; 18];
        Header::Tagged { opcode: Opcode::Write, last: true, stag, to: 0 }.encode(&mut head);
        let mut bytes = liar.raw(&head[..14]);
        bytes[..2].copy_from_slice(&(len as u16).to_be_bytes());
        feed(&mut end, &bytes);
        expect_terminate(end, RdmaOperation::CatastrophicStream);
    }
}

#[test]
fn a_read_response_past_its_sink_terminates_and_writes_nothing_there() {
    // Regression: CVE-2026-64268 in Linux siw: segments without Last that run past the sink.
    let (mut end, mut liar) = victim();
    end.fill(9);
    let before = end.bytes(0, BUFFER);
    end.post(1, SendOp::Read { remote: RemoteAddr { addr: 0, rkey: 1 } }, &[end.sge(1000, 100)]);
    let mut out = VecDeque::new();
    while end.transmit(&mut out, 1 << 20) {}
    let wire: Vec<u8> = out.into();
    let request = ReadRequest::decode(wire[20..48].try_into().unwrap());
    let response = |to: u64, last| Header::Tagged { opcode: Opcode::ReadResponse, last, stag: request.sink_stag, to };
    let one = liar.fpdu(response(request.sink_to, false), &[0xaa; 60]);
    feed(&mut end, &one);
    assert_eq!(end.failure(), None);
    let two = liar.fpdu(response(request.sink_to + 60, false), &[0xbb; 60]);
    feed(&mut end, &two);
    let after = end.bytes(0, BUFFER);
    assert!(after[1060..] == before[1060..] && after[..1000] == before[..1000]);
    expect_terminate(end, DdpTagged::BaseOrBounds);
}

#[test]
fn every_lie_about_a_read_response_terminates() {
    type Lie = fn(&mut ReadRequest, &mut usize, &mut bool);
    let lies: [(Lie, TerminateCode); 5] = [
        (|r, _, _| r.sink_stag ^= 1, DdpTagged::InvalidStag.into()),
        (|r, _, _| r.sink_to += 8, DdpTagged::BaseOrBounds.into()),
        (|_, len, last| (*len, *last) = (50, true), DdpTagged::BaseOrBounds.into()),
        (|_, _, last| *last = false, DdpTagged::BaseOrBounds.into()),
        (|_, len, _| *len = 101, DdpTagged::BaseOrBounds.into()),
    ];
    for (lie, wanted) in lies {
        let (mut end, mut liar) = victim();
        end.post(1, SendOp::Read { remote: RemoteAddr { addr: 0, rkey: 1 } }, &[end.sge(0, 100)]);
        let mut out = VecDeque::new();
        while end.transmit(&mut out, 1 << 20) {}
        let wire: Vec<u8> = out.into();
        let mut request = ReadRequest::decode(wire[20..48].try_into().unwrap());
        let (mut len, mut last) = (100, true);
        lie(&mut request, &mut len, &mut last);
        let header =
            Header::Tagged { opcode: Opcode::ReadResponse, last, stag: request.sink_stag, to: request.sink_to };
        let bytes = liar.fpdu(header, &vec![1; len]);
        feed(&mut end, &bytes);
        expect_terminate(end, wanted);
    }
    let (mut end, mut liar) = victim();
    let unasked = liar.fpdu(Header::Tagged { opcode: Opcode::ReadResponse, last: true, stag: 1, to: 0 }, &[1; 4]);
    feed(&mut end, &unasked);
    expect_terminate(end, RdmaOperation::UnexpectedOpcode);
}

#[test]
fn every_lie_about_sequence_and_queue_terminates() {
    let cases: [(Header, usize, TerminateCode); 8] = [
        (untagged(Opcode::Send, queue::SEND, 2, 0, true), 8, DdpUntagged::InvalidMsn.into()),
        (untagged(Opcode::Send, queue::SEND, 0, 0, true), 8, DdpUntagged::InvalidMsn.into()),
        (untagged(Opcode::Send, queue::SEND, 1, 4, true), 8, DdpUntagged::InvalidMo.into()),
        (untagged(Opcode::Send, 1, 1, 0, true), 8, DdpUntagged::InvalidQn.into()),
        (untagged(Opcode::Send, 9, 1, 0, true), 8, DdpUntagged::InvalidQn.into()),
        (untagged(Opcode::Send, queue::SEND, 1, 0, true), 101, DdpUntagged::TooLong.into()),
        (untagged(Opcode::ReadRequest, queue::READ_REQUEST, 1, 0, true), 27, RdmaOperation::CatastrophicStream.into()),
        (untagged(Opcode::ReadRequest, queue::READ_REQUEST, 1, 0, true), 29, DdpUntagged::TooLong.into()),
    ];
    for (header, len, wanted) in cases {
        let (mut end, mut liar) = victim();
        post_receive(&mut end, 100);
        let bytes = liar.fpdu(header, &vec![0; len]);
        feed(&mut end, &bytes);
        expect_terminate(end, wanted);
    }
}

#[test]
fn a_ready_message_on_another_queue_terminates() {
    for qn in [1, 3, 119, u32::MAX] {
        let mut end = End::new(agreement(true, false, false, Some(ReadyToReceive::Send)), false, 1442);
        let mut liar = Liar { position: 0 };
        let bytes = liar.fpdu(untagged(Opcode::Send, qn, 1, 0, true), &[]);
        feed(&mut end, &bytes);
        expect_terminate(end, DdpUntagged::InvalidQn);
    }
}

#[test]
fn a_message_that_grows_past_its_receive_terminates() {
    let (mut end, mut liar) = victim();
    post_receive(&mut end, 100);
    let one = liar.fpdu(untagged(Opcode::Send, queue::SEND, 1, 0, false), &[1; 60]);
    let two = liar.fpdu(untagged(Opcode::Send, queue::SEND, 1, 60, true), &[1; 60]);
    feed(&mut end, &one);
    feed(&mut end, &two);
    assert!(end.done.iter().any(|(_, wc)| wc.status == Status::LocalLength));
    expect_terminate(end, DdpUntagged::TooLong);
}

#[test]
fn a_send_without_a_posted_receive_terminates() {
    let (mut end, mut liar) = victim();
    let bytes = liar.fpdu(untagged(Opcode::Send, queue::SEND, 1, 0, true), &[1; 8]);
    feed(&mut end, &bytes);
    expect_terminate(end, DdpUntagged::NoBuffer);
}

#[test]
fn every_access_violation_of_a_write_terminates() {
    let (probe, _) = victim();
    let stag = probe.region.stag();
    let cases: [(u32, u64, TerminateCode); 4] = [
        (stag + 1, 0, DdpTagged::InvalidStag.into()),
        (0, 0, DdpTagged::InvalidStag.into()),
        (stag, BUFFER as u64 - 7, DdpTagged::BaseOrBounds.into()),
        (stag, u64::MAX - 3, DdpTagged::ToWrap.into()),
    ];
    for (stag, to, wanted) in cases {
        let (mut end, mut liar) = victim();
        let bytes = liar.fpdu(Header::Tagged { opcode: Opcode::Write, last: true, stag, to }, &[1; 8]);
        feed(&mut end, &bytes);
        expect_terminate(end, wanted);
    }
    let (mut end, mut liar) = victim();
    let readable = end.table.bind(Some(end.connection.stream()), &end.region, 0, 64, Access::REMOTE_READ).unwrap();
    let header = Header::Tagged { opcode: Opcode::Write, last: true, stag: readable.stag(), to: 0 };
    let bytes = liar.fpdu(header, &[1; 8]);
    feed(&mut end, &bytes);
    expect_terminate(end, RdmaProtection::AccessRights);
}

#[test]
fn every_access_violation_of_a_read_terminates() {
    let read = |stag, to, len| ReadRequest { sink_stag: 1, sink_to: 0, len, source_stag: stag, source_to: to };
    let (probe, _) = victim();
    let stag = probe.region.stag();
    for (request, wanted) in [
        (read(stag + 1, 0, 8), RdmaProtection::InvalidStag),
        (read(stag, BUFFER as u64, 1), RdmaProtection::BaseOrBounds),
        (read(stag, u64::MAX, 2), RdmaProtection::ToWrap),
        (ReadRequest { sink_to: u64::MAX, ..read(stag, 0, 8) }, RdmaProtection::ToWrap),
    ] {
        let (mut end, mut liar) = victim();
        let mut payload = [0; ReadRequest::LEN];
        request.encode(&mut payload);
        let bytes = liar.fpdu(untagged(Opcode::ReadRequest, queue::READ_REQUEST, 1, 0, true), &payload);
        feed(&mut end, &bytes);
        expect_terminate(end, wanted);
    }
}

#[test]
fn more_reads_than_agreed_terminate() {
    let (mut end, mut liar) = victim();
    let request = ReadRequest { sink_stag: 1, sink_to: 0, len: 8, source_stag: end.region.stag(), source_to: 0 };
    let mut payload = [0; ReadRequest::LEN];
    request.encode(&mut payload);
    for msn in 1..=5 {
        let bytes = liar.fpdu(untagged(Opcode::ReadRequest, queue::READ_REQUEST, msn, 0, true), &payload);
        feed(&mut end, &bytes);
    }
    expect_terminate(end, DdpUntagged::NoBuffer);
}

#[test]
fn a_misaligned_or_forbidden_atomic_terminates_and_changes_nothing() {
    for (offset, len, wanted) in [
        (4, BUFFER, RdmaOperation::CatastrophicStream.into()),
        (0, 0, TerminateCode::from(RdmaProtection::InvalidStag)),
    ] {
        let (mut end, mut liar) = victim();
        end.fill(4);
        let before = end.bytes(0, 64);
        let stag = if len == 0 { end.region.stag() + 1 } else { end.region.stag() };
        let request = AtomicRequest { id: 1, stag, to: offset, op: AtomicOp::FetchAdd { add: 1, mask: 0 } };
        let mut payload = [0; AtomicRequest::LEN];
        request.encode(&mut payload);
        let bytes = liar.fpdu(untagged(Opcode::AtomicRequest, queue::READ_REQUEST, 1, 0, true), &payload);
        feed(&mut end, &bytes);
        assert_eq!(end.bytes(0, 64), before);
        expect_terminate(end, wanted);
    }
}

#[test]
fn a_corrupted_byte_anywhere_is_caught() {
    let (probe, mut liar) = victim();
    let header = Header::Tagged { opcode: Opcode::Write, last: true, stag: probe.region.stag(), to: 0 };
    let clean = liar.fpdu(header, &[5; 33]);
    for at in 2..clean.len() {
        let (mut end, _) = victim();
        let mut bytes = clean.clone();
        bytes[at] ^= 0x10;
        feed(&mut end, &bytes);
        assert!(end.failure().is_some(), "byte {at}");
    }
    let (mut end, _) = victim();
    let mut bytes = clean.clone();
    *bytes.last_mut().unwrap() ^= 1;
    feed(&mut end, &bytes);
    expect_terminate(end, Mpa::Crc);
}

#[test]
fn a_stream_cut_at_any_byte_ends_without_harm() {
    let mut clean = VecDeque::new();
    let mut a = End::new(agreement(true, true, true, None), true, 1442);
    a.post(1, SendOp::Send { invalidate: None }, &[a.sge(0, 3000)]);
    while a.transmit(&mut clean, 1 << 20) {}
    let clean: Vec<u8> = clean.into();
    for cut in 0..=clean.len() {
        let mut b = End::new(agreement(true, true, true, None), false, 1442);
        post_receive(&mut b, 3000);
        feed(&mut b, &clean[..cut]);
        b.connection.rx_eof();
        b.done.append(&mut b.connection.completions);
        assert_eq!(b.done.len(), 1, "the receive is completed or flushed");
        let whole = b.done[0].1.status == Status::Success;
        assert_eq!(whole, cut == clean.len());
    }
}

#[test]
fn a_wrong_marker_terminates() {
    let mut clean = VecDeque::new();
    let mut a = End::new(agreement(false, true, false, None), true, 1442);
    a.post(1, SendOp::Send { invalidate: None }, &[a.sge(0, 1000)]);
    while a.transmit(&mut clean, 1 << 20) {}
    let mut bytes: Vec<u8> = clean.into();
    bytes[512 + 3] ^= 4;
    let mut b = End::new(agreement(false, false, true, None), false, 1442);
    post_receive(&mut b, 3000);
    feed(&mut b, &bytes);
    expect_terminate(b, Mpa::Marker);
}

#[test]
fn a_right_revoked_inside_a_segment_holds_up_nobody_and_ends_the_connection() {
    let (mut end, mut liar) = victim();
    let (stag, to) = (end.region.stag(), end.remote(0).addr);
    let header = Header::Tagged { opcode: Opcode::Write, last: true, stag, to };
    let whole = liar.fpdu(header, &[0x55; 1000]);
    feed(&mut end, &whole[..600]);
    assert_eq!(end.failure(), None);
    // From the thread that receives, with the rest of the segment yet to come.
    end.table.deregister(&end.region);
    let before = end.bytes(0, 1000);
    feed(&mut end, &whole[600..]);
    assert!(end.bytes(0, 1000) == before, "placed after the right was revoked");
    expect_terminate(end, DdpTagged::InvalidStag);
}

#[test]
fn send_with_invalidate_revokes_exactly_the_named_key() {
    let (mut a, mut b, mut rng) = pair(11);
    let window = b.table.bind(Some(b.connection.stream()), &b.region, 0, 4096, Access::REMOTE_WRITE).unwrap();
    let target = RemoteAddr { addr: 0, rkey: window.stag() };
    post_receive(&mut b, 64);
    a.post(1, SendOp::Write { remote: target, immediate: None }, &[a.sge(0, 4096)]);
    a.post(2, SendOp::Send { invalidate: Some(window.stag()) }, &[a.sge(0, 8)]);
    settle(&mut a, &mut b, &mut rng, 5000);
    let wc = b.done.iter().find(|(side, _)| *side == Side::Recv).unwrap().1;
    assert_eq!(wc.invalidated, Some(window.stag()));
    assert!(!window.is_valid() && b.region.is_valid());
    a.post(3, SendOp::Write { remote: target, immediate: None }, &[a.sge(0, 1)]);
    settle(&mut a, &mut b, &mut rng, 5000);
    assert_eq!(b.failure(), Some(TerminateCode::from(DdpTagged::InvalidStag).into()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn random_bytes_never_panic_and_never_leave_the_region(seed: u64, bytes in prop::collection::vec(any::<u8>(), 0..400), crc: bool, markers: bool) {
        let mut end = End::new(agreement(crc, false, markers, None), false, 1442);
        let guard = Buffer::new(4096).unwrap();
        guard.write(0, &[0x5a; 4096]);
        post_receive(&mut end, 100);
        let mut rng = Rng::with_seed(seed);
        end.wire.extend(&bytes);
        while end.receive(1 + rng.u64(..100) as usize) {}
        let mut check = [0; 4096];
        guard.read(0, &mut check);
        prop_assert!(check.iter().all(|b| *b == 0x5a));
    }

    #[test]
    fn mutated_valid_streams_never_panic(seed: u64, flips in prop::collection::vec((any::<u16>(), any::<u8>()), 1..5)) {
        let (mut a, mut b, mut rng) = pair(seed);
        for id in 0..5 {
            b.connection.post_recv(&RecvRequest { wr_id: id, sges: &[b.sge(BUFFER / 2, 2000)] }).unwrap();
            a.post(id, SendOp::Send { invalidate: None }, &[a.sge(0, rng.u64(..2000) as usize)]);
            a.post(id, SendOp::Read { remote: b.remote(0) }, &[a.sge(0, rng.u64(..2000) as usize)]);
        }
        let mut wire = VecDeque::new();
        while a.transmit(&mut wire, 1 << 20) {}
        for (at, flip) in flips {
            let at = usize::from(at) % wire.len();
            wire[at] ^= flip;
        }
        b.wire = wire;
        while b.receive(1 + rng.u64(..3000) as usize) {}
        while b.transmit(&mut a.wire, 1 << 20) {}
        while a.receive(1 + rng.u64(..3000) as usize) {}
    }
}
