//! `thruway bench nfs-server`: memory shared by NFS, also in the design in which the client reads from the server's memory.

use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use thruway_cli::units;
use thruway_engine::Reactors;
use thruway_nfs::delegations::Delegate;
use thruway_nfs::mount::Mount;
use thruway_nfs::share::{Policy, Share, Shares, Squash};
use thruway_nfs::v3::Nfs3;
use thruway_nfs::v4::{self, Nfs4};
use thruway_rpc::server::{Config, Design, Program, Programs, RdmaConfig, Server};
use thruway_server::Address;
use thruway_vfs::MemoryFileSystem;

/// The name of what it shares.
pub(super) const SHARE: &str = "m";

/// Which end moves long results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DesignArg {
    /// The server, by RDMA Write (RFC 8166)
    ReadWrite,
    /// The client, by RDMA Read from the server's memory, as before
    ReadRead,
}

/// Arguments of `thruway bench nfs-server`.
#[derive(Args, Clone)]
pub(super) struct NfsServerArgs {
    /// Serve at this address until interrupted (port 0: any; the address is printed)
    #[arg(long, value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Over RDMA instead of TCP
    #[arg(long)]
    rdma: bool,
    /// What carries RDMA
    #[arg(long, value_enum, default_value_t = super::BenchProvider::Iwarp, requires = "rdma")]
    provider: super::BenchProvider,
    /// Which end moves long results; with read-read, a client can read all memory that its connection has for results
    #[arg(long, value_enum, default_value_t = DesignArg::ReadWrite, requires = "rdma")]
    design: DesignArg,
    /// Memory that is shared, as `m`
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::parse_size)]
    size: u64,
}

/// Runs the command.
pub(super) fn run(args: &NfsServerArgs) -> Result<(), String> {
    let policy = Policy { squash: Squash::None, ..Policy::default() };
    let share = Share::new(SHARE, Box::new(MemoryFileSystem::new(args.size)), policy, Delegate::Nothing);
    let shares = Shares::new(vec![share], thruway_engine::random::random());
    let shares = Arc::new(shares.map_err(|_| "one share cannot be told from itself")?);
    let reactors = Reactors::start(None).map_err(|e| e.to_string())?;
    let v4 = v4::Config { lease: Duration::from_secs(90), state_file: None, had_clients: false };
    let v4 = Nfs4::new(Arc::clone(&shares), v4).map_err(|e| e.to_string())?;
    let programs = Programs::new([
        Arc::new(Nfs3::new(Arc::clone(&shares))) as Arc<dyn Program>,
        Arc::new(v4),
        Arc::new(Mount::new(shares)),
    ]);
    const CONNECTIONS_MAX: usize = 8192;
    let server = if args.rdma {
        let config = RdmaConfig {
            protocol: "NFS/RDMA",
            listen: vec![args.listen],
            provider: args.provider.at(args.listen)?,
            design: match args.design {
                DesignArg::ReadWrite => Design::ReadWrite,
                DesignArg::ReadRead => Design::ReadRead,
            },
            programs,
            own_user_only: false,
            connections_max: CONNECTIONS_MAX,
        };
        Server::start_rdma(config, &reactors).map_err(|e| e.to_string())?
    } else {
        let config = Config {
            protocol: "NFS",
            listen: vec![Address::Tcp(args.listen)],
            programs,
            tls: None,
            tls_required: false,
            own_user_only: false,
            connections_max: CONNECTIONS_MAX,
        };
        Server::start(config, &reactors).map_err(|e| e.to_string())?
    };
    for address in server.addresses() {
        thruway_cli::say_error!("listening on {address}");
    }
    loop {
        std::thread::park();
    }
}
