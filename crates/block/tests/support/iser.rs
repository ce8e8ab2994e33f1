//! An iSER initiator over iWARP in user space that does as little as it can, and as much wrong as it is asked to.

use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_fabric::iwarp::Config;
use thruway_fabric::{
    Access, Buffer, CompletionQueue, ConnectParams, ConnectionEvent, Device, MemoryRegion, Payload, ProtectionDomain,
    Provider, QueuePair, QueuePairCaps, RecvRequest, RemoteAddr, SendFlags, SendOp, SendRequest, Status,
    WorkCompletion,
};

/// Bytes of an iSER header and of a PDU's.
const HEADER: usize = 28;
const BHS: usize = 48;
/// Of a message, and how many are received at once.
const SLOT: usize = 16 << 10;
const RECEIVES: usize = 16;
/// Where messages leave from, and what commands read and write.
const OUT: usize = RECEIVES * SLOT;
const DATA: usize = OUT + SLOT;
/// Bytes that a command can read or write.
pub(crate) const DATA_LEN: usize = 1 << 20;
/// Only reached if something hangs.
const HUNG: Duration = Duration::from_secs(60);

/// An iSER control message, and which of its two buffers are there.
const CONTROL: u8 = 0x10;
const WRITE_VALID: u8 = 0x08;
const READ_VALID: u8 = 0x04;

/// A connection, and after [`Initiator::log_in`] a session with the only unit of a target. Fields are dropped in order.
pub(crate) struct Initiator {
    qp: QueuePair,
    sends: CompletionQueue,
    receives: CompletionQueue,
    region: MemoryRegion,
    buffer: Arc<Buffer>,
    _pd: ProtectionDomain,
    device: Device,
    tag: u32,
}

/// The buffer that a command advertises.
#[derive(Clone, Copy)]
pub(crate) enum Advertise {
    Nothing,
    /// For the target to read from.
    Write(RemoteAddr),
    /// For the target to write to.
    Read(RemoteAddr),
}

impl Initiator {
    /// Connects; `None` if the connection is refused.
    pub(crate) fn connect(portal: &str) -> Option<Initiator> {
        let device = Provider::Iwarp(Config::default()).open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let (sends, receives) = (device.create_cq(1).unwrap(), device.create_cq(RECEIVES).unwrap());
        let caps = QueuePairCaps { max_send_wr: 1, max_recv_wr: RECEIVES as u32, max_sge: 1 };
        let qp = pd.create_qp(&sends, &receives, caps).unwrap();
        let buffer = Arc::new(Buffer::new(DATA + DATA_LEN).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let region = pd.register(&buffer, access).unwrap();
        let initiator = Initiator { qp, sends, receives, region, buffer, _pd: pd, device, tag: 0 };
        for slot in 0..RECEIVES {
            initiator.post_receive(slot);
        }
        // Neither zero-based addresses nor keys that are revoked by the response.
        let params = ConnectParams { private_data: vec![0xc0, 0, 0, 0], ..ConnectParams::default() };
        initiator.qp.connect(portal.parse().unwrap(), &params).unwrap();
        let established = initiator.until(|| match initiator.device.poll_event() {
            Some(ConnectionEvent::Established { .. }) => Some(true),
            Some(ConnectionEvent::Disconnected { .. }) => Some(false),
            _ => None,
        });
        established.then_some(initiator)
    }

    /// Connects and logs in. What tells it from others is `isid`.
    pub(crate) fn log_in(portal: &str, target: &str, isid: u8) -> Initiator {
        let mut initiator = Initiator::connect(portal).expect("it is let in");
        let keys = format!(
            "InitiatorName=iqn.2026-11.org.example:{isid}\0SessionType=Normal\0TargetName={target}\0RDMAExtensions=Yes\0"
        );
        assert!(initiator.send_login(isid, 0x87, keys.as_bytes()));
        let (header, _) = initiator.receive().expect("an answer to the login");
        assert_eq!((header[0], header[1] & 3, &header[36..38]), (0x23, 3, &[0, 0][..]), "{header:?}");
        // The first command ends with a unit attention.
        initiator.command(&[0; 6], 0, Advertise::Nothing);
        initiator.status().unwrap();
        initiator
    }

    /// A login PDU with these flags; false if the connection has ended.
    pub(crate) fn send_login(&mut self, isid: u8, flags: u8, keys: &[u8]) -> bool {
        let mut header = [0; BHS];
        (header[0], header[1], header[13]) = (0x43, flags, isid);
        header[5..8].copy_from_slice(&(keys.len() as u32).to_be_bytes()[1..]);
        self.send(header, Advertise::Nothing, keys)
    }

    /// A control message; false if the connection has ended.
    pub(crate) fn send(&self, pdu: [u8; BHS], advertise: Advertise, data: &[u8]) -> bool {
        let mut header = [0; HEADER];
        let (valid, at, remote) = match advertise {
            Advertise::Nothing => (0, 4, RemoteAddr { addr: 0, rkey: 0 }),
            Advertise::Write(remote) => (WRITE_VALID, 4, remote),
            Advertise::Read(remote) => (READ_VALID, 16, remote),
        };
        header[0] = CONTROL | valid;
        header[at..at + 4].copy_from_slice(&remote.rkey.to_be_bytes());
        header[at + 4..at + 12].copy_from_slice(&remote.addr.to_be_bytes());
        self.send_raw(&[&header[..], &pdu, data].concat())
    }

    /// Anything, as one message; false if the connection has ended.
    pub(crate) fn send_raw(&self, message: &[u8]) -> bool {
        self.buffer.write(OUT, message);
        let sge = self.region.sge(OUT, message.len() as u32);
        let request = SendRequest {
            wr_id: 0,
            op: SendOp::Send { invalidate: None },
            payload: Payload::Sges(&[sge]),
            flags: SendFlags::SIGNALED,
        };
        self.qp.post_send(&request).is_ok() && self.completion(&self.sends).is_some()
    }

    /// A command beside the line, for `len` bytes.
    pub(crate) fn command(&mut self, cdb: &[u8], len: usize, advertise: Advertise) -> bool {
        self.tag += 1;
        let direction = match advertise {
            Advertise::Nothing => 0,
            Advertise::Write(_) => 0x20,
            Advertise::Read(_) => 0x40,
        };
        self.command_with(cdb, len, 0x80 | direction, advertise)
    }

    /// The same, whatever the flags and the buffer have to do with each other.
    pub(crate) fn command_with(&mut self, cdb: &[u8], len: usize, flags: u8, advertise: Advertise) -> bool {
        let mut header = [0; BHS];
        (header[0], header[1]) = (0x41, flags);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        header[20..24].copy_from_slice(&(len as u32).to_be_bytes());
        header[32..32 + cdb.len()].copy_from_slice(cdb);
        self.send(header, advertise, &[])
    }

    /// What commands read and write, for a target.
    pub(crate) fn remote(&self) -> RemoteAddr {
        self.region.remote(DATA)
    }

    pub(crate) fn set_data(&self, data: &[u8]) {
        self.buffer.write(DATA, data);
    }

    pub(crate) fn data(&self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.buffer.read(DATA, &mut data);
        data
    }

    /// WRITE (10) of these blocks from the first; its status, `None` if the connection has ended.
    pub(crate) fn write(&mut self, data: &[u8]) -> Option<u8> {
        self.set_data(data);
        self.command(&cdb(0x2a, data.len()), data.len(), Advertise::Write(self.remote()));
        self.status()
    }

    /// READ (10) of so many bytes from the first.
    pub(crate) fn read(&mut self, len: usize) -> Option<(u8, Vec<u8>)> {
        self.command(&cdb(0x28, len), len, Advertise::Read(self.remote()));
        let status = self.status()?;
        Some((status, self.data(len)))
    }

    /// The status of the next command that is over; `None` if the connection has ended.
    pub(crate) fn status(&mut self) -> Option<u8> {
        loop {
            let (header, _) = self.receive()?;
            if header[0] == 0x21 {
                return Some(header[3]);
            }
        }
    }

    /// The next PDU; `None` if the connection has ended.
    pub(crate) fn receive(&mut self) -> Option<([u8; BHS], Vec<u8>)> {
        let arrived = self.completion(&self.receives)?;
        let slot = arrived.wr_id as usize;
        let mut message = vec![0; arrived.len as usize];
        self.buffer.read(slot * SLOT, &mut message);
        self.post_receive(slot);
        let header: [u8; BHS] = message[HEADER..HEADER + BHS].try_into().unwrap();
        Some((header, message.split_off(HEADER + BHS)))
    }

    /// The next request that has succeeded; `None` if the connection has ended.
    fn completion(&self, queue: &CompletionQueue) -> Option<WorkCompletion> {
        let mut done = Vec::new();
        self.until(|| {
            let has_ended = self.qp.error().is_some();
            queue.poll(&mut done, 1);
            match done.pop() {
                Some(done) if done.status == Status::Success => Some(Some(done)),
                None if has_ended => Some(None),
                _ => None,
            }
        })
    }

    fn post_receive(&self, slot: usize) {
        let sge = self.region.sge(slot * SLOT, SLOT as u32);
        // It fails when the connection has ended.
        let _ = self.qp.post_recv(&RecvRequest { wr_id: slot as u64, sges: &[sge] });
    }

    fn until<T>(&self, mut found: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            self.device.progress();
            if let Some(found) = found() {
                return found;
            }
            assert!(start.elapsed() < HUNG, "the target neither answers nor ends the connection");
            self.device.wait(Some(Duration::from_millis(100))).unwrap();
        }
    }
}

/// A command of ten bytes for so many from the first block on.
pub(crate) fn cdb(operation: u8, len: usize) -> [u8; 10] {
    let blocks = ((len / 512) as u16).to_be_bytes();
    [operation, 0, 0, 0, 0, 0, 0, blocks[0], blocks[1], 0]
}
