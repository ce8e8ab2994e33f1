//! Crashes, cuts and full disks: data is late, never lost or wrong.

use crate::support;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};
use support::*;

const TIMEOUT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

fn args(list: &[&dyn AsRef<OsStr>]) -> Vec<OsString> {
    list.iter().map(|a| a.as_ref().to_os_string()).collect()
}

fn spawn_cp(lab: &Lab, list: &[OsString]) -> Child {
    thruway(lab.dir.path()).args(["cp", "--quiet"]).args(list).stderr(std::process::Stdio::null()).spawn().unwrap()
}

/// Waits until that much is on its way in `dir`.
fn until_written(dir: &Path, bytes: u64) {
    let start = Instant::now();
    loop {
        let blocks: u64 =
            fs::read_dir(dir).unwrap().flatten().filter_map(|e| e.metadata().ok()).map(|m| m.blocks()).sum();
        if blocks * 512 >= bytes {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "the copy does not get on");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Waits until the journal in `dir` says that at least so many bytes are verified and written; how many
/// it says. A killed process loses nothing of them, whatever else was in progress.
fn until_recorded(dir: &Path, bytes: u64) -> u64 {
    const RECORD_LEN: usize = 64;
    const RANGE: u8 = 2;
    let recorded = |journal: Vec<u8>| -> u64 {
        let ranges = journal.chunks_exact(RECORD_LEN).filter(|record| record[0] == RANGE);
        ranges.map(|record| u64::from(u32::from_le_bytes(record[36..40].try_into().unwrap()))).sum()
    };
    let start = Instant::now();
    loop {
        let journals = fs::read_dir(dir).unwrap().flatten().map(|e| e.path());
        let journals = journals.filter(|path| path.extension() == Some(OsStr::new("journal")));
        let sum: u64 = journals.filter_map(|path| fs::read(path).ok()).map(recorded).sum();
        if sum >= bytes {
            return sum;
        }
        assert!(start.elapsed() < TIMEOUT, "the copy does not get on");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn big_file(lab: &Lab, bytes: u64) -> std::path::PathBuf {
    let path = lab.path("big");
    fs::write(&path, noise(bytes as usize, 7)).unwrap();
    path
}

/// Names of journals and temporary files in a directory.
fn leftovers(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains(".tw-") || name.contains(".journal")).collect()
}

/// Asserts that no journal or temporary file is left: the daemon removes them before the client reports success.
fn no_leftovers(dir: &Path) {
    assert_eq!(leftovers(dir), [""; 0]);
}

#[test]
fn a_killed_client_is_continued_by_the_same_command() {
    for (round, (kill_at, provider)) in [(3, "iwarp"), (17, "tcp"), (40, "auto"), (50, "tcp")].into_iter().enumerate() {
        let lab = Lab::new();
        let (big, served) = (big_file(&lab, 64 * MIB), lab.mkdir("served"));
        let daemon = lab.serve(&served);
        let command = args(&[&"--provider", &provider, &"--bwlimit", &"40M", &big, &daemon.url("e/copy")]);
        let mut child = spawn_cp(&lab, &command);
        let recorded = until_recorded(&served, kill_at * MIB);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!served.join("copy").exists(), "not under its name before it is whole");
        let result = cp(&lab, &command);
        let (sent, resumed) = (result["bytes"].as_u64().unwrap(), result["resumed_bytes"].as_u64().unwrap());
        assert_eq!(sent + resumed, 64 * MIB, "round {round}: nothing verified is sent again");
        assert!(resumed >= recorded, "round {round}: {resumed} of {recorded}");
        assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
        no_leftovers(&served);
    }
}

#[test]
fn a_killed_daemon_is_continued_when_it_is_back() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 64 * MIB), lab.mkdir("served"));
    let mut daemon = lab.serve(&served);
    let command = args(&[&"--bwlimit", &"40M", &"--retries", &"0", &big, &daemon.url("e/copy")]);
    let mut child = spawn_cp(&lab, &command);
    let recorded = until_recorded(&served, 20 * MIB);
    daemon.kill();
    assert!(!child.wait().unwrap().success());
    let addr: OsString = daemon.addr.clone().into();
    let _again = Daemon::start(&[OsStr::new("--listen"), &addr, OsStr::new("--export"), &export("e", &served, "")]);
    let result = cp(&lab, &command);
    assert_eq!(result["bytes"].as_u64().unwrap() + result["resumed_bytes"].as_u64().unwrap(), 64 * MIB);
    assert!(result["resumed_bytes"].as_u64().unwrap() >= recorded, "{result}: {recorded} were recorded");
    assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
    no_leftovers(&served);
}

#[test]
fn success_is_reported_after_the_journal_is_removed() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for i in 0..100 {
        fs::write(source.join(format!("f{i}")), noise(1000, i)).unwrap();
    }
    for provider in ["iwarp", "tcp", "auto"] {
        for round in 0..5 {
            let mut daemon = lab.serve(&served);
            cp(&lab, &args(&[&"-r", &"--provider", &provider, &source, &daemon.url(&format!("e/{provider}{round}"))]));
            daemon.kill();
            no_leftovers(&served);
        }
    }
}

#[test]
fn leftovers_of_another_command_are_named_and_cleaned() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 32 * MIB), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    let mut child = thruway(lab.dir.path())
        .args(["cp", "--bwlimit", "4M"])
        .args([big.as_os_str(), &daemon.url("e/copy")])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until_recorded(&served, 4 * MIB);
    let signal = |name: &str| {
        assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
    };
    // A stopped copy cannot end before `clean` runs, however busy the machine is.
    signal("-STOP");
    // `clean --delete` removes nothing of a running copy.
    let clean = |extra: &[&str]| {
        let out = thruway(lab.dir.path()).args(["clean", "--json"]).args(extra).arg(&served).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        parse(&out).as_array().unwrap().clone()
    };
    for row in clean(&["--delete"]) {
        assert_eq!((&row["state"], &row["removed"]), (&"in use".into(), &false.into()), "{row}");
    }
    signal("-INT");
    signal("-CONT");
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()), Some(2), "{said}");
    assert!(said.contains("stopped; ") && said.contains("the same command resumes"), "{said}");
    // The daemon ends the session some time after the client.
    let start = Instant::now();
    while clean(&[]).iter().any(|row| row["state"] != "unfinished") {
        assert!(start.elapsed() < TIMEOUT, "{:?}", clean(&[]));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(clean(&[]).len(), 2, "a journal and a temporary file");
    // The same copy with another option is another job, which reports the leftovers of this one.
    let out = try_cp(&lab, &args(&[&"-p", &big, &daemon.url("e/copy")]));
    assert!(
        out.status.success() && stderr(&out).contains("leftovers of other, interrupted copies"),
        "{}",
        stderr(&out)
    );
    assert!(leftovers(&served).iter().all(|name| stderr(&out).contains(name)), "{}", stderr(&out));
    assert!(clean(&["--delete"]).iter().all(|row| row["removed"] == true));
    no_leftovers(&served);
    assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
    let out = thruway(lab.dir.path()).arg("clean").arg(daemon.url("e")).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
}

#[test]
fn a_killed_pull_of_a_tree_continues_with_what_is_missing() {
    let lab = Lab::new();
    let (served, here) = (lab.mkdir("served"), lab.mkdir("here"));
    let source = served.join("tree");
    awkward_tree(&source);
    for i in 0..8u64 {
        fs::write(source.join(format!("large{i}")), noise(8 << 20, i)).unwrap();
    }
    let daemon = lab.serve(&served);
    let copy = here.join("tree");
    // The rate of a pull is the daemon's; a first attempt is killed wherever it happens to be.
    let command = args(&[&"-rp", &daemon.url("e/tree"), &here]);
    let mut child = spawn_cp(&lab, &command);
    while !copy.join("large3").exists() && !copy.join("large5").exists() {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let _ = child.kill();
    child.wait().unwrap();
    cp(&lab, &command);
    assert_same(&source, &copy, Compare::Everything);
    no_leftovers(&here);
}

#[test]
fn a_source_that_changed_in_between_is_sent_anew() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 32 * MIB), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    let command = args(&[&"--bwlimit", &"20M", &big, &daemon.url("e/copy")]);
    let mut child = spawn_cp(&lab, &command);
    until_written(&served, 10 * MIB);
    child.kill().unwrap();
    child.wait().unwrap();
    fs::write(&big, noise(32 << 20, 8)).unwrap();
    let result = cp(&lab, &args(&[&big, &daemon.url("e/copy")]));
    assert_eq!(result["bytes"], 32 * MIB);
    assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
}

#[test]
fn a_file_that_is_up_to_date_by_now_leaves_nothing_of_the_attempt_that_was_killed() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 32 * MIB), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    let command = args(&[&"-u", &"--bwlimit", &"20M", &big, &daemon.url("e/copy")]);
    let mut child = spawn_cp(&lab, &command);
    until_recorded(&served, 5 * MIB);
    child.kill().unwrap();
    child.wait().unwrap();
    fs::copy(&big, served.join("copy")).unwrap();
    assert_eq!(cp(&lab, &command)["skipped"], 1);
    no_leftovers(&served);
}

/// What a network does to us once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The connection that carries the byte dies.
    Cut,
    /// The byte changes on its way from the client.
    Corrupt,
    /// Every connection dies there.
    CutAlways,
}

/// Forwards connections, and lets `fault` happen at the `at`th byte; then, but for [`Fault::CutAlways`], it is well
/// again.
fn proxy(to: SocketAddr, fault: Fault, at: i64) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let left = Arc::new(AtomicI64::new(at));
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { return };
            let pairs = [(client.try_clone().unwrap(), server.try_clone().unwrap(), true), (server, client, false)];
            for (from, into, from_client) in pairs {
                let left = match fault {
                    Fault::CutAlways => Arc::new(AtomicI64::new(at)),
                    _ => Arc::clone(&left),
                };
                let counts = from_client || fault == Fault::Cut;
                std::thread::spawn(move || forward(from, into, fault, counts.then_some(&*left)));
            }
        }
    });
    addr
}

fn forward(mut from: TcpStream, mut into: TcpStream, fault: Fault, left: Option<&AtomicI64>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let before = left.map_or(0, |left| left.fetch_sub(n as i64, Ordering::SeqCst));
        if before > 0 && before <= n as i64 {
            match fault {
                Fault::Cut | Fault::CutAlways => break,
                Fault::Corrupt => buffer[before as usize - 1] ^= 0x20,
            }
        }
        if into.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = into.shutdown(std::net::Shutdown::Both);
}

#[test]
fn a_cut_connection_is_made_again_within_the_command() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 64 * MIB), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    for (cut, provider) in
        [(1000, "iwarp"), (300_000, "iwarp"), (20 << 20, "iwarp"), (50 << 20, "iwarp"), (700, "tcp"), (30 << 20, "tcp")]
    {
        let proxy = proxy(daemon.addr.parse().unwrap(), Fault::Cut, cut);
        let result = cp(&lab, &args(&[&"--provider", &provider, &big, &format!("tw://{proxy}/e/copy")]));
        assert_eq!(result["retries"], 1, "cut after {cut}: {result}");
        assert!(result["bytes"].as_u64().unwrap() <= 64 * MIB);
        assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
        no_leftovers(&served);
    }
}

#[test]
fn attempts_that_get_nowhere_end_and_those_that_get_on_do_not() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 32 * MIB), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    let proxy = proxy(daemon.addr.parse().unwrap(), Fault::CutAlways, 12 << 20);
    // What goes nowhere is never there already.
    let nowhere = args(&[&"--retries", &"2", &big, &format!("tw://{proxy}/dev/null")]);
    assert_eq!(try_cp(&lab, &nowhere).status.code(), Some(1));
    let result = cp(&lab, &args(&[&"--retries", &"1", &"--streams", &"1", &big, &format!("tw://{proxy}/e/copy")]));
    assert!(result["retries"].as_u64().unwrap() > 1, "{result}");
    assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
}

#[test]
fn a_job_that_its_own_predecessor_still_holds_waits_for_it() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 24 * MIB), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    let command = args(&[&"--bwlimit", &"16M", &big, &daemon.url("e/copy")]);
    let mut child = spawn_cp(&lab, &command);
    until_recorded(&served, 4 * MIB);
    child.kill().unwrap();
    child.wait().unwrap();
    // Somebody still has the journal, for longer than the daemon waits.
    let journals = fs::read_dir(&served).unwrap().flatten().map(|e| e.path());
    let journal = { journals }.find(|path| path.extension() == Some(OsStr::new("journal"))).unwrap();
    let held = fs::File::open(&journal).unwrap();
    held.lock().unwrap();
    let mut second = thruway(lab.dir.path())
        .args(["cp", "--json"])
        .args(&command)
        .env("THRUWAY_LOG", "warn")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = std::io::BufReader::new(second.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("already running this job") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut told, &mut line).unwrap() > 0, "it gave up: {:?}", second.wait());
    }
    drop(held);
    let mut rest = String::new();
    told.read_to_string(&mut rest).unwrap();
    assert!(second.wait().unwrap().success(), "{line}{rest}");
    assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
}

#[test]
fn a_corrupted_byte_never_reaches_a_file() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 16 * MIB), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    for (at, provider) in [(5_000_000, "iwarp"), (9_999_999, "iwarp"), (5_000_000, "tcp")] {
        let proxy = proxy(daemon.addr.parse().unwrap(), Fault::Corrupt, at);
        let result = cp(&lab, &args(&[&"--provider", &provider, &big, &format!("tw://{proxy}/e/copy")]));
        assert_eq!(result["retries"], 1, "{result}");
        assert!(fs::read(&big).unwrap() == fs::read(served.join("copy")).unwrap());
    }
}

#[test]
fn a_local_copy_to_a_full_disk_reports_it_once() {
    let lab = Lab::new();
    let (big, full) = (big_file(&lab, 16 * MIB), lab.mkdir("full"));
    let script =
        format!("mount -t tmpfs -o size=8m none '{0}' && exec {THRUWAY} cp '{1}' '{0}'", full.display(), big.display());
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &script]).env("XDG_CONFIG_HOME", lab.dir.path());
    let out = command.env_remove("THRUWAY_LOG").output().unwrap();
    let said = stderr(&out);
    assert!(said.lines().count() == 1 && said.contains("No space left on device"), "{said}");
}

#[test]
fn a_copy_that_needs_no_room_succeeds_on_a_full_disk() {
    let lab = Lab::new();
    let (source, full) = (lab.mkdir("source"), lab.mkdir("full"));
    fs::write(source.join("kept"), "kept").unwrap();
    let script = format!(
        "mount -t tmpfs -o size=1m none '{0}' && cp -a '{1}/.' '{0}' && echo gone >'{0}/gone' && ! cat /dev/zero >'{0}/fill' 2>&1 && \
         touch '{1}/fill' && {THRUWAY} cp -ru --delete --exclude fill '{1}/' '{0}' && test ! -e '{0}/gone' && ls -A '{0}'",
        full.display(),
        source.display(),
    );
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &script]).env("XDG_CONFIG_HOME", lab.dir.path());
    let out = command.env_remove("THRUWAY_LOG").output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.ends_with("fill\nkept\n"), "{said} {}", stderr(&out));
}

#[test]
fn a_full_disk_is_told_and_the_copy_goes_on_when_there_is_room() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 48 * MIB), lab.mkdir("served"));
    // A file system of its own for the daemon, in a mount namespace of its own.
    let script = format!(
        "mount -t tmpfs -o size=24m none '{0}' && exec {1} serve --json --listen 127.0.0.1:0 --export e='{0}'",
        served.display(),
        THRUWAY
    );
    let mut child = Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", &script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
    let announced: serde_json::Value = serde_json::from_str(&line).expect("unshare and mount work on this machine");
    let addr = announced["listening"][0].as_str().unwrap().to_string();
    let pid = child.id().to_string();
    let daemon = Daemon { child, addr, public_key: String::new() };
    let command = args(&[&big, &daemon.url("e/copy")]);
    let out = try_cp(&lab, &command);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        stderr(&out).contains("No space left on device")
            && stderr(&out).contains("; the data copied so far is kept, and the same command resumes"),
        "{}",
        stderr(&out)
    );
    let inside = |script: String| {
        let enter = ["--target", &pid, "--user", "--mount", "sh", "-c", &script];
        String::from_utf8(Command::new("nsenter").args(enter).output().unwrap().stdout).unwrap()
    };
    // Where not even a journal has room, none is left: it would say nothing.
    inside(format!("cat /dev/zero > '{}/fill'", served.display()));
    let out = try_cp(&lab, &args(&[&big, &daemon.url("e/another")]));
    assert_eq!(out.status.code(), Some(1));
    assert!(!stderr(&out).contains("is kept"), "{}", stderr(&out));
    let journals = inside(format!("cd '{}' && rm fill && ls -A | grep -c journal", served.display()));
    assert_eq!(journals, "1\n");
    inside(format!("mount -o remount,size=100m '{}'", served.display()));
    let result = cp(&lab, &command);
    assert!(result["resumed_bytes"].as_u64().unwrap() > 10 * MIB, "{result}");
    let back = lab.path("back");
    cp(&lab, &args(&[&daemon.url("e/copy"), &back]));
    assert!(fs::read(&big).unwrap() == fs::read(back).unwrap());
}

#[test]
fn a_file_that_changes_while_it_is_read_is_reported_and_does_not_appear() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 64 * MIB), lab.mkdir("served"));
    fs::write(lab.path("other"), "other").unwrap();
    let daemon = lab.serve(&served);
    // Few blocks, so that reading cannot run far ahead of sending.
    let command = args(&[&"--depth", &"4", &"--bwlimit", &"16M", &big, &lab.path("other"), &daemon.url("e/")]);
    let child = thruway(lab.dir.path())
        .args(["cp", "--json"])
        .args(&command)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    until_written(&served, 4 * MIB);
    // In place, and with the modification time put back.
    let before = fs::metadata(&big).unwrap().modified().unwrap();
    let file = fs::OpenOptions::new().write(true).open(&big).unwrap();
    (&file).write_all(b"more").unwrap();
    file.set_modified(before).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("changed during the copy"), "{}", stderr(&out));
    assert!(!served.join("big").exists());
    assert_eq!(fs::read_to_string(served.join("other")).unwrap(), "other");
}

#[test]
fn a_file_that_grows_and_changes_is_not_copied_as_a_mixture() {
    for provider in ["iwarp", "auto", "tcp"] {
        let lab = Lab::new();
        let (big, served) = (big_file(&lab, 32 * MIB), lab.mkdir("served"));
        let daemon = lab.serve(&served);
        let command =
            args(&[&"--provider", &provider, &"--depth", &"4", &"--bwlimit", &"16M", &big, &daemon.url("e/")]);
        let child = thruway(lab.dir.path())
            .args(["cp", "--quiet"])
            .args(&command)
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        until_written(&served, 4 * MIB);
        // As a database that is reorganised, or a log that is rewritten: longer, and another at its beginning.
        let file = fs::OpenOptions::new().write(true).open(&big).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"other", 0).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"more", 32 * MIB).unwrap();
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("changed during the copy"), "{provider}: {}", stderr(&out));
        assert!(!served.join("big").exists(), "{provider}");
    }
}

#[test]
fn a_file_that_grows_while_it_is_read_arrives_as_it_was_and_that_is_told() {
    for (provider, direct) in [("iwarp", "auto"), ("tcp", "auto"), ("iwarp", "on")] {
        let lab = Lab::new();
        let (big, served) = (big_file(&lab, 32 * MIB), lab.mkdir("served"));
        let daemon = lab.serve(&served);
        let command =
            args(&[&"--provider", &provider, &"--direct", &direct, &"--depth", &"4", &"--bwlimit", &"16M", &big]);
        let command = [command, args(&[&daemon.url("e/")])].concat();
        let child = thruway(lab.dir.path())
            .args(["cp", "--json"])
            .args(&command)
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        until_written(&served, 2 * MIB);
        fs::OpenOptions::new().append(true).open(&big).unwrap().write_all(b"more").unwrap();
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("grew during the copy"), "{}", stderr(&out));
        assert_eq!(parse(&out)["verified"], false);
        assert!(fs::read(served.join("big")).unwrap() == noise(32 << 20, 7));
    }
}

#[test]
fn a_revoked_key_ends_what_it_had_begun_and_nobody_elses() {
    let lab = Lab::new();
    let (big, served) = (big_file(&lab, 32 * MIB), lab.mkdir("served"));
    let key = |name: &str| {
        let path = lab.path(name);
        assert!(thruway(lab.dir.path()).arg("keygen").arg("--output").arg(&path).output().unwrap().status.success());
        (fs::read_to_string(path.with_extension("pub")).unwrap(), path)
    };
    let ((mine, my_key), (others, others_key)) = (key("mine"), key("others"));
    let allowed = lab.path("authorized");
    fs::write(&allowed, format!("{mine}\n{others}\n")).unwrap();
    let start = || {
        let args = [OsStr::new("--authorized-keys"), allowed.as_os_str(), OsStr::new("--export")];
        // Somebody who is not the daemon's own user has no rights but by key.
        Daemon::start(&[&args[..], &[&export("e", &served, "")]].concat())
    };
    let daemon = start();
    let push = |key: &Path, name: &str, retries: &str| {
        let url = daemon.url(&format!("e/{name}"));
        let list = args(&[&"--key", &key, &"--bwlimit", &"8M", &"--retries", &retries, &big, &url]);
        let mut command = thruway(lab.dir.path());
        command.args(["cp", "--quiet"]).args(list).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let (revoked, going_on) = (push(&my_key, "mine-copy", "5"), push(&others_key, "others-copy", "0"));
    until_recorded(&served, 6 * MIB);
    fs::write(&allowed, &others).unwrap();
    let pid = daemon.child.id().to_string();
    assert!(Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    let out = revoked.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("your key has been revoked"), "{}", stderr(&out));
    assert!(!served.join("mine-copy").exists());
    let out = going_on.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert!(fs::read(&big).unwrap() == fs::read(served.join("others-copy")).unwrap());
}

#[test]
fn what_a_daemon_of_roots_has_kept_is_the_users_that_it_becomes() {
    let lab = Lab::new();
    let (state, digits) = (lab.mkdir("state"), "0123456789abcdef".repeat(2));
    let kept = lab.mkdir("state/reservations");
    for name in [digits.as_str(), "somebody-elses"] {
        fs::write(kept.join(name), "").unwrap();
    }
    std::os::unix::fs::symlink("/etc/passwd", kept.join("f".repeat(32))).unwrap();
    let list = ["--user", "nobody", "--block", "m=mem:1M", "--iscsi", "127.0.0.1:0", "--export"].map(OsStr::new);
    let served = export("e", &lab.mkdir("served"), "");
    let rest = [served.as_os_str(), OsStr::new("--anonymous"), OsStr::new("--state"), state.as_os_str()];
    let _daemon = Daemon::start(&[&list[..], &rest].concat());
    let owner = |path: &Path| fs::symlink_metadata(path).unwrap().uid();
    assert!(owner(&kept) != 0 && owner(&kept.join(digits)) == owner(&kept));
    assert_eq!([&state, &kept.join("somebody-elses"), Path::new("/etc/passwd")].map(owner), [0; 3]);
}

/// Whatever a daemon is talked into, it opens nothing but what it was told to serve: here, by somebody who can change a link
/// that it follows.
#[test]
fn a_daemon_is_confined_to_what_it_serves() {
    let lab = Lab::new();
    let (served, keys, elsewhere) = (lab.mkdir("served"), lab.mkdir("keys"), lab.mkdir("elsewhere"));
    fs::write(lab.path("f"), "x").unwrap();
    let output = lab.path("key");
    assert!(thruway(lab.dir.path()).arg("keygen").arg("--output").arg(&output).output().unwrap().status.success());
    fs::copy(output.with_extension("pub"), elsewhere.join("authorized")).unwrap();
    for confined in [true, false] {
        let authorized = keys.join("authorized");
        let _ = fs::remove_file(&authorized);
        fs::write(&authorized, "").unwrap();
        let mut command = Command::new(THRUWAY);
        command.args(["serve", "--json", "--listen", "127.0.0.1:0", "--authorized-keys"]).arg(&authorized);
        command.arg("--export").arg(export("e", &served, "")).args((!confined).then_some("--no-landlock"));
        command.env("TMPDIR", lab.mkdir("tmp")).env("THRUWAY_LOG", "warn").env("XDG_CONFIG_HOME", lab.mkdir("config"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let announced: serde_json::Value = serde_json::from_str(&line).unwrap();
        let addr = announced["listening"][0].as_str().unwrap().to_string();
        let daemon = Daemon { child, addr, public_key: String::new() };
        fs::remove_file(&authorized).unwrap();
        std::os::unix::fs::symlink(elsewhere.join("authorized"), &authorized).unwrap();
        let pid = daemon.child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
        let mut line = String::new();
        while !line.contains("authorized keys") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it says what it has done");
        }
        assert_eq!(line.contains("Permission denied"), confined, "{line}");
        let out = try_cp(&lab, &args(&[&"--key", &output, &"--retries", &"0", &lab.path("f"), &daemon.url("e/f")]));
        assert_eq!(out.status.success(), !confined, "{}", stderr(&out));
    }
}

#[test]
fn a_daemon_that_has_become_another_user_has_that_users_rights() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    // What only root may read, and a place for everybody.
    fs::write(served.join("roots"), "secret").unwrap();
    fs::create_dir(served.join("pub")).unwrap();
    let mode = |path: &Path, bits: u32| {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(bits)).unwrap();
    };
    mode(lab.dir.path(), 0o711);
    mode(&served.join("roots"), 0o600);
    mode(&served.join("pub"), 0o777);
    fs::write(lab.path("mine"), "x").unwrap();
    mode(&lab.path("mine"), 0o4755);
    let args_of = |user: &str| {
        let list = [OsStr::new("--user"), OsStr::new(user), OsStr::new("--anonymous"), OsStr::new("--export")];
        list.map(OsStr::to_os_string).into_iter().chain([export("e", &served, "")]).collect::<Vec<_>>()
    };
    let list = args_of("nobody");
    let daemon = Daemon::start(&list.iter().map(OsString::as_os_str).collect::<Vec<_>>());
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let of = |what: &str| status.lines().find_map(|line| line.strip_prefix(what)).unwrap().trim().to_string();
    assert!(!of("Uid:").split_whitespace().any(|uid| uid == "0") && of("CapEff:") == "0000000000000000", "{status}");
    // Every thread of it, those of before included.
    for task in fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        assert!(
            status.lines().any(|line| line.starts_with("Uid:") && !line.split_whitespace().any(|word| word == "0"))
        );
    }
    let out = try_cp(&lab, &args(&[&daemon.url("e/roots"), &lab.path("stolen")]));
    assert!(stderr(&out).contains("Permission denied"), "{}", stderr(&out));
    let out = try_cp(&lab, &args(&[&"-p", &lab.path("mine"), &daemon.url("e/pub/copy")]));
    assert!(out.status.code() == Some(1) && stderr(&out).contains("set-user-ID bit not kept"), "{}", stderr(&out));
    let copy = fs::metadata(served.join("pub/copy")).unwrap();
    assert!(copy.uid() != 0 && copy.mode() & 0o7000 == 0);
    let out = thruway(lab.dir.path()).arg("serve").args(args_of("no-such-user")).output().unwrap();
    assert!(stderr(&out).contains("no user 'no-such-user'"), "{}", stderr(&out));
}
