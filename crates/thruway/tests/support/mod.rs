//! A daemon, directories, and a comparison of trees.
#![allow(dead_code)]

pub(crate) mod disks;
pub(crate) mod nbd;
pub(crate) mod nfs_python;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

pub(crate) const THRUWAY: &str = env!("CARGO_BIN_EXE_thruway");

/// A directory of its own for one test.
#[derive(Debug)]
pub(crate) struct Lab {
    pub dir: tempfile::TempDir,
}

impl Lab {
    pub(crate) fn new() -> Lab {
        Lab { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn mkdir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// The program where every user can run it who can look in here.
    pub(crate) fn program_for_all(&self) -> PathBuf {
        let here = self.path("thruway");
        if !here.exists() && fs::hard_link(THRUWAY, &here).is_err() {
            fs::copy(THRUWAY, &here).unwrap();
        }
        here
    }

    /// A daemon that serves `dir` as `e`.
    pub(crate) fn serve(&self, dir: &Path) -> Daemon {
        Daemon::start(&[OsStr::new("--export"), &export("e", dir, "")])
    }

    /// A daemon that serves `dir` as `e` to one key with these rights, and the path of the key.
    pub(crate) fn serve_to_key(&self, rights: &str, dir: &Path) -> (PathBuf, Daemon) {
        let (key, allowed) = (self.path(&format!("key-{rights}")), self.path(&format!("allowed-{rights}")));
        if !key.exists() {
            let made = thruway(self.dir.path()).args(["keygen", "--quiet", "--output"]).arg(&key).status();
            assert!(made.unwrap().success());
        }
        let public = fs::read_to_string(format!("{}.pub", key.display())).unwrap();
        fs::write(&allowed, format!("{rights} {public}")).unwrap();
        let keys = [OsStr::new("--authorized-keys"), allowed.as_os_str(), OsStr::new("--export")];
        let daemon = Daemon::start(&[&keys[..], &[&export("e", dir, "")]].concat());
        (key, daemon)
    }
}

pub(crate) fn export(name: &str, dir: &Path, mode: &str) -> OsString {
    let mut text = OsString::from(format!("{name}="));
    text.push(dir);
    text.push(mode);
    text
}

/// A daemon process, killed when dropped.
pub(crate) struct Daemon {
    pub child: Child,
    pub addr: String,
    pub public_key: String,
}

impl Daemon {
    pub(crate) fn start(args: &[&OsStr]) -> Daemon {
        Daemon::start_at("127.0.0.1:0", args)
    }

    pub(crate) fn start_at(addr: &str, args: &[&OsStr]) -> Daemon {
        Daemon::start_by(Command::new(THRUWAY).args(["serve", "--json", "--listen", addr]).args(args))
    }

    pub(crate) fn start_by(command: &mut Command) -> Daemon {
        let mut child = command.env("THRUWAY_LOG", log_level()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let announced: serde_json::Value = serde_json::from_str(&line).unwrap();
        let addr = announced["listening"][0].as_str().unwrap().to_string();
        Daemon { child, addr, public_key: announced["public_key"].as_str().unwrap().into() }
    }

    pub(crate) fn url(&self, path: &str) -> OsString {
        format!("tw://{}/{path}", self.addr).into()
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Options of strace for a fault in system calls: `inject` is as for `strace --inject`, and begins with the name of the call. The calls
/// and signals go to `log`.
pub(crate) fn strace_options(inject: &str, log: &str) -> Vec<String> {
    let call = inject.split(':').next().unwrap();
    let faults = [format!("trace={call}"), "-e".into(), format!("inject={inject}")];
    ["-f", "-qq", "-o", log, "-e"].map(String::from).into_iter().chain(faults).collect()
}

/// Has strace inject a fault into a running daemon. Returns when all threads are traced.
pub(crate) fn inject_into(daemon: &Daemon, inject: &str, log: &str) -> Child {
    let id = daemon.child.id().to_string();
    let mut tracer = Command::new("strace").args(strace_options(inject, log)).args(["-p", &id]).spawn().unwrap();
    let is_traced = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status"));
        status.is_ok_and(|status| status.contains("TracerPid:\t") && !status.contains("TracerPid:\t0\n"))
    };
    while !fs::read_dir(format!("/proc/{id}/task")).unwrap().all(|task| is_traced(task.unwrap())) {
        assert!(tracer.try_wait().unwrap().is_none(), "strace follows the daemon");
        std::thread::yield_now();
    }
    tracer
}

/// The seeds in `THRUWAY_SEEDS=FIRST..LAST`, or the usual ones.
pub(crate) fn seeds(usual: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let Ok(given) = std::env::var("THRUWAY_SEEDS") else { return usual };
    let (first, last) = given.split_once("..").expect("THRUWAY_SEEDS=FIRST..LAST");
    first.parse().unwrap()..last.parse().unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Some user who is nobody in particular.
pub(crate) const NOBODY: u32 = 65534;

/// A `thruway` command that touches no file of the user's.
pub(crate) fn thruway(home: &Path) -> Command {
    let mut command = Command::new(THRUWAY);
    command.env("XDG_CONFIG_HOME", home).env("THRUWAY_LOG", log_level()).stdin(Stdio::null());
    command
}

/// A `thruway` command with a fake ssh that runs the command for the other host on this host.
pub(crate) fn with_fake_ssh(lab: &Lab) -> Command {
    let fake = lab.path("ssh");
    fs::write(&fake, "#!/bin/sh\n[ \"$1\" = -- ] && shift\nshift\nexec sh -c \"$*\"\n").unwrap();
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = thruway(lab.dir.path());
    command.env("THRUWAY_SSH", &fake).env("THRUWAY_REMOTE", THRUWAY);
    command
}

/// Runs `thruway cp --json` and returns its result, insisting on success.
pub(crate) fn cp<S: AsRef<OsStr>>(lab: &Lab, args: &[S]) -> serde_json::Value {
    let out = try_cp(lab, args);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    parse(&out)
}

pub(crate) fn try_cp<S: AsRef<OsStr>>(lab: &Lab, args: &[S]) -> Output {
    thruway(lab.dir.path()).args(["cp", "--json"]).args(args).output().unwrap()
}

pub(crate) fn parse(out: &Output) -> serde_json::Value {
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| {
        panic!("{e}: {}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
    })
}

pub(crate) fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// How closely two trees must agree.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compare {
    /// Names, types, link targets, bytes.
    Content,
    /// Also modes, owners, times, extended attributes, hard links.
    Everything,
}

/// Describes every entry below `root`.
fn describe(root: &Path, how: Compare) -> BTreeMap<Vec<u8>, String> {
    let mut out = BTreeMap::new();
    let mut names_of: BTreeMap<(u64, u64), Vec<u8>> = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        let mut entries: Vec<PathBuf> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            let meta = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec();
            let kind = meta.file_type();
            let mut text = if kind.is_symlink() {
                format!("link to {:?}", fs::read_link(&path).unwrap())
            } else if kind.is_dir() {
                todo.push(path.clone());
                "directory".into()
            } else if kind.is_file() {
                let content = fs::read(&path).unwrap();
                format!("file of {} bytes, {}", content.len(), blake3::hash(&content))
            } else if kind.is_fifo() {
                "fifo".into()
            } else {
                format!("special {:x}", meta.rdev())
            };
            if how == Compare::Everything {
                text += &format!(
                    " {:o} {}:{} {}.{:09}",
                    meta.mode(),
                    meta.uid(),
                    meta.gid(),
                    meta.mtime(),
                    meta.mtime_nsec()
                );
                if kind.is_file() && meta.nlink() > 1 {
                    let first = names_of.entry((meta.dev(), meta.ino())).or_insert_with(|| name.clone());
                    // Other names may be outside the tree.
                    if *first != name {
                        text += &format!(" same as {first:?}");
                    }
                }
            }
            out.insert(name, text);
        }
    }
    out
}

/// Insists that all that is in one tree is in the other.
pub(crate) fn assert_has_all(a: &Path, b: &Path, how: Compare) {
    let (a, b) = (describe(a, how), describe(b, how));
    for (name, text) in &a {
        assert_eq!(Some(text), b.get(name), "{}", String::from_utf8_lossy(name));
    }
}

/// Insists that two trees agree.
pub(crate) fn assert_same(a: &Path, b: &Path, how: Compare) {
    assert_has_all(a, b, how);
    let (a, b) = (describe(a, how), describe(b, how));
    for name in b.keys() {
        assert!(a.contains_key(name), "{} is too much", String::from_utf8_lossy(name));
    }
}

/// Deterministic bytes.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut out);
    out
}

/// A tree with everything that is awkward to copy.
pub(crate) fn awkward_tree(root: &Path) {
    let write = |name: &[u8], content: &[u8]| {
        let path = root.join(OsStr::from_bytes(name));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    write(b"empty", b"");
    write(b"one", b"1");
    write(b"with space", b"x");
    write(b"new\nline", b"x");
    write(&[b'b', 0xff, 0xfe], b"invalid UTF-8");
    write(b"-rf", b"x");
    write(b"deep/er/and/deeper/file", b"deep");
    write(&[b'n'; 255], b"longest name");
    for (i, len) in
        [1, 4095, 4096, 4097, 262_143, 262_144, 262_145, 1 << 20, (1 << 20) + 1, 5_000_000].iter().enumerate()
    {
        write(format!("sizes/{i}").as_bytes(), &noise(*len, i as u64));
    }
    for i in 0..300 {
        write(format!("many/{i}").as_bytes(), &noise(i * 37 % 9000, i as u64));
    }
    fs::create_dir(root.join("empty dir")).unwrap();
    std::os::unix::fs::symlink("one", root.join("link")).unwrap();
    std::os::unix::fs::symlink("/nowhere/at/all", root.join("dangling")).unwrap();
    std::os::unix::fs::symlink("..", root.join("deep/up")).unwrap();
    fs::hard_link(root.join("one"), root.join("deep/hard")).unwrap();
    fs::hard_link(root.join("sizes/9"), root.join("big hard")).unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"island", 40 << 20).unwrap();
    sparse.set_len(100 << 20).unwrap();
    for (name, mode) in [("one", 0o400), ("empty", 0o6755), ("empty dir", 0o1777), ("deep/er", 0o750)] {
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    assert!(Command::new("mkfifo").arg(root.join("fifo")).status().unwrap().success());
    let set = Command::new("setfattr").args(["-n", "user.note", "-v", "kept"]).arg(root.join("one")).status().unwrap();
    assert!(set.success(), "the file system of the temporary directory has extended attributes");
    for (name, stamp) in [("one", "@1000000000.123456789"), ("deep", "@1234567890.5"), ("link", "@5")] {
        let touch = Command::new("touch").args(["-h", "-d", stamp]).arg(root.join(name)).status().unwrap();
        assert!(touch.success());
    }
}

/// What the programs under test log; set `THRUWAY_TEST_LOG` to see more.
fn log_level() -> String {
    std::env::var("THRUWAY_TEST_LOG").unwrap_or_else(|_| "error".into())
}

/// Files that the write-back caches of a daemon keep their memory in.
pub(crate) fn caches_of(pid: u32) -> Vec<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mapped =
        maps.lines().filter_map(|line| line.find("/dev/shm/thruway-cache-").map(|at| PathBuf::from(&line[at..])));
    mapped.collect::<BTreeSet<_>>().into_iter().collect()
}
