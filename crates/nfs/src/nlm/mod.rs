//! The Network Lock Manager, version 4: locks and share modes for clients of NFS version 3 (X/Open XNFS, chapters 9 to 11). They are
//! of the same state as those of version 4, so that clients of all versions exclude each other.
//!
//! A client that waits for a lock is called when it has it (`calls.rs`). Until it answers, the grant can be taken back (`grants.rs`).

mod calls;
mod grants;
pub(crate) mod wire;

use self::calls::Caller;
use self::wire::{Cancel, Share, Status, Take, Test, Unlock};
use crate::share::{HandleError, Target};
use crate::state::{Denied, Host, PendingGrant, Refused, State};
use crate::status::Status as V4;
use crate::v4;
use rustix::io::Errno;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_rpc::message::{AuthError, Refusal};
use thruway_rpc::server::{Answer, Call, Outcome, Program};
use thruway_rpc::xdr::{self, Encoder};
use thruway_vfs::{Kind, Rights};

/// The program's number.
pub const PROGRAM: u32 = 100_021;

/// The version that NFS version 3 uses.
pub const VERSION: u32 = 4;

/// Procedures. Those of which there is a `_MSG` have the answer called back, five numbers behind the call.
mod procedure {
    pub(super) const TEST: u32 = 1;
    pub(super) const LOCK: u32 = 2;
    pub(super) const CANCEL: u32 = 3;
    pub(super) const UNLOCK: u32 = 4;
    pub(super) const GRANTED: u32 = 5;
    pub(super) const TEST_MSG: u32 = 6;
    pub(super) const UNLOCK_MSG: u32 = 9;
    /// From a call to the same one whose answer is called back, and from that to the answer.
    pub(super) const TO_MSG: u32 = 5;
    pub(super) const GRANTED_RES: u32 = 15;
    pub(super) const SHARE: u32 = 20;
    pub(super) const UNSHARE: u32 = 21;
    pub(super) const NM_LOCK: u32 = 22;
    pub(super) const FREE_ALL: u32 = 23;
}

/// Attempts at a call, and the pause between two ([`retry_briefly`]).
const ATTEMPTS_MAX: u32 = 20;
const AGAIN_AFTER: Duration = Duration::from_millis(10);

/// The program.
pub struct Nlm {
    caller: Arc<Caller>,
}

fn status_of(refused: Refused) -> Status {
    use crate::status::Status as V4;
    match refused {
        Refused::Denied(_) | Refused::Status(V4::SHARE_DENIED | V4::RECLAIM_BAD) => Status::DENIED,
        Refused::Status(V4::NOSPC | V4::RESOURCE) => Status::DENIED_NOLOCKS,
        // The client comes again.
        Refused::Delegated | Refused::Expired(_) | Refused::Status(V4::GRACE | V4::NO_GRACE | V4::DELAY) => {
            Status::DENIED_GRACE_PERIOD
        }
        Refused::Status(_) => Status::FAILED,
    }
}

fn host_of(call: &Call, caller: &[u8]) -> Option<Host> {
    let ip = |address: Option<std::net::SocketAddr>| -> Option<IpAddr> { Some(address?.ip().to_canonical()) };
    Some(Host { address: ip(call.connection.peer)?, local: ip(call.connection.local)?, name: caller.into() })
}

/// Who can change nothing keeps nobody out.
fn check_excludes(target: &Target<'_>, keeps_out: bool) -> Result<(), Status> {
    if keeps_out && target.read_only { Err(Status::ROFS) } else { Ok(()) }
}

/// Does something that may have to wait, for a moment, until what is delegated has been given back or another reason has passed.
async fn retry_briefly<T>(mut attempt: impl AsyncFnMut() -> Result<T, Refused>) -> Result<T, Refused> {
    for _ in 1..ATTEMPTS_MAX {
        match attempt().await {
            Err(Refused::Delegated | Refused::Status(V4::DELAY)) => tokio::time::sleep(AGAIN_AFTER).await,
            other => return other,
        }
    }
    attempt().await
}

impl Nlm {
    /// The locks of the shares that version 4 has.
    pub fn new(v4: &v4::Nfs4) -> Nlm {
        let caller = Arc::new(Caller::new(Arc::clone(&v4.0)));
        let give = Arc::downgrade(&caller);
        let give = move |freed: PendingGrant| {
            if let Some(caller) = give.upgrade() {
                calls::give(caller, freed);
            }
        };
        // There is one lock manager.
        let _ = v4.0.lock_waits.set(Box::new(give));
        Nlm { caller }
    }

    /// Calls the clients that had locks before this start, so that they reclaim them. To be called when the server listens.
    pub fn notify_clients(&self, reactors: &Reactors) {
        self.caller.notify_clients(reactors);
    }

    fn server(&self) -> &Arc<v4::Server> {
        &self.caller.server
    }

    fn target(&self, call: &Call, handle: &[u8]) -> Result<Target<'_>, Status> {
        self.server().shares.target(handle, call).map_err(|error| match error {
            HandleError::Stale | HandleError::Malformed => Status::STALE_FH,
            // The client comes again.
            HandleError::UnknownCaller => Status::DENIED_GRACE_PERIOD,
            // Linux's clients lock without Kerberos, whatever they have mounted with.
            HandleError::NotAllowed | HandleError::WrongSecurity => Status::FAILED,
        })
    }

    /// A file that this user may lock: one that the user may read or write, or owns.
    async fn lockable(&self, call: &Call, handle: &[u8], is_write: bool) -> Result<Target<'_>, Status> {
        let target = self.target(call, handle)?;
        let wanted = Rights { read: true, write: is_write, execute: false };
        let (rights, attributes) =
            target.share.files.rights(&target.who, &target.file, wanted).await.map_err(|error| match error {
                Errno::STALE => Status::STALE_FH,
                _ => Status::FAILED,
            })?;
        match attributes.kind {
            Kind::Regular if rights.read || rights.write || attributes.uid == target.who.uid => Ok(target),
            Kind::Regular => Err(Status::DENIED),
            _ => Err(Status::FAILED),
        }
    }

    async fn take(&self, call: &Call, args: &Take<'_>) -> Result<Status, Status> {
        let target = self.lockable(call, args.lock.handle, args.is_write).await?;
        check_excludes(&target, args.is_write)?;
        let host = host_of(call, args.lock.caller).ok_or(Status::FAILED)?;
        let (file, owner, range) = (target.key(), args.lock.key(), args.lock.range()?);
        let server = self.server();
        let attempt = async || {
            let client = server.retry_on_conflict(|state, now| state.monitored(now, &host, args.start)).await?;
            let may_have = server.may_have(client, args.is_reclaim).await?;
            let action = |state: &mut State, now| {
                let result = state.lock_monitored(now, may_have, &owner, &file, args.is_write, range);
                if result.is_ok() {
                    // The client knows now that it has it.
                    state.has_been_locked(client, &owner, &file, args.is_write, range);
                    self.caller.changed(&calls::lock_owner(client, &owner, &file), range);
                }
                if !args.is_waiting || !matches!(result, Err(Refused::Denied(_))) {
                    return result.map(|()| Status::GRANTED);
                }
                if !self.caller.has_room_for_grant(&host) {
                    return Ok(Status::DENIED_NOLOCKS);
                }
                let (host, owner, file) = (host.clone(), owner.clone(), file.clone());
                let (handle, is_write, since) = (args.lock.handle.into(), args.is_write, now);
                let wait = PendingGrant { number: 0, client, host, owner, file, handle, is_write, range, since };
                Ok(if state.wait_monitored(wait) { Status::BLOCKED } else { Status::DENIED_NOLOCKS })
            };
            server.retry_on_conflict(action).await
        };
        let status = retry_briefly(attempt).await.map_err(status_of)?;
        if status == Status::BLOCKED {
            tracing::debug!(host = %host.address, ?range, "a lock is waited for");
        }
        Ok(status)
    }

    async fn test(&self, call: &Call, args: &Test<'_>) -> Result<(), Result<Denied, Status>> {
        let target = self.lockable(call, args.lock.handle, args.is_write).await.map_err(Err)?;
        let host = host_of(call, args.lock.caller).ok_or(Err(Status::FAILED))?;
        let (file, owner, range) = (target.key(), args.lock.key(), args.lock.range().map_err(Err)?);
        let server = self.server();
        // What clients had before a restart may not be known yet.
        if server.state(|state, now| state.is_grace(now)) {
            return Err(Err(Status::DENIED_GRACE_PERIOD));
        }
        let client = server.state(|state, _| state.known_host(&host));
        let action = |state: &mut State, now| state.test_monitored(now, client, &owner, &file, args.is_write, range);
        retry_briefly(async || server.retry_on_conflict(action).await).await.map_err(|refused| match refused {
            Refused::Denied(denied) => Ok(denied),
            refused => Err(status_of(refused)),
        })
    }

    async fn cancel(&self, call: &Call, args: &Cancel<'_>) -> Result<Status, Status> {
        let file = self.target(call, args.lock.handle)?.key();
        let host = host_of(call, args.lock.caller).ok_or(Status::FAILED)?;
        let (owner, range) = (args.lock.key(), args.lock.range()?);
        let server = self.server();
        let Some(client) = server.state(|state, _| state.known_host(&host)) else { return Ok(Status::GRANTED) };
        // It may have been given the lock just now, and not know.
        let cancelled = self.caller.cancel(&calls::lock_owner(client, &owner, &file), args.is_write, range).await;
        cancelled.map_err(|status| status_of(status.into()))
    }

    async fn unlock(&self, call: &Call, args: &Unlock<'_>) -> Result<Status, Status> {
        let file = self.target(call, args.lock.handle)?.key();
        let host = host_of(call, args.lock.caller).ok_or(Status::FAILED)?;
        let (owner, range) = (args.lock.key(), args.lock.range()?);
        let server = self.server();
        if let Some(client) = server.state(|state, _| state.known_host(&host)) {
            let lock_owner = calls::lock_owner(client, &owner, &file);
            let unlock = |state: &mut State, _| {
                state.unlock_monitored(client, &owner, &file, range)?;
                state.end_waits(client, &owner, &file, range, |_| true);
                self.caller.changed(&lock_owner, range);
                Ok(())
            };
            server.state(unlock).map_err(|status: V4| status_of(status.into()))?;
            self.caller.calls_ended(&lock_owner).await;
        }
        Ok(Status::GRANTED)
    }

    async fn share(&self, call: &Call, args: &Share<'_>) -> Result<Status, Status> {
        let target = self.lockable(call, args.handle, args.access & 2 != 0).await?;
        check_excludes(&target, args.access & 2 != 0 || args.deny != 0)?;
        let host = host_of(call, args.caller).ok_or(Status::FAILED)?;
        let file = target.key();
        let server = self.server();
        let attempt = async || {
            let client = server.retry_on_conflict(|state, now| state.monitored(now, &host, 0)).await?;
            let may_have = server.may_have(client, args.is_reclaim).await?;
            let modes = (args.access, args.deny);
            server.retry_on_conflict(|state, now| state.share_monitored(now, may_have, args.owner, &file, modes)).await
        };
        retry_briefly(attempt).await.map_err(status_of)?;
        Ok(Status::GRANTED)
    }

    fn unshare(&self, call: &Call, args: &Share<'_>) -> Result<Status, Status> {
        let file = self.target(call, args.handle)?.key();
        let host = host_of(call, args.caller).ok_or(Status::FAILED)?;
        self.server().state(|state, _| {
            if let Some(client) = state.known_host(&host) {
                state.unshare_monitored(client, args.owner, &file);
            }
        });
        Ok(Status::GRANTED)
    }

    /// Does what one of the procedures says whose answers may be called back; the client's name, and the answer.
    async fn answer_to(&self, call: &Call, procedure: u32, out: &mut Encoder) -> xdr::Result<Vec<u8>> {
        let mut d = call.arguments();
        let either = |result: Result<Status, Status>| result.unwrap_or_else(|status| status);
        let caller = match procedure {
            procedure::TEST => {
                let args = Test::decode(&mut d)?;
                d.finish()?;
                wire::put_test_result(out, args.cookie, self.test(call, &args).await);
                args.lock.caller
            }
            procedure::CANCEL => {
                let args = Cancel::decode(&mut d)?;
                d.finish()?;
                wire::put_result(out, args.cookie, either(self.cancel(call, &args).await));
                args.lock.caller
            }
            procedure::UNLOCK => {
                let args = Unlock::decode(&mut d)?;
                d.finish()?;
                wire::put_result(out, args.cookie, either(self.unlock(call, &args).await));
                args.lock.caller
            }
            // LOCK and NM_LOCK, of clients that do not say when they restart.
            _ => {
                let args = Take::decode(&mut d)?;
                d.finish()?;
                wire::put_result(out, args.cookie, either(self.take(call, &args).await));
                args.lock.caller
            }
        };
        Ok(caller.to_vec())
    }

    async fn answer(&self, call: &Call, out: &mut Encoder) -> xdr::Result<Result<(), Refusal>> {
        match call.procedure {
            0 => {}
            _ if !self.server().shares.admit(&call.connection) => return Ok(Err(Refusal::Auth(AuthError::TooWeak))),
            procedure @ (procedure::TEST
            | procedure::LOCK
            | procedure::CANCEL
            | procedure::UNLOCK
            | procedure::NM_LOCK) => {
                self.server().shares.learn_user(call).await;
                self.answer_to(call, procedure, out).await?;
            }
            procedure @ procedure::TEST_MSG..=procedure::UNLOCK_MSG => {
                self.server().shares.learn_user(call).await;
                let mut results = Encoder::new();
                let caller = self.answer_to(call, procedure - procedure::TO_MSG, &mut results).await?;
                if let Some(host) = host_of(call, &caller) {
                    self.caller.send_result(host, procedure + procedure::TO_MSG, &results);
                }
            }
            procedure @ (procedure::SHARE | procedure::UNSHARE) => {
                self.server().shares.learn_user(call).await;
                let mut d = call.arguments();
                let args = Share::decode(&mut d)?;
                d.finish()?;
                let result = match procedure {
                    procedure::SHARE => self.share(call, &args).await,
                    _ => self.unshare(call, &args),
                };
                wire::put_result(out, args.cookie, result.unwrap_or_else(|status| status));
                // A sequence number, which has never meant anything.
                out.u32(0);
            }
            procedure::FREE_ALL => {
                let mut d = call.arguments();
                let (name, _) = wire::get_notice(&mut d)?;
                d.finish()?;
                if let Some(host) = host_of(call, name) {
                    self.server().state(|state, _| state.forget_host(&host));
                }
            }
            // Answers to what we have not called in this way.
            procedure::GRANTED_RES => {}
            _ => return Ok(Err(Refusal::ProcedureUnavailable)),
        }
        Ok(Ok(()))
    }
}

impl Program for Nlm {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        VERSION..=VERSION
    }

    /// A lock that has been given back must not be taken again by the copy of an old call.
    fn is_repeatable(&self, call: &Call) -> bool {
        matches!(call.procedure, 0 | procedure::TEST | procedure::GRANTED)
    }

    fn call<'a>(&'a self, call: &'a Call, mut results: Encoder) -> Answer<'a> {
        Box::pin(async move {
            let done = self.answer(call, &mut results).await;
            Outcome::of(done, results)
        })
    }
}
