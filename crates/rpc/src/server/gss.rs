//! Callers who prove who they are by Kerberos (RPCSEC_GSS, RFC 2203): their contexts, what their calls are checked for, and how
//! the replies are protected.

use super::{Call, Credential, refused};
use crate::gss::{Action, GssCredential, InitResult, SEQUENCE_MAX, Service, Window};
use crate::message::{AuthError, OpaqueAuth, Refusal, encode_success, flavor};
use crate::xdr::{self, Decoder, Encoder};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thruway_gss::{Accepted, Acceptor, COMPLETE, Context, GssError, Peer, TOKEN_MAX};
use thruway_server::turns::{Limits, Turns};

/// Contexts at a time. Beyond that, the one that was used longest ago gives way: its client makes another.
const CONTEXTS_MAX: usize = 4096;
/// Contexts of one principal at a time.
const OF_PRINCIPAL_MAX: usize = 1024;
/// Contexts that are being accepted at a time: each reads files, on a thread of its own.
const ACCEPTING: Limits = Limits { all: 4, per_origin: 3, waiting: 4096, patience: Duration::from_secs(20) };
/// What is longer is encrypted, decrypted and checked on another thread than the reactor's.
const LONG: usize = 32 << 10;

/// Who calls, by Kerberos.
#[derive(Clone)]
pub struct GssCaller {
    peer: Arc<Peer>,
    /// What protects the call.
    pub service: Service,
}

impl GssCaller {
    /// The principal: `alice@EXAMPLE.ORG`.
    pub fn principal(&self) -> &str {
        &self.peer.principal
    }

    /// The user of this host that it counts as, if any.
    pub fn local_user(&self) -> Option<&str> {
        self.peer.local_user.as_deref()
    }
}

impl fmt::Debug for GssCaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.peer.principal, self.service)
    }
}

/// A context of a client.
struct Established {
    context: Context,
    /// Whose turn it is to use the context: no reactor waits for a thread that encrypts something long.
    turn: tokio::sync::Mutex<()>,
    peer: Arc<Peer>,
    window: Mutex<Window>,
    used: Mutex<Instant>,
}

#[derive(Default)]
struct Contexts {
    by_handle: HashMap<[u8; 16], Arc<Established>>,
    /// How many each principal has.
    of_principal: HashMap<Arc<Peer>, usize>,
}

impl Contexts {
    fn remove(&mut self, handle: [u8; 16]) {
        let Some(removed) = self.by_handle.remove(&handle) else { return };
        if let Some(count) = self.of_principal.get_mut(&removed.peer) {
            *count -= 1;
            if *count == 0 {
                self.of_principal.remove(&removed.peer);
            }
        }
    }

    /// Makes room: what has ended goes, and then what was used longest ago, of this principal or of all.
    fn make_room(&mut self, peer: &Peer) {
        let of_principal = self.of_principal.get(peer).copied().unwrap_or(0);
        if self.by_handle.len() < CONTEXTS_MAX && of_principal < OF_PRINCIPAL_MAX {
            return;
        }
        let ended: Vec<_> = self.by_handle.iter().filter(|(_, c)| c.context.has_ended()).map(|(h, _)| *h).collect();
        ended.into_iter().for_each(|handle| self.remove(handle));
        let of_principal = self.of_principal.get(peer).copied().unwrap_or(0);
        if self.by_handle.len() < CONTEXTS_MAX && of_principal < OF_PRINCIPAL_MAX {
            return;
        }
        let is_candidate = |c: &Established| of_principal < OF_PRINCIPAL_MAX || *c.peer == *peer;
        let candidates = self.by_handle.iter().filter(|(_, c)| is_candidate(c));
        let idle = candidates.min_by_key(|(_, c)| *c.used.lock().expect("no panics under the lock"));
        if let Some(handle) = idle.map(|(handle, _)| *handle) {
            self.remove(handle);
        }
    }
}

/// Accepts contexts, and keeps those that there are.
pub(super) struct Gss {
    acceptor: Arc<Acceptor>,
    contexts: Mutex<Contexts>,
    accepting: Turns,
}

/// What is to be checked of a call before it is done.
pub(super) struct Unchecked {
    action: Action,
    sequence: u32,
    service: Service,
    handle: Vec<u8>,
    /// The verifier's body; none if it is of another flavor.
    verifier: Option<Vec<u8>>,
    /// Where the credential ends: so much of the message is signed.
    header_len: usize,
}

impl Unchecked {
    pub(super) fn new(credential: OpaqueAuth<'_>, verifier: OpaqueAuth<'_>) -> xdr::Result<Unchecked> {
        /// Words of a call before the body of its credential.
        const BEFORE_BODY: usize = 8 * 4;
        let GssCredential { action, sequence, service, handle } = GssCredential::decode(credential.body)?;
        Ok(Unchecked {
            action,
            sequence,
            service,
            handle: handle.to_vec(),
            verifier: (verifier.flavor == flavor::RPCSEC_GSS).then(|| verifier.body.to_vec()),
            header_len: BEFORE_BODY + xdr::padded(credential.body.len()),
        })
    }
}

/// Whether a call's arguments are as the program has them, and so may have items in memory of their own.
pub(super) fn has_plain_arguments(credential: OpaqueAuth<'_>) -> bool {
    credential.flavor != flavor::RPCSEC_GSS
        || GssCredential::decode(credential.body)
            .is_ok_and(|gss| gss.action == Action::Data && gss.service == Service::None)
}

/// What becomes of a call that has been checked.
pub(super) enum Checked {
    /// It is done, and this protects the reply.
    Call(Protection),
    /// This is the reply.
    Reply(Encoder),
    /// There is none: it is a replay, or came too late (RFC 2203, section 5.3.3.1).
    Nothing,
}

/// What protects the reply to a call.
pub(super) struct Protection {
    established: Arc<Established>,
    sequence: u32,
    service: Service,
}

impl Established {
    /// Uses the context, on another thread if that is worth it.
    async fn with_context<T: Send + 'static>(
        self: &Arc<Self>,
        is_long: bool,
        job: impl FnOnce(&Context) -> T + Send + 'static,
    ) -> T {
        let _turn = self.turn.lock().await;
        if !is_long {
            return job(&self.context);
        }
        let this = Arc::clone(self);
        on_thread(move || job(&this.context)).await
    }
}

/// Does something that takes long, on another thread than the reactor's.
async fn on_thread<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(job).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

impl Gss {
    pub(super) fn new(acceptor: Acceptor) -> Gss {
        Gss { acceptor: Arc::new(acceptor), contexts: Mutex::default(), accepting: Turns::new(ACCEPTING) }
    }

    fn contexts(&self) -> MutexGuard<'_, Contexts> {
        self.contexts.lock().expect("no panics under the lock")
    }

    /// Checks a call. It has its arguments and its caller then.
    pub(super) async fn check(&self, call: &mut Call, unchecked: Unchecked) -> Checked {
        let xid = call.xid;
        let refuse = |refusal| Checked::Reply(refused(xid, refusal));
        if unchecked.action == Action::Init || unchecked.action == Action::ContinueInit {
            // A context that cannot be accepted at once is none of Kerberos.
            if unchecked.action == Action::ContinueInit || call.procedure != 0 {
                return refuse(Refusal::Auth(AuthError::GssCredentialProblem));
            }
            return match self.accept(call).await {
                Ok(reply) => Checked::Reply(reply),
                Err(_) => refuse(Refusal::GarbageArguments),
            };
        }
        let handle: Option<[u8; 16]> = unchecked.handle.as_slice().try_into().ok();
        let found = handle.and_then(|handle| self.contexts().by_handle.get(&handle).cloned());
        let problem = || refuse(Refusal::Auth(AuthError::GssCredentialProblem));
        let Unchecked { action, sequence, service, header_len, verifier, .. } = unchecked;
        let header = call.message.get(..header_len).map(<[u8]>::to_vec);
        let (Some(handle), Some(established), Some(code), Some(header)) = (handle, found, verifier, header) else {
            return problem();
        };
        if established.with_context(false, move |context| context.verify(&header, &code)).await.is_err() {
            return problem();
        }
        if established.context.has_ended() {
            self.contexts().remove(handle);
            return problem();
        }
        if sequence >= SEQUENCE_MAX {
            return refuse(Refusal::Auth(AuthError::GssContextProblem));
        }
        if !established.window.lock().expect("no panics under the lock").take(sequence) {
            tracing::debug!(?established.peer, sequence, "a call with a number that has been used");
            return Checked::Nothing;
        }
        *established.used.lock().expect("no panics under the lock") = Instant::now();
        if !open_arguments(call, &established, sequence, service).await {
            return refuse(Refusal::GarbageArguments);
        }
        let protection = Protection { established, sequence, service };
        if action == Action::Destroy {
            self.contexts().remove(handle);
            let mut reply = Encoder::new();
            encode_success(xid, OpaqueAuth::NONE, &mut reply);
            return match protection.protect(reply).await {
                Ok(reply) => Checked::Reply(reply),
                Err(_) => Checked::Nothing,
            };
        }
        call.credential = Credential::Gss(GssCaller { peer: Arc::clone(&protection.established.peer), service });
        Checked::Call(protection)
    }

    /// Accepts a context.
    async fn accept(&self, call: &Call) -> xdr::Result<Encoder> {
        let mut d = call.arguments();
        let token = d.opaque(TOKEN_MAX as u32)?.to_vec();
        d.finish()?;
        // Those who send nonsense wait for themselves.
        let turn = self.accepting.take(call.connection.origin()).await;
        let acceptor = Arc::clone(&self.acceptor);
        let accepted = match &turn {
            Some(_) => on_thread(move || acceptor.accept(&token)).await,
            None => Err(GssError::Library("too many contexts are asked for at a time".into())),
        };
        drop(turn);
        let code = |accepted: &Accepted| accepted.context.sign(&Window::SIZE.to_be_bytes());
        let accepted = accepted.and_then(|accepted| Ok((code(&accepted)?, accepted)));
        let mut reply = Encoder::new();
        match accepted {
            Ok((code, Accepted { context, peer, token })) => {
                tracing::info!(
                    peer = call.connection.peer.map(tracing::field::display),
                    principal = peer.principal,
                    user = peer.local_user,
                    "proved by Kerberos"
                );
                let handle = self.keep(context, peer);
                encode_success(call.xid, OpaqueAuth { flavor: flavor::RPCSEC_GSS, body: &code }, &mut reply);
                let window = Window::SIZE;
                InitResult { handle: handle.to_vec(), major: COMPLETE, minor: 0, window, token }.encode(&mut reply);
            }
            Err(error) => {
                tracing::warn!(peer = call.connection.peer.map(tracing::field::display), %error, "refused by Kerberos");
                let (major, minor) = error.status();
                encode_success(call.xid, OpaqueAuth::NONE, &mut reply);
                InitResult { handle: Vec::new(), major, minor, window: 0, token: Vec::new() }.encode(&mut reply);
            }
        }
        Ok(reply)
    }

    fn keep(&self, context: Context, peer: Peer) -> [u8; 16] {
        let handle = thruway_engine::random::random::<16>();
        let mut contexts = self.contexts();
        contexts.make_room(&peer);
        // One for all contexts of a principal.
        let known = contexts.of_principal.get_key_value(&peer).map(|(peer, _)| Arc::clone(peer));
        let peer = known.unwrap_or_else(|| Arc::new(peer));
        *contexts.of_principal.entry(Arc::clone(&peer)).or_default() += 1;
        let established = Established {
            context,
            turn: tokio::sync::Mutex::default(),
            peer,
            window: Mutex::default(),
            used: Mutex::new(Instant::now()),
        };
        contexts.by_handle.insert(handle, Arc::new(established));
        handle
    }
}

/// Takes the protection off the arguments of a call; false if they are not as they were sent.
async fn open_arguments(call: &mut Call, established: &Arc<Established>, sequence: u32, service: Service) -> bool {
    if service == Service::None {
        return true;
    }
    // Nothing of what is protected may come by itself (RFC 8166).
    if call.has_bulk() {
        return false;
    }
    let message = std::mem::take(&mut call.message);
    let arguments = call.arguments.clone();
    let opened = established.with_context(arguments.len() > LONG, move |context| match service {
        Service::Privacy => {
            let mut d = Decoder::new(&message[arguments]);
            let sealed = d.opaque(u32::MAX).ok()?;
            d.finish().ok()?;
            let body = context.open(sealed).ok()?;
            let end = body.len();
            Some((body, 0..end))
        }
        Service::Integrity | Service::None => {
            let start = arguments.start;
            let mut d = Decoder::new(&message[arguments]);
            let body = d.opaque(u32::MAX).ok()?;
            let code = d.opaque(crate::message::AUTH_MAX).ok()?;
            d.finish().ok()?;
            context.verify(body, code).ok()?;
            // Behind its length.
            let body = start + 4..start + 4 + body.len();
            Some((message, body))
        }
    });
    let Some((message, mut body)) = opened.await else { return false };
    // The number is there once more, so that arguments and headers cannot be exchanged.
    if message.get(body.clone()).and_then(<[u8]>::first_chunk) != Some(&sequence.to_be_bytes()) {
        return false;
    }
    body.start += 4;
    (call.message, call.arguments) = (message, body);
    true
}

impl Protection {
    /// Whether the reply is made again, in memory of its own.
    pub(super) fn copies(&self) -> bool {
        self.service != Service::None
    }

    /// Protects a reply.
    pub(super) async fn protect(self, reply: Encoder) -> Result<Encoder, GssError> {
        /// Words before the verifier: the call's number, that it is a reply, and that the call was accepted.
        const BEFORE: usize = 3 * 4;
        /// An empty verifier, and the status.
        const VERIFIER: usize = 2 * 4;
        let (bytes, bulk) = reply.into_parts();
        let [_, _, denied] = [0, 4, 8].map(|at| word(&bytes, at));
        if denied != 0 {
            return Ok(Encoder::from_parts(bytes, bulk));
        }
        let Protection { established, sequence, service } = self;
        let status = word(&bytes, BEFORE + VERIFIER);
        let results = BEFORE + VERIFIER + 4;
        let mut out = Encoder::new();
        out.fixed(&bytes[..BEFORE]);
        out.u32(flavor::RPCSEC_GSS);
        let rest = Encoder::from_parts(bytes, bulk).behind_first(results);
        if status != 0 || service == Service::None {
            out.opaque(&established.with_context(false, move |context| context.sign(&sequence.to_be_bytes())).await?);
            out.u32(status);
            out.append(rest);
            return Ok(out);
        }
        let mut body = Encoder::new();
        body.u32(sequence);
        body.append(rest);
        let body = body.to_bytes();
        let protected = established.with_context(body.len() > LONG, move |context| {
            let verifier = context.sign(&sequence.to_be_bytes())?;
            match service {
                Service::Privacy => Ok((verifier, context.seal(&body)?, None)),
                Service::Integrity | Service::None => {
                    let code = context.sign(&body)?;
                    Ok((verifier, body, Some(code)))
                }
            }
        });
        let (verifier, body, code) = protected.await?;
        out.opaque(&verifier);
        out.u32(status);
        out.opaque(&body);
        code.iter().for_each(|code| out.opaque(code));
        Ok(out)
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
    u32::from_be_bytes(*word.expect("a reply has a header"))
}
