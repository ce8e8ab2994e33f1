//! Calls of users who prove who they are (RPCSEC_GSS, RFC 2203).

use super::{Arguments, CallError, Client, Procedure, Reply};
use crate::gss::{Action, GssCredential, InitResult, Service, Window};
use crate::message::{CallHeader, Incoming, OpaqueAuth, flavor};
use crate::xdr::{Decoder, Encoder};
use std::cell::Cell;
use std::io;
use thruway_gss::{COMPLETE, Context, FAILURE, GssError, TOKEN_MAX};
use tokio::sync::Semaphore;

/// A context with a server, by which calls are made and protected.
pub struct GssSession {
    context: Context,
    handle: Vec<u8>,
    service: Service,
    next: Cell<u32>,
    /// As many calls at a time as the server keeps numbers for: it would not answer older ones.
    turns: Semaphore,
}

fn credential(action: Action, sequence: u32, service: Service, handle: &[u8]) -> Vec<u8> {
    GssCredential { action, sequence, service, handle }.encode()
}

/// The header of a call up to its verifier, whose credential this is.
fn header(xid: u32, procedure: Procedure, credential: &[u8]) -> Encoder {
    let Procedure { program, version, procedure } = procedure;
    let credential = OpaqueAuth { flavor: flavor::RPCSEC_GSS, body: credential };
    let mut out = Encoder::new();
    CallHeader { xid, program, version, procedure, credential, verifier: OpaqueAuth::NONE }.encode(&mut out);
    out
}

/// Bytes of a protected reply beside its data, most of the time far fewer.
const PROTECTED: usize = 4096;

/// Flavor and length of an empty verifier.
const NO_VERIFIER: usize = 8;

impl GssSession {
    /// Proves to a server who calls, for all programs that it has: by the tickets of the user whom this process runs as, to the
    /// service `nfs@HOST`, with this protection of calls.
    ///
    /// # Errors
    /// If there is no ticket, or the server refuses it or does not prove who it is.
    pub async fn begin(
        client: &Client,
        of: Procedure,
        target: &str,
        service: Service,
    ) -> Result<GssSession, CallError> {
        let target = target.to_string();
        let begun = tokio::task::spawn_blocking(move || thruway_gss::initiate(&target)).await;
        let (initiator, token) = begun.map_err(io::Error::other)??;
        let init = Procedure { procedure: 0, ..of };
        let reply = client
            .send(
                |xid| {
                    let mut call = header(xid, init, &credential(Action::Init, 0, service, &[]));
                    call.opaque(&token);
                    Ok(call)
                },
                &Arguments { bytes: Encoder::new(), item_max: 0, reply_max: 2 * TOKEN_MAX },
            )
            .await?;
        let reply = Reply::of(reply, client)?;
        let mut d = reply.results();
        let result = InitResult::decode(&mut d, TOKEN_MAX as u32)?;
        d.finish()?;
        if result.major != COMPLETE {
            let text = format!("the server does not accept the ticket (status {:#x}, {})", result.major, result.minor);
            return Err(GssError::Status {
                doing: "proving who calls",
                text,
                major: result.major,
                minor: result.minor,
            }
            .into());
        }
        let context = initiator.finish(&result.token)?;
        context.verify(&result.window.to_be_bytes(), reply.verifier()?)?;
        let turns = Semaphore::new(result.window.clamp(1, Window::SIZE) as usize);
        Ok(GssSession { context, handle: result.handle, service, next: Cell::new(1), turns })
    }

    /// The call of a procedure with a number, protected.
    ///
    /// # Errors
    /// The library's.
    pub fn protect(
        &self,
        xid: u32,
        procedure: Procedure,
        sequence: u32,
        arguments: Encoder,
    ) -> Result<Encoder, GssError> {
        let credential = credential(Action::Data, sequence, self.service, &self.handle);
        let mut call = header(xid, procedure, &credential).to_bytes();
        call.truncate(call.len() - NO_VERIFIER);
        let code = self.context.sign(&call)?;
        let mut call = Encoder::behind(call);
        call.u32(flavor::RPCSEC_GSS);
        call.opaque(&code);
        if self.service == Service::None {
            call.append(arguments);
            return Ok(call);
        }
        let mut body = Encoder::new();
        body.u32(sequence);
        body.append(arguments);
        let body = body.to_bytes();
        if self.service == Service::Privacy {
            call.opaque(&self.context.seal(&body)?);
        } else {
            call.opaque(&body);
            call.opaque(&self.context.sign(&body)?);
        }
        Ok(call)
    }

    /// Checks the reply to the call with a number, and takes the protection off.
    fn open(&self, sequence: u32, mut reply: Reply) -> Result<Reply, CallError> {
        self.context.verify(&sequence.to_be_bytes(), reply.verifier()?)?;
        let start = reply.results.start;
        let mut d = reply.results();
        let body = match self.service {
            Service::None => return Ok(reply),
            Service::Integrity => {
                let (body, code) = (d.opaque(u32::MAX)?, d.opaque(crate::message::AUTH_MAX)?);
                d.finish()?;
                self.context.verify(body, code)?;
                start + 4..start + 4 + body.len()
            }
            Service::Privacy => {
                let body = self.context.open(d.opaque(u32::MAX)?)?;
                d.finish()?;
                let all = 0..body.len();
                reply.message = body;
                all
            }
        };
        if reply.message.get(body.clone()).and_then(<[u8]>::first_chunk) != Some(&sequence.to_be_bytes()) {
            let text = "results of another call".into();
            return Err(GssError::Status { doing: "checking a reply", text, major: FAILURE, minor: 0 }.into());
        }
        reply.results = body.start + 4..body.end;
        Ok(reply)
    }

    /// Calls a procedure.
    ///
    /// # Errors
    /// As [`Client::call`]; and if the reply is not the server's.
    pub async fn call(
        &self,
        client: &Client,
        procedure: Procedure,
        arguments: impl Into<Arguments>,
    ) -> Result<Reply, CallError> {
        let mut arguments = arguments.into();
        let bytes = std::mem::take(&mut arguments.bytes);
        if self.service != Service::None && arguments.item_max > 0 {
            // What is protected is one message (RFC 8166).
            arguments.reply_max = arguments.item_max + arguments.reply_max.max(PROTECTED);
            arguments.item_max = 0;
        }
        let _turn = self.turns.acquire().await.expect("never closed");
        let sequence = self.next.get();
        self.next.set(sequence + 1);
        let protect = |xid| Ok(self.protect(xid, procedure, sequence, bytes)?);
        let reply = client.send(protect, &arguments).await?;
        self.open(sequence, Reply::of(reply, client)?)
    }
}

impl Reply {
    /// The server's proof of a reply.
    fn verifier(&self) -> Result<&[u8], CallError> {
        match Incoming::decode(&mut Decoder::new(&self.message))? {
            Incoming::Reply(header) if header.verifier.flavor == flavor::RPCSEC_GSS => Ok(header.verifier.body),
            _ => {
                let text = "the server does not prove who it is".into();
                Err(GssError::Status { doing: "checking a reply", text, major: FAILURE, minor: 0 }.into())
            }
        }
    }
}
