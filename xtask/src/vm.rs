//! Guests with real kernels: `cargo xtask vm run` and `cargo xtask vm test`.
//!
//! The shell scripts in `testbed/` build and start a kernel; here they are found, fed, and their
//! tests run, each in a guest of its own: two at a time, but for those that measure something.

use crate::{command, run_with, top};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Debian packages that guests, and the building of their kernel, use.
pub(crate) const PACKAGES: [&str; 38] = [
    "acl",
    "bc",
    "bindfs",
    "bison",
    "build-essential",
    "btrfs-progs",
    "busybox-static",
    "cpio",
    "dmsetup",
    "dosfstools",
    "flex",
    "git",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "krb5-admin-server",
    "krb5-kdc",
    "krb5-user",
    "libelf-dev",
    "libibverbs-dev",
    "librdmacm-dev",
    "nbd-client",
    "nfs-common",
    "nfs-ganesha",
    "nfs-ganesha-vfs",
    "nfs-kernel-server",
    "nfs4-acl-tools",
    "open-iscsi",
    "perftest",
    "qemu-system-x86",
    "rdma-core",
    "rdmacm-utils",
    "seabios",
    "sg3-utils",
    "sqlite3",
    "xfsprogs",
    "xz-utils",
];

/// Processors of a guest that has this machine for itself.
const PROCESSORS: usize = 2;

/// Longest a guest's command may run where nothing else is said, in seconds.
const LIMIT: u32 = 120;

/// One script of `testbed/tests`, with what its first comments say.
struct Test {
    name: String,
    path: PathBuf,
    title: String,
    limit: u32,
    /// Nothing else is to run meanwhile: it depends on how fast something is.
    is_alone: bool,
    guest: Guest,
}

/// Kind of machine that runs a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backend {
    /// User Mode Linux: an ordinary process, near full speed, one memory node.
    Uml,
    /// Debian's own kernel in qemu, which may emulate the processor: any number of memory nodes.
    Qemu,
}

/// Guest for a test or a command.
#[derive(Clone, Copy)]
struct Guest {
    backend: Backend,
    nodes: u32,
    /// How many, on one Ethernet segment.
    guests: u32,
    /// Processors (User Mode Linux).
    processors: usize,
}

impl Guest {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match (key, value) {
            ("backend", "uml") => self.backend = Backend::Uml,
            ("backend", "qemu") => self.backend = Backend::Qemu,
            ("nodes" | "guests", n) => {
                let n = n.parse().ok().filter(|n| (1..=8).contains(n));
                let n = n.ok_or_else(|| format!("1 to 8 {key} are possible"))?;
                *(if key == "nodes" { &mut self.nodes } else { &mut self.guests }) = n;
                self.backend = Backend::Qemu;
            }
            _ => return Err(format!("'{key}: {value}': backend is uml or qemu")),
        }
        Ok(())
    }
}

impl Default for Guest {
    fn default() -> Guest {
        Guest { backend: Backend::Uml, nodes: 1, guests: 1, processors: PROCESSORS }
    }
}

/// Where built kernels are kept from one run to the next.
fn cache() -> PathBuf {
    let var = |name| std::env::var_os(name).map(PathBuf::from);
    var("THRUWAY_TESTBED_CACHE")
        .or_else(|| Some(var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")))?.join("thruway/testbed")))
        .unwrap_or_else(|| top().join("target/testbed"))
}

/// The kernel of a back end, built or fetched if it is not there yet.
fn kernel(backend: Backend) -> Result<PathBuf, String> {
    let script = backend.script("build");
    let out = Command::new(&script)
        .arg(cache())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{}: {e}", script.display()))?;
    if !out.status.success() {
        return Err(format!("making the guest's kernel failed; its log is in {}", cache().display()));
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()))
}

impl Backend {
    fn script(self, name: &str) -> PathBuf {
        top()
            .join(match self {
                Backend::Uml => "testbed/uml",
                Backend::Qemu => "testbed/qemu",
            })
            .join(name)
    }
}

/// Runs a command in a guest; its output and status are ours.
pub(crate) fn guest(args: &[&str]) -> Result<(), String> {
    let (mut limit, mut guest, mut rest) = (LIMIT.to_string(), Guest::default(), args);
    while let [option, value, more @ ..] = rest {
        match *option {
            "--limit" => limit = (*value).to_string(),
            "--backend" | "--nodes" | "--guests" => guest.set(&option[2..], value)?,
            _ => break,
        }
        rest = more;
    }
    let rest = rest.strip_prefix(&["--"]).unwrap_or(rest);
    if rest.is_empty() {
        return Err("vm run: say which command, behind --".into());
    }
    // One word is a line for the shell; several are the command's arguments, as they are.
    let command = if let [line] = rest { (*line).to_string() } else { quoted(rest) };
    let status = start(guest, &kernel(guest.backend)?, &limit, &command).status().map_err(|e| e.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("the command in the guest ended with {status}")) }
}

/// Words as a shell reads them back.
fn quoted(words: &[&str]) -> String {
    let quote = |word: &&str| format!("'{}'", word.replace('\'', r"'\''"));
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

fn start(guest: Guest, kernel: &Path, limit: &str, command: &str) -> Command {
    let mut run = Command::new(guest.backend.script("run"));
    run.arg(kernel).args(["-t", limit]);
    match guest.backend {
        Backend::Uml => run.args(["-c", &guest.processors.to_string()]),
        Backend::Qemu => run.args(["-n", &guest.nodes.to_string(), "-g", &guest.guests.to_string()]),
    };
    run.arg(command);
    run
}

/// Runs the guest tests whose names contain `filter`.
pub(crate) fn test(filter: &str) -> Result<(), String> {
    test_longer(filter, "", 1)
}

/// Has the power fail at so many points of what a disk was told, instead of some.
pub(crate) fn replay(points: &str) -> Result<(), String> {
    let count: std::num::NonZeroU32 = points.parse().map_err(|e| format!("replay {points}: {e}"))?;
    let count = count.get();
    test_longer("log_writes", &format!("POINTS={count}"), count.div_ceil(24).max(1))
}

/// With a variable for the tests, and so many times as patient.
fn test_longer(filter: &str, variable: &str, patience: u32) -> Result<(), String> {
    let built = build_tests()?;
    let (verbs_tests, stream_tests) =
        (built_test(&built, "fabric", "main")?, built_test(&built, "streams", "streams")?);
    let nfs_tests = built_test(&built, "thruway", "main")?;
    let tests = tests(filter)?;
    if tests.is_empty() {
        return Err(format!("no guest test has '{filter}' in its name"));
    }
    run_with("fio's engine", "bash", &["crates/fio/build"], &[("PROFILE", "dev")])?;
    let environment = format!(
        "set -euo pipefail; export {variable} THRUWAY='{}' VERBS_TESTS='{}' STREAM_TESTS='{}' NFS_TESTS='{}' FIO_ENGINE='{}' PEERS_PY='{}'; . '{}'",
        top().join("target/debug/thruway").display(),
        verbs_tests.display(),
        stream_tests.display(),
        nfs_tests.display(),
        top().join("target/debug/thruway-fio.so").display(),
        top().join("crates/thruway/tests/sockets/peers.py").display(),
        top().join("testbed/lib.sh").display(),
    );
    // They are built one after the other, before anything runs.
    for backend in [Backend::Uml, Backend::Qemu] {
        if tests.iter().any(|test| test.guest.backend == backend) {
            kernel(backend)?;
        }
    }
    let (alone, others): (Vec<&Test>, Vec<&Test>) = tests.iter().partition(|test| test.is_alone);
    let mut failed = run_tests(&others, GUESTS_AT_A_TIME, &environment, patience)?;
    failed.extend(run_tests(&alone, 1, &environment, patience)?);
    if failed.is_empty() { Ok(()) } else { Err(format!("in the guest: {}", failed.join(", "))) }
}

/// Guests that run tests at a time: most of them wait most of the time. They share the processors out between them: a guest of which
/// a processor waits for its turn spins with the others.
const GUESTS_AT_A_TIME: usize = 2;

/// Runs tests, so many at a time; the names of those that fail.
fn run_tests(tests: &[&Test], at_a_time: usize, environment: &str, patience: u32) -> Result<Vec<String>, String> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || -> Result<(), String> {
        while let Some(test) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let guest = Guest { processors: PROCESSORS / at_a_time, ..test.guest };
            if !run_test(test, guest, environment, patience)? {
                failed.lock().expect("no panics under the lock").push(test.name.clone());
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..at_a_time).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    Ok(failed.into_inner().expect("no panics under the lock"))
}

/// The status of `testbed/qemu/run` if the kernel of an emulated guest crashed.
const CRASHED_IN_EMULATOR: i32 = 123;

/// Runs a test and prints its result. True if it passes. Repeats it once if the kernel of an emulated guest crashed: QEMU's
/// emulator can damage a guest, and a fault of the kernel itself occurs again.
fn run_test(test: &Test, guest: Guest, environment: &str, patience: u32) -> Result<bool, String> {
    let limit = test.limit * patience;
    let command = format!("LIMIT={limit}; {environment}; . '{}'", test.path.display());
    let begun = Instant::now();
    let attempt = || -> Result<Output, String> {
        start(guest, &kernel(guest.backend)?, &limit.to_string(), &command).output().map_err(|e| e.to_string())
    };
    let mut out = attempt()?;
    let (Test { name, title, .. }, log) = (test, |out: &Output| String::from_utf8_lossy(&out.stderr).into_owned());
    if out.status.code() == Some(CRASHED_IN_EMULATOR) {
        eprint!("    again  {name:<28} the kernel of an emulated guest crashed\n{}", log(&out));
        out = attempt()?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let word = if out.status.success() { "ok    " } else { "FAILED" };
    let mut said = format!("    {word} {name:<28} {seconds:>5.1} s  {title}\n");
    if !out.status.success() {
        said.extend([String::from_utf8_lossy(&out.stdout).into_owned(), log(&out)]);
    }
    eprint!("{said}");
    Ok(out.status.success())
}

/// Builds the programs and tests of the workspace, as `cargo xtask unit` does. Another selection of packages has other features, and takes
/// minutes to build. Returns Cargo's messages.
fn build_tests() -> Result<String, String> {
    eprintln!("==> programs and tests");
    let begun = Instant::now();
    let out = command("cargo")
        .args(["test", "--workspace", "--quiet", "--no-run", "--message-format=json"])
        .current_dir(top())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo test: {e}"))?;
    eprintln!("    programs and tests: {:.0} s", begun.elapsed().as_secs_f64());
    if !out.status.success() {
        return Err("the programs and tests do not build".into());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The program of integration tests of `crates/KRATE`, by Cargo's messages.
fn built_test(messages: &str, krate: &str, name: &str) -> Result<PathBuf, String> {
    let parts =
        [r#""kind":["test"]"#.to_owned(), format!(r#""name":"{name}""#), format!(r#"/crates/{krate}/Cargo.toml""#)];
    let is_it = |line: &&str| parts.iter().all(|part| line.contains(part));
    let program = messages.lines().filter(is_it).find_map(|line| {
        let (_, rest) = line.split_once("\"executable\":\"")?;
        rest.split_once('"').map(|(path, _)| PathBuf::from(path))
    });
    program.ok_or_else(|| format!("crates/{krate} has no test '{name}'"))
}

fn tests(filter: &str) -> Result<Vec<Test>, String> {
    let dir = top().join("testbed/tests");
    let mut found = Vec::new();
    for entry in fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?.flatten() {
        let path = entry.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_none_or(|e| e != "sh") || !name.contains(filter) {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let said = |key: &str| {
            let prefix = format!("# {key}: ");
            text.lines().take_while(|l| l.starts_with('#')).find_map(|l| l.strip_prefix(&prefix)).map(str::to_string)
        };
        let title = said("title").ok_or_else(|| format!("{}: its first lines lack '# title: ...'", path.display()))?;
        let limit = match said("limit") {
            None => LIMIT,
            Some(text) => text.parse().map_err(|_| format!("{}: '# limit:' wants seconds", path.display()))?,
        };
        let is_alone = said("alone").is_some();
        let mut guest = Guest::default();
        for key in ["backend", "nodes", "guests"] {
            if let Some(value) = said(key) {
                guest.set(key, &value).map_err(|e| format!("{}: {e}", path.display()))?;
            }
        }
        found.push(Test { name, path, title, limit, is_alone, guest });
    }
    // What takes longest first: else one of them runs at the end by itself.
    found.sort_by(|a, b| b.limit.cmp(&a.limit).then_with(|| a.name.cmp(&b.name)));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_of_a_test_is_found() {
        let line = |krate: &str, kind: &str, name: &str| {
            format!(
                r#"{{"manifest_path":"/w/crates/{krate}/Cargo.toml","target":{{"kind":["{kind}"],"name":"{name}"}},"executable":"/t/{krate}-{kind}-{name}"}}"#
            )
        };
        let lines = [
            line("a", "lib", "main"),
            line("a", "test", "other"),
            line("b", "test", "main"),
            line("a", "test", "main"),
        ];
        let messages = lines.join("\n");
        assert_eq!(built_test(&messages, "a", "main"), Ok(PathBuf::from("/t/a-test-main")));
        assert!(built_test(&messages, "c", "main").is_err());
    }

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        let words = ["printf", "%s|", "a b", "it's", "$HOME", "", "*", "\\n\""];
        let out = Command::new("sh").args(["-c", &quoted(&words)]).output().unwrap();
        assert_eq!(String::from_utf8(out.stdout).unwrap(), "a b|it's|$HOME||*|\\n\"|");
    }
}
