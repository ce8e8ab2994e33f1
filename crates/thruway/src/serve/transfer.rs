//! The transfer service of the daemon: credentials, start, announcement.

use super::config::again;
use super::factory::{ServiceFactory, Start};
use super::{Mistake, ServeArgs, fabric};
use crate::endpoint::DEFAULT_PORT;
use crate::keys;
use std::error::Error;
use std::io::BufRead;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use thruway_metrics::{Description, RegisterError, Registered, Registry};
use thruway_server::service::{Announcement, Ended, Service};
use thruway_server::{Address, ConnectionKind};
use thruway_transfer::access::AuthorizedKeys;
use thruway_transfer::auth::{AuthError, Credentials, KeyPair, from_hex};
use thruway_transfer::daemon::{
    Config, DEV_EXPORT, Daemon, Export, StartError, Stopper, check_export_names, check_exports,
};

/// Who the daemon is.
fn credentials(args: &ServeArgs) -> Result<Credentials, String> {
    if args.secret_from_stdin {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map_err(|e| format!("reading the secret: {e}"))?;
        return Ok(Credentials::Secret(from_hex(line.trim()).ok_or("no secret on standard input")?));
    }
    // Clients on this machine remember no keys of daemons.
    let passing = is_loopback_only(&args.listen) && args.key.is_none();
    Ok(Credentials::Keys(if passing { KeyPair::generate() } else { keys::host(args.key.as_ref())? }))
}

fn is_loopback_only(listen: &[SocketAddr]) -> bool {
    listen.iter().all(|a| a.ip().to_canonical().is_loopback())
}

/// Loads the authorized keys. Warns of keys for exports that do not exist, and if other users can write to the file, and so add keys.
fn load_authorized(path: &Path, exports: &[Export]) -> Result<AuthorizedKeys, Vec<AuthError>> {
    let keys = AuthorizedKeys::load(path)?;
    let known: Vec<&str> = exports.iter().map(|export| export.name.as_str()).chain([DEV_EXPORT]).collect();
    for (line, name) in keys.unknown_exports(&known) {
        tracing::warn!(
            "{}:{line}: no export '{}' (exports: {})",
            path.display(),
            thruway_transfer::escape(name.as_bytes()),
            known.join(", ")
        );
    }
    if let Some(mode) = path.metadata().ok().map(|meta| meta.mode() & 0o7777).filter(|mode| mode & 0o022 != 0) {
        tracing::warn!(
            "{}: other users can add keys: its mode is {mode:04o}; remove the right with chmod go-w",
            path.display()
        );
    }
    for key in keys.without_create() {
        tracing::warn!(
            "{}: {key} may replace or delete, but not create; every copy to the daemon requires 'create'",
            path.display()
        );
    }
    Ok(keys)
}

/// Mistakes of a file of keys for a message, a line for each.
pub(super) fn lines(mistakes: &[AuthError]) -> String {
    let lines: Vec<String> = mistakes.iter().map(AuthError::to_string).collect();
    lines.join("\nthruway serve: ")
}

/// The running transfer service.
pub(super) struct TransferService {
    addresses: Vec<Address>,
    lines: Vec<String>,
    /// The daemon's; empty if peers know it by a secret.
    public_key: String,
    authorized_keys: Option<PathBuf>,
    exports: Vec<Export>,
    stopper: Stopper,
    /// Until it runs.
    daemon: Option<Daemon>,
    thread: Option<JoinHandle<()>>,
}

impl TransferService {
    /// Listens. Sessions begin with [`Service::run`].
    fn start(args: &ServeArgs, credentials: Credentials) -> Result<TransferService, String> {
        let public_key = match &credentials {
            Credentials::Keys(pair) => pair.public().to_string(),
            Credentials::Secret(_) => String::new(),
        };
        let daemon = start(args, credentials)?;
        let mut lines = Vec::new();
        for export in &args.export {
            let mode = if export.read_only { "read-only" } else { "read and write" };
            lines.push(format!("export {} = {} ({mode})", export.name, export.dir.display()));
        }
        if args.export.is_empty() {
            lines.push(
                "export dev only (tw://host/dev/null, tw://host/dev/zero); --export NAME=DIR serves a directory".into(),
            );
        }
        lines.push(format!("public key {public_key}"));
        Ok(TransferService {
            addresses: daemon.addrs().into_iter().map(Address::Tcp).collect(),
            lines,
            public_key,
            authorized_keys: args.authorized_keys.clone(),
            exports: args.export.clone(),
            stopper: daemon.stopper(),
            daemon: Some(daemon),
            thread: None,
        })
    }
}

impl Service for TransferService {
    fn announcement(&self) -> Announcement {
        Announcement {
            addresses: vec![("listening", "listening on", self.addresses.clone())],
            facts: vec![("public_key", self.public_key.clone())],
            lines: self.lines.clone(),
        }
    }

    fn run(&mut self, ended: Ended) {
        let Some(daemon) = self.daemon.take() else { return };
        self.thread = Some(std::thread::spawn(move || {
            // A panic is an end, too.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| daemon.run()));
            ended(
                result.map_err(|_| "the transfer service has panicked".into()).and_then(|run| run.map_err(Into::into)),
            );
        }));
    }

    fn reload(&self) -> Result<(), Box<dyn Error>> {
        if let Some(path) = &self.authorized_keys {
            let failed = |e: Vec<AuthError>| {
                format!("cannot reload the authorized keys, keeping the previous ones: {}", lines(&e))
            };
            self.stopper.set_authorized(load_authorized(path, &self.exports).map_err(failed)?);
            thruway_cli::say_error!("thruway serve: reloaded the authorized keys in {}", path.display());
        }
        Ok(())
    }

    fn register(&self, registry: &Registry) -> Result<Vec<Registered>, RegisterError> {
        const SESSIONS: Description =
            Description { name: "thruway_transfer_sessions", help: "Sessions of copies that are being served." };
        let stopper = self.stopper.clone();
        let read = move || i64::try_from(stopper.sessions()).unwrap_or(i64::MAX);
        Ok(vec![registry.gauge_of(SESSIONS, &[], read)?])
    }

    fn statistics(&self) -> Vec<String> {
        vec![format!("RFTP: {} sessions", self.stopper.sessions())]
    }

    fn close(&self) {
        self.stopper.stop();
    }

    fn shut_down(&mut self) -> Result<(), Box<dyn Error>> {
        self.close();
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| "the transfer service has panicked")?;
        }
        Ok(())
    }
}

/// The transfer service.
pub(super) struct TransferFactory;

impl ServiceFactory for TransferFactory {
    fn check(&self, args: &ServeArgs) -> Vec<Mistake> {
        check(args)
    }

    fn errors(&self, args: &ServeArgs) -> Vec<Mistake> {
        let mut errors = Vec::new();
        for export in &args.export {
            let error = check_exports(std::slice::from_ref(export)).err();
            errors.extend(error.map(|e| (format!("export '{}'", export.name), e.to_string())));
        }
        if let Some(path) = &args.authorized_keys
            && let Err(all) = load_authorized(path, &args.export)
        {
            errors.extend(all.into_iter().map(|e| ("--authorized-keys".into(), e.to_string())));
        }
        if let Some(path) = &args.key
            && let Err(e) = KeyPair::load(path)
        {
            errors.push(("--key".into(), e.to_string()));
        }
        errors
    }

    /// Sessions have a limit of their own.
    fn listeners(&self, _args: &ServeArgs) -> Vec<(&'static str, ConnectionKind)> {
        Vec::new()
    }

    fn prepare<'a>(&self, args: &'a ServeArgs) -> Result<Option<Start<'a>>, String> {
        if !super::wants_transfer(args) {
            return Ok(None);
        }
        // Made when there is none, or only read: no affair of a daemon that serves already.
        let credentials = credentials(args)?;
        if let Err(error) = keys::use_journal_secret() {
            tracing::warn!(%error, "cannot keep the secret of journals: interrupted copies start over when the daemon was restarted");
        }
        Ok(Some(Box::new(|| Ok(Box::new(TransferService::start(args, credentials)?)))))
    }
}

/// Mistakes of the options: names of exports, and a daemon that is open to everybody unasked.
fn check(args: &ServeArgs) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    for (at, export) in args.export.iter().enumerate() {
        let what = format!("export '{}'", export.name);
        let is_second = args.export[..at].iter().any(|earlier| earlier.name == export.name);
        if let Err(error) = check_export_names(std::slice::from_ref(export)) {
            mistakes.push((what, error.to_string()));
        } else if is_second {
            let error = StartError::DuplicateExport(export.name.clone());
            mistakes.push((again(&what), error.to_string()));
        }
    }
    let has_keys = args.authorized_keys.is_some() || args.secret_from_stdin;
    if !args.anonymous && !is_loopback_only(&args.listen) && !has_keys {
        let error = "listening beyond this machine needs --authorized-keys FILE (or --anonymous, to serve anybody)";
        mistakes.push(("--listen".into(), error.into()));
    }
    mistakes
}

/// Starts to listen.
fn start(args: &ServeArgs, credentials: Credentials) -> Result<Daemon, String> {
    let mut listen = args.listen.clone();
    if listen.is_empty() && args.secret_from_stdin {
        let ip = crate::ssh::reached_at().unwrap_or(std::net::Ipv4Addr::UNSPECIFIED.into());
        listen.push(SocketAddr::new(ip, 0));
    }
    if listen.is_empty() {
        listen.push(SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)));
    }
    let authorized = match &args.authorized_keys {
        Some(path) => load_authorized(path, &args.export).map_err(|e| lines(&e))?,
        None => AuthorizedKeys::default(),
    };
    let mut exports = args.export.clone();
    // Whoever started us through ssh may do here what ssh lets it do: its paths mean what they mean to this user.
    exports.iter_mut().for_each(|export| export.unconfined = args.secret_from_stdin);
    // The option is one of all services. Strangers would have more rights than a key with options.
    let anonymous = args.anonymous && args.authorized_keys.is_none();
    // The user that we run as needs no key on this machine, unless keys are insisted on.
    let local = args.authorized_keys.is_none() && !args.secret_from_stdin;
    let fabric = fabric(args.provider, &listen)?;
    Daemon::start(Config {
        listen,
        exports,
        credentials,
        authorized,
        anonymous,
        local,
        require_encryption: args.require_encryption,
        require_verification: args.require_verification,
        max_sessions: args.max_sessions as usize,
        large_files: None,
        block_len_max: 16 << 20,
        blocks: args.depth as usize,
        once: args.once,
        fabric,
    })
    .map_err(|e| e.to_string())
}
