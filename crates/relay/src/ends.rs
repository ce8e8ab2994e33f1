//! Ends of connections, and which relays they lead to.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// A connection's addresses and ports, the lower first.
pub(crate) type Addresses = [u8; 40];

/// From an address of this host to one of another.
pub(crate) type Way = (IpAddr, IpAddr);

/// A process's end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct End {
    pub(crate) addresses: Addresses,
    /// Of the two addresses, this end's is the higher.
    pub(crate) is_higher: bool,
}

impl End {
    /// From which address to which the relays of the connection's ends reach each other, as seen from this end.
    pub(crate) fn way(&self) -> Way {
        let (own, peer) = self.sockets();
        (own.ip(), peer.ip())
    }

    /// Addresses of this end's socket and of the other one's.
    pub(crate) fn sockets(&self) -> (SocketAddr, SocketAddr) {
        let word = |at: usize| u64::from_le_bytes(self.addresses[at..at + 8].try_into().expect("eight bytes"));
        let ip = |at: usize| {
            let bits = u128::from(word(at)) << 64 | u128::from(word(at + 8));
            IpAddr::V6(Ipv6Addr::from_bits(bits)).to_canonical()
        };
        let ports = word(32);
        let (low, high) = (SocketAddr::new(ip(0), (ports >> 16) as u16), SocketAddr::new(ip(16), ports as u16));
        if self.is_higher { (high, low) } else { (low, high) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;
    use thruway_sockets::board::Key;

    #[test]
    fn a_way_is_from_this_ends_address_to_the_others() {
        let (a, b): (SocketAddr, SocketAddr) = ("10.0.0.1:40000".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
        let key = Key::new(7, a, b).to_bytes();
        let addresses = *Key::addresses(&key);
        assert!(Key::is_higher(a, b));
        assert_eq!(End { addresses, is_higher: true }.sockets(), (a, b));
        assert_eq!(End { addresses, is_higher: true }.way(), (a.ip(), b.ip()));
        assert_eq!(End { addresses, is_higher: false }.way(), (b.ip(), a.ip()));
    }
}
