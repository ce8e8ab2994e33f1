//! A user who reads, plants and exchanges entries during the copy of another user.

use super::entries::{Identity, identity};
use fastrand::Rng;
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags};
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use thruway_fs::acl::{Acl, Entry as Right, Who};
use thruway_fs::credentials::{Credentials, act_as};

pub(crate) const INTRUDER: u32 = 1234;
/// The first bytes of files that the intruder has made.
pub(crate) const PLANTED: &[u8; 16] = b"intruder's bytes";

pub(crate) struct Intruder {
    pub(crate) random: Rng,
    /// The trees of the copy.
    pub(crate) roots: Vec<PathBuf>,
    /// Those with changes.
    pub(crate) changed: Vec<PathBuf>,
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
    /// Reads what the user can, and makes random changes. The system refuses some.
    pub(crate) fn act(&mut self) {
        let user = Credentials { uid: INTRUDER, gid: INTRUDER, groups: Vec::new() };
        act_as(&user, || (0..self.random.u32(1..4)).for_each(|_| self.change())).unwrap();
    }

    fn change(&mut self) {
        let (mut directories, mut entries) = self.look();
        // A file with names in both trees would change during its own copy.
        let root = self.random.choice(&self.changed).unwrap();
        directories.retain(|path| path.starts_with(root));
        entries.retain(|path| path.starts_with(root));
        let Some(path) = self.random.choice(&entries).cloned() else { return };
        let directory = self.random.choice(&directories).unwrap();
        let free = directory.join(format!("free{}", self.random.u32(..1000)));
        let other = if self.random.bool() { self.random.choice(&entries).unwrap().clone() } else { free.clone() };
        let what = self.random.u32(..12);
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
            8 | 9 => self.plant_with_number(&path, meta.as_ref().ok()),
            10 => self.rewrite(&path, meta.as_ref().ok()),
            _ => away()
                .and_then(|()| Ok(rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o666), 0)?)),
        };
        self.log.push(format!("{what} {path:?} {other:?}: {done:?}"));
        self.look();
    }

    fn is_fixed(&self, path: &Path) -> bool {
        identity(path).is_some_and(|identity| self.fixed.contains(&identity))
    }

    /// Replaces a file by one with the same inode number, if the file system gives that again.
    fn plant_with_number(&mut self, path: &Path, as_was: Option<&fs::Metadata>) -> std::io::Result<()> {
        let Some(was) = as_was.filter(|was| was.is_file() && was.nlink() == 1) else { return Ok(()) };
        fs::remove_file(path)?;
        let names: Vec<_> = (0..50).map(|number| path.with_file_name(format!("number{number}"))).collect();
        for name in &names {
            self.plant(name, as_was)?;
            if fs::metadata(name)?.ino() == was.ino() {
                break;
            }
        }
        let last = names.iter().rfind(|name| name.exists()).expect("one was made");
        fs::rename(last, path)?;
        names.iter().for_each(|name| drop(fs::remove_file(name)));
        Ok(())
    }

    /// Changes the content of a file in place, and keeps its size and time.
    fn rewrite(&mut self, path: &Path, as_was: Option<&fs::Metadata>) -> std::io::Result<()> {
        let Some(was) = as_was.filter(|was| was.is_file() && was.len() >= 16) else { return Ok(()) };
        open(fs::OpenOptions::new().write(true), path)?.write_all_at(PLANTED, 0)?;
        date_as(path, was)
    }

    /// Makes a file with the size and time of the one that it replaces.
    fn plant(&mut self, path: &Path, as_was: Option<&fs::Metadata>) -> std::io::Result<()> {
        let size = as_was.map_or(16, fs::Metadata::len).max(16);
        let mut content = PLANTED.to_vec();
        content.resize(size as usize, b'i');
        open(fs::OpenOptions::new().write(true).create(true).truncate(true), path)?.write_all(&content)?;
        let mode = *self.random.choice(&[0o666, 0o6777, 0o600]).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        rustix::fs::lsetxattr(path, "user.planted", b"1", XattrFlags::empty())?;
        if self.random.bool() {
            let right = |who, permissions| Right { who, permissions };
            let all =
                [Who::Owner, Who::User(INTRUDER), Who::OwningGroup, Who::Mask, Who::Others].map(|who| right(who, 6));
            let list = Acl::new(all.to_vec()).unwrap();
            rustix::fs::lsetxattr(path, "system.posix_acl_access", &list.encode(), XattrFlags::empty())?;
        }
        self.made.extend(identity(path));
        as_was.map_or(Ok(()), |was| date_as(path, was))
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
                    let read =
                        open(fs::OpenOptions::new().read(true), &path).and_then(|mut file| file.read_exact(&mut start));
                    self.seen.extend(read.is_ok().then(|| start.to_vec()));
                }
                entries.extend(is_open.is_ok().then_some(path));
            }
            directories.extend(is_open.is_ok().then_some(directory));
        }
        (directories, entries)
    }
}

/// Opens a file. The process that has not stopped can put a pipe in its place, which this does not wait for.
fn open(options: &mut fs::OpenOptions, path: &Path) -> std::io::Result<fs::File> {
    options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32).open(path)
}

fn date_as(path: &Path, was: &fs::Metadata) -> std::io::Result<()> {
    let time = Timespec { tv_sec: was.mtime(), tv_nsec: was.mtime_nsec() };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
