//! A file system for tests, on a disk that fails as disks do.
//!
//! [`Disk::mount`] puts it in front of any program, through FUSE: what is tested is the program with its own system
//! calls, not a model of them. Below is a model of a disk that is as cruel as Linux and its disks are:
//!
//! - What was not synced may be lost with the power, page by page and name by name ([`Content`], [`Names`]); a file's
//!   sync says nothing of its name.
//! - Write-back that fails is told once, to whoever syncs the file first; until the cache is dropped, reads see what
//!   never reached the medium.
//! - Any request can fail ([`Fault`]), even though it is done; or never be answered ([`Disk::stop_after`]), so that processes can be killed
//!   at any point of what they do, and it can be answered when they are gone ([`Disk::go_on`]).
//! - Reads and writes are short ([`Disk::be_short`]), listings come in any order, numbers of files come back as soon as the
//!   files have gone, and clocks may stand still ([`Disk::set_tick`]).
//!
//! What it cannot be: a file system that `syncfs` reaches. Linux does not ask FUSE servers.

#![forbid(unsafe_code)]
mod content;
mod disk;
mod mount;
mod names;

pub use content::{Content, Lost};
pub use disk::{Fault, Op};
pub use mount::{Disk, Mount};
pub use names::Names;
pub use rustix::io::Errno;
