//! Lines that a thread prints, so that a slow reader (a pager, a stopped terminal) does not delay the copy.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use thruway_cli::{print, say_error};
use thruway_engine::Owner;
use thruway_fs::spool::Spool;

/// Longest part that is printed at once, in bytes.
const PART: usize = 64 << 10;
/// Bytes after which lines go to the next spool.
const SPOOL: u64 = 16 << 20;
/// Largest number of spools.
const SPOOLS_MAX: usize = 16;

/// Where a line goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Output,
    Error,
}

/// Prints lines in order. Lines that wait take up to 1 MiB of memory, and temporary files of up to 256 MiB beyond that.
pub(crate) struct Lines {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Queue {
    state: Mutex<State>,
    /// Notified after each change of the state.
    changed: Condvar,
}

struct State {
    /// Lines, each after its stream and its length. Never empty.
    spools: VecDeque<Spool>,
    /// Position of the next line to print in the first spool.
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
        let state = State { spools: VecDeque::from([spool()]), at: 0, is_over: false };
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
        let shared = Arc::clone(&queue);
        let run = move || shared.print(on_failure);
        let thread = std::thread::Builder::new().name("lines".into()).stack_size(256 << 10).spawn(run)?;
        Ok(Lines { queue, thread: Mutex::new(Some(thread)) })
    }

    /// Adds a line. Waits if there is no room for it.
    pub(crate) fn push(&self, stream: Stream, line: &str) {
        let len = u32::try_from(line.len() + 1).expect("paths and messages are short");
        let record = [&[stream as u8][..], &len.to_ne_bytes(), line.as_bytes(), b"\n"].concat();
        let mut state = self.queue.state.lock().expect("no panics under the lock");
        while !state.is_over && !state.append(&record) {
            if state.is_empty() {
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

fn spool() -> Spool {
    Spool::new(None, Owner::default())
}

impl State {
    fn is_empty(&self) -> bool {
        self.spools.len() == 1 && self.at == self.spools[0].len()
    }

    /// False if there is no room.
    fn append(&mut self, record: &[u8]) -> bool {
        let last = self.spools.back_mut().expect("never empty");
        if last.len() < SPOOL {
            return last.append(record).is_ok();
        }
        let mut next = spool();
        let has_room = self.spools.len() < SPOOLS_MAX && next.append(record).is_ok();
        if has_room {
            self.spools.push_back(next);
        }
        has_room
    }

    /// Goes on with the next spool after the end of the first.
    fn advance(&mut self) {
        if self.at == self.spools[0].len() {
            self.spools.pop_front();
            self.at = 0;
            if self.spools.is_empty() {
                self.spools.push_back(spool());
            }
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
        let is_idle = |state: &mut State| state.is_empty() && !state.is_over;
        let mut state = self.changed.wait_while(state, is_idle).expect("no panics under the lock");
        let (mut stream, mut text) = (None, Vec::new());
        while !state.is_empty() && text.len() < PART {
            let mut reader = state.spools[0].reader(state.at);
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
            state.advance();
        }
        drop(state);
        self.changed.notify_all();
        Ok(stream.map(|stream| (stream, text)))
    }
}
