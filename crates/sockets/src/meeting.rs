//! How two processes of one host, or a process and its host's relay, come to have a segment in common: names of Unix sockets, and what
//! is sent through them. Without the heap: a signal handler may have made the call that this is for.

use crate::board::Key;

/// What begins an offer from the other end of a connection, and one from the relay.
const OFFER: &[u8; 8] = b"thruway2";
const RELAYED: &[u8; 8] = b"thrurly2";
/// What begins a request from the end whose address is the lower, from the other, and the news that a segment is used.
const REQUEST_LOWER: &[u8; 8] = b"thrulow1";
const REQUEST_HIGHER: &[u8; 8] = b"thruhig1";
const ADOPTED_LOWER: &[u8; 8] = b"thruuse1";
const ADOPTED_HIGHER: &[u8; 8] = b"thruuse2";

/// Message of a relay at its limit of open files to a process whose connection it ends.
pub const RELAY_FULL: &str = "thruway relay full";

/// Bytes of an offer, with which goes the segment's descriptor.
pub const OFFER_LEN: usize = 8 + 48 + 8;
/// Bytes of a request. Shorter messages only wake the relay.
pub const REQUEST_LEN: usize = 8 + 48 + 8;

/// A segment for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The connection.
    pub key: [u8; 48],
    /// `SO_COOKIE` of the socket at its other end; of no meaning from a relay.
    pub cookie: u64,
    /// Who offers it.
    pub by: Offered,
}

/// Who offers a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offered {
    /// The other end.
    Peer,
    /// The other end is on another host, and the relay offers the segment.
    Relayed,
}

impl Offer {
    /// As a message.
    pub fn encode(&self) -> [u8; OFFER_LEN] {
        let magic = match self.by {
            Offered::Peer => OFFER,
            Offered::Relayed => RELAYED,
        };
        message(magic, &self.key, self.cookie)
    }

    /// The other way round.
    pub fn decode(message: &[u8]) -> Option<Offer> {
        let (magic, key, cookie) = parts(message)?;
        let by = match magic {
            OFFER => Offered::Peer,
            RELAYED => Offered::Relayed,
            _ => return None,
        };
        Some(Offer { key, cookie, by })
    }
}

/// What a process says to the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The connection.
    pub key: [u8; 48],
    /// The process has the end whose address is [the higher](Key::is_higher).
    pub is_higher: bool,
    /// The number in the name of the process's Unix socket, to which the relay may offer a segment. `None`: it has offered one, and the
    /// process uses it from now on; with this go a descriptor of the connection, for doorbells, and the process's waker, if it has one.
    /// Without descriptors: the process does not want the segment.
    pub service: Option<u64>,
}

impl Request {
    /// As a message.
    pub fn encode(&self) -> [u8; REQUEST_LEN] {
        let magic = match (self.service, self.is_higher) {
            (Some(_), false) => REQUEST_LOWER,
            (Some(_), true) => REQUEST_HIGHER,
            (None, false) => ADOPTED_LOWER,
            (None, true) => ADOPTED_HIGHER,
        };
        message(magic, &self.key, self.service.unwrap_or(0))
    }

    /// The other way round.
    pub fn decode(message: &[u8]) -> Option<Request> {
        let (magic, key, service) = parts(message)?;
        let (service, is_higher) = match magic {
            REQUEST_LOWER => (Some(service), false),
            REQUEST_HIGHER => (Some(service), true),
            ADOPTED_LOWER => (None, false),
            ADOPTED_HIGHER => (None, true),
            _ => return None,
        };
        Some(Request { key, is_higher, service })
    }
}

fn message(magic: &[u8; 8], key: &[u8; 48], number: u64) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(magic);
    bytes[8..56].copy_from_slice(key);
    bytes[56..].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn parts(message: &[u8]) -> Option<(&[u8; 8], [u8; 48], u64)> {
    let (magic, rest) = message.split_first_chunk::<8>()?;
    let (key, number) = rest.split_first_chunk::<48>()?;
    Some((magic, *key, u64::from_le_bytes(number.try_into().ok()?)))
}

/// The key of a connection that goes on through a relay. Both its ends may be on one board, and each has an entry of its own.
pub fn relayed_key(namespace: u64, local: std::net::SocketAddr, peer: std::net::SocketAddr) -> Key {
    let role = 1 + u64::from(Key::is_higher(local, peer));
    Key::new(namespace ^ role << 62, local, peer)
}

const SERVICE: &[u8] = b"thruway/sockets/2/";
const RELAY: &[u8] = b"thruway/relay/2/";

/// The name of a process's Unix socket, in the abstract namespace.
pub fn service_name(number: u64) -> [u8; SERVICE.len() + 16] {
    let mut name = [0; SERVICE.len() + 16];
    name[..SERVICE.len()].copy_from_slice(SERVICE);
    digits(number, &mut name[SERVICE.len()..]);
    name
}

/// The name of the Unix socket of a user's relay that other hosts reach at this port.
pub fn relay_name(uid: u32, port: u16) -> [u8; RELAY.len() + 16] {
    let mut name = [0; RELAY.len() + 16];
    name[..RELAY.len()].copy_from_slice(RELAY);
    digits(u64::from(uid) << 16 | u64::from(port), &mut name[RELAY.len()..]);
    name
}

fn digits(number: u64, places: &mut [u8]) {
    for (place, digit) in places.iter_mut().zip((0..16).rev()) {
        *place = b"0123456789abcdef"[(number >> (4 * digit)) as usize & 15];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_understood_and_nothing_else_is() {
        for by in [Offered::Peer, Offered::Relayed] {
            let offer = Offer { key: [7; 48], cookie: 9, by };
            assert_eq!(Offer::decode(&offer.encode()), Some(offer));
            assert_eq!(Offer::decode(&offer.encode()[..OFFER_LEN - 1]), None);
            assert_eq!(Request::decode(&offer.encode()), None);
        }
        for (service, is_higher) in [(None, false), (None, true), (Some(1 << 63), false)] {
            let request = Request { key: [3; 48], is_higher, service };
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        let request = Request { key: [3; 48], is_higher: true, service: Some(0) };
        assert_eq!(Request::decode(&request.encode()), Some(request));
        assert_eq!(Offer::decode(&request.encode()), None);
        assert_eq!(Request::decode(&request.encode()[..63]), None);
        assert_eq!(Request::decode(&[&request.encode()[..], &[0]].concat()), None);
        assert_eq!(&service_name(0xab), b"thruway/sockets/2/00000000000000ab");
        assert_eq!(&relay_name(1000, 7118), b"thruway/relay/2/0000000003e81bce");
    }
}
