//! Shares of memory, as programs in user space use them: no kernel's client, and no rights, are needed.

use crate::support;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::disks::{Disks, certificates, ok, run, text};
use support::{Lab, THRUWAY};

/// Options that share memory called `m`.
const SHARE: [&str; 5] = ["--quiet", "--share", "m=mem:64M,squash=none", "--nfs", "127.0.0.1:0"];

/// A share of memory called `m`.
fn share() -> (Disks, String, Lab) {
    let lab = Lab::new();
    let state = lab.path("state");
    let daemon = Disks::serve(&[&SHARE[..], &["--state", state.to_str().unwrap()]].concat());
    let at = daemon.at("nfs");
    (daemon, at, lab)
}

#[test]
fn what_outlives_a_daemon_is_not_shared_with_another() {
    let (_daemon, _, lab) = share();
    let state = lab.path("state");
    let second = run(THRUWAY, &[&["serve"], &SHARE[..], &["--state", state.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && said.contains("--state DIR of its own"), "{said}");
}

#[test]
fn what_is_shared_can_be_listed() {
    let (_daemon, at, _lab) = share();
    let ls = |path: &str| ok(THRUWAY, &["ls", &format!("nfs://{at}{path}")]);
    let shares = ls("");
    assert!(shares.starts_with("drwx") && shares.trim_end().ends_with(" m"), "{shares}");
    assert_eq!(ls("/m"), "");
    let misused = run(THRUWAY, &["ls", "--key", "/tmp/key", &format!("nfs://{at}/")]);
    assert!(String::from_utf8_lossy(&misused.stderr).contains("--key"), "it would have no effect");
    let json = ok(THRUWAY, &["ls", "--json", &format!("nfs://{at}/")]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json[0]["name"].as_str(), json[0]["type"].as_str()), (Some("m"), Some("d")));
    for (url, says) in [
        (format!("nfs://{at}/none"), "No such file or directory"),
        (format!("nfs://{at}/m/none/x"), "No such file or directory"),
        ("nfs://".into(), "no host"),
        ("nfs://127.0.0.1:1/".into(), "Connection refused"),
    ] {
        let failed = run(THRUWAY, &["ls", &url]);
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success() && said.contains(says) && said.contains(&url), "{said}");
    }
}

#[test]
fn every_operation_can_be_measured() {
    let (_daemon, at, _lab) = share();
    for version in ["3", "4.1"] {
        let options = ["--vers", version, "--op", "read,write,getattr,lookup,create,mkdir", "--seconds", "0.2"];
        let at = ["--connect", &at, "--share", "m", "--file-size", "4M", "--clients", "3"];
        let rows = ok(THRUWAY, &[&["bench", "nfs", "--json"], &at[..], &options].concat());
        let rows: serde_json::Value = serde_json::from_str(&rows).unwrap();
        let rows = rows.as_array().unwrap();
        assert_eq!(rows.len(), 6);
        for row in rows {
            assert!(row["operations"].as_u64() > Some(0) && row["version"] == version, "{row}");
            assert!(
                (row["op"] == "read" || row["op"] == "write") == (row["bytes_per_second"].as_f64() > Some(0.0)),
                "{row}"
            );
        }
    }
    // Nothing is left, and what is not there is said.
    assert_eq!(ok(THRUWAY, &["ls", &format!("nfs://{at}/m")]), "");
    for version in ["3", "4.1"] {
        let failed = run(THRUWAY, &["bench", "nfs", "--connect", &at, "--share", "none", "--vers", version]);
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success() && said.contains("none: ") && said.contains("No such file"), "{said}");
    }
}

#[test]
fn a_server_is_measured_over_rdma_as_well() {
    let lab = Lab::new();
    let state = lab.path("state");
    let options = ["--nfs-rdma", "127.0.0.1:0", "--state", text(&state)];
    let daemon = Disks::serve(&[&SHARE[..], &options].concat());
    let at = daemon.at("nfs_rdma");
    for (version, registration) in
        [("3", "windows"), ("4.1", "windows"), ("3", "dynamic"), ("4.1", "all"), ("3", "cached")]
    {
        let options = ["--vers", version, "--op", "read,write,lookup,create", "--seconds", "0.2", "--size", "96K"];
        let at = ["--connect", &at, "--rdma", "--registration", registration, "--share", "m", "--file-size", "4M"];
        let rows = ok(THRUWAY, &[&["bench", "nfs", "--json"], &at[..], &options].concat());
        let rows: serde_json::Value = serde_json::from_str(&rows).unwrap();
        for row in rows.as_array().unwrap() {
            assert!(row["operations"].as_u64() > Some(0), "{row}");
            assert_eq!((row["transport"].as_str(), row["registration"].as_str()), (Some("iwarp"), Some(registration)));
        }
    }
    let misused = run(THRUWAY, &["bench", "nfs", "--connect", &at, "--share", "m", "--registration", "all"]);
    assert!(String::from_utf8_lossy(&misused.stderr).contains("--rdma"), "it would have no effect");
}

/// libnfs speaks versions 3 and 4.0, and finds version 3's program for mounting by its port.
#[test]
fn programs_with_libnfs_read_and_write() {
    let (_daemon, at, lab) = share();
    let (host, port) = at.rsplit_once(':').unwrap();
    let content: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let url =
        |version: u32, name: &str| format!("nfs://{host}/m{name}?version={version}&nfsport={port}&mountport={port}");
    // Of version 4, the libnfs of Debian 12 cannot build a call with 4,000 bytes of data.
    for (version, len) in [(3, content.len()), (4, 1000)] {
        let (file, name) = (lab.path("file"), format!("/v{version}"));
        fs::write(&file, &content[..len]).unwrap();
        ok("nfs-cp", &[file.to_str().unwrap(), &url(version, &name)]);
        // Each reads what either has written.
        for reading in [3, 4] {
            let read = run("nfs-cat", &[&url(reading, &name)]);
            assert!(read.status.success() && read.stdout == content[..len], "{name} by {reading}");
            let listed = ok("nfs-ls", &[&url(reading, "/")]);
            assert!(listed.contains(&len.to_string()) && listed.contains(&name[1..]), "{listed}");
        }
    }
    let listed = ok(THRUWAY, &["ls", &format!("nfs://{at}/m")]);
    assert_eq!(listed.lines().count(), 2, "{listed}");
}

/// A client of RPC in Python: `call(program, version, procedure, arguments)` returns the reply behind its number, `start_tls(name)`
/// goes on with TLS and the certificate of this name, and `status(OPERATIONS)` is that of a compound of version 4.0.
const CLIENT: &str = r#"
import socket, ssl, struct, sys
address, pki = sys.argv[1], sys.argv[2]
host, port = address.rsplit(":", 1)
words = lambda *w: struct.pack(f">{len(w)}I", *w)
opaque = lambda b: words(len(b)) + b + bytes(-len(b) % 4)

class Connection:
    def __init__(self):
        self.stream = socket.create_connection((host, int(port)))
        self.xid, self.calls = 0, []
    def receive(self, count):
        data = b""
        while len(data) < count:
            more = self.stream.recv(count - len(data))
            assert more, "closed"
            data += more
        return data
    def call(self, program, version, procedure, arguments=b"", flavor=1):
        self.xid += 1
        credential = opaque(words(0, 0, 0, 0, 0)) if flavor == 1 else words(0)
        call = words(self.xid, 0, 2, program, version, procedure, flavor) + credential + words(0, 0) + arguments
        self.stream.sendall(words(0x80000000 | len(call)) + call)
        while True:
            reply = self.receive_message()
            if reply[:8] == words(self.xid, 1):
                return reply[8:]
            assert reply[4:8] == words(0), "a callback"
            self.calls.append(reply)
    def receive_message(self):
        return self.receive(struct.unpack(">I", self.receive(4))[0] & 0x7fffffff)
    def start_tls(self, name):
        reply = self.call(100003, 4, 0, flavor=7)
        assert reply == words(0, 0) + opaque(b"STARTTLS") + words(0), reply
        context = ssl.create_default_context(cafile=f"{pki}/ca-cert.pem")
        if name:
            context.load_cert_chain(f"{pki}/{name}-cert.pem", f"{pki}/{name}-key.pem")
        self.stream = context.wrap_socket(self.stream, server_hostname="localhost")
    def status(self, count, operations):
        reply = self.call(100003, 4, 1, opaque(b"") + words(0, count) + operations)
        assert reply[:16] == words(0, 0, 0, 0), reply
        return struct.unpack(">I", reply[16:20])[0]

LOOK_UP = words(24, 15) + opaque(b"m")
MOUNT = (100005, 3, 1, opaque(b"m"))
"#;

#[test]
fn tls_lets_in_only_clients_with_a_certificate() {
    let lab = Lab::new();
    let pki = certificates(&lab, &["alice.example", "bob.example"]);
    let file = |name: &str| text(&pki.join(name)).to_string();
    let (cert, key, ca) = (file("server-cert.pem"), file("server-key.pem"), file("ca-cert.pem"));
    let state = lab.path("state");
    let share = ["--share", "m=mem:1M,allow=cert:Alice.example", "--share", "n=mem:1M", "--state", text(&state)];
    let tls = ["--nfs", "127.0.0.1:0", "--nfs-tls-cert", &cert, "--nfs-tls-key", &key, "--nfs-tls-ca", &ca];
    let daemon = Disks::serve(&[&["--quiet"], &share[..], &tls].concat());
    let script = r#"
plain = Connection()
# Mounting is answered without TLS; a share for a certificate is not for those without one.
assert plain.call(100005, 3, 1, opaque(b"n/secret"))[16:] == words(13), "nor is what is in a share"
assert plain.call(100005, 3, 5)[16:] == words(1) + opaque(b"/n") + words(0, 0)
assert plain.call(*MOUNT)[16:] == words(13)
assert plain.call(100005, 3, 1, opaque(b"n"))[16:20] == words(0)
assert plain.call(100003, 4, 0) == words(1, 1, 5), "too weak"
assert plain.call(100003, 4, 1, opaque(b"") + words(0, 2) + LOOK_UP) == words(1, 1, 5)

alice = Connection()
alice.start_tls("alice.example")
assert alice.call(100003, 4, 0) == words(0, 0, 0, 0)
assert alice.status(2, LOOK_UP) == 0
assert alice.call(100003, 4, 0, flavor=7) == words(1, 1, 5), "once is enough"

bob = Connection()
bob.start_tls("bob.example")
assert bob.status(2, LOOK_UP) == 2, "it is not shown"
assert bob.status(2, words(24, 15) + opaque(b"n")) == 0

anonymous = Connection()
try:
    anonymous.start_tls(None)
    anonymous.call(100003, 4, 0)
except (ssl.SSLError, ConnectionError, AssertionError):
    pass
else:
    raise AssertionError("without a certificate")
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{script}"), &daemon.at("nfs"), text(&pki)]);
    // Where TLS is only offered, it may be used or not.
    let state = lab.path("other");
    let offered = [&SHARE[..], &["--state", text(&state), "--nfs-tls-cert", &cert, "--nfs-tls-key", &key]].concat();
    let daemon = Disks::serve(&offered);
    let script = "for name in ['alice.example', None, False]:\n    c = Connection()\n    name is False or c.start_tls(name)\n    assert c.status(2, LOOK_UP) == 0\n";
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{script}"), &daemon.at("nfs"), text(&pki)]);
}

#[test]
fn thousands_of_connections_are_served_and_more_are_refused() {
    let lab = Lab::new();
    let state = lab.path("state");
    let daemon = Disks::serve(&[&SHARE[..], &["--max-connections", "4000", "--state", text(&state)]].concat());
    let pid = daemon.child.id().to_string();
    let script = r#"
import os, resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
resident = lambda: int(open(f"/proc/{pki}/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
open_files = lambda: len(os.listdir(f"/proc/{pki}/fd"))
first = Connection()
root = first.call(*MOUNT)[20:]
handle = root[:4 + (struct.unpack(">I", root[:4])[0] + 3) // 4 * 4]
before, files = resident(), open_files()
many = [first] + [Connection() for _ in range(3999)]
# All of them call, and then all of them read what they are answered: three times.
for round in range(3):
    for n, c in enumerate(many):
        call = words(n, 0, 2, 100003, 3, 1, 1) + opaque(words(0, 0, 0, 0, 0)) + words(0, 0) + handle
        c.stream.sendall(words(0x80000000 | len(call)) + call)
    for n, c in enumerate(many):
        reply = c.receive_message()
        assert reply[:8] == words(n, 1) and reply[24:28] == words(0), n
more = (resident() - before) // 4000
assert more < 32 << 10, f"{more} bytes for a connection"
# One more is closed, and the others are served.
refused = Connection()
try:
    refused.call(100003, 3, 0)
except (AssertionError, ConnectionError):
    pass
else:
    raise AssertionError("one more")
assert many[7].call(100003, 3, 0) == words(0, 0, 0, 0)
for c in many[1:]:
    c.stream.close()
while open_files() > files:
    time.sleep(0.01)
assert Connection().call(100003, 3, 0) == words(0, 0, 0, 0)
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{script}"), &daemon.at("nfs"), &pid]);
    daemon.stop();
}

#[test]
fn silent_connections_leave_descriptors_to_other_listeners_and_to_files() {
    let lab = Lab::new();
    let (state, dir, log) = (lab.path("state"), lab.path("dir"), lab.path("log"));
    fs::create_dir(&dir).unwrap();
    let mut limited = Command::new("prlimit");
    limited.args(["--nofile=256:256", THRUWAY]).stderr(fs::File::create(&log).unwrap());
    let share = format!("m={},squash=none", text(&dir));
    let disks = ["--block", "d=mem:1M", "--nbd", "127.0.0.1:0", "--iscsi", "127.0.0.1:0", "--max-connections", "1000"];
    let nfs = ["--share", &share, "--nfs", "127.0.0.1:0", "--state", text(&state), "--listen", "127.0.0.1:0"];
    let daemon = Disks::serve_by(&mut limited, &[&disks[..], &nfs].concat());
    let warning = fs::read_to_string(&log).unwrap();
    assert_eq!(warning.matches("--max-connections 1000").count(), 1, "{warning}");
    assert!(warning.contains("16 of NBD, 16 of iSCSI, 16 of NFS") && warning.contains("ulimit -n"), "{warning}");
    let script = r#"
first = Connection()
root = first.call(*MOUNT)[20:]
handle = root[:4 + (struct.unpack(">I", root[:4])[0] + 3) // 4 * 4]
silent = []
def connect_again_and_again(protocol):
    host, port = pki.split(",")[protocol].rsplit(":", 1)
    for _ in range(400):
        stream = socket.create_connection((host, int(port)))
        stream.settimeout(60)
        # The greeting of NBD shows that the daemon has accepted the connection.
        assert protocol > 0 or stream.recv(18)
        silent.append(stream)
def open_files(connection, name):
    for n in range(40):
        # NFS3ERR_JUKEBOX: descriptors of connections that gave way are about to be closed.
        made = words(0) * 4 + words(10008)
        while made[16:20] == words(10008):
            made = connection.call(100003, 3, 8, handle + opaque(b"%s%d" % (name, n)) + words(0, 1, 0o644, 0, 0, 0, 0, 0))
        assert made[16:20] == words(0), made
        file = made[24:24 + 4 + (struct.unpack(">I", made[24:28])[0] + 3) // 4 * 4]
        written = connection.call(100003, 3, 7, file + words(0, 0, 4, 2) + opaque(b"data"))
        assert written[16:20] == words(0), written
for protocol in range(3):
    connect_again_and_again(protocol)
    open_files(first, b"first%d-" % protocol)
    open_files(Connection(), b"new%d-" % protocol)
print("held", flush=True)
sys.stdin.read()
"#;
    let others = [daemon.at("nbd"), daemon.at("iscsi"), daemon.at("listening")].join(",");
    let mut client = Command::new("/usr/bin/python3");
    client.args(["-c", &format!("{CLIENT}{script}"), &daemon.at("nfs"), &others]);
    let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut held = String::new();
    BufReader::new(client.stdout.take().unwrap()).read_line(&mut held).unwrap();
    assert_eq!(held, "held\n");
    ok("timeout", &["60", "nbdinfo", &daemon.nbd("d")]);
    ok("timeout", &["60", "iscsi-ls", &format!("iscsi://{}", daemon.at("iscsi"))]);
    ok("timeout", &["60", THRUWAY, "ls", &format!("tw://{}/", daemon.at("listening"))]);
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
    daemon.stop();
}

#[test]
fn a_client_that_does_not_read_its_replies_takes_little_memory() {
    let (daemon, at, _lab) = share();
    let pid = daemon.child.id().to_string();
    // A listing of half a megabyte, asked for 256 times, by two connections that read nothing.
    let script = r#"
import os
resident = lambda: int(open(f"/proc/{pki}/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
c = Connection()
root = c.call(*MOUNT)[20:]
handle = root[:4 + (struct.unpack(">I", root[:4])[0] + 3) // 4 * 4]
for n in range(2500):
    made = c.call(100003, 3, 8, handle + opaque(b"%04d" % n + b"x" * 100) + words(0, 0, 0, 0, 0, 0, 0))
    assert made[16:20] == words(0)
listing = handle + words(0, 0, 0, 0, 1 << 20, 1 << 20)
assert len(c.call(100003, 3, 17, listing)) > 500_000
before = resident()
deaf = [Connection() for _ in range(2)]
for d in deaf:
    for n in range(256):
        call = words(n, 0, 2, 100003, 3, 17, 1) + opaque(words(0, 0, 0, 0, 0)) + words(0, 0) + listing
        d.stream.sendall(words(0x80000000 | len(call)) + call)
# Others are served, and these when they read.
for _ in range(500):
    assert c.call(100003, 3, 1, handle)[16:20] == words(0)
more = resident() - before
assert more < 64 << 20, more
for d in deaf:
    seen = {d.receive_message()[:4] for _ in range(256)}
    assert len(seen) == 256
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{script}"), &at, &pid]);
    daemon.stop();
}

#[test]
fn a_repeated_write_undoes_no_later_one() {
    let (daemon, at, _lab) = share();
    let pid = daemon.child.id().to_string();
    let script = r#"
import os, signal
def first_opaque(data):
    return data[:4 + (struct.unpack(">I", data[:4])[0] + 3) // 4 * 4]
c = Connection()
root = first_opaque(c.call(*MOUNT)[20:])
made = c.call(100003, 3, 8, root + opaque(b"f") + words(0, 0, 0, 0, 0, 0, 0))
file = first_opaque(made[24:])
def write(data, at=0):
    return file + words(0, at, len(data), 2) + opaque(data)
def message(xid, arguments):
    call = words(xid, 0, 2, 100003, 3, 7, 1) + opaque(words(0, 0, 0, 0, 0)) + words(0, 0) + arguments
    return words(0x80000000 | len(call)) + call
def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    # Its threads stop one after the other, each where it is.
    def state(task):
        return open(f"/proc/{pid}/task/{task}/stat").read().rpartition(")")[2].split()[0]
    while any(state(task) != "T" for task in os.listdir(f"/proc/{pid}/task")):
        pass
# Short data, and as much as is received apart from the call.
for xid, behind in [(1077, b""), (2077, b"x" * 200_000)]:
    c.stream.sendall(message(xid, write(b"AAAA" + behind)))
    assert c.receive_message()[24:28] == words(0)
    c.stream.sendall(message(xid + 1, write(b"BBBB")))
    assert c.receive_message()[24:28] == words(0)
    # The first one again, by another connection; its reply comes from memory.
    other = Connection()
    other.stream.sendall(message(xid, write(b"AAAA" + behind)))
    assert other.receive_message()[24:28] == words(0)
    read = c.call(100003, 3, 6, file + words(0, 0, 4))
    assert read.endswith(b"BBBB"), read
    # Another one with its number, and other data, is done.
    other.stream.sendall(message(xid, write(b"CCCC" + behind)))
    assert other.receive_message()[24:28] == words(0)
    assert c.call(100003, 3, 6, file + words(0, 0, 4)).endswith(b"CCCC")
    c.call(100003, 3, 7, write(b"BBBB"))
    # What is still unread of a connection that its client has given up.
    given_up = [Connection() for _ in range(4)]
    stop(int(pki))
    for n, g in enumerate(given_up):
        g.stream.sendall(message(xid + 10 + n, write(b"DDDD")))
        # At once, as by a firewall or a client that has restarted; or in order.
        if n % 2:
            g.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        g.stream.close()
    os.kill(int(pki), signal.SIGCONT)
    for _ in range(200):
        assert c.call(100003, 3, 6, file + words(0, 0, 4)).endswith(b"BBBB")
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{script}"), &at, &pid]);
    daemon.stop();
}

/// As [`CLIENT`], with a session of version 4.1: `run(count, operations)` returns the results behind SEQUENCE.
const SESSION: &str = r#"
class Session(Connection):
    minor = 1
    def __init__(self, name, back=True):
        super().__init__()
        self.sequence = 0
        reply = self.compound(1, words(42) + bytes([1] * 8) + opaque(name) + words(0, 0, 0))
        self.client, sequence = reply[8:16], reply[16:20]
        limits = words(0, 1 << 20, 1 << 20, 4096, 16, 4, 0)
        create = words(43) + self.client + sequence + words(2 if back else 0) + limits + limits + words(0x40001234, 1, 0)
        reply = self.compound(1, create)
        self.id, flags = reply[8:24], reply[28:32]
        assert flags == words(2 if back else 0), "is it called back?"
        self.run(1, words(58, 0))
    def compound(self, count, operations):
        reply = self.call(100003, 4, 1, opaque(b"") + words(self.minor, count) + operations)
        assert reply[:16] == words(0, 0, 0, 0), reply
        self.status = struct.unpack(">I", reply[16:20])[0]
        return reply[28:]
    def run(self, count, operations):
        self.sequence += 1
        results = self.compound(count + 1, words(53) + self.id + words(self.sequence, 0, 0, 0) + operations)
        self.events = results[40:44]
        return results[44:]
    def called(self):
        return self.calls.pop(0) if self.calls else self.receive_message()
    def answer(self, call, results):
        reply = call[:4] + words(1, 0, 0, 0, 0) + results
        self.stream.sendall(words(0x80000000 | len(reply)) + reply)

def opened(session, owner):
    # No delegation is wanted.
    open = words(18, 0, 0x403, 0) + session.client + opaque(owner) + words(1, 0, 0, 0, 0) + opaque(b"f")
    results = session.run(4, LOOK_UP + open + words(10))
    assert session.status == 0
    flags = struct.unpack(">I", results[16 + 8 + 16 + 20:][:4])[0]
    return results[16 + 8:][:16], flags

IN_FILE = LOOK_UP + words(15) + opaque(b"f")
"#;

#[test]
fn a_client_waiting_for_a_lock_gets_a_callback_when_it_is_free() {
    let (daemon, at, _lab) = share();
    let script = r#"
def lock(session, stateid, owner, kind):
    new = words(1, 0) + stateid + words(0) + session.client + opaque(owner)
    return session.run(4, IN_FILE + words(12, kind, 0, 0, 0, 0, 10) + new)

one, two, deaf = Session(b"one"), Session(b"two"), Session(b"deaf", back=False)
(of_one, flags), (of_two, _), (of_deaf, of_none) = opened(one, b"a"), opened(two, b"b"), opened(deaf, b"c")
assert flags & 0x20 and not of_none & 0x20, "callbacks are announced"
held = lock(one, of_one, b"a", 2)
assert one.status == 0
for session, stateid, owner in [(two, of_two, b"b"), (deaf, of_deaf, b"c")]:
    lock(session, stateid, owner, 4)
    assert session.status == 10010, "denied"
unlock = words(14, 2, 0) + held[24 + 8:][:16] + words(0, 0, 0, 10)
one.run(4, IN_FILE + unlock)
assert one.status == 0

call = two.called()
# Number, call, version of RPC, program, version, procedure, credential and verifier.
assert call[4:24] == words(0, 2, 0x40001234, 1, 1) and call[24:40] == words(0, 0, 0, 0)
tag_minor_ident_count, operations = call[40:56], call[56:]
assert tag_minor_ident_count == words(0, 1, 0, 2)
assert operations[:20] == words(11) + two.id and operations[20:40] == words(1, 0, 0, 0, 0)
assert operations[40:44] == words(13) and operations.endswith(two.client + opaque(b"b"))
two.answer(call, words(0, 0, 2, 11, 0) + two.id + words(1, 0, 0, 0) + words(13, 0))
lock(two, of_two, b"b", 2)
assert two.status == 0
# A connection that is lost is missed, and another takes its place.
second = Connection()
second.stream, two.stream = two.stream, second.stream
second.stream.close()
import time
while not two.events == words(0x200):
    two.run(0, b"")
    time.sleep(0.01)
for session, asked, status, done in [(two, 3, 0, 3), (two, 7, 0, 3), (two, 2, 0, 2), (two, 1, 0, 1), (deaf, 3, 0, 1), (deaf, 7, 22, None)]:
    reply = session.compound(1, words(41) + session.id + words(asked, 0))
    assert session.status == status and (done is None or reply[24:28] == words(done)), asked
two.run(0, b"")
assert two.events == words(0)
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{script}"), &at, ""]);
    daemon.stop();
}

/// As [`SESSION`], with locks of version 3: `Host(address)` is a client at an address of this host, whose calls return statuses.
const LOCKS: &str = r#"
TO_END = 0
class Host(Connection):
    def __init__(self, address, name=b"host", start=1):
        self.stream = socket.create_connection((host, int(port)), source_address=(address, 0))
        self.xid, self.calls, self.name, self.start = 0, [], name, start
        mounted = super().call(*MOUNT)[20:]
        root = opaque(mounted[4:4 + struct.unpack(">I", mounted[:4])[0]])
        found = super().call(100003, 3, 3, root + opaque(b"f"))[16:]
        assert found[:4] == words(0), found
        self.file = opaque(found[8:8 + struct.unpack(">I", found[4:8])[0]])
    def nlm(self, procedure, before, process, offset, length, behind=b""):
        lock = opaque(self.name) + self.file + opaque(b"owner") + words(process) + struct.pack(">QQ", offset, length)
        reply = self.call(100021, 4, procedure, opaque(b"cookie") + before + lock + behind)
        assert reply[:16] == words(0, 0, 0, 0) and reply[16:28] == opaque(b"cookie"), reply
        self.rest = reply[32:]
        return struct.unpack(">I", reply[28:32])[0]
    def test(self, process, write, offset, length):
        return self.nlm(1, words(write), process, offset, length)
    def lock(self, process, write, offset, length, wait=0, reclaim=0, procedure=2):
        return self.nlm(procedure, words(wait, write), process, offset, length, words(reclaim, self.start))
    def cancel(self, process, write, offset, length):
        return self.nlm(3, words(1, write), process, offset, length)
    def unlock(self, process, offset, length):
        return self.nlm(4, b"", process, offset, length)
    def share(self, owner, deny, access, procedure=20):
        reply = self.call(100021, 4, procedure, opaque(b"c") + opaque(self.name) + self.file + opaque(owner) + words(deny, access, 0))
        return struct.unpack(">I", reply[24:28])[0]
    def notify(self, start):
        return self.call(100024, 1, 6, opaque(b"a name that proves nothing") + words(start))

GRANTED, DENIED, NO_ROOM, BLOCKED, GRACE, STALE, TOO_BIG, FAILED = 0, 1, 2, 3, 4, 7, 8, 9
"#;

#[test]
fn locks_of_version_3_exclude_those_of_all_versions() {
    let (daemon, at, _lab) = share();
    let script = r#"
v4 = Session(b"v4")
stateid, _ = opened(v4, b"o")
one, two = Host("127.0.0.1"), Host("127.0.0.2")
for call in [(100021, 4, 0), (100024, 1, 0)]:
    assert one.call(*call) == words(0, 0, 0, 0)
assert one.call(100021, 3, 0) == words(0, 0, 0, 2, 4, 4), "versions for NFS version 2"

assert one.lock(7, 1, 100, 50) == GRANTED and one.lock(7, 1, 120, 10) == GRANTED, "its own is in no owner's way"
assert one.test(8, 0, 149, 1) == DENIED, "another process of the same host"
assert one.rest == words(1, 7) + opaque(b"owner") + struct.pack(">QQ", 100, 50)
assert two.lock(7, 0, 149, 1) == DENIED and two.lock(7, 0, 150, TO_END) == GRANTED
assert one.lock(7, 1, 2**63 - 1, 1) == DENIED and two.unlock(7, 0, TO_END) == GRANTED
assert one.lock(7, 1, 2**64 - 1, 1) == TOO_BIG and one.lock(7, 1, 2**63, TO_END) == TOO_BIG
assert one.lock(7, 1, 2**62, 2**64 - 1) == GRANTED and two.test(7, 0, 2**63 - 1, 1) == DENIED, "beyond the end is to the end"
assert two.rest[-8:] == struct.pack(">Q", 0)
one.unlock(7, 2**62, TO_END)

# Version 4.
def lock4(offset, length):
    v4.run(4, IN_FILE + words(12, 2, 0) + struct.pack(">QQ", offset, length) + words(1, 0) + stateid + words(0) + v4.client + opaque(b"o"))
    return v4.status
assert lock4(0, 101) == 10010 and lock4(0, 100) == 0
assert two.test(7, 1, 99, 1) == DENIED and two.rest == words(1, 0) + opaque(b"o") + struct.pack(">QQ", 0, 100)

# A wait is cancelled; nothing is locked then.
assert two.lock(7, 1, 100, 50, wait=1) == BLOCKED and two.lock(7, 1, 100, 50, wait=1) == BLOCKED
assert two.cancel(7, 1, 100, 50) == GRANTED
assert one.unlock(7, 100, 50) == GRANTED and one.lock(7, 1, 100, 50) == GRANTED
assert one.lock(7, 1, 300, 1, reclaim=1) == GRACE, "there has been no restart"
assert one.unlock(99, 0, TO_END) == GRANTED, "who has nothing"
# A host has a share of the 64 places.
for wait in range(57):
    assert two.lock(wait, 1, 100, 50, wait=1) == BLOCKED
assert two.lock(57, 1, 100, 50, wait=1) == NO_ROOM
three = Host("127.0.0.3")
assert three.lock(7, 1, 100, 50, wait=1) == BLOCKED and three.cancel(7, 1, 100, 50) == GRANTED
for wait in range(57):
    assert two.cancel(wait, 1, 100, 50) == GRANTED
# Cancelling a wait for writing leaves a lock for reading of the same range, also one that was given after a wait and is not acknowledged.
assert one.lock(7, 1, 500, 10) == GRANTED and two.lock(7, 0, 500, 10, wait=1) == BLOCKED and one.unlock(7, 500, 10) == GRANTED
while one.test(8, 1, 500, 10) == GRANTED:
    time.sleep(0.01)
assert three.lock(7, 0, 500, 10) == GRANTED and two.lock(7, 1, 500, 10, wait=1) == BLOCKED and two.cancel(7, 1, 500, 10) == GRANTED
assert three.unlock(7, 500, 10) == GRANTED and one.test(8, 1, 500, 10) == DENIED
assert two.cancel(7, 0, 500, 10) == GRANTED and one.test(8, 1, 500, 10) == GRANTED

# Share modes: version 4 has the file open for reading and writing.
assert one.share(b"a", 1, 0) == DENIED and one.share(b"a", 0, 3) == GRANTED
v4.run(4, LOOK_UP + words(18, 0, 0x401, 2) + v4.client + opaque(b"z") + words(0, 0) + opaque(b"f") + words(10))
assert v4.status == 10015, "denied"
assert one.share(b"a", 0, 0, procedure=21) == GRANTED

# A host that has restarted: by its notice, by the number of its start, by FREE_ALL; another host's notice changes nothing.
two.notify(9)
one.notify(1)
assert two.test(7, 1, 100, 1) == DENIED
one.notify(3)
assert two.lock(7, 1, 100, 50) == GRANTED
assert one.test(7, 1, 100, 1) == DENIED and two.test(7, 1, 100, 1) == GRANTED
again = Host("127.0.0.2", start=3)
assert again.lock(9, 1, 400, 1) == GRANTED and one.lock(7, 1, 100, 50) == GRANTED
assert one.call(100021, 4, 23, opaque(b"host") + words(0)) == words(0, 0, 0, 0)
assert again.lock(9, 1, 100, 50) == GRANTED
# A call that is repeated is not done again.
call = words(77, 0, 2, 100021, 4, 4, 1) + opaque(words(0, 0, 0, 0, 0)) + words(0, 0) + opaque(b"cookie") + opaque(b"host") + again.file + opaque(b"owner") + words(9) + struct.pack(">QQ", 100, 50)
def send():
    again.stream.sendall(words(0x80000000 | len(call)) + call)
    return again.receive_message()
assert send()[24:] == opaque(b"cookie") + words(GRANTED)
assert again.lock(9, 1, 100, 50) == GRANTED
assert send()[24:] == opaque(b"cookie") + words(GRANTED) and one.test(7, 0, 100, 1) == DENIED

# What makes no sense.
one.file = opaque(b"x" * 30)
assert one.lock(7, 1, 0, 1) == STALE and one.unlock(7, 0, 1) == STALE
assert one.call(100021, 4, 2, opaque(b"cookie") + words(0, 2)) == words(0, 0, 0, 4), "garbage"
assert one.call(100021, 4, 99) == words(0, 0, 0, 3) and one.call(100024, 1, 3) == words(0, 0, 0, 3)
assert one.call(100024, 1, 2)[16:20] == words(1), "it monitors no hosts for others"
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{LOCKS}{script}"), &at, ""]);
    daemon.stop();
}

/// The lock manager of a host, `Manager(address)`. It answers a callback when `may_answer` is set, as Linux's does: whether the lock is waited
/// for at that moment.
const MANAGER: &str = r#"
import threading, time
class Manager:
    def __init__(self, address):
        self.may_answer, self.called, self.is_waiting, self.accepted = threading.Event(), threading.Event(), True, 0
        self.lock_manager = self.listen((address, 0))
        self.listen((address, 111))
    def listen(self, at):
        listener = socket.create_server(at)
        threading.Thread(target=self.serve, args=(listener,), daemon=True).start()
        return listener.getsockname()[1]
    def serve(self, listener):
        while True:
            stream, _ = listener.accept()
            connection = Connection.__new__(Connection)
            connection.stream = stream
            call = connection.receive_message()
            xid, program = call[:4], struct.unpack(">I", call[12:16])[0]
            version = struct.unpack(">I", call[16:20])[0]
            if program == 100000:
                found = words(self.lock_manager)
                if version > 2:
                    found = opaque(b"%s.%d.%d" % (stream.getsockname()[0].encode(), self.lock_manager >> 8, self.lock_manager & 255))
                reply = found
            else:
                self.called.set()
                self.may_answer.wait()
                self.accepted += self.is_waiting
                # The cookie has eight bytes.
                at = call.rindex(opaque(b"host")) - 16
                reply = call[at:at + 12] + words(0 if self.is_waiting else 1)
            message = xid + words(1, 0, 0, 0, 0) + reply
            stream.sendall(words(0x80000000 | len(message)) + message)
            stream.close()
"#;

#[test]
fn late_callbacks_of_version_3_match_no_later_wait() {
    let lab = Lab::new();
    let script = r#"
# Every address of this network is the same host's to the cache of replies: calls of different clients must differ.
holder, other, observer = Host("127.0.0.1"), Host("127.0.0.3"), Host("127.0.0.4")
manager = Manager("127.0.0.2")
# The callback is on the way when the client cancels or unlocks.
for at, ends, accepts in [(0, "cancel", False), (100, "cancel", True), (200, "unlock", False)]:
    waiter = Host("127.0.0.2")
    manager.may_answer.clear()
    manager.called.clear()
    manager.is_waiting = True
    assert holder.lock(6, 1, at, 10) == GRANTED and waiter.lock(7, 1, at, 10, wait=1) == BLOCKED
    assert holder.unlock(6, at, 10) == GRANTED
    assert manager.called.wait(60)
    manager.is_waiting = accepts
    answers = []
    if ends == "cancel":
        call = threading.Thread(target=lambda: answers.append(waiter.cancel(7, 1, at, 10)))
    else:
        assert waiter.lock(7, 1, at, 10, wait=1) == GRANTED, "it has asked again"
        call = threading.Thread(target=lambda: answers.append(waiter.unlock(7, at, 10)))
    call.start()
    if ends == "unlock":
        while other.lock(8, 1, at, 10) != GRANTED:
            time.sleep(0.01)
    assert answers == [], "the client could wait again and match the callback with the new wait"
    assert (other.lock(8, 1, at, 10) == GRANTED) == (ends == "unlock")
    manager.may_answer.set()
    call.join()
    assert answers == [GRANTED], answers
    assert other.lock(8, 1, at, 10) == GRANTED, "the lock is free, also if the client has accepted it meanwhile"
    # A new wait ends with a callback of its own.
    manager.is_waiting = True
    before = manager.accepted
    assert waiter.lock(7, 1, at, 10, wait=1) == BLOCKED and other.unlock(8, at, 10) == GRANTED
    while manager.accepted == before:
        time.sleep(0.01)
    assert observer.test(9, 1, at, 10) == DENIED and waiter.unlock(7, at, 10) == GRANTED
"#;
    // A network of its own has a free port 111.
    let shell = r#"
ip link set lo up
"$0" serve --quiet --share m=mem:64M,squash=none --nfs 127.0.0.1:2049 --state "$1" & daemon=$!
trap 'kill $daemon; wait $daemon' EXIT
until (: </dev/tcp/127.0.0.1/2049) 2>/dev/null; do kill -0 $daemon && sleep 0.05; done
python3 -c "$2" 127.0.0.1:2049 ''
"#;
    let script = format!("{CLIENT}{SESSION}{LOCKS}{MANAGER}Session(b'v4') and opened(Session(b'v4b'), b'o')\n{script}");
    let state = lab.path("state");
    ok("unshare", &["--net", "bash", "-ec", shell, THRUWAY, state.to_str().unwrap(), &script]);
}

#[test]
fn rules_and_certificates_are_read_again_while_shares_are_served() {
    let lab = Lab::new();
    let other_lab = Lab::new();
    let (old, other) = (certificates(&lab, &[]), certificates(&other_lab, &[]));
    let (state, config) = (lab.path("state"), lab.path("thruway.toml"));
    let file = |rule: &str| {
        let pki = old.display();
        format!(
            "[nfs]\nnfs = ['127.0.0.1:0']\nnfs-tls-cert = '{pki}/server-cert.pem'\nnfs-tls-key = '{pki}/server-key.pem'\n\
             [[nfs.share]]\nname = 'm'\ndir = 'mem:1M'\nallow = ['{rule}']\n"
        )
    };
    fs::write(&config, file("127.0.0.0/8")).unwrap();
    let said = lab.path("said");
    let args = ["-v", "--config", text(&config), "--state", text(&state)];
    let daemon = Disks::serve_by(Command::new(THRUWAY).stderr(fs::File::create(&said).unwrap()), &args);
    let script = r#"
import os, signal, subprocess, time
pid, config, said = int(sys.argv[3]), sys.argv[4], sys.argv[5]
def until(condition):
    for _ in range(1000):
        if condition(open(said).read()):
            return
        time.sleep(0.01)
    raise AssertionError(open(said).read())
def certificate():
    c = Connection()
    assert c.call(100003, 4, 0, flavor=7) == words(0, 0) + opaque(b"STARTTLS") + words(0)
    context = ssl._create_unverified_context()
    return context.wrap_socket(c.stream).getpeercert(True)
def reload(rule, count):
    text = open(config).read()
    open(config, "w").write(text.replace(text[text.index("allow"):], f"allow = ['{rule}']\n"))
    os.kill(pid, signal.SIGHUP)
    until(lambda log: log.count("share /m =") >= count)
held = Session(b"held")
stateid, _ = opened(held, b"o")
before = certificate()
for name in ["server-cert.pem", "server-key.pem"]:
    os.replace(f"{pki}/{name}", f"{pki}/old-{name}")
    os.replace(f"{pki}/other-{name}", f"{pki}/{name}")
os.kill(pid, signal.SIGUSR1)
until(lambda log: "client of version 4.1 or 4.2 'held' from 127.0.0.1: 1 opens, 0 locks" in log)
reload("127.0.0.9", 1)
assert certificate() != before, "the new one"
# Also a client that has something open is refused from now on, and it is said so.
refused = held.call(100003, 4, 1, opaque(b"") + words(1, 0))
assert refused == words(1, 1, 5), refused
until(lambda log: "refused: no share has a rule for this client" in log)
reload("127.0.0.1", 2)
held.run(4, IN_FILE + words(9, 1, 1 << 4))
assert held.status == 0
# What is wrong changes nothing.
open(config, "a").write("nonsense = 7\n")
os.kill(pid, signal.SIGHUP)
until(lambda log: "'nonsense'" in log)
held.run(4, IN_FILE + words(9, 1, 1 << 4))
assert held.status == 0
"#;
    for name in ["server-cert.pem", "server-key.pem"] {
        fs::rename(other.join(name), old.join(format!("other-{name}"))).unwrap();
    }
    let arguments = [&daemon.at("nfs"), text(&old), &daemon.child.id().to_string(), text(&config), text(&said)];
    ok("/usr/bin/python3", &[&["-c", &format!("{CLIENT}{SESSION}{script}")], &arguments[..]].concat());
    daemon.stop();
}

#[test]
fn who_can_change_nothing_keeps_nobody_out() {
    let lab = Lab::new();
    let state = lab.path("state");
    let share = "m=mem:1M,squash=none,allow=127.0.0.9+ro|127.0.0.0/8";
    let daemon = Disks::serve(&["--quiet", "--share", share, "--nfs", "127.0.0.1:0", "--state", text(&state)]);
    let script = r#"
ROFS = 6
writer = Session(b"writer")
opened(writer, b"a")
reader, owner = Host("127.0.0.9"), Host("127.0.0.1")
assert reader.lock(1, 1, 0, TO_END) == ROFS and reader.lock(1, 1, 0, TO_END, wait=1) == ROFS
assert reader.share(b"r", 3, 1) == ROFS and reader.share(b"r", 0, 2) == ROFS
assert reader.lock(1, 0, 0, TO_END) == GRANTED and reader.share(b"r", 0, 1) == GRANTED
assert owner.lock(2, 0, 0, TO_END) == GRANTED and owner.share(b"o", 0, 3) == GRANTED
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{LOCKS}{script}"), &daemon.at("nfs"), ""]);
    daemon.stop();
}

/// As [`SESSION`]: `delegated(session, name, access)` opens a file and returns the kind of the delegation and its stateid.
const DELEGATIONS: &str = r#"
import time
DELAY, READING, WRITING = 10008, 1, 2
def file(name):
    return LOOK_UP + words(15) + opaque(name)
def opening(session, name, access, how):
    open = words(18, 0, access, 0) + session.client + opaque(b"owner") + how + opaque(name)
    results = session.run(4, LOOK_UP + open + words(10))
    return results[16 + 8:]
def made(session, name):
    stateid = opening(session, name, 0x403, words(1, 0, 0, 0, 0))[:16]
    assert session.status == 0
    session.run(4, file(name) + words(4, 0) + stateid)
    assert session.status == 0
def delegated(session, name, access):
    result = opening(session, name, access, words(0, 0))
    if session.status != 0:
        return None
    kind, = struct.unpack(">I", result[44:48])
    return kind, result[48:64]
def give_back(session, name, stateid):
    session.run(4, file(name) + words(8) + stateid)
    return session.status
def recalled(session):
    call = session.called()
    operations = call[56:]
    assert operations[:20] == words(11) + session.id and operations[40:44] == words(4), operations
    session.answer(call, words(0, 0, 2, 11, 0) + session.id + operations[20:24] + words(0, 0, 0) + words(4, 0))
    return operations[44:60]
def first_opaque(data):
    return data[:4 + (struct.unpack(">I", data[:4])[0] + 3) // 4 * 4]
def attributes(session, name):
    session.run(4, file(name) + words(9, 1, 1 << 4))
    return session.status
one, two, deaf = Session(b"one"), Session(b"two"), Session(b"deaf", back=False)
old = Connection()
"#;

#[test]
fn what_is_delegated_to_a_client_is_had_back_before_others_see_the_file() {
    let lab = Lab::new();
    let state = lab.path("state");
    let daemon = Disks::serve(&[&["--quiet", "--nfs-lease", "5"], &SHARE[..], &["--state", text(&state)]].concat());
    let script = r#"
made(one, b"w")
assert delegated(deaf, b"w", 1)[0] == 0, "it could not be called"
deaf.run(0, b"")
made(one, b"f")
kind, stateid = delegated(one, b"f", 3)
assert kind == WRITING, kind
assert attributes(one, b"f") == 0, "its own"
# Others do not see a size that is old.
assert attributes(two, b"f") == DELAY
assert recalled(one) == stateid
assert attributes(two, b"f") == DELAY
root = old.call(*MOUNT)
handle = first_opaque(root[20:])
found = old.call(100003, 3, 3, handle + opaque(b"f"))
file_handle = first_opaque(found[20:])
assert old.call(100003, 3, 1, file_handle)[16:20] == words(DELAY), "version 3"
assert give_back(two, b"f", stateid) == 10025, "another's"
assert give_back(one, b"f", stateid) == 0
assert attributes(two, b"f") == 0 and old.call(100003, 3, 1, file_handle)[16:20] == words(0)
assert delegated(one, b"f", 3)[0] == 0, "not so soon"

# Several read; who writes, removes or renames waits for all of them.
made(one, b"r")
readers = [(session, *delegated(session, b"r", 1)) for session in (one, two)]
assert all(kind == READING for _, kind, _ in readers)
remove = lambda: old.call(100003, 3, 12, handle + opaque(b"r"))[16:20]
assert remove() == words(DELAY)
for session, _, stateid in readers:
    assert recalled(session) == stateid
    assert remove() == words(DELAY)
    assert give_back(session, b"r", stateid) == 0
assert remove() == words(0)

# Opens that a client has made by itself it makes known when it is asked to give back.
made(one, b"o")
_, stateid = delegated(one, b"o", 1)
claim = lambda session, access: session.run(4, LOOK_UP + words(18, 0, access, 0) + session.client + opaque(b"p") + words(0, 2) + stateid + opaque(b"o") + words(10))
assert delegated(two, b"o", 2) is None and two.status == DELAY
assert recalled(one) == stateid
claim(one, 2)
assert one.status == 10038, "it was for reading"
claim(two, 1)
assert two.status == 10025
claim(one, 1)
assert one.status == 0
assert give_back(one, b"o", stateid) == 0
assert delegated(two, b"o", 2)[0] == 0

# A client that does not give back what it has loses it, and hears of it.
made(one, b"s")
_, stateid = delegated(one, b"s", 1)
while delegated(two, b"s", 2) is None:
    assert two.status == DELAY
    one.run(0, b"")
    time.sleep(0.05)
one.run(0, b"")
assert one.events == words(0x40), one.events
results = one.run(1, words(55, 1) + stateid)
assert results[-4:] == words(10087)
assert give_back(one, b"s", stateid) == 10087
one.run(1, words(45) + stateid)
assert one.status == 0
one.run(0, b"")
assert one.events == words(0)
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{DELEGATIONS}{script}"), &daemon.at("nfs"), ""]);
    daemon.stop();
}

/// Clients of a server that shares a directory of another one get delegations, which the other one's clients have recalled.
#[test]
fn delegations_of_a_share_of_a_share_are_recalled_by_the_first_server() {
    let lab = Lab::new();
    let (first, second) = (lab.path("first"), lab.path("second"));
    let first = Disks::serve(&[&SHARE[..], &["--state", text(&first)]].concat());
    let at = first.at("nfs");
    let share = format!("m=nfs://{at}/m,squash=none");
    let args = ["--quiet", "--nfs", "127.0.0.1:0", "--state", text(&second), "--share", &share];
    let second = Disks::serve(&args);
    let script = r#"
made(one, b"f")
readers = [(session, *delegated(session, b"f", 1)) for session in (one, two)]
assert all(kind == READING for _, kind, _ in readers), readers
port = pki
other = Session(b"other")
# A client of the first server writes.
assert delegated(other, b"f", 2) is None and other.status == DELAY
for session, _, stateid in readers:
    assert recalled(session) == stateid
    assert delegated(other, b"f", 2) is None and other.status == DELAY
    assert give_back(session, b"f", stateid) == 0
while delegated(other, b"f", 2) is None:
    assert other.status == DELAY
    time.sleep(0.02)
"#;
    let (_, port) = at.rsplit_once(':').unwrap();
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{DELEGATIONS}{script}"), &second.at("nfs"), port]);
    second.stop();
    first.stop();
}

#[test]
fn what_is_read_in_memory_is_not_written_by_version_3_before_it_is_given_back() {
    let lab = Lab::new();
    let (state, share) = (lab.path("state"), "m=mem:1M,squash=none,delegations=read");
    let daemon = Disks::serve(&["--quiet", "--share", share, "--nfs", "127.0.0.1:0", "--state", text(&state)]);
    let script = r#"
made(two, b"g")
assert delegated(two, b"g", 3)[0] == 0, "only for reading"
made(one, b"f")
kind, stateid = delegated(one, b"f", 1)
assert kind == READING
handle = first_opaque(old.call(*MOUNT)[20:])
file_handle = first_opaque(old.call(100003, 3, 3, handle + opaque(b"f"))[20:])
write = lambda: old.call(100003, 3, 7, file_handle + words(0, 0, 4, 2) + opaque(b"data"))[16:20]
assert write() == words(DELAY)
assert recalled(one) == stateid and give_back(one, b"f", stateid) == 0
assert write() == words(0)
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{DELEGATIONS}{script}"), &daemon.at("nfs"), ""]);
    daemon.stop();
}

#[test]
fn a_long_copy_is_answered_before_it_is_done() {
    let lab = Lab::new();
    let state = lab.path("state");
    let share = ["--share", "m=mem:512M,squash=none,delegations=none", "--state", text(&state)];
    let daemon = Disks::serve(&[&["--quiet", "--nfs", "127.0.0.1:0"], &share[..]].concat());
    let script = r#"
import time
LONG, UNKNOWN, COMPLETE = 80 << 20, 10025, 10054
Session.minor = 2
one, two, deaf = Session(b"one"), Session(b"two"), Session(b"deaf", back=False)
file = lambda name: LOOK_UP + words(15) + opaque(name)
quad = lambda *q: struct.pack(f">{len(q)}Q", *q)
def opened(session, name):
    open = words(18, 0, 0x403, 0) + session.client + opaque(b"owner") + words(1, 0, 0, 0, 0) + opaque(name)
    results = session.run(4, LOOK_UP + open + words(10))
    assert session.status == 0
    return results[16 + 8:][:16]
def write(session, stateid, name, at, data):
    session.run(4, file(name) + words(38) + stateid + quad(at) + words(0) + opaque(data))
    assert session.status == 0
def read(session, stateid, name, at, count):
    results = session.run(4, file(name) + words(25) + stateid + quad(at) + words(count))
    return results[24 + 16:][:count]
def copy(session, source, target, name, is_synchronous=0, ranges=(0, 0, 0), source_name=b"f"):
    ranges = quad(*ranges) + words(1, is_synchronous, 0)
    results = session.run(8, file(source_name) + words(32) + file(name) + words(60) + source + target + ranges)[56:]
    if session.status != 0:
        return None
    assert results[:8] == words(60, 0)
    if results[8:12] == words(0):
        assert results[-8:] == words(1, 1), "in one piece, and done"
        return struct.unpack(">Q", results[12:20])[0]
    assert results[8:12] == words(1) and results[28:40] == words(0, 0, 0) and results[-8:] == words(1, 0)
    return results[12:28]
def offload(session, stateid, cancel=False):
    results = session.run(4, file(b"g") + words(66 if cancel else 67) + stateid)
    return results[32:] if session.status == 0 else session.status
def ended(session):
    call = session.called()
    operations = call[56:]
    assert operations[:20] == words(11) + session.id and operations[40:44] == words(15), operations
    handle = operations[44:][:4 + (struct.unpack(">I", operations[44:48])[0] + 3) // 4 * 4]
    rest = operations[44 + len(handle):]
    return call, rest[:16], rest[16:]
def take(session, call, status=0):
    session.answer(call, words(status, 0, 2, 11, 0) + session.id + call[76:80] + words(0, 0, 0) + words(15, status))

f, g = opened(one, b"f"), opened(one, b"g")
write(one, f, b"f", 0, b"head")
write(one, f, b"f", LONG - 4, b"tail")
copied = copy(one, f, g, b"g")
call, which, how = ended(one)
assert which == copied and how[:4] == words(0) and how[4:16] == words(0) + quad(LONG) and how[16:20] == words(0), how
assert read(one, g, b"g", 0, 4) == b"head" and read(one, g, b"g", LONG - 4, 4) == b"tail"
# Until it has answered, it can ask.
assert offload(one, copied) == quad(LONG) + words(1, 0)
assert offload(one, copied, cancel=True) == COMPLETE
assert offload(two, copied) == UNKNOWN and offload(two, copied, cancel=True) == UNKNOWN
assert offload(one, f) == UNKNOWN and offload(one, words(0, 0, 0, 0)) == UNKNOWN
take(one, call, 10008)
call, which, how = ended(one)
assert which == copied, "a client that has no time for it is called again"
# So is one that has not looked at it: BADSESSION of CB_SEQUENCE.
one.answer(call, words(10052, 0, 1, 11, 10052))
call, which, how = ended(one)
assert which == copied
take(one, call)
while offload(one, copied) != UNKNOWN:
    time.sleep(0.01)

# Within a file, only apart: what the first piece changes would be copied by the last.
for length in (8 << 20, LONG):
    for ranges in [(0, length // 2, length), (length // 2, length // 4, length), (0, 0, length)]:
        assert copy(one, g, g, b"g", 0, ranges, b"g") is None and one.status == 22, ranges
assert copy(one, g, g, b"g", 1, (0, 4 << 20, 4 << 20), b"g") == 4 << 20
write(one, g, b"g", 4 << 20, bytes(4))

# Before it is answered it is done if the client wants that, cannot be called, or has many that it has not heard of.
assert copy(one, f, g, b"g", 1) == LONG
source, target = opened(deaf, b"f"), opened(deaf, b"g")
assert copy(deaf, source, target, b"g") == LONG
many = [copy(one, f, g, b"g") for _ in range(17)]
assert all(len(stateid) == 16 for stateid in many[:16]) and many[16] == LONG
seen = set()
for _ in range(16):
    call, which, how = ended(one)
    seen.add(which)
    take(one, call)
assert seen == set(many[:16])

# Files that are closed meanwhile are not copied any more; what was copied is said.
copied = copy(one, f, g, b"g")
one.run(4, file(b"f") + words(4, 0) + f)
assert one.status == 0
call, which, how = ended(one)
assert which == copied
if how[:4] == words(0):
    assert how[4:8] == words(0) and 0 < struct.unpack(">Q", how[8:16])[0] <= LONG, how
else:
    assert how[:4] == words(UNKNOWN), how
take(one, call)
# One that is cancelled is not heard of again.
f = opened(one, b"f")
copied = copy(one, f, g, b"g")
cancelled = offload(one, copied, cancel=True)
if cancelled == COMPLETE:
    take(one, ended(one)[0])
else:
    assert cancelled == b"" and offload(one, copied) == UNKNOWN
# Nor is one of a client that has gone.
f, g = opened(two, b"f"), opened(two, b"g")
copy(two, f, g, b"g")
two.stream.close()
assert copy(one, opened(one, b"f"), opened(one, b"g"), b"g", 1) == LONG
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{script}"), &daemon.at("nfs"), ""]);
    daemon.stop();
}

#[test]
fn a_callback_that_a_client_has_no_time_for_comes_again_with_its_number() {
    let (daemon, at, _lab) = share();
    let script = r#"
def lock(session, stateid, owner, kind):
    new = words(1, 0) + stateid + words(0) + session.client + opaque(owner)
    return session.run(4, IN_FILE + words(12, kind, 0, 0, 0, 0, 10) + new)[24 + 8:][:16]
def refuse(session, call, status):
    session.answer(call, words(status, 0, 1, 11, status))
def sequence(call):
    return struct.unpack(">I", call[56 + 20:][:4])[0]

one, two = Session(b"one"), Session(b"two")
(of_one, _), (of_two, _) = opened(one, b"a"), opened(two, b"b")
def wait_and_free():
    held = lock(one, of_one, b"a", 2)
    lock(two, of_two, b"b", 4)
    one.run(4, IN_FILE + words(14, 2, 0) + held + words(0, 0, 0, 10))
    assert one.status == 0
def take(call):
    two.answer(call, words(0, 0, 2, 11, 0) + two.id + call[76:80] + words(0, 0, 0) + words(13, 0))

# An error of CB_SEQUENCE takes no number (RFC 8881, section 20.9.3).
wait_and_free()
for _ in range(3):
    call = two.called()
    assert sequence(call) == 1, sequence(call)
    refuse(two, call, 10008)
call = two.called()
assert sequence(call) == 1
take(call)
# One may be lost with its connection, or its answer: the client is asked whether it has had it.
wait_and_free()
assert sequence(two.called()) == 2
other = Connection()
two.stream, other.stream = other.stream, two.stream
other.stream.close()
import time
while two.events != words(0x200):
    two.run(0, b"")
    time.sleep(0.01)
two.compound(1, words(41) + two.id + words(3, 0))
assert two.status == 0
wait_and_free()
call = two.called()
assert sequence(call) == 3
refuse(two, call, 10063)
call = two.called()
assert sequence(call) == 2, "it has not had that"
take(call)
# Nothing fits.
wait_and_free()
call = two.called()
assert sequence(call) == 3
refuse(two, call, 10063)
two.run(0, b"")
assert two.events == words(0x400), "what it expects cannot be found out"
"#;
    ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{SESSION}{script}"), &at, ""]);
    daemon.stop();
}

#[test]
fn shares_are_for_the_clients_that_their_rules_name() {
    let lab = Lab::new();
    let state = lab.path("state");
    let share = |rules: &str| {
        let share = format!("m=mem:1M,squash=none,allow={rules}");
        Disks::serve(&["--quiet", "--share", &share, "--nfs", "127.0.0.1:0", "--state", text(&state)])
    };
    // A directory is made in it, by version 4.0 and version 3.
    let make = r#"
c = Connection()
MAKE = words(6, 2) + opaque(b"d") + words(0, 0)
OWNER = words(15) + opaque(b"d") + words(9, 2, 0, 1 << (36 - 32))
mounted, = struct.unpack(">I", c.call(*MOUNT)[16:20])
if c.call(100003, 4, 1, opaque(b"") + words(0, 2) + LOOK_UP) == words(1, 1, 5):
    assert c.call(100003, 3, 1, opaque(bytes(29))) == words(1, 1, 5), "nor version 3"
    assert c.call(100005, 3, 5)[16:] == words(0), "it hears of no share"
    print("refused", mounted)
    raise SystemExit
print(c.status(2, LOOK_UP), c.status(3, LOOK_UP + MAKE), mounted, end=" ")
reply = c.call(100003, 4, 1, opaque(b"") + words(0, 4) + LOOK_UP + OWNER)
print(reply[-8:].decode().strip("\0\1") if reply[16:20] == words(0) else "none")
"#;
    for (rules, expected) in [
        ("127.0.0.0/8", "0 0 0 0"),
        ("192.0.2.0/24|127.0.0.1+ro", "0 30 0 none"),
        ("127.0.0.1+ro|127.0.0.0/8", "0 30 0 none"),
        ("127.0.0.2|192.0.2.0/24", "refused 13"),
        ("127.0.0.1+squash=all", "0 0 0 65534"),
    ] {
        let daemon = share(rules);
        let said = ok("/usr/bin/python3", &["-c", &format!("{CLIENT}{make}"), &daemon.at("nfs"), ""]);
        assert_eq!(said.trim(), expected, "{rules}");
    }
    for (rules, says) in [("127.0.0.1/8", "127.0.0.0/8"), ("here", "'here'"), ("cert:x", "--nfs-tls-ca")] {
        let share = format!("m=mem:1M,allow={rules}");
        let refused = run(THRUWAY, &["serve", "--share", &share, "--nfs", "127.0.0.1:0", "--state", text(&state)]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(says), "{said}");
    }
}
