//! Which clients have something open, in stable storage: after a restart these may reclaim it, and no others (RFC 8881, section
//! 8.4.2.1).

use super::state::ClientName;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thruway_fs::durable;
use tokio::sync::Mutex;

/// First line of the file.
const HEADER: &str = "thruway NFS clients 1";

/// Beginning of the second: how long clients may take to come back, in seconds.
const LEASE: &str = "lease ";

type Clients = BTreeSet<ClientName>;

/// What is before the names of clients of version 4.0.
const WITHOUT_SESSIONS: &str = "4.0 ";

/// The file.
pub(super) struct Recovery {
    path: Option<PathBuf>,
    /// That of this run, and the longest of which clients of before may know.
    lease: Duration,
    longest: Duration,
    /// Number of the state of affairs that it has.
    stored: AtomicU64,
    storing: Mutex<()>,
}

fn encode(lease: Duration, clients: &Clients) -> String {
    let lines = clients.iter().map(|client| {
        let before = if client.has_sessions { "" } else { WITHOUT_SESSIONS };
        before.to_string() + &data_encoding::HEXLOWER.encode(&client.name)
    });
    [HEADER.into(), format!("{LEASE}{}", lease.as_secs())]
        .into_iter()
        .chain(lines)
        .map(|line: String| line + "\n")
        .collect()
}

/// The lease, and the clients.
fn decode(text: &str) -> Option<(Duration, Clients)> {
    let mut lines = text.lines();
    if lines.next()? != HEADER {
        return None;
    }
    let lease = lines.next()?.strip_prefix(LEASE)?.parse().ok()?;
    let client = |line: &str| {
        let (name, has_sessions) = line.strip_prefix(WITHOUT_SESSIONS).map_or((line, true), |name| (name, false));
        let name = data_encoding::HEXLOWER.decode(name.as_bytes()).ok()?.into();
        Some(ClientName { has_sessions, name })
    };
    Some((Duration::from_secs(lease), lines.map(client).collect::<Option<Clients>>()?))
}

impl Recovery {
    /// Reads the file; the clients of the last run, and the lease that they knew. Those of this run will have this one.
    pub(super) fn load(path: Option<PathBuf>, lease: Duration) -> io::Result<(Recovery, Duration, Clients)> {
        let nothing = || Some((Duration::ZERO, Clients::new()));
        let read = match path.as_ref().map(std::fs::read_to_string).transpose() {
            Ok(text) => text.map_or_else(nothing, |text| decode(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => nothing(),
            Err(error) => return Err(error),
        };
        let (before, clients) =
            read.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a list of NFS clients"))?;
        let longest = lease.max(before);
        let stored = AtomicU64::new(0);
        Ok((Recovery { path, lease, longest, stored, storing: Mutex::new(()) }, before, clients))
    }

    /// Stores what is the case and whether clients of before the start are still waited for, if what was the case at this number is
    /// not stored yet: one store is enough for all who have asked before it began. When this returns, the file is on the medium.
    pub(super) async fn store(&self, wanted: u64, records: impl FnOnce() -> (u64, Clients, bool)) -> io::Result<()> {
        let _storing = self.storing.lock().await;
        if self.has(wanted) {
            return Ok(());
        }
        // Under the lock: what is stored last is the latest.
        let (number, clients, has_earlier) = records();
        if let Some(path) = self.path.clone() {
            // Who comes back after another restart may have heard of either.
            let lease = if has_earlier { self.longest } else { self.lease };
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            let write = move || durable::replace(&path, encode(lease, &clients).as_bytes(), mode);
            tokio::task::spawn_blocking(write).await.map_err(io::Error::other)??;
        }
        self.stored.store(number, Ordering::Release);
        Ok(())
    }

    /// Whether this state of affairs, or a later one, is stored.
    pub(super) fn has(&self, number: u64) -> bool {
        self.stored.load(Ordering::Acquire) >= number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_there_again() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("clients");
        let load = |path: &PathBuf| Recovery::load(Some(path.clone()), Duration::from_secs(90));
        let (recovery, lease, before) = load(&path).unwrap();
        assert!(before.is_empty() && lease.is_zero());
        let mut clients: Clients = [&b"one\n"[..], b"", b"\xff\0"].map(ClientName::with_sessions).into();
        clients.extend([&b"one\n"[..], b""].map(ClientName::without_sessions));
        runtime.block_on(recovery.store(1, || (1, clients.clone(), false))).unwrap();
        assert_eq!(load(&path).unwrap().2, clients);
        runtime.block_on(recovery.store(1, || (1, Clients::new(), false))).unwrap();
        assert_eq!(load(&path).unwrap().2, clients, "nothing has changed");
        runtime.block_on(recovery.store(2, || (2, Clients::new(), false))).unwrap();
        assert!(load(&path).unwrap().2.is_empty());
        // A lease that is shorter now was longer for those who had something.
        let (shorter, before, _) = Recovery::load(Some(path.clone()), Duration::from_secs(10)).unwrap();
        assert_eq!(before, Duration::from_secs(90));
        for (number, has_earlier, expected) in [(1, true, 90), (2, false, 10)] {
            runtime.block_on(shorter.store(number, || (number, Clients::new(), has_earlier))).unwrap();
            assert_eq!(load(&path).unwrap().1, Duration::from_secs(expected));
        }
        for wrong in
            ["", "thruway NFS clients 2\n", "thruway NFS clients 1\nxyz\n", "thruway NFS clients 1\nlease 90\nxyz\n"]
        {
            std::fs::write(&path, wrong).unwrap();
            assert!(load(&path).is_err(), "{wrong:?}");
        }
        assert!(load(&dir.path().into()).is_err(), "a directory");
        assert!(Recovery::load(None, Duration::ZERO).unwrap().2.is_empty());
    }
}
