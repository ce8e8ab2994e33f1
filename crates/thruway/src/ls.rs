//! `thruway ls`.

use crate::endpoint::Endpoint;
use crate::remote::{self, Provider};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use thruway_cli::{Common, Failed};
use thruway_transfer::client;

/// Arguments of `thruway ls`.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  thruway ls tw://store                   the daemon's exports\n  thruway ls tw://store/archive/run7      a directory"
)]
pub(crate) struct LsArgs {
    /// Private key for daemons [default: ~/.config/thruway/id]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// What carries it
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    /// What to list
    #[arg(value_name = "tw://HOST[:PORT][/EXPORT[/PATH]]")]
    url: OsString,
}

/// Runs `thruway ls`.
pub(crate) fn run(args: &LsArgs, common: &Common) -> Result<(), Failed> {
    let entries = (|| {
        let Endpoint::Daemon { host, port, export, path, .. } = Endpoint::parse(&args.url)? else {
            return Err(format!("{}: write tw://host[:port][/export[/path]]", args.url.to_string_lossy()));
        };
        let mut remote = remote::daemon(&host, port, args.key.as_ref())?;
        args.provider.apply_to(&mut remote)?;
        client::list(&remote, &export, &path).map_err(|e| format!("{}: {e}", remote.label))
    })()
    .map_err(|message| {
        thruway_cli::say_error!("thruway ls: {message}");
        Failed
    })?;
    let kind = |mode: u32| match mode & 0o170_000 {
        0o040_000 => 'd',
        0o120_000 => 'l',
        0o100_000 => '-',
        _ => '?',
    };
    if common.json {
        let rows: Vec<_> = entries
            .iter()
            .map(|e| {
                let name = String::from_utf8(e.name.clone()).unwrap_or_else(|e| thruway_transfer::escape(e.as_bytes()));
                serde_json::json!({ "name": name, "type": kind(e.mode).to_string(), "mode": e.mode & 0o7777, "size": e.size, "mtime": e.mtime })
            })
            .collect();
        thruway_cli::say!("{}", serde_json::Value::Array(rows));
        return Ok(());
    }
    for entry in entries {
        let name = thruway_transfer::escape(&entry.name);
        thruway_cli::say!("{}{:04o} {:>12} {}", kind(entry.mode), entry.mode & 0o7777, entry.size, name);
    }
    Ok(())
}
