//! What the system lets one process have, and what counts as one host where each has a share.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::{IpAddr, Ipv6Addr};

/// Raises the number of files this process may have open to the most it is allowed: a server has
/// several for every session. Best effort.
pub fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, ?maximum, "raising the number of open files");
    }
}

/// How many files this process may have open.
pub fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)
}

/// One in so many of the files that this process may have open.
pub fn share_of_open_files(of: u64) -> usize {
    usize::try_from(open_files() / of).unwrap_or(usize::MAX)
}

/// What stands for a host where each has a share: its address, of IPv6 the first 64 bits of it, the rest of which one host may
/// choose as it likes.
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_many_addresses() {
        let host = |address: &str| host_of(address.parse().unwrap()).to_string();
        assert_eq!(host("192.0.2.1"), "192.0.2.1");
        assert_eq!(host("::ffff:192.0.2.1"), "192.0.2.1");
        assert_eq!(host("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    }
}
