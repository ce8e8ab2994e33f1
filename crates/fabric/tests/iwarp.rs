//! The conformance suite over user-space iWARP on loopback TCP.

mod conformance;

use conformance::Lab;
use thruway_fabric::iwarp::{Config, ReadyToReceive};

fn lab(a: Config, b: Config) -> Lab {
    Lab::new(a.open().unwrap(), b.open().unwrap())
}

#[test]
fn default_configuration() {
    conformance::run_all(&|| lab(Config::default(), Config::default()));
}

#[test]
fn without_crc() {
    let config = Config { crc: false, ..Config::default() };
    conformance::run_all(&|| lab(config.clone(), config.clone()));
}

#[test]
fn markers_both_ways_and_segment_sized_fpdus() {
    let config = Config { markers: true, force_ulpdu: Some(1400), ..Config::default() };
    conformance::run_all(&|| lab(config.clone(), config.clone()));
}

#[test]
fn markers_one_way_only() {
    let with = Config { markers: true, ..Config::default() };
    conformance::run_all(&|| lab(with.clone(), Config::default()));
}

#[test]
fn every_ready_to_receive_message() {
    for rtr in [ReadyToReceive::Send, ReadyToReceive::Write, ReadyToReceive::Read] {
        let config = Config { rtr, ..Config::default() };
        conformance::responder_may_send_first(&lab(config.clone(), config));
    }
}

#[test]
fn a_peer_that_announces_nothing_is_served_without_extensions() {
    let plain = Config { announce: false, ..Config::default() };
    let lab = lab(Config::default(), plain.clone());
    conformance::write_then_send(&lab);
    conformance::read(&lab);
    conformance::extensions_are_refused(&lab);
}

#[test]
fn revision_1_peers_are_served() {
    let old = Config { revision: 1, announce: false, ..Config::default() };
    for (a, b) in [(old.clone(), Config::default()), (Config::default(), old.clone()), (old.clone(), old)] {
        let lab = lab(a, b);
        conformance::write_then_send(&lab);
        conformance::read(&lab);
    }
}

#[test]
fn silence_and_nonsense_in_set_up_harm_nobody() {
    use std::io::Write;
    let lab = lab(Config::default(), Config::default());
    let mut silent = Vec::new();
    for i in 0..50 {
        let mut s = std::net::TcpStream::connect(lab.addr()).unwrap();
        match i % 3 {
            0 => {}
            1 => s.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap(),
            _ => s.write_all(b"MPA ID Req Frame").unwrap(),
        }
        silent.push(s);
    }
    conformance::write_then_send(&lab);
}

#[test]
fn a_thousand_connections_work_and_one_that_stalls_blocks_none() {
    conformance::many_connections(&lab(Config::default(), Config::default()), 1000);
}
