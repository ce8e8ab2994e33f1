//! Task set of an I_T nexus on a logical unit (SAM-5 4.10), and how its tasks are ended.

use super::Nexus;
use crate::generations::{Generations, InFlight};
use crate::served::{Changer, Served};
use std::sync::Arc;

/// The commands of an initiator port in flight on one unit. Clearing them waits for their end, so that nothing of
/// them reaches the disk later.
pub struct TaskSet {
    /// The initiator port.
    pub nexus: Nexus,
    commands: Arc<Generations>,
    /// Orders the changes of this session with those of NBD clients.
    changer: Changer,
}

impl TaskSet {
    pub(super) fn new(nexus: Nexus, disk: &Served) -> TaskSet {
        let changer = disk.changer();
        changer.changes();
        TaskSet { nexus, commands: Arc::default(), changer }
    }

    /// Starts a command. Its guard says when it has been cleared: it is then to end without a response.
    pub fn begin(&self) -> InFlight {
        self.commands.begin()
    }

    /// Whether other sessions change the disk, or have since this one logged in.
    pub fn has_others(&self) -> bool {
        self.changer.has_others()
    }

    /// Whether no command is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.commands.is_idle()
    }

    /// Clears the commands in flight and waits until all have ended.
    pub async fn clear(&self) {
        self.commands.turn().await;
    }
}
