//! What both ends of a session share: the pipeline's parts, parameters, progress, mail.

use crate::link::LinkError;
use crate::wire::{AbortCode, Report, Summary, TreeOptions};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;
use thruway_engine::aead::Sealer;
use thruway_engine::digest::Algorithm;
use thruway_engine::quota::{Quota, Unit};
use thruway_engine::stage::{StageId, StageStats};
use thruway_engine::topology::{self, Node};
use thruway_engine::{BlockPool, Owner, Storage, Workers};
use thruway_fabric::Device;

/// The stages of a process, shared by its sessions, and the blocks of one session.
///
/// Every session has a pool of its own, so that one which stalls with its hands full starves
/// nobody; untouched blocks take no memory.
pub struct Pipeline {
    /// Blocks.
    pub pool: Arc<BlockPool>,
    /// Storage stage.
    pub storage: Arc<Storage>,
    /// CPU stages.
    pub workers: Arc<Workers>,
    /// Digests.
    pub integrity: StageId,
    /// Sealing and opening.
    pub security: StageId,
    /// Blocking file system calls.
    pub files: StageId,
    /// Owner of the session's tasks.
    owner: Owner,
    /// Where all this is; `None` on a machine with one memory node.
    node: Option<Node>,
    /// Dropped last.
    _sweep: Sweep,
}

/// Has the storage stage let go of a pool's memory when the pipeline of a session goes.
struct Sweep(Arc<Storage>);

impl Drop for Sweep {
    fn drop(&mut self) {
        self.0.sweep();
    }
}

fn pool(node: Option<&Node>, blocks: usize, block_len: usize, sparse: bool) -> io::Result<Arc<BlockPool>> {
    let new = if sparse { BlockPool::sparse } else { BlockPool::new };
    let pool = new(blocks, block_len).map_err(io::Error::other)?;
    if let Some(node) = node {
        pool.bind(node.number);
    }
    Ok(pool)
}

/// The pipelines of a process: one for each memory node, so that a session's blocks, the threads
/// that touch them and its own thread are all on one.
pub struct PipelineSet {
    nodes: Vec<Arc<Pipeline>>,
    next: AtomicUsize,
}

impl PipelineSet {
    /// A pipeline for each node on which this process may run.
    ///
    /// # Errors
    /// If memory is not to be had.
    pub fn new() -> io::Result<Arc<PipelineSet>> {
        let nodes = topology::usable_nodes();
        let pipelines = match nodes.len() {
            0 | 1 => vec![Pipeline::on(None, 1, 4096)?],
            _ => nodes.into_iter().map(|node| Pipeline::on(Some(node), 1, 4096)).collect::<io::Result<_>>()?,
        };
        Ok(Arc::new(PipelineSet { nodes: pipelines, next: AtomicUsize::new(0) }))
    }

    /// The pipeline for the next session; sessions are dealt out evenly.
    pub fn pick(&self) -> &Arc<Pipeline> {
        &self.nodes[self.next.fetch_add(1, Ordering::Relaxed) % self.nodes.len()]
    }

    /// What the stages of all pipelines have done so far.
    pub fn stats(&self) -> Vec<StageStats> {
        let several = self.nodes.len() > 1;
        let of = |(number, pipeline): (usize, &Arc<Pipeline>)| {
            let mut stats = pipeline.stats();
            if several {
                stats.iter_mut().for_each(|s| s.name = format!("{} on node {number}", s.name));
            }
            stats
        };
        self.nodes.iter().enumerate().flat_map(of).collect()
    }
}

impl Pipeline {
    /// Makes a pool of `blocks` blocks of `block_len` bytes, and the stages.
    ///
    /// # Errors
    /// If memory is not to be had.
    pub fn new(blocks: usize, block_len: usize) -> io::Result<Arc<Pipeline>> {
        Pipeline::on(None, blocks, block_len)
    }

    /// As [`Pipeline::new`], with threads and memory on one node.
    fn on(node: Option<Node>, blocks: usize, block_len: usize) -> io::Result<Arc<Pipeline>> {
        let cpus = node.as_ref().map_or(&[][..], |n| &n.cpus);
        let threads = if cpus.is_empty() { topology::cores() } else { cpus.len() }.max(2);
        let workers = Workers::near(cpus, threads, &["integrity", "security", "files"])?;
        let (integrity, security, files) =
            (workers.stage("integrity"), workers.stage("security"), workers.stage("files"));
        let storage = Arc::new(Storage::near(cpus)?);
        let pool = pool(node.as_ref(), blocks, block_len, false)?;
        let sweep = Sweep(Arc::clone(&storage));
        let owner = Owner::default();
        Ok(Arc::new(Pipeline { pool, storage, workers, integrity, security, files, owner, node, _sweep: sweep }))
    }

    /// The same stages with blocks for another session; `sparse` if few of them may ever be full.
    ///
    /// # Errors
    /// If memory is not to be had.
    pub fn with_pool(&self, owner: Owner, blocks: usize, block_len: usize, sparse: bool) -> io::Result<Arc<Pipeline>> {
        let (storage, workers) = (Arc::clone(&self.storage), Arc::clone(&self.workers));
        let Pipeline { integrity, security, files, .. } = *self;
        let (pool, node) = (pool(self.node.as_ref(), blocks, block_len, sparse)?, self.node.clone());
        let sweep = Sweep(Arc::clone(&storage));
        Ok(Arc::new(Pipeline { pool, storage, workers, integrity, security, files, owner, node, _sweep: sweep }))
    }

    /// Owner of the session's tasks.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Queues a task of this session.
    pub(crate) fn submit(&self, stage: StageId, task: impl FnOnce() + Send + 'static) {
        self.workers.submit(stage, self.owner, task);
    }

    /// Moves the calling thread, and those it will start, to where the pipeline is.
    pub fn bind_current_thread(&self) {
        if let Some(node) = &self.node {
            topology::bind_thread(&node.cpus);
        }
    }

    /// What the stages have done so far.
    pub fn stats(&self) -> Vec<StageStats> {
        let mut stats = vec![self.storage.stats()];
        stats.extend(self.workers.stats());
        stats
    }
}

/// What a session was negotiated to be.
#[derive(Clone)]
pub struct SessionParams {
    /// Its number.
    pub session: u32,
    /// Payload of a block.
    pub block_len: u32,
    /// The path is a long one, which some channels may fill faster than others.
    pub long_path: bool,
    /// End-to-end verification.
    pub verify: Algorithm,
    /// Seals the data plane.
    pub sealer: Option<Arc<Sealer>>,
    /// How trees are read and written.
    pub options: TreeOptions,
    /// Bytes per second to keep under.
    pub rate_limit: Option<u64>,
    /// Ends the session from outside.
    pub cancel: Option<Cancel>,
    /// This process has sessions of others, too.
    pub has_others: bool,
    /// Quota of large files of all sessions, and the owner of this session.
    pub open_files: Option<(Arc<Quota>, Owner)>,
}

/// Ends a session from outside: its user has no right to it any more, or the daemon stops.
///
/// The session's thread ends it when it hears of that. It may wait for its peer meanwhile, and the peer choose how long: so
/// nothing more is moved over the data connections from then on, and the control connection ends as well a little later.
#[derive(Clone)]
pub struct Cancel(Arc<Cancelled>);

struct Cancelled {
    why: OnceLock<(AbortCode, &'static str)>,
    device: Device,
    control: OnceLock<Weak<TcpStream>>,
    data: Mutex<Vec<Weak<TcpStream>>>,
}

/// How long a session that is ended from outside has to tell its peer.
const LAST_WORDS: Duration = Duration::from_secs(3);

impl Cancel {
    /// For a session whose thread waits on this device.
    pub fn new(device: &Device) -> Cancel {
        let (why, control) = (OnceLock::new(), OnceLock::new());
        Cancel(Arc::new(Cancelled { why, device: device.clone(), control, data: Mutex::default() }))
    }

    /// Ends it; the peer is told this.
    pub fn cancel(&self, code: AbortCode, why: &'static str) {
        let _ = self.0.why.set((code, why));
        self.0.device.wake();
        self.data().drain(..).for_each(|stream| shut(&stream));
    }

    /// Ends the connection by which the peer would have been told why.
    fn hang_up(&self) {
        self.0.control.get().into_iter().for_each(shut);
    }

    /// Hangs up on sessions that were ended, when they have had time to tell their peers.
    pub(crate) fn hang_up_later(ended: Vec<Cancel>) {
        if ended.is_empty() {
            return;
        }
        let hang_up = move || {
            std::thread::sleep(LAST_WORDS);
            ended.iter().for_each(Cancel::hang_up);
        };
        if let Err(error) = std::thread::Builder::new().name("hang up".into()).stack_size(64 << 10).spawn(hang_up) {
            tracing::warn!(%error, "sessions that were ended may wait for their peers");
        }
    }

    pub(crate) fn watch_control(&self, stream: &Arc<TcpStream>) {
        let _ = self.0.control.set(Arc::downgrade(stream));
    }

    pub(crate) fn watch_data(&self, stream: &Arc<TcpStream>) {
        let mut data = self.data();
        // A cancellation sets the flag first, and then closes everything listed here.
        match self.0.why.get() {
            None => data.push(Arc::downgrade(stream)),
            Some(_) => shut(&Arc::downgrade(stream)),
        }
    }

    fn data(&self) -> MutexGuard<'_, Vec<Weak<TcpStream>>> {
        self.0.data.lock().expect("no panics under the lock")
    }

    /// # Errors
    /// If the session is to end.
    pub(crate) fn check(&self) -> Result<(), SessionError> {
        match self.0.why.get() {
            None => Ok(()),
            Some((code, why)) => Err(SessionError::Cancelled(*code, why)),
        }
    }
}

fn shut(stream: &Weak<TcpStream>) {
    if let Some(stream) = stream.upgrade() {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl SessionParams {
    /// Takes a large file from the quota; `None` without a quota. Waits for at most `patience`.
    ///
    /// # Errors
    /// `EMFILE` if the owner of the session has reached its quota.
    pub(crate) fn open_file(&self, patience: Duration) -> io::Result<Option<Unit>> {
        let Some((quota, owner)) = &self.open_files else { return Ok(None) };
        let share = quota.take(*owner, patience);
        share.map(Some).ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))
    }

    /// # Errors
    /// If the session is to end.
    pub(crate) fn check_cancel(&self) -> Result<(), SessionError> {
        self.cancel.as_ref().map_or(Ok(()), Cancel::check)
    }
}

/// Counters that others may watch while a session runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Bytes of files moved.
    pub bytes: AtomicU64,
    /// Files finished (sink) or begun (source).
    pub files: AtomicU64,
    /// Bytes known to be moved in all, so far.
    pub total_bytes: AtomicU64,
    /// What did not have to be sent because it is durable at the sink: bytes, and one for each file. An
    /// attempt that finds more of that than those before it has got on.
    pub resumed: AtomicU64,
    /// The sink keeps a journal, so that another attempt can resume.
    pub resumable: AtomicBool,
    /// No more will be found.
    pub total_known: AtomicBool,
    /// Estimate of the bytes of all files, including resumed ones; 0 if there is none. The session itself does not set it.
    pub estimate: AtomicU64,
}

impl Progress {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}

/// Hears of every entry that fails.
pub type OnReport = Arc<dyn Fn(&Report) + Send + Sync>;

/// Why a session failed as a whole.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The network, or the peer's manners.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The peer gave up, and said why.
    #[error("{1}")]
    Aborted(AbortCode, String),
    /// This end cannot go on.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// It was ended from outside.
    #[error("{1}")]
    Cancelled(AbortCode, &'static str),
    /// This end is at the same job already.
    #[error("{0}")]
    Busy(String),
    /// A block did not arrive as it was sent.
    #[error("block {sequence} arrived damaged ({what})")]
    Damaged {
        /// The block's sequence number.
        sequence: u32,
        /// The mismatch.
        what: &'static str,
    },
}

/// Part of the error message of a session that the next attempt cannot resume.
pub const NOT_KEPT: &str = "data that was not durable before is sent again";

/// Why this end cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// The operating system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done, and to what.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// A sync failed: the journal of the attempt is void.
    #[error("{doing}: {source}; {NOT_KEPT}")]
    Unsynced {
        /// The failed step, such as "making files durable".
        doing: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The operating system refused, and the journal of the attempt could not be written either.
    #[error("{doing}: {source}; the journal could not be written: {NOT_KEPT}")]
    Unrecorded {
        /// The failed step, such as "writing a/b".
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// This process has reached its limit on open files, and other sessions may give some back.
    #[error("{doing}: {source}")]
    Exhausted {
        /// The failed step, such as "writing a/b".
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// No block size suits both ends.
    #[error("the peer supports no block size near {0} bytes")]
    BlockSize(u32),
    /// One command cannot carry them.
    #[error("too many sources or patterns for one command")]
    CommandLength,
    /// A session has a number for each of 2^32 blocks.
    #[error("more than 2^32 blocks in one session")]
    TooManyBlocks,
    /// A pattern is none.
    #[error(transparent)]
    Filter(#[from] crate::filter::FilterError),
    /// The source ended without something that it was asked for.
    #[error("the source has sent nothing of '{0}', which was asked for")]
    Missing(String),
    /// There is no way to the peer any more.
    #[error("the peer cannot be reached: {0}")]
    Unreachable(String),
    /// A mistake in this program.
    #[error("internal error: {0}")]
    Internal(&'static str),
}

impl LocalError {
    pub(crate) fn io(doing: impl Into<String>, source: impl Into<io::Error>) -> LocalError {
        LocalError::Io { doing: doing.into(), source: source.into() }
    }
}

impl SessionError {
    /// The peer gave up, and said why in its own words.
    pub(crate) fn aborted(code: AbortCode, why: &str) -> SessionError {
        SessionError::Aborted(code, crate::escape_message(why))
    }

    /// Whether trying again may help.
    pub fn is_transient(&self) -> bool {
        match self {
            SessionError::Link(error) => error.is_transient(),
            SessionError::Damaged { .. } => true,
            SessionError::Aborted(code, _) => code.is_transient(),
            SessionError::Local(_) | SessionError::Busy(_) | SessionError::Cancelled(..) => false,
        }
    }
}

impl SessionError {
    /// What the peer is told; `None` if the peer is the one who knows.
    pub(crate) fn code(&self) -> Option<AbortCode> {
        match self {
            SessionError::Local(LocalError::Exhausted { .. }) => Some(AbortCode::Busy),
            SessionError::Local(_) => Some(AbortCode::Failed),
            SessionError::Busy(_) => Some(AbortCode::Busy),
            SessionError::Cancelled(code, _) => Some(*code),
            SessionError::Damaged { .. } => Some(AbortCode::Damaged),
            SessionError::Link(LinkError::Malformed(_) | LinkError::Unexpected(_)) => Some(AbortCode::Protocol),
            SessionError::Link(_) | SessionError::Aborted(..) => None,
        }
    }

    /// Tells the peer why the session ends here, if the peer is not the one who knows.
    pub(crate) fn tell(&self, link: &mut crate::link::Link) {
        let Some(code) = self.code() else { return };
        let mut why = self.to_string();
        let cut = (0..=1000).rev().find(|i| why.is_char_boundary(*i)).unwrap_or(0);
        why.truncate(cut);
        link.abort(code, why);
    }
}

impl From<thruway_fabric::Error> for SessionError {
    fn from(error: thruway_fabric::Error) -> SessionError {
        SessionError::Link(error.into())
    }
}

impl From<crate::protocol::Violation> for SessionError {
    fn from(violation: crate::protocol::Violation) -> SessionError {
        SessionError::Link(violation.into())
    }
}

/// How a session ended that did not fail as a whole.
pub type Outcome = Result<Summary, SessionError>;

/// Sends mail to a session's own thread, waking it.
pub struct EventSender<T> {
    sender: Sender<T>,
    device: Device,
}

impl<T> Clone for EventSender<T> {
    fn clone(&self) -> Self {
        EventSender { sender: self.sender.clone(), device: self.device.clone() }
    }
}

impl<T> EventSender<T> {
    /// A mailbox for a thread that waits on `device`.
    pub fn new(device: &Device) -> (EventSender<T>, Receiver<T>) {
        let (sender, receiver) = channel();
        (EventSender { sender, device: device.clone() }, receiver)
    }

    /// Sends; lost without harm if the session is gone.
    pub fn send(&self, mail: T) {
        let _ = self.sender.send(mail);
        self.device.wake();
    }
}

/// The first failure, kept.
#[derive(Default)]
pub(crate) struct FirstFailure(Mutex<Option<String>>);

impl FirstFailure {
    pub(crate) fn set(&self, message: impl Into<String>) {
        self.is_first(message);
    }

    /// As [`FirstFailure::set`]. True if it is the first.
    pub(crate) fn is_first(&self, message: impl Into<String>) -> bool {
        let mut first = self.0.lock().expect("no panics under the lock");
        let is_first = first.is_none();
        first.get_or_insert_with(|| message.into());
        is_first
    }

    pub(crate) fn get(&self) -> Option<String> {
        self.0.lock().expect("no panics under the lock").clone()
    }
}
