//! A user who reads, plants and exchanges entries during the copy of another user.

use crate::entries::{Identity, identity};
use fastrand::Rng;
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags};
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use thruway_fs::credentials::{Credentials, act_as};

pub(crate) const INTRUDER: u32 = 1234;
/// The first bytes of files that the intruder has made.
pub(crate) const PLANTED: &[u8; 16] = b"intruder's bytes";

pub(crate) struct Intruder {
    pub(crate) random: Rng,
    /// The trees of the copy.
    pub(crate) roots: Vec<PathBuf>,
    pub(crate) outside: PathBuf,
    /// Directories that existed before the copy. A copy finds these by their path, so they stay there.
    pub(crate) fixed: BTreeSet<Identity>,
    /// Files of the intruder.
    pub(crate) made: BTreeSet<Identity>,
    /// The first bytes of all files that the intruder could read.
    pub(crate) seen: BTreeSet<Vec<u8>>,
    /// All changes, for the message of a failure.
    pub(crate) log: Vec<String>,
}

impl Intruder {
    /// Reads what the user can, and makes a random change. The system refuses some.
    pub(crate) fn act(&mut self) {
        let user = Credentials { uid: INTRUDER, gid: INTRUDER, groups: Vec::new() };
        act_as(&user, || self.change()).unwrap();
    }

    fn change(&mut self) {
        let (mut directories, mut entries) = self.look();
        // A file with names in both trees would change during its own copy.
        let root = self.random.choice(&self.roots).unwrap();
        directories.retain(|path| path.starts_with(root));
        entries.retain(|path| path.starts_with(root));
        let Some(path) = self.random.choice(&entries).cloned() else { return };
        let directory = self.random.choice(&directories).unwrap();
        let free = directory.join(format!("free{}", self.random.u32(..1000)));
        let other = if self.random.bool() { self.random.choice(&entries).unwrap().clone() } else { free.clone() };
        let what = self.random.u32(..9);
        if [&path, &other].iter().any(|path| self.is_fixed(path)) {
            return;
        }
        let meta = fs::symlink_metadata(&path);
        let away = || fs::rename(&path, &free);
        let done = match what {
            0..3 => rustix::fs::renameat_with(CWD, &path, CWD, &other, RenameFlags::EXCHANGE).map_err(Into::into),
            3 => fs::rename(&path, &other),
            4 => fs::hard_link(&path, &free),
            5 => away().and_then(|()| {
                let targets = [self.outside.clone(), self.outside.join("file"), other.clone()];
                symlink(self.random.choice(&targets).unwrap(), &path)
            }),
            6 => away().and_then(|()| self.plant(&path, meta.as_ref().ok())),
            7 => away().and_then(|()| {
                fs::create_dir(&path)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o777))?;
                self.plant(&path.join("a"), None)
            }),
            _ => away()
                .and_then(|()| Ok(rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o666), 0)?)),
        };
        self.log.push(format!("{what} {path:?} {other:?}: {done:?}"));
        self.look();
    }

    fn is_fixed(&self, path: &Path) -> bool {
        identity(path).is_some_and(|identity| self.fixed.contains(&identity))
    }

    /// Makes a file with the size and time of the one that it replaces.
    fn plant(&mut self, path: &Path, as_was: Option<&fs::Metadata>) -> std::io::Result<()> {
        let size = as_was.map_or(16, fs::Metadata::len).max(16);
        let mut content = PLANTED.to_vec();
        content.resize(size as usize, b'i');
        fs::write(path, content)?;
        let mode = *self.random.choice(&[0o666, 0o6777, 0o600]).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        rustix::fs::lsetxattr(path, "user.planted", b"1", XattrFlags::empty())?;
        self.made.extend(identity(path));
        if let Some(was) = as_was {
            let time = Timespec { tv_sec: was.mtime(), tv_nsec: was.mtime_nsec() };
            let times = Timestamps { last_access: time, last_modification: time };
            rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    /// Reads all files that it can. Returns the directories that it can change, and their entries.
    fn look(&mut self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let (mut directories, mut entries) = (Vec::new(), Vec::new());
        let mut todo = self.roots.clone();
        while let Some(directory) = todo.pop() {
            let rights = Access::WRITE_OK | Access::EXEC_OK;
            let is_open = rustix::fs::accessat(CWD, &directory, rights, AtFlags::EACCESS);
            for path in fs::read_dir(&directory).into_iter().flatten().map_while(Result::ok).map(|entry| entry.path()) {
                let Ok(meta) = fs::symlink_metadata(&path) else { continue };
                if meta.is_dir() {
                    todo.push(path.clone());
                } else if meta.is_file() {
                    let mut start = [0; 16];
                    let read = fs::File::open(&path).and_then(|mut file| file.read_exact(&mut start));
                    self.seen.extend(read.is_ok().then(|| start.to_vec()));
                }
                entries.extend(is_open.is_ok().then_some(path));
            }
            directories.extend(is_open.is_ok().then_some(directory));
        }
        (directories, entries)
    }
}
