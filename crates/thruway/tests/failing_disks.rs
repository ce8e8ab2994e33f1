//! Copies to and from a disk that fails as disks do, and disks exported from one: `thruway` itself on a file system whose every
//! request can fail, be done in part, or never be answered, and which loses its power.
//!
//! `THRUWAY_SEEDS=FIRST..LAST` runs others than the few that are run always.

mod support;

use fastrand::Rng;
use std::ffi::OsString;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;
use support::*;
use thruway_faultfs::{Disk, Errno, Fault, Mount, Op};

fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(given) = std::env::var("THRUWAY_SEEDS") else { return usual };
    let (first, last) = given.split_once("..").expect("THRUWAY_SEEDS=FIRST..LAST");
    first.parse().unwrap()..last.parse().unwrap()
}

/// A tree of files of all lengths, with names of all kinds.
fn some_tree(root: &Path, random: &mut Rng) {
    fs::create_dir(root).unwrap();
    let mut dirs = vec![root.to_path_buf()];
    for n in 0..random.usize(1..5) {
        let dir = dirs[random.usize(..dirs.len())].join(format!("dir{n}"));
        fs::create_dir(&dir).unwrap();
        dirs.push(dir);
    }
    for n in 0..random.usize(1..15) {
        let len = match random.u8(..6) {
            0 => 0,
            1 => random.usize(..10),
            2 => random.usize(1 << 20..4 << 20),
            _ => random.usize(..300_000),
        };
        let path = dirs[random.usize(..dirs.len())].join(format!("file{n}"));
        let mut content = noise(len, random.u64(..));
        if random.bool() {
            // A hole.
            let (from, to) = (random.usize(..=len), random.usize(..=len));
            content[from.min(to)..from.max(to)].fill(0);
        }
        fs::write(&path, content).unwrap();
        if random.u8(..4) == 0 {
            fs::hard_link(&path, root.join(format!("also{n}"))).unwrap();
        }
    }
    std::os::unix::fs::symlink("file0", root.join("link")).unwrap();
}

/// Everything that has its final name is as the source has it.
fn nothing_is_wrong(source: &Path, target: &Path, seed: u64) {
    let mut todo = vec![PathBuf::new()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(target.join(&dir)).unwrap().map(Result::unwrap) {
            let (name, kind) = (entry.file_name(), entry.file_type().unwrap());
            let path = dir.join(&name);
            if name.to_string_lossy().contains(".tw-") || name.to_string_lossy().starts_with(".thruway-") {
                continue;
            }
            assert!(
                source.join(&path).symlink_metadata().is_ok(),
                "seed {seed}: {} is not the source's",
                path.display()
            );
            if kind.is_dir() {
                todo.push(path);
            } else if kind.is_file() {
                let (right, found) = (fs::read(source.join(&path)).unwrap(), fs::read(target.join(&path)).unwrap());
                let first = right.iter().zip(&found).position(|(a, b)| a != b);
                let lens = (right.len(), found.len());
                assert!(right == found, "seed {seed}: {} is wrong at {first:?}, lengths {lens:?}", path.display());
            }
        }
    }
}

/// What happens to one attempt.
fn trouble(disk: &Disk, random: &mut Rng) -> Option<u64> {
    use Op::*;
    let ops = [
        Create,
        MakeDir,
        Symlink,
        Link,
        Unlink,
        Rename,
        Open,
        OpenDir,
        List,
        Read,
        Write,
        Sync,
        SyncDir,
        Seek,
        Allocate,
        Stat,
        SetAttributes,
        SetAttribute,
        GetAttribute,
        Lookup,
        StatFs,
        Close,
    ];
    let mut stops = None;
    for _ in 0..random.usize(1..3) {
        match random.u8(..8) {
            0 => disk.lose_writeback_after(random.u64(..200)),
            1 => disk.limit(Some(random.u64(..3_000_000))),
            2 | 3 => stops = Some(random.u64(..300)),
            _ => {
                let fault = Fault {
                    op: ops[random.usize(..ops.len())],
                    of: String::new(),
                    skip: if random.bool() { 0 } else { random.u64(..40) },
                    times: random.u64(1..4),
                    error: [Errno::IO, Errno::NOSPC, Errno::DQUOT, Errno::ACCESS][random.usize(..4)],
                    done_all_the_same: random.u8(..4) == 0,
                };
                disk.remark(format!("--- {fault:?}"));
                disk.fail(fault);
            }
        }
    }
    stops
}

/// A copy between a source that is well and a destination on a disk, as two processes.
#[derive(Debug)]
struct Copy<'a> {
    lab: &'a Lab,
    pull: bool,
    options: Vec<&'static str>,
}

impl Copy<'_> {
    fn daemon(&self, target: &Path) -> Daemon {
        let served = if self.pull { self.lab.path("from") } else { target.to_path_buf() };
        self.lab.serve(&served)
    }

    fn start(&self, daemon: &Daemon, target: &Path) -> Child {
        let (from, to): (OsString, OsString) = if self.pull {
            (daemon.url("e/tree/"), target.join("tree").into())
        } else {
            (self.lab.path("from/tree/").into(), daemon.url("e/tree"))
        };
        thruway(self.lab.dir.path())
            .args(["cp", "--json", "-r", "--retries", "1"])
            .args(&self.options)
            .args([from, to])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

/// Tells what the disk was asked for when a test fails.
struct Witness(Disk);

impl Drop for Witness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let path = std::env::temp_dir().join("failing_disks.history");
            fs::write(&path, self.0.history().join("\n")).unwrap();
            eprintln!("what the disk was asked for is in {}", path.display());
        }
    }
}

/// Kills what writes to the disk, at once.
fn kill(daemon: &mut Daemon, copy: &mut Child) {
    let _ = daemon.child.kill();
    let _ = copy.kill();
}

fn copies_to_a_failing_disk(seed: u64) {
    let random = &mut Rng::with_seed(seed);
    let lab = Lab::new();
    lab.mkdir("from");
    some_tree(&lab.path("from/tree"), random);
    let options =
        [&["-p"][..], &["--verify", "blake3"], &["--streams", "2"], &["--provider", "tcp"], &["--direct", "on"]];
    let options = options.into_iter().filter(|_| random.u8(..3) == 0).flatten().copied().collect();
    let copy = Copy { lab: &lab, pull: random.bool(), options };
    let at = lab.mkdir("disk");
    let disk = Disk::new(seed);
    let _witness = Witness(disk.clone());
    disk.be_plain(random.u8(..4) == 0);
    disk.be_short(random.u8(..3) == 0);
    disk.set_tick(Duration::from_secs([0, 0, 2, 1 << 30][random.usize(..4)]));
    let mut mount: Option<Mount> = Some(disk.mount(&at).unwrap());
    let target = at.join("tree");
    for attempt in 0.. {
        // The last ones have no trouble.
        let last = attempt >= 4;
        disk.remark(format!("--- attempt {attempt}: {copy:?}"));
        let mut daemon = copy.daemon(&at);
        if let Some(requests) = (!last).then(|| trouble(&disk, random)).flatten() {
            disk.stop_after(requests);
        }
        let mut child = copy.start(&daemon, &at);
        let stopped = disk.wait_stopped(|| child.try_wait().unwrap().is_none());
        if stopped {
            kill(&mut daemon, &mut child);
            if random.bool() { disk.go() } else { disk.go_on() }
        }
        let output = child.wait_with_output().unwrap();
        daemon.kill();
        drop(daemon);
        let done = output.status.success();
        let says = format!("seed {seed}, attempt {attempt}: {}", stderr(&output));
        disk.remark(format!("--- {says}"));
        disk.heal();
        if random.u8(..3) == 0 {
            disk.tell_somebody_else();
        }
        let cut = stopped || done || random.bool();
        if done {
            nothing_is_wrong(&lab.path("from/tree"), &target, seed);
        }
        if cut {
            drop(mount.take());
            disk.lose_power();
            mount = Some(disk.mount(&at).unwrap());
        }
        if target.exists() {
            nothing_is_wrong(&lab.path("from/tree"), &target, seed);
        }
        if done {
            assert!(target.exists(), "{says}");
            assert_has_all(&lab.path("from/tree"), &target, Compare::Content);
        }
        if last {
            assert!(done, "{says}");
            break;
        }
    }
    drop(mount);
}

#[test]
fn what_a_copy_says_it_has_written_is_there() {
    seeds(0..25).for_each(copies_to_a_failing_disk);
}
