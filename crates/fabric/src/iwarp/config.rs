//! Configuration of an iWARP device, and its effect on connections.

use crate::shm;
use thruway_iwarp::mpa::{self, Agreement, Preferences, ReadyToReceive};
use thruway_rdma_types::{ConnectParams, Error, Result};

/// Maximum number of RDMA Reads in progress for each direction of a queue pair.
pub(super) const MAX_DEPTH: u16 = 256;

/// How an iWARP device behaves. The default suits every peer.
#[derive(Debug, Clone)]
pub struct Config {
    /// Ask for CRCs. Both ends must say no for there to be none.
    pub crc: bool,
    /// Ask for markers in what we receive. Linux's `siw` refuses them.
    pub markers: bool,
    /// Highest MPA revision, 1 or 2.
    pub revision: u8,
    /// Ask for the peer-to-peer model (revision 2), in which either end may send first.
    pub peer_to_peer: bool,
    /// Ready-to-receive message to prefer.
    pub rtr: ReadyToReceive,
    /// Tell peers, in reserved flag bits of the request, that we take large FPDUs and speak
    /// RFC 7306, and believe those who say so. Without it everybody gets segment-sized FPDUs.
    pub announce: bool,
    /// Send FPDUs up to this ULPDU length whatever the peer said.
    pub force_ulpdu: Option<u16>,
    /// TCP congestion control for every socket; by default the system's, and `cubic` on loopback.
    pub congestion: Option<String>,
    /// Connections with processes of this host go through shared memory, where both ends say so; see [`crate::shm`].
    pub shm: Option<shm::Config>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            crc: true,
            markers: false,
            revision: 2,
            peer_to_peer: true,
            rtr: ReadyToReceive::Write,
            announce: true,
            force_ulpdu: None,
            congestion: None,
            shm: None,
        }
    }
}

impl Config {
    pub(super) fn preferences(&self, params: &ConnectParams) -> Result<Preferences> {
        let limit = mpa::MAX_PRIVATE_DATA - 4;
        if params.private_data.len() > limit {
            let got = params.private_data.len() as u64;
            return Err(Error::Limit { what: "bytes of private data", got, limit: limit as u64 });
        }
        Ok(Preferences {
            markers: self.markers,
            crc: self.crc,
            revision: self.revision,
            ird: params.ird.min(MAX_DEPTH),
            ord: params.ord.min(MAX_DEPTH),
            peer_to_peer: self.peer_to_peer && self.revision >= 2,
            rtr: self.rtr,
            announce: self.announce,
        })
    }

    /// Largest ULPDU to send under `agreement` on a path with segments of `mss` bytes.
    pub(super) fn max_ulpdu(&self, agreement: &Agreement, mss: usize) -> u16 {
        if let Some(forced) = self.force_ulpdu {
            return forced.max(128);
        }
        if agreement.large_fpdu {
            return u16::MAX;
        }
        // RFC 5044 §5: what is left of a segment after length, CRC, pad and markers.
        let markers = if agreement.send_markers { 4 * mss.div_ceil(512) } else { 0 };
        mss.saturating_sub(6 + markers + mss % 4).clamp(128, u16::MAX.into()) as u16
    }
}
