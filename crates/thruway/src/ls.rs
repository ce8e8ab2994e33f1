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
    let endpoint = Endpoint::parse(&args.url).map_err(|message| Failed::usage("ls", message))?;
    let Endpoint::Daemon { host, port, export, path, .. } = endpoint else {
        let url = args.url.to_string_lossy();
        return Err(Failed::usage("ls", format!("{url}: write tw://host[:port][/export[/path]]")));
    };
    let entries = (|| {
        let mut remote = remote::daemon(&host, port, args.key.as_ref())?;
        args.provider.apply_to(&mut remote)?;
        client::list(&remote, &export, &path).map_err(|e| format!("{}: {e}", remote.label))
    })()
    .map_err(|message| Failed::operation("ls", message))?;
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
        thruway_cli::say!("{}{} {:>12} {}", kind(entry.mode), permissions(entry.mode), entry.size, name);
    }
    Ok(())
}

/// The type of an entry, as `ls -l` writes it.
fn kind(mode: u32) -> char {
    match mode & 0o170_000 {
        0o040_000 => 'd',
        0o120_000 => 'l',
        0o100_000 => '-',
        0o010_000 => 'p',
        0o020_000 => 'c',
        0o060_000 => 'b',
        0o140_000 => 's',
        _ => '?',
    }
}

/// Permissions as `ls -l` writes them: `rwxr-xr-x`, with `s`, `S`, `t` and `T` for the set-id bits and the sticky bit.
fn permissions(mode: u32) -> String {
    let group = |shift: u32, special: u32, letter: char| {
        let bits = mode >> shift;
        let execute = match (bits & 1 != 0, mode & special != 0) {
            (false, false) => '-',
            (true, false) => 'x',
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
        };
        [if bits & 4 != 0 { 'r' } else { '-' }, if bits & 2 != 0 { 'w' } else { '-' }, execute]
    };
    [group(6, 0o4000, 's'), group(3, 0o2000, 's'), group(0, 0o1000, 't')].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_written_as_by_ls() {
        for (mode, written) in [
            (0o100_644, "-rw-r--r--"),
            (0o040_755, "drwxr-xr-x"),
            (0o104_755, "-rwsr-xr-x"),
            (0o102_640, "-rw-r-S---"),
            (0o041_777, "drwxrwxrwt"),
            (0o041_770, "drwxrwx--T"),
        ] {
            assert_eq!(format!("{}{}", kind(mode), permissions(mode)), written);
        }
    }
}
