//! Access control: principals and their rights by export and path.
//!
//! A principal is what the handshake has proved: a key, knowledge of the secret that this daemon was started
//! with, the local user that the daemon runs as, or nothing (anonymous). Its rights are those of its
//! grants, each for one export or all, and for a path beneath it.

use crate::auth::{AuthError, PublicKey};
use crate::sink::Trust;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use thruway_engine::units::Invalid;

bitflags::bitflags! {
    /// What may be done.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Rights: u8 {
        /// Read and list.
        const READ = 1;
        /// Make what is not there.
        const CREATE = 2;
        /// Replace what is there.
        const REPLACE = 4;
        /// Remove what is there.
        const DELETE = 8;
        /// Give owners, set-id bits, devices and privileged extended attributes to what is made.
        const PRIVILEGED = 16;
    }
}

impl Rights {
    /// All that `rw` means.
    pub const READ_WRITE: Rights = Rights::READ.union(Rights::CREATE).union(Rights::REPLACE).union(Rights::DELETE);
}

/// Rights beneath a path of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// What may be done.
    pub rights: Rights,
    /// Where; `None`: in every export.
    pub export: Option<String>,
    /// Beneath this path of it.
    pub below: Vec<u8>,
}

impl Grant {
    /// Everything everywhere that `rights` say.
    pub fn anywhere(rights: Rights) -> Grant {
        Grant { rights, export: None, below: Vec::new() }
    }

    fn covers(&self, export: &str, path: &[u8]) -> bool {
        let beneath = match path.strip_prefix(&self.below[..]) {
            Some(rest) => self.below.is_empty() || rest.is_empty() || rest[0] == b'/',
            None => false,
        };
        self.export.as_deref().is_none_or(|name| name == export) && beneath
    }
}

/// Rights at a path, and how much of the path they depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowed {
    /// What may be done there.
    pub rights: Rights,
    /// Length of the part of the path that must not be left upwards.
    pub base: usize,
}

/// An authenticated peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Principal {
    /// The user who started this daemon, and root.
    Operator,
    /// The holder of a key.
    Key(PublicKey, Vec<Grant>),
    /// An unauthenticated peer.
    Anonymous,
}

impl Principal {
    /// The rights of this principal at a path of an export, if they include `needed`: one entry for each granted place above the
    /// path, the deepest first. A deeper place has at least the rights of those above it, and confines the peer more.
    pub fn allowed(&self, export: &str, path: &[u8], needed: Rights) -> Vec<Allowed> {
        let grants = match self {
            Principal::Operator => &[Grant::anywhere(Rights::all())][..],
            Principal::Anonymous => &[Grant::anywhere(Rights::READ_WRITE)],
            Principal::Key(_, grants) => grants,
        };
        let covering = || grants.iter().filter(|g| g.covers(export, path));
        let mut bases: Vec<usize> = covering().map(|g| g.below.len()).collect();
        bases.sort_unstable_by(|a, b| b.cmp(a));
        bases.dedup();
        let at = |base| {
            let above = covering().filter(|g| g.below.len() <= base);
            Allowed { rights: above.map(|g| g.rights).fold(Rights::empty(), Rights::union), base }
        };
        bases.into_iter().map(at).filter(|allowed| allowed.rights.contains(needed)).collect()
    }

    /// The identity of a job of this principal's: two principals that call their jobs alike have two jobs.
    pub fn job(&self, asked: &[u8; 16]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_derive_key("thruway job of a principal");
        hasher.update(asked);
        match self {
            Principal::Operator => hasher.update(b"operator"),
            Principal::Anonymous => hasher.update(b"anonymous"),
            Principal::Key(key, _) => hasher.update(b"key ").update(key.bytes()),
        };
        let mut job = [0; 16];
        hasher.finalize_xof().fill(&mut job);
        job
    }

    /// Whether there is anything in this export that the principal may do.
    pub fn knows(&self, export: &str) -> bool {
        match self {
            Principal::Key(_, grants) => grants.iter().any(|g| g.export.as_deref().is_none_or(|name| name == export)),
            _ => true,
        }
    }
}

impl Rights {
    /// How far a source with these rights is trusted.
    pub fn trust(self) -> Trust {
        if self.contains(Rights::PRIVILEGED) { Trust::Operator } else { Trust::Peer }
    }
}

/// Keys that may use a daemon: lines of `[OPTION[,OPTION]...] KEY [comment]`. A key may have several lines.
///
/// Options are `ro`, `rw` (the default), single rights (`read`, `create`, `replace`, `delete`, `privileged`), and
/// `export=NAME[/PATH]`, without which a line is for all exports.
#[derive(Debug, Clone, Default)]
pub struct AuthorizedKeys {
    grants: HashMap<PublicKey, Vec<Grant>>,
    /// Line number and export of the grants for one export.
    exports: Vec<(usize, String)>,
}

impl AuthorizedKeys {
    /// Reads a file of keys.
    ///
    /// # Errors
    /// One for each invalid line, or one if the file cannot be read.
    pub fn load(path: &Path) -> Result<AuthorizedKeys, Vec<AuthError>> {
        let text = fs::read_to_string(path).map_err(|source| vec![AuthError::File { path: path.into(), source }])?;
        AuthorizedKeys::parse(&text).map_err(|mistakes| {
            let content = |(line, message)| AuthError::Content { path: path.into(), line, message };
            mistakes.into_iter().map(content).collect()
        })
    }

    /// Line number and name of each export with a grant that is not among these.
    pub fn unknown_exports(&self, known: &[&str]) -> impl Iterator<Item = &(usize, String)> {
        self.exports.iter().filter(move |(_, name)| !known.contains(&name.as_str()))
    }

    /// Keys that may replace or delete, but not create. All copies to the daemon require the right to create.
    pub fn without_create(&self) -> impl Iterator<Item = &PublicKey> {
        let changes = Rights::REPLACE | Rights::DELETE;
        self.grants.iter().filter_map(move |(key, grants)| {
            let rights = grants.iter().fold(Rights::empty(), |all, grant| all | grant.rights);
            (rights.intersects(changes) && !rights.contains(Rights::CREATE)).then_some(key)
        })
    }

    fn parse(text: &str) -> Result<AuthorizedKeys, Vec<(usize, String)>> {
        let (mut keys, mut mistakes) = (AuthorizedKeys::default(), Vec::new());
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match parse_line(line) {
                Ok((key, grant)) => {
                    keys.exports.extend(grant.export.iter().map(|name| (index + 1, name.clone())));
                    keys.grants.entry(key).or_default().push(grant);
                }
                Err(message) => mistakes.push((index + 1, message)),
            }
        }
        if mistakes.is_empty() { Ok(keys) } else { Err(mistakes) }
    }

    /// Who the holder of this key is here.
    pub fn principal(&self, key: &PublicKey) -> Option<Principal> {
        self.grants.get(key).map(|grants| Principal::Key(*key, grants.clone()))
    }
}

/// Parses `[OPTION[,OPTION]...] KEY [comment]`.
fn parse_line(line: &str) -> Result<(PublicKey, Grant), String> {
    let mut words = line.split_whitespace();
    if line.split_whitespace().filter(|word| word.parse::<PublicKey>().is_ok()).count() > 1 {
        return Err("two keys in a line: a secret key file? (expected the public half, from id.pub)".into());
    }
    let first = words.next().unwrap_or("");
    let (grant, key) = match first.parse::<PublicKey>() {
        Ok(key) => (Grant::anywhere(Rights::READ_WRITE), Ok(key)),
        // A line of one word is a key that is none, not options without a key.
        Err(why) => match words.next() {
            Some(second) => (parse_options(first).map_err(|e| e.to_string())?, second.parse()),
            None => (Grant::anywhere(Rights::empty()), Err(why)),
        },
    };
    if let Some(comment) = words.next().filter(|comment| parse_options(comment).is_ok()) {
        let comment = crate::escape(comment.as_bytes());
        return Err(format!("'{comment}' behind the key is a comment (expected options before the key)"));
    }
    key.map(|key| (key, grant)).map_err(|e: Invalid| e.to_string())
}

/// Options in front of a key that cannot be used.
#[derive(Debug, thiserror::Error)]
enum GrantError {
    #[error(
        "unknown option or invalid key '{}' (expected a key of 64 hexadecimal digits, or ro, rw, read, create, replace, delete, \
         privileged, export=NAME[/PATH])",
        crate::escape(.0)
    )]
    Unknown(String),
    #[error(transparent)]
    Path(#[from] crate::wire::Malformed),
    #[error("export= takes one name; give the key another line for another export")]
    SecondExport,
}

fn parse_options(text: &str) -> Result<Grant, GrantError> {
    let mut grant = Grant::anywhere(Rights::empty());
    for option in text.split(',') {
        grant.rights |= match option {
            "ro" | "read" => Rights::READ,
            "rw" => Rights::READ_WRITE,
            "create" => Rights::CREATE,
            "replace" => Rights::REPLACE,
            "delete" => Rights::DELETE,
            "privileged" => Rights::PRIVILEGED,
            other => {
                let Some(place) = other.strip_prefix("export=") else {
                    return Err(GrantError::Unknown(other.chars().take(80).collect()));
                };
                let (name, below) = place.split_once('/').unwrap_or((place, ""));
                let below = below.trim_end_matches('/').as_bytes();
                crate::wire::check_path(below)?;
                if grant.export.is_some() || name.is_empty() {
                    return Err(GrantError::SecondExport);
                }
                (grant.export, grant.below) = (Some(name.into()), below.to_vec());
                Rights::empty()
            }
        };
    }
    // `export=` or `privileged` alone qualify the default.
    if (grant.rights - Rights::PRIVILEGED).is_empty() {
        grant.rights |= Rights::READ_WRITE;
    }
    Ok(grant)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::KeyPair;

    fn keys(text: &str) -> Result<(AuthorizedKeys, PublicKey), Vec<(usize, String)>> {
        let key = KeyPair::generate().public();
        Ok((AuthorizedKeys::parse(&text.replace("KEY", &key.to_string()))?, key))
    }

    #[test]
    fn keys_have_rights_by_export_and_path() {
        let text = "# friends\n\nro KEY alice@lab\nrw,export=in/alice KEY\nread,create,export=drop KEY\n";
        let (keys, key) = keys(text).unwrap();
        let alice = keys.principal(&key).unwrap();
        let rights = |export: &str, path: &str, needed| alice.allowed(export, path.as_bytes(), needed).pop();
        let read_only = Some(Allowed { rights: Rights::READ, base: 0 });
        assert_eq!(rights("other", "a/b", Rights::READ), read_only);
        assert_eq!(rights("other", "a/b", Rights::CREATE), None);
        assert_eq!(rights("in", "alice/x", Rights::READ), read_only, "reading depends on no subtree");
        let inside = Some(Allowed { rights: Rights::READ_WRITE, base: 5 });
        for path in ["alice", "alice/x/y"] {
            assert_eq!(rights("in", path, Rights::REPLACE), inside);
        }
        for path in ["", "alic", "alice2", "bob/alice"] {
            assert_eq!(rights("in", path, Rights::CREATE), None, "{path}");
        }
        let drop_box = Some(Allowed { rights: Rights::READ | Rights::CREATE, base: 0 });
        assert_eq!(rights("drop", "x", Rights::CREATE), drop_box);
        assert_eq!(rights("drop", "x", Rights::REPLACE), None);
        assert!(alice.knows("anything"));
        assert!(keys.principal(&KeyPair::generate().public()).is_none());
    }

    #[test]
    fn only_operators_and_keys_that_say_so_are_privileged() {
        let (keys, key) = keys("export=a KEY\nprivileged,export=b KEY").unwrap();
        let principal = keys.principal(&key).unwrap();
        let trust = |p: &Principal, export| p.allowed(export, b"x", Rights::CREATE).first().map(|a| a.rights.trust());
        assert_eq!(trust(&principal, "a"), Some(Trust::Peer));
        assert_eq!(trust(&principal, "b"), Some(Trust::Operator));
        assert_eq!(trust(&principal, "c"), None);
        assert!(!principal.knows("c"));
        assert_eq!(trust(&Principal::Anonymous, "a"), Some(Trust::Peer));
        assert_eq!(trust(&Principal::Operator, "a"), Some(Trust::Operator));
    }

    #[test]
    fn a_further_grant_takes_no_rights_away() {
        let (keys, key) = keys("create KEY\nrw,export=in/a KEY").unwrap();
        let principal = keys.principal(&key).unwrap();
        let allowed = principal.allowed("in", b"a/x", Rights::CREATE);
        let expected = [(Rights::READ_WRITE, 1), (Rights::CREATE, 0)].map(|(rights, base)| Allowed { rights, base });
        assert_eq!(allowed, expected);
        assert_eq!(principal.allowed("in", b"a/x", Rights::REPLACE), expected[..1]);
    }

    #[test]
    fn keys_that_can_change_nothing_are_found() {
        for (text, found) in
            [("replace,delete KEY", 1), ("read,delete KEY", 1), ("replace KEY\ncreate,export=a KEY", 0), ("ro KEY", 0)]
        {
            assert_eq!(keys(text).unwrap().0.without_create().count(), found, "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_by_line() {
        for (text, line, word) in [
            ("KEY\nrubbish\n", 2, "key"),
            ("rubbish KEY\n", 1, "rubbish"),
            ("ro,export=a/../b KEY", 1, "path"),
            ("export= KEY", 1, "export"),
            ("export=a,export=b KEY", 1, "another line"),
            ("KEY KEY\n", 1, "secret key file"),
            ("ro KEY\nKEY read,export=a\n", 2, "before the key"),
        ] {
            let [(at, message)] = &keys(text).map(drop).unwrap_err()[..] else { panic!("{text}") };
            assert!(*at == line && message.contains(word), "{text}: {at} {message}");
        }
        let all = keys("rubbish\nKEY\nro,ro KEY\n\nwrong KEY").unwrap_err();
        assert_eq!(all.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 5]);
    }

    #[test]
    fn grants_for_unknown_exports_are_found_by_line() {
        let (keys, _) = keys("KEY\nro,export=in KEY\nexport=inn/a KEY\n").unwrap();
        assert_eq!(keys.unknown_exports(&["in", "out"]).collect::<Vec<_>>(), [&(3, "inn".to_string())]);
    }
}
