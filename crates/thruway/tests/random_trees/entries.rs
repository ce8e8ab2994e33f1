//! Trees as values.

use rustix::fs::FileType;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use thruway_fs::acl::{Acl, Who};

/// One entry of a tree.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) kind: FileType,
    /// Hash of a file's bytes, target of a link, number of a device.
    pub(crate) content: Vec<u8>,
    pub(crate) size: u64,
    /// The first 16 bytes of a file.
    pub(crate) start: Vec<u8>,
    pub(crate) kept: Kept,
    /// Device, number and time of birth. Hard links have the same.
    pub(crate) identity: Identity,
    pub(crate) changed: (i64, i64),
}

/// The attributes that `-p` keeps.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kept {
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) modified: (i64, i64),
    pub(crate) attributes: BTreeMap<OsString, Vec<u8>>,
}

pub(crate) type Identity = (u64, u64, SystemTime);

/// `None` if there is no entry.
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    let meta = fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.created().unwrap()))
}

/// Entries by path below the root. The path of the root is empty.
pub(crate) type Tree = BTreeMap<PathBuf, Entry>;

pub(crate) fn entry(path: &Path) -> Entry {
    let meta = fs::symlink_metadata(path).unwrap();
    let kind = meta.file_type();
    let mut start = Vec::new();
    let content = if kind.is_symlink() {
        fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec()
    } else if kind.is_file() {
        let bytes = fs::read(path).unwrap();
        start = bytes[..bytes.len().min(16)].to_vec();
        blake3::hash(&bytes).as_bytes().to_vec()
    } else if kind.is_char_device() || kind.is_block_device() {
        meta.rdev().to_le_bytes().to_vec()
    } else {
        Vec::new()
    };
    let mut names = vec![0; 4096];
    let used = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let value = |name: &[u8]| {
        let mut value = vec![0; 4096];
        let used = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        (OsStr::from_bytes(name).to_os_string(), value[..used].to_vec())
    };
    let attributes = names[..used].split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(value).collect();
    Entry {
        kind: FileType::from_raw_mode(meta.mode()),
        content,
        start,
        size: if kind.is_file() { meta.len() } else { 0 },
        kept: Kept {
            mode: meta.mode() & 0o7777,
            owner: (meta.uid(), meta.gid()),
            modified: (meta.mtime(), meta.mtime_nsec()),
            attributes,
        },
        identity: (meta.dev(), meta.ino(), meta.created().unwrap()),
        changed: (meta.ctime(), meta.ctime_nsec()),
    }
}

pub(crate) fn tree(root: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(path) = todo.pop() {
        if fs::symlink_metadata(root.join(&path)).is_err() {
            assert_eq!(path, Path::new(""), "only the root can be absent");
            continue;
        }
        let found = entry(&root.join(&path));
        if found.kind == FileType::Directory {
            todo.extend(fs::read_dir(root.join(&path)).unwrap().map(|entry| path.join(entry.unwrap().file_name())));
        }
        tree.insert(path, found);
    }
    tree
}

/// The sets of hard links.
pub(crate) fn links(tree: &Tree) -> BTreeSet<BTreeSet<PathBuf>> {
    let mut names: BTreeMap<Identity, BTreeSet<PathBuf>> = BTreeMap::new();
    for (path, entry) in tree.iter().filter(|(_, entry)| entry.kind != FileType::Directory) {
        names.entry(entry.identity).or_default().insert(path.clone());
    }
    names.into_values().collect()
}

/// The rights of all but the owner.
pub(crate) fn rights(entry: &Entry) -> BTreeMap<Who, u8> {
    let list = match entry.kept.attributes.get(OsStr::new("system.posix_acl_access")) {
        Some(value) => Acl::decode(value).unwrap(),
        None => Acl::from_mode(entry.kept.mode),
    };
    let mask = list.entries().iter().find(|entry| entry.who == Who::Mask).map_or(7, |mask| mask.permissions);
    let others = list.entries().iter().filter(|entry| !matches!(entry.who, Who::Owner | Who::Mask));
    others
        .map(|entry| (entry.who, if entry.who == Who::Others { entry.permissions } else { entry.permissions & mask }))
        .collect()
}

/// True if an entry gives other users no more rights than `limit`.
pub(crate) fn is_within(entry: &Entry, limit: &Entry) -> bool {
    let allowed = if entry.kept.owner == limit.kept.owner { rights(limit) } else { BTreeMap::new() };
    // A new directory inherits the set-group-id bit.
    let is_dir = entry.kind == FileType::Directory;
    let set_id = if is_dir {
        0o2000
    } else if allowed.is_empty() {
        0
    } else {
        limit.kept.mode & 0o6000
    };
    let is_allowed = |(who, rights): (Who, u8)| rights & !allowed.get(&who).copied().unwrap_or(0) == 0;
    entry.kept.mode & 0o6000 & !set_id == 0 && rights(entry).into_iter().all(is_allowed)
}

impl Entry {
    /// True if its own permissions give a user without groups these rights.
    pub(crate) fn gives(&self, user: u32, wanted: u8) -> bool {
        let gives = |who| rights(self).get(&who).is_some_and(|rights| rights & wanted == wanted);
        self.kept.owner.0 == user || gives(Who::User(user)) || gives(Who::Others)
    }
}
