//! The Network Status Monitor (X/Open XNFS, chapter 11): by it, clients of NFS version 3 that have locks say that they have
//! restarted. It monitors nothing for others.

use crate::nlm::wire;
use crate::v4;
use std::ops::RangeInclusive;
use std::sync::Arc;
use thruway_rpc::client::Procedure;
use thruway_rpc::message::Refusal;
use thruway_rpc::server::{Answer, Call, Outcome, Program};
use thruway_rpc::xdr::{self, Encoder};
use thruway_server::slices;

/// The program's number.
pub const PROGRAM: u32 = 100_024;

/// Its version.
pub const VERSION: u32 = 1;

/// SM_NOTIFY, by which a host tells others that it has restarted.
pub(crate) const NOTIFY: Procedure = Procedure { program: PROGRAM, version: VERSION, procedure: 6 };

const STAT: u32 = 1;
const MON: u32 = 2;
/// The outcome of what is not done.
const FAILED: u32 = 1;

/// The name of this host.
pub(crate) fn own_name() -> Vec<u8> {
    rustix::system::uname().nodename().to_bytes().to_vec()
}

/// The program.
pub struct Nsm {
    server: Arc<v4::Server>,
}

impl Nsm {
    /// For the clients that version 4 knows, those of version 3 among them.
    pub fn new(v4: &v4::Nfs4) -> Nsm {
        Nsm { server: Arc::clone(&v4.0) }
    }

    async fn answer(&self, call: &Call, out: &mut Encoder) -> xdr::Result<Result<(), Refusal>> {
        let mut d = call.arguments();
        match call.procedure {
            0 => {}
            STAT | MON => {
                out.u32(FAILED);
                out.u32(self.server.recovery.start);
                return Ok(Ok(()));
            }
            procedure if procedure == NOTIFY.procedure => {
                let (name, start) = wire::get_notice(&mut d)?;
                // Only what is of that host: a name could be any other's.
                if let Some(peer) = call.connection.peer {
                    let address = peer.ip().to_canonical();
                    let clients = self.server.state(|state, _| state.of_restarted(address, name));
                    let mut have_restarted = false;
                    for id in clients {
                        // The removal of a client with much state takes long, so others work between two of them.
                        slices::spend(slices::SLICE).await;
                        have_restarted |= self.server.state(|state, _| state.restarted(id, start));
                    }
                    if have_restarted {
                        let name = String::from_utf8_lossy(name);
                        tracing::info!(host = %address, ?name, "a client of NFS version 3 has restarted: its locks are gone");
                    }
                }
            }
            _ => return Ok(Err(Refusal::ProcedureUnavailable)),
        }
        d.finish()?;
        Ok(Ok(()))
    }
}

impl Program for Nsm {
    fn number(&self) -> u32 {
        PROGRAM
    }

    fn versions(&self) -> RangeInclusive<u32> {
        VERSION..=VERSION
    }

    fn call<'a>(&'a self, call: &'a Call, mut results: Encoder) -> Answer<'a> {
        Box::pin(async move {
            let done = self.answer(call, &mut results).await;
            Outcome::of(done, results)
        })
    }
}
