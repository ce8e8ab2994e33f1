//! What a person sees while a copy runs.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
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
        let thread = std::thread::spawn(move || show(bar.as_ref(), &progress, &halt));
        Display { stop, thread: Some(thread) }
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
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("a valid template"));
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

/// `1.2 GiB, 34 %, 1.10 GB/s, 120 files, 2 s left`.
fn describe(progress: &Progress, elapsed: Duration) -> String {
    let get = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
    let (bytes, files, total) = (get(&progress.bytes), get(&progress.files), get(&progress.total_bytes));
    let rate = bytes as f64 / elapsed.as_secs_f64().max(0.001);
    let mut text = units::size(bytes);
    let known = progress.total_known.load(Ordering::Relaxed) && total > 0;
    if known {
        text += &format!(", {:.0} %", (bytes as f64 / total as f64 * 100.0).min(100.0));
    }
    text += &format!(", {}, {files} files", units::rate(rate));
    if known && rate > 0.0 {
        text += &format!(", {:.0} s left", (total.saturating_sub(bytes)) as f64 / rate);
    }
    text
}
