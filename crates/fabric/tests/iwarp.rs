//! The conformance suite over user-space iWARP on loopback TCP.

use crate::conformance;
use conformance::Lab;
use std::sync::Arc;
use std::time::Duration;
use thruway_fabric::iwarp::{Config, ReadyToReceive};
use thruway_fabric::{Access, Buffer};

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

/// An event loop of somebody else's, which watches the device by edges, polls while there is something and sleeps when
/// arming says that it may, misses nothing: not even that a full socket has room again.
#[test]
fn a_loop_that_watches_by_edges_misses_nothing() {
    use rustix::event::{Timespec, epoll};
    let lab = lab(Config::default(), Config::default());
    let (a, b) = lab.pair();
    let len = 64 << 20;
    let (source, sink) = (Arc::new(Buffer::new(len).unwrap()), Arc::new(Buffer::new(len).unwrap()));
    let from = a.pd.register(&source, Access::empty()).unwrap();
    let to = b.pd.register(&sink, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    b.recv(7, 0, 1);
    a.post(1, conformance::write(to.remote(0)), &[from.sge(0, len as u32)]).unwrap();
    a.post(2, conformance::send(), &[a.mr.sge(0, 1)]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut done = Vec::new();
            while b.cq.poll(&mut done, 1) == 0 {
                b.device.wait(Some(Duration::from_secs(30))).unwrap();
            }
        });
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&watch, a.device.wait_fd(), epoll::EventData::new_u64(0), edges).unwrap();
        let mut done = Vec::new();
        while done.len() < 2 {
            if a.cq.poll(&mut done, 8) > 0 || !a.device.arm() {
                continue;
            }
            let mut events = [std::mem::MaybeUninit::uninit(); 1];
            let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
            let (told, _) = epoll::wait(&watch, &mut events, Some(&limit)).unwrap();
            assert!(!told.is_empty(), "it slept through something");
        }
    });
}
