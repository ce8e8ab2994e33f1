//! What is held of files for no use: those that programs of this host have removed keep their storage while they are held, and those
//! that are open for writing cannot be executed.

use super::node::Node;
use super::{FileId, Inner};
use rustix::io::Errno;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often all that is held is looked at.
const PERIOD: Duration = Duration::from_secs(5);

/// Data that clients have written and not asked to be flushed for this long is: the kernel would have written it by then, too.
const UNFLUSHED_MAX: Duration = Duration::from_secs(30);

/// Starts to look at what is held, until the file system is gone.
pub(super) fn start(inner: &Arc<Inner>) -> io::Result<()> {
    let inner = Arc::downgrade(inner);
    std::thread::Builder::new().name("nfs sweep".into()).spawn(move || run(&inner))?;
    Ok(())
}

fn run(inner: &Weak<Inner>) {
    loop {
        std::thread::sleep(PERIOD);
        let Some(inner) = inner.upgrade() else { return };
        let held: Vec<(FileId, Arc<Node>)> = inner.nodes.iter().collect();
        for (id, node) in held {
            if id != inner.root_id && node.stat().is_err_and(|error| error == Errno::STALE) {
                inner.nodes.remove(&id);
            }
            close(&inner, &node);
        }
        inner.paths.as_ref().inspect(|paths| paths.write());
    }
}

/// Flushes and closes a file that has not been written to for long.
fn close(inner: &Inner, node: &Arc<Node>) {
    let is_idle = |node: &Node| {
        let data = node.data();
        data.write.is_some() && data.written.is_none_or(|written| written.elapsed() > UNFLUSHED_MAX)
    };
    if !is_idle(node) {
        return;
    }
    // The task that flushes it now sees to it.
    let Ok(_syncing) = node.syncing.try_lock() else { return };
    let file = {
        let mut data = node.data();
        data.is_dirty = false;
        data.write.clone()
    };
    let Some(file) = file else { return };
    let number = node.syncs.fetch_add(1, Ordering::SeqCst) + 1;
    // An error is noted: what may be lost is written again.
    if inner.sync(node, &file).is_ok() {
        node.synced.store(number, Ordering::SeqCst);
    }
    drop(file);
    let mut data = node.data();
    let is_in_use = data.write.as_ref().is_some_and(|file| Arc::strong_count(file) > 1);
    if !data.is_dirty && !is_in_use {
        data.close_for_writing();
    }
}

#[cfg(test)]
mod tests {
    use crate::{Credentials, FileSystem, LocalFileSystem, LocalOptions};
    use std::fs;
    use std::sync::mpsc;
    use thruway_engine::Reactors;

    #[test]
    fn a_file_that_another_program_has_removed_is_not_held() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "data").unwrap();
        let files = LocalFileSystem::open(dir.path(), &LocalOptions::default()).unwrap();
        let reactors = Reactors::start(Some(1)).unwrap();
        let (done, is_done) = mpsc::channel();
        reactors.handles()[0].spawn(move || async move {
            let root = Credentials { uid: 0, gid: 0, groups: Vec::new() };
            files.look_up(&root, &files.root(), b"file").await.unwrap();
            done.send(files).unwrap();
        });
        let _files = is_done.recv().unwrap();
        let are_held = || {
            let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
            let path = path.to_str().unwrap();
            links.filter(|link| link.to_string_lossy().starts_with(path)).count()
        };
        assert!(are_held() > 0);
        fs::remove_file(&path).unwrap();
        while are_held() > 0 {
            std::thread::yield_now();
        }
    }
}
