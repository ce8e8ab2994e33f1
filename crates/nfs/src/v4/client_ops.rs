//! Operations on clients and sessions (RFC 8881, section 18.34 and on).

use super::callback::{self, Back};
use super::compound::{Compound, Done, Object, get_name};
use crate::security::SecuritySet;
use crate::state::session::{CACHED_MAX, ChannelLimits, OPERATIONS_MAX, SLOTS_MAX, Session};
use crate::state::{Callback, Maker, NewSession, Principal, State};
use crate::status::Status;
use std::sync::Arc;
use thruway_rpc::message::{AuthSys, flavor};
use thruway_rpc::server::{CALL_MAX, Credential};
use thruway_rpc::xdr::{self, Decoder, Encoder};
use thruway_server::slices;

/// Longest name of a client or a server (`NFS4_OPAQUE_LIMIT`).
pub(super) const OPAQUE_MAX: u32 = 1024;

/// Flags of EXCHANGE_ID: only an update of what is there; it was there; no pNFS.
const UPDATE: u32 = 0x4000_0000;
const CONFIRMED: u32 = 0x8000_0000;
const USE_NON_PNFS: u32 = 0x0001_0000;
/// All that a client may set.
const EXCHANGE_FLAGS: u32 = 0x4007_0107;
/// Flag of EXCHANGE_ID from version 4.2 on (RFC 7862, section 14.1).
const SUPPORTS_FENCE_OPS: u32 = 4;

/// Smallest request or reply of a session.
const MESSAGE_MIN: u32 = 512;

fn get_limits(d: &mut Decoder<'_>) -> xdr::Result<ChannelLimits> {
    let _padding = d.u32()?;
    let limits = ChannelLimits {
        request: d.u32()?,
        response: d.u32()?,
        cached: d.u32()?,
        operations: d.u32()?,
        requests: d.u32()?,
    };
    // How many RDMA Reads may be outstanding, of which connections know themselves.
    d.array(1, Decoder::u32)?;
    Ok(limits)
}

fn put_limits(out: &mut Encoder, limits: &ChannelLimits) {
    for word in [0, limits.request, limits.response, limits.cached, limits.operations, limits.requests, 0] {
        out.u32(word);
    }
}

/// `callback_sec_parms4`: the first of them by which the client can be called.
fn get_callback_security(d: &mut Decoder<'_>) -> xdr::Result<Option<callback::Credential>> {
    let mut first = None;
    for _ in 0..d.len(16)? {
        let flavor = d.u32()?;
        match flavor {
            flavor::AUTH_NONE => drop(first.get_or_insert(callback::Credential { flavor, body: Vec::new() })),
            flavor::AUTH_SYS => {
                let (_stamp, machine, uid, gid) = (d.u32()?, d.opaque(255)?.to_vec(), d.u32()?, d.u32()?);
                let body = AuthSys { machine, uid, gid, gids: d.array(16, Decoder::u32)? }.encode();
                first.get_or_insert(callback::Credential { flavor, body });
            }
            flavor::RPCSEC_GSS => drop((d.u32()?, d.opaque(OPAQUE_MAX)?, d.opaque(OPAQUE_MAX)?)),
            value => return Err(xdr::DecodeError::Invalid { value }),
        }
    }
    Ok(first)
}

impl Compound<'_> {
    pub(super) fn principal(&self) -> Principal {
        let (user, kerberos) = match &self.call.credential {
            Credential::Sys(sys) => (Some(sys.uid), None),
            Credential::Gss(caller) => (None, Some(caller.principal())),
            _ => (None, None),
        };
        Principal::new(user, kerberos, &self.call.connection.names)
    }

    pub(super) fn maker(&self) -> Maker {
        Maker { principal: self.principal(), origin: self.call.connection.origin() }
    }

    pub(super) async fn exchange_id(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (verifier, owner, flags) = (*d.fixed::<8>()?, d.opaque(OPAQUE_MAX)?, d.u32()?);
        match d.u32()? {
            0 => {}
            // Operations that only the machine's own principal may do (SP4_MACH_CRED) are not kept from others: clients go on without.
            1 => return Err(Status::INVAL.into()),
            2 => return Err(Status::ENCR_ALG_UNSUPP.into()),
            _ => return Err(Status::BADXDR.into()),
        }
        d.array(1, |d| Ok((d.opaque(OPAQUE_MAX)?, d.opaque(OPAQUE_MAX)?, d.i64()?, d.u32()?)))?;
        let known = if self.minor >= 2 { EXCHANGE_FLAGS } else { EXCHANGE_FLAGS & !SUPPORTS_FENCE_OPS };
        if flags & !known != 0 {
            return Err(Status::INVAL.into());
        }
        let maker = self.maker();
        let is_update = flags & UPDATE != 0;
        let exchange = self
            .server
            .retry_on_conflict(|state, now| state.exchange_id(now, owner, verifier, maker, is_update))
            .await?;
        let name = self.server.shares.server_name();
        out.u64(exchange.client);
        out.u32(exchange.sequence);
        out.u32(USE_NON_PNFS | if exchange.is_confirmed { CONFIRMED } else { 0 });
        // No protection of state.
        out.u32(0);
        // The server, one for all its addresses, and the scope of its handles.
        out.u64(0);
        out.opaque(&name);
        out.opaque(&name);
        out.u32(0);
        Ok(())
    }

    pub(super) async fn create_session(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        const FLAGS: u32 = 7;
        const BACK: u32 = 2;
        let (client, sequence, flags) = (d.u64()?, d.u32()?, d.u32()?);
        let (asked, asked_back) = (get_limits(d)?, get_limits(d)?);
        let program = d.u32()?;
        let credential = get_callback_security(d)?;
        if flags & !FLAGS != 0 {
            return Err(Status::INVAL.into());
        }
        if asked.request < MESSAGE_MIN || asked.response < MESSAGE_MIN {
            return Err(Status::TOOSMALL.into());
        }
        let limits = ChannelLimits {
            request: asked.request.min(CALL_MAX as u32),
            response: asked.response.min(CALL_MAX as u32),
            cached: asked.cached.min(CACHED_MAX),
            operations: asked.operations.clamp(1, OPERATIONS_MAX),
            requests: asked.requests.clamp(1, SLOTS_MAX),
        };
        // A client that wants to be called is, by the connections that it makes.
        let has_room =
            asked_back.operations >= 2 && asked_back.requests >= 1 && asked_back.request >= callback::CALL_MAX;
        let channel = self.call.connection.back.clone().filter(|_| flags & BACK != 0 && has_room);
        let back = channel.zip(credential).map(|(channel, how)| Back::new(program, how, channel));
        let mut callback = back.map(|back| Box::new(back) as Box<dyn Callback>);
        if callback.is_some() {
            self.server.begin_delegating();
        }
        let minor = self.minor;
        let principal = self.principal();
        // In one go: a session is there, or the client has the number for it still.
        let action = |state: &mut State, now| {
            let lease = match state.create_session(now, client, sequence, principal)? {
                NewSession::Again(reply) => return Ok(reply),
                NewSession::Make(lease) => lease,
            };
            let limits = state.with_room_for_replies(client, limits);
            // Not to be guessed: who knows it may use it.
            let id: [u8; 16] = thruway_engine::random::random();
            let mut reply = Encoder::new();
            reply.fixed(&id);
            reply.u32(sequence);
            // Replies are forgotten with the server; RDMA is known by its port.
            reply.u32(if callback.is_some() { BACK } else { 0 });
            put_limits(&mut reply, &limits);
            put_limits(&mut reply, &asked_back);
            let reply = reply.to_bytes().into_boxed_slice();
            let session = Session::new(id, client, lease, limits).with_callback(minor, callback.take());
            state.session_created(Arc::new(session), reply.clone());
            Ok(reply)
        };
        let reply = self.server.retry_on_conflict(action).await?;
        let name = self.server.state(|state, _| state.name_of(client));
        let peer = self.call.connection.peer.map(tracing::field::display);
        tracing::info!(peer, client = name, "a client of version 4.{minor} has a session");
        out.fixed(&reply);
        Ok(())
    }

    pub(super) fn destroy_session(&mut self, d: &mut Decoder<'_>) -> Done {
        let id = *d.fixed::<16>()?;
        // The session of the compound itself may only go with its last operation.
        if self.session() == Some(&id) && !self.is_last() {
            return Err(Status::NOT_ONLY_OP.into());
        }
        Ok(self.server.state(|state, _| state.destroy_session(&id))?)
    }

    pub(super) async fn destroy_client(&mut self, d: &mut Decoder<'_>) -> Done {
        let client = d.u64()?;
        self.server.state(|state, _| state.destroy_client(client))?;
        // After a restart nobody is to wait for it.
        Ok(self.server.store().await?)
    }

    /// Connections need not be bound to be used for a session, but for callbacks.
    pub(super) fn bind_connection(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        const FORE: u32 = 1;
        const BACK: u32 = 2;
        const FORE_OR_BOTH: u32 = 3;
        const BACK_OR_BOTH: u32 = 7;
        // What was asked for and what was done have other numbers (`channel_dir_from_client4`, `channel_dir_from_server4`).
        const BOTH: u32 = 3;
        let (id, direction, _use_rdma) = (*d.fixed::<16>()?, d.u32()?, d.bool()?);
        let session = self.server.state(|state, _| state.sessions.get(&id).cloned()).ok_or(Status::BADSESSION)?;
        let callback = Back::of(&session).zip(self.call.connection.back.clone());
        let done = match (direction, callback) {
            (FORE, _) => FORE,
            (BACK | FORE_OR_BOTH | BACK_OR_BOTH, Some((back, channel))) => {
                back.add(channel);
                if direction == BACK { BACK } else { BOTH }
            }
            (FORE_OR_BOTH, None) => FORE,
            (BACK | BACK_OR_BOTH, None) => return Err(Status::INVAL.into()),
            _ => return Err(Status::BADXDR.into()),
        };
        out.fixed(&id);
        out.u32(done);
        out.bool(false);
        Ok(())
    }

    /// BACKCHANNEL_CTL: sets the program and the credential of later callbacks.
    pub(super) fn control_back_channel(&mut self, d: &mut Decoder<'_>) -> Done {
        let (program, credential) = (d.u32()?, get_callback_security(d)?);
        let session = self.own_session().ok_or(Status::OP_NOT_IN_SESSION)?;
        // Callbacks never use RPCSEC_GSS, so a list with only its handles is refused (NOENT).
        let back = Back::of(session).ok_or(Status::INVAL)?;
        back.set_caller(program, credential.ok_or(Status::NOENT)?);
        Ok(())
    }

    pub(super) async fn reclaim_complete(&mut self, d: &mut Decoder<'_>) -> Done {
        let is_of_one = d.bool()?;
        let client = self.client()?;
        if is_of_one {
            // Of a file system that has moved here; none does.
            return self.object().map(drop).map_err(Into::into);
        }
        let done = self.server.state(|state, now| state.reclaim_complete(now, client));
        // What it opens from now on it may reclaim, and so it has to be known after a restart; also if the first attempt to
        // store that has failed.
        self.server.store().await?;
        Ok(done?)
    }

    pub(super) async fn test_stateids(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        const STATEIDS_MAX: u32 = 1024;
        /// Stateids that are as much work as another operation.
        const STATEIDS_OF_UNIT: usize = 32;
        let stateids = d.array(STATEIDS_MAX, crate::state::Stateid::decode)?;
        slices::spend(stateids.len() / STATEIDS_OF_UNIT).await;
        let client = self.client()?;
        self.server.state(|state, _| {
            out.array(&stateids, |out, stateid| {
                out.u32(state.test_stateid(client, *stateid).map_or_else(|status| status.0, |()| 0));
            });
        });
        Ok(())
    }

    pub(super) fn free_stateid(&mut self, d: &mut Decoder<'_>) -> Done {
        let (stateid, client) = (self.get_stateid(d)?, self.client()?);
        Ok(self.server.state(|state, _| state.free_stateid(client, stateid))?)
    }

    /// How callers are to show who they are where an entry is.
    pub(super) async fn secinfo(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let name = get_name(d)?;
        let client = &self.call.connection;
        let security = match (self.wrong_security.take(), self.current.as_ref()) {
            // Whether the entry is there is not for this caller to know.
            (Some(security), _) => security,
            (None, Some(Object::Root)) => {
                let share = self.server.shares.find(name);
                share.and_then(|share| share.security(client)).ok_or(Status::NOENT)?
            }
            _ => {
                let found = self.find(name).await?;
                self.security_of(&found)
            }
        };
        self.put_security(security, out);
        Ok(())
    }

    fn security_of(&self, object: &Object<'_>) -> SecuritySet {
        let client = &self.call.connection;
        match object {
            Object::Root => self.server.shares.security(client),
            Object::File(target) => target.share.security(client).unwrap_or_default(),
        }
    }

    pub(super) async fn secinfo_no_name(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let style = d.u32()?;
        let security = match (style, self.wrong_security.take()) {
            (0 | 1, Some(security)) => security,
            (0, None) => self.security_of(self.object()?),
            (1, None) => {
                let parent = self.parent().await?;
                self.security_of(&parent)
            }
            _ => return Err(Status::BADXDR.into()),
        };
        self.put_security(security, out);
        Ok(())
    }

    /// The current file is used up, but for version 4.0 (RFC 8881, section 2.6.3.1.1.8).
    fn put_security(&mut self, security: SecuritySet, out: &mut Encoder) {
        if self.minor > 0 {
            self.current = None;
            self.stateid = None;
        }
        security.encode(out);
    }
}
