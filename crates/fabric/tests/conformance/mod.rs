//! What every provider must do, through the public interface only.
#![allow(dead_code)]

mod connections;
mod memory;
mod messages;
mod queues;

pub(crate) use connections::*;
pub(crate) use memory::*;
pub(crate) use messages::*;
pub(crate) use queues::*;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_fabric::*;

/// Generous: reached only if something hangs.
const TIMEOUT: Duration = Duration::from_secs(30);
pub(crate) const SIZE: usize = 1 << 20;

/// Two devices, the second of which listens.
pub(crate) struct Lab {
    a: Device,
    b: Device,
    listener: Listener,
}

/// One end of a connection with a registered buffer.
pub(crate) struct Side {
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
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq((caps.max_send_wr + caps.max_recv_wr) as usize).unwrap();
        let qp = pd.create_qp(&cq, &cq, caps).unwrap();
        let buffer = Arc::new(Buffer::new(SIZE).unwrap());
        let mr = pd.register(&buffer, all()).unwrap();
        Side { device: device.clone(), pd, cq, qp, buffer, mr, seen: Vec::new() }
    }

    pub(crate) fn fill(&self, seed: u8) {
        let bytes: Vec<u8> =
            (0..SIZE).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) ^ (i >> 8) as u8).collect();
        self.buffer.write(0, &bytes);
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.buffer.read(at, &mut out);
        out
    }

    pub(crate) fn recv(&self, wr_id: u64, at: usize, len: usize) {
        self.qp.post_recv(&RecvRequest { wr_id, sges: &[self.mr.sge(at, len as u32)] }).unwrap();
    }

    pub(crate) fn post(&self, wr_id: u64, op: SendOp, sges: &[Sge]) -> Result<()> {
        self.qp.post_send(&SendRequest { wr_id, op, payload: Payload::Sges(sges), flags: SendFlags::SIGNALED })
    }
}

pub(crate) fn send() -> SendOp {
    SendOp::Send { invalidate: None }
}

pub(crate) fn write(remote: RemoteAddr) -> SendOp {
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
    pub(crate) fn new(a: Device, b: Device) -> Lab {
        Lab::at(a, b, "127.0.0.1".parse().unwrap())
    }

    /// At another address than loopback.
    pub(crate) fn at(a: Device, b: Device, address: std::net::IpAddr) -> Lab {
        let listener = b.listen(SocketAddr::new(address, 0), &ListenOptions::default()).unwrap();
        Lab { a, b, listener }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// A connection to the listener that is not the device's own.
    pub(crate) fn socket(&self) -> Box<dyn std::io::Write> {
        if self.b.attributes().provider != "shm" {
            return Box::new(std::net::TcpStream::connect(self.addr()).unwrap());
        }
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr, UnixStream};
        let name = SocketAddr::from_abstract_name(format!("thruway/shm/1/{}", self.addr())).unwrap();
        Box::new(UnixStream::connect_addr(&name).unwrap())
    }

    pub(crate) fn pair(&self) -> (Side, Side) {
        self.pair_with(QueuePairCaps::default(), &ConnectParams::default())
    }

    pub(crate) fn pair_with(&self, caps: QueuePairCaps, params: &ConnectParams) -> (Side, Side) {
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
            assert!(start.elapsed() < TIMEOUT, "{what} did not happen");
        }
    }

    /// Waits for a completion with this identifier at `side`.
    pub(crate) fn completion(&self, side: &mut Side, wr_id: u64) -> WorkCompletion {
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
pub(crate) const BEHAVIOURS: &[Behaviour] = behaviours! {
    send_and_receive,
    write_then_send,
    write_with_immediate,
    read,
    completions_come_in_order_behind_a_read,
    read_scattered,
    atomics,
    gather_and_scatter,
    inline_and_unsignalled,
    fence,
    solicited_and_invalidate,
    windows,
    windows_end_with_what_they_are_on,
    a_dropped_region_is_shut_with_its_windows,
    domains_come_back,
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
    an_unanswered_connection_is_given_up,
    orderly_disconnect,
    the_end_that_comes_with_the_last_message,
    abrupt_disconnect_with_requests_under_way,
    destroyed_while_connecting,
    deregistered_memory_is_not_reachable,
    protection_domains_are_apart,
    waiting_sleeps_and_wakes,
    a_wait_for_memory_ends_with_the_write,
    posting_from_another_thread,
    order_is_kept_between_threads,
};

/// Checks every behaviour, each in a lab of its own, and names those that fail.
pub(crate) fn run_all(lab: &dyn Fn() -> Lab) {
    run_except(&[], lab);
}

/// As [`run_all`], without what a device cannot do; each exception says why.
pub(crate) fn run_except(except: &[(&str, &str)], lab: &dyn Fn() -> Lab) {
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
