//! Directories of the user: configuration, state, temporary files. An empty environment variable counts as unset, as for shells
//! and other programs: an empty path would be the current directory.

use nix::unistd::{User, geteuid};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

fn set(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// `HOME`, or the home directory in the user database.
fn home() -> Option<PathBuf> {
    set("HOME").map(PathBuf::from).or_else(|| {
        let user = User::from_uid(geteuid()).ok()??;
        Some(user.dir).filter(|dir| dir.is_absolute())
    })
}

/// Keys and known hosts: below `XDG_CONFIG_HOME`, or `~/.config`. `/etc/thruway` for root without `HOME`, as services have it, and
/// for users without a home directory.
pub(crate) fn config() -> PathBuf {
    let has_home = set("HOME").is_some() || !geteuid().is_root();
    let own = || home().filter(|_| has_home).map(|home| home.join(".config"));
    let base = set("XDG_CONFIG_HOME").map(PathBuf::from).or_else(own);
    base.unwrap_or_else(|| PathBuf::from("/etc")).join("thruway")
}

/// Files that outlive a program: below `XDG_STATE_HOME`, or `~/.local/state`. `None` for users without a home directory.
pub(crate) fn state() -> Option<PathBuf> {
    let own = || Some(home()?.join(".local/state"));
    Some(set("XDG_STATE_HOME").map(PathBuf::from).or_else(own)?.join("thruway"))
}

/// Directory for temporary files.
pub(crate) fn temporary() -> PathBuf {
    tempfile::env::temp_dir()
}

/// Sets the directory of all temporary files, if `TMPDIR` is set and empty.
pub(crate) fn init() {
    if std::env::var_os("TMPDIR").is_some_and(|value| value.is_empty()) {
        tempfile::env::override_temp_dir(Path::new("/tmp")).unwrap_or_default();
    }
}
