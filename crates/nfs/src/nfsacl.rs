//! Access control lists of POSIX for clients of version 3: the program NFSACL, version 3, which Solaris has introduced and Linux's client uses
//! beside NFS, on the same connection. No RFC describes it; this is what Linux's client and server say (`fs/nfs/nfs3acl.c`,
//! `fs/nfsd/nfs3acl.c`).

use crate::share::{HANDLE_MAX, Shares, Target};
use crate::v3::put_after;
use crate::v3::status::Status;
use rustix::io::Errno;
use std::ops::RangeInclusive;
use std::sync::Arc;
use thruway_rpc::message::{AuthError, Refusal};
use thruway_rpc::server::{Answer, Call, Outcome, Program};
use thruway_rpc::xdr::{self, DecodeError, Decoder, Encoder};
use thruway_vfs::acl::{Acl, BadAcl, PosixAcl, tag};

/// The program's number.
pub const PROGRAM: u32 = 100_227;

/// Most entries of a list (`NFS_ACL_MAX_ENTRIES`).
const ENTRIES_MAX: u32 = 1024;

/// What is asked for, or set.
mod which {
    pub(super) const ACCESS: u32 = 1;
    pub(super) const ACCESS_COUNT: u32 = 2;
    pub(super) const DEFAULT: u32 = 4;
    pub(super) const DEFAULT_COUNT: u32 = 8;
    pub(super) const ALL: u32 = 15;
}

/// A flag of the kinds of entries of a default list.
const OF_DEFAULT: u32 = 0x1000;

/// The program.
pub struct NfsAcl {
    shares: Arc<Shares>,
}

/// A list, as it is said: nothing if it has no entries.
type Said = Result<Option<PosixAcl>, BadAcl>;

fn get_list(d: &mut Decoder<'_>) -> xdr::Result<Said> {
    let _count = d.u32()?;
    let entries = d.array(ENTRIES_MAX, |d| Ok((d.u32()? & !OF_DEFAULT, d.u32()?, d.u32()?)))?;
    if entries.is_empty() {
        return Ok(Ok(None));
    }
    let named = entries.iter().any(|(kind, ..)| *kind == tag::USER.into() || *kind == tag::GROUP.into());
    // A list without named entries comes with a mask that means nothing.
    let meant = entries.into_iter().filter(|(kind, ..)| named || *kind != tag::MASK.into());
    let narrow = |(kind, id, bits): (u32, u32, u32)| {
        (u16::try_from(kind).unwrap_or(0), id, u8::try_from(bits).unwrap_or(u8::MAX))
    };
    Ok(PosixAcl::from_entries(meant.map(narrow)).map(Some))
}

fn put_list(out: &mut Encoder, list: Option<&PosixAcl>, owner: (u32, u32), flag: u32) {
    let Some(acl) = list else {
        out.u32(0);
        return out.u32(0);
    };
    let mut entries = acl.entries();
    if acl.mask.is_none() {
        // Clients want four at least.
        entries.insert(entries.len() - 1, (tag::MASK, 0, acl.group));
    }
    out.u32(entries.len() as u32);
    out.array(&entries, |out, (kind, id, bits)| {
        let id = match *kind {
            tag::USER_OBJ => owner.0,
            tag::GROUP_OBJ => owner.1,
            tag::USER | tag::GROUP => *id,
            _ => 0,
        };
        [u32::from(*kind) | flag, id, (*bits).into()].into_iter().for_each(|word| out.u32(word));
    });
}

impl NfsAcl {
    /// Serves these shares.
    pub fn new(shares: Arc<Shares>) -> NfsAcl {
        NfsAcl { shares }
    }

    async fn get(&self, target: &Target<'_>, wanted: u32, out: &mut Encoder) -> Result<(), Errno> {
        target.look(None).await?;
        let acl = target.share.files.acl(&target.file).await?;
        let attributes = target.share.files.attributes(&target.file).await?;
        let owner = (attributes.uid, attributes.gid);
        out.u32(0);
        put_after(out, Some(&attributes));
        out.u32(wanted);
        let access = (wanted & (which::ACCESS | which::ACCESS_COUNT) != 0).then_some(&acl.access);
        put_list(out, access, owner, 0);
        let default = acl.default.as_ref().filter(|_| wanted & (which::DEFAULT | which::DEFAULT_COUNT) != 0);
        put_list(out, default, owner, OF_DEFAULT);
        Ok(())
    }

    async fn set(&self, target: &Target<'_>, which: u32, access: Said, default: Said) -> Result<(), Errno> {
        if target.read_only {
            return Err(Errno::ROFS);
        }
        let (access, default) = (access.map_err(|_| Errno::INVAL)?, default.map_err(|_| Errno::INVAL)?);
        let _change = target.change(None).await?;
        let files = &target.share.files;
        let now = files.acl(&target.file).await?;
        // What is not said stays.
        let acl = Acl {
            access: if which & which::ACCESS != 0 { access.ok_or(Errno::INVAL)? } else { now.access },
            default: if which & which::DEFAULT != 0 { default } else { now.default },
        };
        files.set_acl(&target.who, &target.file, acl).await
    }

    async fn answer(&self, call: &Call, out: &mut Encoder) -> xdr::Result<Result<(), Refusal>> {
        const GETACL: u32 = 1;
        const SETACL: u32 = 2;
        let mut d = call.arguments();
        match call.procedure {
            0 => {}
            _ if !self.shares.admit(&call.connection) => return Ok(Err(Refusal::Auth(AuthError::TooWeak))),
            procedure @ (GETACL | SETACL) => {
                let (handle, wanted) = (d.opaque(HANDLE_MAX as u32)?, d.u32()?);
                let lists = if procedure == SETACL { Some((get_list(&mut d)?, get_list(&mut d)?)) } else { None };
                d.finish()?;
                if wanted & !which::ALL != 0 {
                    return Err(DecodeError::Invalid { value: wanted });
                }
                self.shares.learn_user(call).await;
                let target = match self.shares.target(handle, call) {
                    Ok(target) => target,
                    Err(error) => {
                        out.u32(Status::from(error).0);
                        put_after(out, None);
                        return Ok(Ok(()));
                    }
                };
                let begun = out.mark();
                let done = match lists {
                    None => self.get(&target, wanted, out).await,
                    Some((access, default)) => {
                        let done = self.set(&target, wanted, access, default).await;
                        if done.is_ok() {
                            out.u32(0);
                            put_after(out, target.attributes().await.as_ref());
                        }
                        done
                    }
                };
                if let Err(error) = done {
                    out.truncate(begun);
                    out.u32(Status::from(error).0);
                    put_after(out, target.attributes().await.as_ref());
                }
                return Ok(Ok(()));
            }
            _ => return Ok(Err(Refusal::ProcedureUnavailable)),
        }
        d.finish()?;
        Ok(Ok(()))
    }
}

impl Program for NfsAcl {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        3..=3
    }

    fn call<'a>(&'a self, call: &'a Call, mut results: Encoder) -> Answer<'a> {
        Box::pin(async move {
            let done = self.answer(call, &mut results).await;
            Outcome::of(done, results)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(entries: &[(u32, u32, u32)]) -> Vec<u8> {
        let mut out = Encoder::new();
        out.u32(entries.len() as u32);
        out.array(entries, |out, (kind, id, bits)| [*kind, *id, *bits].into_iter().for_each(|word| out.u32(word)));
        out.to_bytes()
    }

    #[test]
    fn lists_go_there_and_back() {
        let acl = PosixAcl { users: vec![(1000, 7)], mask: Some(7), ..PosixAcl::from_mode(0o754) };
        for (acl, count) in [(PosixAcl::from_mode(0o640), 4), (acl, 5)] {
            let mut out = Encoder::new();
            put_list(&mut out, Some(&acl), (5, 6), OF_DEFAULT);
            let encoded = out.to_bytes();
            assert_eq!(encoded[..4], u32::to_be_bytes(count));
            assert_eq!(encoded[8..20], [0, 0, 0x10, 1, 0, 0, 0, 5, 0, 0, 0, acl.owner]);
            let mut d = Decoder::new(&encoded);
            assert_eq!(get_list(&mut d), Ok(Ok(Some(acl))));
            assert_eq!(d.finish(), Ok(()));
        }
        assert_eq!(get_list(&mut Decoder::new(&bytes(&[]))), Ok(Ok(None)));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let owner = (1, 0, 6);
        for wrong in [
            &[owner][..],
            &[owner, (4, 0, 4), (0x20, 0, 8)],
            &[owner, (4, 0, 4), (0x20, 0, 0x1_0004)],
            &[owner, (4, 0, 4), (0x20, 0, 4), (0x1_0001, 0, 4)],
            &[owner, owner, (4, 0, 4), (0x20, 0, 4)],
            &[owner, (2, 7, 4), (4, 0, 4), (0x20, 0, 4)],
        ] {
            assert_eq!(get_list(&mut Decoder::new(&bytes(wrong))), Ok(Err(BadAcl)), "{wrong:?}");
        }
        let mut many = Encoder::new();
        [2000, 2000].into_iter().for_each(|word| many.u32(word));
        assert!(get_list(&mut Decoder::new(&many.to_bytes())).is_err());
    }
}
