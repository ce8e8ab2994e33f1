//! Peers that lie. Each ends its own session; the daemon serves the next one as if nothing had been.

use crate::support;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use support::Served;
use thruway_engine::pool::{Block, BlockPool};
use thruway_engine::random::random;
use thruway_fabric::iwarp;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::link::{Call, Channels, Link, LinkError, Role, Transport};
use thruway_transfer::wire::*;

const BLOCK: u32 = 64 << 10;

impl Served {
    fn anonymous() -> Served {
        Served::with(|config| config.anonymous = true)
    }

    fn connect(&self) -> Link {
        self.call_by_rdma(random()).unwrap()
    }

    fn call_by_rdma(&self, token: Token) -> Result<Link, LinkError> {
        let device = iwarp::Config::default().open().unwrap();
        let credentials = &Credentials::Keys(KeyPair::generate());
        let call = Call { addr: self.addr, credentials, token, early: None };
        Link::connect(device, Transport::Rdma, &call).map(|(link, _)| link)
    }

    fn request(&self) -> SessionRequest {
        SessionRequest {
            job: [5; 16],
            verify: 1,
            options: TreeOptions { recursive: true, update: true, ..TreeOptions::default() },
            ..support::request()
        }
    }

    /// A session that is ready to send blocks.
    fn rdma_session(&self) -> Liar {
        self.session_by(self.addr)
    }

    /// Likewise, its data channel by another way.
    fn session_by(&self, data: SocketAddr) -> Liar {
        let token = random();
        let mut link = self.call_by_rdma(token).unwrap();
        link.send(&Control::Session(Box::new(self.request()))).unwrap();
        let Control::SessionReply(reply) = link.next_control().unwrap() else { panic!("no reply") };
        link.send(&Control::BlockSize(BLOCK)).unwrap();
        assert!(matches!(link.next_control().unwrap(), Control::BlockSizeReply { accepted: true, .. }));
        link.send(&Control::Channels(1)).unwrap();
        assert_eq!(link.next_control().unwrap(), Control::ChannelsReply(1));
        let pool = BlockPool::new(8, BLOCK as usize).unwrap();
        link.attach(&pool).unwrap();
        let channels = Channels::Open { addr: data, token, grow: false };
        link.join(&channels, 1, Role::Source).unwrap();
        let Control::RegionReply(credits) = link.next_control().unwrap() else { panic!("no credits") };
        Liar { link, pool, session: reply.session, credits }
    }

    /// A session that ends takes its journal with it, perhaps a moment after the peer has heard.
    fn until_empty(&self, what: &str) {
        let start = std::time::Instant::now();
        while std::fs::read_dir(self.dir.path()).unwrap().count() > 0 {
            assert!(start.elapsed().as_secs() < 60, "{what} left something behind");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Another way to the daemon, and its connections, to cut.
    fn detour(&self) -> (SocketAddr, Receiver<TcpStream>) {
        fn forward(mut from: TcpStream, mut into: TcpStream) {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                if into.write_all(&buffer[..n]).is_err() {
                    break;
                }
            }
            let _ = into.shutdown(Shutdown::Both);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (here, there) = (listener.local_addr().unwrap(), self.addr);
        let (passed, connections) = channel();
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(there).unwrap());
                passed.send(far.try_clone().unwrap()).unwrap();
                let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
                std::thread::spawn(move || forward(near, far));
                std::thread::spawn(move || forward(back.0, back.1));
            }
        });
        (here, connections)
    }

    /// The daemon is alive and well.
    fn check_alive(&self) {
        self.copy_honestly(self.rdma_session());
    }

    /// One file by a peer that keeps to the rules, up to its farewell.
    fn copy_honestly(&self, mut liar: Liar) -> Liar {
        let content = b"honest";
        let record = Record::File { path: b"honest".to_vec(), meta: Meta { mode: 0o644, size: 6, ..Meta::default() } };
        let (block, header) = liar.pack(&[(record, content)], 0);
        liar.write(block, header);
        liar.link.send(&Control::DataSetComplete(1)).unwrap();
        loop {
            match liar.link.next_control().unwrap() {
                Control::DataSetReply(summary) => {
                    assert_eq!(summary.files, 1);
                    break;
                }
                Control::RegionReply(_) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(std::fs::read(self.dir.path().join("honest")).unwrap(), b"honest");
        std::fs::remove_file(self.dir.path().join("honest")).unwrap();
        liar
    }
}

struct Liar {
    link: Link,
    pool: Arc<BlockPool>,
    session: u32,
    credits: Vec<Credit>,
}

impl Liar {
    fn header(&self, sequence: u32, len: u32) -> BlockHeader {
        BlockHeader {
            session: self.session,
            sequence,
            offset: 0,
            len,
            kind: BlockKind::Pack,
            sealed: false,
            file: 0,
            tag: [0; 16],
            digest: [0; 16],
        }
    }

    fn pack(&self, records: &[(Record, &[u8])], sequence: u32) -> (Block, BlockHeader) {
        let mut block = self.pool.try_take().unwrap();
        let mut at = 0;
        for (record, content) in records {
            let encoded = record.encode();
            for part in [&Record::prefix(encoded.len(), content.len())[..], &encoded, content] {
                block.payload_mut()[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
        }
        let mut header = self.header(sequence, at as u32);
        header.digest = header.bind(algorithm(1).unwrap(), algorithm(1).unwrap().digest(&block.payload()[..at]));
        (block, header)
    }

    /// Writes a block as if all were well.
    fn write(&mut self, block: Block, header: BlockHeader) {
        let credit = self.credits.remove(0);
        let notice = Completion { session: self.session, sequence: header.sequence, block: credit.block };
        self.write_as(block, header, &credit, notice);
    }

    fn write_as(&mut self, mut block: Block, header: BlockHeader, credit: &Credit, notice: Completion) {
        header.encode(block.with_header_mut(HEADER_LEN).0);
        self.link.write(block, header.len.min(BLOCK), credit, &notice).unwrap();
    }

    /// Waits until the daemon has ended the session, and returns what it said.
    fn ended(mut self) -> String {
        support::ended(&mut self.link)
    }
}

#[test]
fn lies_about_blocks_end_the_session() {
    type Lie = fn(&mut Liar);
    let lies: [(&str, Lie); 9] = [
        ("length beyond the block", |l| {
            let (block, mut header) = l.pack(&[], 0);
            header.len = BLOCK + 1;
            l.write(block, header);
        }),
        ("another session's number", |l| {
            let (block, header) = l.pack(&[], 0);
            let credit = l.credits.remove(0);
            let notice = Completion { session: l.session + 1, sequence: 0, block: credit.block };
            l.write_as(block, header, &credit, notice);
        }),
        ("a header that is not the block announced", |l| {
            let (block, header) = l.pack(&[], 3);
            let credit = l.credits.remove(0);
            let notice = Completion { session: l.session, sequence: 0, block: credit.block };
            l.write_as(block, header, &credit, notice);
        }),
        ("a block that was never granted", |l| {
            let (block, header) = l.pack(&[], 0);
            let credit = l.credits.remove(0);
            let notice = Completion { session: l.session, sequence: 0, block: 7777 };
            l.write_as(block, header, &credit, notice);
        }),
        ("a sequence number twice", |l| {
            for _ in 0..2 {
                let (block, header) = l.pack(&[], 0);
                l.write(block, header);
            }
        }),
        ("a sequence number far ahead", |l| {
            let (block, header) = l.pack(&[], u32::MAX);
            l.write(block, header);
        }),
        ("a write outside the granted memory", |l| {
            let (block, header) = l.pack(&[], 0);
            let mut credit = l.credits.remove(0);
            credit.addr += 4096;
            let notice = Completion { session: l.session, sequence: 0, block: credit.block };
            let mut header = header;
            header.len = BLOCK;
            l.write_as(block, header, &credit, notice);
        }),
        ("a key that was never given", |l| {
            let (block, header) = l.pack(&[], 0);
            let mut credit = l.credits.remove(0);
            credit.rkey ^= 0x1234;
            let notice = Completion { session: l.session, sequence: 0, block: credit.block };
            l.write_as(block, header, &credit, notice);
        }),
        ("a damaged payload", |l| {
            let (mut block, header) =
                l.pack(&[(Record::Keep { path: vec![], below: 0, names: vec![], end: KeepEnd::Complete }, b"")], 0);
            block.payload_mut()[9] ^= 1;
            l.write(block, header);
        }),
    ];
    let lab = Served::anonymous();
    for (what, lie) in lies {
        let mut liar = lab.rdma_session();
        while liar.credits.len() < 2 {
            liar.link.send(&Control::RegionRequest).unwrap();
            let Control::RegionReply(more) = liar.link.next_control().unwrap() else { panic!("no credits") };
            liar.credits.extend(more);
        }
        lie(&mut liar);
        liar.ended();
        lab.until_empty(what);
    }
    lab.check_alive();
}

#[test]
fn a_credit_works_once() {
    let lab = Served::anonymous();
    let mut liar = lab.rdma_session();
    let credit = liar.credits[0];
    let (block, header) = liar.pack(&[], 0);
    liar.write(block, header);
    let (block, header) = liar.pack(&[], 1);
    let notice = Completion { session: liar.session, sequence: 1, block: credit.block };
    liar.write_as(block, header, &credit, notice);
    liar.ended();
    lab.check_alive();
}

#[test]
fn records_that_lead_out_of_the_root_or_make_no_sense_end_the_session() {
    let lab = Served::anonymous();
    let meta = Meta { mode: 0o644, ..Meta::default() };
    let bad = [
        Record::File { path: b"../evil".to_vec(), meta: meta.clone() },
        Record::File { path: b"/tmp/evil".to_vec(), meta: meta.clone() },
        Record::File { path: b"".to_vec(), meta: meta.clone() },
        Record::Dir { path: b"a/../../b".to_vec(), meta: meta.clone() },
        Record::Symlink { path: b"x/../../y".to_vec(), target: b"z".to_vec(), meta: meta.clone() },
        Record::Link { path: b"fine".to_vec(), target: b"../secret".to_vec() },
        Record::File { path: b".thruway-00112233445566778899aabbccddeeff.journal".to_vec(), meta: meta.clone() },
        Record::File { path: b"d/.f.tw-00112233445566778899aabbccddeeff".to_vec(), meta: meta.clone() },
        Record::Begin { file: 1, path: b"a\0b".to_vec(), meta: meta.clone(), resume: false },
        // Kinds that the request did not ask for.
        Record::Keep { path: Vec::new(), below: 0, names: Vec::new(), end: KeepEnd::Complete },
        Record::Special { path: b"fifo".to_vec(), meta: Meta { mode: 0o010_644, ..Meta::default() }, rdev: 0 },
        Record::Link { path: b"fine".to_vec(), target: b"honest".to_vec() },
    ];
    for record in bad {
        let mut liar = lab.rdma_session();
        let (block, header) = liar.pack(&[(record.clone(), b"")], 0);
        liar.write(block, header);
        let said = liar.ended();
        assert!(said.contains("path") || said.contains("asked for"), "{record:?}: {said}");
    }
    lab.until_empty("a bad record");
    lab.check_alive();
}

#[test]
fn a_source_goes_on_only_with_what_it_was_told_is_there() {
    let lab = Served::anonymous();
    let meta = Meta { mode: 0o644, size: 4, ..Meta::default() };
    std::fs::write(lab.dir.path().join("there"), "here").unwrap();
    for record in [
        Record::Begin { file: 1, path: b"there".to_vec(), meta: meta.clone(), resume: true },
        Record::Attributes { path: b"there".to_vec(), meta: Meta { mode: 0o777, ..meta.clone() } },
    ] {
        let mut liar = lab.rdma_session();
        let (block, header) = liar.pack(&[(record.clone(), b"")], 0);
        liar.write(block, header);
        let said = liar.ended();
        assert!(said.contains("unexpected"), "{record:?}: {said}");
    }
    std::fs::remove_file(lab.dir.path().join("there")).unwrap();
    lab.until_empty("a continuation of nothing");
    lab.check_alive();
}

#[test]
fn data_beyond_its_file_ends_the_session() {
    let lab = Served::anonymous();
    let mut liar = lab.rdma_session();
    let meta = Meta { mode: 0o644, size: 100, ..Meta::default() };
    let begin = Record::Begin { file: 1, path: b"f".to_vec(), meta, resume: false };
    let (block, header) = liar.pack(&[(begin, b"")], 0);
    liar.write(block, header);
    liar.link.send(&Control::RegionRequest).unwrap();
    while liar.credits.is_empty() {
        if let Control::RegionReply(more) = liar.link.next_control().unwrap() {
            liar.credits.extend(more);
        }
    }
    let block = liar.pool.try_take().unwrap();
    let mut header = liar.header(1, 10);
    header.kind = BlockKind::Data;
    header.file = 1;
    header.offset = 95;
    header.digest = header.bind(algorithm(1).unwrap(), algorithm(1).unwrap().digest(&block.payload()[..10]));
    liar.write(block, header);
    assert!(liar.ended().contains("offset"));
    lab.check_alive();
}

#[test]
fn messages_out_of_turn_end_the_session() {
    let lab = Served::anonymous();
    for message in [
        Control::Verdict { batch: 0, answers: vec![Answer::Send] },
        Control::DataSetReply(Summary::default()),
        Control::Channels(3),
        Control::MoreChannels(3),
        Control::DataSetComplete(u64::MAX),
        Control::RegionReply(vec![Credit { block: 0, channel: 0, addr: 0, rkey: 0 }]),
    ] {
        let mut liar = lab.rdma_session();
        liar.link.send(&message).unwrap();
        liar.ended();
    }
    let mut link = lab.connect();
    link.send(&Control::RegionRequest).unwrap();
    assert!(link.next_control().is_err());
    lab.check_alive();
}

#[test]
fn refused_requests_say_why() {
    let lab = Served::anonymous();
    let ask = |change: &dyn Fn(&mut SessionRequest)| {
        let mut request = lab.request();
        change(&mut request);
        let mut link = lab.connect();
        link.send(&Control::Session(Box::new(request))).unwrap();
        match link.next_control() {
            Ok(Control::Abort(_, why)) => why,
            other => panic!("{:?}", other.map_err(|e| e.to_string())),
        }
    };
    assert!(ask(&|r| r.export = "other".into()).contains("no export 'other'"));
    assert!(ask(&|r| r.path = b"../x".to_vec()).contains("path"));
    assert!(ask(&|r| r.verify = 99).contains("verification"));
    assert!(ask(&|r| r.options.exclude = vec!["a[".into()]).contains("a["));
    assert!(
        ask(&|r| {
            r.path = b"no/such/parent".to_vec();
            r.into_directory = false;
        })
        .contains("No such file")
    );
    lab.check_alive();
}

#[test]
fn strangers_at_the_door_harm_nobody() {
    use std::io::Write;
    let lab = Served::anonymous();
    let mut open = Vec::new();
    for i in 0..200u32 {
        let mut stream = std::net::TcpStream::connect(lab.addr).unwrap();
        match i % 4 {
            0 => {}
            1 => drop(stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
            2 => drop(stream.write_all(&[0; 4096])),
            _ => drop(stream.write_all(b"MPA ID Req Frame\x50\x02\x02\x00")),
        }
        open.push(stream);
    }
    lab.check_alive();
}

#[test]
fn data_connections_that_nobody_expects_are_refused() {
    use std::io::{Read, Write};
    let lab = Served::anonymous();
    let greeting = Hello::Data { token: random(), channel: 1 }.encode();
    let mut stream = std::net::TcpStream::connect(lab.addr).unwrap();
    stream.write_all(&[b"TWFT", &(greeting.len() as u16).to_be_bytes()[..], &greeting].concat()).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "no such session");
    let token = random();
    let first = lab.call_by_rdma(token).unwrap();
    assert!(lab.call_by_rdma(token).is_err(), "two sessions with one token");
    drop(first);
    lab.check_alive();
}

#[test]
fn a_flood_of_control_messages_is_bounded() {
    let lab = Served::anonymous();
    let mut liar = lab.rdma_session();
    // As many as a source makes are answered in turn; more are held against it.
    let offer = |i: u32| {
        let path = format!("f{i}").into_bytes();
        let entries = vec![OfferEntry {
            path,
            size: 1,
            mtime: (0, 0),
            ctime: (0, 0),
            owner: 0,
            group: 0,
            mode: 0,
            capabilities: 0,
            linked: false,
        }];
        Control::Offer { batch: i, entries }
    };
    for i in 0..500 {
        liar.link.send(&offer(i)).unwrap();
        if i >= 8 {
            while !matches!(liar.link.next_control().unwrap(), Control::Verdict { .. }) {}
        }
    }
    for i in 500..5000 {
        if liar.link.send(&offer(i)).is_err() {
            break;
        }
    }
    drop(liar);
    lab.check_alive();
}

#[test]
fn the_end_of_a_data_channel_may_overtake_the_farewell() {
    let lab = Served::anonymous();
    for _ in 0..20 {
        let (way, connections) = lab.detour();
        let mut liar = lab.copy_honestly(lab.session_by(way));
        connections.recv().unwrap().shutdown(Shutdown::Both).unwrap();
        liar.link.send(&Control::Farewell).unwrap();
        lab.until_empty("a session whose farewell came last");
    }
}
