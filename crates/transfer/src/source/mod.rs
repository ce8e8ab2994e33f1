//! The source: loads blocks, waits for credits, writes them into the sink's memory.
//!
//! A block goes free → loading (walker, storage stage) → loaded (integrity and security stages) →
//! sending (credit in hand) → waiting (write posted) → free. The walker runs ahead until the pool
//! is empty; that, and the sink's credits, are all the flow control there is.

mod large;
mod payload_size;
mod send;
mod walk;

pub use walk::Root;

use crate::link::{ChannelScaler, Channels, Link, LinkError, LinkEvent, Role, Transport};
use crate::protocol::source::{Heard, Source as Core, Step};
use crate::session::{EventSender, LocalError, OnReport, Outcome, Pipeline, Progress, SessionError, SessionParams};
use crate::wire::{
    ABOVE_MAX, Answer, BlockHeader, BlockKind, Control, Destination, Direct, FileStatus, OfferEntry, Report, Summary,
};
use large::LargeFile;
use payload_size::{Gauge, PayloadSize};
use rustix::fs::{Mode, OFlags};
use send::PackContents;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};
use thruway_engine::Block;
use thruway_engine::rate_limit::RateLimit;

/// Longest wait for the sink to end a successful session.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of queued messages from which on this end sends no more.
const MESSAGES_AHEAD: usize = 64;
/// Longest wait at once for the rate limit.
const RATE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// What the walker and the stages tell the session.
pub(crate) enum SessionEvent {
    /// A block is loaded, digested and sealed, and may be sent after the block with this sequence
    /// number. With a file, the block only stands for the piece of the file that the header names,
    /// which is sent from there.
    Loaded(Block, BlockHeader, Option<u32>, Option<Arc<LargeFile>>),
    /// A large file has been read to its end.
    FileEnd { file: u64, blocks: u32, status: FileStatus },
    /// Files that may be there already.
    Offer { batch: u32, entries: Vec<OfferEntry> },
    /// An entry could not be read.
    Report(Report),
    /// The walk is over, after this many blocks.
    Walked { blocks: u32 },
    /// The walk cannot go on.
    Fatal(LocalError),
}

/// Runs a session's source end to the end of the data set, and closes the link.
///
/// # Errors
/// [`SessionError`] if the session failed as a whole; entries that failed alone are reported.
#[expect(clippy::too_many_arguments, reason = "what a session is made of")]
pub fn run(
    mut link: Link,
    channels: &Channels,
    pipeline: &Arc<Pipeline>,
    params: &SessionParams,
    roots: Vec<Root>,
    offers: bool,
    destination: Option<Destination>,
    progress: &Arc<Progress>,
    on_report: &OnReport,
) -> Outcome {
    let (events, mailbox) = EventSender::new(link.device());
    let (verdicts, verdict_receiver) = channel();
    let cancel = Arc::new(AtomicBool::new(false));
    // Over TCP a block is a token: what it stands for is sent from the file.
    let far = link.round_trip().filter(|_| link.transport() == Transport::Rdma);
    let payload_size = Arc::new(PayloadSize::new(params.block_len, far));
    let pack_contents = Arc::<PackContents>::default();
    let ahead = Ahead::new(pipeline.pool.count(), least_ahead(&link, &payload_size));
    let reports = Arc::<ReportsAhead>::default();
    let setting = walk::Setting {
        pipeline: Arc::clone(pipeline),
        params: params.clone(),
        events,
        verdicts: offers.then_some(verdict_receiver),
        cancel: Arc::clone(&cancel),
        progress: Arc::clone(progress),
        from_files: link.transport() == Transport::Tcp
            && params.sealer.is_none()
            && params.options.direct != Direct::On,
        ahead: Arc::clone(&ahead),
        reports: Arc::clone(&reports),
        payload_size: Arc::clone(&payload_size),
        pack_contents: Arc::clone(&pack_contents),
        destination: destination.filter(|d| d.machine == this_machine()),
    };
    let walker = walk::Walker::new(setting).map_err(LocalError::from)?;
    let thread = std::thread::Builder::new()
        .name("walker".into())
        .stack_size(1 << 20)
        .spawn(move || walker.run(roots))
        .map_err(|e| LocalError::io("starting a thread", e))?;
    let mut source = Source {
        core: Core::new(params.session, link.transport() == Transport::Rdma),
        link: &mut link,
        mailbox,
        verdicts: Some(verdicts),
        progress,
        on_report,
        rate_limit: RateLimit::new(params.rate_limit),
        ahead,
        reports: Arc::clone(&reports),
        gauge: far.map(|round_trip| Gauge::new(Arc::clone(&payload_size), round_trip, Instant::now())),
        payload_size,
        pack_contents,
        channels,
        scaler: ChannelScaler::new(Instant::now(), !matches!(channels, Channels::Open { grow: false, .. })),
        sent: 0,
        streaming: HashMap::new(),
        params,
    };
    let result = source.run();
    if let Err(error) = &result {
        error.tell(source.link);
    }
    let ahead = Arc::clone(&source.ahead);
    drop(source);
    cancel.store(true, Ordering::SeqCst);
    ahead.close();
    reports.close();
    if result.is_ok() {
        let is_near = matches!(channels, Channels::Open { addr, .. } if addr.ip().to_canonical().is_loopback());
        if is_near || !link.is_long() {
            await_end(&mut link);
        }
        link.leave()
    } else {
        link.close()
    }
    let walked = thread.join();
    if walked.is_err() {
        return Err(LocalError::Internal("the walker thread panicked").into());
    }
    result
}

/// Waits for the sink to end the session, after it has removed its journal. Not used on long paths, because it costs a round
/// trip: if the sink is killed at this moment, a journal marked as complete remains.
fn await_end(link: &mut Link) {
    let deadline = Instant::now() + END_TIMEOUT;
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        match link.poll(left) {
            Ok(_) | Err(LinkError::DataLost(_)) => {}
            Err(_) => return,
        }
    }
}

struct Source<'a> {
    core: Core<(Block, Option<Arc<LargeFile>>)>,
    link: &'a mut Link,
    mailbox: Receiver<SessionEvent>,
    verdicts: Option<Sender<Vec<Answer>>>,
    progress: &'a Arc<Progress>,
    on_report: &'a OnReport,
    rate_limit: RateLimit,
    ahead: Arc<Ahead>,
    reports: Arc<ReportsAhead>,
    payload_size: Arc<PayloadSize>,
    pack_contents: Arc<PackContents>,
    gauge: Option<Gauge>,
    channels: &'a Channels,
    scaler: ChannelScaler,
    /// Bytes written.
    sent: u64,
    /// Files of which a piece is being sent from the file itself, by its sequence number.
    streaming: HashMap<u32, Arc<LargeFile>>,
    params: &'a SessionParams,
}

/// Tells this machine, since it was started, from every other.
pub(crate) fn this_machine() -> [u8; 16] {
    static MACHINE: OnceLock<[u8; 16]> = OnceLock::new();
    *MACHINE.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        blake3::hash(text.trim().as_bytes()).as_bytes()[..16].try_into().expect("16 bytes")
    })
}

/// A hash of a directory of this machine. It does not tell the directory's number to another machine.
pub(crate) fn directory_hash(device: u64, inode: u64) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&this_machine()).update(&device.to_le_bytes()).update(&inode.to_le_bytes());
    u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("8 bytes"))
}

/// The destination of a copy into a directory of this machine.
///
/// # Errors
/// As `fstat(2)`.
pub(crate) fn destination_in(dir: &OwnedFd, name: Option<Vec<u8>>) -> rustix::io::Result<Destination> {
    let root = rustix::fs::fstat(dir)?;
    let mut above = vec![directory_hash(root.st_dev, root.st_ino)];
    let (mut below, mut last) = ((root.st_dev, root.st_ino), None);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    while above.len() < ABOVE_MAX {
        // Without access to a directory, the list ends there.
        let Ok(next) = rustix::fs::openat(last.as_ref().unwrap_or(dir), c"..", flags, Mode::empty()) else { break };
        let stat = rustix::fs::fstat(&next)?;
        if (stat.st_dev, stat.st_ino) == below {
            break;
        }
        below = (stat.st_dev, stat.st_ino);
        above.push(directory_hash(stat.st_dev, stat.st_ino));
        last = Some(next);
    }
    Ok(Destination { machine: this_machine(), device: root.st_dev, inode: root.st_ino, name, above })
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
    /// Closed: no more entries.
    closed: bool,
    held: usize,
    limit: usize,
    least: usize,
    most: usize,
}

/// Blocks that keep a link busy: on a long path, one that leaves each channel and one behind it, or more if they are
/// short.
fn least_ahead(link: &Link, payload_size: &PayloadSize) -> usize {
    if link.is_long() {
        (payload_size.for_a_channel() * link.count()).max(Ahead::BLOCKS_MIN)
    } else {
        Ahead::BLOCKS_MIN
    }
}

impl Ahead {
    const BLOCKS_MIN: usize = 4;

    fn new(most: usize, least: usize) -> Arc<Ahead> {
        let least = least.min(most);
        let state = Mutex::new(AheadState { closed: false, held: 0, limit: least, least, most });
        Arc::new(Ahead { state, changed: Condvar::new() })
    }

    /// Waits for leave to take a block; false after `limit`, and once it is closed.
    pub(crate) fn enter(&self, limit: Duration) -> bool {
        let state = self.state.lock().expect("no panics under the lock");
        let waited = self.changed.wait_timeout_while(state, limit, |s| !s.closed && s.held >= s.limit);
        let (mut state, _) = waited.expect("no panics under the lock");
        if state.closed || state.held >= state.limit {
            return false;
        }
        state.held += 1;
        true
    }

    /// The session is over: who waits need not.
    fn close(&self) {
        self.state.lock().expect("no panics under the lock").closed = true;
        self.changed.notify_all();
    }

    /// A block is back in the pool.
    fn leave(&self) {
        self.state.lock().expect("no panics under the lock").held -= 1;
        self.changed.notify_one();
    }

    /// Fewer than this are never allowed from now on.
    fn set_least(&self, least: usize) {
        let mut state = self.state.lock().expect("no panics under the lock");
        state.least = least.min(state.most);
        state.limit = state.limit.max(state.least);
        drop(state);
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
            3.. if state.limit > state.least => state.limit -= 1,
            _ => {}
        }
    }
}

/// Limits the reports of the walker that are not sent yet. The walker waits at the limit.
#[derive(Default)]
pub(crate) struct ReportsAhead {
    state: Mutex<ReportsState>,
    changed: Condvar,
}

#[derive(Default)]
struct ReportsState {
    /// The session has ended, so nobody waits.
    closed: bool,
    count: usize,
    path_bytes: usize,
}

impl ReportsAhead {
    const COUNT_MAX: usize = 1 << 14;
    const PATH_BYTES_MAX: usize = 2 << 20;

    /// Waits for room for a report of a path of this length.
    fn enter(&self, path_len: usize) {
        let state = self.state.lock().expect("no panics under the lock");
        let is_full = |state: &mut ReportsState| {
            !state.closed && (state.count >= Self::COUNT_MAX || state.path_bytes >= Self::PATH_BYTES_MAX)
        };
        let mut state = self.changed.wait_while(state, is_full).expect("no panics under the lock");
        state.count += 1;
        state.path_bytes += path_len;
    }

    /// A report has been sent. Reports of the reading stages are not counted.
    fn leave(&self, path_len: usize) {
        let mut state = self.state.lock().expect("no panics under the lock");
        state.count = state.count.saturating_sub(1);
        state.path_bytes = state.path_bytes.saturating_sub(path_len);
        self.changed.notify_one();
    }

    /// Ends the wait of the walker.
    fn close(&self) {
        self.state.lock().expect("no panics under the lock").closed = true;
        self.changed.notify_all();
    }
}

impl Source<'_> {
    fn run(&mut self) -> Outcome {
        loop {
            self.params.check_cancel()?;
            self.take_mail()?;
            self.step()?;
            self.link.take_arrivals(self.channels, Role::Source)?;
            self.grow()?;
            let limit =
                self.rate_limit.pause(Instant::now()).map_or(Duration::from_secs(5), |pause| pause.min(RATE_PAUSE_MAX));
            for event in self.link.poll(limit)? {
                match event {
                    LinkEvent::Written(block, sequence) => {
                        drop(block);
                        if let Some(file) = sequence.and_then(|n| self.streaming.remove(&n)) {
                            file.close();
                        }
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
                // A sink that does not wait for it may have closed already.
                let _ = self.link.send(&Control::Farewell);
                return Ok(Some(summary));
            }
            Heard::Aborted(code, why) => return Err(SessionError::aborted(code, &why)),
        }
        Ok(None)
    }

    fn take_mail(&mut self) -> Result<(), SessionError> {
        loop {
            // The peer may be slow to hear what it is told.
            self.params.check_cancel()?;
            if self.link.backlog() >= MESSAGES_AHEAD {
                return Ok(());
            }
            match self.mailbox.try_recv() {
                Ok(SessionEvent::Loaded(block, header, after, file)) => self.core.loaded((block, file), header, after),
                Ok(SessionEvent::FileEnd { file, blocks, status }) => {
                    self.link.send(&Control::FileEnd { file, blocks, status })?;
                }
                Ok(SessionEvent::Offer { batch, entries }) => {
                    self.core.offered();
                    self.link.send(&Control::Offer { batch, entries })?;
                }
                Ok(SessionEvent::Report(report)) => {
                    (self.on_report)(&report);
                    self.reports.leave(report.path.len());
                    self.link.send(&Control::Report(report))?;
                }
                Ok(SessionEvent::Walked { blocks }) => self.core.walked(blocks),
                Ok(SessionEvent::Fatal(error)) => return Err(error.into()),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) if self.core.is_walked() => return Ok(()),
                Err(TryRecvError::Disconnected) => {
                    return Err(LocalError::Internal("the walker thread exited unexpectedly").into());
                }
            }
        }
    }

    fn step(&mut self) -> Result<(), SessionError> {
        while let Some(step) = self.core.next(self.rate_limit.is_open() && self.link.has_room()) {
            match step {
                Step::Say(message) => self.link.send(&message)?,
                Step::Write((block, _), header, credit, notice) => {
                    self.link.write(block, header.len, &credit, &notice)?;
                    self.account(&header);
                }
                Step::Stream((block, file), header) => {
                    let from = file.as_ref().map(|large| Arc::clone(&large.file));
                    self.streaming.extend(file.map(|large| (header.sequence, large)));
                    self.link.stream(block, header, from)?;
                    self.account(&header);
                }
            }
        }
        Ok(())
    }

    /// Adds data channels when those there are limit the rate.
    fn grow(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        if self.core.is_announced() || !self.scaler.may_be_due(now) || !self.scaler.is_due(now, self.link.round_trip())
        {
            return Ok(());
        }
        let count = self.scaler.sample(now, &self.link.paths(), self.sent);
        if count == 0 {
            return Ok(());
        }
        tracing::debug!(count, "more data channels");
        match self.channels {
            Channels::Open { .. } => self.link.more(self.channels, count, Role::Source)?,
            Channels::Take(_) => self.link.send(&Control::MoreChannels(count))?,
        }
        self.ahead
            .set_least(least_ahead(self.link, &self.payload_size) + self.payload_size.for_a_channel() * count as usize);
        Ok(())
    }

    fn account(&mut self, header: &BlockHeader) {
        let len = header.len;
        self.sent += u64::from(len);
        self.ahead.adjust(self.core.waiting());
        let now = Instant::now();
        if let Some(gauge) = self.gauge.as_mut().filter(|g| g.is_due(now)) {
            gauge.sample(self.link.paths().iter().map(|p| p.acked).sum(), now);
            self.ahead.set_least(least_ahead(self.link, &self.payload_size));
        }
        self.rate_limit.record(len.into(), now);
        // Only the content of files counts, without their records.
        let content = match header.kind {
            BlockKind::Pack => self.pack_contents.take(header.sequence),
            _ => len.into(),
        };
        Progress::add(&self.progress.bytes, content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walker_waits_while_its_reports_are_not_sent() {
        let reports = ReportsAhead::default();
        let long = ReportsAhead::PATH_BYTES_MAX / 2;
        reports.enter(long);
        reports.enter(long);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| reports.enter(1));
            reports.leave(long);
            waiting.join().unwrap();
            reports.enter(long);
            let closed = scope.spawn(|| reports.enter(1));
            reports.close();
            closed.join().unwrap();
        });
        assert_eq!(reports.state.lock().unwrap().count, 4);
    }
}
