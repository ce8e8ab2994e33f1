//! A program served over RDMA, to clients of iWARP in user space that keep the rules and to those that do not.

use crate::flood_peers;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_fabric::iwarp::Config;
use thruway_fabric::slots::{Completed, MessageSlots};
use thruway_fabric::{
    Access, Buffer, CompletionQueue, ConnectParams, ConnectionEvent, Device, MemoryRegion, ProtectionDomain, Provider,
    QueuePair, QueuePairCaps, Status,
};
use thruway_rpc::message::{CallHeader, OpaqueAuth};
use thruway_rpc::rdma::header::{Chunks, Header, PrivateData, Procedure, RdmaSegment, ReadChunk};
use thruway_rpc::server::{Answer, Call, Design, Outcome, Program, Programs, RdmaConfig, Server};
use thruway_rpc::xdr::{self, Bulk, Decoder, Encoder};
use thruway_server::{Address, Body};

const PROGRAM: u32 = 0x2000_0001;
/// Only reached if something hangs.
const HUNG: Duration = Duration::from_secs(60);
const MESSAGE_MAX: usize = 4096;

/// Procedure 1 returns its item as one that may go to a chunk, 2 as plain bytes, 3 panics, 4 never ends.
struct Echo;

impl Program for Echo {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        1..=1
    }

    fn find_bulk(&self, call: &CallHeader<'_>, _: &mut Decoder<'_>) -> xdr::Result<bool> {
        Ok(call.procedure == 1)
    }

    fn call<'a>(&'a self, call: &'a Call, mut results: Encoder) -> Answer<'a> {
        Box::pin(async move {
            let mut d = call.arguments();
            let item = match d.bulk(1 << 20).expect("an item") {
                Bulk::Inline(bytes) => bytes.to_vec(),
                Bulk::Segment(segment) => segment.as_slice().to_vec(),
            };
            match call.procedure {
                1 => results.bulk(Body::Bytes(item)),
                2 => results.opaque(&item),
                3 => panic!("on purpose"),
                _ => std::future::pending().await,
            }
            Outcome::Results(results)
        })
    }
}

fn start(reactors: &Reactors) -> (Server, SocketAddr) {
    start_with(reactors, Design::ReadWrite)
}

fn start_with(reactors: &Reactors, design: Design) -> (Server, SocketAddr) {
    let config = RdmaConfig {
        protocol: "echo",
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        provider: Provider::Iwarp(Config::default()),
        design,
        programs: Programs::new([Arc::new(Echo) as Arc<dyn Program>]),
        own_user_only: false,
        connections_max: 64,
    };
    let server = Server::start_rdma(config, reactors).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!() };
    (server, address)
}

struct Client {
    qp: QueuePair,
    cq: CompletionQueue,
    slots: MessageSlots,
    pd: ProtectionDomain,
    device: Device,
    received: RefCell<Vec<Vec<u8>>>,
}

impl Client {
    fn connect(to: SocketAddr) -> Client {
        let device = Provider::Iwarp(Config::default()).open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(1024).unwrap();
        let caps = QueuePairCaps { max_send_wr: 512, max_recv_wr: 256, max_sge: 1 };
        let qp = pd.create_qp(&cq, &cq, caps).unwrap();
        let slots = MessageSlots::new(&pd, 256, 256, MESSAGE_MAX).unwrap();
        slots.post_receives(&qp).unwrap();
        let said = PrivateData { remote_invalidation: true, send_size: 4096, receive_size: 4096 };
        let private_data = said.encode().to_vec();
        qp.connect(to, &ConnectParams { private_data, ird: 16, ord: 0, ..ConnectParams::default() }).unwrap();
        let client = Client { qp, cq, slots, pd, device, received: RefCell::default() };
        while client.qp.info().is_none() {
            if let Some(ConnectionEvent::Disconnected { cause, .. }) = client.device.poll_event() {
                panic!("{cause}");
            }
            client.device.wait(Some(HUNG)).unwrap();
        }
        client
    }

    fn send(&mut self, message: &[u8]) {
        let stored = self.slots.store(message).expect("a free slot");
        self.slots.send(&self.qp, stored).unwrap();
    }

    /// Sends a message repeatedly, as fast as the send queue accepts it, until `stop` is set or the connection has ended.
    fn flood(mut self, what: &[u8], stop: &std::sync::atomic::AtomicBool) {
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            while let Some(stored) = self.slots.store(what) {
                if self.slots.send(&self.qp, stored).is_err() {
                    return;
                }
            }
            let mut completions = Vec::new();
            if self.cq.poll(&mut completions, 64) == 0 {
                if let Some(ConnectionEvent::Disconnected { .. }) = self.device.poll_event() {
                    return;
                }
                self.device.wait(Some(Duration::from_millis(50))).unwrap();
            }
            for wc in completions {
                if wc.status != Status::Success {
                    return;
                }
                if let Completed::Received(received) = self.slots.complete(&wc) {
                    self.slots.post_receive(&self.qp, received).unwrap();
                }
            }
        }
    }

    /// The next message; `None` if the connection has ended.
    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            if !self.received.borrow().is_empty() {
                return Some(self.received.borrow_mut().remove(0));
            }
            let mut completions = Vec::new();
            if self.cq.poll(&mut completions, 64) == 0 {
                if let Some(ConnectionEvent::Disconnected { .. }) = self.device.poll_event() {
                    return None;
                }
                self.device.wait(Some(HUNG)).unwrap();
            }
            for wc in completions {
                if wc.status != Status::Success {
                    return None;
                }
                if let Completed::Received(received) = self.slots.complete(&wc) {
                    self.received.borrow_mut().push(self.slots.read(received));
                    self.slots.post_receive(&self.qp, received).unwrap();
                }
            }
        }
    }

    fn register(&self, content: &[u8]) -> (Arc<Buffer>, MemoryRegion) {
        let buffer = Arc::new(Buffer::new(content.len().max(4096)).unwrap());
        buffer.write(0, content);
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let region = self.pd.register(&buffer, access).unwrap();
        (buffer, region)
    }

    /// Header and the bytes behind it of the next reply.
    fn reply(&mut self) -> (Header, Vec<u8>) {
        let message = self.next().expect("a reply");
        let mut d = Decoder::new(&message);
        let header = Header::decode(&mut d).unwrap();
        (header, d.rest().to_vec())
    }
}

fn piece(region: &MemoryRegion, at: u64, length: u32) -> RdmaSegment {
    RdmaSegment { handle: region.rkey(), length, offset: region.addr() + at }
}

/// The RPC message of a call up to its item, which comes next, with its length.
fn rpc(xid: u32, procedure: u32, len: usize) -> Vec<u8> {
    let mut out = Encoder::new();
    for word in [xid, 0, 2, PROGRAM, 1, procedure] {
        out.u32(word);
    }
    for auth in [OpaqueAuth::NONE, OpaqueAuth::NONE] {
        out.u32(auth.flavor);
        out.opaque(auth.body);
    }
    out.u32(len as u32);
    out.into_parts().0
}

fn message(xid: u32, procedure: Procedure, rest: &[u8]) -> Vec<u8> {
    let mut out = Encoder::new();
    Header { xid, credits: 64, procedure }.encode(&mut out);
    [out.into_parts().0, rest.to_vec()].concat()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 / 3) as u8).collect()
}

/// Bytes of a reply before its results: XID, reply, accepted, no verifier, success.
const SUCCESS_LEN: usize = 24;

#[test]
fn items_go_by_chunks_of_many_pieces() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (server, address) = start(&reactors);
    let mut client = Client::connect(address);
    for len in [0, 1, 3, 4, 1000, 4095, 100_000, 1 << 20] {
        let data = pattern(len);
        let (_source, source) = client.register(&data);
        let (target, region) = client.register(&vec![0; len + 4096]);
        let call = rpc(7, 1, len);
        let cut = len as u64 / 3;
        let read = ReadChunk {
            position: call.len() as u32,
            segments: [piece(&source, 0, cut as u32), piece(&source, cut, len as u32 - cut as u32)].into(),
        };
        let chunks = Chunks {
            read: [read].into(),
            write: [[piece(&region, 0, len as u32 / 2), piece(&region, len as u64 / 2, len as u32)].into()].into(),
            reply: None,
        };
        client.send(&message(7, Procedure::Message(chunks), &call));
        let (header, rest) = client.reply();
        assert_eq!((header.xid, header.credits, rest.len()), (7, 64, SUCCESS_LEN + 4), "{len}");
        let Procedure::Message(Chunks { read, write, reply: None }) = header.procedure else { panic!() };
        assert!(read.is_empty());
        assert_eq!(write[0].iter().map(|s| s.length).sum::<u32>(), len as u32);
        let mut back = vec![0; len];
        target.read(0, &mut back);
        assert!(back == data, "{len}");
    }
    drop(client);
    server.shut_down(HUNG);
}

#[test]
fn floods_over_rdma_do_not_keep_others_from_being_served() {
    const REACTORS: usize = 2;
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let (server, address) = start(&reactors);
    let call = [rpc(7, 1, 4), vec![1; 4]].concat();
    let inline = message(7, Procedure::Message(Chunks::default()), &call);
    // An unsolicited reply; the last flood is of calls that the transport answers with an error.
    let reply = [7_u32, 1, 0, 0, 0, 0].map(u32::to_be_bytes).concat();
    let floods = [
        ("calls", inline.clone()),
        ("replies to no call", message(7, Procedure::Message(Chunks::default()), &reply)),
        ("calls that make no sense", message(1, Procedure::NoMessage(Chunks::default()), &[])),
    ];
    for (name, what) in &floods {
        flood_peers::serves_others_during(
            name,
            2 * REACTORS,
            |stop| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    // A peer that exhausts the posted receives loses its connection, and connects again.
                    Client::connect(address).flood(what, stop);
                }
            },
            || Client::connect(address),
            |client| {
                client.send(&inline);
                assert_eq!(client.reply().0.xid, 7);
            },
        );
    }
    server.shut_down(HUNG);
}

#[test]
fn long_calls_and_replies_travel_outside_messages() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (server, address) = start(&reactors);
    let mut client = Client::connect(address);
    let data = pattern(300_001);
    let whole = [rpc(9, 2, data.len()), data.clone(), vec![0; 3]].concat();
    let (_source, source) = client.register(&whole);
    let (target, region) = client.register(&vec![0; 400_000]);
    let read =
        ReadChunk { position: 0, segments: [piece(&source, 0, 8), piece(&source, 8, whole.len() as u32 - 8)].into() };
    let reply = Some([piece(&region, 0, 100), piece(&region, 100, 399_900)].into());
    let chunks = Chunks { read: [read].into(), reply, ..Chunks::default() };
    client.send(&message(9, Procedure::NoMessage(chunks), &[]));
    let (header, rest) = client.reply();
    assert!(rest.is_empty());
    let Procedure::NoMessage(Chunks { reply: Some(reply), .. }) = header.procedure else { panic!() };
    let len: u32 = reply.iter().map(|s| s.length).sum();
    let mut back = vec![0; len as usize];
    target.read(0, &mut back);
    assert!(back[SUCCESS_LEN + 4..][..data.len()] == data);
    drop(client);
    server.shut_down(HUNG);
}

#[test]
fn what_makes_no_sense_is_answered_and_the_connection_goes_on() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (server, address) = start(&reactors);
    let mut client = Client::connect(address);
    let (_memory, region) = client.register(&[0; 4096]);
    let read = |position, length| ReadChunk { position, segments: vec![piece(&region, 0, length)].into() };
    let with = |read: ReadChunk| Chunks { read: [read].into(), ..Chunks::default() };
    let inline = [rpc(1, 2, 4), b"abcd".to_vec()].concat();
    // What is answered by an error of the transport.
    let errors: Vec<Vec<u8>> = vec![
        message(1, Procedure::NoMessage(Chunks::default()), &[]),
        message(1, Procedure::NoMessage(with(read(4, 100))), &[]),
        message(1, Procedure::NoMessage(with(read(0, u32::MAX))), &[]),
        message(1, Procedure::Message(with(read(0, 4))), &inline),
        message(1, Procedure::Message(with(read(40, 1 << 21))), &inline),
        message(1, Procedure::Message(Chunks::default()), b"no"),
        // Another number in the call than in the header.
        message(1, Procedure::Message(Chunks::default()), &[rpc(2, 2, 4), b"abcd".to_vec()].concat()),
        // Zeros, which are no call.
        message(1, Procedure::NoMessage(with(read(0, 60))), &[]),
        {
            let mut cut = message(1, Procedure::Message(with(read(40, 4))), &[]);
            cut.truncate(30);
            cut
        },
    ];
    for (at, wrong) in errors.iter().enumerate() {
        client.send(wrong);
        let (header, rest) = client.reply();
        assert_eq!((header.xid, &header.procedure, rest.len()), (1, &Procedure::ErrorChunk, 0), "{at}");
    }
    let long = [rpc(1, 2, 8000), pattern(8000)].concat();
    let (_call, whole) = client.register(&long);
    let read = ReadChunk { position: 0, segments: vec![piece(&whole, 0, long.len() as u32)].into() };
    client.send(&message(1, Procedure::NoMessage(with(read)), &[]));
    assert_eq!(client.reply().0.procedure, Procedure::ErrorChunk, "no room for the reply");
    let mut version = message(1, Procedure::Message(Chunks::default()), &inline);
    version[7] = 2;
    client.send(&version);
    assert_eq!(client.reply().0.procedure, Procedure::ErrorVersion { low: 1, high: 1 });
    // What is not answered.
    for ignored in [b"short".to_vec(), message(1, Procedure::Done, &[]), message(1, Procedure::ErrorChunk, &[])] {
        client.send(&ignored);
    }
    // A program's bug ends one call.
    client.send(&message(1, Procedure::Message(Chunks::default()), &[rpc(1, 3, 4), b"abcd".to_vec()].concat()));
    let (_, rest) = client.reply();
    assert_eq!(rest[rest.len() - 4..], 5_u32.to_be_bytes(), "SYSTEM_ERR");
    client.send(&message(1, Procedure::Message(Chunks::default()), &inline));
    let (_, rest) = client.reply();
    assert_eq!(rest[SUCCESS_LEN..], *b"\0\0\0\x04abcd");
    drop(client);
    server.shut_down(HUNG);
}

#[test]
fn keys_that_open_nothing_end_their_connection_only() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (_server, address) = start(&reactors);
    let (mut liar, mut other) = (Client::connect(address), Client::connect(address));
    let (_memory, region) = liar.register(&[0; 4096]);
    let wrong = RdmaSegment { handle: region.rkey() ^ 0x55, length: 4, offset: region.addr() };
    let call = rpc(3, 1, 4);
    let read = ReadChunk { position: call.len() as u32, segments: vec![wrong].into() };
    liar.send(&message(3, Procedure::Message(Chunks { read: [read].into(), ..Chunks::default() }), &call));
    assert_eq!(liar.next(), None);
    other.send(&message(1, Procedure::Message(Chunks::default()), &[rpc(1, 2, 4), b"abcd".to_vec()].concat()));
    assert_eq!(other.reply().0.xid, 1);
}

#[test]
fn as_many_calls_as_are_granted_are_in_progress_at_once() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (_server, address) = start(&reactors);
    let mut client = Client::connect(address);
    let call = |xid, procedure| {
        let rpc = [rpc(xid, procedure, 4), b"abcd".to_vec()].concat();
        message(xid, Procedure::Message(Chunks::default()), &rpc)
    };
    for xid in 0..127 {
        client.send(&call(xid, 4));
    }
    // The last credit goes round, while the others are not given back.
    for xid in 200..1200 {
        client.send(&call(xid, 2));
        assert_eq!(client.reply().0.xid, xid);
    }
}

/// Calls by the client of this crate, whatever the server's design and however its own memory is registered.
#[test]
fn the_client_calls_with_every_registration_and_design() {
    use thruway_rpc::client::{Arguments, CallError, Client, Procedure, RdmaOptions};
    use thruway_rpc::message::Refusal;
    use thruway_server::rdma::Registration;

    let reactors = Reactors::start(Some(1)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let servers = [Design::ReadWrite, Design::ReadRead].map(|design| (design, start_with(&reactors, design)));
    for (design, (_server, address)) in &servers {
        for registration in [Registration::Dynamic, Registration::Windows, Registration::Cached, Registration::All] {
            let options = RdmaOptions { provider: Provider::Iwarp(Config::default()), registration, credits: 16 };
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let client = Client::connect_rdma(*address, HUNG, &options).await.unwrap();
                let call = |procedure, len: usize, item_max, reply_max| {
                    let client = client.clone();
                    async move {
                        let content: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
                        let mut bytes = Encoder::new();
                        bytes.bulk(Body::Bytes(content.clone()));
                        let arguments = Arguments { bytes, item_max, reply_max };
                        let procedure = Procedure { program: PROGRAM, version: 1, procedure };
                        let reply = client.call(procedure, OpaqueAuth::NONE, arguments).await?;
                        let item = reply.results().bulk(1 << 20).unwrap().as_slice().to_vec();
                        assert!(item == content, "{registration:?} {design:?} {len}");
                        Ok::<(), CallError>(())
                    }
                };
                // Data that comes apart, or among a long reply; several calls at a time, more than there are credits.
                let read_read = *design == Design::ReadRead;
                for len in [0, 1, 3000, 4097, 100_001, 1 << 20] {
                    call(1, len, if read_read { 0 } else { 1 << 20 }, 0).await.unwrap();
                    if !read_read {
                        call(2, len, 0, (1 << 20) + 4096).await.unwrap();
                    }
                }
                let calls = (0..64).map(|n| call(1, 5000 + n, if read_read { 0 } else { 8192 }, 0));
                assert!(futures_util::future::join_all(calls).await.into_iter().all(|done| done.is_ok()));
                // A reply for which there is no room, and a program that does not return.
                if !read_read {
                    assert!(matches!(call(2, 100_000, 0, 0).await, Err(CallError::Rdma(_))));
                }
                assert!(matches!(call(3, 4, 8, 0).await, Err(CallError::Refused(Refusal::SystemError))));
                call(1, 10_000, if read_read { 0 } else { 1 << 20 }, 0).await.unwrap();
            });
        }
    }
}

/// A call that is given up while the server may still write ends the connection: its memory is not the server's any more.
#[test]
fn a_call_that_is_given_up_takes_its_memory_back() {
    use thruway_rpc::client::{Arguments, CallError, Client, Procedure, RdmaOptions};
    use thruway_server::rdma::Registration;

    let reactors = Reactors::start(Some(1)).unwrap();
    let (_server, address) = start(&reactors);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let provider = Provider::Iwarp(Config::default());
        let options = RdmaOptions { provider, registration: Registration::Windows, credits: 4 };
        let client = Client::connect_rdma(address, Duration::from_millis(50), &options).await.unwrap();
        let call = |procedure| {
            let mut bytes = Encoder::new();
            bytes.opaque(b"item");
            let procedure = Procedure { program: PROGRAM, version: 1, procedure };
            client.call(procedure, OpaqueAuth::NONE, Arguments { bytes, item_max: 4096, reply_max: 0 })
        };
        assert!(matches!(call(4).await, Err(CallError::TimedOut(_))));
        assert!(matches!(call(1).await, Err(CallError::Connection(_))));
    });
}
