//! All integration tests of the crate, as one program: it is linked once.

mod background;
mod floods;
mod hostile;
mod hostile_tcp;
mod listings;
#[path = "support/peer.rs"]
mod peer;
mod support;
mod trees;
