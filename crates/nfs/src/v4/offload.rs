//! COPY on this server (RFC 7862, section 15.2): done before it is answered, or afterwards, with a callback when it has ended.

use super::Server;
use super::callback::{Answer, Back};
use super::compound::{Compound, Done, Failure, user};
use super::data_ops::check_range;
use crate::share::FileHandle;
use crate::share::Policy;
use crate::state::{Notice, Refused, Stateid};
use crate::status::Status;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_engine::reactor;
use thruway_rpc::xdr::{Decoder, Encoder};
use thruway_server::caller;
use thruway_vfs::{As, Credentials};
use tokio::time::sleep;

/// From this length on, a copy is answered before it is done, if the client wants that.
const OFFLOAD_FROM: u64 = 64 << 20;

/// After this long another copy ends early, and the client asks for the rest: a call is to be answered.
const COPY_TIME_MAX: Duration = Duration::from_secs(5);

/// A client that could not be called about the end of its copy is called again after this long, and then after twice as long each
/// time.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(5);

/// A file, how the client has it open, and where in it the copy begins.
struct End {
    handle: FileHandle,
    stateid: Stateid,
    at: u64,
}

/// A copy that goes on after it has been answered.
struct Copying {
    server: Arc<Server>,
    client: u64,
    number: u64,
    stateid: Stateid,
    is_writing: Arc<tokio::sync::Mutex<()>>,
    who: Credentials,
    /// What the client may do, as it was when it asked.
    policy: Arc<Policy>,
    from: End,
    to: End,
    len: u64,
    copied: u64,
    verifier: u64,
}

/// `write_response4`, of what is not flushed.
pub(super) fn put_written(out: &mut Encoder, callback: Option<Stateid>, count: u64, verifier: u64) {
    match callback {
        Some(stateid) => {
            out.u32(1);
            stateid.encode(out);
        }
        None => out.u32(0),
    }
    out.u64(count);
    out.u32(0);
    out.u64(verifier);
}

impl Compound<'_> {
    /// COPY
    pub(super) async fn copy(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (from, to) = (self.get_stateid(d)?, self.get_stateid(d)?);
        let (from_at, to_at, len) = (d.u64()?, d.u64()?, d.u64()?);
        let (_consecutive, is_synchronous) = (d.bool()?, d.bool()?);
        if d.u32()? != 0 {
            // From another server.
            return Err(Status::NOTSUPP.into());
        }
        let (source, target, size, access) = self.source_and_target(from, to).await?;
        let files = &target.share.files;
        if from_at > size || len > size - from_at {
            return Err(Status::INVAL.into());
        }
        // A length of 0 means up to the end.
        let len = if len == 0 { size - from_at } else { len };
        check_range(to_at, len)?;
        // It is done in pieces, of which the first could change what the last copies (RFC 7862, section 15.2.3).
        if source.file == target.file && from_at.abs_diff(to_at) < len {
            return Err(Status::INVAL.into());
        }
        let verifier = files.write_verifier();
        let is_open = !from.is_special() && !to.is_special();
        if !is_synchronous && len >= OFFLOAD_FROM && is_open && self.can_call() {
            let client = self.client()?;
            if let Some((number, stateid, is_writing)) = self.server.state(|state, _| state.begin_offload(client)) {
                let handle = |of: &crate::share::Target<'_>| self.server.shares.handle(of.share, &of.file);
                let copying = Copying {
                    server: Arc::clone(self.server),
                    client,
                    number,
                    stateid,
                    is_writing,
                    who: target.who.clone(),
                    policy: target.share.policy(),
                    from: End { handle: handle(source), stateid: from, at: from_at },
                    to: End { handle: handle(target), stateid: to, at: to_at },
                    len,
                    copied: 0,
                    verifier,
                };
                reactor::start(caller::on_behalf_of(self.call.connection.origin(), copying.run()));
                put_written(out, Some(stateid), 0, verifier);
                // In one piece, and not done.
                out.bool(true);
                out.bool(false);
                return Ok(());
            }
        }
        let user = user(target, access.iter().all(|access| access.is_open));
        let (begun, mut copied) = (Instant::now(), 0);
        while copied < len && begun.elapsed() < COPY_TIME_MAX {
            let (from, to) = ((&source.file, from_at + copied), (&target.file, to_at + copied));
            match files.copy(user, from, to, len - copied, false).await {
                // The source has become shorter.
                Ok(0) => break,
                Ok(more) => copied += more,
                Err(_) if copied > 0 => break,
                Err(error) => return Err(error.into()),
            }
        }
        put_written(out, None, copied, verifier);
        out.bool(true);
        out.bool(true);
        Ok(())
    }

    /// OFFLOAD_STATUS
    pub(super) fn offload_status(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (stateid, client) = (self.get_stateid(d)?, self.client()?);
        let progress = self.server.state(|state, _| state.offload_progress(client, stateid))?;
        out.u64(progress.copied);
        let ended: Vec<u32> =
            progress.ended.iter().map(|ended| ended.as_ref().err().map_or(0, |status| status.0)).collect();
        out.array(&ended, |out, status| out.u32(*status));
        Ok(())
    }

    /// OFFLOAD_CANCEL
    pub(super) async fn offload_cancel(&mut self, d: &mut Decoder<'_>) -> Done {
        let (stateid, client) = (self.get_stateid(d)?, self.client()?);
        let is_writing = self.server.state(|state, _| state.cancel_offload(client, stateid))?;
        // Nothing of it is written after the answer.
        drop(is_writing.lock().await);
        Ok(())
    }
}

impl Copying {
    /// Copies, and tells the client how that has ended.
    async fn run(mut self) {
        let mut result = Ok(());
        while self.copied < self.len {
            match self.advance().await {
                // It is cancelled, or its client is gone.
                Ok(None) => return,
                // The source has become shorter.
                Ok(Some(0)) => break,
                Ok(Some(more)) => self.copied += more,
                // The client asks for the rest, and learns then why.
                Err(_) if self.copied > 0 => break,
                Err(failure) => {
                    result = Err(failure.status);
                    break;
                }
            }
        }
        let (number, copied) = (self.number, self.copied);
        self.server.state(|state, _| {
            state.offload_copied(number, copied);
            state.end_offload(number, result);
        });
        self.tell(result).await;
    }

    /// Copies some more; `None` if that is not to be.
    async fn advance(&self) -> Result<Option<u64>, Failure> {
        // As for a call: the reactor does something else in between.
        tokio::task::yield_now().await;
        let _is_writing = self.is_writing.lock().await;
        if !self.server.state(|state, _| state.offload_copied(self.number, self.copied)) {
            return Ok(None);
        }
        let (share, from) = self.server.shares.resolve(&self.from.handle)?;
        let (_, to) = self.server.shares.resolve(&self.to.handle)?;
        // The rules have been read again: the client asks for the rest under those of now.
        if !Arc::ptr_eq(&self.policy, &share.policy()) {
            return Err(Status::ACCESS.into());
        }
        let (keys, uid) = ([share.identity(&from), share.identity(&to)], self.who.uid);
        // The client may have closed them meanwhile.
        let access = self.server.state(|state, now| {
            let can_read = state.access(now, self.client, uid, self.from.stateid.latest(), &keys[0], false)?;
            let can_write = state.access(now, self.client, uid, self.to.stateid.latest(), &keys[1], true)?;
            Ok::<_, Refused>(can_read && can_write)
        });
        let user = As { who: &self.who, is_open: access? };
        let (from, to) = ((&from, self.from.at + self.copied), (&to, self.to.at + self.copied));
        Ok(Some(share.files.copy(user, from, to, self.len - self.copied, false).await?))
    }

    /// Calls the client until it knows how its copy has ended, or is gone.
    async fn tell(self, result: Result<(), Status>) {
        let mut again_after = AGAIN_AFTER;
        let notice = Notice::Copied {
            handle: self.to.handle[..].into(),
            stateid: self.stateid,
            result,
            copied: self.copied,
            verifier: self.verifier,
        };
        while let Ok(session) = self.server.state(|state, _| state.offload_session(self.number)) {
            if let Some(session) = session
                && let Some(back) = Back::of(&session)
            {
                match back.send_in_turn(&session, &notice).await {
                    Ok(Answer { status, is_of_notice: true }) if status == Status::DELAY.0 => {}
                    // It renews its session, perhaps.
                    Ok(Answer { status, is_of_notice: false }) => {
                        tracing::debug!(client = self.client, status, "end of a copy refused");
                    }
                    // Whatever it says, it has got it.
                    Ok(Answer { status, .. }) => {
                        tracing::debug!(client = self.client, status, copied = self.copied, "end of a copy answered");
                        self.server.state(|state, _| state.forget_offload(self.number));
                        return;
                    }
                    Err(error) => tracing::debug!(client = self.client, %error, "end of a copy not answered"),
                }
            }
            sleep(again_after).await;
            again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
        }
    }
}
