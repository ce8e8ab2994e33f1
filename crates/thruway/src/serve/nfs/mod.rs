//! The file service of the daemon: arguments, start, announcement.

mod rpcbind;
mod share;

use self::rpcbind::{Found, RpcbindMode};
use self::share::ShareState;
pub(super) use self::share::{OPTIONS as SHARE, Spec};
use super::config::again;
use super::factory::{ServiceFactory, Start};
use super::{Mistake, ServeArgs, with_config};
use clap::Args;
use rustix::fs::Mode;
use std::collections::HashSet;
use std::error::Error;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thruway_engine::Reactors;
use thruway_fs::credentials::can_act_as_others;
use thruway_fs::durable;
use thruway_gss::Acceptor;
use thruway_metrics::{RegisterError, Registered, Registry};
use thruway_nfs::mount::Mount;
use thruway_nfs::nfsacl::NfsAcl;
use thruway_nfs::nlm::Nlm;
use thruway_nfs::nsm::Nsm;
use thruway_nfs::rules::{Clients, Rule};
use thruway_nfs::security::Security;
use thruway_nfs::share::Shares;
use thruway_nfs::v3::Nfs3;
use thruway_nfs::v4::{self, Nfs4};
use thruway_rpc::server::{Config, Design, Program, Programs, RdmaConfig, Server};
use thruway_server::service::{Announcement, Service};
use thruway_server::tls::TlsServer;
use thruway_server::{Address, ConnectionKind};
use thruway_vfs::identity::FileSystemNumbers;

/// Above these options in the help.
pub(super) const HEADING: &str = "File service";

/// Arguments of the file service.
#[derive(Args, Clone)]
#[command(next_help_heading = HEADING)]
pub(super) struct NfsArgs {
    /// Directory to share by NFS (versions 3, 4.0, 4.1 and 4.2); mem:SIZE shares memory, `nfs://HOST[:PORT]/PATH` a directory of another
    /// NFS server. Options are listed below; may be repeated
    #[arg(long, value_name = "NAME=DIR[,OPTION]...", value_parser = Spec::parse)]
    pub share: Vec<Spec>,
    /// Serve the shares over NFS on this address, with the MOUNT protocol on the same port [default: 127.0.0.1:2049]
    #[arg(long, value_name = "ADDR:PORT")]
    pub nfs: Vec<SocketAddr>,
    /// Serve the shares over NFS/RDMA on this address, usually port 20049; by iWARP in user space, or by an RDMA device with
    /// --provider verbs
    #[arg(long, value_name = "ADDR:PORT")]
    pub nfs_rdma: Vec<SocketAddr>,
    /// Lease time of NFS version 4: after this long without a word from a client, others may have what it has open and locked. Also
    /// the grace period: as long after a restart, clients reclaim what they had, and get nothing else
    #[arg(long, value_name = "SECONDS", default_value_t = 90, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub nfs_lease: u16,
    /// How clients of NFS version 3 find the programs for mounting and for locks: auto registers them with the rpcbind of this
    /// host if one runs, own answers in its place on port 111, with none clients need port=, mountport= and nolock
    #[arg(long, value_name = "MODE", default_value = "auto")]
    nfs_rpcbind: RpcbindMode,
    /// Keytab with the key of nfs/HOST@REALM: users prove who they are by Kerberos to shares with sec=krb5, krb5i (signed) or krb5p
    /// (encrypted), over TCP and RDMA; a principal is the user of this host that auth_to_local of krb5.conf makes of it
    #[arg(long, value_name = "FILE")]
    nfs_keytab: Option<PathBuf>,
    /// Certificate chain (PEM): clients of NFS over TCP that ask for TLS (RFC 9289; xprtsec=tls) get it
    #[arg(long, value_name = "FILE", requires = "nfs_tls_key")]
    nfs_tls_cert: Option<PathBuf>,
    /// Private key of that certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "nfs_tls_cert")]
    nfs_tls_key: Option<PathBuf>,
    /// Refuse NFS over TCP without TLS and a client certificate signed by one of these authorities (PEM; xprtsec=mtls); the
    /// protocol for mounting version 3 is answered all the same
    #[arg(long, value_name = "FILE", requires = "nfs_tls_cert")]
    nfs_tls_ca: Option<PathBuf>,
}

/// The file with the key of handles, in the directory for what is to outlive the daemon.
const KEY_FILE: &str = "nfs-handles";

/// The file with the clients that have something open, in the same directory.
const CLIENTS_FILE: &str = "nfs-clients";

/// File with the numbers of the shares' file systems, in the same directory.
const NUMBERS_FILE: &str = "nfs-file-systems";

/// The file whose lock says that a daemon has its state there.
const LOCK_FILE: &str = "nfs-lock";

/// Key of handles.
struct HandleKey {
    path: PathBuf,
    key: [u8; 32],
    is_stored: bool,
}

impl HandleKey {
    /// Reads the key of the state directory, or creates one if there is none, without storing it.
    fn load(state: &Path) -> Result<HandleKey, String> {
        let path = state.join(KEY_FILE);
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let (key, is_stored) = match std::fs::read(&path) {
            Ok(bytes) => (bytes.try_into().map_err(|_| failed(&"not a key of NFS handles, which has 32 bytes"))?, true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                durable::create_directories(state).map_err(|e| failed(&e))?;
                (thruway_engine::random::random(), false)
            }
            Err(error) => return Err(failed(&error)),
        };
        Ok(HandleKey { path, key, is_stored })
    }

    /// Stores a new key. The caller does so after the list of clients is stored and before a client gets a handle: a key without
    /// the list would mean that the list is lost.
    fn store(&self) -> Result<(), String> {
        if self.is_stored {
            return Ok(());
        }
        let stored = durable::replace(&self.path, &self.key, Mode::RUSR | Mode::WUSR);
        stored.map_err(|error| format!("{}: {error}", self.path.display()))
    }
}

/// Longest wait for the lock of the state directory, which a killed daemon holds until its last thread has ended.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between attempts to lock the state directory.
const LOCK_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// Locks the state directory for this daemon; `None` if another daemon has locked it.
fn hold(state: &Path) -> std::io::Result<Option<File>> {
    let begun = Instant::now();
    loop {
        match durable::hold(state, LOCK_FILE)? {
            None if begun.elapsed() < LOCK_TIMEOUT => std::thread::sleep(LOCK_AGAIN_AFTER),
            held => return Ok(held),
        }
    }
}

impl NfsArgs {
    /// The protocols that are served, and the kinds of their connections; without rpcbind.
    fn listeners(&self) -> Vec<(&'static str, ConnectionKind)> {
        if self.share.is_empty() {
            return Vec::new();
        }
        let tcp = self.has_tcp().then(|| ("NFS", ConnectionKind::with_tls(self.nfs_tls_cert.as_ref())));
        tcp.into_iter().chain((!self.nfs_rdma.is_empty()).then_some(("NFS/RDMA", ConnectionKind::Rdma))).collect()
    }

    /// Over TCP, if it is asked for or nothing else is.
    fn has_tcp(&self) -> bool {
        !self.nfs.is_empty() || self.nfs_rdma.is_empty()
    }

    /// The daemon is the rpcbind of this host.
    pub(super) fn is_rpcbind(&self) -> bool {
        !self.share.is_empty() && self.nfs_rpcbind == RpcbindMode::Own
    }

    /// Mistakes of the options: without effect, two shares of one name, or open to everybody unasked.
    fn check(&self, anonymous: bool, user: bool) -> Vec<Mistake> {
        let mut mistakes: Vec<Mistake> = Vec::new();
        let mut mistake = |what: &str, why: String| mistakes.push((what.into(), why));
        if self.share.is_empty() {
            for (option, is_given) in [("--nfs", !self.nfs.is_empty()), ("--nfs-rdma", !self.nfs_rdma.is_empty())] {
                if is_given {
                    mistake(option, format!("{option} requires at least one --share NAME=DIR"));
                }
            }
            return mistakes;
        }
        let what = |spec: &Spec| format!("share '{}'", spec.name());
        let mut names = HashSet::new();
        for spec in self.share.iter().filter(|spec| !names.insert(spec.name())) {
            mistake(&again(&what(spec)), format!("two shares are named '{}'", spec.name()));
        }
        if user {
            mistake("--user", "--user cannot be used with --share: only root can act as the users of clients".into());
        }
        if self.nfs_tls_cert.is_some() && !self.has_tcp() {
            mistake("--nfs-tls-cert", "--nfs-tls-cert requires NFS over TCP (--nfs ADDR:PORT)".into());
        }
        let kerberos = |spec: &Spec| spec.securities().find(|set| set.has_kerberos());
        let with_kerberos: Vec<_> = self.share.iter().filter_map(|spec| Some((spec, kerberos(spec)?))).collect();
        if self.nfs_keytab.is_none() {
            for (spec, set) in &with_kerberos {
                mistake(&what(spec), format!("share '{}': sec={set} requires --nfs-keytab FILE", spec.name()));
            }
        } else if with_kerberos.is_empty() {
            let why = "--nfs-keytab is without effect: no share has sec=krb5, krb5i or krb5p";
            mistake("--nfs-keytab", why.into());
        }
        let is_open = |address: &&SocketAddr| !address.ip().to_canonical().is_loopback();
        let tcp = self.nfs.iter().filter(|_| self.nfs_tls_ca.is_none()).find(is_open);
        for (option, open) in [("--nfs", tcp), ("--nfs-rdma", self.nfs_rdma.iter().find(is_open))] {
            if let Some(open) = open.filter(|_| !anonymous && !self.proves_all()) {
                let why = format!(
                    "refusing to serve NFS on {open}: clients say themselves who their users are; use --anonymous if the network is trusted, Kerberos for all shares (sec=krb5p and --nfs-keytab), or for TCP --nfs-tls-cert, --nfs-tls-key and --nfs-tls-ca"
                );
                mistake(option, why);
            }
        }
        let by_name = |rule: &Rule| matches!(rule.clients, Clients::Certificate(_));
        let needs_names = |spec: &&Spec| self.nfs_tls_ca.is_none() && spec.policy().rules.iter().any(by_name);
        for spec in self.share.iter().filter(needs_names) {
            let why = format!(
                "share '{}': allow=cert:NAME requires --nfs-tls-ca, without which clients have no names",
                spec.name()
            );
            mistake(&what(spec), why);
        }
        mistakes
    }

    fn tls(&self) -> Result<Option<Arc<TlsServer>>, String> {
        let (Some(cert), Some(key)) = (&self.nfs_tls_cert, &self.nfs_tls_key) else { return Ok(None) };
        TlsServer::new(cert, key, self.nfs_tls_ca.as_deref()).map(Some).map_err(|e| e.to_string())
    }

    /// The service that users prove to who they are.
    fn acceptor(&self) -> Result<Option<Acceptor>, String> {
        let Some(keytab) = &self.nfs_keytab else { return Ok(None) };
        Acceptor::new("nfs", keytab).map(Some).map_err(|e| format!("--nfs-keytab {}: {e}", keytab.display()))
    }

    /// Whether every user has to prove who it is, so that it does not matter where from.
    fn proves_all(&self) -> bool {
        self.share.iter().flat_map(Spec::securities).all(|set| !set.contains(Security::Sys))
    }

    /// Errors that would keep shares from being served, as far as they can be found without serving. Each comes with the part of the
    /// configuration that it concerns.
    fn mistakes(&self) -> Vec<Mistake> {
        let share = |spec: &Spec| Some((format!("share '{}'", spec.name()), spec.open(None, 1).err()?));
        let tls = self.tls().err().map(|error| ("--nfs-tls-cert".into(), error));
        let acceptor = self.acceptor().err().map(|error| ("--nfs-keytab".into(), error));
        self.share.iter().filter_map(share).chain(tls).chain(acceptor).collect()
    }
}

/// How long calls in progress may take when the daemon ends.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(6);

/// The file service.
pub(super) struct NfsFactory;

impl ServiceFactory for NfsFactory {
    fn check(&self, args: &ServeArgs) -> Vec<Mistake> {
        args.nfs.check(args.anonymous, args.user.is_some())
    }

    fn errors(&self, args: &ServeArgs) -> Vec<Mistake> {
        args.nfs.mistakes()
    }

    fn listeners(&self, args: &ServeArgs) -> Vec<(&'static str, ConnectionKind)> {
        args.nfs.listeners()
    }

    fn prepare<'a>(&self, args: &'a ServeArgs) -> Result<Option<Start<'a>>, String> {
        let is_wanted = !args.nfs.share.is_empty();
        Ok(is_wanted.then(|| -> Start<'a> { Box::new(|| Ok(Box::new(NfsService::start(args)?))) }))
    }
}

/// Reads again what the configuration file says of this service, and whether everybody is served; `None` if there is no file.
type ReadAgain = Box<dyn Fn() -> Result<Option<(NfsArgs, bool)>, String>>;

/// The running file service.
pub(super) struct NfsService {
    tcp: Option<Server>,
    rdma: Option<Server>,
    found: Found,
    shares: Arc<Shares>,
    v4: Arc<Nfs4>,
    tls: Option<Arc<TlsServer>>,
    /// As it was started.
    args: NfsArgs,
    own_user_only: bool,
    read_again: ReadAgain,
    /// Behind all that uses them, so that the server's tasks end before.
    _reactors: Reactors,
    /// Keeps other daemons from the state on the medium, as long as any task may write there.
    _held: File,
}

impl NfsService {
    fn start(serve: &ServeArgs) -> Result<NfsService, String> {
        let (args, anonymous, connections_max) = (&serve.nfs, serve.anonymous, serve.max_connections);
        let (config, provider) = (serve.config.clone(), serve.provider);
        let fabric = |listen: &[SocketAddr]| super::fabric(provider, listen);
        let read_again: ReadAgain = Box::new(move || match &config {
            None => Ok(None),
            Some(path) => with_config(path).map(|args| Some((args.nfs, args.anonymous))).map_err(|e| e.to_string()),
        });
        let state = serve.state();
        let state = state.as_deref();
        let state = state.ok_or("no directory for the key of NFS handles: give --state DIR")?;
        let held = hold(state).map_err(|e| format!("{}: {e}", state.join(LOCK_FILE).display()))?;
        let held = held.ok_or_else(|| {
            format!(
                "{}: another daemon that serves NFS has its state there: give each a --state DIR of its own",
                state.display()
            )
        })?;
        let key = HandleKey::load(state)?;
        let directories = args.share.iter().filter(|share| share.is_directory()).count();
        let failed = |error: std::io::Error| format!("{}: {error}", state.join(NUMBERS_FILE).display());
        let numbers = Arc::new(FileSystemNumbers::load(&state.join(NUMBERS_FILE)).map_err(failed)?);
        let superblocks: Vec<_> =
            args.share.iter().filter_map(|share| Some((share.name(), share.superblock()?))).collect();
        numbers.assign(superblocks.iter().map(|(share, superblock)| (*share, superblock)));
        let of_shares = ShareState { directory: state, numbers: Arc::clone(&numbers) };
        let shares = args.share.iter().map(|share| share.open(Some(&of_shares), directories));
        let shares = shares.collect::<Result<Vec<_>, _>>()?;
        numbers.store().map_err(failed)?;
        if directories > 0 && !can_act_as_others() {
            tracing::warn!(
                user = rustix::process::geteuid().as_raw(),
                "not started by root: files are used with the rights of this user, for every user of the network"
            );
        }
        let shares = Shares::new(shares, key.key)
            .map_err(|(one, other)| format!("shares '{one}' and '{other}' cannot be told apart: rename one"))?;
        let shares = Arc::new(shares);
        let reactors = Reactors::start(None).map_err(|e| format!("starting the file service: {e}"))?;
        let v4 = v4::Config {
            lease: Duration::from_secs(args.nfs_lease.into()),
            state_file: Some(state.join(CLIENTS_FILE)),
            // A key is stored only after a list of clients.
            had_clients: key.is_stored,
        };
        let v4 =
            Nfs4::new(Arc::clone(&shares), v4).map_err(|e| format!("{}: {e}", state.join(CLIENTS_FILE).display()))?;
        key.store()?;
        let (nlm, nsm) = (Arc::new(Nlm::new(&v4)), Arc::new(Nsm::new(&v4)));
        v4.watch(&reactors);
        let v4 = Arc::new(v4);
        let programs = [
            Arc::new(Nfs3::new(Arc::clone(&shares))) as Arc<dyn Program>,
            Arc::clone(&v4) as Arc<dyn Program>,
            Arc::clone(&nlm) as Arc<dyn Program>,
            Arc::clone(&nsm) as Arc<dyn Program>,
            Arc::new(NfsAcl::new(Arc::clone(&shares))),
            Arc::new(Mount::new(Arc::clone(&shares))),
        ];
        let programs = match args.acceptor()? {
            Some(acceptor) => Programs::with_gss(programs, acceptor),
            None => Programs::new(programs),
        };
        let (tls, tls_required) = (args.tls()?, args.nfs_tls_ca.is_some());
        let (own_user_only, connections_max) = (!anonymous && !args.proves_all(), connections_max as usize);
        let mut listen = args.nfs.clone();
        if listen.is_empty() && args.nfs_rdma.is_empty() {
            listen.push(SocketAddr::from(([127, 0, 0, 1], 2049)));
        }
        let tcp = (!listen.is_empty()).then(|| {
            let config = Config {
                protocol: "NFS",
                listen: listen.into_iter().map(Address::Tcp).collect(),
                programs: programs.clone(),
                tls: tls.clone(),
                tls_required,
                own_user_only: own_user_only && !tls_required,
                connections_max,
            };
            Server::start(config, &reactors).map_err(|e| e.to_string())
        });
        let tcp = tcp.transpose()?;
        let rdma = (!args.nfs_rdma.is_empty()).then(|| {
            let config = RdmaConfig {
                protocol: "NFS/RDMA",
                listen: args.nfs_rdma.clone(),
                provider: fabric(&args.nfs_rdma)?,
                design: Design::ReadWrite,
                programs,
                own_user_only,
                connections_max,
            };
            Server::start_rdma(config, &reactors).map_err(|e| format!("NFS/RDMA: {e}"))
        });
        let rdma = rdma.transpose()?;
        let addresses = tcp.as_ref().map_or(&[][..], Server::addresses);
        let found = Found::start(args.nfs_rpcbind, addresses, nsm, &reactors, own_user_only)?;
        nlm.notify_clients(&reactors);
        Ok(NfsService {
            tcp,
            rdma,
            found,
            shares,
            v4,
            tls,
            args: args.clone(),
            own_user_only,
            read_again,
            _held: held,
            _reactors: reactors,
        })
    }
}

impl NfsService {
    fn servers(&self) -> impl Iterator<Item = &Server> {
        self.tcp.iter().chain(&self.rdma)
    }
}

impl Service for NfsService {
    fn announcement(&self) -> Announcement {
        let tcp = self.tcp.iter().map(|s| ("nfs", "NFS at", s.addresses().to_vec()));
        let rdma = self.rdma.iter().map(|s| ("nfs_rdma", "NFS/RDMA at", s.addresses().to_vec()));
        Announcement {
            addresses: tcp.chain(rdma).collect(),
            facts: vec![("rpcbind", self.found.how.into())],
            lines: self.args.share.iter().map(Spec::to_string).collect(),
        }
    }

    fn reload(&self) -> Result<(), Box<dyn Error>> {
        self.tls.iter().try_for_each(|tls| tls.reload())?;
        let Some((args, anonymous)) = (self.read_again)()? else { return Ok(()) };
        let mistakes: Vec<_> = args.check(anonymous, false).into_iter().map(|(_, mistake)| mistake).collect();
        if !mistakes.is_empty() {
            return Err(mistakes.join("; ").into());
        }
        if (&args.nfs_keytab, &args.nfs_tls_ca) != (&self.args.nfs_keytab, &self.args.nfs_tls_ca) {
            return Err("NFS: nfs-keytab and nfs-tls-ca change by a restart: the shares stay as they were".into());
        }
        if self.own_user_only != (!anonymous && !args.proves_all()) {
            return Err(
                "NFS: whether only users of this host are served changes by a restart: the shares stay as they were"
                    .into(),
            );
        }
        for spec in &args.share {
            let name = spec.name();
            let Some(running) = self.args.share.iter().find(|running| running.name() == name) else {
                tracing::warn!("share '{name}' is new: needs a restart");
                continue;
            };
            let changes = spec.changes_for_restart(running);
            if !changes.is_empty() {
                tracing::warn!("share '{name}': {} changed: needs a restart", changes.join(", "));
            }
            if let Some(share) = self.shares.find(name.as_bytes()) {
                let is_changed = *share.policy() != *spec.policy();
                share.set_policy(spec.policy().clone());
                if is_changed {
                    thruway_cli::say_error!("thruway serve: reloaded: {}", running.with_policy_of(spec));
                }
            }
        }
        for share in self.shares.iter().filter(|share| !args.share.iter().any(|spec| spec.name() == share.name)) {
            tracing::warn!("share '{}' is removed: needs a restart; its rules are unchanged", share.name);
        }
        Ok(())
    }

    fn register(&self, registry: &Registry) -> Result<Vec<Registered>, RegisterError> {
        let mut all: Vec<Registered> =
            self.servers().map(|server| server.register(registry)).collect::<Result<_, _>>()?;
        all.extend(self.v4.register(registry)?);
        Ok(all)
    }

    fn statistics(&self) -> Vec<String> {
        let tcp = self.tcp.iter().map(|s| ("NFS", s));
        let all = tcp.chain(self.rdma.iter().map(|s| ("NFS/RDMA", s)));
        let connections = all.map(|(name, server)| format!("{name}: {} connections", server.connections()));
        connections.chain(self.v4.clients()).collect()
    }

    fn close(&self) {
        self.servers().for_each(Server::close);
    }

    fn shut_down(&mut self) -> Result<(), Box<dyn Error>> {
        // Both at once first, so that together they take no longer than one.
        self.found.end();
        self.servers().for_each(Server::close);
        self.servers().for_each(|server| server.shut_down(LEAVE_TIMEOUT));
        Ok(())
    }
}
