//! Copies that another program starts, watches and ends.

use crate::support;
use std::sync::atomic::Ordering;
use std::time::Instant;
use support::{Served, TIMEOUT};
use thruway_transfer::Client;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::client::{Job, Remote};
use thruway_transfer::session::SessionError;

fn remote(served: &Served) -> Remote {
    Remote::new(served.addr, Credentials::Keys(KeyPair::generate()))
}

#[test]
fn a_tree_goes_there_and_comes_back() {
    let served = Served::with(|config| config.local = true);
    let (here, back) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::create_dir(here.path().join("tree")).unwrap();
    std::fs::write(here.path().join("tree/file"), "content").unwrap();
    let client = Client::new().unwrap();
    let pushed = client.start(Job::push(remote(&served), here.path().join("tree"), "e", "new/")).unwrap();
    assert_eq!(pushed.wait().unwrap().summary.files, 1);
    assert_eq!(std::fs::read(served.dir.path().join("new/tree/file")).unwrap(), b"content");
    let pulled = client.start(Job::pull(remote(&served), "e", "new/tree", back.path()).unwrap()).unwrap();
    assert_eq!(pulled.wait().unwrap().summary.bytes, 7);
    assert_eq!(std::fs::read(back.path().join("tree/file")).unwrap(), b"content");
}

#[test]
fn a_copy_that_is_cancelled_ends_and_goes_on_later() {
    let served = Served::with(|config| config.local = true);
    let here = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..6u32 << 20).map(|i| (i >> 8) as u8).collect();
    std::fs::write(here.path().join("large"), &content).unwrap();
    let client = Client::new().unwrap();
    let job = Job { rate_limit: Some(1 << 20), ..Job::push(remote(&served), here.path().join("large"), "e", "") };
    let copy = client.start(job.clone()).unwrap();
    let start = Instant::now();
    while copy.progress().bytes.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < TIMEOUT, "nothing is sent");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    copy.cancel();
    let ended = copy.wait();
    assert!(matches!(ended, Err(SessionError::Cancelled(..))), "{ended:?}");
    assert!(!served.dir.path().join("large").exists(), "half a file has no name");
    let again = client.start(Job { rate_limit: None, ..job.clone() }).unwrap();
    again.wait().unwrap();
    assert!(std::fs::read(served.dir.path().join("large")).unwrap() == content);
    // Ended though its daemon is not there: not by that, and without waiting for it.
    drop(served);
    let alone = client.start(job).unwrap();
    alone.cancel();
    let ended = alone.wait();
    assert!(matches!(ended, Err(SessionError::Cancelled(..))), "{ended:?}");
}
