//! A server and a directory there.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use thruway_rpc::client::RdmaOptions;

/// How a server is reached over RDMA.
pub type ChooseRdma = Arc<dyn Fn(SocketAddr) -> io::Result<RdmaOptions> + Send + Sync>;

/// A server and a directory there.
#[derive(Clone)]
pub struct NfsOptions {
    /// Addresses of the server, of which the first that answers is used.
    pub servers: Vec<SocketAddr>,
    /// How the server is reached over RDMA; `None` for TCP.
    pub rdma: Option<ChooseRdma>,
    /// Names from the root of the server's shares to the directory.
    pub path: Vec<Vec<u8>>,
    /// Name of the client: unique, and the same after a restart, so that the server frees the state of the earlier run.
    pub owner: Vec<u8>,
    /// Whether clients of this host may get delegations for reading, which the server then has to grant. Over TCP only.
    pub delegations: bool,
    /// File for long handles of the server. Without one, long handles are stale after a restart.
    pub handles: Option<PathBuf>,
}
