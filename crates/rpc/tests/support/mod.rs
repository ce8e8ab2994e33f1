//! Servers over TCP for tests, and calls to them.

use std::net::SocketAddr;
use std::sync::Arc;
use thruway_engine::Reactors;
use thruway_rpc::message::{CallHeader, OpaqueAuth};
use thruway_rpc::server::{Config, Program, Programs, Server};
use thruway_rpc::xdr::Encoder;
use thruway_server::Address;

/// Serves a program at a port of the loopback interface.
pub(crate) fn serve(program: Arc<dyn Program>, reactors: &Reactors) -> (Server, SocketAddr) {
    let config = Config {
        protocol: "test",
        listen: vec![Address::Tcp("127.0.0.1:0".parse().unwrap())],
        programs: Programs::new([program]),
        tls: None,
        tls_required: false,
        own_user_only: false,
        connections_max: 64,
    };
    let server = Server::start(config, reactors).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("a TCP address") };
    (server, address)
}

/// Record with a call of version 1 of a program, without arguments.
pub(crate) fn call(program: u32, procedure: u32, xid: u32) -> Vec<u8> {
    let mut message = Encoder::new();
    let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
    CallHeader { xid, program, version: 1, procedure, credential, verifier }.encode(&mut message);
    record(&message.to_bytes())
}

/// Record with this message, in one fragment.
pub(crate) fn record(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32 | 1 << 31).to_be_bytes()[..], message].concat()
}
