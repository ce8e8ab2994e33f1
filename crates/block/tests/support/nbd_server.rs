//! A disk served by NBD on a port that the kernel chooses.

use std::sync::Arc;
use thruway_block::Export;
use thruway_block::nbd::{Config, Server};
use thruway_engine::Reactors;
use thruway_server::Address;

/// Starts the server; with it, its address.
pub(crate) fn serve(export: Arc<Export>, reactors: &Reactors) -> (Server, String) {
    let config = Config {
        listen: vec![Address::Tcp("127.0.0.1:0".parse().unwrap())],
        exports: vec![export].into(),
        tls: None,
        own_user_only: true,
        connections_max: 64,
    };
    let server = Server::start(config, reactors).unwrap();
    let address = server.addresses()[0].to_string();
    (server, address)
}
