//! The sink: grants credits for free blocks, takes the blocks that come back full, and puts what
//! they hold where it belongs.
//!
//! A block goes free → waiting (its credit is out) → ready (its notification is in) → free (its
//! content is written). Each notification earns up to two new credits, so that the window doubles
//! every round trip until the pool is out; a source without credit asks, and is answered as soon
//! as one block is free.

mod attributes;
pub(crate) mod commit;
mod credit_window;
mod deferred;
mod files;
mod items;
pub(crate) mod journal;
pub mod leftovers;
mod made;
mod offers;
mod promises;
pub(crate) mod readback;
mod reports;
mod scope;
mod tree;

pub use attributes::Trust;
pub(crate) use journal::replay_for_fuzzing;
pub use journal::{SECRET_LEN as JOURNAL_SECRET_LEN, set_secret as set_journal_secret};
pub use made::{MadeAfter, make_destination};
pub(crate) use tree::is_own_name;

use crate::link::{Channels, Link, LinkError, LinkEvent, Receive, Role, Transport, Window};
use crate::protocol::Violation;
use crate::protocol::sink::{Heard, Sink as Core};
use crate::session::{EventSender, LocalError, OnReport, Outcome, Pipeline, Progress, SessionError, SessionParams};
use crate::wire::{
    Answer, BlockHeader, BlockKind, Completion, Control, HEADER_LEN, Report, ReportKind, Summary, TreeOptions,
};
use commit::{Committed, Committer};
use credit_window::CreditWindow;
use deferred::Deferred;
use files::{Digest, Files};
use journal::{Earlier, Interruption, Journal};
use offers::Judge;
use promises::Promises;
use reports::Reports;
use scope::Scope;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};
use thruway_engine::pool::Exposed;
use thruway_engine::{Block, digest::DIGEST_LEN};
use tree::{Manner, Tree};

/// After this many bytes what is written so far is synced in the background, so that a power cut
/// costs a bounded amount of work.
const SYNC_EVERY: u64 = 4 << 30;
/// Most bytes of reports that wait to be sent to the peer.
const REPORTS_WAITING_MAX: usize = 8 << 20;
/// Most bytes of items that wait to be sent to the peer.
const ITEMS_WAITING_MAX: usize = 64 << 20;
/// Reports go to a peer while fewer messages than this wait for it, so that other messages get through.
const REPORTS_AHEAD: usize = 16;
/// Most messages that wait for a source while it makes offers. An honest source has at most ten batches without an answer.
const ANSWERS_MAX: usize = 512;
/// Files that have ended and not begun, from which on no more is heard of the source, over TCP, until there are few.
const EARLY_ENDS_MANY: usize = 1024;
const EARLY_ENDS_FEW: usize = 256;
/// How long a sink waits for the source's farewell.
const LEAVE_PATIENCE: Duration = Duration::from_secs(5);
/// How long an attempt waits for an earlier one at the same job to wind up.
const BUSY_PATIENCE: Duration = Duration::from_secs(10);

/// What workers tell the session.
pub(crate) enum SessionEvent {
    /// Counters that the session waits for have moved.
    Progressed,
    /// A block has become free while one was owed.
    BlockFree,
    /// Something went wrong with an entry.
    Report(Report),
    /// What is wanted of offered files.
    Judged { batch: u32, answers: Vec<Answer> },
    /// The peer broke the protocol.
    Violation(Violation),
    /// A block's content is not what was sent.
    Damaged { sequence: u32, what: &'static str },
    /// The session cannot go on.
    Fatal(LocalError),
    /// The last touches have been put.
    Finalized,
}

/// What workers count.
#[derive(Default)]
pub(crate) struct Counters {
    files: AtomicU64,
    others: AtomicU64,
    bytes: AtomicU64,
    resumed_bytes: AtomicU64,
    skipped: AtomicU64,
    deleted: AtomicU64,
    blocks: AtomicU64,
    /// Blocks there will be; `u64::MAX` until that is known.
    expected: AtomicU64,
    files_handle: OnceLock<Weak<Files>>,
}

/// Entries of the root directory that the command names. Other entries are parts of trees.
#[derive(Debug, Clone, Default)]
pub struct RootNames {
    /// Their names; `None` if they are not known. An empty name stands for the contents of a directory.
    pub names: Option<Vec<Vec<u8>>>,
    /// The source may make no others in the root directory.
    pub only: bool,
    /// The only name is that of the destination itself.
    pub is_destination: bool,
}

impl RootNames {
    /// A destination that does not have to be a directory.
    pub fn destination(name: Vec<u8>) -> RootNames {
        RootNames { names: Some(vec![name]), only: true, is_destination: true }
    }

    /// The names that the source is confined to.
    fn allowed(&self) -> Option<&[Vec<u8>]> {
        self.names.as_deref().filter(|_| self.only)
    }

    /// True if the path is that of a source of the command. False if the sources are not known.
    fn is_source(&self, path: &[u8]) -> bool {
        self.allowed().is_some_and(|names| !path.is_empty() && names.iter().any(|one| one == path))
    }

    /// True if the name is that of an entry which the command may have named.
    fn contains(&self, name: &[u8]) -> bool {
        self.names.as_ref().is_none_or(|names| names.iter().any(|one| one == name))
    }

    /// True if the path is that of the destination itself.
    fn has_destination(&self, path: &[u8]) -> bool {
        self.is_destination
            && !path.is_empty()
            && self.names.as_ref().is_some_and(|names| names.iter().any(|n| n == path))
    }
}

/// Destination of a sink.
pub struct Target {
    /// The root directory; `None` discards everything.
    pub root: Option<Arc<OwnedFd>>,
    /// Identifies the job, for resuming.
    pub job: [u8; 16],
    /// The root directory was made for this session, by [`make_destination`].
    pub made: Option<MadeAfter>,
    /// Entries of the root directory that the command names.
    pub named: RootNames,
    /// How far the source is trusted.
    pub trust: Trust,
    /// What is there may be replaced.
    pub replace: bool,
    /// Links in the root directory are resolved beneath it only.
    pub confined: bool,
    /// The source has the right to read what is in the root directory. Leftovers of other jobs are reported to it.
    pub listed: bool,
    /// Report about the destination, such as [`leftovers::possible_maker`].
    pub note: Option<String>,
}

/// A sink that is ready to run: the journal has been read.
pub struct Prepared {
    target: Target,
    journal: Option<Arc<Journal>>,
    earlier: Earlier,
    /// Reports about the destination, such as [`leftovers::survey`].
    notes: Vec<String>,
}

impl Prepared {
    /// Reads the journal of an earlier attempt at the same job.
    ///
    /// # Errors
    /// [`SessionError::Local`] if the journal cannot be read. Also if the destination of a single entry is a link to a device, pipe
    /// or socket, or a file in use as a disk.
    pub fn new(target: Target, options: &TreeOptions) -> Result<Prepared, SessionError> {
        if let (Some(root), Some([name])) = (&target.root, target.named.allowed())
            && !name.is_empty()
        {
            // Checked here, before any data is sent.
            let checked = std::ffi::CString::new(&**name).map_err(std::io::Error::from);
            checked
                .and_then(|name| {
                    tree::check_destination(root, &name, target.confined)?;
                    tree::check_disk(root, &name)
                })
                .map_err(|e| LocalError::io(crate::escape(name), e))?;
        }
        let (mut journal, mut earlier) = (None, Earlier::default());
        let mut notes: Vec<String> = target.note.clone().into_iter().collect();
        if let Some(root) = target.root.as_ref().filter(|_| !options.dry_run) {
            match open_journal(root, &target.job)? {
                Some((opened, found)) if options.no_resume => {
                    earlier = opened.restart(found);
                    journal = Some(Arc::new(opened));
                }
                Some((opened, found)) => (journal, earlier) = (Some(Arc::new(opened)), found),
                None => {}
            }
            notes.extend(leftovers::survey(root, &target.job).filter(|_| target.listed));
            // An earlier attempt of this process may have done so; its user can have changed the directory since.
            let new = target.made.filter(|_| !earlier.has_directory(&journal::key_of(b"")));
            let own = new.map(|since| tree::own_root(root, since.0, target.replace && target.listed, options.preserve));
            if let Some(made) = own.transpose().map_err(|e| LocalError::io("the destination", e))?.flatten() {
                if let Some(journal) = &journal {
                    journal.directory(&journal::key_of(b""), made);
                }
                earlier.add_directory(journal::key_of(b""), made);
            }
        }
        Ok(Prepared { target, journal, earlier, notes })
    }

    /// Whether a journal is kept.
    pub fn is_resumable(&self) -> bool {
        self.journal.is_some()
    }

    /// True if an earlier attempt at the job was interrupted in this directory. It made the entry `name`.
    ///
    /// # Errors
    /// If that is not known: the journal cannot be read. The message names the remedy.
    pub fn was_interrupted(root: impl AsFd, job: &[u8; 16], name: &[u8]) -> std::io::Result<bool> {
        match Journal::look(root, job) {
            Interruption::None => Ok(false),
            Interruption::Known => Ok(true),
            Interruption::Unknown => Err(std::io::Error::other(format!(
                "an interrupted run of this command may have made this directory, but its journal {} beside it is damaged or \
                 was made with another journal-key; to start over, remove both; to copy into the directory, write {}/",
                journal::name_of(job).to_string_lossy(),
                crate::escape(name),
            ))),
        }
    }

    /// Whether the source must offer files before it sends them.
    pub fn wants_offers(&self, options: &TreeOptions) -> bool {
        !self.earlier.is_empty() || (options.update && self.target.root.is_some())
    }
}

/// Whether a directory with contents may be removed because a file takes its name: with `--delete`, unless some of
/// what it holds may be what the filters leave out.
fn clears_directories(options: &crate::wire::TreeOptions) -> bool {
    options.delete && options.exclude.is_empty()
}

/// An open directory that has been removed: it is empty, and nothing can be made in it. Stands for the missing destination of a
/// dry run.
///
/// # Errors
/// If a temporary directory cannot be made.
pub fn nowhere() -> std::io::Result<std::os::fd::OwnedFd> {
    let dir = tempfile::tempdir()?;
    Ok(std::fs::File::open(dir.path())?.into())
}

/// Runs a session's sink end to the end of the data set, and closes the link.
///
/// # Errors
/// [`SessionError`] if the session failed as a whole; entries that failed alone are reported.
pub fn run(
    mut link: Link,
    channels: &Channels,
    pipeline: &Arc<Pipeline>,
    params: &SessionParams,
    prepared: Prepared,
    progress: &Arc<Progress>,
    on_report: &OnReport,
) -> Outcome {
    // A source asked to skip files offers them, even if nothing is kept here.
    let wants_offers = params.options.update || prepared.wants_offers(&params.options);
    let Prepared { target, journal, mut earlier, notes } = prepared;
    let (events, mailbox) = EventSender::new(link.device());
    let counters = Arc::new(Counters { expected: AtomicU64::new(u64::MAX), ..Counters::default() });
    let local = |e: std::io::Error| LocalError::io("starting the commit stage", e);
    let discard = target.root.is_none();
    let root = match target.root {
        Some(root) => root,
        None => Arc::new(nowhere().map_err(local)?),
    };
    let options = &params.options;
    let manner = Manner {
        preserve: options.preserve,
        delete: clears_directories(options),
        trust: target.trust,
        replace: target.replace,
        readable: target.listed,
        confined: target.confined,
        named: target.named.clone(),
    };
    let tree_root = Arc::clone(&root);
    let tree = Arc::new(Tree::new(root, manner, journal.clone(), earlier.take_made()));
    let on_commit = on_commit(&counters, &events, progress);
    let committer = Arc::new(Committer::start(Arc::clone(&tree), journal.clone(), on_commit).map_err(local)?);
    let over = Arc::clone(&tree.over);
    let files = Arc::new(Files {
        tree,
        scope: Scope::new(target.named.allowed(), options),
        job: target.job,
        params: params.clone(),
        pipeline: Arc::clone(pipeline),
        journal: journal.clone(),
        earlier,
        committer: Arc::clone(&committer),
        counters: Arc::clone(&counters),
        events: events.clone(),
        discard,
        large: Mutex::default(),
        begun: Condvar::new(),
        deferred: Mutex::new(Deferred::new(&tree_root, options.dry_run || discard, pipeline.owner())),
        progress: Arc::clone(progress),
        promises: Promises::default(),
        reports: Reports::new(REPORTS_WAITING_MAX),
        items: Reports::new(ITEMS_WAITING_MAX),
        itemized: Mutex::default(),
        in_flight: Mutex::default(),
        clearings: Arc::default(),
        over,
    });
    let _ = counters.files_handle.set(Arc::downgrade(&files));
    let windows = if link.transport() == Transport::Rdma { link.count() } else { 0 };
    let credit_window = CreditWindow::new(link.round_trip(), params.block_len, pipeline.pool.count());
    for message in notes {
        files.report(b"", ReportKind::LeftOut, message);
    }
    let receive: Arc<dyn Receive> = Arc::clone(&files) as _;
    link.start_receiving(&receive)?;
    let mut sink = Sink {
        core: Core::new(params.session, params.sealer.is_some(), windows, credit_window.window_max()),
        credit_window,
        link: &mut link,
        channels,
        pipeline,
        params,
        events,
        mailbox,
        files: Arc::clone(&files),
        counters: &counters,
        judge: None,
        wants_offers,
        waiting_for_block: false,
        finalizing: false,
        failed: 0,
        unsupported: 0,
        unread: false,
        synced_bytes: 0,
        progress,
        on_report,
        owed: VecDeque::new(),
    };
    let result = sink.run().map_err(|error| match error {
        SessionError::Local(LocalError::Io { doing, source }) if journal.as_ref().is_some_and(|j| j.has_failed()) => {
            LocalError::Unrecorded { doing, source }.into()
        }
        error => error,
    });
    if let Err(error) = &result {
        error.tell(sink.link);
    }
    let may_succeed_later = sink.failed > sink.unsupported;
    drop(sink);
    files.close();
    committer.stop();
    files.tree.lock_again();
    // A source that takes its leave has heard how it went. If it has not, the same job will come
    // again, and the journal tells it what is done; with failures left that may pass, it tries what is missing. Where the job
    // is this end's own, this end knows.
    if let (Ok(_), false, Some(journal)) = (&result, may_succeed_later, &journal)
        && (matches!(channels, Channels::Open { .. }) || took_leave(&mut link))
    {
        journal.remove();
        files.tree.sync_root();
    }
    drop((files, journal));
    if result.is_ok() {
        // The peer may take the last messages as slowly as the others, while its user reads.
        let goes_on = |polled| matches!(polled, Ok(_) | Err(LinkError::DataLost(_)));
        while link.backlog() > 0 && params.check_cancel().is_ok() && goes_on(link.poll(Duration::from_millis(100))) {}
        link.leave()
    } else {
        link.close()
    }
    result
}

/// Tells the session what becomes of files.
fn on_commit(
    counters: &Arc<Counters>,
    events: &EventSender<SessionEvent>,
    progress: &Arc<Progress>,
) -> commit::OnCommit {
    let (counters, events, progress) = (Arc::clone(counters), events.clone(), Arc::clone(progress));
    let leave = {
        let counters = Arc::clone(&counters);
        move |file: &commit::Finished| {
            if let Some(files) = counters.files_handle.get().and_then(Weak::upgrade) {
                files.leave(&file.key);
            }
        }
    };
    Box::new(move |outcome| match outcome {
        Committed::Placed(file) => {
            leave(file);
            counters.files.fetch_add(1, Ordering::Relaxed);
            Progress::add(&progress.files, 1);
        }
        Committed::Failed(file, e) => {
            leave(file);
            if let Some(files) = counters.files_handle.get().and_then(Weak::upgrade) {
                files.report(&file.path, ReportKind::NotCopied, e.to_string());
            }
        }
        Committed::Lost(e) => {
            events.send(SessionEvent::Fatal(LocalError::Unsynced { doing: "making files durable", source: e }));
        }
        Committed::Group => events.send(SessionEvent::Progressed),
    })
}

/// Waits a moment for the source to say that it knows.
fn took_leave(link: &mut Link) -> bool {
    let deadline = Instant::now() + LEAVE_PATIENCE;
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        match link.poll(left) {
            Ok(events) if events.iter().any(|e| matches!(e, LinkEvent::Control(Control::Farewell))) => return true,
            // The end of a data channel may overtake the farewell, which comes by another connection.
            Ok(_) | Err(LinkError::DataLost(_)) => {}
            Err(_) => return false,
        }
    }
    false
}

/// Opens the journal of a job, waiting a moment for an earlier attempt to wind up. `None`: the
/// directory may not be written to, and an interrupted attempt will be begun again.
fn open_journal(root: &Arc<OwnedFd>, job: &[u8; 16]) -> Result<Option<(Journal, Earlier)>, SessionError> {
    let deadline = Instant::now() + BUSY_PATIENCE;
    loop {
        match Journal::open(root, job) {
            Ok(opened) => return Ok(Some(opened)),
            Err(e) if e.kind() == ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) if e.kind() == ErrorKind::ResourceBusy => {
                return Err(SessionError::Busy("another process is already running this job".into()));
            }
            // Somebody else may have put another entry under its name.
            Err(e)
                if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
                    || is_full_without_journal(&e, root, job) =>
            {
                let name = journal::name_of(job);
                tracing::warn!(?name, error = %e, "cannot create the journal: this copy will not be resumable");
                return Ok(None);
            }
            Err(e) => {
                let doing = format!("cannot open the journal {}", journal::name_of(job).to_string_lossy());
                return Err(LocalError::io(doing, e).into());
            }
        }
    }
}

/// True if the disk is full and has no journal of an earlier attempt. The copy may write nothing, or free space by `--delete`.
fn is_full_without_journal(e: &std::io::Error, root: &Arc<OwnedFd>, job: &[u8; 16]) -> bool {
    matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
        && matches!(Journal::look(root, job), Interruption::None)
}

struct Sink<'a> {
    core: Core<(Exposed, Window)>,
    credit_window: CreditWindow,
    link: &'a mut Link,
    channels: &'a Channels,
    pipeline: &'a Arc<Pipeline>,
    params: &'a SessionParams,
    events: EventSender<SessionEvent>,
    mailbox: Receiver<SessionEvent>,
    files: Arc<Files>,
    counters: &'a Arc<Counters>,
    /// Answers offers, once there are any.
    judge: Option<Judge>,
    /// The source may offer files before it sends them.
    wants_offers: bool,
    /// The pool will send mail when the window has room.
    waiting_for_block: bool,
    finalizing: bool,
    failed: u64,
    /// Of those that failed, those that will fail again.
    unsupported: u64,
    /// The source could not read everything.
    unread: bool,
    synced_bytes: u64,
    progress: &'a Arc<Progress>,
    on_report: &'a OnReport,
    /// Reports that the peer has not been told.
    owed: VecDeque<Report>,
}

impl Sink<'_> {
    fn run(&mut self) -> Outcome {
        loop {
            self.params.check_cancel()?;
            if let Some(summary) = self.take_mail()? {
                return Ok(summary);
            }
            self.link.take_arrivals(self.channels, Role::Sink)?;
            if self.core.is_owed() {
                self.grant()?;
            }
            self.check_end()?;
            for event in self.link.poll(Duration::from_secs(5))? {
                self.params.check_cancel()?;
                match event {
                    LinkEvent::Arrived(completion) => self.arrived(completion)?,
                    LinkEvent::Received(block, header) => self.received(block, header, None)?,
                    LinkEvent::Placed { sequence, len } => {
                        self.core.note(sequence)?;
                        Progress::add(&self.progress.bytes, len.into());
                        self.sync_now_and_then();
                    }
                    LinkEvent::Control(message) => self.take_control(message)?,
                    LinkEvent::Written(..) => return Err(LinkError::Unexpected("write completion").into()),
                }
            }
        }
    }

    fn take_control(&mut self, message: Control) -> Result<(), SessionError> {
        match self.core.take(message)? {
            Heard::Nothing => {
                self.counters.expected.store(self.core.expected().unwrap_or(u64::MAX), Ordering::SeqCst);
                if self.core.is_owed() { self.grant() } else { Ok(()) }
            }
            Heard::FileEnd { file, blocks, status } => Ok(self.files.file_end(file, blocks, status)?),
            Heard::Offer { .. } if !self.wants_offers => Err(LinkError::Unexpected("offer").into()),
            // The source does not take the answers to earlier ones.
            Heard::Offer { .. } if self.link.backlog() > ANSWERS_MAX => {
                Err(LinkError::Unexpected("number of offers").into())
            }
            Heard::Offer { batch, entries } => {
                for entry in &entries {
                    self.files.scope.path(&entry.path).map_err(LinkError::from)?;
                }
                if self.judge.is_none() {
                    let judge = Judge::start(&self.files);
                    self.judge = Some(judge.map_err(|e| LocalError::io("starting a thread", e))?);
                }
                let taken = self.judge.as_ref().is_some_and(|judge| judge.submit(batch, entries));
                if taken { Ok(()) } else { Err(LinkError::Unexpected("number of offers").into()) }
            }
            Heard::Report(report) => {
                match report.kind {
                    // Only a sink reports items.
                    ReportKind::Item => return Ok(()),
                    ReportKind::LeftOut => {}
                    ReportKind::Incomplete => self.failed += 1,
                    ReportKind::NotCopied | ReportKind::NotListed => {
                        (self.failed, self.unread) = (self.failed + 1, true)
                    }
                    // The entry is in the list of its directory, so it is not removed here.
                    ReportKind::Unsupported => {
                        (self.failed, self.unsupported) = (self.failed + 1, self.unsupported + 1);
                    }
                    ReportKind::Refused => {
                        (self.failed, self.unread) = (self.failed + 1, true);
                        self.unsupported += 1;
                    }
                }
                (self.on_report)(&report);
                Ok(())
            }
            Heard::MoreChannels(count) => match self.channels {
                Channels::Open { grow: true, .. } => Ok(self.link.more(self.channels, count, Role::Sink)?),
                Channels::Open { .. } => Ok(()),
                Channels::Take(_) => Err(LinkError::Unexpected("control message").into()),
            },
            Heard::Aborted(code, why) => Err(SessionError::aborted(code, &why)),
        }
    }

    fn take_mail(&mut self) -> Result<Option<Summary>, SessionError> {
        loop {
            // The peer may be slow to hear what it is told.
            self.params.check_cancel()?;
            self.tell_reports(REPORTS_AHEAD)?;
            match self.mailbox.try_recv() {
                Ok(SessionEvent::Progressed) => {}
                Ok(SessionEvent::BlockFree) => self.waiting_for_block = false,
                Ok(SessionEvent::Report(report)) => {
                    self.failed += u64::from(!matches!(report.kind, ReportKind::LeftOut | ReportKind::Item));
                    self.unsupported += u64::from(matches!(report.kind, ReportKind::Unsupported | ReportKind::Refused));
                    (self.on_report)(&report);
                    // A connecting sink's user has just heard it.
                    match self.channels {
                        Channels::Take(_) => self.owed.push_back(report),
                        Channels::Open { .. } => self.files.told(&report),
                    }
                }
                Ok(SessionEvent::Judged { batch, answers }) => self.link.send(&Control::Verdict { batch, answers })?,
                Ok(SessionEvent::Violation(violation)) => return Err(violation.into()),
                Ok(SessionEvent::Damaged { sequence, what }) => return Err(SessionError::Damaged { sequence, what }),
                Ok(SessionEvent::Fatal(error)) => return Err(error.into()),
                Ok(SessionEvent::Finalized) => return self.conclude().map(Some),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(None),
            }
        }
    }

    /// Tells the peer what it is owed, while fewer messages than this wait for it.
    fn tell_reports(&mut self, ahead: usize) -> Result<(), SessionError> {
        while self.link.backlog() < ahead
            && let Some(report) = self.owed.pop_front()
        {
            self.params.check_cancel()?;
            self.files.told(&report);
            self.link.send(&Control::Report(report))?;
        }
        Ok(())
    }

    fn arrived(&mut self, completion: Completion) -> Result<(), SessionError> {
        if let Some(window_max) = self.credit_window.arrived(Instant::now()) {
            self.core.set_window_max(window_max);
        }
        let (exposed, window) = self.core.arrived(&completion)?;
        // The source's notification revokes its right to the block. One that forgot loses it here;
        // either way nobody else touches the block from now on.
        drop(window);
        let filled = exposed.reclaim();
        let header =
            BlockHeader::decode(filled.header(HEADER_LEN), self.params.block_len as usize).map_err(LinkError::from)?;
        self.received(filled, header, Some(completion.sequence))?;
        self.grant()
    }

    /// Checks a whole block and sends it on its way.
    fn received(&mut self, block: Block, header: BlockHeader, announced: Option<u32>) -> Result<(), SessionError> {
        self.core.accept(&header, announced)?;
        // Of a pack, the files are counted when they are written.
        if header.kind != BlockKind::Pack {
            Progress::add(&self.progress.bytes, header.len.into());
        }
        self.process(block, header);
        self.sync_now_and_then();
        Ok(())
    }

    /// Sends a block through the stages: open, verify, write.
    fn process(&self, block: Block, header: BlockHeader) {
        let (files, params) = (Arc::clone(&self.files), self.params.clone());
        let (pipeline, events) = (Arc::clone(self.pipeline), self.events.clone());
        let next = move |block: Block, header: BlockHeader| {
            if params.verify == thruway_engine::digest::Algorithm::None {
                return store(&files, block, header, Digest::default());
            }
            let inner = Arc::clone(&files.pipeline);
            inner.submit(inner.integrity, move || {
                let digest = params.verify.digest(&block.payload()[..header.len as usize]);
                if header.bind(params.verify, digest) != block.header(DIGEST_LEN) {
                    let sequence = header.sequence;
                    return events.send(SessionEvent::Damaged { sequence, what: "its digest does not match" });
                }
                store(&files, block, header, digest);
            });
        };
        let Some(sealer) = self.params.sealer.clone() else { return next(block, header) };
        let events = self.events.clone();
        pipeline.submit(pipeline.security, move || {
            let mut block = block;
            let sealed = block.joined_mut(DIGEST_LEN, header.len as usize);
            match sealer.open(header.sequence.into(), &header.fixed(), sealed, &header.tag) {
                Ok(()) => next(block, header),
                Err(_) => {
                    events.send(SessionEvent::Damaged { sequence: header.sequence, what: "it does not authenticate" })
                }
            }
        });
    }

    /// Grants the credits that are due, as far as there are blocks.
    fn grant(&mut self) -> Result<(), SessionError> {
        let pool = &self.pipeline.pool;
        // On a long path the window bounds the memory as well. On a short one it keeps what comes in the processor's cache,
        // and the pool is what storage may lag behind.
        let all_count = self.credit_window.is_measured();
        let (in_use, limit) = match all_count {
            true => (pool.in_use(), self.core.window().min(pool.count())),
            false => (self.core.out(), pool.count()),
        };
        let credits_to_grant = self.core.credits_to_grant(in_use);
        let mut granted = Vec::new();
        for _ in 0..credits_to_grant {
            let Some(block) = pool.try_take() else { break };
            let (exposed, window) = self.link.expose(block)?;
            granted.push((window.credit, (exposed, window)));
        }
        if let Some(message) = self.core.grant(granted) {
            self.link.send(&message)?;
        } else if self.core.is_owed() && (all_count || credits_to_grant > 0) && !self.waiting_for_block {
            self.waiting_for_block = true;
            let events = self.events.clone();
            pool.when_fewer(limit, move || events.send(SessionEvent::BlockFree));
        }
        Ok(())
    }

    fn sync_now_and_then(&mut self) {
        let written = self.counters.bytes.load(Ordering::Relaxed);
        if written - self.synced_bytes < SYNC_EVERY {
            return;
        }
        self.synced_bytes = written;
        // An error in writing to the medium is known now, not at the end.
        self.files.committer.sync();
    }

    fn check_end(&mut self) -> Result<(), SessionError> {
        let dealt = self.counters.blocks.load(Ordering::SeqCst);
        let (parked, unfinished) = (self.files.parked(), self.files.unfinished());
        // The ends of files may come long before their beginnings, which travel with data and wait for nothing else.
        match self.files.early_ends() {
            EARLY_ENDS_MANY.. => self.link.hold_control(true),
            ..=EARLY_ENDS_FEW => self.link.hold_control(false),
            _ => {}
        }
        let complete = self.core.is_complete(dealt, parked, unfinished)?;
        if self.finalizing || !complete || self.files.committer.pending() > 0 {
            return Ok(());
        }
        // What a session that is to end has left out counts as dealt with.
        self.params.check_cancel()?;
        // The source has said nothing of what it could not read, either.
        if let Some(name) = self.files.scope.missing().filter(|_| self.failed == 0) {
            let name = crate::escape(name);
            return Err(LocalError::Missing(name.to_string()).into());
        }
        self.finalizing = true;
        let files = Arc::clone(&self.files);
        let may_remove = !self.unread || self.params.options.ignore_errors;
        // It takes as long as the tree is large, and no worker.
        let thread = std::thread::Builder::new().name("finalize".into()).stack_size(512 << 10);
        let finalize = move || files.finalize(may_remove);
        thread.spawn(finalize).map_err(|e| LocalError::io("starting a thread", e))?;
        Ok(())
    }

    fn conclude(&mut self) -> Result<Summary, SessionError> {
        let report = |kind, message| Report { path: b".".to_vec(), kind, message };
        let mut rest = Vec::new();
        if let Some(count) = self.files.reports.rest() {
            self.failed += count;
            let message = format!("and {count} more entries with errors, too many to list");
            rest.push(report(ReportKind::NotCopied, message));
        }
        if let Some(count) = self.files.items.rest() {
            rest.push(report(ReportKind::Item, format!("and {count} more")));
        }
        if self.failed > self.unsupported && self.files.journal.is_some() {
            let name = journal::name_of(&self.files.job);
            let message = format!(
                "the journal {} stays in the destination until the same command succeeds ('thruway clean' removes it)",
                name.to_string_lossy()
            );
            rest.push(Report { path: Vec::new(), ..report(ReportKind::LeftOut, message) });
        }
        for rest in rest {
            (self.on_report)(&rest);
            if matches!(self.channels, Channels::Take(_)) {
                self.owed.push_back(rest);
            }
        }
        self.tell_reports(usize::MAX)?;
        let get = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let summary = Summary {
            files: get(&self.counters.files),
            others: get(&self.counters.others),
            bytes: get(&self.counters.bytes),
            resumed_bytes: get(&self.counters.resumed_bytes),
            skipped: get(&self.counters.skipped),
            deleted: get(&self.counters.deleted) + self.files.tree.cleared(),
            failed: self.failed,
        };
        if self.failed == self.unsupported
            && let Some(journal) = &self.files.journal
        {
            journal.complete();
        }
        self.link.send(&Control::DataSetReply(summary))?;
        Ok(summary)
    }
}

/// The last stage: what the block holds goes where it belongs.
fn store(files: &Arc<Files>, block: Block, header: BlockHeader, digest: Digest) {
    match header.kind {
        BlockKind::Void => {
            drop(block);
            files.void(header.file);
        }
        BlockKind::Data => files.piece(block, header, digest),
        BlockKind::Pack => files.unpack(block, header.len),
    }
}

#[cfg(test)]
mod tests {
    /// A sink that discards has this for its root: whatever it is told to remove, there is nothing.
    #[test]
    fn nowhere_has_nothing_and_takes_nothing() {
        let root = super::nowhere().unwrap();
        let names = rustix::fs::Dir::read_from(&root).unwrap();
        assert_eq!(names.filter(|entry| entry.as_ref().is_ok_and(|e| e.file_name().to_bytes()[0] != b'.')).count(), 0);
        let mode = rustix::fs::Mode::from_raw_mode(0o700);
        assert!(rustix::fs::mkdirat(&root, c"d", mode).is_err());
    }
}
