//! Processes that send to the relay faster than it can answer: it still serves other processes.

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use thruway_auth::KeyPair;
use thruway_fabric::Provider;
use thruway_relay::{Config, Peers, Relay, find};
use thruway_sockets::meeting::relay_name;

const FLOODS: usize = 4;
const CLIENTS: usize = 4;
/// Connections of all clients.
const CALLS: usize = 10_000;
/// Interval at which a flood checks its stop flag.
const POLL: Duration = Duration::from_millis(50);

/// Starts a relay at a free port, in a thread that ends with the process.
fn start(board: &std::path::Path) -> u16 {
    loop {
        // Also the port behind it is used, for data.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let config = Config {
            port,
            listen: vec![Ipv4Addr::LOCALHOST.into()],
            provider: Provider::Iwarp(thruway_fabric::iwarp::Config::default()),
            keys: KeyPair::generate(),
            peers: Peers::file(board.join("peers")),
            encrypt: false,
            ring: 1 << 16,
            board: board.into(),
            spin: Duration::ZERO,
            until_unused: None,
        };
        match Relay::open(config) {
            Ok(relay) => {
                thread::spawn(move || relay.run().unwrap());
                return port;
            }
            // Another process has taken one of the ports.
            Err(error) => eprintln!("{error}"),
        }
    }
}

/// Sends messages to the relay of a port, as a process of this host, until `stop` is set.
fn flood_as_process(port: u16, stop: &AtomicBool) {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let name = relay_name(rustix::process::geteuid().as_raw(), port);
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(POLL)).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match rustix::net::send(&socket, &[1], SendFlags::NOSIGNAL) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => panic!("the relay has closed the connection: {error}"),
        }
    }
}

/// Opens connections to the port for other relays until `stop` is set. Sends nothing.
fn flood_as_relay(port: u16, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, port)));
    }
}

#[test]
fn floods_do_not_keep_a_relay_from_serving_others() {
    let board = tempfile::tempdir().unwrap();
    std::fs::write(board.path().join("peers"), "").unwrap();
    let port = start(board.path());
    for flood in [flood_as_process, flood_as_relay] {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            (0..FLOODS).for_each(|_| drop(scope.spawn(|| flood(port, &stop))));
            let clients: Vec<_> = (0..CLIENTS)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..CALLS / CLIENTS {
                            assert!(find(port).expect("the relay answers").is_some());
                        }
                    })
                })
                .collect();
            let ended: Vec<_> = clients.into_iter().map(thread::ScopedJoinHandle::join).collect();
            stop.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok), "a process was not served");
        });
    }
}
