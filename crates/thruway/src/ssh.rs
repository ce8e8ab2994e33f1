//! Starting the peer through the user's own ssh: `thruway serve --once` runs there, a fresh
//! secret goes down ssh's pipe, the port and the address that ssh reached come back up, and the data goes over a connection of
//! its own that the secret authenticates and encrypts.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
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
        let (program, options) = split(&program)?;
        let there = std::env::var("THRUWAY_REMOTE").unwrap_or_else(|_| "thruway".into());
        let mode = if read_only { ":ro" } else { "" };
        let command =
            format!("{there} serve --quiet --secret-from-stdin --once --export {ROOT}=/{mode} --export {HOME}=.{mode}");
        let mut child = Command::new(&program)
            .args(options)
            // A host that begins with a dash is no option.
            .arg("--")
            .arg(host)
            .arg(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| {
                let program = program.to_string_lossy();
                match e.kind() {
                    std::io::ErrorKind::NotFound => {
                        format!("{program}: not found; install an ssh client, or name one by THRUWAY_SSH")
                    }
                    _ => format!("cannot start {program} (THRUWAY_SSH names another program): {e}"),
                }
            })?;
        let secret = thruway_engine::random::random();
        let mut down = child.stdin.take().expect("piped");
        // If the other end has gone, its status or its line has the reason.
        let _ = writeln!(down, "{}", auth::to_hex(&secret));
        let mut up = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = Vec::new();
        let heard = (&mut up).take(GREETING_MAX).read_until(b'\n', &mut line);
        let line = String::from_utf8_lossy(&line);
        let mut connection = Connection { child, _pipe: down };
        let Some((port, told)) = heard.ok().and_then(|_| parse_greeting(&line)) else {
            let status = if line.is_empty() { connection.end() } else { None };
            return Err(format!("{shown}: {}", failure(&there, &shown, &line, status)));
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

    /// Waits for the end of ssh, which has closed its output; `None` if it goes on.
    fn end(&mut self) -> Option<ExitStatus> {
        let begun = Instant::now();
        while begun.elapsed() < END_TIMEOUT {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(10)),
                ended => return ended.ok().flatten(),
            }
        }
        None
    }
}

/// Longest greeting in bytes.
const GREETING_MAX: u64 = 1024;
/// Longest wait for the end of an ssh that has closed its output.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Splits the value of `THRUWAY_SSH` into a program and options, with the quotes of a shell. The path of an existing file is a
/// program, also if it has spaces.
fn split(text: &OsStr) -> Result<(OsString, Vec<OsString>), String> {
    if text.as_bytes().contains(&b'/') && Path::new(text).is_file() {
        return Ok((text.into(), Vec::new()));
    }
    let words = shlex::bytes::split(text.as_bytes()).unwrap_or_default();
    let mut words = words.into_iter().map(OsString::from_vec);
    let invalid = || {
        let text = text.to_string_lossy();
        format!(
            "invalid THRUWAY_SSH '{text}' (expected a program and options, quoted as in a shell, such as ssh -p 2222)"
        )
    };
    Ok((words.next().ok_or_else(invalid)?, words.collect()))
}

/// Reason and remedy where the program `there` at `host` has not sent its greeting: from the line that came instead, or from the
/// exit status of ssh, which is that of the shell at the other end except for its own failures.
fn failure(there: &str, host: &str, line: &str, status: Option<ExitStatus>) -> String {
    let version = env!("CARGO_PKG_VERSION");
    if line.starts_with("THRUWAY ") {
        return format!("'{there}' there has another version; install version {version} there");
    }
    if !line.is_empty() {
        let line = thruway_transfer::escape(line.trim_end().as_bytes());
        return format!(
            "'{line}' came instead of the greeting of '{there}'; remove output from the start-up files of the shell there"
        );
    }
    let Some(status) = status else {
        return format!("'{there}' there has closed its output without a greeting; run it there to see why");
    };
    if let Some(signal) = status.signal() {
        return format!("signal {signal} ended ssh before the copy began");
    }
    match status.code().unwrap_or_default() {
        // Also the exit status of ssh if a signal ended the program: then ssh prints nothing.
        255 => format!(
            "ssh failed, with the message above; 'ssh {host} true' must succeed: check name, port and keys. Without a message, \
             a signal ended '{there}' there"
        ),
        127 => format!("no program '{there}' there; install thruway there, or name its path there by THRUWAY_REMOTE"),
        126 => format!("'{there}' there cannot be executed; check its permissions and that it is for that machine"),
        2 => format!(
            "'{there}' there refused the options of version {version}; install that version there, or name its path there by THRUWAY_REMOTE"
        ),
        // A shell adds 128 to the number of the signal.
        code @ 129..192 => format!("signal {} ended '{there}' there; run it there to see why", code - 128),
        code => format!("'{there}' there ended with exit status {code}; its message is above, if it had one"),
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
    fn the_program_in_place_of_ssh_can_have_options() {
        let split = |text: &str| split(text.as_ref()).map(|(program, options)| [vec![program], options].concat());
        assert_eq!(split("ssh").unwrap(), ["ssh"]);
        assert_eq!(split("ssh -p 2222").unwrap(), ["ssh", "-p", "2222"]);
        assert_eq!(split(" ssh  -i '/a key' -o \"B c\" d\\ e").unwrap(), ["ssh", "-i", "/a key", "-o", "B c", "d e"]);
        for wrong in ["", "  ", "ssh 'x"] {
            assert!(split(wrong).unwrap_err().contains(&format!("invalid THRUWAY_SSH '{wrong}'")), "{wrong}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("my ssh");
        std::fs::write(&path, "").unwrap();
        assert_eq!(split(path.to_str().unwrap()).unwrap(), [path.as_os_str()]);
        let options = format!("'{}' -4", path.display());
        assert_eq!(split(&options).unwrap(), [path.as_os_str(), "-4".as_ref()]);
    }

    #[test]
    fn the_peer_says_where_it_is() {
        assert_eq!(parse_greeting("THRUWAY 1 4711\n"), Some((4711, None)));
        let at = |text: &str| Some((4711, Some(text.parse().unwrap())));
        assert_eq!(parse_greeting("THRUWAY 1 4711 192.0.2.7\n"), at("192.0.2.7"));
        assert_eq!(parse_greeting("THRUWAY 1 4711 2001:db8::1\n"), at("2001:db8::1"));
        assert_eq!(parse_greeting("Welcome!\n"), None);
    }
}
