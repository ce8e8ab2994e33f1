//! The file service of the daemon: arguments, start, announcement.

use clap::Args;
use rustix::fs::Mode;
use rustix::io::Errno;
use std::collections::HashSet;
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thruway_engine::Reactors;
use thruway_fs::durable;
use thruway_nfs::file_system::LocalFileSystem;
use thruway_nfs::mount::Mount;
use thruway_nfs::share::{Share, Shares, Squash};
use thruway_nfs::v3::Nfs3;
use thruway_rpc::server::{Config, Program, Programs, Server};
use thruway_server::Address;
use thruway_server::service::{Announcement, Service};

/// Above these options in the help.
pub(super) const HEADING: &str = "File service";

/// Arguments of the file service.
#[derive(Args)]
#[command(next_help_heading = HEADING)]
pub(super) struct NfsArgs {
    /// Directory to share by NFS (version 3): read-only with ro; squash=root (the default), all or none says which
    /// users of clients count as nobody; may be repeated
    #[arg(long, value_name = "NAME=DIR[,ro][,squash=WHO]", value_parser = Spec::parse)]
    pub share: Vec<Spec>,
    /// Serve the shares over NFS on this address, with the MOUNT protocol on the same port [default: 127.0.0.1:2049]
    #[arg(long, value_name = "ADDR:PORT")]
    pub nfs: Vec<SocketAddr>,
}

/// A share, as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spec {
    name: String,
    dir: PathBuf,
    read_only: bool,
    squash: Squash,
}

impl Spec {
    fn parse(text: &str) -> Result<Spec, String> {
        let (name, rest) = text.split_once('=').ok_or("expected NAME=DIR[,OPTION]...")?;
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(legal) {
            return Err(format!("'{name}' is no name of a share: letters, digits, '.', '_' and '-', at most 64"));
        }
        let mut parts = rest.split(',');
        let dir = parts.next().unwrap_or_default();
        if dir.is_empty() {
            return Err("the directory is missing; write NAME=DIR".into());
        }
        let mut spec = Spec { name: name.into(), dir: dir.into(), read_only: false, squash: Squash::default() };
        for option in parts {
            match option {
                "ro" => spec.read_only = true,
                "rw" => spec.read_only = false,
                "squash=root" => spec.squash = Squash::Root,
                "squash=all" => spec.squash = Squash::All,
                "squash=none" => spec.squash = Squash::None,
                other => {
                    return Err(format!("'{other}' is no option of a share; there are ro and squash=root|all|none"));
                }
            }
        }
        Ok(spec)
    }

    fn open(&self) -> Result<Share, String> {
        let files = LocalFileSystem::open(&self.dir).map_err(|error| {
            let path = self.dir.display();
            match Errno::from_io_error(&error) {
                Some(Errno::PERM) => format!("share '{}': only root can share files by NFS", self.name),
                Some(Errno::OPNOTSUPP) => {
                    format!("share '{}': {path}: its file system has no file handles", self.name)
                }
                _ => format!("share '{}': {path}: {error}", self.name),
            }
        })?;
        let (name, files) = (self.name.clone(), Box::new(files));
        Ok(Share { name, files, read_only: self.read_only, squash: self.squash })
    }
}

/// The file with the key of handles, in the directory for what is to outlive the daemon.
const KEY_FILE: &str = "nfs-handles";

/// The key of handles, which is made when there is none.
fn handle_key(state: &Path) -> Result<[u8; 32], String> {
    let path = state.join(KEY_FILE);
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    match std::fs::read(&path) {
        Ok(bytes) => bytes.try_into().map_err(|_| failed(&"not a key of NFS handles, which has 32 bytes")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            std::fs::create_dir_all(state).map_err(|e| failed(&e))?;
            let key = thruway_engine::random::random::<32>();
            durable::replace(&path, &key, Mode::RUSR | Mode::WUSR).map_err(|e| failed(&e))?;
            Ok(key)
        }
        Err(error) => Err(failed(&error)),
    }
}

impl NfsArgs {
    /// Refuses what would be without effect, and what would serve everybody without having been asked to.
    pub(super) fn check(&self, anonymous: bool, user: bool) -> Result<(), String> {
        if self.share.is_empty() {
            return if self.nfs.is_empty() {
                Ok(())
            } else {
                Err("--nfs requires at least one --share NAME=DIR".into())
            };
        }
        let mut names = HashSet::new();
        if let Some(spec) = self.share.iter().find(|spec| !names.insert(&spec.name)) {
            return Err(format!("two shares are named '{}'", spec.name));
        }
        if user {
            return Err("--user cannot be used with --share: only root can act as the users of clients".into());
        }
        if let Some(open) = self.nfs.iter().find(|a| !a.ip().to_canonical().is_loopback())
            && !anonymous
        {
            return Err(format!(
                "refusing to serve NFS on {open}: clients say themselves who their users are; use --anonymous if the network is trusted"
            ));
        }
        Ok(())
    }

    /// What would keep shares from being served, as far as can be told without serving them.
    pub(super) fn mistakes(&self) -> Vec<String> {
        self.share.iter().filter_map(|spec| spec.open().err()).collect()
    }
}

/// How long calls in progress may take when the daemon ends.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(6);

/// The running file service.
pub(super) struct NfsService {
    server: Server,
    lines: Vec<String>,
    /// Last, so that the server's tasks end with it.
    _reactors: Reactors,
}

impl NfsService {
    /// Starts what the arguments ask for; `None` if that is nothing.
    pub(super) fn start(
        args: &NfsArgs,
        anonymous: bool,
        connections_max: u32,
        state: Option<&Path>,
    ) -> Result<Option<NfsService>, String> {
        if args.share.is_empty() {
            return Ok(None);
        }
        let state = state.ok_or("no directory for the key of NFS handles: give --state DIR")?;
        let key = handle_key(state)?;
        let shares = args.share.iter().map(Spec::open).collect::<Result<Vec<_>, _>>()?;
        let shares = Shares::new(shares, key)
            .map_err(|(one, other)| format!("shares '{one}' and '{other}' cannot be told apart: rename one"))?;
        let shares = Arc::new(shares);
        let reactors = Reactors::start(None).map_err(|e| format!("starting the file service: {e}"))?;
        let listen =
            if args.nfs.is_empty() { vec![SocketAddr::from(([127, 0, 0, 1], 2049))] } else { args.nfs.clone() };
        let config = Config {
            protocol: "NFS",
            listen: listen.into_iter().map(Address::Tcp).collect(),
            programs: Programs::new([
                Arc::new(Nfs3::new(Arc::clone(&shares))) as Arc<dyn Program>,
                Arc::new(Mount::new(shares)),
            ]),
            tls: None,
            tls_required: false,
            own_user_only: !anonymous,
            connections_max: connections_max as usize,
        };
        let server = Server::start(config, &reactors).map_err(|e| e.to_string())?;
        let line = |spec: &Spec| {
            let mode = if spec.read_only { "read-only" } else { "read-write" };
            format!("share /{} = {} ({mode})", spec.name, spec.dir.display())
        };
        Ok(Some(NfsService { server, lines: args.share.iter().map(line).collect(), _reactors: reactors }))
    }
}

impl Service for NfsService {
    fn announcement(&self) -> Announcement {
        Announcement {
            addresses: vec![("nfs", "NFS at", self.server.addresses().to_vec())],
            facts: Vec::new(),
            lines: self.lines.clone(),
        }
    }

    fn statistics(&self) -> Vec<String> {
        vec![format!("NFS: {} connections", self.server.connections())]
    }

    fn close(&self) {
        self.server.close();
    }

    fn shut_down(&mut self) -> Result<(), Box<dyn Error>> {
        self.server.shut_down(LEAVE_TIMEOUT);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_with_their_options() {
        let spec = |name: &str, dir: &str, read_only, squash| {
            Ok(Spec { name: name.into(), dir: dir.into(), read_only, squash })
        };
        assert_eq!(Spec::parse("d=/srv"), spec("d", "/srv", false, Squash::Root));
        assert_eq!(Spec::parse("d=/srv,ro,squash=all"), spec("d", "/srv", true, Squash::All));
        assert_eq!(Spec::parse("d=/srv,squash=none"), spec("d", "/srv", false, Squash::None));
        for wrong in ["/srv", "d=", "d=,ro", "=/srv", "a/b=/srv", "d=/srv,squash=some", "d=/srv,no"] {
            assert!(Spec::parse(wrong).is_err(), "{wrong}");
        }
    }
}
