//! What a user may write as source or destination: a path, `[user@]host:path` by ssh, or
//! `tw://host[:port]/export/path`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The daemon's port unless another is given.
pub(crate) const DEFAULT_PORT: u16 = 7117;

/// Port of NFS servers.
pub(crate) const NFS_PORT: u16 = 2049;

/// Port of NFS servers over RDMA (RFC 8267).
pub(crate) const NFS_RDMA_PORT: u16 = 20049;

/// A source or destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// On this machine.
    Local(PathBuf),
    /// Through ssh.
    Ssh {
        /// `[user@]host`.
        host: OsString,
        /// Path there; relative to the home directory.
        path: Vec<u8>,
    },
    /// At a daemon.
    Daemon {
        /// Host name or address.
        host: String,
        /// Port.
        port: u16,
        /// Name of the export.
        export: String,
        /// Path below it, without slashes at its ends.
        path: Vec<u8>,
        /// The path ended in a slash.
        slash: bool,
    },
}

impl Endpoint {
    /// Reads what a user wrote. As with scp, a colon before the first slash makes a host, and
    /// `./a:b` a file whose name has one.
    ///
    /// # Errors
    /// A sentence that says what is wrong with a `tw://` address.
    pub(crate) fn parse(text: &OsStr) -> Result<Endpoint, String> {
        let bytes = text.as_bytes();
        if let Some(rest) = bytes.strip_prefix(b"tw://") {
            return parse_url(rest).map_err(|why| format!("{}: {why}", text.to_string_lossy()));
        }
        if let Some((scheme, _)) = split_at(bytes, b"://")
            && scheme.first().is_some_and(u8::is_ascii_alphabetic)
            && scheme.iter().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b))
        {
            let text = text.to_string_lossy();
            return Err(format!("{text}: write tw://host/export/path for a daemon, or [user@]host:path for ssh"));
        }
        // `[::1]:path`, `user@[::1]:path`.
        let (user, rest) = match split_at(bytes, b"@[") {
            Some((user, _)) if !user.contains(&b'/') => bytes.split_at(user.len() + 1),
            _ => bytes.split_at(0),
        };
        if let Some((host, path)) = rest.strip_prefix(b"[").and_then(|rest| split_at(rest, b"]:")) {
            return ssh(&[user, host].concat(), path);
        }
        let slash = bytes.iter().position(|b| *b == b'/').unwrap_or(bytes.len());
        match bytes[..slash].iter().position(|b| *b == b':') {
            Some(colon) if colon > 0 => ssh(&bytes[..colon], &bytes[colon + 1..]),
            _ => Ok(Endpoint::Local(PathBuf::from(text))),
        }
    }
}

/// What ssh is to reach. `~/` is the home directory, as it is without.
fn ssh(host: &[u8], path: &[u8]) -> Result<Endpoint, String> {
    let shown = String::from_utf8_lossy(host);
    if host.starts_with(b"-") || host.is_empty() {
        return Err(format!("'{shown}' is no host; a file whose name has a colon is written ./{shown}:..."));
    }
    if path.starts_with(b"~") && path != b"~" && !path.starts_with(b"~/") {
        return Err(format!("{shown}: homes of other users are not looked up; write the path"));
    }
    let path = path.strip_prefix(b"~").map_or(path, |rest| rest.strip_prefix(b"/").unwrap_or(rest));
    Ok(Endpoint::Ssh { host: OsString::from_vec(host.to_vec()), path: path.to_vec() })
}

fn split_at<'a>(text: &'a [u8], mark: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = text.windows(mark.len()).position(|window| window == mark)?;
    Some((&text[..at], &text[at + mark.len()..]))
}

/// Host, port, and the path without its first slash, of what follows `scheme://`.
pub(crate) fn parse_authority(rest: &[u8], default_port: u16) -> Result<(String, u16, &[u8]), String> {
    let split = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
    let authority = std::str::from_utf8(&rest[..split]).map_err(|_| "the host is not UTF-8")?;
    let path = rest.get(split + 1..).unwrap_or(b"");
    let (host, port) = match authority.rsplit_once(':') {
        // `[::1]` has colons of its own.
        Some((host, port)) if !port.ends_with(']') => {
            (host, port.parse().map_err(|_| format!("'{port}' is not a port"))?)
        }
        _ => (authority, default_port),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']').to_string();
    Ok((host, port, path))
}

fn parse_url(rest: &[u8]) -> Result<Endpoint, String> {
    let (host, port, path) = parse_authority(rest, DEFAULT_PORT)?;
    if host.is_empty() {
        return Err("no host; write tw://host/export/path".into());
    }
    let end = path.iter().position(|b| *b == b'/').unwrap_or(path.len());
    let export = String::from_utf8(path[..end].to_vec()).map_err(|_| "the export's name is not UTF-8")?;
    let inner = path.get(end + 1..).unwrap_or(b"");
    let slash = path.ends_with(b"/");
    Ok(Endpoint::Daemon { host, port, export, path: tidy(inner), slash })
}

/// A path without empty and `.` components.
pub(crate) fn tidy(path: &[u8]) -> Vec<u8> {
    let parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|c| !c.is_empty() && *c != b".").collect();
    parts.join(&b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon(host: &str, port: u16, export: &str, path: &str, slash: bool) -> Endpoint {
        Endpoint::Daemon { host: host.into(), port, export: export.into(), path: path.into(), slash }
    }

    #[test]
    fn addresses_are_read_as_written() {
        let parse = |s: &str| Endpoint::parse(OsStr::new(s));
        assert_eq!(parse("tw://h/data/a/b"), Ok(daemon("h", 7117, "data", "a/b", false)));
        assert_eq!(parse("tw://h:99/data/"), Ok(daemon("h", 99, "data", "", true)));
        assert_eq!(parse("tw://[::1]:5/x//y/./z/"), Ok(daemon("::1", 5, "x", "y/z", true)));
        assert_eq!(parse("tw://[::1]/x"), Ok(daemon("::1", 7117, "x", "", false)));
        assert_eq!(parse("tw://h"), Ok(daemon("h", 7117, "", "", false)));
        assert!(parse("ftp://h/x").is_err() && parse("h:a://b").is_ok() && parse("./a://b").is_ok());
        assert!(parse("tw:///x").is_err() && parse("tw://h:p/x").is_err());
        assert_eq!(parse("u@h:a b"), Ok(Endpoint::Ssh { host: "u@h".into(), path: b"a b".to_vec() }));
        let ssh = |host: &str, path: &str| Ok(Endpoint::Ssh { host: host.into(), path: path.into() });
        assert_eq!(parse("[::1]:p/q"), ssh("::1", "p/q"));
        assert_eq!(parse("user@[::1]:/p/q"), ssh("user@::1", "/p/q"));
        assert_eq!(parse("a/user@[::1]:x"), Ok(Endpoint::Local("a/user@[::1]:x".into())));
        assert_eq!((parse("h:~/x"), parse("h:~"), parse("h:../x")), (ssh("h", "x"), ssh("h", ""), ssh("h", "../x")));
        assert!(parse("-oProxyCommand=x:y").is_err() && parse("h:~root/x").is_err());
        for local in ["./a:b", "/a:b", "a/b:c", ":x", "plain"] {
            assert_eq!(parse(local), Ok(Endpoint::Local(local.into())));
        }
    }
}
