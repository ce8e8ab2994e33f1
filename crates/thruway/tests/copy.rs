//! `thruway cp` against a daemon, as a user runs it.

use crate::support;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use support::*;

fn os(path: &Path) -> OsString {
    path.as_os_str().into()
}

fn args(list: &[&dyn AsRef<OsStr>]) -> Vec<OsString> {
    list.iter().map(|a| a.as_ref().to_os_string()).collect()
}

#[test]
fn a_tree_with_everything_awkward_survives_there_and_back() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    awkward_tree(&source);
    let daemon = lab.serve(&served);
    // The daemon is of this host, and the user's own; before Linux 6.16 there is no shared memory.
    let near = thruway_fabric::shm::Config::default().open().map_or("iwarp", |_| "shm");
    for (extra, provider) in [
        (&["--encrypt", "off"][..], near),
        (&["--streams", "3", "--encrypt", "on", "--block-size", "256K"], near),
        (&["--provider", near, "--verify", "none"], near),
        (&["--provider", "iwarp", "--encrypt", "on", "--verify", "blake3"], "iwarp"),
        (&["--provider", "iwarp", "--streams", "5", "--block-size", "64K"], "iwarp"),
        (&["--provider", "tcp"], "tcp"),
        (&["--provider", "tcp", "--verify", "none", "--streams", "4"], "tcp"),
        (&["--provider", "tcp", "--encrypt", "on", "--block-size", "256K"], "tcp"),
    ] {
        let mut push = args(&[&"-rp", &source, &daemon.url("e/")]);
        push.extend(extra.iter().map(OsString::from));
        let result = cp(&lab, &push);
        assert_eq!((&result["failed"], &result["provider"]), (&0.into(), &provider.into()));
        assert_same(&source, &served.join("source"), Compare::Everything);
        let back = lab.path("back");
        let mut pull = args(&[&"-rp", &daemon.url("e/source"), &back]);
        pull.extend(extra.iter().map(OsString::from));
        cp(&lab, &pull);
        assert_same(&source, &back, Compare::Everything);
        fs::remove_dir_all(&back).unwrap();
        fs::remove_dir_all(served.join("source")).unwrap();
    }
    assert_eq!(fs::read_dir(&served).unwrap().count(), 0, "no temporary file or journal is left");
}

#[test]
fn holes_stay_holes() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    awkward_tree(&source);
    let daemon = lab.serve(&served);
    let dry = cp(&lab, &args(&[&"-n", &source.join("sparse"), &daemon.url("e/copy")]));
    let result = cp(&lab, &args(&[&source.join("sparse"), &daemon.url("e/copy")]));
    assert!(result["bytes"].as_u64().unwrap() < 1 << 20, "{result}");
    assert_eq!(dry["bytes"], result["bytes"], "a dry run counts no holes");
    let copy = fs::metadata(served.join("copy")).unwrap();
    assert_eq!(copy.size(), 100 << 20);
    assert!(copy.blocks() * 512 < 1 << 20);
}

#[test]
fn without_p_modes_follow_the_umask_and_times_are_new() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    awkward_tree(&source);
    fs::remove_file(source.join("fifo")).unwrap();
    let daemon = lab.serve(&served);
    cp(&lab, &args(&[&"-r", &source, &daemon.url("e")]));
    assert_same(&source, &served.join("source"), Compare::Content);
    let copy = fs::metadata(served.join("source/empty")).unwrap();
    assert_eq!(copy.mode() & 0o7000, 0, "set-user-id is not copied");
    assert!(copy.mtime() > 1_500_000_000);
}

#[test]
fn names_and_slashes_mean_what_scp_and_rsync_users_expect() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("dir"), lab.mkdir("served"));
    fs::write(source.join("f"), "content").unwrap();
    fs::write(lab.path("single"), "one").unwrap();
    let daemon = lab.serve(&served);
    let there = |path: &str| served.join(path).exists();
    let slash = |p: &Path| {
        let mut text = os(p);
        text.push("/");
        text
    };
    cp(&lab, &args(&[&"-r", &source, &daemon.url("e")]));
    assert!(there("dir/f"), "DIR to an existing directory makes directory/DIR");
    cp(&lab, &args(&[&"-r", &source, &daemon.url("e/new")]));
    assert!(there("new/f"), "DIR to nothing makes a copy of that name");
    cp(&lab, &args(&[&"-r", &slash(&source), &daemon.url("e/contents")]));
    assert!(there("contents/f"), "DIR/ to nothing makes a directory of the contents");
    cp(&lab, &args(&[&"-r", &slash(&source), &daemon.url("e/dir2/")]));
    assert!(there("dir2/f"));
    cp(&lab, &args(&[&lab.path("single"), &daemon.url("e/renamed")]));
    assert!(served.join("renamed").is_file());
    cp(&lab, &args(&[&lab.path("single"), &daemon.url("e/into/")]));
    assert!(there("into/single"));
    cp(&lab, &args(&[&lab.path("single"), &source.join("f"), &daemon.url("e/two")]));
    assert!(there("two/single") && there("two/f"));
    // The same rules the other way.
    let here = lab.mkdir("here");
    cp(&lab, &args(&[&"-r", &daemon.url("e/dir"), &here]));
    cp(&lab, &args(&[&"-r", &daemon.url("e/dir/"), &here.join("c")]));
    cp(&lab, &args(&[&daemon.url("e/renamed"), &here.join("r")]));
    cp(&lab, &args(&[&daemon.url("e/renamed"), &daemon.url("e/dir/f"), &here]));
    for path in ["dir/f", "c/f", "r", "renamed", "f"] {
        assert!(here.join(path).is_file(), "{path}");
    }
    // And on one machine.
    cp(&lab, &args(&[&"-r", &source, &here.join("local")]));
    assert!(here.join("local/f").is_file());
    // As cp and rsync have it: `DIR/.` is `DIR/`, also where the directory is there already.
    for _ in 0..2 {
        cp(&lab, &args(&[&"-r", &source.join("."), &daemon.url("e/dot")]));
        cp(&lab, &args(&[&"-r", &daemon.url("e/dir/."), &here.join("dot")]));
    }
    for root in [served.join("dot"), here.join("dot")] {
        assert_eq!(fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>(), ["f"]);
    }
}

#[test]
fn a_directory_without_r_or_a_missing_source_is_an_error_that_names_it() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("dir"), lab.mkdir("served"));
    let daemon = lab.serve(&served);
    let out = try_cp(&lab, &args(&[&source, &daemon.url("e")]));
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("-r"), "{}", stderr(&out));
    let out = try_cp(&lab, &args(&[&lab.path("missing"), &daemon.url("e")]));
    assert!(stderr(&out).contains("missing: No such file"), "{}", stderr(&out));
    let out = try_cp(&lab, &args(&[&daemon.url("e/gone"), &lab.path("x")]));
    assert!(stderr(&out).contains("gone") && out.status.code() == Some(1), "{}", stderr(&out));
    let out = try_cp(&lab, &args(&[&daemon.url("nope/x"), &lab.path("x")]));
    assert!(stderr(&out).contains("no export 'nope'"), "{}", stderr(&out));
    let out = try_cp(&lab, &args(&[&"--verify", &"md5", &source, &lab.path("x")]));
    assert_eq!(out.status.code(), Some(2), "a usage error");
}

#[test]
fn options_of_other_programs_are_understood_or_explained() {
    let lab = Lab::new();
    let source = lab.mkdir("dir");
    fs::write(source.join("f"), "x").unwrap();
    fs::File::open(source.join("f")).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    cp(&lab, &args(&[&"-a", &source, &lab.path("copy")]));
    assert_eq!(fs::metadata(lab.path("copy/f")).unwrap().mtime(), 0);
    for (option, hint) in [
        ("-z", "nothing is compressed"),
        ("-P", "always resume"),
        ("-rc", "-u"),
        ("-rpR", "-r"),
        ("-d", "'-r' copies directories"),
        ("-C", "--exclude"),
        ("-f", "always replaced"),
        ("-t", "'-p' keeps mode"),
        ("--inplace", "temporary names"),
        ("--delete-after", "'--delete' removes"),
        ("--exclude-from", "one pattern each"),
    ] {
        let out = try_cp(&lab, &args(&[&option, &source, &lab.path("other")]));
        assert!(out.status.code() == Some(2) && stderr(&out).contains(hint), "{}", stderr(&out));
    }
}

#[test]
fn sources_on_several_hosts_are_a_usage_error() {
    let lab = Lab::new();
    for sources in [["tw://one/e/a", "tw://two/e/a"], ["tw://one/e/a", "tw://one/f/a"], ["tw://one/e/a", "local"]] {
        let out = try_cp(&lab, &args(&[&sources[0], &sources[1], &lab.path("target")]));
        assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
        assert!(stderr(&out).contains("all sources must be on one host"), "{}", stderr(&out));
    }
}

#[test]
fn errors_name_the_export_the_source_and_the_directory() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    let daemon = lab.serve(&served);
    let out = try_cp(&lab, &args(&[&daemon.url("e"), &lab.path("target")]));
    let url = daemon.url("e").into_string().unwrap();
    assert!(stderr(&out).contains(&format!("{url}: is a directory")), "{}", stderr(&out));
    fs::remove_dir(&served).unwrap();
    let out = thruway(lab.dir.path()).args(["ls", &url]).output().unwrap();
    assert!(stderr(&out).contains(": e: No such file"), "{}", stderr(&out));
    let out = thruway(lab.dir.path()).args(["clean"]).arg(lab.path("gone")).output().unwrap();
    assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(1), &b""[..]));
}

#[test]
fn update_skips_and_delete_removes_and_dry_run_does_neither() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for i in 0..50 {
        fs::write(source.join(format!("f{i}")), noise(1000 * i, i as u64)).unwrap();
    }
    let daemon = lab.serve(&served);
    cp(&lab, &args(&[&"-rp", &source, &daemon.url("e")]));
    let copy = served.join("source");
    fs::write(source.join("f7"), "changed").unwrap();
    fs::write(source.join("new"), "new").unwrap();
    fs::remove_file(source.join("f8")).unwrap();
    fs::create_dir_all(copy.join("extra/deep")).unwrap();
    fs::write(copy.join("extra/deep/file"), "x").unwrap();
    let before: Vec<_> = fs::read_dir(&copy).unwrap().map(|e| e.unwrap().file_name()).collect();
    let dry = cp(&lab, &args(&[&"-rp", &"--update", &"--delete", &"-n", &source, &daemon.url("e")]));
    let after: Vec<_> = fs::read_dir(&copy).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(before, after);
    assert_eq!((dry["bytes"].as_u64(), dry["deleted"].as_u64()), (Some(10), Some(4)), "{dry}");
    let real = cp(&lab, &args(&[&"-rp", &"--update", &"--delete", &source, &daemon.url("e")]));
    assert_eq!((real["bytes"].as_u64(), real["deleted"].as_u64()), (Some(10), Some(4)), "{real}");
    assert_same(&source, &copy, Compare::Everything);
    let again = cp(&lab, &args(&[&"-rp", &"--update", &source, &daemon.url("e")]));
    assert_eq!(again["bytes"], 0);
}

#[test]
fn include_and_exclude_choose_what_travels() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for name in ["a.c", "a.o", "keep.o", "build/x.c", "src/build/y.c"] {
        fs::create_dir_all(source.join(name).parent().unwrap()).unwrap();
        fs::write(source.join(name), name).unwrap();
    }
    let daemon = lab.serve(&served);
    let filters = args(&[&"-r", &"--exclude", &"*.o", &"--include", &"keep.o", &"--exclude", &"/build"]);
    cp(&lab, &[filters, args(&[&source, &daemon.url("e")])].concat());
    let copy = served.join("source");
    for (name, taken) in [("a.c", true), ("a.o", false), ("keep.o", true), ("build", false), ("src/build/y.c", true)] {
        assert_eq!(copy.join(name).exists(), taken, "{name}");
    }
}

#[test]
fn unreadable_and_vanishing_entries_are_reported_and_the_rest_arrives() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    fs::write(source.join("good"), "good").unwrap();
    fs::write(served.join("in the way"), "x").unwrap();
    // A process's memory file opens but does not read; a directory of ours is in a file's way.
    std::os::unix::fs::symlink("/proc/self/mem", source.join("link")).unwrap();
    fs::create_dir_all(served.join("source/blocked/full")).unwrap();
    fs::write(source.join("blocked"), "cannot replace a directory").unwrap();
    let daemon = lab.serve(&served);
    let out = try_cp(&lab, &args(&[&"-r", &source, &daemon.url("e")]));
    assert_eq!(out.status.code(), Some(1));
    let result = parse(&out);
    assert_eq!((result["files"].as_u64(), result["failed"].as_u64()), (Some(1), Some(1)), "{result}");
    assert!(stderr(&out).contains("source/blocked: "), "{}", stderr(&out));
    assert_eq!(fs::read_to_string(served.join("source/good")).unwrap(), "good");
}

#[test]
fn nothing_leaves_the_export() {
    let lab = Lab::new();
    let (served, outside) = (lab.mkdir("served"), lab.mkdir("outside"));
    fs::write(outside.join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink(&outside, served.join("exit")).unwrap();
    std::os::unix::fs::symlink(outside.join("secret"), served.join("leak")).unwrap();
    fs::write(lab.path("f"), "x").unwrap();
    let daemon = lab.serve(&served);
    for path in ["e/../outside/secret", "e/exit/secret", "e/leak", "e/%2e%2e/outside/secret"] {
        let out = try_cp(&lab, &args(&[&daemon.url(path), &lab.path("stolen")]));
        assert_eq!(out.status.code(), Some(1), "{path}");
        assert!(!lab.path("stolen").exists(), "{path}");
    }
    for path in ["e/exit/new", "e/exit/", "e/../outside/new"] {
        let out = try_cp(&lab, &args(&[&lab.path("f"), &daemon.url(path)]));
        assert_eq!(out.status.code(), Some(1), "{path}");
    }
    // A link that a peer has made must not become a way out either.
    let evil = lab.mkdir("evil");
    std::os::unix::fs::symlink(&outside, evil.join("d")).unwrap();
    cp(&lab, &args(&[&"-r", &evil, &daemon.url("e")]));
    let out = try_cp(&lab, &args(&[&lab.path("f"), &daemon.url("e/evil/d/new")]));
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
}

#[test]
fn a_link_does_not_move_the_place_of_a_key() {
    let lab = Lab::new();
    let (served, source) = (lab.mkdir("served"), lab.mkdir("source"));
    fs::create_dir(served.join("alice")).unwrap();
    fs::write(served.join("alice/secret"), "secret").unwrap();
    for link in ["mallory", "bob"] {
        std::os::unix::fs::symlink("alice", source.join(link)).unwrap();
    }
    let key = lab.path("key");
    assert!(thruway(lab.dir.path()).args(["keygen", "--quiet", "--output"]).arg(&key).status().unwrap().success());
    let public = fs::read_to_string(key.with_extension("pub")).unwrap().trim().to_string();
    let allowed = lab.path("authorized");
    // Neither place is there.
    let places = ["rw,export=e/mallory", "read,export=e/bob/deep", "create,export=e"];
    fs::write(&allowed, places.map(|place| format!("{place} {public}\n")).concat()).unwrap();
    let keys = [OsStr::new("--authorized-keys"), allowed.as_os_str(), OsStr::new("--export")];
    let daemon = Daemon::start(&[&keys[..], &[&export("e", &served, "")]].concat());
    let by_key =
        |from: &dyn AsRef<OsStr>, to: &dyn AsRef<OsStr>| try_cp(&lab, &args(&[&"-r", &"--key", &key, from, to]));
    let mut contents = source.clone().into_os_string();
    contents.push("/");
    assert!(by_key(&contents, &daemon.url("e/")).status.success(), "it may make the links");
    fs::create_dir(served.join("alice/deep")).unwrap();
    for path in ["e/mallory/secret", "e/mallory", "e/bob/deep"] {
        let out = by_key(&daemon.url(path), &lab.path("out"));
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("symbolic link"), "{path}: {}", stderr(&out));
    }
    assert!(!lab.path("out").exists());
}

#[test]
fn items_tell_a_key_without_the_right_to_read_no_names_and_targets() {
    let lab = Lab::new();
    let (served, source, key) = (lab.mkdir("served"), lab.mkdir("source"), lab.path("key"));
    fs::create_dir_all(served.join("d/secret-dir")).unwrap();
    fs::create_dir(source.join("d")).unwrap();
    fs::create_dir_all(served.join("way/secret-name")).unwrap();
    fs::write(source.join("way"), "a file").unwrap();
    for dir in [&served, &source] {
        std::os::unix::fs::symlink("secret-target", dir.join("link")).unwrap();
    }
    assert!(thruway(lab.dir.path()).args(["keygen", "--quiet", "--output"]).arg(&key).status().unwrap().success());
    let public = fs::read_to_string(key.with_extension("pub")).unwrap().trim().to_string();
    let allowed = lab.path("authorized");
    let mut contents = source.clone().into_os_string();
    contents.push("/");
    for (rights, told) in [("create,replace,delete", false), ("rw", true)] {
        fs::write(&allowed, format!("{rights} {public}\n")).unwrap();
        let keys = [OsStr::new("--authorized-keys"), allowed.as_os_str(), OsStr::new("--export")];
        let daemon = Daemon::start(&[&keys[..], &[&export("e", &served, "")]].concat());
        let result = cp(&lab, &args(&[&"-rn", &"--delete", &"--key", &key, &contents, &daemon.url("e/")]));
        let items = result["items"].to_string();
        assert_eq!(result["deleted"], 2, "{result}");
        // The number of deleted entries would show whether a name matches.
        let probe =
            args(&[&"-rn", &"--delete", &"--exclude", &"secret-d*", &"--key", &key, &contents, &daemon.url("e/")]);
        let out = try_cp(&lab, &probe);
        assert_eq!(stderr(&out).contains("patterns requires the right to read"), !told, "{}", stderr(&out));
        assert_eq!(items.contains("secret"), told, "{items}");
        assert_eq!(items.contains("not compared"), !told, "{items}");
    }
}

#[test]
fn failed_removals_tell_a_key_without_the_right_to_read_no_names() {
    let lab = Lab::new();
    let (served, source) = (lab.mkdir("served"), lab.mkdir("source"));
    fs::create_dir(served.join("way")).unwrap();
    fs::write(served.join("way/Jane"), [0; 4096]).unwrap();
    std::os::unix::fs::symlink("target", source.join("way")).unwrap();
    // As a virtual machine locks its disk.
    let script = "import fcntl, struct, sys
f = open(sys.argv[1], 'r+b')
fcntl.fcntl(f, 37, struct.pack('hhqqi', fcntl.F_WRLCK, 0, 100, 1, 0))
print(flush=True)
sys.stdin.read()";
    let mut holder = Command::new("python3")
        .args(["-c", script])
        .arg(served.join("way/Jane"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    BufReader::new(holder.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    let mut contents = source.into_os_string();
    contents.push("/");
    for (rights, told) in [("create,replace,delete", false), ("rw", true)] {
        let (key, daemon) = lab.serve_to_key(rights, &served);
        for option in ["-rn", "-r"] {
            let out = try_cp(&lab, &args(&[&option, &"--delete", &"--key", &key, &contents, &daemon.url("e/")]));
            let text = stderr(&out);
            assert!(out.status.code() == Some(1) && text.contains("in use as a disk"), "{text}");
            assert_eq!(text.contains("Jane"), told, "{text}");
        }
    }
    assert!(served.join("way/Jane").exists());
    drop(holder.stdin.take());
    holder.wait().unwrap();
}

#[test]
fn keys_decide_who_may_do_what() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    fs::write(served.join("f"), "content").unwrap();
    fs::write(lab.path("g"), "x").unwrap();
    let keygen = |name: &str| {
        let path = lab.path(name);
        assert!(thruway(lab.dir.path()).args(["keygen", "--quiet", "--output"]).arg(&path).status().unwrap().success());
        let public = fs::read_to_string(path.with_extension("pub")).unwrap().trim().to_string();
        (path, public)
    };
    let ((writer, writer_pub), (reader, reader_pub), (stranger, _)) = (keygen("w"), keygen("r"), keygen("s"));
    let allowed = lab.path("authorized");
    fs::write(&allowed, format!("# who\n{writer_pub} writer\nro,export=e {reader_pub}\n")).unwrap();
    let daemon = Daemon::start(&[
        OsStr::new("--authorized-keys"),
        allowed.as_os_str(),
        OsStr::new("--export"),
        &export("e", &served, ""),
        OsStr::new("--export"),
        &export("fixed", &served, ":ro"),
    ]);
    let read = |key: &Path| try_cp(&lab, &args(&[&"--key", &key, &daemon.url("e/f"), &lab.path("out")]));
    let write = |key: &Path, to: &str| try_cp(&lab, &args(&[&"--key", &key, &lab.path("g"), &daemon.url(to)]));
    assert!(read(&writer).status.success() && read(&reader).status.success());
    assert!(write(&writer, "e/g").status.success());
    for (out, why) in [
        (read(&stranger), "does not know your key"),
        (write(&reader, "e/h"), "no right to write"),
        (write(&writer, "fixed/h"), "read-only"),
        (write(&stranger, "e/h"), "does not know your key"),
        (try_cp(&lab, &args(&[&daemon.url("e/f"), &lab.path("out2")])), "does not know your key"),
    ] {
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains(why), "{}", stderr(&out));
    }
    assert!(!served.join("h").exists());
    // Exports can be listed, by each who knows them.
    for (key, expected) in [(&writer, &["e", "fixed"][..]), (&reader, &["e"])] {
        let mut ls = thruway(lab.dir.path());
        let out = ls.args(["ls", "--json", "--key"]).arg(key).arg(daemon.url("")).output().unwrap();
        let names: Vec<String> =
            parse(&out).as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap().to_string()).collect();
        assert_eq!(names, expected);
    }
    // --anonymous is an option of all services, and opens nothing that has keys.
    let keys =
        [OsStr::new("--anonymous"), OsStr::new("--authorized-keys"), allowed.as_os_str(), OsStr::new("--export")];
    let daemon = Daemon::start(&[&keys[..], &[&export("e", &served, "")]].concat());
    let read = |key: &Path| try_cp(&lab, &args(&[&"--key", &key, &daemon.url("e/f"), &lab.path("out")]));
    assert!(read(&reader).status.success());
    let out = read(&stranger);
    assert!(out.status.code() == Some(1) && stderr(&out).contains("does not know your key"), "{}", stderr(&out));
}

#[test]
fn a_daemon_beyond_this_machine_refuses_to_start_open_to_anybody() {
    let lab = Lab::new();
    let out = thruway(lab.dir.path()).args(["serve", "--listen", "0.0.0.0:0", "--export", "e=/tmp"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(stderr(&out).contains("--authorized-keys"), "{}", stderr(&out));
}

#[test]
fn listings_show_what_is_there() {
    let lab = Lab::new();
    let served = lab.mkdir("served/sub");
    for i in 0..100 {
        fs::write(served.join(format!("f{i:03}")), vec![0; i]).unwrap();
    }
    let daemon = lab.serve(&lab.path("served"));
    let out = thruway(lab.dir.path()).args(["ls", "--json"]).arg(daemon.url("e/sub")).output().unwrap();
    let rows = parse(&out);
    assert_eq!(rows.as_array().unwrap().len(), 100);
    assert_eq!((&rows[42]["name"], &rows[42]["size"]), (&"f042".into(), &42.into()));
    let out = thruway(lab.dir.path()).args(["ls"]).arg(daemon.url("e/sub/../..")).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
}

#[test]
fn a_listing_of_many_entries_is_sorted() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    (0..100_000).for_each(|i| drop(fs::File::create(served.join(format!("f{i:06}"))).unwrap()));
    let daemon = lab.serve(&served);
    for provider in ["auto", "tcp"] {
        let out = thruway(lab.dir.path()).args(["ls", "--provider", provider]).arg(daemon.url("e")).output().unwrap();
        let lines = String::from_utf8(out.stdout).unwrap();
        let names: Vec<_> = lines.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
        assert_eq!((names.len(), names[0], names[99_999]), (100_000, "f000000", "f099999"));
        assert!(names.is_sorted());
    }
}

#[test]
fn memory_to_memory_moves_what_was_asked_for() {
    let lab = Lab::new();
    let daemon = lab.serve(&lab.mkdir("served"));
    let result = cp(&lab, &args(&[&"--size", &"64M", &"/dev/zero", &daemon.url("dev/null")]));
    assert_eq!(result["bytes"], 64 << 20);
    let result = cp(&lab, &args(&[&"--size", &"10M", &daemon.url("dev/zero"), &lab.path("zeros")]));
    assert_eq!(result["bytes"], 10 << 20);
    assert_eq!(fs::metadata(lab.path("zeros")).unwrap().len(), 10 << 20);
}

#[test]
fn a_rate_limit_is_kept_and_holds_nothing_up() {
    let lab = Lab::new();
    let daemon = lab.serve(&lab.mkdir("served"));
    let (zero, null) = (daemon.url("dev/zero"), daemon.url("dev/null"));
    for (from, to) in [(OsStr::new("/dev/zero"), null.as_os_str()), (&zero, OsStr::new("/dev/null"))] {
        let began = Instant::now();
        let result = cp(&lab, &args(&[&"--bwlimit", &"10M", &"--size", &"20M", &from, &to]));
        assert_eq!(result["bytes"].as_u64(), Some(20 << 20), "{result}");
        // Two seconds' worth; some of it goes at once.
        assert!(began.elapsed() > Duration::from_secs(1), "{:?}", began.elapsed());
    }
}

#[test]
fn the_peer_is_started_through_ssh() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    awkward_tree(&source);
    let target = lab.mkdir("target");
    let run = |list: Vec<OsString>| {
        let out = with_fake_ssh(&lab).args(["cp", "--json", "-rp"]).args(list).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
    };
    let mut there = OsString::from("localhost:");
    there.push(&target);
    run(args(&[&source, &there]));
    assert_same(&source, &target.join("source"), Compare::Everything);
    there.push("/source");
    run(args(&[&there, &lab.path("back")]));
    assert_same(&source, &lab.path("back"), Compare::Everything);
}

#[test]
fn many_small_sessions_at_once_are_all_served() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    fs::write(served.join("f"), "content").unwrap();
    let daemon = lab.serve(&served);
    let mut running = Vec::new();
    for i in 0..100 {
        let mut command = thruway(lab.dir.path());
        command.args(["cp", "--quiet"]).arg(daemon.url("e/f")).arg(lab.path(&format!("copy{i}")));
        running.push(command.spawn().unwrap());
    }
    for mut child in running {
        assert!(child.wait().unwrap().success());
    }
    for i in 0..100 {
        assert_eq!(fs::read_to_string(lab.path(&format!("copy{i}"))).unwrap(), "content");
    }
}

#[test]
fn the_machines_own_usr_tree_arrives_whole_in_bounded_memory() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    let daemon = lab.serve(&served);
    let result = cp(&lab, &args(&[&"-rp", &"/usr", &daemon.url("e/")]));
    assert_eq!(result["failed"], 0);
    assert_same(Path::new("/usr"), &served.join("usr"), Compare::Everything);
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches("kB").trim().parse().unwrap();
    // The pool is 64 blocks of 1 MiB and their headers.
    assert!(peak < (65 + 64) << 10, "the daemon took {peak} KiB");
}

#[test]
fn what_has_more_in_it_than_its_size_is_not_copied_as_nothing() {
    let lab = Lab::new();
    let out = try_cp(&lab, &args(&[&"/proc/cpuinfo", &lab.path("copy")]));
    assert!(!out.status.success() && stderr(&out).contains("/proc/cpuinfo") | stderr(&out).contains("copy"), "{out:?}");
    assert!(!lab.path("copy").exists());
}

#[test]
fn a_copy_goes_on_where_its_messages_cannot_be_written() {
    let lab = Lab::new();
    let (source, full) = (lab.mkdir("source"), fs::File::options().write(true).open("/dev/full").unwrap());
    fs::write(source.join("f"), "content").unwrap();
    assert!(std::process::Command::new("mkfifo").arg(source.join("pipe")).status().unwrap().success());
    // That the pipe is left out is told, to nobody.
    let mut command = thruway(lab.dir.path());
    command.args(args(&[&"cp", &"-r", &source, &lab.path("copy")])).stdout(full.try_clone().unwrap()).stderr(full);
    assert_eq!(command.status().unwrap().code(), Some(1));
    assert_eq!(fs::read_to_string(lab.path("copy/f")).unwrap(), "content");
}

#[test]
fn the_directory_that_a_copy_is_made_in_has_its_times_too() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    fs::write(source.join("f"), "content").unwrap();
    let touch = std::process::Command::new("touch").args(["-d", "@1000000000.5"]).arg(&source).status().unwrap();
    assert!(touch.success());
    cp(&lab, &args(&[&"-rp", &source.join("."), &lab.path("copy")]));
    let daemon = lab.serve(&lab.mkdir("served"));
    cp(&lab, &args(&[&"-rp", &source, &daemon.url("e/there")]));
    cp(&lab, &args(&[&"-rp", &daemon.url("e/there"), &lab.path("back")]));
    for path in ["copy", "served/there", "back"] {
        let meta = fs::metadata(lab.path(path)).unwrap();
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (1_000_000_000, 500_000_000), "{path}");
    }
}

#[test]
fn a_source_that_is_not_there_leaves_nothing_behind() {
    let lab = Lab::new();
    fs::write(lab.path("file"), "").unwrap();
    for source in ["none/.", "none/", "file/."] {
        let out = try_cp(&lab, &args(&[&"-r", &lab.path(source), &lab.path("copy")]));
        assert!(!out.status.success() && !lab.path("copy").exists(), "{source}");
    }
    // `..` at the end of a name is no directory's parent.
    let served = lab.mkdir("served");
    fs::create_dir(served.join("a..")).unwrap();
    let daemon = lab.serve(&served);
    cp(&lab, &args(&[&"-r", &daemon.url("e/a.."), &lab.mkdir("here")]));
    assert!(lab.path("here/a..").is_dir());
}

/// Of a file of nothing but a hole the end is known as soon as its beginning, and is heard of earlier.
#[test]
fn any_number_of_files_without_data_is_copied() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for n in 0..6000 {
        fs::File::create(source.join(n.to_string())).unwrap().set_len(3 << 20).unwrap();
    }
    let daemon = lab.serve(&served);
    let copied = cp(&lab, &args(&[&"-r", &"--provider", &"tcp", &source, &daemon.url("e/there")]));
    assert_eq!(copied["files"], 6000);
    let copied = cp(&lab, &args(&[&"-r", &"--provider", &"tcp", &daemon.url("e/there"), &lab.path("back")]));
    assert_eq!(copied["files"], 6000);
    assert_eq!(fs::metadata(lab.path("back/5999")).unwrap().len(), 3 << 20);
}

#[test]
fn items_are_named_with_the_reason() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    let (here, far) = (lab.mkdir("here"), served.join("far"));
    for name in ["fresh", "longer", "newer", "older", "kept", "sub/inner"] {
        fs::create_dir_all(source.join(name).parent().unwrap()).unwrap();
        fs::write(source.join(name), name).unwrap();
    }
    std::os::unix::fs::symlink("fresh", source.join("link")).unwrap();
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let stamp = |path: &Path, seconds| fs::File::open(path).unwrap().set_modified(at(seconds)).unwrap();
    for name in ["fresh", "longer", "newer", "older", "kept"] {
        stamp(&source.join(name), 1_000_000_000);
    }
    for target in [&here, &far] {
        fs::create_dir_all(target.join("gone")).unwrap();
        for (name, content, seconds) in [
            ("longer", "other length", 1_000_000_000),
            ("newer", "newer", 1),
            ("older", "older", 2_000_000_000),
            ("kept", "kept", 1_000_000_000),
            ("gone/old", "old", 1),
        ] {
            fs::write(target.join(name), content).unwrap();
            stamp(&target.join(name), seconds);
        }
        std::os::unix::fs::symlink("elsewhere", target.join("link")).unwrap();
    }
    let daemon = lab.serve(&served);
    let mut expected = [
        ("fresh", "new"),
        ("gone", "deleted"),
        ("gone/old", "deleted"),
        ("kept", "same size, time"),
        ("link", "target differs"),
        ("longer", "size differs"),
        ("newer", "newer"),
        ("older", "older"),
        ("sub", "new"),
        ("sub/inner", "new"),
    ]
    .map(|(path, reason)| (path.to_string(), reason.to_string()));
    expected.sort();
    let contents = |path: &Path| {
        let mut text = os(path);
        text.push("/");
        text
    };
    let serving = lab.serve(&source);
    // A push to a daemon, a pull from one, and a local copy report the same items, for -n and -v.
    for option in ["-n", "-v"] {
        for (from, to) in [
            (contents(&source), daemon.url("e/far")),
            (if option == "-n" { serving.url("e/") } else { contents(&source) }, here.clone().into()),
        ] {
            let mut command = thruway(lab.dir.path());
            let out = command.args(["cp", "--json", "-r", "--delete", option]).args([&from, &to]).output().unwrap();
            assert!(out.status.success(), "{}", stderr(&out));
            let result = parse(&out);
            let text = |item: &serde_json::Value, key: &str| item[key].as_str().unwrap().to_string();
            let mut items: Vec<(String, String)> =
                result["items"].as_array().unwrap().iter().map(|i| (text(i, "path"), text(i, "reason"))).collect();
            items.sort();
            assert_eq!(items, expected, "{option} {to:?}");
            assert_eq!(result["deleted"], 2);
        }
        assert_eq!(here.join("gone").exists(), option == "-n");
    }
    assert_same(&source, &far, Compare::Content);
    // Without --json, each item is a line; its path begins with the name of the source.
    fs::write(served.join("gone"), "").unwrap();
    let out =
        thruway(lab.dir.path()).args(["cp", "-rn"]).args([source.as_os_str(), &daemon.url("e/")]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(said.lines().any(|line| line.split_whitespace().eq(["new", "source/sub/inner"])), "{said}");
    fs::create_dir_all(served.join("source/gone")).unwrap();
    let list = ["cp", "-rn", "--delete"];
    let out = thruway(lab.dir.path()).args(list).args([source.as_os_str(), &daemon.url("e/")]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(said.lines().any(|line| line.split_whitespace().eq(["deleted", "source/gone"])), "{said}");
    assert!(said.contains(", would delete 1"), "{said}");
    assert!(cp(&lab, &args(&[&"-r", &source, &daemon.url("e/")])).get("items").is_none());
}

#[test]
fn items_of_files_that_are_up_to_date_are_their_attributes_if_these_differ() {
    let lab = Lab::new();
    let (source, served) = (lab.mkdir("source"), lab.mkdir("served"));
    for name in ["same", "mode", "xattr", "owner"] {
        fs::write(source.join(name), name).unwrap();
    }
    std::os::unix::fs::symlink("same", source.join("link")).unwrap();
    let daemon = lab.serve(&served);
    let mut from = os(&source);
    from.push("/");
    let update = |option: &str| {
        let result = cp(&lab, &args(&[&"-rpu", &option, &from, &daemon.url("e/")]));
        let items = result["items"].as_array().unwrap();
        let mut paths: Vec<String> = items.iter().map(|item| item["path"].as_str().unwrap().into()).collect();
        paths.sort();
        // A file of another owner is sent again.
        let is_right = |item: &serde_json::Value| match item["path"].as_str() {
            Some("owner") => item["reason"] == "same size, time" || item["reason"] == "new",
            _ => item["reason"] == "attributes" || item["reason"] == "new",
        };
        assert!(items.iter().all(is_right), "{items:?}");
        paths
    };
    assert_eq!(update("-v").len(), 5);
    assert!(update("-n").is_empty());
    fs::set_permissions(source.join("mode"), fs::Permissions::from_mode(0o640)).unwrap();
    let name = std::ffi::CString::new("user.note").unwrap();
    rustix::fs::setxattr(source.join("xattr"), &name, b"v", rustix::fs::XattrFlags::empty()).unwrap();
    let mut expected = vec!["mode", "xattr"];
    if std::os::unix::fs::chown(source.join("owner"), Some(NOBODY), None).is_ok() {
        expected.insert(1, "owner");
    }
    for option in ["-n", "-v"] {
        assert_eq!(update(option), expected, "{option}");
    }
    assert!(update("-n").is_empty());
}

#[test]
fn mistakes_of_users_of_other_programs_are_explained() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    fs::write(served.join("a.log"), "").unwrap();
    fs::write(lab.path("f"), "").unwrap();
    let daemon = lab.serve(&served);
    let said = |status, list: &[&dyn AsRef<OsStr>], expected: &str| {
        let out = with_fake_ssh(&lab).env("THRUWAY_LOG", "off").args(args(list)).output().unwrap();
        assert!(
            out.status.code() == Some(status) && stderr(&out).contains(expected),
            "{:?} {}",
            args(list),
            stderr(&out)
        );
        out
    };
    for (option, expected) in [
        ("-P", "~/.ssh/config"),
        ("-e", "THRUWAY_SSH"),
        ("-i", "'-v' names each item"),
        ("-L", "links are copied as links"),
        ("-x", "'--exclude'"),
        ("-c", "every block"),
        ("-H", "'-p' keeps mode"),
        ("-aHAX", "'-p' keeps mode"),
        ("-avh", "'-avh' contains an option that prints help"),
        ("-rt", "'-p' keeps mode"),
        ("-l", "always copied as links"),
    ] {
        said(2, &[&"cp", &option, &"x", &"h:y", &"z"], expected);
    }
    said(1, &[&"cp", &"-p", &"2222", &lab.path("f"), &"h:y"], "a port for ssh is set in ~/.ssh/config");
    for paths in [["", "x"], ["x", ""]] {
        let out = said(2, &[&"cp", &paths[0], &paths[1]], "thruway cp: empty path ''");
        assert!(!stderr(&out).contains("-p"), "{}", stderr(&out));
    }
    said(1, &[&"cp", &daemon.url("e/*.log"), &lab.mkdir("here")], "patterns are not expanded on the other host");
    said(2, &[&"cp", &lab.path("f"), &"tw://127.0.0.1"], "no export is named");
    let absolute = lab.path("none/x");
    let mut there = OsString::from("localhost:");
    there.push(&absolute);
    said(1, &[&"cp", &there, &lab.path("g")], &format!("thruway cp: {}: ", absolute.display()));
    said(1, &[&"cp", &lab.path("f"), &there], &format!("localhost: {}: No such file", absolute.display()));
    let out =
        with_fake_ssh(&lab).env("THRUWAY_REMOTE", "/no/thruway").arg("cp").arg(&there).arg(lab.path("g")).output();
    assert!(stderr(&out.unwrap()).contains("THRUWAY_REMOTE"));
    // The daemon has ended, so nothing listens at its address.
    let gone = daemon.url("e/x");
    drop(daemon);
    let out =
        said(1, &[&"cp", &"--json", &"--retries", &"0", &lab.path("f"), &gone], "is 'thruway serve' running there?");
    assert!(parse(&out)["error"].as_str().unwrap().contains("is 'thruway serve' running"));
    let key = lab.path("key");
    said(0, &[&"keygen", &"--output", &key], "");
    let public = fs::read_to_string(key.with_extension("pub")).unwrap();
    said(1, &[&"keygen", &"--output", &key], public.split_whitespace().next().unwrap());
    for (address, expected) in [("localhost:7", "127.0.0.1:7"), (":7", "0.0.0.0:7"), ("127.0.0.1", "127.0.0.1:7117")] {
        said(2, &[&"serve", &"--listen", &address], expected);
    }
    said(2, &[&"serve", &"--share", &"d=/tmp,squash=some"], "invalid squash 'some' (expected root, all or none)");
    let out = thruway(lab.dir.path()).env("THRUWAY_LOG", "nonsense=xx").args(["keygen", "--output"]).arg(&key).output();
    assert!(stderr(&out.unwrap()).contains("invalid THRUWAY_LOG 'nonsense=xx'"));
}

#[test]
fn the_port_of_another_protocol_is_named() {
    let lab = Lab::new();
    fs::write(lab.path("f"), "").unwrap();
    let disks = disks::Disks::serve(&["--block", "d=mem:1M", "--nbd", "127.0.0.1:0"]);
    let url = format!("tw://{}/e/f", disks.at("nbd"));
    for provider in ["auto", "iwarp", "tcp"] {
        let file = lab.path("f");
        for list in [args(&[&"cp", &"--retries", &"0", &file, &url]), args(&[&"ls", &url])] {
            let out = thruway(lab.dir.path()).args(list).args(["--provider", provider]).output().unwrap();
            assert_eq!(out.status.code(), Some(1));
            assert!(stderr(&out).contains("serves NBD; the port of a daemon"), "{provider}: {}", stderr(&out));
        }
    }
}

#[test]
fn each_failure_to_start_the_other_end_has_its_own_message() {
    let lab = Lab::new();
    fs::write(lab.path("f"), "").unwrap();
    let said = |ssh: Option<&str>, there: &str| {
        let mut command = with_fake_ssh(&lab);
        command.env("THRUWAY_REMOTE", there).envs(ssh.map(|ssh| ("THRUWAY_SSH", ssh)));
        let out = command.arg("cp").arg(lab.path("f")).arg("a.example:g").output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{ssh:?} {there}: {}", stderr(&out));
        stderr(&out)
    };
    for (ssh, there, expected) in [
        (Some("/no/ssh"), "thruway", "thruway cp: /no/ssh: not found; install an ssh client"),
        (Some("ssh 'x"), "thruway", "invalid THRUWAY_SSH 'ssh 'x'"),
        (
            Some("sh -c 'exit 255'"),
            "thruway",
            "thruway cp: a.example: ssh failed, with the message above; 'ssh a.example",
        ),
        (Some("sh -c 'kill -9 $$'"), "thruway", "signal 9 ended ssh before the copy"),
        (None, "/no/thruway", "no program '/no/thruway' there; install thruway there"),
        (None, "/dev/null", "'/dev/null' there cannot be executed; check its permissions"),
        (None, "sh -c 'kill -9 $$';exit $?;", "signal 9 ended 'sh"),
        (None, "exit 3;", "there ended with exit status 3; its message is above"),
        (None, "exec echo Welcome;", "'Welcome' came instead of the greeting"),
        (None, "exec echo THRUWAY 2 4711;", "there has another version; install version"),
        (None, &format!("{THRUWAY} --no-such-option"), "there refused the options of version"),
    ] {
        let said = said(ssh, there);
        assert!(said.contains(expected), "{ssh:?} {there}: {said}");
    }
    // Options after the program, and a program whose path has a space.
    let source = lab.path("f");
    let spaced = lab.path("my ssh");
    let run = |ssh: OsString| {
        let mut command = with_fake_ssh(&lab);
        let fake = lab.path("ssh");
        fs::copy(&fake, &spaced).unwrap();
        command.env("THRUWAY_SSH", ssh).arg("cp").arg(&source);
        let out = command.arg(format!("localhost:{}", lab.path("copy").display())).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        fs::remove_file(lab.path("copy")).unwrap();
    };
    run(spaced.clone().into());
    run(format!("env A='b c' '{}'", spaced.display()).into());
}

#[test]
fn a_demo_that_is_interrupted_leaves_nothing_behind() {
    for signal in ["INT", "TERM"] {
        let lab = Lab::new();
        let dir = lab.mkdir("dir");
        let mut command = thruway(lab.dir.path());
        command.args(["demo", "--size", "64M", "--dir"]).arg(&dir);
        let mut demo =
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(demo.stdout.take().unwrap()));
        assert!(lines.any(|line| line.unwrap().starts_with("there by")), "it copies");
        let kill = std::process::Command::new("kill").arg(format!("-{signal}")).arg(demo.id().to_string()).status();
        assert!(kill.unwrap().success());
        let out = demo.wait_with_output().unwrap();
        assert!(!out.status.success());
        assert_eq!(stderr(&out), "thruway demo: stopped; its files are removed\n", "{signal}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "{signal}");
    }
}

/// Outputs that cannot be written, with the reason that is reported: a pipe without a reader, and a full disk.
fn failing_outputs() -> [(Stdio, &'static str); 2] {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    [(writer.into(), "Broken pipe"), (fs::File::create("/dev/full").unwrap().into(), "No space left on device")]
}

#[test]
fn help_that_cannot_be_printed_is_a_failure() {
    let lab = Lab::new();
    for option in ["--help", "-V"] {
        for (output, _) in failing_outputs() {
            let status = thruway(lab.dir.path()).arg(option).stdout(output).status().unwrap();
            assert_eq!(status.code(), Some(1), "{option}");
        }
        assert!(thruway(lab.dir.path()).arg(option).output().unwrap().status.success());
    }
}

#[test]
fn a_demo_whose_output_fails_leaves_nothing_behind() {
    for (output, why) in failing_outputs() {
        let lab = Lab::new();
        let (dir, errors) = (lab.mkdir("dir"), lab.path("errors"));
        let mut command = thruway(lab.dir.path());
        command.args(["demo", "--size", "2M", "--dir"]).arg(&dir).stdout(output);
        // Not a pipe: a daemon that is left would keep it open.
        let status = command.stderr(fs::File::create(&errors).unwrap()).status().unwrap();
        assert_eq!(status.code(), Some(1));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        let is_left = |process: fs::DirEntry| {
            let words = fs::read(process.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&words).contains(dir.to_str().unwrap())
        };
        assert!(!fs::read_dir("/proc").unwrap().flatten().any(is_left), "a daemon is left");
        let said = fs::read_to_string(&errors).unwrap();
        match why {
            "Broken pipe" => assert_eq!(said, ""),
            _ => assert!(said.contains(why), "{said}"),
        }
    }
}

#[test]
fn a_copy_whose_output_fails_is_stopped_and_says_so() {
    let of = |content: &'static str| failing_outputs().map(|(output, why)| (content, output, why));
    for (content, output, why) in of("content").into_iter().chain(of("")) {
        let lab = Lab::new();
        let (source, copy) = (lab.mkdir("source"), lab.mkdir("copy"));
        (0..500).for_each(|i| fs::write(source.join(i.to_string()), content).unwrap());
        let mut command = thruway(lab.dir.path());
        command.args(["cp", "-rv"]).args([&source, &copy]).stdout(output).stderr(Stdio::piped());
        let out = command.spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).starts_with(&format!("thruway cp: standard output: {why}")), "{}", stderr(&out));
        assert!(stderr(&out).contains("; stopped; ") && stderr(&out).lines().count() == 1, "{}", stderr(&out));
        if content.is_empty() {
            // Their records do not count.
            assert!(
                ["; 0 B had been sent", "; the same command starts over"].iter().any(|s| stderr(&out).contains(s)),
                "{}",
                stderr(&out)
            );
        }
        cp(&lab, &args(&[&"-r", &source, &copy]));
        assert_same(&source, &copy.join("source"), Compare::Content);
    }
}

#[test]
fn a_daemon_that_cannot_announce_itself_ends_in_order() {
    for (output, why) in failing_outputs() {
        let lab = Lab::new();
        let socket = lab.path("nbd.sock");
        let mut command = thruway(lab.dir.path());
        command.args(["serve", "--json", "--block", "d=mem:1M", "--nbd"]).arg(format!("unix:{}", socket.display()));
        let out = command.stdout(output).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains(why), "{}", stderr(&out));
        assert!(!socket.exists());
    }
}

#[test]
fn a_demo_refuses_a_size_that_cannot_be_interrupted() {
    let lab = Lab::new();
    let demo = |size: &str| {
        thruway(lab.dir.path()).args(["demo", "--size", size, "--dir"]).arg(lab.mkdir("dir")).output().unwrap()
    };
    let out = demo("2047K");
    assert_eq!(out.status.code(), Some(2));
    assert!(stderr(&out).contains("too small (expected 2M or more)"), "{}", stderr(&out));
    let out = demo("2M");
    assert!(out.status.success(), "{}", stderr(&out));
}

#[test]
fn several_sources_of_one_name_are_one_directory() {
    let lab = Lab::new();
    for (name, file) in [("a", "one"), ("b", "two")] {
        fs::create_dir_all(lab.path(&format!("served/{name}/d"))).unwrap();
        fs::write(lab.path(&format!("served/{name}/d/{file}")), file).unwrap();
    }
    let daemon = lab.serve(&lab.path("served"));
    cp(&lab, &args(&[&"-r", &daemon.url("e/a/d"), &daemon.url("e/b/d"), &lab.mkdir("here")]));
    cp(&lab, &args(&[&"-r", &lab.path("served/a/d"), &lab.path("served/b/d"), &lab.mkdir("local")]));
    for to in ["here", "local"] {
        assert_eq!(fs::read(lab.path(&format!("{to}/d/one"))).unwrap(), b"one");
        assert_eq!(fs::read(lab.path(&format!("{to}/d/two"))).unwrap(), b"two");
    }
}

#[test]
fn updates_of_nothing_copy_everything() {
    let lab = Lab::new();
    let source = lab.mkdir("served/source");
    fs::write(source.join("file"), "content").unwrap();
    let daemon = lab.serve(&lab.path("served"));
    // The export `dev` is always there.
    for (from, to) in [(daemon.url("e/"), "/dev/null".into()), (os(&source), daemon.url("dev/null"))] {
        assert_eq!(cp(&lab, &args(&[&"-ru", &from, &to]))["files"], 1, "{from:?}");
    }
}

#[test]
fn a_dry_run_lists_thousands_of_items_over_every_transport() {
    let lab = Lab::new();
    let source = lab.mkdir("source");
    for number in 0..5_000 {
        fs::write(source.join(number.to_string()), "").unwrap();
    }
    let daemon = lab.serve(&lab.mkdir("served"));
    for provider in ["iwarp", "shm", "tcp"] {
        let result = cp(&lab, &args(&[&"-rn", &"-v", &"--provider", &provider, &source, &daemon.url("e/")]));
        assert_eq!(result["items"].as_array().unwrap().len(), 5_001, "{provider}");
    }
}

/// A pager that has shown its first page does not read on.
#[test]
fn a_copy_does_not_wait_for_the_reader_of_its_lines() {
    let lab = Lab::new();
    let (served, here) = (lab.mkdir("served"), lab.mkdir("here"));
    let name = |number: u32| format!("{number:0200}");
    for number in 0..6_000 {
        fs::write(served.join(name(number)), "").unwrap();
    }
    let daemon = lab.serve(&served);
    let mut command = thruway(lab.dir.path());
    command.args(args(&[&"cp", &"-rv", &daemon.url("e/"), &here])).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let is_named = |entry: &fs::DirEntry| !entry.file_name().as_encoded_bytes().starts_with(b".");
    let is_complete = || fs::read_dir(&here).unwrap().map(Result::unwrap).filter(is_named).count() == 6_000;
    while !is_complete() {
        assert!(Instant::now() < deadline, "the copy waits");
        std::thread::sleep(Duration::from_millis(10));
    }
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && !stderr(&out).contains("error"), "{}", stderr(&out));
    let text = String::from_utf8(out.stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("new ")).map(str::trim).collect();
    lines.sort_unstable();
    let wanted: Vec<String> = (0..6_000).map(name).collect();
    assert_eq!(lines.len(), 6_000);
    assert!(lines.iter().eq(wanted.iter()));
}

#[test]
fn entries_that_two_sources_have_are_named_and_all_others_are_copied() {
    let lab = Lab::new();
    for source in ["a", "b"] {
        lab.mkdir(source);
        (0..1_000).for_each(|number| fs::write(lab.path(source).join(number.to_string()), source).unwrap());
        fs::write(lab.path(source).join(source), "own").unwrap();
    }
    let daemon = lab.serve(&lab.mkdir("served"));
    let (a, b) = (lab.path("a/"), lab.path("b/"));
    for (copy, target) in [(lab.path("here"), os(&lab.path("here"))), (lab.path("served/new"), daemon.url("e/new"))] {
        cp(&lab, &args(&[&"-a", &a, &target]));
        // The files of the first source are up to date.
        let copies = args(&[&"cp", &"-a", &"-u", &a, &b, &target]);
        let out = thruway(lab.dir.path()).args(copies).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
        let named =
            stderr(&out).lines().filter(|line| line.contains("another source has an entry of this name")).count();
        assert_eq!(named, 1_000, "{}", stderr(&out).lines().next().unwrap());
        assert_eq!(fs::read(copy.join("b")).unwrap(), b"own");
        assert_eq!(fs::read(copy.join("7")).unwrap(), b"a");
    }
}

#[test]
fn a_directory_of_several_sources_has_the_attributes_of_the_first() {
    let lab = Lab::new();
    for (name, mode) in [("a", 0o700), ("b", 0o755), ("c", 0o750)] {
        fs::create_dir_all(lab.path(&format!("{name}/d"))).unwrap();
        fs::write(lab.path(&format!("{name}/d/{name}")), name).unwrap();
        for dir in [lab.path(name), lab.path(name).join("d")] {
            fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
        }
    }
    let daemon = lab.serve(&lab.mkdir("served"));
    let sources = ["a/", "b/", "c/"].map(|name| lab.path(name));
    for (copy, target) in [(lab.path("here"), os(&lab.path("here"))), (lab.path("served/new"), daemon.url("e/new"))] {
        let copies = args(&[&"-auv", &sources[0], &sources[1], &sources[2], &target]);
        cp(&lab, &copies);
        let look = || {
            [copy.clone(), copy.join("d")].map(|dir| {
                let meta = fs::metadata(dir).unwrap();
                (meta.mode() & 0o7777, meta.ctime(), meta.ctime_nsec())
            })
        };
        let first = look();
        assert_eq!(first.map(|(mode, ..)| mode), [0o700; 2], "{copy:?}");
        assert_eq!(cp(&lab, &copies)["items"], serde_json::json!([]), "{copy:?}");
        assert_eq!(look()[1], first[1], "{copy:?}");
    }
}

#[test]
fn devices_in_an_export_are_not_read_for_others() {
    let lab = Lab::new();
    let daemon = lab.serve(Path::new("/dev"));
    let out = try_cp(&lab, &args(&[&"--size", &"4096", &daemon.url("e/zero"), &lab.path("copy")]));
    assert!(!out.status.success() && stderr(&out).contains("is a device"), "{}", stderr(&out));
    assert!(!lab.path("copy").exists());
    // What a user has of his own is his to read, and what a daemon has for that.
    cp(&lab, &args(&[&"--size", &"4096", &"/dev/zero", &lab.path("copy")]));
    cp(&lab, &args(&[&"--size", &"4096", &daemon.url("dev/zero"), &lab.path("copy")]));
}
