//! What version 4.0 has instead of sessions (RFC 7530): operations on clients, and owners whose operations are numbered.

use super::bitmap::Bitmap;
use super::client_ops::OPAQUE_MAX;
use super::compound::{Compound, Done, Failure, HANDLE_MAX, TAG_MAX};
use super::op;
use super::open_ops::{get_claim, get_owner};
use crate::state::{Reply, Role, State, Stateid, Turn};
use crate::status::Status;
use thruway_rpc::xdr::{self, Decoder, Encoder};

/// Longest name of a network, and address there, of a client's callbacks.
const ADDRESS_MAX: u32 = 256;

/// Longest result that is kept: none of these operations has a longer one.
const REPLY_MAX: usize = 4 << 10;

/// Whose number an operation has.
enum Numbered<'a> {
    /// The owner with this name of a client.
    Opener(u64, &'a [u8]),
    /// That of what is open.
    Open(Stateid),
    /// That of what is locked.
    Locks(Stateid),
}

/// Whether an operation is one of those that are numbered.
pub(super) fn is_numbered(number: u32) -> bool {
    [op::OPEN, op::OPEN_CONFIRM, op::OPEN_DOWNGRADE, op::CLOSE, op::LOCK, op::LOCKU].contains(&number)
}

/// Whether a call may be done again when its client repeats it (RFC 7530, section 9.1.9): not if something is made, removed or
/// changed, of which the second time would not be the first. Sessions see to that themselves.
pub(super) fn is_repeatable(arguments: &[u8]) -> bool {
    /// Of the first operation that does anything.
    fn decoded(d: &mut Decoder<'_>) -> xdr::Result<bool> {
        let (_tag, minor) = (d.opaque(TAG_MAX)?, d.u32()?);
        if minor > 0 {
            return Ok(true);
        }
        for _ in 0..d.u32()? {
            match d.u32()? {
                op::PUTROOTFH | op::PUTPUBFH | op::SAVEFH | op::RESTOREFH | op::GETFH | op::LOOKUPP => {}
                op::PUTFH => drop(d.opaque(HANDLE_MAX)?),
                op::LOOKUP => drop(d.opaque(OPAQUE_MAX)?),
                op::ACCESS => drop(d.u32()?),
                op::GETATTR => drop(Bitmap::decode(d)?),
                op::VERIFY | op::NVERIFY => drop(super::attributes::get_raw(d)?),
                op::WRITE | op::CREATE | op::LINK | op::REMOVE | op::RENAME | op::SETATTR | op::RELEASE_LOCKOWNER => {
                    return Ok(false);
                }
                other => return Ok(!is_numbered(other)),
            }
        }
        Ok(true)
    }
    decoded(&mut Decoder::new(arguments)).unwrap_or(true)
}

/// Whether the first operation behind the file's handle is a WRITE.
pub(super) fn is_write(arguments: &[u8]) -> bool {
    let mut d = Decoder::new(arguments);
    let mut decoded = || {
        let (_tag, _minor, _count) = (d.opaque(TAG_MAX)?, d.u32()?, d.u32()?);
        let (put, _handle, next) = (d.u32()?, d.opaque(HANDLE_MAX)?, d.u32()?);
        xdr::Result::Ok(put == op::PUTFH && next == op::WRITE)
    };
    decoded().unwrap_or(false)
}

/// The number of an operation, and whose it is.
fn get_number<'a>(operation: u32, d: &mut Decoder<'a>) -> Done<(u32, Numbered<'a>)> {
    Ok(match operation {
        op::OPEN => {
            let (number, _access, _deny) = (d.u32()?, d.u32()?, d.u32()?);
            let (client, owner) = get_owner(d)?;
            (number, Numbered::Opener(client, owner))
        }
        op::CLOSE => {
            let number = d.u32()?;
            (number, Numbered::Open(Stateid::decode(d)?))
        }
        op::OPEN_CONFIRM | op::OPEN_DOWNGRADE => {
            let stateid = Stateid::decode(d)?;
            (d.u32()?, Numbered::Open(stateid))
        }
        op::LOCK => {
            let (_type, _reclaim, _at, _len) = (d.u32()?, d.u32()?, d.u64()?, d.u64()?);
            if d.bool()? {
                let number = d.u32()?;
                (number, Numbered::Open(Stateid::decode(d)?))
            } else {
                let stateid = Stateid::decode(d)?;
                (d.u32()?, Numbered::Locks(stateid))
            }
        }
        op::LOCKU => {
            let (_type, number) = (d.u32()?, d.u32()?);
            (number, Numbered::Locks(Stateid::decode(d)?))
        }
        _ => unreachable!("an operation that is numbered"),
    })
}

impl<'a> Compound<'a> {
    /// Does an operation of version 4.0 in its turn, once.
    pub(super) async fn numbered(&mut self, operation: u32, d: &mut Decoder<'a>, out: &mut Encoder) -> Done {
        let (number, whose) = get_number(operation, &mut Decoder::new(d.rest()))?;
        let find = |state: &mut State, now| match whose {
            Numbered::Opener(client, owner) => {
                let client = state.heard_of(now, client)?;
                state.numbered(now, client, Role::Opens, owner)
            }
            Numbered::Open(stateid) => state.numbered_by(now, stateid, Role::Opens),
            Numbered::Locks(stateid) => state.numbered_by(now, stateid, Role::Locks),
        };
        let owner = self.server.retry_on_conflict(find).await?;
        let mut numbers = owner.lock().await;
        if let (Numbered::Opener(client, _), false) = (&whose, numbers.is_confirmed) {
            // What it has opened may be due to an old message, which has come late.
            if let Some(open) = numbers.unconfirmed {
                self.server.state(|state, _| state.close_unconfirmed(*client, open));
            }
            numbers.restart();
        }
        let turn = numbers.turn(number, operation)?;
        if let Turn::Again(reply) = turn {
            return self.again(operation, reply, d, out).await;
        }
        self.opener_is_confirmed = numbers.is_confirmed;
        let start = out.len();
        let done = self.operation(operation, d, out).await;
        numbers.is_confirmed |= self.opener_is_confirmed || operation == op::OPEN_CONFIRM && done.is_ok();
        numbers.unconfirmed = if numbers.is_confirmed { None } else { self.stateid };
        let (status, body) = match &done {
            Ok(()) => (0, out.to_bytes()[start..].into()),
            Err(Failure { status, body }) => {
                (status.0, body.as_ref().map(Encoder::to_bytes).unwrap_or_default().into())
            }
        };
        let reply = Reply { operation, status, body, handle: self.handle().ok().map(|handle| handle[..].into()) };
        if reply.body.len() <= REPLY_MAX {
            numbers.done(number, reply);
        } else {
            numbers.count(number, status);
        }
        done
    }

    /// The reply that an operation had.
    async fn again(&mut self, operation: u32, reply: Reply, d: &mut Decoder<'a>, out: &mut Encoder) -> Done {
        if reply.status != 0 {
            let body = Encoder::behind(reply.body.into());
            return Err(Failure { status: Status(reply.status), body: Some(body) });
        }
        // What follows is still to be decoded.
        match operation {
            op::OPEN => {
                let _ = (d.u32()?, d.u32()?, d.u32()?);
                get_owner(d)?;
                self.get_creation(d).await?;
                get_claim(d, self.minor)?;
            }
            op::CLOSE | op::OPEN_CONFIRM => drop(d.fixed::<20>()?),
            op::OPEN_DOWNGRADE => drop(d.fixed::<28>()?),
            op::LOCKU => drop(d.fixed::<40>()?),
            op::LOCK => {
                let _ = (d.u32()?, d.u32()?, d.u64()?, d.u64()?);
                if d.bool()? {
                    d.fixed::<24>()?;
                    get_owner(d)?;
                } else {
                    d.fixed::<20>()?;
                }
            }
            _ => unreachable!("an operation that is numbered"),
        }
        if let Some(handle) = reply.handle {
            self.set_handle(&handle)?;
        }
        out.fixed(&reply.body);
        Ok(())
    }

    /// SETCLIENTID
    pub(super) async fn set_client(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (verifier, name) = (*d.fixed::<8>()?, d.opaque(OPAQUE_MAX)?);
        // Where it is to be called. Nothing is delegated, so that it never is.
        let _ = (d.u32()?, d.opaque(ADDRESS_MAX)?, d.opaque(ADDRESS_MAX)?, d.u32()?);
        let maker = self.maker();
        let set = self.server.retry_on_conflict(|state, now| state.set_client(now, name, verifier, maker)).await;
        let (client, confirmation) = set.map_err(Failure::from).map_err(|failure| match failure.status {
            Status::CLID_INUSE => {
                // Where the other client is, which is its own affair.
                let mut body = Encoder::new();
                body.opaque(b"");
                body.opaque(b"");
                Failure { body: Some(body), ..failure }
            }
            _ => failure,
        })?;
        out.u64(client);
        out.fixed(&confirmation);
        Ok(())
    }

    /// SETCLIENTID_CONFIRM
    pub(super) async fn confirm_client(&mut self, d: &mut Decoder<'_>) -> Done {
        let (client, confirmation) = (d.u64()?, *d.fixed::<8>()?);
        let principal = self.principal();
        let name = self.server.state(|state, now| {
            state.confirm_client(now, client, confirmation, principal).map(|()| state.name_of(client))
        })?;
        let peer = self.call.connection.peer.map(tracing::field::display);
        tracing::info!(peer, client = name, "a client of version 4.0 is here");
        // One of its name that has gone is not to be waited for after a restart.
        Ok(self.server.store().await?)
    }

    /// RENEW
    pub(super) fn renew(&mut self, d: &mut Decoder<'_>) -> Done {
        let client = d.u64()?;
        self.server.state(|state, now| state.heard_of(now, client))?;
        Ok(())
    }

    /// RELEASE_LOCKOWNER
    pub(super) fn release_lock_owner(&mut self, d: &mut Decoder<'_>) -> Done {
        let (client, owner) = get_owner(d)?;
        self.server.state(|state, now| {
            let client = state.heard_of(now, client)?;
            state.release_locks_of(client, owner)
        })?;
        Ok(())
    }

    /// OPEN_CONFIRM
    pub(super) fn confirm_open(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (stateid, _number) = (Stateid::decode(d)?, d.u32()?);
        let file = self.target()?.key();
        let stateid = self.server.state(|state, now| {
            let client = state.heard_of_by(now, stateid)?;
            state.confirm_open(client, stateid, &file)
        })?;
        stateid.encode(out);
        Ok(())
    }

    /// The client that an operation says it is of: that of its session, or one of version 4.0.
    pub(super) fn client_that_says(&self, client: u64) -> Result<u64, Status> {
        if self.minor > 0 {
            return self.client();
        }
        self.server.state(|state, now| state.heard_of(now, client))
    }

    /// The client that has what a stateid stands for: that of the session, or one of version 4.0; 0 if nothing is open.
    pub(super) fn client_with(&self, stateid: Stateid) -> Result<u64, Status> {
        if self.minor > 0 {
            return self.client();
        }
        self.server.state(|state, now| state.heard_of_by(now, stateid))
    }
}
