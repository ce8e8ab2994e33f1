//! Very many sessions at once.

use crate::support;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use support::*;
use thruway_engine::digest::Algorithm;
use thruway_fabric::iwarp;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::client::{self, Job, Local, Remote};
use thruway_transfer::link::Transport;
use thruway_transfer::session::{Pipeline, Progress, SessionError};
use thruway_transfer::wire::TreeOptions;

const SESSIONS: usize = 2000;
/// Held back to this rate, so that all sessions are open at the same time.
const RATE: u64 = 32 << 10;
const LEN: usize = 96 << 10;

fn job(addr: &str, source: &std::path::Path, number: usize) -> Job {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
    Job {
        remote: Remote {
            addr: addr.parse().unwrap(),
            others: Vec::new(),
            label: addr.into(),
            credentials: Credentials::Keys(KeyPair::generate()),
            known_hosts: None,
            fabric: iwarp::Config::default().into(),
            transport: Transport::Rdma,
        },
        export: "e".into(),
        path: format!("copy{number}").into_bytes(),
        into_directory: false,
        sources: Vec::new(),
        renamed: false,
        made: None,
        note: None,
        local: Local::Sources(vec![(source.into(), b"source".to_vec())]),
        id,
        options: TreeOptions::default(),
        verify: Algorithm::Xxh3,
        encrypt: false,
        streams: Some(1),
        block_len: 64 << 10,
        blocks: Some(4),
        rate_limit: Some(RATE),
        retries: 0,
    }
}

#[test]
fn thousands_of_sessions_at_once_are_all_served() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    let source = lab.path("source");
    let content = noise(LEN, 3);
    fs::write(&source, &content).unwrap();
    let sessions = SESSIONS.to_string();
    let args = ["--max-sessions", &sessions, "--depth", "4", "--export"].map(OsStr::new);
    let daemon = Daemon::start(&[&args[..], &[&export("e", &served, "")]].concat());
    thruway_engine::limits::raise_open_files();
    let pipeline = Pipeline::new(1, 4096).unwrap();
    let (start, failed) = (Arc::new(Barrier::new(SESSIONS)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..SESSIONS)
        .map(|number| {
            let (job, pipeline) = (job(&daemon.addr, &source, number), Arc::clone(&pipeline));
            let (start, failed) = (Arc::clone(&start), Arc::clone(&failed));
            let client = std::thread::Builder::new().stack_size(256 << 10);
            let run = move || {
                let (progress, failures) = (Arc::new(Progress::default()), Arc::clone(&failed));
                start.wait();
                let attempt = || client::run(&job, &pipeline, &progress, &(Arc::new(|_: &_| {}) as _), None);
                // A busy daemon refuses further handshakes, and the caller tries again.
                let is_refused = |result: &Result<_, _>| {
                    result.as_ref().is_err_and(|error: &SessionError| error.to_string().contains("too many handshakes"))
                };
                let mut result = attempt();
                while is_refused(&result) {
                    std::thread::sleep(Duration::from_millis(10));
                    result = attempt();
                }
                if let Err(error) = result {
                    eprintln!("session {number}: {error}");
                    failures.fetch_add(1, Ordering::SeqCst);
                }
            };
            client.spawn(run).unwrap()
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    assert_eq!(failed.load(Ordering::SeqCst), 0);
    for number in 0..SESSIONS {
        assert!(fs::read(served.join(format!("copy{number}"))).unwrap() == content, "copy {number}");
    }
}

/// Connections of one user that do not say what they want hold up no other.
#[test]
fn connections_without_a_greeting_hold_up_no_copy() {
    let lab = Lab::new();
    let served = lab.mkdir("served");
    fs::write(lab.path("source"), noise(LEN, 5)).unwrap();
    let daemon = lab.serve(&served);
    // What RFTP over TCP begins with, and no more.
    let script = "import resource, socket, sys\n\
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n\
        host, port = sys.argv[1].rsplit(':', 1)\n\
        silent = [socket.create_connection((host, int(port))) for _ in range(1000)]\n\
        for one in silent: one.sendall(b'TWFT')\n\
        print('silent', flush=True)\n\
        sys.stdin.read()\n";
    // Connections of another user, then of the user that copies.
    let own = fs::metadata("/proc/self").unwrap().uid();
    for user in [NOBODY, own] {
        let mut silent = Command::new("setpriv")
            .args([format!("--reuid={user}"), format!("--regid={user}")])
            .args(["--clear-groups", "/usr/bin/python3", "-c", script, &daemon.addr])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(silent.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let (source, fixed) = (lab.path("source"), ["--provider", "tcp", "--retries", "0"].map(OsStr::new));
        cp(&lab, &[&fixed[..], &[source.as_os_str(), &daemon.url("e/copy")]].concat());
        assert_eq!(fs::read(served.join("copy")).unwrap(), noise(LEN, 5));
        silent.kill().unwrap();
        silent.wait().unwrap();
    }
}
