//! The conformance suite through shared memory.

use crate::conformance;
use conformance::Lab;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use thruway_fabric::messages::{MessageListener, Messages};
use thruway_fabric::shm::Config;
use thruway_fabric::{Provider, iwarp};

/// Whether this kernel has it; before Linux 6.16 a device says why not, and nothing else can be tried.
fn is_supported() -> bool {
    let opened = Config::default().open();
    opened.inspect_err(|error| assert!(error.to_string().contains("Linux 6.16"), "{error}")).is_ok()
}

fn lab(config: &Config) -> Lab {
    Lab::new(config.open().unwrap(), config.open().unwrap())
}

#[test]
fn default_configuration() {
    if !is_supported() {
        return;
    }
    conformance::run_all(&|| lab(&Config::default()));
}

#[test]
fn the_smallest_rings() {
    if !is_supported() {
        return;
    }
    let config = Config { ring: 4096, ..Config::default() };
    conformance::run_all(&|| lab(&config));
}

#[test]
fn a_thousand_connections_work_and_one_that_stalls_blocks_none() {
    if !is_supported() {
        return;
    }
    let config = Config { ring: 16 << 10, ..Config::default() };
    conformance::many_connections(&lab(&config), 1000);
}

/// In a process of its own, because other tests have rings as well.
#[test]
fn rings_go_with_the_connection() {
    if !is_supported() {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let done = command.args(["--exact", "shm::rings_go_with_the_connection"]).env(CHILD, "rings").output().unwrap();
        let output = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && output.contains("1 passed"), "{output}");
        return;
    }
    let rings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("thruway shm").count();
    let (a, b) = (Config::default().open().unwrap(), Config::default().open().unwrap());
    let (near, far) = Lab::new(a.clone(), b.clone()).pair();
    assert_eq!(rings(), 2);
    near.qp.disconnect();
    let drive = || [&a, &b].map(|device| std::iter::from_fn(|| device.poll_event()).for_each(drop));
    while near.qp.error().is_none() || far.qp.error().is_none() {
        drive();
    }
    drive();
    assert_eq!(rings(), 0, "the queue pairs are still there");
}

/// What the other process of a test does: this program again, with what to do in its environment.
const CHILD: &str = "THRUWAY_SHM_CHILD";

fn child(what: &str) -> (Child, SocketAddr) {
    let program = std::env::current_exe().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut command = if what == "as another user" {
        // That user may be unable to search the directories above this program.
        let copy = dir.path().join("shm");
        if std::fs::hard_link(&program, &copy).is_err() {
            std::fs::copy(program, &copy).unwrap();
        }
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(copy);
        command.current_dir("/").uid(65534);
        command
    } else {
        Command::new(program)
    };
    command.args(["--exact", "shm::the_other_process", "--nocapture"]).env(CHILD, what).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let addr = lines.find_map(|line| line.unwrap().strip_prefix("listening on ").map(|addr| addr.parse().unwrap()));
    // The rest goes on being read: it must not wait for room.
    std::thread::spawn(move || lines.for_each(drop));
    (child, addr.unwrap())
}

/// Listens, and takes a connection.
#[test]
fn the_other_process() {
    let Ok(what) = std::env::var(CHILD) else { return };
    let at = "127.0.0.1:0".parse().unwrap();
    let listener = MessageListener::bind(&Config::default().into(), at, 4096).unwrap();
    println!("\nlistening on {}", listener.local_addr());
    let mut peer = listener.accept().unwrap();
    match &what[..] {
        "ends behind ten messages" => {
            peer.recv().unwrap().unwrap();
            (0..10u32).for_each(|n| peer.send(&n.to_le_bytes()).unwrap());
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
        "as another user" => {}
        "echoes" => {
            while let Some(message) = peer.recv().unwrap() {
                peer.send(&message).unwrap();
            }
        }
        other => panic!("{other}"),
    }
}

#[test]
fn what_a_killed_process_has_sent_arrives_and_then_its_end() {
    if !is_supported() {
        return;
    }
    let (mut child, addr) = child("ends behind ten messages");
    let mut peer = Messages::connect(&Config::default().into(), addr, 4096).unwrap();
    peer.send(b"go").unwrap();
    assert!(!child.wait().unwrap().success());
    for n in 0..10u32 {
        assert_eq!(peer.recv().unwrap().unwrap(), n.to_le_bytes());
    }
    assert_eq!(peer.recv().unwrap(), None);
    assert!(peer.send(b"x").is_err());
}

#[test]
fn processes_that_sleep_are_woken() {
    if !is_supported() {
        return;
    }
    let (mut child, addr) = child("echoes");
    let mut peer = Messages::connect(&Config::default().into(), addr, 4096).unwrap();
    for n in 0..200u32 {
        if n % 20 == 0 {
            // Both have gone to sleep by now; if not, the test tries less, and fails no more.
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        peer.send(&n.to_le_bytes()).unwrap();
        assert_eq!(peer.recv().unwrap().unwrap(), n.to_le_bytes());
    }
    drop(peer);
    assert!(child.wait().unwrap().success(), "it hears of the end");
}

/// Needs root, to become another user.
#[test]
fn listeners_of_other_users_are_not_connected_to() {
    if !is_supported() {
        return;
    }
    let (mut child, addr) = child("as another user");
    let error = Messages::connect(&Config::default().into(), addr, 4096).err().expect("it is refused").to_string();
    assert!(error.contains("another user (number 65534)"), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn iwarp_with_shared_memory_for_this_host() {
    if !is_supported() {
        return;
    }
    let config = || iwarp::Config { shm: Some(Config::default()), ..iwarp::Config::default() };
    conformance::run_all(&|| Lab::new(config().open().unwrap(), config().open().unwrap()));
    let carried = |a: &Provider, b: &Provider| {
        let (near, far) = Lab::new(a.open().unwrap(), b.open().unwrap()).pair();
        assert_eq!(near.qp.info().unwrap().provider, far.qp.info().unwrap().provider);
        near.qp.info().unwrap().provider
    };
    let (auto, shm, iwarp) = (config().into(), Config::default().into(), iwarp::Config::default().into());
    assert_eq!(carried(&auto, &auto), "shm");
    assert_eq!(carried(&shm, &auto), "shm");
    // Where only one end has it, it is TCP.
    assert_eq!(carried(&auto, &iwarp), "iwarp");
    assert_eq!(carried(&iwarp, &auto), "iwarp");
    assert_eq!(carried(&auto, &shm), "shm");
}

#[test]
fn a_listener_at_all_addresses_is_found_at_each() {
    if !is_supported() {
        return;
    }
    for (listens, at) in [("0.0.0.0", "127.0.0.1"), ("0.0.0.0", "127.1.2.3"), ("::", "127.0.0.1"), ("::1", "::1")] {
        let listener = MessageListener::bind(&Config::default().into(), address(listens, 0), 64).unwrap();
        let port = listener.local_addr().port();
        let echo = std::thread::spawn(move || listener.accept().unwrap().recv().unwrap());
        Messages::connect(&Config::default().into(), address(at, port), 64).unwrap().send(b"x").unwrap();
        assert_eq!(echo.join().unwrap().as_deref(), Some(&b"x"[..]), "{listens} {at}");
    }
}

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}
