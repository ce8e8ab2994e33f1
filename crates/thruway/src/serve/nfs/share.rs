//! A share, as it is written on the command line and in the configuration file.

use crate::endpoint::{self, NFS_PORT, NFS_RDMA_PORT};
use rustix::fs::Mode;
use rustix::io::Errno;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thruway_cli::units;
use thruway_engine::units::parse_size;
use thruway_fabric::{iwarp, shm, verbs};
use thruway_fs::Superblock;
use thruway_nfs::client::{ChooseRdma, NfsFileSystem, NfsOptions};
use thruway_nfs::delegations::Delegate;
use thruway_nfs::rules::{Rule, RuleError};
use thruway_nfs::security::{SecurityError, SecuritySet};
use thruway_nfs::share::{Policy, Share, Squash};
use thruway_rpc::client::RdmaOptions;
use thruway_server::rdma::Registration;
use thruway_vfs::identity::FileSystemNumbers;
use thruway_vfs::{FileSystem, LocalFileSystem, LocalOptions, MemoryFileSystem};

/// What is shared.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    Directory(PathBuf),
    /// Memory of so many bytes.
    Memory(u64),
    /// A directory of another NFS server.
    Remote(Remote),
}

/// A directory of an NFS server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Remote {
    host: String,
    /// [`NFS_PORT`] or [`NFS_RDMA_PORT`] unless it is given.
    port: Option<u16>,
    /// Names from the root of the server's shares on.
    path: Vec<Vec<u8>>,
}

impl Remote {
    /// What follows `nfs://`.
    fn parse(rest: &str) -> Result<Remote, String> {
        let (host, port, path) = endpoint::parse_authority(rest.as_bytes(), 0)?;
        if host.is_empty() {
            return Err("no host; write nfs://HOST[:PORT]/PATH".into());
        }
        let path = endpoint::tidy(path);
        let path = path.split(|b| *b == b'/').filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect();
        Ok(Remote { host, port: Some(port).filter(|port| *port != 0), path })
    }

    fn open(
        &self,
        share: &str,
        over_rdma: bool,
        delegations: bool,
        state: Option<&ShareState<'_>>,
    ) -> Result<NfsFileSystem, String> {
        let failed = |error: String| format!("share '{share}': {self}: {error}");
        let port = self.port.unwrap_or(if over_rdma { NFS_RDMA_PORT } else { NFS_PORT });
        let servers = (self.host.as_str(), port).to_socket_addrs().map_err(|e| failed(e.to_string()))?;
        let id = match state {
            Some(state) => client_id(&state.directory.join(CLIENT_ID_FILE))?,
            // Only to check that it can be opened.
            None => thruway_engine::random::random(),
        };
        let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let options = NfsOptions {
            servers: servers.collect(),
            rdma: over_rdma.then(|| Arc::new(choose_rdma) as ChooseRdma),
            path: self.path.clone(),
            delegations,
            owner: format!("thruway {id} {share}").into_bytes(),
            handles: state.map(|state| state.directory.join(format!("nfs-handles-{share}"))),
        };
        NfsFileSystem::open(options).map_err(|error| failed(error.to_string()))
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Remote { host, port, path } = self;
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        write!(f, "nfs://{host}")?;
        if let Some(port) = port {
            write!(f, ":{port}")?;
        }
        path.iter().try_for_each(|name| write!(f, "/{}", String::from_utf8_lossy(name)))
    }
}

/// Chooses the RDMA device towards a server; iWARP in user space if there is none.
fn choose_rdma(server: SocketAddr) -> std::io::Result<RdmaOptions> {
    const CREDITS: usize = 64;
    let provider = match verbs::Config::towards(server) {
        Ok(device) => device.into(),
        Err(_) => iwarp::Config { shm: Some(shm::Config::default()), ..iwarp::Config::default() }.into(),
    };
    Ok(RdmaOptions { provider, registration: Registration::Windows, credits: CREDITS })
}

/// File in the state directory with a random number that identifies this daemon to NFS servers.
const CLIENT_ID_FILE: &str = "nfs-client-id";

/// Reads the number in a file, or creates the file.
fn client_id(path: &Path) -> Result<[u8; 16], String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    match std::fs::read(path) {
        Ok(bytes) => bytes.try_into().map_err(|_| format!("{}: damaged; remove it", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let id: [u8; 16] = thruway_engine::random::random();
            thruway_fs::durable::replace(path, &id, Mode::RUSR | Mode::WUSR).map_err(failed)?;
            Ok(id)
        }
        Err(error) => Err(failed(error)),
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Directory(path) => path.display().fmt(f),
            Source::Memory(bytes) => write!(f, "{} of memory", units::size(*bytes)),
            Source::Remote(remote) => remote.fmt(f),
        }
    }
}

/// A share, as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::serve) struct Spec {
    name: String,
    source: Source,
    is_async: bool,
    is_direct: bool,
    /// The other server is reached over RDMA.
    over_rdma: bool,
    /// If that is not left to what is shared.
    delegate: Option<Delegate>,
    policy: Policy,
}

/// State of shares that survives restarts of the daemon.
pub(super) struct ShareState<'a> {
    /// State directory of the daemon.
    pub(super) directory: &'a Path,
    pub(super) numbers: Arc<FileSystemNumbers>,
}

impl Spec {
    /// What an option of the command line means.
    pub(super) fn parse(text: &str) -> Result<Spec, String> {
        let (name, rest) = text.split_once('=').ok_or(
            "expected NAME=DIR[,OPTION]..., NAME=mem:SIZE[,OPTION]... or NAME=nfs://HOST[:PORT]/PATH[,OPTION]...",
        )?;
        let mut parts = rest.split(',');
        let source = parts.next().unwrap_or_default();
        if source.is_empty() {
            return Err("the directory is missing; write NAME=DIR".into());
        }
        let mut spec = Spec::new(name, source)?;
        for option in parts {
            spec.option(option)?;
        }
        Ok(spec)
    }

    /// A directory, memory or a directory of another NFS server, with this name.
    pub(in crate::serve) fn new(name: &str, source: &str) -> Result<Spec, String> {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(legal) {
            return Err(format!(
                "'{name}': a share's name has 1 to 64 letters, digits, '.', '_' and '-', and does not begin with '.'"
            ));
        }
        let source = match (source.strip_prefix("mem:"), source.strip_prefix("nfs://")) {
            (Some(size), _) => Source::Memory(parse_size(size).map_err(|e| format!("mem:{size}: {e}"))?),
            (_, Some(rest)) => Source::Remote(Remote::parse(rest).map_err(|e| format!("{source}: {e}"))?),
            (None, None) => Source::Directory(source.into()),
        };
        Ok(Spec {
            name: name.into(),
            source,
            is_async: false,
            is_direct: false,
            over_rdma: false,
            delegate: None,
            policy: Policy::default(),
        })
    }

    /// Sets an option.
    pub(in crate::serve) fn option(&mut self, option: &str) -> Result<(), String> {
        match option {
            "ro" => self.policy.read_only = true,
            "rw" => self.policy.read_only = false,
            "async" => self.is_async = true,
            "sync" => self.is_async = false,
            "mode=cached" => self.is_direct = false,
            "mode=direct" => self.is_direct = true,
            "proto=tcp" => self.over_rdma = false,
            "proto=rdma" => self.over_rdma = true,
            "squash=root" => self.policy.squash = Squash::Root,
            "squash=all" => self.policy.squash = Squash::All,
            "squash=none" => self.policy.squash = Squash::None,
            "delegations=none" => self.delegate = Some(Delegate::Nothing),
            "delegations=read" => self.delegate = Some(Delegate::Reading),
            "delegations=write" => self.delegate = Some(Delegate::Writing),
            other => match (other.strip_prefix("sec="), other.strip_prefix("allow=")) {
                (Some(flavors), _) => {
                    self.policy.security = flavors.parse().map_err(|e: SecurityError| e.to_string())?
                }
                (_, Some(rules)) => rules.split('|').try_for_each(|rule| self.allow(rule))?,
                _ => {
                    let values = [
                        ("squash", "root, all or none"),
                        ("mode", "cached or direct"),
                        ("proto", "tcp or rdma"),
                        ("delegations", "none, read or write"),
                    ];
                    for (name, values) in values {
                        if let Some(value) = other.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')) {
                            return Err(format!("invalid {name} '{value}' (expected {values})"));
                        }
                    }
                    // By the names that exports(5) has.
                    let hint = match other {
                        "root_squash" => "write squash=root",
                        "no_root_squash" => "write squash=none",
                        "all_squash" => "write squash=all",
                        _ => {
                            "expected ro, rw, async, sync, mode=cached|direct, proto=tcp|rdma, squash=root|all|none, sec=FLAVORS, delegations=none|read|write or allow=CLIENTS"
                        }
                    };
                    return Err(format!("'{other}': unknown option of a share; {hint}"));
                }
            },
        }
        Ok(())
    }

    /// Adds a rule for clients.
    pub(in crate::serve) fn allow(&mut self, rule: &str) -> Result<(), String> {
        self.policy.rules.push(rule.parse().map_err(|e: RuleError| e.to_string())?);
        Ok(())
    }

    /// Its name.
    pub(in crate::serve) fn name(&self) -> &str {
        &self.name
    }

    /// Opens the directory of the share, or creates its memory. Without `state`, only checks that it can be opened. `directories` is the
    /// number of shares that are directories.
    pub(super) fn open(&self, state: Option<&ShareState<'_>>, directories: usize) -> Result<Share, String> {
        if self.over_rdma && !matches!(self.source, Source::Remote(_)) {
            return Err(format!(
                "share '{}': proto=rdma is for directories of other servers (nfs://HOST/PATH)",
                self.name
            ));
        }
        let files: Box<dyn FileSystem> = match &self.source {
            Source::Directory(path) => Box::new(self.open_directory(path, state, directories as u64)?),
            Source::Memory(bytes) => Box::new(MemoryFileSystem::new(*bytes)),
            Source::Remote(remote) => {
                self.check_remote()?;
                let delegations = self.delegate != Some(Delegate::Nothing);
                Box::new(remote.open(&self.name, self.over_rdma, delegations, state)?)
            }
        };
        let delegate = self.delegate.unwrap_or_else(|| Delegate::of(&*files));
        Ok(Share::new(&self.name, files, self.policy.clone(), delegate))
    }

    /// Refuses options that have no meaning for a directory of another server.
    fn check_remote(&self) -> Result<(), String> {
        let given = [
            ("async", self.is_async),
            ("mode=direct", self.is_direct),
            ("delegations=write", self.delegate == Some(Delegate::Writing)),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(format!(
                "share '{}': {option} is for directories of this host; leave it out for one of another NFS server",
                self.name
            )),
            None => Ok(()),
        }
    }

    /// Who may do what.
    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Settings that differ from those of a running share and need a restart, by their names in the configuration file.
    pub(super) fn changes_for_restart(&self, running: &Spec) -> Vec<&'static str> {
        let changed = [
            ("dir", self.source != running.source),
            ("async", self.is_async != running.is_async),
            ("mode", self.is_direct != running.is_direct),
            ("proto", self.over_rdma != running.over_rdma),
            ("delegations", self.delegate != running.delegate),
        ];
        changed.into_iter().filter(|(_, is_changed)| *is_changed).map(|(name, _)| name).collect()
    }

    /// The same share with the policy of another.
    pub(super) fn with_policy_of(&self, other: &Spec) -> Spec {
        Spec { policy: other.policy.clone(), ..self.clone() }
    }

    /// Each way in which its callers may show who they are, by whatever rule.
    pub(super) fn securities(&self) -> impl Iterator<Item = SecuritySet> {
        let rules = &self.policy.rules;
        let by_rules = rules.iter().filter_map(|rule| rule.security);
        // Without a rule that says otherwise, the share's own counts.
        let own = rules.is_empty() || rules.iter().any(|rule| rule.security.is_none());
        own.then_some(self.policy.security).into_iter().chain(by_rules)
    }

    /// Whether it is a directory of this host.
    pub(in crate::serve) fn is_directory(&self) -> bool {
        self.directory().is_some()
    }

    /// True if its data bypass the page cache.
    pub(in crate::serve) fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Directory of the share on this host; `None` for memory and directories of other servers.
    pub(in crate::serve) fn directory(&self) -> Option<&Path> {
        match &self.source {
            Source::Directory(path) => Some(path),
            Source::Memory(_) | Source::Remote(_) => None,
        }
    }

    /// File system of the share's directory; `None` for memory, and if the directory cannot be opened.
    pub(super) fn superblock(&self) -> Option<Superblock> {
        let Source::Directory(path) = &self.source else { return None };
        Superblock::of(std::fs::File::open(path).ok()?).ok()
    }

    fn open_directory(
        &self,
        path: &Path,
        state: Option<&ShareState<'_>>,
        directories: u64,
    ) -> Result<LocalFileSystem, String> {
        let options = LocalOptions {
            is_durable: !self.is_async,
            is_direct: self.is_direct,
            path_table: state.map(|state| state.directory.join(format!("nfs-paths-{}", self.name))),
            directories,
            numbers: state.map(|state| (Arc::clone(&state.numbers), self.name.clone())),
        };
        LocalFileSystem::open(path, &options).map_err(|error| {
            let path = path.display();
            match Errno::from_io_error(&error) {
                Some(Errno::OPNOTSUPP) => {
                    format!("share '{}': {path}: its file system has no file handles", self.name)
                }
                _ => format!("share '{}': {path}: {error}", self.name),
            }
        })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Policy { read_only, squash, security, rules } = &self.policy;
        let mode = if *read_only { "read-only" } else { "read-write" };
        write!(f, "share /{} = {} ({mode}, squash={squash}, sec={security}", self.name, self.source)?;
        if self.is_async {
            f.write_str(", async")?;
        }
        if self.is_direct {
            f.write_str(", mode=direct")?;
        }
        if self.over_rdma {
            f.write_str(", proto=rdma")?;
        }
        let rules: Vec<String> = rules.iter().map(Rule::to_string).collect();
        match rules.is_empty() {
            true => f.write_str(")"),
            false => write!(f, ") for {}", rules.join("|")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_with_their_options() {
        let spec = |name: &str, source, read_only, squash| {
            let policy = Policy { read_only, squash, ..Policy::default() };
            Ok(Spec {
                name: name.into(),
                source,
                is_async: false,
                is_direct: false,
                over_rdma: false,
                delegate: None,
                policy,
            })
        };
        let dir = || Source::Directory("/srv".into());
        assert_eq!(Spec::parse("d=/srv"), spec("d", dir(), false, Squash::Root));
        assert_eq!(Spec::parse("d=/srv,ro,squash=all"), spec("d", dir(), true, Squash::All));
        assert_eq!(Spec::parse("d=/srv,squash=none"), spec("d", dir(), false, Squash::None));
        assert_eq!(Spec::parse("m=mem:1M"), spec("m", Source::Memory(1 << 20), false, Squash::Root));
        assert!(Spec::parse("m=mem:much").is_err_and(|error| error.contains("much")));
        assert_eq!(Spec::parse("d=/srv,sec=krb5p:krb5").unwrap().policy.security, "krb5p:krb5".parse().unwrap());
        assert!(Spec::parse("d=/srv,mode=direct").unwrap().is_direct);
        let shown =
            Spec::parse("d=/srv,ro,async,allow=192.0.2.0/24+rw+squash=all|cert:a.example+sec=krb5:sys").unwrap();
        let rules = "192.0.2.0/24+rw+squash=all|cert:a.example+sec=krb5:sys";
        assert_eq!(shown.to_string(), format!("share /d = /srv (read-only, squash=root, sec=sys, async) for {rules}"));
        assert!(Spec::parse("d=/srv,sec=krb6").is_err_and(|error| error.contains("krb6")));
        assert!(Spec::parse("d=/srv,no_root_squash").is_err_and(|error| error.contains("squash=none")));
        let remote = Spec::parse("r=nfs://[::1]:3049/srv//data/,ro").unwrap();
        assert_eq!(remote.to_string(), "share /r = nfs://[::1]:3049/srv/data (read-only, squash=root, sec=sys)");
        assert!(!remote.is_directory());
        assert_eq!(Spec::parse("r=nfs://filer").unwrap().source.to_string(), "nfs://filer");
        let over_rdma = Spec::parse("r=nfs://filer/srv,proto=rdma").unwrap();
        assert_eq!(over_rdma.to_string(), "share /r = nfs://filer/srv (read-write, squash=root, sec=sys, proto=rdma)");
        assert!(
            Spec::parse("d=/srv,proto=rdma").unwrap().open(None, 1).is_err_and(|error| error.contains("proto=rdma"))
        );
        for option in ["async", "mode=direct", "delegations=write"] {
            let spec = Spec::parse(&format!("r=nfs://filer/srv,{option}")).unwrap();
            assert!(spec.open(None, 1).is_err_and(|error| error.contains(option.split('=').next().unwrap())));
        }
        for wrong in [
            "r=nfs://",
            "r=nfs:///srv",
            "r=nfs://filer:port/srv",
            "/srv",
            "d=",
            "d=,ro",
            "=/srv",
            "a/b=/srv",
            "d=/srv,squash=some",
            "d=/srv,no",
        ] {
            assert!(Spec::parse(wrong).is_err(), "{wrong}");
        }
    }
}
