//! `thruway relay`: carries the connections of programs that run under `thruway run` to other hosts.

use crate::{directories, keys};
use clap::{Args, ValueEnum};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use thruway_cli::{Common, Failed};
use thruway_engine::units;
use thruway_fabric::{Provider, iwarp, verbs};
use thruway_relay::{Config, Error, Peers, Relay};

/// The port of relays, unless another one is named.
pub(crate) const PORT: u16 = 7118;
/// How long a relay that `thruway run` has started stays when no program uses it.
const UNUSED_MAX: Duration = Duration::from_secs(10);
/// How long `thruway run` waits for the relay that it starts.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// What carries connections between relays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RelayProvider {
    /// An RDMA device
    Verbs,
    /// RDMA in user space over TCP: to try it out, it is no faster than TCP
    Iwarp,
}

impl RelayProvider {
    fn name(self) -> &'static str {
        match self {
            RelayProvider::Verbs => "verbs",
            RelayProvider::Iwarp => "iwarp",
        }
    }
}

/// How a relay reaches others and proves who it is: options of `thruway relay`, and of `thruway run`, which starts one.
#[derive(Args, Clone)]
pub(crate) struct RelayOptions {
    /// TCP port at which relays reach each other
    #[arg(long, value_name = "PORT", default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) relay_port: u16,
    /// What carries connections between relays [default: verbs, or what the relay that runs already has]
    #[arg(long, value_enum)]
    provider: Option<RelayProvider>,
    /// RDMA device, such as mlx5_0, rather than the first one
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// The relay's own secret key [default: ~/.config/thruway/id]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Public keys of the relays to trust, one a line [default: ~/.config/thruway/peers]
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Do not encrypt between relays, where the other one does not either
    #[arg(long)]
    plaintext: bool,
}

impl RelayOptions {
    /// The first option that has no effect where no relay is wanted.
    pub(crate) fn any(&self) -> Option<&'static str> {
        let all = [
            ("--provider", self.provider.is_some()),
            ("--device", self.device.is_some()),
            ("--key", self.key.is_some()),
            ("--peers", self.peers.is_some()),
            ("--plaintext", self.plaintext),
            ("--relay-port", self.relay_port != PORT),
        ];
        all.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name)
    }

    fn provider(&self) -> RelayProvider {
        self.provider.unwrap_or(RelayProvider::Verbs)
    }

    /// Refuses to use a relay that is not what these options ask for.
    fn agree_with(&self, about: &thruway_relay::About) -> Result<(), String> {
        let differs = |what: String| {
            let port = self.relay_port;
            Err(format!("the relay that runs already at port {port} {what}: end it, or use another --relay-port"))
        };
        if !about.encrypts && !self.plaintext {
            return differs("was started with --plaintext, and this program was not".to_owned());
        }
        if let Some(provider) = self.provider.filter(|provider| provider.name() != about.provider) {
            return differs(format!("has --provider {}, not {}", about.provider, provider.name()));
        }
        if let Some(device) = self.device.as_ref().filter(|device| **device != about.device) {
            return differs(format!("was not started with --device {device}"));
        }
        if let Some(path) = &self.key {
            let key = keys::identity(Some(path))?.public().to_string();
            if key != about.key {
                return differs(format!("has the key {}, not that of {}", about.key, path.display()));
            }
        }
        if let Some(peers) = &self.peers
            && std::path::absolute(peers).is_ok_and(|peers| peers.display().to_string() != about.peers)
        {
            return differs(format!("trusts the keys in {}, not in {}", about.peers, peers.display()));
        }
        Ok(())
    }
}

/// Arguments of `thruway relay`.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  thruway keygen                      makes this relay's key; add the public half to the other host's\n                                      ~/.config/thruway/peers, and the other's to yours\n  thruway relay                       on both hosts; then\n  thruway run --remote -- iperf3 -s   on one, and\n  thruway run --remote -- iperf3 -c HOST\n\n'thruway run --remote' starts a relay by itself where there is none."
)]
pub(crate) struct RelayArgs {
    #[command(flatten)]
    options: RelayOptions,
    /// Address to listen at, rather than all; repeat for more
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<IpAddr>,
    /// Bytes on their way in each direction of a connection, a power of two from 4K to 4M
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, default_value = "256K")]
    ring: u64,
    /// Microseconds for which the relay looks again and again before it sleeps
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    spin: u32,
    /// Directory of the boards on which programs find each other, as in a policy
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    board: PathBuf,
    /// End when no program has used the relay for some seconds
    #[arg(long)]
    until_unused: bool,
}

impl RelayArgs {
    /// Whether a program has started it, and it ends with the last one.
    pub(crate) fn is_in_background(&self) -> bool {
        self.until_unused
    }
}

/// Runs `thruway relay`.
pub(crate) fn run(args: &RelayArgs, common: &Common) -> Result<(), Failed> {
    let failed = |why: String| Failed::operation("relay", why);
    let ring = crate::run::ring_size(args.ring).map_err(|why| Failed::usage("relay", format!("--ring: {why}")))?;
    let options = &args.options;
    let path = options.key.clone().unwrap_or_else(keys::identity_path);
    if !path.exists() {
        return Err(failed(format!("there is no key {}: make one with 'thruway keygen'", path.display())));
    }
    let config = Config {
        port: options.relay_port,
        listen: args.listen.clone(),
        provider: match options.provider() {
            RelayProvider::Verbs => Provider::Verbs(verbs::Config { device: options.device.clone() }),
            RelayProvider::Iwarp => iwarp::Config::default().into(),
        },
        keys: keys::identity(Some(&path)).map_err(failed)?,
        peers: Peers::file(options.peers.clone().unwrap_or_else(|| directories::config().join("peers"))),
        encrypt: !options.plaintext,
        ring,
        board: args.board.clone(),
        spin: Duration::from_micros(args.spin.into()),
        until_unused: args.until_unused.then_some(UNUSED_MAX),
    };
    let relay = match Relay::open(config) {
        Ok(relay) => relay,
        // Two programs were started at once, and each has started one.
        Err(Error::Taken(_)) if args.until_unused => return Ok(()),
        Err(error @ Error::InUse(_)) => {
            return Err(failed(format!("{error}: choose another one with --relay-port, at both ends")));
        }
        Err(error) => return Err(failed(error.to_string())),
    };
    if !common.quiet && !args.until_unused {
        thruway_cli::say_error!("thruway: relay at port {}, by {}", options.relay_port, options.provider().name());
    }
    relay.run().map_err(|error| failed(error.to_string()))
}

/// Starts a relay in the background, if this user has none at the port. It stays for as long as programs use it.
pub(crate) fn ensure(options: &RelayOptions, ring: usize, board: &std::path::Path) -> Result<(), String> {
    let port = options.relay_port;
    let why = |error| format!("no relay at port {port}: {error}");
    let ask = || match thruway_relay::find(port) {
        Ok(about) => about.map(|about| options.agree_with(&about)),
        Err(error) if error.kind() == std::io::ErrorKind::QuotaExceeded => {
            thruway_cli::say_error!("thruway run: port {port}: {error}: connections to other hosts stay with TCP");
            Some(Ok(()))
        }
        Err(error) => Some(Err(why(error))),
    };
    if let Some(answer) = ask() {
        return answer;
    }
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    // What it says goes to a file: it outlives this process's standard error.
    let mut log =
        log_file(port).or_else(|_| tempfile::tempfile()).map_err(|error| format!("no temporary file: {error}"))?;
    let begin = log.metadata().map_err(|error| format!("no log: {error}"))?.len();
    let mut command = Command::new(program);
    command.args(["relay", "--until-unused", "--relay-port", &options.relay_port.to_string()]);
    command.args(["--provider", options.provider().name(), "--ring", &ring.to_string()]);
    command.arg("--board").arg(board);
    for (name, value) in [("--key", &options.key), ("--peers", &options.peers)] {
        if let Some(value) = value {
            // It works elsewhere.
            command.arg(name).arg(std::path::absolute(value).map_err(|error| error.to_string())?);
        }
    }
    if let Some(device) = &options.device {
        command.args(["--device", device]);
    }
    if options.plaintext {
        command.arg("--plaintext");
    }
    let stderr = log.try_clone().map_err(|error| error.to_string())?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).current_dir("/");
    command.env_remove("LD_PRELOAD");
    // A signal from the terminal is for the program.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().map_err(|error| format!("cannot start a relay: {error}"))?;
    let limit = Instant::now() + START_TIMEOUT;
    loop {
        // Another program may have started one at the same time.
        if let Some(answer) = ask() {
            return answer;
        }
        let ended = child.try_wait().ok().flatten();
        if ended.is_some_and(|status| !status.success()) || Instant::now() > limit {
            use std::io::{Read, Seek, SeekFrom};
            let mut text = String::new();
            let _ = log.seek(SeekFrom::Start(begin)).and_then(|_| log.read_to_string(&mut text));
            let text = text.trim().trim_start_matches("thruway: ").to_owned();
            return Err(format!("no relay: {}", if text.is_empty() { "it does not answer" } else { &text }));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes of that file after which a relay begins it again.
const LOG_MAX: u64 = 1 << 20;

/// Where a relay that a program has started says why connections stay with TCP. It is continued.
fn log_file(port: u16) -> std::io::Result<std::fs::File> {
    let path = log_path(port);
    std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
    let file = std::fs::File::options().create(true).append(true).read(true).open(path)?;
    if file.metadata()?.len() > LOG_MAX {
        file.set_len(0)?;
    }
    Ok(file)
}

/// In the user's state directory.
pub(crate) fn log_path(port: u16) -> PathBuf {
    directories::state().unwrap_or_else(|| "/var/lib/thruway".into()).join(format!("relay-{port}.log"))
}
