//! Walks a tree, directory by directory.
//!
//! One directory is open at a time, whatever the depth; each is opened by its path below the root, through no symbolic link. What is
//! kept of the tree are the paths of directories still to come.

use crate::beneath::{self, Links};
use rustix::fs::{OFlags, Stat};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A walk of a tree. Parents come before what they hold; the directories of one parent come in the order in which they
/// were [added](Walk::descend), each with all beneath it.
pub struct Walk {
    root: Arc<OwnedFd>,
    /// What is still to be visited, the next one last.
    todo: Vec<(Vec<u8>, Stat)>,
    /// Those from here on were added by the directory visited now.
    first: usize,
}

/// A directory of the tree.
pub struct Visit {
    /// Its path below the root; empty for the root.
    pub below: Vec<u8>,
    /// What it was when it was listed.
    pub stat: Stat,
    /// The directory, open to be listed.
    pub dir: rustix::io::Result<Arc<OwnedFd>>,
}

impl Walk {
    /// Begins with the root itself.
    pub fn new(root: Arc<OwnedFd>, stat: Stat) -> Walk {
        Walk { root, todo: vec![(Vec::new(), stat)], first: 0 }
    }

    /// The root.
    pub fn root(&self) -> &Arc<OwnedFd> {
        &self.root
    }

    /// Adds a directory that the one visited last holds.
    pub fn descend(&mut self, below: Vec<u8>, stat: Stat) {
        self.todo.push((below, stat));
    }

    /// Opens the next directory.
    pub fn visit(&mut self) -> Option<Visit> {
        self.todo[self.first..].reverse();
        let (below, stat) = self.todo.pop()?;
        self.first = self.todo.len();
        let dir = beneath::open(&self.root, &below, OFlags::RDONLY | OFlags::DIRECTORY, Links::Never).map(Arc::new);
        Some(Visit { below, stat, dir })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beneath::join;
    use rustix::fs::{AtFlags, Dir, FileType};
    use std::fs;

    /// Paths of the directories of a tree, those of one parent by name.
    fn directories(root: &std::path::Path) -> Vec<String> {
        let root = Arc::new(OwnedFd::from(fs::File::open(root).unwrap()));
        let stat = rustix::fs::fstat(&root).unwrap();
        let mut walk = Walk::new(root, stat);
        let mut visited = Vec::new();
        while let Some(Visit { below, dir, .. }) = walk.visit() {
            visited.push(String::from_utf8(below.clone()).unwrap());
            let dir = dir.unwrap();
            let mut names: Vec<_> = Dir::read_from(&*dir).unwrap().map(|e| e.unwrap().file_name().to_owned()).collect();
            names.retain(|name| !matches!(name.to_bytes(), b"." | b".."));
            names.sort();
            for name in names {
                let stat = rustix::fs::statat(&*dir, &name, AtFlags::SYMLINK_NOFOLLOW).unwrap();
                if FileType::from_raw_mode(stat.st_mode).is_dir() {
                    walk.descend(join(&below, name.to_bytes()), stat);
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
        let stat = rustix::fs::fstat(&root).unwrap();
        let mut walk = Walk::new(root, stat);
        assert!(walk.visit().unwrap().dir.is_ok());
        walk.descend(b"d".to_vec(), stat);
        fs::remove_dir(dir.path().join("d")).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("d")).unwrap();
        assert!(walk.visit().unwrap().dir.is_err());
        assert!(walk.visit().is_none());
    }
}
