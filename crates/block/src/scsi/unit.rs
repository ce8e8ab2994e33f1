//! Logical units.

use super::reservation::{Access, Reservations};
use super::{Outcome, Sense, Status, Transfer, be16, be32, cdb, inquiry, media, mode, opcodes};
use crate::export::Export;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// An initiator port and the target port it came through, for as long as its session lasts.
#[derive(Debug, Clone)]
pub struct Nexus {
    /// Unique among sessions.
    pub id: u64,
    /// The initiator port's name: the same for every session of that port.
    pub port: Arc<str>,
}

/// Something an initiator is told before its next command is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED
    Reset,
    /// MODE PARAMETERS CHANGED
    ModeChanged,
    /// RESERVATIONS PREEMPTED
    Preempted,
    /// RESERVATIONS RELEASED
    Released,
    /// REGISTRATIONS PREEMPTED
    RegistrationsPreempted,
    /// COMMANDS CLEARED BY ANOTHER INITIATOR
    Cleared,
    /// CAPACITY DATA HAS CHANGED
    CapacityChanged,
}

impl Attention {
    fn sense(self) -> Sense {
        Sense::new(
            0x06,
            match self {
                Attention::Reset => 0x2900,
                Attention::ModeChanged => 0x2a01,
                Attention::Preempted => 0x2a03,
                Attention::Released => 0x2a04,
                Attention::RegistrationsPreempted => 0x2a05,
                Attention::Cleared => 0x2f00,
                Attention::CapacityChanged => 0x2a09,
            },
        )
    }
}

/// A logical unit: an export as a SCSI disk.
pub struct Unit {
    /// The disk.
    pub export: Arc<Export>,
    /// Octets of a logical block.
    pub block_len: u32,
    /// Who may use it, and what they have to be told.
    pub(super) state: Mutex<State>,
    /// There is something in the state that a command must look at first.
    guarded: AtomicBool,
    /// Goes up when the commands of every initiator are cleared.
    epoch: AtomicU64,
    /// Size that initiators know of.
    size: AtomicU64,
    /// Held alone by COMPARE AND WRITE and ORWRITE, which are single steps to every other change.
    pub(super) atomic: tokio::sync::RwLock<()>,
}

#[derive(Default)]
pub(super) struct State {
    pub reservations: Reservations,
    attentions: HashMap<u64, Vec<Attention>>,
    nexuses: HashMap<u64, Nexus>,
    /// Nexuses that prevent removal.
    pub prevented: Vec<u64>,
    pub swp: bool,
}

impl State {
    /// Tells everybody but one.
    pub fn tell_others(&mut self, except: u64, what: Attention) {
        let others: Vec<u64> = self.nexuses.keys().copied().filter(|id| *id != except).collect();
        for id in others {
            self.tell(id, what);
        }
    }

    /// Tells the sessions of a port, but for one.
    pub fn tell_port(&mut self, port: &str, except: u64, what: Attention) {
        let ids: Vec<u64> =
            self.nexuses.values().filter(|n| &*n.port == port && n.id != except).map(|n| n.id).collect();
        for id in ids {
            self.tell(id, what);
        }
    }

    fn tell(&mut self, id: u64, what: Attention) {
        let waiting = self.attentions.entry(id).or_default();
        if !waiting.contains(&what) && waiting.len() < 16 {
            waiting.push(what);
        }
    }
}

impl Unit {
    /// A unit with blocks of `block_len` octets, a power of two.
    pub fn new(export: Arc<Export>, block_len: u32) -> Unit {
        let size = AtomicU64::new(export.geometry().size);
        Unit {
            export,
            block_len,
            state: Mutex::default(),
            guarded: AtomicBool::new(false),
            epoch: AtomicU64::new(0),
            size,
            atomic: tokio::sync::RwLock::new(()),
        }
    }

    /// Blocks there are now.
    pub fn blocks(&self) -> u64 {
        let size = self.export.geometry().size;
        if self.size.swap(size, Ordering::Relaxed) != size {
            self.with_state(|state| state.tell_others(u64::MAX, Attention::CapacityChanged));
        }
        size / u64::from(self.block_len)
    }

    /// Blocks there were when last looked at.
    pub(super) fn blocks_known(&self) -> u64 {
        self.size.load(Ordering::Relaxed) / u64::from(self.block_len)
    }

    /// Nothing can be changed.
    pub(super) fn read_only(&self) -> bool {
        self.export.read_only || self.state.lock().expect("no panics under the lock").swp
    }

    /// Changes the state.
    pub(super) fn with_state<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().expect("no panics under the lock");
        let result = change(&mut state);
        let guarded = !state.reservations.is_empty() || !state.attentions.is_empty();
        self.guarded.store(guarded, Ordering::Release);
        result
    }

    /// A session begins.
    pub fn attach(&self, nexus: &Nexus) {
        self.with_state(|state| {
            state.nexuses.insert(nexus.id, nexus.clone());
            state.attentions.insert(nexus.id, vec![Attention::Reset]);
        });
    }

    /// A session ends.
    pub fn detach(&self, nexus: &Nexus) {
        self.with_state(|state| {
            state.nexuses.remove(&nexus.id);
            state.attentions.remove(&nexus.id);
            state.prevented.retain(|id| *id != nexus.id);
            state.reservations.release_unit(nexus.id);
        });
    }

    /// Back as after power on: LOGICAL UNIT RESET and the resets of a whole target.
    pub fn reset(&self, by: &Nexus) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.with_state(|state| {
            state.reservations.release_all_units();
            state.prevented.clear();
            state.swp = false;
            state.tell_others(by.id, Attention::Reset);
            state.tell(by.id, Attention::Reset);
        });
    }

    /// Tells the other initiators whose commands were cleared (CLEAR TASK SET).
    pub fn cleared(&self, by: &Nexus) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.with_state(|state| state.tell_others(by.id, Attention::Cleared));
    }

    /// Changes when the commands of every initiator are cleared: those begun before are not answered.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Does a command. A CDB shorter than 16 octets is padded by zeroes.
    pub async fn execute(&self, nexus: &Nexus, cdb: &[u8; 16], transfer: &dyn Transfer) -> Outcome {
        if self.guarded.load(Ordering::Acquire)
            && let Err(outcome) = self.admit(nexus, cdb)
        {
            return outcome;
        }
        if let Some(command) = cdb::decode(cdb) {
            return match command {
                Ok(command) => media::execute(self, command, transfer).await,
                Err(sense) => sense.into(),
            };
        }
        match cdb[0] {
            0x42 => media::unmap(self, cdb, transfer).await,
            0x9e => self.service_action_in(cdb).await,
            0x15 | 0x55 => match media::parameters(transfer, mode::list_len(cdb)).await {
                Ok(list) => mode::select(self, nexus, cdb, &list),
                Err(sense) => sense.into(),
            },
            0x5f => match media::parameters(transfer, be32(cdb, 5) as usize).await {
                Ok(list) => self.with_state(|state| super::reservation::out(state, nexus, cdb, &list)),
                Err(sense) => sense.into(),
            },
            _ => self.answer(nexus, cdb),
        }
    }

    /// Commands without data from the initiator that are done at once.
    fn answer(&self, nexus: &Nexus, cdb: &[u8; 16]) -> Outcome {
        match cdb[0] {
            0x00 => {
                self.blocks();
                Outcome::good()
            }
            0x03 => request_sense(cdb),
            0x12 => inquiry::inquiry(self, cdb),
            0x16 | 0x56 => {
                let taken = self.with_state(|state| state.reservations.reserve_unit(nexus.id));
                if taken { Outcome::good() } else { Outcome::status(Status::ReservationConflict) }
            }
            0x17 | 0x57 => {
                self.with_state(|state| state.reservations.release_unit(nexus.id));
                Outcome::good()
            }
            0x1a | 0x5a => mode::sense(self, cdb),
            0x1b => self.start_stop(cdb),
            0x1e => self.prevent(nexus, cdb),
            0x25 => self.read_capacity_10(cdb),
            0x37 | 0xb7 => defect_data(cdb),
            0x5e => self.with_state(|state| super::reservation::read(state, cdb)),
            0xa3 if cdb[1] & 0x1f == 0x0c => opcodes::report(cdb),
            _ => Sense::INVALID_OPCODE.into(),
        }
    }

    async fn service_action_in(&self, cdb: &[u8; 16]) -> Outcome {
        match cdb[1] & 0x1f {
            0x10 => self.read_capacity_16(cdb),
            0x12 => media::lba_status(self, cdb).await,
            _ => Sense::invalid_field(1).into(),
        }
    }

    /// Attentions and reservations, before a command is done.
    fn admit(&self, nexus: &Nexus, cdb: &[u8; 16]) -> Result<(), Outcome> {
        self.with_state(|state| {
            // INQUIRY, REPORT LUNS and REQUEST SENSE are done whatever waits (SAM-5 5.14).
            if !matches!(cdb[0], 0x12 | 0xa0 | 0x03)
                && let Some(waiting) = state.attentions.get_mut(&nexus.id)
            {
                let first = (!waiting.is_empty()).then(|| waiting.remove(0));
                if waiting.is_empty() {
                    state.attentions.remove(&nexus.id);
                }
                if let Some(first) = first {
                    return Err(first.sense().into());
                }
            }
            match state.reservations.admits(nexus, cdb) {
                Access::Granted => {}
                Access::Conflict => return Err(Outcome::status(Status::ReservationConflict)),
            }
            Ok(())
        })
    }

    fn start_stop(&self, cdb: &[u8; 16]) -> Outcome {
        let (start, eject) = (cdb[4] & 1 != 0, cdb[4] & 2 != 0);
        // Power conditions are not changed.
        if cdb[4] >> 4 != 0 {
            return Outcome::good();
        }
        self.with_state(|state| {
            if !start && eject && !state.prevented.is_empty() {
                return Sense::REMOVAL_PREVENTED.into();
            }
            if eject {
                // The medium cannot be taken out.
                return Sense::invalid_field(4).into();
            }
            Outcome::good()
        })
    }

    fn prevent(&self, nexus: &Nexus, cdb: &[u8; 16]) -> Outcome {
        self.with_state(|state| {
            state.prevented.retain(|id| *id != nexus.id);
            if cdb[4] & 1 != 0 {
                state.prevented.push(nexus.id);
            }
        });
        Outcome::good()
    }

    fn read_capacity_10(&self, cdb: &[u8; 16]) -> Outcome {
        if cdb[8] & 1 == 0 && be32(cdb, 2) != 0 {
            return Sense::invalid_field(2).into();
        }
        let last = self.blocks().saturating_sub(1).min(u32::MAX.into()) as u32;
        Outcome::data([last.to_be_bytes(), self.block_len.to_be_bytes()].concat(), 8)
    }

    fn read_capacity_16(&self, cdb: &[u8; 16]) -> Outcome {
        let mut data = vec![0; 32];
        data[..8].copy_from_slice(&self.blocks().saturating_sub(1).to_be_bytes());
        data[8..12].copy_from_slice(&self.block_len.to_be_bytes());
        // Logical blocks in a physical one, as a power of two.
        data[13] = self.physical_exponent();
        let geometry = self.export.geometry();
        if geometry.discard {
            // LBPME, LBPRZ: what is unmapped reads as zeroes.
            data[14] = 0xc0;
        }
        Outcome::data(data, be32(cdb, 10) as usize)
    }

    pub(super) fn physical_exponent(&self) -> u8 {
        let physical = self.export.geometry().physical.max(self.block_len);
        (physical / self.block_len).trailing_zeros() as u8
    }
}

fn request_sense(cdb: &[u8; 16]) -> Outcome {
    let none = Sense::new(0, 0);
    let data = if cdb[1] & 1 != 0 { none.encode_descriptors() } else { none.encode().to_vec() };
    Outcome::data(data, cdb[4].into())
}

/// READ DEFECT DATA: a disk of ours has none.
fn defect_data(cdb: &[u8; 16]) -> Outcome {
    if cdb[0] == 0x37 {
        return Outcome::data(vec![0, cdb[2] & 0x1f, 0, 0], be16(cdb, 7).into());
    }
    Outcome::data(vec![0, cdb[1] & 0x1f, 0, 0, 0, 0, 0, 0], be32(cdb, 6) as usize)
}
