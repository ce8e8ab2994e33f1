//! Where connections come from, for what each may have a share of.

use crate::owner::{listener_owner, owner};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::OnceLock;

/// Where a connection comes from: another host, or a user of this one.
///
/// What is limited is shared out between origins, so that one of them alone keeps no other out. Users of this host
/// are origins of their own because all of them come from its loopback addresses, of which each has millions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// An IPv4 address; or the first 64 bits of an IPv6 address, the rest of which a host may choose as it likes.
    Host(IpAddr),
    /// The user with this number, over the loopback interface or a Unix socket.
    User(u32),
    /// Some user of this host: the connection has ended, or the kernel does not say whose it is.
    UnknownUser,
}

impl Origin {
    /// Where a TCP connection comes from, by the addresses of its two ends. Asks the kernel for the owner of a peer on
    /// the loopback interface, who is known only as long as the peer has not closed.
    ///
    /// A proxy on this host (an ssh tunnel, a container's port forwarder) counts as the user that runs it.
    pub fn of(peer: SocketAddr, local: SocketAddr) -> Origin {
        if !peer.ip().to_canonical().is_loopback() {
            return Origin::of_host(peer.ip());
        }
        owner(peer, local).map_or(Origin::UnknownUser, Origin::user)
    }

    /// As [`Origin::of`], of an accepted connection.
    pub fn of_stream(stream: &TcpStream, peer: SocketAddr) -> Origin {
        match stream.local_addr() {
            Ok(local) => Origin::of(peer, local),
            Err(_) if peer.ip().to_canonical().is_loopback() => Origin::UnknownUser,
            Err(_) => Origin::of_host(peer.ip()),
        }
    }

    /// The peer that accepted a TCP connection of this process. Over the loopback interface: the owner of the accepted socket.
    /// [`Origin::UnknownUser`] before it is accepted and after it is closed.
    ///
    /// Sockets of some other families (`AF_SMC`) accept TCP connections in the kernel, with root as the owner. So root is the result
    /// only while a socket of root listens at the peer's address.
    pub fn of_acceptor(peer: SocketAddr, local: SocketAddr) -> Origin {
        match Origin::of(peer, local) {
            Origin::User(0) => listener_owner(peer).map_or(Origin::UnknownUser, Origin::user),
            other => other,
        }
    }

    /// The user with this number, as the kernel reports it to this process. [`Origin::UnknownUser`] for the number that stands for
    /// all users without a mapping in the user namespace of this process.
    pub fn user(uid: u32) -> Origin {
        static UNMAPPED: OnceLock<Option<u32>> = OnceLock::new();
        if *UNMAPPED.get_or_init(unmapped_user) == Some(uid) { Origin::UnknownUser } else { Origin::User(uid) }
    }

    /// The host with this address.
    pub fn of_host(address: IpAddr) -> Origin {
        Origin::Host(match address.to_canonical() {
            IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
            v4 => v4,
        })
    }

    /// Whether it is a user who may do on this host whatever this process may: the same one, or root.
    pub fn is_own_user(self) -> bool {
        matches!(self, Origin::User(uid) if uid == 0 || uid == rustix::process::geteuid().as_raw())
    }
}

/// Number of all users without a mapping in the user namespace of this process. `None` if all users have one.
fn unmapped_user() -> Option<u32> {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if maps_all(&map) {
        return None;
    }
    let number = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    Some(number.and_then(|text| text.trim().parse().ok()).unwrap_or(65534))
}

/// Whether a table of user_namespaces(7) maps each user to the same number.
fn maps_all(table: &str) -> bool {
    table.split_whitespace().eq(["0", "0", "4294967295"])
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Host(address @ IpAddr::V4(_)) => address.fmt(f),
            Origin::Host(network) => write!(f, "{network}/64"),
            Origin::User(uid) => write!(f, "user {uid} of this host"),
            Origin::UnknownUser => f.write_str("a user of this host"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_user_namespaces_are_recognised() {
        assert!(maps_all("         0          0 4294967295\n"));
        for table in ["", "0 0 65536\n", "65534 1000 1\n", "0 100000 4294967295", "0 0 1000\n1000 1000 4294966295\n"] {
            assert!(!maps_all(table), "{table}");
        }
    }
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_host_has_many_addresses() {
        let host = |address: &str| Origin::of_host(address.parse().unwrap()).to_string();
        assert_eq!(host("192.0.2.1"), "192.0.2.1");
        assert_eq!(host("::ffff:192.0.2.1"), "192.0.2.1");
        assert_eq!(host("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
    }

    #[test]
    fn a_connection_from_this_host_comes_from_its_user() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, peer) = listener.accept().unwrap();
        let origin = Origin::of_stream(&far, peer);
        assert_eq!(origin, Origin::User(rustix::process::geteuid().as_raw()));
        assert!(origin.is_own_user() && !Origin::UnknownUser.is_own_user());
        let local = far.local_addr().unwrap();
        assert_eq!(Origin::of_acceptor(local, peer), origin);
        drop(near);
        let _ = std::io::Read::read(&mut &far, &mut [0]);
        drop(far);
        assert_eq!(Origin::of(peer, local), Origin::UnknownUser);
        assert_eq!(Origin::of_acceptor(local, peer), Origin::UnknownUser);
        assert!(!Origin::of("192.0.2.1:7".parse().unwrap(), local).is_own_user());
    }
}
