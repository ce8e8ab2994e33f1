//! Walks a tree, directory by directory.
//!
//! One directory is open at a time, whatever the depth; each is opened by its path below the root, through no symbolic link. The
//! walk stores the names of directories that it has not visited, in a temporary file if they exceed 1 MiB.

use crate::beneath::{self, Links};
use crate::identity::Directory;
use crate::spool::Spool;
use rustix::fs::{AtFlags, Mode, OFlags, Stat, StatFs};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thruway_engine::Owner;

/// A walk of a tree. Parents come before what they hold; the directories of one parent come in the order in which they
/// were [added](Walk::descend), each with all beneath it.
pub struct Walk {
    root: Arc<OwnedFd>,
    /// Path of the directory visited last.
    path: Vec<u8>,
    /// That directory, and those above it.
    levels: Vec<Level>,
    /// Names of directories that are not visited yet, and of some visited ones. Names of one parent are adjacent, and follow those of
    /// the directories above it.
    names: Spool,
    has_begun: bool,
}

/// A directory whose subdirectories are being visited.
struct Level {
    path_len: usize,
    /// `None` if it could not be opened.
    directory: Option<Directory>,
    /// Positions in [`Walk::names`]: its first name, the next name to visit, and the end of its names.
    first: u64,
    next: u64,
    end: u64,
}

/// A directory of the tree.
pub struct Visit {
    /// Its path below the root; empty for the root.
    pub below: Vec<u8>,
    /// The directory, open to be listed, and its attributes.
    pub dir: io::Result<(Arc<OwnedFd>, Stat)>,
}

impl Walk {
    /// Begins with the root itself. `owner` has a quota for the names of large trees.
    pub fn new(root: Arc<OwnedFd>, owner: Owner) -> Walk {
        Walk { root, path: Vec::new(), levels: Vec::new(), names: Spool::new(None, owner), has_begun: false }
    }

    /// The root.
    pub fn root(&self) -> &Arc<OwnedFd> {
        &self.root
    }

    /// Adds a directory that the one visited last holds.
    ///
    /// # Errors
    /// As [`Spool::append`].
    pub fn descend(&mut self, name: &CStr) -> io::Result<()> {
        self.names.append(name.to_bytes_with_nul())?;
        if let Some(level) = self.levels.last_mut() {
            level.end = self.names.len();
        }
        Ok(())
    }

    /// Opens the next directory.
    pub fn visit(&mut self) -> Option<Visit> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return Some(self.enter());
        }
        while let Some(level) = self.levels.last_mut() {
            self.path.truncate(level.path_len);
            if level.next >= level.end {
                self.names.truncate(level.first);
                self.levels.pop();
                continue;
            }
            match next_name(&self.names, level.next) {
                Ok(name) => {
                    level.next += name.len() as u64 + 1;
                    if !self.path.is_empty() {
                        self.path.push(b'/');
                    }
                    self.path.extend_from_slice(&name);
                    return Some(self.enter());
                }
                Err(e) => {
                    level.next = level.end;
                    return Some(Visit { below: self.path.clone(), dir: Err(e) });
                }
            }
        }
        None
    }

    /// Opens the directory at [`Walk::path`].
    fn enter(&mut self) -> Visit {
        let (end, above) = (self.names.len(), self.levels.last().and_then(|level| level.directory));
        let dir = self.open(above);
        let directory = dir.as_ref().ok().map(|(_, stat)| Directory::new(stat));
        self.levels.push(Level { path_len: self.path.len(), directory, first: end, next: end, end });
        Visit { below: self.path.clone(), dir }
    }

    /// # Errors
    /// Also if its parent is not `above`. After the listing, a private directory can get the path of the parent.
    fn open(&self, above: Option<Directory>) -> io::Result<(Arc<OwnedFd>, Stat)> {
        let dir = beneath::open(&self.root, &self.path, OFlags::RDONLY | OFlags::DIRECTORY, Links::Never)?;
        let stat = rustix::fs::fstat(&dir)?;
        match above.map(|above| (above, rustix::fs::statat(&dir, c"..", AtFlags::empty()))) {
            Some((above, Ok(found))) if !above.is(&found, || file_system_above(&dir)) => {
                Err(io::Error::other("another directory has the path of the one above it now"))
            }
            // Without the right to search it, its entries cannot be read either.
            Some((_, Err(e))) if e != Errno::ACCESS => Err(e.into()),
            _ => Ok((Arc::new(dir), stat)),
        }
    }
}

/// The file system of the parent. It differs from that of `dir` at a mount point.
fn file_system_above(dir: &OwnedFd) -> rustix::io::Result<StatFs> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::fstatfs(rustix::fs::openat(dir, c"..", flags, Mode::empty())?)
}

fn next_name(names: &Spool, at: u64) -> io::Result<Vec<u8>> {
    let mut name = [0; 256];
    let mut read = 0;
    let mut reader = names.reader(at);
    loop {
        match reader.read(&mut name[read..])? {
            0 => return Err(io::Error::other("the names of its directories are damaged")),
            more => read += more,
        }
        if let Some(len) = name[..read].iter().position(|byte| *byte == 0) {
            return Ok(name[..len].to_vec());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Dir, FileType};
    use std::fs;

    /// Paths of the directories of a tree, those of one parent by name.
    fn directories(root: &std::path::Path) -> Vec<String> {
        let root = Arc::new(OwnedFd::from(fs::File::open(root).unwrap()));
        let mut walk = Walk::new(root, Owner::default());
        let mut visited = Vec::new();
        while let Some(Visit { below, dir, .. }) = walk.visit() {
            visited.push(String::from_utf8(below.clone()).unwrap());
            let (dir, _) = dir.unwrap();
            let mut names: Vec<_> = Dir::read_from(&*dir).unwrap().map(|e| e.unwrap().file_name().to_owned()).collect();
            names.retain(|name| !matches!(name.to_bytes(), b"." | b".."));
            names.sort();
            for name in names {
                let stat = rustix::fs::statat(&*dir, &name, AtFlags::SYMLINK_NOFOLLOW).unwrap();
                if FileType::from_raw_mode(stat.st_mode).is_dir() {
                    walk.descend(&name).unwrap();
                }
            }
        }
        visited
    }

    #[test]
    fn directories_come_after_their_parents_in_order() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["b/x/1", "b/y", "a", "c"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        std::os::unix::fs::symlink("/", dir.path().join("b/root")).unwrap();
        assert_eq!(directories(dir.path()), ["", "a", "b", "b/x", "b/x/1", "b/y", "c"]);
    }

    #[test]
    fn a_directory_that_became_a_link_is_not_entered() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        let root = Arc::new(OwnedFd::from(fs::File::open(dir.path()).unwrap()));
        let mut walk = Walk::new(root, Owner::default());
        assert!(walk.visit().unwrap().dir.is_ok());
        walk.descend(c"d").unwrap();
        fs::remove_dir(dir.path().join("d")).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("d")).unwrap();
        assert!(walk.visit().unwrap().dir.is_err());
        assert!(walk.visit().is_none());
    }

    #[test]
    fn the_attributes_are_those_of_the_open_directory() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["open", "closed"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let mut walk = Walk::new(Arc::new(OwnedFd::from(fs::File::open(dir.path()).unwrap())), Owner::default());
        walk.visit().unwrap().dir.unwrap();
        walk.descend(c"open").unwrap();
        fs::remove_dir(dir.path().join("open")).unwrap();
        fs::rename(dir.path().join("closed"), dir.path().join("open")).unwrap();
        let (found, stat) = walk.visit().unwrap().dir.unwrap();
        assert_eq!(stat.st_ino, rustix::fs::fstat(&found).unwrap().st_ino);
    }

    #[test]
    fn a_directory_below_another_one_than_the_listed_one_is_not_entered() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["open/d", "closed/d", "other/d"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let mut walk = Walk::new(Arc::new(OwnedFd::from(fs::File::open(dir.path()).unwrap())), Owner::default());
        walk.visit().unwrap().dir.unwrap();
        walk.descend(c"open").unwrap();
        walk.descend(c"other").unwrap();
        walk.visit().unwrap().dir.unwrap();
        walk.descend(c"d").unwrap();
        fs::rename(dir.path().join("open"), dir.path().join("moved")).unwrap();
        fs::rename(dir.path().join("closed"), dir.path().join("open")).unwrap();
        let visit = walk.visit().unwrap();
        assert_eq!(visit.below, b"open/d");
        assert!(visit.dir.unwrap_err().to_string().contains("another directory"));
        walk.visit().unwrap().dir.unwrap();
        walk.descend(c"d").unwrap();
        walk.visit().unwrap().dir.unwrap();
        assert!(walk.visit().is_none());
    }

    #[test]
    fn many_directories_are_kept_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let long = "d".repeat(250);
        let name = |number: u32| format!("{number:05}{}", &long[5..]);
        for number in 0..6_000 {
            fs::create_dir(dir.path().join(name(number))).unwrap();
        }
        fs::create_dir(dir.path().join(name(3_000)).join("inner")).unwrap();
        let expected = std::iter::once(String::new())
            .chain((0..=3_000).map(name))
            .chain([format!("{}/inner", name(3_000))])
            .chain((3_001..6_000).map(name));
        assert!(directories(dir.path()).into_iter().eq(expected));
    }
}
