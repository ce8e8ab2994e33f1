//! Flooding peers: other clients of the same reactors must still be served.

#[path = "../../server/tests/support/flood.rs"]
mod flood;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_rpc::message::{CallHeader, OpaqueAuth};
use thruway_rpc::server::{Answer, Call, Config, Outcome, Program, Programs, Server};
use thruway_rpc::xdr::Encoder;
use thruway_server::Address;

const PROGRAM: u32 = 0x2000_0002;
const REACTORS: usize = 2;
/// Time limit of a reply, reached only if the server does not answer.
const HUNG: Duration = Duration::from_secs(60);

struct Null;

impl Program for Null {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        1..=1
    }

    fn call<'a>(&'a self, _: &'a Call, results: Encoder) -> Answer<'a> {
        Box::pin(async move { Outcome::Results(results) })
    }
}

fn call(xid: u32) -> Vec<u8> {
    let mut message = Encoder::new();
    let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
    CallHeader { xid, program: PROGRAM, version: 1, procedure: 0, credential, verifier }.encode(&mut message);
    record(&message.to_bytes())
}

fn record(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32 | 1 << 31).to_be_bytes()[..], message].concat()
}

/// Connects, and waits for the reply to a first call.
fn connect(server: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(server).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(HUNG)).unwrap();
    exchange(&mut stream, 1);
    stream
}

fn exchange(stream: &mut TcpStream, xid: u32) {
    stream.write_all(&call(xid)).unwrap();
    let mut reply = [0; 4 + 24];
    stream.read_exact(&mut reply).expect("the server answers");
    assert_eq!(reply[4..8], xid.to_be_bytes());
}

#[test]
fn floods_do_not_keep_a_reactor_from_serving_others() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let config = Config {
        protocol: "null",
        listen: vec![Address::Tcp("127.0.0.1:0".parse().unwrap())],
        programs: Programs::new([Arc::new(Null) as Arc<dyn Program>]),
        tls: None,
        tls_required: false,
        own_user_only: false,
        connections_max: 64,
    };
    let server = Server::start(config, &reactors).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("a TCP address") };

    let reply = record(&[7_u32, 1, 0, 0, 0, 0].map(u32::to_be_bytes).concat());
    let fragment_of_one_byte = [&1_u32.to_be_bytes()[..], b"x"].concat();
    let floods: [(&str, bool, Vec<u8>); 6] = [
        ("empty fragments", false, vec![0; 4]),
        ("fragments of one byte", false, fragment_of_one_byte),
        ("replies to no call", false, reply),
        ("empty records", false, record(&[])),
        ("calls", true, call(2)),
        ("calls whose replies are not read", false, call(2)),
    ];
    for (name, reads, what) in &floods {
        // Two flooding peers for each reactor, so that every client shares its reactor with one.
        flood::serves_others_during(
            name,
            2 * REACTORS,
            |stop| flood::send_again_and_again(connect(address), what, *reads, stop),
            || connect(address),
            |client| exchange(client, 7),
        );
    }
}
