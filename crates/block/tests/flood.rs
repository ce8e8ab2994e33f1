//! Flooding peers by each protocol of disks: other clients of the same reactors must still be served.

#[path = "../../thruway/tests/support/nbd.rs"]
#[allow(dead_code)]
mod client;
#[path = "../../server/tests/support/flood.rs"]
mod flood;
#[path = "support/iscsi.rs"]
#[allow(dead_code)]
mod initiator;
#[path = "support/iser.rs"]
#[allow(dead_code)]
mod iser;
#[path = "support/nbd_server.rs"]
mod nbd_server;

use client::{Nbd, READ};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thruway_block::backend::MemoryBackend;
use thruway_block::iscsi::{self, target};
use thruway_block::scsi::Unit;
use thruway_block::{Export, Served};
use thruway_engine::Reactors;

const TARGET: &str = "iqn.2026-11.org.thruway:d";
const REACTORS: usize = 2;
/// Flooding peers of one test: two for each reactor, so that every client shares its reactor with one.
const FLOODS: usize = 2 * REACTORS;
const CONNECTIONS: usize = 64;

fn disk() -> Arc<Export> {
    Arc::new(Export {
        kind: "a test",
        name: "d".into(),
        description: "a disk".into(),
        identity: [1; 16],
        is_lasting: false,
        allow: Vec::new(),
        fence: thruway_block::fence::Fence::default(),
        backend: Arc::new(Served::new(Arc::new(MemoryBackend::new(1 << 20).unwrap()))),
        read_only: false,
        chunk: 64 << 10,
        target: None,
        sector: 512,
    })
}

fn targets() -> Arc<target::Targets> {
    let units = vec![Arc::new(Unit::new(disk(), 512))];
    Arc::new(target::Targets::new(vec![target::Target { name: TARGET.into(), units }], None, Vec::new()))
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
        flood::serves_others_during(
            name,
            FLOODS,
            |stop| {
                let stream = Nbd::connect(&address, "d").unwrap().into_stream();
                flood::send_again_and_again(stream, what, *reads, stop);
            },
            || Nbd::connect(&address, "d").unwrap(),
            |client| assert!(client.ask((0, READ), 4096, 512, &[]).unwrap().is_some()),
        );
    }
}

#[test]
fn floods_by_iscsi_do_not_keep_others_from_being_served() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let config = iscsi::Config {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        targets: targets(),
        own_user_only: true,
        connections_max: CONNECTIONS,
    };
    let server = iscsi::Server::start(config, &reactors).unwrap();
    let portal = server.addresses()[0].to_string();
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
        flood::serves_others_during(
            name,
            FLOODS,
            |stop| flood::send_again_and_again(log_in().into_stream(), what, *reads, stop),
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
        targets: targets(),
        own_user_only: true,
        connections_max: CONNECTIONS,
    };
    let server = iscsi::iser::Server::start(config, &reactors).unwrap();
    let portal = server.addresses()[0].to_string();
    let log_in = |isid| iser::Initiator::log_in(&portal, TARGET, isid);
    // Commands out of order are ignored. A peer that exhausts the posted receives loses its connection, and connects again.
    let mut command = [0; 48];
    (command[0], command[1], command[24]) = (0x01, 0x80, 0x7f);
    flood::serves_others_during(
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
