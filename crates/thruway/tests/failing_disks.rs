//! Copies to and from a disk that fails as disks do, and disks exported from one: `thruway` itself on a file system whose every
//! request can fail, be done in part, or never be answered, and which loses its power.
//!
//! `THRUWAY_SEEDS=FIRST..LAST` runs others than the few that are run always.

use crate::support;
use fastrand::Rng;
use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::disks::{Disks, run};
use support::nbd::{FLUSH, FUA, Nbd, READ, WRITE, ZEROES};
use support::*;
use thruway_faultfs::{Disk, Errno, Fault, Mount, Op};

/// A tree of files of all lengths, with names of all kinds.
fn some_tree(root: &Path, random: &mut Rng, with_link: bool) {
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
    // What FUSE keeps of its attributes cannot be asked for.
    if with_link {
        std::os::unix::fs::symlink("file0", root.join("link")).unwrap();
    }
}

/// What is there before the copy, durable: other content under some of its names.
fn older_tree(source: &Path, target: &Path, random: &mut Rng, modes: &[u32]) {
    fs::create_dir(target).unwrap();
    for entry in fs::read_dir(source).unwrap().map(Result::unwrap) {
        let path = target.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            older_tree(&entry.path(), &path, random, modes);
        } else if random.bool() {
            let file = fs::File::create(&path).unwrap();
            (&file).write_all(OLDER).unwrap();
            file.set_permissions(fs::Permissions::from_mode(modes[random.usize(..modes.len())])).unwrap();
        }
    }
}

const OLDER: &[u8] = b"what was there before";

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
                // Where the source has a link that leads nowhere there is only what was there before.
                let right = fs::read(source.join(&path)).unwrap_or_default();
                let found = fs::read(target.join(&path)).unwrap();
                let first = right.iter().zip(&found).position(|(a, b)| a != b);
                let lens = (right.len(), found.len());
                assert!(
                    right == found || found == OLDER,
                    "seed {seed}: {} is wrong at {first:?}, lengths {lens:?}",
                    path.display()
                );
            }
        }
    }
}

/// Names below a directory that only unfinished copies have.
fn leftovers(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains(".tw-") || name.starts_with(".thruway-") {
            found.push(entry.path());
        } else if entry.file_type().unwrap().is_dir() {
            found.extend(leftovers(&entry.path()));
        }
    }
    found
}

/// Everything below a directory is as durable as it gets.
fn sync_all(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => sync_all(&entry.path()),
            kind if kind.is_file() => fs::File::open(entry.path()).unwrap().sync_all().unwrap(),
            _ => {}
        }
    }
    fs::File::open(dir).unwrap().sync_all().unwrap();
}

/// What happens to one attempt.
fn trouble(disk: &Disk, random: &mut Rng) -> Option<u64> {
    let mut stops = None;
    for _ in 0..random.usize(1..3) {
        match random.u8(..8) {
            0 => disk.lose_writeback_after(random.u64(..200)),
            1 => disk.limit(Some(random.u64(..3_000_000))),
            2 | 3 => stops = Some(random.u64(..300)),
            _ => {
                let fault = Fault {
                    op: Op::ALL[random.usize(..Op::ALL.len())],
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
    program: PathBuf,
    /// Both processes run as this user instead of the one who runs the tests.
    user: Option<u32>,
    /// Where the daemon listened first: only from there to there the job is the same. Nobody calls from this address.
    addr: OnceCell<String>,
}

impl Copy<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        command
    }

    /// What is there belongs to who copies.
    fn own(&self, path: &Path) {
        if let Some(user) = self.user {
            let done = run("chown", &["-hR", &format!("{user}:{user}"), path.to_str().unwrap()]);
            assert!(done.status.success(), "{done:?}");
        }
    }

    fn daemon(&self, target: &Path) -> Daemon {
        let served = if self.pull { self.lab.path("from") } else { target.to_path_buf() };
        let addr = self.addr.get().map_or("127.0.0.2:0", String::as_str);
        let mut command = self.command();
        command.args(["serve", "--json", "--listen", addr, "--export"]).arg(export("e", &served, ""));
        let daemon = Daemon::start_by(&mut command);
        let _ = self.addr.set(daemon.addr.clone());
        daemon
    }

    fn start(&self, daemon: &Daemon, target: &Path) -> Child {
        let (from, to): (OsString, OsString) = if self.pull {
            (daemon.url("e/tree/"), target.join("tree").into())
        } else {
            (self.lab.path("from/tree/").into(), daemon.url("e/tree"))
        };
        self.command()
            .env("XDG_CONFIG_HOME", self.lab.dir.path())
            .stdin(Stdio::null())
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
struct Witness(Disk, String);

impl Drop for Witness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let path = std::env::temp_dir().join(format!("{}.history", self.1));
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
    let options =
        [&["-p"][..], &["--verify", "blake3"], &["--streams", "2"], &["--provider", "tcp"], &["--direct", "on"]];
    let options = options.into_iter().filter(|_| random.u8(..3) == 0).flatten().copied().collect();
    let user = (random.bool() && fs::metadata("/proc/self").unwrap().uid() == 0).then_some(NOBODY);
    let (pull, program) = (random.bool(), THRUWAY.into());
    let mut copy = Copy { lab: &lab, pull, options, program, user, addr: OnceCell::new() };
    let preserve = copy.options.contains(&"-p");
    some_tree(&lab.path("from/tree"), random, !preserve);
    let at = lab.mkdir("disk");
    let disk = Disk::new(seed);
    let _witness = Witness(disk.clone(), format!("copy-{seed}"));
    disk.be_plain(random.u8(..4) == 0);
    disk.be_short(random.u8(..3) == 0);
    disk.set_tick(Duration::from_secs([0, 0, 2, 1 << 30][random.usize(..4)]));
    let mut mount: Option<Mount> = Some(disk.mount(&at).unwrap());
    let target = at.join("tree");
    if random.bool() {
        // Who may not read a file may replace it.
        let modes = if user.is_some() { &[0o644, 0o400, 0, 0o4755][..] } else { &[0o644] };
        older_tree(&lab.path("from/tree"), &target, random, modes);
    }
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    copy.own(lab.dir.path());
    if copy.user.is_some() {
        copy.program = lab.program_for_all();
    }
    sync_all(&at);
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
            if random.bool() { disk.fail_all() } else { disk.go_on() }
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
            let how = if preserve { Compare::Everything } else { Compare::Content };
            assert_has_all(&lab.path("from/tree"), &target, how);
        }
        if last {
            assert!(done, "{says}");
            // A daemon that is killed when the copy is done may not have removed its journal.
            let left =
                leftovers(&at).into_iter().find(|name| copy.pull || name.extension() != Some("journal".as_ref()));
            assert_eq!(left, None, "{says}");
            break;
        }
    }
    drop(mount);
}

#[test]
fn what_a_copy_says_it_has_written_is_there() {
    seeds(0..25).for_each(copies_to_a_failing_disk);
}

const SECTOR: usize = 4096;
const SECTORS: u64 = 192;

fn sector(number: u64, version: u64) -> Vec<u8> {
    let mark = if version == 0 { 0 } else { version << 16 | number };
    mark.to_le_bytes().repeat(SECTOR / 8)
}

/// A sector of which some is of one version and some of another.
const TORN: u64 = u64::MAX;

/// The versions of the sectors in some bytes.
fn versions(bytes: &[u8], first: u64) -> Vec<u64> {
    let version = |(number, sector): (u64, &[u8])| {
        let mark = u64::from_le_bytes(sector[..8].try_into().unwrap());
        if sector.chunks(8).any(|word| word != mark.to_le_bytes()) {
            return TORN;
        }
        assert!(mark == 0 || mark & 0xffff == number, "sector {number} holds another's bytes: {mark:x}");
        mark >> 16
    };
    (first..).zip(bytes.chunks(SECTOR)).map(version).collect()
}

/// What a client knows of a sector.
#[derive(Clone, Default, Debug)]
struct Known {
    /// Versions that may be on the medium.
    possible: BTreeSet<u64>,
    /// The version that reads show; `None` if that is not known.
    shown: Option<u64>,
}

/// A client that uses its part of a disk until it has done enough or its connection ends.
struct Client {
    part: Range<u64>,
    /// By sector of its part.
    known: Vec<Known>,
    last: u64,
    random: Rng,
    /// Storage that fails shows what it likes.
    trusts_reads: bool,
}

impl Client {
    fn new(part: Range<u64>, random: &mut Rng) -> Client {
        let known = vec![Known { possible: [0].into(), shown: Some(0) }; (part.end - part.start) as usize];
        Client { part, known, last: 0, random: random.fork(), trusts_reads: true }
    }

    fn some(&mut self) -> Range<u64> {
        let first = self.random.u64(self.part.clone());
        let longest = if self.random.u8(..4) == 0 { SECTORS } else { 4 };
        first..self.part.end.min(first + self.random.u64(1..=longest))
    }

    fn of(&mut self, sectors: &Range<u64>) -> &mut [Known] {
        let first = self.part.start;
        &mut self.known[(sectors.start - first) as usize..(sectors.end - first) as usize]
    }

    fn use_for_a_while(&mut self, address: &str) {
        let Ok(mut nbd) = Nbd::connect(address, "d") else { return };
        for _ in 0..self.random.u64(5..120) {
            if self.step(&mut nbd).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, nbd: &mut Nbd) -> io::Result<()> {
        let sectors = self.some();
        let (at, len) = (sectors.start * SECTOR as u64, (sectors.end - sectors.start) as u32 * SECTOR as u32);
        match self.random.u8(..10) {
            0 => {
                let flushed = nbd.ask((0, FLUSH), 0, 0, &[])?.is_some();
                for known in self.known.iter_mut().filter(|known| known.possible.len() > 1) {
                    match known.shown {
                        Some(shown) if flushed => known.possible = [shown].into(),
                        // No later flush speaks of what this one could not.
                        _ => known.shown = None,
                    }
                }
            }
            1 | 2 => {
                let Some(found) = nbd.ask((0, READ), at, len, &[])? else { return Ok(()) };
                for (number, found) in sectors.clone().zip(versions(&found, sectors.start)) {
                    let known = &self.known[(number - self.part.start) as usize];
                    let right = known.shown.map_or(known.possible.contains(&found), |shown| shown == found);
                    assert!(right || !self.trusts_reads, "sector {number} shows {found}, not {known:?}");
                }
            }
            what => {
                self.last += 1;
                let (version, zeroes) = if what == 3 { (0, true) } else { (self.last, false) };
                let durable = self.random.u8(..6) == 0;
                for known in self.of(&sectors) {
                    known.shown = None;
                    // A disk that writes in part keeps a part, until all is flushed.
                    known.possible.extend([version, TORN]);
                }
                let data: Vec<u8> = sectors.clone().flat_map(|number| sector(number, version)).collect();
                let command = (if durable { FUA } else { 0 }, if zeroes { ZEROES } else { WRITE });
                if nbd.ask(command, at, len, if zeroes { &[] } else { &data })?.is_some() {
                    for known in self.of(&sectors) {
                        known.shown = Some(version);
                        if durable {
                            known.possible = [version].into();
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Of storage that loses what it was to write out, and was not asked since, nothing is known but what is possible.
    fn something_may_be_lost(&mut self) {
        if !self.trusts_reads {
            self.known.iter_mut().for_each(|known| known.shown = None);
        }
    }

    /// What is shown is on the medium.
    fn all_is_durable(&mut self) {
        for known in &mut self.known {
            known.possible = known.shown.map_or_else(|| known.possible.clone(), |shown| [shown].into());
        }
    }

    /// The power has been lost: this is what is there.
    fn judge(&mut self, bytes: &[u8]) {
        let all = (0..).zip(versions(bytes, 0));
        for (number, found) in all.filter(|(number, _)| self.part.contains(number)).collect::<Vec<_>>() {
            let known = &mut self.known[(number - self.part.start) as usize];
            assert!(known.possible.contains(&found), "sector {number} is {found} on the medium, not {known:?}");
            *known = Known { possible: [found].into(), shown: Some(found) };
        }
    }
}

fn a_disk_on_a_failing_disk(seed: u64) {
    let random = &mut Rng::with_seed(seed);
    let lab = Lab::new();
    let at = lab.mkdir("disk");
    let (disk, image) = (Disk::new(seed), at.join("disk.img"));
    let _witness = Witness(disk.clone(), format!("block-{seed}"));
    disk.be_plain(random.u8(..4) == 0);
    disk.be_short(random.u8(..3) == 0);
    let mut mount = Some(disk.mount(&at).unwrap());
    let file = fs::File::create(&image).unwrap();
    file.set_len(SECTORS * SECTOR as u64).unwrap();
    file.sync_all().unwrap();
    drop(file);
    fs::File::open(&at).unwrap().sync_all().unwrap();
    let options = ["", ",mode=cached", ",mode=direct", ",cache=256K:4K", ",cache=512K:writeback:4K", ",chunk=16K"];
    let block = format!("d={}{}", image.display(), options[random.usize(..options.len())]);
    // Parts that begin and end within what is cached or written as one.
    let border = random.u64(1..SECTORS);
    let clients = &mut [0..border, border..SECTORS].map(|part| Client::new(part, random));
    for life in 0..random.u64(2..6) {
        disk.remark(format!("--- seed {seed}, life {life}: {block}"));
        let mut daemon = Disks::serve(&["--block", &block, "--nbd", "127.0.0.1:0", "--reactors", "2"]);
        let stops = (random.u8(..4) > 0).then(|| trouble(&disk, random)).flatten();
        clients.iter_mut().for_each(|client| client.trusts_reads = !disk.is_to_lose());
        if let Some(requests) = stops {
            disk.stop_after(requests);
        }
        let address = daemon.at("nbd");
        let stopped = std::thread::scope(|scope| {
            let users: Vec<_> =
                clients.iter_mut().map(|client| scope.spawn(|| client.use_for_a_while(&address))).collect();
            let stopped = disk.wait_stopped(|| users.iter().any(|user| !user.is_finished()));
            let caches = caches_of(daemon.child.id());
            let how = random.u8(..4);
            if stopped || how > 0 {
                let _ = daemon.child.kill();
                if stopped && random.bool() {
                    disk.fail_all()
                } else {
                    disk.heal()
                }
                let _ = daemon.child.wait();
            }
            users.into_iter().for_each(|user| user.join().unwrap());
            (stopped || how > 1).then_some(caches)
        });
        disk.heal();
        match stopped {
            Some(caches) => caches.iter().for_each(|file| drop(fs::remove_file(file))),
            None => {
                // Whether it was killed or is told to stop, what was acknowledged is there, and if it stops well, on the medium.
                let _ = run("kill", &["-TERM", &daemon.child.id().to_string()]);
                let stopped_well = daemon.child.wait().unwrap().success();
                disk.remark(format!("--- stopped well: {stopped_well}"));
                if !stopped_well {
                    clients.iter_mut().for_each(Client::something_may_be_lost);
                    continue;
                }
                clients.iter_mut().for_each(Client::all_is_durable);
            }
        }
        drop((daemon, mount.take()));
        disk.lose_power();
        mount = Some(disk.mount(&at).unwrap());
        let bytes = fs::read(&image).unwrap();
        clients.iter_mut().for_each(|client| client.judge(&bytes));
    }
    drop(mount);
}

#[test]
fn what_a_disk_has_flushed_is_there() {
    seeds(0..25).for_each(a_disk_on_a_failing_disk);
}

/// A file system's server that does not answer holds up who asked it, and nobody else on the same core, whatever else waits there
/// for a server.
#[test]
fn storage_that_does_not_answer_holds_up_no_other_disk() {
    let lab = Lab::new();
    let storage = ["sick", "well"].map(|name| {
        let (at, disk) = (lab.mkdir(name), Disk::new(1));
        let mount = disk.mount(&at).unwrap();
        fs::File::create(at.join("disk.img")).unwrap().set_len(SECTORS * SECTOR as u64).unwrap();
        (disk, mount)
    });
    let block = |name: &str| format!("{name}={}", lab.path(name).join("disk.img").display());
    let disks = ["--block", &block("sick"), "--block", &block("well"), "--block", "memory=mem:1M"];
    let mut daemon = Disks::serve(&[&disks[..], &["--nbd", "127.0.0.1:0", "--reactors", "1"]].concat());
    let address = daemon.at("nbd");
    let sick = &storage[0].0;
    sick.stop_after(0);
    std::thread::scope(|scope| {
        let ask = |command, data: &'static [u8]| Nbd::connect(&address, "sick")?.ask((0, command), 0, 1, data);
        let asks: Vec<_> =
            (0..150).map(|n| scope.spawn(move || if n % 2 == 0 { ask(READ, &[]) } else { ask(WRITE, &[0]) })).collect();
        let asker = scope.spawn(|| run("nbdinfo", &["--map", &format!("nbd://{address}/sick")]));
        assert!(sick.wait_stopped(|| true));
        for version in 1..20 {
            for disk in ["memory", "well"] {
                let mut other = Nbd::connect(&address, disk).unwrap();
                other.ask((0, WRITE), 0, 512, &[version; 512]).unwrap().unwrap();
                assert_eq!(other.ask((0, READ), 0, 512, &[]).unwrap().unwrap(), [version; 512]);
            }
        }
        sick.heal();
        asks.into_iter().for_each(|ask| drop(ask.join().unwrap().unwrap().unwrap()));
        assert!(asker.join().unwrap().status.success());
    });
    let _ = daemon.child.kill();
    let _ = daemon.child.wait();
}

/// A file system that has nothing for the moment, again and again: the copy fails, and does not ask for ever.
/// Any error of a directory's sync, also one that opening it could have had.
#[test]
fn a_directory_that_cannot_be_synced_is_told() {
    for error in [Errno::ACCESS, Errno::NOENT, Errno::IO] {
        let lab = Lab::new();
        fs::write(lab.mkdir("from/below").join("file"), "new").unwrap();
        let (at, disk) = (lab.mkdir("disk"), Disk::new(1));
        disk.be_plain(true);
        let mount = disk.mount(&at).unwrap();
        // It is there already: nothing but the name in it is to be made durable.
        fs::create_dir_all(at.join("to/below")).unwrap();
        sync_all(&at);
        // The first is for its attributes.
        disk.fail(Fault { error, of: "below".into(), skip: 1, ..Fault::always(Op::SyncDir) });
        let mut copy = thruway(lab.dir.path());
        let out = copy.args(["cp", "-r", "--retries", "0"]).args([&lab.path("from"), &at.join("to")]).output().unwrap();
        assert!(!out.status.success(), "{error}: {}", stderr(&out));
        drop(mount);
    }
}

#[test]
fn storage_that_would_block_fails_a_copy() {
    for op in [Op::Write, Op::Read] {
        let lab = Lab::new();
        let (at, plain) = (lab.mkdir("sick"), lab.mkdir("well"));
        let disk = Disk::new(1);
        let mount = disk.mount(&at).unwrap();
        let data = noise(2 << 20, 3);
        fs::write(at.join("in"), &data).unwrap();
        fs::write(plain.join("in"), &data).unwrap();
        // What it has in memory is gone.
        drop(mount);
        let mount = disk.mount(&at).unwrap();
        let (from, to, of) = match op {
            Op::Write => (plain.join("in"), at.join("out"), "out"),
            _ => (at.join("in"), plain.join("out"), "in"),
        };
        disk.fail(Fault { error: Errno::AGAIN, of: of.into(), ..Fault::always(op) });
        let out = thruway(lab.dir.path()).args(["cp", "--retries", "0"]).args([&from, &to]).output().unwrap();
        assert!(!out.status.success());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(said.contains("temporarily unavailable"), "{said}");
        assert_eq!(said.matches("temporarily unavailable").count(), 1, "once: {said}");
        drop(mount);
    }
}
