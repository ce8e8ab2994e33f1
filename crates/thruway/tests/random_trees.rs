//! Copies of random trees onto random trees, with random options and in every direction, compared with a model of the options.
//!
//! Some copies get a signal or an error at a random system call of either end, and are then repeated. At that moment, every name has
//! its old or its new content, and no new entry gives other users more access than its source.
//!
//! Beside other copies, a second user with rights to some directories reads, plants and exchanges entries whenever one of the processes
//! stops at a system call. Such a user must not read what its owner has closed, get the rights of others, or change what is outside.
//!
//! `THRUWAY_SEEDS=FIRST..LAST` selects other seeds. `THRUWAY_KEEP=DIR` keeps the trees of a failure in DIR.

#[path = "random_trees/entries.rs"]
mod entries;
#[path = "random_trees/intruder.rs"]
mod intruder;
#[path = "random_trees/maker.rs"]
mod maker;

use crate::support;
use entries::*;
use fastrand::Rng;
use intruder::{INTRUDER, Intruder, PLANTED};
use maker::Maker;
use rustix::fs::{CWD, FileType, Mode};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use support::*;

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

/// System calls before which processes stop for an intruder. They open, inspect or change a name.
const STOPPING_CALLS: &str = "openat,openat2,statx,newfstatat,renameat,renameat2,linkat,unlinkat,mkdirat,fchmod,fchmodat,fchown,fchownat,\
                              utimensat,symlinkat,mknodat,fsetxattr,getdents64";
/// Largest number of stops at which an intruder acts.
const STOPS_MAX: usize = 60;

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
    /// File for the log of strace.
    log: String,
}

impl Fault {
    fn new(random: &mut Rng, way: Way) -> Fault {
        let call = *random.choice(&CALLS).unwrap();
        let errors = ["error=EIO", "error=ENOSPC", "error=EMFILE", "error=ENOMEM", "error=EDQUOT"];
        let what = if random.u32(..5) < 3 { "signal=KILL" } else { *random.choice(&errors).unwrap() };
        let when = if random.u32(..4) == 0 { random.u32(1..60) } else { random.u32(1..12) };
        let at_daemon = matches!(way, Way::Push | Way::Pull) && random.bool();
        Fault { at_daemon, call, what: format!("{what}:when={when}"), log: "/dev/null".into() }
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
    has_intruder: bool,
    /// The faults of earlier attempts, and how these ended.
    faults: Vec<String>,
}

impl Case {
    /// `has_intruder`: each file of the source begins with 16 bytes of its own.
    fn new(seed: u64, way: Way, has_intruder: bool) -> (Case, Rng) {
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
        let mut maker = Maker {
            random: random_ref,
            outside: &outside,
            owners,
            specials: preserve,
            destination: false,
            marked: has_intruder,
            files,
        };
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
            has_intruder,
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
            words.extend(strace_options(&fault.inject(), &fault.log).into_iter().map(OsString::from));
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
        let mut tracer = inject_into(self.daemon.as_ref().unwrap(), &fault.inject(), &fault.log);
        let out = self.run(Some(fault), &[]);
        self.daemon.as_mut().unwrap().kill();
        tracer.wait().unwrap();
        self.start_daemon();
        out
    }

    /// Copies with a fault that stops a process. The intruder acts at each stop.
    fn run_beside(&mut self, mut fault: Fault, intruder: &mut Intruder) -> Output {
        let log = self.lab.path("stops");
        let _ = fs::remove_file(&log);
        rustix::fs::mknodat(CWD, &log, FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
        fs::set_permissions(&log, fs::Permissions::from_mode(0o666)).unwrap();
        fault.log = log.to_str().unwrap().into();
        std::thread::scope(|scope| {
            let (give_turn, turns) = channel();
            let (end_turn, ends) = channel();
            scope.spawn(move || {
                for () in turns {
                    intruder.act();
                    end_turn.send(()).unwrap();
                }
            });
            let reader = log.clone();
            scope.spawn(move || {
                let lines = BufReader::new(fs::File::open(reader).unwrap()).lines().map(Result::unwrap);
                for (stops, line) in lines.filter(|line| line.contains("stopped by SIGSTOP")).enumerate() {
                    if stops < STOPS_MAX {
                        give_turn.send(()).unwrap();
                        ends.recv().unwrap();
                    }
                    let thread = line.split(' ').next().unwrap();
                    // The file is empty or missing when the thread has ended.
                    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
                    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:\t"));
                    let Some(process) = process.map(|id| id.parse().unwrap()) else { continue };
                    let _ = rustix::process::kill_process(
                        rustix::process::Pid::from_raw(process).unwrap(),
                        rustix::process::Signal::CONT,
                    );
                }
            });
            let out = self.run_with_fault(&fault);
            // If strace has not started, the thread still waits for it.
            let _ = fs::OpenOptions::new().read(true).write(true).open(log);
            out
        })
    }

    /// Checks the promises to users of files that an intruder has no rights to.
    fn check_intruder(&self, intruder: &Intruder, secrets: &[(&PathBuf, &Entry)], outside: &Tree) {
        // Without rights to set owners, -u takes a file of the same size and time for the same content.
        let is_kept = self.preserve && (self.owners || !self.update);
        let is_seen = |(_, secret): &&(&PathBuf, &Entry)| is_kept && intruder.seen.contains(&secret.start);
        if let Some((path, secret)) = secrets.iter().find(is_seen) {
            self.fail(&format!("the intruder could read {path:?}: {secret:?}"));
        }
        if tree(&self.outside) != *outside {
            self.fail("something outside changed");
        }
        let of_outside = &outside[Path::new("file")].start;
        for (path, entry) in tree(&self.exports) {
            if entry.kind == FileType::RegularFile && entry.start == *of_outside {
                self.fail(&format!("{path:?} is a copy of a file outside"));
            }
            let is_planted = entry.kind == FileType::RegularFile && entry.start == PLANTED;
            let gives_owner = entry.kept.mode & 0o4000 != 0 && entry.kept.owner.0 != INTRUDER;
            let gives_group = entry.kept.mode & 0o2010 == 0o2010 && entry.kept.owner.1 != INTRUDER;
            let gives_more = entry.kept.attributes.contains_key(OsStr::new("security.capability"));
            if is_planted && (gives_owner || gives_group || gives_more)
                || intruder.made.contains(&entry.identity) && entry.kept.owner.0 != INTRUDER
            {
                self.fail(&format!("{path:?} of the intruder has the rights of another user: {entry:?}"));
            }
        }
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
        let mut all: Tree = self.second.iter().flat_map(|second| tree(second)).collect();
        // A directory gets the attributes of the first source.
        all.extend(tree(&self.source));
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
            // A later attempt keeps a planted file with the inode number and time of birth of the file that it replaced.
            if self.has_intruder && entry.start == PLANTED {
                continue;
            }
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
            // A file of another owner is sent again.
            let differs =
                |before: &Entry| before.kept.modified == wanted.kept.modified && before.kept.owner != wanted.kept.owner;
            let is_sent =
                self.preserve && self.owners && skipped.is_some_and(differs) && entry.content == wanted.content;
            if (entry.kind, &entry.content) != (content.kind, &content.content) && !is_link && !is_sent {
                self.fail(&format!("{path:?} has the wrong content: {entry:?}, not {content:?}, old {before:?}"));
            }
            if !self.preserve && skipped.is_none() {
                self.check_plain(now, path, wanted, before);
                continue;
            }
            let skipped = skipped.filter(|_| !self.preserve).or(newer);
            let kept = &skipped.unwrap_or(wanted).kept;
            // -u does not separate hard links of the destination: one name can get attributes by another, which may be removed then.
            let is_shared = self.update
                && old.values().any(|before| before.identity == entry.identity && names_of(before, old).count() > 1);
            if entry.kept != *kept && !is_shared {
                self.fail(&format!("{path:?} has {:?}, not {kept:?}, old {before:?}", entry.kept));
            }
            if newer.is_some_and(|before| before.identity != entry.identity) {
                self.fail(&format!("{path:?} was replaced although it is newer"));
            }
        }
        for (path, entry) in now.iter().filter(|(path, _)| !is_copied(path)) {
            let holds_excluded =
                |path: &Path| now.keys().any(|below| below.starts_with(path) && self.is_excluded(below));
            if path.ancestors().any(is_own_name) && may_leave {
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

fn items(out: &Output) -> BTreeSet<String> {
    parse(out)["items"].as_array().unwrap().iter().map(ToString::to_string).collect()
}

/// True if a copy failed for an entry that it must not replace: a directory with contents, or a device.
fn may_fail(out: &Output) -> bool {
    let said = stderr(out);
    ["in the way", "destination is a device"].iter().any(|why| said.contains(why))
}

fn copy_random_trees(way: Way, usual: Range<u64>) {
    for seed in seeds(usual) {
        copy_random_tree(way, seed);
    }
}

fn copy_random_tree(way: Way, seed: u64) {
    let (mut case, mut random) = Case::new(seed, way, false);
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

/// Copies while a user with rights to some directories of both trees changes them at random system calls.
fn copy_beside_intruders(way: Way, usual: Range<u64>) {
    for seed in seeds(usual) {
        copy_beside_an_intruder(way, seed);
    }
}

fn copy_beside_an_intruder(way: Way, seed: u64) {
    let (mut case, mut random) = Case::new(seed, way, true);
    for (path, entry) in tree(&case.exports).iter().filter(|(path, _)| !path.as_os_str().is_empty()) {
        let path = case.exports.join(path);
        match random.u32(..6) {
            _ if entry.kind != FileType::Directory => {}
            0 | 1 if case.owners => lchown(path, Some(INTRUDER), Some(INTRUDER)).unwrap(),
            2 => fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap(),
            _ => {}
        }
    }
    fs::set_permissions(case.outside.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
    case.start_daemon();
    let (source, outside) = (case.sources(), tree(&case.outside));
    let changes_target = random.bool();
    let sources: Vec<_> = [&case.source].into_iter().chain(&case.second).cloned().collect();
    let roots = [&sources[..], std::slice::from_ref(&case.target)].concat();
    let mut intruder = Intruder {
        random: random.fork(),
        changed: if changes_target { roots.clone() } else { sources },
        roots,
        outside: case.outside.clone(),
        fixed: tree(&case.target)
            .values()
            .filter(|one| one.kind == FileType::Directory)
            .map(|one| one.identity)
            .chain([&case.source].into_iter().chain(&case.second).filter_map(|root| identity(root)))
            .collect(),
        made: BTreeSet::new(),
        seen: BTreeSet::new(),
        log: Vec::new(),
    };
    let (old, has_two) = (tree(&case.target), case.second.is_some());
    // Directories of two sources have one mode. The intruder can make directories at the target.
    let is_searchable = |directory: &Path| {
        let is_open = |tree: &Tree| tree.get(directory).is_some_and(|entry| entry.gives(INTRUDER, 1));
        changes_target || has_two || is_open(&old) || is_open(&source)
    };
    let is_readable = |path: &PathBuf| source[path].gives(INTRUDER, 4);
    let is_visible = |path: &PathBuf| is_readable(path) && path.ancestors().skip(1).all(is_searchable);
    let secrets = |target: &Tree| -> Vec<(&PathBuf, &Entry)> {
        // A directory of the target gets the mode of the directory that the intruder has put in its place in the source, so
        // directories protect no files of earlier copies.
        let is_copied = |entry: &Entry| target.values().any(|copy| copy.start == entry.start);
        let is_secret = |entry: &Entry| {
            let mut names = names_of(entry, &source);
            entry.size >= 16 && !if is_copied(entry) { names.any(is_readable) } else { names.any(is_visible) }
        };
        source.iter().filter(|(_, entry)| is_secret(entry)).collect()
    };
    for _ in 0..random.u32(1..3) {
        let mut fault = Fault::new(&mut random, way);
        fault.call = STOPPING_CALLS;
        fault.what = format!("signal=STOP:when={}+{}", random.u32(1..40), random.u32(1..40));
        let secrets = secrets(&tree(&case.target));
        let out = case.run_beside(fault.clone(), &mut intruder);
        case.faults.push(format!("{fault:?}, {}: {}; {:?}", out.status, stderr(&out), intruder.log.split_off(0)));
        if stderr(&out).contains("panicked") {
            case.fail("it panicked");
        }
        case.check_intruder(&intruder, &secrets, &outside);
    }
    // The names of unfinished files are not copied.
    for root in [&case.source].into_iter().chain(&case.second) {
        for (path, entry) in tree(root).iter().rev().filter(|(path, _)| is_own_name(path)) {
            let path = root.join(path);
            if entry.kind == FileType::Directory { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }
    }
    if !case.owners {
        assert!(Command::new("chown").args(["-R", "-h", "65534:65534"]).arg(&case.exports).status().unwrap().success());
    }
    let (source, mut old) = (case.sources(), tree(&case.target));
    let out = case.run(None, &["-v"]);
    let said = stderr(&out);
    if case.owners {
        case.check_intruder(&intruder, &secrets(&old), &outside);
    }
    // A file that the user cannot read, a pipe without -p, another name that the intruder has given to an entry of the copy, and an entry
    // that both sources have.
    let reasons = [
        "ermission denied",
        "not a file, directory or link",
        "another entry of this copy has this name",
        "another source has an entry of this name",
    ];
    let is_refused = reasons.iter().any(|why| said.contains(why));
    if out.status.success() {
        let now = tree(&case.target);
        // Directories of earlier attempts get their modes now, or keep 0700 if the intruder has taken the journal.
        let is_private = |entry: &Entry| entry.kept.mode & 0o777 == 0o700;
        old.retain(|path, entry| {
            entry.kind != FileType::Directory
                || !source.contains_key(path)
                || !is_private(entry)
                || now.get(path).is_some_and(is_private)
                || intruder.fixed.contains(&entry.identity)
        });
        case.check_result((&source, &old, &now), true);
    } else if !may_fail(&out) && !is_refused {
        case.fail(&format!("the copy failed: {said}"));
    }
}

#[test]
fn copies_beside_an_intruder_within_a_host() {
    copy_beside_intruders(Way::Local, 0..20);
}

#[test]
fn pushes_beside_an_intruder() {
    copy_beside_intruders(Way::Push, 0..20);
}

#[test]
fn pulls_beside_an_intruder() {
    copy_beside_intruders(Way::Pull, 0..20);
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
