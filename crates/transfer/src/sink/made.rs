//! Entries that a job has made, and how it recognises them: somebody else may have made another one under the same path since.

use super::files::DISKS;
use super::journal::Key;
use rustix::fs::{FsWord, Mode, OFlags, Statx};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use thruway_fs::Identity;
use thruway_fs::beneath::{self, Links};
use thruway_fs::identity::nanoseconds;

/// Longest time from the record of an entry to its birth, nanoseconds.
const BIRTH_DELAY_MAX: i64 = 2_000_000_000;

/// A directory of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Made {
    /// About to be made at this time, in nanoseconds since 1970. The attempt ended before it recorded the identity.
    Begun(i64),
    /// Made, with this fingerprint of its identity.
    Done(u64),
}

impl Made {
    /// True for the entry that was made. Without its identity, true for an entry of this user with a birth within
    /// [`BIRTH_DELAY_MAX`] of the record, if the source has the rights to read and to replace `any` entry.
    pub(crate) fn is(&self, identity: Identity, stat: &Statx, any: bool) -> bool {
        match *self {
            Made::Done(fingerprint) => identity.fingerprint() == fingerprint,
            Made::Begun(_) if !any => false,
            Made::Begun(at) => {
                let is_own = stat.stx_uid == rustix::process::geteuid().as_raw();
                is_own && identity.born.abs_diff(at) <= BIRTH_DELAY_MAX.unsigned_abs()
            }
        }
    }

    /// The time for [`Made::Begun`], from the clock that file systems use.
    pub(crate) fn now() -> i64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        now.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec)
    }
}

/// A time before a directory was made.
#[derive(Debug, Clone, Copy)]
pub struct MadeAfter(pub(super) i64);

/// Makes a destination with mode 0700 in the directory `above`. `None` if there is an entry of this name.
///
/// # Errors
/// As `mkdirat(2)`, or if somebody has put something else in its place.
pub fn make_destination(above: impl AsFd, name: &[u8]) -> io::Result<Option<(OwnedFd, MadeAfter)>> {
    // Directly before the call, and found again in the same directory: a lookup of its path can take as long as a peer likes, and
    // lead elsewhere.
    let since = Made::now();
    match rustix::fs::mkdirat(&above, name, Mode::RWXU) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    // Its name is made durable with its contents.
    let dir = beneath::open(above, name, OFlags::RDONLY | OFlags::DIRECTORY, Links::Never)?;
    Ok(Some((dir, MadeAfter(since))))
}

/// Entries that earlier sessions of a job made.
#[derive(Debug, Default)]
pub(crate) struct MadeBefore {
    /// Directories that may lack their attributes.
    pub(crate) directories: HashMap<Key, Made>,
    /// Fingerprints of the identities of links and special files, if the source has no right to replace.
    pub(crate) entries: HashMap<Key, u64>,
}

/// True for a file system of this host: its times come from the clock of [`Made::now`], and its entries keep their identities.
pub(crate) fn is_local(dir: impl AsFd) -> bool {
    const IN_MEMORY_OR_STACKED: [FsWord; 2] = [libc::TMPFS_MAGIC, libc::OVERLAYFS_SUPER_MAGIC];
    let is_one = |kind| IN_MEMORY_OR_STACKED.contains(&kind) || DISKS.contains(&kind);
    rustix::fs::fstatfs(dir).is_ok_and(|found| is_one(found.f_type))
}

/// File systems whose times of birth come from another host or from a program (include/uapi/linux/magic.h, and those of the kernel's
/// clients of SMB and Ceph): NFS, SMB, CIFS, SMB 2, 9P, Ceph, FUSE, AFS, Coda.
const FOREIGN_CLOCKS: [FsWord; 9] =
    [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x00c3_6400, 0x6573_5546, 0x5346_414f, 0x7375_7245];

/// True if the entry may be one that was made in this directory since then, as far as times of birth can tell. Not all file systems keep
/// the identity of an entry.
pub(crate) fn may_be_born(dir: impl AsFd, identity: Identity, since: i64) -> bool {
    let has_foreign_clock = || rustix::fs::fstatfs(dir).is_ok_and(|found| FOREIGN_CLOCKS.contains(&found.f_type));
    identity.born == 0 || identity.born >= since - BIRTH_DELAY_MAX || has_foreign_clock()
}

/// True for an entry of this user that was born at this time of [`Made::now`] or later. A name can come to mean an older entry as soon
/// as another one was made under it.
pub(crate) fn is_new(identity: Identity, stat: &Statx, since: i64) -> bool {
    // Without a time of birth. Users who make entries in a directory change this time, too.
    let born = if identity.born == 0 { nanoseconds(stat.stx_mtime) } else { identity.born };
    stat.stx_uid == rustix::process::geteuid().as_raw() && born >= since
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_recorded_identity_is_recognised_by_its_birth() {
        let dir = tempfile::tempdir().unwrap();
        let before = Made::Begun(Made::now());
        std::fs::create_dir(dir.path().join("d")).unwrap();
        let opened = std::fs::File::open(dir.path().join("d")).unwrap();
        let (identity, stat) = Identity::of(&opened, c"").unwrap();
        assert!(matches!(before, Made::Begun(at) if at <= identity.born), "one clock");
        let before = Made::Begun(identity.born);
        let at = |offset: i64| Made::Begun(identity.born + offset).is(identity, &stat, true);
        assert!(at(BIRTH_DELAY_MAX) && !at(BIRTH_DELAY_MAX + 1) && !at(-BIRTH_DELAY_MAX - 1));
        let mut foreign = stat;
        foreign.stx_uid += 1;
        assert!(!before.is(identity, &foreign, true));
        assert!(before.is(identity, &stat, true) && !before.is(identity, &stat, false), "somebody else's, perhaps");
    }

    #[test]
    fn a_destination_is_found_in_the_directory_in_which_it_was_made() {
        use std::os::unix::fs::PermissionsExt;
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir(top.path().join("above")).unwrap();
        let above = std::fs::File::open(top.path().join("above")).unwrap();
        // The path leads elsewhere from now on.
        std::fs::rename(top.path().join("above"), top.path().join("moved")).unwrap();
        std::fs::create_dir_all(top.path().join("above/new")).unwrap();
        let (made, MadeAfter(since)) = make_destination(&above, b"new").unwrap().unwrap();
        let (identity, stat) = Identity::of(&made, c"").unwrap();
        assert!(is_new(identity, &stat, since));
        let moved = std::fs::File::open(top.path().join("moved/new")).unwrap();
        assert_eq!(Identity::of(&moved, c"").unwrap().0, identity);
        assert_eq!(moved.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        for existing in ["new", "link"] {
            let _ = std::os::unix::fs::symlink("new", top.path().join("moved/link"));
            assert!(make_destination(&above, existing.as_bytes()).unwrap().is_none());
        }
    }

    #[test]
    fn an_entry_from_before_is_not_new() {
        let dir = tempfile::tempdir().unwrap();
        let since = Made::now();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        let opened = std::fs::File::open(dir.path().join("d")).unwrap();
        let (identity, stat) = Identity::of(&opened, c"").unwrap();
        assert!(is_new(identity, &stat, since) && !is_new(identity, &stat, identity.born + 1));
        let unknown = Identity { born: 0, ..identity };
        let modified = nanoseconds(stat.stx_mtime);
        assert!(is_new(unknown, &stat, modified) && !is_new(unknown, &stat, modified + 1));
        let mut foreign = stat;
        foreign.stx_uid += 1;
        assert!(!is_new(identity, &foreign, since));
    }
}
