//! The disk as a program meets it.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use thruway_faultfs::{Disk, Errno, Fault, Op};

fn at(dir: &tempfile::TempDir, name: &str) -> std::path::PathBuf {
    dir.path().join(name)
}

fn sync_dir(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
}

#[test]
fn a_file_system_like_any_other() {
    let (disk, dir) = (Disk::new(1), tempfile::tempdir().unwrap());
    let mount = disk.mount(dir.path()).unwrap();
    fs::create_dir_all(at(&dir, "a/b")).unwrap();
    fs::write(at(&dir, "a/b/file"), vec![7; 300_000]).unwrap();
    fs::hard_link(at(&dir, "a/b/file"), at(&dir, "link")).unwrap();
    std::os::unix::fs::symlink("a/b", at(&dir, "way")).unwrap();
    assert_eq!(fs::read(at(&dir, "way/file")).unwrap(), vec![7; 300_000]);
    assert_eq!(fs::metadata(at(&dir, "link")).unwrap().nlink(), 2);
    fs::rename(at(&dir, "link"), at(&dir, "a/c")).unwrap();
    let mut names: Vec<_> = fs::read_dir(at(&dir, "a")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["b", "c"]);
    assert_eq!(fs::remove_dir(at(&dir, "a")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    fs::remove_dir_all(at(&dir, "a")).unwrap();
    let mut many = Vec::new();
    for n in 0..2000 {
        fs::write(at(&dir, &format!("{n}")), []).unwrap();
        many.push(n.to_string());
    }
    many.push("way".into());
    let mut names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    many.sort();
    assert_eq!(names, many);
    drop(mount);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "it is not mounted any more");
}

#[test]
fn power_takes_what_was_not_synced_and_nothing_else() {
    let mut fates = std::collections::BTreeSet::new();
    for seed in 0..30 {
        let (disk, dir) = (Disk::new(seed), tempfile::tempdir().unwrap());
        let mount = disk.mount(dir.path()).unwrap();
        let mut kept = File::create(at(&dir, "kept")).unwrap();
        kept.write_all(&[1; 10_000]).unwrap();
        kept.sync_all().unwrap();
        sync_dir(dir.path());
        kept.write_at(&[2; 4096], 4096).unwrap();
        // Its content is safe, its name is not.
        let nameless = File::create(at(&dir, "nameless")).unwrap();
        nameless.write_at(b"content", 0).unwrap();
        nameless.sync_all().unwrap();
        drop((kept, nameless, mount));
        disk.lose_power();
        let mount = disk.mount(dir.path()).unwrap();
        let kept = fs::read(at(&dir, "kept")).unwrap();
        assert!(kept.len() == 10_000 && kept[..4096] == [1; 4096] && kept[8192..] == [1; 10_000 - 8192]);
        let nameless = fs::read(at(&dir, "nameless")).ok();
        assert!(nameless.as_ref().is_none_or(|content| content == b"content"));
        fates.insert((kept[5000], nameless.is_some()));
        drop(mount);
    }
    assert_eq!(fates.len(), 4, "{fates:?}");
}

#[test]
fn requests_fail_as_they_are_told_to() {
    let (disk, dir) = (Disk::new(1), tempfile::tempdir().unwrap());
    let _mount = disk.mount(dir.path()).unwrap();
    let mut file = File::create(at(&dir, "file")).unwrap();
    disk.fail(Fault { skip: 1, error: Errno::NOSPC, ..Fault::once(Op::Write) });
    file.write_all(b"one").unwrap();
    assert_eq!(file.write_all(b"two").unwrap_err().kind(), ErrorKind::StorageFull);
    file.write_all(b"three").unwrap();
    disk.fail(Fault { of: "new".into(), done_all_the_same: true, ..Fault::once(Op::Rename) });
    fs::rename(at(&dir, "file"), at(&dir, "old")).unwrap();
    assert!(fs::rename(at(&dir, "old"), at(&dir, "new")).is_err());
    assert!(at(&dir, "new").exists() && !at(&dir, "old").exists());
    disk.fail(Fault::always(Op::List));
    assert!(fs::read_dir(dir.path()).unwrap().next().unwrap().is_err());
    disk.heal();
    assert!(fs::read_dir(dir.path()).unwrap().next().unwrap().is_ok());
}

#[test]
fn lost_writeback_is_told_once() {
    let (disk, dir) = (Disk::new(1), tempfile::tempdir().unwrap());
    let _mount = disk.mount(dir.path()).unwrap();
    let file = File::create(at(&dir, "file")).unwrap();
    disk.lose_writeback_after(1);
    file.write_all_at(&[5; 409_600], 0).unwrap();
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(libc::EIO));
    file.sync_all().unwrap();
    // The kernel's own cache may have all of it still.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert!(fs::read(at(&dir, "file")).unwrap() != vec![5; 409_600]);
}

#[test]
fn short_reads_and_writes_are_seen() {
    let (disk, dir) = (Disk::new(1), tempfile::tempdir().unwrap());
    disk.be_short(true);
    let _mount = disk.mount(dir.path()).unwrap();
    let mut file = File::create_new(at(&dir, "file")).unwrap();
    let lens: Vec<_> = (0..20).map(|_| file.write(&[1; 1000]).unwrap()).collect();
    assert!(lens.iter().any(|len| *len < 1000));
    let total: usize = lens.iter().sum();
    let mut file = File::open(at(&dir, "file")).unwrap();
    let mut all = Vec::new();
    file.read_to_end(&mut all).unwrap();
    assert_eq!(all, vec![1; total]);
}

#[test]
fn a_disk_that_has_stopped_goes_on_where_it_was() {
    let (disk, dir) = (Disk::new(1), tempfile::tempdir().unwrap());
    let _mount = disk.mount(dir.path()).unwrap();
    let file = File::create(at(&dir, "file")).unwrap();
    disk.stop_after(0);
    let writer = std::thread::spawn(move || file.write_at(b"late", 0));
    assert!(disk.wait_stopped(|| true));
    assert!(!writer.is_finished());
    disk.go_on();
    writer.join().unwrap().unwrap();
    assert_eq!(fs::read(at(&dir, "file")).unwrap(), b"late");
}

#[test]
fn numbers_come_back() {
    let (disk, dir) = (Disk::new(1), tempfile::tempdir().unwrap());
    let _mount = disk.mount(dir.path()).unwrap();
    let number = |name: &str| {
        fs::write(at(&dir, name), name).unwrap();
        fs::metadata(at(&dir, name)).unwrap().ino()
    };
    let first = number("one");
    fs::remove_file(at(&dir, "one")).unwrap();
    assert!((0..50).any(|n| number(&format!("{n}")) == first));
}
