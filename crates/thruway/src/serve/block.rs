//! The block service of the daemon: arguments, start, announcement.

use super::config::again;
use super::factory::{ServiceFactory, Start};
use super::{Mistake, ServeArgs, fabric};
use clap::Args;
use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thruway_block::export::Spec;
use thruway_block::iscsi::chap::Secrets;
use thruway_block::iscsi::iser;
use thruway_block::iscsi::target::{Target, Targets};
use thruway_block::scsi::{Lasting, Unit};
use thruway_block::{Backend, Export, iscsi, nbd};
use thruway_engine::Reactors;
use thruway_engine::topology::usable_nodes;
use thruway_fabric::Provider;
use thruway_metrics::{RegisterError, Registered, Registry};
use thruway_server::service::{Announcement, Service};
use thruway_server::tls::TlsServer;
use thruway_server::{Address, ConnectionKind};

/// Above these options in the help.
pub(super) const HEADING: &str = "Block service";

/// Arguments of the block service.
#[derive(Args)]
#[command(next_help_heading = HEADING)]
pub(super) struct BlockArgs {
    /// Disk to serve: a file, a block device, mem:SIZE or stripe:CHUNK:PATH:PATH...; may be repeated
    #[arg(long, value_name = "NAME=PATH[,OPTION]...", value_parser = Spec::parse)]
    pub block: Vec<Spec>,
    /// Serve the disks over NBD on this address, or on unix:PATH [default: 127.0.0.1:10809 if no protocol is named]
    #[arg(long, value_name = "ADDR:PORT")]
    pub nbd: Vec<Address>,
    /// Certificate chain for NBD (PEM); enables TLS and makes it mandatory
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Require client certificates signed by one of these authorities (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Serve the disks over iSCSI on this address, each as a target of its own
    #[arg(long, value_name = "ADDR:PORT")]
    pub iscsi: Vec<SocketAddr>,
    /// Serve the disks over iSER (iSCSI over RDMA) on this address: in user space, or with --provider verbs over
    /// the RDMA device there
    #[arg(long, value_name = "ADDR:PORT")]
    pub iser: Vec<SocketAddr>,
    /// IQN prefix of target names (PREFIX:NAME)
    #[arg(long, value_name = "IQN", default_value = "iqn.2026-11.org.thruway", value_parser = parse_iqn)]
    iqn: String,
    /// Require CHAP from iSCSI initiators: lines 'initiator NAME SECRET [IQN,IQN...]', which reserve those IQNs for
    /// that name, and 'target NAME SECRET' for mutual CHAP
    #[arg(long, value_name = "FILE")]
    chap: Option<PathBuf>,
    /// Serve only iSCSI initiators of this name; may be repeated
    #[arg(long, value_name = "IQN")]
    initiator: Vec<String>,
    /// Number of threads of the block service [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    reactors: Option<u32>,
}

fn parse_iqn(text: &str) -> Result<String, String> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-' | ':');
    if text.starts_with("iqn.") && text.len() <= 150 && text.chars().all(legal) {
        return Ok(text.into());
    }
    Err("write a name like iqn.2026-11.org.example, in small letters (RFC 3722)".into())
}

impl BlockArgs {
    /// Whether there are initiators, who may ask for what outlives the daemon.
    fn has_initiators(&self) -> bool {
        !self.iscsi.is_empty() || !self.iser.is_empty()
    }

    /// Files with secrets and certificates.
    pub(super) fn secret_files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.chap, &self.tls_cert, &self.tls_key, &self.tls_ca].into_iter().flatten()
    }

    /// Mistakes of the options: without effect, two disks of one name, or open to everybody unasked.
    fn check(&self, anonymous: bool) -> Vec<Mistake> {
        let iscsi = !self.iscsi.is_empty() || !self.iser.is_empty();
        let nbd = !self.nbd.is_empty() || !iscsi;
        let given = [
            ("--nbd", !self.nbd.is_empty(), true, ""),
            ("--iscsi", !self.iscsi.is_empty(), true, ""),
            ("--iser", !self.iser.is_empty(), true, ""),
            ("--tls-cert", self.tls_cert.is_some(), nbd, "NBD (--nbd ADDR:PORT)"),
            ("--chap", self.chap.is_some(), iscsi, "iSCSI (--iscsi or --iser ADDR:PORT)"),
            ("--initiator", !self.initiator.is_empty(), iscsi, "iSCSI (--iscsi or --iser ADDR:PORT)"),
        ];
        let mut mistakes: Vec<Mistake> = Vec::new();
        for (option, is_given, has_use, wanted) in given {
            if is_given && self.block.is_empty() {
                mistakes.push((option.into(), format!("{option} requires at least one --block NAME=PATH")));
            } else if is_given && !has_use {
                mistakes.push((option.into(), format!("{option} requires {wanted}")));
            }
        }
        let mut names = std::collections::HashSet::new();
        for spec in self.block.iter().filter(|spec| !names.insert(&spec.name)) {
            let what = again(&format!("disk '{}'", spec.name));
            mistakes.push((what, format!("two block exports are named '{}'", spec.name)));
        }
        mistakes.extend(self.exposure(anonymous));
        mistakes.extend(self.secrets().err().map(|error| ("--chap".into(), error)));
        mistakes
    }

    /// Listeners that would serve disks to other hosts without authentication.
    fn exposure(&self, anonymous: bool) -> Vec<Mistake> {
        let mut mistakes = Vec::new();
        if anonymous {
            return mistakes;
        }
        if let Some(open) = self.nbd.iter().find(|a| !a.is_local())
            && self.tls_ca.is_none()
        {
            let mistake = format!(
                "refusing to serve NBD on {open} without authentication; use --tls-cert, --tls-key and --tls-ca, or --anonymous"
            );
            mistakes.push(("--nbd".into(), mistake));
        }
        for (option, addresses) in [("--iscsi", &self.iscsi), ("--iser", &self.iser)] {
            if let Some(open) = addresses.iter().find(|a| !a.ip().to_canonical().is_loopback())
                && self.chap.is_none()
            {
                let mistake = format!(
                    "refusing to serve iSCSI on {open} without authentication; use --chap FILE, or --anonymous"
                );
                mistakes.push((option.into(), mistake));
            }
        }
        mistakes
    }

    fn tls(&self) -> Result<Option<Arc<TlsServer>>, String> {
        let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        TlsServer::new(cert, key, self.tls_ca.as_deref()).map(Some).map_err(|e| e.to_string())
    }

    fn secrets(&self) -> Result<Option<Secrets>, String> {
        self.chap.as_deref().map(Secrets::load).transpose().map_err(|e| e.to_string())
    }

    /// The iSCSI name of a disk's target.
    fn target_name(&self, export: &str, target: Option<&String>) -> String {
        format!("{}:{}", self.iqn, target.map_or(export, String::as_str)).to_lowercase()
    }

    /// Disks of one target are for the same initiators: a session is a target's, all units of it.
    fn check_targets(&self) -> Result<(), String> {
        let mut allowed = HashMap::new();
        for spec in &self.block {
            let name = self.target_name(&spec.name, spec.target.as_ref());
            if *allowed.entry(name.clone()).or_insert(&spec.allow) != &spec.allow {
                return Err(format!(
                    "block export '{}': disks of target {name} must have the same allow= list",
                    spec.name
                ));
            }
        }
        Ok(())
    }

    /// Errors that would keep disks from being served, as far as they can be found without opening disks. Each comes with
    /// the part of the configuration that it concerns.
    fn mistakes(&self) -> Vec<Mistake> {
        let nodes = usable_nodes().len();
        let disks = Spec::check(&self.block, nodes).into_iter();
        let disks = disks.map(|(name, error)| (format!("disk '{name}'"), format!("block export '{name}': {error}")));
        let files = [("--tls-cert", self.tls().err()), ("--chap", self.secrets().err())];
        let files = files.into_iter().filter_map(|(option, error)| Some((option.into(), error?)));
        let targets = if self.has_initiators() { self.check_targets() } else { Ok(()) };
        disks.chain(files).chain(targets.err().map(|error| (String::new(), error))).collect()
    }

    /// The protocols that are served, and the kinds of their connections.
    fn listeners(&self) -> Vec<(&'static str, ConnectionKind)> {
        if self.block.is_empty() {
            return Vec::new();
        }
        let nbd = !self.nbd.is_empty() || (self.iscsi.is_empty() && self.iser.is_empty());
        let all = [
            (nbd, "NBD", ConnectionKind::with_tls(self.tls_cert.as_ref())),
            (!self.iscsi.is_empty(), "iSCSI", ConnectionKind::Plain),
            (!self.iser.is_empty(), "iSER", ConnectionKind::Rdma),
        ];
        all.into_iter().filter(|(is_served, ..)| *is_served).map(|(_, name, kind)| (name, kind)).collect()
    }

    /// NBD, if it is asked for or nothing else is.
    fn nbd(
        &self,
        exports: &[Arc<Export>],
        tls: Option<Arc<TlsServer>>,
        anonymous: bool,
        connections_max: usize,
        reactors: &Reactors,
    ) -> Result<Option<nbd::Server>, String> {
        let mut listen = self.nbd.clone();
        if listen.is_empty() {
            if !self.iscsi.is_empty() || !self.iser.is_empty() {
                return Ok(None);
            }
            listen.push(Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 10809))));
        }
        if self.tls_ca.is_none() {
            for export in exports.iter().filter(|export| !export.allow.is_empty()) {
                tracing::warn!(
                    export = export.name,
                    "no client can use this disk over NBD: allow= needs names, and without --tls-ca clients have none"
                );
            }
        }
        let config = nbd::Config {
            listen,
            exports: exports.into(),
            tls,
            own_user_only: self.tls_ca.is_none() && !anonymous,
            connections_max,
        };
        nbd::Server::start(config, reactors).map(Some).map_err(|e| e.to_string())
    }

    /// The disks as iSCSI targets, and who may use them.
    fn targets(&self, exports: &[Arc<Export>], state: Option<&Path>) -> Result<Arc<Targets>, String> {
        self.check_targets()?;
        let secrets = self.secrets()?;
        let mut targets: Vec<Target> = Vec::new();
        for export in exports {
            let name = self.target_name(&export.name, export.target.as_ref());
            let mut unit = Unit::new(Arc::clone(export), export.sector);
            if let Some(state) = state.filter(|_| export.is_lasting) {
                unit = unit.with_lasting(Lasting::of(state, &export.identity)).map_err(|e| e.to_string())?;
            }
            let unit = Arc::new(unit);
            match targets.iter_mut().find(|t| t.name == name) {
                Some(target) => target.units.push(unit),
                None => targets.push(Target { name, units: vec![unit] }),
            }
        }
        Ok(Arc::new(Targets::new(targets, secrets, self.initiator.clone())))
    }

    /// No one authenticates: then it is for us.
    fn own_initiators_only(&self, anonymous: bool) -> bool {
        self.chap.is_none() && !anonymous
    }

    fn iscsi(
        &self,
        targets: &Arc<Targets>,
        anonymous: bool,
        connections_max: usize,
        reactors: &Reactors,
    ) -> Result<Option<iscsi::Server>, String> {
        if self.iscsi.is_empty() {
            return Ok(None);
        }
        let (listen, targets) = (self.iscsi.clone(), Arc::clone(targets));
        let own_user_only = self.own_initiators_only(anonymous);
        let config = iscsi::Config { listen, targets, own_user_only, connections_max };
        iscsi::Server::start(config, reactors).map(Some).map_err(|e| e.to_string())
    }

    fn iser(
        &self,
        targets: &Arc<Targets>,
        anonymous: bool,
        connections_max: usize,
        fabric: impl FnOnce(&[SocketAddr]) -> Result<Provider, String>,
        reactors: &Reactors,
    ) -> Result<Option<iser::Server>, String> {
        if self.iser.is_empty() {
            return Ok(None);
        }
        let config = iser::Config {
            listen: self.iser.clone(),
            provider: fabric(&self.iser)?,
            targets: Arc::clone(targets),
            own_user_only: self.own_initiators_only(anonymous),
            connections_max,
        };
        iser::Server::start(config, reactors).map(Some).map_err(|e| format!("iSER: {e}"))
    }
}

/// How long clients that have been asked to leave may take.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(6);
/// How long requests that are still in progress when their clients have been told to leave may take.
const LAST_REQUESTS: Duration = Duration::from_secs(10);

/// The block service.
pub(super) struct BlockFactory;

impl ServiceFactory for BlockFactory {
    fn check(&self, args: &ServeArgs) -> Vec<Mistake> {
        args.block.check(args.anonymous)
    }

    fn errors(&self, args: &ServeArgs) -> Vec<Mistake> {
        args.block.mistakes()
    }

    fn listeners(&self, args: &ServeArgs) -> Vec<(&'static str, ConnectionKind)> {
        args.block.listeners()
    }

    fn prepare<'a>(&self, args: &'a ServeArgs) -> Result<Option<Start<'a>>, String> {
        if args.block.block.is_empty() {
            return Ok(None);
        }
        prepare_state(args);
        Ok(Some(Box::new(|| Ok(Box::new(BlockService::start(args)?)))))
    }
}

/// Makes the directory for persistent reservations, for which only initiators ask.
fn prepare_state(args: &ServeArgs) {
    let Some(state) = args.state().filter(|_| args.block.has_initiators()) else { return };
    let made = match &args.user {
        Some(user) => {
            let own = user.make_directory(&state);
            own.and_then(|()| user.take_over(&state, Lasting::DIRECTORY, Lasting::is_name))
        }
        None => std::fs::create_dir_all(&state),
    };
    if let Err(error) = made {
        tracing::warn!(path = %state.display(), %error, "cannot create the state directory: persistent reservations will not survive a restart");
    }
}

/// The running block service.
pub(super) struct BlockService {
    nbd: Option<nbd::Server>,
    iscsi: Option<iscsi::Server>,
    iser: Option<iser::Server>,
    exports: Vec<Arc<Export>>,
    tls: Option<Arc<TlsServer>>,
    /// Last, so that the servers' tasks end with it.
    reactors: Reactors,
}

impl BlockService {
    fn start(serve: &ServeArgs) -> Result<BlockService, String> {
        let (args, anonymous) = (&serve.block, serve.anonymous);
        let connections_max = serve.max_connections as usize;
        let reactors = Reactors::start(args.reactors.map(|n| n as usize))
            .map_err(|e| format!("starting the block service: {e}"))?;
        let mut exports: Vec<Arc<Export>> = Vec::new();
        for spec in &args.block {
            let opened = spec.open(Some(&reactors)).map_err(|e| format!("block export '{}': {e}", spec.name));
            let opened = opened?;
            if let Some(other) =
                exports.iter().find(|e| e.identity == opened.identity && !(e.read_only && opened.read_only))
            {
                return Err(format!(
                    "block exports '{}' and '{}' have one identity; initiators would take them for one disk: give uuid=",
                    other.name, opened.name
                ));
            }
            exports.push(Arc::new(opened));
        }
        // Reservations that outlive daemons are in force before anybody is served.
        let targets = args.targets(&exports, serve.state().as_deref())?;
        let tls = args.tls()?;
        let nbd = args.nbd(&exports, tls.clone(), anonymous, connections_max, &reactors)?;
        let iscsi = args.iscsi(&targets, anonymous, connections_max, &reactors)?;
        let iser =
            args.iser(&targets, anonymous, connections_max, |listen| fabric(serve.provider, listen), &reactors)?;
        Ok(BlockService { nbd, iscsi, iser, exports, tls, reactors })
    }
}

impl Service for BlockService {
    fn announcement(&self) -> Announcement {
        let nbd = self.nbd.as_ref().map(|s| ("nbd", "NBD at", s.addresses().to_vec()));
        let iscsi = self.iscsi.as_ref().map(|s| ("iscsi", "iSCSI at", s.addresses().to_vec()));
        let iser = self.iser.as_ref().map(|s| ("iser", "iSER at", s.addresses().to_vec()));
        let disk = |export: &Arc<Export>| {
            let geometry = export.geometry();
            let mode = if geometry.read_only { "read-only" } else { "read and write" };
            format!("block {} = {}, {} bytes ({mode})", export.name, export.description, geometry.size)
        };
        Announcement {
            addresses: nbd.into_iter().chain(iscsi).chain(iser).collect(),
            facts: Vec::new(),
            lines: self.exports.iter().map(disk).collect(),
        }
    }

    fn reload(&self) -> Result<(), Box<dyn Error>> {
        self.tls.iter().try_for_each(|tls| tls.reload())?;
        Ok(())
    }

    fn register(&self, registry: &Registry) -> Result<Vec<Registered>, RegisterError> {
        let nbd = self.nbd.iter().map(|server| server.register(registry));
        let iscsi = self.iscsi.iter().map(|server| server.register(registry));
        let iser = self.iser.iter().map(|server| server.register(registry));
        let mut all: Vec<Registered> = nbd.chain(iscsi).chain(iser).collect::<Result<_, _>>()?;
        for export in &self.exports {
            all.extend(export.backend.register(registry, &export.name)?);
        }
        Ok(all)
    }

    fn statistics(&self) -> Vec<String> {
        let nbd = self.nbd.as_ref().map(|s| ("NBD", s.connections()));
        let iscsi = self.iscsi.as_ref().map(|s| ("iSCSI", s.connections()));
        let iser = self.iser.as_ref().map(|s| ("iSER", s.connections()));
        let connections = nbd.into_iter().chain(iscsi).chain(iser);
        let disk = |export: &Arc<Export>| Some(format!("block {}: {}", export.name, export.backend.summary()?));
        connections
            .map(|(protocol, count)| format!("{protocol}: {count} connections"))
            .chain(self.exports.iter().filter_map(disk))
            .collect()
    }

    fn close(&self) {
        // Those whom something asks to leave. Others go on until they have to end.
        if let Some(iscsi) = &self.iscsi {
            iscsi.close();
        }
        if let Some(iser) = &self.iser {
            iser.close();
        }
    }

    fn shut_down(&mut self) -> Result<(), Box<dyn Error>> {
        self.close();
        if let Some(iscsi) = &self.iscsi {
            iscsi.shut_down(LEAVE_TIMEOUT);
        }
        if let Some(iser) = &self.iser {
            iser.shut_down(LEAVE_TIMEOUT);
        }
        // Last those whom nothing asks to leave: after the flush nothing may be acknowledged.
        if let Some(nbd) = &self.nbd {
            nbd.shut_down(LEAVE_TIMEOUT);
        }
        let mut failed = Vec::new();
        for export in &self.exports {
            let (tell, told) = std::sync::mpsc::channel();
            let disk = Arc::clone(export);
            // Whatever connections are left: what is not done by then is not acknowledged.
            let close = async move |disk: Arc<Export>| disk.backend.close(LAST_REQUESTS).await;
            self.reactors.handles()[0].spawn(move || async move { drop(tell.send(close(disk).await)) });
            let closed =
                told.recv().unwrap_or_else(|_| Err(std::io::Error::other("internal error: its reactor has ended")));
            if let Err(error) = closed {
                thruway_cli::say_error!("thruway serve: stopping block export '{}': {error}", export.name);
                failed.push(export.name.clone());
            }
            if let Some(report) = export.backend.summary() {
                tracing::info!(export = export.name, "{report}");
            }
        }
        if failed.is_empty() {
            return Ok(());
        }
        Err(format!("not all that was written may be on the medium: {}", failed.join(", ")).into())
    }
}
