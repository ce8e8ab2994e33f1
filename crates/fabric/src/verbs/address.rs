//! Socket addresses, as the C library has them and as Rust has them.

use std::net::{IpAddr, SocketAddr};

/// An address as the C library wants it.
pub(super) fn socket_address(addr: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: zeroed is a valid value.
    let mut out: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match addr {
        SocketAddr::V4(v4) => {
            let sin = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: a sockaddr_storage holds any socket address.
            unsafe { (&raw mut out).cast::<libc::sockaddr_in>().write(sin) };
        }
        SocketAddr::V6(v6) => {
            let sin6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut out).cast::<libc::sockaddr_in6>().write(sin6) };
        }
    }
    out
}

/// The other way round; 0.0.0.0:0 for families that are not IP.
pub(super) fn from_socket_address(addr: &libc::sockaddr_storage) -> SocketAddr {
    match i32::from(addr.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that this is what it is.
            let sin = unsafe { (&raw const *addr).cast::<libc::sockaddr_in>().read() };
            SocketAddr::new(IpAddr::from(sin.sin_addr.s_addr.to_ne_bytes()), u16::from_be(sin.sin_port))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let sin6 = unsafe { (&raw const *addr).cast::<libc::sockaddr_in6>().read() };
            SocketAddr::new(IpAddr::from(sin6.sin6_addr.s6_addr), u16::from_be(sin6.sin6_port))
        }
        _ => SocketAddr::new(IpAddr::from([0; 4]), 0),
    }
}
