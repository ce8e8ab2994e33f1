//! A session's use of a unit, and how what it has begun there comes to an end.

use super::Nexus;
use crate::generations::{Generations, UnderWay};
use crate::served::{Changer, Served};
use std::sync::Arc;

/// The commands of an initiator port under way on one unit. Clearing them waits for their end, so that nothing of
/// them reaches the disk later.
pub struct Attached {
    /// Whose they are.
    pub nexus: Nexus,
    commands: Arc<Generations>,
    /// A client of NBD may go on as an initiator.
    changer: Changer,
}

impl Attached {
    pub(super) fn new(nexus: Nexus, disk: &Served) -> Attached {
        let changer = disk.changer();
        changer.changes();
        Attached { nexus, commands: Arc::default(), changer }
    }

    /// A command begins. When somebody waits for its end it has been cleared: it is to end, and not to be answered.
    pub fn begin(&self) -> UnderWay {
        self.commands.begin()
    }

    /// Others change the disk, or have since this one came: an initiator that goes may go on as one of them.
    pub fn has_others(&self) -> bool {
        self.changer.has_others()
    }

    /// No command is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.commands.is_idle()
    }

    /// Clears the commands under way, and waits until none of them does anything any more.
    pub async fn clear(&self) {
        self.commands.turn().await;
    }
}
