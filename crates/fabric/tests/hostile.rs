//! Peers that speak MPA by hand, consumers in several threads, and ends in every order, over real sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thruway_fabric::iwarp::Config;
use thruway_fabric::*;

const TIMEOUT: Duration = Duration::from_secs(30);

fn all() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC
}

struct Server {
    device: Device,
    listener: Listener,
}

fn server(crc: bool) -> Server {
    server_with(crc, ListenOptions::default())
}

fn server_with(crc: bool, options: ListenOptions) -> Server {
    let device = Config { crc, ..Config::default() }.open().unwrap();
    let listener = device.listen("127.0.0.1:0".parse().unwrap(), &options).unwrap();
    Server { device, listener }
}

impl Server {
    fn addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    fn request(&self) -> ConnectionRequest {
        let mut got = None;
        until("a request", || {
            if let Some(ConnectionEvent::Request(request)) = self.device.poll_event() {
                got = Some(request);
            }
            got.is_some()
        });
        got.unwrap()
    }

    /// A peer by hand, connected to a new queue pair.
    fn serve(&self, pd: &ProtectionDomain, cq: &CompletionQueue) -> (TcpStream, QueuePair) {
        let mut peer = raw(self.addr());
        let qp = pd.create_qp(cq, cq, QueuePairCaps::default()).unwrap();
        self.request().accept(&qp, &ConnectParams::default()).unwrap();
        self.device.progress();
        peer.read_exact(&mut [0; 20]).unwrap();
        (peer, qp)
    }
}

/// A client by hand: MPA revision 1, no CRC.
fn raw(addr: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(b"MPA ID Req Frame\0\x01\0\0").unwrap();
    stream
}

fn untagged(opcode: u8, last: bool, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![if last { 0x41 } else { 0x01 }, 0x40 | opcode, 0, 0, 0, 0];
    for field in [qn, msn, mo] {
        ulpdu.extend(field.to_be_bytes());
    }
    ulpdu.extend(payload);
    let mut fpdu = (ulpdu.len() as u16).to_be_bytes().to_vec();
    fpdu.extend(ulpdu);
    fpdu.resize(fpdu.len().next_multiple_of(4) + 4, 0);
    fpdu
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "not in time: {what}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

struct Pair {
    near: QueuePair,
    near_cq: CompletionQueue,
    far: QueuePair,
    far_cq: CompletionQueue,
}

fn pair(near: &Device, server: &Server, near_pd: &ProtectionDomain, far_pd: &ProtectionDomain) -> Pair {
    let (near_cq, far_cq) = (near.create_cq(1024).unwrap(), server.device.create_cq(1024).unwrap());
    let near_qp = near_pd.create_qp(&near_cq, &near_cq, QueuePairCaps::default()).unwrap();
    let far_qp = far_pd.create_qp(&far_cq, &far_cq, QueuePairCaps::default()).unwrap();
    near_qp.connect(server.addr(), &ConnectParams::default()).unwrap();
    let mut ends = 0;
    until("a connection", || {
        match server.device.poll_event() {
            Some(ConnectionEvent::Request(request)) => request.accept(&far_qp, &ConnectParams::default()).unwrap(),
            Some(ConnectionEvent::Established { .. }) => ends += 1,
            _ => {}
        }
        if let Some(ConnectionEvent::Established { .. }) = near.poll_event() {
            ends += 1;
        }
        ends == 2
    });
    Pair { near: near_qp, near_cq, far: far_qp, far_cq }
}

fn inline(wr_id: u64, op: SendOp) -> SendRequest<'static> {
    SendRequest { wr_id, op, payload: Payload::Inline(b"octets"), flags: SendFlags::SIGNALED }
}

#[test]
fn one_peer_does_not_take_the_device_down() {
    let server = server(false);
    let (pd, cq) = (server.device.alloc_pd().unwrap(), server.device.create_cq(512).unwrap());
    let (mut peer, qp) = server.serve(&pd, &cq);
    peer.write_all(&untagged(7, false, 2, 1, 0, &[0; 60])).unwrap();
    peer.write_all(&untagged(7, true, 2, 1, 60, &[0; 60])).unwrap();
    until("the end of the liar", || {
        server.device.progress();
        qp.error().is_some()
    });
    drop(qp);
    let (_honest, _qp) = server.serve(&pd, &cq);
}

#[test]
fn a_peer_may_read_what_its_owner_changes() {
    const LEN: usize = 1 << 20;
    let server = server(true);
    let near = Config::default().open().unwrap();
    let (near_pd, far_pd) = (near.alloc_pd().unwrap(), server.device.alloc_pd().unwrap());
    let pair = pair(&near, &server, &near_pd, &far_pd);
    let (ours, theirs) = (Arc::new(Buffer::new(LEN).unwrap()), Arc::new(Buffer::new(LEN).unwrap()));
    let (near_mr, far_mr) = (near_pd.register(&ours, all()).unwrap(), far_pd.register(&theirs, all()).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0usize;
            while !stop.load(Ordering::Relaxed) {
                server.device.progress();
                for _ in 0..50 {
                    n += 1;
                    theirs.write(n * 64 % LEN, &n.to_ne_bytes());
                }
            }
        });
        let mut done = Vec::new();
        for (wr_id, len) in [(1, LEN as u32), (2, LEN as u32), (3, 64), (4, 64)].into_iter().cycle().take(400) {
            let sges = [near_mr.sge(0, len)];
            let op = SendOp::Read { remote: far_mr.remote(0) };
            let request = SendRequest { wr_id, op, payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED };
            pair.near.post_send(&request).unwrap();
            until("a read", || {
                pair.near_cq.poll(&mut done, 8);
                !done.is_empty()
            });
            assert!(done.drain(..).all(|wc| wc.status == Status::Success), "{:?}", pair.near.error());
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!((pair.near.error(), pair.far.error()), (None, None));
    drop(pair.far_cq);
}

/// What a Terminate says: its control field, and how long it is.
fn terminated(peer: &mut TcpStream) -> ([u8; 4], usize) {
    peer.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut len = [0; 2];
    peer.read_exact(&mut len).unwrap();
    let mut fpdu = vec![0; usize::from(u16::from_be_bytes(len))];
    peer.read_exact(&mut fpdu).unwrap();
    assert_eq!(fpdu[1], 0x47, "no Terminate: {fpdu:x?}");
    (fpdu[18..22].try_into().unwrap(), fpdu.len() - 18)
}

#[test]
fn a_read_that_is_refused_is_told_with_its_headers() {
    let server = server(false);
    let (pd, cq) = (server.device.alloc_pd().unwrap(), server.device.create_cq(512).unwrap());
    let (mut peer, _qp) = server.serve(&pd, &cq);
    let mut request = [0; 28];
    request[12..16].copy_from_slice(&8_u32.to_be_bytes());
    request[16..20].copy_from_slice(&0xdead_u32.to_be_bytes());
    peer.write_all(&untagged(1, true, 1, 1, 0, &request)).unwrap();
    until("its end", || matches!(server.device.poll_event(), Some(ConnectionEvent::Disconnected { .. })));
    // RDMAP, remote protection, invalid STag; length, DDP header and the request follow.
    assert_eq!(terminated(&mut peer), ([0x01, 0x00, 0xe0, 0], 4 + 2 + 18 + 28));
}

#[test]
fn a_reply_that_asks_too_much_is_terminated() {
    let device = Config { crc: false, ..Config::default() }.open().unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(512).unwrap());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairCaps::default()).unwrap();
    qp.connect(listener.local_addr().unwrap(), &ConnectParams::default()).unwrap();
    let responder = std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        peer.read_exact(&mut [0; 24]).unwrap();
        // Peer to peer, RTR by Write, and reads without end.
        peer.write_all(b"MPA ID Rep Frame\x10\x02\0\x04\x80\x10\xbf\xfe").unwrap();
        terminated(&mut peer)
    });
    let mut cause = None;
    until("its end", || {
        match device.poll_event() {
            Some(ConnectionEvent::Disconnected { cause: why, .. }) => cause = Some(why),
            Some(ConnectionEvent::Established { .. }) => panic!("established"),
            _ => {}
        }
        cause.is_some()
    });
    assert!(matches!(cause, Some(ConnectionError::Protocol(_))), "{cause:?}");
    // MPA, insufficient IRD.
    assert_eq!(responder.join().unwrap(), ([0x20, 0x06, 0, 0], 4));
}

#[test]
fn who_sends_before_the_reply_is_not_served() {
    let server = server(false);
    let mut peer = TcpStream::connect(server.addr()).unwrap();
    let mut bytes = b"MPA ID Req Frame\0\x01\0\0".to_vec();
    bytes.extend(untagged(3, true, 0, 1, 0, b"early"));
    peer.write_all(&bytes).unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    until("its end", || {
        assert!(server.device.poll_event().is_none());
        !peer.read(&mut [0; 20]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
    });
}

#[test]
fn who_calls_a_device_that_nobody_holds_is_refused() {
    let Server { device, listener } = server(false);
    let cq = device.create_cq(16).unwrap();
    drop(device);
    let mut peer = raw(listener.local_addr());
    peer.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    until("a refusal", || {
        assert_eq!(cq.poll(&mut Vec::new(), 1), 0);
        !peer.read(&mut [0; 20]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
    });
}

#[test]
fn half_a_message_does_not_cost_a_shared_receive() {
    let server = server(false);
    let pd = server.device.alloc_pd().unwrap();
    let buffer = Arc::new(Buffer::new(65536).unwrap());
    let mr = pd.register(&buffer, all()).unwrap();
    let srq = pd.create_srq(4, 1).unwrap();
    for wr_id in 0..4 {
        srq.post_recv(&RecvRequest { wr_id, sges: &[mr.sge(wr_id as usize * 4096, 4096)] }).unwrap();
    }
    let cq = server.device.create_cq(512).unwrap();
    let connect = || {
        let mut peer = raw(server.addr());
        let qp = pd.create_qp_with_srq(&cq, &cq, QueuePairCaps::default(), &srq).unwrap();
        server.request().accept(&qp, &ConnectParams::default()).unwrap();
        server.device.progress();
        peer.read_exact(&mut [0; 20]).unwrap();
        (peer, qp)
    };
    for _ in 0..8 {
        let (mut peer, qp) = connect();
        peer.write_all(&untagged(3, false, 0, 1, 0, &[1; 8])).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        // However far the server has read when it drops the queue pair.
        server.device.progress();
        server.device.progress();
        drop(qp);
    }
    let mut done = Vec::new();
    cq.poll(&mut done, 64);
    for flushed in done.drain(..) {
        let at = flushed.wr_id as usize * 4096;
        srq.post_recv(&RecvRequest { wr_id: flushed.wr_id, sges: &[mr.sge(at, 4096)] }).unwrap();
    }
    let (mut peer, qp) = connect();
    for msn in 1..=4 {
        peer.write_all(&untagged(3, true, 0, msn, 0, &[1; 8])).unwrap();
    }
    until("four messages", || {
        cq.poll(&mut done, 8);
        assert_eq!(qp.error(), None);
        done.len() == 4
    });
}

#[test]
fn the_end_is_not_told_before_the_beginning() {
    let server = server(false);
    drop(raw(server.addr()));
    let (pd, cq) = (server.device.alloc_pd().unwrap(), server.device.create_cq(512).unwrap());
    let qp = pd.create_qp(&cq, &cq, QueuePairCaps::default()).unwrap();
    server.request().accept(&qp, &ConnectParams::default()).unwrap();
    let mut order = Vec::new();
    until("both", || {
        match server.device.poll_event() {
            Some(ConnectionEvent::Established { .. }) => order.push("established"),
            Some(ConnectionEvent::Disconnected { .. }) => order.push("disconnected"),
            _ => {}
        }
        order.len() == 2
    });
    assert_eq!(order, ["established", "disconnected"]);
}

#[test]
fn every_sleeper_is_woken() {
    let device = Config::default().open().unwrap();
    let asleep = Arc::new(std::sync::Barrier::new(4));
    let sleepers: Vec<_> = (0..3)
        .map(|_| {
            let (device, asleep) = (device.clone(), Arc::clone(&asleep));
            std::thread::spawn(move || {
                asleep.wait();
                let start = Instant::now();
                device.wait(Some(TIMEOUT * 2)).unwrap();
                start.elapsed()
            })
        })
        .collect();
    asleep.wait();
    // Another thread's short waits end in between, whenever they do; whoever sleeps by then is woken in the end.
    while !sleepers.iter().all(std::thread::JoinHandle::is_finished) {
        device.wait(Some(Duration::from_millis(1))).unwrap();
        device.wake();
    }
    for sleeper in sleepers {
        assert!(sleeper.join().unwrap() < TIMEOUT);
    }
}

#[test]
fn a_queue_that_nobody_can_poll_keeps_nobody_awake() {
    let server = server(true);
    let near = Config::default().open().unwrap();
    let (near_pd, far_pd) = (near.alloc_pd().unwrap(), server.device.alloc_pd().unwrap());
    let pair = pair(&near, &server, &near_pd, &far_pd);
    drop(pair.near_cq);
    pair.far.post_recv(&RecvRequest { wr_id: 1, sges: &[] }).unwrap();
    let buffer = Arc::new(Buffer::new(4096).unwrap());
    let mr = far_pd.register(&buffer, all()).unwrap();
    for id in 0..5 {
        pair.near.post_send(&inline(id, SendOp::Write { remote: mr.remote(0), immediate: None })).unwrap();
    }
    // With a completion that counts as not polled, `arm` would say that there is something to do, for ever.
    until("sleep", || near.arm());
}

#[test]
fn a_peer_that_sends_on_after_its_end_does_not_hold_the_driver() {
    let server = server(false);
    let (pd, cq) = (server.device.alloc_pd().unwrap(), server.device.create_cq(512).unwrap());
    let (mut liar, qp) = server.serve(&pd, &cq);
    let (mut honest, honest_qp) = server.serve(&pd, &cq);
    liar.write_all(&untagged(15, true, 0, 1, 0, &[0; 8])).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let flood: Vec<_> = (0..2)
        .map(|_| {
            let (mut liar, stop) = (liar.try_clone().unwrap(), Arc::clone(&stop));
            std::thread::spawn(move || {
                let junk = vec![0; 1 << 20];
                while !stop.load(Ordering::Relaxed) && liar.write(&junk).is_ok() {}
            })
        })
        .collect();
    until("the fault", || {
        server.device.progress();
        qp.error().is_some()
    });
    // Others are served meanwhile.
    let mut done = Vec::new();
    for msn in 1..=100u32 {
        honest_qp.post_recv(&RecvRequest { wr_id: msn.into(), sges: &[] }).unwrap();
        honest.write_all(&untagged(3, true, 0, msn, 0, &[])).unwrap();
        until("an honest message", || {
            cq.poll(&mut done, 8);
            done.iter().any(|wc| wc.wr_id == u64::from(msn) && wc.status == Status::Success)
        });
    }
    stop.store(true, Ordering::Relaxed);
    drop((liar, qp));
    flood.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_binding_completes_in_its_turn_and_is_counted() {
    let server = server(true);
    let near = Config::default().open().unwrap();
    let (near_pd, far_pd) = (near.alloc_pd().unwrap(), server.device.alloc_pd().unwrap());
    let pair = pair(&near, &server, &near_pd, &far_pd);
    let buffer = Arc::new(Buffer::new(4096).unwrap());
    let (near_mr, far_mr) = (near_pd.register(&buffer, all()).unwrap(), far_pd.register(&buffer, all()).unwrap());
    let sges = [near_mr.sge(0, 8)];
    let op = SendOp::Read { remote: far_mr.remote(0) };
    let read = |wr_id| SendRequest { wr_id, op, payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED };
    pair.near.post_send(&read(1)).unwrap();
    let _window = pair.near.bind_window(&near_mr, 0, 8, Access::REMOTE_READ, Some(2)).unwrap();
    let mut done = Vec::new();
    until("both", || {
        server.device.progress();
        pair.near_cq.poll(&mut done, 8);
        done.len() == 2
    });
    assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1, 2]);
    // Behind a read that is not answered they fill the queue.
    pair.near.post_send(&read(3)).unwrap();
    let most = QueuePairCaps::default().max_send_wr as usize;
    let bound =
        (0..most * 2).take_while(|_| pair.near.bind_window(&near_mr, 0, 8, Access::REMOTE_READ, Some(4)).is_ok());
    assert!(bound.count() < most);
}

#[test]
fn an_orderly_end_is_over_even_if_the_peer_does_not_end() {
    let server = server(false);
    let (pd, cq) = (server.device.alloc_pd().unwrap(), server.device.create_cq(512).unwrap());
    let (_silent, qp) = server.serve(&pd, &cq);
    qp.post_recv(&RecvRequest { wr_id: 1, sges: &[] }).unwrap();
    qp.disconnect();
    let mut done = Vec::new();
    until("the end", || {
        server.device.wait(Some(Duration::from_millis(100))).unwrap();
        while server.device.poll_event().is_some() {}
        cq.poll(&mut done, 8);
        qp.error().is_some() && done.len() == 1
    });
    assert_eq!(done[0].status, Status::Flushed);
}

#[test]
fn what_is_posted_before_both_ends_part_still_arrives() {
    const LEN: usize = 16 << 20;
    let server = server(false);
    let near = Config { crc: false, ..Config::default() }.open().unwrap();
    let (near_pd, far_pd) = (near.alloc_pd().unwrap(), server.device.alloc_pd().unwrap());
    let pair = pair(&near, &server, &near_pd, &far_pd);
    let (ours, theirs) = (Arc::new(Buffer::new(LEN).unwrap()), Arc::new(Buffer::new(LEN).unwrap()));
    ours.write(LEN - 8, b"last one");
    let (near_mr, far_mr) = (near_pd.register(&ours, all()).unwrap(), far_pd.register(&theirs, all()).unwrap());
    let sges = [near_mr.sge(0, LEN as u32)];
    let op = SendOp::Write { remote: far_mr.remote(0), immediate: None };
    let request = SendRequest { wr_id: 1, op, payload: Payload::Sges(&sges), flags: SendFlags::SIGNALED };
    pair.near.post_send(&request).unwrap();
    pair.near.disconnect();
    pair.far.disconnect();
    let mut done = Vec::new();
    until("both ends", || {
        server.device.progress();
        near.progress();
        pair.near_cq.poll(&mut done, 8);
        pair.near.error().is_some() && pair.far.error().is_some()
    });
    assert_eq!(done.iter().map(|wc| wc.status).collect::<Vec<_>>(), [Status::Success]);
    let mut last = [0; 8];
    theirs.read(LEN - 8, &mut last);
    assert_eq!(&last, b"last one");
}

#[test]
fn requests_that_nobody_answers_are_bounded_and_the_oldest_give_way() {
    let server = server_with(false, ListenOptions { max_pending: 8, ..ListenOptions::default() });
    let clients: Vec<TcpStream> = (0..100)
        .map(|_| {
            let client = raw(server.addr());
            (0..20).for_each(|_| server.device.progress());
            client
        })
        .collect();
    (0..1000).for_each(|_| server.device.progress());
    let mut held = Vec::new();
    while let Some(event) = server.device.poll_event() {
        if let ConnectionEvent::Request(request) = event {
            held.push(request.peer());
            std::mem::drop(request);
        }
    }
    assert!((1..=8).contains(&held.len()), "{}", held.len());
    assert!(held.contains(&clients.last().unwrap().local_addr().unwrap()), "the newest is among them");
}

/// A consumer that lets a burst of requests wait loses none of them to `max_pending`.
#[test]
fn requests_that_were_polled_do_not_give_way() {
    let server = server_with(false, ListenOptions { max_pending: 8, ..ListenOptions::default() });
    let mut held = Vec::new();
    let clients: Vec<TcpStream> = (0..100)
        .map(|_| {
            let client = raw(server.addr());
            until("a request", || {
                server.device.progress();
                match server.device.poll_event() {
                    Some(ConnectionEvent::Request(request)) => {
                        held.push(request);
                        true
                    }
                    _ => false,
                }
            });
            client
        })
        .collect();
    held.drain(..).for_each(|request| request.reject(b"busy"));
    for mut client in clients {
        let mut reply = Vec::new();
        client.read_to_end(&mut reply).unwrap();
        assert!(reply.ends_with(b"busy"), "{reply:?}");
    }
}
