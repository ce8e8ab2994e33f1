//! A daemon in this process, and how to tell that it has ended a session.

use std::net::SocketAddr;
use std::time::{Duration, Instant};
use thruway_engine::random::random;
use thruway_fabric::iwarp;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::daemon::{Config, Daemon, Stopper};
use thruway_transfer::link::{Link, LinkError, LinkEvent};
use thruway_transfer::wire::{Control, Direction, SessionRequest, TreeOptions};

#[allow(dead_code, reason = "not every test waits")]
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// A daemon that exports a directory of its own as `e`; stopped when dropped.
pub(crate) struct Served {
    pub dir: tempfile::TempDir,
    pub addr: SocketAddr,
    pub stopper: Stopper,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Served {
    /// With a configuration that differs from the usual one.
    pub(crate) fn with(change: impl FnOnce(&mut Config)) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let credentials = Credentials::Keys(KeyPair::generate());
        let config = Config::new("127.0.0.1:0".parse().unwrap(), credentials).export("e", dir.path(), false);
        let mut config = Config {
            local: false,
            max_sessions: 50,
            block_len_max: 1 << 20,
            blocks: 8,
            fabric: iwarp::Config::default().into(),
            ..config
        };
        change(&mut config);
        let daemon = Daemon::start(config).unwrap();
        let (addr, stopper) = (daemon.addrs()[0], daemon.stopper());
        let thread = Some(std::thread::spawn(move || daemon.run().unwrap()));
        Served { dir, addr, stopper, thread }
    }
}

/// A copy into the export.
#[allow(dead_code, reason = "not every test asks for a session")]
pub(crate) fn request() -> SessionRequest {
    SessionRequest {
        direction: Direction::Push,
        export: "e".into(),
        path: Vec::new(),
        into_directory: true,
        renamed: false,
        offers: false,
        destination: None,
        sources: Vec::new(),
        job: random(),
        verify: 0,
        data_key: None,
        rate_limit: None,
        revocable: true,
        options: TreeOptions { recursive: true, ..TreeOptions::default() },
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Waits until the daemon has ended the session, and returns what it said.
#[allow(dead_code, reason = "not every test waits")]
pub(crate) fn ended(link: &mut Link) -> String {
    let start = Instant::now();
    let mut said = String::new();
    loop {
        assert!(start.elapsed() < TIMEOUT, "the session goes on");
        match link.poll(Duration::from_millis(100)) {
            Ok(events) => {
                for event in events {
                    if let LinkEvent::Control(Control::Abort(_, why)) = event {
                        said = why;
                    }
                }
            }
            Err(LinkError::Closed(_) | LinkError::DataLost(_)) => return said,
            Err(other) => panic!("{other}"),
        }
    }
}
