//! The MOUNT protocol of NFS version 3 (RFC 1813, appendix I): names of shares to handles. It keeps no list of who has mounted
//! what, which no server gets right.

use crate::security::{Security, SecuritySet};
use crate::share::Shares;
use rustix::io::Errno;
use std::ops::RangeInclusive;
use std::sync::Arc;
use thruway_rpc::message::Refusal;
use thruway_rpc::server::{Answer, Call, Outcome, Program};
use thruway_rpc::xdr::{self, Encoder};

/// The program's number.
pub const PROGRAM: u32 = 100_005;

/// Most bytes of a path.
const PATH_MAX: u32 = 1024;

/// The program.
pub struct Mount {
    shares: Arc<Shares>,
}

impl Mount {
    /// Serves these shares.
    pub fn new(shares: Arc<Shares>) -> Mount {
        Mount { shares }
    }

    /// The handle of a path: a share's name, and behind it perhaps directories; and how callers show there who they are.
    async fn mount(&self, call: &Call, path: &[u8]) -> Result<(Vec<u8>, SecuritySet), Errno> {
        let mut names = path.split(|b| *b == b'/').filter(|name| !name.is_empty()).peekable();
        let share = names.next().and_then(|name| self.shares.find(name)).ok_or(Errno::NOENT)?;
        let Some(security) = share.security(&call.connection) else {
            self.shares.note_refusal(&call.connection, share);
            return Err(Errno::ACCESS);
        };
        let root = share.files.root();
        // A client that has not shown who it is learns of no names in the share.
        if names.peek().is_none() {
            return Ok((self.shares.handle(share, &root).to_vec(), security));
        }
        let target = share.enter(root, call).ok().filter(|_| !call.connection.lacks_tls());
        let mut target = target.ok_or(Errno::ACCESS)?;
        for name in names {
            target.file = share.files.look_up(&target.who, &target.file, name).await?.0;
        }
        Ok((self.shares.handle(share, &target.file).to_vec(), security))
    }

    async fn answer(&self, call: &Call, out: &mut Encoder) -> xdr::Result<Result<(), Refusal>> {
        let mut d = call.arguments();
        match call.procedure {
            // NULL; DUMP, of whom there is nobody; UMNTALL.
            0 | 4 => {}
            2 => out.bool(false),
            1 => {
                let path = d.opaque(PATH_MAX)?;
                if self.shares.admit(&call.connection) {
                    self.shares.learn_user(call).await;
                }
                match self.mount(call, path).await {
                    Ok((handle, security)) => {
                        out.u32(0);
                        out.opaque(&handle);
                        let flavors: Vec<u32> = security.iter().map(Security::pseudo_flavor).collect();
                        out.array(&flavors, |out, flavor| out.u32(*flavor));
                        let path = String::from_utf8_lossy(path);
                        tracing::info!(peer = call.connection.peer.map(tracing::field::display), ?path, "mounted");
                    }
                    Err(error) => out.u32(match error {
                        Errno::PERM => 1,
                        Errno::NOENT => 2,
                        Errno::ACCESS => 13,
                        Errno::NOTDIR => 20,
                        Errno::NAMETOOLONG => 63,
                        _ => 5,
                    }),
                }
            }
            3 => drop(d.opaque(PATH_MAX)?),
            5 => {
                // Those of which the client may know.
                for share in self.shares.iter().filter(|share| share.security(&call.connection).is_some()) {
                    out.bool(true);
                    out.opaque(format!("/{}", share.name).as_bytes());
                    for rule in &share.policy().rules {
                        out.bool(true);
                        out.opaque(rule.clients.to_string().as_bytes());
                    }
                    out.bool(false);
                }
                out.bool(false);
            }
            _ => return Ok(Err(Refusal::ProcedureUnavailable)),
        }
        d.finish()?;
        Ok(Ok(()))
    }
}

impl Program for Mount {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        3..=3
    }

    /// Clients do not use TLS for it, also where they do for the share.
    fn needs_tls(&self) -> bool {
        false
    }

    fn call<'a>(&'a self, call: &'a Call, mut results: Encoder) -> Answer<'a> {
        Box::pin(async move {
            let done = self.answer(call, &mut results).await;
            Outcome::of(done, results)
        })
    }
}
