use super::*;
use crate::sink::journal::{Present, ResumeDecision, Version};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use thruway_fs::acl::Who;

static NEVER: AtomicBool = AtomicBool::new(false);

fn tree_with(dir: &Path, preserve: bool, delete: bool, trust: Trust) -> Tree {
    let manner =
        Manner { preserve, delete, replace: true, readable: true, confined: false, named: RootNames::default(), trust };
    Tree::new(Arc::new(fs::File::open(dir).unwrap().into()), manner, None, MadeBefore::default())
}

fn tree(dir: &Path) -> Tree {
    tree_with(dir, true, false, Trust::Operator)
}

fn file(dir: &Path, name: &str, mode: u32) -> Identity {
    fs::write(dir.join(name), name).unwrap();
    fs::set_permissions(dir.join(name), fs::Permissions::from_mode(mode)).unwrap();
    Identity::of(fs::File::open(dir.join(name)).unwrap(), c"").unwrap().0
}

#[test]
fn nothing_is_reached_outside_the_root_or_through_links() {
    let dir = tempfile::tempdir().unwrap();
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    fs::create_dir(&root).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::create_dir(root.join("real")).unwrap();
    symlink(&outside, root.join("absolute")).unwrap();
    symlink("../outside", root.join("relative")).unwrap();
    symlink("real", root.join("inside")).unwrap();
    let tree = tree(&root);
    assert!(tree.place(b"../outside/x").is_err() && tree.symlink(b"../outside/x", b"y", &Meta::default()).is_err());
    for path in [&b"absolute/x"[..], b"relative/x", b"inside/x"] {
        assert!(tree.find(path).is_err() && tree.link(path, b"absolute/y").is_err());
        // A directory takes the place of the link.
        tree.symlink(path, b"y", &Meta::default()).unwrap();
        assert!(root.join(std::str::from_utf8(path).unwrap()).parent().unwrap().symlink_metadata().unwrap().is_dir());
    }
    for empty in [&outside, &root.join("real")] {
        assert_eq!(fs::read_dir(empty).unwrap().count(), 0);
    }
}

#[test]
fn a_directory_takes_the_place_of_a_link_but_not_of_a_device() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("real")).unwrap();
    fs::write(dir.path().join("real/precious"), "").unwrap();
    symlink("real", dir.path().join("link")).unwrap();
    let tree = tree_with(dir.path(), false, true, Trust::Operator);
    assert!(tree.make_directory(b"link", &Meta::default()).unwrap().is_some(), "made again");
    assert!(dir.path().join("link").symlink_metadata().unwrap().is_dir());
    let keep = HashSet::new();
    tree.prune(
        b"link",
        b"",
        &keep,
        c"journal",
        &Remover {
            spares: &|_, _| false,
            dry_run: false,
            may_unlock: true,
            is_over: &NEVER,
            on_removed: &|_| (),
            on_failed: &|_, _| (),
        },
    )
    .unwrap();
    assert!(dir.path().join("real/precious").exists());
    if rustix::fs::mknodat(&tree.root, c"dev", FileType::CharacterDevice, Mode::from_raw_mode(0o600), 0x103).is_ok() {
        let error = tree.make_directory(b"dev", &Meta::default()).unwrap_err();
        assert!(error.to_string().contains("device"), "{error}");
    }
}

#[test]
fn missing_parents_are_made_and_types_change_as_in_a_mirror() {
    let dir = tempfile::tempdir().unwrap();
    let with = |delete| tree_with(dir.path(), false, delete, Trust::Operator);
    with(false).make_directory(b"a/b/c", &Meta::default()).unwrap();
    with(false).make_directory(b"a/b/c", &Meta::default()).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(
        with(false).make_directory(b"file", &Meta::default()).unwrap().is_some(),
        "a file gives way to a directory"
    );
    let put = |delete: bool, name: &str| {
        let identity = file(dir.path(), ".temp", 0o644);
        let tree = with(delete);
        let place = tree.place(name.as_bytes()).unwrap();
        tree.put_in_place(b"", &place, (c".temp", identity), Some(0o644))
    };
    put(false, "file").unwrap();
    assert!(dir.path().join("file").is_file(), "an empty directory gives way to a file");
    assert!(put(false, "a").unwrap_err().to_string().contains("--delete"));
    put(true, "a").unwrap();
    assert_eq!(fs::read(dir.path().join("a")).unwrap(), b".temp");
    let identity = file(dir.path(), "other", 0o644);
    file(dir.path(), ".temp2", 0o644);
    let tree = with(false);
    let place = tree.place(b"new").unwrap();
    assert!(
        tree.put_in_place(b"", &place, (c".temp2", identity), Some(0o644)).is_err(),
        "not the file that was written"
    );
    assert!(!dir.path().join("new").exists());
}

#[test]
fn without_preserve_what_is_there_keeps_its_permissions() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), "secret", 0o600);
    fs::create_dir(dir.path().join("private")).unwrap();
    fs::set_permissions(dir.path().join("private"), fs::Permissions::from_mode(0o2700)).unwrap();
    let tree = tree_with(dir.path(), false, false, Trust::Operator);
    let identity = file(dir.path(), ".temp", 0o644);
    let place = tree.place(b"secret").unwrap();
    tree.put_in_place(b"", &place, (c".temp", identity), Some(0o644)).unwrap();
    let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().mode() & 0o7777;
    assert_eq!(mode("secret"), 0o600);
    assert_eq!(fs::read(dir.path().join("secret")).unwrap(), b".temp");
    let open = Meta { mode: 0o040_755, ..Meta::default() };
    assert!(tree.make_directory(b"private", &open).unwrap().is_none());
    tree.finish_directory(b"private", &open, None).unwrap();
    assert_eq!(mode("private"), 0o2700);
    let made = tree.make_directory(b"private/inner", &open).unwrap();
    tree.finish_directory(b"private/inner", &open, Some(made.unwrap())).unwrap();
    assert_eq!(mode("private/inner") & 0o2000, 0o2000, "the set-group-id bit is inherited");
}

/// The access control list of a file has this mask until it is removed.
#[test]
fn entries_below_a_default_list_are_made_without_rights_for_its_users() {
    use thruway_fs::acl::{Acl, Entry, Who};
    let dir = tempfile::tempdir().unwrap();
    let list: Vec<Entry> = [Who::Owner, Who::User(1234), Who::OwningGroup, Who::Mask, Who::Others]
        .map(|who| Entry { who, permissions: 7 })
        .into();
    let value = Acl::new(list).unwrap().encode();
    let root = fs::File::open(dir.path()).unwrap();
    thruway_fs::xattr::write(root.as_fd(), b"system.posix_acl_default", &value).unwrap();
    let meta = Meta { mode: 0o100_644, ..Meta::default() };
    let open = Meta { mode: 0o040_755, ..Meta::default() };
    let has_lists = |path: &str| {
        let names = thruway_fs::xattr::names(fs::File::open(dir.path().join(path)).unwrap().as_fd()).unwrap();
        names.iter().any(|name| name.to_bytes().starts_with(b"system.posix_acl_"))
    };
    let tree = tree(dir.path());
    assert_eq!(tree.inherited(root.as_fd()).unwrap(), Before::Inherited);
    assert_eq!(tree.mode_at_creation(&meta, &Before::Inherited), (Mode::from_raw_mode(0o600), false));
    // Before it has its owner and group, other bits would give rights to the wrong ones.
    assert_eq!(tree.mode_at_creation(&meta, &Before::Nothing), (Mode::from_raw_mode(0o600), false));
    let private = Meta { mode: 0o100_600, ..Meta::default() };
    assert_eq!(tree.mode_at_creation(&private, &Before::Nothing), (Mode::from_raw_mode(0o600), true));
    tree.make_directory(b"d", &open).unwrap();
    // Before its record, as for a file that comes first.
    symlink("elsewhere", dir.path().join("early")).unwrap();
    tree.directory(b"early/inner").unwrap();
    let replaced = [&b"early"[..], b"early/inner", b"d"].map(|path| tree.early_replaced(path));
    assert_eq!(replaced, [Some(true), Some(false), None]);
    for path in ["d", "early", "early/inner"] {
        assert!(!has_lists(path), "{path}");
        assert_eq!(
            tree.inherited(fs::File::open(dir.path().join(path)).unwrap().as_fd()).unwrap(),
            Before::Nothing,
            "{path}"
        );
    }
    // Until they have their owner, group and list.
    let modes = ["d", "early"].map(|path| fs::metadata(dir.path().join(path)).unwrap().mode() & 0o777);
    assert_eq!(modes, [0o700, 0o700]);
    let plain = tree_with(dir.path(), false, false, Trust::Operator);
    plain.make_directory(b"inherits", &open).unwrap();
    assert!(has_lists("inherits"));
}

#[test]
fn a_peer_gives_nobody_rights() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree_with(dir.path(), true, false, Trust::Peer);
    let handle = fs::File::create(dir.path().join("f")).unwrap();
    let meta = Meta {
        mode: 0o106_755,
        uid: 12345,
        gid: 12345,
        xattrs: vec![(
            b"security.capability".to_vec(),
            vec![1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        )],
        ..Meta::default()
    };
    let short = tree.apply(handle.as_fd(), &meta, false, &Before::Nothing);
    let said = |what: &str| short.refused.iter().any(|sentence| sentence.contains(what));
    assert!(said("set-user-ID and set-group-ID bits") && said("security.capability"), "{short:?}");
    assert!(short.told.is_empty(), "{short:?}");
    let stat = handle.metadata().unwrap();
    assert_eq!((stat.mode() & 0o7777, stat.uid()), (0o755, rustix::process::geteuid().as_raw()));
    assert_eq!(rustix::fs::flistxattr(&handle, &mut [0; 100]).unwrap(), 0);
    let device = Meta { mode: 0o020_666, ..Meta::default() };
    assert_eq!(tree.special(b"dev", &device, 0x103).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    let fifo = Meta { mode: 0o010_666, ..Meta::default() };
    tree.special(b"fifo", &fifo, 0).unwrap();
    assert_eq!(fs::metadata(dir.path().join("fifo")).unwrap().mode() & 0o777, 0o666, "whatever the umask");
}

#[test]
fn set_id_bits_go_only_to_the_owner_they_were_meant_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = tree(dir.path());
    tree.privileged = false;
    let handle = fs::File::create(dir.path().join("f")).unwrap();
    let ours = handle.metadata().unwrap();
    let meta = |uid, gid| Meta { mode: 0o106_755, uid, gid, ..Meta::default() };
    let mode = || handle.metadata().unwrap().mode() & 0o7777;
    let short = tree.apply(handle.as_fd(), &meta(ours.uid() + 1, ours.gid()), false, &Before::Nothing);
    assert_eq!(mode() & 0o4000, 0);
    assert!(short.refused.iter().any(|sentence| sentence.starts_with("set-user-ID bit not kept")), "{short:?}");
    let short = tree.apply(handle.as_fd(), &meta(ours.uid(), ours.gid()), false, &Before::Nothing);
    assert_eq!((mode(), short.is_none()), (0o6755, true));
}

#[test]
fn pruning_removes_all_but_what_is_kept_and_what_may_be_in_use() {
    let dir = tempfile::tempdir().unwrap();
    for path in [
        "keep",
        "gone",
        "sub/deep/file",
        ".x.tw-0123abcd0123abcd0123abcd0123abcd",
        ".y.tw-0123abcd0123abcd0123abcd0123abcd",
    ] {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let keep = HashSet::from([b"keep".to_vec()]);
    let tree = tree(dir.path());
    for dry_run in [true, false] {
        let removed = tree
            .prune(
                b"",
                b"",
                &keep,
                c".own",
                &Remover {
                    spares: &|_, _| false,
                    dry_run,
                    may_unlock: !dry_run,
                    is_over: &NEVER,
                    on_removed: &|_| (),
                    on_failed: &|_, _| (),
                },
            )
            .unwrap();
        assert_eq!((removed.count, removed.left), (4, 0));
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn what_somebody_swaps_in_gets_neither_name_nor_attributes() {
    let dir = tempfile::tempdir().unwrap();
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    fs::create_dir(&root).unwrap();
    file(dir.path(), "outside", 0o600);
    let before = fs::metadata(&outside).unwrap();
    let untouched = || {
        let now = fs::metadata(&outside).unwrap();
        assert_eq!((now.mode(), now.uid(), now.mtime()), (before.mode(), before.uid(), before.mtime()));
    };
    let tree = tree_with(&root, false, false, Trust::Operator);
    let put = |identity| tree.put_in_place(b"", &tree.find(b"f").unwrap(), (c"temp", identity), Some(0o644));
    fs::write(root.join("f"), "what was there").unwrap();
    fs::set_permissions(root.join("f"), fs::Permissions::from_mode(0o666)).unwrap();
    // A link where the temporary file was; another file; the same file with a second name.
    let identity = file(&root, "temp", 0o644);
    fs::rename(root.join("temp"), root.join("aside")).unwrap();
    symlink(&outside, root.join("temp")).unwrap();
    assert!(put(identity).unwrap_err().to_string().contains("replaced"));
    fs::remove_file(root.join("temp")).unwrap();
    fs::write(root.join("temp"), "another").unwrap();
    assert!(put(identity).unwrap_err().to_string().contains("replaced"));
    fs::remove_file(root.join("temp")).unwrap();
    fs::hard_link(root.join("aside"), root.join("temp")).unwrap();
    assert!(put(identity).unwrap_err().to_string().contains("replaced"));
    fs::remove_file(root.join("aside")).unwrap();
    put(identity).unwrap();
    assert_eq!(fs::metadata(root.join("f")).unwrap().mode() & 0o777, 0o666);
    // A link to something else, where a pipe was just made.
    let preserving = tree_with(&root, true, false, Trust::Operator);
    let meta = Meta { mode: 0o010_666, mtime: (5, 0), ..Meta::default() };
    symlink(&outside, root.join("pipe")).unwrap();
    let fd = fs::File::open(&root).unwrap();
    assert!(!preserving.apply_unopened((&fd, c"pipe"), FileType::Fifo, &meta, |_| true).is_none());
    untouched();
    assert!(
        !preserving.apply_unopened((&fd, c"pipe"), FileType::Symlink, &meta, |_| true).is_none(),
        "not made by the job"
    );
    let (identity, stat) = Identity::of(&fd, c"pipe").unwrap();
    preserving.remember_identity(identity, &stat);
    // Attributes of a link are its own.
    let other = preserving.apply_unopened((&fd, c"pipe"), FileType::Symlink, &meta, |_| false);
    assert!(!other.is_none(), "not the link of the record");
    let short = preserving.apply_unopened((&fd, c"pipe"), FileType::Symlink, &meta, |_| true);
    assert!(short.is_none(), "{short:?}");
    assert_eq!(fs::symlink_metadata(root.join("pipe")).unwrap().mtime(), 5);
    untouched();
}

#[test]
fn one_entry_of_a_copy_does_not_take_the_place_of_another() {
    // As where names that differ in case are one: the second comes to the place of the first.
    let dir = tempfile::tempdir().unwrap();
    let tree = tree_with(dir.path(), false, true, Trust::Operator);
    let put = |name: &CStr, content: &str| {
        let identity = file(dir.path(), "temp", 0o644);
        fs::write(dir.path().join("temp"), content).unwrap();
        let place = Place { dir: Arc::clone(&tree.root), name: name.into() };
        tree.put_in_place(b"", &place, (c"temp", identity), Some(0o644))
    };
    fs::write(dir.path().join("f"), "old").unwrap();
    put(c"f", "first").unwrap();
    for error in [
        put(c"f", "second").unwrap_err(),
        tree.symlink(b"f", b"x", &Meta::default()).unwrap_err(),
        tree.make_directory(b"f", &Meta::default()).unwrap_err(),
    ] {
        assert!(error.to_string().contains("another entry of this copy"), "{error}");
    }
    assert_eq!(fs::read_to_string(dir.path().join("f")).unwrap(), "first");
    tree.make_directory(b"d", &Meta::default()).unwrap();
    fs::write(dir.path().join("d/inner"), "").unwrap();
    assert!(put(c"d", "file").is_err() && dir.path().join("d/inner").exists());
    assert!(tree.make_directory(b"d", &Meta::default()).unwrap().is_none(), "directories become one");
}

#[test]
fn what_came_with_a_copy_is_not_removed_by_it() {
    // As where names that differ in case are one: it is here under a name that is not in the list.
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path());
    let identity = file(dir.path(), "temp", 0o644);
    tree.put_in_place(b"", &tree.find(b"Readme").unwrap(), (c"temp", identity), Some(0o644)).unwrap();
    fs::write(dir.path().join("old"), "").unwrap();
    let keep = HashSet::from([b"README".to_vec()]);
    let removed = tree
        .prune(
            b"",
            b"",
            &keep,
            c".own",
            &Remover {
                spares: &|_, _| false,
                dry_run: false,
                may_unlock: true,
                is_over: &NEVER,
                on_removed: &|_| (),
                on_failed: &|_, _| (),
            },
        )
        .unwrap();
    assert_eq!((removed.count, removed.left), (1, 1));
    assert!(dir.path().join("Readme").exists() && !dir.path().join("old").exists());
}

#[test]
fn names_of_an_earlier_attempt_are_synced_with_ours() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path());
    tree.sync_names().unwrap();
    tree.sync_later(b"", &tree.root).unwrap();
    assert!(tree.changed().many, "its file system is asked as a whole");
    tree.volumes.lose();
    assert!(tree.sync_names().is_err());
}

#[test]
fn own_names_are_told_from_others() {
    let name = temp_name(c"report.pdf", &[1; 16], &[2; 16]);
    assert!(is_own_name(name.to_bytes()));
    let long = CString::new(vec![b'a'; 255]).unwrap();
    assert!(temp_name(&long, &[1; 16], &[2; 16]).to_bytes().len() <= 255);
    for name in [&b"report.pdf"[..], b".tw-0123abcd0123abcd0123abcd0123abcd", b".thruway", b".a.tw-20240101"] {
        assert!(!is_own_name(name));
    }
    let journal = super::super::journal::name_of(&[7; 16]);
    assert!(is_own_name(journal.to_bytes()) && !is_own_name(b".thruway-notes.journal"));
    for (job, key) in [([1; 16], [1; 16]), ([2; 16], [2; 16]), ([1; 16], [2; 16])] {
        assert!((job, key) == ([1; 16], [2; 16]) || temp_name(c"report.pdf", &job, &key) != name);
    }
}

/// The record of a directory may be taken after a file in it has arrived.
#[test]
fn a_directory_that_was_made_for_its_first_file_counts_as_made() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree_with(dir.path(), false, false, Trust::Operator);
    fs::write(dir.path().join("a"), "in the way").unwrap();
    for (path, first) in [(&b"a/b"[..], &b"a/b/file"[..]), (b"new", b"new/file")] {
        tree.place(first).unwrap();
        assert!(tree.make_directory(path, &Meta::default()).unwrap().is_some(), "once");
        assert!(tree.make_directory(path, &Meta::default()).unwrap().is_none(), "not twice");
    }
    let device = dir.path().join("device");
    symlink("/dev/null", &device).unwrap();
    assert!(tree.place(b"device/file").is_err() && device.symlink_metadata().unwrap().is_symlink());
}

/// Without the names of the command, links to devices are refused at the top of the tree. Below it they are entries of the tree.
#[test]
fn links_to_devices_are_refused_only_if_the_command_may_name_them() {
    for (named, is_refused) in [(None, true), (Some(vec![b"link".to_vec()]), true), (Some(vec![Vec::new()]), false)] {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        for link in ["link", "d/link"] {
            symlink("/dev/null", dir.path().join(link)).unwrap();
        }
        let root = Arc::new(fs::File::open(dir.path()).unwrap().into());
        let manner = Manner {
            preserve: true,
            delete: false,
            replace: true,
            readable: true,
            confined: false,
            named: RootNames { names: named, ..RootNames::default() },
            trust: Trust::Operator,
        };
        let tree = Tree::new(root, manner, None, MadeBefore::default());
        assert_eq!(tree.make_directory(b"link", &Meta::default()).is_err(), is_refused);
        assert!(tree.make_directory(b"d/link", &Meta::default()).is_ok());
    }
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

/// A session ends at any moment, and the next one goes on.
#[test]
fn directories_of_an_interrupted_session_get_their_attributes_from_the_next() {
    for (mode, umask, preserve) in
        [(0o700, 0o022, false), (0o755, 0o022, false), (0o555, 0o077, false), (0o1775, 0o022, true)]
    {
        let dir = tempfile::tempdir().unwrap();
        let root: Arc<OwnedFd> = Arc::new(fs::File::open(dir.path()).unwrap().into());
        let session = || {
            let (journal, mut earlier) = Journal::open(&root, &[1; 16]).unwrap();
            let manner = Manner {
                preserve,
                delete: false,
                replace: true,
                readable: true,
                confined: false,
                named: RootNames::default(),
                trust: Trust::Operator,
            };
            let mut tree = Tree::new(Arc::clone(&root), manner, Some(Arc::new(journal)), earlier.take_made());
            tree.umask = umask;
            tree
        };
        let meta = Meta { mode: 0o040_000 | mode, ..Meta::default() };
        let expected = if preserve { mode } else { mode & !umask };
        let path = dir.path().join("d/inner");
        fs::create_dir(dir.path().join("other")).unwrap();
        fs::set_permissions(dir.path().join("other"), fs::Permissions::from_mode(0o750)).unwrap();
        // The session ends before the record comes.
        session().place(b"d/inner/file").unwrap();
        assert_eq!((mode_of(&dir.path().join("d")), mode_of(&path)), (0o700, 0o700), "until the record comes");
        for attempt in 0..2 {
            // Before the attributes are applied, and after it.
            let tree = session();
            let made = tree.make_directory(b"d/inner", &meta).unwrap();
            assert!(made.is_some(), "made by this job");
            assert_eq!(mode_of(&path) & !expected & !0o700, 0, "not wider than it is to be");
            assert!(tree.make_directory(b"other", &meta).unwrap().is_none(), "was there before the job");
            if attempt == 1 {
                tree.finish_directory(b"d/inner", &meta, made).unwrap();
                tree.settle();
            }
        }
        assert_eq!(mode_of(&path), expected);
        let tree = session();
        assert!(tree.make_directory(b"d/inner", &meta).unwrap().is_none(), "is there with its attributes");
        assert!(tree.finish_early().is_empty());
        assert_eq!(mode_of(&dir.path().join("other")), 0o750);
    }
}

#[test]
fn directories_without_records_get_the_permissions_of_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = tree_with(dir.path(), false, false, Trust::Operator);
    tree.umask = 0o027;
    tree.place(b"a/b/file").unwrap();
    let modes = || [mode_of(&dir.path().join("a")), mode_of(&dir.path().join("a/b"))];
    assert_eq!(modes(), [0o700; 2]);
    assert!(tree.finish_early().is_empty());
    assert_eq!(modes(), [0o750; 2]);
}

#[test]
fn a_file_does_not_take_the_place_of_a_directory_that_was_made_for_another_file() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree_with(dir.path(), false, true, Trust::Operator);
    tree.place(b"d/file").unwrap();
    // As where names that differ in case are one.
    let identity = file(dir.path(), "temp", 0o644);
    let error = tree.put_in_place(b"", &tree.find(b"d").unwrap(), (c"temp", identity), Some(0o644)).unwrap_err();
    assert!(error.to_string().contains("another entry of this copy"), "{error}");
}

/// A key with the right to create files could otherwise read and change others under a name for which it has more rights.
#[test]
fn a_source_without_rights_links_only_to_files_of_its_own_job() {
    for (replace, readable) in [(false, false), (true, false), (false, true), (true, true)] {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), "secret", 0o600);
        let root = Arc::new(fs::File::open(dir.path()).unwrap().into());
        let trust = Trust::Peer;
        let manner = Manner {
            preserve: true,
            delete: false,
            replace,
            readable,
            confined: true,
            named: RootNames::default(),
            trust,
        };
        let tree = Tree::new(root, manner, None, MadeBefore::default());
        assert!(tree.link(b"link", b"secret").is_err(), "it is not known");
        let (identity, stat) = Identity::of(&tree.root, c"secret").unwrap();
        tree.remember_linkable(identity, &stat);
        let linked = tree.link(b"link", b"secret");
        assert_eq!(linked.is_ok(), replace && readable, "{linked:?}");
        assert_eq!(dir.path().join("link").exists(), linked.is_ok());
        // An equal entry of somebody else counts as copied, and gives no right to link to it.
        rustix::fs::mknodat(&tree.root, c"pipe", FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let meta = Meta { mode: 0o010_666, ..Meta::default() };
        assert_eq!(tree.special(b"pipe", &meta, 0).is_ok(), replace || readable);
        assert_eq!(tree.link(b"piped", b"pipe").is_ok(), replace, "{replace} {readable}");
        assert_eq!(mode_of(&dir.path().join("pipe")), if replace { 0o666 } else { 0o600 });
        let identity = file(dir.path(), "temp", 0o644);
        tree.put_in_place(b"", &tree.find(b"own").unwrap(), (c"temp", identity), Some(0o644)).unwrap();
        tree.link(b"second", b"own").unwrap();
        tree.link(b"third", b"second").unwrap();
        assert_eq!(fs::metadata(dir.path().join("third")).unwrap().nlink(), 3);
    }
}

#[test]
fn a_hard_link_in_place_of_a_source_of_the_command_is_no_symbolic_link() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = tree(dir.path());
    symlink("/etc", dir.path().join("link")).unwrap();
    file(dir.path(), "f", 0o644);
    for name in [c"link", c"f"] {
        let (identity, stat) = Identity::of(&tree.root, name).unwrap();
        tree.remember_linkable(identity, &stat);
    }
    tree.manner.named = RootNames::destination(b"new".to_vec());
    assert!(tree.link(b"new", b"link").unwrap_err().to_string().contains("cannot be a link"));
    tree.link(b"other", b"link").unwrap();
    tree.link(b"new", b"f").unwrap();
}

#[test]
fn a_directory_replaces_entries_below_the_destination_but_not_the_destination() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["f", "other"] {
        fs::write(dir.path().join(name), "precious").unwrap();
    }
    symlink("f", dir.path().join("link")).unwrap();
    let mut tree = tree_with(dir.path(), false, true, Trust::Operator);
    for name in ["f", "link"] {
        tree.manner.named = RootNames::destination(name.into());
        let error = tree.make_directory(name.as_bytes(), &Meta::default()).unwrap_err();
        assert!(error.to_string().contains("not a directory"), "{error}");
        assert!(tree.place(format!("{name}/file").as_bytes()).is_err(), "before its record");
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), "precious");
    }
    assert!(tree.make_directory(b"other", &Meta::default()).unwrap().is_some());
}

#[test]
fn paths_of_directories_without_records_are_kept_up_to_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree_with(dir.path(), false, false, Trust::Operator);
    tree.early.lock().unwrap().bytes = EARLY_BYTES_MAX;
    let deep = [&b"a/"[..]; 500].concat();
    tree.place(&[&deep, &b"file"[..]].concat()).unwrap();
    assert!(tree.early.lock().unwrap().paths.is_empty());
    assert!(
        tree.make_directory(b"a", &Meta { mode: 0o040_755, ..Meta::default() }).unwrap().is_some(),
        "made by this job"
    );
    assert_eq!(mode_of(&dir.path().join("a")) & 0o700, 0o700);
}

#[test]
fn one_task_makes_a_limited_number_of_directories() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path());
    let deep = ["a"; 3 * LEVELS_AT_A_TIME + 1].join("/");
    let depth = || std::iter::successors(Some(dir.path().join("a")), |path| Some(path.join("a")));
    for part in 1..=3 {
        assert!(!tree.make_part_above(format!("{deep}/f").as_bytes()).unwrap());
        assert_eq!(depth().take_while(|path| path.exists()).count(), part * LEVELS_AT_A_TIME);
    }
    assert!(tree.make_part_above(format!("{deep}/f").as_bytes()).unwrap());
    assert!(dir.path().join(&deep).is_dir());
    // The directories of other entries are made with the entries.
    assert!(tree.make_part_above(b"b/f").unwrap() && !dir.path().join("b").exists());
}

/// An attempt that ends leaves its directories to the next one, which gives them their modes.
#[test]
fn directories_that_workers_make_at_the_same_time_are_recorded_as_made() {
    let dir = tempfile::tempdir().unwrap();
    let root: Arc<OwnedFd> = Arc::new(fs::File::open(dir.path()).unwrap().into());
    let mut tree = tree(dir.path());
    tree.journal = Some(Arc::new(Journal::open(&root, &[1; 16]).unwrap().0));
    let names: Vec<String> = (0..200).map(|number| number.to_string()).collect();
    let start = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (tree, names, start) = (&tree, &names, &start);
            scope.spawn(move || {
                for name in names {
                    start.wait();
                    if worker % 2 == 0 {
                        tree.make_directory(name.as_bytes(), &Meta::default()).unwrap();
                    } else {
                        tree.place(format!("{name}/file").as_bytes()).unwrap();
                    }
                }
            });
        }
    });
    drop(tree);
    let made = Journal::open(&root, &[1; 16]).unwrap().1.take_made().directories;
    let lost: Vec<_> =
        names.iter().filter(|name| !matches!(made.get(&key_of(name.as_bytes())), Some(Made::Done(_)))).collect();
    assert!(lost.is_empty(), "{lost:?}");
}

/// Another user replaces the directories of a job, within a session and between two.
#[test]
fn attributes_of_a_job_go_to_its_own_directories_only() {
    for (name, preserve) in [("a", false), ("b", true)] {
        let dir = tempfile::tempdir().unwrap();
        let root: Arc<OwnedFd> = Arc::new(fs::File::open(dir.path()).unwrap().into());
        let session = || {
            let (journal, mut earlier) = Journal::open(&root, &[1; 16]).unwrap();
            let mut tree = tree_with(dir.path(), preserve, false, Trust::Operator);
            tree.manner.replace = false;
            tree.journal = Some(Arc::new(journal));
            tree.made_before = Mutex::new(earlier.take_made().directories);
            tree
        };
        let (path, meta) = (dir.path().join(name), Meta { mode: 0o040_777, ..Meta::default() });
        let replace = || {
            fs::rename(&path, dir.path().join("old")).unwrap();
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            fs::remove_dir(dir.path().join("old")).unwrap();
        };
        let tree = session();
        let made = tree.make_directory(name.as_bytes(), &meta).unwrap();
        assert!(made.is_some());
        replace();
        // A second record of the directory does not make it one of the job.
        assert!(tree.make_directory(name.as_bytes(), &meta).unwrap().is_none());
        tree.finish_directory(name.as_bytes(), &meta, made).unwrap();
        drop(tree);
        let tree = session();
        assert!(tree.make_directory(name.as_bytes(), &meta).unwrap().is_none(), "made by another user");
        drop(tree);
        fs::remove_dir(&path).unwrap();
        let tree = session();
        tree.place(format!("{name}/file").as_bytes()).unwrap();
        replace();
        assert!(tree.finish_early().is_empty());
        assert_eq!(mode_of(&path), 0o700);
    }
}

/// A link changes the change time of its file. The next attempt compares that time.
#[test]
fn a_file_that_got_another_name_is_recorded_still() {
    let dir = tempfile::tempdir().unwrap();
    let root: Arc<OwnedFd> = Arc::new(fs::File::open(dir.path()).unwrap().into());
    let (key, version) = (key_of(b"f"), Version { size: 1, mtime: (1, 0), ctime: (2, 0) });
    let present = || {
        let (identity, stat) = Identity::of(&root, c"f").unwrap();
        Present { identity, ctime: nanoseconds(stat.stx_ctime), age: std::cmp::Ordering::Less }
    };
    let (journal, _) = Journal::open(&root, &[1; 16]).unwrap();
    let mut tree = tree(dir.path());
    tree.journal = Some(Arc::new(journal));
    file(dir.path(), "f", 0o644);
    let Present { identity, ctime, .. } = present();
    tree.journal.as_ref().unwrap().placed([(&key, &version, identity, ctime, false)].into_iter());
    tree.remember_identity(identity, &Identity::of(&root, c"f").unwrap().1);
    fs::write(dir.path().join("second"), "in the way").unwrap();
    for name in ["first", "second"] {
        tree.link(name.as_bytes(), b"f").unwrap();
    }
    assert_eq!(fs::metadata(dir.path().join("f")).unwrap().nlink(), 3);
    let judge = |present| {
        let (_, earlier) = Journal::open(&root, &[1; 16]).unwrap();
        earlier.judge((&key, &version), Some(present), false, || None)
    };
    drop(tree);
    assert!(matches!(judge(present()), ResumeDecision::Placed { lacking: false }));
    // A change by somebody else does not count as one of the job.
    fs::set_permissions(dir.path().join("f"), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(matches!(judge(present()), ResumeDecision::Missing));
}

/// With `-u`, another user can write to a file of the right size and time before it gets its attributes.
#[test]
fn attributes_that_give_more_rights_do_not_go_to_files_of_other_users() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path());
    let path = |name: &str| dir.path().join(name);
    file(dir.path(), "h", 0o755);
    std::os::unix::fs::chown(path("h"), Some(1234), Some(1234)).unwrap();
    let (identity, stat) = Identity::of(fs::File::open(path("h")).unwrap(), c"").unwrap();
    let plain = Meta { mode: 0o100_711, size: stat.stx_size, uid: 1234, gid: 1234, ..Meta::default() };
    let capabilities = vec![(CAPABILITIES.to_bytes().to_vec(), [&[1, 0, 0, 2, 1 << 7], &[0; 15][..]].concat())];
    let grants = [
        Meta { uid: 0, ..plain.clone() },
        Meta { gid: 0, mode: 0o102_711, ..plain.clone() },
        Meta { xattrs: capabilities, ..plain.clone() },
    ];
    for meta in grants {
        assert!(tree.refresh(b"h", &meta, identity, (false, None)).unwrap_err().to_string().contains("changed"));
    }
    assert_eq!(mode_of(&path("h")), 0o755);
    tree.refresh(b"h", &plain, identity, (false, None)).unwrap();
    assert_eq!(mode_of(&path("h")), 0o711);
}

/// Without its access control list, a file does not give its group the rights of the mask.
#[test]
fn a_list_that_cannot_be_set_gives_no_rights_to_the_group() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path());
    // The kernel refuses a list without a mask.
    let list = [2, 0, 0, 0].into_iter().chain([1, 0, 6, 0].into_iter().chain([255; 4]));
    let refused: Vec<u8> = list.chain([2, 0, 6, 0, 77, 0, 0, 0]).collect();
    let meta =
        Meta { mode: 0o100_664, size: 1, xattrs: vec![(ACCESS_ACL.to_bytes().to_vec(), refused)], ..Meta::default() };
    for (number, before) in [Before::Nothing, Before::Inherited, Before::Anything].into_iter().enumerate() {
        let name = format!("f{number}");
        file(dir.path(), &name, 0o600);
        let opened = fs::File::open(dir.path().join(&name)).unwrap();
        assert!(!tree.apply(opened.as_fd(), &meta, false, &before).is_none());
        assert_eq!(mode_of(&dir.path().join(&name)), 0o600, "{before:?}");
    }
}

/// The owner sets the mode again and again until the directory belongs to the user of the source.
#[test]
fn the_owner_of_an_existing_directory_cannot_keep_its_rights() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (tree, path) = (tree(dir.path()), dir.path().join("d"));
    fs::create_dir(&path).unwrap();
    let is_over = AtomicBool::new(false);
    let owner = thruway_fs::credentials::Credentials { uid: 1234, gid: 1234, groups: Vec::new() };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let open = || fs::set_permissions(&path, fs::Permissions::from_mode(0o777));
            let until_over = || {
                while !is_over.load(Ordering::SeqCst) {
                    drop(open())
                }
            };
            thruway_fs::credentials::act_as(&owner, until_over).unwrap();
        });
        let mut modes = Vec::new();
        for _ in 0..500 {
            std::os::unix::fs::chown(&path, Some(1234), Some(1234)).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
            tree.narrow(fs::File::open(&path).unwrap().as_fd(), &Meta { mode: 0o700, ..Meta::default() });
            modes.push(mode_of(&path));
        }
        is_over.store(true, Ordering::SeqCst);
        assert!(modes.iter().all(|mode| *mode == 0o700), "{modes:?}");
    });
}

/// A record has the access control lists of its entry even if it leaves out other attributes, except if they could not be read.
#[test]
fn lists_that_the_source_does_not_have_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, path) = (tree(dir.path()), dir.path().join("d"));
    let user = vec![(b"user.a".to_vec(), b"1".to_vec())];
    let known = Meta { mode: 0o770, xattrs: user, xattrs_partial: true, ..Meta::default() };
    let mut unknown = Meta { mode: 0o770, ..Meta::default() };
    unknown.set_partial();
    for (meta, wanted) in [(known, [(false, 0o770); 2]), (unknown, [(true, 0o700); 2])] {
        for (with_narrow, (has_list, mode)) in [true, false].into_iter().zip(wanted) {
            fs::create_dir(&path).unwrap();
            let list = thruway_fs::acl::Acl::new(
                [(Who::Owner, 7), (Who::User(1234), 7), (Who::OwningGroup, 7), (Who::Mask, 0), (Who::Others, 0)]
                    .map(|(who, permissions)| thruway_fs::acl::Entry { who, permissions })
                    .to_vec(),
            );
            let opened = fs::File::open(&path).unwrap();
            thruway_fs::xattr::write(opened.as_fd(), ACCESS_ACL.to_bytes(), &list.unwrap().encode()).unwrap();
            if with_narrow {
                tree.narrow(opened.as_fd(), &meta);
            }
            tree.apply(opened.as_fd(), &meta, false, &Before::Anything);
            assert_eq!((thruway_fs::xattr::has_access_acl(opened.as_fd()), mode_of(&path)), (has_list, mode));
            fs::remove_dir(&path).unwrap();
        }
    }
}

/// A key that may only create, and an owner who replaces entries of its job while a session is open.
#[test]
fn rights_of_a_job_do_not_pass_to_entries_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = tree(dir.path());
    (tree.manner.replace, tree.manner.readable, tree.privileged) = (false, false, false);
    let path = |name: &str| dir.path().join(name);
    let replace = |name: &str, mode| {
        fs::write(path("new"), name).unwrap();
        fs::set_permissions(path("new"), fs::Permissions::from_mode(mode)).unwrap();
        fs::rename(path("new"), path(name)).unwrap();
    };
    // A link to a file of the job.
    let identity = file(dir.path(), "f", 0o644);
    let (_, stat) = Identity::of(fs::File::open(path("f")).unwrap(), c"").unwrap();
    tree.remember_identity(identity, &stat);
    tree.link(b"of the job", b"f").unwrap();
    tree.link(b"of the job, too", b"f").unwrap();
    // The same file, which its owner has closed since.
    fs::set_permissions(path("f"), fs::Permissions::from_mode(0o600)).unwrap();
    let error = tree.link(b"of the owner", b"f").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    replace("f", 0o600);
    let error = tree.link(b"of the owner", b"f").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    // Attributes of a file that was offered.
    let identity = file(dir.path(), "g", 0o644);
    replace("g", 0o600);
    let meta = Meta { mode: 0o100_666, size: 1, ..Meta::default() };
    assert!(tree.refresh(b"g", &meta, identity, (true, None)).unwrap_err().to_string().contains("changed"));
    assert_eq!(mode_of(&path("g")), 0o600);
    // The same file, which its owner has changed since.
    let (identity, stat) = Identity::of(fs::File::open(path("g")).unwrap(), c"").unwrap();
    let meta = Meta { size: stat.stx_size, ..meta };
    let changed = nanoseconds(stat.stx_ctime);
    assert!(
        tree.refresh(b"g", &meta, identity, (true, Some(changed - 1))).unwrap_err().to_string().contains("changed")
    );
    assert_eq!(mode_of(&path("g")), 0o600);
    tree.refresh(b"g", &meta, identity, (true, Some(changed))).unwrap();
    // A directory without the right to write, of another user of this daemon's.
    fs::create_dir(path("d")).unwrap();
    fs::set_permissions(path("d"), fs::Permissions::from_mode(0o555)).unwrap();
    assert!(!tree.unlock(b"d"));
    tree.manner.replace = true;
    assert!(tree.unlock(b"d"));
    assert!(tree.unlock(b"d"), "for a worker that was refused before");
    assert_eq!(mode_of(&path("d")), 0o755);
    fs::set_permissions(path("d"), fs::Permissions::from_mode(0o700)).unwrap();
    tree.lock_again();
    assert_eq!(mode_of(&path("d")), 0o700, "the owner has changed it");
    fs::set_permissions(path("d"), fs::Permissions::from_mode(0o577)).unwrap();
    assert!(tree.unlock(b"d"));
    fs::rename(path("d"), path("old")).unwrap();
    fs::create_dir(path("d")).unwrap();
    fs::set_permissions(path("d"), fs::Permissions::from_mode(0o777)).unwrap();
    tree.lock_again();
    assert_eq!(mode_of(&path("d")), 0o777, "another directory");
}

#[test]
fn a_directory_in_the_way_is_removed_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree_with(dir.path(), false, true, Trust::Operator);
    fs::create_dir(dir.path().join("d")).unwrap();
    (0..20_000).for_each(|i| fs::write(dir.path().join(format!("d/{i}")), "").unwrap());
    let mut clearing = tree.clearing(b"d", tree.in_the_way(b"d", true).unwrap().unwrap(), true).unwrap();
    let (mut looks, mut parts) = (1, 1);
    while !clearing.look(&tree.over, Some(std::time::Instant::now()), &|_| ()).unwrap() {
        looks += 1;
    }
    assert_eq!(clearing.contents(), 20_000);
    while !clearing.remove(&tree.over, Some(std::time::Instant::now())).unwrap() {
        parts += 1;
    }
    assert!(looks > 20_000 && parts > 20_000 && !dir.path().join("d").exists(), "{looks} {parts}");
    assert_eq!(clearing.removed(), 20_000);
    tree.symlink(b"d", b"t", &Meta::default()).unwrap();
}

#[test]
fn nothing_is_cleared_when_the_session_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree_with(dir.path(), false, true, Trust::Operator);
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/precious"), "").unwrap();
    let identity = file(dir.path(), ".temp", 0o644);
    tree.over.store(true, std::sync::atomic::Ordering::SeqCst);
    assert!(tree.put_in_place(b"", &tree.find(b"d").unwrap(), (c".temp", identity), Some(0o644)).is_err());
    assert!(dir.path().join("d/precious").exists());
}

#[test]
fn an_older_entry_under_the_name_of_a_new_one_gives_no_rights() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = tree_with(dir.path(), true, false, Trust::Peer);
    fs::create_dir(dir.path().join("private")).unwrap();
    symlink("secret", dir.path().join("link")).unwrap();
    file(dir.path(), "secret", 0o600);
    let born = |name: &CStr| Identity::of(&tree.root, name).unwrap().0.born;
    let since = born(c"private").max(born(c"link")) + 1;
    let find = |tree: &Tree, name: &str| tree.find(name.as_bytes()).unwrap();
    assert_eq!(tree.identify(&find(&tree, "private"), since).unwrap().is_some(), !is_local(&tree.root));
    tree.manner.replace = false;
    assert!(tree.identify(&find(&tree, "private"), since).unwrap().is_none());
    assert!(tree.identify(&find(&tree, "private"), 0).unwrap().is_some());
    assert!(tree.identify(&find(&tree, "secret"), 0).unwrap().is_none(), "no directory");
    // A file in place of a directory that was remembered is not one to link.
    tree.remember_directory(&find(&tree, "secret"));
    assert!(tree.link(b"got", b"secret").unwrap_err().to_string().contains("requires the rights"));
    let meta = Meta { mtime: (1, 0), ..Meta::default() };
    let modified = || fs::symlink_metadata(dir.path().join("link")).unwrap().mtime();
    let short = tree.apply_unopened((&tree.root, c"link"), FileType::Symlink, &meta, |_| true);
    assert!(!short.is_none() && modified() != 1);
    tree.symlink(b"own", b"t", &meta).unwrap();
    assert_eq!(fs::symlink_metadata(dir.path().join("own")).unwrap().mtime(), 1);
}

#[test]
fn a_new_file_gets_its_mode_although_it_was_to_replace_another() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = tree_with(dir.path(), false, false, Trust::Operator);
    tree.umask = 0o027;
    // The file that gives permissions is removed during the copy, or somebody puts another into a directory for all users.
    for (name, has_other) in [("gone", false), ("sticky/other", true)] {
        let path = dir.path().join(name);
        let parent = path.parent().unwrap();
        fs::create_dir_all(parent).unwrap();
        if has_other {
            fs::set_permissions(parent, fs::Permissions::from_mode(0o1777)).unwrap();
            file(parent, "other", 0o666);
            std::os::unix::fs::chown(&path, Some(65534), Some(65534)).unwrap();
        }
        let identity = file(parent, ".temp", 0o600);
        let place = tree.place(name.as_bytes()).unwrap();
        let (above, _) = split(name.as_bytes());
        tree.put_in_place(above, &place, (c".temp", identity), Some(0o100_664)).unwrap();
        assert_eq!((mode_of(&path), fs::metadata(&path).unwrap().uid()), (0o640, 0), "{name}");
    }
}

/// A file system that is unmounted when dropped.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        assert!(std::process::Command::new("umount").arg(self.0).status().unwrap().success());
    }
}

#[test]
fn exchanged_directories_get_no_attributes_on_overlays_either() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for name in ["plain", "lower", "upper", "work", "merged"] {
        fs::create_dir(path(name)).unwrap();
    }
    for layer in ["plain", "lower"] {
        fs::create_dir(path(layer).join("read-only")).unwrap();
        fs::set_permissions(path(layer).join("read-only"), fs::Permissions::from_mode(0o555)).unwrap();
    }
    let layers = ["lower", "upper", "work"].map(|name| format!("{name}dir={}", path(name).display())).join(",");
    let merged = path("merged");
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "overlay", "overlay", "-o", &layers]).arg(&merged);
    assert!(mount.status().unwrap().success(), "an overlay can be mounted");
    let _mounted = Mounted(&merged);
    for root in [&path("plain"), &merged] {
        fs::create_dir(root.join("private")).unwrap();
        fs::set_permissions(root.join("private"), fs::Permissions::from_mode(0o700)).unwrap();
        let mut tree = tree(root);
        let meta = Meta { mode: 0o040_777, ..Meta::default() };
        let mut made = Vec::new();
        for name in ["kept", "exchanged"] {
            made.push(tree.make_directory(name.as_bytes(), &meta).unwrap().unwrap());
        }
        fs::rename(root.join("exchanged"), root.join("away")).unwrap();
        fs::rename(root.join("private"), root.join("exchanged")).unwrap();
        tree.finish_directory(b"kept", &meta, Some(made[0])).unwrap();
        let error = tree.finish_directory(b"exchanged", &meta, Some(made[1])).unwrap_err();
        assert!(error.to_string().contains("another directory"), "{error}");
        assert_eq!((mode_of(&root.join("kept")), mode_of(&root.join("exchanged"))), (0o777, 0o700));
        // A directory made for an entry before its own record came.
        tree.place(b"early/file").unwrap();
        fs::rename(root.join("early"), root.join("moved")).unwrap();
        fs::rename(root.join("exchanged"), root.join("early")).unwrap();
        let error = tree.make_directory(b"early", &meta).unwrap_err();
        assert!(error.to_string().contains("another directory"), "{error}");
        assert_eq!(mode_of(&root.join("early")), 0o700);
        // One of the lower layer gets another time of birth with the first change.
        tree.privileged = false;
        assert!(tree.unlock(b"read-only"));
        assert_eq!(mode_of(&root.join("read-only")), 0o755);
        tree.lock_again();
        assert_eq!(mode_of(&root.join("read-only")), 0o555);
    }
}
