//! `thruway ls`: exports of daemons and shares of NFS servers, and what is in them.

use crate::endpoint::{self, Endpoint};
use crate::remote::{self, Provider};
use clap::Args;
use std::ffi::OsString;
use std::io::Write;
use std::net::ToSocketAddrs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;
use thruway_cli::{Common, Failed};
use thruway_nfs::client::Caller;
use thruway_nfs::security::Security;
use thruway_transfer::client;

/// Arguments of `thruway ls`.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  thruway ls tw://store                   the daemon's exports\n  thruway ls tw://store/archive/run7      a directory\n  thruway ls nfs://filer                  what an NFS server shares\n  thruway ls nfs://filer/data/run7        a directory there"
)]
pub(crate) struct LsArgs {
    /// Private key for daemons [default: ~/.config/thruway/id]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// What carries it
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    /// How to show an NFS server who asks: sys, or krb5, krb5i or krb5p with the tickets of Kerberos that there are [default: sys]
    #[arg(long, value_name = "FLAVOR")]
    sec: Option<Security>,
    /// What to list: a place on a daemon or a path on an NFS server (version 4).
    #[arg(
        value_name = "URL",
        help = "What to list: tw://HOST[:PORT][/EXPORT[/PATH]] of a daemon, or nfs://HOST[:PORT][/SHARE[/PATH]] of an NFS server (version 4)"
    )]
    url: OsString,
}

/// How long an NFS server may take to answer.
const NFS_TIMEOUT: Duration = Duration::from_secs(30);

/// An entry of a listing.
struct Row {
    name: Vec<u8>,
    mode: u32,
    size: u64,
    mtime: i64,
}

/// Runs `thruway ls`.
pub(crate) fn run(args: &LsArgs, common: &Common) -> Result<(), Failed> {
    let rows = match args.url.as_bytes().strip_prefix(b"nfs://") {
        Some(_) if args.key.is_some() || args.provider != Provider::Auto => {
            return Err(Failed::usage("ls", "--key and --provider are for daemons (tw://), not for NFS servers"));
        }
        Some(rest) => of_nfs_server(&args.url.to_string_lossy(), rest, args.sec.unwrap_or(Security::Sys))?,
        None if args.sec.is_some() => {
            return Err(Failed::usage("ls", "--sec is for NFS servers (nfs://), not for daemons"));
        }
        None => of_daemon(args)?,
    };
    if common.json {
        return print_array(&rows).map_err(|e| Failed::output(&e));
    }
    for entry in rows {
        let name = thruway_transfer::escape(&entry.name);
        thruway_cli::say!("{}{} {:>12} {}", kind(entry.mode), permissions(entry.mode), entry.size, name);
    }
    Ok(())
}

/// Prints rows as a JSON array, one at a time: a tree of values would take many times the memory of the rows.
fn print_array(rows: &[Row]) -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for (index, e) in rows.iter().enumerate() {
        let name = String::from_utf8(e.name.clone()).unwrap_or_else(|e| thruway_transfer::escape(e.as_bytes()));
        let row = serde_json::json!({ "name": name, "type": kind(e.mode).to_string(), "mode": e.mode & 0o7777, "size": e.size, "mtime": e.mtime });
        write!(out, "{}{row}", if index == 0 { "[" } else { "," })?;
    }
    writeln!(out, "{}", if rows.is_empty() { "[]" } else { "]" })?;
    out.flush()
}

/// What is at `host[:port][/share[/path]]` of an NFS server.
fn of_nfs_server(url: &str, rest: &[u8], security: Security) -> Result<Vec<Row>, Failed> {
    let usage = |why: String| Failed::usage("ls", format!("{url}: {why}"));
    let (host, port, path) = endpoint::parse_authority(rest, endpoint::NFS_PORT).map_err(usage)?;
    if host.is_empty() {
        return Err(usage("no host; write nfs://host[:port][/share[/path]]".into()));
    }
    let path = endpoint::tidy(path);
    let names: Vec<Vec<u8>> = path.split(|b| *b == b'/').filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect();
    let caller = Caller::own(security, &host);
    let list = || {
        let server = (host.as_str(), port).to_socket_addrs().map_err(|e| e.to_string())?.next();
        let server = server.ok_or("no address")?;
        thruway_nfs::client::list(server, NFS_TIMEOUT, &caller, &names).map_err(|e| e.to_string())
    };
    let listed = list().map_err(|why: String| Failed::operation("ls", format!("{url}: {why}")))?;
    Ok(listed.into_iter().map(|e| Row { name: e.name, mode: e.mode, size: e.size, mtime: e.modified.0 }).collect())
}

fn of_daemon(args: &LsArgs) -> Result<Vec<Row>, Failed> {
    let endpoint = Endpoint::parse(&args.url).map_err(|message| Failed::usage("ls", message))?;
    let Endpoint::Daemon { host, port, export, path, .. } = endpoint else {
        let url = args.url.to_string_lossy();
        return Err(Failed::usage(
            "ls",
            format!("{url}: write tw://host[:port][/export[/path]] for a daemon, or nfs://host[:port][/share[/path]]"),
        ));
    };
    let entries = (|| {
        let mut remote = remote::daemon(&host, port, args.key.as_ref())?;
        args.provider.apply_to(&mut remote)?;
        client::list(&remote, &export, &path).map_err(|e| {
            let why = e.to_string();
            let hint = remote::hint_of_daemon(remote.addr, &why).map_or(String::new(), |hint| format!("; {hint}"));
            format!("{}: {why}{hint}", remote.label)
        })
    })()
    .map_err(|message| Failed::operation("ls", message))?;
    let row = |e: thruway_transfer::wire::ListEntry| Row { name: e.name, mode: e.mode, size: e.size, mtime: e.mtime };
    Ok(entries.into_iter().map(row).collect())
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
