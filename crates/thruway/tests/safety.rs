//! What must not happen to data, rights and names, whatever the source tree, the destination or the user looks like.

use crate::support;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use support::*;
use thruway_fs::acl::{Acl, Entry, Who};

fn args(list: &[&dyn AsRef<OsStr>]) -> Vec<OsString> {
    list.iter().map(|a| a.as_ref().to_os_string()).collect()
}

/// A path with a slash behind it.
fn slash(path: &Path) -> OsString {
    let mut text = path.as_os_str().to_os_string();
    text.push("/");
    text
}

fn write(path: impl AsRef<Path>, content: &str) {
    fs::create_dir_all(path.as_ref().parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn os(text: impl AsRef<OsStr>) -> OsString {
    text.as_ref().into()
}

fn mode(path: impl AsRef<Path>, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Sets the modification time, in seconds since 1970.
fn set_modified(path: &Path, seconds: u64) {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    fs::File::open(path).unwrap().set_modified(time).unwrap();
}

fn mode_of(path: impl AsRef<Path>) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// The names in a directory, but for the journal of a job that has more to do.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| !name.ends_with(".journal") || name == ".thruway-notes.journal");
    names.sort();
    names
}

/// Runs `thruway cp` with an error injected into one kind of system call of this path's.
fn cp_with_fault(lab: &Lab, path: &Path, inject: &str, list: &[OsString]) -> std::process::Output {
    let call = inject.split(':').next().unwrap();
    Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &format!("inject={inject}"), "-P"])
        .arg(path)
        .arg(THRUWAY)
        .args(["cp", "--json"])
        .args(list)
        .env("XDG_CONFIG_HOME", lab.dir.path())
        .env("THRUWAY_LOG", "error")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

#[test]
fn an_incomplete_listing_removes_nothing() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    for i in 0..3000 {
        write(source.join(format!("file{i}")), "x");
    }
    cp(&lab, &args(&[&"-r", &slash(&source), &target]));
    let mirror = args(&[&"-r", &"--delete", &slash(&source), &target]);
    // ENOENT, the error for a lost directory, must not count as the end of the listing.
    for fault in ["EIO:when=2", "ENOENT:when=1", "ENOENT:when=2", "ENOENT:when=3"] {
        let out = cp_with_fault(&lab, &source, &format!("getdents64:error={fault}"), &mirror);
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("listing the directory"), "{}", stderr(&out));
        assert_eq!((parse(&out)["deleted"].as_u64(), names(&target).len()), (Some(0), 3000));
    }
    // Nor with --ignore-errors, in the directory itself.
    let mirror = args(&[&"-r", &"--delete", &"--ignore-errors", &slash(&source), &target]);
    let out = cp_with_fault(&lab, &source, "getdents64:error=EIO:when=2", &mirror);
    assert_eq!((out.status.code(), names(&target).len()), (Some(1), 3000));
}

#[test]
fn a_destination_that_cannot_be_listed_is_an_error() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    fs::create_dir(source.join("d")).unwrap();
    let mirror = args(&[&"-r", &"--delete", &slash(&source), &target]);
    for path in ["d", "gone"] {
        write(target.join("d/old"), "");
        write(target.join("gone/old"), "");
        let out = cp_with_fault(&lab, &target.join(path), "getdents64:error=ENOENT:when=1", &mirror);
        assert_eq!(out.status.code(), Some(1), "{path}");
        assert!(stderr(&out).contains("removed"), "{}", stderr(&out));
    }
    cp(&lab, &mirror);
    assert_same(&source, &target, Compare::Content);
}

#[test]
fn one_unreadable_thing_stops_removal_unless_asked_otherwise() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("good/f"), "x");
    write(target.join("good/gone"), "x");
    symlink("nowhere", source.join("link")).unwrap();
    let fault = "readlinkat:error=EIO:when=1";
    let with = |extra: &[&str]| {
        let mut list: Vec<OsString> = ["-r", "--delete"].iter().chain(extra).map(OsString::from).collect();
        list.extend(args(&[&slash(&source), &target]));
        let out = cp_with_fault(&lab, &source.join("link"), fault, &list);
        assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
        stderr(&out)
    };
    let said = with(&[]);
    assert!(said.contains("--delete skipped") && target.join("good/gone").exists(), "{said}");
    with(&["--ignore-errors"]);
    assert!(!target.join("good/gone").exists());
}

#[test]
fn a_hole_that_cannot_be_looked_for_fails_the_file() {
    let lab = Lab::new();
    let source = lab.path("source");
    let file = fs::File::create(&source).unwrap();
    file.set_len(20 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &noise(2 << 20, 3), 0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &noise(2 << 20, 4), 18 << 20).unwrap();
    for when in [1, 2, 3] {
        let inject = format!("lseek:error=EIO:when={when}");
        let out = cp_with_fault(&lab, &source, &inject, &args(&[&source, &lab.path("target")]));
        assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
        assert!(!lab.path("target").exists(), "a file with zeroes where data should be");
    }
}

#[test]
fn a_mirror_does_not_remove_through_links() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("a/x"), "ax");
    write(source.join("b/y"), "by");
    write(target.join("b/old"), "");
    symlink("b", target.join("a")).unwrap();
    cp(&lab, &args(&[&"-r", &"--delete", &slash(&source), &target]));
    assert_same(&source, &target, Compare::Content);
}

#[test]
fn sources_that_meet_in_one_directory_keep_each_others_files() {
    let lab = Lab::new();
    write(lab.path("A/a"), "a");
    write(lab.path("B/b"), "b");
    write(lab.path("p1/x/1"), "1");
    write(lab.path("p2/x/2"), "2");
    let (out, served) = (lab.mkdir("out"), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    for target in [out.clone().into_os_string(), daemon.url("e/mm/")] {
        cp(&lab, &args(&[&"-r", &"--delete", &slash(&lab.path("A")), &slash(&lab.path("B")), &target]));
        cp(&lab, &args(&[&"-r", &"--delete", &lab.path("p1/x"), &lab.path("p2/x"), &target]));
    }
    for dir in [out, served.join("mm")] {
        assert_eq!(
            (names(&dir), names(&dir.join("x"))),
            (vec!["a".into(), "b".into(), "x".into()], vec!["1".into(), "2".into()])
        );
    }
}

#[test]
fn what_is_excluded_stays_at_the_destination() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("k/f"), "1");
    for path in ["ex/keep", ".snapshots/s1", "logs/app.log", "logs/other", "k/gone"] {
        write(target.join(path), path);
    }
    let filters = ["--exclude", "ex", "--exclude", ".snapshots", "--exclude", "*.log"].map(OsString::from).to_vec();
    cp(&lab, &[filters, args(&[&"-r", &"--delete", &slash(&source), &target])].concat());
    for path in ["ex/keep", ".snapshots/s1", "logs/app.log", "k/f"] {
        assert!(target.join(path).exists(), "{path}");
    }
    assert!(!target.join("logs/other").exists() && !target.join("k/gone").exists());
}

#[test]
fn what_is_excluded_stays_though_a_file_wants_its_directorys_name() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("foo"), "a file");
    write(target.join("foo/keep.log"), "kept");
    let out = try_cp(&lab, &args(&[&"-r", &"--delete", &"--exclude", &"*.log", &slash(&source), &target]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("foo") && stderr(&out).contains("in the way"), "{}", stderr(&out));
    assert!(target.join("foo/keep.log").exists());
    cp(&lab, &args(&[&"-r", &"--delete", &slash(&source), &target]));
    assert_eq!(fs::read_to_string(target.join("foo")).unwrap(), "a file");
}

/// Kills a copy when the files in a directory of its destination have 8 MiB.
fn interrupt(lab: &Lab, command: &[OsString], dir: &Path) {
    let mut child = thruway(lab.dir.path()).args(["cp", "--quiet"]).args(command).spawn().unwrap();
    let blocks = || -> u64 {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|e| e.metadata().ok()).map(|m| m.blocks()).sum()
    };
    while blocks() < (8 << 20) / 512 {
        assert!(child.try_wait().unwrap().is_none(), "over before it was interrupted");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_repeated_copy_does_not_go_into_an_unfinished_directory_unnoticed() {
    for how in ["push", "pull", "local"] {
        let lab = Lab::new();
        let (source, served) = (lab.mkdir("dir"), lab.mkdir("served"));
        for i in 0..2 {
            fs::write(source.join(format!("f{i}")), noise(24 << 20, i)).unwrap();
        }
        let daemon = lab.serve(if how == "pull" { lab.dir.path() } else { &served });
        let new = served.join("new");
        let paths = |name: &str, more: &str| {
            let url = |path: &str| daemon.url(path);
            let (from, mut to) = match how {
                "push" => (os(lab.path(name)), url("e/new")),
                "pull" => (url(&format!("e/{name}")), os(&new)),
                _ => (os(lab.path(name)), os(&new)),
            };
            to.push(more);
            args(&[&"-r", &"--bwlimit", &"30M", &from, &to])
        };
        interrupt(&lab, &paths("dir", ""), &new);
        // A copy of something else goes into the directory, and says so.
        write(lab.path("other/file"), "x");
        let out = try_cp(&lab, &paths("other", ""));
        assert!(out.status.success() && stderr(&out).contains("new may be unfinished"), "{how}: {}", stderr(&out));
        assert!(new.join("other/file").exists());
        fs::remove_dir_all(new.join("other")).unwrap();
        // The journal is damaged, or has another secret.
        let journal =
            fs::read_dir(&served).unwrap().map(|e| e.unwrap().path()).find(|p| p.extension().is_some()).unwrap();
        let flip = || {
            let mut content = fs::read(&journal).unwrap();
            content[60] ^= 1;
            fs::write(&journal, content).unwrap();
        };
        flip();
        let out = try_cp(&lab, &paths("dir", ""));
        let text = stderr(&out);
        assert!(
            out.status.code() == Some(1) && text.contains("interrupted run") && text.contains("new/"),
            "{how}: {text}"
        );
        assert!(!new.join("dir").exists());
        cp(&lab, &paths("dir", "/"));
        assert_same(&source, &new.join("dir"), Compare::Content);
        fs::remove_dir_all(new.join("dir")).unwrap();
        flip();
        let result = cp(&lab, &paths("dir", ""));
        assert!(result["resumed_bytes"].as_u64().unwrap() > 0, "{how}: {result}");
        assert_same(&source, &new, Compare::Content);
        assert_eq!(names(&served), ["new"]);
    }
}

#[test]
fn an_interrupted_copy_to_a_new_name_goes_on_at_that_name() {
    for how in ["push", "pull", "local"] {
        let lab = Lab::new();
        let (source, served) = (lab.mkdir("dir"), lab.mkdir("served"));
        for i in 0..2 {
            fs::write(source.join(format!("f{i}")), noise(24 << 20, i)).unwrap();
        }
        let daemon = lab.serve(if how == "pull" { lab.dir.path() } else { &served });
        let (from, to) = match how {
            "push" => (source.clone().into_os_string(), daemon.url("e/new")),
            "pull" => (daemon.url("e/dir"), served.join("new").into_os_string()),
            _ => (source.clone().into_os_string(), served.join("new").into_os_string()),
        };
        // The same paths in other words.
        let (from_again, to_again) = match how {
            "push" => (os(lab.path("./dir")), daemon.url("e/./new")),
            "pull" => (daemon.url("e//dir"), os(lab.path("served/../served//new"))),
            _ => (os(lab.path("served/../dir")), os(lab.path("./served/new"))),
        };
        let command = args(&[&"-r", &"--bwlimit", &"30M", &from, &to]);
        interrupt(&lab, &command, &served.join("new"));
        let result = cp(&lab, &args(&[&"-r", &from_again, &to_again]));
        assert!(result["resumed_bytes"].as_u64().unwrap() > 0, "{how}: {result}");
        assert_eq!(
            (names(&served), names(&served.join("new"))),
            (vec!["new".into()], vec!["f0".into(), "f1".into()]),
            "{how}"
        );
        assert_same(&source, &served.join("new"), Compare::Content);
        // With nothing interrupted the rule is cp's again.
        if how == "local" {
            cp(&lab, &command);
            assert_eq!(names(&served.join("new")), ["dir", "f0", "f1"]);
        }
    }
}

#[test]
fn directories_have_the_modes_of_the_source_after_interruptions() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("dir"), lab.mkdir("served"));
    let dirs: Vec<(String, u32)> = (0..30).map(|i| (format!("d{i}"), [0o700, 0o755, 0o500][i % 3])).collect();
    for (i, (name, bits)) in dirs.iter().enumerate() {
        fs::create_dir_all(source.join(name)).unwrap();
        for file in 0..20 {
            fs::write(source.join(name).join(file.to_string()), noise(20_000, (20 * i + file) as u64)).unwrap();
        }
        mode(source.join(name), *bits);
    }
    // The umask of the tests is not known.
    let plain = lab.mkdir("plain");
    cp(&lab, &args(&[&"-r", &slash(&source), &plain]));
    let expected: Vec<u32> = dirs.iter().map(|(name, _)| mode_of(plain.join(name))).collect();
    assert_eq!(expected[0], 0o700);
    let daemon = lab.serve(&served);
    for target in [served.join("local").into_os_string(), daemon.url("e/pushed")] {
        let command = args(&[&"-r", &"--bwlimit", &"30M", &"--retries", &"0", &slash(&source), &target]);
        let there = served.join(Path::new(&target).file_name().unwrap());
        for made in [2, 9, 20] {
            let mut child = thruway(lab.dir.path()).args(["cp", "--quiet"]).args(&command).spawn().unwrap();
            while fs::read_dir(&there).map_or(0, |entries| entries.count()) < made {
                if child.try_wait().unwrap().is_some() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
        cp(&lab, &command);
        let modes: Vec<u32> = dirs.iter().map(|(name, _)| mode_of(there.join(name))).collect();
        assert_eq!(modes, expected, "{target:?}");
        assert_same(&source, &there, Compare::Content);
    }
}

#[test]
fn a_copy_does_not_swallow_itself() {
    let lab = Lab::new();
    write(lab.path("a/m/f"), "x");
    let served = lab.path("a");
    let daemon = lab.serve(&served);
    // A local copy is refused before anything is created.
    for (source, target) in
        [(slash(&lab.path("a")), "a/m/n"), (lab.path("a").into(), "a/m"), (lab.path("a").into(), "a/n")]
    {
        let out = try_cp(&lab, &args(&[&"-r", &source, &lab.path(target)]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("into itself"), "{}", stderr(&out));
        assert_eq!((names(&lab.path("a")), names(&lab.path("a/m"))), (vec!["m".into()], vec!["f".into()]));
    }
    // So is one that goes through a daemon or ssh on this machine.
    let (a, url) = (lab.path("a"), |path: &str| -> OsString { daemon.url(path) });
    let ssh = |path: &str| [&b"localhost:"[..], lab.path(path).as_os_str().as_bytes()].concat();
    let ssh = |path: &str| OsString::from_vec(ssh(path));
    for (source, target) in [
        (slash(&a), url("e/m/o")),
        (a.clone().into(), url("e/m/")),
        (url("e/"), lab.path("a/m/o").into()),
        (url("e/m"), lab.path("a/m").into()),
        (slash(&a), ssh("a/m/o")),
        (ssh("a"), lab.path("a/m").into()),
    ] {
        let out = with_fake_ssh(&lab).args(["cp", "-r"]).args([&source, &target]).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{source:?} {target:?} {}", stderr(&out));
        assert!(stderr(&out).contains("into itself"), "{}", stderr(&out));
        // For `DIR/`, a daemon makes the destination before it has a record of the source.
        fs::remove_dir(lab.path("a/m/o")).ok();
        assert_eq!((names(&a), names(&lab.path("a/m"))), (vec!["m".into()], vec!["f".into()]), "{source:?} {target:?}");
    }
    write(lab.path("a/m/o/m/f"), "x");
    // A source that is the destination, or is inside it with --delete, is also refused over a daemon of this machine.
    let (a, e) = (slash(&lab.path("a")), daemon.url("e/"));
    for list in [
        args(&[&"-r", &"--delete", &a, &e]),
        args(&[&"-r", &a, &e]),
        args(&[&"-r", &"--delete", &slash(&lab.path("a/m")), &e]),
        args(&[&"-r", &"--delete", &lab.path("a/m"), &e]),
        args(&[&lab.path("a/m/f"), &daemon.url("e/m")]),
        args(&[&"-r", &"--delete", &daemon.url("e/m/"), &lab.path("a")]),
        args(&[&"-r", &"--delete", &daemon.url("e/"), &lab.path("a")]),
        args(&[&daemon.url("e/m/f"), &lab.path("a/m")]),
    ] {
        let out = try_cp(&lab, &list);
        assert_eq!(out.status.code(), Some(1), "{list:?}");
        let said = stderr(&out);
        assert!(said.contains("are the same") || said.contains("is inside the destination"), "{list:?} {said}");
        assert_eq!((names(&lab.path("a")), names(&lab.path("a/m"))), (vec!["m".into()], vec!["f".into(), "o".into()]));
    }
    cp(&lab, &args(&[&"-r", &slash(&lab.path("a/m/o")), &daemon.url("e/p")]));
    fs::remove_dir_all(lab.path("a/p")).unwrap();
    for list in [
        args(&[&"-r", &"--delete", &slash(&lab.path("a/m")), &lab.path("a")]),
        args(&[&lab.path("a/m/f"), &lab.path("a/m")]),
    ] {
        let out = try_cp(&lab, &list);
        assert_eq!(out.status.code(), Some(1), "{list:?}");
        assert!(lab.path("a/m/f").exists());
    }
}

#[test]
fn names_like_our_own_are_files_like_any_other() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    write(source.join(".report.txt.tw-20240101"), "precious");
    write(source.join(".thruway-notes.journal/data"), "x");
    let daemon = lab.serve(&served);
    cp(&lab, &args(&[&"-r", &slash(&source), &daemon.url("e/")]));
    assert_same(&source, &served, Compare::Content);
    for own in [".thruway-0b1c2d3e4f5a69788796a5b4c3d2e1f0.journal", ".f.tw-0b1c2d3e4f5a69788796a5b4c3d2e1f0"] {
        for target in [daemon.url(&format!("e/{own}")), daemon.url(&format!("e/{own}/"))] {
            let out = try_cp(&lab, &args(&[&source.join(".report.txt.tw-20240101"), &target]));
            assert_eq!(out.status.code(), Some(1));
            assert!(stderr(&out).contains("a name of Thruway's"), "{}", stderr(&out));
        }
    }
    assert_same(&source, &served, Compare::Content);
    let listed = thruway(lab.dir.path()).arg("ls").arg(daemon.url("e/")).output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains(".report.txt.tw-20240101"));
    // Temporary files of another copy, and directories of such names, which could block another job.
    let source = lab.mkdir("receiving");
    let unfinished = format!(".f.tw-{}", "0123abcd".repeat(4));
    write(source.join(&unfinished), "half");
    write(source.join("whole"), "x");
    let directory = format!(".d.tw-{}", "0123abcd".repeat(4));
    write(source.join(&directory).join("f"), "precious");
    for (list, failed) in [
        (args(&[&"-r", &slash(&source), &daemon.url("e/")]), 2),
        (args(&[&source.join(&unfinished), &source.join("whole"), &daemon.url("e/")]), 1),
        (args(&[&"-rn", &slash(&source), &served]), 2),
        (args(&[&"-r", &"--delete", &"--exclude", &"*.bak", &slash(&source), &served]), 2),
    ] {
        let dry_run = list[0] == "-rn";
        let out = try_cp(&lab, &list);
        assert_eq!((out.status.code(), &parse(&out)["failed"]), (Some(1), &failed.into()));
        if dry_run {
            continue;
        }
        assert!(stderr(&out).contains("reserved file name"), "{}", stderr(&out));
        assert!(
            served.join("whole").exists() && !served.join(&unfinished).exists() && !served.join(&directory).exists()
        );
        fs::remove_file(served.join("whole")).unwrap();
    }
    // An excluded one does not fail the copy. A directory is never a file of a running job, so a mirror removes it.
    let excluded = lab.mkdir("excluded");
    fs::create_dir(excluded.join(format!(".other.tw-{}", "0123abcd".repeat(4)))).unwrap();
    write(excluded.join(&unfinished), "half");
    fs::remove_dir_all(source.join(&directory)).unwrap();
    fs::remove_file(source.join(&unfinished)).unwrap();
    cp(&lab, &args(&[&"-r", &"--delete", &slash(&source), &excluded]));
    assert_eq!(names(&excluded), [&unfinished[..], "whole"]);
    write(source.join(&directory).join("f"), "precious");
    cp(&lab, &args(&[&"-r", &"--exclude", &".*.tw-*", &slash(&source), &lab.path("without")]));
    assert_eq!(names(&lab.path("without")), ["whole"]);
}

#[test]
fn what_was_changed_between_attempts_is_not_believed() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    write(source.join("f1"), &"one".repeat(1000));
    fs::write(source.join("f2"), noise(32 << 20, 1)).unwrap();
    let daemon = lab.serve(&served);
    let command = |extra: &[&str]| {
        let mut list: Vec<OsString> = extra.iter().map(OsString::from).collect();
        list.extend(args(&[&"-r", &"--bwlimit", &"20M", &slash(&source), &daemon.url("e/")]));
        list
    };
    let interrupt = |extra: &[&str]| {
        let mut child = thruway(lab.dir.path()).args(["cp", "--quiet"]).args(command(extra)).spawn().unwrap();
        while !served.join("f1").exists() {
            assert!(child.try_wait().unwrap().is_none(), "over before it was interrupted");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    };
    interrupt(&[]);
    write(served.join("f1"), &"two".repeat(1000));
    assert_eq!(cp(&lab, &command(&[]))["verified"], true);
    assert_same(&source, &served, Compare::Content);
    // Another result is asked for: what was done before does not count.
    fs::remove_dir_all(&served).unwrap();
    fs::create_dir(&served).unwrap();
    let daemon = lab.serve(&served);
    mode(source.join("f1"), 0o600);
    let command = |extra: &[&str]| {
        let mut list: Vec<OsString> = extra.iter().map(OsString::from).collect();
        list.extend(args(&[&"-r", &"--bwlimit", &"20M", &slash(&source), &daemon.url("e/")]));
        list
    };
    let mut child = thruway(lab.dir.path()).args(["cp", "--quiet"]).args(command(&[])).spawn().unwrap();
    while !served.join("f1").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    cp(&lab, &command(&["-p"]));
    let times = |dir: &Path| fs::metadata(dir.join("f1")).unwrap().modified().unwrap();
    assert_eq!((mode_of(served.join("f1")), times(&served)), (0o600, times(&source)));
}

#[test]
fn files_of_one_name_do_not_overwrite_each_other() {
    let lab = Lab::new();
    write(lab.path("a/x"), "from a");
    write(lab.path("b/x"), "from b");
    let target = lab.mkdir("target");
    let out = try_cp(&lab, &args(&[&lab.path("a/x"), &lab.path("b/x"), &target]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("would both become 'x'") && names(&target).is_empty(), "{}", stderr(&out));
    let out = try_cp(&lab, &args(&[&"-r", &slash(&lab.path("a")), &slash(&lab.path("b")), &target]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("not overwriting"), "{}", stderr(&out));
    assert_eq!(fs::read_to_string(target.join("x")).unwrap(), "from a");
    // Nor does a directory take the place of a file, or a file that of a directory.
    write(lab.path("c/x/inner"), "from c");
    for (first, second, kept) in [("a", "c", "x"), ("c", "a", "x/inner")] {
        let target = lab.mkdir(&format!("target-{first}"));
        let (first, second) = (slash(&lab.path(first)), slash(&lab.path(second)));
        let out = try_cp(&lab, &args(&[&"-r", &"--delete", &first, &second, &target]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("not overwriting"), "{}", stderr(&out));
        assert!(target.join(kept).is_file(), "{kept}");
    }
    // Directories become one.
    write(lab.path("d/x/other"), "from d");
    let both = lab.mkdir("both");
    cp(&lab, &args(&[&"-r", &slash(&lab.path("c")), &slash(&lab.path("d")), &both]));
    assert_eq!(names(&both.join("x")), ["inner", "other"]);
}

#[test]
fn permissions_of_what_is_there_are_not_widened() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("o1"), lab.mkdir("target"));
    write(source.join("f"), "new");
    write(source.join("d/x"), "x");
    write(target.join("o1/f"), "old");
    fs::create_dir(target.join("o1/d")).unwrap();
    for (path, bits) in [("o1/f", 0o600), ("o1/d", 0o2770), ("o1", 0o700)] {
        mode(target.join(path), bits);
    }
    cp(&lab, &args(&[&"-r", &source, &target]));
    for (path, bits) in [("o1/f", 0o600), ("o1/d", 0o2770), ("o1", 0o700)] {
        assert_eq!(mode_of(target.join(path)), bits, "{path}");
    }
    assert_eq!(fs::read_to_string(target.join("o1/f")).unwrap(), "new");
    // The top of the contents gets its attributes as well, where they are asked for.
    mode(&source, 0o710);
    cp(&lab, &args(&[&"-rp", &slash(&source), &lab.path("fresh")]));
    assert_eq!(mode_of(lab.path("fresh")), 0o710);
}

/// Sets an access control list: the rights of the owner, of [`NOBODY`], of the owning group, the mask, and the rights of others.
fn set_acl(path: &Path, name: &str, [owner, nobody, group, mask, others]: [u8; 5]) {
    let entry = |who, permissions| Entry { who, permissions };
    let mut entries = vec![entry(Who::Owner, owner), entry(Who::OwningGroup, group), entry(Who::Others, others)];
    if mask > 0 {
        entries.extend([entry(Who::User(NOBODY), nobody), entry(Who::Mask, mask)]);
    }
    let value = Acl::new(entries).unwrap().encode();
    let name = format!("system.posix_acl_{name}");
    rustix::fs::setxattr(path, name, &value, rustix::fs::XattrFlags::empty()).unwrap();
}

/// Permissions and access control lists of an entry.
fn rights(path: &Path) -> (u32, [Option<Vec<u8>>; 2]) {
    let list = |name: &str| {
        let mut value = vec![0; 4096];
        let len = rustix::fs::lgetxattr(path, format!("system.posix_acl_{name}"), &mut value[..]).ok()?;
        Some(value[..len].to_vec())
    };
    (mode_of(path), ["access", "default"].map(list))
}

#[test]
fn copies_with_p_have_the_access_control_lists_of_the_source() {
    let lab = Lab::new();
    mode(lab.dir.path(), 0o755);
    let source = lab.mkdir("source");
    write(source.join("private"), "secret");
    write(source.join("dir/private"), "secret");
    write(source.join("dir/large"), &"secret".repeat(1 << 20));
    write(source.join("listed"), "of more users");
    rustix::fs::mkfifoat(rustix::fs::CWD, source.join("fifo"), rustix::fs::Mode::from_raw_mode(0o640)).unwrap();
    let entries = ["private", "dir/private", "dir/large", "listed", "fifo", "dir", "team", "open"];
    for name in &entries[..5] {
        mode(source.join(name), 0o640);
    }
    mode(source.join("dir"), 0o750);
    for (name, permissions) in [("team", 0o750), ("open", 0o755)] {
        fs::create_dir(source.join(name)).unwrap();
        mode(source.join(name), permissions);
    }
    write(source.join("open/f"), "x");
    set_acl(&source.join("listed"), "access", [6, 4, 0, 4, 0]);
    set_acl(&source.join("team"), "default", [7, 5, 5, 5, 0]);
    let reads = |path: &Path| {
        let mut cat = Command::new("cat");
        std::os::unix::process::CommandExt::uid(std::os::unix::process::CommandExt::gid(&mut cat, NOBODY), NOBODY);
        cat.arg(path).output().unwrap().status.success()
    };
    for (number, default) in [[7, 7, 7, 7, 7], [7, 0, 0, 0, 0]].into_iter().enumerate() {
        let served = lab.mkdir(&format!("served{number}"));
        set_acl(&served, "default", default);
        // Another owner of a directory can set such a list at any time.
        let owned = served.join("owned");
        fs::create_dir(&owned).unwrap();
        std::os::unix::fs::chown(&owned, Some(NOBODY), None).unwrap();
        let daemon = lab.serve(&served);
        for target in [os(served.join("local")), os(daemon.url("e/remote")), os(owned.join("copy"))] {
            cp(&lab, &args(&[&"-a", &source, &target]));
        }
        for copy in [served.join("local"), served.join("remote"), owned.join("copy")] {
            for name in entries.iter().chain(&["open/f", ""]) {
                assert_eq!(rights(&copy.join(name)), rights(&source.join(name)), "{name} of {}", copy.display());
            }
            for name in &entries[..3] {
                assert!(!reads(&copy.join(name)), "{name} of {}", copy.display());
            }
            assert!(reads(&copy.join("listed")), "{}", copy.display());
        }
        // Without -p, the list of the directory applies, as with cp.
        cp(&lab, &args(&[&source.join("private"), &served.join("new")]));
        let (_, [access, _]) = rights(&served.join("new"));
        assert_eq!(access.is_some(), number == 0);
        // A file that is replaced keeps its permissions.
        write(owned.join("kept"), "x");
        mode(owned.join("kept"), 0o640);
        rustix::fs::removexattr(owned.join("kept"), "system.posix_acl_access").ok();
        mode(owned.join("kept"), 0o640);
        cp(&lab, &args(&[&source.join("open/f"), &owned.join("kept")]));
        assert_eq!(rights(&owned.join("kept")), (0o640, [None, None]));
    }
}

#[test]
fn copies_without_p_inherit_default_lists_as_new_entries_do() {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    let lab = Lab::new();
    let source = lab.mkdir("source");
    for (name, len) in [("small", 1000), ("dir/large", 600_000), ("dir/inner/small", 10)] {
        write(source.join(name), &"x".repeat(len));
    }
    let sparse = fs::File::create(source.join("dir/sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    let paths = ["", "small", "dir", "dir/large", "dir/inner", "dir/inner/small", "dir/sparse"];
    for (round, (list, umask, bits)) in
        [([7, 7, 0, 4, 0], "002", 0o666), ([7, 0, 5, 7, 2], "077", 0o777), ([5, 7, 7, 7, 7], "000", 0o640)]
            .into_iter()
            .enumerate()
    {
        for path in paths {
            mode(source.join(path), if source.join(path).is_dir() { bits | 0o711 } else { bits });
        }
        let into = |name: &str| {
            let into = lab.mkdir(&format!("{name}{round}"));
            set_acl(&into, "default", list);
            into
        };
        let (expected, copy, pushed) = (into("expected").join("new"), into("copy"), into("pushed"));
        for path in paths {
            // The kernel does not apply the umask below a default list.
            let path = (source.join(path), expected.join(path));
            match path.0.is_dir() {
                true => fs::DirBuilder::new().mode(mode_of(path.0)).create(path.1).unwrap(),
                false => {
                    drop(fs::OpenOptions::new().write(true).create(true).mode(mode_of(path.0)).open(path.1).unwrap())
                }
            }
        }
        let run = |script: String| assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        let thruway = format!("umask {umask} && XDG_CONFIG_HOME={} {THRUWAY}", lab.dir.path().display());
        run(format!("{thruway} cp --quiet -r {} {}/new", source.display(), copy.display()));
        // Into a directory that is made first.
        run(format!("{thruway} cp --quiet -r {}/ {}/contents/", source.display(), copy.display()));
        let options = ["serve", "--json", "--listen", "127.0.0.1:0", "--export"];
        let mut daemon = Command::new("sh");
        daemon.args(["-c", &format!("umask {umask} && exec \"$@\""), "sh", THRUWAY]).args(options);
        let daemon = Daemon::start_by(daemon.arg(export("e", &pushed, "")));
        cp(&lab, &args(&[&"-r", &source, &daemon.url("e/new")]));
        for path in paths {
            let expected = rights(&expected.join(path));
            for copy in [copy.join("new"), copy.join("contents"), pushed.join("new")] {
                assert_eq!(rights(&copy.join(path)), expected, "{} {list:?} {umask}", copy.join(path).display());
            }
        }
    }
    // An existing file keeps its rights, whatever its directory says.
    for name in ["small", "dir/large"] {
        let existing = lab.path("copy0/new").join(name);
        mode(&existing, 0o600);
        cp(&lab, &args(&[&source.join(name), &existing]));
        assert_eq!(mode_of(&existing), 0o600);
    }
}

#[test]
fn attributes_that_only_the_copy_has_are_removed_with_p() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for name in ["f", "dir/g"] {
        write(source.join(name), name);
    }
    let daemon = lab.serve(&served);
    let none = rustix::fs::XattrFlags::empty();
    for (copy, target) in [(lab.path("local"), os(lab.path("local"))), (served.join("new"), os(daemon.url("e/new")))] {
        rustix::fs::setxattr(source.join("f"), "user.kept", b"v", none).unwrap();
        let update = |option: &str| {
            let result = cp(&lab, &args(&[&"-au", &option, &slash(&source), &target]));
            items(&result)
        };
        cp(&lab, &args(&[&"-a", &slash(&source), &target]));
        assert!(update("-n").is_empty());
        rustix::fs::setxattr(copy.join("f"), "user.extra", b"v", none).unwrap();
        rustix::fs::setxattr(copy.join("dir"), "user.extra", b"v", none).unwrap();
        set_acl(&copy.join("dir/g"), "access", [6, 4, 4, 4, 4]);
        // Not every source can list these, so they stay.
        rustix::fs::setxattr(copy.join("f"), "trusted.extra", b"v", none).unwrap();
        for option in ["-n", "-v"] {
            assert_eq!(update(option), ["dir attributes", "dir/g attributes", "f attributes"], "{option}");
        }
        assert!(update("-n").is_empty());
        assert_eq!(rights(&copy.join("dir/g")), rights(&source.join("dir/g")));
        let list = |path: &Path| {
            let mut names = vec![0; 4096];
            let len = rustix::fs::listxattr(path, &mut names[..]).unwrap();
            String::from_utf8(names[..len].to_vec()).unwrap()
        };
        let kept = list(&copy.join("f"));
        assert!(kept.contains("user.kept") && kept.contains("trusted.extra"), "{kept:?}");
        assert!(!kept.contains("user.extra") && !list(&copy.join("dir")).contains("user.extra"), "{kept:?}");
    }
    // A key without the right to replace changes nothing that exists; what it creates has the attributes of the source.
    let (key, daemon) = lab.serve_to_key("read,create", &served);
    let copy = served.join("new");
    rustix::fs::setxattr(copy.join("f"), "user.extra", b"v", none).unwrap();
    set_acl(&copy, "default", [7, 7, 7, 7, 7]);
    set_acl(&copy.join("dir"), "default", [7, 7, 7, 7, 7]);
    let before = (rights(&copy), rights(&copy.join("dir")));
    for name in ["dir/created", "created/inner"] {
        write(source.join(name), "secret");
        mode(source.join(name), 0o640);
    }
    cp(&lab, &args(&[&"-au", &"--key", &key, &slash(&source), &daemon.url("e/new")]));
    for name in ["dir/created", "created/inner", "created"] {
        assert_eq!(rights(&copy.join(name)), rights(&source.join(name)), "{name}");
    }
    assert_eq!((rights(&copy), rights(&copy.join("dir"))), before);
    assert!(thruway_fs::xattr::has(fs::File::open(copy.join("f")).unwrap().as_fd(), b"user.extra", b"v"));
}

/// Reasons and paths of the items of a copy, sorted.
fn items(result: &serde_json::Value) -> Vec<String> {
    let item = |item: &serde_json::Value| format!("{} {}", item["path"], item["reason"]).replace('"', "");
    let mut items: Vec<String> = result["items"].as_array().unwrap().iter().map(item).collect();
    items.sort();
    items
}

fn mkfifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::from(0o644), 0).unwrap();
}

#[test]
fn equal_links_and_pipes_are_not_made_again() {
    let lab = Lab::new();
    let (source, copy) = (lab.mkdir("source"), lab.path("copy"));
    symlink("target", source.join("link")).unwrap();
    mkfifo(&source.join("pipe"));
    for name in ["link", "pipe"] {
        fs::hard_link(source.join(name), source.join(format!("{name}2"))).unwrap();
    }
    let numbers = || {
        let number = |name: &str| fs::symlink_metadata(copy.join(name)).unwrap().ino();
        ["link", "link2", "pipe", "pipe2"].map(number)
    };
    cp(&lab, &args(&[&"-a", &slash(&source), &copy]));
    let before = numbers();
    for option in ["-n", "-v", "-v"] {
        let result = cp(&lab, &args(&[&"-a", &option, &slash(&source), &copy]));
        assert!(items(&result).is_empty(), "{result}");
        assert_eq!(numbers(), before);
    }
    // Without -p, their attributes do not count.
    mode(copy.join("pipe"), 0o600);
    let out = try_cp(&lab, &args(&[&"-r", &slash(&source), &copy]));
    assert!(out.status.code() == Some(1) && stderr(&out).contains("pipe"), "pipes need -p: {}", stderr(&out));
    assert_eq!((numbers(), mode_of(copy.join("pipe"))), (before, 0o600));
    // With -p they do, and a link with another target is another entry.
    fs::remove_file(source.join("link2")).unwrap();
    symlink("elsewhere", source.join("link2")).unwrap();
    let result = cp(&lab, &args(&[&"-a", &"-v", &slash(&source), &copy]));
    assert_eq!(items(&result), ["link2 target differs", "pipe attributes", "pipe2 hard link"]);
    assert_same(&source, &copy, Compare::Everything);
}

#[test]
fn newer_files_with_the_names_of_hard_links_are_kept_by_update() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    let daemon = lab.serve(&served);
    // Either name can come first.
    for (round, name) in ["n2", "m1", "m3", "q7", "zz", "a", "b"].into_iter().enumerate() {
        let source = lab.mkdir(&format!("source{round}"));
        for (one, other) in [("n", name), ("x", &*format!("x{name}"))] {
            write(source.join(one), "src\n");
            set_modified(&source.join(one), 1_000_000);
            fs::hard_link(source.join(one), source.join(other)).unwrap();
        }
        for by_daemon in [false, true] {
            let copy = served.join(format!("copy{round}{by_daemon}"));
            let target = if by_daemon { daemon.url(&format!("e/copy{round}true")) } else { os(&copy) };
            write(copy.join("n"), "NEW\n");
            write(copy.join("x"), "NW1\n");
            write(copy.join(format!("x{name}")), "NW2\n");
            for option in ["-aunv", "-auv", "-auv"] {
                let result = cp(&lab, &args(&[&option, &slash(&source), &target]));
                assert!(result["skipped"].as_u64() >= Some(3), "{result}");
            }
            let read = |name: &str| fs::read_to_string(copy.join(name)).unwrap();
            let found = [read("n"), read(name), read("x"), read(&format!("x{name}"))];
            assert_eq!(found, ["NEW\n", "src\n", "NW1\n", "NW2\n"], "{name} {by_daemon}");
            // Older ones are replaced, and linked again.
            for file in ["n", "x", &*format!("x{name}")] {
                set_modified(&copy.join(file), 900_000);
            }
            cp(&lab, &args(&[&"-au", &slash(&source), &target]));
            assert_same(&source, &copy, Compare::Everything);
            let inode = |name: &str| fs::metadata(copy.join(name)).unwrap().ino();
            assert_eq!((inode("n"), inode("x")), (inode(name), inode(&format!("x{name}"))));
        }
    }
}

#[test]
fn names_of_a_file_do_not_become_links_to_an_entry_that_the_copy_has_not_put_there() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    write(source.join("z"), "src");
    for name in ["a", "y"] {
        fs::hard_link(source.join("z"), source.join(name)).unwrap();
    }
    let names = ["a", "y", "z"];
    // One of these rounds is that of the first name, which fails.
    for blocked in names {
        let copy = lab.mkdir(&format!("copy-{blocked}"));
        for name in names {
            write(copy.join(name), "OLD");
        }
        fs::remove_file(copy.join(blocked)).unwrap();
        write(copy.join(blocked).join("inside"), "in the way");
        let out = try_cp(&lab, &args(&[&"-a", &slash(&source), &copy]));
        assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
        let others: Vec<String> =
            names.iter().filter(|n| **n != blocked).map(|n| fs::read_to_string(copy.join(n)).unwrap()).collect();
        assert!(others == ["OLD", "OLD"] || others == ["src", "src"], "{blocked}: {others:?}");
    }
    // Somebody replaces the first name during the copy.
    // In a directory of its own, which is read after these files.
    fs::create_dir(source.join("sub")).unwrap();
    fs::write(source.join("sub/big"), noise(12 << 20, 1)).unwrap();
    let copy = lab.path("replaced");
    let command = args(&[&"-a", &"--bwlimit", &"4M", &slash(&source), &copy]);
    let mut child = thruway(lab.dir.path()).args(["cp", "--quiet"]).args(&command).spawn().unwrap();
    let first = loop {
        assert!(child.try_wait().unwrap().is_none(), "it ended before the file was replaced");
        if let Some(first) = names.iter().find(|name| copy.join(name).exists()) {
            break copy.join(first);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    fs::write(lab.path("other"), "SOMEONE ELSE").unwrap();
    fs::rename(lab.path("other"), &first).unwrap();
    assert!(!child.wait().unwrap().success());
    let found = names.map(|name| fs::read_to_string(copy.join(name)).unwrap_or_default());
    assert_eq!(found.iter().filter(|content| *content == "SOMEONE ELSE").count(), 1, "{found:?}");
    // The next run repairs it.
    cp(&lab, &args(&[&"-a", &slash(&source), &copy]));
    assert_same(&source, &copy, Compare::Everything);
}

#[test]
fn delete_removes_further_names_of_linked_files() {
    let lab = Lab::new();
    let (source, copy) = (lab.mkdir("source"), lab.path("copy"));
    write(source.join("report"), "data");
    symlink("x", source.join("link")).unwrap();
    for name in ["report", "link"] {
        fs::hard_link(source.join(name), source.join(format!("{name}-latest"))).unwrap();
    }
    cp(&lab, &args(&[&"-a", &slash(&source), &copy]));
    for name in ["report", "link"] {
        fs::rename(source.join(format!("{name}-latest")), source.join(format!("{name}-current"))).unwrap();
    }
    let result = cp(&lab, &args(&[&"-au", &"--delete", &slash(&source), &copy]));
    assert_eq!((&result["deleted"], names(&copy)), (&2.into(), names(&source)));
    assert_same(&source, &copy, Compare::Everything);
}

#[test]
fn a_directory_is_private_until_it_has_the_group_of_the_source() {
    let lab = Lab::new();
    let (source, into) = (lab.mkdir("source"), lab.mkdir("into"));
    fs::create_dir(source.join("d")).unwrap();
    fs::write(source.join("d/big"), noise(12 << 20, 1)).unwrap();
    write(source.join("d/small"), "x");
    for path in ["d", "d/small", "d/big"] {
        std::os::unix::fs::chown(source.join(path), None, Some(54_321)).unwrap();
        mode(source.join(path), if path == "d" { 0o750 } else { 0o640 });
    }
    std::os::unix::fs::chown(&into, None, Some(54_322)).unwrap();
    mode(&into, 0o2775);
    let copy = into.join("new");
    let command = args(&[&"-a", &"--bwlimit", &"4M", &slash(&source), &copy]);
    let mut child = thruway(lab.dir.path()).args(["cp", "--quiet"]).args(&command).spawn().unwrap();
    while !copy.join("d").exists() || names(&copy.join("d")).is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended too early");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(mode_of(copy.join("d")) & 0o777, 0o700);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(mode_of(copy.join("d")) & 0o777, 0o700);
    cp(&lab, &command);
    assert_same(&source, &copy, Compare::Everything);
}

#[test]
fn a_file_that_somebody_else_puts_under_the_name_gets_no_content() {
    const NOBODY: u32 = 65_534;
    let lab = Lab::new();
    let plant = |path: &Path| {
        write(path, "planted");
        mode(path, 0o666);
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    };
    let owned = |path: &Path| (fs::metadata(path).unwrap().uid(), mode_of(path));
    let secrets = [("small", noise(1000, 1)), ("large", noise(12 << 20, 2))];
    for (name, content) in &secrets {
        fs::write(lab.path(name), content).unwrap();
        mode(lab.path(name), 0o600);
    }
    let (shared, plain) = (lab.mkdir("shared"), lab.mkdir("plain"));
    mode(&shared, 0o1777);
    let own = fs::metadata(&plain).unwrap().uid();
    for (name, content) in &secrets {
        // In a directory for all users with the sticky bit, before the copy begins.
        plant(&shared.join(name));
        cp(&lab, &args(&[&lab.path(name), &shared]));
        assert_eq!((owned(&shared.join(name)), &fs::read(shared.join(name)).unwrap()), ((own, 0o600), content));
        // In other directories, a file keeps owner and mode, as with cp.
        plant(&plain.join(name));
        cp(&lab, &args(&[&lab.path(name), &plain]));
        assert_eq!(owned(&plain.join(name)), (NOBODY, 0o666));
        fs::remove_file(plain.join(name)).unwrap();
    }
    // After the copy has begun.
    let command = args(&[&"--bwlimit", &"4M", &lab.path("large"), &plain]);
    let mut child = thruway(lab.dir.path()).args(["cp", "--quiet"]).args(&command).spawn().unwrap();
    while !names(&plain).iter().any(|name| name.starts_with(".large")) {
        assert!(child.try_wait().unwrap().is_none(), "it ended before the other file came");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    plant(&plain.join("large"));
    assert!(child.wait().unwrap().success());
    assert_eq!(owned(&plain.join("large")), (own, 0o600));
    // A link of another user is not kept: its target could change.
    let links = lab.mkdir("links");
    for dir in [&links, &shared] {
        symlink("target", dir.join("link")).unwrap();
    }
    std::os::unix::fs::lchown(shared.join("link"), Some(NOBODY), None).unwrap();
    cp(&lab, &args(&[&"-r", &slash(&links), &shared]));
    assert_eq!(fs::symlink_metadata(shared.join("link")).unwrap().uid(), own);
    // A user namespace may not have the owner.
    plant(&plain.join("small"));
    let script = "exec \"$0\" cp --quiet \"$1\" \"$2\"";
    let mut command = Command::new("unshare");
    command.args(["-Ur", "sh", "-c", script, THRUWAY]).arg(lab.path("small")).arg(plain.join("small"));
    let out = command.env("XDG_CONFIG_HOME", lab.dir.path()).output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(fs::read(plain.join("small")).unwrap(), secrets[0].1);
}

#[test]
fn an_equal_copy_is_not_touched() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    write(source.join("dir/file"), "x");
    fs::hard_link(source.join("dir/file"), source.join("linked")).unwrap();
    symlink("dir", source.join("link")).unwrap();
    mkfifo(&source.join("pipe"));
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(source.join("dir/file"), "user.kept", b"v", none).unwrap();
    set_acl(&source.join("dir"), "default", [7, 5, 5, 7, 0]);
    let daemon = lab.serve(&served);
    for (copy, target) in [(lab.path("local"), os(lab.path("local"))), (served.join("new"), os(daemon.url("e/new")))] {
        let update = args(&[&"-auv", &"--delete", &slash(&source), &target]);
        cp(&lab, &update);
        let changed = || {
            let paths = ["", "dir", "dir/file", "linked", "link", "pipe"];
            paths
                .map(|path| fs::symlink_metadata(copy.join(path)).unwrap())
                .map(|meta| (meta.ctime(), meta.ctime_nsec()))
        };
        let before = changed();
        let result = cp(&lab, &update);
        // The journal is made in the directory above, or in the destination itself.
        assert_eq!((items(&result), &changed()[1..]), (vec![], &before[1..]), "{copy:?}");
        assert_same(&source, &copy, Compare::Everything);
    }
}

#[test]
fn a_dry_run_succeeds_where_a_link_gives_way_to_a_directory() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("d/f"), "new");
    write(lab.path("elsewhere/f"), "old");
    symlink("../elsewhere", target.join("d")).unwrap();
    for options in ["-rnv", "-rv"] {
        let result = cp(&lab, &args(&[&options, &slash(&source), &target]));
        assert_eq!(items(&result), ["d type differs", "d/f new"], "{options}");
    }
    assert_eq!(fs::read(lab.path("elsewhere/f")).unwrap(), b"old");
    assert_same(&source, &target, Compare::Content);
}

#[test]
fn a_key_that_may_only_create_completes_copies_with_links_and_pipes() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    for i in 0..20 {
        symlink(format!("target{i}"), source.join(format!("link{i:02}"))).unwrap();
    }
    mkfifo(&source.join("pipe"));
    fs::hard_link(source.join("link00"), source.join("linked")).unwrap();
    fs::hard_link(source.join("pipe"), source.join("pipe too")).unwrap();
    for i in 0..400 {
        fs::write(source.join(format!("file{i}")), noise(20_000, i)).unwrap();
    }
    for rights in ["create", "read,create", "create,replace"] {
        let served = lab.mkdir(&format!("served-{rights}"));
        let (key, daemon) = lab.serve_to_key(rights, &served);
        let to = |name: &str, more: &[&str]| {
            let mut list = args(&[&"-a", &"--retries", &"0", &"--key", &key]);
            list.extend(more.iter().map(os));
            list.extend([slash(&source), daemon.url(&format!("e/{name}"))]);
            list
        };
        let made = served.join("new");
        let slow = to("new", &["--quiet", "--bwlimit", "1M"]);
        let mut child = thruway(lab.dir.path()).arg("cp").args(slow).spawn().unwrap();
        let links = || names(&made).iter().filter(|name| name.starts_with("link")).count();
        while !made.exists() || links() < 5 {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it was interrupted");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(names(&made).iter().filter(|name| name.starts_with("file")).count() < 400);
        cp(&lab, &to("new", &[]));
        assert_same(&source, &made, Compare::Everything);
        if rights == "create,replace" {
            continue;
        }
        // Equal entries of others count as done only for a key that may read them.
        fs::create_dir(served.join("others")).unwrap();
        symlink("target0", served.join("others/link00")).unwrap();
        symlink("other", served.join("others/link01")).unwrap();
        mkfifo(&served.join("others/pipe"));
        // Of another user, who could change it.
        symlink("target2", served.join("others/link02")).unwrap();
        std::os::unix::fs::lchown(served.join("others/link02"), Some(65_534), None).unwrap();
        for option in ["-n", "-v"] {
            let out = try_cp(&lab, &to("others", &[option]));
            let text = stderr(&out);
            assert!(out.status.code() == Some(1) && text.contains("link01: there is an entry"), "{text}");
            assert_eq!(text.contains("link00: there is an entry"), rights == "create", "{text}");
            assert_eq!(text.matches("no right to replace").count(), if rights == "create" { 4 } else { 2 }, "{text}");
        }
        assert_eq!(fs::read_link(served.join("others/link01")).unwrap(), Path::new("other"));
    }
}

#[test]
fn a_newer_file_that_is_skipped_keeps_its_attributes() {
    let lab = Lab::new();
    let (source, copy) = (lab.mkdir("source"), lab.path("copy"));
    for name in ["newer", "equal"] {
        write(source.join(name), "content");
        set_modified(&source.join(name), 1_000_000);
    }
    cp(&lab, &args(&[&"-a", &slash(&source), &copy]));
    set_modified(&copy.join("newer"), 2_000_000);
    for name in ["newer", "equal"] {
        mode(copy.join(name), 0o600);
        mode(source.join(name), 0o644);
    }
    for option in ["-n", "-v"] {
        let result = cp(&lab, &args(&[&"-au", &option, &slash(&source), &copy]));
        assert_eq!((items(&result), &result["skipped"]), (vec!["equal attributes".into()], &2.into()), "{result}");
    }
    assert_eq!((mode_of(copy.join("newer")), mode_of(copy.join("equal"))), (0o600, 0o644));
    assert_eq!(fs::metadata(copy.join("newer")).unwrap().mtime(), 2_000_000);
}

#[test]
fn an_attribute_that_cannot_be_kept_does_not_cost_the_file() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    write(source.join("doc"), "content");
    let set = Command::new("setfattr").args(["-n", "user.origin", "-v", "http://x"]).arg(source.join("doc")).status();
    assert!(set.unwrap().success());
    mode(source.join("doc"), 0o444);
    cp(&lab, &args(&[&"-rp", &source, &lab.path("copy")]));
    assert_same(&source, &lab.path("copy"), Compare::Everything);
    // ramfs has no attributes of users.
    let target = lab.mkdir("ramfs");
    let script = "mount -t ramfs none \"$1\" && \"$0\" cp --quiet -rp \"$2\" \"$1\"/ && exit 9; cat \"$1\"/source/doc";
    let out = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, THRUWAY])
        .args([&target, &source])
        .env("XDG_CONFIG_HOME", lab.dir.path())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout).trim_end(), "content", "{}", stderr(&out));
    assert_eq!(stderr(&out).matches("not supported by the destination").count(), 1, "{}", stderr(&out));
}

#[test]
fn names_of_one_file_stay_that_however_often_they_are_copied() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    write(source.join("a"), "content");
    for name in ["b", "c", "d"] {
        fs::hard_link(source.join("a"), source.join(name)).unwrap();
    }
    let copy = lab.path("copy");
    for options in [&["-rp"][..], &["-rp", "--update"], &["-rp", "--update", "--delete"], &["-rp"]] {
        let mut list: Vec<OsString> = options.iter().map(OsString::from).collect();
        list.extend(args(&[&slash(&source), &copy]));
        cp(&lab, &list);
        assert_same(&source, &copy, Compare::Everything);
        let inodes: Vec<u64> = ["a", "b", "c", "d"].map(|name| fs::metadata(copy.join(name)).unwrap().ino()).into();
        assert!(inodes.iter().all(|inode| *inode == inodes[0]), "{options:?}: {inodes:?}");
    }
    // A directory whose name is one of ours, on the command line.
    let unfinished = lab.path(&format!(".f.tw-{}", "0123abcd".repeat(4)));
    write(unfinished.join("x"), "y");
    let out = try_cp(&lab, &args(&[&"-r", &unfinished, &lab.path("source/a"), &lab.mkdir("into")]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("reserved file name") && lab.path("into/a").exists(), "{}", stderr(&out));
}

#[test]
fn what_can_never_be_copied_leaves_no_journal_behind() {
    let lab = Lab::new();
    let (source, copy) = (lab.mkdir("source"), lab.path("copy"));
    write(source.join("file"), "x");
    assert!(Command::new("mkfifo").arg(source.join("pipe")).status().unwrap().success());
    let journals = || {
        let names = fs::read_dir(&copy).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with(".thruway-")).collect::<Vec<_>>()
    };
    let out = try_cp(&lab, &args(&[&"-r", &slash(&source), &copy]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("pipe: not a file, directory or link"), "{}", stderr(&out));
    assert_eq!(journals(), [""; 0]);
    // What another copy has left in a source is an error, and the rest is mirrored.
    fs::remove_file(source.join("pipe")).unwrap();
    let journal = format!(".thruway-{}.journal", "0123abcd".repeat(4));
    write(source.join(&journal), "");
    write(copy.join("old"), "");
    let out = try_cp(&lab, &args(&[&"-r", &"--delete", &slash(&source), &copy]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("not copied: reserved file name"), "{}", stderr(&out));
    assert_eq!(journals(), [""; 0]);
    assert!(!copy.join("old").exists() && copy.join("file").exists() && !copy.join(&journal).exists());
}

#[test]
fn attributes_that_one_attempt_could_not_keep_are_told_by_the_next() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    write(source.join("a-small"), "content");
    for (name, seed) in [("b-large", 1), ("c-large", 2), ("d-large", 3), ("e-large", 4)] {
        fs::write(source.join(name), noise(6 << 20, seed)).unwrap();
    }
    for name in ["a-small", "b-large"] {
        let mut set = Command::new("setfattr");
        set.args(["-n", "user.origin", "-v", "http://x"]).arg(source.join(name));
        assert!(set.status().unwrap().success());
    }
    // ramfs has no attributes of users. The first attempt is killed when two files are in place.
    let target = lab.mkdir("ramfs");
    let script = "mount -t ramfs none \"$1\" || exit 9
        strace -f -qq -o /dev/null -e trace=renameat2 -e inject=renameat2:signal=KILL:when=3 \
            \"$0\" cp --quiet -rp \"$2\"/ \"$1\"/ 2>/dev/null && exit 8
        [ \"$(ls \"$1\" | wc -l)\" = 2 ] || exit 4
        \"$0\" cp --json -rp \"$2\"/ \"$1\"/ && exit 7
        # What has been told is still known, and nothing is sent again, the next time either.
        for again in 1 2; do
            \"$0\" cp --json -rp \"$2\"/ \"$1\"/ 2>/dev/null | grep -q '\"bytes\":0,' || exit 5
        done
        for file in \"$2\"/*; do cmp \"$1\"/${file##*/} \"$file\" || exit 6; done";
    let out = Command::new("unshare")
        .args(["--mount", "bash", "-c", script, THRUWAY])
        .args([&target, &source])
        .env("XDG_CONFIG_HOME", lab.dir.path())
        .output()
        .unwrap();
    assert!(out.status.success(), "{:?}: {}", out.status, stderr(&out));
    assert!(stderr(&out).contains("not supported by the destination"), "{}", stderr(&out));
    assert!(parse(&out)["resumed_bytes"].as_u64().unwrap() > 0, "what was in place was not sent again");
}

#[test]
fn a_pipe_keeps_its_mode_and_small_files_their_holes() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.path("target"));
    assert!(Command::new("mkfifo").args(["-m", "666"]).arg(source.join("pipe")).status().unwrap().success());
    fs::hard_link(source.join("pipe"), source.join("pipe2")).unwrap();
    let file = fs::File::create(source.join("holey")).unwrap();
    file.set_len(200 << 10).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"end", 190 << 10).unwrap();
    cp(&lab, &args(&[&"-rp", &source, &target]));
    assert_same(&source, &target, Compare::Everything);
    assert_eq!(mode_of(target.join("pipe")), 0o666);
    let inode = |name: &str| fs::symlink_metadata(target.join(name)).unwrap().ino();
    assert_eq!(inode("pipe"), inode("pipe2"));
    assert!(fs::metadata(target.join("holey")).unwrap().blocks() < 64);
}

#[test]
fn few_descriptors_are_enough_for_many_directories() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for i in 0..3000 {
        write(source.join(format!("{i}/f")), "x");
    }
    for i in 0..40 {
        fs::write(source.join(format!("{i}/large")), noise(300 << 10, i)).unwrap();
    }
    let limited = |list: Vec<OsString>| {
        let out = Command::new("sh")
            .args(["-c", "ulimit -Hn 64; exec \"$0\" cp --json \"$@\"", THRUWAY])
            .args(list)
            .env("XDG_CONFIG_HOME", lab.dir.path())
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
    };
    limited(args(&[&"-r", &source, &lab.path("copy")]));
    assert_same(&source, &lab.path("copy"), Compare::Content);
    // Offered, as on a second attempt.
    limited(args(&[&"-ru", &slash(&source), &lab.path("copy")]));
    let daemon = lab.serve(&served);
    limited(args(&[&"-r", &source, &daemon.url("e/")]));
    assert_same(&source, &served.join("source"), Compare::Content);
}

#[test]
fn deep_trees_and_long_paths_are_copied_or_told_and_nothing_else_suffers() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    let deep = "d/".repeat(1500);
    write(source.join(&deep).join("bottom"), "deep");
    // Longer than a path may be: made step by step.
    let long = "n".repeat(200);
    let script = format!("cd \"$1\"; for i in $(seq 24); do mkdir {long}; cd {long}; done; echo x > f");
    assert!(Command::new("sh").args(["-c", &script, "sh"]).arg(&source).status().unwrap().success());
    write(source.join("zz/after"), "still copied");
    let daemon = lab.serve(&served);
    let out = try_cp(&lab, &args(&[&"-r", &slash(&source), &daemon.url("e/")]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("longer than 4096 bytes"), "{}", stderr(&out));
    assert_eq!(fs::read_to_string(served.join(&deep).join("bottom")).unwrap(), "deep");
    assert!(served.join("zz/after").exists());
    // Pulled, which a daemon has to survive.
    try_cp(&lab, &args(&[&"-r", &daemon.url("e/"), &lab.path("back")]));
    assert!(lab.path("back").join(&deep).join("bottom").exists());
    cp(&lab, &args(&[&"-r", &"--delete", &slash(&lab.mkdir("empty")), &daemon.url("e/")]));
    assert_eq!(names(&served), Vec::<String>::new());
}

#[test]
fn long_lists_of_excluded_names_do_not_end_a_mirror() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    for i in 0..20_000 {
        fs::write(source.join(format!("{i:0200}.o")), "").unwrap();
    }
    write(source.join("kept"), "");
    write(target.join("gone"), "");
    cp(&lab, &args(&[&"-r", &"--delete", &"--exclude", &"*.o", &slash(&source), &target]));
    assert_eq!(names(&target), ["kept"]);
}

#[test]
fn limits_of_the_process_are_errors_with_a_remedy() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    write(source.join("small"), "content");
    fs::write(source.join("large"), noise(1 << 20, 1)).unwrap();
    for (limit, status, expected) in [
        ("-v 60000", 1, "ulimit -v"),
        ("-n 20", 1, "ulimit -n"),
        ("-f 100", 1, "large: File too large (os error 27); raise the limit on the size of files (ulimit -f)"),
    ] {
        let copy = lab.path(&limit.replace(' ', ""));
        let script = format!("ulimit {limit}; exec \"$0\" cp --json -r \"$1\" \"$2\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, THRUWAY]).arg(slash(&source)).arg(&copy);
        let out = command.env("THRUWAY_LOG", "warn").stdin(Stdio::null()).output().unwrap();
        assert_eq!(out.status.code(), Some(status), "{limit}: {}", stderr(&out));
        assert!(stderr(&out).contains(expected), "{limit}: {}", stderr(&out));
        assert!(!stderr(&out).contains("trying again"), "{limit}: {}", stderr(&out));
        assert_eq!(copy.join("small").exists(), limit.starts_with("-f"), "{limit}");
    }
}

#[test]
fn a_copy_under_a_limit_on_memory_succeeds_or_names_the_limit() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    (0..100).for_each(|i| write(source.join(i.to_string()), "content"));
    fs::write(source.join("large"), noise(3 << 20, 1)).unwrap();
    let daemon = lab.serve(&served);
    let mut copied = 0;
    // With less, the program is not loaded.
    let is_loaded = |limit: &u32| {
        let script = format!("ulimit -v {limit}; exec \"$0\" --version");
        let out = Command::new("sh").args(["-c", &script, THRUWAY]).output().unwrap();
        out.status.success() || stderr(&out).contains("ulimit -v")
    };
    let least = (20_000..60_000).step_by(1_000).find(is_loaded).expect("the program is loaded with 60 MB");
    for limit in [least, 60_000, 100_000, 102_000, 105_000, 107_500, 110_000, 120_000, 150_000, 200_000, 300_000] {
        for provider in ["iwarp", "tcp"] {
            let script = format!("ulimit -v {limit}; exec \"$0\" cp --json -a --provider {provider} \"$1\" \"$2\"");
            let mut command = Command::new("sh");
            command.args(["-c", &script, THRUWAY]).arg(&source);
            command.arg(daemon.url(&format!("e/{provider}-{limit}"))).env("XDG_CONFIG_HOME", lab.dir.path());
            let out = command.env("THRUWAY_LOG", "warn").stdin(Stdio::null()).output().unwrap();
            let said = stderr(&out);
            assert!(!said.contains("trying again"), "{limit} {provider}: {said}");
            match out.status.code() {
                Some(0) => copied += 1,
                code => assert!(code == Some(1) && said.contains("ulimit -v"), "{limit} {provider}: {out:?}"),
            }
        }
    }
    assert!(copied >= 4, "{copied} copies");
}

#[test]
fn a_daemon_refuses_a_limit_on_open_files_that_one_client_would_reach() {
    let lab = Lab::new();
    let (source, served, disk) = (lab.mkdir("source"), lab.mkdir("served"), lab.path("disk"));
    (0..100).for_each(|i| write(source.join(i.to_string()), "content"));
    fs::write(source.join("large"), noise(20 << 20, 1)).unwrap();
    fs::write(&disk, noise(1 << 20, 1)).unwrap();
    let transfer = vec![os("--listen"), os("127.0.0.1:0"), os("--export"), export("e", &served, "")];
    let nbd = vec![os("--block"), export("d", &disk, ""), os("--nbd"), os("127.0.0.1:0")];
    let nfs = vec![os("--share"), export("s", &source, ""), os("--nfs"), os("127.0.0.1:0")];
    let rdma = ["--iser", "127.0.0.1:0", "--nfs-rdma", "127.0.0.1:0"].map(os).to_vec();
    let all = [&transfer[..], &nbd, &nfs, &rdma].concat();
    for listeners in [transfer, nbd, nfs, all] {
        let with_limit = |limit: u64| {
            let mut command = Command::new("prlimit");
            command.arg(format!("--nofile={limit}:{limit}")).args([THRUWAY, "serve", "--json", "--state"]);
            command.arg(lab.path("state")).args(&listeners).stdin(Stdio::null());
            command
        };
        // The error of a service that cannot start names the remedy; the error of the check also names the limit. If files are
        // missing to a service that has started, the check names a higher limit the next time.
        let (mut limit, mut checks) = (10, 0);
        let (_daemon, announced) = loop {
            let mut child = with_limit(limit).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            if let Ok(announced) = serde_json::from_str::<serde_json::Value>(&line) {
                break (Daemon { child, addr: String::new(), public_key: String::new() }, announced);
            }
            let out = child.wait_with_output().unwrap();
            assert_eq!(out.status.code(), Some(1), "{limit}: {}", stderr(&out));
            assert!(stderr(&out).contains("ulimit -n"), "{limit}: {}", stderr(&out));
            let error = stderr(&out);
            let least = error.split_once("is too low, at least ").and_then(|(_, least)| least.split_once(' '));
            limit = least.map_or(limit + 1, |(least, _)| least.parse().unwrap());
            checks += u32::from(least.is_some());
        };
        assert!(checks > 0, "{listeners:?}: a limit of {limit} has been enough");
        let at = |service: &str| announced[service][0].as_str().map(String::from);
        if let Some(at) = at("listening") {
            for provider in ["auto", "iwarp", "tcp"] {
                let (there, back) = (format!("tw://{at}/e/{provider}"), lab.path(provider));
                cp(&lab, &[os("-r"), os("--provider"), os(provider), source.clone().into(), os(&there)]);
                cp(&lab, &[os("-r"), os("--provider"), os(provider), os(&there), back.clone().into()]);
                assert_same(&source, &back, Compare::Content);
                fs::remove_dir_all(&back).unwrap();
                fs::remove_dir_all(served.join(provider)).unwrap();
            }
        }
        if let Some(at) = at("nbd") {
            let out = Command::new("nbdinfo").arg("--size").arg(format!("nbd://{at}/d")).output().unwrap();
            assert!(out.status.success(), "{}", stderr(&out));
        }
        if let Some(at) = at("nfs") {
            let out = thruway(lab.dir.path()).args(["ls", &format!("nfs://{at}/s")]).output().unwrap();
            assert_eq!(out.stdout.split(|byte| *byte == b'\n').count(), 102, "{}", stderr(&out));
        }
    }
}

#[test]
fn a_daemon_without_descriptors_is_busy() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for i in 0..10 {
        write(source.join(format!("d{i}/f")), "x");
    }
    let daemon = lab.serve(&served);
    let mut strace = Command::new("strace")
        .args(["-f", "-o", "/dev/null", "-e", "trace=mkdirat", "-e", "inject=mkdirat:error=EMFILE:when=2", "-p"])
        .arg(daemon.child.id().to_string())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    // Kept open: more lines come.
    let mut said = BufReader::new(strace.stderr.take().unwrap());
    said.read_line(&mut line).unwrap();
    assert!(line.contains("attached"), "{line}");
    let result = cp(&lab, &args(&[&"-r", &source, &daemon.url("e/new")]));
    assert!(result["retries"].as_u64().unwrap() > 0, "{result}");
    assert_same(&source, &served.join("new"), Compare::Content);
    strace.kill().unwrap();
    strace.wait().unwrap();
}

#[test]
fn a_daemon_with_a_limit_on_the_size_of_files_serves_without_shared_memory() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    write(source.join("small"), "x");
    write(source.join("large"), &"x".repeat(2 << 20));
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 2048; THRUWAY_LOG=warn exec \"$@\" 2>\"$0\""]).arg(lab.path("log")).arg(THRUWAY);
    command.args(["serve", "--json", "--listen", "127.0.0.1:0", "--export"]);
    let daemon = Daemon::start_by(command.arg(export("e", &served, "")));
    let log = fs::read_to_string(lab.path("log")).unwrap();
    assert!(log.contains("by TCP only") && log.contains("ulimit -f"), "{log}");
    let out = try_cp(&lab, &args(&[&"-r", &source, &daemon.url("e/new")]));
    assert!(out.status.code() == Some(1) && stderr(&out).contains("ulimit -f"), "{}", stderr(&out));
    assert_eq!(names(&served.join("new")), ["small"]);
}

#[test]
fn a_small_stack_is_an_error_with_a_remedy() {
    for limit in ["32", "64", "255"] {
        let script = format!("ulimit -s {limit}; exec \"$0\" serve --check");
        let out = Command::new("sh").args(["-c", &script, THRUWAY]).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
        let expected =
            format!("thruway: the limit of {limit} KiB on the stack is too low; raise it with ulimit -s 256\n");
        assert_eq!(stderr(&out), expected);
    }
}

#[test]
fn a_ring_that_breaks_ends_no_process() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for i in 0..4 {
        fs::write(source.join(format!("f{i}")), noise(3 << 20, i)).unwrap();
    }
    // Errors of one call, as when memory is short, and of all calls from the second or fourth on.
    for (round, fault) in ["ENOMEM:when=2", "ENOENT:when=3", "EBADR:when=2+", "ENOMEM:when=4+"].iter().enumerate() {
        let with_fault = |list: &[&OsStr]| {
            let mut command = Command::new("strace");
            command.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=io_uring_enter"]);
            command.args(["-e", &format!("inject=io_uring_enter:error={fault}")]);
            // A killed strace leaves its child running.
            command.args(["setpriv", "--pdeathsig", "KILL", THRUWAY]).args(list);
            command.env("XDG_CONFIG_HOME", lab.dir.path()).env("THRUWAY_LOG", "error").stdin(Stdio::null());
            command
        };
        let copy = lab.path(&format!("copy{round}"));
        let out = with_fault(&["cp", "-r"].map(OsStr::new)).arg(slash(&source)).arg(&copy).output().unwrap();
        // If completions stop arriving, some files or the whole copy fail.
        assert!(matches!(out.status.code(), Some(0 | 1)), "{fault}: {}", stderr(&out));
        if fault.ends_with('+') {
            cp(&lab, &args(&[&"-r", &slash(&source), &copy]));
        } else {
            assert!(out.status.success(), "{fault}: {}", stderr(&out));
        }
        assert_same(&source, &copy, Compare::Content);
        let exported = export("e", &served, "");
        let list = ["serve", "--json", "--listen", "127.0.0.1:0", "--export"].map(OsStr::new);
        let daemon = Daemon::start_by(with_fault(&list).arg(&exported));
        // The first attempt may fail with the requests that the daemon had in progress. The second one resumes the job.
        let command = args(&[&"-r", &slash(&source), &daemon.url(&format!("e/{round}"))]);
        let out = try_cp(&lab, &command);
        assert!(out.status.success() || fault.ends_with('+'), "{fault}: {}", stderr(&out));
        cp(&lab, &command);
        assert_same(&source, &served.join(round.to_string()), Compare::Content);
        // The daemon is the child of strace.
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", daemon.child.id())).unwrap();
        assert!(Command::new("kill").arg(children.trim()).status().unwrap().success(), "it is there");
    }
}

#[test]
fn a_device_or_pipe_at_the_destination_is_not_replaced() {
    let lab = Lab::new();
    write(lab.path("f"), "content");
    let target = lab.mkdir("target");
    assert!(Command::new("mkfifo").arg(target.join("f")).status().unwrap().success());
    for option in ["-n", "-v"] {
        let out = try_cp(&lab, &args(&[&option, &lab.path("f"), &target]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("pipe"), "{option}: {}", stderr(&out));
    }
    fs::remove_file(target.join("f")).unwrap();
    let made = Command::new("mknod").arg(target.join("f")).args(["c", "1", "3"]).status().unwrap();
    assert!(made.success());
    for option in ["-r", "-rp", "-rn", "-rpn"] {
        let out = try_cp(&lab, &args(&[&option, &lab.path("f"), &target.join("f")]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("device"), "{}", stderr(&out));
    }
}

#[test]
fn devices_below_the_destination_give_way_with_p() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("file"), "content");
    write(source.join("dir/file"), "content");
    symlink("file", source.join("link")).unwrap();
    let daemon = lab.serve(&target);
    for to in [os(&target), daemon.url("e/")] {
        for name in ["file", "dir", "link"] {
            let _ = fs::remove_dir_all(target.join(name)).or_else(|_| fs::remove_file(target.join(name)));
            assert!(Command::new("mknod").arg(target.join(name)).args(["c", "1", "3"]).status().unwrap().success());
        }
        // A dry run makes no journal.
        let out = try_cp(&lab, &args(&[&"-rn", &slash(&source), &to]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("a device is in the way"), "{}", stderr(&out));
        cp(&lab, &args(&[&"-an", &slash(&source), &to]));
        cp(&lab, &args(&[&"-a", &slash(&source), &to]));
        assert_same(&source, &target, Compare::Everything);
    }
}

#[test]
fn a_local_copy_needs_no_right_to_list_the_directory_above_its_destination() {
    let lab = Lab::new();
    write(lab.path("source/file"), "content");
    let own = lab.mkdir("home/own");
    let program = lab.program_for_all();
    give_to_nobody(&lab);
    std::os::unix::fs::chown(lab.path("home"), Some(0), Some(0)).unwrap();
    mode(lab.path("home"), 0o711);
    for (options, to) in [("-a", own.clone()), ("-r", own.join("new")), ("-an", own.clone())] {
        let out =
            as_nobody(&lab).arg(&program).args(["cp", options]).arg(lab.path("source")).arg(&to).output().unwrap();
        assert!(out.status.success(), "{options} {to:?}: {}", stderr(&out));
    }
    assert_eq!(fs::read(own.join("source/file")).unwrap(), b"content");
    assert_eq!(fs::read(own.join("new/file")).unwrap(), b"content");
}

#[test]
fn a_link_to_a_device_pipe_or_socket_is_refused_as_the_destination() {
    let lab = Lab::new();
    let (target, source) = (lab.mkdir("target"), lab.mkdir("source"));
    write(source.join("to-pipe"), "content");
    assert!(Command::new("mkfifo").arg(target.join("pipe")).status().unwrap().success());
    assert!(Command::new("mknod").arg(target.join("null")).args(["c", "1", "3"]).status().unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(target.join("socket")).unwrap();
    for what in ["pipe", "null", "socket"] {
        symlink(what, target.join(format!("to-{what}"))).unwrap();
    }
    // A link like /dev/stdout; its target depends on the process.
    symlink("/proc/self/fd/1", target.join("to-stdout")).unwrap();
    let (daemon, from) = (lab.serve(&target), lab.serve(&source));
    let file = source.join("to-pipe");
    let mut at_ssh = OsString::from("localhost:");
    at_ssh.push(&target);
    let refused = |list: Vec<OsString>| {
        let out = with_fake_ssh(&lab).args(["cp", "--json"]).args(&list).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{list:?} {}", stderr(&out));
        assert!(stderr(&out).contains("destination is a link to "), "{}", stderr(&out));
    };
    for what in ["to-pipe", "to-null", "to-socket", "to-stdout"] {
        let mut by_ssh = at_ssh.clone();
        by_ssh.push(format!("/{what}"));
        for option in ["-r", "-rp", "-rn"] {
            refused(args(&[&option, &file, &target.join(what)]));
            refused(args(&[&option, &source, &target.join(what)]));
            refused(args(&[&option, &from.url("e/to-pipe"), &target.join(what)]));
            refused(args(&[&option, &file, &by_ssh]));
            if what != "to-stdout" {
                refused(args(&[&option, &file, &daemon.url(&format!("e/{what}"))]));
            }
        }
        assert!(fs::symlink_metadata(target.join(what)).unwrap().is_symlink(), "{what}");
    }
    // The destination is a directory, and the link in it has the name of the source.
    refused(args(&[&file, &slash(&target)]));
    refused(args(&[&file, &daemon.url("e/")]));
    refused(args(&[&from.url("e/to-pipe"), &target]));
    // A link of the source replaces the link. In a directory below the destination, a link is replaced by a file.
    symlink("elsewhere", source.join("to-null")).unwrap();
    cp(&lab, &args(&[&"-r", &"--exclude", &"to-pipe", &slash(&source), &target]));
    assert_eq!(fs::read_link(target.join("to-null")).unwrap(), Path::new("elsewhere"));
    fs::create_dir(target.join("source")).unwrap();
    symlink("../pipe", target.join("source/to-pipe")).unwrap();
    cp(&lab, &args(&[&"-r", &source, &target]));
    assert!(fs::symlink_metadata(target.join("source/to-pipe")).unwrap().is_file());
    // So is a link at the top of the destination, if the command does not name it.
    let mut contents_by_ssh = at_ssh.clone();
    contents_by_ssh.push("/");
    for destination in [slash(&target), daemon.url("e/"), contents_by_ssh] {
        fs::remove_file(target.join("to-pipe")).unwrap();
        symlink("pipe", target.join("to-pipe")).unwrap();
        let command = args(&[&"-r", &slash(&source), &destination]);
        let out = with_fake_ssh(&lab).args(["cp", "--json"]).args(&command).output().unwrap();
        assert!(out.status.success(), "{command:?} {}", stderr(&out));
        assert!(fs::symlink_metadata(target.join("to-pipe")).unwrap().is_file(), "{destination:?}");
    }
}

#[test]
fn a_directory_does_not_replace_a_file_that_the_command_names() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("x"), "1");
    let (daemon, from) = (lab.serve(&target), lab.serve(&source));
    write(target.join("f"), "precious");
    symlink("f", target.join("link")).unwrap();
    for name in ["f", "link"] {
        let here = target.join(name);
        for list in [
            args(&[&"-r", &source, &here]),
            args(&[&"-ru", &source, &here]),
            args(&[&"-r", &"--delete", &source, &daemon.url(&format!("e/{name}"))]),
            args(&[&"-r", &from.url("e/"), &here]),
        ] {
            let out = thruway(lab.dir.path()).args(["cp", "--json"]).args(&list).output().unwrap();
            assert_eq!(out.status.code(), Some(1), "{list:?} {}", stderr(&out));
            assert_eq!(fs::read_to_string(&here).unwrap(), "precious", "{list:?}");
        }
    }
}

#[test]
fn a_directory_replaces_a_file_of_its_name_below_the_destination() {
    let lab = Lab::new();
    let target = lab.mkdir("target");
    write(lab.path("source/dir/x"), "1");
    let (daemon, from) = (lab.serve(&target), lab.serve(&lab.path("source")));
    let source = lab.path("source/dir");
    for list in [
        args(&[&"-r", &source, &target]),
        args(&[&"-r", &source, &daemon.url("e")]),
        args(&[&"-r", &from.url("e/dir"), &target]),
    ] {
        write(target.join("dir"), "a file");
        cp(&lab, &list);
        assert_eq!(fs::read_to_string(target.join("dir/x")).unwrap(), "1", "{list:?}");
        fs::remove_dir_all(target.join("dir")).unwrap();
    }
}

#[test]
fn a_served_disk_is_neither_replaced_nor_removed() {
    let lab = Lab::new();
    let (served, source, none) = (lab.mkdir("served"), lab.mkdir("source"), lab.mkdir("none"));
    for dir in ["", "dir"] {
        fs::create_dir_all(served.join(dir)).unwrap();
        let disk = fs::File::create(served.join(dir).join("disk.img")).unwrap();
        disk.set_len(1 << 20).unwrap();
    }
    write(source.join("disk.img"), "another");
    let block = |path: &Path| export("d", path, "");
    let list = ["--nbd", "127.0.0.1:0", "--export"].map(OsStr::new);
    let (exported, disk) = (export("e", &served, ""), block(&served.join("disk.img")));
    let daemon = Daemon::start(&[&list[..], &[&exported, OsStr::new("--block"), &disk]].concat());
    let mut inner = Command::new(THRUWAY);
    inner.args(["serve", "--json", "--nbd", "127.0.0.1:0", "--block"]).arg(block(&served.join("dir/disk.img")));
    let mut inner = inner.stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read(inner.stdout.as_mut().unwrap(), &mut [0; 10]).unwrap();
    let refused = |list: Vec<OsString>| {
        let out = try_cp(&lab, &list);
        assert_eq!(out.status.code(), Some(1), "{list:?}");
        assert!(stderr(&out).contains("in use as a disk"), "{list:?} {}", stderr(&out));
        for path in ["disk.img", "dir/disk.img"] {
            assert_eq!(fs::metadata(served.join(path)).unwrap().len(), 1 << 20, "{path}");
        }
    };
    let file = source.join("disk.img");
    // Copies by the daemon that serves the disk and by another process, of a file and of a directory, with -a and --delete.
    refused(args(&[&file, &daemon.url("e/disk.img")]));
    refused(args(&[&"-a", &slash(&source), &daemon.url("e/")]));
    refused(args(&[&file, &served.join("disk.img")]));
    refused(args(&[&file, &served.join("dir")]));
    // A dry run fails in the same way.
    refused(args(&[&"-an", &slash(&source), &daemon.url("e/")]));
    refused(args(&[&"-an", &slash(&source), &served]));
    let dry = parse(&try_cp(&lab, &args(&[&"-an", &slash(&source), &served.join("dir")])));
    assert_eq!((&dry["files"], &dry["failed"], &dry["items"]), (&0.into(), &1.into(), &serde_json::json!([])), "{dry}");
    refused(args(&[&"-r", &"--delete", &slash(&none), &served]));
    refused(args(&[&"-r", &"--delete", &slash(&none), &daemon.url("e/")]));
    inner.kill().unwrap();
    inner.wait().unwrap();
    drop(daemon);
    cp(&lab, &args(&[&file, &served.join("disk.img")]));
    assert_eq!(fs::read_to_string(served.join("disk.img")).unwrap(), "another");
    // A daemon refuses a share with the file of a disk that has a cache.
    let mut share = OsString::from("s=");
    share.push(lab.mkdir("served/dir"));
    let mut cached = block(&served.join("dir/disk.img"));
    cached.push(",cache=4M:writeback");
    let check = |disk: &OsStr| {
        let mut command = thruway(lab.dir.path());
        command.args(["serve", "--check", "--nfs-rpcbind", "none", "--share"]).arg(&share).arg("--block").arg(disk);
        command.output().unwrap()
    };
    let out = check(&cached);
    assert!(
        out.status.code() == Some(2) && stderr(&out).contains("is in the directory of share 's'"),
        "{}",
        stderr(&out)
    );
    let out = check(&block(&served.join("dir/disk.img")));
    assert!(out.status.success(), "{}", stderr(&out));
}

#[test]
fn a_hard_link_of_the_source_is_the_same_file() {
    let lab = Lab::new();
    write(lab.path("f"), "content");
    fs::hard_link(lab.path("f"), lab.path("hl")).unwrap();
    fs::hard_link(lab.path("f"), lab.mkdir("d").join("f")).unwrap();
    for target in ["hl", "d"] {
        let out = try_cp(&lab, &args(&[&lab.path("f"), &lab.path(target)]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("are the same file"), "{}", stderr(&out));
    }
    assert_eq!(fs::metadata(lab.path("hl")).unwrap().nlink(), 3);
}

#[test]
fn attributes_that_cannot_be_kept_are_named() {
    let lab = Lab::new();
    mode(lab.dir.path(), 0o755);
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for name in ["set-id", "capable", "marked"] {
        write(source.join(name), name);
    }
    let attribute = |name: &str, value: &str, path: &Path| {
        assert!(Command::new("setfattr").args(["-n", name, "-v", value]).arg(path).status().unwrap().success());
    };
    attribute("security.capability", "0x0100000200040000000000000000000000000000", &source.join("capable"));
    attribute("trusted.mark", "x", &source.join("marked"));
    mode(source.join("set-id"), 0o4755);
    fs::create_dir(source.join("group")).unwrap();
    mode(source.join("group"), 0o2777);
    let insists = |out: std::process::Output, expected: &[&str], copy: &Path| {
        let said = stderr(&out);
        assert_eq!(out.status.code(), Some(1), "{said}");
        for expected in expected {
            assert!(said.contains(expected), "'{expected}' is missing:\n{said}");
        }
        for name in ["set-id", "capable", "marked", "group"] {
            assert!(copy.join(name).exists() && mode_of(copy.join(name)) & 0o6000 == 0, "{name}");
        }
        // Repeated attempts would fail in the same way, so no journal is kept.
        let left: Vec<_> = fs::read_dir(copy.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(!left.iter().any(|name| name.as_bytes().ends_with(b".journal")), "{left:?}");
    };
    let common =
        ["set-id: set-user-ID bit not kept", "group: set-group-ID bit not kept", "capable: extended attribute"];
    // A copy by an ordinary user; trusted attributes are invisible to it.
    let program = lab.program_for_all();
    let home = lab.mkdir("home");
    std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    for _ in 0..2 {
        let mut command = Command::new(&program);
        std::os::unix::process::CommandExt::uid(std::os::unix::process::CommandExt::gid(&mut command, NOBODY), NOBODY);
        command.env("XDG_CONFIG_HOME", &home).args(["cp", "--json", "-rp"]).arg(slash(&source)).arg(home.join("copy"));
        insists(command.output().unwrap(), &common, &home.join("copy"));
    }
    // A copy with a key without 'privileged', to a daemon that runs as root.
    let key = lab.path("key");
    assert!(thruway(lab.dir.path()).args(["keygen", "--quiet", "--output"]).arg(&key).status().unwrap().success());
    let authorized = lab.path("authorized");
    fs::copy(key.with_extension("pub"), &authorized).unwrap();
    let daemon = Daemon::start(&[
        OsStr::new("--authorized-keys"),
        authorized.as_os_str(),
        OsStr::new("--export"),
        &export("e", &served, ""),
    ]);
    let out = try_cp(&lab, &args(&[&"-rp", &"--key", &key, &slash(&source), &daemon.url("e/copy")]));
    let expected = [&common[..], &["marked: extended attribute trusted.mark not kept", "'privileged'"]].concat();
    insists(out, &expected, &served.join("copy"));
}

#[test]
fn local_names_mean_what_they_are() {
    let lab = Lab::new();
    write(lab.path("f"), "content");
    let strange = lab.path("base").join(OsStr::from_bytes(b"\xff\xfe"));
    fs::create_dir_all(&strange).unwrap();
    fs::create_dir_all(lab.path("base/\u{fffd}\u{fffd}")).unwrap();
    cp(&lab, &args(&[&lab.path("f"), &strange.join("new")]));
    assert!(strange.join("new").exists());
    // A link is replaced, as by rsync; what it points to is not touched.
    write(lab.path("elsewhere/g"), "precious");
    symlink(lab.path("elsewhere/g"), lab.path("base/link")).unwrap();
    cp(&lab, &args(&[&lab.path("f"), &lab.path("base/link")]));
    assert_eq!(fs::read_to_string(lab.path("elsewhere/g")).unwrap(), "precious");
    assert_eq!(fs::read_to_string(lab.path("base/link")).unwrap(), "content");
    let out = try_cp(&lab, &args(&[&lab.path("f"), &lab.path("f")]));
    assert!(!out.status.success() && stderr(&out).contains("the same"), "{}", stderr(&out));
}

#[test]
fn options_without_sense_are_refused_or_do_what_they_say() {
    let lab = Lab::new();
    write(lab.path("f"), "content");
    cp(&lab, &args(&[&"--bwlimit", &"0", &lab.path("f"), &lab.path("g")]));
    let out = try_cp(&lab, &args(&[&"--size", &"3", &lab.path("f"), &lab.path("h")]));
    assert!(!out.status.success() && stderr(&out).contains("--size applies only to devices"), "{}", stderr(&out));
    let out = thruway(lab.dir.path()).args(["serve", "--max-sessions", "0", "--export", "e=/tmp"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    for (list, what) in [
        (&["--block-size", "0", "/a", "/b"][..], "invalid --block-size 0"),
        (&["--exclude", "[", "/a", "/b"], "'['"),
        (&["--provider", "shm", "/a", "/b"], "--provider shm needs a daemon"),
        (&["--provider", "verbs", "/a", "host:b"], "--provider verbs needs a daemon"),
    ] {
        let out = thruway(lab.dir.path()).arg("cp").args(list).output().unwrap();
        assert!(out.status.code() == Some(2) && stderr(&out).contains(what), "{list:?} {}", stderr(&out));
    }
    for (option, what) in [("e=/nonexistent", "nonexistent"), ("e=/etc/passwd", "Not a directory")] {
        let out = thruway(lab.dir.path()).args(["serve", "--check", "--export", option]).output().unwrap();
        assert!(!out.status.success() && stderr(&out).contains(what), "{}", stderr(&out));
    }
}

#[test]
fn messages_say_which_end_has_failed() {
    let lab = Lab::new();
    write(lab.path("f"), "content");
    let said = stderr(&try_cp(&lab, &args(&[&"/proc/self/mem", &lab.path("copy")])));
    assert!(said.starts_with("thruway cp: copy: cannot read the source: Input/output error"), "{said}");
    let there = lab.path("none/copy");
    let said = stderr(&try_cp(&lab, &args(&[&lab.path("f"), &there])));
    assert!(said.starts_with(&format!("thruway cp: {}: No such file", there.display())), "{said}");
}

#[test]
fn a_reader_that_leaves_and_a_full_disk_are_no_crash() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    for i in 0..5000 {
        fs::write(served.join(format!("{i:0100}")), "").unwrap();
    }
    let daemon = lab.serve(&served);
    let script = |line: &str| {
        Command::new("sh")
            .args(["-c", line, THRUWAY])
            .arg(daemon.url("e/"))
            .env("XDG_CONFIG_HOME", lab.dir.path())
            .output()
            .unwrap()
    };
    let out = script("\"$0\" ls \"$1\" | head -1");
    assert!(out.stderr.is_empty(), "{}", stderr(&out));
    let out = script("\"$0\" ls \"$1\" > /dev/full");
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("No space left"), "{}", stderr(&out));
}

#[test]
fn what_peers_name_does_not_reach_the_terminal_raw() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    write(served.join("\u{1b}[2J\u{1b}]0;title\u{7}"), "");
    let daemon = lab.serve(&served);
    let out = thruway(lab.dir.path()).arg("ls").arg(daemon.url("e/")).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains("\\033[2J\\033]0;title\\007") && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn a_name_with_several_addresses_is_tried_until_one_answers() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    write(served.join("f"), "content");
    let daemon = lab.serve(&served);
    let port = daemon.addr.rsplit(':').next().unwrap();
    // `localhost` is ::1 first on most machines, and the daemon listens at 127.0.0.1.
    let url = format!("tw://localhost:{port}/e/f");
    cp(&lab, &args(&[&url, &lab.path("copy")]));
}

#[test]
fn where_io_uring_is_forbidden_everything_works_without() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    awkward_tree(&source);
    fs::write(source.join("large"), noise(20 << 20, 3)).unwrap();
    let forbidden = |args: &[&OsStr]| {
        let mut command = Command::new("strace");
        command
            .args(["-f", "-qq", "-e", "trace=io_uring_setup", "-e", "inject=io_uring_setup:error=EPERM", "-o"])
            .args([OsStr::new("/dev/null"), OsStr::new(THRUWAY)])
            .args(args)
            .env("XDG_CONFIG_HOME", lab.dir.path());
        command
    };
    let copy = lab.path("copy");
    let list = args(&[&"cp", &"--json", &"-rp", &"--encrypt", &"on", &"--direct", &"on", &slash(&source), &copy]);
    let out = forbidden(&list.iter().map(OsString::as_os_str).collect::<Vec<_>>()).output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert!(stderr(&out).contains("no io_uring"), "{}", stderr(&out));
    assert_same(&source, &copy, Compare::Everything);
    // A disk: by all ways to the file, and a cache.
    for options in ["", ",mode=direct", ",mode=cached", ",cache=4M:writeback"] {
        let file = lab.path("disk.img");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let block = format!("d={}{options}", file.to_str().unwrap());
        let mut daemon = forbidden(&["serve", "--json", "--nbd", "127.0.0.1:0", "--block", &block].map(OsStr::new))
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = daemon.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        let announced: serde_json::Value = serde_json::from_str(&line).unwrap();
        let uri = format!("nbd://{}/d", announced["nbd"][0].as_str().unwrap());
        let commands = ["write -P 7 512 3000k", "write -z 64k 128k", "discard 1M 64k", "flush", "read -P 7 512 60k"];
        let commands = commands.iter().flat_map(|command| ["-c", *command]);
        let out = Command::new("qemu-io").args(["-f", "raw"]).args(commands).arg(&uri).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success() && !said.contains("verification failed"), "{options}: {said}{}", stderr(&out));
        // strace's child.
        let children = format!("/proc/{0}/task/{0}/children", daemon.id());
        let pid = fs::read_to_string(children).unwrap().trim().to_string();
        assert!(Command::new("kill").arg(&pid).status().unwrap().success());
        assert!(daemon.wait().unwrap().success());
        let found = fs::read(&file).unwrap();
        assert!(found[512..60_000].iter().all(|byte| *byte == 7) && found[65536..196_608].iter().all(|o| *o == 0));
    }
}

#[test]
fn a_dry_run_of_a_first_copy_lists_everything_and_makes_nothing() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    write(lab.path("source/sub/f"), "x");
    let (daemon, source) = (lab.serve(&served), slash(&lab.path("source")));
    for target in [daemon.url("e/new/"), daemon.url("e/new"), slash(&lab.path("served/new"))] {
        for more in ["--verify=xxh3", "--delete"] {
            let result = cp(&lab, &args(&[&"-rn", &more, &source, &target]));
            let items: Vec<&str> =
                result["items"].as_array().unwrap().iter().map(|item| item["path"].as_str().unwrap()).collect();
            assert!(items.iter().any(|path| path.ends_with("sub/f")), "{target:?} {result}");
            assert!(names(&served).is_empty());
        }
    }
    // The copy itself would fail.
    for target in [daemon.url("e/a/new/"), slash(&lab.path("served/a/new"))] {
        assert_eq!(try_cp(&lab, &args(&[&"-rn", &source, &target])).status.code(), Some(1), "{target:?}");
    }
}

#[test]
fn a_pipe_does_not_stop_delete_and_a_missing_source_does() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    write(lab.path("a/f"), "x");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        lab.path("a/pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let (daemon, a) = (lab.serve(&served), slash(&lab.path("a")));
    for target in [daemon.url("e/"), slash(&served)] {
        write(served.join("old"), "x");
        write(served.join("pipe"), "an entry of the name of one that is not copied");
        let out = try_cp(&lab, &args(&[&"-r", &"--delete", &a, &slash(&lab.path("missing")), &target]));
        assert_eq!(out.status.code(), Some(1));
        assert!(served.join("old").exists(), "the missing source could have a file of this name");
        let out = try_cp(&lab, &args(&[&"-r", &"--delete", &a, &target]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("pipe: not a file"), "{}", stderr(&out));
        // Nor is there a journal: repeating the command would change nothing.
        assert_eq!(names(&served), ["f", "pipe"]);
    }
}

#[test]
fn a_slash_at_the_end_of_a_pattern_copies_directories_only() {
    let lab = Lab::new();
    write(lab.path("a/sub/secret"), "x");
    write(lab.path("a/target"), "x");
    cp(&lab, &args(&[&"-r", &"--include", &"*/", &"--exclude", &"*", &slash(&lab.path("a")), &lab.path("b")]));
    assert_eq!((names(&lab.path("b")), names(&lab.path("b/sub")).len()), (vec!["sub".into()], 0));
    write(lab.path("b/sub/more"), "x");
    fs::create_dir(lab.path("b/target")).unwrap();
    // With --delete, a directory of the name stays, and a file does not.
    cp(&lab, &args(&[&"-r", &"--delete", &"--exclude", &"sub/", &slash(&lab.path("a")), &slash(&lab.path("b"))]));
    assert_eq!(
        (names(&lab.path("b")), names(&lab.path("b/sub"))),
        (vec!["sub".into(), "target".into()], vec!["more".into()])
    );
}

/// While a daemon of root or of the client's user does not run, any user can take its port.
#[test]
fn a_daemon_of_another_user_gets_no_data_until_its_key_is_known() {
    let lab = Lab::new();
    let (home, served, program) = (lab.mkdir("home"), lab.mkdir("served"), lab.path("program"));
    write(lab.path("secret"), "x");
    fs::copy(THRUWAY, &program).unwrap();
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for dir in [&home, &served] {
        std::os::unix::fs::chown(dir, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]).arg("--clear-groups").arg(&program);
    command.args(["serve", "--json", "--anonymous", "--listen", "127.0.0.1:0", "--export"]);
    command.arg(export("e", &served, "")).env("HOME", &home).env_remove("XDG_CONFIG_HOME");
    let daemon = Daemon::start_by(&mut command);
    for provider in ["auto", "iwarp", "tcp"] {
        let out = try_cp(&lab, &args(&[&"--provider", &provider, &lab.path("secret"), &daemon.url("e/")]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains(&format!("belongs to user {NOBODY} of this host")), "{}", stderr(&out));
        assert!(names(&served).is_empty());
    }
    let known = lab.path("thruway/known_hosts");
    write(&known, &format!("{} {}\n", daemon.addr, daemon.public_key));
    cp(&lab, &args(&[&lab.path("secret"), &daemon.url("e/")]));
    assert_eq!(names(&served), ["secret"]);
}

/// A proxy to the address in its second argument; its listening socket is bound to an interface, or closed after each connection.
const HIDDEN_PROXY: &str = r#"
import socket, sys, threading, time
way, (host, port) = sys.argv[1], sys.argv[2].split(':')
def listen(port):
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if way == 'device': listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b'lo\0')
        try:
            listener.bind(('127.0.0.1', port)); listener.listen(64)
            return listener
        except OSError: time.sleep(.005)
def pump(source, sink):
    try:
        while data := source.recv(1 << 16): sink.sendall(data)
    except OSError: pass
    for end in source, sink:
        try: end.shutdown(socket.SHUT_RDWR)
        except OSError: pass
listener = listen(0)
at = listener.getsockname()[1]
print(at, flush=True)
while True:
    near = listener.accept()[0]
    if way == 'close': listener.close()
    far = socket.create_connection((host, int(port)))
    for ends in (near, far), (far, near): threading.Thread(target=pump, args=ends, daemon=True).start()
    if way == 'close':
        time.sleep(.05)
        listener = listen(at)
"#;

/// A process, killed when dropped.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_proxy_of_another_user_that_hides_its_listener_gets_no_data() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    write(lab.path("secret"), "x");
    let daemon = Daemon::start(&[OsStr::new("--anonymous"), OsStr::new("--export"), &export("e", &served, "")]);
    for way in ["device", "close"] {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]).arg("--clear-groups");
        command.args(["/usr/bin/python3", "-c", HIDDEN_PROXY, way, &daemon.addr]);
        let mut proxy = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut port = String::new();
        BufReader::new(proxy.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let url = format!("tw://127.0.0.1:{}", port.trim());
        let foreign = format!("belongs to user {NOBODY} of this host");
        for provider in ["auto", "iwarp", "tcp"] {
            let out = try_cp(&lab, &args(&[&"--provider", &provider, &lab.path("secret"), &format!("{url}/e/")]));
            assert!(names(&served).is_empty(), "{way} {provider}");
            assert_eq!(out.status.code(), Some(1), "{way} {provider}");
            assert!(stderr(&out).contains(&foreign), "{way} {provider}: {}", stderr(&out));
            assert!(stderr(&out).contains("known_hosts"), "{way} {provider}: {}", stderr(&out));
        }
        // The proxy does not listen all the time.
        let said = loop {
            let said = stderr(&thruway(lab.dir.path()).args(["ls", &url]).output().unwrap());
            if !said.contains("refused") {
                break said;
            }
        };
        assert!(said.contains(&foreign), "{way} ls: {said}");
    }
}

#[test]
fn contents_of_a_directory_that_gives_way_are_told_and_count() {
    let lab = Lab::new();
    let target = lab.mkdir("target");
    write(lab.path("source/n"), "x");
    write(target.join("n/deep/f"), "precious");
    let source = slash(&lab.path("source"));
    // Without --delete, a dry run fails as the copy does.
    for option in ["-rn", "-r"] {
        let out = try_cp(&lab, &args(&[&option, &source, &slash(&target)]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("a directory with contents is in the way"), "{}", stderr(&out));
    }
    for option in ["-rn", "-rv"] {
        let result = cp(&lab, &args(&[&option, &"--delete", &source, &slash(&target)]));
        let mut items: Vec<String> =
            result["items"].as_array().unwrap().iter().map(|i| format!("{} {}", i["path"], i["reason"])).collect();
        items.sort();
        let expected = ["\"n\" \"type differs\"", "\"n/deep\" \"deleted\"", "\"n/deep/f\" \"deleted\""];
        assert_eq!((items, &result["deleted"]), (expected.map(String::from).to_vec(), &2.into()), "{option}");
    }
    assert_eq!(fs::read_to_string(target.join("n")).unwrap(), "x");
}

#[test]
fn a_mounted_file_system_is_not_removed_and_is_an_error() {
    let lab = Lab::new();
    let (source, target, outside) = (lab.path("source"), lab.path("target"), lab.mkdir("outside"));
    write(source.join("kept"), "x");
    write(source.join("way"), "x");
    symlink("elsewhere", source.join("link")).unwrap();
    write(outside.join("f"), "precious");
    for dir in ["gone", "way", "link", "gone2"] {
        fs::create_dir_all(target.join(dir).join("deep")).unwrap();
    }
    // More than a worker looks at in one task.
    for n in 0..20_000 {
        write(target.join(format!("link/{n}")), "");
    }
    write(target.join("gone/other"), "x");
    write(target.join("way/other"), "x");
    // A bind mount has the device number of the destination.
    let script = "at=$1; how=$2; outside=$3; shift 3
        for i in gone way link gone2; do mount $how $outside $at/$i/deep || exit 9; echo precious >$at/$i/deep/f; done
        \"$@\"; code=$?; cat $at/gone/deep/f $at/way/deep/f $at/link/deep/f; exit $code";
    for (how, outside) in [("-ttmpfs", "none"), ("--bind", outside.to_str().unwrap())] {
        for option in ["-rn", "-r"] {
            let mut copy = Command::new("unshare");
            copy.args(["--mount", "sh", "-c", script, "sh"]).arg(&target).args([how, outside, THRUWAY]);
            copy.args(["cp", option, "--delete"]).arg(slash(&source)).arg(slash(&target));
            let out = copy.output().unwrap();
            assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
            assert!(String::from_utf8_lossy(&out.stdout).ends_with(&"precious\n".repeat(3)), "{how} {option}: {out:?}");
            let why = "it is a mounted file system or a subvolume";
            let removed = |path: &str| format!("{path}: cannot remove {path}/deep: {why}");
            for line in [removed("way"), removed("link")] {
                assert!(stderr(&out).contains(&line), "{how} {option}: {}", stderr(&out));
            }
            // Each of them, not only the first.
            for path in ["gone/deep", "gone2/deep"] {
                assert!(stderr(&out).contains(&format!("{path}: not removed: {why}")), "{}", stderr(&out));
            }
            assert_eq!(stderr(&out).matches("not removed").count(), 2, "{}", stderr(&out));
            assert!(target.join("way/other").exists() && names(&target.join("link")).len() == 20_001);
        }
        assert!(!target.join("gone/other").exists());
        write(target.join("gone/other"), "x");
    }
}

#[test]
fn a_group_that_cannot_be_given_is_no_difference() {
    let lab = Lab::new();
    mode(lab.dir.path(), 0o755);
    let (program, source, target) = (lab.program_for_all(), lab.mkdir("source"), lab.mkdir("target"));
    mode(&target, 0o777);
    write(source.join("foreign"), "x");
    write(source.join("shared"), "x");
    std::os::unix::fs::chown(source.join("shared"), None, Some(54_321)).unwrap();
    let run = |options: &[&str]| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", "65534", "--regid", "65534", "--groups", "54321"])
            .arg(&program)
            .args(["cp", "--json"]);
        command.args(options).arg(slash(&source)).arg(target.join("new")).env("HOME", "/nonexistent");
        let out = command.env_remove("XDG_CONFIG_HOME").output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        items(&parse(&out))
    };
    run(&["-av"]);
    let group = |name: &str| fs::metadata(target.join("new").join(name)).unwrap().gid();
    assert_eq!((group("foreign"), group("shared")), (65_534, 54_321));
    assert!(run(&["-aun"]).is_empty());
    std::os::unix::fs::chown(target.join("new/shared"), None, Some(65_534)).unwrap();
    assert_eq!(run(&["-auv"]), ["shared attributes"]);
    assert_eq!(group("shared"), 54_321);
}

#[test]
fn delete_empties_read_only_directories_of_its_own_user() {
    const NOBODY: u32 = 65_534;
    let lab = Lab::new();
    mode(lab.dir.path(), 0o755);
    let (program, source, target) = (lab.program_for_all(), lab.mkdir("source"), lab.mkdir("target"));
    write(source.join("kept/f"), "x");
    for path in ["kept/f", "kept/extra", "gone/sub/x", "unreadable/x", "spared/x", "spared/keep.log"] {
        write(target.join(path), "x");
    }
    let modes = [("kept", 0o555), ("gone/sub", 0o500), ("gone", 0o555), ("unreadable", 0), ("spared", 0o555)];
    for (name, bits) in modes {
        mode(target.join(name), bits);
    }
    let chown = Command::new("chown").arg("-R").arg(NOBODY.to_string()).args([&source, &target]).status();
    assert!(chown.unwrap().success());
    let run = |options: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&program);
        command.args(["cp", "--json", "-r", "--delete", "--exclude", "*.log"]).args(options);
        command.arg(slash(&source)).arg(&target).env("HOME", "/nonexistent").env_remove("XDG_CONFIG_HOME");
        command.output().unwrap()
    };
    let before = mode_of(target.join("kept"));
    let out = run(&["-n"]);
    // It cannot look into one of them.
    assert!(out.status.code() == Some(1) && stderr(&out).contains("unreadable"), "{}", stderr(&out));
    assert_eq!((names(&target).len(), mode_of(target.join("unreadable"))), (4, 0));
    let out = run(&[]);
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(names(&target), ["kept", "spared"]);
    assert_eq!(
        (names(&target.join("kept")), names(&target.join("spared"))),
        (vec!["f".into()], vec!["keep.log".into()])
    );
    assert_eq!((mode_of(target.join("kept")), mode_of(target.join("spared"))), (before, 0o555));
    // A directory with the set-group-id bit of a foreign group stays: the kernel would drop the bit.
    write(target.join("sgid/x"), "x");
    std::os::unix::fs::chown(target.join("sgid"), Some(NOBODY), Some(54_321)).unwrap();
    mode(target.join("sgid"), 0o2575);
    let out = run(&[]);
    assert!(out.status.code() == Some(1) && stderr(&out).contains("sgid/x: not removed"), "{}", stderr(&out));
    assert_eq!(mode_of(target.join("sgid")), 0o2575);
    fs::remove_dir_all(target.join("sgid")).unwrap();
    // A directory of another user stays, and is an error.
    write(target.join("foreign/x"), "x");
    let out = run(&[]);
    assert!(out.status.code() == Some(1) && stderr(&out).contains("not removed"), "{}", stderr(&out));
    assert!(target.join("foreign/x").exists());
}

#[test]
fn a_missing_source_does_not_stop_the_others() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    let daemon = lab.serve(&served);
    for target in [lab.mkdir("local").into_os_string(), daemon.url("e")] {
        let there = if target == lab.path("local") { lab.path("local") } else { served.clone() };
        write(lab.path("a/f"), "x");
        write(lab.path("b/f"), "x");
        write(there.join("b/extra"), "precious");
        let out =
            try_cp(&lab, &args(&[&"-r", &"--delete", &lab.path("a"), &lab.path("gone"), &lab.path("b"), &target]));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("gone: cannot read the source: No such file"), "{}", stderr(&out));
        let extra = fs::read_to_string(there.join("b/extra"));
        assert!(there.join("a/f").exists() && there.join("b/f").exists() && extra.unwrap() == "precious");
        // If there is no source at all, nothing begins.
        let before = names(&there);
        let out = try_cp(&lab, &args(&[&"-r", &lab.path("gone"), &lab.path("gone2"), &target]));
        assert_eq!((out.status.code(), names(&there)), (Some(1), before));
    }
}

/// All users without a mapping in a user namespace have one number there.
#[test]
fn users_that_a_user_namespace_does_not_tell_apart_are_not_trusted() {
    let lab = Lab::new();
    let (served, program) = (lab.mkdir("served"), lab.path("program"));
    fs::copy(THRUWAY, &program).unwrap();
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    write(served.join("secret"), "precious");
    let mapped = ["--user".to_string(), format!("--map-user={NOBODY}"), format!("--map-group={NOBODY}")];
    let as_user = |id: u32, home: &Path| {
        std::os::unix::fs::chown(home, Some(id), Some(id)).unwrap();
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={id}"), format!("--regid={id}")]).arg("--clear-groups").arg(&program);
        command.env("HOME", home).env_remove("XDG_CONFIG_HOME").current_dir(home);
        command
    };
    // A daemon in the namespace, and a user outside.
    let mut command = Command::new("unshare");
    command.args(&mapped).arg(THRUWAY).args([
        "serve",
        "--json",
        "--no-landlock",
        "--listen",
        "127.0.0.1:0",
        "--export",
    ]);
    let daemon = Daemon::start_by(command.arg(export("e", &served, "")));
    for provider in ["tcp", "iwarp", "auto"] {
        let home = lab.mkdir("other");
        let out =
            as_user(4321, &home).args(["cp", "--provider", provider]).arg(daemon.url("e/secret")).arg("got").output();
        let out = out.unwrap();
        assert!(out.status.code() == Some(1) && !home.join("got").exists(), "{provider}: {}", stderr(&out));
    }
    drop(daemon);
    // A daemon of a user outside, and a client in the namespace.
    let hostile = lab.mkdir("hostile");
    let mut command = as_user(4321, &hostile);
    command.args(["serve", "--json", "--anonymous", "--listen", "127.0.0.1:0", "--export"]);
    let daemon = Daemon::start_by(command.arg(export("e", &hostile, "")));
    for provider in ["tcp", "iwarp", "auto"] {
        let mut command = Command::new("unshare");
        command.args(&mapped).arg(THRUWAY).args(["cp", "--provider", provider]).arg(served.join("secret"));
        let out = command.arg(daemon.url("e/")).env("HOME", lab.dir.path()).output().unwrap();
        assert!(out.status.code() == Some(1) && !hostile.join("secret").exists(), "{provider}: {}", stderr(&out));
    }
}

#[test]
fn the_destination_of_contents_is_as_private_as_their_directory() {
    let lab = Lab::new();
    let (served, key) = (lab.mkdir("served"), lab.path("key"));
    write(lab.path("private/f"), "x");
    mode(lab.path("private"), 0o700);
    set_modified(&lab.path("private"), 1_000_000_000);
    assert!(thruway(lab.dir.path()).args(["keygen", "--quiet", "--output"]).arg(&key).status().unwrap().success());
    let public = fs::read_to_string(key.with_extension("pub")).unwrap().trim().to_string();
    let allowed = lab.path("authorized");
    fs::write(&allowed, format!("create {public}\n")).unwrap();
    let (keys, exported) = ([OsStr::new("--authorized-keys"), allowed.as_os_str()], export("e", &served, ""));
    let restricted = Daemon::start(&[&keys[..], &[OsStr::new("--export"), &exported]].concat());
    let (daemon, from) = (lab.serve(&served), lab.serve(lab.dir.path()));
    let source = slash(&lab.path("private"));
    for (number, option) in ["-r", "-a"].into_iter().enumerate() {
        let name = |how: &str| format!("{how}{number}");
        let there = |how: &str| served.join(name(how));
        cp(&lab, &args(&[&option, &source, &there("local")]));
        cp(&lab, &args(&[&option, &source, &daemon.url(&format!("e/{}", name("pushed")))]));
        cp(&lab, &args(&[&option, &"--key", &key, &source, &restricted.url(&format!("e/{}", name("restricted")))]));
        cp(&lab, &args(&[&option, &from.url("e/private/"), &there("pulled")]));
        for how in ["local", "pushed", "restricted", "pulled"] {
            let meta = fs::metadata(there(how)).unwrap();
            assert_eq!(meta.permissions().mode() & 0o777, 0o700, "{option} {how}");
            assert_eq!(meta.mtime() == 1_000_000_000, option == "-a", "{option} {how}");
        }
    }
    // Files from several places have no directory.
    let several = |to: &OsStr| cp(&lab, &args(&[&lab.path("private/f"), &lab.path("key.pub"), &to]));
    several(&slash(&served.join("local")));
    several(&daemon.url("e/pushed/"));
    let plain = lab.mkdir("plain");
    for how in ["local", "pushed"] {
        assert_eq!(mode_of(served.join(how)), mode_of(&plain), "{how}");
    }
    // The first attempt ends before the directory has its attributes.
    fs::write(lab.path("private/large"), noise(24 << 20, 1)).unwrap();
    for (to, at) in [(served.join("cut1").into_os_string(), "cut1"), (daemon.url("e/cut2"), "cut2")] {
        let mut child = thruway(lab.dir.path());
        let mut child = child.args(["cp", "-r", "--quiet", "--bwlimit", "1M"]).arg(&source).arg(&to).spawn().unwrap();
        while !served.join(at).exists() {
            assert!(child.try_wait().unwrap().is_none(), "over before it was interrupted");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(mode_of(served.join(at)), 0o700);
        child.kill().unwrap();
        child.wait().unwrap();
        mode(lab.path("private"), 0o755);
        cp(&lab, &args(&[&"-r", &source, &to]));
        mode(lab.path("private"), 0o700);
        assert_eq!(mode_of(served.join(at)) & 0o700, 0o700, "{at}");
    }
}

/// Runs `thruway cp`, and kills it at the first renaming of a file.
fn cp_until_rename(lab: &Lab, command: &mut Command, list: &[OsString]) {
    command.arg("strace").args(strace_options("renameat2:signal=KILL:when=1", "/dev/null"));
    command.arg(lab.program_for_all()).arg("cp").args(list);
    let out = command.env("XDG_CONFIG_HOME", lab.dir.path()).env("HOME", lab.dir.path()).output().unwrap();
    assert!(!out.status.success(), "{}", stderr(&out));
}

/// Gives all of a lab to a user without rights.
fn give_to_nobody(lab: &Lab) {
    let given = Command::new("chown").args(["-R", "-h", "65534:65534"]).arg(lab.dir.path()).status().unwrap();
    assert!(given.success());
}

/// A command as a user without rights.
fn as_nobody(lab: &Lab) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.env("XDG_CONFIG_HOME", lab.dir.path()).env("HOME", lab.dir.path()).stdin(Stdio::null());
    command
}

#[test]
fn existing_directories_lose_rights_before_entries_come() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    for (name, in_source, in_target) in [("private", 0o700, 0o755), ("other", 0o755, 0o2777), ("list", 0o750, 0o750)] {
        write(source.join(name).join("file"), "content");
        fs::create_dir(target.join(name)).unwrap();
        mode(source.join(name), in_source);
        mode(target.join(name), in_target);
    }
    mode(&source, 0o700);
    std::os::unix::fs::chown(target.join("other"), Some(1234), Some(5678)).unwrap();
    let entry = |who, permissions| Entry { who, permissions };
    let classes = [entry(Who::Owner, 7), entry(Who::OwningGroup, 5), entry(Who::Mask, 7), entry(Who::Others, 0)];
    let list = Acl::new([&classes[..], &[entry(Who::User(1234), 7)]].concat()).unwrap().encode();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(target.join("list"), "system.posix_acl_access", &list, flags).unwrap();
    let list = args(&[&"-a", &slash(&source), &target]);
    cp_until_rename(&lab, &mut Command::new("env"), &list);
    assert_eq!(mode_of(&target), 0o700);
    // The record of a directory comes before its entries. The user in the list has no rights.
    let expected = [("private", (0o700, 0, 0)), ("other", (0o2755, 0, 0)), ("list", (0o700, 0, 0))];
    let begun = expected.iter().filter(|(name, _)| !names(&target.join(name)).is_empty());
    let rights = |name: &str| {
        let meta = fs::metadata(target.join(name)).unwrap();
        (meta.mode() & 0o7777, meta.uid(), meta.gid())
    };
    assert_ne!(begun.inspect(|(name, expected)| assert_eq!(rights(name), *expected, "{name}")).count(), 0);
    cp(&lab, &list);
    assert_same(&source, &target, Compare::Everything);
}

#[test]
fn files_of_others_get_no_owner_or_set_id_bits() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    let time = 1_700_000_000;
    for name in ["a/tool", "z/tool"] {
        fs::create_dir_all(target.join(name).parent().unwrap()).unwrap();
    }
    write(source.join("a/tool"), "good");
    mode(source.join("a/tool"), 0o4755);
    set_modified(&source.join("a/tool"), time);
    fs::create_dir(source.join("z")).unwrap();
    fs::hard_link(source.join("a/tool"), source.join("z/tool")).unwrap();
    for name in ["theirs", "group", "capable", "disabled"] {
        write(source.join(name), "same");
        std::os::unix::fs::chown(source.join(name), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    std::os::unix::fs::chown(source.join("group"), None, Some(2000)).unwrap();
    mode(source.join("group"), 0o2755);
    // Version 2, effective (include/uapi/linux/capability.h).
    let set_capability = |path: &Path, number: u8| {
        let value = [[1, 0, 0, 2], [1 << number, 0, 0, 0], [0; 4], [0; 4], [0; 4]].concat();
        rustix::fs::setxattr(path, "security.capability", &value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    for (name, bits) in [("capable", 0o755), ("disabled", 0o644)] {
        set_capability(&source.join(name), 7);
        mode(source.join(name), bits);
    }
    mode(target.join("a"), 0o1777);
    let planted = [("a/tool", "evil"), ("group", "evil"), ("capable", "evil"), ("disabled", "evil")];
    for (name, content) in planted.into_iter().chain([("theirs", "own!")]) {
        write(target.join(name), content);
        std::os::unix::fs::chown(target.join(name), Some(NOBODY), Some(NOBODY)).unwrap();
        set_modified(&source.join(name), time);
        set_modified(&target.join(name), time);
    }
    // Another capability is none of the source's.
    set_capability(&target.join("capable"), 3);
    cp(&lab, &args(&[&"-au", &slash(&source), &target]));
    for name in ["a/tool", "z/tool"] {
        let meta = fs::metadata(target.join(name)).unwrap();
        assert_eq!((fs::read_to_string(target.join(name)).unwrap(), meta.uid()), ("good".into(), 0), "{name}");
        assert_eq!(mode_of(target.join(name)), 0o4755, "{name}");
    }
    // The owner is the same: -u compares size and time. But the owner could not give these rights.
    let content = |name: &str| fs::read_to_string(target.join(name)).unwrap();
    assert_eq!(["theirs", "group", "capable", "disabled"].map(content), ["own!", "same", "same", "same"]);
    assert_eq!((mode_of(target.join("group")), fs::metadata(target.join("group")).unwrap().gid()), (0o2755, 2000));
    let again = cp(&lab, &args(&[&"-auv", &slash(&source), &target]));
    assert_eq!(items(&again), Vec::<String>::new());
}

#[test]
fn a_group_that_a_file_cannot_keep_gives_its_rights_to_no_other() {
    let lab = Lab::new();
    let dir = lab.mkdir("dir");
    write(dir.join("new"), "new");
    let program = lab.program_for_all();
    for (groups, expected) in [("--groups=2000", (0o660, 2000)), ("--clear-groups", (0o600, NOBODY))] {
        let file = dir.join("file");
        write(&file, "old");
        give_to_nobody(&lab);
        std::os::unix::fs::chown(&file, None, Some(2000)).unwrap();
        mode(&file, 0o660);
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", groups]).arg(&program).arg("cp").arg(dir.join("new"));
        command.arg(&file).env("XDG_CONFIG_HOME", lab.dir.path()).env("HOME", lab.dir.path());
        assert!(command.status().unwrap().success());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert_eq!((mode_of(&file), fs::metadata(&file).unwrap().gid()), expected, "{groups}");
    }
}

#[test]
fn read_only_entries_of_a_user_are_updated() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.path("target"));
    let attribute = |value: &str| {
        for name in ["dir", "file"] {
            let mut set = Command::new("setfattr");
            assert!(set.args(["-n", "user.k", "-v", value]).arg(source.join(name)).status().unwrap().success());
        }
    };
    write(source.join("dir/link"), "content");
    fs::hard_link(source.join("dir/link"), source.join("other")).unwrap();
    symlink("here", source.join("dir/symlink")).unwrap();
    write(source.join("file"), "");
    attribute("1");
    mode(source.join("file"), 0o444);
    mode(source.join("dir"), 0o555);
    let copy = |options: &[&str]| {
        give_to_nobody(&lab);
        let mut command = as_nobody(&lab);
        command.arg(lab.program_for_all()).arg("cp").args(options).args([slash(&source), target.clone().into()]);
        let out = command.output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        assert_same(&source, &target, Compare::Everything);
    };
    copy(&["-a"]);
    // Names that exist in a read-only directory, one of them as another file.
    fs::remove_file(target.join("dir/link")).unwrap();
    write(target.join("dir/link"), "content");
    fs::remove_file(target.join("dir/symlink")).unwrap();
    symlink("elsewhere", target.join("dir/symlink")).unwrap();
    copy(&["-a"]);
    attribute("2");
    copy(&["-au"]);
    let read = |name: &str| {
        let mut value = [0; 8];
        let len = rustix::fs::getxattr(target.join(name), "user.k", &mut value[..]).unwrap();
        value[..len].to_vec()
    };
    assert_eq!((read("dir"), read("file")), (b"2".to_vec(), b"2".to_vec()));
    // Of another type: what is there cannot even be listed.
    fs::remove_file(source.join("file")).unwrap();
    fs::create_dir(source.join("file")).unwrap();
    mode(source.join("dir"), 0o755);
    fs::remove_file(source.join("dir/symlink")).unwrap();
    write(target.join("closed/inner/file"), "");
    write(source.join("closed"), "now a file");
    mode(target.join("closed/inner"), 0);
    copy(&["-a", "--delete"]);
}

#[test]
fn an_interrupted_copy_of_a_read_only_file_resumes() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    fs::write(source.join("pack"), noise(3 << 20, 1)).unwrap();
    for options in ["-a", "-r"] {
        mode(source.join("pack"), 0o400);
        let list = args(&[&options, &slash(&source), &target]);
        give_to_nobody(&lab);
        cp_until_rename(&lab, &mut as_nobody(&lab), &list);
        assert_eq!(names(&target).len(), 1, "a temporary file");
        let out = as_nobody(&lab).arg(lab.program_for_all()).args(["cp", "--json"]).args(&list).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        assert!(parse(&out)["resumed_bytes"].as_u64().unwrap() > 0, "{options} {}", parse(&out));
        assert_eq!((names(&target), mode_of(target.join("pack"))), (vec!["pack".to_string()], 0o400));
        fs::remove_file(target.join("pack")).unwrap();
    }
}

#[test]
fn deep_paths_below_a_closed_directory_end_no_process() {
    let lab = Lab::new();
    let (source, target) = (lab.mkdir("source"), lab.mkdir("target"));
    let deep = source.join("closed").join("x/".repeat(1000));
    write(deep.join("file"), "content");
    let copied = target.join("closed").join("x/".repeat(1000)).join("file");
    write(&copied, "content");
    give_to_nobody(&lab);
    mode(target.join("closed"), 0);
    let mut command = as_nobody(&lab);
    command.arg(lab.program_for_all()).args(["cp", "-au"]).args([slash(&source), target.into()]);
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(fs::read_to_string(&copied).unwrap(), "content");
}

#[test]
fn files_that_their_owner_has_closed_after_a_kill_stay_closed() {
    for when in [2, 20, 60, 100] {
        let lab = Lab::new();
        let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
        for i in 0..200 {
            // Files that are synced together are recorded after all of them have their names.
            fs::write(source.join(format!("{i}")), noise(if i % 10 == 0 { 3 << 20 } else { 100 }, i)).unwrap();
        }
        let (key, mut daemon) = lab.serve_to_key("create", &served);
        let mut tracer = inject_into(&daemon, &format!("renameat2:signal=KILL:when={when}"), "/dev/null");
        let list = args(&[&"-a", &"--key", &key, &"--retries", &"0", &slash(&source), &daemon.url("e/")]);
        let is_killed = !try_cp(&lab, &list).status.success();
        daemon.kill();
        tracer.wait().unwrap();
        if !is_killed {
            // Several threads rename files, none of them so many.
            assert_ne!(when, 2);
            continue;
        }
        let placed: Vec<String> = names(&served).into_iter().filter(|name| !name.contains(".tw-")).collect();
        assert!(!placed.is_empty() && placed.len() < 200, "{placed:?}");
        placed.iter().for_each(|name| mode(served.join(name), 0o600));
        let allowed = lab.path("allowed-create");
        let more = [OsStr::new("--authorized-keys"), allowed.as_os_str(), OsStr::new("--export")];
        let _daemon = Daemon::start_at(&daemon.addr.clone(), &[&more[..], &[&export("e", &served, "")]].concat());
        // A file that is recorded with another change time is an error: it may not be replaced.
        try_cp(&lab, &list);
        placed.iter().for_each(|name| assert_eq!(mode_of(served.join(name)), 0o600, "{name}"));
        assert_eq!(names(&served).iter().filter(|name| !name.contains(".tw-")).count(), 200);
    }
}
