//! What the contract of [`FileSystem`] promises the protocols, tried with each.

use super::*;
use std::collections::BTreeSet;
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
    async fn directory(&self) -> FileId {
        let root = self.0.root();
        let dir = self.make(0, &root, "dir", Make::Directory, mode(0o755)).await.unwrap();
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
        assert_eq!(self.remove(0, &root, "dir", false).await, Err(Errno::ISDIR));
        assert_eq!(self.remove(0, &root, "dir", true).await, Err(Errno::NOTEMPTY));
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
        assert_eq!(self.read(OTHER, true, &file, 0, 9).await, Ok((b"data".to_vec(), true)), "it is open");
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

/// Tries all of it with a file system whose root is root's.
fn suite(files: impl FileSystem + 'static) {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (done, is_done) = mpsc::channel();
    reactors.handles()[0].spawn(move || async move {
        let subject = Subject(&files);
        let dir = subject.directory().await;
        subject.names_are_checked(&dir).await;
        subject.kinds_have_their_errors(&dir).await;
        subject.rights_are_checked(&dir).await;
        subject.changes_show(&dir).await;
        subject.ends_are_told(&dir).await;
        subject.files_without_names_end_when_they_are_closed(&dir).await;
        subject.entries_are_listed_once(&dir).await;
        done.send(()).unwrap();
    });
    is_done.recv().expect("a check has failed: its message is above");
}

#[test]
fn memory_keeps_the_contract() {
    suite(MemoryFileSystem::new(16 << 20));
}

/// Needs root, to act as others.
#[test]
fn directories_keep_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    for (is_direct, by_path) in [(false, false), (true, false), (false, true)] {
        let options = LocalOptions { is_durable: false, is_direct, ..LocalOptions::default() };
        let path = dir.path().join(format!("{is_direct} {by_path}"));
        std::fs::create_dir(&path).unwrap();
        suite(LocalFileSystem::open_by(&path, &options, by_path).unwrap());
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
                assert!(subject.read(0, false, &file, at as u64, len).await.unwrap() == wanted, "{len} from {at} on");
            }
            done.send(()).unwrap();
        });
        is_done.recv().expect("a check has failed: its message is above");
        let cached = thruway_engine::page_cache::cached(&std::fs::File::open(&path).unwrap(), 0, LEN as u64);
        // Before Linux 6.5 it cannot be found out.
        assert!(cached.is_none_or(|cached| (cached <= 64 << 10) == is_direct), "{cached:?}");
    }
}
