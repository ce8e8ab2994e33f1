//! The control socket of the daemon.

use crate::support;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::{Lab, NOBODY, THRUWAY};

/// A daemon with a disk, a share and an export, and its socket.
struct Daemon {
    child: Child,
    nbd: String,
    socket: PathBuf,
}

impl Daemon {
    fn start(lab: &Lab) -> Daemon {
        Daemon::with(lab, &["--share", "files=mem:1M", "--nfs", "127.0.0.1:0", "--nfs-rpcbind", "none"])
    }

    /// With more services or other options.
    fn with(lab: &Lab, options: &[&str]) -> Daemon {
        let socket = lab.path("control");
        let mut child = Command::new(THRUWAY)
            .args(["--json", "serve", "--listen", "127.0.0.1:0", "--nbd", "127.0.0.1:0"])
            .args(["--block", "disk=mem:1M,cache=8M"])
            .arg("--state")
            .arg(lab.path("state"))
            .args(options)
            .arg("--control")
            .arg(&socket)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line).unwrap();
        Daemon { child, nbd: said["nbd"][0].as_str().unwrap().into(), socket }
    }

    fn ask(&self, line: &str) -> serde_json::Value {
        Client::connect(&self.socket).ask(line)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client(BufReader<UnixStream>);

impl Client {
    fn connect(socket: &Path) -> Client {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Client(BufReader::new(stream))
    }

    fn ask(&mut self, line: &str) -> serde_json::Value {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut reply = String::new();
        self.0.read_line(&mut reply).unwrap();
        serde_json::from_str(&reply).unwrap()
    }
}

const STATISTICS: &str = r#"{"version":1,"verb":"statistics"}"#;

/// The value of a metric with this label.
fn value(statistics: &serde_json::Value, name: &str, label: Option<(&str, &str)>) -> u64 {
    let list = statistics["statistics"].as_array().unwrap();
    let is_it = |one: &&serde_json::Value| {
        one["name"] == name && label.is_none_or(|(name, value)| one["labels"][name] == value)
    };
    let found: Vec<_> = list.iter().filter(is_it).collect();
    assert_eq!(found.len(), 1, "{name} {label:?}: {statistics}");
    found[0]["value"].as_u64().unwrap()
}

#[test]
fn statistics_are_numbers_of_the_services() {
    let lab = Lab::new();
    let daemon = Daemon::start(&lab);
    let mut client = Client::connect(&daemon.socket);
    let before = client.ask(STATISTICS);
    assert_eq!(before["version"], 1);
    let connections = |said: &serde_json::Value| value(said, "thruway_connections", Some(("protocol", "NBD")));
    assert_eq!((connections(&before), value(&before, "thruway_transfer_sessions", None)), (0, 0));
    assert_eq!(value(&before, "thruway_nfs_clients", None), 0);
    assert!(value(&before, "thruway_start_time_seconds", None) > 1_700_000_000);
    let read = Command::new("qemu-io")
        .args([
            "-f",
            "raw",
            "-c",
            "write 0 64k",
            "-c",
            "read 0 64k",
            "-c",
            "read 0 64k",
            &format!("nbd://{}/disk", daemon.nbd),
        ])
        .output()
        .unwrap();
    assert!(read.status.success(), "{read:?}");
    // The same connection of the client goes on.
    let after = client.ask(STATISTICS);
    let hits = value(&after, "thruway_cache_hits", Some(("export", "disk")));
    assert!(hits > value(&before, "thruway_cache_hits", Some(("export", "disk"))), "{after}");
    let held = std::net::TcpStream::connect(&daemon.nbd).unwrap();
    // The daemon greets a client when it counts.
    (&held).read_exact(&mut [0; 18]).unwrap();
    assert!(connections(&client.ask(STATISTICS)) >= 1);
}

#[test]
fn a_request_that_is_wrong_is_answered_and_the_next_one_too() {
    let lab = Lab::new();
    let daemon = Daemon::start(&lab);
    let mut client = Client::connect(&daemon.socket);
    for (line, code, named) in [
        ("", "malformed", "EOF"),
        ("statistics", "malformed", "\"verb\":\"statistics\""),
        (r#"{"version":1}"#, "malformed", "verb"),
        (r#"{"version":1,"verb":"statistics","fast":true}"#, "malformed", "fast"),
        (r#"{"version":2,"verb":"statistics"}"#, "version", "version 1"),
        (r#"{"version":1,"verb":"dance\u0007"}"#, "verb", "statistics, stop"),
        ("\u{0}\u{1}", "malformed", "expected"),
    ] {
        let reply = client.ask(line);
        assert_eq!(reply["error"]["code"], code, "{line}: {reply}");
        assert!(reply["error"]["message"].as_str().unwrap().contains(named), "{line}: {reply}");
    }
    assert!(client.ask(STATISTICS)["statistics"].is_array());
    // Half a line, and then none.
    let mut half = UnixStream::connect(&daemon.socket).unwrap();
    half.write_all(b"{\"version\":1").unwrap();
    half.shutdown(std::net::Shutdown::Write).unwrap();
    let mut reply = String::new();
    half.read_to_string(&mut reply).unwrap();
    assert!(reply.contains("malformed"), "{reply}");
    // A request without end.
    let mut long = UnixStream::connect(&daemon.socket).unwrap();
    let _ = long.write_all(&vec![b' '; 65 << 10]);
    let mut reply = String::new();
    long.read_to_string(&mut reply).unwrap_or_default();
    assert!(reply.is_empty() || reply.contains("too-long"), "{reply}");
    assert!(daemon.ask(STATISTICS)["statistics"].is_array());
}

#[test]
fn so_many_clients_are_served_at_a_time() {
    let lab = Lab::new();
    let daemon = Daemon::start(&lab);
    let clients: Vec<Client> = (0..16)
        .map(|_| {
            let mut client = Client::connect(&daemon.socket);
            assert!(client.ask(STATISTICS)["statistics"].is_array());
            client
        })
        .collect();
    assert_eq!(daemon.ask(STATISTICS)["error"]["code"], "busy");
    drop(clients);
    until_served(&daemon);
}

/// The daemon gives up a client that takes nothing for 5 s.
#[test]
fn clients_that_never_read_do_not_keep_others_out_for_long() {
    let lab = Lab::new();
    let daemon = Daemon::start(&lab);
    let stuck: Vec<UnixStream> = (0..16).map(|_| UnixStream::connect(&daemon.socket).unwrap()).collect();
    for mut client in &stuck {
        client.set_nonblocking(true).unwrap();
        let request = format!("{STATISTICS}\n");
        while client.write_all(request.as_bytes()).is_ok() {}
    }
    until_served(&daemon);
}

/// Asks until the daemon serves one more client.
fn until_served(daemon: &Daemon) {
    loop {
        let mut client = UnixStream::connect(&daemon.socket).unwrap();
        // A client that is refused may be gone before it has asked.
        let _ = client.write_all(format!("{STATISTICS}\n").as_bytes());
        let mut reply = String::new();
        let _ = BufReader::new(client).read_line(&mut reply);
        if reply.contains("thruway_connections") {
            return;
        }
        assert!(reply.is_empty() || reply.contains("busy"), "{reply}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn stop_ends_the_daemon_and_removes_the_socket() {
    let lab = Lab::new();
    let mut daemon = Daemon::start(&lab);
    assert_eq!(std::fs::metadata(&daemon.socket).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = Client::connect(&daemon.socket);
    assert_eq!(client.ask(r#"{"version":1,"verb":"stop"}"#)["stopping"], true);
    assert!(daemon.child.wait().unwrap().success());
    assert!(!daemon.socket.exists());
    // The connection ends with the daemon.
    assert_eq!(client.0.read_line(&mut String::new()).unwrap_or(0), 0);
}

#[test]
fn a_socket_in_use_is_refused_and_a_dead_one_replaced() {
    let lab = Lab::new();
    let mut daemon = Daemon::start(&lab);
    let second = Command::new(THRUWAY)
        .args(["serve", "--block", "m=mem:1M", "--nbd", "127.0.0.1:0", "--control"])
        .arg(&daemon.socket)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains("--control") && said.contains("another daemon"), "{said}");
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(daemon.socket.exists());
    let again = Daemon::start(&lab);
    assert!(again.ask(STATISTICS)["statistics"].is_array());
}

/// Asks as another user.
#[test]
fn other_users_are_refused() {
    let lab = Lab::new();
    std::fs::set_permissions(lab.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    // All users can connect to its socket. The reply says that they are not allowed.
    let daemon = Daemon::with(&lab, &["--user", "nobody"]);
    assert!(daemon.ask(STATISTICS)["statistics"].is_array(), "root");
    // A client that is refused gets the reply before it has asked.
    let script = r#"
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
try:
    s.sendall(b'{"version":1,"verb":"stop"}\n')
except BrokenPipeError:
    pass
print(s.makefile().readline())
"#;
    let ask_as = |user: &str| {
        let asked = Command::new("setpriv")
            .args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"])
            .args(["/usr/bin/python3", "-c", script])
            .arg(&daemon.socket)
            .output()
            .unwrap();
        String::from_utf8_lossy(&asked.stdout).into_owned() + &support::stderr(&asked)
    };
    let refused = ask_as("1");
    assert!(refused.contains("not-allowed"), "{refused}");
    let allowed = ask_as(&NOBODY.to_string());
    assert!(allowed.contains("stopping"), "{allowed}");
}
