//! Flooding peers by each protocol of disks: other clients of the same reactors must still be served.

use crate::client;
use crate::flood_peers;
use crate::initiator;
use crate::iser;
use crate::nbd_server;
use client::{Nbd, READ};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use thruway_block::backend::{Backend, EXTENTS_MAX, FileBackend, MemoryBackend};
use thruway_block::iscsi::{self, target};
use thruway_block::scsi::Unit;
use thruway_block::{Export, Served};
use thruway_engine::Reactors;
use thruway_server::slices::{UNIT_BYTES, counted};

const TARGET: &str = "iqn.2026-11.org.thruway:d";
const REACTORS: usize = 2;
/// Flooding peers of one test: two for each reactor, so that every client shares its reactor with one.
const FLOODS: usize = 2 * REACTORS;
const CONNECTIONS: usize = 64;

fn disk() -> Arc<Export> {
    disk_of(Arc::new(MemoryBackend::new(1 << 20).unwrap()))
}

fn disk_of(backend: Arc<dyn Backend>) -> Arc<Export> {
    Arc::new(Export {
        kind: "a test",
        name: "d".into(),
        description: "a disk".into(),
        identity: [1; 16],
        is_lasting: false,
        allow: Vec::new(),
        fence: thruway_block::fence::Fence::default(),
        backend: Arc::new(Served::new(backend)),
        read_only: false,
        chunk: 64 << 10,
        target: None,
        sector: 512,
    })
}

fn targets(disk: Arc<Export>) -> Arc<target::Targets> {
    let units = vec![Arc::new(Unit::new(disk, 512))];
    Arc::new(target::Targets::new(vec![target::Target { name: TARGET.into(), units }], None, Vec::new()))
}

fn iscsi_server(reactors: &Reactors) -> (iscsi::Server, String) {
    iscsi_server_of(disk(), reactors)
}

fn iscsi_server_of(disk: Arc<Export>, reactors: &Reactors) -> (iscsi::Server, String) {
    let config = iscsi::Config {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        targets: targets(disk),
        own_user_only: true,
        connections_max: CONNECTIONS,
    };
    let server = iscsi::Server::start(config, reactors).unwrap();
    let portal = server.addresses()[0].to_string();
    (server, portal)
}

/// Units of work that the tasks of all reactors have counted for hosts.
fn counted_by(reactors: &Reactors) -> u64 {
    let (send, receive) = mpsc::channel();
    for reactor in reactors.handles() {
        let send = send.clone();
        reactor.spawn(move || async move { send.send(counted()).unwrap() });
    }
    drop(send);
    receive.iter().sum()
}

/// An NBD negotiation after the flags.
fn negotiation(address: &str) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.read_exact(&mut [0; 18])?;
    stream.write_all(&3u32.to_be_bytes())?;
    Ok(stream)
}

/// An unknown option with `len` bytes of data.
fn option(len: usize) -> Vec<u8> {
    let header = [&b"IHAVEOPT"[..], &99u32.to_be_bytes(), &(len as u32).to_be_bytes()].concat();
    [header, vec![0; len]].concat()
}

/// Receives the reply to an option; false if the server has closed the connection.
fn has_option_reply(stream: &mut TcpStream) -> bool {
    let mut header = [0; 20];
    let len = |header: [u8; 20]| u32::from_be_bytes(header[16..].try_into().unwrap());
    stream.read_exact(&mut header).and_then(|()| stream.read_exact(&mut vec![0; len(header) as usize])).is_ok()
}

/// A login request that announces more text.
fn login_request(text: &[u8]) -> Vec<u8> {
    let mut pdu = vec![0; 48];
    (pdu[0], pdu[1]) = (0x43, 0x44);
    pdu[4..8].copy_from_slice(&(text.len() as u32).to_be_bytes());
    [&pdu, text].concat()
}

/// Repeats a flood on new connections until `stop` is set.
fn again_and_again(stop: &AtomicBool, connect: impl Fn() -> io::Result<TcpStream>, what: &[u8], reads: bool) {
    while !stop.load(Ordering::Relaxed) {
        // Others of this host may have taken the place of the connection.
        let Ok(stream) = connect() else { continue };
        flood_peers::send_again_and_again(stream, what, reads, stop);
    }
}

#[test]
fn floods_by_negotiations_do_not_keep_others_from_being_served() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let (_server, address) = nbd_server::serve(disk(), &reactors);
    let (_iscsi, portal) = iscsi_server(&reactors);
    let floods = [
        ("options", true, option(0)),
        ("options with data", true, option(60_000)),
        ("options that are too long", true, option(1 << 20)),
        ("options whose replies are not taken", false, option(0)),
    ];
    let connect = || Nbd::connect(&address, "d").unwrap();
    let call = |client: &mut Nbd| assert!(client.ask((0, READ), 4096, 512, &[]).unwrap().is_some());
    for (name, reads, what) in &floods {
        let flood = |stop: &AtomicBool| again_and_again(stop, || negotiation(&address), what, *reads);
        flood_peers::serves_others_during(name, FLOODS, flood, connect, call);
    }
    for (name, text) in [("logins", &[][..]), ("logins with text", &[b'a'; 8192])] {
        let what = login_request(text);
        let flood = |stop: &AtomicBool| again_and_again(stop, || TcpStream::connect(&portal), &what, true);
        flood_peers::serves_others_during(name, FLOODS, flood, connect, call);
    }
}

/// Each reply follows the counting of its request.
#[test]
fn negotiations_count_as_work_of_their_host() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let (_server, address) = nbd_server::serve(disk(), &reactors);
    let mut stream = negotiation(&address).unwrap();
    for len in [0, 1, 60_000, 64 << 10, (64 << 10) + 1, 1 << 20] {
        for _ in 0..20 {
            let before = counted_by(&reactors);
            stream.write_all(&option(len)).unwrap();
            assert!(has_option_reply(&mut stream));
            let units = counted_by(&reactors) - before;
            assert!(units > (len / UNIT_BYTES) as u64, "an option of {len} bytes counts as {units}");
        }
    }
    let (_iscsi, portal) = iscsi_server(&reactors);
    let mut stream = TcpStream::connect(&portal).unwrap();
    for len in [0, 4, 4096, 8192] {
        let before = counted_by(&reactors);
        stream.write_all(&login_request(&vec![b'a'; len])).unwrap();
        let mut answer = [0; 48];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!((answer[0], &answer[36..38]), (0x23, &[0, 0][..]), "{answer:?}");
        let units = counted_by(&reactors) - before;
        assert!(units > (len / UNIT_BYTES) as u64, "a login request with {len} bytes counts as {units}");
    }
}

/// BLOCK_STATUS of a range from the first byte; the number of extents in the reply.
fn block_status(stream: &mut TcpStream, flags: u16, len: u32) -> usize {
    let request = [&0x2560_9513u32.to_be_bytes()[..], &flags.to_be_bytes(), &[0, 7], &[0; 16], &len.to_be_bytes()];
    stream.write_all(&request.concat()).unwrap();
    let mut chunk = [0; 20];
    stream.read_exact(&mut chunk).unwrap();
    // The only one, of block status.
    assert_eq!((&chunk[..4], &chunk[4..8]), (&0x668e_33efu32.to_be_bytes()[..], &[0, 1, 0, 5][..]));
    let mut extents = vec![0; u32::from_be_bytes(chunk[16..].try_into().unwrap()) as usize];
    stream.read_exact(&mut extents).unwrap();
    extents.len() / 8
}

/// Each reply follows the counting of its lookups. So what a host can have looked up is shared as other work.
#[test]
fn lookups_of_extents_count_as_work_of_their_host_and_are_bounded() {
    const REQ_ONE: u16 = 8;
    const PIECES: u32 = 2 * EXTENTS_MAX as u32;
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(u64::from(PIECES) * 8192).unwrap();
    (0..PIECES).for_each(|piece| file.write_all_at(&[1; 4096], u64::from(piece) * 8192).unwrap());
    let disk = disk_of(Arc::new(FileBackend::of(file).unwrap()));
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let (_server, address) = nbd_server::serve(Arc::clone(&disk), &reactors);
    let mut stream = negotiation(&address).unwrap();
    let name = [&1u32.to_be_bytes()[..], b"d"].concat();
    let context = [&name[..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
    for (number, data) in [(8u32, vec![]), (10, context), (7, [&name[..], &[0, 0]].concat())] {
        stream
            .write_all(&[&b"IHAVEOPT"[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), &data].concat())
            .unwrap();
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header).unwrap();
            stream.read_exact(&mut vec![0; header[19].into()]).unwrap();
            if header[12..16] == 1u32.to_be_bytes() {
                break;
            }
        }
    }
    let mut counted_by_reply = |flags, pieces: u32| {
        let before = counted_by(&reactors);
        let extents = block_status(&mut stream, flags, pieces * 8192);
        (extents, counted_by(&reactors) - before)
    };
    for pieces in [1, 4, 100, PIECES] {
        let (extents, units) = counted_by_reply(0, pieces);
        assert_eq!(extents, (2 * pieces as usize).min(EXTENTS_MAX), "{pieces} pieces");
        assert!(units >= extents as u64, "{extents} extents count as {units}");
    }
    let (extents, units) = counted_by_reply(REQ_ONE, PIECES);
    assert!(extents == 1 && units < 8, "one extent counts as {units}");

    let (_iscsi, portal) = iscsi_server_of(disk, &reactors);
    let mut initiator = initiator::Initiator::log_in(&portal, TARGET, initiator::next_isid());
    for descriptors in [1, 100] {
        let before = counted_by(&reactors);
        assert_eq!(initiator.lba_status(descriptors).unwrap(), descriptors);
        let units = counted_by(&reactors) - before;
        // The data sent may count as a unit.
        let range = u64::from(descriptors)..u64::from(descriptors) + 8;
        assert!(range.contains(&units), "{descriptors} descriptors count as {units}");
    }
}

#[test]
fn a_negotiation_of_options_that_are_too_long_ends_as_any_other() {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (_server, address) = nbd_server::serve(disk(), &reactors);
    for len in [0, (64 << 10) + 1] {
        let mut stream = negotiation(&address).unwrap();
        let what = option(len);
        let replies =
            (0..2000).take_while(|_| stream.write_all(&what).is_ok() && has_option_reply(&mut stream)).count();
        assert_eq!(replies, 1024, "to options of {len} bytes");
    }
}

#[test]
fn floods_by_nbd_do_not_keep_others_from_being_served() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let (_server, address) = nbd_server::serve(disk(), &reactors);
    let request = |command: u16, len: u32, data: &[u8]| {
        let header = [&0x2560_9513u32.to_be_bytes()[..], &[0, 0], &command.to_be_bytes(), &[0; 16]].concat();
        [&header[..], &len.to_be_bytes(), data].concat()
    };
    let floods = [
        ("unknown commands", true, request(99, 0, &[])),
        ("reads", true, request(READ, 512, &[])),
        ("reads that are not taken", false, request(READ, 64 << 10, &[])),
        ("writes", true, request(1, 64 << 10, &[7; 64 << 10])),
    ];
    for (name, reads, what) in &floods {
        flood_peers::serves_others_during(
            name,
            FLOODS,
            |stop| {
                let stream = Nbd::connect(&address, "d").unwrap().into_stream();
                flood_peers::send_again_and_again(stream, what, *reads, stop);
            },
            || Nbd::connect(&address, "d").unwrap(),
            |client| assert!(client.ask((0, READ), 4096, 512, &[]).unwrap().is_some()),
        );
    }
}

#[test]
fn floods_by_iscsi_do_not_keep_others_from_being_served() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let (_server, portal) = iscsi_server(&reactors);
    let log_in = || initiator::Initiator::log_in(&portal, TARGET, initiator::next_isid());
    let pdu = |bytes: &[(usize, u8)]| {
        let mut pdu = vec![0; 48];
        bytes.iter().for_each(|(at, byte)| pdu[*at] = *byte);
        pdu
    };
    let floods = [
        ("commands out of order", false, pdu(&[(0, 0x01), (1, 0x80), (24, 0x7f)])),
        ("data that was not asked for", false, pdu(&[(0, 0x05), (1, 0x80), (19, 9), (20, 9)])),
        ("unknown operations", true, pdu(&[(0, 0x5c)])),
        ("pings", true, pdu(&[(0, 0x40), (1, 0x80), (19, 5), (20, 0xff), (21, 0xff), (22, 0xff), (23, 0xff)])),
    ];
    for (name, reads, what) in &floods {
        flood_peers::serves_others_during(
            name,
            FLOODS,
            |stop| flood_peers::send_again_and_again(log_in().into_stream(), what, *reads, stop),
            log_in,
            |client| assert_eq!(client.test_unit_ready().unwrap(), 0),
        );
    }
}

#[test]
fn floods_by_iser_do_not_keep_others_from_being_served() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let config = iscsi::iser::Config {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        provider: thruway_fabric::iwarp::Config::default().into(),
        targets: targets(disk()),
        own_user_only: true,
        connections_max: CONNECTIONS,
    };
    let server = iscsi::iser::Server::start(config, &reactors).unwrap();
    let portal = server.addresses()[0].to_string();
    let log_in = |isid| iser::Initiator::log_in(&portal, TARGET, isid);
    // Commands out of order are ignored. A peer that exhausts the posted receives loses its connection, and connects again.
    let mut command = [0; 48];
    (command[0], command[1], command[24]) = (0x01, 0x80, 0x7f);
    flood_peers::serves_others_during(
        "commands out of order",
        FLOODS,
        |stop| {
            let isid = initiator::next_isid();
            while !stop.load(Ordering::Relaxed) {
                let peer = log_in(isid);
                while !stop.load(Ordering::Relaxed) && peer.send(command, iser::Advertise::Nothing, &[]) {}
            }
        },
        || log_in(initiator::next_isid()),
        |client| assert_eq!(client.read(512).expect("the target answers").0, 0),
    );
}
