//! Shares of memory, as programs in user space use them: no kernel's client, and no rights, are needed.

mod support;

use std::fs;
use support::disks::{Disks, ok, run};
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
    let json = ok(THRUWAY, &["ls", "--json", &format!("nfs://{at}/")]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json[0]["name"].as_str(), json[0]["type"].as_str()), (Some("m"), Some("d")));
    for (url, says) in [
        (format!("nfs://{at}/none"), "No such file or directory"),
        (format!("nfs://{at}/m/none/x"), "No such file or directory"),
        ("nfs://".into(), "no host"),
        ("nfs://127.0.0.1:1/".into(), "onnection refused"),
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
