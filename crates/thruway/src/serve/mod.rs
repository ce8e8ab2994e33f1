//! `thruway serve`: the daemon.

mod block;
mod config;
mod confine;
mod control;
mod factory;
mod nfs;
mod open_files;
mod transfer;
mod user;

use self::block::BlockArgs;
use self::factory::FACTORIES;
use self::nfs::NfsArgs;
use self::user::User;
use crate::{Cli, Command};
use clap::{Args, Parser, ValueEnum};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, mpsc};
use std::time::SystemTime;
use thruway_cli::{Common, Failed, print};
use thruway_engine::limits;
use thruway_fabric::{Provider, iwarp, shm, verbs};
use thruway_metrics::{Description, RegisterError, Registered, Registry};
use thruway_options::{OptionKind, Required, Schema, Set};
use thruway_server::Address;
use thruway_server::service::{Announcement, Service};
use thruway_transfer::access::AuthorizedKeys;
use thruway_transfer::daemon::Export;

/// Below the options in the help.
static AFTER_HELP: LazyLock<String> = LazyLock::new(|| HELP.replace("ITEMS", &items()));

/// The options of disks, shares and rules, and the layers of disks.
fn items() -> String {
    let mut layers = String::new();
    for kind in thruway_block::layer::KINDS {
        thruway_options::describe(&mut layers, kind.syntax, kind.about);
    }
    format!(
        "Options of a disk, after its path:\n{}\nLayers of a disk, each on what stands to its left:\n{layers}\n\
         Options of a share, after its directory:\n{}\n\
         Rules of a share are written CLIENTS[+OPTION]...: an address, a network like 192.0.2.0/24, or\n\
         cert:NAME of a certificate. Their options:\n{}",
        thruway_block::export::OPTIONS.help(),
        nfs::SHARE.help(),
        thruway_nfs::rules::OPTIONS.help()
    )
}

const HELP: &str = "Examples:
  thruway serve --export data=/srv/data
  thruway serve --listen 0.0.0.0:7117 --export data=/srv/data:ro \\
      --key /etc/thruway/host --authorized-keys /etc/thruway/authorized_keys
  thruway serve --block disk=/srv/disk.img --nbd 127.0.0.1:10809
  thruway serve --block disk=/srv/disk.img --iscsi 192.0.2.1:3260 --chap /etc/thruway/chap
  thruway serve --block scratch=mem:1G --nbd unix:/run/scratch.sock
  thruway serve --share data=/srv/data,allow=192.0.2.0/24 --nfs 192.0.2.1:2049 --anonymous
  thruway serve --config /etc/thruway/thruway.toml

A daemon serves the keys in --authorized-keys. Without that option it serves, on
loopback only, the user it runs as and root. --anonymous disables authentication,
except that of copies where --authorized-keys is given.
SIGHUP reloads the keys, certificates, and who may use which share; SIGUSR1 prints
statistics. Owners, set-id bits, devices
and privileged attributes are taken only from that user and from keys marked
'privileged'. The export 'dev' always exists: tw://host/dev/null discards
what is sent, tw://host/dev/zero is endless.

ITEMS
A daemon that is given disks or shares but neither --listen nor --export serves only those.";

/// Arguments of `thruway serve`.
#[derive(Args)]
#[command(
    args_override_self = true,
    after_help = AFTER_HELP.clone()
)]
pub(crate) struct ServeArgs {
    /// Read options and exports from a TOML file; lists given here are appended, single values override the file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Validate the options and the configuration file, then exit
    #[arg(long)]
    check: bool,
    /// Print the page of the book about the configuration file
    #[arg(long, hide = true)]
    config_reference: bool,
    /// Address to listen on; may be repeated (port 0: any; the address is printed)
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_address)]
    listen: Vec<SocketAddr>,
    /// Serve over iWARP in user space and plain TCP, or over the RDMA device at the address
    #[arg(long, value_enum, default_value_t = ServeProvider::Iwarp)]
    provider: ServeProvider,
    /// Directory to serve, read-only with :ro (:rw is the default); may be repeated
    #[arg(long, value_name = "NAME=DIR[:ro]", value_parser = parse_export)]
    export: Vec<Export>,
    /// The daemon's private key [default: ~/.config/thruway/host, created if missing; a temporary one if
    /// listening only on loopback]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// File of the public keys that may use the daemon
    #[arg(long, value_name = "FILE")]
    authorized_keys: Option<PathBuf>,
    /// Serve anybody, without authentication; with --authorized-keys, copies still need a key
    #[arg(long)]
    anonymous: bool,
    /// Refuse copies without encryption
    #[arg(long)]
    require_encryption: bool,
    /// Refuse copies without verification
    #[arg(long)]
    require_verification: bool,
    /// Drop privileges to this user after opening ports, devices and keys
    #[arg(long, value_name = "NAME", value_parser = User::parse)]
    user: Option<User>,
    /// Disable the Landlock sandbox (Linux 6.2 or later)
    #[arg(long)]
    no_landlock: bool,
    /// Answer programs of this user and of root on this Unix socket: statistics, stop (JSON lines; see the book's page on serving)
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Maximum concurrent sessions
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    max_sessions: u32,
    /// Number of blocks in each session's buffer pool; more on a long path
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(4..=1024))]
    depth: u32,
    /// Exit after one session
    #[arg(long)]
    once: bool,
    /// Directory for what outlives the daemon: persistent reservations; the key of NFS handles, without which clients mount again,
    /// and which NFS clients had files open [default: /var/lib/thruway for root, ~/.local/state/thruway for others]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Maximum concurrent connections of each protocol of disks and shares; fewer if the limit on open files is low
    #[arg(long, value_name = "N", default_value_t = MAX_CONNECTIONS, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,
    #[command(flatten)]
    block: BlockArgs,
    #[command(flatten)]
    nfs: NfsArgs,
    /// Read a shared secret from standard input, answer with the address on standard output
    #[arg(long, hide = true)]
    secret_from_stdin: bool,
}

/// Default of `--max-connections`.
const MAX_CONNECTIONS: u32 = 1024;

impl ServeArgs {
    /// Directory for state that survives restarts of the daemon.
    fn state(&self) -> Option<PathBuf> {
        self.state.clone().or_else(default_state)
    }
}

/// The default of `--state` for this user.
fn default_state() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/var/lib/thruway".into());
    }
    crate::directories::state()
}

/// What a daemon listens with.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ServeProvider {
    /// iWARP in user space, and plain TCP, on one port; shared memory for processes of this host
    Iwarp,
    /// The RDMA device that serves the address
    Verbs,
}

/// What serves these addresses.
fn fabric(provider: ServeProvider, listen: &[SocketAddr]) -> Result<Provider, String> {
    Ok(match provider {
        // A client that wants MPA's CRC asks for it.
        ServeProvider::Iwarp => {
            let shm = Some(shm::Config::default());
            iwarp::Config { crc: false, shm, ..iwarp::Config::default() }.into()
        }
        ServeProvider::Verbs => rdma_device(listen)?.into(),
    })
}

/// The device that serves all these addresses.
fn rdma_device(listen: &[SocketAddr]) -> Result<verbs::Config, String> {
    let at = |addr: &SocketAddr| verbs::Config::at(addr.ip()).map_err(|e| e.to_string());
    let first = at(&listen[0])?;
    for addr in &listen[1..] {
        if at(addr)?.device != first.device {
            return Err(format!("{addr} is served by another RDMA device than {}; start a daemon for each", listen[0]));
        }
    }
    Ok(first)
}

/// Parses an address to listen on. The error suggests a valid form of incomplete addresses, such as a port alone.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        let example = match (text.parse::<std::net::IpAddr>(), text.trim_start_matches(':').parse::<u16>()) {
            (Ok(ip), _) => SocketAddr::new(ip, crate::endpoint::DEFAULT_PORT).to_string(),
            (_, Ok(port)) => format!("127.0.0.1:{port}, or 0.0.0.0:{port} for all addresses"),
            _ => match text.strip_prefix("localhost:") {
                Some(port) => format!("127.0.0.1:{port}"),
                None => "127.0.0.1:7117 or [::1]:7117".into(),
            },
        };
        format!("invalid address (expected ADDR:PORT, such as {example})")
    })
}

/// The options of a directory for copies.
const EXPORT: Schema<Export> = Schema {
    what: "export",
    required: &[
        Required { key: "name", about: "Its name for clients" },
        Required { key: "dir", about: "The directory to serve" },
    ],
    hints: &[],
    options: &[OptionKind {
        name: "ro",
        key: "read-only",
        set: Set::Flag { set: |export, value| export.read_only = value, off: Some("rw") },
        get: |export| export.read_only.to_string(),
        default: "false",
        about: "Read-only",
        is_reloaded: false,
    }],
};

fn parse_export(text: &str) -> Result<Export, String> {
    let (name, dir) = text.split_once('=').ok_or("expected NAME=DIR or NAME=DIR:ro")?;
    let mut export = new_export(name, dir)?;
    // A directory may have a colon in its name.
    if let Some((dir, word)) = dir.rsplit_once(':')
        && EXPORT.set_word(&mut export, word).is_ok_and(|is_option| is_option)
    {
        export = Export { dir: new_export(name, dir)?.dir, ..export };
    }
    Ok(export)
}

fn new_export(name: &str, dir: &str) -> Result<Export, String> {
    if dir.is_empty() {
        return Err(
            "the export's directory is missing; write NAME=DIR, or dir = \"DIR\" in the configuration file".into()
        );
    }
    Ok(Export { name: name.into(), dir: dir.into(), read_only: false, unconfined: false })
}

/// Runs the daemon until it is told to stop.
pub(crate) fn run(args: &ServeArgs, common: &Common) -> Result<(), Failed> {
    if args.config_reference {
        thruway_cli::say!("{}", config::reference().trim_end());
        return Ok(());
    }
    let merged;
    let args = match &args.config {
        Some(path) => {
            merged = with_config(path).map_err(|mistakes| mistakes.tell())?;
            &merged
        }
        None => args,
    };
    let mistakes = usage_mistakes(args);
    if args.check {
        return check(args, common, mistakes);
    }
    if !mistakes.is_empty() {
        return Err(Failed::usage("serve", located(args, mistakes)));
    }
    let done = serve(args, common);
    done.map_err(|message| match limits::remedy(&message) {
        Some(remedy) => Failed::operation("serve", format!("{message}; {remedy}")),
        None => Failed::operation("serve", message),
    })
}

/// A part of the configuration (`--option`, `export 'name'`) and the mistake in it.
type Mistake = (String, String);

/// Mistakes that the options alone show: without effect, contradictory, or open to everybody unasked.
fn usage_mistakes(args: &ServeArgs) -> Vec<Mistake> {
    let mut mistakes: Vec<Mistake> = FACTORIES.iter().flat_map(|factory| factory.check(args)).collect();
    mistakes.extend(shared_disks(args));
    mistakes
}

/// Mistakes for messages: a line for each, with file and line number if it is in the configuration file.
fn located(args: &ServeArgs, mut mistakes: Vec<Mistake>) -> String {
    let mut told = std::collections::HashSet::new();
    mistakes.retain(|(_, mistake)| told.insert(mistake.clone()));
    let file = args.config.as_ref().and_then(|path| Some((path, read_config(path).ok()?)));
    let line = |what: &str| file.as_ref().and_then(|(path, file)| Some((path, file.line(what)?)));
    mistakes.sort_by_key(|(what, _)| line(what).map_or(usize::MAX, |(_, line)| line));
    let lines = mistakes.iter().map(|(what, mistake)| match line(what) {
        Some((path, line)) => format!("{}:{line}: {mistake}", path.display()),
        None => mistake.clone(),
    });
    lines.collect::<Vec<_>>().join("\nthruway serve: ")
}

/// Shares with the file of a cached disk in their directory: clients of the share and of the disk would not see
/// each other's writes. Compares canonical paths, so other hard links of the file are not found.
fn shared_disks(args: &ServeArgs) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    for disk in args.block.block.iter().filter(|disk| disk.layers.iter().any(|layer| layer.config.role().caches)) {
        for path in disk.source.paths() {
            let is_in = |dir: &Path| real(path).is_some_and(|path| real(dir).is_some_and(|dir| path.starts_with(dir)));
            if let Some(share) = args.nfs.share.iter().find(|share| share.directory().is_some_and(is_in)) {
                let mistake = format!(
                    "block export '{}': {} is in the directory of share '{}', whose clients would not see the disk's cache; \
                     move the file, or leave out cache=",
                    disk.name,
                    path.display(),
                    share.name()
                );
                mistakes.push((format!("disk '{}'", disk.name), mistake));
            }
        }
    }
    mistakes
}

/// What is wrong with a configuration file, or with the options that it makes with those of the command line.
enum Mistakes {
    Unreadable(String),
    File(String),
    Options(clap::Error),
}

impl Mistakes {
    /// Tells them, and ends the program if the options are wrong.
    fn tell(self) -> Failed {
        match self {
            Mistakes::Unreadable(why) => thruway_cli::say_error!("thruway serve: {why}"),
            Mistakes::File(mistakes) => thruway_cli::say_error!("{mistakes}"),
            Mistakes::Options(error) => error.exit(),
        }
        Failed::Usage
    }
}

impl std::fmt::Display for Mistakes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Mistakes::Unreadable(mistakes) | Mistakes::File(mistakes) => f.write_str(mistakes),
            Mistakes::Options(error) => error.render().fmt(f),
        }
    }
}

/// Reads the configuration file, without the options of the command line.
fn read_config(path: &Path) -> Result<config::File, Mistakes> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|e| Mistakes::Unreadable(format!("{}: {e}", path.display())))?;
    config::read(path, &text).map_err(Mistakes::File)
}

/// The arguments with what the configuration file says.
fn with_config(path: &Path) -> Result<ServeArgs, Mistakes> {
    let file = read_config(path)?;
    // The options of the file precede those of the command line, which take effect in case of a conflict.
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let verb = args.iter().position(|arg| arg == "serve").expect("the command that is running");
    args.splice(verb + 1..verb + 1, file.options);
    let Command::Serve(mut merged) = Cli::try_parse_from(args).map_err(Mistakes::Options)?.command else {
        unreachable!("the command that is running")
    };
    merged.export.splice(0..0, file.exports);
    merged.block.block.splice(0..0, file.disks);
    merged.nfs.share.splice(0..0, file.shares);
    Ok(*merged)
}

fn serve(args: &ServeArgs, common: &Common) -> Result<(), String> {
    limits::raise_open_files();
    let signals = Signals::new([SIGHUP, SIGINT, SIGTERM, SIGUSR1]).map_err(|e| e.to_string())?;
    // A handled SIGXFSZ does not end the daemon: a write beyond the limit on the size of files fails with EFBIG.
    signal_hook::flag::register(SIGXFSZ, std::sync::Arc::default()).map_err(|e| e.to_string())?;
    open_files::divide(args);
    let control = args.control.as_deref().map(|path| control::Bound::new(path, args.user.is_some())).transpose()?;
    let mut starts = Vec::new();
    for factory in FACTORIES {
        starts.extend(factory.prepare(args)?);
    }
    // What ssh starts for a user may open what the user may.
    // Landlock knows files by their paths, and a file that is found by its handle may have none.
    if !args.no_landlock && !args.secret_from_stdin && args.nfs.share.is_empty() {
        confine::confine(args)?;
    }
    let services = starts.into_iter().map(|start| start()).collect::<Result<Vec<_>, _>>()?;
    open_files::check(args)?;
    // No session has begun yet; disks are open, and clients of theirs name nothing that would be opened.
    become_user(args)?;
    supervise(services, signals, control, args, common)
}

/// What happens to a daemon.
enum Event {
    Signal(i32),
    /// A program has asked for the end by the control socket.
    Stop,
    /// The ssh connection that started the daemon has ended.
    StdinClosed,
    /// A service has ended by itself.
    Ended(Result<(), String>),
}

/// Runs the services until a signal stops the daemon or one of them ends.
fn supervise(
    mut services: Vec<Box<dyn Service>>,
    mut signals: Signals,
    control: Option<control::Bound>,
    args: &ServeArgs,
    common: &Common,
) -> Result<(), String> {
    let (events, happened) = mpsc::channel();
    for service in &mut services {
        let events = events.clone();
        service.run(Box::new(move |result| {
            let _ = events.send(Event::Ended(result.map_err(|e| e.to_string())));
        }));
    }
    let registry = Registry::default();
    let _own = register(&registry).map_err(|e| e.to_string())?;
    let mut registered = Vec::new();
    for service in &services {
        registered.extend(service.register(&registry).map_err(|e| e.to_string())?);
    }
    let told = events.clone();
    let stop = move || _ = told.send(Event::Stop);
    let _control = control.map(|control| control.serve(registry, stop)).transpose()?;
    if args.secret_from_stdin {
        let events = events.clone();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            events.send(Event::StdinClosed)
        });
    }
    // A failure ends the daemon in order: services flush disks and remove sockets.
    if let Err(error) = announce(&services, args, common) {
        let _ = events.send(Event::Ended(Err(format!("standard output: {error}"))));
    }
    std::thread::spawn(move || signals.forever().try_for_each(|signal| events.send(Event::Signal(signal))));
    let mut started = args.config.as_ref().and_then(|path| Some((path.as_path(), read_config(path).ok()?)));
    let mut result = Ok(());
    for event in happened {
        match event {
            Event::Signal(SIGHUP) => reload(&services, &mut started),
            Event::Signal(SIGUSR1) => {
                let lines = services.iter().flat_map(|service| guarded(|| service.statistics()).unwrap_or_default());
                lines.for_each(|line| thruway_cli::say_error!("{line}"));
            }
            Event::Signal(_) | Event::Stop | Event::StdinClosed => break,
            Event::Ended(how) => {
                result = how;
                break;
            }
        }
    }
    for service in &services {
        result = result.and(guarded(|| service.close()));
    }
    for service in &mut services {
        result = result.and(guarded(|| service.shut_down().map_err(|e| e.to_string())).flatten());
    }
    result
}

/// Registers the metrics of the daemon itself.
fn register(registry: &Registry) -> Result<[Registered; 2], RegisterError> {
    const START: Description =
        Description { name: "thruway_start_time_seconds", help: "Time of the start, in seconds since 1970." };
    const BUILD: Description = Description { name: "thruway_build_info", help: "Version of the program." };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let start = i64::try_from(now).unwrap_or(i64::MAX);
    Ok([
        registry.gauge_of(START, &[], move || start)?,
        registry.gauge_of(BUILD, &[("version", env!("CARGO_PKG_VERSION"))], || 1)?,
    ])
}

/// Reloads the services. Reports applied changes, changes that need a restart, and mistakes. `started` is the
/// configuration file and its content at the start of the daemon.
fn reload(services: &[Box<dyn Service>], started: &mut Option<(&Path, config::File)>) {
    let mut reported = Vec::new();
    for service in services {
        if let Err(error) = guarded(|| service.reload().map_err(|e| e.to_string())).flatten() {
            thruway_cli::say_error!("thruway serve: not reloaded: {error}");
            reported.push(error);
        }
    }
    if let Some((path, earlier)) = started {
        match read_config(path) {
            Ok(now) => {
                for (change, line) in now.changes_since(earlier) {
                    let line = line.map_or(String::new(), |line| format!(":{line}"));
                    thruway_cli::say_error!(
                        "thruway serve: {}{line}: {change} changed: needs a restart",
                        path.display()
                    );
                }
            }
            Err(mistakes) => {
                let mistakes = mistakes.to_string();
                // The file service reads the file too.
                if !reported.iter().any(|error| error.contains(&mistakes)) {
                    thruway_cli::say_error!("thruway serve: not reloaded: {mistakes}");
                    reported.push(mistakes);
                }
            }
        }
    }
    let end = if !reported.is_empty() { "with mistakes; items that were not reloaded are unchanged" } else { "done" };
    thruway_cli::say_error!("thruway serve: reload {end}");
}

/// Calls a service. Its panic keeps no other from being closed, nor disks from being flushed.
fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call))
        .map_err(|_| "internal error: a service panicked".into())
}

/// Gives up root, if that is asked for, and makes sure that what is opened later can be opened without.
fn become_user(args: &ServeArgs) -> Result<(), String> {
    let Some(user) = &args.user else { return Ok(()) };
    user.become_it()?;
    if let Some(path) = &args.authorized_keys
        && let Err(e) = AuthorizedKeys::load(path)
    {
        return Err(format!("{}: the user must be able to read it, for SIGHUP", transfer::lines(&e)));
    }
    Ok(())
}

/// Reports everything that would keep the daemon from starting, after the mistakes of the options.
fn check(args: &ServeArgs, common: &Common, usage: Vec<Mistake>) -> Result<(), Failed> {
    let is_usage = !usage.is_empty();
    let mut mistakes = usage;
    mistakes.extend(FACTORIES.iter().flat_map(|factory| factory.errors(args)));
    if mistakes.is_empty() {
        if !common.quiet {
            let counts =
                [(args.export.len(), "exports"), (args.block.block.len(), "disks"), (args.nfs.share.len(), "shares")];
            let counts: Vec<String> = counts.iter().map(|(count, what)| format!("{count} {what}")).collect();
            thruway_cli::say_error!("thruway serve: the configuration is valid: {}", counts.join(", "));
        }
        return Ok(());
    }
    let mistakes = located(args, mistakes);
    Err(if is_usage { Failed::usage("serve", mistakes) } else { Failed::operation("serve", mistakes) })
}

/// Whether there is more to serve than disks and shares.
fn wants_transfer(args: &ServeArgs) -> bool {
    (args.block.block.is_empty() && args.nfs.share.is_empty())
        || !args.listen.is_empty()
        || !args.export.is_empty()
        || args.secret_from_stdin
}

fn announce(services: &[Box<dyn Service>], args: &ServeArgs, common: &Common) -> std::io::Result<()> {
    let announcements: Vec<Announcement> = services.iter().map(|service| service.announcement()).collect();
    let all = || announcements.iter().flat_map(|a| &a.addresses);
    if args.secret_from_stdin {
        // The one line that the ssh client waits for.
        let port = all().flat_map(|(_, _, addresses)| addresses).find_map(Address::port).unwrap_or(0);
        return match crate::ssh::reached_at() {
            Some(ip) => print::try_say(format_args!("THRUWAY 1 {port} {ip}")),
            None => print::try_say(format_args!("THRUWAY 1 {port}")),
        };
    }
    if common.json {
        let mut object = serde_json::Map::new();
        // Programs may count on these two.
        object.insert("listening".into(), serde_json::json!([]));
        object.insert("public_key".into(), "".into());
        for (key, _, addresses) in all() {
            let addresses: Vec<String> = addresses.iter().map(Address::to_string).collect();
            object.insert((*key).into(), addresses.into());
        }
        for (key, value) in announcements.iter().flat_map(|a| &a.facts) {
            object.insert((*key).into(), value.as_str().into());
        }
        print::try_say(format_args!("{}", serde_json::Value::Object(object)))?;
    } else if !common.quiet {
        for announcement in &announcements {
            for (_, name, addresses) in &announcement.addresses {
                addresses.iter().for_each(|address| thruway_cli::say_error!("{name} {address}"));
            }
            announcement.lines.iter().for_each(|line| thruway_cli::say_error!("{line}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_panics_is_an_error() {
        assert_eq!(guarded(|| 1), Ok(1));
        assert!(guarded(|| -> i32 { panic!("as it is meant to") }).is_err());
    }

    #[test]
    fn exports_are_read_with_their_mode() {
        let export = |t: &str| parse_export(t).map(|e| (e.name, e.dir, e.read_only));
        assert_eq!(export("d=/srv"), Ok(("d".into(), "/srv".into(), false)));
        assert_eq!(export("d=/srv:ro"), Ok(("d".into(), "/srv".into(), true)));
        assert_eq!(export("d=/srv:rw"), Ok(("d".into(), "/srv".into(), false)));
        assert!(export("/srv").is_err() && export("d=").is_err() && export("d=:ro").is_err());
    }
}
