//! Puts finished files in place: makes them durable, gives them their names, records it.
//!
//! Group commit: while one group is being synced, the next one gathers. A few files are synced one by one, a group by
//! syncing their file systems, so that the cost of durability falls as the rate of files rises. A file is
//! never renamed before its content is on the medium.
//!
//! A sync that fails says that something written since the last one is lost, not what. So it ends the session, voids what
//! the journal says of files that are not in place, and nothing is put in place any more.

use super::journal::{Journal, Key, Version};
use super::tree::{Place, Tree};
use rustix::fs::AtFlags;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use thruway_fs::Identity;

/// Files synced one by one; a larger group is synced with its file systems.
const ONE_BY_ONE_MAX: usize = 4;
/// Files that may wait to be committed. Beyond that, packs wait, and the source has no credits for their blocks.
const PENDING_MAX: u64 = 8192;
/// Large files that are kept open until they are committed.
const OPEN_MAX: u64 = 16;

/// A file under its temporary name, whole and with its attributes.
pub(crate) struct Finished {
    /// Path of its directory.
    pub(crate) parent: Vec<u8>,
    pub(crate) name: CString,
    pub(crate) temp: CString,
    pub(crate) path: Vec<u8>,
    pub(crate) key: Key,
    pub(crate) version: Version,
    pub(crate) identity: Identity,
    /// Not all of its attributes could be kept.
    pub(crate) lacking: bool,
    /// It gets the permissions of the file that it replaces or, if that one is gone, those of a new file with this mode.
    pub(crate) replacing: Option<u32>,
    pub(crate) content: Content,
}

/// How far a finished file's content is on its way to the medium.
pub(crate) enum Content {
    /// It is still open: to be synced through the descriptor that it was written through, which no error passes by.
    Open(Arc<dyn AsFd + Send + Sync>),
    /// Synced.
    Synced,
    /// Syncing it failed, which the kernel will not say again.
    Lost(io::Error),
    /// Not open any more: an error may have been told to somebody else, but not to those who sync its file system
    /// through a descriptor from before the first write.
    Closed,
}

/// What becomes of files.
pub(crate) enum Committed<'a> {
    /// This one is in place.
    Placed(&'a Finished),
    /// This one is not.
    Failed(&'a Finished, io::Error),
    /// Nothing is durable any more.
    Lost(io::Error),
    /// A group has been dealt with.
    Group,
}

/// Hears what becomes of files.
pub(crate) type OnCommit = Box<dyn Fn(Committed<'_>) + Send>;

/// Work of the commit stage.
enum Work {
    /// Makes files durable and gives them their names.
    Files(Vec<Finished>),
    /// Makes durable what has been written so far.
    Sync,
}

/// The commit stage of a sink.
pub(crate) struct Committer {
    sender: Mutex<Option<Sender<Work>>>,
    pending: Arc<Pending>,
    tree: Arc<Tree>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Files submitted and not in place yet.
#[derive(Default)]
struct Pending {
    state: Mutex<PendingState>,
    open: AtomicU64,
}

#[derive(Default)]
struct PendingState {
    files: u64,
    /// Tasks that wait for fewer files.
    waiting: Vec<Box<dyn FnOnce() + Send>>,
    /// Nothing is put in place any more.
    stopped: bool,
}

impl PendingState {
    fn has_room(&self) -> bool {
        self.files < PENDING_MAX || self.stopped
    }
}

impl Pending {
    fn state(&self) -> MutexGuard<'_, PendingState> {
        self.state.lock().expect("no panics under the lock")
    }

    /// As [`Committer::when_room`].
    fn when_room(&self, task: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        if !state.has_room() {
            return state.waiting.push(Box::new(task));
        }
        drop(state);
        task();
    }

    /// Changes the state, and runs the tasks that wait if there is room then.
    fn change(&self, change: impl FnOnce(&mut PendingState)) {
        let mut state = self.state();
        change(&mut state);
        let ready = if state.has_room() { std::mem::take(&mut state.waiting) } else { Vec::new() };
        drop(state);
        ready.into_iter().for_each(|task| task());
    }
}

impl Committer {
    pub(crate) fn start(tree: Arc<Tree>, journal: Option<Arc<Journal>>, on_commit: OnCommit) -> io::Result<Committer> {
        let (sender, receiver) = channel();
        let pending = Arc::new(Pending::default());
        let count = Arc::clone(&pending);
        let of_thread = Arc::clone(&tree);
        let run = move || commit_groups(&receiver, &of_thread, journal.as_deref(), &on_commit, &count);
        let thread = std::thread::Builder::new().name("commit".into()).stack_size(256 << 10).spawn(run);
        let thread = thread.map_err(|error| thruway_engine::limits::thread_error(&error))?;
        Ok(Committer { sender: Mutex::new(Some(sender)), pending, tree, thread: Mutex::new(Some(thread)) })
    }

    /// Runs a task when there is room for more files: now, or later on the thread of the commit stage.
    pub(crate) fn when_room(&self, task: impl FnOnce() + Send + 'static) {
        self.pending.when_room(task);
    }

    /// What to do with a file that has been written, and is one of a group of which so many are kept open: where
    /// the group will be synced with its file systems it need not stay open.
    pub(crate) fn keep(&self, file: File, open: usize) -> Content {
        if open < ONE_BY_ONE_MAX {
            return Content::Open(Arc::new(file));
        }
        match self.by_file().then(|| file.sync_all()) {
            None => Content::Closed,
            Some(Ok(())) => Content::Synced,
            Some(Err(e)) => Content::Lost(e),
        }
    }

    /// Hands over finished files.
    pub(crate) fn submit(&self, mut files: Vec<Finished>) {
        if files.is_empty() {
            return;
        }
        let sender = self.sender.lock().expect("no panics under the lock").clone();
        // After the end of the thread, nothing would subtract the files again.
        let Some(sender) = sender else { return };
        for file in &mut files {
            let Content::Open(open) = &file.content else { continue };
            if self.pending.open.fetch_add(1, Ordering::SeqCst) >= OPEN_MAX {
                // Descriptors are few.
                self.pending.open.fetch_sub(1, Ordering::SeqCst);
                file.content = match self.by_file().then(|| sync(open)) {
                    None => Content::Closed,
                    Some(Ok(())) => Content::Synced,
                    Some(Err(e)) => Content::Lost(e),
                };
            }
        }
        self.pending.state().files += files.len() as u64;
        let _ = sender.send(Work::Files(files));
    }

    /// Makes durable what has been written so far. An error ends the session.
    pub(crate) fn sync(&self) {
        if let Some(sender) = &*self.sender.lock().expect("no panics under the lock") {
            let _ = sender.send(Work::Sync);
        }
    }

    /// Whether files are only made durable by syncing each.
    fn by_file(&self) -> bool {
        self.tree.volumes().any_by_file()
    }

    /// Files submitted and not in place yet.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.state().files
    }

    /// Ends the stage after what has been submitted.
    pub(crate) fn stop(&self) {
        self.sender.lock().expect("no panics under the lock").take();
        if let Some(thread) = self.thread.lock().expect("no panics under the lock").take() {
            let _ = thread.join();
        }
        self.pending.change(|state| state.stopped = true);
    }
}

fn commit_groups(
    receiver: &Receiver<Work>,
    tree: &Tree,
    journal: Option<&Journal>,
    on_commit: &OnCommit,
    pending: &Pending,
) {
    let mut lost = false;
    while let Ok(first) = receiver.recv() {
        let (mut group, mut must_sync) = (Vec::new(), false);
        for work in std::iter::once(first).chain(receiver.try_iter()) {
            match work {
                Work::Files(files) => group.extend(files),
                Work::Sync => must_sync = true,
            }
        }
        let open = group.iter().filter(|f| matches!(f.content, Content::Open(_))).count() as u64;
        let count = group.len() as u64;
        let directories = Directories { tree, last: Mutex::default() };
        if lost {
            group.iter().for_each(|file| directories.discard(file));
        } else {
            let durable = |group: &[Finished]| {
                if must_sync {
                    tree.volumes().sync()?;
                }
                make_durable(group, tree)
            };
            let outcome = commit(&group, journal, durable, |file| directories.place(file));
            match outcome {
                // Failures are reported before the group counts as done: the session ends when all are.
                Ok(placed) => {
                    for (file, placed) in group.iter().zip(placed) {
                        on_commit(match placed {
                            Ok(_) => Committed::Placed(file),
                            Err(e) => {
                                directories.discard(file);
                                Committed::Failed(file, e)
                            }
                        });
                    }
                }
                Err(e) => {
                    tree.volumes().lose();
                    lost = true;
                    group.iter().for_each(|file| directories.discard(file));
                    on_commit(Committed::Lost(e));
                }
            }
        }
        pending.open.fetch_sub(open, Ordering::SeqCst);
        pending.change(|state| state.files -= count);
        on_commit(Committed::Group);
    }
}

/// What a group consists of, for the journal.
pub(crate) trait Commit {
    /// Name within the job, version at the source, and which file it is here.
    fn named(&self) -> (&Key, &Version, Identity);
    /// Not all of its attributes could be kept.
    fn is_lacking(&self) -> bool;
}

impl Commit for Finished {
    fn named(&self) -> (&Key, &Version, Identity) {
        (&self.key, &self.version, self.identity)
    }

    fn is_lacking(&self) -> bool {
        self.lacking
    }
}

/// Commits a group: makes it durable, gives the files their names, records which have them and when
/// each changed last. Killed between the last two, the next attempt sends small files again and checks large ones.
///
/// # Errors
/// If the group could not be made durable: then nothing may be put in place any more.
pub(crate) fn commit<I: Commit>(
    group: &[I],
    journal: Option<&Journal>,
    durable: impl FnOnce(&[I]) -> io::Result<()>,
    place: impl Fn(&I) -> io::Result<i64>,
) -> io::Result<Vec<io::Result<i64>>> {
    if let Err(e) = durable(group) {
        if let Some(journal) = journal {
            journal.void();
        }
        return Err(e);
    }
    let outcomes: Vec<io::Result<i64>> = group.iter().map(place).collect();
    if let Some(journal) = journal {
        let placed = group.iter().zip(&outcomes).filter_map(|(file, outcome)| {
            let (key, version, identity) = file.named();
            Some((key, version, identity, *outcome.as_ref().ok()?, file.is_lacking()))
        });
        journal.placed(placed);
    }
    Ok(outcomes)
}

/// Syncs a group.
fn make_durable(group: &[Finished], tree: &Tree) -> io::Result<()> {
    let volumes = tree.volumes();
    volumes.check()?;
    let lost = group.iter().find_map(|file| match &file.content {
        Content::Lost(e) => Some(e.raw_os_error().map_or(io::ErrorKind::Other.into(), io::Error::from_raw_os_error)),
        _ => None,
    });
    if let Some(e) = lost {
        return Err(e);
    }
    let by_file = volumes.any_by_file();
    if group.len() > ONE_BY_ONE_MAX && !by_file {
        return volumes.sync();
    }
    for file in group {
        if let Content::Open(open) = &file.content {
            sync(open)?;
        }
    }
    if group.iter().any(|file| matches!(file.content, Content::Closed)) {
        volumes.sync()?;
    }
    Ok(())
}

/// `fsync(2)`.
fn sync(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::io::retry_on_intr(|| rustix::fs::fsync(&file))?)
}

/// Opens the directories of files; neighbours share theirs.
struct Directories<'a> {
    tree: &'a Tree,
    last: Mutex<Option<(Vec<u8>, Arc<std::os::fd::OwnedFd>)>>,
}

impl Directories<'_> {
    fn of(&self, file: &Finished) -> io::Result<Place> {
        let mut last = self.last.lock().expect("no panics under the lock");
        let dir = match &*last {
            Some((path, dir)) if *path == file.parent => Arc::clone(dir),
            _ => {
                let dir = self.tree.find(&file.path)?.dir;
                *last = Some((file.parent.clone(), Arc::clone(&dir)));
                dir
            }
        };
        Ok(Place { dir, name: file.name.clone() })
    }

    fn place(&self, file: &Finished) -> io::Result<i64> {
        self.tree.put_in_place(&file.parent, &self.of(file)?, (&file.temp, file.identity), file.replacing)
    }

    /// Removes a temporary file that will never get its name.
    fn discard(&self, file: &Finished) {
        if let Ok(place) = self.of(file) {
            let _ = rustix::fs::unlinkat(&place.dir, &file.temp, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn tasks_wait_for_room_without_a_thread() {
        let (pending, run) = (Pending::default(), Arc::new(AtomicUsize::new(0)));
        let task = |pending: &Pending| {
            let run = Arc::clone(&run);
            pending.when_room(move || {
                run.fetch_add(1, Ordering::SeqCst);
            });
        };
        let runs = || run.load(Ordering::SeqCst);
        pending.change(|state| state.files = PENDING_MAX);
        (0..3).for_each(|_| task(&pending));
        assert_eq!(runs(), 0);
        pending.change(|state| state.files -= 1);
        assert_eq!(runs(), 3);
        task(&pending);
        assert_eq!(runs(), 4);
        pending.change(|state| state.files = PENDING_MAX);
        task(&pending);
        // The tasks of a session that is over must give their blocks back.
        pending.change(|state| state.stopped = true);
        assert_eq!(runs(), 5);
    }
}
