//! The connecting end: negotiates a session, runs its source or sink, tries again after a loss.

use crate::auth::{AuthError, Credentials, KnownHosts, PublicKey, random};
use crate::link::{Link, LinkError, Role, Transport};
use crate::session::{Engine, OnReport, Progress, SessionError, Terms};
use crate::sink::{self, Prepared, Target};
use crate::source::{self, Root};
use crate::wire::{Control, Direction, ListEntry, SessionReply, SessionRequest, SourceSpec, Summary, TreeOptions};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::integrity::Algorithm;
use thruway_engine::security::Sealer;
use thruway_fabric::Provider;

/// How to reach a daemon and trust it.
#[derive(Clone)]
pub struct Remote {
    /// Where.
    pub addr: SocketAddr,
    /// What known hosts call it.
    pub label: String,
    /// Who we are.
    pub credentials: Credentials,
    /// Daemons seen before; `None` trusts any.
    pub known_hosts: Option<PathBuf>,
    /// The fabric.
    pub fabric: Provider,
    /// What carries the data.
    pub transport: Transport,
}

/// What the local end is.
#[derive(Clone)]
pub enum Local {
    /// Things to send: path and name at the sink.
    Sources(Vec<(PathBuf, Vec<u8>)>),
    /// The directory to receive into; `None` swallows everything.
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
    /// Our end.
    pub local: Local,
    /// Identifies the job when it is tried again.
    pub id: [u8; 16],
    /// How to treat trees.
    pub options: TreeOptions,
    /// End-to-end verification.
    pub verify: Algorithm,
    /// Encrypt the data plane.
    pub encrypt: bool,
    /// Data channels.
    pub streams: u32,
    /// Payload of a block.
    pub block_len: u32,
    /// Blocks of our pool.
    pub blocks: usize,
    /// Octets per second to keep under.
    pub rate_limit: Option<u64>,
    /// How often to try again after a loss.
    pub retries: u32,
}

/// How a job ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Totals over all attempts.
    pub summary: Summary,
    /// Attempts after the first.
    pub retries: u32,
    /// What was negotiated, for people.
    pub detail: String,
}

/// Runs a job.
///
/// # Errors
/// [`SessionError`] of the last attempt.
pub fn run(
    job: &Job,
    engine: &Arc<Engine>,
    progress: &Arc<Progress>,
    on_report: &OnReport,
) -> Result<Finished, SessionError> {
    engine.attract();
    let mut retries = 0;
    loop {
        match attempt(job, engine, progress, on_report, retries > 0) {
            Ok((summary, detail)) => return Ok(Finished { summary, retries, detail }),
            Err(error) if error.is_transient() && retries < job.retries => {
                let pause = Duration::from_millis(100 << retries.min(6));
                retries += 1;
                tracing::warn!(%error, retries, ?pause, "trying again");
                std::thread::sleep(pause);
            }
            Err(error) => return Err(error),
        }
    }
}

fn attempt(
    job: &Job,
    engine: &Arc<Engine>,
    progress: &Arc<Progress>,
    on_report: &OnReport,
    again: bool,
) -> Result<(Summary, String), SessionError> {
    let mut options = job.options.clone();
    // Files this very run has put in place are not to be sent twice.
    if again {
        options.no_resume = false;
    }
    let direction = match job.local {
        Local::Sources(_) => Direction::Push,
        Local::Directory(_) => Direction::Pull,
    };
    // A pulling sink reads its journal first: the source must know whether to make offers.
    let prepared = match &job.local {
        Local::Directory(root) => Some(Prepared::new(Target { root: root.clone(), job: job.id }, &options)?),
        Local::Sources(_) => None,
    };
    let wants_offers = prepared.as_ref().is_some_and(|p| p.wants_offers(&options));
    let data_key = job.encrypt.then(random);
    let request = SessionRequest {
        direction,
        export: job.export.clone(),
        path: job.path.clone(),
        into_directory: if direction == Direction::Pull { wants_offers } else { job.into_directory },
        sources: job.sources.clone(),
        job: job.id,
        verify: job.verify as u8,
        data_key,
        rate_limit: job.rate_limit,
        revocable: false,
        options: options.clone(),
    };
    let (mut link, reply) = open_session(&job.remote, request)?;
    let block_len = negotiate_block(&mut link, job.block_len)?;
    link.send(&Control::Channels(job.streams))?;
    let Control::ChannelsReply(channels) = expect(&mut link)? else {
        return Err(LinkError::Unexpected("message where a number of channels was due").into());
    };
    let engine = engine.with_pool(job.blocks, block_len as usize).map_err(|e| SessionError::Local(e.to_string()))?;
    link.attach(&engine.pool)?;
    link.set_peer_revocable(reply.revocable);
    let role = if direction == Direction::Push { Role::Source } else { Role::Sink };
    link.open_data(job.remote.addr, reply.session, reply.token, channels.min(job.streams), role)?;
    let detail = format!("{channels} data channels, blocks of {block_len} octets, {}", link.describe());
    tracing::info!(session = reply.session, detail, "session open");
    let terms = Terms {
        session: reply.session,
        block_len,
        verify: job.verify,
        sealer: data_key.map(|key| Arc::new(Sealer::new(&key))),
        options,
        rate_limit: job.rate_limit,
    };
    let outcome = match (&job.local, prepared) {
        (Local::Sources(sources), _) => {
            let roots = sources.iter().map(|(path, name)| Root {
                beneath: None,
                path: path.clone(),
                name: reply.rename.clone().filter(|_| !name.is_empty()).unwrap_or_else(|| name.clone()),
            });
            let roots = rename_contents(roots.collect(), reply.rename.as_deref());
            source::run(link, &engine, &terms, roots, reply.offers, progress, on_report)
        }
        (Local::Directory(_), Some(prepared)) => sink::run(link, &engine, &terms, prepared, progress, on_report, false),
        (Local::Directory(_), None) => unreachable!("prepared above"),
    };
    outcome.map(|summary| (summary, detail))
}

/// `DIR/` to a target that does not exist makes the target a copy of the directory.
fn rename_contents(mut roots: Vec<Root>, rename: Option<&[u8]>) -> Vec<Root> {
    if let ([root], Some(name)) = (roots.as_mut_slice(), rename) {
        root.name = name.to_vec();
    }
    roots
}

fn open_session(remote: &Remote, mut request: SessionRequest) -> Result<(Link, SessionReply), SessionError> {
    let device = remote.fabric.open()?;
    let (mut link, key) = Link::connect(device, remote.transport, remote.addr, &remote.credentials)?;
    check_host(remote, key).map_err(LinkError::from)?;
    request.revocable = link.revocable();
    let message = Control::Session(Box::new(request));
    if message.encode(0).len() > crate::wire::CONTROL_MAX {
        return Err(SessionError::Local("too many sources or patterns for one command".into()));
    }
    link.send(&message)?;
    match expect(&mut link)? {
        Control::SessionReply(reply) => Ok((link, reply)),
        _ => Err(LinkError::Unexpected("message where a session reply was due").into()),
    }
}

fn check_host(remote: &Remote, key: Option<PublicKey>) -> Result<(), AuthError> {
    match (&remote.known_hosts, key) {
        (Some(path), Some(key)) => KnownHosts::at(path.clone()).check(&remote.label, &key),
        _ => Ok(()),
    }
}

fn expect(link: &mut Link) -> Result<Control, SessionError> {
    match link.next_control()? {
        Control::Abort(why) => Err(SessionError::Aborted(why)),
        other => Ok(other),
    }
}

fn negotiate_block(link: &mut Link, wanted: u32) -> Result<u32, SessionError> {
    let mut len = wanted;
    for _ in 0..2 {
        link.send(&Control::BlockSize(len))?;
        match expect(link)? {
            Control::BlockSizeReply { accepted: true, .. } => return Ok(len),
            Control::BlockSizeReply { largest, .. } if crate::daemon::acceptable_block(largest) => len = largest,
            _ => break,
        }
    }
    Err(SessionError::Local(format!("the peer takes no block size near {wanted}")))
}

/// Lists a directory, or the one file, at a daemon.
///
/// # Errors
/// [`SessionError`].
pub fn list(remote: &Remote, export: &str, path: &[u8]) -> Result<Vec<ListEntry>, SessionError> {
    let request = SessionRequest {
        direction: Direction::List,
        export: export.into(),
        path: path.to_vec(),
        into_directory: false,
        sources: Vec::new(),
        job: [0; 16],
        verify: 0,
        data_key: None,
        rate_limit: None,
        revocable: false,
        options: TreeOptions::default(),
    };
    let (mut link, _) = open_session(remote, request)?;
    let mut all = Vec::new();
    loop {
        let Control::Listing { entries, last } = expect(&mut link)? else {
            return Err(LinkError::Unexpected("message in a listing").into());
        };
        all.extend(entries);
        if last {
            link.close();
            return Ok(all);
        }
    }
}
