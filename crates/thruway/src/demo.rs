//! `thruway demo`: the main job end to end on this machine, in a temporary directory.

use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thruway_cli::{Common, Failed, print, units};

/// Arguments of `thruway demo`.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Size of the largest file of the data set, at least 2M
    #[arg(long, default_value = "256M", value_parser = parse_file_size)]
    size: u64,
    /// Parent of the temporary directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Smallest size of the largest file: it is interrupted half-way, and whole blocks of 1 MiB are kept.
const SIZE_MIN: u64 = 2 << 20;

fn parse_file_size(text: &str) -> Result<u64, String> {
    let size = units::parse_size(text).map_err(|e| e.to_string())?;
    if size < SIZE_MIN { Err("too small (expected 2M or more)".into()) } else { Ok(size) }
}

/// Runs the demonstration.
pub(crate) fn run(args: &DemoArgs, common: &Common) -> Result<(), Failed> {
    let demo = Demo::new(args, common).map_err(|message| Failed::operation("demo", message))?;
    let started = demo.clean_up_on_signals().map_err(|e| format!("handling signals: {e}").into());
    let result = started.and_then(|()| demo.run());
    // After a signal, the thread that ends the demo holds this lock, so the failure of a killed child is not reported.
    let children = demo.children.lock().expect("no panics under the lock");
    clean_up(demo.dir.path(), &children);
    result.map_err(|problem| match problem {
        Problem::Output(error) => Failed::output(&error),
        Problem::Other(message) => Failed::operation("demo", message),
    })
}

/// Reason for which a demonstration ends early.
enum Problem {
    /// Standard output cannot be written.
    Output(std::io::Error),
    Other(String),
}

impl From<String> for Problem {
    fn from(message: String) -> Problem {
        Problem::Other(message)
    }
}

struct Demo<'a> {
    args: &'a DemoArgs,
    common: &'a Common,
    dir: tempfile::TempDir,
    program: PathBuf,
    children: Children,
}

/// One step's result.
struct Step {
    what: String,
    json: serde_json::Value,
}

/// A daemon that ends with the demo.
struct Daemon {
    child: Child,
    addr: String,
    children: Children,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let mut children = self.children.lock().expect("no panics under the lock");
        let _ = self.child.kill();
        let _ = self.child.wait();
        children.retain(|pid| *pid != self.child.id());
    }
}

/// Process IDs of the running children.
type Children = Arc<Mutex<Vec<u32>>>;

/// Kills the children and removes the directory.
fn clean_up(dir: &Path, children: &[u32]) {
    for child in children.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid as i32)) {
        let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
    }
    // A killed child may still complete a system call that creates a file: try again.
    for _ in 0..100 {
        if fs::remove_dir_all(dir).is_ok() || !dir.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl<'a> Demo<'a> {
    fn new(args: &'a DemoArgs, common: &'a Common) -> Result<Demo<'a>, String> {
        let base = args.dir.clone().unwrap_or_else(crate::directories::temporary);
        let dir = tempfile::Builder::new().prefix("thruway-demo-").tempdir_in(&base);
        let dir = dir.map_err(|e| format!("{}: {e}", base.display()))?;
        let program = std::env::current_exe().map_err(|e| format!("finding this program: {e}"))?;
        Ok(Demo { args, common, dir, program, children: Arc::default() })
    }

    /// Starts a thread that kills the children and removes the directory when a signal ends the demo.
    fn clean_up_on_signals(&self) -> std::io::Result<()> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let (dir, children) = (self.dir.path().to_path_buf(), Arc::clone(&self.children));
        std::thread::spawn(move || {
            let Some(signal) = signals.forever().next() else { return };
            // While this lock is held, no further child is started.
            let children = children.lock().expect("no panics under the lock");
            clean_up(&dir, &children);
            thruway_cli::say_error!("thruway demo: stopped; its files are removed");
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        });
        Ok(())
    }

    /// Starts a child, which is killed when a signal ends the demo.
    fn spawn(&self, command: &mut Command) -> std::io::Result<Child> {
        let mut children = self.children.lock().expect("no panics under the lock");
        let child = command.spawn()?;
        children.push(child.id());
        Ok(child)
    }

    /// Forgets a child that has ended. The kernel may give its process ID to another process.
    fn ended(&self, child: u32) {
        self.children.lock().expect("no panics under the lock").retain(|pid| *pid != child);
    }

    fn say(&self, text: &str) -> Result<(), Problem> {
        if self.common.json || self.common.quiet {
            return Ok(());
        }
        print::try_say(format_args!("{text}")).map_err(Problem::Output)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self) -> Result<(), Problem> {
        let source = self.path("data");
        let (files, bytes) = self.make_data_set(&source).map_err(|e| format!("making the data set: {e}"))?;
        self.say(&format!(
            "data set   {files} files, {}: small, large, sparse, linked, oddly named",
            units::size(bytes)
        ))?;
        let served = self.path("served");
        fs::create_dir(&served).map_err(|e| e.to_string())?;
        let daemon = self.serve(&served)?;
        self.say(&format!("daemon     tw://{} serves {}", daemon.addr, served.display()))?;
        let mut steps = Vec::new();
        for (provider, extra) in
            [("auto", &[][..]), ("iwarp", &[]), ("tcp", &[]), ("iwarp", &["--encrypt", "on", "--verify", "blake3"])]
        {
            let name = format!("copy{}", steps.len());
            let there = format!("tw://{}/demo/{name}", daemon.addr);
            let back = self.path(&format!("back{}", steps.len()));
            let options = [&["-rp", "--provider", provider][..], extra].concat();
            let push = self.cp(&options, &source, there.as_ref())?;
            let pull = self.cp(&options, there.as_ref(), &back)?;
            compare(&source, &served.join(&name))?;
            compare(&source, &back)?;
            for (what, json) in [("there", push), ("back", pull)] {
                let carried_by = json["provider"].as_str().unwrap_or_default();
                let more = if extra.is_empty() { "" } else { ", encrypted, BLAKE3" };
                self.show(&mut steps, format!("{what:<5} by {carried_by}{more}"), json)?;
            }
        }
        self.kill_and_resume(&source, &served, &daemon, &mut steps)?;
        self.finish(&steps)
    }

    fn show(&self, steps: &mut Vec<Step>, what: String, json: serde_json::Value) -> Result<(), Problem> {
        let get = |key: &str| json[key].as_u64().unwrap_or(0);
        let rate = units::rate(json["bytes_per_second"].as_f64().unwrap_or(0.0));
        let mut text = format!(
            "{what:<34} {:>10} {:>11}, {}",
            units::size(get("bytes")),
            rate,
            units::count(get("files"), "file")
        );
        if get("resumed_bytes") > 0 {
            text += &format!(", {} not sent again", units::size(get("resumed_bytes")));
        }
        steps.push(Step { what, json });
        self.say(&format!("{text}, identical"))
    }

    fn kill_and_resume(
        &self,
        source: &Path,
        served: &Path,
        daemon: &Daemon,
        steps: &mut Vec<Step>,
    ) -> Result<(), Problem> {
        let there = format!("tw://{}/demo/interrupted", daemon.addr);
        let large = source.join("large");
        let limit = (self.args.size / 2).to_string();
        let options = ["--bwlimit", &limit];
        let mut command = self.command(&options, &large, there.as_ref());
        let mut child = self.spawn(command.stdout(Stdio::null()).stderr(Stdio::null())).map_err(|e| e.to_string())?;
        let start = Instant::now();
        while on_disk(served, "interrupted") < self.args.size / 2 {
            if start.elapsed() > Duration::from_secs(60) || child.try_wait().map_err(|e| e.to_string())?.is_some() {
                return Err("the copy that was to be interrupted did not get half-way".to_string().into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().and_then(|()| child.wait()).map_err(|e| e.to_string())?;
        self.ended(child.id());
        if served.join("interrupted").exists() {
            return Err("an unfinished file appeared under its name".to_string().into());
        }
        self.say("killed     a copy half-way with SIGKILL; the same command again:")?;
        // The same command: a limit of the rate is part of it, and not worth waiting for.
        let json = self.cp(&["--bwlimit", &limit], &large, there.as_ref())?;
        let total = json["bytes"].as_u64().unwrap_or(0) + json["resumed_bytes"].as_u64().unwrap_or(0);
        if total != self.args.size || json["resumed_bytes"].as_u64().unwrap_or(0) == 0 {
            return Err(format!("resuming moved the wrong amount: {json}").into());
        }
        compare_files(&large, &served.join("interrupted"))?;
        self.show(steps, "resumed".into(), json)
    }

    fn finish(&self, steps: &[Step]) -> Result<(), Problem> {
        if self.common.json {
            let rows: Vec<_> = steps
                .iter()
                .map(|step| {
                    let mut json = step.json.clone();
                    json["step"] = step.what.clone().into();
                    json
                })
                .collect();
            let report = serde_json::json!({ "ok": true, "steps": rows });
            print::try_say(format_args!("{report}")).map_err(Problem::Output)?;
        }
        self.say("all copies are identical to the source; nothing was left behind")
    }

    fn make_data_set(&self, root: &Path) -> std::io::Result<(u64, u64)> {
        fs::create_dir(root)?;
        let mut seed = 1u64;
        let mut noise = |len: usize| {
            let mut out = Vec::with_capacity(len + 8);
            while out.len() < len {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                out.extend_from_slice(&seed.to_le_bytes());
            }
            out.truncate(len);
            out
        };
        let mut bytes = 0;
        let large = fs::File::create(root.join("large"))?;
        while bytes < self.args.size {
            let chunk = noise((self.args.size - bytes).min(4 << 20) as usize);
            large.write_all_at(&chunk, bytes)?;
            bytes += chunk.len() as u64;
        }
        for dir in 0..20 {
            let dir = root.join(format!("small/{dir:02}"));
            fs::create_dir_all(&dir)?;
            for file in 0..100 {
                let content = noise(file * 97 + 1);
                bytes += content.len() as u64;
                fs::write(dir.join(format!("{file:03}.dat")), content)?;
            }
        }
        let sparse = fs::File::create(root.join("sparse"))?;
        sparse.write_all_at(b"an island in a sea of nothing", 100 << 20)?;
        sparse.set_len(1 << 30)?;
        fs::write(root.join("a name with spaces\nand a line break"), "content")?;
        fs::write(root.join("empty"), "")?;
        std::os::unix::fs::symlink("large", root.join("link"))?;
        fs::hard_link(root.join("empty"), root.join("second name"))?;
        Ok((2004, bytes))
    }

    fn serve(&self, dir: &Path) -> Result<Daemon, String> {
        let mut command = Command::new(&self.program);
        command.args(["serve", "--json", "--listen", "127.0.0.1:0", "--export"]);
        command.arg(format!("demo={}", dir.display())).stdout(Stdio::piped());
        // Otherwise the daemon would warn about the copy that the demo kills.
        if self.common.verbose == 0 && std::env::var_os("THRUWAY_LOG").is_none() {
            command.env("THRUWAY_LOG", "error");
        }
        let mut child = self.spawn(&mut command).map_err(|e| format!("starting the daemon: {e}"))?;
        let mut line = String::new();
        let out = child.stdout.as_mut().expect("piped");
        BufReader::new(out).read_line(&mut line).map_err(|e| format!("starting the daemon: {e}"))?;
        let announced: serde_json::Value =
            serde_json::from_str(&line).map_err(|_| "the daemon did not start".to_string())?;
        let addr = announced["listening"][0].as_str().unwrap_or_default().to_string();
        Ok(Daemon { child, addr, children: Arc::clone(&self.children) })
    }

    fn command(&self, options: &[&str], from: &Path, to: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["cp", "--json"]).args(options).arg(from).arg(to).stdin(Stdio::null());
        command
    }

    fn cp(&self, options: &[&str], from: &Path, to: &Path) -> Result<serde_json::Value, String> {
        let mut command = self.command(options, from, to);
        let child = self.spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        let child = child.map_err(|e| format!("starting a copy: {e}"))?;
        let id = child.id();
        let out = child.wait_with_output().map_err(|e| format!("waiting for a copy: {e}"))?;
        self.ended(id);
        let _ = std::io::stderr().write_all(&out.stderr);
        if !out.status.success() {
            return Err(format!("the copy from {} failed: {}", from.display(), out.status));
        }
        serde_json::from_slice(&out.stdout).map_err(|e| format!("the copy's report: {e}"))
    }
}

/// Bytes on disk of whatever in `dir` has this in its name.
fn on_disk(dir: &Path, name: &str) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let named = entries.flatten().filter(|e| e.file_name().to_string_lossy().contains(name));
    named.filter_map(|e| e.metadata().ok()).map(|m| m.blocks() * 512).sum()
}

fn compare_files(a: &Path, b: &Path) -> Result<(), String> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |e: std::io::Error| format!("{path}: {e}")
    };
    let hash = |path: &Path| -> Result<blake3::Hash, String> {
        let mut hasher = blake3::Hasher::new();
        let mut file = fs::File::open(path).map_err(failed(path))?;
        std::io::copy(&mut file, &mut hasher).map_err(failed(path))?;
        Ok(hasher.finalize())
    };
    if hash(a)? == hash(b)? { Ok(()) } else { Err(format!("{} and {} differ", a.display(), b.display())) }
}

/// Insists that two trees have the same entries with the same types, modes, times and content.
fn compare(a: &Path, b: &Path) -> Result<(), String> {
    let (left, right) = (entries(a)?, entries(b)?);
    if left.keys().ne(right.keys()) {
        return Err(format!("{} and {} hold different entries", a.display(), b.display()));
    }
    for (name, meta) in &left {
        let other = &right[name];
        let (x, y) = (a.join(name), b.join(name));
        let same = (meta.mode(), meta.mtime(), meta.mtime_nsec()) == (other.mode(), other.mtime(), other.mtime_nsec());
        if !same || (!meta.is_dir() && meta.len() != other.len()) {
            return Err(format!("{} and {} have different attributes", x.display(), y.display()));
        }
        // Reading through a gigabyte of holes would only warm the processor.
        if meta.is_file() && meta.blocks() * 512 >= meta.len() {
            compare_files(&x, &y)?;
        }
    }
    Ok(())
}

fn entries(root: &Path) -> Result<BTreeMap<PathBuf, fs::Metadata>, String> {
    let mut out = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let meta = fs::symlink_metadata(&path).map_err(failed)?;
            if meta.is_dir() {
                todo.push(path.clone());
            }
            let name = path.strip_prefix(root).expect("below the root").to_path_buf();
            out.insert(name, meta);
        }
    }
    Ok(out)
}
