//! A client of the protocols, as far as listing, measuring and tests need one: it keeps nothing, and asks for one thing at a time.

mod compound;
mod remote;
mod v3;
mod v4;

pub(crate) use remote::decode_results;
pub use remote::{ChooseRdma, NfsFileSystem, NfsOptions};
pub use v3::Nfs3Client;
pub use v4::{Listed, Nfs4Client};

use crate::security::Security;
use crate::status::Status;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;
use thruway_rpc::client::{Arguments, CallError, Client, GssSession, Procedure, Reply};
use thruway_rpc::gss::Service;
use thruway_rpc::message::{AuthSys, OpaqueAuth, flavor};
use thruway_rpc::xdr::DecodeError;
use thruway_vfs::Credentials;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The call had no results.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The server says so.
    #[error("{operation}: {}", describe(*.status))]
    Status {
        /// The name of the operation, as in the RFC.
        operation: &'static str,
        /// `nfsstat3` or `nfsstat4`.
        status: u32,
    },
    /// A listing has more entries than this.
    #[error("a listing of more than {0} entries")]
    TooLong(usize),
    /// The results cannot be decoded.
    #[error("results that cannot be decoded: {0}")]
    Malformed(#[from] DecodeError),
}

impl ClientError {
    /// Status of the operation that has failed.
    fn status(&self) -> Option<Status> {
        if let ClientError::Status { status, .. } = self { Some(Status(*status)) } else { None }
    }
}

/// Result of what a client asks for.
pub type Result<T> = std::result::Result<T, ClientError>;

/// A status for people. The first of them are error numbers of Unix, of which some are others in Linux.
fn describe(status: u32) -> String {
    let known = match status {
        10_001 => "not a handle (NFS4ERR_BADHANDLE)",
        10_041 => "not a name of an entry (NFS4ERR_BADNAME)",
        10_004 => "not supported (NFS4ERR_NOTSUPP)",
        10_006 => "the server has failed (NFS4ERR_SERVERFAULT)",
        10_008 => "busy, to be asked for later (NFS4ERR_DELAY)",
        10_013 => "the server waits for clients from before its restart (NFS4ERR_GRACE)",
        10_016 => "not with this kind of credential (NFS4ERR_WRONGSEC)",
        10_021 => "this minor version is not served (NFS4ERR_MINOR_VERS_MISMATCH)",
        63 => "the name is too long (NFS4ERR_NAMETOOLONG)",
        66 => "the directory is not empty (NFS4ERR_NOTEMPTY)",
        69 => "the quota is exceeded (NFS4ERR_DQUOT)",
        70 => "the file is gone (NFS4ERR_STALE)",
        1..=31 => return std::io::Error::from_raw_os_error(status as i32).to_string(),
        _ => return format!("status {status}"),
    };
    known.into()
}

/// Lists what is under a path of names from the root of all shares of a server on: the entries of a directory, or the file that it
/// is. Blocks; each answer is waited for at most for `timeout`.
///
/// # Errors
/// [`ClientError`]
pub fn list(server: SocketAddr, timeout: Duration, caller: &Caller, path: &[Vec<u8>]) -> Result<Vec<Listed>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CallError::from)?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let rpc = Client::connect(server, timeout).await.map_err(CallError::from)?;
        let user = caller.credential(&rpc).await?;
        v4::list(&rpc, &user, path).await
    })
}

/// As whom calls are to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// As a user, as this process says (`AUTH_SYS`).
    User {
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
    },
    /// As the user whose tickets of Kerberos this process has.
    Kerberos {
        /// The server's name: its service is `nfs@HOST`.
        host: String,
        /// What protects the calls.
        service: Service,
    },
}

impl Caller {
    /// As the user that this process runs as, who shows in this way who it is, to a server with this name.
    pub fn own(security: Security, host: &str) -> Caller {
        match security {
            Security::Kerberos(service) => Caller::Kerberos { host: host.into(), service },
            Security::Sys => {
                Caller::User { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
            }
        }
    }

    /// What shows that to a server; it may be asked for that first.
    ///
    /// # Errors
    /// If there are no tickets, or the server does not take them.
    pub async fn credential(&self, rpc: &Client) -> std::result::Result<UserCredential, CallError> {
        match self {
            Caller::User { uid, gid } => Ok(UserCredential::new(*uid, *gid)),
            Caller::Kerberos { host, service } => {
                let null = Procedure { program: crate::v4::PROGRAM, version: 4, procedure: 0 };
                let session = GssSession::begin(rpc, null, &format!("nfs@{host}"), *service).await?;
                Ok(UserCredential(Kind::Gss(Rc::new(session))))
            }
        }
    }
}

/// What shows who calls.
#[derive(Clone)]
pub struct UserCredential(Kind);

#[derive(Clone)]
enum Kind {
    /// The body of a credential of `AUTH_SYS`.
    Sys(Vec<u8>),
    Gss(Rc<GssSession>),
}

impl UserCredential {
    /// As this user and group, without a name of this host or more groups.
    pub fn new(uid: u32, gid: u32) -> UserCredential {
        UserCredential(Kind::Sys(AuthSys { machine: Vec::new(), uid, gid, gids: Vec::new() }.encode()))
    }

    /// As a user with a group and more groups, of which 16 have room.
    pub(crate) fn of(who: &Credentials, machine: &[u8]) -> UserCredential {
        const GROUPS_MAX: usize = 16;
        let gids = who.groups.iter().copied().take(GROUPS_MAX).collect();
        UserCredential(Kind::Sys(AuthSys { machine: machine.to_vec(), uid: who.uid, gid: who.gid, gids }.encode()))
    }

    async fn call(
        &self,
        rpc: &Client,
        procedure: Procedure,
        arguments: impl Into<Arguments>,
    ) -> std::result::Result<Reply, CallError> {
        match &self.0 {
            Kind::Sys(body) => rpc.call(procedure, OpaqueAuth { flavor: flavor::AUTH_SYS, body }, arguments).await,
            Kind::Gss(session) => session.call(rpc, procedure, arguments).await,
        }
    }
}

/// A handle of a server's.
pub type Handle = Box<[u8]>;
