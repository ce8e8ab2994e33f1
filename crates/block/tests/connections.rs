//! Connections that are lost, or whose requests fail in the worst way: a client that goes on by another connection has nothing
//! of the first overtake the second, and what one leaves behind is nobody else's trouble.

use crate::client;
use crate::initiator;
use crate::iser;
use crate::nbd_server;
use client::{FLUSH, FUA, Nbd, READ, WRITE, ZEROES};
use initiator::Initiator;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use thruway_block::backend::{Extent, MemoryBackend, Op, Zero};
use thruway_block::iscsi::{self, target};
use thruway_block::nbd::Server;
use thruway_block::scsi::Unit;
use thruway_block::{Backend, Export, Geometry, Served};
use thruway_engine::{Reactors, Segment, Segments};
use tokio::sync::watch;

/// A disk whose first writes take until it is told to go on.
struct Stuck {
    below: MemoryBackend,
    /// So many more.
    stuck: AtomicUsize,
    reads_too: bool,
    /// Whoever asks how long it is panics.
    has_bug: AtomicBool,
    begun: Sender<()>,
    go_on: watch::Receiver<bool>,
}

impl Backend for Stuck {
    fn geometry(&self) -> Geometry {
        assert!(!self.has_bug.load(Ordering::SeqCst), "a bug, as there may be one anywhere");
        self.below.geometry()
    }

    fn read(&self, at: u64, segment: Segment) -> Op<'_, Segment> {
        Box::pin(async move {
            if self.reads_too {
                let _ = self.begun.send(());
                self.go_on.clone().wait_for(|go_on| *go_on).await.unwrap();
            }
            self.below.read(at, segment).await
        })
    }

    fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
        Box::pin(async move {
            assert_ne!(segment.as_slice()[0], BUG, "a bug, as there may be one anywhere");
            if self.stuck.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
                let _ = self.begun.send(());
                self.go_on.clone().wait_for(|go_on| *go_on).await.unwrap();
            }
            self.below.write(at, segment, durable).await
        })
    }

    fn flush(&self) -> Op<'_, ()> {
        self.below.flush()
    }

    fn zero(&self, at: u64, len: u64, how: Zero) -> Op<'_, ()> {
        Box::pin(async move {
            // A long one gets so far.
            if at >= STRETCH {
                let _ = self.begun.send(());
                self.go_on.clone().wait_for(|go_on| *go_on).await.unwrap();
            }
            self.below.zero(at, len, how).await
        })
    }

    fn discard(&self, at: u64, len: u64) -> Op<'_, ()> {
        self.below.discard(at, len)
    }

    fn extents(&self, at: u64, len: u64, most: usize) -> Op<'_, Vec<Extent>> {
        self.below.extents(at, len, most)
    }
}

const SIZE: u64 = 512 << 20;
/// A long zeroing is done in steps of so many bytes.
const STRETCH: u64 = 256 << 20;
/// What begins with this cannot be written without a panic.
const BUG: u8 = 0xdd;

struct Lab {
    address: String,
    /// Of the same disk by iSCSI.
    portal: String,
    disk: Arc<Stuck>,
    begun: Receiver<()>,
    go_on: watch::Sender<bool>,
    /// The same over RDMA.
    rdma_portal: String,
    server: Server,
    targets: iscsi::Server,
    rdma_targets: iscsi::iser::Server,
    _reactors: Reactors,
}

const TARGET: &str = "iqn.2026-11.org.thruway:d";

fn lab(stuck: usize, reads_too: bool) -> Lab {
    lab_of(stuck, reads_too, false)
}

fn lab_of(stuck: usize, reads_too: bool, read_only: bool) -> Lab {
    let ((begun_tell, begun), (go_on, wait)) = (channel(), watch::channel(false));
    let disk = Arc::new(Stuck {
        below: MemoryBackend::new(SIZE).unwrap(),
        stuck: AtomicUsize::new(stuck),
        reads_too,
        has_bug: AtomicBool::new(false),
        begun: begun_tell,
        go_on: wait,
    });
    let export = Export {
        kind: "a test",
        name: "d".into(),
        description: "a disk that is stuck".into(),
        identity: [1; 16],
        is_lasting: false,
        allow: Vec::new(),
        fence: thruway_block::fence::Fence::default(),
        backend: Arc::new(Served::new(Arc::clone(&disk) as _)),
        read_only,
        chunk: 64 << 10,
        target: None,
        sector: 512,
    };
    let reactors = Reactors::start(Some(2)).unwrap();
    let export = Arc::new(export);
    let units = vec![Arc::new(Unit::new(Arc::clone(&export), 512))];
    let targets = target::Targets::new(vec![target::Target { name: TARGET.into(), units }], None, Vec::new());
    let targets = Arc::new(targets);
    let config = iscsi::iser::Config {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        provider: thruway_fabric::iwarp::Config::default().into(),
        targets: Arc::clone(&targets),
        own_user_only: true,
        connections_max: 8,
    };
    let rdma_targets = iscsi::iser::Server::start(config, &reactors).unwrap();
    let rdma_portal = rdma_targets.addresses()[0].to_string();
    let config = iscsi::Config {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        targets,
        own_user_only: true,
        connections_max: 8,
    };
    let targets = iscsi::Server::start(config, &reactors).unwrap();
    let portal = targets.addresses()[0].to_string();
    let (server, address) = nbd_server::serve(export, &reactors);
    Lab { address, portal, rdma_portal, disk, begun, go_on, server, targets, rdma_targets, _reactors: reactors }
}

impl Lab {
    /// What the disk begins with when every connection has ended.
    fn ends_with(&self, value: u8) {
        self.server.shut_down(Duration::from_secs(60));
        self.targets.shut_down(Duration::from_secs(60));
        self.rdma_targets.shut_down(Duration::from_secs(60));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let shown = runtime.block_on(async {
            let segment = Segments::new(1, 4096).unwrap().reserve(1).await.segment(1);
            self.disk.below.read(0, segment).await.unwrap()
        });
        assert_eq!(shown.as_slice(), [value], "a write of the first came last");
    }
}

/// By which connection a client goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// One that comes when the first is lost.
    New,
    /// One of several that it has, and by which it has changed the disk already.
    Left,
}

impl Lab {
    /// A client's first connection, and the one by which it goes on later, if it is there already.
    fn connect(&self, by: By) -> (Nbd, Option<Nbd>) {
        let left = (by == By::Left).then(|| {
            let mut left = Nbd::connect(&self.address, "d").unwrap();
            left.ask((0, ZEROES), 8192, 512, &[]).unwrap().unwrap();
            left
        });
        (Nbd::connect(&self.address, "d").unwrap(), left)
    }

    fn go_on(&self, left: Option<Nbd>) -> Nbd {
        left.unwrap_or_else(|| Nbd::connect(&self.address, "d").unwrap())
    }
}

#[test]
fn a_write_of_a_lost_connection_does_not_undo_one_of_the_next() {
    for by in [By::New, By::Left] {
        let lab = lab(1, false);
        let (mut first, left) = lab.connect(by);
        first.send((0, WRITE), 0, 512, &[1; 512]).unwrap();
        lab.begun.recv().unwrap();
        drop(first);
        let mut second = lab.go_on(left);
        // The one that was not answered again, and another after it. Reads wait for nobody.
        assert_eq!(second.ask((0, READ), 0, 512, &[]).unwrap().unwrap(), [0; 512]);
        second.send((0, WRITE), 0, 512, &[1; 512]).unwrap();
        second.send((FUA, WRITE), 4096, 512, &[3; 512]).unwrap();
        second.answer().unwrap();
        assert_eq!(second.ask((0, READ), 0, 512, &[]).unwrap().unwrap(), [0; 512], "nothing has overtaken the first");
        assert_eq!(
            second.ask((0, READ), 4096, 512, &[]).unwrap().unwrap(),
            [3; 512],
            "what is elsewhere need not wait"
        );
        lab.go_on.send_replace(true);
        second.answer().unwrap();
        second.ask((0, WRITE), 0, 512, &[2; 512]).unwrap().unwrap();
        second.ask((0, FLUSH), 0, 0, &[]).unwrap().unwrap();
        drop(second);
        lab.ends_with(2);
    }
}

/// A long request is one, though it is done in steps: what comes later does not come between them, where they overlap. What
/// is done of it is free.
#[test]
fn a_write_does_not_overtake_the_rest_of_a_long_zeroing() {
    let lab = lab(0, false);
    let mut first = Nbd::connect(&lab.address, "d").unwrap();
    // The second waits for the first in its own connection, and holds up nobody elsewhere.
    first.send_many(2, (0, ZEROES), 0, SIZE as u32, &[]).unwrap();
    lab.begun.recv().unwrap();
    let mut second = Nbd::connect(&lab.address, "d").unwrap();
    second.ask((0, WRITE), 0, 512, &[1; 512]).unwrap().unwrap();
    second.send((0, WRITE), SIZE - 512, 512, &[2; 512]).unwrap();
    assert_eq!(second.ask((0, READ), SIZE - 512, 512, &[]).unwrap().unwrap(), [0; 512]);
    drop(first);
    lab.go_on.send_replace(true);
    second.answer().unwrap();
    // The other zeroing had not begun when its connection was lost.
    second.ask((0, WRITE), 0, 512, &[3; 512]).unwrap().unwrap();
    assert_eq!(second.ask((0, READ), SIZE - 512, 512, &[]).unwrap().unwrap(), [2; 512]);
    drop(second);
    lab.ends_with(3);
}

/// More requests than are read at a time: those that were still in the socket when the connection was lost have not
/// been answered, and come again by the next one. They are not begun after it has gone on.
#[test]
fn what_a_lost_connection_had_not_begun_is_not_begun_any_more() {
    for by in [By::New, By::Left] {
        let lab = lab(usize::MAX, false);
        let (mut first, left) = lab.connect(by);
        first.send_many(1500, (0, WRITE), 0, 1, &[1]).unwrap();
        lab.begun.recv().unwrap();
        drop(first);
        let mut second = lab.go_on(left);
        second.send((0, WRITE), 0, 1, &[2]).unwrap();
        // A read behind the write is answered before it: the write waits for what the first has begun.
        assert_eq!(second.ask((0, READ), 0, 1, &[]).unwrap().unwrap(), [0]);
        lab.go_on.send_replace(true);
        second.answer().unwrap();
        drop(second);
        lab.ends_with(2);
    }
}

/// The same with an initiator that has two paths.
#[test]
fn what_a_lost_path_had_not_begun_is_not_begun_any_more() {
    let lab = lab(usize::MAX, false);
    let mut second = Initiator::log_in(&lab.portal, TARGET, 2);
    let mut first = Initiator::log_in(&lab.portal, TARGET, 1);
    // More than there are blocks for.
    for _ in 0..200 {
        first.send_write(0, &[1; 512]).unwrap();
    }
    lab.begun.recv().unwrap();
    first.half_close();
    second.send_write(0, &[2; 512]).unwrap();
    // One that overlaps nothing is not waited for.
    second.send_write(9, &[2; 512]).unwrap();
    lab.begun.recv().unwrap();
    lab.go_on.send_replace(true);
    assert_eq!((second.status().unwrap(), second.status().unwrap()), (0, 0));
    drop(second);
    while first.status().is_ok() {}
    lab.ends_with(2);
}

/// What the digest of data says is wrong does not reach the disk, however much of it has arrived before the digest.
#[test]
fn data_that_its_digest_gives_away_is_not_written() {
    const BLOCKS: u8 = 255;
    let lab = lab(0, false);
    let keys = "DataDigest=CRC32C\0InitialR2T=Yes\0ImmediateData=No\0";
    let mut nbd = Nbd::connect(&lab.address, "d").unwrap();
    for (right, value) in [(false, 0), (true, 1)] {
        let mut initiator = Initiator::log_in_with(&lab.portal, TARGET, 1, keys);
        let asked = initiator.begin_write(BLOCKS).unwrap();
        let data = vec![1; usize::from(BLOCKS) * 512];
        // More than one of the disk's pieces.
        let now = 100_000;
        initiator.begin_data(asked, &data, now).unwrap();
        for _ in 0..50 {
            assert_eq!(nbd.ask((0, READ), 0, 1, &[]).unwrap().unwrap(), [0], "it is too early");
        }
        initiator.more(&data[now..]).unwrap();
        let digest = crc_fast::crc32_iscsi(&data) ^ u32::from(!right);
        initiator.more(&digest.to_le_bytes()).unwrap();
        assert_eq!(initiator.status().ok(), right.then_some(0));
        assert_eq!(nbd.ask((0, READ), 0, 1, &[]).unwrap().unwrap(), [value]);
    }
    drop(nbd);
    lab.ends_with(1);
}

/// A VERIFY of a whole disk, of a client that has gone, is nothing that others wait for.
#[test]
fn a_long_verify_ends_with_its_session() {
    let lab = lab(0, true);
    let mut one = Initiator::log_in(&lab.portal, TARGET, 1);
    let mut other = Initiator::log_in(&lab.portal, TARGET, 2);
    one.send_verify_same(SIZE / 512).unwrap();
    lab.begun.recv().unwrap();
    drop(one);
    // LOGICAL UNIT RESET waits for all commands; the disk does not answer.
    assert_eq!(other.reset().unwrap(), 0);
    drop(other);
    lab.go_on.send_replace(true);
    lab.ends_with(0);
}

/// CLEAR TASK SET, LOGICAL UNIT RESET, TARGET WARM RESET and TARGET COLD RESET.
#[test]
fn task_management_of_who_may_only_read_ends_nothing_of_others() {
    let lab = lab_of(0, true, true);
    let mut one = Initiator::log_in(&lab.portal, TARGET, 1);
    let mut other = Initiator::log_in(&lab.portal, TARGET, 2);
    one.send_verify_same(SIZE / 512).unwrap();
    lab.begun.recv().unwrap();
    for (function, response) in [(4, 0), (5, 0), (6, 0), (7, 6)] {
        assert_eq!(other.manage(function).unwrap(), response, "function {function}");
    }
    lab.go_on.send_replace(true);
    assert_eq!(one.status().unwrap(), 0, "its command goes on");
    assert_eq!(one.test_unit_ready().unwrap(), 0, "it is told of nothing");
    assert_eq!(other.test_unit_ready().unwrap(), 2, "of its own reset");
    assert_eq!(other.test_unit_ready().unwrap(), 0);
    drop((one, other));
    lab.ends_with(0);
}

/// A command that panics is not answered: its session ends, and others go on.
#[test]
fn an_initiator_whose_command_panics_is_sent_away_and_no_other() {
    let lab = lab(0, false);
    let mut other = Initiator::log_in(&lab.portal, TARGET, 1);
    // More than there may be connections.
    for _ in 0..10 {
        let mut one = Initiator::log_in(&lab.portal, TARGET, 2);
        one.send_write(0, &[BUG; 512]).unwrap();
        assert!(one.status().is_err(), "it is not answered, and it ends");
        other.send_write(0, &[3; 512]).unwrap();
        assert_eq!(other.status().unwrap(), 0);
    }
    drop(other);
    lab.ends_with(3);
}

/// The same over RDMA.
#[test]
fn an_initiator_whose_command_panics_over_rdma_is_sent_away_and_no_other() {
    let lab = lab(0, false);
    let mut other = iser::Initiator::log_in(&lab.rdma_portal, TARGET, 1);
    for _ in 0..10 {
        let mut one = iser::Initiator::log_in(&lab.rdma_portal, TARGET, 2);
        assert_eq!(one.write(&[BUG; 512]), None, "it is not answered, and it ends");
        assert_eq!(other.write(&[3; 512]), Some(0));
    }
    drop(other);
    lab.ends_with(3);
}

/// None of these changes the disk, concerns anybody else, or is answered as if it were done. Those of strangers end their
/// connections.
#[test]
fn what_no_initiator_may_do_over_rdma_is_its_own_trouble() {
    use iser::{Advertise, DATA_LEN, Initiator, cdb};
    type Fault = fn(&mut Initiator);
    // With nothing before them.
    let strangers: [(&str, Fault); 4] = [
        ("a login longer than a message may be", |i| {
            i.send_login(3, 0x87, &[b'a'; 9000]);
        }),
        ("a login that does not end", |i| while i.send_login(3, 0x44, &[b'a'; 8000]) && i.receive().is_some() {}),
        ("a message that is none", |i| {
            i.send_raw(b"GET / HTTP/1.0\r\n\r\n");
        }),
        ("nothing at all in a message", |i| {
            i.send_raw(b"");
        }),
    ];
    // In a session.
    let initiators: [(&str, Fault); 7] = [
        ("data longer than its message", |i| {
            let mut header = [0; 48];
            (header[0], header[7]) = (0x41, 200);
            i.send(header, Advertise::Nothing, &[0; 100]);
        }),
        ("a write that advertises nothing", |i| {
            i.command_with(&cdb(0x2a, 512), 512, 0xa0, Advertise::Nothing);
        }),
        ("a read that advertises nothing", |i| {
            i.command_with(&cdb(0x28, 512), 512, 0xc0, Advertise::Nothing);
        }),
        ("a write out of memory that is not registered", |i| {
            let mut remote = i.remote();
            remote.rkey ^= 0x5a5a;
            i.command(&cdb(0x2a, 512), 512, Advertise::Write(remote));
        }),
        ("a write out of more than is registered", |i| {
            let mut remote = i.remote();
            remote.addr += DATA_LEN as u64 - 512;
            i.set_data(&vec![9; DATA_LEN]);
            i.command(&cdb(0x2a, 64 << 10), 64 << 10, Advertise::Write(remote));
        }),
        ("a read into memory that is not registered", |i| {
            let mut remote = i.remote();
            remote.rkey ^= 0x5a5a;
            i.command(&cdb(0x28, 512), 512, Advertise::Read(remote));
        }),
        ("a read past the end of memory", |i| {
            let mut remote = i.remote();
            remote.addr = u64::MAX - 100;
            i.command(&cdb(0x28, 512), 512, Advertise::Read(remote));
        }),
    ];
    let lab = lab(0, false);
    let mut other = Initiator::log_in(&lab.rdma_portal, TARGET, 1);
    let before: Vec<u8> = (0..64 << 10).map(|i| (i / 7) as u8 | 1).collect();
    let mut check = |what| {
        assert_eq!(other.write(&before), Some(0), "after {what}");
        assert!(other.read(before.len()).is_some_and(|read| read == (0, before.clone())), "after {what}");
    };
    for (what, fault) in strangers {
        let mut one = Initiator::connect(&lab.rdma_portal).unwrap();
        fault(&mut one);
        while one.receive().is_some() {}
        check(what);
    }
    for (what, fault) in initiators {
        let mut one = Initiator::log_in(&lab.rdma_portal, TARGET, 2);
        fault(&mut one);
        assert_ne!(one.status(), Some(0), "{what} is answered as if it were done");
        check(what);
    }
    drop(other);
    lab.ends_with(1);
}

/// The same, where the lost connection has changed nothing yet: it settles after its successor.
#[test]
fn the_first_write_of_a_lost_connection_comes_too_late_too() {
    let lab = lab(0, true);
    let mut first = Nbd::connect(&lab.address, "d").unwrap();
    first.send_many(600, (0, READ), 0, 1, &[]).unwrap();
    first.send((0, WRITE), 0, 1, &[1]).unwrap();
    lab.begun.recv().unwrap();
    // Closed, as far as the server can know; whoever is gone altogether would answer its replies with a reset.
    first.half_close();
    let mut second = Nbd::connect(&lab.address, "d").unwrap();
    for value in [1, 2] {
        second.ask((0, WRITE), 0, 1, &[value]).unwrap().unwrap();
    }
    lab.go_on.send_replace(true);
    drop(second);
    lab.ends_with(2);
}

/// Replies that cannot be sent any more keep nothing: reads still in progress wait for the blocks that those had.
#[test]
fn clients_that_go_with_many_reads_under_way_leave_nothing() {
    let lab = lab(0, true);
    // As many as there may be connections.
    for _ in 0..8 {
        let mut client = Nbd::connect(&lab.address, "d").unwrap();
        client.send_many(800, (0, READ), 0, 1, &[]).unwrap();
        lab.begun.recv().unwrap();
    }
    lab.go_on.send_replace(true);
    let start = std::time::Instant::now();
    while Nbd::connect(&lab.address, "d").is_err() {
        assert!(start.elapsed() < Duration::from_secs(60), "their places are still taken");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn a_request_that_panics_is_answered_and_others_go_on() {
    let lab = lab(0, false);
    let (mut one, mut other) = (Nbd::connect(&lab.address, "d").unwrap(), Nbd::connect(&lab.address, "d").unwrap());
    for _ in 0..3 {
        assert_eq!(one.ask((0, WRITE), 0, 512, &[BUG; 512]).unwrap(), None);
        assert!(one.ask((FUA, WRITE), 0, 512, &[7; 512]).unwrap().is_some(), "what overlaps it need not wait for ever");
        assert_eq!(other.ask((0, READ), 0, 1, &[]).unwrap().unwrap(), [7]);
    }
    // In pieces, of which one panics.
    let mut long = vec![1; 256 << 10];
    long[128 << 10] = BUG;
    assert_eq!(one.ask((0, WRITE), 64 << 10, 256 << 10, &long).unwrap(), None);
    drop((one, other));
    lab.ends_with(7);
}

/// A bug in the connection itself, which reads requests: it ends, with all that it had, and no other.
#[test]
fn a_connection_that_panics_ends_and_no_other() {
    let lab = lab(0, false);
    let mut other = Nbd::connect(&lab.address, "d").unwrap();
    // More than there may be connections.
    for _ in 0..10 {
        let mut one = Nbd::connect(&lab.address, "d").unwrap();
        lab.disk.has_bug.store(true, Ordering::SeqCst);
        // Whether the disk has grown is looked at before the payload is taken.
        one.send((0, WRITE), SIZE, 512, &[1; 512]).unwrap();
        assert!(one.answer().is_err(), "it is not answered, and it ends");
        lab.disk.has_bug.store(false, Ordering::SeqCst);
        assert!(other.ask((0, WRITE), 0, 1, &[3]).unwrap().is_some());
    }
    drop(other);
    lab.ends_with(3);
}

/// A command whose flags say that it reads brings no data to write: nothing is written, and the command fails.
#[test]
fn a_write_without_data_is_not_said_to_be_done() {
    let lab = lab(0, false);
    let mut initiator = Initiator::log_in(&lab.portal, TARGET, 1);
    initiator.send_write_as_read().unwrap();
    assert_eq!(initiator.status().unwrap(), 2, "CHECK CONDITION");
    initiator.send_write(0, &[2; 512]).unwrap();
    assert_eq!(initiator.status().unwrap(), 0);
    drop(initiator);
    lab.ends_with(2);
}

/// Whoever only connects, or only asks an iSCSI server for its names, keeps nobody out.
#[test]
fn connections_of_nobody_in_particular_give_way() {
    let lab = lab(0, false);
    let mut held = Vec::new();
    let crowd = |held: &mut Vec<TcpStream>| {
        for _ in 0..30 {
            held.push(TcpStream::connect(&lab.address).unwrap());
            held.push(TcpStream::connect(&lab.portal).unwrap());
            held.extend(Initiator::ask_for_names(&lab.portal));
        }
    };
    crowd(&mut held);
    let mut nbd = Nbd::connect(&lab.address, "d").unwrap();
    let mut initiator = Initiator::log_in(&lab.portal, TARGET, 1);
    crowd(&mut held);
    nbd.ask((0, WRITE), 0, 1, &[1]).unwrap().unwrap();
    initiator.send_write(0, &[2; 512]).unwrap();
    initiator.status().unwrap();
    drop((nbd, initiator, held));
    lab.ends_with(2);
}
