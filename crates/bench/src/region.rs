//! `thruway bench region`: memory for fio's engine.

use super::BenchProvider;
use clap::Args;
use std::net::SocketAddr;
use thruway_cli::Common;
use thruway_fio::Target;

/// Arguments of `thruway bench region`.
#[derive(Args)]
pub(super) struct RegionArgs {
    /// Where to listen (port 0: any; the address is printed). Everybody who can connect can read and write
    #[arg(long, value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// How much memory
    #[arg(long, default_value = "1G", value_parser = thruway_cli::units::parse_size)]
    size: u64,
    /// What carries the requests
    #[arg(long, value_enum, default_value_t = BenchProvider::Iwarp)]
    provider: BenchProvider,
}

pub(super) fn run(args: &RegionArgs, common: &Common) -> Result<(), String> {
    let provider = args.provider.at(args.listen)?;
    let size = usize::try_from(args.size).map_err(|_| "--size is more than this machine can address".to_string())?;
    let target = Target::open(&provider, args.listen, size).map_err(|e| e.to_string())?;
    let addr = target.local_addr();
    if common.json {
        thruway_cli::say!("{}", serde_json::json!({ "listening": addr.to_string(), "size": args.size }));
    } else if !common.quiet {
        thruway_cli::say_error!("listening on {addr}, {size} bytes");
    }
    target.serve(|| false).map_err(|e| e.to_string())
}
