//! Statuses of version 3 (RFC 1813, section 2.6).

use crate::share::HandleError;
use rustix::io::Errno;

/// A status that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u32);

impl Status {
    pub(super) const ACCESS: Status = Status(13);
    pub(super) const INVAL: Status = Status(22);
    pub(super) const ROFS: Status = Status(30);
    pub(super) const NAMETOOLONG: Status = Status(63);
    pub(super) const STALE: Status = Status(70);
    pub(super) const BADHANDLE: Status = Status(10_001);
    pub(super) const BAD_COOKIE: Status = Status(10_003);
    pub(super) const NOT_SYNC: Status = Status(10_002);
    pub(super) const NOTSUPP: Status = Status(10_004);
    pub(super) const TOOSMALL: Status = Status(10_005);
    pub(super) const SERVERFAULT: Status = Status(10_006);
    pub(super) const BADTYPE: Status = Status(10_007);
    pub(super) const JUKEBOX: Status = Status(10_008);
}

impl From<Errno> for Status {
    fn from(error: Errno) -> Status {
        Status(match error {
            Errno::PERM => 1,
            Errno::NOENT => 2,
            Errno::IO => 5,
            Errno::NXIO => 6,
            Errno::ACCESS => 13,
            Errno::EXIST => 17,
            Errno::XDEV => 18,
            Errno::NODEV => 19,
            Errno::NOTDIR => 20,
            Errno::ISDIR => 21,
            Errno::INVAL => 22,
            Errno::FBIG => 27,
            Errno::NOSPC => 28,
            Errno::ROFS => 30,
            Errno::MLINK => 31,
            Errno::NAMETOOLONG => 63,
            Errno::NOTEMPTY => 66,
            Errno::DQUOT => 69,
            Errno::STALE => 70,
            Errno::OPNOTSUPP | Errno::NOSYS => return Status::NOTSUPP,
            Errno::TXTBSY | Errno::BUSY => return Status::ACCESS,
            // Later it may work.
            Errno::AGAIN | Errno::INPROGRESS | Errno::NOMEM | Errno::TIMEDOUT | Errno::NFILE | Errno::MFILE => {
                return Status::JUKEBOX;
            }
            error => {
                tracing::warn!(%error, "an error of the file system that NFS has no word for");
                return Status::SERVERFAULT;
            }
        })
    }
}

impl From<HandleError> for Status {
    fn from(error: HandleError) -> Status {
        match error {
            HandleError::Malformed => Status::BADHANDLE,
            HandleError::Stale => Status::STALE,
            HandleError::UnknownCaller => Status::JUKEBOX,
            HandleError::NotAllowed | HandleError::WrongSecurity => Status::ACCESS,
        }
    }
}
