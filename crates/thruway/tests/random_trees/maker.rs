//! Random trees.

use crate::support::NOBODY;
use fastrand::Rng;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags, makedev};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use thruway_fs::acl::{Acl, Entry as Right, Who};

/// Names of entries: one is not UTF-8, two look like patterns.
const NAMES: [&[u8]; 8] = [b"a", b"b", b"c", b"d", b"e f", b"\xff", b"[b]", b"*"];

/// The modes of files and directories in sources of users without root: they can read all of them.
const FILE_MODES: [u32; 7] = [0o600, 0o644, 0o755, 0o444, 0o4755, 0o2750, 0o400];
const DIRECTORY_MODES: [u32; 5] = [0o700, 0o755, 0o500, 0o2755, 0o1777];

/// The capability to set user ids, effective, in the kernel's format of revision 2 (include/uapi/linux/capability.h).
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 1 << 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Makes random trees.
pub(crate) struct Maker<'a> {
    pub(crate) random: &'a mut Rng,
    /// A directory that no copy may change.
    pub(crate) outside: &'a Path,
    /// Make entries of several owners. The copy then runs as root.
    pub(crate) owners: bool,
    /// Make pipes and devices.
    pub(crate) specials: bool,
    pub(crate) destination: bool,
    /// Let each file begin with 16 bytes of its own.
    pub(crate) marked: bool,
    pub(crate) files: Vec<PathBuf>,
}

impl Maker<'_> {
    pub(crate) fn one_in(&mut self, n: u32) -> bool {
        self.random.u32(..n) == 0
    }

    pub(crate) fn fill(&mut self, dir: &Path, depth: u32) {
        fs::create_dir_all(dir).unwrap();
        for name in NAMES {
            if self.random.u32(..10) < 5 {
                continue;
            }
            let path = dir.join(OsStr::from_bytes(name));
            match self.random.u32(..100) {
                0..25 if depth < 3 => self.fill(&path, depth + 1),
                25..32 => {
                    let outside = [self.outside.join("file"), self.outside.to_path_buf()];
                    let targets = ["a".into(), "b".into(), "../a".into(), outside[0].clone(), outside[1].clone()];
                    symlink(self.random.choice(&targets).unwrap(), &path).unwrap();
                }
                32..36 if self.specials => {
                    rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from(0o644), 0).unwrap()
                }
                36..38 if self.owners && self.specials => {
                    let device = makedev(1, self.random.choice([3, 5]).unwrap());
                    rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::from(0o600), device).unwrap();
                }
                38..60 if !self.files.is_empty() => {
                    let first = self.random.choice(&self.files).unwrap();
                    fs::hard_link(first, &path).unwrap();
                    continue;
                }
                60..64 if self.destination && self.owners && !self.marked => {
                    let name = self.random.choice(["shared0", "shared1", "shared2"]).unwrap();
                    fs::hard_link(self.outside.join(name), &path).unwrap();
                    continue;
                }
                _ => self.write(&path),
            }
            let meta = fs::symlink_metadata(&path).unwrap();
            if !meta.is_dir() {
                self.files.push(path.clone());
            }
            self.dress(&path, &meta);
        }
    }

    fn write(&mut self, path: &Path) {
        let size = *self.random.choice(&[0, 3, 3, 3, 5, 5000, 300_000, 2_200_000]).unwrap();
        let mut content = vec![*self.random.choice(b"xyz").unwrap(); size];
        if size > 100_000 && self.one_in(2) {
            content[size / 4..size / 2].fill(0);
        }
        if self.marked {
            let mark: Vec<u8> = std::iter::repeat_with(|| self.random.u8(..)).take(16).collect();
            content.splice(..0, mark);
        }
        fs::write(path, content).unwrap();
    }

    /// Gives an entry its owner, mode, attributes and time.
    fn dress(&mut self, path: &Path, meta: &fs::Metadata) {
        let is_dir = meta.is_dir();
        if self.owners && self.one_in(5) {
            let (owner, group) = (*self.random.choice(&[0, 1234]).unwrap(), *self.random.choice(&[0, 5678]).unwrap());
            lchown(path, Some(owner), Some(group)).unwrap();
        } else if !self.owners {
            lchown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        if !meta.is_symlink() && self.one_in(2) {
            let mut modes = if is_dir { DIRECTORY_MODES.to_vec() } else { FILE_MODES.to_vec() };
            // The user can read all of the source, but not all that it replaces.
            if self.owners || self.destination {
                modes.extend([0, 0o200, 0o300]);
            }
            let mode = *self.random.choice(&modes).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        if is_dir || meta.is_file() {
            let set = |name: &str, value: &[u8]| {
                rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
            };
            if self.one_in(5) {
                set("user.k", self.random.choice([&b"1"[..], b"2"]).unwrap());
            }
            if self.one_in(10) {
                set("system.posix_acl_access", &self.list(is_dir).encode());
            }
            if self.marked && self.owners && !is_dir && self.one_in(8) {
                set("security.capability", &CAPABILITY);
            }
            if is_dir && self.one_in(10) {
                set("system.posix_acl_default", &self.list(true).encode());
            }
        }
        self.date(path);
    }

    fn list(&mut self, is_dir: bool) -> Acl {
        let right = |who, permissions| Right { who, permissions };
        let user = if is_dir { 7 } else { 6 };
        let usual = [(Who::Owner, user), (Who::OwningGroup, 5), (Who::Mask, 7), (Who::Others, 0)];
        let mut list: Vec<Right> = usual.into_iter().map(|(who, rights)| right(who, rights)).collect();
        match self.random.u32(..3) {
            0 => list.push(right(Who::User(1234), 7)),
            1 => list.extend([right(Who::User(7), 4), right(Who::Group(8), 1)]),
            _ => list.push(right(Who::Group(5678), 4)),
        }
        Acl::new(list).unwrap()
    }

    /// Sets one of few times: an entry of the destination can be older, newer, or of the same time.
    pub(crate) fn date(&mut self, path: &Path) {
        let seconds = 1_000_000_000 + *self.random.choice(&[0, 0, 1, 2]).unwrap();
        let nanoseconds = *self.random.choice(&[0, 0, 0, 1, 999_999_999]).unwrap();
        let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
}
