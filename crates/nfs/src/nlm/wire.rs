//! What the Network Lock Manager says, as bytes (version 4: RFC 1813, appendix II; X/Open XNFS).

use crate::share::HANDLE_MAX;
use crate::state::{Denied, Range};
use thruway_rpc::xdr::{self, Decoder, Encoder};

/// Most bytes of a name or of an owner (`MAXNAMELEN`, `MAXNETOBJ_SZ`).
const TEXT_MAX: u32 = 1024;
/// Most bytes of what pairs an answer with a call.
const COOKIE_MAX: u32 = 128;

/// Outcomes (`nlm4_stats`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub u32);

impl Status {
    pub(crate) const GRANTED: Status = Status(0);
    pub(crate) const DENIED: Status = Status(1);
    /// There is no room.
    pub(crate) const DENIED_NOLOCKS: Status = Status(2);
    /// It is waited for.
    pub(crate) const BLOCKED: Status = Status(3);
    /// Clients get back what they had before a restart; to be tried again.
    pub(crate) const DENIED_GRACE_PERIOD: Status = Status(4);
    pub(crate) const ROFS: Status = Status(6);
    pub(crate) const STALE_FH: Status = Status(7);
    pub(crate) const FBIG: Status = Status(8);
    pub(crate) const FAILED: Status = Status(9);
}

/// A lock (`nlm4_lock`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lock<'a> {
    /// As the client calls itself.
    pub caller: &'a [u8],
    pub handle: &'a [u8],
    /// The owner, as the client calls it: a process, and more.
    pub owner: &'a [u8],
    pub process: u32,
    pub offset: u64,
    /// 0: to the end of the file.
    pub len: u64,
}

impl<'a> Lock<'a> {
    pub(crate) fn decode(d: &mut Decoder<'a>) -> xdr::Result<Lock<'a>> {
        Ok(Lock {
            caller: d.opaque(TEXT_MAX)?,
            handle: d.opaque(HANDLE_MAX as u32)?,
            owner: d.opaque(TEXT_MAX)?,
            process: d.u32()?,
            offset: d.u64()?,
            len: d.u64()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Encoder) {
        for bytes in [self.caller, self.handle, self.owner] {
            out.opaque(bytes);
        }
        out.u32(self.process);
        out.u64(self.offset);
        out.u64(self.len);
    }

    /// What it covers. What would end behind the last possible byte is to the end of the file; `FBIG` if it begins there.
    pub(crate) fn range(&self) -> Result<Range, Status> {
        if i64::try_from(self.offset).is_err() {
            return Err(Status::FBIG);
        }
        let to_the_end = Range { start: self.offset, last: u64::MAX };
        Ok(if self.len == 0 { to_the_end } else { Range::new(self.offset, self.len).unwrap_or(to_the_end) })
    }

    /// The owner among those of its client.
    pub(crate) fn key(&self) -> Box<[u8]> {
        [&self.process.to_be_bytes(), self.owner].concat().into()
    }
}

/// Length of a range, as this protocol has it.
pub(crate) fn len_of(range: Range) -> u64 {
    if range.last == u64::MAX { 0 } else { range.len() }
}

/// The parts of [`Lock::key`]: the process, and the owner as the client calls it.
pub(crate) fn owner_of(key: &[u8]) -> (u32, &[u8]) {
    key.split_first_chunk().map_or((0, key), |(process, owner)| (u32::from_be_bytes(*process), owner))
}

pub(crate) fn get_cookie<'a>(d: &mut Decoder<'a>) -> xdr::Result<&'a [u8]> {
    d.opaque(COOKIE_MAX)
}

/// NLM_TEST (`nlm4_testargs`), and NLM_GRANTED.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Test<'a> {
    pub cookie: &'a [u8],
    pub is_write: bool,
    pub lock: Lock<'a>,
}

impl<'a> Test<'a> {
    pub(crate) fn decode(d: &mut Decoder<'a>) -> xdr::Result<Test<'a>> {
        Ok(Test { cookie: get_cookie(d)?, is_write: d.bool()?, lock: Lock::decode(d)? })
    }

    pub(crate) fn encode(&self, out: &mut Encoder) {
        out.opaque(self.cookie);
        out.bool(self.is_write);
        self.lock.encode(out);
    }
}

/// NLM_LOCK (`nlm4_lockargs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Take<'a> {
    pub cookie: &'a [u8],
    /// The client waits for it.
    pub is_waiting: bool,
    pub is_write: bool,
    pub lock: Lock<'a>,
    pub is_reclaim: bool,
    /// The number of the client's start, or 0.
    pub start: u32,
}

impl<'a> Take<'a> {
    pub(crate) fn decode(d: &mut Decoder<'a>) -> xdr::Result<Take<'a>> {
        let (cookie, is_waiting, is_write) = (get_cookie(d)?, d.bool()?, d.bool()?);
        Ok(Take { cookie, is_waiting, is_write, lock: Lock::decode(d)?, is_reclaim: d.bool()?, start: d.u32()? })
    }
}

/// NLM_CANCEL (`nlm4_cancargs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cancel<'a> {
    pub cookie: &'a [u8],
    pub is_write: bool,
    pub lock: Lock<'a>,
}

impl<'a> Cancel<'a> {
    pub(crate) fn decode(d: &mut Decoder<'a>) -> xdr::Result<Cancel<'a>> {
        let (cookie, _is_waiting, is_write) = (get_cookie(d)?, d.bool()?, d.bool()?);
        Ok(Cancel { cookie, is_write, lock: Lock::decode(d)? })
    }
}

/// NLM_UNLOCK (`nlm4_unlockargs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unlock<'a> {
    pub cookie: &'a [u8],
    pub lock: Lock<'a>,
}

impl<'a> Unlock<'a> {
    pub(crate) fn decode(d: &mut Decoder<'a>) -> xdr::Result<Unlock<'a>> {
        Ok(Unlock { cookie: get_cookie(d)?, lock: Lock::decode(d)? })
    }
}

/// NLM_SHARE and NLM_UNSHARE (`nlm4_shareargs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share<'a> {
    pub cookie: &'a [u8],
    pub caller: &'a [u8],
    pub handle: &'a [u8],
    pub owner: &'a [u8],
    /// What is denied to others, and what is done: 1 is reading, 2 is writing.
    pub deny: u32,
    pub access: u32,
    pub is_reclaim: bool,
}

impl<'a> Share<'a> {
    pub(crate) fn decode(d: &mut Decoder<'a>) -> xdr::Result<Share<'a>> {
        let modes = |d: &mut Decoder<'a>| match d.u32()? {
            modes @ 0..=3 => Ok(modes),
            value => Err(xdr::DecodeError::Invalid { value }),
        };
        Ok(Share {
            cookie: get_cookie(d)?,
            caller: d.opaque(TEXT_MAX)?,
            handle: d.opaque(HANDLE_MAX as u32)?,
            owner: d.opaque(TEXT_MAX)?,
            deny: modes(d)?,
            access: modes(d)?,
            is_reclaim: d.bool()?,
        })
    }
}

/// A name and a number: NLM_FREE_ALL, and NSM's notices.
pub(crate) fn get_notice<'a>(d: &mut Decoder<'a>) -> xdr::Result<(&'a [u8], u32)> {
    Ok((d.opaque(TEXT_MAX)?, d.u32()?))
}

/// `nlm4_res`
pub(crate) fn put_result(out: &mut Encoder, cookie: &[u8], status: Status) {
    out.opaque(cookie);
    out.u32(status.0);
}

/// `nlm4_testres`
pub(crate) fn put_test_result(out: &mut Encoder, cookie: &[u8], result: Result<(), Result<Denied, Status>>) {
    match result {
        Ok(()) => put_result(out, cookie, Status::GRANTED),
        Err(Err(status)) => put_result(out, cookie, status),
        Err(Ok(denied)) => {
            put_result(out, cookie, Status::DENIED);
            // Owners of other versions are no processes.
            let (process, owner) = if denied.is_monitored { owner_of(&denied.owner) } else { (0, &denied.owner[..]) };
            out.bool(denied.is_write);
            out.u32(process);
            out.opaque(owner);
            out.u64(denied.range.start);
            out.u64(len_of(denied.range));
        }
    }
}
