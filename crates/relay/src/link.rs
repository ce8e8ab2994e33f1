//! What two relays send each other: messages on an RDMA connection, sealed unless both do without.

use crate::Error;
use crate::ends::Addresses;
use std::collections::VecDeque;
use std::net::IpAddr;
use thruway_engine::aead::{KEY_LEN, Sealer, TAG_LEN};
use thruway_sockets::{Broken, Feedback, UPDATE_HEAD, Update};
use thruway_streams::Connection;

/// Bytes for a ring in a message, and of a message.
pub(crate) const PIECE_MAX: usize = 64 << 10;
const MESSAGE_MAX: usize = 5 + UPDATE_HEAD + PIECE_MAX + TAG_LEN;

/// A message. Numbers of connections are the receiving relay's, unless said otherwise. A relay that gets one which it does not know ends
/// the link, and all connections with it: a change is another version of the greeting (`meet`).
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    /// Does the relay have the higher end of this connection? The number is the sending relay's.
    Find { id: u32, ring: u32, addresses: Addresses },
    /// It has, by this number of its own. Rings at both ends have this size, which is no larger than what was asked with.
    Found { id: u32, own: u32, ring: u32 },
    /// What a writer has done.
    Update { id: u32, update: Update, bytes: &'a [u8] },
    /// What a reader has done.
    Feedback { id: u32, feedback: Feedback },
    /// Nothing comes for this connection any more: its process has gone, and all of it has been sent.
    Finish { id: u32 },
    /// As `Finish`, but bytes may be lost.
    Abort { id: u32 },
    /// Nothing: to see whether the other is there.
    Ping,
}

impl Message<'_> {
    /// What an update begins with, that [`thruway_sockets::Outlet::take`] appends to.
    pub(crate) fn begin_update(id: u32) -> Vec<u8> {
        begin(3, id)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Message::Find { id, ring, addresses } => [&begin(1, *id)[..], &ring.to_le_bytes(), addresses].concat(),
            Message::Found { id, own, ring } => [&begin(2, *id)[..], &own.to_le_bytes(), &ring.to_le_bytes()].concat(),
            Message::Update { id, update, bytes } => [&begin(3, *id)[..], &update.encode(), bytes].concat(),
            Message::Feedback { id, feedback } => [&begin(4, *id)[..], &feedback.encode()].concat(),
            Message::Finish { id } => begin(5, *id),
            Message::Abort { id } => begin(6, *id),
            Message::Ping => begin(7, 0),
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Message<'_>, Broken> {
        let (kind, rest) = bytes.split_first().ok_or(Broken)?;
        let (id, rest) = rest.split_first_chunk::<4>().ok_or(Broken)?;
        let id = u32::from_le_bytes(*id);
        Ok(match kind {
            1 => {
                let (ring, addresses) = rest.split_first_chunk().ok_or(Broken)?;
                let addresses = addresses.try_into().map_err(|_| Broken)?;
                Message::Find { id, ring: u32::from_le_bytes(*ring), addresses }
            }
            2 => {
                let (own, ring) = rest.split_first_chunk().ok_or(Broken)?;
                let ring = u32::from_le_bytes(ring.try_into().map_err(|_| Broken)?);
                Message::Found { id, own: u32::from_le_bytes(*own), ring }
            }
            3 => {
                let (update, bytes) = Update::decode(rest)?;
                Message::Update { id, update, bytes }
            }
            4 => Message::Feedback { id, feedback: Feedback::decode(rest)? },
            5 if rest.is_empty() => Message::Finish { id },
            6 if rest.is_empty() => Message::Abort { id },
            7 if rest.is_empty() => Message::Ping,
            _ => return Err(Broken),
        })
    }
}

fn begin(kind: u8, id: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    out.push(kind);
    out.extend(id.to_le_bytes());
    out
}

/// A key, and how many messages it has sealed or opened.
struct Seal {
    sealer: Sealer,
    count: u64,
}

impl Seal {
    fn new(key: &[u8; KEY_LEN]) -> Seal {
        Seal { sealer: Sealer::new(key), count: 0 }
    }

    fn next(&mut self) -> u64 {
        self.count += 1;
        self.count
    }
}

/// A link.
pub(crate) struct Link {
    connection: Connection,
    /// Addresses of this host and the other, between which connections are carried.
    pub(crate) local: IpAddr,
    pub(crate) peer: IpAddr,
    seals: Option<(Seal, Seal)>,
    /// Messages that there was no room for.
    waiting: VecDeque<Vec<u8>>,
    buffer: Vec<u8>,
    /// Something has been sent since this was last looked at.
    pub(crate) has_sent: bool,
    /// Connections that the other relay looks for, about.
    pub(crate) finds: usize,
}

impl Link {
    /// `keys`: of what is sent, and of what is received.
    pub(crate) fn new(
        connection: Connection,
        local: IpAddr,
        peer: IpAddr,
        keys: Option<([u8; KEY_LEN], [u8; KEY_LEN])>,
    ) -> Link {
        Link {
            connection,
            local: local.to_canonical(),
            peer: peer.to_canonical(),
            seals: keys.map(|(out, inwards)| (Seal::new(&out), Seal::new(&inwards))),
            waiting: VecDeque::new(),
            buffer: vec![0; MESSAGE_MAX],
            has_sent: false,
            finds: 0,
        }
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.seals.is_some()
    }

    /// What carries it, for people.
    pub(crate) fn detail(&self) -> String {
        self.connection.info().map_or_else(String::new, |info| info.detail)
    }

    /// Whether the last message could be sent: if not, others wait, and may become one meanwhile.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn send(&mut self, message: &Message<'_>) -> Result<(), Error> {
        self.send_bytes(message.encode())
    }

    pub(crate) fn send_bytes(&mut self, mut bytes: Vec<u8>) -> Result<(), Error> {
        if let Some((seal, _)) = &mut self.seals {
            let count = seal.next();
            let tag = seal.sealer.seal(count, b"", &mut bytes);
            bytes.extend(tag);
        }
        self.has_sent = true;
        self.waiting.push_back(bytes);
        self.flush()
    }

    /// Sends what waits, as far as there is room.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        while let Some(first) = self.waiting.front() {
            match self.connection.try_send(first) {
                Ok(_) => drop(self.waiting.pop_front()),
                Err(thruway_streams::Error::WouldBlock) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The next message, if one has come.
    pub(crate) fn receive(&mut self) -> Result<Option<Message<'_>>, Error> {
        let received = match self.connection.try_recv_message(&mut self.buffer) {
            Ok(Some(received)) if !received.truncated => received,
            Ok(Some(_)) => return Err(lies()),
            Ok(None) => return Err(Error::Peer("the other relay has ended the link".into())),
            Err(thruway_streams::Error::WouldBlock) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut bytes = &mut self.buffer[..received.len];
        if let Some((_, seal)) = &mut self.seals {
            let (sealed, tag) = bytes.split_last_chunk_mut::<TAG_LEN>().ok_or_else(lies)?;
            let count = seal.next();
            let opened = seal.sealer.open(count, b"", sealed, tag);
            opened.map_err(|_| Error::Peer("a message of the other relay was forged".into()))?;
            bytes = sealed;
        }
        Message::decode(bytes).map(Some).map_err(|_| lies())
    }
}

/// What is said of a relay that sends what cannot be.
pub(crate) fn lies() -> Error {
    Error::Peer("the other relay has sent what cannot be".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_understood_and_cut_ones_are_refused() {
        let update = Update { tail: 3, end: 5, run: Some((3, 6)), closed: Some(true), ended: true, ringing: 7 };
        let messages = [
            Message::Find { id: 1, ring: 4096, addresses: [4; 40] },
            Message::Found { id: 2, own: 3, ring: 1 << 22 },
            Message::Update { id: 3, update, bytes: b"abc" },
            Message::Feedback { id: 4, feedback: Feedback { head: 9, is_armed: true, ..Feedback::default() } },
            Message::Finish { id: 5 },
            Message::Abort { id: 6 },
            Message::Ping,
        ];
        for message in messages {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes).unwrap(), message);
            if !matches!(message, Message::Update { .. }) {
                for len in 0..bytes.len() {
                    assert_eq!(Message::decode(&bytes[..len]), Err(Broken), "{message:?} cut to {len}");
                }
                assert_eq!(Message::decode(&[&bytes[..], &[0]].concat()), Err(Broken));
            }
        }
        assert_eq!(Message::decode(&[9, 0, 0, 0, 0]), Err(Broken));
    }
}
