//! State of NFS clients: reclaim after a restart, and quotas per host.

use crate::support;
use crate::support::nfs_python;
use nfs_python::python;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use support::disks::{Disks, ok, text};
use support::{Lab, THRUWAY};

/// Creates a directory that all users may change.
fn shared(lab: &Lab) -> PathBuf {
    let dir = lab.mkdir("shared");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    dir
}

/// Starts a daemon that shares this directory as `d`, with these options and its own lease and state directory.
fn serve_by(command: &mut Command, lab: &Lab, options: &str, lease: &str) -> Disks {
    let (dir, state) = (shared(lab), lab.path("state"));
    let share = format!("d={},squash=none{options}", text(&dir));
    let args = ["--quiet", "--nfs", "127.0.0.1:0", "--nfs-lease", lease, "--state", text(&state), "--share", &share];
    Disks::serve_by(command, &args)
}

fn serve(lab: &Lab, options: &str, lease: &str) -> Disks {
    serve_by(&mut Command::new(THRUWAY), lab, options, lease)
}

/// Kills the daemon, so that clients may reclaim after the next start.
fn kill(daemon: Disks) {
    ok("kill", &["-KILL", &daemon.child.id().to_string()]);
    drop(daemon);
}

#[test]
fn clients_of_version_3_remove_no_name_that_may_still_be_reclaimed() {
    let lab = Lab::new();
    let daemon = serve(&lab, "", "30");
    let script = r#"
client = alice()
client.run(words(58, 0))
print(client.create(client.handle(b"d"), b"f")[2].hex())
"#;
    let handle = python(&daemon.at("nfs"), &format!("{ALICE}{script}"), &[]);
    kill(daemon);
    let log = lab.path("log");
    let mut command = Command::new(THRUWAY);
    command.env("THRUWAY_LOG", "info").stderr(Stdio::from(fs::File::create(&log).unwrap()));
    let daemon = serve_by(&mut command, &lab, "", "30");
    assert!(fs::read_to_string(&log).unwrap().contains("grace period: clients of the last run may reclaim"));
    let script = r#"
JUKEBOX = 10008
old = Connection(at)
root = mount3(at, b"/d")
remove = lambda: old.call(100003, 3, 12, opaque(root) + opaque(b"f")).u32()
rename = lambda: old.call(100003, 3, 14, opaque(root) + opaque(b"f") + opaque(root) + opaque(b"g")).u32()
assert remove() == JUKEBOX and rename() == JUKEBOX
client = alice()
assert client.open(bytes.fromhex(args[0]), b"", access=BOTH, claim=opened)[0] == OK
client.run(words(58, 0))
# All have come back.
assert rename() == OK
"#;
    python(&daemon.at("nfs"), &format!("{ALICE}{script}"), &[handle.trim()]);
    daemon.stop();
}

const ALICE: &str = r#"
alice = lambda: Client(at, b"host of alice", uid=1000, gid=1000, reclaimed=False)
opened = words(1) + words(0)  # CLAIM_PREVIOUS, without a delegation
"#;

#[test]
fn only_who_made_a_client_has_back_what_it_had() {
    let lab = Lab::new();
    let daemon = serve(&lab, "", "30");
    let script = r#"
client = alice()
client.run(words(58, 0))
status, stateid, handle, _ = client.create(client.handle(b"d"), b"ledger", deny=WRITE)
assert status == OK and client.lock(handle, stateid) == OK
assert Client(at, b"host of alice", uid=2000, gid=2000).status == CLID_INUSE
print(handle.hex())
"#;
    let handle = python(&daemon.at("nfs"), &format!("{ALICE}{script}"), &[]);
    kill(daemon);
    let daemon = serve(&lab, "", "30");
    let script = r#"
handle = bytes.fromhex(args[0])
# Neither by the name, nor by one of its own, nor by another version.
assert Client(at, b"host of alice", uid=2000, gid=2000).status == CLID_INUSE
other = Client(at, b"host of bob", uid=2000, gid=2000, reclaimed=False)
assert other.open(handle, b"", access=BOTH, deny=BOTH, claim=opened)[0] == RECLAIM_BAD
client = alice()
status, stateid, _, _ = client.open(handle, b"", access=BOTH, deny=WRITE, claim=opened)
assert status == OK and client.lock(handle, stateid, reclaim=1) == OK
client.run(words(58, 0))
assert client.write(handle, stateid, b"of alice") == OK
"#;
    python(&daemon.at("nfs"), &format!("{ALICE}{script}"), &[handle.trim()]);
    daemon.stop();
}

#[test]
fn a_lost_list_of_clients_gives_nothing_back_and_the_log_says_so() {
    let lab = Lab::new();
    let daemon = serve(&lab, "", "30");
    let script = r#"
client = alice()
client.run(words(58, 0))
print(client.create(client.handle(b"d"), b"f")[2].hex())
"#;
    let handle = python(&daemon.at("nfs"), &format!("{ALICE}{script}"), &[]);
    let list = lab.path("state/nfs-clients");
    kill(daemon);
    for damage in [None, Some("thruway NFS clients 2\nlease 30\n")] {
        match damage {
            None => fs::remove_file(&list).unwrap(),
            Some(text) => fs::write(&list, text).unwrap(),
        }
        let log = lab.path("log");
        let mut command = Command::new(THRUWAY);
        command.stderr(Stdio::from(fs::File::create(&log).unwrap()));
        let daemon = serve_by(&mut command, &lab, "", "30");
        let script = r#"
client = alice()
assert client.open(bytes.fromhex(args[0]), b"", claim=opened)[0] == NO_GRACE
client.run(words(58, 0))
assert client.open(client.handle(b"d"), b"f")[0] == OK, "there is no grace period"
"#;
        python(&daemon.at("nfs"), &format!("{ALICE}{script}"), &[handle.trim()]);
        let said = fs::read_to_string(&log).unwrap();
        assert!(said.contains("nfs-clients: the list of NFS clients is lost"), "{said}");
        daemon.stop();
    }
}

/// A small file system for the state of a daemon.
struct SmallState(PathBuf);

impl SmallState {
    fn new(lab: &Lab, size: &str) -> SmallState {
        let at = lab.mkdir("state");
        ok("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "none", text(&at)]);
        SmallState(at)
    }
}

impl Drop for SmallState {
    fn drop(&mut self) {
        ok("umount", &[text(&self.0)]);
    }
}

#[test]
fn a_full_state_directory_holds_up_only_clients_that_are_not_stored() {
    // The first file system has room for the reserve, the second has not.
    for (size, new_comes_in) in [("1m", true), ("64k", false)] {
        let lab = Lab::new();
        let _state = SmallState::new(&lab, size);
        let daemon = serve(&lab, "", "30");
        let script = r#"
known = Client(at, b"known")
dir = known.handle(b"d")
_, stateid, handle, _ = known.create(dir, b"f")
with open(args[0] + "/fill", "wb", buffering=0) as fill:
    try:
        while True:
            fill.write(bytes(4096))
    except OSError:
        pass
new = Client(at, b"new", reclaimed=False)
comes_in = args[1] == "true"
assert new.run(words(58, 0))[0] == (OK if comes_in else DELAY)
assert new.open(dir, b"f")[0] == (OK if comes_in else DELAY)
assert known.create(dir, b"g")[0] == OK and known.lock(handle, stateid) == OK
os.remove(args[0] + "/fill")
assert new.open(dir, b"f")[0] == OK
"#;
        python(&daemon.at("nfs"), script, &[text(&lab.path("state")), &new_comes_in.to_string()]);
        daemon.stop();
    }
}

#[test]
fn failed_starts_leave_no_state_that_the_next_start_takes_for_a_loss() {
    let lab = Lab::new();
    let (dir, state, log) = (shared(&lab), lab.path("state"), lab.path("log"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (good, taken) = (&*format!("d={}", text(&dir)), taken.local_addr().unwrap().to_string());
    // A share that cannot be opened, and an address in use.
    for (share, at, expected) in [("d=/no/such", "127.0.0.1:0", "No such file"), (good, &*taken, "in use")] {
        let mut failing = Command::new(THRUWAY);
        failing.args(["serve", "--share", share, "--nfs", at, "--state", text(&state)]);
        let out = failing.output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(1) && said.contains(expected), "{said}");
        let mut command = Command::new(THRUWAY);
        command.stderr(fs::File::create(&log).unwrap());
        let args = ["--share", good, "--nfs", "127.0.0.1:0", "--state", text(&state)];
        Disks::serve_by(&mut command, &args).stop();
        let said = fs::read_to_string(&log).unwrap();
        assert!(!said.contains("ERROR"), "{said}");
        fs::remove_dir_all(&state).unwrap();
    }
}

#[test]
fn a_host_that_opens_many_files_keeps_no_other_from_opening_some() {
    let lab = Lab::new();
    let dir = shared(&lab);
    (0..600).for_each(|n| fs::write(dir.join(n.to_string()), "").unwrap());
    // The limit of open NFS files is an eighth of the descriptors: 512.
    let daemon = serve_by(Command::new("prlimit").args(["--nofile=4096", THRUWAY]), &lab, "", "30");
    let script = r#"
many, other = Client(at, b"many", source="127.0.0.3"), Client(at, b"other", source="127.0.0.2")
dir = many.handle(b"d")
opened = 0
while many.open(dir, b"%d" % opened)[0] == OK:
    opened += 1
assert 300 < opened < 512, opened
assert many.open(dir, b"%d" % opened)[0] == NOSPC
assert many.open(dir, b"0", owner=b"another")[0] == OK, "it is open"
# An OPEN that fails leaves no file, so that the application's next try is not told that there is one.
for _ in range(2):
    assert many.create(dir, b"new")[0] == NOSPC
assert not os.path.exists(args[0] + "/new")
assert all(other.open(dir, b"%d" % n)[0] == OK for n in range(500, 520))
assert other.create(dir, b"new", mode=0o444)[0] == OK
"#;
    python(&daemon.at("nfs"), script, &[text(&dir)]);
    daemon.stop();
}

#[test]
fn a_client_that_can_change_nothing_denies_nothing() {
    let lab = Lab::new();
    let daemon = serve(&lab, ",allow=127.0.0.9+ro|127.0.0.0/8", "30");
    let script = r#"
writer, reader = Client(at, b"writer"), Client(at, b"reader", source="127.0.0.9")
dir = writer.handle(b"d")
assert writer.create(dir, b"f", owner=b"first")[0] == OK
for deny in (READ, WRITE, BOTH):
    assert reader.open(dir, b"f", deny=deny)[0] == ROFS
assert reader.open(dir, b"f")[0] == OK
assert writer.open(dir, b"f", access=BOTH)[0] == OK
"#;
    python(&daemon.at("nfs"), script, &[]);
    daemon.stop();
}

#[test]
fn a_client_that_gives_no_delegation_back_gets_no_other_for_some_time() {
    let lab = Lab::new();
    let dir = shared(&lab);
    ["a", "b"].iter().for_each(|name| fs::write(dir.join(name), "").unwrap());
    let daemon = serve(&lab, "", "2");
    let script = r#"
import threading
client = Client(at, b"client", back=True)
dir = client.handle(b"d")
delegated = lambda client, name: client.open(dir, name, want=WANT_READ)[3]
assert delegated(client, b"a")
# A program of the daemon's host waits until the delegation is revoked.
program = threading.Thread(target=lambda: open(args[0] + "/a", "a").close())
program.start()
assert client.callback(), "it is called, and says that it will give it back"
while program.is_alive():
    client.run()
    program.join(0.05)
client.run()
assert client.events & 0x40, "something has been revoked"
assert delegated(client, b"a") is None, "of this file nothing is delegated"
assert delegated(client, b"b") is None, "its host has kept a program waiting for a lease time"
again = Client(at, b"by another name", back=True)
assert delegated(again, b"b") is None
other = Client(at, b"other", back=True, source="127.0.0.2")
assert delegated(other, b"b")
"#;
    python(&daemon.at("nfs"), script, &[text(&dir)]);
    daemon.stop();
}

#[test]
fn under_a_delegation_users_have_their_own_rights() {
    let lab = Lab::new();
    let state = lab.path("state");
    let dir = shared(&lab);
    let secret = dir.join("secret");
    fs::write(&secret, "alice only").unwrap();
    std::os::unix::fs::chown(&secret, Some(1000), Some(1000)).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let (share, memory) = (format!("d={}", text(&dir)), "m=mem:16M,squash=none");
    let args = ["--quiet", "--share", &share, "--share", memory, "--nfs", "127.0.0.1:0", "--state", text(&state)];
    let daemon = Disks::serve(&args);
    let script = r#"
WANT_WRITE = 0x200
alice, mallory = dict(uid=1000, gid=1000), dict(uid=3000, gid=3000)
client = Client(at, b"host", back=True, **alice)
for_all = words(34) + ANONYMOUS + words(2, 0, 2) + opaque(words(0o777))
assert client.run(words(22) + opaque(client.handle(b"m")), for_all, uid=0)[0] == OK
status, made, handle, _ = client.create(client.handle(b"m"), b"secret", mode=0o600)
assert status == OK and client.write(handle, made, b"alice only") == OK and client.close(handle, made) == OK
for share, access, want in ((b"d", READ, WANT_READ), (b"m", BOTH, WANT_WRITE)):
    dir = client.handle(share)
    status, stateid, handle, delegated = client.open(dir, b"secret", access=access, want=want)
    assert status == OK and delegated, share
    assert client.read(handle, delegated) == (OK, b"alice only")
    assert client.read(handle, delegated, **mallory)[0] == ACCESS
    claim = words(2) + delegated + opaque(b"secret")
    assert client.open(dir, b"secret", owner=b"mallory", claim=claim, **mallory)[0] == ACCESS
    assert client.open(dir, b"secret", owner=b"another", claim=claim)[0] == OK
    if want == WANT_WRITE:
        assert client.write(handle, delegated, b"MALLORY", **mallory) == ACCESS
        assert client.write(handle, delegated, b"A") == OK
"#;
    python(&daemon.at("nfs"), script, &[]);
    daemon.stop();
}
