//! Puts finished files in place: makes them durable, gives them their names, records it.
//!
//! Group commit: while one group is being synced, the next one gathers. A file alone is synced by
//! itself, a group by one `syncfs`, so that the cost of durability falls as the rate of files rises.

use super::journal::{Identity, Journal, Key, Version};
use super::tree::Place;
use rustix::fs::AtFlags;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A file under its temporary name, whole and with its attributes.
pub(crate) struct Finished {
    pub(crate) place: Place,
    pub(crate) temp: CString,
    pub(crate) path: Vec<u8>,
    pub(crate) key: Key,
    pub(crate) version: Version,
    pub(crate) identity: Identity,
    /// The open file, where it is still open.
    pub(crate) file: Option<Arc<File>>,
}

/// Hears how each file's commit went, and (`None`) that a group is done.
pub(crate) type OnCommit = Box<dyn Fn(Option<(&Finished, io::Result<()>)>) + Send>;

/// The commit stage of a sink.
pub(crate) struct Committer {
    sender: Mutex<Option<Sender<Vec<Finished>>>>,
    pending: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Committer {
    pub(crate) fn start(journal: Option<Arc<Journal>>, on_commit: OnCommit) -> io::Result<Committer> {
        let (sender, receiver) = channel();
        let pending = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&pending);
        let run = move || commit_groups(&receiver, journal.as_deref(), &on_commit, &count);
        let thread = std::thread::Builder::new().name("commit".into()).stack_size(256 << 10).spawn(run)?;
        Ok(Committer { sender: Mutex::new(Some(sender)), pending, thread: Mutex::new(Some(thread)) })
    }

    pub(crate) fn submit(&self, files: Vec<Finished>) {
        if files.is_empty() {
            return;
        }
        self.pending.fetch_add(files.len() as u64, Ordering::SeqCst);
        if let Some(sender) = &*self.sender.lock().expect("no panics under the lock") {
            let _ = sender.send(files);
        }
    }

    /// Files submitted and not in place yet.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.load(Ordering::SeqCst)
    }

    /// Ends the stage after what has been submitted.
    pub(crate) fn stop(&self) {
        self.sender.lock().expect("no panics under the lock").take();
        if let Some(thread) = self.thread.lock().expect("no panics under the lock").take() {
            let _ = thread.join();
        }
    }
}

fn commit_groups(
    receiver: &Receiver<Vec<Finished>>,
    journal: Option<&Journal>,
    on_commit: &OnCommit,
    pending: &AtomicU64,
) {
    while let Ok(mut group) = receiver.recv() {
        while let Ok(more) = receiver.try_recv() {
            group.extend(more);
        }
        let count = group.len() as u64;
        let outcomes =
            commit(&group, journal, make_durable, put_in_place, |file| (&file.key, &file.version, file.identity));
        // Failures are reported before the group counts as done: the session ends when all are.
        for (file, placed) in group.iter().zip(outcomes) {
            on_commit(Some((file, placed)));
        }
        pending.fetch_sub(count, Ordering::SeqCst);
        on_commit(None);
    }
}

/// Commits a group: makes it durable, records which files are whole, gives them their names. Killed
/// between the last two, the next attempt finds by its identity whether a file has its name.
pub(crate) fn commit<I>(
    group: &[I],
    journal: Option<&Journal>,
    durable: impl FnOnce(&[I]) -> io::Result<bool>,
    place: impl Fn(&I) -> io::Result<()>,
    named: impl Fn(&I) -> (&Key, &Version, Identity),
) -> Vec<io::Result<()>> {
    let position = journal.map(Journal::position);
    let synced = durable(group);
    let put = |file| match &synced {
        Ok(_) => place(file),
        Err(e) => Err(io::Error::new(e.kind(), format!("making it durable: {e}"))),
    };
    if let (Ok(_), Some(journal)) = (&synced, journal) {
        journal.done(group.iter().map(named));
    }
    let outcomes = group.iter().map(put).collect();
    if let (Ok(true), Some(journal), Some(position)) = (&synced, journal, position) {
        journal.synced(position);
    }
    outcomes
}

/// Syncs a group. `Ok(true)` if whole file systems were synced and with them all that was written.
fn make_durable(group: &[Finished]) -> io::Result<bool> {
    if let [Finished { file: Some(file), .. }] = group {
        file.sync_all()?;
        return Ok(false);
    }
    let mut devices = Vec::new();
    let mut last: Option<&Arc<OwnedFd>> = None;
    for file in group {
        let dir = &file.place.dir;
        if last.is_some_and(|l| Arc::ptr_eq(l, dir)) {
            continue;
        }
        last = Some(dir);
        let device = rustix::fs::fstat(dir)?.st_dev;
        if !devices.contains(&device) {
            devices.push(device);
            rustix::fs::syncfs(dir)?;
        }
    }
    Ok(true)
}

fn put_in_place(file: &Finished) -> io::Result<()> {
    let Place { dir, name } = &file.place;
    let moved = rustix::fs::renameat(dir, &file.temp, dir, name);
    if moved.is_err() {
        let _ = rustix::fs::unlinkat(dir, &file.temp, AtFlags::empty());
    }
    Ok(moved?)
}
