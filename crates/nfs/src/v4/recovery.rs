//! Which clients have something open, in stable storage: after a restart these may reclaim it, and no others (RFC 8881, section
//! 8.4.2.1).

use super::state::ClientName;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use thruway_fs::durable;
use tokio::sync::Mutex;

/// First line of the file.
const HEADER: &str = "thruway NFS clients 1";

type Clients = BTreeSet<ClientName>;

/// What is before the names of clients of version 4.0.
const WITHOUT_SESSIONS: &str = "4.0 ";

/// The file.
pub(super) struct Recovery {
    path: Option<PathBuf>,
    /// Number of the state of affairs that it has.
    stored: AtomicU64,
    storing: Mutex<()>,
}

fn encode(clients: &Clients) -> String {
    let lines = clients.iter().map(|client| {
        let before = if client.has_sessions { "" } else { WITHOUT_SESSIONS };
        before.to_string() + &data_encoding::HEXLOWER.encode(&client.name)
    });
    std::iter::once(HEADER.into()).chain(lines).map(|line: String| line + "\n").collect()
}

fn decode(text: &str) -> Option<Clients> {
    let mut lines = text.lines();
    if lines.next()? != HEADER {
        return None;
    }
    let client = |line: &str| {
        let (name, has_sessions) = line.strip_prefix(WITHOUT_SESSIONS).map_or((line, true), |name| (name, false));
        let name = data_encoding::HEXLOWER.decode(name.as_bytes()).ok()?.into();
        Some(ClientName { has_sessions, name })
    };
    lines.map(client).collect()
}

impl Recovery {
    /// Reads the file; the clients of the last run.
    pub(super) fn load(path: Option<PathBuf>) -> io::Result<(Recovery, Clients)> {
        let clients = match path.as_ref().map(std::fs::read_to_string).transpose() {
            Ok(text) => text.map_or(Some(Clients::new()), |text| decode(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some(Clients::new()),
            Err(error) => return Err(error),
        };
        let clients = clients.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a list of NFS clients"))?;
        Ok((Recovery { path, stored: AtomicU64::new(0), storing: Mutex::new(()) }, clients))
    }

    /// Stores what is the case, if that is not stored yet. When this returns, the file is on the medium.
    pub(super) async fn store(&self, records: impl FnOnce() -> (u64, Clients)) -> io::Result<()> {
        let _storing = self.storing.lock().await;
        // Under the lock: what is stored last is the latest.
        let (number, clients) = records();
        if self.has(number) {
            return Ok(());
        }
        if let Some(path) = self.path.clone() {
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            let write = move || durable::replace(&path, encode(&clients).as_bytes(), mode);
            tokio::task::spawn_blocking(write).await.map_err(io::Error::other)??;
        }
        self.stored.store(number, Ordering::Release);
        Ok(())
    }

    /// Whether this state of affairs is stored.
    pub(super) fn has(&self, number: u64) -> bool {
        self.stored.load(Ordering::Acquire) == number
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
        let (recovery, before) = Recovery::load(Some(path.clone())).unwrap();
        assert!(before.is_empty());
        let mut clients: Clients = [&b"one\n"[..], b"", b"\xff\0"].map(ClientName::with_sessions).into();
        clients.extend([&b"one\n"[..], b""].map(ClientName::without_sessions));
        runtime.block_on(recovery.store(|| (1, clients.clone()))).unwrap();
        assert_eq!(Recovery::load(Some(path.clone())).unwrap().1, clients);
        runtime.block_on(recovery.store(|| (1, Clients::new()))).unwrap();
        assert_eq!(Recovery::load(Some(path.clone())).unwrap().1, clients, "nothing has changed");
        runtime.block_on(recovery.store(|| (2, Clients::new()))).unwrap();
        assert!(Recovery::load(Some(path.clone())).unwrap().1.is_empty());
        for wrong in ["", "thruway NFS clients 2\n", "thruway NFS clients 1\nxyz\n"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(Recovery::load(Some(path.clone())).is_err(), "{wrong:?}");
        }
        assert!(Recovery::load(Some(dir.path().into())).is_err(), "a directory");
        assert!(Recovery::load(None).unwrap().1.is_empty());
    }
}
