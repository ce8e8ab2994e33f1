//! `thruway clean`: leftovers of interrupted copies.

use clap::Args;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use thruway_cli::{Common, Failed, units};
use thruway_transfer::sink::leftovers::{Leftover, Search};

/// Arguments of `thruway clean`.
#[derive(Args)]
#[command(after_help = "Examples:
  thruway clean /srv/data             lists leftovers of interrupted copies
  thruway clean --delete /srv/data    removes those that no running copy holds

Leftovers are journals (.thruway-*.journal) and temporary files (.NAME.tw-*). The
command of an interrupted copy resumes with them. States: 'unfinished' and
'complete' can be removed; 'in use' belongs to a running copy; 'recent' is a
temporary file without a journal, which can be removed when it is a day old.

DIR is a directory of this host. For one that a daemon exports, run the command
there, as root or as the daemon's user, while the daemon runs or not.")]
pub(crate) struct CleanArgs {
    /// Remove leftovers instead of listing them
    #[arg(long)]
    delete: bool,
    /// Directories to search, with all beneath them
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
}

/// Runs `thruway clean`.
pub(crate) fn run(args: &CleanArgs, common: &Common) -> Result<(), Failed> {
    if let Some(dir) = args.dirs.iter().find(|dir| dir.as_os_str().as_bytes().starts_with(b"tw://")) {
        let dir = shown(dir, b"");
        return Err(Failed::usage("clean", format!("{dir}: DIR is local; run 'thruway clean' on the daemon's host")));
    }
    thruway_engine::limits::raise_open_files();
    let mut totals = Totals::default();
    for dir in &args.dirs {
        match Search::new(dir) {
            Ok(search) => totals.take(dir, &search, args.delete, common),
            Err(e) => totals.fail(&shown(dir, b""), &e),
        }
    }
    if common.json {
        thruway_cli::say!("{}", serde_json::Value::Array(totals.rows));
    } else if !common.quiet && (totals.count > 0 || !totals.failed) {
        thruway_cli::say!("{}", totals.text(args.delete));
    }
    if totals.failed { Err(Failed::Operation) } else { Ok(()) }
}

#[derive(Default)]
struct Totals {
    rows: Vec<serde_json::Value>,
    /// Leftovers that were removed or, without `--delete`, can be.
    count: u64,
    bytes: u64,
    failed: bool,
}

impl Totals {
    fn take(&mut self, dir: &Path, search: &Search, delete: bool, common: &Common) {
        for (path, e) in &search.failures {
            self.fail(&shown(dir, path), e);
        }
        // A journal identifies the temporary files of its job, so it is removed after them.
        let is_journal = |l: &&Leftover| l.path.ends_with(b".journal");
        let (journals, files): (Vec<_>, Vec<_>) = search.found.iter().partition(is_journal);
        for leftover in files.into_iter().chain(journals) {
            let path = shown(dir, &leftover.path);
            let mut removed = false;
            if leftover.state.is_removable() {
                if delete && let Err(e) = search.remove(leftover) {
                    self.fail(&path, &e);
                    continue;
                }
                removed = delete;
                (self.count, self.bytes) = (self.count + 1, self.bytes + leftover.bytes);
            }
            if common.json {
                self.rows.push(serde_json::json!({
                    "path": path,
                    "state": leftover.state.word(),
                    "bytes": leftover.bytes,
                    "modified": leftover.modified,
                    "removed": removed,
                }));
            } else if !common.quiet {
                let (size, age) = (units::size(leftover.bytes), age(leftover.modified));
                let state = if removed { "removed" } else { leftover.state.word() };
                thruway_cli::say!("{state:<10} {size:>10} {age:>8}  {path}");
            }
        }
    }

    fn fail(&mut self, path: &str, error: &std::io::Error) {
        thruway_cli::say_error!("thruway clean: {path}: {error}");
        self.failed = true;
    }

    fn text(&self, delete: bool) -> String {
        let size = units::size(self.bytes);
        match (self.count, delete) {
            (0, false) => "nothing to remove".into(),
            (0, true) => "nothing removed".into(),
            (count, false) => format!("{count} to remove, {size}; --delete removes {}", them(count)),
            (count, true) => format!("{count} removed, {size}"),
        }
    }
}

fn them(count: u64) -> &'static str {
    if count == 1 { "it" } else { "them" }
}

/// Path of a leftover for messages: the directory as the user gave it, with the path below it.
fn shown(dir: &Path, below: &[u8]) -> String {
    let path = if below.is_empty() { dir.into() } else { dir.join(std::ffi::OsStr::from_bytes(below)) };
    thruway_transfer::escape(path.as_os_str().as_bytes())
}

/// Time since `modified` (seconds since 1970) as text: `5 min`, `3 h`, `12 d`.
fn age(modified: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
    match now.saturating_sub(modified).max(0) {
        seconds @ ..60 => format!("{seconds} s"),
        seconds @ ..3600 => format!("{} min", seconds / 60),
        seconds @ ..86_400 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}
