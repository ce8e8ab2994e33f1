//! What two relays send each other: bundles of messages on an RDMA connection, sealed unless both do without.
//!
//! What is to be said in a turn of the relay's loop goes as one: each send costs as much as a message of some kilobytes.

use crate::Error;
use crate::ends::Addresses;
use std::collections::VecDeque;
use std::net::IpAddr;
use thruway_engine::aead::{KEY_LEN, Sealer, TAG_LEN};
use thruway_sockets::{Broken, Feedback, UPDATE_HEAD, Update};
use thruway_streams::Connection;

/// Bytes for a ring in a message.
pub(crate) const PIECE_MAX: usize = 64 << 10;
/// A bundle takes no more messages when it has so many bytes.
const BUNDLE_FULL: usize = 16 << 10;
/// Bundles that wait for room. What is answered to a relay that takes nothing would fill memory.
const WAITING_MAX: usize = 256;
/// Bytes of a bundle: each message has its length before it.
const BUNDLE_MAX: usize = BUNDLE_FULL + 4 + 5 + UPDATE_HEAD + PIECE_MAX + TAG_LEN;

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
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Message::Find { id, ring, addresses } => {
                begin(out, 1, *id);
                out.extend(ring.to_le_bytes());
                out.extend(addresses);
            }
            Message::Found { id, own, ring } => {
                begin(out, 2, *id);
                out.extend(own.to_le_bytes());
                out.extend(ring.to_le_bytes());
            }
            Message::Update { id, update, bytes } => {
                begin(out, 3, *id);
                out.extend(update.encode());
                out.extend(*bytes);
            }
            Message::Feedback { id, feedback } => {
                begin(out, 4, *id);
                out.extend(feedback.encode());
            }
            Message::Finish { id } => begin(out, 5, *id),
            Message::Abort { id } => begin(out, 6, *id),
            Message::Ping => begin(out, 7, 0),
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

fn begin(out: &mut Vec<u8>, kind: u8, id: u32) {
    out.push(kind);
    out.extend(id.to_le_bytes());
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
    /// Messages of the bundle that is sent next.
    gathered: Vec<u8>,
    /// Bundles, sealed, that there was no room for.
    waiting: VecDeque<Vec<u8>>,
    /// The bundle that has been received last: its bytes, and where the next of its messages begins.
    buffer: Vec<u8>,
    received: usize,
    next: usize,
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
            gathered: Vec::new(),
            waiting: VecDeque::new(),
            buffer: vec![0; BUNDLE_MAX],
            received: 0,
            next: 0,
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

    /// Whether the last bundle could be sent: if not, what there is to say waits, and may become less meanwhile.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Says something, with the next [`Link::flush`].
    pub(crate) fn send(&mut self, message: &Message<'_>) -> Result<(), Error> {
        self.compose::<Error>(|out| {
            message.encode(out);
            Ok(true)
        })?;
        Ok(())
    }

    /// Says what a writer has done, if `take` appends that to the beginning of an update. Whether it has.
    pub(crate) fn send_update<E: From<Error>>(
        &mut self,
        id: u32,
        take: impl FnOnce(&mut Vec<u8>) -> Result<bool, E>,
    ) -> Result<bool, E> {
        self.compose(|out| {
            begin(out, 3, id);
            take(out)
        })
    }

    fn compose<E: From<Error>>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Result<bool, E>) -> Result<bool, E> {
        let start = self.gathered.len();
        self.gathered.extend([0; 4]);
        let written = write(&mut self.gathered);
        if !matches!(written, Ok(true)) {
            self.gathered.truncate(start);
            return written;
        }
        let len = (self.gathered.len() - start - 4) as u32;
        self.gathered[start..start + 4].copy_from_slice(&len.to_le_bytes());
        if self.gathered.len() >= BUNDLE_FULL {
            self.flush()?;
        }
        Ok(true)
    }

    /// Sends what has been said, as far as there is room.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        self.send_waiting()?;
        // What there is no room for grows, rather than that there are more of them.
        if self.gathered.is_empty() || !self.has_room() && self.gathered.len() < BUNDLE_FULL {
            return Ok(());
        }
        let mut bundle = std::mem::take(&mut self.gathered);
        if let Some((seal, _)) = &mut self.seals {
            let count = seal.next();
            let tag = seal.sealer.seal(count, b"", &mut bundle);
            bundle.extend(tag);
        }
        self.has_sent = true;
        self.waiting.push_back(bundle);
        self.send_waiting()?;
        if self.waiting.len() > WAITING_MAX {
            return Err(Error::Peer("the other relay does not take the answers to what it asks".into()));
        }
        Ok(())
    }

    fn send_waiting(&mut self) -> Result<(), Error> {
        while let Some(first) = self.waiting.front() {
            match self.connection.try_send(first) {
                Ok(_) => {
                    let mut sent = self.waiting.pop_front().expect("the first");
                    if self.gathered.capacity() == 0 {
                        sent.clear();
                        self.gathered = sent;
                    }
                }
                Err(thruway_streams::Error::WouldBlock) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The next message, if one has come.
    pub(crate) fn receive(&mut self) -> Result<Option<Message<'_>>, Error> {
        if self.next == self.received && !self.receive_bundle()? {
            return Ok(None);
        }
        let rest = &self.buffer[self.next..self.received];
        let (message, after) = split(rest).map_err(|_| lies())?;
        self.next = self.received - after.len();
        Message::decode(message).map(Some).map_err(|_| lies())
    }

    fn receive_bundle(&mut self) -> Result<bool, Error> {
        let received = match self.connection.try_recv_message(&mut self.buffer) {
            Ok(Some(received)) if !received.truncated => received,
            Ok(Some(_)) => return Err(lies()),
            Ok(None) => return Err(Error::Peer("the other relay has ended the link".into())),
            Err(thruway_streams::Error::WouldBlock) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let mut len = received.len;
        if let Some((_, seal)) = &mut self.seals {
            let bytes = &mut self.buffer[..len];
            let (sealed, tag) = bytes.split_last_chunk_mut::<TAG_LEN>().ok_or_else(lies)?;
            let count = seal.next();
            let opened = seal.sealer.open(count, b"", sealed, tag);
            opened.map_err(|_| Error::Peer("a message of the other relay was forged".into()))?;
            len = sealed.len();
        }
        (self.received, self.next) = (len, 0);
        Ok(len > 0)
    }
}

/// The first message of a bundle, and the others.
pub(crate) fn split(bundle: &[u8]) -> Result<(&[u8], &[u8]), Broken> {
    let (len, rest) = bundle.split_first_chunk::<4>().ok_or(Broken)?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(Broken)
}

/// What is said of a relay that sends what cannot be.
pub(crate) fn lies() -> Error {
    Error::Peer("the other relay has sent what cannot be".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meet::{Host, Peers};
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::Arc;
    use thruway_auth::KeyPair;

    #[test]
    fn messages_are_understood_and_cut_ones_are_refused() {
        let update = Update {
            tail: 3,
            end: 5,
            run: Some((3, 6)),
            closed: Some(true),
            ended: true,
            for_good: true,
            call: true,
            ringing: 7,
        };
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
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
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

    /// Two relays that have met, each with a device of its own.
    fn met() -> ((Arc<Host>, Link), (Arc<Host>, Link)) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("peers");
        let (here, there) = (KeyPair::generate(), KeyPair::generate());
        std::fs::write(&path, format!("{}\n{}\n", here.public(), there.public())).unwrap();
        let host = |keys: KeyPair| {
            let provider = thruway_fabric::iwarp::Config::default().into();
            Arc::new(Host::new(provider, keys, Peers::file(path.clone()), true, 0).unwrap())
        };
        let (here, there) = (host(here), host(there));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        let (called, answered) = std::thread::scope(|scope| {
            let answer = scope.spawn(|| there.answer(listener.accept().unwrap().0).unwrap());
            let call = scope.spawn(|| here.call(at.ip(), at).unwrap());
            // As the loop does.
            while !(answer.is_finished() && call.is_finished()) {
                here.context.poll();
                there.context.poll();
                std::thread::yield_now();
            }
            (call.join().unwrap(), answer.join().unwrap())
        });
        ((here, called), (there, answered))
    }

    #[test]
    fn a_relay_that_takes_nothing_ends_the_link_before_it_fills_memory() {
        let ((host, mut link), (other_host, mut other)) = met();
        let feedback = |head| Message::Feedback { id: 1, feedback: Feedback { head, ..Feedback::default() } };
        // While it takes what it is sent, there is no end.
        let (mut sent, mut received) = (0, 0);
        while received < 20_000 {
            if sent < 20_000 {
                link.send(&feedback(sent)).unwrap();
                sent += 1;
            }
            link.flush().unwrap();
            host.context.poll();
            other_host.context.poll();
            while let Some(message) = other.receive().unwrap() {
                assert_eq!(message, feedback(received));
                received += 1;
            }
        }
        let mut bytes = 0;
        let error = loop {
            if let Err(error) = link.send(&feedback(0)).and_then(|()| link.flush()) {
                break error;
            }
            host.context.poll();
            bytes += 4 + 5 + 26;
            assert!(bytes < 64 << 20, "no end");
        };
        assert!(error.to_string().contains("does not take the answers"), "{error}");
        assert!(link.waiting.iter().map(Vec::len).sum::<usize>() <= (WAITING_MAX + 1) * BUNDLE_MAX);
    }

    #[test]
    fn bundles_are_split_and_cut_ones_are_refused() {
        let bundle = [2, 0, 0, 0, b'a', b'b', 0, 0, 0, 0, 1, 0, 0, 0, b'c'];
        let (first, rest) = split(&bundle).unwrap();
        let (second, rest) = split(rest).unwrap();
        assert_eq!((first, second, split(rest)), (&b"ab"[..], &b""[..], Ok((&b"c"[..], &b""[..]))));
        for cut in 0..6 {
            assert_eq!(split(&bundle[..cut]), Err(Broken), "cut to {cut}");
        }
        assert_eq!(split(&[255; 8]), Err(Broken));
    }
}
