//! What the program logs: on standard error, and not more of a kind than can be read.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{self, Format, Full, Writer};
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Lines of one kind about peers that are logged in a period, so that a peer that is refused again and again does not fill the disk.
const LINES_MAX: u32 = 100;
const PERIOD: Duration = Duration::from_secs(10);

/// Starts to log: warnings, with `-v` what happens, with `-vv` everything; or what `THRUWAY_LOG` says. With the time of each line, or not.
/// `is_copy`: without `-v`, a failed session is no warning of its own, as the command reports it.
pub(crate) fn start(verbose: u8, has_times: bool, is_copy: bool) {
    let level = match (verbose, is_copy) {
        (0, true) => "warn,thruway_transfer::daemon=error",
        (0, false) => "warn",
        (1, _) => "info",
        (2.., _) => "debug",
    };
    let filter = match std::env::var("THRUWAY_LOG").map(|text| (EnvFilter::try_new(&text), text)) {
        Ok((Ok(filter), _)) => filter,
        Ok((Err(error), text)) => {
            thruway_cli::say_error!(
                "thruway: invalid THRUWAY_LOG '{text}' ({error}); expected such as debug or thruway_transfer=debug"
            );
            level.into()
        }
        Err(_) => level.into(),
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    let kinds = Mutex::default();
    if has_times {
        log.event_format(PeerLimit { lines: format::format(), kinds }).init();
    } else {
        log.event_format(PeerLimit { lines: format::format().without_time(), kinds }).init();
    }
}

/// Writes so many lines of each kind in a period, of those that name a peer.
struct PeerLimit<T> {
    lines: Format<Full, T>,
    kinds: Mutex<HashMap<Identifier, Window>>,
}

/// The lines of one kind since a period began.
struct Window {
    begun: Instant,
    lines: u32,
}

/// What is done with a line.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Written, after so many that were left out.
    Write(u32),
    /// The first that is left out.
    LeaveOutFrom,
    LeaveOut,
}

impl Window {
    fn count(&mut self, now: Instant) -> Verdict {
        if now.duration_since(self.begun) >= PERIOD {
            let left_out = self.lines.saturating_sub(LINES_MAX);
            *self = Window { begun: now, lines: 1 };
            return Verdict::Write(left_out);
        }
        self.lines = self.lines.saturating_add(1);
        match self.lines {
            ..=LINES_MAX => Verdict::Write(0),
            lines if lines == LINES_MAX + 1 => Verdict::LeaveOutFrom,
            _ => Verdict::LeaveOut,
        }
    }
}

impl<S, N, T: FormatTime> FormatEvent<S, N> for PeerLimit<T>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        let verdict = if metadata.fields().field("peer").is_some() {
            let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            kinds.entry(metadata.callsite()).or_insert(Window { begun: now, lines: 0 }).count(now)
        } else {
            Verdict::Write(0)
        };
        let (level, target, period) = (metadata.level(), metadata.target(), PERIOD.as_secs());
        match verdict {
            Verdict::LeaveOut => return Ok(()),
            Verdict::LeaveOutFrom => {
                return writeln!(
                    writer,
                    "{level:>5} {target}: more than {LINES_MAX} lines like the last in {period} s; leaving out the rest"
                );
            }
            Verdict::Write(0) => {}
            Verdict::Write(left_out) => {
                writeln!(writer, "{level:>5} {target}: {left_out} lines like the next were left out")?;
            }
        }
        self.lines.format_event(ctx, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_kind_are_bounded_and_those_left_out_are_counted() {
        let start = Instant::now();
        let mut window = Window { begun: start, lines: 0 };
        assert!((0..LINES_MAX).all(|_| window.count(start) == Verdict::Write(0)));
        assert_eq!(window.count(start), Verdict::LeaveOutFrom);
        assert_eq!(window.count(start + PERIOD / 2), Verdict::LeaveOut);
        assert_eq!(window.count(start + PERIOD), Verdict::Write(2));
        assert_eq!(window.count(start + PERIOD), Verdict::Write(0));
        assert_eq!(window.count(start + 3 * PERIOD), Verdict::Write(0));
    }
}
