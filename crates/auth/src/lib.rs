//! Who is at the other end: static keys, known hosts, authorized keys, and the Noise handshake
//! that proves them and encrypts the control channel.
//!
//! Keys are Curve25519, written in base 16. Files follow ssh's habits: one key a line, a comment
//! behind it, `#` for remarks; a secret key readable by anybody else is refused.

#![forbid(unsafe_code)]

use data_encoding::{HEXLOWER, HEXLOWER_PERMISSIVE};
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use thruway_engine::units::Invalid;

const KEYS_PATTERN: &str = "Noise_XX_25519_ChaChaPoly_BLAKE2s";
const SECRET_PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Longest handshake message.
pub const HANDSHAKE_MAX: usize = 256;
const KEY_LEN: usize = 32;

/// What went wrong with a key, a key file or a handshake.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file holds something else than it should.
    #[error("{path}:{line}: {message}")]
    Content {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The mistake.
        message: String,
    },
    /// The handshake failed: wrong secret, or not a Thruway.
    #[error("authentication failed: the peer's handshake does not verify")]
    Handshake,
    /// The peer's key is not one we trust.
    #[error("{0}")]
    Untrusted(String),
}

/// A public key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey([u8; KEY_LEN]);

impl PublicKey {
    /// The key itself.
    pub fn bytes(&self) -> &[u8; KEY_LEN] {
        &self.0
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for PublicKey {
    type Err = Invalid;
    fn from_str(s: &str) -> Result<PublicKey, Invalid> {
        from_hex(s).map(PublicKey).ok_or_else(|| Invalid::new("public key", s, "64 hexadecimal digits"))
    }
}

/// A secret key and its public half.
#[derive(Clone)]
pub struct KeyPair {
    secret: [u8; KEY_LEN],
    public: PublicKey,
}

impl KeyPair {
    /// A fresh pair.
    pub fn generate() -> KeyPair {
        let pair = builder(KEYS_PATTERN).generate_keypair().expect("the system's randomness");
        KeyPair {
            secret: pair.private.try_into().expect("32 bytes"),
            public: PublicKey(pair.public.try_into().expect("32 bytes")),
        }
    }

    /// The public half.
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// Reads a pair written by [`KeyPair::save`].
    ///
    /// # Errors
    /// [`AuthError`] if the file is not there, not a key, or readable by others than its owner.
    pub fn load(path: &Path) -> Result<KeyPair, AuthError> {
        let failed = |source| AuthError::File { path: path.into(), source };
        let meta = fs::metadata(path).map_err(failed)?;
        let content = |message: String| AuthError::Content { path: path.into(), line: 1, message };
        let text = fs::read_to_string(path).map_err(failed)?;
        let mut words = text.split_whitespace();
        let secret = words.next().and_then(from_hex).ok_or_else(|| content("not a secret key".into()))?;
        let Some(public) = words.next().and_then(from_hex) else {
            return Err(content("a public key (expected the file with the secret key, without .pub)".into()));
        };
        if meta.mode() & 0o077 != 0 {
            return Err(content(format!("mode {:o} lets others read a secret key; chmod 600 it", meta.mode() & 0o777)));
        }
        Ok(KeyPair { secret, public: PublicKey(public) })
    }

    /// Writes the pair to `path`, which must not exist, and the public half to `path.pub`.
    ///
    /// # Errors
    /// [`AuthError::File`].
    pub fn save(&self, path: &Path) -> Result<(), AuthError> {
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |source| AuthError::File { path, source }
        };
        if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
            fs::create_dir_all(dir).map_err(failed(dir))?;
        }
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(path).map_err(failed(path))?;
        writeln!(file, "{} {}", to_hex(&self.secret), self.public).map_err(failed(path))?;
        let mut public = path.as_os_str().to_owned();
        public.push(".pub");
        let public = PathBuf::from(public);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&public).map_err(failed(&public))?;
        writeln!(file, "{}", self.public).map_err(failed(&public))
    }
}

/// Keys of daemons seen before: lines of `HOST:PORT KEY`.
pub struct KnownHosts {
    path: PathBuf,
}

impl KnownHosts {
    /// The file at this path; it need not exist.
    pub fn at(path: PathBuf) -> KnownHosts {
        KnownHosts { path }
    }

    /// Checks that the key of a daemon is known.
    ///
    /// # Errors
    /// [`AuthError::Untrusted`] if it is not, with this reason.
    pub fn require(&self, host: &str, key: &PublicKey, why: &str) -> Result<(), AuthError> {
        let text = fs::read_to_string(&self.path).unwrap_or_default();
        let line = format!("{host} {key}");
        if text.lines().any(|known| known.split_whitespace().eq(line.split_whitespace())) {
            return Ok(());
        }
        let path = self.path.display();
        Err(AuthError::Untrusted(format!("{why}; to trust its key, add the line '{line}' to {path}")))
    }

    /// Checks a daemon's key and remembers that of a new daemon. Returns whether it is new.
    ///
    /// # Errors
    /// [`AuthError::Untrusted`] if the daemon had another key before.
    pub fn check(&self, host: &str, key: &PublicKey) -> Result<bool, AuthError> {
        let failed = |source| AuthError::File { path: self.path.clone(), source };
        let text = match fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(failed(e)),
        };
        for line in text.lines() {
            let mut words = line.split_whitespace();
            if words.next() == Some(host) {
                let known = words.next().unwrap_or("");
                if known == key.to_string() {
                    return Ok(false);
                }
                return Err(AuthError::Untrusted(format!(
                    "the key of {host} has changed: it was {known}, now it is {key}. Somebody may be listening in. \
                     If the daemon really has a new key, remove its line from {}",
                    self.path.display()
                )));
            }
        }
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir).map_err(failed)?;
        }
        let mut file = fs::OpenOptions::new().append(true).create(true).open(&self.path).map_err(failed)?;
        // The last line may lack its end, where somebody has edited the file.
        let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
        // In one write: lines of two commands do not mix. Of two lines for one daemon the first counts.
        file.write_all(format!("{end}{host} {key}\n").as_bytes()).map_err(failed)?;
        Ok(true)
    }
}

/// A secret both ends were given beforehand.
pub type Secret = [u8; 32];

/// How one end will prove who it is.
#[derive(Clone)]
pub enum Credentials {
    /// By its static key.
    Keys(KeyPair),
    /// By knowing the secret.
    Secret(Secret),
}

/// A handshake in progress.
pub struct Handshake(snow::HandshakeState);

/// An authenticated, encrypted channel of messages.
pub struct Secured(snow::TransportState);

impl Handshake {
    /// Starts one. It fails where the two ends have not sent and received the same greeting.
    pub fn new(credentials: &Credentials, greeting: &[u8], initiator: bool) -> Handshake {
        let build = |b: snow::Builder<'_>| if initiator { b.build_initiator() } else { b.build_responder() };
        let state = match credentials {
            Credentials::Keys(pair) => {
                builder(KEYS_PATTERN).local_private_key(&pair.secret).and_then(|b| b.prologue(greeting)).and_then(build)
            }
            Credentials::Secret(secret) => {
                builder(SECRET_PATTERN).psk(0, secret).and_then(|b| b.prologue(greeting)).and_then(build)
            }
        };
        Handshake(state.expect("fixed patterns with keys of the right length"))
    }

    /// Whether it is this end's turn to speak.
    pub fn is_my_turn(&self) -> bool {
        self.0.is_my_turn()
    }

    /// Whether both ends have said all.
    pub fn is_finished(&self) -> bool {
        self.0.is_handshake_finished()
    }

    /// The next message of ours.
    pub fn write(&mut self) -> Vec<u8> {
        let mut out = vec![0; HANDSHAKE_MAX];
        let n = self.0.write_message(&[], &mut out).expect("room for any handshake message");
        out.truncate(n);
        out
    }

    /// Takes the peer's next message.
    ///
    /// # Errors
    /// [`AuthError::Handshake`] if it does not verify.
    pub fn read(&mut self, message: &[u8]) -> Result<(), AuthError> {
        let mut payload = vec![0; HANDSHAKE_MAX.max(message.len())];
        self.0.read_message(message, &mut payload).map(|_| ()).map_err(|_| AuthError::Handshake)
    }

    /// The peer's static key, once it has been sent.
    pub fn peer_key(&self) -> Option<PublicKey> {
        self.0.get_remote_static().and_then(|k| k.try_into().ok()).map(PublicKey)
    }

    /// The channel that the finished handshake made.
    ///
    /// # Errors
    /// [`AuthError::Handshake`] if it is not finished.
    pub fn finish(self) -> Result<Secured, AuthError> {
        self.0.into_transport_mode().map(Secured).map_err(|_| AuthError::Handshake)
    }
}

/// Bytes that sealing adds to a message.
pub const SEAL_LEN: usize = 16;

impl Secured {
    /// Encrypts a message of at most 65519 bytes.
    pub fn seal(&mut self, message: &[u8]) -> Vec<u8> {
        let mut out = vec![0; message.len() + SEAL_LEN];
        self.0.write_message(message, &mut out).expect("messages are short and far fewer than 2^64");
        out
    }

    /// Decrypts the next message.
    ///
    /// # Errors
    /// [`AuthError::Handshake`] if it was forged, replayed or reordered.
    pub fn open(&mut self, message: &[u8]) -> Result<Vec<u8>, AuthError> {
        let mut out = vec![0; message.len()];
        let n = self.0.read_message(message, &mut out).map_err(|_| AuthError::Handshake)?;
        out.truncate(n);
        Ok(out)
    }
}

fn builder(pattern: &str) -> snow::Builder<'_> {
    snow::Builder::new(pattern.parse().expect("a fixed pattern"))
}

/// Hexadecimal digits of some bytes.
pub fn to_hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

/// 32 bytes from hexadecimal digits.
pub fn from_hex(text: &str) -> Option<[u8; KEY_LEN]> {
    HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shake(a: &Credentials, b: &Credentials) -> Result<(Handshake, Handshake), AuthError> {
        talk(Handshake::new(a, b"hello", true), Handshake::new(b, b"hello", false))
    }

    fn talk(mut a: Handshake, mut b: Handshake) -> Result<(Handshake, Handshake), AuthError> {
        while !(a.is_finished() && b.is_finished()) {
            if a.is_my_turn() {
                let message = a.write();
                assert!(message.len() <= HANDSHAKE_MAX);
                b.read(&message)?;
            } else {
                let message = b.write();
                a.read(&message)?;
            }
        }
        Ok((a, b))
    }

    #[test]
    fn both_ends_learn_each_others_key_and_then_talk_in_secret() {
        let (ka, kb) = (KeyPair::generate(), KeyPair::generate());
        let (a, b) = shake(&Credentials::Keys(ka.clone()), &Credentials::Keys(kb.clone())).unwrap();
        assert_eq!((a.peer_key(), b.peer_key()), (Some(kb.public()), Some(ka.public())));
        let (mut a, mut b) = (a.finish().unwrap(), b.finish().unwrap());
        let sealed = a.seal(b"attack at dawn");
        assert!(!sealed.windows(4).any(|w| w == b"dawn"));
        let mut forged = sealed.clone();
        forged[3] ^= 1;
        assert!(b.open(&forged).is_err());
        assert_eq!(b.open(&sealed).unwrap(), b"attack at dawn");
        assert!(b.open(&sealed).is_err(), "a replay does not open");
    }

    #[test]
    fn a_wrong_secret_fails_the_handshake() {
        assert!(shake(&Credentials::Secret([1; 32]), &Credentials::Secret([1; 32])).is_ok());
        assert!(matches!(
            shake(&Credentials::Secret([1; 32]), &Credentials::Secret([2; 32])),
            Err(AuthError::Handshake)
        ));
    }

    #[test]
    fn a_greeting_that_has_changed_on_its_way_fails_the_handshake() {
        for credentials in [Credentials::Secret([1; 32]), Credentials::Keys(KeyPair::generate())] {
            let (a, b) = (Handshake::new(&credentials, b"7", true), Handshake::new(&credentials, b"8", false));
            assert!(matches!(talk(a, b), Err(AuthError::Handshake)));
        }
    }

    #[test]
    fn keys_are_saved_for_their_owner_only_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/key");
        let pair = KeyPair::generate();
        pair.save(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let again = KeyPair::load(&path).unwrap();
        assert_eq!((again.secret, again.public), (pair.secret, pair.public));
        assert!(pair.save(&path).is_err(), "an existing key is not overwritten");
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert!(matches!(KeyPair::load(&path), Err(AuthError::Content { .. })));
        let public = KeyPair::load(&path.with_extension("pub")).map(drop).unwrap_err();
        assert!(public.to_string().contains("a public key"), "{public}");
    }

    #[test]
    fn a_changed_host_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let known = KnownHosts::at(dir.path().join("known_hosts"));
        let (first, second) = (KeyPair::generate().public(), KeyPair::generate().public());
        assert!(known.check("a:1", &first).unwrap(), "it is new");
        assert!(!known.check("a:1", &first).unwrap());
        assert!(known.check("b:1", &second).unwrap());
        let text = fs::read_to_string(&known.path).unwrap();
        fs::write(&known.path, text.trim_end()).unwrap();
        assert!(known.check("c:1", &first).unwrap());
        assert!(!known.check("b:1", &second).unwrap() && !known.check("c:1", &first).unwrap());
        assert!(matches!(known.check("a:1", &second), Err(AuthError::Untrusted(_))));
    }
}
