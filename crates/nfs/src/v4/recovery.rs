//! Which clients have something open, in stable storage: after a restart these may reclaim it, and no others (RFC 8881, section
//! 8.4.2.1).

use crate::state::{ClientName, Kind};
use rustix::fs::Mode;
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

/// Permissions of the file.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Beginning of the third, if there is one: the number of this start, for clients of version 3.
const START: &str = "start ";

/// What is before the names of clients of versions 4.0 and 3.
const WITHOUT_SESSIONS: &str = "4.0 ";
const MONITORED: &str = "3 ";

/// The file.
pub(crate) struct Recovery {
    path: Option<PathBuf>,
    /// The lease time now, and the longest that clients of earlier runs may have been told.
    lease: Duration,
    longest: Duration,
    /// The number of this start: odd, and another one each time as long as clients of version 3 may remember the last.
    pub start: u32,
    /// Number of the state of affairs that it has.
    stored: AtomicU64,
    storing: Mutex<()>,
}

fn encode(lease: Duration, start: u32, clients: &Clients) -> String {
    let lines = clients.iter().map(|client| {
        let before = match client.kind {
            Kind::WithSessions => "",
            Kind::WithoutSessions => WITHOUT_SESSIONS,
            Kind::Monitored => MONITORED,
        };
        before.to_string() + &data_encoding::HEXLOWER.encode(&client.name)
    });
    [HEADER.into(), format!("{LEASE}{}", lease.as_secs()), format!("{START}{start}")]
        .into_iter()
        .chain(lines)
        .map(|line: String| line + "\n")
        .collect()
}

/// The lease, the number of the start, and the clients.
fn decode(text: &str) -> Option<(Duration, u32, Clients)> {
    let mut lines = text.lines().peekable();
    if lines.next()? != HEADER {
        return None;
    }
    let lease = lines.next()?.strip_prefix(LEASE)?.parse().ok()?;
    let client = |line: &str| {
        let kinds = [(WITHOUT_SESSIONS, Kind::WithoutSessions), (MONITORED, Kind::Monitored)];
        let marked = kinds.into_iter().find_map(|(mark, kind)| Some((line.strip_prefix(mark)?, kind)));
        let (name, kind) = marked.unwrap_or((line, Kind::WithSessions));
        let name = data_encoding::HEXLOWER.decode(name.as_bytes()).ok()?.into();
        Some(ClientName { kind, name })
    };
    let start = match lines.next_if(|line| line.starts_with(START)) {
        Some(line) => line[START.len()..].parse().ok()?,
        None => 0,
    };
    let clients = lines.map(client).collect::<Option<Clients>>()?;
    Some((Duration::from_secs(lease), start, clients))
}

impl Recovery {
    /// Reads the file; the clients of the last run, and the lease that they knew. Those of this run will have this one.
    pub(super) fn load(path: Option<PathBuf>, lease: Duration) -> io::Result<(Recovery, Duration, Clients)> {
        let nothing = || Some((Duration::ZERO, 0, Clients::new()));
        let read = match path.as_ref().map(std::fs::read_to_string).transpose() {
            Ok(text) => text.map_or_else(nothing, |text| decode(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => nothing(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => None,
            Err(error) => return Err(error),
        };
        let damaged = "not a list of NFS clients: restore it, or remove it when no client has anything open or locked, because none gets that back then";
        let (before, last_start, clients) = read.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, damaged))?;
        let longest = lease.max(before);
        let start = (last_start | 1).wrapping_add(2);
        // Clients remember the number: no later start may have it again.
        if let Some(path) = path.as_ref().filter(|_| clients.iter().any(|client| client.kind == Kind::Monitored)) {
            durable::replace(path, encode(longest, start, &clients).as_bytes(), MODE)?;
        }
        let (stored, storing) = (AtomicU64::new(0), Mutex::new(()));
        Ok((Recovery { path, lease, longest, start, stored, storing }, before, clients))
    }

    /// Writes the list of clients, and whether a grace period is in progress, unless the list with this number or a later one is
    /// written already: one write is enough for all who have asked before it began. When this returns, the file is on the medium.
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
            let start = self.start;
            let write = move || durable::replace(&path, encode(lease, start, &clients).as_bytes(), MODE);
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
        clients.extend([&b"one\n"[..], b""].map(|name| ClientName { kind: Kind::Monitored, name: name.into() }));
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
        // Each start that clients of version 3 hear of has a number of its own, also if nothing else is stored.
        let with = |clients: &str| std::fs::write(&path, format!("{HEADER}\nlease 90\n{clients}")).unwrap();
        with("start 5\n3 78\n4.0 78\n");
        let starts =
            [(); 3].map(|()| load(&path).unwrap()).map(|(recovery, _, clients)| (recovery.start, clients.len()));
        assert_eq!(starts, [(7, 2), (9, 2), (11, 2)]);
        with("4.0 78\n");
        assert_eq!(load(&path).unwrap().0.start, 3, "a file from before there were numbers");
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
