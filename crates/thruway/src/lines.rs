//! Lines that a thread prints, so that a slow reader (a pager, a stopped terminal) does not delay the copy.

use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use thruway_cli::{print, say_error};
use thruway_engine::Owner;
use thruway_fs::spool::Spool;

/// Longest part that is printed at once, in bytes.
const PART: usize = 64 << 10;

/// Where a line goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Output,
    Error,
}

/// Prints lines in order. Lines that wait take up to 1 MiB of memory, and a temporary file beyond that.
pub(crate) struct Lines {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Queue {
    state: Mutex<State>,
    /// Rung when there are more lines, fewer lines, or no more to come.
    changed: Condvar,
}

struct State {
    /// Lines, each after its stream and its length.
    spool: Spool,
    /// Position of the first line that is not printed.
    at: u64,
    is_over: bool,
}

impl Lines {
    /// Starts the thread, which calls `on_failure` if standard output or the temporary file fails. Errors of standard error are ignored:
    /// there is no place to report them.
    ///
    /// # Errors
    /// As [`std::thread::Builder::spawn`].
    pub(crate) fn start(on_failure: impl Fn(&io::Error) + Send + 'static) -> io::Result<Lines> {
        let state = State { spool: Spool::new(None, Owner::default()), at: 0, is_over: false };
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
        let shared = Arc::clone(&queue);
        let run = move || shared.print(on_failure);
        let thread = std::thread::Builder::new().name("lines".into()).stack_size(256 << 10).spawn(run)?;
        Ok(Lines { queue, thread: Mutex::new(Some(thread)) })
    }

    /// Adds a line. Waits if the temporary file is full.
    pub(crate) fn push(&self, stream: Stream, line: &str) {
        let len = u32::try_from(line.len() + 1).expect("paths and messages are short");
        let record = [&[stream as u8][..], &len.to_ne_bytes(), line.as_bytes(), b"\n"].concat();
        let mut state = self.queue.state.lock().expect("no panics under the lock");
        while !state.is_over && state.spool.append(&record).is_err() {
            if state.spool.is_empty() {
                drop(state);
                return print_now(stream, line);
            }
            state = self.queue.changed.wait(state).expect("no panics under the lock");
        }
        let is_over = state.is_over;
        drop(state);
        self.queue.changed.notify_all();
        if is_over {
            print_now(stream, line);
        }
    }

    /// Waits until all lines are printed. Lines that come later are printed at once.
    pub(crate) fn finish(&self) {
        self.queue.end();
        if let Some(thread) = self.thread.lock().expect("no panics under the lock").take() {
            let _ = thread.join();
        }
    }
}

fn print_now(stream: Stream, line: &str) {
    match stream {
        Stream::Output => drop(print::try_say(format_args!("{line}"))),
        Stream::Error => say_error!("{line}"),
    }
}

impl Queue {
    fn print(&self, on_failure: impl Fn(&io::Error)) {
        loop {
            let printed = match self.next() {
                Ok(None) => return,
                Ok(Some((Stream::Output, text))) => {
                    let mut out = io::stdout().lock();
                    out.write_all(&text).and_then(|()| out.flush())
                }
                Ok(Some((Stream::Error, text))) => {
                    let _ = io::stderr().lock().write_all(&text);
                    Ok(())
                }
                Err(error) => {
                    self.end();
                    return on_failure(&error);
                }
            };
            if let Err(error) = printed {
                on_failure(&error);
            }
        }
    }

    fn end(&self) {
        self.state.lock().expect("no panics under the lock").is_over = true;
        self.changed.notify_all();
    }

    /// Waits for lines, and takes those that go to one stream. `None` at the end.
    fn next(&self) -> io::Result<Option<(Stream, Vec<u8>)>> {
        let state = self.state.lock().expect("no panics under the lock");
        let is_idle = |state: &mut State| state.at == state.spool.len() && !state.is_over;
        let mut state = self.changed.wait_while(state, is_idle).expect("no panics under the lock");
        let (mut stream, mut text) = (None, Vec::new());
        while state.at < state.spool.len() && text.len() < PART {
            let mut reader = state.spool.reader(state.at);
            let mut head = [0; 5];
            reader.read_exact(&mut head)?;
            let [to, len @ ..] = head;
            let to = if to == Stream::Output as u8 { Stream::Output } else { Stream::Error };
            if *stream.get_or_insert(to) != to {
                break;
            }
            let begin = text.len();
            text.resize(begin + u32::from_ne_bytes(len) as usize, 0);
            reader.read_exact(&mut text[begin..])?;
            state.at += (head.len() + text.len() - begin) as u64;
        }
        if state.at == state.spool.len() {
            state.spool.truncate(0);
            state.at = 0;
        }
        drop(state);
        self.changed.notify_all();
        Ok(stream.map(|stream| (stream, text)))
    }
}
