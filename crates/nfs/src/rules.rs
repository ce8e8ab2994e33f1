//! Who may use a share, and how: rules for networks and for names in certificates.

use crate::security::SecuritySet;
use crate::squash::Squash;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use thruway_options::{OptionError, OptionKind, Required, Schema, Set};

/// Clients that a rule is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Clients {
    /// Those with addresses that have these first bits.
    Network {
        /// An address; bits behind the first are 0.
        address: IpAddr,
        /// How many bits count.
        prefix: u8,
    },
    /// Those whose certificate has this DNS name.
    Certificate(String),
}

/// A rule for clients of a share. The first that is for a client counts; without any rule everybody may use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Whom it is for.
    pub clients: Clients,
    /// Whether they can change nothing, if not as the share says.
    pub read_only: Option<bool>,
    /// Which of their users count as nobody, if not as the share says.
    pub squash: Option<Squash>,
    /// How they show who calls, if not as the share says.
    pub security: Option<SecuritySet>,
}

/// The options of a rule.
pub const OPTIONS: Schema<Rule> = Schema {
    what: "rule",
    required: &[Required {
        key: "clients",
        about: "An address, a network like `192.0.2.0/24`, or `cert:NAME` of a certificate",
    }],
    hints: &[],
    options: &[
        OptionKind {
            name: "ro",
            key: "read-only",
            set: Set::Flag { set: |rule, value| rule.read_only = Some(value), off: Some("rw") },
            get: |rule| rule.read_only.map_or(String::new(), |value| value.to_string()),
            default: "",
            about: "Whether they can change nothing. Default: as the share says",
            is_reloaded: true,
        },
        OptionKind {
            name: "squash",
            key: "squash",
            set: Set::Choice(&[
                ("root", |rule| rule.squash = Some(Squash::Root)),
                ("all", |rule| rule.squash = Some(Squash::All)),
                ("none", |rule| rule.squash = Some(Squash::None)),
            ]),
            get: |rule| rule.squash.map_or(String::new(), |squash| squash.to_string()),
            default: "",
            about: "Squashing of their users. Default: that of the share",
            is_reloaded: true,
        },
        OptionKind {
            name: "sec",
            key: "sec",
            set: Set::List {
                value: "FLAVOR",
                separator: ':',
                set: |rule, flavors| {
                    rule.security = Some(SecuritySet::of(flavors).map_err(OptionError::other)?);
                    Ok(())
                },
            },
            get: |rule| rule.security.map_or(String::new(), |security| security.to_string()),
            default: "",
            about: "Their security flavors: `sys`, `krb5`, `krb5i`, `krb5p`. Default: as the share says",
            is_reloaded: true,
        },
    ],
};

/// Why a rule cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// No network, address or certificate.
    #[error("'{0}': expected an address, a network like 192.0.2.0/24, or cert:NAME with a DNS name of certificates")]
    Clients(String),
    /// More than a network.
    #[error(
        "'{text}' has bits behind its first {prefix}: write {network}/{prefix} for the network, or the address alone"
    )]
    HostBits {
        /// As it was written.
        text: String,
        /// The network that it is in.
        network: IpAddr,
        /// Bits of that.
        prefix: u8,
    },
    /// An unknown option, or an invalid value of one.
    #[error(transparent)]
    Option(#[from] OptionError),
}

fn bits(address: IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    }
}

/// The first bits of an address, the others 0.
fn network_of(address: IpAddr, prefix: u8) -> IpAddr {
    let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
    let kept = bits(address).0 & mask;
    match address {
        IpAddr::V4(_) => IpAddr::V4(((kept >> 96) as u32).into()),
        IpAddr::V6(_) => IpAddr::V6(kept.into()),
    }
}

impl Clients {
    /// Whether a client with this address, and these names in its certificate, is one of them.
    pub fn contain(&self, address: Option<IpAddr>, names: &[String]) -> bool {
        match self {
            Clients::Certificate(name) => names.iter().any(|known| known.eq_ignore_ascii_case(name)),
            Clients::Network { address: network, prefix } => address
                .map(|address| address.to_canonical())
                .is_some_and(|a| a.is_ipv4() == network.is_ipv4() && network_of(a, *prefix) == *network),
        }
    }
}

impl fmt::Display for Clients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Clients::Certificate(name) => write!(f, "cert:{name}"),
            Clients::Network { address, prefix } if *prefix == bits(*address).1 => write!(f, "{address}"),
            Clients::Network { address, prefix } => write!(f, "{address}/{prefix}"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.clients, OPTIONS.words_behind(self, '+'))
    }
}

impl FromStr for Clients {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Clients, RuleError> {
        let wrong = || RuleError::Clients(text.into());
        if let Some(name) = text.strip_prefix("cert:") {
            // Names are compared whole.
            let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            let is_name = !name.is_empty() && name.chars().all(legal);
            return if is_name { Ok(Clients::Certificate(name.into())) } else { Err(wrong()) };
        }
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = bits(address).1;
        let prefix = prefix.map_or(Some(most), |prefix| prefix.parse().ok().filter(|prefix| *prefix <= most));
        let prefix = prefix.ok_or_else(wrong)?;
        // Clients of both families are known by their own addresses (`::ffff:192.0.2.1` is 192.0.2.1).
        let (address, prefix) = match (address, address.to_canonical(), prefix.checked_sub(96)) {
            (IpAddr::V6(_), own @ IpAddr::V4(_), Some(prefix)) => (own, prefix),
            (IpAddr::V6(_), IpAddr::V4(_), None) => return Err(wrong()),
            _ => (address, prefix),
        };
        let network = network_of(address, prefix);
        if network != address {
            return Err(RuleError::HostBits { text: text.into(), network, prefix });
        }
        Ok(Clients::Network { address, prefix })
    }
}

impl From<Clients> for Rule {
    /// A rule without options.
    fn from(clients: Clients) -> Rule {
        Rule { clients, read_only: None, squash: None, security: None }
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    /// `CLIENTS[+OPTION]...`, with [`OPTIONS`].
    fn from_str(text: &str) -> Result<Rule, RuleError> {
        let mut parts = text.split('+');
        let mut rule = Rule::from(parts.next().unwrap_or_default().parse::<Clients>()?);
        parts.try_for_each(|word| OPTIONS.set_known_word(&mut rule, word))?;
        Ok(rule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule(text: &str) -> Result<Rule, RuleError> {
        text.parse()
    }

    #[test]
    fn rules_are_read_as_written() {
        let of = |text: &str| rule(text).unwrap();
        assert_eq!(of("192.0.2.0/24").clients.to_string(), "192.0.2.0/24");
        assert_eq!(of("192.0.2.7").clients.to_string(), "192.0.2.7");
        assert_eq!(of("0.0.0.0/0+ro").read_only, Some(true));
        let both = of("2001:db8::/32+rw+squash=none");
        assert_eq!((both.clients.to_string().as_str(), both.read_only), ("2001:db8::/32", Some(false)));
        assert_eq!(both.squash, Some(Squash::None));
        assert_eq!(of("192.0.2.7+sec=krb5i:krb5p").security, Some("krb5i:krb5p".parse().unwrap()));
        assert_eq!(of("cert:a.example+squash=all").clients, Clients::Certificate("a.example".into()));
        for wrong in [
            "",
            "x",
            "192.0.2.0/33",
            "192.0.2.0/",
            "::/129",
            "cert:",
            "cert:*.example",
            "cert:Backup Host",
            "192.0.2/24",
            "192.0.2.1+no",
            "192.0.2.1+",
            "192.0.2.1+sec=krb6",
            "::ffff:0:0/95",
        ] {
            assert!(rule(wrong).is_err(), "{wrong}");
        }
        let said = rule("192.0.2.5/24").unwrap_err().to_string();
        assert!(said.contains("192.0.2.0/24"), "{said}");
    }

    #[test]
    fn rules_are_for_those_whom_they_name() {
        let has = |clients: &str, address: &str| {
            rule(clients).unwrap().clients.contain(Some(address.parse().unwrap()), &["B.example".into()])
        };
        assert!(has("192.0.2.0/24", "192.0.2.255") && !has("192.0.2.0/24", "192.0.3.0"));
        assert!(has("192.0.2.7", "192.0.2.7") && !has("192.0.2.7", "192.0.2.6"));
        assert!(has("192.0.2.0/24", "::ffff:192.0.2.9"), "as it comes by a socket for both");
        assert!(has("::ffff:192.0.2.0/120", "192.0.2.9") && !has("::ffff:192.0.2.7", "192.0.2.9"));
        assert!(has("0.0.0.0/0", "203.0.113.9") && !has("0.0.0.0/0", "2001:db8::1") && !has("::/0", "203.0.113.9"));
        assert!(has("2001:db8::/33", "2001:db8:7fff::1") && !has("2001:db8::/33", "2001:db8:8000::1"));
        assert!(has("cert:b.example", "192.0.2.1") && !has("cert:a.example", "192.0.2.1"));
        assert!(!rule("0.0.0.0/0").unwrap().clients.contain(None, &[]));
    }

    proptest! {
        #[test]
        fn networks_come_back(address: u32, prefix in 0_u8..=32) {
            let address = network_of(IpAddr::V4(address.into()), prefix);
            let clients = Clients::Network { address, prefix };
            prop_assert_eq!(clients.to_string().parse::<Clients>(), Ok(clients.clone()));
            prop_assert!(clients.contain(Some(address), &[]));
        }
    }
}
