//! What every provider must do, through the public interface only.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_fabric::*;

/// Generous: reached only if something hangs.
const PATIENCE: Duration = Duration::from_secs(30);
pub const SIZE: usize = 1 << 20;

/// Two devices, the second of which listens.
pub struct Lab {
    a: Device,
    b: Device,
    listener: Listener,
}

/// One end of a connection with a registered buffer.
pub struct Side {
    pub device: Device,
    pub pd: ProtectionDomain,
    pub cq: CompletionQueue,
    pub qp: QueuePair,
    pub buffer: Arc<Buffer>,
    pub mr: MemoryRegion,
    seen: Vec<WorkCompletion>,
}

fn all() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC
}

impl Side {
    fn new(device: &Device, caps: QueuePairCaps) -> Side {
        let pd = device.alloc_pd();
        let cq = device.create_cq((caps.max_send + caps.max_recv) as usize).unwrap();
        let qp = pd.create_qp(&cq, &cq, caps).unwrap();
        let buffer = Arc::new(Buffer::new(SIZE).unwrap());
        let mr = pd.register(&buffer, all()).unwrap();
        Side { device: device.clone(), pd, cq, qp, buffer, mr, seen: Vec::new() }
    }

    pub fn fill(&self, seed: u8) {
        let bytes: Vec<u8> =
            (0..SIZE).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) ^ (i >> 8) as u8).collect();
        self.buffer.write(0, &bytes);
    }

    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.buffer.read(at, &mut out);
        out
    }

    pub fn recv(&self, wr_id: u64, at: usize, len: usize) {
        self.qp.post_recv(&RecvRequest { wr_id, sges: &[self.mr.sge(at, len as u32)] }).unwrap();
    }

    pub fn post(&self, wr_id: u64, op: SendOp, sges: &[Sge]) -> Result<()> {
        self.qp.post_send(&SendRequest { wr_id, op, payload: Payload::Sges(sges), flags: SendFlags::SIGNALED })
    }
}

pub fn send() -> SendOp {
    SendOp::Send { invalidate: None }
}

pub fn write(remote: RemoteAddr) -> SendOp {
    SendOp::Write { remote, immediate: None }
}

fn is_verbs(side: &Side) -> bool {
    side.device.attributes().provider == "verbs"
}

/// InfiniBand and RoCE pad private data with zeros.
fn unpadded(data: &[u8]) -> &[u8] {
    &data[..data.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1)]
}

fn has_atomics(side: &Side) -> bool {
    side.device.attributes().atomics
}

impl Lab {
    pub fn new(a: Device, b: Device) -> Lab {
        Lab::at(a, b, "127.0.0.1".parse().unwrap())
    }

    /// At another address than loopback.
    pub fn at(a: Device, b: Device, address: std::net::IpAddr) -> Lab {
        let listener = b.listen(SocketAddr::new(address, 0), &ListenOptions::default()).unwrap();
        Lab { a, b, listener }
    }

    pub fn addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    pub fn pair(&self) -> (Side, Side) {
        self.pair_with(QueuePairCaps::default(), &ConnectParams::default())
    }

    pub fn pair_with(&self, caps: QueuePairCaps, params: &ConnectParams) -> (Side, Side) {
        let (a, b) = (Side::new(&self.a, caps), Side::new(&self.b, caps));
        self.connect(&a.qp, &b.qp, params);
        (a, b)
    }

    fn connect(&self, a: &QueuePair, b: &QueuePair, params: &ConnectParams) {
        a.connect(self.addr(), params).unwrap();
        self.until("the connection", || {
            match self.b.poll_event() {
                Some(ConnectionEvent::Request(r)) => r.accept(b, params).unwrap(),
                Some(ConnectionEvent::Disconnected { qp_num, cause }) if qp_num == b.number() => {
                    panic!("accepting side: {cause}")
                }
                _ => {}
            }
            match self.a.poll_event() {
                Some(ConnectionEvent::Established { qp_num, .. }) => qp_num == a.number(),
                Some(ConnectionEvent::Disconnected { qp_num, cause }) if qp_num == a.number() => {
                    panic!("connecting side: {cause}")
                }
                _ => false,
            }
        });
        while let Some(_leftover) = self.b.poll_event() {}
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            self.a.progress();
            self.b.progress();
            assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        }
    }

    /// Waits for a completion with this identifier at `side`.
    pub fn completion(&self, side: &mut Side, wr_id: u64) -> WorkCompletion {
        let mut found = None;
        let Side { cq, seen, .. } = side;
        self.until(&format!("completion {wr_id}"), || {
            cq.poll(seen, 64);
            found = seen.iter().position(|wc| wc.wr_id == wr_id);
            found.is_some()
        });
        side.seen.remove(found.unwrap())
    }

    fn ok(&self, side: &mut Side, wr_id: u64) -> WorkCompletion {
        let wc = self.completion(side, wr_id);
        assert_eq!(wc.status, Status::Success, "{wc:?} {:?}", side.qp.error());
        wc
    }

    /// The peer ended the connection because of something this side did. iWARP says so in a
    /// Terminate; rdma-core tells its consumers only of the end.
    fn refused_by_peer(&self, side: &Side) {
        let cause = self.disconnected(side);
        assert!(is_verbs(side) || matches!(cause, ConnectionError::Terminated(_)) || self.is_mixed(), "{cause}");
    }

    fn is_mixed(&self) -> bool {
        self.a.attributes().provider != self.b.attributes().provider
    }

    fn disconnected(&self, side: &Side) -> ConnectionError {
        self.until("the end of the connection", || side.qp.error().is_some());
        side.qp.error().unwrap()
    }
}

/// Everything that does not depend on the configuration of the two ends.
macro_rules! behaviours {
    ($($name:ident,)*) => { &[$((stringify!($name), $name as fn(&Lab))),*] };
}

type Behaviour = (&'static str, fn(&Lab));

/// Every behaviour, by name.
pub const BEHAVIOURS: &[Behaviour] = behaviours! {
    send_and_receive,
    write_then_send,
    write_with_immediate,
    read,
    read_scattered,
    atomics,
    gather_and_scatter,
    inline_and_unsignalled,
    fence,
    solicited_and_invalidate,
    windows,
    windows_end_with_what_they_are_on,
    shared_receives,
    shared_receives_outlive_who_took_them,
    memory_on_demand,
    responder_may_send_first,
    empty_messages,
    zero_based_regions,
    large_messages,
    access_violations,
    receiver_not_ready,
    message_longer_than_receive,
    local_protection,
    limits,
    queue_full,
    private_data_and_depths,
    rejection,
    nobody_listens,
    orderly_disconnect,
    the_end_that_comes_with_the_last_message,
    abrupt_disconnect_with_requests_under_way,
    destroyed_while_connecting,
    deregistered_memory_is_not_reachable,
    protection_domains_are_apart,
    waiting_sleeps_and_wakes,
    posting_from_another_thread,
};

/// Checks every behaviour, each in a lab of its own, and names those that fail.
pub fn run_all(lab: &dyn Fn() -> Lab) {
    run_except(&[], lab);
}

/// As [`run_all`], without what a device cannot do; each exception says why.
pub fn run_except(except: &[(&str, &str)], lab: &dyn Fn() -> Lab) {
    for (name, _) in except {
        assert!(BEHAVIOURS.iter().any(|(n, _)| n == name), "there is no behaviour {name}");
    }
    let only = std::env::var("THRUWAY_BEHAVIOUR").unwrap_or_default();
    let mut failed = Vec::new();
    for (name, behaviour) in BEHAVIOURS {
        if except.iter().any(|(n, _)| n == name) || !name.contains(&only) {
            continue;
        }
        eprintln!("{name}");
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| behaviour(&lab()))).is_err() {
            eprintln!("--- {name} failed");
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

pub fn send_and_receive(lab: &Lab) {
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

pub fn write_then_send(lab: &Lab) {
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

pub fn write_with_immediate(lab: &Lab) {
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

pub fn read(lab: &Lab) {
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

pub fn read_scattered(lab: &Lab) {
    let (mut a, b) = lab.pair();
    b.fill(5);
    let sinks = [a.mr.sge(0, 1000), a.mr.sge(5000, 70_000), a.mr.sge(200_000, 1)];
    a.post(1, SendOp::Read { remote: b.mr.remote(0) }, &sinks).unwrap();
    lab.ok(&mut a, 1);
    assert!(a.bytes(0, 1000) == b.bytes(0, 1000));
    assert!(a.bytes(5000, 70_000) == b.bytes(1000, 70_000));
    assert!(a.bytes(200_000, 1) == b.bytes(71_000, 1));
}

pub fn atomics(lab: &Lab) {
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

pub fn gather_and_scatter(lab: &Lab) {
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

pub fn inline_and_unsignalled(lab: &Lab) {
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

pub fn fence(lab: &Lab) {
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

pub fn solicited_and_invalidate(lab: &Lab) {
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

/// More windows than there are keys in their low octet, one after another and some at once; each lets the peer at its own
/// part, until it is revoked or dropped.
pub fn windows(lab: &Lab) {
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

pub fn windows_end_with_what_they_are_on(lab: &Lab) {
    let (a, b) = lab.pair();
    let read_only = b.pd.register(&b.buffer, Access::REMOTE_READ).unwrap();
    let refused = b.qp.bind_window(&read_only, 0, 64, Access::REMOTE_WRITE, None).map(drop);
    assert!(matches!(refused, Err(Error::LocalProtection { .. })), "{refused:?}");
    let outside = b.qp.bind_window(&b.mr, SIZE - 63, 64, Access::REMOTE_READ, None).map(drop);
    assert!(matches!(outside, Err(Error::LocalProtection { .. })), "{outside:?}");
    let apart = b.device.alloc_pd().register(&b.buffer, all()).unwrap();
    assert!(b.qp.bind_window(&apart, 0, 64, Access::REMOTE_READ, None).is_err());
    let window = b.qp.bind_window(&b.mr, 0, 4096, Access::REMOTE_WRITE, None).unwrap();
    let remote = RemoteAddr { addr: window.addr(), rkey: window.rkey() };
    if lab.b.attributes().windows {
        // Another peer of the same protection domain has no use for it.
        let cq = b.device.create_cq(32).unwrap();
        let caps = QueuePairCaps { max_send: 8, max_recv: 8, max_sge: 1 };
        let (theirs, ours) = (
            a.pd.create_qp(&a.device.create_cq(16).unwrap(), &a.cq, QueuePairCaps { max_recv: 0, ..caps }),
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

/// Three connections, the messages of which come unevenly, with one queue of receives.
pub fn shared_receives(lab: &Lab) {
    if lab.b.attributes().max_shared_receives == 0 {
        assert!(matches!(lab.b.alloc_pd().create_srq(8, 1).map(drop), Err(Error::Unsupported(_))));
        return;
    }
    const SLOT: usize = 4096;
    let caps = QueuePairCaps { max_send: 16, max_recv: 1, max_sge: 2 };
    let (pa, pb) = (lab.a.alloc_pd(), lab.b.alloc_pd());
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
    let elsewhere = lab.b.alloc_pd();
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
pub fn shared_receives_outlive_who_took_them(lab: &Lab) {
    const RECEIVES: u64 = 4;
    if lab.b.attributes().max_shared_receives == 0 {
        return;
    }
    let caps = QueuePairCaps { max_send: 16, max_recv: 1, max_sge: 1 };
    let (pa, pb) = (lab.a.alloc_pd(), lab.b.alloc_pd());
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

/// Memory that is not held in place, where the device does without.
pub fn memory_on_demand(lab: &Lab) {
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

pub fn responder_may_send_first(lab: &Lab) {
    let (mut a, mut b) = lab.pair();
    a.recv(1, 0, 10);
    b.post(2, send(), &[b.mr.sge(0, 10)]).unwrap();
    lab.ok(&mut a, 1);
    lab.ok(&mut b, 2);
}

pub fn empty_messages(lab: &Lab) {
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

pub fn zero_based_regions(lab: &Lab) {
    let (mut a, b) = lab.pair();
    a.fill(8);
    let zero = b.pd.register_zero_based(&b.buffer, all()).unwrap();
    assert_eq!(zero.addr(), 0);
    a.post(1, write(RemoteAddr { addr: 4000, rkey: zero.rkey() }), &[a.mr.sge(0, 100)]).unwrap();
    a.post(2, SendOp::Read { remote: zero.remote(4000) }, &[a.mr.sge(200, 100)]).unwrap();
    lab.ok(&mut a, 2);
    assert!(a.bytes(200, 100) == a.bytes(0, 100) && b.bytes(4000, 100) == a.bytes(0, 100));
}

pub fn large_messages(lab: &Lab) {
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

pub fn access_violations(lab: &Lab) {
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

pub fn receiver_not_ready(lab: &Lab) {
    let (mut a, b) = lab.pair();
    a.recv(7, 0, 1);
    a.post(1, send(), &[a.mr.sge(0, 8)]).unwrap();
    lab.disconnected(&b);
    lab.refused_by_peer(&a);
    assert_eq!(lab.completion(&mut a, 7).status, Status::Flushed);
}

pub fn message_longer_than_receive(lab: &Lab) {
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

pub fn local_protection(lab: &Lab) {
    let (mut a, b) = lab.pair();
    let read_only = a.pd.register(&a.buffer, Access::empty()).unwrap();
    let other_pd = a.device.alloc_pd();
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

pub fn limits(lab: &Lab) {
    let (a, _b) = lab.pair();
    let many = vec![a.mr.sge(0, 1); 5];
    assert!(matches!(a.post(1, send(), &many), Err(Error::Limit { limit: 4, .. })));
    let cq = a.device.create_cq(100).unwrap();
    let caps = |s, r| QueuePairCaps { max_send: s, max_recv: r, max_sge: 1 };
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

pub fn queue_full(lab: &Lab) {
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

pub fn private_data_and_depths(lab: &Lab) {
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

pub fn rejection(lab: &Lab) {
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

pub fn nobody_listens(lab: &Lab) {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut a = Side::new(&lab.a, QueuePairCaps::default());
    a.recv(1, 0, 8);
    if a.qp.connect(port, &ConnectParams::default()).is_ok() {
        assert!(matches!(lab.disconnected(&a), ConnectionError::Lost(_)));
        assert_eq!(lab.completion(&mut a, 1).status, Status::Flushed);
    }
}

pub fn orderly_disconnect(lab: &Lab) {
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
pub fn the_end_that_comes_with_the_last_message(lab: &Lab) {
    let others = [lab.pair(), lab.pair()];
    let (a, mut b) = lab.pair();
    b.recv(1, 0, 8);
    a.post(1, send(), &[a.mr.sge(0, 8)]).unwrap();
    a.qp.disconnect();
    lab.ok(&mut b, 1);
    lab.disconnected(&b);
    drop(others);
}

pub fn abrupt_disconnect_with_requests_under_way(lab: &Lab) {
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

pub fn destroyed_while_connecting(lab: &Lab) {
    for _ in 0..20 {
        let a = Side::new(&lab.a, QueuePairCaps::default());
        a.qp.connect(lab.addr(), &ConnectParams::default()).unwrap();
        drop(a);
    }
    while lab.b.poll_event().is_some() {}
    write_then_send(lab);
}

pub fn deregistered_memory_is_not_reachable(lab: &Lab) {
    let (a, b) = lab.pair();
    let remote = b.mr.remote(0);
    let Side { mr, qp, .. } = b;
    drop(mr);
    a.post(1, write(remote), &[a.mr.sge(0, 8)]).unwrap();
    lab.refused_by_peer(&a);
    drop(qp);
}

pub fn protection_domains_are_apart(lab: &Lab) {
    let (a, b) = lab.pair();
    let other = b.device.alloc_pd();
    let mr = other.register(&b.buffer, all()).unwrap();
    a.post(1, write(mr.remote(0)), &[a.mr.sge(0, 8)]).unwrap();
    lab.refused_by_peer(&a);
}

pub fn waiting_sleeps_and_wakes(lab: &Lab) {
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
                b.device.wait(Some(PATIENCE)).unwrap();
            }
        });
        let mut out = Vec::new();
        let start = Instant::now();
        while a.cq.poll(&mut out, 1) == 0 {
            a.device.wait(Some(PATIENCE)).unwrap();
            assert!(start.elapsed() < PATIENCE);
        }
        assert_eq!(out[0].wr_id, 1);
    });
}

pub fn posting_from_another_thread(lab: &Lab) {
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

pub fn extensions_are_refused(lab: &Lab) {
    let (a, b) = lab.pair();
    let remote = b.mr.remote(0);
    let refused = |r: Result<()>| assert!(matches!(r, Err(Error::Unsupported(_))), "{r:?}");
    refused(a.post(1, SendOp::FetchAdd { remote, add: 1 }, &[a.mr.sge(0, 8)]));
    refused(a.post(1, SendOp::Write { remote, immediate: Some(1) }, &[a.mr.sge(0, 8)]));
}

pub fn many_connections(lab: &Lab, count: usize) {
    let caps = QueuePairCaps { max_send: 4, max_recv: 4, max_sge: 1 };
    let side = |device: &Device, cq: &CompletionQueue, pd: &ProtectionDomain| {
        let _ = device;
        pd.create_qp(cq, cq, caps).unwrap()
    };
    let (pa, pb) = (lab.a.alloc_pd(), lab.b.alloc_pd());
    let (ca, cb) = (lab.a.create_cq(count * 8).unwrap(), lab.b.create_cq(count * 8).unwrap());
    let buffer = Arc::new(Buffer::new(4096).unwrap());
    let (ma, mb) = (pa.register(&buffer, all()).unwrap(), pb.register(&buffer, all()).unwrap());
    let mut from = Vec::new();
    let mut to = Vec::new();
    for _ in 0..count {
        let qp = side(&lab.a, &ca, &pa);
        qp.connect(lab.addr(), &ConnectParams { timeout: PATIENCE, ..ConnectParams::default() }).unwrap();
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
    let mut stalled = std::net::TcpStream::connect(lab.addr()).unwrap();
    std::io::Write::write_all(&mut stalled, b"MPA ID Re").unwrap();
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
