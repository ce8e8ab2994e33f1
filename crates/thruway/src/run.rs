//! `thruway run`: a program whose TCP connections go on through shared memory where they can.

mod policy;

use crate::relay::{self, RelayOptions};
use clap::Args;
pub(crate) use policy::ring_size;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use thruway_cli::{Common, Failed, say_error};
use thruway_sockets::Segment;
use thruway_sockets::settings::{Mode, Rule, Settings, VARIABLE};
use thruway_sockets::stats::Counters;
use thruway_sockets::{signals, startup};

/// The file that the dynamic linker loads into programs.
const LIBRARY: &str = "libthruway_preload.so";

/// Longest time of `--spin`: signals do not end a call that looks again and again.
const SPIN_MAX: u32 = 1000;

/// Arguments of `thruway run`.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  thruway run -- redis-server --port 6379           a server, and\n  thruway run -- redis-benchmark -p 6379            a client of the same host and user: connected through shared memory\n  thruway run --explain -- curl http://localhost/   says of each connection what has become of it\n  thruway run --stats -- nginx -g 'daemon off;'     counts what was sent which way\n  thruway run --remote -- iperf3 -s                 and on another host, thruway run --remote -- iperf3 -c HOST: see 'thruway relay --help'\n\nExit status: the program's; 125 if this command itself has failed, 126 if the program cannot be run, 127 if there is none; 2 for wrong options."
)]
pub(crate) struct RunArgs {
    /// Rules and limits, from a file (TOML)
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Leave connections with these ports to TCP, e.g. 22 or 8000-8100,9000
    #[arg(long, value_name = "PORTS", value_parser = policy::port_range, value_delimiter = ',')]
    tcp: Vec<(u16, u16)>,
    #[arg(long, value_name = "GROUP", help = policy::about("group"), value_parser = |text: &str| policy::checked("group", text))]
    group: Option<String>,
    /// Say of each connection, when the program has ended, what has become of it and why
    #[arg(long)]
    explain: bool,
    /// Print counters when the program has ended
    #[arg(long)]
    stats: bool,
    /// Write the output of --explain and --stats to this file, rather than to standard error or with --json to standard output;
    /// without both, that of --stats
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write that file also while the program runs, again after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    every: Option<u32>,
    #[arg(long, value_name = "CALLS", help = policy::about("after-calls"), value_parser = |text: &str| policy::checked("after-calls", text))]
    after_calls: Option<String>,
    #[arg(long, value_name = "SIZE", help = policy::about("ring"), value_parser = |text: &str| policy::checked("ring", text))]
    ring: Option<String>,
    #[arg(long, value_name = "MICROSECONDS", help = policy::about("spin"), value_parser = |text: &str| policy::checked("spin", text))]
    spin: Option<String>,
    /// Accelerate connections to other hosts, too, whose programs run so and whose relays know each other's keys; starts a relay if
    /// there is none
    #[arg(long)]
    remote: bool,
    #[command(flatten)]
    relay: RelayOptions,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl RunArgs {
    /// The given options that a policy has, too, by their keys.
    fn of_policy(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let options =
            [("after-calls", &self.after_calls), ("ring", &self.ring), ("spin", &self.spin), ("group", &self.group)];
        options.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?)))
    }

    /// Counters are wanted: by name, or for a report that would be empty without.
    fn has_stats(&self) -> bool {
        self.stats || (self.report.is_some() && !self.explain)
    }
}

/// Runs `thruway run`. Returns only if the program could not be started; else this process ends as the program has.
pub(crate) fn run(args: &RunArgs, common: &Common) -> Result<(), Failed> {
    let mut settings = settings(args).map_err(|why| Failed::usage("run", why))?;
    if let Some(option) = args.relay.any().filter(|_| !args.remote) {
        return Err(Failed::usage("run", format!("{option} needs --remote: without, there is no relay")));
    }
    if args.every.is_some() {
        let Some(report) = &args.report else {
            return Err(Failed::usage("run", "--every needs --report: the file that is written again"));
        };
        if report.exists() && !report.is_file() {
            return Err(Failed::usage("run", format!("--every: {} is no file that can be replaced", report.display())));
        }
    }
    let library = library().unwrap_or_else(|why| give_up(OWN_FAILURE, why));
    if args.remote {
        settings.relay = args.relay.relay_port;
        let relay = relay::ensure(&args.relay, settings.ring, &settings.board);
        relay.unwrap_or_else(|why| give_up(OWN_FAILURE, why));
    }
    let (program, rest) = args.program.split_first().expect("clap requires one");
    // What this runtime starts has SIGPIPE's default action, and what the supervisor handles, unless something between ignores it again.
    let is_supervised = args.explain || args.has_stats();
    let ignored = ignored_signals(is_supervised);
    let preload = preload(&library);
    let mut command = if ignored.is_empty() {
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", preload);
        command
    } else {
        let mut command = Command::new("env");
        command.arg(format!("--ignore-signal={}", ignored.join(",")));
        // Only the program loads the library: if `env` or `sh` did, the statistics would count them.
        if program.as_encoded_bytes().contains(&b'=') {
            // `env` would set a variable of this name.
            command.args(["sh", "-c", r#"export LD_PRELOAD="$0"; exec "$@""#]).arg(preload);
        } else {
            let mut variable = OsString::from("LD_PRELOAD=");
            variable.push(preload);
            command.arg(variable);
        }
        command.arg(program);
        command
    };
    command.args(rest);
    let failed = |error: std::io::Error| -> ! {
        let status = if error.kind() == std::io::ErrorKind::NotFound { NO_PROGRAM } else { CANNOT_RUN };
        give_up(status, format_args!("cannot run {}: {error}", Path::new(program).display()))
    };
    if !is_supervised {
        command.env(VARIABLE, settings.encode());
        failed(command.exec());
    }
    // What this process writes beyond its limit on the length of files is an error then, and does not end it, and the program with it.
    let handled = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    handled.unwrap_or_else(|error| give_up(OWN_FAILURE, format_args!("cannot handle SIGXFSZ: {error}")));
    let report = args.report.as_ref().map(|path| {
        let report = Report::new(path, args.every.is_some());
        report.unwrap_or_else(|error| give_up(OWN_FAILURE, format_args!("cannot write {}: {error}", path.display())))
    });
    let told = Told::new().unwrap_or_else(|error| {
        let place = crate::directories::temporary();
        give_up(
            OWN_FAILURE,
            format_args!("no place for what the program's library tells in {}: {error}", place.display()),
        )
    });
    settings.stats = Some(told.stats());
    // Who kills this process for good means the program.
    settings.supervisor = std::process::id();
    settings.explain = args.explain.then(|| told.explain());
    command.env(VARIABLE, settings.encode());
    let counters = told.counters().unwrap_or_else(|error| {
        give_up(OWN_FAILURE, format_args!("what is counted cannot be read: {error}"));
    });
    let meanwhile = args.every.zip(report.as_ref()).map(|(seconds, report)| {
        let again = || report.write(&Said::new(args, common, &told, counters).whole());
        (Duration::from_secs(seconds.into()), again)
    });
    let status = match supervise(&mut command, meanwhile) {
        Ok(status) => status,
        Err(error) => {
            drop(told);
            failed(error)
        }
    };
    let said = Said::new(args, common, &told, counters);
    drop(told);
    let written = match report {
        Some(report) => report.write(&said.whole()),
        None => {
            let _ = std::io::stderr().write_all(said.text.as_bytes());
            std::io::stdout().write_all(said.json.as_bytes())
        }
    };
    if let Err(error) = written {
        // The program's own status matters more.
        say_error!("thruway run: cannot write what was counted: {error}");
    }
    end_as(status)
}

/// What `--explain` and `--stats` say.
#[derive(Default)]
struct Said {
    /// For people.
    text: String,
    /// With `--json`, one object of counters and of the lines of `--explain`.
    json: String,
}

impl Said {
    fn new(args: &RunArgs, common: &Common, told: &Told, counters: &Counters) -> Said {
        let mut lines = Vec::new();
        if counters.processes.load(Ordering::Relaxed) == 0 {
            lines.push(format!(
                "the program has not loaded {LIBRARY}: it is statically linked, or runs with the rights of another user (set-user-ID)"
            ));
        }
        if args.explain {
            explain_all(&told.explain(), counters, &mut lines);
            if args.remote && counters.relay_not_found.load(Ordering::Relaxed) > 0 {
                let log = relay::log_path(args.relay.relay_port);
                lines.push(format!(
                    "the log of this host's relay, if 'thruway run' has started it, is {}",
                    log.display()
                ));
            }
        }
        let mut said = Said::default();
        if common.json {
            let counted = counters.list().filter(|_| args.has_stats());
            let mut object: serde_json::Map<String, serde_json::Value> =
                counted.map(|(name, count)| (name.to_owned(), count.into())).collect();
            if args.explain {
                object.insert("explain".into(), lines.into());
            }
            said.json = format!("{}\n", serde_json::Value::Object(object));
        } else {
            said.text = lines.iter().map(|line| format!("thruway: {line}\n")).collect();
            if args.has_stats() {
                list(counters, &mut said.text);
            }
        }
        said
    }

    fn whole(&self) -> String {
        format!("{}{}", self.text, self.json)
    }
}

/// The file that `--report` names.
enum Report {
    /// Written once, at the end: a pipe will do.
    Once(std::fs::File),
    /// Replaced, so that its readers find all of it.
    Replaced { path: PathBuf, next: PathBuf },
}

impl Report {
    /// Finds out whether it can be written, before the program runs.
    fn new(path: &Path, is_replaced: bool) -> std::io::Result<Report> {
        if !is_replaced {
            return std::fs::File::create(path).map(Report::Once);
        }
        // What a link names, and not the link.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut next = path.as_os_str().to_owned();
        next.push(".part");
        let next = PathBuf::from(next);
        std::fs::write(&next, "")?;
        std::fs::remove_file(&next)?;
        Ok(Report::Replaced { path, next })
    }

    fn write(&self, text: &str) -> std::io::Result<()> {
        match self {
            Report::Once(file) => (&mut &*file).write_all(text.as_bytes()),
            Report::Replaced { path, next } => {
                std::fs::write(next, text).and_then(|()| std::fs::rename(next, path)).inspect_err(|_| {
                    let _ = std::fs::remove_file(next);
                })
            }
        }
    }
}

/// Exit statuses as `env`, `nohup` and `timeout` have them.
const OWN_FAILURE: i32 = 125;
const CANNOT_RUN: i32 = 126;
const NO_PROGRAM: i32 = 127;

fn give_up(status: i32, why: impl std::fmt::Display) -> ! {
    say_error!("thruway run: {why}");
    std::process::exit(status)
}

/// Ends this process as the program has ended: a shell stops a script whose program has died of an interrupt.
fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // The program has left its core, if it was to.
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
        let _ = signal_hook::low_level::emulate_default_handler(signal);
        if let Some(signal) = rustix::process::Signal::from_named_raw(signal) {
            let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
        }
        std::process::exit(128 + signal);
    }
    std::process::exit(status.code().unwrap_or(1))
}

/// Where the library in the program tells what it does.
struct Told(tempfile::TempDir);

impl Told {
    fn new() -> std::io::Result<Told> {
        let told = Told(tempfile::Builder::new().prefix("thruway-run-").tempdir()?);
        std::fs::File::create(told.stats())?.set_len(Counters::FILE_LEN)?;
        std::fs::File::create(told.explain())?;
        Ok(told)
    }

    fn stats(&self) -> PathBuf {
        self.0.path().join("stats")
    }

    fn explain(&self) -> PathBuf {
        self.0.path().join("explain")
    }

    fn counters(&self) -> std::io::Result<&'static Counters> {
        Counters::map(std::fs::File::options().read(true).write(true).open(self.stats())?)
    }
}

fn settings(args: &RunArgs) -> Result<Settings, String> {
    let mut settings = args.policy.as_deref().map_or(Ok(Settings::default()), policy::read)?;
    // Options come before the file.
    let rules = args.tcp.iter().map(|&(first, last)| Rule { first, last, mode: Mode::Tcp });
    settings.rules.splice(0..0, rules);
    for (key, value) in args.of_policy() {
        policy::set(&mut settings, key, value).map_err(|why| format!("--{key}: {why}"))?;
    }
    let least = Segment::len_with(settings.ring) as u64;
    if settings.memory < least {
        let (memory, ring) = (settings.memory, settings.ring);
        return Err(format!(
            "memory = {memory}: a connection needs {least} bytes, for two rings of {ring} and what goes with them"
        ));
    }
    Ok(settings)
}

/// Where the library is: as an installation or a build has it.
fn library() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("THRUWAY_PRELOAD") {
        let path = PathBuf::from(path);
        return if path.is_file() {
            readable(path)
        } else {
            Err(format!("THRUWAY_PRELOAD is {}, which is no file", path.display()))
        };
    }
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let beside = program.parent().unwrap_or(Path::new("."));
    let places = [beside.join(LIBRARY), beside.join("../lib/thruway").join(LIBRARY)];
    let found = places.iter().find(|path| path.is_file()).cloned();
    found.map(readable).unwrap_or_else(|| {
        Err(format!(
            "{LIBRARY} is neither in {} nor in {}: build it with `cargo build --release -p thruway-preload`, or name it in THRUWAY_PRELOAD",
            beside.display(),
            beside.join("../lib/thruway").display()
        ))
    })
}

/// The dynamic linker goes on without what it cannot read.
fn readable(library: PathBuf) -> Result<PathBuf, String> {
    match std::fs::File::open(&library) {
        Ok(_) => Ok(library),
        Err(error) => Err(format!("cannot read {}, which programs load: {error}", library.display())),
    }
}

fn preload(library: &Path) -> OsString {
    if library.as_os_str().as_encoded_bytes().iter().any(|byte| b" :\t\n".contains(byte)) {
        let why =
            "has a space or a colon in its name, which LD_PRELOAD cannot have: name a link to it in THRUWAY_PRELOAD";
        give_up(OWN_FAILURE, format_args!("{} {why}", library.display()));
    }
    let mut value = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        value.push(OsStr::new(":"));
        value.push(others);
    }
    value
}

/// Whether this process is what its terminal's keys are for.
fn has_terminal() -> bool {
    let terminal = std::fs::File::options().read(true).write(true).open("/dev/tty");
    terminal.is_ok_and(|tty| rustix::termios::tcgetpgrp(tty).is_ok_and(|group| group == rustix::process::getpgrp()))
}

/// Runs the program to its end, and hands it the signals that this process gets, each once: those of the terminal's keys go to both by
/// themselves, and what is sent to a whole group of processes reaches the program through this process alone, because without a terminal
/// it has a group of its own.
///
/// `meanwhile` is what is done again and again, and after how long.
fn supervise<F: Fn() -> std::io::Result<()> + Sync>(
    command: &mut Command,
    meanwhile: Option<(Duration, F)>,
) -> std::io::Result<ExitStatus> {
    use signal_hook::low_level::siginfo::Cause;
    let has_terminal = has_terminal();
    if !has_terminal {
        command.process_group(0);
    }
    let mut handled =
        signal_hook::iterator::SignalsInfo::<signal_hook::iterator::exfiltrator::WithOrigin>::new(forwarded())?;
    let mut child = command.spawn()?;
    let pid = Arc::new(AtomicU32::new(child.id()));
    let handle = handled.handle();
    let forward = {
        let pid = Arc::clone(&pid);
        std::thread::spawn(move || {
            for origin in handled.forever() {
                if has_terminal && origin.cause == Cause::Kernel {
                    continue;
                }
                // It may have ended.
                let _ = signals::send(pid.load(Ordering::SeqCst).cast_signed(), origin.signal);
            }
        })
    };
    // Its number stays its own until it has been waited for.
    let status = std::thread::scope(|scope| {
        let (end, ended) = mpsc::channel::<()>();
        if let Some((period, again)) = &meanwhile {
            scope.spawn(move || {
                let mut has_failed = false;
                while ended.recv_timeout(*period) == Err(mpsc::RecvTimeoutError::Timeout) {
                    if let Err(error) = again()
                        && !std::mem::replace(&mut has_failed, true)
                    {
                        say_error!("thruway run: cannot write what was counted: {error}");
                    }
                }
            });
        }
        let status = child.wait();
        drop(end);
        status
    });
    pid.store(0, Ordering::SeqCst);
    handle.close();
    let _ = forward.join();
    status
}

/// Signals that are handed to the program: all but those that stop a process, those of faults, and those that say something of this
/// process alone (SIGCHLD, SIGPIPE).
fn forwarded() -> Vec<i32> {
    use signal_hook::consts::{
        SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGTERM, SIGURG, SIGUSR1, SIGUSR2, SIGVTALRM,
        SIGWINCH,
    };
    let named = [
        SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGURG, SIGWINCH,
        SIGCONT,
    ];
    named.into_iter().chain(signals::of_programs()).collect()
}

/// The signals that the program is to ignore because this process was started so, and that it would not ignore by itself: those that are
/// handled here would have their default action.
fn ignored_signals(is_supervised: bool) -> Vec<String> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let handled = forwarded().into_iter().chain([signal_hook::consts::SIGXFSZ]);
    let ignored = handled.filter(|signal| is_supervised && mask >> (signal - 1) & 1 != 0);
    let pipe = startup::ignores_sigpipe().then_some(signal_hook::consts::SIGPIPE);
    pipe.into_iter().chain(ignored).map(|signal| signal.to_string()).collect()
}

fn explain_all(log: &Path, counters: &Counters, lines: &mut Vec<String>) {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    if count(&counters.processes) > 0 && count(&counters.connections) == 0 {
        lines.push("no TCP connection has been seen: programs that make their own system calls (as those in Go do), that were started without LD_PRELOAD (env -i, sudo), or as another user, stay with TCP, and are not counted".into());
    }
    lines.extend(with_counts(&std::fs::read_to_string(log).unwrap_or_default()));
    let unexplained = count(&counters.unexplained);
    if unexplained > 0 {
        lines.push(format!("{unexplained} lines more had no place"));
    }
    let short = count(&counters.short);
    if short > 0 {
        lines.push(format!("{short} ends of connections with fewer calls than are worth it (--after-calls): TCP"));
    }
}

/// The different lines of a text, in the order of their first occurrence. A line that occurs several times has a count behind it.
fn with_counts(text: &str) -> Vec<String> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for line in text.lines() {
        let place = *places.entry(line).or_insert(counts.len());
        match counts.get_mut(place) {
            Some((_, count)) => *count += 1,
            None => counts.push((line, 1)),
        }
    }
    let shown = |(line, count)| if count == 1 { String::from(line) } else { format!("{line} ({count} times)") };
    counts.into_iter().map(shown).collect()
}

fn list(counters: &Counters, to: &mut String) {
    for (name, count) in counters.list().filter(|(_, count)| *count > 0) {
        *to += &format!("thruway: {name:<18} {count}\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lines_are_one_with_their_count() {
        assert_eq!(with_counts("b\na\nb\nc\nb\n"), ["b (3 times)", "a", "c"]);
        assert!(with_counts("").is_empty());
    }
}
