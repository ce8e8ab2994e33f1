//! `thruway run`: unmodified programs whose connections go on through shared memory.

#[path = "sockets/users.rs"]
mod users;

use crate::support;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use support::THRUWAY;

/// Builds the library beside the program, where it is looked for.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build("thruway-preload", "libthruway_preload.so"))
}

fn build(package: &str, library: &str) -> PathBuf {
    let beside = Path::new(THRUWAY).parent().unwrap();
    if std::env::var_os("THRUWAY_LIBRARIES_BUILT").is_some() {
        return beside.join(library);
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "-p", package]).current_dir(env!("CARGO_MANIFEST_DIR"));
    if beside.ends_with("release") {
        cargo.arg("--release");
    }
    let target = beside.parent().unwrap();
    assert!(cargo.arg("--target-dir").arg(target).status().unwrap().success(), "the library is built");
    beside.join(library)
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sockets").join(name)
}

/// A program, by `thruway run` with these options, or as it is.
fn program(run: Option<&[&str]>, args: &[&str]) -> Command {
    assert!(library().is_file());
    // The tests may have been started with ignored signals, as by `nohup`; the program must not inherit them.
    let mut command = Command::new("env");
    command.arg("--default-signal");
    if let Some(options) = run {
        command.args([THRUWAY, "run"]);
        if !options.contains(&"--after-calls") {
            command.args(["--after-calls", "1"]);
        }
        command.args(options).arg("--");
    }
    command.args(args);
    // A group of its own, so that all of it can be ended.
    command.process_group(0).stdin(Stdio::null());
    command
}

fn peers(run: Option<&[&str]>, args: &[&str]) -> Command {
    let path = script("peers.py");
    program(run, &[&["/usr/bin/python3", path.to_str().unwrap()], args].concat())
}

/// Ends with everything that it has started.
struct Running(Child);

impl Running {
    fn start(mut command: Command) -> Running {
        Running(command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap())
    }

    /// A server, and the port that it says.
    fn server(command: Command) -> (Running, String) {
        let mut server = Running::start(command);
        let port = server.line();
        (server, port)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        // A byte at a time: what follows is for the next call.
        let mut out = BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap());
        out.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// SIGKILL to all of it.
    fn kill(&mut self) {
        let _ = rustix::process::kill_process_group(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::KILL,
        );
        let _ = self.0.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs it to its end, which comes within this time or is a failure.
fn finish(mut command: Command) -> Output {
    let mut running = Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let (mut out, mut err) = (running.0.stdout.take().unwrap(), running.0.stderr.take().unwrap());
    let read = |pipe: &mut dyn Read| {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        bytes
    };
    std::thread::scope(|scope| {
        let out = scope.spawn(move || read(&mut out));
        let err = scope.spawn(move || read(&mut err));
        let limit = Instant::now() + Duration::from_secs(120);
        let status = loop {
            if let Some(status) = running.0.try_wait().unwrap() {
                break Some(status);
            }
            if Instant::now() > limit {
                running.kill();
                break None;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let (stdout, stderr) = (out.join().unwrap(), err.join().unwrap());
        let told = String::from_utf8_lossy(&stderr).into_owned();
        let status = status.unwrap_or_else(|| panic!("{command:?} does not end: {told}"));
        Output { status, stdout, stderr }
    })
}

/// It has ended well; what `--stats --json` has printed.
fn counters(output: &Output) -> BTreeMap<String, u64> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

const STATS: Option<&[&str]> = Some(&["--stats", "--json"]);
const RUN: Option<&[&str]> = Some(&[]);

#[test]
fn calls_return_what_tcp_returns() {
    let path = script("semantics.py");
    // Of `cargo xtask soak-sockets`: a range.
    let seeds = std::env::var("THRUWAY_SEEDS").unwrap_or("0..400".to_owned());
    let (first, end) = seeds.split_once("..").unwrap();
    let (first, end): (u64, u64) = (first.parse().unwrap(), end.parse().unwrap());
    let count = end - first;
    let (first, sequences) = (first.to_string(), count.to_string());
    let sequences = |run| program(run, &["/usr/bin/python3", path.to_str().unwrap(), &first, &sequences]);
    let plain = finish(sequences(None));
    assert!(plain.status.success(), "{}", String::from_utf8_lossy(&plain.stderr));
    let accelerated = finish(sequences(STATS));
    let counted = counters(&accelerated);
    assert_eq!(counted["accelerated"], 2 * count, "both ends of all: {counted:?}");
    assert!(counted["ring_bytes"] > 2_000 * count, "{counted:?}");
    let (plain, accelerated) = (String::from_utf8_lossy(&plain.stdout), String::from_utf8_lossy(&accelerated.stdout));
    assert!(plain.lines().count() as u64 > 50 * count);
    // What has been counted comes last.
    assert_eq!(plain.lines().count() + 1, accelerated.lines().count());
    for (plain, accelerated) in plain.lines().zip(accelerated.lines()) {
        assert_eq!(plain, accelerated, "sequence and call, end, what it has returned");
    }
}

#[test]
fn bytes_arrive_as_they_were_sent_in_every_kind_of_server() {
    for kind in ["echo_server", "epoll_server", "prefork_server", "fork_server"] {
        let (_server, port) = Running::server(peers(RUN, &[kind]));
        let counted = counters(&finish(peers(STATS, &["echo_client", &port, "3", "12"])));
        assert_eq!(counted["accelerated"], 3, "{kind}: {counted:?}");
        assert!(counted["ring_bytes"] > 100_000, "{kind}: {counted:?}");
    }
}

#[test]
fn peers_without_the_library_are_served_by_tcp() {
    let (_server, port) = Running::server(peers(None, &["echo_server"]));
    let counted = counters(&finish(peers(STATS, &["echo_client", &port, "2", "5"])));
    assert_eq!((counted["connections"], counted["accelerated"], counted["failed"]), (2, 0, 0), "{counted:?}");
    let (_server, port) = Running::server(peers(RUN, &["echo_server"]));
    assert!(finish(peers(None, &["echo_client", &port, "2", "5"])).status.success());
}

#[test]
fn connections_where_others_were_over_soon_are_accelerated_later() {
    let run = |options: &[&str], args: &[&str]| {
        let path = script("peers.py");
        let mut command = Command::new(THRUWAY);
        command.arg("run").args(options).args(["--", "/usr/bin/python3"]).arg(path).args(args);
        command.process_group(0).stdin(Stdio::null());
        command
    };
    assert!(library().is_file());
    let count = |options: &[&str], turns: &str| {
        let (_server, port) = Running::server(run(options, &["echo_server"]));
        let options = [options, COUNTED].concat();
        counters(&finish(run(&options, &["short_then_long", &port, "30", turns])))
    };
    // 24 calls are enough at first; what has then been learnt is that they are all there are.
    let counted = count(&[], "20");
    assert!(counted["short"] >= 25 && counted["accelerated"] <= 3, "{counted:?}");
    let counted = count(&[], "1000");
    assert!(counted["short"] >= 25 && (1..=4).contains(&counted["accelerated"]), "{counted:?}");
    assert!(counted["ring_sends"] > 100, "{counted:?}");
    // A number that was chosen holds for all.
    let counted = count(&["--after-calls", "4"], "20");
    assert!(counted["short"] == 0 && counted["accelerated"] > 15, "{counted:?}");
}

#[test]
fn who_waits_for_a_process_that_is_killed_learns_it() {
    for how in ["recv", "poll", "select", "epoll", "send", "flood"] {
        let (mut server, port) = Running::server(peers(RUN, &["silent_server"]));
        let mut victim = Running::start(peers(RUN, &["victim", &port, how]));
        assert_eq!(victim.line(), "ready", "{how}");
        server.kill();
        assert!(victim.line().starts_with("over"), "{how}");
    }
}

#[test]
fn both_ends_may_send_much_before_they_read() {
    let (mut server, port) = Running::server(peers(RUN, &["both_ways_server", "20000000"]));
    let counted = counters(&finish(peers(STATS, &["both_ways", &port, "20000000"])));
    assert!(counted["ring_bytes"] > 100_000, "not only by TCP: {counted:?}");
    assert!(server.0.wait().unwrap().success());
    // As much as TCP takes, by one thread that has both ends.
    assert_eq!(counters(&finish(peers(STATS, &["alone"])))["accelerated"], 2);
}

#[test]
fn limits_and_signals_end_calls_that_wait() {
    assert_eq!(counters(&finish(peers(STATS, &["limits"])))["accelerated"], 2);
}

#[test]
fn processes_that_share_a_connection_share_its_stream() {
    let (_server, port) = Running::server(peers(RUN, &["echo_server"]));
    let counted = counters(&finish(peers(STATS, &["shared", &port])));
    assert!(counted["accelerated"] == 1 && counted["ring_sends"] > 200, "{counted:?}");
}

#[test]
fn a_program_that_is_given_a_connection_finds_the_whole_stream() {
    for how in ["spawn", "fork"] {
        for pause in ["0", "0.2"] {
            let (_server, port) = Running::server(peers(RUN, &["hand_over_server", how]));
            let counted = counters(&finish(peers(STATS, &["hand_over_client", &port, pause])));
            assert_eq!(counted["accelerated"], 1, "{how}: {counted:?}");
        }
    }
}

/// Wherever the peer is, and whatever it waits by.
#[test]
fn a_program_without_the_library_is_handed_a_stream_in_the_middle() {
    let counted = counters(&compare_in_c("handed", STATS));
    assert!(counted["accelerated"] == 156 && counted["demoted"] == 78, "{counted:?}");
}

#[test]
fn rules_leave_connections_to_tcp() {
    let (_server, port) = Running::server(peers(RUN, &["echo_server"]));
    let counted = counters(&finish(peers(
        Some(&["--stats", "--json", "--tcp", &format!("1,{port}")]),
        &["echo_client", &port, "1", "3"],
    )));
    assert_eq!((counted["accelerated"], counted["by_rule"]), (0, 1), "{counted:?}");
    let lab = support::Lab::new();
    let policy = lab.path("policy.toml");
    std::fs::write(&policy, format!("[[rule]]\nports = \"{port}\"\nmode = \"tcp\"\n")).unwrap();
    let options = ["--explain", "--policy", policy.to_str().unwrap()];
    let output = finish(peers(Some(&options), &["echo_client", &port, "1", "3"]));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.contains("TCP: a rule says so"), "{told}");
    std::fs::write(&policy, "[[rule]]\nports = \"x\"\nmode = \"tcp\"\n").unwrap();
    let output = finish(program(Some(&["--policy", policy.to_str().unwrap()]), &["true"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ports = \"x\""));
    // One that needs what the program is not run with.
    std::fs::write(&policy, format!("[[rule]]\nports = {port}\nmode = \"relay\"\n")).unwrap();
    let output = finish(peers(Some(&options), &["echo_client", &port, "1", "3"]));
    let told = support::stderr(&output);
    assert!(
        output.status.success()
            && told.contains("TCP: a rule says that it goes through the relay, which needs --remote"),
        "{told}"
    );
}

#[test]
fn limits_hold_and_what_cannot_have_an_effect_is_an_error() {
    let lab = support::Lab::new();
    let policy = lab.path("policy.toml");
    let library = lab.path("library.so");
    std::fs::write(&policy, "memory = \"512K\"\n").unwrap();
    let of_policy = ["--policy", policy.to_str().unwrap()];
    for (options, status, why) in [
        (&of_policy[..], 2, "a connection needs"),
        (&["--provider", "iwarp"], 2, "--provider needs --remote"),
        (&["--relay-port", "7000"], 2, "--relay-port needs --remote"),
        (&["--plaintext"], 2, "--plaintext needs --remote"),
        (&["--spin", "1001"], 2, "1000 microseconds at most"),
    ] {
        let output = finish(program(Some(options), &["true"]));
        assert!(output.status.code() == Some(status) && support::stderr(&output).contains(why), "{output:?}");
    }
    let mut command = program(RUN, &["true"]);
    let output = finish(std::mem::replace(command.env("THRUWAY_PRELOAD", &library), Command::new("true")));
    assert!(output.status.code() == Some(125) && support::stderr(&output).contains("which is no file"), "{output:?}");
    // More than with rings of the size for each that there is memory for; they have smaller ones.
    std::fs::write(&policy, "memory = \"4M\"\n").unwrap();
    let (_server, port) = Running::server(peers(Some(&of_policy), &["echo_server"]));
    let counted =
        counters(&finish(peers(Some(&[&of_policy[..], COUNTED].concat()), &["echo_client", &port, "16", "2"])));
    // On a busy machine the two ends of some do not meet.
    assert!(counted["accelerated"] > 8 && counted["connections"] == 16, "{counted:?}");
    // The first that is enough.
    std::fs::write(&policy, "memory = \"520K\"\n").unwrap();
    let (_server, port) = Running::server(peers(RUN, &["echo_server"]));
    let counted =
        counters(&finish(peers(Some(&[&of_policy[..], COUNTED].concat()), &["echo_client", &port, "1", "3"])));
    assert_eq!((counted["accelerated"], counted["connections"]), (1, 1), "{counted:?}");
    // Its peer's rings are larger than all of its memory, if it is the peer that makes them.
    std::fs::write(&policy, "memory = \"300K\"\nring = \"64K\"\n").unwrap();
    let counted =
        counters(&finish(peers(Some(&[&of_policy[..], COUNTED].concat()), &["echo_client", &port, "1", "3"])));
    assert_eq!((counted["accelerated"] + counted["no_memory"], counted["failed"]), (1, 0), "{counted:?}");
}

#[test]
fn the_program_ends_as_it_would_alone() {
    for options in [&[][..], &["--stats"]] {
        assert_eq!(finish(program(Some(options), &["sh", "-c", "exit 7"])).status.code(), Some(7));
    }
    assert_eq!(finish(program(RUN, &["sh", "-c", "kill -9 $$"])).status.signal(), Some(9));
    for signal in [9, 15] {
        let how = format!("kill -{signal} $$");
        assert_eq!(finish(program(STATS, &["sh", "-c", &how])).status.signal(), Some(signal));
    }
    for options in [RUN, STATS] {
        assert_eq!(finish(program(options, &["/etc/passwd"])).status.code(), Some(126));
        assert_eq!(finish(program(options, &["/nonexistent/program"])).status.code(), Some(127));
    }
    let output = finish(program(RUN, &["/nonexistent/program"]));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nonexistent/program"));
    // What is ignored stays ignored.
    let lab = support::Lab::new();
    let assignment = lab.path("grep=1");
    std::os::unix::fs::symlink("/bin/grep", &assignment).unwrap();
    let ignored = |run: &str, grep: &str| {
        let script = format!("trap '' PIPE HUP XFSZ; {run} {grep} SigIgn /proc/self/status");
        let output = finish(program(None, &["sh", "-c", &script]));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let plain = ignored("", "grep");
    let bits = |text: &str| u64::from_str_radix(text.split_whitespace().last().unwrap(), 16).unwrap() & 0x1001001;
    assert_eq!(bits(&plain), 0x1001001, "{plain}");
    for run in ["run --", "run --stats --"] {
        for grep in ["grep", assignment.to_str().unwrap()] {
            assert_eq!(bits(&ignored(&format!("{THRUWAY} {run}"), grep)), 0x1001001, "{run} {grep}");
        }
    }
    // Which does not keep a program from handling it.
    let python =
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])";
    let handler = "import signal, sys, time\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(6))\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)";
    let run = ["/usr/bin/python3", "-c", python, THRUWAY, "run", "--stats", "--", "/usr/bin/python3", "-c", handler];
    let mut waits = Running::start(program(None, &run));
    assert_eq!(waits.line(), "ready");
    rustix::process::kill_process(rustix::process::Pid::from_child(&waits.0), rustix::process::Signal::INT).unwrap();
    assert_eq!(waits.0.wait().unwrap().code(), Some(6));
    // It gets the signals that its parent gets.
    let mut waits = Running::start(program(
        Some(&["--stats"]),
        &["sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done"],
    ));
    assert_eq!(waits.line(), "ready");
    rustix::process::kill_process(rustix::process::Pid::from_child(&waits.0), rustix::process::Signal::TERM).unwrap();
    assert_eq!(waits.0.wait().unwrap().code(), Some(5));
}

#[test]
fn a_supervised_program_gets_the_signals_that_it_would_handle_alone() {
    const HANDLER: &str = r#"
import signal, sys, time
names = sys.argv[1:]
numbers = [int(name) for name in names]
seen = set()
for number in numbers:
    signal.signal(number, lambda number, _: seen.add(number))
print("ready", flush=True)
while seen != set(numbers):
    time.sleep(0.01)
"#;
    // ALRM, USR1, WINCH, PWR, real-time ones.
    let numbers = ["14", "10", "28", "30", "34", "37", "64"];
    let args = [&["/usr/bin/python3", "-c", HANDLER], &numbers[..]].concat();
    let mut supervised = Running::start(program(STATS, &args));
    assert_eq!(supervised.line(), "ready");
    for number in numbers {
        let to = supervised.0.id().to_string();
        assert!(Command::new("kill").args([&format!("-{number}"), &to]).status().unwrap().success());
    }
    assert_eq!(supervised.0.wait().unwrap().code(), Some(0));
}

#[test]
fn what_cannot_be_run_leaves_nothing_behind() {
    let lab = support::Lab::new();
    let (temporary, report) = (lab.path("temporary"), lab.path("report"));
    std::fs::create_dir(&temporary).unwrap();
    std::fs::write(&report, "of another run").unwrap();
    let options = ["--stats", "--report", report.to_str().unwrap(), "--every", "60"];
    let output = finish(std::mem::replace(
        program(Some(&options), &["/nonexistent/program"]).env("TMPDIR", &temporary),
        Command::new("true"),
    ));
    assert_eq!(output.status.code(), Some(127));
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
    assert_eq!(std::fs::read_to_string(&report).unwrap(), "of another run");
    assert!(!lab.path("report.part").exists());
}

/// `ulimit -f`: what makes a file longer than that is ended by SIGXFSZ, also if it is of memory.
#[test]
fn a_limit_on_the_length_of_files_ends_no_program() {
    let lab = support::Lab::new();
    let policy = lab.path("policy.toml");
    for (kilobytes, is_accelerated) in [("4", false), ("100", false), ("unlimited", true)] {
        // A fresh board each time, which is a file as well.
        let board = lab.path(kilobytes);
        std::fs::create_dir(&board).unwrap();
        std::fs::write(&policy, format!("board = \"{}\"\n", board.display())).unwrap();
        let path = script("peers.py");
        let limited = |options: &[&str], args: &[&str]| {
            let script = "ulimit -f $0 && exec \"$@\"";
            let run = [&[THRUWAY, "run", "--after-calls", "1", "--policy", policy.to_str().unwrap()], options].concat();
            let peers = [&["--", "/usr/bin/python3", path.to_str().unwrap()], args].concat();
            let mut command = program(None, &["bash", "-c", script, kilobytes]);
            command.args(run).args(peers);
            command
        };
        library();
        let (_server, port) = Running::server(limited(&[], &["echo_server"]));
        let output = finish(limited(&["--stats", "--explain"], &["echo_client", &port, "1", "20"]));
        assert!(output.status.success(), "{kilobytes}: {output:?}");
        let is_now = support::stderr(&output).contains("ring_bytes");
        assert_eq!(is_now, is_accelerated, "{kilobytes}: {}", support::stderr(&output));
    }
    // Too short for what is counted.
    let line = format!("ulimit -f 1; exec {THRUWAY} run --stats -- true");
    let output = finish(program(None, &["bash", "-c", &line]));
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(support::stderr(&output).contains("File too large"), "{output:?}");
}

/// A program that counts its interrupts until there have been none for a while.
const INTERRUPTED: &str = r#"
import signal, sys, time
last, count = time.time(), 0
def interrupted(*_):
    global last, count
    last, count = time.time(), count + 1
    print("interrupt", count, flush=True)
signal.signal(signal.SIGINT, interrupted)
print("ready", flush=True)
while count == 0 or time.time() < last + 0.5:
    time.sleep(0.01)
"#;

/// The terminal and `timeout` signal all processes of a group.
#[test]
fn a_program_is_interrupted_once_and_by_what_ends_it_ends_its_supervisor() {
    let terminal = script("terminal.py");
    let terminal = terminal.to_str().unwrap();
    let interrupts = |output: &Output| String::from_utf8_lossy(&output.stdout).matches("interrupt").count();
    for options in ["", "--stats", "--explain"] {
        let options: Vec<&str> = options.split_terminator(' ').collect();
        let run = [&[THRUWAY, "run"], &options[..], &["--", "/usr/bin/python3", "-c", INTERRUPTED]].concat();
        let pressed = finish(program(None, &[&["/usr/bin/python3", terminal], &run[..]].concat()));
        assert_eq!(interrupts(&pressed), 1, "{options:?}: {}", String::from_utf8_lossy(&pressed.stdout));
        // To itself, and to its group.
        let timed = finish(program(None, &[&["timeout", "-s", "INT", "2"], &run[..]].concat()));
        assert!((1..=2).contains(&interrupts(&timed)), "{options:?}");
        // A shell ends with a program that was interrupted, rather than to go on with the next.
        let line = format!("{THRUWAY} run {} -- sh -c 'echo ready; exec sleep 60'; echo next", options.join(" "));
        let script = finish(program(None, &["/usr/bin/python3", terminal, "bash", "-c", &line]));
        let said = String::from_utf8_lossy(&script.stdout);
        assert!(said.contains("signal 2") && !said.contains("next"), "{options:?}: {said}");
    }
    // Who kills the supervisor means the program.
    let mut killed = Running::start(program(STATS, &["sh", "-c", "echo $$; exec sleep 60"]));
    let pid: i32 = killed.line().parse().unwrap();
    killed.0.kill().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    while rustix::process::test_kill_process(pid).is_ok() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn what_is_counted_goes_to_a_file_beside_the_programs_output() {
    let lab = support::Lab::new();
    let report = lab.path("report.json");
    let options = ["--stats", "--json", "--report", report.to_str().unwrap()];
    let output = finish(program(Some(&options), &["printf", "out"]));
    assert_eq!(output.stdout, b"out");
    let counted: BTreeMap<String, u64> = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    assert_eq!(counted["processes"], 1);
    // Where it cannot be written, the program's own status counts.
    let full =
        finish(program(None, &["sh", "-c", &format!("{THRUWAY} run --stats --json -- sh -c 'exit 3' >/dev/full")]));
    assert_eq!(full.status.code(), Some(3));
    // Without --stats and --explain it has the counters.
    let alone = finish(program(Some(&["--report", report.to_str().unwrap()]), &["true"]));
    assert!(alone.status.success() && std::fs::read_to_string(&report).unwrap().contains("thruway: processes"));
    // With --json, explanations are part of the object.
    for (options, has_counters) in [(&["--explain", "--json"][..], false), (&["--explain", "--stats", "--json"], true)]
    {
        let output = finish(program(Some(options), &["true"]));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(object["explain"][0].as_str().unwrap().contains("no TCP connection"), "{object}");
        assert_eq!(object["processes"].as_u64(), has_counters.then_some(1), "{object}");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let nowhere = finish(program(Some(&["--stats", "--report", "/nonexistent/report"]), &["true"]));
    assert_eq!(nowhere.status.code(), Some(125));
}

#[test]
fn a_running_programs_counts_can_be_read() {
    let lab = support::Lab::new();
    let report = lab.path("report.json");
    std::fs::write(&report, "of another run").unwrap();
    let options = ["--stats", "--json", "--report", report.to_str().unwrap(), "--every", "1"];
    let script = "import socket, sys\nsocket.socket()\nprint(flush=True)\nsys.stdin.readline()";
    let mut running = Running::start(program(Some(&options), &["/usr/bin/python3", "-c", script]));
    running.line();
    let read = || serde_json::from_slice::<BTreeMap<String, u64>>(&std::fs::read(&report).ok()?).ok();
    // A reader finds all of a report, written while the program runs.
    let counted = loop {
        match read() {
            Some(counted) => break counted,
            None => assert!(std::fs::read(&report).unwrap() == b"of another run" || read().is_some(), "a part"),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert_eq!(counted["processes"], 1);
    running.kill();
    for (options, status) in [
        (&["--stats", "--every", "1"][..], 2),
        (&["--stats", "--every", "0", "--report", "x"], 2),
        (&["--stats", "--every", "1", "--report", "/dev/full"], 2),
        (&["--stats", "--every", "1", "--report", "/nonexistent/report"], 125),
    ] {
        assert_eq!(finish(program(Some(options), &["true"])).status.code(), Some(status), "{options:?}");
    }
}

/// Results of CPython's own tests by name: the interpreter is a program that uses sockets in all ways that there are.
fn python_tests(run: Option<&[&str]>, report: &Path) -> Vec<String> {
    const MODULES: [&str; 5] = ["test_socket", "test_selectors", "test_epoll", "test_poll", "test_socketserver"];
    let mut args = vec!["/usr/bin/python3", "-m", "test", "--junit-xml", report.to_str().unwrap()];
    // Virtual machines' sockets, which wait for a host that answers.
    args.extend(["--ignore", "*VSOCK*"]);
    // Fails on a busy machine: it limits the time that a call takes.
    args.extend(["--ignore", "*SelectorTestCase.test_timeout"]);
    args.extend(MODULES);
    let output = finish(program(run, &args));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let xml = std::fs::read_to_string(report).unwrap_or_else(|error| panic!("no report ({error}): {told}"));
    let mut results: Vec<String> = xml
        .split("<testcase ")
        .skip(1)
        .map(|case| {
            let name = case.split("name=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
            let result = ["<failure", "<error", "<skipped"].into_iter().find(|kind| case.contains(kind));
            format!("{name} {}", result.unwrap_or("ok"))
        })
        .collect();
    results.sort();
    assert!(results.len() > 600, "{}: {told}", results.len());
    results
}

#[test]
fn pythons_own_tests_have_the_results_that_they_have_without() {
    let lab = support::Lab::new();
    let plain = python_tests(None, &lab.path("plain.xml"));
    let accelerated = python_tests(RUN, &lab.path("accelerated.xml"));
    assert_eq!(plain, accelerated);
}

#[test]
fn programs_in_c_wait_and_start_others_as_on_tcp() {
    compare_in_c("waiting", RUN);
}

/// Threads that close, fork and send beside each other.
#[test]
fn threads_in_c_find_their_own_connections_as_on_tcp() {
    let counted = counters(&compare_in_c("threads", STATS));
    // One connection after the other between the same two processes.
    assert!(counted["accelerated"] > 4_000 && counted["reused"] > 3_000, "{counted:?}");
}

/// Builds a program in C of `tests/sockets`.
fn build_c(lab: &support::Lab, name: &str, libraries: &[&str]) -> PathBuf {
    let to = lab.path(name);
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Wno-unused-result", "-o"]).arg(&to).arg(script(&format!("{name}.c"))).arg("-lpthread");
    assert!(cc.args(libraries).status().unwrap().success(), "{name}.c is built");
    to
}

/// A number from the environment.
fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

/// Signal handlers interrupt a call on a connection. They run on any stack, and send on the same connection or jump out of the call.
/// Threads are cancelled in such a call.
#[test]
fn handlers_and_jumps_leave_streams_as_on_tcp() {
    let counted = counters(&compare_in_c("jumps", STATS));
    assert!(counted["accelerated"] == 8, "{counted:?}");
}

/// Options that only the kernel's TCP supports are set while a connection is in use.
#[test]
fn options_that_need_tcp_are_honoured_from_the_call_on() {
    let counted = counters(&compare_in_c("options", STATS));
    assert!(counted["accelerated"] == 8 && counted["demoted"] == 3, "{counted:?}");
}

/// Waits and receives by the C library's `syscall` return the same results as its functions for them.
#[test]
fn programs_that_make_system_calls_by_number_wait_as_on_tcp() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "rings", &["-luring"]);
    let counted = counters(&compare(STATS, &[path.to_str().unwrap(), "raw"]));
    assert!(counted["accelerated"] > 0 && counted["demoted"] == 0, "{counted:?}");
}

/// Small messages that each need a doorbell cost more than TCP, so their connections go back to TCP.
#[test]
fn programs_that_need_a_doorbell_for_each_message_go_back_to_tcp() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "rings", &["-luring"]);
    let counted = counters(&compare(STATS, &[path.to_str().unwrap(), "exclusive"]));
    assert!(counted["accelerated"] > 0 && counted["doorbells_only"] > 0, "{counted:?}");
}

/// Connections of a process that uses io_uring stay on TCP. If they are accelerated when it creates a ring, they go back to TCP without
/// loss.
#[test]
fn programs_that_use_io_uring_wait_and_receive_as_on_tcp() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "rings", &["-luring"]);
    let early = counters(&compare(STATS, &[path.to_str().unwrap(), "early"]));
    assert!(early["accelerated"] == 0 && early["io_uring"] == 6, "{early:?}");
    let late = counters(&compare(STATS, &[path.to_str().unwrap(), "late"]));
    assert!(late["accelerated"] > 0 && late["io_uring"] == 6, "{late:?}");
}

/// A ring that the program creates by its own system call instructions is recognised by its descriptor.
#[test]
fn programs_with_liburing_built_in_wait_and_receive_as_on_tcp() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "rings", &["-l:liburing.a"]);
    let counted = counters(&compare(STATS, &[path.to_str().unwrap(), "early"]));
    assert!(counted["accelerated"] == 0 && counted["io_uring"] == 6, "{counted:?}");
}

/// A peer stores random values anywhere in the shared memory, for `THRUWAY_HOSTILE_SECONDS`, from the seed `THRUWAY_HOSTILE_SEED`.
#[test]
fn a_hostile_peer_breaks_only_its_own_connection() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "hostile", &[]);
    let seconds = from_environment("THRUWAY_HOSTILE_SECONDS", 10).to_string();
    let seed = from_environment("THRUWAY_HOSTILE_SEED", 1).to_string();
    let output = finish(program(STATS, &[path.to_str().unwrap(), &seconds, &seed]));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "seed {seed}: {:?}, {told}{}", output.status, support::stderr(&output));
    assert!(counters(&output)["accelerated"] > 200, "{told}");
}

/// Bytes of both directions are sent again by TCP, each by one end for the other.
#[test]
fn both_ends_may_go_back_to_tcp_at_the_same_time() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "mutual", &[]);
    // The ring has all bytes, or the first of them.
    for (ring, args) in [("256K", &[][..]), ("4K", &[]), ("4K", &["ends"])] {
        let args = [&[path.to_str().unwrap()], args].concat();
        let output = finish(program(Some(&["--ring", ring, "--stats", "--json"]), &args));
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{ring}: {told}");
        assert_eq!(counters(&output)["demoted"], 2, "{ring}: {told}");
    }
}

/// A peer that begins to return bytes and never ends keeps a thread neither from its other connections, nor from its own for ever.
#[test]
fn a_peer_that_never_returns_its_bytes_holds_up_no_event_loop() {
    let lab = support::Lab::new();
    let output = finish(program(STATS, &[build_c(&lab, "returning", &[]).to_str().unwrap()]));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && told.contains("others are served"), "{told}");
}

/// Doorbells cause no event of their own, and hide none.
#[test]
fn events_without_bytes_do_not_come_from_doorbells() {
    let counted = counters(&compare_in_c("doorbells", STATS));
    assert!(counted["accelerated"] > 40 && counted["doorbells"] > 40, "{counted:?}");
}

/// The ring and the TCP connection are full, and TCP has room for fewer bytes again than the program without the library has to get.
#[test]
fn a_full_connection_becomes_the_standard_input_of_another_program() {
    let counted = counters(&compare_in_c("inetd", STATS));
    assert!(counted["accelerated"] == 8 && counted["demoted"] >= 4, "{counted:?}");
}

/// A thread has an event of a connection, and changes its registration, before another thread's call has returned that registers it.
#[test]
fn registrations_change_while_another_thread_makes_them() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "registering", &[]);
    let counted = counters(&compare(STATS, &[path.to_str().unwrap(), "1000"]));
    // Every second connection is registered with `EPOLLONESHOT`.
    assert!(counted["accelerated"] + counted["one_shot"] > 1000 && counted["one_shot"] > 0, "{counted:?}");
}

#[test]
fn the_last_message_of_a_peer_that_is_killed_is_read_after_another_program_was_started() {
    let counted = counters(&compare_in_c("killed", STATS));
    assert!(counted["accelerated"] >= 10, "{counted:?}");
}

/// An event without data stops a loop with blocking sockets.
#[test]
fn loops_with_blocking_sockets_get_no_event_without_data() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "spurious", &[]);
    for how in ["exclusive", "inherited", "duplicate"] {
        let counted = counters(&compare(STATS, &[path.to_str().unwrap(), how]));
        assert!(counted["accelerated"] > 0 && counted["ring_bytes"] > 10_000, "{how}: {counted:?}");
    }
}

/// After a fork, only one of the processes maps the shared memory of a connection.
#[test]
fn processes_that_share_a_connection_use_no_memory_that_they_do_not_have() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "forked", &[]);
    for mode in ["turns", "memory"] {
        let run = [THRUWAY, "run", "--after-calls", "16", "--", path.to_str().unwrap(), mode];
        let output = finish(program(None, &run));
        assert!(output.status.success(), "{mode}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn a_thread_that_waits_survives_the_end_of_a_connection_that_is_shared() {
    let counted = counters(&compare_in_c("closed", STATS));
    assert!(counted["accelerated"] >= 10, "{counted:?}");
}

#[test]
fn a_child_that_is_killed_loses_no_data_of_its_parent() {
    let counted = counters(&compare_in_c("terminated", STATS));
    assert!(counted["accelerated"] >= 5, "{counted:?}");
}

/// A peer that was not asked for doorbells, because the program looked at the ring, is asked for them.
#[test]
fn a_child_and_a_signal_learn_of_bytes_that_epoll_would_have_found() {
    let counted = counters(&compare_in_c("inherited", STATS));
    assert!(counted["accelerated"] >= 10, "{counted:?}");
}

/// When a thread starts a program, connections of other threads go back to TCP, while their descriptors are closed and reused.
#[test]
fn programs_that_a_thread_starts_harm_no_connection_of_the_others() {
    let counted = counters(&compare_in_c("starting", STATS));
    assert!(counted["demoted"] > 0, "{counted:?}");
    // While another thread waits in `splice` for a pipe; and with both ends in the process that forks.
    let lab = support::Lab::new();
    let path = build_c(&lab, "starting", &[]);
    for how in ["splice", "fork"] {
        let counted = counters(&compare(STATS, &[path.to_str().unwrap(), how]));
        assert!(counted["demoted"] > 0, "{how}: {counted:?}");
    }
    // A connection goes back to TCP while the kernel's `send` of another thread has sent its bytes and has not returned.
    let late = build_c(&lab, "late", &["-shared", "-fPIC"]);
    let mut run = program(STATS, &[path.to_str().unwrap()]);
    run.env("LD_PRELOAD", late);
    let output = finish(run);
    assert!(output.status.success() && counters(&output)["demoted"] > 0, "{}", String::from_utf8_lossy(&output.stdout));
}

/// An event is returned to one thread or process, once for each call of `epoll_ctl`, with the data of that call.
#[test]
fn events_of_connections_registered_for_one_event_come_once() {
    let counted = counters(&compare_in_c("oneshots", STATS));
    // All of the first two parts go back to TCP; of the others, those that the program has read to the end.
    assert!(counted["accelerated"] == 64 && (8..=32).contains(&counted["one_shot"]), "{counted:?}");
}

/// Events of connections with unread bytes, and of files that have the data of such a connection, are those of plain TCP.
#[test]
fn events_of_connections_with_unread_bytes_are_those_of_tcp() {
    let counted = counters(&compare_in_c("reported", STATS));
    assert!(counted["accelerated"] >= 40, "{counted:?}");
}

/// Each process remembers what it has registered itself, and the kernel has the registrations of all.
#[test]
fn processes_that_share_an_epoll_instance_get_the_events_of_each_others_registrations() {
    let counted = counters(&compare_in_c("shared", STATS));
    assert!(counted["accelerated"] >= 10, "{counted:?}");
}

#[test]
fn a_dissolved_connection_is_reset_and_its_socket_may_be_connected_elsewhere() {
    let counted = counters(&compare_in_c("dissolved", STATS));
    assert!(counted["accelerated"] >= 4, "{counted:?}");
}

/// The C library's threads read and write by calls that are not seen.
#[test]
fn asynchronous_input_and_output_is_as_over_tcp() {
    let counted = counters(&compare_in_c("aio", STATS));
    assert!(counted["demoted"] >= 2, "{counted:?}");
}

/// The direction of the process that starts a program goes by TCP then: it cannot ring for a peer that waits.
#[test]
fn a_request_is_read_by_a_process_that_has_started_another_program() {
    let counted = counters(&compare_in_c("called", STATS));
    assert!(counted["demoted"] > 0, "{counted:?}");
}

/// The doorbell is suppressed: the call that sleeps looks again, and the sender rings again for a sleeper that the library does not see.
#[test]
fn bytes_without_a_doorbell_end_a_sleep_nevertheless() {
    let counted = counters(&compare_in_c("missed", STATS));
    assert!(counted["accelerated"] >= 30 && counted["missed"] > 0 && counted["repeated"] > 0, "{counted:?}");
}

#[test]
fn signal_handlers_end_waits_as_on_tcp() {
    let counted = counters(&compare_in_c("interrupted", STATS));
    assert!(counted["accelerated"] == 6, "{counted:?}");
}

#[test]
fn a_program_may_look_at_a_connection_that_another_one_reads() {
    compare_in_c("looked", RUN);
}

/// Also where unread bytes of TCP precede those in shared memory.
#[test]
fn each_arrival_is_an_edge_behind_unread_bytes() {
    let counted = counters(&compare_in_c("pieces", STATS));
    assert!(counted["accelerated"] == 6, "{counted:?}");
}

/// The waiter has the instance from its parent, or waits for an instance around it, or for an instance without connections.
#[test]
fn bytes_behind_unread_ones_wake_waiters_of_each_kind() {
    let counted = counters(&compare_in_c("unread", STATS));
    assert!(counted["accelerated"] == 8, "{counted:?}");
}

/// Bytes behind an urgent one are read, also where the kernel counts none because the urgent one is next. A call that receives ends at its mark.
#[test]
fn urgent_data_and_bytes_behind_it_arrive_as_on_tcp() {
    let counted = counters(&compare_in_c("urgent", STATS));
    assert!(counted["accelerated"] == 24, "{counted:?}");
}

/// Builds a C program, and applies [`compare`] to it.
fn compare_in_c(name: &str, options: Option<&[&str]>) -> Output {
    let lab = support::Lab::new();
    compare(options, &[build_c(&lab, name, &[]).to_str().unwrap()])
}

/// Runs a program on TCP and accelerated. Asserts that both runs succeed with the same output; returns that of the accelerated run.
fn compare(options: Option<&[&str]>, args: &[&str]) -> Output {
    let plain = finish(program(None, args));
    let accelerated = finish(program(options, args));
    let said = |output: &Output| String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>();
    assert!(plain.status.success() && accelerated.status.success(), "{:?}", said(&accelerated));
    // What has been counted comes last.
    let has_counted = said(&accelerated).last().is_some_and(|line| line.starts_with('{'));
    let lines = said(&accelerated).len() - usize::from(has_counted);
    assert_eq!(said(&plain), said(&accelerated)[..lines]);
    accelerated
}

/// Messages by which both ends find each other go through the ring, too.
#[test]
fn extended_sockets_meet_over_connections_that_are_accelerated_or_not() {
    let extended = build("thruway-extended", "libthruway_extended.so");
    let (path, extended) = (script("extended.py"), extended.to_str().unwrap().to_owned());
    for (server, client) in [(true, true), (true, false), (false, true), (false, false)] {
        let command = |run: bool, args: &[&str]| {
            let args = [&["/usr/bin/python3", path.to_str().unwrap(), &extended], args].concat();
            program(run.then_some(&[][..]), &args)
        };
        let (mut serving, port) = Running::server(command(server, &["server"]));
        let mut calling = Running::start(command(client, &["client", &port]));
        assert_eq!((calling.line(), serving.line()), ("ok".to_owned(), "ok".to_owned()), "{server}, {client}");
    }
}

/// Has a relay carry connections that would be within this host: what `thruway run` is given for that.
struct Relayed {
    lab: support::Lab,
    options: Vec<String>,
}

impl Relayed {
    fn new(more: &[&str]) -> Relayed {
        Relayed::with_descriptors(more, None)
    }

    /// With a limit of descriptors for the relay.
    fn with_descriptors(more: &[&str], limit: Option<u32>) -> Relayed {
        let lab = support::Lab::new();
        let path = |name: &str| lab.path(name).to_str().unwrap().to_owned();
        let key = path("key");
        let made = finish(program(None, &[THRUWAY, "keygen", "--quiet", "--output", &key]));
        assert!(made.status.success(), "{}", support::stderr(&made));
        std::fs::rename(lab.path("key.pub"), lab.path("peers")).unwrap();
        std::fs::write(lab.path("policy.toml"), "[[rule]]\nports = \"1-65535\"\nmode = \"relay\"\n").unwrap();
        let started = |port: u16| {
            let port = port.to_string();
            let options = ["--remote", "--relay-port", &port, "--provider", "iwarp", "--key", &key];
            let options = options.map(str::to_owned).into_iter();
            let files = ["--peers".to_owned(), path("peers"), "--policy".to_owned(), path("policy.toml")];
            let options = options.chain(files).chain(more.iter().map(|&option| option.to_owned()));
            let options: Vec<String> = options.collect();
            let run: Vec<&str> = options.iter().map(String::as_str).collect();
            let limits = limit.map(|limit| ["prlimit".to_owned(), format!("--nofile={limit}")]);
            let limits = limits.iter().flatten().map(String::as_str);
            let args: Vec<&str> = limits.chain([THRUWAY, "run"]).chain(run).chain(["--", "true"]).collect();
            let output = finish(program(None, &args));
            let is_taken = support::stderr(&output).contains("in use");
            assert!(output.status.success() || is_taken, "{}", support::stderr(&output));
            output.status.success().then_some(options)
        };
        // Free at this moment: what makes connections meanwhile may take it.
        let free = || std::net::TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
        let options = std::iter::repeat_with(free).take(10).find_map(started).expect("a port");
        Relayed { lab, options }
    }

    /// The relay itself.
    fn relay(&self) -> rustix::process::Pid {
        let key = self.lab.path("key");
        let is_it = |process: &std::fs::DirEntry| {
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            words.contains(&&b"relay"[..]) && words.contains(&key.as_os_str().as_encoded_bytes())
        };
        let found: Vec<_> = std::fs::read_dir("/proc").unwrap().flatten().filter(is_it).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        rustix::process::Pid::from_raw(found[0].file_name().to_str().unwrap().parse().unwrap()).unwrap()
    }

    fn kill_relay(&self) {
        rustix::process::kill_process(self.relay(), rustix::process::Signal::KILL).unwrap();
    }

    fn run(&self, options: &[&str], args: &[&str]) -> Command {
        let options: Vec<&str> = self.options.iter().map(String::as_str).chain(options.iter().copied()).collect();
        let mut command = program(Some(&options), args);
        command.env("SLOW", "1");
        command
    }

    fn peers(&self, options: &[&str], args: &[&str]) -> Command {
        let path = script("peers.py");
        self.run(options, &[&["/usr/bin/python3", path.to_str().unwrap()], args].concat())
    }
}

const COUNTED: &[&str] = &["--stats", "--json"];

/// Number of attempts of a test that is about short connections: on a busy machine they may all end before the relay has found the other ends.
const ATTEMPTS: usize = 20;

/// When a process forks, the peer sends unread bytes of the ring again by TCP. It waits for an answer, so it has to be woken for that.
#[test]
fn a_forked_process_receives_the_rest_through_a_relay() {
    let relayed = Relayed::new(&[]);
    let path = build_c(&relayed.lab, "divided", &[]);
    let run = |_| counters(&finish(relayed.run(COUNTED, &[path.to_str().unwrap()])))["relayed"];
    assert!((0..ATTEMPTS).map(run).any(|relayed| relayed > 0));
}

#[test]
fn a_connection_goes_on_in_a_relative_of_its_process() {
    let lab = support::Lab::new();
    let path = build_c(&lab, "relatives", &[]);
    let run = |_| counters(&finish(program(Some(COUNTED), &[path.to_str().unwrap()])))["accelerated"];
    assert!((0..ATTEMPTS).map(run).any(|accelerated| accelerated > 0));
}

/// The relay knows the connection by a process that closes it, or ends, after a fork.
#[test]
fn a_connection_through_a_relay_goes_on_in_a_relative_of_its_process() {
    let relayed = Relayed::new(&["--after-calls", "8"]);
    let path = build_c(&relayed.lab, "relatives", &[]);
    let run = |_| counters(&finish(relayed.run(COUNTED, &[path.to_str().unwrap()])))["relayed"];
    assert!((0..ATTEMPTS).map(run).any(|relayed| relayed > 0));
}

/// The relay turns away the process that goes on with a connection.
#[test]
fn a_connection_goes_on_in_a_relative_that_the_relay_has_no_descriptor_for() {
    let relayed = Relayed::with_descriptors(&["--after-calls", "8"], Some(64));
    let path = build_c(&relayed.lab, "relatives", &[]);
    let run = |_| counters(&finish(relayed.run(COUNTED, &[path.to_str().unwrap(), "80"])))["relayed"];
    assert!((0..ATTEMPTS).map(run).any(|relayed| relayed > 0));
}

/// The reader forks, so that its connection goes back to TCP, while its peer sends and ends.
#[test]
fn a_stream_that_ends_through_a_relay_while_its_reader_forks_arrives_whole() {
    let relayed = Relayed::new(&["--ring", "4K"]);
    let run = |_| {
        let (mut server, port) = Running::server(relayed.peers(&[], &["ends_server", "10"]));
        let counted = counters(&finish(relayed.peers(COUNTED, &["ends", &port, "10"])));
        assert!(server.0.wait().unwrap().success());
        counted["relayed"] > 0 && counted["demoted"] > 0
    };
    assert!((0..ATTEMPTS).any(run));
}

/// The message that the connection is not wanted any more does not reach the relay.
#[test]
fn a_connection_that_is_closed_while_the_relay_is_stopped_has_its_end() {
    let relayed = Relayed::new(&[]);
    let relay = relayed.relay().as_raw_nonzero().to_string();
    let options = [COUNTED, &["--after-calls", "8"]].concat();
    let counted = counters(&finish(relayed.peers(&options, &["closed_unseen", &relay])));
    assert!(counted["connections"] == 602, "{counted:?}");
}

#[test]
fn calls_through_a_relay_return_what_tcp_returns() {
    let relayed = Relayed::new(&[]);
    let path = script("semantics.py");
    let seeds = std::env::var("THRUWAY_RELAYED_SEEDS").unwrap_or("0..56".to_owned());
    let (first, end) = seeds.split_once("..").unwrap();
    let count = end.parse::<u64>().unwrap() - first.parse::<u64>().unwrap();
    let args = ["/usr/bin/python3", path.to_str().unwrap(), first, &count.to_string()];
    let mut plain = program(None, &args);
    let plain = finish(std::mem::replace(plain.env("LATE", "1"), Command::new("true")));
    let mut relayed = relayed.run(COUNTED, &args);
    let relayed = finish(std::mem::replace(relayed.env("LATE", "1"), Command::new("true")));
    let counted = counters(&relayed);
    // Both ends of all, unless the machine is so busy that some are over before the relay has come to them.
    assert!(counted["relayed"] > count && counted["ring_bytes"] > 1_000 * count, "{counted:?}");
    let (plain, relayed) = (String::from_utf8_lossy(&plain.stdout), String::from_utf8_lossy(&relayed.stdout));
    assert!(plain.lines().count() as u64 > 30 * count);
    assert_eq!(plain.lines().count() + 1, relayed.lines().count());
    for (plain, relayed) in plain.lines().zip(relayed.lines()) {
        assert_eq!(plain, relayed, "sequence and call, end, what it has returned");
    }
}

#[test]
fn bytes_arrive_through_a_relay_in_every_kind_of_server() {
    for (kind, more) in [
        ("echo_server", &[][..]),
        ("epoll_server", &["--plaintext"]),
        ("prefork_server", &["--ring", "4K"]),
        ("fork_server", &[]),
    ] {
        let relayed = Relayed::new(more);
        let (_server, port) = Running::server(relayed.peers(&[], &[kind]));
        let counted = counters(&finish(relayed.peers(COUNTED, &["echo_client", &port, "3", "12"])));
        assert!(counted["relayed"] >= 1 && counted["ring_bytes"] > 10_000, "{kind}: {counted:?}");
    }
}

#[test]
fn who_waits_through_a_relay_for_a_process_that_is_killed_learns_it() {
    let relayed = Relayed::new(&[]);
    for how in ["recv", "poll", "select", "epoll", "send", "flood"] {
        let (mut server, port) = Running::server(relayed.peers(&[], &["silent_server"]));
        let mut victim = Running::start(relayed.peers(&[], &["victim", &port, how]));
        assert_eq!(victim.line(), "ready", "{how}");
        server.kill();
        assert!(victim.line().starts_with("over"), "{how}");
    }
}

/// The relay of both ends: no other one says that it has gone.
#[test]
fn who_waits_for_something_through_a_relay_that_is_killed_learns_it() {
    let relayed = Relayed::new(&[]);
    let run = |how: &'static str| {
        let start = |args: &[&str]| {
            let mut command = relayed.peers(&[], args);
            // The relay takes along only connections that it carries.
            command.env("SLOW", "relayed");
            command
        };
        let (server, port) = Running::server(start(&["victim_server", how]));
        (how, server, Running::start(start(&["victim", &port, how])))
    };
    let mut ways = [
        "recv",
        "look",
        "poll",
        "look_poll",
        "select",
        "epoll",
        "level",
        "one_shot",
        "exclusive",
        "two",
        "nested",
        "look_epoll",
    ]
    .map(run);
    for (how, server, victim) in &mut ways {
        assert_eq!([server.line(), victim.line()], ["ready", "ready"], "{how}");
    }
    relayed.kill_relay();
    for (how, server, victim) in &mut ways {
        assert_eq!([server.line(), victim.line()], ["over ConnectionResetError"; 2], "{how}");
    }
}

#[test]
fn both_ends_may_send_much_through_a_relay_before_they_read() {
    let relayed = Relayed::new(&[]);
    let (mut server, port) = Running::server(relayed.peers(&[], &["both_ways_server", "20000000"]));
    let counted = counters(&finish(relayed.peers(COUNTED, &["both_ways", &port, "20000000"])));
    assert!(counted["ring_bytes"] > 100_000, "not only by TCP: {counted:?}");
    assert!(server.0.wait().unwrap().success());
    // Three quarters of a ring, until which there is room in any case: the rest is not left to TCP, where a ring is used.
    let counted = counters(&finish(relayed.peers(COUNTED, &["alone", "190000"])));
    assert!(counted["ring_bytes"] >= 800_000, "{counted:?}");
    assert!(finish(relayed.peers(&[], &["limits"])).status.success());
    let (_server, port) = Running::server(relayed.peers(&[], &["silent_server"]));
    assert!(finish(relayed.peers(&[], &["interrupted", &port])).status.success());
}

#[test]
fn programs_in_c_sleep_as_on_tcp() {
    let counted = counters(&compare_in_c("sleeping", STATS));
    assert!(counted["accelerated"] > 20 && counted["doorbells"] > 100, "{counted:?}");
    // What cannot be told of yet is waited for, not asked for again and again.
    assert!(counted["sleeps"] < 100_000, "{counted:?}");
}

/// What sleeps is woken by the relay, by whatever call it sleeps.
#[test]
fn programs_in_c_sleep_through_a_relay_as_on_tcp() {
    let relayed = Relayed::new(&[]);
    let options: Vec<&str> = relayed.options.iter().map(String::as_str).chain(COUNTED.iter().copied()).collect();
    let counted = counters(&compare_in_c("sleeping", Some(&options)));
    assert!(counted["relayed"] > 20 && counted["woken"] > 500, "{counted:?}");
}

#[test]
fn programs_in_c_wait_for_room_as_on_tcp() {
    let counted = counters(&compare_in_c("room", STATS));
    assert!(counted["accelerated"] > 20, "{counted:?}");
}

/// What is sent stays with the relay, which encrypts it: TCP has what comes before both ends are accelerated, and what a fork leaves to it.
#[test]
fn programs_in_c_wait_for_room_through_a_relay_as_on_tcp() {
    let relayed = Relayed::new(&[]);
    let options: Vec<&str> = relayed.options.iter().map(String::as_str).chain(COUNTED.iter().copied()).collect();
    let counted = counters(&compare_in_c("room", Some(&options)));
    assert!(counted["relayed"] > 20 && counted["ring_bytes"] > 100_000_000, "{counted:?}");
    // 92 million are sent in a child that has its parent's epoll instance. A busy machine may leave whole connections to TCP at first.
    assert!(counted["overflow_bytes"] < 115_000_000, "{counted:?}");
}

#[test]
fn connections_through_a_relay_that_are_shared_or_handed_over_go_on_by_tcp() {
    let relayed = Relayed::new(&[]);
    let (_server, port) = Running::server(relayed.peers(&[], &["echo_server"]));
    let counted = counters(&finish(relayed.peers(COUNTED, &["shared", &port])));
    assert!(counted["relayed"] > 0 && counted["relayed"] == counted["demoted"], "{counted:?}");
    for how in ["spawn", "fork"] {
        for pause in ["0", "0.2"] {
            let (_server, port) = Running::server(relayed.peers(&[], &["hand_over_server", how]));
            let output = finish(relayed.peers(&[], &["hand_over_client", &port, pause]));
            assert!(output.status.success(), "{how}: {}", support::stderr(&output));
        }
    }
}

#[test]
fn what_a_peer_that_has_gone_has_sent_through_a_relay_is_read_to_its_end() {
    let relayed = Relayed::new(&[]);
    for (server, client) in [("unread_server", "unread"), ("early_server", "early")] {
        let (_server, port) = Running::server(relayed.peers(&[], &[server]));
        for _ in 0..3 {
            let output = finish(relayed.peers(&[], &[client, &port]));
            assert!(output.status.success(), "{client}: {}", support::stderr(&output));
        }
    }
}

#[test]
fn a_relay_that_cannot_start_is_an_error_that_says_why() {
    let mut relayed = Relayed::new(&[]);
    // Another one than the one that runs already. It does not come so far as to listen there.
    let port = relayed.options.iter().position(|option| option == "--relay-port").unwrap() + 1;
    relayed.options[port] = (relayed.options[port].parse::<u16>().unwrap() ^ 1).to_string();
    let peers = relayed.lab.path("peers");
    std::fs::write(&peers, "no key\n").unwrap();
    let output = finish(relayed.run(&[], &["true"]));
    assert!(output.status.code() == Some(125) && support::stderr(&output).contains("peers:1"), "{output:?}");
    std::fs::remove_file(&peers).unwrap();
    // Also while it is about to fail, it is not taken for one that is there.
    for _ in 0..10 {
        let output = finish(relayed.run(&[], &["true"]));
        let told = support::stderr(&output);
        assert!(output.status.code() == Some(125) && told.contains(peers.to_str().unwrap()), "{told}");
    }
    // Another user's relay is there, as far as this one can see.
    std::fs::write(&peers, "").unwrap();
    let other = std::net::TcpListener::bind("[::]:0").unwrap();
    relayed.options[port] = other.local_addr().unwrap().port().to_string();
    let output = finish(relayed.run(&[], &["true"]));
    let told = support::stderr(&output);
    let says_why = told.contains("in use") && told.contains("--relay-port, at both ends");
    assert!(output.status.code() == Some(125) && says_why, "{told}");
}

/// Connections for which it has no descriptors stay with TCP, and all bytes arrive.
#[test]
fn a_relay_with_few_descriptors_carries_some_connections_and_leaves_the_others() {
    let relayed = Relayed::with_descriptors(&[], Some(64));
    let (_server, port) = Running::server(relayed.peers(&[], &["echo_server"]));
    // This relay has both ends of each connection. If it takes the first ends of many, it has no place for the second ones.
    let counted = counters(&finish(relayed.peers(COUNTED, &["echo_client", &port, "24", "3"])));
    assert!(counted["relayed"] < 24 && counted["connections"] == 24, "{counted:?}");
    let is_carried = || counters(&finish(relayed.peers(COUNTED, &["echo_client", &port, "2", "3"])))["relayed"] > 0;
    assert!((0..50).any(|_| is_carried()), "none is carried when the others have ended");
}

#[test]
fn a_relay_that_is_not_what_was_asked_for_is_refused() {
    let relayed = Relayed::new(&["--plaintext"]);
    let run = |options: &[&str], without: &str| {
        let own = relayed.options.iter().map(String::as_str).filter(|option| *option != without);
        let options: Vec<&str> = own.chain(options.iter().copied()).collect();
        let output = finish(program(Some(&options), &["true"]));
        (output.status.code(), support::stderr(&output))
    };
    assert_eq!(run(&[], "").0, Some(0));
    let (status, told) = run(&[], "--plaintext");
    assert!(status == Some(125) && told.contains("was started with --plaintext"), "{told}");
    let other = relayed.lab.path("other");
    let made = finish(program(None, &[THRUWAY, "keygen", "--quiet", "--output", other.to_str().unwrap()]));
    assert!(made.status.success());
    let changed = |name: &str, value: &str| {
        let mut options: Vec<String> = relayed.options.clone();
        let at = options.iter().position(|option| option == name).unwrap() + 1;
        options[at] = value.to_owned();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let output = finish(program(Some(&options), &["true"]));
        assert_eq!(output.status.code(), Some(125));
        support::stderr(&output)
    };
    assert!(changed("--provider", "verbs").contains("has --provider iwarp, not verbs"));
    assert!(run(&["--device", "mlx5_9"], "").1.contains("--device mlx5_9"));
    assert!(changed("--key", other.to_str().unwrap()).contains("not that of"));
    assert!(changed("--peers", "/elsewhere/peers").contains("/elsewhere/peers"));
}
