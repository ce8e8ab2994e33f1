//! SCSI block devices: SPC-4 and SBC-3, whatever carries the commands.
//!
//! - [`Unit`]: a logical unit over an export, with reservations and unit attentions.
//! - [`Transfer`]: how a carrier moves a command's data; [`Unit::execute`] does the rest.
//! - `cdb`: commands, decoded; `media`: those that move blocks; `inquiry`, `mode`, `opcodes`, `ports`: what the
//!   unit reports of itself; `reservation`: which initiators may use it, `persistent_reserve`: the commands for that; `execute`:
//!   dispatch of commands.

mod cdb;
mod execute;
pub mod fuzzing;
mod inquiry;
mod lasting;
mod media;
mod mode;
mod opcodes;
mod persistent_reserve;
mod ports;
mod reservation;
mod sense;
mod task_set;
mod unit;

pub use cdb::only_reads;
pub use inquiry::absent;
pub use lasting::{Lasting, LastingError};
pub use reservation::KeptError;
pub use sense::{Sense, Status};
pub use task_set::TaskSet;
pub use unit::{Attention, Nexus, Unit};

use crate::big_endian::{be16, be32, be64};
use std::future::Future;
use std::io;
use std::pin::Pin;
use thruway_engine::Segment;
use thruway_server::Body;
use thruway_server::Buffers;

/// A step of a transfer.
pub type Step<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Moves the data of one command.
pub trait Transfer {
    /// Bytes that the initiator wants to receive or to send.
    fn expected(&self) -> u64;

    /// Sends bytes that belong at `offset` of the initiator's buffer. What lies beyond it is left out.
    fn send(&self, offset: u64, body: Body) -> Step<'_, io::Result<()>>;

    /// The next bytes that the initiator sent, with their offset; `None` after the last.
    fn receive(&self) -> Step<'_, Option<io::Result<(u64, Segment)>>>;

    /// Where blocks for data to send come from.
    fn buffers(&self) -> &Buffers;

    /// What backends lend can be sent as it is.
    fn can_lend(&self) -> bool;

    /// The initiator has gone, and may go on by another way: nothing more is to be begun for it that changes the disk.
    fn has_gone(&self) -> bool {
        false
    }

    /// Resolves when nobody waits for the command's end any more, but those who wait for it to do nothing more.
    fn aborted(&self) -> Step<'_, ()>;
}

/// How a command ended.
#[derive(Debug)]
pub struct Outcome {
    /// The status.
    pub status: Status,
    /// What there is to say about a check condition.
    pub sense: Option<Sense>,
    /// Data to send with the status, cut to what was allocated.
    pub data: Vec<u8>,
    /// Bytes that the command moves, or would have, had the initiator wanted them all.
    pub moved: u64,
}

impl Outcome {
    /// Done, without data.
    pub fn good() -> Outcome {
        Outcome { status: Status::Good, sense: None, data: Vec::new(), moved: 0 }
    }

    /// Done, with data, of which `allocated` bytes at most are sent.
    pub fn data(mut data: Vec<u8>, allocated: usize) -> Outcome {
        data.truncate(allocated);
        Outcome { moved: data.len() as u64, data, ..Outcome::good() }
    }

    /// Done, and so many bytes were moved.
    pub fn moved(moved: u64) -> Outcome {
        Outcome { moved, ..Outcome::good() }
    }

    /// A status without more to say.
    pub fn status(status: Status) -> Outcome {
        Outcome { status, ..Outcome::good() }
    }
}

impl From<Sense> for Outcome {
    fn from(sense: Sense) -> Outcome {
        Outcome { status: Status::CheckCondition, sense: Some(sense), ..Outcome::good() }
    }
}
