//! How callers show who they are, and which ways a share takes.

use std::fmt;
use std::str::FromStr;
use thruway_rpc::gss::Service;
use thruway_rpc::message::flavor;
use thruway_rpc::server::Credential;
use thruway_rpc::xdr::Encoder;

/// A way to show who calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Security {
    /// The client says who its users are (`AUTH_SYS`); callers without a credential (`AUTH_NONE`) are nobody.
    Sys,
    /// By Kerberos (RPCSEC_GSS), with this protection of what is said.
    Kerberos(Service),
}

/// Object identifier of Kerberos 5, 1.2.840.113554.1.2.2, as in DER, without tag and length.
const KRB5: [u8; 9] = [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x12, 0x01, 0x02, 0x02];

impl Security {
    const ALL: [Security; 4] = [
        Security::Sys,
        Security::Kerberos(Service::None),
        Security::Kerberos(Service::Integrity),
        Security::Kerberos(Service::Privacy),
    ];

    /// That of a call.
    pub fn of(credential: &Credential) -> Security {
        match credential {
            Credential::Gss(caller) => Security::Kerberos(caller.service),
            _ => Security::Sys,
        }
    }

    /// Its number in the MOUNT protocol: a pseudo-flavor of RFC 2623, for those of Kerberos.
    pub fn pseudo_flavor(self) -> u32 {
        match self {
            Security::Sys => flavor::AUTH_SYS,
            Security::Kerberos(service) => 390_002 + service.number(),
        }
    }

    /// Appends `secinfo4` (RFC 8881, section 18.29.2).
    pub(crate) fn encode(self, out: &mut Encoder) {
        match self {
            Security::Sys => out.u32(flavor::AUTH_SYS),
            Security::Kerberos(service) => {
                out.u32(flavor::RPCSEC_GSS);
                // With the default quality of protection.
                out.opaque(&KRB5);
                out.u32(0);
                out.u32(service.number());
            }
        }
    }
}

impl fmt::Display for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Security::Sys => f.write_str("sys"),
            Security::Kerberos(service) => service.fmt(f),
        }
    }
}

/// Ways that a share takes, in the order in which clients are to try them: `krb5p:krb5i`. Each is there once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SecuritySet([Option<Security>; Security::ALL.len()]);

impl Default for SecuritySet {
    /// `sys`
    fn default() -> SecuritySet {
        SecuritySet::NONE.with(Security::Sys)
    }
}

impl SecuritySet {
    const NONE: SecuritySet = SecuritySet([None; Security::ALL.len()]);

    /// Those with these names, in this order.
    ///
    /// # Errors
    /// [`SecurityError`], also for an empty list.
    pub fn of(words: &[&str]) -> Result<SecuritySet, SecurityError> {
        if words.is_empty() {
            return Err(SecurityError(String::new()));
        }
        words.iter().try_fold(SecuritySet::NONE, |set, word| word.parse().map(|security| set.with(security)))
    }

    /// With one more, behind the others, if it is not there.
    fn with(mut self, security: Security) -> SecuritySet {
        if !self.contains(security) {
            let free = self.0.iter_mut().find(|place| place.is_none());
            *free.expect("there is a place for each") = Some(security);
        }
        self
    }

    /// Whether it has this one.
    pub fn contains(self, security: Security) -> bool {
        self.0.contains(&Some(security))
    }

    /// Those in it, the one that is to be tried first at the beginning.
    pub fn iter(self) -> impl Iterator<Item = Security> {
        self.0.into_iter().flatten()
    }

    /// Whether it has any of Kerberos.
    pub fn has_kerberos(self) -> bool {
        self.iter().any(|security| security != Security::Sys)
    }

    /// All that either has.
    pub(crate) fn union(self, other: SecuritySet) -> SecuritySet {
        other.iter().fold(self, SecuritySet::with)
    }

    /// Appends `SECINFO4resok`.
    pub(crate) fn encode(self, out: &mut Encoder) {
        let all: Vec<Security> = self.iter().collect();
        out.array(&all, |out, security| security.encode(out));
    }
}

impl FromStr for Security {
    type Err = SecurityError;

    fn from_str(word: &str) -> Result<Security, SecurityError> {
        let found = Security::ALL.into_iter().find(|security| security.to_string() == word);
        found.ok_or_else(|| SecurityError(word.into()))
    }
}

/// A word that is no way to show who calls.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}': unknown security flavor; expected sys, krb5, krb5i or krb5p")]
pub struct SecurityError(String);

impl FromStr for SecuritySet {
    type Err = SecurityError;

    fn from_str(text: &str) -> Result<SecuritySet, SecurityError> {
        SecuritySet::of(&text.split(':').collect::<Vec<_>>())
    }
}

impl fmt::Display for SecuritySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.iter().map(|security| security.to_string()).collect();
        f.write_str(&words.join(":"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_read_and_offered_as_written() {
        let set: SecuritySet = "krb5p:krb5:sys:krb5".parse().unwrap();
        assert_eq!(set.to_string(), "krb5p:krb5:sys", "each once");
        assert!(set.contains(Security::Sys) && !set.contains(Security::Kerberos(Service::Integrity)));
        let numbers: Vec<u32> = set.iter().map(Security::pseudo_flavor).collect();
        assert_eq!(numbers, [390_005, 390_003, 1], "RFC 2623");
        assert_eq!(SecuritySet::default().to_string(), "sys");
        for wrong in ["", "krb6", "sys:", "sys,krb5"] {
            assert!(wrong.parse::<SecuritySet>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn kerberos_is_described_as_in_the_rfc() {
        let mut out = Encoder::new();
        Security::Kerberos(Service::Integrity).encode(&mut out);
        let words: Vec<u8> = [6_u32, 9].iter().flat_map(|w| w.to_be_bytes()).collect();
        let oid = [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x12, 0x01, 0x02, 0x02, 0, 0, 0];
        let rest: Vec<u8> = [0_u32, 2].iter().flat_map(|w| w.to_be_bytes()).collect();
        assert_eq!(out.to_bytes(), [words, oid.to_vec(), rest].concat());
    }
}
