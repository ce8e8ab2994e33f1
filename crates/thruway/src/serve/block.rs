//! The block service of the daemon: arguments, start, announcement.

use clap::Args;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thruway_block::export::Spec;
use thruway_block::net::Address;
use thruway_block::{Export, nbd, tls};
use thruway_engine::Reactors;

/// Arguments of the block service.
#[derive(Args)]
#[command(next_help_heading = "Block service")]
pub struct BlockArgs {
    /// Disk to serve: a file, a block device, mem:SIZE or stripe:CHUNK:PATH:PATH...; may be repeated
    #[arg(long, value_name = "NAME=PATH[,ro][,mode=direct|cached|writeback]...", value_parser = Spec::parse)]
    pub block: Vec<Spec>,
    /// Serve the disks by NBD at this address, or at unix:PATH [default: 127.0.0.1:10809 if no protocol is named]
    #[arg(long, value_name = "ADDR:PORT", requires = "block")]
    pub nbd: Vec<Address>,
    /// Certificate chain for NBD over TLS (PEM); without it there is no TLS, with it nothing else
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "block"])]
    tls_cert: Option<PathBuf>,
    /// Secret key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Serve only clients with a certificate signed by one of these (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Connections of the block service at one time
    #[arg(long, default_value_t = 1024)]
    max_connections: usize,
    /// Threads of the block service [default: one for each core]
    #[arg(long)]
    reactors: Option<usize>,
}

/// The running block service.
pub struct BlockService {
    nbd: nbd::Server,
    exports: Vec<Arc<Export>>,
    /// Last, so that the servers' tasks end with it.
    _reactors: Reactors,
}

impl BlockService {
    /// Starts what the arguments ask for; `None` if that is nothing.
    pub fn start(args: &BlockArgs, anonymous: bool) -> Result<Option<BlockService>, String> {
        if args.block.is_empty() {
            return Ok(None);
        }
        let mut exports: Vec<Arc<Export>> = Vec::new();
        for spec in &args.block {
            if exports.iter().any(|e| e.name == spec.name) {
                return Err(format!("two block exports are named '{}'", spec.name));
            }
            exports.push(Arc::new(spec.open().map_err(|e| format!("block export '{}': {e}", spec.name))?));
        }
        let mut listen = args.nbd.clone();
        if listen.is_empty() {
            listen.push(Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 10809))));
        }
        if let Some(open) = listen.iter().find(|a| !a.is_local())
            && args.tls_ca.is_none()
            && !anonymous
        {
            return Err(format!(
                "NBD at {open} could be used by anybody: give --tls-cert, --tls-key and --tls-ca, or --anonymous"
            ));
        }
        let tls = match (&args.tls_cert, &args.tls_key) {
            (Some(cert), Some(key)) => Some(tls::server(cert, key, args.tls_ca.as_deref().map(Path::new))?),
            _ => None,
        };
        let reactors = Reactors::start(args.reactors).map_err(|e| format!("starting the block service: {e}"))?;
        let config =
            nbd::Config { listen, exports: exports.clone().into(), tls, connections_max: args.max_connections };
        let nbd = nbd::Server::start(config, &reactors)?;
        Ok(Some(BlockService { nbd, exports, _reactors: reactors }))
    }

    /// Where the service listens.
    pub fn announce(&self, json: &mut serde_json::Map<String, serde_json::Value>) {
        let nbd: Vec<String> = self.nbd.addresses().iter().map(Address::to_string).collect();
        json.insert("nbd".into(), nbd.into());
    }

    /// The same for people, a line each.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.nbd.addresses().iter().map(|a| format!("NBD at {a}")).collect();
        for export in &self.exports {
            let geometry = export.geometry();
            let mode = if geometry.read_only { "read-only" } else { "read and write" };
            lines.push(format!("block {} = {}, {} octets ({mode})", export.name, export.description, geometry.size));
        }
        lines
    }
}
