//! Where programs listen (RFC 1833): asking the rpcbind of a host, registering with that of this one, and being one.

mod client;
mod program;

pub use client::{Registered, Registration, find, is_running, register};
pub use program::Rpcbind;

use crate::xdr::{self, DecodeError, Decoder, Encoder};
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

/// The program's number.
pub const PROGRAM: u32 = 100_000;

/// The port that it listens on, on every host.
pub const PORT: u16 = 111;

/// Most bytes of a name of a network, an address or an owner.
const TEXT_MAX: u32 = 128;

/// Procedures; up to version 2, an address is a port.
mod procedure {
    pub(super) const SET: u32 = 1;
    pub(super) const UNSET: u32 = 2;
    pub(super) const GETADDR: u32 = 3;
    pub(super) const DUMP: u32 = 4;
    pub(super) const GETVERSADDR: u32 = 9;
}

/// What a program listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Network {
    /// A byte stream.
    Tcp,
    /// Datagrams.
    Udp,
}

/// A program that listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Listening {
    /// Its number.
    pub program: u32,
    /// Its version.
    pub version: u32,
    /// What it listens on.
    pub network: Network,
    /// Where.
    pub address: SocketAddr,
}

impl Network {
    /// Its name (`netid`) for addresses of this kind.
    pub fn id(self, address: IpAddr) -> &'static str {
        match (self, address.to_canonical()) {
            (Network::Tcp, IpAddr::V4(_)) => "tcp",
            (Network::Tcp, IpAddr::V6(_)) => "tcp6",
            (Network::Udp, IpAddr::V4(_)) => "udp",
            (Network::Udp, IpAddr::V6(_)) => "udp6",
        }
    }

    /// Its number in version 2, which knows only addresses of IP version 4.
    fn protocol(self) -> u32 {
        match self {
            Network::Tcp => 6,
            Network::Udp => 17,
        }
    }
}

/// An address as text, with the port behind it (RFC 5665, section 5.2.3).
pub fn universal(address: SocketAddr) -> String {
    let [high, low] = address.port().to_be_bytes();
    let mut text = address.ip().to_canonical().to_string();
    let _ = write!(text, ".{high}.{low}");
    text
}

/// The address that a text of this form is.
pub fn parse_universal(text: &str) -> Option<SocketAddr> {
    let (rest, low) = text.rsplit_once('.')?;
    let (host, high) = rest.rsplit_once('.')?;
    let port = u16::from_be_bytes([high.parse().ok()?, low.parse().ok()?]);
    Some(SocketAddr::new(host.parse().ok()?, port))
}

/// What is asked for or registered (`rpcb`).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    program: u32,
    version: u32,
    netid: String,
    address: String,
    owner: String,
}

impl Entry {
    fn encode(&self, out: &mut Encoder) {
        out.u32(self.program);
        out.u32(self.version);
        for text in [&self.netid, &self.address, &self.owner] {
            out.opaque(text.as_bytes());
        }
    }

    fn decode(d: &mut Decoder<'_>) -> xdr::Result<Entry> {
        let (program, version) = (d.u32()?, d.u32()?);
        Ok(Entry { program, version, netid: text(d)?, address: text(d)?, owner: text(d)? })
    }
}

fn text(d: &mut Decoder<'_>) -> xdr::Result<String> {
    let bytes = d.opaque(TEXT_MAX)?;
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| DecodeError::Invalid { value: bytes.len() as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_as_rpcinfo_shows_them() {
        for (address, text) in
            [("192.0.2.7:2049", "192.0.2.7.8.1"), ("0.0.0.0:111", "0.0.0.0.0.111"), ("[::1]:20048", "::1.78.80")]
        {
            assert_eq!(universal(address.parse().unwrap()), text);
            assert_eq!(parse_universal(text), Some(address.parse().unwrap()));
        }
        assert_eq!(universal("[::ffff:192.0.2.7]:1".parse().unwrap()), "192.0.2.7.0.1");
        for wrong in ["", ".", "1.2", "192.0.2.7", "192.0.2.7.8", "192.0.2.7.8.256", "host.8.1", "192.0.2.7.8.1 "] {
            assert_eq!(parse_universal(wrong), None, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn any_address_comes_back(address: (IpAddr, u16)) {
            let address = SocketAddr::new(address.0.to_canonical(), address.1);
            prop_assert_eq!(parse_universal(&universal(address)), Some(address));
        }

        #[test]
        fn any_text_is_an_address_or_not(text in ".{0,40}") {
            let _ = parse_universal(&text);
        }
    }
}
