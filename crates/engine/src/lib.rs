//! ACES, the engine under every service: data lives in fixed-size blocks, and stages pass the
//! *ownership* of blocks to one another through explicit queues; nothing is copied between them.
//!
//! - [`pool`]: the blocks. A full pool is the back-pressure of the whole path: who has no block
//!   loads nothing, and who has no free block grants no credit.
//! - [`stage`]: queues and the parallel workers behind them (CPU work and blocking file calls),
//!   with the monitor that moves workers to where the queue is.
//! - [`storage`]: the event-driven storage stage, one thread over io_uring, or several where that is forbidden.
//! - [`reactor`]: event loops, one per core, each with a ring of its own: what the services with many
//!   small requests run on; [`segment`]: the parts of blocks that their requests carry; [`lent`]: data that is sent
//!   from where it is.
//! - [`digest`], [`aead`]: what the CPU stages do to a block.
//! - [`rate_limit`]: bytes per second. [`page_cache`]: what reading would cost; [`file_system`]: what a file system can be relied on for. [`units`]: sizes as
//!   people write them; [`text`]: what others wrote, to be shown to people.
//! - [`topology`], [`limits`]: where memory and threads are, how much one process may have, and what counts as one host.
//! - [`local_peer`]: which user is at the other end of a connection from this machine.
//!
//! The network stage belongs to the services, because each speaks its own protocol.

pub mod aead;
pub mod digest;
pub mod file_system;
pub mod lent;
pub mod limits;
pub mod local_peer;
pub mod page_cache;
pub mod pool;
pub mod rate_limit;
pub mod reactor;
pub mod segment;
pub mod stage;
pub mod storage;
pub mod text;
pub mod topology;
pub mod units;

/// Says, once, that there is no io_uring here and why.
pub(crate) fn without_io_uring(error: &std::io::Error) {
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        tracing::warn!(
            %error,
            "no io_uring (a container's seccomp profile, or sysctl kernel.io_uring_disabled): storage works without, slower"
        );
    });
}

pub use pool::{Block, BlockPool};
pub use reactor::{Reactors, Ring};
pub use segment::{Segment, Segments};
pub use stage::{StageId, StageStats, Workers};
pub use storage::{Storage, StorageOp};
