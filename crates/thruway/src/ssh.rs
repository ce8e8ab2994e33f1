//! Starting the peer through the user's own ssh: `thruway serve --once` runs there, a fresh
//! secret goes down ssh's pipe, the port comes back up, and the data goes over a connection of
//! its own that the secret authenticates and encrypts.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::ToSocketAddrs;
use std::process::{Child, ChildStdin, Command, Stdio};
use thruway_fabric::iwarp;
use thruway_transfer::auth::{self, Credentials};
use thruway_transfer::client::Remote;
use thruway_transfer::link::Transport;

/// Export of the peer's file system.
pub const ROOT: &str = "root";
/// Export of the peer's home directory.
pub const HOME: &str = "home";

/// A peer that lives as long as this.
pub struct Connection {
    child: Child,
    /// The peer goes when this closes.
    _pipe: ChildStdin,
}

impl Connection {
    /// Starts a peer on `host`; `read_only` if it is only to be read from.
    ///
    /// The ssh program and the program at the other end can be named by `THRUWAY_SSH` and
    /// `THRUWAY_REMOTE`.
    pub fn start(host: &OsStr, read_only: bool) -> Result<(Connection, Remote), String> {
        let shown = host.to_string_lossy().into_owned();
        let program = std::env::var_os("THRUWAY_SSH").unwrap_or_else(|| "ssh".into());
        let there = std::env::var("THRUWAY_REMOTE").unwrap_or_else(|_| "thruway".into());
        let mode = if read_only { ":ro" } else { "" };
        let command = format!(
            "{there} serve --quiet --secret-from-stdin --listen 0.0.0.0:0 --export {ROOT}=/{mode} --export {HOME}=.{mode}"
        );
        let mut child = Command::new(&program)
            .arg(host)
            .arg(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("{}: {e}", program.to_string_lossy()))?;
        let secret = thruway_engine::security::random();
        let mut down = child.stdin.take().expect("piped");
        let told = writeln!(down, "{}", auth::to_hex(&secret)).and_then(|()| down.flush());
        let mut up = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        let heard = told.and_then(|()| up.read_line(&mut line));
        let connection = Connection { child, _pipe: down };
        let port = heard.ok().and_then(|_| line.trim().strip_prefix("THRUWAY 1 ")).and_then(|p| p.parse::<u16>().ok());
        let Some(port) = port else {
            return Err(format!("{shown}: could not start '{there}' there through ssh"));
        };
        let name = shown.rsplit('@').next().unwrap_or(&shown).to_string();
        let mut addrs = (name.as_str(), port).to_socket_addrs().map_err(|e| format!("{name}: {e}"))?;
        let addr = addrs.next().ok_or_else(|| format!("{name}: no address"))?;
        let remote = Remote {
            addr,
            label: shown,
            credentials: Credentials::Secret(secret),
            known_hosts: None,
            fabric: iwarp::Config::default().into(),
            transport: Transport::Rdma,
        };
        Ok((connection, remote))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
