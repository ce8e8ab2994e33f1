//! What a person sees while a copy runs.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thruway_cli::units;
use thruway_transfer::session::Progress;

/// How to show progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ProgressMode {
    /// A bar on a terminal, nothing elsewhere
    Auto,
    /// A line every few seconds
    Plain,
    /// Nothing
    Never,
}

/// A thread that shows progress until stopped.
pub(crate) struct Display {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Display {
    /// True if progress is shown.
    pub(crate) fn is_shown(&self) -> bool {
        self.thread.is_some()
    }

    /// Starts showing, if the mode and the terminal want it.
    pub(crate) fn start(mode: ProgressMode, quiet: bool, progress: &Arc<Progress>) -> Display {
        let stop = Arc::new(AtomicBool::new(false));
        let bar = match mode {
            _ if quiet => return Display { stop, thread: None },
            ProgressMode::Never => return Display { stop, thread: None },
            ProgressMode::Auto if !std::io::stderr().is_terminal() => return Display { stop, thread: None },
            ProgressMode::Auto => Some(new_bar()),
            ProgressMode::Plain => None,
        };
        let (halt, progress) = (Arc::clone(&stop), Arc::clone(progress));
        // A copy goes on without its progress if the system cannot start a thread.
        let thread = std::thread::Builder::new().spawn(move || show(bar.as_ref(), &progress, &halt)).ok();
        Display { stop, thread }
    }

    /// Stops and clears the line.
    pub(crate) fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.stop();
    }
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    // `wide_msg` shortens the text to one line on a narrow terminal.
    bar.set_style(ProgressStyle::with_template("{spinner} {wide_msg}").expect("a valid template"));
    bar
}

fn show(bar: Option<&ProgressBar>, progress: &Progress, stop: &AtomicBool) {
    let start = Instant::now();
    let mut said = Instant::now();
    while !stop.load(Ordering::SeqCst) {
        std::thread::park_timeout(Duration::from_millis(100));
        let text = describe(progress, start.elapsed());
        match bar {
            Some(bar) => {
                bar.set_message(text);
                bar.tick();
            }
            None if said.elapsed() >= Duration::from_secs(2) => {
                said = Instant::now();
                thruway_cli::say_error!("{text}");
            }
            None => {}
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
}

/// Progress as text: `1.2 GiB of 3.5 GiB, 34 %, 1.0 GiB/s, 120 files, 2 s left`; with `of at least` until the total is known.
fn describe(progress: &Progress, elapsed: Duration) -> String {
    let get = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
    let (bytes, files, estimate) = (get(&progress.bytes), get(&progress.files), get(&progress.estimate));
    let rate = bytes as f64 / elapsed.as_secs_f64().max(0.001);
    let done = bytes + if estimate > 0 { get(&progress.resumed) } else { 0 };
    let known = estimate > 0 || progress.total_known.load(Ordering::Relaxed);
    // The bytes done include names and attributes, and can exceed an estimate, which counts content only.
    let total = if estimate > 0 { estimate.max(done) } else { get(&progress.total_bytes) };
    let mut text = units::size(done);
    match known {
        _ if total < done.max(1) => {}
        true => text += &format!(" of {}, {:.0} %", units::size(total), done as f64 / total as f64 * 100.0),
        false => text += &format!(" of at least {}", units::size(total)),
    }
    text += &format!(", {}, {}", units::binary_rate(rate), units::count(files, "file"));
    if known && total >= done && bytes > 0 {
        text += &format!(", {} left", duration((total - done) as f64 / rate));
    }
    text
}

/// A duration as text: `5 s`, `3 min`, `2 h 5 min`.
fn duration(seconds: f64) -> String {
    let seconds = seconds.ceil() as u64;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Starts a thread that sums the sizes of the sources into `progress.estimate`, the total for the percentage.
pub(crate) fn estimate(sources: Vec<PathBuf>, progress: &Arc<Progress>) {
    let progress = Arc::downgrade(progress);
    let walk = move || {
        let (mut total, mut todo) = (0u64, sources);
        while let Some(path) = todo.pop() {
            // The copy has ended.
            if progress.strong_count() == 0 {
                return;
            }
            let Ok(meta) = path.symlink_metadata() else { continue };
            if meta.is_dir() {
                todo.extend(std::fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
            } else if meta.is_file() {
                // Holes are not sent.
                total += meta.len().min(meta.blocks() * 512);
            }
        }
        if let Some(progress) = progress.upgrade() {
            progress.estimate.store(total, Ordering::Relaxed);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("estimate".into()).spawn(walk) {
        tracing::debug!(%error, "no estimate");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_has_percent_and_time_left_where_the_total_is_known() {
        let progress = Progress::default();
        let of = |seconds| describe(&progress, Duration::from_secs(seconds));
        progress.bytes.store(10 << 20, Ordering::Relaxed);
        progress.files.store(1, Ordering::Relaxed);
        assert_eq!(of(10), "10 MiB, 1 MiB/s, 1 file");
        progress.total_bytes.store(20 << 20, Ordering::Relaxed);
        assert_eq!(of(10), "10 MiB of at least 20 MiB, 1 MiB/s, 1 file");
        progress.total_known.store(true, Ordering::Relaxed);
        assert_eq!(of(10), "10 MiB of 20 MiB, 50 %, 1 MiB/s, 1 file, 10 s left");
        progress.resumed.store(30 << 20, Ordering::Relaxed);
        progress.estimate.store(240 << 20, Ordering::Relaxed);
        assert_eq!(of(10), "40 MiB of 240 MiB, 17 %, 1 MiB/s, 1 file, 3 min left");
        progress.estimate.store(39 << 20, Ordering::Relaxed);
        assert_eq!(of(10), "40 MiB of 40 MiB, 100 %, 1 MiB/s, 1 file, 0 s left");
        assert_eq!(duration(7500.0), "2 h 5 min");
    }
}
