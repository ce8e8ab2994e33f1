//! Messages to the thread of a client.

use crate::client::Handle;
use thruway_vfs::Credentials;
use tokio::sync::mpsc;

/// A stateid. The first four bytes are its sequence number, 0 for the newest.
pub(super) type Stateid = [u8; 16];

/// A message to the thread.
pub(super) enum Event {
    /// The server has ended the session of this generation.
    SessionLost(u64),
    /// The server has revoked state of the client in the session of this generation.
    StateLost(u64),
    /// The user has closed the file as often as opened it.
    Close(Handle, u32),
    /// The user has created the file, which is open.
    Made(Handle, u32),
    /// The back channel is bound to this connection; `None` if that has failed.
    Bound(Option<u64>),
    /// A delegation was recalled.
    Recalled,
    /// A delegation is not held any more.
    Return { handle: Handle, stateid: Stateid, who: Credentials },
    /// The client ends.
    End,
}

/// Sends messages to the thread.
#[derive(Clone)]
pub(super) struct Events(mpsc::UnboundedSender<Event>);

impl Events {
    pub(super) fn new() -> (Events, mpsc::UnboundedReceiver<Event>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Events(sender), receiver)
    }

    /// Sends a message, if the thread has not ended.
    pub(super) fn tell(&self, event: Event) {
        // Nobody needs what an ended thread does not do.
        let _ = self.0.send(event);
    }
}
