//! NFS version 4, minor versions 1 and 2 (RFC 8881, RFC 7862, RFC 8276).
//!
//! A call is a compound of operations (`compound.rs`), which work on a current file. What clients have open and locked is in `state`,
//! which does no I/O; what has to outlive a restart of it is in `recovery.rs`.

mod attributes;
mod bitmap;
mod client_ops;
mod compound;
mod data_ops;
mod name_ops;
mod open_ops;
mod recovery;
mod session;
mod state;
mod status;
mod xattr_ops;

use self::compound::Compound;
use self::recovery::Recovery;
use self::state::{MayHave, Refused, State};
use self::status::Status;
use crate::share::Shares;
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thruway_rpc::message::{CallHeader, Refusal};
use thruway_rpc::server::{Answer, Call, Program};
use thruway_rpc::xdr::{self, Decoder, Encoder};

/// The program's number.
pub const PROGRAM: u32 = crate::v3::PROGRAM;

/// Minor versions that are served.
const MINOR_VERSIONS: RangeInclusive<u32> = 1..=2;

/// Numbers of operations, by the names of the RFCs.
mod op {
    pub(super) const ACCESS: u32 = 3;
    pub(super) const CLOSE: u32 = 4;
    pub(super) const COMMIT: u32 = 5;
    pub(super) const CREATE: u32 = 6;
    pub(super) const GETATTR: u32 = 9;
    pub(super) const GETFH: u32 = 10;
    pub(super) const LINK: u32 = 11;
    pub(super) const LOCK: u32 = 12;
    pub(super) const LOCKT: u32 = 13;
    pub(super) const LOCKU: u32 = 14;
    pub(super) const LOOKUP: u32 = 15;
    pub(super) const LOOKUPP: u32 = 16;
    pub(super) const NVERIFY: u32 = 17;
    pub(super) const OPEN: u32 = 18;
    pub(super) const OPEN_DOWNGRADE: u32 = 21;
    pub(super) const PUTFH: u32 = 22;
    pub(super) const PUTPUBFH: u32 = 23;
    pub(super) const PUTROOTFH: u32 = 24;
    pub(super) const READ: u32 = 25;
    pub(super) const READDIR: u32 = 26;
    pub(super) const READLINK: u32 = 27;
    pub(super) const REMOVE: u32 = 28;
    pub(super) const RENAME: u32 = 29;
    pub(super) const RESTOREFH: u32 = 31;
    pub(super) const SAVEFH: u32 = 32;
    pub(super) const SECINFO: u32 = 33;
    pub(super) const SETATTR: u32 = 34;
    pub(super) const VERIFY: u32 = 37;
    pub(super) const WRITE: u32 = 38;
    pub(super) const BIND_CONN_TO_SESSION: u32 = 41;
    pub(super) const EXCHANGE_ID: u32 = 42;
    pub(super) const CREATE_SESSION: u32 = 43;
    pub(super) const DESTROY_SESSION: u32 = 44;
    pub(super) const FREE_STATEID: u32 = 45;
    pub(super) const SECINFO_NO_NAME: u32 = 52;
    pub(super) const SEQUENCE: u32 = 53;
    pub(super) const TEST_STATEID: u32 = 55;
    pub(super) const DESTROY_CLIENTID: u32 = 57;
    pub(super) const RECLAIM_COMPLETE: u32 = 58;
    pub(super) const ALLOCATE: u32 = 59;
    pub(super) const COPY: u32 = 60;
    pub(super) const DEALLOCATE: u32 = 62;
    pub(super) const IO_ADVISE: u32 = 63;
    pub(super) const SEEK: u32 = 69;
    pub(super) const CLONE: u32 = 71;
    pub(super) const GETXATTR: u32 = 72;
    pub(super) const SETXATTR: u32 = 73;
    pub(super) const LISTXATTRS: u32 = 74;
    pub(super) const REMOVEXATTR: u32 = 75;
    pub(super) const ILLEGAL: u32 = 10_044;

    /// The last operation that a minor version has.
    pub(super) const LAST: [u32; 3] = [39, RECLAIM_COMPLETE, REMOVEXATTR];
}

/// Configuration of version 4.
pub struct Config {
    /// After this long without a word from a client, others may have what it has open and locked. As long after a restart, clients
    /// get back what they had, and nobody anything else.
    pub lease: Duration,
    /// Where it stands which clients have something open.
    pub state_file: Option<PathBuf>,
}

/// The program.
pub struct Nfs4 {
    shares: Arc<Shares>,
    state: Mutex<State>,
    recovery: Recovery,
    lease: Duration,
    started: Instant,
}

impl Nfs4 {
    /// Serves these shares.
    ///
    /// # Errors
    /// If the file with the clients of the last run cannot be read.
    pub fn new(shares: Arc<Shares>, config: Config) -> io::Result<Nfs4> {
        let (recovery, before) = Recovery::load(config.state_file)?;
        // Never that of an earlier run, whatever the clock says.
        let epoch = u32::from_be_bytes(thruway_engine::random::random::<4>());
        let state = State::new(epoch, config.lease.as_millis() as u64, before);
        Ok(Nfs4 { shares, state: Mutex::new(state), recovery, lease: config.lease, started: Instant::now() })
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Does something with the state of clients. What was kept open is let go when others can go on.
    fn state<T>(&self, action: impl FnOnce(&mut State, u64) -> T) -> T {
        let (result, dropped) = {
            let mut state = self.state.lock().expect("no panics under the lock");
            let result = action(&mut state, self.now());
            (result, state.take_dropped())
        };
        drop(dropped);
        result
    }

    /// As [`Nfs4::state`]; what clients have that are not heard of any more is taken from them if it is in the way.
    async fn contend<T>(&self, mut action: impl FnMut(&mut State, u64) -> Result<T, Refused>) -> Result<T, Refused> {
        loop {
            match self.state(&mut action) {
                Err(Refused::Expired(client)) => self.expire(client).await?,
                other => return other,
            }
        }
    }

    async fn expire(&self, client: u64) -> Result<(), Status> {
        if !self.state(|state, now| state.give_up(now, client)) {
            return Ok(());
        }
        // It must not reclaim, after a restart, what others have had meanwhile.
        if let Err(status) = self.store().await {
            self.state(|state, _| state.keep(client));
            return Err(status);
        }
        tracing::info!(client, "lease expired: what the client had open and locked goes to another");
        self.state(|state, _| state.expire(client));
        Ok(())
    }

    /// Whether a client may have something new, or have back what it had.
    async fn may_have(&self, client: u64, is_reclaim: bool) -> Result<MayHave, Status> {
        let records =
            self.state(
                |state, now| {
                    if is_reclaim { state.may_reclaim(now, client) } else { state.may_begin(now, client) }
                },
            )?;
        if !self.recovery.has(records) {
            self.store().await?;
        }
        Ok(MayHave::stored(client))
    }

    /// Brings to stable storage which clients have something.
    async fn store(&self) -> Result<(), Status> {
        self.recovery.store(|| self.state(|state, _| state.records())).await.map_err(|error| {
            tracing::error!(%error, "cannot note which clients have files open");
            Status::DELAY
        })
    }

    async fn answer(&self, call: &Call, results: Encoder) -> Result<Encoder, Refusal> {
        match call.procedure {
            0 => Ok(results),
            1 => Compound::run(self, call, results).await.map_err(|error| {
                tracing::debug!(%error, "a compound that cannot be decoded");
                Refusal::GarbageArguments
            }),
            _ => Err(Refusal::ProcedureUnavailable),
        }
    }
}

impl Program for Nfs4 {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        4..=4
    }

    /// The data of a WRITE behind SEQUENCE and PUTFH, as clients send it.
    fn find_bulk(&self, call: &CallHeader<'_>, arguments: &mut Decoder<'_>) -> xdr::Result<bool> {
        if call.procedure != 1 {
            return Ok(false);
        }
        let d = arguments;
        let _ = (d.opaque(compound::TAG_MAX)?, d.u32()?);
        for _ in 0..d.u32()? {
            match d.u32()? {
                op::SEQUENCE => drop((d.fixed::<16>()?, d.u32()?, d.u32()?, d.u32()?, d.u32()?)),
                op::PUTFH => drop(d.opaque(compound::HANDLE_MAX)?),
                op::WRITE => {
                    let _ = (state::Stateid::decode(d)?, d.u64()?, d.u32()?);
                    return Ok(true);
                }
                _ => return Ok(false),
            }
        }
        Ok(false)
    }

    fn call<'a>(&'a self, call: &'a Call, results: Encoder) -> Answer<'a> {
        Box::pin(async move { self.answer(call, results).await.into() })
    }
}

#[cfg(test)]
mod tests;
