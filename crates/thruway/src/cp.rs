//! `thruway cp`.

use crate::endpoint::{Endpoint, tidy};
use crate::keys;
use crate::lines::{Lines, Stream};
use crate::output::{Display, ProgressMode};
use crate::remote::{Provider, daemon, hint_of_daemon};
use crate::ssh;
use clap::{Args, ValueEnum};
use rustix::fs::{Mode, OFlags};
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use thruway_cli::{Common, Failed, units};
use thruway_engine::digest::Algorithm;
use thruway_engine::limits;
use thruway_engine::stage::StageStats;
use thruway_fabric::iwarp;
use thruway_transfer::auth::Credentials;
use thruway_transfer::client::{self, Finished, Job, Local, Remote};
use thruway_transfer::filter::Filter;
use thruway_transfer::link::Transport;
use thruway_transfer::session::{NOT_KEPT, OnReport, PipelineSet, Progress, SessionError};
use thruway_transfer::sink::{self, MadeAfter, Prepared};
use thruway_transfer::wire::{AbortCode, Direct, ReportKind, SourceSpec, TreeOptions};

/// Most bytes of items that are kept for `--json`. The printed object takes several times as much.
const ITEMS_MAX: usize = 256 << 20;

/// Arguments of `thruway cp`.
#[derive(Args, Clone)]
#[command(
    override_usage = "thruway cp [OPTIONS] <SRC>... <DST>",
    after_help = "Examples:
  thruway cp -r results tw://store/archive/       makes archive/results
  thruway cp -r results/ tw://store/archive/run7  makes archive/run7 of the contents
  thruway cp -rp user@host:data .                 starts the peer through ssh
  thruway cp --size 100G /dev/zero tw://store/dev/null

An interrupted copy resumes when the same command is given again. Files appear
under their names only when they are whole, verified and durable.

-n and -v name each item with the reason, -vv and -vvv log more.

PATTERN is a glob (*, ?, [a-z], {a,b}; * matches slashes, too). With a slash it
is matched against the path below the source, else against names anywhere.

Environment: THRUWAY_SSH is the program in place of ssh, with options (such as
'ssh -p 2222'), THRUWAY_REMOTE the program on the other host, THRUWAY_LOG the log
filter (such as debug)."
)]
pub(crate) struct CpArgs {
    /// Copy directories recursively
    #[arg(long, short)]
    recursive: bool,
    /// Keep mode, times, owner where permitted, extended attributes, hard links, special files
    #[arg(long, short)]
    preserve: bool,
    /// The same as -r -p
    #[arg(long, short)]
    archive: bool,
    /// Skip files whose copies have the same size and are not older
    #[arg(long, short)]
    update: bool,
    /// Delete from copied directories what the source does not have; excluded entries are kept, and nothing is deleted
    /// if parts of the source could not be read
    #[arg(long)]
    delete: bool,
    /// With --delete: delete even if parts of the source could not be read
    #[arg(long, requires = "delete")]
    ignore_errors: bool,
    /// Include what matches PATTERN, overriding --exclude; may be repeated
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Exclude what matches PATTERN; may be repeated
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Name each item that would change, with the reason, and change nothing
    #[arg(long, short = 'n')]
    dry_run: bool,
    /// Number of data channels [default: chosen by the path, 2 to 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    streams: Option<u32>,
    /// Block size [default: 1M]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    block_size: Option<u64>,
    /// Number of blocks in this end's buffer pool [default: 64, more on a long path]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=1024))]
    depth: Option<u32>,
    /// Maximum rate in bytes per second, such as 10M (K, M and G are powers of 1024), with bursts of up to a quarter of
    /// a second's data; 0 means unlimited
    #[arg(long, value_name = "RATE", value_parser = units::parse_size)]
    bwlimit: Option<u64>,
    /// Bypass the page cache (direct I/O)
    #[arg(long, value_enum, default_value_t = When::Auto)]
    direct: When,
    /// Verify every block end to end with: none, xxh3, blake3
    #[arg(long, default_value = "xxh3")]
    verify: Algorithm,
    /// Encrypt the data; auto: unless the peer is on this host
    #[arg(long, value_enum, default_value_t = When::Auto)]
    encrypt: When,
    /// Start over instead of resuming an interrupted copy
    #[arg(long)]
    no_resume: bool,
    /// Consecutive retries without progress after a lost connection, at most 3 before the first session; 12 take about
    /// three minutes
    #[arg(long, default_value_t = 12, value_name = "N")]
    retries: u32,
    /// Number of bytes to read from a device such as /dev/zero
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    size: Option<u64>,
    /// Private key for daemons [default: ~/.config/thruway/id]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Transport for the data
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    /// Show progress
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Print per-stage statistics
    #[arg(long)]
    stats: bool,
    /// Sources, then the destination
    #[arg(required = true, num_args = 2.., value_name = "PATH")]
    paths: Vec<OsString>,
}

/// Yes, no, or by rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    Auto,
    On,
    Off,
}

/// Fewest open files that a copy needs.
const OPEN_FILES_MIN: u64 = 64;

/// What to say of an option that other programs have, beside that `cp` has not.
pub(crate) fn hint(argument: &str) -> Option<&'static str> {
    match argument {
        "-z" | "--compress" => Some("nothing is compressed on the way; compress the files, or leave it out"),
        "-P" | "--port" => Some(
            "a port for ssh is set in ~/.ssh/config, one of a daemon in tw://host:port/; interrupted copies always resume, \
             and '--progress plain' writes lines",
        ),
        "--partial" => Some("interrupted copies always resume; '--progress plain' writes lines"),
        "-e" | "--rsh" => {
            Some("THRUWAY_SSH is the program in place of ssh, with options, as in THRUWAY_SSH='ssh -p 2222'")
        }
        "-i" | "--itemize-changes" => Some(
            "'-v' names each item with the reason; '--key' is a key for daemons, those of ssh are set in ~/.ssh/config",
        ),
        "-L" | "--copy-links" => Some("links are copied as links; only those named on the command line are followed"),
        "-x" | "--one-file-system" => Some("other file systems below a source are copied; '--exclude' leaves them out"),
        "-H" | "--hard-links" | "-A" | "--acls" | "-X" | "--xattrs" | "-t" | "--times" | "-o" | "--owner" | "-g"
        | "--group" | "-D" | "--perms" => Some(
            "'-p' keeps mode, times, owner, hard links, special files, access control lists and extended attributes, \
             and '-a' is -r and -p",
        ),
        "-l" | "--links" => Some("links are always copied as links"),
        "-S" | "--sparse" => Some("holes of files always stay holes"),
        "-R" => Some("'-r' copies directories recursively"),
        "-d" | "--dirs" => Some("'-r' copies directories with their contents"),
        "-C" | "--cvs-exclude" => {
            Some("nothing is compressed on the way; '--exclude PATTERN' leaves entries out, and may be repeated")
        }
        "--exclude-from" | "--include-from" | "--files-from" => {
            Some("'--exclude PATTERN' and '--include PATTERN' may be repeated, with one pattern each")
        }
        "-f" | "--force" | "--filter" => {
            Some("existing files are always replaced; '--include' and '--exclude' choose entries")
        }
        "--inplace" => Some("files are written under temporary names, and get their own when they are complete"),
        "--delete-after" | "--delete-before" | "--delete-during" | "--delete-delay" | "--delete-excluded" => {
            Some("'--delete' removes from the destination what the source does not have")
        }
        "-c" | "--checksum" => Some("every block that is sent is verified; '-u' skips by size and time"),
        _ => None,
    }
}

/// True for combined short options with `-h` or `-V`, such as `-avh` of rsync's users. The command would print help, copy nothing and
/// succeed.
pub(crate) fn hides_help(argument: &str) -> bool {
    let letters = argument.strip_prefix('-').filter(|letters| letters.len() > 1);
    letters
        .is_some_and(|letters| letters.bytes().all(|byte| byte.is_ascii_alphabetic()) && letters.contains(['h', 'V']))
}

/// Runs `thruway cp`.
pub(crate) fn run(args: &CpArgs, common: &Common) -> Result<(), Failed> {
    let start = Instant::now();
    let usage = |message| Failed::usage("cp", message);
    let (sources, target) = endpoints(args).map_err(usage)?;
    check_options(args, sources.iter().chain([&target])).map_err(usage)?;
    let outcome = copy(args, common, &sources, &target);
    let done = outcome.map_err(|message| {
        if common.json {
            thruway_cli::say!("{}", serde_json::json!({ "error": message }));
        }
        Failed::operation("cp", message)
    })?;
    report(args, common, &done, start.elapsed().as_secs_f64());
    if args.stats && !common.json {
        print_stats(&done.stats);
    }
    if done.finished.summary.failed > 0 { Err(Failed::Operation) } else { Ok(()) }
}

/// An argument, parsed and as given.
type Given<'a> = (Endpoint, &'a OsString);

/// The sources and the destination.
fn endpoints<'a>(args: &'a CpArgs) -> Result<(Vec<Given<'a>>, Given<'a>), String> {
    if args.paths.iter().any(|path| path.is_empty()) {
        return Err("empty path '' (expected a file or directory; . is the current directory)".into());
    }
    let parse = |text: &'a OsString| Endpoint::parse(text).map(|endpoint| (endpoint, text));
    let (target, sources) = args.paths.split_last().expect("clap wants two");
    let (target, sources) = (parse(target)?, sources.iter().map(parse).collect::<Result<Vec<_>, _>>()?);
    let unnamed = |(endpoint, _): &&Given<'_>| matches!(endpoint, Endpoint::Daemon { export, .. } if export.is_empty());
    if let Some((_, text)) = sources.iter().chain([&target]).find(unnamed) {
        let text = text.to_string_lossy();
        return Err(format!(
            "{text}: no export is named; write tw://host/export/path ('thruway ls {text}' lists them)"
        ));
    }
    if !is_local(&target) && !sources.iter().all(is_local) {
        return Err("cannot copy between two remote hosts; run 'thruway cp' on one of them".into());
    }
    if !sources.iter().all(is_local) && !sources.iter().all(|(source, _)| is_together(source, &sources[0].0)) {
        return Err("all sources must be on one host, in one export".into());
    }
    Ok((sources, target))
}

/// Whether one session can read both sources, of another host.
fn is_together(a: &Endpoint, b: &Endpoint) -> bool {
    match (a, b) {
        (
            Endpoint::Daemon { host, port, export, .. },
            Endpoint::Daemon { host: other, port: other_port, export: other_export, .. },
        ) => (host, port, export) == (other, other_port, other_export),
        (Endpoint::Ssh { host, path }, Endpoint::Ssh { host: other, path: other_path }) => {
            host == other && path.starts_with(b"/") == other_path.starts_with(b"/")
        }
        _ => false,
    }
}

/// Refuses invalid options, and options that do not apply to these sources and this destination.
fn check_options<'a>(args: &CpArgs, mut places: impl Iterator<Item = &'a Given<'a>>) -> Result<(), String> {
    args.block_len()?;
    Filter::new(&args.options()).map_err(|e| e.to_string())?;
    let has_daemon = places.any(|(endpoint, _)| matches!(endpoint, Endpoint::Daemon { .. }));
    args.provider.check(has_daemon)
}

fn is_local((endpoint, _): &Given<'_>) -> bool {
    matches!(endpoint, Endpoint::Local(_))
}

/// Blocks of a pool by default.
const BLOCKS: u64 = 64;
/// Fewest blocks of a pool.
const BLOCKS_MIN: u64 = 4;
/// Address space that a session needs beside its blocks: stacks of threads, buffers of connections, the heap.
const SESSION_MEMORY: u64 = 24 << 20;

/// `--depth`, or under a limit on memory as many blocks as it has room for, of so many pools.
///
/// # Errors
/// If a session has no room.
fn affordable_depth(args: &CpArgs, pools: u64) -> Result<Option<u32>, String> {
    let Some(left) = limits::address_space_left() else { return Ok(args.depth) };
    // A header stands before each block.
    let block = u64::from(args.block_len()?) + (4 << 10);
    let fitting = left.saturating_sub(pools * SESSION_MEMORY) / (pools * block);
    let least = args.depth.map_or(BLOCKS_MIN, u64::from);
    if fitting < least {
        let missing = (pools * (SESSION_MEMORY + least * block)).saturating_sub(left).div_ceil(1 << 10);
        return Err(format!(
            "needs {missing} KiB of memory more than the limit; raise it (ulimit -v), or set a smaller --depth or --block-size"
        ));
    }
    Ok(args.depth.or(Some(fitting.min(BLOCKS) as u32)))
}

fn copy(args: &CpArgs, common: &Common, sources: &[Given<'_>], target: &Given<'_>) -> Result<Done, String> {
    limits::raise_open_files();
    // A handled SIGXFSZ does not end the process: a write beyond the limit on the size of files fails with EFBIG.
    if let Err(error) = signal_hook::flag::register(SIGXFSZ, Arc::default()) {
        tracing::debug!(%error, "handling SIGXFSZ");
    }
    let open_files = limits::open_files();
    if open_files < OPEN_FILES_MIN {
        return Err(format!("needs {OPEN_FILES_MIN} open files, the limit is {open_files}; raise it (ulimit -n)"));
    }
    let pipelines = PipelineSet::new().map_err(|e| e.to_string())?;
    if is_local(target) {
        keys::use_journal_secret_or_public_value();
    }
    let is_local_copy = sources.iter().chain([target]).all(is_local);
    let depth = affordable_depth(args, if is_local_copy { 2 } else { 1 })?;
    let args = &CpArgs { depth, ..args.clone() };
    let mut peer = None;
    let mut job = match &target.0 {
        Endpoint::Local(path) if is_local_copy => push_locally(args, sources, path, &pipelines, &mut peer)?,
        Endpoint::Local(path) => pull(args, sources, target, path, &mut peer)?,
        _ => push(args, sources, target, &mut peer)?,
    };
    job.id = job_id(args, sources, target, &job.export);
    job.options.itemize = args.dry_run || common.verbose > 0;
    let progress = Arc::new(Progress::default());
    // The source directory itself has an empty path: messages about it name it as given.
    let only = match sources {
        [(_, text)] => Some(text.to_string_lossy().into_owned()),
        _ => None,
    };
    let (quiet, pulls) = (common.quiet, matches!(job.local, Local::Directory(_)));
    let (json, items) = (common.json, Arc::new(Mutex::new(Vec::new())));
    let itemized = Arc::clone(&items);
    let resume = resumption(args, &job);
    let (moved, dry_run, is_over) = (Arc::clone(&progress), args.dry_run, Arc::new(AtomicBool::new(false)));
    let has_ended = Arc::clone(&is_over);
    let on_failure = move |error: &std::io::Error| {
        let failed = match dry_run {
            // The summary will fail, too.
            _ if has_ended.load(Ordering::SeqCst) => return,
            true => Failed::output(error),
            false => Failed::operation("cp", format!("standard output: {error}; {}", stopped(resume, &moved))),
        };
        std::process::exit(failed as i32);
    };
    let lines = Arc::new(Lines::start(on_failure).map_err(|error| limits::thread_error(&error).to_string())?);
    let shown = Arc::clone(&lines);
    let (itemize, room) = (job.options.itemize, AtomicUsize::new(ITEMS_MAX));
    let on_report: OnReport = Arc::new(move |report| {
        if report.kind == ReportKind::Item {
            let (path, reason) =
                (thruway_transfer::escape(&report.path), thruway_transfer::escape(report.message.as_bytes()));
            let len = size_of::<Item>() + path.len() + reason.len();
            let has_room = || {
                let left = room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(len));
                if left.is_err() && room.swap(0, Ordering::SeqCst) > 0 {
                    shown.push(Stream::Error, "thruway cp: more than 256 MiB of items; the rest of them is left out");
                }
                left.is_ok()
            };
            // A daemon may send what nobody has asked for.
            if !itemize || (json && !has_room()) {
                return;
            }
            match json {
                true => itemized.lock().expect("no panics under the lock").push(Item { path, reason }),
                false if quiet => {}
                false => shown.push(Stream::Output, &format!("{reason:<15} {path}")),
            }
            return;
        }
        let (path, message) =
            (thruway_transfer::escape(&report.path), thruway_transfer::escape_message(&report.message));
        if path.is_empty() && report.kind == ReportKind::LeftOut && quiet {
            return;
        }
        let is_glob = pulls && report.path.iter().any(|byte| b"*?[".contains(byte));
        let message = match limits::remedy(&message) {
            Some(remedy) => format!("{message}; {remedy}"),
            None if is_glob && report.kind == ReportKind::Refused => {
                format!(
                    "{message}; patterns are not expanded on the other host: copy the directory with -r, --include and --exclude"
                )
            }
            None => message,
        };
        let path = match &only {
            Some(only) if path.is_empty() && report.kind == ReportKind::Refused => only.clone(),
            _ => path,
        };
        if path.is_empty() {
            shown.push(Stream::Error, &format!("thruway cp: {message}"));
        } else {
            shown.push(Stream::Error, &format!("thruway cp: {path}: {message}"));
        }
    });
    if let Err(error) = report_interruption(resume, &progress) {
        tracing::debug!(%error, "handling signals");
    }
    // Lines of items and the progress display would overwrite each other.
    let mode =
        if job.options.itemize && args.progress == ProgressMode::Auto { ProgressMode::Never } else { args.progress };
    let mut display = Display::start(mode, common.quiet || common.json, &progress);
    match &job.local {
        // The estimate ignores filters, so it would count excluded files.
        Local::Sources(local) if display.is_shown() && args.exclude.is_empty() => {
            crate::output::estimate(local.iter().map(|(path, _)| path.clone()).collect(), &progress);
        }
        Local::Directory(_) if !args.recursive() && job.sources.len() == 1 => {
            progress.total_known.store(true, Ordering::Relaxed);
        }
        _ => {}
    }
    // The peer that ssh started goes with its connection; after a loss another is started.
    let ssh_host = sources.iter().chain([target]).find_map(|(e, _)| match e {
        Endpoint::Ssh { host, .. } => Some(host.clone()),
        _ => None,
    });
    let peer = std::cell::RefCell::new(peer);
    let start_again = |host: &OsString| {
        peer.borrow_mut().take();
        let (connection, mut remote) = ssh::Connection::start(host, pulls)?;
        args.provider.apply_to(&mut remote)?;
        *peer.borrow_mut() = Some(Peer::Ssh(connection));
        Ok(remote)
    };
    let reach = ssh_host.as_ref().map(|host| move || start_again(host));
    let reach = reach.as_ref().map(|reach| reach as &client::Reach<'_>);
    let result = client::run(&job, pipelines.pick(), &progress, &on_report, reach);
    display.stop();
    drop(peer);
    is_over.store(true, Ordering::SeqCst);
    lines.finish();
    let finished = result.map_err(|e| {
        let why = e.to_string();
        // A refusal will come again.
        let is_refused = matches!(e, SessionError::Aborted(AbortCode::Refused, _));
        let kept = is_kept(&progress) && !why.contains(NOT_KEPT) && !is_refused;
        let hint =
            resume.filter(|_| kept).map_or(String::new(), |how| format!("; the data copied so far is kept, and {how}"));
        let is_daemon = [&sources[0], target].iter().any(|(e, _)| matches!(e, Endpoint::Daemon { .. }));
        let remedy = limits::remedy(&why).map(String::from);
        let remedy = remedy.or_else(|| hint_of_daemon(job.remote.addr, &why).filter(|_| is_daemon));
        let remedy = remedy.map_or(String::new(), |remedy| format!("; {remedy}"));
        format!("{}: {why}{remedy}{hint}", job.remote.label)
    })?;
    tracing::info!("provider {}: {}", finished.provider, finished.detail);
    let mut items = std::mem::take(&mut *items.lock().expect("no panics under the lock"));
    if args.dry_run {
        remove_repeated(&mut items);
    }
    Ok(Done { finished, encrypted: job.encrypt, stats: pipelines.stats(), items: job.options.itemize.then_some(items) })
}

/// True if files, which may be empty, have been moved, and another attempt can find them.
fn is_kept(progress: &Progress) -> bool {
    let has_moved = [&progress.bytes, &progress.files].iter().any(|count| count.load(Ordering::Relaxed) > 0);
    progress.resumable.load(Ordering::Relaxed) && has_moved
}

/// A finished copy.
struct Done {
    finished: Finished,
    encrypted: bool,
    stats: Vec<StageStats>,
    /// Changed entries for `--json`; `None` without `-n` and `-v`.
    items: Option<Vec<Item>>,
}

/// A changed entry, for `--json`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Item {
    path: String,
    reason: String,
}

/// Removes repeated items of a dry run: after the loss of a connection, another attempt lists all again.
fn remove_repeated(items: &mut Vec<Item>) {
    let mut seen = HashSet::new();
    let mut are_new = items.iter().map(|item| seen.insert(item)).collect::<Vec<bool>>().into_iter();
    items.retain(|_| are_new.next().unwrap_or(true));
}

/// Text for messages on how to resume an interrupted copy; `None` if another attempt starts from the beginning.
fn resumption(args: &CpArgs, job: &Job) -> Option<&'static str> {
    let nowhere = job.export == thruway_transfer::daemon::DEV_EXPORT || matches!(job.local, Local::Directory(None));
    match args.no_resume {
        _ if nowhere || args.dry_run || args.verify == Algorithm::None => None,
        true => Some("the same command without --no-resume resumes"),
        false => Some("the same command resumes"),
    }
}

/// Starts a thread that prints the progress of the copy when SIGINT or SIGTERM ends the process. Ignored signals stay ignored.
fn report_interruption(resume: Option<&'static str>, progress: &Arc<Progress>) -> std::io::Result<()> {
    let wanted: Vec<i32> = [SIGINT, SIGTERM].into_iter().filter(|signal| !is_ignored(*signal)).collect();
    let mut signals = signal_hook::iterator::Signals::new(wanted)?;
    let progress = Arc::clone(progress);
    let thread = std::thread::Builder::new().name("signals".into()).stack_size(256 << 10).spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        // On a terminal, the cursor may be in the line of the progress display.
        let newline = if std::io::stderr().is_terminal() { "\n" } else { "" };
        thruway_cli::say_error!("{newline}thruway cp: {}", stopped(resume, &progress));
        let _ = signal_hook::low_level::emulate_default_handler(signal);
    });
    thread.map(drop).map_err(|error| limits::thread_error(&error))
}

/// Message for a copy that ends early: the data that is kept.
fn stopped(resume: Option<&str>, progress: &Progress) -> String {
    let sent = units::size(progress.bytes.load(Ordering::Relaxed));
    match resume.filter(|_| is_kept(progress)) {
        Some(how) => format!("stopped; {sent} had been sent, and {how}"),
        None => "stopped; the same command starts over".into(),
    }
}

/// True if the process was started with this signal ignored, as by `nohup`.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// What must live as long as the job: a daemon of our own, or an ssh connection.
enum Peer {
    Thread(thruway_transfer::daemon::Stopper, Option<std::thread::JoinHandle<()>>),
    Ssh(#[allow(dead_code, reason = "ends the connection when dropped")] ssh::Connection),
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Peer::Thread(stopper, thread) = self {
            stopper.stop();
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl CpArgs {
    fn recursive(&self) -> bool {
        self.recursive || self.archive
    }

    fn preserve(&self) -> bool {
        self.preserve || self.archive
    }

    fn block_len(&self) -> Result<u32, String> {
        let block = self.block_size.unwrap_or(1 << 20);
        let range = thruway_transfer::wire::BLOCK_LEN;
        let block_len = u32::try_from(block).ok().filter(|b| range.contains(b) && b.is_multiple_of(4096));
        block_len.ok_or_else(|| {
            format!("invalid --block-size {} (expected 64K to 64M, a multiple of 4K)", units::size(block))
        })
    }

    fn options(&self) -> TreeOptions {
        TreeOptions {
            recursive: self.recursive(),
            preserve: self.preserve(),
            update: self.update,
            delete: self.delete,
            ignore_errors: self.ignore_errors,
            dry_run: self.dry_run,
            no_resume: self.no_resume,
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            direct: match self.direct {
                When::Auto => Direct::Auto,
                When::On => Direct::On,
                When::Off => Direct::Off,
            },
            length: self.size,
            itemize: false,
        }
    }

    fn job(&self, mut remote: Remote, local: Local) -> Result<Job, String> {
        self.provider.apply_to(&mut remote)?;
        let block_len = self.block_len()?;
        let this_host = remote.addr.ip().to_canonical().is_loopback();
        let encrypt = match self.encrypt {
            When::Auto => !this_host,
            When::On => true,
            When::Off => false,
        };
        // Where every block is verified or authenticated end to end, MPA's CRC adds nothing.
        if let thruway_fabric::Provider::Iwarp(config) = &mut remote.fabric {
            config.crc = self.verify == Algorithm::None && !encrypt;
        }
        Ok(Job {
            encrypt,
            remote,
            export: String::new(),
            path: Vec::new(),
            into_directory: false,
            sources: Vec::new(),
            renamed: false,
            made: None,
            note: None,
            local,
            id: [0; 16],
            options: self.options(),
            verify: self.verify,
            streams: self.streams,
            block_len,
            blocks: self.depth.map(|depth| depth as usize),
            rate_limit: self.bwlimit.filter(|limit| *limit > 0),
            retries: self.retries,
        })
    }
}

/// Identifies a job across attempts, however its paths are written: the user and the machine, the sources and their names, the
/// destination, and the options that change the result.
fn job_id(args: &CpArgs, sources: &[Given<'_>], target: &Given<'_>, export: &str) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    // Hosts may share a name, as `localhost`, and users a directory.
    field(rustix::system::uname().nodename().to_bytes());
    field(&std::fs::read("/etc/machine-id").unwrap_or_default());
    field(&rustix::process::geteuid().as_raw().to_le_bytes());
    for (endpoint, text) in sources {
        identify(endpoint, &mut field);
        if let Endpoint::Local(path) = endpoint {
            // A link may lead to another place by now.
            field(std::fs::canonicalize(path).unwrap_or_default().as_os_str().as_bytes());
        }
        field(&[means_contents(text).into()]);
    }
    // A slash behind the destination changes the directory that holds the journal, or nothing.
    identify(&target.0, &mut field);
    field(export.as_bytes());
    field(format!("{} {} {:?} {}", args.recursive(), args.preserve(), args.size, args.verify).as_bytes());
    hasher.finalize().as_bytes()[..16].try_into().expect("16 bytes")
}

/// Passes the parts of an endpoint to `field`, in one form for all ways to write it. A path of this machine becomes that of its
/// directory without links, and its name: the entry itself may exist only after the first attempt.
fn identify(endpoint: &Endpoint, field: &mut dyn FnMut(&[u8])) {
    match endpoint {
        Endpoint::Local(path) => {
            let name = path.file_name();
            let dir = match (name, path.parent()) {
                (Some(_), Some(parent)) if parent.as_os_str().is_empty() => Path::new("."),
                (Some(_), Some(parent)) => parent,
                _ => path,
            };
            let real = std::fs::canonicalize(dir).or_else(|_| std::path::absolute(dir)).unwrap_or_else(|_| dir.into());
            for part in [&b"local"[..], real.as_os_str().as_bytes(), name.unwrap_or_default().as_bytes()] {
                field(part);
            }
        }
        Endpoint::Ssh { host, path } => {
            field(b"ssh");
            field(host.as_bytes());
            field(&[path.starts_with(b"/").into()]);
            field(&tidy(path));
        }
        Endpoint::Daemon { host, port, export, path, .. } => {
            for part in [&b"daemon"[..], host.as_bytes(), &port.to_le_bytes(), export.as_bytes(), path] {
                field(part);
            }
        }
    }
}

/// Refuses a local copy of a file onto itself, of a directory into itself, and `--delete` of a source inside the destination.
fn check_overlap(args: &CpArgs, local: &[(PathBuf, Vec<u8>)], target: &Path) -> Result<(), String> {
    let destination = match std::fs::canonicalize(target) {
        Ok(destination) => destination,
        // The copy will create it.
        Err(_) => {
            let absolute = std::path::absolute(target).unwrap_or_else(|_| target.into());
            let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else { return Ok(()) };
            let Ok(parent) = std::fs::canonicalize(parent) else { return Ok(()) };
            parent.join(name)
        }
    };
    for (path, name) in local {
        let Ok(source) = std::fs::canonicalize(path) else { continue };
        let goes_to = match destination.is_dir() {
            true => destination.join(std::ffi::OsStr::from_bytes(name)),
            false => destination.clone(),
        };
        let real = std::fs::canonicalize(&goes_to).unwrap_or(goes_to);
        if source == real || is_one_file(&source, &real) {
            return Err(format!("'{}' and '{}' are the same file", shown(path), shown(&real)));
        }
        if args.recursive() && source.is_dir() && real.starts_with(&source) {
            return Err(format!("cannot copy '{}' into itself, '{}'", shown(path), shown(&real)));
        }
        if args.delete && source.starts_with(&real) {
            return Err(format!("'{}' is inside '{}', where --delete would remove it", path.display(), real.display()));
        }
    }
    Ok(())
}

/// True if two paths lead to the same file or directory.
fn is_one_file(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| path.metadata().map(|m| (m.dev(), m.ino()));
    identity(a).is_ok_and(|a| identity(b).is_ok_and(|b| a == b))
}

/// Sources of one name would overwrite each other; directories of one name become one.
fn check_names(local: &[(PathBuf, Vec<u8>)]) -> Result<(), String> {
    let mut seen: std::collections::HashMap<&[u8], &PathBuf> = std::collections::HashMap::new();
    for (path, name) in local.iter().filter(|(_, name)| !name.is_empty()) {
        if let Some(other) = seen.insert(name, path)
            && !(path.is_dir() && other.is_dir())
        {
            let name = thruway_transfer::escape(name);
            return Err(format!("'{}' and '{}' would both become '{name}'", other.display(), path.display()));
        }
    }
    Ok(())
}

/// A path as errors show it.
fn shown(path: &Path) -> String {
    thruway_transfer::escape(path.as_os_str().as_bytes())
}

/// `DIR/` and `DIR/.` are what is in the directory.
fn means_contents(source: &OsStr) -> bool {
    source.as_bytes().ends_with(b"/") || source.as_bytes().ends_with(b"/.")
}

/// The sources on this machine with the names they get. One of several that does not exist is reported by the copy, which goes
/// on with the others.
fn local_sources(sources: &[Given<'_>]) -> Result<Vec<(PathBuf, Vec<u8>)>, String> {
    let exists = |(endpoint, _): &Given<'_>| match endpoint {
        Endpoint::Local(path) => path.symlink_metadata().is_ok(),
        _ => false,
    };
    let some_exist = sources.iter().any(exists);
    let named = |(endpoint, text): &Given<'_>| {
        let Endpoint::Local(path) = endpoint else { unreachable!("the caller checked") };
        let metadata = path.symlink_metadata();
        let is_number = !text.is_empty() && text.as_bytes().iter().all(u8::is_ascii_digit);
        let is_not_found = metadata.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound);
        let is_missing = is_not_found && some_exist && !is_number;
        metadata.map(drop).or_else(|e| if is_missing { Ok(()) } else { Err(e) }).map_err(|e| {
            let hint = if is_number { "; '-p' has no value: a port for ssh is set in ~/.ssh/config" } else { "" };
            format!("{}: {e}{hint}", shown(path))
        })?;
        if means_contents(text) {
            // Before anything is made for it.
            return match path.is_dir() || is_missing {
                true => Ok((path.clone(), Vec::new())),
                false => Err(format!("{}: Not a directory", shown(path))),
            };
        }
        // `.` and `a/..` have no name of their own: their contents are meant.
        let name = path.file_name().map(|n| n.as_bytes().to_vec()).unwrap_or_default();
        Ok((path.clone(), name))
    };
    let local: Vec<_> = sources.iter().map(named).collect::<Result<_, _>>()?;
    check_names(&local)?;
    Ok(local)
}

fn push(
    args: &CpArgs,
    sources: &[Given<'_>],
    (target, target_text): &Given<'_>,
    peer: &mut Option<Peer>,
) -> Result<Job, String> {
    let local = local_sources(sources)?;
    let contents = local.iter().any(|(_, name)| name.is_empty());
    let slash = target_text.as_bytes().ends_with(b"/");
    let (remote, export, path) = match target {
        Endpoint::Daemon { host, port, export, path, .. } => {
            (daemon(host, *port, args.key.as_ref())?, export.clone(), path.clone())
        }
        Endpoint::Ssh { host, path } => {
            let (connection, remote) = ssh::Connection::start(host, false)?;
            let export = if path.first() == Some(&b'/') { ssh::ROOT } else { ssh::HOME };
            *peer = Some(Peer::Ssh(connection));
            (remote, export.to_string(), tidy(path))
        }
        Endpoint::Local(_) => unreachable!("handled by push_locally"),
    };
    let into_directory = slash || contents || local.len() > 1 || path.is_empty();
    Ok(Job { export, path, into_directory, ..args.job(remote, Local::Sources(local))? })
}

/// Both ends on this machine: a daemon of our own serves the destination.
fn push_locally(
    args: &CpArgs,
    sources: &[Given<'_>],
    target: &Path,
    pipelines: &Arc<PipelineSet>,
    peer: &mut Option<Peer>,
) -> Result<Job, String> {
    use thruway_transfer::daemon;
    let local = local_sources(sources)?;
    let contents = local.iter().any(|(_, name)| name.is_empty());
    let slash = target.as_os_str().as_bytes().ends_with(b"/");
    if target == Path::new("/dev/null") {
        return push_to(args, local, daemon::DEV_EXPORT, b"null".to_vec(), false, Path::new("/"), pipelines, peer);
    }
    check_overlap(args, &local, target)?;
    let absolute = std::path::absolute(target).map_err(|e| format!("{}: {e}", target.display()))?;
    let many = slash || contents || local.len() > 1;
    // The daemon's root is the nearest directory that is there: the user may follow any link.
    // Where the target is a directory by now, the daemon still has to see whether an earlier attempt made it.
    let (root, rest) = match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) if parent.is_dir() && (is_readable(parent) || !absolute.is_dir()) => {
            (parent.to_path_buf(), name.as_bytes().to_vec())
        }
        _ => (absolute.clone(), Vec::new()),
    };
    let into = many || rest.is_empty();
    push_to(args, local, "target", rest, into, &root, pipelines, peer)
}

/// True if this user can list a directory. If not, as for many users of `/home`, no journal of this user is in it.
fn is_readable(dir: &Path) -> bool {
    rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).is_ok()
}

#[allow(clippy::too_many_arguments)]
fn push_to(
    args: &CpArgs,
    local: Vec<(PathBuf, Vec<u8>)>,
    export: &str,
    path: Vec<u8>,
    into_directory: bool,
    root: &Path,
    pipelines: &Arc<PipelineSet>,
    peer: &mut Option<Peer>,
) -> Result<Job, String> {
    use thruway_transfer::daemon;
    let credentials = Credentials::Secret(thruway_engine::random::random());
    let exports = match export {
        daemon::DEV_EXPORT => Vec::new(),
        name => vec![daemon::Export { name: name.into(), dir: root.into(), read_only: false, unconfined: true }],
    };
    let mut config = daemon::Config::new(([127, 0, 0, 1], 0).into(), credentials.clone());
    config.exports = exports;
    config.local = false;
    config.max_sessions = 4;
    config.block_len_max = 64 << 20;
    if let Some(depth) = args.depth {
        config.blocks = depth as usize;
    }
    let daemon = daemon::Daemon::start_with(config, Arc::clone(pipelines)).map_err(|e| match e {
        daemon::StartError::Export { dir, source, .. } => format!("{}: {source}", shown(&dir)),
        other => other.to_string(),
    })?;
    let addr = daemon.addrs()[0];
    let stopper = daemon.stopper();
    let serve = move || {
        if let Err(message) = daemon.run() {
            thruway_cli::say_error!("thruway cp: {message}");
        }
    };
    let thread = std::thread::Builder::new().name("daemon".into()).spawn(serve);
    let thread = thread.map_err(|error| limits::thread_error(&error).to_string())?;
    *peer = Some(Peer::Thread(stopper, Some(thread)));
    let fabric = iwarp::Config { crc: false, ..iwarp::Config::default() }.into();
    let remote = Remote {
        addr,
        others: Vec::new(),
        label: "this machine".into(),
        credentials,
        known_hosts: None,
        fabric,
        transport: Transport::Rdma,
    };
    Ok(Job { export: export.into(), path, into_directory, ..args.job(remote, Local::Sources(local))? })
}

fn pull(
    args: &CpArgs,
    sources: &[Given<'_>],
    given: &Given<'_>,
    target: &Path,
    peer: &mut Option<Peer>,
) -> Result<Job, String> {
    let (remote, export) = match &sources[0].0 {
        Endpoint::Daemon { host, port, export, .. } => (daemon(host, *port, args.key.as_ref())?, export.clone()),
        Endpoint::Ssh { host, path } => {
            let (connection, remote) = ssh::Connection::start(host, true)?;
            *peer = Some(Peer::Ssh(connection));
            let export = if path.first() == Some(&b'/') { ssh::ROOT } else { ssh::HOME };
            (remote, export.to_string())
        }
        Endpoint::Local(_) => unreachable!("checked by endpoints"),
    };
    let mut specs = Vec::new();
    for (endpoint, text) in sources {
        let path = match endpoint {
            Endpoint::Daemon { path, .. } => path.clone(),
            Endpoint::Ssh { path, .. } => tidy(path),
            Endpoint::Local(_) => unreachable!("checked by endpoints"),
        };
        let last = path.rsplit(|b| *b == b'/').next().unwrap_or(b"");
        let contents = means_contents(text) || last.is_empty() || last == b"..";
        let name = if contents { Vec::new() } else { last.to_vec() };
        specs.push(SourceSpec { path, name });
    }
    let slash = target.as_os_str().as_bytes().ends_with(b"/");
    let contents = specs.iter().any(|s| s.name.is_empty());
    let LocalRoot { root, rename, made, note } = if target == Path::new("/dev/null") {
        LocalRoot::default()
    } else {
        let into = slash || contents || specs.len() > 1;
        local_root(args, target, into, &job_id(args, sources, given, &export))?
    };
    let (root, renamed) = (root.map(Arc::new), rename.is_some());
    if let (Some(name), [spec]) = (rename, specs.as_mut_slice()) {
        spec.name = name;
    }
    Ok(Job { export, sources: specs, renamed, made, note, ..args.job(remote, Local::Directory(root))? })
}

/// The directory to receive into.
#[derive(Default)]
struct LocalRoot {
    /// `None` discards everything.
    root: Option<OwnedFd>,
    /// The name that a single source gets instead of its own.
    rename: Option<Vec<u8>>,
    /// The directory was made for this copy.
    made: Option<MadeAfter>,
    /// Report about the directory.
    note: Option<String>,
}

/// Opens the directory to receive into, or makes it. A directory that does not exist is an empty one to a dry run.
fn local_root(args: &CpArgs, target: &Path, into_directory: bool, job: &[u8; 16]) -> Result<LocalRoot, String> {
    let received = |root| LocalRoot { root: Some(root), ..LocalRoot::default() };
    let renamed = |root, name: &OsStr| LocalRoot { rename: Some(name.as_bytes().to_vec()), ..received(root) };
    let failed = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    let open = |path: &Path| {
        rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| failed(path, e.into()))
    };
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if target.is_dir() {
        // A directory that an interrupted attempt made is not one that was there before.
        if let (false, Some(name), Ok(above)) = (into_directory, target.file_name(), open(parent)) {
            if Prepared::was_interrupted(&above, job, name.as_bytes()).map_err(|e| failed(target, e))? {
                return Ok(renamed(above, name));
            }
            let dir = open(target)?;
            let note = sink::leftovers::possible_maker(&above, &dir, name.as_bytes());
            return Ok(LocalRoot { note, ..received(dir) });
        }
        return Ok(received(open(target)?));
    }
    if into_directory && args.dry_run {
        // The copy itself would create it in the directory above.
        open(parent)?;
        return Ok(received(sink::nowhere().map_err(|e| e.to_string())?));
    }
    if into_directory {
        let Some(name) = target.file_name() else { return Ok(received(open(target)?)) };
        let above = open(parent)?;
        return match sink::make_destination(&above, name.as_bytes()).map_err(|e| failed(target, e))? {
            Some((dir, after)) => Ok(LocalRoot { made: Some(after), ..received(dir) }),
            // Another copy has made it.
            None => Ok(received(open(target)?)),
        };
    }
    let name = target.file_name().ok_or_else(|| format!("{}: not a name for a file", target.display()))?;
    Ok(renamed(open(parent)?, name))
}

fn report(args: &CpArgs, common: &Common, done: &Done, seconds: f64) {
    let &Done { ref finished, encrypted, ref stats, ref items } = done;
    let summary = &finished.summary;
    let rate = summary.bytes as f64 / seconds.max(1e-9);
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let cpu = cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9;
    // What was skipped was not looked at, what failed is not there.
    let checked = args.verify != Algorithm::None && !args.dry_run;
    let verified = checked && summary.failed == 0 && summary.skipped == 0;
    if common.json {
        let mut out = serde_json::json!({
            "files": summary.files,
            "others": summary.others,
            "bytes": summary.bytes,
            "seconds": seconds,
            "bytes_per_second": rate,
            "resumed_bytes": summary.resumed_bytes,
            "retries": finished.retries,
            "deleted": summary.deleted,
            "failed": summary.failed,
            "skipped": summary.skipped,
            "provider": finished.provider,
            "encrypted": encrypted,
            "verified": verified,
            "verify": args.verify.to_string(),
            "dry_run": args.dry_run,
            "cpu_seconds": cpu,
            "stages": stats.iter().map(stage_row).collect::<Vec<_>>(),
        });
        if let Some(items) = items {
            let row = |item: &Item| serde_json::json!({ "path": item.path, "reason": item.reason });
            out["items"] = items.iter().map(row).collect();
        }
        thruway_cli::say!("{out}");
        return;
    }
    if common.quiet {
        return;
    }
    let copied = summary.files.saturating_sub(summary.skipped);
    let mut text = format!(
        "{}{} in {}{}, {seconds:.2} s, {}, CPU {cpu:.2} s",
        if args.dry_run { "would copy " } else { "" },
        units::size(summary.bytes),
        units::count(copied, "file"),
        match summary.others {
            0 => String::new(),
            1 => " and 1 other entry".into(),
            others => format!(" and {others} other entries"),
        },
        units::binary_rate(rate),
    );
    for (count, what) in [
        (summary.resumed_bytes, "resumed"),
        (summary.skipped, "skipped as up to date"),
        (summary.deleted, "deleted"),
        (summary.failed, "failed"),
    ] {
        if count > 0 {
            text += &match what {
                "resumed" => format!(", {} resumed", units::size(count)),
                "deleted" if args.dry_run => format!(", would delete {count}"),
                // A copied file can have an error too, such as a lost attribute, so these are not "failed" entries.
                "failed" => format!(", {}", units::count(count, "error")),
                _ => format!(", {count} {what}"),
            };
        }
    }
    if finished.retries > 0 {
        text += &match finished.retries {
            1 => ", 1 retry".into(),
            retries => format!(", {retries} retries"),
        };
    }
    let rest_verified = checked && !verified && copied > summary.failed;
    if rest_verified {
        text += ", the rest verified";
    }
    text += match (verified, encrypted) {
        (true, true) => ", verified, encrypted",
        (true, false) => ", verified",
        (false, true) => ", encrypted",
        (false, false) => "",
    };
    thruway_cli::say!("{text}");
}

fn stage_row(stage: &StageStats) -> serde_json::Value {
    serde_json::json!({
        "stage": stage.name,
        "workers": stage.workers,
        "tasks": stage.tasks,
        "queue_seconds": stage.queue_delay.as_secs_f64(),
        "service_seconds": stage.service.as_secs_f64(),
        "idle_seconds": stage.wait.as_secs_f64(),
        "longest_queue": stage.longest_queue,
    })
}

fn print_stats(stats: &[StageStats]) {
    thruway_cli::say_error!(
        "{:<10} {:>7} {:>9} {:>12} {:>12} {:>12} {:>8}",
        "stage",
        "workers",
        "tasks",
        "queue us",
        "service us",
        "idle s",
        "longest"
    );
    for stage in stats {
        let mean = |d: std::time::Duration| d.as_secs_f64() * 1e6 / stage.tasks.max(1) as f64;
        thruway_cli::say_error!(
            "{:<10} {:>7} {:>9} {:>12.1} {:>12.1} {:>12.2} {:>8}",
            stage.name,
            stage.workers.map_or("own".into(), |w| w.to_string()),
            stage.tasks,
            mean(stage.queue_delay),
            mean(stage.service),
            stage.wait.as_secs_f64(),
            stage.longest_queue,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_a_second_attempt_are_not_listed_again() {
        let item = |path: &str, reason: &str| Item { path: path.into(), reason: reason.into() };
        let mut items =
            vec![item("a", "new"), item("b", "deleted"), item("a", "new"), item("b", "new"), item("c", "new")];
        remove_repeated(&mut items);
        assert_eq!(items, [item("a", "new"), item("b", "deleted"), item("b", "new"), item("c", "new")]);
    }
}
