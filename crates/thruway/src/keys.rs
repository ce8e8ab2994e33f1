//! Where keys are kept, and `thruway keygen`.

use crate::directories;
use clap::Args;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thruway_cli::{Common, Failed};
use thruway_engine::random::random;
use thruway_transfer::auth::{KeyPair, from_hex, to_hex};
use thruway_transfer::sink::{JOURNAL_SECRET_LEN, set_journal_secret};

/// Arguments of `thruway keygen`.
#[derive(Args)]
#[command(after_help = "Examples:
  thruway keygen                              makes ~/.config/thruway/id
  thruway keygen --output /etc/thruway/host   a daemon's own key

Give the public half to a daemon's administrator, who adds it to the file that
'thruway serve --authorized-keys FILE' reads, one key a line. Options stand before
it: 'ro KEY' may only read, 'create,export=incoming KEY' only add there.")]
pub(crate) struct KeygenArgs {
    /// File for the secret half; the public half goes beside it as FILE.pub
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Makes a key pair.
pub(crate) fn run(args: &KeygenArgs, common: &Common) -> Result<(), Failed> {
    let path = args.output.clone().unwrap_or_else(identity_path);
    // Only the user's own directory is created: another one may be a mistake.
    let parent = path.parent().filter(|dir| args.output.is_some() && !dir.as_os_str().is_empty());
    if let Some(dir) = parent.filter(|dir| !dir.is_dir()) {
        return Err(Failed::operation("keygen", format!("{}: no such directory; create it first", dir.display())));
    }
    if let Ok(pair) = KeyPair::load(&path) {
        let why = format!("{}: there is a key already; its public half is {}", path.display(), pair.public());
        return Err(Failed::operation("keygen", why));
    }
    let pair = KeyPair::generate();
    pair.save(&path).map_err(|error| Failed::operation("keygen", error))?;
    if common.json {
        thruway_cli::say!("{}", serde_json::json!({ "file": path, "public_key": pair.public().to_string() }));
    } else if !common.quiet {
        thruway_cli::say!("secret key: {}\npublic key: {}", path.display(), pair.public());
    }
    Ok(())
}

/// The user's own key.
pub(crate) fn identity_path() -> PathBuf {
    directories::config().join("id")
}

/// A daemon's key: the one named, or the one that is kept for daemons of this user, made when
/// there is none. Clients remember it, so it must not change from one start to the next.
pub(crate) fn host(explicit: Option<&PathBuf>) -> Result<KeyPair, String> {
    let path = explicit.cloned().unwrap_or_else(|| directories::config().join("host"));
    if explicit.is_none() && !path.exists() {
        let pair = KeyPair::generate();
        match pair.save(&path) {
            Ok(()) => return Ok(pair),
            // Another daemon may have been quicker.
            Err(_) if path.exists() => {}
            Err(error) => {
                tracing::warn!(%error, "cannot save the host key: clients will see a key mismatch after a restart");
                return Ok(pair);
            }
        }
    }
    KeyPair::load(&path).map_err(|e| e.to_string())
}

/// The key to call daemons with: the user's, or one made for the occasion if there is none.
pub(crate) fn identity(explicit: Option<&PathBuf>) -> Result<KeyPair, String> {
    let path = explicit.cloned().unwrap_or_else(identity_path);
    if explicit.is_none() && !path.exists() {
        return Ok(KeyPair::generate());
    }
    KeyPair::load(&path).map_err(|e| e.to_string())
}

/// Has journals of interrupted copies depend on a secret of this user, which is made when there is none.
///
/// # Errors
/// If it cannot be kept. The secret is then a random one of this process.
pub(crate) fn use_journal_secret() -> Result<(), String> {
    let path = directories::config().join("journal-key");
    journal_secret(&path).map(set_journal_secret).map_err(|e| format!("{}: {e}", path.display()))
}

/// As [`use_journal_secret`]. Without a secret, takes a value that is the same for each process of this user, but no secret.
pub(crate) fn use_journal_secret_or_public_value() {
    if let Err(error) = use_journal_secret() {
        // Without a home directory there is nothing to repair.
        if directories::config().join("journal-key").exists() {
            tracing::warn!("{error}; copies that were interrupted before may start over");
        }
        tracing::debug!(error, "no secret for journals: other users who may write to the destination could forge them");
        let mut hasher = blake3::Hasher::new_derive_key("thruway journals without a secret");
        hasher.update(&std::fs::read("/etc/machine-id").unwrap_or_default());
        hasher.update(&rustix::process::geteuid().as_raw().to_le_bytes());
        set_journal_secret(*hasher.finalize().as_bytes());
    }
}

fn journal_secret(path: &Path) -> std::io::Result<[u8; JOURNAL_SECRET_LEN]> {
    let read = || -> std::io::Result<Option<_>> {
        let mut file = std::fs::File::open(path)?;
        let meta = file.metadata()?;
        if meta.mode() & 0o077 != 0 || meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(std::io::Error::other("it belongs to another user, or others can read it"));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(std::str::from_utf8(&text).ok().and_then(|text| from_hex(text.trim())))
    };
    let known = match read() {
        Ok(Some(secret)) => return Ok(secret),
        Ok(None) => {
            let path = path.display();
            tracing::warn!("{path} is damaged and made again: copies that were interrupted before start over");
            true
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    let dir = path.parent().expect("below the configuration directory");
    std::fs::create_dir_all(dir)?;
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    writeln!(file, "{}", to_hex(&random::<JOURNAL_SECRET_LEN>()))?;
    file.as_file().sync_all()?;
    let kept = if known { file.persist(path) } else { file.persist_noclobber(path) };
    match kept {
        Ok(_) => {}
        // Another process was quicker.
        Err(e) if e.error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(e.error),
    }
    read()?.ok_or_else(|| std::io::Error::other("it was damaged in the same moment"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_secret_of_journals_stays_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/journal-key");
        let first = journal_secret(&path).unwrap();
        assert_eq!(journal_secret(&path).unwrap(), first);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let mut last = first;
        for damaged in [&b""[..], b"damaged", b"\xff\xfe", &[b'0'; 1 << 20]] {
            std::fs::write(&path, damaged).unwrap();
            let second = journal_secret(&path).unwrap();
            assert!(second != last && journal_secret(&path).unwrap() == second);
            last = second;
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(journal_secret(&path).is_err(), "others can read it");
    }
}
