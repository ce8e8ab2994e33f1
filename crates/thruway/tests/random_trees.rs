//! Copies of random trees onto random trees, with random options and in every direction, compared with a model of the options.
//!
//! Some copies get a signal or an error at a random system call of either end, and are then repeated. At that moment, every name has
//! its old or its new content, and no new entry gives other users more access than its source.
//!
//! `THRUWAY_SEEDS=FIRST..LAST` selects other seeds. `THRUWAY_KEEP=DIR` keeps the trees of a failure in DIR.

mod support;

use fastrand::Rng;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags, makedev};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::SystemTime;
use support::*;
use thruway_fs::acl::{Acl, Entry as Right, Who};

/// Names of entries: one is not UTF-8, two look like patterns.
const NAMES: [&[u8]; 8] = [b"a", b"b", b"c", b"d", b"e f", b"\xff", b"[b]", b"*"];

/// The modes of files and directories in sources of users without root: they can read all of them.
const FILE_MODES: [u32; 7] = [0o600, 0o644, 0o755, 0o444, 0o4755, 0o2750, 0o400];
const DIRECTORY_MODES: [u32; 5] = [0o700, 0o755, 0o500, 0o2755, 0o1777];

/// System calls that change files, or that a copy waits for.
const CALLS: [&str; 20] = [
    "openat",
    "renameat2",
    "renameat",
    "linkat",
    "unlinkat",
    "mkdirat",
    "fchmod",
    "fchmodat",
    "fchownat",
    "fchown",
    "utimensat",
    "fsync",
    "fdatasync",
    "symlinkat",
    "mknodat",
    "fsetxattr",
    "ftruncate",
    "fallocate",
    "getdents64",
    "flock",
];

/// One entry of a tree.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    kind: FileType,
    /// Hash of a file's bytes, target of a link, number of a device.
    content: Vec<u8>,
    size: u64,
    kept: Kept,
    /// Device, number and time of birth. Hard links have the same.
    identity: Identity,
    changed: (i64, i64),
}

/// The attributes that `-p` keeps.
#[derive(Clone, Debug, PartialEq)]
struct Kept {
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    attributes: BTreeMap<OsString, Vec<u8>>,
}

type Identity = (u64, u64, SystemTime);

/// Entries by path below the root. The path of the root is empty.
type Tree = BTreeMap<PathBuf, Entry>;

fn entry(path: &Path) -> Entry {
    let meta = fs::symlink_metadata(path).unwrap();
    let kind = meta.file_type();
    let content = if kind.is_symlink() {
        fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec()
    } else if kind.is_file() {
        blake3::hash(&fs::read(path).unwrap()).as_bytes().to_vec()
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

fn tree(root: &Path) -> Tree {
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
fn links(tree: &Tree) -> BTreeSet<BTreeSet<PathBuf>> {
    let mut names: BTreeMap<Identity, BTreeSet<PathBuf>> = BTreeMap::new();
    for (path, entry) in tree.iter().filter(|(_, entry)| entry.kind != FileType::Directory) {
        names.entry(entry.identity).or_default().insert(path.clone());
    }
    names.into_values().collect()
}

/// Makes random trees.
struct Maker<'a> {
    random: &'a mut Rng,
    /// A directory that no copy may change.
    outside: &'a Path,
    /// Make entries of several owners. The copy then runs as root.
    owners: bool,
    /// Make pipes and devices.
    specials: bool,
    destination: bool,
    files: Vec<PathBuf>,
}

impl Maker<'_> {
    fn one_in(&mut self, n: u32) -> bool {
        self.random.u32(..n) == 0
    }

    fn fill(&mut self, dir: &Path, depth: u32) {
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
                60..64 if self.destination && self.owners => {
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
    fn date(&mut self, path: &Path) {
        let seconds = 1_000_000_000 + *self.random.choice(&[0, 0, 1, 2]).unwrap();
        let nanoseconds = *self.random.choice(&[0, 0, 0, 1, 999_999_999]).unwrap();
        let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Local,
    Push,
    Pull,
    Ssh,
}

/// A fault in one system call.
#[derive(Clone, Debug)]
struct Fault {
    /// In the daemon, and not in `thruway cp`.
    at_daemon: bool,
    call: &'static str,
    /// The rest of an `inject` expression of strace.
    what: String,
}

impl Fault {
    fn new(random: &mut Rng, way: Way) -> Fault {
        let call = *random.choice(&CALLS).unwrap();
        let errors = ["error=EIO", "error=ENOSPC", "error=EMFILE", "error=ENOMEM", "error=EDQUOT"];
        let what = if random.u32(..5) < 3 { "signal=KILL" } else { *random.choice(&errors).unwrap() };
        let when = if random.u32(..4) == 0 { random.u32(1..60) } else { random.u32(1..12) };
        let at_daemon = matches!(way, Way::Push | Way::Pull) && random.bool();
        Fault { at_daemon, call, what: format!("{what}:when={when}") }
    }

    fn inject(&self) -> String {
        format!("{}:{}", self.call, self.what)
    }
}

/// Two trees, and the options and direction of the copy between them.
struct Case {
    seed: u64,
    way: Way,
    lab: Lab,
    /// Directories that the daemon exports.
    exports: PathBuf,
    source: PathBuf,
    /// A second source for the same target.
    second: Option<PathBuf>,
    target: PathBuf,
    outside: PathBuf,
    options: Vec<OsString>,
    umask: u32,
    /// With `-p`.
    preserve: bool,
    update: bool,
    delete: bool,
    excluded: Option<&'static str>,
    /// The source is given without a slash, so the target gets its name.
    named: bool,
    owners: bool,
    daemon: Option<Daemon>,
    /// The faults of earlier attempts, and how these ended.
    faults: Vec<String>,
}

impl Case {
    fn new(seed: u64, way: Way) -> (Case, Rng) {
        let mut random = Rng::with_seed(seed);
        let lab = Lab::new();
        fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (exports, outside, _) = (lab.mkdir("exports"), lab.mkdir("outside"), lab.mkdir("home"));
        fs::write(outside.join("file"), "outside").unwrap();
        for name in ["shared0", "shared1", "shared2"] {
            fs::write(outside.join(name), "xxx").unwrap();
        }
        // Some copies run as a user without rights, who owns all entries.
        let owners = random.u32(..4) != 0 || way == Way::Ssh;
        let (named, preserve) = (random.u32(..3) == 0, random.u32(..3) != 0);
        let umask = *random.choice(&[0o022, 0o022, 0o077, 0o027, 0]).unwrap();
        let source = exports.join("from/tree");
        let target = exports.join(if named { "to/tree" } else { "to" });
        let (files, random_ref) = (Vec::new(), &mut random);
        let mut maker =
            Maker { random: random_ref, outside: &outside, owners, specials: preserve, destination: false, files };
        maker.fill(&source, 0);
        let start = maker.random.u32(..10);
        if start < 6 {
            (maker.destination, maker.specials) = (true, true);
            maker.files.clear();
            maker.fill(&target, 0);
        } else if start < 9 {
            let parent = target.parent().unwrap();
            fs::create_dir_all(parent).unwrap();
            assert!(Command::new("cp").arg("-a").args([&source, &target]).status().unwrap().success());
            for path in tree(&target).keys().filter(|path| !path.as_os_str().is_empty()) {
                if maker.one_in(3) {
                    maker.date(&target.join(path));
                }
            }
        } else if named {
            fs::create_dir_all(target.parent().unwrap()).unwrap();
        }
        let second = (!named && random.u32(..4) == 0).then(|| exports.join("second"));
        if let Some(second) = &second {
            fs::create_dir(second).unwrap();
            for name in fs::read_dir(&source).unwrap().map(|entry| entry.unwrap().file_name()) {
                if random.bool() {
                    fs::rename(source.join(&name), second.join(&name)).unwrap();
                }
            }
        }
        let (update, delete) = (random.bool(), random.u32(..5) < 3);
        let excluded = (random.u32(..4) == 0).then(|| random.choice(["b", "a/*", "[[]b]"]).unwrap());
        let mut options: Vec<OsString> = vec![if preserve { "-a" } else { "-r" }.into()];
        options.extend(update.then(|| "-u".into()));
        options.extend(delete.then(|| "--delete".into()));
        options.extend(excluded.iter().flat_map(|pattern| ["--exclude".into(), pattern.into()]));
        if !owners {
            let everything = [&exports, &outside, &lab.path("home")]
                .map(|path| Command::new("chown").args(["-R", "-h", "65534:65534"]).arg(path).status());
            assert!(everything.into_iter().all(|status| status.unwrap().success()));
            lchown(lab.dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let daemon = None;
        let case = Case {
            seed,
            way,
            lab,
            exports,
            source,
            second,
            target,
            outside,
            options,
            umask,
            preserve,
            update,
            delete,
            excluded,
            named,
            owners,
            daemon,
            faults: Vec::new(),
        };
        (case, random)
    }

    /// A command that runs the program as the user of this case, with a fault under strace.
    fn program(&self, fault: Option<&Fault>) -> Command {
        let umask = format!("umask {:o}; exec \"$@\"", self.umask);
        let mut words: Vec<OsString> = ["sh", "-c", &umask, "sh"].map(OsString::from).to_vec();
        if !self.owners {
            words.extend(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"].map(OsString::from));
        }
        if let Some(fault) = fault {
            words.push("strace".into());
            words.extend(strace_options(&fault.inject()).into_iter().map(OsString::from));
        }
        words.push(self.lab.program_for_all().into_os_string());
        let mut command = Command::new(&words[0]);
        let home = self.lab.path("home");
        command.args(&words[1..]).env("HOME", &home).env("XDG_CONFIG_HOME", &home).env("THRUWAY_LOG", "error");
        command
    }

    fn start_daemon(&mut self) {
        if matches!(self.way, Way::Push | Way::Pull) {
            let mut command = self.program(None);
            // The address is a part of a job's identity.
            let address = self.daemon.take().map_or("127.0.0.1:0".into(), |daemon| daemon.addr.clone());
            command.args(["serve", "--json", "--listen", &address, "--state"]).arg(self.lab.path("state"));
            command.arg("--export").arg(export("e", &self.exports, ":rw")).stderr(Stdio::null());
            self.daemon = Some(Daemon::start_by(&mut command));
        }
    }

    /// Copies with a fault. The copy succeeds if it does not make the system call.
    fn run_with_fault(&mut self, fault: &Fault) -> Output {
        if !fault.at_daemon {
            let out = self.run(Some(fault), &[]);
            // Ends the session, which could go on for a while.
            self.start_daemon();
            return out;
        }
        let mut tracer = inject_into(self.daemon.as_ref().unwrap(), &fault.inject());
        let out = self.run(Some(fault), &[]);
        self.daemon.as_mut().unwrap().kill();
        tracer.wait().unwrap();
        self.start_daemon();
        out
    }

    fn run(&self, fault: Option<&Fault>, more: &[&str]) -> Output {
        let mut command = self.program(fault.filter(|fault| !fault.at_daemon));
        let remote_id = self.lab.path("remote id");
        if self.way == Way::Ssh {
            with_fake_ssh(&self.lab);
            let remote = format!("echo $$ >'{}'; exec {THRUWAY}", remote_id.display());
            command.env("THRUWAY_SSH", self.lab.path("ssh")).env("THRUWAY_REMOTE", remote);
        }
        let path = |path: &Path, is_remote: bool| match self.way {
            Way::Push | Way::Pull if is_remote => {
                let mut url = self.daemon.as_ref().unwrap().url("e/");
                url.push(path.strip_prefix(&self.exports).unwrap());
                url
            }
            Way::Ssh if is_remote => format!("localhost:{}", path.display()).into(),
            _ => path.as_os_str().to_os_string(),
        };
        let mut from = path(&self.source, self.way == Way::Pull);
        let second = self.second.as_ref().map(|second| {
            let mut from = path(second, self.way == Way::Pull);
            from.push("/");
            from
        });
        let target = if self.named { self.target.parent().unwrap() } else { &self.target };
        let mut to = path(target, matches!(self.way, Way::Push | Way::Ssh));
        if self.named { &mut to } else { &mut from }.push("/");
        // A daemon that was killed does not return.
        let retries = if fault.is_some_and(|fault| fault.at_daemon) { "0" } else { "2" };
        command.args(["cp", "--json", "--retries", retries]).args(&self.options).args(more);
        let out = command.arg(from).args(second).arg(to).stdin(Stdio::null()).output().unwrap();
        // The program at the other end can live longer than a client that was killed.
        if let Ok(id) = fs::read_to_string(&remote_id) {
            let process = PathBuf::from("/proc").join(id.trim());
            while fs::read_to_string(process.join("stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
                std::thread::yield_now();
            }
        }
        out
    }

    /// The entries of all sources.
    fn sources(&self) -> Tree {
        let mut all = tree(&self.source);
        all.extend(self.second.iter().flat_map(|second| tree(second)));
        all
    }

    /// True if `--exclude` matches a path.
    fn is_excluded(&self, path: &Path) -> bool {
        let is_match = |path: &Path| match self.excluded {
            Some("b") => path.file_name() == Some(OsStr::new("b")),
            Some("[[]b]") => path.file_name() == Some(OsStr::new("[b]")),
            Some("a/*") => path.starts_with("a") && path != Path::new("a"),
            _ => false,
        };
        path.ancestors().any(is_match)
    }

    /// Checks the promises that hold at every moment of a copy from `source` to a target with the entries `old`. `has_owners`: no system
    /// call that sets owners has failed.
    fn check_moment(&self, source: &Tree, old: &Tree, now: &Tree, has_owners: bool) {
        let is_within = |entry: &Entry, wanted: &Entry, before: Option<&Entry>| {
            // After a refusal, an entry has the mode of the source all the same.
            !has_owners && self.preserve || self.is_within(entry, wanted, before)
        };
        let known: BTreeSet<Identity> =
            old.values().chain(tree(&self.outside).values()).map(|entry| entry.identity).collect();
        for (path, entry) in now {
            let is_new = !known.contains(&entry.identity);
            if is_own_name(path) {
                let of_old = |wanted: &Entry| old.values().any(|old| is_within(entry, wanted, Some(old)));
                let others = |wanted: &Entry| {
                    wanted.content == entry.content && (is_within(entry, wanted, None) || of_old(wanted))
                };
                let is_link = entry.kind == FileType::Symlink;
                if is_new && !is_link && entry.kept.mode & 0o077 != 0 && !source.values().any(others) {
                    self.fail(&format!("others have access to {path:?}: {entry:?}"));
                }
                continue;
            }
            let (before, wanted) = (old.get(path), source.get(path).filter(|_| !self.is_excluded(path)));
            let is_of = |other: Option<&Entry>| {
                other.is_some_and(|other| (other.kind, &other.content) == (entry.kind, &entry.content))
            };
            let is_linked = wanted.is_some_and(|wanted| self.is_up_to_date(wanted, entry, source, old));
            if !is_of(before) && !is_of(wanted) && !is_linked {
                self.fail(&format!("{path:?} is neither old nor new: {entry:?}, old {before:?}, new {wanted:?}"));
            }
            let is_kept = |wanted: &&Entry| is_new && wanted.kind == entry.kind && wanted.kind != FileType::Symlink;
            if let Some(wanted) = wanted.filter(|wanted| is_kept(wanted) && !is_within(entry, wanted, before)) {
                self.fail(&format!("{path:?} gives more access than its source: {entry:?}, {wanted:?}"));
            }
        }
        self.check_losses(source, old, now);
    }

    /// True if an entry gives other users no more rights than its source or, without `-p`, than the replaced file `before`.
    fn is_within(&self, entry: &Entry, wanted: &Entry, before: Option<&Entry>) -> bool {
        if self.preserve {
            return is_within(entry, wanted);
        }
        let is_file = |entry: &&Entry| entry.kind == FileType::RegularFile;
        let before = before.filter(|before| is_file(&entry) && is_file(before)).map_or(0, |before| before.kept.mode);
        let inherited = if is_file(&entry) { 0 } else { 0o2000 };
        entry.kept.mode & 0o7077 & !(wanted.kept.mode & 0o077 | before & 0o1077 | inherited) == 0
    }

    /// Checks the attributes of an entry that a copy without -p has made, replaced or kept.
    fn check_plain(&self, now: &Tree, path: &Path, wanted: &Entry, before: Option<&Entry>) {
        let list = OsStr::new("system.posix_acl_access");
        let mut entry = now[path].clone();
        if entry.kind == FileType::Directory && !self.owners && !self.faults.is_empty() {
            // After a kill, a directory that was made accessible stays so, and a later attempt keeps its mode.
            let expected =
                before.filter(|before| before.kind == entry.kind).map_or(wanted.kept.mode, |old| old.kept.mode);
            entry.kept.mode &= !(0o700 & !expected);
        }
        let entry = &entry;
        let parent = now.get(path.parent().unwrap_or(path));
        let has = |name: &str| parent.is_some_and(|parent| parent.kept.attributes.contains_key(OsStr::new(name)));
        let is_right = match before.filter(|before| before.kind == entry.kind) {
            _ if entry.kind == FileType::Symlink => true,
            Some(before) if entry.kind == FileType::Directory => {
                (before.kept.mode, before.kept.owner, &before.kept.attributes)
                    == (entry.kept.mode, entry.kept.owner, &entry.kept.attributes)
            }
            // A file of another user gives no rights in a directory for all users.
            Some(_) if parent.is_some_and(|parent| parent.kept.mode & 0o1000 != 0) => true,
            Some(before) => {
                (before.kept.mode & 0o1777, before.kept.owner, before.kept.attributes.get(list))
                    == (entry.kept.mode, entry.kept.owner, entry.kept.attributes.get(list))
            }
            None if has("system.posix_acl_default") || path.as_os_str().is_empty() => true,
            None => entry.kept.mode & 0o777 == wanted.kept.mode & 0o777 & !self.umask,
        };
        if !is_right {
            self.fail(&format!("{path:?} has {:?}, old {before:?}, source {:?}", entry.kept, wanted.kept));
        }
    }

    /// True if an entry has the content of an old file with the size and time of `wanted`, under any of the names of that. For `-u`.
    fn is_up_to_date(&self, wanted: &Entry, entry: &Entry, source: &Tree, old: &Tree) -> bool {
        let is_equal = |before: &&Entry| {
            (before.kind, before.size, before.kept.modified) == (wanted.kind, wanted.size, wanted.kept.modified)
        };
        let mut equal = names_of(wanted, source).filter_map(|path| old.get(path)).filter(is_equal);
        self.update && entry.kind == FileType::RegularFile && equal.any(|before| before.content == entry.content)
    }

    /// Checks that all entries are there that the options do not remove.
    fn check_losses(&self, source: &Tree, old: &Tree, now: &Tree) {
        let kept = |path: &Path| source.get(path).filter(|_| !self.is_excluded(path));
        for (path, before) in old.iter().filter(|(path, _)| !now.contains_key(*path) && !is_own_name(path)) {
            let is_dir = |path: &Path| kept(path).is_some_and(|entry| entry.kind == FileType::Directory);
            let is_replaced = path.ancestors().skip(1).any(|path| kept(path).is_some() && !is_dir(path));
            let is_other = match kept(path) {
                Some(entry) => entry.kind != before.kind,
                None => self.delete && !self.is_excluded(path),
            };
            if !is_replaced && !is_other {
                self.fail(&format!("{path:?} is lost: {before:?}"));
            }
        }
    }

    /// Checks the result of a copy that succeeded. `may_leave`: a fault may have kept its journal, which a later copy removes.
    fn check_result(&self, (source, old, now): (&Tree, &Tree, &Tree), may_leave: bool) {
        let is_copied = |path: &Path| source.contains_key(path) && !self.is_excluded(path);
        for (path, wanted) in source.iter().filter(|(path, _)| is_copied(path)) {
            let Some(entry) = now.get(path) else { self.fail(&format!("{path:?} is missing")) };
            let before = old.get(path);
            let is_file = |entry: &Entry| entry.kind == FileType::RegularFile;
            let same_size = |before: &&Entry| is_file(wanted) && is_file(before) && wanted.size == before.size;
            let skipped =
                before.filter(same_size).filter(|before| self.update && before.kept.modified >= wanted.kept.modified);
            let content = skipped.unwrap_or(wanted);
            let newer = skipped.filter(|before| before.kept.modified > wanted.kept.modified);
            let is_link = newer.is_none()
                && (names_of(wanted, source).count() > 1 && entry.content == wanted.content
                    || self.is_up_to_date(wanted, entry, source, old));
            if (entry.kind, &entry.content) != (content.kind, &content.content) && !is_link {
                self.fail(&format!("{path:?} has the wrong content: {entry:?}, not {content:?}, old {before:?}"));
            }
            if !self.preserve && skipped.is_none() {
                self.check_plain(now, path, wanted, before);
                continue;
            }
            let skipped = skipped.filter(|_| !self.preserve).or(newer);
            let kept = &skipped.unwrap_or(wanted).kept;
            let is_shared_root = self.second.is_some() && path.as_os_str().is_empty();
            // -u does not separate hard links of the destination: one name can get attributes by another.
            let is_shared = newer.is_some_and(|before| names_of(before, old).count() > 1);
            if entry.kept != *kept && !is_shared_root && !is_shared {
                self.fail(&format!("{path:?} has {:?}, not {kept:?}, old {before:?}", entry.kept));
            }
            if newer.is_some_and(|before| before.identity != entry.identity) {
                self.fail(&format!("{path:?} was replaced although it is newer"));
            }
        }
        for (path, entry) in now.iter().filter(|(path, _)| !is_copied(path)) {
            let holds_excluded =
                |path: &Path| now.keys().any(|below| below.starts_with(path) && self.is_excluded(below));
            if is_own_name(path) && may_leave {
                continue;
            }
            if is_own_name(path) || self.delete && !self.is_excluded(path) && !holds_excluded(path) {
                self.fail(&format!("{path:?} is too much"));
            }
            if old.get(path).is_none_or(|before| before.content != entry.content) {
                self.fail(&format!("{path:?} has changed: {entry:?}"));
            }
        }
        self.check_losses(source, old, now);
        let only_copied = |tree: &Tree| -> Tree {
            tree.iter().filter(|(path, _)| is_copied(path)).map(|(path, entry)| (path.clone(), entry.clone())).collect()
        };
        let (wanted, found) = (links(&only_copied(source)), links(&only_copied(now)));
        if self.preserve && self.second.is_none() && !self.update && wanted != found {
            let differ: Vec<_> = wanted.symmetric_difference(&found).collect();
            self.fail(&format!("hard links differ: {differ:?}"));
        }
    }

    fn fail(&self, message: &str) -> ! {
        if let Some(dir) = std::env::var_os("THRUWAY_KEEP") {
            let kept = Command::new("cp").arg("-a").arg(self.lab.dir.path()).arg(&dir).status();
            assert!(kept.unwrap().success());
        }
        let user = if self.owners { "root" } else { "nobody" };
        panic!("seed {} {:?} {:?}, as {user}, {:?}: {message}", self.seed, self.way, self.options, self.faults);
    }
}

/// The names of an entry.
fn names_of<'a>(entry: &'a Entry, tree: &'a Tree) -> impl Iterator<Item = &'a PathBuf> {
    tree.iter().filter(|(_, other)| other.identity == entry.identity).map(|(path, _)| path)
}

/// True for the names of temporary files and journals.
fn is_own_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.contains(".tw-") || name.starts_with(".thruway-") && name.ends_with(".journal")
}

/// The rights of all but the owner.
fn rights(entry: &Entry) -> BTreeMap<Who, u8> {
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
fn is_within(entry: &Entry, limit: &Entry) -> bool {
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

fn items(out: &Output) -> BTreeSet<String> {
    parse(out)["items"].as_array().unwrap().iter().map(ToString::to_string).collect()
}

/// True if a copy failed for an entry that it must not replace: a directory with contents, or a device.
fn may_fail(out: &Output) -> bool {
    let said = stderr(out);
    said.contains("in the way") || said.contains("destination is a device")
}

fn copy_random_trees(way: Way, usual: Range<u64>) {
    for seed in seeds(usual) {
        copy_random_tree(way, seed);
    }
}

fn copy_random_tree(way: Way, seed: u64) {
    let (mut case, mut random) = Case::new(seed, way);
    case.start_daemon();
    let (source, old, outside) = (case.sources(), tree(&case.target), tree(&case.outside));
    let dry = case.run(None, &["-n", "-v"]);
    if tree(&case.target) != old {
        case.fail("a dry run changed the target");
    }
    let faults = random.u32(..4).saturating_sub(1);
    let mut has_owners = true;
    for _ in 0..faults {
        let fault = Fault::new(&mut random, way);
        let out = case.run_with_fault(&fault);
        case.faults.push(format!("{fault:?}, {}: {}", out.status, stderr(&out)));
        let now = tree(&case.target);
        has_owners &= !(fault.call.starts_with("fchown") && fault.what.starts_with("error"));
        case.check_moment(&source, &old, &now, has_owners);
        if out.status.success() {
            case.check_result((&source, &old, &now), true);
        }
    }
    let real = case.run(None, &["-v"]);
    let now = tree(&case.target);
    case.check_moment(&source, &old, &now, has_owners);
    if !real.status.success() {
        if !may_fail(&real) {
            case.fail(&format!("the copy failed: {}", stderr(&real)));
        }
        if faults == 0 && dry.status.success() {
            case.fail(&format!("only the dry run succeeded: {}", stderr(&real)));
        }
        return;
    }
    case.check_result((&source, &old, &now), false);
    let only = |a: &BTreeSet<String>, b| a.difference(b).cloned().collect::<Vec<_>>();
    let (said, done) = (items(&dry), items(&real));
    if faults == 0 && dry.status.success() && said != done {
        case.fail(&format!("only the dry run names {:?}, only the copy {:?}", only(&said, &done), only(&done, &said)));
    }
    let again = case.run(None, if case.update { &["-v"] } else { &["-u", "-v"] });
    if !again.status.success() || !items(&again).is_empty() {
        case.fail(&format!("a second copy names {:?}", items(&again)));
    }
    for (path, mut entry) in tree(&case.target).into_iter().filter(|(path, _)| !path.as_os_str().is_empty()) {
        let before = now.get(&path);
        let is_closed = entry.kept.mode & 0o700 != 0o700;
        let is_unlocked = entry.kind == FileType::Directory && is_closed && !case.owners;
        if let Some(before) = before.filter(|_| is_unlocked) {
            // It is made accessible while its entries are compared, or, by --delete, removed.
            entry.changed = before.changed;
        }
        if before != Some(&entry) {
            case.fail(&format!("a second copy changed {path:?}: {entry:?}, before {before:?}"));
        }
    }
    if case.sources() != source {
        case.fail("the source changed");
    }
    for (path, entry) in tree(&case.outside) {
        let before = &outside[&path];
        if entry.content != before.content || path == Path::new("file") && entry != *before {
            case.fail(&format!("{path:?} outside changed"));
        }
    }
}

#[test]
fn random_trees_are_copied_within_a_host() {
    copy_random_trees(Way::Local, 0..60);
}

#[test]
fn random_trees_are_pushed() {
    copy_random_trees(Way::Push, 0..60);
}

#[test]
fn random_trees_are_pulled() {
    copy_random_trees(Way::Pull, 0..60);
}

#[test]
fn random_trees_are_copied_through_ssh() {
    copy_random_trees(Way::Ssh, 0..40);
}
