//! Calls to clients, by connections that they have made (RFC 8881, section 2.10.3.1).

use crate::client::{CallError, Procedure, results_of};
use crate::message::{CallHeader, Incoming, OpaqueAuth};
use crate::xdr::{Decoder, Encoder};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};

/// Calls of a connection that wait for their replies.
const WAITING_MAX: usize = 64;

/// After this long, those who do not wait any more are looked for.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The way to a client, from any thread.
#[derive(Clone)]
pub struct BackChannel(mpsc::UnboundedSender<BackCall>);

/// A call on its way to the client.
pub(super) struct BackCall {
    procedure: Procedure,
    flavor: u32,
    credential: Vec<u8>,
    arguments: Vec<u8>,
    reply: oneshot::Sender<Vec<u8>>,
}

impl BackChannel {
    /// The two ends of one.
    pub(super) fn new() -> (BackChannel, mpsc::UnboundedReceiver<BackCall>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (BackChannel(sender), receiver)
    }

    /// Whether both are of one connection.
    pub fn is_same(&self, other: &BackChannel) -> bool {
        self.0.same_channel(&other.0)
    }

    /// Whether its connection is there.
    pub fn is_open(&self) -> bool {
        !self.0.is_closed()
    }

    /// Calls a procedure of the client's; the results.
    ///
    /// # Errors
    /// As [`crate::client::Client::call`].
    pub async fn call(
        &self,
        procedure: Procedure,
        credential: OpaqueAuth<'_>,
        arguments: &Encoder,
        timeout: Duration,
    ) -> Result<Vec<u8>, CallError> {
        let lost = || CallError::Connection(io::ErrorKind::NotConnected.into());
        let (sender, reply) = oneshot::channel();
        let OpaqueAuth { flavor, body } = credential;
        let arguments = arguments.to_bytes();
        let call = BackCall { procedure, flavor, credential: body.to_vec(), arguments, reply: sender };
        self.0.send(call).map_err(|_| lost())?;
        let reply = tokio::time::timeout(timeout, reply).await.map_err(|_| CallError::TimedOut(timeout))?;
        let message = reply.map_err(|_| lost())?;
        Ok(message[results_of(&message)?..].to_vec())
    }
}

/// Whether a message is a reply, by the word behind its number.
pub(super) fn is_reply(message: &[u8]) -> bool {
    const REPLY: [u8; 4] = 1_u32.to_be_bytes();
    message.get(4..8) == Some(&REPLY)
}

/// The calls of one connection.
pub(super) struct BackCalls {
    waiting: RefCell<HashMap<u32, oneshot::Sender<Vec<u8>>>>,
    next: Cell<u32>,
    /// So many may be waiting.
    allowed: Cell<usize>,
    replied: Notify,
}

impl Default for BackCalls {
    fn default() -> BackCalls {
        BackCalls {
            waiting: RefCell::default(),
            next: Cell::default(),
            allowed: Cell::new(WAITING_MAX),
            replied: Notify::new(),
        }
    }
}

impl BackCalls {
    /// Sends what is to be called, until the channel ends, which it does not as long as the connection is there. At most as many
    /// calls as [`BackCalls::allow`] has said wait for their replies.
    pub(super) async fn run(&self, mut calls: mpsc::UnboundedReceiver<BackCall>, send: impl Fn(u32, Encoder)) {
        while let Some(call) = calls.recv().await {
            self.room().await;
            if call.reply.is_closed() {
                continue;
            }
            let mut waiting = self.waiting.borrow_mut();
            let xid = self.next.get();
            self.next.set(xid.wrapping_add(1));
            let Procedure { program, version, procedure } = call.procedure;
            let credential = OpaqueAuth { flavor: call.flavor, body: &call.credential };
            let header = CallHeader { xid, program, version, procedure, credential, verifier: OpaqueAuth::NONE };
            let mut message = Encoder::new();
            header.encode(&mut message);
            message.append(Encoder::behind(call.arguments));
            waiting.insert(xid, call.reply);
            send(xid, message);
        }
        std::future::pending::<()>().await;
    }

    /// Waits until another call may be made. What is not waited for any more gives way, after a while.
    async fn room(&self) {
        loop {
            let replied = self.replied.notified();
            self.waiting.borrow_mut().retain(|_, reply| !reply.is_closed());
            if self.waiting.borrow().len() < self.allowed.get() {
                return;
            }
            let _ = tokio::time::timeout(LOOK_AGAIN_AFTER, replied).await;
        }
    }

    /// The client takes so many calls at a time.
    pub(super) fn allow(&self, calls: usize) {
        self.allowed.set(calls.clamp(1, WAITING_MAX));
        self.replied.notify_one();
    }

    /// Takes a message, if it is a reply; one that is not waited for is dropped.
    pub(super) fn take_reply(&self, message: Vec<u8>) -> Option<Vec<u8>> {
        if !is_reply(&message) {
            return Some(message);
        }
        let xid = message.first_chunk().map_or(0, |xid| u32::from_be_bytes(*xid));
        // What cannot be decoded does not reach who waits.
        let is_reply = matches!(Incoming::decode(&mut Decoder::new(&message)), Ok(Incoming::Reply(_)));
        let waiting = self.waiting.borrow_mut().remove(&xid);
        if let Some(waiting) = waiting
            && is_reply
        {
            let _ = waiting.send(message);
        }
        self.replied.notify_one();
        None
    }
}
