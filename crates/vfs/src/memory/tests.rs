use super::*;
use futures_util::FutureExt;
use thruway_engine::Segments;
use thruway_server::caller::on_behalf_of;
use thruway_tcp::Origin;

fn now<T>(op: Op<'_, T>) -> Result<T> {
    op.now_or_never().expect("nothing in memory waits")
}

fn who(uid: u32) -> Credentials {
    Credentials { uid, gid: uid, groups: Vec::new() }
}

fn segment(bytes: &[u8]) -> Segment {
    let segments = Segments::new(1, bytes.len().max(1).next_multiple_of(4096)).unwrap();
    let mut segment = segments.reserve(1).now_or_never().unwrap().segment(bytes.len());
    segment.as_mut_slice().copy_from_slice(bytes);
    segment
}

struct Fixture {
    files: MemoryFileSystem,
    root: FileId,
}

impl Fixture {
    fn new() -> Fixture {
        let files = MemoryFileSystem::new(1 << 20);
        Fixture { root: files.root(), files }
    }

    fn make(&self, user: u32, dir: &FileId, name: &str, what: Make) -> Result<FileId> {
        let set = SetAttributes { mode: Some(0o755), ..SetAttributes::default() };
        now(self.files.make(&who(user), dir, name.as_bytes(), what, set)).map(|(file, _)| file)
    }

    fn write(&self, user: u32, file: &FileId, at: u64, bytes: &[u8]) -> Result<Attributes> {
        let user = who(user);
        now(self.files.write(As { who: &user, is_open: false }, file, at, segment(bytes), Stability::File))
    }

    fn read(&self, user: u32, file: &FileId, at: u64, len: usize) -> Result<(Vec<u8>, bool)> {
        let user = who(user);
        let read = now(self.files.read(As { who: &user, is_open: false }, file, at, segment(&vec![9; len])))?;
        Ok((read.segment.as_slice().to_vec(), read.is_end))
    }

    fn names(&self, dir: &FileId, room: usize) -> Vec<String> {
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let room = Room { bytes: room, entry: 10 };
            let listing = now(self.files.list(&who(0), dir, cookie, room, true)).unwrap();
            names.extend(listing.entries.iter().map(|e| String::from_utf8(e.name.clone()).unwrap()));
            if listing.is_end {
                return names;
            }
            cookie = listing.entries.last().expect("at least one").cookie;
        }
    }
}

#[test]
fn data_comes_back_with_its_holes() {
    let f = Fixture::new();
    let file = f.make(1, &f.root, "file", Make::NewFile).unwrap();
    let attributes = f.write(1, &file, 200_000, b"later").unwrap();
    assert_eq!((attributes.size, attributes.used), (200_005, 64 << 10));
    assert_eq!(f.read(1, &file, 199_998, 100).unwrap(), (b"\0\0later".to_vec(), true));
    assert_eq!(f.read(1, &file, 0, 10).unwrap(), (vec![0; 10], false));
    assert_eq!(f.read(1, &file, 300_000, 10).unwrap(), (vec![], true));
    let user = who(1);
    let user = As { who: &user, is_open: false };
    assert_eq!(now(f.files.seek(user, &file, 5, Seek::Data)), Ok(3 << 16));
    assert_eq!(now(f.files.seek(user, &file, 5, Seek::Hole)), Ok(5));
    assert_eq!(now(f.files.seek(user, &file, 200_001, Seek::Hole)), Ok(200_005));
    now(f.files.allocate(user, &file, 0, 10, Allocate::Reserve)).unwrap();
    assert_eq!(now(f.files.seek(user, &file, 5, Seek::Data)), Ok(5));
    now(f.files.allocate(user, &file, 200_000, 2, Allocate::Punch)).unwrap();
    assert_eq!(f.read(1, &file, 200_000, 5).unwrap().0, b"\0\0ter");
    now(f.files.allocate(user, &file, 0, 1 << 18, Allocate::Punch)).unwrap();
    assert_eq!(now(f.files.seek(user, &file, 0, Seek::Data)), Err(Errno::NXIO));
    assert_eq!(now(f.files.attributes(&file)).unwrap().used, 0);
}

#[test]
fn data_is_copied_with_its_holes() {
    let f = Fixture::new();
    let [file, copy] = ["file", "copy"].map(|name| f.make(1, &f.root, name, Make::NewFile).unwrap());
    f.write(1, &file, 200_000, b"later").unwrap();
    f.write(1, &copy, 0, &[7; 100_000]).unwrap();
    let user = who(1);
    let user = As { who: &user, is_open: false };
    let copy_all = |from: (&FileId, u64), to: (&FileId, u64), len: u64| -> Result<u64> {
        let mut copied = 0;
        while copied < len {
            match now(f.files.copy(user, (from.0, from.1 + copied), (to.0, to.1 + copied), len - copied, false))? {
                0 => break,
                more => copied += more,
            }
        }
        Ok(copied)
    };
    assert_eq!(copy_all((&file, 0), (&copy, 0), u64::MAX), Ok(200_005));
    assert_eq!(f.read(1, &copy, 0, 300_000), f.read(1, &file, 0, 300_000));
    assert_eq!(now(f.files.attributes(&copy)).unwrap().used, 64 << 10);
    assert_eq!(copy_all((&file, 199_999), (&copy, 5), 4), Ok(4));
    assert_eq!(f.read(1, &copy, 4, 6).unwrap().0, b"\0\0lat\0");
    assert_eq!(copy_all((&file, 200_005), (&copy, 0), 9), Ok(0));
    assert_eq!(copy_all((&file, 199_000), (&file, 199_500), 501), Err(Errno::INVAL), "what it reads it has written");
    assert_eq!(copy_all((&file, 199_500), (&file, 210_000), 505), Ok(505));
    assert_eq!(copy_all((&file, 0), (&copy, i64::MAX as u64 - 5), 6), Err(Errno::FBIG));
    assert_eq!(now(f.files.copy(user, (&file, 0), (&copy, 0), 9, true)), Err(Errno::OPNOTSUPP));
    let other = f.make(2, &f.root, "other", Make::NewFile).unwrap();
    assert_eq!(copy_all((&file, 0), (&other, 0), 9), Err(Errno::ACCESS));
    assert_eq!(copy_all((&file, 0), (&f.root, 0), 9).err(), Some(Errno::ISDIR));
}

#[test]
fn it_is_as_large_as_it_was_said_to_be() {
    let f = Fixture::new();
    let file = f.make(1, &f.root, "file", Make::NewFile).unwrap();
    let before = now(f.files.usage()).unwrap();
    let mut written = 0;
    while f.write(1, &file, written, &[7; 4096]).is_ok() {
        written += 4096;
    }
    assert_eq!(f.write(1, &file, written, &[7; 4096]).map(drop), Err(Errno::NOSPC));
    assert!(written > 900_000 && written <= 1 << 20, "{written}");
    let size = now(f.files.attributes(&file)).unwrap().size;
    assert_eq!(size, written, "what has failed has changed nothing");
    now(f.files.remove(&who(1), &f.root, b"file", false)).unwrap();
    assert_eq!(now(f.files.usage()).unwrap().bytes_free, before.bytes_free + 512 + 64 + 4);
    let made = f.make(1, &f.root, "link", Make::SymbolicLink(vec![b'x'; 4000])).unwrap();
    let set = SetXattr::Either;
    now(f.files.set_xattr(&who(1), &made, b"a", Some((&[7; 1000], set)))).unwrap_err();
    let used = |f: &Fixture| now(f.files.usage()).unwrap().bytes_free;
    let empty = used(&f);
    let directory = f.make(1, &f.root, "directory", Make::Directory).unwrap();
    now(f.files.set_xattr(&who(1), &directory, b"a", Some((&[7; 60_000], set)))).unwrap();
    assert!(used(&f) < empty - 60_000, "what is beside data counts too");
    now(f.files.remove(&who(1), &f.root, b"directory", true)).unwrap();
    assert_eq!(used(&f), empty);
    now(f.files.remove(&who(1), &f.root, b"link", false)).unwrap();
    assert_eq!(now(f.files.usage()).unwrap().bytes_free, before.bytes_free + 512 + 64 + 4);
    let mut made = 0;
    while f.make(1, &f.root, &format!("f{made}"), Make::NewFile).is_ok() {
        made += 1;
    }
    assert!((1000..2100).contains(&made), "{made}");
}

#[test]
fn entries_are_listed_once_while_others_come_and_go() {
    let f = Fixture::new();
    for n in 0..50 {
        f.make(1, &f.root, &format!("f{n}"), Make::NewFile).unwrap();
    }
    assert_eq!(f.names(&f.root, 40).len(), 52);
    let room = Room { bytes: 300, entry: 10 };
    let first = now(f.files.list(&who(0), &f.root, 0, room, false)).unwrap();
    for entry in &first.entries[2..] {
        now(f.files.remove(&who(1), &f.root, &entry.name, false)).unwrap();
    }
    f.make(1, &f.root, "new", Make::NewFile).unwrap();
    let cookie = first.entries.last().unwrap().cookie;
    let rest = now(f.files.list(&who(0), &f.root, cookie, Room { bytes: 1 << 20, entry: 10 }, false)).unwrap();
    assert_eq!(first.entries.len() + rest.entries.len(), 53);
}

#[test]
fn trees_are_changed_as_by_a_kernel() {
    let f = Fixture::new();
    let (a, b) = (f.make(1, &f.root, "a", Make::Directory).unwrap(), f.make(1, &f.root, "b", Make::Directory).unwrap());
    let inner = f.make(1, &a, "inner", Make::Directory).unwrap();
    let file = f.make(1, &a, "file", Make::NewFile).unwrap();
    let links = |file: &FileId| now(f.files.attributes(file)).unwrap().links;
    assert_eq!((links(&f.root), links(&a), links(&inner), links(&file)), (4, 3, 2, 1));
    let rename = |from: (&FileId, &str), to: (&FileId, &str)| {
        now(f.files.rename(&who(1), (from.0, from.1.as_bytes()), (to.0, to.1.as_bytes())))
    };
    assert_eq!(rename((&f.root, "a"), (&inner, "x")), Err(Errno::INVAL), "into itself");
    assert_eq!(rename((&a, "inner"), (&a, "file")), Err(Errno::NOTDIR));
    assert_eq!(rename((&a, "file"), (&a, "inner")), Err(Errno::ISDIR));
    assert_eq!(rename((&f.root, "b"), (&f.root, "a")), Err(Errno::NOTEMPTY));
    rename((&a, "inner"), (&b, "moved")).unwrap();
    assert_eq!((links(&a), links(&b), links(&inner)), (2, 3, 2));
    assert_eq!(now(f.files.look_up(&who(1), &inner, b"..")).unwrap().0, b);
    assert_eq!(now(f.files.remove(&who(1), &f.root, b"b", true)), Err(Errno::NOTEMPTY));
    assert_eq!(now(f.files.remove(&who(1), &a, b"file", true)), Err(Errno::NOTDIR));
    now(f.files.link(&who(1), &file, &b, b"hard")).unwrap();
    assert_eq!(links(&file), 2);
    let (guard, _) = now(f.files.open(&who(1), &file, Rights::default())).unwrap();
    now(f.files.remove(&who(1), &a, b"file", false)).unwrap();
    now(f.files.remove(&who(1), &b, b"hard", false)).unwrap();
    f.write(1, &file, 0, b"still").unwrap();
    assert_eq!(f.read(1, &file, 0, 9).unwrap().0, b"still");
    drop(guard);
    assert_eq!(f.read(1, &file, 0, 9), Err(Errno::STALE));
    let other = MemoryFileSystem::new(1 << 20);
    assert_eq!(now(other.attributes(&f.root)).map(drop), Err(Errno::STALE), "a handle of another one");
}

#[test]
fn rights_are_those_of_the_user() {
    let f = Fixture::new();
    let dir = f.make(1, &f.root, "dir", Make::Directory).unwrap();
    assert_eq!(f.make(2, &dir, "file", Make::NewFile), Err(Errno::ACCESS));
    let file = f.make(1, &dir, "file", Make::NewFile).unwrap();
    assert_eq!(f.write(2, &file, 0, b"x").map(drop), Err(Errno::ACCESS));
    assert!(f.read(2, &file, 0, 1).is_ok());
    let set = |user, set: SetAttributes| {
        now(f.files.set_attributes(As { who: &who(user), is_open: false }, &file, set, None)).map(|a| a.mode)
    };
    let mode = |mode| SetAttributes { mode: Some(mode), ..SetAttributes::default() };
    assert_eq!(set(2, mode(0o777)), Err(Errno::PERM));
    assert_eq!(set(1, mode(0o4766)), Ok(0o4766));
    f.write(2, &file, 0, b"x").unwrap();
    assert_eq!(now(f.files.attributes(&file)).unwrap().mode, 0o766, "written to by another");
    assert_eq!(set(1, SetAttributes { uid: Some(2), ..SetAttributes::default() }), Err(Errno::PERM));
    assert_eq!(now(f.files.remove(&who(2), &f.root, b"dir", true)), Err(Errno::PERM), "of another, in a sticky one");
    let device = Make::Special(Kind::BlockDevice, 1, 2);
    assert_eq!(f.make(1, &dir, "device", device), Err(Errno::PERM));
}

#[test]
fn an_exclusive_creation_is_repeated_by_its_number() {
    let f = Fixture::new();
    let first = f.make(1, &f.root, "file", Make::Exclusive([0xff; 8])).unwrap();
    assert_eq!(f.make(1, &f.root, "file", Make::Exclusive([0xff; 8])), Ok(first));
    assert_eq!(f.make(1, &f.root, "file", Make::Exclusive([0xfe; 8])), Err(Errno::EXIST));
    assert_eq!(f.make(1, &f.root, "file", Make::NewFile), Err(Errno::EXIST));
}

#[test]
fn extended_attributes_are_kept_within_limits() {
    let f = Fixture::new();
    let file = f.make(1, &f.root, "file", Make::NewFile).unwrap();
    let set = |name: &str, value| now(f.files.set_xattr(&who(1), &file, name.as_bytes(), value));
    assert_eq!(set("a", Some((b"1", SetXattr::Replace))), Err(Errno::NODATA));
    set("a", Some((b"1", SetXattr::Create))).unwrap();
    assert_eq!(set("a", Some((b"2", SetXattr::Create))), Err(Errno::EXIST));
    set("b", Some((b"3", SetXattr::Either))).unwrap();
    assert_eq!(now(f.files.xattr(&who(2), &file, b"a")), Ok(b"1".to_vec()));
    assert_eq!(now(f.files.xattrs(&who(1), &file)), Ok(vec![b"a".to_vec(), b"b".to_vec()]));
    set("a", None).unwrap();
    assert_eq!((set("a", None), now(f.files.xattr(&who(1), &file, b"a"))), (Err(Errno::NODATA), Err(Errno::NODATA)));
    assert_eq!(set("c", Some((&[0; 65 << 10], SetXattr::Either))), Err(Errno::NOSPC));
}

const MIB: u64 = 1 << 20;

async fn units_of<T>(work: impl Future<Output = Result<T>>) -> u64 {
    let before = slices::counted();
    assert_eq!(work.await.map(drop), Ok(()));
    slices::counted() - before
}

#[test]
fn long_operations_are_as_much_work_as_their_length() {
    slices::measured(|| async {
        let files = MemoryFileSystem::new(128 * MIB);
        let f = Fixture { root: files.root(), files };
        let (file, other) =
            (f.make(1, &f.root, "a", Make::NewFile).unwrap(), f.make(1, &f.root, "b", Make::NewFile).unwrap());
        let who = who(1);
        let user = As { who: &who, is_open: false };
        let len = 32 * MIB;
        let of_data = len / UNIT_BYTES as u64;
        assert_eq!(units_of(f.files.allocate(user, &file, 0, len, Allocate::Reserve)).await, of_data);
        assert_eq!(now(f.files.attributes(&file)).unwrap().size, len);
        assert_eq!(units_of(f.files.seek(user, &file, 0, Seek::Hole)).await, len / tree::PAGE / PAGES_OF_UNIT);
        let mut copied = 0;
        while copied < len {
            let copy = f.files.copy(user, (&file, copied), (&other, copied), len - copied, false);
            assert_eq!(units_of(async { copy.await.inspect(|more| copied += more) }).await, 256);
        }
        assert_eq!(copied, len);
        // The source of the copy is a hole now, and the target still has all pages.
        assert_eq!(units_of(f.files.allocate(user, &file, 0, len, Allocate::Punch)).await, of_data);
        assert_eq!(now(f.files.attributes(&file)).unwrap().used, 0);
        let used = |file| now(f.files.attributes(file)).unwrap().used;
        let copied = f.files.copy(user, (&file, 0), (&other, 0), len, false).await;
        assert_eq!((copied, used(&other)), (Ok(MIB), len - MIB), "no more pages at a time");
        // A hole is one step, however long it is.
        assert_eq!(units_of(f.files.allocate(user, &file, 0, 1 << 50, Allocate::Punch)).await, 256);
    });
}

#[test]
fn others_work_between_the_steps_of_a_long_operation() {
    slices::measured(|| async {
        let files = MemoryFileSystem::new(128 * MIB);
        let f = Fixture { root: files.root(), files };
        let file = f.make(1, &f.root, "a", Make::NewFile).unwrap();
        for what in [Allocate::Reserve, Allocate::Punch] {
            let (files, of) = (f.files.clone(), file.clone());
            let task = tokio::task::spawn_local(on_behalf_of(Origin::of_host([10, 0, 0, 2].into()), async move {
                let who = who(1);
                files.allocate(As { who: &who, is_open: false }, &of, 0, 32 * MIB, what).await
            }));
            let used = || now(f.files.attributes(&file)).unwrap().used;
            let (mut turns, mut before) = (0, used());
            while !task.is_finished() {
                tokio::task::yield_now().await;
                assert!(used().abs_diff(before) <= 2 * MIB, "{before} and then {}", used());
                (turns, before) = (turns + 1, used());
            }
            task.await.unwrap().unwrap();
            assert!(turns >= 16, "{turns}");
        }
    });
}

#[test]
fn data_is_removed_in_steps() {
    slices::measured(|| async {
        let files = MemoryFileSystem::new(64 * MIB);
        let f = Fixture { root: files.root(), files };
        let who = who(1);
        let user = As { who: &who, is_open: false };
        let [empty, len] = [now(f.files.usage()).unwrap().bytes_free, 32 * MIB];
        let of_data = len / UNIT_BYTES as u64;
        let fill = async |name: &str| {
            let file = f.make(1, &f.root, name, Make::NewFile).unwrap();
            f.files.allocate(user, &file, 0, len, Allocate::Reserve).await.unwrap();
            file
        };
        let file = fill("a").await;
        let shorter = SetAttributes { size: Some(5), ..SetAttributes::default() };
        assert_eq!(units_of(f.files.set_attributes(user, &file, shorter, None)).await, of_data);
        let attributes = now(f.files.attributes(&file)).unwrap();
        assert_eq!((attributes.size, attributes.used), (5, tree::PAGE));
        f.files.allocate(user, &file, 0, len, Allocate::Reserve).await.unwrap();
        assert_eq!(units_of(f.files.remove(&who, &f.root, b"a", false)).await, of_data);
        assert_eq!(now(f.files.usage()).unwrap().bytes_free, empty);
        // Another file may take the place of data that waits to be freed.
        let file = fill("a").await;
        let (guard, _) = f.files.open(&who, &file, Rights::default()).await.unwrap();
        f.files.remove(&who, &f.root, b"a", false).await.unwrap();
        let other = f.make(1, &f.root, "b", Make::NewFile).unwrap();
        let empty = empty - 512 - 64 - 1;
        let before = slices::counted();
        drop(guard);
        assert!(f.files.lock().has_removed(), "it is freed by a task of the host that has closed the file");
        assert_eq!(now(f.files.usage()).unwrap().bytes_free, empty);
        f.files.allocate(user, &other, 0, 60 * MIB, Allocate::Reserve).await.unwrap();
        assert_eq!(now(f.files.usage()).unwrap().bytes_free, empty - 60 * MIB);
        while f.files.lock().has_removed() {
            tokio::task::yield_now().await;
        }
        assert!(slices::counted() > before + 60 * MIB / UNIT_BYTES as u64);
    });
}

#[test]
fn a_directory_is_not_moved_below_too_many_others() {
    slices::measured(|| async {
        let files = MemoryFileSystem::new(16 * MIB);
        let f = Fixture { root: files.root(), files };
        let mut chain = vec![f.root.clone()];
        for _ in 0..4097 {
            chain.push(f.make(1, chain.last().unwrap(), "d", Make::Directory).unwrap());
        }
        f.make(1, &f.root, "moved", Make::Directory).unwrap();
        let who = who(1);
        let to = |level: usize| f.files.rename(&who, (&f.root, b"moved"), (&chain[level], b"there"));
        let before = slices::counted();
        assert_eq!(to(4097).await, Err(Errno::NAMETOOLONG));
        assert_eq!(slices::counted() - before, 256);
        assert_eq!(units_of(to(160)).await, 10);
        // Nothing is looked at for another name in the same directory.
        f.make(1, &chain[4097], "a", Make::Directory).unwrap();
        let within = f.files.rename(&who, (&chain[4097], b"a"), (&chain[4097], b"b"));
        assert_eq!(units_of(within).await, 0);
    });
}
