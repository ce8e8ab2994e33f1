//! Tests of the contract of [`FileSystem`], for every implementation (feature `conformance`).
//!
//! Each case has a name. An implementation lists the cases that it fails; a listed case that passes is an error, too.

use crate::*;
use futures_util::FutureExt;
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc;
use thruway_engine::{Reactors, Segments};

const OWNER: u32 = 1000;
const OTHER: u32 = 2000;

fn who(uid: u32) -> Credentials {
    Credentials { uid, gid: uid, groups: Vec::new() }
}

fn mode(mode: u32) -> SetAttributes {
    SetAttributes { mode: Some(mode), ..SetAttributes::default() }
}

async fn segment(bytes: &[u8]) -> Segment {
    let segments = Segments::new(1, bytes.len().max(1).next_multiple_of(4096)).unwrap();
    let mut segment = segments.reserve(1).await.segment(bytes.len());
    segment.as_mut_slice().copy_from_slice(bytes);
    segment
}

struct Subject<'a>(&'a dyn FileSystem);

impl Subject<'_> {
    async fn make(&self, user: u32, dir: &FileId, name: &str, what: Make, set: SetAttributes) -> Result<FileId> {
        self.0.make(&who(user), dir, name.as_bytes(), what, set).await.map(|(file, _)| file)
    }

    async fn look_up(&self, user: u32, dir: &FileId, name: &[u8]) -> Result<FileId> {
        self.0.look_up(&who(user), dir, name).await.map(|(file, _)| file)
    }

    async fn write(&self, user: u32, is_open: bool, file: &FileId, at: u64, bytes: &[u8]) -> Result<Attributes> {
        let who = who(user);
        self.0.write(As { who: &who, is_open }, file, at, segment(bytes).await, Stability::File).await
    }

    async fn read(&self, user: u32, is_open: bool, file: &FileId, at: u64, len: usize) -> Result<(Vec<u8>, bool)> {
        let who = who(user);
        let read = self.0.read(As { who: &who, is_open }, file, at, segment(&vec![9; len]).await).await?;
        assert!(is_open || read.attributes.is_some(), "version 3 wants them");
        Ok((read.segment.as_slice().to_vec(), read.is_end))
    }

    async fn remove(&self, user: u32, dir: &FileId, name: &str, is_directory: bool) -> Result<()> {
        self.0.remove(&who(user), dir, name.as_bytes(), is_directory).await
    }

    async fn names(&self, dir: &FileId, bytes: usize, mut between: impl AsyncFnMut()) -> Vec<Vec<u8>> {
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let listing = self.0.list(&who(OWNER), dir, cookie, Room { bytes, entry: 100 }, true).await.unwrap();
            for entry in &listing.entries {
                let lowest = if [&b"."[..], b".."].contains(&&entry.name[..]) { 1 } else { 3 };
                assert!((lowest..=i64::MAX as u64).contains(&entry.cookie), "{}", entry.cookie);
                names.push(entry.name.clone());
            }
            if listing.is_end {
                return names;
            }
            cookie = listing.entries.last().expect("at least one").cookie;
            between().await;
        }
    }

    /// A directory that is the owner's.
    async fn directory(&self, name: &str) -> FileId {
        let root = self.0.root();
        let dir = self.make(0, &root, name, Make::Directory, mode(0o755)).await.unwrap();
        let set = SetAttributes { uid: Some(OWNER), gid: Some(OWNER), ..SetAttributes::default() };
        self.0.set_attributes(As { who: &who(0), is_open: false }, &dir, set, None).await.unwrap();
        dir
    }

    async fn names_are_checked(&self, dir: &FileId) {
        for name in ["", "a/b", "a\0b", "/"] {
            assert_eq!(self.look_up(OWNER, dir, name.as_bytes()).await, Err(Errno::INVAL), "{name:?}");
            let made = self.make(OWNER, dir, name, Make::NewFile, mode(0o644)).await;
            assert_eq!(made, Err(Errno::INVAL), "{name:?}");
            assert_eq!(self.remove(OWNER, dir, name, false).await, Err(Errno::INVAL), "{name:?}");
        }
        let long = "x".repeat(256);
        assert_eq!(self.look_up(OWNER, dir, long.as_bytes()).await, Err(Errno::NAMETOOLONG));
        assert_eq!(self.make(OWNER, dir, &long, Make::Directory, mode(0o755)).await, Err(Errno::NAMETOOLONG));
        for dots in [".", ".."] {
            let made = self.make(OWNER, dir, dots, Make::NewFile, mode(0o644)).await;
            assert!(matches!(made, Err(Errno::EXIST | Errno::INVAL | Errno::ISDIR)), "{made:?}");
            assert!(self.remove(OWNER, dir, dots, true).await.is_err());
        }
        let root = self.0.root();
        assert_eq!(self.look_up(OWNER, dir, b".").await.as_ref(), Ok(dir));
        assert_eq!(self.look_up(OWNER, dir, b"..").await.as_ref(), Ok(&root));
        assert_eq!(self.look_up(OWNER, &root, b"..").await.as_ref(), Ok(&root), "there is nothing above it");
    }

    async fn kinds_have_their_errors(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        let link = self.make(OWNER, dir, "link", Make::SymbolicLink(b"to".to_vec()), mode(0o777)).await.unwrap();
        let fifo = self.make(OWNER, dir, "fifo", Make::Special(Kind::Fifo, 0, 0), mode(0o644)).await.unwrap();
        let reads = Rights { read: true, ..Rights::default() };
        let open = async |file: &FileId| self.0.open(&who(OWNER), file, reads).await.map(drop);
        assert_eq!(open(&file).await, Ok(()));
        assert_eq!(open(dir).await, Err(Errno::ISDIR));
        assert_eq!(open(&link).await, Err(Errno::LOOP));
        assert_eq!(open(&fifo).await, Err(Errno::NXIO));
        assert_eq!(self.read(OWNER, false, dir, 0, 1).await, Err(Errno::ISDIR));
        assert_eq!(self.read(OWNER, false, &fifo, 0, 1).await, Err(Errno::INVAL));
        assert_eq!(self.0.read_link(&link).await, Ok(b"to".to_vec()));
        assert_eq!(self.0.read_link(&file).await, Err(Errno::INVAL));
        assert_eq!(self.0.read_link(dir).await, Err(Errno::INVAL));
        assert_eq!(self.look_up(OWNER, &file, b"x").await, Err(Errno::NOTDIR));
        assert_eq!(self.make(OWNER, &file, "x", Make::Directory, mode(0o755)).await, Err(Errno::NOTDIR));
        assert_eq!(self.remove(OWNER, dir, "file", true).await, Err(Errno::NOTDIR));
        let root = self.0.root();
        assert_eq!(self.remove(0, &root, "kinds_have_their_errors", false).await, Err(Errno::ISDIR));
        assert_eq!(self.remove(0, &root, "kinds_have_their_errors", true).await, Err(Errno::NOTEMPTY));
        assert_eq!(self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await, Err(Errno::EXIST));
        assert_eq!(self.make(OWNER, dir, "file", Make::File, mode(0o644)).await.as_ref(), Ok(&file));
        for name in ["file", "link", "fifo"] {
            self.remove(OWNER, dir, name, false).await.unwrap();
        }
    }

    async fn rights_are_checked(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o000)).await.unwrap();
        assert!(self.write(OWNER, false, &file, 0, b"data").await.is_ok(), "its owner, by version 3");
        assert_eq!(self.read(OWNER, false, &file, 0, 9).await, Ok((b"data".to_vec(), true)));
        assert_eq!(self.read(OTHER, false, &file, 0, 9).await, Err(Errno::ACCESS));
        assert_eq!(self.write(OTHER, false, &file, 0, b"x").await.map(drop), Err(Errno::ACCESS));
        let reads = Rights { read: true, ..Rights::default() };
        assert_eq!(self.0.open(&who(OTHER), &file, reads).await.map(drop), Err(Errno::ACCESS));
        let set =
            async |user, set| self.0.set_attributes(As { who: &who(user), is_open: false }, &file, set, None).await;
        assert_eq!(set(OTHER, mode(0o777)).await.map(drop), Err(Errno::PERM));
        assert_eq!(set(OWNER, SetAttributes { uid: Some(OTHER), ..mode(0o1) }).await.map(drop), Err(Errno::PERM));
        assert_eq!(set(0, SetAttributes { uid: Some(u32::MAX), ..mode(0o1) }).await.map(drop), Err(Errno::INVAL));
        set(OWNER, mode(0o001)).await.unwrap();
        assert!(self.read(OTHER, false, &file, 0, 9).await.is_ok(), "who may execute may read");
        assert_eq!(self.remove(OTHER, dir, "file", false).await, Err(Errno::ACCESS));
        assert_eq!(self.make(OTHER, dir, "more", Make::NewFile, mode(0o644)).await, Err(Errno::ACCESS));
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    /// Permissions are checked when a file is opened, not later.
    async fn open_files_keep_their_rights(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        self.write(OWNER, false, &file, 0, b"data").await.unwrap();
        let reads = Rights { read: true, ..Rights::default() };
        let (guard, _) = self.0.open(&who(OTHER), &file, reads).await.unwrap();
        self.0.set_attributes(As { who: &who(OWNER), is_open: false }, &file, mode(0), None).await.unwrap();
        assert_eq!(self.read(OTHER, false, &file, 0, 9).await, Err(Errno::ACCESS));
        assert_eq!(self.read(OTHER, true, &file, 0, 9).await, Ok((b"data".to_vec(), true)), "it is open");
        drop(guard);
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    /// The creator of a file may read and write it, whatever its mode.
    async fn new_files_are_open_for_their_makers(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o444)).await.unwrap();
        let (guard, _) = self.0.open(&who(OWNER), &file, Rights::default()).await.unwrap();
        self.write(OWNER, true, &file, 0, b"data").await.unwrap();
        assert_eq!(self.read(OWNER, true, &file, 0, 9).await, Ok((b"data".to_vec(), true)));
        drop(guard);
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    async fn repeated_creations_find_their_files(&self, dir: &FileId) {
        let make = async |number| self.make(OWNER, dir, "file", Make::Exclusive([number; 8]), mode(0o640)).await;
        let file = make(1).await.unwrap();
        assert_eq!(make(1).await.as_ref(), Ok(&file));
        assert_eq!(make(2).await, Err(Errno::EXIST));
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    async fn guarded_changes_come_once(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        let before = self.0.attributes(&file).await.unwrap().changed;
        let owner = who(OWNER);
        let set = async |permissions, guard| {
            let user = As { who: &owner, is_open: false };
            self.0.set_attributes(user, &file, mode(permissions), Some(guard)).await.map(|a| (a.mode, a.changed))
        };
        let (permissions, after) = set(0o600, before).await.unwrap();
        assert_eq!(permissions, 0o600);
        // Where the clock of the files is coarse, both times may be the same.
        if after != before {
            assert_eq!(set(0o660, before).await, Err(Errno::AGAIN));
        }
        assert_eq!(set(0o640, after).await.map(|(permissions, _)| permissions), Ok(0o640));
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    async fn names_are_moved_and_added(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "one", Make::NewFile, mode(0o644)).await.unwrap();
        let other = self.make(OWNER, dir, "other", Make::NewFile, mode(0o644)).await.unwrap();
        self.0.link(&who(OWNER), &file, dir, b"two").await.unwrap();
        assert_eq!(self.0.attributes(&file).await.unwrap().links, 2);
        assert_eq!(self.look_up(OWNER, dir, b"two").await.as_ref(), Ok(&file));
        assert_eq!(self.0.link(&who(OWNER), &file, dir, b"other").await, Err(Errno::EXIST));
        self.0.rename(&who(OWNER), (dir, b"one"), (dir, b"other")).await.unwrap();
        assert_eq!(self.look_up(OWNER, dir, b"other").await.as_ref(), Ok(&file));
        assert_eq!(self.look_up(OWNER, dir, b"one").await, Err(Errno::NOENT));
        assert_eq!(self.0.attributes(&other).await.map(drop), Err(Errno::STALE), "it was replaced");
        let missing = self.0.rename(&who(OWNER), (dir, b"one"), (dir, b"three")).await;
        assert_eq!(missing, Err(Errno::NOENT));
        let below = self.make(OWNER, dir, "below", Make::Directory, mode(0o755)).await.unwrap();
        assert_eq!(self.0.rename(&who(OWNER), (dir, b"below"), (&below, b"x")).await, Err(Errno::INVAL));
        self.0.rename(&who(OWNER), (dir, b"two"), (&below, b"moved")).await.unwrap();
        assert_eq!(self.look_up(OWNER, &below, b"moved").await.as_ref(), Ok(&file));
        self.remove(OWNER, &below, "moved", false).await.unwrap();
        self.remove(OWNER, dir, "below", true).await.unwrap();
        self.remove(OWNER, dir, "other", false).await.unwrap();
    }

    async fn holes_are_found_and_made(&self, dir: &FileId) {
        const LEN: usize = 256 << 10;
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        let owner = who(OWNER);
        let user = As { who: &owner, is_open: true };
        let writes = Rights { read: true, write: true, ..Rights::default() };
        let (guard, _) = self.0.open(&owner, &file, writes).await.unwrap();
        self.write(OWNER, true, &file, 0, &[7; LEN]).await.unwrap();
        assert_eq!(self.0.seek(user, &file, 0, Seek::Hole).await, Ok(LEN as u64), "the end is a hole");
        assert_eq!(self.0.seek(user, &file, 1, Seek::Data).await, Ok(1));
        self.0.allocate(user, &file, 0, LEN as u64 / 2, Allocate::Punch).await.unwrap();
        assert_eq!(self.read(OWNER, true, &file, 0, 9).await, Ok((vec![0; 9], false)));
        assert_eq!(self.0.seek(user, &file, 0, Seek::Data).await, Ok(LEN as u64 / 2));
        assert_eq!(self.0.seek(user, &file, 0, Seek::Hole).await, Ok(0));
        self.0.allocate(user, &file, 0, 2 * LEN as u64, Allocate::Reserve).await.unwrap();
        assert_eq!(self.0.attributes(&file).await.unwrap().size, 2 * LEN as u64);
        drop(guard);
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    async fn extended_attributes_are_kept(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        let owner = who(OWNER);
        let set = async |value: Option<(&[u8], SetXattr)>| self.0.set_xattr(&owner, &file, b"name", value).await;
        assert_eq!(self.0.xattr(&owner, &file, b"name").await, Err(Errno::NODATA));
        assert_eq!(set(Some((b"1", SetXattr::Replace))).await, Err(Errno::NODATA));
        assert_eq!(set(Some((b"1", SetXattr::Create))).await, Ok(()));
        assert_eq!(set(Some((b"2", SetXattr::Create))).await, Err(Errno::EXIST));
        assert_eq!(set(Some((b"3", SetXattr::Either))).await, Ok(()));
        assert_eq!(self.0.xattr(&owner, &file, b"name").await, Ok(b"3".to_vec()));
        assert_eq!(self.0.xattrs(&owner, &file).await, Ok(vec![b"name".to_vec()]));
        assert_eq!(set(None).await, Ok(()));
        assert_eq!(self.0.xattrs(&owner, &file).await, Ok(vec![]));
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    async fn much_data_comes_back(&self, dir: &FileId) {
        const LEN: usize = 3 << 20;
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        let content: Vec<u8> = (0..LEN).map(|n| (n / 7 % 251) as u8).collect();
        let owner = who(OWNER);
        for (n, part) in content.chunks(1 << 20).enumerate() {
            let user = As { who: &owner, is_open: false };
            let at = (n << 20) as u64;
            self.0.write(user, &file, at, segment(part).await, Stability::Unstable).await.unwrap();
        }
        let before = self.0.write_verifier();
        assert_eq!(self.0.flush(&file).await.unwrap().size, LEN as u64);
        assert_eq!(self.0.write_verifier(), before, "nothing was lost");
        for (at, len) in [(0, 1 << 20), (12_345, 1 << 20), (LEN - 5, 4096)] {
            let end = (at + len).min(LEN);
            let found = self.read(OWNER, false, &file, at as u64, len).await.unwrap();
            assert!(found == (content[at..end].to_vec(), at + len >= LEN), "{len} from {at} on");
        }
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    async fn changes_show(&self, dir: &FileId) {
        let change = async |file: &FileId| self.0.attributes(file).await.unwrap().change;
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        let mut seen = BTreeSet::from([change(&file).await]);
        let of_dir = change(dir).await;
        for n in 0..20 {
            self.write(OWNER, false, &file, n, b"x").await.unwrap();
            assert!(seen.insert(change(&file).await), "write {n}");
            let set = mode(0o600 + n as u32 % 8);
            self.0.set_attributes(As { who: &who(OWNER), is_open: false }, &file, set, None).await.unwrap();
            assert!(seen.insert(change(&file).await), "mode {n}");
        }
        self.0.rename(&who(OWNER), (dir, b"file"), (dir, b"other")).await.unwrap();
        assert_ne!(change(dir).await, of_dir);
        assert_eq!(self.look_up(OWNER, dir, b"other").await.as_ref(), Ok(&file), "it is the same");
        self.remove(OWNER, dir, "other", false).await.unwrap();
    }

    async fn ends_are_told(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        self.write(OWNER, false, &file, 0, &[7; 5000]).await.unwrap();
        for is_open in [false, true] {
            for (at, len, read, is_end) in [
                (0, 4999, 4999, false),
                (0, 5000, 5000, true),
                (0, 9000, 5000, true),
                (4999, 1, 1, true),
                (5000, 9, 0, true),
            ] {
                let found = self.read(OWNER, is_open, &file, at, len).await.unwrap();
                assert_eq!(found, (vec![7; read], is_end), "{len} bytes from {at} on");
            }
            assert_eq!(self.read(OWNER, is_open, &file, u64::MAX, 9).await, Ok((vec![], true)));
        }
        self.remove(OWNER, dir, "file", false).await.unwrap();
    }

    async fn files_without_names_end_when_they_are_closed(&self, dir: &FileId) {
        let file = self.make(OWNER, dir, "file", Make::NewFile, mode(0o644)).await.unwrap();
        self.write(OWNER, false, &file, 0, b"data").await.unwrap();
        let (guard, _) = self.0.open(&who(OWNER), &file, Rights::default()).await.unwrap();
        self.remove(OWNER, dir, "file", false).await.unwrap();
        assert_eq!(self.read(OWNER, true, &file, 0, 9).await, Ok((b"data".to_vec(), true)));
        drop(guard);
        assert_eq!(self.0.attributes(&file).await.map(drop), Err(Errno::STALE));
        for nonsense in [&[][..], &[1], &[0; FILE_ID_MAX], &[0xff; FILE_ID_MAX]] {
            let stale = self.0.attributes(&FileId(nonsense.into())).await.map(drop);
            assert_eq!(stale, Err(Errno::STALE), "{nonsense:?}");
        }
    }

    async fn entries_are_listed_once(&self, dir: &FileId) {
        for n in 0..300 {
            self.make(OWNER, dir, &format!("stays{n}"), Make::NewFile, mode(0o644)).await.unwrap();
        }
        let mut n = 0;
        let names = self.names(dir, 2000, async || {
            n += 1;
            self.make(OWNER, dir, &format!("comes{n}"), Make::NewFile, mode(0o644)).await.unwrap();
            if n > 1 {
                self.remove(OWNER, dir, &format!("comes{}", n - 1), false).await.unwrap();
            }
        });
        let names = names.await;
        let staying: Vec<_> = names.iter().filter(|name| name.starts_with(b"stays")).collect();
        assert_eq!((staying.len(), staying.iter().collect::<BTreeSet<_>>().len()), (300, 300));
        assert!(n > 5, "in several parts: {n}");
        for dots in [&b"."[..], b".."] {
            assert_eq!(names.iter().filter(|name| *name == dots).count(), 1);
        }
    }
}

macro_rules! cases {
    ($($case:ident)*) => {
        /// Names of the cases.
        pub const CASES: &[&str] = &[$(stringify!($case)),*];

        impl Subject<'_> {
            async fn run(&self, case: &str) {
                let dir = self.directory(case).await;
                match case {
                    $(stringify!($case) => self.$case(&dir).await,)*
                    _ => panic!("{case}: no such case"),
                }
            }
        }
    };
}

cases! {
    names_are_checked
    kinds_have_their_errors
    rights_are_checked
    open_files_keep_their_rights
    new_files_are_open_for_their_makers
    repeated_creations_find_their_files
    guarded_changes_come_once
    names_are_moved_and_added
    holes_are_found_and_made
    extended_attributes_are_kept
    much_data_comes_back
    changes_show
    ends_are_told
    files_without_names_end_when_they_are_closed
    entries_are_listed_once
}

/// Runs all cases on an empty file system whose root directory belongs to root.
///
/// # Panics
/// If a case fails that is not among `lacks`, or one of those passes. Messages of failed cases are printed before.
pub fn check(files: impl FileSystem + 'static, lacks: &[&str]) {
    let unknown: Vec<_> = lacks.iter().filter(|case| !CASES.contains(case)).collect();
    assert!(unknown.is_empty(), "no such cases: {unknown:?}");
    let reactors = Reactors::start(Some(1)).unwrap();
    let (done, is_done) = mpsc::channel();
    reactors.handles()[0].spawn(move || async move {
        let subject = Subject(&files);
        let mut failed = Vec::new();
        for case in CASES {
            if AssertUnwindSafe(subject.run(case)).catch_unwind().await.is_err() {
                failed.push(*case);
            }
        }
        done.send(failed).unwrap();
    });
    let failed = is_done.recv().expect("the cases end");
    let broken: Vec<_> = failed.iter().filter(|case| !lacks.contains(case)).collect();
    assert!(broken.is_empty(), "cases that have failed: {broken:?}");
    let found: Vec<_> = lacks.iter().filter(|case| !failed.contains(case)).collect();
    assert!(found.is_empty(), "cases that have passed and are listed as lacking: {found:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_the_contract() {
        check(MemoryFileSystem::new(16 << 20), &[]);
    }

    /// Needs root, to act as others.
    #[test]
    fn directories_keep_the_contract() {
        let dir = tempfile::tempdir().unwrap();
        for (is_direct, by_path) in [(false, false), (true, false), (false, true)] {
            let options = LocalOptions { is_durable: false, is_direct, ..LocalOptions::default() };
            let path = dir.path().join(format!("{is_direct} {by_path}"));
            std::fs::create_dir(&path).unwrap();
            check(LocalFileSystem::open_by(&path, &options, by_path).unwrap(), &[]);
        }
    }

    #[test]
    fn data_goes_past_the_page_cache_where_that_is_wanted() {
        const LEN: usize = 1 << 20;
        // Not below /tmp, which may be in memory.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"").unwrap();
        for is_direct in [true, false] {
            let options = LocalOptions { is_durable: false, is_direct, ..LocalOptions::default() };
            let files = LocalFileSystem::open(dir.path(), &options).unwrap();
            let reactors = Reactors::start(Some(1)).unwrap();
            let (done, is_done) = mpsc::channel();
            reactors.handles()[0].spawn(move || async move {
                let subject = Subject(&files);
                let file = subject.look_up(0, &files.root(), b"file").await.unwrap();
                let content: Vec<u8> = (0..LEN + 5).map(|n| (n / 3) as u8).collect();
                // The last bytes are no whole block.
                subject.write(0, false, &file, 0, &content[..LEN]).await.unwrap();
                subject.write(0, false, &file, LEN as u64, &content[LEN..]).await.unwrap();
                for (at, len) in [(0, LEN), (LEN - 4096, 8192), (100, 5000), (LEN, 4096), (LEN + 5, 4096)] {
                    let end = (at + len).min(content.len());
                    let wanted = (content[at.min(end)..end].to_vec(), at + len >= content.len());
                    assert!(
                        subject.read(0, false, &file, at as u64, len).await.unwrap() == wanted,
                        "{len} from {at} on"
                    );
                }
                done.send(()).unwrap();
            });
            is_done.recv().expect("a check has failed: its message is above");
            let cached = thruway_engine::page_cache::cached(&std::fs::File::open(&path).unwrap(), 0, LEN as u64);
            // Before Linux 6.5 it cannot be found out.
            assert!(cached.is_none_or(|cached| (cached <= 64 << 10) == is_direct), "{cached:?}");
        }
    }
}
