//! Peers that break the rules.

use super::channel::SetUp;
use super::ring::{End, Memory};
use super::{Config, Socket, start_connect};
use crate::{
    Access, Buffer, ConnectParams, ConnectionEvent, Device, ListenOptions, Payload, QueuePairCaps, RecvRequest,
    SendFlags, SendOp, SendRequest, Status,
};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_iwarp::mpa::{self, Frame, Preferences};

/// Whether this kernel has it; before Linux 6.16 a device says why not, and nothing else can be tried.
fn is_supported() -> bool {
    let opened = Config::default().open();
    opened.inspect_err(|error| assert!(error.to_string().contains("Linux 6.16"), "{error}")).is_ok()
}

const TIMEOUT: Duration = Duration::from_secs(30);

fn preferences() -> Preferences {
    Preferences {
        markers: false,
        crc: false,
        revision: 2,
        ird: 8,
        ord: 8,
        peer_to_peer: true,
        rtr: mpa::ReadyToReceive::Write,
        announce: true,
    }
}

fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(done) = done() {
            return done;
        }
        assert!(start.elapsed() < TIMEOUT, "{what} did not happen");
    }
}

/// A connection whose rings its owner scribbles into.
struct Liar {
    socket: Socket,
    memory: Arc<Memory>,
}

impl Liar {
    fn request(addr: SocketAddr) -> Socket {
        let mut socket = start_connect(addr, &Config::default()).unwrap();
        let request = mpa::request(&preferences(), b"").encode();
        assert_eq!(socket.write(&request).unwrap(), request.len());
        socket
    }

    /// Once it has been answered.
    fn answered(mut socket: Socket) -> Option<Liar> {
        let mut reply = [0; 512];
        let n = socket.read(&mut reply).ok()?;
        let (frame, _) = Frame::decode(&reply[..n], true).unwrap().expect("a reply is sent whole");
        assert!(!frame.reject);
        let SetUp::Arrived(file) = &socket.memory else { panic!("it comes with the answer") };
        let memory = Memory::adopt(file.try_clone().unwrap()).unwrap();
        Some(Liar { socket, memory })
    }
}

struct Victim {
    device: Device,
    listener: crate::Listener,
    pd: crate::ProtectionDomain,
    cq: crate::CompletionQueue,
    buffer: Arc<Buffer>,
    region: crate::MemoryRegion,
}

impl Victim {
    fn new() -> Victim {
        let device = Config { ring: 4096, any_user: false }.open().unwrap();
        let listener = device.listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(4096).unwrap());
        let buffer = Arc::new(Buffer::new(3 << 12).unwrap());
        buffer.write(0, &[0x5a; 3 << 12]);
        let region = pd.register(&buffer, Access::LOCAL_WRITE).unwrap();
        Victim { device, listener, pd, cq, buffer, region }
    }

    fn accept(&self) -> crate::QueuePair {
        let caps = QueuePairCaps { max_send_wr: 16, max_recv_wr: 4, max_sge: 4 };
        let qp = self.pd.create_qp(&self.cq, &self.cq, caps).unwrap();
        for wr_id in 0..4 {
            qp.post_recv(&RecvRequest { wr_id, sges: &[self.region.sge(4096, 4096)] }).unwrap();
        }
        until("the request", || match self.device.poll_event()? {
            ConnectionEvent::Request(request) => Some(request),
            _ => None,
        })
        .accept(&qp, &ConnectParams::default())
        .unwrap();
        qp
    }

    /// What lies around the memory that peers may send to is as it was.
    fn check(&self) {
        let mut bytes = vec![0; 3 << 12];
        self.buffer.read(0, &mut bytes);
        assert!(bytes[..4096].iter().chain(&bytes[2 << 12..]).all(|byte| *byte == 0x5a));
    }
}

#[test]
fn who_scribbles_into_the_rings_ends_its_own_connection_at_most() {
    if !is_supported() {
        return;
    }
    let victim = Victim::new();
    // A peer that behaves, whose messages go on all the while.
    let good = Config::default().open().unwrap();
    let (pd, cq) = (good.alloc_pd().unwrap(), good.create_cq(256).unwrap());
    let qp = pd.create_qp(&cq, &cq, QueuePairCaps::default()).unwrap();
    qp.connect(victim.listener.local_addr(), &ConnectParams::default()).unwrap();
    // It sends its request.
    good.progress();
    let served = victim.accept();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let (mut done, mut ended) = (Vec::new(), 0);
    for round in 0..2000u64 {
        let socket = Liar::request(victim.listener.local_addr());
        let theirs = victim.accept();
        let liar = Liar::answered(socket).expect("it has been accepted");
        let (mut writer, _reader) = liar.memory.ends(End::Connecting);
        for _ in 0..next() % 40 {
            // Words of the control page, or anything else; or bytes in order, which are no frames.
            match next() % 4 {
                0 => liar.memory.scribble((next() % 1024) as usize & !7, &next().to_le_bytes()),
                1 => liar.memory.scribble((next() % 1024) as usize & !7, &(next() % 8192).to_le_bytes()),
                2 => liar.memory.scribble((next() % (4096 + 8184)) as usize, &next().to_le_bytes()),
                _ => {
                    let mut bytes: Vec<u8> = (0..next() % 200).map(|_| next() as u8).collect();
                    if let Some(len) = bytes.first_chunk_mut() {
                        *len = (next() as u16 % 300).to_be_bytes();
                    }
                    let piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
                    // SAFETY: of a vector of ours.
                    if unsafe { writer.write(&[piece]) }.is_ok() {
                        let _ = writer.publish();
                    }
                }
            }
            let request = SendRequest {
                wr_id: 9,
                op: SendOp::Send { invalidate: None },
                payload: Payload::Inline(&[7; 100]),
                flags: SendFlags::empty(),
            };
            let _ = theirs.post_send(&request);
            victim.cq.poll(&mut done, 64);
        }
        // Some stay, some go in order, some just go.
        match round % 3 {
            0 => drop(liar),
            1 => drop((writer, liar.socket)),
            _ => drop(theirs),
        }
        victim.device.progress();
        while let Some(event) = victim.device.poll_event() {
            ended += u32::from(matches!(event, ConnectionEvent::Disconnected { .. }));
        }
        done.clear();
        // The one that behaves is served as before.
        let payload = Payload::Inline(b"still here");
        let op = SendOp::Send { invalidate: None };
        until("the connection", || {
            good.progress();
            while good.poll_event().is_some() {}
            qp.info().map(drop)
        });
        qp.post_send(&SendRequest { wr_id: round, op, payload, flags: SendFlags::SIGNALED }).unwrap();
        until("a message of the peer that behaves", || {
            victim.cq.poll(&mut done, 64);
            cq.poll(&mut Vec::new(), 8);
            done.iter().find(|wc| wc.qp_num == served.number()).map(|wc| assert_eq!(wc.status, Status::Success))
        });
        served.post_recv(&RecvRequest { wr_id: 0, sges: &[victim.region.sge(4096, 4096)] }).unwrap();
        done.clear();
        victim.check();
    }
    assert!(ended > 500, "the others have ended: {ended}");
    assert!(served.error().is_none() && qp.error().is_none());
}

/// The thread that reads or closes a socket releases the files that came by it, and a lingering one makes that last.
#[test]
fn no_files_can_be_sent_to_a_listener() {
    if !is_supported() {
        return;
    }
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::os::fd::AsFd;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};
    let victim = Victim::new();
    let name = format!("thruway/shm/1/{}", victim.listener.local_addr());
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let send_a_file = |stream: &UnixStream| {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [stream.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        rustix::net::sendmsg(stream, &[std::io::IoSlice::new(b"MPA ")], &mut control, SendFlags::NOSIGNAL)
    };
    // Not before it is accepted, nor while it is set up, nor in use.
    assert_eq!(send_a_file(&stream), Err(rustix::io::Errno::PERM));
    stream.write_all(&mpa::request(&preferences(), b"").encode()).unwrap();
    assert_eq!(send_a_file(&stream), Err(rustix::io::Errno::PERM));
    let _qp = victim.accept();
    assert_eq!(send_a_file(&stream), Err(rustix::io::Errno::PERM));
    assert!(stream.read(&mut [0; 512]).unwrap() > 0, "it is answered");
}

/// Calls cost the one who is called no more than a look each, however many come.
#[test]
fn a_flood_of_calls_holds_up_no_look() {
    if !is_supported() {
        return;
    }
    let victim = Victim::new();
    let socket = Liar::request(victim.listener.local_addr());
    let qp = victim.accept();
    let liar = Liar::answered(socket).expect("it has been accepted");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut socket = liar.socket;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = socket.write(&[0; 32 << 10]);
            }
        });
        // Each ends, or this does not.
        for _ in 0..2000 {
            victim.device.progress();
            victim.device.wait(Some(Duration::ZERO)).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(qp.error().is_none());
}
