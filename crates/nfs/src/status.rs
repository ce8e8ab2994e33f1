//! Statuses of version 4 (RFC 8881, section 15.1; RFC 7862, section 11; RFC 8276, section 8.5).

use rustix::io::Errno;
use thruway_rpc::xdr::DecodeError;

/// A status that is not success (`nfsstat4`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u32);

macro_rules! statuses {
    ($($name:ident = $number:expr,)*) => {
        impl Status {
            $(pub(crate) const $name: Status = Status($number);)*
        }
    };
}

statuses! {
    PERM = 1,
    NOENT = 2,
    ACCESS = 13,
    NOTDIR = 20,
    ISDIR = 21,
    INVAL = 22,
    FBIG = 27,
    NOSPC = 28,
    ROFS = 30,
    NAMETOOLONG = 63,
    STALE = 70,
    BADHANDLE = 10_001,
    BAD_COOKIE = 10_003,
    NOTSUPP = 10_004,
    TOOSMALL = 10_005,
    SERVERFAULT = 10_006,
    BADTYPE = 10_007,
    DELAY = 10_008,
    SAME = 10_009,
    DENIED = 10_010,
    EXPIRED = 10_011,
    LOCKED = 10_012,
    GRACE = 10_013,
    SHARE_DENIED = 10_015,
    WRONGSEC = 10_016,
    CLID_INUSE = 10_017,
    RESOURCE = 10_018,
    NOFILEHANDLE = 10_020,
    MINOR_VERS_MISMATCH = 10_021,
    STALE_CLIENTID = 10_022,
    STALE_STATEID = 10_023,
    OLD_STATEID = 10_024,
    BAD_STATEID = 10_025,
    BAD_SEQID = 10_026,
    NOT_SAME = 10_027,
    SYMLINK = 10_029,
    RESTOREFH = 10_030,
    ATTRNOTSUPP = 10_032,
    NO_GRACE = 10_033,
    RECLAIM_BAD = 10_034,
    BADXDR = 10_036,
    LOCKS_HELD = 10_037,
    OPENMODE = 10_038,
    BADOWNER = 10_039,
    BADCHAR = 10_040,
    BADNAME = 10_041,
    OP_ILLEGAL = 10_044,
    FILE_OPEN = 10_046,
    BADSESSION = 10_052,
    BADSLOT = 10_053,
    COMPLETE_ALREADY = 10_054,
    CONN_NOT_BOUND_TO_SESSION = 10_055,
    SEQ_MISORDERED = 10_063,
    SEQUENCE_POS = 10_064,
    REQ_TOO_BIG = 10_065,
    REP_TOO_BIG = 10_066,
    REP_TOO_BIG_TO_CACHE = 10_067,
    RETRY_UNCACHED_REP = 10_068,
    TOO_MANY_OPS = 10_070,
    OP_NOT_IN_SESSION = 10_071,
    CLIENTID_BUSY = 10_074,
    SEQ_FALSE_RETRY = 10_076,
    ENCR_ALG_UNSUPP = 10_079,
    BAD_HIGH_SLOT = 10_077,
    DEADSESSION = 10_078,
    NOT_ONLY_OP = 10_081,
    WRONG_TYPE = 10_083,
    DELEG_REVOKED = 10_087,
    UNION_NOTSUPP = 10_090,
    ADMIN_REVOKED = 10_047,
    NOXATTR = 10_095,
    XATTR2BIG = 10_096,
}

impl From<Errno> for Status {
    fn from(error: Errno) -> Status {
        Status(match error {
            Errno::PERM => 1,
            Errno::NOENT => 2,
            Errno::IO => 5,
            Errno::NXIO => 6,
            Errno::ACCESS | Errno::TXTBSY => 13,
            Errno::EXIST => 17,
            Errno::XDEV => 18,
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
            Errno::LOOP => return Status::SYMLINK,
            // Something is mounted there: that does not pass.
            Errno::BUSY => return Status::FILE_OPEN,
            Errno::NODATA => return Status::NOXATTR,
            Errno::TOOBIG | Errno::RANGE => return Status::XATTR2BIG,
            Errno::OPNOTSUPP | Errno::NOSYS => return Status::NOTSUPP,
            // Later it may work.
            Errno::AGAIN | Errno::INPROGRESS | Errno::NOMEM | Errno::TIMEDOUT | Errno::NFILE | Errno::MFILE => {
                return Status::DELAY;
            }
            error => {
                tracing::warn!(%error, "an error of the file system that NFS has no word for");
                return Status::SERVERFAULT;
            }
        })
    }
}

impl From<DecodeError> for Status {
    fn from(_: DecodeError) -> Status {
        Status::BADXDR
    }
}
