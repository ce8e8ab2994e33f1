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
use thruway_nfs::security::SecuritySet;
use thruway_nfs::share::{Policy, Share, Squash};
use thruway_options::{OptionError, OptionKind, Required, Schema, Set};
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

/// The options of a share.
pub(in crate::serve) const OPTIONS: Schema<Spec> = Schema {
    what: "share",
    required: &[
        Required { key: "name", about: "Its name for clients, which mount `/NAME`" },
        Required {
            key: "dir",
            about: "The directory to share, `mem:SIZE` for memory that is gone with the daemon, or `nfs://HOST[:PORT]/PATH` of another NFS server (version 4.1 or 4.2)",
        },
    ],
    // Those of exports(5).
    hints: &[("root_squash", "squash=root"), ("no_root_squash", "squash=none"), ("all_squash", "squash=all")],
    options: &[
        OptionKind {
            name: "ro",
            key: "read-only",
            set: Set::Flag { set: |spec, value| spec.policy.read_only = value, off: Some("rw") },
            get: |spec| spec.policy.read_only.to_string(),
            default: "false",
            about: "Read-only",
            is_reloaded: true,
        },
        OptionKind {
            name: "async",
            key: "async",
            set: Set::Flag { set: |spec, value| spec.is_async = value, off: Some("sync") },
            get: |spec| spec.is_async.to_string(),
            default: "false",
            about: "A loss of power may take back names that clients have been told of, but not data that they have flushed",
            is_reloaded: false,
        },
        OptionKind {
            name: "mode",
            key: "mode",
            set: Set::Choice(&[("cached", |spec| spec.is_direct = false), ("direct", |spec| spec.is_direct = true)]),
            get: |spec| if spec.is_direct { "direct" } else { "cached" }.into(),
            default: "cached",
            about: "`cached`: data goes through the page cache; `direct`: past it, where it begins and ends at a multiple of 4 KiB",
            is_reloaded: false,
        },
        OptionKind {
            name: "proto",
            key: "proto",
            set: Set::Choice(&[("tcp", |spec| spec.over_rdma = false), ("rdma", |spec| spec.over_rdma = true)]),
            get: |spec| if spec.over_rdma { "rdma" } else { "tcp" }.into(),
            default: "tcp",
            about: "Transport to another NFS server",
            is_reloaded: false,
        },
        OptionKind {
            name: "squash",
            key: "squash",
            set: Set::Choice(&[
                ("root", |spec| spec.policy.squash = Squash::Root),
                ("all", |spec| spec.policy.squash = Squash::All),
                ("none", |spec| spec.policy.squash = Squash::None),
            ]),
            get: |spec| spec.policy.squash.to_string(),
            default: "root",
            about: "The users of clients that count as nobody",
            is_reloaded: true,
        },
        OptionKind {
            name: "sec",
            key: "sec",
            set: Set::List {
                value: "FLAVOR",
                separator: ':',
                set: |spec, flavors| {
                    spec.policy.security = SecuritySet::of(flavors).map_err(OptionError::other)?;
                    Ok(())
                },
            },
            get: |spec| spec.policy.security.to_string(),
            default: "sys",
            about: "Security flavors of its callers: `sys`, `krb5`, `krb5i`, `krb5p`, in the order that clients try them",
            is_reloaded: true,
        },
        OptionKind {
            name: "delegations",
            key: "delegations",
            set: Set::Choice(&[
                ("none", |spec| spec.delegate = Some(Delegate::Nothing)),
                ("read", |spec| spec.delegate = Some(Delegate::Reading)),
                ("write", |spec| spec.delegate = Some(Delegate::Writing)),
            ]),
            get: |spec| {
                match spec.delegate {
                    None => "",
                    Some(Delegate::Nothing) => "none",
                    Some(Delegate::Reading) => "read",
                    Some(Delegate::Writing) => "write",
                }
                .into()
            },
            default: "",
            about: "Delegations of open files to clients of version 4.1 and 4.2. Default: `read`, and `write` of memory",
            is_reloaded: false,
        },
        OptionKind {
            name: "allow",
            key: "allow",
            set: Set::List {
                value: "RULE",
                separator: '|',
                set: |spec, rules| {
                    if rules.is_empty() {
                        return Err(OptionError::Other(
                            "allow is empty: name its clients, or leave it out for a share for everybody".into(),
                        ));
                    }
                    let rules: Result<Vec<Rule>, RuleError> = rules.iter().map(|rule| rule.parse()).collect();
                    spec.policy.rules.extend(rules.map_err(OptionError::other)?);
                    Ok(())
                },
            },
            get: |spec| shown(&spec.policy.rules),
            default: "",
            about: "Rules for its clients, in order: the first rule that matches a client applies. Default: all clients",
            is_reloaded: true,
        },
    ],
};

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
        parts.try_for_each(|word| OPTIONS.set_known_word(&mut spec, word)).map_err(|e| e.to_string())?;
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
        if source.is_empty() {
            return Err("the share's dir is empty".into());
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

    /// Adds a rule for clients.
    pub(in crate::serve) fn allow(&mut self, rule: Rule) {
        self.policy.rules.push(rule);
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
        let moved = (self.source != running.source).then_some("dir");
        moved.into_iter().chain(OPTIONS.changed_for_restart(running, self)).collect()
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
        // Options with an effect of their own. Those of the policy are shown in any case.
        let plain = Spec { policy: Policy::default(), ..self.clone() };
        OPTIONS.words(&plain).iter().try_for_each(|word| write!(f, ", {word}"))?;
        f.write_str(")")?;
        match rules.is_empty() {
            true => Ok(()),
            false => write!(f, " for {}", shown(rules)),
        }
    }
}

/// Rules as on the command line.
fn shown(rules: &[Rule]) -> String {
    rules.iter().map(Rule::to_string).collect::<Vec<_>>().join("|")
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
