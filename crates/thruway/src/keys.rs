//! Where keys are kept, and `thruway keygen`.

use clap::Args;
use std::path::PathBuf;
use thruway_cli::{Common, Failed};
use thruway_transfer::auth::KeyPair;

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

/// The user's configuration directory.
pub(crate) fn config_dir() -> PathBuf {
    let base = std::env::var_os("XDG_CONFIG_HOME").filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config")));
    base.unwrap_or_else(|| PathBuf::from("/etc")).join("thruway")
}

/// The user's own key.
pub(crate) fn identity_path() -> PathBuf {
    config_dir().join("id")
}

/// A daemon's key: the one named, or the one that is kept for daemons of this user, made when
/// there is none. Clients remember it, so it must not change from one start to the next.
pub(crate) fn host(explicit: Option<&PathBuf>) -> Result<KeyPair, String> {
    let path = explicit.cloned().unwrap_or_else(|| config_dir().join("host"));
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
