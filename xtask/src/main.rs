//! Development tasks: one way to do each. `cargo xtask` lists them.

#![forbid(unsafe_code)]
mod book;
mod extended;
mod steps;
mod vm;
mod words;

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;
use steps::Steps;

const USAGE: &str = "\
cargo xtask TASK

  test          install what the tests need and run all of them, as CI does
  quick         format, lints, the libraries' unit tests, one run of the fabric's conformance suite: a minute
  check         format, lints, documentation, links, spelling, plain English, licences
  words [record]  unusual phrases in comments and pages by crate, and the worst lines; `record` keeps values that have fallen
  unit          unit and integration tests
  sanitize      tests of libraries with unsafe code under AddressSanitizer, leaks included (needs a nightly toolchain)
  loom          what threads share in the fabric, in every order in which they can do it
  miri          tests of what does no input or output, under Miri (a quarter of an hour; needs a nightly toolchain)
  soak MINUTES  disks in use while the daemon is killed again and again, and programs on disks that fail, from new seeds
  soak-copies MINUTES  random trees copied in every direction, with kills and failing system calls, from new seeds; then peers that flood the daemon
  soak-sockets MINUTES  random calls on accelerated sockets, compared with TCP, and hostile peers, from new seeds
  programs      PostgreSQL, memcached, redis, nginx, HAProxy, PHP-FPM, Java, Erlang and others by `thruway run`, beside the same on TCP
  soak-nfs MINUTES  files in use by Linux's NFS clients while the server is killed again and again, in a guest, from a new seed
  posix         fsx and pjdfstest on the file systems that Linux's NFS clients make of Thruway's, in a guest
  replay POINTS the guest test in which the power fails at points of what a disk was told, at so many of them
  fuzz SECONDS  every fuzz target for that long (needs a nightly toolchain)
  mutants PART/PARTS  changes the code that keeps data in small ways and tells which no test of its crate notices (hours; one
                part of many, from 0/PARTS, is a sample). Takes arguments of cargo-mutants behind it
  semver REV    what users of the published libraries would have to change since that revision (cargo-semver-checks)
  vm test [FILTER]               tests in a guest with a real kernel (see testbed/README.md)
  vm run [--limit SECONDS] [--backend uml|qemu] [--nodes N] [--guests N] -- CMD [ARG...]
                                 a command in such a guest, over this machine's files; a single word is a line for the shell
  install-extended PREFIX        the library for extended sockets, for programs in C: library, header, pkg-config, manual pages
  fio           builds fio's external engine for the fio that is installed; prints where it is
  setup         only install what the tests need (Debian packages and cargo tools)
  bench [NAME]  comparisons with other programs, as a table (see bench/README.md)
  bench smoke   each comparison on this host once, with little data and the debug build, to check that it works
";

/// Debian packages that the build and the tests use.
const PACKAGES: [&str; 20] = [
    "attr",
    "btrfs-progs",
    "fio",
    "fuse3",
    "libiscsi-bin",
    "libnbd-bin",
    "libnfs-utils",
    "libpython3.11-testsuite",
    "liburing-dev",
    "openssl",
    "pkgconf",
    "procps",
    "python3",
    "python3-pip",
    "python3-libnbd",
    "qemu-block-extra",
    "qemu-utils",
    "strace",
    "util-linux",
    "xfsprogs",
];

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args.as_slice() {
        ["test"] => setup().and_then(|()| test()),
        ["quick"] => quick(),
        ["check"] => {
            let mut steps = Steps::default();
            check(&mut steps);
            steps.finish()
        }
        ["words"] => words::show(),
        ["words", "record"] => words::record(),
        ["unit"] => unit(),
        ["sanitize"] => sanitize(),
        ["loom"] => loom(),
        ["miri"] => miri(),
        ["setup"] => setup(),
        ["vm", "test"] => setup().and_then(|()| vm::test("")),
        ["vm", "test", filter] => setup().and_then(|()| vm::test(filter)),
        ["vm", "run", rest @ ..] => setup().and_then(|()| vm::guest(rest)),
        ["posix"] => setup().and_then(|()| posix()),
        ["fio"] => setup().and_then(|()| run("fio's engine", "bash", &["crates/fio/build"])),
        ["install-extended", prefix] => extended::install(prefix),
        ["soak", minutes] => soak(minutes),
        ["programs", rest @ ..] => setup().and_then(|()| programs(rest)),
        ["soak-copies", minutes] => soak_copies(minutes),
        ["soak-sockets", minutes] => soak_sockets(minutes),
        ["soak-nfs", minutes] => setup().and_then(|()| soak_nfs(minutes)),
        ["replay", points] => setup().and_then(|()| vm::replay(points)),
        ["fuzz", seconds] => fuzz(seconds),
        ["semver", rev] => semver(rev),
        ["mutants", part, rest @ ..] => mutants(part, rest),
        ["bench", "smoke"] => bench_smoke(),
        ["bench", "sockets", "fallback", rest @ ..] => bench_fallback(rest, &[]),
        ["bench", rest @ ..] => run("bench", "bash", &[&["bench/run"], rest].concat()),
        _ => {
            print!("{USAGE}");
            return if args.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("xtask: {what}");
            ExitCode::FAILURE
        }
    }
}

/// A program without what cargo has said about this one: some crates are built again when that changes.
fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let of_this = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(of_this) {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command at the top of the workspace, saying what and how long.
fn run(what: &str, program: &str, args: &[&str]) -> Result<(), String> {
    run_with(what, program, args, &[])
}

fn run_with(what: &str, program: &str, args: &[&str], vars: &[(&str, &str)]) -> Result<(), String> {
    eprintln!("==> {what}: {program} {}", args.join(" "));
    let start = Instant::now();
    let status = command(program)
        .args(args)
        .envs(vars.iter().copied())
        .current_dir(top())
        .status()
        .map_err(|e| format!("{what}: {program}: {e}"))?;
    eprintln!("    {what}: {:.0} s", start.elapsed().as_secs_f64());
    if status.success() { Ok(()) } else { Err(format!("{what} failed: {status}")) }
}

/// The top of the workspace.
fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the workspace")
}

fn has(program: &str) -> bool {
    Command::new("sh").args(["-c", &format!("command -v {program}")]).output().is_ok_and(|o| o.status.success())
}

fn setup() -> Result<(), String> {
    install(PACKAGES.iter().chain(&vm::PACKAGES).copied())?;
    for component in ["rustfmt", "clippy"] {
        if !has(if component == "clippy" { "cargo-clippy" } else { component }) {
            run(component, "rustup", &["component", "add", component])?;
        }
    }
    if !has("cargo-deny") {
        run("cargo-deny", "cargo", &["install", "--locked", "cargo-deny"])?;
    }
    if !has("cargo-nextest") {
        run("cargo-nextest", "cargo", &["install", "--locked", "--quiet", "--version", "0.9.151", "cargo-nextest"])?;
    }
    Ok(())
}

/// Installs the packages that are missing.
fn install<'a>(packages: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let missing: Vec<&str> = packages.filter(|package| !installed(package)).collect();
    if !missing.is_empty() {
        let sudo = if has("sudo") { "sudo " } else { "" };
        let names = missing.join(" ");
        run("package lists", "sh", &["-c", &format!("{sudo}apt-get update -q")])?;
        let install =
            format!("{sudo}env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends {names}");
        run("packages", "sh", &["-c", &install])?;
    }
    Ok(())
}

/// What `programs` runs: a command, and the package that has it, if nothing else does.
const PROGRAMS: [(&str, &str); 22] = [
    ("curl", "curl"),
    ("erlc", "erlang-base"),
    ("etcd", "etcd-server"),
    ("g++", "g++"),
    ("javac", "default-jdk-headless"),
    ("/usr/sbin/haproxy", "haproxy"),
    ("go", "golang-go"),
    ("memccapable", "libmemcached-tools"),
    ("mpicc", "libopenmpi-dev"),
    ("memcached", "memcached"),
    ("/usr/sbin/nats-server", "nats-server"),
    ("/usr/sbin/nginx", "nginx-light"),
    ("npm", "npm"),
    ("mpirun", "openmpi-bin"),
    ("ssh", "openssh-client"),
    ("/usr/sbin/sshd", "openssh-server"),
    ("pg_ctlcluster", "postgresql"),
    ("redis-benchmark", "redis-tools"),
    ("rsync", "rsync"),
    ("socat", "socat"),
    ("/usr/sbin/varnishd", "varnish"),
    ("wrk", "wrk"),
];

/// Real programs by `thruway run`, all or some.
fn programs(names: &[&str]) -> Result<(), String> {
    install(PROGRAMS.into_iter().filter(|(command, _)| !has(command)).map(|(_, package)| package))?;
    let others =
        ["libboost1.81-dev", "liburing-dev", "netpipe-tcp", "php-fpm", "python3-venv", "qperf", "redis-server"];
    install(others.into_iter())?;
    let (redis_py, node) = (redis_py()?, node()?);
    run("release program", "cargo", &["build", "--release", "--quiet", "-p", "thruway", "-p", "thruway-preload"])?;
    let script = ["crates/thruway/tests/sockets/programs.py", "target/release/thruway"];
    run_with("programs", "python3", &[&script[..], names].concat(), &[("REDIS_PY", &redis_py), ("NODE", &node)])
}

/// redis-py's source, which has its tests, and what they need. Returns where.
fn redis_py() -> Result<String, String> {
    let home = top().join("target/tools/redis-py-5.0.8");
    let to = home.to_str().ok_or("the checkout's path is not UTF-8")?.to_owned();
    if !home.join("source/tests").exists() {
        let script = format!(
            "rm -rf {to} && python3 -m venv {to}/v && {to}/v/bin/pip -q install redis==5.0.8 'pytest<8.3' pytest-asyncio==0.23.8 mock packaging numpy ujson uvloop \
             && cd {to} && v/bin/pip -q download --no-binary :all: --no-deps redis==5.0.8 && tar xzf redis-5.0.8.tar.gz && mv redis-5.0.8 source"
        );
        run("redis-py", "bash", &["-ec", &script])?;
    }
    Ok(to)
}

/// Installs two versions of Node.js and returns their common directory. Version 24.9 registers sockets with epoll by io_uring; version 20
/// does not.
fn node() -> Result<String, String> {
    let home = top().join("target/tools/node");
    let to = home.to_str().ok_or("the checkout's path is not UTF-8")?.to_owned();
    for version in ["20", "24.9"] {
        if !home.join(version).join("node_modules/node/bin/node").exists() {
            let prefix = format!("{to}/{version}");
            run(
                "node",
                "npm",
                &["install", "--silent", "--foreground-scripts", "--prefix", &prefix, &format!("node@{version}")],
            )?;
        }
    }
    Ok(to)
}

/// Cost of `thruway run` for connections on TCP: all programs, or those with these names.
fn bench_fallback(names: &[&str], vars: &[(&str, &str)]) -> Result<(), String> {
    install(
        PROGRAMS.into_iter().filter(|(command, _)| *command == "npm" && !has(command)).map(|(_, package)| package),
    )?;
    let node = node()?;
    let vars = [vars, &[("NODE", &node)]].concat();
    run_with("bench", "bash", &[&["bench/run", "sockets", "fallback"], names].concat(), &vars)
}

/// Comparisons on this host.
const COMPARISONS: [&[&str]; 6] = [&[], &["sockets"], &["block"], &["nfs"], &["nfs", "again"], &["paths"]];

fn bench_smoke() -> Result<(), String> {
    run("libraries", "cargo", &["build", "--workspace", "--quiet"])?;
    let program = top().join("target/debug/thruway");
    let program = program.to_str().ok_or("the checkout's path is not UTF-8")?;
    let vars = [("THRUWAY_BENCH_SMOKE", "1"), ("THRUWAY_BENCH_PROGRAM", program)];
    for name in COMPARISONS {
        run_with(&format!("bench {}", name.join(" ")), "bash", &[&["bench/run"], name].concat(), &vars)?;
    }
    bench_fallback(&[], &vars)
}

/// Both programs are crates; they are built once.
fn posix() -> Result<(), String> {
    let tools = top().join("target/tools/posix");
    let to = tools.to_str().ok_or("the checkout's path is not UTF-8")?;
    for (program, version) in [("fsx", "0.3.2"), ("pjdfstest", "0.2.2")] {
        if !tools.join("bin").join(program).exists() {
            run(program, "cargo", &["install", "--locked", "--quiet", "--root", to, "--version", version, program])?;
        }
    }
    in_guest("posix.sh", &[to], 900)
}

/// Runs a script of the testbed that is no test of CI's, with the release program.
fn in_guest(script: &str, args: &[&str], limit_seconds: u64) -> Result<(), String> {
    run("release program", "cargo", &["build", "--release", "--quiet", "--package", "thruway"])?;
    let script = top().join("testbed").join(script);
    let script = script.to_str().ok_or("the checkout's path is not UTF-8")?;
    vm::guest(&[&["--limit", &limit_seconds.to_string(), "--", script], args].concat())
}

fn soak_nfs(minutes: &str) -> Result<(), String> {
    let minutes: u64 = minutes.parse().map_err(|e| format!("soak-nfs {minutes}: {e}"))?;
    let seed =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs() % 32768);
    println!("seed {seed}");
    // Clients may need minutes to write what they have.
    in_guest("nfs_soak.sh", &[&(minutes * 60).to_string(), &seed.to_string()], minutes * 60 + 300)
}

fn installed(package: &str) -> bool {
    let query = Command::new("dpkg-query").args(["-W", "-f", "${Status}", package]).output();
    query.is_ok_and(|o| String::from_utf8_lossy(&o.stdout).ends_with(" installed"))
}

/// The whole suite.
fn test() -> Result<(), String> {
    let mut steps = Steps::default();
    check(&mut steps);
    steps.run("tests", unit);
    steps.run("comparisons", bench_smoke);
    steps.run("loom", loom);
    steps.run("sanitizers", sanitize);
    steps.run("guests", || vm::test(""));
    steps.run("fuzz", || fuzz("10"));
    steps.finish()
}

fn format() -> Result<(), String> {
    run("format", "cargo", &["fmt", "--all", "--check"])
}

fn lints_of_all() -> Result<(), String> {
    run("lints", "cargo", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])
}

fn lints() -> Result<(), String> {
    lints_of_all()?;
    // Users can build without the benchmarks.
    let without_bench = ["clippy", "--package", "thruway", "--no-default-features", "--", "-D", "warnings"];
    run("lints without bench", "cargo", &without_bench)
}

fn pages() -> Result<(), String> {
    book::links()?;
    book::spelling()?;
    let documentation = ["doc", "--workspace", "--no-deps", "--document-private-items"];
    run_with("documentation", "cargo", &documentation, &[("RUSTDOCFLAGS", "-D warnings")])
}

fn licences() -> Result<(), String> {
    run("licences", "cargo", &["deny", "check", "bans", "licenses", "sources"])?;
    // Advisories come from a repository that not every machine can reach.
    if let Err(why) = run("advisories", "cargo", &["deny", "check", "advisories"]) {
        if env::var_os("THRUWAY_REQUIRE_ADVISORIES").is_some() {
            return Err(why);
        }
        eprintln!("    advisories NOT checked or not clean (set THRUWAY_REQUIRE_ADVISORIES=1 to insist): {why}");
    }
    Ok(())
}

fn check(steps: &mut Steps) {
    steps.run("format", format);
    steps.run("lints", lints);
    steps.run("documentation", pages);
    steps.run("words", words::check);
    steps.run("licences", licences);
}

/// What finds most mistakes, in a minute: nothing is installed, no other program is started, no rights are needed.
fn quick() -> Result<(), String> {
    format()?;
    lints_of_all()?;
    // A tenth of the simulations.
    let fewer = [("THRUWAY_SIMULATIONS", "200")];
    run_with("unit tests", "cargo", &["test", "--workspace", "--quiet", "--lib", "--bins"], &fewer)?;
    let conformance = ["test", "--quiet", "-p", "thruway-fabric", "--test", "main", "iwarp::default_configuration"];
    run("conformance", "cargo", &conformance)
}

/// Limit for all unit and integration tests, seconds. A test that hangs ends earlier (`.config/nextest.toml`).
const TESTS_MAX: &str = "2400";

/// Tests at a time for each processor: many wait for other processes.
const TESTS_PER_PROCESSOR: usize = 2;

fn test_threads() -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors * TESTS_PER_PROCESSOR).to_string()
}

fn unit() -> Result<(), String> {
    // Programs under test load these libraries, which no test is linked with.
    run("libraries", "cargo", &["build", "--workspace", "--quiet"])?;
    let vars = [("THRUWAY_LIBRARIES_BUILT", "1"), ("NEXTEST_TEST_THREADS", &test_threads()[..])];
    let nextest = ["--kill-after=10", TESTS_MAX, "cargo", "nextest", "run", "--workspace", "--profile", "all"];
    run_with("tests", "timeout", &nextest, &vars)?;
    run("examples in the documentation", "cargo", &["test", "--workspace", "--quiet", "--doc"])
}

fn loom() -> Result<(), String> {
    let args = [
        "test",
        "--quiet",
        "--target-dir",
        "target/loom",
        "--lib",
        "-p",
        "thruway-fabric",
        "-p",
        "thruway-iwarp",
        "--",
        "loom_",
    ];
    run_with("every order of threads", "cargo", &args, &[("RUSTFLAGS", "--cfg loom")])
}

/// Crates with unsafe code. Their tests run under AddressSanitizer; `fuzz/Cargo.toml` has those that are fuzzed.
const SANITIZED: [&str; 14] = [
    "memory", "tcp", "iwarp", "fabric", "engine", "fs", "server", "block", "sockets", "streams", "extended", "gss",
    "relay", "preload",
];

fn sanitize() -> Result<(), String> {
    let known = Command::new("cargo").args(["+nightly", "--version"]).output().is_ok_and(|o| o.status.success());
    if !known {
        run("nightly toolchain", "rustup", &["toolchain", "install", "nightly", "--profile", "minimal"])?;
    }
    let place = "--quiet --target x86_64-unknown-linux-gnu --target-dir target/sanitize";
    let threads = test_threads();
    let vars = [("RUSTFLAGS", "-Zsanitizer=address"), ("THRUWAY_SANITIZED", "1"), ("NEXTEST_TEST_THREADS", &threads)];
    let examples = format!("+nightly build {place} --lib --examples -p thruway-extended");
    run_with("examples", "cargo", &examples.split_whitespace().collect::<Vec<_>>(), &vars)?;
    let packages = SANITIZED.map(|name| format!(" -p thruway-{name}")).concat();
    let place = place.replace("--quiet", "--cargo-quiet");
    let args =
        format!("--kill-after=10 {TESTS_MAX} cargo +nightly nextest run --profile all {place} --lib --tests{packages}");
    let args: Vec<&str> = args.split_whitespace().collect();
    run_with("tests under AddressSanitizer", "timeout", &args, &vars)
}

/// Tests that Miri can run: codecs, tables, queues, and the memory that peers and devices write to.
const FOR_MIRI: [(&str, &str); 6] = [
    ("thruway-memory", "--skip sealed"),
    ("thruway-iwarp", "regions:: mpa:: ddp:: rdmap:: terminate::"),
    ("thruway-fabric", "reservation::"),
    // One needs advice on memory, which it does not know.
    ("thruway-engine", "pool:: segment:: --skip who_waits_for_few"),
    ("thruway-server", "a_failed_queue_keeps_no_blocks"),
    (
        "thruway-block",
        "cache::order cache::dirty_bitmap cache::range_lock::tests::w cache::range_lock::tests::two sequence:: generations:: \
         chunk_ranges:: big_endian:: readahead:: scsi::cdb nbd::wire iscsi::pdu",
    ),
];

fn miri() -> Result<(), String> {
    if !Command::new("cargo").args(["+nightly", "miri", "--version"]).output().is_ok_and(|o| o.status.success()) {
        run(
            "Miri",
            "rustup",
            &["toolchain", "install", "nightly", "--profile", "minimal", "-c", "miri", "-c", "rust-src"],
        )?;
    }
    let vars = [
        // It knows libc's calls and not the processor's.
        ("RUSTFLAGS", "--cfg rustix_use_libc"),
        // Registered memory is read in words and bytes alike, which its model of weak memory does not know.
        ("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation"),
        ("PROPTEST_CASES", "2"),
    ];
    for (package, tests) in FOR_MIRI {
        let args = ["+nightly", "miri", "test", "--target-dir", "target/miri", "--lib", "-p", package, "--"];
        let tests: Vec<&str> = tests.split_whitespace().collect();
        run_with(package, "cargo", &[&args[..], &tests].concat(), &vars)?;
    }
    Ok(())
}

fn soak(minutes: &str) -> Result<(), String> {
    let minutes: u64 = minutes.parse().map_err(|e| format!("soak {minutes}: {e}"))?;
    let test = |name, vars: &[(&str, &str)]| {
        run_with("soak", "cargo", &["test", "-p", "thruway", "--test", "main", name, "--", "--nocapture"], vars)
    };
    test("soak::", &[("THRUWAY_SOAK_SECONDS", &(minutes * 30).to_string())])?;
    // Some sixty a minute, and none of an earlier run's.
    let first = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    test("failing_disks::", &[("THRUWAY_SEEDS", &format!("{first}..{}", first + minutes * 20))])
}

/// Copies of random trees, some thousand in ten minutes. Then peers that send ten times as much as in the usual tests.
fn soak_copies(minutes: &str) -> Result<(), String> {
    let minutes: u64 = minutes.parse().map_err(|e| format!("soak-copies {minutes}: {e}"))?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let begin = Instant::now();
    let mut first = now * 1000;
    while begin.elapsed().as_secs() < minutes * 60 {
        let range = format!("{first}..{}", first + 100);
        let test = ["test", "--quiet", "-p", "thruway", "--test", "main", "random_trees::"];
        run_with(&format!("trees {range}"), "cargo", &test, &[("THRUWAY_SEEDS", &range)])?;
        first += 100;
    }
    let floods = ["test", "--quiet", "-p", "thruway-transfer", "--test", "main", "floods::"];
    run_with("floods", "cargo", &floods, &[("THRUWAY_FLOODS", "10")])
}

/// Alternates between two tests of accelerated sockets. The first compares random sequences of calls with the same calls on TCP, some
/// thousand a minute. In the second, a hostile peer stores arbitrary values in the shared memory.
fn soak_sockets(minutes: &str) -> Result<(), String> {
    let minutes: u64 = minutes.parse().map_err(|e| format!("soak-sockets {minutes}: {e}"))?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let begin = Instant::now();
    let mut first = now * 1000;
    while begin.elapsed().as_secs() < minutes * 60 {
        let range = format!("{first}..{}", first + 3000);
        let test = ["test", "--quiet", "-p", "thruway", "--test", "main"];
        let sequences = [&test[..], &["calls_return_what_tcp_returns"]].concat();
        run_with(&format!("sequences {range}"), "cargo", &sequences, &[("THRUWAY_SEEDS", &range)])?;
        let seed = first.to_string();
        let hostile = [&test[..], &["a_hostile_peer_breaks_only_its_own_connection"]].concat();
        let how = [("THRUWAY_HOSTILE_SECONDS", "60"), ("THRUWAY_HOSTILE_SEED", &seed[..])];
        run_with(&format!("hostile peer {seed}"), "cargo", &hostile, &how)?;
        first += 3000;
    }
    Ok(())
}

fn mutants(part: &str, rest: &[&str]) -> Result<(), String> {
    if !has("cargo-mutants") {
        run("cargo-mutants", "cargo", &["install", "--locked", "cargo-mutants"])?;
    }
    // Every n-th of them, so that a part has some of each file.
    let args = ["mutants", "--output", "target", "--shard", part, "--sharding", "round-robin"];
    let packages = [
        "-p",
        "thruway-block",
        "-p",
        "thruway-iwarp",
        "-p",
        "thruway-fabric",
        "-p",
        "thruway-transfer",
        "-p",
        "thruway-fs",
        "-p",
        "thruway-memory",
    ];
    // Nobody looks into them with a debugger.
    let vars = [("CARGO_PROFILE_DEV_DEBUG", "0"), ("CARGO_PROFILE_TEST_DEBUG", "0")];
    run_with("mutants", "cargo", &[&args[..], &packages, rest].concat(), &vars)
}

/// The libraries that are published.
const LIBRARIES: [&str; 14] = [
    "thruway-memory",
    "thruway-rdma-types",
    "thruway-tcp",
    "thruway-iwarp",
    "thruway-fabric",
    "thruway-engine",
    "thruway-fs",
    "thruway-server",
    "thruway-gss",
    "thruway-rpc",
    "thruway-transfer",
    "thruway-block",
    "thruway-vfs",
    "thruway-nfs",
];

/// What users of the libraries that were there at a revision would have to change since, beyond what the version says.
fn semver(rev: &str) -> Result<(), String> {
    if !has("cargo-semver-checks") {
        run("cargo-semver-checks", "cargo", &["install", "--locked", "cargo-semver-checks"])?;
    }
    let was_there = |library: &&&str| {
        let manifest = format!("{rev}:crates/{}/Cargo.toml", library.trim_start_matches("thruway-"));
        Command::new("git").args(["cat-file", "-e", &manifest]).status().is_ok_and(|status| status.success())
    };
    let packages = LIBRARIES.iter().filter(was_there).flat_map(|library| ["-p", *library]);
    let args: Vec<&str> = ["semver-checks", "--baseline-rev", rev].into_iter().chain(packages).collect();
    run("interfaces of the libraries", "cargo", &args)
}

fn fuzz(seconds: &str) -> Result<(), String> {
    run("fuzz targets", "bash", &["fuzz/run", seconds])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Crates with a little unsafe code in programs and plugins that tests start.
    const UNTESTED: [&str; 3] = ["bench", "fio", "thruway"];

    #[test]
    fn crates_with_unsafe_code_are_built_with_address_sanitizer() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
        let (fuzzed, manifest) = (read("fuzz/Cargo.lock"), read("fuzz/Cargo.toml"));
        for entry in fs::read_dir(root.join("crates")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let library = root.join(format!("crates/{name}/src/lib.rs"));
            let is_safe = fs::read_to_string(library).is_ok_and(|text| text.contains("#![forbid(unsafe_code)]"));
            let is_known = is_safe || UNTESTED.contains(&&*name);
            assert_eq!(!is_known, SANITIZED.contains(&&*name), "{name}: tests");
            let is_fuzzed = fuzzed.contains(&format!("name = \"thruway-{name}\"\n"));
            assert_eq!(
                is_fuzzed && !is_known,
                manifest.contains(&format!("\nthruway-{name} = {{ rustflags")),
                "{name}: fuzzing"
            );
        }
    }
}
