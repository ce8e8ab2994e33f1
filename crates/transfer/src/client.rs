//! The connecting end: negotiates a session, runs its source or sink, tries again after a loss.

use crate::auth::{Credentials, KnownHosts, PublicKey};
use crate::link::{Call, Channels, Link, LinkError, Role, Transport, blocks_for, first_channels};
use crate::session::{Cancel, LocalError, OnReport, Pipeline, Progress, SessionError, SessionParams};
use crate::sink::{self, Prepared, RootNames, Target, Trust};
use crate::source::{self, Root};
use crate::wire::{
    AbortCode, Control, Destination, Direction, ListEntry, SessionReply, SessionRequest, SourceSpec, Summary, Token,
    TreeOptions,
};
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_engine::Owner;
use thruway_engine::aead::Sealer;
use thruway_engine::digest::Algorithm;
use thruway_engine::random::random;
use thruway_fabric::{Provider, iwarp};
use thruway_tcp::Origin;

/// Blocks of a pool where neither the user nor the path asks for more.
const BLOCKS: usize = 64;

/// How to reach a daemon and trust it.
#[derive(Clone)]
pub struct Remote {
    /// Address of the daemon.
    pub addr: SocketAddr,
    /// Other addresses to try, if that one does not answer.
    pub others: Vec<SocketAddr>,
    /// Name of the daemon in messages and in known hosts.
    pub label: String,
    /// Credentials of this end.
    pub credentials: Credentials,
    /// Daemons seen before; `None` trusts any. Over loopback, daemons of this user and of root are always trusted, and others must be
    /// in the file.
    pub known_hosts: Option<PathBuf>,
    /// The fabric.
    pub fabric: Provider,
    /// Transport of the data.
    pub transport: Transport,
}

impl Remote {
    /// A daemon at this address, over iWARP in user space. Any key of the daemon is trusted: beyond this host, set
    /// [`Remote::known_hosts`].
    pub fn new(addr: SocketAddr, credentials: Credentials) -> Remote {
        Remote {
            addr,
            others: Vec::new(),
            label: addr.to_string(),
            credentials,
            known_hosts: None,
            fabric: iwarp::Config::default().into(),
            transport: Transport::Rdma,
        }
    }

    /// Turns to the next address, and comes back to this one after the others.
    fn next_address(&mut self) {
        if !self.others.is_empty() {
            let next = self.others.remove(0);
            self.others.push(std::mem::replace(&mut self.addr, next));
        }
    }
}

/// What the local end is.
#[derive(Clone)]
pub enum Local {
    /// Things to send: path and name at the sink.
    Sources(Vec<(PathBuf, Vec<u8>)>),
    /// The directory to receive into; `None` discards everything.
    Directory(Option<Arc<OwnedFd>>),
}

/// A job.
#[derive(Clone)]
pub struct Job {
    /// The daemon.
    pub remote: Remote,
    /// Name of its export.
    pub export: String,
    /// Push: where to, below the export.
    pub path: Vec<u8>,
    /// Push: the path ended in a slash or there are several sources.
    pub into_directory: bool,
    /// Pull: what, below the export.
    pub sources: Vec<SourceSpec>,
    /// Pull: the name of the only source is that of the destination itself, so a directory does not replace a file there.
    pub renamed: bool,
    /// Pull: the directory to receive into was made for this job, by [`sink::make_destination`].
    pub made: Option<sink::MadeAfter>,
    /// Pull: report about the directory to receive into, such as [`sink::leftovers::possible_maker`].
    pub note: Option<String>,
    /// Our end.
    pub local: Local,
    /// Identifies the job when it is tried again.
    pub id: [u8; 16],
    /// How trees are read and written.
    pub options: TreeOptions,
    /// End-to-end verification.
    pub verify: Algorithm,
    /// Encrypt the data plane.
    pub encrypt: bool,
    /// Data channels; `None`: as many as the path wants.
    pub streams: Option<u32>,
    /// Payload of a block.
    pub block_len: u32,
    /// Blocks of our pool; `None`: as many as the path wants.
    pub blocks: Option<usize>,
    /// Bytes per second to keep under.
    pub rate_limit: Option<u64>,
    /// How often to try again after a loss, without progress in between.
    pub retries: u32,
}

impl Job {
    /// Copies a file or a tree into an export: to `path`, or below it if that ends in a slash.
    pub fn push(remote: Remote, source: impl Into<PathBuf>, export: &str, path: &str) -> Job {
        let source = source.into();
        let name = source.file_name().unwrap_or_default().as_encoded_bytes().to_vec();
        let into_directory = path.is_empty() || path.ends_with('/');
        let path = path.trim_matches('/').as_bytes().to_vec();
        Job { path, into_directory, ..Job::new(remote, export, Local::Sources(vec![(source, name)])) }
    }

    /// Copies a file or a tree out of an export into a directory.
    ///
    /// # Errors
    /// If the directory cannot be opened.
    pub fn pull(remote: Remote, export: &str, path: &str, into: impl AsRef<Path>) -> io::Result<Job> {
        let directory = OwnedFd::from(File::open(into)?);
        let path = path.trim_matches('/').as_bytes();
        let (_, name) = thruway_fs::beneath::split(path);
        let sources = vec![SourceSpec { path: path.to_vec(), name: name.to_vec() }];
        Ok(Job { sources, ..Job::new(remote, export, Local::Directory(Some(Arc::new(directory)))) })
    }

    /// A job with what serves most: trees, verified by XXH3, encrypted unless the peer is on this host, tried again twelve times.
    fn new(remote: Remote, export: &str, local: Local) -> Job {
        Job {
            encrypt: !remote.addr.ip().to_canonical().is_loopback(),
            remote,
            export: export.into(),
            path: Vec::new(),
            into_directory: false,
            sources: Vec::new(),
            renamed: false,
            made: None,
            note: None,
            local,
            id: random(),
            options: TreeOptions { recursive: true, ..TreeOptions::default() },
            verify: Algorithm::Xxh3,
            streams: None,
            block_len: 1 << 20,
            blocks: None,
            rate_limit: None,
            retries: 12,
        }
    }
}

/// Ends a job from another thread.
#[derive(Clone, Default)]
pub struct Stop(Arc<Stopped>);

#[derive(Default)]
struct Stopped {
    /// Whether the job is to end, and its session while there is one.
    state: Mutex<(bool, Option<Cancel>)>,
    changed: Condvar,
}

/// The reason of a cancelled job, for its peer and its caller.
const STOPPED: &str = "the copy was cancelled";

impl Stop {
    /// Ends the job; while it is about to connect, as soon as the peer has answered or the connection timeout is over.
    pub fn stop(&self) {
        let mut state = self.state();
        state.0 = true;
        if let Some(cancel) = &state.1 {
            cancel.cancel(AbortCode::Failed, STOPPED);
            Cancel::hang_up_later(vec![cancel.clone()]);
        }
        self.0.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, (bool, Option<Cancel>)> {
        self.0.state.lock().expect("no panics under the lock")
    }

    fn check(&self) -> Result<(), SessionError> {
        if self.state().0 { Err(SessionError::Cancelled(AbortCode::Failed, STOPPED)) } else { Ok(()) }
    }

    /// A session of the job begins, or with `None` has ended.
    fn session(&self, cancel: Option<&Cancel>) {
        let mut state = self.state();
        state.1 = cancel.cloned();
        if let (true, Some(cancel)) = (state.0, cancel) {
            cancel.cancel(AbortCode::Failed, STOPPED);
            Cancel::hang_up_later(vec![cancel.clone()]);
        }
    }

    fn pause(&self, limit: Duration) -> Result<(), SessionError> {
        let waited = self.0.changed.wait_timeout_while(self.state(), limit, |state| !state.0);
        drop(waited.expect("no panics under the lock"));
        self.check()
    }
}

/// Reaches the peer again after a loss, where the address that is known may be of no use any more.
pub type Reach<'a> = dyn Fn() -> Result<Remote, Box<dyn std::error::Error>> + 'a;

/// How a job ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Totals of the last attempt, in which what those before it did counts as resumed.
    pub summary: Summary,
    /// Attempts after the first.
    pub retries: u32,
    /// What carried the last attempt: `iwarp`, `shm`, `verbs` or `tcp`.
    pub provider: &'static str,
    /// What was negotiated, for people.
    pub detail: String,
}

/// Longest pause before another attempt.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Attempts to reach a peer that has never been reached.
const FIRST_ATTEMPTS: u32 = 3;

/// Runs a job. After a loss it is tried again, with pauses that grow to half a minute; all retries are to be had again
/// when more is durable at the sink than any attempt before had found there. `reach` reaches the peer again for that,
/// if its address is not enough.
///
/// # Errors
/// [`SessionError`] of the last attempt.
pub fn run(
    job: &Job,
    pipeline: &Arc<Pipeline>,
    progress: &Arc<Progress>,
    on_report: &OnReport,
    reach: Option<&Reach<'_>>,
) -> Result<Finished, SessionError> {
    run_until(job, pipeline, progress, on_report, reach, &Stop::default())
}

/// As [`run`], ended by `stop`.
///
/// # Errors
/// As [`run`], and [`SessionError::Cancelled`].
pub fn run_until(
    job: &Job,
    pipeline: &Arc<Pipeline>,
    progress: &Arc<Progress>,
    on_report: &OnReport,
    reach: Option<&Reach<'_>>,
    stop: &Stop,
) -> Result<Finished, SessionError> {
    pipeline.bind_current_thread();
    let mut state = Attempts { remote: job.remote.clone(), renamed: false, reached: false };
    let (mut retries, mut idle) = (0, 0);
    // The most that an attempt has found done by those before it.
    let mut furthest = 0;
    loop {
        let before = progress.resumed.load(Ordering::Relaxed);
        stop.check()?;
        let ended = attempt(job, pipeline, progress, on_report, &mut state, stop);
        stop.session(None);
        match ended {
            Ok((summary, provider, detail)) => return Ok(Finished { summary, retries, provider, detail }),
            Err(error) if error.is_transient() => {
                stop.check()?;
                // Bytes that are sent again and again, and kept nowhere, are no progress.
                let found = progress.resumed.load(Ordering::Relaxed) - before;
                if found > furthest {
                    (furthest, idle) = (found, 0);
                }
                let there = state.reached || matches!(error, SessionError::Aborted(..));
                let most = if there { job.retries } else { job.retries.min(FIRST_ATTEMPTS) };
                if idle >= most {
                    return Err(error);
                }
                let pause = Duration::from_millis(100 << idle.min(9)).min(PAUSE_MAX);
                (retries, idle) = (retries + 1, idle + 1);
                let peer = &state.remote.label;
                tracing::warn!(peer, %error, retry = retries, ?pause, "connection failed, trying again");
                stop.pause(pause)?;
                if let Some(reach) = reach {
                    match reach() {
                        Ok(remote) => state.remote = remote,
                        Err(why) if idle >= most => return Err(LocalError::Unreachable(why.to_string()).into()),
                        Err(why) => tracing::warn!(%why, "the peer cannot be reached"),
                    }
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// What one attempt leaves to the next.
struct Attempts {
    remote: Remote,
    /// The peer said that the single source gets the target's name.
    renamed: bool,
    /// A session has been agreed on.
    reached: bool,
}

fn attempt(
    job: &Job,
    pipeline: &Arc<Pipeline>,
    progress: &Arc<Progress>,
    on_report: &OnReport,
    state: &mut Attempts,
    stop: &Stop,
) -> Result<(Summary, &'static str, String), SessionError> {
    let mut options = job.options.clone();
    // Files this very run has put in place are not to be sent twice. What was there before it is forgotten
    // once a session has been agreed on.
    if state.reached {
        options.no_resume = false;
    }
    let direction = match job.local {
        Local::Sources(_) => Direction::Push,
        Local::Directory(_) => Direction::Pull,
    };
    let role = if direction == Direction::Push { Role::Source } else { Role::Sink };
    // A pulling sink reads its journal first: the source must know whether to make offers.
    let prepared = match &job.local {
        Local::Directory(root) => {
            let names = Some(job.sources.iter().map(|s| s.name.clone()).collect());
            let target = Target {
                root: root.clone(),
                made: job.made,
                job: job.id,
                named: RootNames { names, only: true, is_destination: job.renamed },
                trust: Trust::Operator,
                replace: true,
                confined: false,
                listed: true,
                note: job.note.clone(),
            };
            Some(Prepared::new(target, &options)?)
        }
        Local::Sources(_) => None,
    };
    let wants_offers = prepared.as_ref().is_some_and(|p| p.wants_offers(&options));
    let data_key = job.encrypt.then(random);
    let request = SessionRequest {
        direction,
        export: job.export.clone(),
        path: job.path.clone(),
        into_directory: job.into_directory,
        renamed: state.renamed,
        offers: wants_offers,
        destination: destination_of(job),
        sources: match &job.local {
            Local::Sources(sources) => {
                sources.iter().map(|(_, name)| SourceSpec { path: Vec::new(), name: name.clone() }).collect()
            }
            Local::Directory(_) => job.sources.clone(),
        },
        job: job.id,
        verify: job.verify as u8,
        data_key,
        rate_limit: job.rate_limit,
        revocable: false,
        options: options.clone(),
    };
    // All questions in one breath: on a long path every round trip counts.
    let token = random();
    let mut link = request_session(&mut state.remote, token, Some((role, job.streams)), request)?;
    let streams = match link.count() {
        0 => job.streams.unwrap_or_else(|| first_channels(link.round_trip())),
        early => early as u32,
    };
    link.send(&Control::BlockSize(job.block_len))?;
    link.send(&Control::Channels(streams))?;
    let reply = expect_session(&mut link)?;
    state.reached = true;
    state.renamed |= reply.rename.is_some();
    let resumable = prepared.as_ref().map_or(reply.resumable, Prepared::is_resumable);
    progress.resumable.store(resumable, Ordering::Relaxed);
    let block_len = negotiate_block(&mut link, job.block_len)?;
    let Control::ChannelsReply(count) = expect(&mut link)? else {
        return Err(LinkError::Unexpected("message where a number of channels was due").into());
    };
    let count = count.clamp(1, streams);
    let blocks = job.blocks.unwrap_or_else(|| blocks_for(link.round_trip(), block_len, BLOCKS));
    let pipeline = pipeline
        .with_pool(Owner::default(), blocks, block_len as usize, link.is_long())
        .map_err(|e| LocalError::io("memory for blocks", e))?;
    link.attach(&pipeline.pool)?;
    link.set_peer_revocable(reply.revocable);
    let channels = Channels::Open { addr: state.remote.addr, token, grow: job.streams.is_none() };
    link.join(&channels, count, role)?;
    let cancel = Cancel::new(link.device());
    link.end_with(&cancel);
    stop.session(Some(&cancel));
    let provider = link.provider();
    let detail = format!("{count} data channels, blocks of {block_len} bytes, {}", link.describe());
    tracing::info!(session = reply.session, detail, "session open");
    let params = SessionParams {
        session: reply.session,
        block_len,
        long_path: link.is_long(),
        verify: job.verify,
        sealer: data_key.map(|key| Arc::new(Sealer::new(&key))),
        options,
        rate_limit: job.rate_limit,
        cancel: Some(cancel),
        has_others: false,
        open_files: None,
    };
    let outcome = match (&job.local, prepared) {
        (Local::Sources(sources), _) => {
            let roots = sources.iter().map(|(path, name)| Root {
                beneath: None,
                confined: false,
                is_top: false,
                path: path.clone(),
                name: reply.rename.clone().filter(|_| !name.is_empty()).unwrap_or_else(|| name.clone()),
            });
            let roots = rename_contents(roots.collect(), reply.rename.as_deref());
            source::run(
                link,
                &channels,
                &pipeline,
                &params,
                roots,
                reply.offers,
                reply.destination,
                progress,
                on_report,
            )
        }
        (Local::Directory(_), Some(prepared)) => {
            sink::run(link, &channels, &pipeline, &params, prepared, progress, on_report)
        }
        (Local::Directory(_), None) => unreachable!("prepared above"),
    };
    outcome.map(|summary| (summary, provider, detail))
}

/// Where a pull goes, for a source on this very machine.
fn destination_of(job: &Job) -> Option<Destination> {
    let Local::Directory(Some(root)) = &job.local else { return None };
    let name = match job.sources.as_slice() {
        [only] if !only.name.is_empty() => Some(only.name.clone()),
        _ => None,
    };
    source::destination_in(root, name).ok()
}

/// `DIR/` to a target that does not exist makes the target a copy of the directory.
fn rename_contents(mut roots: Vec<Root>, rename: Option<&[u8]>) -> Vec<Root> {
    if let ([root], Some(name)) = (roots.as_mut_slice(), rename) {
        root.name = name.to_vec();
    }
    roots
}

/// Longest wait for the end of a connection whose other end has no owner.
const PEER_LOOKUP_MAX: Duration = Duration::from_secs(1);

/// Connects, and asks for a session.
fn request_session(
    remote: &mut Remote,
    token: Token,
    early: Option<(Role, Option<u32>)>,
    mut request: SessionRequest,
) -> Result<Link, SessionError> {
    let mut tried = 0;
    let (mut link, key) = loop {
        let device = remote.fabric.open()?;
        let call = Call { addr: remote.addr, credentials: &remote.credentials, token, early };
        match Link::connect(device, remote.transport, &call) {
            Ok(connected) => break connected,
            // A name may have addresses without a listener.
            Err(error) if error.is_transient() && tried < remote.others.len() => {
                tracing::debug!(addr = %remote.addr, %error, "trying the next address");
                tried += 1;
                remote.next_address();
            }
            Err(error) => return Err(error.into()),
        }
    };
    check_host(remote, key, &mut link)?;
    request.revocable = link.revocable();
    let is_too_long = |message: &Control| message.encode(0).len() > crate::wire::CONTROL_MAX;
    let mut message = Control::Session(Box::new(request));
    // The names of the sources of a push are optional.
    if is_too_long(&message)
        && let Control::Session(request) = &mut message
        && request.direction == Direction::Push
    {
        request.sources.clear();
    }
    if is_too_long(&message) {
        return Err(LocalError::CommandLength.into());
    }
    link.send(&message)?;
    Ok(link)
}

fn expect_session(link: &mut Link) -> Result<SessionReply, SessionError> {
    match expect(link)? {
        Control::SessionReply(reply) => Ok(reply),
        _ => Err(LinkError::Unexpected("message where a session reply was due").into()),
    }
}

/// Checks that a daemon is trusted, before it is asked for a session.
fn check_host(remote: &Remote, key: Option<PublicKey>, link: &mut Link) -> Result<(), LinkError> {
    match (&remote.known_hosts, key) {
        // A daemon on this host may have a new key every time it is started. While it is not running, any user can take its port.
        (Some(path), Some(key)) if remote.addr.ip().to_canonical().is_loopback() => {
            let (daemon, hosts) = (&remote.label, KnownHosts::at(path.clone()));
            let deadline = Instant::now() + PEER_LOOKUP_MAX;
            loop {
                let (why, is_final) = match link.acceptor() {
                    Some(origin) if origin.is_own_user() => return Ok(()),
                    Some(Origin::User(uid)) => (
                        format!(
                            "the daemon at {daemon} belongs to user {uid} of this host, neither to you nor to root"
                        ),
                        true,
                    ),
                    _ => (format!("cannot find out the user of the daemon at {daemon}"), Instant::now() >= deadline),
                };
                let known = hosts.require(daemon, &key, &why);
                if known.is_ok() || is_final {
                    return Ok(known?);
                }
                // A daemon that stops has closed the connection or its listener. Then another attempt helps.
                link.wait(deadline.saturating_duration_since(Instant::now()))?;
            }
        }
        (Some(path), Some(key)) => {
            if KnownHosts::at(path.clone()).check(&remote.label, &key)? {
                let (daemon, path) = (&remote.label, path.display());
                tracing::warn!(daemon, %key, "first connection to this daemon: its key is trusted from now on and kept in {path}");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn expect(link: &mut Link) -> Result<Control, SessionError> {
    match link.next_control()? {
        Control::Abort(code, why) => Err(SessionError::aborted(code, &why)),
        other => Ok(other),
    }
}

/// Hears what became of the block size asked for, and asks for the peer's largest if it was too much.
fn negotiate_block(link: &mut Link, wanted: u32) -> Result<u32, SessionError> {
    let mut len = wanted;
    for _ in 0..2 {
        match expect(link)? {
            Control::BlockSizeReply { accepted: true, .. } => return Ok(len),
            Control::BlockSizeReply { largest, .. } if is_smaller_block(largest, wanted) => len = largest,
            _ => break,
        }
        link.send(&Control::BlockSize(len))?;
    }
    Err(LocalError::BlockSize(wanted).into())
}

/// True for a block size that a peer may ask for instead of the wanted one. A larger one would take more memory than this end has
/// reckoned with.
fn is_smaller_block(largest: u32, wanted: u32) -> bool {
    largest < wanted && crate::daemon::acceptable_block(largest)
}

/// Most bytes of a listing that a client takes from a daemon: some ten million entries.
const LISTING_MAX: usize = 1 << 30;

/// Lists a directory, or the one file, at a daemon, sorted by name.
///
/// # Errors
/// [`SessionError`], also if the listing takes more than 1 GiB.
pub fn list(remote: &Remote, export: &str, path: &[u8]) -> Result<Vec<ListEntry>, SessionError> {
    let request = SessionRequest {
        direction: Direction::List,
        export: export.into(),
        path: path.to_vec(),
        into_directory: false,
        renamed: false,
        offers: false,
        destination: None,
        sources: Vec::new(),
        job: [0; 16],
        verify: 0,
        data_key: None,
        rate_limit: None,
        revocable: false,
        options: TreeOptions::default(),
    };
    let mut link = request_session(&mut remote.clone(), random(), None, request)?;
    expect_session(&mut link)?;
    let (mut all, mut bytes) = (Vec::new(), 0);
    loop {
        let Control::Listing { entries, last } = expect(&mut link)? else {
            return Err(LinkError::Unexpected("message in a listing").into());
        };
        if entries.iter().any(|entry| entry.name.is_empty()) {
            return Err(LinkError::Unexpected("name in a listing").into());
        }
        bytes += entries.iter().map(|entry| size_of_val(entry) + entry.name.len()).sum::<usize>();
        if bytes > LISTING_MAX || (entries.is_empty() && !last) {
            return Err(LinkError::Unexpected("length of a listing").into());
        }
        all.extend(entries);
        if last {
            link.close();
            all.sort_by(|a: &ListEntry, b| a.name.cmp(&b.name));
            return Ok(all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_makes_blocks_smaller_only() {
        for (largest, is_taken) in
            [(64 << 10, true), (512 << 10, true), (1 << 20, false), (64 << 20, false), (5000, false)]
        {
            assert_eq!(is_smaller_block(largest, 1 << 20), is_taken, "{largest}");
        }
    }
}
