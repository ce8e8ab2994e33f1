//! Logical units: their state, and the sessions that use them. `execute.rs` has the commands.

use super::reservation::{Access, Reservations};
use super::task_set::TaskSet;
use super::{Lasting, LastingError, Outcome, Sense, Status};
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
    /// Owner of the port's registrations: the authenticated name of the initiator, or its host.
    pub owner: Arc<str>,
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
    /// Bytes of a logical block.
    pub block_len: u32,
    /// Who may use it, and what they have to be told.
    pub(super) state: Mutex<State>,
    /// There is something in the state that a command must look at first.
    pub(super) guarded: AtomicBool,
    /// Size that initiators know of.
    size: AtomicU64,
    /// Where reservations are kept that are to outlive us.
    pub(super) lasting: Option<Lasting>,
    /// What is kept there, if that is known. Held while they are changed, so that what is kept is what was answered last.
    pub(super) kept: tokio::sync::Mutex<Option<Option<String>>>,
}

#[derive(Default)]
pub(super) struct State {
    pub reservations: Reservations,
    attentions: HashMap<u64, Vec<Attention>>,
    nexuses: HashMap<u64, Arc<TaskSet>>,
    /// Of sessions that have ended, as long as commands of theirs are in progress.
    ending: Vec<Arc<TaskSet>>,
    /// Nexuses that prevent removal.
    pub prevented: Vec<u64>,
    pub swp: bool,
}

impl State {
    /// Tells everybody but one.
    pub(super) fn tell_others(&mut self, except: u64, what: Attention) {
        let others: Vec<u64> = self.nexuses.keys().copied().filter(|id| *id != except).collect();
        for id in others {
            self.tell(id, what);
        }
    }

    /// Tells the sessions of a port, but for one.
    pub(super) fn tell_port(&mut self, port: &str, except: u64, what: Attention) {
        let ids: Vec<u64> = self
            .nexuses
            .values()
            .map(|a| &a.nexus)
            .filter(|n| &*n.port == port && n.id != except)
            .map(|n| n.id)
            .collect();
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
    /// A unit with blocks of `block_len` bytes, a power of two.
    pub fn new(export: Arc<Export>, block_len: u32) -> Unit {
        let size = AtomicU64::new(export.geometry().size);
        export.fence.put_up();
        Unit {
            export,
            block_len,
            state: Mutex::default(),
            guarded: AtomicBool::new(false),
            size,
            lasting: None,
            kept: tokio::sync::Mutex::default(),
        }
    }

    /// Gives reservations a place to outlive the daemon; those that have are in force from now on.
    ///
    /// Kept reservations of a read-only disk are not loaded, because initiators cannot reserve it. The file stays as it is.
    ///
    /// # Errors
    /// [`LastingError`], if what is kept there cannot be read.
    pub fn with_lasting(mut self, lasting: Lasting) -> Result<Unit, LastingError> {
        if self.may_only_read() {
            return Ok(self);
        }
        let kept = lasting.load()?;
        let reservations = Reservations::lasting(kept.as_deref())
            .map_err(|source| LastingError::Content { path: lasting.path().into(), source })?;
        self.with_state(|state| state.reservations = reservations);
        (self.kept, self.lasting) = (tokio::sync::Mutex::new(Some(kept)), Some(lasting));
        Ok(self)
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
        self.may_only_read() || self.state.lock().expect("no panics under the lock").swp
    }

    /// True if initiators have no right to change the disk. Then none of them may keep the others from using it.
    pub fn may_only_read(&self) -> bool {
        self.export.read_only
    }

    /// Changes the state.
    pub(super) fn with_state<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().expect("no panics under the lock");
        let result = change(&mut state);
        let guarded = !state.reservations.is_empty() || !state.attentions.is_empty();
        self.guarded.store(guarded, Ordering::Release);
        self.export.fence.close(state.reservations.closed_to_others());
        result
    }

    /// A session begins.
    pub fn attach(&self, nexus: &Nexus) -> Arc<TaskSet> {
        let attached = Arc::new(TaskSet::new(nexus.clone(), &self.export.backend));
        // A change of size is news to the others only.
        self.blocks();
        self.with_state(|state| {
            state.nexuses.insert(nexus.id, Arc::clone(&attached));
            state.attentions.insert(nexus.id, vec![Attention::Reset]);
        });
        attached
    }

    /// A session ends.
    pub fn detach(&self, nexus: &Nexus) {
        self.with_state(|state| {
            state.ending.retain(|attached| !attached.is_idle());
            let attached = state.nexuses.remove(&nexus.id);
            state.ending.extend(attached.filter(|attached| !attached.is_idle()));
            state.attentions.remove(&nexus.id);
            state.prevented.retain(|id| *id != nexus.id);
            state.reservations.release_unit(nexus.id);
        });
    }

    /// Back as after power on: LOGICAL UNIT RESET and the resets of a whole target. No command begun before does
    /// anything when it is done.
    ///
    /// On a read-only disk, it resets only the initiator that asks for it: the commands of others go on.
    pub async fn reset(&self, by: &Nexus) {
        if self.may_only_read() {
            self.with_state(|state| {
                state.prevented.retain(|id| *id != by.id);
                state.tell(by.id, Attention::Reset);
            });
            return self.clear(|whose| whose.port == by.port).await;
        }
        self.with_state(|state| {
            state.reservations.release_all_units();
            state.prevented.clear();
            state.swp = false;
            state.tell_others(by.id, Attention::Reset);
            state.tell(by.id, Attention::Reset);
        });
        self.clear(|_| true).await;
    }

    /// Clears the commands of all initiators, and tells the others (CLEAR TASK SET). On a read-only disk, it clears only those of
    /// the initiator that asks for it.
    pub async fn clear_all(&self, by: &Nexus) {
        if self.may_only_read() {
            return self.clear(|whose| whose.port == by.port).await;
        }
        self.with_state(|state| state.tell_others(by.id, Attention::Cleared));
        self.clear(|_| true).await;
    }

    /// Clears the commands of these, and waits until nothing of them reaches the disk any more.
    pub(super) async fn clear(&self, whose: impl Fn(&Nexus) -> bool) {
        let cleared: Vec<Arc<TaskSet>> = self.with_state(|state| {
            let all = state.nexuses.values().chain(&state.ending);
            all.filter(|attached| whose(&attached.nexus)).cloned().collect()
        });
        futures_util::future::join_all(cleared.iter().map(|attached| attached.clear())).await;
    }

    /// Attentions and reservations, before a command is done.
    pub(super) fn admit(&self, nexus: &Nexus, cdb: &[u8; 16]) -> Result<(), Outcome> {
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

    pub(super) fn physical_exponent(&self) -> u8 {
        let physical = self.export.geometry().physical.max(self.block_len);
        (physical / self.block_len).trailing_zeros() as u8
    }
}
