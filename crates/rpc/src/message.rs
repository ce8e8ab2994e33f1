//! Calls and replies (RFC 5531), without their arguments and results.

use crate::xdr::{DecodeError, Decoder, Encoder, Result};
use std::fmt;

/// The version of RPC.
const RPC_VERSION: u32 = 2;

/// Most bytes of a credential or a verifier.
pub const AUTH_MAX: u32 = 400;

/// Numbers of authentication flavors.
pub mod flavor {
    /// Nobody.
    pub const AUTH_NONE: u32 = 0;
    /// A user and groups, as the client says.
    pub const AUTH_SYS: u32 = 1;
    /// Tokens of the GSS-API (RFC 2203).
    pub const RPCSEC_GSS: u32 = 6;
    /// Asks whether the server can do TLS (RFC 9289).
    pub const AUTH_TLS: u32 = 7;
}

/// A credential or a verifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpaqueAuth<'a> {
    /// Its flavor.
    pub flavor: u32,
    /// What its flavor makes of it; at most [`AUTH_MAX`] bytes.
    pub body: &'a [u8],
}

impl<'a> OpaqueAuth<'a> {
    /// `AUTH_NONE`.
    pub const NONE: OpaqueAuth<'static> = OpaqueAuth { flavor: flavor::AUTH_NONE, body: &[] };

    fn decode(decoder: &mut Decoder<'a>) -> Result<OpaqueAuth<'a>> {
        Ok(OpaqueAuth { flavor: decoder.u32()?, body: decoder.opaque(AUTH_MAX)? })
    }

    fn encode(&self, out: &mut Encoder) {
        out.u32(self.flavor);
        out.opaque(self.body);
    }
}

/// The header of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallHeader<'a> {
    /// Pairs the reply with it.
    pub xid: u32,
    /// Which program is called.
    pub program: u32,
    /// Which version of it.
    pub version: u32,
    /// Which procedure of that.
    pub procedure: u32,
    /// Who calls.
    pub credential: OpaqueAuth<'a>,
    /// Proves that.
    pub verifier: OpaqueAuth<'a>,
}

/// The header of a message from a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incoming<'a> {
    /// A call.
    Call(CallHeader<'a>),
    /// A call in another version of RPC: [`Refusal::RpcMismatch`] is the answer.
    OtherVersion {
        /// Pairs the reply with it.
        xid: u32,
    },
    /// A reply to a call of ours.
    Reply(ReplyHeader<'a>),
}

const CALL: u32 = 0;
const REPLY: u32 = 1;

impl<'a> Incoming<'a> {
    /// Decodes the header; the decoder is then at the arguments or the results.
    ///
    /// # Errors
    /// If it is no header. There is nothing that could be answered.
    pub fn decode(decoder: &mut Decoder<'a>) -> Result<Incoming<'a>> {
        let xid = decoder.u32()?;
        match decoder.u32()? {
            CALL => {}
            REPLY => return Ok(Incoming::Reply(ReplyHeader::decode(xid, decoder)?)),
            value => return Err(DecodeError::Invalid { value }),
        }
        if decoder.u32()? != RPC_VERSION {
            return Ok(Incoming::OtherVersion { xid });
        }
        Ok(Incoming::Call(CallHeader {
            xid,
            program: decoder.u32()?,
            version: decoder.u32()?,
            procedure: decoder.u32()?,
            credential: OpaqueAuth::decode(decoder)?,
            verifier: OpaqueAuth::decode(decoder)?,
        }))
    }
}

impl CallHeader<'_> {
    /// Appends it.
    pub fn encode(&self, out: &mut Encoder) {
        for word in [self.xid, CALL, RPC_VERSION, self.program, self.version, self.procedure] {
            out.u32(word);
        }
        self.credential.encode(out);
        self.verifier.encode(out);
    }
}

/// Why credentials are refused (`auth_stat`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AuthError {
    /// The credential cannot be decoded.
    BadCredential,
    /// The client has to begin a new session.
    RejectedCredential,
    /// The verifier cannot be decoded.
    BadVerifier,
    /// The verifier has expired or is a replay.
    RejectedVerifier,
    /// The flavor is not good enough, or not known.
    TooWeak,
    /// The GSS-API has no credential for this context (RFC 2203).
    GssCredentialProblem,
    /// The GSS-API has a problem with this context (RFC 2203).
    GssContextProblem,
    /// Another one, by its number.
    Other(u32),
}

impl AuthError {
    const NUMBERS: [(AuthError, u32); 7] = [
        (AuthError::BadCredential, 1),
        (AuthError::RejectedCredential, 2),
        (AuthError::BadVerifier, 3),
        (AuthError::RejectedVerifier, 4),
        (AuthError::TooWeak, 5),
        (AuthError::GssCredentialProblem, 13),
        (AuthError::GssContextProblem, 14),
    ];

    /// Its number.
    pub fn number(self) -> u32 {
        if let AuthError::Other(number) = self {
            return number;
        }
        let known = AuthError::NUMBERS.iter().find(|(error, _)| *error == self);
        known.expect("each of them has a number").1
    }

    fn from_number(number: u32) -> AuthError {
        let known = AuthError::NUMBERS.iter().find(|(_, n)| *n == number);
        known.map_or(AuthError::Other(number), |(error, _)| *error)
    }
}

/// Why a call has no results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Only this version of RPC is spoken.
    RpcMismatch {
        /// The lowest version.
        low: u32,
        /// The highest version.
        high: u32,
    },
    /// The credentials are refused.
    Auth(AuthError),
    /// There is no such program.
    ProgramUnavailable,
    /// There is no such version of the program.
    ProgramMismatch {
        /// The lowest version.
        low: u32,
        /// The highest version.
        high: u32,
    },
    /// There is no such procedure.
    ProcedureUnavailable,
    /// The arguments cannot be decoded.
    GarbageArguments,
    /// The server cannot.
    SystemError,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::RpcMismatch { low, high } => write!(f, "it speaks RPC versions {low} to {high}"),
            Refusal::Auth(AuthError::TooWeak) => {
                f.write_str("it does not serve this client, or wants TLS or Kerberos of it (AUTH_TOOWEAK)")
            }
            Refusal::Auth(error) => write!(f, "the credential is not accepted ({error:?})"),
            Refusal::ProgramUnavailable => f.write_str("it has no such program"),
            Refusal::ProgramMismatch { low, high } => write!(f, "it has versions {low} to {high} of the program"),
            Refusal::ProcedureUnavailable => f.write_str("it has no such procedure"),
            Refusal::GarbageArguments => f.write_str("it cannot decode the call"),
            Refusal::SystemError => f.write_str("it cannot do that now (SYSTEM_ERR)"),
        }
    }
}

impl Refusal {
    /// The answer to a call in another version of RPC.
    pub const OTHER_VERSION: Refusal = Refusal::RpcMismatch { low: RPC_VERSION, high: RPC_VERSION };

    /// Appends a reply that consists of this.
    pub fn encode(&self, xid: u32, verifier: OpaqueAuth<'_>, out: &mut Encoder) {
        out.u32(xid);
        out.u32(REPLY);
        match *self {
            Refusal::RpcMismatch { low, high } => [DENIED, 0, low, high].into_iter().for_each(|w| out.u32(w)),
            Refusal::Auth(error) => [DENIED, 1, error.number()].into_iter().for_each(|w| out.u32(w)),
            accepted => {
                out.u32(ACCEPTED);
                verifier.encode(out);
                match accepted {
                    Refusal::ProgramUnavailable => out.u32(1),
                    Refusal::ProgramMismatch { low, high } => [2, low, high].into_iter().for_each(|w| out.u32(w)),
                    Refusal::ProcedureUnavailable => out.u32(3),
                    Refusal::GarbageArguments => out.u32(4),
                    _ => out.u32(5),
                }
            }
        }
    }
}

const ACCEPTED: u32 = 0;
const DENIED: u32 = 1;

/// Appends the header of a reply with results.
pub fn encode_success(xid: u32, verifier: OpaqueAuth<'_>, out: &mut Encoder) {
    out.u32(xid);
    out.u32(REPLY);
    out.u32(ACCEPTED);
    verifier.encode(out);
    out.u32(0);
}

/// The header of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader<'a> {
    /// That of the call.
    pub xid: u32,
    /// The server's verifier; `AUTH_NONE` in a reply that has none.
    pub verifier: OpaqueAuth<'a>,
    /// Whether results follow.
    pub refusal: Option<Refusal>,
}

impl<'a> ReplyHeader<'a> {
    fn decode(xid: u32, decoder: &mut Decoder<'a>) -> Result<ReplyHeader<'a>> {
        let refused = |verifier, refusal| Ok(ReplyHeader { xid, verifier, refusal });
        match decoder.u32()? {
            ACCEPTED => {}
            DENIED => {
                let refusal = match decoder.u32()? {
                    0 => Refusal::RpcMismatch { low: decoder.u32()?, high: decoder.u32()? },
                    1 => Refusal::Auth(AuthError::from_number(decoder.u32()?)),
                    value => return Err(DecodeError::Invalid { value }),
                };
                return refused(OpaqueAuth::NONE, Some(refusal));
            }
            value => return Err(DecodeError::Invalid { value }),
        }
        let verifier = OpaqueAuth::decode(decoder)?;
        let refusal = match decoder.u32()? {
            0 => None,
            1 => Some(Refusal::ProgramUnavailable),
            2 => Some(Refusal::ProgramMismatch { low: decoder.u32()?, high: decoder.u32()? }),
            3 => Some(Refusal::ProcedureUnavailable),
            4 => Some(Refusal::GarbageArguments),
            5 => Some(Refusal::SystemError),
            value => return Err(DecodeError::Invalid { value }),
        };
        refused(verifier, refusal)
    }
}

/// A user and groups, as a client says: the body of an `AUTH_SYS` credential (RFC 5531, appendix A).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AuthSys {
    /// The client's name of itself; at most 255 bytes.
    pub machine: Vec<u8>,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// More groups; at most 16.
    pub gids: Vec<u32>,
}

impl AuthSys {
    /// Decodes the body of a credential.
    ///
    /// # Errors
    /// If it is none.
    pub fn decode(body: &[u8]) -> Result<AuthSys> {
        let mut decoder = Decoder::new(body);
        let _stamp = decoder.u32()?;
        let machine = decoder.opaque(255)?.to_vec();
        let (uid, gid) = (decoder.u32()?, decoder.u32()?);
        let gids = decoder.array(16, Decoder::u32)?;
        decoder.finish()?;
        Ok(AuthSys { machine, uid, gid, gids })
    }

    /// The body of a credential.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::new();
        out.u32(0);
        out.opaque(&self.machine);
        out.u32(self.uid);
        out.u32(self.gid);
        out.array(&self.gids, |out, gid| out.u32(*gid));
        out.into_parts().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(encode: impl FnOnce(&mut Encoder)) -> Vec<u8> {
        let mut out = Encoder::new();
        encode(&mut out);
        out.into_parts().0
    }

    #[test]
    fn a_call_is_as_in_the_rfc() {
        let sys = AuthSys { machine: b"host".into(), uid: 1000, gid: 100, gids: vec![4, 27] }.encode();
        let call = CallHeader {
            xid: 0x1234_5678,
            program: 100_003,
            version: 3,
            procedure: 1,
            credential: OpaqueAuth { flavor: flavor::AUTH_SYS, body: &sys },
            verifier: OpaqueAuth::NONE,
        };
        let encoded = bytes(|out| call.encode(out));
        let expected = "12345678 00000000 00000002 000186a3 00000003 00000001 \
                        00000001 00000020 00000000 00000004 686f7374 000003e8 00000064 00000002 00000004 0000001b \
                        00000000 00000000";
        let words: Vec<String> = encoded.chunks(4).map(|w| w.iter().map(|b| format!("{b:02x}")).collect()).collect();
        assert_eq!(words.join(" "), expected);
        let mut decoder = Decoder::new(&encoded);
        assert_eq!(Incoming::decode(&mut decoder), Ok(Incoming::Call(call)));
        assert_eq!(decoder.finish(), Ok(()));
    }

    #[test]
    fn another_version_of_rpc_is_told_from_no_call() {
        let other = bytes(|out| [7, CALL, 3, 100_003].into_iter().for_each(|w| out.u32(w)));
        assert_eq!(Incoming::decode(&mut Decoder::new(&other)), Ok(Incoming::OtherVersion { xid: 7 }));
        let none = bytes(|out| [7, 2, 2].into_iter().for_each(|w| out.u32(w)));
        assert_eq!(Incoming::decode(&mut Decoder::new(&none)), Err(DecodeError::Invalid { value: 2 }));
    }

    #[test]
    fn credentials_have_limits() {
        let mut sys = AuthSys { machine: vec![b'x'; 255], uid: 0, gid: 0, gids: (0..16).collect() };
        assert_eq!(AuthSys::decode(&sys.encode()), Ok(sys.clone()));
        sys.gids.push(16);
        assert_eq!(AuthSys::decode(&sys.encode()), Err(DecodeError::TooLong { len: 17, max: 16 }));
        let call = CallHeader {
            xid: 0,
            program: 0,
            version: 0,
            procedure: 0,
            credential: OpaqueAuth { flavor: 1, body: &[0; 401] },
            verifier: OpaqueAuth::NONE,
        };
        let encoded = bytes(|out| call.encode(out));
        let too_long = DecodeError::TooLong { len: 401, max: 400 };
        assert_eq!(Incoming::decode(&mut Decoder::new(&encoded)), Err(too_long));
    }

    fn refusals() -> impl Strategy<Value = Option<Refusal>> {
        prop_oneof![
            Just(None),
            Just(Some(Refusal::ProgramUnavailable)),
            Just(Some(Refusal::ProcedureUnavailable)),
            Just(Some(Refusal::GarbageArguments)),
            Just(Some(Refusal::SystemError)),
            any::<(u32, u32)>().prop_map(|(low, high)| Some(Refusal::ProgramMismatch { low, high })),
            any::<(u32, u32)>().prop_map(|(low, high)| Some(Refusal::RpcMismatch { low, high })),
            any::<u32>().prop_map(|n| Some(Refusal::Auth(AuthError::from_number(n)))),
            (0_u32..16).prop_map(|n| Some(Refusal::Auth(AuthError::from_number(n)))),
        ]
    }

    proptest! {
        #[test]
        fn replies_come_back(xid: u32, body in prop::collection::vec(any::<u8>(), 0..40), refusal in refusals()) {
            let verifier = OpaqueAuth { flavor: 6, body: &body };
            let encoded = bytes(|out| match refusal {
                Some(refusal) => refusal.encode(xid, verifier, out),
                None => encode_success(xid, verifier, out),
            });
            let mut decoder = Decoder::new(&encoded);
            let denied = matches!(refusal, Some(Refusal::RpcMismatch { .. } | Refusal::Auth(_)));
            let verifier = if denied { OpaqueAuth::NONE } else { verifier };
            prop_assert_eq!(Incoming::decode(&mut decoder), Ok(Incoming::Reply(ReplyHeader { xid, verifier, refusal })));
            prop_assert_eq!(decoder.finish(), Ok(()));
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Incoming::decode(&mut Decoder::new(&bytes));
            let _ = AuthSys::decode(&bytes);
        }
    }
}
