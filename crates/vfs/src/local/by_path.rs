//! Files for a process that may not open them by their handles: they are found by their paths ([`PathTable`]), or by a search of the
//! whole tree, and their data is opened with the rights of the process.

use super::node::{Node, proc_path};
use super::path_table::PathTable;
use super::{Found, Inner, LocalFileSystem, errno, id_of};
use crate::{FileId, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thruway_fs::beneath::join;
use thruway_fs::handle::Handle;

/// Most bytes of a path that the kernel takes, without the NUL behind it (`PATH_MAX`). Longer ones are opened in pieces.
const PATH_MAX: usize = 4095;

/// Another descriptor of an open file, which only names it.
pub(super) fn name_open(fd: &OwnedFd) -> Result<OwnedFd> {
    rustix::fs::open(proc_path(fd), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

/// Whether a path leads nowhere, or not to where it has led: not an error of the file system.
fn leads_elsewhere(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::STALE | Errno::NAMETOOLONG)
}

/// Whether this is no property of a file: what is there is then unknown.
fn is_failure(error: Errno) -> bool {
    matches!(error, Errno::IO | Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::NOSPC)
}

impl Inner {
    /// A file has been seen in a directory.
    pub(super) fn note_place(self: &Arc<Self>, id: &FileId, dir: &Node, name: &CStr) {
        if let Some(paths) = &self.paths
            && paths.note(id, &dir.id, name.to_bytes())
        {
            let inner = Arc::clone(self);
            self.workers.start(move || inner.paths.as_ref().into_iter().for_each(PathTable::write));
        }
    }

    /// The file, if it is where it was last seen.
    pub(super) fn find_by_path(&self, paths: &PathTable, id: &FileId) -> Result<Option<Found>> {
        let Some(names) = paths.names(&self.root_id, id) else { return Ok(None) };
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
        let open = |dir: &OwnedFd, path: &[u8]| {
            let path = if path.is_empty() { &b"."[..] } else { path };
            loop {
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                match rustix::fs::openat2(dir, path, flags, Mode::empty(), inside | ResolveFlags::NO_SYMLINKS) {
                    // A rename elsewhere made the kernel unsure.
                    Err(Errno::AGAIN) => {}
                    opened => return opened,
                }
            }
        };
        let find = || {
            let (mut above, mut path) = (None, Vec::new());
            for name in &names {
                if path.len() + 1 + name.len() > PATH_MAX {
                    above = Some(open(above.as_ref().unwrap_or(&self.root), &path)?);
                    path.clear();
                }
                path = join(&path, name);
            }
            Found::of(open(above.as_ref().unwrap_or(&self.root), &path)?)
        };
        match find() {
            Ok(found) => Ok((found.id == *id).then_some(found)),
            Err(error) if leads_elsewhere(error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the data of a file with the rights of this process. Its owner may use it whatever its permissions are, as over the
    /// network (RFC 1813, section 4.4): it gives itself those that it needs, and takes them back.
    pub(super) fn open_as_owner(&self, node: &Node, flags: OFlags) -> Result<OwnedFd> {
        let open = || {
            // The link to the descriptor is followed; what it leads to is no link.
            let flags = (flags - OFlags::NOFOLLOW) | OFlags::CLOEXEC;
            match rustix::fs::open(node.proc_path(), flags, Mode::empty()) {
                // Its lease is being given back.
                Err(Errno::AGAIN) => Err(Errno::INPROGRESS),
                opened => opened,
            }
        };
        match open() {
            Err(Errno::ACCESS) => {}
            opened => return opened,
        }
        // One at a time: the second would take the permissions of the first for the file's own.
        let _opening = self.opening.lock().expect("no panics under the lock");
        let stat = node.stat()?;
        if stat.stx_uid != self.own_uid {
            return Err(Errno::ACCESS);
        }
        let own = Mode::from_raw_mode(stat.stx_mode.into());
        rustix::fs::chmod(node.proc_path(), own | Mode::RUSR | Mode::WUSR)?;
        let opened = open();
        let taken_back = rustix::fs::chmod(node.proc_path(), own);
        taken_back.inspect_err(|error| tracing::error!(%error, "a file keeps permissions that are not its own"))?;
        node.note_change();
        opened
    }

    /// Looks for a file in the whole tree and notes where everything is that is seen on the way. What this process may not look at is
    /// not there. Directories are kept by their ids and opened by way of the table, so that no path is too long.
    fn search_tree(&self, paths: &PathTable, id: &FileId) -> Result<bool> {
        let (_, mount) = Handle::of(&self.root, c"").map_err(|e| errno(&e))?;
        let mut todo = vec![self.root_id.clone()];
        let mut buffer = vec![MaybeUninit::uninit(); 64 << 10];
        while let Some(dir_id) = todo.pop() {
            let dir = match self.find_by_path(paths, &dir_id) {
                Ok(Some(dir)) => dir,
                Err(error) if is_failure(error) => return Err(error),
                // It has just been removed, or is not for this process.
                Ok(None) | Err(_) => continue,
            };
            // Not ".", which needs the right to search it.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let open = match rustix::fs::open(proc_path(&dir.fd), flags, Mode::empty()) {
                Ok(open) => open,
                Err(error) if is_failure(error) => return Err(error),
                Err(_) => continue,
            };
            let mut found = false;
            let mut entries = RawDir::new(&open, &mut buffer);
            while let Some(entry) = entries.next() {
                let entry = entry?;
                let name = entry.file_name();
                let Ok((handle, its_mount)) = Handle::of(&open, name) else { continue };
                if matches!(name.to_bytes(), b"." | b"..") || its_mount != mount {
                    continue;
                }
                let its_id = id_of(&handle);
                found |= its_id == *id;
                if paths.note(&its_id, &dir_id, name.to_bytes()) {
                    paths.write();
                }
                let is_directory = match entry.file_type() {
                    FileType::Unknown => rustix::fs::statat(&open, name, AtFlags::SYMLINK_NOFOLLOW)
                        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir()),
                    other => other.is_dir(),
                };
                if is_directory {
                    todo.push(its_id);
                }
            }
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl LocalFileSystem {
    /// Finds a file that is not where it was last seen. One search at a time: those who wait for it mostly find their files by what it
    /// has noted, and need none of their own to know that they are gone.
    ///
    /// `error` is why it was not found where it was last seen, and the result if it is nowhere else.
    pub(super) async fn search(&self, paths: &PathTable, id: &FileId, error: Errno) -> Result<Arc<Node>> {
        if paths.is_gone(id) {
            return Err(Errno::STALE);
        }
        let begun_before = paths.searches.load(Ordering::SeqCst);
        let mut last_complete = paths.searching.lock().await;
        let look = || {
            let wanted = id.clone();
            self.work(move |inner| inner.open_node(&wanted))
        };
        match look().await {
            Err(Errno::STALE | Errno::ACCESS) => {}
            found => return found,
        }
        if *last_complete > begun_before {
            return Err(error);
        }
        let number = paths.searches.fetch_add(1, Ordering::SeqCst) + 1;
        let wanted = id.clone();
        let found = self.work(move |inner| {
            let Some(paths) = &inner.paths else { return Err(Errno::STALE) };
            if !inner.search_tree(paths, &wanted)? {
                return Ok(None);
            }
            inner.find_by_path(paths, &wanted)?.map(|found| inner.hold(found)).transpose()
        });
        match found.await? {
            Some(node) => Ok(node),
            None => {
                // A client may have moved it past the search.
                if let Ok(node) = look().await {
                    return Ok(node);
                }
                *last_complete = number;
                if error == Errno::STALE {
                    paths.note_gone(id);
                }
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Credentials, FileSystem, LocalOptions, Make, SetAttributes};
    use std::fs;
    use std::path::Path;
    use std::sync::mpsc;
    use thruway_engine::Reactors;

    struct Subject(LocalFileSystem);

    impl Subject {
        fn open(dir: &Path, path_table: Option<&Path>) -> Subject {
            let options = LocalOptions { path_table: path_table.map(Into::into), ..LocalOptions::default() };
            Subject(LocalFileSystem::open_by(dir, &options, true).unwrap())
        }

        async fn look_up(&self, path: &str) -> FileId {
            let mut at = self.0.root();
            for name in path.split('/') {
                (at, _) = self.0.look_up(&Credentials::own(), &at, name.as_bytes()).await.unwrap();
            }
            at
        }

        async fn number(&self, id: &FileId) -> Result<u64> {
            self.0.attributes(id).await.map(|attributes| attributes.number)
        }

        /// Until it is not used any more; its threads may be behind.
        fn close(self) {
            let inner = Arc::downgrade(&self.0.inner);
            drop(self);
            while inner.strong_count() > 0 {
                std::thread::yield_now();
            }
        }

        fn searches(&self) -> u64 {
            self.0.inner.paths.as_ref().unwrap().searches.load(Ordering::SeqCst)
        }
    }

    fn number(path: impl AsRef<Path>) -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(fs::symlink_metadata(path).unwrap().ino())
    }

    fn on_a_reactor(test: impl AsyncFnOnce() + Send + 'static) {
        let reactors = Reactors::start(Some(1)).unwrap();
        let (done, is_done) = mpsc::channel();
        reactors.handles()[0].spawn(move || async move {
            test().await;
            done.send(()).unwrap();
        });
        is_done.recv().expect("a check has failed: its message is above");
    }

    #[test]
    fn files_are_found_after_restarts_wherever_they_have_been_moved() {
        on_a_reactor(async || {
            let (dir, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let at = |path: &str| dir.path().join(path);
            fs::create_dir_all(at("a/b")).unwrap();
            for file in ["a/b/file", "a/b/other", "a/gone"] {
                fs::write(at(file), file).unwrap();
            }
            std::os::unix::fs::symlink("/", at("a/link")).unwrap();
            let table = state.path().join("paths");
            let first = Subject::open(dir.path(), Some(&table));
            let (file, other) = (first.look_up("a/b/file").await, first.look_up("a/b/other").await);
            let (link, gone) = (first.look_up("a/link").await, first.look_up("a/gone").await);
            // A rename by a client is known without a search.
            let (a, own) = (first.look_up("a").await, Credentials::own());
            first.0.rename(&own, (&a, b"b"), (&first.0.root(), b"moved")).await.unwrap();
            let (made, _) = first.0.make(&own, &a, b"made", Make::NewFile, SetAttributes::default()).await.unwrap();
            first.close();
            let second = Subject::open(dir.path(), Some(&table));
            assert_eq!(second.number(&file).await, number(at("moved/file")));
            assert_eq!(second.number(&link).await, number(at("a/link")));
            assert_eq!(second.number(&made).await, number(at("a/made")));
            assert_eq!(second.number(&second.0.root()).await, number(dir.path()));
            assert_eq!(second.searches(), 0);
            second.close();
            // What others have done since is found by a search, and one is enough.
            fs::create_dir(at("new")).unwrap();
            fs::rename(at("moved"), at("new/again")).unwrap();
            fs::remove_file(at("a/gone")).unwrap();
            fs::write(at("a/gone"), "another").unwrap();
            let third = Subject::open(dir.path(), Some(&table));
            assert_eq!(third.number(&file).await, number(at("new/again/file")));
            assert_eq!(third.searches(), 1);
            assert_eq!(third.number(&other).await, number(at("new/again/other")));
            assert_eq!(third.searches(), 1);
            assert_eq!(third.number(&gone).await, Err(Errno::STALE));
            assert_eq!(third.searches(), 2);
            third.close();
            // Without a table everything is.
            let fourth = Subject::open(dir.path(), None);
            assert_eq!(fourth.number(&other).await, number(at("new/again/other")));
            assert_eq!(fourth.searches(), 1);
            // What a client has removed is not.
            fourth.0.remove(&own, &fourth.look_up("a").await, b"made", false).await.unwrap();
            assert_eq!(fourth.number(&made).await, Err(Errno::STALE));
            assert_eq!(fourth.searches(), 1);
        });
    }

    #[test]
    fn files_are_found_below_any_depth() {
        on_a_reactor(async || {
            let dir = tempfile::tempdir().unwrap();
            let subject = Subject::open(dir.path(), None);
            let (own, name) = (Credentials::own(), "d".repeat(200));
            let (mut at, mut above) = (subject.0.root(), Vec::new());
            let set = SetAttributes { mode: Some(0o700), ..SetAttributes::default() };
            for _ in 0..30 {
                above.push(at.clone());
                (at, _) = subject.0.make(&own, &at, name.as_bytes(), Make::Directory, set).await.unwrap();
            }
            subject.0.inner.nodes.clear();
            subject.0.attributes(&at).await.unwrap();
            assert_eq!(subject.searches(), 0);
            // Not by the name of the place, which the clean-up could not use.
            for dir in above.iter().rev() {
                subject.0.remove(&own, dir, name.as_bytes(), true).await.unwrap();
            }
        });
    }

    #[test]
    fn those_who_wait_for_a_search_share_it() {
        on_a_reactor(async || {
            let dir = tempfile::tempdir().unwrap();
            let first = Subject::open(dir.path(), None);
            let mut ids = Vec::new();
            for n in 0..20 {
                let name = n.to_string();
                fs::write(dir.path().join(&name), "").unwrap();
                ids.push(first.look_up(&name).await);
            }
            for n in 0..10 {
                fs::remove_file(dir.path().join(n.to_string())).unwrap();
            }
            // On a busy machine each may have ended before the next is asked for.
            for attempt in 1.. {
                let second = Subject::open(dir.path(), None);
                let found = futures_util::future::join_all(ids.iter().map(|id| second.number(id))).await;
                assert!(found[..10].iter().all(|found| *found == Err(Errno::STALE)), "{found:?}");
                assert!(found[10..].iter().all(Result::is_ok), "{found:?}");
                // One that came when a search had begun needs the next one.
                if second.searches() < 10 {
                    break;
                }
                assert!(attempt < 50, "never fewer than {}", second.searches());
            }
        });
    }

    /// What a client, or a program of the host, may make keeps no search from its end.
    #[test]
    fn searches_pass_over_what_cannot_be_looked_at() {
        on_a_reactor(async || {
            let dir = tempfile::tempdir().unwrap();
            let first = Subject::open(dir.path(), None);
            let (own, name) = (Credentials::own(), "d".repeat(250));
            let set = SetAttributes { mode: Some(0o700), ..SetAttributes::default() };
            let (mut at, mut above) = (first.0.root(), Vec::new());
            for _ in 0..20 {
                above.push(at.clone());
                (at, _) = first.0.make(&own, &at, name.as_bytes(), Make::Directory, set).await.unwrap();
            }
            let (deep, _) = first.0.make(&own, &at, b"deep", Make::NewFile, set).await.unwrap();
            for kind in ["0", "600", "300"] {
                fs::create_dir(dir.path().join(kind)).unwrap();
                let mode = u32::from_str_radix(kind, 8).unwrap();
                let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
                fs::set_permissions(dir.path().join(kind), permissions).unwrap();
            }
            fs::write(dir.path().join("moved"), "").unwrap();
            let moved = first.look_up("moved").await;
            fs::rename(dir.path().join("moved"), dir.path().join("away")).unwrap();
            let second = Subject::open(dir.path(), None);
            assert_eq!(second.number(&moved).await, number(dir.path().join("away")));
            // Behind a path that the kernel would not take whole.
            second.number(&deep).await.unwrap();
            second.0.remove(&own, &at, b"deep", false).await.unwrap();
            for dir in above.iter().rev() {
                second.0.remove(&own, dir, name.as_bytes(), true).await.unwrap();
            }
        });
    }
}
