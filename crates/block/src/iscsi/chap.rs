//! CHAP (RFC 7143 12.1.3, RFC 1994), one way and mutual.

use super::text::{Keys, binary, hex, number};
use md5::{Digest as _, Md5};
use ring::digest as sha;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use subtle::ConstantTimeEq;
use thruway_engine::random::random;

/// Algorithms, the better first: SHA-256, SHA-1, MD5.
const ALGORITHMS: [u8; 3] = [7, 6, 5];
/// Bytes of a challenge of ours.
const CHALLENGE: usize = 32;
/// The longest challenge that is answered.
const CHALLENGE_MAX: usize = 1024;

/// Credentials of initiators and of the target.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets {
    /// Initiators by their CHAP names.
    pub initiators: HashMap<String, Known>,
    /// Our own name and secret, for initiators that want to know.
    pub target: Option<(String, String)>,
}

/// An initiator that may log in.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// What it proves to know.
    pub secret: String,
    /// The iSCSI names that are its own; empty for the ones that it is the first to use.
    pub iqns: Vec<String>,
}

impl std::fmt::Debug for Secrets {
    /// Names only.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let target = self.target.as_ref().map(|(name, _)| name);
        f.debug_struct("Secrets").field("initiators", &self.initiators.keys()).field("target", &target).finish()
    }
}

/// A file of secrets that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretsError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A line is wrong; line 0 stands for the whole file.
    #[error("{}:{line}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The mistake.
        what: &'static str,
    },
}

impl Secrets {
    /// Reads a file: lines `initiator NAME SECRET [IQN[,IQN...]]` and at most one `target NAME SECRET`; `#` begins a
    /// comment.
    ///
    /// # Errors
    /// [`SecretsError`].
    pub fn load(path: &Path) -> Result<Secrets, SecretsError> {
        use std::os::unix::fs::PermissionsExt;
        let failed = |source| SecretsError::Io { path: path.into(), source };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        let mode = std::fs::metadata(path).map_err(failed)?.permissions().mode();
        if mode & 0o077 != 0 {
            let mode = format!("{:03o}", mode & 0o777);
            tracing::warn!(path = %path.display(), mode, "CHAP file is readable by other users; run chmod 600");
        }
        Secrets::parse(&text).map_err(|(line, what)| SecretsError::Content { path: path.into(), line, what })
    }

    /// Whether an iSCSI name is said to be an initiator's own.
    pub(super) fn is_bound(&self, name: &str, iqn: &str) -> bool {
        self.initiators.get(name).is_some_and(|known| known.iqns.iter().any(|own| own.eq_ignore_ascii_case(iqn)))
    }

    pub(super) fn parse(text: &str) -> Result<Secrets, (usize, &'static str)> {
        let mut secrets = Secrets::default();
        for (index, line) in text.lines().enumerate() {
            let wrong = |what| Err((index + 1, what));
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let (role, name, secret, iqns) = match words[..] {
                [role, name, secret] => (role, name, secret, ""),
                ["initiator", name, secret, iqns] => ("initiator", name, secret, iqns),
                _ => return wrong("write 'initiator NAME SECRET [IQN,IQN...]' or 'target NAME SECRET'"),
            };
            // RFC 7143 9.2.1: shorter ones can be guessed from one exchange.
            if secret.len() < 12 {
                return wrong("a CHAP secret has at least 12 bytes");
            }
            match role {
                "initiator" => {
                    let iqns = iqns.split(',').filter(|iqn| !iqn.is_empty()).map(str::to_ascii_lowercase).collect();
                    let known = Known { secret: secret.into(), iqns };
                    if secrets.initiators.insert(name.into(), known).is_some() {
                        return wrong("there is an initiator of this name already");
                    }
                }
                "target" => secrets.target = Some((name.into(), secret.into())),
                _ => return wrong("write 'initiator NAME SECRET [IQN,IQN...]' or 'target NAME SECRET'"),
            }
        }
        if let Some((_, own)) = &secrets.target
            && secrets.initiators.values().any(|known| known.secret == *own)
        {
            return Err((0, "the target's secret must not be one of an initiator's"));
        }
        if secrets.initiators.is_empty() {
            return Err((0, "no initiator could log in; add a line 'initiator NAME SECRET'"));
        }
        Ok(secrets)
    }
}

/// An authentication in progress.
#[derive(Debug, Default)]
pub enum Chap {
    /// Nothing has been said.
    #[default]
    Start,
    /// Our challenge is out.
    Challenged {
        /// The algorithm agreed on.
        algorithm: u8,
        /// Identifier.
        identifier: u8,
        /// Challenge.
        challenge: Vec<u8>,
    },
    /// The initiator knows the secret of this name.
    Done(String),
}

/// Why an initiator is refused.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// What it says makes no sense.
    Malformed,
    /// It does not know the secret.
    Failed,
}

impl Chap {
    /// The next step: what the initiator says, and our answer.
    ///
    /// # Errors
    /// If the initiator must be refused.
    pub fn step(&mut self, secrets: &Secrets, keys: &Keys, answer: &mut Keys) -> Result<(), Refused> {
        match std::mem::take(self) {
            Chap::Start => {
                let Some(offered) = keys.get("CHAP_A") else { return Err(Refused::Malformed) };
                let offered: Vec<u64> = offered.split(',').filter_map(number).collect();
                let known = ALGORITHMS.into_iter().find(|a| offered.contains(&u64::from(*a)));
                let Some(algorithm) = known else { return Err(Refused::Failed) };
                let random = random::<{ CHALLENGE + 1 }>();
                let (identifier, challenge) = (random[0], random[1..].to_vec());
                answer.push("CHAP_A", algorithm);
                answer.push("CHAP_I", identifier);
                answer.push("CHAP_C", hex(&challenge));
                *self = Chap::Challenged { algorithm, identifier, challenge };
                Ok(())
            }
            Chap::Challenged { algorithm, identifier, challenge } => {
                let (Some(name), Some(response)) = (keys.get("CHAP_N"), keys.get("CHAP_R").and_then(binary)) else {
                    return Err(Refused::Malformed);
                };
                let initiator = name.to_owned();
                let known = secrets.initiators.get(name).ok_or(Refused::Failed)?;
                let right = respond(algorithm, identifier, &known.secret, &challenge);
                if !equal(&right, &response) {
                    return Err(Refused::Failed);
                }
                if let Some(theirs) = keys.get("CHAP_C") {
                    let theirs = binary(theirs).filter(|c| !c.is_empty() && c.len() <= CHALLENGE_MAX);
                    let id = keys.get("CHAP_I").and_then(number).and_then(|n| u8::try_from(n).ok());
                    let (Some(theirs), Some(id)) = (theirs, id) else { return Err(Refused::Malformed) };
                    // A challenge of ours, sent back, would let us answer ourselves.
                    if theirs == challenge {
                        return Err(Refused::Failed);
                    }
                    let (name, secret) = secrets.target.as_ref().ok_or(Refused::Failed)?;
                    answer.push("CHAP_N", name);
                    answer.push("CHAP_R", hex(&respond(algorithm, id, secret, &theirs)));
                }
                *self = Chap::Done(initiator);
                Ok(())
            }
            Chap::Done(_) => Err(Refused::Malformed),
        }
    }
}

fn respond(algorithm: u8, identifier: u8, secret: &str, challenge: &[u8]) -> Vec<u8> {
    let text = [&[identifier], secret.as_bytes(), challenge].concat();
    match algorithm {
        7 => sha::digest(&sha::SHA256, &text).as_ref().to_vec(),
        6 => sha::digest(&sha::SHA1_FOR_LEGACY_USE_ONLY, &text).as_ref().to_vec(),
        _ => Md5::digest(&text).to_vec(),
    }
}

/// Compares without telling by its time where the difference is.
fn equal(a: &[u8], b: &[u8]) -> bool {
    a.ct_eq(b).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets() -> Secrets {
        Secrets::parse("# who\ninitiator alice wonderland-12\ntarget server looking-glass\n").unwrap()
    }

    /// Runs the exchange with an initiator that answers by this secret.
    fn run(secret: &str, algorithms: &str) -> Result<(), Refused> {
        let (mut chap, mut answer) = (Chap::default(), Keys::default());
        let mut hello = Keys::default();
        hello.push("CHAP_A", algorithms);
        chap.step(&secrets(), &hello, &mut answer)?;
        let get = |key| answer.get(key).unwrap().to_owned();
        let algorithm = number(&get("CHAP_A")).unwrap() as u8;
        let response = respond(algorithm, get("CHAP_I").parse().unwrap(), secret, &binary(&get("CHAP_C")).unwrap());
        let (mut reply, mut last) = (Keys::default(), Keys::default());
        reply.push("CHAP_N", "alice");
        reply.push("CHAP_R", hex(&response));
        reply.push("CHAP_I", 9);
        reply.push("CHAP_C", "0x0102030405");
        chap.step(&secrets(), &reply, &mut last)?;
        let ours = respond(algorithm, 9, "looking-glass", &[1, 2, 3, 4, 5]);
        assert_eq!(binary(last.get("CHAP_R").unwrap()), Some(ours));
        Ok(())
    }

    #[test]
    fn both_sides_prove_that_they_know_the_secret() {
        for algorithm in ["5", "6,5", "7,5"] {
            assert_eq!(run("wonderland-12", algorithm), Ok(()));
        }
        assert_eq!(run("wonderland-13", "7"), Err(Refused::Failed));
        assert_eq!(run("wonderland-12", "99"), Err(Refused::Failed));
    }

    #[test]
    fn our_own_challenge_is_not_answered() {
        let (mut chap, mut answer) = (Chap::default(), Keys::default());
        let mut hello = Keys::default();
        hello.push("CHAP_A", "7");
        chap.step(&secrets(), &hello, &mut answer).unwrap();
        let challenge = binary(answer.get("CHAP_C").unwrap()).unwrap();
        let id: u8 = answer.get("CHAP_I").unwrap().parse().unwrap();
        let mut reply = Keys::default();
        reply.push("CHAP_N", "alice");
        reply.push("CHAP_R", hex(&respond(7, id, "wonderland-12", &challenge)));
        reply.push("CHAP_I", id);
        reply.push("CHAP_C", hex(&challenge));
        assert_eq!(chap.step(&secrets(), &reply, &mut Keys::default()), Err(Refused::Failed));
    }

    #[test]
    fn mistakes_in_the_file_are_named() {
        for (text, line) in [("initiator a short\n", 1), ("\nwhat\n", 2), ("", 0), ("target t longenough-123\n", 0)] {
            assert_eq!(Secrets::parse(text).unwrap_err().0, line, "{text:?}");
        }
    }
}
