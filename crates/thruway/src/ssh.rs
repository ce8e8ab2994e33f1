//! Starting the peer through the user's own ssh: `thruway serve --once` runs there, a fresh
//! secret goes down ssh's pipe, the port and the address that ssh reached come back up, and the data goes over a connection of
//! its own that the secret authenticates and encrypts.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::process::{Child, ChildStdin, Command, Stdio};
use thruway_fabric::iwarp;
use thruway_transfer::auth::{self, Credentials};
use thruway_transfer::client::Remote;
use thruway_transfer::link::Transport;

/// Export of the peer's file system.
pub(crate) const ROOT: &str = "root";
/// Export of the peer's home directory.
pub(crate) const HOME: &str = "home";

/// A peer that lives as long as this.
pub(crate) struct Connection {
    child: Child,
    /// The peer goes when this closes.
    _pipe: ChildStdin,
}

impl Connection {
    /// Starts a peer on `host`; `read_only` if it is only to be read from.
    ///
    /// The ssh program and the program at the other end can be named by `THRUWAY_SSH` and
    /// `THRUWAY_REMOTE`.
    pub(crate) fn start(host: &OsStr, read_only: bool) -> Result<(Connection, Remote), String> {
        let shown = host.to_string_lossy().into_owned();
        let program = std::env::var_os("THRUWAY_SSH").unwrap_or_else(|| "ssh".into());
        let there = std::env::var("THRUWAY_REMOTE").unwrap_or_else(|_| "thruway".into());
        let mode = if read_only { ":ro" } else { "" };
        let command =
            format!("{there} serve --quiet --secret-from-stdin --once --export {ROOT}=/{mode} --export {HOME}=.{mode}");
        let mut child = Command::new(&program)
            // A host that begins with a dash is no option.
            .arg("--")
            .arg(host)
            .arg(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("{}: {e}", program.to_string_lossy()))?;
        let secret = thruway_engine::random::random();
        let mut down = child.stdin.take().expect("piped");
        let told = writeln!(down, "{}", auth::to_hex(&secret)).and_then(|()| down.flush());
        let mut up = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        let heard = told.and_then(|()| up.read_line(&mut line));
        let connection = Connection { child, _pipe: down };
        let Some((port, told)) = heard.ok().and_then(|_| parse_greeting(&line)) else {
            return Err(format!(
                "{shown}: could not start '{there}' there through ssh; install thruway there, or name its path there by \
                 THRUWAY_REMOTE"
            ));
        };
        // The address at which ssh reached it, then what its name means here: an alias in ssh's configuration may
        // be no name of a host at all.
        let name = shown.rsplit('@').next().unwrap_or(&shown).to_string();
        let named = (name.as_str(), port).to_socket_addrs().map(Iterator::collect).unwrap_or_else(|_| Vec::new());
        let mut addrs = told.map(|ip| SocketAddr::new(ip, port)).into_iter().chain(named);
        let addr = addrs.next().ok_or_else(|| format!("{name}: no address"))?;
        let remote = Remote {
            addr,
            others: addrs.filter(|other| *other != addr).collect(),
            label: shown,
            credentials: Credentials::Secret(secret),
            known_hosts: None,
            fabric: iwarp::Config::default().into(),
            transport: Transport::Rdma,
        };
        Ok((connection, remote))
    }
}

/// The port, and the address at which ssh reached the peer, if it knows. What its shell said before is none of ours.
fn parse_greeting(line: &str) -> Option<(u16, Option<IpAddr>)> {
    let mut words = line.trim().strip_prefix("THRUWAY 1 ")?.split_whitespace();
    let port = words.next()?.parse().ok()?;
    Some((port, words.next().and_then(|word| word.parse().ok())))
}

/// At the peer: where ssh's client reached this machine.
pub(crate) fn reached_at() -> Option<IpAddr> {
    let text = std::env::var("SSH_CONNECTION").ok()?;
    text.split_whitespace().nth(2)?.parse().ok()
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_says_where_it_is() {
        assert_eq!(parse_greeting("THRUWAY 1 4711\n"), Some((4711, None)));
        let at = |text: &str| Some((4711, Some(text.parse().unwrap())));
        assert_eq!(parse_greeting("THRUWAY 1 4711 192.0.2.7\n"), at("192.0.2.7"));
        assert_eq!(parse_greeting("THRUWAY 1 4711 2001:db8::1\n"), at("2001:db8::1"));
        assert_eq!(parse_greeting("Welcome!\n"), None);
    }
}
