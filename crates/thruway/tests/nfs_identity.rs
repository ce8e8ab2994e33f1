//! Identity of shared files in handles, client state and attributes. The tests mount file systems, which requires root.

use crate::support;
use crate::support::nfs_python;
use nfs_python::python;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use support::Lab;
use support::disks::{Disks, LoopDevice, ok, text};

/// A file system on a loop device, unmounted when dropped.
struct Mounted {
    at: PathBuf,
    _device: LoopDevice,
}

impl Mounted {
    fn new(image: &Path, at: PathBuf) -> Mounted {
        let device = LoopDevice::over(image);
        ok("mount", &[&device.0, text(&at)]);
        fs::set_permissions(&at, fs::Permissions::from_mode(0o777)).unwrap();
        Mounted { at, _device: device }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        ok("umount", &[text(&self.at)]);
    }
}

/// Creates an image with a file system of this type.
fn image(lab: &Lab, name: &str, kind: &str) -> PathBuf {
    let path = lab.path(name);
    fs::File::create(&path).unwrap().set_len(320 << 20).unwrap();
    ok(&format!("mkfs.{kind}"), &["-q", text(&path)]);
    path
}

fn put(path: &Path, content: &str, uid: u32, mode: u32) {
    fs::write(path, content).unwrap();
    chown(path, Some(uid), Some(uid)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn serve(lab: &Lab, shares: &[(&str, &Path)]) -> Disks {
    let state = lab.path("state");
    let shares: Vec<String> = shares.iter().map(|(name, dir)| format!("{name}={}", text(dir))).collect();
    let mut args = vec!["--quiet", "--nfs", "127.0.0.1:0", "--nfs-lease", "20", "--state", text(&state)];
    shares.iter().for_each(|share| args.extend(["--share", share]));
    Disks::serve(&args)
}

#[test]
fn a_stateid_of_a_file_opens_no_file_of_a_copy_of_its_file_system() {
    let lab = Lab::new();
    let first = image(&lab, "first", "ext4");
    put(&Mounted::new(&first, lab.mkdir("a")).at.join("f"), "original", 0, 0o666);
    let second = lab.path("second");
    fs::copy(&first, &second).unwrap();
    let (a, b) = (Mounted::new(&first, lab.mkdir("a")), Mounted::new(&second, lab.mkdir("b")));
    put(&b.at.join("f"), "secret of the copy", 0, 0o600);
    let daemon = serve(&lab, &[("a", &a.at), ("b", &b.at)]);
    let script = r#"
client = Client(at, b"client", uid=3000, gid=3000)
a, b = client.handle(b"a"), client.handle(b"b")
of_b = client.handle(b"b", b"f")
assert client.open(b, b"f")[0] == ACCESS
status, stateid, of_a, _ = client.open(a, b"f", access=BOTH, deny=BOTH)
assert status == OK
assert client.read(of_a, stateid) == (OK, b"original")
assert client.read(of_b, stateid)[0] == BAD_STATEID
assert client.write(of_b, stateid, b"OVERWRITTEN") == BAD_STATEID
assert client.close(of_b, stateid) == BAD_STATEID
# What one file is opened for keeps nobody out of the other.
other = Client(at, b"other", uid=0)
assert other.open(b, b"f", access=BOTH)[0] == ACCESS, "root is nobody"
assert other.open(a, b"f")[0] == SHARE_DENIED
# The file systems have two numbers.
assert client.attributes(a, 8)[1].data != client.attributes(b, 8)[1].data
"#;
    python(&daemon.at("nfs"), script, &[]);
    assert_eq!(fs::read_to_string(b.at.join("f")).unwrap(), "secret of the copy");
    daemon.stop();
}

#[test]
fn handles_are_good_when_a_disk_returns_under_another_device_number() {
    for kind in ["ext4", "xfs", "btrfs"] {
        let lab = Lab::new();
        let (image, dir) = (image(&lab, "image", kind), lab.mkdir("mounted"));
        let mounted = Mounted::new(&image, dir.clone());
        put(&mounted.at.join("f"), "content", 0, 0o644);
        let daemon = serve(&lab, &[("a", &dir)]);
        let script = r#"
client = Client(at, b"client")
print(client.handle(b"a", b"f").hex(), client.attributes(client.handle(b"a"), 8)[1].data.hex())
"#;
        let before = python(&daemon.at("nfs"), script, &[]);
        daemon.stop();
        drop(mounted);
        // Another image takes the loop device of the first one, so the first one gets another device number.
        let other = Lab::new();
        let in_the_way = LoopDevice::over(&self::image(&other, "other", "ext4"));
        let mounted = Mounted::new(&image, dir.clone());
        drop(in_the_way);
        let daemon = serve(&lab, &[("a", &dir)]);
        assert_eq!(python(&daemon.at("nfs"), script, &[]), before, "{kind}");
        let script = r#"assert Client(at, b"other").read(bytes.fromhex(args[0])) == (OK, b"content")"#;
        python(&daemon.at("nfs"), script, &[before.split(' ').next().unwrap()]);
        daemon.stop();
        drop(mounted);
    }
}

#[test]
fn old_handles_lead_nowhere_when_a_share_is_another_directory() {
    let lab = Lab::new();
    let (old, new) = (lab.mkdir("old"), lab.mkdir("new"));
    put(&old.join("secret"), "old secret", 0, 0o644);
    let daemon = serve(&lab, &[("data", &old)]);
    let script = r#"
client = Client(at, b"client")
print(client.handle(b"data").hex(), client.handle(b"data", b"secret").hex())
"#;
    let handles = python(&daemon.at("nfs"), script, &[]);
    daemon.stop();
    let daemon = serve(&lab, &[("data", &new)]);
    let script = r#"
client = Client(at, b"client")
for handle in map(bytes.fromhex, args):
    assert client.attributes(handle, 1)[0] == STALE
    assert Connection(at).call(100003, 3, 1, opaque(handle)).u32() == STALE
"#;
    python(&daemon.at("nfs"), script, &handles.split_whitespace().collect::<Vec<_>>());
    daemon.stop();
    // Once the share has its old directory again, the old handles are valid, also with a second share.
    let daemon = serve(&lab, &[("other", &new), ("data", &old)]);
    let script = r#"assert Client(at, b"client").read(bytes.fromhex(args[1])) == (OK, b"old secret")"#;
    python(&daemon.at("nfs"), script, &handles.split_whitespace().collect::<Vec<_>>());
    daemon.stop();
}

#[test]
fn files_of_two_subvolumes_differ_in_their_file_system() {
    let lab = Lab::new();
    let mounted = Mounted::new(&image(&lab, "image", "btrfs"), lab.mkdir("mounted"));
    let live = mounted.at.join("live");
    ok("btrfs", &["-q", "subvolume", "create", text(&live)]);
    put(&live.join("f"), "version 1", 0, 0o644);
    ok("btrfs", &["-q", "subvolume", "snapshot", text(&live), text(&mounted.at.join("snapshot"))]);
    put(&live.join("f"), "version 2", 0, 0o644);
    let daemon = serve(&lab, &[("all", &mounted.at), ("live", &live)]);
    let script = r#"
FSID, FILEID, MOUNTED_ON = 8, 20, 55
client = Client(at, b"client")
live, snapshot = client.handle(b"all", b"live", b"f"), client.handle(b"all", b"snapshot", b"f")
assert client.read(live) == (OK, b"version 2") and client.read(snapshot) == (OK, b"version 1")
fsid = lambda handle: client.attributes(handle, FSID)[1].data
number = lambda handle: client.attributes(handle, FILEID)[1].u64()
assert number(live) == number(snapshot) and fsid(live) != fsid(snapshot)
assert fsid(client.handle(b"all")) not in (fsid(live), fsid(snapshot))
def attributes3(handle):
    reply = Connection(at).call(100003, 3, 1, opaque(handle))
    assert reply.u32() == OK
    reply.fixed(44)
    return reply.u64(), reply.u64()
assert attributes3(live) != attributes3(snapshot) and attributes3(live)[1] == attributes3(snapshot)[1]
# Their directories have numbers of their own where they are.
mounted_on = [client.attributes(client.handle(b"all", name), MOUNTED_ON)[1].u64() for name in (b"live", b"snapshot")]
assert mounted_on[0] != mounted_on[1]
# A file that is reached by two shares is one.
other = Client(at, b"other")
assert client.open(client.handle(b"all", b"live"), b"f", deny=BOTH)[0] == OK
assert other.open(other.handle(b"live"), b"f")[0] == SHARE_DENIED
assert other.open(other.handle(b"all", b"snapshot"), b"f")[0] == OK
"#;
    python(&daemon.at("nfs"), script, &[]);
    daemon.stop();
}

#[test]
fn a_clone_shares_the_blocks_of_its_source() {
    let lab = Lab::new();
    let mounted = Mounted::new(&image(&lab, "image", "btrfs"), lab.mkdir("mounted"));
    let content = support::noise(4 << 20, 1);
    fs::write(mounted.at.join("source"), &content).unwrap();
    put(&mounted.at.join("target"), "", 0, 0o666);
    put(&mounted.at.join("part"), "", 0, 0o666);
    let daemon = serve(&lab, &[("s", &mounted.at)]);
    let script = r#"
client = Client(at, b"client", minor=2)
share = client.handle(b"s")
source = client.open(share, b"source")
handle = lambda of: words(22) + opaque(of)
def clone(name, source_at=0, target_at=0, length=0):
    target = client.open(share, name, access=BOTH)
    assert (source[0], target[0]) == (OK, OK)
    ranges = long(source_at) + long(target_at) + long(length)
    status, _ = client.run(handle(source[2]), words(32), handle(target[2]), words(71) + source[1] + target[1] + ranges)
    assert client.close(target[2], target[1]) == OK
    return status
assert clone(b"target") == OK
assert clone(b"part", 1 << 20, 4096, 8192) == OK
# Ranges that the file system cannot share (RFC 7862, 15.13.3).
INVAL = 22
assert clone(b"target", 1, 0, 4096) == INVAL
assert clone(b"target", 0, 1, 4096) == INVAL
assert clone(b"target", 0, 0, 100) == INVAL
"#;
    python(&daemon.at("nfs"), script, &[]);
    assert!(fs::read(mounted.at.join("target")).unwrap() == content);
    let part = fs::read(mounted.at.join("part")).unwrap();
    assert!(part.len() == 12288 && part[..4096] == [0; 4096] && part[4096..] == content[1 << 20..][..8192]);
    // Each extent of the target is one of the source.
    let extents = |name: &str| {
        let said = ok("filefrag", &["-v", text(&mounted.at.join(name))]);
        let rows = said.lines().filter_map(|line| line.split_once(": ")?.1.split_once(": "));
        rows.map(|(_, physical)| physical.split(':').next().unwrap().trim().to_string()).collect::<Vec<_>>()
    };
    assert!(!extents("source").is_empty());
    assert_eq!(extents("target"), extents("source"));
    daemon.stop();
}
