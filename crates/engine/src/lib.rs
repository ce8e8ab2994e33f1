//! ACES, the engine under every service: data lives in fixed-size blocks, and stages pass the
//! *ownership* of blocks to one another through explicit queues; nothing is copied between them.
//!
//! - [`pool`]: the blocks. The pool is the back-pressure of the whole path: without a free
//!   block a source loads nothing, and a sink grants no credit.
//! - [`stage`]: queues and the parallel workers behind them (CPU work and blocking file calls),
//!   with the monitor that moves workers to where the queue is.
//! - [`io`]: storage, by io_uring or, where that is forbidden, by threads: a stage for services that are threads, a ring of
//!   each reactor for those that are tasks; [`segment`]: the memory that requests carry.
//! - [`reactor`]: event loops, one per core: what the services with many small requests run on; [`lent`]: borrowed data,
//!   sent without a copy.
//! - [`digest`], [`aead`]: what the CPU stages do to a block.
//! - [`rate_limit`]: bytes per second. [`page_cache`]: how much of a file is cached; [`pipes`]: pages on
//!   their way to a socket; [`file_system`]: properties of
//!   file systems. [`units`]: parsing of sizes and times; [`text`]: escaping of untrusted text.
//! - [`topology`], [`limits`]: where memory and threads are, and how much one process may have.
//!
//! The network stage belongs to the services, because each speaks its own protocol.

pub mod aead;
pub mod allocator;
pub mod digest;
pub mod file_system;
pub mod io;
pub mod lent;
pub mod limits;
pub mod page_cache;
pub mod pipes;
pub mod pool;
pub mod quota;
pub mod random;
pub mod rate_limit;
pub mod reactor;
pub mod segment;
pub mod stage;
pub mod text;
pub mod topology;
pub mod units;

pub use io::{OpenFile, Storage};
pub use pool::{Block, BlockPool};
pub use reactor::Reactors;
pub use segment::{Segment, Segments};
pub use stage::{Owner, StageId, StageStats, Workers};
