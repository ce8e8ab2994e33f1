//! The source: loads blocks, waits for credits, writes them into the sink's memory.
//!
//! A block goes free → loading (walker, storage stage) → loaded (integrity and security stages) →
//! sending (credit in hand) → waiting (write posted) → free. The walker runs ahead until the pool
//! is empty; that, and the sink's credits, are all the flow control there is.

mod large;
mod walk;

pub use walk::Root;

use crate::link::{Link, LinkEvent, Transport};
use crate::protocol::source::{Heard, Source as Core, Step};
use crate::session::{Engine, Mailer, OnReport, Outcome, Progress, SessionError, Terms};
use crate::wire::{Answer, BlockHeader, Control, Direct, FileStatus, OfferEntry, Report, Summary};
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use thruway_engine::Block;

/// What the walker and the stages tell the session.
pub(crate) enum Mail {
    /// A block is loaded, digested and sealed, and may be sent after the block with this sequence
    /// number. With a file, the block only stands for the piece of the file that the header names,
    /// which is sent from there.
    Loaded(Block, BlockHeader, Option<u32>, Option<Arc<File>>),
    /// A large file has been read to its end.
    FileEnd { file: u64, blocks: u32, status: FileStatus },
    /// Files that may be there already.
    Offer { batch: u32, entries: Vec<OfferEntry> },
    /// An entry could not be read.
    Report(Report),
    /// The walk is over, after this many blocks.
    Walked { blocks: u32 },
    /// The walk cannot go on.
    Fatal(String),
}

/// Runs a session's source end to the end of the data set, and closes the link.
///
/// # Errors
/// [`SessionError`] if the session failed as a whole; entries that failed alone are reported.
pub fn run(
    mut link: Link,
    engine: &Arc<Engine>,
    terms: &Terms,
    roots: Vec<Root>,
    offers: bool,
    progress: &Arc<Progress>,
    on_report: &OnReport,
) -> Outcome {
    let (mailer, mailbox) = Mailer::new(link.device());
    let (verdicts, verdict_receiver) = channel();
    let cancel = Arc::new(AtomicBool::new(false));
    let ahead = Ahead::new(engine.pool.count());
    let walker = walk::Walker::new(
        Arc::clone(engine),
        terms.clone(),
        mailer,
        offers.then_some(verdict_receiver),
        Arc::clone(&cancel),
        Arc::clone(progress),
        link.transport() == Transport::Tcp && terms.sealer.is_none() && terms.options.direct != Direct::On,
        Arc::clone(&ahead),
    )
    .map_err(SessionError::Local)?;
    let thread = std::thread::Builder::new()
        .name("walker".into())
        .stack_size(1 << 20)
        .spawn(move || walker.run(roots))
        .map_err(|e| SessionError::Local(format!("starting a thread: {e}")))?;
    let mut source = Source {
        core: Core::new(terms.session, link.transport() == Transport::Rdma),
        link: &mut link,
        mailbox,
        verdicts: Some(verdicts),
        progress,
        on_report,
        budget: Budget::new(terms.rate_limit),
        ahead,
    };
    let result = source.run();
    if let Err(error) = &result {
        error.tell(source.link);
    }
    drop(source);
    cancel.store(true, Ordering::SeqCst);
    link.close();
    let walked = thread.join();
    if walked.is_err() {
        return Err(SessionError::Local("the walker panicked".into()));
    }
    result
}

struct Source<'a> {
    core: Core<(Block, Option<Arc<File>>)>,
    link: &'a mut Link,
    mailbox: Receiver<Mail>,
    verdicts: Option<Sender<Vec<Answer>>>,
    progress: &'a Arc<Progress>,
    on_report: &'a OnReport,
    budget: Budget,
    ahead: Arc<Ahead>,
}

/// How many blocks the source may have outside its pool. Loading as far ahead as the pool allows
/// would push every block out of the processor's cache before it is sent; loading too little
/// would leave a slow disk idle. So the limit grows while the network waits for blocks, and
/// shrinks while blocks wait for the network.
pub(crate) struct Ahead {
    state: Mutex<AheadState>,
    changed: Condvar,
}

struct AheadState {
    held: usize,
    limit: usize,
    most: usize,
}

impl Ahead {
    const LEAST: usize = 4;

    fn new(most: usize) -> Arc<Ahead> {
        let state = Mutex::new(AheadState { held: 0, limit: Ahead::LEAST.min(most), most });
        Arc::new(Ahead { state, changed: Condvar::new() })
    }

    /// Waits for leave to take a block; false after `limit`.
    pub(crate) fn enter(&self, limit: Duration) -> bool {
        let state = self.state.lock().expect("no panics under the lock");
        let waited = self.changed.wait_timeout_while(state, limit, |s| s.held >= s.limit);
        let (mut state, timeout) = waited.expect("no panics under the lock");
        if timeout.timed_out() && state.held >= state.limit {
            return false;
        }
        state.held += 1;
        true
    }

    /// A block is back in the pool.
    fn leave(&self) {
        self.state.lock().expect("no panics under the lock").held -= 1;
        self.changed.notify_one();
    }

    /// A block has been sent and so many wait behind it.
    fn adjust(&self, waiting: usize) {
        let mut state = self.state.lock().expect("no panics under the lock");
        match waiting {
            0 if state.limit < state.most => {
                state.limit += 1;
                drop(state);
                self.changed.notify_one();
            }
            3.. if state.limit > Ahead::LEAST => state.limit -= 1,
            _ => {}
        }
    }
}

impl Source<'_> {
    fn run(&mut self) -> Outcome {
        loop {
            self.take_mail()?;
            self.step()?;
            let limit = self.budget.pause().unwrap_or(Duration::from_secs(5));
            for event in self.link.poll(limit)? {
                match event {
                    LinkEvent::Written(block) => {
                        drop(block);
                        self.ahead.leave();
                    }
                    LinkEvent::Control(message) => {
                        if let Some(summary) = self.take_control(message)? {
                            return Ok(summary);
                        }
                    }
                    _ => return Err(crate::link::LinkError::Unexpected("block").into()),
                }
            }
        }
    }

    fn take_control(&mut self, message: Control) -> Result<Option<Summary>, SessionError> {
        match self.core.take(message)? {
            Heard::Nothing => {}
            Heard::Verdict(answers) => {
                if let Some(verdicts) = &self.verdicts {
                    let _ = verdicts.send(answers);
                }
            }
            Heard::Report(report) => (self.on_report)(&report),
            Heard::Done(summary) => {
                self.link.send(&Control::Farewell)?;
                return Ok(Some(summary));
            }
            Heard::Aborted(why) => return Err(SessionError::Aborted(why)),
        }
        Ok(None)
    }

    fn take_mail(&mut self) -> Result<(), SessionError> {
        loop {
            match self.mailbox.try_recv() {
                Ok(Mail::Loaded(block, header, after, file)) => self.core.loaded((block, file), header, after),
                Ok(Mail::FileEnd { file, blocks, status }) => {
                    self.link.send(&Control::FileEnd { file, blocks, status })?;
                }
                Ok(Mail::Offer { batch, entries }) => self.link.send(&Control::Offer { batch, entries })?,
                Ok(Mail::Report(report)) => {
                    (self.on_report)(&report);
                    self.link.send(&Control::Report(report))?;
                }
                Ok(Mail::Walked { blocks }) => self.core.walked(blocks),
                Ok(Mail::Fatal(message)) => return Err(SessionError::Local(message)),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) if self.core.is_walked() => return Ok(()),
                Err(TryRecvError::Disconnected) => {
                    return Err(SessionError::Local("the walker stopped without a word".into()));
                }
            }
        }
    }

    fn step(&mut self) -> Result<(), SessionError> {
        while let Some(step) = self.core.next(self.budget.pause().is_none()) {
            match step {
                Step::Say(message) => self.link.send(&message)?,
                Step::Write((block, _), header, credit, notice) => {
                    self.link.write(block, header.len, &credit, &notice)?;
                    self.account(header.len);
                }
                Step::Stream((block, file), header) => {
                    self.link.stream(block, header, file)?;
                    self.account(header.len);
                }
            }
        }
        Ok(())
    }

    fn account(&mut self, len: u32) {
        self.ahead.adjust(self.core.waiting());
        self.budget.spend(len.into());
        Progress::add(&self.progress.bytes, len.into());
    }
}

/// Keeps to a rate, allowing bursts of a tenth of a second.
struct Budget {
    rate: Option<f64>,
    spent: f64,
    since: Instant,
}

impl Budget {
    fn new(rate: Option<u64>) -> Budget {
        Budget { rate: rate.map(|r| r.max(1) as f64), spent: 0.0, since: Instant::now() }
    }

    fn spend(&mut self, octets: u64) {
        self.spent += octets as f64;
    }

    /// How long to hold still.
    fn pause(&self) -> Option<Duration> {
        const BURST: f64 = 0.1;
        let due = self.spent / self.rate? - self.since.elapsed().as_secs_f64() - BURST;
        (due > 0.0).then(|| Duration::from_secs_f64(due.min(1.0)))
    }
}
