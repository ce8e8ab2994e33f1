//! Stable storage for the list of clients with opens or locks, each with its principal.
//!
//! After a restart, only these clients may reclaim (RFC 8881, sections 8.4.2.1 and 8.4.3).

use crate::state::{ClientName, Kind, Principal, Records};
use rustix::fs::{FallocateFlags, Mode};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thruway_fs::durable;
use tokio::sync::Mutex;

/// First line of the file, and its prefix in every version.
const HEADER: &str = "thruway NFS clients 2";
const ANY_HEADER: &str = "thruway NFS clients ";

/// Last line of the file.
const END: &str = "end";

/// Prefix of the second line: time in seconds for clients to reclaim.
const LEASE: &str = "lease ";

/// Permissions of the file.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Prefix of the third line: number of this start, for clients of version 3.
const START: &str = "start ";

/// Kinds of clients, and the word for each in the list.
const KINDS: [(&str, Kind); 3] = [("4", Kind::WithSessions), ("4.0", Kind::WithoutSessions), ("3", Kind::Monitored)];

/// Size of the reserve in bytes: room for some 2,000 clients with names of 30 bytes.
const RESERVE: u64 = 256 << 10;

/// File with the list of clients.
pub(crate) struct Recovery {
    path: Option<PathBuf>,
    /// Lease time of this run.
    lease: Duration,
    /// Longest lease that clients of this or earlier runs may have.
    longest: Duration,
    /// Number of this start: odd, and different each time while clients of version 3 may remember the last one.
    pub start: u32,
    /// Number of the list that was last written.
    stored: AtomicU64,
    storing: Mutex<()>,
}

/// State of earlier runs.
struct Before {
    lease: Duration,
    start: u32,
    clients: Records,
}

/// Reason for the loss of the list of clients.
enum NotKnown {
    /// The file does not exist.
    Missing,
    /// The file is damaged or of another version; the text is for the log.
    Unreadable(&'static str),
}

fn encode(lease: Duration, start: u32, clients: &Records) -> String {
    let hex = |bytes: &[u8]| data_encoding::HEXLOWER.encode(bytes);
    // With the prefix, an empty name is also a word.
    let name = |client: &ClientName| format!("={}", hex(&client.name));
    let hash = |hash: &Option<[u8; 16]>| hash.map_or("-".into(), |hash| hex(&hash));
    let lines = clients.iter().map(|(client, Principal { user, kerberos, certificate })| {
        let kind = KINDS.iter().find(|(_, kind)| *kind == client.kind).map_or("", |(word, _)| word);
        let user = user.map_or("-".into(), |user| user.to_string());
        format!("{kind} {} {user} {} {}", name(client), hash(kerberos), hash(certificate))
    });
    let head = [HEADER.into(), format!("{LEASE}{}", lease.as_secs()), format!("{START}{start}")];
    head.into_iter().chain(lines).chain([END.into()]).map(|line: String| line + "\n").collect()
}

fn decode_client(line: &str) -> Option<(ClientName, Principal)> {
    let mut words = line.split(' ');
    let mut word = || words.next();
    let (kind, name, user, kerberos, certificate) = (word()?, word()?, word()?, word()?, word()?);
    let hex = |word: &str| data_encoding::HEXLOWER.decode(word.as_bytes()).ok();
    let hash = |word: &str| match word {
        "-" => Some(None),
        word => Some(Some(hex(word)?.try_into().ok()?)),
    };
    let kind = KINDS.iter().find(|(word, _)| *word == kind)?.1;
    let user = if user == "-" { None } else { Some(user.parse().ok()?) };
    let principal = Principal { user, kerberos: hash(kerberos)?, certificate: hash(certificate)? };
    let name = hex(name.strip_prefix('=')?)?.into();
    words.next().is_none().then_some((ClientName { kind, name }, principal))
}

fn decode(text: &str) -> Option<Before> {
    let mut lines = text.strip_suffix('\n')?.split('\n');
    if lines.next()? != HEADER || lines.next_back()? != END {
        return None;
    }
    let lease = Duration::from_secs(lines.next()?.strip_prefix(LEASE)?.parse().ok()?);
    let start = lines.next()?.strip_prefix(START)?.parse().ok()?;
    Some(Before { lease, start, clients: lines.map(decode_client).collect::<Option<Records>>()? })
}

fn read(path: &Path) -> io::Result<Result<Before, NotKnown>> {
    let text = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err(NotKnown::Missing)),
        Err(error) => return Err(error),
    };
    let is_of_another_version = text.starts_with(ANY_HEADER.as_bytes()) && !text.starts_with(HEADER.as_bytes());
    let unreadable = || match is_of_another_version {
        true => NotKnown::Unreadable("it was written by another version of this program"),
        false => NotKnown::Unreadable("it is damaged"),
    };
    Ok(str::from_utf8(&text).ok().and_then(decode).ok_or_else(unreadable))
}

fn reserve_of(path: &Path) -> PathBuf {
    path.with_extension("reserve")
}

/// Allocates the reserve, so that the list can be replaced when the file system is full.
fn keep_reserve(path: &Path) -> io::Result<()> {
    let options = OpenOptions::new().write(true).create(true).truncate(false).mode(MODE.bits()).to_owned();
    let file = options.open(reserve_of(path))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVE)?;
    Ok(())
}

/// Replaces the list. Uses the reserve if the file system is full.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let error = match durable::replace(path, content, MODE) {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    let is_full = matches!(Errno::from_io_error(&error), Some(Errno::NOSPC | Errno::DQUOT));
    if !is_full || content.len() as u64 > RESERVE {
        return Err(error);
    }
    let reserve = reserve_of(path);
    let write = || -> io::Result<()> {
        // The storage is allocated: overwrite it, then truncate the file.
        let mut file = OpenOptions::new().write(true).open(&reserve)?;
        file.write_all(content)?;
        file.set_len(content.len() as u64)?;
        file.sync_all()?;
        std::fs::rename(&reserve, path)?;
        File::open(path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new(".")))?.sync_all()
    };
    // Without a reserve, the first error is more informative.
    write().map_err(|_| error)?;
    let path = path.display();
    tracing::warn!("{path}: the file system is full: the list of NFS clients was written to its reserve");
    Ok(())
}

impl Recovery {
    /// Reads the file. Returns the lease time and the clients of the last run; clients of this run get `lease`. With `had_clients`,
    /// there were earlier runs, and a missing list is a lost list.
    pub(super) fn load(
        path: Option<PathBuf>,
        lease: Duration,
        had_clients: bool,
    ) -> io::Result<(Recovery, Duration, Records)> {
        let known = path.as_deref().map(read).transpose()?;
        let first = Before { lease: Duration::ZERO, start: 0, clients: Records::new() };
        let (before, is_known) = match known {
            None => (first, true),
            Some(Ok(before)) => (before, true),
            Some(Err(NotKnown::Missing)) if !had_clients => (first, false),
            Some(Err(why)) => {
                let why = match why {
                    NotKnown::Missing => "it is missing",
                    NotKnown::Unreadable(why) => why,
                };
                let path = path.as_deref().unwrap_or(Path::new("")).display();
                tracing::error!(
                    "{path}: the list of NFS clients is lost ({why}): no client can reclaim opens or locks, and programs that relied on a lock must be restarted"
                );
                // Clients of version 3 remember the number of the last start, which is lost. A random number differs from it.
                let start = u32::from_be_bytes(thruway_engine::random::random());
                (Before { start, ..first }, false)
            }
        };
        let Before { lease: lease_before, start: last_start, clients } = before;
        let longest = lease.max(lease_before);
        let start = (last_start | 1).wrapping_add(2);
        if let Some(path) = &path {
            if let Err(error) = keep_reserve(path) {
                tracing::warn!(%error, "{}: cannot reserve storage for the case of a full file system", path.display());
            }
            // Only if a list has been written can a later start detect its loss. Clients of version 3 remember the number of this start,
            // so it is stored, and no later start uses it again.
            if !is_known || clients.keys().any(|client| client.kind == Kind::Monitored) {
                replace(path, encode(longest, start, &clients).as_bytes())?;
            }
        }
        let (stored, storing) = (AtomicU64::new(0), Mutex::new(()));
        Ok((Recovery { path, lease, longest, start, stored, storing }, lease_before, clients))
    }

    /// Writes the list of clients to stable storage, unless list `wanted` or a later one is stored already. One write serves all callers
    /// that waited when it began. `records` returns the number, the list, and true if clients of earlier runs may still reclaim.
    pub(super) async fn store(&self, wanted: u64, records: impl FnOnce() -> (u64, Records, bool)) -> io::Result<()> {
        let _storing = self.storing.lock().await;
        if self.has(wanted) {
            return Ok(());
        }
        // Called under the lock, so that the last write has the latest list.
        let (number, clients, has_earlier) = records();
        if let Some(path) = self.path.clone() {
            // Clients that reclaim after another restart may have either lease time.
            let lease = if has_earlier { self.longest } else { self.lease };
            let start = self.start;
            let write = move || {
                replace(&path, encode(lease, start, &clients).as_bytes())?;
                // Restores the reserve after use: there may be room by now.
                let _ = keep_reserve(&path);
                Ok::<_, io::Error>(())
            };
            tokio::task::spawn_blocking(write).await.map_err(io::Error::other)??;
        }
        self.stored.store(number, Ordering::Release);
        Ok(())
    }

    /// True if the list with this number, or a later one, is stored.
    pub(super) fn has(&self, number: u64) -> bool {
        self.stored.load(Ordering::Acquire) >= number
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn load(path: &Path) -> (Recovery, Duration, Records) {
        Recovery::load(Some(path.into()), Duration::from_secs(90), true).unwrap()
    }

    fn some_clients() -> Records {
        let principals = [
            Principal::new(Some(0), None, &[]),
            Principal::new(None, Some("nfs/host@REALM"), &[]),
            Principal::new(Some(1000), None, &["host.example".into()]),
        ];
        let names = [&b"one\n"[..], b"", b"\xff\0"];
        let named = |kind| names.map(|name| ClientName { kind, name: name.into() });
        let all = KINDS.iter().flat_map(|(_, kind)| named(*kind));
        all.zip(principals.into_iter().cycle()).collect()
    }

    #[test]
    fn stored_clients_are_there_again_with_who_made_them() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("clients");
        let (recovery, lease, before) = Recovery::load(Some(path.clone()), Duration::from_secs(90), false).unwrap();
        assert!(before.is_empty() && lease.is_zero());
        let clients = some_clients();
        runtime.block_on(recovery.store(1, || (1, clients.clone(), false))).unwrap();
        assert_eq!(load(&path).2, clients);
        runtime.block_on(recovery.store(1, || (1, Records::new(), false))).unwrap();
        assert_eq!(load(&path).2, clients, "nothing has changed");
        runtime.block_on(recovery.store(2, || (2, Records::new(), false))).unwrap();
        assert!(load(&path).2.is_empty());
        // The lease is shorter now, but earlier clients still have the longer one.
        let (shorter, before, _) = Recovery::load(Some(path.clone()), Duration::from_secs(10), true).unwrap();
        assert_eq!(before, Duration::from_secs(90));
        for (number, has_earlier, expected) in [(1, true, 90), (2, false, 10)] {
            runtime.block_on(shorter.store(number, || (number, Records::new(), has_earlier))).unwrap();
            assert_eq!(load(&path).1, Duration::from_secs(expected));
        }
        // Each start has its own number while clients of version 3 may remember it, even if nothing else is stored.
        let with = |clients: &Records| std::fs::write(&path, encode(Duration::from_secs(90), 5, clients)).unwrap();
        with(&clients);
        let starts = [(); 3].map(|()| load(&path).0.start);
        assert_eq!(starts, [7, 9, 11]);
        assert!(Recovery::load(Some(dir.path().into()), Duration::ZERO, true).is_err(), "a directory");
        assert!(Recovery::load(None, Duration::ZERO, true).unwrap().2.is_empty());
    }

    #[test]
    fn a_list_that_is_lost_or_damaged_lets_nobody_reclaim() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("clients");
        let whole = encode(Duration::from_secs(90), 5, &some_clients());
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let (_, lease, clients) = load(&path);
            assert!(clients.is_empty() && lease.is_zero(), "{len} bytes of {}", whole.len());
            assert!(matches!(read(&path), Ok(Ok(_))), "it is there from now on");
        }
        let earlier = "thruway NFS clients 1\nlease 90\n78\n";
        std::fs::write(&path, earlier).unwrap();
        assert!(matches!(read(&path), Ok(Err(NotKnown::Unreadable(why))) if why.contains("version")));
        assert!(load(&path).2.is_empty());
        std::fs::remove_file(&path).unwrap();
        assert!(load(&path).2.is_empty());
        let numbers = [(); 2].map(|()| {
            std::fs::remove_file(&path).unwrap();
            load(&path).0.start
        });
        assert_ne!(numbers[0], numbers[1], "that of the last start is not known");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_list_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let text = String::from_utf8_lossy(&bytes);
            let all = format!("{HEADER}\nlease 1\nstart 1\n{text}\nend\n");
            for text in [&text[..], &all] {
                if let Some(Before { lease, start, clients }) = decode(text) {
                    prop_assert_eq!(decode(&encode(lease, start, &clients)).map(|again| again.clients), Some(clients));
                }
            }
        }
    }
}
