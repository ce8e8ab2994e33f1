//! RPCSEC_GSS, version 1 (RFC 2203): what is in its credentials, and what it makes of arguments and results.

use crate::xdr::{DecodeError, Decoder, Encoder, Result};
use std::fmt;

/// The version of RPCSEC_GSS. Nothing asks for the channel bindings of version 2 (RFC 5403).
const VERSION: u32 = 1;

/// Longest handle of a context, in bytes.
const HANDLE_MAX: u32 = 64;

/// Numbers of calls beyond this are refused: the client makes another context (RFC 2203, section 5.3.3.1).
pub const SEQUENCE_MAX: u32 = 0x8000_0000;

/// What a call is about (`rpc_gss_proc_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It calls a procedure.
    Data,
    /// It makes a context.
    Init,
    /// It goes on with that.
    ContinueInit,
    /// It ends a context.
    Destroy,
}

/// What is done to arguments and results (`rpc_gss_service_t`), from the least to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Service {
    /// Nothing: only headers are signed (`krb5`).
    None,
    /// They are signed (`krb5i`).
    Integrity,
    /// They are encrypted (`krb5p`).
    Privacy,
}

impl Service {
    /// Its number.
    pub fn number(self) -> u32 {
        match self {
            Service::None => 1,
            Service::Integrity => 2,
            Service::Privacy => 3,
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Service::None => "krb5",
            Service::Integrity => "krb5i",
            Service::Privacy => "krb5p",
        })
    }
}

/// The body of a credential (`rpc_gss_cred_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GssCredential<'a> {
    /// What the call is about.
    pub action: Action,
    /// Number of the call in its context.
    pub sequence: u32,
    /// What is done to arguments and results.
    pub service: Service,
    /// The context.
    pub handle: &'a [u8],
}

impl<'a> GssCredential<'a> {
    /// Decodes the body of a credential.
    ///
    /// # Errors
    /// If it is none of version 1.
    pub fn decode(body: &'a [u8]) -> Result<GssCredential<'a>> {
        let mut d = Decoder::new(body);
        match d.u32()? {
            VERSION => {}
            value => return Err(DecodeError::Invalid { value }),
        }
        let action = match d.u32()? {
            0 => Action::Data,
            1 => Action::Init,
            2 => Action::ContinueInit,
            3 => Action::Destroy,
            value => return Err(DecodeError::Invalid { value }),
        };
        let sequence = d.u32()?;
        let service = match d.u32()? {
            1 => Service::None,
            2 => Service::Integrity,
            3 => Service::Privacy,
            // That of a call that makes a context means nothing.
            _ if matches!(action, Action::Init | Action::ContinueInit) => Service::None,
            value => return Err(DecodeError::Invalid { value }),
        };
        let handle = d.opaque(HANDLE_MAX)?;
        d.finish()?;
        Ok(GssCredential { action, sequence, service, handle })
    }

    /// The body of a credential.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::new();
        let action = match self.action {
            Action::Data => 0,
            Action::Init => 1,
            Action::ContinueInit => 2,
            Action::Destroy => 3,
        };
        [VERSION, action, self.sequence, self.service.number()].into_iter().for_each(|word| out.u32(word));
        out.opaque(self.handle);
        out.into_parts().0
    }
}

/// The results of a call that makes a context (`rpc_gss_init_res`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitResult {
    /// The context, if there is one.
    pub handle: Vec<u8>,
    /// Major status of the GSS-API.
    pub major: u32,
    /// Minor status.
    pub minor: u32,
    /// So many numbers of calls may be outstanding.
    pub window: u32,
    /// A token for the client.
    pub token: Vec<u8>,
}

impl InitResult {
    /// Decodes it.
    ///
    /// # Errors
    /// If it is none.
    pub fn decode(d: &mut Decoder<'_>, token_max: u32) -> Result<InitResult> {
        Ok(InitResult {
            handle: d.opaque(HANDLE_MAX)?.to_vec(),
            major: d.u32()?,
            minor: d.u32()?,
            window: d.u32()?,
            token: d.opaque(token_max)?.to_vec(),
        })
    }

    /// Appends it.
    pub fn encode(&self, out: &mut Encoder) {
        out.opaque(&self.handle);
        [self.major, self.minor, self.window].into_iter().for_each(|word| out.u32(word));
        out.opaque(&self.token);
    }
}

/// Which numbers of calls have come, of the last so many (RFC 2203, section 5.3.3.1).
#[derive(Debug)]
pub struct Window {
    /// The highest that has come; none before the first.
    highest: Option<u32>,
    /// One bit for each number up to the highest, at its remainder.
    seen: [u64; Window::SIZE as usize / 64],
}

impl Default for Window {
    fn default() -> Window {
        Window { highest: None, seen: [0; Window::SIZE as usize / 64] }
    }
}

impl Window {
    /// How many numbers it holds. Calls by several connections overtake each other, so it is wider than any has calls in progress.
    pub const SIZE: u32 = 1024;

    fn bit(&mut self, sequence: u32) -> (&mut u64, u64) {
        let at = sequence % Window::SIZE;
        (&mut self.seen[at as usize / 64], 1 << (at % 64))
    }

    /// Takes a number; whether it is a new one.
    pub fn take(&mut self, sequence: u32) -> bool {
        match self.highest {
            Some(highest) if sequence <= highest => {
                if highest - sequence >= Window::SIZE {
                    return false;
                }
            }
            Some(highest) if sequence - highest < Window::SIZE => {
                for passed in highest + 1..=sequence {
                    let (word, bit) = self.bit(passed);
                    *word &= !bit;
                }
                self.highest = Some(sequence);
            }
            _ => *self = Window { highest: Some(sequence), ..Window::default() },
        }
        let (word, bit) = self.bit(sequence);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn credentials_are_as_in_the_rfc() {
        let credential =
            GssCredential { action: Action::Data, sequence: 7, service: Service::Privacy, handle: b"abcd" };
        let words = [1, 0, 7, 3, 4].iter().flat_map(|w: &u32| w.to_be_bytes()).chain(*b"abcd").collect::<Vec<u8>>();
        assert_eq!(credential.encode(), words);
        assert_eq!(GssCredential::decode(&words), Ok(credential));
        let with = |at: usize, value: u8| {
            let mut other = words.clone();
            other[4 * at + 3] = value;
            GssCredential::decode(&other).map(drop)
        };
        assert_eq!(with(0, 2), Err(DecodeError::Invalid { value: 2 }), "the version");
        assert_eq!(with(1, 4), Err(DecodeError::Invalid { value: 4 }), "the action");
        assert_eq!(with(3, 0), Err(DecodeError::Invalid { value: 0 }), "the service");
        assert_eq!(with(4, 65), Err(DecodeError::TooLong { len: 65, max: 64 }), "the handle");
        assert_eq!(GssCredential::decode(&[&words[..], &[0; 4]].concat()), Err(DecodeError::Trailing(4)));
    }

    proptest! {
        #[test]
        fn each_number_is_taken_once(steps in prop::collection::vec(0_u32..3 * Window::SIZE, 1..400)) {
            let (mut window, mut taken, mut highest) = (Window::default(), HashSet::new(), 0);
            for (at, step) in steps.into_iter().enumerate() {
                // Forward and back, from some number on.
                let sequence = (5000 + at as u32 * 100 + step).saturating_sub(Window::SIZE);
                let is_new = window.take(sequence);
                let fits = highest < Window::SIZE || sequence > highest - Window::SIZE;
                prop_assert_eq!(is_new, fits && !taken.contains(&sequence), "{} of {}", sequence, highest);
                taken.insert(sequence);
                highest = highest.max(sequence);
            }
        }

        #[test]
        fn any_bytes_are_a_credential_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(credential) = GssCredential::decode(&bytes) {
                let encoded = credential.encode();
                prop_assert_eq!(GssCredential::decode(&encoded), Ok(credential));
            }
            let _ = InitResult::decode(&mut Decoder::new(&bytes), 64);
        }
    }
}
