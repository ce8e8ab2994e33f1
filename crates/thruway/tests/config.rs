//! The daemon's configuration file.

use crate::support;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use support::disks::{Disks, ok};
use support::{Lab, NOBODY, THRUWAY, stderr};

#[test]
fn a_file_configures_all_services_and_the_command_line_has_the_last_word() {
    let lab = Lab::new();
    let served = lab.mkdir("with:ro,commas=and=all");
    let file = lab.path("thruway.toml");
    let text = format!(
        r#"
[transfer]
listen = ["127.0.0.1:0"]
max-sessions = 7

[[transfer.export]]
name = "data"
dir = "{}"
read-only = true

[block]
nbd = ["127.0.0.1:0"]
iqn = "iqn.2026-11.org.example"

[[block.export]]
name = "one"
path = "mem:1M"
layers = ["cache=8M"]
"#,
        served.display()
    );
    fs::write(&file, text).unwrap();
    let mut child = Command::new(THRUWAY)
        .args(["--json", "serve", "--iscsi", "127.0.0.1:0", "--block", "two=mem:2M", "--iqn", "iqn.2026-11.org.last"])
        .args(["--nbd", "127.0.0.1:0", "--config"])
        .arg(&file)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let said: serde_json::Value = serde_json::from_str(&line).unwrap();
    let count = |what: &str| said[what].as_array().unwrap().len();
    assert_eq!((count("listening"), count("nbd"), count("iscsi")), (1, 2, 1), "{said}");
    let url = format!("tw://{}/data/", said["listening"][0].as_str().unwrap());
    assert!(Command::new(THRUWAY).args(["ls", &url]).stdout(Stdio::null()).status().unwrap().success());
    let targets = Command::new("iscsi-ls")
        .arg(format!("iscsi://{}/", said["iscsi"][0].as_str().unwrap()))
        .output()
        .expect("iscsi-ls is installed");
    let targets = String::from_utf8_lossy(&targets.stdout).into_owned();
    assert!(targets.contains("iqn.2026-11.org.last:one") && targets.contains("iqn.2026-11.org.last:two"), "{targets}");
    // Statistics of all services, and an end in order.
    let pid = rustix::process::Pid::from_child(&child);
    let signal = |signal| rustix::process::kill_process(pid, signal).unwrap();
    signal(rustix::process::Signal::USR1);
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines().map(Result::unwrap);
    for expected in ["RFTP: 0 sessions", "NBD: 0 connections", "iSCSI: ", "block one: "] {
        assert!(lines.by_ref().any(|line| line.starts_with(expected)), "{expected}");
    }
    signal(rustix::process::Signal::TERM);
    drop(lines);
    assert!(child.wait().unwrap().success());
}

#[test]
fn mistakes_are_told_before_anything_starts() {
    let lab = Lab::new();
    let file = lab.path("wrong.toml");
    fs::write(&file, "[transfer]\nlistem = []\n\n[block]\niscsi = [\"x\"]\n").unwrap();
    for more in [&[][..], &["--check"]] {
        let output = Command::new(THRUWAY).args(["serve", "--config"]).arg(&file).args(more).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 2, "{said}");
        assert!(lines[0].contains("wrong.toml:2: ") && lines[0].contains("listem"), "{said}");
        assert!(lines[1].contains("wrong.toml:5: ") && lines[1].contains("'x'"), "{said}");
    }
    fs::write(&file, "chap = \"x\"\n[transfer]\nnbd = []\nprovider = \"iwarp\"\n").unwrap();
    let misplaced = Command::new(THRUWAY).args(["serve", "--config"]).arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&misplaced.stderr);
    for wrong in [
        "'chap' belongs to [block], not to the top",
        "'nbd' belongs to [block], not to [transfer]",
        "'provider' belongs before the first table, not in [transfer]",
    ] {
        assert!(said.contains(wrong), "{said}");
    }
    let missing = Command::new(THRUWAY).args(["serve", "--config", "/no/such/file"]).output().unwrap();
    assert!(String::from_utf8_lossy(&missing.stderr).starts_with("thruway serve: /no/such/file: "));
    fs::write(&file, "[block]\nnbd = [\"127.0.0.1:0\"]\n").unwrap();
    let useless = Command::new(THRUWAY).args(["serve", "--check", "--config"]).arg(&file).output().unwrap();
    assert_eq!(useless.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&useless.stderr).contains("--nbd requires at least one"));
}

#[test]
fn all_mistakes_of_a_file_that_can_be_parsed_are_told_with_their_lines() {
    let lab = Lab::new();
    let file = lab.path("wrong.toml");
    let text = r#"
[transfer]
listen = ["0.0.0.0:0"]
[[transfer.export]]
name = "a"
dir = "/no/export"
[[transfer.export]]
name = "a"
dir = "/tmp"

[block]
nbd = ["0.0.0.0:0"]
chap = "/no/chap"
[[block.export]]
name = "one"
path = "/no/disk"
[[block.export]]
name = "one"
path = "mem:1M"

[nfs]
nfs = ["0.0.0.0:0"]
[[nfs.share]]
name = "s"
dir = "/no/share"
sec = ["krb5"]
[[nfs.share]]
name = "s"
dir = "mem:1M"
allow = ["cert:a.example"]
"#;
    fs::write(&file, text).unwrap();
    let of_options = [
        (3, "listening beyond this machine needs --authorized-keys"),
        (7, "export 'a' is given twice"),
        (12, "refusing to serve NBD on 0.0.0.0:0"),
        (13, "--chap requires iSCSI"),
        (13, "/no/chap: No such file"),
        (17, "two block exports are named 'one'"),
        (22, "refusing to serve NFS on 0.0.0.0:0"),
        (23, "share 's': sec=krb5 requires --nfs-keytab FILE"),
        (23, "share 's': allow=cert:NAME requires --nfs-tls-ca"),
        (27, "two shares are named 's'"),
    ];
    let of_files = [(4, "export a=/no/export: "), (14, "/no/disk: No such file"), (23, "share 's': /no/share: ")];
    for more in [&[][..], &["--check"]] {
        let out = Command::new(THRUWAY).args(["serve", "--config"]).arg(&file).args(more).output().unwrap();
        assert_eq!(out.status.code(), Some(2));
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let mut wanted = of_options.to_vec();
        if !more.is_empty() {
            wanted.extend(of_files);
        }
        wanted.sort_by_key(|(line, _)| *line);
        assert_eq!(said.lines().count(), wanted.len(), "{said}");
        for (line, what) in &wanted {
            let place = format!("thruway serve: {}:{line}: ", file.display());
            assert!(said.lines().any(|l| l.starts_with(&place) && l.contains(what)), "{place}{what}:\n{said}");
        }
        assert!(said.lines().map(|l| l.split(':').nth(2).unwrap().parse::<u32>().unwrap()).is_sorted(), "{said}");
    }
}

/// A public key.
const KEY: &str = "68c88ba2061c3e01c3b464d7e39e8fbb747f682932f23bae56aa0b3cd5d2800f";

#[test]
fn a_reload_reports_each_change_and_a_check_its_verdict() {
    let lab = Lab::new();
    let (served, file, keys) = (lab.mkdir("served"), lab.path("thruway.toml"), lab.path("keys"));
    fs::write(&keys, "").unwrap();
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o644)).unwrap();
    let text = |extra: &str| {
        format!(
            "[transfer]\nlisten = ['127.0.0.1:0']\nauthorized-keys = '{}'\n{extra}\n[[transfer.export]]\nname = 'data'\n\
             dir = '{}'\n\n[block]\nnbd = ['127.0.0.1:0']\n\n[[block.export]]\nname = 'one'\npath = 'mem:1M'\n",
            keys.display(),
            served.display()
        )
    };
    fs::write(&file, text("")).unwrap();
    let check = || {
        let mut command = Command::new(THRUWAY);
        let out = command.args(["serve", "--check", "--config"]).arg(&file).env_remove("THRUWAY_LOG").output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    assert_eq!(check(), (Some(0), "thruway serve: the configuration is valid: 1 exports, 1 disks, 0 shares\n".into()));
    // OpenSSH refuses such a file.
    for mode in [0o666, 0o664] {
        fs::set_permissions(&keys, fs::Permissions::from_mode(mode)).unwrap();
        let (status, said) = check();
        assert_eq!(status, Some(0));
        let warning = format!("{}: other users can add keys: its mode is {mode:04o}", keys.display());
        assert!(said.contains(&warning), "{said}");
    }
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&keys, format!("# friends\nexport=data {KEY}\nexport=dat {KEY}\n")).unwrap();
    let (status, said) = check();
    let warning = format!("{}:3: no export 'dat' (exports: data, dev)", keys.display());
    assert!(status == Some(0) && said.matches("no export").count() == 1 && said.contains(&warning), "{said}");
    fs::write(&keys, "").unwrap();
    let mut child = Command::new(THRUWAY)
        .args(["--json", "serve", "--config"])
        .arg(&file)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut reload = || {
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
        let mut said = Vec::new();
        loop {
            let line = lines.next().expect("the daemon runs");
            said.push(line.strip_prefix("thruway serve: ").expect("a line of the reload").to_string());
            if said.last().unwrap().starts_with("reload ") {
                return said;
            }
        }
    };
    let reloaded = format!("reloaded the authorized keys in {}", keys.display());
    assert_eq!(reload(), [&*reloaded, "reload done"]);
    let now = text("max-sessions = 9").replace("'data'", "'other'").replace("mem:1M", "mem:2M");
    fs::write(&file, now).unwrap();
    let at = file.display();
    let restart = |line: &str, what: &str| format!("{at}{line}: {what} changed: needs a restart");
    assert_eq!(
        reload(),
        [
            reloaded.clone(),
            restart(":4", "transfer.max-sessions"),
            restart(":5", "export 'other'"),
            restart("", "export 'data'"),
            restart(":12", "disk 'one'"),
            "reload done".into(),
        ]
    );
    fs::write(&file, "[transfer]\nlistem = []\n").unwrap();
    fs::write(&keys, "nonsense").unwrap();
    let said = reload();
    assert!(said[0].starts_with("not reloaded: cannot reload the authorized keys"), "{said:?}");
    assert!(said.iter().any(|line| line.contains("listem")), "{said:?}");
    assert!(said.last().unwrap().contains("with mistakes"), "{said:?}");
    fs::write(&keys, "").unwrap();
    let said = reload();
    assert!(said[1].starts_with(&format!("not reloaded: {at}:2: ")), "{said:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    // `--check` also reports mistakes that are found only when files are opened.
    fs::write(&file, text("").replace("'mem:1M'", "'/no/such/disk'").replace(served.to_str().unwrap(), "/no/such"))
        .unwrap();
    fs::write(&keys, "nonsense\n\nrubbish\n").unwrap();
    let (status, said) = check();
    assert_eq!(status, Some(1));
    for (line, what) in [(3, "nonsense"), (3, "rubbish"), (5, "export data=/no/such"), (12, "block export 'one'")] {
        let place = format!("thruway serve: {at}:{line}: ");
        assert!(said.lines().any(|l| l.starts_with(&place) && l.contains(what)), "{place}{what}:\n{said}");
    }
}

#[test]
fn a_reload_names_the_settings_of_shares_that_need_a_restart() {
    let lab = Lab::new();
    let (first, second, file) = (lab.mkdir("first"), lab.mkdir("second"), lab.path("thruway.toml"));
    let text = |share: &str| format!("[nfs]\nnfs = ['127.0.0.1:0']\n\n[[nfs.share]]\nname = 's'\n{share}\n");
    let at = |dir: &Path, more: &str| text(&format!("dir = '{}'\n{more}", dir.display()));
    fs::write(&file, at(&first, "")).unwrap();
    let mut daemon = Command::new(THRUWAY);
    daemon.args(["--json", "serve", "--config"]).arg(&file).arg("--state").arg(lab.path("state"));
    let mut child = daemon.stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("THRUWAY_LOG").spawn().unwrap();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut reload = |text: String| {
        fs::write(&file, text).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
        let mut said = Vec::new();
        loop {
            let line = lines.next().expect("the daemon runs");
            match line.strip_prefix("thruway serve: ").or(line.strip_prefix(" WARN thruway::serve::nfs: ")) {
                Some("reload done") => return said,
                Some(line) if line.starts_with("re") || line.starts_with("share") => said.push(line.to_string()),
                _ => {}
            }
        }
    };
    let dir = "share 's': dir changed: needs a restart";
    assert_eq!(reload(at(&second, "")), [dir]);
    // The running share has its old directory with the new rule.
    let reloaded = |mode: &str| format!("reloaded: share /s = {} ({mode}, squash=root, sec=sys)", first.display());
    assert_eq!(reload(at(&second, "read-only = true")), [dir.to_string(), reloaded("read-only")]);
    let all = "async = true\nmode = 'direct'\ndelegations = 'none'";
    let changed = "share 's': dir, async, mode, delegations changed: needs a restart";
    assert_eq!(reload(at(&second, all)), [changed.to_string(), reloaded("read-write")]);
    assert_eq!(reload(at(&first, "")), Vec::<String>::new());
    let other = at(&first, "").replace("'s'", "'t'");
    assert_eq!(
        reload(other),
        ["share 't' is new: needs a restart", "share 's' is removed: needs a restart; its rules are unchanged"]
    );
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn options_without_effect_are_refused() {
    for (args, named) in [
        (&["--chap", "x"][..], "--chap"),
        (&["--block", "m=mem:1M", "--chap", "x"], "--chap"),
        (&["--block", "m=mem:1M", "--initiator", "iqn.x"], "--initiator"),
        (&["--block", "m=mem:1M", "--iscsi", "127.0.0.1:0", "--tls-cert", "x", "--tls-key", "x"], "--tls-cert"),
        (&["--block", "m=mem:1M", "--block", "m=mem:2M"], "two block exports"),
    ] {
        let output = Command::new(THRUWAY).arg("serve").args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(named), "{args:?}: {output:?}");
    }
}

/// The page of the book is made by the program; `THRUWAY_WRITE_DOCS=1` has this test write it.
#[test]
fn the_reference_in_the_book_is_true() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/configuration.md");
    let output = Command::new(THRUWAY).args(["serve", "--config-reference"]).output().unwrap();
    let made = String::from_utf8(output.stdout).unwrap();
    if std::env::var_os("THRUWAY_WRITE_DOCS").is_some() {
        fs::write(page, &made).unwrap();
    }
    let there = fs::read_to_string(page).unwrap_or_default();
    assert!(there == made, "write it anew: THRUWAY_WRITE_DOCS=1 cargo test -p thruway --test main config::");
}

/// `--check` refuses what `serve` would, with the same words, and locks and makes nothing.
#[test]
fn what_could_not_be_served_is_found_by_a_check() {
    let lab = Lab::new();
    let (dir, image, file) = (lab.mkdir("dir"), lab.path("image"), lab.path("file"));
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    fs::write(&file, "not a key").unwrap();
    let name = |path: &Path| path.display().to_string();
    let (dir, image, file) = (name(&dir), name(&image), name(&file));
    let block = |spec: String| vec!["--block".to_string(), format!("d={spec}"), "--nbd".into(), "127.0.0.1:0".into()];
    let with = |mut args: Vec<String>, more: &[&str]| {
        args.extend(more.iter().map(|arg| (*arg).into()));
        args
    };
    let cases = [
        (block(dir), "neither a file nor a block device"),
        (block("/dev/null".into()), "neither a file nor a block device"),
        (block(format!("{image}x")), "No such file"),
        (block("mem:100T".into()), "size out of range"),
        (block(format!("{image},overlay=/nosuch")), "/nosuch"),
        (block(format!("{image},log=/nosuch/log")), "/nosuch/log"),
        (block("mem:8M,mode=direct".into()), "mode= has no effect"),
        (block("mem:8M,cache=1M".into()), "1048576 bytes are too few"),
        (block(format!("stripe:64K:{image}:{image}")), &image),
        (block(format!("{image},cache=64M:writeback,cache=64M:writeback")), "only one layer"),
        (with(block(image.clone()), &["--tls-cert", &file, "--tls-key", &file]), &file),
        (with(block(image.clone()), &["--iscsi", "127.0.0.1:0", "--chap", &file]), &file),
        (with(block(image.clone()), &["--nbd", "0.0.0.0:0"]), "refusing to serve NBD"),
        (with(block(image.clone()), &["--block", &format!("e={image}")]), "in use"),
        (block(format!("{image},log={lab}", lab = lab.dir.path().display())), "Is a directory"),
        (with(vec![], &["--listen", "0.0.0.0:0"]), "--authorized-keys"),
        (with(vec![], &["--export", "dev=/tmp"]), "invalid name of an export 'dev'"),
        (with(vec![], &["--export", &format!("x={image}")]), "Not a directory"),
        (with(vec![], &["--export", "a=/tmp", "--export", "a=/"]), "given twice"),
    ];
    // What the options alone show to be a mistake, whatever there is to serve.
    let usage = ["refusing to serve NBD", "--authorized-keys", "invalid name of an export 'dev'", "given twice"];
    for (args, expected) in cases {
        let is_usage = usage.contains(&expected) || args.iter().any(|arg| arg == "--chap");
        let status = if is_usage { 2 } else { 1 };
        for more in [&["--check"][..], &[]] {
            let mut command = Command::new("timeout");
            let out =
                command.args(["60", THRUWAY, "serve"]).args(&args).args(more).env("HOME", lab.dir.path()).output();
            let out = out.unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(status), "{args:?} {more:?}: {said}");
            assert!(said.contains(expected), "{args:?} {more:?}: {said}");
        }
    }
    // What is being served can be checked, and two may read one file.
    let readers = block(format!("{image},ro"));
    ok(THRUWAY, &["serve", "--check", "--block", &readers[1], "--block", &format!("e={image},ro")]);
    let args = block(image);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let _disks = Disks::serve(&args);
    ok(THRUWAY, &[&["serve", "--check"], &args[..]].concat());
}

#[test]
fn an_empty_home_is_not_the_current_directory() {
    let lab = Lab::new();
    let (here, program) = (lab.mkdir("here"), lab.path("program"));
    fs::copy(THRUWAY, &program).unwrap();
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&here, Some(NOBODY), Some(NOBODY)).unwrap();
    let entry = Command::new("getent").args(["passwd", &NOBODY.to_string()]).output().unwrap();
    let home = String::from_utf8(entry.stdout).unwrap().split(':').nth(5).unwrap().to_string();
    for change in [["HOME=", "XDG_CONFIG_HOME="], ["--unset=HOME", "--unset=XDG_CONFIG_HOME"]] {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]).args(["--clear-groups", "env"]);
        let out = command.args(change).arg(&program).arg("keygen").current_dir(&here).output().unwrap();
        assert!(!out.status.success(), "{change:?}: the home directory of nobody cannot be written to");
        assert!(stderr(&out).contains(&format!("{home}/.config/thruway")), "{change:?}: {}", stderr(&out));
        assert_eq!(fs::read_dir(&here).unwrap().count(), 0, "{change:?}");
    }
}
