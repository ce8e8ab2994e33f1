//! `thruway bench`, and the key a daemon keeps.

use crate::support;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::{Lab, THRUWAY};

#[test]
fn the_suite_writes_a_page_and_figures() {
    let lab = Lab::new();
    let out = lab.path("report");
    let only = "registration,depth,overlap,breakdown";
    let args = ["bench", "suite", "--quiet", "--seconds", "0.02", "--rounds", "2", "--only", only, "--output"];
    let done = Command::new(THRUWAY).args(args).arg(&out).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap();
    let families = report["families"].as_array().unwrap();
    assert_eq!(families.len(), 4);
    for family in families {
        assert!(family["error"].is_null(), "{family}");
        let series = family["charts"][0]["series"].as_array().unwrap();
        assert!(series.iter().all(|s| s["points"].as_array().unwrap().len() > 1), "{family}");
        assert!(series.iter().all(|s| s["spread"].as_array().unwrap().len() > 1), "{family}");
        assert!(family["rounds"].as_u64().unwrap() >= 2 && family["verdict"].is_string(), "{family}");
    }
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.matches("<svg").count() >= 4 && page.contains("Must agree") && !page.contains("http://thruway"));
}

#[test]
fn the_suite_knows_its_families() {
    let done = Command::new(THRUWAY).args(["bench", "suite", "--only", "nonsense"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("--list names them"));
    let done = Command::new(THRUWAY).args(["bench", "suite", "--list"]).output().unwrap();
    assert!(String::from_utf8_lossy(&done.stdout).lines().count() >= 12);
}

#[test]
fn sends_do_not_outrun_their_receiver() {
    for extra in [&["--wait", "event"][..], &["--bidirectional"][..], &["--qps", "8", "--depth", "1"][..]] {
        let args = ["bench", "bw", "--loopback", "--json", "--op", "send", "--size", "64,64K", "--seconds", "0.2"];
        let done = Command::new(THRUWAY).args(args).args(extra).output().unwrap();
        assert!(done.status.success(), "{extra:?}: {}", String::from_utf8_lossy(&done.stderr));
        let rows: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        assert!(rows.as_array().unwrap().iter().all(|r| r["operations"].as_u64().unwrap() > 0), "{rows}");
    }
}

/// An incoming write makes no completion, so both ends poll their memory.
#[test]
fn no_write_waits_for_the_time_out() {
    for provider in ["iwarp", "auto"] {
        let args = ["bench", "lat", "--loopback", "--wait", "event", "--json", "--op", "write", "--seconds", "0.5"];
        let done = Command::new(THRUWAY).args(args).args(["--provider", provider]).output().unwrap();
        assert!(done.status.success(), "{provider}: {}", String::from_utf8_lossy(&done.stderr));
        let rows: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        // The time-out of a round trip is 30 s.
        assert!(rows[0]["lat_us_p999"].as_f64().unwrap() < 10e6, "{provider}: {rows}");
    }
}

#[test]
fn a_daemon_that_other_hosts_can_reach_keeps_its_key() {
    let lab = Lab::new();
    let key = || {
        let mut child = Command::new(THRUWAY)
            .args(["serve", "--json", "--anonymous", "--listen", "0.0.0.0:0"])
            .env("XDG_CONFIG_HOME", lab.mkdir("config"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let announced: serde_json::Value = serde_json::from_str(&line).unwrap();
        announced["public_key"].as_str().unwrap().to_owned()
    };
    let first = key();
    assert_eq!(key(), first);
    assert!(lab.path("config/thruway/host").exists());
}
