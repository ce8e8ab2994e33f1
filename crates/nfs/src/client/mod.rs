//! A client of the protocols, as far as listing, measuring and tests need one: it keeps nothing, and asks for one thing at a time.

mod compound;
mod v3;
mod v4;

pub use v3::Nfs3Client;
pub use v4::{Listed, Nfs4Client};

use std::net::SocketAddr;
use std::time::Duration;
use thruway_rpc::client::{CallError, Client};
use thruway_rpc::message::{AuthSys, OpaqueAuth, flavor};
use thruway_rpc::xdr::DecodeError;

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

/// Result of what a client asks for.
pub type Result<T> = std::result::Result<T, ClientError>;

/// A status for people. The first of them are error numbers of Unix.
fn describe(status: u32) -> String {
    let known = match status {
        10_001 => "not a handle (NFS4ERR_BADHANDLE)",
        10_004 => "not supported (NFS4ERR_NOTSUPP)",
        10_006 => "the server has failed (NFS4ERR_SERVERFAULT)",
        10_008 => "busy, to be asked for later (NFS4ERR_DELAY)",
        10_013 => "the server waits for clients from before its restart (NFS4ERR_GRACE)",
        10_016 => "not with this kind of credential (NFS4ERR_WRONGSEC)",
        10_021 => "this minor version is not served (NFS4ERR_MINOR_VERS_MISMATCH)",
        1..=133 => return std::io::Error::from_raw_os_error(status as i32).to_string(),
        _ => return format!("status {status}"),
    };
    known.into()
}

/// Lists what is under a path of names from the root of all shares of a server on: the entries of a directory, or the file that it
/// is. Blocks; each answer is waited for at most for `timeout`.
///
/// # Errors
/// [`ClientError`]
pub fn list(server: SocketAddr, timeout: Duration, user: &UserCredential, path: &[Vec<u8>]) -> Result<Vec<Listed>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CallError::from)?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let rpc = Client::connect(server, timeout).await.map_err(CallError::from)?;
        v4::list(&rpc, user, path).await
    })
}

/// The credential of a user, without a name of this host or more groups than one.
pub struct UserCredential(Vec<u8>);

impl UserCredential {
    /// Of this user and group.
    pub fn new(uid: u32, gid: u32) -> UserCredential {
        UserCredential(AuthSys { machine: Vec::new(), uid, gid, gids: Vec::new() }.encode())
    }

    fn as_auth(&self) -> OpaqueAuth<'_> {
        OpaqueAuth { flavor: flavor::AUTH_SYS, body: &self.0 }
    }
}

/// A handle of a server's.
pub type Handle = Box<[u8]>;
