//! Serving programs: what arrives by any transport is a [`Call`], and its answer does not know the transport either.

mod back;
mod gss;
mod rdma;
mod reply_cache;
mod tcp;
mod udp;

pub use back::BackChannel;
pub use gss::GssCaller;
pub use rdma::{Design, RdmaConfig};
pub use tcp::Config;
pub use udp::UdpServer;

use self::gss::{Checked, Gss, Unchecked, has_plain_arguments};
use self::reply_cache::{Lookup, ReplyCache};
use crate::message::{AuthError, AuthSys, CallHeader, Incoming, OpaqueAuth, Refusal, encode_success, flavor};
use crate::xdr::{self, BulkItem, Decoder, Encoder};
use smallvec::SmallVec;
use std::cell::{Cell, OnceCell};
use std::net::SocketAddr;
use std::ops::{Range, RangeInclusive};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use thruway_engine::digest::{DIGEST_LEN, Xxh3Pieces};
use thruway_engine::pipes::Pipes;
use thruway_gss::Acceptor as GssAcceptor;
use thruway_metrics::{RegisterError, Registered, Registry};
use thruway_server::{Acceptor, Address, Buffers, Flag, Peer, caller, panics};
use thruway_tcp::Origin;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most bytes of a bulk item, and so of one NFS READ or WRITE.
pub const BULK_MAX: usize = 1 << 20;

/// Most bytes of a call beside its bulk item.
pub const CALL_MAX: usize = BULK_MAX + (64 << 10);

/// Replies of a connection that are long and in memory of their own.
pub const LONG_REPLIES_MAX: usize = 4;

/// A reply that has no more bytes counts as none that is long.
const SHORT_REPLY: usize = 64 << 10;

/// Time for a client's first call, and for TLS.
const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A running server. It ends with its reactors.
pub struct Server {
    addresses: Vec<Address>,
    acceptor: Arc<Acceptor>,
}

impl Server {
    /// The addresses it listens on, with the ports that the kernel chose.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Registers its metrics.
    ///
    /// # Errors
    /// [`RegisterError`], if another server of the protocol is registered.
    pub fn register(&self, registry: &Registry) -> Result<Registered, RegisterError> {
        self.acceptor.register(registry)
    }

    /// Connections that are being served.
    pub fn connections(&self) -> usize {
        self.acceptor.connections()
    }

    /// Refuses new connections and asks the existing ones to end.
    pub fn close(&self) {
        self.acceptor.close();
    }

    /// Ends every connection when its calls in progress have been answered, and waits for that for at most `limit`.
    pub fn shut_down(&self, limit: Duration) {
        self.acceptor.shut_down(limit);
    }
}

/// A program: procedures that clients call.
///
/// Its calls come from all reactors. What a call waits for must not block the reactor.
pub trait Program: Send + Sync {
    /// Its number.
    fn number(&self) -> u32;

    /// Its versions.
    fn versions(&self) -> RangeInclusive<u32>;

    /// Leads the decoder from the first of the arguments to the length of the item that is long in this call; it is then received
    /// into memory of its own. False if there is none. Only the beginning of the arguments may be there.
    ///
    /// # Errors
    /// As the decoder; it counts as false.
    fn find_bulk(&self, call: &CallHeader<'_>, arguments: &mut Decoder<'_>) -> xdr::Result<bool> {
        let _ = (call, arguments);
        Ok(false)
    }

    /// Whether its calls are refused without TLS where the server asks for that.
    fn needs_tls(&self) -> bool {
        true
    }

    /// Whether a call that must not be done twice is one of many that change data: the replies to those are kept apart, so that they do
    /// not take the place of others.
    fn is_of_data(&self, call: &Call) -> bool {
        let _ = call;
        false
    }

    /// Whether a call may be done again when its client repeats it. The replies to others are kept for a while, and sent again.
    fn is_repeatable(&self, call: &Call) -> bool {
        let _ = call;
        true
    }

    /// True if the program calls [`Call::begin_change`] before it changes anything. Calls of other programs are completed even if their
    /// connection is lost.
    fn announces_changes(&self) -> bool {
        false
    }

    /// Answers a call. The results are to be appended to `results`, which has the header of the reply.
    fn call<'a>(&'a self, call: &'a Call, results: Encoder) -> Answer<'a>;
}

/// The answer to a call, in progress.
pub type Answer<'a> = Pin<Box<dyn Future<Output = Outcome> + 'a>>;

/// How a call has ended.
pub enum Outcome {
    /// The reply with its results.
    Results(Encoder),
    /// There are none.
    Refused(Refusal),
    /// There is to be no reply: the call is a copy of one that is being answered.
    NoReply,
}

impl Outcome {
    /// That of a call whose results have been appended to `results`, unless it is refused or cannot be decoded.
    pub fn of(done: xdr::Result<Result<(), Refusal>>, results: Encoder) -> Outcome {
        match done {
            Ok(Ok(())) => Outcome::Results(results),
            Ok(Err(refusal)) => Outcome::Refused(refusal),
            Err(error) => {
                tracing::debug!(%error, "arguments that cannot be decoded");
                Outcome::Refused(Refusal::GarbageArguments)
            }
        }
    }
}

impl From<Result<Encoder, Refusal>> for Outcome {
    fn from(result: Result<Encoder, Refusal>) -> Outcome {
        match result {
            Ok(results) => Outcome::Results(results),
            Err(refusal) => Outcome::Refused(refusal),
        }
    }
}

/// What a connection runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A byte stream without TLS.
    Tcp,
    /// A byte stream with TLS.
    Tls,
    /// An RDMA connection.
    Rdma,
    /// A datagram: its sender may be made up.
    Udp,
}

/// A connection that calls come by.
pub struct Connection {
    /// Tells it from all others of this process.
    pub id: u64,
    /// Its other end; none if that is a Unix socket.
    pub peer: Option<SocketAddr>,
    /// Its own end, which the client knows this server by; none if that is a Unix socket or not known.
    pub local: Option<SocketAddr>,
    /// What it runs over.
    pub transport: Transport,
    /// Whether results may be files that are lent.
    can_lend: bool,
    /// Pages on their way to the client.
    pipes: Arc<Pipes>,
    /// The names in the client's certificate.
    pub names: Vec<String>,
    /// Memory for results.
    pub buffers: Buffers,
    /// The way back to the client; none over RDMA if it takes only short messages.
    pub back: Option<BackChannel>,
    /// There should be TLS and is not: only programs that need none are called.
    pub(crate) lacks_tls: bool,
    /// Set when nothing can be sent to the client any more.
    pub(crate) lost: Option<Rc<Flag>>,
    /// Tells whether the client has closed it.
    pub(crate) other_end: Option<Peer>,
    /// Something has been refused because of who the client is.
    is_refused: Cell<bool>,
    long_replies: Arc<Semaphore>,
}

impl Connection {
    pub(crate) fn new(
        peer: Option<SocketAddr>,
        transport: Transport,
        can_lend: bool,
        names: Vec<String>,
    ) -> Connection {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Connection {
            id,
            peer,
            local: None,
            transport,
            can_lend,
            pipes: Arc::default(),
            names,
            buffers: Buffers::new(BULK_MAX),
            back: None,
            lacks_tls: false,
            lost: None,
            other_end: None,
            is_refused: Cell::new(false),
            long_replies: Arc::new(Semaphore::new(LONG_REPLIES_MAX)),
        }
    }

    /// Whether its client has closed it, or it is broken.
    fn has_closed(&self) -> bool {
        self.other_end.as_ref().is_some_and(Peer::has_closed)
    }

    /// To be asked when something is refused because of who the client is: whether it is the first time, which is worth a line.
    pub fn is_first_refusal(&self) -> bool {
        !self.is_refused.replace(true)
    }

    /// Where it comes from. A connection over loopback counts as one of its address: who asks has been looked at when it was made.
    pub fn origin(&self) -> Origin {
        self.peer.map_or(Origin::UnknownUser, |peer| Origin::of_host(peer.ip()))
    }

    /// Whether there should be TLS and is not.
    pub fn lacks_tls(&self) -> bool {
        self.lacks_tls
    }
}

/// Who calls.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Credential {
    /// Nobody.
    None,
    /// A user and groups, as the client says.
    Sys(AuthSys),
    /// A user who has proved it.
    Gss(GssCaller),
}

/// A user of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// Its first group.
    pub gid: u32,
    /// All of its groups.
    pub groups: Vec<u32>,
}

/// A call of a procedure.
pub struct Call {
    /// Pairs the reply with it.
    pub xid: u32,
    /// The program.
    pub program: u32,
    /// Its version.
    pub version: u32,
    /// The procedure.
    pub procedure: u32,
    /// Who calls.
    pub credential: Credential,
    /// The connection that it has come by.
    pub connection: Rc<Connection>,
    /// What this host knows of the user, for the program to learn.
    pub user: OnceCell<Arc<User>>,
    /// It could not be learnt now.
    pub user_is_unavailable: Cell<bool>,
    /// True from [`Call::begin_change`] on.
    has_changed: Cell<bool>,
    /// Held until its reply is on its way, if that is long.
    long_reply: OnceCell<OwnedSemaphorePermit>,
    message: Vec<u8>,
    /// Where the arguments are.
    arguments: Range<usize>,
    /// If it is to be checked before it is done.
    unchecked: Option<Unchecked>,
    bulk: Cell<SmallVec<[BulkItem; 1]>>,
    /// Total bytes of the bulk items in `bulk`.
    bulk_len: usize,
}

impl Call {
    /// A digest of the arguments: the same, whether bulk items were received among them or apart.
    fn digest(&self) -> [u8; DIGEST_LEN] {
        // Faster than others by far, and bulk items are a megabyte.
        let mut digest = Xxh3Pieces::default();
        let (mut rest, mut at) = (self.argument_bytes(), self.arguments.start);
        let items = self.bulk.take();
        for item in &items {
            let before = (item.position as usize).saturating_sub(at).min(rest.len());
            digest.add(&rest[..before]);
            digest.add(item.segment.as_slice());
            digest.add(&[0; 3][..xdr::padded(item.segment.len()) - item.segment.len()]);
            rest = &rest[before..];
            at += before + xdr::padded(item.segment.len());
        }
        self.bulk.set(items);
        digest.add(rest);
        digest.digest()
    }

    /// Where pages of files can wait until they are sent, if the reply may have such: they are sent as they are.
    pub fn pipes(&self) -> Option<&Arc<Pipes>> {
        let is_protected = match &self.credential {
            Credential::Gss(caller) => caller.service != crate::gss::Service::None,
            _ => false,
        };
        (self.connection.can_lend && !is_protected).then_some(&self.connection.pipes)
    }

    /// Must be called before the call changes anything. Afterwards the call is completed even if its connection is lost, because the
    /// client can ask for the result by another connection.
    pub fn begin_change(&self) {
        self.has_changed.set(true);
    }

    /// Reverts [`Call::begin_change`], after a change that is safe to repeat.
    pub fn end_change(&self) {
        self.has_changed.set(false);
    }

    /// The arguments. Bulk items are there the first time.
    pub fn arguments(&self) -> Decoder<'_> {
        Decoder::with_bulk(self.argument_bytes(), self.arguments.start as u32, self.bulk.take())
    }

    /// Bytes of the arguments, including bulk items.
    pub fn argument_len(&self) -> usize {
        self.argument_bytes().len() + self.bulk_len
    }

    /// To be called before a reply is made that may have many bytes in memory of its own: there are [`LONG_REPLIES_MAX`] of these at a
    /// time, until the client has taken them.
    pub async fn begin_long_reply(&self) {
        if self.long_reply.get().is_none() {
            let turn = Arc::clone(&self.connection.long_replies).acquire_owned().await;
            let _ = self.long_reply.set(turn.expect("the semaphore is never closed"));
        }
    }

    /// What is to be held until its reply has been taken, if that is long; all else that the call held is free.
    pub(crate) fn into_long_reply(self) -> Option<OwnedSemaphorePermit> {
        self.long_reply.into_inner()
    }

    /// The arguments without bulk items.
    pub fn argument_bytes(&self) -> &[u8] {
        &self.message[self.arguments.clone()]
    }

    fn has_bulk(&self) -> bool {
        let bulk = self.bulk.take();
        let has_any = !bulk.is_empty();
        self.bulk.set(bulk);
        has_any
    }
}

/// Answer to a call. If the connection is lost and the call has changed nothing, the call ends early without a reply.
struct UnlessLost<'a> {
    call: &'a Call,
    answer: Answer<'a>,
    /// Resolves when the connection is lost. Created when the answer is first pending.
    lost: Option<Pin<Box<dyn Future<Output = ()> + 'a>>>,
}

impl Future for UnlessLost<'_> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let call = self.call;
        let Some(lost) = call.connection.lost.as_deref() else { return self.answer.as_mut().poll(cx) };
        if !call.has_changed.get() && lost.is_set() {
            return Poll::Ready(Outcome::NoReply);
        }
        match self.answer.as_mut().poll(cx) {
            Poll::Pending if !call.has_changed.get() => {
                let wait = self.lost.get_or_insert_with(|| Box::pin(lost.wait()));
                wait.as_mut().poll(cx).map(|()| Outcome::NoReply)
            }
            answered => answered,
        }
    }
}

/// The programs of a server.
#[derive(Clone)]
pub struct Programs(Arc<Inner>);

struct Inner {
    programs: Vec<Arc<dyn Program>>,
    replies: ReplyCache,
    /// For callers who prove who they are.
    gss: Option<Gss>,
}

/// What is to be done with a message.
pub(crate) enum Received {
    /// A call of this program.
    Call(Call, Arc<dyn Program>),
    /// The client asks for TLS; this is the answer if there is any.
    StartTls { xid: u32 },
    /// A reply that is complete.
    Reply { xid: u32, reply: Encoder },
}

impl Received {
    pub(crate) fn xid(&self) -> u32 {
        match self {
            Received::Call(call, _) => call.xid,
            Received::StartTls { xid } | Received::Reply { xid, .. } => *xid,
        }
    }
}

/// What a server that does TLS answers when it is asked (RFC 9289, section 4.1).
const STARTTLS: OpaqueAuth<'_> = OpaqueAuth { flavor: flavor::AUTH_NONE, body: b"STARTTLS" };

fn refused(xid: u32, refusal: Refusal) -> Encoder {
    let mut reply = Encoder::new();
    refusal.encode(xid, OpaqueAuth::NONE, &mut reply);
    reply
}

impl Programs {
    /// These programs.
    pub fn new(programs: impl IntoIterator<Item = Arc<dyn Program>>) -> Programs {
        Programs(Arc::new(Inner {
            programs: programs.into_iter().collect(),
            replies: ReplyCache::default(),
            gss: None,
        }))
    }

    /// These programs, also for callers who prove who they are by Kerberos.
    pub fn with_gss(programs: impl IntoIterator<Item = Arc<dyn Program>>, acceptor: GssAcceptor) -> Programs {
        Programs(Arc::new(Inner {
            programs: programs.into_iter().collect(),
            replies: ReplyCache::default(),
            gss: Some(Gss::new(acceptor)),
        }))
    }

    fn find(&self, call: &CallHeader<'_>) -> Result<&Arc<dyn Program>, Refusal> {
        let of_number = || self.0.programs.iter().filter(|program| program.number() == call.program);
        if let Some(program) = of_number().find(|program| program.versions().contains(&call.version)) {
            return Ok(program);
        }
        let low = of_number().map(|program| *program.versions().start()).min();
        let high = of_number().map(|program| *program.versions().end()).max();
        match (low, high) {
            (Some(low), Some(high)) => Err(Refusal::ProgramMismatch { low, high }),
            _ => Err(Refusal::ProgramUnavailable),
        }
    }

    /// Where the bulk item of a call begins of which this is the beginning, and its length.
    pub(crate) fn find_bulk(&self, beginning: &[u8]) -> Option<(usize, usize)> {
        let mut decoder = Decoder::new(beginning);
        let Ok(Incoming::Call(call)) = Incoming::decode(&mut decoder) else { return None };
        if !has_plain_arguments(call.credential) {
            return None;
        }
        let program = self.find(&call).ok()?;
        if !program.find_bulk(&call, &mut decoder).ok()? {
            return None;
        }
        let len = decoder.len(BULK_MAX as u32).ok()?;
        Some((decoder.position() as usize, len))
    }

    /// Takes a message apart.
    ///
    /// # Errors
    /// If it is no message of RPC: there is nothing that could be answered.
    pub(crate) fn receive(
        &self,
        message: Vec<u8>,
        bulk: SmallVec<[BulkItem; 1]>,
        connection: &Rc<Connection>,
    ) -> xdr::Result<Option<Received>> {
        let mut decoder = Decoder::new(&message);
        let header = match Incoming::decode(&mut decoder)? {
            Incoming::Call(header) => header,
            Incoming::OtherVersion { xid } => {
                return Ok(Some(Received::Reply { xid, reply: refused(xid, Refusal::OTHER_VERSION) }));
            }
            // To a call that nobody waits for any more.
            Incoming::Reply(_) => return Ok(None),
        };
        let (xid, arguments) = (header.xid, decoder.position() as usize..message.len());
        let refuse = |refusal| Ok(Some(Received::Reply { xid, reply: refused(xid, refusal) }));
        let program = match self.find(&header) {
            Ok(program) => Arc::clone(program),
            Err(refusal) => return refuse(refusal),
        };
        if connection.lacks_tls && program.needs_tls() && header.credential.flavor != flavor::AUTH_TLS {
            return refuse(Refusal::Auth(AuthError::TooWeak));
        }
        let mut unchecked = None;
        let credential = match header.credential.flavor {
            flavor::AUTH_NONE => Credential::None,
            flavor::AUTH_SYS => match AuthSys::decode(header.credential.body) {
                Ok(sys) => Credential::Sys(sys),
                Err(_) => return refuse(Refusal::Auth(AuthError::BadCredential)),
            },
            flavor::AUTH_TLS if header.procedure == 0 => return Ok(Some(Received::StartTls { xid })),
            flavor::RPCSEC_GSS if self.0.gss.is_some() => match Unchecked::new(header.credential, header.verifier) {
                Ok(gss) => {
                    unchecked = Some(gss);
                    Credential::None
                }
                Err(_) => return refuse(Refusal::Auth(AuthError::BadCredential)),
            },
            // RPCSEC_GSS among them: Linux asks for it first, and goes on with AUTH_SYS.
            _ => return refuse(Refusal::Auth(AuthError::BadCredential)),
        };
        let (program_number, version, procedure) = (header.program, header.version, header.procedure);
        let connection = Rc::clone(connection);
        let bulk_len = bulk.iter().map(|item| xdr::padded(item.segment.len())).sum();
        let call = Call {
            xid,
            program: program_number,
            version,
            procedure,
            credential,
            connection,
            user: OnceCell::new(),
            user_is_unavailable: Cell::new(false),
            has_changed: Cell::new(false),
            long_reply: OnceCell::new(),
            message,
            arguments,
            unchecked,
            bulk: Cell::new(bulk),
            bulk_len,
        };
        Ok(Some(Received::Call(call, program)))
    }
}

impl Programs {
    /// Answers a call, even if what does it panics; `None` if there is to be no reply.
    pub(crate) async fn answer(&self, call: &mut Call, program: &dyn Program) -> Option<Encoder> {
        let protection = match (call.unchecked.take(), &self.0.gss) {
            (Some(unchecked), Some(gss)) => match gss.check(call, unchecked).await {
                Checked::Call(protection) => Some(protection),
                Checked::Reply(reply) => return Some(reply),
                Checked::Nothing => return None,
            },
            _ => None,
        };
        let reply = self.answer_checked(call, program).await?;
        let Some(protection) = protection else { return Some(reply) };
        if protection.copies() && reply.len() > SHORT_REPLY {
            call.begin_long_reply().await;
        }
        match protection.protect(reply).await {
            Ok(reply) => Some(reply),
            Err(error) => {
                tracing::warn!(%error, "a reply that cannot be protected");
                None
            }
        }
    }

    async fn answer_checked(&self, call: &Call, program: &dyn Program) -> Option<Encoder> {
        let is_repeatable = program.is_repeatable(call);
        // A client that has given up a connection repeats what it has called by another one, perhaps long ago, and may have changed
        // since then what this would change.
        if !is_repeatable && call.connection.has_closed() {
            tracing::debug!(xid = call.xid, "a call of a connection that its client has closed is not done");
            return None;
        }
        let keeper = loop {
            let kept = if is_repeatable { None } else { self.0.replies.begin(call, program.is_of_data(call)) };
            match kept {
                None => break None,
                Some(Lookup::New(keeper)) => break Some(keeper),
                // Its client may have lost the connection by which the other reply goes.
                Some(Lookup::InProgress(done)) => drop(done.acquire().await),
                Some(Lookup::Done(reply)) => return Some(Encoder::behind(reply.into_vec())),
            }
        };
        let mut results = Encoder::new();
        encode_success(call.xid, OpaqueAuth::NONE, &mut results);
        let caller = call.connection.origin();
        if !program.announces_changes() {
            call.begin_change();
        }
        let answer = UnlessLost { call, answer: program.call(call, results), lost: None };
        let answer = async { Ok(caller::on_behalf_of(caller, answer).await) };
        let reply = match panics::catch(answer).await {
            Ok(Outcome::Results(results)) => Some(results),
            Ok(Outcome::Refused(refusal)) => Some(refused(call.xid, refusal)),
            Ok(Outcome::NoReply) => None,
            Err(_) => return Some(refused(call.xid, Refusal::SystemError)),
        };
        if let (Some(keeper), Some(reply)) = (keeper, &reply) {
            keeper.keep(&reply.to_bytes());
        }
        reply
    }
}
