//! Flooding peers: other clients of the same reactors must still be served.

use crate::flood_peers;
use crate::support;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use support::{call, record, serve};
use thruway_engine::Reactors;
use thruway_rpc::server::{Answer, Call, Outcome, Program};
use thruway_rpc::xdr::Encoder;

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

/// Connects, and waits for the reply to a first call.
fn connect(server: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(server).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(HUNG)).unwrap();
    exchange(&mut stream, 1);
    stream
}

fn exchange(stream: &mut TcpStream, xid: u32) {
    stream.write_all(&call(PROGRAM, 0, xid)).unwrap();
    let mut reply = [0; 4 + 24];
    stream.read_exact(&mut reply).expect("the server answers");
    assert_eq!(reply[4..8], xid.to_be_bytes());
}

#[test]
fn floods_do_not_keep_a_reactor_from_serving_others() {
    let reactors = Reactors::start(Some(REACTORS)).unwrap();
    let (_server, address) = serve(Arc::new(Null), &reactors);

    let reply = record(&[7_u32, 1, 0, 0, 0, 0].map(u32::to_be_bytes).concat());
    let fragment_of_one_byte = [&1_u32.to_be_bytes()[..], b"x"].concat();
    let floods: [(&str, bool, Vec<u8>); 6] = [
        ("empty fragments", false, vec![0; 4]),
        ("fragments of one byte", false, fragment_of_one_byte),
        ("replies to no call", false, reply),
        ("empty records", false, record(&[])),
        ("calls", true, call(PROGRAM, 0, 2)),
        ("calls whose replies are not read", false, call(PROGRAM, 0, 2)),
    ];
    for (name, reads, what) in &floods {
        // Two flooding peers for each reactor, so that every client shares its reactor with one.
        flood_peers::serves_others_during(
            name,
            2 * REACTORS,
            |stop| flood_peers::send_again_and_again(connect(address), what, *reads, stop),
            || connect(address),
            |client| exchange(client, 7),
        );
    }
}
